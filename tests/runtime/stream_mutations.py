"""Breaks the rules of streams one line at a time, to show that the recording device finds each.

Every line of the runtime that orders streams is left out or turned to another stream; what is wrong in other ways is in
``EDITS``, by its text. The result is a module of its own; the real one stays as it is.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import NamedTuple

from composable.engine import finish, passes, scheduler, step, unsharded
from tests.runtime.bench import Case, run_case
from tests.runtime.recorded import Runtime
from tests.runtime.recording import Recorder
from tests.runtime.stream_cases import CASES, SECONDARY

__all__ = ["EDITS", "Mutation", "broken_lines", "find"]

# In the order of imports.
FILES = (unsharded, finish, step, passes, scheduler)


class Mutation(NamedTuple):
    """One broken rule.

    Attributes:
        name: What is wrong.
        sources: The files of the runtime that differ.
        is_secondary: It has to be found on four ranks, two of which gather again from secondary shards.
    """

    name: str
    sources: dict[ModuleType, str]
    is_secondary: bool = False


# Every line that orders streams

# Statements that can be left out, of the streams themselves and of those that call them.
WAITS = re.compile(
    r"(self\._before_unshard\[|self\._users\[|self\._copied = self|self\._(begin_on_unshard|come_after_users)\(\)$"
    r"|self\.wait_for_copies|\S+\.(wait_event|wait_stream|synchronize)\("
    r"|\S*\bstreams\.(shards_written|resharded|meet|end_backward|wait_for_copies)\()"
)
OTHER = {"_unshard": "_reduce", "_reduce": "_unshard"}


def instead_of(line: str) -> Iterator[str]:
    """Yield what may stand in the place of a line that orders streams."""
    code = line.strip()
    indent = line[: len(line) - len(code)]
    if WAITS.match(code):
        yield f"{indent}pass"
    turned = re.search(r"_device\.stream\(self\.(\w+)\)|self\.(\w+)\.(?:record_event|wait_event|wait_stream)\(", code)
    if turned:
        own = turned[1] or turned[2]
        yield line[: line.index(f"self.{own}")] + line[line.index(f"self.{own}") :].replace(own, OTHER[own], 1)
    if "current.record_event()" in code:
        yield line.replace("current.record_event()", "self._unshard.record_event()")


# By function or line: another rule orders what the telling programs do there, too.
IN_VAIN = (
    "shards_written_at", "optimizer_stepped", "gather_for_others", "free_kept", "free_retained", "use_streams",
    "finalize", "current.wait_stream(self._unshard)",
)  # fmt: skip


def broken_lines() -> list[Mutation]:
    """Return a mutation for each line that orders streams, and for each way to break it."""
    made = []
    for module in FILES:
        lines = inspect.getsource(module).splitlines()
        function = ""
        for number, line in enumerate(lines):
            function = line.split("(")[0].split()[-1] if line.lstrip().startswith("def ") else function
            for broken in instead_of(line) if function not in IN_VAIN and line.strip() not in IN_VAIN else ():
                source = "\n".join([*lines[:number], broken, *lines[number + 1 :]])
                name = f"{module.__name__.rpartition('.')[2]}:{number + 1}: {line.strip()} -> {broken.strip()}"
                made.append(Mutation(name, {module: source}, function == "keep_secondary"))
    return made


# What is wrong in other ways


def edited(name: str, *edits: tuple[str, str]) -> Mutation:
    """Return a mutation that replaces texts, each of which is there once."""
    sources = {module: inspect.getsource(module) for module in FILES}
    changed = {}
    for old, new in edits:
        found = [module for module, source in sources.items() if old in source]
        assert len(found) == 1 and sources[found[0]].count(old) == 1, f"not there once: {old}"
        sources[found[0]] = changed[found[0]] = sources[found[0]].replace(old, new)
    return Mutation(name, changed)


GATHER = """\
            with self._device.stream(self._unshard):
                handle.begin_unshard()
"""
REDUCE = "            with self._device.stream(self._reduce):\n"
FULL = "                self._full[handle] = self._unshard.record_event()\n"
REDUCED = "                reduced = self._reduce.record_event()\n"
FREE = "        for flat in handle.buffers:\n            flat.free_buffer()\n"
ON_HOME = "            home = self._device.current_stream()\n"

# Each with a part of what has to be reported.
EDITS: Sequence[tuple[Mutation, str]] = [
    (
        edited(
            "memory is put back into the shard on the unshard stream",
            ("        if handle.bring_back():\n            self.streams.shards_written()\n", ""),
            (GATHER, GATHER.replace("handle.begin", "handle.bring_back()\n                handle.begin")),
        ),
        "not ordered after: copy_ reads on unshard",
    ),
    (
        edited(
            "a buffer from the pool of the compute stream",
            (GATHER, ON_HOME + GATHER.replace("):", "), self._device.allocating_on(home):")),
        ),
        "reuse of the buffer of",
    ),
    (
        edited(
            "a gather's event recorded before it",
            (GATHER, "            event = self._unshard.record_event()\n" + GATHER),
            (FULL, "                self._full[handle] = event\n"),
        ),
        "reads on default, not ordered after: all_gather writes on unshard",
    ),
    (
        edited(
            "a reduction's event recorded before it",
            (REDUCE, "            event = self._reduce.record_event()\n" + REDUCE),
            (REDUCED, REDUCED.replace("self._reduce.record_event()", "event")),
        ),
        "reads on default, not ordered after: scale writes on reduce",
    ),
    (
        edited(
            "a buffer freed before the forward that reads it",
            ("        following = own.next_forward\n", FREE + "        following = own.next_forward\n"),
        ),
        "use after free of the buffer of '': addmm reads on default",
    ),
    (
        edited(
            "a buffer freed before the backward that reads it",
            (
                "        if own.met_in != backward_id:\n            own.met_in",
                FREE + "        if own.met_in != backward_id:\n            own.met_in",
            ),
        ),
        "use after free of the buffer of 'blocks.2': mm reads on default",
    ),
    (
        edited(
            "a prefetch that nothing used is not waited for",
            ("        if handle.view is ParamView.GATHERING:\n            self.streams.wait_for_unshard(handle)\n", ""),
        ),
        "race of the shard of 'blocks.0': mul_.Tensor writes on default, not ordered after: all_gather reads on unshard",
    ),
    (
        edited(
            "a gradient buffer is filled again while it is reduced",
            (
                "        if gradient is not None:\n            self._free.setdefault(gradient.shape, []).append(gradient)\n",
                "",
            ),
            (
                "        self._under_way.append(",
                "        self._free.setdefault(gradient.shape, []).append(gradient)\n        self._under_way.append(",
            ),
        ),
        "race of the gradient buffer of 'blocks.2': _foreach_copy_ writes on default, not ordered after: reduce_scatter writes on reduce",
    ),
    (
        edited(
            "gradient buffers are freed while they are reduced, after an exception",
            ("            self._under_way[0][0]()\n", ""),
        ),
        "freed by the gradient buffer of",
    ),
    (
        edited(
            "a gather whose beginning was cut short is not waited for",
            ("        current.wait_stream(self._unshard)\n        handle.finish_gathers()\n", ""),
            (FULL, ""),
        ),
        "race of the buffer of",
    ),
    (
        edited(
            "one event for all streams",
            (
                "    def resharded(self) -> None:\n        current = self._device.current_stream()\n        self._before_unshard[current.stream_id] = current.record_event()\n",
                "    def resharded(self) -> None:\n        self._before_unshard = {0: self._device.current_stream().record_event()}\n",
            ),
        ),
        "reuse",
    ),
    (
        edited(
            "reductions do not say that their results lie on the host",
            ("flat.routes, flat.home.is_elsewhere", "flat.routes, False"),
        ),
        "race of a tensor: clone reads on host, not ordered after: copy_ writes on reduce",
    ),
]


# Finding


def mutated(mutation: Mutation) -> Runtime:
    """Return the classes of the broken runtime."""
    made: dict[ModuleType, ModuleType] = {}
    for module in FILES:
        own = made[module] = ModuleType(module.__name__)
        source = mutation.sources.get(module) or inspect.getsource(module)
        exec(compile(source, f"<{mutation.name}>", "exec"), own.__dict__)
        # What it has imported from the real ones before it.
        for real, broken in made.items():
            for name in real.__all__:
                if vars(own).get(name) is vars(real)[name]:
                    setattr(own, name, vars(broken)[name])
    return Runtime(made[unsharded].DeviceStreams, made[scheduler].Scheduler)


# The programs that find what is broken, the most telling first.
TELLING = (
    "train, reshard_after_forward=None",
    "a branch on a stream of its own",
    "prefetch in vain",
    "offloaded, train, reshard_after_forward=None",
    "offloaded, prefetch in vain",
    "empty and fill single layers",
    "unshard by hand",
    "exception in a gather",
    "exception in a reduction",
    "exception in backward",
    "exception in a branch",
    "offloaded, write frozen shards",
    "offloaded, write shards that are unsharded by hand",
    "offloaded, write shards after an unused unshard",
    "offloaded, exception in a gather",
)
# On four ranks.
TELLING_OF_SECONDARY = (
    "train, reshard_after_forward=2",
    "a forward that writes its parameters",
    "a branch before a copy",
)


def find(mutation: Mutation) -> Iterator[str]:
    """Run the telling programs on the broken runtime and yield what each of them reports."""
    runtime = mutated(mutation)
    for name in TELLING_OF_SECONDARY if mutation.is_secondary else TELLING:
        case: Case = next(case for case in (*CASES, *SECONDARY) if case.name.startswith(name))
        recorder = Recorder(keeps_memory=True)
        run_case(case, recorder, runtime)
        yield from map(str, recorder.violations)

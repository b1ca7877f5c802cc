"""Breaks the stream rules one at a time, to show that the recording device finds each.

A mutation replaces some text of the runtime. The result is a module of its own; the real one stays as it is. Text that is no longer there exactly once is an error, so this table cannot go stale.
"""

import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from composable.engine import finish, passes, scheduler, step, unsharded
from tests.runtime.bench import Case, run_case
from tests.runtime.recorded import Runtime
from tests.runtime.recording import Recorder
from tests.runtime.stream_cases import CASES, SECONDARY

__all__ = ["HARMLESS", "MUTATIONS", "OF_SECONDARY", "Mutation", "case_named", "find", "mutated_source"]


class Mutation(NamedTuple):
    """One broken rule.

    Attributes:
        name: What is wrong.
        edits: (old, new) texts in the source of the runtime.
        case: In which program it has to be found.
        finds: Part of what has to be reported.
    """

    name: str
    edits: Sequence[tuple[str, str]]
    case: str
    finds: str


def case_named(name: str) -> Case:
    """Return the first case of that name, which may leave out its options."""
    return next(case for case in (*CASES, *SECONDARY) if case.name.startswith(name))


# In the order of imports.
FILES = (unsharded, finish, step, passes, scheduler)


def mutated_source(mutation: Mutation) -> dict[ModuleType, str]:
    """Return the files of the runtime with the edits made, each where its text is."""
    sources = {module: inspect.getsource(module) for module in FILES}
    for old, new in mutation.edits:
        found = [module for module, source in sources.items() if old in source]
        assert len(found) == 1 and sources[found[0]].count(old) == 1, f"not there once: {old}"
        sources[found[0]] = sources[found[0]].replace(old, new)
    return sources


def mutated(mutation: Mutation) -> Runtime:
    """Return the classes of the broken runtime."""
    made: dict[ModuleType, ModuleType] = {}
    for module, source in mutated_source(mutation).items():
        own = made[module] = ModuleType(module.__name__)
        exec(compile(source, f"<{mutation.name}>", "exec"), own.__dict__)
        # What it has imported from the real ones before it.
        for real, broken in made.items():
            for name in real.__all__:
                if vars(own).get(name) is vars(real)[name]:
                    setattr(own, name, vars(broken)[name])
    return Runtime(made[unsharded].DeviceStreams, made[scheduler].Scheduler)


def find(mutation: Mutation) -> Recorder:
    """Run the mutation's case on the broken runtime."""
    recorder = Recorder(keeps_memory=True)
    run_case(case_named(mutation.case), recorder, mutated(mutation))
    return recorder


# Where texts occur twice, the line before makes them one.
SHARDS_WRITTEN = """\
    def shards_written(self) -> None:
        current = self._device.current_stream()
        self._before_unshard[current.stream_id] = current.record_event()
"""
RESHARDED = SHARDS_WRITTEN.replace("shards_written", "resharded")
NOTED = "self._before_unshard[current.stream_id] = "
WAIT_FOR_SHARDS = "                self._unshard.wait_event(event)\n"
GATHER = """\
            with self._device.stream(self._unshard):
                handle.begin_unshard()
"""
FULL = "                self._full[handle] = self._unshard.record_event()\n"
WAIT_FOR_FULL = "current.wait_event(full)"
WAIT_FOR_SOURCE = "        self._reduce.wait_stream(self._device.current_stream())\n        try:\n"
REDUCE = "            with self._device.stream(self._reduce):\n"
REDUCED = "                reduced = self._reduce.record_event()\n"
WAIT_FOR_REDUCED = "self._device.current_stream().wait_event(reduced)"
COMPLETE = "            step.unsharded.retain_until_backward(handle, with_graph=True)\n        step.streams.meet()\n"
COMPLETED = "                step.reshard_unless_running(handle)\n        step.streams.meet()\n"
BRING_BACK = "        if handle.bring_back():\n            self.streams.shards_written()\n"
FREE = "        for flat in handle.buffers:\n            flat.free_buffer()\n"
WRITTEN_TOO_EARLY = "mul_.Tensor writes on host, not ordered after: copy_ reads on unshard"

MUTATIONS = [
    # Before a gather
    Mutation(
        "no event after the optimizer step",
        [(SHARDS_WRITTEN, "    def shards_written(self) -> None:\n        pass\n")],
        "train, ",
        "race of the shard of '': all_gather reads on unshard, not ordered after: add_.Tensor writes on default",
    ),
    Mutation(
        "no event when a forward starts",
        [
            (
                "        if written is None:\n            self.streams.shards_written()\n",
                "        if written is None:\n            pass\n",
            )
        ],
        "train, ",
        "race of the shard of",
    ),
    *(
        Mutation(
            f"no event for the gather of: {case}",
            [("        self.step.streams.shards_written()\n\n    def reshard_hidden", "\n    def reshard_hidden")],
            case,
            "race of the shard of",
        )
        for case in ("unshard by hand", "unshard_params, reshard")
    ),
    Mutation(
        "a gather does not wait", [(WAIT_FOR_SHARDS, "                pass\n")], "train, ", "race of the shard of"
    ),
    Mutation(
        "a gather does not wait, memory",
        [(WAIT_FOR_SHARDS, "                pass\n")],
        "train, ",
        "reuse of the buffer of",
    ),
    Mutation(
        "another stream waits for the shards",
        [(WAIT_FOR_SHARDS, WAIT_FOR_SHARDS.replace("_unshard", "_reduce"))],
        "train, ",
        "race of the shard of",
    ),
    Mutation(
        "memory that was put back into the shard is announced to nobody",
        [(BRING_BACK, "        handle.bring_back()\n")],
        "empty and fill single layers",
        "race of the shard of",
    ),
    Mutation(
        "memory is put back into the shard on the unshard stream",
        [
            (BRING_BACK, ""),
            (
                GATHER,
                GATHER.replace(
                    "                handle.begin", "                handle.bring_back()\n                handle.begin"
                ),
            ),
        ],
        "empty and fill single layers",
        "not ordered after: copy_ reads on unshard",
    ),
    # A gather
    Mutation(
        "a gather on the reduce stream",
        [(GATHER, GATHER.replace("_unshard", "_reduce", 1))],
        "train, ",
        "all_gather writes on reduce",
    ),
    Mutation(
        "a buffer from the pool of the compute stream",
        [
            (
                GATHER,
                "            home = self._device.current_stream()\n"
                + GATHER.replace("):", "), self._device.allocating_on(home):"),
            )
        ],
        "train, ",
        "reuse of the buffer of",
    ),
    Mutation(
        "a gather's event recorded before it",
        [
            (GATHER, "            event = self._unshard.record_event()\n" + GATHER),
            (FULL, "                self._full[handle] = event\n"),
        ],
        "train, ",
        "reads on default, not ordered after: all_gather writes on unshard",
    ),
    Mutation(
        "a gather's event recorded on another stream",
        [(FULL, FULL.replace("_unshard", "_reduce"))],
        "train, ",
        "reads on default, not ordered after: all_gather writes on unshard",
    ),
    Mutation(
        "a gather that broke off is left alone",
        [("            self._device.current_stream().wait_stream(self._unshard)\n", "")],
        "exception in a gather",
        "race of the shard of",
    ),
    # Use
    Mutation(
        "a forward does not wait for its gather",
        [(WAIT_FOR_FULL, "pass")],
        "train, ",
        "race of the buffer of '': addmm reads on default, not ordered after: all_gather writes on unshard",
    ),
    Mutation(
        "another stream waits for the gather",
        [(WAIT_FOR_FULL, "self._unshard.wait_event(full)")],
        "train, ",
        "race of the buffer of",
    ),
    Mutation(
        "a prefetch that nothing used is not waited for",
        [("        if handle.view is ParamView.GATHERING:\n            self.streams.wait_for_unshard(handle)\n", "")],
        "prefetch in vain",
        "race of the shard of 'blocks.0': mul_.Tensor writes on default, not ordered after: all_gather reads on unshard",
    ),
    Mutation(
        "a gather whose beginning was cut short is not waited for",
        [
            ("        current.wait_stream(self._unshard)\n        handle.finish_gathers()\n", ""),
            (FULL, ""),
        ],
        "train, ",
        "race of the buffer of",
    ),
    # Reshard
    Mutation(
        "no event after the last reader of a buffer",
        [(RESHARDED, "    def resharded(self) -> None:\n        pass\n")],
        "train, ",
        "reuse of the buffer of",
    ),
    Mutation(
        "the event after the last reader on another stream",
        [(RESHARDED, RESHARDED.replace("current.record_event", "self._unshard.record_event"))],
        "train, ",
        "reuse of the buffer of",
    ),
    Mutation(
        "the event of a reshard recorded before the readers",
        [
            (WAIT_FOR_FULL, WAIT_FOR_FULL + "\n            self._early = current.record_event()"),
            (RESHARDED, RESHARDED.replace("current.record_event()", "self._early")),
        ],
        "train, ",
        "reuse of the buffer of",
    ),
    Mutation(
        "a buffer freed before the forward that reads it",
        [("        following = own.next_forward\n", FREE + "        following = own.next_forward\n")],
        "train, ",
        "use after free of the buffer of '': addmm reads on default",
    ),
    Mutation(
        "a buffer freed before the backward that reads it",
        [
            (
                "        if own.met_in != backward_id:\n            own.met_in",
                FREE + "        if own.met_in != backward_id:\n            own.met_in",
            )
        ],
        "train, ",
        "use after free of the buffer of 'blocks.2': mm reads on default",
    ),
    # Reductions
    Mutation(
        "a reduction does not wait for the gradients",
        [(WAIT_FOR_SOURCE, "        try:\n")],
        "train, ",
        "race of the gradient buffer of 'blocks.2': reduce_scatter writes on reduce, not ordered after: _foreach_copy_ writes on default",
    ),
    Mutation(
        "another stream waits for the gradients",
        [(WAIT_FOR_SOURCE, WAIT_FOR_SOURCE.replace("_reduce", "_unshard"))],
        "train, ",
        "race of the gradient buffer of",
    ),
    Mutation(
        "a reduction on the unshard stream",
        [(REDUCE, REDUCE.replace("_reduce", "_unshard"))],
        "train, ",
        "race of the gradient buffer of 'blocks.2': reduce_scatter writes on unshard",
    ),
    Mutation(
        "a reduction's event recorded before it",
        [
            (REDUCE, "            event = self._reduce.record_event()\n" + REDUCE),
            (REDUCED, REDUCED.replace("self._reduce.record_event()", "event")),
        ],
        "train, ",
        "reads on default, not ordered after: scale writes on reduce",
    ),
    Mutation(
        "a reduction's event recorded on another stream",
        [(REDUCED, REDUCED.replace("_reduce.", "_unshard."))],
        "train, ",
        "race of the reduced shard of",
    ),
    Mutation(
        "a gradient is used before its reduction",
        [(WAIT_FOR_REDUCED, "pass")],
        "train, ",
        "race of the reduced shard of",
    ),
    Mutation(
        "a gradient is accumulated before its reduction",
        [(WAIT_FOR_REDUCED, "pass")],
        "accumulate reduced gradients",
        "race of the reduced shard of",
    ),
    Mutation(
        "a gradient buffer is filled again while it is reduced",
        [
            (
                "        if gradient is not None:\n            self._free.setdefault(gradient.shape, []).append(gradient)\n",
                "",
            ),
            (
                "        self._under_way.append(",
                "        self._free.setdefault(gradient.shape, []).append(gradient)\n        self._under_way.append(",
            ),
        ],
        "train, ",
        "race of the gradient buffer of 'blocks.2': _foreach_copy_ writes on default, not ordered after: reduce_scatter writes on reduce",
    ),
    Mutation(
        "gradient buffers are freed while they are reduced, after an exception",
        [("            self._under_way[0][0]()\n", "")],
        "exception in backward",
        "freed by the gradient buffer of",
    ),
    Mutation(
        "a reduction that broke off is left alone",
        [("            self._device.current_stream().wait_stream(self._reduce)\n", "")],
        "exception in a reduction",
        "freed by the gradient buffer of",
    ),
    # Several compute streams
    Mutation(
        "compute streams are not remembered",
        [("        self._users[current.stream_id] = current\n", "")],
        "a branch on a stream of its own",
        "race of a tensor: _foreach_copy_ reads on side, not ordered after: mm writes on default",
    ),
    Mutation(
        "a handle is completed on one stream before its gradients are there on another",
        [(COMPLETE, COMPLETE.splitlines(keepends=True)[0])],
        "a branch on a stream of its own",
        "race of a tensor: _foreach_copy_ reads on side",
    ),
    Mutation(
        "compute streams do not wait for what completes a handle",
        [(COMPLETED, "                step.reshard_unless_running(handle)\n")],
        "a branch on a stream of its own",
        "writes on side, not ordered after: _foreach_copy_ reads on default",
    ),
    Mutation(
        "only the current stream waits",
        [("                    user.wait_event(event)\n", "                    pass\n")],
        "a branch on a stream of its own",
        "writes on side, not ordered after: _foreach_copy_ reads on default",
    ),
    Mutation(
        "the other streams wait for another stream",
        [("            event = current.record_event()\n", "            event = self._unshard.record_event()\n")],
        "a branch on a stream of its own",
        "writes on side, not ordered after: _foreach_copy_ reads on default",
    ),
    Mutation(
        "only the other streams wait",
        [("                current.wait_stream(user)\n", "                pass\n")],
        "a branch on a stream of its own",
        "race of a tensor: _foreach_copy_ reads on side",
    ),
    Mutation(
        "a backward that was cut short is left alone",
        [
            (
                "        step.streams.end_backward()\n        step.unsharded.free_retained(always=True)\n",
                "        step.unsharded.free_retained(always=True)\n",
            )
        ],
        "exception in a branch",
        "not ordered after",
    ),
    Mutation(
        "one event for all streams",
        [
            (
                RESHARDED,
                RESHARDED.replace(NOTED, "self._before_unshard = " + "{0: ").replace(
                    "record_event()", "record_event()}"
                ),
            )
        ],
        "a branch on a stream of its own",
        "reuse",
    ),
]

KEEP = """\
        with self._device.stream(self._unshard):
            handle.keep_secondary()
"""

# On four ranks.
OF_SECONDARY = [
    Mutation(
        "a secondary shard is copied while forward writes",
        [
            (
                "        self._unshard.wait_stream(self._device.current_stream())\n        with self._device.stream(self._unshard):\n            handle.keep",
                "        with self._device.stream(self._unshard):\n            handle.keep",
            )
        ],
        "a forward that writes its parameters",
        "reads on unshard, not ordered after: mul_.Tensor writes on default",
    ),
    Mutation(
        "a secondary shard in memory that other streams read",
        [("        self._begin_on_unshard()\n        # A forward", "        # A forward")],
        "a branch before a copy",
        "reuse of",
    ),
    Mutation(
        "a secondary shard is copied on the reduce stream",
        [(KEEP, KEEP.replace("_unshard", "_reduce"))],
        "train, reshard_after_forward=2",
        "all_gather reads on unshard, not ordered after: clone writes on reduce",
    ),
]

OFFLOADED = [
    Mutation(
        "the host reads a gradient before it has arrived",
        [("            if to_host:\n                reduced.synchronize()\n", "")],
        "offloaded, train, ",
        "race of a tensor: clone reads on host, not ordered after: copy_ writes on reduce",
    ),
    Mutation(
        "another event tells that a gradient has arrived",
        [("                reduced.synchronize()\n", "                self._device.current_stream().record_event()\n")],
        "offloaded, train, ",
        "race of a tensor: clone reads on host, not ordered after: copy_ writes on reduce",
    ),
    Mutation(
        "reductions do not say that their results lie on the host",
        [("flat.routes, flat.home.is_elsewhere", "flat.routes, False")],
        "offloaded, train, ",
        "race of a tensor: clone reads on host, not ordered after: copy_ writes on reduce",
    ),
    Mutation(
        "nobody waits for copies from the host",
        [("            self._copied.synchronize()\n", "")],
        "offloaded, prefetch in vain",
        WRITTEN_TOO_EARLY,
    ),
    Mutation(
        "gathers from the host are not remembered",
        [("                self._copied = self._full[handle]\n", "                pass\n")],
        "offloaded, prefetch in vain",
        WRITTEN_TOO_EARLY,
    ),
    Mutation(
        "a forward ends before its shards are read",
        [
            (
                "        step.unsharded.hide()\n        step.streams.wait_for_copies()\n",
                "        step.unsharded.hide()\n",
            )
        ],
        "offloaded, prefetch in vain",
        WRITTEN_TOO_EARLY,
    ),
    Mutation(
        "a backward ends before its shards are read",
        [("        self._users.clear()\n        self.wait_for_copies()\n", "        self._users.clear()\n")],
        "offloaded, write frozen shards",
        WRITTEN_TOO_EARLY,
    ),
    Mutation(
        "unsharding by hand ends before the shard is read",
        [
            (
                "        self.step.unsharded.unshard(handle)\n        self.step.streams.wait_for_copies()\n",
                "        self.step.unsharded.unshard(handle)\n",
            )
        ],
        "offloaded, write shards that are unsharded by hand",
        WRITTEN_TOO_EARLY,
    ),
    Mutation(
        "resharding by hand ends before the shard is read",
        [
            (
                "        self.step.unsharded.reshard(handle)\n        self.step.streams.wait_for_copies()\n",
                "        self.step.unsharded.reshard(handle)\n",
            )
        ],
        "offloaded, write shards after an unused unshard",
        WRITTEN_TOO_EARLY,
    ),
    Mutation(
        "a gather from the host that broke off is not remembered",
        [("                self._copied = self._unshard.record_event()\n", "                pass\n")],
        "offloaded, exception in a gather",
        WRITTEN_TOO_EARLY,
    ),
]
MUTATIONS += OFFLOADED

# Slower or more careful, and right all the same: the order does not depend on them.
HARMLESS = [
    Mutation(
        "gathers on the compute stream",
        [
            (GATHER, GATHER.replace("self._unshard", "self._device.current_stream()")),
            (FULL, FULL.replace("self._unshard", "self._device.current_stream()")),
        ],
        "train, ",
        "",
    ),
    Mutation(
        "reductions on the compute stream",
        [
            (REDUCE, REDUCE.replace("self._reduce", "self._device.current_stream()")),
            (REDUCED, REDUCED.replace("self._reduce", "self._device.current_stream()")),
        ],
        "train, ",
        "",
    ),
    Mutation(
        # The reduce stream has just waited for everything that the compute stream was given.
        "reduced shards from the pool of the compute stream",
        [
            (
                REDUCE,
                "            home = self._device.current_stream()\n"
                + REDUCE.replace("):", "), self._device.allocating_on(home):"),
            )
        ],
        "train, ",
        "",
    ),
]

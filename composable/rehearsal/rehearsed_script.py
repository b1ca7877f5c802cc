"""Rehearses a script: it runs, unchanged, as some of many ranks, each in a process of its own, with fake tensors.

A rank's process is a fork of this one. It sees the variables of torchrun, and devices and process groups that are not
there. It writes its files to a temporary folder.
"""

import ast
import faulthandler
import functools
import json
import os
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from composable.errors import ConfigError, DesyncError
from composable.ground.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    FileStore,
    import_before_forks,
    register_fake_backend,
)
from composable.rehearsal.fake_files import stand_in_for_files
from composable.rehearsal.ledger import LedgerLine
from composable.rehearsal.rehearsed_function import line_of_error
from composable.rehearsal.stand_ins import RehearsedRank, ScriptEnds, stand_in_for_devices
from composable.rehearsal.surroundings import (
    Letters,
    ranks_that_misheard,
    stand_in_for_data,
    stand_in_for_groups,
    stand_in_for_saves,
)

# The memory of devices in GiB, by name; 0: it is not known.
_GIB = "cpu 0, cuda 0, a100-40g 40, a100-80g 80, b200-180g 180, h100-80g 80, h200-141g 141, l4-24g 24, l40s-48g 48"
DEVICES = {name: int(gib) for name, gib in (one.split() for one in _GIB.split(", "))}

# So often a rank is rehearsed, if others say each time what it has not heard before.
_MOST_RUNS = 3
_MOST_REAL = 16
# So many ranks are rehearsed beside the first and last ones, if the script names them.
_MOST_NAMED = 16
# The number of a rank in code; not the rank of a matrix.
_RANK = re.compile(r"(?<![a-z])(?<!lora_)(?<!low_)(?<!matrix_)rank(?![a-z])", re.IGNORECASE)
# How long a rank that is late may take to show its stacks.
_ABORT_S = 60.0


@dataclass(frozen=True)
class ScriptRun:
    """What to rehearse.

    Attributes:
        script: The file of the script.
        arguments: Its arguments.
        ranks: How many ranks the run has.
        on_host: How many of them share a host.
        device: A name of ``DEVICES``.
        budget: The bytes of a device; 0: that of ``device``, or no limit.
        steps: After how many optimizer steps the script ends; 0: at its own end.
        timeout_s: How long a rank may take.
        is_strict: Refuse to answer for values of fake tensors.
        rehearsed: The ranks that run; empty: those of ``ranks_to_rehearse``.
        is_real: Tensors have values, and all ranks run at once, as processes that send messages.
        around: Makes the context in which the script runs in the process of a rank. What it gives, once the script has
            ended, is ``found`` of the outcome, and JSON can hold it.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    ranks: int = 8
    on_host: int = 8
    device: str = "cuda"
    budget: int = 0
    steps: int = 0
    timeout_s: float = 600.0
    is_strict: bool = False
    rehearsed: tuple[int, ...] = ()
    is_real: bool = False
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    @property
    def device_type(self) -> str:
        """The type of the device for torch; empty: the memory of the host counts."""
        return "" if self.device == "cpu" else "cuda"

    @property
    def limit(self) -> int:
        """The bytes of a device; 0: no limit."""
        return self.budget or DEVICES[self.device] * 2**30


@dataclass(frozen=True)
class RankOutcome:
    """What one rehearsed rank has done.

    Attributes:
        rank: The rank.
        end: "ended", "failed", "late"; of real ranks also "waited": a wait for others has raised.
        said: The traceback of a script that has failed, or is late.
        found: What the context around the script gave.
        steps, parts: What ``RehearsedRank`` has counted: ``steps_done``, ``parts_at_peak``; all others as there.
    """

    rank: int
    end: str
    said: str = ""
    steps: int = 0
    at_rest: int = 0
    peak: int = 0
    peak_at: str = ""
    host_at_rest: int = 0
    host_peak: int = 0
    parts: Mapping[str, int] | None = None
    overrun: tuple[int, str, str, str] | None = None
    notes: Mapping[str, int] | None = None
    lines: tuple[LedgerLine, ...] = ()
    work: Mapping[str, int] | None = None
    found: Any = None

    def sent_bytes(self, job: ScriptRun) -> tuple[int, int]:
        """Return the bytes that this rank sends in its second step, or its only one, and those to other hosts."""
        hosts, step = [rank // job.on_host for rank in range(job.ranks)], min(1, self.steps - 1)
        sent = [one.sent_bytes(self.rank, hosts) for one in self.lines if one.step == step]
        return sum(one for one, _ in sent), sum(one for _, one in sent)


def ranks_to_rehearse(job: ScriptRun) -> tuple[tuple[int, ...], dict[str, int]]:
    """Return the first ranks, the last one, the ends of the first and last host, and those that the script names.

    It names them in what it compares, with ranks also in files beside it that it imports, and in its arguments. The
    second value is for the notes of an outcome: it says that only ``_MOST_NAMED`` of more are taken.
    """
    first_of_last = (job.ranks - 1) // job.on_host * job.on_host
    always = {one for one in (0, 1, job.on_host - 1, job.on_host, first_of_last, job.ranks - 1) if one < job.ranks}
    nodes = [(node, at == 0) for at, tree in enumerate(_trees(job.script)) for node in ast.walk(tree)]
    given = [int(one) for one in re.findall(r"(?<![\w.-])\d+(?![\w.])", " ".join(job.arguments))]
    given += [one for node, _ in nodes if getattr(node, "arg", "") == "default" for one in _ints(node)]
    named: list[tuple[bool, int]] = []
    for node, is_of_script in nodes:
        if isinstance(node, ast.Compare):
            is_other = _RANK.search(ast.unparse(node)) is None
            # Not given: `rank is None`, or `"RANK" in os.environ`.
            more = [] if is_other or any(isinstance(one, ast.Constant) for one in ast.iter_child_nodes(node)) else given
            numbers = (_ints(node) if is_of_script or not is_other else []) or more
            # A rank that a test names, and its neighbours, may do something else.
            named += [(is_other, one + beside) for one in numbers for beside in (-1, 0, 1)]
    others = list(dict.fromkeys(one for _, one in sorted(named) if 0 <= one < job.ranks and one not in always))
    note = f"the script compares more than {_MOST_NAMED} numbers that may be ranks; --all-ranks has them all"
    return tuple(sorted({*always, *others[:_MOST_NAMED]})), {note: 1} if others[_MOST_NAMED:] else {}


def _ints(node: ast.AST) -> list[int]:
    return [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and type(one.value) is int]


def _trees(script: Path) -> list[ast.AST]:
    """Return the code of a script, and of the files beside it, or below its folder, that it imports, if it parses."""
    trees, files = list[ast.AST](), [script]
    for file in files:  # It grows.
        # A file may be imported where its errors are expected; those of the script are the caller's.
        with nullcontext() if file is script else suppress(OSError, SyntaxError, ValueError, RecursionError):
            trees.append(ast.parse(file.read_bytes()))
            for node in ast.walk(trees[-1]):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    first = getattr(node, "module", None) or ""
                    names = [first, *(f"{first}.{one.name}".strip(".") for one in node.names)]
                    ends = [f"{one.replace('.', '/')}{end}" for one in names for end in (".py", "/__init__.py")]
                    new = {top / end for top in (file.parent, script.parent) for end in ends} - {*files}
                    files += filter(Path.is_file, new)
    return trees


def rehearse_script(job: ScriptRun, progress: Callable[[str], object] = lambda _: None) -> tuple[RankOutcome, ...]:
    """Run the script as some of its ranks, two processes at a time, and return what each has done.

    Args:
        job: The script, and how it runs.
        progress: Called with a text when a rank has ended.

    Raises:
        ConfigError: The script cannot be read, or this system has no fork; or too many ranks would be real.
    """
    if job.is_real and job.ranks > _MOST_REAL:
        what = f"{job.ranks} real ranks would share this machine"
        raise ConfigError(what, fix=f"pass at most {_MOST_REAL}, or leave out --real")
    given = tuple(range(job.ranks)) if job.is_real else job.rehearsed
    try:
        chosen, note = (given, {}) if given else ranks_to_rehearse(job)
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"the script cannot be read: {error}", fix="pass the path of a Python file") from error
    job, ranks = replace(job, rehearsed=chosen), [*chosen]
    with tempfile.TemporaryDirectory(prefix="rehearsal") as name:
        folder = Path(name)
        done: dict[int, RankOutcome] = {}
        runs: Counter[int] = Counter()
        while ranks:
            runs.update(ranks)
            left = len(ranks)
            at_once = job.ranks if job.is_real else 2
            with closing(run_processes(((job, rank, folder) for rank in ranks), at_once)) as processes:
                for _, one in processes:
                    done[one.rank], left = one, left - 1
                    progress(f"rank {one.rank} has {one.end}, {left} to go")
            ranks = [one for one in ranks_that_misheard(folder) if runs[one] < _MOST_RUNS]
            for rank in ranks:
                shutil.rmtree(folder / f"files-{rank}", ignore_errors=True)
        done[chosen[0]] = replace(done[chosen[0]], notes={**(done[chosen[0]].notes or {}), **note})
        return tuple(done[rank] for rank in sorted(done))


def run_processes(
    waiting: Iterator[tuple[ScriptRun, int, Path]], at_once: int = 2
) -> Generator[tuple[ScriptRun, RankOutcome], None, None]:
    """Run each job as a rank, some processes at a time, and yield each with what it has done when it ends.

    Unless it is real, the first one runs alone: others may need what it leaves, such as the objects that it sends.
    Close it to end all.

    Args:
        waiting: Jobs, ranks, and folders for their files; the next one is asked for when there is room for it.
        at_once: How many processes run at a time.

    Raises:
        ConfigError: This system has no fork.
    """
    if not hasattr(os, "fork"):
        raise ConfigError("this system cannot fork processes", fix="rehearse on Linux or macOS")
    import_before_forks()
    started: dict[int, tuple[float, ScriptRun, int, Path]] = {}
    late: set[int] = set()
    room, has_more = 1, True
    try:
        while has_more or started:
            while has_more and len(started) < room:
                following = next(waiting, None)
                has_more = following is not None
                if following is not None:
                    room = at_once if following[0].is_real else room
                    started[_start(*following)] = time.monotonic() + following[0].timeout_s, *following
            for process, (deadline, job, rank, folder) in list(started.items()):
                ended, status = os.waitpid(process, os.WNOHANG)
                has_ended, is_over = ended == process, time.monotonic() > deadline
                if has_ended or (is_over and process in late):
                    del started[process]
                    _kill(process, has_ended=has_ended)
                    room = at_once
                    code = os.waitstatus_to_exitcode(status)
                    late_s = job.timeout_s if process in late else None
                    late.discard(process)
                    yield job, _found_of(rank, folder, code, late_s)
                elif is_over:
                    late.add(process)
                    os.kill(process, signal.SIGABRT)  # It shows where it is, and ends.
                    started[process] = time.monotonic() + _ABORT_S, job, rank, folder
            time.sleep(0.005)
    finally:
        for process in started:
            _kill(process, has_ended=False)


def _start(job: ScriptRun, rank: int, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # The child runs this thread alone, and computes nothing in others.
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        said = os.open(folder / f"said-{rank}", os.O_CREAT | os.O_WRONLY, 0o600)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        found = _Child(job, rank, folder).run()
        (folder / f"found-{rank}").write_text(json.dumps(found))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _kill(process: int, *, has_ended: bool) -> None:
    """End a rank's process, and those that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    if not has_ended:
        # It has no process group of its own in its first moments.
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


def _found_of(rank: int, folder: Path, code: int, late_s: float | None) -> RankOutcome:
    file, output, stack = (folder / f"{name}-{rank}" for name in ("found", "said", "stack"))
    if not file.exists():
        printed = output.read_text(errors="replace")[-8000:] if output.exists() else ""
        shown = stack.read_text().splitlines(keepends=True) if stack.exists() else []
        frames = "".join(line for line in shown if not line.startswith(("Fatal Python", "Extension", "\n")))
        by = f" by {signal.Signals(-code).name}" if code < 0 else ""
        end, how = ("failed", f"ended{by}") if late_s is None else ("late", f"not ended after {late_s:.0f} s")
        said = f"{printed}{frames}the process has {how}"
        return RankOutcome(rank, end, said, lines=_lines_of(rank, folder))
    return RankOutcome(rank, lines=_lines_of(rank, folder), **json.loads(file.read_text()))


def _lines_of(rank: int, folder: Path) -> tuple[LedgerLine, ...]:
    file = folder / f"ledger-{rank}"
    rows = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return tuple(LedgerLine(**{**row, "ranks": tuple(row["ranks"])}) for row in rows)


class _Ledger(list[LedgerLine]):
    """The lines of a rank, of which each is written to its file at once: a real rank may be ended by another one."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file.open("w", buffering=1)

    def append(self, line: LedgerLine) -> None:
        super().append(line)
        self._file.write(json.dumps(asdict(line)) + "\n")


class _Child:
    """The process of one rank."""

    def __init__(self, job: ScriptRun, rank: int, folder: Path) -> None:
        self._job, self._rank, self._folder = job, rank, folder

    def run(self) -> dict[str, Any]:
        """Run the script, and return the values of ``RankOutcome`` but for the rank."""
        job, number = self._job, self._rank
        faulthandler.enable(os.open(self._folder / f"stack-{number}", os.O_CREAT | os.O_WRONLY, 0o600))
        torch.set_num_threads(1)
        warnings.simplefilter("default")
        rank = RehearsedRank(job.device_type, job.limit, job.steps, is_strict=job.is_strict)
        rank.lines = _Ledger(self._folder / f"ledger-{number}")
        mode = nullcontext() if job.is_real else FakeTensorMode(allow_non_fake_inputs=True)
        names = stand_in_for_devices(rank, number, job.on_host, job.device)
        register_fake_backend()
        letters = Letters(self._folder, number, job.rehearsed)
        store = functools.partial(FileStore, str(self._folder / "store"), job.ranks)
        stand_in_for_groups(rank, number, job.ranks, letters, store if job.is_real else None)
        if isinstance(mode, FakeTensorMode):
            stand_in_for_data(rank, mode)
        stand_in_for_saves(rank, job.ranks)
        register_optimizer_step_pre_hook(rank.step_begins)
        register_optimizer_step_post_hook(rank.step_ends)
        os.environ.update(
            RANK=str(number), WORLD_SIZE=str(job.ranks), LOCAL_RANK=str(number % job.on_host),
            LOCAL_WORLD_SIZE=str(job.on_host), GROUP_RANK=str(number // job.on_host),
            MASTER_ADDR="localhost", MASTER_PORT="29500",
        )  # fmt: skip
        os.environ.setdefault("COMPOSABLE_DIVERGENCE_TIMEOUT", "10")  # Real ranks that wait ask each other sooner.
        sys.argv = [str(job.script), *job.arguments]
        sys.path.insert(0, str(job.script.resolve().parent))
        first = 0 if job.is_real else (job.rehearsed or (0,))[0]
        stand_in_for_files(self._folder, first if job.is_real else number, first, rank.lines)
        end, said = "ended", ""
        with job.around() as found, rank.watching(), mode, rank, names:
            try:
                runpy.run_path(str(job.script), run_name="__main__")
            except ScriptEnds:
                pass
            except SystemExit as error:
                end, said = ("ended", "") if error.code in (None, 0) else ("failed", f"the script exits: {error.code}")
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                what = f"{error.func} gives a shape that depends on values, and fake tensors have none; --real has"
                end, said = "failed", f"{what}\n  at:  {line_of_error(error)}"
            except BaseException as error:
                end, said = "waited" if _has_waited(error) else "failed", self._traceback()
        letters.save()
        return {
            "end": end, "said": said, "steps": rank.steps_done, "at_rest": rank.at_rest, "peak": rank.peak,
            "peak_at": rank.peak_at, "host_at_rest": rank.host_at_rest, "host_peak": rank.host_peak,
            "parts": rank.parts_at_peak, "overrun": rank.overrun, "notes": rank.notes, "work": rank.work,
            "found": found,
        }  # fmt: skip

    def _traceback(self) -> str:
        """Return the traceback of the running exception, from the script on."""
        kind, error, trace = sys.exc_info()
        here = trace
        while here is not None and here.tb_frame.f_code.co_filename != str(self._job.script):
            here = here.tb_next
        return "".join(traceback.format_exception(kind, error, here or trace))


def _has_waited(error: BaseException) -> bool:
    """Say whether it is a wait for other ranks that has raised."""
    places = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, DesyncError) or places[-1].startswith(str(Path(dist.__file__).parent))

"""``rehearse``: a script runs unchanged as some of many ranks, without devices, and tells memory, traffic and hangs.

Exit codes: 0, all is well; 1, the script fails; 3, ranks wait for each other for ever; 4, memory is too small.
"""

import argparse
import json
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from composable.errors import ConfigError
from composable.ground.names import bytes_text, count_text, list_text
from composable.rehearsal import DEVICES, RankOutcome, ScriptRun, Tried, find_frontier, hang_between, rehearse_script

_UNITS = {"": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the script, the size of the run, and what is rehearsed."""
    add_run_arguments(parser)
    parser.add_argument("--all-ranks", action="store_true", help="rehearse every rank, not a few of each kind")
    parser.add_argument("--strict", action="store_true", help="refuse a script that reads values of tensors")
    real = "all ranks run, as processes with values on this machine's processors: for small models"
    parser.add_argument("--real", action="store_true", help=real)
    what_if = "also rehearse other annotations, one change each: what they need"
    parser.add_argument("--what-if", action="store_true", help=what_if)


def add_run_arguments(parser: argparse.ArgumentParser, steps: int = 0) -> None:
    """Add the script and the size of the run; what follows -- are arguments of the script."""
    parser.add_argument("script", type=Path, help="the file that torchrun would start; its arguments follow --")
    parser.add_argument("--ranks", type=_count, required=True, help="how many ranks the run has")
    parser.add_argument("--per-host", type=_count, help="ranks that share a host (default: 8, or all if fewer)")
    parser.add_argument("--device", default="cuda", help=f"cpu, cuda, or what has memory: {', '.join(DEVICES)}")
    parser.add_argument("--memory", type=_bytes, default=0, help="of a device, such as 80GiB")
    default = f" (default: {steps})" if steps else ""
    parser.add_argument("--steps", type=_count, default=steps, help=f"end after so many optimizer steps{default}")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a rank (default: 600)")
    parser.set_defaults(of_script=(), all_ranks=False, strict=False, real=False)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([\d.]+) *([a-z]*)", text.lower())
    if not found or found[2] not in _UNITS or found[1].count(".") > 1 or found[1] == ".":
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, such as 80GiB")
    return round(float(found[1]) * _UNITS[found[2]])


def job_of(args: argparse.Namespace) -> ScriptRun:
    """Return the run that the arguments describe."""
    if args.device not in DEVICES:
        known = ", ".join(DEVICES)
        raise ConfigError(
            f"no device {args.device!r} is known", fix=f"pass one of {known}; or cuda, and --memory 80GiB"
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # No rank outlives this process.
    return ScriptRun(
        args.script, args.of_script, args.ranks, min(args.per_host or 8, args.ranks), args.device, args.memory,
        args.steps, args.timeout, args.strict, tuple(range(args.ranks)) if args.all_ranks else (), args.real,
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Rehearse the script, and print what came out."""
    job = job_of(args)
    runs = rehearse_script(job, lambda text: print(text, file=sys.stderr))
    report = RehearsalReport(job, runs)
    if args.what_if and report.exit_code in (0, 4):
        # One rank, which would wait for others if it were real.
        one_rank = replace(job, steps=min(job.steps or 2, 2), rehearsed=(), is_real=False)
        found = find_frontier(one_rank, [job.arguments], job.timeout_s, lambda _: None, most_changes=1)
        report.others = found.tried[1:]
    print(json.dumps(report.values(), indent=2) if args.json else "\n".join(report.lines()))
    return report.exit_code


class RehearsalReport:
    """What a rehearsal has found, as text and as values; ``others``: what the script needs with other annotations."""

    def __init__(self, job: ScriptRun, runs: Sequence[RankOutcome]) -> None:
        self._job, self.runs = job, runs
        # Real ranks that waited for others have raised, and the ledgers say where.
        self._broken = [one for one in runs if one.end not in {"ended", "waited"}]
        self._hang = "" if self._broken else hang_between({one.rank: one.lines for one in runs})
        self._broken = self._broken or [one for one in runs if one.end == "waited" and not self._hang]
        self._largest = max(runs, key=lambda one: one.peak)
        self._over = next((one for one in runs if one.overrun is not None), None)
        self.others: Sequence[Tried] = ()

    @property
    def exit_code(self) -> int:
        """0, 1: the script fails, 3: a hang, 4: too little memory."""
        return 1 if self._broken else 3 if self._hang else 4 if self._over else 0

    def values(self) -> dict[str, Any]:
        """Return what ``lines`` says, as values that JSON can hold."""
        sent, leaving = self.runs[0].sent_bytes(self._job)
        peak = asdict(self._largest)
        return {
            "ranks": self._job.ranks,
            "rehearsed": [one.rank for one in self.runs],
            "steps": self._largest.steps,
            "failed": {one.rank: one.said for one in self._broken},
            "hang": self._hang,
            "memory": {name: peak[name] for name in ("rank", "at_rest", "peak", "peak_at", "parts", "overrun")},
            "host_memory": {one: max(getattr(run, f"host_{one}") for run in self.runs) for one in ("at_rest", "peak")},
            "budget": self._job.limit,
            "calls": len(self.runs[0].lines),
            "sent_bytes_per_step": sent,
            "bytes_per_step_to_other_hosts": leaving,
            "hidden_gathers": dict(self._hidden()),
            "notes": dict(self._notes()),
            "what_if": {str(one.candidate): one.peak for one in self.others},
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        names = list_text([str(one.rank) for one in self.runs], 16, write=str)
        all_of = "all ranks" if len(self.runs) == self._job.ranks else f"ranks {names} of {self._job.ranks}"
        steps = count_text(self._largest.steps, "step")
        yield f"rehearsed     {all_of}, {steps}" + (
            "" if len(self.runs) == self._job.ranks else "; the others are taken to be like these"
        )
        if self._broken:
            yield from self._broken_lines()
            return
        if not self._hang:
            calls = {len(one.lines) for one in self.runs}
            counts = " to ".join(f"{one:,}" for one in sorted({min(calls), max(calls)}))
            yield f"collectives   {counts} a rank, on all ranks of each group in one order"
        yield from self._memory_lines()
        sent, leaving = self.runs[0].sent_bytes(self._job)
        yield f"traffic       a rank sends {bytes_text(sent)} in a step, {bytes_text(leaving)} of it to other hosts"
        for place, times in self._hidden().items():
            yield f"hidden gather {count_text(times, 'time')} at {place}"
        for text, times in self._notes().items():
            yield f"note          {text}" + (f" ({count_text(times, 'time')})" if times > 1 else "")
        if self._hang:
            yield from ("HANG          " + self._hang).replace("\nrank", "\n              rank").splitlines()

    def _broken_lines(self) -> Iterator[str]:
        first = self._broken[0]
        names = list_text([str(one.rank) for one in self._broken], 16, write=str)
        what = "FAILED       " if first.end == "failed" else "NOT ENDED    "
        yield f"{what} on ranks {names}; rank {first.rank}:" if len(self._broken) > 1 else f"{what} on rank {names}:"
        yield first.said.rstrip()

    def _memory_lines(self) -> Iterator[str]:
        one = self._largest
        limit = f" of {bytes_text(self._job.limit)}" if self._job.limit else ""
        parts = ", ".join(f"{bytes_text(count)} {name}" for name, count in (one.parts or {}).items())
        yield f"memory        at rest {bytes_text(one.at_rest)}, peak {bytes_text(one.peak)}{limit} on rank {one.rank},"
        yield f"              in {one.peak_at or 'nothing'} ({parts})"
        host = max(self.runs, key=lambda run: run.host_peak)
        if host.host_peak >= 2**20:
            sizes = f"at rest {bytes_text(host.host_at_rest)}, peak {bytes_text(host.host_peak)}"
            yield f"host          {sizes} in its memory, of rank {host.rank}"
        if self._over is not None and self._over.overrun is not None:
            count, place, line, source = self._over.overrun
            yield f"OUT OF MEMORY rank {self._over.rank} has {bytes_text(count)}{limit}, in {place}"
            yield f"              at {line}: {source}"
        for other in sorted(self.others, key=lambda other: other.peak):
            yield f"what if       {bytes_text(other.peak)} with {other.candidate}"

    def _hidden(self) -> Counter[str]:
        return Counter(f"{one.place}: {one.source}" for one in self.runs[0].lines if one.is_hidden)

    def _notes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for one in self.runs:
            for text, count in (one.notes or {}).items():
                found[text] = max(found.get(text, 0), count)
        return found

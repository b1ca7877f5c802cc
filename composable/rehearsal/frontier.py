"""The frontier of a script: what other annotations of it need, send and compute again, each rehearsed as one rank.

A candidate is on the frontier if no other needs, sends and computes as little or less.
"""

import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from composable.errors import UsageError
from composable.ground.names import bytes_text
from composable.rehearsal.candidates import Candidate, annotations_of
from composable.rehearsal.rehearsed_script import RankOutcome, ScriptRun, run_processes

# Less than this is no difference.
_SLACK = 1.05


@dataclass(frozen=True)
class Tried:
    """A candidate that was rehearsed."""

    candidate: Candidate  # What changes.
    peak: int  # The most bytes of the first rank.
    sent: int  # The bytes that it sends in a step.
    leaving: int  # Those to other hosts.
    again: float  # The part of the work of forward that backward computes again.
    is_bare: bool  # One handle gathers all, so nothing hides its traffic.
    write: Mapping[str, Sequence[str]]  # For each line of the script that changes, the statements to write there.

    @staticmethod
    def of(candidate: Candidate, job: ScriptRun, one: RankOutcome, written: Mapping[str, Any]) -> "Tried":
        work, is_bare = one.work or {}, not (candidate.policy or (candidate.policy is None and written["policy"]))
        again = work.get("again", 0) / max(work.get("forward", 0), 1)
        return Tried(candidate, one.peak, *one.sent_bytes(job), round(again, 3), is_bare, one.found["write"])

    @property
    def costs(self) -> tuple[float, bool, int, int]:
        """What a step costs beside memory: traffic may hide behind computation, and work that is done again cannot."""
        return self.again, self.is_bare, self.leaving, self.sent

    def is_as_good_as(self, other: "Tried") -> bool:
        """Say whether this one needs no more of anything than ``other``."""
        pairs = zip((self.peak, *self.costs), (other.peak, *other.costs), strict=True)
        return all(own <= _SLACK * others for own, others in pairs)


@dataclass
class Frontier:
    """What ``find_frontier`` has found."""

    tried: list[Tried] = field(default_factory=list)  # The candidates, the script as it is written first.
    # Candidates, or groups of them, that were not tried or have failed, with reasons.
    left_out: dict[str, str] = field(default_factory=dict)
    failed: RankOutcome | None = None  # The script as it is written, if it fails.

    def best(self, limit: int) -> list[Tried]:
        """Return the frontier of what fits into ``limit`` bytes, least costs first, for each arguments of the script.

        Where nothing fits, three that need least memory, at the end.
        """
        fitting, others = list[Tried](), list[Tried]()
        for words in dict.fromkeys(one.candidate.words for one in self.tried):
            alike = sorted((one for one in self.tried if one.candidate.words == words), key=_order)
            fits = [one for one in alike if not limit or one.peak <= limit]
            kept: list[Tried] = []
            for one in fits or alike:
                if not any(other.is_as_good_as(one) for other in kept):
                    kept.append(one)
            fitting += kept if fits else []
            others += [] if fits else sorted(kept, key=lambda one: one.peak)[:3]
        return [*fitting, *others]

    def has_worse_part(self, candidate: Candidate) -> bool:
        """Say whether one of several changes, tried alone with the first arguments, makes nothing better."""
        plain, changes = self.tried[0], candidate.changes
        first = (one for one in self.tried if one.candidate.words == plain.candidate.words)
        parts = [one for one in first if len(one.candidate.changes) == 1 and one.candidate.changes <= changes]
        return len(changes) > 1 and any(plain.is_as_good_as(one) for one in parts)


def _order(one: Tried) -> tuple[float, ...]:
    # In two digits: what costs about as much comes by its changes.
    return (*(float(f"{cost:.1e}") for cost in one.costs), len(one.candidate.changes), one.peak)


def find_frontier(
    job: ScriptRun,
    varied: Sequence[tuple[str, ...]],
    limit_s: float,
    progress: Callable[[str], object],
    most_changes: int = 3,
) -> Frontier:
    """Rehearse the first rank of the script as it is written, then of candidates, the least changes first.

    Raises ``UsageError`` if the script does not call ``fully_shard`` or ``replicate``.

    Args:
        job: The script, and how it runs.
        varied: Arguments of the script, each in place of those of ``job``; at least one.
        limit_s: Seconds after which no more are tried, and those that run are ended.
        progress: Called with a text when a candidate was tried.
        most_changes: How many changes a candidate has at most, of policy, ``reshard_after_forward`` and checkpoints.
    """
    end = time.monotonic() + limit_s
    found, running, written = Frontier(), dict[Any, Candidate](), dict[str, Any]()

    def as_job(candidate: Candidate) -> ScriptRun:
        around = functools.partial(annotations_of, candidate, written or None)
        rest = max(min(job.timeout_s, end - time.monotonic()), 1.0) if running else job.timeout_s
        running[around] = candidate
        return replace(job, arguments=candidate.words or job.arguments, around=around, timeout_s=rest)

    def waiting(folder: Path) -> Iterator[tuple[ScriptRun, int, Path]]:
        yield as_job(Candidate(words=varied[0])), 0, folder  # It runs alone, and says what there is to change.
        every = _candidates(job, written, varied, found.left_out) if written else []
        candidates = iter([one for one in every if len(one.changes) <= most_changes])
        worse = 0
        for candidate in candidates:
            if found.has_worse_part(candidate):
                worse += 1
                found.left_out["combinations"] = f"{worse} with a change that makes nothing better by itself"
            elif time.monotonic() > end:
                late = [candidate, *(one for one in candidates if not found.has_worse_part(one))]
                found.left_out[f"{len(late)} others, such as {late[0]}"] = f"not tried in {limit_s:g} s"
            else:
                place = folder / str(len(running))
                place.mkdir()
                yield as_job(candidate), 0, place

    with tempfile.TemporaryDirectory(prefix="fit") as name, closing(run_processes(waiting(Path(name)))) as runs:
        for run, one in runs:
            candidate = running[run.around]
            if one.end != "ended":
                reason = (one.said.strip().splitlines() or [""])[-1] if one.end == "failed" else "not ended in time"
                found.left_out[str(candidate)] = reason
                if not found.tried:
                    found.failed = one
                    return found
                continue
            if not found.tried:
                written.update(one.found)
                if written["main"] < 0:
                    raise UsageError("the script annotates nothing", fix="call fully_shard or replicate on its model")
            found.tried.append(Tried.of(candidate, run, one, written))
            progress(f"{len(found.tried)} tried, {bytes_text(one.peak)}: {candidate}")
    found.tried.sort(key=lambda one: [*running.values()].index(one.candidate))  # not as they ended
    return found


def _candidates(
    job: ScriptRun, written: Mapping[str, Any], varied: Sequence[tuple[str, ...]], left_out: dict[str, str]
) -> list[Candidate]:
    """Return what could be in place of a script as it is written, and note what could not."""
    calls, main = written["calls"], written["calls"][written["main"]]
    is_shared = [one["place"] for one in calls].count(main["place"]) > 1
    policies: list[str | None] = [None]
    every: list[int | None] = [None, 0] if any(one["name"] == "checkpoint" for one in calls) else [None]
    if is_shared or not written["classes"]:
        reason = "its line annotates other modules too" if is_shared else "nothing that repeats is inside"
        left_out[f"policies and checkpoints of {' + '.join(main['classes'])}"] = reason
    else:
        policies += [one for one in written["classes"] if written["policy"] != [one]]
        policies += [""] if written["policy"] else []
        every += [1, 2]
    frees: list[bool | int | str | None] = [None, True, False]
    if job.on_host < job.ranks:
        if main["has_mesh"] or job.ranks % job.on_host:
            left_out["strategies with copies"] = "the script passes a mesh or group, or hosts differ in ranks"
        else:
            frees += [job.on_host] if job.on_host > 1 else []
            frees += ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
    shown = {main["strategy"], main["reshard_after_forward"]}
    frees = [one for one in frees if str(one) not in shown - {"None"}]
    made = [Candidate(*one, words) for words in varied for one in itertools.product(policies, frees, every)]
    if main["name"] == "replicate":
        made = [one for one in made if one.policy is not None or one.frees is None]
    made.sort(key=lambda one: (len(one.changes), one.policy is not None))
    return [one for one in made if one.changes or one.words != varied[0]]


def frontier_lines(found: Frontier, limit: int) -> Iterator[str]:
    """Yield the lines of a report: a table of the frontier, what to write, and what was left out."""
    budget = f", of which {sum(one.peak <= limit for one in found.tried)} fit into {bytes_text(limit)}" if limit else ""
    yield f"tried         {len(found.tried)}{budget}; the best, and what a step of them needs"
    yield "                 memory  to others        sent  again"
    best = found.best(limit)
    for number, one in enumerate([found.tried[0], *(one for one in best if one is not found.tried[0])]):
        figures = [f"{bytes_text(count):>11}" for count in (one.peak, one.leaving, one.sent)]
        verdict = "" if not limit else "fits" if one.peak <= limit else "too large"
        yield f"{number:2} {verdict:9}{' '.join(figures)} {one.again:6.0%}  {one.candidate}"
        for place, lines in one.write.items():
            yield f"   {place}: {lines[0] if lines else '(leave this out)'}"
            yield from (" " * (len(place) + 5) + line for line in lines[1:])
    for what, reason in found.left_out.items():
        yield f"left out      {what}: {reason}"

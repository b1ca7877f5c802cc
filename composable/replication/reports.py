"""What the ranks tell each other about a backward, and what users are told: errors, warnings, notes, times.

Behind the gradients of the last bucket lies the *flag block*: one flag per parameter, set by the ranks that have a
gradient for it; for each rank one number that is not zero if the rank complains, how often it ran the modules since
the last average, and the digits of the parameter whose gradient was the last to arrive there. The all-reduce adds it
up, so every rank knows which parameters were unused everywhere, and of errors elsewhere, without a collective more.
"""

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composable.comm import Ranks
from composable.errors import UsageError, place_of_rank
from composable.ground.names import count_text, list_text, ranks_text
from composable.replication.buckets import Bucket
from composable.replication.rounds import StaticGraph
from composable.replication.tensors import ReducedParam

__all__ = [
    "GRAPH_CHANGED",
    "HOOK_FAILED",
    "STOPPED",
    "BackwardTiming",
    "DebugNotes",
    "FlagBlock",
    "Report",
    "Stopwatch",
    "round_error",
    "second_gradient",
    "warn_out_of_step",
]


_LOG = logging.getLogger("composable")

# What a rank tells the others besides how many parameters have no gradient.
STOPPED = -1
HOOK_FAILED = -2
GRAPH_CHANGED = -3

# Of the digits, and the highest count: bfloat16 holds all integers up to it.
_BASE = 256
_MAX_NAMES_SHOWN = 10
# As many first backwards are measured as are not like the others.
_FIRST = 10


class Report(NamedTuple):
    """What a flag block said.

    Attributes:
        used: Of each parameter, how many ranks had a gradient.
        complaints: Of each rank, its number; below zero: its backward was stopped.
        last: Of each rank, the parameter whose gradient was the last to arrive; ``None``: none arrived.
        runs: Of each rank, how often it ran the modules since the last average; 0: it follows others.
    """

    used: Sequence[float] = ()
    complaints: Sequence[float] = ()
    last: Sequence[int | None] = ()
    runs: Sequence[float] = ()

    @property
    def is_error(self) -> bool:
        """A rank complains."""
        return any(self.complaints)

    @property
    def is_out_of_step(self) -> bool:
        """Ranks ran the modules different numbers of times since the last average, which need not be wrong."""
        return len({*self.runs} - {0}) > 1


class FlagBlock:
    """Writes and reads the elements behind the gradients of every round.

    Args:
        numel: How many parameters there are.
        rank: This rank, as the transport has it.
        world_size: Ranks of the transport.
    """

    __slots__ = ("_digits", "_late", "_numel", "_plain", "_plain_last", "_rank", "_world_size")

    def __init__(self, numel: int, rank: int, world_size: int) -> None:
        self._numel = numel
        self._rank = rank
        self._world_size = world_size
        self._digits = 1
        while _BASE**self._digits <= numel:
            self._digits += 1
        self._plain: torch.Tensor | None = None  # All of it, where this rank does not complain and ran once.
        self._plain_last: int | None = None
        self._late: tuple[torch.Tensor, torch.Event] | None = None

    @property
    def numel(self) -> int:
        """Elements that the last bucket has behind its gradients."""
        return self._numel + (2 + self._digits) * self._world_size

    def write(
        self, block: torch.Tensor, used: Sequence[bool] | None, complaint: int, last: int | None, runs: int = 1
    ) -> None:
        """Fill ``block`` [numel] before it is sent.

        Args:
            block: Of the last bucket.
            used: Of each parameter, whether this rank has a gradient; ``None``: all arrived, and there is no complaint.
            complaint: This rank's number.
            last: The parameter whose gradient was the last to arrive; ``None``: none has.
            runs: How often this rank ran the modules since the last average; 0: it follows others.
        """
        plain = self._plain
        if plain is None or last != self._plain_last or plain.dtype != block.dtype or plain.device != block.device:
            plain = self._plain = self._plain_block(block, last)
            self._plain_last = last
        block.copy_(plain)
        if runs != 1:
            block[self._numel + self._world_size + self._rank] = min(runs, _BASE)
        if used is not None:
            block[: self._numel].copy_(torch.tensor(used, dtype=block.dtype))
            block[self._numel + self._rank] = complaint

    def _plain_block(self, like: torch.Tensor, last: int | None) -> torch.Tensor:
        values = [1] * self._numel + [0] * (self.numel - self._numel)
        own = slice(self._numel + self._rank, None, self._world_size)
        number = 0 if last is None else last + 1
        values[own] = [0, 1, *(number // _BASE**digit % _BASE for digit in range(self._digits))]
        return torch.tensor(values, dtype=like.dtype, device=like.device)

    def is_complaint(self, values: Sequence[float]) -> bool:
        """Say whether a rank complains; ``values`` is what a block holds after the all-reduce."""
        return any(values[self._numel : self._numel + self._world_size])

    def read(self, block: torch.Tensor) -> Report | None:
        """Return what the ranks say in ``block`` [numel], if one complains or ran the modules another number of times.

        On a device other than the CPU, where reading would stop this thread until the device is
        idle, return that of the round before, if any.
        """
        if block.device.type == "cpu":
            told: list[float] = block[self._numel : self._numel + 2 * self._world_size].tolist()
            # As a rule no complaint, and equal numbers.
            is_plain = told.count(told[-1]) == self._world_size and not any(told[: self._world_size])
            return None if is_plain else self._notable(block.tolist())
        report = None
        if self._late is not None:
            host, event = self._late
            event.synchronize()  # Of the round before; long done.
            values = host.tolist()
            values[self._numel + self._rank] = 0  # This rank has raised it by itself.
            report = self._notable(values)
        host = torch.empty(block.shape, dtype=block.dtype, pin_memory=block.device.type == "cuda")
        host.copy_(block, non_blocking=True)
        event = torch.Event(block.device.type)
        event.record()
        self._late = (host, event)
        return report

    def _notable(self, values: Sequence[float]) -> Report | None:
        count = self._world_size
        complaints, runs, *digits = (values[at : at + count] for at in range(self._numel, self.numel, count))
        numbers = [
            sum(round(value) * _BASE**digit for digit, value in enumerate(of_rank))
            for of_rank in zip(*digits, strict=True)
        ]
        last = [number - 1 if number else None for number in numbers]
        report = Report(values[: self._numel], complaints, last, runs)
        return report if report.is_error or report.is_out_of_step else None


# Errors


def round_error(
    params: Sequence[ReducedParam],
    missing: Sequence[int],
    last: int | None,
    report: Report,
    ranks: Sequence[int],
    own_rank: int,
    static: StaticGraph | None,
    running: Collection[int],
    hook: str,
) -> UsageError:
    """Return the error for what went wrong in a backward, here or on another rank.

    Args:
        params: All of them.
        missing: Which got no gradient on this rank, and should have.
        last: Whose gradient was the last to arrive here.
        report: What the ranks said.
        ranks: Their global numbers, as the report has them.
        own_rank: This one's.
        static: What all backwards were to be like; ``None``: nothing.
        running: Those that had inputs; the others have no gradients.
        hook: The name of the communication hook, behind a space; "": there is none.
    """
    told = list(zip(ranks, report.complaints, strict=False))
    last_of = dict(zip(ranks, report.last, strict=False))
    if missing or not last_of:
        last_of[own_rank] = last
    seen = {
        rank: None if index is None else params[index].fqn.rpartition(".")[0]
        for rank, index in last_of.items()
        if rank in running
    }
    changed = [rank for rank, value in told if value == GRAPH_CHANGED]
    if static is not None and (static.changes or changed):
        return _graph_changed(params, static, report.used, [rank for rank in changed if rank != own_rank], seen)
    others = [rank for rank, value in told if value > 0 and rank != own_rank]
    stopped = [rank for rank, value in told if value == STOPPED]
    failed = [rank for rank, value in told if value == HOOK_FAILED]
    lines = []
    if missing:
        names = list_text([params[index].fqn for index in missing], _MAX_NAMES_SHOWN)
        lines.append(f"backward ended without a gradient for {count_text(len(missing), 'parameter')}: {names}")
        if last is not None:
            lines.append(f"    the last gradient to arrive was that of {params[last].fqn!r}")
        if others:
            lines.append(f"    so did {ranks_text(others)}, perhaps for other parameters")
    elif others:
        # Flags are added up over the ranks; in bfloat16 the names of few among many ranks may be lost. Gradients of
        # backwards before, which were not dropped, hide them too.
        full = len(running) - 0.5
        unused = [item.fqn for item, used in zip(params, report.used, strict=False) if used < full]
        names = list_text(unused, _MAX_NAMES_SHOWN) if unused else "some parameters"
        lines.append(f"{ranks_text(others)} ended backward without a gradient for {names}")
    fix = (
        "let every parameter take part in the loss on every rank, freeze those that do not before replicate, "
        "or pass find_unused_parameters=True"
        if lines
        else "drop the gradients of this step, and see what was raised there"
    )
    if stopped:
        lines.append(f"{ranks_text(stopped)} did not finish backward: an exception stopped it there")
    if lines:
        lines.append(_seen_last(seen))
    if failed:
        lines.append(
            f"{ranks_text(failed)} got no averages of the right dtype and shape from the communication hook{hook}"
        )
        fix = "see what was raised there, and drop the gradients of this step"
    return UsageError("\n".join(lines), at=place_of_rank(), fix=fix)


def _graph_changed(
    params: Sequence[ReducedParam],
    static: StaticGraph,
    used: Sequence[float],
    others: Sequence[int],
    seen: Mapping[int, str | None],
) -> UsageError:
    """Return the error for a backward that is not like the first, though it was promised to be."""
    if static.changes:
        shown = [
            f"{params[index].fqn!r} ({count_text(now, 'gradient')}, {then} then)" for index, now, then in static.changes
        ]
        names = list_text(shown, _MAX_NAMES_SHOWN, write=str)
        lines = [f"this backward is not like the first one, as static_graph=True says: {names}"]
        if others:
            lines.append(f"    nor is that of {ranks_text(others)}")
    else:
        counts = zip(params, used, static.used, strict=False)
        elsewhere = [item.fqn for item, now, then in counts if now != then]
        names = f": {list_text(elsewhere, _MAX_NAMES_SHOWN)}" if elsewhere else ""
        lines = [f"the backward of {ranks_text(others)} is not like the first one, as static_graph=True says{names}"]
    return UsageError(
        "\n".join([*lines, _seen_last(seen)]),
        at=place_of_rank(),
        fix="drop the gradients of this step; use the same parameters in every step, or find_unused_parameters=True",
    )


def _seen_last(seen: Mapping[int, str | None]) -> str:
    """Return the line that says which module got a gradient last on each rank; "" is the replicated one."""
    ranks_of: dict[str | None, list[str]] = {}
    for rank, module in seen.items():
        ranks_of.setdefault(module, []).append(str(rank))
    shown = []
    for module, ranks in ranks_of.items():
        name = "none" if module is None else repr(module) if module else "the replicated module"
        shown.append(f"{name} on rank{'s' * (len(ranks) > 1)} {list_text(ranks, _MAX_NAMES_SHOWN, write=str)}")
    return f"    the last module to get a gradient: {list_text(shown, _MAX_NAMES_SHOWN, write=str)}"


def warn_out_of_step(runs: Mapping[int, int], fqn: str) -> None:
    """Log that ranks ran the modules different numbers of times since the last average.

    Args:
        runs: How often, for each rank.
        fqn: Of a parameter of the modules.
    """
    lines = [f"    {ranks_text([rank])}: {count}" for rank, count in runs.items()]
    _LOG.warning(
        "%s\n  at:  %s, module with parameter %r\n  fix: %s",
        "\n".join(["ranks had different numbers of forwards or backwards since gradients were last averaged", *lines]),
        place_of_rank(),
        fqn,
        "nothing, if each of them belongs to this backward, or to none; but where a rank left out a backward, or was "
        "alone in no_sync, averages are of different steps from there on: run the same backwards on every rank, and "
        "forwards that are not to be trained on under torch.no_grad()",
    )


def second_gradient(fqn: str, *, is_static: bool) -> UsageError:
    """Return the error for a gradient that arrives when the parameter's first was sent."""
    what = "a parameter got a second gradient in one backward, after the first was sent to the other ranks"
    fix = "use activation checkpointing with use_reentrant=False, or pass static_graph=True"
    if is_static:
        what = "a parameter got more gradients in one backward than in the first one, as static_graph=True says"
        fix = "drop the gradients of this step, and use the same parameters in every step"
    return UsageError(what, at=f"{place_of_rank()}, parameter {fqn!r}", fix=fix)


# Notes at the levels of torch


class DebugNotes:
    """Writes notes on the buckets of one reducer, at the levels of ``torch.distributed.get_debug_level()``.

    OFF: nothing. INFO: its buckets, each time they are made. DETAIL: also each bucket that is sent, after the ranks
    have made sure that all send the same one.

    Args:
        params: Of the reducer.
        ranks: Who averages.

    Attributes:
        is_off: Nothing is noted.
        checks: Compare the ranks before each bucket.
    """

    __slots__ = ("_first", "_params", "_ranks", "checks", "is_off")

    def __init__(self, params: Sequence[ReducedParam], ranks: Ranks) -> None:
        level = dist.get_debug_level()  # type: ignore[attr-defined]  # torch does not list it as exported
        self.is_off = level == dist.DebugLevel.OFF  # type: ignore[attr-defined]
        self.checks = level == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
        self._params = params
        self._ranks = ranks
        self._first: Bucket | None = None

    def begin(self, buckets: Sequence[Bucket], number: int) -> None:
        """Note the buckets of backward ``number``, if they are new."""
        if self._first is buckets[0]:
            return
        self._first = buckets[0]
        _LOG.info(
            "replicate: %d buckets from backward %d on, of ranks %s", len(buckets), number, [*self._ranks.numbers]
        )
        for bucket in buckets:
            _LOG.info("replicate: %s", self._text(bucket))

    def before_send(self, bucket: Bucket) -> None:
        """Note a bucket that is sent next, and make sure that all ranks send it. Collective.

        Raises:
            DesyncError: Another rank is about to send another one.
        """
        text = self._text(bucket)
        self._ranks.compare(
            text,
            shown=lambda: text,
            what="the ranks are about to average different buckets",
            fix="run the same modules with the same options on every rank",
        )
        _LOG.info("replicate: send %s", text)

    def _text(self, bucket: Bucket) -> str:
        names = [self._params[index].fqn for index in bucket.param_indices]
        return f"bucket {bucket.index() + 1}, {bucket.flat.nbytes} bytes of {bucket.flat.dtype}: {list_text(names)}"


# Times


@dataclass(frozen=True)
class BackwardTiming:
    """One backward of this rank, in milliseconds.

    Attributes:
        compute_ms: From the first gradient to the last.
        reduce_ms: From the first bucket that was sent to the end of backward.
        overlap_ms: What the two have in common.
    """

    compute_ms: float
    reduce_ms: float
    overlap_ms: float

    @property
    def overlap_ratio(self) -> float:
        """The part of averaging that was hidden behind the computation, 0 to 1."""
        return self.overlap_ms / self.reduce_ms if self.reduce_ms else 0.0


class Stopwatch:
    """Measures one backward in so many: by the clock, or by events where gradients live on a device.

    Attributes:
        every: Each backward of this number is measured, besides the first ten.
        is_on: The running backward is measured.
    """

    __slots__ = ("_device", "_last", "_marks", "every", "is_on")

    def __init__(self, device: torch.device) -> None:
        self.every = 100
        self.is_on = False
        self._device = device
        self._marks: dict[str, float | torch.Event] = {}
        self._last: dict[str, float | torch.Event] | None = None

    def begin(self, number: int) -> None:
        """Start with backward ``number``, from 1 on, if it is one to measure."""
        self.is_on = number <= _FIRST or number % self.every == 0
        if self.is_on:
            self._marks = {}
            self.mark("begin")

    def mark(self, name: str) -> None:
        """Note the time under ``name``, once in a backward."""
        if name in self._marks:
            return
        if self._device.type == "cpu":
            self._marks[name] = time.perf_counter() * 1000
        else:
            event = torch.Event(self._device.type, enable_timing=True)
            event.record()
            self._marks[name] = event

    def end(self) -> None:
        """Keep what was measured."""
        self.mark("end")
        self._last = self._marks
        self.is_on = False

    def read(self) -> BackwardTiming | None:
        """Return the last backward that was measured; waits until the device has come to its end."""
        if self._last is None:
            return None
        begin, computed, sent, end = (self._last[name] for name in ("begin", "computed", "sent", "end"))
        if isinstance(end, torch.Event):
            end.synchronize()
        compute_ms = _between(begin, computed)
        return BackwardTiming(compute_ms, _between(sent, end), max(0.0, compute_ms - _between(begin, sent)))


def _between(start: Any, stop: Any) -> float:
    elapsed_ms: float = start.elapsed_time(stop) if isinstance(start, torch.Event) else stop - start
    return elapsed_ms

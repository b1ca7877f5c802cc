"""Which rank the others wait for, and in which part of a step.

Each rank times its own work in a step: what lies between its waits for other ranks. A step takes all ranks as long, so
the one that waits least is the one with most work of its own, and the last. Lengths of time are compared, never clocks.
A rank tells five numbers for a step: its work for data, in forward, in backward and for the optimizer; and its work in
those modules whose number has a certain bit, in turn from step to step. So a few steps spell the number of the module
in which a rank is late, however many there are.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import nn

from composable.annotation import AnnotationState, handle_of_module, replicate_state_of
from composable.comm import notice_history
from composable.engine import HostCopy, Rider, StepListener, Work
from composable.errors import UsageError
from composable.planning import name_modules
from composable.replication import ms_apart

# What ranks have told of a step: the bit that their last numbers are about, and the numbers of each rank.
ToldStep: TypeAlias = tuple[int, Mapping[int, Sequence[float]]]
_PHASES = ("data", "forward", "backward", "optimizer")
_DATA, _FORWARD, _BACKWARD, _BETWEEN, _WAIT = range(5)
# So many steps are judged, at least and at most: those that were measured last.
_LEAST_STEPS, _MOST_STEPS = 8, 50
# What a rank has lost in a phase counts from so many milliseconds on, and from such a part of the others' step; and it
# must be so many times its standard error, and the rank be last in such a part of the steps: a machine that others use
# too makes each rank late now and then. benchmarks/late_ranks.py shows what these values find.
_LEAST_MS, _LEAST_PART, _LEAST_ERRORS, _LEAST_SHARE = 2.0, 0.02, 5.0, 0.4
# The part of it that says that one module is the place.
_LEAST_SURE = 0.75


class StepTimes(StepListener):
    """Times a step of this rank.

    Args:
        now: Returns the present moment.
        numbers: The number of each handle and replicated module, by its ``id``, from 1 on, equal on all ranks.
    """

    def __init__(self, now: Callable[[], Any], numbers: Mapping[int, int]) -> None:
        self._now, self._numbers = now, numbers
        # When each piece of work or wait began, its phase, and the number of its module; 0: it is in none.
        self._marks: list[tuple[Any, int, int]] = []
        self._begin(_BETWEEN)

    def _begin(self, phase: int, owner: object = None) -> None:
        self._place = phase, self._numbers.get(id(owner), 0)
        self._marks.append((self._now(), *self._place))

    def forward_begins(self, module: nn.Module, *, broadcasts: bool) -> None:
        self._begin(_FORWARD, module)

    def forward_ended(self, module: nn.Module, *, is_awaited: bool) -> None:
        self._begin(_FORWARD)

    def backward_reached(self, owner: object) -> None:
        self._begin(_BACKWARD, owner)

    def backward_ends(self, *, averages: bool, ends: bool) -> None:
        self._begin(_BETWEEN)

    @contextmanager
    def work(self, work: Work, handle: Any, name: str) -> Iterator[None]:
        waits = work in (Work.WAIT_FOR_GATHER, Work.WAIT_FOR_REDUCE)
        if waits:
            self._marks.append((self._now(), _WAIT, 0))
        yield
        if work is Work.WAIT_FOR_GATHER:
            self._begin(self._place[0], handle)
        elif waits:
            self._marks.append((self._now(), *self._place))

    def read(self, stop: Any, bit: int = 0) -> tuple[list[float], float]:
        """Return the five numbers, and the part of the step in which this rank waited.

        ``stop`` is the end of the step, which the device has reached; ``bit``: which modules the last number is about.
        """
        spent_ms, in_modules_ms = [0.0] * (_WAIT + 1), 0.0
        for (start, phase, number), (end, *_) in pairwise([*self._marks, (stop,)]):
            if phase == _FORWARD:  # What came before it was no work of the optimizer.
                spent_ms[_DATA], spent_ms[_BETWEEN] = spent_ms[_DATA] + spent_ms[_BETWEEN], 0.0
            ms = ms_apart(start, end)
            spent_ms[phase] += ms
            in_modules_ms += ms * (number >> bit & 1)
        waited = spent_ms[_WAIT] / max(ms_apart(self._marks[0][0], stop), 1e-6)
        return [*spent_ms[:_WAIT], in_modules_ms], min(waited, 1.0)


def find_late(steps: Sequence[ToldStep], names: Sequence[str]) -> dict[str, Any]:
    """Return the figures about the rank that others wait for, each ``None`` if nothing shows that there is one.

    They are ``last_rank``; ``late_ms``, the median of the milliseconds by which its work in a step took longer than the
    others' median; and ``late``, a text: "rank 3 last in 91% of steps, by 180 ms, most in backward of blocks.7; 4%
    data". Percentages of phases are of ``late_ms``.

    Args:
        steps: What the same ranks have told of each step.
        names: The names of modules; the first one has number 1.
    """
    found: dict[str, Any] = {"last_rank": None, "late_ms": None, "late": None}
    ranks = sorted(steps[0][1]) if steps else []
    if len(steps) < _LEAST_STEPS or len(ranks) < 2:
        return found
    told = torch.tensor([[rows[rank] for rank in ranks] for _, rows in steps], dtype=torch.float64, device="cpu")
    slowest = {*told[..., :-1].quantile(0.5, dim=0).argmax(0).tolist()}  # In some phase.
    lost, index, excess = max((_lost(told, one) for one in sorted(slowest)), key=lambda each: sum(each[0].values()))
    share = float((told[..., :-1].sum(-1).argmax(1) == index).double().mean())
    if not lost or share < _LEAST_SHARE:
        return found
    place, late_ms = max(lost, key=lost.__getitem__), sum(lost.values())
    also = "".join(f"; {ms / late_ms:.0%} {phase}" for phase, ms in lost.items() if phase != place)
    in_modules = sum(lost.get(phase, 0.0) for phase in ("forward", "backward"))
    number, is_one = 0, place in ("forward", "backward") and len(names) > 1
    for bit in range(len(names).bit_length() if is_one else 0):
        about = excess[[one == bit for one, _ in steps], -1]
        part = float(about.quantile(0.5)) / in_modules if len(about) else 0.5
        number |= (part > 0.5) << bit
        is_one &= max(part, 1 - part) >= _LEAST_SURE
    where = f" of {names[number - 1] or '(root)'}" if is_one and 0 < number <= len(names) else ""
    text = f"rank {ranks[index]} last in {share:.0%} of steps, by {late_ms:.3g} ms, most in {place}{where}{also}"
    return {"last_rank": ranks[index], "late_ms": late_ms, "late": text}


def _lost(told: torch.Tensor, index: int) -> tuple[dict[str, float], int, torch.Tensor]:
    """Return the milliseconds that a rank lost in phases, ``index``, and what each of its numbers is above others'."""
    others = told[:, [one != index for one in range(told.shape[1])]].quantile(0.5, dim=1)
    excess = told[:, index] - others
    lost_ms = excess.quantile(0.5, dim=0)
    errors_ms = 1.4826 * (excess - lost_ms).abs().quantile(0.5, dim=0) / len(told) ** 0.5
    least_ms = max(_LEAST_MS, _LEAST_PART * float(others.quantile(0.5, dim=0)[:-1].sum()))
    counts = lost_ms >= (_LEAST_ERRORS * errors_ms).clamp(min=least_ms)
    return {name: ms for name, ms, one in zip(_PHASES, lost_ms.tolist(), counts) if one}, index, excess


class LateRanks(Rider):
    """Tells the other ranks how long this rank worked in the steps that it measures, and hears of theirs.

    Args:
        model: The annotated model, alike on all ranks.

    Attributes:
        numbers: The numbers of its modules, for ``StepTimes``.
        measured: Steps that this rank has not told yet: numbers that all ranks give them, times, moments of their ends.
    """

    name, count, is_optional = "watch", 2 + len(_PHASES), True

    def __init__(self, model: nn.Module) -> None:
        names: dict[object, str] = {}
        for module, fqn in name_modules([model]).items():
            if handle_of_module(module) or replicate_state_of(module):
                names.setdefault(handle_of_module(module) or module, fqn)
        self._names, self._bits = [*names.values()], len(names).bit_length()
        self.numbers = {id(owner): number for number, owner in enumerate(names, 1)}
        self.measured: deque[tuple[int, StepTimes, Any]] = deque(maxlen=_MOST_STEPS)
        self._before: HostCopy | None = None  # What came with the backward before.
        # What ranks have told of each step, by its number and theirs, and how many ranks there are.
        self._heard: dict[int, dict[int, Sequence[float]]] = {}
        self._ranks = 0
        self._is_over = False
        notice_history(self)

    def watch(self, states: Sequence[AnnotationState]) -> None:
        """Travel with the messages of the first root that has some, in place of an earlier one. Collective."""
        for state in states:
            # No message goes to all of its ranks; or what is wrong is told by the first forward.
            with suppress(UsageError):
                others = [one for one in state.riders if not isinstance(one, LateRanks)]
                if state.grid.everyone.size > 1:
                    state.carry(*others, self)
                    return

    def end(self) -> None:
        """Tell and hear nothing from now on. The numbers travel on: other ranks may end later."""
        self._is_over = True
        self.measured.clear()
        self._heard.clear()

    def tell(self, device: torch.device) -> torch.Tensor:
        told = [-1.0] * self.count
        if self._is_over:
            return torch.full((self.count,), -1.0, dtype=torch.float64, device=device)
        if self.measured and is_reached(self.measured[0][2]):
            number, times, stop = self.measured.popleft()
            told = [number, *times.read(stop, number % self._bits)[0]]
        kept = torch.tensor(told, dtype=torch.float64, device="cpu", pin_memory=device.type == "cuda")
        return kept.to(device, non_blocking=True)

    def hear(self, told: torch.Tensor, numbers: Sequence[int]) -> None:
        if self._is_over:
            return
        before, self._before = self._before, HostCopy(told)
        self._ranks = len(numbers)
        for rank, (number, *times) in zip(numbers, [] if before is None else before.read().tolist(), strict=False):
            if number >= 0:
                self._heard.setdefault(int(number), {})[rank] = times
        for old in sorted(self._heard)[:-_MOST_STEPS]:
            del self._heard[old]

    def find(self) -> dict[str, Any]:
        """Return what ``find_late`` finds in the steps of which all ranks have told."""
        whole = [(number, rows) for number, rows in sorted(self._heard.items()) if len(rows) == self._ranks]
        return find_late([(number % self._bits, rows) for number, rows in whole], self._names)

    def text(self) -> str:
        """Return a line about the rank that others wait for; empty: there is none."""
        return self.find()["late"] or ""


def is_reached(moment: Any) -> bool:
    """Say whether the device has reached a moment."""
    return isinstance(moment, float) or bool(moment.query())

"""How long a backward computes, how long it averages, and how much of that happens at the same time."""

import time
from dataclasses import dataclass

import torch

__all__ = ["BackwardTiming", "Stopwatch"]

# As many first backwards are measured as are not like the others.
_FIRST = 10


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
        last = self._last
        if last is None:
            return None
        end = last["end"]
        if isinstance(end, torch.Event):
            end.synchronize()
        computed, sent = _between(last["begin"], last["computed"]), _between(last["begin"], last["sent"])
        return BackwardTiming(computed, _between(last["sent"], end), max(0.0, computed - sent))


def _between(start: float | torch.Event, stop: float | torch.Event) -> float:
    if isinstance(start, torch.Event) and isinstance(stop, torch.Event):
        return start.elapsed_time(stop)
    assert isinstance(start, float) and isinstance(stop, float), "one clock"
    return stop - start

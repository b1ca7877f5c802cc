"""The elements behind the gradients of a round's last bucket.

One flag per parameter, set by the ranks that have a gradient for it; one number per rank, not
zero if that rank complains; how many backwards and forwards it had since the last average; and for each rank
the digits of the parameter whose gradient was the last to arrive there. They tell every rank which
parameters were unused everywhere, and of errors elsewhere, without a collective of their own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Report", "Tail"]

# Of the digits: bfloat16 holds all integers up to it.
_BASE = 256


class Report(NamedTuple):
    """What a tail said.

    Attributes:
        used: Of each parameter, how many ranks had a gradient.
        complaints: Of each rank, its number; below zero: its backward was stopped.
        last: Of each rank, the parameter whose gradient was the last to arrive; ``None``: none arrived.
        backwards: Of each rank, how many it had since the last average, this one included; 0: it follows others.
        forwards: Of each rank, how many that record a graph it had since then; 0: not counted.
    """

    used: Sequence[float] = ()
    complaints: Sequence[float] = ()
    last: Sequence[int | None] = ()
    backwards: Sequence[float] = ()
    forwards: Sequence[float] = ()

    @property
    def is_uneven(self) -> bool:
        """Ranks had different numbers of backwards since the last average."""
        return len({*self.backwards} - {0}) > 1

    @property
    def is_out_of_step(self) -> bool:
        """Ranks had different numbers of forwards or backwards since the last average, which need not be wrong."""
        return self.is_uneven or len({*self.forwards} - {0}) > 1

    @property
    def is_error(self) -> bool:
        """A rank complains."""
        return any(self.complaints)


class Tail:
    """Writes and reads the tail of every round.

    Args:
        numel: How many parameters there are.
        rank: This rank, as the transport has it.
        world_size: Ranks of the transport.
    """

    __slots__ = ("_digits", "_late", "_numel", "_own", "_own_last", "_rank", "_world_size")

    def __init__(self, numel: int, rank: int, world_size: int) -> None:
        self._numel = numel
        self._rank = rank
        self._world_size = world_size
        self._digits = 1
        while _BASE**self._digits <= numel:
            self._digits += 1
        self._own: torch.Tensor | None = None  # What stands behind the flags where this rank does not complain.
        self._own_last = -1
        self._late: tuple[torch.Tensor, torch.Event] | None = None

    @property
    def numel(self) -> int:
        """Elements that the last bucket has behind its gradients."""
        return self._numel + (3 + self._digits) * self._world_size

    def write(
        self,
        tail: torch.Tensor,
        used: Sequence[bool] | None,
        complaint: int,
        last: int | None,
        backwards: int = 1,
        forwards: int = 1,
    ) -> None:
        """Fill ``tail`` before it is sent.

        Args:
            tail: Of the last bucket.
            used: Of each parameter, whether this rank has a gradient; ``None``: all arrived, and there is no complaint.
            complaint: This rank's number.
            last: The parameter whose gradient was the last to arrive; ``None``: none has.
            backwards: Of this rank since the last average; 0: it follows others.
            forwards: The same of forwards; 0: they do not count.
        """
        flags, numbers = tail[: self._numel], tail[self._numel :]
        flags.fill_(1)
        numbers.copy_(self._own_numbers(tail, 0 if last is None else last + 1))
        if backwards != 1:
            numbers[self._world_size + self._rank] = min(backwards, _BASE)
        if forwards != 1:
            numbers[2 * self._world_size + self._rank] = min(forwards, _BASE)
        if used is not None:
            flags.copy_(torch.tensor(used, dtype=flags.dtype))
            numbers[self._rank] = complaint

    def _own_numbers(self, tail: torch.Tensor, last: int) -> torch.Tensor:
        """Return what stands behind the flags: as a rule that of the round before, so that nothing is written."""
        own = self._own
        if own is None or last != self._own_last or own.dtype != tail.dtype or own.device != tail.device:
            numbers = [0] * (self.numel - self._numel)
            numbers[self._world_size + self._rank] = numbers[2 * self._world_size + self._rank] = 1
            for digit in range(self._digits):
                numbers[(3 + digit) * self._world_size + self._rank] = last // _BASE**digit % _BASE
            own = self._own = torch.tensor(numbers, dtype=tail.dtype, device=tail.device)
            self._own_last = last
        return own

    def is_complaint(self, values: Sequence[float]) -> bool:
        """Say whether a rank complains; ``values`` is what a tail holds after the all-reduce."""
        return any(values[self._numel : self._numel + self._world_size])

    def read(self, tail: torch.Tensor) -> Report | None:
        """Return what the ranks say, if one complains or had another number of backwards or forwards.

        On a device other than the CPU, where reading would stop this thread until the device is
        idle, return that of the round before, if any.
        """
        if tail.device.type == "cpu":
            count = self._world_size
            told: list[float] = tail[self._numel : self._numel + 3 * count].tolist()
            # As a rule no complaint, one backward each, and equal numbers of forwards.
            is_alike = told[2 * count :].count(told[-1]) == count
            is_plain = is_alike and not any(told[:count]) and told[count : 2 * count].count(1) == count
            return None if is_plain else self._notable(tail.tolist())
        report = None
        if self._late is not None:
            host, event = self._late
            event.synchronize()  # Of the round before; long done.
            values = host.tolist()
            values[self._numel + self._rank] = 0  # This rank has raised it by itself.
            report = self._notable(values)
        host = torch.empty(tail.shape, dtype=tail.dtype, pin_memory=tail.device.type == "cuda")
        host.copy_(tail, non_blocking=True)
        event = torch.Event(tail.device.type)
        event.record()
        self._late = (host, event)
        return report

    def _notable(self, values: Sequence[float]) -> Report | None:
        report = self._report(values)
        return report if report.is_error or report.is_out_of_step else None

    def _report(self, values: Sequence[float]) -> Report:
        start, count = self._numel, self._world_size
        last: list[int | None] = []
        for rank in range(count):
            digits = [round(values[start + (3 + digit) * count + rank]) for digit in range(self._digits)]
            number = sum(value * _BASE**digit for digit, value in enumerate(digits))
            last.append(number - 1 if number else None)
        complaints, backwards, forwards = (values[at : at + count] for at in range(start, start + 3 * count, count))
        return Report(values[:start], complaints, last, backwards, forwards)

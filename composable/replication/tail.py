"""The elements behind the gradients of a round's last bucket.

One flag per parameter, set by the ranks that have a gradient for it, and one number per rank, not
zero if that rank complains. They tell every rank which parameters were unused everywhere, and of
errors elsewhere, without a collective of their own.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Report", "Tail"]


class Report(NamedTuple):
    """What a tail said.

    Attributes:
        used: Of each parameter, how many ranks had a gradient.
        complaints: Of each rank, its number; below zero: its backward was stopped.
    """

    used: Sequence[float]
    complaints: Sequence[float]


class Tail:
    """Writes and reads the tail of every round.

    Args:
        numel: How many parameters there are.
        rank: This rank, as the transport has it.
        world_size: Ranks of the transport.
    """

    __slots__ = ("_late", "_numel", "_rank", "_world_size")

    def __init__(self, numel: int, rank: int, world_size: int) -> None:
        self._numel = numel
        self._rank = rank
        self._world_size = world_size
        self._late: tuple[torch.Tensor, torch.Event] | None = None

    @property
    def numel(self) -> int:
        """Elements that the last bucket has behind its gradients."""
        return self._numel + self._world_size

    def write(self, tail: torch.Tensor, used: Sequence[bool] | None, complaint: int) -> None:
        """Fill ``tail`` before it is sent.

        Args:
            tail: Of the last bucket.
            used: Of each parameter, whether this rank has a gradient; ``None``: all arrived, and there is no complaint.
            complaint: This rank's number.
        """
        flags, complaints = tail[: self._numel], tail[self._numel :]
        flags.fill_(1)
        complaints.zero_()
        if used is not None:
            flags.copy_(torch.tensor(used, dtype=flags.dtype))
            complaints[self._rank] = complaint

    def read(self, tail: torch.Tensor) -> Report | None:
        """Return what the ranks say, if one complains.

        On a device other than the CPU, where reading would stop this thread until the device is
        idle, return that of the round before, if any.
        """
        if tail.device.type == "cpu":
            complaints: list[float] = tail[self._numel :].tolist()
            return self._report(tail.tolist()) if any(complaints) else None
        report = None
        if self._late is not None:
            host, event = self._late
            event.synchronize()  # Of the round before; long done.
            values = host.tolist()
            values[self._numel + self._rank] = 0  # This rank has raised it by itself.
            report = self._report(values)
        host = torch.empty(tail.shape, dtype=tail.dtype, pin_memory=tail.device.type == "cuda")
        host.copy_(tail, non_blocking=True)
        event = torch.Event(tail.device.type)
        event.record()
        self._late = (host, event)
        return report

    def _report(self, values: Sequence[float]) -> Report:
        return Report(values[: self._numel], values[self._numel :])

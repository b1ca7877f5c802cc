"""Secondary shards: what each of fewer ranks holds of a handle after forward, so that backward gathers from these.

A forward leaves them, or forwards fill them from shards and they serve until shards are written.

Source: hpZ of ZeRO++, arXiv 2306.10209.
"""

from collections.abc import Sequence

import torch

from composable.comm import Pending
from composable.engine.buffer import FlatBuffer

__all__ = ["Filling", "SecondaryShards"]


class Filling:
    """Two gathers, one after the other: of a secondary shard, and from it."""

    __slots__ = ("_filled", "_flat", "_second", "_secondary")

    def __init__(self, secondary: "SecondaryShards", flat: FlatBuffer) -> None:
        self._flat = flat
        self._secondary = secondary
        self._filled = secondary.begin_fill(flat)
        self._second: Pending | None = None

    def go_on(self) -> Pending:
        """Start the second gather, once the first one is over; return it."""
        if self._second is None:
            self._filled.finish()
            self._second = self._secondary.begin_gather(self._flat)
        return self._second

    def finish(self) -> None:
        self.go_on().finish()

    def is_over(self) -> bool:
        return self._second is not None and self._second.is_over()


class SecondaryShards:
    """This rank's secondary shards [W * S / n] of a handle's flat buffers, from which n ranks gather.

    Args:
        buffers: Of the handle, not connected yet.
        fills: Forwards fill them, and they serve until shards are written; else a forward leaves them.

    Attributes:
        are_there: Those of a forward are there.
        are_source: The next gather, or the one under way, is from these.
        version: Of the shards when what they were cut from was gathered.
    """

    __slots__ = ("_buffers", "_shards", "are_source", "are_there", "fills", "version")

    def __init__(self, buffers: Sequence[FlatBuffer], *, fills: bool) -> None:
        self._buffers = tuple(buffers)
        self._shards: dict[FlatBuffer, torch.Tensor] = {}
        self.fills = fills
        self.are_there = self.are_source = False
        self.version = 0

    @property
    def nbytes(self) -> int:
        """What they take."""
        return sum(shard.nbytes for shard in self._shards.values())

    def begin(self, flat: FlatBuffer) -> Pending:
        """Start to gather a buffer from them, after filling them where they are not there.

        Collective: all ranks of the smaller group, same order; to fill, all with the same place on other hosts.
        """
        return self.begin_gather(flat) if self.are_there else Filling(self, flat)

    def begin_gather(self, flat: FlatBuffer) -> Pending:
        """Start to gather a buffer from what is there."""
        return flat.routes.secondary_path.begin(flat.allocated(), self._shards[flat])

    def begin_fill(self, flat: FlatBuffer) -> Pending:
        """Allocate a secondary shard and start to gather it from shards, on the current stream."""
        path = flat.routes.fill_path
        if flat not in self._shards:
            with torch.inference_mode(mode=False):
                numel = flat.shard.numel() * path.transport.world_size
                self._shards[flat] = torch.empty(numel, dtype=flat.compute_dtype, device=flat.device)
        return path.begin(self._shards[flat], flat.shard)

    def keep(self, version: int) -> None:
        """Copy them out of the buffers, which are full, to new memory on the current stream; those of before go."""
        self.are_there = False
        self._shards.clear()
        for flat in self._buffers:
            if flat.is_empty:
                continue
            path = flat.routes.secondary_path
            numel = flat.plan.layout.numel // path.transport.world_size
            start = path.transport.rank * numel
            self._shards[flat] = flat.allocated()[start : start + numel].clone()
        self.version = version
        # Last: what was cut short is not used.
        self.are_there = True

    def drop(self) -> None:
        """Free them, also those of a copy that was cut short."""
        self.are_there = False
        self._shards.clear()

    def are_fresh(self) -> bool:
        """Say whether they have, for this rank, what filling them from its shards would put there."""
        return self.are_there and all(self._is_fresh(flat) for flat in self._buffers)

    def _is_fresh(self, flat: FlatBuffer) -> bool:
        path = flat.routes.fill_path
        if flat.is_empty:
            return True
        if flat not in self._shards or not flat.is_usable:
            return False
        numel = flat.shard.numel()
        return flat.equals_shard(self._shards[flat][path.transport.rank * numel :][:numel])

"""A transport that writes down what passes through it."""

from collections import Counter
from typing import Any

import torch

from composable.collectives import Pending, Transport
from composable.state import RootState


class CountingTransport(Transport):
    """Forwards to another transport and records (operation, key, bytes of the whole buffer)."""

    def __init__(self, inner: Transport) -> None:
        self.name = inner.name
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.records: list[tuple[str, int, int]] = []
        self._inner = inner

    @classmethod
    def install(cls, root: RootState) -> "CountingTransport":
        """Put one counter before the transport of every handle; they share one transport."""
        buffers = [flat for handle in root._all_handles for flat in handle.buffers]
        transports = {flat.transport for flat in buffers}
        assert len(transports) == 1
        counting = cls(transports.pop())
        for flat in buffers:
            flat.transport = counting
        return counting

    def counts(self) -> dict[str, int]:
        """Return the number of collectives by operation."""
        return dict(Counter(op for op, _, _ in self.records))

    def bytes(self) -> dict[str, int]:
        """Return the bytes of whole buffers by operation."""
        totals: Counter[str] = Counter()
        for op, _, count in self.records:
            totals[op] += count
        return dict(totals)

    def reset(self) -> None:
        """Forget what was recorded."""
        self.records.clear()

    def begin_all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, key: int) -> Pending:
        self._record("all_gather", key, buffer)
        return self._inner.begin_all_gather(buffer, shard, key)

    def begin_reduce_scatter(self, source: torch.Tensor, shard: torch.Tensor, key: int, **options: Any) -> Pending:
        self._record("reduce_scatter", key, source)
        return self._inner.begin_reduce_scatter(source, shard, key, **options)

    def begin_all_reduce(self, tensor: torch.Tensor, key: int, **options: Any) -> Pending:
        self._record("all_reduce", key, tensor)
        return self._inner.begin_all_reduce(tensor, key, **options)

    def begin_broadcast(self, tensor: torch.Tensor, source_rank: int, key: int) -> Pending:
        self._record("broadcast", key, tensor)
        return self._inner.begin_broadcast(tensor, source_rank, key)

    def _record(self, op: str, key: int, buffer: torch.Tensor) -> None:
        self.records.append((op, key, buffer.numel() * buffer.element_size()))

"""Writes down every collective that goes through a transport, and counts what ranks send each other beside."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch

from composable import fully_shard
from composable.annotation.root import Root
from composable.comm import Pending, Ranks, Transport

__all__ = ["Collective", "CountingTransport", "counting_ranks", "root_of"]

Messages: TypeAlias = Sequence[tuple[torch.Tensor, int]]


def root_of(model: Any) -> Root:
    """Return the root of a fully sharded model, of which the first forward may be still to come."""
    return fully_shard.state(model).lazy_init()


class Collective(NamedTuple):
    """One call; ``bytes`` is the size of the whole buffer, on all ranks together."""

    op: str
    key: int
    bytes: int


class CountingTransport(Transport):
    """Hands every call on to another transport and remembers it.

    Attributes:
        records: In order of the calls; several transports may share one list.
        kind: Begins the names of operations.
    """

    def __init__(self, inner: Transport, records: list[Collective] | None = None, kind: str = "") -> None:
        self.kind = kind
        self.name = inner.name
        self.rank = inner.rank
        self.world_size = inner.world_size
        self.records: list[Collective] = [] if records is None else records
        self._inner = inner

    @classmethod
    def install(cls, root: Root) -> "CountingTransport":
        """Put itself between the handles of ``root`` and their transports; returns one that has all records."""
        records: list[Collective] = []
        wrapped: dict[Transport, CountingTransport] = {}
        for handle in root.handles:
            for flat in handle.buffers:
                for path in (flat.routes.gather_path, flat.routes.gradient_path):
                    while hasattr(path, "inner"):
                        path = path.inner
                    path.transport = wrapped.setdefault(path.transport, cls(path.transport, records))
                again = getattr(flat.routes, "secondary_path", None)
                if again is not None:
                    again.transport = cls(again.transport, records, "secondary_")
        return next(iter(wrapped.values()))

    def counts(self) -> dict[str, int]:
        """Return the number of calls by operation."""
        return dict(Counter(record.op for record in self.records))

    def bytes(self) -> dict[str, int]:
        """Return the bytes by operation."""
        total: Counter[str] = Counter()
        for record in self.records:
            total[record.op] += record.bytes
        return dict(total)

    def check(self, model: Any, steps: int = 1) -> dict[str, int]:
        """Compare numbers and bytes of collectives with the plan of a fully sharded model; return the numbers."""
        counts, sent = self.counts(), self.bytes()
        expected = fully_shard.state(model).plan.expected_collectives()
        for op in ("all_gather", "secondary_all_gather", "reduce_scatter", "all_reduce"):
            assert counts.get(op, 0) == steps * sum(getattr(one, f"{op}s") for one in expected), op
            assert sent.get(op, 0) == steps * sum(getattr(one, f"{op}_bytes") for one in expected), op
        return counts

    def reset(self) -> None:
        """Forget what was recorded."""
        self.records.clear()

    def allocate_key(self) -> int:
        return self._inner.allocate_key()

    def begin_all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, key: int) -> Pending:
        self._record("all_gather", key, buffer)
        return self._inner.begin_all_gather(buffer, shard, key)

    def begin_reduce_scatter(
        self, source: torch.Tensor, shard: torch.Tensor, key: int, *, scale: float = 1.0
    ) -> Pending:
        self._record("reduce_scatter", key, source)
        return self._inner.begin_reduce_scatter(source, shard, key, scale=scale)

    def begin_all_reduce(self, tensor: torch.Tensor, key: int, *, scale: float = 1.0) -> Pending:
        self._record("all_reduce", key, tensor)
        return self._inner.begin_all_reduce(tensor, key, scale=scale)

    def begin_broadcast(self, tensor: torch.Tensor, source_rank: int, key: int) -> Pending:
        self._record("broadcast", key, tensor)
        return self._inner.begin_broadcast(tensor, source_rank, key)

    def _record(self, op: str, key: int, tensor: torch.Tensor) -> None:
        self.records.append(Collective(self.kind + op, key, tensor.numel() * tensor.element_size()))


@contextmanager
def counting_ranks() -> Iterator[Counter[str]]:
    """Count what ``Ranks`` sends from here: reductions between several ranks, exchanges by their kind, and messages."""
    counts: Counter[str] = Counter()
    reduce, begin, exchange = Ranks.reduce, Ranks.begin_exchange, Ranks.exchange

    def counted_kind(self: Ranks, content: bytes, kind: str, **sides: int | None) -> list[bytes]:
        counts[kind] += self.size > 1
        return exchange(self, content, kind, **sides)

    def counted_reduce(self: Ranks, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        counts["reductions"] += self.size > 1
        return reduce(self, tensor, op)

    def counted_exchange(self: Ranks, sends: Messages, receives: Messages) -> Callable[[], None]:
        counts["messages"] += len(sends) + len(receives)
        counts["bytes"] += sum(message.nbytes for message, _ in sends)
        return begin(self, sends, receives)

    with (
        mock.patch.object(Ranks, "reduce", counted_reduce),
        mock.patch.object(Ranks, "begin_exchange", counted_exchange),
        mock.patch.object(Ranks, "exchange", counted_kind),
    ):
        yield counts

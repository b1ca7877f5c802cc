"""What travels in no bucket: sparse gradients, buffers, first values, and all that compiled autograd traces.

Under compiled autograd a backward is a graph, which nothing tells of its end. So there are no rounds: a gradient is
averaged where it is accumulated, and a backend of the compiler may join the all-reduces. It knows them by what they
are: the sum over a group of a scaled gradient, copied back into it. So other collectives, of tensor parallelism say,
stay as they are.
What a bucket waits for goes to the end of the graph, or before the first that reads one of its gradients.
Every rank must run the same graph.

Source: bucketing, PyTorch Distributed, arXiv 2006.15704.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn

from composable.comm import Transport
from composable.errors import UsageError, place_of_rank
from composable.ground.torch_private import foreach_copy_, foreach_mul, graph_collectives, opaque

__all__ = ["FORMS", "BufferSync", "SparseGradients", "broadcast_tensors", "join_all_reduces", "traced_arrival"]


# Instead of a number of rows: this rank has no gradient, or one that is not sparse.
_NONE = -1
_DENSE = -2


class SparseGradients:
    """Averages the gradients of parameters that are rows of tables, such as those of ``nn.Embedding(sparse=True)``.

    Args:
        params: Equal on all ranks.
        transport: Of the ranks.
    """

    __slots__ = ("_key", "_params", "_transport")

    def __init__(self, params: Sequence[nn.Parameter], transport: Transport) -> None:
        self._params = params
        self._transport = transport
        self._key = transport.allocate_key() if params else -1

    def average(self, scale: float, *, is_stopped: bool = False) -> None:
        """Replace every gradient by its mean; ranks without one count as zero, and get it. Collective.

        A gradient that no rank has stays ``None``. One that is dense on a rank, as where a layer shares a table,
        is dense on all of them then.

        Args:
            scale: What sums are multiplied with.
            is_stopped: Meet the other ranks, but take part without gradients, and leave them as they are.
        """
        if not self._params or self._transport.world_size == 1:
            return
        grads = [None if is_stopped or param.grad is None else param.grad.detach() for param in self._params]
        rows = [grad.coalesce() if grad is not None and _is_table(grad) else None for grad in grads]
        own = [
            _NONE if grad is None else _DENSE if row is None else row.indices().shape[1]
            for grad, row in zip(grads, rows, strict=True)
        ]
        counts = self._gather(torch.tensor(own, device=self._params[0].device)).tolist()
        for index, param in enumerate(self._params):
            of_ranks = [of_rank[index] for of_rank in counts]
            if _DENSE in of_ranks:
                averaged = self._average_dense(param, grads[index], scale)
            elif max(of_ranks) >= 0:
                averaged = self._average_rows(param, rows[index], of_ranks, scale)
            else:
                continue
            if not is_stopped:
                param.grad = averaged

    def _average_dense(self, param: nn.Parameter, grad: torch.Tensor | None, scale: float) -> torch.Tensor:
        if grad is None:
            whole = torch.zeros_like(param, memory_format=torch.contiguous_format).detach()
        else:
            whole = (grad.to_dense() if grad.layout != torch.strided else grad.clone()).contiguous()
        flat = torch.view_as_real(whole).view(-1) if whole.is_complex() else whole.view(-1)
        self._transport.begin_all_reduce(flat, self._key, scale=scale).finish()
        return whole

    def _average_rows(
        self, param: nn.Parameter, rows: torch.Tensor | None, counts: Sequence[int], scale: float
    ) -> torch.Tensor:
        """Return the mean of ``rows`` over the ranks, of which ``counts`` is how many each has."""
        most = max(counts)
        numbers = torch.zeros(most, dtype=torch.int64, device=param.device)
        values = torch.zeros(most, *param.shape[1:], dtype=param.dtype, device=param.device)
        if rows is not None:
            count = rows.indices().shape[1]
            numbers[:count] = rows.indices()[0]
            values[:count] = rows.values()
        every_number, every_value = self._gather(numbers), self._gather(values)
        # Every rank adds up in the same order, so that the ranks stay equal.
        filled = [max(count, 0) for count in counts]  # Nothing at all on a rank without a gradient.
        numbers = torch.cat([part[:count] for part, count in zip(every_number, filled, strict=True)])
        values = torch.cat([part[:count] for part, count in zip(every_value, filled, strict=True)])
        values *= scale
        return torch.sparse_coo_tensor(numbers[None], values, param.shape, check_invariants=False).coalesce()

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return every rank's tensor, one after the other in a dim of their own."""
        whole = tensor.new_empty(self._transport.world_size, *tensor.shape)
        flat, part = whole.view(-1), tensor.reshape(-1)
        if part.numel():
            as_bytes = (flat.view(torch.uint8), part.view(torch.uint8))
            self._transport.begin_all_gather(*as_bytes, self._key).finish()
        return whole


def _is_table(grad: torch.Tensor) -> bool:
    return grad.layout == torch.sparse_coo and grad.sparse_dim() == 1


# Tensors below this size travel together.
_PACKED_BYTES = 2**20


class BufferSync:
    """Gives every rank the buffers of the first one.

    Args:
        slots: Where each buffer hangs: the module's buffers and the name in them. A module may
            put another tensor there between two forwards.
        transport: Of the ranks.
        device: Of the transport's tensors.
    """

    def __init__(
        self, slots: Sequence[tuple[dict[str, torch.Tensor | None], str]], transport: Transport, device: torch.device
    ) -> None:
        self.slots = slots
        self._transport = transport
        self._device = device
        self._key = transport.allocate_key()
        self._packed: _Packed | None = None

    def broadcast(self, source_rank: int = 0) -> None:
        """Overwrite the buffers with those of one rank, all in one broadcast. Collective."""
        if self._transport.world_size == 1:
            return
        # Through `data`, since a backward may still need what a buffer was saved for.
        tensors = [buffers.data for owner, name in self.slots if (buffers := owner[name]) is not None]
        if self._packed is None or not self._packed.fits(tensors):
            self._packed = _Packed(tensors, self._device)
        self._packed.broadcast(tensors, self._transport, self._key, source_rank)


class _Packed:
    """Memory for tensors of any dtypes, as bytes back to back."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        *starts, stop = accumulate((-(-tensor.nbytes // 16) * 16 for tensor in tensors), initial=0)
        self.flat = torch.zeros(stop, dtype=torch.uint8, device=device)
        self.views = [
            self.flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]

    def fits(self, tensors: Sequence[torch.Tensor]) -> bool:
        return len(tensors) == len(self.views) and all(
            tensor.shape == view.shape and tensor.dtype == view.dtype
            for tensor, view in zip(tensors, self.views, strict=True)
        )

    def broadcast(self, tensors: list[torch.Tensor], transport: Transport, key: int, source_rank: int = 0) -> None:
        if not self.flat.numel():
            return
        if transport.rank == source_rank:
            foreach_copy_(self.views, tensors)
        transport.begin_broadcast(self.flat, source_rank, key).finish()
        if transport.rank != source_rank:
            foreach_copy_(tensors, self.views)


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], transport: Transport, device: torch.device, source_rank: int = 0
) -> None:
    """Overwrite ``tensors``, of any shapes and dtypes, with those of one rank, a few bytes at a time. Collective."""
    if transport.world_size == 1:
        return
    key = transport.allocate_key()
    small: list[torch.Tensor] = []
    for tensor in tensors:
        data = tensor.data
        if data.nbytes >= _PACKED_BYTES and data.is_contiguous() and data.device == device:
            transport.begin_broadcast(data.view(-1).view(torch.uint8), source_rank, key).finish()
            continue
        small.append(data)
        if sum(one.nbytes for one in small) >= _PACKED_BYTES:
            _Packed(small, device).broadcast(small, transport, key, source_rank)
            small = []
    if small:
        _Packed(small, device).broadcast(small, transport, key, source_rank)


def traced_arrival(find_reducer: Callable[[], Any], fqn: str) -> Callable[[torch.Tensor], None]:
    """Return what a graph does once the ``grad`` of a parameter, of any shape, has this backward's gradient.

    The compiler makes another graph where one of the reducer's attributes that are read here changes.
    """

    def arrive(param: torch.Tensor) -> None:
        found = find_reducer()
        if found is None or param.grad is None or not found.requires_gradient_sync:
            return
        exchange = found.exchange
        if not (exchange.group_name or found.steppers):
            return
        if found.untraceable:
            _refuse(found.untraceable, fqn)
        _average_in_graph(param.grad, exchange.scale, exchange.group_name)

    return arrive


def _average_in_graph(grad: torch.Tensor, scale: float, group_name: str) -> None:
    """Make ``grad`` its mean over the ranks of a group; ``join_all_reduces`` knows these operations again."""
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    real.copy_(graph_collectives.wait_tensor(graph_collectives.all_reduce(real * scale, "sum", group_name)))


@opaque
def _refuse(why: str, fqn: str) -> None:
    raise UsageError(
        f"compiled autograd runs this backward, where {why}",
        at=f"{place_of_rank()}, parameter {fqn!r}",
        fix="leave compiled autograd off: compiled models need it for nothing",
    )


@dataclass(frozen=True)
class _Average:
    """One gradient's average: ``grad.copy_(wait(all_reduce(grad * scale)))``, as nodes of a graph."""

    grad: fx.Node
    scaled: fx.Node
    reduced: fx.Node
    waited: fx.Node
    copied: fx.Node

    @property
    def key(self) -> object:
        """What the averages of one bucket have in common: group, scale, dtype, device."""
        return self.reduced.args[2], self.scaled.args[1], self._like.dtype, self._like.device

    @property
    def numel_bytes(self) -> int:
        return self._like.nbytes

    @property
    def _like(self) -> torch.Tensor:
        example: torch.Tensor = self.grad.meta["example_value"]
        return example

    @property
    def gives(self) -> set[fx.Node]:
        """Nodes whose value the average is."""
        viewed = _made_by(self.grad, torch.view_as_real)
        return {self.grad, self.copied, *(viewed.all_input_nodes if viewed is not None else ())}


@dataclass
class _Bucket:
    """Averages that travel together."""

    averages: list[_Average] = field(default_factory=list)
    numel_bytes: int = 0
    gives: set[fx.Node] = field(default_factory=set)

    def add(self, average: _Average) -> None:
        self.averages.append(average)
        self.numel_bytes += average.numel_bytes
        self.gives |= average.gives


def join_all_reduces(graph: fx.Graph, cap_bytes: int, form: str) -> int:
    """Join the averages of gradients in ``graph``; returns how many all-reduces there are now.

    Args:
        graph: As the compiler hands it to a backend.
        cap_bytes: Most bytes of gradients in one bucket that holds more than one.
        form: A key of ``FORMS``.
    """
    averages = {average.copied: average for average in _averages(graph)}
    own = {node for average in averages.values() for node in (average.scaled, average.copied)}
    buckets: list[_Bucket] = []
    filling: dict[object, _Bucket] = {}
    for node in graph.nodes:
        if node not in own:
            # What reads an average waits for its bucket: nothing that comes later can be in that.
            filling = {key: one for key, one in filling.items() if one.gives.isdisjoint(node.all_input_nodes)}
        average = averages.get(node)
        if average is not None:
            bucket = filling.get(average.key)
            if bucket is None or bucket.numel_bytes + average.numel_bytes > cap_bytes:
                bucket = filling[average.key] = _Bucket()
                buckets.append(bucket)
            bucket.add(average)
    for bucket in buckets:
        _join(graph, bucket, *FORMS[form])
    graph.lint()
    return len(buckets)


def _averages(graph: fx.Graph) -> list[_Average]:
    """Return the averages in ``graph``, in order."""
    found = []
    for copied in graph.nodes:
        if not (copied.op == "call_method" and copied.target == "copy_" and len(copied.args) == 2):
            continue
        waited = _made_by(copied.args[1], graph_collectives.wait_tensor)
        reduced = waited and _made_by(waited.args[0], graph_collectives.all_reduce)
        scaled = reduced and _made_by(reduced.args[0], operator.mul)
        if not (waited and reduced and scaled) or reduced.args[1] != "sum":
            continue
        grad = copied.args[0]
        if (
            scaled.args[0] is grad
            and isinstance(grad, fx.Node)
            and all(len(one.users) == 1 for one in (waited, reduced, scaled))
        ):
            found.append(_Average(grad, scaled, reduced, waited, copied))
    return found


def _made_by(node: Any, target: object) -> fx.Node | None:
    if isinstance(node, fx.Node) and node.op == "call_function" and node.target is target and node.args:
        return node
    return None


_Start = Callable[..., Any]
_End = Callable[..., None]


def _join(graph: fx.Graph, bucket: _Bucket, start: _Start, end: _End) -> None:
    last = bucket.averages[-1]
    grads = [average.grad for average in bucket.averages]
    with graph.inserting_before(last.scaled):
        started = graph.call_function(start, (grads, last.scaled.args[1], last.reduced.args[2]))
    # The first node after the last of the gradients that reads an average, or the end.
    reader = last.copied.next
    while reader.op != "output" and bucket.gives.isdisjoint(reader.all_input_nodes):
        reader = reader.next
    with graph.inserting_before(reader):
        graph.call_function(end, (grads, started))
    for average in bucket.averages:
        # Who reads the result of the copy reads the gradient.
        average.copied.replace_all_uses_with(average.grad)
        for node in (average.copied, average.waited, average.reduced, average.scaled):
            graph.erase_node(node)


# As functions, which the compiler traces in its turn.


def _sum_of_concatenated(grads: Sequence[torch.Tensor], scale: float, group_name: str) -> torch.Tensor:
    flat = torch.cat([grad.reshape(-1) for grad in grads]) if len(grads) > 1 else grads[0].reshape(-1)
    summed: torch.Tensor = graph_collectives.all_reduce(flat * scale, "sum", group_name)
    return summed


def _take_apart(grads: Sequence[torch.Tensor], summed: torch.Tensor) -> None:
    parts = graph_collectives.wait_tensor(summed).split([grad.numel() for grad in grads])
    for grad, part in zip(grads, parts, strict=True):
        grad.copy_(part.view(grad.shape))


def _sums_of_coalesced(grads: Sequence[torch.Tensor], scale: float, group_name: str) -> list[torch.Tensor]:
    summed: list[torch.Tensor] = graph_collectives.all_reduce_coalesced(
        foreach_mul(list(grads), scale), "sum", group_name
    )
    return summed


def _take_each(grads: Sequence[torch.Tensor], summed: Sequence[torch.Tensor]) -> None:
    for grad, part in zip(grads, summed, strict=True):
        grad.copy_(graph_collectives.wait_tensor(part))


# How a bucket travels: what starts it, and what ends it.
FORMS: dict[str, tuple[_Start, _End]] = {
    "concatenated": (_sum_of_concatenated, _take_apart),
    "coalesced": (_sums_of_coalesced, _take_each),
}

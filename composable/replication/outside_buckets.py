"""Messages outside of buckets: broadcasts, and averages in a compiled backward.

Under compiled autograd a backward is a graph, at whose end no callback runs. So there are no rounds: a gradient is
averaged where it is accumulated, and a backend of the compiler may join the all-reduces. The backend finds them by
their form: a scaled gradient is summed over a group, and the sum is copied back to it. Other collectives, such as those
of tensor parallelism, stay as they are.
The wait for a bucket goes to the end of the graph, or before the first node that reads one of its gradients.
Every rank must run the same graph.

Source: bucketing, PyTorch Distributed, arXiv 2006.15704.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from composable.comm import Ranks, Transport
from composable.errors import UsageError, place_of_rank
from composable.ground.torch_private import foreach_copy_, foreach_mul, graph_collectives, opaque
from composable.replication.tensors import local_of


class BufferSync:
    """Gives every rank the buffers of the first rank, all in one broadcast.

    Args:
        slots: (dict of a module's buffers, name in it) of each buffer. A module may put another tensor there between
            two forwards.
        transport: The transport between the ranks.
        device: The device of the tensors that are sent.
    """

    def __init__(
        self, slots: Sequence[tuple[dict[str, torch.Tensor | None], str]], transport: Transport, device: torch.device
    ) -> None:
        self.slots = slots
        self._transport = transport
        self._device = device
        self._key = transport.allocate_key()
        self._flat = torch.empty(0)
        self._views: list[torch.Tensor] = []

    def broadcast(self, source_rank: int = 0) -> None:
        """Overwrite the buffers with the buffers of rank ``source_rank``. Collective."""
        # Through `data`, since a backward may still need what a buffer was saved for.
        tensors = [buffer.data for owner, name in self.slots if (buffer := owner[name]) is not None]
        if self._transport.world_size == 1 or not tensors:
            return
        if [(one.shape, one.dtype) for one in tensors] != [(one.shape, one.dtype) for one in self._views]:
            self._pack(tensors)
        if self._transport.rank == source_rank:
            foreach_copy_(self._views, tensors)
        self._transport.begin_broadcast(self._flat, source_rank, self._key).finish()
        if self._transport.rank != source_rank:
            foreach_copy_(tensors, self._views)

    def _pack(self, tensors: Sequence[torch.Tensor]) -> None:
        """Allocate one memory for the tensors, of any dtypes, as bytes one after the other."""
        *starts, stop = accumulate((-(-tensor.nbytes // 16) * 16 for tensor in tensors), initial=0)
        self._flat = torch.zeros(stop, dtype=torch.uint8, device=self._device)
        self._views = [
            self._flat[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]


@torch.no_grad()
def broadcast_params(params: Iterable[nn.Parameter], ranks: Ranks, source: int) -> None:
    """Overwrite ``params``, of any shapes and dtypes, with the values of global rank ``source``. Collective."""
    for param in params:
        local = local_of(param)
        sent = local.to(ranks.device).contiguous()
        ranks.broadcast(sent, ranks.numbers.index(source))
        if sent.data_ptr() != local.data_ptr():
            local.copy_(sent)


def traced_arrival(find_reducer: Callable[[], Any], fqn: str) -> Callable[[torch.Tensor], None]:
    """Return the function that averages ``param.grad``, of any shape, in a graph, once it has this backward's gradient.

    The compiler makes another graph if one of the reducer's attributes that are read here changes.
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
    """Make ``grad`` its mean over the ranks of a group; ``join_all_reduces`` looks for these operations."""
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    real.copy_(graph_collectives.wait_tensor(graph_collectives.all_reduce(real * scale, "sum", group_name)))


def why_untraceable(reducer: Any) -> str:
    """Return why a graph of compiled autograd cannot average the gradients of ``reducer``; "": it can."""
    options = reducer.options
    found = {
        "a communication hook cannot run": reducer.exchange.hook is not None,
        "ranks cannot tell each other which parameters they used (find_unused_parameters=True)": (
            options.find_unused_parameters
        ),
        "gradients are averaged one by one (static_graph, a delayed all-reduce, set_is_last_backward(False))": (
            options.static_graph or options.delay.params or not reducer.is_last_backward
        ),
        "gradients that are sparse, or that tensor parallelism has split, cannot be averaged": any(
            item.is_sparse or isinstance(item.param, DTensor) for item in reducer.params
        ),
        "an optimizer cannot step inside of it": reducer.steppers,
        "ranks without inputs cannot follow (Join)": reducer.join is not None,
        "nothing tells modules when to hold their own parameters again (mp_policy)": options.policy,
        "a module whose annotation was removed cannot run": reducer._is_closed,
    }
    return next((why for why, holds in found.items() if holds), "")


@opaque
def _refuse(why: str, fqn: str) -> None:
    raise UsageError(
        f"compiled autograd runs this backward, where {why}",
        at=f"{place_of_rank()}, parameter {fqn!r}",
        fix="leave compiled autograd off: compiled models do not need it",
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
        """Group, scale, dtype and device, which are equal for all averages of one bucket."""
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
        """Nodes whose value is the average."""
        viewed = _made_by(self.grad, torch.view_as_real)
        return {self.grad, self.copied, *(viewed.all_input_nodes if viewed is not None else ())}


@dataclass
class _Bucket:
    """Averages that are sent together."""

    averages: list[_Average] = field(default_factory=list)
    numel_bytes: int = 0
    gives: set[fx.Node] = field(default_factory=set)

    def add(self, average: _Average) -> None:
        self.averages.append(average)
        self.numel_bytes += average.numel_bytes
        self.gives |= average.gives


def join_all_reduces(graph: fx.Graph, cap_bytes: int, form: str) -> int:
    """Join the averages of gradients in ``graph``; returns how many all-reduces the graph has now.

    Args:
        graph: As the compiler hands it to a backend.
        cap_bytes: The most bytes of gradients in a bucket that holds more than one gradient.
        form: A key of ``FORMS``.
    """
    averages = {average.copied: average for average in _averages(graph)}
    own = {node for average in averages.values() for node in (average.scaled, average.copied)}
    buckets: list[_Bucket] = []
    filling: dict[object, _Bucket] = {}
    for node in graph.nodes:
        if node not in own:
            # A node that reads an average waits for its bucket: later averages cannot be in that bucket.
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
        # Nodes that read the result of the copy read the gradient now.
        average.copied.replace_all_uses_with(average.grad)
        for node in (average.copied, average.waited, average.reduced, average.scaled):
            graph.erase_node(node)


# The forms of a bucket, as functions, which the compiler traces in turn.


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


# For each form of a bucket: the function that starts its all-reduce, and the function that ends it.
FORMS: dict[str, tuple[_Start, _End]] = {
    "concatenated": (_sum_of_concatenated, _take_apart),
    "coalesced": (_sums_of_coalesced, _take_each),
}

"""Messages outside of buckets: broadcasts, and averages in a compiled backward.

Under compiled autograd a backward is a graph, at whose end no callback runs. So there are no rounds: a gradient is
averaged where it is accumulated, and the compiler may join the all-reduces. Every rank must run the same graph.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.comm import Ranks, Transport
from composable.errors import UsageError
from composable.ground.torch_private import foreach_copy_, graph_collectives, opaque
from composable.replication.managed import local_of


class BufferSync:
    """Gives every rank the buffers of the first rank, all in one broadcast of tensors on ``device``.

    ``slots`` has (dict of a module's buffers, name in it) of each. A module may put another tensor there between two
    forwards.
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
        if sent is not local:
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
        real = torch.view_as_real(param.grad) if param.grad.is_complex() else param.grad
        total = graph_collectives.all_reduce(real * exchange.scale, "sum", exchange.group_name)
        real.copy_(graph_collectives.wait_tensor(total))

    return arrive


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
        "ranks without inputs cannot follow (Join)": reducer.listeners.forbid_changes,
        "numbers of ranks cannot travel behind the gradients": reducer.exchange.flag_block.riders.needed,
        "nothing tells modules when to hold their own parameters again (mp_policy)": options.policy,
        "a module whose annotation was removed cannot run": reducer._is_closed,
    }
    return next((why for why, holds in found.items() if holds), "")


@opaque
def _refuse(why: str, fqn: str) -> None:
    raise UsageError(
        f"compiled autograd runs this backward, where {why}",
        at=f"parameter {fqn!r}",
        fix="leave compiled autograd off: compiled models do not need it",
    )

import torch
import torch.distributed as dist
from torch import nn

from composable import (
    CommHookHandle,
    DefaultState,
    allreduce_hook,
    fully_shard,
    reduce_scatter_hook,
    register_comm_hook,
)


def count_and_reduce(state: DefaultState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    state.count = getattr(state, "count", 0) + 1
    if output is None:
        allreduce_hook(state, grad)  # a replicated module keeps the whole
    else:
        reduce_scatter_hook(state, grad, output)


model, state = fully_shard(nn.Linear(8, 2)), DefaultState(dist.group.WORLD)
hook: CommHookHandle = register_comm_hook(model, state, count_and_reduce)
model(torch.randn(4, 8)).sum().backward()
assert state.count == 1
hook.remove()

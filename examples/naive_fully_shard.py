"""A naive ``fully_shard``: it gathers before forward and before backward, and reduces and scatters gradients after.

It shows the idea in plain hooks. It overlaps nothing, and says nothing of a wrong use: a forward returns one tensor,
and each parameter requires a gradient and gets one in each backward. Annotate inner modules first, then the root.
"""

import torch
import torch.distributed as dist
from torch import nn


def naive_fully_shard(module: nn.Module) -> nn.Module:
    """Shard the parameters that no inner call has sharded; ``shards_of(model)`` are the optimizer's parameters."""
    sharded = {param for inner in module.modules() if hasattr(inner, "unit") for param in inner.unit.params}
    unit = module.unit = Unit([param for param in module.parameters() if param not in sharded])
    module.register_forward_pre_hook(lambda *_: unit.unshard())

    def post_forward(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        unit.reshard()
        if output.requires_grad:
            output.register_hook(lambda _: unit.unshard())  # Backward of this module begins with this gradient.

    module.register_forward_hook(post_forward)
    return module


def shards_of(model: nn.Module) -> list[nn.Parameter]:
    """Return this rank's shards: an optimizer that works element by element does not notice the difference."""
    return [module.unit.shard for module in model.modules() if hasattr(module, "unit")]


class Unit:
    """Parameters that are views of one flat buffer, and the shard that this rank keeps of it."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params, self.arrived = params, 0
        self.ranks = dist.get_world_size()
        numel = sum(param.numel() for param in params)
        self.shard_numel = -(-numel // self.ranks)  # All shards have equal size; padding fills the last one.
        self.buffer = torch.zeros(self.ranks * self.shard_numel)
        parts = self.buffer[:numel].split([param.numel() for param in params])
        for param, part in zip(params, parts, strict=True):
            part.copy_(param.detach().flatten())
            param.data = part.view(param.shape)  # The same parameter, with its values in the buffer.
            param.register_post_accumulate_grad_hook(self.post_accumulate_grad)
        self.shard = nn.Parameter(self.buffer.view(self.ranks, -1)[dist.get_rank()].clone())
        self.reshard()

    def unshard(self) -> None:
        """Gather the shards of all ranks into the buffer, so that the parameters have their values."""
        self.buffer.untyped_storage().resize_(self.buffer.nbytes)
        # By way of `data`, or autograd would see that a tensor has changed that it saved in forward.
        dist.all_gather([*self.buffer.data.chunk(self.ranks)], self.shard.data)

    def reshard(self) -> None:
        """Free the memory of the buffer. Its views stay, in modules and in what autograd saved for backward."""
        self.buffer.untyped_storage().resize_(0)

    def post_accumulate_grad(self, _: torch.Tensor) -> None:
        """After the last gradient of the unit: average gradients, keep this rank's slice, free all else."""
        self.arrived += 1
        if self.arrived < len(self.params):
            return
        grads = torch.zeros(self.ranks * self.shard_numel)
        torch.cat([param.grad.flatten() for param in self.params], out=grads[: sum(p.numel() for p in self.params)])
        mine = torch.empty(self.shard_numel)
        dist.reduce_scatter(mine, [*grads.chunk(self.ranks)])
        mine /= self.ranks
        self.shard.grad = mine if self.shard.grad is None else self.shard.grad + mine
        self.arrived = 0
        for param in self.params:
            param.grad = None
        self.reshard()

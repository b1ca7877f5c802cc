import torch
from torch import nn

from composable import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)


class Encoder(nn.Linear):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh()


model = fully_shard(Encoder(8, 8))
assert isinstance(model, FSDPModule)
share_comm_ctx([model])  # the roots of a pipeline go in one list
register_fsdp_forward_method(model, "encode")
gathering: UnshardHandle = model.unshard(async_op=True)
gathering.wait()
model.set_manual_backward_finalization(True)
model.encode(torch.randn(4, 8)).sum().backward()
reducing: GradientReductionHandle = model.finalize_backward(async_op=True)
reducing.wait()
assert model.weight.grad is not None

import torch
import torch.distributed as dist
from torch import nn

from composable import (
    LowPrecisionState,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    fully_shard,
    reduce_scatter_hook,
    register_comm_hook,
)

for hook in (
    *(bf16_compress_hook, fp16_compress_hook),  # torch's reduction, in fewer bits
    *(bf16_compress_wrapper(reduce_scatter_hook), fp16_compress_wrapper(reduce_scatter_hook)),  # another one
):
    model = fully_shard(nn.Linear(8, 2))
    register_comm_hook(model, LowPrecisionState(dist.group.WORLD), hook)
    model(torch.randn(4, 8)).sum().backward()
    assert model.weight.grad.dtype == torch.float32

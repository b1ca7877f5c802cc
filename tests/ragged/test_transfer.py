"""Whole values on one rank, pieces on all, and the way between."""

import pytest
import torch
import torch.distributed as dist

from composable.dtensor.gather import fallback_counts
from composable.dtensor.tensor import RaggedDTensor
from composable.dtensor.transfer import collect_blocks, spread_blocks
from tests.saving.test_torch_loads import CUTS, Model, make
from tests.world import run_threads


def ragged(model: torch.nn.Module) -> list[RaggedDTensor]:
    return [param for param in model.parameters() if isinstance(param, RaggedDTensor)]


def collect(cut: str) -> None:
    fallback_counts(reset=True)
    tensors, rank = ragged(make(cut)), dist.get_rank()
    expected = list(Model().parameters())
    for dst in range(dist.get_world_size()):
        for dtype in (None, torch.bfloat16, torch.float64):
            fulls = collect_blocks(tensors, dst=dst, dtype=dtype)
            assert (fulls is not None) is (rank == dst)
            for full, want in zip(fulls or (), expected):
                assert torch.equal(full, want.detach().to(dtype or want.dtype))
                assert full.untyped_storage().nbytes() == full.nbytes
    assert collect_blocks([], dst=0) is None
    assert not fallback_counts()


class Source:
    """Gives values and notes which ones it was asked for."""

    def __init__(self, values: list[torch.Tensor]) -> None:
        self.values = values
        self.asked: list[int] = []

    def __call__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        return self.values[index]


def spread(cut: str) -> None:
    tensors, rank = ragged(make(cut)), dist.get_rank()
    versions = [tensor._local_tensor._version for tensor in tensors]
    for src in range(dist.get_world_size()):
        generator = torch.Generator().manual_seed(src)
        values = [torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for tensor in tensors]
        source = Source(values) if rank == src else None
        spread_blocks(tensors, source, src=src)
        if source is not None:
            assert source.asked == [index for index, value in enumerate(values) if value.numel()]
        for tensor, value in zip(tensors, values, strict=True):
            assert torch.equal(tensor.full_tensor(), value.float())
    assert [tensor._local_tensor._version for tensor in tensors] == versions


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_values_come_and_go_whole(world_size: int, cut: str) -> None:
    run_threads(collect, world_size, cut)
    run_threads(spread, world_size, cut)

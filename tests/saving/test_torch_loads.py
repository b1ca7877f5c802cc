"""How torch cuts ragged tensors, and in which boxes its checkpoints read them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from composable.dtensor.spec import ragged_spec
from composable.dtensor.tensor import RaggedDTensor
from composable.errors import ConfigError, UsageError
from composable.planning.layout import RaggedShard
from tests.ragged_pairs import from_full
from tests.world import on_ranks


@on_ranks(2)
def test_boxes_are_views_of_the_piece() -> None:
    spec = ragged_spec(init_device_mesh("cpu", (2,)), (4, 3), torch.float32, (0, 5, 12))
    ragged = from_full(torch.arange(12.0).view(4, 3), spec)
    chunks = ragged.__create_chunk_list__()
    # Flat [0, 5) and [5, 12) of four rows of three.
    expected = [[((0, 0), (1, 3)), ((1, 0), (1, 2))], [((1, 2), (1, 1)), ((2, 0), (2, 3))]][dist.get_rank()]
    assert [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks] == expected
    for chunk in chunks:
        view = ragged.__get_tensor_shard__(MetadataIndex("w", chunk.offsets))
        assert view.shape == chunk.sizes
        # Else torch would copy it, and keep the copies of all tensors until a file is written.
        assert view.untyped_storage().nbytes() == view.nbytes
        view.fill_(-1)
    assert torch.equal(ragged.to_local(), torch.full_like(ragged.to_local(), -1))
    with pytest.raises(ConfigError, match="no piece of 'w'"):
        ragged.__get_tensor_shard__(MetadataIndex("w", torch.Size([3, 1])))


@on_ranks(2)
def test_distribute_tensor_takes_our_placement_and_torchs() -> None:
    distribute_tensor = torch.distributed.tensor.distribute_tensor
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    full = torch.arange(12.0).view(4, 3)
    placements = [RaggedShard((0, 7, 12))]
    # The source rank's values count, as in torch.
    ragged = distribute_tensor(full if rank == 0 else full * 0, mesh, placements)
    assert type(ragged) is RaggedDTensor and torch.equal(ragged.full_tensor(), full)
    own = distribute_tensor(full + rank, mesh, placements, src_data_rank=None)
    assert torch.equal(own.to_local(), (full + rank).view(-1)[:7] if rank == 0 else (full + rank).view(-1)[7:])
    assert distribute_tensor(ragged, mesh, placements) is ragged
    assert torch.equal(distribute_tensor(full, mesh, [Shard(0)]).full_tensor(), full)
    assert distribute_tensor(full, mesh).placements == (Replicate(),)
    with pytest.raises(UsageError, match="already distributed"):
        distribute_tensor(ragged, mesh, [RaggedShard((0, 3, 12))])
    joined = init_device_mesh("cpu", (1, 2))
    assert torch.equal(distribute_tensor(full, joined, [Shard(0), *placements]).full_tensor(), full)
    with pytest.raises(ConfigError, match="one RaggedShard"):
        distribute_tensor(full, joined, [RaggedShard((0, 12)), *placements])

"""All ranks of a model: those that average gradients, and those with other blocks beside them."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from composable.comm import ModelRanks, Ranks
from composable.errors import ConfigError
from tests.world import on_ranks, run_threads


def look(sizes: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "a", "b")[: len(sizes)])
    dims = [Ranks.of_mesh(mesh, dim) for dim in range(mesh.ndim)]
    # The data dim itself adds none.
    found = ModelRanks.of(dims[0], dims)
    rank = dist.get_rank()
    assert (found.everyone.numbers, found.rank) == (tuple(range(mesh.size())), rank)
    for other in range(mesh.size()):
        place, *others = (mesh.mesh == other).nonzero()[0].tolist()
        team = mesh.mesh[place].flatten().tolist()
        assert found.team_of(other) == team
        assert found.in_column(other) == mesh.mesh[(place, *(ranks.rank for ranks in dims[1:]))]
        assert found.places_along(dims[1:], other) == tuple(others)
        # Of a block that several have: the taker's own, or the nearest.
        for splits in ([], dims[1:], dims[1:2]):
            givers = found.givers(splits, other)
            assert len(givers) == torch.Size(ranks.size for ranks in splits).numel()
            assert givers[found.places_along(splits, other)] == other
            assert all(found.places_along(splits, giver) == places for places, giver in givers.items())
        if mesh.ndim == 3:
            assert {int((mesh.mesh == giver).nonzero()[0][2]) for giver in found.givers(dims[1:2], other).values()} == {
                others[1]
            }


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (1, 3), (2, 2, 2)])
def test_teams_have_a_rank_in_each_column(sizes: tuple[int, ...]) -> None:
    run_threads(look, int(torch.Size(sizes).numel()), sizes)


@on_ranks(2)
def test_ranks_without_others_are_a_model_alone() -> None:
    mesh = init_device_mesh("cpu", (2,))
    ranks = Ranks.of_mesh(mesh)
    assert ModelRanks.of(ranks, [ranks]).others == ()


def join_unlike_columns() -> str:
    groups = {members: dist.new_group(list(members)) for members in [(0, 1, 2), (3,), (0, 3), (1, 3), (2, 3)]}
    own = [Ranks.of(group, torch.device("cpu")) for members, group in groups.items() if dist.get_rank() in members]
    with pytest.raises(ConfigError) as caught:
        ModelRanks.of(own[0], own[1:])
    return caught.value.what


def test_columns_of_other_sizes_are_an_error_on_every_rank() -> None:
    text = "the ranks that average gradients, [0, 1, 2], [3], and those of tensor parallelism form no grid"
    assert run_threads(join_unlike_columns, 4) == [text] * 4

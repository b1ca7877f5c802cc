"""Meshes that an annotation cannot use: what it says names this annotation, and dims that the mesh has."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable import ConfigError, fully_shard, replicate
from tests.world import on_ranks

WITHOUT: dict[str, Any] = {"_init_backend": False}
NO_GROUPS = "the mesh has no process groups"
CASES: list[tuple[str, str, tuple[str, ...] | None, str]] = [
    ("replicate", "[0, 1]", None, NO_GROUPS),
    ("fully_shard", "[0, 1]", None, NO_GROUPS),
    ("fully_shard", "[[0, 1]]", ("x", "y"), NO_GROUPS),
    ("replicate", "(1, 2)", ("x", "y"), "has 2 dims (1, 2); replicate averages over exactly one\n"),
    ("replicate", "(1, 1, 2)", ("x", "y", "z"), "has 3 dims (1, 1, 2); replicate averages over exactly one\n"),
    ("replicate", "(1, 2)", None, "such as mesh['name']; name them first"),
    ("fully_shard", "(1, 1, 2)", ("x", "y", "z"), "has 3 dims (1, 1, 2); fully_shard shards over exactly one\n"),
]


@pytest.mark.parametrize(("caller", "shape", "names", "text"), CASES)
@on_ranks(2)
def test_a_mesh_that_does_not_fit_is_refused(
    *, caller: str, shape: str, names: tuple[str, ...] | None, text: str
) -> None:
    sizes = {"(1, 2)": (1, 2), "(1, 1, 2)": (1, 1, 2)}
    ranks: dict[str, Any] = {"[0, 1]": [0, 1], "[[0, 1]]": [[0, 1]]}
    if shape in ranks:
        mesh = DeviceMesh("cpu", ranks[shape], mesh_dim_names=names, **WITHOUT)
    else:
        mesh = init_device_mesh("cpu", sizes[shape], mesh_dim_names=names)
    model, annotate = nn.Linear(2, 2), replicate if caller == "replicate" else fully_shard
    with pytest.raises(ConfigError) as caught:
        annotate(model, mesh=mesh)
    assert text in str(caught.value)
    assert names is None or text == NO_GROUPS or "pass one dim of it, such as mesh['x']" in str(caught.value)


@on_ranks(2)
def test_a_rank_outside_of_the_mesh_is_told_so() -> None:
    names = ("x", "y")
    for mesh in (DeviceMesh("cpu", [0]), DeviceMesh("cpu", [[0]], mesh_dim_names=names)["y"]):
        for annotate in (replicate, fully_shard):
            if dist.get_rank() == 0:
                annotate(nn.Linear(2, 2), mesh=mesh)
                continue
            with pytest.raises(ConfigError) as caught:
                annotate(nn.Linear(2, 2), mesh=mesh)
            assert "this rank is not in the mesh" in str(caught.value)
            assert f"call {annotate.__name__} only on the ranks of the mesh [0]" in str(caught.value)

"""A mesh that is a part of a larger one: what nothing averages is said, and nothing else."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from composable import DataParallelMeshDims, fully_shard, replicate
from tests.logs import kept_logs
from tests.world import on_ranks, run_threads

NOTE = "no gradient is averaged along"


def annotate(shape: tuple[int, ...], names: tuple[str, ...], dims: tuple[str, ...], how: str) -> tuple[str, list[str]]:
    with kept_logs() as texts:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        if how == "tensor parallel":
            rest = next(name for name in names if name not in dims)
            parallelize_module(model, mesh[rest], {"0": ColwiseParallel(output_layouts=Replicate())})
        line = ""
        if how == "replicate":
            replicate(model, mesh=mesh[dims[0]])
        elif how == "dims":
            fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=dims[-1], replicate=dims[0]))
        elif how == "whole":
            fully_shard(model, mesh=mesh)
        else:
            fully_shard(model, mesh=mesh[dims[0]])
        if how != "replicate":
            state = fully_shard.state(model)
            assert state is not None
            line = str(state.plan).splitlines()[0]
        model(torch.ones(2, 8)).sum().backward()
    return line, [text for text in texts if NOTE in text]


@pytest.mark.parametrize("how", ["slice", "replicate"])
def test_a_slice_says_along_which_dims_copies_drift(how: str) -> None:
    for number, (shape, own) in enumerate(itertools.product([(2, 2), (2, 1), (1, 2), (3, 1), (2, 3)], [0, 1])):
        names = (f"rep{number}{how}", f"shard{number}{how}")  # A text is logged once in a process.
        results = run_threads(annotate, shape[0] * shape[1], shape, names, (names[own],), how)
        other = names[1 - own]
        expected = f"{shape[own]} of the {shape[0] * shape[1]} ranks of the mesh; {NOTE} {other!r}"
        drifts = shape[1 - own] > 1
        told = [text for _, texts in results for text in texts]
        assert any(expected in text for text in told) is drifts and bool(told) is drifts, (shape, own)
        if how == "slice":
            assert all((expected in line) is drifts for line, _ in results), (shape, own)


def test_whole_meshes_named_dims_and_tensor_parallel_dims_are_not_spoken_of() -> None:
    cases = [((2,), ("a",), (), "whole"), ((2, 2), ("b", "c"), (), "whole"), ((2, 2), ("d", "e"), ("d", "e"), "dims")]
    cases += [((2, 2), ("dp", "tp"), ("dp",), "tensor parallel"), ((2, 1), ("f", "g"), ("f",), "slice")]
    for shape, names, dims, how in cases:
        for line, texts in run_threads(annotate, torch.Size(shape).numel(), shape, names, dims, how):
            assert NOTE not in line and not texts, how


@on_ranks(8)
def test_of_three_dims_only_the_one_that_is_left_out_is_named() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "rep", "shard"))
    model = fully_shard(nn.Linear(8, 8), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="shard", replicate="rep"))
    first = str(fully_shard.state(model).plan).splitlines()[0]
    assert first.partition("; ")[2] == f"4 of the 8 ranks of the mesh; {NOTE} 'pp'"

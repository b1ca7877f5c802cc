"""Ragged tensors and their plain twins: what tests of ragged tensors are made of."""

import copy
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable.dtensor.spec import RaggedSpec, ragged_spec, slice_full
from composable.dtensor.tensor import RaggedDTensor
from composable.planning.layout import plan_layout

__all__ = [
    "CUTS",
    "SHAPES",
    "assert_equal",
    "cpu_mesh",
    "from_full",
    "make_module",
    "pairs",
    "set_grads",
    "specs_of",
    "values",
]

# Odd numbers of rows, fewer rows than ranks, a scalar, no elements at all.
SHAPES = [(37, 8), (24, 8), (24,), (8, 24), (8,), (1, 8), (5, 3, 3, 3), (), (0, 4)]
# The two local shapes there are: rows, and one dimension.
CUTS = ["row", "element"]


def cpu_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def from_full(full: torch.Tensor, spec: RaggedSpec) -> RaggedDTensor:
    """Keep this rank's piece of a tensor that every rank holds whole; a copy."""
    piece = slice_full(full.detach(), spec.layout).to(spec.dtype, copy=True)
    return RaggedDTensor.wrap(piece, spec, full.requires_grad)


def cut_like_a_handle(shapes: Sequence[Sequence[int]], cut: str) -> list[RaggedSpec]:
    """Return specs of float32 parameters that share one buffer, all cut between rows or all between elements."""
    world_size, mesh = dist.get_world_size(), cpu_mesh()
    named = [(str(index), torch.Size(shape)) for index, shape in enumerate(shapes)]
    layout = plan_layout(named, world_size, align={name: "element" for name, _ in named})
    specs = []
    for span in layout.spans:
        bounds = layout.bounds(span)
        width = max(span.shape.numel() // span.shape[0], 1) if cut == "row" and all(span.shape) and span.shape else 1
        rounded = [bound // width * width for bound in bounds]
        specs.append(ragged_spec(mesh, span.shape, torch.float32, rounded))
    return specs


def specs_of(cut: str, dtype: torch.dtype = torch.float32) -> list[RaggedSpec]:
    """Return the specs of ``SHAPES``."""
    return [spec.cast(dtype) for spec in cut_like_a_handle(SHAPES, cut)]


def values(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def pairs(cut: str, dtype: torch.dtype = torch.float32) -> tuple[list[RaggedDTensor], list[torch.Tensor]]:
    """Return ragged and plain parameters of equal values."""
    plain = [nn.Parameter(value) for value in values(0, dtype)]
    ragged = [nn.Parameter(from_full(p.detach(), spec)) for p, spec in zip(plain, specs_of(cut, dtype), strict=True)]
    return ragged, plain  # type: ignore[return-value]


def set_grads(ragged: list[RaggedDTensor], plain: list[torch.Tensor], seed: int) -> None:
    for r, p, grad in zip(ragged, plain, values(seed, plain[0].dtype), strict=True):
        r.grad = from_full(grad, r._spec)
        p.grad = grad


def assert_equal(
    ragged: list[RaggedDTensor], plain: list[torch.Tensor], *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    for r, p in zip(ragged, plain, strict=True):
        assert type(r) is RaggedDTensor and r.shape == p.shape and r.dtype == p.dtype
        torch.testing.assert_close(r.full_tensor(), p, rtol=rtol, atol=atol, equal_nan=True, check_stride=False)


def make_module(cut: str = "row") -> tuple[nn.Module, nn.Module]:
    """Return a model with ragged parameters and its plain twin."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Embedding(4, 3, padding_idx=2))
    ragged = copy.deepcopy(plain)
    specs = cut_like_a_handle([param.shape for param in plain.parameters()], cut)
    for (name, param), spec in zip(plain.named_parameters(), specs, strict=True):
        owner, _, leaf = name.rpartition(".")
        setattr(ragged.get_submodule(owner), leaf, nn.Parameter(from_full(param.detach(), spec)))
    return ragged, plain

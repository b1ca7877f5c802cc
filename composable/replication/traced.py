"""What compiled autograd traces of a replicated module: one all-reduce for each gradient, in the graph of backward.

There a backward is a graph, which nothing tells of its end. So there are no rounds and no buckets: a gradient is
averaged where it is accumulated, and a backend of the compiler joins the all-reduces, see ``fusion.py``.
Every rank must run the same graph.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from composable.errors import UsageError, place_of_rank
from composable.torch_private import graph_collectives, opaque

__all__ = ["Traced", "average_in_graph", "traced_arrival"]


class Traced(Protocol):
    """What the graph has to know of a reducer; the compiler makes another graph where one of them changes."""

    requires_gradient_sync: bool
    steppers: tuple[Callable[..., None], ...]

    @property
    def scale(self) -> float:
        """Of a gradient before it is added to those of the other ranks."""
        ...

    @property
    def group_name(self) -> str:
        """Of the process group that averages; "": one rank."""
        ...

    @property
    def untraceable(self) -> str:
        """Why a graph cannot do what it does; "": it can."""
        ...


def traced_arrival(reducer: Callable[[], Traced | None], fqn: str) -> Callable[[torch.Tensor], None]:
    """Return what a graph does once the ``grad`` of a parameter has this backward's gradient in it."""

    def arrive(param: torch.Tensor) -> None:
        found = reducer()
        if found is None or not found.requires_gradient_sync or not (found.group_name or found.steppers):
            return
        if found.untraceable:
            _refuse(found.untraceable, fqn)
        assert param.grad is not None, "accumulated"
        average_in_graph(param.grad, found.scale, found.group_name)

    return arrive


def average_in_graph(grad: torch.Tensor, scale: float, group_name: str) -> None:
    """Make ``grad`` its mean over the ranks of a group; ``fusion.py`` knows these operations again."""
    real = torch.view_as_real(grad) if grad.is_complex() else grad
    real.copy_(graph_collectives.wait_tensor(graph_collectives.all_reduce(real * scale, "sum", group_name)))


@opaque
def _refuse(why: str, fqn: str) -> None:
    raise UsageError(
        f"compiled autograd runs this backward, where {why}",
        at=f"{place_of_rank()}, parameter {fqn!r}",
        fix="leave compiled autograd off: compiled models need it for nothing",
    )

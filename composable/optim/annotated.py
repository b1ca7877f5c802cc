"""On which ranks an annotation has a parameter: all that average its gradients."""

import torch

from composable.claims import claim_of
from composable.collectives import Grid, Ranks
from composable.ragged import RaggedDTensor, RaggedLayout

__all__ = ["ranks_of_layout", "ranks_of_param"]


def ranks_of_param(tensor: torch.Tensor) -> Ranks | None:
    """Return the ranks that have a parameter; ``None``: no annotation is known. A ragged gradient has them too."""
    if type(tensor) is RaggedDTensor:
        return ranks_of_layout(tensor._spec.layout)
    found = claim_of(tensor)
    grid = getattr(found.owner, "grid", None) if found is not None else None
    return grid.everyone if isinstance(grid, Grid) else None


def ranks_of_layout(layout: RaggedLayout) -> Ranks | None:
    """Return those of a sharded parameter, with the ranks that have copies of its shards."""
    return None if layout.label is None else layout.label.everyone

"""On which ranks an annotation has a parameter, all that average its gradients, and whether others have fewer."""

import torch

from composable.claims import claim_of
from composable.collectives import Grid, Ranks
from composable.ragged import RaggedDTensor, RaggedLayout

__all__ = ["has_parts", "ranks_of_layout", "ranks_of_param"]


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


def has_parts(tensor: torch.Tensor | RaggedLayout) -> bool:
    """Say whether, on some rank that has a parameter, modules of the same tree lie on a part of these ranks.

    All of these ranks know it, also those that have no such module: of sharded ones from their first forward on.
    """
    if isinstance(tensor, RaggedDTensor):
        tensor = tensor._spec.layout
    if isinstance(tensor, RaggedLayout):
        return tensor.label is not None and tensor.label.has_parts
    found = claim_of(tensor)
    return found is not None and bool(getattr(found.owner, "has_parts", False))

"""Memory that a user's collective allocates for what it reads and writes."""

from typing import Any

import torch

from composable.arguments import described
from composable.errors import ConfigError, place_of_rank

__all__ = ["stage"]


def stage(comm: Any, numel: int, like: torch.Tensor, fqn: str) -> torch.Tensor:
    """Return [numel] of what ``comm`` allocates, of the dtype and on the device of ``like``.

    Args:
        comm: Of the user.
        numel: Elements.
        like: What it is for.
        fqn: Of a parameter whose collective it is.

    Raises:
        ConfigError: It gave something else.
    """
    found = comm.allocate((numel,), dtype=like.dtype, device=like.device)
    if (
        not isinstance(found, torch.Tensor)
        or found.shape != (numel,)
        or found.dtype is not like.dtype
        or found.device != like.device
    ):
        is_tensor = isinstance(found, torch.Tensor)
        shown = f"{list(found.shape)} {str(found.dtype)[6:]} on {found.device}" if is_tensor else described(found)
        raise ConfigError(
            f"{type(comm).__name__}.allocate returned {shown}",
            at=f"{place_of_rank()}, buffer of parameter {fqn!r}",
            fix=f"return a tensor [{numel}] {str(like.dtype)[6:]} on {like.device}",
        )
    return found

"""What the param groups of an accelerated optimizer hold, as far as it does not change from step to step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter, eq, is_, itemgetter, sub
from typing import Any, TypeAlias

import torch

from composable.optim.units import Home, Piece, cut_of, find_chains
from composable.planning import marks_made
from composable.ragged import RaggedDTensor, RaggedLayout, slice_full
from composable.torch_private import DisableTorchFunction

__all__ = ["Census", "LocalGrads", "Neighbours", "take_census"]

Group: TypeAlias = dict[str, Any]
LocalGrads: TypeAlias = Sequence[torch.Tensor | None]

_grad_of: Any = RaggedDTensor.grad.fget
_local_of = attrgetter("_local_tensor")
_address_of: Any = torch.Tensor.data_ptr


@dataclass(frozen=True)
class Census:
    """The parameters of all groups, and which of their pieces may ever be merged.

    Attributes:
        members: The parameters of each group.
        kernels: What of each group's options decides how its elements are computed.
        marks: How many parameters had been replaced in this process.
        pieces: What this rank has of the sharded parameters, in order of the groups.
        params: The parameter of each piece.
        layouts: One of a parameter for each set of mesh dims that parameters are cut over.
        dtypes: Of all pieces, on every rank.
        owned: Indices of the pieces with elements.
        is_owned: Of each piece, whether it has elements.
        owned_params: Of pieces with elements.
        owned_locals: Of pieces with elements.
        idle_locals: Of the others: that they were stepped is noted on every rank.
        chains: Indices of pieces that may be merged with their neighbours, as far as gradients and state allow it.
        chained: Pieces of all chains, as positions in ``owned``.
        starts: In bytes, where each of ``chained`` begins in its handle's shard.
    """

    members: Sequence[Sequence[torch.Tensor]]
    kernels: Sequence[object]
    marks: int
    pieces: Sequence[Piece]
    params: Sequence[RaggedDTensor]
    layouts: Sequence[RaggedLayout]
    dtypes: frozenset[torch.dtype]
    owned: Sequence[int]
    is_owned: Sequence[bool]
    owned_params: Sequence[RaggedDTensor]
    owned_locals: Sequence[torch.Tensor]
    idle_locals: Sequence[torch.Tensor]
    chains: Sequence[Sequence[int]]
    chained: Sequence[int]
    starts: Sequence[int]

    def is_of(self, groups: Sequence[Group]) -> bool:
        """Say whether the groups hold the same parameters, and those the same local tensors."""
        if len(groups) != len(self.members) or _kernels_of(groups) != self.kernels or marks_made() != self.marks:
            return False
        for group, members in zip(groups, self.members):
            params = group["params"]
            if len(params) != len(members) or not all(map(is_, params, members)):
                return False
        # A cast gives a parameter another local tensor.
        return all(map(is_, map(_local_of, self.owned_params), self.owned_locals))

    def local_grads(self) -> tuple[LocalGrads, list[bool] | None]:
        """Return the local gradient of each piece with elements, and which pieces have one unless all do."""
        with DisableTorchFunction():
            grads = list(map(_grad_of, self.params))
        if list(map(type, grads)).count(RaggedDTensor) == len(grads):
            return list(map(_local_of, compress(grads, self.is_owned))), None
        present = [grad is not None for grad in grads]
        found = [_local_grad(grads[index], self.pieces[index]) for index in self.owned]
        return found, None if all(present) else present


def take_census(groups: Sequence[Group], homes: Mapping[int, Home]) -> Census:
    """Find the pieces, and which of them may ever be merged.

    Args:
        groups: The optimizer's ``param_groups``.
        homes: Where pieces that may be merged lie, by id of their parameters.
    """
    members = [list(group["params"]) for group in groups]
    pieces = [
        Piece(param, index, homes.get(id(param)))
        for index, params in enumerate(members)
        for param in params
        if type(param) is RaggedDTensor
    ]
    params = [piece.param for piece in pieces]
    layouts = [piece.spec.layout for piece in pieces]
    owned = [index for index, piece in enumerate(pieces) if piece.numel]
    position = {index: position for position, index in enumerate(owned)}
    chains = find_chains(pieces, groups)
    chained = [index for links in chains for index in links]
    return Census(
        members=members,
        kernels=_kernels_of(groups),
        marks=marks_made(),
        pieces=pieces,
        params=params,
        layouts=list({cut_of(layout): layout for layout in reversed(layouts)}.values())[::-1],
        dtypes=frozenset(piece.spec.dtype for piece in pieces),
        owned=owned,
        is_owned=[piece.numel > 0 for piece in pieces],
        owned_params=[params[index] for index in owned],
        owned_locals=[pieces[index].local for index in owned],
        idle_locals=[piece.local for piece in pieces if not piece.numel],
        chains=chains,
        chained=[position[index] for index in chained],
        starts=[pieces[index].start_bytes for index in chained],
    )


@dataclass(frozen=True)
class Neighbours:
    """How gradients of pieces that might be merged lie.

    Attributes:
        addresses: Of the gradient of each chained piece.
        are_alike: Of each but the last, whether its gradient and that of the next lie as the two pieces do.
    """

    addresses: Sequence[int] = ()
    are_alike: Sequence[bool] = ()

    def of(self, census: Census, grads: LocalGrads) -> "Neighbours":
        """Return how these gradients lie: itself, if as those before; allocators mostly give the same memory."""
        if not census.chained:
            return self
        chained = itemgetter(*census.chained)(grads)
        try:
            addresses = list(map(_address_of, chained))
        except TypeError:
            # What has no gradient lies nowhere, each piece somewhere else.
            addresses = [-(i + 1) << 60 if grad is None else grad.data_ptr() for i, grad in enumerate(chained)]
        if addresses == self.addresses:
            return self
        origins = list(map(sub, addresses, census.starts))
        return Neighbours(addresses, list(map(eq, origins, origins[1:])))


def _local_grad(grad: Any, piece: Piece) -> torch.Tensor | None:
    if grad is None:
        return None
    if type(grad) is RaggedDTensor:
        return grad._local_tensor
    # What autograd leaves after operations that gathered: the whole gradient on every rank.
    return slice_full(grad._local_tensor, piece.spec.layout)


def _kernels_of(groups: Sequence[Group]) -> list[object]:
    return [(group.get("fused"), group.get("differentiable")) for group in groups]

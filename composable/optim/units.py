"""Which plain tensors stand in for ragged parameters while an optimizer steps.

A *piece* is what this rank owns of one parameter. A *unit* is what the optimizer sees as one
parameter: a piece, or several that lie one after another in a handle's shard, seen as one flat
tensor. Pieces without elements need no arithmetic, only their step counters: they go along with
another unit.

Pieces are merged where that cannot change a bit of the result: element-wise optimizers, one
param group, the same state so far, gradients that lie one after another as the pieces do.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import _traversal_utils
from composable.engine import Handle
from composable.optim.annotated import ranks_of_layout
from composable.optim.entries import is_per_element
from composable.ragged import RaggedDTensor, RaggedLayout, RaggedSpec

__all__ = [
    "Home",
    "Piece",
    "Unit",
    "cut_of",
    "find_chains",
    "homes_of",
    "plan_units",
    "sharded_params_of",
    "signature_of",
]

# What the kernels of fused optimizers do at once, at most; what is left over is computed in another way.
_VECTOR_BYTES = 64


class Home(NamedTuple):
    """Where a piece lies: the flat buffer, its place among the pieces with elements there, and its first element."""

    buffer: int
    position: int
    start: int


def sharded_params_of(model: nn.Module) -> set[int]:
    """Return the ids of the sharded parameters of ``model``, whatever its modules hold at the moment."""
    handles: Iterable[Handle] = _traversal_utils._get_fsdp_handles(model, is_everywhere=True)
    return {id(param.sharded) for handle in handles for param in handle.params}


def homes_of(model: nn.Module) -> dict[int, Home]:
    """Return the home of every sharded parameter of ``model`` of which this rank owns something, by id."""
    homes: dict[int, Home] = {}
    handles: Iterable[Handle] = _traversal_utils._get_fsdp_handles(model, is_everywhere=True)
    for flat in (flat for handle in handles for flat in handle.buffers):
        owned = sorted((param for param in flat.params if param.start < param.stop), key=lambda param: param.start)
        for position, param in enumerate(owned):
            homes[id(param.sharded)] = Home(id(flat), position, param.start)
    return homes


class Piece:
    """What this rank owns of one parameter of an optimizer.

    Attributes:
        param: The parameter.
        local: Its local tensor.
        group: Index of its param group.
        home: Where it lies; ``None`` without elements, and for a parameter of another model.
    """

    __slots__ = ("group", "home", "local", "numel", "param", "spec")

    def __init__(self, param: RaggedDTensor, group: int, home: Home | None) -> None:
        self.param = param
        self.spec: RaggedSpec = param._spec
        self.local = param._local_tensor
        self.numel = self.local.numel()
        self.group = group
        self.home = home

    @property
    def start_bytes(self) -> int:
        """Where it begins in its handle's shard."""
        return 0 if self.home is None else self.home.start * self.local.element_size()


class Unit:
    """What the optimizer sees as one parameter.

    Attributes:
        pieces: One or more, of one param group.
            Those with elements come first, in the order in which they lie.
        indices: Which of the optimizer's pieces they are.
        offsets: Where each piece with elements begins in ``tensor``.
        tensor: The one local tensor with elements, or a flat one over several.
    """

    __slots__ = ("indices", "numel", "offsets", "pieces", "tensor")

    def __init__(self, pieces: Sequence[Piece], indices: Sequence[int]) -> None:
        self.pieces = tuple(pieces)
        self.indices = tuple(indices)
        owned = [piece for piece in pieces if piece.numel]
        self.offsets = [0] * len(owned)
        self.tensor = owned[0].local if owned else pieces[0].local
        if len(owned) > 1:
            starts = [piece.home.start for piece in owned if piece.home is not None]
            self.offsets = [start - starts[0] for start in starts]
            flat = merge([piece.local for piece in owned], self.offsets)
            assert flat is not None, "pieces are merged only where they lie in one storage"
            self.tensor = flat
        self.numel = self.tensor.numel()
        grad_dtype = pieces[0].param.grad_dtype
        if self.tensor.grad_dtype != grad_dtype:
            # Under a policy that keeps gradients in low precision.
            self.tensor.grad_dtype = grad_dtype

    @property
    def group(self) -> int:
        """Index of the param group."""
        return self.pieces[0].group

    @property
    def is_flat(self) -> bool:
        """Several pieces are seen as one tensor."""
        return len(self.offsets) > 1

    def cut(self, value: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield for each piece its part of ``value``, a tensor like ``tensor``; views, where there are elements."""
        if not self.is_flat:
            yield value
        else:
            for piece, offset in zip(self.pieces, self.offsets):
                yield value[offset : offset + piece.numel].view(piece.local.shape)
        for piece in self.pieces[max(len(self.offsets), 1) :]:
            yield value.new_empty(piece.local.shape)

    def join(self, values: Sequence[torch.Tensor]) -> tuple[torch.Tensor, bool]:
        """Return one tensor like ``tensor`` that holds ``values``, one for each piece, and whether it is a copy."""
        if not self.is_flat:
            return values[0], False
        values = values[: len(self.offsets)]
        flat = merge(values, self.offsets)
        if flat is not None:
            return flat, False
        # What lies between pieces is padding, zero like the padding of parameters and gradients.
        flat = values[0].new_zeros(self.numel)
        for part, value in zip(self.cut(flat), values):
            part.copy_(value)
        return flat, True


def merge(tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> torch.Tensor | None:
    """Return a flat view of tensors that lie in one storage, at ``offsets`` from the first; ``None`` if they do not."""
    first, last = tensors[0], tensors[-1]
    item, storage = first.element_size(), first.untyped_storage()
    numel = offsets[-1] + last.numel()
    if (first.storage_offset() + numel) * item > storage.nbytes():
        return None
    base, storage_address = first.data_ptr(), storage.data_ptr()
    for tensor, offset in zip(tensors, offsets):
        if (
            tensor.data_ptr() != base + offset * item
            or tensor.dtype != first.dtype
            or not tensor.is_contiguous()
            or tensor.untyped_storage().data_ptr() != storage_address
        ):
            return None
    return first.as_strided((numel,), (1,), first.storage_offset())


def cut_of(layout: RaggedLayout) -> object:
    """Return what is equal for parameters that are cut, and split, over the same mesh dims: norms add up alike."""
    # Of equal shard groups one may have copies, and another not.
    return id(layout.mesh), layout.cut_dims, ranks_of_layout(layout)


def find_chains(pieces: Sequence[Piece], groups: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the indices of pieces that may be merged with their neighbours, as far as gradients and state allow it."""
    at_home = [(piece.home, index) for index, piece in enumerate(pieces) if piece.home is not None]
    chains: list[list[int]] = []
    for _, index in sorted(at_home):
        last = pieces[chains[-1][-1]] if chains else None
        if last is not None and _may_follow(last, pieces[index], groups[last.group]):
            chains[-1].append(index)
        else:
            chains.append([index])
    return [links for links in chains if len(links) > 1]


def _may_follow(piece: Piece, other: Piece, group: dict[str, Any]) -> bool:
    """Say whether ``other``, the next piece of the shard, may be stepped in one tensor with ``piece``.

    Kernels for the CPU compute the elements left over after the last full vector in another
    way: with the same result in fp32 and fp64, except for fused kernels, whose pieces must be
    whole vectors, and never in lower precision, where every operation rounds.
    """
    here, there = piece.home, other.home
    if (
        here is None
        or there is None
        or piece.group != other.group
        or here.buffer != there.buffer
        or there.position != here.position + 1
        or piece.local.dtype != other.local.dtype
        or cut_of(piece.spec.layout) != cut_of(other.spec.layout)
    ):
        return False
    if merge([piece.local, other.local], [0, there.start - here.start]) is None:
        return False
    if piece.local.device.type != "cpu":
        return True
    if piece.local.dtype not in (torch.float32, torch.float64):
        return False
    vector = _VECTOR_BYTES // piece.local.element_size() if group.get("fused") else 1
    return piece.numel % vector == 0 and (there.start - here.start) % vector == 0


def signature_of(entry: dict[Any, Any] | None, piece: Piece) -> object:
    """Return what must be equal in the state of two parameters for them to be stepped as one."""
    found: list[object] = []
    for key, value in (entry or {}).items():
        if not isinstance(value, torch.Tensor):
            return object()  # equal to no other
        if is_per_element(key, value, piece.spec.layout.shape):
            found.append((key, value.dtype))
        elif value.dim() == 0:
            found.append((key, value.dtype, value.device, value.item()))
        else:
            return object()
    return tuple(found)


def plan_units(
    pieces: Sequence[Piece],
    grads: Sequence[torch.Tensor | None],
    signatures: Sequence[object],
    chains: Iterable[Sequence[int]],
) -> list[Unit]:
    """Merge what can be merged in a step with these gradients.

    Args:
        pieces: All pieces of the optimizer.
        grads: The local gradient of each.
        signatures: Of the state of each.
        chains: Indices of pieces that may be merged with their neighbours by everything but gradients and state.
    """
    chained = {index for chain in chains for index in chain}
    runs = [[index] for index, piece in enumerate(pieces) if piece.numel and index not in chained]
    runs += [run for chain in chains for run in _runs(pieces, grads, signatures, chain)]
    runs.sort(key=min)

    def kind_of(index: int) -> object:
        piece = pieces[index]
        return piece.group, piece.local.dtype, piece.local.device, signatures[index]

    leaders = {kind_of(run[0]): run for run in reversed(runs) if grads[run[0]] is not None}
    for index, piece in enumerate(pieces):
        if not piece.numel and grads[index] is not None:
            leader = leaders.get(kind_of(index))
            if leader is None:
                leader = leaders[kind_of(index)] = []
                runs.append(leader)
            leader.append(index)
    return [Unit([pieces[index] for index in run], run) for run in runs]


def _runs(
    pieces: Sequence[Piece], grads: Sequence[torch.Tensor | None], signatures: Sequence[object], chain: Sequence[int]
) -> Iterator[list[int]]:
    run: list[int] = []
    for index in chain:
        if run and not (signatures[index] == signatures[run[-1]] and _lie_alike(pieces, grads, run[-1], index)):
            yield run
            run = []
        run.append(index)
    if run:
        yield run


def _lie_alike(pieces: Sequence[Piece], grads: Sequence[torch.Tensor | None], index: int, other: int) -> bool:
    first, second, here, there = grads[index], grads[other], pieces[index].home, pieces[other].home
    if first is None or second is None or here is None or there is None:
        return False
    return merge([first, second], [0, there.start - here.start]) is not None

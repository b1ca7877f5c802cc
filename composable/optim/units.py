"""Which plain tensors stand in for ragged parameters while an optimizer steps.

A *piece* is what this rank owns of one parameter. A *unit* is what the optimizer sees as one parameter: a piece, or
several that lie one after another in the shard of a flat buffer, seen as one flat tensor. Pieces are merged where that
cannot change a bit of the result: element-wise optimizers, one param group, the same state so far, gradients that lie
one after another as the pieces do. Pieces without elements need no arithmetic, only their step counters: they go along
with another unit.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from composable.dtensor import RaggedDTensor
from composable.engine import handle_of
from composable.optim.rebind import is_per_element

__all__ = ["Grads", "Group", "Home", "Piece", "State", "Unit", "homes_of", "merge", "signature_of"]

Group: TypeAlias = dict[str, Any]
State: TypeAlias = defaultdict[Any, Any]
# The local gradient of each piece.
Grads: TypeAlias = Sequence[torch.Tensor | None]

# What the kernels of fused optimizers do at once, at most; what is left over is computed in another way.
_VECTOR_BYTES = 64


class Home(NamedTuple):
    """Where a piece lies: the flat buffer, its place among the pieces with elements there, and its first element."""

    buffer: int
    position: int
    start: int


def homes_of(params: Iterable[torch.Tensor]) -> dict[int, Home]:
    """Return the home of each parameter [any shape] of the handles of ``params`` that this rank has some of, by id."""
    homes: dict[int, Home] = {}
    handles = dict.fromkeys(handle for param in params if (handle := handle_of(param)) is not None)
    for flat in (flat for handle in handles for flat in handle.buffers):
        owned = sorted((param for param in flat.params if param.start < param.stop), key=lambda param: param.start)
        for position, param in enumerate(owned):
            homes[id(param.sharded)] = Home(id(flat), position, param.start)
    return homes


class Piece(NamedTuple):
    """What this rank owns of one parameter.

    Attributes:
        param: The parameter.
        local: Its local tensor.
        numel: Of that.
        group: Index of its param group.
        home: Where it lies; ``None``: without elements, or it is not to be merged.
        cut: Equal for parameters that are cut, and split, over the same mesh dims: norms add up alike.
    """

    param: RaggedDTensor
    local: torch.Tensor
    numel: int
    group: int
    home: Home | None
    cut: object

    @staticmethod
    def of(param: RaggedDTensor, group: int, home: Home | None) -> "Piece":
        """Describe a parameter, of any shape, of a param group."""
        layout = param._spec.layout
        # Of equal shard groups one may have copies, and another not.
        cut = id(layout.mesh), layout.cut_dims, None if layout.label is None else layout.label.everyone
        return Piece(param, param._local_tensor, param._local_tensor.numel(), group, home, cut)

    def wrap(self, local: torch.Tensor) -> RaggedDTensor:
        """Return a tensor of the shape of ``local`` as one that is cut as the parameter."""
        return RaggedDTensor.wrap(local, self.param._spec.cast(local.dtype))

    def may_precede(self, other: "Piece", group: Group) -> bool:
        """Say whether ``other`` may be stepped in one tensor with this one, as far as gradients and state allow it.

        Kernels for the CPU compute the elements left over after the last full vector in another
        way: with the same result in fp32 and fp64, except for fused kernels, whose pieces must be
        whole vectors, and never in lower precision, where every operation rounds.
        """
        here, there, dtype = self.home, other.home, self.local.dtype
        if here is None or there is None or here.buffer != there.buffer or there.position != here.position + 1:
            return False
        gap = there.start - here.start
        if self.group != other.group or self.cut != other.cut or merge([self.local, other.local], [0, gap]) is None:
            return False
        if self.local.device.type != "cpu":
            return True
        vector = _VECTOR_BYTES // dtype.itemsize if group.get("fused") else 1
        return dtype in (torch.float32, torch.float64) and self.numel % vector == 0 and gap % vector == 0


class Unit:
    """What the optimizer sees as one parameter.

    Attributes:
        pieces: One or more, of one param group. Those with elements come first, in the order in which they lie.
        indices: Which of the plan's pieces they are.
        offsets: Where each piece with elements begins in ``tensor``.
        tensor: The one local tensor, or a flat one over several.
    """

    def __init__(self, pieces: Sequence[Piece], indices: Sequence[int]) -> None:
        self.pieces = pieces
        self.indices = indices
        owned = [piece for piece in pieces if piece.numel]
        self.offsets = [0] * len(owned)
        self.tensor = pieces[0].local
        if len(owned) > 1:
            starts = [piece.home.start for piece in owned if piece.home is not None]
            self.offsets = [start - starts[0] for start in starts]
            flat = merge([piece.local for piece in owned], self.offsets)
            assert flat is not None, "pieces are merged only where they lie in one storage"
            self.tensor = flat
        grad_dtype = pieces[0].param.grad_dtype
        if self.tensor.grad_dtype != grad_dtype:
            # Under a policy that keeps gradients in low precision.
            self.tensor.grad_dtype = grad_dtype

    @property
    def is_flat(self) -> bool:
        """Several pieces are seen as one tensor."""
        return len(self.offsets) > 1

    def lend(self, grads: Grads) -> bool:
        """Give the tensor its gradient; ``False``: those of the pieces do not lie in one storage any more."""
        grad = grads[self.indices[0]]
        if not self.offsets:
            grad = torch.empty_like(self.tensor, dtype=self.tensor.grad_dtype)
        elif self.is_flat and grad is not None:
            try:
                grad = grad.as_strided(self.tensor.shape, (1,))
            except RuntimeError:
                return False  # past the end of the storage
        if grad is not None and grad.dtype is not self.tensor.dtype:
            self.tensor.grad_dtype = grad.dtype  # It stays in the dtype of the reduction, where a policy says so.
        self.tensor.grad = grad
        return True

    def cut(self, value: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield for each piece its part of ``value``, a tensor like ``tensor``; views, where there are elements."""
        if not self.is_flat:
            yield value
        else:
            for piece, offset in zip(self.pieces, self.offsets):
                yield value[offset : offset + piece.numel].view(piece.local.shape)
        for piece in self.pieces[max(len(self.offsets), 1) :]:
            yield value.new_empty(piece.local.shape)

    def join_state(self, state: State) -> dict[Any, Any]:
        """Return the state of the unit in the memory of its pieces' states; moves those into one tensor if needed."""
        entries = [state[piece.param] for piece in self.pieces]
        shape = self.pieces[0].param.shape
        joined: dict[Any, Any] = {}
        for key, value in entries[0].items():
            if type(value) is not RaggedDTensor or not is_per_element(key, value, shape):
                joined[key] = value
                continue
            values = [entry[key]._local_tensor for entry in entries[: max(len(self.offsets), 1)]]
            flat = merge(values, self.offsets) if self.is_flat else values[0]
            if flat is None:
                # What lies between pieces is padding, zero like the padding of parameters and gradients.
                flat = values[0].new_zeros(self.tensor.numel())
                for entry, piece, part in zip(entries, self.pieces, self.cut(flat)):
                    part.copy_(entry[key]._local_tensor)
                    entry[key] = piece.wrap(part)
            joined[key] = flat
        return joined

    def show_state(self, local_entry: dict[Any, Any], state: State) -> None:
        """Make the state of the pieces' parameters that of the unit."""
        for key, value in local_entry.items():
            if isinstance(value, torch.Tensor) and value.shape == self.tensor.shape:
                for piece, part in zip(self.pieces, self.cut(value)):
                    known = state[piece.param].get(key)
                    is_known = type(known) is RaggedDTensor and known.dtype == part.dtype
                    if not (is_known and (not piece.numel or known._local_tensor.data_ptr() == part.data_ptr())):
                        state[piece.param][key] = piece.wrap(part)
            else:
                for piece in self.pieces:
                    state[piece.param][key] = value if len(self.pieces) == 1 else value.clone()


def merge(tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> torch.Tensor | None:
    """Return a flat view [elements] of tensors that lie in one storage, at ``offsets`` from the first, or ``None``."""
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


def signature_of(entry: dict[Any, Any] | None, piece: Piece) -> object:
    """Return what must be equal in the state of two parameters for them to be stepped as one."""
    found: list[object] = []
    for key, value in (entry or {}).items():
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor and is_per_element(key, value, piece.param.shape):
            found.append((key, value.dtype))
        elif is_tensor and value.dim() == 0:
            found.append((key, value.dtype, value.device, value.item()))
        else:
            return object()  # equal to no other
    return tuple(found)

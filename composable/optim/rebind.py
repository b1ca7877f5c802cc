"""What an optimizer holds of ragged parameters: units to step, state cut into pieces, and parameters of now.

Most optimizers keep tensors of the parameter's shape, which are cut as the parameter is, and
numbers such as the step counter, which every rank holds. Steps that would be in vain are refused: on parameters that
were replaced, that have no values, or whose gradients do not fit.

A *piece* is what this rank owns of one parameter. A *unit* is what the optimizer sees as one parameter: a piece, or
several that lie one after another in the shard of a flat buffer, seen as one flat tensor. Pieces are merged where that
cannot change a bit of the result: element-wise optimizers, one param group, the same state so far, gradients that lie
one after another as the pieces do. Pieces without elements need no arithmetic, only their step counters: they go along
with another unit.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from composable.comm import Ranks, watch_ranks
from composable.dtensor import RaggedDTensor, RaggedLayout, check_finished, slice_block, slice_full
from composable.engine import META_FIX, handle_of
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.ground.names import check_module, check_optimizer, dtype_text, list_text
from composable.ground.ownership import claim_of
from composable.ground.torch_hooks import before_every_step
from composable.ground.torch_private import opaque
from composable.planning import first_replacement, replacement_of

__all__ = [
    "CHECKS_ITSELF",
    "Grads",
    "Group",
    "Home",
    "Piece",
    "State",
    "Unit",
    "check_every_step",
    "check_parameters",
    "check_replaced",
    "cut_state",
    "homes_of",
    "is_per_element",
    "lie_together",
    "rebind_optimizer",
    "signature_of",
]


_is_meta = attrgetter("is_meta")

# They mix gradients into averages by an operation that takes one dtype.
_LERPING = {torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam}
# An optimizer with an attribute of this name finds out itself when its parameters need the check.
CHECKS_ITSELF = "_composable_local_step"


def check_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Refuse parameters that an annotation has replaced.

    Raises:
        UsageError: The optimizer was built before the annotation, or inside forward or backward.
    """
    for group in optimizer.param_groups:
        replacement = first_replacement(group["params"])
        if replacement is not None:
            raise UsageError(
                "the optimizer holds a parameter that no module has any more, so its step would be lost",
                at=f"{place_of_rank()}, parameter {replacement.fqn_in_model()!r}",
                fix="rebind_optimizer(optimizer, model) after annotating the model, or build the optimizer then",
            )


def check_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to update parameters that an annotation has replaced, or that have no values.

    Raises:
        UsageError: As ``check_replaced``, or a sharded parameter is still on the meta device.
    """
    check_replaced(optimizer)
    for group in optimizer.param_groups:
        params = group["params"]
        if any(map(_is_meta, params)) and any(param.is_meta and isinstance(param, RaggedDTensor) for param in params):
            raise UsageError(
                "the optimizer steps on parameters that are still on the meta device",
                at=f"{place_of_rank()}, {_describe_params(optimizer)}",
                fix=META_FIX,
            )


@opaque
def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    watch_ranks()
    if CHECKS_ITSELF not in vars(optimizer):
        check_parameters(optimizer)
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _then_checked(kwargs["closure"], optimizer)}
    if len(args) > 1 and callable(args[1]):
        return (args[0], _then_checked(args[1], optimizer), *args[2:]), kwargs
    _check_gradients(optimizer)
    return None


def _then_checked(closure: Callable[[], Any], optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Let what makes the gradients end with a check of them."""

    def evaluate() -> Any:
        loss = closure()
        _check_gradients(optimizer)
        return loss

    return evaluate


def _check_gradients(optimizer: torch.optim.Optimizer) -> None:
    params = (param for group in optimizer.param_groups for param in group["params"])
    check_finished(f"{type(optimizer).__name__}.step", params)
    # What fails does so at the first step, where there is no state yet; Adagrad has some from the start.
    if not optimizer.state or type(optimizer) is torch.optim.Adagrad:
        for group in optimizer.param_groups:
            _check_dtypes(type(optimizer), group)


def _check_dtypes(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> None:
    """Refuse gradients of another dtype than their annotated parameters, where torch's kernels would."""
    decays = group.get("weight_decay") and not group.get("decoupled_weight_decay")
    # A decay that is added to gradients gives them the dtype of the parameters.
    if not (group.get("fused") or (kind in _LERPING and (kind is torch.optim.AdamW or not decays))):
        return
    for param in group["params"]:
        grad = param.grad
        if grad is None or grad.dtype == param.dtype:
            continue
        claim = claim_of(param)
        if type(param) is RaggedDTensor or claim is not None:
            fqn = param._spec.layout.label if claim is None else claim.fqn
            raise UsageError(
                f"{'fused ' if group.get('fused') else ''}{kind.__name__} takes no gradients of "
                f"{dtype_text(grad.dtype)} for parameters of {dtype_text(param.dtype)}",
                at=f"{place_of_rank()}, parameter {str(fqn)!r}",
                fix="annotate without keep_low_precision_grads, or take an optimizer that does, such as SGD",
            )


def _describe_params(optimizer: torch.optim.Optimizer) -> str:
    """Name the parameters on the meta device, of which the optimizer knows no names unless it was given some."""
    found: list[str] = []
    for group in optimizer.param_groups:
        names = group.get("param_names") or [f"of shape {list(param.shape)}" for param in group["params"]]
        found += [name for name, param in zip(names, group["params"], strict=True) if param.is_meta]
    return f"parameters {list_text(found)}"


@functools.cache
def check_every_step() -> None:
    """Refuse such steps of every optimizer of the process, and those with gradients that are under way; once."""
    before_every_step(_check_optimizer)


# What torch's optimizers keep once a parameter. By name: a scalar parameter's other state is a scalar too.
_PER_PARAMETER = frozenset({"step", "mu_product", "eta", "mu"})


def is_per_element(key: object, value: object, shape: torch.Size) -> bool:
    """Say whether ``value``, the state called ``key`` of a parameter of ``shape``, has a number for each element."""
    return isinstance(value, torch.Tensor) and value.shape == shape and (bool(shape) or key not in _PER_PARAMETER)


def cut_state(entry: dict[Any, Any], param: RaggedDTensor) -> None:
    """Make the state of ``param`` ragged, in place: whole tensors of its shape become this rank's pieces.

    No communication: every rank holds whatever is whole, or its block of what tensor parallelism has split as
    ``param``. Tensors of other shapes become replicated DTensors, numbers stay plain.

    Raises:
        UsageError: A tensor is cut in another way than ``param``.
    """
    layout = param._spec.layout
    for key, value in entry.items():
        if not isinstance(value, torch.Tensor):
            continue
        if type(value) is RaggedDTensor:
            if not value._spec.layout.matches(layout):
                raise _foreign(key, value, layout)
            continue
        if isinstance(value, DTensor) and _is_block(value, layout):
            piece = slice_block(value._local_tensor.detach(), layout).to(param.device, copy=True)
            entry[key] = RaggedDTensor.wrap(piece, param._spec.cast(value.dtype))
            continue
        if isinstance(value, DTensor):
            if any(not placement.is_replicate() for placement in value.placements):
                raise _foreign(key, value, layout)
            value = value._local_tensor
        if is_per_element(key, value, layout.shape):
            spec = param._spec.cast(value.dtype)
            entry[key] = RaggedDTensor.wrap(slice_full(value.detach(), layout).to(param.device, copy=True), spec)
        elif value.dim():
            replicas = [Replicate()] * layout.mesh.ndim
            entry[key] = DTensor.from_local(value.to(param.device), layout.mesh, replicas, run_check=False)
        else:
            entry[key] = value


def _split_state(entry: dict[Any, Any], param: DTensor) -> None:
    """Make the whole state of ``param``, which tensor parallelism has split, DTensors beside it, in place.

    No communication: every rank holds whatever is whole.
    """
    for key, value in entry.items():
        if isinstance(value, torch.Tensor) and value.dim():
            same = is_per_element(key, value, param.shape)
            placements = param.placements if same else [Replicate()] * param.device_mesh.ndim
            entry[key] = distribute_tensor(value, param.device_mesh, placements, src_data_rank=None)


def _whole_state(entry: dict[Any, Any]) -> None:
    """Make every tensor of a parameter's state whole and plain, in place.

    Collective: the ranks of each tensor's mesh, with values in the same order.
    """
    for key, value in entry.items():
        if isinstance(value, DTensor):
            entry[key] = value.full_tensor()


def _is_block(value: DTensor, layout: RaggedLayout) -> bool:
    """Say whether a DTensor has the block of this rank, as a parameter's state before the parameter was cut."""
    others = [dim for dim in range(layout.mesh.ndim) if dim != layout.mesh_dim]
    ranks = [Ranks.of_mesh(layout.mesh, dim).numbers for dim in others]
    return (
        bool(others)
        and value.shape == layout.shape
        and value.placements == tuple(layout.placements[dim] for dim in others)
        and ranks == [Ranks.of_mesh(value.device_mesh, dim).numbers for dim in range(value.device_mesh.ndim)]
    )


def _foreign(key: object, value: DTensor, layout: RaggedLayout) -> UsageError:
    return UsageError(
        f"optimizer state {key!r} is placed {value.placements}, its parameter {layout.placements}",
        at=f"rank {layout.global_rank}, parameter of shape {list(layout.shape)}",
        fix="load the state with set_optimizer_state_dict of torch.distributed.checkpoint.state_dict",
    )


OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)


def rebind_optimizer(optimizer: OptimizerT, model: nn.Module) -> OptimizerT:
    """Make an optimizer that was built before ``model`` was annotated hold the parameters it has now.

    Param groups keep their order and options, and the state comes along, in its dtypes: training goes on as if
    nothing had happened. Whole state, of the parameters' full shapes, is cut to this rank's pieces, without
    communication; every rank must hold the same. The other way round, and from one cut to another, state is gathered.

    Collective where state of sharded parameters is gathered: all ranks of their mesh.

    Args:
        optimizer: Any torch optimizer. Parameters of other models in it stay as they are.
        model: The model, outside forward and backward.

    Returns:
        ``optimizer``, the same object.

    Raises:
        ConfigError: An argument is of another kind; or the optimizer holds no parameter that ``model`` has or had,
            or one that nothing replaced; nothing was changed.
        UsageError: The optimizer keeps state that is not a parameter's own (LBFGS, once it has stepped).
    """
    check_optimizer("optimizer", optimizer)
    check_module("model", model)
    replaced = _find_replacements(optimizer, model)
    if not replaced:
        return optimizer
    if isinstance(optimizer, torch.optim.LBFGS) and optimizer.state:
        raise UsageError(
            "LBFGS keeps one state for all parameters together, which cannot be cut",
            fix="rebind it before its first step, or build a new one",
        )
    state: list[tuple[Any, Any]] = []
    for param, entry in optimizer.state.items():
        new = replaced.get(id(param))
        state.append((param, entry) if new is None else (new, _convert(entry, new)))
    for group in optimizer.param_groups:
        # In place: optimizers may hold the list itself.
        group["params"][:] = [replaced.get(id(param), param) for param in group["params"]]
    optimizer.state.clear()
    optimizer.state.update(state)
    return optimizer


def _find_replacements(optimizer: torch.optim.Optimizer, model: nn.Module) -> Mapping[int, nn.Parameter]:
    """Return what takes the place of each replaced parameter, by the id of the old one."""
    current = {id(param) for param in model.parameters()}
    found: dict[int, nn.Parameter] = {}
    lost: list[str] = []
    is_of_model = False
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        is_of_model = is_of_model or id(param) in current
        replacement = replacement_of(param)
        if replacement is None:
            continue
        new = replacement.find()
        if new is None or new.shape != param.shape:
            lost.append(f"{replacement.fqn!r} {list(param.shape)}")
        elif id(new) in current:
            found[id(param)] = new
    if lost:
        raise ConfigError(
            f"nothing took the place of {len(lost)} parameters of the optimizer: {', '.join(lost)}",
            at=place_of_rank(),
            fix="call it outside forward and backward, while the annotated model is alive, or build a new optimizer",
        )
    if not found and not is_of_model:
        raise ConfigError(
            "the optimizer holds no parameter that this model has or had",
            at=place_of_rank(),
            fix="pass the model that the optimizer was built for",
        )
    return found


def _convert(entry: Any, new: nn.Parameter) -> Any:
    """Return the state of a parameter as ``new`` needs it."""
    if not isinstance(entry, dict):
        return entry
    entry = dict(entry)
    if isinstance(new, RaggedDTensor):
        layout = new._spec.layout
        ragged = [value for value in entry.values() if type(value) is RaggedDTensor]
        if any(not value._spec.layout.matches(layout) for value in ragged):
            _whole_state(entry)
        cut_state(entry, new)
    elif any(isinstance(value, RaggedDTensor) for value in entry.values()) or not isinstance(new, DTensor):
        _whole_state(entry)
        if isinstance(new, DTensor):
            _split_state(entry, new)
    return entry


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
        if self.group != other.group or self.cut != other.cut or not lie_together([self.local, other.local], [0, gap]):
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
            self.tensor = merged([piece.local for piece in owned], self.offsets)
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
            if not self.is_flat:
                flat = values[0]
            elif lie_together(values, self.offsets):
                flat = merged(values, self.offsets)
            else:
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


def merged(tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> torch.Tensor:
    """Return a flat view [elements] of tensors that ``lie_together``."""
    first = tensors[0]
    return first.as_strided((offsets[-1] + tensors[-1].numel(),), (1,), first.storage_offset())


def lie_together(tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> bool:
    """Say whether tensors, of any shapes, are contiguous in one storage, at ``offsets`` from the first."""
    first = tensors[0]
    item, storage = first.element_size(), first.untyped_storage()
    if (first.storage_offset() + offsets[-1] + tensors[-1].numel()) * item > storage.nbytes():
        return False
    base, storage_address = first.data_ptr(), storage.data_ptr()
    for tensor, offset in zip(tensors, offsets):
        if (
            tensor.data_ptr() != base + offset * item
            or tensor.dtype != first.dtype
            or not tensor.is_contiguous()
            or tensor.untyped_storage().data_ptr() != storage_address
        ):
            return False
    return True


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

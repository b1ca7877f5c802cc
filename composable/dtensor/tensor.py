"""The tensor class of sharded parameters, ``RaggedDTensor``.

A ``RaggedDTensor`` has the full shape, and on each rank a local tensor that is one contiguous
range of the flattened whole, often all of it or nothing. torch's own sharding propagation has no
such cut, so a ``RaggedDTensor`` never enters it: it has rules of its own (``operations.py``), by
which optimizers and gradient clipping run without a gather.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import partial, wraps
from hashlib import sha256
from typing import Any, Protocol

import torch
from torch.distributed import ReduceOp
from torch.distributed.tensor import DTensor, Replicate

from composable.comm import Ranks
from composable.dtensor.gather import (
    RECORD,
    GatheredView,
    WholeTerm,
    gather_block,
    gather_full,
    is_replicated,
    refuse_conversion,
)
from composable.dtensor.operations import rule_for
from composable.dtensor.spec import (
    RaggedLayout,
    RaggedSpec,
    Split,
    chunks_of,
    piece_at,
    slice_full,
    spec_of_placements,
    write_items_of,
)
from composable.errors import ConfigError, UsageError
from composable.ground.frames import in_backward, is_running
from composable.ground.ownership import CHANGES, mark_of
from composable.ground.torch_private import (
    DeviceMesh,
    DTensorSpec,
    OpOverload,
    Placement,
    TensorMeta,
    disabled_torch_function,
    dispatch_rule_holder,
    dtensor_new,
    optim_foreach_types,
    swap_contents,
    tree_leaves,
    utils_foreach_types,
)
from composable.planning import RaggedShard

# torch's own descriptors, whose stubs say Tensor.
_GRAD: Any = torch.Tensor.grad
_DATA: Any = torch.Tensor.data


class RaggedDTensor(DTensor):
    """A tensor of which each rank holds one contiguous range of elements: the class of sharded parameters.

    Optimizers, norms, casts and other element-wise operations run on the local pieces. An operation without a rule of
    its own gathers the tensor, runs on the whole and returns a replicated DTensor. That is right and slow;
    ``fallback_counts`` counts it.

    Two things differ from a plain tensor: a view that changes the shape looks into a gathered copy and is of use until
    the tensor is changed; and random fills assume equal seeds on all ranks.
    """

    _local_tensor: torch.Tensor
    _spec: RaggedSpec
    tolist = numpy = refuse_conversion

    # In this class's own dict: torch looks it up for every tensor of every call, base by base.
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]  # stubs want a method

    @staticmethod
    def wrap(local: torch.Tensor, spec: DTensorSpec, requires_grad: bool = False) -> "RaggedDTensor":
        """Wrap ``local`` [local_shape], this rank's piece in the spec's dtype, as a ragged tensor; no copy or check."""
        return dtensor_new(RaggedDTensor, local, spec, requires_grad=requires_grad)  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves the arguments untyped
        cls, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if RECORD.unfinished:
            _check_operands(op, args)
        return rule_for(op)(RaggedDTensor, op, args, kwargs or {})

    def register_hook(self, hook: Any) -> Any:
        """Call ``hook`` with the gradient; for a sharded parameter, with this rank's piece of the reduced gradient."""
        CHANGES.note("hooks")
        return super().register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Call ``hook`` with this tensor once its gradient (if sharded, the reduced gradient) is accumulated."""
        CHANGES.note("hooks")
        return super().register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return the whole tensor, of this shape and dtype, as a plain tensor on every rank. Differentiable.

        Collective: all ranks of the mesh, same order.

        Args:
            grad_placements: How gradients of the result are spread over the mesh: ``Replicate()`` where every rank
                surely has the same, ``Partial()`` where they have to be summed. By default they are averaged over all
                ranks of the data, as those of a forward are.
        """
        if torch.is_grad_enabled() and self.requires_grad:
            full: torch.Tensor = _Gather.apply(self, grad_placements)  # type: ignore[no-untyped-call]
            return full
        return gather_full(self._local_tensor, self._spec.layout)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """Return this rank's piece: ``[rows, *rest]`` where every cut falls on a row, else [numel]. Differentiable."""
        if grad_placements is not None and tuple(grad_placements) != self._spec.placements:
            raise ConfigError(
                f"gradients of a ragged piece are ragged, not {tuple(grad_placements)}", fix="leave grad_placements out"
            )
        if torch.is_grad_enabled() and self.requires_grad:
            local: torch.Tensor = _ToLocal.apply(self)  # type: ignore[no-untyped-call]
            return local
        return self._local_tensor

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """Change the placements: a gather makes ``Replicate``, and from it other placements. Differentiable.

        Collective: all ranks of the mesh, same order. ``async_op`` is torch's hint; this call waits.

        Raises:
            ConfigError: Another mesh, no placements, or a dtype for the backward is given.
        """
        layout = self._spec.layout
        if placements is None or (device_mesh is not None and device_mesh != layout.mesh):
            raise ConfigError("a ragged tensor can change its placements, not its mesh", fix="pass placements only")
        if not (isinstance(placements, Sequence) and all(isinstance(one, Placement) for one in placements)):
            raise ConfigError(f"placements are {placements!r:.60}", fix="pass placements, such as [Replicate()]")
        if backward_dtype is not None:
            raise ConfigError("backward_dtype is not supported for ragged tensors", fix="cast with .to() instead")
        source: Any = self if forward_dtype is None else self.to(forward_dtype)
        if tuple(placements) == self._spec.placements:
            same: RaggedDTensor = source
            return same
        replicas = [Replicate()] * layout.mesh.ndim
        full = source.full_tensor(grad_placements=replicas)
        whole = DTensor.from_local(full, layout.mesh, replicas, run_check=False)
        return whole if list(placements) == replicas else whole.redistribute(placements=placements)

    def gather_block(self) -> torch.Tensor:
        """Return the block of the ranks along the cut mesh dim: a plain tensor [block_shape], of this dtype.

        The block is a part of the whole where tensor parallelism splits it over other mesh dims. Not differentiable.
        Collective: all ranks of the mesh, same order.
        """
        return gather_block(self._local_tensor, self._spec.layout)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # stubs garble the name
        layout = self._spec.layout
        return (
            f"RaggedDTensor(shape={list(layout.shape)}, local={self._local_tensor}, "
            f"elements [{layout.lo}, {layout.hi}) on rank {layout.global_rank}, "
            f"placements={self._spec.placements})"
        )

    # -- attributes that torch would accept and then ignore or misuse

    def _set_data(self, value: torch.Tensor) -> None:
        if type(value) is not RaggedDTensor or not value._spec.layout.matches(self._spec.layout):
            fix = "with torch.no_grad(): tensor.copy_(value), also a full one; another shape: unannotate(model) first"
            other = _name(value)
        elif (value.dtype, value.device) != (self.dtype, self.device):
            other, fix = f"{value.dtype} on {value.device}", "use module.to(dtype) or module.to(device)"
        elif value._local_tensor is self._local_tensor:
            return
        elif (mark := mark_of(self)) is None:
            self._local_tensor = value._local_tensor
            return
        else:
            # The memory of a parameter stays, so the values are copied. What users have kept of it, such as an earlier
            # ``.data``, shares the local tensor object: that object gets a copy, and the parameter another one.
            kept = self._local_tensor
            piece = kept.detach().clone()
            swap_contents(kept, piece)
            mark.renew_piece(kept, piece)
            self._local_tensor = piece
            piece.copy_(value._local_tensor)
            return
        raise UsageError(f".data of a ragged tensor of shape {list(self.shape)} cannot become {other}", fix=fix)

    def _set_grad(self, value: torch.Tensor | None) -> None:
        if value is not None and getattr(value, "_spec", None) is not self._spec:
            _check_grad(self, value)
        _GRAD.__set__(self, value)

    def _delete_grad(self) -> None:
        _GRAD.__set__(self, None)

    # The getters are torch's own C functions: to read a gradient must stay cheap.
    data = property(_DATA.__get__, _set_data)
    grad = property(_GRAD.__get__, _set_grad, _delete_grad)

    def _use_count(self) -> int:
        # Of all of torch, ``torch.utils.swap_tensors`` asks for this, which leaves optimizers and handles with the old.
        if (mark := mark_of(self)) is not None:
            mark.refuse_swap(self)
        return super()._use_count()  # type: ignore[no-any-return,misc]

    # -- copies, pickles, torch.compile

    def data_ptr(self) -> int:
        """Return 0, as tensors without a storage of their own do: code that copies storages then uses the piece."""
        return 0

    def storage(self) -> Any:
        """Raise: torch's storage of this tensor has no memory, at which safetensors fails with a raw error."""
        raise UsageError(
            f"a ragged tensor of shape {list(self.shape)} has no storage that holds all of it, as safetensors wants",
            fix="save_safetensors(model, path) on every rank; or, of full_state_dict(model) on every rank, "
            "save_file(values, path) on rank 0; the storage of this rank's piece is to_local().storage()",
        )

    def share_memory_(self) -> "RaggedDTensor":
        """Move this rank's piece to memory that processes share, with all of its handle."""
        self._local_tensor.share_memory_()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "RaggedDTensor":
        if id(self) in memo:
            known: RaggedDTensor = memo[id(self)]
            return known
        if not self.is_leaf:
            raise UsageError("only leaves of the autograd graph can be deep-copied", fix="detach() the tensor first")
        with torch.no_grad():
            # Not the local tensor's storage, which holds the other parameters of its handle.
            copied = RaggedDTensor.wrap(self._local_tensor.detach().clone(), self._spec, self.requires_grad)
            memo[id(self)] = copied
            if self.grad is not None:
                copied.grad_dtype = self.grad_dtype
                copied.grad = deepcopy(self.grad, memo)
            copied.__dict__.update(deepcopy(self.__dict__, memo))
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # Refused in torch.save only: messages between ranks are pickled too, and arrive at a rank of the mesh.
        if is_running(torch.save.__code__):
            raise UsageError(
                f"torch.save would write this rank's piece of a tensor of shape {list(self.shape)}, "
                "which cannot be loaded in one process",
                fix="torch.save(state, path) on rank 0, of state = full_state_dict(model) on every rank; for "
                "the optimizer, get_optimizer_state_dict with full_state_dict=True; or save_checkpoint; to_local() is "
                "the piece",
            )
        local = self._local_tensor.detach()
        marks = {name: value for name, value in self.__dict__.items() if not name.startswith("_composable_")}
        return (_rebuild_ragged, (local, self._spec, self.requires_grad, marks))

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> Any:
        # The context that torch passes differs between releases: torch rebuilds, then the result gets our class.
        rebuild: Any = DTensor.__tensor_unflatten__
        base = rebuild(inner_tensors, flatten_spec, outer_size, outer_stride)
        if not any(isinstance(placement, RaggedShard) for placement in base.placements):
            return base
        spec = spec_of_placements(base.device_mesh, base.shape, base.dtype, base.placements)
        return RaggedDTensor.wrap(base._local_tensor, spec, base.requires_grad)

    def _stable_hash_for_caching(self) -> str:
        # torch keeps compiled graphs on disk under this key. Ranks with different ranges need different graphs.
        layout = self._spec.layout
        cut = layout.shape, layout.placements, layout.rank, layout.mesh_dim, layout.splits, layout.mesh
        key = (*cut, self.dtype, self.requires_grad, layout.ranks.process_group.group_name)
        return sha256(repr(key).encode()).hexdigest()

    # -- torch.distributed.checkpoint

    def __create_write_items__(self, fqn: str, object: Any) -> Any:  # noqa: A002  # torch's name
        return write_items_of(fqn, self._local_tensor, self._spec.layout)

    def __create_chunk_list__(self) -> Any:
        return chunks_of(self._spec.layout)

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return piece_at(index, self._local_tensor, self._spec.layout)


# The same as `RaggedDTensor.wrap`, without a Python frame: it runs for each parameter in each step.
wrap_ragged: Callable[..., Any] = partial(dtensor_new, RaggedDTensor)


def _rebuild_ragged(
    local: torch.Tensor, spec: RaggedSpec, requires_grad: bool, attributes: dict[str, Any]
) -> RaggedDTensor:
    """Restore a pickled tensor, with the piece of the rank that wrote it."""
    rebuilt = RaggedDTensor.wrap(local, spec, requires_grad)
    rebuilt.__dict__.update(attributes)
    return rebuilt


def _name(value: object) -> str:
    if isinstance(value, (GatheredView, WholeTerm)):
        return f"a whole tensor of shape {list(value.shape)}, which was computed from sharded ones"
    if isinstance(value, DTensor):
        return f"{type(value).__name__} of shape {list(value.shape)} placed {value.placements}"
    if isinstance(value, torch.Tensor):
        return f"a plain tensor of shape {list(value.shape)}"
    return type(value).__name__


def _check_grad(tensor: RaggedDTensor, grad: object) -> None:
    layout = tensor._spec.layout
    if type(grad) is RaggedDTensor:
        if grad._spec.layout.matches(layout):
            return
    # The gradient that autograd itself gives after operations that gathered.
    elif isinstance(grad, DTensor) and grad.shape == layout.shape and is_replicated(grad, layout):
        return
    raise UsageError(
        f".grad of a ragged tensor of shape {list(layout.shape)} cannot be {_name(grad)}",
        fix="cut it the same way: distribute_tensor(full_grad, tensor.device_mesh, tensor.placements)",
    )


class _Gather(torch.autograd.Function):
    """The autograd function of ``full_tensor``; its gradient is this rank's piece of the full gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: RaggedDTensor, grad_placements: Sequence[Placement] | None) -> torch.Tensor:
        ctx.spec = tensor._spec
        ctx.grad_placements = grad_placements
        return gather_full(tensor._local_tensor, tensor._spec.layout)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        layout: RaggedLayout = ctx.spec.layout
        if ctx.grad_placements is None:
            grad = layout.average(grad)
        for dim, placement in enumerate(ctx.grad_placements or ()):
            if placement.is_partial():
                # A copy: the incoming gradient may have other readers.
                grad = Ranks.of_mesh(layout.mesh, dim).reduce(grad.contiguous().clone(), ReduceOp.SUM)
                if placement.reduce_op == "avg":
                    grad /= layout.mesh.size(dim)
        piece = slice_full(grad, layout).clone()
        return RaggedDTensor.wrap(piece, ctx.spec.cast(piece.dtype)), None


class _ToLocal(torch.autograd.Function):
    """The autograd function of ``to_local``; its gradient is the local gradient, wrapped."""

    @staticmethod
    def forward(ctx: Any, tensor: RaggedDTensor) -> torch.Tensor:
        ctx.spec = tensor._spec
        # A fresh tensor object: autograd writes its own marks on it.
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return RaggedDTensor.wrap(grad.contiguous(), ctx.spec.cast(grad.dtype))


def watch_zeroing(tensor: torch.Tensor) -> None:
    """Begin to watch whether a ragged tensor [any] is set to zero: see ``was_zeroed``. Ignores other tensors."""
    if isinstance(tensor, RaggedDTensor):
        tensor._local_tensor._composable_zeroed = False  # type: ignore[attr-defined]  # set by the rules of `zero_`


def was_zeroed(tensor: torch.Tensor) -> bool:
    """Say whether ``zero_`` was called on the tensor [any], alone or in a list, since ``watch_zeroing``."""
    return isinstance(tensor, RaggedDTensor) and bool(getattr(tensor._local_tensor, "_composable_zeroed", False))


# Takes ``(param, grad)`` and assigns a gradient that surely has the spec of the parameter, without another check.
# It is torch's own C function, since it runs once for each parameter of a model.
assign_grad: Callable[[torch.Tensor, torch.Tensor], None] = _GRAD.__set__


# -- gradients that may not be used yet: the backwards of their modules have ended, and the reductions have not


class _Owner(Protocol):
    """An owner of parameters; ``waiting`` has those with a gradient that waits for a later backward."""

    @property
    def described(self) -> str: ...

    @property
    def sharded(self) -> Sequence[torch.Tensor]: ...

    @property
    def waiting(self) -> Sequence[torch.Tensor]: ...


_ZEROING = frozenset({"zero_", "_foreach_zero_"})
_NORMS = frozenset({"linalg_vector_norm", "_foreach_norm"})


def note_unfinished(owners: Iterable[_Owner], *, is_droppable: bool = False) -> None:
    """Note that the gradients of ``owners`` are not complete; ``is_droppable``: ``zero_grad`` drops them."""
    for owner in owners:
        RECORD.unfinished[id(owner)] = weakref.ref(owner, partial(_forget, id(owner))), is_droppable


def note_finished(owners: Iterable[_Owner]) -> None:
    """Note that the gradients of ``owners`` are complete, or were dropped."""
    for owner in owners:
        RECORD.unfinished.pop(id(owner), None)


def _forget(key: int, _: object) -> None:
    RECORD.unfinished.pop(key, None)


def check_finished(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse the call ``what``, which uses gradients, unless all these gradients are complete.

    ``tensors`` are the gradients, or the parameters of these, of any shapes and dtypes. Not collective: the same
    reductions are under way on every rank. To read a gradient and show it is allowed. Raises ``UsageError`` if the
    backwards of a module have ended, and its reductions have not.
    """
    if RECORD.unfinished:
        owners = _owners_of_params()
        _refuse(what, tensors, {id(param): owner for param, owner in owners} | _by_gradient(owners))


def _check_operands(op: OpOverload, args: Sequence[Any]) -> None:
    """Refuse an operation that takes norms of incomplete gradients, or changes them; raises as ``check_finished``."""
    name = op._schema.name.removeprefix("aten::")
    first = op._schema.arguments[0] if op._schema.arguments else None
    if name == "add_" and in_backward():
        return  # autograd itself adds to a gradient, of a loss that uses the parameter outside of its module
    if first is not None and (name in _NORMS or (first.alias_info is not None and first.alias_info.is_write)):
        owners = _owners_of_params(leaves_droppable=name in _ZEROING)
        _refuse(name.strip("_"), tree_leaves(args[0]), _by_gradient(owners))


def _owners_of_params(*, leaves_droppable: bool = False) -> list[tuple[torch.Tensor, _Owner]]:
    return [
        (param, owner)
        for reference, is_droppable in list(RECORD.unfinished.values())
        if not (is_droppable and leaves_droppable) and (owner := reference()) is not None
        for param in (owner.waiting if is_droppable else owner.sharded)
        if param.requires_grad
    ]


def _by_gradient(owners: Iterable[tuple[torch.Tensor, _Owner]]) -> dict[int, _Owner]:
    return {id(param.grad): owner for param, owner in owners if param.grad is not None}


def _refuse(what: str, tensors: Iterable[Any], owners: dict[int, _Owner]) -> None:
    owner = next((owners[id(tensor)] for tensor in tensors if id(tensor) in owners), None)
    if owner is None:
        return
    why = "backwards have ended, their reductions have not"
    fix = (
        "first end the reductions: by a backward after set_is_last_backward(True), or by finalize_backward(), with "
        "wait() on what it returned"
    )
    if RECORD.unfinished[id(owner)][1]:
        why = "they wait on their rank for a backward of their module outside of no_sync, and none has come"
        fix = (
            "call reduce_gradients(model) first; or run the last backward through this module too, outside of no_sync "
            "and after set_requires_all_reduce(True); or set_requires_gradient_sync(False), if ranks are to differ"
        )
    raise UsageError(f"{what} with gradients that are not complete: {why}", at=owner.described, fix=fix)


# -- the registration of the class with torch's lists and operations


def register_ragged() -> None:
    """Let torch run operations and optimizers on ``RaggedDTensor``; a second call changes nothing."""
    if not _is_dispatched_here():
        _dispatch_every_op(
            {cls: cls.__dict__["__torch_dispatch__"].__func__ for cls in (RaggedDTensor, GatheredView, WholeTerm)}
        )
        if not _is_dispatched_here():
            raise UsageError(
                f"torch {torch.__version__} does not call a DTensor subclass for its own operations",
                fix="install torch 2.12 or newer",
            )
    # torch compares parameter types with these lists, and takes the slow loop for a type that is missing.
    for types in (optim_foreach_types, utils_foreach_types):
        if RaggedDTensor not in types:
            types.append(RaggedDTensor)
    # For loads with ``weights_only=True``, as torch has its own DTensors there. They hold data, and run none of it.
    torch.serialization.add_safe_globals([_rebuild_ragged, RaggedSpec, RaggedLayout, Split])


def _is_dispatched_here() -> bool:
    """Say whether an operation on one of our classes reaches its ``__torch_dispatch__``, as on all of them."""
    meta = TensorMeta(torch.Size([1]), (1,), torch.float32)
    spec = DTensorSpec(None, (RaggedShard((0, 1)),), tensor_meta=meta)  # type: ignore[arg-type]  # no mesh needed
    ragged = dtensor_new(RaggedDTensor, torch.zeros(1), spec, requires_grad=False)
    try:
        return type(ragged.detach()) is RaggedDTensor
    except RuntimeError:
        return False  # torch's own path, which wants a mesh


def _dispatch_every_op(rules: Mapping[type, Any]) -> None:
    """Let torch find the rule of a class for every operation, also for operations that are defined later.

    For torch 2.11: its C++ path for DTensor also runs for subclasses, skips their ``__torch_dispatch__``
    (pytorch#177878), and looks for a rule first. ``torch.library.register_torch_dispatch`` adds a rule to one existing
    operation: operations that users define later would go to DTensor, which cannot handle ragged pieces.
    """
    holder = dispatch_rule_holder()
    find = holder.find

    @wraps(find)
    def find_ours_first(entry: Any, cls: type) -> Any:
        return rules.get(cls) or find(entry, cls)

    holder.find = find_ours_first

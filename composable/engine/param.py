"""One parameter's two tensors, its faces: the sharded one and the unsharded leaf.

Outside forward and backward a module holds the *sharded* parameter, a ``RaggedDTensor``
whose local tensor is a view of the handle's shard. While its handle is unsharded the
module holds the *unsharded* parameter: a plain leaf that views the handle's buffer, so
that the user's ``forward`` and autograd get an ordinary tensor. Both live as long as the
annotation; only the entry in ``module._parameters`` changes.
"""

import copy
import enum
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from composable.dtensor import (
    RaggedDTensor,
    RaggedLayout,
    RaggedSpec,
    assign_grad,
    slice_block,
    values_of,
    was_zeroed,
    watch_zeroing,
    wrap_ragged,
)
from composable.errors import UsageError
from composable.ground.ownership import CHANGES
from composable.ground.torch_private import without_flat_weight_refs
from composable.planning import Form, SplitNode, mark_replaced

Owner = tuple[nn.Module, str]


class _HeldOwners:
    """The attribute ``owners``: modules own the parameter, which holds them weakly; without those that are gone."""

    def __get__(self, param: Any, cls: object = None) -> tuple[Owner, ...]:
        return tuple([(module, name) for find, name in param._owners if (module := find()) is not None])

    def __set__(self, param: Any, owners: Sequence[Owner]) -> None:
        param._owners = tuple([(weakref.ref(module), name) for module, name in owners])


class ShardedParam:
    """One unique parameter and every place that holds it.

    Attributes:
        fqn: Name below the handle's module; with several modules, after the position of the module: ``0.weight``.
        owners: (module, attribute name) of every place, tied ones included.
        form: For a tensor subclass, how an instance is taken apart and built; shapes are those of the tensor that
            is sharded.
        sharded: The parameter that ``module.parameters()`` gives: a ``RaggedDTensor`` of full shape.
        unsharded: Plain leaf that views the buffer; ``None`` until the first unshard.
        local: This rank's piece, a view of the handle's shard.
        shown: Local tensor of ``sharded``, unless torch replaced it: ``local``, or an instance of its class around it.
        grad_spec: Cut and dtype of the gradient that ``sharded`` gets.
        home: Device where the piece rests.
        is_split: Tensor parallelism has split it: the unsharded leaf and its gradients are DTensors of blocks.
        shape: Shape of the tensor that is sharded: of the block, if it is split.
        start: First element of this rank's piece in the handle's shard.
        stop: End of the piece, past its last element; equal to ``start`` where this rank owns nothing.
        placeholder: The zero gradient of ``sharded`` while the leaf keeps a gradient to be reduced later.
    """

    owners = _HeldOwners()

    def __init__(
        self,
        fqn: str,
        owners: Sequence[Owner],
        original: nn.Parameter,
        spec: RaggedSpec,
        shard: torch.Tensor,
        start: int,
        stop: int,
        grad_dtype: torch.dtype,
        home: torch.device,
        form: Form | None = None,
    ) -> None:
        self.fqn = fqn
        self.home = home
        self.owners = owners
        self.form = form
        self.is_split = form is not None and isinstance(form.node, SplitNode)
        self.shape = spec.layout.block_shape
        self.spec = spec
        self.grad_spec = spec.cast(grad_dtype)
        self.start = start
        self.stop = stop
        self.local_shape = spec.layout.local_shape
        self._is_flat = len(self.local_shape) == 1
        self.lie_in(shard)
        self.sharded = nn.Parameter(RaggedDTensor.wrap(self.shown, spec), requires_grad=original.requires_grad)
        _permit_grad(self)
        self.unsharded: nn.Parameter | None = None
        self.placeholder: RaggedDTensor | None = None
        self._kept_beside: torch.Tensor | None = None
        _share_hooks(original, self.sharded)
        # Marks that users put on parameters (say, `no_weight_decay`) must survive.
        _copy_marks(original, self.sharded, form)
        if form is not None and form.kind == "bytes":
            _name_state(self.sharded, form, self.owners)
            self.sharded._composable_holds_bytes = True  # type: ignore[attr-defined]  # read by casts of state dicts
        self._marks = self.sharded.__dict__

    @property
    def is_attached(self) -> bool:
        """The sharded parameter shows the handle's shard; torch did not give it other memory."""
        return self.ragged._local_tensor is self.shown

    def lie_in(self, shard: torch.Tensor) -> None:
        """Make this rank's piece a view of ``shard`` [S]; the sharded parameter still shows the old piece."""
        self.local = shard[self.start : self.stop].view(self.local_shape)
        self.shown = _instance_around(self.local, self.form)

    def has_face(self, held: torch.Tensor | None) -> bool:
        """Say whether ``held``, of any shape, is the sharded or the unsharded parameter."""
        return held is not None and (held is self.sharded or held is self.unsharded)

    def storage_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return the tensor to shard [shape] of a full value, which may be an instance of the parameter's own class."""
        return value.detach() if self.form is None else self.form.storage_of(value)

    def value_around(self, storage: torch.Tensor) -> torch.Tensor:
        """Undo ``storage_of``: return an instance of the parameter's own class around ``storage`` [shape]."""
        return storage if self.form is None else self.form.around(storage)

    def block_of_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """Return this rank's block of a gradient of the leaf, a plain tensor [shape].

        Collective over the ranks with the blocks, if the parameter is split and the gradient has another placement.
        Raises ``UsageError`` if the parameter's class gathers it, and there is no plain tensor in the gradient.
        """
        form = self.form
        if self.is_split:
            return self.storage_of(grad)
        if form is None or form.kind != "gathered" or type(grad) is torch.Tensor:
            return grad
        plain = form.storage_of(grad)
        if type(plain) is not torch.Tensor or plain.shape != self.shape:
            raise UsageError(
                f"{form.subclass.name}: its gradient is a {type(grad).__name__}",
                at=f"parameter '{self.layout.label or self.fqn}'",
                fix="let the backward give a plain tensor",
            )
        return plain

    def around_grad(self, block: torch.Tensor) -> torch.Tensor:
        """Undo ``block_of_grad``: return a gradient of the leaf's own shape and class."""
        return self.value_around(block) if self.is_split else block

    def write_full(self, full: torch.Tensor) -> None:
        """Copy this rank's piece of a full value, of any dtype and device, into the shard."""
        self.local.data.copy_(slice_block(self.storage_of(full), self.layout))

    def show(self, local: torch.Tensor) -> None:
        """Let the sharded parameter, the same object with the same marks, show other memory [local_shape]."""
        sharded = self.ragged
        shown = self.shown if local is self.local else _instance_around(local, self.form)
        if sharded.device == local.device:
            sharded._local_tensor = shown
        else:
            fresh = nn.Parameter(RaggedDTensor.wrap(shown, self.spec), requires_grad=sharded.requires_grad)
            with without_flat_weight_refs(module for module, _ in self.owners):
                torch.utils.swap_tensors(sharded, fresh)
            _share_hooks(fresh, sharded)
            _permit_grad(self)
            vars(self).pop("empty_grad", None)
        self.bring_back_marks()

    def bring_back_marks(self) -> None:
        """Give the sharded parameter its attributes again, if torch has swapped it for another one."""
        held = self.sharded.__dict__
        if held is not self._marks:
            held.update(self._marks)
            self._marks = held

    @torch.no_grad()
    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` to this parameter's piece [local_shape] and its gradient, as ``Module._apply`` does."""
        held, grad = memory_in(self), self.sharded.grad
        local = fn(held)
        if local is not held:
            self.sharded.grad = None
            self.show(local)
            if grad is not None:
                self.sharded.grad = fn(grad)

    def take(self, value: torch.Tensor) -> None:
        """Copy the value of a parameter that replaced the sharded one: ragged with the same cut, or full.

        Raises ``UsageError`` if the value has another shape, another cut, or a state of its own.
        """
        if self.form is not None and self.form.kind == "bytes" and isinstance(value, self.form.cls):
            raise UsageError(
                f"a parameter that is sharded as bytes was replaced by another {self.form.subclass.name}, "
                "whose state may differ",
                at=f"parameter {self.fqn!r}",
                fix="unannotate, replace it, and annotate again",
            )
        if isinstance(value, RaggedDTensor) and value._spec.layout.matches(self.layout):
            piece = values_of(value._local_tensor)
        elif not _can_take(self, value):
            raise UsageError(
                f"a parameter of shape {list(self.spec.shape)} was replaced by "
                f"{type(value).__name__} {list(value.shape)}",
                at=f"parameter {self.fqn!r}",
                fix="leave assign=True out of load_state_dict, or give full tensors; for tensor parallelism call "
                "parallelize_module before fully_shard"
                if isinstance(value, DTensor)
                else "change values in place, or load tensors of the full shape",
            )
        else:
            piece = slice_block(self.storage_of(value), self.layout)
        if self.ragged.is_meta:
            if not piece.is_meta:
                self.show(piece.detach().to(self.home, self.spec.dtype, copy=True))
        else:
            memory = memory_in(self)
            memory.data.copy_(piece)
            increment_version(memory)

    @property
    def ragged(self) -> RaggedDTensor:
        """The sharded parameter, of full shape, with its type."""
        assert isinstance(self.sharded, RaggedDTensor)
        return self.sharded

    @property
    def layout(self) -> RaggedLayout:
        """Which elements each rank owns."""
        return self.ragged._spec.layout

    def make_stand_in(self, value: torch.Tensor) -> nn.Parameter:
        """Return a parameter over ``value`` [shape], of the original's class, for modules to hold for a while."""
        return self.dress(self._parameter(value))

    def _parameter(self, value: torch.Tensor) -> nn.Parameter:
        requires_grad = self.sharded.requires_grad
        if self.form is None:
            return nn.Parameter(value, requires_grad=requires_grad)
        return self.form.parameter_around(value, requires_grad=requires_grad)

    def dress(self, stand_in: nn.Parameter) -> nn.Parameter:
        """Copy all marks to a parameter of full shape that modules hold for a while, and return that parameter."""
        if self.form is None or self.form.kind != "bytes":  # an instance of bytes has its state already
            _copy_marks(self.sharded, stand_in)
        stand_in._composable_managed = self.sharded._composable_managed  # type: ignore[attr-defined]  # the handle's
        # An optimizer built meanwhile would update the stand-in, and lose the update.
        for module, name in self.owners[:1]:  # None is left if users have let go of the modules.
            mark_replaced(stand_in, self.fqn, module, name)
        return stand_in

    def is_placed(self, param: nn.Parameter) -> bool:
        """Say whether every owner holds ``param``, of full shape."""
        return all(module._parameters.get(name) is param for module, name in self.owners)

    def leaf(self) -> nn.Parameter:
        """Return the unsharded parameter, of full shape; its handle has been unsharded before."""
        if self.unsharded is None:
            raise AssertionError("unsharded before")
        return self.unsharded

    def wrap_grad(self, local: torch.Tensor) -> RaggedDTensor:
        """Wrap this rank's piece [stop - start] of a reduced gradient."""
        piece = local if self._is_flat else local.view(self.local_shape)
        wrapped: RaggedDTensor = wrap_ragged(piece, self.grad_spec, requires_grad=False)
        return wrapped

    @cached_property
    def empty_grad(self) -> RaggedDTensor:
        """The gradient, of full shape, for a rank that owns no element: always the same object."""
        empty = torch.empty(self.local_shape, dtype=self.grad_spec.dtype, device=self.sharded.device)
        return RaggedDTensor.wrap(empty, self.grad_spec)

    # Gradients that wait on the leaf. ``zero_grad`` sees sharded parameters only, so their ``grad`` stands for these.

    def keep_gradient(self) -> None:
        """Note that the leaf's gradient waits to be reduced with later ones."""
        held = self.sharded.grad
        if held is None:
            held = self.empty_grad
            if self.stop > self.start:
                memory = memory_in(self)
                held = RaggedDTensor.wrap(torch.zeros_like(memory, dtype=self.grad_spec.dtype), self.grad_spec)
            self.placeholder = held
            assign_grad(self.sharded, held)
        watch_zeroing(held)
        self._kept_beside = held

    @property
    def waits(self) -> bool:
        """A gradient waits, and ``grad`` was neither dropped nor set to zero since."""
        beside = self._kept_beside
        return beside is not None and self.sharded.grad is beside and not was_zeroed(beside)

    def drop_zeroed_gradient(self) -> bool:
        """Drop or zero the waiting gradient as users have dropped or zeroed ``grad`` since; say whether they have."""
        beside, leaf = self._kept_beside, self.unsharded
        is_dropped = beside is not None and not self.waits
        self._kept_beside = None
        if is_dropped and self.sharded.grad is beside and leaf is not None and leaf.grad is not None:
            leaf.grad.zero_()  # Zeros are reduced: on no rank the parameter is left without a gradient.
        elif is_dropped:
            self.forget_gradient()
        return is_dropped

    def forget_gradient(self) -> None:
        """Drop the leaf's gradient, and the placeholder that says that it waits."""
        if self.unsharded is not None:
            self.unsharded.grad = None
        self._kept_beside = None
        if self.placeholder is not None:
            if self.sharded.grad is self.placeholder:
                self.sharded.grad = None
            self.placeholder = None

    def copied(self, shard: torch.Tensor, memo: dict[int, Any]) -> "ShardedParam":
        """Return a deep copy over ``shard`` [S], with the gradient; its owners are still the old modules.

        From then on ``memo`` gives the copy's sharded parameter for both faces of this one.
        """
        twin = copy.copy(self)
        twin.unsharded = twin.placeholder = twin._kept_beside = None
        vars(twin).pop("empty_grad", None)
        twin.lie_in(shard)
        # Like a copy of any tensor, it has the gradient and the user's marks.
        known: Any = copy.deepcopy(self.sharded, memo)
        if self.is_attached:
            # The copy, made just now or earlier (say, for an optimizer's groups), had memory of its own until now.
            known._local_tensor = twin.shown
        twin.sharded = known
        if known.grad is None:
            _permit_grad(twin)
        twin._marks = known.__dict__
        if self.unsharded is not None:
            memo[id(self.unsharded)] = twin.sharded
        return twin

    def plain_copy(self, value: torch.Tensor, grad: torch.Tensor | None) -> nn.Parameter:
        """Return a parameter like the original, with ``value`` and ``grad``, both in full shape."""
        plain = self._parameter(value)
        if self.form is None or self.form.kind != "bytes":
            _copy_marks(self.sharded, plain)
        _share_hooks(self.sharded, plain)
        plain.grad = grad
        return plain

    def place(self, param: nn.Parameter) -> None:
        """Make every owner hold ``param``, of full shape."""
        for module, name in self.owners:
            if has_own_setattr(module):
                setattr(module, name, param)
            else:
                module._parameters[name] = param


def _permit_grad(param: ShardedParam) -> None:
    """Let the sharded parameter have gradients of another dtype, where they stay in the dtype of the reduction."""
    if param.grad_spec.dtype != param.spec.dtype:
        param.sharded.grad_dtype = param.grad_spec.dtype


def memory_in(param: ShardedParam) -> torch.Tensor:
    """Return the plain tensor [local_shape] that a sharded parameter shows, also if torch has replaced it."""
    local = param.ragged._local_tensor
    is_instance = param.shown is not param.local and type(local) is type(param.shown)
    return param.form.storage_of(local) if is_instance and param.form is not None else local


def _instance_around(piece: torch.Tensor, form: Form | None) -> torch.Tensor:
    """Return the result of ``to_local()`` for a piece [local_shape]: an instance, if its class gathers itself."""
    if form is None or form.kind != "gathered" or not piece.shape[0]:
        return piece
    made = form.around(piece)
    made._composable_memory = piece  # type: ignore[attr-defined]  # read by memory_of of composable/dtensor
    return made


def _can_take(param: ShardedParam, value: torch.Tensor) -> bool:
    if param.is_split and isinstance(value, DTensor):
        return not isinstance(value, RaggedDTensor) and value.shape == param.spec.shape
    return not isinstance(value, DTensor) and value.shape in (param.shape, param.spec.shape)


def has_own_setattr(module: nn.Module) -> bool:
    """Say whether the module watches assignments, as ``nn.LSTM`` does to keep its flat weights."""
    return type(module).__setattr__ is not nn.Module.__setattr__


def _share_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Give ``target`` the hooks that users registered on ``source``, which users can still remove."""
    CHANGES.note("hooks")
    if source._backward_hooks:
        target._backward_hooks = source._backward_hooks
    hooks = source._post_accumulate_grad_hooks
    if hooks:
        target._post_accumulate_grad_hooks = hooks


def _copy_marks(source: nn.Parameter, target: nn.Parameter, form: Form | None = None) -> None:
    for name, value in source.__dict__.items():
        if name.startswith("_") or name in target.__dict__:
            continue
        if form is None or form.is_mark(name, value):
            setattr(target, name, value if form is None else form.moved_mark(name, value))


def _name_state(sharded: Any, form: Form, owners: Sequence[Owner]) -> None:
    """Give a sharded parameter attributes with the state beside its bytes.

    torch looks up the keys of a state dict as attributes: ``weight.absmax`` is ``absmax`` of ``weight``.
    """
    named: dict[str, Any] = dict(form.state)
    for module, name in owners:
        saved: dict[str, Any] = {}
        module._save_to_state_dict(saved, "", True)
        named |= {key.removeprefix(f"{name}."): value for key, value in saved.items() if key.startswith(f"{name}.")}
    for path, value in named.items():
        *around, last = path.split(".")
        holder = sharded
        for part in around:
            if not hasattr(holder, part):
                setattr(holder, part, SimpleNamespace())
            holder = getattr(holder, part)
        if not hasattr(holder, last):
            setattr(holder, last, value)


class ParamView(enum.Enum):
    """The state of a handle's unsharded parameters, and whether modules hold them.

    SHARDED: there are none. GATHERING: an unshard was started and is not in use yet. HIDDEN: they are complete. In
    these three states modules hold the sharded parameters. UNSHARDED: modules hold the unsharded ones.
    """

    SHARDED = enum.auto()
    GATHERING = enum.auto()
    HIDDEN = enum.auto()
    UNSHARDED = enum.auto()


class Lent(enum.Enum):
    """The way in which a context shows parameters that forward and backward cannot use.

    WHOLE: every module holds a copy of its whole parameters, and can run with it without gradients.
    OTHER: copies on some ranks only, on the host, or with gradients.
    """

    WHOLE = enum.auto()
    OTHER = enum.auto()


class Misplaced(NamedTuple):
    """A place where a module does not hold the face that it was given, but the other face, another tensor or none."""

    module: nn.Module
    name: str
    param: ShardedParam
    held: nn.Parameter | None

    @property
    def is_unknown(self) -> bool:
        """The held tensor is neither face."""
        return not self.param.has_face(self.held)


class Faces:
    """The places of a handle's parameters in modules; the constructor puts the sharded faces there.

    A place is a module's dict of parameters, and a name in it: modules own handles, which hold no module.
    """

    __slots__ = ("_places", "_swaps")

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        for param in params:
            param.place(param.sharded)
        self._places = [
            # Through the module, if it has a ``__setattr__`` of its own.
            (module._parameters, name, param, weakref.ref(module) if has_own_setattr(module) else None)
            for param in params
            for module, name in param.owners
        ]
        self._swaps: list[tuple[dict[str, Any], str, nn.Parameter, nn.Parameter, Any]] | None = None

    def are_sharded(self) -> bool:
        """Say whether every module holds the sharded parameters."""
        # Runs before each gather: a generator would double the cost.
        for params, name, param, _ in self._places:  # noqa: SIM110
            if params.get(name) is not param.sharded:
                return False
        return True

    def misplaced(self, view: ParamView) -> list[Misplaced]:
        """Return the places where modules do not hold the face that they were given."""
        found = []
        for params, name, param, _ in self._places:
            held = params.get(name)
            if held is not (param.unsharded if view is ParamView.UNSHARDED else param.sharded):
                owners = [module for module, _ in param.owners if module._parameters is params]
                found += [Misplaced(module, name, param, held) for module in owners]
        return found

    def show_unsharded(self, refuse: Callable[[Any], None], handle: object) -> None:
        """Make modules hold the unsharded parameters, which are full; call ``refuse`` where one holds neither face."""
        if self._swaps is None:
            self._swaps = [(params, name, one.sharded, one.leaf(), find) for params, name, one, find in self._places]
        for params, name, sharded, leaf, find in self._swaps:
            trainable = sharded.requires_grad
            if leaf.requires_grad is not trainable:
                leaf.requires_grad_(trainable)
                CHANGES.note("choices")
            held = params.get(name)
            if held is not sharded and held is not leaf:
                refuse(handle)
            if find is None:
                params[name] = leaf
            elif (module := find()) is not None:
                setattr(module, name, leaf)

    def show_sharded(self) -> None:
        """Make the modules hold the sharded parameters."""
        for params, name, param, find in self._places:
            if find is None:
                params[name] = param.sharded
            elif (module := find()) is not None:
                setattr(module, name, param.sharded)

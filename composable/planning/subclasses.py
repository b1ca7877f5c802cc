"""Parameters of tensor subclasses.

There are four kinds. *Marked*: an ``nn.Parameter`` with attributes and nothing else. *Bytes*: a frozen parameter
with packed storage, and state beside it. *Gathered*: the class itself chooses the tensors that ranks exchange, in
``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``. *Split*: a DTensor of tensor parallelism, of which each rank
shards its own block. A parameter of any other kind is refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable.errors import ConfigError
from composable.ground.names import list_text
from composable.ground.torch_private import DTensorSpec, TensorMeta, dtensor_new, make_subclass, plain_classes
from composable.planning.layout import order_of, part_of_dim, strides_of

Kind = Literal["marked", "bytes", "gathered", "split"]
PROTOCOL = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
# The names that a class may define and still compute like an ordinary parameter.
_HARMLESS = frozenset(
    "__new__ __init__ __init_subclass__ __repr__ __str__ __deepcopy__ __copy__ __reduce__ __reduce_ex__ __setstate__ "
    "__doc__ __module__ __qualname__ __dict__ __weakref__ __annotations__ __class_getitem__ __parameters__".split()
)


@dataclass(frozen=True)
class Subclass:
    """The class of a parameter, as plans describe it.

    Attributes:
        name: Name of the class.
        kind: How parameters of the class are sharded.
        path: The attributes that lead to the tensor that is sharded; empty: the parameter itself is sharded.
        splits: How tensor parallelism has split the parameter.
    """

    name: str
    kind: Kind
    path: tuple[str, ...] = ()
    splits: str = ""

    def __str__(self) -> str:
        if self.kind == "split":
            return self.splits
        if self.kind == "gathered":
            return f"gathered by {self.name}"
        return f"bytes of {'.'.join((self.name, *self.path))}"


@dataclass(eq=False)
class SplitNode:
    """A DTensor, of which this rank has one block [*block_shape]; ``spec`` has the mesh, placements and whole shape."""

    spec: DTensorSpec
    block_shape: torch.Size

    def around(self, storage: torch.Tensor) -> torch.Tensor:
        """Return a DTensor of the whole shape [*spec.shape], with ``storage`` [*block_shape] as this rank's block."""
        shape, order = self.spec.shape, order_of(storage)
        meta = TensorMeta(shape, strides_of(shape, order), storage.dtype)
        spec = DTensorSpec(self.spec.mesh, self.spec.placements, tensor_meta=meta)
        return dtensor_new(DTensor, storage, spec, requires_grad=False)

    def block_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's block of ``value``: a DTensor, a plain tensor of the whole, or the block itself.

        Shapes: [*spec.shape] or [*block_shape] -> [*block_shape], same dtype; no copy unless it was redistributed.
        Collective over the DTensor's ranks if its placements differ, as in a gradient that is still to be summed.
        Raises ``ConfigError`` if the DTensor is on another mesh, or has another shape.
        """
        spec = self.spec
        if isinstance(value, DTensor):
            if value.shape != spec.shape or value.device_mesh != spec.mesh:
                raise ConfigError(
                    f"{list(value.shape)} placed {value.placements} on {value.device_mesh} for a parameter of "
                    f"{list(spec.shape)} placed {spec.placements} on {spec.mesh}",
                    fix="distribute_tensor(value.full_tensor(), mesh, placements), with those of the parameter",
                )
            if value.placements != spec.placements:
                with torch.no_grad():
                    value = value.redistribute(placements=spec.placements)
            return _plain(value._local_tensor)
        value = value.detach()
        if value.shape != self.block_shape and value.shape == spec.shape:
            for mesh_dim, placement in enumerate(spec.placements):
                if isinstance(placement, Shard):
                    size, place = value.shape[placement.dim], spec.mesh.get_local_rank(mesh_dim)
                    start, stop = part_of_dim(size, spec.mesh.size(mesh_dim), place)
                    value = value.narrow(placement.dim, start, stop - start)
        return value

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitNode":
        return self


class _OwnHook(NamedTuple):
    """A function of the protocol that was set as a method of one parameter; rebuilt instances get one too."""

    function: Any


# Makes an instance around storage, given the form that has its state.
_Rebuild: TypeAlias = Callable[[torch.Tensor, "Form"], torch.Tensor]


@dataclass(eq=False)
class Form:
    """How one parameter of a subclass is taken apart, and put together again around other memory."""

    subclass: Subclass  # The description for the plan.
    cls: type[torch.Tensor]  # The class of the parameter.
    node: SplitNode | None = None  # The DTensor that a split parameter was; else ``None``.
    # Makes an instance; holds nothing that changes.
    rebuild: _Rebuild = field(default=lambda storage, _: storage, repr=False)
    # Tensors beside the sharded one, whole on every rank, by their dotted paths of attributes.
    state: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    attributes: dict[str, Any] = field(default_factory=dict, repr=False)  # Attributes of the tensor that is sharded.
    # Attributes that users set on a parameter whose memory is in inner tensors.
    marks: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def kind(self) -> Kind:
        return self.subclass.kind

    def storage_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor of an instance that is sharded, plain and on the same memory; other tensors unchanged.

        Shapes: shape and dtype of the inner tensor at ``subclass.path``; the shape is mostly the instance's own. For a
        parameter that is split, see ``SplitNode.block_of``.
        """
        if self.node is not None:
            return self.node.block_of(tensor)
        if not isinstance(tensor, self.cls):
            return tensor.detach()
        for name in self.subclass.path:
            tensor = getattr(tensor, name)
        return _plain(tensor)

    def is_mark(self, name: str, value: object) -> bool:
        """Say whether a parameter that replaces an instance gets this attribute of the instance.

        It does not get the sharded tensor, functions that gather, or a module, of which it may be a part.
        """
        return name not in PROTOCOL and name not in self.subclass.path[:1] and not isinstance(value, nn.Module)

    def around(self, storage: torch.Tensor) -> torch.Tensor:
        """Return an instance whose sharded tensor is ``storage``; no copy.

        Shapes: shape and dtype of ``storage_of``, or fewer rows; the instance has these rows too if the shapes agreed.
        """
        return self.rebuild(storage, self) if self.node is None else self.node.around(storage)

    def parameter_around(self, storage: torch.Tensor, *, requires_grad: bool) -> nn.Parameter:
        """Return an instance as a parameter with the marks of the original; shapes and dtypes as ``around``."""
        found = self.around(storage)
        made = found if isinstance(found, nn.Parameter) else nn.Parameter(found, requires_grad=requires_grad)
        for name, value in self.marks.items():
            if name not in made.__dict__:
                setattr(made, name, value)
        made.requires_grad_(requires_grad)
        return made

    def move(self, device: torch.device) -> None:
        """Move the state to a device; objects that are no tensors stay as they are."""
        for held in (self.state, self.attributes):
            held.update({name: value.to(device) for name, value in held.items() if isinstance(value, torch.Tensor)})

    def moved_mark(self, name: str, value: Any) -> Any:
        """Return the present value of an attribute of the original, on the device that ``move`` chose."""
        # A parameter with memory of its own is itself the tensor that has the attributes.
        return (self.state if self.subclass.path else self.attributes).get(name, value)


_UNPACKED = (
    "train a plain nn.Parameter in its place; or freeze it: requires_grad_(False); ignored ones are not averaged"
)


def form_of(param: nn.Parameter) -> Form | None:
    """Return how a parameter of any shape and dtype, of a tensor subclass, is sharded; ``None`` for an ordinary one.

    Raises ``ConfigError`` if its class is of no known kind, or cannot be sharded as the class asks.
    """
    name = type(param).__name__
    has_hooks = [callable(getattr(param, hook, None)) for hook in PROTOCOL]
    if type(param) in plain_classes and not any(has_hooks):
        return None
    if isinstance(param, DTensor):
        return _split_form(param)
    is_gathered = all(has_hooks) and not _is_packed(param)
    is_bytes = not (param.requires_grad or param.is_floating_point() or param.is_complex())
    is_marked = _is_only_marked(type(param)) and not (is_bytes or any(has_hooks))
    if is_gathered:
        form = _taken_apart(param, "gathered")
        rows = param.shape[0] if param.numel() and param.dim() else 0
        # Every rank would have these tensors whole. With one row, any tensor fits, and nothing is cut.
        others = [path for path, state in form.state.items() if rows > 1 and state.shape[:1] == (rows,)]
        if not rows or others:
            raise ConfigError(
                f"{name} has {list_text(others)} beside {'.'.join(form.subclass.path)!r}, with rows of the parameter "
                "too, and one inner tensor alone is cut"
                if others
                else f"{name} gathers rows, and the parameter has none",
                fix=f"let the class keep one tensor of rows and compute others in fsdp_pre_all_gather; or {_UNPACKED}",
            )
    elif is_marked:
        form = _taken_apart(param, "marked")
    elif not param.requires_grad:
        form = _taken_apart(param, "bytes")
    else:
        raise ConfigError(
            f"{name} is a tensor subclass, which a flat buffer cannot hold",
            fix="name it in ignored_params, or replace it by an nn.Parameter; if quantised, call requires_grad_(False) "
            "first; or give the class fsdp_pre_all_gather and fsdp_post_all_gather, both",
        )
    if any(state.is_meta for state in form.state.values()) or (form.kind == "bytes" and param.is_meta):
        raise ConfigError(
            f"{name} has state beside the tensor that is cut, and this state is on the meta device",
            fix="make the parameter with values before fully_shard, or name it in ignored_params",
        )
    _check_rebuilt(param, form)
    return form


def _is_packed(param: nn.Parameter) -> bool:
    """Say whether a frozen parameter keeps its values in another form: in several tensors of rows, or packed."""
    if param.requires_grad:
        return False
    rows = [(leaf.shape, leaf.dtype) for _, leaf in _leaves(param, ()) if leaf.shape[:1] == param.shape[:1]]
    return (param.shape, param.dtype) not in rows or (len(rows) > 1 and param.shape[0] > 1)


def _split_form(param: DTensor) -> Form:
    spec, local = param._spec, param._local_tensor
    is_known = type(param) is DTensor and type(local) is torch.Tensor
    if not is_known or any(type(placement) not in (Shard, Replicate) for placement in spec.placements):
        raise ConfigError(
            f"a {type(param).__name__} of {type(local).__name__} placed {spec.placements} cannot be sharded again, "
            "only a plain one with Shard or Replicate",
            fix="redistribute it before, or name it in ignored_params",
        )
    names = spec.mesh.mesh_dim_names or tuple(map(str, range(spec.mesh.ndim)))
    splits = ", ".join(f"{name} {placement!r}" for name, placement in zip(names, spec.placements, strict=True))
    subclass = Subclass("DTensor", "split", ("_local_tensor",), f"over {splits}")
    return Form(subclass, DTensor, SplitNode(spec, local.shape))


def _check_rebuilt(param: nn.Parameter, form: Form) -> None:
    """Raise ``ConfigError`` now, not in the first forward, if no instance can be made around other memory."""
    try:
        with torch.no_grad():
            made = form.parameter_around(form.storage_of(param), requires_grad=param.requires_grad)
        if type(made) is not type(param) or made.shape != param.shape:
            raise TypeError(f"made a {type(made).__name__} {list(made.shape)}")
    except Exception as error:
        raise ConfigError(
            f"no {form.subclass.name} can be made around other memory: {type(error).__name__}: {error}",
            fix="name it in ignored_params, or let __tensor_flatten__ and __tensor_unflatten__ of the class fit",
        ) from error


def _is_only_marked(cls: type) -> bool:
    """Say whether a class is ``nn.Parameter`` with more attributes, and overrides no attribute of tensors."""
    if not issubclass(cls, nn.Parameter):
        return False
    own = cls.__mro__[: cls.__mro__.index(nn.Parameter)]
    names = {name for base in own for name in vars(base)}
    changes = {name for name in names if hasattr(torch.Tensor, name)} - _HARMLESS
    has_more = "__tensor_flatten__" in names or any(vars(base).get("__slots__") for base in own)
    return not changes and not has_more


def _taken_apart(param: nn.Parameter, kind: Kind) -> Form:
    name = type(param).__name__
    leaves = list(_leaves(param, ()))
    if kind == "gathered":
        # The state must not depend on the rows that a rank has.
        leaves = [(path, leaf) for path, leaf in leaves if (leaf.shape, leaf.dtype) == (param.shape, param.dtype)]
        if not leaves:
            raise ConfigError(
                f"{name} gathers rows of itself, and has no inner tensor of its own shape and dtype to cut",
                fix=f"packed rows are not trained sharded: {_UNPACKED}",
            )
    # Scales may be as large as the values that they scale, and are floating-point numbers.
    path, storage = max(leaves, key=lambda leaf: (not leaf[1].is_floating_point(), leaf[1].nbytes))
    state: dict[str, torch.Tensor] = {}
    attributes: dict[str, Any] = {}
    rebuild = _rebuild_of(param, (), (path, storage.shape), state, attributes)
    inner = {one.partition(".")[0] for one in (*state, *path[:1])}
    given = param.__dict__.items() if path else ()
    marks = {key: value for key, value in given if key not in inner and not key.startswith("_")}
    return Form(Subclass(name, kind, path), type(param), None, rebuild, state, attributes, marks)


def _leaves(tensor: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    """Yield the inner tensors that have memory of their own, each with the attributes that lead to it."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        yield path, tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _leaves(getattr(tensor, name), (*path, name))


def _rebuild_of(
    tensor: Any,
    path: tuple[str, ...],
    sharded: tuple[tuple[str, ...], torch.Size],
    state: dict[str, torch.Tensor],
    attributes: dict[str, Any],
) -> _Rebuild:
    """Return a function that makes a tensor like ``tensor`` around other storage.

    Args:
        tensor: The parameter, or a tensor inside of it.
        path: The attributes that lead to ``tensor``.
        sharded: Path and shape of the tensor that is sharded; a tensor of the same shape gets the shape of the
            storage, which may be only a piece.
        state: Gets the other tensors, as ``Form.state``.
        attributes: Gets the attributes of the sharded tensor, as ``Form.attributes``.
    """
    cls: Any = type(tensor)
    if not hasattr(cls, "__tensor_flatten__"):
        if path != sharded[0]:
            name = ".".join(path)
            state[name] = tensor.detach()
            return lambda _, form: form.state[name]
        own_hooks = {name: tensor.__dict__[name] for name in PROTOCOL if name in tensor.__dict__}
        if cls in (torch.Tensor, nn.Parameter) and not own_hooks:
            return lambda storage, _: storage
        attributes.update(tensor.__dict__)
        bound = {name: hook for name, hook in own_hooks.items() if getattr(hook, "__self__", None) is tensor}
        attributes |= {name: _OwnHook(hook.__func__) for name, hook in bound.items()}

        def own(storage: torch.Tensor, form: Form) -> torch.Tensor:
            made: torch.Tensor = make_subclass(torch.Tensor if cls is nn.Parameter else cls, storage)
            for name, value in form.attributes.items():
                setattr(made, name, value.function.__get__(made) if isinstance(value, _OwnHook) else value)
            return made

        return own
    names, context = tensor.__tensor_flatten__()
    inner = {name: _rebuild_of(getattr(tensor, name), (*path, name), sharded, state, attributes) for name in names}
    follows, size, stride = tensor.shape == sharded[1], tensor.size(), tensor.stride()

    def wrapper(storage: torch.Tensor, form: Form) -> torch.Tensor:
        tensors = {name: rebuild(storage, form) for name, rebuild in inner.items()}
        made_as = (storage.size(), storage.stride()) if follows else (size, stride)
        made: torch.Tensor = cls.__tensor_unflatten__(tensors, context, *made_as)
        return made

    return wrapper


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with memory of its own as a plain one on that memory."""
    plain: torch.Tensor = make_subclass(torch.Tensor, tensor)
    return plain

"""The parameters and buffers that ``replicate`` manages, and those that it ignores.

If tensor parallelism has split a parameter, a rank averages the part that it holds.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from composable.comm import Transport
from composable.engine import has_torch_optimizer
from composable.errors import ConfigError
from composable.ground.contract import get_registry
from composable.ground.names import class_name, describe_module, described, join_fqn
from composable.ground.ownership import (
    claim_of,
    is_left_alone,
    is_managed,
    is_sharded,
    keep_one,
    names_left_alone,
    rival_on,
)
from composable.ground.torch_private import ranks_of_mesh
from composable.planning import managed_modules, name_modules, replacement_of

_KEPT = "_composable_kept"  # the mark on gradients of one rank


@torch.no_grad()
def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, of any shape, in the same memory; a plain tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient that has the shape of ``param`` and is split like ``param``.

    Collective over the ranks of the parameter's own mesh if the gradient is split in another way, or is a partial sum
    on each rank.
    """
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_of(grad)


def wrapped_like(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as a DTensor in the same memory, shaped and split like ``param``; for a plain one, as is."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def mark_kept(grad: torch.Tensor | None) -> None:
    """Mark a gradient [any] that stays this rank's own until a backward averages it."""
    if grad is not None:
        setattr(grad, _KEPT, True)


def is_kept_gradient(grad: torch.Tensor | None, transport: Transport) -> bool:
    """Say whether ``grad`` [any] has the mark of ``mark_kept``, and was not set to zero since; waits for its device."""
    if grad is None or not hasattr(grad, _KEPT):
        return False
    return not transport.carries_values or bool(local_of(grad).any())


def grad_dtype_of(param: nn.Parameter) -> torch.dtype:
    """Return the dtype in which ``param.grad`` is kept."""
    return param.grad_dtype or param.dtype  # None: any dtype


@dataclass(frozen=True)
class ReducedParam:
    """A parameter of an annotation; its gradient is averaged, unless it is frozen."""

    fqn: str  # Its name below the annotated module.
    param: nn.Parameter  # The parameter itself.
    module_index: int = 0  # The index of the annotated module that it belongs to.
    # The dtype in which its gradient is sent; ``None``: the dtype of the parameter.
    reduce_dtype: torch.dtype | None = None
    is_sparse: bool = False  # Its gradient has only the rows that were used, and lies in no bucket.

    @property
    def bucket_dtype(self) -> torch.dtype:
        """The dtype of the bucket that holds its gradient."""
        return self.reduce_dtype or self.param.dtype.to_real()

    @property
    def bucket_bytes(self) -> int:
        """The bytes of its gradient in the bucket."""
        return local_of(self.param).nbytes // self.param.dtype.to_real().itemsize * self.bucket_dtype.itemsize


# Ignored modules and tensors


@dataclass(frozen=True)
class Ignored:
    """Modules and tensors that one annotation ignores."""

    modules: frozenset[nn.Module] = frozenset()  # The ignored modules; all modules below them are ignored too.
    tensors: tuple[torch.Tensor, ...] = ()  # The ignored parameters and buffers of other modules.
    fqns: frozenset[str] = frozenset()  # Names of all of these, which also what later takes their places has.

    def all(self) -> list[torch.Tensor]:
        """Return all parameters and buffers that are ignored, of any shapes."""
        below = [tensor for module in self.modules for tensor in (*module.parameters(), *module.buffers())]
        return [*self.tensors, *below]

    def ids(self) -> set[int]:
        """Return the ids of all parameters and buffers that are ignored."""
        return set(map(id, self.all()))


def find_ignored(roots: Sequence[nn.Module], ignored_modules: object, ignored_params: object) -> Ignored:
    """Return the modules and tensors that the two arguments name, or torch's mark on a root.

    Args:
        roots: The annotated modules.
        ignored_modules: A list or set of modules below them.
        ignored_params: Parameters, or names of parameters and buffers below the root. With several roots, a name
            begins with the number of its root, as in messages. A tied parameter is ignored under all its names.

    Raises:
        ConfigError: An entry has another type, or is not below ``roots``.
    """
    modules = [] if ignored_modules is None else ignored_modules
    if isinstance(modules, nn.Module) or not isinstance(modules, Collection):
        raise ConfigError(f"ignored_modules is a {type(modules).__name__}", fix="pass a list or set of modules")
    names = name_modules(roots)
    for one in modules:
        if not isinstance(one, nn.Module):
            raise ConfigError(f"ignored_modules holds a {type(one).__name__}", fix="pass modules only")
        if one not in names:
            raise ConfigError(
                "an ignored module is not in the module that ignores it",
                at=describe_module(one),
                fix="take it out of ignored_modules",
            )
    tensors = (*_ignored_tensors(roots, ignored_params), *_marked(roots))
    left, fqns = set(map(id, tensors)), [names[one] for one in modules]
    for one, fqn in names.items():
        slots = (*one._parameters.items(), *one._buffers.items())
        fqns += [join_fqn(fqn, name) for name, tensor in slots if id(tensor) in left]
    return Ignored(frozenset(modules), tensors, frozenset(fqns))


def _ignored_tensors(roots: Sequence[nn.Module], ignored_params: object) -> Iterator[torch.Tensor]:
    if ignored_params is None:
        return
    fix = "pass a list or set of parameters of the module, or of names of its parameters and buffers"
    if isinstance(ignored_params, str | torch.Tensor | Mapping) or not isinstance(ignored_params, Iterable):
        raise ConfigError(f"ignored_params is {described(ignored_params)}", fix=fix)
    several = len(roots) > 1
    by_name = {
        name: tensor for number, root in enumerate(roots) for name, tensor in _named(root, str(number) * several)
    }
    known = {id(tensor) for tensor in by_name.values()}
    for one in ignored_params:
        found = by_name.get(one) if isinstance(one, str) else one
        if not isinstance(found, torch.Tensor) or id(found) not in known:
            what = f"a parameter {list(one.shape)}" if isinstance(one, torch.Tensor) else described(one)
            raise ConfigError(
                f"ignored_params holds {what}, which is not in the module", at=describe_module(roots[0]), fix=fix
            )
        yield found


def _marked(roots: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the tensors that users told torch's wrapper to ignore; a tied tensor only if all its names are marked."""
    for root in roots:
        names = frozenset(names_left_alone(root))
        if names:
            others = {id(tensor) for fqn, tensor in _named(root) if fqn not in names}
            yield from (tensor for _, tensor in _named(root) if id(tensor) not in others)


def _named(root: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    yield from root.named_parameters(prefix, remove_duplicate=False)
    yield from root.named_buffers(prefix, remove_duplicate=False)


# Managed tensors


@dataclass
class ManagedTensors:
    """The parameters and buffers that an annotation will manage."""

    params: list[ReducedParam] = field(default_factory=list)  # Each parameter once.
    # (dict of a module's buffers, name in it), each tensor once.
    buffers: list[tuple[dict[str, torch.Tensor | None], str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # One text per parameter and buffer, to compare between ranks.


def find_tensors(
    roots: Sequence[nn.Module], ignored: Ignored, device: torch.device, ranks: Sequence[int] = ()
) -> ManagedTensors:
    """Return the parameters and buffers that no other annotation manages; ``ConfigError`` if one cannot be managed.

    ``device`` averages gradients; without an index, any device of its type. ``ranks`` are the global numbers of the
    ranks that average: a parameter may be split over other ranks.
    """
    for root in roots:
        if isinstance(root, torch.jit.ScriptModule):
            raise ConfigError(
                "a scripted or traced module takes no other class, and so no annotation",
                at=describe_module(root),
                fix="call replicate on a module around it, as replicate(nn.Sequential(module))",
            )
        if type(root).forward is nn.Module.forward and "forward" not in root.__dict__:
            raise ConfigError(
                f"{class_name(root)} has no forward, so replicate cannot know when it runs",
                at=describe_module(root),
                fix="pass the modules in it as a list: replicate([*module])",
            )
    managed = ManagedTensors()
    names, seen = name_modules(roots), ignored.ids()
    below = [get_registry(one) for root in roots for one in root.modules() if one not in roots]
    nested = {id(found["replicate"].state) for found in below if "replicate" in found}
    modules = [(index, one) for index, root in enumerate(roots) for one in managed_modules([root], ignored.modules)]
    sparse = {id(one.weight) for _, one in modules if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse}
    for index, module in modules:
        if (rival := rival_on(module)) is not None:
            raise ConfigError(
                f"two things would average these gradients: replicate and {rival}",
                at=describe_module(module),
                fix=keep_one(rival),
            )
        slots: list[tuple[str, str, Any]] = [("parameter", *one) for one in module._parameters.items()]
        for kind, name, tensor in [*slots, *(("buffer", *one) for one in module._buffers.items())]:
            claim = claim_of(tensor)
            # A parameter of an annotation inside is averaged there, whichever module uses it.
            if tensor is None or id(tensor) in seen or (claim and id(claim.owner) in nested):
                continue
            seen.add(id(tensor))
            fqn = join_fqn(names[module], name)
            _check_tensor(kind, fqn, tensor)
            if kind == "buffer":
                managed.buffers.append((module._buffers, name))
                managed.lines.append(f"buffer {fqn!r} {list(tensor.shape)} {tensor.dtype}")
            else:
                _check_param(fqn, tensor, roots, device, ranks)
                managed.params.append(ReducedParam(fqn, tensor, index, is_sparse=id(tensor) in sparse))
                managed.lines.append(_line_of(managed.params[-1]))
    is_annotated_below = any(not {"replicate", "fully_shard"}.isdisjoint(found) for found in below)
    if not any(one.param.requires_grad for one in managed.params) and not is_annotated_below:
        raise ConfigError(
            "no parameter requires a gradient, so there is nothing to average",
            at=describe_module(roots[0]),
            fix="do not replicate it, or unfreeze parameters first",
        )
    return managed


def _line_of(one: ReducedParam) -> str:
    param = one.param
    return (
        f"parameter {one.fqn!r} {list(param.shape)} {param.dtype}, requires_grad={param.requires_grad}"
        f"{f', {param.placements}' if isinstance(param, DTensor) else ''}"
        f"{', with sparse gradients' if one.is_sparse else ''}"
        f"{', with an optimizer in backward' if has_torch_optimizer(param) else ''}"
    )


def unmanaged_params(
    roots: Sequence[nn.Module], ignored: Ignored, *, is_left: bool
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (FQN, parameter of any shape) for each parameter of ``roots`` that no annotation manages or ignores.

    ``is_left``: of modules whose own annotation was undone, instead of all other ones.
    """
    left = ignored.ids()
    for module in managed_modules(roots, ignored.modules):
        for name, param in module._parameters.items() if is_left_alone(module) is is_left else ():
            if param is not None and id(param) not in left and not is_managed(param):
                fqn = join_fqn(name_modules(roots)[module], name)
                if not any(fqn == one or fqn.startswith(f"{one}.") for one in ignored.fqns):
                    yield fqn, param


def _check_tensor(kind: str, fqn: str, tensor: torch.Tensor) -> None:
    shape = "" if is_lazy(tensor) else f" {list(tensor.shape)} {tensor.dtype}".replace("torch.", "")
    if is_lazy(tensor):
        what, fix = "has no shape yet", "run one forward before replicate"
    elif tensor.device.type == "meta":
        what, fix = "is on the meta device", "materialize and initialise the module before replicate"
    elif kind == "buffer" and isinstance(tensor, DTensor):
        what, fix = "is a DTensor, which is sharded already", "ignore its module"
    else:
        return
    raise ConfigError(f"{kind} {what}", at=f"{kind} {fqn!r}{shape}", fix=fix)


def _check_param(
    fqn: str, param: nn.Parameter, roots: Sequence[nn.Module], device: torch.device, ranks: Sequence[int]
) -> None:
    """Refuse a parameter that another annotation has, that is sharded already, or that is on another device."""
    claim, replacement = claim_of(param), replacement_of(param)
    if claim is not None:
        others = " and ".join(map(describe_module, getattr(claim.owner, "modules", ())))
        what = f"another replicate averages this parameter, as {claim.fqn!r} of {others}"
        fix = "call replicate once for all modules that share it, as replicate([a, b]), or on the module around them"
    elif replacement is not None or (is_sharded(param) and not isinstance(param, DTensor)):
        what = (
            f"fully_shard has taken and sharded this parameter, as {fqn if replacement is None else replacement.fqn!r}"
        )
        fix = "let one annotation have all modules that share it: call fully_shard on the module around them"
    elif isinstance(param, DTensor) and (
        # Of the ranks that hold its parts, only this rank may be among those that average.
        is_sharded(param) or len({*ranks_of_mesh(param.device_mesh)} & {*ranks}) != 1
    ):
        what = f"parameter is a {type(param).__name__}, which is sharded already"
        fix = "ignore its module, or call replicate on it before fully_shard on an ancestor"
    elif param.device.type != device.type or device.index not in (None, param.device.index):
        what = f"parameter is on {param.device}, and gradients are averaged on {device}"
        fix = f"move the module there, or pass a mesh of device type {param.device.type!r}"
    else:
        return
    at = f"parameter {fqn!r} of {' and '.join(map(describe_module, roots))}"
    raise ConfigError(what, at=at, fix=fix)

"""Which parameters and buffers ``replicate`` manages, which it leaves alone, and whether it can manage them.

Of a parameter that tensor parallelism has split, a rank averages the part that it holds.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from composable.engine import has_torch_optimizer, stepper_of
from composable.errors import ConfigError, place_of_rank
from composable.ground.contract import excludes, get_registry
from composable.ground.names import class_name, describe_module, described, join_fqn, list_text
from composable.ground.ownership import (
    claim_of,
    is_left_alone,
    is_managed,
    is_sharded,
    keep_one,
    names_left_alone,
    rival_on,
)
from composable.planning import replacement_of

__all__ = [
    "Ignored",
    "ManagedTensors",
    "ReducedParam",
    "check_steppable",
    "find_ignored",
    "find_tensors",
    "grad_dtype_of",
    "local_gradient",
    "local_of",
    "own_modules",
    "unmanaged_params",
    "wrapped_like",
]


_Buffers = dict[str, torch.Tensor | None]


@torch.no_grad()
def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``tensor``, of any shape, with its memory; of a plain one, itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_gradient(grad: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient of the shape of ``param``, split as that is.

    Collective over the ranks of the parameter's own mesh, where the gradient is split in another way, such as a sum
    that is still to be taken.
    """
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_of(grad)


def wrapped_like(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """Return ``local`` as a tensor of the shape of ``param``, split as that is, on the same memory; else itself."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


def grad_dtype_of(param: nn.Parameter) -> torch.dtype:
    """Return the dtype in which the parameter's gradient rests."""
    return param.grad_dtype or param.dtype  # None: any


@dataclass(frozen=True)
class ReducedParam:
    """A parameter whose gradient is averaged.

    Attributes:
        fqn: Its name below the annotated module.
        param: The parameter itself.
        module_index: Which of the annotated modules it belongs to.
        reduce_dtype: In which its gradient travels; ``None``: that of the parameter.
        is_sparse: Its gradient is sparse, and in no bucket.
    """

    fqn: str
    param: nn.Parameter
    module_index: int = 0
    reduce_dtype: torch.dtype | None = None
    is_sparse: bool = False

    @property
    def bucket_dtype(self) -> torch.dtype:
        """The dtype of the bucket that holds its gradient."""
        return self.reduce_dtype or self.param.dtype.to_real()

    @property
    def bucket_bytes(self) -> int:
        """What its gradient takes in the bucket."""
        return local_of(self.param).nbytes // self.param.dtype.to_real().itemsize * self.bucket_dtype.itemsize


def check_steppable(params: Sequence[ReducedParam]) -> None:
    """Raise unless an optimizer can step these parameters inside backward, bucket by bucket.

    Raises:
        ConfigError: Not every gradient comes in a bucket.
    """
    sparse = [item.fqn for item in params if item.is_sparse]
    if sparse:
        raise ConfigError(
            f"an optimizer cannot step inside backward beside sparse gradients, of {list_text(sparse, 3)}",
            at=f"{place_of_rank()}, parameter {params[0].fqn!r}",
            fix="step after backward, or build embeddings with sparse=False",
        )


# What is left alone


@dataclass(frozen=True)
class Ignored:
    """What one annotation leaves alone.

    Attributes:
        modules: With all below them.
        tensors: Parameters and buffers of other modules.
    """

    modules: frozenset[nn.Module] = frozenset()
    tensors: tuple[torch.Tensor, ...] = ()

    def ids(self, roots: Sequence[nn.Module]) -> set[int]:
        """Return the ids of all parameters and buffers that are left alone, by the mark of torch on a root too."""
        found = [*self.tensors]
        for module in self.modules:
            found += [*module.parameters(), *module.buffers()]
        ids = {id(tensor) for tensor in found}
        for root in roots:
            if names := frozenset(names_left_alone(root)):
                # What is tied is left alone if all its names are marked.
                named = list(_named_tensors([root]))
                others = {id(tensor) for fqn, tensor in named if fqn not in names}
                ids |= {id(tensor) for _, tensor in named} - others
        return ids

    def copied(self, modules: Collection[nn.Module], memo: dict[int, Any]) -> "Ignored":
        """Return the same of a deep copy of ``modules``."""
        return Ignored(
            frozenset(copy.deepcopy(module, memo) for module in self.modules if module in modules),
            tuple(copy.deepcopy(tensor, memo) for tensor in self.tensors),
        )


def find_ignored(roots: Sequence[nn.Module], ignored_modules: object, ignored_params: object) -> Ignored:
    """Return what the two arguments name.

    Args:
        roots: The annotated modules.
        ignored_modules: A list or set of modules below them.
        ignored_params: Parameters, or names of parameters and buffers: below the root, or behind the number
            of the root where there are several, as in messages. A tied one is left alone under all its names.

    Raises:
        ConfigError: One is of another kind, or not below ``roots``.
    """
    modules = [] if ignored_modules is None else ignored_modules
    if isinstance(modules, nn.Module) or not isinstance(modules, Collection):
        raise ConfigError(f"ignored_modules is a {type(modules).__name__}", fix="pass a list or set of modules")
    inside = {visited for root in roots for visited in root.modules()}
    for one in modules:
        if not isinstance(one, nn.Module):
            raise ConfigError(f"ignored_modules holds a {type(one).__name__}", fix="pass modules only")
        if one not in inside:
            raise ConfigError(
                "an ignored module is not in the module that ignores it",
                at=f"{place_of_rank()}, {describe_module(one)}",
                fix="take it out of ignored_modules",
            )
    return Ignored(frozenset(modules), tuple(_ignored_tensors(roots, ignored_params)))


def _ignored_tensors(roots: Sequence[nn.Module], ignored_params: object) -> Iterator[torch.Tensor]:
    if ignored_params is None:
        return
    fix = "pass a list or set of parameters of the module, or of names of its parameters and buffers"
    if isinstance(ignored_params, str | torch.Tensor | Mapping) or not isinstance(ignored_params, Iterable):
        raise ConfigError(f"ignored_params is {described(ignored_params)}", at=place_of_rank(), fix=fix)
    by_name = dict(_named_tensors(roots))
    known = {id(tensor) for tensor in by_name.values()}
    for one in ignored_params:
        if isinstance(one, str) and one in by_name:
            yield by_name[one]
        elif isinstance(one, nn.Parameter) and id(one) in known:
            yield one
        elif isinstance(one, str | nn.Parameter):
            what = f"{one!r}" if isinstance(one, str) else f"a parameter {list(one.shape)}"
            raise ConfigError(
                f"ignored_params holds {what}, which is not in the module",
                at=f"{place_of_rank()}, {describe_module(roots[0])}",
                fix="take it out, or correct its name",
            )
        else:
            raise ConfigError(f"ignored_params holds {described(one)}", at=place_of_rank(), fix=fix)


def _named_tensors(roots: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, root in enumerate(roots):
        prefix = str(index) if len(roots) > 1 else ""
        yield from root.named_parameters(prefix, remove_duplicate=False)
        yield from root.named_buffers(prefix, remove_duplicate=False)


# What is managed


@dataclass
class ManagedTensors:
    """What an annotation is to manage.

    Attributes:
        params: (FQN, parameter, index of the annotated module), each parameter once.
        buffers: The slots of the buffers, each tensor once.
        lines: One text per parameter and buffer, to compare between ranks.
        modules: The modules whose own tensors these are.
        sparse: The ids of the parameters that get sparse gradients.
    """

    params: list[tuple[str, nn.Parameter, int]] = field(default_factory=list)
    buffers: list[tuple[_Buffers, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    sparse: set[int] = field(default_factory=set)


def find_tensors(
    modules: Sequence[nn.Module], ignored: Ignored, device_type: str, ranks: Sequence[int] = ()
) -> ManagedTensors:
    """Return the parameters and buffers that no other annotation manages.

    Args:
        modules: What is annotated.
        ignored: What of it is left alone.
        device_type: Where gradients are averaged.
        ranks: Who averages, by global number: a parameter may be split over others.

    Raises:
        ConfigError: One of them, or a module, cannot be used.
    """
    for module in modules:
        if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
            raise ConfigError(
                f"{class_name(module)} has no forward, so nothing would tell when it runs",
                at=f"{place_of_rank()}, {describe_module(module)}",
                fix="pass the modules in it as a list: replicate([*module])",
            )
    managed = ManagedTensors()
    seen = ignored.ids(modules)
    below = [get_registry(one) for module in modules for one in module.modules() if one not in modules]
    nested = {id(found["replicate"].state) for found in below if "replicate" in found}
    for path, visited, index in _own_modules(modules, ignored.modules):
        managed.modules.append(visited)
        _check_alone(visited)
        if isinstance(visited, nn.Embedding | nn.EmbeddingBag) and visited.sparse:
            managed.sparse.add(id(visited.weight))
            managed.lines.append(f"sparse gradients of module {path!r}")
        for name, param in visited._parameters.items():
            if param is None or id(param) in seen:
                continue
            seen.add(id(param))
            claim = claim_of(param)
            if claim is not None and id(claim.owner) in nested:
                continue  # Averaged there, whoever uses it.
            fqn = join_fqn(path, name)
            _check_free(fqn, param, modules)
            _check_tensor("parameter", fqn, param)
            _check_place(fqn, param, device_type, ranks)
            managed.params.append((fqn, param, index))
            managed.lines.append(
                f"parameter {fqn!r} {list(param.shape)} {param.dtype}, requires_grad={param.requires_grad}"
                f"{f', {param.placements}' if isinstance(param, DTensor) else ''}"
                f"{', with an optimizer in backward' if has_torch_optimizer(param) else ''}"
            )
        for name, buffer in visited._buffers.items():
            if buffer is None or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            fqn = join_fqn(path, name)
            _check_tensor("buffer", fqn, buffer)
            if isinstance(buffer, DTensor):
                raise _sharded_already("buffer", fqn, buffer)
            managed.buffers.append((visited._buffers, name))
            managed.lines.append(f"buffer {fqn!r} {list(buffer.shape)} {buffer.dtype}")
    is_annotated_below = any(not {"replicate", "fully_shard"}.isdisjoint(found) for found in below)
    if not any(param.requires_grad for _, param, _ in managed.params) and not is_annotated_below:
        raise ConfigError(
            "no parameter requires a gradient, so there is nothing to average",
            at=f"{place_of_rank()}, {describe_module(modules[0])}",
            fix="do not replicate it, or unfreeze parameters first",
        )
    return managed


def unmanaged_params(modules: Sequence[nn.Module], ignored: Ignored) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (FQN, parameter of any shape) for what ``modules`` hold now and no annotation manages."""
    left = ignored.ids(modules)
    for path, visited, _ in _own_modules(modules, ignored.modules):
        for name, param in () if is_left_alone(visited) else visited._parameters.items():
            if param is not None and id(param) not in left and not is_managed(param):
                yield join_fqn(path, name), param


def _own_modules(roots: Sequence[nn.Module], ignored: Collection[nn.Module]) -> Iterator[tuple[str, nn.Module, int]]:
    """Yield what ``own_modules`` does of each root, behind its number where there are several, and that number."""
    for index, root in enumerate(roots):
        for path, module in own_modules(root, ignored, roots):
            yield (f"{index}.{path}".rstrip(".") if len(roots) > 1 else path), module, index


def own_modules(
    root: nn.Module, ignored: Collection[nn.Module], roots: Collection[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) left to right, without ignored modules and those that carry an annotation of their own."""
    seen: set[nn.Module] = set()
    stack = [("", root)]
    while stack:
        path, module = stack.pop()
        if module in seen or module in ignored:
            continue
        if module not in roots and ("replicate" in get_registry(module) or excludes(module, "replicate")):
            continue
        seen.add(module)
        yield path, module
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        stack.extend((join_fqn(path, name), child) for name, child in reversed(children))


def _check_alone(module: nn.Module) -> None:
    """Refuse a module of which torch averages the gradients."""
    rival = rival_on(module)
    if rival is not None:
        raise ConfigError(
            f"two things would average these gradients: replicate and {rival}",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix=keep_one(rival),
        )


def _check_free(fqn: str, param: nn.Parameter, modules: Sequence[nn.Module]) -> None:
    """Refuse a parameter that another annotation, or an optimizer of its own, takes care of."""
    claim, replacement = claim_of(param), replacement_of(param)
    if claim is not None:
        others: tuple[nn.Module, ...] = getattr(claim.owner, "modules", ())
        around = {below for other in others for below in other.modules()}
        what = f"another replicate averages this parameter, as {claim.fqn!r} of {_names(others)}"
        fix = "call replicate once for all modules that share it, as replicate([a, b]), or on the module around them"
        if all(module in around for module in modules):
            fix = "call replicate on the inner module before the outer one, or leave it to the outer one"
    elif replacement is not None or (is_sharded(param) and not isinstance(param, DTensor)):
        name = fqn if replacement is None else replacement.fqn
        what = f"fully_shard has taken and sharded this parameter, as {name!r}"
        fix = "let one annotation have all modules that share it: call fully_shard on the module around them"
    elif stepper_of(param) is not None:
        what = "step_in_backward steps on this parameter, before its gradient is averaged"
        fix = "call replicate first, then step_in_backward"
    else:
        return
    raise ConfigError(what, at=f"{place_of_rank()}, parameter {fqn!r} of {_names(modules)}", fix=fix)


def _names(modules: Sequence[nn.Module]) -> str:
    return " and ".join(map(describe_module, modules))


def _check_tensor(kind: str, fqn: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        place = f"{place_of_rank()}, {kind} {fqn!r}"
        raise ConfigError(f"{kind} has no shape yet", at=place, fix="run one forward before replicate")
    if tensor.device.type == "meta":
        fix = "materialize and initialise the module before replicate"
        raise ConfigError(f"{kind} is on the meta device", at=_place(kind, fqn, tensor), fix=fix)


def _check_place(fqn: str, param: nn.Parameter, device_type: str, ranks: Sequence[int]) -> None:
    """Refuse a parameter of another device, or one that is split over the ranks that average."""
    if isinstance(param, DTensor):
        shared = {*param.device_mesh.mesh.flatten().tolist()} & {*ranks}
        if is_sharded(param) or len(shared) != 1:  # This rank alone is in both.
            raise _sharded_already("parameter", fqn, param)
    if param.device.type != device_type:
        raise ConfigError(
            f"parameter is on {param.device}, and gradients are averaged on {device_type}",
            at=_place("parameter", fqn, param),
            fix=f"move the module to {device_type}, or pass a mesh of device type {param.device.type!r}",
        )


def _sharded_already(kind: str, fqn: str, tensor: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"{kind} is a {type(tensor).__name__}, which is sharded already",
        at=_place(kind, fqn, tensor),
        fix="ignore its module, or call replicate on it before fully_shard on an ancestor",
    )


def _place(kind: str, fqn: str, tensor: torch.Tensor) -> str:
    return f"{place_of_rank()}, {kind} {fqn!r} {list(tensor.shape)} {tensor.dtype}".replace("torch.", "")

"""Which parameters and buffers of a module ``replicate`` manages, and whether it can."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from composable.contract import get_registry
from composable.errors import ConfigError, place_of_rank
from composable.fqns import describe_module
from composable.replication.state import ReplicateState

__all__ = ["ManagedTensors", "find_tensors"]


@dataclass
class ManagedTensors:
    """What an annotation is to manage.

    Attributes:
        params: (FQN, parameter, index of the annotated module), each parameter once.
        buffers: The slots of the buffers, each tensor once.
        lines: One text per parameter and buffer, to compare between ranks.
    """

    params: list[tuple[str, nn.Parameter, int]] = field(default_factory=list)
    buffers: list[tuple[dict[str, torch.Tensor | None], str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def find_tensors(
    modules: Sequence[nn.Module], ignored_modules: Collection[nn.Module] | None, device_type: str
) -> ManagedTensors:
    """Return the parameters and buffers that no other annotation manages.

    Raises:
        ConfigError: One of them, a module or an ignored module cannot be used.
    """
    ignored = _check_ignored(modules, ignored_modules)
    managed = ManagedTensors()
    for module in modules:
        if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
            raise ConfigError(
                f"{type(module).__name__} has no forward, so nothing would tell when it runs",
                at=f"{place_of_rank()}, {describe_module(module)}",
                fix="pass the modules in it as a list: replicate([*module])",
            )
    seen = _params_of_nested(modules, ignored)
    for index, module in enumerate(modules):
        prefix = f"{index}" if len(modules) > 1 else ""
        for path, visited in _own_modules(module, ignored, modules):
            path = f"{prefix}.{path}".strip(".")
            _check_sparse(path, visited)
            for name, param in visited._parameters.items():
                if param is not None and id(param) not in seen:
                    seen.add(id(param))
                    fqn = f"{path}.{name}" if path else name
                    _check_tensor("parameter", fqn, param, device_type)
                    managed.params.append((fqn, param, index))
                    managed.lines.append(
                        f"parameter {fqn!r} {list(param.shape)} {param.dtype}, requires_grad={param.requires_grad}"
                    )
            for name, buffer in visited._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    fqn = f"{path}.{name}" if path else name
                    _check_tensor("buffer", fqn, buffer, None)
                    managed.buffers.append((visited._buffers, name))
                    managed.lines.append(f"buffer {fqn!r} {list(buffer.shape)} {buffer.dtype}")
    if not any(param.requires_grad for _, param, _ in managed.params):
        raise ConfigError(
            "no parameter requires a gradient, so there is nothing to average",
            at=f"{place_of_rank()}, {describe_module(modules[0])}",
            fix="do not replicate it, or unfreeze parameters first",
        )
    return managed


def _own_modules(
    root: nn.Module, ignored: Collection[nn.Module], roots: Collection[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) left to right, without ignored modules and those that carry an annotation of their own."""
    seen: set[nn.Module] = set()
    stack = [("", root)]
    while stack:
        path, module = stack.pop()
        if module in seen or module in ignored:
            continue
        registry = get_registry(module)
        if module is not root and ("fully_shard" in registry or ("replicate" in registry and module not in roots)):
            continue
        seen.add(module)
        yield path, module
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        stack.extend((f"{path}.{name}" if path else name, child) for name, child in reversed(children))


def _params_of_nested(modules: Sequence[nn.Module], ignored: Collection[nn.Module]) -> set[int]:
    """Return the ids of parameters that a nested ``replicate`` averages, or that hang in an ignored module."""
    others: set[int] = set()
    for module in modules:
        for visited in module.modules():
            annotation = get_registry(visited).get("replicate")
            if annotation is not None and visited not in modules and isinstance(annotation.state, ReplicateState):
                others.update(id(item.param) for item in annotation.state.reducer.params)
    for module in ignored:
        others.update(map(id, module.parameters()))
        others.update(map(id, module.buffers()))
    return others


def _check_ignored(modules: Sequence[nn.Module], ignored_modules: Collection[nn.Module] | None) -> frozenset[nn.Module]:
    if ignored_modules is None:
        return frozenset()
    if isinstance(ignored_modules, nn.Module) or not isinstance(ignored_modules, Collection):
        raise ConfigError(
            f"ignored_modules is a {type(ignored_modules).__name__}",
            fix="pass a list or set of modules",
        )
    inside = {visited for module in modules for visited in module.modules()}
    for ignored in ignored_modules:
        if not isinstance(ignored, nn.Module):
            raise ConfigError(f"ignored_modules holds a {type(ignored).__name__}", fix="pass modules only")
        if ignored not in inside:
            raise ConfigError(
                "an ignored module is not in the module that ignores it",
                at=f"{place_of_rank()}, {describe_module(ignored)}",
                fix="take it out of ignored_modules",
            )
    return frozenset(ignored_modules)


def _check_tensor(kind: str, fqn: str, tensor: torch.Tensor, device_type: str | None) -> None:
    place = f"{place_of_rank()}, {kind} {fqn!r}"
    if is_lazy(tensor):
        raise ConfigError(f"{kind} has no shape yet", at=place, fix="run one forward before replicate")
    place += f" {list(tensor.shape)} {tensor.dtype}".replace("torch.", "")
    if tensor.device.type == "meta":
        raise ConfigError(
            f"{kind} is on the meta device", at=place, fix="materialize and initialise the module before replicate"
        )
    if isinstance(tensor, DTensor):
        raise ConfigError(
            f"{kind} is a {type(tensor).__name__}, which is sharded already",
            at=place,
            fix="ignore its module, or call replicate on it before fully_shard on an ancestor",
        )
    if device_type is not None and tensor.device.type != device_type:
        raise ConfigError(
            f"{kind} is on {tensor.device}, and gradients are averaged on {device_type}",
            at=place,
            fix=f"move the module to {device_type}, or pass a mesh of device type {tensor.device.type!r}",
        )


def _check_sparse(path: str, module: nn.Module) -> None:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
        raise ConfigError(
            f"{type(module).__name__} gives sparse gradients, which replicate cannot average",
            at=f"{place_of_rank()}, module {path!r}",
            fix="build it with sparse=False, or ignore it",
        )

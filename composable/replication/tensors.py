"""Which parameters and buffers of a module ``replicate`` manages, and whether it can."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from composable.claims import claim_of, is_managed, is_sharded
from composable.contract import excludes, get_registry
from composable.engine import has_torch_optimizer, stepper_of
from composable.errors import ConfigError, place_of_rank
from composable.fqns import describe_module
from composable.planning import replacement_of
from composable.registrations import is_left_alone
from composable.replication.ignored import Ignored
from composable.replication.locals import is_split_elsewhere
from composable.rivals import keep_one, rival_on
from composable.wording import class_name, join_fqn

__all__ = ["ManagedTensors", "find_tensors", "own_modules", "unmanaged_params"]


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
    buffers: list[tuple[dict[str, torch.Tensor | None], str]] = field(default_factory=list)
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
    managed = ManagedTensors()
    for module in modules:
        if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
            raise ConfigError(
                f"{class_name(module)} has no forward, so nothing would tell when it runs",
                at=f"{place_of_rank()}, {describe_module(module)}",
                fix="pass the modules in it as a list: replicate([*module])",
            )
    seen = ignored.ids(modules)
    nested = _nested_states(modules)
    for index, module in enumerate(modules):
        prefix = f"{index}" if len(modules) > 1 else ""
        for path, visited in own_modules(module, ignored.modules, modules):
            path = f"{prefix}.{path}".strip(".")
            managed.modules.append(visited)
            _check_alone(visited)
            if isinstance(visited, nn.Embedding | nn.EmbeddingBag) and visited.sparse:
                managed.sparse.add(id(visited.weight))
                managed.lines.append(f"sparse gradients of module {path!r}")
            for name, param in visited._parameters.items():
                if param is not None and id(param) not in seen:
                    seen.add(id(param))
                    fqn = f"{path}.{name}" if path else name
                    claim = claim_of(param)
                    if claim is not None and id(claim.owner) in nested:
                        continue  # Averaged there, whoever uses it.
                    _check_free(fqn, param, modules)
                    _check_tensor("parameter", fqn, param, device_type, is_split=is_split_elsewhere(param, ranks))
                    managed.params.append((fqn, param, index))
                    managed.lines.append(
                        f"parameter {fqn!r} {list(param.shape)} {param.dtype}, requires_grad={param.requires_grad}"
                        f"{f', {param.placements}' if isinstance(param, DTensor) else ''}"
                        f"{', with an optimizer in backward' if has_torch_optimizer(param) else ''}"
                    )
            for name, buffer in visited._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    fqn = f"{path}.{name}" if path else name
                    _check_tensor("buffer", fqn, buffer, None, is_split=False)
                    managed.buffers.append((visited._buffers, name))
                    managed.lines.append(f"buffer {fqn!r} {list(buffer.shape)} {buffer.dtype}")
    if not any(param.requires_grad for _, param, _ in managed.params) and not _has_annotated(modules):
        raise ConfigError(
            "no parameter requires a gradient, so there is nothing to average",
            at=f"{place_of_rank()}, {describe_module(modules[0])}",
            fix="do not replicate it, or unfreeze parameters first",
        )
    return managed


def unmanaged_params(modules: Sequence[nn.Module], ignored: Ignored) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (FQN, parameter) for what ``modules`` hold now and no annotation manages."""
    left = ignored.ids(modules)
    for index, module in enumerate(modules):
        prefix = str(index) if len(modules) > 1 else ""
        for path, visited in own_modules(module, ignored.modules, modules):
            if is_left_alone(visited):
                continue
            for name, param in visited._parameters.items():
                if param is not None and id(param) not in left and not is_managed(param):
                    yield ".".join(filter(None, [prefix, path, name])), param


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


def _nested_states(modules: Sequence[nn.Module]) -> set[int]:
    """Return the ids of the states of each ``replicate`` below ``modules``."""
    below = (visited for module in modules for visited in module.modules() if visited not in modules)
    found = (get_registry(visited).get("replicate") for visited in below)
    return {id(annotation.state) for annotation in found if annotation is not None}


def _has_annotated(modules: Sequence[nn.Module]) -> bool:
    """Say whether something below ``modules`` is annotated, so that nothing may be left to do."""
    below = (visited for module in modules for visited in module.modules() if visited not in modules)
    return any(not {"replicate", "fully_shard"}.isdisjoint(get_registry(visited)) for visited in below)


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
    """Refuse a parameter that another annotation, or an optimizer of its own, takes care of.

    Raises:
        ConfigError: It names both.
    """
    claim, replacement = claim_of(param), replacement_of(param)
    if claim is not None:
        others: tuple[nn.Module, ...] = getattr(claim.owner, "modules", ())
        around = {below for other in others for below in other.modules()}
        what = f"another replicate averages this parameter, as {claim.fqn!r} of {_names(others)}"
        fix = "call replicate once for all modules that share it, as replicate([a, b]), or on the module around them"
        if all(module in around for module in modules):
            fix = "call replicate on the inner module before the outer one, or leave it to the outer one"
    elif replacement is not None or (is_sharded(param) and not isinstance(param, DTensor)):
        what = (
            f"fully_shard has taken and sharded this parameter, as {fqn if replacement is None else replacement.fqn!r}"
        )
        fix = "let one annotation have all modules that share it: call fully_shard on the module around them"
    elif stepper_of(param) is not None:
        what = "step_in_backward steps on this parameter, before its gradient is averaged"
        fix = "call replicate first, then step_in_backward"
    else:
        return
    raise ConfigError(what, at=f"{place_of_rank()}, parameter {fqn!r} of {_names(modules)}", fix=fix)


def _names(modules: Sequence[nn.Module]) -> str:
    return " and ".join(map(describe_module, modules))


def _check_tensor(kind: str, fqn: str, tensor: torch.Tensor, device_type: str | None, *, is_split: bool) -> None:
    place = f"{place_of_rank()}, {kind} {fqn!r}"
    if is_lazy(tensor):
        raise ConfigError(f"{kind} has no shape yet", at=place, fix="run one forward before replicate")
    place += f" {list(tensor.shape)} {tensor.dtype}".replace("torch.", "")
    if tensor.device.type == "meta":
        raise ConfigError(
            f"{kind} is on the meta device", at=place, fix="materialize and initialise the module before replicate"
        )
    if isinstance(tensor, DTensor) and not is_split:
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

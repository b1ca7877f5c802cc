"""What of a model and its optimizers goes into a checkpoint, and how it comes back; all by FQN.

The layout is that of torch's ``get_state_dict`` in ``torch.distributed.checkpoint``, so either side
reads what the other wrote: ``model.FQN``, ``optimizer.state.FQN.NAME``, ``optimizer.param_groups``.
Unlike there, an optimizer that has not stepped is saved without state and loaded without a step,
and so is a parameter that has had no gradient.

Nothing here communicates.
"""

import io
import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate

from composable.errors import ComposableError, ConfigError, UsageError
from composable.optim import OptimizerNames, describe_optimizer, group_differences, names_of_params
from composable.torch_private import tree_map

__all__ = [
    "DataPlanner",
    "apply",
    "as_data",
    "check_places",
    "describe_optimizers",
    "find_differences",
    "read_data",
    "staged",
    "state_to_save",
    "targets",
]

Optimizers = Sequence[torch.optim.Optimizer]

_PLAIN = frozenset({bool, int, float, str, type(None)})


class DataPlanner(DefaultLoadPlanner):
    """Reads into the flat names of a checkpoint; what is no tensor is read as data, which runs no code."""

    def __init__(self, folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor in its place."""
        fqn = read_item.dest_index.fqn
        self.state_dict[fqn] = read_data(value, f"{self._folder}, {fqn}")


def as_data(value: object, name: str) -> bytes:
    """Return ``value`` as ``torch.load(weights_only=True)`` reads it.

    Raises:
        ConfigError: That would not read it; ``name`` says in the message what it is.
    """
    packed = io.BytesIO()
    try:
        torch.save(value, packed)
        packed.seek(0)
        torch.load(packed, weights_only=True)
    except (pickle.PickleError, RuntimeError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{name} is more than data: {_without_advice(error)}",
            fix="use tensors, numbers, strings, and lists, tuples and dicts of them",
        ) from None
    return packed.getvalue()


def read_data(source: Path | io.BytesIO, name: str, *, device: str | None = None) -> Any:
    """Return what ``as_data`` packed. Whatever ``source`` holds, no code of its is run.

    Raises:
        ConfigError: It holds something else; ``name`` says in the message where it is from.
        OSError: It cannot be read.
    """
    try:
        return torch.load(source, map_location=device, weights_only=True)
    except OSError:
        raise
    # Whatever a broken archive or pickle makes torch raise.
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be read as data: {_without_advice(error)}",
            fix="load another checkpoint, and do not trust where this one is from",
        ) from None


def _without_advice(error: Exception) -> str:
    """Return what is wrong with a pickle; torch goes on to advise how to run the code in it."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is not None:
        return f"it names {named[1]}"
    if isinstance(error, pickle.UnpicklingError):
        return "it holds what is no data"
    if isinstance(error, ComposableError):
        return error.what
    return str(error).strip().partition("\n")[0] or type(error).__name__


def describe_optimizers(model: nn.Module, optimizers: Optimizers) -> tuple[OptimizerNames, ...]:
    """Describe the optimizers of ``model``.

    Raises:
        ConfigError: A parameter is not the model's, or in two places.
    """
    # Modules that were unsharded by hand show their sharded parameters again, which the optimizers hold.
    model.state_dict(keep_vars=True)
    names = names_of_params(model)
    described = tuple(describe_optimizer(optimizer, names) for optimizer in optimizers)
    params = [name for optimizer in described for group in optimizer.groups for name in group.params]
    twice = sorted({name for name in params if params.count(name) > 1}) if len(params) > len(set(params)) else []
    if twice:
        raise ConfigError(f"in two param groups or optimizers: {', '.join(twice)}", fix="give each parameter one place")
    return described


def state_to_save(model: nn.Module, optimizers: Optimizers, names_of_all: Sequence[OptimizerNames]) -> dict[str, Any]:
    """Return the state of both as ``torch.distributed.checkpoint.save`` takes it; tensors are not copied.

    Args:
        model: Whose parameters the optimizers step.
        optimizers: Of this rank.
        names_of_all: The same with the parameters that any rank has.

    Raises:
        UsageError: A parameter has no values yet.
        ConfigError: A value is neither a tensor nor plain data.
    """
    _check_materialized(model)
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizers:
        state["optimizer"] = {"state": {}, "param_groups": []}
        names = names_of_params(model)
        for optimizer, described in zip(optimizers, names_of_all, strict=True):
            saved = optimizer.state_dict()
            fqns = [names[param] for group in optimizer.param_groups for param in group["params"]]
            state["optimizer"]["state"].update({fqns[index]: value for index, value in saved["state"].items()})
            state["optimizer"]["param_groups"] += [
                {**group, "params": list(every.params)}
                for group, every in zip(saved["param_groups"], described.groups, strict=True)
            ]
    for name, value in _leaves(state, ""):
        if type(value) not in _PLAIN:
            as_data(value, name)
    return state


def staged(state: Any) -> Any:
    """Return a copy of ``state`` on the host that later steps leave alone."""
    return tree_map(_copied, state)


def find_differences(
    metadata: Metadata,
    saved: Sequence[OptimizerNames],
    model: nn.Module,
    optimizers: Sequence[OptimizerNames],
    elsewhere: Collection[str],
) -> list[str]:
    """Return a line for each kind of thing in which a checkpoint differs from what it is to be loaded into.

    Args:
        metadata: Of the checkpoint.
        saved: The optimizers in it.
        model: What it is to be loaded into.
        optimizers: What it is to be loaded into, with the parameters that any rank has; none: theirs is left out.
        elsewhere: Names of what only other ranks have.

    Raises:
        UsageError: A parameter has no values yet.
    """
    _check_materialized(model)
    sizes: dict[str, torch.Size | None] = {}
    for key, path in metadata.planner_data.items():
        entry = metadata.state_dict_metadata[key]
        if path[0] == "model":
            sizes[path[1]] = entry.size if isinstance(entry, TensorStorageMetadata) and len(path) == 2 else None
    state = get_model_state_dict(model)
    lines = []
    missing, unexpected = sorted(state.keys() - sizes.keys()), sorted(sizes.keys() - state.keys() - set(elsewhere))
    if missing:
        lines.append(f"only in the model: {', '.join(missing)}")
    if unexpected:
        lines.append(f"only in the checkpoint: {', '.join(unexpected)}")
    for name in sorted(state.keys() & sizes.keys()):
        here, there = getattr(state[name], "shape", None), sizes[name]
        if here != there:
            lines.append(f"{name} is {_shape(there)} in the checkpoint, {_shape(here)} in the model")
    return lines + (_optimizer_differences(saved, optimizers) if optimizers else [])


def check_places(metadata: Metadata, saved: Sequence[OptimizerNames]) -> None:
    """Raise unless the values of a checkpoint make a model's state and the optimizers ``saved`` when put together.

    Raises:
        ConfigError: They do not.
    """
    paths = list(metadata.planner_data.values())
    groups = sum(len(optimizer.groups) for optimizer in saved)
    nested: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, "param_groups": []}}
    try:
        # Sorted, what lies at a path or below it follows it.
        ordered = sorted(paths, key=lambda path: [(type(part) is int, part) for part in path])
        for path, following in pairwise(ordered):
            if following[: len(path)] == path:
                raise ValueError(f"two of them share the place {path!r:.80}")
        for path in paths:
            is_state = path[0] == "optimizer" and path[1] == "state" and len(path) > 3
            is_setting = path[:2] == ("optimizer", "param_groups") and len(path) > 3 and path[2] in range(groups)
            if not (path[0] == "model" or is_state or is_setting) or type(path[1]) is not str:
                raise ValueError(path)
            if is_state and type(path[2]) is not str:
                raise ValueError(path)
            if any(type(part) is int and not 0 <= part < len(paths) for part in path):
                raise ValueError(path)
            _place(nested, path, None)
        found = nested["optimizer"]["param_groups"]
        if len(found) != groups or not all(isinstance(one, dict) for one in found):
            raise ValueError("its groups are not those that it names")
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise ConfigError(
            f"the values of the checkpoint do not make a model and its optimizers: {error}",
            fix="load another checkpoint, and do not trust where this one is from",
        ) from None


def targets(metadata: Metadata, model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Return what a checkpoint's flat names are read into: the model's own tensors, fresh ones for optimizer state."""
    model_state = get_model_state_dict(model)
    params = {name: param for param, name in names_of_params(model).items()}
    flat: dict[str, Any] = {}
    for key, path in metadata.planner_data.items():
        entry = metadata.state_dict_metadata[key]
        if (path[0] == "model" and path[1] not in model_state) or (
            path[:2] == ("optimizer", "state") and path[2] not in params
        ):
            continue  # What only other ranks have.
        if path[0] == "model" and isinstance(model_state[path[1]], torch.Tensor):
            flat[key] = model_state[path[1]]
        elif path[0] == "model" or (path[0] == "optimizer" and optimizers):
            like = params.get(path[2]) if path[:2] == ("optimizer", "state") and path[3:] != ("step",) else None
            flat[key] = _empty(entry, like) if isinstance(entry, TensorStorageMetadata) else None
    return flat


def apply(flat: Mapping[str, Any], metadata: Metadata, model: nn.Module, optimizers: Optimizers) -> None:
    """Give what was read into ``targets`` to the model and the optimizers."""
    nested: dict[str, Any] = {"model": {}, "optimizer": {}}
    for key, value in flat.items():
        _place(nested, metadata.planner_data[key], value)
    set_model_state_dict(model, nested["model"])
    state, groups = nested["optimizer"].get("state", {}), iter(nested["optimizer"].get("param_groups", []))
    names = names_of_params(model)
    for optimizer in optimizers:
        fqns = [names[param] for group in optimizer.param_groups for param in group["params"]]
        # Their order within the optimizer's groups, which need not be that of the saved ones.
        own_groups = [{**group, **next(groups), "params": group["params"]} for group in _packed_groups(optimizer)]
        own_state = {index: state[name] for index, name in enumerate(fqns) if name in state}
        optimizer.load_state_dict({"state": own_state, "param_groups": own_groups})


def _optimizer_differences(saved: Sequence[OptimizerNames], current: Sequence[OptimizerNames]) -> list[str]:
    if len(saved) != len(current):
        kinds = ", ".join(optimizer.kind for optimizer in saved) or "no optimizer"
        return [f"the checkpoint holds {kinds}; here: {', '.join(optimizer.kind for optimizer in current)}"]
    lines = []
    for index, (there, here) in enumerate(zip(saved, current, strict=True)):
        name = "optimizer" if len(current) == 1 else f"optimizer {index}"
        if there.kind != here.kind:
            lines.append(f"{name} is {there.kind} in the checkpoint, {here.kind} here")
        lines += [f"{name}, {line}" for line in group_differences(there.groups, here.groups, "the checkpoint")]
    return lines


def _check_materialized(model: nn.Module) -> None:
    on_meta = [name for name, value in model.state_dict().items() if isinstance(value, torch.Tensor) and value.is_meta]
    if on_meta:
        raise UsageError(f"on the meta device: {', '.join(on_meta)}", fix="materialize the model first")


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield what is neither a tensor nor has one in it, with its name."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list) and any(isinstance(item, (Mapping, list, torch.Tensor)) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}.{index}")
    elif not isinstance(value, torch.Tensor):
        yield name, value


def _copied(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else deepcopy(value)


def _shape(size: torch.Size | None) -> str:
    return "no tensor" if size is None else str(list(size))


def _empty(entry: TensorStorageMetadata, like: torch.Tensor | None) -> torch.Tensor:
    """Return room for a tensor, cut and placed as the parameter ``like`` where it has its shape.

    Of another shape, as the rows of Adafactor, it is whole on every rank, and beside a DTensor one too.
    """
    if like is None:
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    if isinstance(like, DTensor) and like.shape == entry.size:
        return torch.empty_like(like.detach(), dtype=entry.properties.dtype)
    room = torch.empty(entry.size, dtype=entry.properties.dtype, device=like.device)
    if isinstance(like, DTensor) and entry.size:
        return DTensor.from_local(room, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return room


def _packed_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
    return groups


def _place(root: Any, path: Sequence[str | int], value: Any) -> None:
    """Put ``value`` where ``path`` leads: a string into a dict, a number into a list."""
    for key, following in pairwise(path):
        root = _at(root, key, {} if isinstance(following, str) else [])
    _at(root, path[-1], None)
    root[path[-1]] = value


def _at(container: Any, key: Any, default: Any) -> Any:
    if isinstance(container, dict):
        return container.setdefault(key, default)
    container += [None] * (key + 1 - len(container))
    if container[key] is None:
        container[key] = default
    return container[key]

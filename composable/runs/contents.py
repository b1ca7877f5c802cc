"""The contents of a checkpoint, by FQN: what is saved of a model and its optimizers, and what becomes of it.

torch's ``get_state_dict`` in ``torch.distributed.checkpoint`` has the same layout, so either side
reads checkpoints of the other: ``model.FQN``, ``optimizer.state.FQN.NAME``, ``optimizer.param_groups``.
Unlike there, an optimizer that has not stepped is saved without state and loaded without a step,
and so is a parameter that has had no gradient.
"""

from ast import literal_eval
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from composable.dtensor import RaggedDTensor, write_values
from composable.errors import ConfigError, UsageError
from composable.ground.ownership import claim_of, is_forgotten, is_managed
from composable.ground.torch_private import flatten_state_dict, tree_leaves, tree_map
from composable.runs.pieces import DataReader, Value
from composable.runs.run import MANIFEST, PIECES
from composable.saving import (
    Names,
    NamesOnAll,
    OptimizerNames,
    as_data,
    entries_now,
    find_differences,
    load_as_torch,
    names_of_params,
    optimizer_differences,
    picked_of,
)

Optimizers = Sequence[torch.optim.Optimizer]

_PLAIN = frozenset({bool, int, float, str, type(None)})


# -- saving


def state_to_save(model: nn.Module, optimizers: Optimizers, every: NamesOnAll) -> dict[str, Any]:
    """Return what is picked of model and optimizers, in the form for ``torch.distributed.checkpoint.save``.

    Tensors are the model's and the optimizers' own, sharded as they are, not copies. Raises if a parameter has no
    values yet, or if a value is neither a tensor nor plain data.
    """
    _check_materialized(every.values)
    state: dict[str, Any] = {"model": every.values}
    if optimizers:
        state["optimizer"] = {"state": {}, "param_groups": []}
        names = names_of_params(model)
        for optimizer, described in zip(optimizers, every.optimizers, strict=True):
            saved = optimizer.state_dict()
            others = [key for key in saved.get("state", [None]) if not isinstance(key, int)]
            if others:
                what = "is of another form than torch's" if others == [None] else f"has {others[0]!r}, of no parameter"
                raise ConfigError(
                    f"the state of {type(optimizer).__name__} {what}",
                    fix="pass the torch optimizer inside of it; or save its state_dict() in extra",
                )
            fqns = [names[param] for group in optimizer.param_groups for param in group["params"]]
            named = {fqns[index]: _with_text_keys(value) for index, value in saved["state"].items()}
            named = {name: value for name, value in named.items() if name in every.picked}
            state["optimizer"]["state"].update(named)
            state["optimizer"]["param_groups"] += [
                {**_with_text_keys(group), "params": list(params)}
                for group, params in zip(saved["param_groups"], described.groups, strict=True)
            ]
    for name, value in flatten_state_dict(state)[0].items():
        if not isinstance(value, torch.Tensor) and type(value) not in _PLAIN:
            as_data(value, name)
    return state


def norms_of_plain(model: nn.Module, picked: Collection[str]) -> dict[str, float]:
    """Return the norms of the trained plain parameters that are picked and that all ranks should hold alike.

    These are the ones that ``replicate`` manages, and those that lie forgotten beside annotated ones.
    """
    names = names_of_params(model)
    if not any(map(is_managed, names)):
        return {}
    found = {
        name: torch.linalg.vector_norm(param.detach(), dtype=torch.float64)
        for param, name in names.items()
        if name in picked and type(param) is nn.Parameter and param.requires_grad and param.is_floating_point()
        if claim_of(param) is not None or is_forgotten(param)
    }
    norms: dict[str, float] = {}
    for device in dict.fromkeys(one.device for one in found.values()):
        # Each number that is read by itself is a wait.
        here = {name: one for name, one in found.items() if one.device == device}
        norms |= zip(here, torch.stack([*here.values()]).tolist(), strict=True)
    return norms


# The prefix of a key that is a number: names in a checkpoint are text.
_NUMBER = "number "


def _with_text_keys(value: Any) -> Any:
    """Return ``value`` with text in place of dict keys that are numbers, which some optimizers use."""
    if not isinstance(value, dict):
        return value
    return {
        f"{_NUMBER}{key!r}" if type(key) in (int, float) else key: _with_text_keys(each) for key, each in value.items()
    }


def _with_own_keys(value: Any) -> Any:
    """Undo ``_with_text_keys``, also inside of lists."""
    if isinstance(value, list):
        return [_with_own_keys(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        literal_eval(key.removeprefix(_NUMBER)) if str(key).startswith(_NUMBER) else key: _with_own_keys(each)
        for key, each in value.items()
    }


def staged(state: Any, before: Any = None) -> Any:
    """Return a copy of ``state`` on the host that later steps do not change.

    It takes the memory of ``before``, an earlier copy that nobody reads any more: to get new memory from the system
    takes longer than to copy.
    """
    free: dict[Any, list[torch.Tensor]] = {}
    for local in map(_plain_local, tree_leaves(before)):
        if local is not None and local.device.type == "cpu":
            free.setdefault((local.shape, local.dtype), []).append(local)

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return deepcopy(leaf)
        local = _plain_local(leaf)
        if local is None or not (room := free.get((local.shape, local.dtype))):
            return leaf.detach().to("cpu", copy=True)
        copy = room.pop().copy_(local)
        return RaggedDTensor.wrap(copy, leaf._spec) if isinstance(leaf, RaggedDTensor) else copy

    return tree_map(copied, state)


def _plain_local(leaf: Any) -> torch.Tensor | None:
    """Return what this rank has of a tensor, if that is a tensor of torch's own class."""
    local = leaf._local_tensor.detach() if isinstance(leaf, RaggedDTensor) else leaf
    local = local.detach() if isinstance(local, nn.Parameter) else local
    return local if type(local) is torch.Tensor else None


def _check_materialized(values: Mapping[str, Any]) -> None:
    on_meta = [name for name, value in values.items() if isinstance(value, torch.Tensor) and value.is_meta]
    if on_meta:
        raise UsageError(f"on the meta device: {', '.join(on_meta)}", fix="materialize the model first")


# -- loading


def check_fit(reader: DataReader, saved: Sequence[OptimizerNames], every: NamesOnAll, names: Names | None) -> None:
    """Raise one error that lists all differences between a checkpoint and the model and optimizers to load.

    Without optimizers in ``every`` only the model is checked. ``names`` are those of the call.
    """
    _check_materialized(every.values)

    def is_picked(name: str) -> object:
        # A function may pick saved names that the model has not, which is a difference.
        return names is None or name in every.picked or (callable(names) and names(name))

    sizes: dict[str, torch.Size | None] = {}
    for path, dtype, size in reader.values.values():
        if path[0] == "model" and is_picked(str(path[1])):
            sizes[str(path[1])] = size if dtype and len(path) == 2 else None
    expected = {name: value if isinstance(value, torch.Tensor) else None for name, value in every.values.items()}
    found = find_differences(expected, sizes.keys() - every.elsewhere, sizes.__getitem__)
    current = every.optimizers
    lines = optimizer_differences(picked_of(saved, is_picked), current) if current else []
    groups = reader.tree(dict.fromkeys(reader.values)).get("optimizer", {}).get("param_groups", [])
    if len(groups) != sum(len(one.groups) for one in saved) or not all(isinstance(one, dict) for one in groups):
        lines.append(f"{PIECES} describes {len(groups)} param groups, {MANIFEST} others")
    replace(found, unfit=(*found.unfit, *lines)).check(strict=True, is_checkpoint=True)


def targets(reader: DataReader, model: nn.Module, optimizers: Optimizers, every: NamesOnAll) -> dict[str, Any]:
    """Return the tensors that what is picked of a checkpoint is read into, by flat name.

    Tensors are the model's own, and new ones for optimizer state, which are cut like their parameters, in the dtypes
    that were saved. ``None``: the value is no tensor. Names that only other ranks have are left out.
    """
    params = {name: param for param, name in names_of_params(model).items() if name in every.picked}
    flat: dict[str, Any] = {}
    for key, value in reader.values.items():
        match value.path:
            case ("model", str(name), *_) if name in every.values:
                held = every.values[name]
                flat[key] = held if isinstance(held, torch.Tensor) else _room_for(value, None)
            case ("optimizer", "state", str(name), *rest) if optimizers and name in params:
                flat[key] = _room_for(value, None if rest == ["step"] else params[name])
            case ("optimizer", "param_groups", *_) if optimizers:
                flat[key] = _room_for(value, None)
    return flat


def _room_for(value: Value, like: torch.Tensor | None) -> torch.Tensor | None:
    """Return an empty tensor, cut and placed like a parameter, or whole if the shape differs, as Adafactor's rows."""
    if value.dtype is None:
        return None
    if isinstance(like, DTensor) and like.shape == value.size:
        return torch.empty_like(like.detach(), dtype=value.dtype)
    room = torch.empty(value.size, dtype=value.dtype, device=None if like is None else like.device)
    if isinstance(like, DTensor) and value.size:
        return DTensor.from_local(room, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return room


def apply(nested: Mapping[str, Any], model: nn.Module, optimizers: Optimizers, picked: Collection[str]) -> None:
    """Load the tree of values that were read into ``targets`` into the model and the optimizers; others stay."""
    load_as_torch(model, entries_now(model).values | nested.get("model", {}))
    saved = _with_own_keys(nested.get("optimizer", {}))
    state, groups = saved.get("state", {}), iter(saved.get("param_groups", []))
    names = names_of_params(model)
    for optimizer in optimizers:
        fqns = [names[param] for group in optimizer.param_groups for param in group["params"]]
        before = optimizer.state_dict()
        packed: list[dict[str, Any]] = before["param_groups"]
        # Parameters keep their order within the optimizer's groups, which may differ from the saved order.
        own_groups = [{**group, **next(groups), "params": group["params"]} for group in packed]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        own_state = {
            index: _in_its_class(optimizer.state.get(params[index], {}), state[name])
            for index, name in enumerate(fqns)
            if name in state
        }
        own_state |= {index: one for index, one in before["state"].items() if fqns[index] not in picked}
        optimizer.load_state_dict({"state": own_state, "param_groups": own_groups})


def _in_its_class(held: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter, in the optimizer's own tensors if these are packed, for example in 8 bits.

    Packed tensors are saved as ordinary values.
    """
    found = dict(read)
    for key, value in held.items():
        own = value._local_tensor if isinstance(value, DTensor) else value
        if hasattr(type(own), "__tensor_flatten__") and isinstance(read.get(key), torch.Tensor):
            values = read[key]
            write_values(own, values._local_tensor if isinstance(values, DTensor) else values)
            found[key] = value
    return found

"""torch's own loading of full state dicts, ``set_model_state_dict`` and its kin, taught our parameters.

It goes through functions of torch that cut full values into rows. They learn to cut them as our
parameters are cut, and those that load optimizers compare the groups first: torch loads what
differs in part, or wrongly.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import nn

from composable.collectives import Ranks
from composable.errors import ConfigError
from composable.optim import GroupNames, describe_optimizer, group_differences, names_by_alias, names_of_params
from composable.ragged import RaggedDTensor, RaggedLayout, slice_full
from composable.saving.fit import entries_to_load, find_differences
from composable.torch_private import dcp_state_dict, state_dict_utils

__all__ = ["optimizer_state_differences", "teach_torch_to_load"]


# On the last function that is replaced.
_MARK = "_composable_taught"


def teach_torch_to_load() -> None:
    """Make torch's loading of full state dicts cut ``RaggedDTensor``s, and check before it loads; once.

    Models without such parameters are loaded as before.
    """
    if not hasattr(dcp_state_dict._load_model_state_dict, _MARK):
        state_dict_utils._distribute_tensors = _with_ragged_values(state_dict_utils._distribute_tensors)
        for name in ("_distribute_state_dict", "_broadcast_state_dict"):
            setattr(dcp_state_dict, name, _with_ragged_scalars(getattr(dcp_state_dict, name)))
        dcp_state_dict._load_optim_state_dict = _with_compared_groups(dcp_state_dict._load_optim_state_dict)
        dcp_state_dict._load_model_state_dict = _with_check(dcp_state_dict._load_model_state_dict)
        setattr(dcp_state_dict._load_model_state_dict, _MARK, True)


def _with_check(original: Any) -> Any:
    """Wrap what would take a full state dict with missing keys, or find other keys after writing some."""

    @wraps(original)
    def load_model_state_dict(model: nn.Module, state_dict: dict[str, Any], info: Any) -> Any:
        is_given = bool(state_dict) or info.broadcast_from_rank0
        if info.handle_model and is_given and (info.full_state_dict or info.broadcast_from_rank0):
            named, opaque = entries_to_load(model)
            # As torch names what torch.compile wraps.
            expected = {key.replace("_orig_mod.", ""): value for key, value in named.items()}
            ragged = next((value for value in expected.values() if isinstance(value, RaggedDTensor)), None)
            if ragged is not None:
                error = None
                if not info.broadcast_from_rank0 or Ranks.of_world().rank == 0:
                    differences = find_differences(expected, list(state_dict), state_dict.__getitem__, opaque=opaque)
                    error = differences.error(strict=info.strict)
                Ranks.of_world().raise_together(error)
        return original(model, state_dict, info)

    return load_model_state_dict


def _with_ragged_values(original: Any) -> Any:
    @wraps(original)
    def distribute_tensors(
        local_state_dict: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None
    ) -> None:
        others = []
        for key in keys:
            pair = local_state_dict.get(key)
            # torch marks what is still to be cut as (local DTensor, full tensor).
            if isinstance(pair, tuple) and type(pair[0]) is RaggedDTensor:
                local_state_dict[key] = _cut_into(*pair)
            else:
                others.append(key)
        original(local_state_dict, others, device, pg)

    return distribute_tensors


def _with_ragged_scalars(original: Any) -> Any:
    """Wrap what leaves every scalar a plain one: right for step counters, not for a scalar parameter's state."""

    @wraps(original)
    def distribute_state_dict(full: dict[str, Any], local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        scalars = {key: value for key, value in local.items() if type(value) is RaggedDTensor and value.dim() == 0}
        original(full, local, *args, **kwargs)
        for key, target in scalars.items():
            value = local.get(key)
            if type(value) is torch.Tensor:
                local[key] = _cut_into(target, value)

    return distribute_state_dict


def _cut_into(target: Any, full: torch.Tensor) -> Any:
    if full.shape != target.shape:
        raise ConfigError(f"a full tensor of shape {list(full.shape)} for one of shape {list(target.shape)}")
    piece = slice_full(full, target._spec.layout)
    if target.is_meta:
        return RaggedDTensor.wrap(piece.detach().clone(), target._spec.cast(piece.dtype))
    target._local_tensor.detach().copy_(piece)
    return target


def _with_compared_groups(original: Any) -> Any:
    """Wrap what loads optimizer state by FQN. Without ``strict`` and without ragged parameters it is torch's own."""

    @wraps(original)
    def load_optim_state_dict(
        model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state_dict: dict[str, Any], info: Any
    ) -> None:
        layouts = [param._spec.layout for param in model.parameters() if isinstance(param, RaggedDTensor)]
        if info.handle_optim and info.strict and layouts:
            # With `broadcast_from_rank0` torch talks to all ranks, and the dict is on the first.
            groups = [Ranks.of_world()] if info.broadcast_from_rank0 else _groups_of(layouts)
            with ExitStack() as stack:
                for ranks in groups:
                    stack.enter_context(ranks.agreed())
                lines = optimizer_state_differences(model, optimizers, state_dict) if state_dict else []
                if lines:
                    raise ConfigError(
                        "\n  - ".join(["the optimizer state dict does not fit:", *lines]),
                        fix="make the optimizer as it was, or pass StateDictOptions(strict=False)",
                    )
        original(model, optimizers, state_dict, info)

    return load_optim_state_dict


def _groups_of(layouts: Sequence[RaggedLayout]) -> list[Ranks]:
    """Return the ranks along each mesh dim; of parameters beside those of tensor parallelism, along its dims too."""
    meshes = {id(layout.mesh): layout.mesh for layout in layouts}.values()
    found = [Ranks.of_mesh(mesh, dim) for mesh in meshes for dim in range(mesh.ndim)]
    return list({ranks.numbers: ranks for ranks in found}.values())


def optimizer_state_differences(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], state_dict: Mapping[str, Any]
) -> list[str]:
    """Return a line for each thing in which ``optimizers`` differ from a state dict of torch, keyed by FQN.

    Args:
        model: Has the parameters.
        optimizers: Of which ``state_dict`` may hold more: groups of other parameters of the model are left alone.
        state_dict: Nested or flattened.
    """
    names, aliases = names_of_params(model), names_by_alias(model)
    lines = []
    for optimizer in optimizers:
        current = describe_optimizer(optimizer, names).groups
        own = {name for group in current for name in group.params}
        if "state" not in state_dict:
            saved, with_state = _flattened_groups(state_dict, current), {key.rpartition(".")[0] for key in state_dict}
            with_state = {name for name in own if f"state.{name}" in with_state}
        elif all(isinstance(key, int) for key in state_dict["state"]) and state_dict["state"]:
            continue  # by position, not by FQN
        else:
            saved = _nested_groups(state_dict["param_groups"], aliases, own)
            with_state = {aliases.get(name, name) for name in state_dict["state"]}
        lines += group_differences(saved, current, "the state dict")
        trained = [name for param, name in names.items() if name in own and param.requires_grad]
        without = [name for name in trained if name not in with_state] if with_state else []
        if without:
            lines.append(f"no state for: {', '.join(without)}")
        strangers = sorted(with_state - set(names.values()))
        if strangers:
            lines.append(f"state for what is not in the model: {', '.join(strangers)}")
    return lines


def _nested_groups(groups: Sequence[Mapping[str, Any]], aliases: Mapping[str, str], own: set[str]) -> list[GroupNames]:
    found = []
    for group in groups:
        params = [aliases.get(name, name) for name in group["params"]]
        is_of_another = params and all(name in aliases and name not in own for name in params)
        if not is_of_another:
            found.append(GroupNames.of(group, params))
    return found


def _flattened_groups(flat: Mapping[str, Any], current: Sequence[GroupNames]) -> list[GroupNames]:
    """Return what ``flat`` has of the groups in ``current``; it does not say how its own were cut."""
    found = []
    for group in current:
        has = {name: [key for key in group.settings if f"param_groups.{name}.{key}" in flat] for name in group.params}
        params = [name for name in group.params if has[name] or not group.settings]
        settings = [key for key in group.settings if all(key in has[name] for name in params)]
        found.append(GroupNames(tuple(params), tuple(settings)))
    return found

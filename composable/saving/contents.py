"""What of a model, its optimizers and its communication hooks goes into a checkpoint, and how it comes back; by FQN.

The layout is that of torch's ``get_state_dict`` in ``torch.distributed.checkpoint``, so either side
reads what the other wrote: ``model.FQN``, ``optimizer.state.FQN.NAME``, ``optimizer.param_groups``.
Unlike there, an optimizer that has not stepped is saved without state and loaded without a step,
and so is a parameter that has had no gradient.

The state of a hook, such as the part of the gradients that it has not sent yet, belongs to one rank and to its place
among the others: what a rank has is one value, ``hooks.RANK``, and it comes back only where ranks, cuts and buckets are
those that were saved. Elsewhere the hook goes on with what it has, and the user is told.
"""

import ctypes
import hashlib
import io
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate

from composable.annotation import handle_of_module
from composable.comm import Ranks
from composable.engine import Handle, Registration
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.ground.contract import get_registry
from composable.ground.names import plain_fqn
from composable.ground.torch_private import flatten_state_dict, tree_leaves, tree_map, unflatten_state_dict
from composable.replication import Reducer, ReplicateState
from composable.saving.entries import OptimizerNames, names_of_params, optimizer_differences
from composable.saving.files import as_data, read_data
from composable.saving.loads import find_differences

__all__ = [
    "DataPlanner",
    "HookState",
    "apply",
    "check_fit",
    "find_hook_states",
    "load_hook_states",
    "staged",
    "state_to_save",
    "targets",
]

Optimizers = Sequence[torch.optim.Optimizer]
_Unit: TypeAlias = Handle | Reducer

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


# -- saving


def state_to_save(model: nn.Module, optimizers: Optimizers, names_of_all: Sequence[OptimizerNames]) -> dict[str, Any]:
    """Return the state of both as ``torch.distributed.checkpoint.save`` takes it.

    Tensors are the model's and the optimizers' own, sharded as they are, not copies. Raises where a parameter has no
    values yet, or a value is neither a tensor nor plain data.
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
    for name, value in flatten_state_dict(state)[0].items():
        if not isinstance(value, torch.Tensor) and type(value) not in _PLAIN:
            as_data(value, name)
    return state


def staged(state: Any) -> Any:
    """Return a copy of ``state`` on the host that later steps leave alone."""
    return tree_map(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else deepcopy(leaf), state
    )


def _check_materialized(model: nn.Module) -> None:
    on_meta = [name for name, value in model.state_dict().items() if isinstance(value, torch.Tensor) and value.is_meta]
    if on_meta:
        raise UsageError(f"on the meta device: {', '.join(on_meta)}", fix="materialize the model first")


# -- loading


def check_fit(
    folder: Path,
    metadata: Metadata,
    saved: Sequence[OptimizerNames],
    model: nn.Module,
    current: Sequence[OptimizerNames],
    elsewhere: Collection[str],
) -> None:
    """Raise one error that lists all in which a checkpoint differs from what it is to be loaded into.

    Args:
        folder: Of the checkpoint.
        metadata: Of the checkpoint.
        saved: The optimizers in it.
        model: Has values.
        current: The optimizers to be loaded, with the parameters that any rank has; none: the model alone counts.
        elsewhere: Names of what only other ranks have.
    """
    _check_materialized(model)
    sizes: dict[str, torch.Size | None] = {}
    for key, path in metadata.planner_data.items():
        entry = metadata.state_dict_metadata[key]
        if path[0] == "model":
            sizes[path[1]] = entry.size if isinstance(entry, TensorStorageMetadata) and len(path) == 2 else None
    state = get_model_state_dict(model)
    expected = {name: value if isinstance(value, torch.Tensor) else None for name, value in state.items()}
    found = find_differences(expected, sizes.keys() - set(elsewhere), sizes.__getitem__)
    lines = [f"only in the model: {', '.join(sorted(found.missing))}"] if found.missing else []
    lines += [f"only in the checkpoint: {', '.join(sorted(found.unexpected))}"] if found.unexpected else []
    lines += [f"{line} as in the model" for line in found.unfit]
    lines += optimizer_differences(saved, current) if current else []
    if lines:
        raise ConfigError(
            "\n  - ".join([f"{folder} does not fit:", *lines]),
            fix="make model and optimizer as they were; without the optimizer, the model is loaded alone",
        )


def targets(metadata: Metadata, model: nn.Module, optimizers: Optimizers, rank: int) -> dict[str, Any]:
    """Return what a checkpoint's flat names are read into.

    Tensors are the model's own, and fresh ones for optimizer state, which are cut as their parameters, in the dtypes
    that were saved. ``None``: no tensor. Of what only other ranks have there is nothing.
    """
    model_state = get_model_state_dict(model)
    params = {name: param for param, name in names_of_params(model).items()}
    flat: dict[str, Any] = {}
    for key, path in metadata.planner_data.items():
        entry = metadata.state_dict_metadata[key]
        match path:
            case ("model", name, *_) if name in model_state:
                held = model_state[name]
                flat[key] = held if isinstance(held, torch.Tensor) else _room_for(entry, None)
            case ("optimizer", "state", name, *rest) if optimizers and name in params:
                flat[key] = _room_for(entry, None if rest == ["step"] else params[name])
            case ("optimizer", "param_groups", *_) if optimizers:
                flat[key] = _room_for(entry, None)
            case ("hooks", number, _) if number == str(rank):
                flat[key] = _room_for(entry, None)
    return flat


def _room_for(entry: Any, like: torch.Tensor | None) -> torch.Tensor | None:
    """Return room for a tensor, cut and placed as a parameter, or whole if of another shape, as Adafactor's rows."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if isinstance(like, DTensor) and like.shape == entry.size:
        return torch.empty_like(like.detach(), dtype=entry.properties.dtype)
    room = torch.empty(entry.size, dtype=entry.properties.dtype, device=None if like is None else like.device)
    if isinstance(like, DTensor) and entry.size:
        return DTensor.from_local(room, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return room


def apply(flat: dict[str, Any], metadata: Metadata, model: nn.Module, optimizers: Optimizers) -> None:
    """Give what was read into ``targets`` to the model and the optimizers."""
    nested: dict[str, Any] = unflatten_state_dict(flat, metadata.planner_data)
    set_model_state_dict(model, nested.get("model", {}))
    saved = nested.get("optimizer", {})
    state, groups = saved.get("state", {}), iter(saved.get("param_groups", []))
    names = names_of_params(model)
    for optimizer in optimizers:
        fqns = [names[param] for group in optimizer.param_groups for param in group["params"]]
        packed: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
        # Their order within the optimizer's groups, which need not be that of the saved ones.
        own_groups = [{**group, **next(groups), "params": group["params"]} for group in packed]
        own_state = {index: state[name] for index, name in enumerate(fqns) if name in state}
        optimizer.load_state_dict({"state": own_state, "param_groups": own_groups})


# -- communication hooks


@dataclass(frozen=True)
class HookState:
    """A state of a hook that is registered in a model.

    Attributes:
        name: What messages call the hook, with the module that it is registered on.
        state: The object.
        units: What calls the hook, by the FQN of its first module, with the ranks that it averages over.
    """

    name: str
    state: Any
    units: tuple[tuple[str, _Unit, Ranks], ...]

    def reducers(self) -> list[Reducer]:
        """Return those of the units whose buckets follow the order of gradients."""
        return [unit for _, unit, _ in self.units if isinstance(unit, Reducer)]

    def layout(self) -> str:
        """Return a digest of all that decides what the hook is called with on this rank."""
        lines = []
        for fqn, unit, ranks in self.units:
            lines.append(f"{fqn!r} {type(unit).__name__} rank {ranks.rank} of {ranks.numbers}")
            if isinstance(unit, Reducer):
                params = [f"{item.fqn} {list(item.param.shape)} {item.param.dtype}" for item in unit.params]
                lines += [f"buckets of {unit.options.cap_bytes}", *params]
                continue
            for flat in unit.buffers:
                cut = flat.plan.layout
                spans = [f"{span.fqn} {span.start} {list(span.shape)}" for span in cut.spans]
                lines += [f"{flat.plan.reduce_dtype} {cut.numel} {cut.shard_numel}", *spans]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def packed(self) -> torch.Tensor:
        """Return what is saved of it, which later steps leave alone [bytes], uint8."""

        def checked(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.layout is not torch.strided or leaf.is_meta:
                raise ConfigError(
                    f"the state of {self.name} holds a {type(leaf).__name__} on {leaf.device.type}, {leaf.layout}",
                    at=place_of_rank(),
                    fix="let its state_dict() return plain tensors, each with this rank's values",
                )
            # A view would be saved with all of its storage.
            return leaf.detach().clone() if leaf.untyped_storage().nbytes() > leaf.nbytes else leaf.detach()

        content = tree_map(checked, self.state.state_dict())
        # Tensors are large, and known to be data.
        as_data(
            tree_map(lambda leaf: None if isinstance(leaf, torch.Tensor) else leaf, content),
            f"the state of {self.name}",
        )
        orders = [reducer.arrival_order for reducer in self.reducers()]
        file = io.BytesIO()
        torch.save({"layout": self.layout(), "orders": orders, "content": content}, file)
        return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Give the hook what was saved of it, after unpacking."""
        try:
            self.state.load_state_dict(saved["content"])
        # Whatever the user's code raises, the other ranks are to hear of it.
        except Exception as error:
            raise UsageError(
                f"the state of {self.name} was not loaded: {type(error).__name__}: {error}",
                at=place_of_rank(),
                fix="let its load_state_dict() take what its state_dict() returned",
            ) from error
        for order, reducer in zip(saved["orders"], self.reducers(), strict=True):
            if order is not None:
                reducer.expect_order(order)


def find_hook_states(model: nn.Module) -> tuple[list[HookState], list[str]]:
    """Return the states to be saved of hooks registered in ``model``, and what to tell of those that cannot be.

    They are in ``named_modules()`` order. A state of several hooks is there once, with the first. What is registered
    on a module outside of ``model`` is left out.
    """
    names: dict[nn.Module, str] = {}
    reached: dict[Registration, dict[_Unit, tuple[str, _Unit, Ranks]]] = {}
    for fqn, module in model.named_modules():
        names[module] = fqn
        handle = handle_of_module(module)
        units: list[tuple[_Unit, Ranks]] = [] if handle is None else [(handle, handle.grid.everyone)]
        annotations = [one.state for one in get_registry(module).values()]
        units += [(one.reducer, one.grid.everyone) for one in annotations if isinstance(one, ReplicateState)]
        for unit, ranks in units:
            for one in unit.comm_hooks:
                reached.setdefault(one, {}).setdefault(unit, (plain_fqn(fqn), unit, ranks))
    found: dict[int, HookState] = {}
    notices: dict[int, str] = {}
    taken: set[str] = set()
    for module, one in ((module, one) for module in names for one in reached if one.module is module):
        # A wrapper of torch and what is in it may both have a hook: the second has the longer name.
        fqn = names[module] if plain_fqn(names[module]) in taken else plain_fqn(names[module])
        taken.add(fqn)
        name = f"communication hook {one.name} on {f'module {fqn!r}' if fqn else 'the model'}"
        state = one.state
        attributes = {*getattr(state, "__slots__", ()), *getattr(state, "__dict__", ())}
        held = [state, *(getattr(state, attribute, None) for attribute in attributes)]
        # A class is no state, and neither is what answers to every name.
        if all(callable(getattr(type(state), method, None)) for method in ("state_dict", "load_state_dict")):
            found.setdefault(id(state), HookState(name, state, tuple(reached[one].values())))
        elif any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(held)):
            fix = "\n  fix: give its class state_dict() and load_state_dict()"
            notices[id(state)] = f"the state of {name} holds tensors that are not in checkpoints{fix}"
    return list(found.values()), list(notices.values())


def load_hook_states(
    folder: Path, metadata: Metadata, flat: Mapping[str, Any], states: Collection[HookState], ranks: Ranks
) -> list[str]:
    """Give hooks what was read of their states, where all ranks can; return what to tell of the others. Collective."""
    paths = [path for path in metadata.planner_data.values() if path[0] == "hooks"]
    saved_ranks = len({path[1] for path in paths})
    there: dict[str, Any] = {path[2]: flat.get(f"hooks.{ranks.rank}.{path[2]}") for path in paths}
    here = {one.name: one for one in states}
    notices: dict[str, str] = {}
    saved: dict[str, Any] = {}
    with ranks.agreed():
        for name in dict.fromkeys([*there, *here]):
            if name not in here:
                notices[name] = f"{folder} holds the state of {name}, which is not registered here: it is left out"
                continue
            if name not in there:
                why = f"{folder} holds no state of {name}"
            elif saved_ranks != ranks.size:
                why = f"the state of {name} is for {saved_ranks} ranks in {folder}, and {ranks.size} load it"
            else:
                content = io.BytesIO(ctypes.string_at(there[name].data_ptr(), there[name].numel()))
                saved[name] = read_data(content, f"{folder}, the state of {name}", to=ranks.device)
                if saved[name]["layout"] == here[name].layout():
                    continue
                why = f"the state of {name} is for other ranks, cuts or buckets in {folder}"
            notices[name] = f"{why}: the hook goes on with what it has"
    for others in ranks.objects(notices) if there else []:
        notices = {**others, **notices}
    with ranks.agreed():
        for name, one in here.items():
            if name not in notices:
                one.load(saved[name])
    return list(notices.values())

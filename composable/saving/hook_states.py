"""The states of communication hooks in checkpoints: a file for each rank, of data only.

What a hook keeps, such as the part of the gradients that it has not sent yet, belongs to one rank and to its place
among the others. So it comes back only where ranks, cuts and buckets are those that were saved; elsewhere the hook
starts with what it has, and the user is told. Hooks go by the FQN of the module that they were registered on.

Nothing here communicates.
"""

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from composable.annotation import handle_of_module, sharded_state_of
from composable.collectives import Ranks
from composable.contract import get_registry
from composable.engine import Handle, Registration
from composable.errors import ComposableError, ConfigError, UsageError, place_of_rank
from composable.replication import Reducer, ReplicateState
from composable.saving.contents import as_data, read_data
from composable.saving.manifest import HookName, HookStates, Manifest, hook_file
from composable.torch_private import tree_leaves, tree_map
from composable.wording import plain_fqn

__all__ = ["HookLoad", "HookState", "find_hook_states", "pack_hook_states", "plan_hook_load"]

_Unit: TypeAlias = Handle | Reducer
_OrderKey: TypeAlias = tuple[HookName, int, tuple[int, ...]]
_Order: TypeAlias = Sequence[int] | None


@dataclass(frozen=True)
class _Kind:
    """A class of torch whose objects change and have no ``state_dict``.

    Attributes:
        changing: Attributes that are saved.
        fixed: Attributes by which the shapes of those are chosen: equal where they are loaded.
    """

    changing: tuple[str, ...]
    fixed: tuple[str, ...] = ()


_HOOKS_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks"
# By name: importing them would import torch's wrapper.
_KINDS = {
    (f"{_HOOKS_OF_TORCH}.powerSGD_hook", "PowerSGDState"): _Kind(
        changing=(
            *("error_dict", "p_memory_dict", "q_memory_dict", "rng", "iter"),
            *("total_numel_before_compression", "total_numel_after_compression", "next_stats_report"),
        ),
        fixed=("matrix_approximation_rank", "min_compression_rate", "batch_tensors_with_same_shape"),
    ),
    (f"{_HOOKS_OF_TORCH}.post_localSGD_hook", "PostLocalSGDState"): _Kind(changing=("iter",)),
}


@dataclass(frozen=True)
class HookState:
    """A state that changes, of a hook that is registered in a model.

    Attributes:
        name: The module that it is registered on, and what messages call the hook.
        state: The object.
        units: What calls the hook, by the FQN of its first module, with the ranks that it averages over.
    """

    name: HookName
    state: Any
    units: tuple[tuple[str, _Unit, Ranks], ...]

    @property
    def device(self) -> torch.device:
        """Where the gradients are."""
        return self.units[0][2].device

    @property
    def reducers(self) -> list[Reducer]:
        """Those of the units whose buckets follow the order of gradients."""
        return [unit for _, unit, _ in self.units if isinstance(unit, Reducer)]

    @property
    def reducer_ranks(self) -> list[tuple[int, ...]]:
        """The global ranks that each of these averages over."""
        return [ranks.numbers for _, unit, ranks in self.units if isinstance(unit, Reducer)]

    def layout(self) -> str:
        """Return a digest of all that decides what the hook is called with on this rank."""
        kind = _kind_of(self.state)
        lines = [f"{name} {getattr(self.state, name)!r}" for name in (kind.fixed if kind else ())]
        for fqn, unit, ranks in self.units:
            lines.append(f"{fqn!r} {type(unit).__name__} rank {ranks.rank} of {ranks.numbers}")
            if isinstance(unit, Reducer):
                lines.append(f"buckets of {unit.options.cap_bytes}")
                lines += [f"{item.fqn} {list(item.param.shape)} {item.param.dtype}" for item in unit.params]
            else:
                for flat in unit.buffers:
                    cut = flat.plan.layout
                    lines.append(f"{flat.plan.reduce_dtype} {cut.numel} {cut.shard_numel}")
                    lines += [f"{span.fqn} {span.start} {list(span.shape)}" for span in cut.spans]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()


@dataclass(frozen=True)
class HookLoad:
    """What is to be loaded into the hooks of a model, and what the user is told of the rest.

    Attributes:
        loads: Each changes the state of a hook.
        notices: Why a state is left alone, or left out.
        orders: Of the gradients in the buckets of each replicated module, by its position among those that call the
            hook, and by its ranks, which have to have the same.
    """

    loads: Mapping[HookName, Callable[[], None]]
    notices: Mapping[HookName, str]
    orders: Mapping[_OrderKey, _Order]

    def without(self, notices: Mapping[HookName, str]) -> "HookLoad":
        """Return the same where another rank leaves these alone."""
        kept = {name: load for name, load in self.loads.items() if name not in notices}
        orders = {key: order for key, order in self.orders.items() if key[0] not in notices}
        return HookLoad(kept, {**notices, **self.notices}, orders)

    def together_with(self, others: Sequence["HookLoad"], folder: Path) -> "HookLoad":
        """Return what all ranks load, given what each would.

        Raises:
            ConfigError: They would reduce the gradients of a module in different orders; on every rank.
        """
        agreed = self
        orders: dict[_OrderKey, _Order] = {}
        for other in others:
            agreed = agreed.without(other.notices)
        for other in others:
            for key, order in other.orders.items():
                if key[0] not in agreed.notices and orders.setdefault(key, order) != order:
                    raise ConfigError(
                        f"{folder} does not hold {_state_of(key[0])}: ranks have different orders of gradients",
                        at=place_of_rank(),
                        fix="load another checkpoint, and do not trust where this one is from",
                    )
        return agreed


def find_hook_states(model: nn.Module) -> tuple[list[HookState], list[str]]:
    """Return the states to be saved of hooks registered in ``model``, and what to tell of those that cannot be.

    They are in ``named_modules()`` order. A state of several hooks is there once, with the first. What is registered
    on a module outside of ``model`` is left out.
    """
    names: dict[nn.Module, str] = {}
    reached: dict[Registration, dict[_Unit, tuple[str, _Unit, Ranks]]] = {}
    for name, module in model.named_modules():
        names[module] = name
        for unit, ranks in _units_of(module):
            for one in unit.comm_hooks:
                reached.setdefault(one, {}).setdefault(unit, (plain_fqn(name), unit, ranks))
    order = {module: index for index, module in enumerate(names)}
    inside = [(one.module, one) for one in reached if one.module in order]
    found: dict[int, HookState] = {}
    notices: dict[int, str] = {}
    taken: set[str] = set()
    for module, one in sorted(inside, key=lambda pair: order[pair[0]] if pair[0] is not None else 0):
        assert module is not None, "it is in the model"
        # A wrapper of torch and what is in it may both have a hook: the second has the longer name.
        fqn = names[module] if plain_fqn(names[module]) in taken else plain_fqn(names[module])
        taken.add(fqn)
        name = HookName(fqn, one.name)
        if _has_methods(one.state) or _kind_of(one.state) is not None:
            found.setdefault(id(one.state), HookState(name, one.state, tuple(reached[one].values())))
        elif _holds_tensors(one.state):
            notices[id(one.state)] = (
                f"the state of {name} holds tensors that are not in checkpoints"
                "\n  fix: give its class state_dict() and load_state_dict()"
            )
    return list(found.values()), list(notices.values())


def pack_hook_states(states: Collection[HookState], *, is_copied: bool) -> dict[str, Any] | None:
    """Return what this rank writes of ``states``, on the host; ``None``: there are none.

    Args:
        states: From ``find_hook_states``.
        is_copied: Later steps leave it alone; else tensors may be those of the states.

    Raises:
        ConfigError: A state has something that is no data.
    """
    packed: dict[str, Any] = {}
    for one in states:
        content = _content_of(one.state)
        leaves = tree_leaves(content)
        for leaf in leaves:
            _check_tensor(leaf, one.name)
        # The rest of it: tensors are large, and known to be data.
        as_data(tree_map(lambda leaf: None if isinstance(leaf, torch.Tensor) else leaf, content), _state_of(one.name))
        packed[one.name.module] = {
            "layout": one.layout(),
            "orders": [reducer.arrival_order for reducer in one.reducers],
            "on_device": [isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu" for leaf in leaves],
            "content": tree_map(lambda leaf: _on_host(leaf, is_copied=is_copied), content),
        }
    return packed or None


def plan_hook_load(folder: Path, manifest: Manifest, states: Collection[HookState], ranks: Ranks) -> HookLoad:
    """Read this rank's states from a checkpoint whose files are known to be whole; change nothing.

    Args:
        folder: Of the checkpoint.
        manifest: Of the checkpoint.
        states: Of the model that is loaded.
        ranks: All of them.

    Raises:
        ConfigError: The file of this rank holds what was not saved so.
    """
    here = {one.name: one for one in states}
    saved = manifest.hook_states or HookStates(0, ())
    notices = {
        name: f"{folder} holds the state of {name}, which is not registered here: it is left out"
        for name in saved.hooks
        if name not in here
    }
    loads: dict[HookName, Callable[[], None]] = {}
    orders: dict[_OrderKey, _Order] = {}
    common = [one for one in states if one.name in saved.hooks]
    for one in states:
        if one.name not in saved.hooks:
            notices[one.name] = f"{folder} holds no state of {one.name}: the hook goes on with what it has"
        elif saved.ranks != ranks.size:
            notices[one.name] = (
                f"{_state_of(one.name)} is for {saved.ranks} ranks in {folder}, and {ranks.size} load it: "
                "the hook goes on with what it has"
            )
    if not common or saved.ranks != ranks.size:
        return HookLoad(loads, notices, orders)
    path = folder / hook_file(ranks.rank)
    packed = read_data(path, str(path), device="cpu")
    for one in common:
        try:
            if packed[one.name.module]["layout"] == one.layout():
                loads[one.name] = _load_of(one, packed[one.name.module])
                for index, order in enumerate(packed[one.name.module]["orders"]):
                    orders[one.name, index, one.reducer_ranks[index]] = order
                continue
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            raise ConfigError(
                f"{path} does not hold {_state_of(one.name)}: {error}",
                at=place_of_rank(),
                fix="load another checkpoint, and do not trust where this one is from",
            ) from None
        notices[one.name] = (
            f"{_state_of(one.name)} is for other ranks, cuts, buckets or settings in {folder}: "
            "the hook goes on with what it has"
        )
    return HookLoad(loads, notices, orders)


def _units_of(module: nn.Module) -> Iterator[tuple[_Unit, Ranks]]:
    """Yield what reduces gradients of ``module``, with the ranks that do."""
    handle, state = handle_of_module(module), sharded_state_of(module)
    if handle is not None and state is not None:
        yield handle, state.grid.everyone
    for annotation in get_registry(module).values():
        if isinstance(annotation.state, ReplicateState):
            yield annotation.state.reducer, annotation.state.grid.everyone


def _state_of(name: HookName) -> str:
    return f"the state of {name}"


def _has_methods(state: object) -> bool:
    # A class is no state, and neither is what answers to every name.
    methods = (getattr(type(state), name, None) for name in ("state_dict", "load_state_dict"))
    return all(callable(method) for method in methods)


def _kind_of(state: object) -> _Kind | None:
    if _has_methods(state):
        return None
    return next((_KINDS[key] for cls in type(state).__mro__ if (key := (cls.__module__, cls.__name__)) in _KINDS), None)


def _holds_tensors(state: object) -> bool:
    names = {*getattr(state, "__slots__", ()), *getattr(state, "__dict__", ())}
    held = [state, *(getattr(state, name, None) for name in names)]
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(held))


def _content_of(state: Any) -> Any:
    kind = _kind_of(state)
    if kind is None:
        return state.state_dict()
    return {name: _as_saved(getattr(state, name)) for name in kind.changing}


def _as_saved(value: Any) -> Any:
    """Return numpy's random state as plain data; anything else as it is."""
    if not hasattr(value, "get_state"):
        return value
    name, keys, position, has_gauss, cached = value.get_state()
    return [str(name), torch.tensor(keys.tolist()), int(position), int(has_gauss), float(cached)]


def _check_tensor(leaf: object, name: HookName) -> None:
    if isinstance(leaf, torch.Tensor) and (
        type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.layout is not torch.strided or leaf.is_meta
    ):
        kind = f"a {type(leaf).__name__} on {leaf.device.type}, {leaf.layout}"
        raise ConfigError(
            f"{_state_of(name)} holds {kind}",
            at=place_of_rank(),
            fix="let its state_dict() return plain tensors, each with this rank's values",
        )


def _on_host(leaf: Any, *, is_copied: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    # A view is saved with all of its storage.
    is_part = leaf.untyped_storage().nbytes() > leaf.nbytes
    return leaf.detach().to("cpu", copy=is_copied or is_part)


def _load_of(one: HookState, packed: Any) -> Callable[[], None]:
    """Return what puts ``packed``, which is checked first, into a state."""
    on_device, orders, reducers = packed["on_device"], packed["orders"], one.reducers
    if len(on_device) != len(tree_leaves(packed["content"])) or len(orders) != len(reducers):
        raise ValueError("its parts do not belong together")
    for order, reducer in zip(orders, reducers, strict=True):
        indices = list(range(len(reducer.params)))
        if order is not None and (not all(type(index) is int for index in order) or sorted(order) != indices):
            raise ValueError("an order of gradients has other parameters")
    flags = iter(on_device)
    content = tree_map(lambda leaf: leaf.to(one.device) if next(flags) else leaf, packed["content"])
    kind = _kind_of(one.state)
    values = {} if kind is None else {name: _checked(name, content[name]) for name in kind.changing}

    def load() -> None:
        try:
            if kind is None:
                one.state.load_state_dict(content)
        except ComposableError:
            raise
        # Whatever the user's code raises, the other ranks are to hear of it.
        except Exception as error:
            raise UsageError(
                f"{_state_of(one.name)} was not loaded: {type(error).__name__}: {error}",
                at=place_of_rank(),
                fix="let its load_state_dict() take what its state_dict() returned",
            ) from error
        for name, value in values.items():
            setattr(one.state, name, value)
        for order, reducer in zip(orders, reducers, strict=True):
            if order is not None:
                reducer.expect_order(order)

    return load


def _checked(name: str, value: Any) -> Any:
    """Return ``value`` as the attribute ``name`` of a state of torch; raises ``ValueError`` if it cannot be that."""
    if name == "rng":
        return _random_state(value)
    if name.endswith("_dict"):
        if type(value) is not dict or not all(
            type(key) is int and isinstance(held, torch.Tensor) for key, held in value.items()
        ):
            raise ValueError(f"{name} does not give each bucket a tensor")
    elif type(value) is not int or value < 0:
        raise ValueError(f"{name} is no count")
    return value


def _random_state(value: Any) -> Any:
    import numpy as np  # as torch's own state does; nothing else here needs it

    name, keys, position, has_gauss, cached = value
    if not 0 <= position <= len(keys):
        raise ValueError("a random state stands outside of its numbers")
    state = np.random.RandomState()
    state.set_state((name, np.array(keys.tolist(), dtype=np.uint32), position, has_gauss, cached))
    return state

"""The parts of a model that a full state dict is made of, what they are called, and which ranks share them.

A model's *entries* are what ``state_dict()`` lists: key and tensor, ties and shared buffers under every
name. Ragged tensors among them are gathered or filled in *batches* of bounded size. A call that moves full values
starts with ``entries_for``, where all ranks find out whether they ask for the same.

In checkpoints a parameter goes by the first FQN that it has in the model, without the parts that torch's own
wrappers add, so a name means the same at every number of ranks and in plain torch. Ranks may have different parts of a
model, such as experts: a name means one thing, whichever rank wrote it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable.annotation import FullyShardState, handle_of_module, sharded_state_of
from composable.comm import ModelRanks, Ranks
from composable.dtensor import RaggedDTensor
from composable.engine import META_FIX, handle_of
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.ground.contract import get_registry, managing_state
from composable.ground.names import check_module, count_text, describe_module, described, list_text, plain_fqn
from composable.optim import ranks_of_param
from composable.replication import ReplicateState

__all__ = [
    "Entries",
    "GroupNames",
    "Names",
    "OptimizerNames",
    "agreed_by",
    "batches",
    "check_bytes",
    "check_float",
    "describe_optimizer",
    "entries_for",
    "entries_now",
    "group_differences",
    "largest_handle_bytes",
    "names_by_alias",
    "names_of_params",
    "names_on_all",
    "optimizer_differences",
    "ranks_along",
    "ranks_of",
]


# What torch's schedulers and averagers write into a group: there or not, it is the same optimizer.
_SCHEDULED = frozenset({"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})


@dataclass(frozen=True)
class GroupNames:
    """One param group: the FQNs of its parameters and the names of its settings, such as ``lr``."""

    params: tuple[str, ...]
    settings: tuple[str, ...]

    @staticmethod
    def of(group: Mapping[str, object], params: Sequence[str]) -> "GroupNames":
        """Describe a param group whose parameters have the names ``params``."""
        return GroupNames(tuple(params), tuple(sorted(group.keys() - _SCHEDULED - {"params"})))


@dataclass(frozen=True)
class OptimizerNames:
    """The name of an optimizer's class, and its groups in order."""

    kind: str
    groups: tuple[GroupNames, ...]


def names_of_params(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return the name that each parameter goes by."""
    return {param: plain_fqn(name) for name, param in model.named_parameters()}


def names_by_alias(model: nn.Module) -> dict[str, str]:
    """Return the name that a parameter goes by for each name that it has."""
    names = names_of_params(model)
    return {plain_fqn(name): names[param] for name, param in model.named_parameters(remove_duplicate=False)}


def describe_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> OptimizerNames:
    """Describe ``optimizer``.

    Args:
        optimizer: Of parameters of one model.
        names: What ``names_of_params`` gave for it.

    Raises:
        ConfigError: It holds a parameter that the model does not have.
    """
    kind = type(optimizer).__name__
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        strangers = sum(param not in names for param in group["params"])
        if strangers:
            raise ConfigError(
                f"{strangers} of {len(group['params'])} parameters in group {index} of {kind} are not the model's",
                fix="make the optimizer from model.parameters(), after the model was annotated",
            )
        groups.append(GroupNames.of(group, [names[param] for param in group["params"]]))
    return OptimizerNames(kind, tuple(groups))


def group_differences(saved: Sequence[GroupNames], current: Sequence[GroupNames], source: str) -> list[str]:
    """Return a line for each thing in which the groups differ; the order within a group is no difference.

    Args:
        saved: The groups in ``source``.
        current: The groups of the optimizer that is to be loaded.
        source: How messages name where ``saved`` is from.
    """
    lines = []
    if len(saved) != len(current):
        lines.append(
            f"{count_text(len(saved), 'param group')} in {source}, {count_text(len(current), 'param group')} here"
        )
    nothing = GroupNames((), ())
    for index in range(max(len(saved), len(current))):
        there = saved[index] if index < len(saved) else nothing
        here = current[index] if index < len(current) else nothing
        lines += _one_sided(f"group {index}", there.params, here.params, source)
        if there is not nothing and here is not nothing:
            lines += _one_sided(f"settings of group {index}", there.settings, here.settings, source)
    return lines


def _one_sided(subject: str, there: Sequence[str], here: Sequence[str], source: str) -> list[str]:
    both = {*there} & {*here}
    sides = {f"in {source}": [name for name in there if name not in both]}
    sides["here"] = [name for name in here if name not in both]
    return [f"{subject}: only {side}: {', '.join(names)}" for side, names in sides.items() if names]


def optimizer_differences(saved: Sequence[OptimizerNames], current: Sequence[OptimizerNames]) -> list[str]:
    """Return a line for each thing in which optimizers differ from those in a checkpoint."""
    if len(saved) != len(current):
        kinds = [", ".join(one.kind for one in each) or "no optimizer" for each in (saved, current)]
        return [f"the checkpoint holds {kinds[0]}; here: {kinds[1]}"]
    lines = []
    for index, (there, here) in enumerate(zip(saved, current)):
        name = "optimizer" if len(current) == 1 else f"optimizer {index}"
        if there.kind != here.kind:
            lines.append(f"{name} is {there.kind} in the checkpoint, {here.kind} here")
        lines += [f"{name}, {line}" for line in group_differences(there.groups, here.groups, "the checkpoint")]
    return lines


# -- on all ranks


def names_on_all(
    ranks: Ranks, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], arguments: Sequence[str] = ()
) -> tuple[tuple[OptimizerNames, ...], frozenset[str]]:
    """Describe the optimizers with the parameters that any rank has; also return the names that only other ranks have.

    Collective. Raises where ranks have other optimizers or ``arguments``, or a name has several values.
    """
    with ranks.agreed():
        mine = _describe_optimizers(model, optimizers)
        homes = _homes(model)
    is_alike = ranks.are_alike("\n".join(f"{name} {home}" for name, home in homes.items()))
    every = [homes] if is_alike else ranks.objects(homes)
    _check_one_each(every)
    shared = frozenset.intersection(*map(frozenset, every))
    elsewhere = frozenset().union(*every) - homes.keys()
    lines = [*arguments]
    for index, one in enumerate(mine):
        lines.append(f"optimizer {index} is {one.kind}, of {len(one.groups)} groups")
        for group in one.groups:
            params = tuple(name for name in group.params if is_alike or name in shared)
            lines.append(f"a group of optimizer {index}: {GroupNames(params, group.settings)}")
    text = "\n".join(lines)
    ranks.compare(
        text,
        shown=text,
        what="the ranks call save_checkpoint or load_checkpoint with different arguments",
        fix="make the call with equal arguments on all ranks",
    )
    if is_alike:
        return mine, elsewhere
    merged = []
    for told in zip(*ranks.objects(mine), strict=True):
        of_groups = zip(*(one.groups for one in told), strict=True)
        groups = [
            replace(of_ranks[0], params=tuple(dict.fromkeys(name for one in of_ranks for name in one.params)))
            for of_ranks in of_groups
        ]
        merged.append(OptimizerNames(told[0].kind, tuple(groups)))
    return tuple(merged), elsewhere


def _describe_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[OptimizerNames, ...]:
    # Modules that were unsharded by hand show their sharded parameters again, which the optimizers hold.
    model.state_dict(keep_vars=True)
    names = names_of_params(model)
    described = tuple(describe_optimizer(optimizer, names) for optimizer in optimizers)
    params = [name for optimizer in described for group in optimizer.groups for name in group.params]
    twice = sorted({name for name in params if params.count(name) > 1}) if len(params) > len(set(params)) else []
    if twice:
        raise ConfigError(f"in two param groups or optimizers: {', '.join(twice)}", fix="give each parameter one place")
    return described


def _homes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return for each name in the model the ranks that have pieces or copies of what it names, where those are few."""
    homes: dict[str, tuple[int, ...]] = dict.fromkeys(get_model_state_dict(model), ())
    named = {name: param for param, name in names_of_params(model).items() if name in homes}
    layouts = [param._spec.layout for param in named.values() if isinstance(param, RaggedDTensor)]
    # Beside what tensor parallelism has split, plain parameters are the same along its dims.
    joined = {layout.ranks.numbers: layout.mesh for layout in layouts if layout.mesh.ndim > 1}
    found: dict[str, tuple[int, ...]] = {}
    for name, param in named.items():
        ranks = ranks_of_param(param)
        mesh = param.device_mesh if isinstance(param, DTensor) and param.device_mesh.ndim > 1 else None
        if isinstance(param, RaggedDTensor):
            mesh = joined.get(param._spec.layout.ranks.numbers, mesh)
        whole_mesh = () if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))
        found[name] = whole_mesh or (() if ranks is None else ranks.numbers)
    whole = max(map(set, found.values()), key=len, default=set())
    # Alone, equal groups may be those that tensor parallelism leaves for data.
    return homes | {name: home for name, home in found.items() if set(home) < whole}


def _check_one_each(every: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
    places: dict[str, dict[tuple[int, ...], None]] = {}
    for homes in every:
        for name, home in homes.items():
            if home:
                places.setdefault(name, {})[home] = None
    twice = [name for name, homes in places.items() if len(homes) > 1]
    if twice:
        groups = " and ".join(str(list(home)) for home in places[twice[0]])
        raise ConfigError(
            f"a checkpoint has one value for each name, and ranks {groups} have parameters of their own "
            f"of the names {list_text(twice)}",
            at=place_of_rank(),
            fix="name experts by their number in the whole model, such as nn.ModuleDict({'6': ..., '7': ...})",
        )


# Which entries a call is about, its option ``names``: FQNs, or a function that says of an FQN whether it is wanted.
Names = Callable[[str], object] | Collection[str]
# Small tensors travel together up to this many bytes, also where every handle is smaller.
_LEAST_BATCH_BYTES = 2**20


@dataclass(frozen=True)
class Entries:
    """What a model's state dict lists.

    Attributes:
        values: Every entry by key, in the plain model's order: parameters and buffers themselves, ties as one object.
        metadata: Module versions, which torch keeps beside the entries.
        unlisted: Parameters that no entry has, since a module's own hook took them out or renamed them, by FQN.
    """

    values: dict[str, Any]
    metadata: Any
    unlisted: dict[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the entries that are tensors, of any shapes."""
        return {key: value for key, value in self.values.items() if isinstance(value, torch.Tensor)}

    def settable(self) -> dict[str, torch.Tensor]:
        """Return what values may be loaded into: tensors of any shapes, and parameters that no entry has."""
        return {**self.tensors(), **self.unlisted}

    def first_names(self) -> dict[int, str]:
        """Return the first key of each tensor, by its id."""
        return {id(tensor): key for key, tensor in reversed(self.settable().items())}

    def unique(self) -> dict[str, torch.Tensor]:
        """Return the entries that are tensors, of any shapes, each under the first of its keys."""
        names = self.first_names()
        return {key: tensor for key, tensor in self.tensors().items() if names[id(tensor)] == key}

    def on_meta(self) -> list[str]:
        """Return the keys of what is on the meta device."""
        return [key for key, value in self.tensors().items() if value.is_meta]

    def batch_bytes(self) -> int:
        """Return how many bytes of full values may be under way at once; the same on all ranks with these entries."""
        return max(largest_handle_bytes(self.settable().values()), _LEAST_BATCH_BYTES)

    def keys(self) -> set[str]:
        """Return the keys of entries and the FQNs of parameters that no entry has."""
        return {*self.values, *self.unlisted}

    def picked(self, names: Names | None) -> "Entries":
        """Return those that ``names`` wants; raises where it makes no sense, or wants none."""
        wanted = _pick(names, {**self.values, **self.unlisted})
        values, unlisted = ({key: one[key] for key in one if key in wanted} for one in (self.values, self.unlisted))
        return Entries(values, self.metadata, unlisted)

    def described(self, wanted: Collection[str]) -> Iterator[str]:
        """Yield a line for each: what it is, and whether it is among the keys ``wanted``."""
        for key, value in {**self.values, **self.unlisted}.items():
            kind = "no tensor"
            if isinstance(value, torch.Tensor):
                name = type(value).__name__ if isinstance(value, DTensor) else "tensor"
                kind = f"{name} {list(value.shape)} {value.dtype}"
            yield f"{key}: {kind}{'' if key in wanted else ', not picked'}"


def _pick(names: Names | None, known: Collection[str]) -> set[str]:
    if names is None:
        return set(known)
    if callable(names) and not isinstance(names, type | nn.Module):
        picked = {fqn for fqn in known if names(fqn)}
    elif isinstance(names, Collection) and not isinstance(names, str | bytes):
        for name in names:
            if not isinstance(name, str):
                _refuse_names(name)
        picked = set(names)
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(
                f"names has what the model does not have: {list_text(unknown)}",
                at=place_of_rank(),
                fix="pass FQNs as the model's state_dict() has them",
            )
    else:
        _refuse_names(names)
    if not picked:
        fix = f"pick some of its entries: {list_text(known)}" if known else "leave names out: it has no entries"
        raise ConfigError("names picks nothing of the model", at=place_of_rank(), fix=fix)
    return picked


def _refuse_names(value: object) -> NoReturn:
    raise ConfigError(
        f"names is or holds {described(value)}",
        at=place_of_rank(),
        fix="pass a function of an FQN, such as lambda fqn: 'lora_' in fqn, or a list or set of FQNs",
    )


def entries_now(model: nn.Module) -> Entries:
    """Return the entries of ``model`` as they are; compares nothing."""
    values = model.state_dict(keep_vars=True)
    listed = {id(value) for value in values.values()}
    unlisted: dict[str, torch.Tensor] = {
        fqn: param for fqn, param in model.named_parameters() if id(param) not in listed
    }
    return Entries(dict(values), getattr(values, "_metadata", None), unlisted)


@contextmanager
def entries_for(
    model: nn.Module, names: Names | None, *options: object, permits_meta: bool = False
) -> Iterator[tuple[ModelRanks, Entries]]:
    """Give who shares ``model``, and its entries, to a block that checks other arguments; compare both after it.

    So after the block all ranks are known to have the same entries and to pick alike, and where one finds a wrong
    argument, all raise. Collective: all ranks that share the model, between steps. What an earlier forward left
    unsharded is resharded.

    Args:
        model: Annotated.
        names: Which entries; default: all.
        *options: What else has to be the same on all ranks; compared by its ``repr``.
        permits_meta: Entries on the meta device will do.
    """
    model_ranks = ranks_of(model, names)
    ranks = model_ranks.everyone
    with ranks.agreed():
        _check_moment(model)
        everything = entries_now(model)
        entries = everything.picked(names)
        on_meta = entries.on_meta()
        if on_meta and not permits_meta:
            raise UsageError(
                "full values are asked for, and there are none on the meta device",
                at=f"{place_of_rank()}, {list_text(on_meta)}",
                fix=META_FIX,
            )
        yield model_ranks, entries
    homes = map(ranks_of_param, everything.settable().values())
    has_others = any(home is not None and home.numbers != ranks.numbers for home in homes)
    # What is on other ranks, such as experts, may have other names on each of these.
    compared = entries if has_others else everything
    text = "\n".join([f"options {options!r}", *compared.described(entries.keys())])
    ranks.compare(
        text,
        shown=text,
        what="the ranks ask for full values of different models or with different arguments",
        fix="make the same call on the same model on every rank",
    )


def ranks_of(model: nn.Module, names: Names | None = None) -> ModelRanks:
    """Return the ranks that share ``model``: those of the annotations on it and below it, and of its DTensors.

    Collective over them where there are DTensors of tensor parallelism. Of a model that is annotated on different ranks
    ``names`` says what the question is about.
    """
    check_module("model", model)
    found: dict[tuple[int, ...], Ranks] = {}
    for module in model.modules():
        states = [managing_state(module, "fully_shard"), *(one.state for one in get_registry(module).values())]
        for state in states:
            if isinstance(state, (FullyShardState, ReplicateState)):
                found.setdefault(state.grid.everyone.numbers, state.grid.everyone)
    if not found:
        raise UsageError(
            "the model is not annotated",
            at=f"{place_of_rank()}, {describe_module(model)}",
            fix="use state_dict() and load_state_dict() of the plain model, or annotate it first",
        )
    tensors: Iterable[torch.Tensor] = [*model.parameters(), *model.buffers()]
    if len(found) > 1 and names is not None:
        tensors = entries_now(model).picked(names).settable().values()
        homes = map(ranks_of_param, tensors)
        found = {home.numbers: home for home in homes if home is not None}
    if len(found) != 1:
        raise ConfigError(
            f"modules are annotated on different ranks: {', '.join(str(list(ranks)) for ranks in found)}"
            if found
            else "modules are annotated on different ranks, and names picks no parameter of any",
            at=f"{place_of_rank()}, {describe_module(model)}",
            fix="call this on each part of the model that is on one set of ranks, or pick it by names=",
        )
    meshes = [tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)]
    others = ranks_along((mesh, dim) for mesh in meshes for dim in range(mesh.ndim))
    return ModelRanks.of(next(iter(found.values())), others)


def ranks_along(mesh_dims: Iterable[tuple[DeviceMesh, int]]) -> list[Ranks]:
    """Return the ranks along dims of meshes that this rank is in, each set of ranks once."""
    unique = {(id(mesh), dim): (mesh, dim) for mesh, dim in mesh_dims}
    found = [Ranks.of_mesh(mesh, dim) for mesh, dim in unique.values()]
    return list({ranks.numbers: ranks for ranks in found}.values())


@contextmanager
def agreed_by(groups: Iterable[Ranks]) -> Iterator[None]:
    """Run a block that may raise on some ranks, and raise on every rank of these groups if it did on any."""
    with ExitStack() as stack:
        for ranks in groups:
            stack.enter_context(ranks.agreed())
        yield


def largest_handle_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all parameters, in full shape, of the largest handle with some of ``tensors``; 0 without.

    The same on all ranks, also where blocks of tensor parallelism differ, or other handles.
    """
    handles = {handle: None for tensor in tensors if (handle := handle_of(tensor)) is not None}
    sizes = [
        sum(param.spec.shape.numel() * flat.compute_dtype.itemsize for flat in handle.buffers for param in flat.params)
        for handle in handles
    ]
    return max(sizes, default=0)


def batches(tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Split named tensors, in order, into lists of at most ``max_bytes`` of full values, or of one tensor."""
    batch: list[tuple[str, torch.Tensor]] = []
    total = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.dtype.itemsize
        if batch and total + size > max_bytes:
            yield batch
            batch, total = [], 0
        batch.append((name, tensor))
        total += size
    if batch:
        yield batch


def _check_moment(model: nn.Module) -> None:
    for module in model.modules():
        state, handle = sharded_state_of(module), handle_of_module(module)
        if state is not None and state.root is not None and not state.root.scheduler.is_idle:
            raise UsageError(
                "full values are asked for in the middle of a forward or backward",
                at=f"{place_of_rank()}, {describe_module(model)}",
                fix="ask for them between steps",
            )
        if state is not None and handle is not None and handle.held_with is not None:
            raise UsageError(
                "full values are asked for while unshard_params shows the parameters",
                at=f"{place_of_rank()}, {handle.described}",
                fix="leave unshard_params first; inside it, state_dict() and load_state_dict() are the plain model's",
            )


def check_float(dtype: torch.dtype | None) -> None:
    """Raise unless ``dtype`` is one that weights are cast to."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        fix = "pass a floating-point torch.dtype, or None to keep each tensor's own"
        raise ConfigError(f"dtype is {dtype!r}", fix=fix)


def check_bytes(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise unless ``value`` is a positive number."""
    if not (value is None and or_none) and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        fix = f"pass a positive number of bytes{', or None' if or_none else ''}"
        raise ConfigError(f"{name} is {described(value)}", at=place_of_rank(), fix=fix)

"""The entries of a full state dict.

A model's *entries* are the items of ``state_dict()``: key and tensor, ties and shared buffers under every
name. Ragged tensors among them are gathered or filled in *batches* of bounded size. A call that moves full values
starts with ``entries_for``, where the ranks compare their requests.

In checkpoints the name of a parameter is its first FQN in the model, without the parts that torch's own
wrappers add, so a name means the same at every number of ranks and in plain torch. Ranks may have different parts of a
model, such as experts: a name means the same parameter on every rank.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.annotation import handle_of_module, sharded_state_of, states_of
from composable.comm import ModelRanks, Ranks
from composable.dtensor import RaggedDTensor, cast_dtype
from composable.engine import handle_of, tell_loads
from composable.errors import ConfigError, UsageError
from composable.ground.names import check_module, describe_module, described, list_text, plain_fqn
from composable.ground.torch_private import ranks_of_mesh
from composable.ground.unfilled import META_FIX
from composable.optim import ranks_of_param


@dataclass(frozen=True)
class OptimizerNames:
    """The name of an optimizer's class, and for each of its groups the FQNs of the parameters."""

    kind: str
    groups: tuple[tuple[str, ...], ...]


def names_of_params(model: nn.Module) -> dict[torch.Tensor, str]:
    """Return the name of each parameter in checkpoints."""
    return {param: plain_fqn(name) for name, param in model.named_parameters()}


def optimizer_differences(saved: Sequence[OptimizerNames], current: Sequence[OptimizerNames]) -> list[str]:
    """Return a line for each difference between optimizers; the order within a group does not count."""
    kinds = [", ".join(f"{one.kind} with {len(one.groups)} param groups" for one in each) for each in (saved, current)]
    if kinds[0] != kinds[1]:
        return [f"the checkpoint holds {kinds[0] or 'no optimizer'}; here: {kinds[1] or 'no optimizer'}"]
    lines = []
    for there, here in zip(saved, current, strict=True):
        for index, (names, own) in enumerate(zip(there.groups, here.groups, strict=True)):
            both = {*names} & {*own}
            for side, listed in (("in the checkpoint", names), ("here", own)):
                only = [name for name in listed if name not in both]
                lines += [f"group {index} of {there.kind}: only {side}: {', '.join(only)}"] if only else []
    return lines


# -- on all ranks


@dataclass(frozen=True)
class NamesOnAll:
    """The names of values of all ranks."""

    optimizers: tuple[OptimizerNames, ...]  # The optimizers in order, with the parameters of all ranks that are picked.
    elsewhere: frozenset[str]  # Names in the models of other ranks only.
    picked: frozenset[str]  # The names in the models of all ranks that are saved or loaded.
    # The ranks that have each name in their models; empty if all have the same names.
    homes: Mapping[str, tuple[int, ...]]
    values: Mapping[str, Any]  # What this rank's model has of the names that are picked: its own tensors.


def names_on_all(
    ranks: Ranks,
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    names: "Names | None",
    arguments: Sequence[str] = (),
) -> NamesOnAll:
    """Describe the models and optimizers of all ranks, and what ``names`` picks of them.

    Collective. Raises if ranks have different optimizers, ``names`` or ``arguments``, or if a name has several values.
    """
    with ranks.agreed():
        mine = _describe_optimizers(model, optimizers)
        # By its own names, which hooks may have given, not by those of modules. Optimizers have all parameters.
        values = {plain_fqn(key): value for key, value in model.state_dict().items()}
        homes = _homes(model, [*values, *names_of_params(model).values()])
    text = "\n".join([*arguments, *(f"{one.kind} with {len(one.groups)} param groups" for one in mine)])
    loads = _Loads(model, ranks)
    ranks.compare(
        text + loads.text,
        shown=partial(loads.shown_after, text),
        what="the ranks call save_checkpoint or load_checkpoint with different arguments",
        fix="make the call with equal arguments on all ranks",
    )
    is_alike = ranks.are_alike(repr((mine, homes)))
    every = [(mine, homes)]
    if not is_alike:
        # As tuples: only plain values travel.
        sent = ranks.objects(([(one.kind, one.groups) for one in mine], homes))
        every = [(tuple(OptimizerNames(*one) for one in own), own_homes) for own, own_homes in sent]
    _check_one_each([of_rank for _, of_rank in every])
    merged = []
    for told in zip(*(of_rank for of_rank, _ in every), strict=True):
        groups = zip(*(one.groups for one in told), strict=True)
        united = tuple(tuple(dict.fromkeys(name for names in group for name in names)) for group in groups)
        merged.append(OptimizerNames(told[0].kind, united))
    _check_optimized(merged, every)
    known = dict.fromkeys(name for _, of_rank in every for name in of_rank)
    with ranks.agreed():
        picked = frozenset(_pick(names, known))
    if names is not None:
        text = "\n".join(name for name in known if name in picked)
        what, fix = "names picks other entries on other ranks", "pick the same on every rank"
        ranks.compare(text, shown=text, what=what, fix=fix)
    apart = () if is_alike else known
    all_homes = {name: tuple(at for at, (_, of_rank) in enumerate(every) if name in of_rank) for name in apart}
    own = {name: value for name, value in values.items() if name in picked}
    return NamesOnAll(picked_of(merged, picked.__contains__), frozenset(known) - homes.keys(), picked, all_homes, own)


class _Loads:
    """The loads into the handles of a model that lie on all of the ranks that compare them."""

    def __init__(self, model: nn.Module, ranks: Ranks) -> None:
        found = dict.fromkeys(handle_of_module(module) for module in model.modules())
        self._handles = [one for one in found if one is not None and one.grid.everyone.numbers == ranks.numbers]
        self.text = f"\n{[one.loads for one in self._handles]}"

    def shown_after(self, text: str) -> str:
        return "\n".join([text, *tell_loads(self._handles)])


def picked_of(optimizers: Iterable[OptimizerNames], is_picked: Callable[[str], object]) -> tuple[OptimizerNames, ...]:
    """Return optimizers without the parameters that are not picked; all groups stay."""
    return tuple(
        OptimizerNames(one.kind, tuple(tuple(filter(is_picked, group)) for group in one.groups)) for one in optimizers
    )


def _describe_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[OptimizerNames, ...]:
    # Reshards modules that were unsharded by hand: the optimizers hold the sharded parameters.
    model.state_dict(keep_vars=True)
    names = names_of_params(model)
    if any(param not in names for one in optimizers for group in one.param_groups for param in group["params"]):
        raise ConfigError(
            "an optimizer has parameters that are not the model's",
            fix="make the optimizer from model.parameters(), after the model was annotated",
        )
    groups = [[tuple(names[param] for param in group["params"]) for group in one.param_groups] for one in optimizers]
    return tuple(OptimizerNames(type(one).__name__, tuple(each)) for one, each in zip(optimizers, groups, strict=True))


def _check_optimized(
    merged: Sequence[OptimizerNames], every: Sequence[tuple[Sequence[OptimizerNames], Mapping[str, object]]]
) -> None:
    """Raise unless each parameter is in one param group only, on every rank that has it."""
    names = [name for one in merged for group in one.groups for name in group]
    torn = {name for name, count in Counter(names).items() if count > 1}
    for optimizers, homes in every:
        own = {name for one in optimizers for group in one.groups for name in group}
        torn |= (homes.keys() & names) - own
    if torn:
        raise ConfigError(
            f"parameters in two param groups or optimizers, or in one on some ranks only: {list_text(sorted(torn))}",
            fix="put each parameter into one param group of one optimizer, the same on every rank",
        )


def _homes(model: nn.Module, values: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return for each name in the model the ranks with pieces or copies; empty unless others have more ranks."""
    homes: dict[str, tuple[int, ...]] = dict.fromkeys(values, ())
    named = {name: param for param, name in names_of_params(model).items() if name in homes}
    layouts = [param._spec.layout for param in named.values() if isinstance(param, RaggedDTensor)]
    # Beside parameters that tensor parallelism has split, plain parameters are the same along its dims.
    joined = {layout.ranks.numbers: layout.mesh for layout in layouts if layout.mesh.ndim > 1}
    numbers_of = cache(lambda mesh: tuple(sorted(ranks_of_mesh(mesh))))
    found: dict[str, tuple[int, ...]] = {}
    for name, param in named.items():
        ranks = ranks_of_param(param)
        mesh = param.device_mesh if isinstance(param, DTensor) and param.device_mesh.ndim > 1 else None
        if joined and isinstance(param, RaggedDTensor):
            mesh = joined.get(param._spec.layout.ranks.numbers, mesh)
        found[name] = (() if ranks is None else ranks.numbers) if mesh is None else numbers_of(mesh)
    # Nearly all are one object, which may have thousands of numbers.
    distinct = {id(home): set(home) for home in found.values()}
    whole = max(distinct.values(), key=len, default=set())
    # Groups that are all equal may be those that tensor parallelism leaves for data.
    return homes | {name: home for name, home in found.items() if distinct[id(home)] < whole}


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
            fix="name experts by their number in the whole model, such as nn.ModuleDict({'6': ..., '7': ...})",
        )


# The option ``names``, which picks entries: FQNs, or a function that says for an FQN whether it is wanted.
Names = Callable[[str], object] | Collection[str]
# Small tensors travel together up to this many bytes, even if every handle is smaller.
_LEAST_BATCH_BYTES = 2**20


@dataclass(frozen=True)
class Entries:
    """The entries of a model's state dict, in the plain model's order, ties as one object; with module versions."""

    values: dict[str, Any]
    metadata: Any

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the entries that are tensors, of any shapes."""
        return {key: value for key, value in self.values.items() if isinstance(value, torch.Tensor)}

    def targets(self) -> dict[str, torch.Tensor]:
        """Return the entries that full values are written into: all tensors but extra state, whose shape may change."""
        return {key: value for key, value in self.tensors().items() if not key.endswith("_extra_state")}

    def first_names(self) -> dict[int, str]:
        """Return the first key of each tensor, by its id."""
        return {id(tensor): key for key, tensor in reversed(self.tensors().items())}

    def unique(self) -> dict[str, torch.Tensor]:
        """Return the entries that are tensors, of any shapes, each under the first of its keys."""
        names = self.first_names()
        return {key: tensor for key, tensor in self.tensors().items() if names[id(tensor)] == key}

    def on_meta(self) -> list[str]:
        """Return the keys of tensors on the meta device."""
        return [key for key, value in self.tensors().items() if value.is_meta]

    def batch_bytes(self) -> int:
        """Return how many bytes of full values may be under way at once; the same on all ranks with these entries."""
        return max(largest_handle_bytes(self.tensors().values()), _LEAST_BATCH_BYTES)

    def picked(self, names: Names | None) -> "Entries":
        """Return the entries that ``names`` picks; raises if it picks none, or is invalid."""
        wanted = _pick(names, self.values)
        return Entries({key: self.values[key] for key in self.values if key in wanted}, self.metadata)

    def described(self, wanted: Collection[str]) -> Iterator[str]:
        """Yield a line for each entry: its type, shape and dtype, and whether its key is in ``wanted``."""
        targets = self.targets()
        for key, value in self.values.items():
            kind = "no tensor"
            if key in targets:
                name = type(value).__name__ if isinstance(value, DTensor) else "tensor"
                kind = f"{name} {list(value.shape)} {value.dtype}"
            yield f"{key}: {kind}{'' if key in wanted else ', not picked'}"


def _pick(names: Names | None, known: Collection[str]) -> set[str]:
    if names is None:
        return set(known)
    if callable(names):
        picked = {fqn for fqn in known if names(fqn)}
    else:
        is_collection = isinstance(names, Collection) and not isinstance(names, str)
        unknown: list[Any] = [name for name in names if name not in known] if is_collection else [names]
        if unknown:
            raise ConfigError(
                f"names is or holds something not in the model's state_dict(): {list_text(unknown, write=described)}",
                fix="pass a function of an FQN, such as lambda fqn: 'lora_' in fqn, or a list or set of FQNs",
            )
        picked = set(names)
    if not picked:
        fix = f"pick some of its entries: {list_text(known)}"
        raise ConfigError("names picks nothing of the model", fix=fix)
    return picked


def entries_now(model: nn.Module) -> Entries:
    """Return the current entries of ``model``, without comparing them between ranks."""
    values = model.state_dict(keep_vars=True)
    metadata = getattr(values, "_metadata", None)
    if metadata is not None:
        metadata = OrderedDict((plain_fqn(name), own) for name, own in metadata.items())
    return Entries({plain_fqn(key): value for key, value in values.items()}, metadata)


@contextmanager
def entries_for(
    model: nn.Module, names: Names | None, *options: object, permits_meta: bool = False
) -> Iterator[tuple[ModelRanks, Entries]]:
    """Yield the ranks that share ``model``, and its entries, to a block that checks arguments; then compare entries.

    After the block all ranks have the same entries and pick the same; if one rank finds a wrong argument, all raise.
    Collective: all ranks that share the model, between steps. Parameters that an earlier forward left unsharded are
    resharded. ``options`` are other values that must be equal on all ranks, by their ``repr``.
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
                "full values are asked for, and there are none on the meta device", at=list_text(on_meta), fix=META_FIX
            )
        yield model_ranks, entries
    homes = map(ranks_of_param, everything.tensors().values())
    has_others = any(home is not None and home.numbers != ranks.numbers for home in homes)
    # Parts on other ranks, such as experts, may have different names on each of these ranks.
    compared = entries if has_others else everything
    text = "\n".join([f"options {options!r}", *compared.described(entries.values)])
    loads = _Loads(model, ranks)
    ranks.compare(
        text + loads.text,
        shown=partial(loads.shown_after, text),
        what="the ranks ask for full values of different models or with different arguments",
        fix="make the same call on the same model on every rank",
    )


def ranks_of(model: nn.Module, names: Names | None = None) -> ModelRanks:
    """Return the ranks that share ``model``: the ranks of annotations on it and below it, and of its DTensors.

    Collective over these ranks if there are DTensors of tensor parallelism. If modules are annotated on different
    ranks, only entries that ``names`` picks count.
    """
    check_module("model", model)
    found: dict[tuple[int, ...], Ranks] = {}
    for state in states_of(model.modules()):
        found.setdefault(state.grid.everyone.numbers, state.grid.everyone)
    if not found:
        raise UsageError(
            "the model is not annotated",
            at=describe_module(model),
            fix="use state_dict() and load_state_dict() of the plain model, or annotate it first",
        )
    tensors: Iterable[torch.Tensor] = [*model.parameters(), *model.buffers()]
    if len(found) > 1 and names is not None:
        tensors = entries_now(model).picked(names).tensors().values()
        homes = map(ranks_of_param, tensors)
        found = {home.numbers: home for home in homes if home is not None}
    if len(found) != 1:
        raise ConfigError(
            f"modules are annotated on different ranks: {', '.join(str(list(ranks)) for ranks in found)}"
            if found
            else "modules are annotated on different ranks, and names picks no parameter of any",
            at=describe_module(model),
            fix="call this on each part of the model that is on one set of ranks, or pick it by names=",
        )
    meshes = dict.fromkeys(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    along = [Ranks.of_mesh(mesh, dim) for mesh in meshes for dim in range(mesh.ndim)]
    others = {ranks.numbers: ranks for ranks in along}
    return ModelRanks.of(next(iter(found.values())), list(others.values()))


def largest_handle_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all parameters, in full shape, of the largest handle with some of ``tensors``, else 0.

    The same on all ranks, also if blocks of tensor parallelism, or other handles, differ.
    """
    handles = {handle: None for tensor in tensors if (handle := handle_of(tensor)) is not None}
    sizes = [
        sum(param.spec.shape.numel() * flat.compute_dtype.itemsize for flat in handle.buffers for param in flat.params)
        for handle in handles
    ]
    return max(sizes, default=0)


def batches(
    tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: float, dtype: torch.dtype | None = None
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Split named tensors, in order, into lists of at most ``max_bytes`` of full values, or of one tensor.

    ``dtype`` is that of floating-point values; default: their own.
    """
    batch: list[tuple[str, torch.Tensor]] = []
    total = 0
    for name, tensor in tensors:
        size = tensor.numel() * cast_dtype(tensor, dtype).itemsize
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
        if state is not None and state.root is not None and not state.root.scheduler.step.is_idle:
            raise UsageError(
                "full values are asked for in the middle of a forward or backward",
                at=describe_module(model),
                fix="ask for them between steps",
            )
        if state is not None and handle is not None and handle.held_with is not None:
            raise UsageError(
                "full values are asked for while unshard_params shows the parameters",
                at=handle.described,
                fix="leave unshard_params first; inside it, state_dict() and load_state_dict() are the plain model's",
            )


def check_float(dtype: torch.dtype | None) -> None:
    """Raise unless ``dtype`` is a floating-point dtype or ``None``."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        fix = "pass a floating-point torch.dtype, or None to keep each tensor's own"
        raise ConfigError(f"dtype is {dtype!r}", fix=fix)

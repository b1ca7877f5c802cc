"""Checks before a state dict is loaded.

torch copies values that fit and reports the others afterwards, which leaves a model half-loaded. The check here runs
first, and one error lists every key that is missing, unexpected or of another shape. torch's own functions for full
state dicts, such as ``set_model_state_dict``, are taught to check too, and to cut values like our parameters.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from composable.annotation import handle_of_module, sharded_state_of
from composable.comm import Ranks
from composable.dtensor import RaggedDTensor, slice_full
from composable.engine import attach, handle_of
from composable.errors import ConfigError, StateDictError, UsageError, located
from composable.ground.contract import get_registry
from composable.ground.frames import is_strict_load
from composable.ground.names import described, dtype_text, join_fqn, list_text, plain_fqn
from composable.ground.torch_hooks import around_state_dict
from composable.ground.torch_private import loading_of_torch, module_load
from composable.ground.unfilled import mark_unfilled

_MAX_SHOWN = 20


# -- keys and values that do not fit


@dataclass(frozen=True)
class Differences:
    """Keys of a state dict that do not fit a model; ``unfit`` has the keys that are in both, with the fault of each."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()

    def check(self, *, strict: bool, loaded: str = "nothing was loaded", is_checkpoint: bool = False) -> None:
        """Raise one error that lists all differences; without ``strict`` only ``unfit`` counts."""
        lists = {"Not alike": self.unfit}
        if strict:
            # In torch's words, which trainers look for.
            names = {"Missing key(s) in state_dict": self.missing, "Unexpected key(s) in state_dict": self.unexpected}
            lists = {name: tuple(f'"{key}"' for key in keys) for name, keys in names.items()} | lists
        lines = [f"\n    {name}: {list_text(keys, _MAX_SHOWN, write=str)}" for name, keys in lists.items() if keys]
        if lines:
            name, fix = ("checkpoint", _CHECKPOINT_FIX) if is_checkpoint else ("state dict", _FIX)
            if prefix := _prefix(self.unexpected, self.missing):
                fix = f"remove {prefix!r}: {{key.removeprefix({prefix!r}): value for key, value in state_dict.items()}}"
                if is_checkpoint:
                    fix = f"load_checkpoint(path, nn.ModuleDict({{{prefix[:-1]!r}: model}}), optimizer)"
            elif prefix := _prefix(self.missing, self.unexpected):
                fix = f"load into the part of the model that was saved: model.get_submodule({prefix[:-1]!r})"
            what = f"the {name} does not fit the model, and {loaded}{''.join(lines)}"
            raise StateDictError(what, fix=fix)


_FIX = "give each key its full tensor; strict=False permits missing and unexpected keys"
_CHECKPOINT_FIX = (
    "build the model and its optimizers as the run that saved did; load_checkpoint(path, model) loads the model alone, "
    "names= a part; for another model, load the saved one, then "
    "load_full_state_dict(other, full_state_dict(saved), strict=False)"
)


def _prefix(longer: Sequence[str], keys: Sequence[str]) -> str:
    """Return the prefix, as of a wrapper, with which ``longer`` has all ``keys``; empty if there is none."""
    found = (key.removesuffix(keys[0]) for key in longer if keys and key.endswith(f".{keys[0]}"))
    return next((one for one in found if set(longer).issuperset(one + key for key in keys)), "")


def find_differences(
    expected: Mapping[str, Any],
    given: Collection[str],
    value_of: Callable[[str], Any],
    *,
    opaque: Collection[str] = (),
    is_sharded: bool = False,
) -> Differences:
    """Compare the entries of a model (``None``: no tensor) with the keys and values of a state dict.

    ``value_of`` gives a tensor, or a ``torch.Size``, for a key that is in both. ``opaque`` are prefixes of modules that
    load in a way of their own: only shapes are compared there. If ``is_sharded``, values may be DTensors.
    """
    keys, prefixes = set(given), tuple(opaque)
    if wrong := [key for key in given if not isinstance(key, str)]:
        raise ConfigError(f"the state dict has the key {described(wrong[0])}", fix="pass values by their FQNs")
    return Differences(
        missing=tuple(key for key in expected if key not in keys and not key.startswith(prefixes)),
        unexpected=tuple(key for key in given if key not in expected and not key.startswith(prefixes)),
        unfit=tuple(
            f"{plain_fqn(key)} {problem}"
            for key, target in expected.items()
            if target is not None and key in keys and (problem := _misfit(target, value_of(key), is_sharded))
        ),
    )


def _misfit(target: torch.Tensor, value: Any, is_sharded: bool) -> str:
    """Say why ``value`` cannot be copied into ``target``; empty if it can."""
    if not isinstance(value, torch.Tensor | torch.Size):
        return f"is a {type(value).__name__}, not a tensor"
    shape = value.shape if isinstance(value, torch.Tensor) else value
    # torch takes a one-element tensor for a scalar, as old checkpoints have it.
    if shape != target.shape and not (target.dim() == 0 and shape == (1,)):
        return f"has shape {list(shape)}, not {list(target.shape)}"
    if not isinstance(value, torch.Tensor):
        return ""
    if value.is_meta and not target.is_meta:
        return "is on the meta device"
    if isinstance(value, DTensor) and not is_sharded:
        return "is a DTensor, not a full tensor"
    if not is_sharded and value.is_floating_point() != target.is_floating_point():
        return f"is {dtype_text(value.dtype)}, not {dtype_text(target.dtype)}"
    if isinstance(value, DTensor) and not (isinstance(target, DTensor) and value.device_mesh == target.device_mesh):
        return "is a DTensor of another mesh"
    return ""


def _entries_to_load(module: nn.Module, prefix: str = "") -> tuple[dict[str, torch.Tensor | None], list[str]]:
    """Return the entries that ``module`` loads, on any device, and prefixes of modules that load in their own way."""
    entries: dict[str, torch.Tensor | None] = {}
    opaque: list[str] = []
    for name, owner in module.named_modules(remove_duplicate=False):
        path = f"{prefix}{name}." if name else prefix
        tensors = {**owner._parameters, **owner._buffers}
        unsaved, load = owner._non_persistent_buffers_set, type(owner)._load_from_state_dict
        saved = {path + key: value for key, value in tensors.items() if value is not None and key not in unsaved}
        # What a module reads itself may have any shape; those of torch only add to what is old.
        entries |= saved if str(load.__module__).startswith("torch.") else dict.fromkeys(saved)
        entries |= {path + key: tensor for key, tensor in _state_of_bytes(owner)}
        if type(owner).get_extra_state is not nn.Module.get_extra_state:
            entries[f"{path}_extra_state"] = None
        # torch keeps each hook in a wrapper that has the name of the hook's module.
        sources = [str(getattr(hook, "__module__", "")) for hook in owner._load_state_dict_pre_hooks.values()]
        if load is not module_load or any(not source.startswith("composable.") for source in sources):
            opaque.append(path)
    return entries, opaque


# -- hooks of annotated modules


def register_load_check(module: nn.Module) -> list[RemovableHandle]:
    """Register a check that refuses a state dict before any value of it is copied into an annotated module."""
    _teach_torch_to_load()
    return around_state_dict(module, before_load=[_check_before_load])


def _check_before_load(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    """Refuse a ``load_state_dict`` that would stop half-way. Not collective: equal state dicts raise equal errors."""
    if metadata.get("assign_to_params_buffers") and any("replicate" in get_registry(one) for one in module.modules()):
        raise UsageError(
            "load_state_dict with assign=True would replace parameters that replicate and the optimizer hold",
            fix="leave assign out: values are copied into them",
        )
    expected, opaque = _entries_to_load(module, prefix)
    given = [key for key in state_dict if key.startswith(prefix)]
    differences = find_differences(expected, given, state_dict.__getitem__, opaque=opaque, is_sharded=True)
    differences.check(strict=is_strict_load())


def register_room(module: nn.Module) -> list[RemovableHandle]:
    """Register hooks that give ``state_dict()`` and ``load_state_dict()`` sharded parameters with memory."""
    return around_state_dict(
        module,
        before_save=[_reshard],
        after_save=[_show_sharded],
        before_load=[_prepare_load],
        after_load=[_bring_back],
    )


def _prepare_load(module: nn.Module, *state: Any) -> None:
    # One hook: each costs as much as a part of the annotation of a module.
    _reshard(module)
    make_room(module, *state)
    _load_state(module, *state)


def _reshard(module: nn.Module, *_: Any) -> None:
    state, handle = sharded_state_of(module), handle_of_module(module)
    scheduler = None if state is None or state.root is None else state.root.scheduler
    if handle is not None and scheduler is not None and scheduler.step.is_idle and not scheduler.backwards.is_elsewhere:
        scheduler.reshard(handle)


def _show_sharded(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Put sharded parameters in the place of those that a step in another thread has shown meanwhile.

    Also add the state of quantised parameters, without which their bytes are of no use.
    """
    state = sharded_state_of(module)
    if state is not None and state.root is not None and state.root.scheduler.backwards.is_elsewhere:
        for fqn, param in module.named_parameters(prefix.rstrip("."), remove_duplicate=False):
            for key in {fqn, plain_fqn(fqn)} & state_dict.keys():
                is_plain = handle_of(param) is not None and not isinstance(state_dict[key], RaggedDTensor)
                keeps_vars = isinstance(state_dict[key], nn.Parameter)
                state_dict[key] = (param if keeps_vars else param.detach()) if is_plain else state_dict[key]
    state_dict |= {prefix + key: tensor for key, tensor in _state_of_bytes(module)}


def make_room(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
    """Give memory to meta tensors that are about to be loaded; torch would skip them with a warning."""
    state = sharded_state_of(module)
    if state is None or local_metadata.get("assign_to_params_buffers", False):
        return
    device = state.grid.shard.device
    handle = handle_of_module(module)
    params = {id(param.sharded): param for param in handle.params if param.ragged.is_meta} if handle else {}
    buffers: dict[int, torch.Tensor] = {}
    for fqn, submodule in module.named_modules(prefix=prefix.rstrip(".")):
        for name, tensor in [*submodule._parameters.items(), *submodule._buffers.items()]:
            # Wrappers below add their part to the keys only in their own hooks, which run later.
            key = join_fqn(fqn, name)
            if tensor is None or not tensor.is_meta or (key not in state_dict and plain_fqn(key) not in state_dict):
                continue
            if id(tensor) in params:
                param = params[id(tensor)]
                room = torch.empty(param.local_shape, dtype=param.spec.dtype, device=param.home)
                mark_unfilled(room)
                param.show(room)
            elif name in submodule._buffers:
                if id(tensor) not in buffers:
                    buffers[id(tensor)] = torch.empty_like(tensor, device=device)
                    mark_unfilled(buffers[id(tensor)])
                submodule._buffers[name] = buffers[id(tensor)]


def _bring_back(module: nn.Module, _: Any) -> None:
    """Move loaded values into the shards, and put back the parameters that the load replaced."""
    handle = handle_of_module(module)
    if handle is not None:
        with located(handle.described):
            attach(handle)
        if not getattr(handle.held_with, "rank0_only", False):  # There the first rank alone has what can be loaded.
            handle.note_load()


def _state_of_bytes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield by key the tensors, such as scales, in the wrappers of parameters that are sharded as bytes.

    The module of a parameter saves and loads them, as without shards.
    """
    handle = handle_of_module(module)
    if handle is None:
        return
    for param in handle.params:
        if param.form is None or param.form.kind != "bytes":
            continue
        fqn = param.fqn.partition(".")[2] if len(handle.module_fqns) > 1 else param.fqn
        if any(owner in module.modules() for owner, _ in param.owners[:1]):
            for path, tensor in param.form.state.items():
                yield f"{fqn}.{path}", tensor


@torch.no_grad()
def _load_state(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any, __: bool, missing: list[str], *lists: list[str]
) -> None:
    """Load the state from ``_show_sharded``, whose keys torch does not know. ``lists``: unexpected keys, and errors."""
    for key, tensor in _state_of_bytes(module):
        if prefix + key not in state_dict:
            missing.append(prefix + key)
            continue
        value = state_dict.pop(prefix + key)
        if value.shape != tensor.shape:
            lists[-1].append(f"size mismatch for {prefix + key}: {list(value.shape)} for {list(tensor.shape)}.")
        else:
            tensor.copy_(value)


# -- torch's loading of full state dicts


def _teach_torch_to_load() -> None:
    """Make torch's loading of full state dicts cut values for our parameters, and check them before it loads; once.

    Not when this package is imported: torch's files take as long to import, and there are no such parameters yet.
    """
    dcp_state_dict, state_dict_utils = loading_of_torch()
    if not hasattr(state_dict_utils._distribute_tensors, "__wrapped__"):
        for name in ("_distribute_state_dict", "_broadcast_state_dict"):
            setattr(dcp_state_dict, name, _with_ragged_scalars(getattr(dcp_state_dict, name)))
        dcp_state_dict._load_model_state_dict = _with_check(dcp_state_dict._load_model_state_dict)
        state_dict_utils._distribute_tensors = _with_ragged_values(state_dict_utils._distribute_tensors)


def _with_check(original: Any) -> Any:
    """Wrap torch's loader, which would accept missing keys, or find wrong keys after it has written some values."""

    @wraps(original)
    def load_model_state_dict(model: nn.Module, state_dict: dict[str, Any], info: Any) -> Any:
        if info.broadcast_from_rank0 and any(map(get_registry, model.modules())):
            # torch takes the `{}` of the other ranks for a call about the optimizer alone: the first would wait.
            info.handle_model = Ranks.of_world().object_of(0, info.handle_model)
        is_given = bool(state_dict) or info.broadcast_from_rank0
        if info.handle_model and is_given and (info.full_state_dict or info.broadcast_from_rank0):
            named, opaque = _entries_to_load(model)
            # torch leaves this part out of the names under torch.compile.
            expected = {key.replace("_orig_mod.", ""): value for key, value in named.items()}
            if any(isinstance(value, RaggedDTensor) for value in expected.values()):
                ranks = Ranks.of_world()
                with ranks.agreed():
                    if not info.broadcast_from_rank0 or ranks.rank == 0:
                        differences = find_differences(expected, state_dict, state_dict.__getitem__, opaque=opaque)
                        differences.check(strict=info.strict)
        return original(model, state_dict, info)

    return load_model_state_dict


def _with_ragged_values(original: Any) -> Any:
    """Wrap torch's function that cuts full tensors into rows."""

    @wraps(original)
    def distribute_tensors(local: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None) -> None:
        # torch marks a value that is still to be cut as (local DTensor, full tensor).
        pairs = {key: local.get(key) for key in keys}
        ours = {key: pair for key, pair in pairs.items() if isinstance(pair, tuple) and type(pair[0]) is RaggedDTensor}
        local.update({key: _cut_into(*pair) for key, pair in ours.items()})
        original(local, [key for key in keys if key not in ours], device, pg)

    return distribute_tensors


def _with_ragged_scalars(original: Any) -> Any:
    """Wrap torch's function that leaves scalars plain: right for step counters, not for a scalar parameter's state."""

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
        what = f"a full tensor of shape {list(full.shape)} for one of shape {list(target.shape)}"
        raise ConfigError(what, fix="load a state dict with tensors of the model's full shapes")
    piece = slice_full(full, target._spec.layout)
    if target.is_meta:
        return RaggedDTensor.wrap(piece.detach().clone(), target._spec.cast(piece.dtype))
    target._local_tensor.detach().copy_(piece)
    return target

"""The contents of a checkpoint, by FQN.

torch's ``get_state_dict`` in ``torch.distributed.checkpoint`` has the same layout, so either side
reads checkpoints of the other: ``model.FQN``, ``optimizer.state.FQN.NAME``, ``optimizer.param_groups``.
Unlike there, an optimizer that has not stepped is saved without state and loaded without a step,
and so is a parameter that has had no gradient.

No code in a file is run: values other than tensors are read as data, and the pickle ``.metadata`` of
``torch.distributed.checkpoint`` may name a few classes that hold data, and no others.
"""

import io
import pickle
import re
from ast import literal_eval
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Replicate

from composable.errors import ConfigError, UsageError
from composable.ground.torch_private import flatten_state_dict, tree_map, unflatten_state_dict
from composable.saving.entries import OptimizerNames, names_of_params, optimizer_differences
from composable.saving.loads import find_differences

__all__ = [
    "DataPlanner",
    "DataReader",
    "apply",
    "as_data",
    "check_fit",
    "read_data",
    "staged",
    "state_to_save",
    "targets",
]

Optimizers = Sequence[torch.optim.Optimizer]

_PLAIN = frozenset({bool, int, float, str, type(None)})
_DISTRUST = "load another checkpoint, and do not trust where this one is from"
_TORCH = "torch.distributed.checkpoint.metadata"
_CLASSES_OF_METADATA = {
    *((_TORCH, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
    *((_TORCH, name) for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    # The name of the folder while it was written; Python 3.13 has it in another module.
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}


# -- data


def as_data(value: object, name: str) -> bytes:
    """Return ``value`` packed for ``torch.load(weights_only=True)``; raises if that cannot read it."""
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


def read_data(source: Path | io.BytesIO, name: str) -> Any:
    """Return a value that ``as_data`` packed, on the CPU; ``name`` says in errors where it is from."""
    try:
        return torch.load(source, "cpu", weights_only=True)
    except OSError:
        raise
    # A broken archive or pickle makes torch raise errors of any type.
    except Exception as error:
        raise ConfigError(f"{name} cannot be read as data: {_without_advice(error)}", fix=_DISTRUST) from None


def _without_advice(error: Exception) -> str:
    """Return the fault of a pickle, without torch's advice on how to run the code in it."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is not None:
        return f"it names {named[1]}"
    if isinstance(error, pickle.UnpicklingError):
        return "it holds objects that are not data"
    return str(error).strip().partition("\n")[0] or type(error).__name__


class DataPlanner(DefaultLoadPlanner):
    """A planner that reads into the flat names of a checkpoint; values other than tensors are read as data."""

    def __init__(self, folder: Path) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor in its place."""
        fqn = read_item.dest_index.fqn
        self.state_dict[fqn] = read_data(value, f"{self._folder}, {fqn}")


class DataReader(FileSystemReader):
    """A reader of a checkpoint's files, which reads ``.metadata`` as data."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the names and places of all values; raises if ``.metadata`` does not describe a checkpoint."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                found: Metadata = _Unpickler(file).load()
            return found
        except OSError:
            raise
        # A broken pickle makes Python raise errors of any type.
        except Exception as error:
            what = f"{path} does not describe a checkpoint: {error or type(error).__name__}"
            raise ConfigError(what, fix=_DISTRUST) from None


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes objects of a few classes that hold data, and of no other."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _CLASSES_OF_METADATA:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


# -- saving


def state_to_save(model: nn.Module, optimizers: Optimizers, names_of_all: Sequence[OptimizerNames]) -> dict[str, Any]:
    """Return the state of model and optimizers in the form for ``torch.distributed.checkpoint.save``.

    Tensors are the model's and the optimizers' own, sharded as they are, not copies. Raises if a parameter has no
    values yet, or if a value is neither a tensor nor plain data.
    """
    _check_materialized(model)
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizers:
        state["optimizer"] = {"state": {}, "param_groups": []}
        names = names_of_params(model)
        for optimizer, described in zip(optimizers, names_of_all, strict=True):
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
            state["optimizer"]["state"].update(named)
            state["optimizer"]["param_groups"] += [
                {**_with_text_keys(group), "params": list(every)}
                for group, every in zip(saved["param_groups"], described.groups, strict=True)
            ]
    for name, value in flatten_state_dict(state)[0].items():
        if not isinstance(value, torch.Tensor) and type(value) not in _PLAIN:
            as_data(value, name)
    return state


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


def staged(state: Any) -> Any:
    """Return a copy of ``state`` on the host that later steps do not change."""
    return tree_map(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, torch.Tensor) else deepcopy(leaf), state
    )


def _check_materialized(model: nn.Module) -> None:
    on_meta = [name for name, value in model.state_dict().items() if isinstance(value, torch.Tensor) and value.is_meta]
    if on_meta:
        raise UsageError(f"on the meta device: {', '.join(on_meta)}", fix="materialize the model first")


# -- loading


def check_fit(
    metadata: Metadata,
    saved: Sequence[OptimizerNames],
    model: nn.Module,
    current: Sequence[OptimizerNames],
    elsewhere: Collection[str],
) -> None:
    """Raise one error that lists all differences between a checkpoint and the model and optimizers to load.

    ``current`` are the optimizers, with the parameters of all ranks; if it is empty, only the model is checked.
    ``elsewhere`` are names that only other ranks have.
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
    lines = optimizer_differences(saved, current) if current else []
    replace(found, unfit=(*found.unfit, *lines)).check(strict=True)


def targets(metadata: Metadata, model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Return the tensors that a checkpoint is read into, by flat name.

    Tensors are the model's own, and new ones for optimizer state, which are cut like their parameters, in the dtypes
    that were saved. ``None``: the value is no tensor. Names that only other ranks have are left out.
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
    return flat


def _room_for(entry: Any, like: torch.Tensor | None) -> torch.Tensor | None:
    """Return an empty tensor, cut and placed like a parameter, or whole if the shape differs, as Adafactor's rows."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if isinstance(like, DTensor) and like.shape == entry.size:
        return torch.empty_like(like.detach(), dtype=entry.properties.dtype)
    room = torch.empty(entry.size, dtype=entry.properties.dtype, device=None if like is None else like.device)
    if isinstance(like, DTensor) and entry.size:
        return DTensor.from_local(room, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return room


def apply(flat: dict[str, Any], metadata: Metadata, model: nn.Module, optimizers: Optimizers) -> None:
    """Load the values that were read into ``targets`` into the model and the optimizers."""
    nested: dict[str, Any] = unflatten_state_dict(flat, metadata.planner_data)
    set_model_state_dict(model, nested.get("model", {}))
    saved = _with_own_keys(nested.get("optimizer", {}))
    state, groups = saved.get("state", {}), iter(saved.get("param_groups", []))
    names = names_of_params(model)
    for optimizer in optimizers:
        fqns = [names[param] for group in optimizer.param_groups for param in group["params"]]
        packed: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
        # Parameters keep their order within the optimizer's groups, which may differ from the saved order.
        own_groups = [{**group, **next(groups), "params": group["params"]} for group in packed]
        params = [param for group in optimizer.param_groups for param in group["params"]]
        own_state = {
            index: _in_its_class(optimizer.state.get(params[index], {}), state[name])
            for index, name in enumerate(fqns)
            if name in state
        }
        optimizer.load_state_dict({"state": own_state, "param_groups": own_groups})


def _in_its_class(held: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a parameter, in the optimizer's own tensors if these are packed, for example in 8 bits.

    Packed tensors are saved as ordinary values.
    """
    found = dict(read)
    for key, value in held.items():
        own = value._local_tensor if isinstance(value, DTensor) else value
        if hasattr(type(own), "__tensor_flatten__") and isinstance(read.get(key), torch.Tensor):
            found[key] = value.detach().copy_(read[key])
    return found

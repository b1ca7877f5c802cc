"""The contents of a checkpoint, by FQN.

torch's ``get_state_dict`` in ``torch.distributed.checkpoint`` has the same layout, so either side
reads checkpoints of the other: ``model.FQN``, ``optimizer.state.FQN.NAME``, ``optimizer.param_groups``.
Unlike there, an optimizer that has not stepped is saved without state and loaded without a step,
and so is a parameter that has had no gradient.

Nothing in a file is trusted, as whoever wrote it may have made it up (docs/security.md). Values other than tensors are
read as data. The pickle ``.metadata`` of ``torch.distributed.checkpoint`` is read into objects that do nothing, on the
first rank, and sent as text. A value is read once all of its pieces are found to lie in files of the checkpoint, once.
"""

import io
import json
import math
import pickle
from ast import literal_eval
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from itertools import product
from operator import add, le, lt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor, Replicate

from composable.dtensor import RaggedDTensor, write_values
from composable.errors import ConfigError, UsageError
from composable.ground.torch_private import flatten_state_dict, tree_leaves, tree_map, unflatten_state_dict
from composable.runs.run_folder import MANIFEST, METADATA, FileSum, open_in
from composable.runs.storage import StoredFolder
from composable.saving import (
    DISTRUST,
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
    read_data,
)

Optimizers = Sequence[torch.optim.Optimizer]

_PLAIN = frozenset({bool, int, float, str, type(None)})
# Torch cuts a tensor along fewer dims; the corners of a piece are two to this power at most.
_MAX_CUT_DIMS = 12


class _DataPlanner(DefaultLoadPlanner):
    """A planner that reads into the flat names of a checkpoint; values other than tensors are read as data."""

    def __init__(self, folder: Path | StoredFolder) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor in its place."""
        fqn = read_item.dest_index.fqn
        self.state_dict[fqn] = read_data(value, f"{self._folder}, {fqn}")


def read_description(folder: Path | StoredFolder, files: Mapping[str, FileSum]) -> str:
    """Return what ``.metadata`` says of all values, as a text for ``DataReader``, which checks pieces. Not collective.

    It is JSON: for each flat name the path, the dtype and size of a tensor, and a text of its own with numbers: of each
    piece the place of its file among all, start, length, offsets, sizes. So a rank need not look at pieces of values
    that it has no part of. Python objects for pieces would cost most of the time, also in garbage collection.
    Raises ``ConfigError`` unless it describes values, each with a path, whose pieces have a place each.
    """
    try:
        with open_in(folder, METADATA) as file:
            return _description(_Unpickler(io.BytesIO(file.read(files[METADATA].bytes))).load(), files)
    except OSError:
        raise
    # Whoever made a file up may make Python raise errors of any type.
    except Exception as error:
        what = f"{folder}/{METADATA} does not describe a checkpoint: {_told(error)}"
        raise ConfigError(what, fix=DISTRUST) from None


def _told(error: Exception) -> str:
    return f"{error!s:.200}{' is not there' * isinstance(error, KeyError)}" or type(error).__name__


def _description(held: Any, files: Mapping[str, FileSum]) -> str:
    body, numbers = _state_of(held, "Metadata"), {name: number for number, name in enumerate(sorted(files))}
    paths, places, values, nbytes = dict(body["planner_data"]), dict[Any, Any](), dict[str, Any](), 0
    _check_paths(paths)
    for index, place in body["storage_data"].items():
        key, info = _state_of(index, "MetadataIndex"), _state_of(place, "_StorageInfo")
        name = key["fqn"], key.get("offset")
        if name in places or info.get("transform_descriptors"):
            raise ValueError(f"a piece of {key['fqn']} has two places, or was transformed")
        places[name] = numbers[info["relative_path"]], info["offset"], info["length"]
    for fqn, entry in body["state_dict_metadata"].items():
        dtype: Any = None
        size, boxes = torch.Size(()), list[Any]([(None, ())])
        if type(entry).__name__ != "BytesStorageMetadata":
            state = _state_of(entry, "TensorStorageMetadata")
            dtype, size = _state_of(state["properties"], "TensorProperties")[0], _numbers(state["size"])
            nbytes += math.prod(size) * dtype.itemsize
            chunks = (_state_of(chunk, "ChunkStorageMetadata") for chunk in state["chunks"])
            boxes = [(chunk["offsets"], chunk["sizes"]) for chunk in chunks]
            if not all(len(offsets) == len(sizes) == len(size) for offsets, sizes in boxes):
                raise ValueError(f"pieces of {fqn} have other dims")
        pieces = [number for at, sizes in boxes for number in (*places.pop((fqn, at)), *(at or ()), *sizes)]
        values[fqn] = paths.pop(fqn), dtype and str(dtype)[6:], size, json.dumps(pieces)
    # Before memory of these sizes is asked for.
    if places or paths or nbytes > sum(saved.bytes for saved in files.values()):
        raise ValueError(f"values have no place or path, or two, or {nbytes:,} bytes, more than its files")
    return json.dumps(values)


class DataReader(FileSystemReader):
    """A reader of the ``files`` of a checkpoint, and of no others.

    Attributes:
        metadata: What ``text``, of ``read_description``, says of all values; with the pieces of those that were found.
    """

    def __init__(self, folder: Path | StoredFolder, files: Mapping[str, FileSum], text: str) -> None:
        super().__init__(str(folder))
        self.fs = _FilesIn(folder)
        self._folder = folder
        self._files = sorted(files.items())
        self._texts: dict[str, str] = {}
        self._pieces: dict[str, list[int]] = {}
        found, paths = dict[str, Any](), dict[str, Any]()
        for fqn, (path, dtype, size, self._texts[fqn]) in json.loads(text).items():
            found[fqn], paths[fqn] = BytesStorageMetadata(), tuple(path)
            if dtype is not None:
                found[fqn] = TensorStorageMetadata(TensorProperties(getattr(torch, dtype)), torch.Size(size), [])
        self.metadata = Metadata(found, paths, {})

    def find_faults(self, flat: Mapping[str, Any]) -> list[str]:
        """Find the pieces of values, by flat name, of which this rank has a part; return a line if a piece is wrong.

        All pieces of each value have to be in the files, and to have each of its elements once. Not collective.
        """
        for fqn, value in flat.items():
            local = value._local_tensor if isinstance(value, DTensor) else value
            if local is None or local.numel() or not value.numel():
                try:
                    self._find(fqn)
                # As above.
                except Exception as error:
                    return [f"{METADATA} does not describe {fqn}: {_told(error)}"]
        return []

    def _find(self, fqn: str) -> None:
        entry: Any = self.metadata.state_dict_metadata[fqn]
        is_tensor = isinstance(entry, TensorStorageMetadata)
        size, itemsize = (entry.size, entry.properties.dtype.itemsize) if is_tensor else ((), 0)
        stop, boxes = 3 + len(size), []
        self._pieces[fqn] = pieces = json.loads(self._texts[fqn])
        for piece in zip(*[iter(pieces)] * (stop + len(size)), strict=True):
            boxes.append((_numbers(piece[3:stop]), _numbers(piece[stop:])))
            name, saved = self._files[piece[0]]
            if sum(_numbers(piece[1:3])) > saved.bytes or piece[2] < math.prod(boxes[-1][1]) * itemsize:
                raise ValueError(f"a piece has no place in {name}, or too small a one")
        if not (is_covered(size, tuple(boxes)) if is_tensor else len(boxes) == 1):
            raise ValueError("pieces are missing, doubled or outside of it")
        if is_tensor:
            entry.chunks[:] = [ChunkStorageMetadata(*box) for box in boxes]

    def read_into(self, flat: dict[str, Any]) -> None:
        """Read values, by flat name, in place: the pieces that this rank has, which were found. Not collective."""
        planner = _DataPlanner(self._folder)
        planner.set_up_planner(flat, self.metadata)
        items = planner.create_local_plan().items
        self.storage_data = {item.storage_index: self._place_of(item.storage_index) for item in items}
        # Values other than tensors come first: all ranks read the same, and raise the same error.
        for kind in (LoadItemType.BYTE_IO, LoadItemType.TENSOR):
            self.read_data(LoadPlan([item for item in items if item.type is kind]), planner).wait()

    def _place_of(self, index: MetadataIndex) -> Any:
        at = (index.index or 0) * (3 + 2 * len(index.offset or ()))
        number, start, length = self._pieces[index.fqn][at : at + 3]
        name = self._files[number][0]
        return SimpleNamespace(relative_path=name, offset=start, length=length, transform_descriptors=None)


class _FilesIn(FileSystem):
    def __init__(self, folder: Path | StoredFolder) -> None:
        self._folder = folder

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with open_in(self._folder, Path(path).name) as file:
            yield file


class _Held:
    """An object in place of any that ``.metadata`` names: its state, which its class does not take."""

    state: Any = None

    def __init__(self, *_: object) -> None:
        """Take what another class would be called with."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes plain values, and objects that do nothing, whatever a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        known = {"Size": tuple}.get(name, getattr(torch, name, None) if module == "torch" else None)
        return known if known is tuple or isinstance(known, torch.dtype) else type(name, (_Held,), {})


def _state_of(held: Any, kind: str) -> Any:
    if type(held).__name__ != kind or not isinstance(held, _Held):
        raise ValueError(f"it has {type(held).__name__} for {kind}")
    return held.state


@lru_cache(2**14)
def _numbers(values: Any) -> torch.Size:
    if type(values) is not tuple or not all(type(one) is int and 0 <= one < 2**63 for one in values):
        raise ValueError(f"it has {values!r:.100} for sizes")
    return torch.Size(values)


def _check_paths(paths: Mapping[str, Any]) -> None:
    """Raise unless the path of each flat name is one, and all of them make a tree."""
    for key, path in paths.items():
        # A number is an index of a list, which is filled up to it.
        is_path = type(path) is tuple and all(type(one) is str or one in range(len(paths)) for one in path)
        if not is_path or key != ".".join(map(str, path)):
            raise ValueError(f"the path of {key!r:.100} is {path!r:.100}")
    unflatten_state_dict(dict.fromkeys(paths), paths)


@lru_cache(2**10)
def is_covered(size: torch.Size, boxes: tuple[tuple[torch.Size, torch.Size], ...]) -> bool:
    """Say whether boxes (offsets, sizes) cover a tensor, each element once.

    They do if they hold as many elements, and each corner that is none of the tensor's is one of an even number of
    boxes: then they cover each element an odd number of times.
    """
    if not all(len(at) == len(sizes) == len(size) for at, sizes in boxes):
        return False
    ends = [tuple(map(add, at, sizes)) for at, sizes in boxes]
    cut = [dim for dim, whole in enumerate(size) if any(sizes[dim] != whole for _, sizes in boxes)]
    is_inside = len(cut) <= _MAX_CUT_DIMS and all(all(map(le, end, size)) for end in ends)
    odd: set[tuple[int, ...]] = set()
    for start, end in [((0,) * len(size), size), *((at, end) for (at, _), end in zip(boxes, ends, strict=True))]:
        if is_inside and all(map(lt, start, end)):
            odd ^= set(product(*((start[dim], end[dim]) for dim in cut)))
    return is_inside and not odd and sum(math.prod(sizes) for _, sizes in boxes) == math.prod(size)


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


def check_fit(metadata: Metadata, saved: Sequence[OptimizerNames], every: NamesOnAll, names: Names | None) -> None:
    """Raise one error that lists all differences between a checkpoint and the model and optimizers to load.

    Without optimizers in ``every`` only the model is checked. ``names`` are those of the call.
    """
    _check_materialized(every.values)

    def is_picked(name: str) -> object:
        # A function may pick saved names that the model has not, which is a difference.
        return names is None or name in every.picked or (callable(names) and names(name))

    sizes: dict[str, torch.Size | None] = {}
    for key, path in metadata.planner_data.items():
        entry = metadata.state_dict_metadata[key]
        if path[0] == "model" and is_picked(str(path[1])):
            sizes[path[1]] = entry.size if isinstance(entry, TensorStorageMetadata) and len(path) == 2 else None
    expected = {name: value if isinstance(value, torch.Tensor) else None for name, value in every.values.items()}
    found = find_differences(expected, sizes.keys() - every.elsewhere, sizes.__getitem__)
    current = every.optimizers
    lines = optimizer_differences(picked_of(saved, is_picked), current) if current else []
    nested = unflatten_state_dict(dict.fromkeys(metadata.planner_data), metadata.planner_data).get("optimizer", {})
    groups = nested.get("param_groups", [])
    if len(groups) != sum(len(one.groups) for one in saved) or not all(isinstance(one, dict) for one in groups):
        lines.append(f"{METADATA} describes {len(groups)} param groups, {MANIFEST} others")
    replace(found, unfit=(*found.unfit, *lines)).check(strict=True, is_checkpoint=True)


def targets(metadata: Metadata, model: nn.Module, optimizers: Optimizers, every: NamesOnAll) -> dict[str, Any]:
    """Return the tensors that what is picked of a checkpoint is read into, by flat name.

    Tensors are the model's own, and new ones for optimizer state, which are cut like their parameters, in the dtypes
    that were saved. ``None``: the value is no tensor. Names that only other ranks have are left out.
    """
    params = {name: param for param, name in names_of_params(model).items() if name in every.picked}
    flat: dict[str, Any] = {}
    for key, path in metadata.planner_data.items():
        entry = metadata.state_dict_metadata[key]
        match path:
            case ("model", name, *_) if name in every.values:
                held = every.values[name]
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


def apply(
    flat: dict[str, Any], metadata: Metadata, model: nn.Module, optimizers: Optimizers, picked: Collection[str]
) -> None:
    """Load the values that were read into ``targets`` into the model and the optimizers; others stay."""
    nested: dict[str, Any] = unflatten_state_dict(flat, metadata.planner_data)
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

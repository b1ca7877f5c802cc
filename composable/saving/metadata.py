"""What ``.metadata`` of ``torch.distributed.checkpoint`` says, read without running anything that is in it.

The file is a pickle, and unpickling runs what the file names. Here it builds inert stand-ins of a few
classes, known by name; what they hold is checked, and the objects that torch's loader wants are made
from it. So a hostile file can be wrong, but neither runs code nor leads out of its folder.

Nothing here communicates.
"""

import math
import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from composable.errors import ConfigError
from composable.torch_private import StorageInfo

__all__ = ["CheckedReader", "read_metadata"]

_TORCH = "torch.distributed.checkpoint.metadata"
_STAND_INS = {
    *((_TORCH, cls.__name__) for cls in (BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex)),
    *((_TORCH, cls.__name__) for cls in (StorageMeta, TensorProperties, TensorStorageMetadata)),
    (_TORCH, "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    # The name of the folder while it was written; Python 3.13 has it in another module.
    *((module, cls) for module in ("pathlib", "pathlib._local") for cls in ("PosixPath", "WindowsPath")),
}


class CheckedReader(FileSystemReader):
    """Reads the files of a checkpoint by metadata that has been checked, not by what its folder holds."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._checked = metadata

    def read_metadata(self, *_: Any) -> Metadata:
        """Return the checked metadata."""
        return self._checked


def read_metadata(path: Path, file_bytes: Mapping[str, int]) -> Metadata:
    """Return what the file ``path`` says.

    Args:
        path: Of a ``.metadata``.
        file_bytes: The length of each file of the checkpoint, by name: values lie in these and nowhere else.

    Raises:
        ConfigError: It is no such file, names what is none of a checkpoint's classes, or contradicts itself.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        try:
            return _metadata(_Unpickler(file).load(), file_bytes)
        except OSError:
            raise
        # Whatever a broken pickle makes Python raise.
        except Exception as error:
            raise ConfigError(
                f"{path} does not describe a checkpoint: {error or type(error).__name__}",
                fix="load another checkpoint, and do not trust where this one is from",
            ) from None


class _Part:
    """Stands in for an object of torch: keeps what the file gives it, and does nothing."""

    kind = ""

    def __new__(cls, *args: Any) -> "_Part":
        part = object.__new__(cls)
        part.args, part.state = args, None
        return part

    args: tuple[Any, ...]
    state: Any

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        # A class of its own for each time: what the file does to one, it does to nobody else.
        return type(name, (_Part,), {"kind": name})

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it names objects outside of it")


def _metadata(root: Any, file_bytes: Mapping[str, int]) -> Metadata:
    fields = _fields(root, "Metadata")
    entries = {_text(key): _entry(value) for key, value in _dict(fields["state_dict_metadata"]).items()}
    paths = {_text(key): _path(value) for key, value in _dict(fields["planner_data"]).items()}
    if paths.keys() != entries.keys():
        raise ValueError("its values and their places have different names")
    places = dict(_place(key, value) for key, value in _dict(fields["storage_data"]).items())
    held_bytes: Counter[str] = Counter()
    for key, entry in entries.items():
        for place in _stored(key, entry, places, file_bytes):
            held_bytes[place.relative_path] += place.length
    # What is made room for is on the disk: nowhere are the same bytes named for many values.
    if any(length > file_bytes[name] for name, length in held_bytes.items()):
        raise ValueError("its values share their place in the files")
    return Metadata(entries, paths, places, StorageMeta())


def _entry(part: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(part, _Part) and part.kind == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(part, "TensorStorageMetadata")
    properties = fields["properties"]
    if not (isinstance(properties, _Part) and properties.kind == "TensorProperties"):
        raise ValueError("a tensor has no properties")
    state = properties.state
    dtype = state[0] if isinstance(state, tuple) and state else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no dtype")
    size = _size(fields["size"])
    chunks = []
    for chunk in _list(fields["chunks"]):
        held = _fields(chunk, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(_size(held["offsets"]), _size(held["sizes"])))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _place(index: Any, info: Any) -> tuple[MetadataIndex, StorageInfo]:
    key, where = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
    offset = key.get("offset")
    if where.get("transform_descriptors"):
        raise ValueError("its values are compressed")
    return (
        MetadataIndex(_text(key["fqn"]), None if offset is None else _size(offset)),
        StorageInfo(_text(where["relative_path"]), _number(where["offset"]), _number(where["length"])),
    )


def _stored(
    key: str,
    entry: TensorStorageMetadata | BytesStorageMetadata,
    places: Mapping[MetadataIndex, StorageInfo],
    file_bytes: Mapping[str, int],
) -> list[StorageInfo]:
    """Return where an entry lies; raise unless every element of it lies somewhere in the files, once."""
    offsets: Iterable[torch.Size | None] = [None]
    if isinstance(entry, TensorStorageMetadata):
        if not _is_cut(entry):
            raise ValueError(f"the pieces of {key!r} do not make the whole")
        # Pieces without elements may begin where others do; they lie in one place.
        offsets = dict.fromkeys(chunk.offsets for chunk in entry.chunks)
    found = [places[MetadataIndex(key, offset)] for offset in offsets]
    if isinstance(entry, TensorStorageMetadata):
        held = sum(place.length for place in found)
        if entry.size.numel() * entry.properties.dtype.itemsize > held:
            raise ValueError(f"{key!r} is larger than its pieces")
    for place in found:
        if place.relative_path not in file_bytes:
            raise ValueError(f"{key!r} lies in {place.relative_path!r}, which is no file of the checkpoint")
        if place.offset + place.length > file_bytes[place.relative_path]:
            raise ValueError(f"{key!r} lies beyond the end of {place.relative_path}")
    return found


def _is_cut(entry: TensorStorageMetadata) -> bool:
    """Say whether the pieces cover the tensor, each element once."""
    size, chunks, dims = entry.size, entry.chunks, range(len(entry.size))
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(size):
            return False
        if any(chunk.offsets[dim] + chunk.sizes[dim] > size[dim] for dim in dims):
            return False
    if not chunks or sum(chunk.sizes.numel() for chunk in chunks) != size.numel():
        return False
    # Along the dimension with most cuts, where few pieces are side by side.
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=0)
    beside: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]) if size else ():
        beside = [one for one in beside if one.offsets[along] + one.sizes[along] > chunk.offsets[along]]
        if any(_overlap(one, chunk) for one in beside):
            return False
        beside.append(chunk)
    return True


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        max(a, b) < min(a + m, b + n)
        for a, m, b, n in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    )


# -- what the stand-ins hold


def _fields(part: Any, kind: str) -> dict[str, Any]:
    if not (isinstance(part, _Part) and part.kind == kind):
        raise ValueError(f"something else where a {kind} belongs")
    return _dict(part.state)


def _size(part: Any) -> torch.Size:
    if not (isinstance(part, _Part) and part.kind == "Size" and len(part.args) == 1 and type(part.args[0]) is tuple):
        raise ValueError("something else where a Size belongs")
    size = torch.Size([_number(dim) for dim in part.args[0]])
    if math.prod(size) >= 2**56:
        raise ValueError(f"a size of {list(size)}")
    return size


def _path(value: Any) -> tuple[str | int, ...]:
    if not (type(value) is tuple and value and all(type(part) in (str, int) for part in value)):
        raise ValueError("something else where the place of a value belongs")
    return value


def _dict(value: Any) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ValueError(f"a {type(value).__name__} where a dict belongs")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"a {type(value).__name__} where a list belongs")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} where a string belongs")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{value!r:.40} where a length belongs")
    return value

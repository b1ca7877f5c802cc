"""Files that are written so that they last, and read so that they do no harm.

What is written is synced, with length and CRC-32 noted, which find accidents. What is read may be anybody's: it
is taken for data, and names in it are names of files beside it. The pickle ``.metadata`` of
``torch.distributed.checkpoint`` may name a few classes that hold data, and no others.
So a hostile file can be wrong, but neither runs code nor leads out of its folder.

Nothing here communicates.
"""

import io
import os
import pickle
import re
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from composable.errors import ComposableError, ConfigError, place_of_rank

__all__ = [
    "DISTRUST",
    "CheckedReader",
    "FileSum",
    "SummedFiles",
    "as_data",
    "check_inside",
    "file_name",
    "find_damage",
    "read_data",
    "read_metadata",
    "sync_folder",
    "write_summed",
]

# What to do about a file that was made up.
DISTRUST = "load another checkpoint, and do not trust where this one is from"
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


# -- writing


@dataclass(frozen=True)
class FileSum:
    """Length and CRC-32 of a file."""

    bytes: int
    crc32: int


class SummedFiles(FileSystem):
    """The file system of a ``FileSystemWriter``: notes length and CRC-32 of what it writes, and syncs it.

    Attributes:
        sums: Of every file written, by name.
    """

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Open a file; only whole writes are summed."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        raw = _SummedFile(os.fspath(path), "w")
        try:
            with io.BufferedWriter(raw) as file:
                yield file
                if not file.closed:
                    file.flush()
                    os.fsync(file.fileno())
        except Exception as error:
            if raw.failure is None:
                raise
            # torch says instead what became of its archive.
            raise OSError(raw.failure.errno, raw.failure.strerror, os.fspath(path)) from error
        self.sums[Path(path).name] = FileSum(raw.written_bytes, raw.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written here."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _SummedFile(io.FileIO):
    written_bytes = 0
    crc32 = 0
    failure: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            written = super().write(view)
        except OSError as error:
            self.failure = error
            raise
        self.crc32 = zlib.crc32(view[:written], self.crc32)
        self.written_bytes += written
        return written


def write_summed(path: Path, content: bytes) -> FileSum:
    """Write and sync a file."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(len(content), zlib.crc32(content))


def sync_folder(path: Path) -> None:
    """Make the names in a folder last through a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- names and bytes


def file_name(name: Any) -> str:
    """Return ``name``, which a file gave; raises ``ValueError`` unless it is the name of a file beside it."""
    is_name = type(name) is str and name == Path(name).name and name not in ("", ".", "..")
    if not is_name or {"\\", "\0"} & set(name):
        raise ValueError(f"{name!r:.80} is no name of a file in this folder")
    return str(name)


def check_inside(folder: Path, path: Path) -> None:
    """Raise if ``path`` is a link that leads out of ``folder``."""
    # A hub's cache keeps what its snapshots, and the folders in them, link to beside them.
    snapshots = next((parent for parent in folder.absolute().parents if parent.name == "snapshots"), None)
    roots = [folder] if snapshots is None else [folder, snapshots.parent / "blobs"]
    if path.is_symlink() and not any(path.resolve().is_relative_to(root.resolve()) for root in roots):
        raise ConfigError(
            f"{path} is a link out of its folder, to {path.resolve()}",
            at=place_of_rank(),
            fix="copy the file itself, if you trust where it is from",
        )


def find_damage(folder: Path, files: Mapping[str, FileSum]) -> list[str]:
    """Read ``files`` and return a line for each that is not what was written."""
    lines = []
    for name, saved in files.items():
        path = folder / name
        try:
            check_inside(folder, path)
            found = path.stat().st_size
            if not path.is_file():
                lines.append(f"{path} is no file")
            elif found != saved.bytes:
                lines.append(f"{path} has {found:,} bytes; {saved.bytes:,} were written")
            elif _crc32(path) != saved.crc32:
                lines.append(f"{path} has changed: its {found:,} bytes are not those that were written")
        except ConfigError as error:
            lines.append(error.what)
        except FileNotFoundError:
            lines.append(f"{path} is missing")
        except OSError as error:
            lines.append(f"{path} cannot be read: {error}")
    return lines


def _crc32(path: Path) -> int:
    crc32 = 0
    chunk = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            crc32 = zlib.crc32(chunk[:count], crc32)
    return crc32


# -- data


def as_data(value: object, name: str) -> bytes:
    """Return ``value`` as ``torch.load(weights_only=True)`` reads it; raises where that would not.

    Args:
        value: Tensors of any shape and dtype, numbers, strings, and lists, tuples and dicts of them.
        name: What messages call it.
    """
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


def read_data(source: Path | io.BytesIO, name: str, *, to: torch.device | str = "cpu") -> Any:
    """Return what ``as_data`` packed; what was on a device is on ``to``. Whatever ``source`` holds, no code is run.

    Raises where it holds something else, or cannot be read; ``name`` says in the message where it is from.
    """

    def moved(storage: Any, place: str) -> Any:
        return storage if place == "cpu" else storage.to(device=to)

    try:
        return torch.load(source, moved, weights_only=True)
    except OSError:
        raise
    # Whatever a broken archive or pickle makes torch raise.
    except Exception as error:
        raise ConfigError(f"{name} cannot be read as data: {_without_advice(error)}", fix=DISTRUST) from None


def _without_advice(error: Exception) -> str:
    """Return what is wrong with a pickle; torch goes on to advise how to run the code in it."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is not None:
        return f"it names {named[1]}"
    if isinstance(error, pickle.UnpicklingError):
        return "it holds what is no data"
    if isinstance(error, ComposableError):
        return error.what
    return str(error).strip().partition("\n")[0] or type(error).__name__


# -- torch's description of a checkpoint


class CheckedReader(FileSystemReader):
    """Reads the files of a checkpoint by metadata that has been checked, not by what its folder holds."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._checked = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the checked metadata."""
        return self._checked


def read_metadata(path: Path, file_bytes: Mapping[str, int]) -> Metadata:
    """Return what the file ``path``, a ``.metadata``, says; raises where it is none, or names other files.

    Args:
        path: Of the checkpoint.
        file_bytes: The length of each of its files, by name: values lie in these and nowhere else.
    """
    with path.open("rb") as file:
        try:
            found: Metadata = _Unpickler(file).load()
            for place in found.storage_data.values():
                if place.relative_path not in file_bytes:
                    raise ValueError(f"values lie in {place.relative_path!r:.80}, which is no file of the checkpoint")
            if found.planner_data.keys() != found.state_dict_metadata.keys():
                raise ValueError("its values and their places have different names")
            # What room is made for is on the disk, and lists are no longer than what is put into them.
            most_bytes, count = sum(file_bytes.values()), len(found.planner_data)
            for name, entry in found.state_dict_metadata.items():
                nbytes = 0
                if isinstance(entry, TensorStorageMetadata):
                    nbytes = entry.size.numel() * entry.properties.dtype.itemsize
                if not 0 <= nbytes <= most_bytes:
                    raise ValueError(f"{name!r} is larger than the files")
                if any(type(part) is int and part >= count for part in found.planner_data[name]):
                    raise ValueError(f"{name!r} has no place")
            return found
        except OSError:
            raise
        # Whatever a broken pickle makes Python raise.
        except Exception as error:
            what = f"{path} does not describe a checkpoint: {error or type(error).__name__}"
            raise ConfigError(what, fix=DISTRUST) from None


class _Unpickler(pickle.Unpickler):
    """Makes objects of a few classes that hold data, and of no other."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _CLASSES_OF_METADATA:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it names objects outside of it")

"""Full weights as safetensors files, the format that model hubs and inference engines read.

Files are written value by value, so that memory stays bounded whatever their size, and read value by
value. Nothing is visible under its final name before it is whole.

Source: format and layout of several files, https://huggingface.co/docs/safetensors.
"""

import ctypes
import importlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable.arguments import as_path, check_bool
from composable.errors import ConfigError, place_of_rank
from composable.ragged import cast_dtype
from composable.saving.entries import Entries, batches, entries_now, entries_of, ranks_of
from composable.saving.full_state import (
    IncompatibleKeys,
    check_float,
    gather_values,
    load_full_state_dict,
    max_bytes_of,
)
from composable.saving.manifest import check_inside, file_name
from composable.saving.run_folder import sync_folder
from composable.saving.selection import Names

__all__ = ["load_safetensors", "save_safetensors"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@torch.no_grad()
def save_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5_000_000_000,
    dtype: torch.dtype | None = None,
    names: Names | None = None,
) -> None:
    """Write the full weights of ``model``, from the first rank that shares it.

    Collective: all ranks that share the model, between steps. The first rank allocates at most as much as for
    ``full_state_dict`` beside its result, and no result.

    Args:
        model: Annotated by ``fully_shard`` or ``replicate``, or with annotated modules below it.
        path: On the first rank: a file ``*.safetensors``, which is replaced if it exists, or a folder, which gets
            ``model.safetensors``, or several files and ``model.safetensors.index.json``.
        max_shard_bytes: Of values in one file of a folder; a larger value gets a file of its own.
        dtype: Of floating-point values; default: their own.
        names: Which entries, such as adapters alone: a function that says of each FQN, as in ``state_dict()``,
            whether it is wanted, or a list or set of them. All ranks alike. Default: all.

    Parameters and persistent buffers are written; of several names for one tensor only the first that is wanted, with
    the others in the file's metadata.

    Raises:
        ConfigError: The folder holds weights already; an entry is no tensor or of a dtype that the format does not
            know; ``names`` wants nothing; an argument is wrong.
        UsageError: The model is not annotated, a forward or backward runs, or parameters are on the meta device.
        DesyncError: The ranks made different calls, ``names`` wants other entries on other ranks, or writing failed on
            the first rank, which raises what happened.
    """
    model_ranks = ranks_of(model, names)
    ranks = model_ranks.everyone
    with ranks.agreed():
        check_float(dtype)
        if isinstance(max_shard_bytes, bool) or not isinstance(max_shard_bytes, int) or max_shard_bytes < 1:
            raise ConfigError(f"max_shard_bytes is {max_shard_bytes!r}", fix="pass a positive number of bytes")
    entries = entries_of(model, ranks, ("save_safetensors", max_shard_bytes, dtype), names=names)
    values, aliases = _split_ties(entries)
    with ExitStack() as stack:
        writer: _Writer | None = None
        with ranks.agreed(), _telling(path):
            _check_entries(entries, values, dtype)
            if ranks.rank == 0:
                target = as_path("path", path)
                limit = None if target.suffix == ".safetensors" else max_shard_bytes
                writer = stack.enter_context(_writing(target, _plan_files(values, aliases, dtype, limit)))
        for batch in batches(values.items(), max_bytes_of(entries)):
            cpu = torch.device("cpu")
            fulls = gather_values([tensor for _, tensor in batch], model_ranks, 0, dtype=dtype, device=cpu)
            with ranks.agreed(), _telling(path):
                for (key, _), full in zip(batch, fulls or ()):
                    assert writer is not None, "the first rank writes"
                    writer.write(key, full)
            # Before the next ones are gathered.
            del fulls
        with ranks.agreed(), _telling(path):
            if writer is not None:
                writer.publish()


@torch.no_grad()
def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, names: Names | None = None
) -> IncompatibleKeys:
    """Load full weights from safetensors files that the first rank reads.

    Collective: all ranks that share the model, between steps. Memory and checks are those of ``load_full_state_dict``.
    A tied parameter needs only one of its names.

    Args:
        model: Annotated by ``fully_shard`` or ``replicate``, or with annotated modules below it.
        path: On the first rank: a file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json``.
        strict: Every key of the model has to be there, and no other.
        names: Load a part of the model, such as adapters, and let that stand for the model in ``strict``: a function
            that says of each FQN whether it is part of it, or a list or set of them. All ranks alike. Default: all.

    Returns:
        The missing and unexpected keys, on every rank; empty if ``strict``.

    Raises:
        ConfigError: On every rank: the safetensors library is not installed, a file is missing, truncated or
            corrupt, keys do not fit, all in one error, or ``names`` wants nothing. Nothing was changed.
        UsageError: The model is not annotated, a forward or backward runs, or parameters are on the meta device.
        DesyncError: The ranks made different calls, or ``names`` wants other entries on other ranks.
    """
    ranks = ranks_of(model, names).everyone
    files: _Files | None = None
    with ExitStack() as stack:
        with ranks.agreed():
            check_bool("strict", strict)
            if ranks.rank == 0:
                files = _Files.open(as_path("path", path), stack, entries_now(model).picked(names))
        return load_full_state_dict(model, files, strict=strict, names=names)


# -- writing


@dataclass
class _File:
    """One file that is planned: where each value's bytes go, counted from the end of the header."""

    name: str
    spans: dict[str, tuple[int, int]]
    header: bytes


class _Writer:
    """Writes values into files under temporary names."""

    def __init__(self, folder: Path, files: list[_File], final: Path, index: bytes | None) -> None:
        self.folder = folder
        self._files = files
        self._final = final
        self._index = index
        self._open: dict[str, Any] = {}
        self._file_of = {key: file for file in files for key in file.spans}

    def start(self) -> None:
        for file in self._files:
            handle = (self.folder / file.name).open("wb")
            self._open[file.name] = handle
            handle.write(len(file.header).to_bytes(8, "little") + file.header)

    def write(self, key: str, value: torch.Tensor) -> None:
        file = self._file_of[key]
        handle = self._open[file.name]
        handle.seek(8 + len(file.header) + file.spans[key][0])
        if value.nbytes:
            # The format knows no strides. Through its address: numpy, torch's other way to the bytes, may be missing.
            value = value.contiguous()
            handle.write((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))

    def close(self) -> None:
        for handle in self._open.values():
            with suppress(OSError):  # What was published is on disk: this is a disk that has refused before.
                handle.close()

    def publish(self) -> None:
        """Make the files durable, then visible under their names."""
        for handle in self._open.values():
            handle.flush()
            os.fsync(handle.fileno())
        self.close()
        if self._final.suffix == ".safetensors":
            (self.folder / self._files[0].name).replace(self._final)
        else:
            self._final.mkdir(parents=True, exist_ok=True)
            for file in self._files:
                (self.folder / file.name).rename(self._final / file.name)
            if self._index is not None:
                # Last: a folder without it is no checkpoint.
                partial = self.folder / _INDEX
                partial.write_bytes(self._index)
                partial.rename(self._final / _INDEX)
        sync_folder(self._final.parent if self._final.suffix == ".safetensors" else self._final)


@contextmanager
def _telling(path: str | os.PathLike[str]) -> Iterator[None]:
    """Say which path it was that could not be written: a full disk names none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


@contextmanager
def _writing(target: Path, files: list[_File]) -> Iterator[_Writer]:
    """Give a writer whose temporary files are gone afterwards, whatever happens."""
    index = None
    if target.suffix != ".safetensors":
        held = sorted(str(found) for found in target.glob("model*.safetensors*"))
        if held:
            raise ConfigError(f"{target} holds weights already: {held[0]}", fix="pass a new folder, or remove them")
        if len(files) > 1:
            weight_map = {key: file.name for file in files for key in file.spans}
            total = sum(stop - start for file in files for start, stop in file.spans.values())
            content = {"metadata": {"total_size": total}, "weight_map": weight_map}
            index = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    folder = target.with_name(f".partial-{target.name}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    writer = _Writer(folder, files, target, index)
    try:
        writer.start()
        yield writer
    finally:
        writer.close()
        shutil.rmtree(folder, ignore_errors=True)


def _plan_files(
    values: Mapping[str, torch.Tensor], aliases: Mapping[str, str], dtype: torch.dtype | None, max_bytes: int | None
) -> list[_File]:
    """Say which value goes where; ``max_bytes`` of ``None``: all into one file."""
    groups: list[dict[str, torch.Tensor]] = [{}]
    total = 0
    for key, tensor in values.items():
        size = _nbytes(tensor, dtype)
        if max_bytes is not None and groups[-1] and total + size > max_bytes:
            groups.append({})
            total = 0
        groups[-1][key] = tensor
        total += size
    count = len(groups)
    names = [_SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return [_plan_file(name, group, aliases, dtype) for name, group in zip(names, groups, strict=True)]


def _plan_file(
    name: str, values: Mapping[str, torch.Tensor], aliases: Mapping[str, str], dtype: torch.dtype | None
) -> _File:
    # Widest elements first, so that every value is aligned when the file is mapped.
    order = sorted(values, key=lambda key: -cast_dtype(values[key], dtype).itemsize)
    spans: dict[str, tuple[int, int]] = {}
    stop = 0
    for key in order:
        start, stop = stop, stop + _nbytes(values[key], dtype)
        spans[key] = (start, stop)
    header: dict[str, Any] = {
        "__metadata__": {"format": "pt"} | {alias: key for alias, key in aliases.items() if key in values}
    }
    for key, span in spans.items():
        tensor = values[key]
        header[key] = {
            "dtype": _DTYPES[cast_dtype(tensor, dtype)],
            "shape": list(tensor.shape),
            "data_offsets": list(span),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    return _File(name, spans, text + b" " * (-len(text) % 8))


def _nbytes(tensor: torch.Tensor, dtype: torch.dtype | None) -> int:
    return tensor.numel() * cast_dtype(tensor, dtype).itemsize


def _split_ties(entries: Entries) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors under their first names, and for each other name the first one."""
    first: dict[int, str] = {}
    values: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    for key, tensor in entries.tensors().items():
        name = first.setdefault(id(tensor), key)
        if name == key:
            values[key] = tensor
        else:
            aliases[key] = name
    return values, aliases


def _check_entries(entries: Entries, values: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> None:
    others = [key for key, value in entries.values.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ConfigError(
            f"safetensors files hold tensors only, and these are none: {', '.join(others)}",
            fix="use full_state_dict and torch.save",
        )
    unknown = [f"{key} {value.dtype}" for key, value in values.items() if cast_dtype(value, dtype) not in _DTYPES]
    if unknown:
        raise ConfigError(
            f"safetensors has no name for the dtype of {', '.join(unknown)}", fix="cast it, or use torch.save"
        )


# -- reading


@dataclass
class _Files(Mapping[str, torch.Tensor]):
    """The values of one or several files, read on demand.

    Attributes:
        path_of: The file of each key.
        aliases: Other names of tied tensors, and under which one the files have them.
    """

    path_of: dict[str, Path]
    handles: dict[Path, Any]
    aliases: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def open(path: Path, stack: ExitStack, entries: Entries) -> "_Files":
        try:
            library: Any = importlib.import_module("safetensors")
        except ImportError as error:
            raise ConfigError(
                "the safetensors library is not installed", fix="pip install 'torch-composable[safetensors]'"
            ) from error
        paths = _find_files(path)
        handles = {}
        for one in paths:
            with _naming(one):
                handles[one] = stack.enter_context(library.safe_open(str(one), framework="pt", device="cpu"))
        path_of = {key: one for one, handle in handles.items() for key in handle.keys()}  # noqa: SIM118  # no mapping
        found = _Files(path_of, handles)
        found.aliases = _missing_names(entries, path_of)
        return found

    def shape_of(self, key: str) -> torch.Size:
        name = self.aliases.get(key, key)
        with _naming(self.path_of[name]):
            return torch.Size(self.handles[self.path_of[name]].get_slice(name).get_shape())

    def __getitem__(self, key: str) -> torch.Tensor:
        name = self.aliases.get(key, key)
        with _naming(self.path_of[name]):
            value: torch.Tensor = self.handles[self.path_of[name]].get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        yield from self.path_of
        yield from self.aliases

    def __len__(self) -> int:
        return len(self.path_of) + len(self.aliases)


def _find_files(path: Path) -> list[Path]:
    index = path / _INDEX
    if index.is_file():
        with _naming(index):
            names = sorted({file_name(name) for name in json.loads(index.read_text())["weight_map"].values()})
        paths = [path / name for name in names]
    else:
        paths = [path / _SINGLE if path.is_dir() else path]
    absent = [str(one) for one in paths if not one.is_file()]
    if absent:
        raise ConfigError(
            f"there is no file {', '.join(absent)}",
            at=place_of_rank(),
            fix=f"pass a .safetensors file, or a folder with {_SINGLE} or {_INDEX}",
        )
    if path.is_dir():
        for one in paths:
            check_inside(path, one)
    return paths


def _missing_names(entries: Entries, known: Mapping[str, Path]) -> dict[str, str]:
    """Return the names of tied tensors that the files lack, each with one that they have."""
    names: dict[int, list[str]] = {}
    for key, tensor in entries.tensors().items():
        names.setdefault(id(tensor), []).append(key)
    ties = [(key, next((k for k in tied if k in known), None)) for tied in names.values() for key in tied]
    return {key: name for key, name in ties if name is not None and key not in known}


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Make an error in reading one that names the file."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", at=place_of_rank(), fix="fetch or write it again"
        ) from error

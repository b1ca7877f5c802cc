"""Full weights as safetensors files.

Files are written and read value by value, so that memory stays bounded for files of any size. A file
gets its final name only when it is whole.

Source: format and layout of several files, https://huggingface.co/docs/safetensors.
"""

import ctypes
import importlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from composable.dtensor import cast_dtype
from composable.errors import ConfigError
from composable.ground.names import check_bool, check_int, list_text
from composable.runs.storage import Storage, StoredFolder, folder_at, sync_folder, write_summed
from composable.saving import (
    Entries,
    IncompatibleKeys,
    Names,
    batches,
    check_float,
    entries_for,
    entries_now,
    gather_values,
    load_full_state_dict,
    ranks_of,
)

MAX_SHARD_BYTES = 5_000_000_000
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
    path: str | os.PathLike[str] | Storage,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    names: Names | None = None,
) -> None:
    """Write the full weights of ``model``, from the first rank that shares it.

    Collective: all ranks that share the model, between steps. The first rank allocates at most as much as
    ``full_state_dict`` does besides its result. Parameters and persistent buffers are written, in their full shapes;
    of several names for one tensor only the first that ``names`` picks, with the others in the file's metadata.

    Args:
        model: Annotated by ``fully_shard`` or ``replicate``, or with annotated modules below it.
        path: On the first rank: a file ``*.safetensors``, which is replaced if it exists, or a folder, which gets
            ``model.safetensors``, or several files and ``model.safetensors.index.json``. A path, a URL, or a
            ``Storage`` as a folder; for these two, files are written to a temporary folder first.
        max_shard_bytes: Most bytes of values in one file of a folder; a larger value gets a file of its own.
        dtype: The dtype of floating-point values in the files; default: their own.
        names: Which entries to write, such as adapters only; as for ``full_state_dict``.

    Raises:
        ConfigError: The folder holds weights already; an entry is no tensor or of a dtype that the format does not
            have; ``names`` picks nothing; an argument is wrong.
        UsageError: The model is not annotated, a forward or backward runs, or parameters are on the meta device.
        DesyncError: The ranks made different calls, ``names`` picks other entries on other ranks, or writing failed on
            the first rank, which raises the cause.
    """
    with entries_for(model, names, "save_safetensors", max_shard_bytes, dtype) as (model_ranks, entries):
        check_float(dtype)
        check_int("max_shard_bytes", max_shard_bytes, 1, fix="pass a positive number of bytes")
    ranks = model_ranks.everyone
    # Of several names for one tensor only the first is written.
    values, first = entries.unique(), entries.first_names()
    aliases = {key: first[id(one)] for key, one in entries.tensors().items() if key not in values}
    cpu = torch.device("cpu")
    with ExitStack() as stack:
        writer: WeightsWriter | None = None
        with ranks.agreed():
            check_types(entries.values, dtype)
            if ranks.rank == 0:
                writer = open_writer(folder_at("path", path), values, stack, aliases, dtype, max_shard_bytes)
        for batch in batches(values.items(), entries.batch_bytes()):
            fulls = gather_values([tensor for _, tensor in batch], model_ranks, 0, dtype=dtype, device=cpu)
            with ranks.agreed():
                if writer is not None and fulls is not None:
                    writer.write(dict(zip([key for key, _ in batch], fulls, strict=True)))
            # Freed before the next values are gathered.
            del fulls
        with ranks.agreed():
            if writer is not None:
                writer.publish()


@torch.no_grad()
def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str] | Storage, *, strict: bool = True, names: Names | None = None
) -> IncompatibleKeys:
    """Load full weights from safetensors files that the first rank reads.

    Collective: all ranks that share the model, between steps. Memory and checks are those of ``load_full_state_dict``.
    A tied parameter needs only one of its names.

    Args:
        model: Annotated by ``fully_shard`` or ``replicate``, or with annotated modules below it.
        path: On the first rank: a file, or a folder with ``model.safetensors`` or ``model.safetensors.index.json``:
            a path, a URL or a ``Storage``, of which files are copied to a temporary folder first.
            Values have the plain model's shapes; other dtypes are cast, as by ``load_full_state_dict``.
        strict: Every key of the model must be there, and no other.
        names: Load a part of the model, such as adapters; as for ``load_full_state_dict``.

    Returns:
        The missing and unexpected keys, on every rank; empty if ``strict``.

    Raises:
        ConfigError: On every rank: the safetensors library is not installed, a file is missing, truncated or
            corrupt, keys do not fit (all in one error), or ``names`` picks nothing. Nothing was changed.
        UsageError: The model is not annotated, a forward or backward runs, or parameters are on the meta device.
        DesyncError: The ranks made different calls, or ``names`` picks other entries on other ranks.
    """
    ranks = ranks_of(model, names).everyone
    files: WeightsFiles | None = None
    with ExitStack() as stack:
        with ranks.agreed():
            check_bool("strict", strict)
            if ranks.rank == 0:
                entries = entries_now(model).picked(names)
                files = open_files(folder_at("path", path), stack)
                files.add_ties(entries)
        return load_full_state_dict(model, files, strict=strict, names=names)


# -- writing


@dataclass(frozen=True)
class _File:
    """The plan of one file: where the bytes of each value begin, the bytes of all values, and the header."""

    name: str
    starts: dict[str, int]
    nbytes: int
    header: bytes


def check_types(values: Mapping[str, Any], dtype: torch.dtype | None = None) -> None:
    """Raise unless the format can hold each value [any shape], cast to ``dtype`` if it has floating-point elements."""
    fit = {key for key, one in values.items() if isinstance(one, torch.Tensor) and cast_dtype(one, dtype) in _DTYPES}
    if unfit := [key for key in values if key not in fit]:
        raise ConfigError(
            f"values that safetensors cannot hold, by type or dtype: {list_text(unfit)}",
            fix="cast them, leave them out by names=, or use full_state_dict and torch.save",
        )


def open_writer(
    place: StoredFolder,
    values: Mapping[str, torch.Tensor],
    stack: ExitStack,
    aliases: Mapping[str, str] | None = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: float = MAX_SHARD_BYTES,
) -> "WeightsWriter":
    """Return a writer of ``values`` [any shapes, also on the meta device] to ``place``, as for ``save_safetensors``.

    When ``stack`` ends, what was not published is removed.
    """
    if not str(place).endswith(".safetensors") and (held := weights_in(place)):
        raise ConfigError(f"{place} holds weights already: {held[0]}", fix="pass a new folder, or remove them")
    target = place.local or Path(stack.enter_context(tempfile.TemporaryDirectory()), place.last or "weights")
    limit = math.inf if target.suffix == ".safetensors" else max_shard_bytes
    writer = WeightsWriter(target, _plan_files(values, aliases or {}, dtype, limit), place)
    stack.callback(writer.close)
    writer.begin()
    return writer


def _plan_files(
    values: Mapping[str, torch.Tensor], aliases: Mapping[str, str], dtype: torch.dtype | None, max_bytes: float
) -> list[_File]:
    """Return the files, of at most ``max_bytes`` each, with the place of each value."""
    groups = [[key for key, _ in batch] for batch in batches(values.items(), max_bytes, dtype)] or [[]]
    count = len(groups)
    names = [_SINGLE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    files = []
    for name, keys in zip(names, groups, strict=True):
        others = {alias: key for alias, key in aliases.items() if key in keys}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"} | others}
        stop = 0
        # Widest elements first, so that every value is aligned when the file is mapped.
        for key in sorted(keys, key=lambda key: -cast_dtype(values[key], dtype).itemsize):
            tensor, kind = values[key], cast_dtype(values[key], dtype)
            start, stop = stop, stop + tensor.numel() * kind.itemsize
            header[key] = {"dtype": _DTYPES[kind], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        starts = {key: 8 + len(text) + header[key]["data_offsets"][0] for key in keys}
        files.append(_File(name, starts, stop, len(text).to_bytes(8, "little") + text))
    return files


def weights_in(place: StoredFolder) -> list[str]:
    """Return the names of the weights in a folder."""
    return sorted(name for name in place.list() if name.startswith("model") and ".safetensors" in name)


class WeightsWriter:
    """A writer of values into files of a hidden folder, which get their final names at the end."""

    def __init__(self, target: Path, files: list[_File], place: StoredFolder) -> None:
        self._target = target
        self._place = place
        self._folder = target.with_name(f".partial-{target.name}")
        self._files = files
        self._opened: dict[str, BinaryIO] = {}

    def begin(self) -> None:
        """Make the files with their headers."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        for file in self._files:
            self._opened[file.name] = (self._folder / file.name).open("wb")
            with self._told(file.name):
                self._opened[file.name].write(file.header)

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Write values [the shapes of the plan], which are on the host, to their places in the files."""
        for file in self._files:
            for key in file.starts.keys() & values.keys():
                # The format has no strides. By address: numpy, torch's other way to the bytes, may be missing.
                value = values[key].contiguous()
                with self._told(file.name):
                    self._opened[file.name].seek(file.starts[key])
                    if value.nbytes:
                        self._opened[file.name].write((ctypes.c_char * value.nbytes).from_address(value.data_ptr()))

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """Name the file in an error of the system, such as that of a full disk."""
        try:
            yield
        except OSError as error:
            if error.errno and not error.filename:
                error.filename = str(self._folder / name)
            raise

    def publish(self) -> None:
        """Make the files durable, then visible under their names, and copy them to a storage."""
        self._show()
        if self._place.local is None:
            # The index comes last, as by name.
            files = sorted(self._target.iterdir()) if self._target.is_dir() else [self._target]
            names = [file.name if self._target.is_dir() else "" for file in files]
            try:
                for name, file in zip(names, files, strict=True):
                    self._place.write(name, file)
            except BaseException:
                for name in names if self._target.is_dir() else ():
                    with suppress(OSError):
                        self._place.remove(name)
                raise

    def _show(self) -> None:
        for name, file in self._opened.items():
            with self._told(name):
                file.flush()
                os.fsync(file.fileno())
        if self._target.suffix == ".safetensors":
            (self._folder / _SINGLE).replace(self._target)
            sync_folder(self._target.parent)
            return
        self._target.mkdir(parents=True, exist_ok=True)
        names = [file.name for file in self._files]
        if len(names) > 1:
            content = {
                "metadata": {"total_size": sum(file.nbytes for file in self._files)},
                "weight_map": {key: file.name for file in self._files for key in file.starts},
            }
            write_summed(self._folder / _INDEX, json.dumps(content, indent=2, sort_keys=True).encode())
            # The index comes last: a folder without it is no checkpoint.
            names.append(_INDEX)
        for name in names:
            (self._folder / name).rename(self._target / name)
        sync_folder(self._target)

    def close(self) -> None:
        """Remove the files that were not published."""
        for file in self._opened.values():
            with suppress(OSError):  # The disk may have refused writes before.
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


# -- reading


class WeightsFiles(dict[str, Any]):
    """The values of one or several files, read on demand.

    Holds for each key the path, the open file, and the name in it, which may be another name of a tied tensor.
    """

    def shape_of(self, key: str) -> torch.Size:
        path, file, name = super().__getitem__(key)
        with _naming(path):
            return torch.Size(file.get_slice(name).get_shape())

    def __getitem__(self, key: str) -> torch.Tensor:
        path, file, name = super().__getitem__(key)
        with _naming(path):
            value: torch.Tensor = file.get_tensor(name)
        return value

    def aliases(self) -> dict[str, str]:
        """Return other names of values, as the files list them, each with the name that its value has here."""
        listed = {id(file): file.metadata() or {} for _, file, _ in self.values()}
        found = {alias: key for one in listed.values() for alias, key in one.items()}
        return {alias: key for alias, key in found.items() if key in self and alias not in self}

    def add_ties(self, entries: Entries) -> None:
        """Let tied ``entries`` find their value under any of their names."""
        held = {id(tensor): key for key, tensor in reversed(entries.tensors().items()) if key in self}
        for key, tensor in entries.tensors().items():
            if key not in self and id(tensor) in held:
                self[key] = super().__getitem__(held[id(tensor)])


def _fetch(place: StoredFolder, stack: ExitStack) -> Path:
    """Copy weights from a storage into a local folder, which is removed when ``stack`` ends; return their path."""
    local = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    is_file = place.name.endswith(".safetensors")
    folder, last = (place.parent, place.last) if is_file else (place, "")
    for name in [last] if is_file else weights_in(place) or [_SINGLE]:
        with _naming(f"{folder}/{name}"), (local / name).open("wb") as copy:
            copy.writelines(folder.parts(name, folder.length(name)))
    return local / last


def open_files(place: StoredFolder, stack: ExitStack) -> WeightsFiles:
    """Open the files at ``place``, in a storage copies of them, until ``stack`` ends."""
    path = place.local or _fetch(place, stack)
    try:
        library: Any = importlib.import_module("safetensors")
    except ImportError as error:
        raise ConfigError(
            "the safetensors library is not installed", fix="pip install 'torch-composable[safetensors]'"
        ) from error
    index = path / _INDEX
    paths = [path / _SINGLE if path.is_dir() else path]
    if index.is_file():
        with _naming(index):
            names = set(json.loads(index.read_text())["weight_map"].values())
            paths = [path / Path(name).name for name in sorted(names)]
    places: dict[str, tuple[Path, Any, str]] = {}
    for one in paths:
        with _naming(one):
            if one.exists() and not one.is_file():
                raise ValueError("it is a pipe, a device or a folder")
            file = stack.enter_context(library.safe_open(str(one), framework="pt", device="cpu"))
            places |= {key: (one, file, key) for key in file.keys()}  # noqa: SIM118  # no mapping
    return WeightsFiles(places)


@contextmanager
def _naming(path: Path | str) -> Iterator[None]:
    """Turn an error in reading into an error that names the file."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"{path} cannot be read: {error}",
            fix=f"pass a whole .safetensors file, or a folder with {_SINGLE} or {_INDEX}",
        ) from error

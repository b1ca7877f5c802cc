"""The folder that a run's checkpoints lie in: whole or invisible at every moment, and checked to the byte.

A checkpoint is written under a name that readers ignore, synced, and only then renamed to
``step-NNNNNN``: the name is the promise that it is whole. The ``latest`` pointer is replaced by a
rename too, and older checkpoints are renamed away before they are removed. So a kill at any moment
leaves whole checkpoints under such names, and nothing else.

``checkpoint.json`` holds length and CRC-32 of every file; what torch reads back carries no check of
its own. Nothing here communicates: one process writes the names, all may read.
"""

import io
import json
import os
import re
import shutil
import zlib
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from composable.errors import ConfigError
from composable.optim import GroupNames, OptimizerNames

__all__ = [
    "EXTRA",
    "FileSum",
    "Manifest",
    "SummedFiles",
    "find_damage",
    "find_folder",
    "new_partial",
    "older_whole",
    "publish",
    "read_manifest",
    "sync_folder",
    "write_summed",
]

EXTRA = "extra.pt"
_MANIFEST = "checkpoint.json"
_FORMAT = 1
_WHOLE = re.compile(r"step-(\d{6,})")
# Stands in for step-NNNNNN while another checkpoint of the same step takes its place.
_REPLACED = re.compile(r"\.replaced-(\d{6,})")
# From here on a checksum in a second thread costs less than it saves.
_PARALLEL_BYTES = 1 << 20


@dataclass(frozen=True)
class FileSum:
    """Length and CRC-32 of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        step: Optimizer steps done.
        files: Every other file, by name.
        optimizers: What was saved of them, in order.
    """

    step: int
    files: dict[str, FileSum]
    optimizers: tuple[OptimizerNames, ...]


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
        with ThreadPoolExecutor(1) as pool:
            raw = _SummedFile(path, pool)
            with io.BufferedWriter(raw) as file:
                yield file
                if not file.closed:
                    file.flush()
                    os.fsync(file.fileno())
        self.sums[Path(path).name] = FileSum(raw.written_bytes, raw.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written here."""
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _SummedFile(io.FileIO):
    def __init__(self, path: str | os.PathLike[str], pool: ThreadPoolExecutor) -> None:
        super().__init__(os.fspath(path), "w")
        self._pool = pool
        self.written_bytes = 0
        self.crc32 = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes < _PARALLEL_BYTES:
            written = super().write(view)
            self.crc32 = zlib.crc32(view[:written], self.crc32)
        else:
            # Both let go of the interpreter: the sum is ready when the write is.
            crc32 = self._pool.submit(zlib.crc32, view, self.crc32)
            try:
                written = super().write(view)
            finally:
                whole_crc32 = crc32.result()  # the caller may free the memory after this
            self.crc32 = whole_crc32 if written == view.nbytes else zlib.crc32(view[:written], self.crc32)
        self.written_bytes += written
        return written


def write_summed(path: Path, content: bytes) -> FileSum:
    """Write and sync a file."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(len(content), zlib.crc32(content))


def new_partial(run: Path, step: int) -> Path:
    """Make an empty folder for a checkpoint to be written in, and the run's folder above it."""
    partial = run / f".partial-{step:06d}"
    _remove([partial])
    partial.mkdir(parents=True)
    # A kill came between the two renames of `publish`.
    for replaced in run.glob(".replaced-*"):
        whole = run / f"step-{_step_of(replaced):06d}"
        if not whole.exists():
            replaced.rename(whole)
    return partial


def publish(partial: Path, manifest: Manifest, *, keep: int) -> Path:
    """Give a folder whose files are written and synced its final name, then remove what is older.

    Args:
        partial: From ``new_partial``.
        manifest: What is in it.
        keep: Checkpoints to leave, this one included.

    Raises:
        ConfigError: A file of ``manifest`` is not there: another process wrote it elsewhere.
    """
    run, whole = partial.parent, partial.parent / f"step-{manifest.step:06d}"
    gone = [name for name, saved in manifest.files.items() if _length(partial / name) != saved.bytes]
    if gone:
        raise ConfigError(
            f"{partial} lacks what other ranks wrote: {', '.join(sorted(gone))}",
            fix="save to a folder that all ranks see under one name",
        )
    _write_manifest(partial, manifest)
    sync_folder(partial)
    if whole.exists():
        replaced = run / f".replaced-{manifest.step:06d}"
        _remove([replaced])
        whole.rename(replaced)
    partial.rename(whole)
    write_summed(run / ".latest", whole.name.encode())
    os.replace(run / ".latest", run / "latest")
    sync_folder(run)
    _prune(run, whole, keep)
    return whole


def find_folder(path: Path) -> Path:
    """Return the checkpoint that ``path`` is, or the latest one in the run that it is.

    Raises:
        ConfigError: There is no whole checkpoint.
    """
    if _WHOLE.fullmatch(path.name) or (path / _MANIFEST).is_file():
        if path.is_dir():
            return path
        raise ConfigError(f"there is no checkpoint {path}", fix=_instead(path))
    pointer = path / "latest"
    if pointer.is_file():
        latest = path / pointer.read_text(errors="replace").strip()
        if _WHOLE.fullmatch(latest.name) and latest.parent == path and latest.is_dir():
            return latest
    whole = _whole_checkpoints(path)
    if not whole:
        raise ConfigError(f"no checkpoint in {path}", fix="pass a run's folder or one of its step-NNNNNN folders")
    return whole[-1]


def read_manifest(folder: Path) -> Manifest:
    """Return what the checkpoint ``folder`` says about itself.

    Raises:
        ConfigError: It does not, or not readably.
    """
    path = folder / _MANIFEST
    try:
        document = json.loads(path.read_bytes())
        body = document["checkpoint"]
        if document["crc32"] != zlib.crc32(_canonical(body)):
            raise ValueError("its contents changed after it was written")
        if body["format"] != _FORMAT:
            raise ValueError(f"it has format {body['format']}, this version reads {_FORMAT}")
        return Manifest(
            int(body["step"]),
            {name: FileSum(**saved) for name, saved in body["files"].items()},
            tuple(
                OptimizerNames(
                    saved["kind"],
                    tuple(GroupNames(tuple(group["params"]), tuple(group["settings"])) for group in saved["groups"]),
                )
                for saved in body["optimizers"]
            ),
        )
    except FileNotFoundError:
        reason = "is missing: the checkpoint was not written to its end, or not by save_checkpoint"
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"cannot be read: {error}"
    raise ConfigError(f"{path} {reason}", fix=_instead(folder))


def find_damage(folder: Path, files: dict[str, FileSum]) -> list[str]:
    """Read ``files`` and return a line for each that is not what was written."""
    lines = []
    for name, saved in files.items():
        path = folder / name
        try:
            found = path.stat().st_size
            if found != saved.bytes:
                lines.append(f"{path} has {found:,} bytes; {saved.bytes:,} were written")
            elif _crc32(path) != saved.crc32:
                lines.append(f"{path} has changed: its {found:,} bytes are not those that were written")
        except FileNotFoundError:
            lines.append(f"{path} is missing")
        except OSError as error:
            lines.append(f"{path} cannot be read: {error}")
    return lines


def older_whole(folder: Path) -> Path | None:
    """Return the newest checkpoint before ``folder`` whose files are all as written; reads them."""
    step = _step_of(folder)
    for candidate in reversed(_whole_checkpoints(folder.parent)):
        if candidate == folder or (step is not None and (_step_of(candidate) or 0) >= step):
            continue
        try:
            manifest = read_manifest(candidate)
        except ConfigError:
            continue
        if not find_damage(candidate, manifest.files):
            return candidate
    return None


def _instead(folder: Path) -> str:
    older = older_whole(folder)
    if older is None:
        return f"there is no older whole checkpoint in {folder.parent}: restore this one from a copy"
    return f"load {older} instead: it is whole"


def _whole_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of ``run``, oldest step first."""
    found = list(run.iterdir()) if run.is_dir() else []
    by_step: dict[int, Path] = {}
    for pattern in (_REPLACED, _WHOLE):  # the final name wins
        for path in found:
            match = pattern.fullmatch(path.name)
            if match:
                by_step[int(match[1])] = path
    return [by_step[step] for step in sorted(by_step)]


def _step_of(folder: Path) -> int | None:
    match = _WHOLE.fullmatch(folder.name) or _REPLACED.fullmatch(folder.name)
    return int(match[1]) if match else None


def _prune(run: Path, newest: Path, keep: int) -> None:
    # Checkpoints of a later step belong to a continuation that was abandoned for this one.
    others = [path for path in _whole_checkpoints(run) if path != newest]
    earlier = [path for path in others if (_step_of(path) or 0) < (_step_of(newest) or 0)]
    kept = earlier[-(keep - 1) :] if keep > 1 else []
    # A name that promises a whole checkpoint goes before its files do.
    for path in others:
        if path not in kept and _WHOLE.fullmatch(path.name):
            gone = run / f".removed-{_step_of(path):06d}"
            _remove([gone])
            path.rename(gone)
    _remove([*run.glob(".removed-*"), *run.glob(".partial-*"), *run.glob(".replaced-*")])


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        if folder.exists():
            shutil.rmtree(folder)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    body = {"format": _FORMAT, **asdict(manifest)}
    document = {"crc32": zlib.crc32(_canonical(body)), "checkpoint": body}
    write_summed(folder / _MANIFEST, json.dumps(document, indent=1).encode())


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _length(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _crc32(path: Path) -> int:
    crc32 = 0
    chunk = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            crc32 = zlib.crc32(chunk[:count], crc32)
    return crc32


def sync_folder(path: Path) -> None:
    """Make the names in a folder last through a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

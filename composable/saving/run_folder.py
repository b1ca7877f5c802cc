"""The folder that a run's checkpoints lie in: whole or invisible at every moment, and checked to the byte.

A checkpoint is written under a name that readers ignore, synced, and only then renamed to
``step-NNNNNN``: the name is the promise that it is whole. The ``latest`` pointer is replaced by a
rename too, and older checkpoints are renamed away before they are removed. So a kill at any moment
leaves whole checkpoints under such names, and nothing else.

A folder is ours if its ``checkpoint.json`` says so, whatever its name, and only files that are listed there are
removed. Nothing here communicates: one process writes the names, all may read.
"""

import io
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem

from composable.errors import ConfigError, place_of_rank
from composable.saving.manifest import (
    MANIFEST,
    UNREADABLE,
    FileSum,
    Manifest,
    check_inside,
    find_damage,
    manifest_bytes,
    parse_manifest,
)

__all__ = [
    "EXTRA",
    "SummedFiles",
    "abandon",
    "check_step",
    "find_folder",
    "new_partial",
    "older_whole",
    "publish",
    "read_manifest",
    "sync_folder",
    "write_summed",
]

EXTRA = "extra.pt"
_WHOLE = re.compile(r"step-(\d{6,})")
# Stands in for step-NNNNNN while another checkpoint of the same step takes its place.
_REPLACED = re.compile(r"\.replaced-(\d{6,})(-[0-9a-f]{8})?")
_REMOVED = re.compile(r"\.removed-(\d{6,})(-[0-9a-f]{8})?")
# With what nobody else has in a name, so that it says who wrote it.
_PARTIAL = re.compile(r"\.partial-(\d{6,})-[0-9a-f]{8}")
# From here on a checksum in a second thread costs less than it saves.
_PARALLEL_BYTES = 1 << 20


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
        try:
            return self._write(data)
        except OSError as error:
            self.failure = error
            raise

    def _write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if view.nbytes < _PARALLEL_BYTES:
            written = super().write(view)
            self.crc32 = zlib.crc32(view[:written], self.crc32)
        else:
            # Both let go of the interpreter: the sum is ready when the write is.
            whole: list[int] = []
            summing = Thread(target=lambda: whole.append(zlib.crc32(view, self.crc32)))
            summing.start()
            try:
                written = super().write(view)
            finally:
                summing.join()  # the caller may free the memory after this
            self.crc32 = whole[0] if written == view.nbytes else zlib.crc32(view[:written], self.crc32)
        self.written_bytes += written
        return written


def write_summed(path: Path, content: bytes) -> FileSum:
    """Write and sync a file."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(len(content), zlib.crc32(content))


def check_step(run: Path, step: int, *, discard_later: bool) -> None:
    """Raise unless a checkpoint of ``step`` may be written to ``run`` without taking anything from anybody.

    Raises:
        ConfigError: There are checkpoints of later steps; or what has this one's name was not written here, or holds
            files that were not.
    """
    later = [one for one in _own_checkpoints(run) if (_step_of(one) or 0) > step]
    if later and not discard_later:
        raise ConfigError(
            f"{run} holds checkpoints of later steps than {step}: {', '.join(one.name for one in later)}",
            at=place_of_rank(),
            fix="load_checkpoint first, to go on from the latest; save to another folder, to begin anew; or pass "
            "discard_later=True, to remove them",
        )
    whole = run / f"step-{step:06d}"
    manifest = _own_manifest(whole)
    if manifest is None and (whole.exists() or whole.is_symlink()):
        raise ConfigError(
            f"{whole} is there already, and is no whole checkpoint of save_checkpoint",
            at=place_of_rank(),
            fix="move it away, or save to another folder",
        )
    others = _others_in(whole, manifest) if manifest is not None else []
    if others:
        raise ConfigError(
            f"{whole} would be replaced, and holds what save_checkpoint did not write: {', '.join(others)}",
            at=place_of_rank(),
            fix="move that away, or save to another folder",
        )


def new_partial(run: Path, step: int, in_use: Collection[Path] = ()) -> Path:
    """Make an empty folder for a checkpoint to be written in, and tidy up what a kill has left.

    Args:
        run: The run's folder.
        step: Of the checkpoint.
        in_use: Such folders that are being written now.
    """
    for path in _named(run, _REPLACED):
        # A kill came between the two renames of `publish`.
        whole = run / f"step-{_step_of(path):06d}"
        if _own_manifest(path) is not None and not whole.exists():
            path.rename(whole)
    _tidy(run, in_use)
    partial = _hidden(run, "partial", step)
    partial.mkdir()
    return partial


def abandon(partial: Path) -> None:
    """Remove a folder from ``new_partial`` that was not written to its end."""
    shutil.rmtree(partial, ignore_errors=True)


def publish(
    partial: Path, manifest: Manifest, *, keep: int, discard_later: bool = False, in_use: Collection[Path] = ()
) -> Path:
    """Give a folder whose files are written and synced its final name, then remove what is older.

    Args:
        partial: From ``new_partial``.
        manifest: What is in it.
        keep: Checkpoints to leave, this one and those of later steps included.
        discard_later: Remove checkpoints of later steps.
        in_use: Folders from ``new_partial`` that are being written now.

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
    write_summed(partial / MANIFEST, manifest_bytes(manifest))
    sync_folder(partial)
    # All bytes are written before the first name changes: a full disk stops nothing half-way.
    write_summed(run / ".latest", whole.name.encode())
    if whole.exists():
        whole.rename(_hidden(run, "replaced", manifest.step))
    partial.rename(whole)
    os.replace(run / ".latest", run / "latest")
    sync_folder(run)
    _prune(run, whole, keep, discard_later=discard_later)
    _tidy(run, in_use)
    return whole


def find_folder(path: Path) -> Path:
    """Return the checkpoint that ``path`` is, or the latest one in the run that it is.

    Raises:
        ConfigError: There is no whole checkpoint.
    """
    if _WHOLE.fullmatch(path.name) or (path / MANIFEST).is_file():
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
        ConfigError: It does not, or not readably, or names files outside of it.
    """
    try:
        return _parsed(folder)
    except FileNotFoundError:
        reason = "is missing: the checkpoint was not written to its end, or not by save_checkpoint"
    except UNREADABLE as error:
        reason = f"cannot be read: {getattr(error, 'what', error)}"
    raise ConfigError(f"{folder / MANIFEST} {reason}", fix=_instead(folder))


def older_whole(folder: Path) -> Path | None:
    """Return the newest checkpoint before ``folder`` whose files are all as written; reads them."""
    step = _step_of(folder)
    for candidate in reversed(_whole_checkpoints(folder.parent)):
        if candidate == folder or (step is not None and (_step_of(candidate) or 0) >= step):
            continue
        try:
            # Not read_manifest, which would look for an older one for each that cannot be read.
            manifest = _parsed(candidate)
        except UNREADABLE:
            continue
        if not find_damage(candidate, manifest.files):
            return candidate
    return None


def _parsed(folder: Path) -> Manifest:
    """Return what the checkpoint ``folder`` says about itself; raises one of ``UNREADABLE`` where it does not."""
    path = folder / MANIFEST
    check_inside(folder, path)
    if not path.is_file():
        raise FileNotFoundError(path)
    return parse_manifest(path)


def _instead(folder: Path) -> str:
    older = older_whole(folder)
    if older is None:
        return f"there is no older whole checkpoint in {folder.parent}: restore this one from a copy"
    return f"load {older} instead: it is whole"


def _whole_checkpoints(run: Path) -> list[Path]:
    """Return what claims to be a checkpoint of ``run``, oldest step first."""
    by_step: dict[int, Path] = {}
    for pattern in (_REPLACED, _WHOLE):  # the final name wins
        for path in _named(run, pattern):
            if (path / MANIFEST).is_file():
                by_step[_step_of(path) or 0] = path
    return [by_step[step] for step in sorted(by_step)]


def _own_checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints that were written here and still have their names, oldest step first."""
    found = [path for path in _named(run, _WHOLE) if _own_manifest(path) is not None]
    return sorted(found, key=lambda path: _step_of(path) or 0)


def _own_manifest(folder: Path) -> Manifest | None:
    """Return what ``folder`` says about itself if ``save_checkpoint`` wrote it, as its name says."""
    if folder.is_symlink() or not (folder / MANIFEST).is_file():
        return None
    try:
        manifest = parse_manifest(folder / MANIFEST)
    except UNREADABLE:
        return None
    return manifest if manifest.step == _step_of(folder) else None


def _others_in(folder: Path, manifest: Manifest) -> list[str]:
    """Return the names in ``folder`` that its manifest does not list."""
    return sorted(path.name for path in folder.iterdir() if path.name not in {*manifest.files, MANIFEST})


def _hidden(run: Path, kind: str, step: int) -> Path:
    return run / f".{kind}-{step:06d}-{secrets.token_hex(4)}"


def _named(run: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [path for path in run.iterdir() if pattern.fullmatch(path.name)] if run.is_dir() else []


def _step_of(folder: Path) -> int | None:
    matches = (pattern.fullmatch(folder.name) for pattern in (_WHOLE, _REPLACED, _REMOVED))
    return next((int(match[1]) for match in matches if match), None)


def _prune(run: Path, newest: Path, keep: int, *, discard_later: bool) -> None:
    step = _step_of(newest) or 0
    others = [path for path in _own_checkpoints(run) if path != newest]
    earlier = [path for path in others if (_step_of(path) or 0) < step]
    later = [path for path in others if (_step_of(path) or 0) > step]
    # A name that promises a whole checkpoint goes before its files do.
    for path in earlier[: max(0, len(earlier) - (keep - 1))] + (later if discard_later else []):
        path.rename(_hidden(run, "removed", _step_of(path) or 0))


def _tidy(run: Path, in_use: Collection[Path]) -> None:
    """Remove what is under names that nobody reads, as far as it was written here."""
    for path in [*_named(run, _REMOVED), *_named(run, _REPLACED)]:
        _discard(path)
    for path in _named(run, _PARTIAL):
        if path not in in_use:
            shutil.rmtree(path)


def _discard(hidden: Path) -> None:
    """Remove the files that the manifest of a checkpoint lists, then it; others stay, under the name they had."""
    manifest = _own_manifest(hidden)
    is_ours = manifest is not None or hidden.name.count("-") == 2
    if hidden.is_symlink() or not hidden.is_dir() or not is_ours:
        return
    for name in [*manifest.files, MANIFEST] if manifest is not None else []:
        (hidden / name).unlink(missing_ok=True)
    whole = hidden.with_name(f"step-{_step_of(hidden):06d}")
    if not any(hidden.iterdir()):
        hidden.rmdir()
    elif not whole.exists():
        hidden.rename(whole)


def _length(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def sync_folder(path: Path) -> None:
    """Make the names in a folder last through a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

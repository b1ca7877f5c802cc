"""The folder of checkpoints, safe after a kill.

A checkpoint is written under a name that readers ignore, synced, and only then renamed to
``step-NNNNNN``: the name promises that it is whole. Older checkpoints are renamed away before they are removed.
So a kill at any moment leaves whole checkpoints under such names, and nothing else.

A folder is ours if its ``checkpoint.json`` lists every file in it; no other is replaced or removed. There, length and
CRC-32 of each file serve to detect damage. Nothing here communicates: one process writes the names, all may
read.
"""

import errno
import fcntl
import json
import logging
import math
import os
import re
import secrets
import shutil
import socket
import stat
import zlib
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from composable.errors import ConfigError, DesyncError, UsageError
from composable.ground.names import as_kind, list_text
from composable.runs.storage import Storage, StoredFolder
from composable.saving import OptimizerNames

EXTRA = "extra.pt"
METADATA = ".metadata"
MANIFEST = "checkpoint.json"
_MAX_MANIFEST_BYTES = 2**28
_LOG = logging.getLogger("composable")
LOCK = "writer.lock"
_FORMAT = 2
# In a storage a token follows.
_HOLDER = re.compile(r"process \d+ on \S*( [0-9a-f]{16})?")
# Names of folders: a whole checkpoint; a hidden one, which is being written, replaced by a new one, or removed.
# Hidden names end in random digits, so that each belongs to one writer.
_NAME = re.compile(r"(?P<kind>step)-(?P<step>\d{6,})|\.(?P<hidden>partial|replaced|removed)-(?P<of>\d{6,})-[0-9a-f]{8}")

# The files of a rank, as torch names them.
RANK = re.compile(r"__(\d+)_")


# -- files


@dataclass(frozen=True)
class FileSum:
    """Length and CRC-32 of a file."""

    bytes: int
    crc32: int


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it; raises ``OSError`` at once for a pipe, a device, a folder, or a link."""
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def _open(path: Path, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        what = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, what, str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a pipe, a device or a folder", str(path))
    return descriptor


def open_in(folder: Path | StoredFolder, name: str) -> BinaryIO:
    """Open a file of a checkpoint to read it, as ``open_regular`` on a disk."""
    return open_regular(folder / name) if isinstance(folder, Path) else folder.open(name)


def sum_file(folder: Path | StoredFolder, name: str, most: float = math.inf) -> FileSum:
    """Read a file and return its length and checksum; of a file of more than ``most`` bytes only the length."""
    crc32 = length = 0
    chunk = memoryview(bytearray(1 << 20))
    with open_in(folder, name) as file:
        if (found := file.seek(0, os.SEEK_END)) > most:
            return FileSum(found, 0)
        file.seek(0)
        while length <= most and (count := file.readinto(chunk)):  # type: ignore[attr-defined]  # a file has it
            crc32 = zlib.crc32(chunk[:count], crc32)
            length += count
    return FileSum(length, crc32)


def write_summed(path: Path, content: bytes) -> FileSum:
    """Write and sync a file; return its length and checksum."""
    with path.open("xb") as file:
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


@contextmanager
def warned(what: str) -> Iterator[None]:
    """Log an error of a part of a save without which the checkpoint is whole."""
    try:
        yield
    except Exception as error:
        _LOG.warning("%s: %s: %s", what, type(error).__name__, error)


def find_damage(folder: Path | StoredFolder, files: Mapping[str, FileSum]) -> list[str]:
    """Read ``files`` and return a line for each that differs from what was written."""
    lines = []
    for name, saved in files.items():
        path = f"{folder}/{name}"
        try:
            found = sum_file(folder, name, saved.bytes)
        except OSError as error:
            rank = RANK.match(name)
            writer = f"; rank {rank[1]} wrote it" if rank else ""
            lines.append(f"{path} cannot be read: {error.strerror or error}{writer}")
            continue
        if found.bytes != saved.bytes:
            lines.append(f"{path} has {found.bytes:,} bytes; {saved.bytes:,} were written")
        elif found != saved:
            lines.append(f"{path} has changed: its {found.bytes:,} bytes are not those that were written")
    return lines


# -- the manifest of a checkpoint


@dataclass(frozen=True)
class Manifest:
    """The description in a checkpoint: its optimizer steps, every other file, and its optimizers in order."""

    step: int
    files: dict[str, FileSum]
    optimizers: tuple[OptimizerNames, ...]

    def as_bytes(self) -> bytes:
        """Return the contents of ``checkpoint.json``."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()


def read_manifest(folder: Path | StoredFolder, content: bytes | None = None) -> Manifest:
    """Return the manifest of the checkpoint ``folder``, from ``content`` if it was read; raises if it is none."""
    path = f"{folder}/{MANIFEST}"
    try:
        if content is None:
            with open_in(folder, MANIFEST) as file:
                content = file.read(_MAX_MANIFEST_BYTES)
        body = as_kind(dict[str, Any], json.loads(content, object_pairs_hook=_unique), "it")
        found = body.pop("format", None)
        if found != _FORMAT:
            raise ValueError(f"it has format {found}, this version reads {_FORMAT}")
        manifest: Manifest = as_kind(Manifest, body, "it")
        strange = [one for one in manifest.files if Path(one).name != one or one == MANIFEST or not one.isprintable()]
        if manifest.step < 0:
            raise ValueError(f"its step is {manifest.step}")
        if strange or METADATA not in manifest.files:
            raise ValueError(f"it lists {list_text(strange)}" if strange else f"it does not list {METADATA}")
        return manifest
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}",
            fix="load a checkpoint that save_checkpoint wrote to its end, such as an older one of the run; of "
            "per_rank=True, copy the folders of all ranks together first",
        ) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("it has a key twice")
    return found


def find_folder(path: Path) -> Path:
    """Return ``path`` if it is a checkpoint, else the latest checkpoint in this folder; raises if there is none."""
    if (path / MANIFEST).is_file() or _kind_of(path) == "step":
        return path
    # Also by a name that a kill between two renames leaves. A damaged checkpoint is never skipped for an older one.
    whole = [*_named(path, "step"), *_named(path, "replaced")]
    if not whole:
        raise no_checkpoint(path, is_file=path.is_file())
    return max(whole, key=_step_of)


def no_checkpoint(place: object, *, is_file: bool) -> ConfigError:
    """Return the error for a place, perhaps a file, that has no checkpoint."""
    of_file = "pass a file to load_full_state_dict(model, torch.load(path)), or to load_safetensors(model, path)"
    fix = of_file if is_file else "pass a run's folder or one of its step-NNNNNN folders"
    return ConfigError(f"no checkpoint in {place}", fix=fix)


def _kind_of(path: Path) -> str | None:
    match = _NAME.fullmatch(path.name)
    return None if match is None else match["kind"] or match["hidden"]


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return -1 if match is None else int(match["step"] or match["of"])


def _named(run: Path, *kinds: str) -> list[Path]:
    """Return the folders in ``run`` with names of these kinds, lowest step first."""
    return sorted((path for path in run.iterdir() if _kind_of(path) in kinds), key=_step_of) if run.is_dir() else []


def _is_ours(folder: Path) -> bool:
    """Say whether ``save_checkpoint`` wrote all files in ``folder``."""
    return not folder.is_symlink() and lists_all(folder, [path.name for path in folder.iterdir()])


def lists_all(folder: Path | StoredFolder, names: Collection[str]) -> bool:
    """Say whether the manifest in ``folder`` lists all of these names."""
    try:
        return {*read_manifest(folder).files, MANIFEST}.issuperset(names)
    except ConfigError:
        return False


# -- writing


class _Written:
    """The folders that this process writes."""

    def __init__(self) -> None:
        # Run folders, locked until the process ends, with the partial checkpoints that it writes there.
        self.partial: dict[Path, set[Path]] = {}
        self.locks: dict[Path, int] = {}  # The descriptor of the lock file of each.
        # The same for runs in storages, by URL or by the ``id`` of an object that is kept here.
        self.stored: dict[Hashable, tuple[Storage, set[str]]] = {}
        self.token = secrets.token_hex(8)  # The random name of this process in storages.
        # Held while names in a run's folder are read or changed: saves of several models may end at once.
        self.guard = Lock()


WRITTEN = _Written()


def _lock(run: Path) -> set[Path]:
    """Lock ``run`` for this process, make the folder if needed, and return the checkpoints being written there.

    The system releases the lock when the process ends in any way, so a run that was killed blocks no other.
    """
    run.mkdir(parents=True, exist_ok=True)
    path, held = run / LOCK, WRITTEN.locks.get(run)
    if held is not None:
        with suppress(OSError):
            if os.path.samestat(path.lstat(), os.fstat(held)):
                return WRITTEN.partial[run]
        _LOG.warning("%s was removed while this run writes there: it is locked anew", path)
        os.close(WRITTEN.locks.pop(run))
    try:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise (
            _foreign(path) if error.errno in (errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO) else error
        ) from None
    try:
        holder = checked_holder(os.pread(descriptor, 4096, 0), path)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ConfigError:
        os.close(descriptor)
        raise
    except OSError as error:
        # With any other error, this disk has no locks.
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(descriptor)
            raise another_run(run, holder) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, this_process().encode(), 0)
    WRITTEN.locks[run] = descriptor
    return WRITTEN.partial.setdefault(run, set())


def this_process() -> str:
    """Return the text in the lock of a run's folder."""
    return f"process {os.getpid()} on {socket.gethostname()}"


def checked_holder(content: bytes, path: object) -> str:
    """Return the text of the lock at ``path``; raises if it is a file of another program."""
    holder = content.decode(errors="replace")
    if holder and not _HOLDER.fullmatch(holder):
        raise _foreign(path)
    return holder


def another_run(run: object, holder: str) -> UsageError:
    """Return the error of a run whose folder the process ``holder`` writes."""
    fix, at = "save to another folder, or end the other run first", f"there: {holder}"
    return UsageError(f"another run writes to {run}", at=at, fix=fix)


def _foreign(path: object) -> ConfigError:
    fix = "move it away, or save to another folder"
    return ConfigError(f"{path} is no file that save_checkpoint wrote", fix=fix)


class FolderRun:
    """The folder of a run on a disk, which all ranks see."""

    def __init__(self, path: Path) -> None:
        # The current folder may be another one by the time at which a thread writes.
        self._path = path.resolve()

    def __str__(self) -> str:
        return str(self._path)

    def begin(self, step: int) -> str:
        """Make an empty folder for a checkpoint, return its path, and remove what a kill has left.

        Raises if another run writes here, if there are later checkpoints, or if files of others would be replaced.
        """
        with WRITTEN.guard:
            in_use = _lock(self._path)
            _check_step(self._path, step)
            _tidy(self._path)
            folder = _hidden(self._path, "partial", step)
            folder.mkdir()
            in_use.add(folder)
        return str(folder)

    def folder(self, partial: str) -> Path:
        """Return the folder that ``begin`` returned."""
        return Path(partial)

    def room(self, partial: str) -> AbstractContextManager[Path]:
        """Return a context of the local folder where a rank writes its files: the checkpoint's own."""
        return nullcontext(Path(partial))

    def put(self, partial: str, file: Path) -> None:
        """Take a file that is whole in ``room``: it lies where it belongs."""

    def publish(self, partial: str, manifest: Manifest) -> Path:
        """Give a folder of ``begin``, whose files are synced, its final name."""
        folder, run, whole = Path(partial), self._path, self._path / f"step-{manifest.step:06d}"
        with WRITTEN.guard:
            check_written(folder, manifest, {path.name: path.stat().st_size for path in folder.iterdir()})
            write_summed(folder / MANIFEST, manifest.as_bytes())
            sync_folder(folder)
            if whole.exists():
                whole.rename(_hidden(run, "replaced", manifest.step))
            try:
                folder.rename(whole)
            except OSError:
                # The server of the disk may have done it, and have lost its answer.
                if not lists_all(whole, manifest.files):
                    raise
            WRITTEN.partial[run].discard(folder)
        return whole

    def tidy(self, partial: str, *, keep: int) -> None:
        """Make the names in the run's folder last, leave ``keep`` checkpoints, and remove what other saves have left.

        ``partial`` is the folder that was published. If its name may not last, nothing is removed.
        """
        run, step = self._path, _step_of(Path(partial))
        with WRITTEN.guard:
            sync_folder(run)
            earlier = [path for path in _named(run, "step") if _step_of(path) < step and _is_ours(path)]
            # A name that promises a whole checkpoint is removed before its files.
            for path in earlier[: max(0, len(earlier) - (keep - 1))]:
                path.rename(_hidden(run, "removed", _step_of(path)))
            _tidy(run)

    def abandon(self, partial: str, *, remove: bool) -> None:
        """End a save that failed; with ``remove`` also delete its folder. What it would replace is put back."""
        with WRITTEN.guard:
            WRITTEN.partial[self._path].discard(Path(partial))
            with warned(f"{partial} could not be removed"):
                if remove:
                    shutil.rmtree(partial, ignore_errors=True)
                _tidy(self._path, "replaced")


class RankRun:
    """A folder of each rank's own, or of each host's, for a part of a checkpoint.

    Files of different ranks have different names, and the first rank's part has the manifest: copied onto each other,
    the parts are the checkpoint. Whoever copies them also removes them.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._folder = path.resolve() / f"step-{step:06d}"
        if os.path.lexists(self._folder):
            fix = "pass a new folder for each save, such as a temporary one"
            raise ConfigError(f"{self._folder} exists already", fix=fix)

    def __str__(self) -> str:
        return str(self._folder.parent)

    def begin(self, step: int) -> str:
        """Return the name of the checkpoint, the same on every rank."""
        return f"step-{step:06d}"

    def folder(self, partial: str) -> Path:
        """Return this rank's folder."""
        return self._folder

    @contextmanager
    def room(self, partial: str) -> Iterator[Path]:
        """Make this rank's folder, and remove it if the save fails."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            yield self._folder
        except Exception as error:
            # Who has lost the others does not know whether the checkpoint is whole.
            if not isinstance(error, DesyncError):
                shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def put(self, partial: str, file: Path) -> None:
        """Make the name of a file last."""
        sync_folder(self._folder)

    def publish(self, partial: str, manifest: Manifest) -> Path:
        """Write the manifest, once all ranks have written their parts."""
        write_summed(self._folder / MANIFEST, manifest.as_bytes())
        sync_folder(self._folder)
        return self._folder

    def tidy(self, partial: str, *, keep: int) -> None:
        """Leave older checkpoints as they are."""

    def abandon(self, partial: str, *, remove: bool) -> None:
        """End a save that failed; ``room`` has removed the folder."""


def check_written(folder: object, manifest: Manifest, lengths: Mapping[str, int | None]) -> None:
    """Raise unless the files that the ranks have written to ``folder`` are there, with their lengths."""
    gone = [name for name, saved in manifest.files.items() if lengths.get(name) != saved.bytes]
    if gone:
        raise ConfigError(
            f"{folder} lacks files that other ranks wrote: {', '.join(sorted(gone))}",
            fix="save to a folder that all ranks see under one name",
        )


def check_later(run: object, step: int, later: Collection[str]) -> None:
    """Raise if a run holds checkpoints, ``later``, of later steps than ``step``."""
    if later:
        raise ConfigError(
            f"{run} holds checkpoints of later steps than {step}: {', '.join(later)}",
            fix="load_checkpoint first, to go on from the latest; or save to another folder; or remove them",
        )


def _check_step(run: Path, step: int) -> None:
    """Raise if ``run`` holds checkpoints of later steps, or files of others under the name of ``step``."""
    steps = [path for path in _named(run, "step") if _step_of(path) > step and (path / MANIFEST).is_file()]
    check_later(run, step, [path.name for path in steps])
    whole = run / f"step-{step:06d}"
    if (whole.exists() or whole.is_symlink()) and not _is_ours(whole):
        raise ConfigError(
            f"{whole} exists already, with files that save_checkpoint did not write",
            fix="move it away, or save to another folder",
        )


def _hidden(run: Path, kind: str, step: int) -> Path:
    return run / f".{kind}-{step:06d}-{secrets.token_hex(4)}"


def _tidy(run: Path, *kinds: str) -> None:
    """Remove folders with hidden names of these kinds, default: all, except those that this process is writing."""
    for hidden in _named(run, *(kinds or ("partial", "removed", "replaced"))):
        whole = hidden.with_name(f"step-{_step_of(hidden):06d}")
        with warned(f"{hidden} could not be removed"):
            if _kind_of(hidden) == "replaced" and not whole.exists():
                # A kill came between the two renames of `publish`: the folder to be replaced is still the checkpoint.
                hidden.rename(whole)
            elif hidden not in WRITTEN.partial[run]:
                shutil.rmtree(hidden)

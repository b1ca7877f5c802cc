"""The folder that a run's checkpoints lie in: whole or invisible at every moment, and written by one process at a time.

A checkpoint is written under a name that readers ignore, synced, and only then renamed to
``step-NNNNNN``: the name is the promise that it is whole. The ``latest`` pointer is replaced by a
rename too, and older checkpoints are renamed away before they are removed. So a kill at any moment
leaves whole checkpoints under such names, and nothing else.

A folder is ours if its ``checkpoint.json`` says so, whatever its name, and only files that are listed there are
removed. Nothing here communicates: one process writes the names, all may read.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet, finalize

from torch import nn

from composable.errors import ConfigError, UsageError, place_of_rank
from composable.saving.entries import GroupNames, OptimizerNames
from composable.saving.files import FileSum, check_inside, file_name, find_damage, sync_folder, write_summed

__all__ = ["EXTRA", "METADATA", "Manifest", "PartialCheckpoint", "find_folder", "older_whole", "read_manifest"]

EXTRA = "extra.pt"
METADATA = ".metadata"
_MANIFEST = "checkpoint.json"
_LOCK = "writer.lock"
_FORMAT = 1
# What a file that is no manifest makes Python raise.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
# Names of a whole checkpoint, of one that is being written, of one that another of its step replaces, of one that goes.
# What readers do not see has in its name what nobody else has, so that it says who wrote it.
_NAME = re.compile(r"(?P<kind>step)-(?P<step>\d{6,})|\.(?P<hidden>partial|replaced|removed)-(?P<of>\d{6,})-[0-9a-f]{8}")


# -- what a checkpoint says about itself


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

    def as_bytes(self) -> bytes:
        """Return the contents of ``checkpoint.json``."""
        body = {"format": _FORMAT, **asdict(self)}
        return json.dumps({"crc32": zlib.crc32(_canonical(body)), "checkpoint": body}, indent=1).encode()


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _parse_manifest(folder: Path) -> Manifest:
    """Return what ``folder`` says of itself; raises one of ``_UNREADABLE`` where it cannot be believed."""
    path = folder / _MANIFEST
    check_inside(folder, path)
    if not path.is_file():
        raise FileNotFoundError(path)
    document = json.loads(path.read_bytes())
    body = document["checkpoint"]
    if document["crc32"] != zlib.crc32(_canonical(body)):
        raise ValueError("its contents changed after it was written")
    if body["format"] != _FORMAT:
        raise ValueError(f"it has format {body['format']}, this version reads {_FORMAT}")
    files = {
        file_name(name): FileSum(int(saved["bytes"]), int(saved["crc32"])) for name, saved in body["files"].items()
    }
    if METADATA not in files or _MANIFEST in files:
        raise ValueError(f"it lists no {METADATA}, or itself")
    optimizers = []
    for saved in body["optimizers"]:
        groups = [
            GroupNames(tuple(map(str, one["params"])), tuple(map(str, one["settings"]))) for one in saved["groups"]
        ]
        optimizers.append(OptimizerNames(str(saved["kind"]), tuple(groups)))
    return Manifest(int(body["step"]), files, tuple(optimizers))


# -- reading


def find_folder(path: Path) -> Path:
    """Return the checkpoint that ``path`` is, or the latest one in the run that it is; raises where there is none."""
    if _kind_of(path) == "step" or (path / _MANIFEST).is_file():
        if path.is_dir():
            return path
        raise ConfigError(f"there is no checkpoint {path}", fix=_instead(path))
    pointer = path / "latest"
    if pointer.is_file():
        latest = path / pointer.read_text(errors="replace").strip()
        if _kind_of(latest) == "step" and latest.parent == path and latest.is_dir():
            return latest
    whole = _readable(path)
    if not whole:
        raise ConfigError(f"no checkpoint in {path}", fix="pass a run's folder or one of its step-NNNNNN folders")
    return whole[-1]


def read_manifest(folder: Path) -> Manifest:
    """Return what the checkpoint ``folder`` says about itself; raises where that is nothing to be believed."""
    try:
        return _parse_manifest(folder)
    except FileNotFoundError:
        reason = "is missing: the checkpoint was not written to its end, or not by save_checkpoint"
    except _UNREADABLE as error:
        reason = f"cannot be read: {getattr(error, 'what', error)}"
    raise ConfigError(f"{folder / _MANIFEST} {reason}", fix=_instead(folder))


def older_whole(folder: Path) -> Path | None:
    """Return the newest checkpoint before ``folder`` whose files are all as written; reads them."""
    for candidate in reversed(_readable(folder.parent)):
        if candidate == folder or 0 <= _step_of(folder) <= _step_of(candidate):
            continue
        try:
            # Not read_manifest, which would look for an older one for each that cannot be read.
            manifest = _parse_manifest(candidate)
        except _UNREADABLE:
            continue
        if not find_damage(candidate, manifest.files):
            return candidate
    return None


def _instead(folder: Path) -> str:
    older = older_whole(folder)
    if older is None:
        return f"there is no older whole checkpoint in {folder.parent}: restore this one from a copy"
    return f"load {older} instead: it is whole"


def _kind_of(path: Path) -> str | None:
    match = _NAME.fullmatch(path.name)
    return None if match is None else match["kind"] or match["hidden"]


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return -1 if match is None else int(match["step"] or match["of"])


def _named(run: Path, *kinds: str) -> list[Path]:
    """Return what has a name of these kinds in ``run``, lowest step first."""
    return sorted((path for path in run.iterdir() if _kind_of(path) in kinds), key=_step_of) if run.is_dir() else []


def _readable(run: Path) -> list[Path]:
    """Return what claims to be a checkpoint of ``run``, oldest step first."""
    claims = [*_named(run, "replaced"), *_named(run, "step")]  # the final name wins
    by_step = {_step_of(path): path for path in claims if (path / _MANIFEST).is_file()}
    return [by_step[step] for step in sorted(by_step)]


def _own_manifest(folder: Path) -> Manifest | None:
    """Return what ``folder`` says about itself if ``save_checkpoint`` wrote it, as its name says."""
    if folder.is_symlink():
        return None
    try:
        manifest = _parse_manifest(folder)
    except _UNREADABLE:
        return None
    return manifest if manifest.step == _step_of(folder) else None


# -- who may write


@dataclass(frozen=True)
class _RunLock:
    """The right of this process to write to one folder, for as long as a model that it saved there is alive.

    The system lets go of the lock on ``writer.lock`` when the process ends, however it ends, so a run that was killed
    stops nobody.

    Attributes:
        descriptor: Of the file. A process has one descriptor of a file: to close any ends its lock.
        models: Those that were saved.
        partials: Folders that saves of this process are writing now.
    """

    descriptor: int
    models: WeakSet[nn.Module] = field(default_factory=WeakSet)
    partials: set[Path] = field(default_factory=set)


class _RunLocks(dict[tuple[int, int, int], _RunLock]):
    """By process, since a fork has a copy of the table but not the lock, and by file, which may have many names.

    Attributes:
        guard: Held by who reads or changes locks or names in the folder of a run: saves of several models may end at
            once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.guard = Lock()


_LOCKS = _RunLocks()


def _acquire(run: Path) -> _RunLock:
    """Return this process's right to write to ``run``, which is made if need be; raises where another run has it."""
    run.mkdir(parents=True, exist_ok=True)
    path = run / _LOCK
    held = _LOCKS.get(_key(os.stat(path, follow_symlinks=False))) if path.exists() else None
    if held is not None:
        return held
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        holder = os.pread(descriptor, 4096, 0).decode(errors="replace")
        if holder and not holder.startswith("process "):
            raise ConfigError(f"{path} was not written by save_checkpoint", fix="move it away")
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Else this disk keeps no locks.
            if error.errno in (errno.EACCES, errno.EAGAIN):
                fix = "save to another folder, or end the other run first"
                at = f"{place_of_rank()}; there: {holder or 'nobody says who'}"
                raise UsageError(f"another run writes to {run}", at=at, fix=fix) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {time.ctime()}".encode(), 0)
        return _LOCKS.setdefault(_key(os.fstat(descriptor)), _RunLock(descriptor))
    except BaseException:
        os.close(descriptor)
        raise


def _key(found: os.stat_result) -> tuple[int, int, int]:
    return os.getpid(), found.st_dev, found.st_ino


def _let_go() -> None:
    """Give up folders of which no model is alive that was saved there, and to which nothing is being written."""
    for key, lock in list(_LOCKS.items()):
        if key[0] == os.getpid() and not list(lock.models) and not lock.partials:
            os.close(_LOCKS.pop(key).descriptor)


def _a_model_is_gone() -> None:
    # The collector may call this in a thread that has the guard; then whoever saves next lets go.
    if _LOCKS.guard.acquire(blocking=False):
        try:
            _let_go()
        finally:
            _LOCKS.guard.release()


# -- writing


@dataclass(frozen=True)
class PartialCheckpoint:
    """A checkpoint that is being written, under a name that readers ignore.

    Attributes:
        folder: Where its files go.
        keep: Checkpoints to leave once it is whole, it and those of later steps included.
        discard_later: Remove checkpoints of later steps then.
    """

    folder: Path
    keep: int
    discard_later: bool
    lock: _RunLock

    @staticmethod
    def begin(run: Path, step: int, model: nn.Module, *, keep: int, discard_later: bool) -> "PartialCheckpoint":
        """Make an empty folder in that of the run, and tidy up there what a kill has left.

        Raises where another run writes here, or the checkpoint would take something from somebody.
        """
        with _LOCKS.guard:
            _let_go()
            lock = _acquire(run)
            try:
                _check_step(run, step, discard_later=discard_later)
                _tidy(run, lock.partials)
                folder = _hidden(run, "partial", step)
                folder.mkdir()
            except BaseException:
                _let_go()
                raise
            if model not in lock.models:
                lock.models.add(model)
                finalize(model, _a_model_is_gone)
            lock.partials.add(folder)
        return PartialCheckpoint(folder, keep, discard_later, lock)

    def publish(self, manifest: Manifest) -> Path:
        """Give the folder, whose files are written and synced, its final name, then remove what is older."""
        run, whole = self.folder.parent, self.folder.parent / f"step-{manifest.step:06d}"
        with _LOCKS.guard:
            lengths = {path.name: path.stat().st_size for path in self.folder.iterdir()}
            gone = [name for name, saved in manifest.files.items() if lengths.get(name) != saved.bytes]
            if gone:
                raise ConfigError(
                    f"{self.folder} lacks what other ranks wrote: {', '.join(sorted(gone))}",
                    fix="save to a folder that all ranks see under one name",
                )
            write_summed(self.folder / _MANIFEST, manifest.as_bytes())
            sync_folder(self.folder)
            # All bytes are written before the first name changes: a full disk stops nothing half-way.
            write_summed(run / ".latest", whole.name.encode())
            if whole.exists():
                whole.rename(_hidden(run, "replaced", manifest.step))
            self.folder.rename(whole)
            os.replace(run / ".latest", run / "latest")
            sync_folder(run)
            others = [path for path in _named(run, "step") if path != whole and _own_manifest(path) is not None]
            earlier = [path for path in others if _step_of(path) < manifest.step]
            later = [path for path in others if _step_of(path) > manifest.step]
            # A name that promises a whole checkpoint goes before its files do.
            for path in earlier[: max(0, len(earlier) - (self.keep - 1))] + (later if self.discard_later else []):
                path.rename(_hidden(run, "removed", _step_of(path)))
            self.lock.partials.discard(self.folder)
            _tidy(run, self.lock.partials)
            _let_go()
        return whole

    def leave(self, *, remove: bool) -> None:
        """End a save that did not come to its end."""
        with _LOCKS.guard:
            self.lock.partials.discard(self.folder)
            if remove:
                shutil.rmtree(self.folder, ignore_errors=True)
            _let_go()


def _check_step(run: Path, step: int, *, discard_later: bool) -> None:
    """Raise unless a checkpoint of ``step`` may be written to ``run`` without taking anything from anybody."""
    later = [path.name for path in _named(run, "step") if _step_of(path) > step and _own_manifest(path) is not None]
    if later and not discard_later:
        raise ConfigError(
            f"{run} holds checkpoints of later steps than {step}: {', '.join(later)}",
            at=place_of_rank(),
            fix="load_checkpoint first, to go on from the latest; save to another folder, to begin anew; or pass "
            "discard_later=True, to remove them",
        )
    whole = run / f"step-{step:06d}"
    if not (whole.exists() or whole.is_symlink()):
        return
    manifest = _own_manifest(whole)
    if manifest is None:
        raise ConfigError(
            f"{whole} is there already, and is no whole checkpoint of save_checkpoint",
            at=place_of_rank(),
            fix="move it away, or save to another folder",
        )
    others = sorted({path.name for path in whole.iterdir()} - {*manifest.files, _MANIFEST})
    if others:
        raise ConfigError(
            f"{whole} would be replaced, and holds what save_checkpoint did not write: {', '.join(others)}",
            at=place_of_rank(),
            fix="move that away, or save to another folder",
        )


def _hidden(run: Path, kind: str, step: int) -> Path:
    return run / f".{kind}-{step:06d}-{secrets.token_hex(4)}"


def _tidy(run: Path, in_use: set[Path]) -> None:
    """Remove what is under names that nobody reads, as far as it was written here; other files get their name back."""
    for hidden in _named(run, "removed", "replaced"):
        if hidden.is_symlink() or not hidden.is_dir():
            continue
        manifest, whole = _own_manifest(hidden), hidden.with_name(f"step-{_step_of(hidden):06d}")
        # Where a kill came between the two renames of `publish`, what was to be replaced is still the checkpoint.
        is_over = _kind_of(hidden) == "removed" or whole.exists()
        for name in [*manifest.files, _MANIFEST] if manifest is not None and is_over else []:
            (hidden / name).unlink(missing_ok=True)
        if not any(hidden.iterdir()):
            hidden.rmdir()
        elif not whole.exists():
            hidden.rename(whole)
    for partial in _named(run, "partial"):
        if partial not in in_use:
            shutil.rmtree(partial)

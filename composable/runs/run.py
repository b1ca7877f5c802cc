"""The checkpoints of a run, on a disk or in a storage, safe after a kill.

Each save writes below a name of its own, ``step-NNNNNN-A-TOKEN``, where A counts the saves of this step. The manifest
comes last, in one go, and only a folder with a manifest is a checkpoint; whatever a kill leaves without one is never
read. Nothing is ever overwritten, so a save that another job has begun, or one that was thought dead, spoils no file of
this one. What a checkpoint replaces is removed after that, its manifest first.

On a disk a save writes to ``.partial-NNNNNN-TOKEN``, which with a manifest is a checkpoint too. Then the folder is
renamed to ``step-NNNNNN``: other programs may take this name as a promise. Folders are renamed away before they are
removed. A kill between any two of these leaves whole checkpoints, which are found, and the next save does the rest.

A disk locks ``writer.lock``, so a second process is refused. A storage has no locks: there the file has the name of the
process that began last. Who finds another name, when a save begins or right before it is committed, gives way.
Leftovers are removed after a save: by then whoever wrote them has been told.

A folder is ours if its ``checkpoint.json`` lists every file in it; no other is replaced or removed. There, length and
CRC-32 of each file serve to detect damage. Nothing here communicates: one process writes the names, all may read.
"""

import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import zlib
from collections.abc import Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from composable.errors import ConfigError, DesyncError, UsageError
from composable.ground.names import as_kind, list_text
from composable.runs.storage import FileSum, Storage, StoredFolder, on_disk, open_regular, sync_folder
from composable.saving import OptimizerNames

EXTRA = "extra.pt"
METADATA = ".metadata"  # torch's description of the values, for torch alone.
PIECES = "pieces.json"
MANIFEST = "checkpoint.json"
_MAX_MANIFEST_BYTES = 2**28
_LOG = logging.getLogger("composable")
LOCK = "writer.lock"
_FORMAT = 2
# In a storage a token follows.
_HOLDER = re.compile(r"process \d+ on \S*( [0-9a-f]{16})?")
# Kinds of names, those that are replaced first: `.replaced` is what earlier versions left that a kill has ended.
_KINDS = (".removed", ".replaced", "step", ".partial")
_NAME = re.compile(r"(\.removed|\.replaced|step|\.partial)-(\d{6,})(?:(?:-(\d+))?(-[0-9a-f]{8}))?")

# The files of a rank, as torch names them.
RANK = re.compile(r"__(\d+)_")


@contextmanager
def warned(what: str) -> Iterator[None]:
    """Log an error of a part of a save without which the checkpoint is whole."""
    try:
        yield
    except Exception as error:
        _LOG.warning("%s: %s: %s", what, type(error).__name__, error)


# -- a checkpoint


@dataclass(frozen=True)
class Manifest:
    """The description in a checkpoint: its optimizer steps, every other file, and its optimizers in order."""

    step: int
    files: dict[str, FileSum]
    optimizers: tuple[OptimizerNames, ...]

    def as_bytes(self) -> bytes:
        """Return the contents of ``checkpoint.json``."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1).encode()


def read_manifest(folder: StoredFolder, content: bytes | None = None) -> Manifest:
    """Return the manifest of the checkpoint ``folder``, from ``content`` if it was read; raises if it is none."""
    try:
        content = folder.read(MANIFEST, 0, _MAX_MANIFEST_BYTES) if content is None else content
        body = as_kind(dict[str, Any], json.loads(content, object_pairs_hook=unique), "it")
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
            f"{folder}/{MANIFEST} cannot be read: {error}",
            fix="load a checkpoint that save_checkpoint wrote to its end, such as an older one of the run; of "
            "per_rank=True, copy the folders of all ranks together first",
        ) from error


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict of what JSON has; raises ``ValueError`` for a key that comes twice."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError("it has a key twice")
    return found


def _lists_all(folder: StoredFolder, names: Collection[str]) -> bool:
    """Say whether the manifest in ``folder``, which is no link, lists all of these names."""
    try:
        return not os.path.islink(folder.local or "") and {*read_manifest(folder).files, MANIFEST}.issuperset(names)
    except ConfigError:
        return False


def find_damage(folder: StoredFolder, files: Mapping[str, FileSum]) -> list[str]:
    """Read ``files`` and return a line for each that differs from what was written."""
    lines = []
    for name, saved in files.items():
        path, crc32 = f"{folder}/{name}", 0
        try:
            nbytes = folder.length(name)
            for part in folder.parts(name, nbytes) if nbytes == saved.bytes else ():
                crc32 = zlib.crc32(part, crc32)
        except OSError as error:
            rank = RANK.match(name)
            writer = f"; rank {rank[1]} wrote it" if rank else ""
            lines.append(f"{path} cannot be read: {error.strerror or error}{writer}")
            continue
        if nbytes != saved.bytes:
            lines.append(f"{path} has {nbytes:,} bytes; {saved.bytes:,} were written")
        elif crc32 != saved.crc32:
            lines.append(f"{path} has changed: its {saved.bytes:,} bytes are not those that were written")
    return lines


# -- names


def _order(name: str) -> tuple[int, int, int]:
    """Return the step of a checkpoint, the number of its save, and a number that is larger for what replaces others."""
    match = _NAME.fullmatch(name)
    return (-1, 0, 0) if match is None else (int(match[2]), int(match[3] or 0), _KINDS.index(match[1]))


def _has_token(name: str) -> bool:
    """Say whether a save has made this name up, so that it is nobody else's."""
    match = _NAME.fullmatch(name)
    return match is not None and match[4] is not None


def _names_in(run: StoredFolder) -> list[str]:
    """Return the names of checkpoints in ``run``, whole or not, the latest last."""
    return sorted((name for name, size in run.list().items() if size is None and _NAME.fullmatch(name)), key=_order)


def _is_whole(name: str, files: Collection[str]) -> bool:
    """Say whether a folder with these files is a checkpoint."""
    return MANIFEST in files and not name.startswith(".removed")


def find_folder(place: StoredFolder) -> StoredFolder:
    """Return ``place`` if it is a checkpoint, else the latest checkpoint in it; raises if there is none.

    Of ``RUN/step-NNNNNN`` the last save of this step counts. A damaged checkpoint is never skipped for an older one.
    """
    place = on_disk(place.local.absolute()) if place.local else place
    if place.has(MANIFEST):
        return place
    is_one = place.last == f"step-{_order(place.last)[0]:06d}"
    run = place.parent if is_one else place
    for name in reversed(_names_in(run)):
        is_promised = run.local and name.startswith("step-")
        is_meant = not is_one or _order(name)[0] == _order(place.last)[0]
        if is_meant and (is_promised or _is_whole(name, run.list(name))):
            return run / name
    if is_one and place.local:
        return place
    is_file = place.last.endswith((".safetensors", ".pt")) or (place.local and place.local.is_file())
    of_file = "pass a file to load_full_state_dict(model, torch.load(path)), or to load_safetensors(model, path)"
    fix = of_file if is_file else "pass a run's folder or one of its step-NNNNNN folders"
    raise ConfigError(f"no checkpoint in {place}", fix=fix)


# -- who writes


@dataclass
class _OpenRun:
    """A run that this process writes: its storage, the names of saves that are under way, and the lock on a disk."""

    storage: Storage
    begun: set[str] = field(default_factory=set)
    lock: int | None = None


class _Process:
    """The runs that this process writes."""

    def __init__(self) -> None:
        # By URL or path, or by the ``id`` of a storage that is kept here; held until the process ends.
        self.runs: dict[Hashable, _OpenRun] = {}
        self.token = secrets.token_hex(8)  # The random name of this process in storages.
        # Held while names in a run's folder are read or changed: saves of several models may end at once.
        self.guard = Lock()


PROCESS = _Process()


def _lock(path: Path, held: int | None) -> int:
    """Lock a file for this process, unless it is the one of the descriptor ``held``; return the descriptor.

    The system releases the lock when the process ends in any way, so a run that was killed blocks no other.
    """
    if held is not None:
        with suppress(OSError):
            if os.path.samestat(path.lstat(), os.fstat(held)):
                return held
        _LOG.warning("%s was removed while this run writes there: it is locked anew", path)
        os.close(held)
    try:
        descriptor = open_regular(path, os.O_RDWR | os.O_CREAT)
    except OSError as error:
        is_foreign = error.errno in (errno.EINVAL, errno.ELOOP, errno.EISDIR, errno.ENXIO)
        raise (_foreign(path) if is_foreign else error) from None
    holder = os.pread(descriptor, 4096, 0)
    try:
        _check_holder(holder, path)
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ConfigError:
        os.close(descriptor)
        raise
    except OSError as error:
        # With any other error, this disk has no locks.
        if error.errno in (errno.EACCES, errno.EAGAIN):
            os.close(descriptor)
            raise _another_run(path.parent, holder) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, _this_process().encode(), 0)
    return descriptor


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _check_holder(content: bytes, path: object) -> None:
    """Raise if the lock at ``path`` is a file of another program."""
    if content and not _HOLDER.fullmatch(content.decode(errors="replace")):
        raise _foreign(path)


def _another_run(run: object, holder: bytes) -> UsageError:
    fix = "save to another folder, or end the other run first"
    return UsageError(f"another run writes to {run}", at=f"there: {holder.decode()}", fix=fix)


def _foreign(path: object) -> ConfigError:
    fix = "move it away, or save to another folder"
    return ConfigError(f"{path} is no file that save_checkpoint wrote", fix=fix)


# -- writing


class Run:
    """The folder of a run, which all ranks see."""

    def __init__(self, place: StoredFolder) -> None:
        # The current folder may be another one by the time at which a thread writes.
        self.place = on_disk(place.local.resolve()) if place.local else place
        self.local = self.place.local
        self._key: Hashable = self.place.url or id(place.storage)

    def __str__(self) -> str:
        return str(self.place)

    def begin(self, step: int) -> str:
        """Return a new name for a checkpoint.

        Raises if another run writes here, if there are later checkpoints, or if files of others would be replaced.
        """
        with PROCESS.guard:
            self._hold()
            names = _names_in(self.place)
            later = [name for name in names if _order(name)[0] > step]
            if later := [name for name in later if _is_whole(name, self.place.list(name))]:
                raise ConfigError(
                    f"{self} holds checkpoints of later steps than {step}: {', '.join(later)}",
                    fix="load_checkpoint first, to go on from the latest; or save to another folder; or remove them",
                )
            number = 1 + max((_order(name)[1] for name in names if _order(name)[0] == step), default=0)
            partial = f"step-{step:06d}-{number}-{secrets.token_hex(4)}"
            if self.local:
                whole = f"step-{step:06d}"
                if whole in self.place.list() and not _lists_all(self.place / whole, self.place.list(whole)):
                    raise ConfigError(
                        f"{self}/{whole} exists already, with files that save_checkpoint did not write",
                        fix="move it away, or save to another folder",
                    )
                # The lock says that whoever has left something is gone, and its room may be needed.
                self._clean()
                partial = f".partial-{step:06d}-{secrets.token_hex(4)}"
                (self.local / partial).mkdir()
            PROCESS.runs[self._key].begun.add(partial)
        return partial

    def folder(self, partial: str) -> StoredFolder:
        """Return the folder of the name that ``begin`` returned."""
        return self.place / partial

    def path(self, partial: str) -> Path | str:
        """Return the path of the checkpoint, as users get it, once it is committed."""
        return self.local / f"step-{_order(partial)[0]:06d}" if self.local else self.folder(partial).path

    @contextmanager
    def room(self, partial: str) -> Iterator[Path]:
        """Yield a local folder where a rank writes its files: on a disk the checkpoint's own, else a temporary one."""
        if self.local:
            yield self.local / partial
            return
        with tempfile.TemporaryDirectory(prefix=f"{partial}-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)

    def put(self, partial: str, file: Path) -> None:
        """Take a file that is whole, and synced, in ``room``."""
        if not self.local:
            self.folder(partial).write(file.name, file)

    def commit(self, partial: str, manifest: Manifest) -> None:
        """Make a checkpoint of what ``put`` took."""
        folder = self.folder(partial)
        with PROCESS.guard:
            lengths = folder.list()
            if gone := [name for name, saved in manifest.files.items() if lengths.get(name) != saved.bytes]:
                raise ConfigError(
                    f"{folder} lacks files that other ranks wrote: {', '.join(sorted(gone))}",
                    fix="save to a folder that all ranks see under one name",
                )
            self._hold(is_begun=True)
            try:
                folder.commit(MANIFEST, manifest.as_bytes())
            except OSError:
                # The storage, or the server of a disk, may have done it, and have lost its answer.
                if not _lists_all(folder, manifest.files):
                    raise
            PROCESS.runs[self._key].begun.discard(partial)

    def settle(self, partial: str, *, keep: int) -> None:
        """Remove what ``partial``, which was committed, replaces, checkpoints beyond ``keep``, and leftovers.

        On a disk, if its name may not last, nothing is removed.
        """
        with PROCESS.guard:
            if self.local:
                sync_folder(self.local / partial)
                sync_folder(self.local)
            earlier = [name for name in self._clean() if _order(name)[0] < _order(partial)[0]]
            for name in earlier[: max(0, len(earlier) - (keep - 1))]:
                self._remove(name)

    def abandon(self, partial: str, *, remove: bool) -> None:
        """End a save that failed; with ``remove`` also delete its files, unless they are a checkpoint already."""
        with PROCESS.guard:
            begun = PROCESS.runs[self._key].begun
            if remove and partial in begun:
                self._remove(partial)
            begun.discard(partial)

    def _hold(self, *, is_begun: bool = False) -> None:
        """Take the run over at the first save of this process; raise if another process has it."""
        held = PROCESS.runs.get(self._key) or _OpenRun(self.place.storage)
        if self.local and not is_begun:
            self.local.mkdir(parents=True, exist_ok=True)
            before, held.lock = held.lock, None
            held.lock = _lock(self.local / LOCK, before)
        elif not self.local:
            text = f"{_this_process()} {PROCESS.token}".encode()
            holder = self.place.read(LOCK, 0, 4096) if self.place.has(LOCK) else b""
            _check_holder(holder, f"{self}/{LOCK}")
            if holder and holder != text and self._key in PROCESS.runs:
                raise _another_run(self, holder)
            if holder != text:
                self.place.commit(LOCK, text)
        PROCESS.runs[self._key] = held

    def _clean(self) -> list[str]:
        """Remove leftovers, and of several saves of a step all but the last; on a disk, give that its name.

        Returns the names of other checkpoints of ours, the latest last.
        """
        files = {name: self.place.list(name) for name in _names_in(self.place)}
        whole = [name for name in files if _is_whole(name, files[name])]
        latest = {_order(name)[0]: name for name in whole}
        mine = [name for name in whole if _lists_all(self.place / name, files[name])]
        gone = [name for name in mine if name not in latest.values()]
        stays = {*whole, *PROCESS.runs[self._key].begun}
        for name in [*gone, *(name for name in files if name not in stays and _has_token(name))]:
            self._remove(name)
        for step, name in latest.items():
            if name.startswith("."):
                with warned(f"{self}/{name} is whole, and could not be renamed to step-{step:06d}"):
                    os.rename(f"{self}/{name}", f"{self}/step-{step:06d}")
                    latest[step] = f"step-{step:06d}"
        return [latest[_order(name)[0]] for name in mine if name not in gone]

    def _remove(self, name: str) -> None:
        with warned(f"{self.place / name} could not be removed"):
            if self.local and name.startswith("step-"):
                # A name that promises a whole checkpoint is removed before its files.
                hidden = f".removed-{_order(name)[0]:06d}-{secrets.token_hex(4)}"
                os.rename(f"{self}/{name}", f"{self}/{hidden}")
                name = hidden
            # Without its manifest it is no checkpoint, whatever comes then.
            self.place.remove(name, MANIFEST)
            self.place.remove(name)


class RankRun(Run):
    """A folder of each rank's own, or of each host's, for a part of a checkpoint.

    Files of different ranks have different names, and the first rank's part has the manifest: copied onto each other,
    the parts are the checkpoint. Whoever copies them also removes them. Nothing is locked.
    """

    def __init__(self, place: StoredFolder, step: int) -> None:
        super().__init__(place)
        if self.local is None:
            what = f"per_rank is True, and folder is {place}"
            raise ConfigError(what, fix="leave it out: all ranks see a storage")
        self._folder = self.local / f"step-{step:06d}"
        if os.path.lexists(self._folder):
            what, fix = f"{self._folder} exists already", "pass a new folder for each save, such as a temporary one"
            raise ConfigError(what, fix=fix)

    def begin(self, step: int) -> str:
        """Return the name of the checkpoint, the same on every rank."""
        return self._folder.name

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

    def commit(self, partial: str, manifest: Manifest) -> None:
        """Write the manifest, once all ranks have written their parts."""
        self.folder(partial).commit(MANIFEST, manifest.as_bytes())

    def settle(self, partial: str, *, keep: int) -> None:
        """Make the name of the manifest last, and leave older checkpoints as they are."""
        sync_folder(self._folder)

    def abandon(self, partial: str, *, remove: bool) -> None:
        """End a save that failed; ``room`` has removed the folder."""

"""Who writes to a run's folder: one process at a time, and the others are told.

The first rank holds a lock on the file ``writer.lock`` of the folder from its first save on, for as long as a model
that it saved there is alive. The system lets go of the lock when the process ends, however it ends, so a
run that was killed stops nobody. Where a disk keeps no locks, the file still says who wrote last, and
a run that finds another there knows at its next save.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from weakref import WeakKeyDictionary, WeakValueDictionary, finalize

from torch import nn

from composable.errors import ConfigError, UsageError, place_of_rank

__all__ = ["LOCK", "Owner", "own"]

LOCK = "writer.lock"
_TAKEN = {errno.EACCES, errno.EAGAIN}
_FIX = "save to another folder, or end the other run first"


class Owner:
    """The right of this process to write to one folder. Who got it by ``own`` calls ``keep`` or ``leave`` once.

    Attributes:
        partials: Folders that saves of this process are writing now.
        lock: Held by the save that makes, gives or takes names in the folder, and changes ``partials``: saves of
            several models may end in the background at once.
    """

    def __init__(self, run: Path, descriptor: int, file_id: tuple[int, int]) -> None:
        self.partials: set[Path] = set()
        self.lock = threading.Lock()
        self.pid = os.getpid()
        self._run = run
        self._file_id = file_id
        self._descriptor = descriptor
        self._token = secrets.token_hex(8)
        self._callers = 0
        self._is_kept = False
        self._close = finalize(self, _close, descriptor, file_id)

    def check(self) -> None:
        """Raise if another run has begun to write here, which can happen only where a disk keeps no locks.

        Raises:
            UsageError: It has.
        """
        holder = _holder(self._descriptor)
        if holder.get("token") != self._token:
            raise _another(self._run, holder)

    def sign(self) -> None:
        """Write into the file who this is."""
        text = json.dumps(
            {"host": socket.gethostname(), "process": self.pid, "since": time.ctime(), "token": self._token}
        )
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    def keep(self, model: nn.Module) -> None:
        """Hold the right for as long as ``model`` lives."""
        with _GUARD:
            _OWNERS_OF_MODELS.setdefault(model, {})[self._file_id] = self
            self._is_kept = True
            self._callers -= 1

    def leave(self) -> None:
        """Give the right up now, unless an earlier save keeps it, or another one has just begun."""
        with _GUARD:
            self._callers -= 1
            if not self._is_kept and not self._callers:
                self._give_up()

    def _give_up(self) -> None:
        _OWNERS.pop(self._file_id, None)
        self._close()


# By the file, which a folder has under whatever name.
_OWNERS: "WeakValueDictionary[tuple[int, int], Owner]" = WeakValueDictionary()
# What keeps an owner alive: the models that it saved.
_OWNERS_OF_MODELS: "WeakKeyDictionary[nn.Module, dict[tuple[int, int], Owner]]" = WeakKeyDictionary()
# Held by who reads or changes the two; the collector may run a finalizer in the thread that does.
_GUARD = threading.RLock()


def own(run: Path) -> Owner:
    """Make this process the one that writes to the folder ``run``, which is made if need be.

    Raises:
        UsageError: Another run writes here.
        ConfigError: A file has the name of the lock.
        OSError: The folder cannot be written to.
    """
    run.mkdir(parents=True, exist_ok=True)
    with _GUARD:
        owner = _OWNERS.get(_file_id(run / LOCK) or (0, 0))
        # A fork has a copy of this table, but not the lock.
        if owner is None or owner.pid != os.getpid():
            owner = _take(run)
        else:
            owner.check()
        owner._callers += 1
    return owner


def _take(run: Path) -> Owner:
    descriptor = os.open(run / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        _lock(descriptor, run)
        found = os.fstat(descriptor)
        if found.st_size and not _holder(descriptor):
            raise ConfigError(f"{run / LOCK} was not written by save_checkpoint", fix="move it away")
    except BaseException:
        os.close(descriptor)
        raise
    owner = Owner(run, descriptor, (found.st_dev, found.st_ino))
    _OWNERS[owner._file_id] = owner
    try:
        # Once more: the collector may have closed the file for an owner before this one.
        _lock(descriptor, run)
        owner.sign()
    except BaseException:
        owner._give_up()
        raise
    return owner


def _lock(descriptor: int, run: Path) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            raise _another(run, _holder(descriptor)) from None
        # This disk keeps no locks: the signature has to do.


def _close(descriptor: int, file_id: tuple[int, int]) -> None:
    """Close a file that an owner had open."""
    with _GUARD:
        os.close(descriptor)
        # A lock of this kind is the process's: closing any descriptor of the file has ended it.
        later = _OWNERS.get(file_id)
        if later is not None and later._descriptor != descriptor:
            with suppress(OSError):
                fcntl.lockf(later._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _another(run: Path, holder: dict[str, object]) -> UsageError:
    who = f"process {holder['process']} on {holder['host']}, since {holder['since']}" if holder else "nobody says who"
    return UsageError(f"another run writes to {run}", at=f"{place_of_rank()}; there: {who}", fix=_FIX)


def _holder(descriptor: int) -> dict[str, object]:
    """Return what the file says of who holds it; empty if that is not readable."""
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(found, dict) and {"host", "process", "since", "token"} <= found.keys()
    return found if is_ours else {}


def _file_id(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino

"""Files while something is rehearsed: what a script writes is not there afterwards; what cannot be held back is told.

Python tells of each change of a file before it happens, and of each program that starts (PEP 578). Libraries in C that
write by themselves are not held back.
"""

import _posixsubprocess
import builtins
import functools
import importlib
import io
import json
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from composable.errors import UsageError
from composable.rehearsal.ledger import LedgerLine, users_line

# What Python tells before a file changes or a program starts, with the path or the program.
_CHANGES = """open os.chflags os.chmod os.chown os.exec os.link os.mkdir os.posix_spawn os.remove os.removexattr
    os.rename os.rmdir os.setxattr os.symlink os.system os.truncate os.utime sqlite3.connect subprocess.Popen""".split()
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class FileChangeError(UsageError, PermissionError):
    """A rehearsed script would change a file. Also a ``PermissionError``, which libraries expect where they write."""


def refusal_of_changes(inside: tuple[str, ...]) -> Callable[..., None]:
    """Return what hears events of Python, and raises for a change of a file whose path begins with none of ``inside``.

    In place of a program it raises, too; modes and times of files count as changes.
    """

    def hear(event: str, values: Sequence[Any], *_: object) -> None:
        is_read = event not in _CHANGES or (event == "open" and not values[2] & _WRITES)
        paths = values[:2] if event in {"os.link", "os.rename"} else values[event == "os.symlink" :][:1]
        if not is_read and not all(is_free(event, one) for one in paths):
            what = f"{event} of {' and '.join(map(repr, paths))} may change files"
            raise FileChangeError(what, at=": ".join(users_line(sys._getframe(1))), fix="leave it out, or use open()")

    def is_free(event: str, path: Any) -> bool:
        if isinstance(path, int):
            return event in {"open", "os.truncate"}  # Of a file that was opened for writing, or only read.
        if path in {"", ":memory:"}:
            return True
        name, is_itself = os.path.abspath(os.fsdecode(path)), event.startswith("os.") and event != "os.truncate"
        place = os.path.realpath(os.path.dirname(name) if is_itself else name)
        return f"{place}/".startswith(inside) and not event.endswith(("exec", "spawn", "system", "Popen"))

    return hear


# The thread that rehearses a function, and what hears its events.
_held: dict[int, Callable[..., None]] = {}
# Functions whose changes of a file, which they take first or second, Python does not tell; "open" is the nearest event.
_WRITERS: tuple[tuple[Any, str, int], ...] = ((os, "mknod", 0), (os, "mkfifo", 0), (torch, "save", 1))
_UNTOLD = [one for one in _WRITERS if hasattr(*one[:2])]


@contextmanager
def unchanged_files() -> Iterator[None]:
    """Let this thread change files in the folder for temporary files only; other changes are a ``FileChangeError``."""
    _listen()
    thread, before = threading.get_ident(), [getattr(owner, name) for owner, name, _ in _UNTOLD]
    _held[thread] = refusal_of_changes((os.path.realpath(tempfile.gettempdir()) + "/", "/dev/"))
    try:
        for (owner, name, at), call in zip(_UNTOLD, before, strict=True):
            setattr(owner, name, _telling(call, at))
        yield
    finally:
        del _held[thread]
        for (owner, name, _), call in zip(_UNTOLD, before, strict=True):
            setattr(owner, name, call)


def _telling(call: Any, at: int) -> Callable[..., Any]:
    @functools.wraps(call)
    def told(*args: Any, **kwargs: Any) -> Any:
        for path in (*args[at : at + 1], *kwargs.values()):
            if isinstance(path, str | bytes | os.PathLike):
                _hear("open", (path, "w", _WRITES))
        return call(*args, **kwargs)

    return told


def _hear(event: str, values: Sequence[Any]) -> None:
    if _held and (told := _held.get(threading.get_ident())) is not None:
        told(event, values)


@functools.cache
def _listen() -> None:
    """Hear what Python tells, from now on: a process cannot stop listening."""
    sys.addaudithook(_hear)


def stand_in_for_files(folder: Path, number: int, first: int, lines: Sequence[LedgerLine]) -> None:
    """Let this process write below ``folder`` only: what it opens for writing elsewhere is a copy of this rank there.

    Modes, owners, times and attributes stay. Every other change that Python tells of before it happens (PEP 578), and
    a program, is a ``FileChangeError``. Libraries in C that write by themselves are not held back.

    A rank, whose ledger grows in ``lines``, sees a file of the rank ``first``, which was rehearsed before all others,
    as that has left it, once the two have met after its first write: who looks into a folder at the beginning must not
    see what another left at its end.
    """
    real_open, make, make_folder = builtins.open, os.mkdir, functools.partial(os.makedirs, exist_ok=True)
    open_descriptor = os.open
    noted, seen = folder / f"written-{first}", 0
    # Of each file of the first rank, by its path, how often the two had met when it was first written.
    unseen: dict[str, int] = {}
    if number == first:
        noted.write_text("")
    else:
        groups = [json.loads(row)["ranks"] for row in (folder / f"ledger-{first}").read_text().splitlines()]
        for count, name in map(json.loads, noted.read_text().splitlines()):
            unseen.setdefault(name, sum(number in ranks for ranks in groups[:count]))

    def look() -> None:
        nonlocal seen
        if not unseen or len(lines) == seen:
            return
        seen, met = len(lines), sum(first in one.ranks for one in lines)
        for name in [name for name, before in unseen.items() if before < met]:
            del unseen[name]
            theirs, own = folder / f"files-{first}" / name, folder / f"files-{number}" / name
            make_folder(own if os.path.isdir(theirs) else own.parent)
            if os.path.isfile(theirs) and not os.path.isfile(own):
                own.write_bytes(theirs.read_bytes())

    def copy_of(path: Any, *, is_written: bool = False) -> Path:
        name = os.path.abspath(os.fsdecode(path)).lstrip(os.sep)  # resolves no links
        if is_written and number == first:
            with real_open(noted, "a") as file:
                file.write(json.dumps((len(lines), name)) + "\n")
        return folder / f"files-{number}" / name

    def there(path: Any) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and not os.fsdecode(path).startswith(("/dev/", str(folder)))

    def is_copied(path: Any) -> bool:
        look()
        return os.path.exists(copy_of(path))

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if there(file):
            writes = bool(set(mode) & set("wax+"))
            target = copy_of(file, is_written=writes)
            if writes and not is_copied(file):
                make_folder(target.parent)
                if not set(mode) & set("wx") and os.path.isfile(file):
                    target.write_bytes(Path(file).read_bytes())
            file = target if writes or is_copied(file) else file
        return real_open(file, mode, *args, **kwargs)

    def opened_descriptor(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if there(path) and flags & _WRITES:
            if os.path.isfile(path):
                opened(path, "a").close()
            path = copy_of(path, is_written=True)
            make_folder(path.parent)
        return open_descriptor(copy_of(path) if there(path) and is_copied(path) else path, flags, *args, **kwargs)

    def mkdir(path: Any, mode: int = 0o777, **_: Any) -> None:
        if there(path) and os.path.exists(path):
            raise FileExistsError(17, "File exists", os.fsdecode(path))
        make_folder(copy_of(path, is_written=True)) if there(path) else make(path, mode)

    def reading(call: Callable[..., Any]) -> Callable[..., Any]:
        def read(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            return call(copy_of(path) if there(path) and is_copied(path) else path, *args, **kwargs)

        return read

    def writing(call: Callable[..., Any]) -> Callable[..., Any]:
        def write(*paths: Any, **kwargs: Any) -> Any:
            copies = [copy_of(one, is_written=True) if there(one) else one for one in paths]
            # What is not among the copies was there before, and stays.
            if is_copied(paths[0]) or not there(paths[0]):
                make_folder(Path(copies[-1]).parent)
                return call(*copies, **kwargs)
            return None

        return write

    hear = refusal_of_changes((os.path.realpath(folder) + "/", "/dev/"))
    os.environ["TMPDIR"] = f"{folder}/files-{number}/temporary"
    make_folder(os.environ["TMPDIR"])
    builtins.open, io.open, os.open, os.mkdir = opened, opened, opened_descriptor, mkdir
    for name in ("access", "stat", "listdir", "lstat", "readlink", "scandir"):
        setattr(os, name, reading(getattr(os, name)))
    for name in ("replace", "rename", "remove", "unlink", "rmdir", "mkfifo", "mknod"):
        setattr(os, name, writing(getattr(os, name)))
    for name in "chflags chmod chown fchmod fchown lchmod lchown removexattr setxattr utime".split():
        setattr(os, name, lambda path, *_, **__: os.stat(path))
    for module in (shutil, tempfile):
        importlib.reload(module)  # They hold functions, and note which of them take descriptors of folders.
    setattr(_posixsubprocess, "fork_exec", functools.partial(hear, "subprocess.Popen"))  # noqa: B010  # nobody tells
    sys.addaudithook(hear)

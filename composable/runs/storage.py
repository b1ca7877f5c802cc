"""Places of files: the local disk, object stores by URL, or an object of the user's.

A store is less than a disk: nothing is renamed, nothing is locked, and a folder is only a part of names. So each place
is asked for five things, and ``run.py`` decides in which order. A disk can do three more: lock, rename and sync. URLs
are served by ``fsspec``, which torch brings along, and by the package for each scheme, such as ``s3fs``.
"""

import errno
import os
import re
import shutil
import stat
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from composable.errors import ConfigError
from composable.ground.names import as_path, class_name, described

_PART_BYTES = 2**22
_URL = re.compile(r"([A-Za-z][\w+.-]*)(::|://)(.*)", re.DOTALL)
# What pathlib, or a slip, makes of a URL.
_BROKEN_URL = re.compile(r"[A-Za-z][\w+.-]+:/(?!/)|(?i:data|file):|[^/]+://")
_PASSWORD = re.compile(r"//[^/@]*:[^/]*@")


@runtime_checkable
class Storage(Protocol):
    """A place of files that saves and loads take instead of a path or URL: any object with these five methods.

    Names have ``/`` between their parts and are relative to the place, such as the folder of a run. A file that is
    written is listed and can be read at once by every process. Methods are called by any thread, and may raise any
    ``Exception``.
    """

    def list(self, folder: str) -> Mapping[str, int | None]:
        """Return what is in ``folder``, or in all with "": the bytes of each file, ``None`` for each folder.

        Names are relative to ``folder``. Of a folder that is not there: nothing.
        """

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes ``[start, stop)`` of a file; ``None``: to its end."""

    def write(self, name: str, file: Path) -> None:
        """Copy a local file, of any length, to ``name``. If that fails, any part of it may be left."""

    def commit(self, name: str, content: bytes) -> None:
        """Write a small file in one go: a reader sees all of it, or what was there before."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; no error if there is none."""


@dataclass(frozen=True)
class FileSum:
    """Length and CRC-32 of a file."""

    bytes: int
    crc32: int


def write_summed(path: Path, content: bytes) -> FileSum:
    """Write and sync a new file; return its length and checksum."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileSum(len(content), zlib.crc32(content))


def sync_folder(path: str | Path) -> None:
    """Make the names in a folder last through a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a file; raises ``OSError`` at once for a pipe, a device, a folder, or a link."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        what = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise OSError(error.errno, what, str(path)) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is a pipe, a device or a folder", str(path))
    return descriptor


class Disk:
    """The local disk as a storage; names are paths. Links among files are not followed."""

    def list(self, folder: str) -> Mapping[str, int | None]:
        found: dict[str, int | None] = {}
        try:
            entries = [*os.scandir(folder)]
        except (FileNotFoundError, NotADirectoryError):
            return found
        for one in entries:
            # Another program may remove its files here meanwhile. Links, pipes and devices are no files either.
            with suppress(FileNotFoundError):
                is_file = one.is_file(follow_symlinks=False)
                found[one.name] = one.stat(follow_symlinks=False).st_size if is_file else None
        return found

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with os.fdopen(open_regular(name), "rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def write(self, name: str, file: Path) -> None:
        shutil.copyfile(file, name)
        with open(name, "rb") as copy:
            os.fsync(copy.fileno())

    def commit(self, name: str, content: bytes) -> None:
        # All names that are there before it last before it does.
        write_summed(Path(f"{name}.tmp"), content)
        sync_folder(os.path.dirname(name))
        os.rename(f"{name}.tmp", name)

    def remove(self, name: str) -> None:
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name)
            return
        with suppress(FileNotFoundError):
            os.remove(name)


class _FsspecStorage:
    """The storage of a URL; names are the paths of ``fsspec``."""

    def __init__(self, files: Any) -> None:
        self._files = files

    def list(self, folder: str) -> Mapping[str, int | None]:
        try:
            self._files.invalidate_cache()
            found = self._files.ls(folder, detail=True)
        except FileNotFoundError:
            return {}
        # Some stores list a folder, or a file of this name, as a part of itself.
        names = {one["name"].rstrip("/"): None if one["type"] == "directory" else one["size"] for one in found}
        return {name[len(folder) + 1 :]: size for name, size in names.items() if name.startswith(f"{folder}/")}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return bytes(self._files.cat_file(name, start=start, end=stop))

    def write(self, name: str, file: Path) -> None:
        self._files.put_file(str(file), name)

    def commit(self, name: str, content: bytes) -> None:
        self._files.pipe_file(name, content)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.invalidate_cache()
            self._files.rm(name, recursive=True)


@dataclass(frozen=True)
class StoredFolder:
    """A folder in a storage; empty, ``name`` is all of it. ``url`` is that of a store, or the path on a disk.

    The methods of ``Storage`` are those of a storage in which this folder is all. They raise ``OSError`` only.
    """

    storage: Storage
    name: str = ""
    url: str = ""

    def __str__(self) -> str:
        return self.url or f"the {class_name(self.storage)}/{self.name}".rstrip("/")

    def __truediv__(self, name: str) -> "StoredFolder":
        return replace(self, name=self.of(name), url=self.url and f"{self.url}/{name}")

    @property
    def parent(self) -> "StoredFolder":
        return replace(self, name=self.name.rpartition("/")[0], url=self.url.rpartition("/")[0])

    @property
    def last(self) -> str:
        """The last part of the name."""
        return self.name.rpartition("/")[2]

    @property
    def local(self) -> Path | None:
        """The path on the local disk, if the folder is there."""
        return Path(self.name) if isinstance(self.storage, Disk) else None

    @property
    def path(self) -> Path | str:
        """What users get: the path on a disk, the URL, or the name in an object of theirs."""
        return self.local or self.url or self.name

    def of(self, *names: str) -> str:
        """Return the name in the storage of what has these names, one below the other, in this folder."""
        return "/".join(filter(None, (self.name, *names)))

    def list(self, name: str = "") -> Mapping[str, int | None]:
        """Return what is in the folder, or in a folder of it."""
        with self._told(name):
            return dict(self.storage.list(self.of(name)))

    def has(self, name: str) -> bool:
        """Say whether there is a file of this name in the folder."""
        return self.list().get(name) is not None

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes ``[start, stop)`` of a file, or fewer."""
        with self._told(name):
            return bytes(self.storage.read(self.of(name), start, stop))[: None if stop is None else stop - start]

    def length(self, name: str) -> int:
        """Return the length of a file, which is there."""
        nbytes = self.list().get(name)
        if nbytes is None:
            # A disk says whether it is no file, or not there.
            raise OSError(f"{self}/{name} is not there" if self.local is None else str(self.read(name, 0, 1)))
        return nbytes

    def parts(self, name: str, nbytes: int) -> Iterator[bytes]:
        """Yield the first ``nbytes`` bytes of a file, some at a time."""
        for start in range(0, nbytes, _PART_BYTES):
            yield self.read(name, start, min(start + _PART_BYTES, nbytes))

    def write(self, name: str, file: Path) -> None:
        """Copy a local file to ``name``."""
        with self._told(name):
            self.storage.write(self.of(name), file)

    def commit(self, name: str, content: bytes) -> None:
        """Write a small file in one go."""
        with self._told(name):
            self.storage.commit(self.of(name), content)

    def remove(self, *names: str) -> None:
        """Remove a file or a folder, if it is there."""
        with self._told(*names):
            self.storage.remove(self.of(*names))

    @contextmanager
    def _told(self, *names: str) -> Iterator[None]:
        """Turn any error of a storage, which may be one of its package's own, into an ``OSError`` that names the file.

        Those of a disk say it themselves.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) and self.local:
                raise
            raise OSError(f"{self.of(*names)}: {type(error).__name__}: {error}") from error


def on_disk(path: Path) -> StoredFolder:
    """Return a local folder."""
    return StoredFolder(Disk(), str(path), str(path))


def folder_at(name: str, value: object) -> StoredFolder:
    """Return the folder that the argument ``name``, which is ``value``, means.

    Raises ``ConfigError`` if it is no path, URL or ``Storage``, or the scheme of the URL is not served.
    """
    if not isinstance(value, str | os.PathLike):
        if isinstance(value, Storage) and not isinstance(value, type):
            return StoredFolder(value)
        fix = "pass a path, a URL, or an object with the methods of composable.Storage"
        raise ConfigError(f"{name} is {described(value)}", fix=fix)
    text: Any = os.fspath(value)
    match = _URL.match(text) if isinstance(text, str) else None
    if match is None:
        if isinstance(text, str) and _BROKEN_URL.match(text):
            fix = "pass a URL as a str, with two slashes; for a local folder of this name: its absolute path"
            raise ConfigError(f"{name} is {text!r}, which is no URL, and looks like one", fix=fix)
        return on_disk(as_path(name, value))
    if _PASSWORD.search(text):
        # Errors and log lines have the URL.
        fix = "leave it out, and put it into the configuration of fsspec, such as FSSPEC_FTP_PASSWORD"
        raise ConfigError(f"{name} is a URL of {match[1]} with a secret, or what looks like one, before its @", fix=fix)
    if match[2] == "://" and match[1].lower() in ("file", "local"):
        return on_disk(as_path(name, match[3].removeprefix("localhost")))
    try:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # loads what few runs need

        # Without a cache: other processes write too.
        files, path = url_to_fs(text.rstrip("/"), use_listings_cache=False)
    # Each package has errors of its own.
    except Exception as error:
        what = f"{text} cannot be reached: {type(error).__name__}: {error}"
        fix = "pass a path, or a URL that fsspec serves, such as s3://bucket/run, and install the package that it names"
        raise ConfigError(what, fix=fix) from error
    return StoredFolder(_FsspecStorage(files), path, text.rstrip("/"))

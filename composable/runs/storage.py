"""Places of files other than a local folder: object stores by URL, or an object of the user's.

A store is less than a folder: nothing is renamed, nothing is locked, and a folder is only a part of names. So it is
asked for five things, and whoever saves decides in which order (``stored_run.py``). URLs are served by ``fsspec``,
which torch brings along, and by the package for each scheme, such as ``s3fs``.
"""

import io
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol, runtime_checkable

from composable.errors import ConfigError
from composable.ground.names import as_path, class_name, described

_BUFFER_BYTES = 2**22
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


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Turn any error of a storage, which may be one of its package's own, into an ``OSError`` that names the file."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{name}: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class StoredFolder:
    """A folder in a storage; empty, ``name`` is all of it, and ``url`` that of an object of the user's.

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
    def path(self) -> str:
        """The URL, or the name in an object of the user's."""
        return self.url or self.name

    def of(self, *names: str) -> str:
        """Return the name in the storage of what has these names, one below the other, in this folder."""
        return "/".join(filter(None, (self.name, *names)))

    def list(self, name: str = "") -> Mapping[str, int | None]:
        """Return what is in the folder, or in a folder of it."""
        with _told(self.of(name)):
            return dict(self.storage.list(self.of(name)))

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Return the bytes ``[start, stop)`` of a file, or fewer."""
        with _told(self.of(name)):
            return bytes(self.storage.read(self.of(name), start, stop))[: None if stop is None else stop - start]

    def write(self, name: str, file: Path) -> None:
        """Copy a local file to ``name``."""
        with _told(self.of(name)):
            self.storage.write(self.of(name), file)

    def commit(self, name: str, content: bytes) -> None:
        """Write a small file in one go."""
        with _told(self.of(name)):
            self.storage.commit(self.of(name), content)

    def remove(self, *names: str) -> None:
        """Remove a file or a folder, if it is there."""
        with _told(self.of(*names)):
            self.storage.remove(self.of(*names))

    def open(self, name: str) -> BinaryIO:
        """Open a file in the folder to read it, at any place."""
        nbytes = self.list().get(name)
        if nbytes is None:
            raise FileNotFoundError(f"{self}/{name} is not there")
        return io.BufferedReader(_StoredFile(self, name, nbytes), _BUFFER_BYTES)


class _StoredFile(io.RawIOBase):
    """A file in a storage, which is read where its reader goes."""

    def __init__(self, folder: StoredFolder, name: str, nbytes: int) -> None:
        self._folder, self._name, self._nbytes = folder, name, nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._nbytes)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        stop = min(self._at + len(buffer), self._nbytes)
        content = self._folder.read(self._name, self._at, stop) if self._at < stop else b""
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


def folder_at(name: str, value: object) -> Path | StoredFolder:
    """Return the folder that the argument ``name``, which is ``value``, means: a local one, or one in a storage.

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
        return as_path(name, value)
    if _PASSWORD.search(text):
        # Errors and log lines have the URL.
        fix = "leave it out, and put it into the configuration of fsspec, such as FSSPEC_FTP_PASSWORD"
        raise ConfigError(f"{name} is a URL of {match[1]} with a secret, or what looks like one, before its @", fix=fix)
    if match[2] == "://" and match[1].lower() in ("file", "local"):
        return as_path(name, match[3].removeprefix("localhost"))
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

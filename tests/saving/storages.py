"""Storages for tests: one in memory, and one that fails, or dies, at a call of choice."""

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import torch.distributed as dist


class Shelf:
    """A storage in this process, as users write one. Those of one name have the same files."""

    files_of: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(self, name: str) -> None:
        self.name = name
        self.files = self.files_of.setdefault(name, {})

    def __reduce__(self) -> object:
        return type(self), (self.name,)

    def list(self, folder: str) -> Mapping[str, int | None]:
        start = f"{folder}/" if folder else ""
        below = {name[len(start) :]: content for name, content in list(self.files.items()) if name.startswith(start)}
        return {name.partition("/")[0]: None if "/" in name else len(content) for name, content in below.items()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        if name not in self.files:
            raise FileNotFoundError(f"no {name}")
        return self.files[name][start:stop]

    def write(self, name: str, file: Path) -> None:
        self.files[name] = file.read_bytes()

    def commit(self, name: str, content: bytes) -> None:
        self.files[name] = content

    def remove(self, name: str) -> None:
        for one in [one for one in self.files if one == name or one.startswith(f"{name}/")]:
            del self.files[one]


class Killed(BaseException):
    """The process is gone: no later call reaches the storage."""


class Fault:
    """What happens at call ``at``, counted from 1, of ``rank``, or of any: ``how`` it ends, and with which error.

    If it ``lasts``, each later call of any rank ends so too.
    """

    def __init__(
        self, at: int, how: str, error: type[BaseException], *, lasts: bool = False, rank: int | None = None
    ) -> None:
        self.at, self.how, self.error, self.lasts, self.rank = at, how, error, lasts, rank
        self.count = 0
        self.is_dead = False
        self._guard = threading.RLock()  # A call may make others.

    def around(self, call: Callable[[], object], cut: Callable[[], object]) -> object:
        """Make a call, or fail before it, after it, or in the middle of it."""
        with self._guard:
            if self.is_dead:
                raise self.error("gone")
            if self.rank not in (None, dist.get_rank() if dist.is_initialized() else 0):
                return call()
            self.count += 1
            if self.count != self.at:
                return call()
            self.is_dead = self.lasts
            if self.how == "after":
                call()
            if self.how == "cut":
                cut()
            raise self.error(f"call {self.at}, {self.how}")


class FaultyShelf(Shelf):
    """A shelf on which a call fails."""

    fault: ClassVar[Fault | None] = None

    def _around(self, call: Callable[[], object], cut: Callable[[], object] = lambda: None) -> object:
        return call() if self.fault is None else self.fault.around(call, cut)

    def list(self, folder: str) -> Mapping[str, int | None]:
        return self._around(lambda: super(FaultyShelf, self).list(folder))  # type: ignore[return-value]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._around(lambda: super(FaultyShelf, self).read(name, start, stop))  # type: ignore[return-value]

    def write(self, name: str, file: Path) -> None:
        content = file.read_bytes()
        half = content[: len(content) // 2]
        self._around(lambda: self.files.update({name: content}), lambda: self.files.update({name: half}))

    def commit(self, name: str, content: bytes) -> None:
        self._around(lambda: super(FaultyShelf, self).commit(name, content))

    def remove(self, name: str) -> None:
        def cut() -> None:
            for one in [one for one in self.files if one.startswith(f"{name}/")][::2]:
                del self.files[one]

        self._around(lambda: super(FaultyShelf, self).remove(name), cut)

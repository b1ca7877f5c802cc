"""What an accelerated optimizer remembers of its state, to notice cheaply that others changed it."""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

__all__ = ["Change", "Lockstep", "Snapshot", "WatchedEntry"]

_END = object()


class Change:
    """Whether any of some entries was changed."""

    __slots__ = ("is_made",)

    def __init__(self) -> None:
        self.is_made = False


class WatchedEntry(dict[Any, Any]):
    """The state of one parameter; notes when it gets, loses or exchanges a value.

    Copies and pickles are plain dicts.
    """

    __slots__ = ("change",)

    def __init__(self, entry: Mapping[Any, Any], change: Change) -> None:
        super().__init__(entry)
        self.change = change

    def __reduce__(self) -> tuple[object, ...]:
        return (dict, (dict(self),))


def _noting(method: Any) -> Any:
    def noted(self: WatchedEntry, *args: Any, **kwargs: Any) -> Any:
        self.change.is_made = True
        return method(self, *args, **kwargs)

    return noted


for _name in "__setitem__ __delitem__ __ior__ clear pop popitem setdefault update".split():
    setattr(WatchedEntry, _name, _noting(getattr(dict, _name)))


class Snapshot:
    """Which tensors a state consisted of, to notice any change but one of values."""

    def __init__(self, state: Mapping[Any, Any]) -> None:
        self._entries = list(state.values())
        # Views of the dicts show what is added to them later.
        self._views = [entry.values() for entry in self._entries if isinstance(entry, dict)]
        self._values = [*chain.from_iterable(self._views), _END]

    def is_of(self, state: Mapping[Any, Any]) -> bool:
        """Say whether ``state`` has the same entries with the same tensors."""
        if len(state) != len(self._entries) or not all(map(is_, state.values(), self._entries)):
            return False
        return all(map(is_, chain(chain.from_iterable(self._views), (_END,)), self._values))


class Lockstep:
    """A state number, such as the step counter, of parameters that are stepped together, in one vector.

    Each unit counts in the element of its first piece; the others follow.

    Attributes:
        numbers: One 0-dim view for each parameter.
    """

    __slots__ = ("_first", "_vector", "_version", "numbers")

    def __init__(self, number: torch.Tensor, count: int) -> None:
        self._vector = number.detach().reshape(1).expand(count).clone()
        self.numbers: Sequence[torch.Tensor] = self._vector.unbind()
        self._first = self.numbers[0]
        self._version = self._vector._version

    @property
    def is_untouched(self) -> bool:
        """Nobody has written to it since, so all its elements are equal."""
        return self._vector._version == self._version

    def follow(self) -> None:
        """Make all elements equal to those that were stepped."""
        self._vector.copy_(self._first.clone())
        self._version = self._vector._version

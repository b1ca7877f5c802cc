"""Keeps a hook's state that remembers buckets by their number from serving several replicated modules at once."""

import weakref
from collections.abc import Collection, Sequence
from typing import Protocol

from composable.engine import Registration
from composable.errors import ConfigError
from composable.replication.bucket import ReducedParam
from composable.wording import list_text

__all__ = ["check_memory", "note_caller"]


class _Caller(Protocol):
    """What calls a hook: the reducer of one replicated module."""

    @property
    def params(self) -> Sequence[ReducedParam]: ...

    @property
    def hook(self) -> Registration | None: ...


# By the id of a state that remembers buckets, who calls a hook with it; also who did, until the next one is noted.
_CALLERS: "weakref.WeakValueDictionary[int, _Caller]" = weakref.WeakValueDictionary()


def note_caller(state: object, caller: _Caller) -> None:
    """Remember that ``caller`` calls its hook with ``state``."""
    if not _remembers_buckets(state):
        return
    for key, other in list(_CALLERS.items()):
        if other.hook is None or id(other.hook.state) != key:
            _CALLERS.pop(key, None)
    _CALLERS[id(state)] = caller


def check_memory(state: object, callers: Collection[_Caller]) -> None:
    """Raise ``ConfigError`` if ``callers``, and who calls a hook with ``state`` now, are too many for that state."""
    if not _remembers_buckets(state):
        return
    found = set(callers)
    earlier = _CALLERS.get(id(state))
    if earlier is not None and earlier.hook is not None and earlier.hook.state is state:
        found.add(earlier)
    if len(found) > 1:
        names = sorted(one.params[0].fqn if one.params else "none" for one in found)
        raise ConfigError(
            f"one {type(state).__name__} is to serve {len(found)} replicated modules, and what it remembers of "
            "their buckets goes by the number of a bucket in its module",
            at=f"the modules of parameters {list_text(names)}",
            fix="register on each replicated module a state of its own",
        )


def _remembers_buckets(state: object) -> bool:
    return any(cls.__name__ == "PowerSGDState" for cls in type(state).__mro__)

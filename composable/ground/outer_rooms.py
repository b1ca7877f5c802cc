"""Methods of the core that a room outside of it does: the core knows their names, and no room.

The package says at import how each is found. The room is imported at the first call.
"""

from collections.abc import Callable
from typing import Any

from composable.errors import UsageError

_FINDERS: dict[str, Callable[[], Callable[..., Any]]] = {}


def register_outer(name: str, find: Callable[[], Callable[..., Any]]) -> None:
    """Let ``outer(name)`` return what ``find`` does, which imports a room."""
    _FINDERS[name] = find


def outer(name: str) -> Callable[..., Any]:
    """Return a function of an outer room.

    Raises:
        UsageError: This installation has no such room.
    """
    try:
        return _FINDERS[name]()
    except (KeyError, ModuleNotFoundError) as error:
        lacks = error.name if isinstance(error, ModuleNotFoundError) else "the room that does it"
        raise UsageError(f"{name} needs {lacks}, which is not here", fix="install the whole package") from error

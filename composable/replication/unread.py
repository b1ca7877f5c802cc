"""What stands for the dict of a module's parameters until somebody looks at one of them.

So a copy of a parameter is made, or waited for, when it is first used, whoever uses it: the module itself, one
around it that reads ``self.out.weight``, or a loop over ``parameters()``.
"""

from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Unread"]


class Unread(dict[str, Any]):
    """A dict that is another one, to be made ready before its values are seen.

    Empty itself: what looks into a dict without asking it finds no parameter, rather than one that is not ready.

    Args:
        held: The other one.
        read: Makes it ready. What changes it calls this too, so that it changes what a reader would have seen.
    """

    __slots__ = ("_held", "_read")

    def __init__(self, held: dict[str, Any], read: Callable[[], None]) -> None:
        super().__init__()
        self._held = held
        self._read = read

    # Modules ask for names whenever an attribute of theirs is read, also a submodule.

    def __contains__(self, name: object) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self._held)

    def keys(self) -> Any:
        """Return the names."""
        return self._held.keys()


def _ready(name: str) -> Callable[..., Any]:
    def call(self: Unread, *args: Any, **kwargs: Any) -> Any:
        self._read()
        return getattr(self._held, name)(*args, **kwargs)

    return call


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__repr__"),
    *("__reduce_ex__", "clear", "copy", "get", "items", "pop", "popitem", "setdefault", "update", "values"),
):
    setattr(Unread, _name, _ready(_name))

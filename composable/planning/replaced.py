"""What took the place of a parameter that no module holds any more.

Annotating a model gives its modules new parameters. An optimizer that was built before still
holds the old ones, and would update them in vain: a mark on each old parameter says so, and
leads to the new one.
"""

import weakref
from collections.abc import Sequence
from itertools import repeat

from torch import nn

from composable.fqns import fqn_in_model

__all__ = ["Replacement", "first_replacement", "mark_replaced", "marks_made", "replacement_of"]

_MARK = "_composable_replaced_by"


class _Marks:
    count = 0


_MARKS = _Marks()


class Replacement:
    """The mark on a replaced parameter.

    Attributes:
        fqn: Name of the parameter, for messages.
    """

    __slots__ = ("_module", "_name", "fqn")

    def __init__(self, fqn: str, module: nn.Module | None = None, name: str = "") -> None:
        self.fqn = fqn
        # The place, not the parameter: torch refuses to cast a parameter that has a weak reference.
        self._module = None if module is None else weakref.ref(module)
        self._name = name

    def find(self) -> nn.Parameter | None:
        """Return the parameter that its module has now; ``None``: the module is gone, or has it unsharded."""
        module = None if self._module is None else self._module()
        param = None if module is None else module._parameters.get(self._name)
        return None if param is None or replacement_of(param) is not None else param

    def fqn_in_model(self) -> str:
        """Name the parameter for an error, as the user sees it now; slow."""
        module = None if self._module is None else self._module()
        return self.fqn if module is None else fqn_in_model(module, self._name, self.fqn)

    def __reduce__(self) -> tuple[object, ...]:
        return (Replacement, (self.fqn,))


def mark_replaced(param: nn.Parameter, fqn: str, module: nn.Module, name: str) -> None:
    """Note that ``param`` is a parameter no more: ``module`` has another one under ``name``."""
    setattr(param, _MARK, Replacement(fqn, module, name))
    _MARKS.count += 1


def marks_made() -> int:
    """Return how many parameters were marked so far: while it stays, what was checked need not be checked again."""
    return _MARKS.count


def replacement_of(param: object) -> Replacement | None:
    """Return the mark of a replaced parameter, ``None`` for one in use."""
    found: Replacement | None = getattr(param, _MARK, None)
    return found


def first_replacement(params: Sequence[object]) -> Replacement | None:
    """Return the mark of the first replaced parameter; in every step of every optimizer, so 40 ns for each in use."""
    marks: list[Replacement | None] = list(map(getattr, params, repeat(_MARK), repeat(None)))
    if marks.count(None) == len(marks):
        return None
    return next(mark for mark in marks if mark is not None)

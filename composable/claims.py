"""Which parameters an annotation manages: a mark on each, that the next annotation sees before it changes anything.

``replicate`` marks with a ``Claim``. ``fully_shard`` has a mark of its own on both faces of a
parameter, the handle's; here it is only read.
"""

import weakref
from collections import OrderedDict
from collections.abc import Iterable

from torch import nn

__all__ = ["Claim", "claim", "claim_of", "is_managed", "is_sharded", "release"]

_AVERAGED = "_composable_averaged"
_SHARDED = "_composable_managed"  # set in engine/handle.py


class Claim:
    """The mark of ``replicate`` on a parameter.

    Attributes:
        fqn: Its name below the annotated module.
    """

    __slots__ = ("_holder", "_owner", "fqn")

    def __init__(self, fqn: str, owner: object, holder: int) -> None:
        self.fqn = fqn
        self._owner = weakref.ref(owner)
        self._holder = holder

    @property
    def owner(self) -> object | None:
        """The state of the annotation; ``None`` once that is gone."""
        return self._owner()

    def holds_for(self, param: object) -> bool:
        """Say whether the mark was made for ``param``: ``copy.copy`` takes the marks of a tensor along."""
        return self._holder == id(param) and self.owner is not None

    def __reduce__(self) -> tuple[object, ...]:
        # In another process nobody manages the parameter. A type that `torch.load(weights_only=True)` takes.
        return (OrderedDict, ())


def claim(param: nn.Parameter, fqn: str, owner: object) -> None:
    """Note that ``owner``, the state of a ``replicate``, averages ``param`` and calls it ``fqn``."""
    setattr(param, _AVERAGED, Claim(fqn, owner, id(param)))


def release(params: Iterable[nn.Parameter]) -> None:
    """Undo ``claim``."""
    for param in params:
        vars(param).pop(_AVERAGED, None)


def claim_of(param: object) -> Claim | None:
    """Return the mark of the ``replicate`` that manages ``param``."""
    found = getattr(param, _AVERAGED, None)
    return found if isinstance(found, Claim) and found.holds_for(param) else None


def is_sharded(param: object) -> bool:
    """Say whether ``fully_shard`` manages ``param``: its sharded face, or what stands in for that for a while."""
    mark = getattr(param, _SHARDED, None)
    return mark is not None and mark.handle() is not None


def is_managed(param: object) -> bool:
    """Say whether any annotation manages ``param``."""
    return is_sharded(param) or claim_of(param) is not None

"""Gradients that are not to be used yet: of modules whose backwards have ended and whose reductions have not.

Who reduces notes the modules; who is about to take a norm of such gradients, to change them or to step with them,
asks first. Reading one to show it is free.
"""

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from composable.errors import UsageError, place_of_rank
from composable.torch_private import OpOverload, tree_leaves

__all__ = ["UNFINISHED", "check_finished", "check_operands", "note_finished", "note_unfinished"]


class Owner(Protocol):
    """What holds sharded parameters.

    Attributes:
        described: What messages call it.
        sharded: The parameters.
        waiting: Those with a gradient that waits for a later backward, and that ``zero_grad`` has not dropped.
    """

    @property
    def described(self) -> str: ...

    @property
    def sharded(self) -> Sequence[torch.Tensor]: ...

    @property
    def waiting(self) -> Sequence[torch.Tensor]: ...


# Whose gradients are under way. Mostly empty, so asking costs the hot path nothing. Ranks that are threads share it:
# parameters and gradients, which are told apart by identity, are each of one rank.
UNFINISHED: dict[int, "tuple[weakref.ref[Owner], bool]"] = {}

_ZEROING = frozenset({"zero_", "_foreach_zero_"})
_NORMS = frozenset({"linalg_vector_norm", "_foreach_norm"})


def note_unfinished(owners: Iterable[Owner], *, is_droppable: bool = False) -> None:
    """Note that the gradients of ``owners`` are not complete; ``is_droppable``: ``zero_grad`` drops what is to come."""
    for owner in owners:
        UNFINISHED[id(owner)] = weakref.ref(owner, partial(_forget, id(owner))), is_droppable


def note_finished(owners: Iterable[Owner]) -> None:
    """Note that they are, or were dropped."""
    for owner in owners:
        UNFINISHED.pop(id(owner), None)


def _forget(key: int, _: object) -> None:
    UNFINISHED.pop(key, None)


def check_finished(what: str, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse ``what``, which needs the gradients of parameters, or was given these gradients, unless all are complete.

    Not collective: every rank has left the same reductions under way.

    Args:
        what: The call, for people.
        tensors: Parameters or gradients.

    Raises:
        UsageError: Backwards of a module have ended whose reductions have not.
    """
    if UNFINISHED:
        pairs = _pairs()
        _refuse(what, tensors, {id(param): owner for param, owner in pairs} | _by_gradient(pairs))


def check_operands(op: OpOverload, args: Sequence[Any]) -> None:
    """Refuse an operation that takes norms of such gradients, or changes them.

    Raises:
        UsageError: As ``check_finished``.
    """
    name = op._schema.name.removeprefix("aten::")
    first = op._schema.arguments[0] if op._schema.arguments else None
    if first is None or not (name in _NORMS or (first.alias_info is not None and first.alias_info.is_write)):
        return
    pairs = _pairs(leaves_droppable=name in _ZEROING)
    _refuse(name.strip("_"), tree_leaves(args[0]), _by_gradient(pairs))


def _pairs(*, leaves_droppable: bool = False) -> list[tuple[torch.Tensor, Owner]]:
    owners = [
        (owner, owner.waiting if is_droppable else owner.sharded)
        for reference, is_droppable in list(UNFINISHED.values())
        if not (is_droppable and leaves_droppable) and (owner := reference()) is not None
    ]
    return [(param, owner) for owner, params in owners for param in params if param.requires_grad]


def _by_gradient(pairs: Iterable[tuple[torch.Tensor, Owner]]) -> dict[int, Owner]:
    return {id(param.grad): owner for param, owner in pairs if param.grad is not None}


def _refuse(what: str, tensors: Iterable[Any], owners: dict[int, Owner]) -> None:
    owner = next((owners[id(tensor)] for tensor in tensors if id(tensor) in owners), None)
    if owner is not None:
        raise UsageError(
            f"{what} with gradients that are not complete: backwards have ended, their reductions have not",
            at=f"{place_of_rank()}, {owner.described}",
            fix="first end them: by a backward after set_is_last_backward(True), or by finalize_backward(), with "
            "wait() on what it returned; or by a backward after set_requires_all_reduce(True); or, after no_sync, by a "
            "backward outside of it, or by reduce_gradients(model)",
        )

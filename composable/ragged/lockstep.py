"""Asks, before an operation lets ranks exchange what they hold of ragged tensors, whether all ranks run that operation.

Such exchanges are hidden in ordinary operations, so nothing else keeps ranks from running them in another order. Pieces
of two tensors would then be mixed, in silence where their sizes agree.

What is compared: the operation; for each tensor shape, dtype, bounds, the order of dims in memory, the mesh's dims,
and who it is as far as that is known. Tensors of one parameter's cut that are no parameters (its gradient, the
optimizer's state) look alike.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from composable.collectives import Ranks
from composable.errors import DesyncError
from composable.ragged.spec import RaggedLayout
from composable.torch_private import is_tracing
from composable.wording import dtype_text

__all__ = ["confirm", "confirm_alike", "confirm_layout", "is_parameter", "refuse_in_each"]

_WHAT = "the ranks run different operations on ragged tensors"
_FIX = "run the same operations in the same order on every rank; nothing was exchanged or changed here"
# What ranks with other blocks hear of a rank that cannot run what they do.
_ALONE = ", and ranks with the same blocks run something else"
_SHOWN = 3
_SHOWN_BOUNDS = 9


def confirm(op: str, tensors: Sequence[Any]) -> None:
    """Raise on every rank unless all run ``op`` on the same ragged tensors. Collective: the ranks of their layouts.

    Raises:
        DesyncError: A rank runs something else.
    """
    if is_tracing() or any(tensor._local_tensor.is_meta for tensor in tensors):
        return
    key = "|".join([op, *(_key(tensor) for tensor in tensors)])
    asked: list[RaggedLayout] = []
    for tensor in tensors:
        layout: RaggedLayout = tensor._spec.layout
        if not any(layout.shares_ranks(other) for other in asked):
            asked.append(layout)
            _confirm_in_each(layout.every_ranks, key, lambda: _text(op, tensors))


def confirm_layout(op: str, ranks: Ranks, layout: RaggedLayout, dtype: torch.dtype) -> None:
    """Do what ``confirm`` does, before there is a tensor."""
    ranks.confirm(
        f"{op}|{layout.key}|{dtype}", shown=lambda: f"{op} of {_layout_text(layout, dtype)}", what=_WHAT, fix=_FIX
    )


def confirm_alike(op: str, ranks: Ranks) -> None:
    """Do what ``confirm`` does for an operation whose exchange has one form, whatever the tensors."""
    ranks.confirm(op, shown=lambda: op, what=_WHAT, fix=_FIX)


def _confirm_in_each(groups: Sequence[Ranks], key: str, shown: Callable[[], str]) -> None:
    """Ask one group after the other. Where the ranks of one differ, those of the next are told, which wait for these.

    Raises:
        DesyncError: The ranks of a group differ, or some of them are in another one that does.
    """
    failure: DesyncError | None = None
    for ranks in groups:
        try:
            if failure is None:
                ranks.confirm(key, shown=shown, what=_WHAT, fix=_FIX)
            else:
                # No other rank has this key.
                ranks.confirm(f"{key}|{ranks.rank}", shown=lambda: f"{shown()}{_ALONE}", what=_WHAT, fix=_FIX)
        except DesyncError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def refuse_in_each(groups: Sequence[Ranks], op: str) -> None:
    """Let the ranks of groups that are about to ask for ``op`` hear that it is not run: others had asked differently.

    Collective, as ``confirm_alike`` in each; raises nothing.
    """
    for ranks in groups:
        with suppress(DesyncError):
            ranks.confirm(f"{op}|{ranks.rank}", shown=lambda: f"{op}{_ALONE}", what=_WHAT, fix=_FIX)


def is_parameter(tensor: Any) -> bool:
    """Say whether a ragged tensor is the sharded parameter of some module, not only cut as one."""
    return _mark_of(tensor) is not None


def _mark_of(tensor: Any) -> Any:
    # Set by the storage of sharded modules, on the parameters themselves.
    return getattr(tensor, "_composable_managed", None)


def _key(tensor: Any) -> str:
    mark = _mark_of(tensor)
    # Which parameter it is the layout says, and the mark which deep copy of it.
    key: str = tensor._spec.key
    return key if mark is None else f"{key} parameter{mark.key}"


def _text(op: str, tensors: Sequence[Any]) -> str:
    texts = [_tensor_text(tensor) for tensor in tensors[:_SHOWN]]
    if len(tensors) > _SHOWN:
        texts.append(f"{len(tensors) - _SHOWN} more")
    return f"{op} of {', '.join(texts)}"


def _tensor_text(tensor: Any) -> str:
    layout: RaggedLayout = tensor._spec.layout
    text = _layout_text(layout, tensor._spec.dtype)
    if layout.label is None:
        return text
    mark = _mark_of(tensor)
    kind = "a tensor cut as parameter" if mark is None else "parameter"
    copy = "" if mark is None or not mark.key else f" of deep copy {mark.key[1:]}"
    return f"{kind} {str(layout.label)!r}{copy} {text}"


def _layout_text(layout: RaggedLayout, dtype: torch.dtype) -> str:
    bounds = str(layout.bounds) if len(layout.bounds) <= _SHOWN_BOUNDS else f"{layout.bounds[:_SHOWN_BOUNDS]} and so on"
    order = f" in the order of dims {layout.order}" if layout.order else ""
    order += f" in blocks of {list(layout.block_shape)}" if layout.splits else ""
    return f"{list(layout.shape)} {dtype_text(dtype)} cut at {bounds}{order}"

"""Where each parameter may be cut and how it lies in memory: what ``align`` and ``shard_placement_fn`` ask for.

A flat range of a parameter is a slice of one dim where that dim is the outermost in memory. So a cut along
another dim than the first is had by laying the parameter out in another order; its shape stays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import Shard

from composable.arguments import answer_of, described
from composable.errors import ConfigError
from composable.planning.cut import order_of
from composable.planning.layout import Align, Promise, check_align
from composable.planning.options import AlignLike, ShardOptions, ShardPlacementFn
from composable.planning.structure import FoundParam
from composable.wording import dtype_text, list_text, plain_fqn

__all__ = ["Cut", "choose_cuts"]


@dataclass(frozen=True)
class Cut:
    """What ``plan_layout`` needs to know of one parameter, beside its shape.

    Attributes:
        align: Where it may be cut.
        order: Its dims from the outermost in memory; empty: as they are numbered.
        promise: What of that holds at any cost.
    """

    align: Align = "row"
    order: tuple[int, ...] = ()
    promise: Promise | None = None


def choose_cuts(params: Sequence[FoundParam], options: ShardOptions) -> dict[str, Cut]:
    """Return for the first name of each parameter where it may be cut; asks each function once a parameter.

    Raises:
        ConfigError: ``align`` names a parameter that is not among ``params``, or a value or a placement is none
            that can be had, or the two contradict each other, or a function raised.
    """
    wishes = _wishes(params, options.align)
    cuts = {}
    for found in params:
        fqn = found.fqns[0]
        dim = _ask_dim(options.shard_placement_fn, found)
        align = wishes.get(fqn)
        if dim is not None:
            align = _joined(found, align, dim)
        if found.form is not None and found.form.kind == "gathered":
            _check_rows(found, align, dim)
            cuts[fqn] = Cut(1, (), Promise(1))
        else:
            cuts[fqn] = _cut_of(found.whole, align or "row", dim)
    return cuts


def _check_rows(found: FoundParam, align: Align | None, dim: int | None) -> None:
    """Raise ``ConfigError`` if a parameter that its class gathers, row by row, is to be cut otherwise."""
    if align not in (None, "row", 1) or dim:
        raise ConfigError(
            f"{type(found.param).__name__} is gathered by its class, which wants equal numbers of rows on each rank",
            at=_place(found),
            fix="have no wish for it in align and shard_placement_fn",
        )


def _cut_of(param: torch.Tensor, align: Align, dim: int | None) -> Cut:
    if isinstance(align, str):
        promise = Promise(None) if align == "tensor" else None
        return Cut(align, order_of(param), promise)
    # A promise about slices of a dim holds only where that dim is the outermost.
    outermost = dim or 0
    return Cut(align, _with_outermost(param, outermost), Promise(align, outermost))


def _with_outermost(param: torch.Tensor, dim: int) -> tuple[int, ...]:
    """Return the order of a parameter's memory with one dim moved to the outside."""
    numbered = tuple(range(param.dim()))
    order = (dim, *(other for other in order_of(param) or numbered if other != dim)) if param.numel() else numbered
    return () if order == numbered or param.dim() == 0 else order


def _wishes(params: Sequence[FoundParam], align: AlignLike | None) -> dict[str, Align]:
    """Return what ``align`` says of each parameter that it says something of, by first name."""
    if align is None:
        return {}
    if not isinstance(align, Mapping):
        answers = {found.fqns[0]: _ask(align, "align", found, found.fqns[0], found.param) for found in params}
        wishes: dict[str, Align] = {fqn: answer for fqn, answer in answers.items() if answer is not None}
        for fqn, wish in wishes.items():
            check_align(fqn, wish)
        return wishes
    # Plans name parameters below wrappers without the wrapper's part; users may name them with it.
    align = {plain_fqn(name): wish for name, wish in align.items()}
    known = {name for found in params for name in found.fqns}
    unknown = [name for name in align if name not in known]
    if unknown:
        raise ConfigError(
            f"align names parameters that no handle owns: {unknown}",
            fix="pass FQNs below the annotated module, as in named_parameters()",
        )
    wishes = {}
    for found in params:
        named = {name: align[name] for name in found.fqns if name in align}
        for name, wish in named.items():
            check_align(name, wish)
            if wishes.setdefault(found.fqns[0], wish) != wish:
                raise ConfigError(
                    "align says different things of one parameter under its names: "
                    + ", ".join(f"{name!r} is {wish!r}" for name, wish in named.items()),
                    at=_place(found),
                    fix="name it once",
                )
    return wishes


def _ask_dim(function: ShardPlacementFn | None, found: FoundParam) -> int | None:
    """Return the dim that ``shard_placement_fn`` wants cut, counted from the first; ``None``: it has no wish.

    Raises:
        ConfigError: The function raised, or what it returned is no ``Shard`` of a dim that the parameter has.
    """
    if function is None:
        return None
    placement = _ask(function, "shard_placement_fn", found, found.param)
    if placement is None:
        return None
    if type(placement).__name__ == "ShardPlacementResult":
        raise ConfigError(
            "shard_placement_fn wants a mesh of its own for one parameter",
            at=_place(found),
            fix="return a Shard, and annotate the modules that live on another mesh by a call with that mesh",
        )
    if type(placement) is not Shard:
        raise ConfigError(
            f"shard_placement_fn returned {described(placement)}, not a Shard",
            at=_place(found),
            fix="return Shard(dim), or None for the default",
        )
    dims = found.storage.dim()
    if not -dims <= placement.dim < dims:
        raise ConfigError(
            f"shard_placement_fn returned Shard({placement.dim}) for a parameter of {dims} dims",
            at=_place(found),
            fix="return a dim that it has, or None for the default",
        )
    return placement.dim % dims


def _joined(found: FoundParam, align: Align | None, dim: int) -> Align:
    """Return what both arguments ask for; a cut along a dim is one between its slices."""
    if align is None or (dim == 0 and align == "row"):
        return 1
    if dim == 0 and isinstance(align, int):
        return align
    raise ConfigError(
        f"align says {align!r} and shard_placement_fn says Shard({dim})",
        at=_place(found),
        fix="let one of the two have no wish; a number of rows goes together with Shard(0)",
    )


def _ask(function: Callable[..., Any], name: str, found: FoundParam, *args: object) -> Any:
    return answer_of(name, function, *args, at=_place(found), fix="return None for parameters that it has no wish for")


def _place(found: FoundParam) -> str:
    param = found.storage
    return f"parameter {list_text(found.fqns)} {list(param.shape)} {dtype_text(param.dtype)}"

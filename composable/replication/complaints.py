"""What the reducer says when a backward goes wrong, on this rank or on another."""

import logging
from collections.abc import Collection, Mapping, Sequence

from composable.errors import ConfigError, UsageError, place_of_rank
from composable.replication.bucket import ReducedParam
from composable.replication.static_graph import StaticGraph
from composable.replication.tail import Report
from composable.wording import count_text, list_text, ranks_text

__all__ = [
    "FIX_LENT",
    "GRAPH_CHANGED",
    "HOOK_FAILED",
    "STOPPED",
    "after_close",
    "backward_error",
    "copied_inside",
    "hook_failed",
    "round_error",
    "second_gradient",
    "warn_out_of_step",
]

_LOG = logging.getLogger("composable")

# What a rank tells the others besides how many parameters have no gradient.
STOPPED = -1
HOOK_FAILED = -2
GRAPH_CHANGED = -3

_MAX_NAMES_SHOWN = 10
FIX_LENT = (
    "functional_call gave the modules other tensors, which replicate does not average: compute these from the "
    "parameters; or call it on a copy from before replicate, or with find_unused_parameters=True, and average by hand"
)
_FIX_UNUSED = (
    "let every parameter take part in the loss on every rank, freeze those that do not before replicate, "
    "or pass find_unused_parameters=True"
)


def round_error(
    params: Sequence[ReducedParam],
    missing: Sequence[int],
    last: int | None,
    report: Report,
    ranks: Sequence[int],
    own_rank: int,
    static: StaticGraph | None,
    running: Collection[int],
    hook: str,
) -> UsageError:
    """Return the error for what went wrong in a backward, here or on another rank.

    Args:
        params: All of them.
        missing: Which got no gradient on this rank, and should have.
        last: Whose gradient was the last to arrive here.
        report: What the ranks said.
        ranks: Their global numbers, as the report has them.
        own_rank: This one's.
        static: What all backwards were to be like; ``None``: nothing.
        running: Those that had inputs; the others have no gradients.
        hook: The name of the communication hook, behind a space; "": there is none.
    """
    told = list(zip(ranks, report.complaints, strict=False))
    last_of = dict(zip(ranks, report.last, strict=False))
    if missing or not last_of:
        last_of[own_rank] = last
    seen = {
        rank: None if index is None else _module_of(params[index].fqn)
        for rank, index in last_of.items()
        if rank in running
    }
    if static is not None:
        changes = [(params[index].fqn, now, then) for index, now, then in static.changes]
        changed = [rank for rank, value in told if value == GRAPH_CHANGED]
        if changes or changed:
            elsewhere = [params[index].fqn for index in static.changes_elsewhere(report.used)]
            return _graph_changed(changes, elsewhere, [rank for rank in changed if rank != own_rank], seen)
    # Flags are added up over the ranks; in bfloat16 the names of few among many ranks may be lost.
    full = len(running) - 0.5
    return backward_error(
        missing=[params[index].fqn for index in missing],
        last=None if last is None else params[last].fqn,
        unused=[item.fqn for item, used in zip(params, report.used, strict=False) if used < full],
        others=[rank for rank, value in told if value > 0 and rank != own_rank],
        stopped=[rank for rank, value in told if value == STOPPED],
        hook_failed=[rank for rank, value in told if value == HOOK_FAILED],
        seen=seen,
        hook=hook,
    )


def backward_error(
    missing: Sequence[str],
    last: str | None,
    unused: Sequence[str],
    others: Sequence[int],
    stopped: Sequence[int],
    hook_failed: Sequence[int],
    seen: Mapping[int, str | None],
    hook: str = "",
) -> UsageError:
    """Return the error for the parameters that are missing here, or for what other ranks complain about.

    Args:
        missing: FQNs that got no gradient on this rank, and should have.
        last: FQN of the last gradient to arrive here.
        unused: FQNs that got no gradient on some rank; shown only where nothing is missing here.
        others: Other ranks on which something is missing.
        stopped: Ranks whose backward was stopped by an exception.
        hook_failed: Ranks on which a communication hook gave no gradients as they should be.
        seen: Of each rank that told, the module that got a gradient last; ``None``: none did.
        hook: Its name, behind a space.
    """
    lines = []
    if missing:
        shown = list_text(missing, _MAX_NAMES_SHOWN)
        lines.append(f"backward ended without a gradient for {count_text(len(missing), 'parameter')}: {shown}")
        if last is not None:
            lines.append(f"    the last gradient to arrive was that of {last!r}")
        if others:
            lines.append(f"    so did {ranks_text(others)}, perhaps for other parameters")
    elif others:
        # Gradients of backwards before, which were not dropped, hide which.
        shown = list_text(unused, _MAX_NAMES_SHOWN) if unused else "some parameters"
        lines.append(f"{ranks_text(others)} ended backward without a gradient for {shown}")
    fix = _FIX_UNUSED if lines else "drop the gradients of this step, and see what was raised there"
    if stopped:
        lines.append(f"{ranks_text(stopped)} did not finish backward: an exception stopped it there")
    if lines:
        lines.append(_seen_last(seen))
    if hook_failed:
        lines.append(
            f"{ranks_text(hook_failed)} got no averages of the right dtype and shape from the communication hook{hook}"
        )
        fix = "see what was raised there, and drop the gradients of this step"
    return UsageError("\n".join(lines), at=place_of_rank(), fix=fix)


def _module_of(fqn: str) -> str:
    """Return what messages call the module that holds a parameter."""
    name = fqn.rpartition(".")[0]
    return repr(name) if name else "the replicated module"


def _seen_last(seen: Mapping[int, str | None]) -> str:
    """Return the line that says which module got a gradient last, on each rank."""
    ranks_of: dict[str | None, list[str]] = {}
    for rank, module in seen.items():
        ranks_of.setdefault(module, []).append(str(rank))
    shown = [
        f"{module or 'none'} on rank{'s' * (len(ranks) > 1)} {list_text(ranks, _MAX_NAMES_SHOWN, write=str)}"
        for module, ranks in ranks_of.items()
    ]
    return f"    the last module to get a gradient: {list_text(shown, _MAX_NAMES_SHOWN, write=str)}"


def _graph_changed(
    changes: Sequence[tuple[str, int, int]],
    elsewhere: Sequence[str],
    others: Sequence[int],
    seen: Mapping[int, str | None],
) -> UsageError:
    """Return the error for a backward that is not like the first, though it was promised to be.

    Args:
        changes: (FQN, gradients now, gradients in the first backward) of what is different on this rank.
        elsewhere: FQNs of which other ranks have a gradient than then; shown only where nothing is different here.
        others: Other ranks where something is different.
        seen: Of each rank that told, the module that got a gradient last.
    """
    lines = []
    if changes:
        shown = [f"{fqn!r} ({count_text(now, 'gradient')}, {then} then)" for fqn, now, then in changes]
        more = f" and {len(shown) - _MAX_NAMES_SHOWN} more" if len(shown) > _MAX_NAMES_SHOWN else ""
        lines.append(
            "this backward is not like the first one, as static_graph=True says: "
            f"{', '.join(shown[:_MAX_NAMES_SHOWN])}{more}"
        )
        if others:
            lines.append(f"    nor is that of {ranks_text(others)}")
    else:
        names = f": {list_text(elsewhere, _MAX_NAMES_SHOWN)}" if elsewhere else ""
        lines.append(
            f"the backward of {ranks_text(others)} is not like the first one, as static_graph=True says{names}"
        )
    lines.append(_seen_last(seen))
    return UsageError(
        "\n".join(lines),
        at=place_of_rank(),
        fix="drop the gradients of this step; use the same parameters in every step, or find_unused_parameters=True",
    )


def warn_out_of_step(what: str, numbers: Mapping[int, int], fqn: str) -> None:
    """Log that ranks had different numbers of forwards or backwards since the last average.

    Args:
        what: "forward" or "backward".
        numbers: Of each rank.
        fqn: Of a parameter of the module.
    """
    lines = [f"    {ranks_text([rank])}: {count_text(count, what)}" for rank, count in numbers.items()]
    _LOG.warning(
        "%s\n  at:  %s, module with parameter %r\n  fix: %s",
        "\n".join([f"ranks had different numbers of {what}s since gradients were last averaged", *lines]),
        place_of_rank(),
        fqn,
        "nothing, if each of them belongs to this backward, or to none; but where a rank left out a backward, or was "
        "alone in no_sync, averages are of different steps from there on: run the same backwards on every rank, and "
        "forwards that are not to be trained on under torch.no_grad()",
    )


def second_gradient(fqn: str, *, is_static: bool) -> UsageError:
    """Return the error for a gradient that arrives when the parameter's first was sent."""
    if is_static:
        return UsageError(
            "a parameter got more gradients in one backward than in the first one, as static_graph=True says",
            at=f"{place_of_rank()}, parameter {fqn!r}",
            fix="drop the gradients of this step, and use the same parameters in every step",
        )
    return UsageError(
        "a parameter got a second gradient in one backward, after the first was sent to the other ranks",
        at=f"{place_of_rank()}, parameter {fqn!r}",
        fix="use activation checkpointing with use_reentrant=False, or pass static_graph=True",
    )


def after_close() -> UsageError:
    """Return the error for a backward whose reducer is closed."""
    return UsageError(
        "backward of a forward that ran before the model's annotation was taken off",
        at=place_of_rank(),
        fix="run backward before unannotate, or forward again after it",
    )


def copied_inside() -> UsageError:
    """Return the error for a copy that is made while a backward is running."""
    return UsageError(
        "a replicated module cannot be copied inside a backward", at=place_of_rank(), fix="copy it before or after"
    )


def hook_failed(error: ConfigError, fqn: str) -> ConfigError:
    """Return the error for what a communication hook gave on this rank, among others for parameter ``fqn``."""
    told = ConfigError(error.what, at=f"{place_of_rank()}, bucket of a module with parameter {fqn!r}", fix=error.fix)
    told.__cause__ = error.__cause__
    return told

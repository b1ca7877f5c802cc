"""The life of a replicated group: other ranks for the same module, and what its reducer has seen."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import nn

from composable.arguments import check_number, described
from composable.collectives import Grid, resolve_ranks
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.fqns import describe_module
from composable.frames import in_backward
from composable.replication import BackwardTiming, check_replicated

__all__ = ["ReductionStats", "reduction_stats", "update_process_group"]


@dataclass(frozen=True)
class ReductionStats:
    """What the reducer of a replicated module has seen on this rank.

    Attributes:
        world_size: Ranks that average.
        backwards: How many there were.
        is_static_graph: As ``static_graph`` says.
        is_rebuilt: Buckets follow the order of arrival.
        bucket_bytes: Of each bucket as it travels, in order of reduction: gradients, gaps between them, and in the
            last bucket a flag for each parameter and numbers for each rank. Before the first backward: of those it
            will have.
        bucket_fqns: The parameters of each bucket.
        arrival_order: Parameters in the order in which gradients are expected; ``None``: not known.
        sparse_fqns: Parameters with sparse gradients, which lie in no bucket.
        missing_fqns: Parameters that got no gradient in the last backward.
        sample_rate: One backward in so many is measured, besides the first ten.
        timing: The last backward that was measured and averaged; ``None``: none was.
    """

    world_size: int
    backwards: int
    is_static_graph: bool
    is_rebuilt: bool
    bucket_bytes: tuple[int, ...]
    bucket_fqns: tuple[tuple[str, ...], ...]
    arrival_order: tuple[str, ...] | None
    sparse_fqns: tuple[str, ...]
    missing_fqns: tuple[str, ...]
    sample_rate: int
    timing: BackwardTiming | None


def reduction_stats(module: nn.Module, *, sample_rate: int | None = None) -> ReductionStats:
    """Return what the reducer of a replicated module has seen. Not collective; waits for a device that it measured on.

    Args:
        module: Annotated by ``replicate``.
        sample_rate: From now on, measure one backward in so many; ``None``: as before, which is 100 at first.

    Raises:
        UsageError: ``module`` is not replicated.
        ConfigError: ``module`` is no module, or ``sample_rate`` no whole number above zero.
    """
    state = check_replicated(module, "reduction_stats")
    reducer = state.reducer
    if sample_rate is not None:
        fix = "pass a whole number above zero, or None"
        rate = check_number("sample_rate", sample_rate, least=1.0, fix=fix)
        if rate != int(rate):
            raise ConfigError(f"sample_rate is {described(sample_rate)}", at=place_of_rank(), fix=fix)
        reducer.stopwatch.every = int(rate)
    fqns = [item.fqn for item in reducer.params]
    order = reducer.arrival_order
    buckets = reducer.next_buckets
    seen = reducer.round.seen if reducer.rounds else [1] * len(fqns)
    return ReductionStats(
        world_size=state.grid.everyone.size,
        backwards=reducer.rounds,
        is_static_graph=reducer.options.static_graph,
        is_rebuilt=reducer.is_rebuilt,
        bucket_bytes=tuple(bucket.sent_bytes for bucket in buckets),
        bucket_fqns=tuple(tuple(fqns[index] for index in bucket.param_indices) for bucket in buckets),
        arrival_order=None if order is None else tuple(fqns[index] for index in order),
        sparse_fqns=tuple(item.fqn for item in reducer.params if item.is_sparse),
        missing_fqns=tuple(fqn for fqn, count in zip(fqns, seen, strict=True) if not count),
        sample_rate=reducer.stopwatch.every,
        timing=reducer.stopwatch.read(),
    )


def update_process_group(module: nn.Module, process_group: dist.ProcessGroup) -> None:
    """Let other ranks average the gradients of a replicated module: when ranks have gone, or have come back.

    Nothing is sent to the ranks of before, which may be gone. Parameters and hooks stay, and the order of gradients
    where all know the same; a compiled module stays as it was compiled. What a backward that was stopped has left is
    forgotten: gradients are as they were on this rank, so drop those of that step. Names, shapes, dtypes, the
    arguments of ``replicate`` and the hook are compared, values are not: give ranks that come back those of the
    others. The states of communication hooks keep the process group they have.

    Collective: all ranks of ``process_group``.

    Args:
        module: Annotated by ``replicate``; of modules that share buckets, any.
        process_group: The ranks from now on; this rank is one of them.

    Raises:
        UsageError: ``module`` is not replicated, or a backward is running.
        ConfigError: ``process_group`` is none that this rank is in, or ``module`` no module.
        DesyncError: The ranks have different modules, arguments of ``replicate`` or hooks. Nothing is changed.
    """
    state = check_replicated(module, "update_process_group")
    if in_backward():
        raise UsageError(
            "update_process_group inside a backward",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix="call it between two steps, also after a backward that raised",
        )
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group is {described(process_group)}, not a ProcessGroup that this rank is in",
            at=place_of_rank(),
            fix="pass what torch.distributed.new_group() returned, on the ranks of the group only",
        )
    params = [item.param for item in state.reducer.params]
    ranks = resolve_ranks(None, process_group, params)
    hook = state.reducer.hook
    text = f"{state.compared}\ncommunication hook: {'none' if hook is None else hook.name}"
    ranks.compare(
        text,
        shown=text,
        what="the ranks of the new process group have different modules, options or communication hooks",
        fix="replicate the same model with the same arguments on every rank of the group, and register the same hook",
    )
    state.move_to(Grid.whole(ranks))

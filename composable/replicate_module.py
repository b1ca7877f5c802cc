"""The methods of a replicated module.

Names and meaning follow torch's newer ``replicate`` and ``DistributedDataParallel``, so that loops and trainers that
look for them on the model find them.
"""

import copy
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import nn

from composable.annotated_module import AnnotatedModule, ClassSwap, no_longer_annotated, no_sync
from composable.annotation import KeptGradients, check_replicated, replicate_state_of, states_of
from composable.comm_hooks import CommHookHandle
from composable.comm_hooks import register_comm_hook as reduce_by_hook
from composable.engine import HookFunction
from composable.errors import ConfigError
from composable.ground.contract import get_registry
from composable.ground.names import check_bool, check_number, described
from composable.replication import BackwardTiming, Reducer


class ReplicateModule(AnnotatedModule):
    """Methods of a replicated module; its class becomes a subclass of this one. All ranks must call them alike."""

    _composable_kind = "replicated"

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        module: Any = self
        swapped = type(module)
        # Copied as its original class, which may define its own copying.
        remove_replicate_mixin(module)
        try:
            twin = copy.deepcopy(module, memo)
        finally:
            module.__class__ = swapped
        if "replicate" in get_registry(twin):
            twin.__class__ = swapped
        return twin

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Call ``set_requires_gradient_sync``: in replicated modules the synchronisation is an all-reduce."""
        check_bool("requires_all_reduce", requires_all_reduce)
        self.set_requires_gradient_sync(requires_all_reduce, recurse=recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the next backward is the last one of a step, which averages the gradients.

        In the backwards before it gradients add up on their rank. It holds for replicated modules below too.
        """
        check_bool("is_last_backward", is_last_backward)
        reducers = _reducers(self, recurse=True)
        changed = [reducer for reducer in reducers if reducer.is_last_backward is not is_last_backward]
        for reducer in changed:
            reducer.is_last_backward = is_last_backward
        if changed and is_last_backward:
            KeptGradients.note(states_of(self.modules()))

    @property
    def require_backward_grad_sync(self) -> bool:
        """The switch for averages in backward, under the name in torch's wrapper; can be set."""
        return _reducers(self, recurse=False)[0].requires_gradient_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.set_requires_gradient_sync(value)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context ``composable.no_sync(module)``."""
        return no_sync(self)

    def register_comm_hook(self, state: object, hook: HookFunction) -> CommHookHandle:
        """Call ``composable.register_comm_hook(module, state, hook)``. Collective."""
        return reduce_by_hook(self, state, hook)


class CastingReplicateModule(ReplicateModule):
    """Mixin of modules that hold cast copies of parameters or buffers while they run, for a mixed precision policy."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward. After an error modules hold their own tensors again: Ctrl-C skips the hooks after forward."""
        try:
            return super().__call__(*args, **kwargs)
        except BaseException:
            state = replicate_state_of(self)
            for one in () if state is None else state.precision:
                one.put_back()
            raise


_SWAP = ClassSwap(ReplicateModule, "Replicate")
_CASTING_SWAP = ClassSwap(CastingReplicateModule, "Replicate")
remove_replicate_mixin = _SWAP.remove


def add_replicate_mixin(module: nn.Module) -> None:
    """Give an annotated module the methods of its kind, unless it has them."""
    state = replicate_state_of(module)
    (_CASTING_SWAP if state is not None and state.precision else _SWAP).add(module)


def _reducers(module: nn.Module, *, recurse: bool) -> list[Reducer]:
    """Return the reducer of a replicated module, and with ``recurse`` the reducers of those below it.

    Raises ``UsageError`` if the module is no longer annotated.
    """
    if replicate_state_of(module) is None:
        raise no_longer_annotated(module)
    found = map(replicate_state_of, module.modules() if recurse else (module,))
    return [state.reducer for state in found if state is not None]


@dataclass(frozen=True)
class ReductionStats:
    """The result of ``reduction_stats``: the buckets of a replicated module, and its backwards on this rank.

    Attributes:
        world_size: Ranks that average.
        backwards: How many backwards there were.
        is_static_graph: The argument ``static_graph`` of ``replicate``.
        is_rebuilt: Buckets follow the order in which gradients arrived.
        bucket_bytes: Bytes of each bucket as it travels, in order of reduction: gradients, gaps between them, and in
            the last bucket a flag for each parameter and numbers for each rank. Before the first backward: bytes of
            the buckets that it will use.
        bucket_fqns: The parameters of each bucket.
        sparse_fqns: Parameters with sparse gradients, which lie in no bucket.
        arrival_order: Parameters in the order in which gradients are expected; ``None``: not known.
        missing_fqns: Parameters that got no gradient in the last backward.
        sample_rate: One backward in this number is measured, besides the first ten.
        timing: Times of the last backward that was measured and averaged; ``None``: there was none.
    """

    world_size: int
    backwards: int
    is_static_graph: bool
    is_rebuilt: bool
    bucket_bytes: tuple[int, ...]
    bucket_fqns: tuple[tuple[str, ...], ...]
    sparse_fqns: tuple[str, ...]
    arrival_order: tuple[str, ...] | None
    missing_fqns: tuple[str, ...]
    sample_rate: int
    timing: BackwardTiming | None


def reduction_stats(module: nn.Module, *, sample_rate: int | None = None) -> ReductionStats:
    """Return the buckets and times of a replicated module. Not collective; waits for a device that was measured.

    Args:
        module: Annotated by ``replicate``.
        sample_rate: From now on, measure one backward in this number; ``None``: as before, which is 100 at first.

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
            raise ConfigError(f"sample_rate is {described(sample_rate)}", fix=fix)
        reducer.stopwatch.every = int(rate)
    fqns = [item.fqn for item in reducer.params]
    order = reducer.exchange.arrangement.order
    seen = reducer.round.seen if reducer.rounds else [1] * len(fqns)
    return ReductionStats(
        world_size=state.grid.everyone.size,
        backwards=reducer.rounds,
        is_static_graph=reducer.options.static_graph,
        is_rebuilt=reducer.exchange.arrangement.is_rebuilt,
        bucket_bytes=tuple(bucket.sent_bytes for bucket in reducer.buckets),
        bucket_fqns=tuple(tuple(fqns[index] for index in bucket.param_indices) for bucket in reducer.buckets),
        sparse_fqns=tuple(item.fqn for item in reducer.params if item.is_sparse),
        arrival_order=None if order is None else tuple(fqns[index] for index in order),
        missing_fqns=tuple(fqn for fqn, count in zip(fqns, seen, strict=True) if not count),
        sample_rate=reducer.stopwatch.every,
        timing=reducer.stopwatch.read(),
    )

"""Reductions under way: a few gradient buffers, filled and reduced in turn."""

import functools
from collections import deque

from composable.errors import ComposableError, ConfigError, UsageError, located, place_of_rank
from composable.runtime.account import Account
from composable.runtime.streams import Streams
from composable.storage import FlatBuffer, GradientBuffer, GradientPool, Reduction, handle_of
from composable.torch_private import autograd_profiler
from composable.tracing import in_region

__all__ = ["Reductions"]


class Reductions:
    """Takes gradients from the leaves and gives them, reduced, to the sharded parameters.

    Args:
        streams: Of the device.

    Attributes:
        failure: What went wrong on this rank; it still took part in every collective.
    """

    def __init__(self, streams: Streams) -> None:
        self.failure: ComposableError | None = None
        self._streams = streams
        # With what the result and the source belong to.
        self._under_way: deque[tuple[Reduction, Account, GradientBuffer | None]] = deque()
        self._pool = GradientPool()

    def use_streams(self, streams: Streams) -> None:
        """Run on other streams from now on; nothing is under way."""
        self._streams = streams

    def take(self, account: Account, max_buffers: int) -> GradientBuffer | None:
        """Move the gradients of the leaves into a buffer; ``None`` where there are no elements to reduce.

        Args:
            account: Of the flat buffer.
            max_buffers: Gradient buffers that may be alive, this one included: waits until they are fewer.

        Raises:
            UsageError: They cannot be reduced, and no message would tell the other ranks.
        """
        flat = account.flat
        if flat.is_empty:
            account.had |= flat.gradients.bits()
            flat.gradients.drop()
            account.take(flat.shard.new_empty(0))
            return None
        while len(self._under_way) >= max_buffers:
            self._finish_first()
        gradient = self._pool.take(flat.gradients.pool_key, flat.gradients.make_buffer)
        try:
            account.had |= flat.gradients.take(gradient)
        except UsageError as error:
            if account.fills_with_zeros:
                # No message tells the other ranks, so zeros from here would go into their mean.
                raise
            # The other ranks are about to reduce: they get zeros, and hear of it at the end of backward.
            flat.gradients.drop()
            flat.gradients.take(gradient)
            self.failure = self.failure or error
        return gradient

    def begin(self, account: Account, gradient: GradientBuffer | None) -> None:
        """Start to reduce what ``take`` returned; ``None``: what waits for its all-reduce over copies. Collective.

        Raises:
            ConfigError: A hook of the user gave no such gradients, and no message would tell the other ranks.
        """
        flat = account.flat
        path, to_host = flat.routes.gradient_path, flat.home.is_elsewhere
        assert path is not None, "connected when the root was decided"
        if autograd_profiler._is_profiler_enabled:
            start = functools.partial(self._streams.begin_reduction, path, gradient, to_host=to_host)
            reduction = in_region("reduce", _name_of(flat), start)
        else:
            reduction = self._streams.begin_reduction(path, gradient, to_host=to_host)
        self._under_way.append((reduction, account, gradient))
        comms = flat.routes.comms
        if comms.hook is not None or comms.all_reduce_hook is not None:
            self._look_for_failure(account)

    def reduce(self, account: Account, max_buffers: int) -> None:
        """Reduce what the leaves hold, zeros where they hold nothing; arguments and errors as above. Collective."""
        gradient = self.take(account, max_buffers)
        if gradient is not None:
            self.begin(account, gradient)

    def _look_for_failure(self, account: Account) -> None:
        """Note what a hook did wrong: it has met the other ranks all the same, unless it raised."""
        try:
            handle = handle_of(account.flat.params[0].sharded)
            with located(f"{place_of_rank()}, {handle.described}" if handle is not None else place_of_rank()):
                account.flat.routes.check_hook()
        except ConfigError as error:
            if account.fills_with_zeros:
                raise
            self.failure = self.failure or error

    def finish(self) -> None:
        """Wait for all that was started."""
        while self._under_way:
            self._finish_first()

    def _finish_first(self) -> None:
        reduction, account, gradient = self._under_way.popleft()
        if autograd_profiler._is_profiler_enabled:
            shard = in_region("wait for reduce", _name_of(account.flat), reduction.finish)
        else:
            shard = reduction.finish()
        if gradient is not None:
            self._pool.give(account.flat.gradients.pool_key, gradient)
        if shard is not None:
            account.take(shard)

    def end(self) -> ComposableError | None:
        """Give the buffers back to the device; returns what went wrong."""
        self._pool.release()
        failure, self.failure = self.failure, None
        return failure

    def abandon(self) -> None:
        """Wait for all that was started, and forget it."""
        while self._under_way:
            self._under_way[0][0].finish()
            self._under_way.popleft()
        self.end()


def _name_of(flat: FlatBuffer) -> str:
    """Return the name of the module whose parameters lie in ``flat``."""
    handle = handle_of(flat.params[0].sharded)
    return "" if handle is None else handle.fqn

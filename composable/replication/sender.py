"""How a bucket is averaged over the ranks: an all-reduce, or what a communication hook does instead."""

from collections.abc import Callable
from typing import Any

import torch

from composable.arguments import described
from composable.collectives import Pending, Transport
from composable.engine import Registration, reduced_otherwise
from composable.errors import ConfigError
from composable.replication.bucket import Bucket
from composable.replication.patience import waited_for
from composable.torch_private import autograd_profiler
from composable.tracing import in_region

__all__ = ["Sender"]


class _HookPending:
    """A bucket that a communication hook reduces."""

    def __init__(self, sender: "Sender", bucket: Bucket, future: "torch.futures.Future[Any]") -> None:
        self._sender = sender
        self._bucket = bucket
        self._future = future

    def finish(self) -> None:
        try:
            result = self._future.wait()
        except RuntimeError as error:
            # What a callback has raised: the ranks may have met, so this one goes on, and they are told with the tail.
            self._sender.note_raised(error)
            result = self._bucket.flat.new_zeros(1)
        self._bucket.take_result(result[0] if isinstance(result, (list, tuple)) else result)

    def is_over(self) -> bool:
        return self._future.done()


class Sender:
    """Starts the reduction of buckets and waits for it.

    Args:
        transport: Of the ranks.

    Attributes:
        hook: The communication hook; ``None``: an all-reduce per bucket.
        failure: What is wrong with what the hook gave in this round; it has met the other ranks all the same.
    """

    __slots__ = ("_hook_tail_key", "_interruption", "_pendings", "_transport", "failure", "hook")

    def __init__(self, transport: Transport) -> None:
        self.hook: Registration | None = None
        self.failure: ConfigError | None = None
        self._transport = transport
        self._hook_tail_key = transport.allocate_key()
        self._pendings: list[Pending] = []
        self._interruption: BaseException | None = None  # Of a wait before the tail was sent, which others wait for.

    def start(self, bucket: Bucket, write_tail: Callable[[torch.Tensor], None]) -> None:
        """Start the reduction of ``bucket``; of a hook, which leaves the tail alone, that of the tail too.

        Streams: the collective waits for the current one.

        Args:
            bucket: What to reduce.
            write_tail: Fills the tail of the last bucket, before it is sent.
        """
        if autograd_profiler._is_profiler_enabled:
            in_region("reduce", f"bucket {bucket.index() + 1}", self._start, bucket, write_tail)
        else:
            self._start(bucket, write_tail)

    def _start(self, bucket: Bucket, write_tail: Callable[[torch.Tensor], None]) -> None:
        if self.hook is not None:
            if bucket.flat.device.type == "cpu":
                # Hooks such as PowerSGD start collectives when others complete. Two buckets in flight
                # would start theirs in any order; on an accelerator the order of its stream holds.
                self.finish()
            if self.hook.takes_bucket:
                future = self.hook.function(self.hook.state, bucket)
                if hasattr(future, "wait"):
                    self._pendings.append(_HookPending(self, bucket, future))
                else:
                    what = f"the communication hook returned {described(future)}"
                    failure = ConfigError(what, fix="return a torch.futures.Future of the averages")
                    self.failure = self.failure or failure
            else:
                self._average(bucket, self.hook)
            if bucket.is_last():
                if bucket.flat.device.type == "cpu":
                    try:
                        self.finish()  # The tail tells what was raised.
                    except BaseException as error:  # Ctrl-C
                        self._interruption = error
                write_tail(bucket.tail)
                self._pendings.append(self._transport.begin_all_reduce(bucket.tail, self._hook_tail_key))
            return
        if bucket.is_last():
            write_tail(bucket.tail)
        if self._transport.world_size > 1:
            self._pendings.append(self._transport.begin_all_reduce(bucket.flat, bucket.key))

    def _average(self, bucket: Bucket, hook: Registration) -> None:
        """Let a hook average the gradients of ``bucket`` in place."""
        averages, failure = reduced_otherwise(hook, bucket.buffer())
        if averages is None:
            self.failure = self.failure or failure
            bucket.buffer().zero_()
        else:
            bucket.take_result(averages)

    def note_raised(self, error: RuntimeError) -> None:
        """Note what the future of a communication hook has raised."""
        text = str(error).removeprefix("Got the following error when running the callback: ").partition("\n")[0]
        name = "" if self.hook is None else f" {self.hook.name}"
        failure = ConfigError(
            f"the future of the communication hook{name} raised {text}", fix="see what was raised there"
        )
        failure.__cause__ = error
        self.failure = self.failure or failure

    def finish(self) -> None:
        """Wait for all that was started."""
        if autograd_profiler._is_profiler_enabled:
            in_region("wait for reduce", "buckets", self._finish)
        else:
            self._finish()

    def finish_first(self) -> bool:
        """Wait for the first of what was started and not waited for, a while; say whether it is over. No hook runs."""
        if self._pendings:
            if not waited_for(self._pendings[0]):
                return False
            self._pendings.pop(0).finish()
        return True

    def _finish(self) -> None:
        interruption, self._interruption = self._interruption, None
        if interruption is not None:
            raise interruption
        for pending in self._pendings:
            pending.finish()
        self._pendings.clear()

    def forget(self) -> None:
        """Forget what was started and is over."""
        self._pendings.clear()
        self.failure = self._interruption = None

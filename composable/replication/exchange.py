"""What a reducer has with the ranks of one transport: its buckets, and how they are averaged.

A bucket travels as an all-reduce, or as a communication hook lets it. Ranks that wait know this file by its name: a
wait in torch.distributed in a call from here is one in code of the user's.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from composable.comm import Grid, Pending, Transport
from composable.engine import Registration, reduced_otherwise
from composable.errors import ConfigError, place_of_rank
from composable.ground.frames import in_region
from composable.ground.names import described, list_text
from composable.ground.torch_private import autograd_profiler
from composable.replication.buckets import Arrangement, Bucket
from composable.replication.options import BucketOptions
from composable.replication.outside_buckets import SparseGradients
from composable.replication.reports import (
    HOOK_FAILED,
    DebugNotes,
    FlagBlock,
    Report,
    Stopwatch,
    round_error,
    warn_out_of_step,
)
from composable.replication.rounds import Round, StaticGraph
from composable.replication.tensors import ReducedParam

__all__ = ["BucketExchange"]


# The longest wait inside backward that may be in vain: a bucket of the default size takes less at 1 Gbit/s.
_LONGEST_WAIT_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 1e-3


@dataclass(slots=True, eq=False, repr=False)
class _HookPending:
    """A bucket that a communication hook reduces."""

    exchange: "BucketExchange"
    hook: Registration
    bucket: Bucket
    future: "torch.futures.Future[Any]"

    def finish(self) -> None:
        try:
            result = self.future.wait()
        except RuntimeError as error:
            # What a callback has raised: the ranks may have met, so this one goes on, and they are told with the flags.
            self.exchange.note_raised(self.hook, error)
            result = self.bucket.flat.new_zeros(1)
        self.bucket.take_result(result[0] if isinstance(result, (list, tuple)) else result)

    def is_over(self) -> bool:
        return self.future.done()


class BucketExchange:
    """Averages gradients over some ranks.

    Args:
        params: In ``named_parameters()`` order, equal on all ranks.
        transport: Of these ranks; used for nothing else, since its calls must keep their order.
        grid: These ranks.
        options: What the user chose.
        own_round: The running backward, or the last one.
        stopwatch: Measures some backwards.

    Attributes:
        transport: As given.
        scale: Of a gradient before it is added to those of the other ranks.
        group_name: Of the process group that averages in a graph; "": one rank.
        order_key: Of what is shared beside gradients.
        arrangement: The buckets.
        sparse: Averages what lies in no bucket.
        notes: Written about each backward.
        running: The ranks that have gradients, as the transport has them; ``None``: all.
        hook: The communication hook; ``None``: an all-reduce per bucket.
    """

    def __init__(
        self,
        params: Sequence[ReducedParam],
        transport: Transport,
        grid: Grid,
        options: BucketOptions,
        own_round: Round,
        stopwatch: Stopwatch,
    ) -> None:
        ranks = grid.everyone
        self.transport = transport
        self.scale = 1.0 / grid.divisor
        self.running: Sequence[int] | None = None
        self.group_name = "" if ranks.is_alone else ranks.process_group.group_name
        self.hook: Registration | None = None
        self._params = params
        self._device = ranks.device
        self._numbers = sorted(ranks.numbers)  # As the transport has them.
        self._options = options
        self._round = own_round
        self._stopwatch = stopwatch
        self._has_warned = False
        self._flags = FlagBlock(len(params), transport.rank, transport.world_size)
        # Each takes a key of the transport, in this order on every rank.
        self.order_key = transport.allocate_key()
        self._flags_key = transport.allocate_key()
        self.sparse = SparseGradients([item.param for item in params if item.is_sparse], transport)
        self.arrangement = Arrangement(params, transport, options, tail_numel=self._flags.numel)
        self.notes = DebugNotes(params, ranks)
        self._pendings: list[Pending] = []
        # What is wrong with what the hook gave in this round; it has met the other ranks all the same.
        self._failure: ConfigError | None = None
        self._interruption: BaseException | None = None  # Of a wait before the flags were sent, which others wait for.
        self._wait_s = _LONGEST_WAIT_S

    def name_of(self, key: int) -> str:
        """Return what is exchanged under ``key``, for messages."""
        buckets = list(self.arrangement.buckets)
        for bucket in buckets:
            if bucket.key == key:
                names = [self._params[index].fqn for index in bucket.param_indices]
                number = f"bucket {bucket.index() + 1} of {len(buckets)}"
                return f"the all-reduce of {number}, gradients of {list_text(names, 3)}"
        return "the order of gradients" if key == self.order_key else "buffers or flags"

    # The buckets of a round, in order

    def launch(self, bucket: Bucket) -> None:
        """Start the reduction of the next bucket.

        Streams: gradients are copied on the current one, which the collective waits for.
        """
        # A communication hook averages by itself. What is stepped inside backward is dropped there: no copy then.
        is_view = self._options.grads_as_views or self.arrangement.is_lazy
        bucket.pack(self.scale if self.hook is None else 1.0, grads_as_views=is_view)
        self._send(bucket)

    def send_zeros(self, most: int | None = None) -> None:
        """Start the reduction of every bucket that was not started, or of ``most``, with zeros for gradients."""
        buckets = self.arrangement.buckets[self._round.sent :]
        for bucket in buckets[:most]:
            bucket.clear()
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        if self._stopwatch.is_on:
            self._stopwatch.mark("sent")
        if self.notes.checks:
            self.notes.before_send(bucket)
        start = self._start if self.hook is None else partial(self._start_hook, self.hook)
        if autograd_profiler._is_profiler_enabled:
            in_region("reduce", f"bucket {bucket.index() + 1}", start, bucket)
        else:
            start(bucket)
        self._round.sent += 1

    def _start(self, bucket: Bucket) -> None:
        if bucket.is_last():
            self._write_flags(bucket.tail)
        if self.transport.world_size > 1:
            self._pendings.append(self.transport.begin_all_reduce(bucket.flat, bucket.key))

    def _start_hook(self, hook: Registration, bucket: Bucket) -> None:
        """Let the hook reduce ``bucket``; it leaves the flags alone, which travel by themselves."""
        is_on_host = bucket.flat.device.type == "cpu"
        if is_on_host:
            # Hooks such as PowerSGD start collectives when others complete. Two buckets in flight
            # would start theirs in any order; on an accelerator the order of its stream holds.
            self.finish()
        if hook.takes_bucket:
            future = hook.function(hook.state, bucket)
            if hasattr(future, "wait"):
                self._pendings.append(_HookPending(self, hook, bucket, future))
            else:
                what = f"the communication hook returned {described(future)}"
                failure = ConfigError(what, fix="return a torch.futures.Future of the averages")
                self._failure = self._failure or failure
        else:
            averages, wrong = reduced_otherwise(hook, bucket.buffer())
            self._failure = self._failure or wrong
            bucket.take_result(torch.zeros_like(bucket.buffer()) if averages is None else averages)
        if bucket.is_last():
            if is_on_host:
                try:
                    self.finish()  # The flags tell what was raised.
                except BaseException as error:  # Ctrl-C
                    self._interruption = error
            self._write_flags(bucket.tail)
            self._pendings.append(self.transport.begin_all_reduce(bucket.tail, self._flags_key))

    def note_raised(self, hook: Registration, error: RuntimeError) -> None:
        """Note what the future of a communication hook has raised."""
        text = str(error).removeprefix("Got the following error when running the callback: ").partition("\n")[0]
        what = f"the future of the communication hook {hook.name} raised {text}"
        failure = ConfigError(what, fix="see what was raised there")
        failure.__cause__ = error
        self._failure = self._failure or failure

    def raise_failure(self) -> None:
        """Raise what the hook did wrong in the round that has ended, if anything."""
        failure, self._failure = self._failure, None
        if failure is not None:
            failure.at = f"{place_of_rank()}, bucket of a module with parameter {self._params[0].fqn!r}"
            raise failure

    def _write_flags(self, block: torch.Tensor) -> None:
        own_round = self._round
        complaint = own_round.complaint
        if self._failure is not None and complaint >= 0:
            complaint = HOOK_FAILED
        used = None
        if complaint or not own_round.is_complete:
            stepped = own_round.stepped  # and their gradients dropped
            used = [
                item.param.grad is not None or bucket.index() < stepped
                for item, bucket in zip(self._params, self.arrangement.bucket_of, strict=True)
            ]
        order = own_round.order
        # Experts are called as their ranks like, and a module around synchronises all.
        runs = 0 if own_round.is_led else own_round.forwards or own_round.kept + 1
        self._flags.write(block, used, complaint, order[-1] if order else None, runs)

    # The end of a round

    def finish(self) -> None:
        """Wait for all that was started."""
        if autograd_profiler._is_profiler_enabled:
            in_region("wait for reduce", "buckets", self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        interruption, self._interruption = self._interruption, None
        if interruption is not None:
            raise interruption
        for pending in self._pendings:
            pending.finish()
        self._pendings.clear()

    def finish_first(self) -> bool:
        """Wait a while for the first bucket that nobody has waited for; say whether it is averaged. No hook runs.

        The other ranks may be waiting for this one, elsewhere in its backward: then the wait is in vain, and the next
        one is shorter. Where it is not, the end of backward would have waited as long.
        """
        if self._pendings:
            pending = self._pendings[0]
            end_s, pause_s = time.monotonic() + self._wait_s, _FIRST_PAUSE_S
            while not pending.is_over():
                if time.monotonic() > end_s:
                    self._wait_s /= 4
                    return False
                time.sleep(pause_s)
                pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
            self._pendings.pop(0).finish()
        return True

    def forget(self) -> None:
        """Forget what was started and is over."""
        self._pendings.clear()
        self._failure = self._interruption = None

    def wait(self) -> tuple[Report | None, list[float] | None]:
        """Wait for all buckets, and put every average where its gradient was.

        Returns:
            What ``FlagBlock.read`` does; and of each parameter, how many ranks had a gradient, ``None``: all had one.
        """
        self.finish()
        self.sparse.average(self.scale)
        # What an optimizer steps inside backward gets its gradients there.
        is_view, buckets = self._options.grads_as_views, [] if self.arrangement.is_lazy else self.arrangement.buckets
        for bucket in buckets:
            if bucket.casts or not is_view:
                bucket.unpack()
        report = self._flags.read(self.flags)
        if self._round.is_complete:
            return report, None
        used: list[float] = self.flags.tolist()
        for bucket in buckets:
            bucket.adopt(used, is_view=is_view)
        return report, used

    def wait_for_zeros(self) -> torch.Tensor:
        """Wait for all buckets of a backward that was stopped; returns what the ranks said [flags]."""
        self.finish()
        self.sparse.average(self.scale, is_stopped=True)
        return self.flags.clone()

    @property
    def flags(self) -> torch.Tensor:
        """What the ranks said with the last bucket [flags], in its dtype."""
        return self.arrangement.buckets[-1].tail

    def went_well(self, values: Sequence[float]) -> bool:
        """Say whether no rank complained; ``values`` is what the ranks said."""
        return not self._flags.is_complaint(values)

    def agree_on_order(self) -> list[int]:
        """Return the order in which gradients arrived on the first rank, the others at the end. Collective."""
        order = self._round.full_order()
        if self.transport.world_size == 1:
            return order
        sent = torch.tensor(order, device=self.arrangement.buckets[0].flat.device)
        self.transport.begin_broadcast(sent, 0, self.order_key).finish()
        agreed: list[int] = sent.tolist()
        return agreed

    def share(self, number: float) -> list[float]:
        """Return the number of each rank, in the order of the transport. Collective; no backward is running."""
        numbers = torch.zeros(self.transport.world_size, device=self._device)
        numbers[self.transport.rank] = number
        self.transport.begin_all_reduce(numbers, self.order_key).finish()
        shared: list[float] = numbers.tolist()
        return shared

    def warn_of(self, report: Report) -> None:
        """Log, once, that ranks ran the modules different numbers of times: one may have left out a backward."""
        if not self._has_warned:
            self._has_warned = True
            runs = zip(self._numbers, report.runs, strict=True)
            warn_out_of_step({rank: round(count) for rank, count in runs if count}, self._params[0].fqn)

    def error_of(self, missing: Sequence[int], report: Report, static: StaticGraph | None) -> Exception:
        """Return the error for what went wrong here, or for what did elsewhere."""
        numbers, order = self._numbers, self._round.order
        running = numbers if self.running is None else [numbers[place] for place in self.running]
        hook = "" if self.hook is None else f" {self.hook.name}"
        last, own = order[-1] if order else None, numbers[self.transport.rank]
        return round_error(self._params, missing, last, report, numbers, own, static, running, hook)

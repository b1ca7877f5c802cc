"""Averages the gradients of replicated modules, bucket by bucket as they fill.

A *round* is one backward that synchronises. In it every rank starts the all-reduce of every
bucket exactly once and in the same order: a bucket is started when its own gradients are
there and the bucket before it was started, and whatever is left is started when backward
ends. So ranks whose gradients arrive in another order, or not at all, never wait for each
other in vain. The last bucket ends with flags and complaints.

What is averaged is the whole ``param.grad``: gradients that backwards without
synchronisation left there, and ones averaged before (equal on all ranks, so averaging them
again changes nothing) need no bookkeeping.

Source: PyTorch Distributed, arXiv 2006.15704.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import nn

from composable.comm import Grid, Transport
from composable.engine import Registration, Stepper, check_backward
from composable.errors import UsageError, place_of_rank
from composable.ground.torch_hooks import Ending, next_ending_number
from composable.ground.torch_private import opaque
from composable.replication.buckets import Bucket
from composable.replication.exchange import BucketExchange
from composable.replication.options import BucketOptions
from composable.replication.outside_buckets import traced_arrival
from composable.replication.reports import GRAPH_CHANGED, STOPPED, Report, Stopwatch, second_gradient
from composable.replication.rounds import Phase, Round, StaticGraph
from composable.replication.tensors import ReducedParam, grad_dtype_of

__all__ = ["GradientAverager", "RoundTeller"]


_OPEN = Phase.OPEN
_FIX_LENT = (
    "functional_call gave the modules other tensors, which replicate does not average: compute these from the "
    "parameters; or call it on a copy from before replicate, or with find_unused_parameters=True, and average by hand"
)


class RoundTeller(Protocol):
    """Tells ranks that run no backward what others are about to start; ``before_round`` has told of the round."""

    def send(self) -> None:
        """Tell that the next bucket is started."""
        ...

    def finish(self) -> None:
        """Tell that the round ends."""
        ...

    def recover(self) -> None:
        """Tell that a round that was stopped ends: all buckets that were not started are."""
        ...


class GradientAverager:
    """Runs the rounds of a set of parameters.

    Args:
        params: In ``named_parameters()`` order, equal on all ranks.
        transport: Of these ranks; used for nothing else, since its calls must keep their order.
        grid: These ranks.
        options: What the user chose.
        after_backward: Lets this run at the end of the running backward.

    Attributes:
        number: Its place among all that end a backward.
        requires_gradient_sync: Whether the next backward is a round; if not, gradients stay local.
        is_last_backward: If not, backward is no round either.
        sync_after_context: What ``requires_gradient_sync`` is after the ``no_sync`` that runs; ``None``: none runs.
        round: The running backward, or the last one.
        rounds: How many backwards there were, the running one included.
        exchange: Averages buckets over the ranks.
        comm_hooks: Registrations of communication hooks that reach the parameters; the nearest holds.
        stopwatch: Measures some backwards.
        before_round: Called before a backward, with whether it averages; ``None``: nothing is.
        teller: Told of what a round starts before it does; ``None``: nobody is.
        steppers: Get parameters that have their averages, and step them inside backward.
        is_lent: A ``functional_call`` has given the modules other tensors since the last round.
    """

    def __init__(
        self,
        params: Sequence[ReducedParam],
        transport: Transport,
        grid: Grid,
        options: BucketOptions,
        after_backward: Callable[[Ending], Callable[[], None]],
    ) -> None:
        self.number = next_ending_number()
        self.params = tuple(params)
        self.options = options
        self.requires_gradient_sync = True
        self.is_last_backward = True
        self.sync_after_context: bool | None = None
        self.round = Round([0] * len(params))
        self.rounds = 0
        self.comm_hooks: tuple[Registration, ...] = ()
        self.stopwatch = Stopwatch(grid.everyone.device)
        self.before_round: Callable[[bool], None] | None = None
        self.teller: RoundTeller | None = None
        self.is_lent = False
        self.steppers: tuple[Stepper, ...] = ()
        self._after_backward = after_backward
        self._lock = threading.RLock()
        self._is_closed = False
        self._missing: list[int] | None = None  # Of the round that is ending; None: none is.
        self._kept = bytearray(len(params))  # Arrived since the last round, without synchronisation.
        self._static = StaticGraph() if options.static_graph else None
        self._connect(transport, grid)

    def _connect(self, transport: Transport, grid: Grid) -> None:
        """Have what depends on the ranks, as it is before the first backward."""
        self._grid = grid
        self.exchange = BucketExchange(self.params, transport, grid, self.options, self.round, self.stopwatch)
        self._bucket_of = self.exchange.arrangement.bucket_of  # changed in place

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The buckets in order of reduction."""
        return self.exchange.arrangement.buckets

    @property
    def synchronises(self) -> bool:
        """The next backward averages gradients."""
        return self.requires_gradient_sync and self.is_last_backward

    # What forward and backward call, in this order.

    def prepare(self) -> None:
        """Put things right before a forward, if the last backward was stopped by an exception.

        Collective if that backward had started an all-reduce: the ranks that wait for the rest get it.
        """
        # Nothing is in flight but what was cut short, a broadcast of buffers say.
        self.exchange.transport.settle()
        # A backward that is running is none of the forward's business: so this one was stopped.
        if self.round.phase is not Phase.AT_REST:
            self._recover()
        if self.round.kept and all(item.param.grad is None for item in self.params):
            self.forget_kept()  # Dropped.

    def arm(self, module_index: int) -> None:
        """Note that the gradient of an output of an annotated module arrives."""
        if self.params:  # Else other annotations below average everything.
            if self.round.phase is not _OPEN:
                self._open()
            self.round.arm(module_index, self.params)

    def follow(self) -> None:
        """Take part in the running backward, which all ranks run: whether gradients arrive here or not."""
        if self.params:
            if self.round.phase is not _OPEN:
                self._open()
            self.round.follow()

    def arrivals(self) -> Iterator[Callable[[torch.Tensor], None]]:
        """Yield what each parameter calls with itself, of any shape, once its ``grad`` has this backward's gradient."""
        delay = self.options.delay
        for index in range(len(self.params)):
            arrive = self._make_arrival(index)
            yield arrive if delay is None or index != delay.trigger else self._make_release(index, arrive)

    def _make_arrival(self, index: int) -> Callable[[torch.Tensor], None]:
        # Runs once per parameter and backward: what it reads most is a local of this call. What leads to the
        # parameters is held weakly: Python's collector does not see that a parameter holds its hooks.
        own_round, find_reducer = self.round, weakref.ref(self)
        seen, order = own_round.seen, own_round.order

        @partial(opaque, traced=traced_arrival(find_reducer, self.params[index].fqn))
        def arrive(_: torch.Tensor) -> None:
            reducer = find_reducer()
            if reducer is None:
                return  # The module is gone, and only the parameter lives on.
            if own_round.phase is not _OPEN:
                reducer._open()
            if seen[index]:
                reducer._arrive_again(index)
                return
            seen[index] = 1
            order.append(index)
            bucket = reducer._bucket_of[index]
            bucket.pending -= 1
            if not bucket.pending:
                reducer._launch_full()

        return arrive

    def _make_release(self, index: int, arrive: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
        """Return the arrival of the parameter that others wait for."""
        own_round, find_reducer = self.round, weakref.ref(self)

        @partial(opaque, traced=traced_arrival(find_reducer, self.params[index].fqn))
        def release(grad: torch.Tensor) -> None:
            arrive(grad)
            reducer = find_reducer()
            if reducer is not None and own_round.seen[index] == 1:
                for bucket in reducer.exchange.arrangement.delayed:
                    bucket.pending -= 1
                reducer._launch_full()

        return release

    def _arrive_again(self, index: int) -> None:
        """Accept another gradient in one backward as long as the first has not been sent.

        Raises:
            UsageError: It has been.
        """
        self.round.seen[index] += 1
        bucket = self._bucket_of[index]
        if self.round.synchronises and bucket.index() < self.round.sent:
            raise second_gradient(self.params[index].fqn, is_static=self._static is not None)
        if self._static is not None and self._static.allows(index, self.round.seen[index]):
            bucket.pending -= 1
            if not bucket.pending:
                self._launch_full()

    def _open(self) -> None:
        """Begin a backward."""
        with self._lock:
            if self.round.phase is _OPEN:
                return  # Another device's thread was first.
            if self._is_closed:
                raise UsageError(
                    "backward of a forward that ran before the model's annotation was taken off",
                    at=place_of_rank(),
                    fix="run backward before unannotate, or forward again after it",
                )
            if self.round.phase is Phase.STOPPED:
                self._recover()
            if self.steppers:
                check_backward(self.params[0].fqn)
            if self.before_round is not None:
                self.before_round(self.synchronises)
            with torch.no_grad():
                self.exchange.arrangement.prepare()
            self.round.clear(self.buckets, synchronises=self.synchronises)
            self.round.open(self._after_backward(self))
            self.rounds += 1
            self.stopwatch.begin(self.rounds)
            if not self.exchange.notes.is_off:
                self.exchange.notes.begin(self.buckets, self.rounds)

    def _launch_full(self) -> None:
        buckets, own_round = self.buckets, self.round
        if not own_round.synchronises or own_round.is_led:
            # In which order the gradients of several modules come is each rank's own business.
            return
        with self._lock, torch.no_grad():
            while own_round.sent < len(buckets) and not buckets[own_round.sent].pending:
                self._launch(buckets[own_round.sent])
                if self.steppers:
                    # One is on its way while the next one fills.
                    self._step_sent()

    def _launch(self, bucket: Bucket) -> None:
        if self.teller is not None:
            self.teller.send()
        self.exchange.launch(bucket)

    def start(self) -> None:
        """End a backward: start the reduction of what is left."""
        own_round = self.round
        self._missing = None
        if not own_round.is_due():
            own_round.close()
            return
        if not own_round.synchronises:
            for index in own_round.order:
                self._kept[index] = 1
            own_round.kept += 1
            own_round.close()
            return
        accepts = self.options.find_unused or self._static is not None or own_round.is_led
        missing = [] if accepts else own_round.missing(self.params, self._kept)
        own_round.complaint = len(missing)
        if self._static is not None and not self._static.holds(own_round.seen, self._kept):
            own_round.complaint = GRAPH_CHANGED
        self._missing = missing
        if self.stopwatch.is_on:
            self.stopwatch.mark("computed")
        with torch.no_grad():
            for bucket in self.buckets[own_round.sent :]:
                self._launch(bucket)

    def finish(self) -> None:
        """Wait for the averages, and complain about what is missing.

        Raises:
            UsageError: On this or another rank, parameters got no gradient.
        """
        missing, self._missing = self._missing, None
        if missing is None:
            return
        if self.teller is not None:
            self.teller.finish()
        report = self._finish_round()
        if self.stopwatch.is_on:
            self.stopwatch.end()
        self._conclude(missing, report)

    @torch.no_grad()
    def _finish_round(self) -> Report | None:
        """Wait for all buckets, and give every parameter its average; returns complaints of ranks."""
        report, used = self.exchange.wait()
        self._end_round(self.exchange.flags)
        if self.steppers:
            self._step_rest(used)
        if report is not None and not report.is_error:
            self.exchange.warn_of(report)
            return None
        return report

    def _conclude(self, missing: Sequence[int], report: Report | None) -> None:
        """Close the round, and raise what went wrong in it."""
        self.round.close()
        self.exchange.raise_failure()
        is_lent, self.is_lent = self.is_lent, False
        if missing or self.round.complaint or report is not None:
            error = self.exchange.error_of(missing, report or Report(), self._static)
            if missing and is_lent and isinstance(error, UsageError):
                error.fix = _FIX_LENT
            raise error

    def _end_round(self, flags: torch.Tensor) -> None:
        """Take from a round what is to hold for all later ones; ``flags`` is what the ranks said."""
        self.forget_kept()
        arrangement = self.exchange.arrangement
        if arrangement.order is None:
            arrangement.expect(self.exchange.agree_on_order())
        if self._static is not None and self._static.counts is None and arrangement.order is not None:
            values = flags.tolist()
            if self.exchange.went_well(values):
                self._static.learn(self.round.seen, values[: len(self.params)])
                arrangement.expect(arrangement.order, self.round.seen.copy(), self._static.unused)

    def forget_kept(self) -> None:
        """Count from here on: nothing waits for the next round, or ranks may have kept different numbers."""
        self._kept[:] = bytes(len(self._kept))
        self.round.kept = self.round.forwards = 0

    # A backward that an exception stopped.

    def _recover(self) -> None:
        """Complete the round of a backward that was stopped, so that no rank waits for this one.

        The gradients in the buckets become zero: what a round that was stopped leaves there is
        of no use, and the user may have set it to zero while it was on its way.
        """
        self.exchange.transport.settle()
        # What has arrived says less: where ranks use other parameters, it differs though they were stopped alike.
        if self.round.synchronises and (self.round.accumulates or self.round.order):
            self.round.complaint = STOPPED
            if self.teller is not None:
                self.teller.recover()
            self._complete_stopped()
        else:
            self.round.kept += not self.round.synchronises
            self._forget_round()

    @torch.no_grad()
    def _complete_stopped(self) -> None:
        self.exchange.send_zeros()
        flags = self.exchange.wait_for_zeros()
        if not self.steppers:
            for bucket in self.buckets:
                bucket.clear()
        self._end_round(flags)
        self._forget_round()
        if self.steppers:
            # As the other ranks have done, or do when they hear of this: else parameters would differ.
            self._step_rest(flags.tolist())

    def _forget_round(self) -> None:
        self.exchange.forget()
        self._missing = None
        self.round.close()

    # Steps inside backward.

    def _step_sent(self) -> None:
        """Step the buckets before the one that was sent last, and free them, as far as their averages come in time.

        Another rank may have other gradients first, and wait for this one elsewhere in its backward, say for a module
        that is sharded: so no wait here may be without end, and the end of backward steps the rest.
        """
        own_round = self.round
        while own_round.stepped < own_round.sent - 1:
            bucket = self.buckets[own_round.stepped]
            if bucket.has_split and not bucket.flat.is_cuda:
                return  # Such a step may be collective, and how many buckets come in time differs between ranks.
            if not self.exchange.finish_first():
                return
            if bucket.casts:
                bucket.unpack()
            own_round.stepped += 1
            self.step([self.params[index].param for index in bucket.param_indices])
            if not bucket.is_last():
                bucket.release()

    def _step_rest(self, used: Sequence[float] | None) -> None:
        """Step the others, by averages that are there, and free all buckets.

        Args:
            used: Of each parameter, how many ranks had a gradient; ``None``: all had one.
        """
        for bucket in self.buckets[self.round.stepped :]:
            if bucket.casts:
                bucket.unpack()
            params = [self.params[index].param for index in bucket.param_indices]
            for index, param, view in zip(bucket.param_indices, params, bucket.views, strict=True):
                if used is not None and used[index] == 0:
                    continue
                if grad_dtype_of(param) is view.dtype:
                    param.grad = view
                elif param.grad is None:
                    param.grad = view.to(grad_dtype_of(param))
            # What is cut short goes on here: the other ranks step all buckets.
            self.round.stepped += 1
            self.step(params)
            bucket.release()

    def step(self, params: Sequence[nn.Parameter]) -> None:
        """Let the steppers step those of ``params``, of any shapes, that have a gradient."""
        complete = [param for param in params if param.grad is not None] if self.steppers else []
        for step in self.steppers:
            step(complete)

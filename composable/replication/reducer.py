"""Averages the gradients of replicated modules, bucket by bucket as they fill.

A *round* is one backward that synchronises. In it every rank starts the all-reduce of every
bucket exactly once and in the same order: a bucket is started when its own gradients are
there and the bucket before it was started, and whatever is left is started when backward
ends. So ranks whose gradients arrive in another order, or not at all, never wait for each
other in vain. The last bucket ends with the *tail*, which carries flags and complaints.

What is averaged is the whole ``param.grad``: gradients that backwards without
synchronisation left there, and ones averaged before (equal on all ranks, so averaging them
again changes nothing) need no bookkeeping.

Source: PyTorch Distributed, arXiv 2006.15704.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from composable.collectives import Grid, Transport
from composable.engine import Registration, Stepper, check_backward, copied_registrations, nearest, refuse_steppers
from composable.errors import UsageError
from composable.replication.bucket import Bucket, BucketOptions, ReducedParam, check_steppable
from composable.replication.bucket_memory import note_caller
from composable.replication.bucket_steps import step_complete, step_rest, step_sent
from composable.replication.complaints import (
    FIX_LENT,
    GRAPH_CHANGED,
    STOPPED,
    after_close,
    copied_inside,
    hook_failed,
    second_gradient,
)
from composable.replication.exchange import Exchange
from composable.replication.kept import average_kept
from composable.replication.round import Round
from composable.replication.static_graph import StaticGraph
from composable.replication.tail import Report
from composable.replication.timing import Stopwatch
from composable.replication.traced import traced_arrival
from composable.torch_hooks import Ending, next_ending_number
from composable.torch_private import opaque

__all__ = ["Reducer", "RoundTeller"]


class RoundTeller(Protocol):
    """Tells ranks that run no backward what others are about to start; ``before_round`` has told of the round."""

    def send(self) -> None:
        """The next bucket."""
        ...

    def finish(self) -> None:
        """The end of the round."""
        ...

    def recover(self) -> None:
        """The end of a round that was stopped: all buckets that were not started."""
        ...


class Reducer:
    """Averages the gradients of a set of parameters over the ranks of one transport.

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
        sync_after_context: What that is after the ``no_sync`` that runs; ``None``: none runs.
        rounds: How many backwards there were, the running one included.
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
        self._round = Round(len(params))
        self._missing: list[int] | None = None  # Of the round that is ending; None: none is.
        self._kept = bytearray(len(params))  # Arrived since the last round, without synchronisation.
        self._static = StaticGraph() if options.static_graph else None
        self._connect(transport, grid)

    def _connect(self, transport: Transport, grid: Grid) -> None:
        """Have what depends on the ranks, as it is before the first backward."""
        self._grid = grid
        self._exchange = Exchange(self.params, transport, grid, self.options, self._round, self.stopwatch)
        self._arrangement = self._exchange.arrangement
        self._sender = self._exchange.sender
        self._bucket_of = self._arrangement.bucket_of  # changed in place

    def move_to(self, transport: Transport, grid: Grid) -> None:
        """Talk to other ranks from now on, and forget what a backward that was stopped has left; none is running.

        Collective. Hooks stay; so does the order of gradients, if these ranks know the same one. Gradients get memory
        of their own.
        """
        arrangement, hook = self._arrangement, self._sender.hook
        arrangement.dissolve()
        self._round.reset()
        self._missing = None
        self._forget_kept()
        self._connect(transport, grid)
        self._sender.hook = hook
        self._arrangement.is_lazy = bool(self.steppers)
        is_known = grid.everyone.are_alike(arrangement.expectation)
        if is_known:
            self._arrangement.settle_like(arrangement)
        if self._static is not None:
            self._static = self._static.of_rank() if is_known else StaticGraph()

    @property
    def buckets(self) -> Sequence[Bucket]:
        """In order of reduction."""
        return self._arrangement.buckets

    @property
    def next_buckets(self) -> Sequence[Bucket]:
        """These, or what they will be in the first backward."""
        return self._arrangement.next_buckets()

    @property
    def arrival_order(self) -> list[int] | None:
        """The parameters in the order that the buckets of the next backward follow; ``None``: not known yet."""
        return self._arrangement.order

    @property
    def is_rebuilt(self) -> bool:
        """The buckets follow the order of arrival."""
        return self._arrangement.is_rebuilt

    def expect_order(self, order: Sequence[int]) -> None:
        """Let the buckets of the next backward follow ``order``, equal on all ranks; no backward is running."""
        self._arrangement.settle(order)

    @property
    def hook(self) -> Registration | None:
        """The communication hook that holds."""
        return self._sender.hook

    # What a graph of compiled autograd reads.

    @property
    def untraceable(self) -> str:
        """Why a graph cannot average the gradients; "": it can."""
        if self._sender.hook is not None:
            return "a communication hook cannot run"
        if self.options.find_unused:
            return "ranks cannot tell each other which parameters they used (find_unused_parameters=True)"
        if self.options.static_graph or self.options.delay is not None or not self.is_last_backward:
            return "gradients are averaged one by one (static_graph, a delayed all-reduce, set_is_last_backward(False))"
        if any(item.is_sparse or isinstance(item.param, DTensor) for item in self.params):
            return "gradients that are sparse, or that tensor parallelism has split, cannot be averaged"
        if self.steppers:
            return "an optimizer cannot step inside of it"
        if self.before_round is not None:
            return "ranks without inputs cannot follow (Join)"
        if self.options.has_policy:
            return "nothing tells modules when to hold their own parameters again (mp_policy)"
        if self._is_closed:
            return "a module of before unannotate cannot run"
        return ""

    @property
    def round(self) -> Round:
        """The running backward, or the last one."""
        return self._round

    @property
    def scale(self) -> float:
        """Of a gradient before it is added to those of the other ranks."""
        return self._exchange.scale

    @property
    def group_name(self) -> str:
        """Of the process group that averages in a graph; "": one rank."""
        return self._exchange.group_name

    def name_of(self, key: int) -> str:
        """Return what is exchanged under ``key``, for messages."""
        return self._exchange.name_of(key)

    @property
    def has_sound_gradients(self) -> bool:
        """The last backward was not stopped by an exception."""
        return not (self._round.was_stopped or self._round.is_open)

    def copied(self, params: Sequence[ReducedParam], transport: Transport, memo: dict[int, Any]) -> "Reducer":
        """Return a reducer of copied parameters: the same options, order and hook, and buckets of its own.

        Args:
            params: Copies of this one's, in the same order.
            transport: For the copy alone.
            memo: Of the running ``copy.deepcopy``.

        Raises:
            UsageError: A backward is running.
        """
        if self._round.is_open:
            raise copied_inside()
        twin = Reducer(params, transport, self._grid, self.options, self._after_backward)
        syncs, after = self.requires_gradient_sync, self.sync_after_context
        twin.requires_gradient_sync = syncs if after is None else after
        twin.is_last_backward = self.is_last_backward
        twin._kept[:] = self._kept
        # The nearest comes first; nobody can ask where the modules are while they are being copied.
        copies = copied_registrations(self.comm_hooks, memo)
        twin._use_comm_hooks(copies, copies[0] if copies else None)
        twin._arrangement.settle_like(self._arrangement)
        twin._static = None if self._static is None else self._static.copied()
        return twin

    def close(self) -> None:
        """Average what backwards without synchronisation left, give every gradient memory of its own, free the buckets.

        Collective. No backward is running; one that comes later, of a forward that ran before, is an error.
        """
        self.average_kept_gradients()
        self._arrangement.dissolve()
        self.comm_hooks = ()
        self._is_closed = True

    def average_kept_gradients(self) -> None:
        """Do what the next round would have done, one gradient at a time. Collective."""
        if not self.params:
            return
        is_any = any(self._kept)
        order_key, sparse = self._exchange.order_key, self._exchange.sparse
        is_any = average_kept(self.params, self._exchange.transport, order_key, self.scale, sparse, is_any=is_any)
        self.count_anew()
        self._forget_kept()
        if is_any:
            step_complete(self.steppers, [item.param for item in self.params])

    def step_by(self, steppers: Sequence[Stepper]) -> None:
        """Let these step the parameters, from the next backward on.

        Raises:
            ConfigError: See ``check_steppable``.
        """
        if steppers:
            check_steppable(self.params)
        self.steppers = tuple(steppers)
        self._arrangement.is_lazy = bool(steppers)
        for bucket in self.buckets:
            bucket.release()  # Gradients in it keep their memory, and are copied.

    @property
    def synchronises(self) -> bool:
        """The next backward averages gradients."""
        return self.requires_gradient_sync and self.is_last_backward

    @property
    def is_running(self) -> bool:
        """A backward is running."""
        return self._round.is_open

    def register_comm_hooks(self, registrations: Sequence[Registration]) -> None:
        """Let the nearest of ``registrations`` reduce every bucket; no backward is running.

        Raises:
            ConfigError: None of them is the nearest.
            UsageError: An optimizer steps inside backward.
        """
        self._use_comm_hooks(registrations, self.check_comm_hooks(registrations))

    def _use_comm_hooks(self, registrations: Sequence[Registration], nearest_one: Registration | None) -> None:
        self._sender.hook = nearest_one
        self.comm_hooks = tuple(registrations)
        if nearest_one is not None:
            note_caller(nearest_one.state, self)

    def check_comm_hooks(self, registrations: Sequence[Registration]) -> Registration | None:
        """Return what ``register_comm_hooks`` would choose; raises what it does."""
        if registrations and self.steppers and self.params:
            refuse_steppers(self.steppers, self.params[0].fqn)
        return nearest(registrations)

    # What forward and backward call, in this order.

    def prepare(self) -> None:
        """Put things right before a forward, if the last backward was stopped by an exception.

        Collective if that backward had started an all-reduce: the ranks that wait for the rest get it.
        """
        # Nothing is in flight but what was cut short, a broadcast of buffers say.
        self._exchange.transport.settle()
        # A backward that is running is none of the forward's business: so this one was stopped.
        if self._round.was_stopped or self._round.is_open:
            self._recover()
        if self._round.kept and all(item.param.grad is None for item in self.params):
            self._forget_kept()  # Dropped.

    def arm(self, module_index: int) -> None:
        """Note that the gradient of an output of an annotated module arrives."""
        if not self.params:
            return  # Other annotations below average everything.
        if not self._round.is_open:
            self._open()
        self._round.arm(module_index, self.params)

    def follow(self) -> None:
        """Take part in the running backward, which all ranks run: whether gradients arrive here or not."""
        if not self.params:
            return
        if not self._round.is_open:
            self._open()
        self._round.follow()

    def arrivals(self) -> Iterator[Callable[[torch.Tensor], None]]:
        """Yield what each parameter must call once its ``grad`` has this backward's gradient in it."""
        delay = self.options.delay
        for index in range(len(self.params)):
            arrive = self._make_arrival(index)
            yield arrive if delay is None or index != delay.trigger else self._make_release(index, arrive)

    def start(self) -> None:
        """End a backward: start the reduction of what is left."""
        self._missing = None
        if not self._round.is_due():
            self._round.close()
            return
        if not self._round.synchronises:
            for index in self._round.order:
                self._kept[index] = 1
            self._round.kept += 1
            self._round.close()
            return
        accepts = self.options.find_unused or self._static is not None or self._round.is_led
        missing = [] if accepts else self._round.missing(self.params, self._kept)
        self._round.complaint = len(missing)
        if self._static is not None and not self._static.holds(self._round.seen, self._kept):
            self._round.complaint = GRAPH_CHANGED
        self._missing = missing
        if self.stopwatch.is_on:
            self.stopwatch.mark("computed")
        with torch.no_grad():
            for bucket in self.buckets[self._round.sent :]:
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
        with torch.no_grad():
            report = self._finish_round()
        if self.stopwatch.is_on:
            self.stopwatch.end()
        failure, self._sender.failure = self._sender.failure, None
        self._round.close()
        if failure is not None:
            raise hook_failed(failure, self.params[0].fqn)
        is_lent, self.is_lent = self.is_lent, False
        if missing or self._round.complaint or report is not None:
            error = self._exchange.error_of(missing, report or Report(), self._static)
            if missing and is_lent and isinstance(error, UsageError):
                error.fix = FIX_LENT
            raise error

    def share(self, number: float) -> list[float]:
        """Return the number of each rank, in the order of the transport. Collective; no backward is running."""
        return self._exchange.share(number)

    def divide_by(self, divisor: int | None) -> None:
        """Divide sums of gradients by this in place of the number of ranks; ``None``: by that again."""
        self._exchange.scale = 1.0 / (divisor or self._grid.divisor)

    def expect(self, running: Sequence[int] | None) -> None:
        """Expect gradients of these ranks only, as the transport has them; ``None``: of all."""
        self._exchange.running = running

    def put_aside(self) -> Callable[[], None]:
        """Return what puts the gradients of now back: until then rounds of other ranks leave their averages here."""
        grads = [item.param.grad for item in self.params]
        copies, kept = [None if grad is None else grad.clone() for grad in grads], bytes(self._kept)

        def put_back() -> None:
            self._kept[:] = kept
            for item, grad in zip(self.params, copies, strict=True):
                item.param.grad = grad

        return put_back

    def shadow(self) -> None:
        """Do what a backward does, with zeros in place of gradients: the other ranks run one. Collective.

        Parameters that a rank has a gradient for get the average.

        Raises:
            UsageError: Of another rank.
        """
        if not self.params:
            return
        self.begin_shadow()
        with torch.no_grad():
            self._exchange.send_zeros()
        self.end_shadow()

    def begin_shadow(self) -> None:
        """Do what a backward begins with."""
        with torch.no_grad():
            for item in self.params:
                item.param.grad = None
            self._arrangement.prepare()
            self._round.clear(self.buckets, synchronises=True)
        self._round.kept, self._round.forwards = -1, 0
        self.rounds += 1

    def send_shadow(self) -> None:
        """Send zeros for the next bucket. Collective."""
        with torch.no_grad():
            self._exchange.send_zero()

    def recover_shadow(self) -> None:
        """Do what the others do about a round that was stopped there, if one has begun. Collective."""
        with torch.no_grad():
            self._complete_stopped()

    def end_shadow(self) -> None:
        """Wait for the averages. Collective; errors as ``shadow``."""
        with torch.no_grad():
            report = self._finish_round()
        failure, self._sender.failure = self._sender.failure, None
        self._round.close()
        if failure is not None:
            raise hook_failed(failure, self.params[0].fqn)
        if report is not None:
            raise self._exchange.error_of([], report, self._static)

    def _make_arrival(self, index: int) -> Callable[[torch.Tensor], None]:
        # Runs once per parameter and backward: what it reads most is a local of this call. What leads to the
        # parameters is held weakly: Python's collector does not see that a parameter holds its hooks.
        own_round, find_reducer = self._round, weakref.ref(self)
        seen, order = own_round.seen, own_round.order

        @partial(opaque, traced=traced_arrival(find_reducer, self.params[index].fqn))
        def arrive(_: torch.Tensor) -> None:
            reducer = find_reducer()
            if reducer is None:
                return  # The module is gone, and only the parameter lives on.
            if not own_round.is_open:
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
        own_round, find_reducer = self._round, weakref.ref(self)

        @partial(opaque, traced=traced_arrival(find_reducer, self.params[index].fqn))
        def release(grad: torch.Tensor) -> None:
            arrive(grad)
            reducer = find_reducer()
            if reducer is not None and own_round.seen[index] == 1:
                for bucket in reducer._arrangement.delayed:
                    bucket.pending -= 1
                reducer._launch_full()

        return release

    def _arrive_again(self, index: int) -> None:
        """Accept another gradient in one backward as long as the first has not been sent.

        Raises:
            UsageError: It has been.
        """
        self._round.seen[index] += 1
        bucket = self._arrangement.bucket_of[index]
        if self._round.synchronises and bucket.index() < self._round.sent:
            raise second_gradient(self.params[index].fqn, is_static=self._static is not None)
        if self._static is not None and self._static.allows(index, self._round.seen[index]):
            bucket.pending -= 1
            if not bucket.pending:
                self._launch_full()

    def _open(self) -> None:
        """Begin a backward."""
        with self._lock:
            if self._round.is_open:
                return  # Another device's thread was first.
            if self._is_closed:
                raise after_close()
            if self._round.was_stopped:
                self._recover()
            if self.steppers:
                check_backward(self.params[0].fqn)
            if self.before_round is not None:
                self.before_round(self.synchronises)
            with torch.no_grad():
                self._arrangement.prepare()
            self._round.clear(self.buckets, synchronises=self.synchronises)
            self._round.open(self._after_backward(self))
            self.rounds += 1
            self.stopwatch.begin(self.rounds)
            if self._exchange.notes is not None:
                self._exchange.notes.begin(self.buckets, self.rounds)

    def _recover(self) -> None:
        """Complete the round of a backward that was stopped, so that no rank waits for this one.

        The gradients in the buckets become zero: what a round that was stopped leaves there is
        of no use, and the user may have set it to zero while it was on its way.
        """
        self._exchange.transport.settle()
        # What has arrived says less: where ranks use other parameters, it differs though they were stopped alike.
        if self._round.synchronises and (self._round.accumulates or self._round.order):
            self._round.complaint = STOPPED
            if self.teller is not None:
                self.teller.recover()
            with torch.no_grad():
                self._complete_stopped()
        else:
            self._round.kept += not self._round.synchronises
            self._forget_round()

    def _complete_stopped(self) -> None:
        self._exchange.send_zeros()
        tail = self._exchange.wait_for_zeros()
        if self.steppers:
            self._close_stopped(tail)
            return
        for bucket in self.buckets:
            bucket.clear()
        self._end_round(tail)
        self._forget_round()

    def _close_stopped(self, tail: torch.Tensor) -> None:
        """Step as the other ranks have done, or do when they hear of this: else parameters would differ."""
        self._end_round(tail)
        self._forget_round()
        step_rest(self.steppers, self.params, self.buckets, self._round, tail.tolist())

    def _forget_round(self) -> None:
        self._sender.forget()
        self._missing = None
        self._round.close()

    def _launch_full(self) -> None:
        buckets, own_round = self._arrangement.buckets, self._round
        if not own_round.synchronises or own_round.is_led:
            # In which order the gradients of several modules come is each rank's own business.
            return
        with self._lock, torch.no_grad():
            while own_round.sent < len(buckets) and not buckets[own_round.sent].pending:
                self._launch(buckets[own_round.sent])
                if self.steppers:
                    # One is on its way while the next one fills.
                    step_sent(self.steppers, self.params, buckets, own_round, self._sender)

    def _launch(self, bucket: Bucket) -> None:
        if self.teller is not None:
            self.teller.send()
        self._exchange.launch(bucket)

    def _finish_round(self) -> Report | None:
        """Wait for all buckets, and give every parameter its average; returns what ``Tail.read`` does."""
        report, used = self._exchange.wait()
        self._end_round(self._exchange.tail)
        if self.steppers:
            step_rest(self.steppers, self.params, self.buckets, self._round, used)
        if report is not None and not report.is_error:
            self._exchange.warn_of(report)
            return None
        return report

    def _learn_graph(self, tail: torch.Tensor) -> None:
        """Take this round as the one that all others are like, if it went well on every rank."""
        values = tail.tolist()
        assert self._static is not None, "asked for"
        if self._exchange.went_well(values):
            self._static.learn(self._round.seen, values[: len(self.params)])
            self._arrangement.narrow(self._round.seen.copy(), self._static.unused)

    def _end_round(self, tail: torch.Tensor) -> None:
        """Take from a round what is to hold for all later ones; ``tail`` is what the ranks said."""
        self._forget_kept()
        self._round.forwards = 0
        if not self._arrangement.is_settled:
            self._arrangement.settle(self._exchange.agree_on_order())
        if self._static is not None and self._static.counts is None:
            self._learn_graph(tail)

    def count_anew(self) -> None:
        """Count backwards from here on: before a ``Join``, ranks may have kept different numbers."""
        self._round.kept = self._round.forwards = 0

    def _forget_kept(self) -> None:
        self._kept[:] = bytes(len(self._kept))
        self._round.kept = 0

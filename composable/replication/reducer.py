"""The reducer, which averages full buckets.

A *round* is one backward that synchronises. In it every rank starts the all-reduce of every
bucket exactly once and in the same order: a bucket is started when its own gradients are
there and the bucket before it was started; the buckets that are left start when backward
ends. So ranks whose gradients arrive in different orders, or not at all, never wait for each
other in vain. The last bucket ends with flags and complaints.

The whole ``param.grad`` is averaged. So gradients that backwards without synchronisation left
there need no bookkeeping, and neither do gradients that were averaged before: they are equal
on all ranks, and a second average does not change them.

Source: PyTorch Distributed, arXiv 2006.15704.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from composable.comm import Grid, Transport
from composable.dtensor import note_finished, note_unfinished
from composable.engine import Listeners, Registration, Stepper, check_backward, nearest, refuse_steppers
from composable.errors import UsageError
from composable.ground.modes import unseen
from composable.ground.names import list_text
from composable.ground.torch_hooks import at_end_of_backward, hooks_have_run, next_ending_number
from composable.ground.torch_private import opaque
from composable.replication.buckets import Bucket
from composable.replication.exchange import BucketExchange
from composable.replication.managed import ReducedParam, grad_dtype_of, is_kept_gradient, mark_kept
from composable.replication.options import ReplicateArguments
from composable.replication.outside_buckets import traced_arrival, why_untraceable
from composable.replication.reports import STOPPED
from composable.replication.rounds import Phase, Round, Stopwatch

_OPEN = Phase.OPEN


def _arrival(owner: "Reducer", index: int) -> Callable[[torch.Tensor], None]:
    # The hook runs once per parameter and backward: values that it reads often are local variables here. It holds
    # the reducer weakly: Python's collector does not see that a parameter holds its hooks.
    own_round, find_reducer = owner.round, weakref.ref(owner)
    seen, order = own_round.seen, own_round.order

    @partial(opaque, traced=traced_arrival(find_reducer, owner.params[index].fqn))
    def arrive(param: torch.Tensor) -> None:
        reducer = find_reducer()
        if reducer is None:
            return  # The module is gone, and only the parameter lives on.
        if own_round.phase is not _OPEN:
            reducer._open()
        if seen[index]:
            _arrive_again(reducer, index, param)
            return
        seen[index] = 1
        order.append(index)
        bucket = reducer._bucket_of[index]
        bucket.pending -= 1
        if not bucket.pending:
            reducer._launch_full(arrived=param)

    return arrive


def _arrive_again(reducer: "Reducer", index: int, param: torch.Tensor) -> None:
    """Accept another gradient of a parameter in one backward; ``UsageError`` if the first was sent."""
    reducer.round.seen[index] += 1
    bucket, static = reducer._bucket_of[index], reducer.exchange.static
    if reducer.round.synchronises and bucket.index() < reducer.round.sent:
        what = "a parameter got a second gradient in one backward, after the first was sent to the other ranks"
        fix = "use activation checkpointing with use_reentrant=False, or pass static_graph=True"
        if static is not None:
            what = "a parameter got more gradients than in the first backward, which static_graph=True rules out"
            fix = "drop the gradients of this step, and use the same parameters in every step"
        raise UsageError(what, at=f"parameter {reducer.params[index].fqn!r}", fix=fix)
    if static is not None and static.is_promised(index, reducer.round.seen[index]):
        bucket.pending -= 1
        if not bucket.pending:
            reducer._launch_full(arrived=param)


class BucketSteps:
    """Steps of optimizers inside backward: of the parameters of a bucket, as soon as these have their averages."""

    def __init__(self, params: Sequence[ReducedParam], own_round: Round, steppers: Sequence[Stepper]) -> None:
        self._params = params
        self._round = own_round
        self.steppers = tuple(steppers)

    def step_sent(self, exchange: BucketExchange) -> None:
        """Step and free the buckets before the last one that was sent, as far as their averages come in time.

        Another rank may get other gradients first, and wait for this rank at another place of its backward, such as a
        sharded module. So every wait here has a limit, and the end of backward steps the buckets that are left.
        """
        while self._round.stepped < self._round.sent - 1:
            bucket = exchange.arrangement.buckets[self._round.stepped]
            if bucket.has_split and not bucket.flat.is_cuda:
                return  # Such a step may be collective, and how many buckets come in time differs between ranks.
            if not exchange.finish_first():
                return
            self._step(bucket)

    def step_rest(self, exchange: BucketExchange, used: Sequence[float] | None) -> None:
        """Step the buckets that are left, which ``exchange`` has averaged, and free them.

        ``used`` has for each parameter the number of ranks that had a gradient; ``None``: all had one.
        """
        for bucket in exchange.arrangement.buckets[self._round.stepped :]:
            for index, view in zip(bucket.param_indices, bucket.views, strict=True):
                param = self._params[index].param
                if used is not None and used[index] == 0:
                    continue
                if grad_dtype_of(param) is view.dtype:
                    param.grad = view
                elif param.grad is None:
                    param.grad = view.to(grad_dtype_of(param))
            self._step(bucket)

    def _step(self, bucket: Bucket) -> None:
        if bucket.casts:
            bucket.unpack()
        params = [self._params[index].param for index in bucket.param_indices]
        complete = [param for param in params if param.grad is not None]
        # Counted first: after an exception the next bucket follows, since the other ranks step all buckets.
        self._round.stepped += 1
        for step in self.steppers:
            step(complete)
        bucket.release()


class Reducer:
    """Runs the rounds of a set of parameters, over the ranks of one transport, with the settings of users.

    Args:
        params: In ``named_parameters()`` order, equal on all ranks.
        transport: Between these ranks; used for nothing else, since its calls must keep their order.
        grid: These ranks.
        options: The options of the user.
    """

    def __init__(
        self, params: Sequence[ReducedParam], transport: Transport, grid: Grid, options: ReplicateArguments
    ) -> None:
        self.number = next_ending_number()  # Its place in the order of all objects that end a backward.
        self.params = tuple(params)
        self.options = options
        self.requires_gradient_sync = True  # Whether the next backward is a round; if not, gradients stay local.
        self.is_last_backward = True  # If false, the next backward is no round either.
        # The ``requires_gradient_sync`` after the ``no_sync`` that runs; ``None``: none runs.
        self.sync_after_context: bool | None = None
        self.round = Round([0] * len(params))  # The running backward, or the last one.
        self.rounds = 0  # How many backwards there were, the running one included.
        # Registrations of communication hooks that reach the parameters; the nearest one is used.
        self.comm_hooks: tuple[Registration, ...] = ()
        self.stopwatch = Stopwatch(grid.everyone.device)  # Measures some backwards.
        self.listeners = Listeners()  # Hear of each event.
        # Functions that step parameters inside backward, as soon as these have their averages.
        self.steppers: tuple[Stepper, ...] = ()
        self._steps: BucketSteps | None = None
        self._lock = threading.RLock()
        self._is_closed = False
        self._kept = bytearray(len(params))  # 1: a gradient came since the last round, without synchronisation.
        self._connect(transport, grid)

    def _connect(self, transport: Transport, grid: Grid) -> None:
        """Create the attributes that depend on the ranks, as they are before the first backward."""
        self._grid = grid
        # Averages buckets over the ranks.
        self.exchange = BucketExchange(
            self.params, transport, grid, self.options, self.round, self.stopwatch, self.listeners
        )
        # The buckets in order of reduction; the list is changed in place.
        self.buckets: Sequence[Bucket] = self.exchange.arrangement.buckets
        self._bucket_of = self.exchange.arrangement.bucket_of  # changed in place

    @property
    def synchronises(self) -> bool:
        """The next backward averages gradients."""
        return self.requires_gradient_sync and self.is_last_backward

    @property
    def described(self) -> str:
        """The parameters, for messages."""
        return f"replicate of {list_text([item.fqn for item in self.params], 3)}"

    @property
    def _is_alone(self) -> bool:
        """Gradients of this rank alone are what users want: they let each rank step for good, or there is one rank."""
        is_off = not self.requires_gradient_sync and self.sync_after_context is None
        return is_off or self.exchange.transport.world_size == 1

    def check_averaged(self, what: str) -> None:
        """Refuse the call ``what``, which uses gradients inside a backward, before the backward has averaged them."""
        # A communication hook, or who steps parameters in backward, knows when gradients are there.
        if self.round.phase is _OPEN and not (self._is_alone or self.steppers or self.exchange.hook is not None):
            raise UsageError(
                f"{what} inside backward, with gradients of this rank that are not averaged yet",
                at=self.described,
                fix="step_in_backward(optimizer) in place of the hook that steps; or step after backward",
            )

    @property
    def waiting(self) -> list[torch.Tensor]:
        """Parameters [any] whose gradient is this rank's own; none if users let each rank step on its own for good."""
        averages = self.round.phase is _OPEN and self.round.synchronises
        if averages or self._is_alone:
            return []
        return [
            item.param
            for item, kept in zip(self.params, self._kept, strict=True)
            if kept and is_kept_gradient(item.param.grad, self.exchange.transport)
        ]

    sharded = waiting

    @property
    def keeps_gradients(self) -> bool:
        """A ``no_sync`` runs, or gradients wait for a backward that averages."""
        by = self.exchange.transport
        kept = (is_kept_gradient(one.param.grad, by) for one, kept in zip(self.params, self._kept, strict=True) if kept)
        return self.sync_after_context is not None or any(kept)

    # What forward and backward call, in this order

    def prepare(self) -> None:
        """Recover before a forward, if an exception stopped the last backward.

        Collective if that backward had started an all-reduce: ranks that wait for the other buckets get them.
        """
        # Only a message that was cut short, such as a broadcast of buffers, can be in flight.
        self.exchange.transport.settle()
        # This is not called inside a backward: so one that has not ended was stopped.
        if self.round.phase is not Phase.AT_REST:
            self._recover()
        if self.round.kept and all(item.param.grad is None for item in self.params):
            self._forget_kept()  # The user has dropped the gradients.

    def arm(self, module_index: int) -> None:
        """Note that the gradient of an output of an annotated module arrives."""
        if self.params:  # If there are none, annotations below average everything.
            if self.round.phase is not _OPEN:
                self._open()
            self.round.arm(module_index, self.params)

    def follow(self) -> None:
        """Take part in the running backward, which all ranks run, also if no gradient arrives here."""
        if self.params:
            if self.round.phase is not _OPEN:
                self._open()
            self.round.follow()

    def end_kept(self) -> None:
        """Average, at the end of the running backward, gradients that some rank kept without synchronisation."""
        if self.params and self.round.phase is not _OPEN:
            self._open()
            self.round.ends_kept = True

    def arrivals(self) -> Iterator[Callable[[torch.Tensor], None]]:
        """Yield a hook for each parameter, called with it, of any shape, once ``grad`` has this backward's gradient."""
        return (_arrival(self, index) for index in range(len(self.params)))

    @unseen
    def _open(self) -> None:
        """Begin a backward."""
        with self._lock:
            if self.round.phase is _OPEN:
                return  # Another device's thread was first.
            if self._is_closed:
                raise UsageError(
                    "this backward belongs to a forward that ran before the model's annotation was removed",
                    fix="run backward before unannotate, or run forward again after it",
                )
            if self.round.phase is Phase.STOPPED:
                self._recover()
            if self.steppers:
                check_backward(self.params[0].fqn)
            if self.steppers or self._steps is not None:
                self._use_steppers()
            for hear in self.listeners.backward_begins:
                hear(averages=self.synchronises)
            self.exchange.begin(synchronises=self.synchronises)
            self.rounds += 1
            self.round.open(at_end_of_backward(self))
            self.stopwatch.begin(self.rounds)
            if not self.exchange.notes.is_off:
                self.exchange.notes.begin(self.buckets, self.rounds)

    @unseen
    def _launch_full(self, *_: object, arrived: torch.Tensor | None = None) -> None:
        # Also a hook of a node, where an exception has cut its registration short.
        buckets, own_round = self.buckets, self.round
        if not own_round.synchronises or own_round.is_led:
            # The gradients of several modules may come in another order on each rank.
            return
        if arrived is not None and not hooks_have_run(arrived, self._launch_full):
            return  # Hooks of users may still write to the gradient, or replace it.
        with self._lock, torch.no_grad():
            while own_round.sent < len(buckets) and not buckets[own_round.sent].pending:
                self._launch(buckets[own_round.sent])
                if self._steps is not None:
                    # One bucket is on its way while the next one fills.
                    self._steps.step_sent(self.exchange)

    def _launch(self, bucket: Bucket) -> None:
        for hear in self.listeners.reduction_begins:
            hear(self, self.round.sent)
        self.exchange.launch(bucket)

    def start(self) -> None:
        """End a backward: start the reduction of the buckets that are left."""
        own_round = self.round
        if self.stopwatch.is_on:
            self.stopwatch.mark("computed")
        is_due = own_round.is_due()
        averages = is_due and own_round.synchronises
        for hear in self.listeners.backward_ends:
            hear(averages=averages, ends=averages)
        if is_due and not own_round.synchronises:
            for index in own_round.order:
                self._kept[index] = 1
                mark_kept(self.params[index].param.grad)
            note_unfinished([self], is_droppable=True)
            own_round.kept += 1
        if not averages:
            own_round.phase = Phase.AT_REST
            return
        if (static := self.exchange.static) is not None:
            own_round.complaint = None if own_round.ends_kept else static.complaint_of(own_round.seen)
        elif not (own_round.is_complete or self.options.find_unused_parameters or own_round.is_led):
            own_round.complaint = own_round.complaint_of(self.params, self._kept)
        with torch.no_grad():
            for bucket in self.buckets[own_round.sent :]:
                self._launch(bucket)

    def finish(self) -> None:
        """Wait for the averages; ``UsageError`` if, on this or another rank, parameters got no gradient."""
        if self.round.phase is not Phase.AT_REST:
            for hear in self.listeners.gradients_come:
                hear()
            self.end_round()

    @torch.no_grad()
    def end_round(self, *, learns: bool = True) -> None:
        """Wait for all buckets, and give every parameter its average; raise the error of the round, if there is one.

        ``learns``: it is the round of a backward: the first one shows the order and the counts of gradients of all
        later ones, and some are measured. Collective.
        """
        report, used = self.exchange.wait()
        self._forget_kept()
        if learns:
            self._learn()
        if self._steps is not None:
            self._steps.step_rest(self.exchange, used)
        if self.stopwatch.is_on and learns:
            self.stopwatch.end()
        self.round.phase = Phase.AT_REST
        self.exchange.raise_failures(report)

    def _learn(self) -> None:
        """Keep the order and the counts of the first round for all later ones."""
        exchange, arrangement = self.exchange, self.exchange.arrangement
        if arrangement.order is None:
            arrangement.order, arrangement.is_due = exchange.agree_on_order(), True
        if (static := exchange.static) is not None and static.counts is None and not self.round.ends_kept:
            arrangement.is_due |= static.learn(self.round.seen, exchange.flag_block.report(exchange.flags))

    def _forget_kept(self) -> None:
        if any(self._kept):
            self._kept[:] = bytes(len(self._kept))
            note_finished([self])
        self.round.count_anew()

    # A backward that an exception stopped

    def _recover(self) -> None:
        """Complete the round of a backward that was stopped, so that no rank waits for this one.

        The gradients in the buckets become zero: after a round that was stopped they are of no
        use, and the user may have set them to zero while they were on their way.
        """
        self.exchange.transport.settle()
        # `order` alone is not enough: if ranks use different parameters, it differs though all were stopped alike.
        if self.round.synchronises and (self.round.accumulates or self.round.order):
            self.round.complaint = STOPPED
            for hear in self.listeners.step_forgotten:
                hear(was_unfinished=True)
            self.complete()
        else:
            self.round.kept += not self.round.synchronises
            self.exchange.forget()
            self.round.phase = Phase.AT_REST

    @torch.no_grad()
    def complete(self) -> None:
        """Send zeros for the buckets that were not sent, for which ranks wait, and wait for all sums. Collective."""
        self.exchange.send_zeros()
        self.exchange.finish()
        self.exchange.sparse.average(self.exchange.scale, is_stopped=True)
        if self._steps is None:
            for bucket in self.buckets:
                bucket.clear()
        self._forget_kept()
        self._learn()
        self.exchange.forget()
        self.round.phase = Phase.AT_REST
        if self._steps is not None:
            # The other ranks step too, before or after they hear of the stop: otherwise parameters would differ.
            self._steps.step_rest(self.exchange, self.exchange.flag_block.values(self.exchange.flags))

    # Settings that users change between two backwards

    @property
    def untraceable(self) -> str:
        """Why a graph of compiled autograd cannot average the gradients; "": it can."""
        return why_untraceable(self)

    def check_comm_hooks(self, registrations: Sequence[Registration]) -> Registration | None:
        """Return the nearest of ``registrations``; ``ConfigError``: none is, ``UsageError``: steps in backward."""
        if registrations and self.steppers and self.params:
            refuse_steppers(self.steppers, self.params[0].fqn)
        return nearest(registrations)

    def register_comm_hooks(self, registrations: Sequence[Registration]) -> None:
        """Let the nearest of ``registrations`` reduce every bucket, unless ``check_comm_hooks`` raises."""
        self.exchange.hook = self.check_comm_hooks(registrations)
        self.comm_hooks = tuple(registrations)

    def step_by(self, steppers: Sequence[Stepper]) -> None:
        """Let ``steppers`` step the parameters, from the next backward on."""
        self.steppers = tuple(steppers)
        if self.round.phase is Phase.AT_REST:  # Otherwise the next forward ends what was stopped, as it began.
            self._use_steppers()

    def _use_steppers(self) -> None:
        if self.steppers != (() if self._steps is None else self._steps.steppers):
            self._steps = BucketSteps(self.params, self.round, self.steppers) if self.steppers else None
            self.exchange.arrangement.step(bool(self.steppers))

    # Other ranks, the end

    def move_to(self, transport: Transport, grid: Grid) -> None:
        """Communicate with other ranks from now on, and forget a backward that was stopped; no backward is running.

        Hooks stay; the order of gradients is learned anew. Gradients get memory of their own.
        """
        hook = self.exchange.hook
        self.exchange.arrangement.dissolve()
        self.round.reset()
        self._forget_kept()
        self._connect(transport, grid)
        self.exchange.hook = hook
        self._steps = None
        self._use_steppers()

    @torch.no_grad()
    def average_kept_gradients(self) -> None:
        """Average gradients that backwards without synchronisation left, if any rank has some. Collective."""
        if not self.params:
            return
        self.prepare()
        self._use_steppers()
        if any(self._grid.everyone.objects(any(self._kept))):
            self.exchange.begin(synchronises=True)
            self.round.is_led = True  # Ranks may have kept different numbers.
            for bucket in self.buckets:
                self.exchange.launch(bucket)
            self.end_round(learns=False)
        self._forget_kept()

    def close(self) -> None:
        """Average gradients that were kept without synchronisation, give all memory of their own, free the buckets.

        Collective. No backward is running; a later backward of a forward that ran before is an error.
        """
        self.average_kept_gradients()
        self.exchange.arrangement.dissolve()
        self.comm_hooks = ()
        self._is_closed = True

    # On a rank that has run out of inputs: it sends zeros in the rounds of other ranks, by `exchange.send_zeros`

    def put_aside(self) -> Callable[[], None]:
        """Return a function that restores the present gradients: until then rounds of other ranks leave averages."""
        grads = [item.param.grad for item in self.params]
        copies, kept = [None if grad is None else grad.clone() for grad in grads], bytes(self._kept)

        def put_back() -> None:
            self._kept[:] = kept
            for item, grad in zip(self.params, copies, strict=True):
                item.param.grad = grad

        return put_back

    def begin_idle(self) -> None:
        """Begin a round of other ranks, which have gradients."""
        for item in self.params:
            item.param.grad = None
        self.exchange.begin(synchronises=True)
        self.rounds += 1
        self.round.kept, self.round.forwards = -1, 0
        self.stopwatch.stop()

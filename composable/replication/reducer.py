"""What is chosen for, and asked of, the averaging of some parameters' gradients; how it is copied, moved and closed."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from composable.comm import Grid, Transport
from composable.engine import Registration, Stepper, nearest, refuse_steppers
from composable.errors import UsageError, place_of_rank
from composable.replication.averaging import GradientAverager
from composable.replication.buckets import Bucket
from composable.replication.rounds import Phase, StaticGraph
from composable.replication.tensors import ReducedParam, check_steppable

__all__ = ["Reducer"]


class Reducer(GradientAverager):
    """Averages the gradients of a set of parameters over the ranks of one transport."""

    @property
    def next_buckets(self) -> Sequence[Bucket]:
        """The buckets, or what they will be in the first backward."""
        return self.exchange.arrangement.next_buckets()

    @property
    def arrival_order(self) -> list[int] | None:
        """The parameters in the order that the buckets of the next backward follow; ``None``: not known yet."""
        return self.exchange.arrangement.order

    @property
    def is_rebuilt(self) -> bool:
        """The buckets follow the order of arrival."""
        return self.exchange.arrangement.is_rebuilt

    @property
    def hook(self) -> Registration | None:
        """The communication hook that holds."""
        return self.exchange.hook

    @property
    def untraceable(self) -> str:
        """Why a graph of compiled autograd cannot average the gradients; "": it can."""
        if self.exchange.hook is not None:
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

    def check_comm_hooks(self, registrations: Sequence[Registration]) -> Registration | None:
        """Return the nearest of ``registrations``.

        Raises:
            ConfigError: None of them is the nearest.
            UsageError: An optimizer steps inside backward.
        """
        if registrations and self.steppers and self.params:
            refuse_steppers(self.steppers, self.params[0].fqn)
        return nearest(registrations)

    def register_comm_hooks(self, registrations: Sequence[Registration]) -> None:
        """Let the nearest of ``registrations`` reduce every bucket; no backward is running.

        Raises:
            ConfigError: See ``check_comm_hooks``.
            UsageError: See ``check_comm_hooks``.
        """
        self.exchange.hook = self.check_comm_hooks(registrations)
        self.comm_hooks = tuple(registrations)

    def step_by(self, steppers: Sequence[Stepper]) -> None:
        """Let these step the parameters, from the next backward on.

        Raises:
            ConfigError: See ``check_steppable``.
        """
        if steppers:
            check_steppable(self.params)
        self.steppers = tuple(steppers)
        self.exchange.arrangement.is_lazy = bool(steppers)
        for bucket in self.buckets:
            bucket.release()  # Gradients in it keep their memory, and are copied.

    # A life: copies, other ranks, the end.

    def copied(self, params: Sequence[ReducedParam], transport: Transport, memo: dict[int, Any]) -> "Reducer":
        """Return a reducer of copied parameters: the same options, order and hook, and buckets of its own.

        Args:
            params: Copies of this one's, in the same order.
            transport: For the copy alone.
            memo: Of the running ``copy.deepcopy``.

        Raises:
            UsageError: A backward is running.
        """
        if self.round.phase is Phase.OPEN:
            raise UsageError(
                "a replicated module cannot be copied inside a backward",
                at=place_of_rank(),
                fix="copy it before or after",
            )
        twin = Reducer(params, transport, self._grid, self.options, self._after_backward)
        syncs, after = self.requires_gradient_sync, self.sync_after_context
        twin.requires_gradient_sync = syncs if after is None else after
        twin.is_last_backward = self.is_last_backward
        twin._kept[:] = self._kept
        twin.comm_hooks = tuple(copy.deepcopy(one, memo) for one in self.comm_hooks)
        twin.exchange.hook = copy.deepcopy(self.exchange.hook, memo)
        twin.exchange.arrangement.expect_like(self.exchange.arrangement)
        if self._static is not None:
            twin._static = StaticGraph(self._static.counts, self._static.used, self._static.unused)
        return twin

    def move_to(self, transport: Transport, grid: Grid) -> None:
        """Talk to other ranks from now on, and forget what a backward that was stopped has left; none is running.

        Collective. Hooks stay; so does the order of gradients, if these ranks know the same one. Gradients get memory
        of their own.
        """
        before, hook = self.exchange.arrangement, self.exchange.hook
        before.dissolve()
        self.round.reset()
        self._missing = None
        self.forget_kept()
        self._connect(transport, grid)
        self.exchange.hook = hook
        self.exchange.arrangement.is_lazy = bool(self.steppers)
        is_known = grid.everyone.are_alike(before.expectation)
        if is_known:
            self.exchange.arrangement.expect_like(before)
        if self._static is not None:
            # How many ranks used a parameter is not known of these.
            self._static = StaticGraph(self._static.counts, [], self._static.unused) if is_known else StaticGraph()

    @torch.no_grad()
    def average_kept_gradients(self) -> None:
        """Average what backwards without synchronisation left, if they did on any rank. Collective."""
        if not self.params:
            return
        self.prepare()
        is_any = any(self.share(any(self._kept)))
        if is_any:
            self.exchange.arrangement.prepare()
            self.round.clear(self.buckets, synchronises=True)
            self.round.is_led = True  # Ranks may have kept different numbers.
            for bucket in self.buckets:
                self.exchange.launch(bucket)
            _, used = self.exchange.wait()
            if self.steppers:
                self._step_rest(used)
        self.forget_kept()
        self.exchange.raise_failure()

    def close(self) -> None:
        """Average what backwards without synchronisation left, give every gradient memory of its own, free the buckets.

        Collective. No backward is running; one that comes later, of a forward that ran before, is an error.
        """
        self.average_kept_gradients()
        self.exchange.arrangement.dissolve()
        self.comm_hooks = ()
        self._is_closed = True

    # Ranks that run out of inputs.

    def share(self, number: float) -> list[float]:
        """Return the number of each rank, in the order of the transport. Collective; no backward is running."""
        return self.exchange.share(number)

    def divide_by(self, divisor: int | None) -> None:
        """Divide sums of gradients by this in place of the number of ranks; ``None``: by that again."""
        self.exchange.scale = 1.0 / (divisor or self._grid.divisor)

    def expect(self, running: Sequence[int] | None) -> None:
        """Expect gradients of these ranks only, as the transport has them; ``None``: of all."""
        self.exchange.running = running

    def count_anew(self) -> None:
        """Count backwards from here on: before a ``Join``, ranks may have kept different numbers."""
        self.round.kept = self.round.forwards = 0

    def put_aside(self) -> Callable[[], None]:
        """Return what puts the gradients of now back: until then rounds of other ranks leave their averages here."""
        grads = [item.param.grad for item in self.params]
        copies, kept = [None if grad is None else grad.clone() for grad in grads], bytes(self._kept)

        def put_back() -> None:
            self._kept[:] = kept
            for item, grad in zip(self.params, copies, strict=True):
                item.param.grad = grad

        return put_back

    @torch.no_grad()
    def begin_shadow(self) -> None:
        """Do what a backward begins with."""
        for item in self.params:
            item.param.grad = None
        self.exchange.arrangement.prepare()
        self.round.clear(self.buckets, synchronises=True)
        self.round.kept, self.round.forwards = -1, 0
        self.rounds += 1

    @torch.no_grad()
    def send_shadow(self) -> None:
        """Send zeros for the next bucket. Collective."""
        self.exchange.send_zeros(1)

    def recover_shadow(self) -> None:
        """Do what the others do about a round that was stopped there, if one has begun. Collective."""
        self._complete_stopped()

    def end_shadow(self) -> None:
        """Wait for the averages. Collective.

        Raises:
            UsageError: Of another rank.
        """
        self._conclude([], self._finish_round())

"""The end of reductions: ranks compare, and parameters get their gradients.

``passes.py`` and ``scheduler.py`` decide when reductions begin and end. Autograd's order says when a handle may be
reduced early. Only all ranks together can find gradients that came later, and parameters that got no gradient on any
rank. So each rank sends a small message to all, in host memory, without waiting for kernels. See docs/inside/notes.md.

Users may change how gradients are reduced at any time, and the choices have to be equal on all ranks. So the message
has a digest of them; where digests differ, the ranks send each other the choices as text. Ranks with other blocks of
tensor parallelism get the message too: their gradients are other ones, but they have to raise the same errors.
"""

import hashlib
import itertools
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import torch

from composable.comm import DONE, ModelRanks, Pending, Transport
from composable.dtensor import note_finished, note_unfinished
from composable.engine.events import Listeners, Work
from composable.engine.gradients import GradientBuffer, GradientShape
from composable.engine.handle import GradientLedger, Handle, HandleStep, tell_loads
from composable.engine.paths import Reduction
from composable.engine.riders import Rider, Riders
from composable.engine.unsharded import Streams
from composable.errors import ComposableError, ConfigError, DesyncError, UsageError, located, place_of_rank, warn_once
from composable.ground.names import ranks_text
from composable.ground.ownership import CHANGES
from composable.ground.torch_private import autograd_profiler


class GradientFinalizer:
    """Takes gradients from the leaves of one root and gives them, reduced, to the sharded parameters.

    Attributes:
        agreements: The message of each group of ranks, which compares gradients and choices.
        is_deferred: Backwards have ended, but not their reductions; a later backward or the user ends these.
        failure: What went wrong on this rank; it still took part in every collective.
    """

    def __init__(
        self, steps: Mapping[Handle, HandleStep], streams: Streams, listeners: Listeners, agreements: "list[Agreement]"
    ) -> None:
        self.agreements = agreements
        self.failure: ComposableError | None = None
        self.streams = streams
        self._listeners = listeners
        self._steps = steps
        self.is_deferred = False
        self._is_settled = True
        # Each with the ledger that gets the result, and the gradient buffer that it reads.
        self._under_way: deque[tuple[Reduction, GradientLedger, GradientBuffer | None]] = deque()
        # Gradient buffers of this backward that wait to be filled again.
        self._free: dict[GradientShape, list[GradientBuffer]] = {}

    def defer(self, *, waits: bool) -> None:
        """Note whether reductions wait for a later backward or the user."""
        if waits is not self.is_deferred:
            (note_unfinished if waits else note_finished)(self._steps)
            self.is_deferred = waits

    # Reductions

    def take(self, ledger: GradientLedger, max_buffers: int) -> GradientBuffer | None:
        """Move the gradients of the leaves into a buffer; ``None`` where there are no elements to reduce.

        Waits for reductions until at most ``max_buffers`` gradient buffers are alive, this one included.
        """
        flat = ledger.flat
        gradients = flat.gradients
        if flat.is_empty:
            ledger.grad_mask |= gradients.bits()
            gradients.drop()
            ledger.take(flat.shard.new_empty(0))
            return None
        while len(self._under_way) >= max_buffers:
            self._finish_first()
        free = self._free.get(gradients.shape)
        if free:
            gradient = free.pop()
        else:
            # Unused buffers of other shapes go, so that modules of many shapes take no more memory than equal ones.
            self._free.clear()
            gradient = gradients.make_buffer()
        try:
            ledger.grad_mask |= gradients.take(gradient)
        except UsageError as error:
            # The other ranks are about to reduce: they get zeros, and get the error at the end of backward.
            gradients.drop()
            gradients.take(gradient)
            self.failure = self.failure or error
        return gradient

    def begin(self, ledger: GradientLedger, gradient: GradientBuffer | None) -> None:
        """Start to reduce a buffer of ``take``; ``None``: shards that wait for their all-reduce. Collective."""
        flat = ledger.flat
        routes, to_host, handle = flat.routes, flat.home.is_elsewhere, ledger.handle
        if self._listeners.work or autograd_profiler._is_profiler_enabled:
            begin, path = self.streams.begin_reduction, routes.gradient_path
            reduction = self._listeners.during(Work.REDUCE, handle, handle.fqn, begin, path, gradient, to_host=to_host)
        elif gradient is not None and not self.streams.queues:
            reduction = routes.gradient_path.begin(gradient.source)
        else:
            reduction = self.streams.begin_reduction(routes.gradient_path, gradient, to_host=to_host)
        self._under_way.append((reduction, ledger, gradient))
        if routes.failure is not None:
            # The user's function gave a wrong result, but ran its collectives: the step goes on.
            failure, routes.failure = routes.failure, None
            try:
                with located(handle.described):
                    raise failure
            except ConfigError as error:
                self.failure = self.failure or error

    def reduce(self, ledger: GradientLedger, max_buffers: int) -> None:
        """Start to reduce the gradients of the leaves, zeros for leaves without one; see ``take``. Collective."""
        gradient = self.take(ledger, max_buffers)
        if gradient is not None:
            self.begin(ledger, gradient)

    def _finish_first(self) -> None:
        reduction, ledger, gradient = self._under_way.popleft()
        if self._listeners.work or autograd_profiler._is_profiler_enabled:
            shard = self._listeners.during(Work.WAIT_FOR_REDUCE, ledger.handle, ledger.handle.fqn, reduction)
        else:
            shard = reduction()
        if gradient is not None:
            self._free.setdefault(gradient.shape, []).append(gradient)
        if shard is not None:
            ledger.take(shard, holds=bool(self.agreements and self.agreements[-1].riders.adjusting))

    # The end of a backward, or of several

    def open(self) -> None:
        """Begin a backward, and forget the ledgers of one whose end a user's hook or Ctrl-C cut short."""
        if not self._is_settled:
            for step in self._steps.values():
                for ledger in step.ledgers:
                    ledger.clear()
        self._is_settled = False
        for agreement in self.agreements:
            for order in agreement.inner_orders:
                order.take_digest()

    def postpone(self) -> None:
        """Leave the end to a later backward, or to the user: the ledgers keep their state."""
        self._is_settled = True

    def tell(self, *, ends: bool) -> None:
        """Note gradients that are left on leaves; if this ends all reductions, start messages to the other ranks."""
        is_synced, goes_on = self.is_deferred, False
        for handle, step in self._steps.items():
            if not handle.requires_gradient_sync:
                for ledger in step.ledgers:
                    ledger.flat.gradients.keep()
            elif ends:
                is_synced = True
                for ledger in step.ledgers:
                    ledger.has_more = False
                    for param in ledger.flat.params:  # Inline: there is none, unless more has come.
                        if param.unsharded is not None and param.unsharded.grad is not None:
                            ledger.has_more = True
                    if ledger.has_more:
                        ledger.grad_mask |= ledger.flat.gradients.bits()
                    goes_on |= ledger.has_more or (ledger.flat.routes.kept.total is not None and _is_due(ledger))
            else:
                self.defer(waits=True)
        if ends and is_synced:
            for agreement in self.agreements:
                agreement.begin(has_failed=self.failure is not None, goes_on=goes_on)

    def end(self, tidy: Callable[[], None]) -> None:
        """Reduce the gradients that are left on any rank, and give each to its sharded parameter.

        ``tidy`` is called when all reductions have ended, before parameters get their gradients. Raises ``UsageError``
        if a gradient could not be reduced, on this rank or on one whose message says so.
        """
        self._is_settled = False
        with torch.no_grad():
            while self._under_way:
                self._finish_first()
            complaining, again, heard = [], [], None
            for agreement in self.agreements:
                if agreement.finish():
                    complaining.append(agreement)
                if agreement.goes_on:
                    again.append(agreement)
                if agreement.is_told:
                    heard = heard or agreement.hear()
            self._reduce_the_rest()
            self._free.clear()
            failure: Exception | None = self.failure
            self.failure = None
            # If some rank had more to reduce, a second message says whether that failed.
            for agreement in again:
                agreement.begin(has_failed=failure is not None, is_second=True)
            for agreement in again:
                if agreement.finish():
                    complaining.append(agreement)
            tidy()
            for rider in self.agreements[-1].riders.adjusting if self.agreements else ():
                for handle, step in self._steps.items():
                    for reduced, _ in itertools.chain(*(ledger.waiting for ledger in step.ledgers)):
                        rider.adjust(reduced, handle.grid.divisor)
            if was_deferred := self.is_deferred:
                self.defer(waits=False)
            self._settle(was_deferred=was_deferred)
        # In each group, also after an error in another one: its ranks wait for this rank.
        for agreement in self.agreements if complaining else ():
            if agreement in complaining:
                try:
                    agreement.raise_together(failure)
                except Exception as error:
                    failure = failure or error
        failure = failure or heard
        if failure is not None:
            raise failure

    def _reduce_the_rest(self) -> None:
        for handle, step in self._steps.items():
            for ledger in step.ledgers:
                if not ledger.has_more:
                    if ledger.flat.routes.kept.total is not None and _is_due(ledger):
                        self.begin(ledger, None)
                    continue
                ledger.has_more = False
                if ledger.flat.gradients.steppers:
                    # What has been stepped cannot take another part of its gradient.
                    self.failure = self.failure or stepped_already(handle)
                    ledger.flat.gradients.drop()
                else:
                    self.reduce(ledger, handle.settings.gradient_buffers)
        while self._under_way:
            self._finish_first()

    def _settle(self, *, was_deferred: bool) -> None:
        """Give parameters the gradients that waited for the other ranks; hooks of users run."""
        for step in self._steps.values():
            waits = step.is_waiting
            for ledger in step.ledgers:
                kept = ledger.flat.routes.kept
                if ledger.waiting or kept.bits or kept.total is not None:
                    ledger.finish()
                ledger.grad_mask = 0
                gradients = ledger.flat.gradients
                if kept.total is not None or (was_deferred and gradients.is_kept):
                    # Once more, if it was done: the ``grad`` that they wait beside may be another tensor now.
                    gradients.keep()
                waits |= gradients.is_kept or kept.total is not None
            if waits:
                self._note_waiting(step)
        self._is_settled = True

    def _note_waiting(self, step: HandleStep) -> None:
        """Note for users whether gradients wait for a later backward, or for an all-reduce over copies."""
        if any(flat.gradients.is_waiting for flat in step.handle.buffers):
            note_unfinished([step.handle], is_droppable=True)
            step.is_waiting = True
        elif step.is_waiting:
            note_finished([step.handle])
            step.is_waiting = False

    # Recovery

    def abandon(self) -> None:
        """Wait for all reductions and messages that were started, and forget them."""
        for agreement in self.agreements:
            agreement.abandon()
        while self._under_way:
            self._under_way[0][0]()
            self._under_way.popleft()
        self._free.clear()
        self.failure = None

    def give_up(self) -> None:
        """Forget all reductions that were started; their transports have given up."""
        self._under_way.clear()

    def forget_kept(self) -> None:
        """Forget shards that wait for an all-reduce over copies: some may hold part of a backward only."""
        for step in self._steps.values():
            for flat in step.handle.buffers:
                flat.routes.kept.clear()
            self._note_waiting(step)

    def transports(self) -> set[Transport]:
        """Return the transports of the ranks' messages."""
        return {agreement.transport for agreement in self.agreements}


def _is_due(ledger: GradientLedger) -> bool:
    """Say whether shards that earlier backwards left are to be summed up over copies now."""
    return not ledger.flat.routes.kept.defers and ledger.handle.requires_gradient_sync


def stepped_already(handle: Handle) -> UsageError:
    """Return the error for a gradient that grew after an optimizer in backward had stepped on it."""
    return UsageError(
        "an optimizer in backward has stepped, and then more of the same gradient arrived",
        at=handle.described,
        fix="use parameters in the forward of their own module, run one backward per forward, or step after backward",
    )


_DIGEST_BYTES = 8
# Of flags, modes of modules and steps of optimizers.
_FIRST_BYTES = 3
# In place of modes where this rank has run no module, as one that never had inputs; a prime.
_UNKNOWN = 251
# Flags in the first byte of a message.
_HAS_FAILED = 1
_GOES_ON = 2
_WHAT = "the ranks reduce gradients in different ways, so those of the last backward are wrong"
_FIX = "call the set_... methods and freeze parameters alike on every rank, drop the gradients, and run backward again"
_OTHER_STEPS = (
    "optimizers of {} have made other steps since the last backward than those of other ranks, so that pieces of "
    "parameters are now of different steps"
)
_OTHER_MODES = "modules of {} were not in the mode, training or evaluation, that they were in on other ranks"
_ONE_MODE = "call train() and eval() alike on every rank, before the forward"
_ONE_STEP = "call optimizer.step() on every rank, or on none, as GradScaler does; then load a checkpoint"
_OTHER_ORDER = "the ranks gather or reduce modules in different orders, so the numbers of this step are mixed up"
_ONE_ORDER = (
    "run the same modules in the same order on every rank, recomputation included: keep a branch that depends on the "
    "rank outside of activation checkpointing; then drop the gradients and load a checkpoint"
)


def chosen_text(handle: Handle) -> str:
    """Return the user's choices for reductions as text, equal on all ranks; empty: as annotated."""
    fills = handle.settings.fills_unused
    unused = f"reduce-scatter unused params {fills}" if fills != (handle.plan.unused_gradients == "zero") else ""
    # As of the last gather: ranks that look at other times see the same.
    faces = [(param, param.sharded if param.unsharded is None else param.unsharded) for param in handle.params]
    names = [repr(handle.from_root(param.fqn)) for param, face in faces if not face.requires_grad]
    frozen = f"frozen {', '.join(names)}" if names else ""
    return ", ".join(filter(None, [handle.comms.compared_text(), unused, frozen]))


class HandleChoices:
    """The choices of users for some handles that have to be equal on all ranks, in an order equal on all ranks."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = tuple(handles)
        self._known, self._digest = -1, b""

    def digest(self) -> bytes:
        """Return a digest of a few bytes, which differs where the choices differ."""
        if self._known != CHANGES.choices:
            self._known = CHANGES.choices
            self._digest = hashlib.blake2b(self.text().encode(), digest_size=_DIGEST_BYTES).digest()
        return self._digest

    def text(self) -> str:
        """Return the choices, a line for each handle, without classes of modules, which may differ between ranks."""
        return "\n".join(f"{handle.fqn}: {handle.loads:g} {chosen_text(handle)}" for handle in self._handles)

    def shown(self) -> str:
        """Return the choices for an error on all ranks, a line for each handle, and then the loads of each."""
        lines = [f"{handle.described}: {chosen_text(handle) or 'as annotated'}" for handle in self._handles]
        return "\n".join(lines + tell_loads(self._handles))


class Agreement:
    """The message between ranks that share handles. Making one is collective if there are ranks with other blocks.

    Args:
        ranks: The ranks that share the handles, and the ranks with other blocks.
        transport: Between all these ranks, for tensors on the CPU; this takes a key of it.
        ledgers: Ledgers of all flat buffers, in an order equal on all ranks.
        handles: The handles that the ranks share.

    Attributes:
        ranks: All these ranks.
        riders: What others let travel with the message.
        is_told: They have told what is to be heard.
        goes_on: Some rank had more to reduce when it sent its message.
        inner_orders: Digests that a backward begins anew: groups may have run different numbers of forwards.
    """

    def __init__(
        self, ranks: ModelRanks, transport: Transport, ledgers: Sequence[GradientLedger], handles: Sequence[Handle]
    ) -> None:
        self.ranks = ranks.everyone
        self._column = ranks.column
        self._choices = HandleChoices(handles)
        self._handles = tuple(handles)
        self._forget_steps()
        # Where ranks match collectives by their order alone, the order is compared too: equal sizes would mix.
        ways = dict.fromkeys(way for ledger in ledgers for way in ledger.flat.routes.transports())
        self._orders = {way.order: way.world_size for way in ways if way.world_size > 1}
        self.inner_orders = [order for order, size in self._orders.items() if size < self.ranks.size]
        self._differs = self.goes_on = self.is_told = False
        self.transport = transport
        self._key = transport.allocate_key()
        self._ledgers = tuple(ledgers)
        # Flags, modes and steps, then the digest and the ledgers.
        length = _FIRST_BYTES + _DIGEST_BYTES + sum(ledger.message_bytes for ledger in ledgers)
        if ranks.others:
            # Ranks with other blocks may have another number of buffers.
            length = max(self.ranks.objects(length))
        self._length = length
        self._pending: Pending | None = None
        self.carry(())

    def carry(self, riders: Sequence[Rider]) -> None:
        """Let ``riders``, in place of those so far, travel behind the message, from the next one on. On all ranks."""
        self.riders = Riders(riders, self.ranks.numbers)
        length = self._length + self.riders.rank_bytes
        self._mine, self._every = bytearray(length), bytearray(length * self.ranks.size)
        # Tensors on the same memory. If made in inference mode, they could never be written outside of it.
        with torch.inference_mode(mode=False):
            self._sent = torch.frombuffer(self._mine, dtype=torch.uint8)
            self._received = torch.frombuffer(self._every, dtype=torch.uint8)

    def begin(self, *, has_failed: bool, goes_on: bool = False, is_second: bool = False) -> None:
        """Start the message: whether this rank has failed, and whether it has more to reduce. Collective.

        ``is_second``: it follows another one of this backward, to which riders have told their numbers.
        """
        self.is_told = bool(self.riders.members) and self.transport.carries_values and not is_second
        if self.is_told:
            self.riders.tell(self._sent[self._length :])
        elif self.ranks.is_alone and self.transport.carries_values:
            return
        modes, steps, has_run = 0, 0, False
        for handle in self._handles:
            modes, steps = (2 * modes + (handle.trains is not False)) % _UNKNOWN, steps + handle.stepped.steps
            has_run |= handle.trains is not None
        first = bytes([_HAS_FAILED * has_failed | _GOES_ON * goes_on, modes if has_run else _UNKNOWN, steps % _UNKNOWN])
        # A sum, since the order of groups differs between ranks.
        mixed = sum((order.take_digest() for order in self._orders), int.from_bytes(self._choices.digest(), "big"))
        digest = (mixed % 2 ** (8 * _DIGEST_BYTES)).to_bytes(_DIGEST_BYTES, "big")
        told = first + digest + b"".join([ledger.encode() for ledger in self._ledgers])
        self._mine[: len(told)] = told
        if not self.transport.carries_values:
            # Ranks that are not there have no order of their own: a rehearsal finds other orders, with lines.
            start = len(first) + _DIGEST_BYTES
            every = self.ranks.exchange(bytes(self._mine[start:]), "gradients")
            self._every[:] = b"".join(self._mine[:start] + one for one in every)
            self._pending = DONE
            return
        self._pending = self.transport.begin_all_gather(self._received, self._sent, self._key)

    def finish(self) -> bool:
        """Merge the ledgers of all ranks into those of this rank; return whether any rank complains."""
        pending, self._pending = self._pending, None
        if pending is None:
            self.goes_on = False
            return False
        pending.finish()
        length, every = self._length, self._every
        if self.riders.members:
            whole = len(self._mine)
            every = bytearray().join([every[start : start + length] for start in range(0, len(every), whole)])
        first = every[:length]
        if every == first * self.ranks.size:
            # All messages are equal: there is nothing to merge.
            self.goes_on = bool(first[0] & _GOES_ON)
            return bool(first[0] & _HAS_FAILED)
        told = [bytes(every[start : start + length]) for start in range(0, len(every), length)]
        start = _FIRST_BYTES + _DIGEST_BYTES
        self._differs = any(one[2:start] != told[0][2:start] for one in told)
        if others := self._others(told, 1):
            at = f"{place_of_rank()}, {self._handles[0].described}"
            warn_once(f"{_OTHER_MODES.format(others)}\n  at:  {at}\n  fix: {_ONE_MODE}")
        self._stepped = self._others(told, 2)
        self.goes_on = any(one[0] & _GOES_ON for one in told)
        # As whole numbers: to look at each ledger of each rank would take as long as the ranks are many.
        merged = 0
        for index in self._column:
            merged |= int.from_bytes(told[index], "little")
        found = merged.to_bytes(length, "little")
        for ledger in self._ledgers:
            stop = start + ledger.message_bytes
            ledger.decode(found[start:stop])
            start = stop
        return self._differs or any(one[0] & _HAS_FAILED for one in told)

    def hear(self) -> ComposableError | None:
        """Let riders hear what all ranks have told, after ``finish``; returns an error to raise, alike on all ranks."""
        self.is_told = False
        return self.riders.hear(self._received.view(self.ranks.size, -1)[:, self._length :])

    def abandon(self) -> None:
        """Wait for a message that was begun, and forget it."""
        self.transport.settle()
        self._pending, self.is_told = None, False

    def _forget_steps(self) -> None:
        """Count steps anew: ranks that have come back have made other ones."""
        for handle in self._handles:
            handle.stepped.steps = 0

    def raise_together(self, failure: Exception | None) -> None:
        """Raise the failure of any rank on all of them. Collective, after ``finish`` has said that there is one.

        It is a ``DesyncError`` if they reduce gradients in different ways, or started collectives in other orders.
        """
        if not self._differs:
            self.ranks.compare("", failure, call="a backward")
            return
        self._differs = False
        if self._stepped:
            self._forget_steps()
        shown = self._choices.shown
        self.ranks.compare(self._choices.text(), failure, shown=shown, what=_WHAT, fix=_FIX, call="a backward")
        if self._stepped:
            raise DesyncError(_OTHER_STEPS.format(self._stepped), fix=_ONE_STEP)
        raise DesyncError(_OTHER_ORDER, fix=_ONE_ORDER)

    def _others(self, told: Sequence[bytes], index: int) -> str:
        """Name the ranks whose messages have another byte there than most; empty: all have the same."""
        said = [one[index] for one in told]
        known = Counter(one for one in said if one != _UNKNOWN)
        if len(known) < 2:
            return ""
        ((most, _),) = known.most_common(1)
        return ranks_text([rank for rank, one in zip(self.ranks.numbers, said) if one not in (most, _UNKNOWN)])

"""The handle, which owns one module's parameters.

A handle has one flat buffer per (dtype, requires_grad) class of its parameters. It knows
its own state; the scheduler decides when each call is made.

The clock of a step counts starts and ends of forwards of fully sharded modules; backwards have numbers. Parameters are
bits of a number: bit ``i`` is the i-th of the buffer.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from composable.comm import LOADED, Grid, Pending
from composable.dtensor import note_finished
from composable.engine.buffer import FREED, FlatBuffer, SecondaryShards
from composable.engine.gradients import GRADIENT_BUFFERS
from composable.engine.param import Faces, Lent, ParamView, ShardedParam
from composable.engine.routes import DEFAULT_COMMS, Comms, Registration, nearest
from composable.engine.stepping import Stepper, refuse_steppers
from composable.errors import UsageError, located
from composable.ground.frames import (
    in_backward,
    is_part_of_module,
    is_running,
    modules_of_copy,
    reaches_out,
    will_get_gradient,
)
from composable.ground.names import join_fqn, module_text
from composable.ground.ownership import CHANGES, HeldWeakly
from composable.ground.torch_private import conversion_codes, set_versions
from composable.planning import HandlePlan

FIX_COPY = "deep-copy the whole model, {names} or a module around it, in one call"


class _Managed:
    """The mark of a handle on its parameters, sharded and unsharded; copies of a parameter have none."""

    __slots__ = ("handle",)

    def __init__(self, handle: "Handle") -> None:
        self.handle = weakref.ref(handle)

    def renew_piece(self, older: torch.Tensor, piece: torch.Tensor) -> None:
        """Note that ``piece`` [local_shape] is now the tensor object of the memory that ``older`` had."""
        handle = self.handle()
        for param in () if handle is None else handle.params:
            if param.shown is older:
                param.local, param.shown = piece if param.local is older else param.local, piece

    def refuse_swap(self, param: torch.Tensor) -> None:
        """Raise ``UsageError`` where a user's ``swap_tensors`` gets ``param``, of any shape."""
        handle = self.handle()
        if handle is not None and not any(map(is_running, (*conversion_codes, ShardedParam.show.__code__))):
            raise UsageError(
                "torch.utils.swap_tensors would exchange a sharded parameter for another tensor, and its handle and "
                "optimizer would not follow",
                at=handle.described,
                fix="exchange values: p.data, q.data = q.data, p.data; or, under torch.no_grad(), p.copy_(values)",
            )

    def __deepcopy__(self, memo: dict[Any, Any]) -> None:
        handle = self.handle()
        if handle is None or id(handle) in memo or not is_part_of_module(memo):
            return
        modules = modules_of_copy(memo)
        if not all(module in modules for module in handle.modules):
            # The copy would have parameters that no handle gathers.
            raise reaches_out("copied", handle.modules, FIX_COPY)


def refuse_waiting_copies(what: str, handle: "Handle") -> None:
    """Raise ``UsageError`` for an action that cannot run while gradients wait for an all-reduce over copies."""
    if any(flat.gradients.awaits_copies for flat in handle.buffers):
        raise UsageError(
            f"{what} while gradients wait for the all-reduce that set_requires_all_reduce(False) left out",
            at=handle.described,
            fix="call set_requires_all_reduce(True), then run a backward or reduce_gradients()",
        )


def handle_of(param: torch.Tensor) -> "Handle | None":
    """Return the handle that manages a parameter of any shape, sharded or unsharded."""
    mark = getattr(param, "_composable_managed", None)
    return None if mark is None else mark.handle()


@dataclass(slots=True)
class HandleSettings:
    """The settings of users for one handle.

    Attributes:
        reshard_option: As the user gave it; ``None``: free between forward and backward unless root; an int: free
            all but secondary shards over that many ranks.
        reshard_after_forward: Free the parameters after forward; set from the option when the root is known.
        reshard_after_backward: Free them after backward; else in the next forward, if a rank has written its shard.
        unshard_in_backward: Gather before backward. If not, a backward that needs a parameter raises.
        keeps_storage: The buffers' memory stays allocated while the parameters are sharded.
        fills_unused: A parameter that no rank used in a module that ran gets a gradient of zeros.
        gradient_buffers: How many gradient buffers of the root may be alive when the handle needs one.
        forward_prefetch: Handles to unshard after this one in forward, or ``None``: as recorded.
        backward_prefetch: Handles to unshard after this one in backward, or ``None``: as recorded.
    """

    reshard_option: bool | int | None
    fills_unused: bool
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keeps_storage: bool = False
    gradient_buffers: int = GRADIENT_BUFFERS
    forward_prefetch: "tuple[weakref.ref[Handle], ...] | None" = None
    backward_prefetch: "tuple[weakref.ref[Handle], ...] | None" = None

    @property
    def keeps_secondary(self) -> bool:
        """A forward that a backward may follow leaves secondary shards."""
        return type(self.reshard_option) is int


@dataclass(slots=True)
class Versions:
    """The versions of a handle's parameters. Each write adds to that of its shard, alike on all ranks.

    Attributes:
        gathered: Sum over the shards whose values the unsharded parameters have; the leaves have this version.
        written: Sum over the shards as the last gather began: another one since then is a write that it has missed.
        discount: By how much the shards' own versions are higher than both, for writes that have changed no value.
    """

    gathered: int = 0
    written: int = 0
    discount: int = 0


class StepCount:
    """Steps of optimizers with parameters of a handle, as often as ranks of its root have made them together."""

    steps = 0


class Handle:
    """The parameters that are unsharded and resharded together. ``HandleStep`` has their state in a step.

    Attributes:
        plan: Layout and options, decided before any buffer was made.
        module_fqns: Names of the fully sharded modules from the root; set when the root is known.
        modules: The fully sharded module, or several that share the handle.
        grid: The ranks that share the parameters, and those that hold copies of their shards.
        faces: The places in modules that hold the parameters.
        view: State of the unsharded parameters.
        held_with: Options of the context that shows full parameters to the user; ``reshard`` has to wait.
        lent: How that context shows the parameters, if forward and backward cannot use them.
        secondary: The secondary shards; ``None``: none are planned.
        versions: Of the shards, now and when they were gathered.
        settings: Settings of users.
        requires_gradient_sync: Reduce gradients at the end of this handle's backward.
        sync_after_context: What ``requires_gradient_sync`` is after the ``no_sync`` that runs; ``None``: none runs.
        gathers: Gathers of an unshard that has not ended, also of one that was cut short; ``None``: none was started.
        has_parts: On some rank of the root, modules lie on a part of its ranks; set when the root is known.
        is_shared: Two roots have run it, and its memory stays.
        comms: The user's choices for how bytes travel.
        comm_hooks: Registrations of communication hooks that reach the handle; the nearest holds.
        loads: How often ``load_state_dict`` has filled the shards; minus infinity once ranks may load alone.
        trains: The module was in training mode in its last differentiable call; ``None``: there was none.
        stepped: Counts the steps of optimizers, which hold it alone and not the handle.
    """

    modules = HeldWeakly[nn.Module]()

    def __init__(
        self, plan: HandlePlan, modules: Sequence[nn.Module], buffers: Sequence[FlatBuffer], grid: Grid
    ) -> None:
        self.plan = plan
        self.grid = grid
        self.module_fqns = tuple(plan.module_fqns)
        self.modules = modules
        self.buffers = tuple(buffers)
        self.settings = HandleSettings(plan.reshard_after_forward, plan.unused_gradients == "zero")
        self.requires_gradient_sync = True
        self.sync_after_context: bool | None = None
        self.has_parts = False
        self.is_shared = False
        self.comms = DEFAULT_COMMS
        self.comm_hooks: tuple[Registration, ...] = ()
        self.loads = 0.0
        self.trains: bool | None = None
        self.stepped = StepCount()
        self.start_sharded()

    def start_sharded(self) -> None:
        """Set the state of a handle that was not unsharded yet."""
        self.view = ParamView.SHARDED
        self.held_with: object | None = None
        self.lent: Lent | None = None
        self.versions = Versions()
        self.gathers: list[Pending] | None = None
        self.secondary: SecondaryShards | None = None
        if self.plan.secondary_ranks is not None:
            self.secondary = SecondaryShards(self.buffers)
        mark = _Managed(self)
        for param in self.params:
            for face in (param.sharded, param.unsharded):
                if face is not None:
                    face._composable_managed = mark  # type: ignore[attr-defined]  # read by handle_of
        self.faces = Faces(self.params)

    # Names

    @property
    def fqn(self) -> str:
        """Name of the (first) fully sharded module from the root."""
        return self.module_fqns[0]

    @property
    def described(self) -> str:
        """Name of the (first) module in messages."""
        return module_text(self.fqn, self.plan.class_names[0])

    def from_root(self, fqn: str) -> str:
        """Return the name from the root for a name below the handle's modules, such as ``ShardedParam.fqn``."""
        if len(self.module_fqns) == 1:
            return join_fqn(self.fqn, fqn)
        position, _, name = fqn.partition(".")
        return join_fqn(self.module_fqns[int(position)], name)

    @property
    def params(self) -> list[ShardedParam]:
        """Every parameter of the handle, buffer by buffer."""
        return [param for flat in self.buffers for param in flat.params]

    @property
    def _fqns(self) -> list[str]:
        """FQNs of the parameters below the module; with several modules, after the position of the module."""
        return [param.fqn for param in self.params]

    @property
    def sharded(self) -> list[torch.Tensor]:
        """Every sharded parameter, ragged and of its full shape."""
        return [param.sharded for param in self.params]

    @property
    def waiting(self) -> list[torch.Tensor]:
        """The sharded parameters, of full shape, with a gradient that waits to be reduced with later ones."""
        return [param.sharded for param in self.params if param.waits]

    def close(self) -> None:
        """Let go of modules and shards for good. Nothing is left to gather: unsharding does nothing from now on."""
        self.modules = ()
        self.buffers = ()
        self.comm_hooks = ()
        self.start_sharded()
        self.view = ParamView.UNSHARDED

    # Choices of users

    def communicate_by(self, comms: Comms) -> None:
        """Let bytes travel as the user chose, from the next collective on. Every rank alike."""
        self.comms = comms
        CHANGES.note("choices")
        for flat in self.buffers:
            flat.routes.communicate_by(comms)

    def note_load(self) -> None:
        """Count a load into the shards, which ranks compare: each rank alone fills only its own piece."""
        self.loads += 1
        CHANGES.note("choices")

    def register_comm_hooks(self, registrations: Sequence[Registration]) -> None:
        """Let the nearest of ``registrations`` reduce the gradients. Every rank alike.

        Raises:
            ConfigError: No registration is the nearest.
            UsageError: The handle has another way to reduce, or an optimizer steps inside backward.
        """
        comms = self.check_comm_hooks(registrations)
        self.comm_hooks = tuple(registrations)
        self.communicate_by(comms)

    def check_comm_hooks(self, registrations: Sequence[Registration]) -> Comms:
        """Return the choices that ``register_comm_hooks`` would make; raises its errors."""
        with located(self.described):
            if registrations:
                refuse_steppers(self.steppers, self.from_root(self.params[0].fqn))
            return replace(self.comms, hook=nearest(registrations))

    @property
    def steppers(self) -> tuple[Stepper, ...]:
        """Functions that step the parameters inside backward."""
        return self.buffers[0].gradients.steppers if self.buffers else ()

    @property
    def is_unsynced(self) -> bool:
        """The last backward that reached the parameters did not reduce their gradients, on any rank."""
        return any(flat.gradients.is_unsynced for flat in self.buffers)

    @property
    def keeps_gradients(self) -> bool:
        """A ``no_sync`` runs, or gradients wait for a later backward, or for an all-reduce over copies."""
        return self.sync_after_context is not None or any(flat.gradients.is_waiting for flat in self.buffers)

    @property
    def synchronises(self) -> bool:
        """The next backward ends with whole gradients, by the settings of this handle."""
        return self.requires_gradient_sync and not any(flat.routes.kept.defers for flat in self.buffers)

    def step_by(self, steppers: Sequence[Stepper]) -> None:
        """Let ``steppers`` step the parameters, from the next backward on."""
        for flat in self.buffers:
            flat.gradients.step_by(steppers)

    @property
    def rests_elsewhere(self) -> bool:
        """Some shard rests in other memory than its buffer: on the host."""
        return any(flat.home.is_elsewhere for flat in self.buffers)

    # In use, and free

    @property
    def is_unsharded(self) -> bool:
        """The unsharded parameters are complete, whether modules hold them or not."""
        return self.view in (ParamView.UNSHARDED, ParamView.HIDDEN)

    def begin_unshard(self) -> None:
        """Start filling the buffers; the shards are usable.

        Collective: all ranks of the shard group, same order; of the smaller group if secondary shards are the source.
        """
        if self.gathers is not None:
            self.settle()
        self.gathers = gathers = []
        secondary = self.secondary if self.secondary is not None and self.secondary.are_source else None
        version, is_kept = -self.versions.discount, False
        for flat in self.buffers:
            is_kept |= flat.is_allocated
            version += flat.shard._version  # Versions grow alike on all ranks.
            if flat.is_empty:
                flat.allocated()  # Its unsharded parameters, without elements: it is never gathered.
            elif secondary is not None:
                gathers.append(secondary.begin(flat))
            else:
                gathers.append(flat.begin_unshard())
        self.versions.written = version
        version = version if secondary is None else secondary.version
        if is_kept and version != self.versions.gathered:
            for flat in self.buffers:  # The memory was kept for an earlier graph, and gets other values.
                set_versions(flat.versioned, (FREED,) * len(flat.versioned))
        self.versions.gathered = version
        self.view = ParamView.GATHERING

    def discount_writes(self) -> None:
        """Note that writes since the last gather, on all ranks, did not change the values."""
        self.versions.discount = sum(flat.shard._version for flat in self.buffers) - self.versions.gathered

    def forgive_idle_writes(self) -> None:
        """Take operations in place on the unsharded parameters as no writes, if no rank finds another value.

        Collective in a forward with such operations: all ranks that share the parameters.
        """
        # Which ranks call a module that lies on a part of them, each rank decides by itself.
        if self.view is not ParamView.UNSHARDED or self.held_with is not None or self.has_parts:
            return
        for flat in self.buffers:
            is_risen = bool(flat.versioned) and flat.versioned[0]._version != self.versions.gathered
            # In backward, a checkpoint runs a forward again, whose writes were looked for.
            if is_risen and (in_backward() or not any(self.grid.everyone.any_of([not flat.is_unwritten()]))):
                set_versions(flat.versioned, (self.versions.gathered,))

    def finish_gathers(self) -> None:
        """Wait for the all-gathers: the thread on CPU, the current stream on CUDA."""
        for gather in self.gathers or ():
            gather.finish()

    def settle(self) -> None:
        """Wait for all collectives of this handle, also those started by a call that an exception cut short."""
        for flat in self.buffers:
            flat.routes.settle()

    def show(self, refuse: Callable[["Handle"], None]) -> bool:
        """Make the modules hold the unsharded parameters, or call ``refuse``; the gathers have finished.

        Returns whether the shards were written to since then, and nothing was done.
        """
        if self.gathers is not None:
            written = -self.versions.discount - self.versions.written
            for flat in self.buffers:  # Inline: this runs for each gather.
                written += flat.shard._version
            if written:
                self.versions.written += written  # Told once: what ends the forward may show them, too.
                return True
        self.faces.show_unsharded(refuse, self)
        if self.gathers is not None:
            version = (self.versions.gathered,)
            for flat in self.buffers:
                if flat.versioned:
                    set_versions(flat.versioned, version)
            if self.secondary is not None and self.secondary.are_source:
                self.secondary.drop()  # Each serves one gather.
        # Set last: if an exception cuts this short, the next call does it all again.
        self.view = ParamView.UNSHARDED
        self.gathers = None
        return False

    def reshard(self, *, frees: bool = True) -> None:
        """Make the modules hold the sharded parameters and free the buffers, or leave that to ``free_buffers``."""
        if self.gathers is not None:
            # The gathers may still write to the memory: they were not waited for, or were cut short.
            self.settle()
        # Set first: a handle that is cut short from here on is unsharded and resharded again.
        self.view = ParamView.SHARDED
        self.gathers = None
        self.faces.show_sharded()
        if frees and not (self.is_shared or self.settings.keeps_storage):
            for flat in self.buffers:  # Inline, as ``free_buffers``: this runs twice in a step.
                flat.free_buffer()

    def hide(self) -> None:
        """Make the modules hold the sharded parameters, and keep the unsharded ones; ``show`` undoes it."""
        if self.view is ParamView.UNSHARDED and self.held_with is None:
            # Set first: if this is cut short, the next unshard shows every parameter again.
            self.view = ParamView.HIDDEN
            self.faces.show_sharded()

    def free_buffers(self) -> None:
        """Free the memory of the buffers, while the modules hold the sharded parameters, unless it is to stay."""
        if not (self.is_shared or self.settings.keeps_storage):
            for flat in self.buffers:
                flat.free_buffer()

    def drop_secondary(self) -> None:
        """Free secondary shards, if there are any: a step is over, and later ones never read them."""
        if self.secondary is not None:
            self.secondary.drop()

    def is_fresh(self) -> bool:
        """Say whether unsharded parameters still have the values of this rank's shards."""
        return all(flat.is_fresh() for flat in self.buffers)

    def __repr__(self) -> str:
        return f"Handle({self.fqn!r}, {len(self.params)} parameters)"


def tell_loads(handles: Iterable[Handle]) -> list[str]:
    """Return a line for each handle about its loads, for an error on all ranks; after it loads count anew."""
    lines = []
    for handle in handles:
        lines.append(f"{handle.described}: {LOADED}: {handle.loads:g}")
        handle.loads = min(handle.loads, 0.0)
    CHANGES.note("choices")
    return lines


def written_after_gather(handle: Handle) -> UsageError:
    """Return the error of shards that were written after they had been gathered for this forward."""
    return UsageError(
        "sharded parameters were written to during a forward that had gathered them before, and would not see it",
        at=handle.described,
        fix="write between two steps, or in a buffer",
    )


def is_outdated(handle: Handle) -> bool:
    """Say whether unsharded parameters have other values than the shards, as all ranks know by versions."""
    return sum(flat.shard._version for flat in handle.buffers) - handle.versions.discount != handle.versions.gathered


class GradientLedger:
    """The record of one flat buffer in one backward: parameters with a gradient, and parameters that got a reduced one.

    A parameter with a gradient on this rank gets the reduced one as soon as it is there. For a parameter without one
    the other ranks decide, so it waits for the end of backward. All parameters of a buffer wait if one has hooks, which
    run once, on the whole gradient; or if the ranks have to step them together.

    Attributes:
        grad_mask: Bits of parameters that had a gradient on this rank, in this backward or since the last reduction.
        has_more: Some leaf holds a gradient that was not reduced.
        is_unfrozen: No backward has met the buffer frozen. The first one reduces it, in case other ranks have not.
        waiting: Reduced shards [S] that some parameters have not got, each with the bits of those that have.
        message_bytes: How many bytes the ledger takes in a message, the same on all ranks.
    """

    __slots__ = ("flat", "grad_mask", "handle", "has_more", "is_unfrozen", "message_bytes", "waiting")

    def __init__(self, handle: Handle, flat: FlatBuffer) -> None:
        self.handle = handle
        self.flat = flat
        self.grad_mask = 0
        self.has_more = False
        self.is_unfrozen = flat.is_trainable
        self.waiting: list[tuple[torch.Tensor, int]] = []
        self.message_bytes = len(flat.params) // 8 + 1

    def clear(self) -> None:
        """Forget a backward that was cut short, also by a hook of the user in ``finish``."""
        self.grad_mask = 0
        self.has_more = False
        self.waiting = []

    def take(self, reduced: torch.Tensor, *, holds: bool = False) -> None:
        """Give a reduced shard [S] to the parameters that are known to get it, or ``holds`` it until ``finish``."""
        gradients = self.flat.gradients
        given = 0
        if gradients.hooks_known != CHANGES.hooks:
            gradients.look_for_hooks()
        if not (gradients.steps_together or gradients.has_hooks or holds):
            given = self.grad_mask | self.flat.routes.kept.bits
            if given and not gradients.steppers:
                gradients.accumulate(reduced, given)
            elif given:
                self._give(reduced, given)
        if given != gradients.all_bits:
            self.waiting.append((reduced, given))

    def finish(self) -> None:
        """End the backward: give the rest to parameters with a gradient on any rank, or (``fills_unused``) to all."""
        kept = self.flat.routes.kept
        mask = self.grad_mask | kept.bits
        kept.bits = 0 if kept.total is None else mask
        if not self.waiting:
            return
        rest, self.waiting = self.waiting, []
        if self.handle.settings.fills_unused:
            mask |= sum(1 << number for number, one in enumerate(self.flat.params) if one.sharded.requires_grad)
        whole = [reduced for reduced, given in rest if not given]
        if len(whole) > 1:
            # No parameter has got a part of these yet: hooks run once, on the sum.
            for reduced in whole[1:]:
                whole[0].add_(reduced)
            rest = [(whole[0], 0), *(one for one in rest if one[1])]
        for reduced, given in rest:
            left = mask & ~given
            if left:
                self._give(reduced, left, with_hooks=not given and self.flat.gradients.has_hooks)

    def _give(self, reduced: torch.Tensor, bits: int, *, with_hooks: bool = False) -> None:
        if self.flat.gradients.steppers:
            # Gradients that waited for the ranks with copies are whole now, and are stepped.
            note_finished([self.handle])
        self.flat.gradients.accumulate(reduced, bits, with_hooks=with_hooks)

    def encode(self) -> bytes:
        """Return the ledger as bytes of the message to the other ranks."""
        return (self.grad_mask << 1 | self.has_more).to_bytes(self.message_bytes, "little")

    def decode(self, message: bytes) -> None:
        """Take the ledger that ``encode`` has written, or several of them joined by a bitwise OR."""
        found = int.from_bytes(message, "little")
        self.grad_mask = found >> 1
        self.has_more = bool(found & 1)


class HandleStep:
    """The state of one handle in a step.

    Attributes:
        is_armed: A differentiable forward has run since the last backward: the next backward reduces the handle.
        first_forward: Clock at the start of the first such forward; 0: before all others.
        last_forward: Clock at the end of the handle's last differentiable call in the forward that armed it.
        armed_at: Clock at the start of the forward that armed it.
        entered_at: Clock at the start of a forward that has not ended; -1: there is none.
        queued_in: Number of the last backward that has or had to complete the handle.
        met_in: Number of the last backward that gathered the handle, as an output's gradient arrived or should have.
        completed_in: Number of the last backward that completed the handle: reduced its gradients, or kept them.
        modules_left: Of several modules that share the handle, the ids of those still to run in this forward.
        next_forward: The handle (as below, not its step: no cycles) that ran next in the latest forward, for prefetch.
        previous_forward: The handle that ran before it in the latest forward, also a hint.
        next_backward: The handle that came next in the latest backward, also a hint.
        checksum: Number of the last forward that compares values, the version of the parameters, and their sum before.
        output: Gives a hook of the outputs of its calls; ``None`` once all graphs with these outputs are gone.
        is_waiting: It is noted for users that gradients wait for a later backward, or an all-reduce over copies.
        leaders: Handles that it is gathered, resharded and reduced with, whether its own modules run or not.
        followers: Handles that are gathered, resharded and reduced with it.
    """

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.ledgers = [GradientLedger(handle, flat) for flat in handle.buffers]
        self.modules_left: set[int] = set()
        self.is_waiting = any(flat.gradients.is_waiting for flat in handle.buffers)  # on a copy
        self.checksum = (0, 0), 0
        self.output: Callable[[], object] = object
        self.leaders: tuple[Handle, ...] = ()
        self.followers: tuple[HandleStep, ...] = ()
        self.forget()

    def is_reached(self) -> bool:
        """Say whether the running backward leads to parameters of the handle, or may do so through frozen ones."""
        leaves = [leaf for param in self.handle.params if (leaf := param.unsharded) is not None]
        return any(will_get_gradient(leaf) for leaf in leaves if leaf.requires_grad)

    def forget(self) -> None:
        """Reset the state: another root has run the handle meanwhile."""
        # -1 is the number of no backward: their numbers start at 1.
        self.completed_in = self.met_in = self.queued_in = -1
        self.forget_order()
        self.end_step()

    def forget_order(self) -> None:
        """Forget the hints for prefetch."""
        self.next_forward: Handle | None = None
        self.previous_forward: Handle | None = None
        self.next_backward: Handle | None = None

    def end_step(self) -> None:
        """Forget a step that was cut short; the hints stay."""
        self.is_armed = False
        self.first_forward = self.last_forward = self.armed_at = 0
        self.entered_at = -1
        self.modules_left.clear()
        for ledger in self.ledgers:
            ledger.clear()

"""A handle owns the parameters of one fully sharded module: unshard, reshard, reduce.

A handle has one flat buffer per (dtype, requires_grad) class of its parameters. It knows
its own state; the scheduler decides when each call is made.
"""

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from composable.comm import Grid, Pending
from composable.engine.buffer import AccumulatedGradients, FlatBuffer, ParamLabel
from composable.engine.gradients import GRADIENT_BUFFERS, Stepper, refuse_steppers
from composable.engine.param import Faces, Lent, Misplaced, ParamView, ShardedParam
from composable.engine.secondary import Filling, SecondaryShards
from composable.engine.user_comms import DEFAULT_COMMS, Comms, Registration, copied_registrations, nearest
from composable.errors import UsageError, located, place_of_rank
from composable.ground.frames import is_functional_call, is_part_of_module, modules_of_copy, reaches_out
from composable.ground.names import join_fqn, module_text
from composable.ground.ownership import CHANGES
from composable.planning import HandlePlan, mark_replaced

__all__ = ["FIX_COPY", "Handle", "HandleSettings", "handle_of", "waits_for_copies", "written_too_early"]


FIX_COPY = "deep-copy {names} or a module around, in one call"
_LOADED = "_composable_loaded"  # On a parameter that a load has assigned; set in ownership.py.


class _Managed:
    """The mark of a handle on its parameters, sharded and unsharded; copies of a parameter have none.

    Attributes:
        key: Tells the parameters of deep copies, which share their layouts, apart; equal on all ranks.
    """

    __slots__ = ("handle", "key")

    def __init__(self, handle: "Handle") -> None:
        self.handle = weakref.ref(handle)
        self.key = handle.copy_key

    def __deepcopy__(self, memo: dict[Any, Any]) -> None:
        handle = self.handle()
        if handle is None or not is_part_of_module(memo):
            return
        modules = modules_of_copy(memo)
        if not all(module in modules for module in handle.modules):
            # A module that would be left with parameters that nothing gathers.
            raise reaches_out("copied", handle.modules, FIX_COPY)


def waits_for_copies(what: str, described: str) -> UsageError:
    """Return the error of what is done while gradients wait for an all-reduce over copies."""
    return UsageError(
        f"{what} while gradients wait for the all-reduce that set_requires_all_reduce(False) left out",
        at=f"{place_of_rank()}, {described}",
        fix="call set_requires_all_reduce(True), then run a backward or reduce_gradients()",
    )


def handle_of(param: torch.Tensor) -> "Handle | None":
    """Return the handle that manages a parameter of any shape, either face of it."""
    mark = getattr(param, "_composable_managed", None)
    return None if mark is None else mark.handle()


@dataclass(slots=True)
class HandleSettings:
    """What users set of one handle.

    Attributes:
        reshard_option: What the user asked for; ``None``: free between forward and backward unless root; an int: free
            all but secondary shards over as many ranks.
        reshard_after_forward: What that means now that the root is known.
        reshard_after_backward: Free them after backward; else once a forward finds that a rank has written its shard.
        unshard_in_backward: Gather before backward. If not, forward lets nothing of the parameters be saved for it.
        keeps_storage: The buffers' memory stays allocated while the parameters are sharded.
        scatters_apart: Reduce-scatters have a process group of their own.
        fills_unused: A parameter that no rank used in a module that ran gets a gradient of zeros.
        gradient_buffers: How many gradient buffers of the root may be alive when the handle needs one.
        forward_prefetch: Handles to unshard after this one in forward, or ``None``: as recorded.
        backward_prefetch: The same for backward.
    """

    reshard_option: bool | int | None
    fills_unused: bool
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    keeps_storage: bool = False
    scatters_apart: bool = False
    gradient_buffers: int = GRADIENT_BUFFERS
    forward_prefetch: "tuple[Handle, ...] | None" = None
    backward_prefetch: "tuple[Handle, ...] | None" = None

    @property
    def keeps_secondary(self) -> bool:
        """A forward that a backward may follow leaves secondary shards."""
        return type(self.reshard_option) is int

    def text(self, plan: HandlePlan) -> str:
        """Return what decides when ranks communicate and is not as planned; empty: nothing."""
        chosen = {
            f"reshard after forward {self.reshard_option}": self.reshard_option != plan.reshard_after_forward,
            "reshard after backward off": not self.reshard_after_backward,
            "unshard in backward off": not self.unshard_in_backward,
            "a reduce-scatter group of its own": self.scatters_apart,
            "forward prefetch by hand": self.forward_prefetch is not None,
            "backward prefetch by hand": self.backward_prefetch is not None,
        }
        return ", ".join(text for text, is_set in chosen.items() if is_set)


class Handle:
    """The parameters that are unsharded and resharded together. Where they are in a step the scheduler knows.

    Attributes:
        plan: What was decided before anything was built.
        module_fqns: Names of the fully sharded modules from the root; set when the root is known.
        modules: The fully sharded module, or several that share the handle.
        grid: The ranks that share the parameters, and those that hold copies of their shards.
        faces: What the modules hold.
        view: What there is of the unsharded parameters.
        held_with: Options of the context that shows full parameters to the user; ``reshard`` has to wait.
        lent: How, if forward and backward cannot use what it shows.
        secondary: The secondary shards; ``None``: none are planned.
        version: Of the shards when the unsharded parameters, as they are or were last, were gathered.
        settings: What users set.
        requires_gradient_sync: Reduce gradients at the end of this handle's backward.
        sync_after_context: What ``requires_gradient_sync`` is after the ``no_sync`` that runs; ``None``: none runs.
        accumulated: The gradients that wait for a later reduction.
        has_parts: On some rank of the root, modules lie on a part of its ranks; set when the root is known.
        is_shared: Two roots have run it, and its memory stays.
        copy_key: Which copy of which copy of the annotated handle this is; empty for that one.
        comms: How bytes travel where the user chose.
        comm_hooks: Registrations of communication hooks that reach the handle; the nearest holds.
    """

    __slots__ = (
        "__weakref__",
        "_copies",
        "_gathers",
        "_idle_writes",
        "accumulated",
        "buffers",
        "comm_hooks",
        "comms",
        "copy_key",
        "faces",
        "grid",
        "has_parts",
        "held_with",
        "is_shared",
        "lent",
        "module_fqns",
        "modules",
        "plan",
        "requires_gradient_sync",
        "secondary",
        "settings",
        "sync_after_context",
        "version",
        "view",
    )

    def __init__(
        self, plan: HandlePlan, modules: Sequence[nn.Module], buffers: Sequence[FlatBuffer], grid: Grid
    ) -> None:
        self.plan = plan
        self.grid = grid
        self.module_fqns = tuple(plan.module_fqns)
        self.modules = tuple(modules)
        self.buffers = tuple(buffers)
        self.settings = HandleSettings(plan.reshard_after_forward, plan.unused_gradients == "zero")
        self.requires_gradient_sync = True
        self.sync_after_context: bool | None = None
        self.has_parts = False
        self.is_shared = False
        self.copy_key = ""
        self.comms = DEFAULT_COMMS
        self.comm_hooks: tuple[Registration, ...] = ()
        self._copies = 0
        self.accumulated = AccumulatedGradients(self.buffers)
        self._start_sharded()

    def _start_sharded(self) -> None:
        """Begin a life in which nothing was unsharded yet."""
        self.view = ParamView.SHARDED
        self.held_with: object | None = None
        self.lent: Lent | None = None
        self.version = self._idle_writes = 0
        self._gathers: list[Pending] | None = None  # Of an unshard that has not ended, also of one that never will.
        self.secondary: SecondaryShards | None = None
        if self.grid.outer is not None or self.plan.secondary_ranks is not None:
            self.secondary = SecondaryShards(self.buffers, fills=self.grid.outer is not None)
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
        """What messages call the (first) module."""
        return module_text(self.fqn, self.plan.class_names[0])

    def fqn_of(self, param: ShardedParam) -> str:
        """Return the name of one of the handle's parameters from where its modules are named."""
        return self.from_root(param.fqn)

    def from_root(self, fqn: str) -> str:
        """Return the name from there for one below the handle's modules, as ``ShardedParam.fqn`` is."""
        if len(self.module_fqns) == 1:
            return join_fqn(self.fqn, fqn)
        position, _, name = fqn.partition(".")
        return join_fqn(self.module_fqns[int(position)], name)

    def label_params(self, annotation: int) -> None:
        """Say who the parameters are, for messages, and for ranks that compare what they do with them.

        Args:
            annotation: Its number among those of the same ranks.
        """
        for param in self.params:
            param.layout.label = ParamLabel(annotation, param, self)

    @property
    def params(self) -> list[ShardedParam]:
        """Every parameter of the handle, buffer by buffer."""
        return [param for flat in self.buffers for param in flat.params]

    @property
    def _fqns(self) -> list[str]:
        """FQNs of the parameters below the fully sharded module, of several modules below their position."""
        return [param.fqn for param in self.params]

    @property
    def sharded(self) -> list[torch.Tensor]:
        """Every sharded parameter, ragged and of its full shape."""
        return [param.sharded for param in self.params]

    @property
    def waiting(self) -> list[torch.Tensor]:
        """The sharded parameters, of full shape, with a gradient that waits to be reduced with later ones."""
        return [param.sharded for param in self.params if param.waits]

    # What modules hold

    def is_in_place(self) -> bool:
        """Say whether modules hold the face that the handle gave them; inside a context, whatever they hold."""
        return (self.view is not ParamView.UNSHARDED and self.faces.are_sharded()) or not self.misplaced()

    def misplaced(self) -> list[Misplaced]:
        """Return what modules hold in place of the face that the handle gave them; inside a context, nothing."""
        return [] if self.held_with is not None else self.faces.misplaced(self.view)

    def _refuse_strangers(self) -> None:
        # A forward has seen to it, so this is before a backward.
        if self.held_with is None:
            self.check_held()
            raise written_too_early(self)

    def attach(self) -> None:
        """Bring back what torch replaced: parameters that a load assigned, and memory that it gave to parameters.

        Their values stay; parameters are the same objects as before. Not collective.

        Raises:
            UsageError: A parameter has another dtype or shape now, or ``check_held`` raises.
        """
        if self.is_unsharded or self.held_with is not None:
            return
        self.check_held()
        for param in self.params:
            for module, name in param.owners:
                held = module._parameters.get(name)
                if held is not None and held is not param.sharded and held is not param.unsharded:
                    param.take(held)
                    vars(held).pop(_LOADED, None)
                    mark_replaced(held, param.fqn, module, name)  # An optimizer that was built meanwhile holds it.
                    param.sharded.grad = None  # As a new parameter has none.
            param.bring_back_marks()
            param.place(param.sharded)
        for flat in self.buffers:
            flat.attach()

    def check_held(self) -> None:
        """Refuse parameters that the user tied, replaced or removed: an optimizer may hold the old ones, or the new.

        What a load assigns is a value, and so is any parameter in the place of one on the meta device.

        Raises:
            UsageError: It names the first of them, or says that a ``functional_call`` lends it.
        """
        for _, _, param, held in (found for found in self.misplaced() if found.is_stranger):
            at = f"{place_of_rank()}, {self.described}, parameter {param.fqn!r}"
            if is_functional_call():
                raise UsageError(
                    "functional_call gave a sharded module other parameters, and its forward gathers its own",
                    at=at,
                    fix="call it inside unshard_params(model); elsewhere give it buffers only, or the model's own "
                    "parameters",
                )
            other = None if held is None else handle_of(held)
            if other is None and held is not None and (param.ragged.is_meta or hasattr(held, _LOADED)):
                continue
            what, fix = "removed", "remove it before fully_shard"
            names = [] if other is None else [other.fqn_of(one) for one in other.params if one.has_face(held)]
            if names:
                what, fix = f"tied to {names[0]!r}", "tie them before fully_shard, by one call for both or a policy"
            elif held is not None:
                what, fix = "replaced", "change its values: with torch.no_grad(): parameter.copy_(full), or load them"
            raise UsageError(
                f"a parameter was {what} after fully_shard was called, and optimizers and gradients would not follow",
                at=at,
                fix=f"{fix}; or unannotate first",
            )

    def copied(self, memo: dict[int, Any]) -> "Handle":
        """Return a deep copy with shards of its own; ``adopt_modules`` completes it."""
        if self.accumulated.awaits_copies:
            raise waits_for_copies("deepcopy", self.described)
        self.attach()
        twin = memo[id(self)] = copy.copy(self)
        self._copies += 1
        twin.copy_key, twin._copies = f"{self.copy_key}.{self._copies}", 0
        if self.sync_after_context is not None:
            # The context that runs ends for this handle only.
            twin.requires_gradient_sync, twin.sync_after_context = self.sync_after_context, None
        kept = self.accumulated
        twin.settings = copy.copy(self.settings)
        twin.buffers = tuple(flat.copied(memo, with_kept_gradients=kept.is_unsynced) for flat in self.buffers)
        twin.accumulated = AccumulatedGradients(twin.buffers, is_unsynced=kept.is_unsynced, is_kept=kept.is_kept)
        twin.register_comm_hooks(copied_registrations(self.comm_hooks, memo))
        return twin

    def adopt_modules(self, memo: dict[int, Any]) -> None:
        """Let a copied handle manage the copies of the modules, and prefetch copied handles."""
        self.modules = tuple(copy.deepcopy(module, memo) for module in self.modules)
        for param in self.params:
            param.owners = tuple((copy.deepcopy(module, memo), name) for module, name in param.owners)
            # Not before: it may refer to modules.
            param.form = copy.deepcopy(param.form, memo)
        self._start_sharded()
        for one in self.comm_hooks:
            one.place_copy(memo)
        settings = self.settings
        settings.forward_prefetch = _copies_of(settings.forward_prefetch, memo)
        settings.backward_prefetch = _copies_of(settings.backward_prefetch, memo)

    def close(self) -> None:
        """Let go of modules and shards for good. Nothing is left to gather: unsharding does nothing from now on."""
        self.modules = ()
        self.buffers = ()
        self.comm_hooks = ()
        self.accumulated = AccumulatedGradients(())
        self._start_sharded()
        self.view = ParamView.UNSHARDED

    # What users chose

    def communicate_by(self, comms: Comms) -> None:
        """Let bytes travel as the user chose, from the next collective on. Every rank alike."""
        self.comms = comms
        CHANGES.note("choices")
        for flat in self.buffers:
            flat.routes.communicate_by(comms)

    def fill_unused(self, *, fills: bool) -> None:
        """Choose what a parameter gets that no rank used: zeros, or no gradient. Every rank alike."""
        self.settings.fills_unused = fills
        CHANGES.note("choices")

    def chosen_text(self) -> str:
        """Return what the user chose of what ranks do to gradients, equal on all of them; empty: as annotated."""
        texts = [self.comms.compared_text()]
        if self.settings.fills_unused != (self.plan.unused_gradients == "zero"):
            texts.append(f"reduce-scatter unused params {self.settings.fills_unused}")
        return ", ".join(filter(None, texts))

    def settings_text(self) -> str:
        """Return what else the user set of what decides when ranks communicate; empty: nothing."""
        chosen = {
            self.chosen_text(): True,
            "gradient sync off": not self.requires_gradient_sync,
            "all-reduce over copies off": any(flat.routes.kept.defers for flat in self.buffers),
            "gradients of a backward without sync": self.requires_gradient_sync and self.accumulated.is_unsynced,
            self.settings.text(self.plan): True,
        }
        return ", ".join(text for text, is_set in chosen.items() if is_set and text)

    def register_comm_hooks(self, registrations: Sequence[Registration]) -> None:
        """Let the nearest of ``registrations`` reduce the gradients. Every rank alike.

        Raises:
            ConfigError: None of them is the nearest.
            UsageError: The handle has another way to reduce, or an optimizer steps inside backward.
        """
        comms = self.check_comm_hooks(registrations)
        self.comm_hooks = tuple(registrations)
        self.communicate_by(comms)

    def check_comm_hooks(self, registrations: Sequence[Registration]) -> Comms:
        """Return what ``register_comm_hooks`` would choose; raises what it does."""
        with located(self.described):
            if registrations:
                refuse_steppers(self.steppers, self.fqn_of(self.params[0]))
            return replace(self.comms, hook=nearest(registrations))

    @property
    def steppers(self) -> tuple[Stepper, ...]:
        """What steps the parameters inside backward."""
        return self.buffers[0].gradients.steppers if self.buffers else ()

    @property
    def synchronises(self) -> bool:
        """The next backward ends with whole gradients, as far as that is for this handle to say."""
        return self.requires_gradient_sync and not any(flat.routes.kept.defers for flat in self.buffers)

    def step_by(self, steppers: Sequence[Stepper]) -> None:
        """Let these step the parameters, from the next backward on."""
        for flat in self.buffers:
            flat.gradients.step_by(steppers)

    @property
    def rests_elsewhere(self) -> bool:
        """Its shards do not rest where its buffers are."""
        # At each gather: a generator costs as much again.
        for flat in self.buffers:  # noqa: SIM110
            if flat.rests_elsewhere:
                return True
        return False

    # In use, and free

    @property
    def is_unsharded(self) -> bool:
        """The unsharded parameters are there, whether modules hold them or not."""
        return self.view in (ParamView.UNSHARDED, ParamView.HIDDEN)

    @property
    def is_gathering(self) -> bool:
        """An unshard was started and is not in use yet."""
        return self.view is ParamView.GATHERING

    def bring_back(self) -> bool:
        """Bring pieces to which torch gave other memory back into the shards; say whether there were any.

        Streams: on the one that wrote them and frees their memory, so not on that of gathers.

        Raises:
            UsageError: The parameters are on another device than they rest on, or of another dtype.
        """
        was_away = False
        for flat in self.buffers:
            if not (flat.is_empty or flat.is_usable):
                was_away = True
                flat.attach()
                flat.check_usable()
        return was_away

    def begin_unshard(self) -> None:
        """Start filling the buffers, after ``bring_back``.

        Collective: all ranks of the shard group, same order; of the smaller group if secondary shards are the source.
        """
        if self._gathers is not None:
            self.settle()
        self._gathers = gathers = []
        secondary = self.secondary if self.secondary is not None and self.secondary.are_source else None
        version = -self._idle_writes
        for flat in self.buffers:
            version += flat.shard._version  # Which grows on every rank alike.
            if flat.is_empty:
                flat.make_leaves()
            elif secondary is not None:
                gathers.append(secondary.begin(flat))
            else:
                gathers.append(flat.begin_unshard())
        self.version = secondary.version if secondary is not None and secondary.are_there else version
        self.view = ParamView.GATHERING

    def discount_writes(self) -> None:
        """Note that what was written since the last gather, on all ranks, were the values that there were."""
        self._idle_writes = sum(flat.shard._version for flat in self.buffers) - self.version

    def end_fill(self) -> None:
        """Start the all-gathers that wait for a secondary shard; nothing if there are none.

        For whose modules run in orders of their own on each rank: what waits for them starts gathers in that order.
        """
        for gather in self._gathers or ():
            if isinstance(gather, Filling):
                gather.go_on()

    def finish_gathers(self) -> None:
        """Wait for the all-gathers: the thread on CPU, the current stream on CUDA."""
        for gather in self._gathers or ():
            gather.finish()
        secondary = self.secondary
        if secondary is not None and secondary.are_source:
            secondary.are_there = True
            secondary.version = self.version

    def settle(self) -> None:
        """Wait for all that was started for this handle, also by a call that an exception cut short."""
        for flat in self.buffers:
            flat.routes.settle()

    def show(self) -> None:
        """Make the modules hold the unsharded parameters; the gathers are finished."""
        self.faces.show_unsharded(self._refuse_strangers)
        # Last: what comes before is done again if an exception cuts it short.
        self.view = ParamView.UNSHARDED
        self._gathers = None

    def reshard(self, *, frees: bool = True) -> None:
        """Make the modules hold the sharded parameters and free the buffers, or leave these to ``free_buffers``."""
        if self._gathers is not None:
            # Not in use yet, or cut short: the memory may still be written to.
            self.settle()
        # First: who is cut short from here on is unsharded and resharded anew.
        self.view = ParamView.SHARDED
        self._gathers = None
        self.faces.show_sharded()
        if frees:
            self.free_buffers()

    def hide(self) -> None:
        """Make the modules hold the sharded parameters, and keep the unsharded ones; ``show`` undoes it."""
        if self.view is ParamView.UNSHARDED and self.held_with is None:
            # First: a module that misses a parameter then finds it.
            self.view = ParamView.HIDDEN
            self.faces.show_sharded()

    def free_buffers(self) -> None:
        """Free the memory of the buffers, while the modules hold the sharded parameters, unless it is to stay."""
        if not (self.is_shared or self.settings.keeps_storage):
            for flat in self.buffers:
                flat.free_buffer()

    def keep_secondary(self) -> None:
        """Copy secondary shards out of the buffers, which are full."""
        if self.secondary is not None:
            self.secondary.keep(self.version)

    def drop_secondary(self) -> None:
        """Free secondary shards, if there are any."""
        if self.secondary is not None:
            if self.view is ParamView.GATHERING and self.secondary.are_source:
                self.settle()
            self.secondary.drop()

    def end_secondary(self) -> None:
        """Free secondary shards of one forward, whose values no other reads; those that a forward filled stay."""
        if self.secondary is not None and self.secondary.are_there and not self.secondary.fills:
            self.drop_secondary()

    def is_fresh(self) -> bool:
        """Say whether unsharded parameters and filled secondary shards still have the values of this rank's shards."""
        if self.secondary is not None and self.secondary.fills:
            if not self.secondary.are_fresh():
                return False
            if not self.is_unsharded:
                return True
        return all(flat.is_fresh() for flat in self.buffers)

    def lies_in_buffer(self, tensor: torch.Tensor) -> bool:
        """Say whether a plain tensor, of any shape, is a view of the unsharded parameters."""
        return any(flat.holds(tensor) for flat in self.buffers)

    def __repr__(self) -> str:
        return f"Handle({self.fqn!r}, {len(self.params)} parameters)"


def _copies_of(handles: tuple[Handle, ...] | None, memo: dict[int, Any]) -> tuple[Handle, ...] | None:
    return None if handles is None else tuple(memo[id(handle)] for handle in handles if id(handle) in memo)


def written_too_early(handle: Handle) -> UsageError:
    """Return the error for shards that have other values than those a forward has seen."""
    return UsageError(
        "parameters were written to between a forward and its backward, which needs them as they were",
        at=f"{place_of_rank()}, {handle.described}",
        fix="step, load or change parameters after backward; or run forward again",
    )

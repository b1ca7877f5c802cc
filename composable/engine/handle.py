"""A handle owns the parameters of one fully sharded module: unshard, reshard, reduce.

A handle has one flat buffer per (dtype, requires_grad) class of its parameters. It knows
its own state and swaps the modules' parameters between their two faces; the scheduler
decides when each call is made.
"""

import copy
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from composable.comm import Grid, Pending, Ranks
from composable.engine.buffer import FlatBuffer
from composable.engine.gradients import GRADIENT_BUFFERS
from composable.engine.param import ShardedParam, has_own_setattr
from composable.engine.stepping import Stepper, refuse_steppers
from composable.engine.user_comms import CHOICES, DEFAULT_COMMS, Comms, Registration, copied_registrations, nearest
from composable.errors import UsageError, located, place_of_rank
from composable.ground.frames import is_functional_call, is_part_of_module, modules_of_copy, reaches_out
from composable.ground.names import class_name, join_fqn, module_text
from composable.planning import HandlePlan, mark_replaced

__all__ = ["FIX_COPY", "Handle", "handle_of"]


FIX_COPY = "deep-copy {names} or a module around, in one call"
_LOADED = "_composable_loaded"  # On a parameter that a load has assigned; set in registrations.py.


class ParamLabel:
    """Who a sharded parameter is.

    Attributes:
        key: Equal on all ranks, and another one for each parameter of the same ranks.
    """

    __slots__ = ("_fqn", "_handle", "_kind", "key")

    def __init__(self, annotation: int, param: ShardedParam, handle: "Handle") -> None:
        self._fqn = param.fqn
        self._kind = class_name(param.owners[0][0])
        # What the handle is called changes when the root is known.
        self._handle = weakref.ref(handle)
        self.key = f"{annotation} {handle.fqn} {param.fqn}"

    def __str__(self) -> str:
        handle = self._handle()
        return self._fqn if handle is None else handle.from_root(self._fqn)

    @property
    def everyone(self) -> Ranks | None:
        """All ranks that hold pieces of it, or copies of pieces; ``None``: it is gone."""
        handle = self._handle()
        return None if handle is None else handle.grid.everyone

    @property
    def has_parts(self) -> bool:
        """On some of these ranks, modules inside the same root lie on a part of them."""
        handle = self._handle()
        return handle is not None and handle.has_parts

    @property
    def module(self) -> str:
        """What messages call the module that owns it."""
        return module_text(str(self).rpartition(".")[0], self._kind)


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
    """Return the handle that manages a parameter, either face of it."""
    mark = getattr(param, "_composable_managed", None)
    return None if mark is None else mark.handle()


class Misplaced(NamedTuple):
    """What a module holds where a handle gave it a face of a parameter: the other face, another tensor or none."""

    module: nn.Module
    name: str
    param: ShardedParam
    held: nn.Parameter | None

    @property
    def is_stranger(self) -> bool:
        """It is neither face."""
        return not self.param.has_face(self.held)


class _Filling:
    """Two gathers, one after the other: of a secondary shard, and from it."""

    __slots__ = ("_flat", "_pending", "_second")

    def __init__(self, flat: FlatBuffer) -> None:
        self._flat = flat
        self._pending: Pending = flat.begin_fill()
        self._second: Pending | None = None

    def go_on(self) -> Pending:
        """Start the second gather, once the first one is over; return it."""
        if self._second is None:
            self._pending.finish()
            self._second = self._flat.begin_unshard_again()
        return self._second

    def finish(self) -> None:
        self.go_on().finish()

    def is_over(self) -> bool:
        return self._second is not None and self._second.is_over()


class Handle:
    """The parameters that are unsharded and resharded together. Where they are in a step the scheduler knows.

    Attributes:
        plan: What was decided before anything was built.
        fqn: Name of the (first) fully sharded module from the root; set when the root is known.
        module_fqns: Names of all of them.
        modules: The fully sharded module, or several that share the handle.
        grid: The ranks that share the parameters, and those that hold copies of their shards.
        is_gathering: An unshard was started and is not in use yet.
        is_unsharded: The unsharded parameters are there, and the modules hold them.
        is_hidden: They are there, and the modules hold the sharded ones all the same.
        held_with: Options of the context that shows full parameters to the user; ``reshard`` has to wait.
        is_lent: That context shows them in a way that forward and backward cannot use,
        is_shown_whole: but forward can where nothing is to have a gradient: every module holds a whole copy.
        has_secondary: Secondary shards of a forward are there.
        version: Of the shards when the unsharded parameters, as they are or were last, were gathered.
        fills_secondary: Forwards fill secondary shards, which serve until shards are written.
        takes_secondary: The next gather, or the one under way, is from these.
        reshard_option: What the user asked for; ``None``: free between forward and backward unless root; an int: free
            all but secondary shards over as many ranks.
        reshard_after_forward: What that means now that the root is known.
        reshard_after_backward: Free them after backward; else once a forward finds that a rank has written its shard.
        unshard_in_backward: Gather before backward. If not, forward lets nothing of the parameters be saved for it.
        keeps_storage: The buffers' memory stays allocated while the parameters are sharded.
        scatters_apart: Reduce-scatters have a process group of their own.
        gradient_buffers: How many gradient buffers of the root may be alive when this handle needs one.
        fills_unused: A parameter that no rank used in a module that ran gets a gradient of zeros.
        requires_gradient_sync: Reduce gradients at the end of this handle's backward.
        sync_after_context: What ``requires_gradient_sync`` is after the ``no_sync`` that runs; ``None``: none runs.
        has_parts: On some rank of the root, modules lie on a part of its ranks; set when the root is known.
        has_unsynced_gradients: The last backward did not synchronise, on any rank.
        is_shared: Two roots have run it, and its memory stays.
        keeps_gradients: Such a backward left gradients on leaves of this rank.
        casts_params: Unsharded parameters have another dtype than sharded ones, or are no plain tensors.
        casts_gradients: They are reduced in another dtype than autograd makes them in.
        forward_prefetch: Handles to unshard after this one in forward, or ``None``: as recorded.
        backward_prefetch: The same for backward.
        copy_key: Which copy of which copy of the annotated handle this is; empty for that one.
        comms: How bytes travel where the user chose.
        comm_hooks: Registrations of communication hooks that reach the handle; the nearest holds.
    """

    # More than the 30 attributes for which Python keeps a class's dicts compact; a step reads them hundreds of times.
    __slots__ = (
        "__weakref__",
        "_copies",
        "_gathers",
        "_idle_writes",
        "_places",
        "_plain_owners",
        "_secondary_version",
        "_swaps",
        "_watched",
        "backward_prefetch",
        "buffers",
        "casts_gradients",
        "casts_params",
        "comm_hooks",
        "comms",
        "copy_key",
        "fills_secondary",
        "fills_unused",
        "forward_prefetch",
        "fqn",
        "gradient_buffers",
        "grid",
        "has_parts",
        "has_secondary",
        "has_unsynced_gradients",
        "held_with",
        "is_gathering",
        "is_hidden",
        "is_lent",
        "is_shared",
        "is_shown_whole",
        "is_unsharded",
        "keeps_gradients",
        "keeps_storage",
        "module_fqns",
        "modules",
        "plan",
        "requires_gradient_sync",
        "reshard_after_backward",
        "reshard_after_forward",
        "reshard_option",
        "scatters_apart",
        "sync_after_context",
        "takes_secondary",
        "unshard_in_backward",
        "version",
    )

    def __init__(
        self, plan: HandlePlan, modules: Sequence[nn.Module], buffers: Sequence[FlatBuffer], grid: Grid
    ) -> None:
        self.plan = plan
        self.grid = grid
        self.name_modules(plan.module_fqns)
        self.modules = tuple(modules)
        self.buffers = tuple(buffers)
        self.reshard_option = plan.reshard_after_forward
        self.reshard_after_forward = True
        self.reshard_after_backward = True
        self.unshard_in_backward = True
        self.keeps_storage = False
        self.scatters_apart = False
        self.gradient_buffers = GRADIENT_BUFFERS
        self.fills_secondary = grid.outer is not None
        self.fills_unused = plan.unused_gradients == "zero"
        self.requires_gradient_sync = True
        self.sync_after_context: bool | None = None
        self.has_parts = False
        self.has_unsynced_gradients = False
        self.keeps_gradients = False
        self.is_shared = False
        self.forward_prefetch: tuple[Handle, ...] | None = None
        self.backward_prefetch: tuple[Handle, ...] | None = None
        self.copy_key = ""
        self.comms = DEFAULT_COMMS
        self.comm_hooks: tuple[Registration, ...] = ()
        self._copies = 0
        self.casts_params = any(flat.compute_dtype != flat.dtype or flat.holds_instances for flat in buffers)
        self.casts_gradients = any(flat.plan.reduce_dtype != flat.compute_dtype for flat in buffers)
        self._start_sharded()
        self._place_sharded()

    def name_modules(self, fqns: Sequence[str]) -> None:
        """Note what the fully sharded modules are called."""
        self.module_fqns = tuple(fqns)
        self.fqn = self.module_fqns[0]

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

    def _start_sharded(self) -> None:
        """Begin a life in which nothing was unsharded yet."""
        self.is_gathering = False
        self.is_unsharded = False
        self.is_hidden = False
        self.held_with: object | None = None
        self.is_lent = False
        self.is_shown_whole = False
        self.has_secondary = False
        self.takes_secondary = False
        self.version = self._secondary_version = self._idle_writes = 0
        self._gathers: list[Pending] | None = None  # Of an unshard that has not ended, also of one that never will.
        self._places: list[tuple[nn.Module, str, ShardedParam]] = []
        self._plain_owners: list[tuple[nn.Module, str, ShardedParam]] = []
        self._swaps: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] | None = None
        self._watched: list[ShardedParam] = []

    def _place_sharded(self) -> None:
        mark = _Managed(self)
        for param in self.params:
            for face in (param.sharded, param.unsharded):
                if face is not None:
                    face._composable_managed = mark  # type: ignore[attr-defined]  # read by handle_of
            param.place(param.sharded)
            self._places += [(module, name, param) for module, name in param.owners]
            if any(has_own_setattr(module) for module, _ in param.owners):
                self._watched.append(param)
            else:
                self._plain_owners += [(module, name, param) for module, name in param.owners]

    def label_params(self, annotation: int) -> None:
        """Say who the parameters are, for messages, and for ranks that compare what they do with them.

        Args:
            annotation: Its number among those of the same ranks.
        """
        for param in self.params:
            param.layout.label = ParamLabel(annotation, param, self)

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

    def is_in_place(self) -> bool:
        """Say whether modules hold the face that the handle gave them; inside a context, whatever they hold."""
        if self.is_unsharded:
            return not self.misplaced()
        # Before each gather: no list.
        for module, name, param in self._places:
            if module._parameters.get(name) is not param.sharded:
                return not self.misplaced()
        return True

    def misplaced(self) -> list[Misplaced]:
        """Return what modules hold in place of the face that the handle gave them; inside a context, nothing."""
        found: list[Misplaced] = []
        if self.held_with is None:
            is_unsharded = self.is_unsharded and not self.is_hidden
            for module, name, param in self._places:
                held = module._parameters.get(name)
                if held is not (param.unsharded if is_unsharded else param.sharded):
                    found.append(Misplaced(module, name, param, held))
        return found

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
        if self.waits_for_copies:
            raise waits_for_copies("deepcopy", self.described)
        self.attach()
        twin = memo[id(self)] = copy.copy(self)
        self._copies += 1
        twin.copy_key, twin._copies = f"{self.copy_key}.{self._copies}", 0
        if self.sync_after_context is not None:
            # The context that runs ends for this handle only.
            twin.requires_gradient_sync, twin.sync_after_context = self.sync_after_context, None
        twin._start_sharded()
        twin.buffers = tuple(
            flat.copied(memo, with_kept_gradients=self.has_unsynced_gradients) for flat in self.buffers
        )
        twin.register_comm_hooks(copied_registrations(self.comm_hooks, memo))
        return twin

    def adopt_modules(self, memo: dict[int, Any]) -> None:
        """Let a copied handle manage the copies of the modules, and prefetch copied handles."""
        self.modules = tuple(copy.deepcopy(module, memo) for module in self.modules)
        for param in self.params:
            param.owners = tuple((copy.deepcopy(module, memo), name) for module, name in param.owners)
            # Not before: it may refer to modules.
            param.form = copy.deepcopy(param.form, memo)
        self._place_sharded()
        for one in self.comm_hooks:
            one.place_copy(memo)
        for name in ("forward_prefetch", "backward_prefetch"):
            ahead = getattr(self, name)
            if ahead is not None:
                setattr(self, name, tuple(memo[id(handle)] for handle in ahead if id(handle) in memo))

    def communicate_by(self, comms: Comms) -> None:
        """Let bytes travel as the user chose, from the next collective on. Every rank alike."""
        self.comms = comms
        CHOICES.note()
        for flat in self.buffers:
            flat.routes.communicate_by(comms)

    def fill_unused(self, *, fills: bool) -> None:
        """Choose what a parameter gets that no rank used: zeros, or no gradient. Every rank alike."""
        self.fills_unused = fills
        CHOICES.note()

    def chosen_text(self) -> str:
        """Return what the user chose of what ranks do to gradients, equal on all of them; empty: as annotated."""
        texts = [self.comms.compared_text()]
        if self.fills_unused != (self.plan.unused_gradients == "zero"):
            texts.append(f"reduce-scatter unused params {self.fills_unused}")
        return ", ".join(filter(None, texts))

    def settings_text(self) -> str:
        """Return what else the user set of what decides when ranks communicate; empty: nothing."""
        chosen = {
            self.chosen_text(): True,
            "gradient sync off": not self.requires_gradient_sync,
            "all-reduce over copies off": any(flat.routes.kept.defers for flat in self.buffers),
            "gradients of a backward without sync": self.requires_gradient_sync and self.has_unsynced_gradients,
            f"reshard after forward {self.reshard_option}": self.reshard_option != self.plan.reshard_after_forward,
            "reshard after backward off": not self.reshard_after_backward,
            "unshard in backward off": not self.unshard_in_backward,
            "a reduce-scatter group of its own": self.scatters_apart,
            "forward prefetch by hand": self.forward_prefetch is not None,
            "backward prefetch by hand": self.backward_prefetch is not None,
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

    def close(self) -> None:
        """Let go of modules and shards for good. Nothing is left to gather: unsharding does nothing from now on."""
        self._start_sharded()
        self.comm_hooks = ()
        self.modules = ()
        self.buffers = ()
        self.is_unsharded = True

    @property
    def params(self) -> list[ShardedParam]:
        """Every parameter of the handle, buffer by buffer."""
        return [param for flat in self.buffers for param in flat.params]

    @property
    def sharded(self) -> list[torch.Tensor]:
        """Every sharded parameter."""
        return [param.sharded for param in self.params]

    @property
    def is_waiting(self) -> bool:
        """Gradients wait to be reduced with later ones, or for an all-reduce over copies."""
        return self.waits_for_copies or (self.keeps_gradients and any(flat.gradients.bits() for flat in self.buffers))

    @property
    def waiting(self) -> list[torch.Tensor]:
        """The sharded parameters with a gradient that waits to be reduced with later ones."""
        return [param.sharded for param in self.params if param.waits]

    @property
    def _fqns(self) -> list[str]:
        """FQNs of the parameters below the fully sharded module, of several modules below their position."""
        return [param.fqn for param in self.params]

    @property
    def is_offloaded(self) -> bool:
        """Its shards do not rest where its buffers are."""
        # At each gather: a generator costs as much again.
        for flat in self.buffers:  # noqa: SIM110
            if flat.is_offloaded:
                return True
        return False

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

        Collective: all ranks of the shard group, same order; of the smaller group if ``takes_secondary``.
        """
        if self._gathers is not None:
            self.settle()
        self._gathers = gathers = []
        version = -self._idle_writes
        for flat in self.buffers:
            version += flat.shard._version  # Which grows on every rank alike.
            if flat.is_empty:
                flat.make_leaves()
            elif self.takes_secondary:
                gathers.append(flat.begin_unshard_again() if self.has_secondary else _Filling(flat))
            else:
                gathers.append(flat.begin_unshard())
        self.version = self._secondary_version if self.takes_secondary and self.has_secondary else version
        self.is_gathering = True

    def discount_writes(self) -> None:
        """Note that what was written since the last gather, on all ranks, were the values that there were."""
        self._idle_writes = sum(flat.shard._version for flat in self.buffers) - self.version

    def end_fill(self) -> None:
        """Start the all-gathers that wait for a secondary shard; nothing if there are none.

        For whose modules run in orders of their own on each rank: what waits for them starts gathers in that order.
        """
        for gather in self._gathers or ():
            if isinstance(gather, _Filling):
                gather.go_on()

    def finish_gathers(self) -> None:
        """Wait for the all-gathers: the thread on CPU, the current stream on CUDA."""
        for gather in self._gathers or ():
            gather.finish()
        if self.takes_secondary:
            self.has_secondary = True
            self._secondary_version = self.version

    def settle(self) -> None:
        """Wait for all that was started for this handle, also by a call that an exception cut short."""
        for flat in self.buffers:
            flat.routes.settle()

    def show(self) -> None:
        """Make the modules hold the unsharded parameters; the gathers are finished."""
        if self._swaps is None:
            self._swaps = [(module, name, param.sharded, param.leaf()) for module, name, param in self._plain_owners]
        for module, name, sharded, leaf in self._swaps:
            trainable = sharded.requires_grad
            if leaf.requires_grad is not trainable:
                leaf.requires_grad_(trainable)
            held = module._parameters
            if held.get(name) is not sharded and held.get(name) is not leaf:
                self._check_not_assigned()
            held[name] = leaf
        for param in self._watched:
            if not (param.is_placed(param.sharded) or param.is_placed(param.leaf())):
                self._check_not_assigned()
            param.leaf().requires_grad_(param.sharded.requires_grad)
            param.place(param.leaf())
        # Last: what comes before is done again if an exception cuts it short.
        self.is_unsharded = True
        self.is_hidden = self.is_gathering = False
        self._gathers = None

    def _check_not_assigned(self) -> None:
        # A forward has seen to it, so this is before a backward.
        if self.held_with is None:
            self.check_held()
            raise self.written_too_early()

    def written_too_early(self) -> UsageError:
        """Return the error for shards that have other values than those a forward has seen."""
        return UsageError(
            "parameters were written to between a forward and its backward, which needs them as they were",
            at=f"{place_of_rank()}, {self.described}",
            fix="step, load or change parameters after backward; or run forward again",
        )

    def reshard(self, *, frees: bool = True) -> None:
        """Make the modules hold the sharded parameters and free the buffers, or leave these to ``free_buffers``."""
        if self._gathers is not None:
            # Not in use yet, or cut short: the memory may still be written to.
            self.settle()
        # First: who is cut short from here on is unsharded and resharded anew.
        self.is_unsharded = False
        self.is_gathering = False
        self._gathers = None
        self._show_sharded()
        if frees:
            self.free_buffers()

    def hide(self) -> None:
        """Make the modules hold the sharded parameters, and keep the unsharded ones; ``show`` undoes it."""
        if self.is_unsharded and self.held_with is None:
            # First: a module that misses a parameter then finds it.
            self.is_hidden = True
            self._show_sharded()

    def _show_sharded(self) -> None:
        for module, name, param in self._plain_owners:
            module._parameters[name] = param.sharded
        for param in self._watched:
            param.place(param.sharded)

    def free_buffers(self) -> None:
        """Free the memory of the buffers, while the modules hold the sharded parameters, unless it is to stay."""
        if self.is_shared or self.keeps_storage:
            return
        for flat in self.buffers:
            flat.free_buffer()

    @property
    def keeps_secondary(self) -> bool:
        """A forward that a backward may follow leaves secondary shards."""
        return type(self.reshard_option) is int

    def keep_secondary(self) -> None:
        """Copy secondary shards out of the buffers, which are full; those of an earlier forward go."""
        self.has_secondary = False
        for flat in self.buffers:
            if not flat.is_empty:
                flat.keep_secondary()
        self._secondary_version = self.version
        # Last: what was cut short is not used.
        self.has_secondary = True

    def drop_secondary(self) -> None:
        """Free secondary shards, also those of a copy that was cut short."""
        if self.is_gathering and self.takes_secondary:
            self.settle()
        self.has_secondary = False
        for flat in self.buffers:
            flat.drop_secondary()

    def end_secondary(self) -> None:
        """Free secondary shards of one forward, whose values no other reads; those that a forward filled stay."""
        if self.has_secondary and not self.fills_secondary:
            self.drop_secondary()

    @property
    def waits_for_copies(self) -> bool:
        """Gradients wait for an all-reduce over the ranks that hold copies."""
        # At the end of each backward: a generator costs as much again.
        for flat in self.buffers:  # noqa: SIM110
            if flat.routes.kept.total is not None:
                return True
        return False

    def forget_kept_shards(self) -> None:
        """Forget what waits for an all-reduce over copies."""
        for flat in self.buffers:
            flat.routes.kept.clear()

    def keep_gradients(self) -> None:
        """Note that gradients wait on the unsharded parameters, so that ``zero_grad`` drops them."""
        for flat in self.buffers:
            self.keeps_gradients |= flat.gradients.keep()

    def drop_zeroed_gradients(self) -> list[int]:
        """Forget kept gradients that the user has dropped by ``zero_grad``; returns the bits of each buffer."""
        self.keeps_gradients = False
        return [flat.gradients.drop_zeroed() for flat in self.buffers]

    def sum_in_reduce_dtype(self) -> None:
        """In the backward that begins, add up gradients that wait for later ones in the dtype of the reduction."""
        for flat in self.buffers:
            if flat.plan.reduce_dtype != flat.compute_dtype:
                flat.gradients.sum_in_reduce_dtype(sums=not self.requires_gradient_sync)

    def is_fresh(self) -> bool:
        """Say whether unsharded parameters and filled secondary shards still have the values of this rank's shards."""
        if self.fills_secondary and not (
            self.has_secondary and all(flat.is_secondary_fresh() for flat in self.buffers)
        ):
            return False
        return (self.fills_secondary and not self.is_unsharded) or all(flat.is_fresh() for flat in self.buffers)

    def lies_in_buffer(self, tensor: torch.Tensor) -> bool:
        """Say whether a plain tensor is a view of the unsharded parameters."""
        return any(flat.holds(tensor) for flat in self.buffers)

    def drop_gradients(self) -> None:
        """Forget gradients that were not reduced."""
        self.has_unsynced_gradients = self.keeps_gradients = False
        for flat in self.buffers:
            flat.gradients.drop()

    def __repr__(self) -> str:
        return f"Handle({self.fqn!r}, {len(self.params)} parameters)"

"""Annotated models in torch's ``Join``.

A rank without inputs does not know which modules the others run, so they send it; see docs/uneven_inputs.md.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from composable.annotation import AnnotationState, ReplicateState, Root, check_replicated, nothing_annotated, states_of
from composable.comm import Ranks, annotating, calling, wait_for_work
from composable.comm_hooks import register_comm_hook as reduce_by_hook
from composable.engine import HookFunction
from composable.errors import ConfigError, UsageError
from composable.extras.join import JoinSteps, Owner, connect
from composable.ground.names import check_bool, check_module, describe_module, described


def joinable(module: nn.Module, *, step: Callable[[], object] | None = None) -> "UnevenInputs":
    """Return the object that torch's ``Join`` takes for a model with ``fully_shard`` or ``replicate``.

    A rank without inputs then takes part in the steps of the others until they have none. No communication; making a
    ``torch.distributed.algorithms.join.Join`` of it is collective, and decides the root as a first forward does.

    Args:
        module: A module with all annotated modules of the model at or below it.
        step: The steps of the loop between a backward that averages gradients and the next forward, such as clipping,
            ``optimizer.step()``, ``optimizer.zero_grad()``. Called on ranks without inputs after each such backward of
            the others, since only the rank itself can step its shards. Not needed if no sharded parameter is trained,
            or if ``step_in_backward`` steps.

    Raises:
        ConfigError: ``module`` is no module, or ``step`` no function.
        UsageError: No module there is annotated, or modules there are annotated on different ranks.
    """
    check_module("module", module)
    if step is not None and not callable(step):
        raise ConfigError(f"step is {described(step)}", fix="pass a function that takes no arguments")
    return UnevenInputs(lambda: module, step)


def as_ddp(module: nn.Module) -> "DDPView":
    """Return an object that algorithms of torch take in place of a ``DistributedDataParallel`` around ``module``.

    For ``register_ddp_comm_hook``, ``register_ddp`` of overlapped optimizers, ``hook_with_zero_step``, and ``Join``.
    Train with ``module`` as before: the object is not called. No communication.

    Args:
        module: A module that ``replicate`` annotated alone, not in a list.

    Raises:
        ConfigError: ``module`` is no module.
        UsageError: ``module`` is not replicated, or shares its buckets with other modules.
    """
    state = check_replicated(module, "as_ddp")
    if len(state.modules) > 1:
        raise UsageError(
            "as_ddp of a module that shares buckets with others",
            at=", ".join(map(describe_module, state.modules)),
            fix="replicate the module around them",
        )
    if not isinstance(state.view, DDPView):
        # Kept alive here: torch's hooks hold weak references.
        state.view = DDPView(module, state)
    return state.view


class UnevenInputs(Joinable):
    """The result of ``joinable``; a ``Joinable`` for ``torch.distributed.algorithms.join.Join``.

    Attributes:
        step_alone: Function that a rank without inputs calls after each averaging backward of the others; or ``None``.
    """

    def __init__(self, find_module: Callable[[], nn.Module | None], step: Callable[[], object] | None) -> None:
        super().__init__()
        self._find_module = find_module
        self.step_alone = step
        self._ranks = _ranks_of(self.module)
        self._steps: JoinSteps | None = None
        self._hook: weakref.ref[JoinHook] | None = None

    @property
    def module(self) -> nn.Module:
        """The model."""
        module = self._find_module()
        if module is None:
            raise UsageError("the module of this as_ddp is gone", fix="keep the module as well")
        return module

    @property
    def join_device(self) -> torch.device:
        """The device on which ``Join`` counts the ranks that still have inputs."""
        return self._ranks.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The group in which ``Join`` counts ranks: all ranks of the model."""
        return self._ranks.process_group

    @annotating("Join")
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that acts for this rank once it has no inputs left; called by ``Join``. Collective.

        Args:
            **kwargs: ``divide_by_initial_world_size``: whether sums of gradients are divided by the number of all
                ranks, the default, or of those that still have inputs; and arguments of other joinables.

        Raises:
            ConfigError: ``divide_by_initial_world_size`` is no bool.
            UsageError: Sharded parameters are trained, and ranks without inputs have no ``step``; or a replicated
                module has ``static_graph=True``; or parts of the model belong to a root around it; or ranks have
                different numbers of annotated modules.
            DesyncError: The ranks passed different arguments.
        """
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        ranks = self._ranks = _ranks_of(self.module)
        with ranks.agreed():
            check_bool("divide_by_initial_world_size", divides_by_all)
            states = _states_to_join(self.module)
        text = f"divide_by_initial_world_size={divides_by_all}, {'a' if self.step_alone else 'no'} step"
        what = "the ranks prepare for uneven inputs in different ways"
        ranks.compare(text, shown=text, what=what, fix="call joinable and Join with the same arguments on every rank")
        # ``connect`` decides the roots: a module that was one so far may now be part of a root around it.
        owners = list(dict.fromkeys(map(connect, states)))
        with ranks.agreed():
            if self.step_alone is None and torch.is_grad_enabled():
                _check_stepped(owners)
        self.end()
        steps = self._steps = JoinSteps(ranks, owners, self.notify, self.is_live, divides_by_all=divides_by_all)
        hook = _IdleRank(self, steps)
        # ``Join`` does not report an exception that ends it, but then its hooks are gone.
        self._hook = weakref.ref(hook)
        return hook

    @calling("Join")
    def notify(self) -> bool:
        """Report to ``Join`` that this rank has inputs; return false if the context is over. Collective.

        Raises:
            RuntimeError: A rank has no inputs left, and ``Join`` has ``throw_on_early_termination=True``.
        """
        if not self.is_live():
            self.end()
            return False
        try:
            work = Join.notify_join_context(self)
        except RuntimeError:
            self.end()
            raise
        wait_for_work(work, self._ranks.process_group, "Join")
        return True

    def is_live(self) -> bool:
        """Say whether the context still lasts; an exception may have ended it."""
        return self._hook is not None and self._hook() is not None and bool(self._join_config.enable)

    def end(self) -> None:
        """End the context on this rank."""
        steps, self._steps, self._hook = self._steps, None, None
        if steps is not None:
            steps.end()


class DDPView(UnevenInputs):
    """The result of ``as_ddp``, a ``Joinable`` for torch's ``Join``; it is held by its module, not the other way."""

    def __init__(self, module: nn.Module, state: ReplicateState) -> None:
        super().__init__(weakref.ref(module), None)
        self._state: ReplicateState = weakref.proxy(state)

    @property
    def device(self) -> torch.device:
        """The device on which gradients are averaged."""
        return self._state.grid.everyone.device

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group of ranks that average gradients."""
        return self._state.grid.everyone.process_group

    def register_comm_hook(self, state: object, hook: HookFunction) -> None:
        """Call ``composable.register_comm_hook``; the hook cannot be removed. Collective."""
        reduce_by_hook(self.module, state, hook)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the module, of any shapes."""
        return self.module.parameters()

    @property
    def _has_rebuilt_buckets(self) -> bool:
        """Whether all later backwards have the same buckets as this one; ``hook_with_zero_step`` reads it."""
        return self._state.reducer.exchange.arrangement.is_rebuilt


class _IdleRank(JoinHook):
    """The hooks that ``Join`` calls: in each step on a rank without inputs, and at the end on all ranks."""

    def __init__(self, view: UnevenInputs, steps: JoinSteps) -> None:
        self._view = view
        self._steps = steps

    @annotating("Join")
    def main_hook(self) -> None:
        """Take part in one step of the other ranks, which wait for this one.

        An error of this rank is raised here; the hang watchdog reports it to ranks that wait for this one.
        """
        step_alone = self._view.step_alone
        try:
            if self._steps.follow(keeps_own=step_alone is None) and step_alone is not None:
                step_alone()
        except BaseException:
            # The error ends ``Join`` on this rank, which then no longer follows the others.
            self._view.end()
            raise

    def post_hook(self, is_last_joiner: bool) -> None:
        """End the join: give all ranks the unsharded values of the rank that ran longest. Collective."""
        self._steps.finish_join()
        self._view.end()


def _ranks_of(module: nn.Module) -> Ranks:
    """Return the ranks that share annotated modules at or below ``module``; ``UsageError``: none, or several sets."""
    found = [state.grid.everyone for state in states_of(module.modules())]
    if not found:
        raise nothing_annotated("joinable", module)
    ranks, *others = found
    for one in others:
        if {*one.numbers} != {*ranks.numbers}:
            raise UsageError(
                f"joinable got modules on different ranks: {list(ranks.numbers)} and {list(one.numbers)}",
                at=describe_module(module),
                fix="annotate all of it on the same ranks, or give every rank as many inputs",
            )
    world = Ranks.of_world()
    # ``Join`` accepts joinables of one group only, and several groups may have all ranks: take the default group.
    return Ranks.of(world.process_group, ranks.device) if {*world.numbers} == {*ranks.numbers} else ranks


def _states_to_join(module: nn.Module) -> list[AnnotationState]:
    """Return the states of roots and of ``replicate`` at or below ``module``, in an order equal on all ranks.

    Raises ``UsageError`` if one belongs to modules around ``module`` too, or has ``static_graph=True``.
    """
    modules = dict.fromkeys(module.modules())
    found: dict[AnnotationState, None] = {}
    for state in states_of(modules):
        around = state.outermost()
        beyond = [each for each in (*around.modules, *state.modules) if each not in modules]
        if beyond:
            raise UsageError(
                "joinable got a part of the modules that are annotated together",
                at=", ".join(map(describe_module, beyond)),
                fix="call joinable on a module around all of it, such as the whole model",
            )
        if isinstance(state, ReplicateState) and state.reducer.options.static_graph:
            raise UsageError(
                "uneven inputs of a module with static_graph=True: a rank without inputs has no graph",
                at=", ".join(map(describe_module, state.modules)),
                fix="replicate without static_graph, or give every rank as many inputs",
            )
        found[around] = None
    return list(found)


def _check_stepped(owners: Sequence[Owner]) -> None:
    """Refuse handles with trained parameters that no optimizer steps inside backward: idle ranks need a ``step``."""
    for handle in [handle for owner in owners if isinstance(owner, Root) for handle in owner.handles]:
        if not handle.steppers and any(param.sharded.requires_grad for param in handle.params):
            raise UsageError(
                "joinable got no step, and a rank without inputs has to step its own shards",
                at=handle.described,
                fix="pass joinable(model, step=...) a function that does what the loop does after backward: clip, "
                "optimizer.step(), optimizer.zero_grad()",
            )

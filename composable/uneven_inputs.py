"""Ranks with different numbers of inputs: annotated models as what ``torch.distributed.algorithms.join.Join`` takes.

What ranks tell each other is in ``uneven_steps.py``, what they do about it in ``uneven_parts.py``.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from composable.arguments import check_bool, check_module, described
from composable.collectives import annotating, calling, wait_for_work
from composable.errors import ComposableError, ConfigError, DesyncError, UsageError, place_of_rank
from composable.uneven_parts import Part, check_shares, find_parts, ranks_of
from composable.uneven_steps import STEP, Steps

__all__ = ["UnevenInputs", "joinable"]

# What all ranks go through to the end of the step, also where it raises.
_ENDINGS = {"hand_over", "finish"}


def joinable(module: nn.Module, *, step: Callable[[], object] | None = None) -> "UnevenInputs":
    """Return what ``torch.distributed.algorithms.join.Join`` takes for a model with ``fully_shard`` or ``replicate``.

    Ranks that run out of inputs then follow the others to the end of theirs. No communication; making a ``Join`` of it
    is collective, and decides the root as a first forward does.

    Args:
        module: Has all annotated modules of the model at or below it.
        step: What the loop does between a backward that averages gradients and the next forward, such as clipping,
            ``optimizer.step()``, ``optimizer.zero_grad()``. Called on ranks without inputs after each such backward of
            the others, since each rank alone has its shards. May be left out where nothing sharded is trained,
            or ``step_in_backward`` does it.

    Raises:
        ConfigError: ``module`` is no module, or ``step`` no function.
        UsageError: Nothing is annotated there, or by different ranks of which none are all.
    """
    check_module("module", module)
    if step is not None and not callable(step):
        raise ConfigError(f"step is {described(step)}", fix="pass a function that takes no arguments")
    return UnevenInputs(module, step)


class UnevenInputs(Joinable):
    """The result of ``joinable``; a ``Joinable`` for ``torch.distributed.algorithms.join.Join``.

    Attributes:
        module: The model.
    """

    def __init__(self, module: nn.Module, step: Callable[[], object] | None) -> None:
        super().__init__()
        self.module = module
        self._step = step
        self._ranks = ranks_of(module)
        self._parts: list[Part] = []
        self._steps: Steps | None = None
        self._hook: weakref.ref[JoinHook] | None = None

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` counts the ranks that still have inputs."""
        return self._ranks.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that ``Join`` counts: all that share anything of the model."""
        return self._ranks.process_group

    @annotating("Join")
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return what stands in for this rank once it has no inputs left; called by ``Join``. Collective.

        Args:
            **kwargs: ``divide_by_initial_world_size``: whether sums of gradients are divided by the number of all
                ranks, the default, or of those that still have inputs; and what is for other joinables.

        Raises:
            ConfigError: ``divide_by_initial_world_size`` is no bool.
            UsageError: Sharded parameters are trained, and nothing steps them on ranks without inputs; or a replicated
                module has ``static_graph=True``; or parts of the model belong to a root around it; or ranks have
                different numbers of annotated modules.
            DesyncError: Ranks chose different things.
        """
        divides_by_all = kwargs.get("divide_by_initial_world_size", True)
        with self._ranks.agreed():
            check_bool("divide_by_initial_world_size", divides_by_all)
            parts = find_parts(self.module)
        text = f"divide_by_initial_world_size={divides_by_all}, {'a' if self._step else 'no'} step"
        self._ranks.compare(
            text,
            shown=text,
            what="the ranks prepare for uneven inputs in different ways",
            fix="call joinable and Join with the same arguments on every rank",
        )
        # A part that ran on its own so far may belong to the root around it now.
        parts = list({part.connect(): part for part in parts}.values())
        check_shares(parts, self._ranks)
        with self._ranks.agreed():
            self._check_step(parts)
        self.end()

        def begin(running: set[int]) -> None:
            for part in parts:
                part.begin_step(running, divides_by_all=divides_by_all)

        steps = Steps(
            self._ranks,
            self._notify,
            [flat for part in parts for flat in part.buffers()],
            begin,
            lambda number, *told: parts[number].describe(*told),
            self._is_live,
        )
        for number, part in enumerate(parts):
            part.tell_by(number, steps)
        self._parts, self._steps = parts, steps
        hook = _Shadow(self, steps, parts)
        # ``Join`` does not say when an exception ends it: its hooks are gone then.
        self._hook = weakref.ref(hook)
        return hook

    def _check_step(self, parts: Sequence[Part]) -> None:
        if self._step is not None or not torch.is_grad_enabled():
            return
        for part in parts:
            handle = part.unstepped()
            if handle is not None:
                raise UsageError(
                    "a rank without inputs has shards that it alone can step, and joinable was given no step",
                    at=f"{place_of_rank()}, {handle.described}",
                    fix="pass joinable(model, step=...) a function that does what the loop does after backward: clip, "
                    "optimizer.step(), optimizer.zero_grad()",
                )

    @calling("Join")
    def _notify(self) -> bool:
        """Let ``Join`` know that this rank has inputs; false: the context is over. Collective.

        Raises:
            RuntimeError: A rank has no inputs left, and ``Join`` was told to throw then.
        """
        if not self._is_live():
            self.end()
            return False
        try:
            work = Join.notify_join_context(self)
        except RuntimeError:
            self.end()
            raise
        wait_for_work(work, self._ranks.process_group, "Join")
        return True

    def _is_live(self) -> bool:
        """Say whether the context lasts, or an exception has ended it."""
        return self._hook is not None and self._hook() is not None and bool(self._join_config.enable)

    def step_here(self) -> None:
        """Step the shards of this rank, which has no inputs."""
        if self._step is not None:
            self._step()

    def end(self) -> None:
        """The context is over."""
        if self._steps is not None:
            self._steps.end()
        for part in self._parts:
            part.close()
        self._parts, self._steps, self._hook = [], None, None


class _Shadow(JoinHook):
    """What ``Join`` calls on a rank without inputs, and at the end on all."""

    def __init__(self, view: UnevenInputs, steps: Steps, parts: Sequence[Part]) -> None:
        self._view = view
        self._steps = steps
        self._parts = parts

    @annotating("Join")
    def main_hook(self) -> None:
        """Do on this rank what a step of the others waits for.

        What goes wrong here is raised here; others that wait for this rank are told by the watch over ranks that wait.
        """
        try:
            with torch.no_grad():
                was_following, self._steps.is_following = self._steps.is_following, True
                for part in self._parts:
                    part.stand_by(is_first=not was_following, keeps_own=self._view._step is None)
                self._steps.begin(self._steps.meet(None))
                is_due = self._follow()
            if is_due:
                self._view.step_here()
        except BaseException:
            # It leaves ``Join``: what goes on is no follower.
            self._view.end()
            raise

    def _follow(self) -> bool:
        """Do what ranks with inputs tell, until they end the step; returns whether to step."""
        failure: ComposableError | None = None
        while True:
            number, what, args = next(one for one in self._steps.meet(None) if one is not None)
            if number == STEP and what == "drop":
                self._steps.drop(args[0])
                continue
            if number == STEP:
                if failure is not None:
                    raise failure
                return what == "end" and bool(args[0])
            try:
                self._parts[number].follow(what, args)
            except ComposableError as error:
                if what not in _ENDINGS or isinstance(error, DesyncError):
                    raise
                failure = failure or error

    def post_hook(self, is_last_joiner: bool) -> None:
        """No rank has inputs left: give all what is not sharded of the one that ran longest. Collective."""
        steps = self._steps
        steps.is_following = True
        numbers = self._view._ranks.numbers
        begun = dict(zip(numbers, self._view._ranks.objects(steps.begun), strict=True))
        with torch.no_grad():
            for part in self._parts:
                part.finish(begun)
        self._view.end()

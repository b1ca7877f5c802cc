"""Gradients that ``no_sync`` kept and a backward left out.

An annotation averages its kept gradients in its own backward. If the last micro-batch does not call an annotated
module, its gradients are averaged in the backward of another annotation that the same ``no_sync`` covered.
"""

from collections.abc import Iterable
from functools import partial
from typing import TypeAlias

import torch

from composable.annotation.replicated import ReplicateState
from composable.annotation.root import FullyShardState
from composable.annotation.states import AnnotationState
from composable.comm import Ranks
from composable.engine import StepListener
from composable.ground.frames import in_backward
from composable.ground.ownership import HeldWeakly
from composable.ground.torch_hooks import in_backward_of_nothing

_State: TypeAlias = FullyShardState | ReplicateState


class KeptGradients(StepListener):
    """Annotations that one call set to synchronise again; waits for the next backward in which any of them does.

    All ranks make it alike. In that backward the ranks exchange which annotations keep gradients and take no part:
    ranks may have called different modules before.
    """

    _sharded = HeldWeakly[FullyShardState]()
    _replicated = HeldWeakly[ReplicateState]()

    def __init__(self, sharded: Iterable[FullyShardState] = (), replicated: Iterable[ReplicateState] = ()) -> None:
        self._sharded = sharded
        self._replicated = replicated
        for state in self._states():
            state.listeners.add(self)

    @staticmethod
    def note(states: Iterable[AnnotationState]) -> None:
        """Note that ``states`` synchronise again; a single annotation averages its kept gradients by itself."""
        given = list(states)
        sharded = dict.fromkeys(one for one in given if isinstance(one, FullyShardState))
        # If it follows, it takes part in every backward of the root around.
        replicated = dict.fromkeys(one for one in given if isinstance(one, ReplicateState) and not one.follows)
        known: list[_State] = [*sharded, *replicated]
        for one in dict.fromkeys(listener for state in known for listener in state.listeners.members):
            if isinstance(one, KeptGradients):
                sharded.update(dict.fromkeys(one._sharded))
                replicated.update(dict.fromkeys(one._replicated))
                one._forget()
        if len({state.outermost() for state in sharded}) + len(replicated) > 1:
            KeptGradients(sharded, replicated)

    def _states(self) -> list[_State]:
        return [*self._sharded, *self._replicated]

    def _forget(self) -> None:
        # What a ``no_sync`` of a part covers keeps gradients on: where that ends, `note` brings the others back.
        for state in self._states():
            units = state._handles if isinstance(state, FullyShardState) else [state.reducer]
            if not any(unit.sync_after_context for unit in units):
                state.listeners.remove(self)

    def backward_ends(self, *, averages: bool, ends: bool) -> None:
        """Let all annotations that keep gradients average them in a backward that averages. Collective."""
        if not averages:
            return
        self._forget()
        groups: dict[Ranks, list[_State]] = {}
        # Of modules that have not run yet, also states that have no root.
        members: list[_State] = [*dict.fromkeys(state.outermost() for state in self._sharded), *self._replicated]
        for one in members:
            groups.setdefault(one.grid.everyone, []).append(one)
        kept: list[_State] = []
        for ranks, members in sorted(groups.items(), key=lambda item: item[0].order):
            keeps = [self._keeps(member) for member in members]
            # Under Join, all ranks with inputs do the same, and the ranks without inputs follow them.
            if not any(member.is_joined for member in members):
                keeps = ranks.any_of(keeps)
            kept += [member for member, is_kept in zip(members, keeps, strict=True) if is_kept]
        if kept:
            # A root that the user finalizes by hand sends its event outside of any backward.
            _end(kept) if in_backward() else in_backward_of_nothing(partial(_end, kept))

    def _keeps(self, member: _State) -> bool:
        """Say whether ``member``, or a handle below its root, has kept gradients, and synchronises now."""
        if not isinstance(member, FullyShardState):
            return member.reducer.synchronises and member.reducer.round.kept > 0
        handles = [] if member.root is None else member.root.handles
        return any(handle.is_unsynced and handle.requires_gradient_sync for handle in handles)


def _end(members: Iterable[_State]) -> None:
    """Let ``members`` average their kept gradients in the running backward, unless they do so anyway."""
    with torch.no_grad():
        for member in members:
            if isinstance(member, FullyShardState):
                member.lazy_init().scheduler.backwards.begin_backward()
            else:
                member.transport.connect()
                member.reducer.end_kept()

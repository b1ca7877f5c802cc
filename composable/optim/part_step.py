"""A torch optimizer's step on some of its sharded parameters, as plain local tensors.

As in ``local_step.py``, but nothing is planned or merged: which parameters a step has differs from call to call.
"""

from collections import defaultdict
from operator import is_
from typing import Any

import torch

from composable.engine import ELEMENT_WISE
from composable.optim.entries import cut_state
from composable.optim.step_plan import Group, State, join_state, lend_to, make_stand_in, show_unit
from composable.optim.units import Piece, Unit
from composable.ragged import RaggedDTensor

__all__ = ["PartStep"]


class PartStep:
    """Stands in for an optimizer while that steps sharded parameters: the same results to the bit, in less time.

    Its ``state`` and ``param_groups`` are what torch's ``step`` reads in place of the optimizer's.

    Args:
        optimizer: Of any class; without effect unless it computes each element from that element alone.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._units: dict[int, Unit] = {}
        # With the values that its state had.
        self._lent: list[tuple[Unit, list[object]]] = []
        self._is_element_wise = type(optimizer) in ELEMENT_WISE
        # Found when the step asks for them: hooks before it set gradients and options.
        self._groups: list[Group] | None = None
        self._stand_in: Any = make_stand_in(optimizer, self._local_groups)
        vars(self._stand_in).clear()

    def begin(self) -> Any:
        """Return what is to step in place of the optimizer, on the parameters that this has now.

        ``None``: the optimizer itself is, since not all of them are sharded. ``end`` has to follow.
        """
        optimizer = self._optimizer
        groups = optimizer.param_groups
        if not self._is_element_wise or any(type(one) is not RaggedDTensor for it in groups for one in it["params"]):
            return None
        # The rest as it is now: users set attributes of optimizers too.
        state: State = defaultdict(dict)
        vars(self._stand_in).update(vars(optimizer), state=state)
        self._groups = None
        return self._stand_in

    def end(self) -> None:
        """Take the gradients away again, and bring state that the step has made to the optimizer."""
        lent, self._lent = self._lent, []
        state = vars(self._stand_in).get("state", {})
        vars(self._stand_in).clear()
        self._groups = None
        for unit, before in lent:
            unit.tensor.grad = None
            entry = state.get(unit.tensor, {})
            # As a rule steps change values in place.
            if len(entry) != len(before) or not all(map(is_, entry.values(), before)):
                show_unit(unit, entry, self._optimizer.state)

    def _local_groups(self) -> list[Group]:
        """Return the stand-in's ``param_groups``, with gradients and state in place."""
        if self._groups is None:
            state = vars(self._stand_in)["state"]
            self._groups = [
                {**group, "params": [self._lend(param, number, state) for param in group["params"]]}
                for number, group in enumerate(self._optimizer.param_groups)
            ]
        return self._groups

    def _lend(self, param: Any, group: int, state: State) -> torch.Tensor:
        unit = self._units.get(id(param))
        if unit is None or unit.pieces[0].local is not param._local_tensor:
            unit = self._units[id(param)] = Unit([Piece(param, group, None)], [0])
        known, before = self._optimizer.state, []
        if param in known:
            cut_state(known[param], param)
            entry = state[unit.tensor] = join_state(unit, known)
            before = list(entry.values())
        self._lent.append((unit, before))
        lend_to(unit.tensor, None if param.grad is None else param.grad._local_tensor)
        return unit.tensor

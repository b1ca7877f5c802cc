"""Copies of parameters in low precision, which a replicated module holds while it runs.

They are cast anew at every forward that is not inside another, all in one pass, and kept for what runs
again in backward until that ends. Autograd takes the gradient of a copy to its parameter, in the dtype that
the gradient rests in: so hooks on parameters, and ``param.grad``, are what they are without copies. What
autograd has saved of the copies lives as long as the graph does; between steps nothing is left.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from composable.casts import Lending
from composable.torch_private import alias_of, foreach_copy_, replace_flat_weights, running_transform

__all__ = ["LowPrecisionParams", "ParamSlot"]


class ParamSlot:
    """Where a parameter hangs, and what it is computed with.

    Attributes:
        module: That holds it.
        name: Its name there.
        dtype: Of its copies.
    """

    __slots__ = ("dtype", "module", "name")

    def __init__(self, module: nn.Module, name: str, dtype: torch.dtype) -> None:
        self.module = module
        self.name = name
        self.dtype = dtype


class _Lent(NamedTuple):
    """What was in a place, what was put there, and the version of that: writing counts it up."""

    slot: ParamSlot
    own: nn.Parameter
    copied: torch.Tensor
    version: int


class LowPrecisionParams(Lending):
    """Lets modules hold copies of their parameters in another dtype.

    Args:
        slots: All places of the parameters, also of tied ones.
    """

    __slots__ = ("_copies", "_has_flat_weights", "_lent", "_slots")

    def __init__(self, slots: Sequence[ParamSlot]) -> None:
        super().__init__()
        self._slots = slots
        self._has_flat_weights = any(isinstance(slot.module, nn.RNNBase) for slot in slots)
        # The second list keeps them for backward.
        self._lent: list[_Lent] = []
        self._copies: list[_Lent] = []

    def enter(self, modules: Sequence[nn.Module], *, is_outermost: bool) -> None:
        """Lend copies, made anew if this is the outermost call and no backward runs it again."""
        if is_outermost and not self.is_in_backward:
            self._depth = 0
            self._restore()
            # Optimizers may write by ways that no version counts: a step is noticed by nothing.
            self._copies = []
        super().enter(modules, is_outermost=is_outermost)

    def forget(self) -> None:
        """Drop the copies that were kept for backward, if they are not in use."""
        if not self._lent:
            self._copies = []

    def written(self) -> ParamSlot | None:
        """Return the place of a copy that was written to, if there is one."""
        return next((slot for slot, _, copied, version in self._copies if copied._version != version), None)

    def put_back(self) -> None:
        """Let the modules hold their own, as ``Lending`` does, and keep no copies."""
        super().put_back()
        self.forget()

    def _leave_backward(self, held: object) -> None:
        super()._leave_backward(held)
        self.forget()

    def _lend(self, modules: Sequence[nn.Module]) -> None:
        if self._lent:
            return
        if not self._copies:
            self._copies = _cast(self._slots)
        lent = self._copies
        # Noted first: an exception between two of them leaves none behind.
        self._lent = lent
        for slot, _, copied, _ in lent:
            slot.module._parameters[slot.name] = copied  # type: ignore[assignment]  # what it is to be computed with
        self._replace_flat_weights({id(own): copied for _, own, copied, _ in lent} if self._has_flat_weights else {})

    def _restore(self) -> None:
        lent = self._lent
        for slot, own, copied, _ in lent:
            # What was assigned meanwhile is the user's.
            if slot.module._parameters.get(slot.name) is copied:
                slot.module._parameters[slot.name] = own
        self._lent = []
        self._replace_flat_weights({id(copied): own for _, own, copied, _ in lent} if self._has_flat_weights else {})

    def _replace_flat_weights(self, others: dict[int, torch.Tensor]) -> None:
        if others:
            for module in dict.fromkeys(slot.module for slot in self._slots):
                replace_flat_weights(module, others)


def _cast(slots: Sequence[ParamSlot]) -> list[_Lent]:
    """Return a copy for each slot whose parameter has another dtype; one for those of a tied parameter."""
    found: list[tuple[ParamSlot, nn.Parameter, torch.Tensor]] = []
    low: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    sources: list[torch.Tensor] = []
    targets: list[torch.Tensor] = []
    is_transformed = running_transform() is not None
    # Inside a forward without gradients there may be a part with them.
    with torch.inference_mode(mode=False), torch.enable_grad():
        for slot in slots:
            own = slot.module._parameters.get(slot.name)
            if own is None or own.dtype is slot.dtype or not own.is_floating_point():
                continue
            key = id(own), slot.dtype
            copied = low.get(key)
            if copied is None:
                if is_transformed or type(own) is not nn.Parameter:
                    # What a functional call lends, a DTensor, an instance of a user's class: as they cast.
                    copied = own.to(slot.dtype)
                else:
                    values = torch.empty_like(own, dtype=slot.dtype, requires_grad=False)
                    sources.append(own)
                    targets.append(values)
                    copied = alias_of(own, values) if own.requires_grad else values
                    copied._is_param = True
                low[key] = copied
            found.append((slot, own, copied))
        if targets:
            with torch.no_grad():
                foreach_copy_(targets, sources)
    return [_Lent(slot, own, copied, copied._version) for slot, own, copied in found]

"""Copies of parameters in low precision, which a replicated module holds while it runs.

They are cast anew in every forward that is not inside another, and kept for what runs again in backward until
that ends. Autograd takes the gradient of a copy to its parameter, in the dtype that the gradient rests in: so hooks on
parameters, and ``param.grad``, are what they are without copies. What autograd has saved of the copies lives as long as
the graph does; between steps nothing is left.

Streams: all copies are made on the stream that is current when a forward starts; what reads them comes after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from composable.ground.casts import Lending
from composable.ground.torch_private import alias_of, foreach_copy_, replace_flat_weights, running_transform

__all__ = ["LowPrecisionParams", "ParamSlot"]


@dataclass(frozen=True, slots=True, eq=False)
class ParamSlot:
    """Where a parameter hangs, and what it is computed with.

    Attributes:
        module: That holds it.
        name: Its name there.
        dtype: Of its copies.
    """

    module: nn.Module
    name: str
    dtype: torch.dtype

    @property
    def is_to_cast(self) -> bool:
        """The parameter has another dtype."""
        param = self.module._parameters.get(self.name)
        return param is not None and param.dtype is not self.dtype


class _Copy(NamedTuple):
    """What is in a place, what is put there, and the version of that: writing counts it up."""

    slot: ParamSlot
    own: Any
    copied: torch.Tensor
    version: int


class LowPrecisionParams(Lending):
    """Lets modules hold copies of their parameters in another dtype.

    Args:
        slots: All places of the parameters, also of tied ones.
    """

    __slots__ = ("_copies", "_is_lent", "_slots")

    def __init__(self, slots: Sequence[ParamSlot]) -> None:
        super().__init__()
        self._slots = tuple(slots)
        self._copies: list[_Copy] = []
        self._is_lent = False

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
        if not self._is_lent:
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
        if self._is_lent:
            return
        # Noted first: an exception on the way leaves none behind.
        self._is_lent = True
        if not self._copies:
            self._copies = _copies_of(self._slots)
        for slot, own, copied, _ in self._copies:
            params = slot.module._parameters
            # What holds something else by now, in backward say, keeps it.
            if params.get(slot.name) is own:
                params[slot.name] = copied
        self._replace_flat_weights({id(own): copied for _, own, copied, _ in self._copies})

    def _restore(self) -> None:
        if not self._is_lent:
            return
        for slot, own, copied, _ in self._copies:
            params = slot.module._parameters
            # What was assigned meanwhile is the user's.
            if params.get(slot.name) is copied:
                params[slot.name] = own
        self._replace_flat_weights({id(copied): own for _, own, copied, _ in self._copies})
        self._is_lent = False

    def _replace_flat_weights(self, others: dict[int, Any]) -> None:
        """Exchange parameters in the lists that recurrent modules keep beside their dicts."""
        for module in {slot.module: None for slot in self._slots if isinstance(slot.module, nn.RNNBase)}:
            replace_flat_weights(module, others)


def _copies_of(slots: Sequence[ParamSlot]) -> list[_Copy]:
    """Return copies of what is in ``slots`` and has another dtype; one for all places of a tied parameter."""
    found: list[tuple[ParamSlot, Any]] = []
    made: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    plain: list[tuple[nn.Parameter, torch.Tensor]] = []
    is_transformed = running_transform() is not None
    # Inside a forward without gradients there may be a part with them.
    with torch.inference_mode(mode=False), torch.enable_grad():
        for slot in slots:
            own, dtype = slot.module._parameters.get(slot.name), slot.dtype
            if own is None or own.dtype is dtype or not own.is_floating_point():
                continue
            found.append((slot, own))
            if (id(own), dtype) in made:
                continue
            if is_transformed or type(own) is not nn.Parameter:
                # What a functional call lends, a DTensor, an instance of a user's class: as they cast.
                made[id(own), dtype] = own.to(dtype)
            else:
                value = torch.empty_like(own, dtype=dtype, requires_grad=False)
                plain.append((own, value))
                made[id(own), dtype] = value
        with torch.no_grad():
            if plain:
                foreach_copy_([value for _, value in plain], [own for own, _ in plain])
        for own, value in plain:
            copied = alias_of(own, value) if own.requires_grad else value
            copied._is_param = True  # type: ignore[attr-defined]  # as modules ask of their parameters
            made[id(own), value.dtype] = copied
    held = [(slot, own, made[id(own), slot.dtype]) for slot, own in found]
    return [_Copy(slot, own, copied, copied._version) for slot, own, copied in held]

"""One parameter's two faces: the shard that the user and the optimizer see, and the unsharded leaf.

Outside forward and backward a module holds the *sharded* parameter, a ``RaggedDTensor``
whose local tensor is a view of the handle's shard. While its handle is unsharded the
module holds the *unsharded* parameter: a plain leaf that views the handle's buffer, so
that the user's ``forward`` and autograd meet an ordinary tensor. Both live as long as the
annotation; only the entry in ``module._parameters`` changes.
"""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.errors import UsageError
from composable.planning import mark_replaced
from composable.ragged import RaggedDTensor, RaggedLayout, RaggedSpec, slice_full
from composable.storage.unfilled import mark_unfilled

__all__ = ["Owner", "ShardedParam"]

Owner = tuple[nn.Module, str]


class ShardedParam:
    """One unique parameter and every place that holds it.

    Attributes:
        fqn: Name below the handle's first module.
        owners: (module, attribute name) of every place, tied ones included.
        sharded: What ``module.parameters()`` gives: ``RaggedDTensor``, full shape.
        unsharded: Plain leaf that views the buffer; ``None`` until the first unshard.
        local: This rank's piece, a view of the handle's shard; what ``sharded`` shows, unless torch replaced it.
        start: First element of this rank's piece in the handle's shard.
        stop: Past the last one; equal to ``start`` where this rank owns nothing.
    """

    __slots__ = (
        "_empty_grad",
        "_is_flat",
        "_marks",
        "fqn",
        "local",
        "local_shape",
        "owners",
        "shape",
        "sharded",
        "spec",
        "start",
        "stop",
        "unsharded",
    )

    def __init__(
        self,
        fqn: str,
        owners: Sequence[Owner],
        original: nn.Parameter,
        spec: RaggedSpec,
        shard: torch.Tensor,
        start: int,
        stop: int,
        local_shape: Sequence[int],
    ) -> None:
        self.fqn = fqn
        self.owners = tuple(owners)
        self.shape = original.shape
        self.spec = spec
        self.start = start
        self.stop = stop
        self.local_shape = tuple(local_shape)
        self._is_flat = len(self.local_shape) == 1
        self.local = self.piece_of(shard)
        self.sharded = nn.Parameter(RaggedDTensor.wrap(self.local, spec), requires_grad=original.requires_grad)
        self.unsharded: nn.Parameter | None = None
        self._empty_grad: RaggedDTensor | None = None
        # Marks that users put on parameters (say, `no_weight_decay`) must survive.
        _copy_marks(original, self.sharded)
        self._marks = self.sharded.__dict__

    def piece_of(self, shard: torch.Tensor) -> torch.Tensor:
        """Return this rank's piece of the parameter as a view of a shard [S]."""
        return shard[self.start : self.stop].view(self.local_shape)

    @property
    def is_attached(self) -> bool:
        """The sharded parameter shows the handle's shard; torch did not give it other memory."""
        return self.ragged._local_tensor is self.local

    def write_full(self, full: torch.Tensor) -> None:
        """Keep this rank's piece of a full value, of any dtype and device, in the shard."""
        self.local.data.copy_(slice_full(full.detach(), self.layout))

    def show(self, local: torch.Tensor) -> None:
        """Let the sharded parameter, which stays the same object with the same marks, show other memory."""
        sharded = self.ragged
        if sharded.device == local.device:
            sharded._local_tensor = local
        else:
            fresh = nn.Parameter(RaggedDTensor.wrap(local, self.spec), requires_grad=sharded.requires_grad)
            torch.utils.swap_tensors(sharded, fresh)
            self._empty_grad = None
        if sharded.__dict__ is not self._marks:
            sharded.__dict__.update(self._marks)
            self._marks = sharded.__dict__

    def make_room(self, device: torch.device) -> None:
        """Let the sharded parameter show memory of its own, marked as not filled."""
        local = torch.empty(self.local_shape, dtype=self.spec.dtype, device=device)
        mark_unfilled(local)
        self.show(local)

    def take(self, value: torch.Tensor) -> None:
        """Adopt the value of a parameter that replaced the sharded one: ragged in the same cut, or full.

        Raises:
            UsageError: It has another shape, or is cut otherwise.
        """
        if isinstance(value, RaggedDTensor) and value._spec.layout.matches(self.layout):
            piece = value._local_tensor
        elif isinstance(value, DTensor) or value.shape != self.shape:
            raise UsageError(
                f"a parameter of shape {list(self.shape)} was replaced by {type(value).__name__} {list(value.shape)}",
                at=f"parameter {self.fqn!r}",
                fix="change values in place, or load tensors of the full shape",
            )
        else:
            piece = slice_full(value.detach(), self.layout)
        if self.ragged.is_meta:
            if not piece.is_meta:
                self.show(piece.detach().to(self.layout.mesh.device_type, self.spec.dtype, copy=True))
        else:
            self.ragged._local_tensor.data.copy_(piece)

    @property
    def ragged(self) -> RaggedDTensor:
        """The sharded parameter, as what it is."""
        assert isinstance(self.sharded, RaggedDTensor)
        return self.sharded

    @property
    def layout(self) -> RaggedLayout:
        """Which elements each rank owns."""
        return self.ragged._spec.layout

    def make_unsharded(self, view: torch.Tensor) -> nn.Parameter:
        """Create the leaf over ``view``, a view of the buffer's ``.data`` in the full shape.

        ``.data`` gives the leaf a version counter of its own: filling the buffer again
        between forward and backward must not look like an in-place change.
        """
        self.unsharded = self.make_stand_in(view)
        return self.unsharded

    def make_stand_in(self, value: torch.Tensor) -> nn.Parameter:
        """Return a plain parameter over ``value``, for modules to hold for a while."""
        stand_in = nn.Parameter(value, requires_grad=self.sharded.requires_grad)
        _copy_marks(self.sharded, stand_in)
        stand_in._composable_managed = self.sharded._composable_managed  # type: ignore[attr-defined]  # the handle's
        # An optimizer built meanwhile would update the stand-in, and lose the update.
        mark_replaced(stand_in, self.fqn, *self.owners[0])
        return stand_in

    def is_placed(self, param: nn.Parameter) -> bool:
        """Say whether every owner holds ``param``."""
        return all(module._parameters.get(name) is param for module, name in self.owners)

    def leaf(self) -> nn.Parameter:
        """Return the unsharded parameter; its handle has been unsharded before."""
        assert self.unsharded is not None, f"{self.fqn} was never unsharded"
        return self.unsharded

    def wrap_grad(self, local: torch.Tensor) -> RaggedDTensor:
        """Wrap this rank's piece [stop - start] of a reduced gradient."""
        return RaggedDTensor.wrap(local if self._is_flat else local.view(self.local_shape), self.spec)

    def empty_grad(self) -> RaggedDTensor:
        """Return the gradient of a parameter of which this rank owns nothing, always the same one."""
        if self._empty_grad is None:
            self._empty_grad = RaggedDTensor.wrap(
                torch.empty(self.local_shape, dtype=self.sharded.dtype, device=self.sharded.device), self.spec
            )
        return self._empty_grad

    def copied(self, shard: torch.Tensor, memo: dict[int, Any]) -> "ShardedParam":
        """Return a deep copy over ``shard``, with the gradient; its owners are still this one's.

        From then on ``memo`` gives the copy's sharded parameter for both faces of this one.
        """
        twin = copy.copy(self)
        twin.unsharded = twin._empty_grad = None
        twin.local = self.piece_of(shard)
        # As a copy of any tensor: the gradient and the user's marks go along.
        known: Any = copy.deepcopy(self.sharded, memo)
        if self.is_attached:
            # Just made, or before its handle was met, say in an optimizer's groups: a tensor of its own until now.
            known._local_tensor = twin.local
        twin.sharded = known
        twin._marks = known.__dict__
        if self.unsharded is not None:
            memo[id(self.unsharded)] = twin.sharded
        return twin

    def plain_copy(self, value: torch.Tensor, grad: torch.Tensor | None) -> nn.Parameter:
        """Return an ordinary parameter with ``value`` and ``grad``, both in full shape, in this one's place."""
        plain = nn.Parameter(value, requires_grad=self.sharded.requires_grad)
        _copy_marks(self.sharded, plain)
        plain.grad = grad
        return plain

    def place(self, param: nn.Parameter) -> None:
        """Make every owner hold ``param``."""
        for module, name in self.owners:
            if has_own_setattr(module):
                setattr(module, name, param)
            else:
                module._parameters[name] = param


def has_own_setattr(module: nn.Module) -> bool:
    """Say whether the module watches assignments, as ``nn.LSTM`` does to keep its flat weights."""
    return type(module).__setattr__ is not nn.Module.__setattr__


def _copy_marks(source: nn.Parameter, target: nn.Parameter) -> None:
    for name, value in source.__dict__.items():
        if name not in target.__dict__ and not name.startswith("_"):
            setattr(target, name, value)

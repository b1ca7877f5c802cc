"""Local pieces whose class comes from another library, such as optimizer state in 8 bits.

Values go in and out by copies, for which every such class has a rule.
"""

from typing import Any

import torch

from composable.ground.torch_private import disabled_torch_function


def memory_of(local: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor that holds a piece [local_shape]: the piece itself, or the tensor inside its class."""
    return local if type(local) is torch.Tensor else getattr(local, "_composable_memory", local)


def values_of(local: torch.Tensor) -> torch.Tensor:
    """Return the values of a piece [local_shape] as a plain tensor of its dtype: its memory, or unpacked."""
    memory = memory_of(local)
    if memory is not local or not hasattr(type(local), "__tensor_flatten__"):
        return memory
    return torch.empty(local.shape, dtype=local.dtype, device=local.device).copy_(local.detach())


def write_values(local: torch.Tensor, values: torch.Tensor) -> None:
    """Pack ``values`` [local_shape] into ``local``, so that values which were unpacked from such a piece come back."""
    local.copy_(values)
    scale, codes = getattr(local, "scale", None), getattr(local, "qmap", None)
    if not isinstance(scale, torch.Tensor) or not isinstance(codes, torch.Tensor) or codes.min() >= 0:
        return
    # torchao divides each block by its largest magnitude, and its lowest code is not -1 but -0.89 in 4 bits: a block
    # whose lowest value was that magnitude would shrink with each load. It becomes what it was before it was packed: of
    # the numbers around the quotient, which was rounded, the one that gives the block back.
    blocks = values.float().reshape(scale.numel(), -1)
    lowest, place = blocks.min(1, keepdim=True)
    top = lowest / -codes.min()
    found = torch.where(lowest <= -blocks.amax(1, keepdim=True), top, lowest)
    for other in (top.nextafter(2 * top), top.nextafter(0 * top), top, lowest):
        local.copy_(blocks.scatter(1, place, other).view(values.shape))
        is_same = values_of(local).view_as(blocks).eq(blocks).all(1, keepdim=True)
        found = torch.where(is_same, other, found)
    local.copy_(blocks.scatter(1, place, found).view(values.shape))


class PackedPiece(torch.Tensor):
    """A part of the values of a packed piece, for ``torch.distributed.checkpoint``: a copy into it is packed too.

    A load reads a piece in parts. Its values are kept between them: packing a part with old values would round it.
    """

    _local: torch.Tensor
    _whole: torch.Tensor

    @staticmethod
    def values_of(local: torch.Tensor) -> torch.Tensor:
        """Return the values of the piece [local_shape]; while a load writes it in parts, as they were read."""
        values = values_of(local)
        read, packed, _ = getattr(local, "_composable_reads", (values, None, 0))
        return read if packed is not None and packed.equal(values) else values

    @classmethod
    def around(cls, part: torch.Tensor, local: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Return ``part``, of any shape, a view of ``whole``: the values [local_shape] of ``local``."""
        made = part.as_subclass(cls)
        made._local, made._whole = local, whole
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = disabled_torch_function(func, types, args, kwargs or {})
        this, name = args[0] if args else None, getattr(func, "__name__", "")
        if isinstance(this, cls) and name == "copy_":
            this._pack()
        elif isinstance(this, cls) and name in ("detach", "narrow", "view"):
            return cls.around(found, this._local, this._whole)
        return found

    def _pack(self) -> None:
        local: Any = self._local
        write_values(local, self._whole)
        # Elements that the load has not read yet.
        left = getattr(local, "_composable_reads", (None, None, self._whole.numel()))[2] - self.numel()
        local._composable_reads = (self._whole, values_of(local), left)
        if left <= 0:
            del local._composable_reads

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What is saved is a plain tensor.
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

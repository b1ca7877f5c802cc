"""Parameters packed into flat buffers of bytes, to send to another process as one message each.

Offsets are in bytes. What a receiver has to know is a ``BucketLayout``: plain data that can be pickled.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from composable.arguments import described
from composable.errors import ConfigError, place_of_rank
from composable.wording import bytes_text

__all__ = ["BucketLayout", "ParamBucket", "plan_buckets"]

# A cache line, and more than what vector loads and NCCL's fast path want.
_ALIGN_BYTES = 64


class BucketSlot(NamedTuple):
    """Where one tensor lies: in row-major order from byte ``offset``, a multiple of 64."""

    fqn: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int

    @property
    def stop(self) -> int:
        """The byte after the last one."""
        return self.offset + self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class BucketLayout:
    """What is where in a flat buffer of bytes; the bytes between are zeros.

    Attributes:
        slots: The tensors, in order of their offsets: ``fqn``, ``dtype``, ``shape`` and ``offset`` of each.
        nbytes: Of the buffer.
    """

    slots: tuple[BucketSlot, ...]
    nbytes: int

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tensors by FQN, as views of ``buffer`` in their dtypes and shapes. Not collective.

        Args:
            buffer: Bytes as ``ParamBucket.buffer`` has them: ``[nbytes]``, uint8, contiguous, on any device. A slice
                of a larger buffer will do, if it starts at a multiple of 16 elements.

        Raises:
            ConfigError: ``buffer`` is something else.
        """
        if (
            not isinstance(buffer, torch.Tensor)
            or buffer.dtype != torch.uint8
            or buffer.shape != (self.nbytes,)
            or not buffer.is_contiguous()
            or buffer.storage_offset() % 16
        ):
            raise ConfigError(
                f"buffer is {_described_buffer(buffer)}, and the bucket has {self.nbytes} bytes",
                at=place_of_rank(),
                fix="pass a contiguous uint8 tensor of the layout's nbytes, cut at a multiple of 16",
            )
        return {slot.fqn: buffer[slot.offset : slot.stop].view(slot.dtype).view(slot.shape) for slot in self.slots}


@dataclass(frozen=True)
class ParamBucket:
    """Some of a model's parameters in one buffer, as ``iter_full_params`` yields them.

    Attributes:
        layout: What is where; on every rank.
        buffer: ``[layout.nbytes]`` uint8, which nobody else holds; ``None`` on ranks that get no values.
    """

    layout: BucketLayout
    buffer: torch.Tensor | None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters by FQN, as views of the buffer; none on ranks that get no values. Not collective."""
        return {} if self.buffer is None else self.layout.views(self.buffer)


def plan_buckets(tensors: Iterable[tuple[str, torch.dtype, torch.Size]], bucket_bytes: int) -> list[BucketLayout]:
    """Pack tensors in order into buckets of at most ``bucket_bytes``, or of one tensor that is larger."""
    buckets: list[BucketLayout] = []
    slots: list[BucketSlot] = []
    for fqn, dtype, shape in tensors:
        stop = slots[-1].stop if slots else 0
        slot = BucketSlot(fqn, dtype, shape, -(-stop // _ALIGN_BYTES) * _ALIGN_BYTES)
        if slots and slot.stop > bucket_bytes:
            buckets.append(BucketLayout(tuple(slots), stop))
            slots, slot = [], slot._replace(offset=0)
        slots.append(slot)
    if slots:
        buckets.append(BucketLayout(tuple(slots), slots[-1].stop))
    return buckets


def _described_buffer(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return described(value)
    return f"a tensor {list(value.shape)} {value.dtype} of {bytes_text(value.nbytes)}"

"""The plain buffers of the modules of an annotation: listed, moved, and made equal on all ranks."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.collectives import Ranks
from composable.wording import dtype_text, join_fqn

__all__ = ["broadcast_buffer", "buffer_slots", "describe_buffers", "move_buffers"]

_Slot = tuple[nn.Module, str]


def buffer_slots(names: Mapping[nn.Module, str]) -> list[list[_Slot]]:
    """Return the places of every plain buffer, those of one tensor together."""
    found: dict[int, list[_Slot]] = {}
    for module in names:
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                found.setdefault(id(buffer), []).append((module, name))
    return list(found.values())


def describe_buffers(names: Mapping[nn.Module, str]) -> list[str]:
    """Return a line for every buffer, to compare between ranks."""
    lines = []
    for slots in buffer_slots(names):
        buffer = slots[0][0]._buffers[slots[0][1]]
        assert buffer is not None, "listed above"
        fqns = " = ".join(repr(join_fqn(names[module], name)) for module, name in slots)
        lines.append(f"buffer {fqns} {list(buffer.shape)} {dtype_text(buffer.dtype)}")
    return lines


def move_buffers(names: Mapping[nn.Module, str], device: torch.device) -> None:
    """Move buffers to the device where the parameters will be unsharded; those on meta stay."""
    for slots in buffer_slots(names):
        buffer = slots[0][0]._buffers[slots[0][1]]
        if buffer is not None and not buffer.is_meta and buffer.device.type != device.type:
            moved = buffer.to(device)
            for module, name in slots:
                module._buffers[name] = moved


def broadcast_buffer(slots: Sequence[_Slot], ranks: Ranks) -> None:
    """Make a buffer that of the first rank, on every rank: in place where it has memory, else as one new tensor."""
    buffer = slots[0][0]._buffers[slots[0][1]]
    assert buffer is not None, "only buffers have slots"
    is_source = ranks.rank == 0
    if is_source:
        values = buffer.detach().to(ranks.device).contiguous()
    else:
        values = torch.empty(buffer.shape, dtype=buffer.dtype, device=ranks.device)
    ranks.broadcast(values, 0)
    if is_source:
        return
    if buffer.is_meta or any(step == 0 for step in buffer.stride()):
        for module, name in slots:
            module._buffers[name] = values
    else:
        buffer.data.copy_(values)

"""The device of tests whose ranks are threads: the CPU, or one that all ranks share.

    with on_device("cuda", adverse=True):
        check("fully_shard", "model=gpt")

Models and inputs are made on the CPU, so that their numbers are the same everywhere, and moved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["here", "on_device", "options_of_place", "placed"]

T = TypeVar("T", bound="nn.Module | torch.Tensor")


class _Place:
    device = torch.device("cpu")
    adverse = False
    backend = ""


@contextmanager
def on_device(device: str, *, adverse: bool = False, backend: str = "") -> Iterator[None]:
    """Run the ranks of ``run_threads``, and the one process beside them, on ``device``, over ``backend``."""
    before = _Place.device, _Place.adverse, _Place.backend
    _Place.device, _Place.adverse, _Place.backend = torch.device(device), adverse, backend
    try:
        yield
    finally:
        _Place.device, _Place.adverse, _Place.backend = before


def here() -> torch.device:
    """Return the device."""
    return _Place.device


def options_of_place() -> dict[str, Any]:
    """Return the arguments of a simulation whose ranks share the device."""
    if _Place.device.type == "cpu":
        return {}
    from composable.testing.device_streams import SimulatedDevice  # The core is tested where there is none.

    device = torch.device(_Place.device.type, 0)
    return {"device": SimulatedDevice(device, backend=_Place.backend), "adverse": _Place.adverse}


def placed(one: T) -> T:
    """Move a module or a tensor to the device; a module on the meta device stays."""
    if _Place.device.type == "cpu" or (isinstance(one, nn.Module) and any(param.is_meta for param in one.parameters())):
        return one
    return one.to(_Place.device)

"""Where shards and reduced gradients rest between uses: on the device that computes, or on the host.

Memory that a device copies to or from without the host waiting has to be page-locked.
"""

from dataclasses import dataclass

import torch

from composable.planning import OffloadPolicy

__all__ = ["RestingPlace"]


@dataclass(frozen=True)
class RestingPlace:
    """A kind of memory.

    Attributes:
        device: Where it is.
        is_elsewhere: Not where the ranks talk and compute: what rests there is copied to be used.
        pins: It is page-locked, so that these copies need not wait.
    """

    device: torch.device
    is_elsewhere: bool = False
    pins: bool = False

    @staticmethod
    def under(policy: OffloadPolicy, device: torch.device) -> "RestingPlace":
        """Return where a policy lets rest what is used on ``device``; without a device that is the host anyway."""
        if not policy.is_offloading or device.type == "cpu":
            return RestingPlace(device)
        return RestingPlace(torch.device("cpu"), is_elsewhere=True, pins=policy.pins)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new memory there, with undefined content."""
        return torch.empty(numel, dtype=dtype, device=self.device, pin_memory=self.pins)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new memory there, zero."""
        return torch.zeros(numel, dtype=dtype, device=self.device, pin_memory=self.pins)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, or its values in page-locked memory if it lies here and has to be in such."""
        if not self.pins or tensor.device.type != self.device.type or tensor.is_pinned():
            return tensor
        return tensor.pin_memory()

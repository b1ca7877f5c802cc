"""Where shards, gradients and optimizer state rest between uses, as data.

Nothing here copies anything: the copies happen on the way to the buffers and from them, see ``storage/``.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from composable.errors import ConfigError

__all__ = ["NO_OFFLOAD", "CPUOffloadPolicy", "OffloadPolicy", "as_offload"]

_FIX = "pass a composable.CPUOffloadPolicy, or an OffloadPolicy to offload nothing"


@dataclass(frozen=True)
class OffloadPolicy:
    """Nothing is offloaded: all rests on the device of the mesh."""

    @property
    def is_offloading(self) -> bool:
        """Something rests on the host."""
        return False

    @property
    def pins(self) -> bool:
        """What rests on the host is page-locked."""
        return False

    def __str__(self) -> str:
        """Return what the plan prints; empty where nothing is offloaded."""
        return ""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and so the optimizer's state rest in host memory, and the optimizer steps there.

    Each gather first copies this rank's shard to the device, each reduction its result to the host. Without a
    device, on a mesh of CPUs, that is where they are already, and nothing changes.

    Attributes:
        pin_memory: Page-lock the host memory, so that copies run beside the computation. Without it the host
            waits for each copy.

    Raises:
        ConfigError: ``pin_memory`` is no bool.

    Source: ZeRO-Offload, arXiv 2101.06840.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pin_memory, bool):
            raise ConfigError(f"pin_memory of the offload policy is {self.pin_memory!r:.80}", fix="pass True or False")

    @property
    def is_offloading(self) -> bool:
        return True

    @property
    def pins(self) -> bool:
        return self.pin_memory

    def __str__(self) -> str:
        pinned = "pinned" if self.pin_memory else "pageable"
        return f"shards, gradients and optimizer state rest in {pinned} host memory"


def as_offload(policy: object) -> OffloadPolicy:
    """Return a policy as one of ours: also torch's, of either of its sharded data parallels; ``None`` asks for nothing.

    Raises:
        ConfigError: It is none, or asks for what there is not.
    """
    if policy is None:
        return NO_OFFLOAD
    if isinstance(policy, OffloadPolicy):
        return policy
    # By their names, as nothing of torch's sharded data parallels is imported here.
    name = type(policy).__name__
    if is_dataclass(policy) and not isinstance(policy, type):
        asked = {one.name: getattr(policy, one.name) for one in fields(policy)}
        if name == "OffloadPolicy" and not asked:
            return NO_OFFLOAD
        if name == "CPUOffloadPolicy" and asked.keys() == {"pin_memory"}:
            return CPUOffloadPolicy(**asked)
        if name == "CPUOffload" and asked.keys() == {"offload_params"}:
            return _of_flag(asked["offload_params"])
    raise ConfigError(f"offload_policy is {policy!r:.80}", fix=_FIX)


def _of_flag(offloads: Any) -> OffloadPolicy:
    if not isinstance(offloads, bool):
        raise ConfigError(f"offload_params of the offload policy is {offloads!r:.80}", fix="pass True or False")
    return CPUOffloadPolicy() if offloads else NO_OFFLOAD


NO_OFFLOAD = OffloadPolicy()

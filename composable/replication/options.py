"""The options of ``replicate``, checked."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch

from composable.errors import ConfigError
from composable.ground.names import check_bool, check_device, check_number, described
from composable.replication.delay import DelayedAllReduce


@dataclass(frozen=True)
class ReplicateArguments:
    """The arguments of ``replicate`` that say how it averages, checked: two are made from other arguments.

    Raises ``ConfigError`` if an option is wrong, or two options exclude each other.
    """

    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    broadcast_buffers: bool | None = None
    forward_sync_buffers: bool | None = None
    init_sync: bool = True
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    fixed_buckets: bool = False
    delay: DelayedAllReduce = field(
        default_factory=DelayedAllReduce
    )  # Gradients that wait for the gradient of another parameter.
    policy: str = ""  # The mixed precision policy, as text; "": there is none.

    def __post_init__(self) -> None:
        for name in ("find_unused_parameters", "init_sync", "gradient_as_bucket_view", "static_graph", "fixed_buckets"):
            check_bool(name, getattr(self, name))
        for name in ("broadcast_buffers", "forward_sync_buffers"):
            check_bool(name, getattr(self, name), or_none=True)
        check_number("bucket_cap_mb", self.bucket_cap_mb, above=0.0, fix="pass a number of MiB above zero")
        if self.static_graph and self.fixed_buckets:
            raise ConfigError(
                "both static_graph and fixed_buckets are given: the first backward of a static graph has one bucket",
                fix="leave static_graph out",
            )
        if self.broadcast_buffers is not None and self.forward_sync_buffers is not None:
            raise ConfigError(
                "both broadcast_buffers and forward_sync_buffers are given",
                fix="pass forward_sync_buffers alone; with broadcast_buffers=False buffers differ from the start",
            )

    @property
    def lines(self) -> list[str]:
        """One text per option, to compare between ranks; ``gradient_as_bucket_view`` may differ between ranks."""
        shared = (one.name for one in fields(self) if one.name != "gradient_as_bucket_view")
        return [f"option {name}={getattr(self, name)}" for name in shared]

    @property
    def cap_bytes(self) -> int:
        """The most bytes of a bucket that holds more than one parameter."""
        return int(min(self.bucket_cap_mb, 2**40) * 2**20)


def choose_device(device_ids: object, device_type: str) -> torch.device:
    """Return the one device in the list ``device_ids``; ``None``: any device of the type that averages gradients.

    Raises ``ConfigError`` if the list does not hold exactly one device, or the device has another type.
    """
    if device_ids is None:
        return torch.device(device_type)
    if not isinstance(device_ids, Sequence) or isinstance(device_ids, str) or len(device_ids) != 1:
        what = device_ids if isinstance(device_ids, list | tuple) else described(device_ids)
        raise ConfigError(f"device_ids is {what}", fix="pass a list of one device, or None: a rank has one")
    check_device("device_ids[0]", device_ids[0])
    device = torch.device(device_ids[0])
    if device.type != device_type:
        what = f"device_ids[0] is {device}, and gradients are averaged on {device_type}"
        raise ConfigError(what, fix="pass the device of the parameters, or a mesh of its type")
    return device

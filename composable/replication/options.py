"""What the user chose for one ``replicate``, checked."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import nn

from composable.errors import ConfigError, place_of_rank
from composable.ground.names import check_bool, check_device, check_number, described

__all__ = ["BucketOptions", "DelayedAllReduce", "ReplicateOptions", "check_device_of", "choose_delay", "choose_device"]


# Each rank may choose for itself.
_LOCAL = {"gradient_as_bucket_view"}


@dataclass(frozen=True)
class DelayedAllReduce:
    """Gradients that are not sent before that of another parameter has arrived.

    Attributes:
        params: Whose gradients, by their place among all.
        trigger: Which parameter they wait for.
    """

    params: frozenset[int]
    trigger: int

    def order(self, order: Sequence[int]) -> list[int]:
        """Return an order of arrival with the delayed ones behind the one they wait for."""
        at = list(order).index(self.trigger) + 1
        before = [index for index in order[:at] if index not in self.params]
        after = [index for index in order[at:] if index not in self.params]
        return [*before, *(index for index in order if index in self.params), *after]


@dataclass(frozen=True)
class BucketOptions:
    """What the user chose; equal on all ranks.

    Attributes:
        cap_bytes: Most bytes of a bucket that holds more than one parameter.
        find_unused: Parameters without a gradient are no error.
        grads_as_views: After backward ``param.grad`` is a view of its bucket, not a copy.
        static_graph: Every backward gives the same parameters as many gradients.
        delay: Gradients that wait for another; ``None``: none do.
        has_policy: There is a mixed precision policy.
    """

    cap_bytes: int = 25 * 2**20
    find_unused: bool = False
    grads_as_views: bool = True
    static_graph: bool = False
    delay: DelayedAllReduce | None = None
    has_policy: bool = False


@dataclass(frozen=True)
class ReplicateOptions:
    """Arguments of ``replicate``, under the names they have there.

    Raises:
        ConfigError: One of them is wrong, or two exclude each other.
    """

    bucket_cap_mb: float = 25
    find_unused_parameters: bool = False
    broadcast_buffers: bool | None = None
    forward_sync_buffers: bool | None = None
    init_sync: bool = True
    gradient_as_bucket_view: bool = True
    static_graph: bool = False

    def __post_init__(self) -> None:
        for name in ("find_unused_parameters", "init_sync", "gradient_as_bucket_view", "static_graph"):
            check_bool(name, getattr(self, name))
        for name in ("broadcast_buffers", "forward_sync_buffers"):
            check_bool(name, getattr(self, name), or_none=True)
        check_number("bucket_cap_mb", self.bucket_cap_mb, above=0.0, fix="pass a number of MiB above zero")
        if self.broadcast_buffers is not None and self.forward_sync_buffers is not None:
            raise ConfigError(
                "both broadcast_buffers and forward_sync_buffers are given",
                at=place_of_rank(),
                fix="pass forward_sync_buffers alone; with broadcast_buffers=False buffers differ from the start",
            )

    @property
    def lines(self) -> list[str]:
        """One text per option, to compare between ranks."""
        return [f"option {one.name}={getattr(self, one.name)}" for one in fields(self) if one.name not in _LOCAL]

    @property
    def starts_with_equal_buffers(self) -> bool:
        """Buffers are broadcast at annotation."""
        return self.init_sync and self.broadcast_buffers is not False

    @property
    def keeps_buffers_equal(self) -> bool:
        """Buffers are broadcast before each training forward."""
        return self.broadcast_buffers is not False and self.forward_sync_buffers is not False

    def bucket_options(self, delay: DelayedAllReduce | None) -> BucketOptions:
        """Return what the reducer reads."""
        return BucketOptions(
            cap_bytes=int(min(self.bucket_cap_mb, 2**40) * 2**20),
            find_unused=self.find_unused_parameters,
            grads_as_views=self.gradient_as_bucket_view,
            static_graph=self.static_graph,
            delay=delay,
        )


def choose_device(device_ids: object, device_id: object) -> torch.device | None:
    """Return the one device that either argument names; ``None``: neither is given.

    Raises:
        ConfigError: Both are given, or there is more than one device, or it is none.
    """
    if device_ids is not None and device_id is not None:
        raise ConfigError("both device_ids and device_id are given", at=place_of_rank(), fix="pass one of them")
    name, chosen = "device_id", device_id
    if device_ids is not None:
        if not isinstance(device_ids, Sequence) or isinstance(device_ids, str) or len(device_ids) != 1:
            what = device_ids if isinstance(device_ids, list | tuple) else described(device_ids)
            raise ConfigError(
                f"device_ids is {what}", at=place_of_rank(), fix="pass a list of one device, or None: a rank has one"
            )
        name, (chosen,) = "device_ids[0]", device_ids
    if chosen is None:
        return None
    check_device(name, chosen)
    assert isinstance(chosen, torch.device | str | int), "checked above"
    return torch.device(chosen)


def check_device_of(params: Sequence[tuple[str, torch.Tensor]], device: torch.device) -> None:
    """Raise unless ``params``, by FQN and of any shapes, are on ``device``.

    Raises:
        ConfigError: One is elsewhere.
    """
    for fqn, param in params:
        if param.device.type != device.type or (device.index is not None and param.device.index != device.index):
            raise ConfigError(
                f"parameter is on {param.device}, and the device that was given is {device}",
                at=f"{place_of_rank()}, parameter {fqn!r}",
                fix=f"move the module there first, or pass device_ids=[{str(param.device)!r}] or none",
            )


def choose_delay(
    named: object, trigger: object, params: Sequence[tuple[str, nn.Parameter]]
) -> tuple[tuple[str, ...], str] | None:
    """Return the FQNs of parameters, of any shapes, whose gradients wait for another one's, and its; ``None``: none do.

    Args:
        named: ``delay_all_reduce_named_params``: (name, parameter) pairs.
        trigger: ``param_to_hook_all_reduce``.
        params: FQNs and parameters of which gradients are averaged.

    Raises:
        ConfigError: Only one of the two is given, or a parameter is none of ``params``.
    """
    if named is None and trigger is None:
        return None
    if named is None or trigger is None:
        raise ConfigError(
            "one of delay_all_reduce_named_params and param_to_hook_all_reduce is given without the other",
            at=place_of_rank(),
            fix="pass both, or none",
        )
    name = "delay_all_reduce_named_params"
    fix = "pass a list of pairs as named_parameters() gives them"
    if not isinstance(named, Iterable) or isinstance(named, str | Mapping | torch.Tensor | nn.Module):
        raise ConfigError(f"{name} is {described(named)}", at=place_of_rank(), fix=fix)
    fqns = {id(param): fqn for fqn, param in params}
    found = []
    for pair in named:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], nn.Parameter):
            raise ConfigError(f"{name} holds {described(pair)}", at=place_of_rank(), fix=fix)
        if id(pair[1]) not in fqns:
            raise _not_averaged(f"{name} holds {pair[0]!r}")
        found.append(fqns[id(pair[1])])
    if not isinstance(trigger, nn.Parameter) or id(trigger) not in fqns:
        raise _not_averaged(f"param_to_hook_all_reduce is {described(trigger)}")
    return (tuple(found), fqns[id(trigger)]) if found else None


def _not_averaged(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, whose gradient replicate does not average here",
        at=place_of_rank(),
        fix="pass parameters of the module that require a gradient and are neither ignored nor sparse",
    )

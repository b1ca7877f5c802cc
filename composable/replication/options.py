"""The options of ``replicate``, checked."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from composable.errors import ConfigError
from composable.ground.names import check_bool, check_device, check_number, described, plain_fqn
from composable.replication.managed import ReducedParam


@dataclass(frozen=True)
class DelayedAllReduce:
    """Gradients of ``params`` that are sent only after the gradient of ``trigger`` has arrived, by their indices."""

    params: tuple[int, ...] = ()
    trigger: int = -1

    def parts(self, order: Sequence[int]) -> dict[int, int]:
        """Return for each parameter, in order of arrival, when it is sent: 0: with the trigger; 1: then; 2: at last.

        Buckets are sent in order. So a delayed one waits for the trigger, if it has no parameter of another part.
        """
        parts, last = {}, 0
        for index in order:
            parts[index] = 1 if index in self.params else last
            last = 2 if index == self.trigger else last
        return parts


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
    delay: DelayedAllReduce = DelayedAllReduce()  # Gradients that wait for the gradient of another parameter.
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


def choose_delay(named: Any, trigger: object, params: Sequence[ReducedParam]) -> DelayedAllReduce:
    """Return the gradients that wait, and the parameter whose gradient they wait for.

    ``named`` is ``delay_all_reduce_named_params``, ``trigger`` ``param_to_hook_all_reduce``, and ``params`` have
    gradients to average. Raises ``ConfigError`` if one argument alone is given, or a parameter is sparse or not in
    them.
    """
    if (named is None) is not (trigger is None):
        raise ConfigError(
            "one of delay_all_reduce_named_params and param_to_hook_all_reduce is given without the other",
            fix="pass both, or none",
        )
    index_of = {id(one.param): index for index, one in enumerate(params) if not one.is_sparse}
    try:
        delayed = [(name, param) for name, param in named or ()]
    except (TypeError, ValueError):
        raise ConfigError(
            "delay_all_reduce_named_params is no list of (name, parameter) pairs",
            fix="pass pairs as named_parameters() gives them",
        ) from None
    for name, param in [*delayed, *([] if trigger is None else [(None, trigger)])]:
        what = "param_to_hook_all_reduce" if name is None else repr(name)
        if id(param) not in index_of:
            raise ConfigError(
                f"a delayed all-reduce names {what}, whose gradient replicate does not average here",
                fix="pass parameters of the module that require a gradient and are neither ignored nor sparse",
            )
        fqn = params[index_of[id(param)]].fqn
        if name is not None and not f".{fqn}".endswith(f".{plain_fqn(str(name))}"):
            what = f"delay_all_reduce_named_params has the name {what} for parameter {fqn!r}"
            raise ConfigError(what, fix="pass pairs as named_parameters() gives them")
    if not delayed:
        return DelayedAllReduce()
    return DelayedAllReduce(tuple(sorted({index_of[id(param)] for _, param in delayed})), index_of[id(trigger)])

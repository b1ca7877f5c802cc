"""Gradients that wait for the gradient of another parameter, for example to stay away from other collectives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composable.errors import ConfigError
from composable.ground.names import plain_fqn
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

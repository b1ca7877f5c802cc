"""The exceptions, and the form of their messages.

Every message says what happened, where (rank, module, parameter) and what to do:

    UsageError: parameter is still on the meta device
      at:  rank 3, module 'layers.7', parameter 'layers.7.up.weight' [4096, 1024] bfloat16
      fix: materialize the model before the first forward

Inner code raises the bare cause; one outer place adds the module with ``located``. The rank comes by itself.
"""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class ComposableError(Exception):
    """Base of every error of this library.

    Args:
        what: What happened, without a full stop.
        at: Where: module FQN, parameter FQN. The rank that makes the error is put before it, unless it names one.
        fix: What the user should do.

    Attributes:
        within: ``at`` as it was given, with what ``located`` has put before it.
    """

    def __init__(self, what: str, *, at: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.within = at
        self.fix = fix
        self._rank = None if (rank := place_of_rank()) == _OUTSIDE else rank

    @property
    def at(self) -> str | None:
        """Where: rank, module FQN, parameter FQN; ``None``: nothing is known."""
        if _names_rank(self.within):
            return self.within
        return ", ".join(filter(None, [self._rank, self.within])) or None

    def __str__(self) -> str:
        lines = [self.what]
        if self.at:
            lines.append(f"  at:  {self.at}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # The last one replaces the rank of the process that reads the error.
        return (_rebuild, (type(self), self.what, self.within, self.fix), {"_rank": self._rank})


class ConfigError(ComposableError, ValueError):
    """An argument is wrong."""


class SignatureError(ConfigError, TypeError):
    """A function does not take the arguments of a call. Also a ``TypeError``, which Python or torch would raise."""


class StateDictError(ConfigError, RuntimeError):
    """A state dict does not fit a model. Also a ``RuntimeError``, which code written for torch expects."""


class UsageError(ComposableError, RuntimeError):
    """The call is right, but not now: for example inside of backward, or before ``fully_shard``."""


class DesyncError(ComposableError, RuntimeError):
    """The ranks disagree: they made different calls, or some of them are gone."""


def _rebuild(cls: type[ComposableError], what: str, at: str | None, fix: str | None) -> ComposableError:
    return cls(what, at=at, fix=fix)


def error_of(kind: str, what: str, at: str | None, fix: str | None) -> ComposableError:
    """Return the error of another rank, by the name of its class."""
    kinds = (ConfigError, SignatureError, StateDictError, UsageError)
    return next((one for one in kinds if one.__name__ == kind), DesyncError)(what, at=at, fix=fix)


# How messages name a process that is in no process group, and so has no rank.
_OUTSIDE = "this process"


_LOG = logging.getLogger("composable")


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, each text once in a process."""
    _LOG.warning("%s", text)


def place_of_rank() -> str:
    """Return the name of this process in messages: its rank, if it has one."""
    return f"rank {dist.get_rank()}" if dist.is_available() and dist.is_initialized() else _OUTSIDE


@contextmanager
def located(at: str) -> Iterator[None]:
    """Put ``at`` before the place that an error of this library was given, unless that has it, or a rank, already."""
    try:
        yield
    except ComposableError as error:
        if not _names_rank(error.within) and at not in (error.within or ""):
            error.within = ", ".join(filter(None, [at, error.within]))
        raise


# What to write in place of names that torch's wrappers have. Who asks a module for one must hear that there is none.
_INSTEAD = {
    "module": "model", "no_sync": "no_sync(model)", "clip_grad_norm_": "clip_grad_norm_(model.parameters(), max_norm)",
    "join": "as_ddp(model), or joinable(model, step=...)", "summon_full_params": "unshard_params(model)",
    "state_dict_type": "full_state_dict(model)", "set_state_dict_type": "full_state_dict(model)",
    "optim_state_dict": "get_optimizer_state_dict(model, optimizer) of torch.distributed.checkpoint.state_dict",
    "_set_static_graph": "replicate(model, static_graph=True)", "_get_ddp_logging_data": "reduction_stats(model)",
    "_set_ddp_runtime_logging_sample_rate": "reduction_stats(model, sample_rate=...)",
    "_update_process_group": "update_process_group(model, group)",
}  # fmt: skip


def explain(error: BaseException) -> None:
    """Say in the error of a name that an annotated module has not, and torch's wrappers have, what to write."""
    if isinstance(error, AttributeError) and error.name in _INSTEAD and hasattr(error.obj, "_composable_kind"):
        error.args = (f"{error}\n  fix: there is no wrapper: write {_INSTEAD[error.name]} for model.{error.name}",)
        error.name = ""  # Python would propose another one.


def _names_rank(at: str | None) -> bool:
    return at is not None and at.startswith(("rank ", _OUTSIDE))


def made_alike(make: Callable[[], T], compare: Callable[[T | None, ComposableError | None], object]) -> T:
    """Return the result of ``make``, after ``compare`` has sent this result, or the error, to the other ranks.

    The other ranks are about to communicate: they would wait for ever if an error were raised here before they get it.
    ``make`` changes nothing; ``compare`` raises the error, another rank's, or one for ranks that differ.
    """
    try:
        made = make()
    except ComposableError as error:
        failure = error
    else:
        compare(made, None)
        return made
    compare(None, failure)
    raise failure

"""Regions of this package in traces of torch's profiler.

They cost where they are entered. So who has something to show first reads
``autograd_profiler._is_profiler_enabled``, which is false where no profiler runs.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from composable.torch_private import autograd_profiler

__all__ = ["in_region"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def in_region(what: str, name: str, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return ``call(*args, **kwargs)``; a trace shows it as ``composable::what name``.

    Args:
        what: Such as ``gather``.
        name: Of what it is done to; the empty FQN is the root.
        call: Runs inside the region.
        *args: Of ``call``.
        **kwargs: Of ``call``.
    """
    with autograd_profiler.record_function(f"composable::{what} {name or '(root)'}"):
        return call(*args, **kwargs)

"""What is running on this thread right now, read from its frames and from autograd.

Where torch or Python does not hand on what the caller was asked for, its frame tells. None of it is for
a hot path, nor for a compiled region, but ``in_backward``.
"""

import copy
import inspect
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch import nn

from composable.torch_private import current_graph_task_id, module_call_code

__all__ = ["copied_values", "in_backward", "is_called_again", "is_strict_load", "modules_in_call"]


def in_backward() -> bool:
    """Say whether autograd is running a backward on this thread."""
    return current_graph_task_id() != -1


def modules_in_call() -> list[nn.Module]:
    """Return the modules whose calls are under way, innermost first."""
    return [frame.f_locals["self"] for frame in _frames_of(module_call_code)]


def is_called_again(module: nn.Module) -> bool:
    """Say whether a call of ``module`` is under way around the one that is starting."""
    return sum(called is module for called in modules_in_call()) > 1


def copied_values(memo: dict[Any, Any]) -> Iterator[object]:
    """Yield the arguments of the running calls of ``copy.deepcopy`` with this ``memo``, innermost first."""
    for frame in _frames_of(copy.deepcopy.__code__):
        if frame.f_locals.get("memo") is memo:
            yield frame.f_locals["x"]


def is_strict_load() -> bool:
    """Say whether the ``load_state_dict`` around this call is strict: torch tells its hooks ``True`` always."""
    frame = next(_frames_of(nn.Module.load_state_dict.__code__), None)
    return frame is not None and bool(frame.f_locals["strict"])


def _frames_of(code: CodeType) -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            yield frame
        frame = frame.f_back

"""Says which code runs now: by flags, and where nothing else tells it, by Python frames.

Where torch or Python does not pass on what a caller was asked, the caller's frame has it. Frames are found by the code
object of a function of torch or Python, never by a name, and on the calling thread only. Nothing here but
``in_backward`` is for a hot path. Questions that are put to frames:

========================  ====================================  ======================================================
Question                  Why nothing else tells it             Where the frames are missing
========================  ====================================  ======================================================
``modules_in_call``       Modules without hooks of ours run     Not in a compiled graph, where no hook of ours asks.
                          too.                                  Calls of other threads are not seen.
``modules_of_copy``,      ``deepcopy`` passes on its memo only. A copy that is made without ``copy.deepcopy`` counts
``is_part_of_module``                                           as a copy of the module itself.
``is_strict_load``        Torch always passes ``True`` to       The load is taken as one that is not strict.
                          hooks.
``is_functional_call``    It swaps parameters, and calls no     Parameters that it lends are refused as if they were
                          hook.                                 added or replaced.
``in_split_backward``     Torch's pipelines call no hook.       The backward counts as a whole one.
``is_running``            ``torch.save`` pickles as messages    Torch's own error, in place of ours; a parameter that
                          do; averagers and loads set values.   a load assigns counts as assigned by the user.
========================  ====================================  ======================================================

``comm/users_frames.py`` reads frames of other threads for places in messages, and for waits in users' own collectives.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from composable.errors import UsageError
from composable.ground.names import describe_module
from composable.ground.torch_private import (
    current_graph_task_id,
    functional_call_code,
    module_call_code,
    split_backward_code,
    tree_leaves,
    will_engine_execute_node,
)

_T = TypeVar("_T")


def in_backward() -> bool:
    """Say whether autograd is running a backward on this thread."""
    return current_graph_task_id() != -1


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield ``frame``, then the frames of its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def place_in(frame: FrameType | None, not_the_users: tuple[str, ...]) -> str:
    """Return the place of a thread in the user's code: "train.py:20, in run"; empty if it runs no such code.

    ``not_the_users`` are the beginnings of the paths of other files.
    """
    for each in outwards(frame):
        if not each.f_code.co_filename.startswith(not_the_users):
            return f"{Path(each.f_code.co_filename).name}:{each.f_lineno}, in {each.f_code.co_name}"
    return ""


def will_get_gradient(leaf: torch.Tensor) -> bool:
    """Say whether the running backward reaches ``leaf`` [any], or has reached it. Inside a backward only."""
    try:
        return bool(will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # Raised for a leaf that is an input of torch.autograd.grad.
        return True


def modules_in_call() -> list[nn.Module]:
    """Return the modules whose calls are under way, innermost first.

    torch.compile compiles no frame of ``nn.Module`` itself, and calls opaque hooks from such frames only.
    """
    return [frame.f_locals["self"] for frame in _frames_of(module_call_code, run_as_call.__code__)]


def run_as_call(self: nn.Module, run: Callable[[], _T]) -> _T:  # `self` is read from its frame
    """Return ``run()``, which counts as a call of the module ``self``."""
    return run()


def is_called_again(module: nn.Module) -> bool:
    """Say whether the call of ``module`` that is starting is inside another call of it."""
    return sum(called is module for called in modules_in_call()) > 1


def _copied_values(memo: dict[Any, Any]) -> Iterator[object]:
    """Yield the arguments of the running calls of ``copy.deepcopy`` with this ``memo``, innermost first."""
    for frame in _frames_of(copy.deepcopy.__code__):
        if frame.f_locals.get("memo") is memo:
            yield frame.f_locals["x"]


def is_strict_load() -> bool:
    """Say whether the ``load_state_dict`` around this call is strict: torch always passes ``True`` to its hooks."""
    frame = next(_frames_of(nn.Module.load_state_dict.__code__), None)
    return frame is not None and bool(frame.f_locals["strict"])


def is_functional_call() -> bool:
    """Say whether a ``functional_call`` of torch, which puts other parameters into modules, is under way."""
    return is_running(functional_call_code)


def in_split_backward() -> bool:
    """Say whether a stage of torch's pipelines computes gradients of its inputs; those of parameters follow later."""
    return is_running(split_backward_code())


def is_running(code: CodeType | None) -> bool:
    """Say whether ``code`` runs on this thread; ``None`` stands for code of a file that is not imported."""
    return code is not None and next(_frames_of(code), None) is not None


def _frames_of(*codes: CodeType) -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:  # not by `outwards`, to be fast: some callers run in every call of a module
        if frame.f_code in codes:
            yield frame
        frame = frame.f_back


def modules_of_copy(memo: dict[Any, Any]) -> set[nn.Module]:
    """Return the modules in the objects and containers that the running ``copy.deepcopy`` with this memo copies."""
    leaves = (leaf for value in _copied_values(memo) for leaf in tree_leaves(value))
    return {below for leaf in leaves if isinstance(leaf, nn.Module) for below in leaf.modules()}


def is_part_of_module(memo: dict[Any, Any]) -> bool:
    """Say whether the object that is being copied now is a part of a module that is copied."""
    return any(isinstance(value, nn.Module) for value in _copied_values(memo))


def reaches_out(verb: str, modules: Iterable[nn.Module], fix: str) -> UsageError:
    """Return the error for a handle of ``modules`` of which only a part is to be, for example, "copied"."""
    names = " and ".join(describe_module(module) for module in modules)
    return UsageError(
        f"a part of a model cannot be {verb}: a handle owns parameters inside and outside of it",
        at=f"handle of {names}",
        fix=fix.format(names=names),
    )

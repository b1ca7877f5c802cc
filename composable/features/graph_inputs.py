"""Sharded parameters as ``inputs`` of ``torch.autograd.backward``.

``model.parameters()`` are sharded between steps, but a graph has the unsharded parameters. torch has no hook that shows
the inputs, so the first annotation of a process changes the body of that function. ``torch.autograd.grad`` raises by
itself, since no sharded parameter is in the graph.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from composable.dtensor import RaggedDTensor
from composable.engine import handle_of
from composable.ground.torch_private import replace_body


def follow_inputs() -> None:
    """Make ``backward(inputs=)`` accept sharded parameters; once in a process."""
    replace_body(torch.autograd.backward, _backward, only_with=("inputs", 5))


def _backward(original: Any, *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(original).bind(*args, **kwargs)
    inputs = _listed(call.arguments["inputs"])
    faces = [face for face in map(_unsharded, inputs) if face is not None]
    if faces:
        call.arguments["inputs"] = [*inputs, *faces]
    return original(*call.args, **call.kwargs)


def _listed(inputs: Any) -> list[Any]:
    if isinstance(inputs, dict):
        return list(inputs.values())
    # A tensor and an edge of a graph, which is a tuple, stand for themselves.
    is_one = isinstance(inputs, torch.Tensor) or hasattr(inputs, "node")
    return [inputs] if is_one else list(inputs) if isinstance(inputs, Iterable) else []


def _unsharded(given: Any) -> torch.Tensor | None:
    """Return the unsharded tensor of a sharded parameter, if its module has run and it needs a gradient."""
    handle = handle_of(given) if type(given) is RaggedDTensor else None
    faces = (one.unsharded for one in handle.params if one.sharded is given) if handle is not None else ()
    return next((face for face in faces if face is not None and face.requires_grad), None)

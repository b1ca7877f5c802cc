"""Parameters that are named to ``torch.autograd.backward`` and ``grad``: forwards have computed with their other face.

``model.parameters()`` are sharded between steps, and a graph has the unsharded ones. torch tells nobody which inputs
it was given, so the first annotation of a process changes the bodies of these two functions.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch

from composable.dtensor import RaggedDTensor
from composable.engine import handle_of
from composable.errors import UsageError, place_of_rank, warn_once
from composable.ground.names import list_text
from composable.ground.ownership import claim_of
from composable.ground.torch_private import replace_body

__all__ = ["follow_inputs"]


def follow_inputs() -> None:
    """Let ``backward(inputs=)`` find sharded parameters, and ``grad`` say what it does not; once in a process."""
    replace_body(torch.autograd.backward, _backward, only_with=("inputs", 5))
    replace_body(torch.autograd.grad, _grad)


def _backward(original: Any, *args: Any, **kwargs: Any) -> Any:
    call = inspect.signature(original).bind(*args, **kwargs)
    inputs = _listed(call.arguments["inputs"])
    faces = [face for face in map(_unsharded, inputs) if face is not None]
    if faces:
        call.arguments["inputs"] = [*inputs, *faces]
    return original(*call.args, **call.kwargs)


def _grad(original: Any, *args: Any, **kwargs: Any) -> Any:
    inputs = _listed(kwargs["inputs"] if "inputs" in kwargs else args[1] if len(args) > 1 else ())
    if claim := next(filter(None, map(claim_of, inputs)), None):
        warn_once(
            "torch.autograd.grad of replicated parameters gives the gradients of this rank alone"
            f"\n  at:  {place_of_rank()}, parameter {claim.fqn!r}"
            "\n  fix: call backward() and read param.grad; or average them, if those of all ranks are meant"
        )
    try:
        return original(*args, **kwargs)
    except RuntimeError as error:
        names = [str(one._spec.layout.label) for one in inputs if _unsharded(one) is not None]
        if not names:
            raise
        raise UsageError(
            f"torch.autograd.grad of sharded parameters: {error}",
            at=f"{place_of_rank()}, {list_text(names)}",
            fix="call backward() and read param.grad; or run forward and grad inside unshard_params(model), where the "
            "gradients are those of this rank",
        ) from error


def _listed(inputs: Any) -> list[Any]:
    if isinstance(inputs, dict):
        return list(inputs.values())
    # A tensor and an edge of a graph, which is a tuple, stand for themselves.
    is_one = isinstance(inputs, torch.Tensor) or hasattr(inputs, "node")
    return [inputs] if is_one else list(inputs) if isinstance(inputs, Iterable) else []


def _unsharded(given: Any) -> torch.Tensor | None:
    """Return the unsharded face of a sharded parameter, if its module has run and it is to get a gradient."""
    handle = handle_of(given) if type(given) is RaggedDTensor else None
    faces = (one.unsharded for one in handle.params if one.sharded is given) if handle is not None else ()
    return next((face for face in faces if face is not None and face.requires_grad), None)

"""What each collective does to the tensors of the ranks that meet in it.

Sums run in rank order, in the dtype of the tensors, and are the same on every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch

from composable.torch_private import without_modes

__all__ = ["Call", "Part", "describe", "exchange", "fingerprint", "move"]


@dataclass(frozen=True)
class Part:
    """The tensors of one rank in one collective; a coalesced one has several parts.

    Where there is one tensor per rank, they are in the order of the group.
    """

    inputs: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()
    # The tensor whose shape and dtype all ranks have to share.
    shared: torch.Tensor | None = None


@dataclass(frozen=True)
class Call:
    """One rank's call of a collective."""

    op: str
    parts: Sequence[Part] = field(default_factory=list)
    reduction: str = ""
    root: int = -1


def fingerprint(call: Call) -> tuple[object, ...]:
    """Return what has to be equal on all ranks."""
    shared = [None if part.shared is None else (part.shared.shape, part.shared.dtype) for part in call.parts]
    return call.op, call.reduction, call.root, shared


def describe(call: Call) -> str:
    """Return the call as messages show it: what is compared between ranks."""
    words = [call.op]
    if call.reduction:
        words.append(f"({call.reduction})")
    if call.root >= 0:
        words.append(f"root {call.root}")
    shown = (part.shared for part in call.parts)
    words += [f"{list(one.shape)} {str(one.dtype).removeprefix('torch.')}" for one in shown if one is not None]
    return " ".join(words)


def exchange(calls: Sequence[Call]) -> None:
    """Carry out a collective in which all ranks have arrived, with calls that fit each other.

    Raises:
        ValueError: Tensors that do not fit in an all-to-all.
    """
    with torch.no_grad(), without_modes():
        for index in range(len(calls[0].parts)):
            _BODIES[calls[0].op]([call.parts[index] for call in calls], calls[0])


def move(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` to ``target`` without a trace in autograd, as a process group does."""
    with torch.no_grad(), without_modes():
        _copy(target, source)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    # The counter that tells autograd of changes is shared with `detach`: as after a real collective.
    with torch.inference_mode(target.is_inference()):
        target = target.detach()
        target.copy_(source if source.shape == target.shape else source.reshape(target.shape))


def _reduced(tensors: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    total = reduce(_REDUCTIONS[reduction], tensors[1:], tensors[0].detach().clone())
    if reduction != "avg":
        return total
    exact = total.is_floating_point() or total.is_complex()
    return total.div_(len(tensors)) if exact else total.div_(len(tensors), rounding_mode="trunc")


def _all_reduce(parts: Sequence[Part], call: Call) -> None:
    total = _reduced([part.inputs[0] for part in parts], call.reduction)
    for part in parts:
        _copy(part.outputs[0], total)


def _reduce(parts: Sequence[Part], call: Call) -> None:
    _copy(parts[call.root].outputs[0], _reduced([part.inputs[0] for part in parts], call.reduction))


def _all_gather(parts: Sequence[Part], call: Call) -> None:
    for part in parts:
        for output, source in zip(part.outputs, parts):
            _copy(output, source.inputs[0])


def _reduce_scatter(parts: Sequence[Part], call: Call) -> None:
    # The result may lie within the source, so all sums come before the first result is written.
    totals = [_reduced([part.inputs[rank] for part in parts], call.reduction) for rank in range(len(parts))]
    for part, total in zip(parts, totals):
        _copy(part.outputs[0], total)


def _broadcast(parts: Sequence[Part], call: Call) -> None:
    for rank, part in enumerate(parts):
        if rank != call.root:
            _copy(part.outputs[0], parts[call.root].inputs[0])


def _gather(parts: Sequence[Part], call: Call) -> None:
    for output, part in zip(parts[call.root].outputs, parts):
        _copy(output, part.inputs[0])


def _scatter(parts: Sequence[Part], call: Call) -> None:
    for part, source in zip(parts, parts[call.root].inputs):
        _copy(part.outputs[0], source)


def _all_to_all(parts: Sequence[Part], call: Call) -> None:
    for receiver, part in enumerate(parts):
        for sender, output in enumerate(part.outputs):
            source = parts[sender].inputs[receiver]
            if source.numel() != output.numel() or source.dtype != output.dtype:
                raise ValueError(
                    f"group rank {sender} sends {list(source.shape)} {source.dtype} to group rank {receiver}, "
                    f"which expects {list(output.shape)} {output.dtype}"
                )
            _copy(output, source)


def _barrier(parts: Sequence[Part], call: Call) -> None:
    pass


_BODIES: dict[str, Callable[[Sequence[Part], Call], None]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "gather": _gather,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
}

_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.Tensor.bitwise_and_,
    "bor": torch.Tensor.bitwise_or_,
    "bxor": torch.Tensor.bitwise_xor_,
}

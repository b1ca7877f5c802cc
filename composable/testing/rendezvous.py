"""The effect of each collective on simulated ranks.

Calls of a collective are matched by number within their group: the last rank to arrive carries it out for all. Ends of
a message are matched by sender, receiver and tag: it moves when both are there. Sums run in rank order, in the dtype of
the tensors, and are the same on every rank.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch

from composable.errors import DesyncError
from composable.ground.torch_private import modes_off
from composable.testing.device_streams import SimulatedDevice, poison


@dataclass(frozen=True)
class CollectivePart:
    """The tensors of one rank in one collective; a coalesced one has several parts.

    If there is one tensor for each rank, tensors are in the order of the group.
    """

    inputs: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()
    # The tensor whose shape and dtype all ranks have to share.
    shared: torch.Tensor | None = None


@dataclass(frozen=True)
class Call:
    """One rank's call of a collective."""

    op: str
    parts: Sequence[CollectivePart] = ()
    reduction: str = ""
    root: int = -1
    # An event of the rank's stream at the call; ``None`` on the host.
    mark: Any = None

    def fingerprint(self) -> tuple[object, ...]:
        """Return the properties of the call that must be equal on all ranks."""
        shared = [None if part.shared is None else (part.shared.shape, part.shared.dtype) for part in self.parts]
        return self.op, self.reduction, self.root, shared

    def __str__(self) -> str:
        words = [self.op]
        if self.reduction:
            words.append(f"({self.reduction})")
        if self.root >= 0:
            words.append(f"root {self.root}")
        words += [_shown(part.shared) for part in self.parts if part.shared is not None]
        return " ".join(words)


def _shown(tensor: torch.Tensor) -> str:
    # Not with ``dtype_text``: tests that interrupt the library must not stop here, in place of C++.
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _exchange(calls: Sequence[Call], group: "GroupKey", device: SimulatedDevice | None) -> Any:
    """Carry out a collective that all ranks have called, with calls that fit each other.

    Returns:
        The event after it; ``None`` on the host.

    Raises:
        ValueError: Tensors that do not fit in an all-to-all.
    """
    with torch.no_grad(), modes_off():
        if device is None or all(call.mark is None for call in calls):
            _carry_out(calls)
            return None
        with device.communicating(group, [call.mark for call in calls]) as stream:
            if device.is_adverse:
                calls = [replace(call, parts=list(map(_with_copies, call.parts))) for call in calls]
                if calls[0].op not in ("broadcast", "reduce"):  # they leave the tensors of some ranks as they are
                    poison(output for call in calls for part in call.parts for output in part.outputs)
                device.sleep()
            _carry_out(calls)
            return stream.record_event()


def _carry_out(calls: Sequence[Call]) -> None:
    for index in range(len(calls[0].parts)):
        _BODIES[calls[0].op]([call.parts[index] for call in calls], calls[0])


def _with_copies(part: CollectivePart) -> CollectivePart:
    return replace(part, inputs=[one.detach().clone() for one in part.inputs])


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    # `detach` shares the version counter, so autograd sees the change, as after a real collective.
    with torch.inference_mode(target.is_inference()):
        target = target.detach()
        target.copy_(source if source.shape == target.shape else source.reshape(target.shape))


def _reduced(tensors: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    total = reduce(_REDUCTIONS[reduction], tensors[1:], tensors[0].detach().clone())
    if reduction != "avg":
        return total
    exact = total.is_floating_point() or total.is_complex()
    return total.div_(len(tensors)) if exact else total.div_(len(tensors), rounding_mode="trunc")


def _all_reduce(parts: Sequence[CollectivePart], call: Call) -> None:
    total = _reduced([part.inputs[0] for part in parts], call.reduction)
    for part in parts:
        _copy(part.outputs[0], total)


def _reduce(parts: Sequence[CollectivePart], call: Call) -> None:
    _copy(parts[call.root].outputs[0], _reduced([part.inputs[0] for part in parts], call.reduction))


def _gather(parts: Sequence[CollectivePart], call: Call) -> None:
    for part in parts:  # Those of ranks that get nothing have no outputs.
        for output, source in zip(part.outputs, parts):
            _copy(output, source.inputs[0])


def _reduce_scatter(parts: Sequence[CollectivePart], call: Call) -> None:
    # The result may lie within the source, so all sums come before the first result is written.
    totals = [_reduced([part.inputs[rank] for part in parts], call.reduction) for rank in range(len(parts))]
    for part, total in zip(parts, totals):
        _copy(part.outputs[0], total)


def _broadcast(parts: Sequence[CollectivePart], call: Call) -> None:
    for rank, part in enumerate(parts):
        if rank != call.root:
            _copy(part.outputs[0], parts[call.root].inputs[0])


def _scatter(parts: Sequence[CollectivePart], call: Call) -> None:
    for part, source in zip(parts, parts[call.root].inputs):
        _copy(part.outputs[0], source)


def _all_to_all(parts: Sequence[CollectivePart], call: Call) -> None:
    for receiver, part in enumerate(parts):
        for sender, output in enumerate(part.outputs):
            source = parts[sender].inputs[receiver]
            if source.numel() != output.numel() or source.dtype != output.dtype:
                raise ValueError(
                    f"group rank {sender} sends {list(source.shape)} {source.dtype} to group rank {receiver}, "
                    f"which expects {list(output.shape)} {output.dtype}"
                )
            _copy(output, source)


_BODIES: dict[str, Callable[[Sequence[CollectivePart], Call], None]] = {
    "all_gather": _gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "barrier": lambda parts, call: None,
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


@dataclass(frozen=True)
class GroupKey:
    """The key of a process group, the same on all its ranks.

    Attributes:
        name: Its name in torch.distributed.
        ranks: Global ranks, in the order of the group.
        nth: How many groups of that name and those ranks there were before.
    """

    name: str
    ranks: tuple[int, ...]
    nth: int

    def __str__(self) -> str:
        return f"group {self.name!r} of ranks {', '.join(map(str, self.ranks))}"


@dataclass(eq=False)
class Rendezvous:
    """A collective that some ranks have called; ``done`` is the event after it on a device."""

    group: GroupKey
    number: int
    device: SimulatedDevice | None = None
    calls: dict[int, Call] = field(default_factory=dict)
    is_over: bool = False
    failure: str = ""
    done: Any = None

    def arrive(self, group_rank: int, call: Call) -> None:
        """Add a rank's call; the last one carries out the collective."""
        self.calls[group_rank] = call
        if len(self.calls) < len(self.group.ranks):
            return
        calls = [self.calls[rank] for rank in range(len(self.group.ranks))]
        if any(call.fingerprint() != calls[0].fingerprint() for call in calls):
            self.failure = "ranks meet in different collectives"
        else:
            try:
                self.done = _exchange(calls, self.group, self.device)
                self.calls.clear()  # A rank that waits late keeps no tensors of others.
            except (RuntimeError, ValueError) as error:
                self.failure = str(error)
        self.is_over = True

    def raise_failure(self, rank: int) -> None:
        """Raise the failure of the collective on ``rank``, if there is one."""
        if self.failure:
            lines = [f"    rank {self.group.ranks[at]}: {call}" for at, call in sorted(self.calls.items())]
            raise DesyncError(
                "\n".join([self.failure, *lines]),
                at=f"rank {rank}, collective {self.number} of {self.group}",
                fix="make all ranks of a group call the same collectives in the same order, with equal shapes",
            )


@dataclass(eq=False)
class Transfer:
    """One end of a message; ``peer`` is a group rank, -1 for any; ``mark`` and ``done`` are those of a collective."""

    group: GroupKey
    own: int
    peer: int
    tag: int
    tensor: torch.Tensor
    is_send: bool
    mark: Any = None
    is_over: bool = False
    failure: str = ""
    done: Any = None

    def describe(self) -> str:
        peer = "any rank" if self.peer < 0 else f"rank {self.group.ranks[self.peer]}"
        op = f"send to {peer}" if self.is_send else f"recv from {peer}"
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{op} of {_shown(self.tensor)}{tag} in {self.group}"

    def fits(self, other: "Transfer") -> bool:
        """Say whether ``other`` is the other end of the message."""
        return (
            other.is_send != self.is_send
            and other.group == self.group
            and other.tag == self.tag
            and other.peer in (self.own, -1)
            and self.peer in (other.own, -1)
        )

    def raise_failure(self, rank: int) -> None:
        """Raise the failure of the message on ``rank``, if there is one."""
        if self.failure:
            raise DesyncError(self.failure, at=f"rank {rank}", fix="send and receive equal numbers of equal dtype")


class Board:
    """The collectives and messages that are under way between the ranks of one simulation.

    Args:
        device: The device that ranks share, if it is not the CPU.
    """

    def __init__(self, device: SimulatedDevice | None = None) -> None:
        self.device = device
        self._open: dict[tuple[GroupKey, int], Rendezvous] = {}
        self._transfers: list[Transfer] = []
        self._groups: Counter[tuple[int, str, tuple[int, ...]]] = Counter()

    def key_of_new_group(self, rank: int, name: str, ranks: Sequence[int]) -> GroupKey:
        """Return the key of a group that ``rank`` makes; equal on all ranks that make it."""
        nth = self._groups[rank, name, tuple(ranks)]
        self._groups[rank, name, tuple(ranks)] += 1
        return GroupKey(name, tuple(ranks), nth)

    def ranks_without(self, group: GroupKey) -> list[int]:
        """Return the ranks of ``group`` that have not made it: ranks with different group names never meet."""
        return [rank for rank in group.ranks if self._groups[rank, group.name, group.ranks] <= group.nth]

    def rendezvous(self, group: GroupKey, number: int) -> Rendezvous:
        """Return the collective with that number in ``group``."""
        return self._open.setdefault((group, number), Rendezvous(group, number, self.device))

    def arrive(self, rendezvous: Rendezvous, group_rank: int, call: Call) -> None:
        """Add a rank's call to a rendezvous; forget the rendezvous once all ranks have called."""
        rendezvous.arrive(group_rank, call)
        if rendezvous.is_over:
            del self._open[rendezvous.group, rendezvous.number]

    def post(self, transfer: Transfer) -> None:
        """Add an end of a message; the second end moves it. First posted, first served."""
        far = next((other for other in self._transfers if transfer.fits(other)), None)
        if far is None:
            self._transfers.append(transfer)
            return
        self._transfers.remove(far)
        send, recv = (transfer, far) if transfer.is_send else (far, transfer)
        if send.tensor.numel() != recv.tensor.numel() or send.tensor.dtype != recv.tensor.dtype:
            send.failure = recv.failure = f"a message does not fit: {send.describe()} meets {recv.describe()}"
        else:
            # A message is a gather of one tensor on one rank.
            sent = Call("gather", [CollectivePart([send.tensor])], mark=send.mark)
            received = Call("gather", [CollectivePart((), [recv.tensor])], mark=recv.mark)
            send.done = recv.done = _exchange([sent, received], send.group, self.device)
        recv.peer = send.own
        send.is_over = recv.is_over = True

"""How much memory a training step takes at most: the schedule of handles, run on numbers of bytes.

What the modules compute, their activations, is not known here; neither is what optimizers make for a while.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = ["HandleBytes", "Reduced", "SecondLeg", "peak_of_step"]

# Gradient buffers alive at once: one being reduced, one being filled.
_GRADIENT_BUFFERS = 2


class SecondLeg(NamedTuple):
    """Bytes of a second reduction, which makes the result; it starts when the next first one does, or at the end.

    Attributes:
        source: Of the result of the first leg, which is there from its beginning on.
        landing: Of what arrives beside the result.
        scratch: Of what is there while it is added up.
    """

    source: int
    landing: int
    scratch: int


class Reduced(NamedTuple):
    """Bytes of one flat buffer's gradients.

    Attributes:
        whole: Of the buffer that is reduced.
        landing: Of what arrives beside it from other ranks.
        scratch: Of what is there while they are added up.
        shard: Of the result.
        is_late: The result is made when all has arrived, beside what landed.
        second: Of the second leg, if there is one; ``scratch`` and ``landing`` are of the first.
    """

    whole: int
    landing: int
    scratch: int
    shard: int
    is_late: bool = False
    second: SecondLeg | None = None


class HandleBytes(NamedTuple):
    """Bytes of one handle.

    Attributes:
        depth: Handles around it.
        unsharded: Of the parameters.
        gradients: Of what autograd accumulates.
        reduced: Of its trainable buffers.
        is_freed: The parameters are freed between forward and backward.
        secondary: Of the secondary shards that stay then.
    """

    depth: int
    unsharded: int
    gradients: int
    reduced: tuple[Reduced, ...]
    is_freed: bool
    secondary: int = 0


def peak_of_step(handles: Sequence[HandleBytes]) -> int:
    """Return the most bytes at a time, in forward and backward, beside what rests between steps.

    Args:
        handles: Left to right, depth first, as they run.
    """
    return max(_forward(handles), max(_backward(handles), default=0))


def _forward(handles: Sequence[HandleBytes]) -> int:
    kept = peak = following = 0
    running: list[HandleBytes] = []  # the current one and those around it

    def live() -> int:
        return kept + sum(one.unsharded for one in running if one.is_freed) + following

    for index in range(len(handles) + 1):
        depth = handles[index].depth if index < len(handles) else 0
        while len(running) > depth:
            kept += running[-1].secondary
            peak = max(peak, live())  # Before it is freed.
            running.pop()
        if index < len(handles):
            running.append(handles[index])
            kept += 0 if handles[index].is_freed else handles[index].unsharded
            following = handles[index + 1].unsharded if index + 1 < len(handles) else 0
            peak = max(peak, live())
    return peak


def _backward(handles: Sequence[HandleBytes]) -> Iterator[int]:
    """Yield the bytes at every moment that may be the peak."""
    order = _order(handles)
    unsharded = {index for index, handle in enumerate(handles) if not handle.is_freed}
    kept = sum(handle.secondary for handle in handles)
    met: list[int] = []
    under_way: list[Reduced] = []
    shards = in_second_leg = 0  # The first ones under way are in their second leg.

    def finish_first() -> int:
        """End the first reduction under way; returns the bytes while that runs."""
        nonlocal shards, in_second_leg
        peak = start_second() if not in_second_leg else live()
        first = under_way[0]
        late = first.shard if first.is_late else 0
        peak = max(peak, live() + max(first.second.scratch if first.second else first.scratch, late))
        shards += late
        del under_way[0]
        in_second_leg = max(in_second_leg - 1, 0)
        return peak

    def start_second() -> int:
        """End the first leg of the last reduction under way; returns the bytes while that runs."""
        nonlocal shards, in_second_leg
        peak = live()
        for one in under_way[in_second_leg:]:
            if one.second is not None:
                peak = max(peak, live() + one.scratch)
                in_second_leg += 1
                shards += one.shard
        return peak

    def live() -> int:
        parameters = sum(handles[index].unsharded for index in unsharded)
        gradients = sum(handles[index].gradients for index in met)
        reduced = 0
        for index, one in enumerate(under_way):
            landing = one.second.landing if one.second and index < in_second_leg else one.landing
            reduced += one.whole + landing + (one.second.source if one.second else 0)
        return kept + parameters + gradients + shards + reduced

    for position, index in enumerate([*order, None]):
        # What ran after this one in forward is complete when its backward begins.
        end = -1 if index is None else _end(handles, index)
        for done in sorted((one for one in met if one > end), reverse=True):
            for left, one in zip(reversed(range(len(handles[done].reduced))), handles[done].reduced, strict=True):
                while len(under_way) >= _GRADIENT_BUFFERS:
                    yield finish_first()
                yield live() + one.whole
                if not left:
                    # Before the last reduction begins the parameters are freed, and gradients are in its buffer.
                    met.remove(done)
                    unsharded.discard(done)
                yield start_second() + one.whole
                shards += 0 if one.is_late or one.second else one.shard
                under_way.append(one)
            if done in met:
                met.remove(done)
                unsharded.discard(done)
            yield live()
        if index is not None:
            unsharded.add(index)
            yield live()  # While it is gathered.
            kept -= handles[index].secondary
            met.append(index)
            unsharded |= {index, *order[position + 1 : position + 2]}
            yield live()
    pooled = 0  # Buffers of gradients go when backward is over.
    while under_way:
        whole = under_way[0].whole
        yield pooled + finish_first()
        pooled += whole


def _order(handles: Sequence[HandleBytes]) -> list[int]:
    """Return the handles as backward meets them: the outer one first, then what is in it from the last to the first."""
    order: list[int] = []
    roots = [index for index, handle in enumerate(handles) if handle.depth == 0]

    def visit(index: int) -> None:
        order.append(index)
        inside = range(index + 1, _end(handles, index) + 1)
        for child in reversed([one for one in inside if handles[one].depth == handles[index].depth + 1]):
            visit(child)

    for root in reversed(roots):
        visit(root)
    return order


def _end(handles: Sequence[HandleBytes], index: int) -> int:
    """Return the last handle inside a handle, or itself."""
    end = index
    while end + 1 < len(handles) and handles[end + 1].depth > handles[index].depth:
        end += 1
    return end

"""The bytes that a step sends, and its peak of memory.

A collective cuts each buffer into p slices, where p is the number of ranks in its group. There are two ways to move
the slices. *Direct*: every rank sends each other rank its slice; ``shared_memory`` does this. *Ring*: in p - 1 rounds,
twice as many in an all-reduce, every rank sends a slice to the next rank, in the order of ranks. gloo does this in
all-gathers and all-reduces, and NCCL where it chooses rings.

Activations of the modules are not counted, nor tensors that an optimizer makes for a while.

Source: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005; for the proof that no algorithm sends less than a ring,
Patarasuk and Yuan, doi 10.1016/j.jpdc.2008.09.002.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from composable.ground.names import bytes_text, count_text, handle_name, sibling_lines

# Gradient buffers alive at once: one being reduced, one being filled.
_GRADIENT_BUFFERS = 2


class Senders(NamedTuple):
    """The groups of ranks that each run a collective, and the slices of it that leave a host."""

    size: int  # Ranks of each group.
    number: int  # How many groups there are.
    leaving: int  # Slices that all ranks together send to other hosts, if each slice goes to its whole group once.

    @staticmethod
    def of(groups: Sequence[Sequence[int]], *, is_direct: bool = False) -> "Senders":
        """Count groups and slices; ``groups`` has the host of each rank of each group. A ring, if not ``is_direct``."""
        size = len(groups[0])
        if is_direct:
            leaving = sum(on_host * (size - on_host) for group in groups for on_host in Counter(group).values())
        else:
            leaving = (size - 1) * sum(a != b for group in groups for a, b in pairwise([*group, group[0]]))
        return Senders(size, len(groups), leaving)

    def sent_bytes(self, whole_bytes: int) -> tuple[int, int]:
        """Return the bytes that one rank sends, and its bytes to other hosts; means over ranks, rounded."""
        sent = whole_bytes * (self.size - 1) / self.size
        return round(sent), round(whole_bytes * self.leaving / (self.size**2 * self.number))


class HandleCollectives(NamedTuple):
    """Calls and bytes of one handle's collectives in one training step.

    Bytes are bytes of whole buffers; for all-reduces, which are between the ranks that hold copies, bytes of shards.
    Gathers from secondary shards, which are between a part of the ranks, are counted separately.
    """

    module_fqns: tuple[str, ...]
    all_gathers: int
    all_gather_bytes: int
    reduce_scatters: int
    reduce_scatter_bytes: int
    all_reduces: int = 0
    all_reduce_bytes: int = 0
    secondary_all_gathers: int = 0
    secondary_all_gather_bytes: int = 0


class Traffic(NamedTuple):
    """The bytes that one rank sends in a training step, for one handle or for all; the mean over all ranks.

    Attributes:
        module_fqns: The fully sharded module, or the positions of several; empty for all handles together.
        collectives: Number of collectives; with one rank they are counted, and send nothing.
        inside_bytes: Bytes to ranks on the same host.
        between_bytes: Bytes to ranks on other hosts.
        handles: The traffic of each handle, if this is the sum of all handles.
    """

    module_fqns: tuple[str, ...]
    collectives: int
    inside_bytes: int
    between_bytes: int
    handles: tuple["Traffic", ...] = ()

    def __str__(self) -> str:
        inside, between = bytes_text(self.inside_bytes), bytes_text(self.between_bytes)
        calls = count_text(self.collectives, "collective")
        if self.module_fqns:
            return f"{calls}, {inside} inside the host, {between} to others"
        headline = f"a rank sends in a step: {inside} inside its host, {between} to others, in {calls}"
        entries = (("  " + handle_name(one.module_fqns), "", str(one)) for one in self.handles)
        return "\n".join([headline, *sibling_lines(entries)])


class Reduced(NamedTuple):
    """Bytes of the reduction of one flat buffer's gradients."""

    whole: int  # Bytes of the buffer that is reduced.
    output: int  # Bytes of this rank's shard of the result.
    landing: int = 0  # Bytes of slices that arrive beside the result.
    scratch: int = 0  # Bytes of memory for the sum, needed for a while when all slices have arrived.
    # The shard is made when all slices have arrived, beside them; else it is there from the beginning.
    is_late: bool = False


class HandleBytes(NamedTuple):
    """Bytes of one handle."""

    depth: int  # Number of handles around it.
    unsharded: int  # Bytes of the unsharded parameters.
    gradients: int  # Bytes of the gradients that autograd accumulates.
    reduced: tuple[Reduced, ...]  # The reduction of each trainable buffer.
    is_freed: bool  # The parameters are freed between forward and backward.
    secondary: int = 0  # Bytes of the secondary shards that stay between forward and backward.


def peak_of_step(handles: Sequence[HandleBytes]) -> int:
    """Return the peak bytes of forward and backward, without those that rest between steps.

    ``handles`` are left to right, depth first, as they run.
    """
    return max(_forward(handles), max(_backward(handles), default=0))


def _forward(handles: Sequence[HandleBytes]) -> int:
    kept = peak = following = 0
    running: list[HandleBytes] = []  # the current handle and the handles around it

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
    order, ends = _order(handles)
    unsharded = {index for index, handle in enumerate(handles) if not handle.is_freed}
    kept = sum(handle.secondary for handle in handles)
    met: list[int] = []
    under_way: list[Reduced] = []
    shards = 0

    def live() -> int:
        parameters = sum(handles[index].unsharded for index in unsharded)
        gradients = sum(handles[index].gradients for index in met)
        return kept + parameters + gradients + shards + sum(one.whole + one.landing for one in under_way)

    def finish_first() -> int:
        """End the first reduction under way; returns the peak bytes while it ends."""
        nonlocal shards
        first = under_way[0]
        late = first.output if first.is_late else 0
        peak = live() + max(first.scratch, late)
        shards += late
        del under_way[0]
        return peak

    for position, index in enumerate([*order, None]):
        # Handles that ran after this one in forward have all gradients when its backward begins.
        end = -1 if index is None else ends[index]
        for done in sorted((one for one in met if one > end), reverse=True):
            reduced = handles[done].reduced
            for number, one in enumerate(reduced, 1):
                while len(under_way) >= _GRADIENT_BUFFERS:
                    yield finish_first()
                yield live() + one.whole
                if number == len(reduced):
                    # Before the last reduction begins the parameters are freed, and gradients are in its buffer.
                    met.remove(done)
                    unsharded.discard(done)
                under_way.append(one)
                shards += 0 if one.is_late else one.output
            if not reduced:
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
    pooled = 0  # Gradient buffers are freed when backward is over.
    while under_way:
        whole = under_way[0].whole
        yield pooled + finish_first()
        pooled += whole


def _order(handles: Sequence[HandleBytes]) -> tuple[list[int], dict[int, int]]:
    """Return the handles in the order of backward, which is forward's exits reversed, and the last handle in each."""
    left: list[int] = []
    ends: dict[int, int] = {}
    running: list[int] = []
    for index in range(len(handles) + 1):
        depth = handles[index].depth if index < len(handles) else 0
        while running and handles[running[-1]].depth >= depth:
            ends[running[-1]] = index - 1
            left.append(running.pop())
        running.append(index)
    return left[::-1], ends

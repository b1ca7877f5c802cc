"""The steps of ranks with different numbers of inputs, and what those that have some tell the others in them.

A rank without inputs does not know which modules the others run, so they tell it: each collective before it starts, by
one small message of every rank. While all ranks have inputs, one message at the start of a step says so, and is all.
See docs/uneven_inputs.md.

A step begins with a forward and ends with the backward after it; without gradients, with the forward.
"""

import pickle
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from composable.collectives import Ranks
from composable.engine import FlatBuffer
from composable.errors import DesyncError, place_of_rank
from composable.frames import in_backward
from composable.torch_hooks import at_end_of_backward, next_ending_number

__all__ = ["STEP", "Steps", "Told"]

# What is told: of which part of the model, what happens there, with what.
Told: TypeAlias = tuple[int, str, tuple[Any, ...]]
# In place of a part: of the step itself.
STEP = -1
# Bytes of a message, as they travel; what is longer takes another one.
_SHORT = 256


class Steps:
    """The steps of one ``Join``, on one rank.

    Args:
        ranks: All that take part.
        notify: Lets ``Join`` know that this rank has inputs; false: the context is over. Collective.
        buffers: All whose gradients ranks without inputs drop where the others do.
        begin: Called at each begin of a step with the global numbers of the ranks that have inputs.
        describe: Says what was told of a part of the model, for messages.
        is_live: Says whether the context lasts, or an exception has ended it.

    Attributes:
        number: Its place among all that end a backward: after all parts.
        begun: How many steps this rank has begun.
        is_following: This rank has no inputs left: what its parts do is told by others.
    """

    def __init__(
        self,
        ranks: Ranks,
        notify: Callable[[], bool],
        buffers: Sequence[FlatBuffer],
        begin: Callable[[set[int]], None],
        describe: Callable[[int, str, tuple[Any, ...]], str],
        is_live: Callable[[], bool],
    ) -> None:
        self.number = next_ending_number()
        self.begun = 0
        self._is_live = is_live
        self.is_following = False
        self._ranks = ranks
        self._notify = notify
        self._buffers = buffers
        self._begin = begin
        self._describe = describe
        self._is_over = self._is_open = self._is_due = self._has_listeners = False
        self._opener: nn.Module | None = None
        self._backward: weakref.ref[Callable[[], None]] | None = None

    # Where a step begins and ends

    def begin_forward(self, opener: nn.Module) -> None:
        """A forward of ``opener`` begins, and with the first one a step; so does the next one of the same module."""
        if self.is_following or self._is_over:
            return
        if self._is_open and self._opener is opener and not in_backward():
            # No backward came.
            self.tell(STEP, "leave")
            self._is_open = False
        if self._is_open or self._open():
            self._opener = self._opener or opener

    def end_forward(self, opener: nn.Module, *, is_awaited: bool) -> None:
        """A forward of ``opener`` ends; ``is_awaited``: a backward may follow."""
        if self._opener is opener and not is_awaited and not in_backward():
            self._close()

    def begin_backward(self) -> None:
        """A backward begins; the step ends with it."""
        if self.is_following or self._is_over or not (self._is_open or self._open()):
            return
        if self._backward is None or self._backward() is None:
            self._backward = weakref.ref(at_end_of_backward(self))
            if self._has_listeners:
                self.tell(STEP, "drop", [flat.gradients.dropped() for flat in self._buffers])

    def start(self) -> None:
        """Do nothing yet: a backward ends, and its parts have to finish first."""

    def finish(self) -> None:
        """A backward has ended, in all parts."""
        self._close()

    def end_by_hand(self) -> None:
        """Reductions were ended outside of a backward."""
        if not in_backward():
            self._close()

    def note_averages(self) -> None:
        """Parameters get averages in this step: the optimizer steps after it."""
        self._is_due = True
        for flat in self._buffers:
            flat.gradients.watch()

    def drop(self, dropped: Sequence[tuple[int, int]]) -> None:
        """Drop what users have dropped on ranks with inputs."""
        for flat, bits in zip(self._buffers, dropped, strict=True):
            flat.gradients.drop_like(*bits)

    def end(self) -> None:
        """The context is over: from now on nothing is told."""
        self._is_over, self._is_open = True, False

    def is_live(self) -> bool:
        """Say whether the context lasts."""
        return not self._is_over and self._is_live()

    def _open(self) -> bool:
        """Begin a step; false: the context is over. Collective."""
        if not self._notify():
            self.end()
            return False
        self.begun += 1
        self.begin(self.meet((STEP, "begin", ())))
        self._is_open, self._opener, self._is_due = True, None, False
        return True

    def _close(self) -> None:
        if self._is_open and not self.is_following:
            self.tell(STEP, "end", self._is_due)
        self._is_open, self._opener = False, None

    # What is told

    def is_telling(self, *, is_needed: bool = True) -> bool:
        """Say whether some rank has to be told; begins a step if there is none and it ``is_needed``."""
        if self.is_following or self._is_over or not (self._is_open or (is_needed and self._open())):
            return False
        return self._has_listeners

    def tell(self, part: int, what: str, *args: Any) -> None:
        """Tell ranks without inputs, if there are any, what starts in a part of the model. Collective.

        Raises:
            DesyncError: Ranks with inputs tell different things.
        """
        if self.is_telling():
            self.meet((part, what, args))

    def meet(self, told: Told | None) -> list[Told | None]:
        """Return what each rank tells; ``None``: it has no inputs. Collective.

        Raises:
            DesyncError: Ranks with inputs tell different things.
        """
        every = meet_in_join(self._ranks, told)
        found = [one for one in every if one is not None]
        if any(one != found[0] for one in found):
            lines = [
                f"    rank {number}: {self._text_of(one)}"
                for number, one in zip(self._ranks.numbers, every, strict=True)
            ]
            self.end()
            raise DesyncError(
                "\n".join(["ranks with inputs do different things inside of Join", *lines]),
                at=place_of_rank(),
                fix="run the same modules, no_sync and backwards on every rank that has inputs",
            )
        return every

    def begin(self, every: Sequence[Told | None]) -> None:
        """Note who has inputs: whoever tells that a step begins."""
        running = {number for number, one in zip(self._ranks.numbers, every, strict=True) if one is not None}
        self._has_listeners = len(running) < self._ranks.size
        self._begin(running)

    def _text_of(self, told: Told | None) -> str:
        if told is None:
            return "has no inputs left"
        part, what, args = told
        if part != STEP:
            return self._describe(part, what, args)
        texts = {"begin": "begins a step", "leave": "begins another step", "drop": f"has dropped gradients {args}"}
        return texts.get(what, "has ended the step")


def meet_in_join(ranks: Ranks, told: Told | None) -> list[Told | None]:
    """Return what each rank tells: one collective where all of it is short. Collective."""
    if ranks.is_alone:
        return [told] * ranks.size
    data = pickle.dumps(told)
    if len(data) < _SHORT:
        own = bytes([0, *data]).ljust(_SHORT, b"\0")
    else:
        own = bytes([1]).ljust(_SHORT, b"\0")
    with torch.inference_mode(mode=False):
        every = torch.zeros(ranks.size * _SHORT, dtype=torch.uint8, device=ranks.device)
        start = ranks.rank * _SHORT
        every[start : start + _SHORT] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        ranks.gather_ragged(every, range(0, ranks.size * _SHORT + 1, _SHORT))
    received = bytes(every.tolist())
    pieces = [received[start : start + _SHORT] for start in range(0, len(received), _SHORT)]
    if any(piece[0] for piece in pieces):
        return ranks.objects(told)
    return [pickle.loads(piece[1:]) for piece in pieces]  # what these ranks have written just now

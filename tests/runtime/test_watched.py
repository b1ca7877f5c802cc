"""What hears of the end of a backward hears it in the order that all ranks share."""

import gc
from collections.abc import Sequence
from typing import Any

import torch

from composable.ground.torch_hooks import BackwardWatcher, backwards_here, watch_backwards


class Noting:
    """Notes its number when it has looked at a backward, and at its end."""

    is_looking = True

    def __init__(self, number: int, looked: list[int], ended: list[int]) -> None:
        self.number, self._looked, self._ended = number, looked, ended

    def look_ahead(self, outputs: Sequence[Any]) -> bool:
        self._looked.append(self.number)
        return False

    def gather_ahead(self) -> None:
        raise AssertionError

    def end_backward(self, *, has_failed: bool) -> None:
        self._ended.append(self.number)

    def explain(self, error: RuntimeError) -> None:
        pass


def test_annotations_hear_of_the_end_of_a_backward_in_the_order_of_their_numbers() -> None:
    gc.collect()
    looked, ended = list[int](), list[int]()
    # A set of them has another order: that of their addresses.
    watchers: list[BackwardWatcher] = [Noting(number, looked, ended) for number in range(-12, 0)]
    for one in reversed(watchers):
        watch_backwards(one, backwards_here.watchers)
    torch.ones((), requires_grad=True).backward()
    assert looked == ended == sorted(ended) and len(ended) == len(watchers)

"""Flat buffers of equal layout use each other's memory."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from composable import fully_shard
from composable.annotation.root import Root
from composable.comm import Pending, Transport
from composable.engine.gradients import GRADIENT_BUFFERS
from tests.counting import Collective, CountingTransport
from tests.models import DIM, random_input
from tests.world import run_threads


class KeepingTransport(CountingTransport):
    """Keeps what is reduced, so that none of it can lie where another lay before."""

    def __init__(self, inner: Transport, records: list[Collective] | None = None) -> None:
        super().__init__(inner, records)
        self.sources: list[torch.Tensor] = []

    def begin_reduce_scatter(
        self, source: torch.Tensor, shard: torch.Tensor, key: int, *, scale: float = 1.0
    ) -> Pending:
        self.sources.append(source)
        return super().begin_reduce_scatter(source, shard, key, scale=scale)


def reduced_and_made(widths: list[int], max_buffers: int | None = None) -> tuple[int, int]:
    """Return of one backward how many gradient buffers were reduced, and how many were made."""
    model = nn.Sequential(*(nn.Linear(before, after) for before, after in pairwise(widths)))
    fully_shard(model, policy={nn.Linear})
    if max_buffers is not None:
        model.set_reduce_scatter_max_input_buffers(max_buffers)
    state = fully_shard.state(model)
    assert state is not None
    root: Root = state.lazy_init()
    transport = KeepingTransport.install(root)
    assert isinstance(transport, KeepingTransport)
    model(random_input(0, 3, widths[0])).sum().backward()
    return len(transport.sources), len({source.data_ptr() for source in transport.sources})


@pytest.mark.parametrize(
    ("widths", "max_buffers", "made"),
    [
        ([DIM] * 7, None, GRADIENT_BUFFERS),
        # Of other layout, each has its own.
        ([DIM + number for number in range(7)], None, 6),
        *(([DIM] * 7, most, min(6, most)) for most in (1, 2, 4, 9)),
    ],
)
def test_blocks_of_equal_layout_share_as_many_gradient_buffers_as_the_user_allows(
    widths: list[int], max_buffers: int | None, made: int
) -> None:
    assert run_threads(reduced_and_made, 2, widths, max_buffers) == [(6, made)] * 2

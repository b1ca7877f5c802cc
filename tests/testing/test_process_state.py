"""What every rank has for itself: random generators, default dtype, modes, warning filters."""

import random
import warnings
from typing import Any

import torch
import torch.distributed as dist

from composable.testing import simulate


def generators(rank: int) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    found: list[Any] = []
    for _ in range(3):
        found += [torch.randn(2).tolist(), random.random()]
        dist.barrier()
    return found


def test_every_rank_has_random_generators_of_its_own() -> None:
    torch_before, python_before = torch.get_rng_state(), random.getstate()
    alone = simulate(1, generators)[0]
    assert simulate(3, generators) == [alone] * 3
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert random.getstate() == python_before


def modes(rank: int) -> list[Any]:
    found: list[Any] = [torch.is_grad_enabled(), torch.get_default_dtype(), len(warnings.filters)]
    torch.set_default_dtype(torch.float64 if rank else torch.float32)
    with warnings.catch_warnings(), torch.no_grad(), torch.autocast("cpu", enabled=rank == 0):
        warnings.simplefilter("error" if rank else "ignore")
        dist.barrier()
        found += [torch.is_grad_enabled(), torch.get_default_dtype(), warnings.filters[0][0]]
        found.append(torch.is_autocast_enabled("cpu"))
    dist.barrier()
    return [*found, len(warnings.filters)]


def test_modes_dtypes_and_warning_filters_belong_to_a_rank() -> None:
    filters = list(warnings.filters)
    with torch.no_grad():
        found = simulate(2, modes)
    count = len(filters)
    assert found[0] == [True, torch.float32, count, False, torch.float32, "ignore", True, count]
    assert found[1] == [True, torch.float32, count, False, torch.float64, "error", False, count]
    assert torch.get_default_dtype() == torch.float32 and list(warnings.filters) == filters

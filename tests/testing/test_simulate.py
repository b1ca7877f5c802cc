"""Simulations as a whole: they train as processes do, one at a time, and leave nothing behind."""

import contextlib
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composable import ConfigError, DesyncError, UsageError, fully_shard
from composable.testing import simulate
from tests.parity import assert_equal_runs, train_annotated, train_reference
from tests.testing.programs import all_reduces, go_on_alone, groups, part_ways
from tests.world import on_ranks, run_ranks, run_threads


def traces() -> list[Any]:
    """Return what simulations might leave behind in torch and in the process."""
    return [
        distributed_c10d._world,
        distributed_c10d._new_process_group_helper,
        DeviceMesh.__init__,
        sys.excepthook,
        sys.stdout,
        list(warnings.filters),
        dict(distributed_c10d.Backend._plugins),
        list(distributed_c10d.Backend.backend_list),
        dist.is_initialized(),
        threading.active_count(),
        threading.Thread.start,
        threading.Thread.join,
        threading.Condition.wait,
        queue.SimpleQueue,
        torch.get_default_dtype(),
    ]


@pytest.mark.parametrize("fn", [all_reduces, lambda rank: groups(), part_ways, go_on_alone])
def test_nothing_is_left_over(fn: Callable[[int], Any]) -> None:
    before = traces()
    with contextlib.suppress(DesyncError, ValueError):
        simulate(4, fn)
    assert traces() == before


def test_one_simulation_at_a_time() -> None:
    with pytest.raises(UsageError, match="a simulation is running"):
        simulate(2, lambda rank: simulate(2, all_reduces))
    assert simulate(1, all_reduces) == [[0.0] * 3]


@pytest.mark.parametrize("number", [0, True, 1.5])
def test_a_number_of_ranks_that_is_none_is_refused(number: Any) -> None:
    with pytest.raises(ConfigError, match="world_size is"):
        simulate(number, all_reduces)
    with pytest.raises(ConfigError, match="ranks_per_host is"):
        simulate(2, all_reduces, ranks_per_host=number)


@on_ranks(2, run=run_ranks)
def test_a_process_with_a_group_of_its_own_may_simulate() -> None:
    tensor = torch.tensor(1.0)
    dist.all_reduce(tensor)
    inside = simulate(3, all_reduces)
    dist.all_reduce(tensor)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).full_tensor()
    assert [inside, tensor.item(), full.tolist(), dist.get_world_size()] == [
        [[3.0] * 3] * 3,
        4.0,
        [0.0, 1.0, 2.0, 3.0],
        2,
    ]


def test_the_package_imports_no_simulation_and_simulation_little_of_torch() -> None:
    code = (
        "import sys, torch, composable\n"
        "assert not [name for name in sys.modules if name.startswith('composable.testing')]\n"
        "before = set(sys.modules)\n"
        "import composable.testing\n"
        "more = {name for name in set(sys.modules) - before if not name.startswith('composable.testing')}\n"
        "assert not {name.partition('.')[0] for name in more} - set(sys.stdlib_module_names), more\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_training_equals_one_process_and_gloo() -> None:
    name, world_size = "tied_across", 3
    threads = run_threads(train_annotated, world_size, name, fully_shard)
    assert_equal_runs(threads, train_reference(name, world_size))
    processes = run_ranks(train_annotated, world_size, name, fully_shard)
    for of_thread, of_process in zip(threads, processes):
        torch.testing.assert_close(of_thread.losses, of_process.losses, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(of_thread.params, of_process.params, rtol=1e-6, atol=1e-7)

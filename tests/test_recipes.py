"""The recipes of ``CONTRIBUTING.md``: what they show is added as it stands there, and nothing else is changed."""

import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable import ConfigError, HandleOptions, ShardingStrategy, fully_shard, plan, register_comm_hook, replicate
from composable.comm.transport import _REGISTERED, transport_names
from tests.models import BLOCK_CLASSES, MLP, MLPBlock
from tests.programs import compare
from tests.world import run_threads

PAGE = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
MOST_FILES = {"transport": 1, "type of communication hooks": 2, "strategy": 1}

Add = Callable[[str], dict[str, ModuleType]]


def files_of(recipe: str) -> dict[str, str]:
    """Return the files that a recipe shows: name and source."""
    section = PAGE.partition(f"\n### A {recipe}: ")[2].partition("\n##")[0]
    return dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", section, flags=re.DOTALL))


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Writes the files of a recipe somewhere and imports them, as a user would."""
    monkeypatch.syspath_prepend(str(tmp_path))
    known, added = set(_REGISTERED), []

    def add_files(recipe: str) -> dict[str, ModuleType]:
        files = files_of(recipe)
        for name, source in files.items():
            (tmp_path / f"{name}.py").write_text(source)
            added.append(name)
        return {name: importlib.import_module(name) for name in files}

    yield add_files
    for name in added:
        sys.modules.pop(name, None)
    for name in set(_REGISTERED) - known:
        del _REGISTERED[name]


@pytest.mark.parametrize("recipe", MOST_FILES)
def test_a_recipe_needs_few_files(recipe: str) -> None:
    assert 1 <= len(files_of(recipe)) <= MOST_FILES[recipe]


def by_transport(transport: str, model: nn.Module) -> None:
    fully_shard(model, policy=BLOCK_CLASSES, options=HandleOptions(transport=transport))
    assert fully_shard.state(model).plan.transport == transport


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_transport_is_one_file(add: Add, world_size: int) -> None:
    made = add("transport")["broadcasts"].BroadcastTransport
    calls: list[int] = []
    begin = made.begin_all_gather
    made.begin_all_gather = lambda self, *args: (calls.append(1), begin(self, *args))[1]
    run_threads(compare, world_size, "mlp", functools.partial(by_transport, "broadcasts"))
    assert calls and "broadcasts" in transport_names()
    planned = plan(MLP(), world_size=2, transport="broadcasts", ranks_per_host=1)
    # By its own word it is a ring, as the process group's collectives are.
    ring = plan(MLP(), world_size=2, transport="process_group", ranks_per_host=1)
    assert planned.expected_traffic() == ring.expected_traffic()
    assert planned.peak_bytes_per_rank() == ring.peak_bytes_per_rank()


def with_hook(hook: Callable[..., None], model: nn.Module) -> None:
    replicate(next(one for one in model.modules() if isinstance(one, MLPBlock)))
    fully_shard(model, policy=BLOCK_CLASSES)
    register_comm_hook(model, dist.group.WORLD, hook)


@pytest.mark.parametrize(("world_size", "is_text"), [(1, False), (2, False), (3, False), (2, True)])
def test_a_type_of_communication_hooks_is_two_files(add: Add, world_size: int, *, is_text: bool) -> None:
    made = add("type of communication hooks")
    hook = made["exact_hook"].exact_hook
    if is_text:  # as ``from __future__ import annotations`` leaves it
        hook.__annotations__["whole"] = "WholeGradients"
    kinds: list[bool] = []
    whole = made["whole_gradients"].WholeGradients
    call = whole.call_hook
    whole.call_hook = staticmethod(lambda *args: (kinds.append(args[-1] is None), call(*args))[1])
    run_threads(compare, world_size, "mlp", functools.partial(with_hook, hook))
    assert {*kinds} == {True, False}, "both annotations have called it"


def in_pairs(strategy: ShardingStrategy, model: nn.Module) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, policy=BLOCK_CLASSES, mesh=mesh, strategy=strategy)
    assert {handle.secondary_ranks for handle in fully_shard.state(model).plan.handles} == {2}


def test_a_strategy_is_a_value(add: Add) -> None:
    strategy = add("strategy")["pairs"].PAIRS
    run_threads(compare, 8, "mlp", functools.partial(in_pairs, strategy))
    with pytest.raises(ConfigError, match="reshard_after_forward is 2, and 3 ranks"):
        plan(MLP(), world_size=3, replicas=2, strategy=strategy)

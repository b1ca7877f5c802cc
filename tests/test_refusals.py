"""What ``fully_shard`` and the policies refuse: the call, and the error that it raises on every rank.

Each call leaves the model as it was. What ``replicate`` refuses stands with its options. Refusals of one feature, in which a model must have run before, stand with that feature.
"""

import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
from torch.distributed.fsdp import CPUOffloadPolicy as TorchCPUOffloadPolicy

from composable import (
    ComposableError,
    ConfigError,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    UsageError,
    fully_shard,
    plan,
    replicate,
)
from composable.ground.contract import get_registry
from tests.models import make_model
from tests.world import on_ranks

BF16 = torch.bfloat16
Call = Callable[[Any], object]


def sharded(**options: Any) -> Call:
    return lambda model: fully_shard(model, **options)


def on_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None = None, **options: Any) -> Call:
    return lambda model: fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names), **options)


def in_groups(count: int, **options: Any) -> Call:
    """Pass a group of all ranks, or a pair of them."""
    return lambda model: fully_shard(
        model, process_group=dist.group.WORLD if count == 1 else (dist.group.WORLD,) * 2, **options
    )


def script(model: nn.Module) -> object:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)
        return torch.jit.script(model)  # type: ignore[no-untyped-call]


SQUARE = ((1, 2), ("a", "b"))
OTHER_DIM = DataParallelMeshDims(shard="c")
ONLY_BF16 = MixedPrecisionPolicy(BF16)


# What tests/test_arguments.py passes to every argument of every function is not here again.
FULLY_SHARD: list[tuple[Call, str]] = [
    (lambda model: fully_shard(model.blocks), "ConfigError: ModuleList has no forward"),
    (on_mesh((1, 2, 1), ("a", "b", "c")), "ConfigError: mesh has 3 dims (1, 2, 1)"),
    (on_mesh((1, 2)), "ConfigError: a mesh of 2 dims (1, 2) without names"),
    (lambda model: fully_shard(model, mesh=dist.group.WORLD), "ConfigError: mesh is a SimulatedGroup"),
    (on_mesh((2,), strategy="HYBRID_SHARD"), "ConfigError: a hybrid strategy on a mesh of one dim (2,)"),
    (on_mesh(*SQUARE, strategy="FULL_SHARD"), "ConfigError: a strategy on a mesh with a dim for replicas"),
    (on_mesh(*SQUARE, dp_mesh_dims=OTHER_DIM), "ConfigError: the mesh has no dim 'c', but ('a', 'b')"),
    (sharded(dp_mesh_dims=OTHER_DIM), "ConfigError: dp_mesh_dims is given without a mesh"),
    (on_mesh(*SQUARE, dp_mesh_dims="a"), "ConfigError: dp_mesh_dims is 'a'"),
    (
        lambda model: fully_shard(model, process_group=dist.group.WORLD, mesh=init_device_mesh("cpu", (2,))),
        "ConfigError: both mesh and process_group are given",
    ),
    (in_groups(1, strategy="HYBRID_SHARD"), "ConfigError: a hybrid strategy with 1 process groups"),
    (in_groups(2, strategy="FULL_SHARD"), "ConfigError: a strategy with 2 process groups"),
    (sharded(policy={nn.Conv2d}), "picks nothing"),
    (
        sharded(strategy="FULL_SHARD", reshard_after_forward=True),
        "ConfigError: strategy and reshard_after_forward both say what is freed when",
    ),
    (sharded(reshard_after_forward=3), "reshard_after_forward is 3, and 2 ranks share the param"),
    (sharded(reshard_after_forward=0), "reshard_after_forward is 0"),
    (sharded(reshard_after_forward=2.0), "reshard_after_forward is 2.0"),
    (sharded(mp_policy=replace(ONLY_BF16, param_dtype_override_fn=lambda _: torch.int32)), "returned torch.int32"),
    (sharded(mp_policy=replace(ONLY_BF16, param_dtype_override_fn={}.__getitem__)), "raised KeyError"),
    (sharded(offload_policy=MixedPrecisionPolicy()), "ConfigError: offload_policy is"),
    (
        sharded(offload_policy=TorchCPUOffloadPolicy(pin_memory="yes")),  # type: ignore[arg-type]
        "ConfigError: pin_memory of the offload policy is 'yes'",
    ),
    (
        sharded(offload_policy=CPUOffload(offload_params=1)),  # type: ignore[arg-type]
        "ConfigError: offload_params of the offload policy is 1",
    ),
]
# Something was annotated before.
ALREADY: list[tuple[Call, str]] = [
    (
        lambda model: (fully_shard(model.inp), fully_shard(model.inp)),
        "ConfigError: fully_shard is already on this module",
    ),
    (lambda model: (replicate(model), replicate(model)), "ConfigError: replicate is already on this module"),
    (
        lambda model: replicate(fully_shard(model)),
        "ConfigError: replicate and fully_shard cannot both be on one module",
    ),
    (
        lambda model: (replicate(model), fully_shard(model.inp)),
        "ConfigError: replicate averages parameter 'weight' already, as 'inp.weight' of module MLP",
    ),
    (
        lambda model: fully_shard(replicate(model)),
        "ConfigError: fully_shard and replicate cannot both be on one module",
    ),
    (
        lambda model: replicate(fully_shard(model).blocks[1]),
        "ConfigError: parameter is a RaggedDTensor, which is sharded already",
    ),
    (lambda model: script(fully_shard(model)), "UsageError: a sharded module cannot be scripted"),
    (lambda model: script(replicate(model)), "UsageError: a replicated module cannot be scripted"),
    *[
        (
            lambda model, kept=kept: FullyShardedDataParallel(
                fully_shard(model), use_orig_params=kept, device_id=torch.device("cpu")
            ),
            "UsageError: FullyShardedDataParallel, or other code, resizes the storage",
        )
        for kept in (False, True)
    ],
    (lambda model: pickle.dumps(replicate(model)), "UsageError: a replicated module cannot be pickled"),
    (lambda model: pickle.dumps(fully_shard(model)), "cannot be pickled"),
    (lambda model: pickle.dumps(nn.Sequential(fully_shard(model))), "cannot be pickled"),
    (
        lambda model: fully_shard(model).set_requires_gradient_sync("no"),
        "ConfigError: requires_gradient_sync is 'no'",
    ),
]


def assert_refused(call: Call, expected: str, *, leaves: bool) -> None:
    """Call, on a rank; with ``leaves`` the model is as before, and may be annotated after all."""
    model: Any = make_model("mlp")
    before, classes = dict(model.named_parameters()), [type(module) for module in model.modules()]
    with pytest.raises(ComposableError) as caught:
        call(model)
    text = f"{type(caught.value).__name__}: {caught.value}"
    assert expected in text and f"\n  at:  rank {dist.get_rank()}" in text and "\n  fix: " in text, text
    if leaves:
        assert dict(model.named_parameters()).keys() == before.keys()
        assert all(param is before[fqn] for fqn, param in model.named_parameters())
        assert [type(module) for module in model.modules()] == classes
        for module in model.modules():
            assert not get_registry(module) and not module._forward_pre_hooks and not module._forward_hooks


@pytest.mark.parametrize("number", range(len(FULLY_SHARD)), ids=[text for _, text in FULLY_SHARD])
@on_ranks(2)
def test_fully_shard_refuses(number: int) -> None:
    assert_refused(*FULLY_SHARD[number], leaves=True)


@pytest.mark.parametrize("number", range(len(ALREADY)), ids=[text for _, text in ALREADY])
@on_ranks(2)
def test_what_is_annotated_already_is_refused(number: int) -> None:
    assert_refused(*ALREADY[number], leaves=False)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("param_dtype", torch.int8, "param_dtype of the mixed precision policy is torch.int8"),
        ("reduce_dtype", "bf16", "reduce_dtype of the mixed precision policy is 'bf16'"),
        ("reduce_dtype", torch.float8_e4m3fn, "pass one of torch.float32"),
        ("output_dtype", torch.complex64, "output_dtype"),
        ("skipped_module_classes", (int,), "skipped_module_classes"),
    ],
)
def test_a_dtype_or_class_that_makes_no_policy_is_refused(name: str, value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        MixedPrecisionPolicy(**{name: value})


def test_a_plan_or_dims_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ConfigError, match="FULL_SHARD keeps one copy of each shard, and the mesh has 3"):
        plan(make_model("mlp"), world_size=2, replicas=3, strategy="FULL_SHARD")
    with pytest.raises(ConfigError, match="replicas is 0"):
        plan(make_model("mlp"), world_size=2, replicas=0)
    with pytest.raises(ConfigError):
        DataParallelMeshDims("a", "a")


def test_a_process_group_is_asked_for() -> None:
    with pytest.raises(UsageError, match="none is initialised"):
        fully_shard(make_model("mlp"))

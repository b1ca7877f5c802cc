"""Plans of random models under random options: every feature that a plan can have."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard

from composable import (
    ConfigError,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardPlan,
    SizePolicy,
    plan,
)
from composable.contract import contract
from tests.subclasses import Int8Weight, Linear4bit, Marked, Params4bit

__all__ = ["random_plan"]

DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float64]


@contract()
def fully_shard(module: nn.Module) -> nn.Module:
    """Stand for an earlier annotation: the registry entry alone."""
    return module


def layer(rng: random.Random) -> nn.Module:
    rows, columns = rng.randint(1, 9), rng.randint(1, 9)
    kind = rng.randrange(9)
    if kind == 0:
        return nn.LayerNorm(columns)
    if kind == 1:
        return nn.Embedding(rows, columns)
    if kind == 2:
        return Linear4bit(nn.Linear(columns, rows))
    module = nn.Linear(columns, rows, bias=rng.random() < 0.5)
    if kind == 3:
        module.weight = nn.Parameter(Int8Weight(module.weight.detach()))
        return module
    if kind == 4:
        module.weight = Marked(module.weight.detach(), axes=("out", "in"))
    elif kind == 5:
        module.scale = nn.Parameter(torch.ones(()))
    elif kind == 6:
        module.nothing = nn.Parameter(torch.ones(0, 3))
    elif kind == 7:
        return nn.Conv2d(columns, rows, 3).to(memory_format=torch.channels_last)
    module.requires_grad_(requires_grad=rng.random() < 0.8)
    return module.to(rng.choice(DTYPES))


def tree(rng: random.Random, depth: int) -> nn.Sequential:
    children = [tree(rng, depth - 1) if depth and rng.random() < 0.5 else layer(rng) for _ in range(rng.randint(1, 4))]
    if len(children) > 1 and rng.random() < 0.2:
        children[-1] = children[0]  # a module in two places
    return nn.Sequential(*children)


def tie(rng: random.Random, model: nn.Module) -> None:
    linears = [one for one in model.modules() if type(one) is nn.Linear and type(one.weight) is nn.Parameter]
    if len(linears) > 1 and rng.random() < 0.4:
        first, second = rng.sample(linears, 2)
        second.weight = first.weight


def dtype_of(param: nn.Parameter) -> torch.dtype | None:
    return torch.float32 if param.dim() == 1 else None


def second_dim(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() > 1 and param.shape[1] else None


def align(fqn: str, param: nn.Parameter) -> Any:
    return "tensor" if fqn.endswith("bias") else "element" if "0" in fqn else None


def options(rng: random.Random, model: nn.Module) -> dict[str, Any]:
    inner = [module for module in model.modules() if module is not model]
    places: dict[str, Any] = rng.choice([{}, {}, {"align": align}, {"shard_placement_fn": second_dim}])
    return {
        "world_size": rng.choice([1, 2, 3, 8, 64, 4096]),
        "replicas": rng.choice([1, 1, 2, 3]),
        "policy": rng.choice(
            [None, {nn.Linear}, {nn.Sequential}, SizePolicy(20), lambda module: hasattr(module, "scale")]
        ),
        "reshard_after_forward": rng.choice([None, True, False, 2, 3, 8]),
        "ignored_params": [param for param in model.parameters() if rng.random() < 0.05],
        "ignored_modules": [module for module in inner if rng.random() < 0.05],
        "unused_gradients": rng.choice(["none", "zero"]),
        "transport": rng.choice(["auto", "point_to_point", "process_group"]),
        "mp_policy": MixedPrecisionPolicy(
            rng.choice([None, torch.bfloat16]),
            rng.choice([None, torch.float32]),
            rng.choice([None, torch.float32]),
            cast_forward_inputs=rng.random() < 0.5,
            cast_root_forward_inputs=rng.choice([None, True, False]),
            keep_low_precision_grads=rng.random() < 0.5,
            skipped_module_classes=rng.choice([(), (nn.LayerNorm, nn.Embedding), (Linear4bit,)]),
            param_dtype_override_fn=rng.choice([None, dtype_of, lambda param: None]),
        ),
        "offload_policy": rng.choice([OffloadPolicy(), CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)]),
        "shard_as_bytes": [Params4bit],
        **places,
    }


def tries(seed: int) -> Iterator[Callable[[], ShardPlan]]:
    for number in count():
        rng = random.Random(f"{seed} {number}")
        model = tree(rng, rng.randint(0, 2))
        tie(rng, model)
        inner = [module for module in model.modules() if module is not model and list(module.parameters())]
        if inner and rng.random() < 0.3:
            fully_shard(rng.choice(inner))
        given = options(rng, model)

        def make(model: nn.Module = model, given: dict[str, Any] = given, rng: random.Random = rng) -> ShardPlan:
            made = plan(model, **given)
            ranks = range(made.world_size * made.replicas)
            hosts = rng.choice([(), tuple(rank // 4 for rank in ranks), tuple(rng.randrange(3) for _ in ranks)])
            return replace(made, hosts=hosts)

        yield make


def random_plan(seed: int) -> ShardPlan:
    """Return the plan of a random model; of models and options that contradict each other, others are tried."""
    for make in tries(seed):
        try:
            return make()
        except ConfigError:
            continue
    raise AssertionError("tries never end")

"""Inputs that mixed precision casts: the containers that blocks share and fill are the caller's own."""

import dataclasses
import random
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from composable import MixedPrecisionPolicy, fully_shard, replicate
from tests.models import seeded
from tests.world import on_ranks

DIM = 4
BF16 = MixedPrecisionPolicy(torch.bfloat16)
Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Shared:
    rope: torch.Tensor
    kept: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    rope: torch.Tensor
    inside: Any = None


def containers(inner: Any) -> list[Any]:
    """Return containers that hold a float32 tensor and ``inner``."""
    rope = torch.ones(DIM)
    return [
        {"rope": rope, "inner": inner},
        OrderedDict(rope=rope, inner=inner),
        defaultdict(list, {"rope": rope, "inner": inner}),
        [rope, inner],
        deque([rope, inner]),
        Shared(rope, inner),
        Pair(rope, inner),
        (rope, inner),
        Frozen(rope, inner),
    ]


def draw(seed: int) -> Any:
    pick = random.Random(seed)
    shared: Any = pick.choice(containers(torch.ones(2)))
    for _ in range(pick.randint(0, 2)):
        shared = pick.choice(containers(shared))
    return shared


def parts_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, deque, tuple)):
        return list(value)
    return (
        [getattr(value, field.name) for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    )


def walk(value: Any) -> Iterator[Any]:
    yield value
    for part in parts_of(value):
        yield from walk(part)


def fill(shared: Any, y: torch.Tensor, name: str, pick: random.Random) -> None:
    """Add ``y`` to every container that can be written to; sometimes in place of the tensor of the caller."""
    for one in list(walk(shared)):
        if isinstance(one, dict):
            one["rope" if pick.random() < 0.2 else name] = y
        elif isinstance(one, (list, deque)):
            if pick.random() < 0.3:
                one.insert(0, y)
            else:
                one.append(y)
        elif isinstance(one, Shared):
            one.kept = y


class Block(nn.Module):
    def __init__(self, name: str, seed: int, fails: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.name, self.pick, self.fails = name, random.Random(seed), fails
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor, shared: Any, *, again: Any = None) -> torch.Tensor:
        tensors = [one for one in walk((shared, again)) if isinstance(one, torch.Tensor)]
        self.seen |= {one.dtype for one in tensors}
        y: torch.Tensor = self.linear(x)
        fill(shared, y, self.name, self.pick)
        if self.fails:
            raise ValueError("in the middle")
        return y


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        pick = random.Random(seed)
        self.passes_twice, fails = pick.random() < 0.3, pick.random() < 0.2
        self.blocks = nn.ModuleList(Block(f"block {i}", seed + i, fails and i == 1) for i in range(2))

    def forward(self, x: torch.Tensor, shared: Any) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, shared, again=shared if self.passes_twice else None)
        return x


def shape_of(value: Any, known: dict[int, str]) -> Any:
    """Return the containers as nested tuples, with a word for each tensor."""
    if isinstance(value, torch.Tensor):
        return known.get(id(value), f"made {list(value.shape)}")
    names = list(value) if isinstance(value, dict) else []
    return type(value).__name__, names, [shape_of(part, known) for part in parts_of(value)]


def run(seed: int, annotate: Callable[[Net], object]) -> tuple[Any, list[int], bool]:
    torch.manual_seed(0)
    model, shared = Net(seed), draw(seed)
    annotate(model)
    known = {id(one): f"own {index}" for index, one in enumerate(walk(shared)) if isinstance(one, torch.Tensor)}
    held = list(walk(shared))
    try:
        model(torch.ones(2, DIM), shared)
        has_failed = False
    except ValueError:
        has_failed = True
    after = list(walk(shared))
    lost = [index for index, one in enumerate(held) if parts_of(one) and not any(one is other for other in after)]
    if hasattr(model.blocks[0], "reshard"):
        assert all(block.seen <= {torch.bfloat16} for block in model.blocks), "an input was not cast"
    return shape_of(shared, known), lost, has_failed


def no_annotation(model: Net) -> None:
    pass


def shard(model: Net) -> None:
    for block in model.blocks:
        fully_shard(block, mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)


def shard_some(model: Net) -> None:
    fully_shard(model.blocks[1], mp_policy=BF16)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False))


def copy_each(model: Net) -> None:
    for block in model.blocks:
        replicate(block, mp_policy=BF16)


def skip_linear(model: Net) -> None:
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, skipped_module_classes=(Block,)))


@on_ranks(2, annotate=[shard, copy_each, skip_linear])
def test_containers_hold_after_a_forward_what_one_process_has_put_there(annotate: Callable[[Net], object]) -> None:
    for seed in range(40):
        assert run(seed, annotate) == run(seed, no_annotation), seed


class Decoder(nn.Module):
    """Blocks, and layers of the root after them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(depth))
        self.norm, self.lm_head = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM)
        self.between: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            self.between.append(x.dtype)
        output: torch.Tensor = self.lm_head(self.norm(x))
        return output


@on_ranks(2, picks=[None, {nn.Sequential}, {nn.Linear}, {nn.Sequential, nn.LayerNorm}])
def test_only_outputs_of_the_outermost_module_of_a_call_are_cast(picks: Any) -> None:
    for depth, dtype in ((1, torch.float32), (2, torch.float32), (2, torch.float64), (3, torch.float16)):
        model, plain = (seeded(lambda: Decoder(depth), depth) for _ in range(2))  # noqa: B023
        fully_shard(model, policy=picks, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=dtype))
        output = model(torch.ones(2, DIM))
        torch.testing.assert_close(output.float(), plain(torch.ones(2, DIM)), atol=0.05, rtol=0.05)
        output.sum().backward()
        assert all(param.grad.dtype == torch.float32 for param in model.parameters())
        assert (output.dtype, model.between) == (dtype, [torch.bfloat16] * depth)

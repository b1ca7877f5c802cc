"""Parameters that are frozen, thawed and zeroed while ``no_sync`` keeps their gradients."""

import random
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

import composable
from composable import DesyncError, MixedPrecisionPolicy, fully_shard, no_sync, reduce_gradients, replicate, unannotate
from tests.models import random_input
from tests.programs import Twins
from tests.world import on_ranks, run_threads

PARTS = 3


class Parts(nn.Module):
    """Linear layers in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(5, 5) for _ in range(PARTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


def loss_at(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    return model(random_input(7 * number + rank, 3, 5)).square().sum()


def annotate(model: Parts, draw: random.Random) -> float:
    """Annotate a random way; returns the tolerance."""
    kind = draw.choice(["whole", "parts", "parts", "some", "replicate", "mixed"])
    is_low = draw.random() < 0.2
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if is_low else None)
    for number, part in enumerate(model.parts):
        if kind in ("parts", "mixed") or (kind == "some" and number):
            fully_shard(part, mp_policy=policy)
    if kind == "replicate":
        replicate(model, find_unused_parameters=True)
        return 2e-5
    if kind != "mixed":
        fully_shard(model, mp_policy=policy)
    return 0.03 if is_low else 2e-5


def freeze(twins: Twins, frozen: set[str]) -> None:
    for one in twins:
        for name, param in one.named_parameters():
            param.requires_grad_(name not in frozen)


def run(seed: int) -> None:
    """Compare gradients with those of one process over a random program of micro-batches, at each average."""
    draw = random.Random(seed)
    twins = Twins(Parts, lambda model: annotate(model, draw), loss=loss_at)
    names = [name for name, _ in twins.plain.named_parameters()]
    for step in range(3):
        count = draw.randint(1, 4)
        ends_by_hand = draw.random() < 0.4
        for micro in range(count):
            if draw.random() < 0.8:
                chosen = draw.choice([*range(PARTS), None])
                of_part = [name for name in names if chosen is None or f".{chosen}." in name]
                frozen = {name for name in of_part if draw.random() < 0.8}
                if len(frozen) == len(names) or draw.random() < 0.1:
                    frozen = set()
                freeze(twins, frozen)
            syncs = micro == count - 1 and not ends_by_hand
            twins.backward(14 * step + micro, keeps=not syncs)
            if not syncs and draw.random() < 0.3:
                sets_to_none, part = draw.random() < 0.5, draw.choice([*range(PARTS), None])
                for one in twins:
                    (one if part is None else one.parts[part]).zero_grad(set_to_none=sets_to_none)
        if ends_by_hand:
            if draw.random() < 0.5:
                freeze(twins, {name for name in names if draw.random() < 0.5})
            if step == 2 and draw.random() < 0.5:
                unannotate(twins.model)
            else:
                reduce_gradients(twins.model)
        twins.check_gradients(twins.answer, where=(seed, step))
        twins.drop(set_to_none=draw.random() < 0.7)
        freeze(twins, set())


@pytest.mark.parametrize(("seeds", "world_size"), [(range(40), 2), (range(40, 60), 3)])
@on_ranks()
def test_gradients_are_those_of_one_process(seeds: range) -> None:
    for seed in seeds:
        run(seed)


@on_ranks(2, kind=["whole", "parts"])
def test_what_waits_for_a_frozen_parameter_is_stepped_inside_backward(kind: str) -> None:
    def annotate_all(model: Parts) -> None:
        for part in model.parts if kind == "parts" else ():
            fully_shard(part)
        fully_shard(model)

    twins = Twins(Parts, annotate_all, loss=loss_at)
    composable.step_in_backward(twins.optimizers[0])
    for number in range(2):
        freeze(twins, {"parts.0.weight", "parts.0.bias"} if number else set())
        twins.backward(number, keeps=number == 0)
    twins.step(of_ranks=False)
    twins.check()


# Copies

DROPS = ("zero_grad", "zeros", "optimizer", "one", "none")


def drop_all(model: nn.Module, how: str) -> None:
    if how == "zero_grad":
        model.zero_grad()
    elif how == "zeros":
        model.zero_grad(set_to_none=False)
    elif how == "optimizer":
        torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    elif how == "one":
        next(model.parameters()).grad = None


def run_copied(seed: int) -> None:
    """Compare a model and a deep copy of it, made once no gradient waits, with those of one process."""
    draw = random.Random(seed)
    pairs = [Twins(Parts, lambda model: annotate(model, draw), loss=loss_at)]
    for number in range(draw.randint(3, 7)):
        for which, twins in enumerate(pairs):
            twins.backward(14 * number + which, keeps=draw.random() > 0.3)
        twins = draw.choice(pairs)
        before, after = draw.choice(DROPS), draw.choice(DROPS)
        for one in twins:
            drop_all(one, before)
        if len(pairs) == 1 or draw.random() < 0.3:
            reduce_gradients(twins.model)
            pairs.append(twins.twin())
        for one in draw.choice(pairs) if draw.random() < 0.5 else twins:
            drop_all(one, after)
    for which, twins in enumerate(pairs):
        reduce_gradients(twins.model)
        twins.check_gradients(twins.answer, where=(seed, which))


@pytest.mark.parametrize(("seeds", "world_size"), [(range(40), 2), (range(40, 60), 3)])
@on_ranks()
def test_copies_hold_the_gradients_that_were_not_dropped(seeds: range) -> None:
    for seed in seeds:
        run_copied(seed)


def run_copy_of_frozen(seed: int) -> None:
    """Copy replicated modules with parameters that were frozen since, and train both on."""
    draw = random.Random(seed)

    def replicate_all(model: Parts) -> None:
        if draw.random() < 0.5:
            replicate(model, find_unused_parameters=True)
        else:
            for part in model.parts:
                replicate(part, find_unused_parameters=True, gradient_as_bucket_view=draw.random() < 0.5)

    pairs = [Twins(Parts, replicate_all, loss=loss_at)]
    names = [name for name, _ in pairs[0].plain.named_parameters()]
    for number in range(5):
        chosen = draw.choice(pairs)
        freeze(chosen, {name for name in names if draw.random() < 0.4} - {draw.choice(names)})
        if number in (1, 3):
            pairs.append(chosen.twin())
        for twins in pairs:
            twins.drop()
            twins.backward(number)
            twins.check_gradients(2e-5, where=(seed, number))


@on_ranks(world_size=[2, 3])
def test_copies_of_frozen_parameters_train_on() -> None:
    for seed in range(15):
        run_copy_of_frozen(seed)


def train_frozen_by_some(seed: int) -> tuple[list[str], list[int], str]:
    """Freeze some parameters on some ranks, before a random step; return what is frozen, where, and the error."""
    rng = random.Random(seed)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    wraps, reshards = rng.random() < 0.5, rng.choice([True, False])
    fully_shard(model, policy={nn.Linear} if wraps else None, reshard_after_forward=reshards)
    # Not those of the first layer: without it backward gathers less, so ranks wait for each other before they compare.
    names = [name for name, _ in model.named_parameters()][2:]
    chosen = names[:2] if rng.random() < 0.5 else rng.sample(names, rng.randint(1, 3))
    world_size = dist.get_world_size()
    culprits = sorted(rng.sample(range(world_size), rng.randint(1, world_size - 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    when, micro_batches = rng.randrange(3), rng.randint(1, 2)
    for step in range(4):
        if step == when and dist.get_rank() in culprits:
            for name in chosen:
                model.get_parameter(name).requires_grad_(False)
        try:
            for batch in range(micro_batches):
                with no_sync(model) if batch + 1 < micro_batches else nullcontext():
                    model(torch.ones(2, 3)).square().mean().backward()
        except DesyncError as error:
            assert step == when
            return chosen, culprits, str(error)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError(f"seed {seed}: no error")


@pytest.mark.parametrize("world_size", [2, 3])
def test_what_some_ranks_freeze_is_an_error_on_all_of_them_in_that_step(world_size: int) -> None:
    for seed in range(12):
        for chosen, culprits, text in run_threads(train_frozen_by_some, world_size, seed):
            first = next(line for line in text.splitlines() if f"rank {culprits[0]}:" in line)
            assert "frozen" in first, f"seed {seed}: {text}"
            assert any(repr(name) in first for name in chosen), f"seed {seed}: {text}"
            innocent = next(rank for rank in range(world_size) if rank not in culprits)
            assert next(line for line in text.splitlines() if f"rank {innocent}:" in line).endswith("as annotated")

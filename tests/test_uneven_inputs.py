"""Ranks with different numbers of inputs train like one process on the inputs that there are, under every annotation."""

import contextlib
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable import (
    ConfigError,
    DesyncError,
    HandleOptions,
    UsageError,
    as_ddp,
    clip_grad_norm_,
    fully_shard,
    joinable,
    no_sync,
    reduce_gradients,
    register_comm_hook,
    replicate,
    set_divergence_timeout,
    step_in_backward,
    unannotate,
)
from composable.annotation import sharded_state_of
from composable.comm import Ranks
from composable.comm.waits import Diagnosis
from composable.ground.torch_private import store_of_default_group
from tests.counting import Collective, CountingTransport
from tests.models import DIM, MLP, MLPBlock, loss_of, random_input, seeded
from tests.parity import assert_equal_params, full_params
from tests.programs import Twins
from tests.world import RankErrors, on_ranks, run_ranks, run_threads

LR = 0.1


def net(seed: int = 0) -> MLP:
    return seeded(MLP, seed)


def hybrid_mesh() -> DeviceMesh:
    size = dist.get_world_size()
    copies = 2 if size % 2 == 0 else 1
    return init_device_mesh("cpu", (copies, size // copies), mesh_dim_names=("replicate", "shard"))


# How a model is annotated


def shard(model: MLP, **options: Any) -> None:
    fully_shard(model, policy={MLPBlock}, **options)


def shard_in_calls(model: MLP) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def shard_without_a_root(model: MLP) -> None:
    fully_shard([model.inp, model.out])
    for block in model.blocks:
        fully_shard(block)


def shard_hybrid(model: MLP, strategy: str) -> None:
    shard(model, mesh=hybrid_mesh(), strategy=strategy)


def copy_whole(modules: Any) -> None:
    replicate(modules, find_unused_parameters=True)


def replicate_inside(model: MLP) -> None:
    copy_whole(model.blocks[1])
    shard(model)


def replicate_a_pair_inside(model: MLP) -> None:
    copy_whole([model.blocks[0], model.out])
    shard(model)


def replicate_around(model: MLP) -> None:
    fully_shard(model.blocks[0])
    fully_shard(model.blocks[2], reshard_after_forward=False)
    copy_whole(model)


def replicate_pairs(model: MLP) -> None:
    copy_whole([model.inp, *model.blocks])
    copy_whole(model.out)


def hook_both(model: MLP) -> None:
    replicate_inside(model)
    register_comm_hook(model.blocks[1], None, default_hooks.allreduce_hook)
    model.set_all_reduce_hook(lambda shard: shard.mul_(1.0))


ANNOTATIONS: dict[str, Callable[[MLP], None]] = {
    "full": shard,
    "calls": shard_in_calls,
    "no root": shard_without_a_root,
    "kept after forward": lambda model: shard(model, strategy="SHARD_GRAD_OP"),
    "hybrid": lambda model: shard_hybrid(model, "HYBRID_SHARD"),
    "hybrid kept": lambda model: shard_hybrid(model, "HYBRID_SHARD_ZERO2"),
    "replicate inside": replicate_inside,
    "pair inside": replicate_a_pair_inside,
    "replicate around": replicate_around,
    "pairs": replicate_pairs,
    "replicated": copy_whole,
    # Collectives of one group are told apart by their order alone.
    "in one order": lambda model: shard(model, options=HandleOptions(transport="process_group")),
    "hooks of both": hook_both,
}


@dataclass
class Case:
    """A run: how many inputs each rank has, and what is done with them."""

    counts: list[int]
    annotation: str = "full"
    divides_by_all: bool = True
    accumulates: bool = False
    clips: bool = False
    skips: bool = False
    drops: str = "none at the end"
    optimizer: str = "SGD"
    seed: int = 0
    epochs: int = 1

    @property
    def steps(self) -> int:
        return max(self.counts)

    def input_of(self, step: int, rank: int) -> torch.Tensor:
        return random_input(1000 * self.seed + 10 * step + rank, 3, DIM)

    def skipped(self, step: int) -> int:
        # The same in all backwards of a step: what one that averages does not run keeps its gradients.
        return step // (1 + self.accumulates) % 4 - 1 if self.skips else -1

    def averages(self, step: int) -> bool:
        return not self.accumulates or step % 2 == 1

    def drop(self, optimizer: torch.optim.Optimizer, place: str) -> None:
        """Drop gradients, if this run does so at this place of a step."""
        way, _, at = self.drops.partition(" at the ")
        if at == place:
            optimizer.zero_grad(set_to_none=way == "none")

    def make_optimizer(self, params: Any) -> torch.optim.Optimizer:
        if self.optimizer == "SGD":
            return torch.optim.SGD(params, lr=LR, momentum=0.9)
        return torch.optim.AdamW(params, lr=LR, eps=1e-3)


def train_alone(case: Case) -> dict[str, torch.Tensor]:
    """Do what all ranks together do, with the inputs that there are."""
    model = net()
    optimizer = case.make_optimizer(model.parameters())
    for begin in range(0, 100 * case.epochs, 100):
        for step in filter(case.averages, range(case.steps)):
            case.drop(optimizer, "begin")
            running = [rank for rank, count in enumerate(case.counts) if count > step]
            divisor = len(case.counts) if case.divides_by_all else len(running)
            for rank in running:
                for each in range(step - case.accumulates, step + 1):
                    x = case.input_of(begin + each, rank)
                    (model(x, case.skipped(each)).square().mean() / divisor).backward()
            if case.clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            case.drop(optimizer, "end")
        optimizer.zero_grad()
        for rank in range(len(case.counts)):
            (model(case.input_of(begin + 99, rank)).square().mean() / len(case.counts)).backward()
        optimizer.step()
        case.drop(optimizer, "end")
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@contextlib.contextmanager
def joined(*joinables: Any, **options: Any) -> Iterator[None]:
    """Enter ``Join``, which changes how all warnings are shown."""
    with warnings.catch_warnings(), Join(list(joinables), **options):
        yield


def train_jointly(case: Case) -> dict[str, torch.Tensor]:
    """Train on the inputs of this rank inside of ``Join``, and take a step of all ranks after it."""
    model = net()
    ANNOTATIONS[case.annotation](model)
    optimizer = case.make_optimizer(model.parameters())
    rank = dist.get_rank()

    def step_all() -> None:
        if case.clips:
            clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        case.drop(optimizer, "end")

    for begin in range(0, 100 * case.epochs, 100):
        with joined(joinable(model, step=step_all), divide_by_initial_world_size=case.divides_by_all):
            for step in range(case.counts[rank]):
                if step == 0 or case.averages(step - 1):
                    case.drop(optimizer, "begin")
                with contextlib.nullcontext() if case.averages(step) else no_sync(model):
                    model(case.input_of(begin + step, rank), case.skipped(step)).square().mean().backward()
                if case.averages(step):
                    step_all()
        optimizer.zero_grad()
        model(case.input_of(begin + 99, rank)).square().mean().backward()
        optimizer.step()
        case.drop(optimizer, "end")
    return full_params(model)


class Joined:
    """A model on ranks with different numbers of inputs, and what one process does with those that there are.

    Attributes:
        counts: How many inputs each rank has.
        model: Annotated, by a function or by a name of ``ANNOTATIONS``.
        optimizer: Of the model.
    """

    def __init__(
        self, annotation: str | Callable[[Any], object], counts: list[int], *, momentum: float = 0.9, seed: int = 0
    ) -> None:
        self.counts, self.momentum, self.seed, self.rank = counts, momentum, seed, dist.get_rank()
        self.model: Any = net(seed)
        (ANNOTATIONS[annotation] if isinstance(annotation, str) else annotation)(self.model)
        self.optimizer = self._sgd(self.model)

    def _sgd(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LR, momentum=self.momentum)

    def x(self, number: int) -> torch.Tensor:
        return random_input(10 * number + self.rank, 3, DIM)

    def loss(self, number: int, *more: int) -> torch.Tensor:
        return self.model(self.x(number), *more).square().mean()

    def backward(self, number: int) -> None:
        self.loss(number).backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, number: int) -> None:
        self.backward(number)
        self.step()

    def run(self, body: Callable[[int], object] | None = None, *, step: Any = ..., **options: Any) -> None:
        """Do something, or train, for each input of this rank inside of ``Join``."""
        with joined(joinable(self.model, step=self.step if step is ... else step), **options):
            for number in range(self.counts[self.rank]):
                (body or self.train)(number)

    def check(self, groups: Iterable[Iterable[tuple[int, int]]] | None = None, divisor: int = 0) -> None:
        """Compare with steps of one process for each group of inputs, by (number, rank); by default those of a number."""
        if groups is None:
            have = [(number, rank) for rank, count in enumerate(self.counts) for number in range(count)]
            groups = [[one for one in have if one[0] == number] for number in range(max(self.counts))]
        plain = net(self.seed)
        optimizer = self._sgd(plain)
        for group in groups:
            for number, rank in group:
                loss = plain(random_input(10 * number + rank, 3, DIM)).square().mean()
                (loss / (divisor or dist.get_world_size())).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert_equal_params(full_params(self.model), full_params(plain), tolerance=1e-6)


def check(case: Case, *, tolerance: float = 1e-6, run: Callable[..., Any] = run_threads) -> None:
    expected = train_alone(case)
    for found in run(train_jointly, len(case.counts), case):
        assert_equal_params(found, expected, tolerance=tolerance)


@pytest.mark.parametrize("annotation", sorted(ANNOTATIONS))
def test_parameters_are_those_of_one_process_on_the_inputs_there_are(annotation: str) -> None:
    check(Case([1, 2, 0, 3], annotation, divides_by_all="hooks" in annotation, epochs=2))


def draw(seed: int) -> Case:
    draw = random.Random(seed)
    annotation = draw.choice(sorted(ANNOTATIONS))
    return Case(
        counts=[draw.choice([0, 1, 2, 3, 5]) for _ in range(draw.choice([2, 3, 4]))],
        annotation=annotation,
        # A communication hook divides by the ranks that it knows.
        divides_by_all="hooks" in annotation or draw.random() < 0.5,
        accumulates=draw.random() < 0.3,
        clips=draw.random() < 0.5,
        skips="hooks" not in annotation and draw.random() < 0.5,
        optimizer=draw.choice(["SGD", "AdamW"]),
        drops=f"{draw.choice(['none', 'zeros'])} at the {draw.choice(['begin', 'end'])}",
        seed=seed,
    )


@pytest.mark.parametrize(
    ("annotation", "drops"),
    [("full", "none at the begin"), ("hybrid", "zeros at the begin"), ("hybrid kept", "never"), ("full", "never")],
)
def test_ranks_without_inputs_drop_gradients_where_the_loop_of_the_others_does(annotation: str, drops: str) -> None:
    check(Case([1, 3, 0, 4], annotation, skips=True, drops=drops))


@pytest.mark.parametrize("seed", range(5))
def test_random_runs_are_those_of_one_process_on_the_inputs_there_are(seed: int) -> None:
    check(draw(seed), tolerance=5e-5)


# Ways to reduce


@on_ranks(4, annotation=["hybrid", "replicate inside", "replicate around"])
def test_an_optimizer_inside_backward_steps_on_ranks_without_inputs(annotation: str) -> None:
    one = Joined(annotation, [2, 0, 1, 3])
    step_in_backward(one.optimizer)
    one.run(one.backward, step=None)
    one.check()


@on_ranks(2)
def test_a_divide_factor_of_the_users_stays_what_it_is() -> None:
    one = Joined("calls", [3, 1])
    for module in (one.model, *one.model.blocks):
        module.set_gradient_divide_factor(4.0)
    one.run(divide_by_initial_world_size=False)
    one.check(divisor=4)


@on_ranks(4, kind=["all-reduce", "last backward", "by hand", "reduce gradients"])
def test_ranks_without_inputs_follow_reductions_that_end_later(kind: str) -> None:
    """Average once for two backwards, in one of the ways to do so."""
    one = Joined("hybrid" if kind == "all-reduce" else "full", [4, 2, 0, 6])
    setters = {"all-reduce": "set_requires_all_reduce", "last backward": "set_is_last_backward"}
    one.model.set_manual_backward_finalization(kind == "by hand")

    def train(number: int) -> None:
        is_last = number % 2 == 1
        if kind in setters:
            getattr(one.model, setters[kind])(is_last)
        with no_sync(one.model) if kind == "reduce gradients" else contextlib.nullcontext():
            one.backward(number)
        if is_last:
            if kind == "by hand":
                one.model.finalize_backward()
            if kind == "reduce gradients":
                reduce_gradients(one.model)
            one.step()

    one.run(train)
    one.check([[(now + more, of) for more in (0, 1) for of in range(4) if now < one.counts[of]] for now in (0, 2, 4)])


# Loops


@on_ranks(3, annotation=["full", "no root", "kept after forward", "replicate inside", "replicate around"])
def test_ranks_without_inputs_follow_forwards_that_have_no_backward_of_their_own(annotation: str) -> None:
    """Run forwards without gradients, without a backward, and two that share one."""
    one = Joined(annotation, [2, 0, 3], momentum=0.0)

    def train(number: int) -> None:
        with torch.no_grad():
            one.loss(number)
        one.loss(number)
        (one.loss(number) / 2 + one.loss(number) / 2).backward()
        one.step()
        with torch.no_grad():
            one.loss(number)

    one.run(train)
    one.check()


@on_ranks(2)
def test_several_models_join_beside_each_other() -> None:
    both = [Joined("full", [1, 3]), Joined(replicate, [1, 3], seed=1)]
    with joined(*(joinable(one.model, step=one.step) for one in both)):
        for number in range(both[0].counts[dist.get_rank()]):
            for one in both:
                one.train(number)
    for one in both:
        one.check()


@on_ranks(3)
def test_ranks_without_inputs_follow_parts_that_ran_before_and_are_gathered_by_hand() -> None:
    one = Joined("calls", [2, 0, 1])
    one.model.blocks[1](torch.ones(1, DIM))
    one.model.register_forward_pre_hook(lambda model, _: model.blocks[1].unshard(async_op=True) and None)
    one.run()
    one.check()


# What all ranks have at the end


class Counted(nn.Module):
    """A module with buffers that follow the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inp(x))


@on_ranks(3, annotation=["replicate", "both"])
def test_buffers_of_replicas_are_those_of_the_rank_that_ran_longest(annotation: str) -> None:
    model = nn.Sequential(Counted(), Counted())
    if annotation == "both":
        replicate(model[0])
    (replicate if annotation == "replicate" else fully_shard)(model)
    with joined(joinable(model, step=model.zero_grad)):
        for _ in range([2, 0, 5][dist.get_rank()]):
            model(random_input(0, 3, DIM)).sum().backward()
    assert int(model[0].norm.num_batches_tracked) == 5


@on_ranks(2)
def test_ranks_that_all_have_no_inputs_end_at_once() -> None:
    one = Joined("calls", [0, 0])
    one.run()
    one.check()


@pytest.mark.parametrize(
    ("kind", "world_size", "counted"),
    [
        ("of a rank whose inputs end", 2, [(0, 1), (1, 1)]),
        ("that wait at the end", 2, [(0, 0), (0, 1)]),
        ("that the others drop", 4, [(1, 1), (1, 2), (1, 3)]),
    ],
)
@on_ranks()
def test_gradients_that_nobody_averages_are_dropped(kind: str, counted: list[tuple[int, int]]) -> None:
    waits, is_hybrid = kind == "that wait at the end", kind == "that the others drop"
    counts = [1, *[2] * (dist.get_world_size() - 1)]
    one = Joined("calls" if waits else "hybrid" if is_hybrid else "full", counts, momentum=0.0)

    def train(number: int) -> None:
        if is_hybrid:
            one.model.zero_grad()
            one.model.set_requires_all_reduce(number == 1)
        with no_sync(one.model) if waits or (number == 0 and not is_hybrid) else contextlib.nullcontext():
            one.backward(number)
        if number and not waits:
            one.optimizer.step()

    one.run(train, step=one.optimizer.step)
    if waits:
        one.backward(0)
        one.optimizer.step()
    one.check([counted])


# Choices of Join


@on_ranks(3)
def test_all_ranks_throw_where_one_has_no_inputs_left() -> None:
    one = Joined("full", [1, 2, 3])
    said = "at least one rank .*exhausted" if dist.get_rank() else "Rank 0 exhausted"
    with pytest.raises(RuntimeError, match=said):
        one.run(one.backward, step=one.model.zero_grad, throw_on_early_termination=True)
    # All is as before.
    one.backward(5)


def stop_after_two_steps(model: nn.Module) -> None:
    rank = dist.get_rank()
    stop = mock.Mock(side_effect=[None, KeyError])
    with joined(joinable(model, step=stop), divide_by_initial_world_size=False):
        for step in range(3 if rank else 1):
            # Those with inputs leave a block out, of which the one that follows them does not know the order.
            model(random_input(10 * step + rank, 3, DIM), 1 if step else -1).square().mean().backward()
            stop()


@on_ranks(3, annotation=["full", "in one order", "hybrid", "replicated"])
def test_after_an_exception_ranks_that_followed_are_as_the_others(annotation: str) -> None:
    twins = Twins(MLP, ANNOTATIONS[annotation], loss=lambda model, _, rank: loss_of(model(random_input(rank, 3, DIM))))
    with pytest.raises(KeyError):
        stop_after_two_steps(twins.model)
    twins.drop()
    twins.backward()
    twins.check_gradients()
    unannotate(twins.model)
    assert all(type(param) is nn.Parameter for param in twins.model.parameters())


def fail(_: torch.Tensor) -> None:
    raise KeyError


@on_ranks(4, annotation=["full", "no root", "hybrid kept", "replicate inside", "pairs", "replicated"])
def test_ranks_without_inputs_follow_others_that_skip_an_input(annotation: str) -> None:
    one = Joined(annotation, [1, 3, 3, 3], momentum=0.0)

    def fail_in_backward(_: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(fail)

    def train(number: int) -> None:
        if number != 1:
            one.train(number)
            return
        # The last blocks are reduced by then.
        hook = one.model.blocks[0].register_forward_hook(fail_in_backward)
        loss = one.loss(number)
        hook.remove()
        with pytest.raises(KeyError):
            loss.backward()
        one.model.zero_grad()

    one.run(train)
    one.check([[(0, of) for of in range(4)], [(2, of) for of in (1, 2, 3)]])


# What is refused


@on_ranks(2)
def test_a_part_of_a_model_cannot_join() -> None:
    model = net()
    with pytest.raises(UsageError, match="joinable found no annotated module"):
        joinable(model)
    shard(model)
    with pytest.raises(UsageError, match="a part of the modules that are annotated together"):
        Join([joinable(model.blocks, step=model.zero_grad)])


def run_different_modules() -> None:
    one = Joined("full", [1, 3, 3])
    # In the second step rank 0 has no inputs left.
    one.run(lambda number: one.loss(number, one.rank - 1 if number else -1).backward(), step=one.model.zero_grad)


def test_ranks_with_inputs_that_run_different_modules_are_told() -> None:
    with pytest.raises(RankErrors, match="ranks with inputs do different things inside of Join") as caught:
        run_threads(run_different_modules, 3)
    assert {type(error) for error in caught.value.errors.values()} == {DesyncError}
    assert str(caught.value.errors[2]).splitlines()[1:4] == [
        "    rank 0: has no inputs left",
        "    rank 1: gather of module 'blocks.1' (MLPBlock)",
        "    rank 2: reduce of module 'blocks.2' (MLPBlock)",
    ]


def join_badly(kind: str) -> None:
    model = net()
    if kind == "no step":
        shard(model)
        Join([joinable(model)])
    if kind == "a part of the ranks":
        fully_shard(model.blocks[1], mesh=DeviceMesh("cpu", [dist.get_rank()]))
    if kind == "static graph":
        replicate(model.blocks[0], static_graph=True)
    shard(model)
    divisor: Any = {"divisors": dist.get_rank() == 0, "no bool": None}.get(kind, True)
    Join([joinable(model, step=model.zero_grad)], divide_by_initial_world_size=divisor)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("no step", UsageError, r"pass joinable\(model, step=...\)"),
        ("a part of the ranks", UsageError, r"joinable got modules on different ranks"),
        ("static graph", UsageError, "static_graph=True: a rank without inputs has no graph"),
        ("divisors", DesyncError, "prepare for uneven inputs in different ways"),
        ("no bool", ConfigError, "divide_by_initial_world_size"),
    ],
)
def test_what_cannot_join_is_refused_on_every_rank(kind: str, error: type[Exception], message: str) -> None:
    with pytest.raises(RankErrors, match=message) as caught:
        run_threads(join_badly, 2, kind)
    assert [type(one) for one in caught.value.errors.values()] == [error] * 2


def miss_a_gradient() -> None:
    one = Joined(replicate, [3, 1, 3])

    def train(number: int) -> None:
        # In the last step rank 1 has no inputs left, and rank 0 skips a block.
        one.loss(number, 1 if (number, one.rank) == (2, 0) else -1).backward()
        one.step()

    one.run(train)


def test_a_missing_gradient_is_named_by_what_ranks_with_inputs_had() -> None:
    with pytest.raises(RankErrors) as caught:
        run_threads(miss_a_gradient, 3)
    names = "'blocks.1.up.weight', 'blocks.1.up.bias', 'blocks.1.down.weight', 'blocks.1.down.bias'"
    assert {rank: str(error).splitlines()[:-2] for rank, error in caught.value.errors.items()} == {
        0: [f"backward ended without a gradient for 4 parameters: {names}"],
        1: [f"rank 0 ended backward without a gradient for {names}"],
        2: [f"rank 0 ended backward without a gradient for {names}"],
    }


@pytest.mark.parametrize(("kind", "is_whole"), [("sharded", False), ("replicated", False), ("replicated", True)])
@on_ranks(2)
def test_annotations_cannot_change_inside_the_context(kind: str, *, is_whole: bool) -> None:
    model: Any = net()
    (shard if kind == "sharded" else copy_whole)(model)
    calls: dict[str, tuple[Callable[[Any], object], str]] = {
        "unannotate": (unannotate, "MLP"),
        "fully_shard": (lambda one: fully_shard(nn.Sequential(one)), "'0' (MLP)"),
        "replicate": (lambda one: replicate(nn.Sequential(one)), "'0' (MLP)"),
    }
    with joined(as_ddp(model) if is_whole else joinable(model, step=model.zero_grad)):
        for step in range([2, 1][dist.get_rank()]):
            model(torch.ones(1, DIM)).sum().backward()
            model.zero_grad()
            for name, (call, place) in calls.items() if step else ():
                with pytest.raises(UsageError) as caught:
                    call(model)
                assert str(caught.value) == (
                    f"{name} inside of Join, but ranks without inputs know only annotations from before Join was made\n"
                    f"  at:  rank 0, module {place}\n  fix: call {name} before Join(...) is made, or after the context"
                )
    unannotate(model)
    assert all(type(param) is nn.Parameter for param in model.parameters())


def fail_while_it_follows(way: str) -> str:
    set_divergence_timeout(0.3)
    model = net()
    shard(model)
    rank, steps = dist.get_rank(), [0]

    def step_all() -> None:
        steps[0] += 1
        if (way, rank, steps[0]) == ("step", 1, 2):
            raise KeyError("of one rank")

    def fail_once(_: torch.Tensor) -> None:
        if rank == 1 and steps[0] == 1:
            raise KeyError("of one rank")

    if way == "hook":
        model.out.bias.register_post_accumulate_grad_hook(fail_once)
    try:
        with joined(joinable(model, step=step_all)):
            for _ in range([3, 1, 3][rank]):
                model(torch.ones(1, DIM)).sum().backward()
                step_all()
    except KeyError as error:
        store = store_of_default_group()
        number = 0
        while not Diagnosis.from_text(store.get(f"composable watch/{number}/verdict").decode()).groups:
            number += 1
        return repr(error)
    except DesyncError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("way", ["step", "hook"])
def test_what_fails_on_a_rank_that_follows_is_told_to_those_that_wait_for_it(way: str) -> None:
    first, failed, last = run_ranks(fail_while_it_follows, 3, way)
    assert failed == "KeyError('of one rank')"
    for text in (first, last):
        assert "rank 1: has left Join by KeyError: 'of one rank'" in text


def raise_on_one_rank() -> None:
    one = Joined("full", [1, 3, 3])

    def train(number: int) -> None:
        if number == one.rank == 1:
            raise KeyError("of one rank")
        one.backward(number)

    one.run(train, step=one.model.zero_grad)


def test_ranks_do_not_hang_where_one_of_them_raises() -> None:
    with pytest.raises(RankErrors, match="of one rank"):
        run_ranks(raise_on_one_rank, 3)


# Processes


@pytest.mark.parametrize("annotation", ["replicate inside"])
def test_processes_with_uneven_inputs_train_like_one(annotation: str) -> None:
    check(Case([3, 0, 1, 2], annotation, clips=True), run=run_ranks)


# What travels


def record_collectives(annotation: str) -> list[Collective]:
    model = net()
    ANNOTATIONS[annotation](model)
    context = Join([joinable(model, step=model.zero_grad)])
    counting = CountingTransport.install(sharded_state_of(model).root)
    with warnings.catch_warnings(), context:
        for step in range([3, 1, 0][dist.get_rank()]):
            model(random_input(step, 3, DIM), 1).square().mean().backward()
    # One rank has seen no order of modules, the others another one: all guess alike what comes next.
    for _ in range(2):
        model(random_input(0, 3, DIM)).square().mean().backward()
    return counting.records


@pytest.mark.parametrize("annotation", ["full", "calls", "kept after forward", "replicate inside"])
def test_all_ranks_run_the_same_collectives_in_the_same_order(annotation: str) -> None:
    first, *others = run_threads(record_collectives, 3, annotation)
    assert first
    assert others == [first, first]


def train_evenly(steps: int, *, joins: bool) -> None:
    model = net()
    shard(model)
    with joined(joinable(model, step=model.zero_grad)) if joins else contextlib.nullcontext():
        for step in range(steps):
            model(random_input(step, 3, DIM)).sum().backward()


def count_messages(steps: int, *, joins: bool) -> int:
    """Return how many messages two ranks send each other."""
    sent: list[object] = []
    send = Ranks.objects

    def counted(ranks: Ranks, value: Any) -> list[Any]:
        sent.append(value)
        return send(ranks, value)

    with mock.patch.object(Ranks, "objects", counted):
        run_threads(train_evenly, 2, steps, joins=joins)
    return len(sent) // 2


def test_while_all_ranks_have_inputs_a_step_takes_one_message_more() -> None:
    assert count_messages(5, joins=False) == count_messages(2, joins=False)
    assert count_messages(5, joins=True) == count_messages(2, joins=True) + 3

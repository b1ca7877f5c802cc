"""What no_sync kept of modules that the last micro-batch leaves out, over random trees of annotations and programs."""

import copy
import itertools
import random
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh

from composable import (
    MixedPrecisionPolicy,
    fully_shard,
    joinable,
    no_sync,
    reduce_gradients,
    replicate,
    step_in_backward,
    unannotate,
)
from composable.errors import UsageError
from tests.counting import counting_ranks
from tests.models import seeded
from tests.parity import assert_equal_params, full, full_params, gradients_of
from tests.world import on_ranks, run_ranks, run_threads

KIDS = 3
WAYS = ["context", "context", "setting", "last"]


class Chosen(nn.Module):
    """Runs those of its kids that it is told to, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.ones(4))
        self.kids = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(KIDS))
        self.pairs = nn.ModuleList([self.kids[:2], self.kids[1:]])

    def forward(self, x: torch.Tensor, chosen: Sequence[int]) -> torch.Tensor:
        out = x * self.scale
        for kid in chosen:
            out = out + self.kids[kid](x)
        return out


def annotate(module: nn.Module, how: str) -> None:
    if how == "replicate":
        replicate(module, find_unused_parameters=True)
    elif how == "all used":
        replicate(module)
    elif how == "static":
        replicate(module, static_graph=True)
    elif how == "shard":
        fully_shard(module)


def input_of(step: int, rank: int) -> torch.Tensor:
    return torch.linspace(-1, 1, 8).view(2, 4) * (1 + step + 2 * rank) / 10


def run(seed: int) -> None:
    """Compare a random program with one process; what a module's annotation allows each rank to choose, each does."""
    rng = random.Random(seed)
    model, plain = Chosen(), Chosen()
    kinds = [rng.choice(["none", "replicate", "static", "all used", "shard"]) for _ in range(KIDS)]
    root = rng.choice(["replicate", "shard"]) if "none" in kinds or rng.randrange(3) else "none"
    for kid, kind in zip(model.kids, kinds, strict=True):
        annotate(kid, kind)
    annotate(model, root)
    size, rank = dist.get_world_size(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    way = rng.choice(WAYS) if root != "none" else "context"
    for number in range(3):
        count, has_kept_pair = rng.randrange(1, 4), False
        together: set[int] = set()  # what waits because of one context for several
        alone: set[int] = set()  # what averages in its own backward only
        for micro in range(count):
            is_last = micro == count - 1
            syncs = is_last or not rng.randrange(4)
            common = [kid for kid in range(KIDS) if rng.randrange(2)] or [rng.randrange(KIDS)]
            if is_last and has_kept_pair:
                common = sorted({1, *common})  # A context covered this one and one other.
            if is_last:
                common = sorted({*alone, *common})
            context, covered = nullcontext(), range(0 if syncs else KIDS)
            if way == "setting":
                model.set_requires_gradient_sync(syncs)
            elif way == "last" and root == "replicate":
                model.set_is_last_backward(syncs)
            elif not syncs and "none" not in kinds and not rng.randrange(3):
                first = rng.randrange(2)
                context, covered, has_kept_pair = no_sync(model.pairs[first]), range(first, first + 2), True
            elif not syncs and {*kinds} != {"none"} and rng.random() < 0.4:
                covered = [rng.choice([kid for kid in range(KIDS) if kinds[kid] != "none"])]
                context = no_sync(model.kids[covered[0]])
                alone |= {*covered} - together
            elif not syncs:
                context, together = no_sync(model), {*range(KIDS)}
            together = {*covered} if has_kept_pair else together & {*covered}
            chosen = [list(common) for _ in range(size)]
            for one, kid in itertools.product(range(size), covered):
                # Without synchronisation whole copies talk to nobody: ranks may call others.
                if kinds[kid] in ("replicate", "all used") and rng.randrange(4) == 0:
                    chosen[one] = [other for other in chosen[one] if other != kid]
            step = 3 * number + micro
            with context:
                model(input_of(step, rank), chosen[rank]).square().mean().backward()
            for one in range(size):
                (plain(input_of(step, one), chosen[one]).square().mean() / size).backward()
            if not is_last and not rng.randrange(6):
                model.zero_grad()
                plain.zero_grad()
                model, optimizer = copy.deepcopy((model, optimizer))  # and train the copy on
        if root == "none":
            model.scale.grad = plain.scale.grad.clone()  # Nothing manages it.
        assert_equal_params(gradients_of(model), gradients_of(plain), tolerance=1e-6)
        for one in (optimizer, plain_optimizer):
            one.step()
            one.zero_grad()


@pytest.mark.parametrize(("seed", "world_size"), [(seed, 1 + seed % 3) for seed in range(36)])
@on_ranks()
def test_gradients_are_those_of_one_process(seed: int) -> None:
    run(seed)


@on_ranks(2, run=run_ranks)
def test_they_are_on_processes() -> None:
    for seed in range(100, 112):
        run(seed)


@pytest.mark.parametrize(("kid", "root"), [("replicate", "shard"), ("replicate", "replicate"), ("shard", "replicate")])
@on_ranks(3)
def test_ranks_without_inputs_follow(kid: str, root: str) -> None:
    """Let rank 0 run three steps, the others fewer; the last micro-batch of each leaves out a module."""
    model, plain = Chosen(), Chosen()
    annotate(model.kids[0], kid)
    annotate(model, root)
    size, rank = dist.get_world_size(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    with Join([joinable(model, step=step)]):
        for number in range(3 - rank):
            with no_sync(model):
                model(input_of(number, rank), [0, 1, 2]).square().mean().backward()
            model(input_of(number, rank), [1, 2]).square().mean().backward()
            step()
    for number in range(3):
        for one in range(3 - number):
            for chosen in ([0, 1, 2], [1, 2]):
                (plain(input_of(number, one), chosen).square().mean() / size).backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    params = {name: full(param) for name, param in model.named_parameters()}
    assert_equal_params(params, dict(plain.named_parameters()), tolerance=1e-6)


@on_ranks(2)
def test_what_ends_by_hand_ends_the_rest_too() -> None:
    """Keep all gradients of a step, and end it outside of any backward."""
    model, plain = Chosen(), Chosen()
    replicate(model.kids[0])
    fully_shard(model.kids[1])
    fully_shard(model)
    model.set_manual_backward_finalization(True)
    rank = dist.get_rank()
    model(input_of(0, rank), [1]).square().mean().backward()
    model.finalize_backward()
    model.zero_grad()
    with no_sync(model):
        model(input_of(1, rank), [0, 1]).square().mean().backward()
    model.finalize_backward()
    for one in range(2):
        (plain(input_of(1, one), [0, 1]).square().mean() / 2).backward()
    assert_equal_params(gradients_of(model), gradients_of(plain), tolerance=1e-6)


@on_ranks(2)
def test_a_root_that_first_runs_after_the_context_ends_what_others_keep() -> None:
    model, plain, rank = Chosen(), Chosen(), dist.get_rank()
    for kid in model.kids[:2]:
        fully_shard(kid)
    with no_sync(model):
        model(input_of(0, rank), [0]).square().mean().backward()
    model(input_of(1, rank), [1]).square().mean().backward()
    for step, one in itertools.product(range(2), range(2)):
        (plain(input_of(step, one), [step]).square().mean() / 2).backward()
    for kid, expected in zip(model.kids[:2], plain.kids, strict=False):
        assert_equal_params(gradients_of(kid), gradients_of(expected), tolerance=1e-6)


@pytest.mark.parametrize("left", range(KIDS))
@pytest.mark.parametrize("kinds", [["replicate"] * 3, ["shard"] * 3, ["replicate", "shard", "shard"]], ids=" ".join)
@on_ranks(2)
def test_the_rest_ends_after_one_is_unannotated(kinds: list[str], left: int) -> None:
    model, plain, rank = Chosen(), Chosen(), dist.get_rank()
    for kid, kind in zip(model.kids, kinds, strict=True):
        annotate(kid, kind)
    calls = [[0, 1, 2], [(left + 1) % KIDS]]
    with no_sync(model):
        model(input_of(0, rank), calls[0]).square().mean().backward()
    unannotate(model.kids[left])
    model(input_of(1, rank), calls[1]).square().mean().backward()
    for step, one in itertools.product(range(2), range(2)):
        (plain(input_of(step, one), calls[step]).square().mean() / 2).backward()
    assert_equal_params(gradients_of(model.kids), gradients_of(plain.kids), tolerance=1e-6)


def keep_and_end(*, has_fewer_ranks: bool, backwards: int) -> None:
    model = Chosen()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))
    replicate(model.kids[0], mesh=mesh["copies"] if has_fewer_ranks else None)
    fully_shard(model)
    for number in range(backwards + 1):
        with no_sync(model) if number < backwards else nullcontext():
            model(input_of(0, 0), [0]).sum().backward()


@pytest.mark.parametrize(("has_fewer_ranks", "count"), [(False, 1), (True, 0)])
def test_each_rank_asks_once_who_keeps_gradients_and_only_where_some_may(has_fewer_ranks: bool, count: int) -> None:
    """Count what ranks send for it; a replicated module on fewer ranks takes part in all backwards around anyway."""
    sent = []
    for backwards in range(3):
        with counting_ranks() as counts:
            run_threads(keep_and_end, 4, has_fewer_ranks=has_fewer_ranks, backwards=backwards)
        sent.append(counts["reductions"])
    assert [one - sent[0] for one in sent] == [0, 4 * count, 4 * count]


def run_parts(seed: int) -> int:
    """Keep gradients of single parts, which the last micro-batch may leave out; returns how many steps were refused.

    Every step is that of one process, or refused on all ranks; then ``reduce_gradients`` makes it right.
    """
    rng = random.Random(seed)
    model, plain = Chosen(), Chosen()
    for one in (model, plain):
        one.scale.requires_grad = False
    kinds = [rng.choice(["replicate", "static", "shard"]) for _ in range(KIDS)]
    for kid, kind in zip(model.kids, kinds, strict=True):
        annotate(kid, kind)
    size, rank, refused = dist.get_world_size(), dist.get_rank(), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(4):
        for micro in range(rng.randrange(1, 4)):
            chosen = [kid for kid in range(KIDS) if rng.randrange(2)] or [rng.randrange(KIDS)]
            kept = [model.kids[kid] for kid in range(KIDS) if rng.randrange(3) == 0]
            step = 3 * number + micro
            with ExitStack() as stack:
                for kid in kept:
                    stack.enter_context(no_sync(kid))
                model(input_of(step, rank), chosen).square().mean().backward()
            for other in range(size):
                (plain(input_of(step, other), chosen).square().mean() / size).backward()
        if rng.randrange(6) == 0:
            sets_to_none = rng.randrange(2) == 0
            for each in (model, plain):
                each.zero_grad(set_to_none=sets_to_none)
        try:
            optimizer.step()
        except UsageError as error:
            if "gradients that are not complete: they wait on their rank" not in str(error):
                raise
            refused += 1
            reduce_gradients(model)
            optimizer.step()
        plain_optimizer.step()
        assert_equal_params(full_params(model), dict(plain.named_parameters()), tolerance=1e-6)
        for each in (optimizer, plain_optimizer):
            each.zero_grad()
    return refused


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_no_sync_of_a_part_kept_is_averaged_or_the_step_is_refused(world_size: int) -> None:
    refused = [run_threads(run_parts, world_size, seed) for seed in range(30)]
    assert all(len(set(ranks)) == 1 for ranks in refused)
    assert sum(ranks[0] for ranks in refused) > 10


@on_ranks(2)
def test_whole_copies_may_step_on_gradients_of_their_rank_only_if_synchronisation_is_off() -> None:
    model = nn.Linear(4, 4)
    replicate(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with no_sync(model):
        model(input_of(0, dist.get_rank())).square().mean().backward()
        with pytest.raises(UsageError, match=r"SGD.step .* not complete.*\n.*'weight', 'bias'\n.*reduce_gradients"):
            optimizer.step()
    for param in model.parameters():
        param.grad = param.grad.clone()  # An average of the user's own.
    optimizer.step()
    model.set_requires_gradient_sync(False)
    model(input_of(1, dist.get_rank())).square().mean().backward()
    optimizer.step()


class Heads(nn.Module):
    """Returns an output of each of its heads, which reach parameters of their own."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = torch.tanh(self.trunk(x))
        return [head(h) for head in self.heads]


def run_heads(seed: int) -> None:
    """Run a backward for each group of the outputs of one forward: refused by default, exact in two other ways."""
    rng = random.Random(seed)
    count = rng.randrange(2, 5)
    order = rng.sample(range(count), count)
    cut = rng.randrange(1, count)
    groups = [order[:cut], order[cut:]]
    way = rng.choice(["unused", "no_sync", "default"])
    model, plain = Heads(count), Heads(count)
    replicate(model, find_unused_parameters=way == "unused", bucket_cap_mb=rng.choice([25, 1e-4]))
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(3):
        outputs = model(input_of(step, rank))
        for number, group in enumerate(groups):
            is_last = number == len(groups) - 1
            loss = sum(outputs[each].square().sum() for each in group)
            with no_sync(model) if way == "no_sync" and not is_last else nullcontext():
                if way == "default":
                    with pytest.raises(
                        UsageError, match=r"fix: .*find_unused_parameters=True, which several backwards"
                    ):
                        loss.backward(retain_graph=True)
                    return
                loss.backward(retain_graph=not is_last)
        for other in range(size):
            (sum(output.square().sum() for output in plain(input_of(step, other))) / size).backward()
        assert_equal_params(gradients_of(model), gradients_of(plain), tolerance=1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_backwards_of_one_forward_are_refused_or_right(world_size: int) -> None:
    for seed in range(24):
        run_threads(run_heads, world_size, seed)


@pytest.mark.parametrize("ends_by_hand", [False, True])
@pytest.mark.parametrize("bucket_cap_mb", [25, 1e-6])
@on_ranks(2)
def test_an_optimizer_in_backward_steps_on_what_was_kept(ends_by_hand: bool, bucket_cap_mb: float) -> None:
    model, plain = Heads(3), Heads(3)
    low = MixedPrecisionPolicy(reduce_dtype=torch.float64)  # averages are copied back into the kept gradients
    replicate(model, bucket_cap_mb=bucket_cap_mb, mp_policy=low)
    step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    size, rank = dist.get_world_size(), dist.get_rank()
    for number in range(6):
        ends = number % 2 == 1
        with nullcontext() if ends and not ends_by_hand else no_sync(model):
            sum(output.square().sum() for output in model(input_of(number, rank))).backward()
        for other in range(size):
            (sum(output.square().sum() for output in plain(input_of(number, other))) / size).backward()
        if ends:
            if ends_by_hand:
                reduce_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
            assert_equal_params(full_params(model), dict(plain.named_parameters()), tolerance=1e-6)


class StoppedError(Exception):
    """Ends a backward."""


def stop_in(kid: nn.Module, chosen: Sequence[int], model: nn.Module, x: torch.Tensor) -> None:
    """Run a forward, and a backward that an exception ends in the middle of ``kid``."""

    def stop(grad: torch.Tensor) -> None:
        raise StoppedError

    hook = kid[1].register_forward_hook(lambda module, args, output: output.register_hook(stop) and None)  # type: ignore[index]
    with pytest.raises(StoppedError):
        model(x, chosen).square().mean().backward()
    hook.remove()


def run_stopped(seed: int) -> None:
    """Stop a backward, with no_sync or without, and drop its gradients: nothing of it is in what comes next."""
    rng = random.Random(seed)
    model, plain = Chosen(), Chosen()
    kinds = [rng.choice(["replicate", "shard"]) for _ in range(KIDS)]
    root = rng.choice(["replicate", "shard", "none", "none"])

    def annotate_all() -> None:
        for kid, kind in zip(model.kids, kinds, strict=True):
            for layer in (kid[0], kid[2]) if kind == "shard" else ():
                annotate(layer, rng.choice(["shard", "none"]))
            annotate(kid, kind)
        annotate(model, root)

    for one in (model, plain):
        one.scale.requires_grad = False
    annotate_all()
    size, rank = dist.get_world_size(), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def train(number: int, *, keeps: bool) -> None:
        chosen = rng.sample(range(KIDS), 3)
        with no_sync(model) if keeps else nullcontext():
            model(input_of(number, rank), chosen).square().mean().backward()
        for one in range(size):
            (plain(input_of(number, one), chosen).square().mean() / size).backward()

    for number in range(4):
        with no_sync(model) if rng.randrange(3) else nullcontext():
            chosen = rng.sample(range(KIDS), rng.randrange(1, KIDS + 1))
            stop_in(model.kids[rng.choice(chosen)], chosen, model, input_of(9, rank))
        model.zero_grad()
        way = rng.choice(["nothing", "copy", "copy", "reduce", "step", "anew"])
        if way == "anew":
            unannotate(model)
            annotate_all()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        elif way == "copy":
            model, optimizer = copy.deepcopy((model, optimizer))
        elif way == "reduce":
            reduce_gradients(model)
        elif way == "step":
            optimizer.step()
        for _ in range(rng.randrange(2)):
            train(number, keeps=True)
        train(number, keeps=False)
        assert_equal_params(gradients_of(model), gradients_of(plain), tolerance=1e-6)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_nothing_of_a_stopped_backward_is_in_what_comes_next(world_size: int) -> None:
    for seed in range(14):
        run_threads(run_stopped, world_size, seed)


class Stage(nn.Module):
    """Linear layers, one after the other, of which each is used by some ranks alone."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.inner = Stage(depth - 1) if depth else None
        self.stops = False

    def forward(self, x: torch.Tensor, used: random.Random) -> torch.Tensor:
        if self.stops and x.requires_grad:
            # Nodes of their own: an output that is also an input, on some ranks, has its gradient later there.
            x = x * 1
            x.register_hook(stop_now)
        for layer in self.layers:
            x = torch.tanh(layer(x)) if used.randrange(2) else x * 1
        return x if self.inner is None else x + self.inner(x, used)


def stop_now(grad: torch.Tensor) -> None:
    raise StoppedError


def run_stopped_alike(seed: int) -> None:
    """Stop a backward on all ranks, at a place in the middle, where each has used other parameters."""
    rng = random.Random(seed)
    model, plain = (seeded(lambda: Stage(3), seed) for _ in range(2))
    for stage in reversed([one for one in model.modules() if isinstance(one, Stage)]):
        kind = rng.choice(["replicate", "shard", "none"] if stage is not model else ["replicate", "shard"])
        if kind == "shard":
            fully_shard(stage)
        elif kind == "replicate":
            replicate(stage, find_unused_parameters=True, bucket_cap_mb=rng.choice([25, 1e-6]))
    size, rank = dist.get_world_size(), dist.get_rank()

    def loss_at(one: nn.Module, number: int, of: int) -> torch.Tensor:
        x = input_of(number, of).requires_grad_()
        return one(x, random.Random(f"{seed} {number} {of}")).square().mean()

    stages = [one for one in model.modules() if isinstance(one, Stage)]
    for number in range(3):
        stopping = rng.choice(stages)
        stopping.stops = True
        with pytest.raises(StoppedError):
            loss_at(model, number + 10, rank).backward()
        stopping.stops = False
        model.zero_grad()
        loss_at(model, number, rank).backward()
        for of in range(size):
            (loss_at(plain, number, of) / size).backward()
        found, wanted = gradients_of(model), gradients_of(plain)
        for fqn, param in plain.named_parameters():
            pair = [one.get(fqn, torch.zeros_like(param)) for one in (found, wanted)]
            torch.testing.assert_close(*pair, msg=lambda text, fqn=fqn: f"seed {seed}, {fqn}: {text}")
        model.zero_grad()
        plain.zero_grad()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_have_used_other_parameters_recover_alike_where_all_have_stopped(world_size: int) -> None:
    for seed in range(12):
        run_threads(run_stopped_alike, world_size, seed)

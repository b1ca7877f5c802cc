"""What no_sync kept of modules that the last micro-batch leaves out, over random trees of annotations and programs."""

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
from tests.parity import assert_equal_params, gradients_of
from tests.programs import Loss, Twins, sgd
from tests.world import on_ranks, run_ranks, run_threads

KIDS = 3
WAYS = ["context", "context", "setting", "last"]


class Chosen(nn.Module):
    """Runs those of its kids that it is told to, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
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


def calling(*chosen: Sequence[int]) -> Loss:
    """Return the loss of a model that runs such kids: the same on all ranks, or on each those in its place."""
    return lambda model, step, rank: model(input_of(step, rank), chosen[rank % len(chosen)]).square().mean()


def twins_of(kinds: Sequence[str], root: str = "none") -> Twins:
    """Return twins of which each kid is annotated, then the whole."""

    def annotate_all(model: Chosen) -> None:
        for kid, kind in zip(model.kids, kinds, strict=False):
            annotate(kid, kind)
        annotate(model, root)

    return Twins(Chosen, annotate_all)


def run(seed: int) -> None:
    """Compare a random program with one process; what a module's annotation allows each rank to choose, each does."""
    rng = random.Random(seed)
    kinds = [rng.choice(["none", "replicate", "static", "all used", "shard"]) for _ in range(KIDS)]
    root = rng.choice(["replicate", "shard"]) if "none" in kinds or rng.randrange(3) else "none"
    twins = twins_of(kinds, root)
    way = rng.choice(WAYS) if root != "none" else "context"
    for number in range(3):
        count, has_kept_pair = rng.randrange(1, 4), False
        together: set[int] = set()  # what waits because of one context for several
        alone: set[int] = set()  # what averages in its own backward only
        for micro in range(count):
            model = twins.model
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
            chosen = [list(common) for _ in range(twins.size)]
            for one, kid in itertools.product(range(twins.size), covered):
                # Without synchronisation whole copies talk to nobody: ranks may call others.
                if kinds[kid] in ("replicate", "all used") and rng.randrange(4) == 0:
                    chosen[one] = [other for other in chosen[one] if other != kid]
            with context:
                twins.backward(3 * number + micro, loss=calling(*chosen))
            if not is_last and not rng.randrange(6):
                twins.drop()
                twins.copy()  # and train the copy on
        if root == "none":
            twins.model.scale.grad = twins.plain.scale.grad.clone()  # Nothing manages it.
        twins.check_gradients()
        twins.step()


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
    twins = twins_of([kid], root)
    calls = [[0, 1, 2], [1, 2]]

    def step() -> None:
        twins.optimizers[0].step()
        twins.optimizers[0].zero_grad()

    with Join([joinable(twins.model, step=step)]):
        for number in range(3 - twins.rank):
            with no_sync(twins.model):
                calling(calls[0])(twins.model, number, twins.rank).backward()
            calling(calls[1])(twins.model, number, twins.rank).backward()
            step()
    for number in range(3):
        for one, chosen in itertools.product(range(3 - number), calls):
            (calling(chosen)(twins.plain, number, one) / 3).backward()
        twins.step(of_ranks=False)
    twins.check()


@on_ranks(2)
def test_what_ends_by_hand_ends_the_rest_too() -> None:
    """Keep all gradients of a step, and end it outside of any backward."""
    twins = twins_of(["all used", "shard"], "shard")
    twins.model.set_manual_backward_finalization(True)
    twins.backward(0, loss=calling([1]))
    twins.model.finalize_backward()
    twins.drop()
    twins.backward(1, keeps=True, loss=calling([0, 1]))
    twins.model.finalize_backward()
    twins.check_gradients()


@on_ranks(2)
def test_a_root_that_first_runs_after_the_context_ends_what_others_keep() -> None:
    twins = twins_of(["shard", "shard"])
    twins.backward(0, keeps=True, loss=calling([0]))
    twins.backward(1, loss=calling([1]))
    for kid, expected in zip(*(one.kids[:2] for one in twins), strict=True):
        assert_equal_params(gradients_of(kid), gradients_of(expected), tolerance=1e-6)


@pytest.mark.parametrize("left", range(KIDS))
@pytest.mark.parametrize("kinds", [["replicate"] * 3, ["shard"] * 3, ["replicate", "shard", "shard"]], ids=" ".join)
@on_ranks(2)
def test_the_rest_ends_after_one_is_unannotated(kinds: list[str], left: int) -> None:
    twins = twins_of(kinds)
    twins.backward(0, keeps=True, loss=calling([0, 1, 2]))
    unannotate(twins.model.kids[left])
    twins.backward(1, loss=calling([(left + 1) % KIDS]))
    assert_equal_params(*(gradients_of(one.kids) for one in twins), tolerance=1e-6)


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
        sent.append(counts["flags"])
    assert [one - sent[0] for one in sent] == [0, 4 * count, 4 * count]


def run_parts(seed: int) -> int:
    """Keep gradients of single parts, which the last micro-batch may leave out; returns how many steps were refused.

    Every step is that of one process, or refused on all ranks; then ``reduce_gradients`` makes it right.
    """
    rng = random.Random(seed)
    twins, refused = twins_of([rng.choice(["replicate", "static", "shard"]) for _ in range(KIDS)]), 0
    for one in twins:
        one.scale.requires_grad = False
    for number in range(4):
        for micro in range(rng.randrange(1, 4)):
            chosen = [kid for kid in range(KIDS) if rng.randrange(2)] or [rng.randrange(KIDS)]
            with ExitStack() as stack:
                for kid in twins.model.kids:
                    if rng.randrange(3) == 0:
                        stack.enter_context(no_sync(kid))
                twins.backward(3 * number + micro, loss=calling(chosen))
        if rng.randrange(6) == 0:
            twins.drop(set_to_none=rng.randrange(2) == 0)
        try:
            twins.step()
        except UsageError as error:
            if "gradients that are not complete: they wait on their rank" not in str(error):
                raise
            refused += 1
            reduce_gradients(twins.model)
            twins.step()
        twins.check()
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
        self.trunk = nn.Linear(4, 4)
        self.heads = nn.ModuleList(nn.Linear(4, 4) for _ in range(count))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = torch.tanh(self.trunk(x))
        return [head(h) for head in self.heads]


def loss_of_heads(model: Heads, number: int, rank: int, heads: Sequence[int] | None = None) -> torch.Tensor:
    outputs = model(input_of(number, rank))
    return torch.stack([outputs[head].square().sum() for head in heads or range(len(outputs))]).sum()


def run_heads(seed: int) -> None:
    """Run a backward for each group of the outputs of one forward: refused by default, exact in two other ways."""
    rng = random.Random(seed)
    count = rng.randrange(2, 5)
    order = rng.sample(range(count), count)
    cut = rng.randrange(1, count)
    way = rng.choice(["unused", "no_sync", "default"])
    options = {"find_unused_parameters": way == "unused", "bucket_cap_mb": rng.choice([25, 1e-4])}
    twins = Twins(lambda: Heads(count), lambda model: replicate(model, **options), loss=loss_of_heads)
    for step in range(3):
        outputs = twins.model(input_of(step, twins.rank))
        first, last = (
            torch.stack([outputs[each].square().sum() for each in of]).sum() for of in (order[:cut], order[cut:])
        )
        if way == "default":
            with pytest.raises(UsageError, match=r"fix: .*find_unused_parameters=True, which several backwards"):
                first.backward(retain_graph=True)
            return
        with no_sync(twins.model) if way == "no_sync" else nullcontext():
            first.backward(retain_graph=True)
        last.backward()
        twins.backward_alone(step)
        twins.check_gradients()


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_backwards_of_one_forward_are_refused_or_right(world_size: int) -> None:
    for seed in range(24):
        run_threads(run_heads, world_size, seed)


@on_ranks(2, bucket_cap_mb=[25, 1e-6], ends_by_hand=[False, True])
def test_an_optimizer_in_backward_steps_on_what_was_kept(ends_by_hand: bool, bucket_cap_mb: float) -> None:
    low = MixedPrecisionPolicy(reduce_dtype=torch.float64)  # averages are copied back into the kept gradients
    twins = Twins(
        lambda: Heads(3),
        lambda model: replicate(model, bucket_cap_mb=bucket_cap_mb, mp_policy=low),
        loss=loss_of_heads,
    )
    step_in_backward(twins.optimizers[0])
    for number in range(6):
        ends = number % 2 == 1
        twins.backward(number, keeps=ends_by_hand or not ends)
        if ends:
            if ends_by_hand:
                reduce_gradients(twins.model)
            twins.step(of_ranks=False)
            twins.check()


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
    kinds = [rng.choice(["replicate", "shard"]) for _ in range(KIDS)]
    root = rng.choice(["replicate", "shard", "none", "none"])

    def annotate_all(model: Chosen) -> None:
        model.scale.requires_grad = False
        for kid, kind in zip(model.kids, kinds, strict=True):
            for layer in (kid[0], kid[2]) if kind == "shard" else ():  # type: ignore[index]
                annotate(layer, rng.choice(["shard", "none"]))
            annotate(kid, kind)
        annotate(model, root)

    twins = Twins(Chosen, annotate_all)
    twins.plain.scale.requires_grad = False
    for number in range(4):
        with no_sync(twins.model) if rng.randrange(3) else nullcontext():
            chosen = rng.sample(range(KIDS), rng.randrange(1, KIDS + 1))
            stop_in(twins.model.kids[rng.choice(chosen)], chosen, twins.model, input_of(9, twins.rank))
        twins.model.zero_grad()
        way = rng.choice(["nothing", "copy", "copy", "reduce", "step", "anew"])
        if way == "anew":
            unannotate(twins.model)
            annotate_all(twins.model)
            twins.optimizers[0] = sgd(twins.model.parameters())
        elif way == "copy":
            twins.copy()
        elif way == "reduce":
            reduce_gradients(twins.model)
        elif way == "step":
            twins.optimizers[0].step()
        for keeps in [*([True] * rng.randrange(2)), False]:
            twins.backward(number, keeps=keeps, loss=calling(rng.sample(range(KIDS), 3)))
        twins.check_gradients()
        twins.step()


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

    def annotate_all(model: Stage) -> None:
        for stage in reversed([one for one in model.modules() if isinstance(one, Stage)]):
            kind = rng.choice(["replicate", "shard", "none"] if stage is not model else ["replicate", "shard"])
            if kind == "shard":
                fully_shard(stage)
            elif kind == "replicate":
                replicate(stage, find_unused_parameters=True, bucket_cap_mb=rng.choice([25, 1e-6]))

    def loss_at(one: nn.Module, number: int, of: int) -> torch.Tensor:
        return one(input_of(number, of).requires_grad_(), random.Random(f"{seed} {number} {of}")).square().mean()

    twins = Twins(lambda: Stage(3), annotate_all, loss=loss_at)
    stages = [one for one in twins.model.modules() if isinstance(one, Stage)]
    for number in range(3):
        stopping = rng.choice(stages)
        stopping.stops = True
        with pytest.raises(StoppedError):
            twins.backward(number + 10)
        stopping.stops = False
        twins.drop()
        twins.backward(number)
        # A parameter without a gradient on any rank has zeros where it is sharded.
        for one in twins:
            for param in one.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        twins.check_gradients(1e-5, where=seed)
        twins.drop()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_have_used_other_parameters_recover_alike_where_all_have_stopped(world_size: int) -> None:
    for seed in range(12):
        run_threads(run_stopped_alike, world_size, seed)

"""Programs in which autograd's order says too little: every gradient is that of one process all the same."""

import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from composable import UsageError, fully_shard, no_sync, plan, replicate
from composable.annotation.root import Root
from tests.counting import CountingTransport
from tests.models import random_input, seeded
from tests.parity import full
from tests.world import run_ranks, run_threads

WIDTH = 6

# A program is a model, how it is annotated, and what one rank does in a step with a module and a scale: the loss of
# rank r is scaled by 1 in the annotated run, and by 1 / W in the plain one, which does all ranks' parts.
Step = Callable[[nn.Module, int, float], None]
PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], object], Step]] = {}


def program(
    name: str, make: Callable[[], nn.Module], annotate: Callable[[nn.Module], object]
) -> Callable[[Step], Step]:
    def add(step: Step) -> Step:
        PROGRAMS[name] = (make, annotate, step)
        return step

    return add


def x_of(seed: int) -> torch.Tensor:
    return random_input(seed, 3, WIDTH)


def each(*names: str, **options: Any) -> Callable[[nn.Module], object]:
    """Annotate submodules by name, then the whole."""

    def annotate(model: nn.Module) -> object:
        for name in names:
            fully_shard(model.get_submodule(name), **options)
        return fully_shard(model, **options)

    return annotate


def root_of(model: nn.Module) -> Root:
    state = fully_shard.state(model)
    assert state is not None
    return state.lazy_init()


def by_linear(model: nn.Module) -> object:
    return fully_shard(model, policy={nn.Linear})


def one_step(name: str, steps: int = 2) -> list[dict[str, torch.Tensor | None]]:
    make, annotate, step = PROGRAMS[name]
    torch.manual_seed(0)
    model = make()
    annotate(model)
    rank, found = dist.get_rank(), []
    for number in range(steps):
        model.zero_grad()
        step(model, rank + 10 * number, 1.0)
        found.append({fqn: None if p.grad is None else full(p.grad).clone() for fqn, p in model.named_parameters()})
    return found


def plain_step(name: str, world_size: int, steps: int = 2) -> list[dict[str, torch.Tensor | None]]:
    make, _, step = PROGRAMS[name]
    torch.manual_seed(0)
    model = make()
    found = []
    for number in range(steps):
        model.zero_grad()
        for rank in range(world_size):
            step(model, rank + 10 * number, 1.0 / world_size)
        found.append({fqn: p.grad for fqn, p in model.named_parameters()})
        found[-1] = {fqn: None if grad is None else grad.clone() for fqn, grad in found[-1].items()}
    return found


def assert_equal_gradients(
    found: list[dict[str, torch.Tensor | None]], expected: list[dict[str, torch.Tensor | None]]
) -> None:
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for fqn, grad in other.items():
            got = one[fqn]
            if got is None or grad is None:
                assert got is grad, f"step {number}, {fqn}: {got} instead of {grad}"
            else:
                torch.testing.assert_close(got, grad, atol=1e-6, rtol=1e-5, msg=f"step {number}, {fqn}")


# -- handles that ran before the last backward


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2) for _ in range(3)])

    def forward(self, x: torch.Tensor, head: int | None = None) -> torch.Tensor:
        return torch.tanh(self.enc(x)) if head is None else self.heads[head](x)


@program("features once, one backward a head", Heads, by_linear)
def one_backward_a_head(model: nn.Module, seed: int, scale: float) -> None:
    features = model(x_of(seed))
    for head in range(3):
        (model(features, head).pow(2).mean() * scale).backward(retain_graph=head < 2)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Linear(WIDTH, WIDTH)
        self.critic = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, part: str) -> torch.Tensor:
        result: torch.Tensor = getattr(self, part)(x)
        return result


@program("two losses of a GAN", Gan, by_linear)
def gan(model: nn.Module, seed: int, scale: float) -> None:
    fake = model(x_of(seed), "generator")
    ((model(fake.detach(), "critic") - model(x_of(seed + 5), "critic")).pow(2).mean() * scale).backward()
    (model(fake, "critic").pow(2).mean() * scale).backward()


def two_models() -> nn.Module:
    trunk, one, other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    return nn.ModuleList([nn.Sequential(trunk, nn.Tanh(), one), nn.Sequential(trunk, nn.Tanh(), other)])


def shard_two_models(models: nn.Module) -> None:
    fully_shard(models.get_submodule("0.0"))
    fully_shard(models.get_submodule("0"))
    fully_shard(models.get_submodule("1"))


@program("two models with one trunk", two_models, shard_two_models)
def shared_trunk(models: nn.Module, seed: int, scale: float) -> None:
    one, other = models.get_submodule("0"), models.get_submodule("1")
    ((one(x_of(seed)).pow(2).mean() + other(x_of(seed)).abs().mean()) * scale).backward()


# -- outputs that leave by another way


class SideChannel(nn.Module):
    """Leaves a loss in an attribute: before its output is made, or after."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.aux: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.lin(x))
        if self.when == "before":
            self.aux = (y @ self.w @ self.w).pow(2).mean()
            return y * 2
        self.aux = (y @ self.w @ self.w).pow(2).mean()
        return y


class WithSideChannel(nn.Module):
    def __init__(self, when: str) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.block = SideChannel(when)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.head(self.block(self.inp(x))).pow(2).mean() + self.block.aux
        return loss


def add_side_channel(when: str) -> None:
    @program(f"side channel {when} the output", lambda: WithSideChannel(when), each("inp", "block", "head"))
    def step(model: nn.Module, seed: int, scale: float) -> None:
        (model(x_of(seed)) * scale).backward()


add_side_channel("before")
add_side_channel("after")


class OnlyAttribute(WithSideChannel):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Use what the block leaves in an attribute, and not its output."""
        h = self.inp(x)
        self.block(h)
        assert self.block.aux is not None
        loss: torch.Tensor = self.head(h).pow(2).mean() + self.block.aux
        return loss


@program("an attribute instead of the output", lambda: OnlyAttribute("before"), each("inp", "block", "head"))
def only_attribute(model: nn.Module, seed: int, scale: float) -> None:
    (model(x_of(seed)) * scale).backward()


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Hidden(nn.Module):
    """Returns its output in something that hooks may not look into."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.out: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.lin(x))
        if self.kind == "slots":
            return Slots(y)
        if self.kind == "closure":
            return lambda: y
        if self.kind == "generator":
            return (part for part in [y])
        if self.kind == "deque":
            return deque([y])
        self.out = y
        return None


class AroundHidden(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.block = Hidden(kind)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.block(self.inp(x))
        read: dict[str, Callable[[], Any]] = {
            "slots": lambda: out.value,
            "closure": lambda: out(),
            "generator": lambda: next(out),
            "deque": lambda: out[0],
            "attribute": lambda: self.block.out,
        }
        loss: torch.Tensor = self.head(read[self.kind]()).pow(2).mean()
        return loss


def add_hidden(kind: str) -> None:
    @program(f"output in a {kind}", lambda: AroundHidden(kind), each("inp", "block", "head"))
    def step(model: nn.Module, seed: int, scale: float) -> None:
        (model(x_of(seed)) * scale).backward()

    @program(f"output of the root in a {kind}", lambda: Hidden(kind), fully_shard)
    def step_of_root(model: nn.Module, seed: int, scale: float) -> None:
        out = model(x_of(seed))
        y = {
            "slots": lambda: out.value,
            "closure": lambda: out(),
            "generator": lambda: next(out),
            "deque": lambda: out[0],
            "attribute": lambda: model.out,
        }[kind]()
        (y.pow(2).mean() * scale).backward()


for hidden in ("slots", "closure", "generator", "deque", "attribute"):
    add_hidden(hidden)


# -- the order of autograd


class Drop(nn.Module):
    """A dropped layer: its input is its output."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)

    def forward(self, z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.two(torch.tanh(self.one(z)) + x)
        return result


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = Drop()
        self.middle = Middle()

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.middle(z, self.drop(x))
        return result


def add_leaf_output(needs_grad: bool) -> None:
    @program(f"a leaf as output, {needs_grad}", Dropped, each("drop", "middle"))
    def step(model: nn.Module, seed: int, scale: float) -> None:
        out = model(x_of(seed).requires_grad_(), x_of(seed + 5).requires_grad_(needs_grad))
        (out.pow(2).mean() * scale).backward()


add_leaf_output(False)
add_leaf_output(True)


class SometimesCheckpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, is_checkpointed: bool) -> torch.Tensor:
        result: torch.Tensor = self.lin(checkpoint(self.b, x, use_reentrant=True) if is_checkpointed else self.b(x))
        return result


class TwoCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.wrap = SometimesCheckpointed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inp(x)
        result: torch.Tensor = self.wrap(h, True) + self.wrap(2 * h, False)
        return result


@program("reentrant checkpoint in one call of two", TwoCalls, each("inp", "wrap.b", "wrap"))
def sometimes_checkpointed(model: nn.Module, seed: int, scale: float) -> None:
    (model(x_of(seed)).pow(2).mean() * scale).backward()


class InThreads(nn.Module):
    """Runs a child in another thread; ``inside`` also runs half of its own work there."""

    def __init__(self, *, is_inside: bool) -> None:
        super().__init__()
        self.is_inside = is_inside
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, out = self.a(x), []

        def run() -> None:
            out.append(torch.tanh(y @ self.w) @ self.w if self.is_inside else self.b(y))

        worker = threading.Thread(target=run)
        worker.start()
        worker.join()
        result: torch.Tensor = y + out[0] + (self.b(y) if self.is_inside else y @ self.w)
        return result


class AroundThreads(nn.Module):
    def __init__(self, *, is_inside: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.net = InThreads(is_inside=is_inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(self.inp(x))
        return result


def add_threads(is_inside: bool) -> None:
    name = "inside a module" if is_inside else "of a child"
    make = lambda: AroundThreads(is_inside=is_inside)  # noqa: E731

    @program(f"another thread, {name}", make, each("inp", "net.a", "net.b", "net"))
    def step(model: nn.Module, seed: int, scale: float) -> None:
        (model(x_of(seed)).pow(2).mean() * scale).backward()


IN_PROCESSES = {"another thread, inside a module", "another thread, of a child"}
add_threads(False)
add_threads(True)


# -- parameters that no rank, or not every rank, uses


@program("a head that no rank uses", Heads, fully_shard)
def unused_head(model: nn.Module, seed: int, scale: float) -> None:
    (model(model(x_of(seed)), 1).pow(2).mean() * scale).backward()


@program("another head on each rank", Heads, fully_shard)
def another_head(model: nn.Module, seed: int, scale: float) -> None:
    (model(model(x_of(seed)), seed % 2).pow(2).mean() * scale).backward()


class PassThrough(nn.Module):
    """Returns what its child returned, on some ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.w = nn.Parameter(torch.randn(WIDTH))
        self.w2 = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        y: torch.Tensor = self.lin(x)
        return (y + self.w) @ self.w2 if uses else y


def pass_through(model: nn.Module, seed: int, scale: float) -> None:
    (model(x_of(seed).requires_grad_(), seed % 10 == 0).pow(2).mean() * scale).backward()


def add_pass_through(transport: str) -> None:
    annotate = each("lin", transport=transport, reshard_after_forward=True)
    program(f"pass through, {transport}", PassThrough, annotate)(pass_through)


add_pass_through("process_group")
add_pass_through("point_to_point")


def nest_replicated(model: nn.Module) -> None:
    replicate(model.get_submodule("lin"))
    fully_shard(model)


def nest_both_replicated(model: nn.Module) -> None:
    replicate(model.get_submodule("lin"))
    replicate(model, find_unused_parameters=True)


program("pass through, replicated in sharded", PassThrough, nest_replicated)(pass_through)
program("pass through, replicated in replicated", PassThrough, nest_both_replicated)(pass_through)


# -- backward of backward


@program("gradient penalty", lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)), by_linear)
def gradient_penalty(model: nn.Module, seed: int, scale: float) -> None:
    x = x_of(seed).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (slope.pow(2).sum() * scale).backward()


@program("loss and gradient penalty", lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)), by_linear)
def loss_and_penalty(model: nn.Module, seed: int, scale: float) -> None:
    x = x_of(seed).requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    ((slope.norm(2, dim=1) - 1).pow(2).mean() * scale + out.pow(2).mean() * scale).backward()


class Force(nn.Module):
    """The output is a derivative through frozen parameters: a backward within the forward, and one of that later."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH))
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = x * self.w
        energy = torch.tanh(self.teacher(at)).square().sum()
        (force,) = torch.autograd.grad(energy, at, create_graph=True)
        out: torch.Tensor = self.head(torch.tanh(force))
        return out


def frozen_with_trainable(model: Force) -> None:
    fully_shard([model.teacher, model.head])
    fully_shard(model)


@program("derivative through frozen parameters of a handle that has others", Force, frozen_with_trainable)
def derivative(model: nn.Module, seed: int, scale: float) -> None:
    (model(x_of(seed)).square().mean() * scale).backward()


# -- a module that returns parameters


class ReturnsParams(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.emb = nn.Embedding(WIDTH, WIDTH)
        self.pos = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        if self.kind == "view":
            return self.pos[:3]
        if self.kind == "views":
            return self.pos[:2], {"more": self.pos[1:], "x": x}
        return self.pos


class AroundParams(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = ReturnsParams(kind)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.embed(x)
        if isinstance(out, tuple):
            out = torch.cat([out[0], out[1]["more"]])
        result: torch.Tensor = self.head(out).sum() + self.head(x).sum()
        return result


def add_returned(kind: str) -> None:
    @program(f"forward returns a parameter: {kind}", lambda: AroundParams(kind), each("embed", "head"))
    def step(model: nn.Module, seed: int, scale: float) -> None:
        with torch.no_grad():
            assert math.isfinite(model(x_of(seed)).item())
        (model(x_of(seed)).pow(2) * scale).backward()


for returned in ("view", "views", "whole"):
    add_returned(returned)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in IN_PROCESSES])
def test_gradients_are_those_of_one_process(name: str, world_size: int) -> None:
    expected = plain_step(name, world_size)
    for found in run_threads(one_step, world_size, name):
        assert_equal_gradients(found, expected)


@pytest.mark.parametrize("name", [*IN_PROCESSES, "pass through, process_group", "pass through, point_to_point"])
def test_gradients_are_those_of_one_process_on_processes(name: str) -> None:
    expected = plain_step(name, 2)
    for found in run_ranks(one_step, 2, name):
        assert_equal_gradients(found, expected)


# -- a parameter that nobody uses is left alone by optimizers


def train_heads(kind: str, decay: float) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Heads()
    is_sharded = dist.is_initialized()
    if is_sharded:
        fully_shard(model)
    ranks = [dist.get_rank()] if is_sharded else [0, 1]
    options = {"momentum": 0.9} if kind == "SGD" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-2, weight_decay=decay, **options)
    for number in range(20):
        optimizer.zero_grad()
        for rank in ranks:
            head = 1 if number in (1, 3) else 0
            (model(model(x_of(rank + 2 * number)), head).pow(2).mean() / len(ranks)).backward()
        optimizer.step()
    return {fqn: full(param) for fqn, param in model.named_parameters()}


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_an_unused_head_moves_as_in_one_process(kind: str, decay: float) -> None:
    expected = train_heads(kind, decay)
    for found in run_threads(train_heads, 2, kind, decay):
        for fqn, param in expected.items():
            torch.testing.assert_close(found[fqn], param, atol=1e-5 if kind == "AdamW" else 1e-6, rtol=0)


def zeros_for_unused() -> tuple[list[str], int]:
    model = Heads()
    fully_shard(model, unused_gradients="zero")
    root = root_of(model)
    counting = CountingTransport.install(root)
    model(model(x_of(0)), 1).sum().backward()
    zero = [fqn for fqn, p in model.named_parameters() if p.grad is not None and not full(p.grad).any()]
    return zero, counting.counts()["reduce_scatter"]


def test_unused_gradients_can_be_zeros() -> None:
    for zero, reductions in run_threads(zeros_for_unused, 2):
        assert set(zero) == {f"heads.{head}.{name}" for head in (0, 2) for name in ("weight", "bias")}
        assert reductions == 1


def test_an_unknown_choice_for_unused_gradients_is_an_error() -> None:
    with pytest.raises(ValueError, match="unused_gradients is None"):
        plan(Heads(), world_size=2, unused_gradients=None)  # type: ignore[arg-type]


# -- gradients that no_sync kept


def zero_grads(model: nn.Module, optimizer: torch.optim.Optimizer, how: str) -> None:
    if how == "model":
        model.zero_grad()
    elif how == "model, in place":
        model.zero_grad(set_to_none=False)
    elif how == "optimizer":
        optimizer.zero_grad()
    elif how == "optimizer, in place":
        optimizer.zero_grad(set_to_none=False)
    elif how == "by hand":
        for param in model.parameters():
            param.grad = None


class Leaking(nn.Module):
    """What it leaves in a list is younger than the output, so that backward gets there first."""

    def __init__(self, left: list[torch.Tensor]) -> None:
        super().__init__()
        self.lin, self.aux, self.left = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1), left

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lin(x)
        self.left.append(self.aux(out).square().mean())
        return out


def accumulate(program: list[str], options: dict[str, Any], leaks: bool) -> list[dict[str, torch.Tensor | None]]:
    """Run forwards and backwards, synchronising or not, and what drops gradients between them."""
    torch.manual_seed(0)
    left: list[torch.Tensor] = []
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    if leaks:
        model = Leaking(left)
    is_sharded = dist.is_initialized()
    if is_sharded:
        fully_shard(model, policy=None if leaks else {nn.Linear})
    ranks = [dist.get_rank()] if is_sharded else [0, 1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    found = []
    for number, word in enumerate(program):
        if word in ("keep", "sync", "sync, zeroed before backward"):
            losses = [model(x_of(rank + 2 * number)).pow(2).mean() / len(ranks) for rank in ranks]
            losses = [loss + aux / len(ranks) for loss, aux in zip(losses, left or [0.0] * len(losses), strict=True)]
            left.clear()
            if word == "sync, zeroed before backward":
                optimizer.zero_grad()
            for loss in losses:
                if word == "keep" and is_sharded:
                    with no_sync(model):
                        loss.backward()
                else:
                    loss.backward()
        elif word == "step":
            optimizer.step()
        else:
            zero_grads(model, optimizer, word)
        if word.startswith("sync") or word == "step":
            grads = {fqn: p.grad if word.startswith("sync") else p.detach() for fqn, p in model.named_parameters()}
            found.append({fqn: None if grad is None else full(grad).clone() for fqn, grad in grads.items()})
    return found


WAYS = ["model", "model, in place", "optimizer", "optimizer, in place", "by hand"]


def random_program(seed: int) -> list[str]:
    numbers = torch.randint(0, 10, (10,), generator=torch.Generator().manual_seed(seed)).tolist()
    words = ["keep", "keep", "sync", *WAYS, "sync, zeroed before backward", "sync"]
    program = [words[number] for number in numbers]
    return [*program, "sync", "step", "keep", WAYS[seed % len(WAYS)], "sync", "step"]


@pytest.mark.parametrize("leaks", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_zero_grad_drops_what_no_sync_kept(seed: int, leaks: bool) -> None:
    program, options = random_program(seed), {"foreach": bool(seed % 2)}
    expected = accumulate(program, options, leaks)
    for found in run_threads(accumulate, 2, program, options, leaks):
        assert_equal_gradients(found, expected)


# -- hooks on sharded parameters


def hook_parameters(when: str, kind: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Train with hooks on parameters: SGD in backward, or a hook that changes gradients."""
    torch.manual_seed(0)
    model: nn.Module = Heads()
    is_sharded = dist.is_initialized()
    ranks = [dist.get_rank()] if is_sharded else [0, 1]
    calls: list[str] = []

    def update(fqn: str, param: torch.Tensor) -> None:
        calls.append(fqn)
        assert param.grad is not None
        with torch.no_grad():
            param.sub_(param.grad, alpha=0.1)
        param.grad = None

    def add_hooks() -> None:
        for fqn, param in model.named_parameters():
            if kind == "post":
                param.register_post_accumulate_grad_hook(lambda param, fqn=fqn: update(fqn, param))
            else:
                param.register_hook(lambda grad: grad * 2)

    if when == "before":
        add_hooks()
    if is_sharded:
        fully_shard(model, policy={nn.Linear})
    if when == "after":
        add_hooks()
    for number in range(3):
        losses = [model(model(x_of(rank + 2 * number)), number % 2).pow(2).mean() / len(ranks) for rank in ranks]
        sum(losses[1:], losses[0]).backward()
        if kind == "hook":
            for param in model.parameters():
                if param.grad is not None:
                    with torch.no_grad():
                        param.sub_(param.grad, alpha=0.1)
                param.grad = None
    return {fqn: full(param) for fqn, param in model.named_parameters()}, sorted(calls)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", ["post", "hook"])
def test_hooks_of_parameters_run_on_the_reduced_gradient(when: str, kind: str) -> None:
    expected, calls = hook_parameters(when, kind)
    for found, ran in run_threads(hook_parameters, 2, when, kind):
        assert ran == calls
        for fqn, param in expected.items():
            torch.testing.assert_close(found[fqn], param, atol=1e-6, rtol=1e-5)


def return_garbage() -> str:
    model = nn.Linear(WIDTH, WIDTH)
    fully_shard(model)
    hook = model.weight.register_hook(lambda grad: grad.full_tensor())
    with pytest.raises(UsageError) as caught:
        model(x_of(0)).sum().backward()
    hook.remove()
    model.zero_grad()
    model(x_of(0)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    return str(caught.value)


def test_a_hook_that_returns_something_else_is_named() -> None:
    for rank, text in enumerate(run_threads(return_garbage, 2)):
        assert "returned Tensor [6, 6]" in text and f"rank {rank}, parameter 'weight'" in text and "fix:" in text


# -- what one rank cannot reduce, all hear of


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WIDTH, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.emb(tokens))
        return result


def sparse_on_one_rank() -> str:
    model = Tokens()
    fully_shard(model.emb)
    fully_shard(model)
    model.emb.sparse = dist.get_rank() == 1
    with pytest.raises(UsageError) as caught:
        model(torch.arange(3)).sum().backward()
    model.emb.sparse = False
    model.zero_grad()
    model(torch.arange(3)).sum().backward()
    assert full(model.emb.weight.grad).any()
    return str(caught.value)


def test_a_gradient_that_one_rank_cannot_reduce_is_an_error_on_all() -> None:
    for text in run_threads(sparse_on_one_rank, 3):
        assert "a gradient is sparse" in text and "rank 1, parameter 'emb.weight'\n" in text


def sparse_on_all_ranks_without_a_message() -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    model, plain = Tokens(), Tokens()
    plain.load_state_dict(model.state_dict())
    fully_shard(model.emb, unused_gradients="zero")
    fully_shard(model, unused_gradients="zero")
    with pytest.raises(UsageError) as caught:
        model(torch.arange(3)).sum().backward()
    for each in (model, plain):
        each.emb.sparse = False
        each.zero_grad()
        each(torch.arange(3)).sum().backward()
    return (
        str(caught.value),
        {fqn: full(param.grad) for fqn, param in model.named_parameters()},
        {fqn: param.grad for fqn, param in plain.named_parameters() if param.grad is not None},
    )


def test_without_a_message_each_rank_raises_its_own_and_the_next_step_is_right() -> None:
    for rank, (text, found, expected) in enumerate(run_threads(sparse_on_all_ranks_without_a_message, 2)):
        assert "a gradient is sparse" in text and f"rank {rank}, parameter 'emb.weight'" in text
        torch.testing.assert_close(found, expected)


def sparse_beside_a_dense_one_of_equal_shape() -> str:
    model = Tokens()
    fully_shard(model)
    with pytest.raises(UsageError) as caught:
        model(torch.arange(3)).sum().backward()
    return str(caught.value)


def test_only_the_parameter_with_the_sparse_gradient_is_named() -> None:
    (text,) = run_threads(sparse_beside_a_dense_one_of_equal_shape, 1)
    assert "rank 0, parameter 'emb.weight'\n" in text


def sparse_where_several_modules_share_a_handle() -> str:
    model = nn.Sequential(nn.Sequential(nn.Embedding(WIDTH, WIDTH, sparse=True)), nn.Linear(WIDTH, WIDTH))
    fully_shard([model[1], model[0]])
    fully_shard(model)
    with pytest.raises(UsageError) as caught:
        model(torch.arange(3)).sum().backward()
    return str(caught.value)


def test_where_several_modules_share_a_handle_the_name_is_that_from_the_root() -> None:
    (text,) = run_threads(sparse_where_several_modules_share_a_handle, 1)
    assert "rank 0, parameter '0.0.weight'\n" in text


def sparse_on_one_rank_of_two_meshes() -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = Tokens()
    fully_shard(model.emb, mesh=mesh["b"])
    fully_shard(model, policy={nn.Linear})
    model.emb.sparse = dist.get_rank() == 0
    with pytest.raises(UsageError) as caught:
        model(torch.arange(3)).sum().backward()
    model.emb.sparse = False
    model.zero_grad()
    model(torch.arange(3)).sum().backward()
    return str(caught.value)


def test_so_it_is_on_ranks_that_share_only_some_of_the_handles() -> None:
    (text,) = set(run_threads(sparse_on_one_rank_of_two_meshes, 4))
    assert "a gradient is sparse" in text and "rank 0, parameter 'emb.weight'\n" in text


def one_message_a_backward() -> tuple[int, int]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    fully_shard(model, policy={nn.Linear})
    model(x_of(0)).sum().backward()
    root = root_of(model)
    counts, transports = [], []
    for agreement in root.scheduler.step.finalizer.agreements:
        transports.append(CountingTransport(agreement.transport))
        agreement.transport = transports[-1]
    with no_sync(model):
        model(x_of(0)).sum().backward()
    counts.append(sum(len(one.records) for one in transports))
    model(x_of(0)).sum().backward()
    counts.append(sum(len(one.records) for one in transports))
    return counts[0], counts[1]


def test_ranks_exchange_one_message_in_a_backward_that_synchronises() -> None:
    assert run_threads(one_message_a_backward, 2) == [(0, 1)] * 2


# -- a hook of the user that raises when the ranks have agreed


class Choice(nn.Module):
    """Two layers; a call uses both or one."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        y = torch.tanh(self.one(x))
        return self.other(y) if both else y


class Choices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Choice() for _ in range(3))

    def forward(self, x: torch.Tensor, *both: bool) -> torch.Tensor:
        for block, uses_both in zip(self.blocks, both, strict=True):
            x = block(x, uses_both)
        return x


def step_of_choices(model: nn.Module, number: int, rank: int, scale: float) -> None:
    # First only rank 0 uses all of the last block; then all ranks do, and none uses all of the one before.
    both = (True, True, rank == 0) if number == 0 else (True, False, True)
    (model(x_of(rank + 10 * number), *both).pow(2).mean() * scale).backward()


def step_after_a_hook_raised() -> dict[str, torch.Tensor | None]:
    model, rank = seeded(Choices, 0), dist.get_rank()
    fully_shard(model, policy={Choice})

    def refuse(_: torch.Tensor) -> None:
        raise ValueError("of the user")

    # Of the first buffer: those of the other blocks have not been handed over when it raises.
    hook = model.blocks[0].one.weight.register_post_accumulate_grad_hook(refuse)  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match="of the user"):
        step_of_choices(model, 0, rank, 1.0)
    hook.remove()
    model.zero_grad()
    step_of_choices(model, 1, rank, 1.0)
    return {fqn: None if p.grad is None else full(p.grad).clone() for fqn, p in model.named_parameters()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_step_after_a_hook_raised_has_nothing_of_that_backward(world_size: int) -> None:
    plain = seeded(Choices, 0)
    for rank in range(world_size):
        step_of_choices(plain, 1, rank, 1.0 / world_size)
    expected = {fqn: p.grad for fqn, p in plain.named_parameters()}
    assert [fqn for fqn, grad in expected.items() if grad is None] == ["blocks.1.other.weight", "blocks.1.other.bias"]
    for grads in run_threads(step_after_a_hook_raised, world_size):
        assert_equal_gradients([grads], [expected])

"""Communication hooks of both annotations: which one holds, the numbers that it gives, and what goes wrong on one rank."""

import copy
import functools
import itertools
import random
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, mixed_precision_hooks, powerSGD_hook

from composable import (
    ComposableError,
    ConfigError,
    DefaultState,
    DesyncError,
    HandleOptions,
    LowPrecisionState,
    MixedPrecisionPolicy,
    UsageError,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    fully_shard,
    no_sync,
    reduce_gradients,
    reduce_scatter_hook,
    register_comm_hook,
    replicate,
    set_divergence_timeout,
    unannotate,
)
from composable.comm.hang_watchdog import explained
from tests.counting import CountingTransport
from tests.models import BATCH, DIM, MLPBlock, random_input, seeded
from tests.pairwise import pairs_of
from tests.parity import full, gradients_of
from tests.test_divergence import wait_until_all_are_told
from tests.world import on_ranks, run_ranks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


class Net(nn.Module):
    """Linear layers of one dtype, the outer ones the root's own."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM + 1, dtype=dtype)
        self.blocks = nn.Sequential(*(nn.Linear(DIM + 1, DIM + 1, dtype=dtype) for _ in range(2)))
        self.last = nn.Linear(DIM + 1, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)))


def make_net(dtype: torch.dtype = torch.float32) -> Net:
    return seeded(lambda: Net(dtype), 0)


def batch_of(rank: int, dtype: torch.dtype = torch.float32, step: int = 0) -> torch.Tensor:
    return random_input(100 * step + rank, BATCH, DIM, dtype=dtype)


def backward(model: nn.Module, rank: int, dtype: torch.dtype = torch.float32, step: int = 0) -> None:
    out = model(batch_of(rank, dtype, step))
    (torch.view_as_real(out) if out.is_complex() else out).square().mean().backward()


def annotate(model: nn.Module, annotation: str, **options: Any) -> nn.Module:
    if annotation == "replicate":
        return replicate(model, bucket_cap_mb=0.0001, find_unused_parameters=True)
    return fully_shard(model, policy={nn.Linear}, **options)


def place_in(model: nn.Module, place: str) -> nn.Module:
    return {"root": model, "subtree": model.blocks, "handle": model.blocks[1]}[place]


def mean_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average as the hooks without casts do, whichever is due."""
    if output is None:
        allreduce_hook(state, grad)
    else:
        reduce_scatter_hook(state, grad, output)


def noting(seen: list[Any], note: Callable[[torch.Tensor], Any] = torch.Tensor.numel) -> Callable[..., None]:
    """Return a hook that averages, and notes something of the gradients that it gets."""

    def hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
        seen.append(note(grad))
        mean_hook(state, grad, output)

    return hook


def default_state() -> DefaultState:
    return DefaultState(dist.group.WORLD)


def close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], eps: float) -> None:
    assert got.keys() == wanted.keys()
    for fqn, grad in got.items():
        limit = eps * wanted[fqn].abs().max().item()
        torch.testing.assert_close(grad, wanted[fqn], rtol=0, atol=limit, msg=lambda text, fqn=fqn: f"{fqn}: {text}")


# Buckets


@pytest.mark.parametrize(("seed", "world_size"), [(seed, 1 + seed % 2) for seed in range(4)])
@on_ranks()
def test_a_buffer_holds_its_gradients_one_behind_the_other(seed: int) -> None:
    """Let a hook for the wrapper go through each buffer by the sizes of its gradients, as below the wrapper."""
    draw = random.Random(seed)
    sizes = [draw.choice([1, 3, 5, 8, 13, 64, 70]) for _ in range(6)]
    dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16, torch.complex64])
    layers = [nn.Linear(a, b, dtype=dtype) for a, b in itertools.pairwise(sizes)]
    layers[draw.randrange(5)].weight.requires_grad_(draw.random() < 0.5)
    model = replicate(nn.Sequential(*layers), bucket_cap_mb=25.0 if seed % 4 < 2 else 0.0001)
    seen: list[int] = []

    def walk(state: None, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buffer, start = bucket.buffer(), 0
        for grad in bucket.gradients():
            flat = (torch.view_as_real(grad) if grad.is_complex() else grad).reshape(-1)
            assert torch.equal(buffer[start : start + flat.numel()], flat)
            start += flat.numel()
        assert start == buffer.numel()
        seen.append(start)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer.fill_(7.0))
        return done

    register_comm_hook(model, None, walk)
    trainable = [param for param in model.parameters() if param.requires_grad]
    for _ in range(3):
        seen.clear()
        out = model(torch.ones(2, sizes[0], dtype=dtype))
        (torch.view_as_real(out) if out.is_complex() else out).sum().backward()
        assert sum(seen) == sum(param.numel() * (2 if dtype.is_complex else 1) for param in trainable)
        for param in trainable:
            assert torch.equal(param.grad, torch.full_like(param, 7 + 7j if dtype.is_complex else 7))


# States


FACTORS = {1: (1, 1), 2: (2, 1), 3: (2, 1.5), 8: (4, 2)}


@on_ranks(8)
def test_the_two_factors_multiply_to_the_number_of_ranks() -> None:
    state = default_state()
    assert (state.gradient_predivide_factor, state.gradient_postdivide_factor) == FACTORS[8]


def test_a_state_without_a_group_is_a_value_error() -> None:
    for make in (DefaultState, LowPrecisionState):
        with pytest.raises(ValueError, match="process_group is None") as caught:
            make(None)
        assert isinstance(caught.value, ConfigError)


# Numbers


def train_with(annotation: str, place: str, dtype: torch.dtype, hook: Callable[..., Any] | None) -> dict[str, Any]:
    model = annotate(make_net(dtype), annotation)
    if hook is not None:
        register_comm_hook(place_in(model, place), default_state(), hook)
    backward(model, dist.get_rank(), dtype)
    return gradients_of(model)


@pytest.mark.parametrize(
    ("annotation", "place", "dtype", "world_size"),
    [
        *(
            ("fully_shard", *case)
            for case in pairs_of(place=["root", "subtree", "handle"], dtype=DTYPES, world_size=[2, 1, 3])[1]
        ),
        *(("replicate", "root", dtype, 2 + number % 2) for number, dtype in enumerate((*DTYPES, torch.complex64))),
    ],
)
@on_ranks()
def test_the_hooks_without_casts_change_no_number(annotation: str, place: str, dtype: torch.dtype) -> None:
    plain, hooked = (train_with(annotation, place, dtype, hook) for hook in (None, mean_hook))
    # Dividing by a power of two rounds nothing; by three, and three summands in another order, do.
    close(hooked, plain, 0 if dist.get_world_size() < 3 else 4 * torch.finfo(dtype).eps)


def compressed(annotation: str, way: str, low: torch.dtype) -> dict[str, torch.Tensor]:
    model = annotate(make_net(), annotation)
    if "hook" in way:
        hook = fp16_compress_hook if low is torch.float16 else bf16_compress_hook
        register_comm_hook(model, LowPrecisionState(dist.group.WORLD) if way == "hook" else None, hook)
    else:
        wrapper = fp16_compress_wrapper if low is torch.float16 else bf16_compress_wrapper
        register_comm_hook(model, default_state() if way == "wrapper" else None, wrapper(mean_hook))
    backward(model, dist.get_rank())
    return gradients_of(model)


def emulated(low: torch.dtype, world_size: int) -> dict[str, torch.Tensor]:
    """Return what compressed gradients become, in one process."""
    pre, post = FACTORS[world_size]
    total: dict[str, torch.Tensor] = {}
    for rank in range(world_size):
        model = make_net()
        backward(model, rank)
        for fqn, param in model.named_parameters():
            sent = param.grad.to(low).div_(pre)
            total[fqn] = total[fqn] + sent if rank else sent
    return {fqn: grad.div_(post).float() for fqn, grad in total.items()}


@on_ranks(
    annotation=["fully_shard", "replicate"],
    way=["hook", "wrapper", "hook without a state", "None, wrapped"],
    low=[torch.float16, torch.bfloat16],
    world_size=[1, 2, 3],
)
def test_compressed_gradients_are_those_that_one_process_emulates(annotation: str, way: str, low: torch.dtype) -> None:
    world_size, grads = dist.get_world_size(), compressed(annotation, way, low)
    # The sum of three depends on the order, which is the transport's.
    close(grads, emulated(low, world_size), 0 if world_size < 3 else 2 * torch.finfo(low).eps)
    assert all(grad.dtype is torch.float32 for grad in grads.values())
    if world_size < 3:
        assert all(torch.equal(grad.to(low).float(), grad) for grad in grads.values())


@on_ranks(2)
def test_complex_gradients_are_compressed_in_both_parts() -> None:
    state, rank = LowPrecisionState(dist.group.WORLD), dist.get_rank()
    whole = torch.arange(4) * torch.tensor(1 + 2j) * (1 + rank)
    shard = torch.empty(2, dtype=whole.dtype)
    bf16_compress_hook(state, whole.clone(), shard)
    bf16_compress_hook(state, whole)
    expected = torch.arange(4) * torch.tensor(1.5 + 3j)
    torch.testing.assert_close(whole, expected, rtol=0, atol=0)
    torch.testing.assert_close(shard, expected[2 * rank : 2 * rank + 2], rtol=0, atol=0)


@on_ranks(2, run=run_ranks, annotation=["fully_shard", "replicate"])
def test_hooks_talk_in_real_process_groups(annotation: str) -> None:
    plain, hooked, low = [train_with(annotation, "root", torch.float32, hook) for hook in (None, mean_hook)] + [
        compressed(annotation, "hook", torch.bfloat16)
    ]
    close(hooked, plain, 0)
    close(low, plain, 2 * torch.finfo(torch.bfloat16).eps)
    assert not torch.equal(low["last.weight"], plain["last.weight"])


# What a hook is called with, and how often


@pytest.mark.parametrize(("unused", "world_size"), [("none", 1), ("none", 2), ("zero", 3)])
@on_ranks()
def test_a_hook_takes_the_place_of_every_reduce_scatter(unused: str) -> None:
    model = annotate(make_net(), "fully_shard", options=HandleOptions(unused_gradients=unused))
    calls: list[tuple[int, int]] = []

    def hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
        calls.append((grad.numel(), output.numel()))
        mean_hook(state, grad, output)

    register_comm_hook(model, default_state(), hook)
    counting = CountingTransport.install(fully_shard.state(model).lazy_init())
    backward(model, dist.get_rank())
    assert len(calls) == len(fully_shard.state(model)._all_handles) == 4
    assert all(whole == dist.get_world_size() * part for whole, part in calls)
    assert "reduce_scatter" not in counting.counts() and counting.counts()["all_gather"] > 0


@on_ranks(2)
def test_a_replicated_module_calls_a_hook_for_each_bucket_without_an_output() -> None:
    model = annotate(make_net(), "replicate")
    calls: list[torch.Tensor | None] = []

    def hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
        calls.append(output)
        mean_hook(state, grad, output)

    register_comm_hook(model, default_state(), hook)
    for _ in range(2):
        backward(model, dist.get_rank())
    # One bucket for all before the order is known, then those of the limit.
    assert {*calls} == {None} and len(calls) > len(replicate.state(model).reducer.buckets) > 1


@on_ranks(2)
def test_a_hook_gets_gradients_in_the_dtype_of_the_reduction() -> None:
    seen: list[torch.dtype] = []
    results = []
    for is_hooked in (False, True):
        model = annotate(make_net(), "fully_shard", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
        if is_hooked:
            register_comm_hook(model, default_state(), noting(seen, lambda grad: grad.dtype))
        backward(model, dist.get_rank())
        results.append(gradients_of(model))
    assert {*seen} == {torch.bfloat16}
    assert all(grad.dtype is torch.float32 for grad in results[1].values())
    close(*reversed(results), 2 * torch.finfo(torch.bfloat16).eps)


class Tower(nn.Module):
    """A trunk whose features two heads share: a backward each, of which the second comes late to the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(DIM, DIM)
        self.heads = nn.ModuleList(nn.Linear(DIM, 3) for _ in range(2))


@on_ranks(2)
def test_every_reduction_of_a_module_that_has_several_goes_through_the_hook() -> None:
    results, calls = [], []
    for is_hooked in (False, True):
        model = seeded(Tower, 0)
        for module in (model.trunk, *model.heads):
            fully_shard(module)
        if is_hooked:
            register_comm_hook(model, default_state(), noting(calls))
        for index, head in enumerate(model.heads):
            features = model.trunk(batch_of(dist.get_rank(), step=index))
            head(features).square().mean().backward()
        results.append(gradients_of(model))
    assert len(calls) == 4
    close(*results, 0)


# Which registration holds


class Node(nn.Module):
    """A layer of its own, then the nodes below."""

    def __init__(self, below: list["Node"]) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.below = nn.ModuleList(below)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        for node in self.below:
            x = x + node(x)
        return x


def random_tree(rng: random.Random, depth: int) -> Node:
    return Node([random_tree(rng, depth - 1) for _ in range(rng.randint(0, 2 if depth else 0))])


def scaled_hook(factor: int, state: DefaultState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    mean_hook(state, grad, output)
    (grad if output is None else output).mul_(factor)


def ancestors(fqn: str) -> list[str]:
    """Return the names of a module and of those around it, innermost first."""
    parts = fqn.split(".") if fqn else []
    return [".".join(parts[:stop]) for stop in range(len(parts), -1, -1)]


@pytest.mark.parametrize(("seed", "world_size"), [(seed, 1 + seed % 3) for seed in range(3)])
@on_ranks()
def test_the_nearest_registration_holds_whatever_the_order(seed: int) -> None:
    """Compare gradients with one hook on all, and with random hooks, by the factor due to each, by brute force."""
    rng = random.Random(seed)
    tree = seeded(lambda: random_tree(rng, 3), seed)
    nodes = [fqn for fqn, module in tree.named_modules() if isinstance(module, Node)]
    # From the inside out. What replicate leaves to others further in is theirs.
    annotated = {fqn: rng.choice([fully_shard, replicate]) for fqn in nodes[1:] if rng.random() < 0.6}
    annotated[""] = fully_shard
    registered: dict[str, int] = {}
    places = [fqn for fqn, _ in tree.named_modules() if rng.random() < 0.5]
    rng.shuffle(places)
    is_taken_off = {fqn: rng.random() < 0.3 for fqn in places}
    grads = []
    for is_random in (False, True):
        model = copy.deepcopy(tree)
        for fqn in sorted(annotated, key=lambda fqn: -len(ancestors(fqn))):
            annotated[fqn](model.get_submodule(fqn))
        if not is_random:
            register_comm_hook(model, default_state(), mean_hook)
        for number, fqn in enumerate(places if is_random else []):
            hook, part = functools.partial(scaled_hook, 2 ** (number + 1)), model.get_submodule(fqn)
            if not any(fqn in ancestors(other) for other in annotated):
                with pytest.raises(UsageError, match="found no annotated module"):
                    register_comm_hook(part, default_state(), hook)
                continue
            handle = register_comm_hook(part, default_state(), hook)
            if is_taken_off[fqn]:
                handle.remove()
            else:
                registered[fqn] = 2 ** (number + 1)
        backward(model, dist.get_rank())
        grads.append(gradients_of(model))
    plain, hooked = grads
    for fqn, _ in tree.named_parameters():
        owner = next(one for one in ancestors(fqn) if one in annotated)
        factor = next((registered[one] for one in ancestors(owner) if one in registered), 1)
        # Where nothing is registered, the library's own sum may have another order.
        eps = 4 * torch.finfo(torch.float32).eps if factor == 1 else 0
        close({fqn: hooked[fqn]}, {fqn: plain[fqn] * factor}, eps)


# How long a registration lasts


@on_ranks(2, way=["communication hook", "all-reduce hook"])
def test_what_waits_for_a_hook_is_reduced_by_it_in_unannotate(way: str) -> None:
    model, twin = (annotate(make_net(), "fully_shard") for _ in range(2))
    for one in (model, twin):
        if way == "communication hook":
            register_comm_hook(one, default_state(), mean_hook)
        else:
            one.blocks[0].set_all_reduce_hook(lambda shard: shard.mul_(2))
        with no_sync(one):
            backward(one, dist.get_rank())
    reduce_gradients(twin)
    unannotate(model)
    for (fqn, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(param.grad, full(other.grad)), fqn


# Errors


def bucket_hook(state: Any, bucket: Any) -> None:
    raise AssertionError("never called")


def register_twice(model: Any, state: Any, hook: Callable[..., Any]) -> None:
    for module in model:
        register_comm_hook(module, state, hook)


def register_in_backward(model: nn.Module) -> None:
    out = model(batch_of(0))
    out.register_hook(lambda grad: register_comm_hook(model, None, mean_hook) and None)
    out.sum().backward()


OF_TORCH = default_hooks.fp16_compress_wrapper
REFUSED: list[tuple[Callable[[Any], object], str]] = [
    (lambda m: register_comm_hook(m, None, bucket_hook), "ConfigError.*takes a state and a bucket only"),
    (lambda m: register_comm_hook(m, default_state(), allreduce_hook), "ConfigError.*takes a state and gradients only"),
    (
        lambda m: register_comm_hook(replicate(make_net()), default_state(), reduce_scatter_hook),
        "ConfigError.*the hook requires an output",
    ),
    (
        lambda m: register_comm_hook(m, None, lambda a, b, c, d: None),
        "ConfigError.*cannot be called with a state and gradients",
    ),
    (lambda m: register_twice([m, m], default_state(), mean_hook), "UsageError.*registered already"),
    (lambda m: register_comm_hook(nn.Linear(2, 2), None, mean_hook), "UsageError.*found no annotated module"),
    (
        lambda m: register_comm_hook(m, DefaultState(own_group()), mean_hook),
        "ConfigError.*the state of the hook has ranks",
    ),
    (
        lambda m: register_comm_hook(m, None, dist.BuiltinCommHookType.FP16_COMPRESS),
        "SignatureError.*fix: pass .* allreduce_hook with a DefaultState, or fp16_compress_hook with a LowPrecisionState",
    ),
    (lambda m: fp16_compress_wrapper(default_hooks.allreduce_hook), "ConfigError.*allreduce_hook takes a bucket"),
    (lambda m: bf16_compress_wrapper(OF_TORCH(default_hooks.allreduce_hook)), "ConfigError.*takes a bucket"),
    (lambda m: register_comm_hook(m, None, 3), "SignatureError.*hook is 3"),  # type: ignore[arg-type]
    (
        lambda m: register_comm_hook(m, dist.group.WORLD, bf16_compress_hook),
        "ConfigError.*state of the hook is a .*Group, not a LowPrecisionState.*fix: pass a LowPrecisionState",
    ),
    (lambda m: register_comm_hook(m, default_state(), fp16_compress_hook), "ConfigError.*not a LowPrecisionState"),
    (
        lambda m: register_comm_hook(m, dist.group.WORLD, fp16_compress_wrapper(bf16_compress_wrapper(mean_hook))),
        "ConfigError.*not a DefaultState",
    ),
    (
        lambda m: register_comm_hook(replicate(make_net()), 3, default_hooks.allreduce_hook),
        "ConfigError.*state of the hook is 3, not a ProcessGroup",
    ),
    (
        lambda m: register_comm_hook(replicate(make_net()), default_state(), powerSGD_hook.powerSGD_hook),
        "ConfigError.*not a PowerSGDState",
    ),
    (
        lambda m: register_comm_hook(
            replicate(make_net()), None, mixed_precision_hooks._reducer_allreduce_and_upcast_hook
        ),
        "ConfigError.*own mixed precision.*mp_policy=",
    ),
    (
        lambda m: register_comm_hook(
            nn.Sequential(m, replicate(make_net(), process_group=own_group())), None, mean_hook
        ),
        "ConfigError.*the state of the hook has ranks",
    ),
    # A memory of buckets serves one module.
    (
        lambda m: register_comm_hook(two_replicated(), power_state(), powerSGD_hook.powerSGD_hook),
        "ConfigError.*cannot serve 2 replicated modules",
    ),
    (
        lambda m: register_twice(two_replicated(), power_state(), powerSGD_hook.powerSGD_hook),
        "ConfigError.*cannot serve 2 replicated modules",
    ),
    (
        lambda m: register_twice(around_a_group(), default_state(), mean_hook),
        "ConfigError.*neither one's module is inside the other's.*module MLPBlock and module MLPBlock",
    ),
    (
        # What torch.compile has wrapped has no length.
        lambda m: register_twice(
            [torch.compile(one, backend="eager") for one in around_a_group()], default_state(), mean_hook
        ),
        "ConfigError.*neither one's module is inside the other's",
    ),
    (register_in_backward, "UsageError.*a backward is running"),
    (
        lambda m: [m.set_gradient_divide_factor(3), register_comm_hook(m, default_state(), mean_hook)],
        "UsageError.*a gradient divide factor and a communication hook",
    ),
]


def power_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)


def two_replicated() -> nn.Sequential:
    return nn.Sequential(*(replicate(nn.Linear(DIM, DIM)) for _ in range(2)))


def around_a_group() -> list[nn.Module]:
    """Return two modules that each hold one of two layers that share a handle."""
    holders = [MLPBlock(DIM, DIM) for _ in range(2)]
    fully_shard([holder.up for holder in holders])
    return [*holders]


def own_group() -> dist.ProcessGroup:
    groups = [dist.new_group([rank]) for rank in range(2)]
    return groups[dist.get_rank()]


@pytest.mark.parametrize("number", range(len(REFUSED)), ids=[text for _, text in REFUSED])
@on_ranks(2)
def test_what_cannot_work_is_refused_with_place_and_fix(number: int) -> None:
    model = fully_shard(make_net())
    call, expected = REFUSED[number]
    with pytest.raises(ComposableError) as caught:
        call(model)
    text = f"{type(caught.value).__name__}: {caught.value}"
    assert re.search(expected, text, re.DOTALL), text
    assert f"\n  at:  rank {dist.get_rank()}" in text and "\n  fix: " in text
    backward(model, dist.get_rank())


@on_ranks(2)
def test_a_hook_that_is_wrong_on_one_rank_is_an_error_on_all() -> None:
    model = fully_shard(make_net())
    with pytest.raises(ConfigError, match="at:  rank 1, module"):
        register_comm_hook(model, default_state(), bucket_hook if dist.get_rank() else mean_hook)
    assert not fully_shard.state(model)._handles[0].comm_hooks
    backward(model, dist.get_rank())


@on_ranks(2, way=["none on the last", "another on the last"])
def test_ranks_that_register_different_hooks_are_told(way: str) -> None:
    model = fully_shard(make_net())
    with pytest.raises(DesyncError) as caught:  # noqa: PT012  # which of the calls meets the other rank differs
        if way == "none on the last" and dist.get_rank() == 0:
            register_comm_hook(model, default_state(), mean_hook)
        elif way == "another on the last":
            register_comm_hook(model, default_state(), [mean_hook, bf16_compress_wrapper(mean_hook)][dist.get_rank()])
        backward(model, dist.get_rank())
    own = (
        " of tests.test_comm_hooks.mean_hook with DefaultState"
        if way == "another on the last"
        else "\n    rank 1: the com"
    )
    assert f"rank 0: register_comm_hook{own}" in str(caught.value)


BAD_RESULTS: dict[str, tuple[Callable[[torch.Tensor], object], str]] = {
    "dtype": (lambda result: setattr(result, "data", result.data.half()), "a result of float16, where float32 is due"),
    "shape": (lambda result: setattr(result, "data", result.data[1:]), r"a result of shape \[\d+\], where \[\d+\]"),
    "return": (lambda result: result.clone(), "returned a Tensor"),
}


def assert_told(model: nn.Module, annotation: str, state: Any, hook: Callable[..., Any]) -> str:
    """Return the error of a backward with a hook; once it is off, nothing is left of it."""
    handle = register_comm_hook(model, state, hook)
    with pytest.raises(ComposableError) as caught:
        backward(model, dist.get_rank())
    model.zero_grad()
    handle.remove()
    backward(model, dist.get_rank())
    close(gradients_of(model), train_with(annotation, "root", torch.float32, None), 0)
    return str(caught.value)


@on_ranks(2, annotation=["fully_shard", "replicate"], way=BAD_RESULTS, ranks=[(0, 1), (1,)])
def test_a_result_that_cannot_be_is_an_error_on_every_rank(annotation: str, way: str, ranks: tuple[int, ...]) -> None:
    change, expected = BAD_RESULTS[way]
    rank = dist.get_rank()

    def hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor | None = None) -> object:
        mean_hook(state, grad, output)
        return change(grad if output is None else output) if rank in ranks else None

    text = assert_told(annotate(make_net(), annotation), annotation, default_state(), hook)
    if annotation == "replicate" and rank not in ranks:
        assert "rank 1 got no averages of the right dtype and shape" in text
    else:
        assert re.search(expected, text)
    if annotation == "fully_shard":
        assert f"at:  rank {rank if rank in ranks else 1}, module 'last' (Linear)\n  fix: fill" in text


@on_ranks(2)
def test_of_two_complaints_other_ranks_hear_the_one_that_the_rank_itself_raises() -> None:
    model, rank = replicate(make_net()), dist.get_rank()

    def hook(state: DefaultState, grad: torch.Tensor) -> None:
        mean_hook(state, grad)
        if rank == 1:
            grad.data = grad.data.half()

    register_comm_hook(model, default_state(), hook)
    inner = model.first.register_forward_hook(lambda module, args, output: output.detach() if rank == 1 else None)
    with pytest.raises(ComposableError) as caught:
        backward(model, rank)  # On rank 1 the parameters of `first` get no gradient, too.
    inner.remove()
    text = "got no averages of the right dtype and shape" if rank == 0 else "a result of float16"
    assert text in str(caught.value)


def raising(annotation: str, ranks: list[int], is_late: bool) -> str:
    set_divergence_timeout(0.3)
    model = annotate(make_net(), annotation)

    def hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
        if is_late:
            mean_hook(state, grad, output)
        if dist.get_rank() in ranks:
            raise ValueError("out of luck")
        if not is_late:
            mean_hook(state, grad, output)

    register_comm_hook(model, default_state(), hook)
    with pytest.raises((ValueError, DesyncError)) as caught:
        backward(model, dist.get_rank())
    if len(ranks) == 1:
        # What this rank is told after the test would end the groups of the next one.
        wait_until_all_are_told()
        explained(RuntimeError(), dist.group.WORLD)
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize(("annotation", "is_late"), [("fully_shard", True), ("replicate", False)])
def test_a_hook_that_raises_on_one_rank_is_an_error_on_every_rank_and_no_hang(annotation: str, is_late: bool) -> None:
    first, second = run_ranks(raising, 2, annotation, [1], is_late)
    assert "out of luck" in second
    assert "DesyncError" in first and "has left backward 1 of Net" in first


def raising_in_a_future(of: int) -> list[str]:
    """Train three steps; in the second, on rank 1, what runs when bucket ``of`` has arrived raises."""
    model = annotate(make_net(), "replicate")
    said: list[str] = []

    def hook(_: None, bucket: Any) -> "torch.futures.Future[Any]":
        def divide(future: "torch.futures.Future[Any]") -> torch.Tensor:
            if (len(said), dist.get_rank(), bucket.index()) == (1, 1, of):
                raise ValueError("out of luck")
            averages: torch.Tensor = future.value()[0] / dist.get_world_size()
            return averages

        future: torch.futures.Future[Any] = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(divide)

    register_comm_hook(model, None, hook)
    for _ in range(3):
        model.zero_grad()
        try:
            backward(model, dist.get_rank())
            said.append("")
        except ComposableError as error:
            said.append(str(error))
    plain = make_net()
    for rank in range(2):
        backward(plain, rank)
    close(gradients_of(model), {fqn: grad / 2 for fqn, grad in gradients_of(plain).items()}, 1e-6)
    return said


def test_what_a_bucket_hooks_future_raises_on_one_rank_names_rank_and_hook_on_all() -> None:
    (_, first, last), (_, second, other_last) = run_ranks(raising_in_a_future, 2, 1)
    assert "hook with NoneType raised ValueError: out of luck" in second and "at:  rank 1" in second
    assert "rank 1 got no averages of the right dtype and shape from the communication hook" in first
    assert "raising_in_a_future.<locals>.hook with NoneType" in first
    assert last == other_last == ""


def forget_futures(seed: int) -> list[str]:
    """Train four steps; in some, on some ranks, the hook returns for some buckets a future that nobody sets."""
    choose = random.Random(seed)
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=5))
    model = replicate(make_net(), process_group=group, bucket_cap_mb=choose.choice([25, 1e-4]))
    forgotten = {(choose.randrange(4), choose.randrange(2), choose.randrange(2)) for _ in range(2)}
    told: list[str] = []

    def hook(_: None, bucket: Any) -> "torch.futures.Future[Any]":
        work = dist.all_reduce(bucket.buffer().div_(2), group=group, async_op=True)
        future: torch.futures.Future[Any] = work.get_future()
        places = {0 if bucket.index() == 0 else -1, 1 if bucket.is_last() else -1}
        if not forgotten & {(len(told), dist.get_rank(), place) for place in places}:
            return future.then(lambda done: done.value()[0])
        future.wait()
        return torch.futures.Future()

    register_comm_hook(model, None, hook)
    plain = make_net()
    for rank in range(2):
        backward(plain, rank)
    for _ in range(4):
        model.zero_grad()
        try:
            backward(model, dist.get_rank())
            close(gradients_of(model), {fqn: grad / 2 for fqn, grad in gradients_of(plain).items()}, 1e-6)
            told.append("")
        except ComposableError as error:
            told.append(str(error))
    assert [bool(text) for text in told] == [any(step == at for at, _, _ in forgotten) for step in range(4)], told
    return told


def test_a_future_that_nobody_sets_is_an_error_on_all_and_the_next_step_is_right() -> None:
    for texts in filter(any, zip(*run_ranks(forget_futures, 2, 1), strict=True)):
        assert any("the future of the communication hook" in text for text in texts), texts
        for rank, text in enumerate(texts):
            assert re.search(f"for bucket . was not set within 4 s\n  at:  rank {rank}", text) or (
                "got no averages of the right dtype and shape from the communication hook" in text
            ), text


@on_ranks(1)
def test_an_output_that_a_hook_does_not_write_is_nan() -> None:
    model = fully_shard(make_net())
    register_comm_hook(model, None, lambda state, grad, output: None)
    backward(model, dist.get_rank())
    assert all(grad.isnan().all().item() for grad in gradients_of(model).values())

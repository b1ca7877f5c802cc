"""Modes around a step: inference, no gradient, transforms of ``torch.func``, and all that sees operations.

They harm nothing that comes after, and see what they would see of the plain model.
"""

import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.func import grad, hessian, jacrev, jvp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from composable import (
    MixedPrecisionPolicy,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    replicate,
)
from composable.ground.torch_private import TorchDispatchMode
from tests.models import DIM, MLP, loss_of, random_input, seeded
from tests.world import on_ranks, run_ranks, run_threads, told

MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "train": nullcontext,
}


def annotate(model: nn.Module, how: str, *, reshard: bool | None = None) -> None:
    if how == "fully_shard":
        fully_shard(model, policy={nn.Linear}, reshard_after_forward=reshard)
    else:
        replicate(model)


def full(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def compare(model: nn.Module, plain: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param), other, msg=name)
        if other.grad is not None:
            torch.testing.assert_close(full(param.grad), other.grad)


def run_in_random_modes(seed: int, how: str) -> None:
    draw, rank = random.Random(seed), dist.get_rank()
    model, plain = (seeded(MLP, 0) for _ in range(2))
    fills = how == "fully_shard" and draw.random() < 0.4
    if fills:
        model = model.to("meta")
    annotate(model, how, reshard=draw.choice([None, True, False]))
    if fills:
        model.load_state_dict({name: value.clone() for name, value in plain.state_dict().items()}, assign=True)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain)]
    for number in range(6):
        mode = draw.choice(list(MODES)) if number < 5 else "train"
        x = random_input(10 * number + rank, 4, DIM)
        with MODES[mode]():
            output = model(x)
            torch.testing.assert_close(output, plain(x))
        if mode == "train":
            loss_of(output).backward()
            for one in range(2):
                (loss_of(plain(random_input(10 * number + one, 4, DIM))) / 2).backward()
            compare(model, plain)
            if draw.random() < 0.6:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    compare(model, plain)


@pytest.mark.parametrize(("seed", "how"), [(seed, ["fully_shard", "replicate"][seed % 4 == 3]) for seed in range(16)])
@on_ranks(2)
def test_forwards_in_any_order_of_modes_train_as_one_process(seed: int, how: str) -> None:
    run_in_random_modes(seed, how)


X = random_input(5, 3, DIM)
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda run: grad(lambda x: loss_of(run(x)))(X),
    "jvp": lambda run: jvp(run, (X,), (torch.ones_like(X),)),
    "jacrev": lambda run: jacrev(run)(X),
    "hessian": lambda run: hessian(lambda x: loss_of(run(x)))(X[:1]),
    "vmap": lambda run: vmap(run)(torch.stack([X, X + 1])),
    "vmap of grad": lambda run: vmap(grad(lambda x: loss_of(run(x))))(torch.stack([X, X + 1])),
}


# Processes: threads share torch's level of forward-mode differentiation.
@on_ranks(
    2,
    run=run_ranks,
    name=list(TRANSFORMS),
    annotated=[("fully_shard", None), ("fully_shard", True), ("replicate", None)],
    is_warm=[False, True],
)
def test_transforms_with_respect_to_inputs_are_right_and_harm_no_step(
    name: str, annotated: tuple[str, bool | None], is_warm: bool
) -> None:
    # Of torch itself, on the first use of forward-mode differentiation.
    warnings.filterwarnings("ignore", message="`torch.jit.script", category=DeprecationWarning)
    rank = dist.get_rank()
    model, plain = (seeded(MLP, 0) for _ in range(2))
    annotate(model, annotated[0], reshard=annotated[1])
    if is_warm:
        model(X).sum().backward()
    ours, theirs = TRANSFORMS[name](model), TRANSFORMS[name](plain)
    for one, other in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        torch.testing.assert_close(one, other)
    model.zero_grad()
    loss_of(model(random_input(rank, 4, DIM))).backward()
    for one in range(2):
        (loss_of(plain(random_input(one, 4, DIM))) / 2).backward()
    compare(model, plain)


def annotated_in_inference_mode(call: Callable[[nn.Module], object]) -> list[str]:
    model = seeded(MLP, 0)
    plain = dict(model.named_parameters())
    with torch.inference_mode():
        messages = told(lambda: call(model))
        assert all(param is plain[name] for name, param in model.named_parameters())
        with torch.inference_mode(mode=False):
            call(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        loss_of(model(random_input(step, 4, DIM))).backward()
        optimizer.step()
    return messages


@pytest.mark.parametrize(
    "call",
    [fully_shard, partial(fully_shard, sync_module_states=True), replicate],
    ids=["fully_shard", "with the values of the first rank", "replicate"],
)
def test_an_annotation_in_inference_mode_is_an_error_and_changes_nothing(call: Callable[[nn.Module], object]) -> None:
    for rank, message in enumerate(run_threads(annotated_in_inference_mode, 2, call)[0]):
        assert "is called in inference mode" in message
        assert f"at:  rank {rank}" in message and "fix: annotate outside of torch.inference_mode()" in message


class Parts(nn.Module):
    """Runs operations that hooks run too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.randn(DIM))
        self.register_buffer("shift", torch.randn(DIM))
        self.shift: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.inner(x).mul(self.scale).view(-1).split(x.numel() // 2)
        parts = torch.cat([second.clone(), first.tanh()]).view(x.shape)
        return parts + self.shift * parts.detach().sum()


class _SeesOperations(TorchDispatchMode):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(op))
        return op(*args, **(kwargs or {}))


class _SeesCalls(TorchFunctionMode):
    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(call).partition(" at ")[0])
        return call(*args, **(kwargs or {}))


@contextmanager
def default_dtype(_: object) -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device(_: object) -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def anomaly_mode(_: object) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
        torch.autograd.set_detect_anomaly(True)
        try:
            yield
            dist.barrier()  # It is of the process.
        finally:
            torch.autograd.set_detect_anomaly(False)


@contextmanager
def flop_counter(seen: list[Any]) -> Iterator[None]:
    with FlopCounterMode(display=False) as counter:
        yield
    seen.append(counter.get_total_flops())


def saved_tensors(seen: list[Any]) -> Any:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(str(tensor.shape))
        return tensor.clone()

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


def profiler(_: object) -> Any:
    return nullcontext() if dist.get_rank() else torch.profiler.profile(acc_events=True)


# What a user can have on; each gets a list, to which it adds what it sees.
AROUND: dict[str, Callable[[list[Any]], Any]] = {
    "dispatch mode": _SeesOperations,
    "function mode": _SeesCalls,
    "flop counter": flop_counter,
    "saved tensors": saved_tensors,
    "autocast": lambda _: torch.autocast("cpu", torch.bfloat16),
    "default dtype": default_dtype,
    "device": lambda _: torch.device("meta"),
    "default device": default_device,
    "anomaly mode": anomaly_mode,
    "profiler": profiler,
}
HOW = ["fully_shard", "fully_shard in bf16", "replicate", "replicate in bf16"]


def pair_of(how: str) -> tuple[nn.Module, nn.Module]:
    """Return an annotated model, and a plain one that does the same without casts."""
    model, plain = (seeded(lambda: nn.Sequential(Parts(), nn.Linear(DIM, DIM), Parts()), 0) for _ in range(2))
    is_low = how.endswith("bf16")
    low = torch.bfloat16 if is_low else None
    policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low and torch.float32, buffer_dtype=low)
    if how.startswith("fully_shard"):
        fully_shard(model, policy={Parts}, mp_policy=policy, reshard_after_forward=True)
    elif is_low:
        replicate(model, mp_policy=policy)
    else:
        replicate(model)
    return model, plain.to(low or torch.float32)


def dtype_of(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def run_around(name: str, how: str) -> None:
    model, plain = pair_of(how)
    for number in range(2):
        found: list[Any] = []
        for one in (model, plain):
            seen: list[Any] = []
            x = random_input(number, 4, DIM).requires_grad_()
            own = x.to(dtype_of(plain)) if one is plain else x
            with AROUND[name](seen):
                output = one(own)
                loss_of(output).backward()
            found.append((output, x.grad, seen))
        (output, x_grad, seen), expected = found
        grads = {key: full(param.grad).float() for key, param in plain.named_parameters()}
        torch.testing.assert_close([output, x_grad], [*expected[:2]])
        if (name, how) == ("dispatch mode", "replicate in bf16"):
            # The casts of gradients from the low copy of each parameter are nodes of the graph, as those of inputs are.
            more = Counter(seen) - Counter(expected[2])
            assert more == {"aten._to_copy.default": len(grads), "aten.view.default": len(grads)}
        else:
            assert seen == expected[2]
        with AROUND[name]([]):
            norm, values = clip_grad_norm_(model.parameters(), math.inf), full_state_dict(model)
        torch.testing.assert_close(full(norm), nn.utils.get_total_norm(grads.values()))
        for key, param in model.named_parameters():
            torch.testing.assert_close(full(param.grad), grads[key], msg=key)
            torch.testing.assert_close(values.get(key, full(param)), full(param))
        for one in (model, plain):
            one.zero_grad()


@on_ranks(2, name=AROUND, how=HOW)
def test_a_step_within_what_users_have_on_is_as_the_plain_model_and_shows_no_more(name: str, how: str) -> None:
    run_around(name, how)


# What a selective checkpoint saves: each operation of a step, hooks included.
SAVED = ["every", "split", "mul", "view", "add", "sum", "cat", "clone", "addmm", "tanh", "_to_copy", "detach"]


def saves(name: str, _: object, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_saved = name in ("every", op._schema.name.removeprefix("aten::"))
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE


@on_ranks(2, name=SAVED, how=HOW)
def test_a_selective_checkpoint_saves_what_the_module_has_made(name: str, how: str) -> None:
    model, plain = pair_of(how)
    contexts = partial(create_selective_checkpoint_contexts, partial(saves, name))
    for number in range(2):
        x = random_input(number, 4, DIM)
        loss_of(checkpoint(model, x, use_reentrant=False, context_fn=contexts)).backward()
        loss_of(plain(x.to(dtype_of(plain)))).backward()
        for key, param in plain.named_parameters():
            torch.testing.assert_close(full(model.get_parameter(key).grad), full(param.grad).float(), msg=key)
        for one in (model, plain):
            one.zero_grad()


@on_ranks(2)
def test_a_mode_that_asks_for_it_sees_hooks() -> None:
    model, _ = pair_of("fully_shard")
    counts = []
    for kind in (_SeesOperations, type("", (_SeesOperations,), {"sees_hooks": True})):
        with kind([]) as mode:
            loss_of(model(random_input(0, 4, DIM))).backward()
        counts.append(len(mode.seen))
    assert counts[0] < counts[1]

"""Mixed precision of ``replicate``: what modules hold and when, and parameters that stay.

What both annotations do alike: ``test_mixed_precision.py``.
"""

import copy
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.func import functional_call
from torch.nn.parallel.distributed import _MixedPrecision
from torch.utils.checkpoint import checkpoint as run_with_checkpoint

from composable import (
    ConfigError,
    DesyncError,
    MixedPrecisionPolicy,
    UsageError,
    fully_shard,
    load_checkpoint,
    no_sync,
    register_comm_hook,
    replicate,
    save_checkpoint,
    unannotate,
)
from tests.counting import CountingTransport
from tests.live_bytes import LiveBytes
from tests.low_precision import BF16, DIM, FP16, FP32, Spy, batch_of, make_net
from tests.models import seeded
from tests.world import on_ranks, run_ranks, run_threads, told
from tools.interrupts import interrupted_at, record, sample


def train(policy: Any, *, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = make_net(dtype)
    params = list(model.parameters())
    replicate(model, mp_policy=policy, find_unused_parameters=True)
    optimizer = torch.optim.SGD((param for param in model.parameters() if param.requires_grad), lr=0.05)
    model(batch_of(0, dist.get_rank(), 0, dtype)).float().square().mean().backward()
    for held, param in zip(model.parameters(), params, strict=True):
        assert held is param
        assert param.dtype is dtype and (param.grad is None or param.grad.dtype is dtype)
    optimizer.step()
    return {fqn: param.detach().clone() for fqn, param in model.named_parameters()}


# What modules hold, and when


def is_itself(model: nn.Module, before: dict[str, torch.Tensor]) -> bool:
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return now.keys() == before.keys() and all(now[fqn] is tensor for fqn, tensor in before.items())


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@on_ranks(2)
def test_modules_hold_copies_while_they_run_and_their_own_before_and_after() -> None:
    model = nn.Sequential(Spy(), Spy())
    model[1].weight.requires_grad_(False)
    before = tensors_of(model)
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16, buffer_dtype=FP16, output_dtype=torch.float64))
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            out = model(torch.ones(2, DIM))
        assert out.dtype is torch.float64
        assert model[0].seen.pop() == model[1].seen.pop() == (BF16, BF16, BF16, FP16)
        assert is_itself(model, before)
    x = torch.ones(2, DIM, requires_grad=True)
    y = x * 1
    seen: list[torch.dtype] = []
    y.register_hook(lambda grad: seen.append(model[0].weight.dtype))
    model(y).sum().backward()
    assert seen == [BF16], "copies are held until backward ends"
    assert is_itself(model, before)
    assert model[0].holds_params
    assert model[0].calls.item() == 4  # what was written into the cast buffer
    assert x.grad is not None and x.grad.dtype is FP32
    assert model[0].weight.grad.dtype is FP32 and model[1].weight.grad is None


@on_ranks(1, error=[KeyboardInterrupt, ValueError])
def test_what_is_cut_short_leaves_the_module_with_its_own(error: type[BaseException]) -> None:
    model = nn.Sequential(Spy())
    before = tensors_of(model)
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16, buffer_dtype=BF16), broadcast_buffers=False)
    for _ in range(2):
        model[0].error = error()
        try:
            model(torch.ones(2, DIM))
        except error:
            # Where a script saves what it has, with the frames of the forward still alive.
            assert is_itself(model, before)
            assert {value.dtype for value in model.state_dict().values()} == {FP32}
        else:
            pytest.fail("nothing was raised")
        model[0].error = None
        model(torch.ones(2, DIM)).float().sum().backward()
        assert is_itself(model, before)
    out = model(torch.ones(2, DIM, requires_grad=True))
    out.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        out.sum().backward()
    assert is_itself(model, before)


class Mixed(nn.Module):
    """Reads parameters of its own, of parts that it calls and of one that it does not, and runs a part again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.again, self.read = (nn.Linear(DIM, DIM) for _ in range(3))
        self.lstm = nn.LSTM(DIM, DIM)
        self.scale = nn.Parameter(torch.ones(DIM))
        self.register_buffer("table", torch.linspace(0, 1, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = run_with_checkpoint(self.again, self.up(x), use_reentrant=False)
        x, _ = self.lstm(nn.functional.linear(x, self.read.weight) * self.table)
        return x * self.scale


@on_ranks(1)
def test_ctrl_c_anywhere_in_a_step_leaves_modules_with_their_own() -> None:
    model = seeded(Mixed, 0)
    before = tensors_of(model)
    flat = list(model.lstm._flat_weights)
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16, buffer_dtype=BF16), find_unused_parameters=True)

    def step() -> None:
        model(torch.ones(2, DIM)).float().sum().backward()

    def grads_of_step() -> list[torch.Tensor]:
        model.zero_grad()
        step()
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]

    expected = grads_of_step()
    points = sample(list(record(step)), 150, 0)
    wrong = []
    for point in points:
        caught = interrupted_at(point, step, KeyboardInterrupt)
        # As in the user's `except`: the frames of the step are alive.
        is_held = all(one is own for one, own in zip(model.lstm._flat_weights, flat, strict=True))
        if not is_itself(model, before) or not is_held:
            wrong.append(f"{point}: copies are held")
            caught = None
        grads = grads_of_step()
        if not all(map(torch.equal, grads, expected)) or len(grads) != len(expected):
            wrong.append(f"{point}: gradients differ")
        del caught
    assert len(points) == 150 and not wrong


def fail(grad: torch.Tensor) -> None:
    raise ValueError("in backward")


def resident_bytes(policy: MixedPrecisionPolicy | None) -> tuple[int, int]:
    """Return what lives after each of two steps, while the loss of the last one is held."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    replicate(model, mp_policy=policy)
    counts = []
    with LiveBytes() as live:
        for _ in range(2):
            loss = model(torch.ones(1, 64)).float().sum()
            loss.backward()
            model.zero_grad()
            counts.append(live.now)
    return counts[0], counts[1]


def test_between_steps_there_is_nothing_but_parameters_and_buckets() -> None:
    (_, plain), (_, low), (_, mixed) = (
        run_threads(resident_bytes, 1, policy)[0]
        for policy in (None, MixedPrecisionPolicy(BF16), MixedPrecisionPolicy(BF16, FP32))
    )
    gradients = 4 * (64 * 64 + 64) * 4
    assert gradients <= mixed <= plain + 1024
    assert low <= plain - gradients // 2 + 1024


# Modules that read parameters in their own way


class Reads(nn.Module):
    """Reads weights of a module that is never called, keeps lists of weights, and has a head that is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(DIM, DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.recurrent = nn.GRU(DIM, DIM, batch_first=True)
        self.never_called = nn.Linear(DIM, DIM)
        self.weights = nn.ParameterList([torch.ones(DIM)])
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.normed(self.recurrent(x)[0]) * self.weights[0]
        x = nn.functional.linear(x, self.never_called.weight, self.never_called.bias)
        return x @ self.tokens.weight.T


@on_ranks(1)
def test_parameters_are_low_however_a_module_reads_them() -> None:
    low, model = seeded(Reads, 0).to(BF16), seeded(Reads, 0)
    low(torch.arange(DIM).view(2, -1)).float().square().sum().backward()
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16, FP32))
    for _ in range(2):
        model.zero_grad()
        model(torch.arange(DIM).view(2, -1)).float().square().sum().backward()
    for param, other in zip(model.parameters(), low.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad.float(), rtol=2e-2, atol=2e-2)
    assert all(any(weight is param for param in model.parameters()) for weight in model.recurrent._flat_weights)


@on_ranks(1)
def test_what_a_forward_writes_to_a_copy_is_an_error() -> None:
    model = nn.Sequential(nn.Embedding(3, DIM, max_norm=0.1))
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    (text,) = told(lambda: model(torch.arange(3)))
    assert "a forward wrote to a parameter of which it held a copy in bfloat16" in text
    # So are ranks told that wait for this one.
    standing = replicate.state(model).tell(in_backward=False).tree.text
    assert standing.startswith("has left forward 1 of Sequential: UsageError: a forward wrote")


@on_ranks(1)
def test_gradients_arrive_while_backward_goes_on() -> None:
    """Of each layer, last first, note which of them have their gradients when that of its output arrives."""
    layers = [nn.Linear(DIM, DIM) for _ in range(4)]
    weights = [layer.weight for layer in reversed(layers)]
    model = nn.Sequential(*layers)
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    seen: list[list[bool]] = []

    def look(grad: torch.Tensor) -> None:
        seen.append([weight.grad is not None for weight in weights])

    for layer in layers:
        layer.register_forward_hook(lambda module, args, out: out.register_hook(look) and None)
    # In the second one copies are made before anything is computed.
    for _ in range(2):
        model.zero_grad()
        model(torch.ones(2, DIM)).float().sum().backward()
    assert seen == 2 * [[False] * 4, [True] + [False] * 3, [True] * 2 + [False] * 2, [True] * 3 + [False]]


@on_ranks(1)
def test_parameters_that_a_functional_call_lends_are_cast_too() -> None:
    model = nn.Linear(DIM, 1, bias=False)
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    other = torch.full((1, DIM), 2.0, requires_grad=True)
    out = functional_call(model, {"weight": other}, torch.ones(1, DIM))
    assert (out.dtype, out.item()) == (BF16, 2 * DIM)
    (grad,) = torch.autograd.grad(out, other)
    assert grad.dtype is FP32
    slopes = torch.func.grad(lambda weight: functional_call(model, {"weight": weight}, torch.ones(1, DIM)).sum())(other)
    torch.testing.assert_close(slopes, torch.ones(1, DIM))


@on_ranks(2, steps_first=[False, True])
def test_the_backward_of_a_functional_call_leaves_the_module_with_its_own(steps_first: bool) -> None:
    model = nn.Sequential(nn.Linear(DIM, 1))
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    own = list(model.parameters())
    x = torch.ones(1, DIM)
    if steps_first:
        model(x).sum().backward()
    other = {name: 2 * param.detach() for name, param in model.named_parameters()}
    torch.func.grad(lambda params: functional_call(model, params, (x,)).sum())(other)
    holds_own = all(one is param for one, param in zip(model.parameters(), own, strict=True))
    model.zero_grad()
    model(x).sum().backward()
    assert [holds_own, all(param.grad is not None for param in own)] == [True, True]


class Assigns(nn.Module):
    """Gives a layer another weight while it runs, and takes its bias away."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.first(x))
        self.layer.weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
        del self.layer.bias
        return x


@on_ranks(1)
def test_what_a_forward_assigns_stays_after_backward() -> None:
    model = Assigns()
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    model(torch.ones(1, 2)).sum().backward()
    assert torch.equal(model.layer.weight, torch.ones(2, 2))
    assert not hasattr(model.layer, "bias")


class Met(nn.Parameter):
    """Two threads that cast it at the same time meet."""

    met: ClassVar[threading.Barrier]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            with suppress(threading.BrokenBarrierError):
                cls.met.wait(0.1)
        return super().__torch_function__(func, types, args, kwargs or {})


class InThreads(nn.Module):
    """Two threads read its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.weight = Met(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        threads = [threading.Thread(target=lambda: found.append(self.inner.weight)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return (x * found[0] * found[1]).sum()


# In a process: ranks as threads run their own threads in turns.
@on_ranks(1, run=run_ranks)
def test_threads_of_one_forward_read_one_copy() -> None:
    Met.met = threading.Barrier(2)
    model = InThreads()
    own = model.inner.weight
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    model(torch.ones(2)).backward()
    assert model.inner.weight is own
    torch.testing.assert_close(own.grad, torch.full((2,), 2.0))


@on_ranks(1)
def test_hooks_on_parameters_and_autograd_grad_see_the_parameters() -> None:
    model = nn.Linear(DIM, 1, bias=False)
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    seen: list[torch.dtype] = []
    model.weight.register_hook(lambda grad: seen.append(grad.dtype))
    model.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.dtype))
    loss = model(torch.ones(1, DIM)).sum()
    (own,) = torch.autograd.grad(loss, model.weight, retain_graph=True)
    loss.backward()
    assert own.dtype is FP32 and seen == [FP32] * 3


# Options


@on_ranks(2)
def test_ignored_modules_are_left_in_their_dtype() -> None:
    model = nn.Sequential(Spy(), Spy())
    replicate(model, ignored_modules=[model[1]], mp_policy=MixedPrecisionPolicy(BF16))
    model(torch.ones(2, DIM))
    assert [spy.seen[0][1] for spy in model] == [BF16, FP32]


@on_ranks(1)
def test_a_parameter_of_an_annotation_inside_is_cast_where_it_is_used_outside() -> None:
    model = nn.Sequential(Spy(), Spy())
    model[1].weight = model[0].weight
    replicate(model[0], mp_policy=MixedPrecisionPolicy(FP16))
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    model(torch.ones(2, DIM)).sum().backward()
    assert model[0].weight.grad.dtype is FP32
    assert [spy.seen[0][1] for spy in model] == [FP16, BF16]


class Either(nn.Module):
    """Two layers, of which a rank may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, 1, bias=False), nn.Linear(DIM, 1, bias=False)

    def forward(self, x: torch.Tensor, uses_second: bool) -> torch.Tensor:
        return self.first(x) + self.second(x) if uses_second else self.first(x)


@on_ranks(2)
def test_a_rank_without_a_gradient_gets_the_average_in_the_dtype_of_the_parameter() -> None:
    model = Either()
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16), find_unused_parameters=True)
    model(torch.ones(1, DIM), dist.get_rank() == 0).sum().backward()
    torch.testing.assert_close(model.second.weight.grad, torch.full((1, DIM), 0.5))


@on_ranks(2)
def test_both_annotations_have_policies_of_their_own() -> None:
    model = nn.Sequential(Spy(), nn.Linear(DIM, 1))
    replicate(model[0], mp_policy=MixedPrecisionPolicy(BF16, output_dtype=FP16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(FP16, FP32))
    model(torch.ones(2, DIM)).sum().backward()
    assert [model[0].seen[0][:2], model[0].weight.grad.dtype] == [(BF16, BF16), FP32]


@on_ranks(2)
def test_gradients_may_stay_in_low_precision() -> None:
    model = nn.Linear(DIM, 2)
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16, keep_low_precision_grads=True))
    for rounds in (1, 2):
        with no_sync(model):
            model(torch.ones(1, DIM)).sum().backward()
        model(torch.ones(1, DIM)).sum().backward()
        assert model.weight.grad.dtype is BF16
        assert model.weight.grad.unique().tolist() == [2 * rounds]
    copied = copy.deepcopy(model)
    assert copied.weight.grad.dtype is BF16
    copied(torch.ones(1, DIM)).sum().backward()
    assert copied.weight.grad.unique().tolist() == [5]
    unannotate(model)
    assert model.weight.grad.dtype is FP32
    model(torch.ones(1, DIM)).sum().backward()
    assert model.weight.grad.unique().tolist() == [5]


@on_ranks(2, hook=[None, default_hooks.fp16_compress_hook])
def test_communication_hooks_get_the_bucket_in_low_precision(hook: Callable[..., Any] | None) -> None:
    model = nn.Linear(DIM, 1, bias=False)
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    seen: list[torch.dtype] = []

    def spying(state: Any, bucket: Any) -> Any:
        seen.append(bucket.buffer().dtype)
        return (hook or default_hooks.allreduce_hook)(state, bucket)

    register_comm_hook(model, None, spying)
    model(torch.full((1, DIM), 1.0 + dist.get_rank())).sum().backward()
    assert model.weight.grad.dtype is FP32
    assert (seen, model.weight.grad[0, 0].item()) == ([BF16], 1.5)


# What travels


@pytest.mark.parametrize(
    ("policy", "width"),
    [
        (None, 4),
        (MixedPrecisionPolicy(BF16), 2),
        (MixedPrecisionPolicy(BF16, FP32), 4),
        (MixedPrecisionPolicy(None, FP16), 2),
    ],
    ids=str,
)
@on_ranks(2)
def test_gradients_travel_in_the_dtype_of_the_reduction(policy: MixedPrecisionPolicy | None, width: int) -> None:
    """Return the bytes of the all-reduces of a step, and of the buckets without what follows the gradients."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    replicate(model, mp_policy=policy)
    reducer = replicate.state(model).reducer
    exchange = reducer.exchange
    exchange.transport = counting = CountingTransport(exchange.transport)
    for _ in range(2):
        counting.records.clear()
        model(torch.ones(1, 64)).float().sum().backward()
    sent = [record.bytes for record in counting.records if record.op == "all_reduce"]
    sent, buckets = sent, [bucket.flat.nbytes - bucket.tail.nbytes for bucket in reducer.buckets]
    assert buckets == [2 * 64 * 64 * width]
    assert [count - (2 + 2 * 2) * width for count in sent] == buckets


# Life


def save_and_load(folder: Any, policy: MixedPrecisionPolicy) -> dict[str, torch.Tensor]:
    model = make_net()
    replicate(model, mp_policy=policy, find_unused_parameters=True)
    model(batch_of(0, dist.get_rank(), 0)).float().square().mean().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1e-4)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    save_checkpoint(folder, 1, model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    load_checkpoint(folder, model)
    torch.testing.assert_close(dict(model.state_dict()), values, rtol=0, atol=0)
    plain = make_net()
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())
    low = copy.deepcopy(plain).to(BF16)
    torch.testing.assert_close(model(batch_of(0, 0, 0)), low(batch_of(0, 0, 0, BF16)), rtol=0, atol=0)
    return values


def test_checkpoints_and_state_dicts_are_in_full_precision(tmp_path: Any) -> None:
    for values in run_threads(save_and_load, 2, tmp_path / "run", MixedPrecisionPolicy(BF16)):
        assert {value.dtype for value in values.values()} == {FP32}


@on_ranks(1)
def test_every_forward_computes_with_the_parameters_as_they_are() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    found = []
    for _ in range(3):
        found.append(model(torch.ones(1, 1)).item())
        model.weight.data.mul_(2)  # counted by no version
    assert found == [1, 2, 4]


@on_ranks(1, run=run_ranks)
def test_a_model_that_is_compiled_as_a_whole_computes_with_the_copies() -> None:
    warnings.simplefilter("ignore")  # dynamo looks for gradients of what is no leaf
    torch._dynamo.reset()
    models = [make_net() for _ in range(2)]
    for model in models:
        model.unused.requires_grad_(False)
        replicate(model, mp_policy=MixedPrecisionPolicy(BF16, FP32))
    compiled = torch.compile(models[1], backend="aot_eager")
    graphs = []
    for _ in range(3):
        for model, run in zip(models, (models[0], compiled), strict=True):
            model.zero_grad()
            run(batch_of(0, 0, 0)).float().square().mean().backward()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert 0 < graphs[1] == graphs[2], "nothing is compiled again"
    for param, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=2e-2, atol=1e-3)


@on_ranks(2, run=run_ranks)
def test_compiled_autograd_is_refused() -> None:
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    model = nn.Sequential(Spy())
    before = tensors_of(model)
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    loss = model(torch.ones(2, DIM)).sum()
    with (
        torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(UsageError, match="compiled autograd runs this backward"),
    ):
        loss.backward()
    assert is_itself(model, before)


# A policy that asks for nothing, and what is refused


@on_ranks(1)
def test_a_policy_of_the_dtypes_that_are_there_lends_nothing() -> None:
    spy, held = Spy(), []
    weight = spy.weight
    replicate(spy, mp_policy=MixedPrecisionPolicy(FP32, FP32, FP32, buffer_dtype=FP32))
    spy.register_forward_pre_hook(lambda module, args: held.append(module.weight is weight))
    spy(torch.ones(2, DIM)).sum().backward()
    (bucket,) = replicate.state(spy).reducer.buckets
    assert held == [True] and bucket.flat.dtype is FP32 and spy.weight.grad is bucket.views[0]


def bad_answer(param: nn.Parameter) -> torch.dtype | None:
    return torch.int32


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (BF16, "mp_policy is torch.bfloat16"),
        ({"param_dtype": BF16}, "mp_policy is"),
        (MixedPrecisionPolicy(BF16, param_dtype_override_fn=bad_answer), "returned torch.int32"),
    ],
    ids=["dtype", "dict", "answer"],
)
@on_ranks(2)
def test_what_is_no_policy_is_refused_on_every_rank_and_changes_nothing(policy: Any, text: str) -> None:
    model = make_net()
    given = policy if dist.get_rank() == 1 else None
    with pytest.raises(ConfigError) as caught:
        replicate(model, mp_policy=given)
    assert replicate.state(model) is None
    assert not any(module._forward_pre_hooks for module in model.modules())
    model(batch_of(0, 0, 0)).sum().backward()
    found = str(caught.value)
    assert text in found


def answer_by_rank(param: nn.Parameter) -> torch.dtype | None:
    return BF16 if dist.get_rank() else None


@pytest.mark.parametrize(
    "policies",
    [
        (MixedPrecisionPolicy(BF16), None),
        (MixedPrecisionPolicy(BF16), MixedPrecisionPolicy(BF16, output_dtype=FP32)),
        (MixedPrecisionPolicy(BF16), MixedPrecisionPolicy(BF16, skipped_module_classes=(nn.LayerNorm,))),
        (MixedPrecisionPolicy(param_dtype_override_fn=answer_by_rank),) * 2,
    ],
    ids=["one", "output", "skipped", "answers"],
)
@on_ranks(2)
def test_ranks_with_different_policies_are_told_at_the_annotation(policies: Any) -> None:
    model = make_net()
    with pytest.raises(DesyncError, match="call replicate on different modules or with different options"):
        replicate(model, mp_policy=policies[dist.get_rank()])
    assert replicate.state(model) is None


def test_torchs_policies_are_taken() -> None:
    theirs = run_threads(train, 1, _MixedPrecision(param_dtype=BF16, reduce_dtype=FP32), dtype=FP32)
    torch.testing.assert_close(theirs, run_threads(train, 1, MixedPrecisionPolicy(BF16, FP32), dtype=FP32))


@pytest.mark.parametrize(
    ("first", "has_run", "copies"), [(BF16, False, True), (BF16, True, False), (FP32, True, True), (BF16, True, True)]
)
@on_ranks(2)
def test_a_model_in_the_policys_dtype_may_be_converted_later(first: torch.dtype, has_run: bool, copies: bool) -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM)), 0).to(first)
    plain = copy.deepcopy(model).to(FP32)
    replicate(model, mp_policy=MixedPrecisionPolicy(BF16))
    if has_run:
        model(torch.ones(2, DIM)).sum().backward()
    model.to(FP32)
    if copies:
        model = copy.deepcopy(model)
    model.zero_grad()
    model(batch_of(1, dist.get_rank(), 0, FP32)).float().square().mean().backward()
    low = {name: param.to(BF16) for name, param in plain.named_parameters()}
    for rank in range(2):
        output = functional_call(plain, low, (batch_of(1, rank, 0, FP32).to(BF16),))
        (output.float().square().mean() / 2).backward(retain_graph=True)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.dtype is FP32
        torch.testing.assert_close(param.grad, other.grad, rtol=2e-2, atol=1e-3)

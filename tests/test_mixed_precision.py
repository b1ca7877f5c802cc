"""Dtypes of computation and reduction: numbers of one process that makes the same casts, and no work beside them."""

import copy
import dataclasses
import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from composable import (
    HandleOptions,
    MixedPrecisionPolicy,
    UsageError,
    accelerate_optimizer,
    fully_shard,
    no_sync,
    plan,
    register_fsdp_forward_method,
    replicate,
    unannotate,
    unshard_params,
)
from tests.counting import CountingTransport, root_of
from tests.low_precision import BF16, DIM, FP16, FP32, Block, Spy, batch_of, make_net, train_in_one_process, whole
from tests.models import seeded
from tests.world import on_ranks, run_ranks, run_threads, told

POLICIES = [
    MixedPrecisionPolicy(),
    MixedPrecisionPolicy(BF16),
    MixedPrecisionPolicy(BF16, FP32),
    MixedPrecisionPolicy(FP16, FP32),
    MixedPrecisionPolicy(FP16),
    MixedPrecisionPolicy(None, BF16),
    MixedPrecisionPolicy(FP32, FP32),
]


BOTH = pytest.mark.parametrize("api", ["fully_shard", "replicate"])


def annotate(model: Any, api: str, policy: MixedPrecisionPolicy) -> None:
    if api == "replicate":
        replicate(model, mp_policy=policy, find_unused_parameters=True)
    else:
        has_blocks = any(isinstance(module, Block) for module in model.modules())
        fully_shard(model, policy={Block} if has_blocks else None, mp_policy=policy)


@BOTH
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(FP32), MixedPrecisionPolicy(None, FP32)], ids=str)
@on_ranks(2)
def test_a_model_in_low_precision_is_computed_and_reduced_in_full(policy: MixedPrecisionPolicy, api: str) -> None:
    expected = train_in_one_process(policy, 2, steps=1, micros=2, dtype=BF16, make=torch.optim.SGD)
    model = make_net(BF16)
    annotate(model, api, policy)
    optimizer = torch.optim.SGD((param for param in model.parameters() if param.requires_grad), lr=0.05)
    with no_sync(model):
        model(batch_of(0, dist.get_rank(), 0, BF16)).float().square().mean().backward()
    model(batch_of(0, dist.get_rank(), 1, BF16)).float().square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(whole(model), expected, rtol=1e-2, atol=1e-3)


@on_ranks(2, run=run_ranks, transport=["shared_memory", "process_group"])
def test_a_sum_that_fp16_cannot_hold_does_not_overflow_where_the_mean_fits(transport: str) -> None:
    model = nn.Linear(2, 2, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(FP16), options=HandleOptions(transport=transport))
    model(torch.full((1, 2), 40_000.0)).sum().backward()
    assert model.weight.grad is not None
    found = model.weight.grad.full_tensor().flatten().tolist()
    assert found == [40_000.0] * 4


class Touched(TorchDispatchMode):
    """Counts, by operation, the elements that operations read or write."""

    sees_hooks = True

    def __init__(self, least: int) -> None:
        super().__init__()
        self.numel: Counter[str] = Counter()
        self._least = least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
        numel = sum(one.numel() for one in flat if isinstance(one, torch.Tensor))
        if numel >= self._least and func.overloadpacket.__name__ not in VIEWS:
            self.numel[func.overloadpacket.__name__] += numel
        return func(*args, **(kwargs or {}))


VIEWS = frozenset(("view", "slice", "split", "split_with_sizes", "detach", "alias", "empty", "new_empty", "resize_"))


def passes_over_parameters(policy: MixedPrecisionPolicy) -> int:
    """Return the elements that a step of communication and casts touches, without those of computing."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    fully_shard(model, policy={nn.Linear}, mp_policy=policy)
    # No computation but one product: what is counted are passes over parameters and gradients.
    for _ in range(2):
        with Touched(64 * 64 // 2) as touched:
            model(torch.ones(1, 64)).sum().backward()
    kept = ("copy_", "_to_copy", "_foreach_copy_", "clone", "add_", "mul_", "mul", "zero_", "fill_")
    return sum(numel for name, numel in touched.numel.items() if name in kept)


def test_no_pass_over_parameters_or_whole_gradients_is_added() -> None:
    plain, full, low = (
        run_threads(passes_over_parameters, 2, policy)[0]
        for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(None, BF16), MixedPrecisionPolicy(BF16, FP32))
    )
    # The shard, a half on each of two ranks, is cast before each of two gathers; else it travels as it is.
    assert low - plain == 2 * (64 * 64 + 64)
    # What was reduced, a half on each of two ranks, is cast twice, and scaled by a factor of another dtype.
    assert full - plain <= 3 * (64 * 64 + 64)


def ops_of_a_step(policy: MixedPrecisionPolicy) -> tuple[dict[str, int], list[float]]:
    model = make_net()
    fully_shard(model, policy={Block}, mp_policy=policy)
    model(batch_of(0, 0, 0))
    with Touched(0) as touched:
        loss = model(batch_of(0, dist.get_rank(), 0)).square().mean()
        loss.backward()
    state = whole(model)
    return dict(touched.numel), [loss.item(), *(value.sum().item() for value in state.values())]


def test_a_policy_of_the_dtypes_that_are_there_does_nothing() -> None:
    asked = MixedPrecisionPolicy(FP32, FP32, FP32, buffer_dtype=FP32)
    assert run_threads(ops_of_a_step, 2, asked) == run_threads(ops_of_a_step, 2, MixedPrecisionPolicy())


# Inputs and outputs


@dataclasses.dataclass
class Pair:
    """An output of a class that torch does not know."""

    value: torch.Tensor
    index: torch.Tensor


class Containers(nn.Module):
    """Tells the dtypes that it is called with, in whatever containers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        # The caller's containers hold their own tensors again after the call.
        kwargs = {name: copy.copy(one) for name, one in kwargs.items()}
        self.seen = {"x": x.dtype, "rest": tree_map(lambda one: one, rest), "weight": self.weight.dtype, **kwargs}
        return {"out": [x * self.weight, Pair(x * self.weight, torch.arange(3))]}


@on_ranks(2)
def test_inputs_and_outputs_are_cast_wherever_they_are_and_autograd_knows() -> None:
    spy = Containers()
    fully_shard(spy, mp_policy=MixedPrecisionPolicy(BF16, output_dtype=FP32))
    x = torch.ones(2, DIM, requires_grad=True)
    ids = torch.arange(3)
    output = spy(x, ids, {"deep": [x]}, flag=True, other=Pair(x, ids))
    seen = spy.seen
    assert (seen["x"], seen["weight"], seen["flag"]) == (BF16, BF16, True)
    assert seen["rest"][0] is ids
    assert seen["rest"][1]["deep"][0].dtype is BF16
    assert (seen["other"].value.dtype, seen["other"].index.dtype) == (BF16, torch.int64)
    assert "ToCopy" in type(seen["rest"][1]["deep"][0].grad_fn).__name__
    first, pair = output["out"]
    assert (first.dtype, pair.value.dtype, pair.index.dtype) == (FP32, FP32, torch.int64)
    (first.sum() + pair.value.sum()).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, DIM), 2.0))


@BOTH
@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        (None, MixedPrecisionPolicy(BF16), [(BF16, BF16), (BF16, BF16)]),
        (MixedPrecisionPolicy(FP32), MixedPrecisionPolicy(BF16), [(BF16, BF16), (FP32, FP32)]),
        (MixedPrecisionPolicy(BF16), MixedPrecisionPolicy(), [(FP32, FP32), (BF16, BF16)]),
        (
            MixedPrecisionPolicy(BF16, cast_forward_inputs=False),
            MixedPrecisionPolicy(FP16, cast_forward_inputs=False, cast_root_forward_inputs=True),
            [(FP16, FP16), (FP16, BF16)],
        ),
        (
            MixedPrecisionPolicy(BF16, cast_root_forward_inputs=False),
            MixedPrecisionPolicy(FP16, cast_root_forward_inputs=False),
            [(FP32, FP16), (BF16, BF16)],
        ),
    ],
)
@on_ranks(1)
def test_each_annotation_casts_its_inputs_and_parameters(
    inner: MixedPrecisionPolicy | None, outer: MixedPrecisionPolicy, expected: list[tuple[torch.dtype, ...]], api: str
) -> None:
    model = nn.Sequential(Spy(), Spy())
    if inner is not None:
        annotate(model[1], api, inner)
    annotate(model, api, outer)
    model(torch.ones(2, DIM))
    assert [spy.seen[0][:2] for spy in model] == expected


class Encoder(nn.Linear):
    def encode(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        return self(x) * scale


@on_ranks(2)
def test_methods_other_than_forward_cast_too() -> None:
    model = Encoder(DIM, DIM)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, output_dtype=FP16))
    register_fsdp_forward_method(model, "encode")
    out = model.encode(torch.ones(2, DIM), scale=torch.ones(1))
    out.float().sum().backward()
    assert out.dtype is FP16 and model.weight.grad is not None and model.weight.grad.dtype is FP32


# Buffers


class Buffered(nn.Module):
    """Counts its calls in a float buffer, and looks at the dtypes that it computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("table", torch.linspace(0, 1, DIM))
        self.register_buffer("ids", torch.arange(DIM))
        self.alias = nn.Module()
        self.alias.register_buffer("table", self.table)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen = [self.calls.dtype, self.table.dtype, self.ids.dtype, self.alias.table is self.table]
        return x * self.weight * self.table


@on_ranks(2)
def test_buffers_are_cast_while_their_module_runs_and_keep_what_it_wrote() -> None:
    model = nn.Sequential(Buffered(), Buffered(), nn.BatchNorm1d(DIM))
    policy = MixedPrecisionPolicy(BF16, buffer_dtype=BF16, skipped_module_classes=(nn.BatchNorm1d,))
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    before = dict(model.named_buffers())
    for _ in range(2):
        out = model(torch.ones(4, DIM, requires_grad=True))
        assert out.dtype is BF16
        out.float().sum().backward()
    for part in (model[0], model[1]):
        assert part.seen == [BF16, BF16, torch.int64, True]
        assert part.calls.item() == 2
    after = dict(model.named_buffers())
    assert all(after[name] is buffer for name, buffer in before.items())
    state = whole(model)
    assert state["0.table"].dtype is FP32
    assert torch.equal(state["1.table"], torch.linspace(0, 1, DIM))
    assert model[2].running_mean.dtype is FP32
    assert model[2].num_batches_tracked.item() == 2
    out = model(torch.ones(4, DIM, requires_grad=True))
    out.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        out.float().sum().backward()
    assert all(buffer is before[name] for name, buffer in model.named_buffers())


class Table(nn.Module):
    """Has a buffer of a name that others have too."""

    def __init__(self, inner: "Table | None" = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.register_buffer("table", torch.linspace(0, 1, DIM))
        self.inner = inner
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.table.dtype)
        x = x * self.weight * self.table
        return x if self.inner is None else self.inner(x)


@on_ranks(2)
def test_buffers_of_equal_names_have_the_dtype_of_their_own_module() -> None:
    model = Table(Table(Table()))
    asked = {model.inner: BF16, model: FP16}
    for module, dtype in asked.items():
        fully_shard(module, mp_policy=MixedPrecisionPolicy(buffer_dtype=dtype))
    for _ in range(2):
        model(torch.ones(2, DIM)).sum().backward()
    assert [model.seen, model.inner.seen, model.inner.inner.seen] == [[FP16] * 2, [BF16] * 2, [BF16] * 2]
    names = ["table", "inner.table", "inner.inner.table"]
    assert [name for name, buffer in model.named_buffers() if buffer.dtype is FP32] == names
    state = model.state_dict()
    assert all(torch.equal(state[name], torch.linspace(0, 1, DIM)) for name in names)


class Counting(nn.Module):
    """Counts its calls in a buffer that the module inside it counts in too, and notes what it reads there."""

    def __init__(self, inner: "Counting | None" = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.register_buffer("calls", torch.zeros(()) if inner is None else inner.calls)
        self.inner = inner
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        for step in (lambda y: y, self.inner):
            x = x if step is None else step(x)
            self.calls += 1
            self.seen.append(self.calls.item())
        return x


@on_ranks(2, inner_dtype=[BF16, FP16])
def test_modules_that_share_a_buffer_see_what_the_others_write(inner_dtype: torch.dtype) -> None:
    model = Counting(Counting())
    calls = model.calls
    fully_shard(model.inner, mp_policy=MixedPrecisionPolicy(buffer_dtype=inner_dtype))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(buffer_dtype=BF16))
    for _ in range(2):
        model(torch.ones(2, DIM)).sum().backward()
    assert calls is model.calls is model.inner.calls and calls.item() == 8
    with torch.no_grad():
        calls.zero_()
    model(torch.ones(2, DIM)).sum().backward()
    assert (model.seen, model.inner.seen) == ([1, 4, 5, 8, 1, 4], [2, 3, 6, 7, 2, 3])


def fail(grad: torch.Tensor) -> None:
    raise ValueError("in backward")


# Classes and parameters that are left out


@BOTH
@on_ranks(2)
def test_skipped_classes_compute_in_their_own_dtype_and_give_back_what_they_got(api: str) -> None:
    model: Any = nn.Sequential(nn.Linear(DIM, DIM), nn.Sequential(nn.BatchNorm1d(DIM)), nn.Linear(DIM, DIM))
    annotate(model, api, MixedPrecisionPolicy(BF16, buffer_dtype=BF16, skipped_module_classes=(nn.BatchNorm1d,)))
    seen: list[Any] = []
    norm = model[1][0]
    norm.register_forward_hook(
        lambda module, args, out: seen.extend([args[0].dtype, module.weight.dtype, module.running_mean.dtype])
    )
    model[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    for one in (model, copy.deepcopy(model)):
        out = one(torch.randn(4, DIM))
        out.float().sum().backward()
        assert out.dtype is BF16
    assert norm.num_batches_tracked.item() == 1
    assert seen[:4] == [FP32, FP32, FP32, BF16]
    unannotate(model)
    assert model(torch.randn(4, DIM)).dtype is FP32


@on_ranks(2)
def test_a_function_chooses_the_dtype_of_each_parameter() -> None:
    model = make_net()
    policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=lambda param: FP32 if param.ndim < 2 else None)
    fully_shard(model, mp_policy=policy)
    with model.unshard() or torch.no_grad():
        found = {fqn: param.dtype for fqn, param in model.named_parameters()}
    (handle,) = fully_shard.state(model).plan.handles
    reduced = {span.fqn: buffer.reduce_dtype for buffer in handle.buffers for span in buffer.layout.spans}
    for fqn, dtype in (("blocks.0.norm.weight", FP32), ("blocks.0.up.weight", BF16)):
        assert found[fqn] is reduced[fqn] is dtype


def by_rank(param: nn.Parameter, dtype: torch.dtype | None = FP32) -> torch.dtype | None:
    return dtype if dtype is None or dist.get_rank() else None


@on_ranks(2)
def test_a_function_that_answers_differently_on_two_ranks_is_an_error_on_both() -> None:
    model, same = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=by_rank))
    for text in told(lambda: model(torch.ones(1, DIM))):
        assert text.startswith("DesyncError: the ranks annotated different plans")
        assert "float32 as bfloat16" in text
    # One without a name is the same on all.
    override = functools.partial(by_rank, dtype=None)
    fully_shard(same, mp_policy=MixedPrecisionPolicy(param_dtype_override_fn=override))
    same(torch.ones(1, DIM)).sum().backward()
    assert "param_dtype_override_fn=partial" in str(fully_shard.state(same).plan)


# Gradients that wait


@on_ranks(2)
def test_gradients_that_wait_are_added_up_in_the_dtype_of_the_reduction() -> None:
    sums = []
    for policy in (MixedPrecisionPolicy(BF16, FP32), MixedPrecisionPolicy(BF16)):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        fully_shard(model, mp_policy=policy)
        for micro in range(300):
            model.set_requires_gradient_sync(micro == 299)
            model(torch.ones(1, 1)).sum().backward()
        sums.append(model.weight.grad.full_tensor().item())
    # In bfloat16 256 + 1 is 256.
    assert sums[0] == 300 > sums[1]


@on_ranks(3)
def test_gradients_may_stay_in_low_precision() -> None:
    models = [make_net() for _ in range(2)]
    for model in models:
        fully_shard(model, policy={Block}, mp_policy=MixedPrecisionPolicy(BF16, keep_low_precision_grads=True))
    model = models[0]
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
    accelerate_optimizer(optimizers[1], models[1])
    for step in range(2):
        for one, optimizer in zip(models, optimizers, strict=True):
            one(batch_of(step, dist.get_rank(), 0)).float().square().mean().backward()
            with no_sync(one):
                one(batch_of(step, dist.get_rank(), 1)).float().square().mean().backward()
            one(batch_of(step, dist.get_rank(), 2)).float().square().mean().backward()
            trained = [param for fqn, param in one.named_parameters() if param.requires_grad and fqn != "unused"]
            assert {param.grad.dtype for param in trained if param.grad is not None} == {BF16}
            assert {param.dtype for param in trained} == {FP32}
            assert copy.deepcopy(one).last.weight.grad.dtype is BF16
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(whole(models[1]), whole(model), rtol=0, atol=0)
    model(batch_of(0, 0, 0)).float().square().mean().backward()
    unannotate(model)
    assert model.last.weight.grad.dtype is FP32
    model(batch_of(0, 0, 0)).float().square().mean().backward()


def scale(api: str, overflows: bool) -> tuple[float, float]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    seeded(lambda: [nn.init.normal_(param) for param in model.parameters()] and model, 0)
    annotate(model, api, MixedPrecisionPolicy(FP16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = whole(model)["1.weight"].norm().item()
    # Only on the last rank, whose pieces of most parameters are empty where they are sharded.
    factor = 1e6 if overflows and dist.get_rank() == dist.get_world_size() - 1 else 1.0
    scaler.scale(model(torch.ones(1, 2)).float().sum() * factor).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), whole(model)["1.weight"].norm().item() - before


@BOTH
def test_a_scaler_of_fp16_skips_on_all_ranks_or_on_none(api: str) -> None:
    assert run_threads(scale, 4, api, True) == [(512.0, 0.0)] * 4
    assert all(size == 1024.0 and change != 0.0 for size, change in run_threads(scale, 4, api, False))


# Life of a model


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        with torch.no_grad():
            module.weight.fill_(0.5)
            if module.bias is not None:
                module.bias.zero_()


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(FP32), MixedPrecisionPolicy(BF16)], ids=str)
@on_ranks(2)
def test_meta_device_with_mixed_precision(policy: MixedPrecisionPolicy) -> None:
    """A nested model that begins on meta takes its values by ``apply``."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(DIM, DIM)))
    fully_shard(model[1], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")
    model.apply(init_weights)
    out = model(torch.ones(1, DIM))
    out.float().sum().backward()
    assert out.float().sum().item() == 8 * 16.0


@on_ranks(2)
def test_unshard_params_shows_full_precision_and_writes_it_back() -> None:
    model, plain = make_net(), make_net()
    fully_shard(model, policy={Block}, mp_policy=MixedPrecisionPolicy(BF16, buffer_dtype=BF16))
    model(batch_of(0, 0, 0)).float().sum().backward()
    x = batch_of(0, 0, 0)
    with unshard_params(model):
        for (fqn, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(param, expected), fqn
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
            model.last.weight += 2**-12  # lost in bfloat16
        with pytest.raises(UsageError, match="full precision"):
            model(x)
    state = whole(model)
    assert torch.equal(state["last.weight"], plain.last.weight + 2**-12)
    assert model(x).dtype is BF16
    with unshard_params(model, rank0_only=True, offload_to_cpu=True):
        pass
    assert torch.equal(whole(model)["last.weight"], plain.last.weight + 2**-12)
    # Nor does a root cast anything that has no parameters of its own.
    parts = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(2)))
    expected = parts(x)
    for part in (*parts, parts):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(BF16, output_dtype=BF16))
    with unshard_params(parts), torch.no_grad():
        assert torch.equal(parts(x), expected)


@pytest.mark.parametrize("policy", POLICIES[1:4], ids=str)
@on_ranks(2)
def test_bytes_are_those_of_the_plan(policy: MixedPrecisionPolicy) -> None:
    model = make_net()
    fully_shard(model, policy={Block}, mp_policy=policy)
    model(batch_of(0, 0, 0)).float().sum().backward()
    counted = CountingTransport.install(root_of(model))
    model(batch_of(0, 0, 0)).float().sum().backward()
    counted.check(model)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@on_ranks(1)
def test_a_handle_knows_every_dtype_whatever_the_policy_leaves_out(policy: MixedPrecisionPolicy) -> None:
    model = make_net()
    fully_shard(model, policy={Block}, mp_policy=policy)
    flats = [flat for handle in fully_shard.state(model)._handles for flat in handle.buffers]
    asked = policy.param_dtype or FP32
    assert {flat.dtype for flat in flats} == {FP32}
    assert {flat.compute_dtype for flat in flats} == {asked}
    # A reduction that nothing was said of follows the computation.
    assert {flat.plan.reduce_dtype for flat in flats} == {policy.reduce_dtype or asked}


def test_the_plan_tells_the_dtypes() -> None:
    text = str(plan(make_net(), world_size=2, policy={Block}, mp_policy=MixedPrecisionPolicy(BF16)))
    assert "float32 as bfloat16 reduced in bfloat16" in text
    assert "precision: param_dtype=bfloat16" in text
    plain = str(plan(make_net(), world_size=2, policy={Block}, mp_policy=MixedPrecisionPolicy(FP32)))
    assert " as " not in plain.replace("left as they are", "")


# torch's own policies, and FSDP2 as a second opinion


def test_policies_of_torch_are_taken() -> None:
    asked = [
        TorchPolicy(BF16, FP32, FP16, cast_forward_inputs=False),
        MixedPrecision(BF16, FP32, buffer_dtype=FP16, keep_low_precision_grads=True),
    ]
    found = [plan(make_net(), world_size=2, mp_policy=one).mp_policy for one in asked]
    assert found[0] == MixedPrecisionPolicy(BF16, FP32, FP16, cast_forward_inputs=False)
    assert found[1] == MixedPrecisionPolicy(
        BF16,
        FP32,
        cast_forward_inputs=False,
        cast_root_forward_inputs=True,
        buffer_dtype=FP16,
        keep_low_precision_grads=True,
        skipped_module_classes=(nn.modules.batchnorm._BatchNorm,),
    )


def train_engine(is_ours: bool) -> list[float]:
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    model = make_net()
    model.unused.requires_grad_(False)
    for block in model.blocks:  # FSDP2 takes no scalars
        block.scale = nn.Parameter(torch.ones(1))
    policy = (MixedPrecisionPolicy if is_ours else TorchPolicy)(BF16, FP32)
    shard: Any = fully_shard if is_ours else torch_fully_shard
    for block in model.blocks:
        shard(block, mp_policy=policy)
    shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        loss = model(batch_of(step, dist.get_rank(), 0)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2, run=run_ranks)
def test_mixed_precision_e2e_full_shard() -> None:
    """Losses are those of torch's own ``fully_shard`` under the same policy."""
    assert train_engine(True) == pytest.approx(train_engine(False), rel=1e-6)

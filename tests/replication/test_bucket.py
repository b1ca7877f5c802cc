"""Buckets and their reducer, without ranks: a transport that remembers what it was asked for."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from composable.comm import Grid, Pending, Ranks, Transport
from composable.errors import UsageError
from composable.ground.torch_hooks import after_gradients
from composable.replication import Reducer, ReplicateArguments
from composable.replication.buckets import Bucket, plan_buckets
from composable.replication.managed import ReducedParam
from tests.models import MLP, random_input, seeded


class Recorded:
    """A collective of a ``RecordingTransport``; its result appears when it is waited for."""

    def __init__(self, tensor: torch.Tensor, factor: float) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._factor = factor

    def finish(self) -> None:
        if self._tensor is not None:
            self._tensor.mul_(self._factor)
            self._tensor = None

    def is_over(self) -> bool:
        return True


class RecordingTransport(Transport):
    """Acts as if every rank had this rank's tensors.

    Attributes:
        sent: Elements of each all-reduce, in order.
    """

    name = "recording"

    def __init__(self, world_size: int) -> None:
        self.rank = 0
        self.world_size = world_size
        self.sent: list[int] = []

    def begin_all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, key: int) -> Pending:
        raise NotImplementedError

    def begin_reduce_scatter(
        self, source: torch.Tensor, shard: torch.Tensor, key: int, *, scale: float = 1.0
    ) -> Pending:
        raise NotImplementedError

    def begin_all_reduce(self, tensor: torch.Tensor, key: int, *, scale: float = 1.0) -> Pending:
        self.sent.append(tensor.numel())
        return Recorded(tensor, self.world_size * scale)

    def begin_broadcast(self, tensor: torch.Tensor, source_rank: int, key: int) -> Pending:
        return Recorded(tensor, 1)


def attach(model: nn.Module, world_size: int = 2, **options: object) -> tuple[Reducer, RecordingTransport]:
    transport = RecordingTransport(world_size)
    params = [ReducedParam(fqn, param) for fqn, param in model.named_parameters()]
    choices = ReplicateArguments(**options)  # type: ignore[arg-type]  # each test names options of the right types
    grid = Grid.whole(Ranks(None, torch.device("cpu"), 0, world_size, tuple(range(world_size))))
    reducer = Reducer(params, transport, grid, choices)
    after_gradients([item.param for item in params], reducer.arrivals())
    return reducer, transport


def backward(model: nn.Module, seed: int = 0) -> None:
    model(random_input(seed, 4, 8)).square().mean().backward()


def gradients_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad.clone() for param in model.parameters() if param.grad is not None]


# -- plan_buckets


def plan(
    sizes: Sequence[int], cap: int, *, first: int | None = None, keys: str | None = None, order: Sequence[int] = ()
) -> list[list[int]]:
    return plan_buckets(
        order or range(len(sizes)),
        keys or "a" * len(sizes),
        sizes,
        first_cap_bytes=cap if first is None else first,
        cap_bytes=cap,
    )


@pytest.mark.parametrize(
    ("sizes", "cap", "options", "expected"),
    [
        pytest.param([4, 4, 4, 4, 4], 10, {}, [[0, 1], [2, 3], [4]], id="closed before it exceeds its capacity"),
        pytest.param([4, 40, 4, 4], 10, {}, [[0], [1], [2, 3]], id="a parameter above it has one of its own"),
        pytest.param([4, 4, 4, 4, 4], 12, {"first": 4}, [[0], [1, 2, 3], [4]], id="the first is small"),
        pytest.param([4, 4, 4], 4, {"first": 100}, [[0], [1], [2]], id="the first is never larger than the others"),
        pytest.param([1, 1, 1, 1], 10, {"keys": "abab"}, [[0, 2], [1, 3]], id="one dtype and device in each"),
        # The bucket of a is begun first and complete last.
        pytest.param([1, 1, 1], 10, {"keys": "aba"}, [[1], [0, 2]], id="ordered by their last gradient"),
        pytest.param([4, 4, 4], 8, {"order": [2, 0, 1]}, [[2, 0], [1]], id="in the order of arrival"),
    ],
)
def test_parameters_are_grouped(sizes: list[int], cap: int, options: dict[str, Any], expected: list[list[int]]) -> None:
    assert plan(sizes, cap, **options) == expected


# -- Bucket


def make_bucket(*params: torch.Tensor, tail_numel: int = 0) -> Bucket:
    members = [(index, nn.Parameter(param)) for index, param in enumerate(params)]
    return Bucket(
        0, members, tail_numel=tail_numel, is_last=True, key=0, like=torch.empty(0, dtype=params[0].dtype.to_real())
    )


def test_a_bucket_has_the_methods_of_torchs_grad_bucket() -> None:
    theirs = {name for name in dir(torch.distributed.GradBucket) if not name.startswith("_")}
    assert theirs <= set(dir(Bucket))


@pytest.mark.parametrize(
    "param",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 4).t(),
        torch.randn(8, 4)[::2],
        torch.randn(4, 1).expand(4, 3),
        torch.randn(2, 3, dtype=torch.complex64),
        torch.randn(2, 3, dtype=torch.complex128).t(),
    ],
    ids=["channels last", "transposed", "with gaps", "expanded", "complex", "complex transposed"],
)
def test_a_gradient_of_any_layout_survives_a_bucket(param: torch.Tensor) -> None:
    bucket = make_bucket(torch.zeros(3, dtype=param.dtype), param)
    _, stored = bucket.parameters()
    grad = torch.randn(param.shape, dtype=param.dtype)
    stored.grad = grad.clone()
    bucket.pack(0.5, grads_as_views=True)
    assert stored.grad is bucket.views[1]
    torch.testing.assert_close(stored.grad, grad / 2, rtol=0, atol=0)


@pytest.mark.parametrize("numel", [10, 2**17], ids=["small", "large"])
def test_a_gradient_is_scaled_once_whether_it_is_new_or_lies_in_the_bucket(numel: int) -> None:
    bucket = make_bucket(*(torch.zeros(numel) for _ in range(3)))
    first, second, third = bucket.parameters()
    first.grad = torch.full((numel,), 8.0)
    bucket.pack(0.5, grads_as_views=True)
    second.grad = torch.full((numel,), 6.0)
    third.grad = None
    bucket.views[2].fill_(5)
    bucket.pack(0.5, grads_as_views=True)
    assert [view.unique().tolist() for view in bucket.views] == [[2], [3], [0]]
    assert third.grad is None


def test_a_sparse_gradient_is_an_error() -> None:
    bucket = make_bucket(torch.zeros(4, 2))
    bucket.parameters()[0].grad = torch.zeros(4, 2).to_sparse()
    with pytest.raises(UsageError, match="a gradient is sparse"):
        bucket.pack(0.5, grads_as_views=True)


def test_the_gradients_of_a_bucket_are_views_of_the_buffer_that_a_hook_set() -> None:
    params = [torch.zeros(2, 3), torch.zeros(4)]
    bucket = make_bucket(*params)
    bucket.clear()
    other = bucket.buffer().to(torch.float16)
    bucket.set_buffer(other)
    for number, (grad, param) in enumerate(zip(bucket.gradients(), params, strict=True)):
        assert grad.shape == param.shape and grad.dtype == torch.float16
        grad.fill_(number + 1)
    bucket.take_result(bucket.buffer())
    assert bucket.buffer().dtype == torch.float32  # what a hook sets lasts for one round
    assert [view.unique().tolist() for view in bucket.views] == [[1], [2]]
    assert all(grad is view for grad, view in zip(bucket.gradients(), bucket.views, strict=True))
    part = torch.cat([torch.zeros(8), bucket.buffer()])[8:]  # not at the start of its memory
    bucket.set_buffer(part)
    assert [grad.unique().tolist() for grad in bucket.gradients()] == [[1], [2]]


# -- Reducer


def test_the_first_round_has_one_bucket_and_the_next_ones_follow_the_order_of_arrival() -> None:
    model = seeded(MLP, 0)
    reducer, transport = attach(model, bucket_cap_mb=2**-20)
    arrived: list[str] = []
    sent_at: list[int] = []
    for fqn, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, fqn=fqn: arrived.append(fqn))
        param.register_post_accumulate_grad_hook(lambda _: sent_at.append(len(transport.sent)))
    backward(model)
    assert len(transport.sent) == len(reducer.buckets) == 1
    # Every gradient once, a flag per parameter, and two numbers per rank.
    assert transport.sent == [sum(param.numel() for param in model.parameters()) + len(arrived) + 2 * 2]
    first_round = arrived.copy()
    backward(model)  # Once it waits for hooks that were set later; from then on they run first.
    transport.sent.clear()
    sent_at.clear()
    backward(model)
    assert [reducer.params[bucket.param_indices[0]].fqn for bucket in reducer.buckets] == first_round
    # Each is sent as soon as it is full and the hooks of users, which were set later, have run.
    assert sent_at == list(range(len(sent_at)))


def test_a_full_bucket_waits_for_the_one_before_it() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(40))
            self.second = nn.Parameter(torch.ones(80))

        def forward(self, *, swap: bool) -> torch.Tensor:
            outer, inner = (self.second, self.first) if swap else (self.first, self.second)
            return (inner.sum().sin() * outer).sum()

    model = Pair()
    _, transport = attach(model, bucket_cap_mb=2**-20)
    model(swap=False).backward()
    arrived: list[str] = []
    for fqn, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, fqn=fqn: arrived.append(fqn))
    for swap in (False, True):
        transport.sent.clear()
        model(swap=swap).backward()
        # The last bucket carries the flags.
        assert transport.sent == [40, 80 + 2 + 2 * 2]
    assert arrived == ["first", "second", "second", "first"]


def test_a_gradient_held_by_the_user_keeps_its_value_when_gradients_are_no_views() -> None:
    model = seeded(MLP, 0)
    attach(model, gradient_as_bucket_view=False)
    backward(model, 0)
    held = [param.grad for param in model.parameters() if param.grad is not None]
    values = gradients_of(model)
    model.zero_grad()
    backward(model, 1)
    torch.testing.assert_close(held, values, rtol=0, atol=0)


def test_gradients_preset_by_the_user_take_part_and_their_graph_is_no_obstacle() -> None:
    model, plain = seeded(MLP, 0), seeded(MLP, 0)
    attach(model)
    for one in (model, plain):
        for param in one.parameters():
            param.grad = torch.ones_like(param)
        x = random_input(0, 4, 8).requires_grad_()
        (slope,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
        (one(x).square().mean() + slope.square().sum()).backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(plain))


def test_a_second_gradient_after_the_first_was_sent_is_an_error() -> None:
    layer = nn.Linear(2, 2, bias=False)
    reducer, _ = attach(layer)

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            for _ in range(2):
                with torch.enable_grad():
                    layer(torch.ones(1, 2)).sum().backward()
            return grad

    # The outer backward opens the round, so that both inner ones belong to it.
    start = torch.ones(1, 2, requires_grad=True)
    out = Twice.apply(start)
    out.register_hook(lambda _: reducer.arm(0))
    with pytest.raises(UsageError, match="a second gradient in one backward"):
        out.sum().backward()

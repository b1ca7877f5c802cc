"""Other ranks for a replicated module, what its reducer has seen, and experts that only some ranks use."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from composable import (
    ConfigError,
    DesyncError,
    ReplicateOptions,
    UsageError,
    fully_shard,
    no_sync,
    reduce_gradients,
    reduction_stats,
    replicate,
    step_in_backward,
    update_process_group,
)
from composable.annotation import check_replicated
from tests.logs import kept_logs
from tests.models import DIM, make_model, random_input, seeded
from tests.parity import gradients_of
from tests.programs import loss_at
from tests.world import RankErrors, on_ranks, run_ranks, run_threads

TINY_CAP_MB = 600 / 2**20


def expected(step: int, ranks: list[int]) -> dict[str, torch.Tensor]:
    model = make_model("mlp")
    for rank in ranks:
        (loss_at(model, step, rank) / len(ranks)).backward()
    return gradients_of(model)


# -- update_process_group


class StoppedHereError(Exception):
    pass


def _stop(grad: torch.Tensor) -> None:
    raise StoppedHereError


def lose_a_rank(way: str) -> None:
    model: Any = make_model("mlp")
    hooked = model.blocks[0].up.weight
    replicate(model, bucket_cap_mb=TINY_CAP_MB, static_graph=way == "static")
    rank = dist.get_rank()
    for step in range(2):
        model.zero_grad()
        loss_at(model, step, rank).backward()
        torch.testing.assert_close(gradients_of(model), expected(step, [0, 1, 2]))
    left = dist.new_group([0, 1])
    if way == "kept":
        with no_sync(model):
            loss_at(model, 7, rank).backward()
    if rank == 2:
        return
    if way == "stopped":
        handle = hooked.register_hook(_stop)
        with pytest.raises(StoppedHereError):
            loss_at(model, 2, rank).backward()
        handle.remove()
    update_process_group(model, left)
    after = reduction_stats(model)
    assert after.world_size == 2 and after.arrival_order is None
    for step in range(3, 6):
        model.zero_grad(set_to_none=step != 4)
        loss_at(model, step, rank).backward()
        torch.testing.assert_close(gradients_of(model), expected(step, [0, 1]))


@pytest.mark.parametrize("way", ["static", "stopped", "kept"])
def test_the_ranks_that_are_left_go_on_in_another_group(way: str) -> None:
    run_threads(lose_a_rank, 3, way)


@on_ranks(3)
def test_a_rank_that_comes_back_takes_part_again() -> None:
    rank = dist.get_rank()
    groups = dist.new_group([0, 1]), dist.new_group([2])
    model = replicate(make_model("mlp"), process_group=groups[rank == 2])
    loss_at(model, 0, rank).backward()
    update_process_group(model, dist.group.WORLD)
    for step in range(1, 3):
        model.zero_grad()
        loss_at(model, step, rank).backward()
        torch.testing.assert_close(gradients_of(model), expected(step, [0, 1, 2]))


@on_ranks(2)
def test_an_optimizer_steps_in_backward_in_the_new_group_too() -> None:
    model = replicate(make_model("mlp"), bucket_cap_mb=TINY_CAP_MB)
    step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_at(model, 0, dist.get_rank()).backward()
    update_process_group(model, dist.new_group([0, 1]))
    for step in range(2):
        loss_at(model, step, dist.get_rank()).backward()
        assert not any(bucket.flat.numel() for bucket in check_replicated(model, "a test").reducer.buckets)


def test_real_processes_change_their_group_too() -> None:
    run_ranks(lose_a_rank, 3, "stopped")


@on_ranks(2)
def test_buffers_are_broadcast_in_the_new_group() -> None:
    model = replicate(nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM, momentum=0.0)))
    update_process_group(model, dist.new_group([0, 1]))
    nn.init.constant_(model[1].running_mean, 5.0 + dist.get_rank())
    loss_at(model, 0, 0).backward()
    assert model[1].running_mean[0].item() == 5.0


@on_ranks(1, run=run_ranks)
def test_a_compiled_model_is_not_compiled_again_for_another_group() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model: Any = make_model("mlp")
    model.inp.compile(backend=backend)
    replicate(model)
    loss_at(model, 0, 0).backward()
    count = len(graphs)
    update_process_group(model, dist.new_group([0]))
    loss_at(model, 1, 0).backward()
    assert len(graphs) - count == 0


def differ_in(what: str) -> None:
    is_other = dist.get_rank() == 1
    options: dict[str, Any] = {"find_unused_parameters": True} if what == "options" and is_other else {}
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    layer = nn.Linear(2, 3 if what == "modules" and is_other else 2)
    model: Any = replicate(layer, process_group=own, **options)
    if what == "hook" and is_other:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    update_process_group(model, dist.group.WORLD)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        *(("modules", "parameter 'weight' [2, 2]"), ("options", "find_unused_parameters=True")),
        ("hook", "communication hook: "),
    ],
)
def test_ranks_with_different_modules_options_or_hooks_cannot_join(what: str, text: str) -> None:
    with pytest.raises(RankErrors, match="different modules, options or communication hooks") as caught:
        run_threads(differ_in, 2, what)
    assert [type(error) for error in caught.value.errors.values()] == [DesyncError, DesyncError]
    assert text in str(caught.value)


@on_ranks(1)
def test_what_cannot_be_is_an_error() -> None:
    model = replicate(nn.Linear(2, 2))
    calls: list[tuple[Any, type[Exception], str]] = [
        (
            lambda: update_process_group(model, None),
            ConfigError,
            "process_group is None, not a ProcessGroup that this rank is in",
        ),
        (
            lambda: update_process_group(nn.Linear(2, 2), dist.group.WORLD),
            UsageError,
            "update_process_group found no replicate or fully_shard on this module",
        ),
        (
            lambda: update_process_group(fully_shard(nn.Linear(2, 2)), (dist.group.WORLD,)),
            ConfigError,
            r"process_group is .*, not a ProcessGroup that this rank is in",
        ),
        (lambda: reduction_stats(nn.Linear(2, 2)), UsageError, "reduction_stats found no replicate on this module"),
        (lambda: reduction_stats(model, sample_rate=0), ConfigError, "sample_rate is 0"),
        (lambda: model(torch.ones(1, 2)).sum().backward(), UsageError, "update_process_group inside a backward"),
    ]
    model.weight.register_hook(lambda grad: update_process_group(model, dist.group.WORLD))
    for call, kind, text in calls:
        with pytest.raises(kind, match=text):
            call()


# -- replicas that a library of their own lets leave and come back


class Quorum:
    """Averages buckets over the replicas that are there, as torchft's manager does; annotations do not know them."""

    def __init__(self) -> None:
        self.group: Any = None
        self.sizes: list[int] = []

    def hook(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        self.sizes.append(buffer.numel())
        dist.all_reduce(buffer, group=self.group)
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer.div_(self.group.size()))
        return done


def leave_and_come_back(*, fixed_buckets: bool) -> None:
    rank = dist.get_rank()
    own = [dist.new_group([one]) for one in range(3)][rank]
    pair = dist.new_group([0, 1])
    quorum = Quorum()

    def annotated() -> Any:
        options = ReplicateOptions(fixed_buckets=fixed_buckets)
        model: Any = make_model("mlp")
        replicate(model, process_group=own, bucket_cap_mb=TINY_CAP_MB, options=options)
        model.register_comm_hook(None, quorum.hook)
        return model

    model = annotated()
    before: list[int] = []
    for step in range(4):
        if step == 2 and rank == 2:
            # Its process has ended, and a new one begins: in another place of its life than the others.
            model = annotated()
            continue
        quorum.group, quorum.sizes = pair if step == 2 else dist.group.WORLD, []
        model.zero_grad()
        loss_at(model, step, rank).backward()
        torch.testing.assert_close(gradients_of(model), expected(step, [0, 1] if step == 2 else [0, 1, 2]))
        assert not before or quorum.sizes == before
        before = quorum.sizes
    assert len(before) > 1
    assert reduction_stats(model).arrival_order == tuple(reversed([fqn for fqn, _ in model.named_parameters()]))


def test_a_replica_that_comes_back_has_the_buckets_of_the_others() -> None:
    run_threads(leave_and_come_back, 3, fixed_buckets=True)
    with pytest.raises(RankErrors):
        run_threads(leave_and_come_back, 3, fixed_buckets=False)


@on_ranks(1)
def test_a_static_graph_has_no_fixed_buckets() -> None:
    with pytest.raises(ConfigError, match="both static_graph and fixed_buckets are given"):
        replicate(nn.Linear(2, 2), static_graph=True, options=ReplicateOptions(fixed_buckets=True))


# -- reduction_stats and debug levels


@on_ranks(2)
def test_stats_tell_buckets_order_and_times() -> None:
    model = make_model("conditional")
    replicate(model, find_unused_parameters=True, bucket_cap_mb=TINY_CAP_MB)
    fqns = [fqn for fqn, _ in model.named_parameters()]
    none = reduction_stats(model)
    assert (none.backwards, none.is_rebuilt, none.arrival_order) == (0, False, None)
    assert none.timing is None and none.missing_fqns == ()
    for step in range(3):
        args, kwargs = model.example_inputs(step)
        out = model(*args, **kwargs)
        out.square().mean().backward()
        now = reduction_stats(model)
        assert now.is_rebuilt == (step > 0)
        assert sorted(fqn for bucket in now.bucket_fqns for fqn in bucket) == sorted(fqns)
        unused = {fqn for fqn, param in model.named_parameters() if param.grad is None}
        assert unused <= set(now.missing_fqns)
    assert now.backwards == 3 and len(now.bucket_bytes) == len(now.bucket_fqns) > 1
    assert now.arrival_order is not None and sorted(now.arrival_order) == sorted(fqns)
    assert all(
        size >= sum(model.get_parameter(fqn).nbytes for fqn in fqns)
        for size, fqns in zip(now.bucket_bytes, now.bucket_fqns, strict=True)
    )
    timing = now.timing
    assert timing is not None and timing.compute_ms > 0 and timing.reduce_ms > 0
    assert 0 <= timing.overlap_ms <= min(timing.compute_ms, timing.reduce_ms) + 1e-6
    assert 0 <= timing.overlap_ratio <= 1


def stopped(_: torch.Tensor) -> None:
    raise InterruptedError


@on_ranks(2, is_stopped=[False, True])
def test_times_are_those_of_a_backward_when_kept_gradients_are_averaged_after_it(*, is_stopped: bool) -> None:
    model = replicate(make_model("mlp"))
    loss_at(model, 0, dist.get_rank()).backward()
    before = reduction_stats(model).timing
    with no_sync(model):
        loss_at(model, 1, dist.get_rank()).backward()
        if is_stopped:
            hook = next(model.parameters()).register_hook(stopped)
            with pytest.raises(InterruptedError):
                loss_at(model, 2, dist.get_rank()).backward()
            hook.remove()
    reduce_gradients(model)
    assert before is not None and reduction_stats(model).timing == before


class Apart(nn.ModuleList):
    """Runs each layer on an input of its own dtype."""

    def forward(self) -> torch.Tensor:
        outputs = [layer(torch.ones(2, DIM, dtype=layer.weight.dtype)) for layer in self]  # type: ignore[arg-type]
        return torch.stack([output.float().sum() for output in outputs]).sum()


@pytest.mark.parametrize(
    ("options", "steps_inside"),
    [
        ({}, True),
        ({"static_graph": True}, False),
        ({"bucket_cap_mb": TINY_CAP_MB}, False),
        ({"find_unused_parameters": True, "bucket_cap_mb": TINY_CAP_MB}, True),
    ],
    ids=str,
)
@on_ranks(2)
def test_buckets_are_known_before_the_first_backward(options: dict[str, Any], *, steps_inside: bool) -> None:
    for dtypes in ([torch.float32] * 3, [torch.float32, torch.bfloat16, torch.float64, torch.float32]):
        layers = [nn.Linear(DIM, DIM, dtype=dtype) for dtype in dtypes]
        model = replicate(Apart(layers), **options)
        if steps_inside:
            step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
        before = reduction_stats(model)
        assert before.is_static_graph is options.get("static_graph", False)
        assert before == reduction_stats(model) and before.backwards == 0
        assert sorted(fqn for bucket in before.bucket_fqns for fqn in bucket) == sorted(dict(model.named_parameters()))
        model().backward()
        after = reduction_stats(model)
        assert (before.bucket_bytes, before.bucket_fqns) == (after.bucket_bytes, after.bucket_fqns)
        assert all(one > 0 for one in after.bucket_bytes)


@on_ranks(1)
def test_one_backward_in_so_many_is_measured_after_the_first_ten() -> None:
    model = replicate(make_model("mlp"))
    reduction_stats(model, sample_rate=4)
    last = None
    for step in range(1, 17):
        loss_at(model, step, 0).backward()
        timing = reduction_stats(model).timing
        assert (timing != last) == (step <= 10 or step % 4 == 0)
        last = timing


def log_of_a_level(level: str) -> list[str]:
    before = dist.get_debug_level()
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    try:
        with kept_logs(logging.INFO) as texts:
            model = replicate(nn.Linear(2, 2))
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
    finally:
        dist.set_debug_level(before)
    return [text for text in texts if text.startswith("replicate: ")]


def test_debug_levels_tell_of_buckets_and_of_what_is_sent() -> None:
    first, rebuilt = (
        f"bucket 1, 48 bytes of torch.float32: {names}" for names in ("'weight', 'bias'", "'bias', 'weight'")
    )
    told = [
        "replicate: 1 buckets from backward 1 on, of ranks [0, 1]",
        f"replicate: {first}",
        "replicate: 1 buckets from backward 2 on, of ranks [0, 1]",
        f"replicate: {rebuilt}",
    ]
    assert run_ranks(log_of_a_level, 2, "OFF") == [[]] * 2
    assert run_ranks(log_of_a_level, 2, "INFO") == [told] * 2
    sent = [f"replicate: send {first}", f"replicate: send {rebuilt}"]
    assert run_ranks(log_of_a_level, 2, "DETAIL") == [[*told[:2], sent[0], *told[2:], sent[1], sent[1]]] * 2


# -- experts


class _AllToAll(torch.autograd.Function):
    """Gives each rank its part of every rank's rows; so does its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _AllToAll.apply(grads[0])


class Experts(nn.Module):
    """An expert of this rank between two all-to-alls; below and above it, layers that only some ranks run."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.early = nn.Linear(DIM, DIM)
        self.expert = nn.Linear(DIM, DIM)
        self.late = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, *, extra: bool) -> torch.Tensor:
        x = self.inp(x)
        if extra:
            x = x + self.early(x)
        x = _AllToAll.apply(torch.tanh(self.expert(_AllToAll.apply(x))))
        if extra:
            x = x + self.late(x)
        return self.out(x)


def runs_extra(step: int, rank: int) -> bool:
    return (step + rank) % 2 == 0


def experts_of_one_process(step: int, world_size: int) -> dict[str, torch.Tensor]:
    """Return the gradients of one process: all ranks have the same expert, so the exchange changes nothing."""
    model = seeded(Experts, 0)
    for rank in range(world_size):
        x = model.inp(random_input(100 * step + rank, 2 * world_size, DIM))
        x = x + model.early(x) if runs_extra(step, rank) else x
        x = torch.tanh(model.expert(x))
        x = x + model.late(x) if runs_extra(step, rank) else x
        (model.out(x).square().mean() / world_size).backward()
    return gradients_of(model)


@on_ranks(3, run=run_ranks, delayed=[False, True])
def test_modules_of_some_ranks_beside_an_all_to_all_do_not_hang(*, delayed: bool) -> None:
    model = seeded(Experts, 0)
    options: dict[str, Any] = {}
    if delayed:
        named = [(fqn, param) for fqn, param in model.named_parameters() if fqn.startswith(("late", "out"))]
        rare = ReplicateOptions(delay_all_reduce_named_params=named, param_to_hook_all_reduce=model.inp.weight)
        options = {"options": rare}
    replicate(model, find_unused_parameters=True, bucket_cap_mb=100 / 2**20, **options)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(4):
        model.zero_grad()
        x = random_input(100 * step + rank, 2 * world_size, DIM)
        model(x, extra=runs_extra(step, rank)).square().mean().backward()
        torch.testing.assert_close(gradients_of(model), experts_of_one_process(step, world_size))

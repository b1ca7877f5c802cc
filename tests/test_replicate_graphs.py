"""``static_graph`` and delayed all-reduces of ``replicate``: numbers, beside torch's wrapper, and what is refused."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from composable import ConfigError, ReplicateOptions, UsageError, reduction_stats, register_comm_hook, replicate
from tests.models import BATCH, DIM, random_input, seeded
from tests.parity import gradients_of
from tests.world import on_ranks, run_ranks, run_threads

TINY_CAP_MB = 100 / 2**20


class Looped(nn.Module):
    """A block that runs several times below reentrant checkpoints, and a branch that some steps use."""

    def __init__(self, rounds: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.block = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        self.branch = nn.Linear(DIM, DIM)
        self.last = nn.Linear(DIM, 1)
        self.rounds = rounds
        self.uses_branch = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.rounds):
            x = checkpoint(self.block, x, use_reentrant=True)
        return self.last(self.branch(x) if self.uses_branch else x)


def looped() -> Looped:
    return seeded(Looped, 0)


def loss_at(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(random_input(100 * step + rank, BATCH, DIM)).square().mean()


def expected(step: int, world_size: int) -> dict[str, torch.Tensor]:
    model = looped()
    for rank in range(world_size):
        (loss_at(model, step, rank) / world_size).backward()
    return gradients_of(model)


# -- static_graph


def train_looped(*, as_ddp: bool = False) -> dict[str, torch.Tensor]:
    model = looped()
    whole: Any = DistributedDataParallel(model, static_graph=True) if as_ddp else model
    if not as_ddp:
        replicate(model, static_graph=True, bucket_cap_mb=TINY_CAP_MB)
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        loss_at(whole, step, dist.get_rank()).backward()
        found = gradients_of(model)
        torch.testing.assert_close(found, expected(step, dist.get_world_size()))
    return found


def test_a_static_graph_gives_the_gradients_of_torchs_wrapper() -> None:
    ours, theirs = run_ranks(train_looped, 2), run_ranks(train_looped, 2, as_ddp=True)
    torch.testing.assert_close(ours, theirs)


class _Interrupted(torch.futures.Future[torch.Tensor]):
    """A future whose first wait is cut short."""

    is_first = True

    def wait(self) -> torch.Tensor:
        if self.is_first:
            self.is_first = False
            raise KeyboardInterrupt
        return super().wait()


def averaged(does_interrupt: list[bool], bucket: Any) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    done = _Interrupted() if does_interrupt.pop() else torch.futures.Future[torch.Tensor]()
    done.set_result(bucket.buffer())
    return done


@on_ranks(2)
def test_a_rank_that_is_interrupted_as_it_waits_learns_the_graph_as_the_others() -> None:
    model = looped()
    model.uses_branch = False
    replicate(model, static_graph=True, bucket_cap_mb=TINY_CAP_MB)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    register_comm_hook(model, [False] * 100 + [rank == 1], averaged)
    with pytest.raises(KeyboardInterrupt) if rank == 1 else contextlib.nullcontext():
        loss_at(model, 0, rank).backward()
    for step in range(1, 4):
        model.zero_grad()
        loss_at(model, step, rank).backward()
        assert sorted(reduction_stats(model).missing_fqns) == ["branch.bias", "branch.weight"]
    own = gradients_of(model)
    for fqn, grad in own.items():
        parts = [torch.empty_like(grad) for _ in range(world_size)]
        dist.all_gather(parts, grad.clone())
        assert all(torch.equal(part, grad) for part in parts), fqn


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("fewer", "'branch.weight' (0 gradients, 1 then), 'branch.bias' (0 gradients, 1 then)"),
        ("more", "'branch.weight' (1 gradient, 0 then), 'branch.bias' (1 gradient, 0 then)"),
        ("other", "'block.0.weight' (2 gradients, 3 then), 'block.0.bias' (2 gradients, 3 then)"),
    ],
)
@on_ranks(2)
def test_another_graph_than_the_first_is_an_error_on_every_rank(kind: str, what: str) -> None:
    model, rank = looped(), dist.get_rank()
    model.uses_branch = kind == "fewer"
    replicate(model, static_graph=True)
    loss_at(model, 0, rank).backward()
    loss_at(model, 1, rank).backward()
    model.zero_grad()
    if rank == 1:
        model.uses_branch = kind == "more"
        model.rounds = 2 if kind == "other" else 3
    with pytest.raises(UsageError) as caught:
        loss_at(model, 2, rank).backward()
    names = "" if kind == "other" else ": 'branch.weight', 'branch.bias'"
    assert str(caught.value).splitlines()[:2] == [
        f"this backward is not like the first one, though static_graph=True promises it: {what}"
        if rank
        else f"the backward of rank 1 is not like the first one, though static_graph=True promises it{names}",
        f"  at:  rank {rank}",
    ]
    # The next step is fine again.
    model.uses_branch, model.rounds = kind == "fewer", 3
    model.zero_grad()
    loss_at(model, 3, rank).backward()


@on_ranks(3, bucket_cap_mb=[25, TINY_CAP_MB])
def test_a_gradient_that_only_other_ranks_had_at_first_is_an_error_on_every_rank(bucket_cap_mb: float) -> None:
    model, rank = looped(), dist.get_rank()
    replicate(model, static_graph=True, bucket_cap_mb=bucket_cap_mb)
    for step in range(2):
        model.uses_branch = rank > 0
        loss_at(model, step, rank).backward()
        model.zero_grad()
    model.uses_branch = True
    with pytest.raises(UsageError) as caught:
        loss_at(model, 2, rank).backward()
    what = "is not like the first one, though static_graph=True promises it:"
    assert str(caught.value).splitlines()[0] == (
        f"the backward of rank 0 {what} 'branch.weight', 'branch.bias'"
        if rank
        else f"this backward {what} 'branch.weight' (1 gradient, 0 then), 'branch.bias' (1 gradient, 0 then)"
    )
    model.uses_branch = rank > 0
    model.zero_grad()
    loss_at(model, 3, rank).backward()


def test_a_static_graph_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "composable")
    run_threads(train_looped, 1)
    assert "replicate of module Looped with static_graph=True" in caplog.messages


# -- delayed all-reduces


class Wide(nn.Module):
    """A chain, whose gradients arrive from the end to the start."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def wide() -> Wide:
    return seeded(Wide, 0)


def delay(model: Wide) -> dict[str, Any]:
    """Let the last two gradients, which come first, wait for that of layer 1."""
    named = [(fqn, param) for fqn, param in model.named_parameters() if fqn in ("layers.2.weight", "layers.3.weight")]
    rare = ReplicateOptions(delay_all_reduce_named_params=named, param_to_hook_all_reduce=model.layers[1].weight)
    return {"options": rare}


@on_ranks(1)
def test_delayed_gradients_are_sent_when_that_of_the_chosen_parameter_is_there() -> None:
    model = wide()
    names = {id(param): fqn.split(".")[1] for fqn, param in model.named_parameters()}
    events: list[str] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: events.append(f"gradient {names[id(param)]}"))
    replicate(model, bucket_cap_mb=TINY_CAP_MB, **delay(model))

    def hook(state: None, bucket: Any) -> torch.futures.Future[Any]:
        events.append(f"send {' '.join(names[id(param)] for param in bucket.parameters())}")
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    register_comm_hook(model, None, hook)
    for step in range(3):
        events.clear()
        loss_at(model, step, 0).backward()
    assert events == [
        *("gradient 3", "gradient 2", "gradient 1", "send 1", "send 3", "send 2", "gradient 0", "send 0"),
    ]


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("alone", "one of delay_all_reduce_named_params and param_to_hook_all_reduce is given without the other"),
        ("no list", "delay_all_reduce_named_params is no list of (name, parameter) pairs"),
        ("misnamed", "delay_all_reduce_named_params has the name 'layers.3.weight' for parameter 'layers.2.weight'"),
        ("other", "a delayed all-reduce names 'other', whose gradient replicate does not average here"),
        (
            "ignored",
            "a delayed all-reduce names param_to_hook_all_reduce, whose gradient replicate does not average here",
        ),
    ],
)
@on_ranks(2)
def test_a_delay_that_cannot_be_is_an_error_on_every_rank(case: str, what: str) -> None:
    model = wide()
    params = delay(model)
    rare: ReplicateOptions = params["options"]
    other: Any = {
        "alone": {"param_to_hook_all_reduce": None},
        "no list": {"delay_all_reduce_named_params": 3},
        "misnamed": {"delay_all_reduce_named_params": [("layers.3.weight", model.layers[2].weight)]},
        "other": {"delay_all_reduce_named_params": [("other", nn.Linear(2, 2).weight)]},
    }
    wrong: dict[str, dict[str, Any]] = {name: {"options": replace(rare, **fields)} for name, fields in other.items()}
    wrong["ignored"] = {**params, "ignored_params": [rare.param_to_hook_all_reduce]}
    with pytest.raises(ConfigError) as caught:
        replicate(model, **(wrong[case] if dist.get_rank() == 1 else params))
    assert replicate.state(model) is None
    text = str(caught.value)
    assert text.splitlines()[:2] == [what, "  at:  rank 1"]


@on_ranks(1)
def test_delayed_gradients_beside_sparse_ones_wait_for_the_chosen_parameter() -> None:
    model = nn.Sequential(nn.Embedding(4, DIM, sparse=True), *(nn.Linear(DIM, DIM, bias=False) for _ in range(3)))
    rare = ReplicateOptions(
        delay_all_reduce_named_params=[("3.weight", model[3].weight)], param_to_hook_all_reduce=model[2].weight
    )
    replicate(model, bucket_cap_mb=TINY_CAP_MB, options=rare)
    for _ in range(2):
        model(torch.arange(4)).sum().backward()
    assert reduction_stats(model).bucket_fqns == (("2.weight",), ("3.weight",), ("1.weight",))

"""Gradients whose reductions have not ended: who would use them is told, and what ends them later is right."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    UsageError,
    accelerate_optimizer,
    clip_grad_norm_,
    fully_shard,
    get_total_norm,
    no_sync,
    reduce_gradients,
)
from tests.models import DIM, MLPBlock, make_model, random_input
from tests.parity import full
from tests.world import on_ranks, run_threads


class Trainer:
    """A sharded model with an optimizer of each kind, and what a step may do with gradients."""

    def __init__(self, *, accelerated: bool = False) -> None:
        self.model: Any = fully_shard(make_model("mlp"), policy={MLPBlock})
        self.optimizer = optimizer_of(self.model)
        if accelerated:
            accelerate_optimizer(self.optimizer, self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)

    def backward(self, seed: int, rank: int | None = None) -> torch.Tensor:
        rank = dist.get_rank() if rank is None else rank
        loss = loss_of(self.model, seed, rank)
        loss.backward()
        return loss

    @property
    def grads(self) -> list[torch.Tensor]:
        return [param.grad for param in self.model.parameters() if param.grad is not None]

    def local_values(self) -> list[torch.Tensor]:
        return [tensor._local_tensor.clone() for param in self.model.parameters() for tensor in (param, param.grad)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: nn.Module, seed: int, rank: int) -> torch.Tensor:
    return model(random_input(100 * seed + rank, 4, DIM)).square().mean()


def scaled(trainer: Trainer) -> torch.amp.GradScaler:
    trainer.scaler.scale(torch.ones(()))
    return trainer.scaler


def step_with_closure(trainer: Trainer) -> None:
    trainer.optimizer.step(lambda: trainer.backward(1).item())


USES: dict[str, tuple[Callable[[Trainer], object], str]] = {
    "ours": (lambda t: clip_grad_norm_(t.model.parameters(), 1.0), "clip_grad_norm_"),
    "ours, of the optimizer": (lambda t: clip_grad_norm_(t.optimizer, 1.0), "clip_grad_norm_"),
    "ours, total": (lambda t: get_total_norm(t.grads), "get_total_norm"),
    "torch's": (lambda t: torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0), "foreach_norm"),
    "torch's, one by one": (
        lambda t: torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0, foreach=False),
        "linalg_vector_norm",
    ),
    "torch's, total": (lambda t: torch.nn.utils.get_total_norm(t.grads), "foreach_norm"),
    "torch's, of values": (
        lambda t: torch.nn.utils.clip_grad_value_(t.model.parameters(), 1.0),
        "foreach_clamp_min",
    ),
    "step": (lambda t: t.optimizer.step(), "SGD.step"),
    "step with closure": (step_with_closure, "SGD.step"),
    "unscale": (lambda t: scaled(t).unscale_(t.optimizer), "amp_foreach_non_finite_check_and_unscale"),
    "scaler step": (lambda t: scaled(t).step(t.optimizer), "amp_foreach_non_finite_check_and_unscale"),
    "zeros": (lambda t: t.optimizer.zero_grad(set_to_none=False), "zero"),
}
WAYS: dict[str, Callable[[Trainer], object]] = {
    "not the last": lambda t: t.model.set_is_last_backward(False),
    "by hand": lambda t: t.model.set_manual_backward_finalization(True),
    "asynchronous": lambda t: t.model.set_manual_backward_finalization(True),
}


def refused(use: str, way: str, accelerated: bool) -> str:
    trainer = Trainer(accelerated=accelerated)
    trainer.backward(0)  # A complete one, so that all have a gradient.
    WAYS[way](trainer)
    trainer.backward(1)
    pending = trainer.model.finalize_backward(async_op=True) if way == "asynchronous" else None
    before = trainer.local_values()
    call, _ = USES[use]
    with pytest.raises(UsageError) as caught:
        call(trainer)
    if use != "step with closure":
        assert all(map(torch.equal, trainer.local_values(), before))
    if pending is not None:
        pending.wait()
    elif way == "not the last":
        trainer.model.set_is_last_backward(True)
        trainer.backward(2)
    else:
        trainer.model.finalize_backward()
    USES[use if use != "step with closure" else "step"][0](trainer)
    return str(caught.value)


@pytest.mark.parametrize(
    ("use", "way", "accelerated"),
    [
        *((use, way, False) for use in USES for way in WAYS if way == "not the last" or use in ("ours", "step")),
        ("ours, of the optimizer", "not the last", True),
        ("step", "not the last", True),
    ],
)
def test_what_would_use_gradients_that_are_under_way_is_an_error_that_changes_nothing(
    use: str, way: str, accelerated: bool
) -> None:
    for rank, text in enumerate(run_threads(refused, 2, use, way, accelerated)):
        if accelerated:
            assert "gradients that are not complete" in text
            continue
        assert text == (
            f"{USES[use][1]} with gradients that are not complete: backwards have ended, their reductions have not\n"
            f"  at:  rank {rank}, module MLP\n"
            "  fix: first end the reductions: by a backward after set_is_last_backward(True), or by finalize_backward(), "
            "with wait() on what it returned"
        )


@on_ranks(2)
def test_other_models_step_and_norms_of_parameters_go_on_meanwhile() -> None:
    trainer, other = Trainer(), Trainer()
    trainer.model.set_is_last_backward(False)
    trainer.backward(0)
    other.backward(0)
    clip_grad_norm_(other.optimizer, 1.0)
    other.optimizer.step()
    # Norms of values, and copies of gradients to look at, are not what is incomplete.
    torch.nn.utils.get_total_norm(list(trainer.model.parameters()))
    assert all(grad.detach().isfinite().all() for grad in trainer.grads)
    # Once dropped, they are in nobody's way.
    trainer.model.reset_iter_state()
    trainer.model.set_is_last_backward(True)
    trainer.optimizer.zero_grad()
    trainer.backward(1)
    trainer.optimizer.step()


@on_ranks(2)
def test_an_optimizer_in_backward_steps_when_the_last_one_ends() -> None:
    trainer = Trainer()
    stepped = []
    for param in trainer.model.parameters():
        own = torch.optim.SGD([param], lr=0.1)

        def step(_: object, own: torch.optim.Optimizer = own) -> None:
            own.step()
            stepped.append(own)

        param.register_post_accumulate_grad_hook(step)
    trainer.model.set_is_last_backward(False)
    trainer.backward(0)
    assert not stepped
    trainer.model.set_is_last_backward(True)
    trainer.backward(1)
    assert len(stepped) == len(list(trainer.model.parameters()))


# -- any schedule


def any_schedule(seed: int) -> None:
    """Train by a random schedule, with uses of gradients at any time: they are right, or refused."""
    rng = random.Random(seed)
    world_size, trainer = dist.get_world_size(), Trainer(accelerated=seed % 2 == 0)
    plain = make_model("mlp")
    plain_optimizer = optimizer_of(plain)
    is_pending = False
    for number in range(30):
        what = rng.choice(["last", "deferred", "no sync", "finalize", "reduce", "use", "use", "step", "reset"])
        if what in ("last", "deferred", "no sync"):
            trainer.model.set_is_last_backward(what != "deferred")
            if what == "no sync":
                with no_sync(trainer.model):
                    trainer.backward(number)
                reduce_gradients(trainer.model)
            else:
                trainer.backward(number)
            is_pending = what == "deferred"
            for rank in range(world_size):
                (loss_of(plain, number, rank) / world_size).backward()
        elif what == "finalize":
            trainer.model.finalize_backward()
            is_pending = False
        elif what == "reduce":
            reduce_gradients(trainer.model)
            is_pending = False
        elif what == "reset" and not is_pending:
            trainer.model.reset_iter_state()
        elif what == "use":
            norm = rng.choice([clip_grad_norm_, torch.nn.utils.clip_grad_norm_])
            found = attempt(lambda norm=norm: norm(trainer.model.parameters(), 0.05), is_pending)
            if not is_pending:
                expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
                torch.testing.assert_close(full(found), expected, atol=1e-5, rtol=1e-4)
        elif what == "step":
            attempt(trainer.optimizer.step, is_pending)
            if not is_pending:
                plain_optimizer.step()
                for optimizer in (trainer.optimizer, plain_optimizer):
                    optimizer.zero_grad()
    expected = dict(plain.named_parameters())
    for fqn, param in trainer.model.named_parameters():
        torch.testing.assert_close(full(param), expected[fqn].detach(), atol=1e-5, rtol=1e-4)


def attempt(call: Callable[[], Any], is_refused: bool) -> Any:
    if not is_refused:
        return call()
    with pytest.raises(UsageError, match="not complete"):
        call()
    return None


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_schedule_uses_of_gradients_are_those_of_one_process_or_refused(seed: int) -> None:
    run_threads(any_schedule, 1 + seed % 3, seed)

"""Training steps to be interrupted, in float64: one program for each part of the package."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable import (
    FSDPModule,
    HandleOptions,
    MixedPrecisionPolicy,
    ReplicateOptions,
    fully_shard,
    no_sync,
    register_comm_hook,
    replicate,
)
from tests.models import random_input, seeded

__all__ = ["PROGRAMS", "Program"]


class Block(nn.Module):
    """Two layers; some ranks use ``extra``, none uses ``spare``; ``aux`` leaves by a side channel."""

    def __init__(self, dim: int, *, has_unused: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim)
        if has_unused:
            self.extra, self.spare = (nn.Parameter(torch.randn(dim)) for _ in range(2))

    def forward(self, x: torch.Tensor, *, uses: bool, leaks: bool) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.tanh(self.up(x)))
        y = y + x
        if uses and hasattr(self, "extra"):
            y = y * self.extra
        if leaks:
            self.aux = self.down(y).square().mean()
        return y


class Net(nn.Module):
    """Two blocks between two layers."""

    def __init__(self, dim: int, *, has_unused: bool = False, checkpoints: bool = False, leaks: bool = False) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim, has_unused=has_unused) for _ in range(2))
        self.checkpoints, self.leaks = checkpoints, leaks
        self.register_buffer("factor", torch.ones(1))

    def forward(self, x: torch.Tensor, uses: bool) -> torch.Tensor:
        x = self.inp(x) * self.factor
        for block in self.blocks:
            if self.checkpoints and torch.is_grad_enabled():
                x = checkpoint(block, x, uses=uses, leaks=False, use_reentrant=False)
            else:
                x = block(x, uses=uses, leaks=self.leaks)
        out: torch.Tensor = self.head(x)
        if self.leaks:
            out = out + self.blocks[0].aux + self.blocks[1].aux
        return out


@dataclass(frozen=True)
class Program:
    """What is trained, and how.

    Attributes:
        name: What it shows.
        annotate: Makes a model one of many ranks.
        options: Of the model.
        dim: Of the model.
        world_size: Ranks.
        accumulates: A step has a backward without synchronisation, then one with it.
        defers: The first of two backwards does not end their reductions; the second one does, or the user by hand.
        steps: An optimizer steps inside backward.
        is_first: The step that is interrupted is the first one.
    """

    name: str
    annotate: Callable[[Net], object]
    options: tuple[tuple[str, bool], ...] = ()
    dim: int = 4
    world_size: int = 2
    accumulates: bool = False
    defers: str = ""
    steps: bool = False
    is_first: bool = False

    def make(self) -> Net:
        return seeded(lambda: Net(self.dim, **dict(self.options)), 0).double()

    def forward(self, model: nn.Module, rank: int, seed: int) -> torch.Tensor:
        return model(random_input(1000 * seed + rank, 3, self.dim).double(), rank == 0)

    def step(self, model: nn.Module, rank: int, seed: int, scale: float, *, is_plain: bool = False) -> torch.Tensor:
        """Run the forwards and backwards of one step; returns the last loss."""
        if self.accumulates:
            quiet: AbstractContextManager[None] = nullcontext() if is_plain else no_sync(model)
            with quiet:
                self._backward(model, rank, seed + 500, scale)
        if self.defers:
            return self._deferred(model, rank, seed, scale)
        return self._backward(model, rank, seed, scale)

    def _deferred(self, model: nn.Module, rank: int, seed: int, scale: float) -> torch.Tensor:
        own = model if isinstance(model, FSDPModule) else None
        is_by_hand = self.defers == "by hand"
        if own is not None:
            own.reset_iter_state()
            own.set_manual_backward_finalization(is_by_hand)
            own.set_is_last_backward(False)
        self._backward(model, rank, seed + 500, scale)
        if own is not None:
            own.set_is_last_backward(True)
        loss = self._backward(model, rank, seed, scale)
        if own is not None and is_by_hand:
            own.finalize_backward(async_op=True).wait()
        return loss

    def _backward(self, model: nn.Module, rank: int, seed: int, scale: float) -> torch.Tensor:
        loss = self.forward(model, rank, seed).square().mean()
        (loss * scale).backward()
        return loss.detach()


by_policy = partial(fully_shard, policy={Block})


def with_shared_buffers(model: Net) -> None:
    """Modules share a buffer, and hold it in another dtype while they run."""
    for block in model.blocks:
        block.register_buffer("factor", model.factor)
    fully_shard(model, policy={Block}, mp_policy=MixedPrecisionPolicy(buffer_dtype=torch.float32))


def by_hand(model: Net) -> None:
    """Some are kept between forward and backward; prefetch is by hand."""
    first, second = model.blocks
    fully_shard(first, reshard_after_forward=False)
    fully_shard(second, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    model.set_modules_to_forward_prefetch([first, second])
    second.set_modules_to_backward_prefetch([first])


def to_two_ranks(model: Net) -> None:
    """After forward there are secondary shards; one block is gathered ahead of its backward."""
    fully_shard(model, policy={Block}, reshard_after_forward=2)
    first, second = model.blocks
    second.set_modules_to_backward_prefetch([first])


def hook_on_gradient(grad: torch.Tensor) -> torch.Tensor:
    doubled = grad * 2
    return doubled / 2


def hook_after_gradient(param: torch.Tensor) -> None:
    assert param.grad is not None
    assert not param.grad.requires_grad


def with_hooks(model: Net) -> None:
    by_policy(model)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(hook_after_gradient)
    model.head.weight.register_hook(hook_on_gradient)


in_buckets = partial(replicate, bucket_cap_mb=0.0002)
# One rank uses more parameters than the other, so it steps more buckets before backward ends.
in_uneven_buckets = partial(in_buckets, find_unused_parameters=True)


def in_delayed_buckets(model: Net) -> None:
    delayed = list(model.blocks[1].named_parameters(prefix="blocks.1"))
    first = next(model.blocks[0].parameters())
    options = ReplicateOptions(delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=first)
    in_buckets(model, options=options)


def averaged(state: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    tensor = bucket.buffer().div_(state.size())
    dist.all_reduce(tensor, group=state)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(tensor)
    return done


def by_communication_hook(model: Net) -> None:
    in_buckets(model)
    register_comm_hook(model, dist.new_group(), averaged)


def nested(model: Net) -> None:
    """One block is replicated in a sharded model."""
    replicate(model.blocks[0], find_unused_parameters=True)
    fully_shard(model.blocks[1])
    fully_shard(model)


def nested_otherwise(model: Net) -> None:
    """Sharded blocks in a replicated model."""
    for block in model.blocks:
        fully_shard(block)
    replicate(model, bucket_cap_mb=0.0002)


UNUSED = (("has_unused", True),)

PROGRAMS = [
    Program("policy", by_policy),
    Program("policy, process_group", partial(by_policy, options=HandleOptions(transport="process_group"))),
    Program("prefetch and reshard by hand", by_hand),
    Program("unused parameters as zeros", partial(by_policy, options=HandleOptions(unused_gradients="zero"))),
    Program("no_sync", by_policy, UNUSED, accumulates=True),
    Program("casts of shared buffers", with_shared_buffers, (("checkpoints", True),)),
    Program("deferred, hooks on parameters", with_hooks, UNUSED, defers="to the second"),
    Program("finalized by hand", by_policy, UNUSED, defers="by hand"),
    Program("steps in backward", by_policy, UNUSED, steps=True),
    Program("steps in backward, no_sync", by_policy, UNUSED, steps=True, accumulates=True),
    Program("checkpointing", by_policy, (("checkpoints", True),)),
    Program("side channel", by_policy, (("leaks", True),)),
    Program("first step", by_policy, is_first=True),
    Program("replicate", in_buckets),
    Program("replicate, copies", partial(in_uneven_buckets, gradient_as_bucket_view=False), UNUSED),
    Program("replicate, communication hook", by_communication_hook),
    Program("replicate, first step", in_buckets, is_first=True),
    Program("replicate, steps in backward", in_buckets, steps=True),
    Program("replicate, steps in backward, unused parameters", in_uneven_buckets, UNUSED, steps=True),
    Program("replicate, static graph", partial(in_buckets, static_graph=True), UNUSED),
    Program("replicate, delayed", in_delayed_buckets),
    Program("nested", nested, UNUSED),
    Program("nested otherwise", nested_otherwise),
    Program("nested, no_sync", nested, UNUSED, accumulates=True),
    Program("resharded to two ranks", to_two_ranks, (("checkpoints", True),), world_size=4),
]

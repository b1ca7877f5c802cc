"""What programs do with an annotated model, to be run on the recording device.

Each is a function of a ``Bench``. It ends where its last gather or step ends, with no cleanup that could
order what the code under test should have ordered.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from composable import (
    accelerate_optimizer,
    clip_grad_norm_,
    fully_shard,
    no_sync,
)
from composable.engine import RestingPlace
from tests.models import BLOCK_CLASSES, loss_of, make_model
from tests.parity import LR, inputs_of
from tools.streams.bench import Bench, Case
from tools.streams.between_steps import BETWEEN_STEPS
from tools.streams.branches import Branches

__all__ = ["CASES", "ON_BLOCKS", "SECONDARY"]


# Training


def train(bench: Bench) -> None:
    bench.train(2)


def train_with_an_accelerated_optimizer(bench: Bench) -> None:
    bench.optimizer = torch.optim.AdamW(bench.model.parameters(), lr=LR)
    accelerate_optimizer(bench.optimizer, bench.model)
    for seed in range(2):
        bench.forward(seed).backward()
        clip_grad_norm_(bench.optimizer, 0.1)
        bench.update()


def step_in_backward(bench: Bench) -> None:
    def update(param: torch.Tensor) -> None:
        with torch.no_grad():
            assert param.grad is not None
            param.sub_(param.grad, alpha=LR)
        param.grad = None

    for param in bench.model.parameters():
        param.register_post_accumulate_grad_hook(update)
    for seed in range(3):
        bench.forward(seed).backward()


def accumulate(bench: Bench) -> None:
    for _ in range(2):
        with no_sync(bench.model):
            bench.forward(0).backward()
            bench.forward(1).backward()
        bench.forward(2).backward()
        bench.update()


def train_on_a_stream_of_the_user(bench: Bench) -> None:
    own = bench.recorder.Stream(name="user")
    bench.train(1)
    own.wait_stream(bench.recorder.current_stream())
    with bench.recorder.stream(own):
        bench.train(2)
    bench.recorder.current_stream().wait_stream(own)
    bench.train(1)


# Order


def prefetch_by_list(bench: Bench) -> None:
    root, blocks = bench.model, bench.blocks
    root.set_modules_to_forward_prefetch(blocks[:2])
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(index - 2, 0) : index][::-1])
    blocks[0].set_modules_to_forward_prefetch([])
    bench.train(2)


def several_forwards(bench: Bench) -> None:
    for _ in range(2):
        loss = bench.forward(0) + bench.forward(1)
        loss.backward()
        bench.update()
    first, second = bench.forward(0), bench.forward(1)
    first.backward()
    second.backward()
    bench.update()
    bench.train(1)


def gradient_penalty(bench: Bench) -> None:
    """A backward through a backward, which reads parameters that are gathered again for other ranks."""
    for seed in range(3):
        args, kwargs = inputs_of(bench.model, seed, 0)
        x = args[0].requires_grad_(True)
        loss = loss_of(bench.model(x, *args[1:], **kwargs))
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.pow(2).sum()).backward()
        bench.update()


def hidden_losses(bench: Bench) -> None:
    """Backward reads each block for a loss that no output shows, while the block is gathered for other ranks."""
    kept: list[torch.Tensor] = []
    for block in bench.blocks:

        def hides(*args: Any, block: Any = block, forward: Any = block.forward, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            kept.append(next(block.parameters()).pow(2).sum())
            return output

        block.forward = hides
    for seed in range(3):
        loss = bench.forward(seed)
        (loss + sum(kept)).backward()
        kept.clear()
        bench.update()


def evaluate(bench: Bench) -> None:
    for _ in range(2):
        bench.train(1)
        with torch.no_grad():
            bench.forward(5)
        bench.model.eval()
        bench.forward(6)
        bench.model.train()


def checkpointed(use_reentrant: bool) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        for block in bench.blocks:
            forward = block.forward

            def again(*args: Any, forward: Any = forward, **kwargs: Any) -> Any:
                return checkpoint(forward, *args, use_reentrant=use_reentrant, **kwargs)

            block.forward = again
        bench.train(2)

    return run


# Shards that users write to, where the last gather of them is followed by no reduction


def halve(params: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for param in params:
            param.mul_(0.5)


def write_frozen(bench: Bench) -> None:
    last = bench.blocks[-1]
    trained = list(last.parameters())
    for param in bench.model.parameters():
        param.requires_grad_(any(param is one for one in trained))
    for seed in range(2):
        args, kwargs = inputs_of(bench.model, seed, 0)
        # Backward goes on through the frozen blocks, to the input.
        loss_of(bench.model(args[0].requires_grad_(True), *args[1:], **kwargs)).backward()
        halve(bench.model.parameters())
        bench.update()


def write_unsharded_by_hand(bench: Bench) -> None:
    for block in bench.blocks:
        params = list(block.parameters())
        block.unshard()
        halve(params)
        block.reshard()
    bench.train(1)


# Exceptions


class Broken(Exception):  # noqa: N818  # a test's own
    pass


def raise_broken(*_: Any) -> None:
    raise Broken


def exception_in_forward(bench: Bench) -> None:
    bench.train(1)
    block = bench.blocks[1]
    hook = next(block.children()).register_forward_pre_hook(raise_broken)
    with pytest.raises(Broken):
        bench.forward()
    hook.remove()
    bench.update()
    bench.train(2)


def exception_in_backward(bench: Bench) -> None:
    bench.train(1)
    for block in (bench.blocks[1], bench.blocks[0]):
        hook = block.register_full_backward_pre_hook(raise_broken)
        with pytest.raises(Broken):
            bench.forward().backward()
        hook.remove()
    bench.update()
    bench.train(2)


class Fails:
    """A path that breaks once, after its work was queued."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.transport = inner, inner.transport
        self.is_due = True

    def begin(self, *tensors: torch.Tensor) -> Any:
        begun = self.inner.begin(*tensors)
        if self.is_due:
            self.is_due = False
            raise Broken
        return begun


def exception_in_a_reduction(bench: Bench) -> None:
    flat = bench.root.handles[1].buffers[-1]
    flat.routes.gradient_path = Fails(flat.routes.gradient_path)
    with pytest.raises(Broken):
        bench.forward().backward()
    bench.update()
    bench.train(2)


def exception_in_a_gather(bench: Bench) -> None:
    flat = bench.root.handles[1].buffers[-1]
    flat.routes.gather_path = Fails(flat.routes.gather_path)
    with pytest.raises(Broken):
        bench.forward()
    with torch.no_grad():
        for param in bench.model.parameters():
            param.mul_(0.5)
    bench.train(2)


# Several roots


def inner_first(bench: Bench) -> None:
    """A module is a root of its own, with streams of its own, before the model around it runs."""
    block = make_model("mlp")
    fully_shard(block, policy=BLOCK_CLASSES, reshard_after_forward=bench.reshard)
    bench.adopt(block)
    outer = nn.Sequential(bench.model, block)
    outer.example_inputs = block.example_inputs  # type: ignore[attr-defined]
    loss_of(block(*inputs_of(block, 0, 0)[0])).backward()
    torch.optim.SGD(block.parameters(), lr=LR).step()
    bench.model = outer
    fully_shard(outer, reshard_after_forward=bench.reshard)
    bench.adopt(outer)
    bench.optimizer = bench.new_optimizer()
    bench.train(2)


def two_roots(bench: Bench) -> None:
    """Two models with streams of their own pass activations and gradients to each other."""
    other = make_model("mlp")
    fully_shard(other, policy=BLOCK_CLASSES, reshard_after_forward=bench.reshard)
    bench.adopt(other)
    optimizer = torch.optim.SGD(other.parameters(), lr=LR)
    for seed in range(3):
        (x,), _ = inputs_of(bench.model, seed, 0)
        loss_of(other(bench.model(x))).backward()
        optimizer.step()
        optimizer.zero_grad()
        bench.update()


def branches(bench: Bench) -> None:
    model = Branches(bench.recorder)
    fully_shard(model, policy=BLOCK_CLASSES, reshard_after_forward=bench.reshard)
    bench.model = model
    bench.adopt(model)
    bench.optimizer = bench.new_optimizer()
    # Its buffer comes from a prefetch on the other stream, and is freed before the next gather starts.
    model.beside.blocks[0].set_modules_to_forward_prefetch([])
    bench.train(2)


BY_MODEL = [
    Case(f"train, reshard_after_forward={reshard}", name, train, {"reshard_after_forward": reshard})
    for name in [
        "mlp", "gpt", "gpt_tied", "tied_within", "tied_across", "frozen_mixed", "mixed_dtypes", "scalars",
        "unused", "conditional", "called_twice", "nested_outputs",
    ]
    for reshard in (None, False)
] + [Case("train, one handle", name, train, {"policy": None}) for name in ("empty_params", "uneven", "with_buffers")]  # fmt: skip

ON_BLOCKS: dict[str, Callable[[Bench], None]] = {
    "step an accelerated optimizer": train_with_an_accelerated_optimizer,
    "step in backward": step_in_backward,
    "accumulate under no_sync": accumulate,
    "train on a stream of the user": train_on_a_stream_of_the_user,
    "prefetch by lists": prefetch_by_list,
    "several forwards before a backward": several_forwards,
    "gradient penalty": gradient_penalty,
    "hidden losses": hidden_losses,
    "evaluate": evaluate,
    "write frozen shards after backward": write_frozen,
    "write shards that are unsharded by hand": write_unsharded_by_hand,
    "checkpoint blocks": checkpointed(False),
    "checkpoint blocks, reentrant": checkpointed(True),
    "exception in forward": exception_in_forward,
    "exception in backward": exception_in_backward,
    "exception in a reduction": exception_in_a_reduction,
    "exception in a gather": exception_in_a_gather,
    **BETWEEN_STEPS,
    "an inner root first": inner_first,
    "two roots": two_roots,
    "a branch on a stream of its own": branches,
}

ON_DEVICE = BY_MODEL + [
    Case(f"{name}, reshard_after_forward={reshard}", "mlp", run, {"reshard_after_forward": reshard})
    for name, run in ON_BLOCKS.items()
    for reshard in (None, False)
]

PINNED = RestingPlace(torch.device("cpu"), is_elsewhere=True, pins=True)
PAGEABLE = RestingPlace(torch.device("cpu"), is_elsewhere=True)

CASES = [
    *ON_DEVICE,
    *(
        case._replace(name=f"offloaded, {case.name}", options={**case.options, "home": PINNED})
        for case in ON_DEVICE
        if case.name.endswith("=None")
    ),
    *(
        case._replace(name=f"offloaded without pinning, {case.name}", options={**case.options, "home": PAGEABLE})
        for case in ON_DEVICE
        if case.name.startswith(("train, reshard", "write", "exception in a gather")) and case.model == "mlp"
    ),
]

# Of four ranks: two gather again from secondary shards.
SECONDARY = [
    case._replace(name=f"{case.name[: -len('None')]}2", options={**case.options, "reshard_after_forward": 2})
    for case in CASES
    if case.name.endswith("=None")
]

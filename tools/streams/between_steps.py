"""What programs do with parameters between steps: show, change, save, load and copy them."""

import copy
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from composable import (
    full_state_dict,
    iter_full_params,
    load_full_state_dict,
    save_checkpoint,
    unshard_params,
)
from tools.streams.bench import Bench

__all__ = ["BETWEEN_STEPS", "saver"]


# By hand


def update_after_unshard(bench: Bench) -> None:
    for is_async in (False, True):
        bench.train(1)
        for block in bench.blocks[:2]:
            pending = block.unshard(async_op=is_async)
            if pending is not None:
                pending.wait()
        bench.forward().backward()
        bench.update()


def read(module: nn.Module) -> None:
    for param in module.parameters():
        param.detach().sum()


def show_params(**options: bool) -> Callable[[Bench], None]:
    """The only gather after a step is that of ``unshard_params``."""

    def run(bench: Bench) -> None:
        bench.train(1)
        with unshard_params(bench.model, writeback=False, **options):
            read(bench.model)

    return run


def change_params(**options: bool) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        for seed in range(2):
            bench.train(1)
            bench.forward(seed).backward()
            with unshard_params(bench.model, **options), torch.no_grad():
                for param in bench.model.parameters():
                    if type(param) is nn.Parameter:
                        param.mul_(0.5)
                        if param.grad is not None:
                            param.grad.mul_(0.5)
            bench.update()
        bench.train(1)

    return run


def run_in_the_block(bench: Bench) -> None:
    bench.train(1)
    with unshard_params(bench.model):
        with torch.no_grad():
            bench.forward()
        bench.forward().backward()
    bench.update()
    with unshard_params(bench.model), torch.no_grad():
        for param in bench.model.parameters():
            # Other memory, which goes back into the buffer.
            param.data = param.data * 0.5
    bench.train(1)


# Saving


def full_states(bench: Bench) -> None:
    bench.train(1)
    state = full_state_dict(bench.model)
    bench.train(1)
    load_full_state_dict(bench.model, state)
    bench.train(1)
    for _ in iter_full_params(bench.model):
        pass
    bench.train(1)


def saver(folder: Path) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        for step in range(2):
            bench.train(1)
            save_checkpoint(folder, step, bench.model, bench.optimizer)
        bench.train(1)

    return run


def assign_state(bench: Bench) -> None:
    """Parameters become tensors that a load assigned; the next gathers put them back into the shards."""
    bench.train(2)
    state = {fqn: value.detach().clone() for fqn, value in bench.model.state_dict().items()}
    bench.model.load_state_dict(state, assign=True)
    del state
    bench.optimizer = bench.new_optimizer()
    bench.train(2)


def copies(bench: Bench) -> None:
    bench.train(1)
    twin = copy.deepcopy(bench.model)
    bench.train(1)
    bench.adopt(twin)
    bench.model = twin
    bench.optimizer = bench.new_optimizer()
    bench.train(2)


BETWEEN_STEPS: dict[str, Callable[[Bench], None]] = {
    "unshard, then forward": update_after_unshard,
    "unshard by hand": lambda bench: (bench.train(1), bench.blocks[0].unshard(), read(bench.blocks[0])),
    "unshard_params": show_params(),
    "unshard_params, writeback": change_params(),
    "unshard_params, rank0_only": change_params(rank0_only=True),
    "unshard_params, offload_to_cpu": change_params(offload_to_cpu=True),
    "run inside unshard_params": run_in_the_block,
    "full state dicts": full_states,
    "assign a state dict": assign_state,
    "deep copies": copies,
}

"""A program for test_forks.py: a rank forks a process that trains, and goes on after that has ended."""

import os
import signal
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from composable import UsageError, fully_shard, replicate


def mix(model: nn.Module) -> None:
    replicate(model[0])
    fully_shard(model)


ANNOTATE: dict[str, Callable[[nn.Module], object]] = {"shard": fully_shard, "replicate": replicate, "mix": mix}


def step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


def fork(model: nn.Module) -> None:
    sys.stdout.flush()
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            step(model)
            print("trained", flush=True)
        except UsageError as error:
            print(str(error).splitlines()[0], flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def main(rank: int, path: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    for name, annotate in ANNOTATE.items():
        for steps in (0, 2):
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            annotate(model)
            for _ in range(steps):
                step(model)
            fork(model)
            step(model)
            print("the parent goes on", name, steps, flush=True)
    model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    next(model.parameters()).share_memory_()
    model.share_memory()
    # A process that only writes its piece may be forked: the parent sees it.
    if not (child := os.fork()):
        with torch.no_grad():
            for param in model.parameters():
                param.to_local().fill_(3.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert all(bool((param.to_local() == 3.0).all()) for param in model.parameters())
    step(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

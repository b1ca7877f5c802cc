"""A program for test_reading_threads.py: threads read a sharded model by all ways while ranks train it."""

import random
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable import CPUOffloadPolicy, MixedPrecisionPolicy, RaggedDTensor, fully_shard

STEPS = 8
WIDTH = 96


class Sum(nn.Module):
    """Its output has gradients of one by all weights: each step adds one to every element."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.tied = self.weight
        self.inner = nn.Module()
        self.inner.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.weight + self.tied).sum() / 2 + self.inner.bias.sum()


WAYS: dict[str, Callable[[nn.Module], Iterable[Any]]] = {
    "state dict": lambda model: model.state_dict().values(),
    "state dict with variables": lambda model: model.state_dict(keep_vars=True).values(),
    "state dict of a wrapper": lambda model: nn.ModuleDict({"model": model}).state_dict().values(),
    "state dict of a part": lambda model: model[1].state_dict(prefix="part.").values(),
    "parameters": lambda model: model.parameters(),
    "named parameters": lambda model: dict(model.named_parameters(remove_duplicate=False)).values(),
    "parameters of a part": lambda model: model[0].parameters(),
    "text": lambda model: [param for param in model.parameters() if repr(param)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "casts": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def read(model: nn.Module, way: str, stop: threading.Event, failures: list[str]) -> None:
    last: dict[int, float] = {}
    while not stop.is_set() and not failures:
        for index, param in enumerate(WAYS[way](model)):
            if not isinstance(param, RaggedDTensor):
                failures.append(f"{way}: a plain tensor {list(param.shape)}")
                return
            values = param.detach().to_local().flatten()[::7].tolist()
            # The optimizer may be writing: some elements have the values of the next step.
            if values and (min(values) < last.get(index, 0.0) or max(values) - min(values) > 1):
                failures.append(f"{way}: {min(values)} to {max(values)} after {last}")
            last[index] = min(values, default=0.0)


def train(options: str, ways: list[str]) -> list[str]:
    model = nn.Sequential(Sum(), Sum(), Sum())
    for part in (*model, model):
        fully_shard(part, **OPTIONS[options])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    stop, failures = threading.Event(), list[str]()
    threads = [threading.Thread(target=read, args=(model, way, stop, failures)) for way in ways]
    for thread in threads:
        thread.start()
    try:
        for _ in range(STEPS):
            model(torch.zeros(())).neg().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    return failures


def main(rank: int, world_size: int, path: str) -> None:
    sys.setswitchinterval(1e-4)  # Readers do not let go of the interpreter by themselves.
    dist.init_process_group("gloo", store=dist.FileStore(path, world_size), rank=rank, world_size=world_size)
    draw = random.Random(world_size)
    for options in draw.sample(list(OPTIONS), 2):
        found = train(options, draw.sample(list(WAYS), 3))
        assert not found, (options, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

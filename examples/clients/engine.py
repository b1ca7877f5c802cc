"""What the scripts of this folder share: which ``fully_shard`` they run on, and how they report.

A script takes ``--engine composable`` or ``--engine torch``, trains on two gloo ranks and prints one line of JSON.
Everything else in it is the same for both engines: the import is all that changes.
"""

import argparse
import contextlib
import importlib
import json
import time
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

__all__ = ["Report", "local_batch", "parse_engine", "redirected"]

ENGINES = {"composable": "composable", "torch": "torch.distributed.fsdp"}


def parse_engine(description: str) -> ModuleType:
    """Return the package that ``--engine`` names; start the process group and seed all ranks alike."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--engine", choices=ENGINES, default="composable")
    engine = importlib.import_module(ENGINES[parser.parse_args().engine])
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    return engine


def local_batch(step: int, *, vocab: int, sequences: int = 4, length: int = 16) -> torch.Tensor:
    """Return this rank's token ids [sequences, length]: two batches in turn, which a model learns by heart."""
    generator = torch.Generator().manual_seed(1000 * (step % 2) + dist.get_rank())
    return torch.randint(vocab, (sequences, length), generator=generator)


@contextlib.contextmanager
def redirected(engine: ModuleType, *modules: ModuleType) -> Iterator[None]:
    """Let code that imports from ``torch.distributed.fsdp``, or has done so in ``modules``, find ``engine``'s names."""
    names = [name for name in vars(importlib.import_module(ENGINES["torch"])) if hasattr(engine, name)]
    names = [name for name in names if not name.startswith("_")]
    with contextlib.ExitStack() as stack:
        for module in (importlib.import_module(ENGINES["torch"]), *modules):
            for name in names:
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, getattr(engine, name)))
        yield


class Report:
    """Collects losses and gradient norms; ``end`` prints them on the first rank."""

    def __init__(self, client: str, engine: ModuleType) -> None:
        self._client, self._engine = client, engine
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._start = time.perf_counter()

    def add(self, loss: torch.Tensor, norm: torch.Tensor | None = None) -> None:
        """Note the loss of a step, averaged over the ranks, and the norm of its gradients. Collective."""
        mean = loss.detach().double().clone()
        dist.all_reduce(mean)
        self._losses.append(mean.item() / dist.get_world_size())
        if norm is not None:
            self._norms.append((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())

    def end(self, **more: object) -> None:
        line = {"client": self._client, "engine": self._engine.__name__, "losses": self._losses, "norms": self._norms}
        line |= {"seconds": round(time.perf_counter() - self._start, 2), **more}
        if hasattr(self._engine, "fallback_counts"):
            line["hidden_gathers"] = self._engine.fallback_counts()
        if dist.get_rank() == 0:
            print(json.dumps(line), flush=True)
        dist.barrier()
        dist.destroy_process_group()

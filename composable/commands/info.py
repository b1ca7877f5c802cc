"""``info``: what a bug report needs to know of the machine and of the versions on it."""

import argparse
import importlib.metadata
import os
import platform
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable import __version__, fully_shard
from composable.comm import transport_class, transport_names
from composable.commands.output import show
from composable.ground.names import bytes_text
from composable.testing import check_parity

# A list, so that nothing secret is printed.
_VARIABLES = (
    *("COMPOSABLE_DIVERGENCE_TIMEOUT", "COMPOSABLE_HOST", "CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES"),
    *("GLOO_SOCKET_IFNAME", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_P2P_DISABLE", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "RANK", "TORCH_DISTRIBUTED_DEBUG", "TORCH_NCCL_BLOCKING_WAIT"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "WORLD_SIZE"),
)
_PACKAGES = ("numpy", "safetensors", "fsspec", "triton", "accelerate", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take no arguments but those of all commands."""


def run(args: argparse.Namespace) -> int:
    """Print the environment; 1 if two simulated ranks cannot train here."""
    found = environment()
    show(found, as_json=args.json)
    return int(found["self test"] != "ok")


def environment() -> dict[str, Any]:
    """Return what there is, by name."""
    kinds = [("cpu", "gloo"), *([("cuda", "nccl")] if torch.cuda.is_available() else [])]
    backends = [name for name in ("gloo", "nccl", "ucc", "mpi", "xccl") if dist.is_backend_available(name)]
    pairs = [(kind, backend) for kind, backend in kinds if backend in backends]
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "torch-composable": __version__,
        "torch": torch.__version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "packages": {name: version for name in _PACKAGES if (version := _version(name))},
        "platform": platform.platform(),
        "cores": f"{usable} of {os.cpu_count()}, torch uses {torch.get_num_threads()} threads",
        "devices": _devices(),
        "backends": backends,
        "transports": {name: _usable(name, pairs) for name in reversed(transport_names())},
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "self test": _self_test(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _devices() -> list[str]:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None:
        return []
    if found.type != "cuda":
        return [f"{found.type} x {torch.accelerator.device_count()}"]
    every = enumerate(map(torch.cuda.get_device_properties, range(torch.cuda.device_count())))
    return [f"cuda:{i} {one.name}, {bytes_text(one.total_memory)}, CUDA {torch.version.cuda}" for i, one in every]


def _usable(transport: str, pairs: list[tuple[str, str]]) -> str:
    """Say for which tensors a transport can be used here, or why for none."""
    served = [f"{kind} over {backend}" for kind, backend in pairs if transport_class(transport).serves(kind, backend)]
    return f"for {', '.join(served)}" if served else f"not here: it moves {transport_class(transport).moves}"


def _self_test() -> str:
    """Train on two simulated ranks and in one process: "ok", or the error. The import has asked torch for the rest."""
    model, batch = partial(nn.Linear, 3, 2), lambda step, rank: torch.full((2, 3), 1.0 + rank)
    try:
        check_parity(model, batch, fully_shard, world_sizes=(2,))
    # Whatever it is, the report shall have it.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "ok"

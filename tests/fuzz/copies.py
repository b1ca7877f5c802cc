"""Random options of ``replicate``, also such as exclude each other."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable import ComposableError, MixedPrecisionPolicy, allreduce_hook, register_comm_hook
from composable.comm_hooks import DefaultState
from composable.replicate_module import ReplicateModule

__all__ = [
    "CHANGING",
    "MODES",
    "Copies",
    "Wrong",
    "draw_copies",
    "hooked",
    "options_of",
    "replicated",
    "unless_refused",
]

# All by one call; parts by calls of their own; several parts by one call; parts, and the rest is sharded.
MODES = "replicate nested together mixed".split()
# Kinds of nodes of which not all parameters are used in every forward, or not always alike.
CHANGING = frozenset(
    {"unused", "some ranks", "heads", "chosen", "loop", "pass through", "drop", "drop on some ranks", "cut off"}
)
_LOW = MixedPrecisionPolicy(torch.float32, torch.float64, output_dtype=torch.float64, buffer_dtype=torch.float32)


class Wrong(AssertionError):  # noqa: N818  # an outcome
    """Something is not as in one process, or not as it was."""


@dataclass(frozen=True)
class Copies:
    """What is asked of ``replicate``, in all calls alike; the rest follows from the annotation's seed."""

    finds_unused: bool = True  # parameters without a gradient are accepted
    is_static: bool = False  # ``static_graph``
    delays: bool = False  # some gradients wait for that of another parameter
    syncs: bool = False  # ranks start with different values, and ``init_sync`` makes them equal
    buffers: str = ""  # how they are made equal: "", "broadcast", "own", "forward", or "both", which is refused
    is_low: bool = False  # computation is in a lower dtype; never drawn
    steps: str = ""  # what steps inside backward: "", "ours" or "torch"
    hook: str = ""  # of which kind the communication hook is: "", "gradients" or "buckets"

    def __str__(self) -> str:
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return ", ".join(f"{name}={value}" for name, value in given.items() if value != getattr(Copies(), name))


def draw_copies(rng: random.Random) -> Copies:
    """Return what may be asked of any tree; some of it is refused."""
    copies = Copies(
        finds_unused=rng.random() < 0.75,
        is_static=rng.random() < 0.3,
        delays=rng.random() < 0.2,
        syncs=rng.random() < 0.5,
        buffers=rng.choice(["", "", "broadcast", "own", "own", "forward", "both"]),
        steps=rng.choice(["", "", "", "ours", "torch"]),
        hook=rng.choice(["", "", "", "gradients", "buckets"]),
    )
    # What excludes each other is drawn now and then.
    return copies if rng.random() < 0.1 or not copies.steps else dataclasses.replace(copies, hook="")


def replicated(model: nn.Module) -> list[Any]:
    """Return the replicated modules."""
    return [module for module in model.modules() if isinstance(module, ReplicateModule)]


def options_of(copies: Copies, modules: Sequence[nn.Module], rng: random.Random) -> dict[str, Any]:
    """Return arguments of ``replicate`` for one call, of ``modules``."""
    options: dict[str, Any] = {
        "find_unused_parameters": copies.finds_unused,
        "bucket_cap_mb": rng.choice([25, 1e-4, 1e-3]),
        "gradient_as_bucket_view": rng.choice([True, False]),
        "static_graph": copies.is_static,
        "init_sync": copies.syncs,
        "process_group": rng.choice([None, None, dist.group.WORLD]),
    }
    if copies.buffers in ("broadcast", "own", "both"):
        options["broadcast_buffers"] = copies.buffers != "own"
    if copies.buffers in ("forward", "both"):
        options["forward_sync_buffers"] = rng.choice([True, False])
    if copies.is_low:
        options["mp_policy"] = _LOW
    if copies.delays:
        named = [pair for module in modules for pair in module.named_parameters() if pair[1].requires_grad]
        # Also such as others manage, or sparse ones: refused.
        options["delay_all_reduce_named_params"] = rng.sample(named, min(len(named), rng.randint(1, 3)))
        options["param_to_hook_all_reduce"] = rng.choice(named)[1] if named and rng.random() < 0.95 else None
    return options


def unless_refused(model: nn.Module, run: Callable[[], Any]) -> None:
    """Run it.

    Raises:
        ComposableError: The library does not take it.
        Wrong: It raised, and ``model`` is not as it was.
    """
    before = _looks(model)
    try:
        run()
    except ComposableError as error:
        if _looks(model) != before:
            raise Wrong(f"refused, and the model is another: {error}") from error
        raise


def _looks(model: nn.Module) -> list[Any]:
    """Return what an error must leave alone."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    looks: list[Any] = []
    for name, module in model.named_modules():
        looks += [name, type(module), *(list(getattr(module, kind)) for kind in kinds)]
    for name, param in model.named_parameters():
        hooks = param._post_accumulate_grad_hooks
        looks += [name, id(param), param.requires_grad, id(param.grad), len(hooks or ())]
        looks.append(param.detach().sum().item() if type(param) is nn.Parameter else None)
    return looks


def hooked(model: nn.Module, copies: Copies) -> None:
    """Register the communication hook, if there is one, on every replicated module. Collective.

    Raises:
        ComposableError: The library does not take it.
    """
    for module in replicated(model) if copies.hook else ():
        if copies.hook == "gradients":
            register_comm_hook(module, DefaultState(dist.group.WORLD), allreduce_hook)
        else:
            module.register_comm_hook(dist.group.WORLD, _average)


def _average(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer()
    dist.all_reduce(flat, group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(flat.div_(dist.get_world_size()))
    return future

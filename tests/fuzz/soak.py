"""Runs each of several situations for many steps, and shows whether anything grows.

    python -m tests.fuzz.soak --steps 1000
    python -m tests.fuzz.soak --steps 1000 --ranks processes --only "sharded"

Live tensors, their bytes, Python objects, threads, file descriptors and resident memory are counted after some steps
and at the end.
"""

import argparse
import copy
import gc
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.utils.checkpoint import checkpoint

from composable import (
    LowPrecisionState,
    MixedPrecisionPolicy,
    UsageError,
    as_ddp,
    bf16_compress_hook,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    load_full_state_dict,
    no_sync,
    rebind_optimizer,
    reduction_stats,
    register_comm_hook,
    replicate,
    step_in_backward,
    unannotate,
    unshard_params,
    update_process_group,
)
from tests.world import run_ranks, run_threads

__all__ = ["SITUATIONS", "Count", "Soaked", "main", "soak"]

WIDTH = 8
# With fewer steps, caches that fill are more than what grows.
MANY = 300
ALLOWED_KIB = 1024


class Boom(Exception):  # noqa: N818  # not one of ours
    """Raised on purpose."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.fails = ""
        self.table: nn.Embedding | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails == "forward":
            raise Boom
        if self.fails == "missing":
            return x * 1
        if self.table is not None:
            x = x + self.table((x.detach() > 0).sum(-1))
        y = x + self.down(torch.tanh(self.up(x)))
        if self.fails == "backward":
            y.register_hook(_raise)
        return y


def _raise(grad: torch.Tensor) -> None:
    raise Boom


def by_policy(model: nn.Module) -> None:
    fully_shard(model, policy={Block})


def whole(model: nn.Module) -> None:
    replicate(model, find_unused_parameters=True)


def mixed(model: nn.Module) -> None:
    """One block is replicated, one sharded, the rest sharded around both."""
    replicate(model[0])  # type: ignore[index]
    fully_shard(model[1])  # type: ignore[index]
    fully_shard(model)


# Options of replicate


def in_low_precision(model: nn.Module) -> None:
    replicate(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32))


def static(model: nn.Module) -> None:
    replicate(model, static_graph=True)


def with_table(model: nn.Module) -> None:
    model[0].table = nn.Embedding(WIDTH + 1, WIDTH, sparse=True)  # type: ignore[index]
    replicate(model)


def delayed(model: nn.Module) -> None:
    names = [(name, param) for name, param in model.named_parameters() if name.startswith("1.")]
    replicate(model, delay_all_reduce_named_params=names, param_to_hook_all_reduce=model[0].up.weight)  # type: ignore[index]


def strict(model: nn.Module) -> None:
    replicate(model)


class Trainee:
    """A model with its optimizer.

    Attributes:
        model: What is trained.
        optimizer: Steps it.
        groups: Of all ranks, for ``update_process_group``.
    """

    def __init__(self, annotate: Callable[[nn.Module], None]) -> None:
        self.model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 1))
        self.annotate = annotate
        annotate(self.model)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.groups: list[dist.ProcessGroup] = []

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(2, WIDTH)).square().mean()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def plain(on: Trainee) -> None:
    on.loss().backward()
    clip_grad_norm_(on.model.parameters(), 1.0)
    on.update()


def without_sync(on: Trainee) -> None:
    with no_sync(on.model):
        on.loss().backward()
    on.loss().backward()
    on.update()


def raises_in_forward(on: Trainee) -> None:
    _expect(on, "forward", lambda: on.loss())
    plain(on)


def raises_in_backward(on: Trainee) -> None:
    _expect(on, "backward", lambda: on.loss().backward())
    on.optimizer.zero_grad()
    plain(on)


def _expect(on: Trainee, fails: str, fn: Callable[[], object]) -> None:
    block = on.model[0]
    block.fails = fails
    try:
        fn()
    except Boom:
        return
    finally:
        block.fails = ""
    raise AssertionError("nothing was raised")


def state_dicts(on: Trainee) -> None:
    plain(on)
    on.model.load_state_dict(on.model.state_dict())
    on.optimizer.load_state_dict(on.optimizer.state_dict())
    load_full_state_dict(on.model, full_state_dict(on.model))
    if on.annotate is by_policy:
        with unshard_params(on.model):
            on.model.state_dict()


def dropped_forwards(on: Trainee) -> None:
    on.loss()
    plain(on)
    on.loss()


def evaluation(on: Trainee) -> None:
    on.model.eval()
    with torch.no_grad():
        on.loss()
    on.loss()
    on.model.train()
    plain(on)


def deep_copies(on: Trainee) -> None:
    plain(on)
    twin = copy.copy(on)
    twin.model, twin.optimizer = copy.deepcopy((on.model, on.optimizer))
    if on.annotate is by_policy:
        plain(twin)


def annotate_anew(on: Trainee) -> None:
    plain(on)
    unannotate(on.model)
    rebind_optimizer(on.optimizer, on.model)
    on.annotate(on.model)
    rebind_optimizer(on.optimizer, on.model)


def micro_batches(on: Trainee) -> None:
    waiting = [on.loss(), on.loss()]
    for _ in range(2):
        waiting.pop(0).backward(retain_graph=True)
        waiting.append(on.loss())
    for loss in waiting:
        loss.backward()
    on.update()


def checkpointed(on: Trainee) -> None:
    output = checkpoint(on.model, torch.randn(2, WIDTH), use_reentrant=False)
    assert isinstance(output, torch.Tensor)
    output.square().mean().backward()
    on.update()


def reentrant(on: Trainee) -> None:
    x = torch.randn(2, WIDTH, requires_grad=True)
    output = checkpoint(on.model, x, use_reentrant=True)
    assert isinstance(output, torch.Tensor)
    output.square().mean().backward()
    on.update()


def backward_alone(on: Trainee) -> None:
    on.loss().backward()


def by_sgd(on: Trainee) -> None:
    on.optimizer = torch.optim.SGD(on.model.parameters(), lr=1e-3)


def unclipped(on: Trainee) -> None:
    on.loss().backward()
    on.update()


def uneven_inputs(on: Trainee) -> None:
    with Join([as_ddp(on.model)]):
        for _ in range(1 + dist.get_rank()):
            unclipped(on)


def missing_gradients(on: Trainee) -> None:
    block = on.model[0]
    block.fails = "missing" if dist.get_rank() == 0 else ""
    try:
        on.loss().backward()
    except UsageError:
        pass
    else:
        raise AssertionError("nothing was raised")
    finally:
        block.fails = ""
    on.optimizer.zero_grad()
    plain(on)


def with_power_sgd(on: Trainee) -> None:
    register_comm_hook(on.model, _power_state(), powerSGD_hook.powerSGD_hook)


def _power_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)


def hooks_that_come_and_go(on: Trainee) -> None:
    handle = register_comm_hook(on.model, LowPrecisionState(dist.group.WORLD), bf16_compress_hook)
    plain(on)
    handle.remove()
    handle = register_comm_hook(on.model, _power_state(), powerSGD_hook.powerSGD_hook)
    plain(on)
    handle.remove()


def with_groups(on: Trainee) -> None:
    on.groups = [dist.new_group() for _ in range(2)]


def other_groups(on: Trainee) -> None:
    on.groups.reverse()
    update_process_group(on.model, on.groups[0])
    plain(on)
    reduction_stats(on.model, sample_rate=2)


def models_that_go(on: Trainee) -> None:
    """Whatever was trained, or failed, is collected once it is dropped."""
    for run in (plain, without_sync, raises_in_backward):
        other = Trainee(on.annotate)
        run(other)
        gone = weakref.ref(other.model)
        del other
        gc.collect()
        assert gone() is None, f"a model is never collected after {run.__name__}"


@dataclass(frozen=True)
class Situation:
    """How the model is annotated, what is done in every step, one after the other, and what is done once before."""

    annotate: Callable[[nn.Module], None]
    runs: tuple[Callable[[Trainee], None], ...]
    begin: Callable[[Trainee], object] = lambda on: None


ANYWHERE = (without_sync, raises_in_backward, state_dicts, dropped_forwards, deep_copies, annotate_anew, models_that_go)
SITUATIONS = {
    "sharded": Situation(by_policy, (plain, *ANYWHERE, raises_in_forward, evaluation, micro_batches, checkpointed)),
    "replicated": Situation(
        whole, (plain, without_sync, micro_batches, models_that_go, uneven_inputs, hooks_that_come_and_go)
    ),
    "replicated and sharded": Situation(mixed, (plain, *ANYWHERE)),
    "low precision": Situation(in_low_precision, (plain, raises_in_backward)),
    "step in backward": Situation(whole, (backward_alone,), lambda on: step_in_backward(on.optimizer)),
    "static graph": Situation(static, (plain,)),
    "static graph, reentrant": Situation(static, (reentrant,)),
    "sparse gradients": Situation(with_table, (unclipped, uneven_inputs), by_sgd),
    "delayed all-reduce": Situation(delayed, (plain,)),
    "missing gradients": Situation(strict, (missing_gradients,)),
    "state of a hook": Situation(whole, (plain,), with_power_sgd),
    "other process groups": Situation(whole, (other_groups,), with_groups),
}


@dataclass(frozen=True)
class Count:
    """What there is in the process."""

    tensors: int
    nbytes: int
    objects: int
    threads: int
    files: int
    resident_kib: int

    @staticmethod
    def now() -> "Count":
        """Count, after what nobody holds is gone."""
        for _ in range(2):
            gc.collect()
        everything = gc.get_objects()
        tensors = [one for one in everything if issubclass(type(one), torch.Tensor)]
        storages = {}
        for tensor in (getattr(one, "_local_tensor", one) for one in tensors):
            # Sparse ones, lazy ones and other subclasses have no memory of their own; what they are made of is here too.
            with suppress(RuntimeError, ValueError):
                storage = tensor.untyped_storage()
                storages[storage._cdata] = storage.nbytes()
        tasks, files = Path("/proc/self/task"), Path("/proc/self/fd")
        return Count(
            len(tensors),
            sum(storages.values()),
            len(everything),
            len(os.listdir(tasks)) if tasks.exists() else threading.active_count(),
            len(os.listdir(files)) if files.exists() else 0,
            _resident_kib(),
        )


def _resident_kib() -> int:
    """Return how much memory of the process is resident; 0 where the system does not tell."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024 if file.exists() else 0


@dataclass(frozen=True)
class Soaked:
    """What there was after the first steps, and at the end."""

    name: str
    steps: int
    first: Count
    last: Count

    def growth(self) -> list[str]:
        """Return what has grown; Python itself keeps a few objects more now and then, and allocators some pages."""
        allowed = {"objects": 100 + 0.05 * self.steps, "resident_kib": ALLOWED_KIB if self.steps >= MANY else math.inf}
        found = []
        for one in fields(Count):
            first, last = getattr(self.first, one.name), getattr(self.last, one.name)
            if last - first > allowed.get(one.name, 0):
                found.append(f"{one.name} {first} -> {last}")
        return found


def soak(name: str, steps: int, world_size: int = 2, *, in_processes: bool = False) -> Soaked:
    """Run a situation on ranks and count on the first of them."""
    run = run_ranks if in_processes else run_threads
    counts = run(_soak_on_a_rank, world_size, name, steps, timeout_s=60 + steps)[0]
    return Soaked(name, steps, *counts)


def _soak_on_a_rank(name: str, steps: int) -> tuple[Count, Count]:
    situation = SITUATIONS[name]
    on = Trainee(situation.annotate)
    situation.begin(on)
    counts = []
    for step in range(steps + 1):
        # After a fifth all caches are filled.
        if step in (max(steps // 5, 3), steps):
            dist.barrier()
            counts.append(Count.now())
            dist.barrier()
        if step < steps:
            for run in situation.runs:
                run(on)
    return counts[0], counts[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return 1 if anything has grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--ranks", choices=("threads", "processes"), default="threads")
    parser.add_argument("--only", action="append", choices=list(SITUATIONS), help="one situation; may be repeated")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    has_grown = False
    for name in options.only or SITUATIONS:
        ended = soak(name, options.steps, options.world_size, in_processes=options.ranks == "processes")
        has_grown |= bool(ended.growth())
        print(f"{name}: {', '.join(ended.growth()) or 'level'}; {ended.last}", flush=True)
    return int(has_grown)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())

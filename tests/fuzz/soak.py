"""Does the same to each of several models for many steps, and shows whether anything grows.

    python -m tests.fuzz.soak --steps 1000
    python -m tests.fuzz.soak --steps 1000 --ranks processes --only "sharded"

What is done are programs and actions of the random trees. Live tensors, their bytes, Python objects, threads, file
descriptors and resident memory are counted after some steps and at the end.
"""

import argparse
import copy
import gc
import math
import os
import random
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from composable import (
    LowPrecisionState,
    UsageError,
    bf16_compress_hook,
    clip_grad_norm_,
    reduction_stats,
    register_comm_hook,
    step_in_backward,
    update_process_group,
)
from tests.fuzz.annotations import Annotation, annotate_again
from tests.fuzz.between import ACTIONS, Between
from tests.fuzz.copies import Copies
from tests.fuzz.nodes import Spec
from tests.fuzz.programs import PROGRAMS, Step
from tests.fuzz.trees import Model
from tests.world import run_ranks, run_threads

__all__ = ["SITUATIONS", "Count", "Soaked", "main", "soak"]

# With fewer steps, caches that fill are more than what grows.
MANY = 300
ALLOWED_KIB = 1024


def tree(*kinds: str) -> Spec:
    """Return these kinds of nodes, one after the other."""
    return Spec("seq", 0, tuple(Spec(name, 1 + index) for index, name in enumerate(kinds)))


TREE = tree("mlp", "buffers", "linear", "twice")


def annotation(mode: str, **options: object) -> Annotation:
    copies = Copies(**options) if options or mode == "replicate" else None  # type: ignore[arg-type]
    return Annotation(mode, 1, 0.5, "auto", "values", is_reentrant=False, copies=copies)


class Trainee:
    """A model with its optimizer, to which a situation is done in every step."""

    def __init__(self, situation: "Situation") -> None:
        self.situation = situation
        self.model = Model(situation.tree)
        annotate_again(self.model, situation.annotation)
        assert self.model.refused == []
        kind = torch.optim.AdamW
        self.optimizer: torch.optim.Optimizer = kind(self.model.parameters(), lr=1e-3)
        self.groups: list[dist.ProcessGroup] = []  # of all ranks, for ``update_process_group``

    def step(self) -> Step:
        rank, size = dist.get_rank(), dist.get_world_size()
        return Step(self.model, step=0, rank=rank, world_size=size, seed=0, is_plain=False)

    def run(self, name: str) -> None:
        PROGRAMS[name].run(self.step())
        if not self.situation.steps_inside:
            clip_grad_norm_(self.model.parameters(), 1.0)
        if not self.situation.steps_inside:
            self.optimizer.step()
        self.optimizer.zero_grad()

    def act(self, name: str, folder: Path) -> None:
        ways = self.situation.annotation, self.situation.annotation
        between = Between(self.model, self.optimizer, False, random.Random(0), 0, folder, *ways)
        ACTIONS[name].run(between)
        self.model, self.optimizer = between.model, between.optimizer
        self.optimizer.zero_grad()


# What is no program of random trees


def missing_gradients(on: Trainee) -> None:
    step = on.step()
    try:
        step.backward(step.forward(head=int(dist.get_rank() == 0)))
    except UsageError:
        on.optimizer.zero_grad()
        return
    raise AssertionError("nothing was raised")


def with_power_sgd(on: Trainee) -> None:
    register_comm_hook(on.model, _power_state(), powerSGD_hook.powerSGD_hook)


def _power_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)


def hooks_that_come_and_go(on: Trainee) -> None:
    for state, hook in (
        (LowPrecisionState(dist.group.WORLD), bf16_compress_hook),
        (_power_state(), powerSGD_hook.powerSGD_hook),
    ):
        handle = register_comm_hook(on.model, state, hook)  # type: ignore[arg-type]
        on.run("plain")
        handle.remove()


def other_groups(on: Trainee) -> None:
    on.groups = on.groups or [dist.new_group() for _ in range(2)]
    on.groups.reverse()
    update_process_group(on.model, on.groups[0])
    on.run("plain")
    reduction_stats(on.model, sample_rate=2)


def models_that_go(on: Trainee) -> None:
    """Whatever was trained, or failed, is collected once it is dropped."""
    for name in ("plain", "no_sync", "backward raises"):
        other = Trainee(on.situation)
        other.run(name)
        gone = weakref.ref(other.model)
        del other
        gc.collect()
        assert gone() is None, f"a model is never collected after {name}"


def copies_that_go(on: Trainee) -> None:
    copy.deepcopy((on.model, on.optimizer))


@dataclass(frozen=True)
class Situation:
    """A model, how it is annotated, and what is done in every step, one after the other."""

    annotation: Annotation
    programs: tuple[str, ...] = ("plain",)
    actions: tuple[str, ...] = ()
    others: tuple[Callable[[Trainee], None], ...] = ()
    begin: Callable[[Trainee], object] = lambda on: None  # done once
    tree: Spec = TREE
    steps_inside: bool = False  # the optimizer, in backward


PROGRAMS_OF_ALL = ("plain", "no_sync", "forward raises", "backward raises", "dropped forward", "1F1B", "retain_graph")
ACTIONS_OF_ALL = (
    *("full_state_dict, load_full_state_dict", "state_dict, load_state_dict", "optimizer's state_dict"),
    *("save_checkpoint, load_checkpoint", "iter_full_params", "unannotate, annotate, rebind_optimizer"),
)
SITUATIONS = {
    "sharded": Situation(
        annotation("hand"),
        (*PROGRAMS_OF_ALL, "eval between", "eval with gradients", "inference_mode", "checkpoint around all"),
        (*ACTIONS_OF_ALL, "deepcopy with optimizer", "annotate a copy", "unshard_params, read", "unshard_params, edit"),
        begin=models_that_go,
    ),
    "replicated": Situation(
        annotation("replicate"),
        (*PROGRAMS_OF_ALL, "copies: uneven inputs"),
        ACTIONS_OF_ALL,
        (hooks_that_come_and_go, other_groups, copies_that_go),
        models_that_go,
    ),
    "replicated and sharded": Situation(
        annotation("mixed", syncs=True), PROGRAMS_OF_ALL, ACTIONS_OF_ALL, (copies_that_go,)
    ),
    "low precision": Situation(annotation("replicate", policy="compute"), ("plain", "backward raises")),
    "step in backward": Situation(
        annotation("replicate", steps="ours"), begin=lambda on: step_in_backward(on.optimizer), steps_inside=True
    ),
    "static graph": Situation(annotation("replicate", is_static=True)),
    "static graph, reentrant": Situation(
        annotation("replicate", is_static=True), ("input with gradient",), tree=tree("linear", "reentrant", "linear")
    ),
    "delayed all-reduce": Situation(annotation("replicate", delays=True)),
    "missing gradients": Situation(annotation("replicate", finds_unused=False), others=(missing_gradients,)),
    "state of a hook": Situation(annotation("replicate"), begin=with_power_sgd),
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
    if situation.annotation.copies is not None and situation.annotation.copies.policy:
        torch.set_default_dtype(torch.float64)  # that of the policy's outputs
    on = Trainee(situation)
    situation.begin(on)
    counts = []
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box)
    for step in range(steps + 1):
        # After a fifth all caches are filled.
        if step in (max(steps // 5, 3), steps):
            dist.barrier()
            counts.append(Count.now())
            dist.barrier()
        if step < steps:
            for program in situation.programs:
                on.run(program)
            for action in situation.actions:
                on.act(action, Path(box[0]))
            for other in situation.others:
                other(on)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(box[0])
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

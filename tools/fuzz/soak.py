"""Does the same to each of several models for many steps, and shows whether anything grows.

    python -m tools.fuzz.soak --steps 1000
    python -m tools.fuzz.soak --steps 1000 --only "sharded"

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
from dataclasses import dataclass
from pathlib import Path

import pytest
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
from composable.comm.mapped_memory import Block
from tests.world import run_ranks, shut_down
from tools.fuzz.annotations import Annotation, Copies, annotate_again
from tools.fuzz.between import ACTIONS, Between
from tools.fuzz.nodes import Model, Spec
from tools.fuzz.programs import PROGRAMS, Step

__all__ = ["SITUATIONS", "main", "soak"]

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
        if situation.annotation.copies is not None and not situation.annotation.copies.finds_unused:
            self.model.heads[1].requires_grad_(requires_grad=False)
        annotate_again(self.model, situation.annotation)
        self.is_sparse = "sparse rows" in str(situation.tree)
        kind = torch.optim.SGD if self.is_sparse else torch.optim.AdamW
        self.optimizer: torch.optim.Optimizer = kind(self.model.parameters(), lr=1e-3)
        self.groups: list[dist.ProcessGroup] = []  # of all ranks, for ``update_process_group``

    def step(self) -> Step:
        return Step(self.model, 0, dist.get_rank(), dist.get_world_size(), 0, is_plain=False)

    def run(self, name: str) -> None:
        PROGRAMS[name].run(self.step())
        if not self.situation.steps_inside:
            if not self.is_sparse:
                clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def act(self, name: str, folder: Path) -> None:
        between = Between(self.model, self.optimizer, False, random.Random(0), 0, folder, self.situation.annotation)
        ACTIONS[name].run(between)
        self.model, self.optimizer = between.model, between.optimizer
        self.optimizer.zero_grad()


# What is no program of random trees


def missing_gradients(on: Trainee) -> None:
    step = on.step()
    with pytest.raises(UsageError):
        step.backward(step.forward(head=int(dist.get_rank() == 0)))
    on.optimizer.zero_grad()


def hooks_that_come_and_go(on: Trainee) -> None:
    power = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5)
    for state, hook in (
        (LowPrecisionState(dist.group.WORLD), bf16_compress_hook),
        (power, powerSGD_hook.powerSGD_hook),
    ):
        handle = register_comm_hook(on.model, state, hook)  # type: ignore[arg-type]
        for _ in range(3):
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


PROGRAMS_OF_ALL = ("plain", "no_sync", "forward raises", "backward raises", "any order")
ACTIONS_OF_ALL = (
    *("load_full_state_dict of other values", "state_dict, load_state_dict", "optimizer's state_dict"),
    *("save_checkpoint, load_checkpoint", "iter_full_params", "unannotate, annotate, rebind_optimizer"),
)
SITUATIONS = {
    "sharded": Situation(
        annotation("hand"),
        (*PROGRAMS_OF_ALL, "eval between", "checkpoint around all"),
        (*ACTIONS_OF_ALL, "deepcopy with optimizer", "annotate a copy", "unshard_params, edit"),
        begin=models_that_go,
    ),
    "replicated": Situation(
        annotation("replicate"),
        PROGRAMS_OF_ALL,
        ACTIONS_OF_ALL,
        (hooks_that_come_and_go, other_groups, copies_that_go),
        models_that_go,
    ),
    "replicated and sharded": Situation(
        annotation("mixed", syncs=True), PROGRAMS_OF_ALL, ACTIONS_OF_ALL, (copies_that_go,)
    ),
    "low precision": Situation(annotation("replicate", is_low=True), ("plain", "backward raises")),
    "step in backward": Situation(
        annotation("replicate", steps="ours"), begin=lambda on: step_in_backward(on.optimizer), steps_inside=True
    ),
    "static graph": Situation(
        annotation("replicate", is_static=True), ("input with gradient",), tree=tree("linear", "reentrant", "linear")
    ),
    "sparse gradients": Situation(annotation("replicate"), tree=tree("sparse rows", "linear")),
    "delayed all-reduce": Situation(annotation("replicate", delays=True)),
    "missing gradients": Situation(annotation("replicate", finds_unused=False), others=(missing_gradients,)),
}


def count() -> dict[str, int]:
    """Count what there is in the process, after what nobody holds is gone."""
    for _ in range(2):
        gc.collect()
    everything = gc.get_objects()
    blocks = [one for one in everything if type(one) is Block]
    # How many blocks of shared memory there are, and views of them, depends on how far the other ranks are.
    lent = {id(view) for block in blocks for view in (block._data, *block._views.values())}
    tensors = [one for one in everything if issubclass(type(one), torch.Tensor) and id(one) not in lent]
    storages = {}
    for tensor in (getattr(one, "_local_tensor", one) for one in tensors):
        # Sparse ones, lazy ones and other subclasses have no memory of their own; what they are made of is here too.
        with suppress(RuntimeError, ValueError):
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    tasks, memory = Path("/proc/self/task"), Path("/proc/self/statm")  # of Linux
    return {
        "tensors": len(tensors),
        "bytes": sum(storages.values()),
        "blocks": len(blocks),
        "objects": len(everything),
        "threads": len(os.listdir(tasks)) if tasks.exists() else threading.active_count(),
        "files": len(os.listdir("/dev/fd")),
        "KiB": int(memory.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024 if memory.exists() else 0,
    }


def soak(name: str, steps: int, world_size: int = 2) -> tuple[list[str], dict[str, int]]:
    """Run a situation on ranks.

    Returns:
        What has grown on the first of them since the first steps, and what there is at the end. Python itself keeps a
        few objects more now and then, and allocators some pages.
    """
    shut_down()  # What others have left in these processes, such as a compiler's, counts too, and may come and go.
    first, last = run_ranks(_soak_on_a_rank, world_size, name, steps, timeout_s=60 + steps)[0]
    allowed = {"objects": 150 + 0.05 * steps, "blocks": 8, "KiB": ALLOWED_KIB if steps >= MANY else math.inf}
    grown = [word for word in last if last[word] - first[word] > allowed.get(word, 0)]
    return [f"{word} {first[word]} -> {last[word]}" for word in grown], last


def _soak_on_a_rank(name: str, steps: int) -> tuple[dict[str, int], dict[str, int]]:
    situation = SITUATIONS[name]
    if situation.annotation.copies is not None and situation.annotation.copies.is_low:
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
            counts.append(count())
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
    parser.add_argument("--only", action="append", choices=list(SITUATIONS), help="one situation; may be repeated")
    options = parser.parse_args(arguments)
    has_grown = False
    for name in options.only or SITUATIONS:
        grown, last = soak(name, options.steps, options.world_size)
        has_grown |= bool(grown)
        print(f"{name}: {', '.join(grown) or 'level'}; {last}", flush=True)
    return int(has_grown)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())

"""Ranks in two different calls: each is told which rank is in which call, whatever the two calls are."""

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from composable import (
    ComposableError,
    DesyncError,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    get_total_norm,
    has_finite_gradients,
    iter_full_params,
    joinable,
    load_checkpoint,
    load_full_params,
    load_full_state_dict,
    load_safetensors,
    no_sync,
    reduce_gradients,
    reduce_scatter_hook,
    register_comm_hook,
    replicate,
    save_checkpoint,
    save_safetensors,
    set_divergence_timeout,
    step_in_backward,
    unannotate,
    unshard_params,
    update_process_group,
)
from composable.ground.torch_private import store_of_default_group
from tests.world import on_ranks, run_ranks, run_threads

PLANS = "the comparison of plans before the first forward"


class Case:
    """The things that calls are made with, of each rank."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.sharded = fully_shard(nn.Linear(4, 4))
        self.replicated = replicate(nn.Linear(4, 4))
        self.plain = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.sharded.parameters(), lr=0.1)

    def forward(self) -> torch.Tensor:
        return self.sharded(torch.ones(2, 4)).sum()

    def write_back(self) -> None:
        with unshard_params(self.sharded):
            pass

    def join(self) -> None:
        with Join([joinable(self.replicated)]):
            pass


def values() -> dict[str, torch.Tensor]:
    return nn.Linear(4, 4).state_dict()


# The calls that compare something before anything else, by their names in messages.
CALLS: dict[str, Callable[[Case], object]] = {
    PLANS: Case.forward,
    "fully_shard": lambda case: fully_shard(case.plain, sync_module_states=True),
    "replicate": lambda case: replicate(case.plain),
    "unannotate": lambda case: unannotate(case.sharded),
    "save_checkpoint": lambda case: save_checkpoint(case.folder, 1, case.sharded),
    "load_checkpoint": lambda case: load_checkpoint(case.folder, case.sharded),
    "save_safetensors": lambda case: save_safetensors(case.sharded, case.folder / "w"),
    "load_safetensors": lambda case: load_safetensors(case.sharded, case.folder / "w"),
    "full_state_dict": lambda case: full_state_dict(case.sharded),
    "load_full_state_dict": lambda case: load_full_state_dict(case.sharded, values()),
    "iter_full_params": lambda case: list(iter_full_params(case.sharded)),
    "load_full_params": lambda case: load_full_params(case.sharded, iter(values().items())),
    "set_model_state_dict": lambda case: set_model_state_dict(
        case.sharded, values(), options=StateDictOptions(full_state_dict=True)
    ),
    "unshard_params": Case.write_back,
    "register_comm_hook": lambda case: register_comm_hook(case.sharded, None, reduce_scatter_hook),
    "step_in_backward": lambda case: step_in_backward(case.optimizer),
    "update_process_group": lambda case: update_process_group(case.replicated, dist.group.WORLD),
    "Join": Case.join,
}
# In its first use a root compares plans, whatever the use is.
ALIKE = {PLANS, "unshard_params"}


def part_ways(first: str, second: str, folder: str) -> str:
    """Return the error that this rank gets where each rank makes a call of its own, before the first step."""
    set_divergence_timeout(None)
    case = Case(folder)
    with pytest.raises(DesyncError) as caught:
        CALLS[(first, second)[dist.get_rank()]](case)
    return str(caught.value)


@pytest.mark.parametrize("number", range(1, len(CALLS)), ids=list(CALLS)[1:])
def test_ranks_in_two_different_calls_are_told_who_is_in_which(number: int, tmp_path: Path) -> None:
    """Let each call meet each other one once, on the one rank or on the other in turns."""
    for other in range(number):
        first, second = (list(CALLS)[one] for one in ((number, other) if other % 2 else (other, number)))
        if {first, second} == ALIKE:
            continue
        names = [PLANS if name in ALIKE else name for name in (first, second)]
        # A call may have failed before it came to the comparison.
        lines = [rf"    rank {rank}: {name}(, which raised .*)?" for rank, name in enumerate(names)]
        expected = "\n".join(["the ranks are in different calls", *lines, "  at:  rank {}", "  fix: make the same .*"])
        for rank, said in enumerate(run_threads(part_ways, 2, first, second, str(tmp_path))):
            assert re.fullmatch(expected.replace("{}", str(rank)), said), said


def reduce(case: Case) -> None:
    with no_sync(case.sharded):
        case.forward().backward()
    reduce_gradients(case.sharded)


# The calls that compare nothing: here the watch finds out who waits where.
UNCOMPARED: dict[str, Callable[[Case], object]] = {
    "clip_grad_norm_": lambda case: clip_grad_norm_(case.sharded.parameters(), 1.0),
    "get_total_norm": lambda case: get_total_norm([param.grad for param in case.sharded.parameters()]),  # type: ignore[misc]
    "has_finite_gradients": lambda case: has_finite_gradients(case.sharded.parameters()),
    "full_tensor": lambda case: next(case.sharded.parameters()).full_tensor(),  # type: ignore[attr-defined]
    "forward": lambda case: [case.forward().backward() for _ in range(50)],
    "reduce_gradients": reduce,
}


@on_ranks(2, run=run_ranks, uncompared=UNCOMPARED, second=["save_checkpoint", "load_full_state_dict"])
def test_a_call_that_compares_nothing_is_told_apart_by_the_watch(uncompared: str, second: str, tmp_path: Path) -> None:
    """Return the error of this rank; the ranks part after a step."""
    folder = str(tmp_path)
    set_divergence_timeout(0.3)
    case = Case(folder)
    case.forward().backward()
    with pytest.raises(DesyncError) as caught:  # noqa: PT012  # a rank may first wait in the next call
        (UNCOMPARED[uncompared] if dist.get_rank() == 0 else CALLS[second])(case)
        full_state_dict(case.sharded)
    said = str(caught.value)
    assert re.search(r"rank 0: \S", said) and re.search(r"rank 1: \S", said), said
    assert second in said, said


def begin_in_two_threads() -> str:
    """Run the first forwards of two models in two threads of rank 0; return the error of the thread that came second.

    The one that came first waits for rank 1, which comes when the other one has raised. Later steps are right.
    """
    models = [fully_shard(nn.Linear(4, 4)) for _ in range(2)]
    store = store_of_default_group()
    told: list[str] = []

    def run(index: int) -> None:
        try:
            models[index](torch.ones(1, 4))
        except ComposableError as error:
            told.append(str(error))
            store.set("first", str(1 - index))

    if dist.get_rank() == 0:
        threads = [threading.Thread(target=run, args=(index,)) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        run(int(store.get("first").decode()))
    for model in models:
        model(torch.ones(1, 4)).sum().backward()
        torch.testing.assert_close(model.weight.grad.full_tensor(), torch.ones(4, 4))  # type: ignore[union-attr, attr-defined]
    return "".join(told)


def test_two_threads_in_first_forwards_are_an_error_in_the_second() -> None:
    told, nothing = run_ranks(begin_in_two_threads, 2)
    assert told == (
        "two threads annotate modules, or run the first forward of a model, at once: the comparison of plans before "
        "the first forward is under way\n  at:  rank 0, in the comparison of plans before the first forward\n  fix: "
        "annotate models and run the first forward of each in one thread, in one order on all ranks"
    )
    assert nothing == ""

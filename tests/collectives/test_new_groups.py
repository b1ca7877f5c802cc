"""Whether annotations find their ranks whatever other process groups there are: on some ranks only, or destroyed."""

import datetime
import os
import random
import resource
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.torch_version import TorchVersion

from composable import DesyncError, fully_shard, iter_full_params, replicate, set_divergence_timeout
from composable.comm.ranks import make_group
from composable.ground.torch_private import groups_of_process
from tests.models import BATCH, DIM, make_model, random_input
from tests.world import RankErrors, run_ranks, run_threads

EVERYONE = (0, 1, 2)
# A mesh of torch 2.15 names its groups by how many this rank has made: after one that others lack, torch itself hangs.
MESHES_COUNT_GROUPS = TorchVersion(torch.__version__) >= "2.15"
SUBSETS = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), EVERYONE)


def train(model: nn.Module, seed: int, ranks: tuple[int, ...], mine: tuple[int, ...]) -> None:
    """Take two steps on the inputs of ``mine``, of the gradients that ``ranks`` average."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = sum(model(random_input(seed + 10 * step + rank, BATCH, DIM)).square().mean() for rank in mine)
        (loss / len(mine)).backward()  # type: ignore[operator]  # there is one
        optimizer.step()
        optimizer.zero_grad()


def check(annotate: str, seed: int, ranks: tuple[int, ...], mesh: DeviceMesh | None) -> None:
    """Train a new model on these ranks, of which this is one, and one on this rank alone, on all their inputs."""
    model, alone = make_model("mlp"), make_model("mlp")
    if annotate == "replicate":
        replicate(model, mesh=mesh)
    else:
        fully_shard(model, mesh=mesh)
    train(model, seed, ranks, (dist.get_rank(),))
    train(alone, seed, ranks, ranks)
    torch.testing.assert_close(dict(iter_full_params(model)), dict(alone.named_parameters()))


def run_program(seed: int, count: int) -> list[str]:
    """Make and destroy groups, annotate and train, in an order that depends on ``seed`` alone."""
    choose = random.Random(seed)
    rank = dist.get_rank()
    held: list[object] = []
    done: list[str] = []
    for number in range(count):
        what = choose.choice(["group", "destroy", "own group", "mesh", "hybrid", "world", "part"])
        annotate = choose.choice(["replicate", "fully_shard"])
        ranks = choose.choice(SUBSETS)
        index = choose.randrange(len(held)) if held else -1
        done.append(f"{what} {annotate} {ranks}")
        if what == "group":
            held.append(dist.new_group(list(ranks)))
        elif what == "own group":
            # On one rank only: all others have a group less.
            held.append(dist.new_group([rank], use_local_synchronization=True) if rank == ranks[0] else None)
        elif what == "destroy" and held:
            group = held.pop(index)
            if isinstance(group, dist.ProcessGroup):
                dist.destroy_process_group(group)
        elif what == "mesh":
            init_device_mesh("cpu", (len(EVERYONE), 1), mesh_dim_names=("dp", "tp"))
        elif what == "hybrid":
            mesh = init_device_mesh("cpu", (len(EVERYONE), 1), mesh_dim_names=("replicate", "shard"))
            check("fully_shard", seed + 100 * number, EVERYONE, mesh)
        elif what == "world":
            check(annotate, seed + 100 * number, EVERYONE, None)
        elif what == "part" and not (MESHES_COUNT_GROUPS and any("own group" in one for one in done)):
            part = DeviceMesh("cpu", list(ranks))
            if rank in ranks:
                check(annotate, seed + 100 * number, ranks, part)
    # The watch tells ranks by such lists of names what to close.
    assert " ".join(groups_of_process()).split() == list(groups_of_process())
    return done


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_that_make_and_destroy_groups_train_as_one_process(seed: int) -> None:
    run_threads(run_program, len(EVERYONE), seed, 8)


def test_such_programs_train_as_one_process_on_gloo() -> None:
    run_ranks(run_program, len(EVERYONE), 1, 8, timeout_s=120)


def make_with_few_files(call: str, seed: int) -> list[str]:
    """Annotate and train while one rank may open only few more files; return how each attempt ended."""
    choose = random.Random(seed)
    rank, told = dist.get_rank(), []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    set_divergence_timeout(0.5)
    for left in (choose.randrange(8), choose.randrange(16), 500):
        few = choose.randrange(2)
        opened = max(int(name) for name in os.listdir("/proc/self/fd"))
        # Numbers below that are free would be taken too.
        filled = [os.dup(0) for _ in range(opened + 1 - len(os.listdir("/proc/self/fd")))]
        opened = max(opened, *filled, 0)
        if rank == few:
            resource.setrlimit(resource.RLIMIT_NOFILE, (opened + left, limits[1]))
        try:
            check(call, seed, (0, 1), None)
            told.append("right")
        except DesyncError as error:
            told.append(str(error).replace(f"rank {few}", "the rank with few files"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for one in filled:
                os.close(one)
    return told


def test_a_sharded_model_needs_no_files_where_one_rank_may_open_no_more() -> None:
    assert run_ranks(make_with_few_files, 2, "fully_shard", 1) == [["right"] * 3] * 2


def test_a_group_that_one_rank_cannot_make_is_an_error_on_all_that_names_it() -> None:
    every = [*zip(*run_ranks(make_with_few_files, 2, "replicate", 1), strict=True)]
    for texts in every:
        if texts != ("right", "right"):
            for text in texts:
                assert text.startswith("a process group was not made: "), texts
                assert "    the rank with few files: raised OSError: " in text and "ulimit -n" in text, texts
    assert 0 < every.count(("right", "right")) < len(every)


def make_without_the_other(call: str) -> None:
    if dist.get_rank():
        os._exit(3)
    check(call, 0, (0, 1), None)


@pytest.mark.parametrize("call", ["replicate", "fully_shard"])
def test_a_rank_that_has_ended_is_named_where_a_group_is_made(call: str) -> None:
    with pytest.raises(RankErrors) as caught:
        run_ranks(make_without_the_other, 2, call)
    assert "waiting for rank 1" in str(caught.value.errors[0])


def wait_for_nobody() -> float:
    """Return how long a wait lasts in a group that was made like another one."""
    set_divergence_timeout(0.1)
    made = make_group((0, 1), dist.new_group(timeout=datetime.timedelta(seconds=2)))
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        made.recv([torch.zeros(1)], 1 - dist.get_rank(), 7).wait()
    return time.monotonic() - start


def test_ranks_wait_in_a_group_as_long_as_in_the_one_it_is_like() -> None:
    # Not only as long as for the group to be made: a rank may compile, or evaluate, for minutes.
    assert min(run_ranks(wait_for_nobody, 2)) > 1.9

"""The end of a rank is told to the ranks that wait for it at once, not when the process has ended."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from composable import fully_shard, replicate
from composable.errors import explain
from tests.forked import Forked
from tests.world import on_ranks

# Rank 1 stays alive, in a thread or in what Python calls at exit: what others hear cannot come from the end of a process.
RANK = """
    import atexit, sys, threading
    import torch, torch.distributed as dist
    from torch import nn
    from composable import ComposableError, fully_shard, replicate, save_checkpoint

    rank, store, call, place = int(sys.argv[1]), *sys.argv[2:]
    if rank == 1 and place in ("exit", "end"):
        atexit.register(sys.stdin.readline)

    def reached(here):
        if (rank, here) != (1, place):
            return
        if place == "exit":
            sys.exit(3)
        threading.Thread(target=sys.stdin.readline).start()
        if place == "name":
            model.module
        raise ValueError("out of luck")

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = {"fully_shard": fully_shard, "replicate": replicate}[call](nn.Sequential(nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_state_dict_pre_hook(lambda *_: reached("save"))
    step = 0
    model[0].register_forward_pre_hook(lambda *_: reached("forward") if step == 1 else None)
    for step in range(1, 4):
        if step == 3:
            reached("between")
            reached("name")
            reached("exit")
            if place == "all" or (rank, place) == (1, "end"):
                break
        try:
            model(torch.ones(2, 4)).sum().backward()
            if step == 2:
                save_checkpoint(f"{store}-run", step, model, optimizer)
        except ComposableError as error:
            print(error.what.splitlines()[0], error.at, error.fix, sep="; ", flush=True)
            sys.exit(1)
"""


@contextmanager
def two_ranks(tmp_path: Path, *arguments: str) -> Iterator[list[Forked]]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    ranks = [Forked(RANK, rank, tmp_path / "store", *arguments, **pipes) for rank in range(2)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


@pytest.mark.parametrize("place", ["forward", "save", "between"])
@pytest.mark.parametrize("call", ["fully_shard", "replicate"])
def test_an_exception_that_ends_a_rank_is_told_at_once(call: str, place: str, tmp_path: Path) -> None:
    with two_ranks(tmp_path, call, place) as (first, second):
        told, _ = first.communicate(timeout=120)
        if place == "save":
            assert told == "another rank raised ValueError: out of luck; rank 1; None\n"
        else:
            assert told.endswith("; rank 1 has ended by ValueError: out of luck; start again from a checkpoint\n")
        assert second.poll() is None
        _, shown = second.communicate("\n", timeout=120)
        assert shown.rstrip().endswith("ValueError: out of luck")
        assert [first.returncode, second.returncode] == [1, 1]


@pytest.mark.parametrize("call", ["fully_shard", "replicate"])
def test_a_name_of_torchs_wrappers_that_ends_a_rank_is_told_with_what_to_write(call: str, tmp_path: Path) -> None:
    with two_ranks(tmp_path, call, "name") as (first, second):
        assert "has ended by AttributeError: " in first.communicate(timeout=120)[0]
        _, shown = second.communicate("\n", timeout=120)
        assert "has no attribute 'module'" in shown
        assert shown.rstrip().endswith("fix: there is no wrapper: write model for model.module")


@pytest.mark.parametrize("annotate", [fully_shard, replicate])
@on_ranks(1)
def test_an_annotated_module_has_no_name_of_torchs_wrappers_but_what_it_serves(annotate: Any) -> None:
    model = annotate(nn.Linear(2, 2))
    for name in (
        "module",
        "no_sync",
        "join",
        "summon_full_params",
        "optim_state_dict",
        "_get_ddp_logging_data",
        "wait",
    ):
        assert not hasattr(model, name) or (annotate, name) == (replicate, "no_sync")
        if not hasattr(model, name):
            with pytest.raises(AttributeError) as caught:
                getattr(model, name)
            explain(caught.value)
            assert str(caught.value).endswith(f" for model.{name}") == (name != "wait")
    with pytest.raises(AttributeError) as caught:
        _ = nn.Linear(2, 2).module
    explain(caught.value)
    assert "wrapper" not in str(caught.value)


@pytest.mark.parametrize(("place", "code"), [("exit", 3), ("end", 0)])
@pytest.mark.parametrize("call", ["fully_shard", "replicate"])
def test_the_ranks_that_wait_for_one_that_leaves_are_told_at_once(
    call: str, place: str, code: int, tmp_path: Path
) -> None:
    with two_ranks(tmp_path, call, place) as (first, second):
        told, _ = first.communicate(timeout=120)
        assert "rank 0, waiting for rank 1; rank 1 has ended by sys.exit, or at the end of its program; " in told
        assert second.poll() is None
        assert second.communicate("\n", timeout=120) == ("", "")
        assert [first.returncode, second.returncode] == [1, code]


@pytest.mark.parametrize("call", ["fully_shard", "replicate"])
def test_ranks_that_end_together_say_nothing(call: str, tmp_path: Path) -> None:
    with two_ranks(tmp_path, call, "all") as ranks:
        assert [(*rank.communicate(timeout=120), rank.returncode) for rank in ranks] == [("", "", 0)] * 2

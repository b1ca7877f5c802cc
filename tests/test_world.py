"""The pool of ranks that other tests stand on: results, isolation, failures, hangs."""

import os
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from composable.errors import ConfigError
from tests.world import RankErrors, run_ranks


def sum_of_ranks(scale: int, *, offset: int = 0) -> tuple[int, int, int]:
    total = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), scale * int(total) + offset


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_returns_its_result_in_rank_order(world_size: int) -> None:
    total = world_size * (world_size + 1) // 2
    expected = [(rank, world_size, 10 * total + 1) for rank in range(world_size)]
    assert run_ranks(sum_of_ranks, world_size, 10, offset=1) == expected


def state_of_process() -> tuple[int, float, bool, torch.dtype, int]:
    seen = (
        os.getpid(),
        torch.rand(()).item(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
    )
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2)
    return seen


def test_tasks_share_processes_and_start_from_the_same_state() -> None:
    first = run_ranks(state_of_process, 2)
    assert run_ranks(state_of_process, 2) == first
    (pid, *state), (other_pid, *other_state) = first
    assert pid != other_pid
    assert pid != os.getpid()
    assert state == other_state
    assert state[1:] == [True, torch.float32, 1]


# Failures


def raise_everywhere() -> None:
    dist.barrier()
    raise ConfigError("the layout is wrong", at="somewhere", fix="do better")


def test_errors_of_all_ranks_arrive_as_they_were_raised() -> None:
    with pytest.raises(RankErrors, match=r"(?s)ranks 0, 1, 2: .*in raise_everywhere.*the layout is wrong") as caught:
        run_ranks(raise_everywhere, 3)
    assert sorted(caught.value.errors) == [0, 1, 2]
    for error in caught.value.errors.values():
        assert isinstance(error, ConfigError)
        assert error.fix == "do better"


def raise_on_one_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("only here")
    dist.barrier()


def test_a_failing_rank_does_not_make_the_others_hang() -> None:
    with pytest.raises(RankErrors, match="only here") as caught:
        run_ranks(raise_on_one_rank, 2, 1)
    assert isinstance(caught.value.errors[1], ValueError)
    assert run_ranks(sum_of_ranks, 2, 1) == [(0, 2, 3), (1, 2, 3)]


def warn() -> None:
    warnings.warn("beware", stacklevel=1)


def expect_what_is_not_raised() -> None:
    with pytest.raises(ValueError, match="never"):
        pass


def return_what_cannot_be_pickled() -> object:
    return lambda: None


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (warn, "UserWarning: beware"),
        (expect_what_is_not_raised, "DID NOT RAISE"),
        (return_what_cannot_be_pickled, "pickle"),
    ],
)
def test_whatever_goes_wrong_on_a_rank_is_an_error_with_its_text(program: Callable[[], object], text: str) -> None:
    with pytest.raises(RankErrors, match=text) as caught:
        run_ranks(program, 1)
    assert text.rpartition(": ")[2] in str(caught.value.errors[0])


def exit_on_one_rank() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def test_a_rank_whose_process_dies_is_an_error() -> None:
    with pytest.raises(RankErrors, match="exit code 7") as caught:
        run_ranks(exit_on_one_rank, 2)
    assert isinstance(caught.value.errors[1], ChildProcessError)
    assert run_ranks(sum_of_ranks, 1, 1) == [(0, 1, 1)]


def wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), src=1)


def test_a_hang_fails_with_the_stacks_of_the_ranks_that_hang() -> None:
    # The time limit below is for processes that run already.
    run_ranks(sum_of_ranks, 2, 1)
    with pytest.raises(RankErrors, match=r"(?s)rank 0: .*has not finished after 3 s.*in wait_for_nobody") as caught:
        run_ranks(wait_for_nobody, 2, timeout_s=3)
    assert isinstance(caught.value.errors[0], TimeoutError)
    assert run_ranks(sum_of_ranks, 2, 1) == [(0, 2, 3), (1, 2, 3)]

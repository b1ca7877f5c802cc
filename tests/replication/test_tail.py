"""What ranks tell each other behind the last bucket, and what is said of it."""

import pytest
import torch

from composable.replication.complaints import backward_error
from composable.replication.tail import Report, Tail


def added_up(*told: tuple[list[bool] | None, int]) -> torch.Tensor:
    """Return the sum of the tails that the ranks write, for two parameters."""
    total = torch.zeros(2 + len(told))
    for rank, (used, complaint) in enumerate(told):
        tail = torch.full((2 + len(told),), 7.0)
        Tail(2, rank, len(told)).write(tail, used, complaint)
        total += tail
    return total


def test_nothing_is_reported_where_nobody_complains() -> None:
    total = added_up((None, 0), ([True, False], 0))
    assert Tail(2, 0, 2).read(total) is None
    assert total.tolist() == [2, 1, 0, 0]


def test_every_rank_reads_who_complains_and_how_many_had_each_gradient() -> None:
    total = added_up((None, 0), ([True, False], 1), ([False, False], -1))
    for rank in range(3):
        assert Tail(2, rank, 3).read(total) == Report(used=[2, 1], complaints=[0, 1, -1])


@pytest.mark.parametrize(
    ("missing", "others", "stopped", "hook_failed", "lines"),
    [
        (["a"], [], [], [], ["backward ended without a gradient for 1 parameter: 'a'", "last gradient"]),
        (["a", "b"], [2], [], [], ["for 2 parameters: 'a', 'b'", "last gradient", "    so did rank 2"]),
        ([], [1, 2], [], [], ["ranks 1, 2 ended backward without a gradient for 'c'"]),
        ([], [1], [2], [], ["rank 1 ended backward without a gradient for 'c'", "rank 2 did not finish backward"]),
        ([], [], [2], [], ["rank 2 did not finish backward: an exception stopped it there"]),
        ([], [], [], [0], ["rank 0 got no averages of the right dtype and shape from the communication hook"]),
    ],
)
def test_an_error_names_what_is_missing_here_before_what_is_missing_elsewhere(
    missing: list[str], others: list[int], stopped: list[int], hook_failed: list[int], lines: list[str]
) -> None:
    error = backward_error(missing, "z", ["c"], others, stopped, hook_failed)
    found = error.what.splitlines()
    assert len(found) == len(lines), error
    assert all(part in line for part, line in zip(lines, found, strict=True)), error
    assert error.fix is not None and ("find_unused_parameters" in error.fix) == bool(missing or others)

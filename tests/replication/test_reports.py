"""What ranks tell each other behind the last bucket, and what is said of it."""

import pytest
import torch

from composable.replication import ReducedParam
from composable.replication.reports import FlagBlock, Report, round_error

NUMEL = 2
RANKS = [0, 1, 2]
LAST = "    the last module to get a gradient: 'x' on ranks 0, 1, none on rank 2"


def added_up(
    *told: tuple[list[bool] | None, int, int | None], numel: int = NUMEL, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the sum of the tails that the ranks write."""
    tails = [FlagBlock(numel, rank, len(told)) for rank in range(len(told))]
    total = torch.zeros(tails[0].numel, dtype=dtype)
    for tail, (used, complaint, last) in zip(tails, told, strict=True):
        written = torch.full((tail.numel,), 7.0, dtype=dtype)
        tail.write(written, used, complaint, last)
        total += written
    return total


def test_every_rank_reads_who_complains_and_how_many_had_each_gradient_and_which_was_the_last() -> None:
    total = added_up((None, 0, 1), ([True, False], 1, 0), ([False, False], -1, None))
    for rank in range(3):
        assert FlagBlock(NUMEL, rank, 3).read(total) == Report(
            used=[2, 1], complaints=[0, 1, -1], last=[1, 0, None], runs=[1, 1, 1]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_last_of_many_parameters_is_read_in_any_dtype(dtype: torch.dtype) -> None:
    numel = 70_000
    for first in (0, 254, 255, 256, 65_534, 65_535, 69_999):
        total = added_up((None, 0, first), ([False] * numel, 3, None), numel=numel, dtype=dtype)
        report = FlagBlock(numel, 1, 2).read(total)
        assert report is not None and report.last == [first, None]


def test_what_a_rank_says_of_itself_is_that_of_the_running_round() -> None:
    total = added_up((None, 0, 1), ([True, False], 0, 0))
    assert FlagBlock(NUMEL, 0, 2).read(total) is None and total.tolist() == [2, 1, 0, 0, 1, 1, 2, 1]
    tail = FlagBlock(NUMEL, 0, 1)
    written = torch.empty(tail.numel)
    for complaint, last in [(1, 0), (0, 0), (0, 1), (2, None)]:
        tail.write(written, [True, True], complaint, last)
        report = tail.read(written)
        assert (report is None) == (complaint == 0)
        assert report is None or (report.complaints, report.last) == ([complaint], [last])
        assert written.tolist()[-1] == (0 if last is None else last + 1)


@pytest.mark.parametrize("counts", [(1, 2), (2, 2), (1, 0), (300, 299), (40, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ranks_that_ran_different_numbers_of_times_read_so(dtype: torch.dtype, counts: tuple[int, int]) -> None:
    blocks = [FlagBlock(NUMEL, rank, 2) for rank in range(2)]
    total = torch.zeros(blocks[0].numel, dtype=dtype)
    for block, count in zip(blocks, counts, strict=True):
        written = torch.empty(block.numel, dtype=dtype)
        block.write(written, None, 0, 1, count)
        total += written
    told = [min(count, 256) for count in counts]
    # A rank that follows the others has none.
    is_uneven = told[0] != told[1] and 0 not in told
    for block in blocks:
        report = block.read(total)
        assert (report is not None) is is_uneven
        assert report is None or (list(report.runs) == told and report.is_out_of_step and not report.is_error)


@pytest.mark.parametrize(
    ("missing", "others", "stopped", "hook_failed", "lines"),
    [
        (["a"], [], [], [], ["backward ended without a gradient for 1 parameter: 'x.a'", "last gradient", LAST]),
        (["a", "b"], [2], [], [], ["for 2 parameters: 'x.a', 'x.b'", "last gradient", "    so did rank 2", LAST]),
        ([], [1, 2], [], [], ["ranks 1, 2 ended backward without a gradient for 'x.c'", LAST]),
        (
            [],
            [1],
            [2],
            [],
            ["rank 1 ended backward without a gradient for 'x.c'", "rank 2 did not finish backward", LAST],
        ),
        ([], [], [2], [], ["rank 2 did not finish backward: an exception stopped it there", LAST]),
        ([], [], [], [0], ["rank 0 got no averages of the right dtype and shape from the communication hook"]),
    ],
)
def test_an_error_names_what_is_missing_here_before_what_is_missing_elsewhere(
    missing: list[str], others: list[int], stopped: list[int], hook_failed: list[int], lines: list[str]
) -> None:
    names = ["x.a", "x.b", "x.c", "x.z"]
    params = [ReducedParam(name, torch.nn.Parameter(torch.empty(0))) for name in names]
    complaints = [
        1 if rank in others else -1 if rank in stopped else -2 if rank in hook_failed else 0 for rank in RANKS
    ]
    indices = [names.index(f"x.{name}") for name in missing]
    report = Report(used=[3, 3, 2, 3], complaints=complaints, last=[3, 3, None])
    # Where something is missing here, this rank tells of its own last gradient, 'z' too.
    error = round_error(params, indices, 3, report, RANKS, 0, None, RANKS, "")
    found = error.what.splitlines()
    assert len(found) == len(lines), error
    assert all(part in line for part, line in zip(lines, found, strict=True)), error
    assert error.fix is not None and ("find_unused_parameters" in error.fix) == bool(missing or others)

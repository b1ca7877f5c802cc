"""What ranks tell each other behind the last bucket."""

import pytest
import torch

from composable.replication.reports import FlagBlock, Report

NUMEL = 2


def added_up(*told: tuple[list[bool] | None, int, int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the sum of the flags that the ranks write."""
    blocks = [FlagBlock(NUMEL, rank, len(told)) for rank in range(len(told))]
    total = torch.zeros(blocks[0].numel, dtype=dtype)
    for block, values in zip(blocks, told, strict=True):
        written = torch.full((block.numel,), 7.0, dtype=dtype)
        block.write(written, *values)
        total += written
    return total


def test_every_rank_reads_who_complains_and_how_many_had_each_gradient() -> None:
    total = added_up((None, 0, 1), ([True, False], 1, 1), ([False, False], -1, 1))
    for rank in range(3):
        assert FlagBlock(NUMEL, rank, 3).read(total) == Report(used=[2, 1], complaints=[0, 1, -1], runs=[1, 1, 1])
    assert FlagBlock(NUMEL, 0, 2).read(added_up((None, 0, 1), ([True, False], 0, 1))) is None


@pytest.mark.parametrize("counts", [(1, 2), (2, 2), (1, 0), (300, 299), (40, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_that_ran_different_numbers_of_times_read_so(dtype: torch.dtype, counts: tuple[int, int]) -> None:
    total = added_up(*((None, 0, count) for count in counts), dtype=dtype)
    told = [min(count, 256) for count in counts]
    report = FlagBlock(NUMEL, 1, 2).read(total)
    # A rank that follows the others has none.
    assert (report is not None) is (told[0] != told[1] and 0 not in told)
    assert report is None or list(report.runs) == told

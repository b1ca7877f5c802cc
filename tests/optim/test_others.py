"""Optimizers of torch and of other packages do on sharded models what ``examples/clients/optimizers.md`` says of each class."""

import pytest

from tools.optimizer_sweep import PACKAGES, PAGE, judge, kinds_of, rows_of

ROWS = rows_of(PAGE.read_text())


def kinds_or_skip(package: str) -> list[str]:
    try:
        return kinds_of(package)
    except ModuleNotFoundError:
        pytest.skip(f"{PACKAGES[package]} is not installed")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_class_that_a_package_exports_has_a_row(package: str) -> None:
    # To write it anew: python -m tools.optimizer_sweep
    assert kinds_or_skip(package) == sorted(key for key in ROWS if key.rpartition(".")[0] == package)


@pytest.mark.parametrize("key", ROWS)
def test_an_optimizer_does_what_its_row_says(key: str) -> None:
    kinds_or_skip(key.rpartition(".")[0])
    row, found = ROWS[key], judge(key)
    assert (found.verdict, found.reason, found.resumed) == (row.verdict, row.reason, row.resumed)

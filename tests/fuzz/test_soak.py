"""Nothing grows with the number of steps. A thousand of them: ``python -m tests.fuzz.soak``."""

import math

import pytest

from tests.fuzz.soak import SITUATIONS, soak


@pytest.mark.parametrize("name", SITUATIONS)
def test_nothing_grows(name: str) -> None:
    # In this process other tests have left objects that come and go: those are counted on processes.
    assert soak(name, 12).growth(most_objects_a_step=math.inf) == []


@pytest.mark.parametrize("name", ["replicate in sharded", "deep copies, mixed", "annotate, unannotate, mixed"])
def test_nothing_grows_on_processes(name: str) -> None:
    assert soak(name, 10, in_processes=True).growth() == []

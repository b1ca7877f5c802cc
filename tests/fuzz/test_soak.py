"""Nothing grows with the number of steps. A thousand of them: ``python -m tests.fuzz.soak``."""

import pytest

from tests.fuzz.soak import SITUATIONS, soak


@pytest.mark.parametrize("name", SITUATIONS)
def test_nothing_grows(name: str) -> None:
    assert soak(name, 8)[0] == []

"""Nothing grows with the number of steps. A thousand of them: ``python -m tools.fuzz.soak``."""

import pytest

from tools.fuzz.soak import SITUATIONS, soak


@pytest.mark.parametrize("name", SITUATIONS)
def test_nothing_grows(name: str) -> None:
    assert soak(name, 8)[0] == []

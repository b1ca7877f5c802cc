"""Tests under real launchers run only where a command line names them, as ``make launchers`` does."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return None if any("launchers" in one for one in config.args) else True

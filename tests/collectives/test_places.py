"""Tests composable/collectives/places.py: what other ranks are told of where this process is."""

from pathlib import Path
from typing import Any

import pytest
import torch

import composable
from composable.collectives.places import place_here


def text_from(file: Path) -> str:
    """Return what a process is said to do while code of ``file`` runs."""
    found: dict[str, Any] = {}
    exec(compile("def work(call):\n    return call()", str(file), "exec"), found)
    text: str = found["work"](place_here).text
    return text


@pytest.mark.parametrize("module", [torch, composable])
@pytest.mark.parametrize("ending", ["vision", "_other"])
def test_a_package_whose_name_begins_like_one_of_the_librarys_is_the_users(module: Any, ending: str) -> None:
    package = Path(module.__file__).resolve().parent
    other = package.with_name(f"{package.name}{ending}")
    assert text_from(other / "ops.py").endswith("; now at ops.py:2, in work")
    assert "ops.py" not in text_from(package / "ops.py")

"""The rows of tests/behaviours.md: what the library promises, and which tests prove it."""

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGE", "ROWS", "Row", "is_there", "proved", "rows_of"]

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "tests" / "behaviours.md"
LINK = re.compile(r"\[`(\w+)`\]\(([\w/.]+)\)")


class Row(NamedTuple):
    """One behaviour."""

    name: str  # what it is called, in torch's words where it has any
    rule: str  # what holds
    tests: tuple[str, ...] = ()  # names of test functions after the path below ``tests/``, which prove it
    gap: str = ""  # what is missing, and why: it begins with "not yet" or "not here:". Empty where nothing is.


def proved(path: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{path}::{name}" for name in names)


def rows_of(page: str) -> list[Row]:
    """Read the rows of all tables of the page."""
    rows = []
    for line in page.splitlines():
        if line.startswith("| ") and not line.startswith("| What |"):
            name, rule, proof = re.split(r"(?<!\\) \| ", line.removeprefix("| ").removesuffix(" |"))
            tests = tuple(f"{path}::{test}" for test, path in LINK.findall(proof))
            rows.append(Row(name, rule, tests, LINK.sub("", proof).strip("; ")))
    return rows


ROWS = rows_of(PAGE.read_text())


@functools.cache
def tests_of(path: Path) -> frozenset[str]:
    """Return the names of the test functions of a file, without importing it; none if there is no file."""
    if not path.exists():
        return frozenset()
    body = ast.parse(path.read_text()).body
    return frozenset(one.name for one in body if isinstance(one, ast.FunctionDef) and one.name.startswith("test_"))


def is_there(test: str) -> bool:
    """Say whether a test function exists."""
    path, _, name = test.partition("::")
    return name in tests_of(ROOT / "tests" / path)

"""The first tier of the core, where the other rooms are gone: no promise of the core needs one of them.

Ranks that are threads need ``composable.testing``; here all are processes. A test that asks for a room is left out.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tests.tiers
from tools.size import OUTSIDE

REPO = Path(__file__).resolve().parent.parent
FOLDERS = ("composable", "tests", "tools", "benchmarks", "examples", "docs")
# Their ranks have to be threads of this process, or they are about the whole package.
NOT_OF_THE_CORE = (
    *("test_left_out.py::test_what_is_run_again", "test_cost_per_handle.py::test_a_model_of_more_handles_uses_no_more"),
    *("test_replicate_graphs.py::test_a_static_graph_is_logged", "test_notebook.py::", "test_migrating.py::"),
    *(f"{file}::" for file in tests.tiers.FILES),
)
_ASKS = re.compile(rf"No module named 'composable\.(__main__|{'|'.join(sorted(OUTSIDE))})'")
# The last frame before the error is one of the core, but not the names at the top: then the core has asked.
_CORE_ASKS = re.compile(r"composable/(?!__init__\.py)[\w/]+\.py\W[^\n]*\n[^\n]*\n(E +)?ModuleNotFoundError")
# Of 174 today.
LEAST = 160
LIMIT_S = 1500


def needs_a_room(report: str) -> bool:
    """Say whether a test has failed since it, and not the core, asks for a room that is gone."""
    return _ASKS.search(report) is not None and _CORE_ASKS.search(report) is None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    if report.failed and needs_a_room(str(report.longrepr)):
        report.outcome, report.longrepr = "passed", None
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed and needs_a_room(report.longreprtext):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, "needs another room")
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not any(part in item.nodeid for part in NOT_OF_THE_CORE)]


def test_the_first_tier_of_the_core_passes_without_the_other_rooms(tmp_path: Path) -> None:
    def ignored(folder: str, names: list[str]) -> set[str]:
        others = {*OUTSIDE, "__main__.py"} if folder == str(REPO / "composable") else set()
        return {"__pycache__", *others}

    for name in FOLDERS:
        shutil.copytree(REPO / name, tmp_path / name, ignore=ignored)
    for path in filter(Path.is_file, REPO.iterdir()):
        shutil.copy(path, tmp_path)
    command = [sys.executable, "-m", "tests.test_core_alone", "-q", "--tier", "first", "--tb=short"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    found = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert found.returncode == 0, found.stdout[-8000:] + found.stderr[-2000:]
    passed = re.search(r"(\d+) passed", found.stdout)
    assert passed is not None and int(passed[1]) >= LEAST, found.stdout[-500:]


# What an editable installation knows stands elsewhere; also in the processes that this one starts.
if str(Path.cwd()) == str(REPO) and not (REPO / "composable" / "runs").exists():
    sys.meta_path[:] = [one for one in sys.meta_path if "Editable" not in str(one)]
if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:], plugins=[sys.modules[__name__], tests.tiers]))

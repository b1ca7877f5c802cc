"""The reference shows every public name once, with an example that runs, and the site has every page on one shelf."""

import re
import runpy
from pathlib import Path

import composable
import composable.testing
from tests.test_docs import PAGES, run_blocks
from tests.world import run_ranks

ROOT = Path(__file__).parent.parent
SITE = runpy.run_path(str(ROOT / "docs" / "site" / "reference.py"))
GROUPS, SHELVES = SITE["GROUPS"], SITE["SHELVES"]
TOPICS = [topic for group in GROUPS for topic in group.topics]
EXAMPLES = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "examples").glob("*.py"))}


def test_every_public_name_stands_in_one_group() -> None:
    for module in (composable, composable.testing):
        shown = [name for group in GROUPS if group.module == module.__name__ for name in group.names]
        assert sorted(shown) == sorted(module.__all__)


def test_every_page_stands_on_one_shelf() -> None:
    shelved = [f"docs/{name}.md" for names in SHELVES.values() for name in names]
    assert sorted([*shelved, "docs/README.md"]) == sorted(PAGES)


def test_each_example_uses_the_names_that_it_is_shown_for() -> None:
    assert sorted(topic.example for topic in TOPICS) == sorted(EXAMPLES)
    absent = [
        name for topic in TOPICS for name in topic.names if not re.search(rf"\b{name}\b", EXAMPLES[topic.example])
    ]
    assert absent == []


def run_each(sources: dict[str, str]) -> list[str]:
    """Run each program by itself, and return their names."""
    for name, source in sources.items():
        try:
            run_blocks([source])
        except Exception as error:
            raise AssertionError(f"docs/examples/{name}.py") from error
    return list(sources)


def test_every_example_runs_on_two_ranks() -> None:
    # What simulates ranks does so in a process that is none.
    simulated = {name: source for name, source in EXAMPLES.items() if "composable.testing" in source}
    on_ranks = {name: source for name, source in EXAMPLES.items() if name not in simulated}
    assert run_each(simulated) and run_ranks(run_each, 2, on_ranks) == [list(on_ranks)] * 2


def test_the_pages_of_the_reference_are_those_of_the_names() -> None:
    found = {str(path): text for path, text in SITE["pages"]()}
    names = [name for group in GROUPS for name in group.names]
    groups = [f"reference/groups/{group.page}.md" for group in GROUPS]
    assert sorted(found) == sorted(["reference/index.md", *groups, *(f"reference/{name}.md" for name in names)])

"""The reference shows every public name once, with an example that runs, and the site has every page in one part."""

import dataclasses
import inspect
import re
import runpy
import sys
from pathlib import Path

import pytest

import composable
import composable.rehearsal
import composable.testing
from tests.test_docs import PAGES, run_blocks
from tests.world import run_ranks

ROOT = Path(__file__).parent.parent
SITE = runpy.run_path(str(ROOT / "docs" / "site" / "reference.py"))
GROUPS, PARTS = SITE["GROUPS"], SITE["PARTS"]
TOPICS = [topic for group in GROUPS for topic in group.topics]
EXAMPLES = {path.stem: path.read_text() for path in sorted((ROOT / "docs" / "examples").glob("*.py"))}


def test_every_public_name_stands_in_one_group() -> None:
    for module in (composable, composable.testing, composable.rehearsal):
        shown = [name for group in GROUPS if group.module == module.__name__ for name in group.names]
        assert sorted(shown) == sorted(module.__all__)


@pytest.mark.parametrize("name", ["as_torch_shards", "bucketing_backend"])
def test_a_name_that_is_gone_says_what_to_write(name: str) -> None:
    with pytest.raises(ImportError, match=f"there is no composable.{name}: (write|set) "):
        getattr(composable, name)


def arguments_of(value: object) -> list[str]:
    """Return the arguments of a function, or of a class that is data."""
    if not isinstance(value, type):
        return list(inspect.signature(value).parameters)  # type: ignore[arg-type]  # a function
    return [one.name for one in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []


def test_the_docstring_of_each_name_says_what_each_argument_is() -> None:
    unsaid = []
    for group in GROUPS:
        for name in group.names:
            value = getattr(sys.modules[group.module], name)
            text = inspect.getdoc(value) or ""
            said = set(re.findall(r"^ {4}\*{0,2}(\w+): ", text, flags=re.MULTILINE))
            if "; otherwise like ``" not in text:
                unsaid += [f"{name}: {argument}" for argument in arguments_of(value) if argument not in said]
    assert unsaid == []


def test_every_page_stands_in_one_part() -> None:
    placed = [f"docs/{name}.md" for names in PARTS.values() for name in names]
    assert sorted([*placed, "docs/README.md"]) == sorted(PAGES)


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
    outside = ("composable.testing", "composable.rehearsal")
    simulated = {name: source for name, source in EXAMPLES.items() if any(room in source for room in outside)}
    on_ranks = {name: source for name, source in EXAMPLES.items() if name not in simulated}
    assert run_each(simulated) and run_ranks(run_each, 2, on_ranks) == [list(on_ranks)] * 2


def test_the_pages_of_the_reference_are_those_of_the_names() -> None:
    found = {str(path): text for path, text in SITE["pages"]()}
    names = [name for group in GROUPS for name in group.names]
    groups = [f"reference/groups/{group.page}.md" for group in GROUPS]
    assert sorted(found) == sorted(["reference/index.md", *groups, *(f"reference/{name}.md" for name in names)])

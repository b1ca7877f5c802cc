"""What the pages under ``docs/`` show and list is so: code runs, links lead somewhere, no file is missing."""

import re
from pathlib import Path

from tests.test_architecture import EDGES, FILES, TREES, find_imports, own_files, room_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in sorted(DOCS.rglob("*.md"))}
TOUR = PAGES["docs/design.md"].partition("\n## A tour")[2].partition("\n## ")[0]


def files_of_the_tour() -> list[str]:
    """Return the files in the first column of the tour's tables, as modules, in its order."""
    rows = re.findall(r"^\| `([\w/]+)\.py` \| .+ \|$", TOUR, flags=re.MULTILINE)
    names = [row if row == "_traversal_utils" else f"composable.{row.replace('/', '.')}" for row in rows]
    return [name.removesuffix(".__init__") for name in names]


def folders_of_the_tour() -> list[str]:
    return re.findall(r"^### `(\w+)/`", TOUR, flags=re.MULTILINE)


def test_the_tour_names_every_file_once_and_none_that_is_gone() -> None:
    # A folder's `__init__` is the folder's heading.
    folders = {f"composable.{folder}" for folder in folders_of_the_tour()}
    assert sorted([*files_of_the_tour(), *folders]) == sorted(FILES)


def test_a_file_of_the_tour_needs_nothing_that_comes_after_it() -> None:
    seen = {f"composable.{folder}" for folder in folders_of_the_tour()}  # their headings; their files count
    early = []
    for name in files_of_the_tour():
        seen.add(name)
        for target in sorted({file for found in find_imports(TREES[name]) for file in own_files(found)}):
            # What is taken from a folder may be in any of its files.
            needed = [file for file in FILES if file == target or file.startswith(f"{target}.")]
            early += [f"{name} stands before {file}" for file in needed if file not in seen]
    assert early == []


def test_the_folders_of_the_tour_are_in_layer_order() -> None:
    rooms = list(dict.fromkeys(room_of(name) for name in files_of_the_tour()))
    early = [(room, other) for place, room in enumerate(rooms) for other in rooms[place + 1 :] if other in EDGES[room]]
    assert early == []

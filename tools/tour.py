"""The tour of files in docs/inside/design.md, in layer order: `python -m tools.tour` writes it from the files' docstrings."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.test_architecture import EDGES, FILES, FOLDERS, OPEN_FOLDERS, TREES, find_imports, own_files, room_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "inside" / "design.md"
START, STOP = "\n## A tour, in layer order\n", "\n## "
INTRODUCTION = """
Public names stand at the top of `composable/`, their inside in folders. Other code imports from a folder's `__init__`,
never from a file inside it; only `ground/` is imported file by file. A file needs only files before it on this list.
`tests/test_architecture.py` holds the table of allowed imports. `python -m tools.tour` writes the list from docstrings.
"""


def rooms_in_order() -> list[str]:
    """Return the folders and top-level files so that each comes after what it may import."""
    done: list[str] = []
    while left := [room for room in EDGES if room and room not in done]:
        done += [room for room in left if EDGES[room] - {""} <= {*done, room}]
    return done


def files_in_order(room: str) -> list[str]:
    """Return the files of a room so that each comes after what it imports."""
    left = [name for name in FILES if (room_of(name) == room and name != f"composable.{room}") or name == room]
    left = left or [f"composable.{room}"]
    needs = {name: {file for one in find_imports(TREES[name]) for file in own_files(one)} for name in left}
    done: list[str] = []
    while rest := [name for name in left if name not in done]:
        done.append(next(name for name in rest if not needs[name] & ({*rest} - {name})))
    return done


def first_line(name: str) -> str:
    """Return the first line of a file's docstring."""
    docstring = ast.get_docstring(TREES[name])
    assert docstring, name
    return docstring.partition("\n")[0].replace("``", "`")


def lines_of_the_tour() -> Iterator[str]:
    """Yield the list of files as Markdown."""
    rooms = rooms_in_order()
    for room in rooms:
        is_folder = room in FOLDERS | OPEN_FOLDERS
        if is_folder or room == rooms[0] or rooms[rooms.index(room) - 1] in FOLDERS | OPEN_FOLDERS:
            yield ""
        if is_folder:
            yield from (f"### `{room}/`", "", first_line(f"composable.{room}"), "")
        elif room == rooms[0] or rooms[rooms.index(room) - 1] in FOLDERS | OPEN_FOLDERS:
            yield from ("### At the top", "")
        for name in files_in_order(room):
            path = name.removeprefix("composable.").replace(".", "/") + ".py"
            yield f"- `{path}`: {first_line(name)}"


def written(page: str) -> str:
    """Return the page with the list of now."""
    before, _, rest = page.partition(START)
    after = rest[rest.index(STOP) :]
    return before + START + INTRODUCTION + "\n".join(lines_of_the_tour()) + "\n" + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

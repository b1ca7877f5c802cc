"""The pictures of the docs are those that the code draws, and each stands on a page."""

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "pictures"
PICTURES = sorted(FOLDER.glob("*.svg"))


def test_the_code_draws_the_pictures_that_are_there(tmp_path: Path) -> None:
    for source in ("draw.py", "shapes.py"):
        (tmp_path / source).write_text((FOLDER / source).read_text())
    subprocess.run([sys.executable, tmp_path / "draw.py"], check=True, env={"PYTHONPATH": str(ROOT)}, cwd=tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    # Times differ in each run of the other one, docs/pictures/timeline.py.
    assert drawn == {path.name: path.read_text() for path in PICTURES if path.stem != "timeline"}


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_says_what_it_shows_and_stands_on_a_page(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None and title.text and root.get("role") == "img" and root.get("viewBox")
    pages = [page.read_text() for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/inside/*.md"))]
    assert any(re.search(rf"!\[[^]]+\]\((docs/|\.\./)?pictures/{path.name}\)", page) for page in pages)

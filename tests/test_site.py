"""The site, as a reader uses it: a search in a browser finds the page of a name, and that says what its docstring says.

Takes the site that ``make docs`` has built, if it is newer than what it is made of; else builds one.
"""

import functools
import html
import importlib.util
import inspect
import re
import shutil
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import composable

ROOT = Path(__file__).parent.parent
BUILT = ROOT / "build" / "site"
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--virtual-time-budget=10000", "--dump-dom"),
)


def is_up_to_date() -> bool:
    """Say whether the site is there, and newer than pages, settings, examples and docstrings."""
    index = BUILT / "index.html"
    sources = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.*"), *(ROOT / "composable").rglob("*.py")]
    return index.exists() and index.stat().st_mtime > max(source.stat().st_mtime for source in sources)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the site."""
    if is_up_to_date():
        return BUILT
    if importlib.util.find_spec("sphinx") is None or importlib.util.find_spec("myst_parser") is None:
        pytest.skip("needs the extra docs: make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "docs/site/build.py", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class Quiet(SimpleHTTPRequestHandler):
    """Writes no line for each request."""

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served, on this machine alone."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def browse(tmp_path: Path) -> Callable[[str], str]:
    """A function that returns a page as a browser has it once scripts have run."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")

    def dump(url: str) -> str:
        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", url]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    return dump


def text_of(source: str) -> str:
    """Return the words of HTML."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", "", source)).split())


@pytest.mark.parametrize("name", ["fully_shard", "save_checkpoint", "HandleOptions"])
def test_a_search_for_a_name_finds_its_page(name: str, address: str, browse: Callable[[str], str]) -> None:
    results = browse(f"{address}search.html?q={name}").partition('<ul class="search"')[2]
    first = re.search(r'<a href="([^"]+)"', results)
    assert first, "no results"
    page = browse(urllib.parse.urljoin(address, html.unescape(first[1])))
    documented = inspect.getdoc(getattr(composable, name)) or ""
    sentence = documented.partition("\n\n")[0].replace("``", "").replace("\n", " ")
    assert sentence in text_of(page)


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loading = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["'](?:https?:)?//[^"']+""")
    found = {(path.name, tag) for path in site.rglob("*.html") for tag in loading.findall(path.read_text())}
    assert found == set()


def test_a_page_of_each_kind_is_there(site: Path) -> None:
    pages = (
        "docs/README",
        "docs/train",
        "README",
        "CONTRIBUTING",
        "reference/index",
        "reference/no_sync",
        "parts/migrate",
    )
    assert [page for page in pages if not (site / f"{page}.html").is_file()] == []
    assert "docs/README.html" in (site / "index.html").read_text()

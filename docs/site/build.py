"""Builds the site: ``python docs/site/build.py FOLDER``; warnings are errors, and nothing is fetched.

The pages are copied into a folder of their own, with the pages of the reference, of the parts, and of each source
file that a page links to. Links between them stay as they are on GitHub.
"""

import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from reference import PARTS, pages
from sphinx.cmd.build import main as run_sphinx

ROOT = Path(__file__).resolve().parents[2]
# Pages outside of docs/.
OTHERS = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/inside/design.md", "docs/inside/notes.md")
OTHERS += ("docs/inside/life_of_a_step.md", "docs/inside/tensors.md")
OTHERS += (
    "examples/README.md",
    "examples/clients/README.md",
    "examples/clients/models.md",
    "examples/clients/optimizers.md",
    "benchmarks/results/README.md",
)
OTHERS += ("examples/from_ddp/README.md", "examples/launchers/README.md", "tests/testing/clients/README.md")
TABLES = ("docs/site/fsdp_methods.md", "docs/site/operations.md", "docs/site/torch_changes.md")
TABLES += ("docs/site/replicate_arguments.md",)  # in the reference
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")
LANGUAGES = {".py": "python", ".md": "markdown", ".toml": "toml", ".txt": "text", ".sh": "sh", ".yaml": "yaml"}


def write_sources(folder: Path) -> None:
    """Write all that Sphinx reads into an empty folder.

    Raises:
        SystemExit: A page of docs/ is in no part, or a page of a part is not there.
    """
    found = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"README"}
    placed = [name for names in PARTS.values() for name in names]
    if wrong := sorted(found.symmetric_difference(placed)):
        sys.exit(f"pages of docs/ and PARTS in docs/site/reference.py differ: {', '.join(wrong)}")
    texts = {Path(name): (ROOT / name).read_text() for name in (*OTHERS, *TABLES)}
    texts |= {Path("docs", f"{name}.md"): (ROOT / "docs" / f"{name}.md").read_text() for name in (*placed, "README")}
    for path in list(texts):
        texts[path] = LINK.sub(lambda match, path=path: _linked(match[1], path, texts), texts[path])
    for title, names in PARTS.items():
        texts[Path("parts", f"{title.lower()}.md")] = f"# {title}\n\n{_toctree(f'/docs/{name}' for name in names)}"
    entries = [*(f"/parts/{title.lower()}" for title in PARTS), "/reference/index", "/parts/project"]
    texts[Path("docs/README.md")] += "\n" + _toctree(entries, ":hidden:")
    others = _toctree(f"/{name.removesuffix('.md')}" for name in OTHERS)
    texts[Path("parts/project.md")] = f"# Project\n\n{others}"
    texts |= {Path(path): text for path, text in pages()}
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    for name in ("examples", "pictures"):
        if (ROOT / "docs" / name).is_dir():
            shutil.copytree(ROOT / "docs" / name, folder / "docs" / name)


def _linked(target: str, page: Path, texts: dict[Path, str]) -> str:
    """Return what a link leads to on the site; a source file that is linked gets a page."""
    path = (ROOT / page.parent / target).resolve()
    if path == ROOT / "docs" / "site" / "reference.py":
        return os.path.relpath("reference/index.md", page.parent)  # the pages that it makes
    if not path.is_relative_to(ROOT) or path.suffix == ".svg" or path.suffix == ".png" or not path.is_file():
        return target
    name = path.relative_to(ROOT)
    if name in texts and name.suffix == ".md":
        return target
    shown = Path(f"{name}.md")
    fence = "`````"
    head = f"---\norphan: true\nnosearch: true\n---\n# {name}\n\n{fence}{LANGUAGES.get(name.suffix, 'text')}\n"
    texts[shown] = f"{head}{path.read_text()}{fence}\n"
    return f"{target}.md"


def _toctree(entries: object, *options: str) -> str:
    return "\n".join(["```{toctree}", *(options or (":maxdepth: 1",)), "", *entries, "```", ""])


def build(site: Path) -> int:
    """Build the site in a folder, and return the exit status of Sphinx."""
    with tempfile.TemporaryDirectory() as folder:
        sources = Path(folder, "sources")
        write_sources(sources)
        shutil.rmtree(site, ignore_errors=True)
        options = ["-W", "--keep-going", "-q", "-j", "auto", "-b", "html", "-d", str(Path(folder, "read"))]
        status = run_sphinx([*options, "-c", str(Path(__file__).parent), str(sources), str(site)])
    if status == 0:
        to_index = '<meta http-equiv="refresh" content="0; url=docs/README.html">'
        (site / "index.html").write_text(f'<!doctype html>{to_index}<a href="docs/README.html">torch-composable</a>\n')
        print(f"{len(list(site.rglob('*.html')))} pages; open {site / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]).resolve()))

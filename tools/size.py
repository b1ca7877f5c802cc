"""Counts the package by its folders: lines that carry code, and tokens a line.

    python -m tools.size
    python -m tools.size --against HEAD~10

Blank lines, comments and docstrings are free, so nobody wins a line by leaving one out. Tokens a line tell where lines
have only become longer.
"""

import argparse
import io
import subprocess
import tokenize
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
PACKAGE = ("composable", "_traversal_utils.py")
# What a reader of the core need not carry: users may delete these folders, and training works.
OUTSIDE = frozenset(("commands", "extras", "rehearsal", "runs", "testing"))
_FREE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
_BEFORE_DOCSTRINGS = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


class Size(NamedTuple):
    """Of a file, or of files together.

    Attributes:
        code: Lines on which a token of code stands.
        tokens: Tokens of code.
    """

    code: int
    tokens: int


def size_of(source: str) -> Size:
    """Return the size of one file's text."""
    lines: set[int] = set()
    tokens, before = 0, tokenize.NEWLINE
    for one in tokenize.generate_tokens(io.StringIO(source).readline):
        is_docstring = one.type == tokenize.STRING and before in _BEFORE_DOCSTRINGS
        if one.type not in _FREE and not is_docstring:
            lines.update(range(one.start[0], one.end[0] + 1))
            tokens += 1
        if one.type not in (tokenize.COMMENT, tokenize.NL):
            before = one.type
    return Size(len(lines), tokens)


def folder_of(path: str) -> str:
    """Return the folder of the package in which a file is counted; empty for files at the top."""
    parts = Path(path).parts
    if parts[-1] == "__main__.py":
        return "commands"
    return parts[1] if len(parts) > 2 else ""


def sizes(sources: Mapping[str, str]) -> dict[str, Size]:
    """Return the size of each folder, of ``core``, of ``outside`` and of the ``package``, given texts by path."""
    code: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for path, source in sources.items():
        size, folder = size_of(source), folder_of(path)
        for room in (folder or "(top)", "outside" if folder in OUTSIDE else "core", "package"):
            code[room] += size.code
            tokens[room] += size.tokens
    return {room: Size(code[room], tokens[room]) for room in code}


def sources_now() -> dict[str, str]:
    """Return the texts of the package's files by path."""
    paths = [REPO / "_traversal_utils.py", *sorted((REPO / "composable").rglob("*.py"))]
    return {str(path.relative_to(REPO)): path.read_text() for path in paths}


def sources_at(commit: str) -> dict[str, str]:
    """Return the texts that the package's files had at a commit."""
    names = _git("ls-tree", "-r", "--name-only", commit, *PACKAGE).splitlines()
    return {name: _git("show", f"{commit}:{name}") for name in names if name.endswith(".py")}


def _git(*args: str) -> str:
    return subprocess.run(["git", "-C", str(REPO), *args], check=True, capture_output=True, text=True).stdout


def table(now: Mapping[str, Size], then: Mapping[str, Size]) -> Iterable[str]:
    """Yield the lines of the printed table."""
    yield f"{'folder':14}{'code':>8}{'tokens/line':>13}" + (f"{'then':>8}{'change':>8}" if then else "")
    sums = ("core", "outside", "package")
    for room in (*sorted({*now, *then} - set(sums)), *sums):
        size, before = now.get(room, Size(0, 0)), then.get(room, Size(0, 0))
        row = f"{room:14}{size.code:>8,}{size.tokens / max(size.code, 1):>13.1f}"
        yield row + (f"{before.code:>8,}{size.code - before.code:>+8,}" if then else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", help="compare with a commit")
    args = parser.parse_args()
    print("\n".join(table(sizes(sources_now()), sizes(sources_at(args.against)) if args.against else {})))


if __name__ == "__main__":
    main()

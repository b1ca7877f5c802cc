"""Scripts of `DistributedDataParallel` users and the lines of each that change: the data of examples/from_ddp/README.md.

The scripts lie in ``examples/from_ddp``. Each is written for the wrapper, and leaves a ``model`` and ``losses``. A line that
changes is followed by a comment, `# -> ` and what stands in its place with `replicate`; nothing after the arrow means that the
line goes.

python -m tools.from_ddp      # writes the page
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples" / "from_ddp").glob("*.py"))
PAGE = ROOT / "examples" / "from_ddp" / "README.md"

ARROW = re.compile(r"(?:^|  )# ->(.*)$")


@dataclass(frozen=True)
class Change:
    """One line with the wrapper, and with `replicate`; empty where it goes."""

    there: str
    here: str


@dataclass(frozen=True)
class Script:
    """A script in both forms."""

    path: Path  # its file
    there: str  # its text with the wrapper
    here: str  # its text with `replicate`
    changes: tuple[Change, ...]  # the lines that differ, in order

    @property
    def changed(self) -> list[Change]:
        """What changes beside the import."""
        return [change for change in self.changes if not change.there.startswith("from ")]

    @property
    def is_renaming(self) -> bool:
        """Whether nothing changes but the wrapper's name."""
        return all(re.sub(r"\w*DDP\(", "replicate(", change.there) == change.here for change in self.changed)

    @property
    def about(self) -> str:
        """The first line of its docstring."""
        return self.there.split('"""')[1]


def read(path: Path) -> Script:
    """Return a script in both forms."""
    there: list[str] = []
    here: list[str] = []
    changes: list[Change] = []
    for line in path.read_text().splitlines():
        found = ARROW.search(line.strip())
        if found is None:
            there.append(line)
            here.append(line)
            continue
        if line.strip().startswith("#"):
            old = here.pop()
        else:
            old = line.partition("  # ->")[0]
            there.append(old)
        indent = old[: len(old) - len(old.lstrip())]
        new = found[1].strip()
        here += [indent + new] if new else []
        changes.append(Change(old.strip(), new))
    return Script(path, "\n".join(there) + "\n", "\n".join(here) + "\n", tuple(changes))


BEGIN, END = "<!-- begin: scripts, by python -m tools.from_ddp -->\n", "<!-- end -->\n"
RENAMED = "In these scripts only the name `DDP` becomes `replicate`:\n\n"
HEAD = """
In these scripts other lines change too:

| Script | Before | After |
|---|---|---|
"""


def link_to(script: Script) -> str:
    """Return the name of a script, which leads to it, and what the script is."""
    return f"[{script.path.stem}]({script.path.name}): {script.about}"


def rows_of(script: Script) -> list[str]:
    """Return a row for each line that changes; the first says what the script is."""
    cells = [(f"`{change.there}`", f"`{change.here}`" if change.here else "removed") for change in script.changed]
    return [f"| {' | '.join([' ' if row else link_to(script), *pair])} |\n" for row, pair in enumerate(cells)]


def page() -> str:
    """Return the page with its list and its table as the scripts have them: those that need least come first."""
    scripts = sorted((read(path) for path in SCRIPTS), key=lambda script: len(script.changed))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    items = "".join(f"- {link_to(script)}\n" for script in scripts if script.is_renaming)
    table = HEAD + "".join(row for script in scripts if not script.is_renaming for row in rows_of(script))
    return before + BEGIN + RENAMED + items + table + END + rest.partition(END)[2]


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()

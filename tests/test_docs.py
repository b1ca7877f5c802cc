"""What the pages under ``docs/`` show and list is so: code runs, links lead somewhere, no file is missing."""

import contextlib
import inspect
import io
import json
import re
import subprocess
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from composable import ReplicateOptions, UsageError, fully_shard, plan, replicate
from tests.provoked import messages
from tests.test_architecture import FILES, FOLDERS, OPEN_FOLDERS
from tests.world import run_ranks
from tools.tour import lines_of_the_tour, written

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(ROOT)): page.read_text() for page in sorted(DOCS.glob("*.md"))}
# For those who work on the library.
INSIDE = {str(page.relative_to(ROOT)): page.read_text() for page in sorted((DOCS / "inside").glob("*.md"))}
# Words beside code in the README and the pages: nobody finishes what only grows.
MOST_WORDS = 27_000


def words_beside_code(text: str) -> int:
    return len(re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE).split())


def test_the_pages_stay_short_enough_to_read() -> None:
    counts = {name: words_beside_code(text) for name, text in PAGES.items()}
    counts["README.md"] = words_beside_code((ROOT / "README.md").read_text())
    assert sum(counts.values()) <= MOST_WORDS, dict(sorted(counts.items(), key=lambda pair: -pair[1]))


def test_the_tour_is_that_of_the_files() -> None:
    assert INSIDE["docs/inside/design.md"] == written(INSIDE["docs/inside/design.md"]), "run python -m tools.tour"


def test_the_tour_names_every_file_and_none_needs_a_later_one() -> None:
    tour = list(lines_of_the_tour())
    names = [line.split("`")[1] for line in tour if line.startswith("- ")]
    paths = {name.removeprefix("composable.").replace(".", "/") + ".py" for name in FILES}
    assert set(names) == paths - {f"{folder}.py" for folder in FOLDERS | OPEN_FOLDERS} - {"composable.py"}


def test_every_argument_of_replicate_has_a_row() -> None:
    table = (DOCS / "site" / "replicate_arguments.md").read_text()
    firsts = re.findall(r"^\| (`.+?) \| ", table, flags=re.MULTILINE)
    rows = [name for first in firsts for name in re.findall(r"`(\w+)`", first)]
    rare = [field.name for field in fields(ReplicateOptions)]
    assert sorted(rows) == sorted([*inspect.signature(replicate).parameters, *rare])


def anchors_of(page: str) -> set[str]:
    """Return the anchors that headings get on a page."""
    headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "name",
    [
        *PAGES,
        *INSIDE,
        "README.md",
        "CHANGELOG.md",
        "HISTORY.md",
        "CONTRIBUTING.md",
        "examples/README.md",
        "examples/clients/README.md",
        "examples/clients/models.md",
        "examples/clients/optimizers.md",
        "examples/launchers/README.md",
        "docs/site/fsdp_methods.md",
        "docs/site/operations.md",
        "docs/site/replicate_arguments.md",
        "docs/site/torch_changes.md",
        "examples/from_ddp/README.md",
        "tests/testing/clients/README.md",
    ],
)
def test_the_links_of_a_page_lead_somewhere(name: str) -> None:
    text = re.sub(r"```.*?```", "", (ROOT / name).read_text(), flags=re.DOTALL)
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        if not target.exists() or (anchor and anchor not in anchors_of(target.read_text())):
            dead.append(link)
    assert dead == []


def test_the_index_lists_every_page_once() -> None:
    index = PAGES["docs/README.md"]
    listed = re.findall(r"^\| \[[^]]+\]\(([^)]+)\) \|", index, flags=re.MULTILINE)
    assert sorted(listed) == sorted(str(Path(page).relative_to("docs")) for page in PAGES if page != "docs/README.md")


# -- code that is shown


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Return each block of Python on a page, and the text block that follows it at once: what rank 0 prints."""
    return re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", (PAGES | INSIDE)[page], flags=re.DOTALL)


def run_blocks(sources: list[str]) -> list[str]:
    """Run the blocks of a page as one program, and return what each printed."""
    names: dict[str, object] = {"__name__": "__main__"}
    printed = []
    # The compiler asks every tensor for its gradient.
    warnings.filterwarnings("ignore", r"The \.grad attribute of a Tensor that is not a leaf", UserWarning)
    for number, source in enumerate(sources):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(source, f"block {number + 1}", "exec"), names)
        printed.append(out.getvalue())
    return printed


def run_program(sources: list[str]) -> list[str]:
    """Run the blocks of a page that makes and ends its own process group, in the group that is there."""
    with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
        return run_blocks(sources)


# Pages whose code runs on two ranks, as one program a page.
PROGRAMS = [
    *("checkpoints", "cluster", "comm_hooks", "experts", "from_fsdp1", "from_fsdp2", "inside/life_of_a_step", "memory"),
    *("meshes", "mixed_precision", "optimizers", "ragged", "recipes", "replicate", "torch", "uneven_inputs"),
    *("inside/tensors", "watch", "works_with"),
]
ON_FOUR_RANKS = ("experts", "meshes")


def test_all_code_that_is_shown_is_run() -> None:
    shown = {page.removeprefix("docs/").removesuffix(".md") for page in PAGES | INSIDE if blocks_of(page)}
    assert shown == {*PROGRAMS, "README", "rehearse", "resume", "testing", "train"}  # those five in tests of their own


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_code_of_a_page_runs_on_some_ranks_and_prints_what_follows_it(name: str) -> None:
    blocks = blocks_of(f"docs/{name}.md")
    printed = run_ranks(run_blocks, 4 if name in ON_FOUR_RANKS else 2, [source for source, _ in blocks])[0]
    assert printed == [expected for _, expected in blocks]


def test_the_first_page_shows_a_program_that_runs_and_prints_its_plan() -> None:
    ((source, expected),) = blocks_of("docs/README.md")
    assert "--nproc-per-node 2 " in source.partition("\n")[0]
    assert run_ranks(run_program, 2, [source])[0] == [expected]


# -- what importing changes

# Caches that torch fills when they are first asked, and a counter.
FILLED_BY_TORCH = {
    "torch._custom_class_base._FakeScriptObject_cls",
    "torch._opaque_base._FakeScriptObject_cls",
    "torch.jit._builtins._builtin_table",
    "torch.utils.hooks.RemovableHandle.next_id",
}

# Modules that the import loads are no change: they are there before the first look.
LIST_MODULES = """
import json, sys
from composable.saving.loads import _teach_torch_to_load  # as the first annotation does
_teach_torch_to_load()
print(json.dumps([name for name in sys.modules if name.startswith("torch.")]))
"""

FIND_CHANGES = """
import importlib, json, sys, types

for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
kept = []  # nothing that is freed may lend its id to something new


def look():
    found = {}

    def note(name, value):
        kept.append(value)
        parts = [id(value)]
        if isinstance(value, (list, tuple, set)):
            parts += [id(item) for item in value]
        elif isinstance(value, dict) and type(value).__module__ in ("builtins", "collections"):
            parts += [id(item) for pair in value.items() for item in pair if not isinstance(item, str)]
        elif type(value) is types.FunctionType:
            parts.append(id(value.__code__))
        found[name] = parts

    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "torch" and isinstance(module, types.ModuleType):
            for key, value in list(vars(module).items()):
                if key != "__builtins__":
                    note(f"{name}.{key}", value)
                if isinstance(value, type) and value.__module__.split(".")[0] == "torch":
                    for own, member in list(vars(value).items()):
                        note(f"{value.__module__}.{value.__qualname__}.{own}", member)
    return found


before = look()
from composable.saving.loads import _teach_torch_to_load
_teach_torch_to_load()
print(json.dumps({name: parts[0] for name, parts in look().items() if before.get(name) != parts}))
"""


def run_python(source: str, *values: object) -> Any:
    """Run ``source`` in a process of its own with ``values`` as arguments; return what it prints, all as JSON."""
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", source, *map(json.dumps, values)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_the_page_on_importing_names_everything_that_it_changes_in_torch() -> None:
    page = (DOCS / "site" / "torch_changes.md").read_text()
    listed = set(re.findall(r"^\| `(torch\.[\w.]+)` \|", page, flags=re.MULTILINE))
    names_of_object: dict[int, set[str]] = {}
    for name, identity in run_python(FIND_CHANGES, run_python(LIST_MODULES)).items():
        if name not in FILLED_BY_TORCH:
            names_of_object.setdefault(identity, set()).add(name)
    # A thing may be reached under several names; the page has one of them. What only some torches need stands below the table.
    named = set(re.findall(r"`(torch\.[\w.]+)`", page))
    assert [sorted(names) for names in names_of_object.values() if not names & named] == []
    assert listed - set().union(*names_of_object.values()) == set()


# -- messages


def test_troubleshooting_shows_messages_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    # torch 2.15 writes a number to rows by this operation.
    names = ("aten.index_fill_.int_Scalar", "aten.index_put_.default")
    raised, ungrouped = {name: text.replace(*names) for name, text in run_ranks(messages, 2)[0].items()}, []
    for annotate in (fully_shard, replicate):
        with pytest.raises(UsageError) as caught:
            annotate(nn.Linear(2, 2))
        ungrouped.append(f"UsageError: {caught.value}")
    said = {*raised.values(), *ungrouped, str(plan(model, world_size=2))}
    shown = re.findall(r"```text\n(.*?)\n```", PAGES["docs/troubleshooting.md"], flags=re.DOTALL)
    # Most are shown by their first line and what to do.
    lines = {text.partition("\n")[0] for text in shown}
    # How gloo gives up takes as long as its timeout.
    parts = [text for text in shown if "/gloo/" not in text]
    assert [text for text in parts if not any({*text.splitlines()} <= {*one.splitlines()} for one in said)] == []
    # The table of the page on `replicate` has first lines, cut off at names.
    rows = PAGES["docs/replicate.md"].partition("\n## Errors\n")[2].partition("\n## ")[0]
    firsts = [row.removesuffix(" ...") for row in re.findall(r"^\| `(.*)` \|", rows, flags=re.MULTILINE)]
    unsaid = [first for first in firsts if not any(f": {first}" in text for text in said)]
    # What another rank is told, proved in tests/test_replicate.py.
    assert [first for first in unsaid if not first.startswith("rank 1 ")] == []
    used = [
        name
        for name, text in raised.items()
        if any(f": {first}" in text for first in firsts) or text.partition("\n")[0] in lines
    ]
    assert sorted(used) == sorted(raised)

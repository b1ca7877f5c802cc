"""Holds the list of torch's private names against the installed torch, and the package against the list."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

import composable.torch_private as torch_private

REPO = Path(__file__).resolve().parent.parent
LIST_FILE = REPO / "composable" / "torch_private.py"
OTHER_FILES = [
    path for path in [REPO / "_traversal_utils.py", *sorted((REPO / "composable").rglob("*.py"))] if path != LIST_FILE
]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def has_private_part(dotted: str) -> bool:
    return any(is_private(part) for part in dotted.split("."))


def torch_names(tree: ast.AST) -> dict[str, str]:
    """Return what each name that an import binds to a part of torch stands for."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def private_uses(tree: ast.AST) -> list[tuple[int, str]]:
    """Return the private parts of torch that a file reaches through its imports, with their lines."""
    names = torch_names(tree)
    uses: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            uses += [(node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            uses += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute):
            parts: list[str] = []
            current: ast.expr = node
            while isinstance(current, ast.Attribute):
                parts.append(current.attr)
                current = current.value
            if isinstance(current, ast.Name) and current.id in names:
                uses.append((node.lineno, ".".join([names[current.id], *reversed(parts)])))
    return [(line, name) for line, name in uses if has_private_part(name)]


def lines_with_a_purpose(source: str) -> set[int]:
    """Return the lines that end in a comment, or stand below a line that is one."""
    lines = source.splitlines()
    purposes: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# --"):
            row = token.start[0]
            purposes.add(row + 1 if lines[row - 1].lstrip().startswith("#") else row)
    return purposes


def undocumented_uses(source: str) -> list[tuple[int, str]]:
    """Return the private uses in statements of which no line says what for."""
    tree = ast.parse(source)
    explained = lines_with_a_purpose(source)
    spans = [range(node.lineno, (node.end_lineno or node.lineno) + 1) for node in tree.body]
    return [
        (line, name)
        for line, name in private_uses(tree)
        if not any(line in span and explained & set(span) for span in spans)
    ]


@pytest.mark.parametrize("name", torch_private.__all__)
def test_a_listed_name_exists_in_the_installed_torch(name: str) -> None:
    assert getattr(torch_private, name) is not None


def test_the_list_is_sorted_and_has_no_name_twice() -> None:
    assert sorted(set(torch_private.__all__), key=str) == sorted(torch_private.__all__, key=str)


def test_every_private_name_of_torch_says_what_it_is_for() -> None:
    assert undocumented_uses(LIST_FILE.read_text()) == []


@pytest.mark.parametrize("path", OTHER_FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_other_files_reach_private_torch_through_the_list_only(path: Path) -> None:
    assert private_uses(ast.parse(path.read_text())) == []


@pytest.mark.parametrize("name", torch_private.__all__)
def test_a_listed_name_is_used(name: str) -> None:
    used = {
        alias.name
        for path in OTHER_FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "composable.torch_private"
        for alias in node.names
    }
    assert name in used


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch._utils import x",
        "from torch.distributed import _functional_collectives",
        "import torch\ntorch._foreach_copy_(a, b)",
        "from torch import nn\nnn.Module._call_impl",
        "import torch.distributed as dist\ndist._get_default_group()",
    ],
)
def test_a_private_use_is_seen(source: str) -> None:
    assert private_uses(ast.parse(source))


def test_a_use_without_a_purpose_is_seen() -> None:
    assert undocumented_uses("from torch._utils import x\n")
    assert not undocumented_uses("from torch._utils import x  # to do y\n")
    assert not undocumented_uses("# to do y\nfrom torch._utils import x\n")
    assert not undocumented_uses("from torch.x import y\n")

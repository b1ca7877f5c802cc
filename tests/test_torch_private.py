"""Holds the list of torch's private names against the installed torch, and the package against the list."""

import ast
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parent.parent
LIST_FILE = REPO / "composable" / "ground" / "torch_private.py"
OTHER_FILES = [
    path for path in [REPO / "_traversal_utils.py", *sorted((REPO / "composable").rglob("*.py"))] if path != LIST_FILE
]
# Read, not imported: this file says what is gone also where the package cannot be imported.
LIST = ast.parse(LIST_FILE.read_text())


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


def is_there(name: str) -> bool:
    """Say whether this torch has ``torch.a.b``, where any part may be a module, a class or what they hold."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        return all((found := getattr(found, part, None)) is not None for part in parts[length:])
    return False


def test_private_names_exist_in_the_installed_torch() -> None:
    names = {name for _, name in private_uses(LIST)}
    assert [name for name in sorted(names) if not is_there(name)] == [], f"not in torch {torch.__version__}"


def test_other_files_reach_private_torch_through_the_list_only() -> None:
    uses = {str(path.relative_to(REPO)): private_uses(ast.parse(path.read_text())) for path in OTHER_FILES}
    assert {path: found for path, found in uses.items() if found} == {}


def names_taken() -> set[str]:
    """Return what the files of the package import from the list."""
    return {
        alias.name
        for path in OTHER_FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "composable.ground.torch_private"
        for alias in node.names
    }


def names_listed(tree: ast.Module) -> Iterator[str]:
    """Yield what a file binds to a part of torch, and the functions that it makes of them."""
    for node in [one for outer in tree.body for one in (outer.body if isinstance(outer, ast.Try) else [outer])]:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            yield from map(ast.unparse, node.targets if isinstance(node, ast.Assign) else [node.target])


def test_every_listed_name_is_used_and_listed_once() -> None:
    assert [name for name, count in Counter(names_listed(LIST)).items() if count > 1] == []
    used_here = {node.id for node in ast.walk(LIST) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert {name for name in names_listed(LIST) if name != "_USED_BELOW"} - used_here - names_taken() == set()


def test_a_private_use_is_seen() -> None:
    for source in (
        *("import torch._C", "from torch._utils import x", "from torch.distributed import _functional_collectives"),
        "from torch import nn\nnn.Module._call_impl",
        "import torch.distributed as dist\ndist._get_default_group()",
    ):
        assert private_uses(ast.parse(source)), source


def test_a_torch_without_a_listed_name_is_refused_by_that_name() -> None:
    script = "import torch\ndel torch._C._will_engine_execute_node\nimport composable"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=REPO)
    error = done.stderr[done.stderr.rindex("composable.errors.UsageError") :]
    assert error.startswith(
        f"composable.errors.UsageError: torch {torch.__version__} lacks what this package needs: "
        "cannot import name '_will_engine_execute_node' from 'torch._C'"
    )
    assert error.endswith("\n  fix: install torch 2.11 to 2.15\n")

"""Holds the layers: what may import what, and who may register hooks."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPO = Path(__file__).resolve().parent.parent

# Lowest layer first; a file imports only from files listed above it.
LAYERS: dict[str, list[str]] = {
    "vocabulary": [
        "composable.errors",
        "composable.torch_private",
        "composable.contract",
        "composable.replacement",
        "_traversal_utils",
        "composable.policies",
        "composable.precision",
        "composable.offload",
        "composable.mesh",
        "composable.agreement",
        "composable.optimizer_groups",
        "composable.extent",
    ],
    "planning": [
        "composable.layout",
        "composable.ragged_spec",
        "composable.structure",
        "composable.plan",
        "composable.memory",
    ],
    "transport": [
        "composable.collectives.base",
        "composable.collectives.loop_threads",
        "composable.collectives.process_group",
        "composable.collectives.point_to_point",
        "composable.collectives.deferred",
        "composable.collectives",
        "composable.comm_hooks",
    ],
    "storage": [
        "composable.ragged_gather",
        "composable.ragged_elementwise",
        "composable.ragged_norms",
        "composable.ragged_dispatch",
        "composable.load_check",
        "composable.ragged_checkpoint",
        "composable.ragged",
        "composable.ragged_transfer",
        "composable.unfilled",
        "composable.sharded_param",
        "composable.flat_buffer",
        "composable.handle",
        "composable.broadcasts",
        "composable.bucket",
        "composable.reducer",
    ],
    "runtime": [
        "composable.scheduler",
        "composable.readiness",
        "composable.state",
        "composable.hooks",
        "composable.annotated_part",
        "composable.copies",
    ],
    "entries": [
        "composable.fsdp_module",
        "composable.materialize",
        "composable.fully_shard",
        "composable.replicate",
        "composable.gradient_sync",
        "composable.unannotate",
        "composable.optimizer_state",
        "composable.remembered_state",
        "composable.local_step",
        "composable.optimizer",
        "composable.clip",
        "composable.rebind",
        "composable.full_params",
        "composable.full_entries",
        "composable.state_dict",
        "composable.checkpoint_files",
        "composable.checkpoint_state",
        "composable.checkpoint_folder",
        "composable.export",
        "composable.safetensors_files",
        "composable",
    ],
    "testing": [
        "composable.testing.process_state",
        "composable.testing.baton",
        "composable.testing.exchange",
        "composable.testing.faults",
        "composable.testing.meetings",
        "composable.testing.process_group",
        "composable.testing.turns_of_threads",
        "composable.testing.torch_world",
        "composable.testing.stuck",
        "composable.testing.simulation",
        "composable.testing.parity",
        "composable.testing",
    ],
}
ORDER = [name for layer in LAYERS.values() for name in layer]

FORBIDDEN = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.nn.parallel")
HOOK_REGISTRATION = re.compile(r"_?register_\w*hook|queue_callback")
# The second file gives names to what torch has; it registers nothing of its own accord.
FILES_WITH_HOOKS = {"composable.hooks", "composable.torch_private"}


class Import(NamedTuple):
    """``module`` is the file or package that is read; ``names`` what is taken from it, empty for ``import module``."""

    line: int
    module: str
    names: tuple[str, ...]


def files_of_the_package() -> dict[str, Path]:
    paths = [REPO / "_traversal_utils.py", *sorted((REPO / "composable").rglob("*.py"))]
    names = [".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return dict(zip(names, paths, strict=True))


FILES = files_of_the_package()
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def find_imports(tree: ast.AST) -> Iterator[Import]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name, ())
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write the full name of the package"
            yield Import(node.lineno, node.module or "", tuple(alias.name for alias in node.names))


def own_files(found: Import) -> set[str]:
    """Return the files of the package that an import reads."""
    if found.module.split(".")[0] not in {"composable", "_traversal_utils"}:
        return set()
    submodules = {f"{found.module}.{name}" for name in found.names} & set(ORDER)
    if submodules and len(submodules) == len(found.names):
        return submodules
    return submodules | {found.module}


def dotted_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield every ``a.b.c`` of the source with its line."""
    for node in ast.walk(tree):
        parts: list[str] = []
        current: ast.AST = node
        while isinstance(current, ast.Attribute):
            parts.append(current.attr)
            current = current.value
        if isinstance(current, ast.Name):
            yield current.lineno, ".".join([current.id, *reversed(parts)])


def upward_imports(name: str, tree: ast.AST) -> list[str]:
    below = set(ORDER[: ORDER.index(name)])
    return [
        f"{name}:{found.line} imports {target}"
        for found in find_imports(tree)
        for target in sorted(own_files(found))
        if target not in below
    ]


def forbidden_names(name: str, tree: ast.AST) -> list[str]:
    used: list[tuple[int, str]] = []
    for found in find_imports(tree):
        used += [(found.line, found.module), *((found.line, f"{found.module}.{taken}") for taken in found.names)]
    used += dotted_names(tree)
    used += [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value
    ]
    return [
        f"{name}:{line} uses {text}"
        for line, text in used
        if any(text == banned or text.startswith(banned + ".") for banned in FORBIDDEN)
        or "DistributedDataParallel" in text
    ]


def hook_registrations(name: str, tree: ast.AST) -> list[str]:
    # Handing a registering function on is no registration; calling it is.
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = [
        (func.lineno, func.attr if isinstance(func, ast.Attribute) else func.id)
        for func in called
        if isinstance(func, ast.Attribute | ast.Name)
    ]
    return [f"{name}:{line} calls {text}" for line, text in names if HOOK_REGISTRATION.fullmatch(text)]


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_a_place_in_the_layers(name: str) -> None:
    assert name in ORDER, f"{name} is in no layer: add it to LAYERS where it belongs"


def test_a_file_has_one_place_in_the_layers() -> None:
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("name", [name for name in FILES if name in ORDER])
def test_a_file_imports_only_from_files_below_it(name: str) -> None:
    assert upward_imports(name, TREES[name]) == []


def test_imports_have_no_cycles() -> None:
    targets = {
        name: {target for found in find_imports(tree) for target in own_files(found)} for name, tree in TREES.items()
    }
    done: set[str] = set()
    while ready := {name for name in targets if name not in done and targets[name] & targets.keys() <= done}:
        done |= ready
    assert sorted(targets.keys() - done) == []


@pytest.mark.parametrize("name", FILES)
def test_no_file_uses_torchs_own_data_parallel_wrappers(name: str) -> None:
    assert forbidden_names(name, TREES[name]) == []


def test_the_traversal_imports_torch_and_contract_only() -> None:
    modules = {found.module for found in find_imports(TREES["_traversal_utils"])}
    assert modules <= {"torch", "composable.contract", "collections.abc", "typing"}


@pytest.mark.parametrize("name", FILES)
def test_the_traversal_is_imported_as_a_module(name: str) -> None:
    assert [found for found in find_imports(TREES[name]) if found.module == "_traversal_utils" and found.names] == []


@pytest.mark.parametrize("name", [name for name in FILES if name not in FILES_WITH_HOOKS])
def test_only_the_hooks_file_registers_hooks(name: str) -> None:
    assert hook_registrations(name, TREES[name]) == []


# The rules above are only as good as what they can see, so each is shown a file that breaks it.


@pytest.mark.parametrize(
    "source",
    [
        "import composable.handle",
        "from composable.handle import Handle",
        "from composable import handle",
        "from composable import fully_shard, errors",
        "import composable",
        "def late():\n    from composable.plan import plan",
        "if TYPE_CHECKING:\n    from composable.layout import FlatLayout",
    ],
)
def test_an_upward_import_is_seen(source: str) -> None:
    assert upward_imports("composable.layout", ast.parse(source))


@pytest.mark.parametrize(
    "source", ["from composable import errors", "import _traversal_utils", "import torch.nn as nn"]
)
def test_a_downward_import_is_allowed(source: str) -> None:
    assert upward_imports("composable.layout", ast.parse(source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed.fsdp",
        "from torch.distributed import fsdp",
        "from torch.distributed.fsdp._fully_shard import fully_shard",
        "from torch.distributed._composable import contract",
        "torch.distributed.fsdp.fully_shard(model)",
        "torch.nn.parallel.DistributedDataParallel(model)",
        "from torch.nn.parallel import DistributedDataParallel as DDP",
        "importlib.import_module('torch.distributed.fsdp')",
    ],
)
def test_a_forbidden_name_is_seen(source: str) -> None:
    assert forbidden_names("composable.handle", ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "module.register_forward_pre_hook(f)",
        "tensor.register_hook(f)",
        "param.register_post_accumulate_grad_hook(f)",
        "register_optimizer_step_pre_hook(f)",
        "module._register_state_dict_hook(f)",
        "Variable._execution_engine.queue_callback(f)",
        "torch.autograd.graph.register_multi_grad_hook(tensors, f)",
    ],
)
def test_a_hook_registration_is_seen(source: str) -> None:
    assert hook_registrations("composable.handle", ast.parse(source))

"""Holds the layers: what may import what, and who may register hooks."""

import ast
import functools
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from tools import size

REPO = Path(__file__).resolve().parent.parent

# What each folder and top-level file may import, besides torch. What is not listed has no place yet.
# Planning decides where, the engine owns what and decides when, comm moves bytes.
BASE = {"errors", "ground"}
EDGES: dict[str, set[str]] = {
    "errors": set(),
    "ground": {"errors"},
    "policies": BASE,
    "comm": BASE,
    "_traversal_utils": {"ground"},
    "planning": BASE | {"policies", "comm"},  # which transports there are, and what they say of themselves
    "dtensor": BASE | {"planning", "comm"},
    "engine": BASE | {"planning", "comm", "dtensor"},
    "features": BASE | {"planning", "comm", "dtensor", "engine"},
    "replication": BASE | {"comm", "planning", "dtensor", "engine", "features"},
    # The states of both annotations, on the engine of each.
    "annotation": BASE | {"_traversal_utils", "planning", "comm", "dtensor", "engine", "features", "replication"},
    "optim": BASE | {"_traversal_utils", "comm", "planning", "dtensor", "engine", "annotation", "replication"},
    "saving": BASE
    | {"_traversal_utils", "planning", "comm", "dtensor", "engine", "features", "annotation"}
    | {"optim", "replication"},
}
# With a face that shows what others take.
OUTER_ROOMS = ("runs", "extras", "testing", "rehearsal")
FOLDERS = {*"comm planning dtensor engine features annotation replication optim saving".split(), *OUTER_ROOMS}
# What others take file by file: there is no face that would import all of it.
OPEN_FOLDERS = {"ground", "commands"}
# What users call, and what it stands on among its own kind: it may import everything above.
ENTRIES: dict[str, set[str]] = {
    "activation_checkpoint": set(),
    "annotated_module": set(),
    "comm_hooks": set(),
    "fsdp_settings": {"annotated_module"},
    "fsdp_module": {"annotated_module", "fsdp_settings"},
    "fully_shard": {"fsdp_module"},
    "process_groups": {"annotated_module"},
    "replicate": {"replicate_module"},
    "replicate_module": {"annotated_module", "comm_hooks"},
    "token_means": {"annotated_module", "comm_hooks"},
    "unannotate": {"activation_checkpoint", "annotated_module", "fsdp_module", "replicate_module"},
}
EDGES |= {name: set(EDGES) | others for name, others in ENTRIES.items()}
# The rooms outside of the core, which training does not need: each may import the core and the rooms before it. None is
# imported by an earlier one: the package imports what they have at its first use.
CORE = set(EDGES)
for number, room in enumerate(OUTER_ROOMS):
    EDGES[room] = {"", *CORE, *OUTER_ROOMS[:number]}
EDGES[""] = {*CORE, *OUTER_ROOMS}  # composable/__init__.py
# The command line is a program on the package: it may import everything, from any file, a command when it is chosen,
# and nothing imports it.
EDGES["commands"] = set(EDGES)
EDGES["__main__"] = {"", "errors", "commands"}
PROGRAMS = {"commands", "__main__"}
# What training does not need: users import the file itself.
NEED_ANOTHER_PACKAGE = {"composable.extras.transformers"}
# Only these talk to other ranks, or name what does; the others name types, or this rank in a message.
FILES_THAT_COMMUNICATE = {"comm", "testing", "rehearsal"}
ANY = {"*"}
NAMES_OF_DIST = {
    "composable.errors": {"is_available", "is_initialized", "get_rank"},
    "composable.ground.torch_private": ANY,
    "composable.replication.exchange": {"get_debug_level"},
    "composable.dtensor.gather": {"get_debug_level"},
    "composable.commands.info": {"is_backend_available"},
}

FORBIDDEN = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.nn.parallel")
# Recognises them by name where users have put them around a model, and imports nothing.
# The second file says what to write where one is imported from here.
FILES_THAT_NAME_THEM = {"composable.ground.ownership", "composable"}
HOOK_REGISTRATION = re.compile(r"_?register_\w*hook|queue_callback")
# The second file gives names to what torch has; it registers nothing of its own accord.
FILES_WITH_HOOKS = {"composable.ground.torch_hooks", "composable.ground.torch_private"}


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


def room_of(name: str) -> str:
    """Return the folder or top-level file that a file or package of ours belongs to; empty for the package itself."""
    parts = name.split(".")
    return parts[0] if parts[0] != "composable" else (parts[1] if len(parts) > 1 else "")


def own_files(found: Import) -> set[str]:
    """Return the files of the package that an import reads."""
    if found.module.split(".")[0] not in {"composable", "_traversal_utils"}:
        return set()
    submodules = {f"{found.module}.{name}" for name in found.names} & set(FILES)
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


def forbidden_edges(name: str, tree: ast.AST) -> list[str]:
    """Return imports of a room that this one may not import, or of a file inside another folder."""
    room = room_of(name)
    found = []
    for line, target in ((found.line, target) for found in find_imports(tree) for target in sorted(own_files(found))):
        other = room_of(target)
        if other == room and room:
            continue
        if other not in EDGES[room]:
            found.append(f"{name}:{line} imports {target}, which {room or 'the package'} may not")
        elif target.count(".") > 1 and other not in OPEN_FOLDERS and room not in PROGRAMS:
            found.append(f"{name}:{line} imports {target}: take it from composable.{other}")
    return found


def collectives_used(name: str, tree: ast.AST) -> list[str]:
    """Return calls of ``torch.distributed`` beyond what a file that does not communicate may need."""
    permitted = NAMES_OF_DIST.get(name, set())
    return [
        f"{name}:{line} uses {dotted}"
        for line, dotted in dotted_names(tree)
        if dotted.startswith(("dist.", "torch.distributed."))
        and (last := dotted.split(".")[-1])
        and last not in permitted
        and permitted is not ANY
        and not last[0].isupper()
    ]


def forbidden_names(name: str, tree: ast.AST) -> list[str]:
    used: list[tuple[int, str]] = []
    for found in find_imports(tree):
        used += [(found.line, found.module), *((found.line, f"{found.module}.{taken}") for taken in found.names)]
    used += dotted_names(tree)
    if name in FILES_THAT_NAME_THEM:
        return [f"{name}:{line} uses {text}" for line, text in used if text.startswith(FORBIDDEN)]
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
    # Handing a registering function on is no registration; calling it is, but by the method that it overrides.
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = [func for func in called if not ast.unparse(func).startswith("super().")]
    names = [
        (func.lineno, func.attr if isinstance(func, ast.Attribute) else func.id)
        for func in called
        if isinstance(func, ast.Attribute | ast.Name)
    ]
    return [f"{name}:{line} calls {text}" for line, text in names if HOOK_REGISTRATION.fullmatch(text)]


def results_asked(name: str, tree: ast.AST) -> list[str]:
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "result"]
    return [f"{name}:{node.lineno} asks for a result" for node in nodes]


def names_taken_from_the_traversal(name: str, tree: ast.AST) -> list[str]:
    found = [one for one in find_imports(tree) if one.module == "_traversal_utils"]
    return [f"{name}:{one.line} imports {', '.join(one.names)}" for one in found if one.names]


# Rooms that stand in for what the core has: by names that it registers, not in the place of its methods.
STAND_INS = {*OUTER_ROOMS, "commands"}
_REPLACES = {"setattr", "delattr", "object", "replace_body"}  # ``mock.patch.object`` too.


def _named(node: ast.AST | None) -> str:
    text = ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""
    return "" if text.startswith(("dist.", "nn.", "torch.")) else text.rpartition(".")[2]


@functools.cache
def class_names() -> frozenset[str]:
    return frozenset(node.name for _, node in classes_of_the_package())


def methods_replaced(name: str, tree: ast.AST) -> list[str]:
    """Return assignments to attributes of classes of this package that stand in other files."""
    here = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    ours = {*class_names()} - here
    for node in ast.walk(tree):  # Other names of these classes.
        targets, given = [], list[ast.AST]()
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            given = [node.value]
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple | ast.List | ast.Set):
            targets, given = [node.target], list(node.iter.elts)
        elif isinstance(node, ast.alias) and node.asname and node.name in ours:
            ours.add(node.asname)
        if any(_named(one) in ours for one in given):
            ours |= {_named(one) for one in targets if isinstance(one, ast.Name)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and _named(node.value) in ours:
            found.append(f"{name}:{node.lineno} replaces {ast.unparse(node)}")
        if isinstance(node, ast.Call) and _named(node.func) in _REPLACES and node.args:
            first = node.args[0].value if isinstance(node.args[0], ast.Attribute) else node.args[0]
            if {_named(first), _named(node.args[0])} & ours:
                found.append(f"{name}:{node.lineno} replaces a method by {ast.unparse(node.func)}")
    return found


def values_asked_of_tensors(name: str, tree: ast.AST) -> list[str]:
    """Return places that know of tensors without values: the core asks ``Transport.carries_values``."""
    used = [(found.line, taken) for found in find_imports(tree) for taken in (found.module, *found.names)]
    used += dotted_names(tree)
    return [
        f"{name}:{line} uses {text}"
        for line, text in used
        if re.search(r"fake_?tensor|with_values|unset_fake", text, re.I)
    ]


def found_in(names: Iterable[str], rule: Callable[[str, ast.AST], list[str]]) -> list[str]:
    """Return every place in these files that breaks a rule."""
    return [place for name in names for place in rule(name, TREES[name])]


# The most lines of code, as `python -m tools.size` counts them. The core is what a reader must carry. A rise is a
# commit of its own, whose body says what went for it.
CEILINGS = {"core": 19_635, "runs": 1_692, "extras": 2_099, "testing": 1_462, "rehearsal": 2_088, "commands": 686}


def test_the_package_keeps_its_budget() -> None:
    now = size.sizes(size.sources_now())
    assert {room: now[room].code for room, most in CEILINGS.items() if now[room].code > most} == {}


def test_only_lines_that_carry_code_count() -> None:
    source = '"""Text."""\n\n# Why.\nvalue = (\n    1,  # One.\n)\n\n\ndef f() -> str:\n    """Text."""\n    return """a\nb"""\n'
    assert size.size_of(source) == size.Size(code=6, tokens=15)


def classes_of_the_package() -> Iterator[tuple[str, ast.ClassDef]]:
    for name, tree in TREES.items():
        yield from ((name, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def test_one_word_is_one_class() -> None:
    files: dict[str, list[str]] = {}
    for name, node in classes_of_the_package():
        files.setdefault(node.name, []).append(name)
    assert {word: names for word, names in files.items() if len(names) > 1} == {}


def test_what_a_constructor_gives_is_not_asserted() -> None:
    texts = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and ast.unparse(node.test).endswith("is not None")
    ]
    assert texts == []


# What this process remembers outside of objects that its users hold, each with its reason.
GLOBALS = {
    "comm.hang_watchdog._WATCH": "one thread looks after all groups",
    "comm.waits._RECORD": "what that thread looks at",
    "comm.mesh._MESHES_OF_HOSTS": "ranks make them together, so none ends when its users do",
    "comm.ranks._ANSWERS": "who answers for ranks that are not there, in a process that rehearses",
    "comm.ranks._KEPT": "groups that were made of others, which live as long",
    "comm.transport._REGISTERED": "the transports by name, filled by imports",
    "engine.paths._MAKERS": "where shards rest, in a process that rehearses",
    "ground.outer_rooms._FINDERS": "what other rooms do, filled by the package",
    "ground.unfilled._OTHERS": "what marks tensors without values, in a process that rehearses",
    "rehearsal.fake_files._held": "Python tells changes of files to what hears for the process",
    "comm_hooks._SERVED": "states of hooks that give no weak references",
    "dtensor.gather.RECORD": "dispatch has no other place to ask",
    "ground.ownership.CHANGES": "numbers to compare, in place of looking again",
    "ground.ownership._REGISTRATIONS": "torch's registration hooks are of the process",
    "ground.torch_hooks._ENDINGS": "backwards are of the process",
    "runs.checkpoint._SAVES": "saves that end after the call",
    "runs.run.PROCESS": "a process has one lock of a file, and one name in a storage",
    "testing.device_streams._SEEING": "torch's resize is changed for all who look",
    "testing.device_streams._SEEING_LOCK": "torch's resize is changed for all who look",
    "testing.simulation._SIMULATIONS": "torch is changed for one at a time",
}
_CHANGING = {"add", "append", "clear", "discard", "extend", "pop", "popitem", "setdefault", "update"}


@functools.cache
def stateful_classes() -> set[str]:
    """Return the classes whose objects change: a method other than a constructor assigns, or they hold what changes."""
    found = {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet", "count", "Lock", "local", "Counter"}
    for _, node in classes_of_the_package():
        for one in ast.walk(node):
            is_new = isinstance(one, ast.Call) and ast.unparse(one.func).rpartition(".")[2] in found
            is_kept = isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store)
            if is_new or (is_kept and isinstance(one.value, ast.Name) and one.value.id == "self"):
                found.add(node.name)
    return found


def globals_that_change(name: str, tree: ast.Module) -> Iterator[str]:
    classes = stateful_classes()
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        word = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        is_object = isinstance(node.value, ast.Call) and ast.unparse(node.value.func).rpartition(".")[2] in classes
        if is_object or any(_changes(one, word) for one in ast.walk(tree)):
            yield f"{name.removeprefix('composable.')}.{word}"


def _changes(node: ast.AST, word: str) -> bool:
    """Say whether ``word[...] = ``, ``word.add(...)`` or the like."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        return ast.unparse(node.value) == word
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGING
    return is_call and ast.unparse(node.func.value) == word  # type: ignore[attr-defined]  # a call of an attribute


# Made once and never changed.
CONSTANT_OBJECTS = {"fsdp_module._SWAP", "replicate_module._SWAP", "replicate_module._CASTING_SWAP"}


def test_the_process_remembers_what_is_listed() -> None:
    found = {word for name, tree in TREES.items() for word in globals_that_change(name, tree)}
    assert found - CONSTANT_OBJECTS == set(GLOBALS)


# Each is a setting that users choose by itself.
SETTINGS = {"HandleSettings": 6, "ReplicateArguments": 5, "Transport": 5}


def test_no_class_has_more_than_four_booleans() -> None:
    many = {}
    for _, node in classes_of_the_package():
        found = {
            ast.unparse(one.target)
            for one in node.body
            if isinstance(one, ast.AnnAssign) and ast.unparse(one.annotation) == "bool"
        }
        for one in ast.walk(node):
            if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant) and type(one.value.value) is bool:
                names = [name for target in one.targets for name in ast.walk(target) if isinstance(name, ast.Attribute)]
                found |= {name.attr for name in names if ast.unparse(name.value) == "self"}
        if len(found) > SETTINGS.get(node.name, 4):
            many[node.name] = found
    assert many == {}


# What makes code or objects of any class from bytes. Each place with the reason why no stranger decides what is made.
READERS = {
    "composable.commands.convert uses pickle": "the unpickler makes plain values and stand-ins, whatever the file names",
    "composable.runs.checkpoint uses pickle": "writes torch's description; and the class of an error",
    "composable.runs.pieces uses torch.load": "weights_only=True",
    "composable.saving.data uses pickle": "the classes of errors",
    "composable.saving.data uses torch.load": "weights_only=True",
    "composable.__main__ uses importlib.import_module": "a command, by its name in a table",
    "composable.rehearsal.rehearsed_script uses runpy": "the script that the user asks to run",
    "composable.rehearsal.rehearsed_script uses runpy.run_path": "the same",
    "composable.rehearsal.surroundings uses pickle": "objects that one rehearsed rank of a script sends to another",
    "composable.rehearsal.surroundings uses torch.load": "what a rehearsed script loads, with its own arguments",
    "composable.commands.plan uses importlib.import_module": "the model's module, which the user of the command names",
    "composable.runs.safetensors uses importlib.import_module": "the name of an extra that may be missing",
    "composable.testing.simulation uses ctypes.py_object": "stops a thread of this process",
}
UNSAFE = re.compile(
    r"(pickle|cPickle|_pickle|marshal|shelve|yaml|dill|cloudpickle|joblib|runpy|subprocess)(\..*)?"
    r"|(builtins\.)?(eval|exec|compile|__import__)|os\.(system|popen|exec.*|spawn.*)"
    r"|(np|numpy)\.load|torch\.(load|jit\.load|export\.load|hub\..*|package\..*)"
    r"|(.*\.)?(import_module|\w*_object|\w*_object_list|load_module|spec_from_file_location)"
)


def unsafe_reading(name: str, tree: ast.AST) -> list[str]:
    imported = [(one.line, path) for one in find_imports(tree) for path in (one.module, *one.names)]
    imported += [(one.line, f"{one.module}.{taken}") for one in find_imports(tree) for taken in one.names]
    called = [(node.lineno, node.id) for node in ast.walk(tree) if isinstance(node, ast.Name)]
    used = [*imported, *called, *dotted_names(tree)]
    return [
        f"{name} uses {text.split('.')[0] if 'pickle' in text else text}" for _, text in used if UNSAFE.fullmatch(text)
    ]


def test_nothing_that_others_write_is_made_into_code_or_objects() -> None:
    """Also read docs/security.md, which says the same of each file and port."""
    assert sorted(set(found_in(FILES, unsafe_reading))) == sorted(READERS)
    loads = [
        node
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load"
    ]
    assert loads and all("weights_only=True" in ast.unparse(node) for node in loads)


FEATURES = re.compile(r"(?i)joinable|is_joined|uneven|expert|offload|watchdog|hybrid|profil(?!er)|safetensors")


def features_named(name: str, tree: ast.AST) -> list[str]:
    names = [(node.lineno, node.id) for node in ast.walk(tree) if isinstance(node, ast.Name)]
    names += [(node.lineno, node.attr) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names += [(node.lineno, node.arg) for node in ast.walk(tree) if isinstance(node, ast.arg)]
    names += [(node.lineno, node.name) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [f"{name}:{line} names {text}" for line, text in names if FEATURES.search(text)]


def test_the_engine_names_no_feature() -> None:
    """It has doors: paths, listeners, and what goes together. Only whether torch's profiler runs it looks itself."""
    assert found_in([name for name in FILES if room_of(name) == "engine"], features_named) == []


# How often the engine and the annotations mention what only some models need: the numbers of today. A rise is a commit
# of its own, whose body says what went for it.
MENTIONS = {
    "secondary shards": (r"(?i)secondar", 99),
    "followers and leaders": (r"(?i)follower|leader", 60),
    "steppers": (r"(?i)stepper", 57),
    "deferral": (r"(?i)defer", 34),
    "deep copies": (r"(?i)deep.?cop|\bcopied\b|memo\b", 122),
    "kept gradients": (r"(?i)\bkept\b|kept_|\bkeeps?\b", 146),
    "graphs of backward": (r"(?i)create_graph|makes_graph|graph of backward", 14),
    "communication hooks": (r"(?i)comm_hook|communication hook", 30),
    "Join": (r"\bJoin\b|(?i:joined|idle_ranks)", 26),
}


@pytest.mark.parametrize("feature", MENTIONS)
def test_the_engine_and_the_annotations_mention_a_feature_no_more_often(feature: str) -> None:
    pattern, most = MENTIONS[feature]
    texts = [path.read_text() for name, path in FILES.items() if room_of(name) in {"engine", "annotation"}]
    assert sum(len(re.findall(pattern, text)) for text in texts) <= most


def test_the_doors_of_the_engine_are_narrow() -> None:
    doors = {"GradientPath": 4, "StepListener": 16, "NestedReplica": 1}  # a listener overrides what it needs
    methods = {
        node.name: len([one for one in node.body if isinstance(one, ast.FunctionDef)])
        for _, node in classes_of_the_package()
        if node.name in doors
    }
    assert methods.keys() == doors.keys()
    assert {name: count for name, count in methods.items() if count > doors[name]} == {}


TENSOR = re.compile(r"\b(Tensor|RaggedDTensor|DTensor|Parameter)\b")
SHAPE = re.compile(r"(?i)\[[^\]]*\]|shape|scalar|elements|numel|0-dim|dtype")


def functions_with_tensors() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield (place, function) for what others use of a file, takes or returns tensors, and has a docstring."""
    for name, tree in TREES.items():
        face = TREES.get(name.rpartition(".")[0], tree)
        shown = {text for found in find_imports(face) if found.module == name for text in found.names}
        # Of a file at the top, users may import anything; torch_private is a list of names.
        is_open = room_of(name) not in FOLDERS and name != "composable.ground.torch_private"
        for node in tree.body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not is_open and node.name not in shown:
                continue
            for one in [node] if isinstance(node, ast.FunctionDef) else node.body:
                if isinstance(one, ast.FunctionDef) and (one is node or not one.name.startswith("_")):
                    given = [*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs]
                    types = [*(each.annotation for each in given), one.returns]
                    if ast.get_docstring(one) and any(TENSOR.search(ast.unparse(each)) for each in types if each):
                        yield f"{name}:{one.lineno} {one.name}", one


def test_functions_with_tensors_state_shapes() -> None:
    found = dict(functions_with_tensors())
    silent = [place for place, one in found.items() if not SHAPE.search(ast.get_docstring(one) or "")]
    assert len(found) > 130
    assert len(silent) <= 0.05 * len(found), silent


def test_every_file_has_a_place_in_the_house_and_no_room_is_empty() -> None:
    assert {room_of(name) for name in FILES} == set(EDGES), "add each to EDGES where it belongs"
    folders = {path.parent.name for path in FILES.values() if path.parent.parent.name == "composable"}
    assert folders == FOLDERS | OPEN_FOLDERS


def test_a_file_imports_only_what_its_room_may() -> None:
    assert found_in(FILES, forbidden_edges) == []


def not_in_layers(needs: Mapping[str, set[str]]) -> list[str]:
    """Return what cannot be laid so that each needs only what comes before it."""
    done: set[str] = set()
    while ready := {name for name in needs if name not in done and needs[name] & needs.keys() <= done}:
        done |= ready
    return sorted(needs.keys() - done)


def test_imports_have_no_cycles() -> None:
    assert not_in_layers({room: others - {""} for room, others in EDGES.items()}) == []
    # A folder's face imports all of its files: between folders it stands for them.
    files = {name: {file for one in find_imports(tree) for file in own_files(one)} for name, tree in TREES.items()}
    # What the package gives at its first use, it imports inside of functions.
    files["composable"] = {file for one in find_imports(at_import(TREES["composable"])) for file in own_files(one)}
    assert not_in_layers(files) == []


def at_import(tree: ast.Module) -> ast.Module:
    """Return the imports that run when the file is imported."""
    return ast.Module([one for one in tree.body if isinstance(one, ast.Import | ast.ImportFrom)], [])


def test_no_room_is_imported_before_one_of_its_names_is_used() -> None:
    outer = ", ".join(repr(f"composable.{room}") for room in (*OUTER_ROOMS, *PROGRAMS))
    assert printed_by(f"import sys, composable; print({{*sys.modules}} & {{{outer}}})", REPO) == "set()\n"
    package = importlib.import_module("composable")
    of_package = [*find_imports(TREES["composable"])]
    for room in ("runs", "extras"):
        shown = {name for one in find_imports(TREES[f"composable.{room}"]) for name in one.names}
        given = {name for one in of_package if one.module == f"composable.{room}" for name in one.names}
        assert shown == given
        public = given & {*package.__all__}
        assert all(getattr(package, name).__module__.startswith(f"composable.{room}.") for name in public)
    assert {*package.__all__} <= {*dir(package)}
    assert not hasattr(package, "no_such_name")


def printed_by(program: str, folder: Path) -> str:
    """Run a program with the package of ``folder``, and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    found = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


# Trains a sharded and a replicated model, and loads what they had.
CORE_PROGRAM = """
    import sys
    # What an editable installation knows stands elsewhere.
    sys.meta_path[:] = [one for one in sys.meta_path if "__editable__" not in one.__module__]
    import torch, torch.distributed as dist
    from torch import nn
    import composable
    from composable import fully_shard, replicate, step_in_backward

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trained = []
    for annotate, inside in ((fully_shard, False), (replicate, False), (fully_shard, True), (replicate, True)):
        torch.manual_seed(0)
        model = annotate(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        optimizer = torch.optim.AdamW(model.parameters())
        steps = step_in_backward(optimizer) if inside else None
        for _ in range(3):
            with composable.no_sync(model):
                model(torch.ones(2, 4)).sum().backward()
            model(torch.ones(2, 4)).sum().backward()
            if steps is None:
                composable.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.step()
                optimizer.zero_grad()
        if steps is not None:
            steps.remove()
        trained.append(composable.full_state_dict(model))
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        composable.load_full_state_dict(model, trained[-1])
        for key, value in composable.full_state_dict(model).items():
            assert torch.equal(value, trained[-1][key]), key
            torch.testing.assert_close(value, trained[0][key])
    for asked in (
        lambda: composable.timeline,
        lambda: composable.save_checkpoint,
        lambda: composable.plan(nn.Linear(2, 2), world_size=2).draw(),
        lambda: composable.plan(nn.Linear(2, 2), world_size=2, step=print),
    ):
        try:
            asked()
        except (ImportError, composable.UsageError) as error:
            print(error)
    dist.destroy_process_group()
"""


def test_the_core_trains_where_the_other_rooms_are_gone(tmp_path: Path) -> None:
    for path in (path for path in FILES.values() if path.parent.name not in {*OUTER_ROOMS, "commands"}):
        target = tmp_path / path.relative_to(REPO)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    assert printed_by(CORE_PROGRAM, tmp_path) == textwrap.dedent(
        """\
        No module named 'composable.runs'
        No module named 'composable.runs'
        ShardPlan.draw needs composable.extras, which is not here
          at:  rank 0
          fix: install the whole package
        plan(step=) needs composable.rehearsal, which is not here
          at:  rank 0
          fix: install the whole package
        """
    )


@pytest.mark.parametrize("folder", sorted(FOLDERS))
def test_a_folders_init_is_its_public_face_and_shows_only_what_others_take(folder: str) -> None:
    tree = TREES[f"composable.{folder}"]
    docstring, *imports = tree.body
    assert isinstance(docstring, ast.Expr)
    if folder in ("testing", "rehearsal"):  # These are for users: they have a list, and say where names have gone.
        imports = [one for one in imports if not isinstance(one, ast.Assign | ast.FunctionDef)]
    assert all(isinstance(one, ast.ImportFrom) and room_of(one.module or "") == folder for one in imports)
    shown = {name for found in find_imports(tree) if own_files(found) for name in found.names}
    others = [one for name, one in TREES.items() if room_of(name) != folder]
    taken = {name for one in others for found in find_imports(one) for name in found.names
             if found.module == f"composable.{folder}"}  # fmt: skip
    assert folder in ("testing", "rehearsal") or shown <= taken, shown - taken


def test_importing_a_file_gives_a_module_and_no_function_of_its_name() -> None:
    names = [name for name in FILES if room_of(name) in FOLDERS and name not in NEED_ANOTHER_PACKAGE]
    assert [name for name in names if not inspect.ismodule(importlib.import_module(name))] == []
    parents = [(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]
    assert [last for parent, last in parents if not inspect.ismodule(getattr(parent, last))] == []


def test_only_the_collectives_talk_to_other_ranks() -> None:
    names = [name for name in FILES if room_of(name) not in FILES_THAT_COMMUNICATE]
    assert found_in(names, collectives_used) == []


def test_no_file_uses_torchs_own_data_parallel_wrappers() -> None:
    assert found_in(FILES, forbidden_names) == []


def test_the_traversal_imports_torch_and_contract_only() -> None:
    modules = {found.module for found in find_imports(TREES["_traversal_utils"])}
    assert modules <= {"torch", "composable.ground.contract", "collections.abc", "typing"}


def test_the_traversal_is_imported_as_a_module() -> None:
    assert found_in(FILES, names_taken_from_the_traversal) == []


def test_only_the_hooks_file_registers_hooks() -> None:
    # Those of rehearsals are no module's: they see every forward, parameter and step of a process that ends.
    rehearsals = {f"composable.rehearsal.{name}" for name in ("rehearsed_function", "rehearsed_script", "surroundings")}
    without = [name for name in FILES if name not in {*FILES_WITH_HOOKS, *rehearsals}]
    assert found_in(without, hook_registrations) == []


def test_no_file_asks_a_collective_for_its_result() -> None:
    # torch deprecates `Work.result`: what a collective gives is in the tensors that it was given. Threads have results too.
    assert found_in([name for name in FILES if room_of(name) != "runs"], results_asked) == []


def test_no_room_stands_in_the_place_of_a_method_of_the_core() -> None:
    assert found_in([name for name in FILES if room_of(name) in STAND_INS], methods_replaced) == []


def test_the_core_knows_of_no_fake_tensor() -> None:
    names = [name for name in FILES if room_of(name) not in STAND_INS and name != "composable.ground.torch_private"]
    assert found_in(names, values_asked_of_tensors) == []


# The rules above are only as good as what they can see, so each is shown files that break it, and some that do not.
SEEN: list[tuple[Callable[[str, ast.AST], list[str]], list[str]]] = [
    (
        forbidden_edges,
        [
            "import composable.dtensor",
            "from composable.dtensor import RaggedDTensor",
            "from composable import features, engine",
            "from composable import fully_shard, errors",
            "import composable",
            "def late():\n    from composable.annotation import Root",
            "if TYPE_CHECKING:\n    from composable.annotation import Root",
            "from composable.planning.layout import FlatLayout",
        ],
    ),
    (
        collectives_used,
        [
            "dist.all_reduce(tensor)",
            "torch.distributed.broadcast(tensor, 0)",
            "group = dist.group.WORLD if dist.is_initialized() else None",
        ],
    ),
    (
        forbidden_names,
        [
            "from torch.distributed import fsdp",
            "from torch.distributed.fsdp._fully_shard import fully_shard",
            "torch.distributed.fsdp.fully_shard(model)",
            "from torch.nn.parallel import DistributedDataParallel as DDP",
            "importlib.import_module('torch.distributed.fsdp')",
        ],
    ),
    (
        hook_registrations,
        [
            "module.register_forward_pre_hook(f)",
            "param.register_post_accumulate_grad_hook(f)",
            "module._register_state_dict_hook(f)",
            "Variable._execution_engine.queue_callback(f)",
            "torch.autograd.graph.register_multi_grad_hook(tensors, f)",
        ],
    ),
    (results_asked, ["dist.all_reduce(tensor, async_op=True).result()"]),
    (names_taken_from_the_traversal, ["from _traversal_utils import walk"]),
    (features_named, ["if is_offloaded:\n    self.experts.run()"]),
    (
        methods_replaced,
        [
            "Ranks.objects = heard",
            "composable.comm.Ranks.objects = heard",
            "setattr(Ranks, name, heard)",
            "place: Any = RestingPlace\nplace.of = made",
            "for one in (Ranks, Agreement):\n    setattr(one, 'begin', heard)",
            "from composable.comm import Ranks as Others\nOthers.objects = heard",
            "mock.patch.object(Ranks, 'objects', heard)",
            "replace_body(Ranks.objects, heard)",
            "del FSDPModule.unshard",
        ],
    ),
    (
        values_asked_of_tensors,
        [
            "from torch._subclasses.fake_tensor import FakeTensorMode",
            "from composable.ground.torch_private import FakeTensor",
            "if isinstance(block, private.FakeTensor):\n    pass",
            "with modes.with_values():\n    pass",
        ],
    ),
]
FINE = [
    "from composable import errors",
    "from composable.ground.contract import contract",
    "from composable.planning.layout import FlatLayout",
    "import torch.nn as nn, _traversal_utils",
]


def test_what_breaks_a_rule_is_seen_and_nothing_else() -> None:
    for rule, sources in SEEN:
        name = "composable.comm.mesh" if rule is forbidden_edges else "composable.engine.handle"
        assert [source for source in sources if not rule(name, ast.parse(source))] == []
        # A file of planning may take these.
        planning = "composable.planning.planner"
        assert [source for source in FINE[:3] if rule(planning, ast.parse(source))] == []
    assert not names_taken_from_the_traversal("composable.engine.handle", ast.parse(FINE[3]))
    # Methods of torch, and of classes of the same file.
    for source in (
        "DeviceMesh.size = counted",
        "class Own:\n    pass\nOwn.size = counted",
        "ranks = Ranks.of_world()\nranks.x = 1",
    ):
        assert not methods_replaced("composable.rehearsal.file", ast.parse(source))
    assert not values_asked_of_tensors("composable.engine.handle", ast.parse("if transport.carries_values:\n    pass"))


@pytest.mark.parametrize("room", ["fully_shard", "engine", "saving", *OUTER_ROOMS])
def test_a_wall_lets_through_the_faces_of_earlier_rooms_alone(room: str) -> None:
    file = f"composable.{room}.file" if room in FOLDERS else f"composable.{room}"
    number = OUTER_ROOMS.index(room) if room in OUTER_ROOMS else -1
    for source in ("from composable.{} import name", "def late():\n    from composable.{} import name"):
        refused = [one for one in (*OUTER_ROOMS, "commands") if forbidden_edges(file, ast.parse(source.format(one)))]
        assert refused == [*OUTER_ROOMS[number + 1 :], "commands"]
    for earlier in OUTER_ROOMS[: max(number, 0)]:
        path = next(name for name in FILES if name.startswith(f"composable.{earlier}."))
        assert forbidden_edges(file, ast.parse(f"from {path} import name"))


def test_planning_asks_comm_which_transports_there_are_and_nothing_else() -> None:
    files = [tree for name, tree in TREES.items() if room_of(name) == "planning"]
    found = [one for tree in files for one in find_imports(tree) if own_files(one) and room_of(one.module) == "comm"]
    assert {name for one in found for name in one.names} == {"transport_class"}

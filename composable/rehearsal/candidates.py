"""Candidates: other options for the annotations of a rehearsed script, and the lines that its author would write.

In the process of a rank, functions stand for ``fully_shard``, ``replicate`` and ``checkpoint``. In the run of a script
as it is written they note its calls, and what could be annotated. For a candidate they pass on other options, and note
the statements of the script with these options.
"""

import ast
import copy
import functools
import linecache
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from weakref import ref

from torch import nn

import composable
from composable.ground.names import class_name

_NAMES = ("fully_shard", "replicate", "checkpoint")
# Of all parameters below the annotated module, a class whose modules have this share is worth a candidate.
_LEAST_SHARE = 0.2
# Options of ``replicate`` that ``fully_shard`` has too.
_SHARED_OPTIONS = ("mesh", "process_group", "ignored_modules", "ignored_params")


@dataclass(frozen=True)
class Candidate:
    """What a script would do instead; ``None``: as it is written.

    Attributes:
        policy: The class of the modules that get handles; empty: the outermost module has the only one.
        frees: ``reshard_after_forward``, or the name of a strategy.
        every: Every how many-th block frees its activations; 0: none.
        words: Arguments of the script.
    """

    policy: str | None = None
    frees: bool | int | str | None = None
    every: int | None = None
    words: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = "strategy" if isinstance(self.frees, str) else "reshard_after_forward"
        texts = [] if self.frees is None else [f"{name}={self.frees}"]
        texts += [] if self.policy is None else [f"a handle for each {self.policy}" if self.policy else "one handle"]
        every = {0: "no checkpoint", 1: "checkpoint of all blocks", 2: "checkpoint of every second block"}
        texts += [] if self.every is None else [every[self.every]]
        return " ".join([", ".join(texts) or "as written", *self.words])

    @property
    def changes(self) -> set[tuple[str, object]]:
        """What is not as it is written."""
        values = [("policy", self.policy), ("frees", str(self.frees)), ("every", self.every)]
        return {(name, value) for name, value in values if value not in (None, "None")}


@contextmanager
def annotations_of(chosen: Candidate, written: Mapping[str, Any] | None = None) -> Iterator[dict[str, Any]]:
    """Let the script of this process annotate as ``chosen`` says.

    Args:
        chosen: What changes.
        written: What this gave for the script as it is written; ``None``: this is that run.

    Yields:
        What is found, as JSON can hold it: "calls" of the script; "main", the number of the outermost call with most
        parameters, with the "blocks" below it, and "classes" that a policy could name; and "write", for each line of
        the script that changes, the statements to write there.
    """
    found: dict[str, Any] = {"calls": [], "main": -1, "write": {}}
    annotations = _Annotations(chosen, written, found)
    for name in _NAMES:
        real = getattr(composable, name)
        for owner in (composable, sys.modules[real.__module__]):
            setattr(owner, name, annotations.instead_of(name, real))
    yield found


class _Annotations:
    """Stand for the annotations of a script."""

    def __init__(self, chosen: Candidate, written: Mapping[str, Any] | None, found: dict[str, Any]) -> None:
        self._chosen, self._written, self._found = chosen, written, found
        self._real: dict[str, Any] = {}
        self._modules: list[Callable[[], nn.Module | None]] = []
        self._most = -1

    def instead_of(self, name: str, real: Any) -> Callable[..., Any]:
        self._real[name] = real

        @functools.wraps(real)
        def annotate(module: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            if self._written is None:
                made = real(module, **options)
                self._note(name, frame, module, options)
                return made
            self._found["calls"].append(name)
            return self._replaced(name, frame, module, options)

        return annotate

    # As it is written

    def _note(self, name: str, frame: FrameType, module: Any, options: Mapping[str, Any]) -> None:
        modules = [module] if isinstance(module, nn.Module) else list(module)
        call = {"name": name, "place": _Statement(frame).place, "is_inner": False}
        call["classes"] = [*map(class_name, modules)]
        call |= {one: str(options.get(one)) for one in ("strategy", "reshard_after_forward")}
        call["has_mesh"] = any(options.get(one) is not None for one in ("mesh", "dp_mesh_dims", "process_group"))
        calls, below = self._found["calls"], {inner for one in modules for inner in one.modules()} - {*modules}
        if name != "checkpoint":
            for earlier, find in zip(calls, self._modules, strict=True):
                earlier["is_inner"] = earlier["is_inner"] or find() in below
            numel = sum(param.numel() for one in modules for param in one.parameters())
            if numel >= self._most:
                self._most = numel
                self._found |= {"main": len(calls), "policy": self._picked(name, modules), "blocks": [], "classes": {}}
                if isinstance(module, nn.Module):
                    self._find_blocks(module, numel)
        calls.append(call)
        self._modules.append(ref(modules[0]))

    def _picked(self, name: str, modules: Sequence[nn.Module]) -> list[str]:
        """Return the classes of the modules below that have handles."""
        inner = [kind for one in self._found["calls"] if one["is_inner"] for kind in one["classes"]]
        if name == "fully_shard":
            handles = self._real[name].state(modules[0]).plan.handles
            inner += [one.class_names[0] for one in handles if one.module_fqns != ("",)]
        return [*dict.fromkeys(inner)]

    def _find_blocks(self, root: nn.Module, numel: int) -> None:
        kinds: dict[str, list[nn.Module]] = {}
        for module in root.modules():
            if module is not root and type(module).forward is not nn.Module.forward:
                kinds.setdefault(class_name(module), []).append(module)
        shares: dict[str, float] = {}
        for kind, those in kinds.items():
            below = [one for module in those for one in module.modules() if one is not module]
            is_nested = not {*below}.isdisjoint(those)
            share = sum(param.numel() for module in those for param in module.parameters()) / max(numel, 1)
            if len(those) > 1 and below and not is_nested and share >= _LEAST_SHARE:
                shares[kind] = share
        classes = sorted(shares, key=lambda one: -round(shares[one], 2))
        named = [one for one in self._found["policy"] if one in shares]
        inside = {below for one in named for module in kinds[one] for below in module.modules() if below is not module}
        outer = [one for one in named if kinds[one][0] not in inside]
        self._found |= {"classes": classes, "blocks": outer or classes[:1]}

    # As a candidate

    def _replaced(self, name: str, frame: FrameType, module: Any, options: dict[str, Any]) -> Any:
        written, chosen, write = self._written or {}, self._chosen, self._found["write"]
        number, statement = len(self._found["calls"]) - 1, _Statement(frame)
        if number >= len(written["calls"]) or written["calls"][number]["name"] != name:
            return self._real[name](module, **options)  # It does something else than as it is written.
        is_main, is_inner = number == written["main"], written["calls"][number]["is_inner"]
        is_left_out = name == "fully_shard" and is_inner and chosen.policy is not None
        if is_left_out or (name == "checkpoint" and chosen.every is not None):
            write[statement.place] = statement.without_call()
            return module
        api, lines = name, list[str]()
        # The new value of an option, and its text; ``None``: the option is left out.
        changes: dict[str, tuple[Any, str] | None] = {}
        if is_main and name == "replicate" and chosen.policy is not None:
            api, lines = "fully_shard", ["from composable import fully_shard"]
            changes |= dict.fromkeys(one for one in options if one not in _SHARED_OPTIONS)
        if api == "fully_shard" and chosen.frees is not None:
            kind = "strategy" if isinstance(chosen.frees, str) else "reshard_after_forward"
            changes |= {"strategy": None, "reshard_after_forward": None, kind: (chosen.frees, repr(chosen.frees))}
        if is_main and chosen.policy is not None:
            kinds, text = _classes(module, [chosen.policy], frame, statement.module)
            changes["policy"] = ({*kinds}, f"{{{text}}}") if chosen.policy else None
        if changes:
            lines.append(statement.with_options(api, {one: value and value[1] for one, value in changes.items()}))
        if is_main and chosen.every:
            kinds, text = _classes(module, written["blocks"], frame, statement.module)
            self._real["checkpoint"]([one for one in module.modules() if isinstance(one, kinds)][:: chosen.every])
            step = f"[::{chosen.every}]" if chosen.every > 1 else ""
            kind = text if len(kinds) == 1 else f"({text})"
            blocks = f"[one for one in {statement.module}.modules() if isinstance(one, {kind})]{step}"
            added = ["from composable import checkpoint", f"checkpoint({blocks})"]
            lines = lines or [statement.with_options(api, {})]
            lines = [*lines, *added] if statement.makes_module else [*added, *lines]
        if lines:
            write[statement.place] = lines
        kept = {one: value for one, value in options.items() if one not in changes}
        return self._real[api](module, **kept, **{one: value[0] for one, value in changes.items() if value})


def _classes(
    root: nn.Module, names: Sequence[str], frame: FrameType, text: str
) -> tuple[tuple[type[nn.Module], ...], str]:
    """Return the classes of modules below ``root``, a ``text`` there, with these names, and what a frame calls them."""
    found: dict[str, tuple[type[nn.Module], str]] = {}
    for fqn, module in root.named_modules():
        name = class_name(module)
        if name in names and name not in found:
            kind = next(one for one in type(module).__mro__ if one.__name__ == name)
            found[name] = kind, _name_of(kind, frame) or f"type({text}.get_submodule({fqn!r}))"
    return tuple(kind for kind, _ in found.values()), ", ".join(text for _, text in found.values())


def _name_of(kind: type, frame: FrameType) -> str:
    names = {name: one for name, one in {**frame.f_globals, **frame.f_locals}.items() if name[0] != "_"}
    places = (
        f"{name}.{kind.__name__}"
        for name, one in names.items()
        if isinstance(one, ModuleType) and getattr(one, kind.__name__, None) is kind
    )
    return next((name for name, one in names.items() if one is kind), "") or next(places, "")


class _Statement:
    """The innermost statement that a frame runs, with a call of an annotation.

    Attributes:
        place: The file and the line where it begins.
        module: The text of the module that is annotated.
        makes_module: The module has this name after the statement only.
    """

    def __init__(self, frame: FrameType) -> None:
        file, here = frame.f_code.co_filename, frame.f_lineno
        names = {name for name, one in {**frame.f_globals, **frame.f_locals}.items() if _is_annotation(one)} | {*_NAMES}
        self._found: ast.stmt = ast.parse("fully_shard(model)").body[0]
        line = here
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.stmt) and node.lineno <= here <= (node.end_lineno or here):
                calls = [one for one in _calls(node, names) if one.lineno <= here <= (one.end_lineno or here)]
                if calls:  # Statements inside come later.
                    self._found, line = node, node.lineno
        self._names, self.place = names, f"{Path(file).name}:{line}"
        named = [one.args[0] for one in _calls(self._found, names)]
        self.makes_module = isinstance(self._found, ast.Assign) and not isinstance(named[0], ast.Name | ast.Attribute)
        self.module = ast.unparse(self._found.targets[0] if self.makes_module else named[0])  # type: ignore[attr-defined]

    def without_call(self) -> list[str]:
        """Return the statements to write where the module shall not be annotated."""
        if isinstance(self._found, ast.Expr):
            return []
        statement = copy.deepcopy(self._found)
        for node in ast.walk(statement):
            for name, value in ast.iter_fields(node):
                if isinstance(value, ast.Call) and value in _calls(statement, self._names):
                    setattr(node, name, value.args[0])
        return [ast.unparse(statement)]

    def with_options(self, api: str, changes: Mapping[str, str | None]) -> str:
        """Return the statement with a call of ``api`` with other options; ``None`` leaves one out."""
        statement = copy.deepcopy(self._found)
        for call in _calls(statement, self._names) if changes else ():
            if api == "fully_shard" and ast.unparse(call.func).endswith("replicate"):
                call.func = ast.Name(api)
            call.keywords = [one for one in call.keywords if one.arg not in changes]
            values = {one: ast.parse(text or "None", mode="eval").body for one, text in changes.items()}
            unpacked = next((one for one in call.keywords if one.arg is None), None)
            if unpacked is None:
                call.keywords += [ast.keyword(one, values[one]) for one, text in changes.items() if text is not None]
            else:
                names: list[ast.expr | None] = [None, *(ast.Constant(one) for one in values)]
                unpacked.value = ast.Dict(names, [unpacked.value, *values.values()])
        return ast.unparse(ast.fix_missing_locations(statement))


@functools.cache
def _tree(file: str) -> ast.Module:
    tree = ast.parse("".join(linecache.getlines(file)))
    for call in [one for one in ast.walk(tree) if isinstance(one, ast.Call) and not one.args]:
        # The module comes first, as in most calls.
        call.args = [one.value for one in call.keywords if one.arg == "module"]
        call.keywords = [one for one in call.keywords if one.arg != "module"]
    return tree


def _is_annotation(value: object) -> bool:
    return any(value is getattr(composable, name) for name in _NAMES)


def _calls(node: ast.AST, names: Collection[str]) -> list[ast.Call]:
    calls = [one for one in ast.walk(node) if isinstance(one, ast.Call) and one.args]
    return [one for one in calls if ast.unparse(one.func).rpartition(".")[2] in names]

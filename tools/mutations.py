"""Breaks the package in one place at a time, and sees whether tests notice.

    python -m tools.mutations --map FOLDER --seed 0 --count 150
    python -m tools.mutations --map FOLDER --only engine/edited.py

First the tests run once, and the lines that each executes are noted below ``--map``, which takes minutes; what is
there already, of the same code and the same tests, is not done again. Then, for each mutation, the tests run that
execute its line, the quickest first, until one fails or hangs: in copies of the repository, and in forks of a process
that has imported torch. What survives is printed with its line: it wants a test, or a reason why nobody can see it.
"""

import argparse
import ast
import copy
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from tools.executed import FOLDERS, REPO, Notes, run_tests, start_server

# Test files that execute no line in a process that is traced, or take minutes.
LEFT_OUT = (
    *("architecture", "ddp_scripts", "docs", "docs_testing", "examples", "installation", "makefile", "mutations"),
    *("compile", "compiled_autograd", "side_by_side", "soak", "tiers", "two_hosts", "wheel", "world"),
)
# When no test ends for so long, and three times as long as the longest has taken, one hangs.
PATIENCE_S = 60.0
# How long, as noted, the first tests of a mutation take, which find most.
QUICK_S = 6.0


class Mutation(NamedTuple):
    """One change: in ``line`` of ``file``, the text from ``start`` to ``stop`` becomes ``new``."""

    file: str
    line: int
    start: int
    stop: int
    new: str

    def applied(self, source: str) -> str:
        """Return the source with the change made."""
        lines = source.splitlines(keepends=True)
        text = lines[self.line - 1].encode()
        lines[self.line - 1] = (text[: self.start] + self.new.encode() + text[self.stop :]).decode()
        return "".join(lines)

    def shown(self, source: str) -> str:
        """Return where the change is, the line, and what is new in it."""
        return f"{self.file}:{self.line}: {source.splitlines()[self.line - 1].strip()}  ->  {self.new}"


_PAIRS: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    *((ast.Is, ast.IsNot), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn), (ast.Lt, ast.LtE), (ast.Gt, ast.GtE)),
    *((ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv)),
)
_SWAPS: dict[type[ast.AST], type[ast.AST]] = {ast.Div: ast.Mult, **dict(_PAIRS), **{b: a for a, b in _PAIRS}}


def changes_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of ``node``."""
    if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp | ast.AugAssign):
        changed = copy.deepcopy(node)
        if isinstance(changed, ast.Compare):
            swap = _SWAPS.get(type(changed.ops[0]))
            if swap is not None:
                changed.ops[0] = swap()  # type: ignore[call-overload]  # an operator for an operator
                yield changed
        elif type(changed.op) in _SWAPS:
            changed.op = _SWAPS[type(changed.op)]()  # type: ignore[assignment]  # as above
            yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Return) and not (node.value is None or is_none(node.value)):
        yield ast.Return(ast.Constant(None))
    elif (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)) or (
        isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)
    ):
        yield ast.Pass()


def is_none(node: ast.expr) -> bool:
    """Say whether an expression is the constant."""
    return isinstance(node, ast.Constant) and node.value is None


def mutations_of(file: str, source: str) -> list[Mutation]:
    """Return every change that can be made in a file, but for what stands in annotations and messages."""
    found = []
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    for statement in (statement for function in functions for statement in function.body):
        for node in ast.walk(statement):
            line, stop_line = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
            if not line or line != stop_line or isinstance(statement, ast.Raise | ast.Assert | ast.FunctionDef):
                continue
            for changed in changes_of(node):
                start, stop = node.col_offset, node.end_col_offset  # type: ignore[attr-defined]  # it has a line
                text = ast.unparse(changed)
                text = f"({text})" if isinstance(changed, ast.expr) else text
                found.append(Mutation(file, line, start, stop, text))
    return list(dict.fromkeys(found))


_ROOT = Path()


def make_copy(folder: str) -> None:
    """Copy the repository for this process, to be broken."""
    global _ROOT
    _ROOT = Path(folder, str(os.getpid()))
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True).stdout.splitlines():
        if (REPO / name).is_file():
            (_ROOT / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPO / name, _ROOT / name)


def notes_of(file: str, kept: Path) -> dict[str, Notes]:
    """Return the notes of the tests in ``file``: those in ``kept``, which are taken if there are none yet."""
    if not kept.exists():
        passed = run_tests(_ROOT, [file], PATIENCE_S, takes_notes=True).passed
        kept.write_text(json.dumps(passed))
    return {name: Notes(*notes) for name, notes in json.loads(kept.read_text()).items()}


def tests_of(mutation: Mutation, notes: dict[str, Notes]) -> dict[str, float]:
    """Return tests that execute the line, or the next one above: one case of each, the quickest first, then others."""
    names: list[str] = []
    for line in range(mutation.line, 0, -1):
        names = names or [name for name, (_, lines) in notes.items() if lines.get(mutation.file, 0) >> line & 1]
    cases: Counter[str] = Counter()
    numbers = {}
    for name in sorted(names, key=lambda name: notes[name].seconds):
        function = name.partition("[")[0]
        numbers[name] = cases[function]
        cases[function] += 1
    return {name: notes[name].seconds for name in sorted(numbers, key=lambda name: numbers[name])}


def outcome_of(mutation: Mutation, seconds_of: dict[str, float], all_s: float) -> tuple[str, str]:
    """Return whether tests find a mutation or it SURVIVED, and how that is known."""
    path = _ROOT / mutation.file
    kept = path.rename(path.with_suffix(".kept"))
    path.write_text(mutation.applied(kept.read_text()))
    try:
        total = 0.0
        rounds: tuple[list[str], list[str]] = ([], [])
        for name, seconds in seconds_of.items():
            total += seconds
            if total < all_s or not rounds[0]:
                rounds[total > QUICK_S].append(name)
        for names in filter(None, rounds):
            for failed in run_tests(_ROOT, names, PATIENCE_S + 3 * max(seconds_of[name] for name in names)).failed:
                return "found", failed
        return "SURVIVED", f"{sum(map(len, rounds))} of {len(seconds_of)} tests"
    finally:
        kept.rename(path)


def failures_unbroken(names: list[str]) -> list[str]:
    """Return which of the tests that have found mutations fail first though nothing is broken."""
    return run_tests(_ROOT, names, 2 * PATIENCE_S).failed if names else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--map", type=Path, required=True, help="folder that keeps which test executes which line")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--folders", nargs="+", default=list(FOLDERS), choices=list(FOLDERS))
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files and folders of tests to choose from")
    parser.add_argument("--seconds", type=float, default=90.0, help="how long, as noted, the tests of a mutation take")
    parser.add_argument("--only", help="instead of some by chance, all with this text in what is printed of them")
    args = parser.parse_args()
    args.map.mkdir(parents=True, exist_ok=True)
    paths = [path for one in args.folders for path in sorted((REPO / "composable" / one).glob("*.py"))]
    sources = {str(path.relative_to(REPO)): path.read_text() for path in paths}
    found = [mutation for file, source in sources.items() for mutation in mutations_of(file, source)]
    random.seed(args.seed)
    chosen = random.sample(found, min(args.count, len(found)))
    if args.only:
        chosen = [mutation for mutation in found if args.only in mutation.shown(sources[mutation.file])]
    code = "".join(path.read_text() for path in sorted((REPO / "composable").rglob("*.py")))
    below = [
        path for name in args.tests for path in (REPO / name, *(REPO / name).rglob("*")) if path.match("test_*.py")
    ]
    tests = [path for path in below if path.stem.removeprefix("test_") not in LEFT_OUT]
    tests.sort(key=lambda path: -path.stat().st_size)
    hashes = [hashlib.sha1((code + path.read_text()).encode()).hexdigest()[:12] for path in tests]
    kept = [args.map / f"{path.stem}-{hashed}.json" for path, hashed in zip(tests, hashes)]
    names = [str(path.relative_to(REPO)) for path in tests]
    start_server()
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(2, fork, make_copy, (folder,)) as pool:
        notes: dict[str, Notes] = {}
        start = time.monotonic()
        for number, of_file in enumerate(pool.map(notes_of, names, kept)):
            notes |= of_file
            print(f"{time.monotonic() - start:5.0f} s {names[number]}: {len(of_file)} tests", flush=True)
        outcomes: Counter[str] = Counter()
        finders = set()
        start = time.monotonic()
        candidates = [tests_of(mutation, notes) for mutation in chosen]
        for mutation, (outcome, by) in zip(chosen, pool.map(outcome_of, chosen, candidates, repeat(args.seconds))):
            outcomes[outcome] += 1
            finders |= {by} & notes.keys()
            shown = mutation.shown(sources[mutation.file])
            print(f"{time.monotonic() - start:5.0f} s {outcome:8} {shown}   ({by})", flush=True)
        while failed := pool.submit(failures_unbroken, sorted(finders)).result():
            print(f"fails though nothing is broken, so what it found may survive: {failed[0]}")
            finders -= {failed[0]}
        print(f"{dict(outcomes)}, out of {len(found)} that could be made")


if __name__ == "__main__":
    main()

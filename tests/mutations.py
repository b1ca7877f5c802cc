"""Breaks the package in one place at a time, and sees whether tests notice; by hand, since it takes hours.

    python -m tests.mutations --seed 0 --count 30
    python -m tests.mutations --folders dtensor --count 50 --tests tests/ragged

Each mutation is made in a copy of the repository, so the working tree stays as it is. What survives is printed with
its line: it wants a test, or a reason why nobody can see it.
"""

import argparse
import ast
import copy
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPO = Path(__file__).resolve().parent.parent
# From the quickest to notice on; the last ones are many.
TESTS = {
    "engine": (
        "tests/storage tests/test_fully_shard_parity.py",
        "tests/test_fully_shard.py tests/runtime/test_completion.py tests/test_reshard_int.py tests/test_fsdp_settings.py",
        "tests/test_mixed_precision.py tests/test_hybrid.py tests/test_offload.py "
        "tests/test_comm_hooks.py tests/test_gradient_sync.py tests/test_experts.py tests/test_backward_steps.py "
        "tests/test_uneven_inputs.py",
        "tests/runtime",
    ),
    "comm": ("tests/collectives", "tests/test_fully_shard_parity.py tests/test_hybrid.py tests/test_divergence.py"),
    "dtensor": ("tests/ragged", "tests/test_fully_shard_parity.py tests/saving tests/optim"),
}
LIMIT_S = 600


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


_SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}


def changes_of(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what may stand in the place of ``node``."""
    if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp | ast.AugAssign):
        changed = copy.deepcopy(node)
        if isinstance(changed, ast.Compare):
            swap = _SWAPS.get(type(changed.ops[0]))
            if swap is not None:
                changed.ops[0] = swap()  # type: ignore[assignment]  # an operator for an operator
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


def outcome_of(mutation: Mutation, root: Path, rounds: list[str]) -> str:
    """Return what tests make of a mutation in the copy at ``root``: found, SURVIVED, or TOO LONG to know."""
    path = root / mutation.file
    source = path.read_text()
    path.write_text(mutation.applied(source))
    try:
        for tests in rounds:
            command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
            try:
                found = subprocess.run(command, cwd=root, capture_output=True, timeout=LIMIT_S, check=False)
            except subprocess.TimeoutExpired:
                return "TOO LONG"
            if found.returncode:
                return "found"
        return "SURVIVED"
    finally:
        path.write_text(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--folders", nargs="+", default=list(TESTS), choices=list(TESTS))
    parser.add_argument("--tests", nargs="+", help="instead of those of the folder")
    args = parser.parse_args()
    random.seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "repository")
        listed = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True)
        for name in listed.stdout.split("\n"):
            if name and (REPO / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPO / name, root / name)
        found = [
            mutation
            for one in args.folders
            for path in sorted((root / "composable" / one).glob("*.py"))
            for mutation in mutations_of(str(path.relative_to(root)), path.read_text())
        ]
        outcomes: Counter[str] = Counter()
        for number, mutation in enumerate(random.sample(found, min(args.count, len(found))), 1):
            line = (root / mutation.file).read_text().splitlines()[mutation.line - 1].strip()
            rounds = args.tests or list(TESTS[mutation.file.split("/")[1]])
            outcome = outcome_of(mutation, root, rounds)
            outcomes[outcome] += 1
            print(f"{number:4} {outcome:8} {mutation.file}:{mutation.line}: {line}  ->  {mutation.new}", flush=True)
        print(f"{dict(outcomes)}, out of {len(found)} that could be made")


if __name__ == "__main__":
    main()

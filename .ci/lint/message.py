"""The one form in which a linter reports to lintrunner: a JSON object per line."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def report(code: str, name: str, description: str, path: str | None = None, **where: Any) -> None:
    """Print one finding; ``where`` takes line, char, original and replacement."""
    print(
        json.dumps(
            {
                "path": path,
                "line": where.get("line"),
                "char": where.get("char"),
                "code": code,
                "severity": "error",
                "name": name,
                "original": where.get("original"),
                "replacement": where.get("replacement"),
                "description": description,
            }
        ),
        flush=True,
    )


def run(command: Sequence[str], accepted: Sequence[int], *, given: str = "") -> str:
    """Run ``command`` on input ``given`` and return its output; another exit status fails the whole lint run."""
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode not in accepted:
        raise SystemExit(f"{' '.join(command[:3])} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def read_paths(paths_file: str) -> list[str]:
    """Return the paths that lintrunner wrote to ``paths_file``, one a line."""
    return Path(paths_file).read_text().splitlines()

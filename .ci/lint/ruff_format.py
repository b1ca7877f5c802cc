"""Reports files that ``ruff format`` would change, with the change, so that ``lintrunner -a`` makes it."""

import json
import sys
from pathlib import Path

from message import read_paths, report, run

RUFF_FORMAT = [sys.executable, "-m", "ruff", "format"]

found = run([*RUFF_FORMAT, "--check", "--output-format=json", *read_paths(sys.argv[1])], (0, 1, 2))
for path in sorted({item["filename"] for item in json.loads(found) if item["code"] == "unformatted"}):
    original = Path(path).read_text()
    report(
        "FORMAT",
        "format",
        "not formatted: run `lintrunner -a`, or `ruff format`",
        path,
        original=original,
        replacement=run([*RUFF_FORMAT, f"--stdin-filename={path}", "-"], (0,), given=original),
    )

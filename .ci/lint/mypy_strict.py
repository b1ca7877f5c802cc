"""Reports what mypy finds in the package. Types cross files, so it checks all of them every time."""

import json
import sys

from message import report, run

MYPY = [sys.executable, "-m", "mypy", "--output=json", "--no-error-summary"]

# Status 2 is a crash of mypy or a syntax error; only the latter comes with findings.
lines = run(MYPY, (0, 1, 2)).splitlines() or run(MYPY, (0, 1)).splitlines()
for line in lines:
    item = json.loads(line)
    hint = f"\n{item['hint']}" if item["hint"] else ""
    report(
        "MYPY",
        item["code"] or item["severity"],
        item["message"] + hint,
        item["file"],
        line=item["line"] if item["line"] > 0 else None,
        char=item["column"] + 1 if item["column"] >= 0 else None,
    )

"""Reports what ``ruff check`` finds in the files named in the file given as argument."""

import json
import sys

from message import read_paths, report, run

found = run(
    [sys.executable, "-m", "ruff", "check", "--output-format=json", "--quiet", *read_paths(sys.argv[1])], (0, 1)
)
for item in json.loads(found):
    place = item["location"] or {}
    report(
        "RUFF",
        item["code"] or "syntax",
        item["message"],
        item["filename"],
        line=place.get("row"),
        char=place.get("column"),
    )

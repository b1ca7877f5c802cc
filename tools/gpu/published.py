"""Keeps what pages say of a GPU equal to the results in ``benchmarks/results/``.

    python -m tools.gpu.published build/gpu    take these results, also of several runs, and write the pages
    python -m tools.gpu.published              write the pages from the results that are there

Each card has a file ``gpu-NAME.jsonl`` there: how many checks of each part were right, the numbers of rules, and the
figures. A page has a line or a section between ``<!-- begin: gpu -->`` and ``<!-- end: gpu -->``. Without results it
says so.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.gpu.figures import table

__all__ = ["PAGES", "results", "with_section"]

REPO = Path(__file__).resolve().parent.parent.parent
RESULTS = REPO / "benchmarks" / "results"
SECTION = re.compile(r"(<!-- begin: gpu[^>]*-->\n)(.*?)(<!-- end: gpu -->)", re.DOTALL)

Rows = list[dict[str, Any]]


def results() -> dict[str, Rows]:
    """Return the published rows by the name of the file."""
    return {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted(RESULTS.glob("gpu-*.jsonl"))
    }


def taken(rows: Rows) -> Rows:
    """Return what is published of the rows of a run: figures, numbers, what failed, and counts of the rest."""
    kept: Rows = []
    for part in dict.fromkeys(row["part"] for row in rows if row["part"] != "again"):  # It is in the other parts too.
        of_part = [row for row in rows if row["part"] == part and "ended_after_s" not in row]
        of_part = [row for row in of_part if row.get("kind") != "skipped"]  # there was no time for it
        counts = Counter(str(row["result"]) for row in of_part if "result" in row and "passed" not in row)
        counts["right"] += sum(row.get("passed", 0) for row in of_part)
        if counts.total():
            kept.append({"part": part, "kind": "counts", **dict(sorted(counts.items()))})
        kept += [row for row in of_part if row.get("result") == "wrong" or "kind" in row or len(row) > 6]
    # Of several runs, those of the first.
    first = {kind: row for kind in ("matmul", "device") for row in reversed(of_kind(kept, kind))}
    return [row for row in kept if first.get(str(row.get("kind")), row) is row]


def of_kind(rows: Rows, kind: str, **fields: Any) -> Rows:
    """Return the rows of a kind, and of the values of ``fields``."""
    wanted = {"kind": kind, **fields}
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def front_line(files: dict[str, Rows]) -> str:
    """Return the sentence of the README's first screen."""
    if not files:
        return "On a GPU: never run.\n"
    sentences = []
    for rows in files.values():
        (device,) = of_kind(rows, "device")
        counts: Counter[str] = Counter()
        for row in of_kind(rows, "counts"):
            counts.update({key: number for key, number in row.items() if isinstance(number, int)})
        checks = counts["right"] + counts["wrong"]
        speeds = {row["engine"]: row["tokens_per_s"] for row in of_kind(rows, "llama", variant="eager", round=1)}
        speed = ""
        if {"fully_shard", "fsdp2"} <= speeds.keys():
            ratio = speeds["fully_shard"] / speeds["fsdp2"]
            speed = f", and a Llama of 1.1 billion parameters trained at {speeds['fully_shard']:,.0f} tokens/s, "
            speed += f"{ratio:.2f} of FSDP2's speed"
        sentences.append(
            f"One {device['card']} (torch {device['torch'].partition('+')[0]}, {device['date']}): {counts['right']} of "
            f"{checks} checks were right, most of them on 1 to 4 ranks that share the GPU{speed}"
            " ([figures](benchmarks/results/README.md#on-a-gpu))."
        )
    return " ".join(sentences) + " Never on several GPUs.\n"


def section(files: dict[str, Rows]) -> str:
    """Return the section of the page of results."""
    if not files:
        return "Never run. On your GPU: `make gpu`.\n"
    parts = []
    for name, rows in files.items():
        lines = [f"`{name}`, by `make gpu`:", "", "| part | results |", "|---|---|"]
        for row in of_kind(rows, "counts"):
            numbers = ", ".join(f"{number} {key}" for key, number in row.items() if isinstance(number, int))
            lines.append(f"| {row['part']} | {numbers} |")
        planned = [row for row in rows if "planned_peak_bytes" in row]
        if planned:
            lines += [
                "",
                "| Memory of a rank | at rest, MiB | planned | peak, MiB | planned |",
                "|---|---|---|---|---|",
            ]
            keys = ("rest_bytes", "planned_rest_bytes", "peak_bytes", "planned_peak_bytes")
            lines += [
                f"| {row['case']} | " + " | ".join(f"{row[key] / 2**20:.1f}" for key in keys) + " |" for row in planned
            ]
        wrong = [row for row in rows if row.get("result") == "wrong"]
        lines += [f"\nWrong: {row['part']}, {row.get('rule', '')} {row.get('case', '')}" for row in wrong]
        parts.append("\n".join(lines) + "\n\n" + table([row for row in rows if row["part"] == "figures"]))
    return "\n".join(parts)


# The pages, and what writes the text of each.
PAGES = {"README.md": front_line, "benchmarks/results/README.md": section}


def with_section(page: str, text: str) -> str:
    """Return ``page`` with ``text`` between its marks."""
    found, count = SECTION.subn(lambda match: f"{match[1]}{text}{match[3]}", page)
    assert count == 1, "a page has one section on GPUs"
    return found


def main(arguments: Sequence[str]) -> None:
    """Publish the results of folders, of runs on one card, if any are named, and write the pages."""
    rows = [json.loads(line) for folder in arguments for line in Path(folder, "results.jsonl").read_text().splitlines()]
    if rows:
        device, *others = of_kind(rows, "device")
        assert all(other["card"] == device["card"] for other in others), "results of two cards"
        name = re.sub(r"[^a-z0-9]+", "-", str(device["card"]).lower().removeprefix("nvidia ")).strip("-")
        lines = [json.dumps(row) for row in taken(rows)]
        (RESULTS / f"gpu-{name}.jsonl").write_text("\n".join(lines) + "\n")
    for page, text in PAGES.items():
        path = REPO / page
        path.write_text(with_section(path.read_text(), text(results())))


if __name__ == "__main__":
    main(sys.argv[1:])

"""All that a GPU can show, in one command, the most valuable first.

    python -m tools.gpu --minutes 6 --out DIR
    python -m tools.gpu --minutes 1 --out DIR --device cpu    the same at toy sizes, so that it cannot rot
    python -m tools.gpu --minutes 2 --out DIR --only rules

Needs torch and pytest, and nothing else that is not here. Each part is a process of its own with a limit of its own;
what one leaves of its time the next ones have. ``DIR/results.jsonl`` has a line for each result as soon as it is known,
``DIR/report.md`` says what failed, and has the figures. The exit status is 1 if anything failed.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tools.gpu.figures import figures, table
from tools.gpu.host import host, host_text
from tools.gpu.published import results as published
from tools.gpu.ranks import Row, ranks
from tools.gpu.rules import rules

REPO = Path(__file__).resolve().parent.parent.parent
# How long after its own limit a part is ended.
GRACE_S = 30.0
# The most processes that share cases: each has its own context of some hundred megabytes on the device.
MOST_PROCESSES = 10
TESTS = "test_cuda.py test_cuda_offload.py test_cuda_replicate.py collectives/test_transports.py".split()


class Part(NamedTuple):
    """One part.

    Attributes:
        title: What it does.
        share: How much of the time it may take, beside the others.
        is_shared: Several processes share its cases.
        run: Does it: ``run(device, report, until=, is_toy=)``; ``None``: other programs do.
    """

    title: str
    share: float
    is_shared: bool
    run: Callable[..., None] | None


PARTS = {
    "host": Part("Where the host's time goes", 0.12, False, host),
    "again": Part("What was not right last time", 0.10, False, None),
    "tests": Part("Tests marked `cuda`", 0.15, False, None),
    "example": Part("The example, under torchrun", 0.16, False, None),
    "rules": Part("Rules of a step", 0.14, False, rules),
    "ranks": Part("Ranks that share the device", 0.20, True, partial(ranks, adverse=False)),
    "adverse": Part("Ranks that share an adverse device", 0.15, True, partial(ranks, adverse=True)),
    "figures": Part("Figures beside FSDP2", 0.30, False, figures),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that the command line asks for; return 1 if anything failed."""
    args = _parsed(arguments)
    if args.part:
        _run_part(args)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device; --device cpu runs all of it at toy sizes")
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "results.jsonl"
    results.write_text("")
    ends = time.monotonic() + 60 * args.minutes
    last = [row for rows in published().values() for row in rows if _is_failure(row)]
    chosen = [name for name in in_order(last) if not args.only or name in args.only]
    for index, name in enumerate(chosen):
        left = sum(PARTS[one].share for one in chosen[index:])
        seconds = (ends - time.monotonic()) * PARTS[name].share / left
        print(f"{PARTS[name].title}: at most {seconds:.0f} s", flush=True)
        started = time.monotonic()
        if name in ("tests", "again"):
            # By their words: a test may have another name by now.
            words = [re.split(r"::|\[", str(row["case"]))[1] for row in last if row["part"] == "tests"]
            _run_tests(name, ["-k", " or ".join(words)] if name == "again" else [], seconds, args.out)
        elif name == "example":
            _run_example(seconds, args, results)
        else:
            _run_processes(name, seconds, args, results)
        _add(results, {"part": name, "ended_after_s": round(time.monotonic() - started, 1)})
        (args.out / "report.md").write_text(report_of(_rows(results)))
    print((args.out / "report.md").read_text())
    return int(any(map(_is_failure, _rows(results))))


def in_order(last: Sequence[Row]) -> list[str]:
    """Return the parts: host, then the tests that ``last`` has, which were wrong last time, and its parts first."""
    names = dict.fromkeys(["host", "again", *(str(row["part"]) for row in last), *PARTS])
    return [name for name in names if name != "again" or any(row["part"] == "tests" for row in last)]


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="+", choices=list(PARTS), help="parts to run")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--share", default="0/1", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


# In the process of a part


def _run_part(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(0)
        device = torch.device("cuda", 0)
    part = PARTS[args.part]
    first, of = map(int, args.share.split("/"))
    options: dict[str, Any] = {"share": (first, of)} if part.is_shared else {}
    assert part.run is not None
    report = partial(_report, args.out, args.part)
    part.run(device, report, until=time.monotonic() + args.seconds, is_toy=args.device == "cpu", **options)


def _report(results: Path, part: str, row: Row) -> None:
    _add(results, {"part": part, **row})


def _add(results: Path, row: Row) -> None:
    """Add a line, in one write, so that processes do not mix theirs."""
    with results.open("ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\n")


# In the first process


def _run_processes(name: str, seconds: float, args: argparse.Namespace, results: Path) -> None:
    """Run a part in one process or in several, and end those that do not end."""
    count = min(MOST_PROCESSES, max((os.cpu_count() or 1) - 2, 1)) if PARTS[name].is_shared else 1
    command = [sys.executable, "-m", "tools.gpu", "--device", args.device, "--out", str(results), "--part", name]
    with (args.out / f"{name}.log").open("w") as log:
        processes = [
            subprocess.Popen(
                [*command, "--seconds", str(seconds), "--share", f"{index}/{count}"],
                cwd=REPO,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for index in range(count)
        ]
        ends = time.monotonic() + seconds + GRACE_S
        for process in processes:
            try:
                process.wait(max(ends - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                _add(results, {"part": name, "result": "wrong", "case": "the whole part", "text": "ended by force"})
            else:
                if process.returncode:
                    text = f"exit status {process.returncode}:\n{_tail(args.out / f'{name}.log')}"
                    _add(results, {"part": name, "result": "wrong", "case": "the whole part", "text": text})


def _run_tests(part: str, chosen: Sequence[str], seconds: float, out: Path) -> None:
    """Run what is marked ``cuda``, or ``chosen`` of that; on the CPU all of it is skipped."""
    log, results = out / f"{part}.log", out / "results.jsonl"
    command = [sys.executable, "-m", "pytest", "-m", "cuda", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
    command += [f"tests/{name}" for name in TESTS]
    with log.open("w") as file:
        process = subprocess.Popen([*command, *chosen], cwd=REPO, stdout=file, stderr=subprocess.STDOUT)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    lines = log.read_text().splitlines()
    failed = [line.partition(" ")[2] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    for name in failed:
        _add(results, {"part": part, "case": name, "result": "wrong", "text": ""})
    passed = re.search(r"(\d+) passed", lines[-1] if lines else "")
    row: Row = {"part": part, "case": "all", "result": "right", "passed": int(passed[1]) if passed else 0}
    if process.returncode != 0:
        row["result"] = "failed" if failed else "wrong"
    _add(results, {**row, "text": "" if process.returncode == 0 else _tail(log)})


def _run_example(seconds: float, args: argparse.Namespace, results: Path) -> None:
    """Train the example on one rank, as the README has it, and resume a run from its checkpoint."""
    ends = time.monotonic() + seconds
    steps = 40 if args.device == "cuda" else 4
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    often = ["--checkpoint-every", str(steps // 2), "--eval-every", "1000", "--sample-bytes", "0"]
    if args.device == "cpu":
        often += "--text HISTORY.md CONTRIBUTING.md --layers 2 --width 32 --heads 2 --context 32".split()
    with (args.out / "example.log").open("w") as log, tempfile.TemporaryDirectory() as folder:
        for case, more in {
            "fully_shard": ["--parallel", "fully_shard", "--steps", str(steps)],
            "fully_shard, resumed": ["--resume", "--steps", str(2 * steps)],
            "replicate": ["--parallel", "replicate", "--steps", str(steps)],
        }.items():
            run = Path(folder, case.partition(",")[0])
            command = [*torchrun, "examples/train_gpt.py", "--out", str(run), *often, *more]
            # The package is not installed there.
            environ = {**os.environ, "PYTHONPATH": str(REPO)}
            process = subprocess.Popen(command, cwd=REPO, env=environ, stdout=log, stderr=subprocess.STDOUT)
            text = ""
            try:
                process.wait(max(ends - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.terminate()  # torchrun ends its ranks.
                process.wait()
                text = "ended by force"
            metrics = run / "metrics.jsonl"
            losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
            if not text and (process.returncode or len(losses) < steps or losses[-1] >= losses[0]):
                text = (
                    f"exit status {process.returncode}, losses {losses[:1]} to {losses[-1:]}\n{_tail(Path(log.name))}"
                )
            row: Row = {"part": "example", "case": case, "result": "wrong" if text else "right", "text": text}
            _add(results, {**row, "steps": len(losses), "losses": losses[:1] + losses[-1:]})


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _rows(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()]


def _is_failure(row: Row) -> bool:
    return row.get("result") in ("wrong", "failed") or row.get("kind") == "error"


def report_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return a page of Markdown: how many results of each part there are, what failed, and the figures."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: the CPU, at toy sizes"
    lines = [f"# {name}, torch {torch.__version__}", ""]
    lines += ["| part | seconds | results |", "|---|---|---|"]
    for part, (title, *_) in PARTS.items():
        of_part = [row for row in rows if row["part"] == part]
        if of_part:
            seconds = next((row["ended_after_s"] for row in of_part if "ended_after_s" in row), "")
            counts = Counter(str(row.get("result") or row.get("kind")) for row in of_part if "ended_after_s" not in row)
            lines.append(f"| {title} | {seconds} | {', '.join(f'{counts[one]} {one}' for one in sorted(counts))} |")
    failed = [row for row in rows if _is_failure(row)]
    lines += ["", "Nothing failed." if not failed else f"## {len(failed)} failed", ""]
    for row in failed:
        text = str(row.get("text", row.get("error", ""))).strip().replace("\n", "\n    ")
        lines.append(f"- {row['part']}: {row.get('rule', '')} {row.get('case', '')}\n\n    {text}\n")
    measured = [row for row in rows if row["part"] == "rules" and len(row) > 6]
    for row in measured:
        numbers = {key: one for key, one in row.items() if key not in ("part", "rule", "case", "result", "text")}
        lines.append(f"- {row['rule']}, {row['case']}: {numbers}")
    of_figures = [row for row in rows if row["part"] == "figures" and "kind" in row]
    of_host = [row for row in rows if row.get("kind") == "host"]
    shown = [host_text(of_host)] if of_host else []
    return "\n".join([*lines, "", *shown, table(of_figures) if of_figures else ""])


if __name__ == "__main__":
    sys.exit(main())

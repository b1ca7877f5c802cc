"""``fit``: other annotations of a script are rehearsed, and the ones that need least are shown with the lines to write.

Exit codes: 0, one fits; 1, the script fails; 4, none fits.
"""

import argparse
import itertools
import json
import re
import sys
from dataclasses import asdict

from composable.commands.rehearse import add_run_arguments, job_of
from composable.rehearsal import find_frontier, frontier_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the script, the size of the run, and what bounds the search."""
    add_run_arguments(parser, steps=2)
    parser.add_argument("--limit", type=_seconds, default=120.0, help="seconds for all, such as 120s (default)")
    parser.add_argument(
        "--vary", action="append", default=[], type=_varied, metavar="'NAME A,B'",
        help="also try an argument of the script with other values, such as '--batch-size 8,16'",
    )  # fmt: skip
    parser.set_defaults(of_script=())


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?s?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return float(text.removesuffix("s"))


def _varied(text: str) -> tuple[str, list[str]]:
    name, _, values = text.replace("=", " ").partition(" ")
    if not name.startswith("-") or not values.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not such as '--batch-size 8,16,32'")
    return name, values.strip().split(",")


def _with_values(words: tuple[str, ...], values: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """Return the arguments of a script with other values of some."""
    for name, value in values:
        at = next((i for i, word in enumerate(words) if word.partition("=")[0] == name), len(words))
        given = (f"{name}={value}",) if "=" in "".join(words[at : at + 1]) else (name, value)
        words = (*words[:at], *given, *words[at + len(given) :])
    return words


def run(args: argparse.Namespace) -> int:
    """Search, and print the frontier."""
    job = job_of(args)
    pairs = [[(name, value) for value in values] for name, values in args.vary]
    varied = [_with_values(args.of_script, values) for values in itertools.product(*pairs)]
    found = find_frontier(job, varied, args.limit, lambda text: print(text, file=sys.stderr))
    if found.failed is not None:
        print(found.failed.said.rstrip(), file=sys.stderr)
        return 1
    if args.json:
        best = found.best(job.limit)
        every = [*best, *(one for one in found.tried if one not in best)]
        rows = [asdict(one) | {"is_best": one in best, "text": str(one.candidate)} for one in every]
        print(json.dumps({"budget": job.limit, "tried": rows, "left_out": found.left_out}, indent=2))
    else:
        print("\n".join(frontier_lines(found, job.limit)))
    return 0 if any(not job.limit or one.peak <= job.limit for one in found.tried) else 4

"""The command line: ``python -m composable COMMAND``.

A command is a file of ``composable/commands`` with two functions, ``add_arguments(parser)`` and ``run(args) -> int``,
and a row of ``COMMANDS``; its file is imported only if the command is chosen. All commands keep these rules:

* Text for people by default. With ``--json``, which each command has (``args.json``), standard output is one JSON value
  and nothing else. Progress and errors go to standard error.
* Exit codes: 0, all is well; 1, it is not: the answer is no, or an error of this library, which is one line without a
  traceback; 2, the command line is wrong. What else a command has to say has codes from 3, listed in its help.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from composable import __version__
from composable.errors import ComposableError


class Command(NamedTuple):
    """A command: what it does, in a line, and calls to show below its help."""

    does: str
    examples: tuple[str, ...]


COMMANDS = {
    "rehearse": Command(
        "run a script as one rank of many, without devices: memory, traffic, hangs",
        ("rehearse train.py --ranks 64 --per-host 8 --device h100-80g --steps 2 -- --lr 3e-4",),
    ),
    "fit": Command(
        "rehearse other annotations of a script: what fits into memory, and the lines to write",
        (
            "fit train.py --ranks 8 --memory 24GiB",
            "fit train.py --ranks 64 --device h100-80g --vary '--batch-size 8,16,32' -- --lr 3e-4",
        ),
    ),
    "check": Command(
        "say whether a checkpoint is whole, and what is in it",
        ("check runs/gpt", "check s3://bucket/run/step-000300 --json"),
    ),
    "convert": Command(
        "turn a checkpoint into safetensors or back, or merge the folders of all ranks",
        (
            "convert runs/gpt/step-000300 weights",
            "convert model.safetensors runs/start",
            "convert parts/rank0 parts/rank1 runs/merged",
        ),
    ),
    "info": Command("print versions, devices and transports: what a bug report needs", ("info", "info --json")),
    "plan": Command(
        "print what fully_shard would do with a model",
        (
            "plan train:make_model --ranks 8 --policy-class Block",
            "plan train:make_model --ranks 64 --per-host 8 --json",
        ),
    ),
}
_PROGRAM = "python -m composable"


def main(words: Sequence[str] | None = None) -> int:
    """Run the command that ``words`` name, by default those of the process, and return its exit code.

    Raises ``SystemExit`` if the words are wrong (code 2), or ask for help (code 0).
    """
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(
        prog=_PROGRAM, description="Data parallelism as an annotation.", epilog=f"example: {_PROGRAM} info"
    )
    parser.add_argument("--version", action="version", version=f"torch-composable {__version__}")
    choices = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run: Any = None
    for name, command in COMMANDS.items():
        lines = [f"  {_PROGRAM} {example}" for example in command.examples]
        chosen = choices.add_parser(
            name,
            help=command.does,
            description=f"{command.does[0].upper()}{command.does[1:]}.",
            epilog="\n".join(["for example:", *lines]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in words[:1]:
            module = importlib.import_module(f"composable.commands.{name}")
            chosen.add_argument("--json", action="store_true", help="print one JSON value in place of text")
            module.add_arguments(chosen)
            run = module.run
    at = [*words, "--"].index("--")
    args = parser.parse_args(words[:at])
    if words[at + 1 :] and not hasattr(args, "of_script"):
        parser.error(f"{args.command} runs no script, to which -- could pass arguments")
    args.of_script = tuple(words[at + 1 :])
    try:
        return int(run(args))
    except ComposableError as error:
        place, fix = (f"; {name}: {text}" if text else "" for name, text in (("at", error.at), ("fix", error.fix)))
        print(f"error: {' '.join(error.what.split())}{place}{fix}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())

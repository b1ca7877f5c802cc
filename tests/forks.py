"""Ranks that are forks of a process which has imported what they need, where each would import it for seconds.

``python -m tests.forks PROGRAM '[[2, ["folder"]], [3, ["folder", "resume"]]]'`` runs a program on 2 ranks, and then
on 3, with the words of each, after one import of all that its file imports.
"""

import faulthandler
import importlib
import json
import os
import pickle
import runpy
import socket
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import torch

__all__ = ["LIMIT", "on_forks"]

# Seconds after which a rank ends with its stacks.
LIMIT = 300
_T = TypeVar("_T")


def on_forks(run: Callable[[], _T], ranks: int, folder: Path) -> list[_T]:
    """Return what ``run()`` gives on ranks that are forks of this process, with torchrun's variables."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        told = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0, "MASTER_ADDR": "localhost"}
        told["MASTER_PORT"] = one.getsockname()[1]
    processes = []
    for rank in range(ranks):
        (folder / f"found-{rank}").unlink(missing_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            processes.append(os.fork())
        if processes[-1]:
            continue
        try:
            output = os.open(folder / f"said-{rank}", os.O_CREAT | os.O_WRONLY)
            for stream in (1, 2):
                os.dup2(output, stream)
            faulthandler.dump_traceback_later(LIMIT, exit=True)
            warnings.simplefilter("default")
            torch.set_num_threads(1)
            os.environ.update({key: str(one) for key, one in {**told, "RANK": rank, "LOCAL_RANK": rank}.items()})
            (folder / f"found-{rank}").write_bytes(pickle.dumps(run()))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    for process in processes:
        os.waitpid(process, 0)
    for rank in range(ranks):
        assert (folder / f"found-{rank}").exists(), (folder / f"said-{rank}").read_text()[-4000:]
    return [pickle.loads((folder / f"found-{rank}").read_bytes()) for rank in range(ranks)]


def main(program: str, runs: str) -> None:
    importlib.import_module(program)

    def run() -> None:
        runpy.run_module(program, run_name="__main__")

    # Libraries take these to see that a launcher has started them.
    os.environ.update(TORCHELASTIC_RUN_ID="forks", TORCHELASTIC_RESTART_COUNT="0", TORCHELASTIC_MAX_RESTARTS="0")
    for ranks, words in json.loads(runs):
        sys.argv[1:] = words
        with TemporaryDirectory() as folder:
            on_forks(run, ranks, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])

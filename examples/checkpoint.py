"""Checkpoints that a kill at any moment leaves whole, loadable at any number of ranks.

A checkpoint is written under a name that readers ignore, synced, and only then renamed to
``step-NNNNNN``: the name is the promise that it is whole. The ``latest`` pointer is replaced
by a rename too, and older checkpoints are removed only after that. The folder must be one
that all ranks see.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

__all__ = ["find_checkpoint", "load_checkpoint", "read_settings", "save_checkpoint"]

_SETTINGS = "settings.json"
_WHOLE = re.compile(r"step-(\d{6,})")


def save_checkpoint(
    run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any], *, keep: int
) -> Path:
    """Write model, optimizer state and ``settings`` after ``step`` steps; leave the last ``keep`` checkpoints.

    Collective: all ranks, with an equal ``run``.
    """
    partial = run / f".partial-{step:06d}"
    if _rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    _barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    # Returns on every rank after all of them have written and synced their files.
    with _alone_is_fine():
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    whole = run / f"step-{step:06d}"
    if _rank() == 0:
        _write_synced(partial / _SETTINGS, json.dumps({**settings, "step": step}, indent=2))
        _sync_folder(partial)
        if whole.exists():  # of an abandoned continuation of this run
            shutil.rmtree(run / ".replaced", ignore_errors=True)
            whole.rename(run / ".replaced")
        partial.rename(whole)
        _write_synced(run / ".latest", whole.name)
        os.replace(run / ".latest", run / "latest")
        _sync_folder(run)
        _prune(run, whole, keep)
    _barrier()
    return whole


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint that ``path`` is, or the latest one in the run that it is.

    Raises:
        FileNotFoundError: There is no whole checkpoint.
    """
    if _WHOLE.fullmatch(path.name) and (path / _SETTINGS).is_file():
        return path
    pointer = path / "latest"
    if pointer.is_file():
        latest = path / pointer.read_text().strip()
        if _WHOLE.fullmatch(latest.name) and latest.is_dir():
            return latest
    whole = _whole_checkpoints(path)
    if not whole:
        raise FileNotFoundError(f"no checkpoint in {path}: pass a run's folder or one of its step-NNNNNN folders")
    return whole[-1]


def read_settings(checkpoint: Path) -> dict[str, Any]:
    """Return the settings saved with ``checkpoint``, and its ``step``."""
    settings: dict[str, Any] = json.loads((checkpoint / _SETTINGS).read_text())
    return settings


def load_checkpoint(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load model and optimizer state, whatever number of ranks and way of sharding wrote them.

    Collective: all ranks.
    """
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    with _alone_is_fine():
        dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Hide the warning that there is no process group: a single process is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _whole_checkpoints(run: Path) -> list[Path]:
    """Return the whole checkpoints of ``run``, oldest step first."""
    found = run.iterdir() if run.is_dir() else ()
    return sorted((path for path in found if _WHOLE.fullmatch(path.name)), key=_step_of)


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _prune(run: Path, newest: Path, keep: int) -> None:
    # Checkpoints of a later step belong to a continuation that was abandoned for this one.
    whole = [path for path in _whole_checkpoints(run) if path != newest]
    earlier = [path for path in whole if _step_of(path) < _step_of(newest)]
    kept = earlier[-(keep - 1) :] if keep > 1 else []
    for path in [*(path for path in whole if path not in kept), run / ".replaced", *run.glob(".partial-*")]:
        if path.exists():
            shutil.rmtree(path)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_distributed() -> bool:
    return dist.is_initialized()


def _rank() -> int:
    return dist.get_rank() if _is_distributed() else 0


def _barrier() -> None:
    if _is_distributed():
        dist.barrier()

"""Frames of threads: the place of a thread in the user's code, and the user's own calls of ``torch.distributed``.

Of these calls there is no other record. A watchdog reads the frames of other threads, which go on meanwhile.
"""

import contextlib
import inspect
import os
import threading
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from composable.ground.frames import outwards, place_in
from composable.ground.torch_private import started_in

# With the separator: others' packages may begin with the same name.
_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
_TESTING = f"{_OURS}testing{os.sep}"
_TORCHS_WAITS = (dist.distributed_c10d.__file__, torch.futures.__file__)
_NOT_THE_USERS = (str(Path(torch.__file__).parent) + os.sep, _OURS, threading.__file__, contextlib.__file__)
# Functions that users call by other names; empty: around the call of another function.
_AS_USERS_SAY = {
    "annotate": "",
    "annotate_on_rank": "",
    "join_hook": "Join",
    "load_model_state_dict": "set_model_state_dict",
    "write": "save_checkpoint",
}
# torch's collectives, by their code objects: unlike messages, the n-th one of a group is the same on all ranks.
_COLLECTIVES = {
    inspect.unwrap(getattr(dist, name)).__code__: name
    for name in (
        *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single"),
        *("barrier", "broadcast", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    )
    if hasattr(dist, name)
}


def users_place(frame: FrameType | None) -> str:
    """Return the place of a thread in the user's code: "train.py:20, in run"; empty if it runs no such code."""
    return place_in(frame, _NOT_THE_USERS)


def is_in_our_call(frame: FrameType) -> bool:
    """Say whether a thread with this innermost frame is in a call of this package."""
    return any(each.f_code.co_filename.startswith(_OURS) for each in outwards(frame))


def call_around(frame: FrameType | None) -> str:
    """Return the name, for messages, of this package's call that contains a frame; if none does, of torch's call."""
    name = ""
    for each in outwards(frame):
        own, file = each.f_code.co_name, each.f_code.co_filename
        if file.startswith(_OURS) and not file.startswith(_TESTING):
            name = (not own.startswith(("_", "<")) and _AS_USERS_SAY.get(own, own)) or name
        elif name and not file.startswith((_TESTING, *_NOT_THE_USERS)):
            break
    return name or ("a collective" if frame is None else f"torch.distributed.{frame.f_code.co_name}")


def collective_in(frame: FrameType) -> tuple[dist.ProcessGroup | None, str]:
    """Return the group and name of torch's collective that runs in ``frame``; ``None`` and "": it runs none."""
    name = _COLLECTIVES.get(frame.f_code, "")
    return (frame.f_locals.get("group") or dist.group.WORLD) if name else None, name


def count_in(frame: FrameType) -> int:
    """Return how many collectives the group of torch's collective in ``frame`` has counted; 0: it runs none."""
    group, _ = collective_in(frame)
    return 0 if group is None else started_in(group)


def is_torchs_wait(frame: FrameType) -> bool:
    """Say whether a thread with this innermost frame waits in a call of torch, or has raised there."""
    return frame.f_code.co_filename in _TORCHS_WAITS

"""What ranks send to each other in a rehearsal, noted call by call, and compared.

Each rank is rehearsed by itself, and its collectives return at once. So a hang is found afterwards: the ledgers of the
ranks are played against each other, where a call that waits ends once all ranks of its group have made it.
"""

import inspect
import linecache
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile, zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from composable.ground.frames import outwards
from composable.ground.names import count_text, dtype_text, ranks_text
from composable.ground.torch_private import groups_of_process, tree_leaves

_OURS, _TORCH, _PYTHON = (
    str(Path(file).parent) + os.sep for file in (sys.modules["composable"].__file__ or "", torch.__file__, os.__file__)
)
LIBRARIES = (_OURS, _TORCH)
CALLERS = 2
_WAITING = {inspect.unwrap(call).__code__ for call in (dist.send, dist.recv)}
# The part of each collective's whole that a rank sends, times the ranks of the group, less one.
_SENT = {"all_reduce": 2, "barrier": 0, "note": 0}
# What the buffer of NCCL between two ranks takes: more is sent only once the other rank receives.
_EAGER_BYTES = 4 * 2**20
_AT = f"\n{' ' * 14}"


@dataclass(frozen=True)
class LedgerLine:
    """A collective, message or comparison of one rank.

    Attributes:
        op: What it is, such as "all_gather".
        ranks: The global ranks of its group; of a message, who sends and who receives.
        text: What all ranks of the group have to agree on: shape, dtype, root.
        whole_bytes: The bytes of the whole buffer.
        waits: The rank goes on only when the others have come.
        place: The user's line, such as "train.py:88".
        source: The text of that line, and the lines of the user that led to it.
        module: The phase, and the module that ran.
        step: How many optimizer steps were over.
        is_hidden: A gather of values outside of forward and backward that the library makes.
        group: The name of its group, which is one on all ranks.
        owner: Of a gather of parameters, the number of their module, in the order in which modules were made.
    """

    op: str
    ranks: tuple[int, ...]
    text: str
    whole_bytes: int
    waits: bool
    place: str
    source: str
    module: str
    step: int
    is_hidden: bool = False
    group: str = ""
    owner: int = -1

    def __str__(self) -> str:
        what = f"{self.op} {self.text}".strip() + f" of {_ranks(self.ranks)}, in {self.module}"
        return f"{what}, after {count_text(self.step, 'step')}{_AT}at {self.place}: {self.source}"

    @property
    def is_message(self) -> bool:
        return self.op in {"send", "recv"}

    def sent_bytes(self, rank: int, hosts: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that ``rank`` sends, and those to other hosts: for a ring, as the mean of the group."""
        size = len(self.ranks)
        if self.is_message:
            message = self.whole_bytes if self.op == "send" else 0
            return message, message * (hosts[self.ranks[0]] != hosts[self.ranks[1]])
        if size < 2:
            return 0, 0
        sent = self.whole_bytes * _SENT.get(self.op, 1) * (size - 1) / size
        on = [hosts[one] for one in self.ranks]
        return round(sent), round(sent * sum(a != b for a, b in pairwise([*on, on[0]])) / size)


def _ranks(ranks: Sequence[int]) -> str:
    is_range = len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]}-{ranks[-1]}" if is_range else ranks_text(ranks)


def users_line(frame: FrameType | None, callers: int = 0) -> tuple[str, str]:
    """Return the place and the text of the innermost line of the user; of another library, if it calls by itself.

    The text goes on with at most ``callers`` lines that led to it. What runs the script is not among them.
    """
    frames = [*takewhile(lambda one: one.f_globals.get("__name__") != "runpy", outwards(frame))]
    others = [one for one in frames if not one.f_code.co_filename.startswith((_OURS, _TORCH, _PYTHON, "<"))]
    others += [one for one in frames if "-packages" in one.f_code.co_filename]
    own = [one for one in others if "-packages" not in one.f_code.co_filename]
    shown = [(one.f_code.co_filename, one.f_lineno) for one in (own or others)[: 1 + callers]]
    places = [(f"{Path(file).name}:{line}", linecache.getline(file, line).strip()) for file, line in shown]
    place, source = places[0] if places else ("(no line of the script)", "")
    return place, source + "".join(f"{_AT}from {outer}: {text}" for outer, text in places[1:])


def line_of(func: Any, args: Sequence[Any], module: str, phase: str, step: int, owner: int = -1) -> LedgerLine | None:
    """Return the line for an operation of torch.distributed with its arguments; ``None``: it waits for no one."""
    name = func._overloadpacket.__name__.strip("_")
    if name in {"wait_tensor", "monitored_barrier"}:
        return None
    op = _op(name)
    objects = [one for one in args if isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type())]
    group = dist.ProcessGroup.unbox(objects[0]) if objects else groups_of_process()[args[-1]]
    ranks = tuple(dist.get_process_group_ranks(group))
    tensors = [one for one in tree_leaves(args) if isinstance(one, torch.Tensor)]
    numbers = [one for one in args if type(one) is int]
    flags = [one for one in args if type(one) is bool]
    sides = [[one for one in tree_leaves(arg) if isinstance(one, torch.Tensor)] for arg in args]
    whole = max(sides, key=lambda side: sum(one.nbytes for one in side), default=tensors)
    count = sum(one.nbytes for one in whole)
    shape = f"{', '.join(str(list(one.shape)) for one in whole[:2])}{' ...' * (len(whole) > 2)}"
    text = f"{shape} {dtype_text(whole[0].dtype)}" if whole else ""
    is_traced = func.namespace == "_c10d_functional"
    waits = bool(flags) and not flags[-1]
    if op in {"send", "recv"}:
        here, peer = dist.get_rank(), ranks[numbers[0]]
        ranks = (here, peer) if op == "send" else (peer, here)
        # The user has called ``send`` or ``recv``, which call torch's ``isend`` or ``irecv``.
        waits = any(one.f_code in _WAITING for one in outwards(sys._getframe(1)))
    elif op in {"broadcast", "reduce", "gather", "scatter"}:
        text += f" root {ranks[numbers[0]]}"
        if op in {"gather", "scatter"}:
            # Other ranks than the root have no list.
            least = min((side for side in sides if side), key=lambda side: sum(one.nbytes for one in side))
            count, text = least[0].nbytes * len(ranks), f"{list(least[0].shape)} {text.split('] ')[-1]}"
    elif op == "all_to_all":
        text = dtype_text(whole[0].dtype)  # Ranks may send different counts.
    elif is_traced and op == "all_gather":
        count *= len(ranks)
    elif op == "barrier":
        text, count = "", 0
    # An operation on a sharded parameter makes a gather, not a call that asks for whole values.
    files = [one.f_code.co_filename for one in outwards(sys._getframe(1)) if phase == "outside"]
    is_hidden = op in {"all_gather", "broadcast"} and any(one.startswith(_OURS + "dtensor") for one in files)
    place, source = users_line(sys._getframe(1), 0 if is_hidden else CALLERS)
    owner, name = owner if op == "all_gather" else -1, group.group_name
    return LedgerLine(op, ranks, text, count, waits, place, source, module, step, is_hidden, name, owner)


def _op(name: str) -> str:
    if name.startswith(("allgather", "all_gather")):
        return "all_gather"
    if name.startswith("alltoall"):
        return "all_to_all"
    if name.startswith(("send", "recv")):
        return name[:4]
    known = ("all_reduce", "reduce_scatter", "all_to_all", "broadcast", "barrier", "scatter", "gather", "reduce")
    return next((one for one in known if name.replace("allreduce", "all_reduce").startswith(one)), name)


def hang_between(ledgers: Mapping[int, Sequence[LedgerLine]]) -> str:
    """Return the first difference between the ledgers of ranks, by rank, that makes them wait; empty: there is none.

    Collectives of several groups of the same ranks may begin in any order, as those of ``replicate`` do.
    """
    queues: dict[tuple[Any, ...], dict[int, list[LedgerLine]]] = {}
    at = dict.fromkeys(ledgers, 0)
    is_posted = dict.fromkeys(ledgers, False)
    moved = True
    while moved:
        moved = False
        for rank, lines in ledgers.items():
            while at[rank] < len(lines):
                line = lines[at[rank]]
                queue = queues.setdefault((line.is_message or line.group, line.ranks), {})
                if not is_posted[rank]:
                    queue.setdefault(rank, []).append(line)
                    is_posted[rank] = moved = True
                place = len(queue[rank]) - 1
                here = [one for one in dict.fromkeys(line.ranks) if one in ledgers]
                met = [one for one in here if len(queue.get(one, ())) > place]
                for other in met:
                    if not line.is_message and _key(queue[other][place]) != _key(line):
                        return _told(queue, other, rank, at, ledgers)
                if line.waits and len(met) < len(here):
                    break
                at[rank], is_posted[rank], moved = at[rank] + 1, False, True
    for (_, ranks), queue in queues.items():
        here = [one for one in dict.fromkeys(ranks) if one in ledgers]
        counts = {one: len(queue.get(one, ())) for one in here}
        if len(set(counts.values())) > 1:
            most, least = max(here, key=lambda one: counts[one]), min(here, key=lambda one: counts[one])
            return _told(queue, most, least, at, ledgers)
    return _ring(ledgers)


def _ring(ledgers: Mapping[int, Sequence[LedgerLine]]) -> str:
    """Return a text if every rank sends before it receives from another one; empty: some rank receives first.

    Ranks that are not rehearsed are taken to be like these, so that nobody would take what is sent.
    """
    firsts = []
    for rank, lines in ledgers.items():
        sends, takes = ([one for one in lines if one.op == op] for op in ("send", "recv"))
        first = next((one for one in lines if one.is_message), None)
        if first is not None:
            is_blocked = bool(takes) and first in sends and first.waits and first.whole_bytes > _EAGER_BYTES
            if not is_blocked or takes[0].ranks[0] == first.ranks[1]:
                return ""
            firsts.append(f"rank {rank}: {first}")
    return "\n".join(firsts[:2])


def _key(line: LedgerLine) -> tuple[str, str, int]:
    return line.op, line.text, line.owner


def _told(
    queue: Mapping[int, Sequence[LedgerLine]],
    rank: int,
    other: int,
    at: Mapping[int, int],
    ledgers: Mapping[int, Sequence[LedgerLine]],
) -> str:
    """Return a text with the first line of each rank after which their calls in a group are no more the same."""
    own, others = queue.get(rank, ()), queue.get(other, ())
    pairs = [*zip_longest(own, others)]
    # Where a root and the others make one call on two lines, the next call is on the same line again.
    differs = [one is None or two is None or one.place != two.place for one, two in pairs]
    first = next((index for index, (now, then) in enumerate(pairwise([*differs, True])) if now and then), None)
    if first is None:
        # All are there on both sides.
        first = next((index for index, (one, two) in enumerate(pairs) if _key(one) != _key(two)), len(pairs) - 1)
    rows = []
    for number, lines in sorted(((rank, own), (other, others))):
        if first < len(lines):
            rows.append(f"rank {number}: {lines[first]}")
        elif at[number] < len(ledgers[number]):
            rows.append(f"rank {number} waits in another call: {ledgers[number][at[number]]}")
        else:
            last = f", after {ledgers[number][-1]}" if ledgers[number] else ""
            rows.append(f"rank {number} has ended{last}")
    return "\n".join(rows)

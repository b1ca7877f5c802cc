"""Random trees and stories, rehearsed, and on real ranks: collectives, bytes and memory have to be equal.

    FUZZ_WIDTH=64 python -m tools.fuzz.rehearsed --seeds 0-50 --world-size 2,3

The width lets parameters outweigh messages. Each program is a script that ``composable.testing`` rehearses on every
rank; the same function runs on real tensors.
"""

import argparse
import gc
import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from typing_extensions import Self

from composable import ComposableError
from composable.comm import register_transport, transport_class, transport_names
from composable.rehearsal import LedgerLine, ScriptRun, hang_between, rehearse_script
from composable.rehearsal.ledger import line_of
from composable.rehearsal.surroundings import use_collectives_only
from composable.testing.device_streams import resizes_seen
from tests.live_bytes import LiveBytes
from tests.world import RankErrors, run_ranks
from tools.fuzz.cases import draw, draw_hybrid, draw_replicated
from tools.fuzz.run import numbers
from tools.fuzz.runner import line_of as text_of
from tools.fuzz.runner import train_annotated
from tools.fuzz.stories import draw_story, tell_annotated

__all__ = ["KINDS", "RealRank", "by_group", "difference", "main", "train"]

KINDS = {"plain": draw, "replicated": draw_replicated, "hybrid": draw_hybrid, "story": draw_story}
# What runs in another thread is followed neither here nor there.
WITHOUT = frozenset({"all in a thread", "backward in a thread"})
# A program that the library refuses exits so.
SCRIPT = """import sys
for name in [one for one in sys.modules if one.startswith(("tools.", "tests."))]:
    del sys.modules[name]  # They are imported as in a script of its own, so they find what stands in for saves.
from tools.fuzz.rehearsed import train
import torch.distributed as dist
dist.init_process_group("gloo")
refused = train({kind!r}, {seed}, {ranks}, {folder!r})
if refused:
    raise SystemExit(refused)
"""
EXACT = 0.02
# Peaks of programs that save or load are not compared: a rehearsal leaves that out.
ALIKE = ("right", "right but for peaks", "refused")
# How a collective is compared: the numbers of its group, what it is, shape and dtype, bytes.
Lines = Mapping[tuple[int, ...], Sequence[tuple[str, str, int]]]


def train(kind: str, seed: int, ranks: int, folder: str) -> str:
    """Train as this rank, without comparisons; return what the library has refused."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    gc.disable()
    try:
        drawn: Any = KINDS[kind]
        case = drawn(seed, ranks) if kind == "story" else drawn(seed, ranks, WITHOUT)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if kind == "story":
                tell_annotated(case, Path(folder))
            else:
                train_annotated(case, Path(folder))
    except ComposableError as error:
        return text_of(error)
    except Exception as error:
        if type(error).__name__ != "Refused":
            raise
        return text_of(error)
    finally:
        gc.enable()
        torch.set_default_dtype(before)
    return ""


class RealRank(LiveBytes):
    """Notes the collectives of a real rank, and the most bytes of the tensors that operations make.

    What gloo takes for itself is made by no operation that this sees.

    Args:
        waits: Wait for each collective. Else it holds tensors until other ranks have come, so the peak is another one
            each time; but ranks that begin collectives of several groups in another order would wait for ever.
    """

    def __init__(self, *, waits: bool) -> None:
        super().__init__()
        self._waits = waits
        self._seeing = resizes_seen(self._resized)
        self.lines: list[LedgerLine | None] = []

    def __enter__(self) -> Self:
        self._seeing.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._seeing.__exit__(None, None, None)

    def _resized(self, _: torch.UntypedStorage) -> None:
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace in {"c10d", "_c10d_functional"}:
            self.lines.append(line_of(func, args, "", "", 0))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        waits = self._waits and func.namespace == "c10d"
        if waits and func._overloadpacket.__name__.strip("_")[:4] not in {"send", "recv"}:
            for work in tree_leaves(result):
                if isinstance(work, torch.ScriptObject):
                    dist.Work.unbox(work).wait()
        return result


def _real(kind: str, seed: int, ranks: int, folder: str, *, waits: bool) -> tuple[str, Lines, int | None]:
    before = [transport_class(name) for name in transport_names()]
    use_collectives_only()
    try:
        with RealRank(waits=waits) as real:
            refused = train(kind, seed, ranks, folder)
    finally:
        for one in before:
            register_transport(one)
    return refused, by_group(real.lines), real.peak if waits else None


def by_group(lines: Iterable[LedgerLine | None]) -> Lines:
    """Return the collectives of values by their group, without the small messages with which ranks compare notes."""
    found: dict[tuple[int, ...], list[tuple[str, str, int]]] = {}
    for one in lines:
        if one is not None and "float" in one.text and len(one.ranks) > 1:
            found.setdefault(one.ranks, []).append((one.op, one.text, one.whole_bytes))
    return found


def difference(kind: str, seed: int, ranks: int) -> str:
    """Return how a rehearsed program differs from the real one, or how they are alike: one of ``ALIKE``."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "train.py")
        script.write_text(SCRIPT.format(kind=kind, seed=seed, ranks=ranks, folder=folder))
        job = ScriptRun(script, (), ranks, ranks, "cpu", rehearsed=tuple(range(ranks)), timeout_s=300.0)
        runs = rehearse_script(job)
        try:
            try:
                real = run_ranks(_real, ranks, kind, seed, ranks, folder, timeout_s=20, waits=True)
            except RankErrors as errors:
                if not any(isinstance(one, TimeoutError) for one in errors.errors.values()):
                    raise
                real = run_ranks(_real, ranks, kind, seed, ranks, folder, waits=False)
        except RankErrors as errors:
            return f"on real ranks: {text_of(next(iter(errors.errors.values())))}"
    if refused := real[0][0]:
        said = {one.said.removeprefix("the script exits: ") for one in runs}
        refused = refused.replace("_orig_mod.", "")  # torch.compile is left out
        return "refused" if said == {refused} else f"refused by real ranks: {refused}; rehearsed: {said}"
    if broken := [one for one in runs if one.end != "ended"]:
        return f"rank {broken[0].rank} {broken[0].end}: {broken[0].said}"
    if hang := hang_between({one.rank: one.lines for one in runs}):
        return f"a false hang: {hang}"
    found = "right"
    for one, (_, lines, peak) in zip(runs, real, strict=True):
        have = by_group(one.lines)
        for group in sorted({*have, *lines}):
            own, others = list(have.get(group, ())), list(lines.get(group, ()))
            if own != others:
                index = next((at for at, pair in enumerate(zip(own, others, strict=False)) if pair[0] != pair[1]), -1)
                index = index if index >= 0 else min(len(own), len(others))
                sides = " not ".join(str((row[index : index + 1] or ["nothing"])[0]) for row in (own, others))
                return f"rank {one.rank}, call {index} of {len(own)} not {len(others)} in {group}: {sides}"
        if peak is None or any(note.endswith(("writes nothing", "reads no tensors")) for note in one.notes):
            found = "right but for peaks"
        elif abs(one.peak - peak) > EXACT * peak:
            return f"rank {one.rank}: peak {one.peak} in {one.peak_at}; real: {peak} ({one.peak / peak - 1:+.1%})"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare as many programs as the command line says; return 1 if any differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=numbers, default=range(10), help="one, some (1,2) or a range (0-50)")
    parser.add_argument("--world-size", type=numbers, default=(2,), help="numbers of ranks")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), help=", ".join(KINDS))
    options = parser.parse_args(arguments)
    started, counts = time.monotonic(), {**dict.fromkeys(ALIKE, 0), "differs": 0}
    for seed in options.seeds:
        for kind in options.kinds:
            for ranks in options.world_size:
                found = difference(kind, seed, ranks)
                counts[found if found in ALIKE else "differs"] += 1
                if found not in ALIKE:
                    print(f"{kind} {seed}, {ranks} ranks: {found}", flush=True)
    print(f"{counts} in {time.monotonic() - started:.0f} s")
    return int(counts["differs"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())

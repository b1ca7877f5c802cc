"""Runs many random trees, or one, and shows which kinds of things they were made of and how they ended.

    python -m tools.fuzz.run --seeds 0-5000 --world-size 2,3
    python -m tools.fuzz.run --seeds 0-500 --replicate
    python -m tools.fuzz.run --seeds 0-500 --hybrid --world-size 4
    python -m tools.fuzz.run --seeds 0-200 --ranks processes
    python -m tools.fuzz.run --seeds 1234 --shrink
    python -m tools.fuzz.run --stories --seeds 0-300 --world-size 2 --shrink

One tree is described, and each that hangs. ``--shrink`` looks for the simplest one that ends in the same way. Of stories
(tools/fuzz/stories.py) ``--only 3,17`` runs some operations alone.
"""

import argparse
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import torch

from tools.fuzz.annotations import MODES
from tools.fuzz.between import ACTIONS
from tools.fuzz.cases import HOOKS, Case, draw, draw_hybrid, draw_replicated, kinds_of
from tools.fuzz.nodes import KINDS
from tools.fuzz.programs import PROGRAMS
from tools.fuzz.runner import OUTCOMES, TIMEOUT_S, Outcome, run_case, shrink
from tools.fuzz.stories import draw_story, run_story, shrink_story

__all__ = ["main", "numbers", "table"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return 1 if anything was wrong, hung or raised."""
    options = _options(arguments)
    torch.set_num_threads(1)
    if options.stories:
        return _tell(options)
    started = time.monotonic()
    ended: list[tuple[Case, Outcome]] = []
    is_single = len(options.seeds) * len(options.world_size) == 1
    drawn = draw_replicated if options.replicate else draw_hybrid if options.hybrid else draw
    cases = (drawn(seed, size, options.without, options.steps) for seed in options.seeds for size in options.world_size)
    for case in cases:
        outcome = run_case(case, in_processes=options.ranks == "processes", timeout_s=options.timeout)
        ended.append((case, outcome))
        if outcome.kind != "right" and not (outcome.kind == "refused" and options.quiet):
            print(f"{outcome.kind:<10} seed {case.seed}, {case.world_size} ranks: {outcome.text}", flush=True)
        if is_single or outcome.kind == "hang":
            print(case, outcome.details, sep="\n", flush=True)
        if options.shrink and outcome.kind in ("wrong", "hang", "error"):
            for simpler, found in shrink(case, outcome):
                print("simpler, and ends alike:", found.text, simpler, "", sep="\n", flush=True)
    print(table(ended))
    print(f"{len(ended)} trees in {time.monotonic() - started:.1f} s")
    for kind in OUTCOMES[1:]:
        seeds = [f"{case.seed}/{case.world_size}" for case, outcome in ended if outcome.kind == kind]
        if seeds:
            print(f"{kind} (seed/ranks): {' '.join(seeds)}")
    return int(any(outcome.kind in ("wrong", "hang", "error") for _, outcome in ended))


def _tell(options: argparse.Namespace) -> int:
    """Run stories; show what is wrong, and how often each operation was done, skipped, or refused and why."""
    counts: Counter[tuple[str, str]] = Counter()
    failed = []
    is_single = len(options.seeds) * len(options.world_size) == 1
    for seed in options.seeds:
        for size in options.world_size:
            story = draw_story(seed, size)
            story = story if options.only is None else story.only(options.only)
            outcome, ended = run_story(story)
            counts.update((op.name, how.splitlines()[0]) for op, how in ended)
            if outcome.kind not in ("right", "refused"):
                failed.append(f"{seed}/{size}")
            if outcome.kind != "right":
                print(f"{outcome.kind:<10} seed {seed}, {size} ranks: {outcome.text}", flush=True)
            if is_single:
                print(story, outcome.details, *(f"{op}: {how}" for op, how in ended), sep="\n", flush=True)
            if options.shrink and outcome.kind not in ("right", "refused"):
                shrunk = [(story, outcome), *shrink_story(story, outcome)][-1]
                print(*shrunk[:1], shrunk[1].text, shrunk[1].details * is_single, sep="\n", flush=True)
    if not is_single:
        print(*(f"{count:>6} {name}: {how}" for (name, how), count in sorted(counts.items())), sep="\n")
    print(f"not right (seed/ranks): {' '.join(failed) or 'none'}")
    return int(bool(failed))


def table(ended: Iterable[tuple[Case, Outcome]]) -> str:
    """Return how many of each kind ended how."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for case, outcome in ended:
        for kind in kinds_of(case):
            counts[kind][outcome.kind] += 1
        counts["all"][outcome.kind] += 1
    width = max(map(len, counts), default=0)
    lines = [f"{'':<{width}} {' '.join(f'{name:>10}' for name in OUTCOMES)}"]
    for kind, of in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        lines.append(f"{kind:<{width}} {' '.join(f'{of[name] or chr(183):>10}' for name in OUTCOMES)}")
    return "\n".join(lines)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=numbers, default=range(100), help="one, some (1,2) or a range (0-5000)")
    parser.add_argument("--world-size", type=numbers, default=(2,), help="numbers of ranks")
    parser.add_argument("--ranks", choices=("threads", "processes"), default="threads")
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps of each tree")
    parser.add_argument("--without", type=_names, default=frozenset(), help="what to leave out, separated by ;")
    parser.add_argument("--replicate", action="store_true", help="trees of which all or part is replicated")
    parser.add_argument("--hybrid", action="store_true", help="shards have copies")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds that a tree may take")
    parser.add_argument("--shrink", action="store_true", help="look for a simpler tree that ends in the same way")
    parser.add_argument("--stories", action="store_true", help="stories instead of trees")
    parser.add_argument("--only", type=numbers, help="the numbers of the operations of a story to run, and no others")
    parser.add_argument("--quiet", action="store_true", help="do not list what is refused")
    return parser.parse_args(arguments)


def numbers(text: str) -> Sequence[int]:
    """Read one number, some, or a range."""
    first, dash, last = text.partition("-")
    return range(int(first), int(last)) if dash else [int(part) for part in text.split(",")]


def _names(text: str) -> frozenset[str]:
    names = frozenset(name.strip() for name in text.split(";"))
    unknown = names.difference(KINDS, MODES, PROGRAMS, ACTIONS, HOOKS)
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown: {'; '.join(unknown)}. See the table, without what is before a colon"
        )
    return names


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())

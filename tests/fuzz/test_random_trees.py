"""Random trees, annotated and trained at random, give every gradient and every parameter of one process.

More seeds: ``python -m tools.fuzz.run --seeds 0-5000 --world-size 2,3``. One seed again, with simpler trees that end
in the same way: ``python -m tools.fuzz.run --seeds 1234 --shrink``. With any options of ``replicate``: ``--replicate``.
"""

from collections import Counter
from collections.abc import Iterable

import pytest

from tools.fuzz.annotations import COPY_MODES, MODES
from tools.fuzz.between import ACTIONS
from tools.fuzz.cases import Case, draw, draw_hybrid, draw_replicated, kinds_of
from tools.fuzz.nodes import KINDS
from tools.fuzz.programs import PROGRAMS
from tools.fuzz.runner import Outcome, run_case

# (ranks, seeds); together a hundred trees: enough to meet every kind.
GROUPS = [(2, range(start, start + 20)) for start in range(0, 80, 20)] + [(3, range(240, 255)), (4, range(270, 275))]
# With options of replicate, and such as exclude each other: more is refused.
REPLICATED = [(2, range(14)), (3, range(14, 20)), (1, range(20, 26))]
REPLICATED += [(3, range(4152, 4153))]  # Two groups of equal ranks, after update_process_group of a part.
# With copies of shards.
HYBRID = [(2, range(12, 24)), (4, range(12)), (3, range(24, 28))]
FAILURES = ("wrong", "hang", "error")


def described(ended: Iterable[tuple[Case, Outcome]]) -> str:
    return "\n\n".join(f"{outcome.kind}: {outcome.text}\n{case}" for case, outcome in ended)


def check(cases: Iterable[Case], *, share: float) -> None:
    """Run cases; none may fail, and ``share`` of them train as one process does."""
    ended = [(case, run_case(case)) for case in cases]
    failed = [(case, outcome) for case, outcome in ended if outcome.kind in FAILURES]
    assert not failed, f"{len(failed)} of {len(ended)} trees\n{described(failed)}"
    counts = Counter(outcome.kind for _, outcome in ended)
    # A library that refuses everything, or a generator that makes what torch refuses, would pass too.
    assert counts["right"] >= share * len(ended), described(pair for pair in ended if pair[1].kind != "right")


def _name(value: object) -> str:
    return f"seeds {value.start}-{value.stop - 1}" if isinstance(value, range) else f"{value} ranks"


@pytest.mark.parametrize(("world_size", "seeds"), GROUPS, ids=_name)
def test_random_trees_train_as_one_process_does(world_size: int, seeds: range) -> None:
    check([draw(seed, world_size) for seed in seeds], share=0.7)


@pytest.mark.parametrize(("world_size", "seeds"), REPLICATED, ids=_name)
def test_with_any_options_of_replicate_they_do_or_are_refused_on_every_rank(world_size: int, seeds: range) -> None:
    check([draw_replicated(seed, world_size) for seed in seeds], share=0.4)


@pytest.mark.parametrize(("world_size", "seeds"), HYBRID, ids=_name)
def test_with_copies_of_shards_they_do(world_size: int, seeds: range) -> None:
    check([draw_hybrid(seed, world_size) for seed in seeds], share=0.7)


@pytest.mark.parametrize("seed", [3, 11, 17, 29])
def test_so_they_do_on_processes(seed: int) -> None:
    case = draw(seed, 2)
    outcome = run_case(case, in_processes=True)
    assert outcome.kind in ("right", "refused"), described([(case, outcome)])


def test_so_few_seeds_meet_every_kind() -> None:
    met = {kind for world_size, seeds in GROUPS for seed in seeds for kind in kinds_of(draw(seed, world_size))}
    met |= {kind for seed in range(500) for kind in kinds_of(draw_replicated(seed, 2))}
    met |= {kind for seed in range(100) for kind in kinds_of(draw_hybrid(seed, 2))}
    wanted = [f"node: {name}" for name in KINDS]
    wanted += [f"annotation: {name}" for name in (*MODES, *COPY_MODES)]
    wanted += [f"step: {name}" for name in PROGRAMS]
    wanted += [f"between: {name}" for name in ACTIONS]
    assert [kind for kind in wanted if kind not in met] == []


def test_a_seed_is_always_the_same_tree() -> None:
    for one in (draw, draw_hybrid, draw_replicated):
        assert [one(seed, 2) for seed in range(20)] == [one(seed, 2) for seed in range(20)]

"""Long random stories of one model are, after each operation, what one process has.

More seeds: ``python -m tools.fuzz.run --stories --seeds 0-300 --world-size 2 --shrink``.
"""

import dataclasses

import pytest
import torch

from composable import UsageError
from tools.fuzz.operations import OPERATIONS, Operation
from tools.fuzz.runner import Outcome
from tools.fuzz.stories import Op, Story, draw_story, run_story, shrink_story
from tools.fuzz.story_parts import Side

# (ranks, seed); together so many that every operation is met.
STORIES = [(2, 1), (3, 2), (1, 3), (4, 4), *((2, seed) for seed in (7, 21, 30, 32, 49, 54))]


@pytest.mark.parametrize(("world_size", "seed"), STORIES)
def test_a_story_on_ranks_goes_as_in_one_process(world_size: int, seed: int) -> None:
    story = draw_story(seed, world_size)
    outcome, ended = run_story(story)
    assert outcome.kind == "right", f"{story}\n{outcome.text}\n{outcome.details}"
    # A library that refuses everything would pass too.
    done = [op for op, how in ended if how == "done"]
    assert len(done) > len(ended) / 2, [(str(op), how) for op, how in ended]


def test_a_seed_is_always_the_same_story_of_15_to_45_operations() -> None:
    for seed in range(20):
        story = draw_story(seed, 2)
        assert story == draw_story(seed, 2)
        assert 15 <= len(story.ops) <= 45
        assert story.command == f"python -m tools.fuzz.run --stories --seeds {seed} --world-size 2"


def test_so_few_stories_meet_every_operation() -> None:
    assert {op.name for size, seed in STORIES for op in draw_story(seed, size).ops} == OPERATIONS.keys()


def _wrong_number(side: Side) -> None:
    """Change one element on the last rank, by little."""
    if not side.is_plain and side.rank == side.world_size - 1:
        with torch.no_grad():
            list(side.params().values())[-1].data.mul_(1 + 1e-6)


def _wrong_gradient(side: Side) -> None:
    if not side.is_plain:
        for param in side.params().values():
            if param.grad is not None:
                param.grad = None
                break


@pytest.mark.parametrize(("plant", "text"), [(_wrong_number, "value differs"), (_wrong_gradient, "no gradient")])
def test_a_wrong_number_is_noticed_where_it_arises(plant: object, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATIONS, "planted", Operation(plant, 0))  # type: ignore[arg-type]
    ops = (Op(0, "train: plain"), Op(1, "step"), Op(2, "train: plain"), Op(3, "planted"), Op(4, "step"))
    outcome, _ = run_story(dataclasses.replace(draw_story(0, 2), ops=ops))
    assert outcome.kind == "wrong"
    assert outcome.text.startswith(text), outcome
    assert "operation 3 (planted)" in outcome.text


def test_what_is_not_refused_alike_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPERATIONS, "planted", Operation(_refused_on_one_rank, 0))
    outcome, _ = run_story(dataclasses.replace(draw_story(0, 2), ops=(Op(0, "planted"),)))
    assert outcome.kind == "wrong"
    assert outcome.text.startswith("refused on some ranks only"), outcome


def _refused_on_one_rank(side: Side) -> None:
    if side.rank == 1:
        raise UsageError("planted")


def test_shrinking_leaves_what_a_planted_fault_needs_and_the_command_that_runs_it() -> None:
    def run(story: Story) -> Outcome:
        names = [op.number for op in story.ops]
        is_wrong = 3 in names and 11 in names and names.index(3) < names.index(11)
        return Outcome("wrong", f"value differs: 'a{len(names)}', operation 11") if is_wrong else Outcome("right")

    story = draw_story(5, 2)
    found = list(shrink_story(story, run(story), run))
    assert [op.number for op in found[-1][0].ops] == [3, 11]
    assert found[-1][0].command == "python -m tools.fuzz.run --stories --seeds 5 --world-size 2 --only 3,11"
    assert found[-1][0] == story.only([3, 11])
    # Halves first: few runs are needed.
    assert len(found) < 15


def test_a_planted_fault_of_two_operations_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    def arm(side: Side) -> dict[str, object]:
        return {"saves": {-1: "armed"}}

    def fire(side: Side) -> None:
        if -1 in side.now.saves:
            _wrong_number(side)

    monkeypatch.setitem(OPERATIONS, "arm", Operation(arm, 0))
    monkeypatch.setitem(OPERATIONS, "fire", Operation(fire, 0))
    names = ["train: plain", "arm", "step", "evaluate", "fire", "drop gradients"]
    story = dataclasses.replace(draw_story(0, 2), ops=tuple(Op(number, name) for number, name in enumerate(names)))
    outcome, _ = run_story(story)
    smallest, _ = list(shrink_story(story, outcome))[-1]
    assert [op.name for op in smallest.ops] == ["arm", "fire"]

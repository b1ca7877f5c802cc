"""Tests ``diagnose`` of composable/comm/waits.py on programs that nobody runs: lists of what each rank starts."""

import random
from dataclasses import dataclass, field

import pytest

from composable.comm.waits import COUNTED, ORDERED, Diagnosis, RankStatus, Tree, Wait, diagnose


@dataclass(frozen=True)
class Op:
    """A collective of ``ranks``; ``tag`` below zero: met by its order in the group, where it is of ``kind``."""

    group: str
    ranks: tuple[int, ...]
    tag: int
    kind: str = ""


@dataclass
class Rank:
    """Runs its program: starts each collective and waits for it, or for one that was started before."""

    number: int
    program: list[Op]
    started: list[Op] = field(default_factory=list)
    is_waiting: bool = False

    def started_of(self, group: str, tag: int) -> list[Op]:
        return [op for op in self.started if op.group == group and (op.tag == tag if tag >= 0 else op.tag < 0)]

    def status(self) -> RankStatus:
        groups = {op.group for op in self.program}
        wait = None
        if self.is_waiting:
            op = self.started[-1]
            number = len(self.started_of(op.group, op.tag))
            tag = op.tag if op.tag >= 0 else ORDERED
            wait = Wait(op.kind, op.group, op.ranks, tag, number, kind=op.kind, groups=(op.group,))
        return RankStatus(
            wait,
            started={
                f"{group} {tag}": len(self.started_of(group, tag)) for group in groups for tag in [ORDERED, *range(4)]
            },
            recent={group: [op.kind for op in self.started_of(group, ORDERED)] for group in groups},
        )


class World:
    """Ranks that run their programs, a step of one at a time."""

    def __init__(self, programs: list[list[Op]]) -> None:
        self.ranks = [Rank(number, program) for number, program in enumerate(programs)]

    def step(self, rank: Rank) -> bool:
        """Let ``rank`` go on if it can; returns whether it did."""
        if rank.is_waiting:
            op = rank.started[-1]
            index = len(rank.started_of(op.group, op.tag)) - 1
            for other in op.ranks:
                theirs = self.ranks[other].started_of(op.group, op.tag)
                if len(theirs) <= index or (op.tag < 0 and theirs[index].kind != op.kind):
                    return False
            rank.is_waiting = False
            return True
        if len(rank.started) == len(rank.program):
            return False
        rank.started.append(rank.program[len(rank.started)])
        rank.is_waiting = True
        return True

    def steps(self, chance: random.Random, most: int) -> int:
        """Let ranks drawn by chance go on ``most`` times, or until none can; returns how often one did."""
        for done in range(most):
            if not any(self.step(rank) for rank in chance.sample(self.ranks, len(self.ranks))):
                return done
        return most


def draw_program(chance: random.Random, world_size: int) -> list[Op]:
    everyone = tuple(range(world_size))
    subsets = [everyone] + [(a, b) for a in everyone for b in everyone if a < b]
    return [
        Op(f"group of {ranks}", ranks, chance.choice([ORDERED, 0, 1, 2]), chance.choice("abc"))
        for ranks in chance.choices(subsets, k=chance.randrange(1, 12))
    ]


def of_rank(program: list[Op], rank: int) -> list[Op]:
    return [op for op in program if rank in op.ranks]


def mutate(chance: random.Random, program: list[Op]) -> list[Op]:
    """Drop, repeat, move or change one collective."""
    changed = list(program)
    at = chance.randrange(len(changed))
    how = chance.randrange(4)
    if how == 0:
        del changed[at]
    elif how == 1:
        changed.insert(at, changed[at])
    elif how == 2:
        changed.insert(chance.randrange(len(changed)), changed.pop(at))
    else:
        changed[at] = chance.choice(changed)
    return changed


def answers(world: World, chance: random.Random) -> dict[int, RankStatus | None]:
    """Ask every rank where it is, in any order, while they go on in between."""
    found: dict[int, RankStatus | None] = {}
    for rank in chance.sample(world.ranks, len(world.ranks)):
        found[rank.number] = RankStatus.from_text(rank.status().as_text())
        world.steps(chance, chance.randrange(4))
    return found


def test_ranks_with_one_program_have_never_diverged_wherever_they_are() -> None:
    for seed in range(150):
        chance, world_size = random.Random(seed), 2 + seed % 2
        program = draw_program(chance, world_size)
        world = World([of_rank(program, rank) for rank in range(world_size)])
        while True:
            assert not diagnose(answers(world, chance)).groups, seed
            if not world.steps(chance, 2):
                break
        assert all(len(rank.started) == len(rank.program) for rank in world.ranks)


def test_ranks_that_wait_for_each_other_have_diverged_and_only_they() -> None:
    stuck = 0
    for seed in range(300):
        chance, world_size = random.Random(seed), 2 + seed % 2
        program = draw_program(chance, world_size)
        programs = [of_rank(program, rank) for rank in range(world_size)]
        culprit = chance.randrange(world_size)
        if not programs[culprit]:
            continue
        programs[culprit] = mutate(chance, programs[culprit])
        world = World(programs)
        early = diagnose(answers(world, chance)).groups
        world.steps(chance, 1000)
        diagnosis = diagnose({rank.number: rank.status() for rank in world.ranks})
        waiting = [rank for rank in world.ranks if rank.is_waiting]
        if early:
            assert diagnosis.groups and waiting, seed
        if waiting and len(waiting) == world_size:
            stuck += 1
            assert diagnosis.groups, seed
            # All of them raise: whatever one of them waits in is closed.
            assert {rank.started[-1].group for rank in waiting} == set(diagnosis.groups), seed
        if not waiting:
            assert not diagnosis.groups, seed
    assert stuck > 50


def waits_in(forwards: int, backwards: int, *, ranks: tuple[int, ...] = (0, 1), is_call: bool = False) -> RankStatus:
    wait = Wait("it", "g", ranks, 0, 5, tree="t", groups=("g", "h"), is_call=is_call)
    tree = Tree("it", forwards, backwards, is_inside=True)
    return RankStatus(wait, {"g 0": 5}, trees={"t": tree})


def is_elsewhere(forwards: int, backwards: int, *, is_inside: bool = False, has_failed: bool = False) -> RankStatus:
    tree = Tree("it", forwards, backwards, is_inside=is_inside, failure="ValueError" if has_failed else "")
    return RankStatus(None, {"g 0": 4}, trees={"t": tree}, text="is elsewhere")


@pytest.mark.parametrize(
    ("far", "has_left"),
    [
        (is_elsewhere(3, 1, is_inside=True), False),  # computes in the same backward
        (is_elsewhere(3, 1), True),  # has ended it, or an exception has
        (is_elsewhere(3, 0), False),  # between forward and backward
        (is_elsewhere(3, 0, is_inside=True), False),  # still in the forward before
        (is_elsewhere(3, 0, has_failed=True), True),  # the forward before has raised
        (is_elsewhere(2, 1, has_failed=True), False),  # one has that others have left too
        (is_elsewhere(4, 0), True),  # forward again, without backward
        (is_elsewhere(4, 1, is_inside=True), True),  # the next forward
        (is_elsewhere(3, 2, is_inside=True), True),  # the next backward
        (RankStatus(text="is elsewhere"), False),  # nothing is known
        (None, False),  # does not answer
        (RankStatus(failed_call="has left fully_shard by ConfigError"), False),  # what it failed in is over
    ],
)
def test_a_rank_that_does_not_wait_is_slow_unless_it_has_left(far: RankStatus | None, has_left: bool) -> None:
    found = diagnose({0: waits_in(3, 1), 1: far})
    assert bool(found.groups) == has_left and Diagnosis.from_text(found.as_text()) == found
    # Who raised in the call that annotates will not come to the comparison.
    if far is not None and far.failed_call:
        assert diagnose({0: waits_in(0, 0, is_call=True), 1: far}).groups


def test_who_waits_for_one_that_waits_in_vain_does_so_too_and_others_are_not_told() -> None:
    behind = Wait("another", "k", (0, 2), 0, 1, groups=("k",))
    third = RankStatus(behind)
    far = RankStatus(Wait("its own", "k2", (3, 4), 0, 1, groups=("k2",)))
    diagnosis = diagnose({0: waits_in(3, 1), 1: is_elsewhere(3, 1), 2: third, 3: far, 4: RankStatus(text="is slow")})
    assert diagnosis.groups == ("g", "h", "k")
    assert diagnosis.lines == (
        "    rank 0: waits for it",
        "    rank 1: is elsewhere",
        "    rank 2: waits for another",
    )


def test_different_calls_that_meet_in_one_place_of_a_group_have_diverged() -> None:
    def calls(kind: str, number: int) -> RankStatus:
        wait = Wait(kind, "g", (0, 1), COUNTED, number, kind=kind, sequence=number, groups=("g",))
        return RankStatus(wait, {f"g {COUNTED}": number})

    assert diagnose({0: calls("barrier", 3), 1: calls("all_gather", 3)}).groups
    assert not diagnose({0: calls("barrier", 3), 1: calls("barrier", 3)}).groups
    assert not diagnose({0: calls("barrier", 3), 1: calls("all_gather", 4)}).groups


def test_ranks_that_say_the_same_share_a_line() -> None:
    place = RankStatus(text="is slow")
    assert diagnose({0: place, 1: None, 2: place}).lines == (
        "    ranks 0, 2: each is slow",
        "    rank 1: does not answer: it has annotated nothing, or its process has ended or is stopped",
    )


def test_the_lines_end_with_who_was_late_before_as_the_first_rank_that_knows_it_says() -> None:
    ranks = {
        0: RankStatus(text="is slow"),
        1: RankStatus(text="is slow", history="rank 1 last in 91% of steps, by 180 ms, most in data"),
        2: RankStatus(text="is slow", history="rank 1 last in 92% of steps, by 180 ms, most in data"),
    }
    told = diagnose({rank: RankStatus.from_text(status.as_text()) for rank, status in ranks.items()})
    assert told.lines == (
        "    ranks 0, 1, 2: each is slow",
        "    before: rank 1 last in 91% of steps, by 180 ms, most in data",
    )


def test_ranks_that_all_wait_for_the_same_in_other_places_of_their_group_have_diverged() -> None:
    def waits(sequence: int) -> RankStatus:
        wait = Wait("it", "g", (0, 1, 2), ORDERED, 5, kind="k", sequence=sequence, groups=("g",))
        return RankStatus(wait, {f"g {ORDERED}": 5}, {"g": ["k"]})

    assert diagnose({0: waits(7), 1: waits(6), 2: waits(6)}).groups == ("g",)
    for last in (waits(0), RankStatus(None, {f"g {ORDERED}": 5}, text="computes"), None):
        assert not diagnose({0: waits(7), 1: waits(6), 2: last}).groups
    assert not diagnose({0: waits(6), 1: waits(6), 2: waits(6)}).groups


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (Tree("it", 3, 1, is_inside=True), "in forward 3 of it"),
        (Tree("it", 3, 2, failure="ValueError: no"), "has left forward 3 of it: ValueError: no"),
        (Tree("it", 3, 3, is_backward=True), "has left backward 3 of it"),
    ],
)
def test_where_an_annotation_is_is_said_in_words(tree: Tree, text: str) -> None:
    assert tree.text == text

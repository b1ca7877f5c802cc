"""A case that is stuck is told from one that is slow, and shows where its threads are."""

import threading
import time

import pytest

from tests.fuzz.cases import Case, draw
from tests.fuzz.runner import Outcome
from tests.fuzz.workers import worker

IDLE_S = 0.4


def wait_for_ever(case: Case, *, timeout_s: float) -> Outcome:
    waiting = threading.Thread(target=threading.Event().wait, name="waiting", daemon=True)
    waiting.start()
    waiting.join()
    return Outcome("right")


def turn_for_ever(case: Case, *, timeout_s: float) -> Outcome:
    while True:
        pass


def compute_for_long(case: Case, *, timeout_s: float) -> Outcome:
    end = time.process_time() + 2 * IDLE_S
    while time.process_time() < end:
        pass
    return Outcome("right")


@pytest.mark.parametrize(
    ("perform", "text"),
    [(wait_for_ever, "all threads have waited for 0.4 s"), (turn_for_ever, "not done after 2 s of processor time")],
)
def test_a_case_that_is_stuck_shows_the_stacks_of_all_threads(perform: object, text: str) -> None:
    # After one that is stuck the next case runs.
    with worker(IDLE_S, perform) as one:  # type: ignore[arg-type]
        (_, outcome), (_, another) = one.run([draw(0, 2), draw(1, 2)])
    assert (outcome.kind, outcome.text) == ("hang", text) == (another.kind, another.text)
    assert f"in {perform.__name__}" in outcome.details  # type: ignore[attr-defined]
    assert outcome.details.count("(most recent call first)") == 1 + (perform is wait_for_ever)


def test_a_case_may_compute_for_longer_than_it_may_wait() -> None:
    with worker(IDLE_S, compute_for_long) as one:
        assert [outcome.kind for _, outcome in one.run([draw(0, 2)])] == ["right"]

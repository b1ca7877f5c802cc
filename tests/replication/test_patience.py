"""How long a rank waits for a collective that may never end."""

import time
from concurrent.futures import ThreadPoolExecutor

from composable.replication.patience import waited_for


class After:
    """Is over when it was asked so many times."""

    def __init__(self, times: float) -> None:
        self.times = times

    def is_over(self) -> bool:
        self.times -= 1
        return self.times < 0

    def finish(self) -> None:
        raise AssertionError("this is the caller's")


def waits_in_vain() -> tuple[list[float], bool]:
    """Return the seconds of each of ten waits in vain, and what one for something that is over says then."""
    times = []
    for _ in range(10):
        began = time.monotonic()
        assert not waited_for(After(float("inf")))
        times.append(time.monotonic() - began)
    return times, waited_for(After(0))


def test_a_wait_ends_with_what_is_waited_for() -> None:
    assert waited_for(After(0))
    assert waited_for(After(20))


def test_waits_in_vain_are_short_after_the_first_and_what_is_over_still_counts() -> None:
    with ThreadPoolExecutor(1) as one:  # A thread that has not waited before.
        (first, *others), is_over = one.submit(waits_in_vain).result()
    assert first > 0.4
    # Each would take as long as the first; on a busy machine some do, as threads are woken late.
    assert min(others) < 0.4
    assert is_over

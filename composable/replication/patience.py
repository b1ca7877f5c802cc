"""How long this rank waits for others inside backward, where they may be waiting for it.

Such a wait costs nothing where it ends: the end of backward would have waited as long. Where ranks wait for each other
it is in vain, and has to end. How long a collective takes nobody knows; so waits in vain get a share of the time.
"""

import threading
import time

from composable.collectives import Pending

__all__ = ["waited_for"]

# The longest wait in vain: a bucket of the default size takes less at 1 Gbit/s.
_LIMIT_S = 0.5
# Of all time.
_SHARE = 0.02
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 1e-3


class _Budget(threading.local):
    """What waits in vain may still take, of one thread: those of its modules, which run one after the other, share it.

    Attributes:
        left_s: So long, at ``noted_s``.
        noted_s: When that was.
    """

    def __init__(self) -> None:
        self.left_s = _LIMIT_S
        self.noted_s = time.monotonic()


_BUDGET = _Budget()


def waited_for(pending: Pending) -> bool:
    """Wait until ``pending`` is over; return whether it is.

    Returns at once where a stream waits. Waits in vain take half a second, and then a fiftieth of all time.
    """
    if pending.is_over():
        return True
    began_s = time.monotonic()
    left_s = min(_LIMIT_S, _BUDGET.left_s + _SHARE * (began_s - _BUDGET.noted_s))
    pause_s = _FIRST_PAUSE_S
    while (now_s := time.monotonic()) < began_s + left_s:
        time.sleep(pause_s)
        if pending.is_over():
            return True
        pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)
    _BUDGET.left_s, _BUDGET.noted_s = 0.0, now_s
    return False

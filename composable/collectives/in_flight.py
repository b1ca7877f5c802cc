"""Collectives that a transport has started, kept until somebody has waited for them.

Whoever was to wait may have been stopped by an exception, in the middle of starting one as well. A work that
nobody holds frees what gloo still needs, and memory that is freed before its work is over gets written to.
"""

import torch.distributed as dist

from composable.collectives.base import Started, Transport
from composable.collectives.watch import explained

__all__ = ["Messages", "wait_for_all"]


class Messages(Started):
    """The works of one collective.

    Made before they are posted, and posted by one call of ``works.extend``: Python runs no handler of a signal
    inside it, so what was posted is always known.

    Args:
        transport: That starts it, and keeps it until somebody has waited for it.
        tag: As the watch of ranks that wait has it.
        number: The same.

    Attributes:
        works: The works.
    """

    __slots__ = ("_has_begun", "works")

    def __init__(self, transport: Transport, tag: int, number: int) -> None:
        self.transport = transport
        self.tag = tag
        self.number = number
        self.works: list[dist.Work] = []
        self._has_begun = False
        transport.in_flight[self] = None

    def finish(self) -> None:
        """Wait for the works. Idempotent, also where an exception came between two of them."""
        works = self.works
        if not works:
            return
        if self._has_begun:
            # One that was waited for is complete; to wait again for a message is to wait for another one.
            works = [work for work in works if not work.is_completed()]
        self._has_begun = True
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise explained(error, self) from error
        self.works = []
        self.transport.in_flight.pop(self, None)

    def is_over(self) -> bool:
        """Say whether ``finish`` would return at once."""
        return all(work.is_completed() for work in self.works)


def wait_for_all(kept: dict[Started, None]) -> None:
    """Wait for all that was started, also by a call that an exception cut short.

    What is done with the results is left to those who finish the collectives, if anybody does.
    """
    for started in list(kept):
        if isinstance(started, Messages):
            Messages.finish(started)
    kept.clear()

"""What a reducer says and checks at the levels of ``torch.distributed.get_debug_level()``.

OFF: nothing. INFO: its buckets, each time they are made. DETAIL: also each bucket that is sent, after the ranks have
made sure that all send the same one.
"""

import logging
from collections.abc import Sequence

import torch.distributed as dist

from composable.collectives import Ranks
from composable.replication.bucket import Bucket, ReducedParam
from composable.wording import list_text

__all__ = ["DebugNotes", "notes_for_level"]

_LOG = logging.getLogger("composable")


class DebugNotes:
    """Writes notes on the buckets of one reducer.

    Args:
        params: Of the reducer.
        ranks: Who averages.
        checks: Compare the ranks before each bucket.
    """

    __slots__ = ("_checks", "_known", "_params", "_ranks")

    def __init__(self, params: Sequence[ReducedParam], ranks: Ranks, *, checks: bool) -> None:
        self._params = params
        self._ranks = ranks
        self._checks = checks
        self._known: list[Bucket] = []

    def begin(self, buckets: Sequence[Bucket], number: int) -> None:
        """Note the buckets of backward ``number``, if they are new."""
        if self._known and self._known[0] is buckets[0]:
            return
        self._known = list(buckets)
        _LOG.info(
            "replicate: %d buckets from backward %d on, of ranks %s", len(buckets), number, [*self._ranks.numbers]
        )
        for bucket in buckets:
            _LOG.info("replicate: %s", self._text(bucket))

    def before_send(self, bucket: Bucket) -> None:
        """Note a bucket that is sent next, and make sure that all ranks send it. Collective at level DETAIL.

        Raises:
            DesyncError: Another rank is about to send another one.
        """
        if self._checks:
            text = self._text(bucket)
            self._ranks.confirm(
                text,
                shown=lambda: text,
                what="the ranks are about to average different buckets",
                fix="run the same modules with the same options on every rank",
            )
            _LOG.info("replicate: send %s", text)

    def _text(self, bucket: Bucket) -> str:
        names = [self._params[index].fqn for index in bucket.param_indices]
        return f"bucket {bucket.index() + 1}, {bucket.flat.nbytes} bytes of {bucket.flat.dtype}: {list_text(names)}"


def notes_for_level(params: Sequence[ReducedParam], ranks: Ranks) -> DebugNotes | None:
    """Return what the level of now asks for; ``None``: nothing."""
    level = dist.get_debug_level()  # type: ignore[attr-defined]  # torch does not list it as exported
    checks = level == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
    is_off = level == dist.DebugLevel.OFF  # type: ignore[attr-defined]
    return None if is_off else DebugNotes(params, ranks, checks=checks)

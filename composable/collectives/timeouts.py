"""How long the groups of an annotation wait for a rank: as long as ``init_process_group`` was told.

torch gives every group that is made without a timeout its default, of 10 or 30 minutes, whatever the default group was
told. So do the groups of a mesh, which take none. A rank that waits in one of them for a host that is gone
would be there long after all others have given up.
"""

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist

from composable.collectives.ranks import Ranks
from composable.torch_private import default_timeout_of, real_backend, set_timeout, timeout_of

__all__ = ["told_timeout", "wait_like_the_world"]


def told_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return the timeout that ``group`` was told; ``None``: it has torch's default, or it only pretends."""
    if group is None or not real_backend(group):
        return None
    timeout = timeout_of(group)
    return None if timeout == default_timeout_of(group) else timeout


def wait_like_the_world(every: Iterable[Ranks]) -> None:
    """Give groups without a timeout of their own that of the default process group. Each rank for itself."""
    timeout = told_timeout(dist.group.WORLD)
    if timeout is None:
        return
    for ranks in every:
        if ranks.group is not None and real_backend(ranks.group) and told_timeout(ranks.group) is None:
            set_timeout(ranks.group, timeout)

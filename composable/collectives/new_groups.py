"""Makes process groups of some of the ranks, under names that only those ranks have to agree on.

torch names such a group after how many groups this process is in. Ranks that are in different numbers of groups, as
after a mesh of one rank, then wait for each other under different names, and after a group was destroyed a name comes
twice. Here the ranks of a group count the groups that were made of just them, which they make together in any case.
"""

from collections import Counter
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch.distributed as dist

from composable.collectives.timeouts import told_timeout
from composable.torch_private import new_named_group

__all__ = ["make_group"]

# How many groups were made of these ranks, by the default group.
_MADE: "WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]]" = WeakKeyDictionary()


def make_group(
    numbers: Sequence[int], like: dist.ProcessGroup | None, *, backend: str | None = None
) -> dist.ProcessGroup:
    """Return a new group of the ranks with these global numbers, in this order. Collective over them.

    Args:
        numbers: This rank's among them.
        like: The group whose timeout it gets.
        backend: As ``new_group`` takes it; ``None``: that of the default group.
    """
    world = dist.group.WORLD
    assert world is not None, "there are ranks to make a group of"
    made = _MADE.setdefault(world, Counter())
    key = tuple(numbers)
    # Before the attempt: ranks of which one fails still count alike.
    made[key] += 1
    # Without spaces: verdicts of the watch list names between them.
    name = f"composable:{made[key]}:{'-'.join(map(str, key))}"
    return new_named_group(name, key, backend, told_timeout(like))

"""Whether the torch that is installed makes groups in an order of their own, which ``HYBRID_SHARD_OPTIM`` needs."""

import inspect

import pytest
import torch.distributed as dist

__all__ = ["HAS_ORDERED_GROUPS", "needs_ordered_groups"]

HAS_ORDERED_GROUPS = "sort_ranks" in inspect.signature(dist.new_group).parameters
needs_ordered_groups = pytest.mark.skipif(not HAS_ORDERED_GROUPS, reason="this torch sorts the ranks of every group")

"""What users let go of is freed at once, without Python's collector, for each annotation wherever its step was left.

The value that is right is none: a plain module, and one in DistributedDataParallel, leave no byte behind.
"""

import copy
import gc
import random
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    as_ddp,
    full_state_dict,
    fully_shard,
    no_sync,
    replicate,
    unshard_params,
)
from tests.live_bytes import LiveBytes
from tests.world import on_ranks

WIDTH = 32
LEAST_BYTES = WIDTH * WIDTH  # less than the shard of a layer
CASTS = MixedPrecisionPolicy(torch.bfloat16, buffer_dtype=torch.bfloat16)
SKIPS = MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32, skipped_module_classes={nn.BatchNorm1d})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rows = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.recurrent = nn.GRU(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.recurrent(self.rows(self.first(x)))[0])


def by_parts(net: Net) -> None:
    for part in (*net.rows, net.recurrent, net):
        fully_shard(part)


def in_one_handle(net: Net) -> None:
    fully_shard([net.rows[0], net.recurrent], reshard_after_forward=False)
    fully_shard(net, ignored_params={net.rows[2].bias})


def with_prefetch(net: Net) -> None:
    by_parts(net)
    for one, other in ((net.rows[0], net.rows[2]), (net.rows[2], net.rows[0])):
        one.set_modules_to_forward_prefetch([other])
        one.set_modules_to_backward_prefetch([other])


def hybrid(net: Net) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    fully_shard(net, mesh=mesh, policy={nn.Linear, nn.GRU})


def mixed(net: Net) -> None:
    replicate(net.rows, mp_policy=SKIPS)
    replicate(net.recurrent)
    fully_shard(net)


def sharded_inside(net: Net) -> None:
    fully_shard(net.rows)
    replicate(net)


def seen_as_ddp(net: Net) -> None:
    view = as_ddp(replicate(net))
    assert view.module is net
    assert as_ddp(net) is view


KINDS: dict[str, Callable[[Net], object]] = {
    "whole": fully_shard,
    "parts": by_parts,
    "policy": lambda net: fully_shard(net, policy={nn.Linear}, reshard_after_forward=1),
    "one handle": in_one_handle,
    "prefetch": with_prefetch,
    "casts": lambda net: fully_shard(net, policy={nn.Linear}, mp_policy=CASTS),
    "skips": lambda net: fully_shard(net, mp_policy=SKIPS),
    "offload": lambda net: fully_shard(net, policy={nn.GRU}, offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "hybrid": hybrid,
    "mixed": mixed,
    "sharded inside": sharded_inside,
    "replicate": replicate,
    "replicate, parts": lambda net: [replicate(part) for part in (net.rows, net.recurrent, net)],
    "replicate, list": lambda net: replicate([net.rows, net.recurrent]),
    "replicate, static": lambda net: replicate(net, static_graph=True),
    "replicate, own gradients": lambda net: replicate(net, gradient_as_bucket_view=False),
    "replicate, casts": lambda net: replicate(net, mp_policy=CASTS),
    "replicate, skips": lambda net: replicate(net, mp_policy=SKIPS),
    "as_ddp": seen_as_ddp,
}
REPLICATED = [kind for kind in KINDS if kind == "as_ddp" or kind.startswith("replicate")]


def kept(net: Net, x: torch.Tensor) -> None:
    with no_sync(net):
        net(x).float().sum().backward()


def kept_by_a_part(net: Net, x: torch.Tensor) -> None:
    kept(net, x)
    net.rows(x).float().sum().backward()


def before_backward(net: Net, x: torch.Tensor) -> None:
    net(x)


def cut_short(net: Net, x: torch.Tensor) -> None:
    with suppress(RuntimeError):
        net(x[:, 1:])


def evaluated(net: Net, x: torch.Tensor) -> None:
    with torch.no_grad():
        net(x)


def copied(net: Net, x: torch.Tensor) -> None:
    copy.deepcopy(net)(x).float().sum().backward()


def shown(net: Net, x: torch.Tensor) -> None:
    with unshard_params(net):
        list(net.parameters())


ENDS: dict[str, Callable[[Net, torch.Tensor], object]] = {
    "after a step": lambda net, x: None,
    "kept": kept,
    "kept by a part": kept_by_a_part,
    "before backward": before_backward,
    "cut short": cut_short,
    "evaluated": evaluated,
    "copied": copied,
    "shown": shown,
    "full state dict": lambda net, x: full_state_dict(net),
}


def left_over(kind: str, end: str, steps: int) -> tuple[int, list[object]]:
    """Train, let go of all, and return how many bytes are left, and the modules and parameters that are."""
    with LiveBytes() as live:
        net = Net()
        KINDS[kind](net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        x = torch.ones(4, WIDTH)
        for _ in range(steps):
            net(x).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        ENDS[end](net, x)
        found = [weakref.ref(one) for one in (*net.modules(), *net.parameters())]
        del net, optimizer, x
        dist.barrier()  # The other rank may hold what this one has sent.
        return live.now, [one() for one in found if one() is not None]


def ends_of(kind: str) -> list[str]:
    ends = [end for end in ENDS if end != "kept by a part" or kind in ("mixed", "sharded inside")]
    return [end for end in ends if end not in ("shown", "full state dict")] if kind in REPLICATED else ends


@on_ranks(2, kind=KINDS)
def test_nothing_is_left_of_a_model_that_was_dropped(kind: str) -> None:
    draw = random.Random(kind)
    left_over(kind, "after a step", 1)  # groups and the like stay
    gc.disable()
    try:
        for end in draw.sample(ends_of(kind), 2):
            nbytes, objects = left_over(kind, end, draw.randrange(3))
            assert not objects, (end, objects[:3])
            assert nbytes < LEAST_BYTES, (end, nbytes)
        dist.barrier()
    finally:
        gc.enable()

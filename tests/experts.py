"""A small mixture of experts: each rank has some of them, and tokens travel to theirs and back by all-to-all."""

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.models import random_input, seeded

__all__ = [
    "DIM",
    "TOKENS",
    "Expert",
    "Net",
    "batch_of",
    "local_net",
    "mesh_of",
    "owners",
    "reference_net",
    "whole_batch",
]

DIM = 4
TOKENS = 5
LAYERS = 2


class Expert(nn.Module):
    """Two layers, of which the second has no weight for what the first makes of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 6)
        self.down = nn.Linear(6, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class _Exchange(torch.autograd.Function):
    """Sends rows to the ranks of a group; its backward sends their gradients back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, got: list[int], sent: list[int], group: Any) -> torch.Tensor:
        ctx.call = (sent, got, group)
        out = x.new_empty(sum(got), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), got, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Exchange.apply(grads[0], *ctx.call), None, None, None


class Bank(nn.ModuleDict):
    """Experts by number; it is called where there are tokens, and calls those that have some, in an order of theirs."""

    calls_all = False

    def forward(self, x: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        with_tokens = list(dict.fromkeys(routes.tolist()))[:: 1 if len(x) % 2 else -1]
        for expert in map(int, self) if self.calls_all else with_tokens:
            rows = (routes == expert).nonzero()[:, 0]
            x = x.index_copy(0, rows, self[str(expert)](x[rows]))
        return x


class Mixture(nn.Module):
    """Gives each token to one expert, whose output counts as much as the gate says.

    Args:
        experts: How many there are on all ranks.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, experts)
        self.experts = Bank({str(index): Expert() for index in range(experts)})
        self.count = experts
        self.group: Any = None

    def forward(self, x: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        weight = torch.sigmoid(self.gate(x)).gather(1, routes[:, None])
        order = torch.argsort(routes, stable=True)
        counts = torch.bincount(routes, minlength=self.count)
        made = self._run(x[order], routes[order]) if self.group is None else self._dispatch(x[order], counts)
        return x + weight * torch.zeros_like(x).index_copy(0, order, made)

    def _dispatch(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ranks = self.group.size()
        owned = owners(self.count, ranks)
        own = owned[self.group.rank()]
        theirs = counts.new_empty(ranks * len(own))
        dist.all_to_all_single(theirs, counts, [len(own)] * ranks, list(map(len, owned)), group=self.group)
        sent = [int(part.sum()) for part in counts.split(list(map(len, owned)))]
        got = theirs.view(ranks, len(own)).sum(1).tolist()
        rows = _Exchange.apply(x, got, sent, self.group)
        routes = torch.tensor(own, dtype=torch.int64).repeat(ranks).repeat_interleave(theirs)
        return _Exchange.apply(self._run(rows, routes), sent, got, self.group)

    def _run(self, x: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        return self.experts(x, routes) if len(x) or self.experts.calls_all else x


class Block(nn.Module):
    """A layer for all tokens, then experts."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.own = nn.Linear(DIM, DIM)
        self.mixture = Mixture(experts)

    def forward(self, x: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        return self.mixture(torch.tanh(self.own(x)), routes)


class Net(nn.Module):
    """Blocks with experts, and a head."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(experts) for _ in range(LAYERS))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, routes: torch.Tensor) -> torch.Tensor:
        for block, own in zip(self.blocks, routes.unbind(1), strict=True):
            x = block(x, own)
        return self.head(x)

    def mixtures(self) -> Iterator[Mixture]:
        """Yield what has experts."""
        for module in self.modules():
            if isinstance(module, Mixture):
                yield module


def owners(experts: int, ranks: int) -> list[list[int]]:
    """Return which experts each of the ranks has, among which tokens travel."""
    return [part.tolist() for part in torch.arange(experts).tensor_split(ranks)]


def mesh_of(shape: tuple[int, int]) -> DeviceMesh:
    """Return a mesh of all ranks: those along ``edp`` have the same experts, tokens travel along ``ep``."""
    return init_device_mesh("cpu", shape, mesh_dim_names=("edp", "ep"))


def reference_net(experts: int, *, calls_all: bool = False) -> Net:
    """Return the model of one process."""
    net = seeded(lambda: Net(experts), 0)
    for mixture in net.mixtures():
        mixture.experts.calls_all = calls_all
    return net


def local_net(experts: int, mesh: DeviceMesh, *, calls_all: bool = False) -> Net:
    """Return the same with the experts of this rank only."""
    net = reference_net(experts, calls_all=calls_all)
    own = owners(experts, mesh["ep"].size())[mesh.get_local_rank("ep")]
    for mixture in net.mixtures():
        mixture.group = mesh.get_group("ep")
        for index in set(range(experts)).difference(own):
            del mixture.experts[str(index)]
    return net


def batch_of(experts: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens of a rank and to which experts they go: in each layer to one or two, of every rank others."""
    rng = random.Random(f"{experts} {step} {rank}")
    layers = []
    for _ in range(LAYERS):
        used = rng.sample(range(experts), min(experts, rng.choice([1, 1, 2])))
        layers.append([rng.choice(used) for _ in range(TOKENS)])
    return random_input(1000 * step + rank, TOKENS, DIM), torch.tensor(layers).T


def whole_batch(experts: int, step: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return those of all ranks."""
    tokens, routes = zip(*(batch_of(experts, step, rank) for rank in range(world_size)), strict=True)
    return torch.cat(tokens), torch.cat(routes)

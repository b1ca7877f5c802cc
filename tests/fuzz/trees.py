"""Grows random trees, and the model that holds one."""

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.fuzz.nodes import KINDS, WIDTH, Call, Spec, build, parts_of

__all__ = ["Boom", "Model", "candidates", "grow"]

MOST_DEPTH = 3
MOST_NODES = 9


def grow(rng: random.Random, kinds: frozenset[str]) -> Spec:
    """Return a random tree of ``kinds``."""
    budget = [MOST_NODES]

    def node(depth: int, banned: frozenset[str]) -> Spec:
        budget[0] -= 1
        fits = [
            name
            for name, cls in KINDS.items()
            if name in kinds
            and not cls.tags & banned
            and (cls.least_kids == 0 or (depth > 0 and budget[0] >= cls.least_kids))
        ]
        # The first ones are rather around others, or most trees would be one leaf.
        inner = [name for name in fits if KINDS[name].most_kids]
        name = rng.choice(inner if inner and (depth == MOST_DEPTH or rng.random() < 0.3) else fits)
        cls = KINDS[name]
        uid = rng.getrandbits(32)
        count = rng.randint(cls.least_kids, cls.most_kids) if depth > 0 else 0
        return Spec(name, uid, tuple(node(depth - 1, banned | cls.bans) for _ in range(count)))

    return node(MOST_DEPTH, frozenset())


class Boom(Exception):  # noqa: N818  # not one of ours
    """Raised on purpose."""


class _RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise Boom


class Model(nn.Module):
    """A tree between an input layer and two heads. Parts may be called alone, through it."""

    def __init__(self, tree: Spec) -> None:
        super().__init__()
        self.trunk = build(tree)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(tree.uid + 1)
            self.inp = nn.Linear(WIDTH, WIDTH)
            self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, call: Call, part: str = "all", head: int = 0) -> torch.Tensor:
        """Run all with one head, the ``trunk``, or one ``head``."""
        if part != "head":
            x = self.trunk(self.inp(x), call)
            while call.inside:
                x = x + torch.tanh(call.inside.pop())
        if call.fails == "forward":
            raise Boom
        if call.fails == "backward":
            x = _RaisesInBackward.apply(x)
        return x if part == "trunk" else self.heads[head](x)


def candidates(model: Model) -> Iterator[tuple[str, nn.Module]]:
    """Yield a stable name and the module for all below ``model`` that may be annotated, deepest first."""
    seen: set[nn.Module] = set()
    for name, module in parts_of(model):
        if module not in seen:
            seen.add(module)
            yield name, module
    yield "inp", model.inp
    for index, head in enumerate(model.heads):
        yield f"head {index}", head

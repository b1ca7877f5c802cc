"""``replicate`` inside ``fully_shard`` and the reverse, trained against one process."""

import copy
import random
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    FSDPModule,
    RaggedDTensor,
    accelerate_optimizer,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    no_sync,
    replicate,
    unannotate,
    unshard_params,
)
from composable.engine import handle_of
from tests.models import MLPBlock, loss_of, make_model, random_input, seeded
from tests.parity import inputs_of
from tests.world import on_ranks, run_threads


def sharded_inside_replicated(model: nn.Module) -> None:
    fully_shard(model.blocks[1].up)
    replicate(model.blocks[1])
    fully_shard(model, policy={MLPBlock})
    root = fully_shard.state(model)
    # The inner annotation is a root of its own: the outer one does not see it.
    assert all("blocks.1" not in fqn for handle in root.plan.handles for fqn in handle.module_fqns)


def live(annotate: Callable[[nn.Module], None]) -> None:
    """All that is done with a model, without an error."""
    model = make_model("mlp")
    annotate(model)
    optimizer = torch.optim.AdamW(model.parameters())
    args, kwargs = inputs_of(model, 0, dist.get_rank())
    with no_sync(model):
        loss_of(model(*args, **kwargs)).backward()
    loss_of(model(*args, **kwargs)).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with unshard_params(model):
        pass
    twin = copy.deepcopy(model)
    model.load_state_dict(twin.state_dict())
    full_state_dict(twin)
    for module in reversed([*model.modules()]):
        if fully_shard.state(module) is not None or replicate.state(module) is not None:
            unannotate(module)


@pytest.mark.parametrize("annotate", [sharded_inside_replicated, partial(replicate, static_graph=True)])
def test_nothing_looks_through_all_live_objects_but_an_error(annotate: Callable[[nn.Module], None]) -> None:
    # The name of a module is found by asking every object of the process: seconds for many annotations.
    with mock.patch("composable.ground.names.gc.get_objects", side_effect=AssertionError("looked through")):
        run_threads(live, 2, annotate)


class Node(nn.Module):
    """A linear layer, then nodes in a container."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)
        self.below = nn.ModuleList(Node(rng, depth - 1) for _ in range(rng.randint(0, 3) if depth else 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.own(x))
        for node in self.below:
            x = x + node(x)
        return x


def make_tree(seed: int) -> Node:
    return seeded(lambda: Node(random.Random(seed), 4), seed)


def annotate_at_random(tree: Node, seed: int) -> tuple[set[str], set[str]]:
    """Annotate nodes from the bottom up; returns the FQNs of parameters to be sharded, and to be replicated."""
    rng = random.Random(f"annotations of {seed}")
    named = [(fqn, node) for fqn, node in tree.named_modules() if isinstance(node, Node)]
    kinds: dict[str, str] = {}
    for fqn, node in reversed(named):
        kind = rng.choices(["", "fully_shard", "policy", "replicate"], [4 if fqn else 1, 2, 1, 2])[0]
        left = [
            name
            for name, _ in named
            if name.startswith(f"{fqn}." if fqn else "")
            and name != fqn
            and not any(f"{name}.".startswith(f"{one}.") for one in kinds)
        ]
        if kind == "policy" and left:
            fully_shard(node, policy=lambda one: isinstance(one, Node))
        elif kind == "replicate":
            replicate(node)
        elif kind:
            fully_shard(node)
        if kind:
            kinds[fqn] = "replicate" if kind == "replicate" else "fully_shard"
    managed: dict[str, set[str]] = {"fully_shard": set(), "replicate": set(), "": set()}
    for name, _ in tree.named_parameters():
        # The nearest annotation around a parameter manages it.
        around = [fqn for fqn in kinds if not fqn or name.startswith(f"{fqn}.")]
        managed[kinds[max(around, key=len)] if around else ""].add(name)
    return managed["fully_shard"], managed["replicate"]


def sharded_fqns(tree: nn.Module) -> set[str]:
    return {fqn for fqn, param in tree.named_parameters() if isinstance(param, RaggedDTensor)}


def train_both(plain: nn.Module, tree: nn.Module) -> None:
    """Take two clipped steps of each, with an accelerated optimizer for the tree."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optimizer = accelerate_optimizer(torch.optim.SGD(tree.parameters(), lr=0.1, momentum=0.9), tree)
    for step in range(2):
        batches = [random_input(10 * step + one, 3, 4) for one in range(world_size)]
        for model, batch, stepper in ((plain, torch.cat(batches), reference), (tree, batches[rank], optimizer)):
            stepper.zero_grad()
            model(batch).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(clip_grad_norm_(tree.parameters(), 0.1), norm)
        reference.step()
        optimizer.step()


@pytest.mark.parametrize(("seed", "world_size"), [(seed, 1 + seed % 3) for seed in range(9)])
@on_ranks()
def test_every_walker_finds_what_lies_below_other_annotations(seed: int) -> None:
    plain, tree = make_tree(seed), make_tree(seed)
    sharded, replicated = annotate_at_random(tree, seed)
    assert sharded_fqns(tree) == sharded
    params = dict(tree.named_parameters())
    values = {fqn: param.detach().clone() for fqn, param in plain.named_parameters()}
    handles = {handle_of(params[fqn]) for fqn in sharded}
    reducers = {replicate.state(node).reducer for node in tree.modules() if replicate.state(node) is not None}
    assert {item.fqn for one in reducers for item in one.params} or not replicated

    for fqn, node in tree.named_modules():
        if isinstance(node, FSDPModule):
            inside = {handle_of(param) for _, param in node.named_parameters()} - {None}
            node.set_requires_gradient_sync(False)
            assert {one for one in handles if not one.requires_gradient_sync} == inside, fqn
            node.set_requires_gradient_sync(True)
            with unshard_params(node):
                shown = {f"{fqn}.{name}" if fqn else name for name, _ in node.named_parameters()}
                assert sharded_fqns(tree) == sharded - shown, fqn
    with unshard_params(tree):
        assert not sharded_fqns(tree)
        for fqn, param in tree.named_parameters():
            assert torch.equal(param, values[fqn]), fqn
    assert sharded_fqns(tree) == sharded

    if handles or reducers:
        with no_sync(tree):
            assert not any(one.requires_gradient_sync for one in [*handles, *reducers])
        assert list(full_state_dict(tree) or values) == list(values)
    assert all(one.requires_gradient_sync for one in [*handles, *reducers])

    if sharded and len(sharded | replicated) == len(values):
        train_both(plain, tree)
    else:
        # What nothing manages drifts apart: each rank has data of its own.
        with torch.no_grad():
            for one in params.values():
                one.mul_(2)
            for one in plain.parameters():
                one.mul_(2)
    if handles or reducers:
        unannotate(tree)
    assert not sharded_fqns(tree) and not any(isinstance(node, FSDPModule) for node in tree.modules())
    expected = dict(plain.named_parameters())
    for fqn, param in tree.named_parameters():
        torch.testing.assert_close(param, expected[fqn], rtol=1e-5, atol=1e-6, msg=fqn)

"""Two annotations that meet in a parameter: every sequence of calls trains right, or is refused with the names."""

import copy
import functools
import gc
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import fully_shard, no_sync, replicate, unannotate
from composable.annotation import units_of
from composable.errors import ComposableError, ConfigError, warn_once
from composable.ground.contract import get_registry
from tests.models import random_input, seeded
from tests.parity import gradients_of
from tests.world import on_ranks, run_threads

DIM = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tied(nn.Module):
    """Layers of two linear ones each, of which some share a weight."""

    def __init__(self, layers: int, ties: list[tuple[int, int]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.out = nn.Linear(DIM, DIM)
        linears = [module for module in self.modules() if isinstance(module, nn.Linear)]
        for one, other in ties:
            linears[one].weight = linears[other].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def make_tied(layers: int, ties: list[tuple[int, int]]) -> Tied:
    return seeded(lambda: Tied(layers, ties), 0)


def backward(model: nn.Module, rank: int, step: int) -> None:
    model(random_input(10 * step + rank, 3, DIM)).square().mean().backward()


def mean_gradients(plain: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Return what one process gets for the samples of all ranks."""
    plain.zero_grad()
    for rank in range(dist.get_world_size()):
        backward(plain, rank, step)
    return {fqn: grad / dist.get_world_size() for fqn, grad in gradients_of(plain).items()}


def snapshot(model: nn.Module) -> list[object]:
    """Return all that an annotation changes in a model."""
    return [
        (
            type(module),
            {name: id(param) for name, param in module._parameters.items()},
            list(get_registry(module)),
            sorted(vars(module)),
            [len(value) for name, value in sorted(vars(module).items()) if name.endswith("_hooks")],
            [(sorted(vars(param)), len(param._post_accumulate_grad_hooks or ())) for param in module.parameters()],
        )
        for module in model.modules()
    ]


def random_call(draw: random.Random, model: Tied) -> Callable[[], Any]:
    targets = [module for module in model.modules() if not isinstance(module, nn.ModuleList)]
    target: Any = draw.choice(targets)
    if draw.random() < 0.25:
        target = draw.sample([*model.layers, model.out], 2)
    if draw.random() < 0.5:
        return lambda: replicate(target)
    policy = draw.choice([None, {Layer}, {nn.Linear}])
    return lambda: fully_shard(target, policy=policy)


def try_call(model: nn.Module, call: Callable[[], Any]) -> bool:
    """Say whether a call is accepted; one that is refused names a module or parameter and changes nothing."""
    before, refusal = snapshot(model), None
    try:
        call()
    except ConfigError as error:
        refusal = error
    if refusal is not None:
        assert re.search(r"rank \d", refusal.at or "") and refusal.fix, str(refusal)
        assert re.search(r"'[\w.]+'|module \w+", str(refusal)), str(refusal)
        assert snapshot(model) == before
    return refusal is None


def random_sequences(seeds: list[int]) -> tuple[int, int, int]:
    """Return how many calls were accepted and refused, and how many models were trained."""
    accepted = refused = trained = 0
    for seed in seeds:
        draw = random.Random(seed)
        layers = draw.choice([1, 2, 3])
        ties = [tuple(draw.sample(range(2 * layers + 1), 2)) for _ in range(draw.choice([0, 1, 1, 2]))]
        model, plain = make_tied(layers, ties), make_tied(layers, ties)
        whole = draw.choice([fully_shard, replicate])
        calls = [random_call(draw, model) for _ in range(draw.randint(0, 4))]
        for call in [*calls, functools.partial(whole, model)]:
            is_accepted = try_call(model, call)
            accepted, refused = accepted + is_accepted, refused + (not is_accepted)
        if not get_registry(model):
            continue  # No annotation can have the whole: that was said when the last one was refused.
        trained += 1
        assert [fqn for fqn, _ in model.named_parameters()] == [fqn for fqn, _ in plain.named_parameters()], seed
        for step in range(2):
            model.zero_grad()
            backward(model, dist.get_rank(), step)
            wanted = mean_gradients(plain, step)
            torch.testing.assert_close(gradients_of(model), wanted, msg=lambda text, seed=seed: f"seed {seed}: {text}")
    return accepted, refused, trained


@pytest.mark.parametrize("world_size", [2, 3])
def test_random_calls_on_random_tied_trees_train_as_one_process_or_are_refused(world_size: int) -> None:
    gc.freeze()  # An error looks for the module's name among all objects that the collector knows.
    try:
        seeds = [1000 * world_size + number for number in range(30)]
        accepted, refused, trained = run_threads(random_sequences, world_size, seeds)[0]
    finally:
        gc.unfreeze()
    assert accepted > 30 and refused > 15 and trained > 15


# Two annotations share the weight of ``layers.0.up`` and ``out``; what is said has both names.
REFUSED: list[tuple[Callable[[Tied], Any], str]] = [
    (
        lambda model: (replicate(model.layers[0].up), replicate(model.out)),
        "another replicate averages this parameter, as 'weight' of module 'layers.0.up' (Linear)\n"
        "  at:  rank 0, parameter 'weight' of module 'out' (Linear)\n"
        "  fix: call replicate once for all modules that share it, as replicate([a, b]), or on the module around them",
    ),
    (
        lambda model: (fully_shard(model.layers[0].up), replicate(model.out)),
        "fully_shard has taken and sharded this parameter, as 'weight'\n"
        "  at:  rank 0, parameter 'weight' of module 'out' (Linear)\n"
        "  fix: let one annotation have all modules that share it: call fully_shard on the module around them",
    ),
    (
        lambda model: (replicate(model.layers[0].up), fully_shard(model.out)),
        "replicate averages parameter 'weight' already, as 'weight' of module 'layers.0.up' (Linear)\n"
        "  at:  rank 0, parameter 'out.weight' [4, 4] float32\n"
        "  fix: annotate an inner module before the outer one, and have one annotation for modules that share it",
    ),
]


@on_ranks(1, number=range(len(REFUSED)))
def test_a_shared_parameter_is_refused_by_the_names_that_it_has_in_both(number: int) -> None:
    call, text = REFUSED[number]
    with pytest.raises(ConfigError) as caught:
        call(make_tied(1, [(0, 2)]))
    assert str(caught.value) == text


@on_ranks(2, kind=["replicate", "fully_shard"])
def test_a_module_of_which_nothing_is_left_may_be_replicated(kind: str) -> None:
    model, plain = make_tied(2, []), make_tied(2, [])
    inner = replicate if kind == "replicate" else fully_shard
    for child in (*model.layers, model.out):
        inner(child)
    replicate(model)
    for step in range(2):
        model.zero_grad()
        with no_sync(model):
            backward(model, dist.get_rank(), step)
        model.zero_grad()
        backward(model, dist.get_rank(), step)
        if kind == "replicate":
            torch.testing.assert_close(gradients_of(model), mean_gradients(plain, step))
    twin = copy.deepcopy(model)
    backward(twin, 0, 0)
    unannotate(model)
    assert not get_registry(model)


def undo_inside(kinds: list[Callable[..., Any]], again: str) -> None:
    """Undo one of two annotations inside a third, then average its gradients again."""
    inner, beside, outer = kinds
    model, plain = make_tied(2, []), make_tied(2, [])
    inner(model.layers[0])
    beside(model.layers[1])
    outer(model)
    backward(model, dist.get_rank(), 0)
    model.zero_grad()
    unannotate(model.layers[0])
    backward(model, dist.get_rank(), 0)
    own = model.layers[0].up.bias.grad.clone()
    wanted = mean_gradients(plain, 0)
    assert not torch.allclose(own, wanted["layers.0.up.bias"])
    others = {fqn: grad for fqn, grad in wanted.items() if "layers.0" not in fqn}
    torch.testing.assert_close({fqn: grad for fqn, grad in gradients_of(model).items() if fqn in others}, others)
    model.zero_grad()
    if again == "outer":
        outer(unannotate(model))
    else:
        inner(model.layers[0])
    backward(model, dist.get_rank(), 0)
    torch.testing.assert_close(gradients_of(model), wanted)


@pytest.mark.parametrize("again", ["inner", "outer"])
@pytest.mark.parametrize("kinds", list(itertools.product([replicate, fully_shard], repeat=3)))
def test_what_nothing_averages_after_an_inner_annotation_was_undone_is_told(
    kinds: list[Callable[..., Any]], again: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    run_threads(undo_inside, 2, kinds, again)
    (said,) = [text for text in caplog.messages if "unannotate" in text]
    names = [f"layers.0.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")]
    assert f"nothing averages their gradients: {', '.join(map(repr, names))}; to average them, annotate" in said


@on_ranks(2)
def test_gradients_that_are_there_before_fully_shard_are_not_dropped_in_silence() -> None:
    model = make_tied(1, [])
    backward(model, 0, 0)
    before = snapshot(model)
    for options in ({}, {"sync_module_states": True}):
        with pytest.raises(ComposableError, match="have gradients already"):
            fully_shard(model, **options)
        assert snapshot(model) == before
    model.zero_grad()
    fully_shard(model)
    backward(model, dist.get_rank(), 0)


@on_ranks(2, outer=["fully_shard", "replicate"])
def test_gradient_sync_of_a_model_reaches_both_annotations_in_it(outer: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = (replicate, fully_shard) if outer == "fully_shard" else (fully_shard, replicate)
    first(model[0])
    second(model)
    units = list(units_of(model.modules()))
    model.set_requires_gradient_sync(False)
    kept = sum(not unit.requires_gradient_sync for unit in units)
    model.set_requires_gradient_sync(True)
    assert (kept, all(unit.requires_gradient_sync for unit in units)) == (2, True)

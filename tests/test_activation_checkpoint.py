"""Activation checkpointing, ours and torch's, alone and under both annotations: the numbers of one process."""

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.utils.checkpoint import CheckpointError, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from composable import (
    ConfigError,
    MixedPrecisionPolicy,
    UsageError,
    checkpoint,
    fully_shard,
    replicate,
    unannotate,
)
from composable.ground.contract import get_registry
from composable.ground.torch_private import TorchDispatchMode
from tests.counting import CountingTransport
from tests.models import BATCH, DIM, FloatInput, MLPBlock, loss_of, random_input, seeded
from tests.parity import assert_equal_params, gradients_of
from tests.programs import Twins, train
from tests.world import on_ranks, run_ranks


class Stacked(FloatInput):
    """Blocks in a stack between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.stack = nn.Sequential(MLPBlock(), MLPBlock())
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(self.stack(self.inp(x)))
        return result


# The annotated modules are the blocks and the root.
ANNOTATED = ("stack.0", "stack.1", "")
PLACES = {
    "same": ("stack.0", "stack.1"),
    "inside": ("stack.0.up", "stack.1.down"),
    "outside": ("stack",),
    "nested": ("stack.1.up", "stack.0", "stack"),
}
Apply = Callable[[nn.Module, Sequence[str]], None]


def ours(model: nn.Module, places: Sequence[str]) -> None:
    for place in places:
        checkpoint(model.get_submodule(place))


def in_own_forward(model: nn.Module, places: Sequence[str], *, use_reentrant: bool) -> None:
    for place in places:
        module = model.get_submodule(place)
        module.forward = partial(torch_checkpoint, module.forward, use_reentrant=use_reentrant)


def wrapped(model: nn.Module, places: Sequence[str], *, wrap: Callable[[nn.Module], nn.Module]) -> None:
    for place in places:
        parent, _, name = place.rpartition(".")
        setattr(model.get_submodule(parent), name, wrap(model.get_submodule(place)))


def applied(model: nn.Module, places: Sequence[str]) -> None:
    chosen = [model.get_submodule(place) for place in places]
    apply_activation_checkpointing(model, check_fn=lambda module: any(module is one for one in chosen))


KINDS: dict[str, Apply] = {
    "ours": ours,
    "own forward": partial(in_own_forward, use_reentrant=False),
    "own forward, reentrant": partial(in_own_forward, use_reentrant=True),
    "checkpoint_wrapper": partial(wrapped, wrap=checkpoint_wrapper),
    "checkpoint_wrapper, reentrant": partial(
        wrapped, wrap=partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    ),
    "offload_wrapper": partial(wrapped, wrap=offload_wrapper),
    "apply_activation_checkpointing": applied,
}
ORDERS = ("before", "after")
APIS: dict[str, Callable[[nn.Module], nn.Module]] = {"fully_shard": fully_shard, "replicate": replicate}


@on_ranks(2, kind=KINDS, place=PLACES, order=ORDERS, api=APIS)
def test_every_kind_at_every_place_trains_as_one_process(kind: str, place: str, order: str, api: str) -> None:
    """Train for some steps on this rank's samples; ``order`` says when the annotation comes."""
    # Of a reentrant checkpoint inside a reentrant one, whose first forward has no gradients.
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")

    def annotate(model: nn.Module) -> None:
        targets = [model.get_submodule(name) for name in ANNOTATED]
        if order == "after":
            KINDS[kind](model, PLACES[place])
            # What stands in the place now: with "same" a wrapper.
            targets = [model.get_submodule(name) for name in ANNOTATED]
        for target in targets:
            APIS[api](target)
        if order == "before":
            KINDS[kind](model, PLACES[place])

    train(Twins(Stacked, annotate))


# One process


class Counted(nn.Module):
    """Counts how often its forward begins, and how often it gets to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(DIM, DIM)
        self.begun = self.ended = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begun += 1
        y: torch.Tensor = torch.tanh(self.lin(x))
        self.ended += 1
        return y


def test_names_class_and_signature_are_unchanged() -> None:
    plain, module = seeded(MLPBlock, 0), seeded(MLPBlock, 0)
    assert checkpoint(module) is module
    assert type(module) is MLPBlock
    assert list(module.state_dict()) == list(plain.state_dict())
    assert [fqn for fqn, _ in module.named_modules()] == [fqn for fqn, _ in plain.named_modules()]
    assert inspect.signature(module.forward) == inspect.signature(plain.forward)
    assert "checkpoint" in get_registry(module)


def test_forward_runs_again_in_backward_and_gives_the_same_gradients() -> None:
    plain, module = seeded(Counted, 0), checkpoint(seeded(Counted, 0))
    x = random_input(0, BATCH, DIM)
    loss_of(plain(x)).backward()
    loss = loss_of(module(x))
    assert module.begun == 1
    loss.backward()
    assert module.begun == 2
    torch.testing.assert_close(gradients_of(module), gradients_of(plain), rtol=0, atol=0)


def test_activations_are_not_kept() -> None:
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    module = nn.Sequential(nn.Linear(DIM, 100), nn.Tanh(), nn.Linear(100, DIM))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(random_input(0, BATCH, DIM))
        assert 100 * BATCH in kept
        kept.clear()
        checkpoint(module)(random_input(0, BATCH, DIM))
    assert 100 * BATCH not in kept


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_runs_again(context: Callable[[], AbstractContextManager[Any]]) -> None:
    contexts: list[int] = []
    module = checkpoint(Counted(), context_fn=lambda: (contexts.append(1), (nullcontext(), nullcontext()))[1])
    contexts.clear()  # That of the annotation, which looks at what the function returns.
    with context():
        module(random_input(0, BATCH, DIM))
    assert (module.begun, contexts) == (1, [])


def dropout_gradients(**options: Any) -> dict[str, torch.Tensor]:
    module = seeded(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Dropout(0.5), nn.Linear(DIM, DIM)), 0)
    if options:
        checkpoint(module, **options)
    torch.manual_seed(1)
    loss_of(module(random_input(0, BATCH, DIM))).backward()
    return gradients_of(module)


def test_random_numbers_repeat() -> None:
    expected = dropout_gradients()
    torch.testing.assert_close(dropout_gradients(preserve_rng_state=True), expected, rtol=0, atol=0)
    other = dropout_gradients(preserve_rng_state=False)
    assert any(not torch.equal(other[fqn], expected[fqn]) for fqn in expected)


class Nested(nn.Module):
    """Has keywords that are options of checkpointing too, and containers in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(DIM, DIM)

    def forward(self, x: Any, *, debug: torch.Tensor, early_stop: Any = None) -> Any:
        y = torch.tanh(self.lin(x["x"])) * debug
        return {"y": [y, (y * 2, early_stop)]}


def test_keywords_and_nested_outputs_pass_through() -> None:
    results = []
    for module in (seeded(Nested, 0), checkpoint(seeded(Nested, 0))):
        scale = random_input(1, DIM).requires_grad_()
        output = module({"x": random_input(0, BATCH, DIM)}, debug=scale, early_stop="text")
        first, (second, text) = output["y"]
        (first.sum() + second.square().sum()).backward()
        assert text == "text"
        results.append((gradients_of(module), scale.grad))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


class _CountsMatmuls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op is torch.ops.aten.addmm.default
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize(("is_selective", "again"), [(True, 0), (False, 1)])
def test_selective_checkpointing_keeps_what_it_is_told(is_selective: bool, again: int) -> None:
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    module = checkpoint(Counted(), context_fn=keep if is_selective else None)
    loss = loss_of(module(random_input(0, BATCH, DIM)))
    with _CountsMatmuls() as counts:
        loss.backward()
    assert (module.begun, counts.count) == (2, again)


class Changing(nn.Module):
    """Saves a tensor of another shape the second time, which backward can use as well."""

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return x * (torch.full((DIM,), 2.0) if self.runs == 1 else torch.full((1, DIM), 2.0))


def test_a_second_run_that_differs_is_an_error_unless_nobody_checks() -> None:
    x = torch.ones(BATCH, DIM, requires_grad=True)
    with pytest.raises(CheckpointError, match="different metadata"):
        checkpoint(Changing())(x).sum().backward()
    with pytest.raises(CheckpointError, match="Operations executed during recomputation"):
        checkpoint(Changing(), debug=True)(x).sum().backward()
    checkpoint(Changing(), determinism_check="none")(x).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((BATCH, DIM), 2.0))


@pytest.mark.parametrize(("early_stop", "ended"), [(True, 1), (False, 2)])
def test_the_second_run_may_stop_early(early_stop: bool, ended: int) -> None:
    module = checkpoint(Counted(), early_stop=early_stop)
    module(random_input(0, BATCH, DIM)).sum().backward()
    assert (module.begun, module.ended) == (2, ended)


def test_a_module_may_be_called_several_times_in_a_forward_and_backward_several_times() -> None:
    results = []
    for module in (seeded(Counted, 0), checkpoint(seeded(Counted, 0))):
        x = random_input(0, BATCH, DIM)
        loss = loss_of(module(module(module(x))))
        loss.backward(retain_graph=True)
        loss.backward()
        assert module.begun == (9 if "checkpoint" in get_registry(module) else 3)
        # A backward of gradients.
        y = random_input(1, BATCH, DIM).requires_grad_()
        (grad,) = torch.autograd.grad(loss_of(module(y)), y, create_graph=True)
        grad.square().sum().backward()
        results.append(gradients_of(module))
    torch.testing.assert_close(results[0], results[1])


class Raises(nn.Module):
    """Raises in one of its runs."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.lin = nn.Linear(DIM, DIM)
        self.at, self.runs = at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        if self.runs == self.at:
            raise ValueError("on purpose")
        return torch.tanh(self.lin(x))


@pytest.mark.parametrize("at", [1, 2])
def test_after_an_error_in_either_run_the_module_works(at: int) -> None:
    plain, module = seeded(lambda: Raises(0), 0), checkpoint(seeded(lambda: Raises(at), 0))
    x = random_input(0, BATCH, DIM)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(module(x)).backward()
    module.zero_grad()
    for one in (plain, module):
        loss_of(one(x)).backward()
    torch.testing.assert_close(gradients_of(module), gradients_of(plain), rtol=0, atol=0)


def test_a_forward_of_the_instance_is_checkpointed_and_comes_back() -> None:
    module = Counted()
    own = partial(Counted.forward, module)
    module.forward = own
    checkpoint(module)(random_input(0, BATCH, DIM)).sum().backward()
    assert module.begun == 2
    assert unannotate(module).forward is own


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_runs_itself_again(how: Callable[[nn.Module], nn.Module]) -> None:
    module = checkpoint(nn.Sequential(checkpoint(seeded(Counted, 0)), nn.Linear(DIM, DIM)), early_stop=False)
    twin = how(module)
    with torch.no_grad():
        module[0].lin.weight.zero_()
    plain = seeded(Counted, 0)
    torch.testing.assert_close(twin[0](random_input(0, BATCH, DIM)), plain(random_input(0, BATCH, DIM)))
    loss_of(twin(random_input(0, BATCH, DIM))).backward()
    assert (module[0].begun, twin[0].begun) == (0, 4)
    assert module[0].lin.weight.grad is None
    unannotate(twin)
    assert "forward" in vars(module) and "forward" not in vars(twin)


def test_unannotate_undoes_it_at_and_below() -> None:
    module = nn.Sequential(checkpoint(Counted()), Counted())
    before = set(vars(module))
    checkpoint(module)
    unannotate(module, recurse=False)
    assert vars(module).keys() == before and "checkpoint" in get_registry(module[0])
    assert vars(unannotate(module)[0]).keys() == vars(module[1]).keys()
    module(random_input(0, BATCH, DIM)).sum().backward()
    assert (module[0].begun, module[1].begun) == (1, 1)
    checkpoint(module)  # anew


def test_unannotate_refuses_a_forward_that_was_replaced() -> None:
    module = nn.Sequential(checkpoint(Counted()), checkpoint(Counted()))
    module[1].forward = lambda x: x
    with pytest.raises(UsageError, match="forward was replaced since"):
        unannotate(module)
    assert all("checkpoint" in get_registry(one) for one in module)


NO_CONTEXTS: dict[str, Any] = {"debug": True, "context_fn": lambda: (nullcontext(), nullcontext())}


@pytest.mark.parametrize(
    ("make", "options", "text"),
    [
        (lambda: checkpoint(Counted()), {}, "already on this module"),
        (lambda: nn.ModuleList([Counted()]), {}, "without a forward"),
        (Counted, {"use_reentrant": True}, "use_reentrant is True"),
        (Counted, {"preserve_rng": False}, "has no argument preserve_rng"),
        (Counted, NO_CONTEXTS, "debug is True beside a context_fn"),
        (lambda: [outer := nn.Sequential(Counted()), outer[0]], {}, "a module and one inside it"),
    ],
)
def test_what_cannot_be_checkpointed_is_refused(make: Callable[[], Any], options: dict[str, Any], text: str) -> None:
    given = make()
    before = [
        [*vars(module)] for one in ([given] if isinstance(given, nn.Module) else given) for module in one.modules()
    ]
    with pytest.raises(ConfigError, match=text):
        checkpoint(given, **options)
    after = [
        [*vars(module)] for one in ([given] if isinstance(given, nn.Module) else given) for module in one.modules()
    ]
    assert before == after


def test_functional_call_is_refused_where_gradients_are_recorded() -> None:
    module = checkpoint(Counted())
    params = {fqn: param.detach() + 1 for fqn, param in module.named_parameters()}
    x = random_input(0, BATCH, DIM)
    with pytest.raises(UsageError, match="would run again with other parameters"):
        torch.func.functional_call(module, params, (x,))
    with torch.no_grad():
        torch.func.functional_call(module, params, (x,))


# Under the annotations


@on_ranks(2, place=PLACES)
def test_a_checkpoint_costs_no_collective(place: str) -> None:
    counts = []
    for places in ((), PLACES[place]):
        model = Stacked()
        for name in ANNOTATED:
            fully_shard(model.get_submodule(name), reshard_after_forward=True)
        ours(model, places)
        x = random_input(0, BATCH, DIM)
        model(x).sum().backward()
        counting = CountingTransport.install(fully_shard.state(model).root)
        model(x).sum().backward()
        counts.append(counting.counts())
    assert counts[0] == counts[1] and counts[0]["all_gather"] == 6


class Aside(nn.Module):
    """Leaves a loss in a list of the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.gate = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, losses: list[torch.Tensor]) -> torch.Tensor:
        y = torch.tanh(self.lin(x))
        losses.append(torch.tanh(self.gate(y)).square().mean())
        return x + y


@on_ranks(2, apis=[(checkpoint, fully_shard), (fully_shard, checkpoint)])
def test_a_loss_that_leaves_aside_finds_parameters_when_the_module_runs_again(apis: Any) -> None:

    def loss(one: nn.Module, number: int, rank: int) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        output = one(random_input(rank, BATCH, DIM), losses)
        # Backward gets to the loss first.
        total: torch.Tensor = output.square().mean() + losses[0] * 2
        return total

    train(Twins(Aside, lambda block: [api(block) for api in apis], loss=loss), 1)


@on_ranks(2, api=APIS)
def test_annotated_and_checkpointed_models_are_copied_and_undone(api: str) -> None:
    plain = seeded(Stacked, 0)
    loss_of(plain(torch.cat([random_input(rank, BATCH, DIM) for rank in range(2)]))).backward()
    model = checkpoint(seeded(Stacked, 0))
    for name in ANNOTATED:
        APIS[api](model.get_submodule(name))
    ours(model, ["stack.0"])
    for one in (model, copy.deepcopy(model)):
        loss_of(one(random_input(dist.get_rank(), BATCH, DIM))).backward()
        assert unannotate(one) is one
        assert not any(get_registry(below) or "forward" in vars(below) for below in one.modules())
        assert_equal_params(gradients_of(one), gradients_of(plain), tolerance=1e-6)


# Dtypes


class Seeing(nn.Module):
    """Remembers the dtypes that its forward meets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("scale", torch.ones(DIM))
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.dtype, self.scale.dtype, self.linear.weight.dtype))
        return self.linear((x * self.scale).to(self.linear.weight.dtype))


def dtypes_seen(api: str, annotated: str, checkpointed: str | None) -> list[tuple[torch.dtype, ...]]:
    model = nn.Sequential(nn.Sequential(Seeing()))
    policy = MixedPrecisionPolicy(
        torch.bfloat16, buffer_dtype=torch.bfloat16, cast_forward_inputs=False, cast_root_forward_inputs=True
    )
    {"fully_shard": fully_shard, "replicate": replicate}[api](model.get_submodule(annotated), mp_policy=policy)
    if checkpointed is not None:
        checkpoint(model.get_submodule(checkpointed))
    for _ in range(2):
        model(torch.ones(2, DIM)).sum().backward()
    return sorted(set(model.get_submodule("0.0").seen), key=str)


@on_ranks(2, api=APIS, annotated=["", "0", "0.0"])
def test_a_policy_casts_the_same_inputs_and_buffers_with_and_without_checkpointing(api: str, annotated: str) -> None:
    # The oracle is the same model without ``checkpoint``.
    for checkpointed in ("", "0", "0.0"):
        assert dtypes_seen(api, annotated, checkpointed) == dtypes_seen(api, annotated, None), checkpointed


# Compiled


@pytest.mark.parametrize(("api", "order"), [("fully_shard", "before"), ("replicate", "after")])
@on_ranks(2, run=run_ranks)
def test_a_compiled_checkpointed_block_is_one_graph_with_the_gradients_of_one_process(api: str, order: str) -> None:
    warnings.simplefilter("ignore")  # The compiler asks every tensor for its gradient.
    torch.compiler.reset()

    def annotate(model: Any) -> None:
        if order == "after":
            ours(model, PLACES["same"])
        for name in ANNOTATED:
            APIS[api](model.get_submodule(name))
        if order == "before":
            ours(model, PLACES["same"])
        for block in model.stack:
            block.compile(backend="aot_eager", fullgraph=True)

    train(Twins(Stacked, annotate), 2)

"""Gradients that backwards leave on their ranks, and what synchronises them later."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from composable import (
    HandleOptions,
    UsageError,
    clip_grad_norm_,
    fully_shard,
    no_sync,
    reduce_gradients,
    register_comm_hook,
    replicate,
)
from tests.counting import CountingTransport
from tests.models import loss_of, make_model
from tests.parity import full, inputs_of
from tests.programs import Twins, loss_at
from tests.world import RankErrors, on_ranks, run_threads

MICRO_BATCHES = 3


def annotate(model: nn.Module, how: str) -> nn.Module:
    if how == "replicate":
        return replicate(model)
    if how == "mixed":
        replicate(model.blocks[1])
    return fully_shard(model, policy=None if how == "root" else {nn.Linear})


@pytest.mark.parametrize("setting", ["set_is_last_backward", "set_manual_backward_finalization"])
@pytest.mark.parametrize(("keeps", "how"), [(False, "mixed"), (True, "policy")])
@on_ranks(2)
def test_reductions_under_way_end_as_well(setting: str, keeps: bool, how: str) -> None:
    """Run micro batches of which none is said to be the last one."""
    twins = Twins("mlp", lambda model: annotate(model, how))
    getattr(twins.model, setting)(setting == "set_manual_backward_finalization")
    for step in range(MICRO_BATCHES):
        twins.backward(step, keeps=keeps)
    reduce_gradients(twins.model)
    twins.check_gradients()


@on_ranks(2)
def test_each_handle_is_reduced_once_and_nothing_is_gathered() -> None:
    model = annotate(make_model("mlp"), "policy")
    args, kwargs = inputs_of(model, 0, dist.get_rank())
    model(*args, **kwargs)
    counted = CountingTransport.install(fully_shard.state(model).root)
    with no_sync(model):
        for _ in range(MICRO_BATCHES):
            loss_of(model(*args, **kwargs)).backward()
    for expected in ({"reduce_scatter": 8}, {}):
        counted.records.clear()
        reduce_gradients(model)
        assert counted.counts() == expected


@on_ranks(2)
def test_a_second_backward_of_a_forward_reduces_each_handle_once() -> None:
    model = annotate(make_model("mlp"), "policy")
    args, kwargs = inputs_of(model, 0, dist.get_rank())
    output = model(*args, **kwargs)
    counted = CountingTransport.install(fully_shard.state(model).root)
    with no_sync(model):
        output.sum().backward(retain_graph=True)
    output.square().mean().backward()
    assert counted.counts() == {"all_gather": 16, "reduce_scatter": 8}


@on_ranks(2)
def test_nothing_comes_back_that_was_dropped() -> None:
    model = annotate(make_model("mlp"), "policy")
    reduce_gradients(model)
    with no_sync(model):
        backward(model, 0)
    model.zero_grad()
    reduce_gradients(model)
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2, unused_gradients=["none", "zero"])
def test_a_forward_may_wait_for_its_backward_meanwhile(unused_gradients: str) -> None:
    options = HandleOptions(unused_gradients=unused_gradients)
    twins = Twins("mlp", lambda model: fully_shard(model, policy={nn.Linear}, options=options))
    for step in range(MICRO_BATCHES):
        loss = loss_at(twins.model, step, twins.rank)
        reduce_gradients(twins.model)
        with no_sync(twins.model):
            loss.backward()
        twins.backward_alone(step)
    reduce_gradients(twins.model)
    twins.check_gradients()


def refuse_in_no_sync() -> None:
    model = fully_shard(nn.Linear(2, 2))
    with no_sync(model):
        reduce_gradients(model)


class Reducing(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reduce_gradients(self)
        return super().forward(x)


def refuse_in_forward() -> None:
    fully_shard(Reducing(2, 2))(torch.ones(1, 2))


def refuse_in_backward() -> None:
    model = replicate(nn.Linear(2, 2))
    with no_sync(model):
        model(torch.ones(1, 2)).sum().backward()
    model.weight.register_hook(lambda grad: reduce_gradients(model))
    model(torch.ones(1, 2)).sum().backward()


def refuse_plain_module() -> None:
    reduce_gradients(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (refuse_in_no_sync, "reduce_gradients inside of no_sync"),
        (refuse_in_forward, "reduce_gradients while a forward or backward is running"),
        (refuse_in_backward, "reduce_gradients while a forward or backward is running"),
        (refuse_plain_module, "reduce_gradients found no annotated module"),
    ],
)
@on_ranks(1)
def test_the_wrong_moment_is_an_error(program: Callable[[], None], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        program()


def train_with_a_plan(plan: list[str]) -> list[float]:
    """Run a backward for each letter, "k" kept, "s" synchronised, "d" kept and dropped; returns averages."""
    model = replicate(nn.Linear(2, 1, bias=False))
    found: list[float] = []
    for step, letter in enumerate(plan[dist.get_rank()]):
        with nullcontext() if letter == "s" else no_sync(model):
            (model(torch.ones(1, 2)) * (step + 1)).sum().backward()
        if letter == "s":
            assert model.weight.grad is not None
            found.append(model.weight.grad[0, 0].item())
        if letter != "k":
            model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("plan", "counts"), [(["ks", "ss"], (2, 1)), (["skss", "skks"], (2, 3)), (["dkks", "kdks"], (3, 2))]
)
def test_a_rank_that_enters_no_sync_alone_is_logged_once_on_every_rank(
    plan: list[str], counts: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    with suppress(RankErrors):  # One has a backward more than the other.
        run_threads(train_with_a_plan, 2, plan)
    said = said_in(caplog)
    assert len(said) == 2
    for text in said:
        assert text.startswith(
            "ranks had different numbers of forwards or backwards since gradients were last averaged\n"
            f"    rank 0: {counts[0]}\n    rank 1: {counts[1]}\n"
        )


@pytest.mark.parametrize(
    ("plan", "averages"), [(["kskks", "kskks"], [3.0, 12.0]), (["dkss", "dkss"], [5.0, 4.0]), (["ds", "s"], [1.5])]
)
def test_what_was_dropped_counts_as_no_backward(plan: list[str], averages: list[float]) -> None:
    assert run_threads(train_with_a_plan, 2, plan) == [averages, averages]


def train_out_of_step(plan: list[str], *, lists: bool) -> list[float]:
    """Run "b", forward and backward; "f", a forward alone; "n", one without a graph."""
    model = nn.Linear(2, 1, bias=False)
    replicate([model, nn.Linear(2, 1)] if lists else model, find_unused_parameters=True)
    found: list[float] = []
    for letter in plan[dist.get_rank()]:
        with torch.no_grad() if letter == "n" else nullcontext():
            loss = model(torch.ones(1, 2)).sum()
        if letter == "b":
            loss.backward()
            assert model.weight.grad is not None
            found.append(model.weight.grad[0, 0].item())
            model.zero_grad()
    return found


def said_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records]
    return [text for text in texts if "different numbers of forwards or backwards" in text]


@pytest.mark.parametrize(
    ("plan", "lists", "counts"),
    [
        (["fbb", "bfb"], False, (2, 1)),
        (["bfb", "bb"], False, (2, 1)),
        (["bbf", "bbf"], False, None),
        (["bfffb", "bfb"], False, (4, 2)),
        (["bnb", "bb"], False, None),
        # Forwards of a list of modules are not counted.
        (["fbb", "bb"], True, None),
    ],
)
def test_a_rank_that_leaves_out_a_backward_is_logged_once_on_every_rank(
    plan: list[str], lists: bool, counts: tuple[int, int] | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert run_threads(train_out_of_step, 2, plan, lists=lists) == [[1.0, 1.0]] * 2
    said = said_in(caplog)
    assert len(said) == (0 if counts is None else 2)
    for text in said if counts else ():
        assert f"    rank 0: {counts[0]}\n    rank 1: {counts[1]}\n" in text and "'weight'" in text


@on_ranks(2)
def test_ranks_may_keep_different_numbers_of_backwards_for_reduce_gradients() -> None:
    model = replicate(nn.Linear(2, 1, bias=False))
    for _ in range(2):
        model.zero_grad()
        with no_sync(model):
            for _ in range(1 + 2 * dist.get_rank()):
                model(torch.ones(1, 2)).sum().backward()
        reduce_gradients(model)
    assert model.weight.grad is not None
    assert model.weight.grad[0, 0].item() == 2.0


@on_ranks(2)
def test_what_no_sync_left_is_reduced_by_the_hook_of_a_replicated_module() -> None:
    model = replicate(nn.Linear(2, 1, bias=False))
    seen: list[int] = []

    def hook(state: object, grad: torch.Tensor) -> None:
        seen.append(grad.numel())
        dist.all_reduce(grad)
        grad.div_(dist.get_world_size())

    register_comm_hook(model, None, hook)
    with no_sync(model):
        model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
    reduce_gradients(model)
    assert model.weight.grad is not None
    assert (seen, model.weight.grad[0, 0].item()) == ([2], 1.5)


# What needs gradients that wait

USES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "step": lambda model, optimizer: optimizer.step(),
    "norm": lambda model, optimizer: clip_grad_norm_(model.parameters(), 1.0),
    "torch's norm": lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "values": lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1.0),
}


def backward(model: nn.Module, step: int) -> None:
    loss_at(model, step, dist.get_rank()).backward()


@pytest.mark.parametrize(
    ("use", "is_beside"), [("step", True), ("norm", False), ("torch's norm", True), ("values", False)]
)
@on_ranks(2)
def test_what_would_use_gradients_that_wait_is_an_error_until_they_are_reduced(use: str, *, is_beside: bool) -> None:
    model = annotate(make_model("mlp"), "policy")
    optimizer = torch.optim.AdamW(model.parameters())
    if is_beside:
        backward(model, 0)
    before = {fqn: full(param).clone() for fqn, param in model.named_parameters()}
    with no_sync(model):
        backward(model, 1)
        with pytest.raises(UsageError, match="gradients that are not complete"):
            USES[use](model, optimizer)
    with pytest.raises(UsageError, match="gradients that are not complete"):
        USES[use](model, optimizer)
    assert all(torch.equal(full(param), before[fqn]) for fqn, param in model.named_parameters())
    reduce_gradients(model)
    USES[use](model, optimizer)


@on_ranks(2, sets_to_none=[True, False])
def test_gradients_that_were_dropped_wait_for_nothing(*, sets_to_none: bool) -> None:
    model = annotate(make_model("mlp"), "policy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {fqn: full(param).clone() for fqn, param in model.named_parameters()}
    with no_sync(model):
        backward(model, 0)
    optimizer.zero_grad(set_to_none=sets_to_none)
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    assert all(torch.equal(full(param), before[fqn]) for fqn, param in model.named_parameters())
    backward(model, 1)
    optimizer.step()


def hook_each(model: nn.Module, where: str, call: Callable[[], object]) -> list[Any]:
    """Let a hook of the kind ``where`` make ``call`` in each backward, beside what may have a gradient then."""

    def hook(*_: object) -> None:
        call()

    if where == "module":
        return [block.register_full_backward_hook(hook) for block in model.blocks]
    if where == "parameter":
        return [param.register_post_accumulate_grad_hook(hook) for param in model.parameters()]
    nodes = [get_gradient_edge(param).node for param in model.parameters()]
    held: list[Any] = [node.register_hook(hook) for node in nodes]
    return [*held, *nodes]


@pytest.mark.parametrize("context", ["a step", "no_sync"])
@pytest.mark.parametrize("where", ["parameter", "parameter, before", "node", "module"])
@on_ranks(2, how=["replicate", "mixed"], use=["step", "norm"])
def test_what_a_hook_does_with_gradients_before_their_average_is_an_error(
    how: str, use: str, where: str, context: str
) -> None:
    model = make_model("mlp")
    calls: list[Callable[[], object]] = []
    held = hook_each(model, "parameter", lambda: calls and calls[0]()) if "before" in where else []
    annotate(model, how)
    replicated = [param for param in model.parameters() if type(param) is nn.Parameter]
    optimizer = torch.optim.SGD(replicated, lr=0.1)
    calls.append(lambda: USES[use](nn.ParameterList(replicated), optimizer))
    held = held or hook_each(model, where, calls[0])
    before = [param.detach().clone() for param in replicated]
    with no_sync(model) if context == "no_sync" else nullcontext(), pytest.raises(UsageError) as caught:
        backward(model, 0)
    text = str(caught.value)
    assert "inside backward, with gradients of this rank that are not averaged yet" in text
    assert "replicate of '" in text and "fix: step_in_backward(optimizer)" in text
    assert all(map(torch.equal, replicated, before))
    assert held


@on_ranks(2, why=["one rank", "off for good", "another model"])
def test_a_hook_may_step_what_nobody_averages(why: str) -> None:
    group = dist.new_subgroups(1)[0] if why == "one rank" else None
    model, other = replicate(make_model("mlp"), process_group=group), replicate(make_model("mlp"))
    if why == "off for good":
        model.set_requires_gradient_sync(False)
    backward(other, 0)
    optimizer = torch.optim.SGD((other if why == "another model" else model).parameters(), lr=0.1)
    stepped: list[None] = []
    held = hook_each(model, "parameter", lambda: stepped.append(optimizer.step()))
    backward(model, 0)
    assert len(stepped) == len(held)

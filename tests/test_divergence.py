"""Ranks that go different ways, in real processes: every one of them is told, soon, who waits for what and where each is."""

import copy
import random
import re
import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable import (
    ConfigError,
    DesyncError,
    HandleOptions,
    full_state_dict,
    fully_shard,
    replicate,
    set_divergence_timeout,
)
from composable.comm.waits import Diagnosis
from composable.ground.torch_private import store_of_default_group
from tests.logs import kept_logs
from tests.world import on_ranks, run_ranks

LIMIT_S = 0.3
WIDTH = 4


class Model(nn.Module):
    """Layers that run in any order; the layers themselves are handles."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
        for index in range(len(self.layers)) if order is None else order:
            if index < 0:
                raise ValueError("a bad batch")
            x = self.layers[index](x)
        return x


def inputs() -> torch.Tensor:
    return torch.ones(2, WIDTH)


def make(annotation: str) -> Model:
    set_divergence_timeout(LIMIT_S)
    model = Model()
    if annotation == "replicate":
        return replicate(model, find_unused_parameters=True)
    return fully_shard(
        model,
        policy={nn.Linear},
        options=HandleOptions(transport="process_group" if annotation == "ordered" else "auto"),
    )


def wait_for_a_verdict() -> None:
    """Return when a rank that waits in a step has asked, and the ranks have been told where they are."""
    store = store_of_default_group()
    number = 0
    # On a busy machine ranks may have waited long before, to compare plans.
    while b"waits for the all-" not in store.get(f"composable watch/{number}/verdict"):
        number += 1


def wait_until_all_are_told() -> None:
    """Return when the ranks have been told that they have diverged."""
    store = store_of_default_group()
    number = 0
    while not Diagnosis.from_text(store.get(f"composable watch/{number}/verdict").decode()).groups:
        number += 1


def goes_on(model: Model) -> None:
    """Train on, for longer than it takes to be told."""
    for _ in range(2000):
        model(inputs()).sum().backward()
    full_state_dict(model)


def skips_a_module(model: Model) -> None:
    model(inputs(), [0, 2]).sum().backward()


def runs_another_order(model: Model) -> None:
    model(inputs(), [1, 0, 2]).sum().backward()


def skips_backward(model: Model) -> None:
    model(inputs())


def evaluates_once_more(model: Model) -> None:
    with torch.no_grad():
        model(inputs())
    model(inputs(), [2, 1, 0]).sum().backward()


def catches_its_exception(model: Model) -> None:
    with pytest.raises(ValueError, match="a bad batch"):
        model(inputs(), [0, -1])
    wait_until_all_are_told()


def catches_its_exception_in_backward(model: Model) -> None:
    def fail(grad: torch.Tensor) -> None:
        raise ValueError("a bad gradient")

    y = model.layers[0](inputs())
    y.register_hook(fail)
    with pytest.raises(ValueError, match="a bad gradient"):
        model.layers[2](model.layers[1](y)).sum().backward()
    wait_until_all_are_told()


def meets_elsewhere(model: Model) -> None:
    full_state_dict(model)


def gathers_alone(model: Model) -> None:
    next(model.parameters()).full_tensor()  # type: ignore[attr-defined]  # the parameters are sharded


SHARDED = [
    skips_a_module,
    runs_another_order,
    skips_backward,
    evaluates_once_more,
    catches_its_exception,
    catches_its_exception_in_backward,
    meets_elsewhere,
    gathers_alone,
]


def diverge(annotation: str, way: Callable[[Model], None]) -> str:
    """Train two steps together, then let the last rank go its own way."""
    model = make(annotation)
    for _ in range(2):
        model(inputs()).sum().backward()
    with pytest.raises(DesyncError) as caught:  # noqa: PT012  # which of the two meets the others differs
        if dist.get_rank() == dist.get_world_size() - 1:
            way(model)
        goes_on(model)
    with pytest.raises(DesyncError):
        model(inputs()).sum().backward()
    return str(caught.value)


def check(texts: list[str]) -> str:
    """Return the message, which must be the same on all ranks but for the place."""
    for rank, text in enumerate(texts):
        assert f"\n  at:  rank {rank}\n" in text
    messages = {re.sub(r"  at:  rank \d", "  at:", text) for text in texts}
    assert len(messages) == 1, messages
    message = messages.pop()
    for rank in range(len(texts)):
        assert re.search(rf"^    ranks? [\d, ]*{rank}", message, re.MULTILINE), message
    return message


@pytest.mark.parametrize("way", SHARDED)
def test_ranks_of_a_sharded_module_that_diverge_are_all_told(way: Callable[[Model], None]) -> None:
    message = check(run_ranks(diverge, 2 + SHARDED.index(way) % 2, "sharded", way))
    assert "module 'layers." in message and " of Model" in message and "test_divergence.py" in message


@pytest.mark.parametrize("way", [skips_backward, catches_its_exception])
def test_so_are_ranks_whose_collectives_have_no_tags(way: Callable[[Model], None]) -> None:
    check(run_ranks(diverge, 2, "ordered", way))


def test_a_rank_of_a_replicated_module_that_raised_is_told_to_all() -> None:
    message = check(run_ranks(diverge, 3, "replicate", catches_its_exception))
    assert "has left forward 3 of Model: ValueError: a bad batch; now at" in message
    assert "all-reduce of bucket 1 of 1, gradients of 'layers.2.bias', 'layers.2.weight'" in message


def call_fully_shard_wrongly_on_one_rank() -> str:
    set_divergence_timeout(LIMIT_S)
    model = Model()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if is_last:
        with pytest.raises(ConfigError):
            fully_shard(model, policy=3)  # type: ignore[arg-type]
        wait_until_all_are_told()
        with pytest.raises(RuntimeError):
            # Until the group is closed: this rank must not come after all.
            dist.recv(torch.zeros(1), 0)
        fully_shard(model)
    else:
        fully_shard(model)
    with pytest.raises(DesyncError) as caught:
        model(inputs())
    return str(caught.value)


def test_a_call_that_raises_on_one_rank_is_told_to_those_that_wait_in_their_first_forward() -> None:
    message = check(run_ranks(call_fully_shard_wrongly_on_one_rank, 3))
    assert "the other ranks in the comparison of plans before the first forward" in message
    assert "has left fully_shard by ConfigError: policy is 3" in message


def train_unannotated_on_one_rank() -> str:
    set_divergence_timeout(LIMIT_S)
    model = Model()
    if dist.get_rank() == 0:
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError) as caught:  # noqa: PT012  # one rank waits in the first line, one in the last
        model(inputs()).sum().backward()
        optimizer.step()
        dist.barrier()
    return str(caught.value)


def test_a_rank_that_trains_without_an_annotation_is_found() -> None:
    text = run_ranks(train_unannotated_on_one_rank, 2)[0]
    assert "rank 0: waits for the other ranks in the comparison of plans before the first forward" in text
    assert "rank 1: waits for the other ranks in torch.distributed.barrier" in text


@on_ranks(2, run=run_ranks)
def test_fully_shard_on_one_rank_and_replicate_on_another_is_told_to_both() -> None:
    set_divergence_timeout(LIMIT_S)
    model = Model()
    with pytest.raises(DesyncError) as caught:  # noqa: PT012  # one call compares now, the other at the first forward
        (fully_shard if dist.get_rank() == 0 else replicate)(model)
        model(inputs())
    text = str(caught.value)
    assert "the ranks are in different calls" in text
    assert "rank 0: the comparison of plans before the first forward" in text and "rank 1: replicate" in text


def be_slow(annotation: str, where: str) -> list[str]:
    model = make(annotation)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    with kept_logs() as texts:
        for step in range(3):
            y = model(inputs())
            if step == 1 and is_last:
                if where == "between":
                    wait_for_a_verdict()
                else:
                    y.register_hook(lambda grad: wait_for_a_verdict())
            y.sum().backward()
            if where == "together":
                # As ranks that all raise and go on.
                with pytest.raises(ValueError, match="a bad batch"):
                    model(inputs(), [0, -1])
                if step == 1 and is_last:
                    wait_for_a_verdict()
        # Whoever asked may still be about to log what it has told the others.
        for watch in [thread for thread in threading.enumerate() if thread.name == "composable watch"]:
            watch.look_now()  # type: ignore[attr-defined]  # the one thread of this name
    return texts


@pytest.mark.parametrize(
    ("annotation", "where"),
    [("sharded", "inside"), ("ordered", "between"), ("replicate", "between"), ("replicate", "inside")],
)
def test_a_rank_that_is_merely_slow_is_no_error_and_is_logged(annotation: str, where: str) -> None:
    texts, _ = run_ranks(be_slow, 2, annotation, where)
    assert any("waits for the all-" in text for text in texts)


def test_a_rank_that_is_slow_after_all_have_raised_is_no_error() -> None:
    first, _ = run_ranks(be_slow, 2, "sharded", "together")
    assert first


def follow(seed: int) -> str:
    """Train some steps, of which one rank does one differently; returns how that ended here."""
    chance = random.Random(seed)
    annotation = chance.choice(["sharded", "sharded", "replicate"])
    steps = [chance.sample(range(3), 3) for _ in range(4)]
    changed, culprit = chance.randrange(4), chance.randrange(dist.get_world_size())
    how = chance.choice(["drop", "add", "reorder", "raise", "skip step", "skip backward", "no_grad"])
    model = make(annotation)
    try:
        for index, order in enumerate(steps):
            is_changed = index == changed and dist.get_rank() == culprit
            if is_changed and how == "skip step":
                continue
            if is_changed and how in {"drop", "add", "reorder", "raise"}:
                order = {
                    "drop": order[1:],
                    "add": [order[1], *order],
                    "reorder": order[::-1],
                    "raise": [*order[:2], -1],
                }[how]
            try:
                with torch.set_grad_enabled(not (is_changed and how == "no_grad")):
                    y = model(inputs(), order).sum()
                if y.requires_grad and not (is_changed and how == "skip backward"):
                    y.backward()
            except ValueError:
                pass
        full_state_dict(model)
    except DesyncError as error:
        return f"DesyncError {how}" if "\n    rank" in str(error) else f"{how}: {error}"
    return f"done {how}"


def test_whatever_one_rank_does_differently_all_are_told_or_none() -> None:
    ends = set()
    for seed in range(12):
        (end,) = set(run_ranks(follow, 2 + seed % 2, seed))
        ends.add(end)
        assert end.startswith(("DesyncError", "done")), (seed, end)
    assert sum(end.startswith("DesyncError") for end in ends) > 2


@on_ranks(3, seed=range(10))
def test_equal_modules_in_another_order_on_one_rank_are_an_error_on_every_rank(seed: int) -> None:
    """Let collectives of equal sizes meet by their order alone: the ranks would exchange other modules' values."""
    rng = random.Random(seed)
    model = make("ordered")
    orders = [rng.sample(range(3), 3) if rng.random() < 0.5 else [0, 1, 2] for _ in range(3)]
    # As a sum, so that gathers meet gathers in every order.
    loss = sum(model(inputs(), [index]).sum() for index in orders[dist.get_rank()])
    if len({*map(tuple, orders)}) == 1:
        loss.backward()
    else:
        with pytest.raises(DesyncError, match="the ranks gather or reduce modules in different orders"):
            loss.backward()


@on_ranks(2, kind=["annotated", "copied"], step=[0, 2])
def test_equal_models_in_another_order_on_one_rank_are_an_error_on_every_rank(kind: str, step: int) -> None:
    model = fully_shard(nn.Linear(4, 4))
    models = [model, copy.deepcopy(model) if kind == "copied" else fully_shard(nn.Linear(4, 4))]
    for _ in range(step):
        sum(one(torch.ones(2, 4)).sum() for one in models).backward()
    first = dist.get_rank()
    said = "modules in different orders" if step else "Linear, number [12] of the models with this plan"
    with pytest.raises(DesyncError, match=said):
        (models[first](torch.ones(2, 4)) + models[1 - first](torch.ones(2, 4))).sum().backward()


@on_ranks(2)
def test_another_order_in_an_evaluation_is_an_error_at_the_end_of_the_next_backward() -> None:
    model = make("ordered")
    with torch.no_grad():
        for index in (dist.get_rank(), 1 - dist.get_rank()):
            model(inputs(), [index])
    loss = model(inputs()).sum()
    with pytest.raises(DesyncError, match="the ranks gather or reduce modules in different orders"):
        loss.backward()


@on_ranks(4)
def test_copies_of_shards_may_evaluate_different_batches() -> None:
    """Let each half of the ranks, which has all shards, run forwards that the other half does not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Model(), policy={nn.Linear}, mesh=mesh, options=HandleOptions(transport="process_group"))
    for _ in range(2):
        with torch.no_grad():
            for index in range(1 + mesh.get_local_rank("replicate")):
                model(inputs(), [index])
        model(inputs()).sum().backward()


@pytest.mark.parametrize("value", [-1, "soon", float("nan"), True])
def test_a_limit_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="seconds is"):
        set_divergence_timeout(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "there", "here"),
    [
        ("layers.0.weight", "float32, requires_grad=True", "bfloat16, requires_grad=True"),
        ("layers.2.weight", "float32, requires_grad=True", "float32, requires_grad=False"),
    ],
)
@on_ranks(2)
def test_plans_that_differ_in_a_parameter_name_it_and_what_differs(name: str, there: str, here: str) -> None:
    model = Model()
    if dist.get_rank() == 1:
        model.bfloat16() if "bfloat16" in here else model.layers[2].requires_grad_(False)
    fully_shard(model, policy={nn.Linear})
    with pytest.raises(DesyncError) as caught:
        model(inputs())
    for rank, what in enumerate((there, here)):
        assert f"rank {rank}: parameter {name!r} [4, 4] {what}" in str(caught.value)


@on_ranks(2, run=run_ranks)
def test_a_verdict_that_is_read_in_the_next_world_of_a_process_closes_nothing_there() -> None:
    set_divergence_timeout(1)
    make("fully_shard")
    assert dist.group.WORLD is not None
    store, name, rank = store_of_default_group(), dist.group.WORLD.group_name, dist.get_rank()
    questions = dist.PrefixStore("composable watch", store)
    questions.add("0/asked", 1)
    questions.wait(["0/place/0", "0/place/1"], timedelta(seconds=200))
    dist.barrier()
    watches = [thread for thread in threading.enumerate() if thread.name == "composable watch"]
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("next", store), rank=rank, world_size=2)
    assert dist.group.WORLD.group_name == name
    dist.barrier()
    questions.set("0/verdict", Diagnosis((name,), ("the last world has diverged",)).as_text())
    for watch in watches:
        watch.join(200)
        assert not watch.is_alive()
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == 2.0


class Failing(nn.Linear):
    """Raises at the end of its forward, when told."""

    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.fails:
            raise ValueError("a bad batch")
        return y


def goes_on_after_its_exception(strategy: str, transport: str) -> list[str]:
    """Catch what one rank raises at the end of a forward, and go on, as the others do that ran backward."""
    set_divergence_timeout(LIMIT_S)
    mesh = None
    if strategy == "HYBRID_SHARD":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Failing(WIDTH, WIDTH), mesh=mesh, strategy=strategy, options=HandleOptions(transport=transport))
    told = []
    for step in range(4):
        model.fails = step == 1 and dist.get_rank() == 1
        try:
            model(inputs()).sum().backward()
            told.append("nothing")
        except (ValueError, DesyncError) as error:
            told.append(type(error).__name__)
        model.zero_grad()
    return told


@pytest.mark.parametrize(
    ("strategy", "transport"), [("FULL_SHARD", "process_group"), ("HYBRID_SHARD", "shared_memory")]
)
def test_ranks_that_go_on_after_an_exception_of_one_are_all_told_in_every_step(strategy: str, transport: str) -> None:
    told = run_ranks(goes_on_after_its_exception, 4, strategy, transport)
    others = ["nothing", "DesyncError", "DesyncError", "DesyncError"]
    assert told == [others, ["nothing", "ValueError", "DesyncError", "DesyncError"], others, others]


def call_in_between() -> str:
    """Train, while a second thread of one rank makes a call in the same process group that nobody else makes."""
    set_divergence_timeout(LIMIT_S)
    model = fully_shard(Model(), policy={nn.Linear}, options=HandleOptions(transport="process_group"))
    model(inputs()).sum().backward()
    has_called = threading.Event()

    def call() -> None:
        work = dist.broadcast(torch.ones(4), 0, async_op=True)
        has_called.set()
        with pytest.raises(RuntimeError):
            work.wait()

    caller = threading.Thread(target=call)
    if dist.get_rank() == 0:
        caller.start()
        has_called.wait()
    with pytest.raises(DesyncError) as caught:
        goes_on(model)
    if dist.get_rank() == 0:
        caller.join()
    return str(caught.value)


def test_ranks_that_all_wait_in_one_group_after_a_call_of_a_second_thread_are_told() -> None:
    message = check(run_ranks(call_in_between, 3))
    assert "waits for the all-gather of module 'layers.0' (Linear), in forward 2 of Model" in message

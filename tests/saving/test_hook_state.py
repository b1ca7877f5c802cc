"""States of communication hooks in checkpoints: training goes on to the bit where ranks are the same, and says so elsewhere."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.filesystem import FileSystemReader

from composable import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fully_shard,
    load_checkpoint,
    reduce_scatter_hook,
    register_comm_hook,
    replicate,
    save_checkpoint,
)
from tests.models import BATCH, DIM, random_input, seeded
from tests.parity import full
from tests.world import run_threads, told


class Feedback:
    """Sends signs, and adds what they leave out to the next gradients."""

    def __init__(self, *, extra: object = None) -> None:
        self.ranks = DefaultState(dist.group.WORLD)
        self.extra = extra
        self.errors: dict[int, torch.Tensor] = {}
        self.calls = 0

    def state_dict(self) -> dict[str, Any]:
        return {"errors": self.errors, "calls": self.calls, "extra": self.extra}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["extra"] == "refused":
            raise KeyError("not these")
        self.errors, self.calls, self.extra = dict(state["errors"]), state["calls"], state["extra"]


def send_signs(state: Feedback, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    key = grad.numel()
    wanted = grad + state.errors.get(key, torch.zeros_like(grad))
    sent = wanted.sign() * wanted.abs().mean()
    state.errors[key] = wanted - sent
    state.calls += 1
    if output is None:
        grad.copy_(sent)
        allreduce_hook(state.ranks, grad)
    else:
        reduce_scatter_hook(state.ranks, sent, output)


def send_signs_too(state: Feedback, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    send_signs(state, grad, output)


def make(annotation: str = "fully_shard") -> nn.Sequential:
    # No two buffers or buckets of one length, by which the hook knows them.
    layers = (nn.Linear(DIM, 20), nn.Tanh(), nn.Linear(20, 40), nn.Linear(40, 3))
    model = seeded(lambda: nn.Sequential(*layers), 0)
    if annotation == "fully_shard":
        return fully_shard(model, policy={nn.Linear})
    if annotation == "replicate":
        return replicate(model, bucket_cap_mb=0.0001)
    replicate(model[0])
    return fully_shard(model, policy={nn.Linear})


def make_run(
    annotation: str = "fully_shard", **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, list[Feedback]]:
    """Return a model, its optimizer, and the states of two hooks: one for a layer, one for the rest."""
    model = make(annotation)
    states = [Feedback(**options), Feedback(**options)]
    register_comm_hook(model, states[0], send_signs)
    if annotation != "replicate":
        register_comm_hook(model[2], states[1], send_signs)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), states


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, dim: int = DIM) -> None:
    for step in steps:
        model(random_input(100 * step + dist.get_rank(), BATCH, dim)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: full(value).clone() for fqn, value in model.state_dict().items()}


def equal(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def hooks_in(folder: Path) -> list[str]:
    """Return the names of the states of hooks in a checkpoint."""
    names = FileSystemReader(folder).read_metadata().state_dict_metadata
    return sorted(name for name in names if name.startswith("hooks."))


def message(call: Callable[[], object]) -> str:
    """Return what ``call`` raises on this rank."""
    return told(call)[dist.get_rank()]


# The same ranks


def resume(folder: str, annotation: str, *, asynchronous: bool = False) -> None:
    nested = [{"at": (1, None, 0.5), 7: torch.ones(2, dtype=torch.bfloat16)}, torch.arange(6)[2:4]]
    model, optimizer, states = make_run(annotation, extra=nested)
    train(model, optimizer, range(3))
    saving = save_checkpoint(folder, 3, model, optimizer, asynchronous=asynchronous)
    train(model, optimizer, range(3, 6))
    saving.wait()
    other, other_optimizer, other_states = make_run(annotation)
    load_checkpoint(folder, other, other_optimizer)
    assert states[0].errors, "the hook ran"
    train(other, other_optimizer, range(3, 6))
    equal(values_of(other), values_of(model))
    for state, other_state in zip(states, other_states, strict=True):
        equal(other_state.errors, state.errors)
        assert other_state.calls == state.calls
    equal(other_states[0].extra, states[0].extra)
    assert [type(one) for one in other_states[0].extra[0]["at"]] == [int, type(None), float]


@pytest.mark.parametrize(
    ("world_size", "annotation", "asynchronous"),
    [
        (1, "fully_shard", False),
        (2, "fully_shard", True),
        (3, "fully_shard", False),
        (3, "replicate", False),
        (2, "mixed", False),
    ],
)
def test_training_with_error_feedback_goes_on_to_the_bit(
    tmp_path: Path, world_size: int, annotation: str, asynchronous: bool
) -> None:
    run_threads(resume, world_size, str(tmp_path), annotation, asynchronous=asynchronous)


def save_shared(folder: str) -> list[int]:
    calls = []
    for is_loaded in (False, True):
        model, state = make(), Feedback()
        for layer in (model[0], model[2]):
            register_comm_hook(layer, state, send_signs)
        if is_loaded:
            load_checkpoint(folder, model)
        else:
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(3))
            save_checkpoint(folder, 0, model)
        calls.append(state.calls)
    return calls


def test_a_state_of_two_hooks_is_saved_once(tmp_path: Path) -> None:
    assert run_threads(save_shared, 2, str(tmp_path)) == [[6, 6], [6, 6]]
    hook = f"communication hook {__name__}.send_signs with Feedback on module '0'"
    assert hooks_in(tmp_path / "step-000000") == [f"hooks.{rank}.{hook}" for rank in range(2)]


def save_and_load_wrapped(folder: str) -> list[int]:
    calls = []
    for is_loaded in (False, True):
        inner = seeded(lambda: nn.Linear(DIM, 3), 0)
        model = fully_shard(nn.Sequential(inner if is_loaded else checkpoint_wrapper(inner)), policy={nn.Linear})
        register_comm_hook(inner, state := Feedback(), send_signs)
        if is_loaded:
            load_checkpoint(folder, model)
        else:
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), range(2))
            save_checkpoint(folder, 2, model)
        calls.append(state.calls)
    return calls


def test_wrappers_of_torch_do_not_count_in_names(tmp_path: Path) -> None:
    assert run_threads(save_and_load_wrapped, 2, str(tmp_path)) == [[2, 2]] * 2


# Other ranks, hooks and layouts


def save_with(folder: str, annotation: str = "fully_shard") -> None:
    model, optimizer, _ = make_run(annotation)
    train(model, optimizer, range(2))
    save_checkpoint(folder, 2, model, optimizer)


def load_with(folder: str, annotation: str = "fully_shard") -> list[int]:
    """Load, train on, and return how often the hooks were called before."""
    model, optimizer, states = make_run(annotation)
    for state in states:
        state.errors[-1] = torch.ones(2)
    load_checkpoint(folder, model, optimizer)
    calls = [state.calls for state in states]
    if not any(calls):
        assert all(list(state.errors) == [-1] for state in states)
    train(model, optimizer, range(2, 3))
    return calls


def notices(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "composable"]


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, 3), (2, 1), (1, 2)])
def test_other_numbers_of_ranks_leave_the_state_alone_and_say_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, saved_on: int, loaded_on: int
) -> None:
    run_threads(save_with, saved_on, str(tmp_path))
    assert notices(caplog) == []
    for _ in range(2):
        assert run_threads(load_with, loaded_on, str(tmp_path)) == [[0, 0]] * loaded_on
    found = notices(caplog)
    assert found == [
        f"the state of communication hook tests.saving.test_hook_state.send_signs with Feedback on {place} is for "
        f"{saved_on} ranks in {tmp_path / 'step-000002'}, and {loaded_on} load it: the hook goes on with what it has"
        for place in ("the model", "module '2'")
    ]


def test_another_layout_leaves_the_state_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_threads(save_with, 2, str(tmp_path), "mixed")
    assert run_threads(load_with, 2, str(tmp_path)) == [[0, 2], [0, 2]]
    (text,) = notices(caplog)
    assert "on the model is for other ranks, cuts or buckets in" in text


def go_without(folder: str, is_saving: bool) -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    save_checkpoint(folder, 2, model, optimizer) if is_saving else load_checkpoint(folder, model, optimizer)


def test_a_state_without_its_hook_and_a_hook_without_its_state_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_threads(go_without, 2, str(tmp_path), True)
    assert run_threads(load_with, 2, str(tmp_path)) == [[0, 0], [0, 0]]
    first, second = notices(caplog)
    assert first.startswith(f"{tmp_path / 'step-000002'} holds no state of communication hook tests.saving")
    assert "Feedback on the model: the hook goes on" in first and "Feedback on module '2': the hook" in second
    caplog.clear()
    run_threads(save_with, 2, str(tmp_path))
    run_threads(go_without, 2, str(tmp_path), False)
    first, second = notices(caplog)
    assert first.endswith("Feedback on the model, which is not registered here: it is left out")
    assert second.endswith("Feedback on module '2', which is not registered here: it is left out")


def load_renamed(folder: str) -> list[int]:
    model, states = make(), [Feedback(), Feedback()]
    register_comm_hook(model, states[0], send_signs)
    register_comm_hook(model[2], states[1], send_signs_too)
    load_checkpoint(folder, model)
    return [state.calls for state in states]


def test_a_hook_takes_no_state_of_another_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_threads(save_with, 2, str(tmp_path))
    assert run_threads(load_renamed, 2, str(tmp_path)) == [[4, 0], [4, 0]]
    left_out, alone = notices(caplog)
    assert "send_signs with Feedback on module '2', which is not registered" in left_out
    assert "no state of communication hook tests.saving.test_hook_state.send_signs_too" in alone


# States that are not saved


def states_without_content() -> list[Any]:
    return [None, DefaultState(dist.group.WORLD), LowPrecisionState(dist.group.WORLD), dist.group.WORLD]


def averages(state: Any, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Stand in for a hook; none is called."""


def save_stateless(folder: str) -> None:
    for index, state in enumerate(states_without_content()):
        model = make()
        register_comm_hook(model, state, bf16_compress_hook if isinstance(state, LowPrecisionState) else averages)
        save_checkpoint(f"{folder}/{index}", 1, model)


def test_states_that_do_not_change_leave_no_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_threads(save_stateless, 2, str(tmp_path))
    folders = sorted(tmp_path.glob("*/step-000001"))
    assert len(folders) == 4 and notices(caplog) == []
    for folder in folders:
        assert hooks_in(folder) == []


class Bag:
    """Has tensors, and no way to ask for them."""

    def __init__(self) -> None:
        self.errors = [torch.ones(2)]


def save_bag(folder: str) -> None:
    model = make()
    register_comm_hook(model[0], Bag(), averages)
    register_comm_hook(model[2], {"errors": torch.ones(2)}, averages)
    save_checkpoint(folder, 1, model)


def test_tensors_that_cannot_be_asked_for_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_threads(save_bag, 2, str(tmp_path))
    assert notices(caplog) == [
        f"the state of communication hook tests.saving.test_hook_state.averages with {what} holds tensors that are "
        "not in checkpoints\n  fix: give its class state_dict() and load_state_dict()"
        for what in ("Bag on module '0'", "dict on module '2'")
    ]


# What goes wrong


def save_object(folder: str, kind: str) -> str:
    model, optimizer, states = make_run()
    save_checkpoint(folder, 1, model, optimizer)
    if dist.get_rank() == dist.get_world_size() - 1:
        states[1].extra = {
            "object": Bag(),
            "set of an object": [{"deep": (1, Bag())}],
            "sharded": model[0].weight,
            "meta": torch.empty(2, device="meta"),
            "group": dist.group.WORLD,
        }[kind]
    return message(lambda: save_checkpoint(folder, 2, model, optimizer))


@pytest.mark.parametrize("kind", ["object", "set of an object", "sharded", "meta", "group"])
def test_what_is_no_data_is_an_error_on_every_rank_before_anything_is_written(tmp_path: Path, kind: str) -> None:
    for text in run_threads(save_object, 2, str(tmp_path), kind):
        assert text.startswith(
            "ConfigError: the state of communication hook tests.saving.test_hook_state.send_signs with Feedback on "
            "module '2' "
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000001", "writer.lock"]


def save_on_one(folder: str) -> str:
    model, state = make("replicate"), Feedback()
    register_comm_hook(model, state, send_signs)
    if dist.get_rank() == 1:
        replicate.state(model).reducer.comm_hooks = ()  # As only a bug of the library could.
    return message(lambda: save_checkpoint(folder, 1, model))


def test_a_state_on_one_rank_only_is_an_error_on_all(tmp_path: Path) -> None:
    for text in run_threads(save_on_one, 2, str(tmp_path)):
        assert text.startswith(
            "DesyncError: the ranks call save_checkpoint or load_checkpoint with different arguments"
        )
        assert "send_signs with Feedback on the model has a state" in text
    assert not list(tmp_path.glob("step-*"))


def save_refused(folder: str) -> str:
    model, optimizer, _ = make_run(extra="refused")
    save_checkpoint(folder, 1, model, optimizer)
    return message(lambda: load_checkpoint(folder, model, optimizer))


def test_a_state_that_refuses_what_it_saved_is_an_error(tmp_path: Path) -> None:
    for rank, text in enumerate(run_threads(save_refused, 2, str(tmp_path))):
        assert text.startswith("UsageError: the state of communication hook tests.saving")
        assert f"was not loaded: KeyError: 'not these'\n  at:  rank {rank}" in text


class Keeps:
    """A state of nothing but what it was given."""

    def __init__(self, content: Any = None) -> None:
        self.content = content

    def state_dict(self) -> Any:
        return self.content

    def load_state_dict(self, content: Any) -> None:
        self.content = content


def save_view(folder: str) -> None:
    model = make()
    register_comm_hook(model, Keeps(torch.zeros(1 << 18)[:3]), averages)
    save_checkpoint(folder, 1, model)


def test_a_view_is_saved_without_what_is_around_it(tmp_path: Path) -> None:
    run_threads(save_view, 2, str(tmp_path))
    assert all(path.stat().st_size < 1 << 16 for path in (tmp_path / "step-000001").iterdir())

"""Parameters that no annotation manages, beside annotated ones: told at the first step, in clipping and in saves."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from composable import DesyncError, clip_grad_norm_, fully_shard, has_finite_gradients, replicate, save_checkpoint
from composable.errors import warn_once
from composable.runs.contents import norms_of_plain
from tests.logs import kept_logs
from tests.models import random_input, seeded
from tests.parity import full
from tests.world import on_ranks, run_ranks, run_threads

NAMES = ["stem.weight", "stem.bias", "head.weight", "head.bias"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x).relu()
        output: torch.Tensor = self.head(x)
        return output


def beside(model: nn.Module) -> list[nn.Parameter]:
    return [param for fqn, param in model.named_parameters() if fqn in NAMES]


def blocks(model: Model, annotate: Callable[..., Any] = fully_shard, **options: Any) -> None:
    for block in model.blocks:
        annotate(block, **options)


def frozen(model: Model) -> None:
    blocks(model)
    for param in beside(model):
        param.requires_grad_(False)


def with_ddp(model: Model) -> nn.Module:
    blocks(model)
    left = [fqn for fqn, _ in model.named_parameters() if fqn not in NAMES]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left)
    return DistributedDataParallel(model)


FORGOTTEN: dict[str, Callable[[Model], Any]] = {
    "sharded blocks": blocks,
    "replicated blocks": lambda model: blocks(model, replicate),
}
KNOWN: dict[str, Callable[[Model], Any]] = {
    "nothing annotated": lambda model: None,
    "the root": lambda model: [blocks(model), fully_shard(model)],
    "replicated around": lambda model: [blocks(model), replicate(model)],
    "beside": lambda model: [blocks(model), replicate([model.stem, model.head])],
    "ignored parameters": lambda model: blocks(model, ignored_params=beside(model)),
    "ignored modules": lambda model: fully_shard(model, ignored_modules=[model.stem, model.head]),
    "ignored by replicate": lambda model: replicate(model, ignored_params=NAMES),
    "frozen": frozen,
}
ANNOTATIONS = FORGOTTEN | KNOWN | {"DistributedDataParallel": with_ddp}


def batch(rank: int) -> torch.Tensor:
    return random_input(rank, 4, 8)


def steps(what: str, *, is_named: bool, clips: bool = False) -> list[str]:
    """Return the errors of clipping in two steps."""
    model, errors = seeded(Model, 0), []
    made = ANNOTATIONS[what](model)
    called = made if isinstance(made, nn.Module) else model
    optimizer = torch.optim.SGD(model.named_parameters() if is_named else model.parameters(), lr=0.1)
    for _ in range(2):
        called(batch(dist.get_rank())).square().mean().backward()
        assert has_finite_gradients(model.parameters())
        try:
            if clips:
                clip_grad_norm_(model.parameters(), 0.01)
        except DesyncError as error:
            errors.append(str(error))
        optimizer.step()
        optimizer.zero_grad()
    return errors


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "no annotation averages" in text]


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("what", FORGOTTEN)
def test_a_forgotten_root_is_told_once_at_the_first_step(
    what: str, is_named: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    run_threads(steps, 3, what, is_named=is_named)
    (text,) = warned(caplog)
    shapes = [f"of shape {list(param.shape)}" for param in beside(Model())]
    named = ", ".join(map(repr, NAMES if is_named else shapes))
    assert text.startswith(f"no annotation averages the gradients of parameters {named}, which lie beside")
    assert "at:  rank 0, SGD" in text and "fully_shard(model)" in text and "ignored_params=" in text


@pytest.mark.parametrize(("what", "world_size"), [*((what, 2) for what in KNOWN), ("sharded blocks", 1)])
def test_what_is_averaged_elsewhere_ignored_or_alone_is_not_told(
    what: str, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    errors = run_threads(steps, world_size, what, is_named=True, clips=what != "nothing annotated")
    assert (warned(caplog), errors) == ([], [[]] * world_size)


def steps_with_ddp() -> list[str]:
    with kept_logs() as texts:
        return steps("DistributedDataParallel", is_named=True, clips=True) + texts


def test_what_torchs_wrapper_averages_is_not_told() -> None:
    assert run_ranks(steps_with_ddp, 2) == [[], []]


def test_clipping_of_forgotten_gradients_that_differ_is_an_error_on_every_rank() -> None:
    for rank, errors in enumerate(run_threads(steps, 2, "sharded blocks", is_named=True, clips=True)):
        assert len(errors) == 2
        lines = errors[0].splitlines()
        assert lines[0] == "gradients that no annotation averages differ, and ranks would clip by them"
        assert [line.partition(": norm ")[0] for line in lines[1:3]] == ["    rank 0", "    rank 1"]
        assert lines[3].startswith(f"  at:  rank {rank}, of shape [16, 8], of shape [16]")
        assert "fully_shard(model)" in lines[4]


@on_ranks(2)
def test_clipping_of_forgotten_gradients_that_are_nan_says_nan() -> None:
    model = seeded(Model, 0)
    blocks(model)
    (model(batch(0)).square().mean() * (float("nan") if dist.get_rank() == 0 else 1.0)).backward()
    norm = clip_grad_norm_(model.parameters(), 0.01)
    assert norm.isnan()


@on_ranks(3)
def test_gradients_that_are_averaged_by_hand_are_clipped_as_in_one_process() -> None:
    """Forget the root, and average by hand: the norm and the step are those of one process."""
    world_size, model, plain = dist.get_world_size(), seeded(Model, 0), seeded(Model, 0)
    blocks(model)
    model(batch(dist.get_rank())).square().mean().backward()
    plain(torch.cat([batch(rank) for rank in range(world_size)])).square().mean().backward()
    for param in beside(model):
        assert param.grad is not None
        dist.all_reduce(param.grad)
        param.grad /= world_size
    norm = clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.01))
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), expected.grad)


def save(run: Path, what: str, *, fills: bool) -> None:
    """Step as users would, write to a parameter on one rank, and save."""
    model = seeded(Model, 0)
    ANNOTATIONS[what](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(batch(dist.get_rank())).square().mean().backward()
    optimizer.step()
    if fills and dist.get_rank() == 1:
        nn.init.zeros_(model.head.bias)
    for asynchronous in (False, True):
        save_checkpoint(run, 1, model, optimizer, asynchronous=asynchronous).wait()


# Whether a rank alone writes to a parameter, and the names that a save of it tells.
DRIFT: dict[tuple[str, bool], list[str]] = {(what, False): NAMES for what in FORGOTTEN}
DRIFT |= {(what, False): [] for what in KNOWN}
DRIFT |= {("beside", True): ["head.bias"], ("replicated around", True): ["head.bias"], ("ignored parameters", True): []}


@pytest.mark.parametrize(("what", "fills"), DRIFT)
def test_a_save_tells_plain_parameters_of_which_ranks_have_other_values(
    what: str, fills: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    run_threads(save, 3, tmp_path, what, fills=fills)
    said = [text for text in caplog.messages if "other values of plain parameters" in text]
    assert len(said) == bool(DRIFT[what, fills])
    assert all(f": {', '.join(map(repr, DRIFT[what, fills]))}\n  at:  rank 0" in text for text in said)


class Reads(TorchDispatchMode):
    """Counts the numbers that are read one by one, of which each is a wait for a device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **kwargs or {})


@on_ranks(2)
def test_the_norms_that_a_save_compares_are_read_from_each_device_at_once() -> None:
    model = seeded(Model, 0)
    blocks(model)
    model(batch(dist.get_rank())).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    plain = {name: param for name, param in model.named_parameters() if type(param) is nn.Parameter}
    with Reads() as reads:
        found = norms_of_plain(model, plain)
    assert list(found) == list(plain) and len(plain) > 1 and reads.count <= 1
    assert found == {name: pytest.approx(float(param.detach().double().norm())) for name, param in plain.items()}

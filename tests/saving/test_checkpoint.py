"""Checkpoints of whole runs: bit-exact at any number of ranks, checked before use, never half there."""

import gc
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from composable import fully_shard, replicate
from composable.comm import Ranks
from composable.dtensor.gather import fallback_counts
from composable.dtensor.tensor import RaggedDTensor
from composable.errors import ConfigError, DesyncError, UsageError, warn_once
from composable.runs.checkpoint import SavedCheckpoint, find_checkpoint, load_checkpoint, save_checkpoint
from composable.runs.contents import staged, state_to_save
from composable.saving.entries import names_on_all
from tests.ragged_pairs import from_full
from tests.world import on_ranks, run_ranks, run_threads, told


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale


class Net(nn.Module):
    """Tied, frozen, scalar, unused and empty parameters; buffers that are saved and that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.unused = nn.Parameter(torch.randn(3))
        self.frozen = nn.Parameter(torch.randn(2, 5), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.frozen.sum() + self.empty.sum()
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make(parallel: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Net()
    if parallel == "nested":
        replicate(model.blocks[0])
    if parallel in ("fully_shard", "nested"):
        fully_shard(model.blocks[1])
        fully_shard(model)
    elif parallel == "below replicate":
        fully_shard(model.blocks[1])
        replicate(model, find_unused_parameters=True)
    elif parallel == "replicate":
        replicate(model, find_unused_parameters=True)
    return model


def optimizers(model: nn.Module, kind: str) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.parameters() if param.ndim >= 2 and param.requires_grad]
    others = [param for param in model.parameters() if param.ndim < 2 or not param.requires_grad]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    if kind == "adamw":
        return [torch.optim.AdamW(groups, lr=0.1, foreach=True)]
    if kind == "sgd":
        return [torch.optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.5)]
    return [torch.optim.AdamW(matrices, lr=0.1, amsgrad=True), torch.optim.SGD(others, lr=0.2, momentum=0.9)]


def train(model: nn.Module, kind: list[torch.optim.Optimizer], steps: range) -> None:
    """Step with gradients that depend on the step alone, so that one process can follow to the bit."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for name, param in model.named_parameters():
            grad = torch.randn(param.shape, generator=generator)
            if param.requires_grad and name != "unused":
                param.grad = from_full(grad, param._spec) if isinstance(param, RaggedDTensor) else grad
        for optimizer in kind:
            optimizer.step()
        model.count += 1


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def snapshot(model: nn.Module, kind: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return everything that training goes on from, whole and by FQN."""
    values = {name: full(value).clone() for name, value in model.state_dict().items()}
    names = {param: name for name, param in model.named_parameters()}
    for index, optimizer in enumerate(kind):
        for group, settings in enumerate(optimizer.param_groups):
            # torch turns tuples in full state dicts into lists.
            rest = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items() if k != "params"}
            values[f"{index}.{group}"] = [names[param] for param in settings["params"]], rest
        for param, state in optimizer.state.items():
            for key, value in state.items():
                values[f"{index}.{names[param]}.{key}"] = full(value).clone()
    return values


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name
        else:
            assert found[name] == value, name


def expected_after(steps: int, kind: str) -> dict[str, Any]:
    """What one process without annotations has."""
    model = make("none")
    by_hand = optimizers(model, kind)
    train(model, by_hand, range(steps))
    return snapshot(model, by_hand)


# -- from one number of ranks to another


def save(run: Path, parallel: str, kind: str) -> None:
    model = make(parallel)
    trained = optimizers(model, kind)
    train(model, trained, range(2))
    trained[0].param_groups[0]["lr"] = 0.07
    fallback_counts(reset=True)
    handle = save_checkpoint(run, 2, model, trained, extra={"position": torch.arange(3), "at": (1, "x")})
    assert handle.is_done() and repr(handle).startswith("<SaveHandle: done; ")
    assert handle.wait() == run / "step-000002"
    assert fallback_counts(reset=True) == {}


def load(run: Path, parallel: str, kind: str) -> None:
    model = make(parallel, seed=1)
    fresh = optimizers(model, kind)
    params, storages = list(model.parameters()), [full_local(param).data_ptr() for param in model.parameters()]
    checkpoint = load_checkpoint(run, model, fresh if len(fresh) > 1 else fresh[0])
    assert checkpoint.step == 2 and checkpoint.path == run / "step-000002"
    assert torch.equal(checkpoint.extra["position"], torch.arange(3)) and checkpoint.extra["at"] == (1, "x")
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert storages == [full_local(param).data_ptr() for param in model.parameters()]
    assert fresh[0].param_groups[0]["lr"] == 0.07
    fresh[0].param_groups[0]["lr"] = 0.1
    assert_equal(snapshot(model, fresh), expected_after(2, kind))
    assert model.unused not in fresh[-1].state
    # A scalar parameter's moments are cut as it is; the step counter of the same shape is not.
    assert not any(isinstance(state.get("step"), DTensor) for each in fresh for state in each.state.values())
    train(model, fresh, range(2, 3))
    assert_equal(snapshot(model, fresh), expected_after(3, kind))
    # The model alone, as for inference.
    other = make(parallel, seed=2)
    load_checkpoint(run / "step-000002", other)
    assert_equal(snapshot(other, []), {k: v for k, v in expected_after(2, kind).items() if k in other.state_dict()})


def full_local(param: torch.Tensor) -> torch.Tensor:
    return param._local_tensor if isinstance(param, DTensor) else param


@pytest.mark.parametrize(
    ("saved_at", "saved_by", "loaded_at", "loaded_by", "kind"),
    [
        (4, "nested", 3, "fully_shard", "adamw"),
        (2, "fully_shard", 3, "nested", "sgd"),
        (1, "none", 4, "fully_shard", "both"),
        (3, "replicate", 1, "none", "both"),
        (2, "below replicate", 2, "replicate", "adamw"),
        (2, "replicate", 2, "below replicate", "sgd"),
    ],
)
def test_training_goes_on_to_the_bit(
    saved_at: int, saved_by: str, loaded_at: int, loaded_by: str, kind: str, tmp_path: Path
) -> None:
    run_threads(save, saved_at, tmp_path, saved_by, kind)
    run_threads(load, loaded_at, tmp_path, loaded_by, kind)


def test_a_plain_model_needs_no_process_group(tmp_path: Path) -> None:
    save(tmp_path, "none", "adamw")
    load(tmp_path, "none", "adamw")
    model = make("none")
    trained = optimizers(model, "adamw")
    train(model, trained, range(2))
    handle = save_checkpoint(tmp_path, 3, model, trained, asynchronous=True)
    expected = snapshot(model, trained)
    train(model, trained, range(2, 3))
    handle.wait()
    load_checkpoint(tmp_path, model, trained)
    assert_equal(snapshot(model, trained), expected)


@on_ranks(2)
def test_modules_that_were_unsharded_by_hand_are_saved_and_loaded(tmp_path: Path) -> None:
    model = make("nested")
    trained = optimizers(model, "adamw")
    train(model, trained, range(2))
    expected = snapshot(model, trained)
    # By hand, and nothing runs that would reshard.
    model.blocks[1].unshard()
    save_checkpoint(tmp_path, 2, model, trained)
    train(model, trained, range(2, 3))
    model.blocks[1].unshard()
    load_checkpoint(tmp_path, model, trained)
    assert_equal(snapshot(model, trained), expected)


class Held(nn.Module):
    """Blocks that have several names."""

    def __init__(self, *, is_compiled: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        one, two = nn.BatchNorm1d(4), nn.Linear(4, 4)
        if is_compiled:
            one, two = (torch.compile(block, backend="eager") for block in (one, two))  # type: ignore[assignment]
        self.first, self.second = nn.Sequential(one, two), nn.ModuleDict({"again": two, "last": one})
        self.third = two

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled", "plain"])
@on_ranks(2, annotation=["fully_shard", "replicate"])
def test_modules_are_loaded_under_each_of_their_names(tmp_path: Path, annotation: str, is_compiled: bool) -> None:
    annotate = {"fully_shard": fully_shard, "replicate": replicate}[annotation]
    model, other = (annotate(Held(is_compiled=is_compiled, seed=seed)) for seed in (1, 2))
    save_checkpoint(tmp_path, 1, model)
    load_checkpoint(tmp_path, other)
    values, loaded = ([full(value) for value in one.state_dict().values()] for one in (model, other))
    assert len(values) == len(loaded) > 7
    assert all(map(torch.equal, values, loaded))


@on_ranks(2)
def test_an_optimizer_that_has_not_stepped_is_not_made_to(tmp_path: Path) -> None:
    model = make("fully_shard")
    fresh = optimizers(model, "adamw")
    save_checkpoint(tmp_path, 0, model, fresh)
    assert not fresh[0].state
    loaded = make("fully_shard", seed=1)
    trained = optimizers(loaded, "adamw")
    train(loaded, trained, range(3))
    load_checkpoint(tmp_path, loaded, trained)
    assert not trained[0].state
    train(loaded, trained, range(1))
    assert_equal(snapshot(loaded, trained), expected_after(1, "adamw"))


# -- to and from torch alone


def read_with_torch(run: Path, kind: str) -> None:
    expected = expected_after(2, kind)
    folder = run / "step-000002"
    model = make("none", seed=1)
    state: dict[str, Any] = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    assert_equal(snapshot(model, []), {name: expected[name] for name in model.state_dict()})
    dcp_to_torch_save(folder, run / "plain.pt")
    saved = torch.load(run / "plain.pt", weights_only=True)
    assert_equal(saved["model"], {name: expected[name] for name in model.state_dict()})
    for name, entry in saved["optimizer"]["state"].items():
        assert_equal(entry, {key: expected[f"0.{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")})
    groups = saved["optimizer"]["param_groups"]
    assert [group["params"] for group in groups] == [expected[f"0.{index}"][0] for index in range(2)]
    assert [group["lr"] for group in groups] == [0.07, 0.1] and len(saved["optimizer"]["state"]) > 8


def test_torch_alone_reads_what_was_saved(tmp_path: Path) -> None:
    run_threads(save, 3, tmp_path, "nested", "adamw")
    run_threads(read_with_torch, 1, tmp_path, "adamw")


# -- in the background


@contextmanager
def slow_disk(step: int) -> Iterator[threading.Event]:
    """Hold every write of a checkpoint back until the event is set."""
    may_write = threading.Event()
    create_stream = FileSystem.create_stream

    def held_back(self: FileSystem, path: Any, mode: str) -> Any:
        assert f"{step:06d}" not in str(path) or may_write.wait()
        return create_stream(self, path, mode)

    with mock.patch.object(FileSystem, "create_stream", held_back):
        try:
            yield may_write
        finally:
            may_write.set()


@pytest.mark.parametrize(("world_size", "parallel"), [(3, "nested"), (2, "replicate")])
@on_ranks(run=run_ranks)
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, parallel: str) -> None:
    model = make(parallel)
    trained = optimizers(model, "adamw")
    tokens = torch.arange(6).view(2, 3)
    expected = []
    for step in range(1, 4):
        train(model, trained, range(step))
        expected.append(snapshot(model, trained))
        with slow_disk(step) as may_write:
            handle = save_checkpoint(tmp_path, step, model, trained, keep=5, asynchronous=True)
            assert not handle.is_done() and repr(handle).startswith("<SaveHandle: under way; ")
            # The main thread communicates while the write waits.
            model(tokens).sum().backward()
            for optimizer in trained:
                optimizer.step()
                optimizer.zero_grad()
            may_write.set()
            if step == 1:
                assert handle.wait() == tmp_path / "step-000001"
    handle.wait()
    groups = set(dist.distributed_c10d._world.pg_map)
    save_checkpoint(tmp_path, 4, model, trained, keep=5, asynchronous=True)
    assert set(dist.distributed_c10d._world.pg_map) == groups  # one group serves them all
    # Loading waits for the save that is under way.
    latest = snapshot(model, trained)
    for step, state in [(None, latest), (1, expected[0]), (2, expected[1]), (3, expected[2])]:
        load_checkpoint(tmp_path if step is None else tmp_path / f"step-{step:06d}", model, trained)
        assert_equal(snapshot(model, trained), state)


def pieces(model: nn.Module, kind: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    every = names_on_all(Ranks.of_world(), model, kind, None)
    leaves = tree_leaves(state_to_save(model, kind, every))
    return [getattr(leaf, "_local_tensor", leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]


@on_ranks(2)
def test_a_save_in_the_background_takes_the_memory_of_the_one_before(tmp_path: Path) -> None:
    model = make("fully_shard")
    kind = optimizers(model, "adam")
    train(model, kind, range(1))
    before = staged(pieces(model, kind))
    places = sorted(one.data_ptr() for one in before)
    train(model, kind, range(1, 2))
    after = staged(pieces(model, kind), before)
    assert sorted(one.data_ptr() for one in after) == places
    assert all(torch.equal(copy, own) for copy, own in zip(after, pieces(model, kind), strict=True))
    # Of other shapes, new memory.
    assert staged([torch.ones(3, 7)], after)[0].data_ptr() not in places
    for step in (1, 2):
        save_checkpoint(tmp_path, step, model, kind, asynchronous=True).wait()
        train(model, kind, range(step + 1, step + 2))
    # The copy that is kept does not keep the model.
    gone = weakref.ref(model)
    del model, kind
    gc.collect()
    assert gone() is None


@on_ranks(2, run=run_ranks)
def test_a_failed_write_that_one_rank_waited_for_is_an_error_on_every_rank(tmp_path: Path) -> None:
    model = make("fully_shard")
    save_checkpoint(tmp_path, 1, model)

    def full_disk(self: FileSystem, path: Any, mode: str) -> Any:
        raise OSError(28, "No space left on device", str(path))

    for following in (lambda: save_checkpoint(tmp_path, 3, model), lambda: load_checkpoint(tmp_path, model)):
        with mock.patch.object(FileSystem, "create_stream", full_disk):
            handle = save_checkpoint(tmp_path, 2, model, asynchronous=True)
            while not handle.is_done():
                threading.Event().wait(0.01)
        if dist.get_rank() == 0:
            with pytest.raises(UsageError, match="No space left"):
                handle.wait()
        for said in told(following):
            assert "No space left on device" in said, said
    save_checkpoint(tmp_path, 3, model)
    assert find_checkpoint(tmp_path).step == 3


# -- damage


def attempt(path: Path, model: nn.Module, kind: list[torch.optim.Optimizer]) -> list[str]:
    """Load, and return what every rank says; nothing may have changed."""
    before = snapshot(model, kind)
    said = told(lambda: load_checkpoint(path, model, kind))
    assert_equal(snapshot(model, kind), before)
    return said


def on_first(call: Any) -> None:
    if dist.get_rank() == 0:
        call()
    dist.barrier()


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def damage_everything(run: Path) -> None:
    model = make("fully_shard")
    trained = optimizers(model, "adamw")
    for step in range(1, 4):
        train(model, trained, range(step))
        save_checkpoint(run, step, model, trained, extra={"a": 1}, keep=3)
    train(model, trained, range(1))
    folder = run / "step-000003"
    files = sorted(path.name for path in folder.iterdir())
    assert files == [
        ".metadata",
        *(f"__{rank}_0.distcp" for rank in range(2)),
        "checkpoint.json",
        "extra.pt",
        "pieces.json",
    ]
    for name in files:
        path, content = folder / name, (folder / name).read_bytes()
        # Not in the name of an optimizer, which would be another one then.
        inside = content.index(b"crc32") if name == "checkpoint.json" else len(content) // 2
        for harm in (
            lambda path=path: flip(path, 0),
            lambda path=path, inside=inside: flip(path, inside),
            lambda path=path: flip(path, path.stat().st_size - 1),
            lambda path=path, content=content: path.write_bytes(content[:-1]),
            lambda path=path: path.write_bytes(b""),
            lambda path=path, content=content: path.write_bytes(content + b"x"),
            lambda path=path: path.unlink(),
        ):
            on_first(harm)
            for said in attempt(run, model, trained):
                assert said.startswith("ConfigError: ") and str(path) in said, said
                assert not any(str(folder / other) in said for other in files if other != name), said
            on_first(lambda path=path, content=content: path.write_bytes(content))
    # Two at once are named in one message.
    on_first(lambda: ((folder / "__0_0.distcp").unlink(), flip(folder / "extra.pt", 9)))
    for said in attempt(run, model, trained):
        assert "__0_0.distcp cannot be read: No such file" in said and "extra.pt has changed" in said
    # As a user's half copy, and as a kill leaves it.
    on_first(lambda: ((folder / "checkpoint.json").unlink(), folder.rename(run / ".partial-000003")))
    on_first(lambda: [shutil.rmtree(older) for older in run.glob("step-*")])
    assert all(f"no checkpoint in {run}" in said for said in attempt(run, model, trained))
    assert all("checkpoint.json cannot be read" in said for said in attempt(folder, model, trained))
    save_checkpoint(run, 3, model, trained)
    assert attempt(run, model, trained) == ["no error"] * dist.get_world_size()


def test_every_kind_of_damage_is_one_error_on_every_rank_that_names_the_file(tmp_path: Path) -> None:
    run_threads(damage_everything, 2, tmp_path)


@on_ranks(2, run=run_ranks)
def test_a_disk_that_fails_late_is_an_error_on_every_rank(tmp_path: Path) -> None:
    model = make("fully_shard")
    save_checkpoint(tmp_path, 1, model)
    real = torch.load

    def vanishing(*args: Any, **kwargs: Any) -> Any:
        raise OSError(5, "Input/output error")

    with mock.patch.object(torch, "load", vanishing if dist.get_rank() == 1 else real):
        said = attempt(tmp_path, model, [])
    assert all("step-000001 was not loaded to its end" in each and "Input/output error" in each for each in said), said


# -- differences


def shapes_differ(run: Path) -> list[str]:
    model = make("fully_shard")
    save_checkpoint(run, 1, model, optimizers(model, "adamw"))
    torch.manual_seed(1)
    other = Net()
    other.blocks[0].up = nn.Linear(5, 9)
    other.blocks[1].extra = nn.Parameter(torch.zeros(2))
    del other.unused
    fully_shard(other)
    return attempt(run, other, optimizers(other, "sgd"))


def test_all_differences_are_in_one_message(tmp_path: Path) -> None:
    for said in run_threads(shapes_differ, 2, tmp_path)[0]:
        assert said.splitlines()[:4] == [
            "StateDictError: the checkpoint does not fit the model, and nothing was loaded",
            '    Missing key(s) in state_dict: "blocks.1.extra"',
            '    Unexpected key(s) in state_dict: "unused"',
            "    Not alike: blocks.0.up.weight has shape [7, 5], not [9, 5], blocks.0.up.bias has shape [7], not [9], "
            "the checkpoint holds AdamW with 2 param groups; here: SGD with 2 param groups",
        ]


def groups_differ(run: Path) -> list[str]:
    model = make("fully_shard")
    saved = optimizers(model, "adamw")
    # What a scheduler writes into a group is no difference.
    torch.optim.lr_scheduler.StepLR(saved[0], 10)
    save_checkpoint(run, 1, model, saved)
    load_checkpoint(run, model, optimizers(model, "adamw"))
    swapped = torch.optim.AdamW(list(reversed(saved[0].param_groups)), lr=0.1)
    said = [attempt(run, model, candidates) for candidates in ([swapped], optimizers(model, "both"))]
    save_checkpoint(run, 2, model)
    return [each[-1] for each in [*said, attempt(run, model, saved)]]


def test_differing_groups_and_optimizers_are_listed(tmp_path: Path) -> None:
    swapped, two, none = run_threads(groups_differ, 2, tmp_path)[0]
    assert "group 0 of AdamW: only in the checkpoint: empty, tokens.weight" in swapped
    assert "group 1 of AdamW: only here: empty, tokens.weight" in swapped
    assert "the checkpoint holds AdamW with 2 param groups; here: AdamW with 1 param groups, SGD with" in two
    assert "the checkpoint holds no optimizer; here: AdamW with 2" in none


# -- arguments


def misuse(run: Path) -> None:
    model = make("fully_shard")
    trained = optimizers(model, "adamw")
    rank = dist.get_rank()
    for differing in (
        {"step": 1 + rank},
        {"keep": 1 + rank},
        {"asynchronous": bool(rank)},
        {"folder": run / str(rank)},
    ):
        arguments = {"folder": run, "step": 1, "model": model, "optimizer": trained, **differing}
        with pytest.raises(
            DesyncError,
            match=rf"different arguments\n    rank 0: {next(iter(differing))}=.*\n    rank 1: {next(iter(differing))}=",
        ):
            save_checkpoint(**arguments)  # type: ignore[arg-type]
    for swapped in ((model, run, 1), (run, model, 1), (model, trained, 1, run), (run, 1, trained, model)):
        with pytest.raises(ConfigError, match=r"fix: save_checkpoint\(folder, step, model, optimizer\)"):
            save_checkpoint(*swapped)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="an optimizer has parameters that are not the model's"):
        save_checkpoint(run, 1, model, torch.optim.SGD([nn.Parameter(torch.ones(1))]))
    with pytest.raises(ConfigError, match="in two param groups or optimizers"):
        save_checkpoint(run, 1, model, trained + optimizers(model, "sgd"))
    trained[0].param_groups[0]["note"] = print
    with pytest.raises(ConfigError, match=r"optimizer\.param_groups\.0\.note is more than data"):
        save_checkpoint(run, 1, model, trained)
    with torch.device("meta"):
        empty = Net()
    for call in (lambda: save_checkpoint(run, 1, empty), lambda: load_checkpoint(run, empty)):
        with pytest.raises((UsageError, ConfigError), match=r"on the meta device: unused|no checkpoint in"):
            call()
    assert not run.exists()
    # Where only one rank fails, all do.
    with pytest.raises(ConfigError, match="extra is more than data"):
        save_checkpoint(run, 1, model, extra=print if rank == 1 else None)


def test_wrong_arguments_are_errors_on_every_rank(tmp_path: Path) -> None:
    run_threads(misuse, 2, tmp_path / "run")


# -- a kill at any moment


class Killed(BaseException):
    """Ends a save on the spot."""


_REMOVALS, _CHANGES = {"os.remove", "os.rmdir"}, {"open", "os.rename", "os.mkdir"}


class Killer:
    """Counts what a save does to the files of a folder, and ends it at one of these moments."""

    def __init__(self) -> None:
        self.folder = ""
        self.left: int | None = None
        self.seen = 0
        sys.addaudithook(self._look)

    def _look(self, event: str, args: tuple[Any, ...]) -> None:
        # Within `rmtree` names are relative to an open folder.
        is_of_ours = event in _REMOVALS or (event in _CHANGES and str(args[0]).startswith(self.folder))
        if self.folder and is_of_ours:
            self.seen += 1
            if self.seen == self.left:
                raise Killed

    @contextmanager
    def after(self, moments: int | None, folder: Path) -> Iterator[None]:
        self.folder, self.left, self.seen = str(folder), moments, 0
        try:
            yield
        finally:
            self.folder = ""


@pytest.mark.parametrize(("step", "keep"), [(3, 1), (2, 2)], ids=["next", "same, keep 2"])
def test_a_kill_at_any_file_operation_leaves_a_whole_checkpoint(step: int, keep: int, tmp_path: Path) -> None:
    """A save of step 2 is followed by one of ``step``; whatever is under a final name then can be loaded."""
    model, killer = nn.Linear(2, 2), Killer()

    def save_value(run: Path, at: int, value: float) -> None:
        nn.init.constant_(model.weight, value)
        save_checkpoint(run, at, model, keep=keep)

    before, moments = tmp_path / "before", 0
    save_value(before, 1, 1.0)
    save_value(before, 2, 2.0)
    while True:
        moments += 1
        run = tmp_path / f"run{moments}"
        shutil.copytree(before, run)
        try:
            with killer.after(moments, run):
                save_value(run, step, 3.0)
            break
        except Killed:
            pass
        loaded: SavedCheckpoint = load_checkpoint(run, model)
        assert float(model.weight.detach().mean()) in (2.0, 3.0) and loaded.step in (2, step), moments
        for whole in run.glob("step-*"):
            load_checkpoint(whole, model)
        # And the run goes on.
        save_value(run, step + 1, 4.0)
        assert load_checkpoint(run, model).step == step + 1
        expected = [step + 1] if keep == 1 else [loaded.step if loaded.step == step else 2, step + 1]
        assert sorted(int(path.name[5:]) for path in run.glob("step-*")) == expected
        assert not list(run.glob(".*"))
    assert moments > 10
    assert load_checkpoint(run, model).step == step and float(model.weight.detach().mean()) == 3.0


# What ranks give as extra, and the entries that a warning names.
EXTRAS: dict[str, tuple[Callable[[int], Any], str | None]] = {
    "random states": (lambda rank: {"rng": torch.tensor([1, rank]), "step": 3}, " of 'rng', and"),
    "two, one below others": (lambda rank: {"b": [1, ({"c": rank},)], "a": float(rank)}, " of 'a', 'b', and"),
    "no dict": (lambda rank: torch.ones(2) * rank, "other values, and"),
    "on rank 0 alone": (lambda rank: {"a": 1} if rank == 0 else None, None),
    "without an entry": (lambda rank: {"a": 1, "b": None if rank else torch.ones(1)}, None),
    "equal": (lambda _: {"a": torch.ones(2), "b": {"c": (1.5, "x")}}, None),
}


def save_extra(run: Path, kind: str) -> None:
    rank, (extra_of, _) = dist.get_rank(), EXTRAS[kind]
    model = fully_shard(nn.Linear(2, 2))
    for asynchronous in (False, True):
        save_checkpoint(run, 1, model, extra=extra_of(rank), asynchronous=asynchronous).wait()
    # As the warning says.
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, rank)
    save_checkpoint(run, 2, model, extra={"rank": every})
    assert load_checkpoint(run, model).extra["rank"][rank] == rank


@pytest.mark.parametrize("kind", EXTRAS)
def test_entries_of_extra_that_differ_between_ranks_are_named(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    run_threads(save_extra, 3, tmp_path, kind)
    said = [record.getMessage() for record in caplog.records if "extra" in record.getMessage()]
    expected = EXTRAS[kind][1]
    assert len(said) == (expected is not None) and all(str(expected) in one for one in said), said

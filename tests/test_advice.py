"""Errors whose fix is tried: each test makes a mistake, reads the fix, does what it says, and finds that it works.

What is right comes from plain modules and tensors in one process, to which the same is done.
"""

import copy
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters
from torch.utils._python_dispatch import TorchDispatchMode

from composable import (
    ComposableError,
    HandleOptions,
    full_state_dict,
    fully_shard,
    joinable,
    load_checkpoint,
    load_full_state_dict,
    load_safetensors,
    register_comm_hook,
    replicate,
    save_checkpoint,
    save_safetensors,
    unannotate,
    unshard_params,
)
from composable.comm.hang_watchdog import diverged
from tests.low_precision import whole
from tests.parity import full, full_params
from tests.programs import Loss, Twins, train
from tests.world import on_ranks, run_threads

ROWS, DIM = 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = x + self.linear(x).relu()
        return output


def make_model(rows: int = ROWS) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(rows, DIM), Block(), Block(), nn.Linear(DIM, 2))


def sharded() -> nn.Sequential:
    return fully_shard(make_model(), policy={Block})


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def fix_of(mistake: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(ComposableError) as caught:
        mistake(*args, **kwargs)
    return str(caught.value.fix)


def assert_equal(model: nn.Module, plain: nn.Module) -> None:
    for (name, found), expected in zip(full_params(model).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected.detach(), msg=name)


# -- writes by operations that take other tensors

Write = Callable[[Any, random.Random], object]


def some_rows(tensor: torch.Tensor, drawn: random.Random) -> list[int]:
    return drawn.sample(range(len(tensor)), drawn.randint(1, len(tensor)))


def values(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return torch.arange(1.0, rows * tensor.shape[1] + 1).view(rows, -1)


def by_rows(write: Callable[[Any, torch.Tensor, torch.Tensor], object]) -> Write:
    def run(tensor: torch.Tensor, drawn: random.Random) -> object:
        rows = torch.tensor(some_rows(tensor, drawn))
        return write(tensor, rows, values(tensor, len(rows)))

    return run


WRITES: dict[str, Write] = {
    "[[rows]] = number": lambda t, drawn: t.__setitem__(some_rows(t, drawn), 3.0),
    "[:, [rows]] = number": lambda t, drawn: t.__setitem__((slice(None), [0, -1]), 3.0),
    "[mask] = number": lambda t, drawn: t.__setitem__(values(t, len(t)) % 3 == 0, 3.0),
    "[rows] = values": by_rows(lambda t, rows, value: t.__setitem__(rows, value)),
    "[rows] += values": by_rows(lambda t, rows, value: t.index_put_((rows,), value, accumulate=True)),
    "index_copy_": by_rows(lambda t, rows, value: t.index_copy_(0, rows, value)),
    "index_add_": by_rows(lambda t, rows, value: t.index_add_(0, rows, value)),
    "index_fill_": by_rows(lambda t, rows, value: t.index_fill_(0, rows, 2.0)),
    "index_reduce_": by_rows(lambda t, rows, value: t.index_reduce_(0, rows, value, "amax")),
    "scatter_": by_rows(lambda t, rows, value: t.scatter_(0, rows[:1, None].expand(1, t.shape[1]), value[:1])),
    "put_": by_rows(lambda t, rows, value: t.put_(rows, value[:, 0].clone())),
    "masked_scatter_": lambda t, drawn: t.masked_scatter_(values(t, len(t)) % 2 == 0, values(t, len(t))),
    "embedding_renorm_": by_rows(lambda t, rows, value: torch.embedding_renorm_(t, rows, 0.1, 2.0)),
    "addmm_": by_rows(lambda t, rows, value: t.addmm_(values(t, len(t)), torch.ones(t.shape[1], t.shape[1]))),
    "out=": by_rows(lambda t, rows, value: torch.mm(values(t, len(t)), torch.eye(t.shape[1]), out=t)),
}


class _SeesFills(TorchDispatchMode):
    """Notes whether an assignment by a mask fills: that needs no other rank, and torch does so from 2.15 on."""

    fills = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fills |= func is torch.ops.aten.masked_fill_.Scalar
        return func(*args, **(kwargs or {}))


with _SeesFills() as seen:
    torch.zeros(2)[torch.tensor([True, False])] = 3.0
if seen.fills:
    del WRITES["[mask] = number"]


@on_ranks(world_size=[1, 2, 3])
def test_a_write_that_is_refused_changes_nothing_and_works_as_the_fix_says() -> None:
    warnings.filterwarnings("ignore", "index_reduce")
    for name, write in WRITES.items():
        drawn = random.Random(f"{name} {dist.get_world_size()}")
        plain = nn.Linear(drawn.randint(2, 5), drawn.randint(2, 7))
        nn.init.uniform_(plain.weight)
        model = fully_shard(copy.deepcopy(plain))
        param, expected, key = model.weight, plain.weight.detach(), drawn.random()
        before = expected.clone()
        with torch.no_grad():
            for tensor in (param, param.data, param.detach().clone()):
                said = fix_of(write, tensor, random.Random(key))
                assert torch.equal(full(tensor), before), name
                assert "full = tensor.full_tensor()" in said and "tensor.copy_(full)" in said
                whole = tensor.full_tensor()
                write(whole, random.Random(key))
                tensor.copy_(whole)
                write(expected, random.Random(key))
                assert torch.equal(full(tensor), expected), name
                param.copy_(before)
                expected.copy_(before)
            assert "with unshard_params(module), torch.no_grad()" in said
            with unshard_params(model):
                write(model.weight, random.Random(key))
            write(expected, random.Random(key))
            assert torch.equal(full(param), expected), name


@on_ranks(world_size=[1, 2, 3])
def test_a_slice_is_initialised_as_in_one_process() -> None:
    drawn = random.Random(dist.get_world_size())
    for _ in range(6):
        rows, columns = drawn.randint(2, 6), drawn.randint(2, 6)
        start, stop = sorted(drawn.sample(range(rows + 1), 2))
        cut = (
            (slice(start, stop),)
            if drawn.random() < 0.5
            else (slice(start, stop), slice(drawn.randrange(columns - 1), None))
        )
        init = drawn.choice([nn.init.orthogonal_, nn.init.orthogonal_, nn.init.normal_, nn.init.xavier_uniform_])
        plain = nn.Linear(columns, rows)
        dist.broadcast(plain.weight.data, 0)
        model = fully_shard(copy.deepcopy(plain))
        for one in (model, plain):
            torch.manual_seed(7)
            with torch.no_grad():
                init(one.weight[cut])
        assert torch.equal(full(model.weight), plain.weight), (init, cut)


# -- another shape


def grow(model: nn.Module) -> None:
    """Give the embedding two more rows, as ``resize_token_embeddings`` does."""
    old = model[0].weight  # type: ignore[index]
    model[0].weight = nn.Parameter(torch.cat([full(old), torch.ones(2, DIM)]))  # type: ignore[index]


def set_data(model: nn.Module) -> None:
    old = model[0].weight  # type: ignore[index]
    old.data = torch.cat([full(old), torch.ones(2, DIM)])


@torch.no_grad()
def transpose(model: nn.Module) -> None:
    model[0].weight.t_()  # type: ignore[index,operator,union-attr]


@on_ranks(2, change=[grow, set_data])
def test_a_parameter_of_another_shape_comes_before_the_annotation(change: Callable[[nn.Module], None]) -> None:
    plain, model = make_model(), sharded()

    def mistake() -> None:
        change(model)
        model(torch.arange(3))

    weight = model[0].weight
    assert "unannotate" in fix_of(mistake)
    model[0].weight = weight
    unannotate(model)
    for one in (plain, model):
        change(one)
    fully_shard(model, policy={Block})
    for one in (plain, model):
        step(one, torch.optim.SGD(one.parameters(), lr=0.1))
    assert_equal(model, plain)


@on_ranks(2)
def test_values_placed_as_torch_shards_are_loaded_without_assign() -> None:
    model, other = sharded(), make_model()
    with torch.no_grad():
        other[0].weight.normal_()
    mesh = model[0].weight.device_mesh
    placed = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in other.state_dict().items()}
    with pytest.raises(ComposableError) as caught:
        model.load_state_dict(placed, assign=True)
    assert "leave assign=True out of load_state_dict" in str(caught.value.fix)
    model = sharded()
    model.load_state_dict(placed)
    torch.testing.assert_close(full_params(model), dict(other.named_parameters()))


@on_ranks(2)
def test_a_parametrization_of_an_annotated_module_is_removed_after_unannotate() -> None:
    model = make_model()
    expected = full_params(model)
    parametrize.register_parametrization(model[3], "weight", nn.Identity())
    fully_shard(model[3])
    fully_shard(model)
    with pytest.raises(ComposableError) as caught:
        parametrize.remove_parametrizations(model[3], "weight")
    assert "'weight'" in caught.value.what and "unannotate(model) first" in str(caught.value.fix)
    unannotate(model)
    parametrize.remove_parametrizations(model[3], "weight")
    fully_shard(model)
    torch.testing.assert_close(full_params(model), expected)


@on_ranks(2)
def test_numbers_of_sharded_values_are_read_from_the_whole() -> None:
    model, plain = sharded(), make_model()
    weight, own = model[3].weight, plain[3].weight
    reads: list[Callable[[Any], Any]] = [
        lambda t: t,
        lambda t: t.detach(),
        lambda t: t[0],
        lambda t: t.square().sum(0),
        lambda t: t.detach().sum(),
    ]
    for read in reads:
        for convert in ("tolist", "numpy"):
            with pytest.raises(ComposableError) as caught:
                getattr(read(weight), convert)()
            assert "full_tensor().tolist()" in str(caught.value.fix) and "class" not in str(caught.value)
        assert read(weight).full_tensor().tolist() == read(own).tolist()
    with pytest.raises(ComposableError, match="cannot become a whole tensor of shape") as caught:
        vector_to_parameters(parameters_to_vector(model.parameters()) * 2, model.parameters())
    assert "tensor.copy_(value)" in str(caught.value.fix)
    vector, start = parameters_to_vector(model.parameters()) * 2, 0
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(vector[start : start + param.numel()].view(param.shape))
            start += param.numel()
    doubled = {name: param * 2 for name, param in plain.named_parameters()}
    torch.testing.assert_close(full_params(model), doubled)


@on_ranks(2)
def test_an_operation_that_changes_the_shape_names_unannotate() -> None:
    model = sharded()
    assert "for another shape: unannotate(model) first" in fix_of(transpose, model)
    transpose(unannotate(model))
    assert model[0].weight.shape == (DIM, ROWS)


# -- loads


@on_ranks(2)
def test_a_checkpoint_of_another_optimizer_loads_the_model_alone_or_into_the_same(tmp_path: Path) -> None:
    drawn = random.Random(3)
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        torch.optim.AdamW,
        lambda params: torch.optim.SGD(params, momentum=0.9),
        lambda params: torch.optim.AdamW([{"params": [one]} for one in params]),
    ]
    for number in range(3):
        saved, other = drawn.sample(kinds, 2)
        folder, model = tmp_path / f"run{number}", sharded()
        optimizer = saved(model.parameters())
        step(model, optimizer)
        save_checkpoint(folder, 1, model, optimizer)
        fresh = sharded()
        said = fix_of(load_checkpoint, folder, fresh, other(fresh.parameters()))
        assert "strict" not in said.partition("for another model")[0] and "load_checkpoint(path, model)" in said
        load_checkpoint(folder, fresh)
        assert_equal(fresh, unannotate(model))
        load_checkpoint(folder, fresh, saved(fresh.parameters()))


@on_ranks(2)
def test_a_checkpoint_of_a_smaller_model_goes_through_the_model_that_was_saved(tmp_path: Path) -> None:
    folder, saved = tmp_path / "run", sharded()
    save_checkpoint(folder, 1, saved)
    other = fully_shard(nn.Sequential(*make_model(), nn.Linear(2, 2)))
    nn.init.zeros_(other[0].weight)
    said = fix_of(load_checkpoint, folder, other)
    assert "load_full_state_dict(other, full_state_dict(saved), strict=False)" in said
    load_checkpoint(folder, saved)
    load_full_state_dict(other, full_state_dict(saved), strict=False)
    assert torch.equal(full(other[0].weight), make_model()[0].weight)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.module(x)
        return output


@on_ranks(2)
def test_names_of_a_wrapper_are_removed_or_added(tmp_path: Path) -> None:
    folder, trained = tmp_path / "run", sharded()
    optimizer = torch.optim.AdamW(trained.parameters())
    step(trained, optimizer)
    save_checkpoint(folder / "wrapped", 1, Wrapper(trained), optimizer)
    save_checkpoint(folder / "plain", 1, trained, optimizer)
    wrapped = {f"module.{key}": value for key, value in whole(trained).items()}
    trained = unannotate(trained)

    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters())
    said = fix_of(load_checkpoint, folder / "wrapped", model, optimizer)
    assert said == "load_checkpoint(path, nn.ModuleDict({'module': model}), optimizer)"
    load_checkpoint(folder / "wrapped", nn.ModuleDict({"module": model}), optimizer)
    assert_equal(model, trained)

    outer = Wrapper(sharded())
    said = fix_of(load_checkpoint, folder / "plain", outer)
    assert said == "load into the part of the model that was saved: model.get_submodule('module')"
    load_checkpoint(folder / "plain", outer.get_submodule("module"))
    assert_equal(outer, trained)

    for load in (nn.Module.load_state_dict, load_full_state_dict):
        model = sharded()
        said = fix_of(load, model, wrapped)
        assert "strict" not in said and said.startswith("remove 'module.': ")
        load(model, eval(said.partition(": ")[2], {"state_dict": wrapped}))
        assert_equal(model, trained)


@on_ranks(2)
def test_a_file_is_loaded_by_the_call_that_the_error_names(tmp_path: Path) -> None:
    folder, trained = tmp_path, sharded()
    with torch.no_grad():
        trained[0].weight.fill_(3)
    save_safetensors(trained, folder / "safe")
    if dist.get_rank() == 0:
        torch.save(unannotate_copy(trained).state_dict(), folder / "w.pt")
    else:
        unannotate_copy(trained)
    dist.barrier()
    for path in (folder / "w.pt", folder / "safe" / "model.safetensors"):
        model = sharded()
        said = fix_of(load_checkpoint, path, model)
        assert (
            said == "pass a file to load_full_state_dict(model, torch.load(path)), or to load_safetensors(model, path)"
        )
        if path.suffix == ".pt":
            load_full_state_dict(model, torch.load(path))
        else:
            load_safetensors(model, path)
        assert torch.equal(full(model[0].weight), torch.full((ROWS, DIM), 3.0))


@on_ranks(2, annotate=[fully_shard, replicate])
def test_torch_loads_what_only_the_first_rank_has(annotate: Callable[[nn.Module], nn.Module]) -> None:
    """For torch, the empty dicts of the other ranks mean a load without a model: the first rank would wait."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    trained = annotate(make_model())
    optimizer = torch.optim.AdamW(trained.parameters())
    step(trained, optimizer)
    of_model, of_optimizer = get_state_dict(trained, optimizer, options=StateDictOptions(full_state_dict=True))
    is_first = dist.get_rank() == 0
    for has_model in (True, False):
        model = annotate(make_model())
        fresh = torch.optim.AdamW(model.parameters())
        set_state_dict(
            model,
            fresh,
            model_state_dict=dict(of_model) if is_first and has_model else {},
            optim_state_dict=of_optimizer if is_first else {},
            options=options,
        )
        assert_equal(model, unannotate_copy(trained) if has_model else make_model())
        for old, new in zip(optimizer.state.values(), fresh.state.values(), strict=True):
            assert all(torch.equal(full(value), full(new[key])) for key, value in old.items())


def unannotate_copy(model: nn.Module) -> nn.Module:
    return unannotate(copy.deepcopy(model))


# -- policies


@on_ranks(2)
def test_a_policy_of_names_modules_or_one_class_is_told_what_to_write() -> None:
    model = make_model()
    for policy in ({"Block"}, Block, [Block], "Block", {model[1]}):
        said = fix_of(fully_shard, model, policy=policy)
        assert "such as {Block}" in said
    assert "lambda module: module is model.head" in said
    fully_shard(model, policy=lambda module: module is model[1])
    assert len(fully_shard.state(model).plan.handles) == 2


# -- classes that are trained packed


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_a_class_that_is_trained_packed_is_frozen_or_trained_plain() -> None:
    pytest.importorskip("torchao.prototype.quantized_training")
    run_threads(pack, 2)


def pack() -> None:
    from torchao.prototype.quantized_training import Int8QuantizedTrainingLinearWeight

    def packed() -> nn.Sequential:
        model = make_model()
        weight = Int8QuantizedTrainingLinearWeight.from_float(model[3].weight.detach())
        model[3].weight = nn.Parameter(weight)
        return model

    warnings.simplefilter("ignore")
    said = fix_of(fully_shard, packed())
    assert said.startswith("packed rows are not trained sharded: train a plain nn.Parameter in its place; or freeze it")
    plain, frozen = packed(), packed()
    plain[3].weight = nn.Parameter(plain[3].weight.detach().dequantize())
    frozen[3].weight.requires_grad_(False)
    for model in (plain, frozen):
        expected = copy.deepcopy(model)
        fully_shard(model)
        for one in (model, expected):
            step(one, torch.optim.SGD([param for param in one.parameters() if param.requires_grad], lr=0.1))
        for (name, param), right in zip(model.named_parameters(), expected.parameters(), strict=True):
            if param.requires_grad:
                torch.testing.assert_close(full(param), right.detach(), msg=name)


# -- groups of other libraries


class ForeignGroup:
    """What other libraries have: ranks, a size and an all-reduce of their own, unknown to torch."""

    def rank(self) -> int:
        return dist.get_rank()

    def size(self) -> int:
        return dist.get_world_size()

    def allreduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)


def average_in(group: ForeignGroup, grad: torch.Tensor) -> None:
    group.allreduce(grad.div_(group.size()))


@on_ranks(world_size=[1, 2, 3])
def test_a_group_of_another_library_averages_in_a_hook() -> None:
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    group = ForeignGroup()

    def annotate(model: nn.Module) -> None:
        said = fix_of(replicate, model, process_group=group)
        assert "register_comm_hook(model, group, hook)" in said
        replicate(model, process_group=alone)
        register_comm_hook(model, group, average_in)

    train(Twins(make_model, annotate, loss=lambda model, step, rank: model(torch.tensor([rank])).square().sum()), 1)


# -- ranks that go different ways


class Mixture(nn.Module):
    """Each rank runs other experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(DIM, DIM)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor, own: list[int]) -> torch.Tensor:
        x = self.inp(x)
        for number in own:
            x = x + self.experts[number](x)
        return x


OWN = [[0, 2], [3, 1]]


def test_ranks_that_went_different_ways_are_told_of_batches_and_experts() -> None:
    """The error of real ranks is compared with docs/troubleshooting.md, whole."""
    fix = str(diverged(()).fix)
    assert "docs/uneven_inputs.md" in fix and "HandleOptions(follows_parent=True)" in fix


@on_ranks(2)
def test_experts_that_some_ranks_skip_train_as_the_error_says() -> None:
    def annotate(model: Mixture) -> None:
        for expert in model.experts:
            fully_shard(expert, options=HandleOptions(follows_parent=True))
        fully_shard(model)

    loss: Loss = lambda model, step, rank: model(torch.ones(2, DIM), OWN[rank]).sum()  # noqa: E731
    train(Twins(Mixture, annotate, loss=loss), 1, tolerance=1e-5)


@on_ranks(2)
def test_ranks_with_fewer_batches_train_as_the_page_says() -> None:
    assert (Path(__file__).parent.parent / "docs" / "uneven_inputs.md").exists()
    twins = Twins(make_model, lambda model: fully_shard(model, policy={Block}))
    (model, plain), (optimizer, _) = twins, twins.optimizers

    def move() -> None:
        optimizer.step()
        optimizer.zero_grad()

    with Join([joinable(model, step=move)]):
        for _ in range(1 + dist.get_rank()):
            model(torch.arange(5)).square().sum().backward()
            move()
    for share in (1.0, 0.5):
        (share * plain(torch.arange(5)).square().sum()).backward()
        twins.step(of_ranks=False)
    twins.check(1e-5)

"""Parameters that tensor parallelism has split or replicated over another mesh dim, fully sharded over data ranks."""

import math
import pickle
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from composable import (
    ConfigError,
    DesyncError,
    HandleOptions,
    RaggedShard,
    UsageError,
    clip_grad_norm_,
    fully_shard,
    iter_full_params,
    step_in_backward,
    strict_mode,
    unannotate,
    unshard_params,
)
from tests.models import random_input, seeded
from tests.parity import full, full_params
from tests.programs import Twins, sgd, train
from tests.world import on_ranks, run_ranks, run_threads

DIM = 6
# Blocks add up in another order than the whole.
CLOSE = 5e-6


class Block(nn.Module):
    """Two split layers whose dim may not divide, behind a norm whose gradient is a sum that is still to be taken."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 7)
        self.down = nn.Linear(7, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """A split embedding, blocks, a parameter that is no DTensor, and a layer tied to itself under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.scale = nn.Parameter(torch.ones(3))
        self.out = nn.Linear(DIM, 3)
        self.again = self.out

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(x) * self.scale + self.again(x)


def split(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Parallelize ``model``; ``out`` and ``scale`` stay plain."""
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
        "out": PrepareModuleInput(
            input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_output=True
        ),
    }
    for index in range(2):
        plan[f"blocks.{index}.norm"] = SequenceParallel(sequence_dim=0)
        plan[f"blocks.{index}.up"] = ColwiseParallel(input_layouts=Shard(0), use_local_output=False)
        plan[f"blocks.{index}.down"] = RowwiseParallel(output_layouts=Shard(0))
    return parallelize_module(model, mesh, plan)


def mesh_of(*sizes: int) -> DeviceMesh:
    """Return a mesh whose last dims are ``dp`` and ``tp``; of three sizes the first is for copies."""
    names = ("replicate", "dp", "tp") if len(sizes) == 3 else ("dp", "tp")
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["dp"] if mesh.ndim == 2 else mesh["replicate", "dp"]


def data_rank(mesh: DeviceMesh) -> int:
    copies = mesh.get_local_rank("replicate") if mesh.ndim == 3 else 0
    return copies * mesh["dp"].size() + mesh.get_local_rank("dp")


def data_size(mesh: DeviceMesh) -> int:
    return mesh.size() // mesh["tp"].size()


def batch(step: int, rank: int) -> torch.Tensor:
    return (random_input(100 * step + rank, 6) * 1000).long().abs() % 9


def loss_at(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return model(batch(step, rank)).square().mean()


def annotated(mesh: DeviceMesh, **options: Any) -> nn.Module:
    model = split(seeded(Model, 0), mesh["tp"])
    return fully_shard(model, mesh=data_mesh(mesh), policy={Block}, **options)


def twins_on(
    mesh: DeviceMesh,
    *,
    make: Callable[[Any], torch.optim.Optimizer] = sgd,
    tp: DeviceMesh | None = None,
    **options: Any,
) -> Twins:
    """Return twins of which the one on ranks is split along ``tp`` and sharded along the other dims."""

    def annotate(model: nn.Module) -> None:
        fully_shard(split(model, tp or mesh["tp"]), mesh=data_mesh(mesh), policy={Block}, **options)

    return Twins(Model, annotate, make=make, loss=loss_at, size=data_size(mesh), rank=data_rank(mesh))


@pytest.mark.parametrize(
    ("sizes", "freed", "world_size"),
    [
        *[((1, 2), True, 2), ((2, 1), False, 2), ((3, 2), True, 6), ((2, 3), False, 6), ((1, 2, 2), True, 4)],
        ((2, 2, 1), False, 4),
        # Backward gathers among a part of the data ranks.
        ((4, 2), 2, 8),
    ],
)
@on_ranks()
def test_training_is_that_of_one_process_on_all_batches(sizes: tuple[int, ...], freed: bool | int) -> None:
    twins = twins_on(mesh_of(*sizes), reshard_after_forward=freed)
    for step in range(3):
        if step == 1:
            twins.backward(7, keeps=True)
        twins.backward(step)
        twins.check_gradients(CLOSE)
        twins.step(set_to_none=step == 0)
    twins.check(CLOSE)


def error_of(build: Callable[[], object]) -> str:
    with pytest.raises((ConfigError, UsageError)) as caught:
        build()
    return f"{type(caught.value).__name__}: {caught.value}"


def misuse(name: str) -> str:
    mesh = mesh_of(2, 2)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model = nn.Linear(4, 4)
    if name in ("own dim", "other root"):
        parallelize_module(model, mesh["tp"], ColwiseParallel())
    meshes = {"own dim": {"mesh": mesh["tp"]}, "other root": {"mesh": other["data"]}}

    if name in meshes:
        return error_of(lambda: fully_shard(model, **meshes[name]))
    if name == "partial":
        model.weight = nn.Parameter(DTensor.from_local(torch.zeros(4, 4), mesh["tp"], [Partial()]))
        return error_of(lambda: fully_shard(model, mesh=mesh["dp"]))
    fully_shard(model, mesh=mesh["dp"])
    if name == "split after":
        return error_of(lambda: parallelize_module(model, mesh["tp"], ColwiseParallel()))
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 4), mesh["tp"], [Shard(0)]))
    return error_of(lambda: model(torch.zeros(4, 4)))


FIX_MESH = "init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))"
MISUSES = {
    "own dim": (
        "ConfigError: the parameter is a DTensor over ranks [0, 1], and fully_shard would split it again over some of them ([0, 1])\n"
        f"  at:  rank 0, parameter 'weight' [4, 4]\n  fix: use two different dims of one mesh: {FIX_MESH}"
    ),
    "other root": (
        "ConfigError: the mesh of the parameter, a DTensor, and the mesh to shard it over are not dims of one mesh\n"
        f"  at:  rank 0, parameter 'weight' [4, 4]\n  fix: make one mesh, {FIX_MESH}, and pass mesh['tp'] to "
        "parallelize_module and mesh['dp'] to fully_shard"
    ),
    "partial": (
        "ConfigError: a DTensor of Tensor placed (Partial(sum),) cannot be sharded again, only a plain one with Shard or "
        "Replicate\n"
        "  at:  rank 0, parameter 'weight' [4, 4] float32\n"
        "  fix: redistribute it before, or name it in ignored_params"
    ),
    "split after": (
        "UsageError: distribute_tensor of a parameter [4, 4] that fully_shard has sharded\n"
        "  at:  rank 0, parameter 'weight'\n  fix: call parallelize_module before fully_shard"
    ),
    "replaced after": (
        "UsageError: a parameter was replaced after fully_shard was called, and optimizers and gradients would not "
        "follow\n  at:  rank 0, module Linear, parameter 'weight'\n  fix: change its values: with torch.no_grad(): "
        "parameter.copy_(full), or load them; or unannotate first"
    ),
}


@pytest.mark.parametrize("name", list(MISUSES))
def test_what_fits_no_mesh_is_refused_on_every_rank(name: str) -> None:
    assert run_threads(misuse, 4, name)[0] == MISUSES[name]


@on_ranks(4)
def test_a_sharded_parameter_has_the_shape_of_the_whole_on_the_mesh_of_both_dims() -> None:
    mesh = mesh_of(2, 2)
    model = annotated(mesh)
    param = model.blocks[0].up.weight
    assert param.shape == (7, DIM)
    assert param.device_mesh == mesh
    ragged, other = param.placements
    assert isinstance(ragged, RaggedShard)
    assert other == Shard(0)
    rows = 4 if mesh.get_local_rank("tp") == 0 else 3
    assert ragged.bounds[-1] == rows * DIM
    assert (
        param.to_local().numel()
        == ragged.bounds[mesh.get_local_rank("dp") + 1] - ragged.bounds[mesh.get_local_rank("dp")]
    )
    assert model.blocks[0].norm.weight.placements[1] == Replicate()
    assert model.out.weight.device_mesh == mesh["dp"]
    torch.testing.assert_close(full_params(model), full_params(seeded(Model, 0)), rtol=0, atol=0)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD loop": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01, foreach=False),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.02),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3),
}


@pytest.mark.parametrize(
    ("name", "is_inside"), [*((name, False) for name in OPTIMIZERS), ("Adafactor", True), ("Muon", True)]
)
@on_ranks(4)
def test_optimizers_step_as_in_one_process(name: str, is_inside: bool) -> None:
    mesh = mesh_of(2, 2)
    twins = twins_on(mesh, make=lambda params: OPTIMIZERS[name](list(params)))
    (model, plain), (optimizer, expected) = twins, twins.optimizers
    if is_inside:
        step_in_backward(optimizer)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            model.zero_grad()
            loss = loss_at(model, step, data_rank(mesh))
            loss.backward()
            dist.all_reduce(mean := loss.detach() / mesh.size())
            return mean

        def whole(step: int = step) -> torch.Tensor:
            plain.zero_grad()
            losses = [loss_at(plain, step, rank) / 2 for rank in range(2)]
            sum(losses).backward()
            return sum(losses).detach()

        if name == "LBFGS":
            optimizer.step(closure)
            expected.step(whole)
            continue
        closure()
        whole()
        if not is_inside:
            norm = clip_grad_norm_(optimizer, 0.5)
            torch.testing.assert_close(
                norm, nn.utils.clip_grad_norm_(expected.param_groups[0]["params"], 0.5), rtol=1e-5, atol=1e-6
            )
            optimizer.step()
        expected.step()
    torch.testing.assert_close(full_params(model), full_params(plain), rtol=1e-4, atol=2e-5)


def trained_twins(mesh: DeviceMesh) -> Twins:
    twins = twins_on(mesh)
    twins.backward()
    return twins


@on_ranks(4)
def test_torch_clips_split_and_plain_parameters_together() -> None:
    twins = trained_twins(mesh_of(2, 2))
    for order in (2.0, 1.0, math.inf):
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.1, order) for one in twins]
        torch.testing.assert_close(full(norms[0]), norms[1])
    twins.check_gradients(CLOSE)


@on_ranks(4)
def test_operations_give_what_they_give_of_the_whole() -> None:
    mesh = mesh_of(2, 2)
    model, plain = annotated(mesh), seeded(Model, 0)
    for layer in ("up", "down"):
        weight, expected = (getattr(one.blocks[0], layer).weight for one in (model, plain))
        for function in (torch.sum, torch.norm, torch.std, lambda t: t.norm(dim=0), lambda t: t.norm(dim=1)):
            torch.testing.assert_close(full(function(weight)), function(expected).detach())
        torch.testing.assert_close(full(weight.t() @ weight), (expected.t() @ expected).detach())
        torch.testing.assert_close(full(weight[1]), expected[1].detach())
        assert weight.full_tensor().stride() == expected.stride()
        torch.testing.assert_close(full(weight.detach().view(-1)), expected.detach().view(-1))
        torch.testing.assert_close(full(weight.redistribute(placements=[Replicate(), Shard(0)])), expected.detach())
        again = distribute_tensor(expected.detach(), weight.device_mesh, weight.placements)
        with strict_mode():
            torch.testing.assert_close(again.to_local(), weight.to_local())
            torch.testing.assert_close((again + weight).to_local(), 2 * weight.to_local())
        pickled = pickle.loads(pickle.dumps(again))
        assert pickled._spec.layout.matches(weight._spec.layout)
        weight.full_tensor().square().sum().backward()
        torch.testing.assert_close(full(weight.grad), 2 * expected.detach())
        for one in (weight, expected):
            torch.manual_seed(5)
            with torch.no_grad():
                one.normal_()
        torch.testing.assert_close(full(weight), expected.detach())


@on_ranks(4, options=[(), ("offload_to_cpu",), ("rank0_only",)])
def test_full_parameters_are_as_before_the_annotation_and_written_back(options: tuple[str, ...]) -> None:
    mesh = mesh_of(2, 2)
    model, plain = trained_twins(mesh)
    with unshard_params(model, **dict.fromkeys(options, True)):
        weight = model.blocks[0].up.weight
        if "rank0_only" not in options or data_rank(mesh) == 0:
            assert type(weight) is DTensor
            assert weight.placements == (Shard(0),)
            torch.testing.assert_close(full(weight).detach(), plain.blocks[0].up.weight.detach())
            with torch.no_grad():
                weight.mul_(3)
    torch.testing.assert_close(full(model.blocks[0].up.weight).detach(), 3 * plain.blocks[0].up.weight.detach())
    torch.testing.assert_close(full(model.blocks[0].up.weight.grad), plain.blocks[0].up.weight.grad)


@on_ranks(4, offload=[False, True])
def test_what_raises_on_one_rank_is_written_back_in_no_block(offload: bool) -> None:
    model, before = annotated(mesh_of(2, 2)), full_params(seeded(Model, 0))

    def fail() -> None:
        with unshard_params(model, offload_to_cpu=offload):
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(3)
            if dist.get_rank() == 0:
                raise ValueError("in the block")

    with pytest.raises(DesyncError if dist.get_rank() else ValueError):
        fail()
    torch.testing.assert_close(full_params(model), before, rtol=0, atol=0)


@on_ranks(4)
def test_values_are_iterated_over_as_wholes() -> None:
    mesh = mesh_of(2, 2)
    model, plain = annotated(mesh), seeded(Model, 0)
    torch.testing.assert_close(dict(iter_full_params(model)), dict(plain.named_parameters()))


@on_ranks(4, keeps=[True, False])
def test_unannotate_gives_back_what_tensor_parallelism_made(keeps: bool) -> None:
    mesh = mesh_of(2, 2)
    twins = twins_on(mesh)
    model = twins.model
    twins.backward(keeps=keeps)
    unannotate(model)
    assert type(model.blocks[0].up.weight) is DTensor
    assert model.blocks[0].up.weight.device_mesh == mesh["tp"]
    assert type(model.out.weight) is nn.Parameter
    twins.check()
    twins.check_gradients(CLOSE)
    twins.drop()
    fully_shard(model, mesh=mesh["dp"])
    twins.backward()
    twins.check_gradients(CLOSE)


@on_ranks(4)
def test_the_first_data_rank_gives_its_values_to_the_others() -> None:
    mesh = mesh_of(2, 2)
    with torch.device("meta") if data_rank(mesh) else nullcontext():
        model = seeded(Model, 0)
    split(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], policy={Block}, sync_module_states=True)
    torch.testing.assert_close(full_params(model), full_params(seeded(Model, 0)))


def fill(module: nn.Module) -> None:
    if any(param.is_meta for param in module.parameters(recurse=False)):
        module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for index, param in enumerate(module.parameters(recurse=False)):
            param.fill_(0.1 * (index + 1))


def fill_with_wholes(module: nn.Module) -> None:
    """Put plain tensors, each the whole of a parameter, in their places."""
    for name, param in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.arange(1.0, 1 + param.numel()).view(param.shape)))


@on_ranks(4)
def test_each_rank_takes_its_block_of_what_param_init_fn_gives_whole() -> None:
    mesh = mesh_of(2, 2)
    with torch.device("meta"):
        model = Model()
    split(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], policy={Block}, param_init_fn=fill_with_wholes)
    torch.testing.assert_close(
        full_params(model), full_params(seeded(Model, 0).apply(fill_with_wholes)), rtol=0, atol=0
    )


@on_ranks(4, way=["function", "to_empty"])
def test_a_model_on_the_meta_device_gets_its_values_later(way: str) -> None:
    mesh = mesh_of(2, 2)
    with torch.device("meta"):
        model = Model()
    split(model, mesh["tp"])
    fully_shard(model, mesh=mesh["dp"], policy={Block}, param_init_fn=fill if way == "function" else None)
    if way == "to_empty":
        model.to_empty(device="cpu").apply(fill)
    plain = seeded(Model, 0).apply(fill)
    torch.testing.assert_close(full_params(model), full_params(plain))
    loss_at(model, 0, data_rank(mesh)).backward()


@on_ranks(4)
def test_state_dicts_of_wholes_and_of_pieces_are_loaded() -> None:
    mesh = mesh_of(2, 2)
    model, other, plain = annotated(mesh), annotated(mesh), seeded(Model, 3)
    model.load_state_dict(plain.state_dict())
    torch.testing.assert_close(full_params(model), full_params(plain))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(full_params(other), full_params(plain))


class Weight(nn.Module):
    """Returns its parameter, or a view of it, as torch's tied heads do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self) -> torch.Tensor:
        return self.weight


@on_ranks(4)
def test_a_parameter_that_a_forward_returns_is_a_copy() -> None:
    mesh = mesh_of(2, 2)
    model = nn.Sequential(Weight(), nn.Linear(2, 2))
    model[0].weight = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh["tp"], [Shard(0)]))
    fully_shard(model, mesh=mesh["dp"], policy={Weight})
    output = model[0]()
    with torch.no_grad():
        model[0].weight.zero_()
    torch.testing.assert_close(full(output).detach(), torch.ones(4, 2))


@on_ranks(4)
def test_a_mesh_that_equals_the_part_of_another_will_do() -> None:
    first, second = mesh_of(2, 2), mesh_of(2, 1, 2)
    train(twins_on(second, tp=first["tp"]), 1, tolerance=CLOSE)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(random_input(1, 7, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.full_tensor() if isinstance(self.weight, DTensor) else self.weight
        return torch.tanh(x @ weight)


@pytest.mark.parametrize(
    ("names", "placements"),
    [
        (("dp", "one", "two"), (Shard(0), Shard(0))),
        (("one", "dp", "two"), (Shard(1), Shard(0))),
        (("one", "two", "dp"), (Replicate(), Shard(1))),
        (("one", "dp", "two"), (Shard(0), Replicate())),
    ],
)
@on_ranks(8)
def test_two_other_dims_split_a_parameter(names: tuple[str, str, str], placements: tuple[Any, Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)

    def annotate(model: Product) -> None:
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh["one", "two"], placements))
        fully_shard(model, mesh=mesh["dp"])

    twins = Twins(
        Product,
        annotate,
        make=lambda params: torch.optim.Adam(params, lr=0.1),
        loss=lambda model, step, rank: model(random_input(10 * step + rank, 3, 7)).square().mean(),
        size=2,
        rank=mesh.get_local_rank("dp"),
    )
    model, plain = twins
    assert model.weight.device_mesh.mesh_dim_names == names
    for step in range(2):
        twins.backward(step)
        twins.check_gradients(CLOSE)
        torch.testing.assert_close(*(clip_grad_norm_(one.parameters(), 0.1) for one in twins))
        torch.testing.assert_close(full(model.weight.grad.norm(dim=0)), plain.weight.grad.norm(dim=0))
        twins.step()
    twins.check(CLOSE)


@on_ranks(4)
def test_the_data_dim_may_be_several_flattened_into_one() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    data = mesh["dp", "cp"]._flatten("data")

    def annotate(model: nn.Module) -> None:
        fully_shard(split(model, mesh["tp"]), mesh=data, policy={Block})

    train(Twins(Model, annotate, loss=loss_at, size=2, rank=data.get_local_rank()), 1, tolerance=CLOSE)


@on_ranks(4)
def test_an_inf_in_one_block_skips_the_step_of_all() -> None:
    mesh = mesh_of(2, 2)
    twins = twins_on(mesh)
    twins.backward_alone()
    model, optimizer, scaler = twins.model, twins.optimizers[0], torch.amp.GradScaler("cpu", init_scale=4.0)
    for spoils in (False, True):
        optimizer.zero_grad()
        scaler.scale(loss_at(model, 0, data_rank(mesh))).backward()
        before, local = full_params(model), model.blocks[0].up.weight.grad.to_local()
        if not spoils:
            scaler.unscale_(optimizer)
            twins.check_gradients(CLOSE)
        elif mesh.get_local_rank("tp") == 1 and local.numel():
            local.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(value, before[fqn]) for fqn, value in full_params(model).items()) is spoils


@on_ranks(4)
def test_hooks_on_a_parameter_get_its_gradient() -> None:
    twins, seen = twins_on(mesh_of(2, 2)), []
    weight = twins.model.blocks[0].up.weight
    weight.register_hook(lambda grad: 2 * grad)
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.shape))
    twins.backward()
    torch.testing.assert_close(full(weight.grad), 2 * twins.plain.blocks[0].up.weight.grad, rtol=1e-5, atol=1e-6)
    assert seen == [weight.shape]


@on_ranks(2, run=run_ranks)
def test_a_compiled_gather_joins_blocks() -> None:
    warnings.simplefilter("ignore")  # Of the compiler.
    mesh = mesh_of(1, 2)
    for weight in (annotated(mesh).blocks[0].up.weight.detach(), annotated(mesh).blocks[0].down.weight.detach()):
        compiled = torch.compile(lambda tensor: (tensor * 2).full_tensor(), backend="aot_eager")
        torch.testing.assert_close(compiled(weight), 2 * full(weight))


# What only some ranks know is told to those with other blocks as well


def halve_on_all_but(model: Any, failing: int) -> None:
    def hook(shard: torch.Tensor) -> object:
        return object() if dist.get_rank() == failing else None

    model.set_all_reduce_hook(hook)


def differ(way: str, failing: int, mesh: DeviceMesh) -> None:
    """Do something on one rank that the others do not."""
    differs = dist.get_rank() == failing
    model: Any = split(seeded(Model, 0), mesh["tp"])
    if way == "arguments":
        fully_shard(
            model,
            mesh=mesh["dp"],
            policy={Block},
            sync_module_states=True,
            options=HandleOptions(align="no" if differs else None),
        )
    if way == "first values":
        model.scale = nn.Parameter(model.scale.to("meta"))

        def fill(module: nn.Module) -> None:
            if differs:
                raise ConfigError("no values here", fix="have some")
            module.scale = nn.Parameter(torch.ones(3))

        fully_shard(model, mesh=mesh["dp"], policy={Block}, param_init_fn=fill)
    fully_shard(
        model,
        mesh=mesh["dp"],
        policy=None if way == "plans" and differs else {Block},
        options=HandleOptions(unused_gradients="zero" if way == "a factor, without messages" else "none"),
    )
    if way == "a hook":
        halve_on_all_but(model, failing)
    loss_at(model, 0, data_rank(mesh)).backward()
    if way.startswith("a factor"):
        model.set_gradient_divide_factor(3.0 if differs else 2.0)
        loss_at(model, 1, data_rank(mesh)).backward()
    weight = model.blocks[0].up.weight
    if way == "a gradient" and differs:
        weight.grad = None
    if way == "a gradient":
        unannotate(model)
    if way == "an optimizer":
        model.zero_grad()
        step_in_backward(torch.optim.SGD(model.parameters(), lr=0.1, differentiable=differs))


WAYS = [
    *("arguments", "first values", "plans", "a hook", "a factor", "a factor, without messages", "a gradient"),
    "an optimizer",
]


@on_ranks(4, way=WAYS)
def test_what_one_rank_does_alone_is_an_error_on_ranks_with_other_blocks_too(way: str) -> None:
    with pytest.raises((ConfigError, DesyncError, UsageError)) as caught:
        differ(way, random.Random(way).randrange(4), mesh_of(2, 2))
    assert "every rank that is left waits" not in str(caught.value)

"""Parameters of tensor subclasses under ``fully_shard``: gathered by their class, as bytes, or with marks only."""

import copy
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils import _pytree as pytree

from composable import (
    ConfigError,
    MixedPrecisionPolicy,
    RaggedDTensor,
    UsageError,
    full_state_dict,
    fully_shard,
    load_checkpoint,
    load_full_state_dict,
    no_sync,
    plan,
    save_checkpoint,
    unannotate,
    unshard_params,
)
from tests.models import random_input, seeded
from tests.parity import full, mean_over_ranks
from tests.subclasses import (
    Adapted,
    AffineLinear,
    AffineWeight,
    HalfState,
    Int8Weight,
    Linear4bit,
    Marked,
    MeanSquares,
    Params4bit,
    PlainImpl,
    Quantised,
    ScaledWeight,
    TurnedWeight,
    TwoPartWeight,
    batch,
    int8_model,
)
from tests.world import on_ranks, run_ranks, run_threads

SHAPES = [(6, 5), (7, 6), (2, 7)]  # even, uneven, and fewer rows than three ranks
STEPS = 3
WIDTH = 6


def losses_of(model: nn.Module, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Train and return the loss of each step."""
    optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=0.01)
    losses = []
    for x in batches:
        losses.append(model(x).square().mean())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train(model: nn.Module, width: int, *, steps: int = STEPS) -> list[float]:
    """Train on this rank's batches; returns losses, averaged over ranks."""
    return [
        mean_over_ranks(loss)
        for loss in losses_of(model, [batch(step, dist.get_rank(), width) for step in range(steps)])
    ]


def train_alone(model: nn.Module, width: int) -> list[float]:
    """Train in one process on the batches of all ranks together."""
    ranks = range(dist.get_world_size())
    batches = [torch.cat([batch(step, rank, width) for rank in ranks]) for step in range(STEPS)]
    return [loss.item() for loss in losses_of(model, batches)]


def assert_trains_as(model: nn.Module, reference: nn.Module, width: int) -> None:
    torch.testing.assert_close(train(model, width), train_alone(reference, width), rtol=1e-6, atol=1e-6)


class RoundedLinear(nn.Linear):
    """What a linear layer with an ``Int8Weight`` computes, in one process."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight.detach().abs().max() / 127
        rounded = (self.weight.detach() / scale).round() * scale
        return F.linear(x, self.weight + (rounded - self.weight).detach(), self.bias)


def rounded_model() -> nn.Sequential:
    model = seeded(lambda: nn.Sequential(*(nn.Linear(inputs, outputs) for outputs, inputs in SHAPES)), 0)
    for linear in model:
        linear.__class__ = RoundedLinear
    return model


# -- gathered by their class


@pytest.mark.parametrize(("world_size", "reshard"), [(1, True), (2, True), (3, False)])
@on_ranks()
def test_weights_that_their_class_gathers_train_as_in_one_process(reshard: bool) -> None:
    model, reference = int8_model(SHAPES), rounded_model()
    fully_shard(model, policy={nn.Linear}, reshard_after_forward=reshard)
    assert_trains_as(model, reference, SHAPES[0][1])
    for param, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(full(param), other.detach(), rtol=1e-5, atol=1e-6)


def train_with_scales(model: nn.Module) -> list[float]:
    """Train, and between steps write to each shard what its norm is, of all weights at once."""
    losses = []
    for step in range(STEPS):
        weights = [linear.weight for linear in model]
        norms = torch.stack(torch._foreach_norm(weights, float("inf")))  # type: ignore[arg-type]  # a list
        for weight, norm in zip(weights, norms.full_tensor()):  # type: ignore[attr-defined]  # a DTensor
            weight._local_tensor.scale = 1 / norm  # type: ignore[union-attr]
        losses += train(model, 5, steps=step + 1)[-1:]
    return losses


@on_ranks(2, run=run_ranks, kind=[Int8Weight, TwoPartWeight, TurnedWeight, ScaledWeight])
def test_losses_are_those_of_the_same_class_under_fully_shard_of_torch(kind: type) -> None:
    # torch takes no uneven rows of such a class.
    shapes = [(6, 5), (4, 6)]
    theirs, ours = int8_model(shapes, kind), int8_model(shapes, kind)
    for linear in theirs:
        fsdp.fully_shard(linear)
    fsdp.fully_shard(theirs)
    fully_shard(ours, policy={nn.Linear}, reshard_after_forward=True)
    for model in (ours, theirs):
        for linear in model:
            assert type(linear.weight._local_tensor) is type(linear.weight.to_local()) is kind
    TurnedWeight.phases.clear()
    run = train_with_scales if kind is ScaledWeight else partial(train, width=5)
    losses = [(run(model), TurnedWeight.phases[:], TurnedWeight.phases.clear())[:2] for model in (ours, theirs)]
    torch.testing.assert_close(losses[0][0], losses[1][0], rtol=1e-6, atol=1e-6)
    # torch does not free what belongs to the root, and so does not ask it for backward.
    assert set(losses[0][1]) == set(losses[1][1]) and (kind is TurnedWeight) == ("PRE_BACKWARD" in losses[0][1])


@on_ranks(2)
def test_what_is_written_to_a_weight_while_it_is_unsharded_is_gathered_again() -> None:
    model = int8_model([(4, 5)], ScaledWeight)
    fully_shard(model, reshard_after_forward=False)
    x = batch(0, 0, 5)
    before = model(x) - full(model[0].bias)
    for write in (lambda weight: weight.mul_(2), lambda weight: torch._foreach_mul_([weight], 2)):
        with torch.no_grad():
            write(model[0].weight)
        before = 2 * before
        torch.testing.assert_close(model(x) - full(model[0].bias), before)


@on_ranks(3, shape=[(7, 3), (1, 4)])
def test_several_tensors_of_a_class_travel_and_fill_one_parameter_again_and_again(shape: tuple[int, int]) -> None:
    model = int8_model([shape], TwoPartWeight)
    plain = seeded(lambda: nn.Linear(shape[1], shape[0]), 0)
    fully_shard(model)
    seen, values = [], []
    model[0].register_forward_pre_hook(lambda module, *_: seen.append(module.weight))
    model[0].register_forward_pre_hook(lambda module, *_: values.append(module.weight.detach().clone()))
    for _ in range(2):
        model(batch(0, 0, shape[1]))
        torch.testing.assert_close(values[-1], plain.weight.detach(), rtol=0, atol=1e-7)
        model.reshard()
    assert seen[0] is seen[1], "the class fills the same parameter again"
    assert seen[0].untyped_storage().size() == 0, "and its memory is freed between"


@on_ranks(2)
def test_the_unsharded_parameter_is_what_the_class_makes_and_is_freed_with_its_handle() -> None:
    model = int8_model(SHAPES)
    fully_shard(model, policy={nn.Linear}, reshard_after_forward=False)
    seen: list[Any] = []
    model[1].register_forward_pre_hook(lambda module, *_: seen.append(module.weight))
    model(batch(0, dist.get_rank(), 5)).sum()
    storage = seen[0]._data.untyped_storage()
    used = storage.nbytes()
    model.reshard()
    model[1].reshard()
    assert (type(seen[0]).__name__, used, storage.nbytes()) == ("Int8Whole", 8 * 6, 0)


@on_ranks(2)
def test_gradients_that_no_sync_keeps_are_reduced_with_later_ones() -> None:
    found = []
    for accumulates in (True, False):
        model = int8_model(SHAPES)
        fully_shard(model, policy={nn.Linear})
        parts = [batch(step, dist.get_rank(), 5) for step in range(2)]
        if accumulates:
            with no_sync(model):
                model(parts[0]).square().sum().backward()
            model(parts[1]).square().sum().backward()
        else:
            model(torch.cat(parts)).square().sum().backward()
        found.append({fqn: full(param.grad) for fqn, param in model.named_parameters()})
    kept, whole = found[0], found[1]
    for fqn, grad in whole.items():
        torch.testing.assert_close(kept[fqn], grad, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_class_makes_the_parameter_in_the_dtype_of_computation() -> None:
    model = int8_model(SHAPES)
    fully_shard(model, policy={nn.Linear}, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    seen = []
    model[0].register_forward_pre_hook(lambda module, *_: seen.append(module.weight.dtype))
    assert train(model, 5)[-1] == pytest.approx(train_alone(rounded_model(), 5)[-1], rel=0.05)
    assert (seen[0], model[0].weight.dtype) == (torch.bfloat16, torch.float32)


class EchoWeight(Int8Weight):
    """Whatever is computed with it is of its class too, gradients included."""

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(EchoWeight, lambda one: one._values, (args, kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, EchoWeight, op(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self._values,), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        return None if out is not None else (EchoWeight(gathered[0]), gathered)


@on_ranks(3)
def test_gradients_that_a_class_wraps_are_reduced_as_what_is_inside() -> None:
    model, reference = int8_model(SHAPES, EchoWeight), int8_model(SHAPES)
    fully_shard(model, policy={nn.Linear})
    for linear in reference:
        linear.weight = nn.Parameter(linear.weight._values.detach())
    losses = losses_of(model, [batch(step, dist.get_rank(), 5) for step in range(STEPS)])
    found = [mean_over_ranks(loss._values) for loss in losses]  # type: ignore[attr-defined]
    torch.testing.assert_close(found, train_alone(reference, 5), rtol=1e-6, atol=1e-6)


@on_ranks(3, way=["param_init_fn", "sync_module_states", "load"])
def test_weights_that_their_class_gathers_may_get_their_values_later(way: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(inputs, outputs) for outputs, inputs in SHAPES))
    for linear in model:
        linear.weight = nn.Parameter(Int8Weight(linear.weight.detach()))
    source = int8_model(SHAPES)
    values = {
        key: value._values if isinstance(value, Int8Weight) else value for key, value in source.state_dict().items()
    }

    def fill(linear: nn.Module) -> None:
        linear.to_empty(device="cpu", recurse=False)
        name = next(name for name, module in model.named_children() if module is linear)
        with torch.no_grad():
            linear.weight.copy_(values[f"{name}.weight"])
            linear.bias.copy_(values[f"{name}.bias"])

    if way == "sync_module_states":
        model = source if dist.get_rank() == 0 else model
        fully_shard(model, policy={nn.Linear}, sync_module_states=True)
    else:
        fully_shard(model, policy={nn.Linear}, param_init_fn=fill if way == "param_init_fn" else None)
    if way == "load":
        load_full_state_dict(model, values)
    assert_trains_as(model, rounded_model(), 5)


# -- as bytes


@on_ranks(world_size=[1, 2, 3])
def test_adapters_beside_quantised_weights_train_as_in_one_process() -> None:
    model, reference = seeded(Quantised, 0), seeded(Quantised, 0)
    fully_shard(model, policy={Adapted})
    assert_trains_as(model, reference, WIDTH)
    trained = dict(reference.named_parameters())
    for fqn, value in full_state_dict(model).items():
        if fqn in trained and trained[fqn].requires_grad:
            torch.testing.assert_close(value, trained[fqn].detach(), rtol=1e-5, atol=1e-6)


def gather_random(seed: int) -> None:
    rng = random.Random(seed)
    rows, columns = rng.randint(1, 9), rng.randint(1, 9)
    storage = rng.choice([torch.uint8, torch.bfloat16, torch.float16])
    model, before = (
        seeded(
            lambda: nn.Sequential(
                Linear4bit(nn.Linear(columns, rows), storage),
                AffineLinear(nn.Linear(rows, columns)),
                nn.Linear(columns, 2),
            ),
            seed,
        )
        for _ in range(2)
    )
    options: dict[str, Any] = {"policy": {Linear4bit, AffineLinear}} if rng.random() < 0.5 else {}
    if rng.random() < 0.5:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16)
    fully_shard(model, reshard_after_forward=rng.random() < 0.5, **options)
    looks = []

    def look_at_bytes(module: Any, *_: Any) -> None:
        weight, expected = module.weight, before[0].weight
        assert type(weight) is Params4bit
        assert weight.data.view(torch.uint8).equal(expected.data.view(torch.uint8))
        assert weight.quant_state.absmax.equal(expected.quant_state.absmax)
        assert weight.module is module
        looks.append(weight)

    def look_inside(module: Any, *_: Any) -> None:
        weight, expected = module.weight, before[1].weight
        assert type(weight) is AffineWeight
        assert weight.shape == expected.shape
        assert weight.impl.int_data.equal(expected.impl.int_data)
        assert weight.values().equal(expected.values())
        looks.append(weight)

    model[0].register_forward_pre_hook(look_at_bytes)
    model[1].register_forward_pre_hook(look_inside)
    for _ in range(2):
        model(random_input(seed, 2, columns))
    assert looks[0] is looks[2]
    assert looks[1] is looks[3]
    model.reshard()
    assert type(model[0].weight) is RaggedDTensor
    assert not any(param.requires_grad for param in (model[0].weight, model[1].weight))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_bit_of_random_quantised_weights_arrives_with_their_state(world_size: int) -> None:
    for seed in range(3 * world_size, 3 * world_size + 3):
        run_threads(gather_random, world_size, seed)


def load_into_others(way: str, folder: str) -> None:
    trained, fresh = seeded(Quantised, 0), seeded(Quantised, 1)
    for model in (trained, fresh):
        fully_shard(model, policy={Adapted})
    x = batch(0, 0, WIDTH)
    train(trained, WIDTH, steps=1)
    expected = trained(x)
    assert not torch.equal(expected, fresh(x))
    if way == "full":
        load_full_state_dict(fresh, full_state_dict(trained))
    elif way == "torch":
        fresh.load_state_dict(trained.state_dict())
    else:
        save_checkpoint(folder, 1, trained)
        load_checkpoint(folder, fresh)
    assert torch.equal(fresh(x), expected)


@pytest.mark.parametrize("way", ["full", "torch", "checkpoint"])
def test_what_is_saved_of_quantised_weights_makes_another_model_the_same(way: str, tmp_path: Path) -> None:
    run_threads(load_into_others, 3, way, str(tmp_path / "run"))


@on_ranks(2)
def test_a_cast_of_a_state_dict_leaves_bytes_alone_whatever_their_dtype_is_called() -> None:
    model, before = seeded(Quantised, 0), seeded(Quantised, 0)
    fully_shard(model, policy={Adapted})
    values = full_state_dict(model, dtype=torch.float16)
    if dist.get_rank() == 0:
        packed = values["layers.1.base.weight"]
        assert packed.dtype is torch.bfloat16 and values["head.weight"].dtype is torch.float16
        assert packed.view(torch.uint8).equal(before.layers[1].base.weight.data.view(torch.uint8))


@on_ranks(2)
def test_a_state_dict_without_the_scale_of_its_bytes_is_refused() -> None:
    model = seeded(Quantised, 0)
    fully_shard(model, policy={Adapted})
    state = dict(model.state_dict())
    del state["layers.2.base.weight.impl.scale"]
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    text = str(caught.value)
    assert "layers.2.base.weight.impl.scale" in text


# -- all of them


def mixed() -> nn.Module:
    """Return a model with all kinds, whose layers all map ``WIDTH`` to ``WIDTH``."""
    model = seeded(Quantised, 0)
    model.head = int8_model([(3, WIDTH)])[0]
    model.layers[0].up.bias = Marked(model.layers[0].up.bias.detach(), axes=("out",))
    return model


def rounded_head(model: Any) -> nn.Module:
    """Make the layer that its class gathers one that computes the same in one process."""
    weight = model.head.weight
    if isinstance(weight, Int8Weight):
        model.head.weight = nn.Parameter(weight._values.detach())
    model.head.__class__ = RoundedLinear
    return model


@on_ranks(2, policy=[{Adapted}, {Linear4bit, AffineLinear}])
def test_copies_are_independent_and_undoing_gives_back_every_class_with_its_state(policy: set[type[nn.Module]]) -> None:
    model = mixed()
    fully_shard(model, policy=policy)
    train(model, WIDTH, steps=1)
    twin = copy.deepcopy(model)
    x = batch(5, 0, WIDTH)
    assert twin(x).equal(model(x))
    twin.layers[0].base.weight.quant_state.absmax.zero_()
    expected = model(x)
    assert not twin(x).equal(expected)
    assert train(twin, WIDTH) != train(copy.deepcopy(model), WIDTH)
    assert model(x).equal(expected), "a copy shares nothing"
    unannotate(model)
    kinds = {fqn: type(param) for fqn, param in model.named_parameters()}
    assert kinds["layers.0.base.weight"] is kinds["layers.1.base.weight"] is Params4bit
    assert kinds["layers.2.base.weight"] is AffineWeight
    assert kinds["layers.0.up.bias"] is Marked
    assert kinds["head.weight"] is Int8Weight
    assert model.layers[0].base.weight.module is model.layers[0].base
    reference = rounded_head(mixed())
    for (_, own), (_, other) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert own.shape == other.shape
    whole = rounded_head(model)
    torch.testing.assert_close(whole(x), expected, rtol=1e-6, atol=1e-6)


@on_ranks(3, rank0_only=[False, True])
def test_unshard_params_shows_instances_of_each_class_and_writes_back(rank0_only: bool) -> None:
    model, before = mixed(), mixed()
    fully_shard(model, policy={Adapted})
    with torch.no_grad(), unshard_params(model, rank0_only=rank0_only):
        if dist.get_rank() == 0 or not rank0_only:
            assert type(model.layers[0].base.weight) is Params4bit
            assert type(model.layers[2].base.weight) is AffineWeight
            assert model.layers[2].base.weight.values().equal(before.layers[2].base.weight.values())
            assert type(model.head.weight) is Int8Weight
            assert model.head.weight._values.equal(before.head.weight._values)
            model.head.weight._values.mul_(2)
            model.layers[0].base.weight.data.fill_(17)
            model.layers[2].base.weight.impl.int_data.fill_(3)
    assert full(model.head.weight).equal(2 * before.head.weight._values)
    assert full(model.layers[0].base.weight).eq(17).all()
    assert full(model.layers[2].base.weight).eq(3).all()


@on_ranks(2)
def test_forward_sees_the_class_of_a_parameter_that_only_has_marks() -> None:
    model = mixed()
    fully_shard(model, policy={Adapted})
    seen: list[Any] = []
    model.layers[0].up.register_forward_pre_hook(lambda module, *_: seen.append(module.bias))
    model(batch(0, 0, WIDTH)).sum().backward()
    assert model.layers[0].up.bias.grad is not None
    assert (type(seen[0]).__name__, seen[0].axes, seen[0].is_matrix, model.layers[0].up.bias.axes) == (
        "Marked",
        ("out",),
        False,
        ("out",),
    )


def test_a_plan_says_what_becomes_of_each_class() -> None:
    assert_expected_inline(
        str(plan(mixed(), world_size=2, policy={Adapted})),
        """\
Quantised: 4 handles over 2 ranks, transport auto
  165 elements; per rank 277 B at rest; largest handle 162 B unsharded; padding 28 B
  (root) (Quantised): 2 params, 21 float32, float32, 56 B per rank, padding 28 B; root; cut between rows: head.weight; gathered by Int8Weight: head.weight
    layers.0 (Adapted): 4 params, 50 uint8 frozen, float32, 70 B per rank; policy: Adapted; bytes of Params4bit: base.weight
    layers.1 (Adapted): 4 params, 40 bfloat16 frozen, float32, 70 B per rank; policy: Adapted; bytes of Params4bit: base.weight
    layers.2 (Adapted): 5 params, 54 uint8 frozen, float32, 81 B per rank; policy: Adapted; bytes of AffineWeight.impl.int_data: base.weight""",
    )


# -- refused


class Unknown(nn.Parameter):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(function, types, args, kwargs or {})


class Half(torch.Tensor):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self,), None


class Scaled(AffineWeight):
    """Gathers what is inside of it, and has more there than that."""

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["whole", "impl"], self.dtype

    @property
    def whole(self) -> torch.Tensor:
        return self.values()

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise NotImplementedError

    fsdp_post_all_gather = fsdp_pre_all_gather


def scaled_on_meta() -> nn.Parameter:
    impl = AffineWeight.quantised(torch.rand(4, 4)).impl
    on_meta = PlainImpl(impl.int_data.to("meta"), impl.scale.to("meta"), impl.zero_point.to("meta"))
    param = nn.Parameter(AffineWeight(on_meta, (4, 4), torch.float32), requires_grad=False)
    param.__class__ = Scaled
    return param


class Beside(torch.Tensor):
    """Rows that are gathered as they are, and scaled by a tensor beside them."""

    KEPT = (torch.ops.aten.detach.default, torch.ops.aten.split.Tensor)

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor, splits: str) -> "Beside":
        return torch.Tensor._make_wrapper_subclass(cls, values.size(), dtype=values.dtype, device=values.device)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor, splits: str) -> None:
        self._values = values
        self._scale = scale
        self._splits = splits

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Beside({self._values}, {self._scale})"

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["_values", "_scale"], self._splits

    @staticmethod
    def __tensor_unflatten__(tensors: Any, splits: str, size: Any, stride: Any) -> "Beside":
        return Beside(tensors["_values"], tensors["_scale"], splits)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        this = next(one for one in args if isinstance(one, Beside))
        values = op(*pytree.tree_map_only(Beside, lambda one: one._values, args), **(kwargs or {}))
        if op is torch.ops.aten.detach.default:
            return Beside(values, this._scale, this._splits)
        if op is torch.ops.aten.split.Tensor and this._splits != "plain":
            scale = this._scale
            scales = op(scale, *args[1:]) if this._splits == "cut" else [scale] * len(values)
            return [Beside(*both, this._splits) for both in zip(values, scales, strict=True)]
        return values

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._values,), self._scale

    def fsdp_post_all_gather(self, gathered: Any, scale: Any, param_dtype: Any, *, out: Any = None) -> Any:
        if out is not None:
            torch.mul(gathered[0][: len(out)], scale, out=out.data)
            return None
        whole = gathered[0] * scale
        return whole, (whole,)


class ScaledLinear(nn.Module):
    """What a layer with such a weight computes, in one process."""

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        return F.linear(x, weight + (weight * self.scale - weight).detach())


def train_beside(values: torch.Tensor, scale: torch.Tensor, splits: str) -> None:
    model = nn.Linear(values.shape[1], values.shape[0], bias=False)
    model.weight = nn.Parameter(Beside(values.clone(), scale, splits))
    fully_shard(model, reshard_after_forward=True)
    assert_trains_as(model, ScaledLinear(values.clone(), scale), values.shape[1])


@pytest.mark.parametrize("splits", ["cut", "plain"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (3, 3), (4, 2)])
def test_a_tensor_beside_the_rows_is_whole_on_every_rank_or_refused_if_it_has_rows_too(
    rows: int, columns: int, splits: str
) -> None:
    values = random_input(0, rows, columns)
    for shape in [(), (1,), (columns,), (1, columns), (rows, 1), (rows, columns)]:
        scale = random_input(1, 16)[: torch.Size(shape).numel()].view(shape)
        has_rows = shape[:1] == (rows,)
        if splits == "cut" and not has_rows:
            continue  # no class does that
        if rows > 1 and has_rows:
            model = nn.Linear(columns, rows, bias=False)
            model.weight = nn.Parameter(Beside(values, scale, splits))
            with pytest.raises(ConfigError, match="Beside has '_scale' beside '_values', with rows") as caught:
                plan(model, world_size=2)
            assert "'weight'" in str(caught.value.at)
            assert "fsdp_pre_all_gather" in str(caught.value.fix)
        else:
            run_threads(train_beside, 2, values, scale, splits)


class Unbuildable(AffineWeight):
    @staticmethod
    def __tensor_unflatten__(tensors: Any, dtype: torch.dtype, size: Any, stride: Any) -> Any:
        raise KeyError("impl")


def linear_with(param: nn.Parameter) -> nn.Module:
    model = nn.Linear(4, 4, bias=False)
    del model.weight
    model.register_parameter("weight", param)
    return model


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (linear_with(Unknown(torch.zeros(4, 4))), {}, "Unknown is a tensor subclass"),
        (linear_with(nn.Parameter(torch.zeros(4, 4).as_subclass(Half))), {}, "Half is a tensor subclass"),
        (linear_with(scaled_on_meta()), {}, "this state is on the meta device"),
        (
            linear_with(Params4bit(torch.empty(8, 1, dtype=torch.uint8, device="meta"))),
            {},
            "this state is on the meta device",
        ),
        (int8_model([(4, 4)]), {"align": {"0.weight": 2}}, "is gathered by its class"),
        (linear_with(nn.Parameter(Int8Weight(torch.empty(0, 4)))), {}, "gathers rows, and the parameter has none"),
        (
            linear_with(nn.Parameter(AffineWeight.quantised(torch.rand(4, 4)))),
            {},
            "AffineWeight is a tensor subclass",
        ),
    ],
)
def test_a_class_that_cannot_be_sharded_is_refused_by_name(
    model: nn.Module, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan(model, world_size=2, **options)
    assert caught.value.fix
    assert "weight" in str(caught.value.at)


def test_a_class_that_cannot_be_made_around_other_memory_is_refused_before_anything_is_changed() -> None:
    inner = AffineWeight.quantised(torch.rand(4, 4))
    model = linear_with(nn.Parameter(inner, requires_grad=False))
    model.weight.__class__ = Unbuildable
    with pytest.raises(ConfigError, match="can be made around other memory: KeyError"):
        plan(model, world_size=2)


def gather_halved(self: torch.Tensor, mesh: Any) -> Any:
    return (self * self.factor,), None  # type: ignore[attr-defined]


def show_gathered(self: torch.Tensor, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    return None if out is not None else (gathered[0], gathered)


@on_ranks(3, kind=[nn.Parameter, Marked])
def test_functions_of_one_parameter_gather_its_pieces(kind: Any) -> None:
    whole = random_input(0, 4, 4)
    param = kind(whole.clone())
    param.factor = 0.5
    param.fsdp_pre_all_gather = gather_halved.__get__(param)
    param.fsdp_post_all_gather = show_gathered.__get__(param)
    model = linear_with(param)
    fully_shard(model)
    x = batch(0, 0, 4)
    torch.testing.assert_close(model(x), F.linear(x, whole / 2))
    model(x).sum().backward()
    assert full(model.weight.grad).shape == (4, 4)


def test_one_function_of_the_two_is_not_enough() -> None:
    param = nn.Parameter(torch.zeros(4, 4))
    param.fsdp_pre_all_gather = gather_halved.__get__(param)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="which a flat buffer cannot hold") as caught:
        plan(linear_with(param), world_size=2)
    assert "both" in str(caught.value.fix)


class Fickle(TwoPartWeight):
    """Gathers something else each time."""

    asked = 0

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        Fickle.asked += 1
        dtype = torch.float32 if Fickle.asked <= mesh.size() else torch.float64
        return (self._values.to(dtype), self._values), None


class Strange(Fickle):
    def fsdp_pre_all_gather(self, mesh: Any, module: Any) -> Any:  # type: ignore[override]
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Fickle, "Fickle: fsdp_pre_all_gather returned [2, 4] float64, [2, 4] float32, and [2, 4] float32"),
        (Strange, "Strange: fsdp_pre_all_gather takes 2 arguments"),
    ],
)
@on_ranks(2)
def test_a_class_that_breaks_the_protocol_is_named_with_its_parameter(kind: type, message: str) -> None:
    Fickle.asked = 0
    model = int8_model([(4, 4)], kind)
    fully_shard(model, reshard_after_forward=True)
    dist.barrier()

    def run_twice() -> None:
        for _ in range(2):
            model(batch(0, 0, 4)).sum().backward()
            dist.barrier()

    with pytest.raises(UsageError) as caught:
        run_twice()
    assert message in str(caught.value) and "parameter '0.weight'" in str(caught.value)


@on_ranks(2)
def test_a_state_that_would_not_follow_its_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match="sync_module_states does not send the state") as caught:
        fully_shard(seeded(Quantised, 0), sync_module_states=True)
    assert "layers.0.base.weight" in str(caught.value.at)
    model = seeded(Quantised, 0)
    fully_shard(model)
    other = seeded(Quantised, 1).layers[0].base.state_dict(keep_vars=True)
    model.layers[0].base.load_state_dict(other, assign=True)
    with pytest.raises(UsageError, match="was replaced by another Params4bit") as caught:
        model(batch(0, 0, WIDTH))
    assert "layers.0.base.weight" in str(caught.value.at)


# -- state of optimizers


def train_with_packed_state(folder: str, first: int, last: int) -> dict[str, torch.Tensor]:
    """Train from step ``first`` to ``last``, on the same inputs at any number of ranks; save after step 2."""
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), 0)
    fully_shard(model, policy={nn.Linear})
    optimizer = MeanSquares(model.parameters(), {"lr": 0.1})
    if first:
        get_optimizer_state_dict(model, optimizer)  # which makes state
        load_checkpoint(folder, model, optimizer)
    for step in range(first, last):
        model(batch(step, 0, 5)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and not first:
            save_checkpoint(folder, 2, model, optimizer)
    for state in optimizer.state.values():
        assert state[0] == {0.5: 4}
        assert type(state["squares"]) is RaggedDTensor and type(state["squares"].to_local()) is HalfState
    squares = {f"squares of {fqn}": optimizer.state[param]["squares"] for fqn, param in model.named_parameters()}
    return {fqn: full(value) for fqn, value in (squares | dict(model.named_parameters())).items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_packed_state_goes_on_where_it_was_at_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    expected = run_threads(train_with_packed_state, 2, str(tmp_path), 0, 4)[0]
    found = run_threads(train_with_packed_state, ranks, str(tmp_path), 2, 4)[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)

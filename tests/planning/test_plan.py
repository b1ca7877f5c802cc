"""Plans: which handles there are, what each owns and why, what it costs, and what is refused."""

import time
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from composable.dtensor.spec import ragged_spec
from composable.dtensor.tensor import RaggedDTensor
from composable.errors import ConfigError
from composable.ground.contract import contract, get_registry
from composable.ground.names import sibling_lines
from composable.planning import HandlePlan, ShardingStrategy, ShardOptions, ShardPlan, make_plan, mark_replaced, plan
from tests.models import MLP, Block, FrozenMixed, MixedDtypes, MLPBlock, TiedAcross, TiedWithin, TinyGPT


@contract()
def fully_shard(module: nn.Module) -> nn.Module:
    """Stand for the annotation: the registry entry alone."""
    return module


@contract(incompatible=("fully_shard",))
def replicate(module: nn.Module) -> nn.Module:
    return module


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shard_by_hand(module: nn.Module) -> None:
    """Do to the parameters of ``module`` what an earlier annotation would have done."""
    mesh = init_device_mesh("cpu", (1,))
    for fqn, original in list(module.named_parameters()):
        spec = ragged_spec(mesh, original.shape, original.dtype, (0, original.numel()))
        owner, _, name = fqn.rpartition(".")
        sharded = nn.Parameter(RaggedDTensor.wrap(original.detach().clone(), spec))
        setattr(module.get_submodule(owner), name, sharded)
        mark_replaced(original, fqn, module.get_submodule(owner), name)
    fully_shard(module)


def owned(shard_plan: ShardPlan) -> dict[str, list[str]]:
    """The FQNs of the parameters of each handle, by the FQN of its module."""
    return {", ".join(handle.module_fqns): [param.fqn for param in handle.params] for handle in shard_plan.handles}


def handle_at(shard_plan: ShardPlan, fqn: str) -> HandlePlan:
    return next(handle for handle in shard_plan.handles if handle.module_fqns == (fqn,))


# -- what is printed


def test_a_plan_by_policy_prints_its_tree_with_equal_siblings_in_one_line() -> None:
    assert_expected_inline(
        str(plan(TinyGPT(layers=4), policy={Block}, world_size=2, transport="shared_memory")),
        """\
TinyGPT: 5 handles over 2 ranks, transport shared_memory
  14,304 elements; per rank 28.1 KiB at rest; largest handle 12.9 KiB unsharded; padding 256 B
  (root) (TinyGPT): 5 params, 1,184 float32, 2.3 KiB per rank; root
    blocks.[0-3] (Block) x 4, each: 12 params, 3,280 float32, 6.4 KiB per rank, padding 64 B; policy: Block""",
    )


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 48)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in range(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def test_a_plan_folds_experts_of_layers_and_layers_between_others() -> None:
    layers = nn.Sequential(*(Experts() for _ in range(3)))
    folded = [
        "Sequential: 147 handles over 2 ranks, transport auto",
        "[0-2] (Experts) x 3, each: 2 params, 240 float32, 480 B per rank; policy: Experts",
        "[0-2].experts.[0-47] (Sequential) x 144, each: 4 params, 76 float32, 152 B per rank; policy: Sequential",
    ]
    lines = str(plan(layers, policy={Experts, nn.Sequential}, world_size=2)).splitlines()
    assert [lines[0], *(line.strip() for line in lines[2:4])] == folded
    assert not any("(" in line.partition(":")[0] for line in lines[4:])
    between = nn.Sequential(*(one for _ in range(48) for one in (nn.Linear(4, 4), nn.ReLU())))
    lines = str(plan(between, policy={nn.Linear}, world_size=2)).splitlines()
    assert [line.strip() for line in lines[2:]] == [
        "[0-94 by 2] (Linear) x 48, each: 2 params, 20 float32, 40 B per rank; policy: Linear"
    ]


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        ("0 1 3 5 6", "[0-1] x 2, each|[3-5 by 2] x 2, each|6"),
        ("2 1 0 0", "2|1|0|0"),
        ("a.0.x a.0.y a.1.x a.1.y a.3.x a.3.y", "a.[0-1].x x 2, each|a.[0-1].y x 2, each|a.3.x|a.3.y"),
        ("x.0 y.1 x.2 y.3 x.4 y.5", "x.[0-4 by 2] x 3, each|y.[1-5 by 2] x 3, each"),
        ("x.0 y.0 x.2 y.1", "x.0|y.0|x.2|y.1"),
        ("0.0 0.1 1.0 1.1 2.0", "[0-1].[0-1] x 4, each|2.0"),
        ("x.0.0 x.1.1", "x.0.0|x.1.1"),
        ("l08 l09 l10 l11", "l08|l09|l[10-11] x 2, each"),
        ("0,_1 1,_2", "0, 1|1, 2"),
    ],
)
def test_only_names_that_one_number_tells_apart_share_a_line(names: str, shown: str) -> None:
    lines = sibling_lines((name.replace("_", " "), "", "same") for name in names.split())
    assert lines == [f"{line}: same" for line in shown.split("|")]
    assert sibling_lines((name.replace("_", " "), "", name) for name in names.split())[-1].endswith(names.split()[-1])


def test_a_plan_without_policy_warns_that_nothing_can_overlap() -> None:
    assert_expected_inline(
        str(plan(TinyGPT(tied=True), world_size=4)),
        """\
TinyGPT: 1 handle over 4 ranks, transport auto
  7,232 elements; per rank 7.1 KiB at rest; largest handle 28.5 KiB unsharded; padding 256 B
  (root) (TinyGPT): 28 params (1 tied), 7,232 float32, 7.1 KiB per rank, padding 256 B; annotated
  no elements on a rank: 72% of parameters, on average
  warning: the whole model is one handle: nothing can overlap; pass a policy""",
    )


def test_a_plan_prints_frozen_parts_what_is_kept_and_what_is_ignored() -> None:
    model = FrozenMixed()
    fully_shard(model.trainable)
    assert_expected_inline(
        str(
            plan(
                model,
                policy=lambda module: isinstance(module, MLPBlock | nn.Linear),
                world_size=3,
                strategy="SHARD_GRAD_OP",
                ignored_params=[model.frozen.up.weight],
                ignored_modules=[model.frozen_tail],
            )
        ),
        """\
FrozenMixed: 5 handles over 3 ranks, transport auto
  360 elements; per rank 488 B at rest; largest handle 552 B unsharded; padding 24 B
  (root) (FrozenMixed): 4 params, 64 float32, 88 B per rank, padding 8 B; root; kept for backward
    frozen.up (Linear): 1 param, 16 float32 frozen, 24 B per rank, padding 8 B; policy: <lambda>; kept for backward
    frozen.down (Linear): 2 params, 136 float32 frozen, 184 B per rank, padding 8 B; policy: <lambda>; kept for backward
    lora.[0-1].base (Linear) x 2, each: 2 params, 72 float32 frozen, 96 B per rank; policy: <lambda>; kept for backward
  annotated before, left as they are: trainable
  ignored parameters: frozen_tail.up.weight, frozen_tail.up.bias, frozen_tail.down.weight and 2 more""",
    )


# -- which handle owns what


def test_a_policy_gives_handles_left_to_right_and_the_rest_to_the_root() -> None:
    shard_plan = plan(MLP(layers=2), policy={MLPBlock}, world_size=2)
    assert owned(shard_plan) == {
        "": ["inp.weight", "inp.bias", "out.weight", "out.bias"],
        "blocks.0": [f"blocks.0.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")],
        "blocks.1": [f"blocks.1.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")],
    }
    assert [handle.reason for handle in shard_plan.handles] == ["root", "policy: MLPBlock", "policy: MLPBlock"]


def test_picks_below_picks_nest() -> None:
    shard_plan = plan(TinyGPT(layers=1), policy=lambda module: isinstance(module, Block | nn.Linear), world_size=2)
    assert list(owned(shard_plan)) == [
        "", "blocks.0", "blocks.0.attn.qkv", "blocks.0.attn.proj", "blocks.0.mlp.0", "blocks.0.mlp.2", "head",
    ]  # fmt: skip
    assert owned(shard_plan)["blocks.0"] == [
        f"blocks.0.{norm}.{name}" for norm in ("norm1", "norm2") for name in ("weight", "bias")
    ]


def test_a_pick_whose_parameters_all_have_deeper_handles_gets_none() -> None:
    shard_plan = plan(MLP(layers=1), policy=lambda module: isinstance(module, MLPBlock | nn.Linear), world_size=2)
    assert list(owned(shard_plan)) == ["inp", "blocks.0.up", "blocks.0.down", "out"]


def test_a_parameter_tied_within_a_handle_is_listed_once_with_its_other_names() -> None:
    shard_plan = plan(TiedWithin(), policy={TiedWithin.Pair}, world_size=2)
    first = handle_at(shard_plan, "blocks.0").params[0]
    assert (first.fqn, first.shared_fqns) == ("blocks.0.first.weight", ("blocks.0.second.weight",))
    assert [param.fqn for param in handle_at(shard_plan, "blocks.0").params] == [
        "blocks.0.first.weight", "blocks.0.first.bias", "blocks.0.second.bias",
    ]  # fmt: skip


def test_a_parameter_tied_across_handles_belongs_to_their_lowest_common_ancestor() -> None:
    tied = "pair.blocks.0.up.weight"
    below_pair = plan(TiedAcross(), policy=lambda module: isinstance(module, MLPBlock | TiedAcross.Pair), world_size=2)
    assert owned(below_pair)["pair"] == [tied]
    below_root = plan(TiedAcross(), policy={MLPBlock}, world_size=2)
    assert tied in owned(below_root)[""]
    assert tied not in owned(below_root)["pair.blocks.0"]
    model = MLP(layers=2)
    model.blocks[1].up = model.blocks[0].up
    assert "blocks.0.up.weight" in owned(plan(model, policy={MLPBlock}, world_size=2))[""]


def test_parameters_of_one_handle_are_split_by_dtype_and_by_requires_grad() -> None:
    mixed = plan(MixedDtypes(), policy={MixedDtypes.MixedBlock}, world_size=2)
    block = handle_at(mixed, "blocks.0")
    assert [(buffer.dtype, [span.fqn for span in buffer.layout.spans]) for buffer in block.buffers] == [
        (torch.bfloat16, ["blocks.0.low.weight", "blocks.0.low.bias"]),
        (torch.float32, ["blocks.0.norm.weight", "blocks.0.norm.bias"]),
        (torch.float64, ["blocks.0.high.weight", "blocks.0.high.bias"]),
    ]
    lora = handle_at(plan(FrozenMixed(), policy=lambda module: hasattr(module, "base"), world_size=2), "lora.0")
    assert [buffer.requires_grad for buffer in lora.buffers] == [True, False]


def test_a_module_in_two_places_or_in_itself_is_planned_once_under_both_names() -> None:
    model = MLP(layers=2)
    model.blocks[1] = model.blocks[0]
    model.blocks[0].again = model.blocks[0]
    shard_plan, members = make_plan(model, ShardOptions(world_size=2, policy={MLPBlock}))
    assert list(owned(shard_plan)) == ["", "blocks.0"]
    assert handle_at(shard_plan, "blocks.0").params[0].shared_fqns == ("blocks.1.up.weight",)
    assert members[1].params["blocks.0.up.weight"].owners == [(model.blocks[0].up, "weight")]


def test_what_is_odd_is_planned_too() -> None:
    module = nn.Linear(4, 4)
    module.table = nn.Parameter(torch.arange(4), requires_grad=False)
    module.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))
    made = plan(module, world_size=2)
    assert [buffer.dtype for buffer in made.handles[0].buffers] == [torch.float32, torch.int64, torch.float64]
    # What is frozen is not reduced, what is empty not gathered either.
    (found,) = made.expected_collectives()
    assert (found.all_gathers, found.reduce_scatters) == (2, 1)
    assert plan(nn.ReLU(), world_size=2).handles == ()
    modules = nn.ModuleList([nn.Linear(2, 2, bias=False)])
    modules.forward = lambda x: modules[0](x)  # type: ignore[assignment]
    assert owned(plan(modules, world_size=2)) == {"": ["0.weight"]}
    shard_plan, members = make_plan([nn.Linear(2, 2), nn.LayerNorm(2)], ShardOptions(world_size=2))
    assert owned(shard_plan) == {"0, 1": ["0.weight", "0.bias", "1.weight", "1.bias"]}
    assert [len(one.modules) for one in members] == [2]
    assert str(shard_plan).startswith("Linear + LayerNorm: 1 handle over 2 ranks")
    assert "\n  0, 1 (Linear, LayerNorm): 4 params" in str(shard_plan)


# -- what is left alone


def test_what_is_ignored_is_left_under_all_its_names_and_in_all_calls() -> None:
    model = TinyGPT(tied=True)
    made = plan(
        model, policy={Block}, world_size=2, ignored_params=[model.head.weight], ignored_modules=iter(model.blocks[:1])
    )
    assert list(owned(made)) == ["", "blocks.1"] and "tokens.weight" not in owned(made)[""]
    below = [f"blocks.0.{fqn}" for fqn, _ in model.blocks[0].named_parameters()]
    assert sorted(made.ignored_fqns) == sorted(["tokens.weight", *below])
    ignored = {model.blocks[0].norm1.weight, model.head.weight}
    names = [plan(part, world_size=2, ignored_params=ignored).ignored_fqns for part in (*model.blocks, model)]
    assert names == [("norm1.weight",), (), ("tokens.weight", "blocks.0.norm1.weight")]


def test_a_replicated_module_is_left_with_the_fully_sharded_modules_in_it() -> None:
    model = TinyGPT(layers=2)
    fully_shard(model.blocks[0].attn)
    replicate(model.blocks[0])
    shard_plan = plan(model, policy={Block}, world_size=2)
    assert list(owned(shard_plan)) == ["", "blocks.1"]
    assert shard_plan.kept_fqns == ()


def test_a_module_annotated_before_is_left_and_not_entered() -> None:
    model = TinyGPT(layers=2)
    fully_shard(model.blocks[0])
    replicate(model.blocks[0].mlp)
    shard_plan = plan(model, policy=lambda module: isinstance(module, Block | nn.LayerNorm), world_size=2)
    assert list(owned(shard_plan)) == ["", "blocks.1", "blocks.1.norm1", "blocks.1.norm2", "norm"]
    assert shard_plan.kept_fqns == ("blocks.0",) and not shard_plan.warnings
    assert shard_plan.ignored_fqns == ()


def test_sharded_parameters_are_not_planned_again(one_rank: None) -> None:
    model = MLP(layers=1)
    shard_by_hand(model.blocks[0])
    outer = nn.Sequential(model.blocks[0].up, nn.Linear(2, 2))
    assert owned(plan(outer, world_size=1)) == {"": ["1.weight", "1.bias"]}


def test_planning_leaves_no_trace() -> None:
    model = TinyGPT()
    before = [(module, dict(module.__dict__)) for module in model.modules()]
    params = list(model.parameters())
    plan(model, policy={Block}, world_size=2)
    assert all(module.__dict__ == attributes for module, attributes in before)
    assert all(a is b and a.__dict__ == {} for a, b in zip(model.parameters(), params, strict=True))
    assert not get_registry(model)


def test_a_model_on_the_meta_device_is_planned_without_a_process_group() -> None:
    with torch.device("meta"):
        model = TinyGPT()
    assert not dist.is_initialized()
    assert plan(model, policy={Block}, world_size=512) == plan(TinyGPT(), policy={Block}, world_size=512)


# -- reshard_after_forward and strategy


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, [None, True, True]),
        ({"reshard_after_forward": True}, [True, True, True]),
        ({"reshard_after_forward": False}, [False, False, False]),
        ({"strategy": "FULL_SHARD"}, [True, True, True]),
        ({"strategy": ShardingStrategy.FULL_SHARD}, [True, True, True]),
        ({"strategy": "SHARD_GRAD_OP"}, [False, False, False]),
    ],
)
def test_a_strategy_is_a_preset_of_reshard_after_forward(arguments: dict[str, object], expected: list[object]) -> None:
    shard_plan = plan(MLP(layers=2), policy={MLPBlock}, world_size=2, **arguments)  # type: ignore[arg-type]
    assert [handle.reshard_after_forward for handle in shard_plan.handles] == expected


# -- what it costs


def test_bytes_at_rest_are_shards_and_the_optimizer_states_of_what_is_trained() -> None:
    module = nn.Linear(8, 8)
    module.bias.requires_grad_(requires_grad=False)
    shard_plan = plan(module, world_size=2)
    assert shard_plan.shard_bytes == 4 * (32 + 4)
    assert shard_plan.bytes_per_rank_at_rest() == 4 * (32 + 4) + 2 * 4 * 32
    assert shard_plan.bytes_per_rank_at_rest(1, torch.float64) == 4 * (32 + 4) + 8 * 32
    assert shard_plan.bytes_per_rank_at_rest(0) == shard_plan.shard_bytes


def test_collectives_are_two_all_gathers_and_a_reduce_scatter_or_one_all_gather_less() -> None:
    shard_plan = plan(MLP(layers=1), policy={MLPBlock}, world_size=2)
    root, block = shard_plan.expected_collectives()
    assert (root.all_gathers, root.reduce_scatters) == (1, 1)
    assert (block.all_gathers, block.reduce_scatters) == (2, 1)
    whole = shard_plan.handles[1].buffer_bytes
    assert (block.all_gather_bytes, block.reduce_scatter_bytes) == (2 * whole, whole)
    assert shard_plan.expected_collectives(is_root=False)[0].all_gathers == 2


# -- the digest


@pytest.mark.parametrize(
    "change",
    [
        lambda: plan(TinyGPT(), policy={Block}, world_size=3),
        lambda: plan(TinyGPT(), policy={Block}, world_size=4, transport="shared_memory"),
        lambda: plan(TinyGPT(), policy={Block}, world_size=4, reshard_after_forward=True),
        lambda: plan(TinyGPT(), policy={Block, nn.LayerNorm}, world_size=4),
        lambda: plan(TinyGPT(layers=3), policy={Block}, world_size=4),
        lambda: plan(TinyGPT(tied=True), policy={Block}, world_size=4),
        lambda: plan(TinyGPT().bfloat16(), policy={Block}, world_size=4),
        lambda: plan(TinyGPT().requires_grad_(requires_grad=False), policy={Block}, world_size=4),
        lambda: plan(TinyGPT(), policy={Block}, world_size=4, align={"tokens.weight": "tensor"}),
    ],
)
def test_every_difference_that_matters_changes_the_digest(change: Callable[[], ShardPlan]) -> None:
    usual, again = (plan(TinyGPT(), policy={Block}, world_size=4) for _ in range(2))
    assert change().digest() != usual.digest() == again.digest()
    assert len(usual.digest()) == 64


# -- speed


def least_s(call: Callable[[], object]) -> float:
    """Return the processor time of a call, the least of three."""
    times = []
    for _ in range(3):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def test_the_time_of_planning_rises_no_faster_than_the_layers() -> None:
    def planning_s(layers: int) -> float:
        with torch.device("meta"):
            model = TinyGPT(layers=layers)
        return least_s(lambda: str(plan(model, policy={Block}, world_size=8)))

    # 0.4 s on an idle core, ten times as long as a tenth of them; quadratic work would take a hundred times as long.
    assert planning_s(1000) < 40 * planning_s(100)


# -- what is refused


def test_a_module_of_a_list_inside_another_is_refused() -> None:
    model = MLP(layers=1)
    for number, modules in enumerate([[model, model.blocks[0].up], [model.blocks[0].up, model]]):
        with pytest.raises(ConfigError, match="inside another one of the same call") as caught:
            plan(modules, world_size=2)
        assert caught.value.at == f"module '{number}.blocks.0.up' (Linear)"


def test_a_module_below_an_annotated_one_is_refused(one_rank: None) -> None:
    model = MLP(layers=1)
    shard_by_hand(model)
    with pytest.raises(ConfigError, match="an earlier annotation shards every parameter of this module"):
        plan(model.blocks[0], world_size=1)


def test_a_tie_to_a_module_annotated_before_names_both_places(one_rank: None) -> None:
    model = TinyGPT(tied=True)
    shard_by_hand(model.tokens)
    with pytest.raises(ConfigError) as caught:
        plan(model, policy={Block}, world_size=1)
    assert_expected_inline(
        str(caught.value),
        """\
parameter 'head.weight' is tied to 'tokens.weight', which an earlier annotation has taken and sharded
  at:  rank 0, parameter 'head.weight' [32, 16] float32
  fix: annotate the module around both of them, with a policy, or all modules that share it in one list""",
    )


def test_a_tie_to_a_parameter_that_an_earlier_annotation_ignores_names_both_places() -> None:
    model = TinyGPT(tied=True)
    fully_shard(model.head)  # the stand-in leaves the weight as it is, as if ignored
    with pytest.raises(ConfigError) as caught:
        plan(model, world_size=1)
    assert_expected_inline(
        str(caught.value),
        """\
parameter 'tokens.weight' is tied to 'head.weight', which an earlier annotation ignores
  at:  parameter 'tokens.weight' [32, 16] float32
  fix: name it in ignored_params here too, or in neither call""",
    )


class Quantised(torch.Tensor):
    pass


class PackedParameter(nn.Parameter):
    def size(self, dim=None):
        return torch.Size([4])


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (nn.Parameter(torch.zeros(2).as_subclass(Quantised)), "Quantised is a tensor subclass"),
        (PackedParameter(torch.zeros(2)), "PackedParameter is a tensor subclass"),
        (nn.UninitializedParameter(), "a lazy parameter has no shape yet"),
        (nn.Parameter(torch.eye(2).to_sparse()), "not dense"),
        (nn.Parameter(torch.zeros(2, dtype=torch.complex64)), "complex parameters"),
    ],
)
def test_a_parameter_that_a_flat_buffer_cannot_hold_is_refused_by_name(param: nn.Parameter, message: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].odd = param
    with pytest.raises(ConfigError, match=message) as caught:
        plan(model, world_size=2)
    assert caught.value.at is not None
    assert caught.value.at.startswith("parameter '0.odd' [")
    assert plan(model, world_size=2, ignored_params=[param]).ignored_fqns == ("0.odd",)


@pytest.mark.parametrize("placement", [Replicate(), Shard(1)])
def test_a_plan_says_how_tensor_parallelism_has_split_a_parameter(one_rank: None, placement: Placement) -> None:
    module, mesh = nn.Linear(2, 2), init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    module.weight = nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [placement]))
    text = {"R": "Replicate()", "S": "Shard(dim=1)"}[str(placement)[0]]
    assert plan(module, world_size=2).handles[0].params[0].notes == (f"over tp {text}",)


def test_a_sum_that_is_still_to_be_taken_is_refused(one_rank: None) -> None:
    module, mesh = nn.Linear(2, 2), init_device_mesh("cpu", (1,))
    module.weight = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, [Partial()]))
    with pytest.raises(ConfigError, match=r"placed .Partial.* cannot be sharded again") as caught:
        plan(module, world_size=2)
    assert caught.value.at == "rank 0, parameter 'weight' [2, 2] float32"


MODEL, LINEAR = MLP(), nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": "linear"}, "str is not an nn.Module"),
        ({"module": [LINEAR, 3]}, "int is not an nn.Module"),
        ({"module": []}, "the list of modules is empty"),
        ({"module": nn.ModuleDict({"a": LINEAR})}, "ModuleDict has no forward"),
        ({"module": nn.ParameterList([torch.zeros(2)])}, "ParameterList has no forward"),
        ({"module": [LINEAR, nn.ModuleList()]}, "ModuleList has no forward"),
        ({"module": [LINEAR, LINEAR]}, "in the list twice"),
        ({"module": fully_shard(MLP())}, "fully_shard is already on this module"),
        ({"module": replicate(MLP())}, "replicate is already on this module"),
        (
            {"module": nn.Sequential(LINEAR, nn.Dropout()), "policy": {nn.Dropout}},
            r"ModuleWrapPolicy\(\{Dropout\}\) picks only",
        ),
        ({"unused_gradients": None}, "unused_gradients is None"),
        ({"world_size": 0}, "world_size is 0"),
        ({"strategy": "NO_SUCH"}, "strategy is 'NO_SUCH'\n  fix: pass one of 'FULL_SHARD', 'SHARD_GRAD_OP'"),
        ({"strategy": "FULL_SHARD", "reshard_after_forward": True}, "strategy and reshard_after_forward"),
        ({"reshard_after_forward": 3}, "reshard_after_forward is 3, and 2 ranks share the parameters"),
        ({"align": {"nothing": "tensor"}}, r"align names parameters that no handle owns: \['nothing'\]"),
        ({"align": {"inp.weight": "rows"}}, "align of 'inp.weight' is 'rows'"),
        ({"policy": "Block"}, "policy is 'Block'"),
        ({"policy": {Block}}, "picks nothing"),
        ({"module": [MLP(), MLP()], "policy": {MLPBlock}}, "policy with a list of modules"),
        ({"ignored_modules": [MODEL]}, "has the annotated module itself"),
        ({"strategy": ShardingStrategy.NO_SHARD}, "NO_SHARD keeps gradients and optimizer state whole"),
        ({"strategy": "FULL_SHARD", "replicas": 2}, "FULL_SHARD keeps one copy .*\n  fix: pass HYBRID_SHARD or"),
        ({"ignored_params": ["inp.weight"]}, r"ignored_params\[0\] is str"),
        ({"ignored_modules": nn.ModuleList()}, "ignored_modules is one ModuleList"),
        ({"ignored_modules": ["inp"]}, r"ignored_modules\[0\] is str"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**{"module": MODEL, "world_size": 2, **arguments})  # type: ignore[arg-type]

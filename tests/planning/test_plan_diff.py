"""In what two plans differ: every difference is there, nothing else, and it prints."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from composable import ConfigError, CPUOffloadPolicy, MixedPrecisionPolicy, ShardPlan, plan
from tests.models import MLP, Block, MLPBlock, TinyGPT
from tests.planning.random_plans import random_plan


def gpt(layers: int = 3, policy: object = None, **given: object) -> ShardPlan:
    arguments = {"world_size": 4, "ranks_per_host": 2, **given}
    model = TinyGPT(layers=layers, tied=bool(arguments.pop("tied", False)))
    return plan(model, policy=policy or {Block}, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(60))
def test_a_plan_does_not_differ_from_one_that_is_made_alike(seed: int) -> None:
    found = random_plan(seed).diff(ShardPlan.from_json(random_plan(seed).to_json()))
    assert found.is_empty and not found
    assert str(found) == "the plans are alike"


@pytest.mark.parametrize("seed", range(60))
def test_plans_of_other_models_differ_both_ways(seed: int) -> None:
    one, other = random_plan(seed), random_plan(seed + 1000)
    found, back = one.diff(other), other.diff(one)
    is_alike = one == other and one.transport == other.transport and one.hosts == other.hosts
    assert bool(found) == bool(back) == (not is_alike)
    assert found.added == back.removed and found.params_added == back.params_removed
    assert {change.name for change in found.figures} == {change.name for change in back.figures}
    assert {(move.before, move.after) for move in found.moved} == {(move.after, move.before) for move in back.moved}
    assert str(found) and str(back)


@pytest.mark.parametrize(
    "change",
    [
        lambda: gpt(world_size=2),
        lambda: gpt(replicas=2),
        lambda: gpt(ranks_per_host=4),
        lambda: gpt(transport="point_to_point"),
        lambda: gpt(layers=4),
        lambda: gpt(policy={Block, nn.LayerNorm}),
        lambda: gpt(policy=lambda module: isinstance(module, Block)),
        lambda: gpt(reshard_after_forward=False),
        lambda: gpt(unused_gradients="zero"),
        lambda: gpt(tied=True),
        lambda: gpt(align={"tokens.weight": "tensor"}),
        lambda: gpt(align={"tokens.weight": 1}),
        lambda: gpt(mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16)),
        lambda: gpt(mp_policy=MixedPrecisionPolicy(skipped_module_classes=(nn.LayerNorm,))),
        lambda: gpt(offload_policy=CPUOffloadPolicy()),
        lambda: replace(gpt(), kept_fqns=("blocks.0",)),
        lambda: replace(gpt(), ignored_fqns=("blocks.0.bias",)),
        lambda: replace(gpt(), handles=gpt().handles[::-1]),
        lambda: replace(gpt(), class_names=("GPT",)),
    ],
)
def test_every_difference_is_found(change: Callable[[], ShardPlan]) -> None:
    assert gpt().diff(change())


def test_parameters_that_another_policy_moves_are_named_with_both_handles() -> None:
    before, after = plan(MLP(layers=1), world_size=2), plan(MLP(layers=1), world_size=2, policy={MLPBlock})
    found = before.diff(after)
    assert [(move.name, move.before, move.after) for move in found.moved] == [
        (f"blocks.0.{name}", "(root)", "blocks.0") for name in ("up.weight", "up.bias", "down.weight", "down.bias")
    ]
    assert [handle.name for handle in found.added] == ["blocks.0"] and found.removed == ()
    assert not found.params_added and not found.params_removed


def test_a_difference_that_is_only_where_parameters_are_cut_is_said() -> None:
    # Padding at the end, or between parameters: as many bytes.
    before = gpt()
    handle = before.handles[1]
    spans = handle.buffers[0].layout.spans
    last = replace(spans[-1], start=spans[-1].start + 1, stop=spans[-1].stop + 1)
    layout = replace(handle.buffers[0].layout, spans=(*spans[:-1], last))
    other = replace(handle, buffers=(replace(handle.buffers[0], layout=layout),))
    found = before.diff(replace(before, handles=(before.handles[0], other, *before.handles[2:])))
    assert str(found) == "handle blocks.0 changed: where parameters are cut changes"


def test_a_parameter_may_have_bytes_in_its_name() -> None:
    model = nn.Sequential()
    model.add_module("bytes", nn.Linear(3, 2, bias=False))
    before = after = plan(model, world_size=1)
    (handle,) = after.handles
    params = (replace(handle.params[0], shape=torch.Size((2, 4)), requires_grad=False),)
    text = str(before.diff(replace(after, handles=(replace(handle, params=params),))))
    assert "bytes.weight shape (2, 3) -> (2, 4); bytes.weight requires_grad True -> False" in text


def test_handles_and_parameters_in_another_order_are_said() -> None:
    before = gpt(layers=1)
    (swapped,) = before.diff(replace(before, handles=before.handles[::-1])).settings
    assert (swapped.name, swapped.after) == ("order of handles", ("blocks.0", "(root)"))
    handle = replace(before.handles[1], params=before.handles[1].params[::-1])
    (changed,) = before.diff(replace(before, handles=(before.handles[0], handle))).changed
    assert [change.name for change in changed.changes] == ["order of parameters"]


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="other is 'plan'"):
        gpt().diff("plan")  # type: ignore[arg-type]


def test_a_plan_for_more_ranks_prints_figures_and_equal_siblings_in_one_line() -> None:
    assert_expected_inline(
        str(gpt().diff(gpt(world_size=8, ranks_per_host=4))),
        """\
world_size 4 -> 8
hosts 2 of 2 ranks -> 2 of 4 ranks
bytes at rest 32.4 KiB -> 16.2 KiB (-50.0%)
bytes at the peak 109.2 KiB -> 91.4 KiB (-16.3%)
bytes sent in a step 93.8 KiB -> 109.5 KiB (+16.7%)
bytes sent inside the host 46.9 KiB -> 82.1 KiB (+75.0%)
bytes sent to other hosts 46.9 KiB -> 27.4 KiB (-41.7%)
handle (root) changed: bytes per rank 1.2 KiB -> 592 B (-50.0%)
handle blocks.[0-2] changed x 3, each: bytes per rank 3.2 KiB -> 1.6 KiB (-50.0%)""",
    )


def test_a_plan_of_a_larger_model_with_another_policy_prints_what_is_new_and_moved() -> None:
    assert_expected_inline(
        str(gpt().diff(gpt(layers=5, policy={Block, nn.LayerNorm}, ranks_per_host=None))),
        """\
hosts 2 of 2 ranks -> not known
elements 11,024 -> 17,584
bytes at rest 32.4 KiB -> 51.8 KiB (+59.5%)
bytes at the peak 109.2 KiB -> 121.3 KiB (+11.0%)
collectives of a step 11 -> 50
bytes sent in a step 93.8 KiB -> 151.9 KiB (+61.8%)
bytes sent inside the host 46.9 KiB -> not known
bytes sent to other hosts 46.9 KiB -> not known
handle blocks.0.norm[1-2] added x 2, each: 2 params, 32 float32, 32 B per rank; policy: LayerNorm
handle blocks.1.norm[1-2] added x 2, each: 2 params, 32 float32, 32 B per rank; policy: LayerNorm
handle blocks.2.norm[1-2] added x 2, each: 2 params, 32 float32, 32 B per rank; policy: LayerNorm
handle blocks.3 added: 8 params, 3,216 float32, 3.2 KiB per rank, padding 64 B; policy: Block
handle blocks.3.norm[1-2] added x 2, each: 2 params, 32 float32, 32 B per rank; policy: LayerNorm
handle blocks.4 added: 8 params, 3,216 float32, 3.2 KiB per rank, padding 64 B; policy: Block
handle blocks.4.norm[1-2] added x 2, each: 2 params, 32 float32, 32 B per rank; policy: LayerNorm
handle norm added: 2 params, 32 float32, 32 B per rank; policy: LayerNorm
handle (root) changed: bytes per rank 1.2 KiB -> 1.1 KiB (-2.7%); bytes unsharded 4.6 KiB -> 4.5 KiB (-2.7%)
handle blocks.[0-2] changed x 3, each: bytes per rank 3.2 KiB -> 3.2 KiB (-1.9%); bytes unsharded 12.9 KiB -> 12.6 KiB (-1.9%)
parameters moved to norm: 2 of (root)
parameters moved to blocks.0.norm[1-2] x 2, each: 2 of blocks.0
parameters moved to blocks.1.norm[1-2] x 2, each: 2 of blocks.1
parameters moved to blocks.2.norm[1-2] x 2, each: 2 of blocks.2
parameters added: blocks.3.attn.qkv.weight, blocks.3.attn.qkv.bias, blocks.3.attn.proj.weight and 21 more""",
    )


def test_a_plan_with_other_options_prints_them() -> None:
    other = gpt(
        tied=True,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16),
        offload_policy=CPUOffloadPolicy(),
        reshard_after_forward=False,
        align={"blocks.1.mlp.0.weight": "tensor"},
    )
    assert_expected_inline(
        str(gpt().diff(other)),
        """\
mp_policy none -> param_dtype=bfloat16
offload_policy none -> shards, gradients and optimizer state rest in pinned host memory
elements 11,024 -> 10,512
bytes at rest 32.4 KiB -> 0 B (-100.0%)
bytes at rest on the host 0 B -> 33.8 KiB
bytes at the peak 109.2 KiB -> 43.4 KiB (-60.3%)
collectives of a step 11 -> 8
bytes sent in a step 93.8 KiB -> 33.8 KiB (-64.0%)
bytes sent inside the host 46.9 KiB -> 16.9 KiB (-64.0%)
bytes sent to other hosts 46.9 KiB -> 16.9 KiB (-64.0%)
handle (root) changed: reshard_after_forward none -> False; bytes per rank 1.2 KiB -> 672 B (-43.2%); bytes unsharded 4.6 KiB -> 1.3 KiB (-71.6%); buffers (float32) -> (float32 as bfloat16 reduced in bfloat16); tokens.weight shared_fqns none -> (head.weight)
handle blocks.0 changed: reshard_after_forward True -> False; bytes unsharded 12.9 KiB -> 6.4 KiB (-50.0%); buffers (float32) -> (float32 as bfloat16 reduced in bfloat16)
handle blocks.1 changed: reshard_after_forward True -> False; bytes per rank 3.2 KiB -> 4.2 KiB (+29.1%); bytes unsharded 12.9 KiB -> 8.3 KiB (-35.4%); padding bytes 64 B -> 3.8 KiB (+6000.0%); buffers (float32) -> (float32 as bfloat16 reduced in bfloat16); blocks.1.mlp.0.weight promise none -> whole on one rank; where parameters are cut changes
handle blocks.2 changed: reshard_after_forward True -> False; bytes unsharded 12.9 KiB -> 6.4 KiB (-50.0%); buffers (float32) -> (float32 as bfloat16 reduced in bfloat16)
parameters removed: head.weight""",
    )

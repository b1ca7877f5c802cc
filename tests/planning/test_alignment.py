"""Where parameters may be cut: what ``align`` and ``shard_placement_fn`` promise, print and refuse."""

import math
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from composable import plan
from composable.errors import ConfigError
from composable.planning import ShardPlan
from composable.planning.layout import FlatLayout, Span
from tests.models import Block, TinyGPT

quick = settings(max_examples=150, deadline=None, derandomize=True, database=None)
shapes = st.lists(st.lists(st.integers(0, 9), min_size=0, max_size=4).map(tuple), min_size=1, max_size=6)


class Bag(nn.Module):
    """Parameters of any shape; some lie in another order than that of their dims."""

    def __init__(self, shapes: list[tuple[int, ...]], are_reversed: list[bool]) -> None:
        super().__init__()
        for number, (shape, is_reversed) in enumerate(zip(shapes, are_reversed, strict=True)):
            value = torch.empty(shape[::-1], device="meta").permute(tuple(reversed(range(len(shape)))))
            self.register_parameter(f"p{number}", nn.Parameter(value if is_reversed else value.contiguous()))

    def forward(self) -> None: ...


def spans_of(shard_plan: ShardPlan) -> dict[str, tuple[Span, FlatLayout]]:
    return {
        span.fqn: (span, buffer.layout)
        for handle in shard_plan.handles
        for buffer in handle.buffers
        for span in buffer.layout.spans
    }


def owners(span: Span, layout: FlatLayout) -> torch.Tensor:
    """Return the rank that holds each element, in the parameter's shape."""
    return span.view_in(torch.arange(layout.numel)) // max(layout.shard_numel, 1)


def cut_indices(found: torch.Tensor, dim: int) -> set[int]:
    """Return the indices along ``dim`` before which another rank begins; every slice has one owner."""
    slices = found.movedim(dim, 0).flatten(1) if found.dim() > 1 else found.reshape(-1, 1)
    assert (slices == slices[:, :1]).all()
    first = slices[:, 0].tolist() if slices.shape[1] else []
    return {index for index in range(1, len(first)) if first[index] != first[index - 1]}


@quick
@given(shapes, st.integers(1, 40), st.data())
def test_every_promise_holds(shapes: list[tuple[int, ...]], world_size: int, data: st.DataObject) -> None:
    module = Bag(shapes, [data.draw(st.booleans()) for _ in shapes])
    aligns: dict[str, Any] = {}
    dims: dict[str, int] = {}
    for name, param in module.named_parameters():
        if param.dim() and data.draw(st.booleans()):
            dims[name] = data.draw(st.integers(-param.dim(), param.dim() - 1))
        else:
            aligns[name] = data.draw(st.sampled_from([None, "row", "element", "tensor", 1, 2, 5]))
    names = {id(param): name for name, param in module.named_parameters()}

    def place(param: nn.Parameter) -> Shard | None:
        name = names[id(param)]
        return Shard(dims[name]) if name in dims else None

    shard_plan = plan(
        module,
        world_size=world_size,
        align=lambda fqn, param: aligns.get(fqn) if module.get_parameter(fqn) is param else "no such value",
        shard_placement_fn=place,
    )
    for name, (span, layout) in spans_of(shard_plan).items():
        found = owners(span, layout)
        assert found.shape == module.get_parameter(name).shape
        assert not found.numel() or 0 <= found.min() <= found.max() < world_size
        wish = aligns.get(name)
        if name in dims:
            cut_indices(found, dims[name])
        elif wish == "tensor":
            assert found.unique().numel() <= 1
        elif isinstance(wish, int) and found.dim():
            assert all(index % wish == 0 for index in cut_indices(found, 0))


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_matrix_promised_by_columns_is_cut_between_them_at_any_cost(world_size: int) -> None:
    shard_plan = plan(nn.Linear(4, 7, bias=False), world_size=world_size, shard_placement_fn=lambda _: Shard(1))
    span, layout = spans_of(shard_plan)["weight"]
    assert cut_indices(owners(span, layout), 1)
    assert layout.shard_numel == -(-4 // world_size) * 7
    assert span.order == (1, 0)


def test_promises_are_printed_below_the_names_of_their_handles() -> None:
    def align(fqn: str, param: nn.Parameter) -> Any:
        return "tensor" if "norm" in fqn else 16 if fqn == "tokens.weight" else None

    def place(param: nn.Parameter) -> Shard | None:
        return None if param.dim() < 2 or param.shape[0] == 32 else Shard(param.shape[1] > 16)

    assert_expected_inline(
        str(plan(TinyGPT(), policy={Block}, world_size=2, align=align, shard_placement_fn=place)),
        """\
TinyGPT: 3 handles over 2 ranks, transport auto
  7,744 elements; per rank 15.2 KiB at rest; largest handle 12.9 KiB unsharded; padding 128 B
  (root) (TinyGPT): 5 params, 1,184 float32, 2.3 KiB per rank; root; cut between blocks of 16 rows: tokens.weight; cut between rows: positions.weight; whole on one rank: norm.weight, norm.bias
    blocks.[0-1] (Block) x 2, each: 12 params, 3,280 float32, 6.4 KiB per rank, padding 64 B; policy: Block; whole on one rank: norm1.weight, norm1.bias, norm2.weight and 1 more; cut between rows: attn.qkv.weight, attn.proj.weight, mlp.0.weight; cut between slices of dim 1: mlp.2.weight""",
    )


class Llama(nn.Module):
    """The parameters of some blocks of Llama 8B, in one handle."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        made = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
        for block in range(blocks):
            for number, shape in enumerate(made):
                self.register_parameter(f"m{block}_{number}", nn.Parameter(torch.empty(shape, device="meta")))
            for number in range(2):
                self.register_parameter(f"n{block}_{number}", nn.Parameter(torch.empty(4096, device="meta")))

    def forward(self) -> None: ...


# Of what is sent, the least is known: what does not fit into one shard.
@pytest.mark.parametrize(
    ("world_size", "blocks", "by_rows", "cut", "sent"),
    [
        *((8, 1, 44.2, 81, 43.3), (8, 2, 11.6, 81, 7.7), (8, 4, 3.8, 40, 3.8), (8, 8, 0.0, 0, 0.0)),
        *((3, 1, 20.5, 15, 2.6), (3, 2, 9.6, 17, 1.3), (3, 4, 5.1, 0, 0.0), (4, 1, 11.5, 81, 7.7), (4, 4, 0.0, 0, 0.0)),
    ],
)
def test_an_order_of_parameters_leaves_matrices_whole_or_nearly(
    world_size: int, blocks: int, by_rows: float, cut: int, sent: float
) -> None:
    model = Llama(blocks)
    before, made = plan(model, world_size=world_size), plan(model, world_size=world_size, align="matrix")
    assert before.matrices.sent_numel / before.matrices.numel == pytest.approx(by_rows / 100, abs=1e-3)
    assert made.matrices.sent_numel / made.matrices.numel == pytest.approx(sent / 100, abs=1e-3)
    text = f"whole matrices: {7 * blocks}, " + (f"{cut}% of matrices cut" if cut else "no matrix is cut")
    assert text in str(made) and ("own none" in str(made)) == (made.matrices.idle_ranks > 0) == (
        7 * blocks < world_size
    )
    assert made.padding_bytes <= made.numel * 4 / 100
    assert made == plan(Llama(blocks), world_size=world_size, align=lambda fqn, param: "matrix")


def test_a_plan_of_whole_matrices_says_what_is_cut() -> None:
    assert_expected_inline(
        str(plan(TinyGPT(), policy={Block}, world_size=4, align={"blocks.0.mlp.0.weight": "matrix"})),
        """\
TinyGPT: 3 handles over 4 ranks, transport auto
  7,744 elements; per rank 7.6 KiB at rest; largest handle 12.9 KiB unsharded; padding 64 B
  (root) (TinyGPT): 5 params, 1,184 float32, 1.2 KiB per rank; root
    blocks.0 (Block): 12 params, 3,280 float32, 3.2 KiB per rank; policy: Block; 67% of matrices cut, 13.8% not on their owner
    blocks.1 (Block): 12 params, 3,280 float32, 3.2 KiB per rank, padding 64 B; policy: Block
  whole matrices: 11, 72% of matrices cut, 22.4% not on their owner
  no elements on a rank: 67% of parameters, on average""",
    )


@quick
@given(shapes, st.integers(1, 9))
def test_an_order_is_bounded_in_padding_and_never_worse_than_the_given_one(
    shapes: list[tuple[int, ...]], world_size: int
) -> None:
    model = Bag(shapes, [False] * len(shapes))
    made = plan(model, world_size=world_size, align="matrix")
    total = sum(math.prod(shape) for shape in shapes)
    buffer = made.handles[0].buffers[0] if made.handles else None
    if buffer is None:
        return
    assert {span.fqn for span in buffer.layout.spans} == {name for name, _ in model.named_parameters()}
    assert all(one.stop <= other.start for one, other in pairwise(buffer.layout.spans))
    assert buffer.layout.padding_numel <= max(-total % world_size, total // 100)
    given = plan(model, world_size=world_size, align="element").matrices
    assert made.matrices.sent_numel <= given.sent_numel + given.cut_numel // 8


def test_owners_hold_most_and_share_the_work() -> None:
    # Rows of 64 x 64 matrices that are cut into 33 and 31 of 64 rows: nearly as much on both ranks.
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    owners = plan(model, policy={nn.Linear}, world_size=2).matrices.ranks
    assert sorted(owners.values()) == [0, 0, 0, 1, 1, 1]
    uneven = plan(model, policy={nn.Linear}, world_size=2, align=lambda fqn, param: 20).matrices
    assert set(uneven.ranks.values()) == {0} and uneven.idle_ranks == 1


def test_names_are_from_the_annotated_root_whatever_the_policy_picks() -> None:
    asked: list[str] = []
    model = TinyGPT(tied=True)
    plan(model, policy={Block}, world_size=2, align=lambda fqn, _: asked.append(fqn))
    assert sorted(asked) == sorted(fqn for fqn, _ in model.named_parameters())


def test_a_tied_parameter_may_be_named_by_any_of_its_names() -> None:
    model = TinyGPT(tied=True)
    by_first, by_second = (
        plan(model, world_size=3, align={name: "tensor"}) for name in ("tokens.weight", "head.weight")
    )
    assert by_first == by_second != plan(model, world_size=3)
    with pytest.raises(ConfigError, match=r"'tokens.weight': 'tensor', 'head.weight': 4"):
        plan(model, world_size=3, align={"tokens.weight": "tensor", "head.weight": 4})


def test_a_number_of_rows_goes_together_with_a_cut_of_the_first_dim() -> None:
    arguments: dict[str, Any] = {"world_size": 2, "shard_placement_fn": lambda _: Shard(0)}
    by_both = plan(nn.Linear(3, 8), align={"weight": 4}, **arguments)
    assert str(by_both.handles[0].params[0].promise) == "cut between blocks of 4 rows"
    assert plan(nn.Linear(3, 8), align={"weight": "row"}, **arguments) == plan(nn.Linear(3, 8), **arguments)


def test_a_promise_changes_the_digest_also_where_the_layout_is_the_same() -> None:
    linear = nn.Linear(8, 8, bias=False)
    plain, promised = (plan(linear, world_size=2, align=align) for align in ({}, {"weight": 1}))
    assert plain.handles[0].buffers == promised.handles[0].buffers
    assert plain.digest() != promised.digest()
    assert "cut between rows" in promised.compared_text().splitlines()[1]


# -- what is refused


def fail(*_: object) -> None:
    raise KeyError("weight")


AT = r"[^\n]*\n  at:  parameter 'weight' \[6, 4\] float32\n  fix: "


@pytest.mark.parametrize("wish", ["rows", 0, True, torch.ones(2)])
def test_an_align_that_is_none_is_refused_in_a_dict_and_from_a_function(wish: object) -> None:
    message = r"align of 'weight' is .*\n  fix: pass 'row', 'element', 'tensor', 'matrix' or a number of rows"
    for align in ({"weight": wish}, lambda fqn, _: wish):
        with pytest.raises(ConfigError, match=message):
            plan(nn.Linear(4, 6), world_size=2, align=align)  # type: ignore[arg-type]
    module = nn.Linear(4, 6)
    module.empty = nn.Parameter(torch.empty(0))
    with pytest.raises(ConfigError, match="align of 'empty' is"):
        plan(module, world_size=2, align={"empty": wish})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (Replicate(), "returned a .*Replicate"),
        (_StridedShard(0, split_factor=2), "returned a .*_StridedShard"),
        (0, "returned 0"),
        (Shard, "returned the class Shard"),
        (Shard(2), r"returned Shard\(2\) for a parameter of 2 dims"),
        (Shard(-3), r"returned Shard\(-3\) for a parameter of 2 dims"),
        (type("ShardPlacementResult", (), {})(), "returned a .*ShardPlacementResult for a parameter of 2 dims"),
    ],
)
def test_a_placement_that_cannot_be_had_is_refused_with_the_parameter(placement: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"shard_placement_fn {message}{AT}"):
        plan(nn.Linear(4, 6), world_size=2, shard_placement_fn=lambda _: placement)


@pytest.mark.parametrize("name", ["align", "shard_placement_fn"])
def test_a_function_that_raises_is_named_with_the_parameter(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} raised KeyError: 'weight'{AT}return None for") as caught:
        plan(nn.Linear(4, 6), world_size=2, **{name: fail})
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(("align", "dim"), [("tensor", 0), ("element", 1), ("row", 1), (2, -1)])
def test_wishes_that_contradict_each_other_are_refused(align: Any, dim: int) -> None:
    said = re.escape(f"align says {align!r} and shard_placement_fn says Shard({dim % 2})")
    with pytest.raises(ConfigError, match=f"{said}{AT}leave it out of one of them"):
        plan(nn.Linear(4, 6), world_size=2, align={"weight": align}, shard_placement_fn=lambda p: Shard(dim % p.dim()))

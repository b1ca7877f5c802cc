"""Where parameters may be cut: what ``align`` and ``shard_placement_fn`` promise, print and refuse."""

import re
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
    message = r"align of 'weight' is .*\n  fix: pass 'row', 'element', 'tensor' or a number of rows"
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

"""Ragged tensors against plain ones: the same arithmetic, whichever rank owns which elements."""

import copy
import io
import math
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._serialization import _streaming_load, _streaming_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, ones, zeros
from torch.distributed.tensor import randn as random_dtensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from composable import fully_shard
from composable.dtensor.gather import fallback_counts, strict_mode
from composable.dtensor.spec import ragged_spec
from composable.dtensor.tensor import RaggedDTensor
from composable.errors import ConfigError, UsageError
from composable.ground.torch_private import DTensorSpec, TensorMeta
from composable.planning.layout import RaggedShard, local_shape, order_of
from tests.models import seeded
from tests.ragged_pairs import CUTS, SHAPES, assert_equal, cpu_mesh, from_full, pairs, values
from tests.world import on_ranks, run_ranks, run_threads

FILLS = (zeros, ones)

# -- the placement and the spec


def test_a_placement_is_its_bounds() -> None:
    placement = RaggedShard((0, 3, 3, 8))
    assert placement == RaggedShard([0, 3, 3, 8]) and hash(placement) == hash(RaggedShard([0, 3, 3, 8]))
    assert placement != RaggedShard((0, 3, 4, 8)) and placement != Shard(0) and placement != Replicate()
    assert not placement.is_shard() and not placement.is_replicate() and not placement.is_partial()
    assert repr(placement) == "RaggedShard(bounds=(0, 3, 3, 8))"
    assert pickle.loads(pickle.dumps(placement)) == placement


@on_ranks(2)
def test_bounds_that_do_not_rise_from_zero_or_fit_mesh_and_shape_are_refused() -> None:
    mesh = cpu_mesh()
    for bounds in ((), (0,), (1, 4), (0, 4, 3)):
        with pytest.raises(ConfigError):
            RaggedShard(bounds)
    with pytest.raises(ConfigError, match="2 bounds for a mesh dim of 2 ranks"):
        ragged_spec(mesh, (4,), torch.float32, (0, 4))
    with pytest.raises(ConfigError, match="end before or after"):
        ragged_spec(mesh, (4,), torch.float32, (0, 2, 3))


# -- whole and piece


@on_ranks(world_size=[1, 2, 3, 4], cut=CUTS)
def test_whole_and_piece_hold_the_same_elements(cut: str) -> None:
    fallback_counts(reset=True)
    ragged, plain = pairs(cut)
    assert_equal(ragged, plain)
    rank = dist.get_rank()
    for r, p in zip(ragged, plain, strict=True):
        bounds = r._spec.layout.bounds
        piece = p.detach().reshape(-1)[bounds[rank] : bounds[rank + 1]]
        assert r.to_local().shape == local_shape(p.shape, bounds, rank)
        assert torch.equal(r.to_local().reshape(-1), piece)
        assert type(r) is RaggedDTensor and isinstance(r, nn.Parameter) and isinstance(r, DTensor)
        assert (r.shape, r.stride(), r.dtype, r.numel()) == (p.shape, p.stride(), p.dtype, p.numel())
        assert r.placements == (RaggedShard(bounds),) and r.device_mesh == cpu_mesh()
    assert fallback_counts(reset=True) == {}


@on_ranks(3, run=run_ranks)
def test_every_dtype_and_every_balance_of_pieces_is_gathered() -> None:
    world_size, mesh = dist.get_world_size(), cpu_mesh()
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool, torch.complex64):
        full = (torch.arange(24) % 5).to(dtype).view(6, 4)
        for bounds in ((0,) * world_size + (24,), (*(8 * min(rank, 3) for rank in range(world_size)), 24)):
            ragged = from_full(full, ragged_spec(mesh, (6, 4), dtype, bounds))
            assert torch.equal(ragged.full_tensor(), full) and ragged.full_tensor().dtype == dtype


def print_rank_local() -> list[str]:
    spec = ragged_spec(cpu_mesh(), (3, 2), torch.float32, (0, 4, 6))
    with strict_mode():
        return [repr(from_full(torch.arange(6.0).view(3, 2), spec))]


def test_printing_shows_the_piece_and_does_not_communicate() -> None:
    assert run_threads(print_rank_local, 2)[1] == [
        "RaggedDTensor(shape=[3, 2], local=tensor([[4., 5.]]), elements [4, 6) on rank 1, "
        "placements=(RaggedShard(bounds=(0, 4, 6)),))"
    ]


@on_ranks(world_size=[1, 3], cut=CUTS)
def test_gathering_and_unwrapping_are_differentiable(cut: str) -> None:
    ragged, plain = pairs(cut)
    weights = values(3)
    for r, p, w in zip(ragged, plain, weights, strict=True):
        (p * w).sum().backward()
        (r.full_tensor() * w).sum().backward()
        # Two uses: gradients add up.
        (r.redistribute(placements=[Replicate()]).to_local() * w).sum().backward()
        (r.to_local() * from_full(w, r._spec).to_local()).sum().backward()
        assert type(r.grad) is RaggedDTensor
        p.grad *= 3
        share = w / dist.get_world_size()
        (r.full_tensor(grad_placements=[Partial()]) * share).sum().backward()
        p.grad += w
    grads = [r.grad for r in ragged]
    assert_equal(grads, [p.grad for p in plain], rtol=1e-6, atol=1e-6)  # type: ignore[arg-type, misc]


@on_ranks(2)
def test_a_penalty_on_the_weights_has_the_right_gradient() -> None:
    ragged, plain = pairs("row")
    for params in (ragged, plain):
        sum(p.pow(2).sum() * 0.5 for p in params).backward()  # type: ignore[union-attr]
    for r, p in zip(ragged, plain, strict=True):
        assert r.grad is not None and torch.equal(r.grad.full_tensor(), p.grad)
        # Autograd stored a replicated gradient here, or a ragged one; optimizers take both.
    torch.optim.AdamW(ragged, foreach=True).step()
    torch.optim.AdamW(plain, foreach=True).step()
    assert_equal(ragged, plain)


# -- optimizers, clipping, zeroing


@on_ranks(3, dtype=[torch.bfloat16, torch.float16])
def test_norms_of_few_bits_are_rounded_once(dtype: torch.dtype) -> None:
    spec = ragged_spec(cpu_mesh(), (300,), dtype, (0, 100, 210, 300))
    for seed in range(20):
        full = torch.randn(300, generator=torch.Generator().manual_seed(seed)).to(dtype)
        found = torch._foreach_norm([from_full(full, spec), from_full(full * 2, spec)])
        expected = [torch.linalg.vector_norm(one.double()).to(dtype) for one in (full, full * 2)]
        assert [one.to_local() for one in found] == expected, seed


@on_ranks(3)
def test_norms_of_every_order_agree_on_every_rank_with_nan_and_inf() -> None:
    spec = ragged_spec(cpu_mesh(), (6,), torch.float32, (0, 4, 4, 6))
    full = torch.tensor([1.0, -3.0, 0.5, 2.0, 0.25, -8.0])
    for order in (0, 0.5, 1, 2, 3, math.inf, -math.inf):
        for bad in (None, math.nan, math.inf):
            for at in (0, 5):
                plain = full.clone()
                if bad is not None:
                    plain[at] = bad
                found = torch.linalg.vector_norm(from_full(plain, spec), order)
                expected = torch.linalg.vector_norm(plain, order)
                torch.testing.assert_close(found.full_tensor(), expected, equal_nan=True)  # type: ignore[attr-defined]
    # fp32 squares would overflow between ranks.
    large = torch.full((6,), 1e19)
    found = torch._foreach_norm([from_full(large, spec)])[0]
    torch.testing.assert_close(found.full_tensor(), large.norm())


@on_ranks(world_size=[2, 3])
def test_norms_over_dims_are_those_of_the_whole_wherever_it_is_cut() -> None:
    dice, mesh = random.Random(0), cpu_mesh()
    for seed in range(20):
        shape = [dice.randint(2, 5) for _ in range(dice.randint(2, 4))]
        full = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        inner = sorted(dice.choices(range(full.numel() + 1), k=mesh.size() - 1))
        ragged = from_full(full, ragged_spec(mesh, shape, full.dtype, (0, *inner, full.numel())))
        dims = dice.sample(range(len(shape)), dice.randint(1, len(shape)))
        order, keepdim = dice.choice([0.5, 1, 2, 3]), dice.random() < 0.5
        with strict_mode():
            found, expected = (torch.linalg.vector_norm(one, order, dims, keepdim) for one in (ragged, full))
        torch.testing.assert_close(found.full_tensor(), expected)  # type: ignore[attr-defined]


@on_ranks(4)
def test_the_scaler_looks_at_every_mesh_dim() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    grads: list[torch.Tensor] = []
    for dim, last in enumerate((1.0, math.inf)):
        spec = ragged_spec(grid, (4,), torch.float32, (0, 2, 4), mesh_dim=dim)
        full = torch.tensor([4.0, 4.0, 4.0, last])
        # Of the second, the fourth rank alone has the inf: its replica differs, as after an overflow.
        grads.append(from_full(full if dist.get_rank() == 3 else full.clamp(max=4.0), spec))
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor([0.25]))
    assert grads[0].full_tensor()[0].item() == 1.0  # type: ignore[attr-defined]
    assert found.item() == 1.0


# -- layouts are compared before anything is computed


@on_ranks(2, run=run_ranks)
def test_equal_sizes_of_other_elements_are_never_combined() -> None:
    mesh = cpu_mesh()
    full, other = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)), torch.arange(12.0).view(4, 3)
    cuts = {"halves": (0, 6, 12), "quarter": (0, 3, 12)}
    specs = {name: ragged_spec(mesh, (4, 3), torch.float32, bounds) for name, bounds in cuts.items()}
    a, equal = (from_full(value, specs["halves"]) for value in (full, other))
    c = from_full(other, specs["quarter"])
    # Equal local sizes on both ranks, another shape of the whole.
    b = from_full(other.view(3, 4), ragged_spec(mesh, (3, 4), torch.float32, (0, 6, 12)))
    with pytest.raises(RuntimeError, match="must match"):
        a + b
    fallback_counts(reset=True)
    added = [t.clone() for t in (a, equal)]
    torch._foreach_add_(added, [c, equal])
    assert torch.equal(added[0].full_tensor(), full + other) and torch.equal(added[1].full_tensor(), other + other)
    assert fallback_counts(reset=True) == {"aten._foreach_add_.List": 1}
    results = torch._foreach_mul([a, equal], [c, equal])
    assert [isinstance(result, RaggedDTensor) for result in results] == [False, True]
    assert torch.equal(results[0].full_tensor(), full * other) and torch.equal(results[1].full_tensor(), other * other)
    a.copy_(c)
    assert torch.equal(a.full_tensor(), other)


class _PlainCalls(TorchDispatchMode):
    """Counts the operations on pieces that those on ragged tensors are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if RaggedDTensor in types:
            with self:
                return RaggedDTensor.__torch_dispatch__(func, types, args, kwargs or {})
        self.count += 1
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_lists_of_pieces_are_one_call_and_a_list_may_have_a_tensor_of_factors() -> None:
    (ragged, plain), factors = pairs("row"), torch.arange(1.0, len(SHAPES) + 1)
    calls = []
    for lists in ([one.detach() for one in ragged], [one.detach() for one in plain]):
        with _PlainCalls() as mode:
            torch._foreach_mul_(lists, lists)
            calls.append(mode.count)
            torch._foreach_addcmul_(lists, lists, lists, factors)
    assert calls == [1, 1]
    assert_equal(ragged, plain)


@on_ranks(2, run=run_ranks)
def test_ragged_replicated_and_sharded_tensors_meet() -> None:
    ragged, plain = pairs("row")
    mesh = cpu_mesh()
    replicated = distribute_tensor(plain[1].detach().clone(), mesh, [Replicate()])
    sharded = distribute_tensor(plain[0].detach(), mesh, [Shard(0)])
    with torch.no_grad():
        got = torch._foreach_add([ragged[0], replicated], [ragged[0], replicated])
        assert [type(g) for g in got] == [RaggedDTensor, DTensor]
        assert torch.equal(got[1].full_tensor(), plain[1] * 2)
        fallback_counts(reset=True)
        with strict_mode():
            assert torch.equal((ragged[1] + replicated).full_tensor(), plain[1] * 2)
            assert torch.equal((replicated - ragged[1]).full_tensor(), plain[1] * 0)
        assert torch.equal((ragged[0] + sharded).full_tensor(), plain[0] * 2)
        # A replicated tensor changed by a ragged one stays whole on every rank.
        replicated.mul_(ragged[1])
        assert type(replicated) is DTensor and torch.equal(replicated.to_local(), plain[1] ** 2)
        assert set(fallback_counts(reset=True)) == {"aten.add.Tensor", "aten.mul_.Tensor"}
        copied = torch.zeros(37, 8)
        copied.copy_(ragged[0])
        assert torch.equal(copied, plain[0])
        assert nn.utils.get_total_norm([ragged[0], replicated.clone()]).full_tensor().isfinite()  # type: ignore[attr-defined]


@on_ranks(3, run=run_ranks, cut=CUTS)
def test_plain_operands_are_cut_like_the_whole_or_refused(cut: str) -> None:
    ragged, plain = pairs(cut)
    r, p = ragged[0].detach(), plain[0].detach()
    row, column, whole = torch.randn(8), torch.arange(37.0).view(37, 1), torch.arange(296.0).view(37, 8)
    with strict_mode():
        for other in (2, 2.5, torch.tensor(3.0), torch.tensor(2.0, dtype=torch.float64), row.sign(), column, whole):
            assert_equal(
                [r * other, other - r, r == other, torch.where(r > 0, r, other)],
                [p * other, other - p, p == other, torch.where(p > 0, p, other)],
            )
        assert_equal(
            [r.clone().add_(whole), r.clone().fill_(2), torch.add(r, whole, out=torch.empty_like(r))],
            [p + whole, p * 0 + 2, p + whole],
        )
        assert_equal([*torch.frexp(r), r.to(torch.int32)], [*torch.frexp(p), p.to(torch.int32)])
        scalar, plain_scalar = ragged[7].detach(), plain[7].detach()
        assert_equal([scalar * 2, scalar + torch.tensor(1.0)], [plain_scalar * 2, plain_scalar + 1])
    with pytest.raises(UsageError, match=r"plain one of shape \[3\]"):
        r + torch.randn(3)
    with pytest.raises(UsageError, match=r"plain one of shape \[2, 37, 8\], which may differ between ranks"):
        r + torch.randn(2, 37, 8)
    with pytest.raises(UsageError, match=r"plain one of shape \[4, 37\]"):
        torch.randn(4, 37) @ r
    # A 0-d tensor of a wider dtype decides the result, as it does in one process.
    assert (scalar + torch.tensor(1.0, dtype=torch.float64)).dtype == torch.float64


# -- everything else gathers, and says so


@on_ranks(3, run=run_ranks)
def test_what_has_no_rule_gathers_and_is_counted() -> None:
    ragged, plain = pairs("row")
    r, p = ragged[0].detach(), plain[0].detach()
    fallback_counts(reset=True)
    cases: list[Callable[[Any], Any]] = [
        lambda t: t.t() @ t,
        lambda t: t.sum(),
        lambda t: t.mean(0),
        lambda t: t[3],
        lambda t: t[1:5, ::2],
        lambda t: t.tril(),
        lambda t: t.view(-1),
        lambda t: torch.cat([t, t]),
        lambda t: t.max(dim=1).values,
        lambda t: torch.linalg.vector_norm(t, math.inf, dim=0),
        lambda t: t.split(10)[2],
    ]
    for case in cases:
        found, expected = case(r), case(p)
        assert isinstance(found, DTensor) and found.placements == (Replicate(),)
        assert torch.equal(found.full_tensor(), expected)
        assert sum(fallback_counts(reset=True).values()) > 0
    assert r.sum().item() == p.sum().item() and torch.equal(r, r.clone()) and torch.equal(r, p)
    assert bool((r == r).all()) and torch.allclose(r, r)
    changed = r.clone()
    changed.tril_()
    assert_equal([changed], [p.tril()])
    changed.index_fill_(0, distribute_tensor(torch.tensor([0, 36]), cpu_mesh(), [Replicate()]), 5.0)
    assert torch.equal(changed.full_tensor()[36], torch.full((8,), 5.0))
    fallback_counts(reset=True)


@on_ranks(2, run=run_ranks)
def test_an_operation_that_users_define_later_gathers() -> None:
    @torch.library.custom_op("composable_tests::doubled", mutates_args=())
    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 2

    ragged, plain = pairs("element")
    fallback_counts(reset=True)
    found = doubled(ragged[0].detach())
    assert isinstance(found, DTensor) and found.placements == (Replicate(),)
    assert torch.equal(found.full_tensor(), plain[0] * 2)
    assert fallback_counts(reset=True) == {"composable_tests.doubled.default": 1}


@on_ranks(run=run_ranks, world_size=[1, 3])
def test_writing_to_a_view_writes_to_the_whole() -> None:
    ragged, plain = pairs("row")
    r, p = ragged[0].detach(), plain[0].detach().clone()
    writes: list[Callable[[Any], object]] = [
        lambda t: t[3].fill_(0),
        lambda t: t.__setitem__(5, 1.0),
        lambda t: t.__setitem__((slice(None), 2), torch.arange(37.0)),
        lambda t: t.t()[2].mul_(2),
        lambda t: t.view(-1)[3:40].add_(t.view(-1)[:1]),
        lambda t: t[1:3].copy_(t[7:9]),
        lambda t: t[1:].add_(t[:-1].clone() if type(t) is torch.Tensor else t[:-1].clone().full_tensor()),
        lambda t: t.view(37, 4, 2).permute(0, 2, 1)[0].sub_(1),
        lambda t: t.t().div_(t.norm().clamp(min=1e-7)),
    ]
    for write in writes:
        write(r)
        write(p)
        torch.testing.assert_close(r.full_tensor(), p)
    # A view of the same shape is the tensor itself.
    with strict_mode():
        r.view(37, -1).view_as(r).expand(-1, 8).mul_(2)
    assert_equal([r], [p * 2], rtol=1e-6)
    for forbidden in (r.resize_, lambda size: r.t_(), lambda size: r.set_(torch.zeros(3)), lambda size: r[1:3].t_()):
        with pytest.raises(UsageError, match=r"would change the shape"):
            forbidden((3,))


@on_ranks(3)
def test_a_diagonal_can_be_filled() -> None:
    mesh = cpu_mesh()
    cases: list[Callable[[Any], object]] = [
        lambda t: t.fill_diagonal_(7.0, wrap=True),
        lambda t: t.t().fill_diagonal_(7.0),
        lambda t: t[1:, 1:].t().fill_diagonal_(7.0),
        lambda t: t.diagonal().fill_(7.0),
        lambda t: t.as_strided((2,), (1,)).mul_(3.0),
    ]
    for full in (torch.randn(3, 7), torch.randn(3, 7).t()):
        bounds = [rank * 5 for rank in range(mesh.size())] + [full.numel()]
        spec = ragged_spec(mesh, full.shape, full.dtype, bounds, order=order_of(full))
        for fill in cases:
            ragged, plain = from_full(full, spec), full.clone()
            fill(ragged)
            fill(plain)
            assert torch.equal(ragged.full_tensor(), plain)


@on_ranks(2)
def test_a_view_of_changed_values_raises_instead_of_showing_old_ones() -> None:
    ragged = pairs("row")[0]
    r = ragged[0].detach()
    changes: list[Callable[[Any], object]] = [
        lambda t: t.mul_(2),
        lambda t: torch._foreach_mul_([t], 2.0),
        lambda t: t.data.normal_(),
        lambda t: t.detach().copy_(torch.zeros(37, 8)),
        lambda t: t[1].zero_(),
    ]
    uses: list[Callable[[Any, Any, Any], object]] = [
        lambda r, view, sibling: view + 1,
        lambda r, view, sibling: view.fill_(0),
        lambda r, view, sibling: r + view,
        lambda r, view, sibling: sibling[0],
    ]
    for change in changes:
        view, sibling = r[0], r.view(-1)
        torch.add(view, 1)
        change(r)
        for use in uses:
            with pytest.raises(UsageError, match="no longer has"):
                use(r, view, sibling)
    first = r.view(-1)
    first[:8].fill_(7)
    # Views of one copy see what the others write.
    assert first[0].item() == 7 and r[0, 0].item() == 7
    with pytest.raises(UsageError, match="has no gradient"):
        (ragged[1] * 2)[0].mul_(2)


@on_ranks(2, run=run_ranks)
def test_strict_mode_ends_with_its_block() -> None:
    r = pairs("row")[0][0]
    fallback_counts(reset=True)
    with pytest.raises(UsageError, match=r"would gather all of \[37, 8\]"), strict_mode():
        r.sum()
    assert fallback_counts(reset=True) == {}
    r.sum()
    assert fallback_counts(reset=True) == {"aten.sum.default": 1}


# -- random numbers


@on_ranks(3)
def test_numbers_that_are_drawn_from_a_tensor_are_refused_and_others_are_those_of_one_process() -> None:
    ragged, plain = pairs("element")
    dropped = []
    for params in (ragged, plain):
        torch.manual_seed(11)
        with torch.no_grad():
            params[1].normal_(generator=torch.Generator().manual_seed(3))
            params[0].copy_(torch.rand_like(params[0]) + torch.randint_like(params[0], 7))
            dropped.append(nn.functional.dropout(params[0]))
    assert_equal([*ragged, dropped[0]], [*plain, dropped[1]])  # type: ignore[list-item]
    with pytest.raises(UsageError, match="draws random numbers"):
        torch.bernoulli(ragged[0].detach().abs().clamp(max=1))


# -- copies, casts, pickles


@on_ranks(3)
def test_what_is_made_like_a_tensor_keeps_its_cut() -> None:
    ragged, plain = pairs("element")
    with strict_mode():
        for r, p in zip(ragged, plain, strict=True):
            assert_equal([r, r.detach(), r.clone(), r.data], [p, p, p, p])
            assert r.detach().requires_grad is False and r.clone().requires_grad is True
            assert r.detach()._local_tensor.data_ptr() == r._local_tensor.data_ptr()
            likes = [torch.full_like(r, 2.5), r.new_zeros(r.shape), r.new_ones(p.numel(), 1)]
            assert_equal(likes, [torch.full_like(p, 2.5), p.new_zeros(p.shape), p.new_ones(p.numel(), 1)])
            other = r.new_ones((2, 3))
            assert type(other) is DTensor and torch.equal(other.to_local(), torch.ones(2, 3))


def made_of_placements(local: torch.Tensor, like: Any) -> list[DTensor]:
    """Return what others make around a local tensor [local_shape] with the placements of a parameter, in every way."""
    mesh, placements, meta = like.device_mesh, like.placements, TensorMeta(like.shape, like.stride(), local.dtype)
    copied = pickle.loads(pickle.dumps(placements))  # which tell of no parameter
    specs = [
        like._spec,
        replace(like._spec, tensor_meta=meta),
        copy.copy(like._spec),
        DTensorSpec(mesh, copied, tensor_meta=meta),
    ]
    made = [DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())]
    made += [DTensor.from_local(local, mesh, placements)]
    made += [DTensor(local, spec, requires_grad=False) for spec in specs]
    return made if local.dtype is not like.dtype else [*made, torch.empty_like(like).copy_(made[0]), pickled(made[0])]


def pickled(tensor: Any) -> Any:
    return pickle.loads(pickle.dumps(tensor))


@on_ranks(3, dtype=[torch.float32, torch.float64], cut=CUTS)
def test_what_others_make_with_the_placements_of_a_parameter_is_cut_as_it_is(cut: str, dtype: torch.dtype) -> None:
    ragged, plain = pairs(cut)
    with strict_mode():
        for r, p, value in zip(ragged, plain, values(1, dtype), strict=True):
            local = from_full(value, r._spec.cast(dtype))._local_tensor
            for number, one in enumerate(made_of_placements(local, r)):
                assert type(one) is RaggedDTensor, number
                assert_equal([one, one.sqrt().mul_(2)], [value, value.sqrt().mul_(2)])
                assert_equal([r.detach() * one], [p.detach() * value])
            assert DTensor.from_local(local, r.device_mesh, r.placements)._spec is r._spec.cast(dtype)
            fills = [made(r.shape, dtype=dtype, device_mesh=r.device_mesh, placements=r.placements) for made in FILLS]
            assert_equal(fills, [torch.zeros_like(value), torch.ones_like(value)])
            torch.manual_seed(5)
            drawn = random_dtensor(r.shape, dtype=dtype, device_mesh=r.device_mesh, placements=r.placements)
            torch.manual_seed(5)
            assert_equal([drawn], [torch.randn(p.shape, dtype=dtype)])


@on_ranks(2)
def test_a_local_tensor_that_is_no_piece_is_refused_with_the_name_of_the_parameter() -> None:
    model = nn.Linear(4, 6)
    fully_shard(model)
    weight = model.weight
    with pytest.raises(ConfigError, match=r"of shape \[3\] for a piece of shape") as caught:
        DTensor.from_local(torch.zeros(3), weight.device_mesh, weight.placements)
    assert "'weight'" in str(caught.value.at)
    # A whole one is cut, as loads of adapters need it.
    whole = {name: torch.randn(param.shape) for name, param in model.named_parameters()}
    placed = {
        name: DTensor.from_local(whole[name], param.device_mesh, param.placements)  # type: ignore[attr-defined]
        for name, param in model.named_parameters()
    }
    assert all(torch.equal(one.full_tensor(), whole[name]) for name, one in placed.items())
    model.load_state_dict(placed)
    assert all(torch.equal(param.full_tensor(), whole[name]) for name, param in model.named_parameters())  # type: ignore[attr-defined]
    others = pickle.loads(pickle.dumps(weight.placements))
    with pytest.raises(ConfigError, match="the shape of the whole is not known"):
        DTensor.from_local(torch.zeros(3, 4), weight.device_mesh, others)


def sent(value: Any) -> Any:
    """Return what arrives where torch streams a value to another process, which reads it as data only."""
    stream = io.BytesIO()
    _streaming_save(value, stream)
    stream.seek(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own buffer
        return _streaming_load(stream, weights_only=True)


class Fuse:
    """No data."""


@on_ranks(world_size=[1, 2, 3])
def test_a_sharded_state_dict_is_read_as_data_only() -> None:
    def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        # Channels last; rows of 5 and 7, which ranks do not divide.
        model = seeded(lambda: nn.Sequential(nn.Conv2d(5, 7, 3), nn.Flatten(), nn.Linear(28, 5)), 0)
        fully_shard(model.to(memory_format=torch.channels_last), policy={nn.Linear})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(steps):
            take(model, optimizer, step)
        return model, optimizer

    def take(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        drawn = torch.Generator().manual_seed(2 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(2, 5, 4, 4, generator=drawn)).square().mean().backward()
        optimizer.step()

    model, optimizer = trained(2)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    arrived = sent(state)
    ours = [leaf for leaf in tree_leaves(arrived) if isinstance(leaf, DTensor)]
    assert len(ours) == 4 * 3 and all(type(leaf) is RaggedDTensor for leaf in ours)
    other, other_optimizer = trained(1)
    other.load_state_dict(arrived["model"])
    other_optimizer.load_state_dict(arrived["optimizer"])
    take(other, other_optimizer, 2)
    take(model, optimizer, 2)
    for left, right in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(left.to_local(), right.to_local())
    # Attributes of a parameter travel too, if they are data.
    model[0].weight.note = Fuse()
    with pytest.raises(pickle.UnpicklingError, match=r"Unsupported global: GLOBAL .*Fuse"):
        sent(model[0].weight)


class MeanSquares(torch.optim.Optimizer):
    """An optimizer that makes its state as torchao's do, and steps in a compiled function."""

    def step(self) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if "squares" not in self.state[param]:
                zeros = torch.zeros_like(param.to_local())
                shape, stride = param.shape, param.stride()
                self.state[param]["squares"] = DTensor.from_local(
                    zeros, param.device_mesh, param.placements, run_check=False, shape=shape, stride=stride
                )
            step = torch.compile(mean_squares_step, fullgraph=True, dynamic=False, backend="aot_eager")
            step(param.detach(), param.grad, self.state[param]["squares"])


def mean_squares_step(param: torch.Tensor, grad: torch.Tensor, squares: torch.Tensor) -> None:
    mean = squares.lerp(grad.square(), 0.5)
    squares.copy_(mean)
    param.addcdiv_(grad, mean.sqrt() + 1e-3, value=-0.1)


@on_ranks(2, run=run_ranks)
def test_an_optimizer_that_makes_its_state_of_placements_may_compile_its_step() -> None:
    model, alone = (seeded(lambda: nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 2)), 0) for _ in range(2))
    fully_shard(model)
    optimizer = MeanSquares(model.parameters(), {})
    for step in range(2):
        x = torch.ones(3, 5) + step
        for one in (model, alone):
            one.zero_grad()
            one(x).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for param in alone.parameters():
                param.squares = getattr(param, "squares", torch.zeros_like(param))  # type: ignore[attr-defined]
                mean_squares_step(param, param.grad, param.squares)  # type: ignore[arg-type,attr-defined]
    assert_equal([*model.parameters()], [*alone.parameters()], rtol=1e-5, atol=1e-6)  # type: ignore[list-item]
    states = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    squares = {fqn: param.squares for fqn, param in alone.named_parameters()}  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        torch.testing.assert_close({fqn: state["squares"] for fqn, state in states.items()}, squares)


@on_ranks(2, run=run_ranks)
def test_a_compiled_function_may_make_one_of_placements() -> None:
    weight = fully_shard(nn.Linear(4, 6)).weight
    mesh, placements, shape = weight.device_mesh, weight.placements, weight.shape

    @torch.compile(backend="aot_eager", fullgraph=True)
    def scaled(local: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        return DTensor.from_local(local, mesh, placements, shape=shape, stride=(4, 1)) * param

    made = scaled(torch.full_like(weight.to_local(), 2), weight.detach())
    assert_equal([made], [2 * weight.full_tensor().detach()])  # type: ignore[list-item]


# -- what torch would accept without a word


@on_ranks(2)
def test_a_gradient_or_data_of_the_same_cut_is_taken() -> None:
    ragged, plain = pairs("row")
    r, p = ragged[0], plain[0]
    assert r.grad is None
    r.grad = distribute_tensor(p.detach(), cpu_mesh(), [Replicate()])
    r.grad = None
    r.grad = r.detach().clone()
    del r.grad
    assert r.grad is None
    with pytest.raises(UsageError) as caught:
        r.grad = torch.zeros(37, 8)
    assert str(caught.value) == (
        ".grad of a ragged tensor of shape [37, 8] cannot be a plain tensor of shape [37, 8]\n"
        f"  at:  rank {dist.get_rank()}\n"
        "  fix: cut it the same way: distribute_tensor(full_grad, tensor.device_mesh, tensor.placements)"
    )
    r.data = r.detach() * 2
    assert_equal([r], [p * 2])
    with pytest.raises(ConfigError, match="not its mesh"):
        r.redistribute()
    with pytest.raises(ConfigError, match="backward_dtype"):
        r.redistribute(placements=[Replicate()], backward_dtype=torch.float64)
    replica = distribute_tensor(p.detach(), cpu_mesh(), [Replicate()]).requires_grad_()
    with pytest.raises(UsageError, match="no mesh"):
        replica.redistribute(init_device_mesh("cpu", (1, 2)), r.placements)
    with pytest.raises(UsageError, match="no dtype"):
        replica.redistribute(placements=r.placements, forward_dtype=torch.float64)
    with pytest.raises(UsageError, match="without a gradient"):
        replica.redistribute(placements=r.placements)
    with pytest.raises(ConfigError, match="ragged, not"):
        r.to_local(grad_placements=[Replicate()])


# -- meshes of two dims, torch.compile, older torch


@on_ranks(4)
def test_a_replicated_mesh_dim_changes_nothing() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    spec = ragged_spec(mesh, (5, 4), torch.float32, (0, 8, 20))
    full = torch.arange(20.0).view(5, 4)
    r = from_full(full, spec)
    assert r.placements == (Replicate(), RaggedShard((0, 8, 20)))
    assert torch.equal(r.full_tensor(), full) and torch.equal((r * 2).full_tensor(), full * 2)
    norm = torch.linalg.vector_norm(r)
    assert norm.placements == (Replicate(), Replicate())  # type: ignore[attr-defined]
    torch.testing.assert_close(norm.full_tensor(), full.norm())  # type: ignore[attr-defined]
    assert torch.equal(r.sum(0).full_tensor(), full.sum(0))  # type: ignore[attr-defined]


def flatten_and_rebuild() -> list[str]:
    ragged, plain = pairs("element")
    for r, p in zip(ragged, plain, strict=True):
        names, context = r.__tensor_flatten__()
        inner = {name: getattr(r, name) for name in names}
        rebuilt = RaggedDTensor.__tensor_unflatten__(inner, context, r.shape, r.stride())
        assert_equal([rebuilt], [p])
        assert rebuilt._spec == r._spec and rebuilt.requires_grad == r.requires_grad
    return [r._stable_hash_for_caching() for r in ragged]


def test_torch_compile_can_take_a_tensor_apart_and_rebuild_it() -> None:
    # Ranks share the compiler's cache on disk, not what is in it: their pieces have other sizes.
    assert len({key for keys in run_ranks(flatten_and_rebuild, 2) for key in keys}) == 2 * len(SHAPES)

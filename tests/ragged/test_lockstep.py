"""Ranks that run ragged operations in different orders: at debug level DETAIL an error on each, before any exchange."""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, distribute_tensor

from composable import DesyncError, clip_grad_norm_, fully_shard, get_total_norm
from composable.comm import Ranks
from composable.dtensor.spec import ragged_spec
from tests.ragged_pairs import from_full
from tests.world import on_ranks, run_ranks, run_threads

DETAIL = dist.DebugLevel.DETAIL  # type: ignore[attr-defined]  # torch does not list it as exported

Operation = Callable[[list[Any]], torch.Tensor]


@pytest.fixture(autouse=True)
def _compared() -> Iterator[None]:
    """Let ranks that are threads compare what they do."""
    before = dist.get_debug_level()  # type: ignore[attr-defined]
    dist.set_debug_level(DETAIL)  # type: ignore[attr-defined]
    yield
    dist.set_debug_level(before)  # type: ignore[attr-defined]


def make_model() -> tuple[nn.Sequential, nn.Sequential]:
    """Return a sharded model and its plain twin, with gradients; three of the weights have one shape."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 9))
    model = fully_shard(copy.deepcopy(plain), policy={nn.Linear})
    for sharded, whole in zip(model.parameters(), plain.parameters(), strict=True):
        whole.grad = torch.randn(whole.shape)
        sharded.grad = distribute_tensor(whole.grad, sharded.device_mesh, sharded.placements)
    return model, plain


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def copied(param: Any) -> torch.Tensor:
    target = torch.zeros(param.shape)
    with torch.no_grad():
        return target.copy_(param)


def rewritten(param: Any) -> torch.Tensor:
    with torch.no_grad():
        param[0].mul_(1.0)
    return param.detach().flatten()


# Each takes one parameter; those of a plain model give what is right.
OF_ONE: list[Callable[[Any], torch.Tensor]] = [
    lambda p: p.norm(),
    lambda p: p.norm(1),
    lambda p: p.sum(),
    lambda p: p.view(-1),
    lambda p: p[0],
    lambda p: p.detach().mean(0),
    lambda p: torch.linalg.vector_norm(p.detach(), 2, dim=-1),
    lambda p: p.flatten() @ p.flatten(),
    lambda p: p.grad.sum(),
    lambda p: p.grad.norm(),
    lambda p: (p > 0).any(),
    lambda p: torch.cat([p.detach(), p.detach()]),
    lambda p: full(p),
    lambda p: full(p.detach() * 2),
    lambda p: full(p.grad),
    copied,
    rewritten,
]
# And these all of them.
OF_ALL: list[Operation] = [
    lambda params: torch.stack([full(norm) for norm in torch._foreach_norm(params)]),
    lambda params: torch.stack([full(norm) for norm in torch._foreach_norm(params[:4], 1)]),
    lambda params: nn.utils.get_total_norm([param.grad for param in params]),
    lambda params: get_total_norm([param.grad for param in params]),
    lambda params: get_total_norm([param.grad for param in params], 1.0),
    lambda params: clip_grad_norm_(params, 1e9),
]


def draw(dice: random.Random) -> Operation:
    if dice.random() < 0.2:
        return dice.choice(OF_ALL)
    of_one, index = dice.choice(OF_ONE), dice.randrange(8)
    return lambda params: of_one(params[index])


def change(program: list[Operation], dice: random.Random) -> list[Operation]:
    """Swap two operations, drop one or replace one."""
    changed, at = list(program), dice.randrange(len(program) - 1)
    kind = dice.choice(["swap", "drop", "replace"])
    if kind == "swap":
        changed[at], changed[at + 1] = changed[at + 1], changed[at]
    elif kind == "drop":
        del changed[at]
    else:
        changed[at] = draw(dice)
    return changed


def is_right(operation: Operation, params: list[Any], plain: list[Any]) -> bool:
    return torch.allclose(full(operation(params)), operation(plain), atol=1e-5)


def diverge(first_seed: int, count: int) -> list[tuple[bool, bool]]:
    """Return for each seed whether this rank got an error, and whether all values were right."""
    model, whole = make_model()
    # Of a shape of its own: where a rank has dropped something, ranks meet here at the latest.
    mark = from_full(torch.ones(dist.get_world_size(), 3), ragged_spec_of_rows(3))
    params, plain = list(model.parameters()), list(whole.parameters())
    outcomes = []
    for seed in range(first_seed, first_seed + count):
        dice = random.Random(seed)
        shared = [draw(dice) for _ in range(6)]
        program = shared
        if dist.get_rank() == dice.randrange(dist.get_world_size()):
            program = change(shared, dice)
        right, got_error = True, False
        try:
            for operation in program:
                right &= is_right(operation, params, plain)
            mark.full_tensor()
        except DesyncError as error:
            got_error = True
            right &= all(f"rank {rank}: " in str(error) for rank in range(dist.get_world_size()))
        for operation in shared:
            right &= is_right(operation, params, plain)
        outcomes.append((got_error, right))
    return outcomes


def ragged_spec_of_rows(width: int) -> Any:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    bounds = [row * width for row in range(world_size + 1)]
    return ragged_spec(mesh, (world_size, width), torch.float32, bounds)


def test_a_rank_that_swaps_drops_or_changes_an_operation_is_told_on_every_rank() -> None:
    outcomes = run_threads(diverge, 3, 0, 25)
    assert all(len(set(of_seed)) == 1 for of_seed in zip(*outcomes, strict=True))
    assert all(right for _, right in outcomes[0])
    assert sum(got_error for got_error, _ in outcomes[0]) > 15


def diverge_alone(first_seed: int, count: int) -> list[tuple[bool, bool]]:
    dist.set_debug_level(DETAIL)  # type: ignore[attr-defined]
    return diverge(first_seed, count)


def test_the_same_on_gloo_aborts_no_process() -> None:
    outcomes = run_ranks(diverge_alone, 2, 1000, 6)
    assert all(len(set(of_seed)) == 1 for of_seed in zip(*outcomes, strict=True))
    assert all(right for _, right in outcomes[0]) and any(got_error for got_error, _ in outcomes[0])


# -- what tells tensors apart


def meet(mine: Callable[[], object], theirs: Callable[[], object]) -> str:
    """Do one thing on rank 0 and another on the others; return the error."""
    with pytest.raises(DesyncError) as caught:
        (mine if dist.get_rank() == 0 else theirs)()
    return str(caught.value)


def confuse_params() -> list[str]:
    model = make_model()[0]
    model.zero_grad()
    model(torch.ones(1, 6)).sum().backward()
    first, second, third = (model[index].weight for index in range(3))
    found = [
        meet(lambda: first.norm(), lambda: second.norm()),
        meet(lambda: first.sum(), lambda: first.grad.sum()),
        meet(lambda: torch._foreach_norm([first, second, third, first]), lambda: torch._foreach_norm([second, first])),
    ]
    twin = copy.deepcopy(model)
    found.append(meet(lambda: first.full_tensor(), lambda: twin[0].weight.full_tensor()))
    return found


def test_the_error_says_what_each_rank_was_doing() -> None:
    head, tail = (
        "the ranks run different operations on ragged tensors",
        (
            "  at:  rank 1\n"
            "  fix: run the same operations in the same order on every rank; nothing was exchanged or changed here"
        ),
    )
    found = run_threads(confuse_params, 2)[1]
    weight = "[6, 6] float32 cut at (0, 21, 36)"
    lines = [
        [f"the 2-norm of parameter '0.weight' {weight}", f"the 2-norm of parameter '1.weight' {weight}"],
        [
            f"aten.sum.default of parameter '0.weight' {weight}",
            f"aten.sum.default of a tensor cut as parameter '0.weight' {weight}",
        ],
        [
            f"the 2-norm of parameter '0.weight' {weight}, parameter '1.weight' {weight}, "
            f"parameter '2.weight' {weight}, 1 more",
            f"the 2-norm of parameter '1.weight' {weight}, parameter '0.weight' {weight}",
        ],
        [
            f"full_tensor of parameter '0.weight' {weight}",
            f"full_tensor of parameter '0.weight' of deep copy 1 {weight}",
        ],
    ]
    assert found == [f"{head}\n    rank 0: {zero}\n    rank 1: {one}\n{tail}" for zero, one in lines]


def look_alike(kind: str) -> tuple[str, Any, Any]:
    """Return an operation, and what looks alike to do it on."""
    full = torch.ones(2, 4)
    if kind == "name":
        # Annotated one by one, so that all of them are called 'weight'.
        first, second = (fully_shard(nn.Linear(6, 6)).weight for _ in range(2))
        return "norm", first, second
    if kind == "mesh":
        meshes = [init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("a", "b")]
        first, second = (from_full(full, ragged_spec(mesh, (2, 4), torch.float32, (0, 1, 8))) for mesh in meshes)
        return "sum", first, second
    other = {"order": (torch.float32, (1, 0)), "dtype": (torch.bfloat16, ())}[kind]
    first, second = (
        from_full(full.to(dtype), ragged_spec(init_device_mesh("cpu", (2,)), (2, 4), dtype, (0, 4, 8), order=order))
        for dtype, order in (other, (torch.float32, ()))
    )
    return "full_tensor", first, second


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("name", "in equal words"),
        ("mesh", "in equal words"),
        ("order", "rank 0: full_tensor of [2, 4] float32 cut at (0, 4, 8) in the order of dims (1, 0)\n"),
        ("dtype", "rank 0: full_tensor of [2, 4] bfloat16 cut at (0, 4, 8)\n"),
    ],
)
@on_ranks(2)
def test_tensors_that_look_alike_are_told_apart(kind: str, text: str) -> None:
    operation, first, second = look_alike(kind)
    assert text in meet(getattr(first, operation), getattr(second, operation))
    # And the next operation works.
    assert full(getattr(first, operation)()).isfinite().all()


def count_questions(level: Any) -> int:
    dist.set_debug_level(level)
    asked = 0
    are_alike = Ranks.are_alike

    def counted(ranks: Ranks, key: str) -> bool:
        nonlocal asked
        asked += 1
        return are_alike(ranks, key)

    model = make_model()[0]
    with mock.patch.object(Ranks, "are_alike", counted):
        model[0].weight.norm()
        model[0].weight.sum()
        clip_grad_norm_(model.parameters(), 1.0)
    return asked


def test_nothing_is_compared_below_that_level() -> None:
    levels = dist.DebugLevel  # type: ignore[attr-defined]
    assert run_ranks(count_questions, 2, levels.INFO) == [0, 0]
    assert run_ranks(count_questions, 2, levels.DETAIL) == [3, 3]


@on_ranks(4)
def test_only_the_ranks_of_a_group_have_to_agree() -> None:
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    spec = [ragged_spec(grid, (4,), torch.float32, (0, 1, 4), mesh_dim=dim) for dim in range(2)]
    tensors = [from_full(torch.arange(4.0) + dim, one) for dim, one in enumerate(spec)]
    # Every group of ranks agrees within itself, though the groups do different things.
    for dim, tensor in enumerate(tensors):
        operation = torch.sum if grid.get_coordinate()[1 - dim] else torch.norm  # type: ignore[index]
        torch.testing.assert_close(full(operation(tensor)), operation(torch.arange(4.0) + dim))
    for tensor in tensors:
        with pytest.raises(DesyncError):
            (torch.sum if dist.get_rank() in (0, 3) else torch.norm)(tensor)


@on_ranks(2)
def test_a_reduction_in_backward_is_checked_too() -> None:
    spec = ragged_spec_of_rows(3)
    one, two = (from_full(torch.ones(2, 3), spec).requires_grad_() for _ in range(2))
    one_full, two_full = one.full_tensor(grad_placements=[Partial()]), two.full_tensor()
    meet(lambda: one_full.sum().backward(), lambda: two.sum())
    one.full_tensor(grad_placements=[Partial()]).sum().backward()
    two_full.sum().backward()
    assert torch.equal(one.grad.full_tensor(), torch.full((2, 3), 2.0))  # type: ignore[union-attr]


@on_ranks(2)
def test_an_unscaling_that_other_ranks_do_not_run_changes_nothing() -> None:
    model = make_model()[0]
    weight: Any = model[0].weight
    before = weight.grad.to_local().clone()

    def unscale() -> torch.Tensor:
        found = torch.zeros(1)
        torch._amp_foreach_non_finite_check_and_unscale_([weight.grad], found, torch.tensor(0.5))
        return found

    assert "rank 0: the unscaling of gradients" in meet(unscale, lambda: weight.norm())
    assert torch.equal(weight.grad.to_local(), before)
    assert unscale().item() == 0
    assert torch.equal(weight.grad.to_local(), before * 0.5)


@on_ranks(2)
def test_distribute_tensor_is_checked_too() -> None:
    spec = ragged_spec_of_rows(3)
    value = torch.full((2, 3), float(dist.get_rank()))
    told = meet(
        lambda: distribute_tensor(value, spec.mesh, spec.placements),
        lambda: distribute_tensor(
            value[:1], spec.mesh, ragged_spec(spec.mesh, (1, 3), value.dtype, (0, 1, 3)).placements
        ),
    )
    assert "rank 0: distribute_tensor of [2, 3] float32 cut at (0, 3, 6)" in told
    assert torch.equal(distribute_tensor(value, spec.mesh, spec.placements).full_tensor(), torch.zeros(2, 3))

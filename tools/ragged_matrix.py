"""What works on ragged tensors: one row an operation, proved against plain tensors in one process.

    python -m tools.ragged_matrix      # proves every row and writes the table into docs/site/operations.md

A row is a function that runs on every rank and raises where the ranks' result is not that of one
process. Gathers that nobody asked for are counted around it.
"""

import copy
import io
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from composable import clip_grad_norm_
from composable.dtensor.gather import fallback_counts, strict_mode
from composable.dtensor.spec import ragged_spec
from composable.dtensor.tensor import RaggedDTensor
from composable.errors import UsageError
from tests.counting import counting_ranks
from tests.ragged_pairs import CUTS, assert_equal, cpu_mesh, from_full, make_module, pairs, set_grads, specs_of, values
from tests.world import run_ranks

__all__ = ["CHEAP", "PAGE", "ROWS", "Outcome", "Row", "prove", "prove_everywhere", "with_table"]

PAGE = Path(__file__).parent.parent / "docs" / "site" / "operations.md"
WORLD_SIZES = [2, 3, 4]
BEGIN, END = "<!-- begin: written by `python -m tools.ragged_matrix` -->", "<!-- end -->"

EQUAL, REFUSED = "equal", "refused"
# The operation is one that this torch does not do on its own DTensors, which row results are.
MISSING = "missing in this torch"
MODES: dict[str, dict[str, bool]] = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


@dataclass(frozen=True)
class Row:
    """One operation."""

    name: str  # first column of the table
    run: Callable[[str], str | None]  # called with the cut on every rank; returns ``EQUAL`` (or nothing) or ``REFUSED``
    note: str = ""  # last column
    world_sizes: tuple[int, ...] = (2, 3, 4)  # where it is proved
    # asked on every rank: whether torch does on its own replicated DTensors what the row needs
    is_in_torch: Callable[[], bool] = lambda: True


@dataclass(frozen=True)
class Outcome:
    verdict: str
    gathers: int


def prove(cut: str, names: Sequence[str] | None = None) -> dict[str, Outcome]:
    """Run the rows on this rank; return what came out of each."""
    specs = [spec for spec in specs_of(cut) if spec.shape.numel()]
    world_size = dist.get_world_size()
    if world_size > 1:
        assert any(lo == hi for spec in specs for lo, hi in pairwise(spec.layout.bounds)), "some rank holds nothing"
        has_flat_pieces = any(len(spec.layout.local_shape) < len(spec.shape) for spec in specs)
        assert has_flat_pieces == (cut == "element"), "rows, or elements"
    found: dict[str, Outcome] = {}
    for row in ROWS:
        if (names is not None and row.name not in names) or (names is None and world_size not in row.world_sizes):
            continue
        fallback_counts(reset=True)
        torch.manual_seed(0)
        try:
            if not row.is_in_torch():
                with pytest.raises(NotImplementedError):
                    row.run(cut)
                found[row.name] = Outcome(MISSING, 0)
                continue
            verdict = row.run(cut)
        except Exception as error:
            raise AssertionError(f"row {row.name!r}, {cut} cut, {world_size} ranks") from error
        found[row.name] = Outcome(verdict or EQUAL, sum(fallback_counts(reset=True).values()))
    return found


# -- optimizers


def step_alike(
    kind: type[optim.Optimizer],
    settings: Sequence[dict[str, Any]],
    modes: Iterable[str],
    cut: str,
    keep: Callable[[torch.Tensor], bool] = lambda p: True,
    tolerance: float = 0.0,
) -> None:
    """Step ragged and plain parameters; compare them and the optimizers' states."""
    for options in settings:
        for mode in modes:
            ragged, plain = pairs(cut)
            ragged = [r for r, p in zip(ragged, plain) if keep(p)]
            plain = [p for p in plain if keep(p)]
            chosen = {**options, **(MODES[mode] if mode else {})}
            optimizers = [kind(params, **chosen) for params in (ragged, plain)]  # type: ignore[call-arg]
            for step in range(2):
                for r, p in zip(ragged, plain):
                    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step + p.numel()))
                    r.grad = from_full(p.grad, r._spec)
                for optimizer in optimizers:
                    optimizer.step()
            # The fused kernels treat the end of a piece, where no vector fits, with other roundings.
            allowed = max(tolerance, 1e-6 if mode == "fused" else 0.0)
            assert_equal(ragged, plain, rtol=allowed, atol=allowed)
            for r, p in zip(ragged, plain):
                compare_states(r, optimizers[0].state[r], optimizers[1].state[p], allowed)


def compare_states(param: RaggedDTensor, found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        kept = found[name]
        if isinstance(kept, RaggedDTensor) and kept.shape == param.shape:
            assert kept._spec is param._spec, name
        torch.testing.assert_close(whole(kept), value, rtol=tolerance, atol=tolerance, msg=name)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def optimizer_row(kind: type[optim.Optimizer], settings: Sequence[dict[str, Any]], modes: str, **options: Any) -> Row:
    tags = sorted(
        {tag for setting in settings for tag in setting if setting[tag] and tag not in ("lr", "weight_decay")}
    )
    title = f"`{kind.__name__}`" + (f" ({', '.join(tags)})" if tags else "")
    about = {name: options.pop(name) for name in ("note", "is_in_torch") if name in options}
    return Row(
        f"{title}: {', '.join(modes.split())}" if modes else title,
        lambda cut: step_alike(kind, settings, modes.split() or [""], cut, **options),
        **about,
    )


def lists_are_interpolated() -> bool:
    """Say whether torch has ``_foreach_lerp_`` with a list of numbers on its own DTensors; torch 2.11 has not."""
    tensors = [distribute_tensor(torch.ones(2), cpu_mesh(), [Replicate()]) for _ in range(2)]
    try:
        torch._foreach_lerp_(tensors[:1], tensors[1:], [0.5])
    except NotImplementedError:
        return False
    return True


def is_dense(param: torch.Tensor) -> bool:
    return param.numel() > 0


def is_matrix(param: torch.Tensor) -> bool:
    return param.dim() == 2 and param.numel() > 0


def fit_with_lbfgs(cut: str) -> None:
    for search in (None, "strong_wolfe"):
        ragged, plain = pairs(cut)
        ragged, plain = ragged[1:6], plain[1:6]
        for params in (ragged, plain):
            goals: list[Any] = [p.detach() * 0.5 + 1 for p in params]  # type: ignore[attr-defined]

            def closure(params: Any = params, goals: Any = goals) -> float:
                loss = 0.0
                for p, goal in zip(params, goals):
                    p.grad = p.detach() - goal
                    # The line search is at the mercy of the last bit.
                    loss += whole(p.grad).double().square().sum().item() / 2
                return loss

            optim.LBFGS(params, lr=0.5, max_iter=3, line_search_fn=search).step(closure)  # type: ignore[arg-type]
        assert_equal(ragged, plain, rtol=1e-5, atol=1e-5)


def refuse_sparse(cut: str) -> str:
    ragged, plain = pairs(cut)
    set_grads(ragged, plain, 1)
    before = [p.detach().clone() for p in plain]
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
        optim.SparseAdam(ragged).step()
    with pytest.raises(UsageError, match=r"\.grad of a ragged tensor"):
        ragged[0].grad = torch.zeros(37, 8).to_sparse()
    assert_equal(ragged, before)
    return REFUSED


def mixed(cut: str, *, several_meshes: bool = True) -> tuple[list[Any], list[Any]]:
    """Return ragged, plain, ``Shard`` and ``Replicate`` parameters with gradients, and plain twins."""
    ragged, plain = pairs(cut)
    set_grads(ragged, plain, 1)
    # torch has no inf norm of a tensor without elements.
    ragged, plain = ragged[:-1], plain[:-1]
    line = cpu_mesh()
    other = init_device_mesh("cpu", (1, dist.get_world_size())) if several_meshes else line
    kinds: list[Any] = [None, (line, [Shard(0)]), (line, [Replicate()])]
    if several_meshes:
        kinds += [(other, [Replicate(), Shard(1)]), (other, [Replicate(), Replicate()])]
    params: list[Any] = list(ragged)
    twins: list[Any] = list(plain)
    for index, place in enumerate(kinds):
        full, grad = torch.randn(2, 13, 8, generator=torch.Generator().manual_seed(20 + index))
        twins.append(nn.Parameter(full.clone()))
        twins[-1].grad = grad.clone()
        params.append(nn.Parameter(distribute_tensor(full, *place) if place else full.clone()))
        params[-1].grad = distribute_tensor(grad, *place) if place else grad.clone()
    # No kind comes first, or together.
    order = list(range(len(params)))[::2] + list(range(len(params)))[1::2]
    return [params[index] for index in order], [twins[index] for index in order]


def step_mixed(cut: str) -> None:
    for kind, modes in MIXED.items():
        for mode in modes.split():
            params, plain = mixed(cut)
            for group in (params, plain):
                optimizer = kind(group, lr=0.01, **MODES[mode])  # type: ignore[call-arg]
                for _ in range(2):
                    optimizer.step()
            for param, twin in zip(params, plain, strict=True):
                torch.testing.assert_close(whole(param), twin, rtol=1e-6, atol=1e-6, check_stride=False)


# torch has no fused SGD and Adagrad for its own DTensors.
MIXED: dict[type[optim.Optimizer], str] = {
    optim.SGD: "loop foreach",
    optim.Adam: "loop foreach fused",
    optim.AdamW: "loop foreach fused",
    optim.Adagrad: "loop foreach",
    optim.RMSprop: "loop foreach",
    optim.NAdam: "loop foreach",
}


def compile_steps(cut: str) -> None:
    compile_step(cut, optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}, "aot_eager")
    for mode in ("loop", "foreach"):
        compile_step(cut, optim.AdamW, {"lr": 0.1, **MODES[mode]}, "aot_eager")


def compile_step(cut: str, kind: type[optim.Optimizer], options: dict[str, Any], backend: str) -> None:
    torch._dynamo.reset()
    ragged, plain = pairs(cut)
    ragged, plain = ragged[:3], plain[:3]
    optimizers = [kind(params, **options) for params in (ragged, plain)]  # type: ignore[call-arg]
    with warnings.catch_warnings():
        # The compiler's own imports.
        warnings.simplefilter("ignore", DeprecationWarning)
        step = torch.compile(optimizers[0].step, backend=backend)
        for index in range(2):
            for r, p, grad in zip(ragged, plain, values(index)):
                r.grad, p.grad = from_full(grad, r._spec), grad
            with strict_mode():
                step()  # type: ignore[call-arg]
            optimizers[1].step()
    # Adam divides by roots near zero, and torch compiles `addcmul` to a fused multiply-add.
    assert_equal(ragged, plain, rtol=1e-5, atol=1e-5)


def compile_gather(cut: str) -> None:
    full = torch.randn(10, 6, generator=torch.Generator().manual_seed(2))
    step = 6 if cut == "row" else 7
    # One owner, and near equal pieces: gathers differ in how they send.
    rest = [60] * (dist.get_world_size() - 1)
    for bounds in ((0, 60, *rest), (0, 5 * step, *rest)):
        torch._dynamo.reset()
        r = from_full(full, ragged_spec(cpu_mesh(), full.shape, full.dtype, bounds))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            found = torch.compile(work_on_the_whole, backend="aot_eager")(r)
        torch.testing.assert_close(found.full_tensor(), work_on_the_whole(full))


def work_on_the_whole(tensor: Any) -> Any:
    return tensor * 2 + tensor.cumsum(0) + torch.linalg.vector_norm(tensor)


# -- clipping, the gradient scaler


def clip_with_torch(order: float) -> Callable[[str], None]:
    def run(cut: str) -> None:
        for foreach in (True, False, None):
            ragged, plain = pairs(cut)
            ragged, plain = ragged[:-1], plain[:-1]
            set_grads_of = values(5)
            for r, p, grad in zip(ragged, plain, set_grads_of):
                r.grad, p.grad = from_full(grad, r._spec), grad
            with counting_ranks() as counts:
                norm = nn.utils.clip_grad_norm_(ragged, 0.5, order, foreach=foreach)
            expected = nn.utils.clip_grad_norm_(plain, 0.5, order, foreach=foreach)
            assert type(norm) is DTensor and norm.placements == (Replicate(),)
            torch.testing.assert_close(norm.full_tensor(), expected, rtol=1e-6, atol=0.0)
            assert_equal([r.grad for r in ragged], [p.grad for p in plain], rtol=1e-6, atol=1e-7)  # type: ignore[misc]
            if foreach is not False:
                assert counts["reductions"] == (1 if dist.get_world_size() > 1 else 0)

    return run


def clip_in_two_calls(cut: str) -> None:
    ragged, plain = pairs(cut)
    set_grads(ragged, plain, 5)
    norms = []
    for params in (ragged, plain):
        norms.append(nn.utils.get_total_norm([p.grad for p in params]))  # type: ignore[attr-defined]
        nn.utils.clip_grads_with_norm_(params, 0.5, norms[-1])  # type: ignore[arg-type]
    torch.testing.assert_close(whole(norms[0]), norms[1])
    assert_equal([r.grad for r in ragged], [p.grad for p in plain], rtol=1e-6, atol=1e-7)  # type: ignore[misc]


def clip_mixed_with_torch(cut: str) -> None:
    for order in (2.0, 1.0, math.inf):
        for foreach in (True, None):
            params, plain = mixed(cut, several_meshes=False)
            norms = [nn.utils.clip_grad_norm_(group, 0.5, order, foreach=foreach) for group in (params, plain)]
            torch.testing.assert_close(whole(norms[0]), norms[1])
            compare_grads(params, plain)


def refuse_several_meshes(cut: str) -> str:
    params, plain = mixed(cut)
    for foreach in (True, False):
        with pytest.raises(RuntimeError, match="must have the same mesh"):
            nn.utils.clip_grad_norm_(params, 0.5, foreach=foreach)
    compare_grads(params, plain)
    return REFUSED


def clip_mixed(cut: str) -> None:
    for order in (2.0, 1.0, math.inf):
        for foreach in (True, False, None):
            params, plain = mixed(cut)
            norm = clip_grad_norm_(params, 0.5, order, foreach=foreach)
            expected = nn.utils.clip_grad_norm_(plain, 0.5, order, foreach=foreach)
            assert type(norm) is torch.Tensor
            torch.testing.assert_close(norm, expected)
            compare_grads(params, plain)


def compare_grads(params: list[Any], plain: list[Any]) -> None:
    for param, twin in zip(params, plain, strict=True):
        torch.testing.assert_close(whole(param.grad), twin.grad, rtol=1e-6, atol=1e-7, check_stride=False)


def scale(cut: str) -> None:
    params, plain = mixed(cut)
    before = [p.detach().clone() for p in plain]
    optimizer = optim.SGD(params, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    sharded = next(p for p in params if isinstance(p, DTensor) and p.placements == (Replicate(), Shard(1)))
    # Infinite on the rank that owns the last element alone: of a ragged tensor, then of one on another mesh.
    for poisoned in (params[0], sharded, None):
        scaler.scale(torch.zeros(()))
        for param, twin in zip(params, plain, strict=True):
            with torch.no_grad():
                bad = twin.grad.clone()
                if param is poisoned:
                    bad.view(-1)[-1] = math.inf
                placed = isinstance(param, DTensor)
                param.grad = distribute(bad, param) if placed else bad
        size = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        assert (scaler.get_scale() < size) == (poisoned is not None)
        expected = before if poisoned is not None else [b - p.grad / size for b, p in zip(before, plain)]
        for param, value in zip(params, expected, strict=True):
            torch.testing.assert_close(whole(param).detach(), value, rtol=1e-6, atol=1e-6, check_stride=False)


def distribute(full: torch.Tensor, like: Any) -> Any:
    if isinstance(like, RaggedDTensor):
        return from_full(full, like._spec)
    return distribute_tensor(full, like.device_mesh, like.placements)


def zero_grads(cut: str) -> None:
    for foreach in (False, True):
        ragged, plain = pairs(cut)
        set_grads(ragged, plain, 1)
        optim.SGD(ragged, foreach=foreach).zero_grad(set_to_none=False)
        assert_equal([r.grad for r in ragged], [torch.zeros_like(p) for p in plain])  # type: ignore[misc]
        optim.SGD(ragged, foreach=foreach).zero_grad()
        assert all(r.grad is None for r in ragged)


# -- copies, casts, files


def average(cut: str) -> None:
    for options in (
        {},
        {"avg_fn": get_ema_avg_fn(0.9)},
        {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    ):
        models = make_module(cut)
        averages = [AveragedModel(model, **options) for model in models]  # type: ignore[arg-type]
        for _ in range(2):
            for average_, model in zip(averages, models):
                with torch.no_grad():
                    for param in model.parameters():
                        param.add_(1)
                average_.update_parameters(model)
        assert_equal(list(averages[0].parameters()), list(averages[1].parameters()))  # type: ignore[arg-type]


def deep_copy(cut: str) -> None:
    ragged, plain = pairs(cut)
    set_grads(ragged, plain, 2)
    for r, p, twin in zip(ragged, plain, copy.deepcopy(ragged), strict=True):
        assert isinstance(twin, nn.Parameter) and twin.requires_grad and twin._spec is r._spec
        assert_equal([twin, twin.grad], [p, p.grad])  # type: ignore[list-item]
        # Not the storage of the buffer that the local tensor is a view of.
        assert twin._local_tensor.untyped_storage().nbytes() == twin._local_tensor.numel() * 4
        with torch.no_grad():
            twin.add_(1)
            twin.grad.add_(1)  # type: ignore[union-attr]
        assert_equal([r, r.grad], [p, p.grad])  # type: ignore[list-item]
    models = make_module(cut)
    twins = [copy.deepcopy(model) for model in models]
    assert_equal(list(twins[0].parameters()), list(twins[1].parameters()))  # type: ignore[arg-type]


def cast(cut: str) -> None:
    ragged, plain = pairs(cut)
    casts: list[Callable[[Any], Any]] = [
        lambda t: t.double(),
        lambda t: t.half(),
        lambda t: t.half().float(),
        lambda t: t.to(torch.bfloat16),
        lambda t: t.to(torch.int32),
        lambda t: t.to("cpu", torch.float64, copy=True),
        lambda t: t.type(torch.float64),
    ]
    for r, p in zip(ragged, plain, strict=True):
        assert_equal([change(r) for change in casts], [change(p) for change in casts])
        assert r.to(torch.float32) is r and r.double().to(torch.float32)._spec is r._spec  # type: ignore[attr-defined]
        assert r.to("meta").is_meta and torch.empty_like(r, device="meta").is_meta
    for change in (lambda m: m.half(), lambda m: m.to(torch.float64), lambda m: m.bfloat16()):
        changed = [change(model) for model in make_module(cut)]
        assert_equal(list(changed[0].parameters()), list(changed[1].parameters()))  # type: ignore[arg-type]


def pickle_pieces(cut: str) -> None:
    ragged, plain = pairs(cut)
    ragged[0].no_decay = True  # type: ignore[attr-defined]
    params, data = pickle.loads(pickle.dumps((ragged, [r.detach() for r in ragged])))
    for found in (params, data):
        assert_equal(found, plain)
        assert all(new._spec.layout.matches(old._spec.layout) for new, old in zip(found, ragged, strict=True))
    assert params[0].no_decay and isinstance(params[0], nn.Parameter)
    with pytest.raises(UsageError, match="full_state_dict"):
        torch.save(ragged, io.BytesIO())


def redistribute(cut: str) -> None:
    ragged, plain = pairs(cut)
    for r, p in zip((t.detach() for t in ragged), plain, strict=True):
        bounds = (0,) * dist.get_world_size() + (p.numel(),)
        other = ragged_spec(r.device_mesh, p.shape, p.dtype, bounds).placements
        replica = r.redistribute(placements=[Replicate()])
        for ways in ([r.placements], [[Replicate()]], [[Replicate()], r.placements], [other], [other, r.placements]):
            moved: Any = r
            for placements in ways:
                moved = moved.redistribute(placements=placements)
            assert moved.placements == tuple(ways[-1])
            assert torch.equal(moved.full_tensor(), p)
        assert type(replica) is DTensor and torch.equal(replica.to_local(), p)
        if p.dim() and p.numel():
            sharded = r.redistribute(placements=[Shard(0)])
            back = sharded.redistribute(placements=r.placements)
            assert torch.equal(sharded.full_tensor(), p) and torch.equal(back.to_local(), r.to_local())
    assert ragged[0].redistribute(placements=ragged[0].placements) is ragged[0]


# -- what must not be computed


def mix_layouts(cut: str) -> None:
    ragged, plain = pairs(cut)
    # As many elements on each rank, others.
    r, p = ragged[0].detach(), plain[0].detach()
    sizes = [hi - lo for lo, hi in pairwise(r._spec.layout.bounds)]
    bounds = [0]
    for size in reversed(sizes):
        bounds.append(bounds[-1] + size)
    assert tuple(bounds) != r._spec.layout.bounds
    full = torch.randn(p.shape)
    other = from_full(full, ragged_spec(r.device_mesh, p.shape, p.dtype, bounds))
    with strict_mode(), pytest.raises(UsageError, match="has no rule"):
        r.add_(other)
    assert_equal([r], [p])
    assert torch.equal(whole(r * other), p * full)
    r.add_(other)
    assert_equal([r], [p + full])
    with pytest.raises(RuntimeError, match="must match"):
        ragged[1].detach() + ragged[0].detach()


def assign_wrongly(cut: str) -> str:
    ragged, plain = pairs(cut)
    r, p = ragged[0], plain[0].detach()
    other = ragged_spec(cpu_mesh(), p.shape, p.dtype, (0, *([5] * (dist.get_world_size() - 1)), 296))
    partial = distribute_tensor(p, cpu_mesh(), [Replicate()])
    partial = DTensor.from_local(partial.to_local(), cpu_mesh(), [torch.distributed.tensor.Partial()])
    wrong: list[Any] = [
        p,
        torch.zeros(3),
        torch.zeros(37, 8).to_sparse(),
        r.to_local().detach(),
        ragged[1].detach(),
        from_full(p, other),
        distribute_tensor(p, cpu_mesh(), [Shard(0)]),
        partial,
        1.0,
    ]
    for value in wrong:
        with pytest.raises(UsageError, match=r"\.grad of a ragged tensor"):
            r.grad = value
        with pytest.raises(UsageError, match=r"\.data of a ragged tensor"):
            r.data = value
    for value in (r.detach().double(), r.detach().to("meta")):
        with pytest.raises((UsageError, RuntimeError), match=r"\.data of|dtype|device"):
            r.grad = value
        with pytest.raises(UsageError, match=r"\.data of a ragged"):
            r.data = value
    assert r.grad is None
    assert_equal([r], [p])
    return REFUSED


# -- initialisers


def fill(index: int, *changes: Callable[[Any], object], tolerance: float = 0.0) -> Callable[[str], None]:
    def run(cut: str) -> None:
        for change in changes:
            ragged, plain = pairs(cut)
            drawn_next = []
            for params in (ragged, plain):
                torch.manual_seed(11)
                with torch.no_grad():
                    change(params[index])
                drawn_next.append(torch.rand(3))
            assert torch.equal(*drawn_next)
            assert_equal([ragged[index]], [plain[index]], rtol=tolerance, atol=tolerance)

    return run


def fill_orthogonally(cut: str) -> None:
    fill(0, nn.init.orthogonal_, tolerance=1e-6)(cut)
    # More columns than rows, and as the error says.
    for index in (3, 6):
        ragged, plain = pairs(cut)
        with pytest.raises(UsageError, match="work on a plain tensor"):
            nn.init.orthogonal_(ragged[index])
        torch.manual_seed(11)
        nn.init.orthogonal_(plain[index])
        torch.manual_seed(11)
        made = nn.init.orthogonal_(torch.empty(ragged[index].shape))
        with torch.no_grad():
            ragged[index].copy_(made)
        assert_equal([ragged[index]], [plain[index]])


ALL_MODES, TWO_MODES = "loop foreach fused", "loop foreach"
INIT = nn.init

ROWS: list[Row] = [
    optimizer_row(
        optim.SGD,
        [
            {"lr": 0.1},
            {"lr": 0.1, "momentum": 0.9},
            {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        ],
        ALL_MODES,
    ),
    optimizer_row(optim.Adam, [{"weight_decay": 0.01}, {"amsgrad": True}], ALL_MODES),
    optimizer_row(optim.AdamW, [{}, {"amsgrad": True, "maximize": True}], ALL_MODES),
    optimizer_row(optim.Adagrad, [{}], ALL_MODES),
    optimizer_row(optim.RMSprop, [{}, {"momentum": 0.5, "centered": True}], TWO_MODES),
    optimizer_row(optim.NAdam, [{}], TWO_MODES),
    optimizer_row(optim.RAdam, [{}], TWO_MODES),
    optimizer_row(optim.Adadelta, [{}], TWO_MODES),
    optimizer_row(optim.Adamax, [{}], TWO_MODES),
    optimizer_row(optim.ASGD, [{}], TWO_MODES),
    optimizer_row(optim.Rprop, [{}], TWO_MODES, note="gathers scalar parameters only"),
    optimizer_row(
        optim.Adafactor,
        [{}],
        "loop",
        keep=is_dense,
        tolerance=1e-6,
        note="one gather a step for each gradient of two or more dims, none [accelerated](../optimizers.md#whole-matrices)",
    ),
    optimizer_row(
        optim.Adafactor,
        [{}],
        "foreach",
        keep=is_dense,
        tolerance=1e-6,
        note="the same; an error on torch 2.11",
        is_in_torch=lists_are_interpolated,
    ),
    optimizer_row(
        optim.Muon,
        [{}],
        "",
        keep=is_matrix,
        tolerance=1e-5,
        note="one to three gathers a step for each matrix, none [accelerated](../optimizers.md#whole-matrices)",
    ),
    Row("`LBFGS` (also strong_wolfe)", fit_with_lbfgs, "every evaluation gathers all gradients"),
    Row("`SparseAdam`", refuse_sparse, "gradients are dense; a sparse `.grad` is refused"),
    Row(
        "Lists that mix ragged, plain, `Shard` and `Replicate` parameters of two meshes: "
        "SGD, Adam, AdamW, Adagrad, RMSprop, NAdam",
        step_mixed,
        "loop, foreach; fused where torch has it for DTensors",
    ),
    Row(
        "`torch.compile` of `optimizer.step`: SGD, AdamW",
        compile_steps,
        "loop, foreach; backends aot_eager and inductor",
        world_sizes=(2, 3),
    ),
    Row("`torch.compile` of operations that gather", compile_gather, world_sizes=(2, 3)),
    Row("torch's `clip_grad_norm_`, 2-norm", clip_with_torch(2.0), "foreach: one all-reduce; else one each"),
    Row("torch's `clip_grad_norm_`, 1-norm", clip_with_torch(1.0)),
    Row("torch's `clip_grad_norm_`, inf-norm", clip_with_torch(math.inf)),
    Row("torch's `get_total_norm`, `clip_grads_with_norm_`", clip_in_two_calls),
    Row(
        "torch's `clip_grad_norm_` of ragged, plain, `Shard` and `Replicate` on one mesh",
        clip_mixed_with_torch,
        "torch raises with `foreach=False`, and for an inf-norm where a rank holds nothing of a `Shard`",
    ),
    Row("torch's `clip_grad_norm_` on several meshes", refuse_several_meshes, "use `composable.clip_grad_norm_`"),
    Row("`composable.clip_grad_norm_` of any mix on several meshes", clip_mixed, "one all-reduce for a group of ranks"),
    Row("`GradScaler`: an inf on one rank, of any parameter, skips the step on all", scale),
    Row("`zero_grad`, both ways", zero_grads),
    Row("`AveragedModel`: equal weights, EMA, EMA of lists", average),
    Row("`copy.deepcopy` of parameters and models", deep_copy),
    Row("`.to`, `.half`, `.type`, also of models", cast, "`.to('meta')` too"),
    Row("`pickle`, as messages between ranks are", pickle_pieces, "of the rank's own piece; `torch.save` refuses"),
    Row("`redistribute` to and from `Replicate`, `Shard`, other bounds", redistribute, "asked for, so not counted"),
    Row("Two cuts of one shape in one operation", mix_layouts, "gathers; `strict_mode` refuses"),
    Row("A wrong `.grad` or `.data`", assign_wrongly, "an error at the assignment"),
    Row("`uniform_`", fill(0, lambda t: INIT.uniform_(t, -1, 2), lambda t: t.uniform_(), lambda t: t.exponential_())),
    Row("`normal_`", fill(1, lambda t: INIT.normal_(t, 1, 2), lambda t: t.copy_(torch.randn_like(t)))),
    Row("`trunc_normal_`", fill(3, lambda t: INIT.trunc_normal_(t, std=0.5), lambda t: t.bernoulli_(0.3))),
    Row("`constant_`", fill(5, lambda t: INIT.constant_(t, 0.3))),
    Row("`ones_`", fill(6, INIT.ones_)),
    Row("`zeros_`", fill(0, INIT.zeros_)),
    Row("`xavier_uniform_`", fill(0, INIT.xavier_uniform_)),
    Row("`xavier_normal_`", fill(1, INIT.xavier_normal_)),
    Row("`kaiming_uniform_`", fill(6, lambda t: INIT.kaiming_uniform_(t, a=math.sqrt(5)))),
    Row("`kaiming_normal_`", fill(3, lambda t: INIT.kaiming_normal_(t, mode="fan_out"))),
    Row("`eye_`", fill(3, INIT.eye_)),
    Row("`dirac_`", fill(6, INIT.dirac_), "one gather for each element that is set"),
    Row(
        "`orthogonal_`",
        fill_orthogonally,
        "not with more columns than rows",
    ),
    Row("`sparse_`", fill(0, lambda t: INIT.sparse_(t, 0.4)), "one gather a column"),
]
# Without a compiler, without what takes longest, and without what needs two ranks to have two cuts.
CHEAP = [
    row.name
    for row in ROWS
    if row.run not in (compile_steps, compile_gather, fit_with_lbfgs, mix_layouts, assign_wrongly)
]


# -- the table


def prove_everywhere() -> dict[tuple[int, str], dict[str, Outcome]]:
    """Prove every row at every world size and cut, on real processes."""
    return {(size, cut): run_ranks(prove, size, cut, timeout_s=240)[0] for size in WORLD_SIZES for cut in CUTS}


# One class or function, and the modes in which it is proved.
NAME = re.compile(r"(`\w+`(?: \(.*\))?)(: .+)?")


def table_of(found: dict[tuple[int, str], dict[str, Outcome]], page: str = "") -> str:
    """Return the table in Markdown of the worlds that are in ``found``: world size and cut.

    Classes and functions with the same outcome, one after the other, share a line. A row that this torch cannot do is
    that of ``page``.

    Raises:
        AssertionError: A row came out differently in two worlds.
    """
    cells = []
    for row in ROWS:
        worlds = [(size, cut) for size in row.world_sizes for cut in CUTS if (size, cut) in found]
        outcomes = {found[world][row.name] for world in worlds}
        assert len(outcomes) == 1, f"{row.name}: {outcomes}"
        outcome = outcomes.pop()
        if outcome.verdict == MISSING:
            cells += [("", line[2:]) for line in page.splitlines() if line.startswith(f"| {row.name} |")]
            continue
        is_named = NAME.fullmatch(row.name)
        name, end = is_named.groups("") if is_named else ("", row.name)
        cells.append((name, f"{end} | {outcome.verdict} | {outcome.gathers} | {row.note} |"))
    lines = [f"| {', '.join(name for name, _ in same)}{end}" for end, same in groupby(cells, key=itemgetter(1))]
    return "\n".join(["| Operation | Result | Hidden gathers | Note |", "|---|---|---|---|", *lines])


def with_table(page: str, found: dict[tuple[int, str], dict[str, Outcome]]) -> str:
    """Return the text of the page with the table of ``found`` in its place."""
    head, _, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert end, f"the page has no {BEGIN} ... {END}"
    return f"{head}{BEGIN}\n\n{table_of(found, page)}\n\n{END}{tail}"


def main() -> None:
    PAGE.write_text(with_table(PAGE.read_text(), prove_everywhere()))


if __name__ == "__main__":
    # Ranks look for what they unpickle under the module's own name.
    from tools.ragged_matrix import main as run

    run()

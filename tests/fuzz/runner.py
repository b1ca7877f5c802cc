"""Runs a case on ranks and in one process, and says how it ended."""

import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable import ComposableError, DesyncError, accelerate_optimizer, clip_grad_norm_
from tests.fuzz.annotations import Refused, annotate
from tests.fuzz.between import ACTIONS
from tests.fuzz.cases import Case, between_of, make_model, step_of
from tests.fuzz.programs import PROGRAMS
from tests.fuzz.trees import Model
from tests.world import RankErrors, run_ranks, run_threads

__all__ = ["OUTCOMES", "Outcome", "Wrong", "check_gradients", "run_case"]

OUTCOMES = "right refused wrong hang error impossible".split()
LR = 0.05


class Wrong(AssertionError):  # noqa: N818  # an outcome
    """A number is not that of one process."""


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        kind: ``right``; ``refused`` at the annotation by one of the library's errors; ``wrong`` numbers; ``hang``;
            ``error``; ``impossible``, if plain torch refuses it in one process.
        text: What is wrong, in a line.
        details: The same with all that is known.
    """

    kind: str
    text: str = ""
    details: str = ""


@dataclass(frozen=True)
class _Record:
    """What one step has to give: gradients before it, which parameters got one in it, and values after it."""

    grads: dict[str, torch.Tensor | None]
    values: dict[str, torch.Tensor]


def run_case(case: Case, *, in_processes: bool = False, timeout_s: float = 20.0) -> Outcome:
    """Run ``case``; whatever happens is an outcome."""
    try:
        expected = _in_one_process(case)
    except Exception as error:
        return Outcome("impossible", _line(error), "".join(traceback.format_exception(error)))
    run = run_ranks if in_processes else run_threads
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(_on_a_rank, case.world_size, case, expected, folder, timeout_s=timeout_s)
        except RankErrors as errors:
            return _outcome_of(errors)
        except TimeoutError as error:
            return Outcome("hang", _line(error), str(error))
    return Outcome("right")


def _outcome_of(errors: RankErrors) -> Outcome:
    details = str(errors)
    found = list(errors.errors.values())
    for error in found:
        if isinstance(error, Refused):
            return Outcome("refused", _line(error), details)
    for error in found:
        if isinstance(error, Wrong):
            return Outcome("wrong", _line(error), details)
    first = found[0]
    if isinstance(first, TimeoutError) or _is_hang(first):
        return Outcome("hang", _line(first), details)
    return Outcome("error", _line(first), details)


def _is_hang(error: BaseException) -> bool:
    """Say whether it is the simulation that says that no rank can go on."""
    return isinstance(error, DesyncError) and str(error.fix).startswith(("make ", "send and receive"))


def _line(error: BaseException) -> str:
    name = "" if isinstance(error, (Wrong, Refused)) else f"{type(error).__name__}: "
    return (name + str(error)).splitlines()[0][:200] if str(error) else name


# In one process


def _in_one_process(case: Case) -> list[_Record]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("error")
            return _train_plain(case, Path(folder))
    finally:
        torch.set_default_dtype(before)


def _train_plain(case: Case, folder: Path) -> list[_Record]:
    model = make_model(case)
    optimizer = _make_optimizer(case, model)
    records = []
    for number, name in enumerate(case.programs):
        _add_up(case, model, number, name)
        grads = {name: None if one.grad is None else one.grad.clone() for name, one in model.named_parameters()}
        if case.hooks == "step in backward":
            grads = dict.fromkeys(grads)
        _clip(case, model.parameters(), is_plain=True)
        optimizer.step()
        values = {name: one.detach().clone() for name, one in model.named_parameters()}
        records.append(_Record(grads, values))
        if case.hooks == "step in backward":
            model.zero_grad()
        for index, action in enumerate(case.actions[number]):
            between = between_of(case, model, optimizer, number, index, folder, is_plain=True)
            ACTIONS[action].run(between)
            model, optimizer = between.model, between.optimizer
        _zero(case, optimizer, number)
    return records


def _add_up(case: Case, model: Model, number: int, name: str) -> None:
    """Leave in ``model`` the gradients that one process gets from the samples of all ranks."""
    params = list(model.parameters())
    before = [param.grad for param in params]
    totals: list[torch.Tensor | None] = [None] * len(params)
    for rank in range(case.world_size):
        for param in params:
            param.grad = None
        step = step_of(case, model, number, rank, is_plain=True)
        PROGRAMS[name].run(step)
        if step.has_dropped:
            before = [None] * len(params)
        totals = [_sum(total, param.grad) for total, param in zip(totals, params, strict=True)]
    if case.hooks and ("scale" in case.hooks or "tensor" in case.hooks):
        totals = [None if total is None else total / 2 for total in totals]
    for param, old, total in zip(params, before, totals, strict=True):
        param.grad = _sum(old, total)


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a + b


# On ranks


def _on_a_rank(case: Case, expected: list[_Record], folder: str) -> int:
    torch.set_default_dtype(torch.float64)
    calls: dict[nn.Parameter, int] = {}
    is_early = case.hooks.endswith("before")
    model = annotate(
        lambda: make_model(case), case.annotation, lambda plain: _hook(case, plain, calls) if is_early else None
    )
    if [name for name, _ in model.named_parameters()] != list(expected[0].values):
        raise Wrong("the names of parameters have changed")
    if not is_early:
        _hook(case, model, calls)
    try:
        optimizer = _make_optimizer(case, model)
        if case.speed != "plain" and any(isinstance(param, DTensor) for param in model.parameters()):
            accelerate_optimizer(optimizer, model, flat=case.speed == "flat")
    except ComposableError as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    for number, (name, record) in enumerate(zip(case.programs, expected, strict=True)):
        # Not the model's: after a forward without a backward it may show whole ones.
        params = dict(zip(record.values, optimizer.param_groups[0]["params"], strict=True))
        PROGRAMS[name].run(step_of(case, model, number, dist.get_rank(), is_plain=False))
        place = f"step {number} ({name})"
        check_gradients(params, record.grads, _tolerance(case), place)
        if case.hooks == "count":
            _check_calls(params, record, calls, place)
        if case.hooks != "step in backward":
            _clip(case, params.values(), is_plain=False)
            optimizer.step()
        _check_values(params, record.values, _tolerance(case), place)
        for index, action in enumerate(case.actions[number]):
            between = between_of(case, model, optimizer, number, index, Path(folder), is_plain=False)
            ACTIONS[action].run(between)
            model, optimizer = between.model, between.optimizer
        _zero(case, optimizer, number)
    if not any(case.actions[-1]):
        _check_full_values(params, expected[-1].values, _tolerance(case))
    return len(expected)


def _tolerance(case: Case) -> float:
    return 1e-4 if "float32" in case.tags else 1e-8


def check_gradients(
    params: Mapping[str, nn.Parameter], expected: dict[str, torch.Tensor | None], tolerance: float, place: str
) -> None:
    """Compare every gradient, and whether there is one.

    Raises:
        Wrong: Some gradient is not that of one process.
    """
    for name, param in params.items():
        want = expected[name]
        if (param.grad is None) != (want is None):
            has, should = ("no" if one is None else "a" for one in (param.grad, want))
            raise Wrong(f"{has} gradient where one process has {'one' if should == 'a' else 'none'}: '{name}', {place}")
    pairs = {name: (param.grad, expected[name]) for name, param in params.items()}
    _check({name: (have, want) for name, (have, want) in pairs.items() if have is not None and want is not None},
           tolerance, "gradient", place)  # fmt: skip


def _check_values(
    params: Mapping[str, nn.Parameter], expected: dict[str, torch.Tensor], tolerance: float, place: str
) -> None:
    _check({name: (one, expected[name]) for name, one in params.items()}, tolerance, "value", place)


def _check_full_values(params: Mapping[str, nn.Parameter], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    """Compare what every rank gathers. Collective."""
    full = {
        name: (one.full_tensor() if isinstance(one, DTensor) else one, expected[name]) for name, one in params.items()
    }
    _check(full, tolerance, "full value", "at the end")


def _check(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], tolerance: float, what: str, place: str) -> None:
    """Compare this rank's elements."""
    pieces = {}
    for name, (tensor, want) in pairs.items():
        have = tensor.detach()
        if have.shape != want.shape or have.dtype != want.dtype:
            raise Wrong(f"{what} of another shape or dtype: '{name}', {place}")
        want = want.flatten()
        if isinstance(have, DTensor):
            bounds, rank = have.placements[0].bounds, have.device_mesh.get_local_rank()
            have, want = have.to_local(), want[bounds[rank] : bounds[rank + 1]]
        pieces[name] = (have.flatten().double(), want.double())
    # One comparison costs as much as that of all together.
    every = [torch.cat(side) for side in zip(*pieces.values(), strict=True)]
    if not every or torch.allclose(*every, rtol=tolerance, atol=tolerance, equal_nan=True):
        return
    for name, (have, want) in pieces.items():
        if not torch.allclose(have, want, rtol=tolerance, atol=tolerance, equal_nan=True):
            off, most = (have - want).abs().max().item(), want.abs().max().item()
            raise Wrong(f"{what} differs: '{name}', {place}, off by up to {off:.2g}, right are up to {most:.2g}")


# Of both


def _make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    name, _, how = case.optimizer.partition("-")
    if name == "AdamW":
        # A large eps: the last bits of a gradient that is zero but for rounding must not count.
        options: dict[str, Any] = {"foreach": how == "foreach"} if how != "fused" else {"fused": True}
        return torch.optim.AdamW(params, lr=LR, eps=1e-2, weight_decay=0.1, **options)
    if name == "RMSprop":
        return torch.optim.RMSprop(params, lr=LR, eps=1e-2)
    return torch.optim.SGD(params, lr=LR, momentum=0.9 if name == "momentum" else 0.0, weight_decay=0.01)


def _clip(case: Case, params: Iterable[nn.Parameter], *, is_plain: bool) -> None:
    if case.clip != "none":
        clip = torch.nn.utils.clip_grad_norm_ if is_plain or case.clip == "torch" else clip_grad_norm_
        clip(list(params), 0.5)


def _zero(case: Case, optimizer: torch.optim.Optimizer, number: int) -> None:
    if case.zero != "every other step" or number % 2:
        optimizer.zero_grad(set_to_none=case.zero != "to zeros")


def _hook(case: Case, model: nn.Module, calls: dict[nn.Parameter, int]) -> None:
    """Put hooks on parameters.

    Raises:
        Refused: The library does not take them.
    """
    kind = case.hooks.removesuffix(" before").removesuffix(" after")
    if not kind:
        return
    try:
        for param in model.parameters():
            if param.requires_grad:
                _HOOKS[kind](case, param, calls)
    except ComposableError as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


def _count_calls(case: Case, param: nn.Parameter, calls: dict[nn.Parameter, int]) -> None:
    def count(param: torch.Tensor) -> None:
        calls[param] = calls.get(param, 0) + 1  # type: ignore[index, call-overload]

    param.register_post_accumulate_grad_hook(count)


def _scale(case: Case, param: nn.Parameter, calls: dict[nn.Parameter, int]) -> None:
    def scale(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.div_(2)

    param.register_post_accumulate_grad_hook(scale)


def _scale_tensor(case: Case, param: nn.Parameter, calls: dict[nn.Parameter, int]) -> None:
    param.register_hook(lambda grad: grad / 2)


def _step_in_backward(case: Case, param: nn.Parameter, calls: dict[nn.Parameter, int]) -> None:
    holder = nn.Module()
    holder.param = param
    optimizer = _make_optimizer(case, holder)

    def step(param: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    param.register_post_accumulate_grad_hook(step)


_HOOKS: dict[str, Callable[[Case, nn.Parameter, dict[nn.Parameter, int]], None]] = {
    "count": _count_calls,
    "scale": _scale,
    "tensor hook": _scale_tensor,
    "step in backward": _step_in_backward,
}


def _check_calls(
    params: Mapping[str, nn.Parameter], record: _Record, calls: dict[nn.Parameter, int], place: str
) -> None:
    for name, param in params.items():
        want = int(record.grads[name] is not None)
        if calls.get(param, 0) != want:
            raise Wrong(f"hook ran {calls.get(param, 0)} times: '{name}', {place}")
    calls.clear()

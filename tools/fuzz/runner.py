"""Runs a case on ranks and in one process, and says how it ended."""

import gc
import itertools
import random
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable import ComposableError, DesyncError, accelerate_optimizer, clip_grad_norm_, step_in_backward
from tests.world import RankErrors, run_ranks, run_threads
from tools.fuzz.annotations import Refused, Wrong, annotate, unless_refused
from tools.fuzz.between import ACTIONS, Between
from tools.fuzz.cases import Case, make_model, smaller
from tools.fuzz.nodes import Model, kinds_in
from tools.fuzz.programs import PROGRAMS, Step

__all__ = ["EXACT", "OUTCOMES", "TIMEOUT_S", "Outcome", "Wrong", "added", "check", "check_gradients", "check_values"]
__all__ += ["is_hang", "line_of", "make_optimizer", "outcome_of", "run_case", "shrink", "train_annotated"]

OUTCOMES = "right refused wrong hang error impossible".split()
LR = 0.05
# Of a case; ranks that wait for each other say so much sooner.
TIMEOUT_S = 300.0
# Of float64.
EXACT = 1e-8


@dataclass(frozen=True)
class Outcome:
    """How a case ended."""

    # ``right``; ``refused`` at the annotation by one of the library's errors; ``wrong`` numbers; ``hang``; ``error``;
    # ``impossible``, if plain torch refuses it in one process
    kind: str
    text: str = ""  # what is wrong, in a line
    details: str = ""  # the same with all that is known


@dataclass(frozen=True)
class _Record:
    """What one step has to give: gradients before it, which parameters got one in it, and values after it."""

    grads: dict[str, torch.Tensor | None]  # before it
    values: dict[str, torch.Tensor]  # after it
    missing: frozenset[str]  # parameters without a gradient from the samples of some rank


def run_case(case: Case, *, in_processes: bool = False, timeout_s: float = TIMEOUT_S) -> Outcome:
    """Run ``case``; whatever happens is an outcome."""
    before = torch.get_default_dtype()
    try:
        expected = _in_one_process(case)
    except Exception as error:
        return Outcome("impossible", line_of(error), "".join(traceback.format_exception(error)))
    run = run_ranks if in_processes else run_threads
    try:
        with tempfile.TemporaryDirectory() as folder:
            run(_on_a_rank, case.world_size, case, expected, folder, timeout_s=timeout_s)
    except RankErrors as errors:
        return outcome_of(errors, case)
    except TimeoutError as error:
        return Outcome("hang", line_of(error), str(error))
    finally:
        torch.set_default_dtype(before)
        if "compiled" in case.tags:
            torch.compiler.reset()  # Else what was compiled for one tree is looked through for the next.
    return Outcome("right")


def shrink(case: Case, outcome: Outcome, tries: int = 300) -> Iterator[tuple[Case, Outcome]]:
    """Yield simpler and simpler cases that end in the same way, as many as so many tries find."""
    found: tuple[Case, Outcome] | None = case, outcome
    while found is not None:
        case, outcome = found
        ended = ((other, run_case(other)) for other in itertools.islice(smaller(case), tries))
        alike = outcome.text.split(":")[0]
        found = next(
            (pair for pair in ended if (pair[1].kind, pair[1].text.split(":")[0]) == (outcome.kind, alike)), None
        )
        if found is not None:
            yield found


def outcome_of(errors: RankErrors, case: Any) -> Outcome:
    """Return how a case, or a story, ended whose ranks raised."""
    details = str(errors)
    found = list(errors.errors.values())
    count = sum(isinstance(error, Refused) for error in found)
    if case.annotation.copies is not None and 0 < count < case.world_size:
        return Outcome("wrong", "refused on some ranks only", details)
    for error in found:
        if isinstance(error, Refused):
            return Outcome("refused", line_of(error), details)
    for error in found:
        if isinstance(error, Wrong):
            return Outcome("wrong", line_of(error), details)
    first = found[0]
    if isinstance(first, TimeoutError) or is_hang(first):
        return Outcome("hang", line_of(first), details)
    return Outcome("error", line_of(first), details)


def is_hang(error: BaseException) -> bool:
    """Say whether it is the simulation that says that no rank can go on."""
    return isinstance(error, DesyncError) and str(error.fix).startswith(("make ", "send and receive"))


def line_of(error: BaseException) -> str:
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
    optimizer = _make_optimizer(case, model.parameters())
    records = []
    for number, name in enumerate(case.programs):
        missing = _add_up(case, model, number, name)
        grads = {name: None if one.grad is None else one.grad.clone() for name, one in model.named_parameters()}
        if case.hooks == "step in backward":
            grads = dict.fromkeys(grads)
        _clip(case, model.parameters(), is_plain=True)
        optimizer.step()
        values = {name: one.detach().clone() for name, one in model.named_parameters()}
        records.append(_Record(grads, values, missing))
        if case.hooks == "step in backward":
            model.zero_grad()
        model, optimizer = _act(case, model, optimizer, number, folder, is_plain=True)
        _zero(case, optimizer, number)
    return records


def _add_up(case: Case, model: Model, number: int, name: str) -> frozenset[str]:
    """Leave in ``model`` the gradients that one process gets from the samples of all ranks.

    Returns:
        The parameters that get none from those of some rank.
    """
    missing = set()
    params = list(model.parameters())
    before = [param.grad for param in params]
    totals: list[torch.Tensor | None] = [None] * len(params)
    for rank in range(case.world_size):
        for param in params:
            param.grad = None
        step = Step(model, number, rank, case.world_size, case.seed, is_plain=True)
        PROGRAMS[name].run(step)
        if step.has_dropped:
            before = [None] * len(params)
        missing |= {name for name, param in model.named_parameters() if param.requires_grad and param.grad is None}
        totals = [added(total, param.grad) for total, param in zip(totals, params, strict=True)]
    if case.hooks.startswith("tensor"):
        totals = [None if total is None else total / 2 for total in totals]
    for param, old, total in zip(params, before, totals, strict=True):
        param.grad = added(old, total)
    return frozenset(missing)


def added(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Add gradients, of which either may be missing."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


# On ranks


def _annotated(case: Case) -> tuple[Model, torch.optim.Optimizer]:
    """Return the model of a case, annotated, and its optimizer."""
    is_early = case.hooks.endswith("before")

    def before(plain: Model) -> None:
        if is_early:
            _hook(case, plain)
        _differ(case, plain)
        if case.copies.steps == "torch" and is_torchs_first:
            _apply_in_backward(case, plain)

    is_torchs_first = case.annotation.rng("optimizer").random() < 0.5
    model = annotate(lambda: make_model(case), case.annotation, before)
    if not is_early:
        _hook(case, model)
    try:
        optimizer = _make_optimizer(case, model.parameters())
        if case.speed != "plain" and any(isinstance(param, DTensor) for param in model.parameters()):
            accelerate_optimizer(optimizer, model)
        if case.copies.steps == "ours":
            unless_refused(model, lambda: step_in_backward(optimizer))
        elif case.copies.steps == "torch" and not is_torchs_first:
            _apply_in_backward(case, model)
    except ComposableError as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    return model, optimizer


def train_annotated(case: Case, folder: Path) -> None:
    """Train on this rank, and compare nothing."""
    model, optimizer = _annotated(case)
    gc.collect()  # Of models that were refused, and copied; elsewhere garbage may stay for any time.
    for number, name in enumerate(case.programs):
        PROGRAMS[name].run(Step(model, number, dist.get_rank(), case.world_size, case.seed, is_plain=False))
        if not case.steps_inside:
            _clip(case, optimizer.param_groups[0]["params"], is_plain=False)
            optimizer.step()
        model, optimizer = _act(case, model, optimizer, number, folder, is_plain=False)
        _zero(case, optimizer, number)
        gc.collect()


def _on_a_rank(case: Case, expected: list[_Record], folder: str) -> int:
    torch.set_default_dtype(torch.float64)
    model, optimizer = _annotated(case)
    if [name for name, _ in model.named_parameters()] != list(expected[0].values):
        raise Wrong("the names of parameters have changed")
    for number, (name, record) in enumerate(zip(case.programs, expected, strict=True)):
        # Not the model's: after a forward without a backward it may show whole ones.
        params = dict(zip(record.values, optimizer.param_groups[0]["params"], strict=True))
        _run_program(case, model, number, record)
        place = f"step {number} ({name})"
        grads = dict.fromkeys(record.grads) if case.copies.steps else record.grads
        check_gradients(params, grads, place)
        if not case.steps_inside:
            _clip(case, params.values(), is_plain=False)
            optimizer.step()
        check_values(params, record.values, place)
        model, optimizer = _act(case, model, optimizer, number, Path(folder), is_plain=False)
        _zero(case, optimizer, number)
    # What every rank gathers.
    full = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in params.items()}
    check_values(full, expected[-1].values, "at the end")
    return len(expected)


# With options of replicate


def _differ(case: Case, model: Model) -> None:
    """Let a rank start with values of its own, where annotating is to make them equal."""
    if not case.copies.syncs or dist.get_rank() == 0:
        return
    with torch.no_grad():
        for tensor in (*model.parameters(), *(model.buffers() if case.copies.buffers != "own" else ())):
            tensor.mul_(3)


def _run_program(case: Case, model: Model, number: int, record: _Record) -> None:
    """Run a step.

    Raises:
        Refused: It is one of those that the options exclude.
        Wrong: It is not, or was to be.
    """
    copies, name = case.copies, case.programs[number]
    is_known = PROGRAMS[name].is_single and case.annotation.mode == "replicate" and case.annotation.copies is not None
    is_known = is_known and not case.is_annotated_anew and name != "nothing"
    is_missing = not copies.finds_unused and not copies.is_static and bool(record.missing)
    has_reentrant = "reentrant" in case.tags
    # When backward runs a forward again depends on what each rank left out of it: a limit that docs/memory.md names.
    is_branched = "by_rank" in case.tags and "checkpoint" in kinds_in(case.tree)
    # What an error says, and whether it may be raised here.
    may_be = {
        "ended backward without": not copies.finds_unused and (is_missing or not is_known),
        "backward ended without": not copies.finds_unused and (is_missing or not is_known),
        "is not like the first one": copies.is_static and not case.is_like_the_first,
        # Of a sharded module that gives out tensors in a way nobody sees: see docs/optimizers.md.
        "after its module was reduced": bool(copies.steps) and "hidden box" in kinds_in(case.tree),
        "second gradient": has_reentrant,
        "inside of another one": has_reentrant and case.steps_inside,
        "inside backward": copies.steps == "torch",
        "in different orders": is_branched,
        "has ended by an error of the process group: ": is_branched,
    }
    try:
        PROGRAMS[name].run(Step(model, number, dist.get_rank(), case.world_size, case.seed, is_plain=False))
    except ComposableError as error:
        text = f"{type(error).__name__}: {error}"
        found = [is_expected for words, is_expected in may_be.items() if words in text]
        if not found:
            raise
        raise (Refused if found[0] else Wrong)(text) from error
    if is_known and is_missing:
        raise Wrong(f"no error, though {sorted(record.missing)} have no gradient, step {number} ({name})")


def _apply_in_backward(case: Case, model: Model) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its module asks for another one
        from torch.distributed.optim import _apply_optimizer_in_backward
    kind, options = _optimizer_of(case.optimizer)
    _apply_optimizer_in_backward(kind, [param for param in model.parameters() if param.requires_grad], options)


def check_gradients(
    params: Mapping[str, nn.Parameter], expected: dict[str, torch.Tensor | None], place: str, exact: float = EXACT
) -> None:
    """Compare every gradient, and whether there is one."""
    pairs = {}
    for name, param in params.items():
        want = expected[name]
        if (param.grad is None) != (want is None):
            has, should = ("no", "one") if param.grad is None else ("a", "none")
            raise Wrong(f"{has} gradient where one process has {should}: '{name}', {place}")
        if param.grad is not None and want is not None:
            pairs[name] = param.grad, want
    check(pairs, "gradient", place, exact)


def check_values(
    params: Mapping[str, torch.Tensor], expected: dict[str, torch.Tensor], place: str, exact: float = EXACT
) -> None:
    """Compare every value."""
    check({name: (one, expected[name]) for name, one in params.items()}, "value", place, exact)


def check(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]], what: str, place: str, exact: float = EXACT) -> None:
    """Compare this rank's elements."""
    pieces = {}
    for name, (tensor, want) in pairs.items():
        have = tensor.detach()
        if have.shape != want.shape or have.dtype != want.dtype:
            raise Wrong(f"{what} of another shape or dtype: '{name}', {place}")
        if have.is_sparse != want.is_sparse:
            raise Wrong(f"{what} sparse here or in one process only: '{name}', {place}")
        have, want = (one.to_dense() if one.is_sparse else one for one in (have, want))
        want = want.flatten()
        if isinstance(have, DTensor):
            bounds, rank = have.placements[0].bounds, have.device_mesh.get_local_rank()
            have, want = have.to_local(), want[bounds[rank] : bounds[rank + 1]]
        pieces[name] = (have.flatten().double(), want.double())
    # One comparison costs as much as that of all together.
    every = [torch.cat(side) for side in zip(*pieces.values(), strict=True)]
    if not every or torch.allclose(*every, rtol=exact, atol=exact, equal_nan=True):
        return
    for name, (have, want) in pieces.items():
        if not torch.allclose(have, want, rtol=exact, atol=exact, equal_nan=True):
            off, most = (have - want).abs().max().item(), want.abs().max().item()
            raise Wrong(f"{what} differs: '{name}', {place}, off by up to {off:.2g}, right are up to {most:.2g}")


# Of both


def _act(
    case: Case, model: Model, optimizer: torch.optim.Optimizer, number: int, folder: Path, *, is_plain: bool
) -> tuple[Model, torch.optim.Optimizer]:
    """Do what there is to do after a step; return what is trained from there."""
    for index, name in enumerate(case.actions[number]):
        rng = random.Random(f"{case.seed}/{number}/{index}")
        between = Between(model, optimizer, is_plain, rng, number, folder, case.other)
        ACTIONS[name].run(between)
        model, optimizer = between.model, between.optimizer
    return model, optimizer


def _make_optimizer(case: Case, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return make_optimizer(case.optimizer, params)


def make_optimizer(name: str, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return one of ``OPTIMIZERS``."""
    kind, options = _optimizer_of(name)
    return kind(params, **options)


def _optimizer_of(name: str) -> tuple[Any, dict[str, Any]]:
    name, _, how = name.partition("-")
    if name == "AdamW":
        # A large eps: the last bits of a gradient that is zero but for rounding must not count.
        options: dict[str, Any] = {"foreach": how == "foreach"} if how != "fused" else {"fused": True}
        return torch.optim.AdamW, {"lr": LR, "eps": 1e-2, "weight_decay": 0.1, **options}
    if name == "RMSprop":
        return torch.optim.RMSprop, {"lr": LR, "eps": 1e-2}
    decay = 0.0 if name == "SGD without decay" else 0.01
    return torch.optim.SGD, {"lr": LR, "momentum": 0.9 if name == "momentum" else 0.0, "weight_decay": decay}


def _clip(case: Case, params: Iterable[nn.Parameter], *, is_plain: bool) -> None:
    if case.clip != "none":
        clip = torch.nn.utils.clip_grad_norm_ if is_plain or case.clip == "torch" else clip_grad_norm_
        clip(list(params), 0.5)


def _zero(case: Case, optimizer: torch.optim.Optimizer, number: int) -> None:
    if case.zero != "every other step" or number % 2:
        optimizer.zero_grad(set_to_none=case.zero != "to zeros")


def _hook(case: Case, model: nn.Module) -> None:
    """Put hooks on parameters.

    Raises:
        Refused: The library does not take them.
    """
    try:
        for param in model.parameters():
            if case.hooks.startswith("tensor hook") and param.requires_grad:
                param.register_hook(lambda grad: grad / 2)
            elif case.hooks == "step in backward" and param.requires_grad:
                param.register_post_accumulate_grad_hook(_stepping(_make_optimizer(case, [param])))
    except ComposableError as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


def _stepping(optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], None]:
    def step(_: torch.Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step

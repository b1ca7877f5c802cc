"""Trains any combination of options on ranks and in one process, and compares losses and full parameters.

    python -m tools.options.runs fully_shard "ranks=3, model=gpt"     one case again
    python -m tools.options.runs replicate                            all cases of the table

The one process, the oracle, takes the inputs of every rank in turn, makes the casts that are asked for, averages, and
steps. It knows nothing of sharding, buckets or schedules. What an option changes in it stands beside the option, in
``tools/options/tables.py``.
"""

import argparse
import contextlib
import copy
import functools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.utils import _pytree as pytree

from composable import HandleOptions, MixedPrecisionPolicy, ReplicateOptions, fallback_counts, joinable
from tests.models import loss_of, seeded
from tests.pairwise import Case, case_of, pairwise, text_of
from tests.parity import Run, assert_equal_runs, full
from tests.place import here
from tests.world import run_ranks, run_threads
from tools.options.tables import BF16, FP16, MODELS, NO_CASTS, REFUSED, TABLES, Moment, blocks_of

__all__ = ["FIRST", "cases_of", "check"]

STEPS = 3
# How many cases of each table are in the first tier.
FIRST = 30
MAX_NORM = 0.3
EXACT = 2e-6
ON_DEVICE = 1e-5
# The digits of bfloat16, of gradients that a step multiplies by a learning rate of 0.1.
ROUNDED = 2e-3
RARE: dict[str, Any] = {"fully_shard": HandleOptions, "replicate": ReplicateOptions}


@functools.cache
def cases_of(api: str) -> list[str]:
    """Return the lines of all cases of a table: first those that have every value soonest, last those that compile."""
    left = [
        case for case in pairwise(TABLES[api]) if not any(values.items() <= case.items() for values in REFUSED[api])
    ]
    cases: list[Case] = []
    seen: set[tuple[str, str]] = set()
    while left:
        news = [(case["compiled"] == "not", len(case.items() - seen)) for case in left]
        cases.append(left.pop(news.index(max(news))))
        seen |= cases[-1].items()
    return [text_of(TABLES[api], case) for case in cases]


def check(api: str, text: str, *, in_threads: bool = False) -> None:
    """Train one case, on ranks that are threads unless it is compiled, or always if ``in_threads``.

    Raises:
        AssertionError: Losses or parameters are not those of one process, or training raised something.
    """
    work = _Work(api, case_of(TABLES[api], text))
    run: Callable[..., list[Run]] = run_ranks if work.ranks.get("compiles") and not in_threads else run_threads
    try:
        expected = _train_alone(work)
        with tempfile.TemporaryDirectory() as folder:
            found = run(_train_on_a_rank, work.world_size, api, text, folder)
        assert_equal_runs(found, expected, tolerance=work.tolerance)
    except Exception as error:
        again = f'python -m tools.options.runs {api} "{text}"'
        raise AssertionError(f"{error}\n{type(error).__name__}, of ranks or numbers; again: {again}") from error


class _Work:
    """What the values of a case say together.

    Attributes:
        ranks: What ranks do, by field.
        alone: What the one process does, by field.
        options: Arguments of the annotation.
        tolerance: The largest that a value asks for.
    """

    def __init__(self, api: str, case: Case) -> None:
        values = [TABLES[api][option][name] for option, name in case.items()]
        self.api, self.model = api, case["model"]
        self.world_size = int(case["ranks"])
        self.ranks: dict[str, Any] = {}
        self.alone: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        rare: dict[str, Any] = {}
        for value in values:
            self.options |= value.ranks.get("options", {})
            rare |= value.ranks.get("rare", {})
            self.ranks |= {key: one for key, one in value.ranks.items() if key not in ("options", "rare")}
            self.alone |= value.alone
        if rare:
            self.options["options"] = RARE[api](**rare)
        policy: MixedPrecisionPolicy = self.alone.get("policy", NO_CASTS)
        low = {"compute": policy.param_dtype, "reduce": policy.reduce_dtype or policy.param_dtype}
        is_rounded = any(low[place] in (BF16, FP16) for value in values for place in value.rounds.split())
        exact = EXACT
        if here().type != "cpu":
            # Kernels of matrix products, and the order in which they add up, depend on where a parameter lies.
            is_rounded, exact = is_rounded or any(dtype in (BF16, FP16) for dtype in low.values()), ON_DEVICE
        self.tolerance = max(ROUNDED if is_rounded else exact, *(value.tolerance for value in values))

    @property
    def data_size(self) -> int:
        """How many ranks have inputs of their own."""
        return self.world_size // int(self.ranks.get("tensor_parallel", 1))

    @property
    def micros(self) -> int:
        return int(self.alone.get("micros", 1))

    def inputs(self, step: int, rank: int) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Return the micro-batches of a rank; none if it has run out of them."""
        count = [STEPS, 1, 2, 0][rank] if self.alone.get("uneven") else STEPS
        seeds = [1000 * step + 10 * micro + rank for micro in range(self.micros)] if step < count else []
        return [_inputs(self.model, seed) for seed in seeds]


def _inputs(name: str, seed: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = MODELS[name]().example_inputs(seed)
    if name == "conditional":
        args = (*args, ("left", "right", "none")[(seed // 1000 + seed) % 3])
    return args, kwargs


# In one process


def _train_alone(work: _Work) -> Run:
    model = seeded(MODELS[work.model], 0)
    optimizer = work.ranks["optimizer"]([param for param in model.parameters() if param.requires_grad])
    losses = []
    for step in range(STEPS):
        losses.append(_backward_alone(work, model, step))
        if work.alone.get("clips"):
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not work.ranks.get("keeps_zeros"))
        if step == 0 and work.alone.get("is_written"):
            _write(model)
    losses = [] if work.alone.get("uneven") else losses
    return Run(losses, {fqn: param.detach().clone() for fqn, param in model.named_parameters()})


def _backward_alone(work: _Work, model: nn.Module, step: int) -> float:
    """Add to each gradient the mean over ranks of what their own would be; return the mean loss."""
    policy: MixedPrecisionPolicy = work.alone.get("policy", NO_CASTS)
    compute = policy.param_dtype
    low = model if compute is None else copy.deepcopy(model).to(compute)
    params = dict(low.named_parameters())
    before = {fqn: param.grad for fqn, param in model.named_parameters()}
    total: dict[str, torch.Tensor] = {}
    losses = []
    for rank in range(work.data_size):
        mine: dict[str, torch.Tensor] = {}
        for args, kwargs in work.inputs(step, rank):
            for param in params.values():
                param.grad = None
            args, kwargs = pytree.tree_map(lambda one: _cast(one, compute), (args, kwargs))
            loss = loss_of(low(*args, **kwargs))
            (loss * work.alone.get("times", 1)).backward()
            losses.append(loss.item())
            for fqn, param in params.items():
                if param.grad is not None:
                    grad = param.grad.to(policy.reduce_dtype or param.dtype)
                    if work.alone.get("adds_averages"):
                        grad = grad.double()
                    mine[fqn] = mine[fqn] + grad if fqn in mine else grad
        for fqn, grad in mine.items():
            total[fqn] = total.get(fqn, torch.zeros((), dtype=torch.float64)) + grad.double()
    divisor = work.data_size * work.alone.get("divisor", 1)
    for fqn, param in model.named_parameters():
        param.grad = before[fqn]
        if fqn not in total and work.alone.get("fills_unused") and param.requires_grad:
            total[fqn] = torch.zeros_like(param, dtype=torch.float64)
        if fqn in total:
            mean = (total[fqn] / divisor).to(param.dtype)
            param.grad = mean if param.grad is None else param.grad + mean
    return sum(losses) / max(len(losses), 1)


def _cast(one: Any, dtype: torch.dtype | None) -> Any:
    is_float = isinstance(one, torch.Tensor) and one.is_floating_point()
    return one.to(dtype) if is_float and dtype is not None else one


def _write(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)


# On ranks


def _train_on_a_rank(api: str, text: str, folder: str) -> Run:
    work = _Work(api, case_of(TABLES[api], text))
    if work.ranks.get("compiles"):
        warnings.simplefilter("ignore")  # The compiler calls what torch has deprecated.
        torch.compiler.reset()
    # A reentrant checkpoint inside of what has no gradients yet.
    warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
    fallback_counts(reset=True)
    mesh, rank = work.ranks["mesh"](work.world_size) if "mesh" in work.ranks else (None, dist.get_rank())
    model = _annotated(work, mesh)
    optimizer = _optimizer(work, model)

    def step_all() -> None:
        for average in work.ranks.get("averages", ()):
            average(model)
        if "clip" in work.ranks:
            work.ranks["clip"](optimizer.param_groups[0]["params"], MAX_NORM)
        if not work.ranks.get("steps_inside"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=not work.ranks.get("keeps_zeros"))

    losses = []
    with _joined(work, model, step_all):
        for step in range(STEPS):
            inputs = work.inputs(step, rank)
            if not inputs:
                break
            runs = [functools.partial(_loss, model, *one) for one in inputs]
            losses.append(_mean(work.ranks["backward"](model, runs)))
            step_all()
            if step == 0 and "between" in work.ranks:
                make = functools.partial(_annotated, work, mesh)
                model, optimizer = work.ranks["between"](
                    Moment(model, optimizer, make, functools.partial(_optimizer, work), runs[0], folder)
                )
    if work.alone.get("uneven"):
        losses = []
    else:
        mean = torch.tensor(losses, dtype=torch.float64, device=here())
        dist.all_reduce(mean)
        losses = (mean / work.world_size).tolist()
    assert fallback_counts() == {}, "gathers that nobody asked for"
    whole = {fqn.replace("_checkpoint_wrapped_module.", ""): full(one) for fqn, one in model.named_parameters()}
    return Run(losses, whole)


def _annotated(
    work: _Work, mesh: Any, *, seed: int = 0, model: Any = None, annotate: Callable[..., Any] | None = None
) -> Any:
    """Return a model as the case has it."""
    ranks = work.ranks
    is_new = model is None
    if is_new:
        with ranks.get("device", contextlib.nullcontext)():
            model = seeded(MODELS[work.model], seed)
        for change, more in (("differ", ()), ("split", (mesh,)), ("checkpoint", ())):
            if change in ranks:
                ranks[change](model, *more)
    if ranks.get("compiles") == "before":
        _compile(model)
    where = {} if mesh is None else {"mesh": mesh["data"] if isinstance(mesh, dict) else mesh}
    options = {**work.options, **where}
    if "chosen" in ranks:
        options["options"] = replace(options.get("options", ReplicateOptions()), **ranks["chosen"](model))
    (annotate or ranks["annotate"])(model, options)
    if ranks.get("compiles") == "after":
        _compile(model)
    for change in ("set", "checkpoint later", "place", "hook"):
        if change in ranks:
            ranks[change](model)
    if "load" in ranks and is_new:
        ranks["load"](model, seeded(MODELS[work.model], seed))
    return model


def _optimizer(work: _Work, model: nn.Module) -> torch.optim.Optimizer:
    optimizer: torch.optim.Optimizer = work.ranks["optimizer"]([one for one in model.parameters() if one.requires_grad])
    if "steps" in work.ranks:
        work.ranks["steps"](optimizer, model)
    return optimizer


def _compile(model: Any) -> None:
    for block in blocks_of(model):
        block.compile(backend="aot_eager")


def _loss(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    return loss_of(model(*args, **kwargs))


def _mean(losses: list[torch.Tensor]) -> float:
    return sum(loss.item() for loss in losses) / len(losses)


@contextlib.contextmanager
def _joined(work: _Work, model: nn.Module, step: Callable[[], None]) -> Iterator[None]:
    """Enter ``Join``, which changes how all warnings are shown, if ranks have different numbers of inputs."""
    if not work.alone.get("uneven"):
        yield
        return
    with warnings.catch_warnings(), Join([joinable(model, step=step)]):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("api", choices=TABLES)
    parser.add_argument("case", nargs="?", help="option=value, ...: those that are not the defaults")
    given = parser.parse_args()
    cases = cases_of(given.api) if given.case is None else [given.case]
    start, wrong = time.perf_counter(), 0
    for case in cases:
        try:
            check(given.api, case)
        except AssertionError as error:
            wrong += 1
            print(error)
    print(f"{len(cases)} cases, {wrong} not as in one process, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()

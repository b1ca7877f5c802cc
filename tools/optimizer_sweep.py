"""Every optimizer class that known packages export, on a sharded model: what comes out, and why.

    python -m tools.optimizer_sweep                # judges every class and writes examples/clients/optimizers.md
    python -m tools.optimizer_sweep optimi heavyball.SOAP    # judges some, and prints what came out

Classes are found by what a package exports. Two steps on two ranks are held against one process on the whole batch,
and, where that differs or fails, against torch's ``fully_shard``. What is saved then goes on at one rank.
"""

import contextlib
import functools
import importlib
import inspect
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.optim import SGD, AdamW, Optimizer

from composable import ComposableError, fallback_counts, fully_shard, load_checkpoint, save_checkpoint
from tests.models import random_input, seeded
from tests.parity import full
from tests.world import RankErrors, run_threads

__all__ = ["PACKAGES", "PAGE", "Outcome", "judge", "kinds_of", "rows_of"]

# By the name to import.
PACKAGES = {
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch-optimizer",
    "heavyball": "heavyball",
    "optimi": "torch-optimi",
    "schedulefree": "schedulefree",
    "torchao.optim": "torchao",
    "muon_fsdp2": "muon-fsdp2",
}
ROWS = 6  # of the global batch: 1, 2 and 3 ranks divide it
WIDTH = 8
STEPS, MORE_STEPS = range(2), range(2, 4)

EQUAL, GATHERS, LIKE_FSDP2 = "equal", "gathers", "equal to FSDP2"
REFUSED, FAILS, FAILS_THERE_TOO, WRONG = "refused with the reason", "fails here", "fails here and on FSDP2", "wrong"
DIFFERS = "differs"
WITH_A_LINE = "equal with a line"
NOT_AS_ONE = "as FSDP2, not as one process"
APART = "if each parameter has its own handle, and ranks divide its rows"
RUNS = (EQUAL, GATHERS, LIKE_FSDP2, WITH_A_LINE)
PAGE = Path(__file__).parents[1] / "examples" / "clients" / "optimizers.md"
BEGIN, END = "<!-- begin: written by `python -m tools.optimizer_sweep` -->", "<!-- end: optimizers -->"
# What texts of errors say, in words.
WORDS = {
    "got mixed torch.Tensor and DTensor": "mixes plain tensors and DTensors",
    "^AssertionError$": "writes a DTensor into a plain tensor",
    "in-place operations that require placement changes|which requires redistribution": "needs another placement",
    "does not have a sharding strategy|^RuntimeError: aten.nonzero": "an operation without a sharding strategy",
    "is more than data|torch.save would write": "its state holds objects",
    "the state of .* has .*, of no parameter": "its state belongs to no parameter",
    "the state of .* is of another form": "its state has another form than torch's",
    "element 0 of tensors does not require grad": "wants gradients with a graph",
    "does not support dense gradients": "wants sparse gradients",
    "is or holds a .* not an optimizer": "is no `torch.optim.Optimizer`",
    "The size of tensor a .* must match": "operands of different sizes",
    "unsupported DTensor placement": "knows `Shard` and `Replicate` only",
}


# -- the model: matrices, vectors and scalars, each in a module of its own, so that a policy can cut as FSDP2 does


class One(nn.Module):
    """A layer with one parameter: a matrix multiplies, a vector is added, a scalar scales."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.randn(shape) * 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.value.ndim == 2:
            return F.linear(x, self.value)
        return x * self.value if self.value.numel() == 1 else x + self.value


class Block(nn.Sequential):
    """Layers that share a handle."""


def make_model(how: "How", api: str) -> nn.Module:
    # FSDP2 takes no parameter without a dim.
    scalar = (1,) if api == "FSDP2" or not how.scalars else ()
    width = how.width

    def build() -> nn.Module:
        first = Block(One(2 * width, width), One(2 * width))
        return nn.Sequential(first, nn.Tanh(), Block(One(width, 2 * width), One(*scalar)), One(width))

    return seeded(build, 0).to(how.dtype)


def annotate(model: nn.Module, api: str) -> None:
    """Shard the model: in handles of ours, one for each parameter (``apart``), or as FSDP2 does."""
    if api == "FSDP2":
        for module in (*filter(lambda module: isinstance(module, Block), model), model):
            torch_fully_shard(module)
    elif api:
        fully_shard(model, policy={One if api == "apart" else Block})


# -- how a class is made and stepped, where that is not ``kind(model.parameters())`` and ``optimizer.step()``


def by_parameters(kind: type[Optimizer], model: nn.Module, **options: Any) -> Any:
    return kind(model.parameters(), **options)


def by_model(kind: type[Optimizer], model: nn.Module, **options: Any) -> Any:
    return kind(model, **options)  # type: ignore[arg-type]


def by_model_and_parameters(kind: Any, model: nn.Module, **options: Any) -> Any:
    return kind(model, model.parameters(), **options)


def by_matrices(kind: type[Optimizer], model: nn.Module, **options: Any) -> Any:
    return kind([param for param in model.parameters() if param.ndim == 2], **options)


def by_two_groups(kind: type[Optimizer], model: nn.Module, **options: Any) -> Any:
    """Tell matrices from others by ``use_muon``."""
    matrices = {"params": [param for param in model.parameters() if param.ndim == 2], "use_muon": True, **options}
    others = {"params": [param for param in model.parameters() if param.ndim != 2], "use_muon": False, **options}
    return kind([matrices, others])


def by_two_optimizers(kind: Any, model: nn.Module) -> Any:
    from heavyball import AdamW, Muon

    matrices = {"params": [param for param in model.parameters() if param.ndim == 2], "optimizer": Muon}
    others = {"params": [param for param in model.parameters() if param.ndim != 2], "optimizer": AdamW}
    return kind([matrices, others])


def around(kind: Any, model: nn.Module, **options: Any) -> Any:
    return kind(AdamW(model.parameters(), lr=0.01), **options)


def around_sgd(kind: Any, model: nn.Module) -> Any:
    scheduler = SimpleNamespace(step=lambda: 0.05)
    return kind(model.parameters(), SGD(model.parameters(), lr=0.1), model, scheduler)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def step_after_backward(model: nn.Module, optimizer: Any, batch: torch.Tensor, *, create_graph: bool = False) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward(create_graph=create_graph)
    optimizer.step()


def step_with_closure(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)


def step_with_loss(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    """Tell the optimizer the loss of the whole batch, as every rank has to."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    whole = loss.detach()
    if dist.is_initialized():
        dist.all_reduce(whole, op=dist.ReduceOp.AVG)
    optimizer.step(whole.item)


def step_with_loss_function(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    optimizer.set_closure(F.mse_loss, batch, torch.zeros_like(batch))
    optimizer.step()


def step_in_fused_backward(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    optimizer.fused_backward(loss_of(model, batch), lr=0.01)


def step_after_its_backward(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    optimizer.zero_grad()
    optimizer.backward(loss_of(model, batch))
    optimizer.step()


def step_of_objectives(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> None:
    output = model(batch)
    optimizer.zero_grad()
    optimizer.pc_backward([output.square().mean(), output.abs().mean()])
    optimizer.step()


@dataclass(frozen=True)
class How:
    """How a class is made and stepped.

    Attributes:
        make: Called with the class, the model and ``options``.
        step: Called with model, optimizer and batch.
        options: Beyond the package's own values.
        scalars: Parameters without a dim are among the others; else they have one of one element.
        width: Of the model.
        dtype: Of the model.
    """

    make: Callable[..., Any] = by_parameters
    step: Callable[[nn.Module, Any, torch.Tensor], None] = step_after_backward
    options: Mapping[str, Any] = field(default_factory=dict)
    scalars: bool = True
    width: int = WIDTH
    dtype: torch.dtype = torch.float32


def package_of(key: str) -> str:
    return key.rpartition(".")[0]


def how_of(key: str) -> How:
    how = HOW.get(key, HOW.get(package_of(key), How()))
    return replace(how, scalars=how.scalars and not FLAT.match(key))


PO, HB = "pytorch_optimizer", "heavyball"
WITH_GRAPH = functools.partial(step_after_backward, create_graph=True)
HOW: dict[str, How] = {
    "torch.optim.LBFGS": How(step=step_with_closure),
    "torch.optim.Muon": How(make=by_matrices),
    "optimi": How(options={"lr": 0.01}),
    "muon_fsdp2": How(make=by_two_groups, options={"lr": 0.01}),
    # Smaller pieces are not quantised.
    "torchao.optim": How(width=64),
    "schedulefree.RAdamScheduleFree": How(options={"silent_sgd_phase": False}),
    "schedulefree.RAdamScheduleFreeClosure": How(options={"silent_sgd_phase": False}, step=step_with_closure),
    "schedulefree.AdamWScheduleFreeClosure": How(step=step_with_closure),
    "schedulefree.SGDScheduleFreeClosure": How(step=step_with_closure),
    f"{HB}.SAMWrapper": How(step=step_with_closure),
    f"{HB}.SplitOpt": How(make=by_two_optimizers),
    f"{PO}.LBFGS": How(step=step_with_closure),
    f"{PO}.AliG": How(step=step_with_loss, options={"max_lr": 0.1}),
    **{f"{PO}.{name}": How(step=WITH_GRAPH) for name in ("AdaHessian", "SophiaH")},
    **{f"{PO}.{name}": How(make=by_model, step=step_in_fused_backward) for name in ("LOMO", "AdaLOMO")},
    **{
        f"{PO}.{name}": How(step=step_with_closure, options={"base_optimizer": SGD, "lr": 0.1})
        for name in ("SAM", "FriendlySAM", "LookSAM")
    },
    **{
        f"{PO}.{name}": How(make=by_two_groups)
        for name in ("AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon")
    },
    **{f"{PO}.{name}": How(make=around) for name in ("Lookahead", "OrthoGrad", "ScheduleFreeWrapper", "Magma")},
    f"{PO}.AdaShift": How(options={"keep_num": 1}),
    f"{PO}.AdamMini": How(make=by_model),
    # Singular vectors, which rounding turns.
    f"{PO}.Conda": How(dtype=torch.float64),
    f"{PO}.BSAM": How(step=step_with_closure, options={"num_data": ROWS}),
    f"{PO}.GSAM": How(make=around_sgd, step=step_with_loss_function),
    f"{PO}.LoRARite": How(make=by_matrices),
    f"{PO}.PCGrad": How(make=around, step=step_of_objectives),
    f"{PO}.RAdam": How(options={"degenerated_to_sgd": True}),
    f"{PO}.Ranger21": How(options={"num_iterations": 10}),
    f"{PO}.SafeFP16Optimizer": How(make=around, step=step_after_its_backward),
    f"{PO}.ScheduleFreeRAdam": How(options={"silent_sgd_phase": False}),
    f"{PO}.SpectralSphere": How(make=by_matrices, options={"solver_max_iterations": 5}),
    f"{PO}.TRAC": How(make=around, options={"s_prev": 0.1}),
    f"{PO}.WSAM": How(make=by_model_and_parameters, step=step_with_closure, options={"base_optimizer": SGD, "lr": 0.1}),
}
# These fail in one process with a parameter that has no dim.
FLAT = re.compile(rf"{HB}\.(.*SOAP.*|.*SOLP|.*Shampoo|PSGDLRA)$|{PO}\.(AdaLOMO|PCGrad|TRAC)$")


def imported(package: str) -> ModuleType:
    """Import a package, whatever it warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(package)


def kinds_of(package: str) -> list[str]:
    """Return the classes that a package exports, as ``package.name``; those that end with ``Base`` are none."""
    module = imported(package)
    found = {name: kind for name, kind in vars(module).items() if inspect.isclass(kind) and issubclass(kind, Optimizer)}
    return [f"{package}.{name}" for name in sorted(found) if name != "Optimizer" and not re.match("_|.*Base$", name)]


# -- runs


Values = list[torch.Tensor]


@dataclass(frozen=True)
class Run:
    """What training on two ranks gave.

    Attributes:
        found: Parameters after the first steps.
        gathers: How often operations gathered in them.
        last: Parameters after the last steps, if they were to be made.
        unsaved: Why nothing was saved between.
    """

    found: Values
    gathers: int = 0
    last: Values = field(default_factory=list)
    unsaved: str = ""


def make_optimizer(key: str, how: How, model: nn.Module) -> Any:
    package, _, name = key.rpartition(".")
    kind = getattr(importlib.import_module(package), name)
    torch.manual_seed(0)
    optimizer = how.make(kind, model, **how.options)
    if re.search("ScheduleFree|SFAdamW", name) and hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


def train(how: How, model: nn.Module, optimizer: Any, steps: range, rank: int = 0, world_size: int = 1) -> None:
    for step in steps:
        batch = random_input(step, ROWS, how.width, dtype=how.dtype)
        how.step(model, optimizer, batch.chunk(world_size)[rank])


def values(model: nn.Module) -> Values:
    return [full(param).reshape(-1) for param in model.parameters()]


@contextlib.contextmanager
def prepared(package: str) -> Iterator[None]:
    """Leave out compilation, and other packages' warnings."""
    module = imported(package)
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        torch.compiler.set_stance("force_eager")
        if package == HB:
            patch.setattr(module.utils, "compile_mode", None)
        try:
            yield
        finally:
            torch.compiler.set_stance("default")


@contextlib.contextmanager
def with_line() -> Iterator[None]:
    """Do what a user of heavyball has to, since it writes to ``Shard`` and ``Replicate`` only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(imported(HB).utils, "_copy_full_to_local", lambda target, source: target.copy_(source))
        yield


def attempt_alone(key: str, how: How) -> Run | Exception:
    """Make the first steps in one process; return what it raises."""
    model = make_model(how, "")
    try:
        train(how, model, make_optimizer(key, how, model), STEPS)
    except Exception as error:
        return error
    return Run(values(model))


def run_on_ranks(key: str, how: How, api: str, folder: str = "") -> Run:
    """Train on this rank, and save on the way where a folder is given."""
    model = make_model(how, api)
    annotate(model, api)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = make_optimizer(key, how, model)
        fallback_counts(reset=True)
        train(how, model, optimizer, STEPS, rank, world_size)
        run = Run(values(model), sum(fallback_counts().values()))
        if not folder:
            return run
        try:
            save_checkpoint(folder, len(STEPS), model, optimizer)
        except Exception as error:
            return replace(run, unsaved=text_of(error))
        train(how, model, optimizer, MORE_STEPS, rank, world_size)
        return replace(run, last=values(model))


def go_on_on_ranks(key: str, how: How, api: str, folder: str) -> Run:
    """Take up what was saved, and return the parameters after the last steps."""
    model = make_model(how, api)
    annotate(model, api)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = make_optimizer(key, how, model)
        load_checkpoint(folder, model, optimizer)
        train(how, model, optimizer, MORE_STEPS, dist.get_rank(), dist.get_world_size())
    return Run(values(model))


def attempt(fn: Callable[..., Run], world_size: int, *args: object) -> Run | Exception:
    """Return what the first rank returns, or the first error."""
    try:
        return run_threads(fn, world_size, *args)[0]
    except RankErrors as failure:
        return next(error for error in failure.errors.values() if isinstance(error, Exception))


def is_equal(run: Run | Exception, expected: Run | Exception, begin: Values, within: float = 1e-3) -> bool:
    """Say whether two runs ended, and differ by rounding and by no more of their way from ``begin`` than ``within``."""
    if isinstance(run, Exception) or isinstance(expected, Exception):
        return False
    return all(
        bool((one - other).abs().max() <= within * (other - start).abs().max() + 4e-7 * other.abs().max())
        for one, other, start in zip(run.found, expected.found, begin, strict=True)
    )


def text_of(error: Exception) -> str:
    """Return the first line of an error, shortened, or what it means."""
    line = next(iter(str(error).strip().splitlines()), "")
    text = f"{type(error).__name__}: {line}".removesuffix(": ")
    words = next((words for pattern, words in WORDS.items() if re.search(pattern, text)), "")
    return words or re.sub(r"\d+\.\S+\.value", "...", text)[:120].replace("|", "/")


@dataclass(frozen=True)
class Outcome:
    """What came out for one class.

    Attributes:
        verdict: One of the words of the page.
        reason: Why, where it does not run.
        resumed: ``EQUAL`` if it goes on at one rank as if never stopped; else why not. Empty where it does not run.
        fsdp2: Whether it runs on FSDP2; ``None``: not asked.
    """

    verdict: str
    reason: str = ""
    resumed: str = ""
    fsdp2: bool | None = None


def judge(key: str, *, ask_fsdp2: bool = False) -> Outcome:
    """Find out what a class does; FSDP2 is asked where it matters, or always."""
    how, package = how_of(key), package_of(key)
    with prepared(package), tempfile.TemporaryDirectory() as folder:
        begin = values(make_model(how, ""))
        alone = attempt_alone(key, how)
        assert not is_equal(alone, Run(begin), begin), f"{key} moves nothing"
        run = attempt(run_on_ranks, 2, key, how, "ours", folder)
        verdict, reason = (GATHERS if isinstance(run, Run) and run.gathers else EQUAL), ""
        if package == HB and isinstance(run, Exception):
            verdict, reason = WITH_A_LINE, text_of(run)
            with with_line():
                run = attempt(run_on_ranks, 2, key, how, "ours", folder)
        is_like_one = is_equal(run, alone, begin)
        theirs = None if is_like_one and not ask_fsdp2 else attempt(run_on_ranks, 2, key, how, "FSDP2")
        fsdp2 = None if theirs is None else isinstance(theirs, Run)
        api = "ours"
        if theirs is not None and not is_like_one:
            if isinstance(theirs, Exception):
                failed = Outcome(FAILS_THERE_TOO, text_of(theirs), "", False)
                return failed if isinstance(run, Exception) else replace(failed, verdict=WRONG)
            if is_equal(run, theirs, begin):
                verdict, reason = (LIKE_FSDP2, "") if verdict != WITH_A_LINE else (verdict, f"{reason}; {NOT_AS_ONE}")
            else:
                api, apart = "apart", attempt(run_on_ranks, 2, key, how, "apart", folder)
                if not is_equal(apart, theirs, begin):
                    known = REFUSED if isinstance(run, ComposableError) else FAILS
                    return Outcome(*((known, text_of(run)) if isinstance(run, Exception) else (WRONG, "")), "", True)
                verdict, reason, run = LIKE_FSDP2, APART, apart
        assert isinstance(run, Run)
        if run.unsaved:
            return Outcome(verdict, reason, run.unsaved, fsdp2)
        with with_line() if verdict == WITH_A_LINE else contextlib.nullcontext():
            resumed = attempt(go_on_on_ranks, 1, key, how, api, folder)
        if isinstance(resumed, Exception):
            return Outcome(verdict, reason, text_of(resumed), fsdp2)
        # Classes that divide by what is almost zero make half a percent of a rounding, on some processors.
        is_same = is_equal(resumed, Run(run.last), begin, within=1e-2)
        return Outcome(verdict, reason, EQUAL if is_same else DIFFERS, fsdp2)


# -- the page


def rows_of(page: str) -> dict[str, Outcome]:
    """Read the outcome of every class from the page."""
    rows = {}
    for line in page.partition(BEGIN)[2].partition(END)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 6 and cells[0].strip("`") in PACKAGES:
            package, verdict, reason, resumed, fsdp2, names = cells
            for name in re.findall(r"\w+", names):
                rows[f"{package.strip('`')}.{name}"] = Outcome(verdict, reason, resumed, fsdp2 == "runs")
    return rows


def with_table(page: str, outcomes: Mapping[str, Outcome]) -> str:
    """Return the page with the outcomes in it: a row for those of a package that are alike."""
    grouped: dict[tuple[str, Outcome], list[str]] = {}
    for key, outcome in outcomes.items():
        package, _, name = key.rpartition(".")
        grouped.setdefault((package, outcome), []).append(f"`{name}`")
    there = [outcome for outcome in outcomes.values() if outcome.fsdp2]
    both = sum(outcome.verdict in RUNS for outcome in there)
    here = sum(outcome.verdict in RUNS for outcome in outcomes.values())
    lines = [
        f"Of {len(outcomes)} classes, {here} run here. Of {len(there)} that run on FSDP2, {both} run here.",
        "",
        "<details>\n<summary>The classes</summary>\n",
        "| Package | Outcome | Why | Resumes on 1 rank | FSDP2 | Classes |",
        "|---|---|---|---|---|---|",
    ]
    order = (*RUNS, REFUSED, FAILS, FAILS_THERE_TOO, WRONG)
    for (package, one), names in sorted(
        grouped.items(), key=lambda item: ([*PACKAGES].index(item[0][0]), order.index(item[0][1].verdict))
    ):
        fsdp2 = "runs" if one.fsdp2 else "fails"
        lines.append(f"| `{package}` | {one.verdict} | {one.reason} | {one.resumed} | {fsdp2} | {' '.join(names)} |")
    lines.append("\n</details>")
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    return f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}"


def main(words: Sequence[str]) -> None:
    keys = [key for word in words or PACKAGES for key in (kinds_of(word) if word in PACKAGES else [word])]
    outcomes = {}
    for key in keys:
        outcomes[key] = judge(key, ask_fsdp2=True)
        print(key, outcomes[key], flush=True)
    if not words:
        PAGE.write_text(with_table(PAGE.read_text(), outcomes))


if __name__ == "__main__":
    main(sys.argv[1:])

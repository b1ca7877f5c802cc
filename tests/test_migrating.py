"""The pages on coming from torch's wrappers: a row for each name there, and none that promises what is not here."""

import ast
import builtins
import copy
import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

import _traversal_utils
import composable
from composable import ConfigError, FSDPModule, fully_shard, load_full_state_dict, replicate, unshard_params
from composable.annotation.root import FullyShardState
from tests.world import on_ranks, run_ranks

DOCS = Path(__file__).parent.parent / "docs"
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
# That of constraints.txt: an older torch lacks some of the names that have rows.
OLDEST = (2, 13)


# -- the pages


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table: what is there, what is here."""

    there: str
    here: str

    @property
    def names(self) -> set[str]:
        """The names that the first column is about; of `Class.field` both together."""
        return set(re.findall(r"[A-Za-z_][\w.]*", " ".join(code_of(self.there))))

    @property
    def promises(self) -> list[str]:
        """The code in the second column, but for what it says is torch's."""
        return code_of(re.sub(r"torch's `[^`]+`", "", self.here))

    @property
    def since(self) -> tuple[int, ...]:
        """The torch that first has them."""
        found = re.search(r"\((\d+)\.(\d+)\)", self.there)
        return tuple(map(int, found.groups())) if found else OLDEST


def code_of(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def rows_of(page: str, heading: str) -> list[Row]:
    """Return the rows of the table below a heading of a page."""
    text = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (.+?) \| (.+) \|$", text, flags=re.MULTILINE)
    rows = [Row(*pair) for pair in cells if pair[0] not in ("There", "In torch", "---")]
    assert rows, f"no table below {heading!r} on {page}"
    return rows


# -- what torch has


def arguments_of(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def methods_of(cls: type) -> set[str]:
    """Return the public methods and attributes that ``cls`` has beside those of a module, or in place of them."""
    own = {name for name in dir(cls) if not hasattr(nn.Module, name)} | vars(cls).keys()
    return {name for name in own if not name.startswith("_")}


def fields_of(*classes: type) -> set[str]:
    """Return ``Class.field`` for the public fields and members of ``classes``; of a class without, its name."""
    found: set[str] = set()
    for cls in classes:
        names: list[str] = []
        if issubclass(cls, enum.Enum):
            names = list(cls.__members__)
        elif dataclasses.is_dataclass(cls):
            names = [field.name for field in dataclasses.fields(cls)]
        found |= {f"{cls.__name__}.{name}" for name in names} or {cls.__name__}
    return found


def exported(*, by_fully_shard: bool) -> dict[str, Any]:
    """Return what ``torch.distributed.fsdp`` exports, of one of the two ways to shard that it has."""
    return {
        name: getattr(theirs, name)
        for name in theirs.__all__
        # Those of `fully_shard` say that they are at home in the folder itself.
        if (getattr(theirs, name).__module__ == theirs.__name__) == by_fully_shard
    }


OPTIONS_1 = [found for name, found in exported(by_fully_shard=False).items() if name != "FullyShardedDataParallel"]
OPTIONS_2 = [found for found in exported(by_fully_shard=True).values() if dataclasses.is_dataclass(found)]
SECTIONS: dict[tuple[str, str], set[str]] = {
    ("from_fsdp1.md", "Arguments"): arguments_of(FullyShardedDataParallel),
    ("from_fsdp1.md", "Options"): fields_of(*OPTIONS_1),
    ("from_fsdp1.md", "Methods"): methods_of(FullyShardedDataParallel),
    ("from_fsdp2.md", "Arguments"): arguments_of(theirs.fully_shard),
    ("from_fsdp2.md", "Policies"): fields_of(*OPTIONS_2),
    ("from_fsdp2.md", "Functions and classes"): set(exported(by_fully_shard=True)),
    ("from_ddp.md", "Arguments and methods"): (
        arguments_of(DistributedDataParallel) | methods_of(DistributedDataParallel)
    ),
}


@pytest.mark.parametrize("section", SECTIONS, ids=" ".join)
def test_every_name_of_torch_has_a_row_that_says_what_is_here_or_that_nothing_is(section: tuple[str, str]) -> None:
    # Private members have rows where people use them; none is asked for.
    wanted, rows = {name for name in SECTIONS[section] if "._" not in name}, rows_of(*section)
    assert wanted - set().union(*(row.names for row in rows)) == set()
    assert [row.there for row in rows if not says_something(row)] == []


@pytest.mark.skipif(TORCH < OLDEST, reason="this torch lacks names that have rows")
@pytest.mark.parametrize("section", SECTIONS, ids=" ".join)
def test_no_row_is_about_what_torch_does_not_have(section: tuple[str, str]) -> None:
    known = SECTIONS[section]
    if section[0] == "from_ddp.md":
        known = known | set(vars(DistributedDataParallel)) | {"require_backward_grad_sync", "DDP"}
    assert [row.there for row in rows_of(*section) if row.since <= TORCH and not row.names & known] == []


# -- what is here

# Names that stand for the reader's own objects; what they are is not checked.
YOURS = "Block comm event fn group hook inputs m max_norm mesh param state state_dict stream".split()


class Anything:
    """Has every attribute."""

    def __getattr__(self, name: str) -> "Anything":
        return self


class Sharded(FSDPModule, nn.Linear):
    """A module as ``fully_shard`` leaves it."""


def bound_methods(cls: type) -> SimpleNamespace:
    """Return the attributes of ``cls`` as an instance has them."""
    found = {name: getattr(cls, name) for name in dir(cls)}
    return SimpleNamespace(
        **{name: MethodType(value, cls) if inspect.isfunction(value) else value for name, value in found.items()}
    )


def public_names(model_class: type) -> dict[str, Any]:
    """Return what code on a page may name."""
    return {
        **vars(builtins),
        **dict.fromkeys(YOURS, Anything()),
        **{name: getattr(composable, name) for name in composable.__all__},
        **{name: getattr(model_class, name) for name in methods_of(FSDPModule) if hasattr(model_class, name)},
        "torch": torch,
        "nn": nn,
        "model": bound_methods(model_class),
        "module": bound_methods(model_class),
        "optimizer": bound_methods(torch.optim.Optimizer),
    }


def inner_names() -> dict[str, Any]:
    """Return what the table of internals may name: whatever stands in the package, and attributes of states."""
    names = dict.fromkeys(dir(FullyShardState()), Anything())
    for info in pkgutil.walk_packages(composable.__path__, "composable."):
        if info.name != "composable.extras.transformers":  # It needs another library.
            names |= vars(importlib.import_module(info.name))
    return {**names, **public_names(Sharded), "composable": composable, "_traversal_utils": _traversal_utils}


def missing_in(code: str, names: dict[str, Any]) -> Iterator[str]:
    """Yield what ``code`` names, calls or passes that there is not, as the code would write it."""
    if re.fullmatch(r"\w+=", code):
        code = f"fully_shard({code}...)"
    if re.fullmatch(r"[\w/]+\.py", code):
        if not (Path(composable.__file__).parent / code.removeprefix("composable/")).exists():
            yield code
        return
    tree = ast.parse(f"{code} ..." if code.endswith(":") else code)
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}

    def find(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return Anything() if node.id in bound else names[node.id]
        return getattr(find(node.value), node.attr) if isinstance(node, ast.Attribute) else Anything()

    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in inner:
            try:
                find(node)
            except (KeyError, AttributeError):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            try:
                signature = inspect.signature(find(node.func))
            except (KeyError, AttributeError, TypeError, ValueError):
                continue  # said above, or without a signature
            kinds = {param.kind for param in signature.parameters.values()}
            passed = {keyword.arg: ... for keyword in node.keywords if keyword.arg is not None}
            unknown = set() if inspect.Parameter.VAR_KEYWORD in kinds else passed.keys() - signature.parameters.keys()
            yield from (f"{ast.unparse(node.func)}({name}=)" for name in sorted(unknown))
            if not unknown:
                signature.bind_partial(*node.args, **passed)


def test_rows_name_nothing_that_is_not_here() -> None:
    found: dict[str, set[str]] = {}
    for page, heading in [*SECTIONS, ("from_fsdp2.md", "What behaves differently")]:
        names = public_names(nn.Linear if page == "from_ddp.md" else Sharded)
        for row in rows_of(page, heading):
            for missing in [missing for code in row.promises for missing in missing_in(code, names)]:
                found.setdefault(missing, set()).add(f"{page}: {row.there}")
    assert found == {}


def says_something(row: Row) -> bool:
    return bool(row.promises) or "](" in row.here or row.here.startswith(("none", "not yet", "always"))


def test_what_is_not_there_yet_is_not_there() -> None:
    here = {*composable.__all__, *methods_of(Sharded), *arguments_of(fully_shard), *arguments_of(replicate)}
    rows = [row for section in SECTIONS for row in rows_of(*section) if row.here.startswith("not yet")]
    assert [row.there for row in rows if row.names & here] == []


def test_summon_full_params_has_all_its_arguments_here() -> None:
    assert arguments_of(FullyShardedDataParallel.summon_full_params) - {"with_grads"} == arguments_of(unshard_params)


# -- what people write out of habit


FOREIGN: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "from_fsdp1.md": (fully_shard, arguments_of(FullyShardedDataParallel)),
    "from_ddp.md": (
        replicate,
        arguments_of(DistributedDataParallel) | {"offload_policy", "dp_mesh_dims"},  # also of torch's `replicate`
    ),
}
HABITS = [
    (page, name) for page, (annotate, there) in FOREIGN.items() for name in sorted(there - arguments_of(annotate))
]


def refused_call(annotate: Callable[..., Any], *args: object, **arguments: object) -> str:
    """Call an annotation as it cannot be called; return what it says, without a look at where."""
    model = build()
    before = dict(vars(model))
    with pytest.raises(TypeError) as caught:
        annotate(model, *args, **arguments)
    assert isinstance(caught.value, ConfigError)
    assert (type(model), vars(model)) == (nn.Sequential, before)
    return "; ".join(line for line in str(caught.value).splitlines() if not line.startswith("  at:"))


@pytest.mark.parametrize(("page", "name"), HABITS)
def test_an_argument_of_torchs_wrapper_is_an_error_that_says_what_its_row_says(page: str, name: str) -> None:
    annotate, _ = FOREIGN[page]
    text = refused_call(annotate, **{name: None})
    assert f"{annotate.__name__} has no argument {name};" in text
    assert text.endswith(f"see docs/{page}")
    # Every `name=` of the hint can be passed, and is in the row too; where the row has none, nothing takes its place.
    hinted = set(re.findall(r"(\w+)=", text.partition(f"{name}: ")[2]))
    assert hinted <= arguments_of(annotate)
    assert hinted or "leave it out, " in text
    heading = "Arguments" if page == "from_fsdp1.md" else "Arguments and methods"
    for row in rows_of(page, heading):
        if name in row.names:
            calls = [code for code in row.promises if code.startswith(f"{annotate.__name__}(")]
            assert hinted == {one.arg for code in calls for one in ast.parse(code, mode="eval").body.keywords}


@pytest.mark.parametrize(
    ("annotate", "typed", "meant"),
    [
        (fully_shard, "polcy", "did you mean policy=?"),
        (fully_shard, "limit_all_gather", "leave it out, since gathers are limited always"),
        (replicate, "policy", "leave it out, since gradients travel in buckets, not by module"),
        (replicate, "auto_wrap_policy", "leave it out, since gradients travel in buckets, not by module"),
        (replicate, "zzz", "leave it out, there is nothing like it"),
    ],
)
def test_a_misspelt_argument_is_an_error_that_names_the_one_that_is_meant(
    annotate: Callable[..., Any], typed: str, meant: str
) -> None:
    assert f"  fix: {typed}: {meant}; see " in refused_call(annotate, **{typed: None})


def test_all_arguments_that_there_are_not_are_named_at_once() -> None:
    text = refused_call(replicate, output_device=0, device_ids=[0], dim=0)
    assert "replicate has no argument output_device, dim;" in text
    assert "output_device: leave it out, since outputs stay where the module makes them; dim: leave it out," in text


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("bucketing_backend", "bucket_all_reduces_fx = 'all'"),
        ("FSDP", "from_fsdp1.md"),
        ("FullyShardedDataParallel", r"write fully_shard\(model"),
        ("DDP", "from_ddp.md"),
        ("DistributedDataParallel", r"write replicate\(model"),
        ("MixedPrecision", "write MixedPrecisionPolicy"),
    ],
)
def test_a_name_that_the_package_does_not_have_says_what_to_write(name: str, fix: str) -> None:
    with pytest.raises(ImportError, match=f"there is no composable.{name}: .*{fix}"):
        exec(f"from composable import {name}", {})
    assert not hasattr(composable, "bucketing")


def test_an_argument_without_its_name_is_an_error_that_says_so() -> None:
    text = refused_call(replicate, [0])
    assert "too many positional arguments" in text
    assert "pass the module, and all else by name; see docs/from_ddp.md" in text


@on_ranks(4)
def test_torchs_sharding_strategies_are_those_of_their_names() -> None:
    """Return the strategies of torch that are not the ones of their name here."""
    wrong = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    for there in theirs.ShardingStrategy:
        if there.name == "NO_SHARD":
            continue
        chosen = mesh if "HYBRID" in there.name else mesh["shards"]
        models = build(), build()
        fully_shard(models[0], mesh=chosen, strategy=there)
        fully_shard(models[1], mesh=chosen, strategy=there.name.removeprefix("_"))
        plans = [str(fully_shard.state(model).plan) for model in models]
        losses = [train(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
        if plans[0] != plans[1] or losses[0] != losses[1]:
            wrong.append(there.name)
    assert wrong == []


def test_the_strategy_that_shards_nothing_is_an_error_that_names_replicate() -> None:
    with pytest.raises(ConfigError, match=r"NO_SHARD keeps gradients .*\n  fix: call replicate\(module\) instead"):
        composable.plan(build(), world_size=2, strategy=theirs.ShardingStrategy.NO_SHARD)


@on_ranks(2, annotate=[replicate, fully_shard])
def test_join_of_an_annotated_module_is_an_error_that_names_what_it_takes(annotate: Callable[..., Any]) -> None:
    model = annotate(build())
    with pytest.raises(ConfigError) as caught:
        Join([model])
    assert str(caught.value) == (
        "Join got an annotated module itself\n"
        f"  at:  rank {dist.get_rank()}, module Sequential\n"
        "  fix: pass joinable(model, step=...), as in docs/uneven_inputs.md; "
        "or as_ddp(model), if it is replicated alone"
    )
    # Trainers look for it to find out what is wrapped.
    assert not hasattr(model, "module")


# -- names that people search for

INTERNALS = """
    FlatParamHandle HandleConfig _RootFSDPState _all_fsdp_states _all_handles _cast_buffers _check_reducer_finalized
    _comm_module _get_ddp_logging_data _get_fsdp_handles _get_fsdp_states _get_registry _init_param_handles_from_module
    _remove_autograd_hooks _stream_to_name _unshard_params summon_full_params
""".split()


def test_the_design_says_where_upstreams_internals_went() -> None:
    rows = rows_of("inside/design.md", "Names that differ from upstream")
    assert set(INTERNALS) - set().union(*(row.names for row in rows)) == set()
    names = inner_names()
    assert [one for row in rows for code in row.promises for one in missing_in(code, names)] == []
    assert [row.there for row in rows if not says_something(row)] == []


# -- runs that torch has begun


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def wrapped(kind: str) -> nn.Module:
    if kind == "fsdp1":
        return FullyShardedDataParallel(build(), use_orig_params=True, device_id=torch.device("cpu"))
    if kind == "ddp":
        return DistributedDataParallel(build())
    return theirs.fully_shard(build())


def annotated(kind: str) -> nn.Module:
    return replicate(build()) if kind == "ddp" else fully_shard(build())


@on_ranks(3, run=run_ranks, kind=["fsdp1", "fsdp2", "ddp"])
def test_a_run_that_torch_has_begun_goes_on_here(kind: str, tmp_path: Path) -> None:
    """Train with torch's wrapper, save, train on with it and with ours: the losses of both are equal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its wrappers
        there = wrapped(kind)
        optimizer = torch.optim.AdamW(there.parameters(), lr=0.1)
        train(there, optimizer)
        weights, states = get_state_dict(there, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path)
        expected = train(there, optimizer)
        here = annotated(kind)
        optimizer = torch.optim.AdamW(here.parameters(), lr=0.1)
        weights, states = get_state_dict(here, optimizer)
        dcp.load({"model": weights, "optimizer": states}, checkpoint_id=tmp_path)
        set_state_dict(here, optimizer, model_state_dict=weights, optim_state_dict=states)
        assert train(here, optimizer) == pytest.approx(expected, rel=1e-6)


@on_ranks(3, run=run_ranks)
def test_a_run_goes_on_from_the_full_state_dicts_of_fsdp1() -> None:
    """Do the same from what FSDP1 gives as ``FULL_STATE_DICT``, of which the first rank's counts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        there = wrapped("fsdp1")
        optimizer = torch.optim.AdamW(there.parameters(), lr=0.1)
        train(there, optimizer)
        # Not offloaded: on CPU ranks torch then reuses the memory of what it has given.
        configs = theirs.FullStateDictConfig(), theirs.FullOptimStateDictConfig(offload_to_cpu=False)
        with FullyShardedDataParallel.state_dict_type(there, theirs.StateDictType.FULL_STATE_DICT, *configs):
            weights = there.state_dict()
            states = FullyShardedDataParallel.optim_state_dict(there, optimizer)
        weights, states = copy.deepcopy((dict(weights), states))
        expected = train(there, optimizer)
        here = annotated("fsdp1")
        optimizer = torch.optim.AdamW(here.parameters(), lr=0.1)
        load_full_state_dict(here, weights if dist.get_rank() == 0 else None)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(here, optimizer, states if dist.get_rank() == 0 else {}, options=options)
        assert train(here, optimizer) == pytest.approx(expected, rel=1e-6)


@on_ranks(2, run=run_ranks)
def test_a_state_dict_of_ddp_loads_once_its_prefix_is_off() -> None:
    there = DistributedDataParallel(build())
    saved = {name.removeprefix("module."): value for name, value in there.state_dict().items()}
    with torch.no_grad():
        for value in saved.values():
            value.add_(1)
    here = replicate(build())
    here.load_state_dict(saved)
    sharded = fully_shard(build())
    load_full_state_dict(sharded, saved if dist.get_rank() == 0 else None)
    whole = [param.full_tensor() for param in sharded.parameters()]
    assert all(
        torch.equal(value, one) and torch.equal(value, other)
        for value, one, other in zip(saved.values(), here.parameters(), whole, strict=True)
    )

"""Plans as texts: what is read is equal, and what is no plan is refused with the name of the field."""

import copy
import functools
import json
import random
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from composable import ConfigError, CPUOffloadPolicy, MixedPrecisionPolicy, ShardPlan, UsageError, plan
from tests.models import Block, TinyGPT
from tests.planning.random_plans import random_plan

SEEDS = range(120)


def fields_of(made: ShardPlan) -> tuple[Any, ...]:
    return (made, made.transport, made.hosts, made.digest(), str(made), made.compared_text())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_of_anything_that_was_written_and_read_is_equal(seed: int) -> None:
    made = random_plan(seed)
    text = made.to_json()
    read = ShardPlan.from_json(text)
    assert fields_of(read) == fields_of(made)
    assert read.expected_collectives() == made.expected_collectives()
    assert read.peak_bytes_per_rank() == made.peak_bytes_per_rank()
    assert read.to_json() == text
    assert hash(read) == hash(made)


def test_random_plans_have_every_feature() -> None:
    plans = [random_plan(seed) for seed in SEEDS]
    params = [param for made in plans for handle in made.handles for param in handle.params]
    assert {param.subclass and param.subclass.kind for param in params} == {None, "bytes", "gathered"}
    assert {str(param.promise) for param in params} >= {"None", "whole on one rank", "cut between slices of dim 1"}
    assert any(param.shared_fqns for param in params)
    assert any(made.kept_fqns for made in plans) and any(made.ignored_fqns for made in plans)
    assert any(span.order for made in plans for one in made.handles for buf in one.buffers for span in buf.layout.spans)
    assert {made.offload_policy for made in plans} >= {CPUOffloadPolicy(), CPUOffloadPolicy(pin_memory=False)}
    assert any(handle.secondary_ranks for made in plans for handle in made.handles)
    assert any(made.mp_policy.skipped_module_classes for made in plans)
    assert {bool(made.hosts) for made in plans} == {True, False}


def test_a_parameter_that_tensor_parallelism_has_split_is_read() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(4, 4)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(1)]))
        made = plan(model, world_size=2)
    finally:
        dist.destroy_process_group()
    read = ShardPlan.from_json(made.to_json())
    assert fields_of(read) == fields_of(made) and "over tp Shard(dim=1): weight" in str(read)


def test_the_text_is_this() -> None:
    # Whoever changes this changes `_FORMAT` too, once there is a release.
    made = plan(nn.Linear(2, 2, bias=False), world_size=2, ranks_per_host=2)
    assert_expected_inline(
        json.dumps(json.loads(made.to_json()), indent=1),
        """\
{
 "format": 1,
 "world_size": 2,
 "transport": "auto",
 "class_names": [
  "Linear"
 ],
 "handles": [
  {
   "module_fqns": [
    ""
   ],
   "class_names": [
    "Linear"
   ],
   "reason": "annotated",
   "params": [
    {
     "fqn": "weight",
     "shape": [
      2,
      2
     ],
     "dtype": "float32",
     "requires_grad": true,
     "shared_fqns": [],
     "promise": null,
     "subclass": null
    }
   ],
   "buffers": [
    {
     "dtype": "float32",
     "requires_grad": true,
     "compute_dtype": "float32",
     "reduce_dtype": "float32",
     "layout": {
      "spans": [
       {
        "fqn": "weight",
        "shape": [
         2,
         2
        ],
        "start": 0,
        "stop": 4,
        "order": []
       }
      ],
      "world_size": 2,
      "shard_numel": 2
     },
     "is_gathered_by_class": false
    }
   ],
   "reshard_after_forward": null,
   "unused_gradients": "none"
  }
 ],
 "kept_fqns": [],
 "ignored_fqns": [],
 "mp_policy": {
  "param_dtype": null,
  "reduce_dtype": null,
  "output_dtype": null,
  "cast_forward_inputs": true,
  "cast_root_forward_inputs": null,
  "buffer_dtype": null,
  "keep_low_precision_grads": false,
  "skipped_module_classes": [],
  "param_dtype_override_fn": null
 },
 "offload_policy": {
  "class": "OffloadPolicy"
 },
 "replicas": 1,
 "host_ranks": null,
 "hosts": [
  0,
  0
 ]
}""",
    )


# -- what is refused


def text_of() -> str:
    policy = MixedPrecisionPolicy(torch.bfloat16, skipped_module_classes=(nn.LayerNorm,))
    made = plan(
        TinyGPT(layers=1, tied=True),
        policy={Block},
        world_size=2,
        ranks_per_host=2,
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy(),
        align={"blocks.0.mlp.0.weight": 4},
    )
    return made.to_json()


def paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where every value in a text is, the containers too."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield from paths(value, (*path, key))


def at(data: Any, path: tuple[Any, ...]) -> Any:
    return functools.reduce(lambda value, key: value[key], path, data)


def name_of(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


# What may be null.
NULLABLE = {
    *("promise", "subclass", "block", "reshard_after_forward", "param_dtype_override_fn", "cast_root_forward_inputs"),
    *("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"),
}


def refusal(data: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ShardPlan.from_json(data if isinstance(data, str) else json.dumps(data))
    assert caught.value.fix
    return caught.value


def test_every_field_that_is_missing_is_named() -> None:
    data = json.loads(text_of())
    tried = 0
    for path in paths(data):
        if not path or not isinstance(path[-1], str) or path == ("format",):
            continue
        changed = copy.deepcopy(data)
        del at(changed, path[:-1])[path[-1]]
        error = refusal(changed)
        if path[-1] != "class":
            assert error.what == f"the field {path[-1]!r} is missing"
            assert error.at == (name_of(path[:-1]) or "the whole text")
        tried += 1
    assert tried > 250


def test_every_value_of_another_type_is_named() -> None:
    data = json.loads(text_of())
    for path in paths(data):
        if not path or path == ("format",):
            continue
        value = at(data, path)
        for other in (None, True, -1, 1.5, "no such thing", [], {}, [{}], 2**70):
            is_same_type = type(other) is type(value) and other not in (-1, 2**70)
            if is_same_type or value is None or (other is None and path[-1] in NULLABLE):
                continue
            changed = copy.deepcopy(data)
            at(changed, path[:-1])[path[-1]] = other
            if path[-1] in ("reshard_after_forward", "cast_root_forward_inputs") and isinstance(other, bool | int):
                continue  # None stands for a choice of two
            error = refusal(changed)
            assert error.at == name_of(path), f"{name_of(path)} = {other}"


@pytest.mark.parametrize("seed", range(300))
def test_a_text_that_was_changed_anywhere_is_refused_or_is_a_plan(seed: int) -> None:
    rng = random.Random(seed)
    data = json.loads(random_plan(seed % 40).to_json())
    everywhere = list(paths(data))
    for _ in range(rng.randint(1, 2)):
        path = rng.choice(everywhere[1:])
        try:
            owner = at(data, path[:-1])
            owner[path[-1]] = rng.choice(
                [None, True, False, 0, 1, 3, 2**63 - 1, "", "float32", [], [0], {}, at(data, rng.choice(everywhere))]
            )
            data = json.loads(json.dumps(data))
        except (KeyError, IndexError, TypeError, ValueError):
            continue  # an earlier change took the place away
    try:
        read = ShardPlan.from_json(json.dumps(data))
    except ConfigError:
        pass
    else:
        assert json.loads(read.to_json()) == data
        str(read), read.digest(), read.compared_text(), read.peak_bytes_per_rank(), read.diff(read)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the text is no JSON: "),
        ("{", "the text is no JSON: "),
        ("[1]", "the text is a list, no object"),
        ("NaN", "the text is no JSON: NaN is no number of JSON"),
        ("[" * 100_000, "the text is no JSON: "),
        ("1" * 5000, "the text is no JSON: "),
        ('{"format": 1, "format": 1}', "a name is there twice in 'format', 'format'"),
        ("{}", "the format of the text is None, and 1 is known"),
        ('{"format": 2}', "the format of the text is 2, and 1 is known"),
        ('{"format": true}', "the format of the text is True"),
        ('{"format": 1.0}', "the format of the text is 1.0"),
        ('{"format": 1}', "the field 'world_size' is missing"),
        (None, "the text is None"),
        (b"{}", "the text is a bytes"),
        ({}, "the text is a dict"),
    ],
)
def test_what_is_no_plan_is_refused(text: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ShardPlan.from_json(text)
    assert message in caught.value.what and caught.value.fix


def test_a_plan_for_absurdly_many_ranks_is_compared_at_once() -> None:
    data = json.loads(plan(nn.Linear(2, 2), world_size=2).to_json())
    read = ShardPlan.from_json(json.dumps({**data, "replicas": 2**62}))
    assert not read.diff(read)


PARAM, SPAN = ("handles", 1, "params", 0), ("handles", 1, "buffers", 0, "layout", "spans", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("world_size",), 0, "0 is no number of ranks"),
        (("world_size",), 3, "there are 2 and 3 ranks"),
        (("hosts",), [0], "there are 1 and 2 ranks"),
        (("transport",), "pigeon", "'pigeon' is none of 'auto', 'point_to_point', 'process_group'"),
        (("more",), 1, "the field 'more' is not known"),
        ((*PARAM, "more"), 1, "the field 'more' is not known"),
        ((*PARAM, "dtype"), "floaty", "'floaty' is no dtype"),
        ((*PARAM, "dtype"), "nn", "'nn' is no dtype"),
        ((*PARAM, "dtype"), "float64", "'blocks.0.norm1.weight' has another dtype or requires_grad"),
        ((*PARAM, "shape"), [-1], "-1 is no size, offset or count"),
        ((*PARAM, "shape"), [17], "[16], and the parameter is [17]"),
        ((*PARAM, "fqn"), "other", "'blocks.0.norm1.weight' is no parameter of the handle that has no place yet"),
        ((*PARAM, "fqn"), "tokens.weight", "'tokens.weight' is there twice"),
        ((*SPAN, "stop"), 17, "[0, 17) is no place for [16] after 0"),
        ((*SPAN, "order"), [1], "[1] are not the dims of [16]"),
        (("handles", 1, "module_fqns"), [""], "'' is there twice"),
        (("handles", 1, "class_names"), [], "1 module of 0 classes"),
        (("handles", 1, "reshard_after_forward"), 2, "2 is no part of 2 ranks"),
        (("handles", 1, "unused_gradients"), "some", "'some' is none of 'none', 'zero'"),
        (("handles", 1, "buffers"), [], "no buffer has 'blocks.0.norm1.weight'"),
        (("handles", 1, "buffers", 0, "layout", "world_size"), 3, "3, and the plan is for 2"),
        (("handles", 1, "buffers", 0, "layout", "shard_numel"), 3, "3 a rank are too few for"),
        (("mp_policy", "param_dtype"), "int8", "param_dtype of the mixed precision policy is torch.int8"),
        (
            ("mp_policy", "skipped_module_classes"),
            ["torch.nn:Linear4"],
            "no class of modules 'torch.nn:Linear4' is loaded",
        ),
        (("mp_policy", "skipped_module_classes"), ["os:system"], "no class of modules 'os:system' is loaded"),
        (
            ("mp_policy", "skipped_module_classes"),
            ["antigravity:Fly"],
            "no class of modules 'antigravity:Fly' is loaded",
        ),
        (("offload_policy", "class"), "DiskOffloadPolicy", "'DiskOffloadPolicy' is none of"),
        (("offload_policy",), "CPUOffloadPolicy", "'CPUOffloadPolicy' is no object"),
    ],
)
def test_a_value_that_does_not_fit_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = json.loads(text_of())
    at(data, path[:-1])[path[-1]] = value
    error = refusal(data)
    assert message in error.what
    assert error.at


def test_a_text_makes_no_module_import_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy, asked = types.ModuleType("lazy"), []
    lazy.__dict__["__getattr__"] = asked.append  # what a module does that imports its parts when they are needed
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    data = json.loads(text_of())
    data["mp_policy"]["skipped_module_classes"] = ["lazy:Layer"]
    assert "no class of modules 'lazy:Layer' is loaded" in refusal(data).what
    monkeypatch.setattr(torch, "__getattr__", asked.append)
    data["mp_policy"] |= {"skipped_module_classes": [], "param_dtype": "_lazy"}
    assert "'_lazy' is no dtype" in refusal(data).what
    assert asked == []


# -- what a text cannot hold


class OwnOffload(CPUOffloadPolicy):
    pass


def test_what_a_text_cannot_hold_is_refused_when_it_is_written() -> None:
    class Local(nn.Module):
        pass

    model = nn.Linear(2, 2)
    made = plan(model, world_size=2, mp_policy=MixedPrecisionPolicy(skipped_module_classes=(Local,)))
    with pytest.raises(ConfigError, match=r"Local of .* has no name that a text could have"):
        made.to_json()
    with pytest.raises(ConfigError, match="OwnOffload is of a class that a text cannot hold"):
        plan(model, world_size=2, offload_policy=OwnOffload()).to_json()


def test_a_function_is_known_by_its_name_and_cannot_be_called() -> None:
    def wide(param: nn.Parameter) -> torch.dtype:
        return torch.float64

    made = plan(nn.Linear(2, 2), world_size=2, mp_policy=MixedPrecisionPolicy(param_dtype_override_fn=wide))
    read = ShardPlan.from_json(made.to_json())
    assert str(read) == str(made) and "param_dtype_override_fn=wide" in str(read)
    with pytest.raises(UsageError, match="wide is known by its name only"):
        read.mp_policy.param_dtype_override_fn(nn.Parameter(torch.ones(1)))


def test_a_function_without_a_name_is_the_same_on_every_rank() -> None:
    def of(param: nn.Parameter, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def made() -> ShardPlan:
        chosen = functools.partial(of, dtype=torch.float64)
        return plan(nn.Linear(2, 2), world_size=2, mp_policy=MixedPrecisionPolicy(param_dtype_override_fn=chosen))

    first, second = made(), made()
    assert "0x" not in str(first)
    assert first.digest() == second.digest() == ShardPlan.from_json(first.to_json()).digest()

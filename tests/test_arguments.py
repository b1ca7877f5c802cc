"""Arguments of every public function that make no sense: typed errors, and nothing is changed by them."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import composable
from composable import (
    BucketLayout,
    ComposableError,
    CPUOffloadPolicy,
    CustomPolicy,
    DataParallelMeshDims,
    DefaultState,
    FSDPModule,
    HandleOptions,
    Link,
    Links,
    LowPrecisionState,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    RaggedShard,
    SizePolicy,
    accelerate_optimizer,
    as_ddp,
    bf16_compress_wrapper,
    bucketing_backend,
    checkpoint,
    clip_grad_norm_,
    fallback_counts,
    find_checkpoint,
    fp16_compress_wrapper,
    full_state_dict,
    fully_shard,
    get_total_norm,
    iter_full_params,
    joinable,
    load_checkpoint,
    load_full_params,
    load_full_state_dict,
    load_safetensors,
    no_sync,
    plan,
    rebind_optimizer,
    reduce_gradients,
    reduction_stats,
    register_comm_hook,
    register_fsdp_forward_method,
    replicate,
    save_checkpoint,
    save_safetensors,
    set_divergence_timeout,
    share_comm_ctx,
    step_in_backward,
    unannotate,
    unshard_params,
    update_process_group,
)
from composable.comm.transport import choose_transport, transport_names
from composable.planning.options import ShardOptions
from tests.models import MLPBlock
from tests.parity import assert_equal_runs, train_annotated, train_reference
from tests.world import run_threads


def values() -> dict[str, Any]:
    """Return what to try: fresh, since what is taken changes."""
    return {
        "None": None,
        "3": 3,
        "-1": -1,
        "1.5": 1.5,
        "nan": float("nan"),
        "text": "no such thing",
        "[]": [],
        "[1]": [1],
        "{}": {},
        "object": object(),
        "np.True": np.True_,
        "np.3": np.int64(3),
        "tensor": torch.ones(2),
        "plain": nn.Linear(2, 2),
        "class": nn.Linear,
        "True": True,
    }


def sharded() -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    return fully_shard(model)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {fqn: torch.zeros(param.shape) for fqn, param in model.named_parameters()}


def enter(context: Callable[..., AbstractContextManager[None]]) -> Callable[..., None]:
    def entered(**arguments: Any) -> None:
        with context(**arguments):
            pass

    return entered


def accelerated(model: Any = None, **options: Any) -> None:
    model = model or sharded()
    accelerate_optimizer(**{"optimizer": optimizer_of(model), "model": model, **options})


def method(name: str, **arguments: Any) -> Callable[..., Any]:
    made: list[Any] = []

    def call(**changed: Any) -> Any:
        if not made:
            made.append(sharded())  # once: a call that is refused leaves it as it is
        return getattr(made[0], name)(**{**arguments, **changed})

    return call


def each(names: str, taken: set[str]) -> dict[str, set[str]]:
    return dict.fromkeys(names.split(), taken)


OPTIONAL = {"None"}
SWITCH = {"True"}
NUMBER = {"3", "1.5", "np.3"}
EMPTY = {"None", "[]", "{}"}
CALLABLE = {"plain", "class"}
EITHER = {"None", "True"}
# Each function as it is called with what is needed, and for each argument the values that it does take.
CALLS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], dict[str, set[str]]]] = {
    "plan": (
        plan,
        lambda: {"module": nn.Linear(2, 2), "world_size": 2},
        {
            "module": {"plain"},
            "world_size": {"3"},
            **each("ranks_per_host policy strategy mp_policy offload_policy shard_placement_fn", OPTIONAL),
            "reshard_after_forward": EITHER,
            **each("unused_gradients transport", set()),
            **each("ignored_params ignored_modules", EMPTY),
            "align": {"None", "{}"},
            "shard_as_bytes": {"[]", "{}"},
        },
    ),
    "ShardPlan.on_hosts": (
        lambda **arguments: plan(nn.Linear(2, 2), world_size=6).on_hosts(**arguments),
        dict,
        {"ranks_per_host": {"3"}},
    ),
    "ShardPlan.estimate": (
        lambda **arguments: plan(nn.Linear(2, 2), world_size=2, ranks_per_host=2).estimate(**arguments),
        lambda: {"links": Links(Link(0, 1e9))},
        {"links": set()},
    ),
    "Link": (Link, lambda: {"latency": 1e-6, "bandwidth": 1e9}, {"latency": NUMBER, "bandwidth": NUMBER}),
    "Links": (Links, lambda: {"inside": Link(0, 1e9)}, {"inside": set(), "between": OPTIONAL}),
    "fully_shard": (
        fully_shard,
        lambda: {"module": nn.Sequential(nn.Linear(2, 2), nn.ReLU())},
        {
            "module": {"plain"},
            **each(
                "policy mesh dp_mesh_dims process_group strategy mp_policy offload_policy shard_placement_fn", OPTIONAL
            ),
            "reshard_after_forward": EITHER,
            **each("ignored_params ignored_modules", EMPTY),
            "param_init_fn": OPTIONAL | CALLABLE,
            "sync_module_states": SWITCH,
            "options": set(),
        },
    ),
    "HandleOptions": (
        lambda **options: fully_shard(nn.Linear(2, 2), options=HandleOptions(**options)),
        dict,
        {
            **each("unused_gradients transport", set()),
            "follows_parent": EITHER,
            "align": {"None", "{}"},
            "shard_as_bytes": {"[]", "{}"},
        },
    ),
    "reduction_stats": (
        reduction_stats,
        lambda: {"module": replicate(nn.Linear(2, 2))},
        {"module": set(), "sample_rate": {"None", "3", "np.3"}},
    ),
    "update_process_group": (
        update_process_group,
        lambda: {"module": replicate(nn.Linear(2, 2)), "process_group": dist.group.WORLD},
        {"module": set(), "process_group": set()},
    ),
    "replicate": (
        replicate,
        lambda: {"module": nn.Linear(2, 2)},
        {
            "module": {"plain"},
            **each(
                "mesh process_group delay_all_reduce_named_params param_to_hook_all_reduce device_mesh device_ids mp_policy",
                OPTIONAL,
            ),
            "ignored_modules": EMPTY,
            "ignored_params": {"None", "[]"},
            "bucket_cap_mb": NUMBER,
            **each("find_unused_parameters init_sync gradient_as_bucket_view static_graph", SWITCH),
            **each("broadcast_buffers forward_sync_buffers", EITHER),
        },
    ),
    "checkpoint": (
        checkpoint,
        lambda: {"module": nn.Linear(2, 2)},
        {
            "module": {"plain"},
            **each("use_reentrant determinism_check no_such_option", set()),
            **each("preserve_rng_state debug early_stop", SWITCH),
            "context_fn": OPTIONAL | CALLABLE,
        },
    ),
    "accelerate_optimizer": (accelerated, dict, {"optimizer": set()}),
    "as_ddp": (as_ddp, lambda: {"module": replicate(nn.Linear(2, 2))}, {"module": set()}),
    "joinable": (
        joinable,
        lambda: {"module": replicate(nn.Linear(2, 2)), "step": None},
        {"module": set(), "step": OPTIONAL | CALLABLE},
    ),
    "step_in_backward": (step_in_backward, lambda: {"optimizer": optimizer_of(sharded())}, {"optimizer": set()}),
    "accelerate_optimizer of a model": (
        accelerate_optimizer,
        lambda: {"optimizer": optimizer_of(sharded())},
        {"model": set()},
    ),
    "clip_grad_norm_": (
        clip_grad_norm_,
        lambda: {"parameters": sharded().parameters(), "max_norm": 1.0},
        {
            "parameters": {"[]", "{}", "tensor"},
            **each("max_norm norm_type", NUMBER),
            "error_if_nonfinite": SWITCH,
            "foreach": EITHER,
        },
    ),
    "get_total_norm": (
        get_total_norm,
        lambda: {"tensors": list(sharded().parameters())},
        {"tensors": {"[]", "{}", "tensor"}, "norm_type": NUMBER, "error_if_nonfinite": SWITCH, "foreach": EITHER},
    ),
    "fallback_counts": (fallback_counts, dict, {"reset": SWITCH}),
    "MixedPrecisionPolicy": (
        MixedPrecisionPolicy,
        dict,
        {
            **each("param_dtype reduce_dtype output_dtype buffer_dtype", OPTIONAL),
            **each("cast_forward_inputs keep_low_precision_grads", SWITCH),
            "cast_root_forward_inputs": SWITCH | OPTIONAL,
            "skipped_module_classes": {"class", "[]", "{}"},
            "param_dtype_override_fn": OPTIONAL | CALLABLE,
        },
    ),
    "CPUOffloadPolicy": (CPUOffloadPolicy, dict, {"pin_memory": SWITCH}),
    "full_state_dict": (
        full_state_dict,
        lambda: {"model": sharded()},
        {"model": set(), "dst": set(), "dtype": OPTIONAL, "device": set(), "names": OPTIONAL},
    ),
    "iter_full_params": (
        lambda **arguments: list(iter_full_params(**arguments)),
        lambda: {"model": sharded()},
        {
            "model": set(),
            **each("max_bytes bucket_bytes", {"None", "3"}),
            **each("dtype device names", OPTIONAL),
            "rank0_only": SWITCH,
        },
    ),
    "BucketLayout": (BucketLayout((), 2).views, dict, {"buffer": set()}),
    "load_full_params": (
        load_full_params,
        lambda: {"model": (model := sharded()), "pairs": list(full_values(model).items())},
        {"model": set(), "pairs": set(), "src": set(), "strict": SWITCH, "names": OPTIONAL},
    ),
    "load_full_state_dict": (
        load_full_state_dict,
        lambda: {"model": (model := sharded()), "state_dict": full_values(model)},
        {"model": set(), "state_dict": set(), "src": set(), "strict": SWITCH, "names": OPTIONAL},
    ),
    "load_safetensors": (
        load_safetensors,
        lambda: {"model": sharded(), "path": "nothing"},
        {"model": set(), "path": set(), "strict": set(), "names": set()},  # there is no such file
    ),
    "save_safetensors": (
        save_safetensors,
        lambda: {"model": sharded(), "path": "nothing/below/weights.safetensors"},
        {"model": set(), "path": {"text"}, "max_shard_bytes": {"3"}, "dtype": OPTIONAL, "names": OPTIONAL},
    ),
    "save_checkpoint": (
        lambda **arguments: save_checkpoint(**arguments).wait(),
        lambda: {"folder": "run", "step": 1, "model": sharded(), "discard_later": True},
        {
            "folder": {"text"},
            **each("step keep", {"3"}),
            "model": {"plain"},
            "optimizer": EMPTY,
            "extra": {"None", "3", "-1", "1.5", "nan", "text", "[]", "[1]", "{}", "tensor", "True"},
            **each("discard_later asynchronous", SWITCH),
        },
    ),
    "load_checkpoint": (
        load_checkpoint,
        lambda: {"path": "nothing", "model": sharded()},
        {"path": set(), "model": set(), "optimizer": set()},  # there is no such folder
    ),
    "find_checkpoint": (find_checkpoint, lambda: {"path": "nothing"}, {"path": set()}),
    "register_fsdp_forward_method": (
        register_fsdp_forward_method,
        lambda: {"module": sharded(), "method_name": "forward"},
        {"module": {"plain"}, "method_name": set()},  # left alone, as torch does
    ),
    "set_divergence_timeout": (set_divergence_timeout, dict, {"seconds": {"None", "3", "1.5", "np.3"}}),
    "no_sync": (enter(no_sync), dict, {"module": set()}),
    "reduce_gradients": (reduce_gradients, dict, {"module": set()}),
    "rebind_optimizer": (
        rebind_optimizer,
        lambda: {"optimizer": optimizer_of(model := sharded()), "model": model},
        {"optimizer": set(), "model": set()},
    ),
    "register_comm_hook": (
        register_comm_hook,
        lambda: {"module": replicate(nn.Linear(2, 2)), "state": None, "hook": lambda state, bucket: None},
        {"module": set(), "hook": CALLABLE},
    ),
    "register_comm_hook of gradients": (
        register_comm_hook,
        lambda: {"module": sharded(), "state": None, "hook": lambda state, grad, output: None},
        {"module": set(), "hook": CALLABLE},
    ),
    "bucketing_backend": (
        bucketing_backend,
        lambda: {"backend": "eager"},
        {"backend": CALLABLE, "bucket_cap_mb": NUMBER, "form": set()},
    ),
    "DataParallelMeshDims": (
        DataParallelMeshDims,
        lambda: {"shard": "a", "replicate": "b"},
        {"shard": {"text"}, "replicate": {"None", "text"}},
    ),
    "DefaultState": (DefaultState, dict, {"process_group": set()}),
    "LowPrecisionState": (
        LowPrecisionState,
        lambda: {"process_group": dist.group.WORLD},
        {"process_group": set(), "parameter_type": OPTIONAL},
    ),
    "fp16_compress_wrapper": (fp16_compress_wrapper, dict, {"hook": CALLABLE}),
    "bf16_compress_wrapper": (bf16_compress_wrapper, dict, {"hook": CALLABLE}),
    "set_all_reduce_hook": (
        method("set_all_reduce_hook", hook=lambda shard: None),
        dict,
        {"hook": OPTIONAL | CALLABLE, "stream": OPTIONAL},
    ),
    "unannotate": (unannotate, lambda: {"module": sharded()}, {"module": set(), "recurse": SWITCH}),
    "unshard_params": (
        enter(unshard_params),
        lambda: {"module": sharded()},
        {
            "module": {"plain"},  # left alone
            **each("recurse writeback rank0_only offload_to_cpu with_grads", SWITCH),
        },
    ),
    "ModuleWrapPolicy": (ModuleWrapPolicy, dict, {"module_classes": set()}),
    "CustomPolicy": (CustomPolicy, dict, {"predicate": set()}),
    "SizePolicy": (SizePolicy, dict, {"min_numel": {"3"}}),
    "RaggedShard": (RaggedShard, dict, {"bounds": set()}),
    **{
        name: (method(name, **{argument: True}), dict, {argument: SWITCH, "recurse": SWITCH})
        for name, argument in {
            "set_requires_gradient_sync": "requires_gradient_sync",
            "set_requires_all_reduce": "requires_all_reduce",
            "set_reshard_after_forward": "reshard_after_forward",
            "set_reshard_after_backward": "reshard_after_backward",
            "set_reduce_scatter_unused_params": "reduce_scatter_unused_params",
            "set_keep_unsharded_storage": "keep",
        }.items()
    },
    **{
        name: (method(name), dict, {argument: taken})
        for argument, taken, names in (
            ("async_op", SWITCH, ("unshard", "finalize_backward")),
            ("unshard_in_backward", SWITCH, ("set_unshard_in_backward",)),
            ("is_last_backward", SWITCH, ("set_is_last_backward",)),
            ("enabled", SWITCH, ("set_manual_backward_finalization",)),
            ("enable", SWITCH, ("set_force_sum_reduction_for_comms",)),
            (
                "factor",
                {"None", "3", "1.5", "np.3"},
                ("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"),
            ),
            ("modules", {"[]"}, ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch")),
            # What only refuses takes False.
            (
                "value",
                set(),
                (
                    "set_allocate_memory_from_process_group_for_comm",
                    "set_symm_mem_for_comm",
                    "set_custom_all_gather",
                    "set_custom_reduce_scatter",
                    "set_separate_reduce_scatter_group",
                ),
            ),
        )
        for name in names
    },
    "set_reduce_scatter_max_input_buffers": (
        method("set_reduce_scatter_max_input_buffers", max_input_buffers=2),
        dict,
        {"max_input_buffers": {"3"}, "recurse": SWITCH},
    ),
    "set_post_optim_event": (method("set_post_optim_event"), lambda: {"event": torch.Event()}, {"event": set()}),
    "share_comm_ctx": (share_comm_ctx, dict, {"modules": {"[]"}}),
    "to_empty": (method("to_empty", device="cpu"), dict, {"device": OPTIONAL, "recurse": SWITCH}),
}
# Tested elsewhere, or no function that takes arguments of users.
ELSEWHERE = {
    *("ComposableError", "ConfigError", "DesyncError", "StateDictError", "UsageError"),
    *("BackwardSteps", "CommHookHandle", "DDPView", "FSDPModule", "GradientReductionHandle", "ParamBucket"),
    *("PlanEstimate", "RaggedDTensor", "ReductionStats", "SaveHandle", "UnevenInputs"),
    "ReplicateModule",  # tests/test_replicate_module.py
    *("SavedCheckpoint", "ShardPlan", "ShardingStrategy", "UnshardHandle"),
    *("contract", "strict_mode", "OffloadPolicy"),
    # Called by the library, with what it has.
    *("allreduce_hook", "reduce_scatter_hook", "fp16_compress_hook", "bf16_compress_hook"),
    *("explain_waits", "reshard", "reset_iter_state"),  # take nothing
    *("parameters", "zero_grad"),  # take what torch's own take
}


def outcomes(name: str) -> list[str]:
    """Return what is wrong: values that are taken and should not be, refused and should be taken, or raw errors."""
    function, needed, arguments = CALLS[name]
    wrong = []
    for argument, accepted in arguments.items():
        for label in values():
            try:
                function(**{**needed(), argument: values()[label]})
                found = "taken"
            except ComposableError as error:
                found = "refused" if error.fix or error.at else "refused without a fix"
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            if found != ("taken" if label in accepted else "refused"):
                wrong.append(f"{argument}={label}: {found}")
    return wrong


@pytest.mark.parametrize("name", CALLS)
def test_every_function_refuses_what_makes_no_sense(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_threads(outcomes, 1, name)[0] == []


def test_no_public_name_is_forgotten() -> None:
    mixins = [cls for cls in FSDPModule.__mro__ if cls is not object]
    methods = {name for cls in mixins for name in vars(cls) if not name.startswith("_")}
    named = {name.split()[0] for name in CALLS}
    assert {*composable.__all__, *methods} - ELSEWHERE - named == set()


def test_planning_knows_the_names_of_all_transports() -> None:
    for name in ("auto", *transport_names()):
        ShardOptions(1, transport=name)
        choose_transport("cpu", "gloo", (0, 0), name)


def bad_call(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return an annotation and one argument of it that it refuses."""
    name = rng.choice(["fully_shard", "replicate"])
    argument, accepted = rng.choice([one for one in CALLS[name][2].items() if one[0] != "module"])
    label = rng.choice([label for label in values() if label not in accepted])
    return name, {argument: values()[label]}


def refuse_then_train(seed: int) -> Any:
    rng = random.Random(seed)
    calls = {"fully_shard": fully_shard, "replicate": replicate}

    def annotate(model: nn.Module) -> None:
        attributes = [sorted(vars(module)) for module in model.modules()]
        params = list(model.parameters())
        for _ in range(3):
            name, wrong = bad_call(rng)
            target = rng.choice([model, model.blocks[1], [model.inp, model.out]])
            is_alone = name == "fully_shard" and not {"sync_module_states", "param_init_fn"} & {*wrong}
            is_alone = is_alone and rng.random() < 0.5
            if not is_alone or dist.get_rank() == 0:
                with pytest.raises(ComposableError):
                    calls[name](target, **wrong)
            assert all(map(lambda a, b: a is b, model.parameters(), params))
            assert [sorted(vars(module)) for module in model.modules()] == attributes
            assert not any(isinstance(module, FSDPModule) for module in model.modules())
            assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
        if rng.random() < 0.5:
            replicate(model)
        else:
            fully_shard(model, policy={MLPBlock})

    return train_annotated("mlp", annotate)


@pytest.mark.parametrize("seed", range(6))
def test_after_an_argument_was_refused_the_right_call_trains_as_one_process(seed: int) -> None:
    assert_equal_runs(run_threads(refuse_then_train, 2, seed), train_reference("mlp", 2))

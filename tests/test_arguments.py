"""Arguments of every public function that make no sense: typed errors, and nothing is changed by them."""

import inspect
import tempfile
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
from composable import ComposableError, FSDPModule, HandleOptions, ReplicateOptions, fully_shard, plan, replicate
from composable.comm.transport import choose_transport, transport_names
from composable.planning.options import ShardOptions
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


def method(name: str, **arguments: Any) -> Callable[..., Any]:
    made: list[Any] = []

    def call(**changed: Any) -> Any:
        if not made:
            made.append(sharded())  # once: a call that is refused leaves it as it is
        return getattr(made[0], name)(**{**arguments, **changed})

    return call


def copied() -> nn.Module:
    return replicate(nn.Linear(2, 2))


NUMBER, FUNCTION = "3 1.5 np.3", "plain class"
SWITCHES = {
    "set_requires_gradient_sync": "requires_gradient_sync",
    "set_requires_all_reduce": "requires_all_reduce",
    "set_reshard_after_forward": "reshard_after_forward",
    "set_reshard_after_backward": "reshard_after_backward",
    "set_reduce_scatter_unused_params": "reduce_scatter_unused_params",
    "set_keep_unsharded_storage": "keep",
}
# What each function needs, and for each of its arguments the values that it does take.
CALLS: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "plan": (
        lambda: {"module": nn.Linear(2, 2), "world_size": 2},
        "module: plain; world_size: 3; reshard_after_forward: None True; unused_gradients transport: ;"
        "ranks_per_host policy strategy mp_policy offload_policy shard_placement_fn: None;"
        "ignored_params ignored_modules: None [] {}; align: None {}",
    ),
    "ShardPlan.on_hosts": (dict, "ranks_per_host: 3"),
    "fully_shard": (
        lambda: {"module": nn.Sequential(nn.Linear(2, 2), nn.ReLU())},
        "module: plain; reshard_after_forward: None True; sync_module_states: True; options: ;"
        "policy mesh dp_mesh_dims process_group strategy mp_policy offload_policy shard_placement_fn: None;"
        f"ignored_params ignored_modules: None [] {{}}; param_init_fn: None {FUNCTION}",
    ),
    "HandleOptions": (
        dict,
        "unused_gradients transport: ; follows_parent: None True; align: None {}",
    ),
    "replicate": (
        lambda: {"module": nn.Linear(2, 2)},
        "module: plain; ignored_modules: None [] {}; ignored_params: None []; mesh process_group device_ids: None;"
        f"mp_policy: None; bucket_cap_mb: {NUMBER}; broadcast_buffers: None True; options: ;"
        "find_unused_parameters gradient_as_bucket_view static_graph: True",
    ),
    "ReplicateOptions": (
        dict,
        "delay_all_reduce_named_params param_to_hook_all_reduce: None; init_sync fixed_buckets: True; forward_sync_buffers: None True",
    ),
    "reduction_stats": (lambda: {"module": copied()}, "module: ; sample_rate: None 3 np.3"),
    "update_process_group": (
        lambda: {"module": copied(), "process_group": dist.group.WORLD},
        "module process_group:",
    ),
    "checkpoint": (
        lambda: {"module": nn.Linear(2, 2)},
        "module: plain; use_reentrant determinism_check no_such_option: ; preserve_rng_state debug early_stop: True;"
        "context_fn: None",
    ),
    "changed_params": (lambda: {"model": sharded()}, "model dst: ; dtype: None"),
    "token_mean": (lambda: {"model": sharded()}, "model:"),
    "apply_changes": (lambda: {"state_dict": {}, "changes": {}}, "state_dict changes: {}"),
    "accelerate_optimizer": (
        lambda: {"optimizer": optimizer_of(model := sharded()), "model": model},
        "optimizer model:",
    ),
    "as_ddp": (lambda: {"module": copied()}, "module:"),
    "joinable": (lambda: {"module": copied(), "step": None}, f"module: ; step: None {FUNCTION}"),
    "step_in_backward": (lambda: {"optimizer": optimizer_of(sharded())}, "optimizer:"),
    "rebind_optimizer": (
        lambda: {"optimizer": optimizer_of(model := sharded()), "model": model},
        "optimizer model:",
    ),
    "clip_grad_norm_": (
        lambda: {"parameters": sharded().parameters(), "max_norm": 1.0},
        f"parameters: [] {{}} tensor; max_norm norm_type: {NUMBER}; error_if_nonfinite: True; foreach: None True",
    ),
    "get_total_norm": (
        lambda: {"tensors": list(sharded().parameters())},
        f"tensors: [] {{}} tensor; norm_type: {NUMBER}; error_if_nonfinite: True; foreach: None True",
    ),
    "has_finite_gradients": (
        lambda: {"parameters": sharded().parameters()},
        "parameters: [] {} tensor; loss: None [] {} tensor; error_if_nonfinite: True",
    ),
    "fallback_counts": (dict, "reset: True"),
    "MixedPrecisionPolicy": (
        dict,
        "param_dtype reduce_dtype output_dtype buffer_dtype: None; skipped_module_classes: class [] {};"
        "cast_forward_inputs keep_low_precision_grads: True; cast_root_forward_inputs: None True;"
        f"param_dtype_override_fn: None {FUNCTION}",
    ),
    "CPUOffloadPolicy": (dict, "pin_memory: True"),
    "full_state_dict": (lambda: {"model": sharded()}, "model dst device: ; dtype: None"),
    "iter_full_params": (
        lambda: {"model": sharded()},
        "model: ; dtype device: None; rank0_only: True",
    ),
    "load_full_params": (
        lambda: {"model": (model := sharded()), "pairs": list(full_values(model).items())},
        "model pairs src: ; strict: True",
    ),
    "load_full_state_dict": (
        lambda: {"model": (model := sharded()), "state_dict": full_values(model)},
        "model state_dict src: ; strict: True",
    ),
    # Of these files none is there.
    "load_safetensors": (lambda: {"model": sharded(), "path": "nothing"}, "model path strict:"),
    "load_checkpoint": (lambda: {"path": "nothing", "model": sharded()}, "path model optimizer:"),
    "find_checkpoint": (lambda: {"path": "nothing"}, "path:"),
    "save_safetensors": (
        lambda: {"model": sharded(), "path": "nothing/below/weights.safetensors"},
        "model: ; path: text; max_shard_bytes: 3; dtype: None",
    ),
    "save_checkpoint": (
        lambda: {"folder": "run", "step": 1, "model": sharded()},
        "folder: text; step: 3; model: plain; optimizer: None []; asynchronous per_rank: True;"
        "extra: None 3 -1 1.5 nan text [] [1] {} tensor True",
    ),
    "save_on_signal": (
        lambda: {"run": "run", "model": sharded(), "signals": ()},
        "run: text; model: plain; optimizer: None []; signals: [] {}; keep: 3; exit_code: None 3",
    ),
    "register_fsdp_forward_method": (
        lambda: {"module": sharded(), "method_name": "forward"},
        "module: plain; method_name:",  # the first left alone, as torch does
    ),
    "set_divergence_timeout": (dict, f"seconds: None {NUMBER}"),
    "no_sync": (dict, "module:"),
    "reduce_gradients": (dict, "module:"),
    "register_comm_hook": (
        lambda: {"module": copied(), "state": None, "hook": lambda state, bucket: None},
        f"module: ; hook: {FUNCTION}",
    ),
    "register_comm_hook of gradients": (
        lambda: {"module": sharded(), "state": None, "hook": lambda state, grad, output: None},
        f"module: ; hook: {FUNCTION}",
    ),
    "DataParallelMeshDims": (lambda: {"shard": "a", "replicate": "b"}, "shard replicate: None text"),
    "DefaultState": (dict, "process_group:"),
    "LowPrecisionState": (
        lambda: {"process_group": dist.group.WORLD},
        "process_group: ; parameter_type: None",
    ),
    "fp16_compress_wrapper": (dict, f"hook: {FUNCTION}"),
    "bf16_compress_wrapper": (dict, f"hook: {FUNCTION}"),
    "unannotate": (lambda: {"module": sharded()}, "module: ; recurse: True"),
    "timeline": (lambda: {"model": copied()}, "model:"),
    "watch": (
        lambda: {"model": copied()},
        f"model: ; every done: 3; flops peak_flops writer: None; show: True {FUNCTION}; jsonl: None text",
    ),
    "unshard_params": (
        lambda: {"module": sharded()},
        "recurse writeback rank0_only offload_to_cpu: True",
    ),
    "ModuleWrapPolicy": (dict, "module_classes:"),
    "CustomPolicy": (dict, "predicate:"),
    "SizePolicy": (dict, "min_numel: 3"),
    "RaggedShard": (dict, "bounds:"),
    "share_comm_ctx": (dict, "modules: []"),
    "to_empty": (lambda: {"device": "cpu"}, "device: None; recurse: True"),
    "set_all_reduce_hook": (
        lambda: {"hook": lambda shard: None},
        f"hook: None {FUNCTION}; stream: None",
    ),
    "set_reduce_scatter_max_input_buffers": (lambda: {"max_input_buffers": 2}, "max_input_buffers: 3; recurse: True"),
    "set_post_optim_event": (lambda: {"event": torch.Event()}, "event: None"),
    **{name: (dict, f"{argument} recurse: True") for name, argument in SWITCHES.items()},
    "unshard": (dict, "async_op: True"),
    "finalize_backward": (dict, "async_op: True"),
    "set_unshard_in_backward": (dict, "unshard_in_backward: True"),
    "set_is_last_backward": (dict, "is_last_backward: True"),
    "set_manual_backward_finalization": (dict, "enabled: True"),
    "set_force_sum_reduction_for_comms": (dict, "enable: True"),
    "set_gradient_divide_factor": (dict, f"factor: None {NUMBER}"),
    "set_reduce_scatter_divide_factor": (dict, f"factor: None {NUMBER}"),
    "set_modules_to_forward_prefetch": (dict, "modules: []"),
    "set_modules_to_backward_prefetch": (dict, "modules: []"),
    # What only refuses takes False.
    "set_allocate_memory_from_process_group_for_comm": (dict, "value: True"),
    "set_symm_mem_for_comm": (dict, "value:"),
    "set_separate_reduce_scatter_group": (dict, "value:"),
}


def save_anew(**arguments: Any) -> object:
    """Save to a folder of its own: a second checkpoint of the same step is refused."""
    if arguments["folder"] == "run":
        arguments["folder"] = tempfile.mkdtemp(dir=".")
    return composable.save_checkpoint(**arguments).wait()


SPECIAL = {
    "ShardPlan.on_hosts": lambda **arguments: plan(nn.Linear(2, 2), world_size=6).on_hosts(**arguments),
    "HandleOptions": lambda **options: fully_shard(nn.Linear(2, 2), options=HandleOptions(**options)),
    "ReplicateOptions": lambda **options: replicate(nn.Linear(2, 2), options=ReplicateOptions(**options)),
    "iter_full_params": lambda **arguments: list(composable.iter_full_params(**arguments)),
    "save_checkpoint": save_anew,
    "no_sync": enter(composable.no_sync),
    "timeline": enter(composable.timeline),
    "watch": enter(composable.watch),
    "unshard_params": enter(composable.unshard_params),
}


def function_of(name: str) -> Callable[..., Any]:
    """Return what a row of ``CALLS`` calls: a public function by that name, or else a method of a sharded module."""
    public = getattr(composable, name.split()[0], None)
    return SPECIAL.get(name) or public or method(name, **{SWITCHES[name]: True} if name in SWITCHES else {})


def taken_by(name: str) -> dict[str, set[str]]:
    """Return for each argument of a function the values that it takes."""
    parts = [part.partition(":") for part in CALLS[name][1].split(";")]
    return {argument: set(taken.split()) for arguments, _, taken in parts for argument in arguments.split()}


# Tested elsewhere, or no function that takes arguments of users.
ELSEWHERE = {
    *("ComposableError", "ConfigError", "DesyncError", "StateDictError", "UsageError"),
    *("BackwardSteps", "ChangedParams", "CommHookHandle", "DDPView", "FSDPModule", "GradientReductionHandle"),
    *("PlanEstimate", "RaggedDTensor", "ReductionStats", "SaveHandle", "UnevenInputs"),
    *("Timeline", "TimelineEvent"),  # tests/test_timeline.py
    "Watch",  # tests/test_watched_run.py
    "ReplicateModule",  # tests/test_replicate_module.py
    *("Link", "Links", "set_custom_all_gather", "set_custom_reduce_scatter"),  # where they are
    *("SavedCheckpoint", "ShardPlan", "ShardingStrategy", "Storage", "UnshardHandle"),
    "TokenMean",  # tests/test_token_mean.py
    "MatrixOptimizer",  # tests/optim/test_matrix_step.py
    "SaveNotice",  # tests/test_signals.py
    *("contract", "get_registry", "strict_mode", "OffloadPolicy"),
    # Called by the library, with what it has.
    *("allreduce_hook", "reduce_scatter_hook", "fp16_compress_hook", "bf16_compress_hook"),
    *("explain_waits", "reshard", "reset_iter_state", "step_state"),  # take nothing
    *("named_parameters", "parameters", "zero_grad"),  # take what torch's own take
}


def outcomes(name: str) -> list[str]:
    """Return what is wrong: values that are taken and should not be, refused and should be taken, or raw errors."""
    function, (needed, _), wrong = function_of(name), CALLS[name], []
    for argument, accepted in taken_by(name).items():
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


# Arguments beside the module. `plan` takes the sizes of a mesh, those of `HandleOptions` by themselves, and a step.
WIDEST = {"fully_shard": 14, "plan": 15, "replicate": 13}


def test_no_call_has_more_than_ten_arguments_beside_its_module() -> None:
    functions = {name: getattr(composable, name) for name in composable.__all__ if name not in ELSEWHERE}
    for name in composable.__all__:
        methods = vars(getattr(composable, name)) if isinstance(getattr(composable, name), type) else {}
        functions |= {
            f"{name}.{word}": one for word, one in methods.items() if inspect.isfunction(one) and word[0] != "_"
        }
    functions |= {word: getattr(FSDPModule, word) for word in CALLS if hasattr(FSDPModule, word)}
    given = {name: inspect.signature(one).parameters.keys() - {"self", "module"} for name, one in functions.items()}
    assert {name: len(names) for name, names in given.items() if len(names) > 10} == WIDEST


def test_planning_knows_the_names_of_all_transports() -> None:
    for name in ("auto", *transport_names()):
        ShardOptions(1, transport=name)
        choose_transport("cpu", "gloo", (0, 0), name)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda _: composable.ShardingStrategy(3), "name of a ShardingStrategy is 3"),  # type: ignore[arg-type]
        (lambda _: composable.ShardingStrategy("X", "no"), "reshard_after_forward of a ShardingStrategy is 'no'"),  # type: ignore[arg-type]
        (lambda _: composable.ShardingStrategy("X", has_copies=3), "has_copies of a ShardingStrategy is 3"),  # type: ignore[arg-type]
        (lambda _: plan(nn.Linear(4, 4), world_size=2).bytes_per_rank_at_rest(-1), "optimizer_states is -1"),
        (lambda _: plan(nn.Linear(4, 4), world_size=2).peak_bytes_per_rank(-1), "optimizer_states is -1"),
        (lambda path: composable.save_checkpoint(path, 1, sharded(), {}), "optimizer is or holds a dict"),  # type: ignore[arg-type]
        (lambda _: composable.contract()(3), "contract is on 3"),  # type: ignore[call-overload]
        (lambda _: composable.get_registry(3), "module is 3, not a module"),  # type: ignore[arg-type]
        (lambda _: composable.fully_shard.state(3), "module is 3, not a module"),  # type: ignore[arg-type]
        (
            lambda _: composable.checkpoint(nn.Linear(2, 2), context_fn=lambda: None),
            "context_fn is a function, and cannot unpack",
        ),  # type: ignore[arg-type,return-value]
        (lambda _: composable.load_full_state_dict(sharded(), {3: torch.ones(2)}), "the state dict has the key 3"),  # type: ignore[dict-item]
        (lambda _: sharded()[0].weight.redistribute(placements=[3]), r"placements are \[3\]"),
        (lambda _: sharded()[0].weight.redistribute(placements=3), "placements are 3"),
        (lambda _: replicate(nn.Linear(2, 2), device_ids=[99]), "of numbered devices this process sees"),
        (lambda _: replicate(nn.Linear(2, 2), mesh=1, device_mesh=1), "both mesh and device_mesh are given"),  # type: ignore[arg-type]
    ],
)
def test_a_value_that_would_do_nothing_is_refused(call: Callable[[Path], object], text: str, tmp_path: Path) -> None:
    def on_rank() -> None:
        with pytest.raises(composable.ConfigError, match=text):
            call(tmp_path)

    composable.testing.simulate(1, lambda _: on_rank())

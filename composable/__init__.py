"""Data parallelism as an annotation: how a plain module trains on many ranks, without wrapping it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from composable.activation_checkpoint import checkpoint
from composable.annotated_module import no_sync, reduce_gradients
from composable.comm import DataParallelMeshDims, explain_waits, set_divergence_timeout
from composable.comm_hooks import (
    CommHookHandle,
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    bf16_compress_wrapper,
    fp16_compress_hook,
    fp16_compress_wrapper,
    reduce_scatter_hook,
    register_comm_hook,
)
from composable.dtensor import RaggedDTensor, fallback_counts, register_ragged, strict_mode, teach_torch
from composable.errors import ComposableError, ConfigError, DesyncError, StateDictError, UsageError
from composable.fsdp_module import FSDPModule, UnshardHandle, check_conversions, register_fsdp_forward_method
from composable.fsdp_settings import GradientReductionHandle, share_comm_ctx
from composable.fully_shard import HandleOptions, fully_shard
from composable.ground.contract import contract, get_registry
from composable.ground.outer_rooms import register_outer
from composable.ground.torch_hooks import let_watch_backwards
from composable.optim import (
    BackwardSteps,
    check_every_step,
    clip_grad_norm_,
    get_total_norm,
    has_finite_gradients,
    rebind_optimizer,
    step_in_backward,
)
from composable.planning import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    RaggedShard,
    ShardingStrategy,
    ShardPlan,
    plan,
)
from composable.policies import CustomPolicy, ModuleWrapPolicy, SizePolicy
from composable.process_groups import update_process_group
from composable.replicate import ReplicateOptions, replicate
from composable.replicate_module import ReductionStats, ReplicateModule, reduction_stats
from composable.saving import (
    full_state_dict,
    iter_full_params,
    load_full_params,
    load_full_state_dict,
    unshard_params,
)
from composable.token_means import TokenMean, token_mean
from composable.unannotate import unannotate

if TYPE_CHECKING:
    from composable.extras import (
        ChangedParams,
        DDPView,
        MatrixOptimizer,
        Timeline,
        TimelineEvent,
        UnevenInputs,
        Watch,
        accelerate_optimizer,
        apply_changes,
        as_ddp,
        changed_params,
        joinable,
        timeline,
        watch,
    )
    from composable.runs import (
        SavedCheckpoint,
        SaveHandle,
        SaveNotice,
        Storage,
        find_checkpoint,
        load_checkpoint,
        load_safetensors,
        save_checkpoint,
        save_on_signal,
        save_safetensors,
    )
else:

    def __getattr__(name: str) -> object:
        """Return a name of a room outside of the core, which is imported at its first use."""
        if name not in __all__:
            if name in _GONE:
                raise ImportError(f"there is no composable.{name}: {_GONE[name]}")
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import composable.runs

        if hasattr(composable.runs, name):
            return getattr(composable.runs, name)
        import composable.extras

        return getattr(composable.extras, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "BackwardSteps", "CPUOffloadPolicy", "ChangedParams", "CommHookHandle", "ComposableError", "ConfigError",
    "CustomPolicy", "DDPView", "DataParallelMeshDims", "DefaultState", "DesyncError", "FSDPModule",
    "GradientReductionHandle", "HandleOptions", "LowPrecisionState", "MatrixOptimizer", "MixedPrecisionPolicy",
    "ModuleWrapPolicy", "OffloadPolicy", "RaggedDTensor", "RaggedShard", "ReductionStats", "ReplicateModule",
    "ReplicateOptions", "SaveHandle", "SaveNotice", "SavedCheckpoint", "ShardPlan", "ShardingStrategy",
    "SizePolicy", "StateDictError", "Storage", "Timeline", "TimelineEvent", "TokenMean", "UnevenInputs",
    "UnshardHandle", "UsageError", "Watch", "accelerate_optimizer", "allreduce_hook", "apply_changes", "as_ddp",
    "bf16_compress_hook", "bf16_compress_wrapper", "changed_params", "checkpoint", "clip_grad_norm_",
    "contract", "explain_waits", "fallback_counts", "find_checkpoint", "fp16_compress_hook",
    "fp16_compress_wrapper", "full_state_dict", "fully_shard", "get_registry", "get_total_norm",
    "has_finite_gradients", "iter_full_params", "joinable", "load_checkpoint", "load_full_params",
    "load_full_state_dict", "load_safetensors", "no_sync", "plan", "rebind_optimizer", "reduce_gradients",
    "reduce_scatter_hook", "reduction_stats", "register_comm_hook", "register_fsdp_forward_method", "replicate",
    "save_checkpoint", "save_on_signal", "save_safetensors", "set_divergence_timeout", "share_comm_ctx",
    "step_in_backward", "strict_mode", "timeline", "token_mean", "unannotate", "unshard_params",
    "update_process_group", "watch",
]  # fmt: skip

# Names that are not here, or no more, and what to write. Of an ``AttributeError`` an import statement shows no text.
_GONE = {
    **dict.fromkeys(
        ("FSDP", "FullyShardedDataParallel"), "write fully_shard(model, policy={Block}): docs/from_fsdp1.md"
    ),
    **dict.fromkeys(("DDP", "DistributedDataParallel"), "write replicate(model): docs/from_ddp.md"),
    "MixedPrecision": "write MixedPrecisionPolicy: docs/mixed_precision.md",
    "as_torch_shards": "write full_state_dict(model), or save model.state_dict() by torch.distributed.checkpoint",
    "bucketing_backend": "set torch._inductor.config.bucket_all_reduces_fx = 'all'",
}

__version__ = "0.2.0"


def install() -> None:
    """Teach torch to handle the parameters of this library. The import calls it; a second call changes nothing.

    * ``RaggedDTensor`` joins the types that optimizers and ``clip_grad_norm_`` treat in lists. On torch 2.11 torch
      also finds our rule for each operation on them.
    * ``distribute_tensor`` and ``DTensor.redistribute`` take the placement ``RaggedShard``.
    * Every backward asks annotated models first whether it begins at tensors that are no outputs.
    * ``Module.to``, ``half`` and similar methods ask the sharded modules below before they convert anything.
    * Every optimizer checks its parameters before each step: a parameter that an annotation has replaced, or
      that has no values, is an error.

    The first annotation teaches ``set_model_state_dict``, ``set_optimizer_state_dict`` and similar functions to cut
    full values for our parameters, and to refuse values that do not fit before they change anything: torch's files for
    them take as long to import as this package.

    Calls without tensors of this library run torch's own code unchanged.

    Raises:
        UsageError: This torch cannot run operations on our parameters.
    """
    register_ragged()
    teach_torch()
    check_every_step()
    let_watch_backwards()
    check_conversions()


def _draw_plan() -> Callable[..., str]:
    from composable.extras import draw_plan

    return draw_plan


def _rehearse_planned() -> Callable[..., object]:
    from composable.rehearsal import rehearse_planned

    return rehearse_planned


register_outer("ShardPlan.draw", _draw_plan)
register_outer("plan(step=)", _rehearse_planned)
install()

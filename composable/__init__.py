"""Data parallelism as an annotation: how a plain module trains on many ranks, without wrapping it."""

from composable.contract import contract
from composable.errors import ComposableError, ConfigError, DesyncError, UsageError
from composable.fsdp_module import FSDPModule, UnshardHandle
from composable.fully_shard import fully_shard
from composable.gradient_sync import no_sync
from composable.optim.clip import clip_grad_norm_, get_total_norm
from composable.optim.local_step import accelerate_optimizer
from composable.optim.rebind import rebind_optimizer
from composable.planning.shard_plan import ShardingStrategy, ShardPlan, plan
from composable.policies import CustomPolicy, ModuleWrapPolicy, SizePolicy
from composable.ragged.tensor import RaggedDTensor, RaggedShard, fallback_counts, strict_mode
from composable.replicate import replicate
from composable.saving.checkpoint import (
    SavedCheckpoint,
    SaveHandle,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from composable.saving.full_params import iter_full_params, load_full_params
from composable.saving.full_state import full_state_dict, load_full_state_dict
from composable.saving.safetensors import load_safetensors, save_safetensors
from composable.saving.unsharding import unshard_params
from composable.unannotate import unannotate

__all__ = [
    "ComposableError",
    "ConfigError",
    "CustomPolicy",
    "DesyncError",
    "FSDPModule",
    "ModuleWrapPolicy",
    "RaggedDTensor",
    "RaggedShard",
    "SaveHandle",
    "SavedCheckpoint",
    "ShardPlan",
    "ShardingStrategy",
    "SizePolicy",
    "UnshardHandle",
    "UsageError",
    "accelerate_optimizer",
    "clip_grad_norm_",
    "contract",
    "fallback_counts",
    "find_checkpoint",
    "full_state_dict",
    "fully_shard",
    "get_total_norm",
    "iter_full_params",
    "load_checkpoint",
    "load_full_params",
    "load_full_state_dict",
    "load_safetensors",
    "no_sync",
    "plan",
    "rebind_optimizer",
    "replicate",
    "save_checkpoint",
    "save_safetensors",
    "strict_mode",
    "unannotate",
    "unshard_params",
]

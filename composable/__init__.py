"""Data parallelism as an annotation: how a plain module trains on many ranks, without wrapping it."""

from composable.checkpoint_folder import (
    SavedCheckpoint,
    SaveHandle,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from composable.clip import clip_grad_norm_, get_total_norm
from composable.contract import contract
from composable.errors import ComposableError, ConfigError, DesyncError, UsageError
from composable.export import iter_full_params, load_full_params
from composable.fsdp_module import FSDPModule, UnshardHandle
from composable.full_params import unshard_params
from composable.fully_shard import fully_shard
from composable.gradient_sync import no_sync
from composable.optimizer import accelerate_optimizer
from composable.plan import ShardingStrategy, ShardPlan, plan
from composable.policies import CustomPolicy, ModuleWrapPolicy, SizePolicy
from composable.ragged import RaggedDTensor, RaggedShard, fallback_counts, strict_mode
from composable.rebind import rebind_optimizer
from composable.replicate import replicate
from composable.safetensors_files import load_safetensors, save_safetensors
from composable.state_dict import full_state_dict, load_full_state_dict
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

"""The model that the benchmarks train, and each way of training it on several ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchMixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from composable import HandleOptions, MixedPrecisionPolicy, ModuleWrapPolicy, fully_shard, register_comm_hook, replicate

__all__ = [
    "CONFIGS",
    "DEFAULT_ENGINES",
    "ENGINES",
    "Config",
    "GPTBlock",
    "annotate",
    "make_batch",
    "make_gpt",
    "train_step",
]

VOCAB = 256


@dataclass(frozen=True)
class Config:
    """Width, blocks, sequences in a rank's batch, tokens in a sequence."""

    width: int
    layers: int
    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.width}/{self.layers}/{self.batch}/{self.context}"


CONFIGS = (Config(512, 8, 4, 128), Config(128, 24, 2, 64), Config(64, 64, 2, 32))


class GPTBlock(nn.Module):
    """A pre-norm block of 12 parameters: one handle."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, context, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class BenchmarkGPT(nn.Module):
    """A small GPT. Kept apart from the example's, so that figures stay comparable when that one changes."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, config.width)
        self.positions = nn.Parameter(torch.randn(config.context, config.width) * 0.02)
        self.blocks = nn.ModuleList(GPTBlock(config.width) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCAB, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_gpt(config: Config) -> nn.Module:
    """Build the model with the same weights at every call."""
    torch.manual_seed(0)
    return BenchmarkGPT(config)


def make_batch(config: Config, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (config.batch, config.context + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


def _fsdp1(model: nn.Module, unit: type[nn.Module], keeps: bool) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=TorchModuleWrapPolicy({unit}),
        use_orig_params=True,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
    )


def _fsdp2(model: nn.Module, unit: type[nn.Module], keeps: bool, **options: Any) -> nn.Module:
    if keeps:
        options["reshard_after_forward"] = False
    for module in [module for module in model.modules() if isinstance(module, unit)]:
        torch_fully_shard(module, **options)
    return torch_fully_shard(model, **options)


def _fully_shard(model: nn.Module, unit: type[nn.Module], keeps: bool, **options: Any) -> nn.Module:
    option = False if keeps else None
    return fully_shard(model, policy=ModuleWrapPolicy({unit}), reshard_after_forward=option, **options)


# What is most used for training in low precision: computed and gathered in two bytes, reduced in four.
BF16: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def _square() -> DeviceMesh:
    """Return a mesh with copies of shards on two halves of the ranks."""
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


class _DoneEvent:
    """An event of a stream on which everything is done: the CPU has no events."""

    def record(self, stream: object = None) -> None:
        """Do nothing."""

    def wait(self, stream: object = None) -> None:
        """Do nothing."""


class _OnlyStream:
    """The one stream of the CPU."""

    def wait_stream(self, stream: object) -> None:
        """Do nothing."""


def _ddp_in_bf16(model: nn.Module, unit: type[nn.Module], keeps: bool) -> nn.Module:
    """DDP's own mixed precision, which needs streams and events: on the CPU ones that do nothing.

    Its weights are wrong there (torch 2.13): only its time says something.
    """
    if not torch.accelerator.is_available():
        torch.Event = _DoneEvent  # type: ignore[misc,assignment]
        torch.accelerator.current_stream = _OnlyStream  # type: ignore[assignment]
    low = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return DistributedDataParallel(model, mixed_precision=low)


def _replicate_in_bf16(model: nn.Module, unit: type[nn.Module], keeps: bool) -> nn.Module:
    return replicate(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16))


def _power_sgd() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


def _ddp_with_hook(model: nn.Module, state: object, hook: Any) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, hook)
    return wrapped


def _replicate_with_hook(model: nn.Module, state: object, hook: Any) -> nn.Module:
    register_comm_hook(replicate(model), state, hook)
    return model


ENGINES: dict[str, Callable[[nn.Module, type[nn.Module], bool], nn.Module]] = {
    "plain": lambda model, unit, keeps: model,
    "ddp": lambda model, unit, keeps: DistributedDataParallel(model),
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "fully_shard": _fully_shard,
    "replicate": lambda model, unit, keeps: replicate(model),
    # Without the message in which ranks agree at the end of backward: what that costs.
    "fully_shard_zeros": lambda *args: _fully_shard(*args, options=HandleOptions(unused_gradients="zero")),
    "fully_shard_shared_memory": lambda *args: _fully_shard(*args, options=HandleOptions(transport="shared_memory")),
    "fsdp2_hybrid": lambda *args: _fsdp2(*args, mesh=_square()),
    "fully_shard_hybrid": lambda *args: _fully_shard(*args, mesh=_square()),
    "fsdp2_bf16": lambda *args: _fsdp2(*args, mp_policy=TorchMixedPrecisionPolicy(**BF16)),
    "fully_shard_bf16": lambda *args: _fully_shard(*args, mp_policy=MixedPrecisionPolicy(**BF16)),
    "ddp_bf16": _ddp_in_bf16,
    "replicate_bf16": _replicate_in_bf16,
    "ddp_fp16_hook": lambda model, unit, keeps: _ddp_with_hook(model, None, fp16_compress_hook),
    "replicate_fp16_hook": lambda model, unit, keeps: _replicate_with_hook(model, None, fp16_compress_hook),
    "ddp_powersgd": lambda model, unit, keeps: _ddp_with_hook(model, _power_sgd(), powerSGD_hook),
    "replicate_powersgd": lambda model, unit, keeps: _replicate_with_hook(model, _power_sgd(), powerSGD_hook),
}
DEFAULT_ENGINES = ["plain", "ddp", "fsdp1", "fsdp2", "fully_shard", "replicate"]


def annotate(model: nn.Module, engine: str, unit: type[nn.Module], *, keep_unsharded: bool = False) -> nn.Module:
    """Make ``model`` train by ``engine``, each ``unit`` in it sharded on its own.

    Args:
        model: A plain model; ``plain`` leaves it so: each rank trains alone on its own batch.
        engine: One of ``ENGINES``; ``fully_shard`` and ``replicate`` are this library's.
        unit: The class of submodules that get a handle each, where parameters are sharded.
        keep_unsharded: Keep parameters from forward to backward, in every engine that shards.
    """
    return ENGINES[engine](model, unit, keep_unsharded)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Run one whole training step; gradients are gone after it."""
    tokens, targets = batch
    F.cross_entropy(model(tokens).flatten(0, 1), targets).backward()
    optimizer.step()
    optimizer.zero_grad()

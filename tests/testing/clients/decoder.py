"""A decoder as torchtitan trains it: a 2-d mesh, compiled and checkpointed blocks, a norm of DTensors, DCP saves."""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from composable import fully_shard


@dataclass
class Sizes:
    dim: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    vocab: int = 512
    length: int = 64


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = sizes.heads, sizes.kv_heads, sizes.dim // sizes.heads
        self.wq = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.wk = nn.Linear(sizes.dim, self.kv_heads * self.head, bias=False)
        self.wv = nn.Linear(sizes.dim, self.kv_heads * self.head, bias=False)
        self.wo = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, self.head)) for one in (self.wq, self.wk, self.wv))
        q, k = rotated(q, freqs), rotated(k, freqs)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(out.transpose(1, 2).flatten(-2))


def rotated(x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * freqs[: x.shape[1], None]).flatten(-2).type_as(x)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(sizes), FeedForward(sizes.dim, 3 * sizes.dim)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(sizes.dim), nn.RMSNorm(sizes.dim)

    def forward(self, x: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        h = x + self.attention(self.attention_norm(x), freqs)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.tok_embeddings = nn.Embedding(sizes.vocab, sizes.dim)
        self.register_buffer("freqs", self.make_freqs(), persistent=False)
        self.layers = nn.ModuleDict({str(one): TransformerBlock(sizes) for one in range(sizes.layers)})
        self.norm = nn.RMSNorm(sizes.dim)
        self.output = nn.Linear(sizes.dim, sizes.vocab, bias=False)

    def make_freqs(self) -> torch.Tensor:
        head = self.sizes.dim // self.sizes.heads
        angles = 1.0 / 10000.0 ** (torch.arange(0, head, 2).float() / head)
        angles = torch.outer(torch.arange(self.sizes.length).float(), angles)
        return torch.polar(torch.ones_like(angles), angles)

    def init_weights(self) -> None:
        with torch.device(self.freqs.device):
            self.freqs = self.make_freqs()
        for name, parameter in self.named_parameters():
            if "norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, self.freqs)
        return self.output(self.norm(h))


def parallelize(model: Transformer, mesh: object) -> None:
    for name, block in model.layers.items():
        model.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False)
    for block in model.layers.values():
        block.compile(fullgraph=True)
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    fully_shard(model.tok_embeddings, **options)
    for block in model.layers.values():
        fully_shard(block, **options, reshard_after_forward=True)
    fully_shard([model.norm, model.output], **options, reshard_after_forward=False)
    fully_shard(model, **options)


def main() -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]) if device_type == "cuda" else 0)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo")
    shard = min(8, dist.get_world_size())
    world = init_device_mesh(
        device_type, (dist.get_world_size() // shard, shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    mesh = world if world.size(0) > 1 else world["dp_shard"]
    with torch.device("meta"):
        model = Transformer(Sizes())
    parallelize(model, mesh)
    model.to_empty(device=device_type)
    with torch.no_grad():
        model.init_weights()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
    for step in range(2):
        tokens = torch.randint(512, (4, 65)).to(device)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        del logits
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=True)
        optimizer.step()
        schedule.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=world["dp_shard"].get_group())
        if dist.get_rank() == 0:
            print(
                f"step {step} loss {mean.item() / shard:.4f} norm {norm.item():.3f} lr {schedule.get_last_lr()[0]:.1e}"
            )
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id="outputs/step-2")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

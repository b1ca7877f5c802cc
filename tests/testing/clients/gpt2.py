"""GPT-2 of transformers: accumulation under ``no_sync``, tied weights, gradient checkpointing, sharded checkpoints."""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from composable import (
    clip_grad_norm_,
    fully_shard,
    load_checkpoint,
    no_sync,
    save_checkpoint,
)

accumulation, max_steps, block_size, eval_interval = 2, 2, 64, 2
ddp_rank, ddp_local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
device = f"cuda:{ddp_local_rank}" if torch.cuda.is_available() else "cpu"
if "cuda" in device:
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = True
dist.init_process_group(backend="nccl" if "cuda" in device else "gloo")
torch.manual_seed(1337 + ddp_rank)
config = GPT2Config(
    vocab_size=512, n_positions=block_size, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0.0, attn_pdrop=0.0
)
model = GPT2LMHeadModel(config)
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
model.to(device)
model = fully_shard(model, policy={GPT2Block})
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), fused="cuda" in device)
text = torch.randint(512, (10_000,))


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - block_size, (4,))
    x = torch.stack([text[i : i + block_size] for i in starts])
    y = torch.stack([text[i : i + block_size] for i in starts])
    if "cuda" in device:
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x, y


iteration, best = 0, float("inf")
if os.path.isdir("out"):
    iteration = load_checkpoint("out", model, optimizer).step
X, Y = get_batch()
while iteration < max_steps:
    for micro_step in range(accumulation):
        is_last = micro_step == accumulation - 1
        with nullcontext() if is_last else no_sync(model):
            loss = model(input_ids=X, labels=Y).loss / accumulation
            X, Y = get_batch()
            loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iteration += 1
    lossf = loss.item() * accumulation
    if not iteration % eval_interval:
        model.eval()
        with torch.no_grad():
            losses = torch.zeros(2, device=device)
            for k in range(2):
                losses[k] = model(input_ids=X, labels=Y).loss.item()
        model.train()
        mean = losses.mean()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG if "cuda" in device else dist.ReduceOp.SUM)
        if mean < best:
            best = mean.item()
            save_checkpoint("out", iteration, model, optimizer, extra={"best": best})
    if ddp_rank == 0:
        print(f"iter {iteration}: loss {lossf:.4f}, mem {torch.cuda.max_memory_allocated() if 'cuda' in device else 0}")
dist.destroy_process_group()

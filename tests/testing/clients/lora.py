"""LoRA on a frozen Llama of transformers in bfloat16: small trained matrices, kept in float32, and saved alone."""

import argparse
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from composable import fully_shard


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int, alpha: int, dropout: float) -> None:
        super().__init__()
        self.base, self.scale, self.dropout = base, alpha / rank, nn.Dropout(dropout)
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.dropout(x).to(self.lora_a.dtype) @ self.lora_a.T @ self.lora_b.T
        return self.base(x) + (self.scale * added).to(x.dtype)


def add_lora(model: nn.Module, targets: list[str], rank: int) -> None:
    model.requires_grad_(False)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets:
            setattr(
                model.get_submodule(name.rpartition(".")[0]),
                name.rpartition(".")[2],
                LoraLinear(module, rank, 16, 0.05),
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--targets", nargs="+", default=["q_proj", "v_proj", "down_proj"])
    args = parser.parse_args()
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, num_hidden_layers=4, **sizes)).to(torch.bfloat16)
    model.config.use_cache = False
    add_lora(model, args.targets, args.rank)
    model.to(device)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    for layer in model.model.layers:
        for part in layer.modules():
            if isinstance(part, LoraLinear):
                fully_shard(part)
        fully_shard(layer)
    fully_shard(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    if dist.get_rank() == 0:
        print(f"trainable: {sum(p.numel() for p in trained):,} of {sum(p.numel() for p in model.parameters()):,}")
    optimizer = torch.optim.AdamW(trained, lr=2e-4)
    model.train()
    for step in range(args.steps):
        tokens = torch.randint(0, 512, (4, 48), device=device)
        out = model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens))
        out.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.3)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(step, out.loss.item())
        assert math.isfinite(float(norm))
    adapters = {name: p.full_tensor().cpu() for name, p in model.named_parameters() if "lora_" in name}
    if dist.get_rank() == 0:
        torch.save(adapters, "adapter.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

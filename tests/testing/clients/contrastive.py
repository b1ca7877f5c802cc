"""Two towers as in CLIP: embeddings are gathered by the script's own calls, with gradients for the own part."""

import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from composable import fully_shard


class Tower(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(width, 4, 4 * width, **options) for _ in range(layers)])
        self.norm, self.project = nn.LayerNorm(width), nn.Linear(width, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.project(self.norm(x.mean(1))), dim=-1)


class CLIP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.words = nn.Conv2d(3, 96, 8, 8), nn.Embedding(1000, 96)
        self.image, self.text = Tower(96, 2), Tower(96, 2)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        image = self.image(self.patches(images).flatten(2).transpose(1, 2))
        return image, self.text(self.words(texts)), self.logit_scale.exp()


def gather(features: torch.Tensor) -> torch.Tensor:
    """Return the features of all ranks; only the own part has a gradient."""
    parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.contiguous())
    parts[dist.get_rank()] = features
    return torch.cat(parts)


def main() -> None:
    use_cuda = torch.cuda.is_available()
    dist.init_process_group(backend="nccl" if use_cuda else "gloo")
    rank = dist.get_rank()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if use_cuda else "cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = CLIP().to(device)
    fully_shard(model, policy={nn.TransformerEncoderLayer})
    decayed = [p for n, p in model.named_parameters() if p.ndim >= 2 and "norm" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim < 2 or "norm" in n]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=5e-4, betas=(0.9, 0.98))
    batch = 8
    for step in range(2):
        for group in optimizer.param_groups:
            group["lr"] = 5e-4 * (step + 1) / 2
        images = torch.randn(batch, 3, 32, 32, device=device)
        texts = torch.randint(1000, (batch, 16), device=device)
        image, text, scale = model(images, texts)
        all_image, all_text = gather(image), gather(text)
        labels = torch.arange(batch, device=device) + batch * rank
        loss = (
            F.cross_entropy(scale * image @ all_text.T, labels) + F.cross_entropy(scale * text @ all_image.T, labels)
        ) / 2
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown, op=dist.ReduceOp.SUM)
        if rank == 0:
            print(step, (shown / dist.get_world_size()).item())
    dist.barrier()
    dist.destroy_process_group()


main()

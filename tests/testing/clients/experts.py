"""A mixture of experts with a capacity: experts lie on ranks of a group, tokens travel by the script's all-to-all."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single

from composable import fully_shard


class Experts(nn.Module):
    """The experts of this rank, as one weight each for all of them."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) * 0.02)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) * 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(F.gelu(torch.bmm(x, self.up)), self.down)


class MoE(nn.Module):
    def __init__(self, width: int, count: int, top_k: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.count, self.top_k = group, count, top_k
        self.router = nn.Linear(width, count, bias=False)
        self.experts = Experts(count // group.size(), width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.flatten(0, 1)
        capacity = 2 * self.top_k * len(rows) // self.count
        scores = self.router(rows).float().softmax(-1)
        weights, chosen = scores.topk(self.top_k, -1)
        mask = F.one_hot(chosen, self.count).sum(1).float()
        place = ((mask.cumsum(0) - 1) * mask).long()
        mask = mask * (place < capacity)
        dispatch = mask.unsqueeze(-1) * F.one_hot(place.clamp(max=capacity - 1), capacity)  # rows, experts, places
        sent = torch.einsum("rec,rw->ecw", dispatch.to(x.dtype), rows).contiguous()
        got = all_to_all_single(torch.empty_like(sent), sent, group=self.group)
        # Of each rank the places for the experts here.
        ranks, here = self.group.size(), self.count // self.group.size()
        got = got.unflatten(0, (ranks, here)).transpose(0, 1).flatten(1, 2)
        made = self.experts(got).unflatten(1, (ranks, capacity)).transpose(0, 1).flatten(0, 1).contiguous()
        back = all_to_all_single(torch.empty_like(made), made, group=self.group)
        combined = torch.einsum("rec,ecw->rw", (dispatch * scores.unsqueeze(-1)).to(x.dtype), back)
        balance = self.count * (mask.mean(0) * scores.mean(0)).sum()
        return (combined / weights.sum(-1, keepdim=True).to(x.dtype)).view_as(x), balance


class Block(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.moe = MoE(width, 8, 2, group)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        out, balance = self.moe(self.norm2(x))
        return x + out, balance


class Model(nn.Module):
    def __init__(self, width: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList([Block(width, group) for _ in range(2)])
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, total = self.embedding(tokens), torch.zeros((), device=tokens.device)
        for block in self.blocks:
            x, balance = block(x)
            total = total + balance
        return self.head(x), total


def main() -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    size = dist.get_world_size()
    apart = 2 if size < 8 else 4
    mesh = init_device_mesh(kind, (size // apart, apart), mesh_dim_names=("copies", "experts"))
    torch.manual_seed(dist.get_rank())
    model = Model(96, mesh["experts"].get_group()).to(kind)
    # Experts are sharded over the ranks that have the same ones, all else over all.
    for block in model.blocks:
        fully_shard(block.moe.experts, mesh=mesh["copies"])
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        tokens = torch.randint(256, (4, 33), device=kind)
        logits, balance = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + 0.01 * balance
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach(), group=mesh["experts"].get_group())
        if dist.get_rank() == 0:
            print(step, loss.item(), balance.item())


if __name__ == "__main__":
    main()

"""Draws `timeline.svg`: a training step of a small sharded model, as rank 0 of two sees it.

    python docs/pictures/timeline.py

The ranks are threads that take turns, so a wait also lasts while the other rank computes. Times differ from run to
run: the picture is drawn once, and nothing compares it.
"""

from pathlib import Path

import torch
from torch import nn

from composable import fully_shard, timeline
from composable.testing import simulate

WIDTH = 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def draw(rank: int) -> str:
    """Train for a few steps, and return the picture of the last one."""
    torch.manual_seed(rank)
    model = fully_shard(Model(), policy={Block})
    optimizer = torch.optim.AdamW(model.parameters())
    with timeline(model) as times:
        for _ in range(4):
            tokens = torch.randint(1000, (4, 64))
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return times.draw()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(__file__).with_suffix(".svg").write_text(simulate(2, draw)[0])

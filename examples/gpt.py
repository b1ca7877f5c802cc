"""A byte-level GPT: pre-norm blocks with rotary positions, sized by four numbers."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["GPT", "VOCAB", "Block", "GPTSize", "generate"]

VOCAB = 256


@dataclass(frozen=True)
class GPTSize:
    """What fixes the shapes of all parameters."""

    layers: int
    width: int
    heads: int
    context: int

    def __post_init__(self) -> None:
        if min(self.layers, self.width, self.heads, self.context) < 1:
            raise ValueError(f"layers, width, heads and context must be positive: {self}")
        if self.width % (2 * self.heads):
            raise ValueError(f"width {self.width} is not a multiple of twice the {self.heads} heads")


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of channels of ``x`` [..., time, channels] by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions (arXiv 2104.09864)."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        channels = size.width // size.heads
        frequencies = 10_000 ** (-torch.arange(0, channels, 2) / channels)
        angles = torch.outer(torch.arange(size.context), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        cos, sin = self.cos[:time], self.sin[:time]
        y = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """One layer: attention, then a perceptron, each normalised before and added to its input."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Bytes [batch, time] in, logits of the next byte [batch, time, 256] out."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(VOCAB, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCAB, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                # The layers that write to the residual stream start smaller: each adds to its variance.
                depth = 2 * size.layers if name.endswith(("attention.out.weight", "down.weight")) else 1
                nn.init.normal_(param, std=0.02 if name == "head.weight" else (size.width * depth) ** -0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(model: nn.Module, context: int, prompt: bytes, count: int, seed: int, device: torch.device) -> bytes:
    """Sample ``count`` bytes after ``prompt``.

    Every rank calls it with equal arguments: a forward is collective where parameters are
    sharded, and equal seeds give every rank the same bytes.
    """
    generator = torch.Generator().manual_seed(seed)
    text = torch.tensor(list(prompt))
    for _ in range(count):
        logits = model(text[-context:].to(device)[None])[0, -1].float().cpu()
        choice = torch.multinomial(torch.softmax(logits / 0.7, dim=-1), 1, generator=generator)
        text = torch.cat((text, choice))
    return bytes(text.tolist())

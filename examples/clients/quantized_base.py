"""LoRA on a base of 4-bit weights, as QLoRA has it: frozen uint8 parameters, with the scales beside them as buffers.

Nothing but torch is needed: the layer below packs two weights into a byte, as bitsandbytes does.

torchrun --standalone --nproc-per-node 2 quantized_base.py [--engine torch]
"""

import torch
from engine import Report, parse_engine
from torch import nn
from torch.nn import functional as F

STEPS, WIDTH, BLOCK = 8, 32, 16


class Linear4bit(nn.Module):
    """A frozen 4-bit linear layer and a trained adapter of low rank.

    ``packed`` [outputs, inputs / 2] uint8 holds two weights a byte; ``scales`` [outputs * inputs / BLOCK] float32
    one factor for each block of weights.
    """

    def __init__(self, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        blocks = torch.randn(outputs * inputs // BLOCK, BLOCK) / inputs**0.5
        scales = blocks.abs().amax(1) / 7
        levels = (blocks / scales[:, None]).round().clamp(-7, 7).to(torch.int8).add(8).to(torch.uint8)
        levels = levels.view(outputs, inputs)
        self.packed = nn.Parameter(levels[:, ::2] | (levels[:, 1::2] << 4), requires_grad=False)
        self.register_buffer("scales", scales)
        self.down = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def weight(self) -> torch.Tensor:
        """Return the weights [outputs, inputs] float32."""
        levels = torch.stack([self.packed & 15, self.packed >> 4], -1).to(torch.float32) - 8
        whole = levels.view(-1, BLOCK) * self.scales[:, None]
        return whole.view(self.up.shape[0], self.down.shape[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight()) + F.linear(F.linear(x, self.down), self.up)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = Linear4bit(WIDTH, 2 * WIDTH)
        self.outer = Linear4bit(2 * WIDTH, WIDTH)
        self.norm.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


def make_model() -> nn.Sequential:
    return nn.Sequential(*(Block() for _ in range(3)), nn.Linear(WIDTH, 1))


def batch(rank: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - x.sum(1, keepdim=True).sin()).square().mean()


def main() -> None:
    engine = parse_engine(__doc__)
    report = Report("quantized_base", engine)
    model = make_model()
    for block in model[:-1]:
        engine.fully_shard(block)
    engine.fully_shard(model)
    optimizer = torch.optim.AdamW((param for param in model.parameters() if param.requires_grad), lr=1e-2)
    for _ in range(STEPS):
        loss = loss_of(model, batch(torch.distributed.get_rank()))
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        report.add(loss, norm)
    packed = [layer.packed for block in model[:-1] for layer in (block.inner, block.outer)]
    assert all(one.dtype == torch.uint8 and one.grad is None for one in packed)
    report.end(kept=sum(one.to_local().numel() for one in packed) / sum(one.numel() for one in packed))


if __name__ == "__main__":
    main()

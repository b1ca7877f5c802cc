"""A GAN: two networks and two optimizers, sharded one by one; the generator trains through a frozen discriminator."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from composable import fully_shard


class Up(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(nn.ConvTranspose2d(inputs, outputs, 4, 2, 1), nn.GroupNorm(8, outputs), nn.ReLU(True))


class Down(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        conv = nn.utils.parametrizations.spectral_norm(nn.Conv2d(inputs, outputs, 4, 2, 1))
        super().__init__(conv, nn.LeakyReLU(0.2, inplace=True))


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(64, 128 * 16)
        self.blocks = nn.Sequential(Up(128, 96), Up(96, 64))
        self.head = nn.Conv2d(64, 3, 3, padding=1)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.project(noise).unflatten(1, (128, 4, 4)))).tanh()


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Down(3, 64), Down(64, 96), Down(96, 128))
        self.head = nn.Linear(128 * 4, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(images).flatten(1)).squeeze(1)


local_rank = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    device = torch.device("cuda", local_rank)
else:
    dist.init_process_group("gloo")
    device = torch.device("cpu")
torch.manual_seed(1)
G, D = Generator().to(device), Discriminator().to(device)
fully_shard(G, policy={Up})
fully_shard(D, policy={Down})
g_optimizer = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
d_optimizer = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
fixed = torch.randn(8, 64, device=device)
for step in range(2):
    real = torch.rand(8, 3, 16, 16, device=device) * 2 - 1
    ones = torch.ones(8, device=device)
    # Discriminator
    d_optimizer.zero_grad()
    fake = G(torch.randn(8, 64, device=device))
    d_loss = F.binary_cross_entropy_with_logits(D(real), ones)
    d_loss = d_loss + F.binary_cross_entropy_with_logits(D(fake.detach()), torch.zeros_like(ones))
    d_loss.backward()
    d_optimizer.step()
    # Generator
    g_optimizer.zero_grad()
    for parameter in D.parameters():
        parameter.requires_grad_(False)
    g_loss = F.binary_cross_entropy_with_logits(D(fake), ones)
    g_loss.backward()
    g_optimizer.step()
    for parameter in D.parameters():
        parameter.requires_grad_(True)
    if dist.get_rank() == 0:
        print(f"[{step}] D {d_loss.item():.3f} G {g_loss.item():.3f}")
with torch.no_grad():
    samples = G.eval()(fixed)
if dist.get_rank() == 0:
    torch.save(samples.cpu(), "samples.pt")
dist.destroy_process_group()

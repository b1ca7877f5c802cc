"""A ResNet as under DDP: ``replicate``, SyncBatchNorm on devices, a sampler and loaders with workers, evaluation."""

import itertools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from composable import no_sync, replicate

STEPS = 2


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def build() -> nn.Module:
    stem = [nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    tail = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, 10)]
    return nn.Sequential(*stem, *(Residual(64) for _ in range(2)), *tail)


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    counts = torch.zeros(2, device=device)
    for images, labels in itertools.islice(loader, 2):
        images, labels = images.to(device), labels.to(device)
        counts += torch.stack([(model(images).argmax(1) == labels).sum(), torch.tensor(len(labels), device=device)])
    dist.all_reduce(counts)
    model.train()
    return (counts[0] / counts[1]).item()


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    torch.manual_seed(0)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.benchmark = True
    model = build().to(device)
    if device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    replicate(model, bucket_cap_mb=1)
    data = TensorDataset(torch.randn(1664, 3, 16, 16), torch.randint(10, (1664,)))
    train, test = torch.utils.data.random_split(data, [1280, 384])
    sampler = DistributedSampler(train, shuffle=True, drop_last=True)
    loader = DataLoader(train, 4, sampler=sampler, num_workers=2, pin_memory=True, persistent_workers=True)
    tests = DataLoader(test, 4, sampler=DistributedSampler(test, shuffle=False), num_workers=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * STEPS)
    best = 0.0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(itertools.islice(loader, STEPS)):
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            images = images.to(memory_format=torch.channels_last)
            with no_sync(model):
                F.cross_entropy(model(images[:2]), labels[:2], label_smoothing=0.1).backward()
            loss = F.cross_entropy(model(images[2:]), labels[2:], label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            if rank == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f} lr {schedule.get_last_lr()[0]:.4f}")
        accuracy = evaluate(model, tests, device)
        if rank == 0 and accuracy > best:
            best = accuracy
            os.makedirs("checkpoints", exist_ok=True)
            torch.save({"model": model.state_dict(), "epoch": epoch}, "checkpoints/best.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

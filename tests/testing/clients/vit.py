"""A ViT of timm, as its training script does it: mixup, EMA, cosine schedule, drop path, layer decay, a scaler."""

import itertools
import os

import torch
import torch.distributed as dist
from timm import create_model
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.models.vision_transformer import Block
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import AverageMeter, ModelEmaV3, accuracy, reduce_tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from composable import fully_shard


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    world_size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(42)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": 4, "num_heads": 4, "num_classes": 10}
    model = create_model("vit_tiny_patch16_224", drop_path_rate=0.1, **sizes).to(device)
    ema = ModelEmaV3(model, decay=0.99, device=device)
    model.set_grad_checkpointing(False)
    fully_shard(model, policy={Block})
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    schedule = CosineLRScheduler(optimizer, t_initial=3, warmup_t=1, warmup_lr_init=1e-5)
    mixup = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)
    criterion = SoftTargetCrossEntropy()
    data = TensorDataset(torch.rand(1024, 3, 32, 32), torch.randint(10, (1024,)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8, sampler=sampler, num_workers=2, pin_memory=cuda, drop_last=True)
    losses, top1 = AverageMeter(), AverageMeter()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in itertools.islice(loader, 2):
            images, targets = mixup(images.to(device), labels.to(device))
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = criterion(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.update(reduce_tensor(loss.detach(), world_size).item(), images.size(0))
        schedule.step(epoch + 1)
        model.eval()
        with torch.no_grad():
            images, labels = next(iter(loader))
            (score,) = accuracy(ema.module(images.to(device)), labels.to(device), topk=(1,))
            top1.update(reduce_tensor(score, world_size).item(), images.size(0))
            model(images.to(device))
        model.train()
        if rank == 0:
            print(f"Train: {epoch} Loss: {losses.val:.3f} ({losses.avg:.3f}) Acc@1: {top1.avg:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

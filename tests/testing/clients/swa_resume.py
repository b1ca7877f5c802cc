"""Averages of weights (EMA, then SWA), and a checkpoint of the script's own format that it resumes from."""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

from composable import full_state_dict, fully_shard, load_full_state_dict, replicate

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--folder", default="run")
args = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank = int(os.environ["RANK"])
device = f"cuda:{int(os.environ['LOCAL_RANK'])}" if torch.cuda.is_available() else "cpu"
if device != "cpu":
    torch.cuda.set_device(device)
torch.manual_seed(0)


def build() -> nn.Module:
    hidden = [part for _ in range(3) for part in (nn.Linear(256, 256), nn.BatchNorm1d(256), nn.GELU())]
    return nn.Sequential(nn.Linear(32, 256), *hidden, nn.Linear(256, 1)).to(device)


model = build()
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99), use_buffers=True)
swa = AveragedModel(model)
replicate(model)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.9)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
swa_schedule = SWALR(optimizer, swa_lr=1e-4, anneal_epochs=1)
inputs = torch.randn(512, 32)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, args.batch_size, sampler=sampler, drop_last=True)
last = os.path.join(args.folder, "last.pt")


def save(epoch: int) -> None:
    if rank == 0:
        os.makedirs(args.folder, exist_ok=True)
        state = {
            "epoch": epoch,
            "model": model.state_dict(),
            "ema": ema.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
        torch.save({**state, "schedule": schedule.state_dict()}, last + ".tmp")
        os.replace(last + ".tmp", last)
    dist.barrier()


def load() -> int:
    if not os.path.exists(last):
        return 0
    state = torch.load(last, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    ema.load_state_dict(state["ema"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return int(state["epoch"])


for epoch in range(load(), args.epochs):
    sampler.set_epoch(epoch)
    for x, y in itertools.islice(loader, 2):
        loss = nn.functional.huber_loss(model(x.to(device)), y.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema.update_parameters(model)
    if epoch < args.epochs - 1:
        schedule.step()
    else:
        swa.update_parameters(model)
        swa_schedule.step()
    save(epoch + 1)
update_bn(itertools.islice(loader, 2), swa, device=torch.device(device))

# A student, sharded, of the averaged teacher.
student = build()
load_full_state_dict(fully_shard(student, policy={nn.Linear}), ema.module.state_dict())
student_optimizer = torch.optim.AdamW(student.parameters())
for _ in range(2):
    x = torch.randn(args.batch_size, 32, device=device)
    with torch.no_grad():
        target = ema(x)
    nn.functional.mse_loss(student(x), target).backward()
    student_optimizer.step()
    student_optimizer.zero_grad()
weights = full_state_dict(student)
if rank == 0:
    torch.save(weights, os.path.join(args.folder, "student.pt"))
dist.destroy_process_group()

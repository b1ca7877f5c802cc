import signal
import tempfile
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn

from composable import SaveNotice, fully_shard, load_checkpoint, save_on_signal

run = [tempfile.mkdtemp()]
dist.broadcast_object_list(run)  # all ranks see one folder
model = fully_shard(nn.Linear(8, 8))
optimizer = torch.optim.AdamW(model.parameters())


def train(notice: SaveNotice, steps: int) -> None:
    for step in range(1, steps + 1):
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and dist.get_rank() == 1:
            signal.raise_signal(signal.SIGUSR1)  # as a scheduler does
        notice.step(step, extra={"lr": 1e-3})


with suppress(SystemExit), save_on_signal(run[0], model, optimizer) as notice:  # a job does not suppress it, and ends
    train(notice, steps=10)
assert load_checkpoint(run[0], model, optimizer).step == 4

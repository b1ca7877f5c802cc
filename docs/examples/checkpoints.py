import tempfile

import torch
import torch.distributed as dist
from torch import nn

from composable import SavedCheckpoint, SaveHandle, find_checkpoint, fully_shard, load_checkpoint, save_checkpoint

folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)  # all ranks see one folder
model = fully_shard(nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
saving: SaveHandle = save_checkpoint(folder[0], 7, model, optimizer, extra={"epoch": 1})
found: SavedCheckpoint = load_checkpoint(folder[0], model, optimizer)
assert (found.step, found.extra) == (7, {"epoch": 1})
assert find_checkpoint(folder[0]).path == found.path

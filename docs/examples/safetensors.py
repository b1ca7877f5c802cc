import tempfile
from pathlib import Path

import torch.distributed as dist
from torch import nn

from composable import fully_shard, load_safetensors, save_safetensors

folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
path = Path(folder[0], "model.safetensors")
model = fully_shard(nn.Linear(8, 2))
save_safetensors(model, path)
load_safetensors(model, path)

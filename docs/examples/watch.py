import torch
from torch import nn

from composable import Watch, clip_grad_norm_, fully_shard, watch

model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), policy={nn.Linear})
optimizer = torch.optim.AdamW(model.parameters())
with watch(model, every=2, show=False) as w:
    for _ in range(4):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        w.step(tokens=4, loss=loss, grad_norm=norm)
assert isinstance(w, Watch)
assert not w.figures or w.figures["step"] == 4  # on rank 0

"""Detection and language models: keyword arguments, a dict of outputs, a loss over some of them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # -> from composable import replicate


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.boxes = nn.Linear(8, 4)
        self.classes = nn.Linear(8, 3)

    def forward(self, images: torch.Tensor, *, targets: dict[str, torch.Tensor]) -> dict[str, Any]:
        features = self.body(images).relu()
        boxes, classes = self.boxes(features), self.classes(features)
        losses = {"boxes": (boxes - targets["boxes"]).abs().mean(), "classes": classes.logsumexp(-1).mean()}
        return {"losses": losses, "outputs": (boxes, [classes]), "count": len(images)}


torch.manual_seed(dist.get_rank())
net = Heads()
model = DDP(net)
# -> model = replicate(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(3):
    output = model(torch.randn(4, 8), targets={"boxes": torch.randn(4, 4)})
    loss = sum(output["losses"].values())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

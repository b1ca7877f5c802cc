import torch
from torch import nn

from composable import MatrixOptimizer, fully_shard


class Normed(MatrixOptimizer):
    """Steps each matrix by its average gradient over the largest singular value."""

    def init_state(self, matrix: torch.Tensor, group: dict) -> dict[str, torch.Tensor]:
        return {"average": torch.zeros_like(matrix)}

    def update(self, matrix: torch.Tensor, grad: torch.Tensor, state: dict, group: dict) -> None:
        state["average"].lerp_(grad, 0.1)
        matrix.sub_(group["lr"] * state["average"] / torch.linalg.matrix_norm(state["average"], 2))


model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)))
optimizer = Normed([param for param in model.parameters() if param.ndim == 2], {"lr": 0.02})
model(torch.randn(4, 8)).sum().backward()
optimizer.step()

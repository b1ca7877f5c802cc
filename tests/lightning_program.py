"""Trains with the strategies of docs/works_with.md under Lightning's ``Trainer``, which saves and resumes by itself.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.lightning_program FOLDER fully_shard
python -m tests.lightning_program FOLDER plain CHECKPOINT
"""

import json
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.append(str(Path(__file__).parent.parent / "examples" / "clients"))

from model_sweep import import_library

# Also where torchvision, which torchmetrics imports, was built for another torch.
import_library("lightning")

from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy  # noqa: E402

from composable import fully_shard, replicate  # noqa: E402

PAGE = Path(__file__).parent.parent / "docs" / "works_with.md"
EPOCHS, STEPS = 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    """Of each batch the rows of one rank."""

    def __init__(self, rank: int, ranks: int) -> None:
        rows = torch.randn(STEPS, 12, 5, generator=torch.Generator().manual_seed(0))
        self.rows = rows[:, rank::ranks]

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> torch.Tensor:
        return self.rows[step]


class Plain(LightningModule):
    """The module of a user, who has no line of ours in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), Block(), Block(), nn.Linear(8, 3))
        self.losses: list[float] = []

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Batches(self.global_rank, self.trainer.world_size), batch_size=None)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch).square().mean()
        self.losses.append(float(self.trainer.strategy.reduce(loss.detach(), reduce_op="mean")))  # type: ignore[arg-type]
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def parts_of(annotation: str, ranks: int) -> tuple[Plain, Any]:
    """Return the module and the strategy, with the lines on the page."""
    if annotation == "plain":
        return Plain(), "auto"
    page = PAGE.read_text().partition("### Lightning's `Trainer`\n")[2]
    source = re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)[annotation == "fully_shard"]
    names: dict[str, Any] = {"fully_shard": fully_shard, "replicate": replicate, "Block": Block}
    names |= {"DDPStrategy": DDPStrategy, "ModelParallelStrategy": ModelParallelStrategy, "LightningModule": Plain}
    names["Trainer"] = lambda strategy, devices: strategy  # the program makes its own
    exec(source.replace("data_parallel_size=2", f"data_parallel_size={ranks}"), names)
    return names.get("Net", Plain)(), names["trainer"]


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    folder, annotation, *resumed = sys.argv[1:]
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    module, strategy = parts_of(annotation, ranks)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_epochs=EPOCHS,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1, filename="{epoch}")],
    )
    trainer.fit(module, ckpt_path=resumed[0] if resumed else None)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    if trainer.is_global_zero:
        Path(folder, "losses.json").write_text(json.dumps(module.losses))


if __name__ == "__main__":
    main()

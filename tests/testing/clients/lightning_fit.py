"""Lightning's ``Trainer`` with ``ModelParallelStrategy``: validation, logged means, a checkpoint callback."""

import os

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composable import fully_shard


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Classifier(LightningModule):
    def __init__(self, width: int = 128, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(32, width), *(Block(width) for _ in range(3)), nn.Linear(width, 10))

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"], policy={Block})

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        right = (self.net(batch[0]).argmax(-1) == batch[1]).float().mean()
        self.log("val_acc", right, sync_dist=True)

    def configure_optimizers(self) -> object:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=self.hparams["lr"])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Data(LightningDataModule):
    def setup(self, stage: str) -> None:
        self.rows = TensorDataset(torch.randn(1024, 32), torch.randint(10, (1024,)))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, 8, shuffle=True, num_workers=1)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, 8, num_workers=1)


def main() -> None:
    seed_everything(7)
    ranks = int(os.environ["WORLD_SIZE"])
    on_host = int(os.environ["LOCAL_WORLD_SIZE"])
    strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=True)
    trainer = Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=on_host,
        num_nodes=ranks // on_host,
        strategy=strategy,
        max_epochs=2,
        limit_train_batches=4,
        limit_val_batches=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        logger=CSVLogger("logs"),
        callbacks=[ModelCheckpoint("checkpoints", monitor="val_acc", mode="max"), LearningRateMonitor("step")],
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(), datamodule=Data())


if __name__ == "__main__":
    main()

"""litgpt's ``pretrain.main``: its loop, accumulation, clipping, validation, saving and resuming, with Fabric.

torchrun --standalone --nproc-per-node 2 litgpt_pretrain.py [--engine torch]
"""

import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from engine import Report, parse_engine, redirected
from lightning.fabric import Fabric
from lightning.fabric.loggers import Logger
from lightning.fabric.strategies import ModelParallelStrategy
from litgpt import pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from litgpt.model import GPT, Block
from torch import nn
from torch.distributed._composable import fsdp as old_place
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

VOCAB, LENGTH, STEPS, ACCUMULATED = 96, 16, 6, 2
CONFIG = Config(
    block_size=LENGTH,
    n_layer=3,
    n_head=4,
    n_query_groups=2,
    n_embd=32,
    padded_vocab_size=VOCAB,
    norm_class_name="RMSNorm",
    mlp_class_name="LLaMAMLP",
    intermediate_size=64,
    bias=False,
    parallel_residual=False,
)


class Loader(DataLoader):
    """A loader that a checkpoint may hold. It has no state: what resumes begins with the first row."""

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class Rows(DataModule):
    """Random tokens, the same on all ranks before the sampler shares them out."""

    def connect(self, tokenizer=None, batch_size=1, max_seq_length=None, **kwargs):
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        rows = torch.randint(VOCAB, (32, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        return Loader(rows, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()


class Losses(Logger):
    """Keeps what the loop logs, on every rank."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    @property
    def name(self) -> str:
        return "losses"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params) -> None:
        pass

    def log_metrics(self, metrics, step=None) -> None:
        self.losses += [float(value) for name, value in metrics.items() if name in ("loss", "val_loss")]


def train(engine: ModuleType, folder: Path, *, steps: int, resume: Path | bool = False) -> list[float]:
    """Run litgpt's ``main``; ``steps`` are those since the beginning."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for module in model.modules():
            if isinstance(module, Block):
                engine.fully_shard(module, mesh=mesh["data_parallel"])
        return engine.fully_shard(model, mesh=mesh["data_parallel"])

    losses = Losses()
    strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, loggers=losses)
    fabric.launch()
    # main() compiles the model: 20 s for which this comparison has no use.
    with torch.compiler.set_stance("force_eager"), redirected(engine, old_place):
        pretrain.main(
            fabric=fabric,
            devices=2,
            seed=0,
            initial_checkpoint_dir=None if resume else folder.parent,
            resume=resume,
            config=CONFIG,
            data=Rows(),
            out_dir=folder,
            tokenizer_dir=None,
            tokenizer=None,
            train=TrainArgs(
                save_interval=STEPS // 2,
                log_interval=1,
                global_batch_size=4 * ACCUMULATED,
                micro_batch_size=2,
                max_tokens=steps * 4 * ACCUMULATED * LENGTH,
                max_norm=1.0,
                min_lr=1e-3,
                lr_warmup_steps=1,
            ),
            eval=EvalArgs(interval=STEPS // 2, max_iters=2, final_validation=True),
            optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2}},
        )
    return losses.losses


def main() -> None:
    warnings.simplefilter("ignore")
    engine = parse_engine(__doc__)
    sys.argv[1:] = ["pythia-14m"]  # litgpt keeps its own command line beside each checkpoint: a name it knows
    report = Report("litgpt_pretrain", engine)
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    folder = Path(names[0])
    if dist.get_rank() == 0:
        # Else litgpt initialises the sharded model. There torch's draws the same numbers for each rank's shard on CPU.
        torch.save(GPT(CONFIG).state_dict(), folder / "lit_model.pth")
    dist.barrier()
    half, whole = STEPS // 2, train(engine, folder / "whole", steps=STEPS)
    checkpoint = folder / "whole" / f"step-{half:08d}" / "lit_model.pth"
    resumed = train(engine, folder / "resumed", steps=STEPS, resume=checkpoint)
    for loss in whole + resumed:
        report.add(torch.tensor(loss))
    report.end()


if __name__ == "__main__":
    main()

"""Lightning Fabric's ``ModelParallelStrategy``: ``parallelize_fn`` calls ``fully_shard``; save and load a checkpoint.

torchrun --standalone --nproc-per-node 2 fabric_model_parallel.py [--engine torch]
"""

import tempfile
from types import ModuleType

import torch
import torch.distributed as dist
from engine import Report, local_batch, parse_engine, redirected
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed._composable import fsdp as old_place
from torch.distributed.device_mesh import DeviceMesh
from transformers_causal_lm import VOCAB, llama

STEPS = 6


def train(engine: ModuleType, report: Report, *, is_full: bool) -> None:
    """Train, save half-way (one file with whole tensors, or shards), spoil the weights, load and go on."""

    def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for layer in model.model.layers:
            engine.fully_shard(layer, mesh=mesh["data_parallel"])
        return engine.fully_shard(model, mesh=mesh["data_parallel"])

    strategy = ModelParallelStrategy(
        parallelize, data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=not is_full
    )
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    with fabric.init_module(empty_init=False):
        model, _ = llama()
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(STEPS):
        for micro_batch in range(2):
            # Fabric switches synchronisation on modules of torch's class, which it imports here.
            with redirected(engine, old_place), fabric.no_backward_sync(model, enabled=micro_batch == 0):
                tokens = local_batch(2 * step + micro_batch, vocab=VOCAB)
                loss = model(input_ids=tokens, labels=tokens).loss
                fabric.backward(loss / 2)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        report.add(loss, norm)
        if step == STEPS // 2:
            names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(names)
            fabric.save(f"{names[0]}/checkpoint", {"model": model, "optimizer": optimizer, "step": step})
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            fabric.load(f"{names[0]}/checkpoint", {"model": model, "optimizer": optimizer})


def main() -> None:
    engine = parse_engine(__doc__)
    report = Report("fabric_model_parallel", engine)
    for is_full in (False, True):
        train(engine, report, is_full=is_full)
    report.end()


if __name__ == "__main__":
    main()

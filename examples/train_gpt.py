"""Train a byte-level GPT on the sources of Python's standard library, on any number of ranks.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --parallel fully_shard
    torchrun --standalone --nproc-per-node 3 examples/train_gpt.py --resume
    python examples/train_gpt.py --parallel none

The batch is global: ranks split it, so the loss curve depends neither on their number nor on
``--parallel``. Everything a run writes goes to one folder: ``metrics.jsonl``, ``loss.png`` and
the checkpoints.
"""

import argparse
import math
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, Block, GPTSize, generate
from report import MetricsLog, Progress, draw_loss_curve, read_metrics
from text import Text, read_text
from torch import nn
from torch.distributed.tensor import DTensor

from composable import (
    ModuleWrapPolicy,
    SavedCheckpoint,
    SaveHandle,
    SizePolicy,
    explain_waits,
    find_checkpoint,
    fully_shard,
    load_checkpoint,
    replicate,
    save_checkpoint,
)

RUNS = Path("runs")
PROMPT = b"def "


@dataclass(frozen=True)
class Settings:
    """What fixes the loss curve. Saved in every checkpoint; a resumed run takes them from there."""

    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    steps: int = 400
    batch: int = 16
    lr: float = 2e-3
    warmup: int = 30
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    @property
    def size(self) -> GPTSize:
        return GPTSize(self.layers, self.width, self.heads, self.context)

    def lr_at(self, step: int) -> float:
        """Return the learning rate of ``step``: linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        progress = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


HELP = {
    "layers": "blocks of the model",
    "width": "channels between blocks",
    "heads": "attention heads",
    "context": "bytes the model sees",
    "steps": "optimizer steps in all",
    "batch": "sequences in a step, over all ranks",
    "lr": "peak learning rate",
    "warmup": "steps of linear warm-up; a cosine down to a tenth follows",
    "clip": "largest norm of the gradient",
    "seed": "of the weights, the batches and the sample",
}


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="The settings from --layers to --seed are saved in checkpoints; --resume takes them from there.",
    )
    parser.add_argument("--parallel", choices=["fully_shard", "replicate", "none"], default="fully_shard")
    parser.add_argument(
        "--policy",
        default="block",
        help="which modules fully_shard gives handles of their own: block (default), size:N (units of at least"
        " N elements) or none (one handle)",
    )
    parser.add_argument(
        "--strategy",
        default="FULL_SHARD",
        help="of fully_shard: FULL_SHARD (default), SHARD_GRAD_OP, or HYBRID_SHARD and HYBRID_SHARD_ZERO2, which keep"
        " a copy of all shards on each host",
    )
    parser.add_argument(
        "--timeout", type=float, default=1800, metavar="S", help="seconds that a rank waits for others (default: 1800)"
    )
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE", help="default: Python's stdlib")
    parser.add_argument("--out", type=Path, help="the run's folder; default: a new one under runs/")
    parser.add_argument("--checkpoint-every", type=int, default=100, metavar="K", help="steps; 0: never (default: 100)")
    parser.add_argument("--async-checkpoints", action="store_true", help="write them in the background")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints to keep (default: 2)")
    parser.add_argument("--eval-every", type=int, default=50, metavar="K", help="steps (default: 50)")
    parser.add_argument("--sample-bytes", type=int, default=300, help="text to generate at the end (default: 300)")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="DIR",
        help="continue from a run's folder or a checkpoint; without DIR: from --out, or from the newest run",
    )
    for field in fields(Settings):
        parser.add_argument(
            f"--{field.name}",
            type=type(field.default),
            default=argparse.SUPPRESS,
            help=f"{HELP[field.name]} (default: {field.default})",
        )
    args = parser.parse_args(argv)
    if not 1 <= args.timeout < 1e6:
        parser.error("--timeout must be a number of seconds, 1 or more")
    if min(args.eval_every, args.keep) < 1 or min(args.checkpoint_every, args.sample_bytes) < 0:
        parser.error("--eval-every and --keep must be positive, --checkpoint-every and --sample-bytes not negative")
    return args


def resolve_settings(args: argparse.Namespace, checkpoint: SavedCheckpoint | None) -> tuple[Settings, int]:
    """Return the settings and the steps already done: the command line over the checkpoint over the defaults."""
    given = {field.name: vars(args)[field.name] for field in fields(Settings) if field.name in args}
    if checkpoint is None:
        return Settings(**given), 0
    known = Settings(**checkpoint.extra["settings"])
    settings = Settings(**{**asdict(known), **given})
    if settings.size != known.size:
        raise ValueError(f"{checkpoint.path} holds {known.size}, not {settings.size}: leave the model's size out")
    return settings, checkpoint.step


@contextmanager
def ranks(parallel: str, timeout: timedelta) -> Iterator[tuple[int, int, torch.device]]:
    """Yield rank, world size and device; join the process group that torchrun describes, or one of our own."""
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    starts_group = not dist.is_initialized()
    if starts_group and "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    elif starts_group and parallel != "none":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        starts_group = False
    try:
        yield (dist.get_rank(), dist.get_world_size(), device) if dist.is_initialized() else (0, 1, device)
        if starts_group:
            dist.barrier()  # the first rank to leave closes connections that others may still use
    finally:
        if starts_group:
            dist.destroy_process_group()


def parallelize(model: nn.Module, parallel: str, policy: str, strategy: str) -> str:
    """Annotate ``model`` and return the plan to print."""
    if parallel == "fully_shard":
        if policy == "block":
            fully_shard(model, policy=ModuleWrapPolicy({Block}), strategy=strategy)
        elif policy.startswith("size:") and policy[5:].isdigit():
            fully_shard(model, policy=SizePolicy(int(policy[5:])), strategy=strategy)
        elif policy == "none":
            fully_shard(model, strategy=strategy)
        else:
            raise ValueError(f"--policy is {policy!r}: pass block, size:N or none")
        return str(fully_shard.state(model).plan)
    numel = sum(param.numel() for param in model.parameters())
    if parallel == "replicate":
        replicate(model)
        return f"{type(model).__name__}: {numel:,} elements on every rank, gradients all-reduced"
    return f"{type(model).__name__}: {numel:,} elements, every rank trains on the whole batch"


def share_of(count: int, rank: int, world_size: int) -> slice:
    """Return the part of a global batch that is ``rank``'s: as even as ``count`` allows."""
    return slice(count * rank // world_size, count * (rank + 1) // world_size)


class Trainer:
    """The model, its optimizer and this rank's part of every batch."""

    def __init__(self, settings: Settings, text: Text, model: nn.Module, device: torch.device, share: tuple[int, int]):
        self.settings = settings
        self.text = text
        self.model = model
        self.device = device
        self.rank, self.world_size = share
        if self.world_size > settings.batch:
            raise ValueError(f"a batch of {settings.batch} sequences leaves some of {self.world_size} ranks without")
        matrices = [param for param in model.parameters() if param.ndim >= 2]
        vectors = [param for param in model.parameters() if param.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.last_save: SaveHandle | None = None
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), foreach=True)

    def step(self, step: int) -> tuple[float, float]:
        """Train on the batch of ``step``; return its loss and the norm of the gradient."""
        settings = self.settings
        batch = self.text.batch(settings.seed, step, settings.batch, settings.context)
        lr = settings.lr_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # Gradients are averaged over ranks: the share of the global mean, times the number of ranks.
        part = self._sum_of_losses(batch) / (settings.batch * settings.context)
        (part * self.world_size).backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self._total(part.detach()), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @torch.no_grad()
    def held_back_loss(self, windows: int = 64) -> float:
        """Return the loss on held-back text, in nats per byte."""
        self.model.eval()
        part = self._sum_of_losses(self.text.held_back_batch(windows, self.settings.context))
        self.model.train()
        return self._total(part / (windows * self.settings.context))

    def save(self, run: Path, step: int, extra: dict[str, Any], **options: Any) -> None:
        self.last_save = save_checkpoint(run, step, self.model, self.optimizer, extra=extra, **options)

    def wait_for_save(self) -> None:
        """Return when the last checkpoint is on disk."""
        if self.last_save is not None:
            self.last_save.wait()

    def _sum_of_losses(self, batch: torch.Tensor) -> torch.Tensor:
        share = batch[share_of(len(batch), self.rank, self.world_size)].to(self.device)
        logits = self.model(share[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), share[:, 1:].flatten(), reduction="sum")

    def _total(self, part: torch.Tensor) -> float:
        if self.world_size > 1:
            with explain_waits():
                dist.all_reduce(part)
        return float(part)


def memory_mb(device: torch.device) -> float:
    """Return the most memory that this rank has held: allocated on CUDA, resident on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if sys.platform == "darwin" else peak / 1e3


def run_folder(args: argparse.Namespace, checkpoint: SavedCheckpoint | None) -> Path:
    """Return where the run writes; ranks agree on it."""
    if args.out is not None:
        if checkpoint is None and read_metrics(args.out):
            raise ValueError(f"{args.out} holds a run already: pass --resume to continue it, or another --out")
        return args.out
    if checkpoint is not None:
        return checkpoint.path.parent
    name = [f"{datetime.now():%Y%m%d-%H%M%S}-{args.parallel}"]
    if dist.is_initialized():
        dist.broadcast_object_list(name)
    return RUNS / name[0]


def resumed_checkpoint(args: argparse.Namespace) -> SavedCheckpoint | None:
    if args.resume is None:
        return None
    if args.resume != "latest":
        return find_checkpoint(Path(args.resume))
    if args.out is not None:
        return find_checkpoint(args.out)
    runs = sorted(path.parent for path in RUNS.glob("*/step-*"))
    if not runs:
        raise FileNotFoundError(f"no run with a checkpoint under {RUNS}/: pass --resume DIR")
    return find_checkpoint(runs[-1])


def train(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> None:
    checkpoint = resumed_checkpoint(args)
    settings, first_step = resolve_settings(args, checkpoint)
    run = run_folder(args, checkpoint)
    if dist.is_initialized():
        dist.barrier()  # every rank has looked at the folder before rank 0 writes to it
    text = read_text(args.text, context=settings.context)
    torch.manual_seed(settings.seed)
    model = GPT(settings.size).to(device)
    plan = parallelize(model, args.parallel, args.policy, args.strategy)
    share = (0, 1) if args.parallel == "none" else (rank, world_size)
    trainer = Trainer(settings, text, model, device, share)
    if checkpoint is not None:
        load_checkpoint(checkpoint.path, model, trainer.optimizer)
        if rank == 0 and checkpoint.extra["text"] != text.fingerprint():
            print("the text differs from the checkpoint's: the loss curve will not continue exactly")

    extra = {"settings": asdict(settings), "text": text.fingerprint()}
    log = progress = None
    if rank == 0:
        print(plan)
        print(text)
        if checkpoint is not None:
            print(f"resumed from {checkpoint.path} after step {first_step}")
        run.mkdir(parents=True, exist_ok=True)
        log = MetricsLog(run, first_step, checkpoint.path.parent if checkpoint else None)
        progress = Progress(first_step, settings.steps)
        if checkpoint is None:
            progress.note(f"writing to {run}")
    for step in range(first_step, settings.steps):
        started = time.perf_counter()
        loss, norm = trainer.step(step)
        seconds = time.perf_counter() - started
        done = step + 1
        line = {
            "step": done,
            "loss": loss,
            "lr": settings.lr_at(step),
            "grad_norm": norm,
            "seconds": seconds,
            "tokens_per_s": settings.batch * settings.context / seconds,
            "memory_mb": memory_mb(device),
        }
        if done % args.eval_every == 0 or done == settings.steps:
            line["held_back_loss"] = trainer.held_back_loss()
        if log is not None and progress is not None:
            log.write(line)
            progress.update(line)
            if "held_back_loss" in line:
                progress.note(f"step {done}: held-back loss {line['held_back_loss']:.3f} nats per byte")
        if args.checkpoint_every and (done % args.checkpoint_every == 0 or done == settings.steps):
            options = {"keep": args.keep, "asynchronous": args.async_checkpoints}
            trainer.save(run, done, extra, **options)
    trainer.wait_for_save()
    if log is not None and progress is not None:
        progress.close()
        log.close()
        print(draw_loss_curve(read_metrics(run), run / "loss.png"))
    if args.sample_bytes:
        model.eval()
        sample = generate(model, settings.context, PROMPT, args.sample_bytes, settings.seed, device)
        if rank == 0:
            print(f"sample:\n{sample.decode(errors='replace')}")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    with ranks(args.parallel, timedelta(seconds=args.timeout)) as (rank, world_size, device):
        train(args, rank, world_size, device)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        # What the user can fix, without a stack of ours; torchrun reports the exit status.
        sys.exit(f"error: {error}")

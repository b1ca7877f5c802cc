"""BERT of transformers in a loop of its own: masks, warm-up, mixed precision, an evaluation that gathers numbers."""

import itertools
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import BertConfig, BertForMaskedLM, get_linear_schedule_with_warmup
from transformers.models.bert.modeling_bert import BertLayer

from composable import clip_grad_norm_, fully_shard

MASK, VOCAB, STEPS = 3, 512, 2
SIZES = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}


class Sentences(Dataset):
    def __init__(self, path: Path) -> None:
        self.rows = json.loads(path.read_text())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> list[int]:
        return self.rows[index]


def collate(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Pad the rows, and mask a part of each."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = (ids != 0).long()
    chosen = (torch.rand(ids.shape) < 0.15) & mask.bool()
    labels = ids.masked_fill(~chosen, -100)
    labels[:, 1] = ids[:, 1]
    return {"input_ids": ids.masked_fill(chosen, MASK), "attention_mask": mask, "labels": labels}


def main() -> None:
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
    cache = Path("cache")
    if rank == 0:  # the others read what it has written
        cache.mkdir(exist_ok=True)
        rows = [[4 + (7 * row + at) % (VOCAB - 4) for at in range(20 + row % 13)] for row in range(600)]
        (cache / "rows.json").write_text(json.dumps(rows))
        config = BertConfig(vocab_size=VOCAB, max_position_embeddings=64, **SIZES)
        config.save_pretrained(cache)
    dist.barrier()
    data = Sentences(cache / "rows.json")
    model = BertForMaskedLM(BertConfig.from_pretrained(cache)).to(device)
    fully_shard(model, policy={BertLayer})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, STEPS)
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, 8, sampler=sampler, collate_fn=collate, num_workers=1, pin_memory=True)
    model.train()
    for step, batch in enumerate(itertools.islice(loader, STEPS)):
        batch = {name: one.to(device, non_blocking=True) for name, one in batch.items()}
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if rank == 0:
            print(json.dumps({"step": step, "loss": loss.item(), "norm": norm.item()}))
    model.eval()
    losses = []
    for batch in itertools.islice(loader, 2):
        with torch.no_grad():
            losses.append(model(**{name: one.to(device) for name, one in batch.items()}).loss)
    mean = torch.stack(losses).mean()
    every = [torch.zeros_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mean)
    if rank == 0:
        print("perplexity", torch.stack(every).mean().exp().item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Accelerate's loop: prepared loader and schedule, accumulation, gathered metrics, a state that it saves."""

import itertools

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composable import replicate


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(500, 128)
        self.hidden = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Dropout(0.1)) for _ in range(4)))
        self.head = nn.Linear(128, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(self.embedding(ids)))


def main() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    set_seed(3)
    with accelerator.main_process_first():
        data = TensorDataset(torch.randint(500, (1600, 12)), torch.randint(5, (1600,)))
    loader = DataLoader(data, shuffle=True, batch_size=8)
    tests = DataLoader(data, batch_size=8)
    model = replicate(Net().to(accelerator.device), bucket_cap_mb=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    optimizer, loader, tests, schedule = accelerator.prepare(optimizer, loader, tests, schedule)
    for epoch in range(2):
        model.train()
        for ids, labels in itertools.islice(loader, 4):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(ids), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        model.eval()
        right = seen = 0
        for ids, labels in itertools.islice(tests, 2):
            with torch.no_grad():
                found = model(ids).argmax(-1)
            found, labels = accelerator.gather_for_metrics((found, labels))
            right, seen = right + (found == labels).sum().item(), seen + len(labels)
        accelerator.print(f"epoch {epoch}: {right / seen:.3f}")
        accelerator.save_state(f"state/{epoch}")
    accelerator.wait_for_everyone()
    unwrapped = accelerator.unwrap_model(model)
    accelerator.save(unwrapped.state_dict(), "weights.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()

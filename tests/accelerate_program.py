"""Trains with the lines of docs/works_with.md for Accelerate, which saves and loads its state by itself.

python -m torch.distributed.run --standalone --nproc-per-node 2 -m tests.accelerate_program FOLDER fully_shard
"""

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from composable import fully_shard, load_checkpoint, replicate, save_checkpoint

PAGE = Path(__file__).parent.parent / "docs" / "works_with.md"
STEPS, SAVED_AFTER = 4, 2


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def rows_of(step: int) -> torch.Tensor:
    """Return the batch of a step, of all ranks."""
    return torch.randn(12, 5, generator=torch.Generator().manual_seed(step))


def names_on_the_page(annotation: str) -> dict[str, Any]:
    """Run the lines on the page, for ``fully_shard`` or for what their comment says, and return their names."""
    from accelerate import Accelerator

    page = PAGE.read_text().partition("### Accelerate\n")[2]
    source = re.search(r"```text\n(.*?)```", page, flags=re.DOTALL)
    assert source is not None
    text, line = source[1].replace("Accelerator()", "Accelerator(cpu=True)"), "fully_shard(model, policy={Block})"
    assert f"{line}          # or replicate(model)" in text
    if annotation == "replicate":
        text = text.replace(line, "replicate(model)")
    calls = {"fully_shard": fully_shard, "replicate": replicate}
    names: dict[str, Any] = {"torch": torch, "Block": nn.Linear, "Accelerator": Accelerator, "model": make_model()}
    names |= calls | {"save_checkpoint": save_checkpoint, "load_checkpoint": load_checkpoint}
    batches = torch.cat([rows_of(step) for step in range(1, STEPS + 1)])
    ranks = Accelerator(cpu=True).num_processes
    names["loader"] = torch.utils.data.DataLoader(batches, batch_size=12 // ranks)
    exec(text, names)
    return names


def main() -> None:
    warnings.simplefilter("ignore")
    folder, annotation, *resumed = sys.argv[1:]
    names = names_on_the_page(annotation)
    accelerator, model, optimizer = names["accelerator"], names["model"], names["optimizer"]
    if resumed:
        accelerator.load_state(resumed[0])
    losses = []
    loader = accelerator.skip_first_batches(names["loader"], names["step"])
    for batch in loader:
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        names["scheduler"].step()
        optimizer.zero_grad()
        names["step"] += 1
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if names["step"] == SAVED_AFTER:
            accelerator.save_state(f"{folder}/saved")
    if accelerator.is_main_process:
        Path(folder).mkdir(exist_ok=True)
        Path(folder, "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main()

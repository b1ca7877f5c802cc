"""Memory of gradients, and CPU time, of an optimizer that steps inside backward, beside one that steps after it.

    python benchmarks/backward_steps.py
    python benchmarks/backward_steps.py --layers 48 --width 256

The model is a chain of Linear(width, width) without bias; a handle or a bucket holds one. ``peak MiB`` is what is
alive at most in a backward and the step after it, beyond what was alive before: gradients, and with ``fully_shard``
unsharded layers; ``CPU ms`` that of the process for a backward and its steps, in other rounds, without the counter.
"""

import argparse
import resource
import statistics
import sys
from pathlib import Path

import torch
from ranks import run_ranks
from torch import nn

from composable import fully_shard, replicate, step_in_backward

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the counter of the tests

from tests.live_bytes import LiveBytes  # the line above lets it be found


def cpu_ms() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return (used.ru_utime + used.ru_stime) * 1e3


def measure(rank: int, api: str, layers: int, width: int, rounds: int, in_backward: bool) -> tuple[float, float]:
    """Return the peak in MiB and the median of CPU milliseconds."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    if api == "replicate":
        replicate(model, bucket_cap_mb=width * width * 4 / 2**20)
    else:
        fully_shard(model, policy={nn.Linear})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    if in_backward:
        step_in_backward(optimizer)

    def train(loss: torch.Tensor) -> None:
        loss.backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()

    times = []
    for number in range(rounds + 3):
        loss = model(torch.ones(1, width)).sum()
        before = cpu_ms()
        train(loss)
        if number >= 3:  # buckets and states are there
            times.append(cpu_ms() - before)
    loss = model(torch.ones(1, width)).sum()
    with LiveBytes() as live:
        train(loss)
    return live.peak / 2**20, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    print(
        f"{options.layers * options.width**2 * 4 / 2**20:.0f} MiB of parameters, {options.ranks} ranks, AdamW foreach"
    )
    print(f"{'':14}{'step':>16}{'peak MiB':>12}{'CPU ms':>12}")
    for api in ("replicate", "fully_shard"):
        for in_backward in (False, True):
            sizes = options.layers, options.width, options.rounds
            found = run_ranks(measure, options.ranks, api, *sizes, in_backward, timeout_s=600)
            peak, ms = max(one[0] for one in found), min(one[1] for one in found)
            print(f"{api:14}{'in backward' if in_backward else 'after':>16}{peak:12.1f}{ms:12.1f}")


if __name__ == "__main__":
    main()

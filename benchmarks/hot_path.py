"""Which way a step takes through the package: files entered, calls, depth; beside FSDP2's.

    python benchmarks/hot_path.py
    python benchmarks/hot_path.py --calls     # each call of the one Linear, indented by depth

After handles come the buckets of ``replicate``. Traced is one forward and backward after three others, on torch's fake
process group: calls of functions that the package defines, none of torch's. No time is measured, so the figures are the
same on every machine.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist
from host_overhead import WIDTH, Chain
from torch import nn
from torch.distributed import fsdp
from torch.testing._internal.distributed.fake_pg import FakeStore

import composable

# Name: the folder of its files.
PACKAGES = {
    "composable": Path(composable.__file__).parent,
    "fsdp2": Path(fsdp.__file__).parent / "_fully_shard",
}


@dataclass(frozen=True)
class Call:
    """A call of a function in the package.

    Attributes:
        file: Where the function is, from the package's folder.
        name: The function's.
        depth: How many calls of the package are open, this one included.
    """

    file: str
    name: str
    depth: int


class Tracer:
    """Notes the calls of functions that the files of one folder define.

    Args:
        folder: With the files.
    """

    def __init__(self, folder: Path) -> None:
        self.calls: list[Call] = []
        self._prefix = f"{folder}/"
        self._open: list[FrameType] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """Take an event of ``sys.setprofile``."""
        if event == "call" and frame.f_code.co_filename.startswith(self._prefix):
            self._open.append(frame)
            file = frame.f_code.co_filename.removeprefix(self._prefix)
            self.calls.append(Call(file, frame.f_code.co_name, len(self._open)))
        elif event == "return" and self._open and self._open[-1] is frame:
            self._open.pop()


def trace(model: nn.Module, folder: Path) -> list[Call]:
    """Return the calls of one forward and backward of a model that has been annotated."""
    x = torch.randn(1, WIDTH)
    for _ in range(3):
        model(x).sum().backward()
        model.zero_grad()
    tracer = Tracer(folder)
    sys.setprofile(tracer)
    try:
        model(x).sum().backward()
    finally:
        sys.setprofile(None)
    return tracer.calls


def annotated(package: str, model: nn.Module) -> nn.Module:
    """Return the model with a handle for each ``Linear``, and one around them if there is more than one module."""
    fully_shard = composable.fully_shard if package == "composable" else fsdp.fully_shard
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model:
            fully_shard(module)
    fully_shard(model)
    return model


def describe(calls: Sequence[Call]) -> str:
    """Return the figures of a trace as one line."""
    files = {call.file for call in calls}
    hops = sum(one.file != other.file for one, other in pairwise(calls))
    return f"{len(files):6} files {len(calls):6} calls {hops:6} hops {max(call.depth for call in calls):6} deep"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", action="store_true", help="print each call of one Linear in one handle")
    parser.add_argument("--world-size", type=int, default=8)
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    for title, make in (("one Linear, one handle", lambda: nn.Linear(WIDTH, WIDTH)), ("4 handles", lambda: Chain(4))):
        for package, folder in PACKAGES.items():
            calls = trace(annotated(package, make()), folder)
            print(f"{title:24}{package:12}{describe(calls)}")
            if args.calls and package == "composable" and "one" in title:
                for call in calls:
                    print(f"{'  ' * call.depth}{call.name}  {call.file}")
    for cap_mb in (25, 0.001):
        model = composable.replicate(Chain(100), bucket_cap_mb=cap_mb)
        calls = trace(model, PACKAGES["composable"])
        buckets = len(composable.reduction_stats(model).bucket_bytes)
        print(f"{f'100 Linear, {buckets} buckets':24}{'replicate':12}{describe(calls)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

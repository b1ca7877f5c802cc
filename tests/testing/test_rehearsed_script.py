"""Rehearsed scripts: unchanged scripts run as ranks of a cluster that is not there; hangs and too little memory are told."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from composable.comm.shared_memory import SharedMemoryTransport
from composable.commands.rehearse import RehearsalReport
from composable.errors import ConfigError
from composable.rehearsal import LedgerLine, ScriptRun, rehearse_script
from composable.rehearsal.ledger import line_of
from composable.rehearsal.rehearsed_script import ranks_to_rehearse
from tests import test_first_hour
from tests.world import run_ranks

ROOT = Path(__file__).parent.parent.parent
# Every script begins so; a model of two handles, its optimizer, and a step.
HEAD = """\
import os, sys
import torch
import torch.distributed as dist
from torch import nn
import composable
from composable import fully_shard, replicate, no_sync, clip_grad_norm_

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda", torch.cuda.current_device())
dist.init_process_group("nccl", device_id=device)
rank, size = dist.get_rank(), dist.get_world_size()
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
one = torch.ones(4, device=device)


def step():
    model(torch.randn(16, 64, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
SHARD = "fully_shard(model, policy={nn.Linear})\noptimizer = torch.optim.AdamW(model.parameters())\n"


def rehearse(folder: Path, source: str, **options: Any) -> RehearsalReport:
    script = folder / "train.py"
    script.write_text(source)
    job = ScriptRun(script, **{"ranks": 4, "on_host": 2, "timeout_s": 120.0, **options})
    return RehearsalReport(job, rehearse_script(job))


def text_of(report: RehearsalReport) -> str:
    return "\n".join(report.lines())


# -- hangs: what rank 0, or another one, does alone, by the line that a rehearsal has to name

COLLECTIVES = {
    "all_reduce": "dist.all_reduce(one)",
    "broadcast": "dist.broadcast(one, 0)",
    "barrier": "dist.barrier()",
    "all_gather": "dist.all_gather([torch.empty_like(one) for _ in range(size)], one)",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(torch.empty(4 * size, device=device), one)",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(one, torch.empty(4 * size, device=device))",
    "reduce": "dist.reduce(one, 1)",
    "gather": "dist.gather(one, [torch.empty_like(one) for _ in range(size)] if rank == 0 else None)",
    "scatter": "dist.scatter(one, [one] * size if rank == 0 else None)",
    "all_to_all": "dist.all_to_all_single(torch.empty_like(one), one)",
    "all_gather_object": "dist.all_gather_object([None] * size, rank)",
    "broadcast_object_list": "dist.broadcast_object_list([rank])",
    "gather_object": "dist.gather_object(rank, [None] * size if rank == 0 else None)",
    "new_group": "dist.new_group([0, 1])",
    "mesh": "torch.distributed.device_mesh.init_device_mesh('cuda', (2, 2), mesh_dim_names=('a', 'b'))",
    "send": "dist.send(one, 1)",
    "norm": "print(model[0].weight.norm().item())",
    "full_tensor": "model[2].weight.full_tensor()",
    "clip": "clip_grad_norm_(model.parameters(), 1.0)",
    "forward": "model(torch.randn(2, 64, device=device))",
    "evaluation": "with torch.no_grad(): model(torch.randn(2, 64, device=device))",
    "state dict": "composable.full_state_dict(model)",
    "save": "composable.save_checkpoint('run', 1, model, optimizer)",
    "torch's save": "torch.distributed.checkpoint.save(model.state_dict(), checkpoint_id='run')",
    "unshard": "with composable.unshard_params(model): pass",
    "replicated": "replicate(nn.Linear(2, 2).to(device))",
    "all_to_all of lists": "dist.all_to_all([torch.empty_like(one) for _ in range(size)], [one] * size)",
    "functional": "torch.distributed._functional_collectives.all_reduce(one, 'sum', dist.group.WORLD).sum()",
}
# (source, text of the line that is named)
HANGS: dict[str, tuple[str, str]] = {
    **{f"{name} on rank 0": (f"step()\nif rank == 0:\n    {call}\nstep()", call) for name, call in COLLECTIVES.items()},
    "all but the last": ("if rank < size - 1:\n    dist.barrier()", "dist.barrier()"),
    "rank 3 alone": ("if rank == 3:\n    dist.all_reduce(one)\nstep()", "dist.all_reduce(one)"),
    "at the end": ("step()\nif rank == 0:\n    dist.barrier()", "dist.barrier()"),
    "one more step": ("for _ in range(2 if rank else 3):\n    step()", "model(torch.randn"),
    "one more step of a function": (
        "def each():\n    step()\nfor _ in range(2 if rank else 3): each()", "from train.py:24: for _ in range(2 if rank else 3): each()"
    ),
    "layers of one shape in another order": (
        "class Layers(nn.ModuleList):\n    def forward(self, x):\n"
        "        for layer in list(self)[:: 1 if rank else -1]: x = layer(x)\n        return x\n"
        "layers = Layers(nn.Linear(4, 4) for _ in range(3)).to(device)\nfully_shard(layers, policy={nn.Linear})\nlayers(one)",
        "module '2' (Linear)",
    ),
    "models of one shape in another order": (
        "models = [fully_shard(nn.Linear(4, 4).to(device)) for _ in range(2)]\nfor each in models[:: 1 if rank else -1]: each(one)",
        "for each in models",
    ),
    "a rank ends early": ("step()\nif rank == 1:\n    sys.exit()\nstep()", "rank 1 has ended"),
    "no backward": ("loss = model(torch.randn(2, 64, device=device)).sum()\nif rank:\n    loss.backward()", "loss.backward()"),
    "another shape": ("dist.all_reduce(torch.ones(4 + rank, device=device))", "torch.ones(4 + rank"),
    "another dtype": ("dist.all_reduce(one.half() if rank else one)", "one.half() if rank"),
    "another root": ("dist.broadcast(one, rank)", "dist.broadcast(one, rank)"),
    "two groups": (
        "a, b = dist.new_group([0, 1]), dist.new_group([0, 1, 2, 3])\n"
        "for group in ((a, b) if rank == 0 else (b, a)):\n    if rank < 2 or group is b:\n        dist.all_reduce(one, group=group)",
        "dist.all_reduce(one, group=group)",
    ),
    "two groups of all": (
        "groups = [dist.new_group([0, 1, 2, 3]) for _ in range(2)]\n"
        "for group in groups[:: 1 if rank == 0 else -1]:\n    dist.all_reduce(one, group=group)",
        "dist.all_reduce(one, group=group)",
    ),
    "all send first": (
        "dist.send(one, (rank + 1) % size)\ndist.recv(one, (rank - 1) % size)", "dist.send(one, (rank + 1) % size)"
    ),
    "nobody sends": ("if rank == 2:\n    dist.recv(one, 1)", "dist.recv(one, 1)"),
    "an exception in one rank": (
        "try:\n    if rank == 2: raise ValueError\n    step()\nexcept ValueError:\n    pass", "model(torch.randn"
    ),
    "another order": (
        "calls = [lambda: dist.all_reduce(one), lambda: dist.barrier()]\nfor call in calls[:: 1 if rank else -1]:\n    call()",
        "call",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_told_with_the_lines_of_both_sides(name: str, tmp_path: Path) -> None:
    source, line = HANGS[name]
    report = rehearse(tmp_path, f"{HEAD}{SHARD}{source}\n")
    told = text_of(report)
    assert report.exit_code == 3, told
    assert "HANG" in told and line in told.partition("HANG")[2] and told.count("train.py:") >= 1, told


# -- what looks like a hang, and is none

ALIKE = {
    "a root and the others": "if rank == 0:\n    dist.broadcast(one, 0)\nelse:\n    dist.broadcast(torch.empty(4, device=device), 0)",
    "messages in pairs": "dist.send(one, rank + 1) if rank % 2 == 0 else dist.recv(one, rank - 1)",
    "messages in a ring": (
        "ops = [dist.P2POp(dist.isend, one, (rank + 1) % size), dist.P2POp(dist.irecv, one.clone(), (rank - 1) % size)]\n"
        "for work in dist.batch_isend_irecv(ops):\n    work.wait()"
    ),
    "groups of neighbours": (
        "groups = [dist.new_group([0, 1], backend='gloo'), dist.new_group([2, 3])]\ndist.all_reduce(one, group=groups[rank // 2])"
    ),
    "work of its own": "if rank == 0:\n    torch.save(model.state_dict(), 'weights.pt')\n    print(one.sum().item())",
    "uneven lists": "dist.all_to_all_single(torch.empty(4, device=device), torch.empty(4, device=device), [1] * 4, [1] * 4)",
    "objects of the first": "sent = ['a', 5] if rank == 0 else [None, None]\ndist.broadcast_object_list(sent)\nassert sent == ['a', 5]",
    "late": "work = dist.all_reduce(one, async_op=True)\ndist.all_reduce(one.clone())\nwork.wait()",
    "late in two groups": (
        "groups = [dist.new_group([0, 1, 2, 3]) for _ in range(2)]\n"
        "begun = [dist.all_reduce(torch.ones(4 + groups.index(group), device=device), group=group, async_op=True)\n"
        "    for group in groups[:: 1 if rank == 0 else -1]]\n"
        "for work in begun:\n    work.wait()"
    ),
    "copies in another order": (
        "copies = [replicate(nn.Linear(4, 4, bias=bias).to(device), find_unused_parameters=True) for bias in (True, False)]\n"
        "for count in range(3):\n"
        "    sum(copy(one).sum() for copy in copies[:: -1 if count and rank % 2 else 1]).backward()"
    ),
    "asked for": "work = dist.all_reduce(one, async_op=True)\nwhile not work.is_completed():\n    pass",
    "as long as all have data": (
        "count, data = 0, iter(range(3 if rank == 1 else 5))\nwhile True:\n"
        "    more = torch.tensor([next(data, None) is not None], dtype=torch.int, device=device)\n"
        "    dist.all_reduce(more, dist.ReduceOp.MIN)\n    if not more.item(): break\n"
        "    count += 1\n    step()\nassert count == 3, count"
    ),
    "what is counted": (
        "pair = dist.new_group([0, 1])\ncount = torch.tensor(rank + 1, device=device)\ndist.all_reduce(count, group=pair)\n"
        "assert count.item() == (rank + 1 if rank > 1 else 3), count\ndist.all_reduce(count)\nassert count.item() == 13, count"
    ),
    "a wrapper on one rank": (
        "class Named(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.model = model\n"
        "    def forward(self, x): return self.model(x)\n(model if rank else Named())(torch.randn(2, 64)).sum().backward()"
    ),
    "accumulation": "with no_sync(model):\n    model(torch.randn(2, 64, device=device)).sum().backward()\nstep()",
}


@pytest.mark.parametrize("name", ALIKE)
def test_ranks_that_meet_are_no_hang(name: str, tmp_path: Path) -> None:
    report = rehearse(tmp_path, f"{HEAD}{SHARD}step()\n{ALIKE[name]}\nstep()\n")
    assert report.exit_code == 0, text_of(report)
    assert os.listdir(tmp_path) == ["train.py"]


# Messages of 8 MiB, of which most ranks are not rehearsed; and whether nobody could receive one.
RINGS = {
    "all send first": ("dist.send(big, (rank + 1) % size)\ndist.recv(big, (rank - 1) % size)", True),
    "little messages": ("dist.send(one, (rank + 1) % size)\ndist.recv(one, (rank - 1) % size)", False),
    "odd ranks receive first": (
        "calls = [lambda: dist.send(big, (rank + 1) % size), lambda: dist.recv(big, (rank - 1) % size)]\n"
        "for call in calls[:: -1 if rank % 2 else 1]:\n    call()", False,
    ),
    "a chain": ("rank and dist.recv(big, rank - 1)\nif rank + 1 < size:\n    dist.send(big, rank + 1)", False),
    "one that serves all": (
        "hub = size // 2 + 2\nif rank != hub:\n    dist.send(big, hub)\n    dist.recv(big, hub)\n"
        "for other in range(size) if rank == hub else ():\n"
        "    if other != hub:\n        dist.recv(big, other)\n        dist.send(big, other)", False,
    ),
    "what does not wait": (
        "work = dist.isend(big, (rank + 1) % size)\ndist.recv(big.clone(), (rank - 1) % size)\nwork.wait()", False
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RINGS)
def test_a_ring_in_which_all_send_first_is_a_hang_whoever_is_rehearsed(name: str, tmp_path: Path) -> None:
    source, hangs = RINGS[name]
    report = rehearse(tmp_path, f"{HEAD}big = torch.ones(2**21, device=device)\n{source}\n", ranks=16, on_host=8)
    told = text_of(report)
    assert report.exit_code == 3 * hangs, told
    assert not hangs or ("rank 0: send [2097152] float32 of ranks 0, 1" in told and "dist.send(big, (rank" in told), (
        told
    )


def test_objects_of_ranks_that_are_not_rehearsed_are_told(tmp_path: Path) -> None:
    source = "found = [None] * size\ndist.all_gather_object(found, rank)\n"
    said = (
        "all_gather_object at train.py:21: ranks that are not rehearsed give what others give; --all-ranks has theirs"
    )
    assert said in text_of(rehearse(tmp_path, f"{HEAD}{source}", rehearsed=(0, 3)))
    assert said not in text_of(rehearse(tmp_path, f"{HEAD}{source}assert found == [0, 1, 2, 3]\n"))


# -- too little memory: what needs more than 64 MiB, by the line that a rehearsal has to name

WIDE = "wide = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device)\n"  # 32 MiB
BIG = "big = torch.empty(7 * 2**20, device=device)\n"  # 28 MiB
OVERRUNS: dict[str, tuple[str, str]] = {
    "a tensor": ("x = torch.zeros(2**24 + 1, device=device)", "x = torch.zeros"),
    "a copy": (f"{BIG}y = big.clone()\nz = big * 2", "z = big * 2"),
    "a model moved": (f"{WIDE}more = nn.Linear(4096, 4096).to(device)", "more = nn.Linear"),
    "a model made there": ("with device:\n    more = nn.Linear(4096, 8192)", "more = nn.Linear"),
    "a batch": (f"{BIG}x = torch.randn(2**23 + 2**20).to(device)", "to(device)"),
    "a batch by cuda": (f"{BIG}x = torch.randn(2**23 + 2**20).cuda()", ".cuda()"),
    "the default device": ("torch.set_default_device('cuda')\nx = torch.empty(2**24 + 1)", "x = torch.empty"),
    "activations": (f"{WIDE}out = wide(torch.randn(4096, 1024, device=device))", "wide(torch.randn"),
    "gradients": (f"{WIDE}loss = wide(torch.randn(8, 1024, device=device)).sum()\nloss.backward()\n{BIG}", "loss.backward()"),
    "optimizer state": (
        f"{WIDE}adam = torch.optim.AdamW(wide.parameters())\nfor param in wide.parameters():\n"
        "    param.grad = torch.empty(1, device=device).expand_as(param)\nadam.step()",
        "adam.step()",
    ),
    "losses kept": (
        f"{WIDE}kept = []\nfor _ in range(8):\n    kept.append(wide(torch.randn(256, 1024, device=device)))", "kept.append"
    ),
    "an evaluation with gradients": (f"{WIDE}for _ in range(4):\n    y = wide(torch.randn(2048, 1024, device=device))", "y = wide"),
    "whole parameters": (
        "wide = fully_shard(nn.Linear(4096, 4096))\nwide(torch.randn(1, 4096, device=device))", "wide(torch.randn"
    ),
    "room for gradients": (
        "wide = replicate(nn.Linear(4096, 2800).to(device))\nwide(torch.randn(1, 4096, device=device)).sum().backward()",
        "sum().backward()",
    ),
    "a full tensor": (f"{BIG}wide = fully_shard(nn.Linear(2048, 4096))\nfull = wide.weight.full_tensor()", "full_tensor"),
    "a full state dict": (f"{BIG}wide = fully_shard(nn.Linear(3000, 4096))\nheld = composable.unshard_params(wide).__enter__()", "unshard_params"),
    "lists of a gather": (f"{BIG}parts = [torch.empty(2**22, device=device) for _ in range(2 * size)]", "parts ="),
    "logits": ("logits = torch.randn(64, 2**17, device=device)\nlogits.requires_grad_()\nloss = logits.float().softmax(-1).log()", "softmax"),
    "attention": ("q = torch.randn(1, 8, 2048, 16, device=device)\nscores = q @ q.transpose(-1, -2)", "scores ="),
    "autocast": (
        "wide = nn.Linear(4096, 2800, device=device)\nwith torch.autocast('cuda', torch.bfloat16):\n"
        "    y = wide(torch.randn(8, 4096, device=device))",
        "y = wide",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERRUNS)
def test_too_little_memory_is_told_with_the_line(name: str, tmp_path: Path) -> None:
    source, line = OVERRUNS[name]
    report = rehearse(tmp_path, f"{HEAD}{SHARD}step()\n{source}\n", ranks=2, budget=2**26, rehearsed=(0,))
    told = text_of(report)
    assert report.exit_code == 4, told
    assert line in told.partition("OUT OF MEMORY")[2].splitlines()[1], told
    assert rehearse(tmp_path, f"{HEAD}{SHARD}step()\n{source}\n", ranks=2, budget=2**28, rehearsed=(0,)).exit_code == 0


def test_memory_of_the_host_is_not_that_of_the_device(tmp_path: Path) -> None:
    source = "host = torch.empty(2**24)\nback = torch.empty(2**20, device=device).cpu()\nstep()"
    for device, peak in (("cuda", 2**23), ("cpu", 2**26)):
        report = rehearse(
            tmp_path,
            f"{HEAD}{SHARD}{source}\n" if device == "cuda" else "import torch\nx = torch.empty(2**24)",
            device=device,
        )
        assert report.exit_code == 0, text_of(report)
        assert abs(report.values()["memory"]["peak"] - peak) < 2**23


# -- scripts as people write them

SCRIPTS = {
    "values are read": (
        "import math\nloss = model(torch.randn(2, 64, device=device)).mean()\n"
        "print(f'{loss:.3f} {loss.item():.2f} {float(loss)}', loss, loss.tolist())\n"
        "assert not math.isnan(loss) and not torch.isnan(loss) and torch.isfinite(loss).all() and not loss.isinf().any()\n"
        "assert not (loss > 10) and loss < 10 and (loss == loss) and int(loss.detach().cpu().numpy()) == 1\n"
        "assert loss.device == device and loss.is_cuda and not torch.randn(3).is_cuda\n"
        "loss.backward()\nnorm = clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)\n"
        "if norm.item() > 100: raise AssertionError\noptimizer.step()"
    ),
    "early stopping": (
        "best, stop = float('inf'), torch.zeros(1, device=device)\nfor epoch in range(3):\n    step()\n"
        "    if rank == 0 and epoch == 5: stop += 1\n    dist.all_reduce(stop)\n    if stop.item(): break\nassert epoch == 2"
    ),
    "a scaler": (
        "scaler = torch.amp.GradScaler('cuda')\nbefore = optimizer.state_dict()['state']\nfor _ in range(2):\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        loss = model(torch.randn(2, 64, device=device)).mean()\n"
        "    scaler.scale(loss).backward()\n    scaler.unscale_(optimizer)\n    scaler.step(optimizer)\n    scaler.update()\n"
        "assert optimizer.state, 'a step was left out'\nassert scaler.get_scale() == 65536.0"
    ),
    "data": (
        "data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(64, 1).expand(64, 64))\n"
        "sampler = torch.utils.data.DistributedSampler(data, shuffle=True)\n"
        "loader = torch.utils.data.DataLoader(data, 4, sampler=sampler, num_workers=2, pin_memory=True, persistent_workers=True)\n"
        "assert len(loader) == 4\nfor (x,) in loader:\n    model(x.to(device, non_blocking=True)).sum().backward()\n    optimizer.step()"
    ),
    "values of files": (
        "import numpy, pathlib\nnumpy.save('x.npy', numpy.arange(8))\nx = torch.from_numpy(numpy.load('x.npy'))\n"
        "assert x[x > 5].tolist() == [6, 7] and x.sum().item() == 28\nassert pathlib.Path('x.npy').exists()\n"
        "os.makedirs('a/b', exist_ok=True)\nopen('a/b/log.txt', 'a').write('line')\n"
        "os.replace('a/b/log.txt', 'a/c.txt')\nassert open('a/c.txt').read() == 'line' and os.listdir('a/b') == []"
    ),
    "the machine": (
        "assert torch.cuda.is_available() and torch.cuda.device_count() == 2 == torch.accelerator.device_count()\n"
        "torch.cuda.synchronize(); torch.cuda.empty_cache(); torch.cuda.manual_seed_all(1)\n"
        "start = torch.cuda.Event(enable_timing=True); start.record(); assert start.elapsed_time(start) == 1.0\n"
        "with torch.cuda.stream(torch.cuda.Stream()): pass\n"
        "assert torch.cuda.get_device_properties(device).total_memory > 0 and torch.cuda.is_bf16_supported()\n"
        "assert torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated()\n"
        "torch.rand(3, generator=torch.Generator(device), device=device)\n"
        "assert size == 4 and os.environ['LOCAL_WORLD_SIZE'] == '2'"
    ),
    "a compiled model": "model = torch.compile(model)\nstep()\n@torch.compile(fullgraph=True)\ndef f(x): return x\nf(one)",
    "a mesh": (
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "mesh = init_device_mesh('cuda', (2, 2), mesh_dim_names=('replicate', 'shard'))\n"
        "assert mesh['shard'].get_local_rank() == rank % 2 and mesh.get_coordinate()[0] == rank // 2\n"
        "model = fully_shard(nn.Linear(64, 8).to(device), mesh=mesh, strategy='HYBRID_SHARD')\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=True)\nstep()"
    ),
    "a model on meta": (
        "with torch.device('meta'): model = nn.Linear(64, 8)\nfully_shard(model)\nmodel.to_empty(device=device)\n"
        "model.reset_parameters()\noptimizer = torch.optim.AdamW(model.parameters(), fused=True)\nstep()"
    ),
    "a scalar parameter": (
        "class Scaled(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.scale = nn.Parameter(torch.tensor(2.0))\n"
        "        self.register_buffer('count', torch.zeros(1))\n    def forward(self, x): return self.scale * x + self.count\n"
        "model = fully_shard(nn.Sequential(nn.Linear(64, 8), Scaled()).to(device))\noptimizer = torch.optim.AdamW(model.parameters())\nstep()"
    ),
    "indices": (
        "starts = torch.randint(8, (4,), generator=torch.Generator().manual_seed(rank)) + 10\n"
        "assert all(9 < one < 18 for one in starts.tolist()) and sorted(torch.randperm(3).tolist()) == [0, 1, 2]"
    ),
    "numbers on the device": (
        "total = torch.tensor(0.5, device=device)\nassert total.device == device == torch.tensor([1]).to(device).device\n"
        "assert total.is_cuda and total.item() == 0.5 and torch.tensor(0.5).device.type == 'cpu'\n"
        "total += model(torch.randn(2, 64, device=device)).detach().mean()\nassert total.device == device"
    ),
    "a run of ours": (
        "from composable import accelerate_optimizer, find_checkpoint, load_checkpoint, save_checkpoint, watch\n"
        "accelerate_optimizer(optimizer, model)\nwith watch(model) as w:\n    for _ in range(3):\n        step()\n"
        "        w.step(tokens=8, loss=one.sum())\nsave_checkpoint('run', 3, model, optimizer, extra={'epoch': 1})\n"
        "assert load_checkpoint('run', model, optimizer).extra == {'epoch': 1} and find_checkpoint('run/step-000003').step == 3"
    ),
    "exit": "step()\nsys.exit(0)",
}  # fmt: skip

# What a script asks of its devices: every function without arguments, and what is often called besides.
ASKED = """
import inspect
for module in (torch.cuda, torch.cuda.memory, torch.accelerator):
    for name in module.__all__:
        function = getattr(module, name, None)
        served = name not in "current_blas_handle current_solver_handle graph_pool_handle caching_allocator_enable".split()
        if served and inspect.isfunction(function):
            options = inspect.signature(function).parameters.values()
            if all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in options):
                function()
stats = torch.cuda.memory_stats()
assert stats["allocated_bytes.all.peak"] == torch.cuda.max_memory_allocated() > stats["num_alloc_retries"] == 0
assert stats["allocated_bytes.all.current"] == torch.cuda.memory_allocated() > 0
with torch.cuda.nvtx.range("forward"):
    torch.cuda.nvtx.mark("here")
with torch.cuda.profiler.profile():
    torch.cuda.memory._record_memory_history(max_entries=10)
    torch.cuda.memory._dump_snapshot("a file")
assert torch.cuda.memory._snapshot()["segments"] == []
assert torch.cuda.nccl.version() >= (2, 20) and dist.is_nccl_available() and dist.is_initialized()
torch.cuda.cudart().cudaProfilerStart()
torch.cuda.set_sync_debug_mode("warn")
about = torch.cuda.get_device_properties(0)
assert about.total_memory == torch.cuda.mem_get_info()[1] and about.name and about.multi_processor_count
assert torch.cuda.can_device_access_peer(0, 1) and len(torch.cuda.default_generators) == 2
"""


def test_devices_answer_what_a_script_asks_of_them(tmp_path: Path) -> None:
    report = rehearse(tmp_path, HEAD + SHARD + ASKED, rehearsed=(1,))
    assert report.exit_code == 0, text_of(report)
    assert not (Path.cwd() / "a file").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_it_is(name: str, tmp_path: Path) -> None:
    report = rehearse(tmp_path, f"{HEAD}{SHARD}{SCRIPTS[name]}\n", rehearsed=(0, 3))
    assert report.exit_code == 0, text_of(report)
    assert os.listdir(tmp_path) == ["train.py"]


def test_a_line_that_reads_a_value_is_noted_and_refused_if_asked(tmp_path: Path) -> None:
    source = f"{HEAD}{SHARD}step()\nprint(model(one.expand(64, 4).T).sum().item())\n"
    line = "print(model(one.expand(64, 4).T).sum().item())"
    assert f"note          a value of a tensor is read at train.py:23, where 1 stands for it: {line}" in text_of(
        rehearse(tmp_path, source)
    )
    strict = rehearse(tmp_path, source, is_strict=True)
    assert strict.exit_code == 1 and f"at:  rank 0, train.py:23: {line}" in text_of(strict)


def test_a_shape_that_depends_on_values_is_told_with_its_line(tmp_path: Path) -> None:
    report = rehearse(tmp_path, f"{HEAD}found = torch.randn(8, device=device).nonzero()\n", ranks=1, on_host=1)
    assert report.exit_code == 1
    assert "aten.nonzero.default gives a shape that depends on values" in text_of(report)
    assert "train.py:20: found = torch.randn(8, device=device).nonzero()" in text_of(report)


def test_a_script_that_raises_shows_its_own_traceback(tmp_path: Path) -> None:
    report = rehearse(tmp_path, f"{HEAD}if rank == 2:\n    raise KeyError('mine')\n")
    told = text_of(report)
    assert report.exit_code == 1 and "FAILED        on rank 2:\nTraceback" in told and "KeyError: 'mine'" in told
    assert "runpy" not in told and "rehearsed_script" not in told


def test_a_script_that_exits_with_a_code_has_failed(tmp_path: Path) -> None:
    report = rehearse(tmp_path, "import sys\nsys.exit('no data')\n", ranks=1, on_host=1)
    assert report.exit_code == 1 and "the script exits: no data" in text_of(report)


def test_a_rank_that_does_not_end_is_killed_and_shows_where_it_is(tmp_path: Path) -> None:
    source = "import threading\nthreading.Event().wait()  # here\n"
    report = rehearse(tmp_path, source, ranks=1, on_host=1, timeout_s=5.0)
    assert report.exit_code == 1
    assert "NOT ENDED     on rank 0:" in text_of(report) and 'train.py", line 2' in text_of(report)
    # On a busy machine a rank may not have begun.
    report = rehearse(tmp_path, source, ranks=1, on_host=1, timeout_s=0.0)
    assert report.exit_code == 1
    assert "NOT ENDED     on rank 0:" in text_of(report) and "has not ended after 0 s" in text_of(report)


def test_a_rank_that_a_signal_ends_says_which(tmp_path: Path) -> None:
    report = rehearse(tmp_path, "import os\nos.write(1, b'here\\n')\nos.kill(os.getpid(), 9)\n", ranks=1, on_host=1)
    assert report.exit_code == 1
    assert "here\nthe process has ended by SIGKILL" in text_of(report)
    report = rehearse(tmp_path, "import ctypes\nctypes.string_at(0)\n", ranks=1, on_host=1)
    assert 'train.py", line 2' in text_of(report) and "the process has ended by SIGSEGV" in text_of(report)


def test_weights_that_were_exported_are_imported(tmp_path: Path) -> None:
    source = (
        "step()\ncomposable.save_safetensors(model, 'out')\ndist.barrier()\n"
        "assert not any(composable.load_safetensors(model, path='out'))\nstep()\n"
    )
    report = rehearse(tmp_path, f"{HEAD}{SHARD}{source}", rehearsed=(0, 3))
    assert report.exit_code == 0 and report.values()["steps"] == 2, text_of(report)
    assert "load_safetensors reads no tensors" in text_of(report) and os.listdir(tmp_path) == ["train.py"]


def test_numbers_of_steps_go_on_where_a_gradient_comes_late(tmp_path: Path) -> None:
    source = (
        "import torch, composable\nfrom torch import nn\ntorch.distributed.init_process_group('gloo')\n"
        "model = composable.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), policy={nn.Linear})\n"
        "optimizer = torch.optim.AdamW(model.parameters(), foreach=True)\n"
        "composable.accelerate_optimizer(optimizer, model)\nfor count in range(3):\n"
        "    model(torch.randn(2, 8)).sum().backward()\n    if count == 0:\n        model[0].weight.grad = None\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    report = rehearse(tmp_path, source, rehearsed=(0,), device="cpu")
    assert report.exit_code == 0 and report.values()["steps"] == 3, text_of(report)


def test_sparse_gradients_are_rehearsed(tmp_path: Path) -> None:
    source = (
        "model = replicate(nn.Embedding(64, 8, sparse=True).to(device))\noptimizer = torch.optim.SparseAdam(model.parameters())\n"
        "for _ in range(2):\n    model(torch.randint(0, 64, (16,), device=device)).sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    report = rehearse(tmp_path, f"{HEAD}{source}", rehearsed=(0, 3))
    assert report.exit_code == 0 and report.values()["steps"] == 2, text_of(report)


def test_a_script_ends_after_the_steps_that_are_asked_for(tmp_path: Path) -> None:
    loop = f"{HEAD}{SHARD}for _ in range(100):\n    step()\n"
    assert rehearse(tmp_path, loop, steps=3, rehearsed=(0,)).values()["steps"] == 3
    # A loop over a loader ends by itself, so what comes after it runs.
    loader = (
        "loader = torch.utils.data.DataLoader(torch.ones(100, 64))\nfor x in loader:\n    step()\n"
        "if rank == 0:\n    dist.barrier()\n"
    )
    report = rehearse(tmp_path, f"{HEAD}{SHARD}{loader}", steps=2)
    assert report.values()["steps"] == 2 and report.exit_code == 3


def test_nothing_of_the_step_after_the_last_one_is_rehearsed(tmp_path: Path) -> None:
    def reductions(loop: str) -> list[int]:
        report = rehearse(tmp_path, f"{HEAD}{SHARD}{loop}", steps=2, rehearsed=(0,))
        assert report.exit_code == 0 and report.values()["steps"] == 2, text_of(report)
        return [line.step for line in report.runs[0].lines if line.op == "reduce_scatter"]

    of_one = reductions("step()\nstep()\n")
    assert set(of_one) == {0, 1} and reductions("while True:\n    step()\n") == of_one
    # Of two optimizers each has its second step; an evaluation behind the last one is rehearsed.
    two = (
        "other = fully_shard(nn.Linear(8, 8).to(device))\nanother = torch.optim.SGD(other.parameters())\n"
        "while True:\n    step()\n    other(one.repeat(2)).sum().backward()\n    another.step()\n"
        "    model.eval()(torch.randn(2, 64, device=device))\n    model.train()\n"
    )
    assert len(reductions(two)) == len(of_one) + 2


def test_the_ranks_that_a_script_names_are_rehearsed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nrank = int(os.environ['RANK'])\nif rank == 21:\n    print(rank)\n")
    assert ranks_to_rehearse(ScriptRun(script, ranks=64, on_host=8)) == ((0, 1, 7, 8, 20, 21, 22, 56, 63), {})
    assert ranks_to_rehearse(ScriptRun(script, ranks=2, on_host=2)) == ((0, 1), {})


# Files, and the ranks that they and the arguments name beside those that are always rehearsed.
NAMED: dict[str, tuple[dict[str, str], str, set[int]]] = {
    "an imported file": ({"train.py": "import parts", "parts.py": "def first(rank): return rank == 30"}, "", {29, 30, 31}),
    "a file of a package": (
        {"train.py": "from parts.inner import of", "parts/inner.py": "import parts.other", "parts/other.py": "rank != 30"},
        "", {29, 30, 31},
    ),
    "files that import each other": ({"train.py": "import parts", "parts.py": "from . import train\nrank < 30"}, "", {29, 30, 31}),
    "an argument": ({"train.py": "if rank == args.saver: save()"}, "--saver 30 --lr 5e-4 --name run-40", {29, 30, 31}),
    "its default": ({"train.py": "add('--saver', default=30)\nif get_rank() == args.saver: save()"}, "", {29, 30, 31}),
    "an argument that is no rank": ({"train.py": "while step < args.steps: go()"}, "--steps=30", set()),
    "other numbers of an imported file": (
        {"train.py": "import parts", "parts.py": "len(x) == 30 or args.lora_rank > 30 or frank < 30"}, "", set(),
    ),
    "words for a rank": (
        {"train.py": "import parts", "parts.py": "get_rank() == 20 or self._rank == 30 or args.local_rank == 40 or RANK == 50"},
        "", {19, 20, 21, 29, 30, 31, 39, 40, 41, 49, 50, 51},
    ),
    "an argument beside the rank of a matrix": ({"train.py": "import parts", "parts.py": "lora_rank > alpha"}, "--layers 30", set()),
    "an argument beside a rank that is asked for": (
        {"train.py": "if 'RANK' in os.environ or args.rank is None: go()"}, "--layers 30", set(),
    ),
    "a file of another Python": ({"train.py": "import parts\nrank == 30", "parts.py": "print 1"}, "", {29, 30, 31}),
    "a file in another encoding": ({"train.py": "import parts\nrank == 30", "parts.py": "# coding: ascii\n'\xe9'"}, "", {29, 30, 31}),
    "a file that is none of Python": ({"train.py": "import parts\nrank == 30", "parts.py": "\0"}, "", {29, 30, 31}),
    "a file at the end of many": (
        {"train.py": "import part0", **{f"part{i}.py": f"import part{i + 1}" for i in range(1200)}, "part1200.py": "rank == 30"},
        "", {29, 30, 31},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_ranks_that_arguments_and_imported_files_name_are_rehearsed(name: str, tmp_path: Path) -> None:
    files, arguments, expected = NAMED[name]
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    job = ScriptRun(tmp_path / "train.py", tuple(arguments.split()), ranks=64, on_host=8)
    assert {*ranks_to_rehearse(job)[0]} - {0, 1, 7, 8, 56, 63} == expected


def test_of_many_numbers_the_first_and_those_of_ranks_are_rehearsed_and_a_note_says_so(tmp_path: Path) -> None:
    source = "one = 0\none == 3 or one == 13 or one == 23 or one == 33 or one == 43\n"
    report = rehearse(tmp_path, f"rank = 1\n{source}rank == 53 or rank == 93\n", ranks=100, on_host=10)
    always, named = {0, 1, 9, 10, 90, 99}, {52, 53, 54, 92, 93, 94, 2, 3, 4, 12, 13, 14, 22, 23, 24, 32}
    assert {*report.values()["rehearsed"]} == always | named
    assert report.values()["notes"] == {
        "the script compares more than 16 numbers that may be ranks; --all-ranks has them all": 1
    }


def test_hidden_gathers_are_told_by_their_place(tmp_path: Path) -> None:
    report = rehearse(tmp_path, f"{HEAD}{SHARD}step()\ntorch.sort(model[0].weight.data)\n", rehearsed=(0, 3))
    assert "hidden gather 1 time at train.py:23: torch.sort(model[0].weight.data)" in text_of(report), text_of(report)


@pytest.mark.parametrize("stage", ["WITH_REPLICATE", "ON_A_CLUSTER"])  # the last has all that is between
def test_no_alarm_is_raised_on_the_first_hour(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN", "run")
    report = rehearse(tmp_path, getattr(test_first_hour, stage), rehearsed=(0, 3))
    assert report.exit_code == 0 and report.values()["steps"] == 20, text_of(report)
    assert report.values()["hidden_gathers"] == {}
    assert os.listdir(tmp_path) == ["train.py"]


def test_no_alarm_is_raised_on_the_example(tmp_path: Path) -> None:
    words = (
        "--steps",
        "3",
        "--eval-every",
        "2",
        "--checkpoint-every",
        "2",
        "--sample-bytes",
        "3",
        "--out",
        str(tmp_path),
    )
    job = ScriptRun(ROOT / "examples" / "train_gpt.py", words, 4, 2, rehearsed=(0, 3))
    report = RehearsalReport(job, rehearse_script(job))
    assert report.exit_code == 0, text_of(report)
    assert os.listdir(tmp_path) == []


# -- as real ranks

PROGRAM = """import torch
import torch.distributed as dist
from torch import nn
from composable import HandleOptions, clip_grad_norm_, fully_shard, no_sync, replicate
if not dist.is_initialized():
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)], nn.Linear(32, 4))
if {replicated}:
    replicate(model, bucket_cap_mb=0.01)
else:
    fully_shard(model, policy={{nn.Linear}}, options=HandleOptions(transport="process_group"), {options})
optimizer = torch.optim.AdamW(model.parameters())
for step in range(3):
    with no_sync(model):
        model(torch.randn(4, 32)).sum().backward()
    model(torch.randn(4, 32)).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = torch.ones(3)
    dist.all_reduce(total)
    print(total.sum().item())
"""


class RealLedger(TorchDispatchMode):
    sees_hooks = True

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[LedgerLine] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        if func.namespace == "c10d":
            self.lines += [line_of(func, args, "", "", 0)]
        return func(*args, **(kwargs or {}))


def real_lines(source: str) -> list[tuple[str, str, int]]:
    ledger = RealLedger()
    # What lies in shared memory is no collective of torch.
    with ledger, mock.patch.object(SharedMemoryTransport, "fits", return_value=False):
        exec(source, {"__name__": "__main__"})
    return floats(ledger.lines)


def floats(lines: Sequence[LedgerLine]) -> list[tuple[str, str, int]]:
    """Return the collectives of values, not those of the small messages with which ranks compare notes."""
    return sorted((one.op, one.text, one.whole_bytes) for one in lines if "float" in one.text)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", ["", "reshard_after_forward=False", "reshard_after_forward=2", "replicated"])
def test_collectives_and_bytes_are_those_of_real_ranks(options: str, ranks: int, tmp_path: Path) -> None:
    replicated = options == "replicated"
    source = PROGRAM.format(replicated=replicated, options="" if replicated else options)
    report = rehearse(tmp_path, source, ranks=ranks, on_host=ranks, device="cpu")
    assert report.exit_code == 0, text_of(report)
    real = run_ranks(real_lines, ranks, source)
    assert all(floats(one.lines) == real[one.rank] for one in report.runs) and real[0]


# -- the command

COMMAND = [sys.executable, "-m", "composable", "rehearse"]


def command(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*COMMAND, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


# -- real ranks

CHOSEN = "x = torch.randn(32, 64, device=device)\nmodel(x[x[:, 0] > 0]).sum().backward()\noptimizer.step()\n"


def test_real_ranks_run_what_needs_values_and_name_a_line_that_hangs(tmp_path: Path) -> None:
    report = rehearse(tmp_path, HEAD + SHARD + CHOSEN, ranks=2, is_real=True)
    assert report.exit_code == 0, text_of(report)
    assert [one.rank for one in report.runs] == [0, 1]
    report = rehearse(
        tmp_path, f"{HEAD}{SHARD}{CHOSEN}if rank == 1:\n    model[0].weight.norm()\n{CHOSEN}", is_real=True
    )
    line = HEAD.count("\n") + SHARD.count("\n") + CHOSEN.count("\n") + 2
    assert report.exit_code == 3, text_of(report)
    assert f"at train.py:{line}: model[0].weight.norm()" in text_of(report)


def test_a_real_rank_that_raises_is_the_one_that_is_told(tmp_path: Path) -> None:
    report = rehearse(tmp_path, f"{HEAD}{SHARD}if rank == 1: raise ValueError('mine')\nstep()\n", ranks=2, is_real=True)
    assert report.exit_code == 1
    assert "FAILED        on rank 1:" in text_of(report)
    assert "ValueError: mine" in text_of(report)
    with pytest.raises(ConfigError, match="64 real ranks would share this machine"):
        rehearse(tmp_path, HEAD, ranks=64, is_real=True)


def test_fake_ranks_need_the_memory_of_real_ones(tmp_path: Path) -> None:
    source = HEAD + SHARD + "for _ in range(3): step()\n"
    peaks = [rehearse(tmp_path, source, ranks=2, is_real=is_real).runs[0].peak for is_real in (False, True)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


def test_the_command_passes_arguments_on_and_prints_json(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{HEAD}{SHARD}assert sys.argv[1:] == ['--lr', '3']\nstep()\n")
    words = ["train.py", "--ranks", "16", "--per-host", "8", "--memory", "1GiB", "--json", "--", "--lr", "3"]
    found = command(tmp_path, *words)
    assert found.returncode == 0, found.stderr
    report = json.loads(found.stdout)
    assert report["rehearsed"] == [0, 1, 2, 7, 8, 15] and report["budget"] == 2**30 and report["hang"] == ""
    assert 0 < report["bytes_per_step_to_other_hosts"] < report["sent_bytes_per_step"]


def test_the_command_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    found = command(tmp_path, "train.py", "--ranks", "2", "--device", "h1000")
    assert found.returncode == 1 and "pass one of cpu, cuda, a100-40g" in found.stderr
    assert command(tmp_path, "train.py", "--ranks", "0").returncode == 2
    assert command(tmp_path, "train.py", "--ranks", "2", "--memory", "much").returncode == 2
    missing = command(tmp_path, "no.py", "--ranks", "2")
    assert missing.returncode == 1 and "the script cannot be read" in missing.stderr


def test_the_command_says_what_other_annotations_need_beside_real_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + SHARD + "step()\n")
    found = command(tmp_path, "train.py", "--ranks", "2", "--real", "--what-if", "--timeout", "60")
    assert found.returncode == 0, found.stdout + found.stderr
    assert re.search(r"^rehearsed     all ranks, 1 step\n", found.stdout)
    assert re.search(r"^what if       .*B with reshard_after_forward=False$", found.stdout, flags=re.MULTILINE)


def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "rehearse.md").read_text()
    script, words, screen, *_ = re.findall(r"```(?:python|sh|text)\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    found = command(tmp_path, *words.split()[4:])
    assert (found.stdout, found.returncode) == (screen, 3), found.stderr


def test_the_command_of_the_readme_runs_its_first_example(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (words,) = re.findall(r"^python -m composable rehearse (.*)$", readme, flags=re.MULTILINE)
    program = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)[0].replace("range(6)", "range(1)")  # layers
    (tmp_path / "train.py").write_text(program)
    right = command(tmp_path, *words.split(), "--steps", "2")
    assert right.returncode == 0 and "2 steps" in right.stdout, right
    hangs = "    if dist.get_rank() == 0:\n        print(model[1].linear1.weight.norm())\n"
    last = "    optimizer.zero_grad()\n"
    (tmp_path / "train.py").write_text(program.replace(last, last + hangs))
    wrong = command(tmp_path, *words.split(), "--steps", "2")
    assert wrong.returncode == 3 and "weight.norm()" in wrong.stdout.partition("HANG")[2], wrong

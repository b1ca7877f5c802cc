"""What stands in for the surroundings of a rehearsed script: places and dtypes, files of other ranks, values, norms."""

import json
import os
import sqlite3
import tempfile
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from composable import plan
from composable.commands.rehearse import RehearsalReport
from composable.rehearsal import ScriptRun, rehearse_script
from composable.rehearsal.fake_files import FileChangeError
from tests.testing.test_rehearsed_script import HEAD, SHARD, rehearse, text_of

SCRIPTS = {
    "values are drawn": (
        "for each in (nn.Linear(64, 8).to(device), model, replicate(nn.Linear(64, 8).to(device))):\n"
        "    for param in each.parameters():\n        nn.init.trunc_normal_(param, std=0.02)\n"
        "        nn.init.trunc_normal_(param, std=2.0, a=-0.1, b=0.1)\n        assert not ((param < -2) | (param > 2)).any()"
    ),
    "values are compared with those of a batch": (
        "labels, found = torch.randint(8, (16,)), model(torch.randn(16, 64, device=device)).argmax(1).cpu()\n"
        "for right in (found == labels, labels == found, found >= labels, labels != found):\n"
        "    assert right.any().item() in (0, 1) and right.sum().item() in (0, 1) and isinstance(right.float().mean().item(), float)"
    ),
    "norms of batches": (
        "norm = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).to(device)\n"
        "replicate(norm)\nfor dtype in (torch.bfloat16, torch.float32):\n"
        "    with torch.autocast('cuda', dtype, enabled=dtype != torch.float32):\n"
        "        out = norm(torch.randn(4, 3, 8, 8, device=device))\n    assert out.dtype == dtype and out.shape[1] == 8\n"
        "    out.sum().backward()\nassert norm[1].weight.grad.shape == norm[1].bias.grad.shape == (8,)"
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_as_it_is(name: str, tmp_path: Path) -> None:
    report = rehearse(tmp_path, f"{HEAD}{SHARD}{SCRIPTS[name]}\n", rehearsed=(0, 3))
    assert report.exit_code == 0, text_of(report)


# -- what fails in the first step of real ranks: (source, what is said of its last line)

LOADER = "for x, y in torch.utils.data.DataLoader([(torch.randn(64), 1)] * 8, 4):\n    "
NORM = "with torch.device('meta'):\n    norm = nn.BatchNorm1d(64)\nfully_shard(norm).to_empty(device=device)\n"
RUN_NORM = "norm(torch.ones(2, 64, device=device)).sum().backward()"
REFUSED = {
    "a batch on the host": (f"{LOADER}model(x)", "[4, 64] float32 on the host, beside tensors on cuda"),
    "labels on the host": (f"{SHARD}{LOADER}nn.functional.cross_entropy(model(x), y)", "[4] int64 on the host"),
    "positions on the host": ("nn.Embedding(8, 4).to(device)(torch.arange(4))", "[4] int64 on the host"),
    "a tensor that is no buffer": ("model[0].scale = torch.ones(64)\nmodel[0].scale * model[0].weight", "[64] float32 on the host"),
    "what was taken to the host": ("one.cpu() * 2 + one", "[4] float32 on the host"),
    "NumPy of the device": ("one.numpy()", "NumPy cannot read a tensor on cuda"),
    "a number of the host over nccl": ("dist.all_reduce(torch.tensor(1.0))", "[] float32 on the host, whose group is of nccl"),
    "a list of the host over nccl": ("dist.all_gather([torch.empty(4) for _ in range(size)], one)", "group is of nccl"),
    "two dtypes": (f"model.bfloat16()\n{SHARD}model(torch.ones(2, 64))", "bfloat16 and float32 (mixed dtypes)"),
    "a buffer that nothing fills": (f"{NORM}nn.init.ones_(norm.weight), nn.init.zeros_(norm.bias)\n{RUN_NORM}", "has filled it"),
    "two dtypes in a norm": ("nn.LayerNorm(4).to(device).half()(one)", "float32 and float16 (mixed dtypes)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_fails_on_devices_fails_in_a_rehearsal(name: str, tmp_path: Path) -> None:
    source, words = REFUSED[name]
    report = rehearse(tmp_path, f"{HEAD}{source}\n", rehearsed=(0,))
    told = text_of(report)
    assert report.exit_code == 1 and words in told and source.splitlines()[-1].strip() in told, told


# Behind them, whether each rank of a host has a device of its own.
CHOICES = {
    "no choice": ("nn.Linear(4, 4).to('cuda')", False),
    "a module": ("nn.Linear(4, 4).cuda()", False),
    "a new tensor": ("torch.ones(2, device='cuda')", False),
    "a new module": ("nn.Linear(4, 4, device='cuda')", False),
    "the default": ("torch.set_default_device('cuda')\ntorch.ones(2)", False),
    "the first one": ("nn.Linear(4, 4).to('cuda:0')", False),
    "by number": ("torch.ones(2, device=local).to(0)", False),
    "set": ("torch.cuda.set_device(local)\nnn.Linear(4, 4).cuda()(torch.ones(2, 4, device='cuda'))", True),
    "set by torch.accelerator": ("torch.accelerator.set_device_index(local)\ntorch.ones(2).cuda()", True),
    "named": ("nn.Linear(4, 4).to(f'cuda:{local}')(torch.ones(2, 4).to(torch.device('cuda', local)))", True),
    "like another one": ("torch.ones(2).to(torch.ones(2, device=local)) + torch.ones(2).type_as(torch.ones(2, device=local))", True),
    "within": ("with torch.cuda.device(local):\n    torch.ones(2, device='cuda')", True),
    "by keyword": ("assert nn.Linear(4, 4).to(device=local).weight.is_cuda and nn.Linear(4, 4).to(device=f'cuda:{local}').bias.is_cuda", True),
    "a mesh of the host": ("dist.device_mesh.init_device_mesh('cpu', (dist.get_world_size(),))\nnn.Linear(4, 4).cuda()", False),
    "within, and no more": ("with suppress(KeyError), torch.cuda.device(local):\n    {}[0]\ntorch.ones(2).cuda()", False),
    "within none": ("with torch.cuda.device(None), torch.cuda.device(-1):\n    torch.ones(2, device=local)", True),
    "seen alone": ("os.environ['CUDA_VISIBLE_DEVICES'] = str(local)\nnn.Linear(4, 4).cuda()", True),
    "annotated": ("composable.fully_shard(nn.Linear(4, 4).to(local))(torch.ones(2, 4)).sum().backward()", True),
    "on a mesh": (
        "dist.device_mesh.init_device_mesh('cuda', (dist.get_world_size(),))\nnn.Linear(4, 4).cuda()", True
    ),
}  # fmt: skip
WITHOUT_CHOICE = (
    "import os\nfrom contextlib import suppress\nimport torch\nimport torch.distributed as dist\nimport composable\nfrom torch import nn\n"
    "dist.init_process_group('nccl')\nlocal = int(os.environ['LOCAL_RANK'])\n"
)


@pytest.mark.parametrize("name", CHOICES)
def test_ranks_that_share_a_device_are_told(name: str, tmp_path: Path) -> None:
    source, is_right = CHOICES[name]
    report = rehearse(tmp_path, f"{WITHOUT_CHOICE}{source}\n", rehearsed=(0, 1))
    told = text_of(report)
    assert (report.exit_code == 0) == is_right, told
    assert is_right or ("local rank 1 uses cuda:0, as local rank 0 does" in told and "torch.cuda.set_device" in told)


ALLOWED = {
    "buffers that are filled": f"{NORM}norm.reset_parameters()\n{RUN_NORM}",
    "buffers that are filled by other tensors of their memory": (
        f"{NORM}nn.init.ones_(norm.weight), nn.init.zeros_(norm.bias)\n"
        "norm.running_mean.data.fill_(0), norm.running_var.detach().view(8, 8)[:4].copy_(torch.ones(4, 8))\n"
        f"norm.num_batches_tracked = torch.tensor(0, device=device)\n{RUN_NORM}"
    ),
    "inputs of an annotated model": f"{SHARD}x = torch.randn(4, 64)\nmodel(x)\nassert (x - torch.ones(64)).numpy().shape == (4, 64)",
    "inputs of replicas": "replicate(model)\nmodel(torch.randn(4, 64)).sum().backward()",
    "buffers that the annotation moves": (
        "for each in (fully_shard(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))),):\n"
        "    for _ in range(2): each(torch.randn(4, 64)).sum().backward()"
    ),
    "numbers, indices and copies": (
        "rate = torch.tensor(0.1)\none * rate + torch.ones(4).to(one) + torch.ones(4).type_as(one)\n"
        "torch.ones(4) * rate\none[torch.tensor([1, 2])] = 0.0\ntorch.empty(4).copy_(one).numpy()"
    ),
    "tensors that torch makes by itself": (
        "nn.LSTM(64, 8).to(device)(torch.randn(2, 3, 64, device=device))[0].sum().backward()\n"
        "average = torch.optim.swa_utils.AveragedModel(model)\nfor _ in range(2): average.update_parameters(model)\n"
        "x = torch.randn(2, 3, 16, device=device)\nnn.MultiheadAttention(16, 2, add_zero_attn=True).to(device)(x, x, x)"
    ),
    "the default device": "torch.set_default_device('cuda')\nnn.Linear(4, 4)(torch.randn(2, 4)) + one",
    "groups of hosts": "dist.all_reduce(torch.ones(3), group=dist.new_group(backend='gloo'))",
    "ranks without devices": (
        "dist.destroy_process_group()\ndist.init_process_group('gloo')\nmodel = fully_shard(nn.Linear(64, 8))\n"
        "(model(torch.ones(2, 64)) * torch.ones(8)).detach().numpy()"
    ),
    "groups of hosts and devices": (
        "dist.destroy_process_group()\ndist.init_process_group('cpu:gloo,cuda:nccl')\ndist.all_reduce(torch.ones(3))"
    ),
    "full values": (
        f"{SHARD}state = composable.full_state_dict(model)\nassert all(one.numpy() is not None for one in state.values())\n"
        "for _, one in composable.iter_full_params(model, device='cpu'): one.numpy()\n"
        "for _, one in composable.iter_full_params(model): one.cpu().numpy()"
    ),
    "a file of full values": (
        f"{SHARD}from safetensors.torch import save_file\nstate = composable.full_state_dict(model)\n"
        "if rank == 0: save_file(state, 'weights.safetensors')"
    ),
    "low precision": (
        f"{SHARD}with torch.autocast('cuda', torch.bfloat16): model(torch.randn(4, 64)).sum().backward()\n"
        "fully_shard(nn.Linear(4, 4).to(device), mp_policy=composable.MixedPrecisionPolicy(torch.bfloat16))(one)"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_what_runs_on_devices_runs_in_a_rehearsal(name: str, tmp_path: Path) -> None:
    report = rehearse(tmp_path, f"{HEAD}{ALLOWED[name]}\n", rehearsed=(0,))
    assert report.exit_code == 0, text_of(report)


FILES = """
def names(): return sorted(os.listdir("cache")) if os.path.isdir("cache") else None
assert names() is None and not os.path.exists("state.txt")
dist.barrier()
if rank == 0:
    os.makedirs("cache/empty")
    for name in ("kept", "moved", "gone"):
        open(f"cache/{name}", "w").write(name)
    os.replace("cache/moved", "cache/there")
    os.remove("cache/gone")
    __import__("pathlib").Path("state.txt").write_text("0")
elif FAKE:
    assert names() is None, names()  # it may be too early
dist.barrier()
os.makedirs("cache", exist_ok=True)
assert names() == ["empty", "kept", "there"] and open("cache/there").read() == "moved", names()
assert os.path.isdir("cache/empty") and os.path.getsize("state.txt") == 1
dist.barrier()
open(f"cache/of {rank}", "w").write("mine")
if FAKE and rank:
    open("cache/kept", "a").write(str(rank))
    assert open("cache/kept").read() == f"kept{rank}"
assert open(f"cache/of {rank}").read() == "mine"
if rank == 0:
    open("cache/late", "w").write("end")
else:
    assert not FAKE or not os.path.exists("cache/late")
"""


@pytest.mark.parametrize("is_real", [False, True])
def test_ranks_see_the_files_of_the_first_once_they_have_met(is_real: bool, tmp_path: Path) -> None:
    source = FILES.replace("FAKE", str(not is_real))
    report = rehearse(tmp_path, f"{HEAD}{SHARD}{source}step()\n", is_real=is_real)
    assert report.exit_code == 0, text_of(report)
    assert os.listdir(tmp_path) == ["train.py"]


def test_a_rank_that_is_rehearsed_again_does_not_see_its_own_files(tmp_path: Path) -> None:
    # Rank 1 hears rank 2 at its second run.
    source = (
        "every = [None] * size\ndist.all_gather_object(every, rank)\nassert not os.path.exists('mine')\n"
        "open('mine', 'w').write('')\nassert len(set(every)) > 1 or rank == 0\n"
    )
    report = rehearse(tmp_path, f"{HEAD}{source}")
    assert report.exit_code == 0, text_of(report)


# Ways to change files in the folder ``at``, which has data.txt, rows.db, inner/one.txt, and link to data.txt. Behind
# each: it is "kept" from changing them without a word, or raises.
WAYS: dict[str, tuple[str, str]] = {
    "open": ("open(at + 'data.txt', 'w').write('x')\nassert open(at + 'data.txt').read() == 'x'", "kept"),
    "append": ("open(at + 'data.txt', 'a').write('x')\nassert open(at + 'data.txt').read() == 'datax'", "kept"),
    "in place": ("with open(at + 'data.txt', 'r+') as f: f.seek(1), f.write('x')\nassert open(at + 'data.txt').read() == 'dxta'", "kept"),
    "new": ("open(at + 'made', 'x')", "kept"),
    "through a link": ("open(at + 'link', 'w').write('x')\nassert open(at + 'link').read() == 'x'", "kept"),
    "absolute": ("open(os.path.abspath(at + 'data.txt'), 'wb', 0).write(b'x')", "kept"),
    "bytes": ("open(os.fsencode(at + 'data.txt'), 'wb').write(b'x')", "kept"),
    "opener": ("open(at + 'data.txt', 'w', opener=lambda path, flags: os.open(path, flags)).write('x')", "kept"),
    "io.FileIO": ("io.FileIO(at + 'data.txt', 'w')", "FileChangeError"),
    "_io.open": ("__import__('_io').open(at + 'made', 'w')", "FileChangeError"),
    "os.open": ("os.close(os.open(at + 'data.txt', os.O_WRONLY | os.O_TRUNC))\nassert os.stat(at + 'data.txt').st_size == 0", "kept"),
    "os.open to read": ("os.close(os.open(at + 'data.txt', os.O_RDONLY | os.O_TRUNC))", "kept"),
    "os.open of a new one": ("os.write(os.open(at + 'made', os.O_CREAT | os.O_EXCL | os.O_RDWR), b'x')\nassert os.path.exists(at + 'made')", "kept"),
    'os.open below': ("os.open('data.txt', os.O_WRONLY | os.O_TRUNC, dir_fd=os.open(at, os.O_RDONLY))", 'FileNotFoundError'),
    "posix.open": ("__import__('posix').open(at + 'data.txt', os.O_RDWR)", "FileChangeError"),
    'os.truncate': ("os.truncate(at + 'data.txt', 1)\nassert open(at + 'data.txt').read() == 'd'", 'FileChangeError'),
    "os.ftruncate": ("with open(at + 'data.txt', 'a') as f: os.ftruncate(f.fileno(), 1)\nassert open(at + 'data.txt').read() == 'd'", "kept"),
    "os.chmod": ("os.chmod(at + 'data.txt', 0o700)", "kept"),
    "os.chmod of no file": ("os.chmod(at + 'made', 0o700)", "FileNotFoundError"),
    "os.fchmod": ("with open(at + 'data.txt') as f: os.fchmod(f.fileno(), 0o700)", "kept"),
    "os.chown": ("os.chown(at + 'data.txt', os.getuid(), os.getgid())", "kept"),
    "os.utime": ("os.utime(at + 'data.txt', (1, 1))", "kept"),
    "posix.utime": ("__import__('posix').utime(at + 'data.txt', (1, 1))", "FileChangeError"),
    "os.setxattr": ("hasattr(os, 'setxattr') and os.setxattr(at + 'data.txt', 'user.x', b'x')", "kept"),
    "os.mkdir": ("os.mkdir(at + 'made')\nassert os.path.isdir(at + 'made')", "kept"),
    "os.mkdir of one": ("os.mkdir(at + 'inner')", "FileExistsError"),
    'os.mkfifo': ("os.mkfifo(at + 'made')", 'kept'),
    "os.mknod": ("hasattr(os, 'mknod') and os.mknod(at + 'made')", "kept"),
    'os.symlink': ("os.symlink('data.txt', at + 'made')\nassert open(at + 'made').read() == 'data'", 'FileChangeError'),
    'os.symlink, written': ("os.symlink('data.txt', at + 'made')\nopen(at + 'made', 'w')", 'FileChangeError'),
    'os.symlink of a new one': ("os.mkdir(at + 'step-1')\nos.symlink('step-1', at + 'latest')\nopen(at + 'latest/x', 'w').write('x')\nassert open(at + 'step-1/x').read() == 'x' and os.readlink(at + 'latest').endswith('step-1')", 'FileChangeError'),
    'os.link': ("os.link(at + 'data.txt', at + 'made')\nopen(at + 'made', 'a').write('x')\nassert open(at + 'made').read() == 'datax'", 'FileChangeError'),
    'os.rename': ("open(at + 'made', 'w').write('x')\nos.rename(at + 'made', at + 'new')\nassert open(at + 'new').read() == 'x'\nos.rename(at + 'data.txt', at + 'x')", 'kept'),
    "os.replace": ("open(at + 'made', 'w').write('x')\nos.replace(at + 'made', at + 'data.txt')\nassert open(at + 'data.txt').read() == 'x'", "kept"),
    "os.remove": ("os.remove(at + 'data.txt')", "kept"),
    "what a save would have written": ("torch.save({}, at + 'made')\nos.replace(at + 'made', at + 'data.txt')\nos.remove(at + 'made')", "kept"),
    "torch.save by keyword": ("torch.save({}, f=at + 'data.txt')\ntorch.save(obj={}, f=at + 'made')", "kept"),
    'os.remove below': ("os.remove('data.txt', dir_fd=os.open(at, os.O_RDONLY))", 'kept'),
    "os.rmdir": ("os.rmdir(at + 'inner')", "kept"),
    "shutil.rmtree": ("shutil.rmtree(at + 'inner')", "kept"),
    "shutil.rmtree of a new one": ("os.makedirs(at + 'a/b')\nshutil.rmtree(at + 'a')\nassert not os.path.exists(at + 'a')", "kept"),
    "shutil.copy": ("shutil.copy2(at + 'inner/one.txt', at + 'data.txt')\nassert open(at + 'data.txt').read() == 'one'", "kept"),
    "shutil.copytree": ("shutil.copytree(at + 'inner', at + 'made')\nassert os.listdir(at + 'made') == ['one.txt']", "kept"),
    'shutil.move': ("open(at + 'made', 'w').write('x')\nshutil.move(at + 'made', at + 'inner')\nassert open(at + 'inner/made').read() == 'x'", 'kept'),
    "Path.touch": ("pathlib.Path(at + 'made').touch()\npathlib.Path(at + 'data.txt').touch()\nassert os.path.isfile(at + 'made')", "kept"),
    "Path.write_text": ("pathlib.Path(at, 'data.txt').write_text('x')\nassert pathlib.Path(at, 'data.txt').read_text() == 'x'", "kept"),
    "Path.unlink": ("pathlib.Path(at, 'data.txt').unlink()\npathlib.Path(at, 'made').unlink(missing_ok=True)", "kept"),
    "NamedTemporaryFile": ("with tempfile.NamedTemporaryFile(dir=at) as f: assert os.path.exists(f.name)\nassert not os.path.exists(f.name)", "kept"),
    "NamedTemporaryFile that stays": ("f = tempfile.NamedTemporaryFile('w', dir=at, delete=False)\nf.close()\nassert os.path.exists(f.name)", "kept"),
    "TemporaryDirectory": ("with tempfile.TemporaryDirectory(dir=at) as name: open(name + '/x', 'w')\nassert not os.path.exists(name)", "kept"),
    "mkstemp": ("descriptor, name = tempfile.mkstemp(dir=at)\nos.close(descriptor)\nassert os.path.exists(name)", "kept"),
    "where temporary files are": ("with tempfile.NamedTemporaryFile(delete=False) as f: f.write(b'x')\nassert open(f.name).read() == 'x'", "kept"),
    "memory map": ("import mmap\nwith open(at + 'data.txt', 'r+b') as f, mmap.mmap(f.fileno(), 0) as m: m[0:1] = b'x'", "kept"),
    "numpy": ("numpy.memmap(at + 'data.txt', 'u1', 'r+')[0] = 1\nnumpy.arange(3).tofile(at + 'made')\nassert os.path.getsize(at + 'made') == 24", "kept"),
    'archives': ("import zipfile\nzipfile.ZipFile(at + 'a.zip', 'w').write(at + 'data.txt')", 'kept'),
    "logs": ("import logging\nlogging.getLogger('x').addHandler(logging.FileHandler(at + 'log'))\nlogging.getLogger('x').error('x')\nassert 'x' in open(at + 'log').read()", "kept"),
    "imports": ("import sys\nsys.path.insert(0, at)\nopen\nimport module_of_a_script", "kept"),
    'sqlite3': ("import sqlite3\nwith sqlite3.connect(at + 'rows.db') as c: c.execute('delete from one')", 'FileChangeError'),
    "sqlite3 in memory": ("import sqlite3\nsqlite3.connect(':memory:').execute('create table one (x)')", "kept"),
    "sqlite3 of a new file": ("import sqlite3\nsqlite3.connect(tempfile.gettempdir() + '/new.db').execute('create table one (x)')", "kept"),
    'a forked child': ("import signal\nif (child := os.fork()) == 0:\n    try: os.truncate(at + 'data.txt', 0), io.FileIO(at + 'data.txt', 'w')\n    finally: os._exit(0)\nos.waitpid(child, 0)", 'kept'),
    'a child': ("subprocess.run(['sh', '-c', 'echo x > data.txt'], cwd=at, check=True)", 'FileChangeError'),
    'a child that only sets': ("subprocess.run('chmod 700 data.txt; touch data.txt; touch -d @1 inner', cwd=at, shell=True)", 'FileChangeError'),
    'a child that removes': ("subprocess.run('rm -rf .; mv data.txt made; ln -s a made', cwd=at, shell=True)", 'FileChangeError'),
    'a child that only reads': ("assert subprocess.check_output(['cat', at + 'data.txt']) == b'data'", 'FileChangeError'),
    'os.system': ("assert os.system('echo x > ' + at + 'data.txt')", 'FileChangeError'),
    'os.posix_spawn': ("os.waitpid(os.posix_spawn('/bin/sh', ['sh', '-c', 'echo x > ' + at + 'data.txt'], {}), 0)", 'FileChangeError'),
    'os.spawn': ("assert os.spawnv(os.P_WAIT, '/bin/sh', ['sh', '-c', 'echo x > ' + at + 'data.txt'])", 'kept'),
    "multiprocessing": (
        "one = multiprocessing.get_context('fork').Process(target=posix.truncate, args=(at + 'data.txt', 0))\n"
        "one.start(), one.join()\nassert one.exitcode == 1\nmultiprocessing.Lock(), multiprocessing.Queue()", "kept"
    ),
    'a new interpreter': ("one = multiprocessing.get_context('spawn').Process(target=posix.truncate, args=(at + 'data.txt', 0))\none.start(), one.join()\nassert one.exitcode == 1", 'FileChangeError'),
}  # fmt: skip
EVERY_WAY = """
import io, json, multiprocessing, os, pathlib, posix, shutil, subprocess, tempfile
from os import truncate, replace
import numpy
import torch


def main(ways):
    torch.distributed.init_process_group("gloo")
    wrong = {}
    for number, (name, (source, end)) in enumerate(ways.items()):
        try:
            exec(source, {**globals(), "at": f"{number}/"})
            if end != "kept":
                wrong[name] = "kept"
        except Exception as error:
            if type(error).__name__ != end:
                wrong[name] = repr(error)
    assert not wrong, wrong


if __name__ == "__main__":
    main(json.load(open("ways.json")))
"""


def state_of(folder: Path) -> dict[str, object]:
    """Return all that there is to see of files."""
    found: dict[str, object] = {}
    for path in sorted([folder, *folder.rglob("*")]):
        about = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        names = os.listxattr(path) if hasattr(os, "listxattr") and not path.is_symlink() else []
        found[str(path)] = (
            about.st_mode,
            about.st_uid,
            about.st_nlink,
            about.st_mtime_ns,
            about.st_ino,
            content,
            names,
        )
    return found


def make_folders(tmp_path: Path) -> None:
    """Make a folder for each of the ways."""
    for number in range(len(WAYS)):
        (tmp_path / str(number) / "inner").mkdir(parents=True)
        for name, text in (("data.txt", "data"), ("inner/one.txt", "one"), ("module_of_a_script.py", "")):
            (tmp_path / str(number) / name).write_text(text)
        (tmp_path / str(number) / "link").symlink_to("data.txt")
        with closing(sqlite3.connect(tmp_path / str(number) / "rows.db")) as rows, rows:
            rows.execute("create table one (x)")
            rows.execute("insert into one values (1)")


@pytest.mark.parametrize("is_real", [False, True])
def test_a_rehearsal_leaves_the_folder_as_it_was(
    is_real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folders(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(EVERY_WAY)
    (tmp_path / "ways.json").write_text(json.dumps(WAYS))
    before = state_of(tmp_path)
    job = ScriptRun(tmp_path / "train.py", (), 1 if is_real else 2, timeout_s=60.0, is_real=is_real)
    report = RehearsalReport(job, rehearse_script(job))
    assert report.exit_code == 0, text_of(report)
    assert state_of(tmp_path) == before


# In a function these would leave something in the process of the tests.
OF_SCRIPTS = {"a forked child", "a new interpreter", "imports", "multiprocessing", "where temporary files are"}


def test_a_function_that_is_rehearsed_leaves_the_folder_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folders(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path.parent / "temporary"))
    os.makedirs(tempfile.gettempdir(), exist_ok=True)
    names: dict[str, Any] = {}
    exec(EVERY_WAY.partition("def main")[0], names)

    def train(model: nn.Module) -> None:
        for number, (name, (source, _)) in enumerate(WAYS.items()):
            if name not in OF_SCRIPTS:
                with suppress(FileChangeError, AssertionError):  # The first line of some is left out by another one.
                    exec(source, {**names, "at": f"{number}/"})
        with pytest.raises(FileChangeError, match=r"open of 'made' may change files\n.*open\(\"made\""):
            open("made", "w")  # noqa: SIM115
        elsewhere = threading.Thread(target=lambda: Path(tempfile.gettempdir(), "../mine").write_text("x"))
        elsewhere.start()
        elsewhere.join()
        model(torch.ones(2, 4)).sum().backward()

    before = state_of(tmp_path)
    plan(nn.Linear(4, 4), world_size=2, step=train)
    assert state_of(tmp_path) == before
    assert (tmp_path.parent / "mine").read_text() == "x"  # another thread goes on
    (tmp_path / "made").write_text("x")

"""What stands in for the surroundings of a rehearsed script: places and dtypes, files of other ranks, values, norms."""

import os
from pathlib import Path

import pytest

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
    "two dtypes in a norm": ("nn.LayerNorm(4).to(device).half()(one)", "float32 and float16 (mixed dtypes)"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_fails_on_devices_fails_in_a_rehearsal(name: str, tmp_path: Path) -> None:
    source, words = REFUSED[name]
    report = rehearse(tmp_path, f"{HEAD}{source}\n", rehearsed=(0,))
    told = text_of(report)
    assert report.exit_code == 1 and words in told and source.splitlines()[-1].strip() in told, told


ALLOWED = {
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

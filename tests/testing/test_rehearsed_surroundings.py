"""What stands in for the surroundings of a rehearsed script: files of other ranks, values that are drawn, norms of batches."""

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

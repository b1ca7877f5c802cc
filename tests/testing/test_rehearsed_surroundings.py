"""What stands in for the surroundings of a rehearsed script: values that are drawn, norms of batches."""

from pathlib import Path

import pytest

from tests.testing.test_rehearsed_script import HEAD, SHARD, rehearse, text_of

SCRIPTS = {
    "values are drawn": (
        "for each in (nn.Linear(64, 8).to(device), model, replicate(nn.Linear(64, 8).to(device))):\n"
        "    for param in each.parameters():\n        nn.init.trunc_normal_(param, std=0.02)\n"
        "        nn.init.trunc_normal_(param, std=2.0, a=-0.1, b=0.1)\n        assert not ((param < -2) | (param > 2)).any()"
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

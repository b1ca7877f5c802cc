"""Scripts as users of other libraries write them: rehearsed unchanged on 64 ranks, and held against ranks that are real.

The scripts are those of ``clients``; the table of clients/README.md says what each of them uses.
"""

import importlib
import importlib.util
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

from composable.commands.rehearse import RehearsalReport
from composable.rehearsal import ScriptRun, rehearse_script
from composable.rehearsal.surroundings import use_collectives_only
from tests.forks import on_forks
from tools.fuzz.rehearsed import RealRank, by_group

ROOT = Path(__file__).parent.parent.parent
CLIENTS = Path(__file__).parent / "clients"
# What each imports; forks of a process that has it need not.
LIBRARIES = {
    "accelerated": ("accelerate",),
    "bert": ("transformers", "transformers.models.bert.modeling_bert"),
    "cnn_ddp": (),
    "contrastive": (),
    "decoder": (),
    "experts": (),
    "gan": (),
    "gpt2": ("transformers", "transformers.models.gpt2.modeling_gpt2"),
    "lightning_fit": ("lightning", "lightning.pytorch"),
    "lora": ("transformers", "transformers.models.llama.modeling_llama"),
    "swa_resume": (),
    "vit": ("timm", "timm.data"),
}
EXACT = 0.01
# With values transformers sees that no token is masked, and makes no mask.
LESS_EXACT = {"lora": 0.02}


def import_what_it_needs(name: str) -> None:
    """Import the libraries of a script, or skip the test."""
    sys.path.append(str(ROOT / "examples" / "clients"))
    for library in LIBRARIES[name]:
        if importlib.util.find_spec(library.partition(".")[0]) is None:
            pytest.skip(f"{library} is not installed")
        try:
            # Also where torchvision, which timm imports, was built for another torch.
            importlib.import_module("model_sweep").import_library(library)
        except (ImportError, OSError, RuntimeError) as error:
            pytest.skip(f"{library} cannot be imported: {error}")


def report_of(name: str, ranks: int, device: str, rehearsed: tuple[int, ...] = ()) -> RehearsalReport:
    job = ScriptRun(CLIENTS / f"{name}.py", (), ranks, min(8, ranks), device, timeout_s=300.0, rehearsed=rehearsed)
    return RehearsalReport(job, rehearse_script(job))


def run_client(name: str) -> Any:
    """Run the script, and return its collectives by group, and its peak.

    Compilation and DCP's saves are left out, as in rehearsals: what a save writes are storages that share memory.
    """
    torch.compile = lambda model=None, **_: (lambda one: one) if model is None else model  # type: ignore[assignment]
    nn.Module.compile = lambda *_, **__: None  # type: ignore[method-assign]
    torch.distributed.checkpoint.save = lambda *_, **__: None
    use_collectives_only()
    sys.argv = [f"{name}.py"]
    with RealRank(waits=True) as real:
        runpy.run_path(str(CLIENTS / f"{name}.py"), run_name="__main__")
    return by_group(real.lines), real.peak


def compare_with_real_ranks(name: str, ranks: int, folder: Path) -> None:
    report = report_of(name, ranks, "cpu", tuple(range(ranks)))
    assert report.exit_code == 0, "\n".join(report.lines())
    peaks = [sys.maxsize] * ranks
    while True:
        real, before = on_forks(lambda: run_client(name), ranks, folder), list(peaks)
        for one, (lines, peak) in zip(report.runs, real, strict=True):
            assert by_group(one.lines) == lines and lines, f"rank {one.rank}"
            peaks[one.rank] = min(peaks[one.rank], peak)
        if [one.peak for one in report.runs] == pytest.approx(peaks, rel=LESS_EXACT.get(name, EXACT)):
            return
        # A thread of gloo may hold what has arrived for longer; that adds to a peak.
        assert peaks < before, [f"rank {one.rank}: {one.parts} in {one.peak_at}" for one in report.runs]


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_client_is_rehearsed_as_it_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_what_it_needs(name)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    report = report_of(name, 64, "cuda", (0, 63))
    assert report.exit_code == 0, "\n".join(report.lines())
    assert os.listdir() == []
    compare_with_real_ranks(name, 2, tmp_path)


def test_the_page_names_the_clients() -> None:
    page = (CLIENTS / "README.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)\.py` \|", page, flags=re.MULTILINE)) == sorted(LIBRARIES)
    assert sorted(LIBRARIES) == sorted(one.stem for one in CLIENTS.glob("[a-z]*.py"))

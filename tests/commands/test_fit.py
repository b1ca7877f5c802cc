"""``fit`` rehearses other annotations of a script: lines that it prints do, written by hand, what it says."""

import ast
import functools
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from composable.commands.fit import _with_values
from composable.commands.rehearse import RehearsalReport
from composable.ground.names import bytes_text
from composable.rehearsal import RankOutcome, ScriptRun, rehearse_script
from composable.rehearsal.candidates import Candidate, annotations_of
from composable.rehearsal.frontier import Frontier, Tried, find_frontier
from tests.forked import Forked, run_module

ROOT = Path(__file__).parent.parent.parent
HEAD = """\
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from composable import checkpoint, fully_shard, replicate

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
batch = int(sys.argv[2]) if len(sys.argv) > 2 else 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def build():
    return nn.Sequential(nn.Linear(32, 64), *(Block() for _ in range(2)), nn.Linear(64, 8)).cuda()


model = build()
"""
TAIL = """
optimizer = torch.optim.AdamW(model.parameters())
for step in range(2):
    model(torch.randn(batch, 32, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
EACH = "for block in model[1:3]:\n    fully_shard(block)\nfully_shard(model)"
# A script's annotations, what changes, and a part of what is to be written.
CHANGES: dict[str, tuple[str, Candidate, str]] = {
    "when they are freed": (
        "fully_shard(model, policy={Block}, strategy='FULL_SHARD')", Candidate(frees=False), "{Block}, reshard_after_forward=False)"
    ),
    "secondary shards": ("fully_shard(model, policy={Block})", Candidate(frees=2), "reshard_after_forward=2)"),
    "copies": ("fully_shard(model, policy={Block})", Candidate(frees="HYBRID_SHARD"), "strategy='HYBRID_SHARD')"),
    "checkpoints": (
        "fully_shard(model, policy={Block})", Candidate(every=2), "checkpoint([one for one in model.modules() if isinstance(one, Block)][::2])"
    ),
    "another policy": (
        "fully_shard(\n    model,\n    reshard_after_forward=True,\n)", Candidate("Block", every=1), "(model, reshard_after_forward=True, policy={Block})"
    ),
    "no policy": ("fully_shard(model, policy={Block})", Candidate("", False), "fully_shard(model, reshard_after_forward=False)"),
    "one by one": (EACH, Candidate(frees=False, every=1), "fully_shard(block, reshard_after_forward=False)"),
    "one by one, and none": (EACH, Candidate("", every=2), "fully_shard(model)"),
    "own checkpoints": (
        "checkpoint([*model[1:3]])\nfully_shard(model, policy={Block})", Candidate(every=2), "[::2])"
    ),
    "no checkpoints": ("for block in model[1:3]:\n    block = checkpoint(block)\nfully_shard(model)", Candidate(every=0), "block = block"),
    "whole copies": (
        "replicate(model, bucket_cap_mb=1)", Candidate("Block", "HYBRID_SHARD"), "fully_shard(model, strategy='HYBRID_SHARD', policy={Block})"
    ),
    "made in the call": ("model = fully_shard(build(), policy={Block})", Candidate(every=1), "model.modules()"),
    "options in a dict": (
        "options = {'policy': {Block}, 'strategy': 'FULL_SHARD'}\nfully_shard(module=model, **options)", Candidate(frees=False), "**{**options, "
    ),
    "a name of their own": ("import composable as c\nkinds = {Block}\ndel Block\nc.fully_shard(model, policy=kinds)", Candidate(every=1), "get_submodule('1')"),
}  # fmt: skip


def outcome_of(script: Path, source: str, **options: Any) -> RankOutcome:
    script.write_text(source)
    (found,) = rehearse_script(ScriptRun(script, ranks=4, on_host=2, timeout_s=120.0, rehearsed=(0,), **options))
    assert found.end == "ended", found.said
    return found


def written_by_hand(source: str, write: dict[str, list[str]]) -> str:
    lines = source.splitlines()
    statements = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.stmt)]
    for place, texts in sorted(write.items(), key=lambda one: -int(one[0].split(":")[1])):
        begin = int(place.removeprefix("train.py:"))
        end = next(one.end_lineno for one in statements if one.lineno == begin)
        indent = " " * (len(lines[begin - 1]) - len(lines[begin - 1].lstrip()))
        lines[begin - 1 : end] = [indent + text for text in texts or ["pass"]]
    return "\n".join(lines)


@pytest.mark.parametrize("name", CHANGES)
def test_lines_written_by_hand_need_what_was_said(name: str, tmp_path: Path) -> None:
    annotations, candidate, part = CHANGES[name]
    source = f"{HEAD}{annotations}{TAIL}"
    written = outcome_of(tmp_path / "train.py", source, around=functools.partial(annotations_of, Candidate()))
    changed = outcome_of(
        tmp_path / "train.py", source, around=functools.partial(annotations_of, candidate, written.found)
    )
    write = changed.found["write"]
    assert part in "\n".join(text for texts in write.values() for text in texts), write
    by_hand = outcome_of(tmp_path / "train.py", written_by_hand(source, write))
    job = ScriptRun(tmp_path, ranks=4, on_host=2)
    assert (by_hand.peak, by_hand.peak_at, by_hand.parts) == (changed.peak, changed.peak_at, changed.parts)
    assert by_hand.sent_bytes(job) == changed.sent_bytes(job) and by_hand.work == changed.work
    as_written = outcome_of(tmp_path / "train.py", source)
    assert (as_written.peak, as_written.lines) == (written.peak, written.lines)
    assert (by_hand.peak, by_hand.sent_bytes(job), by_hand.work) != (
        written.peak,
        written.sent_bytes(job),
        written.work,
    )


def command(folder: Path, source: str, *words: str) -> "subprocess.CompletedProcess[str]":
    (folder / "train.py").write_text(source)
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    done = Forked(run_module("composable"), "fit", "train.py", *words, cwd=folder, **pipes)
    said = done.communicate(timeout=600)
    return subprocess.CompletedProcess(done.args, done.returncode, *said)


def test_the_command_tries_all_and_shows_what_fits_at_least_costs(tmp_path: Path) -> None:
    source = f"{HEAD}checkpoint([*model[1:3]])\nfully_shard(model, policy={{Block}}){TAIL}"
    done = command(
        tmp_path, source, "--ranks", "2", "--memory", "1GiB", "--limit", "300", "--json", "--", "--batch", "64"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    best = [one for one in found["tried"] if one["is_best"]]
    # No block runs twice where memory is no matter, and what stays is not gathered again.
    as_written = next(one for one in found["tried"] if one["text"].startswith("as written"))
    assert found["tried"][0] == best[0] and best[0]["again"] == 0 < as_written["again"]
    assert best[0]["candidate"]["frees"] is False
    assert best[0]["candidate"]["words"] == ["--batch", "64"] and os.listdir(tmp_path) == ["train.py"]
    assert [*found["left_out"]] == ["combinations"], found["left_out"]


def test_the_command_says_what_it_left_out_and_that_nothing_fits(tmp_path: Path) -> None:
    source = f"{HEAD}for one in [*model[1:3], model]:\n    fully_shard(one){TAIL}"
    done = command(tmp_path, source, "--ranks", "2", "--memory", "100kB", "--limit", "0s", "--vary", "--batch 8,16")
    assert done.returncode == 4, done.stderr
    first, _, row, *left_out = done.stdout.splitlines()
    assert first.startswith("tried         1, of which 0 fit into 97.7 KiB") and "as written --batch 8" in row
    assert left_out == [
        "left out      policies and checkpoints of Sequential: its line annotates other modules too",
        "left out      5 others, such as as written --batch 16: not tried in 0 s",
    ]


PARSED = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--lr", type=float, required=True)
batch = parser.parse_args().batch_size
"""


def test_the_command_varies_an_argument_that_the_script_parses(tmp_path: Path) -> None:
    source = HEAD.replace("batch = int(sys.argv[2]) if len(sys.argv) > 2 else 64", PARSED).replace(
        "range(2)", "range(1)"
    )
    words = ["--ranks", "2", "--json", "--limit", "200s", "--vary", "--batch-size 4096,8192", "--", "--batch-size=4"]
    done = command(tmp_path, f"{source}fully_shard(model){TAIL}", *words, "--lr", "3")
    assert done.returncode == 0, done.stderr
    tried = json.loads(done.stdout)["tried"]
    peaks = {tuple(one["candidate"]["words"]): one["peak"] for one in tried if one["text"].startswith("as written")}
    small, large = (peaks[f"--batch-size={size}", "--lr", "3"] for size in (4096, 8192))
    assert large / small == pytest.approx(2, rel=0.1)
    # Of each batch what is best.
    assert {one["candidate"]["words"][0] for one in tried if one["is_best"]} == {
        "--batch-size=4096",
        "--batch-size=8192",
    }


def test_the_page_shows_what_the_command_prints(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "rehearse.md").read_text()
    script, *_, words, screen = re.findall(r"```(?:python|sh|text)\n(.*?)```", page, flags=re.DOTALL)
    done = command(tmp_path, script, *words.split()[5:], "--limit", "500")
    assert (done.stdout, done.returncode) == (screen, 0), done.stderr


def test_a_script_that_fails_or_annotates_nothing_is_told(tmp_path: Path) -> None:
    done = command(tmp_path, f"{HEAD}raise KeyError('mine')", "--ranks", "2")
    assert done.returncode == 1 and "KeyError: 'mine'" in done.stderr and done.stdout == ""
    done = command(tmp_path, f"{HEAD}{TAIL}", "--ranks", "2")
    assert done.returncode == 1 and "the script annotates nothing; fix: call fully_shard" in done.stderr
    for words in (["--limit", "soon"], ["--vary", "8,16"], ["--vary", "--batch"]):
        assert command(tmp_path, HEAD, "--ranks", "2", *words).returncode == 2


def test_values_take_the_place_of_those_that_the_script_has() -> None:
    words = ("--lr", "1", "--batch=8", "--batch-size", "9")
    assert _with_values(words, (("--batch", "16"),)) == ("--lr", "1", "--batch=16", "--batch-size", "9")
    assert _with_values(words, (("--batch-size", "3"), ("--lr", "2"))) == (
        "--lr",
        "2",
        "--batch=8",
        "--batch-size",
        "3",
    )
    assert _with_values((), (("--depth", "2"),)) == ("--depth", "2")


def test_the_frontier_is_what_fits_by_costs_or_the_least_memory() -> None:
    def tried(frees: bool | None, every: int | None, *figures: int) -> Tried:
        return Tried(Candidate(frees=frees, every=every), *figures, False, {})  # type: ignore[arg-type]

    rows = [tried(None, None, 100, 50, 0, 0), tried(False, None, 110, 30, 0, 0), tried(True, None, 100, 50, 0, 0)]
    rows += [tried(None, 1, 40, 50, 0, 1), tried(False, 1, 50, 30, 0, 1)]
    found = Frontier(rows)
    assert found.best(0) == found.best(200) == [rows[1], rows[0], rows[4], rows[3]]
    assert found.best(105) == [rows[0], rows[4], rows[3]] and found.best(45) == [rows[3]]
    assert found.best(10) == [rows[3], rows[4], rows[0]]
    # Steps on other batches are not compared: each has its own, and those of which one fits come first.
    found.tried += [Tried(Candidate(words=("-b", "2")), 60, 100, 0, 0.0, False, {})]
    assert found.best(45) == [rows[3], found.tried[-1]] and found.best(200)[-1] is found.tried[-1]
    found.tried.pop()
    assert found.has_worse_part(Candidate(frees=True, every=1)) and not found.has_worse_part(
        Candidate(frees=False, every=1)
    )


def test_a_rehearsal_says_what_other_annotations_need(tmp_path: Path) -> None:
    source = f"{HEAD}fully_shard(model, policy={{Block}}, strategy='FULL_SHARD'){TAIL}"
    job = ScriptRun(tmp_path / "train.py", ranks=2, on_host=2, budget=2**20)
    job.script.write_text(source)
    tried = find_frontier(job, [()], 300.0, lambda _: None, most_changes=1).tried
    assert [str(one.candidate) for one in tried] == [
        "as written", "checkpoint of all blocks", "checkpoint of every second block", "reshard_after_forward=True",
        "reshard_after_forward=False", "one handle",
    ]  # fmt: skip
    report = RehearsalReport(job, rehearse_script(job))
    report.others = tried[1:]
    assert report.exit_code == 4
    shown = [line for line in report.lines() if line.startswith("what if ")]
    assert len(shown) == 5 and shown[0].endswith(f"{bytes_text(tried[1].peak)} with checkpoint of all blocks")
    assert report.values()["what_if"]["one handle"] == tried[-1].peak

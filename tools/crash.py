"""Kills a training run again and again, and checks that nothing is lost.

    python -m tools.crash --runs 20

Each run of ``examples/train_gpt.py`` starts at some number of ranks; a random rank gets SIGKILL at a
random moment, often inside a save; the run is resumed at another number of ranks, perhaps to be
killed again, until it is done. After every kill the newest whole checkpoint from before it (or a
newer one) must load, the resumed run must start from the newest one, and in the end the loss curve
must be that of a run that nothing interrupted. Everything random comes from ``--seed``.

Ranks are plain processes with the environment that torchrun gives them. When one dies the others
get some time to end on their own account, and are then killed, as torchrun does.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist

from composable.runs.run import find_damage, find_folder, read_manifest
from composable.runs.storage import on_disk

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
MODEL = "--layers 2 --width 16 --heads 2 --context 16 --batch 6 --warmup 4 --lr 0.01 --eval-every 1000".split()
TOLERANCE = 1e-5
# How long the others may take to notice that a rank has died, and a run to end.
NOTICE_S = 60.0
RUN_S = 1000.0


@dataclass(frozen=True)
class Kill:
    """One kill, and what was found after it."""

    ranks: int
    rank: int
    is_inside_save: bool
    step: int
    checkpoint_before: int
    checkpoint_after: int
    survivors_s: float


@dataclass(frozen=True)
class CrashRun:
    """One run, from its start to its end."""

    seed: int
    is_asynchronous: bool
    kills: tuple[Kill, ...]
    last_ranks: int
    difference: float


class Job:
    """The ranks of one training process group."""

    def __init__(self, arguments: Sequence[str], ranks: int, output: Path) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: list[BaseProcess] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.tensor", "torch.testing", "pytest"])
        for rank in range(ranks):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
                # The store is the launcher's, so it outlives every rank.
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "OMP_NUM_THREADS": "1",
            }
            if sys.platform == "linux":
                environment["GLOO_SOCKET_IFNAME"] = "lo"
            process = context.Process(target=_train, args=(list(arguments), environment, output), daemon=True)
            process.start()
            self.processes.append(process)

    def is_running(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def signal(self, rank: int, number: int) -> None:
        process = self.processes[rank]
        if process.pid is not None and process.is_alive():
            os.kill(process.pid, number)

    def signal_all(self, number: int) -> None:
        for rank in range(len(self.processes)):
            self.signal(rank, number)

    def wait(self, seconds: float) -> bool:
        """Return whether every rank has ended."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return not any(process.is_alive() for process in self.processes)

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def unbroken_curve(folder: Path, text: Path, *, steps: int) -> dict[int, float]:
    """Return the losses of one process that nothing interrupts, and that saves nothing."""
    run, output = folder / "unbroken", folder / "output"
    job = Job([*_settings(run, text, steps), "--parallel", "none", "--checkpoint-every", "0"], 1, output)
    try:
        assert job.wait(RUN_S) and job.processes[0].exitcode == 0, output.read_text()
    finally:
        job.stop()
    return _curve(run)


def crash_run(
    seed: int, folder: Path, text: Path, expected: dict[int, float], *, every: int, most_kills: int
) -> CrashRun:
    """Train with kills, at most ``most_kills``, until the run is done, and assert that nothing was lost."""
    draw = random.Random(seed)
    run, output, steps = folder / "run", folder / "output", max(expected)
    settings = [*_settings(run, text, steps), "--checkpoint-every", str(every), "--keep", "2"]
    is_asynchronous = draw.random() < 0.5
    if is_asynchronous:
        settings.append("--async-checkpoints")
    ranks = draw.choice([1, 2, 3])
    kills: list[Kill] = []
    while True:
        newest = _newest(run)
        if not newest and run.exists():
            shutil.rmtree(run)  # killed before its first checkpoint: there is nothing to resume
        job = Job([*settings, *(["--resume"] if newest else [])], ranks, output)
        try:
            kill = _kill(job, run, draw, steps) if len(kills) < most_kills else None
            if kill is None:
                assert job.wait(RUN_S), "the run does not end"
        finally:
            job.stop()
        said = output.read_text()
        output.unlink()
        if newest:
            # A kill right before its last name is given leaves it under the one before.
            assert f"resumed from {run}/" in said and f"{newest:06d}" in said and f" after step {newest}" in said, said
        if kill is None:
            assert all(process.exitcode == 0 for process in job.processes), said
            break
        assert kill.checkpoint_after >= kill.checkpoint_before, kill
        kills.append(kill)
        ranks = draw.choice([count for count in (1, 2, 3) if count != ranks])
    found = _curve(run)
    assert list(found) == list(range(1, steps + 1)), list(found)
    difference = max(abs(found[step] - loss) / loss for step, loss in expected.items())
    assert difference < TOLERANCE, difference
    return CrashRun(seed, is_asynchronous, tuple(kills), ranks, difference)


def _settings(run: Path, text: Path, steps: int) -> list[str]:
    return [*MODEL, "--steps", str(steps), "--text", str(text), "--sample-bytes", "0", "--out", str(run)]


def _kill(job: Job, run: Path, draw: random.Random, steps: int) -> Kill | None:
    """Kill a rank at a moment that ``draw`` chooses; ``None`` if the run was over before that."""
    done, rank = _last_step(run), draw.randrange(len(job.processes))
    is_inside_save, delay_s = draw.random() < 0.5, draw.random() * 0.05
    at_step = draw.randint(done + 1, max(done + 1, (done + steps) // 2))
    deadline = time.monotonic() + RUN_S
    while job.is_running() and time.monotonic() < deadline:
        if _last_step(run) >= at_step and (not is_inside_save or _partial(run)):
            if not is_inside_save:
                time.sleep(delay_s)
            # Stopped, they cannot finish while we look.
            job.signal_all(signal.SIGSTOP)
            if not is_inside_save or _partial(run):
                break
            job.signal_all(signal.SIGCONT)
        time.sleep(0.001)
    before, is_inside_save = _newest(run), _partial(run)
    job.signal(rank, signal.SIGKILL)
    job.signal_all(signal.SIGCONT)
    killed = time.monotonic()
    job.wait(NOTICE_S)
    survivors_s = time.monotonic() - killed
    job.stop()
    if all(process.exitcode == 0 for process in job.processes):
        return None
    return Kill(len(job.processes), rank, is_inside_save, _last_step(run), before, _newest(run), survivors_s)


def _partial(run: Path) -> bool:
    return any(run.glob(".partial-*"))


def _newest(run: Path) -> int:
    """Return the step of the checkpoint that a resumed run starts from, after reading all of it; 0: none."""
    if not run.is_dir() or not list(run.glob("step-*")):
        return 0
    folder = find_folder(on_disk(run))
    manifest = read_manifest(folder)
    assert find_damage(folder, manifest.files) == []
    return manifest.step


def _last_step(run: Path) -> int:
    return max(_curve(run), default=0)


def _curve(run: Path) -> dict[int, float]:
    path = run / "metrics.jsonl"
    if not path.is_file():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert len({line["step"] for line in lines}) == len(lines), "a step has two lines"
    return {line["step"]: line["loss"] for line in lines}


def _train(arguments: list[str], environment: dict[str, str], output: Path) -> None:
    """What a rank executes."""
    os.environ.update(environment)
    with output.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path.insert(0, str(EXAMPLES))
    import train_gpt

    train_gpt.main(arguments)
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=2, help="most kills in a run (default: 2)")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--every", type=int, default=3, help="steps between checkpoints (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    args = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text.py"
        text.write_bytes((ROOT / "tests" / "models.py").read_bytes())
        expected = unbroken_curve(Path(folder), text, steps=args.steps)
        for seed in range(args.seed, args.seed + args.runs):
            place = Path(folder) / str(seed)
            place.mkdir()
            runs.append(crash_run(seed, place, text, expected, every=args.every, most_kills=args.kills))
            print(runs[-1], flush=True)
    kills = [kill for run in runs for kill in run.kills]
    inside = sum(kill.is_inside_save for kill in kills)
    print(f"{len(kills)} kills, {inside} inside a save; no checkpoint lost")
    print(f"slowest survivor: {max(kill.survivors_s for kill in kills):.1f} s")


if __name__ == "__main__":
    main()

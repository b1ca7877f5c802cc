"""Trains replica groups under torchft, kills one of them again and again, and compares with one process.

    python -m tools.torchft_kills --annotation fully_shard --ranks 2 --seconds 300 --every 15 --transport pg

Needs ``torchft`` (0.2), and no other machine: the lighthouse runs here. Every rank writes a line for each step that
its group has committed. The one process trains on the batches of the groups that took part in each of these steps.
It prints the seconds from a kill to the next step of the group that is left, and to the next step of both groups.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable import FSDPModule, ReplicateOptions, fully_shard, replicate

DIM, BATCH, LR = 16, 8, 0.01
GROUPS = ("a", "b")
# How long a busy machine may take to start processes.
LIMIT_S = 180.0
TIMEOUT = timedelta(seconds=10)


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.Tanh(), nn.Linear(4 * DIM, DIM), nn.LayerNorm(DIM))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def batch_of(step: int, group: str, rank: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * step + 10 * rank + GROUPS.index(group))
    return torch.randn(BATCH, DIM, generator=made)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.roll(1, 1)).square().mean()


# A rank of a replica group


def annotate(model: nn.Module, annotation: str, manager: Any) -> Any:
    if annotation == "fully_shard":
        fully_shard(model, policy={nn.Linear})
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(lambda shard: manager.allreduce(shard).wait())
        return model

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        # The hook replaces the average over the ranks of this group, too.
        buffer = bucket.buffer()
        dist.all_reduce(buffer)
        manager.allreduce(buffer.div_(dist.get_world_size())).wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(buffer)
        return done

    replicated: Any = replicate(model, bucket_cap_mb=2e-3, options=ReplicateOptions(fixed_buckets=True))
    replicated.register_comm_hook(None, hook)
    return replicated


def transport_of(name: str, process_group: Any) -> Any:
    """Return the way in which a group that comes back gets the state; ``None``: torchft's default, pickles by HTTP."""
    from torch.distributed._serialization import _streaming_load
    from torchft.checkpointing import HTTPTransport
    from torchft.checkpointing.pg_transport import PGTransport

    class DataTransport(HTTPTransport[Any]):
        @classmethod
        def _load_from_address(cls, address: str, timeout: timedelta) -> object:
            with urllib.request.urlopen(address, timeout=timeout.total_seconds()) as stream:
                return _streaming_load(stream, weights_only=True)

    if name == "pg":
        return PGTransport(process_group, TIMEOUT, torch.device("cpu"))
    return DataTransport(TIMEOUT, num_chunks=0) if name == "data" else None


def train(annotation: str, group: str, folder: Path, transport: str) -> None:
    from torchft import Manager, ProcessGroupGloo

    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def state_dict() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    process_group = ProcessGroupGloo(timeout=timedelta(seconds=5))
    manager = Manager(
        pg=process_group,
        checkpoint_transport=transport_of(transport, process_group),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        use_async_quorum=False,
        init_sync=False,
        timeout=TIMEOUT,
        replica_id=f"{group}_",
        store_addr=os.environ["MASTER_ADDR"],
        store_port=int(os.environ["MASTER_PORT"]),
        rank=rank,
        world_size=dist.get_world_size(),
    )
    model = annotate(make_net(), annotation, manager)
    optimizer = make_optimizer(model)
    stop = folder / "stop"
    with (folder / f"{group}{rank}.jsonl").open("a") as log:
        while not (stop.exists() and manager.current_step() >= int(stop.read_text())):
            manager.start_quorum()
            step = manager.current_step()  # after it was healed
            loss = loss_of(model, batch_of(step, group, rank))
            loss.backward()
            groups = manager.num_participants()
            if manager.should_commit():
                optimizer.step()
                line = {"step": step, "groups": groups, "loss": loss.item(), "at": time.time()}
                log.write(json.dumps(line) + "\n")
                log.flush()
            optimizer.zero_grad()
    manager.shutdown(wait=False)
    os._exit(0)  # The other group may have gone, and nothing is left to say.


# The driver


class Group:
    """The processes of one replica group."""

    def __init__(self, name: str, ranks: int, options: dict[str, str], folder: Path, lighthouse: str) -> None:
        self.name, self.ranks = name, ranks
        self._folder = folder
        self._command = [sys.executable, "-m", "tools.torchft_kills", "--group", name, "--folder", str(folder)]
        self._command += [f"--{option}={value}" for option, value in options.items()]
        self._environment = {**os.environ, "TORCHFT_LIGHTHOUSE": lighthouse, "MASTER_ADDR": "localhost"}
        self.start()

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        shared = {**self._environment, "WORLD_SIZE": str(self.ranks), "MASTER_PORT": str(port)}
        self.processes = []
        for rank in range(self.ranks):
            with (self._folder / f"{self.name}{rank}.err").open("a") as errors:
                self.processes.append(
                    subprocess.Popen(self._command, env={**shared, "RANK": str(rank)}, stderr=errors, stdout=errors)
                )

    def kill(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        self.wait()

    def wait(self, timeout: float | None = None) -> list[int]:
        return [process.wait(timeout) for process in self.processes]


def steps_of(folder: Path, group: str, rank: int) -> list[dict[str, Any]]:
    path = folder / f"{group}{rank}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def compare(folder: Path, ranks: int) -> tuple[int, float]:
    """Return how many steps were committed, and the largest difference of a loss from that of the one process."""
    logs = {(group, rank): {} for group in GROUPS for rank in range(ranks)}  # type: ignore[var-annotated]
    for (group, rank), lines in logs.items():
        lines.update({line["step"]: line for line in steps_of(folder, group, rank)})
    model = make_net()
    optimizer = make_optimizer(model)
    last = max(step for lines in logs.values() for step in lines)
    largest = 0.0
    for step in range(last + 1):
        present = [group for group in GROUPS if any(step in logs[group, rank] for rank in range(ranks))]
        count = max(lines[step]["groups"] for lines in logs.values() if step in lines)
        # A group may have been killed between its share of the sum and its line.
        members = GROUPS if count == len(GROUPS) else present
        if len(members) != count:
            raise AssertionError(f"step {step}: {count} groups took part, lines are of {present}")
        for group in members:
            for rank in range(ranks):
                loss = loss_of(model, batch_of(step, group, rank))
                (loss / len(members) / ranks).backward()
                told = logs[group, rank].get(step)
                largest = max(largest, 0.0 if told is None else abs(loss.item() - told["loss"]))
        optimizer.step()
        optimizer.zero_grad()
    return last + 1, largest


def wait_for_step(folder: Path, ranks: int, after: float, groups: int, limit_s: float) -> float:
    """Return the seconds from ``after`` to the first step that was committed later, by so many groups."""
    while time.time() < after + limit_s:
        times = [
            line["at"] for group in GROUPS for line in steps_of(folder, group, 0)[-50:] if line["groups"] == groups
        ]
        late = [at for at in times if at > after]
        if late:
            return min(late) - after
        time.sleep(0.05)
    raise TimeoutError(f"no step of {groups} groups within {limit_s} s; see {folder}/*.err")


def drive(annotation: str, ranks: int, seconds: float, every: float, transport: str = "http") -> dict[str, Any]:
    """Run two replica groups for ``seconds``, with a kill ``every`` so many; return what was seen."""
    from torchft.coordination import LighthouseServer

    folder = Path(tempfile.mkdtemp(prefix="torchft-kills-"))
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000)
    options = {"annotation": annotation, "transport": transport}
    groups = [Group(name, ranks, options, folder, lighthouse.address()) for name in GROUPS]
    alone_s: list[float] = []
    both_s: list[float] = []
    try:
        wait_for_step(folder, ranks, time.time(), len(GROUPS), LIMIT_S)
        end = time.time() + seconds
        while time.time() + every / 2 < end:
            victim = groups[len(alone_s) % len(groups)]
            killed = time.time()
            victim.kill()
            alone_s.append(wait_for_step(folder, ranks, killed, 1, LIMIT_S))
            victim.start()
            both_s.append(wait_for_step(folder, ranks, time.time(), len(GROUPS), LIMIT_S))
            time.sleep(max(0.0, killed + every - time.time()))
        last = max(line["step"] for group in GROUPS for line in steps_of(folder, group, 0)[-1:])
        (folder / "stop.new").write_text(str(last + 50))
        (folder / "stop.new").rename(folder / "stop")
        codes = [code for group in groups for code in group.wait(LIMIT_S)]
    finally:
        for group in groups:
            group.kill()
        lighthouse.shutdown()
    steps, difference = compare(folder, ranks)
    seen = {**options, "ranks": ranks, "kills": len(alone_s), "steps": steps, "codes": codes}
    return seen | {"difference": difference, "alone_s": alone_s, "both_s": both_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--annotation", choices=["fully_shard", "replicate"], default="fully_shard")
    parser.add_argument("--ranks", type=int, default=1, help="of each of the two replica groups")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--every", type=float, default=15, help="seconds between two kills")
    parser.add_argument("--transport", choices=["http", "data", "pg"], default="http", help="data: HTTP, weights only")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.group:
        train(given.annotation, given.group, given.folder, given.transport)
    else:
        print(json.dumps(drive(given.annotation, given.ranks, given.seconds, given.every, given.transport)))


if __name__ == "__main__":
    main()

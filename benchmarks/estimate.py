"""What ``plan(...).estimate(links)`` says of a step beside what the step takes: two hosts, on a wire of a known rate.

    python benchmarks/estimate.py
    python benchmarks/estimate.py --ranks 2 --rate 500mbit

The links are measured first, by messages both ways at once between all pairs of ranks on a host, and on two. Then
a model whose layers compute next to nothing trains under each strategy. A line for each: the estimate, the median
step, and their ratio. Needs ``ip`` and ``tc``, and leave to make namespaces.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from composable import Link, Links, fully_shard
from tests.hosts import WIRE, two_hosts

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
SIZES = (4, 1 << 20)  # bytes of messages


def seconds(peer: int, message_bytes: int, rounds: int) -> float:
    """Return what a message takes while as long a one comes from ``peer``."""
    sent, got = torch.ones(message_bytes // 4), torch.empty(message_bytes // 4)
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        # gloo sends once it knows that the peer receives: asked first, that is not behind what it sends itself.
        pending = [dist.irecv(got, peer), dist.isend(sent, peer)]
        for work in pending:
            assert work is not None
            work.wait()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def measured_link(pairs: list[tuple[int, int]], rounds: int = 20) -> Link:
    """Measure with all pairs at once, as they share what there is. Collective over the world."""
    rank, found = dist.get_rank(), torch.zeros(2)
    for first, second in pairs:
        if rank in (first, second):
            peer = second if rank == first else first
            found = torch.tensor([seconds(peer, size, rounds) for size in SIZES])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    small, large = found.tolist()
    return Link(latency=small, bandwidth=(SIZES[1] - SIZES[0]) / (large - small))


def measure(width: int, layers: int, steps: int) -> None:
    """Print the lines: what torchrun starts on each host."""
    dist.init_process_group("gloo")
    size, here = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    inside = measured_link([(0, 1), (here, here + 1)]) if here > 1 else Link(latency=1e-5, bandwidth=1e9)
    links = Links(inside=inside, between=measured_link([(rank, here + rank) for rank in range(here)]))
    if dist.get_rank() == 0:
        for name, link in (("inside", links.inside), ("between", links.between)):
            assert link is not None
            print(f"link {name:8} {link.latency * 1e6:9.1f} us  {link.bandwidth / 1e6:9.1f} MB/s", flush=True)
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        fully_shard(model, policy={nn.Linear}, strategy=strategy, reshard_after_forward=None)
        x, times = torch.ones(1, width), []
        for _ in range(steps):
            dist.barrier()
            started = time.perf_counter()
            model(x).sum().backward()
            times.append(time.perf_counter() - started)
        shown = fully_shard.state(model).plan
        assert shown is not None
        expected, step = shown.estimate(links).seconds, statistics.median(times[2:])
        if dist.get_rank() == 0:
            print(
                f"step {strategy:18}  {expected * 1e3:8.1f}  {step * 1e3:8.1f}  {step / expected:6.2f}  "
                f"({size // here} x {here} ranks)",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="on each host")
    parser.add_argument("--rate", default="100mbit", help="of the wire, as tc takes it")
    parser.add_argument("--width", type=int, default=512, help="of each layer")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--is-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.is_rank:
        measure(args.width, args.layers, args.steps)
        return
    print("     strategy            estimate  measured   ratio   in ms")
    shape = ["--width", str(args.width), "--layers", str(args.layers), "--steps", str(args.steps)]
    for ranks in args.ranks:
        with two_hosts() as hosts:
            for host in hosts:
                host.run(*f"tc qdisc add dev {WIRE} root tbf rate {args.rate} burst 64k latency 500ms".split())
            jobs = [host.start(ranks, [__file__, "--is-rank", *shape]) for host in hosts]
            codes = [job.wait(600) for job in jobs]
            said = jobs[0].said()
            if any(codes):
                sys.exit(said)
            print("\n".join(line for line in said.splitlines() if line.startswith(("link", "step"))), flush=True)


if __name__ == "__main__":
    main()

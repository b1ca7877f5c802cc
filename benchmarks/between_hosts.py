"""What leaves a host, and how long it takes: both transports of gloo between two network namespaces of this machine.

    python benchmarks/between_hosts.py
    python benchmarks/between_hosts.py --ranks 1 2 3 4 --kib 1024 --rate 1gbit

A line for each number of ranks on a host, size of a slice, and transport: slices that leave the first host in an
all-gather and in a reduce-scatter, by the counter of its interface, and the milliseconds of a step, which has two
all-gathers and a reduce-scatter. Needs ``ip``, and leave to make namespaces; see docs/notes.md.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent.parent))
from composable.comm.transport import transport_class
from tests.hosts import WIRE, two_hosts

TRANSPORTS = ("point_to_point", "process_group")


def bytes_sent() -> int:
    """Return how much has left this host by its wire."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    counters = next(line.partition(":")[2] for line in lines if line.strip().startswith(f"{WIRE}:"))
    return int(counters.split()[8])


def measure(kib: int) -> None:
    """Print the lines of this number of ranks: what torchrun starts on each host."""
    dist.init_process_group("gloo")
    size, numel = dist.get_world_size(), 256 * kib
    buffer, shard = torch.ones(numel * size), torch.ones(numel)
    for name in TRANSPORTS:
        assert dist.group.WORLD is not None
        transport = transport_class(name)(dist.group.WORLD)
        slices, milliseconds = [], []
        for is_gather in (True, False):
            rounds = 10 if kib >= 1024 else 50
            for number in range(rounds + 3):
                if number == 3:  # the first ones connect
                    dist.barrier()
                    sent, started = bytes_sent(), time.perf_counter()
                if is_gather:
                    transport.begin_all_gather(buffer, shard, 1).finish()
                else:
                    transport.begin_reduce_scatter(buffer, shard, 1).finish()
            dist.barrier()
            milliseconds.append((time.perf_counter() - started) / rounds * 1000)
            slices.append((bytes_sent() - sent) / rounds / (1024 * kib))
        if dist.get_rank() == 0:
            step = 2 * milliseconds[0] + milliseconds[1]
            print(f"{size // 2:5}  {kib:6}  {name:15}  {slices[0]:6.1f}  {slices[1]:14.1f}  {step:9.1f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 3, 4], help="on each host")
    parser.add_argument("--kib", type=int, nargs="+", default=[1024], help="of a slice")
    parser.add_argument("--rate", help="of the wire, as tc takes it: 1gbit; default: as fast as the cores")
    parser.add_argument("--rank-of", type=int, metavar="KIB", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_of:
        measure(args.rank_of)
        return
    print("ranks     KiB  transport        gather  reduce-scatter  ms a step", flush=True)
    for ranks in args.ranks:
        for kib in args.kib:
            with two_hosts() as hosts:
                for host in hosts if args.rate else ():
                    host.run(*f"tc qdisc add dev {WIRE} root tbf rate {args.rate} burst 512k latency 100ms".split())
                jobs = [host.start(ranks, [__file__, "--rank-of", str(kib)]) for host in hosts]
                codes = [job.wait(600) for job in jobs]
                said = jobs[0].said()
                if any(codes):
                    sys.exit(said)
                print("\n".join(line for line in said.splitlines() if any(name in line for name in TRANSPORTS)))


if __name__ == "__main__":
    main()

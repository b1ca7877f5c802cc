"""Hosts made of network namespaces on this machine: ranks on two of them have nothing but a wire between them.

    with two_hosts() as hosts:
        jobs = [host.start(2, ["train.py"]) for host in hosts]
        cut(hosts)

A namespace lives as long as a process in it. The first of each reads from a pipe that this process holds, so
namespaces and wire are gone when this process is, however it ends; nothing has a name that another test might take.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["WIRE", "Host", "Job", "NoHostsError", "cut", "two_hosts", "why_no_hosts"]

ROOT = Path(__file__).parent.parent
WIRE = "wire0"
_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_NOBODY = "02:00:00:00:00:01"
_PORT = 29500  # nobody else can be on it in a namespace of its own
_END_S = 100.0


class NoHostsError(Exception):
    """This machine does not let us make namespaces."""


@dataclass
class Job:
    """A launcher that runs on a host, and what it and its ranks write."""

    process: "subprocess.Popen[bytes]"
    log: Path
    started: float = field(default_factory=time.monotonic)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout_s: float) -> int:
        """Return the exit code; if there is none in time, raise with the end of what was written."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end in {timeout_s:.0f} s; it wrote:\n{self.said()[-5000:]}") from None


@dataclass
class Host:
    """One network namespace, with an address on the wire."""

    number: int  # 0 or 1; 0 is where ranks meet
    address: str  # on the wire
    _first: "subprocess.Popen[bytes]"
    _folder: Path
    _jobs: list[Job] = field(default_factory=list)

    def run(self, *command: str) -> str:
        """Run a command on this host and return what it prints."""
        done = subprocess.run(self._inside(command), capture_output=True, text=True, check=False)
        if done.returncode:
            raise NoHostsError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def start(self, ranks: int, arguments: Sequence[str], *, options: Sequence[str] = (), **variables: str) -> Job:
        """Start ``arguments``, a Python script and what it takes, on as many ranks here and on the other host.

        torchrun ends the other ranks of a host as soon as one has ended. Here they may say first what they have to say,
        unless torchrun is given other ``options``.
        """
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        usual = [
            *("--nnodes", "2", "--node-rank", str(self.number)),
            *("--master-addr", _ADDRESSES[0], "--master-port", str(_PORT)),
            *("--no-python", "sh", "-c", 'trap "" TERM; exec "$@"', "sh", sys.executable),
        ]
        return self.launch([*launcher, *(options or usual), *arguments], **variables)

    def launch(self, command: Sequence[str], **variables: str) -> Job:
        """Start a launcher here that finds out by itself, or from ``variables``, where the others are."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": WIRE,
            "COMPOSABLE_HOST": "",
            **variables,
        }
        log = self._folder / f"host{self.number}-{len(self._jobs)}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                self._inside(command), env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL
            )
        self._jobs.append(Job(process, log))
        return self._jobs[-1]

    def kill(self) -> None:
        """Kill at once all that runs here, as a host ends that loses its processes."""
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> None:
        """Kill what runs here, and leave the namespace."""
        self.kill()
        for job in self._jobs:
            job.process.kill()
            job.process.wait(_END_S)
        self._first.communicate(timeout=_END_S)

    def _inside(self, command: Sequence[str]) -> list[str]:
        enter = ["nsenter", "--target", str(self._first.pid), "--user", "--preserve-credentials", "--net"]
        return [*enter, *command]

    def _processes(self) -> list[int]:
        """Return the processes of the namespace but its first: all were started by us, nobody else can be in it."""
        own = os.readlink(f"/proc/{self._first.pid}/ns/net")
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and os.readlink(entry / "ns" / "net") == own:
                    found.append(int(entry.name))
        return [pid for pid in found if pid != self._first.pid]


def cut(hosts: Sequence[Host]) -> None:
    """Cut the wire between two hosts: what is sent from now on is lost, and nobody is told."""
    for host, other in (hosts, hosts[::-1]):
        # Frames for a card that nobody has. Addresses and routes stay, so the ranks of one host still reach each other.
        host.run(*f"ip neighbour replace {other.address} lladdr {_NOBODY} nud permanent dev {WIRE}".split())


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make two hosts with a wire between them; in the end kill what runs there.

    Raises:
        NoHostsError: Not on this machine.
    """
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        raise NoHostsError(f"there is no {', '.join(missing)}")
    hosts: list[Host] = []
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        try:
            # The second in the user namespace of the first, so that it may be given one end of the wire.
            unshare = ["unshare", "--user", "--map-root-user", "--net", "cat"]
            for number in range(2):
                first = subprocess.Popen(unshare, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                hosts.append(Host(number, _ADDRESSES[number], first, Path(folder)))
                _wait_until_ready(first)
                enter = ["nsenter", "--target", str(first.pid), "--user", "--preserve-credentials"]
                unshare = [*enter, "unshare", "--net", "cat"]
            wire = ["ip", "link", "add", WIRE, "type", "veth", "peer", "name", WIRE]
            hosts[0].run(*wire, "netns", str(hosts[1]._first.pid))
            for host in hosts:
                host.run("ip", "address", "add", f"{host.address}/24", "dev", WIRE)
                host.run("ip", "link", "set", WIRE, "up")
                host.run("ip", "link", "set", "lo", "up")
            yield hosts[0], hosts[1]
        finally:
            for host in hosts:
                host.end()


def _wait_until_ready(first: "subprocess.Popen[bytes]") -> None:
    """Return when the first process of a namespace is in it."""
    assert first.stdin is not None and first.stdout is not None and first.stderr is not None, "pipes"
    with suppress(BrokenPipeError):
        first.stdin.write(b"\n")
        first.stdin.flush()
    if first.stdout.readline() != b"\n":
        raise NoHostsError(first.stderr.read().decode().strip())


def why_no_hosts() -> str:
    """Return why there can be no hosts here; empty: there can. Makes some to find out."""
    try:
        with two_hosts() as hosts:
            hosts[0].run("ping", "-c", "1", "-W", "5", hosts[1].address) if shutil.which("ping") else None
    except (NoHostsError, OSError, subprocess.SubprocessError) as error:
        return str(error)
    return ""

"""A Slurm cluster of two nodes on this machine, in namespaces of its own: ``python -m tests.launchers.slurm`` installs it.

    with slurm(folder) as cluster:
        job = cluster.run("sbatch", "--parsable", "job.sh")

The daemons live in a process namespace whose first process reads from a pipe that this process holds. So they, and all
jobs, end when this process does, however it ends. The nodes n1 and n2 have names in a hosts file that only they see.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
_PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "unshare", "nsenter", "ip")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
_END_S = 60.0

# Two GPUs on each node, so that the pages' requests make sense; nothing opens these files.
_GRES = "".join(f"NodeName=n[1-2] Name=gpu File=/dev/{name}\n" for name in ("null", "zero"))
_CONF = """\
ClusterName=two
SlurmctldHost=cluster
AuthInfo=socket=/mnt/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
MailProg=/bin/true
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2
GresTypes=gpu
NodeName=n[1-2] NodeHostname=cluster Port=[17001-17002] CPUs=8 RealMemory=1000 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES
"""
_START = r"""
set -e
cd "$1"
hostname cluster
ip link set lo up
ip address add 10.78.0.1/32 dev lo  # Names with loopback addresses alone are not found.
mount --bind hosts /etc/hosts
mount -t tmpfs -o mode=755 tmpfs /mnt  # munge wants folders that all may read.
cp key /mnt
munged --foreground --key-file=/mnt/key --socket=/mnt/socket --pid-file=/mnt/pid --log-file=/mnt/log \
    --seed-file=/mnt/seed > munged.out 2>&1 &
until [ -S /mnt/socket ]; do kill -0 $!; sleep 0.05; done
slurmctld -D -c > slurmctld.out 2>&1 &
slurmd -D -N n1 > n1.out 2>&1 &
slurmd -D -N n2 > n2.out 2>&1 &
echo started
read -r _
"""


class NoSlurmError(Exception):
    """There can be no cluster here."""


@dataclass
class Cluster:
    """Two nodes, n1 and n2, of two ranks each."""

    folder: Path
    _first: int

    def run(self, *command: str, check: bool = True, **variables: str) -> str:
        """Run a command on the cluster, in its folder, and return what it prints."""
        enter = ["nsenter", "--target", str(self._first), "--mount", "--net", "--uts", f"--wd={self.folder}"]
        environment = {**_environment(self.folder), **variables}
        done = subprocess.run([*enter, *command], env=environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def state_of(self, job: str) -> str:
        """Return the state of a job: PENDING, RUNNING, COMPLETED, FAILED ..."""
        shown = self.run("scontrol", "show", "job", job)
        return shown.partition("JobState=")[2].split()[0]

    def said(self, job: str) -> str:
        log = self.folder / f"slurm-{job}.out"
        return log.read_text(errors="replace") if log.exists() else ""

    def wait_for(self, job: str, is_so: Callable[[], bool]) -> float:
        """Wait until it is so, and return the seconds; fail with what the job said if it has ended without."""
        began = time.monotonic()
        while not is_so():
            ended = self.state_of(job) in {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
            assert not ended or is_so(), self.said(job)
            time.sleep(0.05)
        return time.monotonic() - began


def install() -> None:
    """Install Slurm by apt-get, where it is missing and can be had."""
    if _missing() and shutil.which("apt-get") and os.geteuid() == 0:
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        with suppress(subprocess.TimeoutExpired):
            for words in (["update"], ["install", "--yes", "--no-install-recommends", *PACKAGES]):
                subprocess.run(["apt-get", *words], env=environment, check=False, stdin=subprocess.DEVNULL, timeout=100)


@contextmanager
def slurm(folder: Path) -> Iterator[Cluster]:
    """Start a cluster whose files lie in ``folder``; in the end kill all that runs there.

    Raises:
        NoSlurmError: Not on this machine.
    """
    missing = _missing()
    if missing:
        raise NoSlurmError(f"there is no {', '.join(missing)}")
    if os.geteuid() != 0:
        raise NoSlurmError("the daemons need root")
    (folder / "state").mkdir()
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.78.0.1 cluster n1 n2\n")
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder))
    (folder / "gres.conf").write_text(_GRES)
    unshare = "unshare --pid --fork --kill-child --mount --mount-proc --net --uts bash -c".split()
    process = subprocess.Popen(
        [*unshare, _START, "bash", str(folder)],
        env=_environment(folder),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None, "pipes"
        if process.stdout.readline() != "started\n":
            raise NoSlurmError(process.stderr.read().strip())
        first = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
        cluster = Cluster(folder, int(first))
        deadline = time.monotonic() + _END_S
        while cluster.run("sinfo", "-h", "-o", "%D %T", check=False) != "2 idle":
            if time.monotonic() > deadline:
                logs = "\n".join(f"{log.name}: {log.read_text()[-500:]}" for log in sorted(folder.glob("*.out")))
                raise NoSlurmError(f"no two nodes are idle\n{logs}")
            time.sleep(0.1)
        yield cluster
    finally:
        # unshare ignores what is weaker; its child ends with it, and as the first of its namespace takes all others along.
        process.kill()
        process.communicate(timeout=_END_S)


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder}/bin:{_PATH}", "SLURM_CONF": f"{folder}/slurm.conf"}


def _missing() -> list[str]:
    return [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]


if __name__ == "__main__":
    install()
    sys.exit()

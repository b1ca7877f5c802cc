"""Two elastic torchruns on two hosts, one of which goes: the other one goes on from the last save.

``pytest -s`` prints how many seconds later the next step began.
"""

import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts import Host, Job
from tests.launchers.test_slurm import STEPS, longer
from tests.test_first_hour import CLUSTER, ON_A_CLUSTER, ONE_DEVICE, exact, losses_in, run_stage, shown
from tests.world import run_ranks

(COMMAND,) = (text for text in shown(CLUSTER, "sh") if "--nnodes 1:2" in text)
OPTIONS = shlex.split(COMMAND.replace("\\\n", "").replace("node0", "10.77.0.1"))
# Without the variable and the program before, the number of ranks, and the script behind.
OPTIONS = [one for one in OPTIONS[2:-1] if one not in {"--nproc-per-node", "8"}]


def wait_for(jobs: list[Job], is_so: Callable[[], object]) -> float:
    began = time.monotonic()
    while not is_so():
        assert jobs[0].process.poll() is None, "\n".join(job.said() for job in jobs)
        time.sleep(0.02)
    return time.monotonic() - began


def options_of(host: Host) -> list[str]:
    """Return the options of the page, and the addresses: both hosts have one name, by which torchrun would find them."""
    options = [f"{one},is_host={host.number == 0}" if "=" in one else one for one in OPTIONS]
    return [*options, "--local-addr", host.address]


@pytest.mark.parametrize("how", ["killed", "told to end"])
def test_one_host_goes_and_the_other_goes_on(how: str, hosts: tuple[Host, Host], tmp_path: Path) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    step = "    loss.backward()\n"
    # The end of the line in one piece with it: ranks write to one log.
    source = exact(longer(ON_A_CLUSTER)).replace(
        step, f"{step}    print(f'rank {{rank}} of {{ranks}} at {{step}}\\n', end='')\n"
    )
    script.write_text(source)
    # Without it torch's ranks of a restart find addresses of the world before in the store, and wait for them.
    variables = {"RUN": str(run), "PYTHONUNBUFFERED": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    jobs = [host.start(2, [str(script)], options=options_of(host), **variables) for host in hosts]

    def steps_of(ranks: int) -> list[int]:
        return [int(one) for one in re.findall(rf"^rank 0 of {ranks} at (\d+)$", everything(), flags=re.MULTILINE)]

    def everything() -> str:
        return "\n".join(job.said() for job in jobs)

    wait_for(jobs, lambda: max(steps_of(4), default=0) > 12)
    if how == "killed":
        hosts[1].kill()
    else:
        jobs[1].process.terminate()
    seconds = wait_for(jobs, lambda: steps_of(2))
    print(f"one host was {how}: the next step began {seconds:.1f} s later")
    saves = {int(one) for one in re.findall(r"all ranks have saved step (\d+)", everything())}
    # Without a word before, the run goes on from the last save of the script, else from where it was.
    last, again = max(steps_of(4)), steps_of(2)[0]
    if how == "killed":
        assert saves == set() and again % 5 == 1 and last - 5 < again <= last + 1, everything()
    else:
        assert saves == {last} and again == last + 1, everything()
    assert jobs[0].wait(1000) == 0, jobs[0].said()
    one_device = run_ranks(run_stage, 1, longer(ONE_DEVICE), str(tmp_path))[0]
    assert losses_in(everything()) == pytest.approx(one_device, abs=1e-8)
    assert list(one_device)[-1] == STEPS

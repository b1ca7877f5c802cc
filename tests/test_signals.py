"""A notice on any rank saves the run on all ranks after one step, and the losses go on as if nothing had happened.

Ranks signal themselves, inside of what the name of a place says, so that a test knows where the signal comes.
"""

import os
import random
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from composable import (
    ConfigError,
    DesyncError,
    SaveNotice,
    UsageError,
    fully_shard,
    joinable,
    load_checkpoint,
    no_sync,
    replicate,
    save_checkpoint,
    save_on_signal,
)
from composable.testing import simulate
from tests.forked import Forked
from tests.models import random_input
from tests.world import RankErrors, on_ranks, run_ranks, run_threads

CALLS = {"fully_shard": fully_shard, "replicate": replicate}
STEPS = 6
BATCH = 12


class Places(nn.Sequential):
    """Calls ``self.reached`` with the name of the place that a step has reached."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.reached: Callable[[str], object] = lambda place: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = self[1](self[0](x))
        self.reached("forward")
        if middle.requires_grad:
            middle.register_hook(lambda grad: self.reached("backward"))
        return self[2](middle)


def build(call: str) -> tuple[Places, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Places()
    if call:
        CALLS[call](model)
    return model, torch.optim.Adam(model.parameters(), lr=0.05)


def loss_of_step(model: nn.Module, step: int, part: slice = slice(None)) -> torch.Tensor:
    """Return the loss of this rank's rows, or ``part`` of them; the means over ranks are equal for any number of ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return model(random_input(step, BATCH, 4)[rank::ranks][part]).square().mean()


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return round(total.item(), 5)


def train(
    call: str, run: str, at: Callable[[int, str, SaveNotice], object], steps: int = STEPS, **options: Any
) -> tuple[dict[int, float], int | None]:
    """Train until a notice or the last step, from the checkpoint if there is one; return losses and the step saved."""
    model, optimizer = build(call)
    done = load_checkpoint(run, model, optimizer).step if list(Path(run).glob("step-*")) else 0
    losses = {}
    with save_on_signal(run, model, optimizer, **{"exit_code": None, **options}) as notice:
        for step in range(done + 1, steps + 1):
            model.reached = lambda place, step=step: at(step, place, notice)  # type: ignore[misc]
            at(step, "between", notice)
            loss = loss_of_step(model, step)
            losses[step] = mean(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            at(step, "optimizer", notice)
            if notice.step(step, extra=lambda step=step: at(step, "save", notice)):
                return losses, step
    return losses, None


def signal_self(step: int, place: str, who: tuple[int, ...], signals: tuple[int, ...]) -> Callable[..., object]:
    def at(now: int, here: str, notice: SaveNotice) -> None:
        if (now, here) == (step, place) and dist.get_rank() in who:
            for one in signals:
                os.kill(os.getpid(), one)

    return at


def nothing(step: int, place: str, notice: SaveNotice) -> None:
    """Do not signal."""


def train_signalled(call: str, run: str, place: str, who: tuple[int, ...], signals: tuple[int, ...]) -> Any:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    found = train(call, run, signal_self(2, place, who, signals))
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1))
    return found


def train_quietly(call: str, run: str) -> dict[int, float]:
    return train(call, run, nothing)[0]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return train_quietly("", str(tmp_path_factory.mktemp("unbroken")))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("who", [(0,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("place", ["between", "forward", "backward", "optimizer", "save"])
def test_a_signal_during_a_step_saves_all_ranks_after_the_next_one(
    place: str, who: tuple[int, ...], call: str, unbroken: dict[int, float], tmp_path: Path
) -> None:
    run = str(tmp_path / "run")
    if place == "save":
        # A signal before makes it save.
        found = run_ranks(train_signalled_twice, 3, call, run, who)
    else:
        found = run_ranks(train_signalled, 3, call, run, place, who, (signal.SIGTERM,))
    assert [saved for _, saved in found] == [3, 3, 3]
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-000003"]
    rest = run_ranks(train_quietly, 2, call, run)
    assert found[0][0] | rest[0] == unbroken


def train_signalled_twice(call: str, run: str, who: tuple[int, ...]) -> Any:
    first = signal_self(2, "forward", who, (signal.SIGUSR1,))
    second = signal_self(3, "save", who, (signal.SIGTERM,))

    def at(*place: Any) -> None:
        first(*place)
        second(*place)

    return train(call, run, at)


def test_an_echo_of_a_signal_is_the_same_notice(tmp_path: Path) -> None:
    # torchrun sends its ranks the signal that all processes of a job have had.
    twice = (signal.SIGTERM, signal.SIGTERM)
    found = run_ranks(train_signalled, 2, "fully_shard", str(tmp_path / "run"), "forward", (0, 1), twice)
    assert [saved for _, saved in found] == [3, 3]


def request_at_random(rank: int, seed: int, ranks: int, run: str) -> tuple[int | None, list[int], int]:
    """Ask for a save on some ranks in some steps; return the step saved, when each rank asked, and the last step."""
    chosen = random.Random(seed)
    steps = [chosen.randint(2, STEPS - 1) if chosen.random() < 0.5 else 99 for _ in range(ranks)]
    places = [chosen.choice(["between", "forward", "backward", "optimizer"]) for _ in range(ranks)]

    def at(step: int, place: str, notice: SaveNotice) -> None:
        if (step, place) == (steps[rank], places[rank]):
            notice.request()

    losses, saved = train(chosen.choice([*CALLS]), run, at, signals=())
    return saved, steps, max(losses)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_of_notices_in_different_steps_the_first_one_decides(ranks: int, tmp_path: Path) -> None:
    for seed in range(12):
        found = simulate(ranks, request_at_random, seed, ranks, str(tmp_path / f"run{seed}"), seed=seed)
        assert len({(saved, last) for saved, _, last in found}) == 1, (seed, found)
        saved, steps, last = found[0]
        due = min(steps) + (ranks > 1)
        assert (saved, last) == ((due, due) if due <= STEPS else (None, STEPS)), (seed, found)


def accumulate(run: str) -> tuple[int | None, dict[int, float]]:
    """Reduce once in a step of two backwards, and ask in the first of them, on one rank."""
    model, optimizer = build("replicate")
    with save_on_signal(run, model, optimizer, signals=(), exit_code=None) as notice:
        for step in range(1, STEPS + 1):
            for part in (slice(0, 2), slice(2, 4)):
                with no_sync(model) if part.start == 0 else nullcontext():
                    (loss_of_step(model, step, part) / 2).backward()
                if (step, part.start, dist.get_rank()) == (3, 0, 1):
                    notice.request()
            optimizer.step()
            optimizer.zero_grad()
            if notice.step(step):
                break
    return step, train("replicate", run, nothing, signals=())[0]


def test_a_step_of_several_backwards_is_one_step(unbroken: dict[int, float], tmp_path: Path) -> None:
    found = run_threads(accumulate, 3, str(tmp_path / "run"))
    assert [saved for saved, _ in found] == [4, 4, 4]
    assert found[0][1] == {step: loss for step, loss in unbroken.items() if step > 4}


def join_unevenly(run: str, asking: int) -> tuple[int, ...]:
    """Rank 0 has two inputs, the others have six; all run the steps of the others."""
    model, optimizer = build("fully_shard")
    done = 0

    def step() -> None:
        nonlocal done
        optimizer.step()
        optimizer.zero_grad()
        done += 1
        if (done, dist.get_rank()) == (4, asking):
            notice.request()
        notice.step(done)

    with save_on_signal(run, model, optimizer, signals=(), exit_code=7) as notice:
        try:
            with Join([joinable(model, step=step)]):
                for number in range(2 if dist.get_rank() == 0 else 6):
                    loss_of_step(model, number).backward()
                    step()
        except SystemExit as ended:
            return done, int(str(ended.code))
    return (done,)


@pytest.mark.parametrize("asking", [0, 1])
def test_a_rank_without_inputs_saves_with_the_others(asking: int, tmp_path: Path) -> None:
    assert run_threads(join_unevenly, 3, str(tmp_path / "run"), asking) == [(5, 7)] * 3
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-000005"]


def save_behind(run: str) -> bool:
    """Ask while a background save is under way, of the same step as the save that is asked for."""
    model, optimizer = build("fully_shard")
    with save_on_signal(run, model, optimizer, exit_code=None) as notice:
        for step in (1, 2):
            loss_of_step(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and dist.get_rank() == 0:
                signal.raise_signal(signal.SIGUSR1)
            handle = save_checkpoint(run, step, model, optimizer, extra="behind", asynchronous=True)
            if notice.step(step, extra="asked"):
                return handle.is_done() and load_checkpoint(run, model, optimizer).extra == "asked"
    return False


def test_a_background_save_is_waited_for(tmp_path: Path) -> None:
    assert run_ranks(save_behind, 2, str(tmp_path / "run")) == [True, True]


# -- the ends of processes

RANK = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    from torch import nn
    from composable import fully_shard, save_on_signal

    rank, store, run, what = int(sys.argv[1]), *sys.argv[2:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with save_on_signal(run, model, optimizer) as notice:
        for step in range(1, 1000):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if (step, rank) == (3, 1):
                os.kill(os.getpid(), signal.SIGTERM)
                if what == "twice":
                    began = time.monotonic()
                    while time.monotonic() < began + 5.1:
                        pass
                    os.kill(os.getpid(), signal.SIGTERM)
            if what == "fork" and (step, rank) == (1, 1):
                child = os.fork()
                if not child:
                    os.kill(os.getpid(), signal.SIGUSR1)  # which a fork outlives
                    os.kill(os.getpid(), signal.SIGTERM)
                    os._exit(0)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
            notice.step(step)
"""


@contextmanager
def started(program: str, ranks: int, *arguments: object) -> Iterator[list[Forked]]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [Forked(program, rank, *arguments, **pipes) for rank in range(ranks)]
    try:
        yield processes
    finally:
        for one in processes:
            one.kill()
            one.communicate()


@pytest.mark.parametrize("what", ["once", "fork"])
def test_all_ranks_end_with_the_code_and_say_why(what: str, tmp_path: Path) -> None:
    with started(RANK, 2, tmp_path / "store", tmp_path / "run", what) as processes:
        ends = [one.communicate(timeout=200) for one in processes]
        assert [one.returncode for one in processes] == [75, 75], ends
        assert [said.strip() for _, said in ends] == ["", "rank 1 had a notice: all ranks have saved step 4"]
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-000004"]


def test_the_same_signal_again_ends_a_rank_at_once(tmp_path: Path) -> None:
    with started(RANK, 2, tmp_path / "store", tmp_path / "run", "twice") as processes:
        for one in processes:
            one.communicate(timeout=200)
        assert [one.returncode for one in processes] == [1, -signal.SIGTERM]
    assert not list((tmp_path / "run").glob("step-*"))


# -- bad input


@on_ranks(2, run=run_ranks)
def test_it_is_opened_once_and_in_the_main_thread() -> None:
    model, optimizer = build("replicate")
    with save_on_signal("run", model, optimizer):
        handler = signal.getsignal(signal.SIGTERM)
        with pytest.raises(UsageError, match="another save_on_signal has SIGTERM"):
            save_on_signal("run", model, optimizer)
        # One without signals may be open beside it.
        with save_on_signal("run", model, optimizer, signals=()):
            assert signal.getsignal(signal.SIGTERM) == handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            save_on_signal("run", model, optimizer)
        except UsageError as error:
            errors.append(error)

    if dist.get_rank() == 0:
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    else:  # The others are told.
        enter()
    assert "in a thread" in str(errors[0]) and "at:  rank 0" in str(errors[0])
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@on_ranks(2, run=run_ranks)
def test_codes_that_differ_by_rank_are_an_error() -> None:
    model, before = build("replicate")[0], signal.getsignal(signal.SIGTERM)
    with pytest.raises(DesyncError, match=r"different arguments\n    rank 0: exit_code=75\n    rank 1: exit_code=None"):
        save_on_signal("run", model, exit_code=None if dist.get_rank() else 75)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"signals": (signal.SIGTERM, signal.SIGKILL)}, "signals is "),
        ({"signals": 15}, "signals is 15"),
        ({"signals": ("TERM",)}, "signals is "),
        ({"exit_code": 200}, "exit_code is 200"),
        ({"exit_code": True}, "exit_code is True"),
        ({"model": "gpt"}, "model is 'gpt'"),
        ({"run": 3}, "run is 3"),
    ],
)
def test_wrong_arguments_change_nothing(options: dict[str, Any], text: str) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigError, match=text):
        save_on_signal(**{"run": "run", "model": nn.Linear(2, 2), **options})
    assert signal.getsignal(signal.SIGTERM) == before


def test_steps_rise_and_end_with_the_context(tmp_path: Path) -> None:
    with save_on_signal(tmp_path, nn.Linear(2, 2), signals=(), exit_code=None) as notice:
        assert not notice.step(3)
        for step in (3, -1, 2.0):
            with pytest.raises(ConfigError, match=rf"step is {step}\n.*above 3, the last"):
                notice.step(step)  # type: ignore[arg-type]
        notice.request()
        assert notice.step(4)
        with pytest.raises(UsageError, match="closed, or has saved"):
            notice.step(5)
    with pytest.raises(UsageError, match="closed, or has saved"):
        notice.step(6)


def go_on_alone(run: str) -> bool:
    """Rank 0 ends two steps before rank 1, which asks in its first, ends it: no gradients hold it back."""
    with save_on_signal(run, nn.Linear(2, 2), signals=(), exit_code=None) as notice:
        if dist.get_rank() == 0:
            notice.step(1), notice.step(2)
        dist.barrier()
        if dist.get_rank() == 1:
            notice.request()
            return notice.step(1) or dist.barrier() is None
        dist.barrier()
        return notice.step(3)


def test_a_rank_that_has_gone_past_the_step_says_so(tmp_path: Path) -> None:
    with pytest.raises(RankErrors) as caught:
        run_threads(go_on_alone, 2, str(tmp_path))
    error = caught.value.errors[0]
    assert isinstance(error, DesyncError)
    assert str(error).splitlines()[0] == ("this rank is after step 3, and rank 1 has asked all to save after 2")


@on_ranks(2, run=run_ranks)
def test_a_context_does_not_see_the_notice_of_the_one_before(tmp_path: Path) -> None:
    """Two contexts of one process group, each with a notice of its own."""
    run = str(tmp_path / "run")
    found = []
    for part in range(2):
        asking = signal_self(2, "forward", (part,), (signal.SIGUSR1,))
        found.append(train("replicate", f"{run}{part}", asking)[1])
    assert found == [3, 3]

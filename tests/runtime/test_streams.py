"""The stream rules, on a device that records: what no event orders is found."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.world import run_ranks
from tools.streams.bench import Case, run_case
from tools.streams.between_steps import saver
from tools.streams.recording import Recorder
from tools.streams.stream_cases import CASES, ON_BLOCKS, SECONDARY

TWO = pytest.mark.parametrize("world_size", [2], indirect=True)
# With one rank only the transport differs; a shard rests elsewhere in the same way with and without secondary ones.
BY_WORLD_SIZE = [(2, case) for case in CASES] + [(1, case) for case in CASES[::8]]
BY_WORLD_SIZE += [(4, case) for case in SECONDARY if not case.name.startswith("offloaded") or "train" in case.name]


@pytest.fixture(scope="module")
def world_size(request: pytest.FixtureRequest) -> Iterator[int]:
    """A group in which no other rank takes part: the order on this one is all that counts."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=request.param - 1, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


# The recording device


def test_a_stream_that_waits_for_no_event_races() -> None:
    recorder = Recorder()
    side = recorder.Stream(name="side")
    with recorder:
        x = torch.ones(3)
        with recorder.stream(side):
            x.add_(1)
        x.sum()
    assert [str(found) for found in recorder.violations] == [
        "race of a tensor: add_.Tensor writes on side, not ordered after: ones writes on default",
        "race of a tensor: sum reads on default, not ordered after: add_.Tensor writes on side",
    ]


def test_the_host_races_with_copies_that_it_does_not_wait_for() -> None:
    recorder = Recorder()
    side = recorder.Stream(name="side")
    with recorder:
        host = torch.empty(3, pin_memory=True)
        device = torch.ones(3)
        side.wait_stream(recorder.current_stream())
        with recorder.stream(side):
            host.copy_(device, non_blocking=True)
        host.add_(1)
        side.record_event().synchronize()
        host.add_(1)
    assert [str(found) for found in recorder.violations] == [
        "race of a tensor: add_.Tensor writes on host, not ordered after: copy_ writes on side"
    ]


# The rules hold


@pytest.mark.parametrize(
    ("world_size", "case"),
    BY_WORLD_SIZE,
    indirect=["world_size"],
    ids=[f"{world_size}, {case.model}: {case.name}" for world_size, case in BY_WORLD_SIZE],
)
@pytest.mark.usefixtures("world_size")
def test_everything_is_ordered(case: Case) -> None:
    recorder = Recorder()
    run_case(case, recorder)
    assert not recorder.violations, "\n".join(map(str, recorder.violations))
    assert recorder.operations > 10 and recorder.events > 5 and recorder.frees > 5


@TWO
@pytest.mark.usefixtures("world_size")
def test_streams_are_named_for_debugging() -> None:
    recorder = Recorder()
    bench = run_case(CASES[0], recorder)
    assert sorted(bench.root.scheduler._stream_to_name.values()) == ["default", "reduce", "unshard"]


def run_on_ranks(names: list[str], folder: Path) -> dict[str, list[str]]:
    cases = [case for case in CASES if case.name in {f"{name}, reshard_after_forward=None" for name in names}]
    found = {}
    for case in [*cases, Case("save checkpoints", "mlp", saver(folder))]:
        recorder = Recorder()
        run_case(case, recorder)
        found[case.name] = list(map(str, recorder.violations))
    return found


def test_everything_is_ordered_between_processes(tmp_path: Path) -> None:
    names = [name for name in ON_BLOCKS if "rank0_only" in name or "state dicts" in name]
    names += ["exception in forward", "exception in backward"]
    for found in run_ranks(run_on_ranks, 2, names, tmp_path):
        assert len(found) == len(names) + 1
        assert not any(found.values()), found

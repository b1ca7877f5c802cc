"""The stream rules, on a device that records: what no event orders is found, and every rule is needed."""

import difflib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import fully_shard
from composable.engine import unsharded
from composable.engine.unsharded import DeviceStreams
from tests.models import BLOCK_CLASSES
from tests.ordered_groups import needs_ordered_groups
from tests.parity import Run, assert_equal_runs, train_annotated, train_reference
from tests.runtime.bench import Case, run_case
from tests.runtime.between_steps import saver
from tests.runtime.recorded import put_on_device
from tests.runtime.recording import Recorder
from tests.runtime.stream_cases import CASES, ON_BLOCKS, SECONDARY, SPREAD
from tests.runtime.stream_mutations import HARMLESS, MUTATIONS, OF_SECONDARY, Mutation, find, mutated_source
from tests.world import run_ranks

TWO = pytest.mark.parametrize("world_size", [2], indirect=True)
# With one rank only the transport differs.
BY_WORLD_SIZE = [(2, case) for case in CASES] + [(1, case) for case in CASES if case.name.endswith("=None")]
BY_WORLD_SIZE += [(4, case) for case in SECONDARY]
BROKEN = [(2, mutation) for mutation in MUTATIONS] + [(4, mutation) for mutation in OF_SECONDARY]


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


def test_events_order_streams_also_through_a_third() -> None:
    recorder = Recorder()
    side, other = recorder.Stream(), recorder.Stream()
    with recorder:
        x = torch.ones(3)
        side.wait_stream(recorder.current_stream())
        other.wait_event(side.record_event())
        with recorder.stream(other):
            x.add_(1)
        recorder.current_stream().wait_stream(other)
        x.sum()
    assert not recorder.violations and recorder.events == 3


def test_reads_on_two_streams_race_with_no_one() -> None:
    recorder = Recorder()
    side = recorder.Stream()
    with recorder:
        x = torch.ones(3)
        side.wait_stream(recorder.current_stream())
        with recorder.stream(side):
            x.sum()
        x.sum()
        assert not recorder.violations
        x.zero_()
    assert [found.kind for found in recorder.violations] == ["race"]


def test_shapes_and_views_of_a_tensor_are_no_accesses() -> None:
    recorder = Recorder()
    side = recorder.Stream()
    with recorder:
        x = torch.ones(3, 2)
        with recorder.stream(side):
            x.t().view(2, 3)[0].detach()
            torch.empty_like(x)
    assert not recorder.violations


def test_freed_memory_is_used_again_by_its_own_stream() -> None:
    recorder = Recorder()
    side = recorder.Stream(name="side")
    with recorder:
        x = torch.ones(3)
        side.wait_stream(recorder.current_stream())
        with recorder.stream(side):
            x.sum()
            del x
            # From the other pool.
            torch.ones(3)
        assert not recorder.violations
        torch.ones(3)
    assert [found.kind for found in recorder.violations] == ["reuse"]


def test_a_buffer_is_freed_by_resizing_its_storage() -> None:
    recorder = Recorder(keeps_memory=True)
    with recorder:
        x = torch.ones(3)
        x.untyped_storage().resize_(0)
        x.sum()
    assert [found.kind for found in recorder.violations] == ["use after free"]
    assert x.untyped_storage().resize_(0).nbytes() == 0


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


def test_a_copy_to_the_host_that_blocks_has_run_and_what_follows_it_on_any_stream_comes_after() -> None:
    recorder = Recorder()
    side = recorder.Stream(name="side")
    with recorder:
        device = torch.ones(3)
        host = torch.empty(3, pin_memory=True).copy_(device)
        host.add_(1)
        with recorder.stream(side):
            device.copy_(host)
        device.add_(1)
        assert not recorder.violations
        with recorder.stream(side):
            device.copy_(host, non_blocking=True)
        assert [found.kind for found in recorder.violations] == ["race"]
        # What a blocking copy has waited for is all that its stream was given before.
        host.sum()
    assert len(recorder.violations) == 1


def test_what_operations_make_of_host_memory_is_host_memory() -> None:
    recorder = Recorder()
    with recorder:
        host = torch.empty(3, pin_memory=True)
        device = torch.ones(3)
        assert recorder.is_on_host(host * 2) and recorder.is_on_host(device.pin_memory())
        assert not recorder.is_on_host(device * 2)
        assert host.is_pinned() and not device.is_pinned()


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


def train_recorded(name: str) -> tuple[Run, list[str], int]:
    recorder = Recorder()

    def annotate(model: nn.Module) -> None:
        fully_shard(model, policy=BLOCK_CLASSES)
        put_on_device(fully_shard.state(model).lazy_init(), recorder)

    with recorder:
        run = train_annotated(name, annotate)
    return run, list(map(str, recorder.violations)), recorder.operations


@pytest.mark.parametrize("name", ["gpt_tied", "frozen_mixed", "called_twice"])
def test_recorded_ranks_train_like_one_process(name: str) -> None:
    reference = train_reference(name, 2)
    results = run_ranks(train_recorded, 2, name)
    assert_equal_runs([run for run, _, _ in results], reference)
    for _, found, operations in results:
        assert not found and operations > 100


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


def run_spread(names: list[str]) -> dict[str, list[str]]:
    found = {}
    for case in [case for case in SPREAD if case.model == "mlp" and case.name.partition(", HYBRID")[0] in names]:
        recorder = Recorder()
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("LOCAL_WORLD_SIZE", "2")
            run_case(case, recorder)
        found[case.name] = list(map(str, recorder.violations))
    return found


@needs_ordered_groups
def test_everything_is_ordered_where_secondary_shards_are_filled() -> None:
    names = ["train", "prefetch in vain", "several forwards before a backward", "evaluate", "exception in forward"]
    names += ["accumulate under no_sync", "offloaded, train"]
    for found in run_ranks(run_spread, 4, names):
        assert len(found) == len(names)
        assert not any(found.values()), found


# Each rule is needed


@pytest.mark.parametrize(
    ("world_size", "mutation"), BROKEN, indirect=["world_size"], ids=[mutation.name for _, mutation in BROKEN]
)
@pytest.mark.usefixtures("world_size")
def test_a_broken_rule_is_found(mutation: Mutation) -> None:
    found = list(map(str, find(mutation).violations))
    assert any(mutation.finds in one for one in found), "\n".join(found) or "found nothing"


@pytest.mark.parametrize("mutation", HARMLESS, ids=lambda mutation: mutation.name)
@TWO
@pytest.mark.usefixtures("world_size")
def test_what_is_only_slower_is_not_found(mutation: Mutation) -> None:
    assert not find(mutation).violations


def test_every_line_that_orders_streams_is_broken_once() -> None:
    source = inspect.getsource(unsharded).splitlines()
    orders = re.compile(r"wait_event|wait_stream|record_event|synchronize|device\.stream\(|_users\[|_copied = self")
    rows, first = inspect.getsourcelines(DeviceStreams)
    last = first + len(rows) - 1
    lines = {index for index in range(first, last) if orders.search(source[index])}
    broken: set[int] = set()
    for mutation in (*MUTATIONS, *OF_SECONDARY):
        edited = mutated_source(mutation)[unsharded].splitlines()
        for tag, start, stop, _, _ in difflib.SequenceMatcher(None, source, edited, autojunk=False).get_opcodes():
            if tag in {"delete", "replace"}:
                broken.update(range(start, stop))
    assert len(lines) > 10
    assert [source[index].strip() for index in sorted(lines - broken)] == []

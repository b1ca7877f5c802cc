"""What every transport does, each rule over both transports and several numbers of ranks."""

import gc
import itertools
import os
import random
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable import HandleOptions, clip_grad_norm_, full_state_dict, fully_shard, replicate
from composable.comm import Pending, Transport, transport_of
from composable.comm.transport import choose_transport, register_transport, transport_class, transport_names
from composable.errors import ConfigError, DesyncError
from tests.world import RankErrors, on_ranks, run_ranks, run_threads

TRANSPORTS = ["process_group", "shared_memory"]
DTYPES = [torch.float32, torch.bfloat16]

# Elements of a shard.
SMALL, LARGE = 1001, 262_147

each_transport = pytest.mark.parametrize("name", TRANSPORTS)


def make(name: str) -> Transport:
    assert dist.group.WORLD is not None
    return transport_class(name)(dist.group.WORLD)


def slice_of(rank: int, numel: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Return small whole numbers that differ by rank, seed and place: sums of them are exact, also in bf16."""
    numbers = (torch.arange(numel) * (rank + 2) + 7 * rank + seed) % 17 - 8
    return numbers.to(dtype)


def source_of(rank: int, world_size: int, numel: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    return torch.cat([slice_of(rank, numel, dtype, seed=31 * seed + 5 * part) for part in range(world_size)])


def gathered(world_size: int, numel: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    return torch.cat([slice_of(rank, numel, dtype, seed=seed) for rank in range(world_size)])


def reduced(rank: int, world_size: int, numel: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    sources = [source_of(peer, world_size, numel, torch.float64, seed=seed) for peer in range(world_size)]
    return torch.stack(sources).sum(0)[rank * numel : (rank + 1) * numel].to(dtype)


# The four operations


def gather(transport: Transport, dtype: torch.dtype, numel: int) -> None:
    rank, world_size = transport.rank, transport.world_size
    shard = slice_of(rank, numel, dtype)
    buffer = torch.full((world_size * numel,), 99).to(dtype)
    transport.begin_all_gather(buffer, shard, transport.allocate_key()).finish()
    torch.testing.assert_close(buffer, gathered(world_size, numel, dtype), rtol=0, atol=0)
    torch.testing.assert_close(shard, slice_of(rank, numel, dtype), rtol=0, atol=0)


def reduce_to_shards(transport: Transport, dtype: torch.dtype, numel: int) -> None:
    rank, world_size = transport.rank, transport.world_size
    for scale in (1.0, 0.25, 1 / world_size):
        shard = torch.full((numel,), 99).to(dtype)
        source = source_of(rank, world_size, numel, dtype)
        transport.begin_reduce_scatter(source, shard, transport.allocate_key(), scale=scale).finish()
        torch.testing.assert_close(shard, reduced(rank, world_size, numel, dtype) * scale)


def reduce_in_place(transport: Transport, dtype: torch.dtype, numel: int) -> None:
    for scale in (1.0, 0.5, 1 / transport.world_size):
        tensor = slice_of(transport.rank, numel, dtype)
        transport.begin_all_reduce(tensor, transport.allocate_key(), scale=scale).finish()
        total = torch.stack([slice_of(rank, numel, torch.float64) for rank in range(transport.world_size)]).sum(0)
        torch.testing.assert_close(tensor, (total * scale).to(dtype))


def broadcast(transport: Transport, dtype: torch.dtype, numel: int) -> None:
    key = transport.allocate_key()
    for source_rank in range(transport.world_size):
        tensor = slice_of(transport.rank, numel, dtype)
        transport.begin_broadcast(tensor, source_rank, key).finish()
        torch.testing.assert_close(tensor, slice_of(source_rank, numel, dtype), rtol=0, atol=0)


# By operation, what it moves beside float32 and bfloat16.
OPERATIONS: dict[Callable[[Transport, torch.dtype, int], None], tuple[torch.dtype, ...]] = {
    gather: (torch.bool, torch.int8, torch.int16, torch.float16, torch.float8_e4m3fn, torch.complex64),
    reduce_to_shards: (torch.float16, torch.float64, torch.complex64),
    reduce_in_place: (torch.float64, torch.complex64),
    broadcast: (torch.bool, torch.int64, torch.int16),
}


@each_transport
@on_ranks(run=run_ranks, world_size=[1, 2, 3, 4])
def test_every_operation_gives_what_it_says_of_any_dtype_and_size(name: str) -> None:
    transport = make(name)
    assert (transport.rank, transport.world_size) == (dist.get_rank(), dist.get_world_size())
    for operation, others in OPERATIONS.items():
        for dtype, numel in [*itertools.product(DTYPES, (0, SMALL, LARGE)), *itertools.product(others, [5])]:
            operation(transport, dtype, numel)


# Many at once


class Exchange:
    """One buffer's collectives under way, and what must come of them."""

    def __init__(self, transport: Transport, key: int, numel: int, dtype: torch.dtype, seed: int) -> None:
        rank, world_size = transport.rank, transport.world_size
        self.buffer = torch.full((world_size * numel,), 99).to(dtype)
        self.shard = slice_of(rank, numel, dtype, seed=seed)
        self.source = source_of(rank, world_size, numel, dtype, seed=seed)
        self.result = torch.full((numel,), 99).to(dtype)
        self.pendings: list[Pending] = [
            transport.begin_all_gather(self.buffer, self.shard, key),
            transport.begin_reduce_scatter(self.source, self.result, key, scale=0.5),
        ]
        self.expected = (
            gathered(world_size, numel, dtype, seed=seed),
            reduced(rank, world_size, numel, dtype, seed=seed) * 0.5,
        )

    def check(self) -> None:
        torch.testing.assert_close((self.buffer, self.result), self.expected)


def exchange_in_disorder(name: str, rounds: int) -> None:
    transport = make(name)
    numels = [1, LARGE, SMALL, LARGE, 17]
    keys = [transport.allocate_key() for _ in numels]
    assert len(set(keys)) == len(keys)
    # Each rank computes and waits in an order of its own; collectives start in the same order on all.
    chance = random.Random(transport.rank)
    shared_chance = random.Random(0)
    for round_, dtype in itertools.product(range(rounds), DTYPES):
        in_flight = []
        for key, numel in shared_chance.sample(list(zip(keys, numels, strict=True)), len(keys)):
            in_flight.append(Exchange(transport, key, numel, dtype, seed=round_))
            if chance.random() < 0.3:
                side = chance.choice([10, 100, 200])
                torch.mm(torch.ones(side, side), torch.ones(side, side))
            if chance.random() < 0.3:
                chance.choice(in_flight).pendings[chance.randrange(2)].finish()
        # To finish one again changes nothing.
        pendings = 2 * [pending for exchange in in_flight for pending in exchange.pendings]
        chance.shuffle(pendings)
        for pending in pendings:
            pending.finish()
        for exchange in in_flight:
            exchange.check()


@each_transport
@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives_in_flight_together_do_not_mix(name: str, world_size: int) -> None:
    run_ranks(exchange_in_disorder, world_size, name, 2)


@each_transport
@on_ranks(2, run=run_ranks)
def test_user_messages_do_not_reach_the_transport(name: str) -> None:
    transport = make(name)
    key = transport.allocate_key()
    peer = 1 - transport.rank
    # The same peers and the tags that the first key might use, on the user's own group.
    received = [torch.zeros(8) for _ in range(2)]
    works = [dist.irecv(tensor, src=peer, tag=tag) for tag, tensor in enumerate(received)]
    exchange = Exchange(transport, key, LARGE, torch.float32, seed=3)
    works += [dist.isend(torch.full((8,), 50.0 + tag), dst=peer, tag=tag) for tag in range(2)]
    for pending in exchange.pendings:
        pending.finish()
    for work in works:
        assert work is not None
        work.wait()
    exchange.check()
    assert [tensor[0].item() for tensor in received] == [50.0, 51.0]


@each_transport
@on_ranks(3, run=run_ranks)
def test_all_reduces_of_one_key_may_be_under_way_together(name: str) -> None:
    transport = make(name)
    key, size = transport.allocate_key(), transport.world_size
    tensors = [torch.full((5,), transport.rank + 10.0 * one) for one in range(4)]
    first, second = (transport.begin_all_reduce(tensor, key) for tensor in tensors[:2])
    first.finish()
    # The first sum is sent after the second message has been.
    others = [transport.begin_all_reduce(tensor, key) for tensor in tensors[2:]]
    for pending in (*others[::-1], second):
        pending.finish()
    assert [tensor.unique().tolist() for tensor in tensors] == [[3.0 + 10.0 * size * one] for one in range(4)]


# Threads


def in_threads(*calls: Callable[[], object]) -> list[BaseException]:
    """Run each call in a thread of its own, and return their errors."""
    errors: list[BaseException] = []

    def run(call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def train(model: nn.Module, seed: int, steps: int, part: slice) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.randn(dist.get_world_size(), 4, 8, generator=torch.Generator().manual_seed(1000 * seed + step))
        optimizer.zero_grad()
        model(x[part]).pow(2).mean().backward()
        optimizer.step()


def make_and_drop(times: int) -> None:
    for _ in range(times):
        made = fully_shard(small(9))
        made(torch.ones(2, 8)).sum().backward()
        full_state_dict(made)


ANNOTATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "sharded": lambda model: fully_shard(model, policy={nn.Linear}),
    "copies": lambda model: fully_shard(
        model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    ),
    "replicated": replicate,
}


def train_in_two_threads(annotation: str, steps: int) -> None:
    models = [ANNOTATIONS[annotation](small(seed)) for seed in (0, 1)]
    for model in models:
        model(torch.ones(2, 8)).sum().backward()
    rank = dist.get_rank()
    calls = [partial(train, model, seed, steps, slice(rank, rank + 1)) for seed, model in enumerate(models)]
    # A third thread makes other models, and reads and drops them.
    others = [partial(make_and_drop, 2)] if annotation == "sharded" else []
    errors = in_threads(*calls, *others)
    assert not errors, [*map(traceback.format_exception, errors)]
    for seed, model in enumerate(models):
        expected = small(seed)
        train(expected, seed, steps, slice(None))
        for own, plain in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(own.full_tensor() if annotation != "replicated" else own, plain)


@pytest.mark.skipif(
    not transport_class("shared_memory").serves("cpu", "gloo"), reason="the process group is for one thread"
)
@pytest.mark.parametrize("annotation", ANNOTATIONS)
def test_models_may_train_in_threads_of_their_own(annotation: str) -> None:
    run_ranks(train_in_two_threads, 4 if annotation == "copies" else 2, annotation, 60)


CALLS: dict[str, Callable[[nn.Module], object]] = {
    "forward": lambda model: model(torch.ones(2, 8)),
    "read": full_state_dict,
    "clip": lambda model: clip_grad_norm_(model.parameters(), 1.0),
}


def call_during_the_step_of_another_thread(call: str) -> list[list[str]]:
    models = [fully_shard(small(seed), options=HandleOptions(transport="process_group")) for seed in (0, 1)]
    for model in models:
        model(torch.ones(2, 8)).sum().backward()
    told: list[list[str]] = []

    def meanwhile(*_: object) -> None:
        told.append([str(error) for error in in_threads(lambda: CALLS[call](models[1]))])

    models[0][1].register_forward_hook(meanwhile)
    loss = models[0](torch.ones(2, 8)).sum()
    models[0][1].register_full_backward_hook(meanwhile)
    loss.backward()
    # One after the other is right, in any thread.
    assert in_threads(lambda: models[1](torch.ones(2, 8)).sum().backward()) == []
    # A thread that has ended waits for nothing, though an output of it is there.
    outputs: list[torch.Tensor] = []
    assert in_threads(lambda: outputs.append(models[1](torch.ones(2, 8)))) == []
    models[0](torch.ones(2, 8)).sum().backward()
    return told


@pytest.mark.parametrize("call", CALLS)
def test_a_second_thread_in_a_process_group_is_an_error_at_its_call(call: str) -> None:
    for rank, told in enumerate(run_ranks(call_during_the_step_of_another_thread, 2, call)):
        for (error,) in told:
            assert error.startswith("two threads communicate in one process group at once"), error
            assert f"at:  rank {rank}" in error


# Groups


def exchange_in_part_of_the_world(name: str, groups: list[list[int]]) -> tuple[int, int]:
    made = {tuple(ranks): dist.new_group(ranks) for ranks in groups}
    mine = [ranks for ranks in made if dist.get_rank() in ranks]
    transport = transport_class(name)(made[mine[0]])
    for round_ in range(3):
        exchange = Exchange(transport, transport.allocate_key(), (SMALL, LARGE, 1)[round_], torch.float32, seed=round_)
        for pending in exchange.pendings:
            pending.finish()
        exchange.check()
    tensor = torch.tensor([float(dist.get_rank())])
    transport.begin_broadcast(tensor, transport.world_size - 1, transport.allocate_key()).finish()
    assert tensor.item() == mine[0][-1]
    return transport.rank, transport.world_size


@each_transport
def test_groups_that_are_parts_of_the_world(name: str) -> None:
    found = run_ranks(exchange_in_part_of_the_world, 4, name, [[0, 2], [1, 3]])
    assert found == [(0, 2), (0, 2), (1, 2), (1, 2)]


@each_transport
@on_ranks(2, run=run_ranks)
def test_roots_on_one_group_share_a_transport_that_goes_with_it(name: str) -> None:
    group = dist.new_group(list(range(dist.get_world_size())))
    transport = weakref.ref(transport_of(group, name))
    if transport_class(name).is_shared:
        assert transport() is transport_of(group, name) is not transport_of(dist.group.WORLD, name)
    alive = weakref.ref(group)
    dist.barrier()
    dist.destroy_process_group()
    del group
    assert alive() is None and transport() is None


@on_ranks(1, run=run_ranks)
def test_collectives_run_on_the_fake_backend() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    transport = make("process_group")
    key = transport.allocate_key()
    shard, buffer = torch.ones(4), torch.zeros(32)
    transport.begin_all_gather(buffer, shard, key).finish()
    transport.begin_reduce_scatter(buffer, shard, key, scale=1 / 8).finish()
    transport.begin_all_reduce(buffer, key, scale=1 / 8).finish()
    transport.begin_broadcast(buffer, 5, key).finish()


# Numbers


def sum_thirds(name: str, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    transport = make(name)
    # A mean that is within range does not overflow on the way.
    low = torch.full((3 * transport.world_size,), 60_000.0, dtype=torch.float16)
    mean, scale = torch.empty(3, dtype=torch.float16), 1 / transport.world_size
    transport.begin_reduce_scatter(low, mean, transport.allocate_key(), scale=scale).finish()
    assert mean.tolist() == [60_000.0] * 3
    torch.manual_seed(0)
    # Low precision is summed by the transport itself also when it is small.
    numel = LARGE if dtype == torch.float32 else SMALL
    sources = [torch.randn(transport.world_size * numel).to(dtype) for _ in range(transport.world_size)]
    shard = torch.empty(numel, dtype=dtype)
    source = sources[transport.rank].clone()
    transport.begin_reduce_scatter(source, shard, transport.allocate_key(), scale=1 / 3).finish()
    return shard, [whole.chunk(transport.world_size)[transport.rank] for whole in sources]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shared_memory_adds_in_rank_order_and_rounds_once(dtype: torch.dtype) -> None:
    for shard, (first, *others) in run_ranks(sum_thirds, 4, "shared_memory", dtype):
        total = first.float()
        for other in others:
            total = total + other.float()
        assert torch.equal(shard, (total * (1 / 3)).to(dtype))


# Autograd


@each_transport
@on_ranks(3, run=run_ranks)
def test_gathering_again_does_not_count_as_a_change_of_saved_parameters(name: str) -> None:
    transport, numel = make(name), LARGE
    key = transport.allocate_key()
    shard = torch.full((numel,), 2.0)
    buffer = torch.empty(numel * transport.world_size)
    # Shares the buffer's version counter, which autograd compares.
    leaf = buffer.detach()[:4].requires_grad_()
    transport.begin_all_gather(buffer, shard, key).finish()
    version = leaf._version
    loss = (leaf * leaf).sum()
    # Between forward and backward the storage is freed and filled again.
    storage = buffer.untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(nbytes)
    transport.begin_all_gather(buffer, shard, key).finish()
    assert leaf._version == version
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [4.0] * 4


# Trouble


def exchange_once(transport: Transport, key: int) -> None:
    for pending in Exchange(transport, key, LARGE, torch.float32, seed=0).pendings:
        pending.finish()


def leave_a_peer_alone(name: str) -> None:
    transport = make(name)
    key = transport.allocate_key()
    exchange_once(transport, key)
    if transport.rank == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match=r"(?i)connection|closed|reset"):
        exchange_once(transport, key)


@each_transport
def test_a_peer_that_dies_is_an_error_and_no_hang(name: str) -> None:
    with pytest.raises(RankErrors) as caught:
        run_ranks(leave_a_peer_alone, 2, name)
    assert sorted(caught.value.errors) == [1]


# Choice


@pytest.mark.parametrize(
    ("device_type", "backend", "hosts", "expected"),
    [
        ("cpu", "gloo", (0,) * 1, "process_group"),
        ("cpu", "gloo", (0,) * 2, "shared_memory"),
        ("cpu", "gloo", (0,) * 16, "shared_memory"),
        ("cpu", "gloo", (0,) * 17, "process_group"),
        ("cpu", "cpu:gloo,cuda:nccl", (0,) * 2, "shared_memory"),
        ("cpu", "cpu:mpi,cuda:gloo", (0,) * 2, "process_group"),
        ("cpu", "mpi", (0,) * 2, "process_group"),
        ("cpu", "fake", (0,) * 2, "process_group"),
        ("cuda", "nccl", (0,) * 2, "process_group"),
        ("cuda", "gloo", (0,) * 2, "process_group"),
        ("cuda", "cpu:gloo,cuda:nccl", (0,) * 2, "process_group"),
        ("cpu", "gloo", (0, 1), "process_group"),
        ("cpu", "gloo", (0, 0, 0, 1), "process_group"),
    ],
)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_transport_follows_device_backend_hosts_and_processor(
    device_type: str,
    backend: str,
    hosts: tuple[int, ...],
    expected: str,
    machine: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("sys.platform", "linux")
    if machine != "x86_64":
        expected = "process_group"
    assert choose_transport(device_type, backend, hosts) == expected
    # Ranks that are threads, or that have found that they cannot map each other's memory.
    assert choose_transport(device_type, backend, hosts, may_map=False) == "process_group"


def test_a_transport_that_is_unknown_or_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="transport 'shared_memory' moves CPU tensors over gloo"):
        choose_transport("cuda", "nccl", (0,), "shared_memory")
    for name in ("pigeon", "point_to_point"):
        with pytest.raises(ConfigError) as caught:
            choose_transport("cpu", "gloo", (0,), name)
        fix = "pass one of 'auto', 'process_group', 'shared_memory'"
        assert str(caught.value) == f"transport is {name!r}\n  fix: {fix}"


class Unfinished(Transport):
    name = "unfinished"
    begin_all_gather = begin_reduce_scatter = Transport.begin_all_gather


class Unnamed(transport_class("process_group")):  # type: ignore[misc]  # a class that is computed
    pass


@pytest.mark.parametrize(
    ("transport", "lacking"),
    [
        (Unfinished, "begin_all_gather, begin_all_reduce, begin_broadcast, begin_reduce_scatter"),
        (Unnamed, "a name of its own"),
    ],
)
def test_a_transport_that_lacks_something_is_refused_where_it_is_registered(transport: Any, lacking: str) -> None:
    with pytest.raises(ConfigError) as caught:
        register_transport(transport)
    assert caught.value.what == f"the transport {transport.__name__} lacks {lacking}"
    assert transport_names() == ["process_group", "shared_memory"]


def start_in_a_closed_one(name: str) -> str:
    transport = make(name)
    exchange_once(transport, transport.allocate_key())
    transport.closed_because = ("    rank 0: is elsewhere",)
    tensor = torch.zeros(2 * transport.world_size)
    for begin in (
        lambda: transport.begin_all_gather(tensor, torch.zeros(2), 0),
        lambda: transport.begin_reduce_scatter(tensor, torch.zeros(2), 0),
        lambda: transport.begin_all_reduce(tensor, 0),
        lambda: transport.begin_broadcast(tensor, 0, 0),
    ):
        with pytest.raises(DesyncError) as caught:
            begin()
    assert not transport.in_flight
    return str(caught.value)


@each_transport
def test_nothing_is_started_once_the_ranks_have_diverged(name: str) -> None:
    run = run_ranks if transport_class(name).maps_memory else run_threads
    for rank, text in enumerate(run(start_in_a_closed_one, 2, name)):
        assert "will never come\n    rank 0: is elsewhere\n" in text and f"at:  rank {rank}" in text


# CUDA


@pytest.fixture
def nccl() -> Iterator[Transport]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield make("process_group")
    dist.destroy_process_group()


@pytest.mark.cuda
def test_collectives_run_on_the_stream_of_the_caller(nccl: Transport) -> None:
    shard, buffer, result = (torch.zeros(1 << 20, device="cuda") for _ in range(3))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        shard.fill_(3.0)
        nccl.begin_all_gather(buffer, shard, 0).finish()
        nccl.begin_reduce_scatter(buffer, result, 0, scale=0.5).finish()
    torch.cuda.current_stream().wait_stream(stream)
    assert result.unique().tolist() == [1.5]


def groups_that_stay(annotate: str) -> list[bool]:
    """Return, of each of four worlds one after the other, whether its group is alive in the end."""
    store, groups = dist.PrefixStore("worlds", dist.distributed_c10d._get_default_store()), []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()  # The other rank may still be connecting.
    dist.destroy_process_group()
    for number in range(4):
        dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=world_size)
        groups.append(weakref.ref(dist.group.WORLD))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if annotate == "replicate":
            replicate(model)
        elif annotate == "by hand":
            fully_shard(model[0])
            fully_shard(model)
        else:
            fully_shard(model, policy={nn.Linear}, strategy=annotate)
        model(torch.ones(2, 4)).sum().backward()
        dist.barrier()
        dist.destroy_process_group()
    del model
    gc.collect()
    return [group() is not None for group in groups]


@pytest.mark.parametrize("annotate", ["replicate", "by hand", "FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD"])
def test_annotations_keep_no_group_of_a_world_that_is_gone(annotate: str) -> None:
    # torch itself may keep the last one, and so does the mesh of hosts.
    assert [found[:-1] for found in run_ranks(groups_that_stay, 2, annotate)] == [[False] * 3] * 2

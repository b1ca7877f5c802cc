"""Runs a function on ranks that are threads.

    def add_ranks(rank: int) -> float:
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        return total.item()

    assert simulate(2, add_ranks) == [1.0, 1.0]

Only one rank runs at a time, so every run is the same, and a run that cannot go on ends at once.
"""

import ctypes
import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from composable.errors import ConfigError, UsageError
from composable.ground.names import check_int
from composable.ground.torch_private import (
    PrefixStore,
    Store,
    TorchWorld,
    forget_meshes,
    register_group,
    torch_keeps_groups_by_thread,
)
from composable.testing.device_streams import SimulatedDevice, on_device
from composable.testing.process_group import Fault, FaultPlan, SimulatedGroup, SimulatedRank
from composable.testing.rendezvous import Board
from composable.testing.turn_scheduler import LEFT, ProcessState, TurnScheduler, Unwound, taking_turns

T = TypeVar("T")


class _Simulations:
    """The simulations of this process.

    Attributes:
        running: Held while a simulation runs: torch is changed for one at a time.
        numbers: Numbers for ranks, each used once.
    """

    def __init__(self) -> None:
        self.running = threading.Lock()
        self.numbers = itertools.count(1)


_SIMULATIONS = _Simulations()
# How long a stuck rank may take to notice that the simulation is over.
UNWIND_S = 2.0


def simulate(
    world_size: int,
    fn: Callable[..., T],
    *args: Any,
    faults: Sequence[Fault] = (),
    seed: int | None = None,
    timeout_s: float = 60.0,
    ranks_per_host: int | None = None,
    device: Any = "cpu",
    adverse: bool = False,
    **kwargs: Any,
) -> list[T]:
    """Call ``fn(rank, *args, **kwargs)`` on ``world_size`` ranks, each a thread, and return all results.

    Inside, torch.distributed is initialised, with CPU collectives that behave as gloo's. Each rank has its own
    random generators, default dtype and warning filters, as in a process, which start as the caller's are now. Global
    variables, environment variables and objects from outside ``fn`` are shared: make models inside ``fn``.

    On a ``device``, all ranks share it. Each has a current stream of its own, and collectives of its tensors behave as
    NCCL's: they run on a stream of the group, and the host goes on; it waits only until the other ranks have made their
    calls. Backwards run in the thread of the rank, so that one rank can wait for another in them.

    Args:
        world_size: How many ranks.
        fn: The function that each rank runs.
        *args: Passed to ``fn`` after the rank; the same objects on all ranks.
        faults: The faults to cause: late ranks or messages, lost messages, calls that raise.
        seed: Varies the order in which ranks take turns. The same seed gives the same order; without one, a rank
            runs until it has to wait.
        timeout_s: How long all ranks together may take.
        ranks_per_host: How many ranks share a host, as ``HYBRID_SHARD`` without a mesh sees it; ``None``: all do.
        device: The device that ranks share, such as ``"cuda"`` or ``torch.device("cuda", 1)``.
        adverse: On a device, collectives start about a millisecond late, and buffers are NaN from when they get memory,
            also that of freed ones, until they are filled: where a wait is missing, numbers become wrong.
        **kwargs: Passed to ``fn``.

    Raises:
        DesyncError: Every rank that is left waits for another one, or ranks meet in different collectives.
        TimeoutError: A rank has not ended in time; the message says where it is.
        ConfigError: A wrong argument.
        UsageError: A simulation is running in this process, or a fault has met no call.
        BaseException: The error of the first rank that raised; the other ranks stop where they wait for that rank.
    """
    options: dict[str, Any] = {"faults": faults, "seed": seed, "timeout_s": timeout_s, "ranks_per_host": ranks_per_host}
    outcome = run(world_size, fn, *args, device=device, adverse=adverse, **options, **kwargs)
    if outcome.errors:
        rank, error = next(iter(outcome.errors.items()))
        if sys.version_info >= (3, 11):
            error.add_note(_note(rank, outcome))
        raise error
    return [outcome.results[rank] for rank in range(world_size)]


@dataclass
class Outcome:
    """The outcome of a simulation; ranks that neither returned nor raised were unwound.

    Attributes:
        results: Results by rank.
        errors: Errors by rank, the first one first.
    """

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)


def run(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    faults: Sequence[Fault] = (),
    seed: int | None = None,
    timeout_s: float = 60.0,
    ranks_per_host: int | None = None,
    device: Any = "cpu",
    adverse: bool = False,
    **kwargs: Any,
) -> Outcome:
    """Run a function on ranks as ``simulate`` does, but return the errors of ranks too.

    Raises:
        TimeoutError: A rank has not ended in time.
        ConfigError: A wrong argument.
        UsageError: A simulation is running, or a fault has met no call.
    """
    check_int("world_size", world_size, 1, fix="pass the number of ranks, 1 or more")
    on_host = world_size if ranks_per_host is None else ranks_per_host
    check_int("ranks_per_host", on_host, 1, fix="pass the number of ranks on each host, or None")
    plan, shared = FaultPlan(faults, world_size), SimulatedDevice.of(device)
    if adverse and shared is None:
        raise ConfigError("adverse=True on the CPU, where nothing runs late", fix="pass device=, or leave adverse out")
    if shared is not None:
        shared.is_adverse = adverse
    if not _SIMULATIONS.running.acquire(blocking=False):
        raise UsageError("a simulation is running in this process", fix="run one after the other, not one in another")
    try:
        call = lambda rank: fn(rank, *args, **kwargs)  # noqa: E731
        simulation = _Simulation(world_size, call, plan, seed, timeout_s, on_host, shared)
        outcome = simulation.run()
    finally:
        _SIMULATIONS.running.release()
    if plan.left() and not outcome.errors:
        raise UsageError(
            f"faults met no call: {', '.join(map(str, plan.left()))}", fix="name a rank, call and number that happen"
        )
    return outcome


class RankWorld(TorchWorld):
    """The process groups of one rank.

    Attributes:
        owner: The rank.
        stream: The stream of the rank on the device; ``None`` on the CPU.
    """

    # torch's own are properties that read globals.
    pg_map = pg_names = pg_group_ranks = pg_backend_config = tags_to_pg = pg_to_tag = cast("Any", None)
    group_count = 0

    def __init__(self, owner: SimulatedRank, stream: Any) -> None:
        super().__init__()
        self.owner, self.stream = owner, stream
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}


class RankStore(Store):
    """A store that all ranks share; a rank that waits in it lets the others run."""

    def __init__(self, turns: TurnScheduler) -> None:
        super().__init__()
        self._turns = turns
        self._held: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._held[key] = value

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._held[key]

    def add(self, key: str, number: int) -> int:
        total = int(self._held.get(key, b"0")) + number
        self._held[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self._held for key in keys)

    def compare_set(self, key: str, expected: Any, wanted: Any) -> bytes:
        if self._held.get(key, b"") == expected:
            self._held[key] = wanted
        held: bytes = self._held.get(key, expected)
        return held

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._turns.wait(lambda: self.check(keys), lambda: f"the keys {', '.join(keys)} of the store")


class _Simulation:
    """The threads of ranks, which take turns, their shared objects, and the torch.distributed of each thread."""

    def __init__(
        self,
        world_size: int,
        fn: Callable[[int], Any],
        faults: FaultPlan,
        seed: int | None,
        timeout_s: float,
        ranks_per_host: int,
        device: SimulatedDevice | None,
    ) -> None:
        self._fn = fn
        self._device = device
        self._timeout_s = timeout_s
        ranks = range(world_size)
        threads = [
            threading.Thread(target=self._run_rank, args=(rank,), name=f"rank {rank}", daemon=True) for rank in ranks
        ]
        self._turns = TurnScheduler(threads, seed, () if device is None else device.generators)
        self._store = RankStore(self._turns)
        self._outcome = Outcome()
        self._here = threading.local()
        board = Board(device)
        self._ranks = [
            SimulatedRank(rank, next(_SIMULATIONS.numbers), self._turns, board, faults, ranks_per_host)
            for rank in ranks
        ]

    def run(self) -> Outcome:
        """Run all ranks; when this returns, no thread and no process group is left."""
        callers_state = ProcessState(() if self._device is None else self._device.generators)
        poisoning = nullcontext() if self._device is None else self._device.new_memory_is_poisoned()
        with self._installed(), poisoning:
            try:
                for thread in list(self._turns.threads):
                    thread.thread.start()
                self._turns.start()
                if not self._turns.all_have_ended(self._timeout_s):
                    raise self._timeout()
            except BaseException:
                # Also Ctrl-C.
                self._unwind()
                raise
            finally:
                callers_state.restore()
            self._join()
        if self._device is not None:
            self._device.synchronize()
        return self._outcome

    def _run_rank(self, rank: int) -> None:
        thread, how = self._turns.threads[rank], "returned"
        # The process ends without this thread, but threads that a rank starts are no daemons by default.
        thread.thread._daemonic = False  # type: ignore[attr-defined]  # Python takes this from the thread that starts
        self._turns.enter(thread)
        stream = None if self._device is None else self._device.new_stream()
        try:
            with torch.enable_grad(), on_device(self._device, stream), self._default_group(self._ranks[rank], stream):
                self._outcome.results[rank] = self._fn(rank)
        except Unwound:
            how = "been unwound"
        except BaseException as error:  # SystemExit and a test's own failures too
            self._outcome.errors[rank] = error
            thread.has_raised, how = True, f"raised {type(error).__name__}"
        finally:
            self._turns.end(thread, how)

    def _timeout(self) -> TimeoutError:
        if self._turns.is_idle:
            return TimeoutError(f"the simulation has not ended after {self._timeout_s:g} s\n{self._turns.doing()}")
        holder = self._turns.holder
        frame = sys._current_frames().get(holder.thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame else "(the thread has ended)"
        return TimeoutError(
            f"the simulation has not ended after {self._timeout_s:g} s: rank {holder.rank} is stuck in\n{stack}"
        )

    def _unwind(self) -> None:
        self._turns.unwind_all()
        thread = self._turns.holder.thread
        if thread.ident is not None and thread.is_alive() and not self._turns.is_idle:
            # Raised as soon as the thread executes Python again.
            ident, error = ctypes.c_ulong(thread.ident), ctypes.py_object(Unwound)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
        if self._turns.all_have_ended(UNWIND_S):
            self._join()

    def _join(self) -> None:
        for thread in self._turns.threads:
            if thread.ended != LEFT:
                thread.thread.join()

    # What torch.distributed keeps for each process, kept for each rank's thread.

    def _world_here(self) -> RankWorld | None:
        """Return the process groups of the calling thread, if it is a rank's."""
        return getattr(self._here, "world", None)

    def _number_here(self) -> int | None:
        world = self._world_here()
        return None if world is None else world.owner.number

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Give each rank's thread process groups of its own for this context."""
        with (
            torch_keeps_groups_by_thread(self._world_here, self._new_group, self._number_here),
            taking_turns(self._turns, self._world_here, self._adopted),
        ):
            try:
                yield
            finally:
                forget_meshes()

    def _adopted(self, world: RankWorld) -> AbstractContextManager[None]:
        """Let the calling thread, which a rank has started, use the groups and the stream of that rank."""
        self._here.world = world
        for group, name in world.pg_names.items():
            register_group(name, group)
        return on_device(self._device, world.stream)

    @contextmanager
    def _default_group(self, rank: SimulatedRank, stream: Any) -> Iterator[None]:
        """Make the calling thread the thread of ``rank``, with a default process group."""
        self._here.world = RankWorld(rank, stream)
        backend = "gloo" if self._device is None else self._device.backend
        hook, count, timeout = sys.excepthook, len(self._ranks), timedelta(seconds=self._timeout_s)
        try:
            dist.init_process_group(backend, store=self._store, rank=rank.rank, world_size=count, timeout=timeout)
            # torch's hook would put the rank before errors of the whole process.
            sys.excepthook = hook
            yield
        finally:
            sys.excepthook = hook
            if dist.is_initialized():
                dist.destroy_process_group()
            self._here.world = None

    def _new_group(
        self,
        world: RankWorld,
        group_size: int,
        group_rank: int,
        ranks: list[int],
        backend: str,
        store: Store,
        group_name: str,
        backend_options: Any = None,
        timeout: timedelta | None = None,
        pg_tag: str | None = None,
        device_id: Any = None,
        group_desc: str | None = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        """Make a process group as torch's ``_new_process_group_helper`` does, in a thread that has ``world``."""
        if group_name in world.pg_names.values():
            raise ValueError(f"there is a process group called {group_name!r} already")
        members = list(ranks) or list(range(group_size))
        if world.owner.rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        tag = f"user:{pg_tag}" if pg_tag else f"ptd:{group_name}"
        if pg_tag:
            # The same tag and the same ranks mean the same group.
            for group in world.tags_to_pg.get(tag, []):
                if list(world.pg_group_ranks[group]) == members:
                    return group, world.pg_map[group][1]
        key = world.owner.board.key_of_new_group(world.owner.rank, group_name, members)
        group = SimulatedGroup(
            world.owner, key, str(backend), timeout or timedelta(minutes=30), group_desc or "undefined"
        )
        group_store = PrefixStore(f"{group_name}/", store)
        world.pg_map[group] = (backend, group_store)
        world.pg_names[group] = group_name
        world.pg_backend_config[group] = str(dist.distributed_c10d.BackendConfig(dist.Backend(backend)))
        for name in (tag, *([] if pg_tag else [""])):
            world.tags_to_pg.setdefault(name, []).append(group)
        world.pg_to_tag[group] = tag
        register_group(group_name, group)
        return group, group_store


def _note(rank: int, outcome: Outcome) -> str:
    others = [f"rank {other} {type(error).__name__}" for other, error in outcome.errors.items() if other != rank]
    return f"raised on rank {rank}" + (f"; later raised: {', '.join(others)}" if others else "")

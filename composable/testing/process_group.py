"""A process group of threads, with faults on request.

A call deposits its tensors and returns. Values move when the last rank has called, so results of
``async_op=True`` come as late as possible. torch has renamed some methods, so some have two names here.
"""

# mypy: disable-error-code="override, assignment, call-arg"
# (each method takes only the form of arguments that torch.distributed uses)

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composable.errors import ConfigError, UsageError
from composable.ground.torch_private import graph_collectives
from composable.testing.rendezvous import Board, Call, CollectivePart, GroupKey, Rendezvous, Transfer
from composable.testing.turn_scheduler import TurnScheduler

Tensors = Sequence[torch.Tensor]

OPS = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)


@dataclass(frozen=True)
class Delay:
    """A fault: the rank's message leaves late, after ``turns`` turns of the ranks, or when no rank can go on.

    Attributes:
        turns: How late, counted in turns of all ranks; there is no time in a simulation.
    """

    turns: int = 1


@dataclass(frozen=True)
class Drop:
    """A fault: the rank's message is never sent. Ranks that wait get a ``DesyncError`` once no rank can go on."""


@dataclass(frozen=True)
class Raise:
    """A fault: the call raises an error and sends nothing.

    Attributes:
        error: The error.
    """

    error: BaseException


@dataclass(frozen=True)
class Fault:
    """A fault in one call of one rank.

    Attributes:
        rank: Global rank of the caller.
        op: Which kind of call: one of ``OPS``, or ``"any"``. Every form of an all-gather is an ``"all_gather"``.
        nth: Which of the rank's calls of that kind, from 1, counted over all groups.
        action: What happens to the call.
    """

    rank: int
    op: str
    action: Delay | Drop | Raise
    nth: int = 1


class FaultPlan:
    """The faults of a simulation: each call takes its own, and faults that met no call are left.

    Args:
        faults: The faults to cause.
        world_size: Number of ranks.

    Raises:
        ConfigError: A fault that can meet no call.
    """

    def __init__(self, faults: Sequence[Fault], world_size: int) -> None:
        for fault in faults:
            if fault.rank not in range(world_size) or fault.op not in (*OPS, "any") or fault.nth < 1:
                ops = ", ".join(map(repr, OPS))
                raise ConfigError(
                    f"{fault} meets no call", fix=f"name a rank, a call from 1, and 'any' or one of {ops}"
                )
            if not isinstance(fault.action, Delay | Drop | Raise):
                raise ConfigError(f"action is {fault.action!r}", fix="pass a Delay, a Drop or a Raise")
        self._to_come = list(faults)
        self._calls: Counter[tuple[int, str]] = Counter()

    def take(self, rank: int, op: str) -> Delay | Drop | Raise | None:
        """Count a call and return the action of its fault, if it has one."""
        if not self._to_come:
            return None
        for kind in (op, "any"):
            self._calls[rank, kind] += 1
        for fault in self._to_come:
            if fault.rank == rank and fault.op in (op, "any") and fault.nth == self._calls[rank, fault.op]:
                self._to_come.remove(fault)
                return fault.action
        return None

    def left(self) -> list[Fault]:
        """Return the faults that met no call."""
        return list(self._to_come)


@dataclass(frozen=True, eq=False)
class SimulatedRank:
    """One rank, with the objects that it shares with the others.

    Attributes:
        rank: Its global number.
        number: A number that no other rank of any simulation in this process has.
        turns: The scheduler of the ranks' threads.
        board: The collectives and messages that are under way.
        faults: The faults to cause.
        ranks_per_host: How many ranks share each host that is simulated.
    """

    rank: int
    number: int
    turns: TurnScheduler
    board: Board
    faults: FaultPlan
    ranks_per_host: int


class SimulatedWork(dist.Work):
    """The work of one call: a rank's part of a collective, or one end of a message."""

    def __init__(
        self, owner: SimulatedRank, pending: Rendezvous | Transfer, shown: str, results: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self._owner = owner
        self._pending = pending
        self._shown = shown
        self._results = results

    def describe(self) -> str:
        """Describe the call, and name the ranks that have not made its group."""
        absent = ", ".join(map(str, self._owner.board.ranks_without(self._pending.group)))
        return self._shown + (f" (not made on rank {absent})" if absent else "")

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._owner.turns.wait(lambda: self._pending.is_over, self.describe)
        self._pending.raise_failure(self._owner.rank)
        device = self._owner.board.device
        if device is not None and self._pending.done is not None:
            device.wait_for(self._pending.done)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if not self._pending.is_over:
            # Else a rank that asks in a loop would ask for ever.
            self._owner.turns.let_others_run()
        return self._pending.is_over and (self._pending.done is None or bool(self._pending.done.query()))

    def is_success(self) -> bool:
        return self._pending.is_over and not self._pending.failure

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._results

    def get_future(self) -> torch.futures.Future[Any]:
        # A future's callbacks would run in the thread of the rank that arrives last.
        self.wait()
        devices: Any = list({one.device for one in self._results if one.device.type != "cpu"})
        future: torch.futures.Future[Any] = torch.futures.Future(devices=devices)
        future.set_result(self._results)
        return future

    def source_rank(self) -> int:
        assert isinstance(self._pending, Transfer), "collectives have no source"
        return self._pending.peer

    _source_rank = source_rank


class SimulatedGroup(dist.ProcessGroup):
    """One rank's end of a process group.

    Args:
        owner: The rank.
        key: The group, the same on all its ranks.
        backend: The name of its backend.
        timeout: The timeout that it reports; no call here waits that long.
        description: Its purpose, in a few words.
    """

    def __init__(self, owner: SimulatedRank, key: GroupKey, backend: str, timeout: timedelta, description: str) -> None:
        self._own = key.ranks.index(owner.rank)
        super().__init__(self._own, len(key.ranks))
        self._owner = owner
        self._key = key
        self._backend_name = backend
        self._description = description
        self._calls = 0
        self._stand_in = SimpleNamespace(
            options=SimpleNamespace(_timeout=timeout), supports_coalescing=False, supports_splitting=False
        )
        # The calls so far, while calls are being coalesced.
        self._coalesced: list[SimulatedWork] | None = None

    def __repr__(self) -> str:
        return f"SimulatedGroup({self._key}, rank {self._own})"

    # Properties that torch reads.

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return self._backend_name

    def name(self) -> str:
        return self._backend_name

    @property
    def hosts(self) -> list[str]:
        """The name of the host of each rank, in the order of the group, as ``hosts_of`` reads it."""
        return [str(rank // self._owner.ranks_per_host) for rank in self._key.ranks]

    @property
    def group_name(self) -> str:
        return self._key.name

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        device = self._owner.board.device
        types = ["cpu"] * _serves_host(self._owner, self._backend_name)
        types += [device.device.type] if device is not None and self._backend_name != "gloo" else []
        return list(map(torch.device, dict.fromkeys(types)))

    def _get_backend(self, device: torch.device) -> Any:
        return self._stand_in

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def set_timeout(self, timeout: timedelta) -> None:
        self._stand_in.options._timeout = timeout

    def shutdown(self) -> None:
        pass

    def abort(self) -> None:
        pass

    # Collectives of one tensor, or of one tensor for each rank.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        reduction = _reduction_of(opts)
        return self._call(
            "all_reduce", [CollectivePart([one], [one], one) for one in tensors], opts, reduction=reduction
        )

    def reduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        parts = [CollectivePart([one], [one], one) for one in tensors]
        return self._call("reduce", parts, opts, reduction=_reduction_of(opts), root=opts.rootRank)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        root = 0 if opts is None else opts.rootRank
        return self._call("broadcast", [CollectivePart([one], [one], one) for one in tensors], opts, root=root)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._call("all_gather", [self._gathered(out, one) for out, one in zip(outputs, inputs)], opts)

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        out: Tensors = outputs[0] if outputs else ()
        return self._call("gather", [CollectivePart(inputs, out, inputs[0])], opts, root=opts.rootRank)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> dist.Work:
        sources: Tensors = inputs[0] if inputs else ()
        return self._call("scatter", [CollectivePart(sources, outputs, outputs[0])], opts, root=opts.rootRank)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> dist.Work:
        parts = [self._scattered(out, sources) for out, sources in zip(outputs, inputs)]
        return self._call("reduce_scatter", parts, opts, reduction=_reduction_of(opts))

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self._call("all_to_all", [CollectivePart(inputs, outputs)], opts)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._call("barrier", [])

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        self._call("barrier", []).wait()

    # Collectives of one tensor with a slice for each rank.

    def all_gather_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        return self._call("all_gather", [self._gathered(self._slices(output), source)], opts)

    def reduce_scatter_single(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> dist.Work:
        part = self._scattered(output, self._slices(source))
        return self._call("reduce_scatter", [part], opts, reduction=_reduction_of(opts))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        return self._call(
            "all_to_all", [CollectivePart(self._rows(source, input_sizes), self._rows(output, output_sizes))], opts
        )

    # Several tensors in one call.

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def allgather_coalesced(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> dist.Work:
        by_tensor = [[of_rank[index] for of_rank in outputs] for index in range(len(inputs))]
        return self.allgather(by_tensor, inputs, opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self.allgather([self._slices(out) for out in outputs], inputs, opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work:
        return self.reduce_scatter(outputs, [self._slices(one) for one in inputs], opts)

    def _start_coalescing(self, device: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return _Several(works)

    # Messages.

    def send(self, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        return self._message(tensors[0], peer, tag, is_send=True)

    def recv(self, tensors: Tensors, peer: int, tag: int) -> dist.Work:
        return self._message(tensors[0], peer, tag, is_send=False)

    def recv_anysource(self, tensors: Tensors, tag: int) -> dist.Work:
        return self._message(tensors[0], -1, tag, is_send=False)

    # Names that older or newer releases of torch call.

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _call(
        self, op: str, parts: Sequence[CollectivePart], opts: Any = None, *, reduction: str = "", root: int = -1
    ) -> SimulatedWork:
        tensors = [one for part in parts for one in (*part.inputs, *part.outputs)]
        owner, board = self._owner, self._owner.board
        call = Call(op, parts, reduction, root, _mark(owner, self._backend_name, tensors))
        action = self._enter(op)
        self._calls += 1
        pending = board.rendezvous(self._key, self._calls)
        self._send(action, lambda: board.arrive(pending, self._own, call))
        shown = f"{call}, collective {self._calls} of {self._key}{_note(action)}"
        work = self._started(SimulatedWork(owner, pending, shown, [out for part in parts for out in part.outputs]))
        if call.mark is not None and self._coalesced is None and not getattr(opts, "asyncOp", True):
            # Such a call of NCCL runs on the current stream: what the stream gets next comes after it.
            work.wait()
        return work

    def _message(self, tensor: torch.Tensor, peer: int, tag: int, *, is_send: bool) -> SimulatedWork:
        board = self._owner.board
        action = self._enter("send" if is_send else "recv")
        mark = _mark(self._owner, self._backend_name, [tensor])
        transfer = Transfer(self._key, self._own, peer, tag, tensor, is_send, mark)
        self._send(action, lambda: board.post(transfer))
        return self._started(SimulatedWork(self._owner, transfer, transfer.describe() + _note(action), [tensor]))

    def _enter(self, op: str) -> Delay | Drop | None:
        owner = self._owner
        if owner.turns.thread_here() is None:
            raise UsageError(
                f"{op} in a daemon thread, which takes no turns", at=f"rank {owner.rank}", fix="pass daemon=False"
            )
        action = owner.faults.take(owner.rank, op)
        if isinstance(action, Raise):
            raise action.error
        owner.turns.let_others_run(always=False)
        return action

    def _send(self, action: Delay | Drop | None, arrive: Any) -> None:
        if action is None:
            arrive()
        elif isinstance(action, Delay):
            self._owner.turns.later(action.turns, arrive)

    def _started(self, work: SimulatedWork) -> SimulatedWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _gathered(self, outputs: Tensors, source: torch.Tensor) -> CollectivePart:
        self._check("all_gather", source, outputs)
        return CollectivePart([source], outputs, source)

    def _scattered(self, output: torch.Tensor, sources: Tensors) -> CollectivePart:
        self._check("reduce_scatter", output, sources)
        return CollectivePart(sources, [output], output)

    def _check(self, op: str, own: torch.Tensor, slices: Tensors) -> None:
        if len(slices) != self.size():
            raise ValueError(f"{op} of {len(slices)} tensors among {self.size()} ranks")
        if any(one.numel() != own.numel() or one.dtype != own.dtype for one in slices):
            shown = [list(one.shape) for one in slices]
            raise ValueError(f"{op} between {list(own.shape)} {own.dtype} and {shown} {slices[0].dtype}")

    def _slices(self, tensor: torch.Tensor) -> Tensors:
        numel, rest = divmod(tensor.numel(), self.size())
        if rest:
            raise ValueError(f"{list(tensor.shape)} is no whole number of slices for {self.size()} ranks")
        flat = tensor.detach().view(-1)
        return [flat.narrow(0, rank * numel, numel) for rank in range(self.size())]

    def _rows(self, tensor: torch.Tensor, sizes: Sequence[int]) -> Tensors:
        rows = tensor.shape[0] if tensor.ndim else 0
        slices: Tensors = tensor.detach().split(list(sizes) or [rows // self.size()] * self.size())
        return slices


class _Several(dist.Work):
    """The work of several coalesced calls."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _serves_host(owner: SimulatedRank, backend: str) -> bool:
    return owner.board.device is None or backend == "gloo" or "cpu:" in backend


def _mark(owner: SimulatedRank, backend: str, tensors: Tensors) -> Any:
    """Return an event after the device's work on ``tensors`` [any] so far; ``None``: they lie on the host."""
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            graph_collectives.wait_tensor(tensor)  # Raises for sharded tensors, as torch's groups do by an operator.
    mark = None if owner.board.device is None else owner.board.device.mark(tensors)
    if mark is None and tensors and not _serves_host(owner, backend):
        raise RuntimeError("No backend type associated with device type cpu")
    return mark


def _reduction_of(opts: Any) -> str:
    if opts is None:
        return "sum"
    # The options hold an object that wraps the member of the enumeration.
    name = str(getattr(opts.reduceOp, "op", opts.reduceOp)).rpartition(".")[2].lower()
    if name == "premul_sum":
        raise UsageError("PREMUL_SUM is not simulated", fix="multiply before a SUM")
    return name


def _note(action: Delay | Drop | None) -> str:
    return " (a fault dropped its message)" if isinstance(action, Drop) else ""

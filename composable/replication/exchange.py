"""Messages of a reducer: buckets, and flags for errors.

A bucket is averaged by an all-reduce, or by a communication hook.

Behind the gradients of the last bucket lie *flags*: one per parameter, set by the ranks that have a gradient for it;
and for each rank two numbers: its complaint, zero if it has none, and how often it ran the modules since the last
average. The all-reduce adds the flags up. So, without one more collective, every rank learns which parameters no rank
used, and of errors on other ranks.
"""

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from composable.comm import Grid, Pending, Transport, wait_for_hook
from composable.engine import Listeners, Registration, Work, reduced_otherwise
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.ground.names import count_text, described, list_text, ranks_text
from composable.ground.torch_private import autograd_profiler
from composable.replication.buckets import Arrangement, Bucket
from composable.replication.managed import ReducedParam
from composable.replication.options import ReplicateArguments
from composable.replication.rounds import Round, StaticGraph, Stopwatch
from composable.replication.sparse import SparseGradients

_LOG = logging.getLogger("composable")

# Complaints that a rank may send in place of its number of parameters without a gradient.
STOPPED = -1
HOOK_FAILED = -2
GRAPH_CHANGED = -3

# The highest count: bfloat16 holds all integers up to it.
_MOST_RUNS = 256
_MAX_NAMES_SHOWN = 10
# Adds numbers up over all ranks.
_AddUp: TypeAlias = Callable[[Sequence[float]], list[float]] | None
# The longest wait inside backward that may be in vain: a bucket of the default size takes less at 1 Gbit/s.
_LONGEST_WAIT_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 1e-3


class Report(NamedTuple):
    """The flags of all ranks after a round."""

    used: Sequence[float] = ()  # For each parameter, the number of ranks that had a gradient.
    complaints: Sequence[float] = ()  # For each rank, its complaint; 0: it has none.
    # For each rank, how often it ran the modules since the last average; 0: it follows other ranks.
    runs: Sequence[float] = ()


class FlagBlock:
    """Writes and reads the flags of ``count`` parameters in every round, behind the gradients of the last bucket."""

    __slots__ = ("_add_up", "_count", "_late", "_plain", "_rank", "_told", "_world_size", "numel")

    def __init__(self, count: int, rank: int, world_size: int, add_up: _AddUp = None) -> None:
        self.numel = count + 2 * world_size
        self._count = count
        self._rank = rank
        self._world_size = world_size
        self._plain: torch.Tensor | None = None  # The block of a rank that does not complain and ran once.
        self._late: tuple[torch.Tensor, torch.Event] | None = None
        # What has added up the flags of all ranks where blocks have no values, and the sums.
        self._add_up, self._told = add_up, list[float]()

    def write(self, block: torch.Tensor, used: Sequence[bool] | None, complaint: int, runs: int = 1) -> None:
        """Fill ``block`` [numel], the tail of the last bucket, before it is sent.

        ``used`` says for each parameter whether this rank has a gradient; ``None``: all have one, and there is no
        complaint. ``runs``: how often this rank ran the modules since the last average; 0: it follows other ranks.
        """
        count, own_run = self._count, self._count + self._world_size + self._rank
        if self._plain is None or self._plain.dtype != block.dtype or self._plain.device != block.device:
            values = [1] * count + [int(index == own_run) for index in range(count, self.numel)]
            self._plain = torch.tensor(values, dtype=block.dtype, device=block.device)
        block.copy_(self._plain)
        if runs != 1:
            block.narrow(0, own_run, 1).fill_(min(runs, _MOST_RUNS))  # An assignment waits for the device.
        if used is not None:
            block[:count].copy_(torch.tensor(used, dtype=block.dtype))
            block.narrow(0, count + self._rank, 1).fill_(complaint)
        if self._add_up is not None:
            own = [*(used or [True] * count), *[0] * 2 * self._world_size]
            own[count + self._rank], own[own_run] = complaint, runs
            self._told = self._add_up(own)

    def values(self, block: torch.Tensor) -> list[float]:
        """Return the values in ``block`` [numel], for which the host waits."""
        if self._add_up is not None:
            return self._told
        values: list[float] = block.tolist()
        return values

    def report(self, block: torch.Tensor) -> Report:
        """Return the report of ``block`` [numel] after the all-reduce; waits for the device."""
        return self._report(self.values(block))

    def _report(self, values: Sequence[float]) -> Report:
        count, size = self._count, self._world_size
        return Report(values[:count], values[count : count + size], values[count + size :])

    def read(self, block: torch.Tensor) -> Report | None:
        """Return the report of ``block`` [numel], if a rank complains, or ranks differ in how often they ran modules.

        On a device other than the CPU, where reading would stop this thread until the device is
        idle, return the report of the round before, if any. In a CUDA graph nothing is read.
        """
        if self._add_up is not None:
            return None
        if block.device.type == "cpu":
            told = block[self._count :].tolist()
            # The usual case: no complaint, and equal numbers.
            is_plain = not any(told[: self._world_size]) and told.count(told[-1]) == self._world_size
            return None if is_plain else self._notable(block.tolist())
        if block.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        report = None
        if self._late is not None:
            host, event = self._late
            event.synchronize()  # The copy of the round before: long done.
            values = host.tolist()
            values[self._count + self._rank] = 0  # This rank has raised its own complaint already.
            report = self._notable(values)
        host = torch.empty(block.shape, dtype=block.dtype, pin_memory=block.device.type == "cuda")
        host.copy_(block, non_blocking=True)
        event = torch.Event(block.device.type)
        event.record()
        self._late = (host, event)
        return report

    def _notable(self, values: Sequence[float]) -> Report | None:
        report = self._report(values)
        # Ranks that ran the modules different numbers of times since the last average are not always wrong.
        is_out_of_step = len({*report.runs} - {0}) > 1
        return report if any(report.complaints) or is_out_of_step else None


class DebugNotes:
    """Logs the buckets of one reducer, at the levels of ``torch.distributed.get_debug_level()``.

    OFF: nothing. INFO: the buckets, each time they are made. DETAIL: also each bucket that is sent, after the ranks
    have compared it.
    """

    def __init__(self, params: Sequence[ReducedParam], grid: Grid) -> None:
        level = dist.get_debug_level()  # type: ignore[attr-defined]  # torch does not list it as exported
        self.is_off = level == dist.DebugLevel.OFF  # type: ignore[attr-defined]
        self.checks = level == dist.DebugLevel.DETAIL  # type: ignore[attr-defined]
        self._params = params
        self._ranks = grid.everyone
        self._first: Bucket | None = None

    def begin(self, buckets: Sequence[Bucket], number: int) -> None:
        """Log the buckets of backward ``number``, if they are new."""
        if self._first is not buckets[0]:
            self._first = buckets[0]
            ranks = [*self._ranks.numbers]
            _LOG.info("replicate: %d buckets from backward %d on, of ranks %s", len(buckets), number, ranks)
            for bucket in buckets:
                _LOG.info("replicate: %s", self._text(bucket))

    def before_send(self, bucket: Bucket) -> None:
        """Check that all ranks send the same bucket next, else raise ``DesyncError``, and log it. Collective."""
        text = self._text(bucket)
        self._ranks.compare(
            text,
            shown=lambda: text,
            what="the ranks are about to average different buckets",
            fix="run the same modules with the same options on every rank",
        )
        _LOG.info("replicate: send %s", text)

    def _text(self, bucket: Bucket) -> str:
        names = list_text([self._params[index].fqn for index in bucket.param_indices])
        return f"bucket {bucket.index() + 1}, {bucket.sent_bytes} bytes of {bucket.flat.dtype}: {names}"


@dataclass(slots=True, eq=False, repr=False)
class _HookPending:
    """A bucket that a communication hook reduces."""

    exchange: "BucketExchange"
    name: str
    bucket: Bucket
    future: "torch.futures.Future[Any]"

    def finish(self) -> None:
        result: Any = self.bucket.flat.new_zeros(1)  # If there are no averages.
        try:
            what = f"the communication hook {self.name} for bucket {self.bucket.index() + 1}"
            result = wait_for_hook(self.future, what, self.exchange.group)
        except ConfigError as error:
            self.exchange.note_failure(error)
        except RuntimeError as error:
            # A callback has raised. The collective may be done, so this rank goes on; the flags tell the other ranks.
            text = str(error).removeprefix("Got the following error when running the callback: ").partition("\n")[0]
            what = f"the future of the communication hook {self.name} raised {text}"
            self.exchange.note_failure(ConfigError(what, fix="read the error that the future raised"), error)
        self.bucket.take_result(result[0] if isinstance(result, (list, tuple)) else result)

    def is_over(self) -> bool:
        return self.future.done()


class BucketExchange:
    """Averages gradients over some ranks.

    Args:
        params: In ``named_parameters()`` order, equal on all ranks.
        transport: Between these ranks; used for nothing else, since its calls must keep their order.
        grid: These ranks.
        options: The options of the user.
        own_round: The running backward, or the last one.
        stopwatch: Measures some backwards.
        listeners: Hear of the work of this rank.
    """

    def __init__(
        self,
        params: Sequence[ReducedParam],
        transport: Transport,
        grid: Grid,
        options: ReplicateArguments,
        own_round: Round,
        stopwatch: Stopwatch,
        listeners: Listeners,
    ) -> None:
        ranks = grid.everyone
        self.transport = transport
        # The factor of a gradient before it is added to the gradients of the other ranks.
        self.scale = 1.0 / grid.divisor
        # The ranks that have gradients, as the transport counts them; ``None``: all.
        self.running: Sequence[int] | None = None
        # The rank whose buffers all ranks get: the first one, or the last one that has, or had, inputs.
        self.source = 0
        self.group = ranks.group  # The process group of the ranks, which hooks use; ``None``: there is none.
        # Name of the process group that averages in a compiled graph; "": there is one rank.
        self.group_name = "" if ranks.is_alone else ranks.process_group.group_name
        self.hook: Registration | None = None  # The communication hook; ``None``: an all-reduce per bucket.
        self._params = params
        self._numbers = sorted(ranks.numbers)  # In the order of the transport.
        self._options = options
        self._round = own_round
        self._stopwatch = stopwatch
        self._listeners = listeners
        self._has_warned = False
        self._ranks = ranks
        add_up = None if transport.carries_values else self._added_up
        self.flag_block = FlagBlock(len(params), transport.rank, transport.world_size, add_up)
        # Each takes a key of the transport, in this order on every rank.
        self._order_key = transport.allocate_key()
        self._flags_key = transport.allocate_key()
        # Averages the sparse gradients, which lie in no bucket.
        self.sparse = SparseGradients([item.param for item in params if item.is_sparse], transport)
        self.arrangement = Arrangement(params, transport, options, tail_numel=self.flag_block.numel)
        self.notes = DebugNotes(params, grid)  # Logs the buckets of each backward.
        self._pendings: list[Pending] = []
        # The error of the hook in this round; this rank has taken part in the collectives all the same.
        self._failure: ConfigError | None = None
        self._interruption: BaseException | None = None  # Raised after the flags are sent: other ranks wait for them.
        self._wait_s = _LONGEST_WAIT_S

    def name_of(self, key: int) -> str:
        """Return a name, for messages, of the tensors that are exchanged under ``key``."""
        buckets = list(self.arrangement.buckets)
        for bucket in buckets:
            if bucket.key == key:
                names = list_text([self._params[index].fqn for index in bucket.param_indices], 3)
                return f"the all-reduce of bucket {bucket.index() + 1} of {len(buckets)}, gradients of {names}"
        return "the order of gradients" if key == self._order_key else "buffers or flags"

    # The buckets of a round, in order

    def launch(self, bucket: Bucket) -> None:
        """Start the reduction of the next bucket.

        Streams: gradients are copied on the current stream, which the collective waits for.
        """
        # A communication hook averages by itself. A gradient that is stepped inside backward is dropped: no copy then.
        is_view = self._options.gradient_as_bucket_view or self.arrangement.is_stepped
        self._round.gaps += bucket.pack(self.scale if self.hook is None else 1.0, grads_as_views=is_view)
        self._send(bucket)

    def send_zeros(self, most: int | None = None) -> None:
        """Start the reduction of every bucket that was not started, or of ``most`` of them, with zeros as gradients."""
        buckets = self.arrangement.buckets[self._round.sent :]
        for bucket in buckets[:most]:
            bucket.clear()
            self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        if self._stopwatch.is_on:
            self._stopwatch.mark("sent")
        if self.notes.checks:
            self.notes.before_send(bucket)
        start = self._start if self.hook is None else partial(self._start_hook, self.hook)
        if self._listeners.work or autograd_profiler._is_profiler_enabled:
            self._listeners.during(Work.REDUCE, None, f"bucket {bucket.index() + 1}", start, bucket)
        else:
            start(bucket)
        self._round.sent += 1

    def _start(self, bucket: Bucket) -> None:
        if bucket.is_last():
            self._write_flags(bucket.tail)
        if self.transport.world_size > 1:
            self._pendings.append(self.transport.begin_all_reduce(bucket.flat, bucket.key))

    def _start_hook(self, hook: Registration, bucket: Bucket) -> None:
        """Let the hook reduce ``bucket`` without the flags, which are sent in an all-reduce of their own."""
        is_on_host = bucket.flat.device.type == "cpu"
        if is_on_host:
            # Hooks such as PowerSGD start collectives when others complete. Two buckets in flight
            # would start theirs in any order; on an accelerator the order of its stream holds.
            self.finish()
        if hook.takes_bucket:
            future = hook.function(hook.state, bucket)
            if hasattr(future, "wait"):
                self._pendings.append(_HookPending(self, hook.name, bucket, future))
            else:
                what = f"the communication hook returned {described(future)}"
                self.note_failure(ConfigError(what, fix="return a torch.futures.Future of the averages"))
        else:
            averages, wrong = reduced_otherwise(hook, bucket.buffer())
            self.note_failure(wrong)
            bucket.take_result(torch.zeros_like(bucket.buffer()) if averages is None else averages)
        if bucket.is_last():
            if is_on_host:
                try:
                    self.finish()  # The flags report errors of the hook.
                except BaseException as error:  # Ctrl-C
                    self._interruption = error
            self._write_flags(bucket.tail)
            self._pendings.append(self.transport.begin_all_reduce(bucket.tail, self._flags_key))

    def note_failure(self, failure: ConfigError | None, cause: Exception | None = None) -> None:
        """Keep the first error of the communication hook, to be raised when the round has ended."""
        if failure is not None and self._failure is None:
            failure.__cause__ = cause
            self._failure = failure

    def raise_failure(self) -> None:
        """Raise the error of the hook in the round that has ended, if there is one."""
        failure, self._failure = self._failure, None
        if failure is not None:
            failure.within = f"bucket of a module with parameter {self._params[0].fqn!r}"
            raise failure

    def _write_flags(self, block: torch.Tensor) -> None:
        own_round = self._round
        complaint = own_round.complaint
        if self._failure is not None and complaint >= 0:
            complaint = HOOK_FAILED
        used = None
        if complaint or not own_round.is_complete:
            stepped = own_round.stepped  # The gradients of these buckets were dropped.
            used = [
                item.param.grad is not None or bucket.index() < stepped
                for item, bucket in zip(self._params, self.arrangement.bucket_of, strict=True)
            ]
        # Each rank calls experts as often as it likes, and a module around synchronises all of them.
        runs = 0 if own_round.is_led else own_round.forwards or own_round.kept + 1
        self.flag_block.write(block, used, complaint, runs)

    # The end of a round

    def finish(self) -> None:
        """Wait for all reductions that were started."""
        if self._listeners.work or autograd_profiler._is_profiler_enabled:
            self._listeners.during(Work.WAIT_FOR_REDUCE, None, "buckets", self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        interruption, self._interruption = self._interruption, None
        if interruption is not None:
            raise interruption
        for pending in self._pendings:
            pending.finish()
        self._pendings.clear()

    def finish_first(self) -> bool:
        """Wait a short time for the oldest bucket on its way; say whether it is averaged. There is no hook then.

        Other ranks may wait for this rank at another place in its backward: then the wait is in vain, and the next
        wait is shorter. If it is not in vain, the end of backward would have waited as long.
        """
        if self._pendings:
            pending = self._pendings[0]
            end_s, pause_s = time.monotonic() + self._wait_s, _FIRST_PAUSE_S
            while not pending.is_over():
                if time.monotonic() > end_s:
                    self._wait_s /= 4
                    return False
                time.sleep(pause_s)
                pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)
            self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
            self._pendings.pop(0).finish()
        return True

    def forget(self) -> None:
        """Forget the reductions and the errors of a round that is over."""
        self._pendings.clear()
        self._failure = self._interruption = None

    def wait(self) -> tuple[Report | None, list[float] | None]:
        """Wait for all buckets, and put every average where its gradient was.

        Returns the result of ``FlagBlock.read``; and for each parameter how many ranks had a gradient, ``None``: all
        had.
        """
        self.finish()
        self.sparse.average(self.scale)
        # A parameter that an optimizer steps inside backward gets its gradient there.
        is_view = self._options.gradient_as_bucket_view
        buckets = [] if self.arrangement.is_stepped else self.arrangement.buckets
        for bucket in buckets:
            if bucket.casts or not is_view:
                bucket.unpack()
        report = self.flag_block.read(self.flags)
        if self._round.is_complete:
            return report, None
        used = self.flag_block.values(self.flags)
        for bucket in buckets:
            bucket.adopt(used, is_view=is_view)
        return report, used

    @property
    def flags(self) -> torch.Tensor:
        """The flags behind the last bucket [flags], in its dtype."""
        return self.arrangement.buckets[-1].tail

    def agree_on_order(self) -> list[int]:
        """Return the order of arrival on the first rank, with parameters without a gradient at the end. Collective."""
        # An exception may have come between the notes in `seen` and `order`.
        order = list(dict.fromkeys([*self._round.order, *range(len(self._params))]))
        if self.transport.world_size == 1:
            return order
        sent = torch.tensor(order, device=self.flags.device)
        self.transport.begin_broadcast(sent, 0, self._order_key).finish()
        if not self.transport.carries_values:
            first, group = self._ranks.numbers.index(self._numbers[0]), self.transport.groups[0].group_name
            return self._ranks.object_of(first, order, f"order in {group}")
        agreed: list[int] = sent.tolist()
        return agreed

    def _added_up(self, numbers: Sequence[float]) -> list[float]:
        # Each exchange has a group of its own: ranks may use several in any order.
        kind = f"flags in {self.transport.groups[0].group_name}"
        told = self._ranks.exchange(array("d", numbers).tobytes(), kind)
        return [sum(column) for column in zip(*(array("d", one) for one in told), strict=True)]

    # Warnings and errors

    def warn_of(self, report: Report) -> None:
        """Log, once, that ranks ran the modules different numbers of times: a rank may have left out a backward."""
        if self._has_warned:
            return
        self._has_warned = True
        runs = zip(self._numbers, report.runs, strict=True)
        lines = [f"    {ranks_text([rank])}: {round(count)}" for rank, count in runs if count]
        _LOG.warning(
            "ranks had different numbers of forwards or backwards since gradients were last averaged\n%s\n"
            "  at:  %s, module with parameter %r\n  fix: %s",
            "\n".join(lines),
            place_of_rank(),
            self._params[0].fqn,
            "none is needed if these forwards belong to this backward, or to no backward; but if a rank left out a "
            "backward, or was alone in no_sync, ranks now average gradients of different steps: run the same backwards "
            "on every rank, and run forwards without a backward under torch.no_grad()",
        )

    def error_of(self, missing: Sequence[int], report: Report, static: StaticGraph | None) -> UsageError:
        """Return the error of a backward that failed, on this rank or on another one.

        ``missing`` are the parameters that should have got a gradient on this rank, and got none; ``report`` has the
        flags of all ranks; ``static`` is the graph that all backwards were promised to have, if they were.
        """
        fqns, own_rank = [item.fqn for item in self._params], self._numbers[self.transport.rank]
        told = {rank: value for rank, value in zip(self._numbers, report.complaints, strict=False) if rank != own_rank}
        changed = [rank for rank, value in told.items() if value == GRAPH_CHANGED]
        if static is not None and (static.changes or changed):
            return _graph_changed(fqns, static, report.used, changed)
        others = [rank for rank, value in told.items() if value > 0]
        stopped = [rank for rank, value in told.items() if value == STOPPED]
        failed = [rank for rank, value in told.items() if value == HOOK_FAILED]
        lines = []
        if missing:
            names = list_text([fqns[index] for index in missing], _MAX_NAMES_SHOWN)
            lines.append(f"backward ended without a gradient for {count_text(len(missing), 'parameter')}: {names}")
            if others:
                lines.append(f"    so did {ranks_text(others)}, perhaps for other parameters")
        elif others:
            # Flags are added up over the ranks; in bfloat16 the sum may not show a few ranks among many. Gradients of
            # earlier backwards that were not dropped hide these ranks too.
            full = len(self._numbers if self.running is None else self.running) - 0.5
            unused = [fqn for fqn, used in zip(fqns, report.used, strict=False) if used < full]
            names = list_text(unused, _MAX_NAMES_SHOWN) if unused else "some parameters"
            lines.append(f"{ranks_text(others)} ended backward without a gradient for {names}")
        fix = (
            "let every parameter take part in the loss on every rank, freeze those that do not before replicate, "
            "or pass find_unused_parameters=True, which several backwards of one forward need"
            if lines
            else "drop the gradients of this step, and read the error that was raised there"
        )
        if stopped:
            lines.append(f"{ranks_text(stopped)} did not finish backward: an exception stopped it there")
        if failed:
            hook = "" if self.hook is None else f" {self.hook.name}"
            lines.append(
                f"{ranks_text(failed)} got no averages of the right dtype and shape from the communication hook{hook}"
            )
        return UsageError("\n".join(lines), fix=fix)


def _graph_changed(
    fqns: Sequence[str], static: StaticGraph, used: Sequence[float], others: Sequence[int]
) -> UsageError:
    """Return the error for a backward that is not like the first, though it was promised to be."""
    promise = "is not like the first one, though static_graph=True promises it"
    if static.changes:
        shown = [f"{fqns[index]!r} ({count_text(now, 'gradient')}, {then} then)" for index, now, then in static.changes]
        what = f"this backward {promise}: {list_text(shown, _MAX_NAMES_SHOWN, write=str)}"
        if others:
            what += f"\n    nor is that of {ranks_text(others)}"
    else:
        counts = zip(fqns, used, static.used, strict=False)
        elsewhere = [fqn for fqn, now, then in counts if now != then]
        names = f": {list_text(elsewhere, _MAX_NAMES_SHOWN)}" if elsewhere else ""
        what = f"the backward of {ranks_text(others)} {promise}{names}"
    fix = "drop the gradients of this step; use the same parameters in every step, or find_unused_parameters=True"
    return UsageError(what, fix=fix)

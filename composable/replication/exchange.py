"""Messages of a reducer: buckets, with flags behind the last one.

A bucket is averaged by an all-reduce, or by a communication hook.
"""

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from composable.comm import Grid, Pending, Transport, wait_for_hook
from composable.engine import Listeners, Registration, Riders, Work, reduced_otherwise
from composable.errors import ComposableError, ConfigError, UsageError, place_of_rank
from composable.ground.names import described, list_text, ranks_text
from composable.ground.torch_private import autograd_profiler
from composable.replication.buckets import Arrangement, Bucket
from composable.replication.managed import ReducedParam
from composable.replication.options import ReplicateArguments
from composable.replication.reports import GRAPH_CHANGED, HOOK_FAILED, MOST_NAMES, UNUSED, FlagBlock, Report, error_of
from composable.replication.rounds import Round, Stopwatch
from composable.replication.sparse import SparseGradients
from composable.replication.static_graph import StaticGraph

_LOG = logging.getLogger("composable")

# The longest wait inside backward that may be in vain: a bucket of the default size takes less at 1 Gbit/s.
_LONGEST_WAIT_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-5, 1e-3


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
        self.group = ranks.group  # The process group of the ranks, which hooks use; ``None``: there is none.
        # Name of the process group that averages in a compiled graph; "": there is one rank.
        self.group_name = "" if ranks.is_alone else ranks.process_group.group_name
        self.hook: Registration | None = None  # The communication hook; ``None``: an all-reduce per bucket.
        self._params = params
        self._numbers = sorted(ranks.numbers)  # In the order of the transport.
        self._divisor = grid.divisor
        # The rank whose buffers all ranks get: the first one, or the last one that has, or had, inputs.
        self.source = 0
        self.expect(None, None)
        self._options = options
        self._round = own_round
        self._stopwatch = stopwatch
        self._listeners = listeners
        self._has_warned = False
        self.static = StaticGraph(params) if options.static_graph else None  # What the user has promised.
        self._ranks = ranks
        add_up = None if transport.carries_values else self._added_up
        self.flag_block = FlagBlock(len(params), transport.rank, transport.world_size, add_up)
        # Each takes a key of the transport, in this order on every rank.
        self._order_key = transport.allocate_key()
        self._flags_key = transport.allocate_key()
        # Averages the sparse gradients, which lie in no bucket.
        self.sparse = SparseGradients([item.param for item in params if item.is_sparse], transport)
        self.arrangement = Arrangement(params, transport, options, self.static, tail_numel=self.flag_block.numel)
        self.notes = DebugNotes(params, grid)  # Logs the buckets of each backward.
        self._pendings: list[Pending] = []
        # The error of the hook in this round; this rank has taken part in the collectives all the same.
        self._failure: ConfigError | None = None
        self._heard: ComposableError | None = None  # The error of a rider, which all ranks raise.
        self._interruption: BaseException | None = None  # Raised after the flags are sent: other ranks wait for them.
        self._wait_s = _LONGEST_WAIT_S

    def carry(self, riders: Riders) -> None:
        """Let ``riders``, in place of those so far, travel behind the flags, from the next round on. On all ranks."""
        self.flag_block.carry(riders)
        self.arrangement.build(tail_numel=self.flag_block.numel)

    def expect(self, running: Sequence[int] | None, divisor: int | None) -> None:
        """Expect gradients of the ranks ``running`` only, as the transport counts them; divide sums by ``divisor``.

        ``None``: all ranks, and their number.
        """
        self._running = running
        if running is None:
            self.source = 0
        elif running:
            self.source = running[-1]
        # The factor of a gradient before it is added to the gradients of the other ranks.
        self.scale = 1.0 / (divisor or self._divisor)

    def name_of(self, key: int) -> str:
        """Return a name, for messages, of the tensors that are exchanged under ``key``."""
        buckets = list(self.arrangement.buckets)
        for bucket in buckets:
            if bucket.key == key:
                names = list_text([self._params[index].fqn for index in bucket.param_indices], 3)
                return f"the all-reduce of bucket {bucket.index() + 1} of {len(buckets)}, gradients of {names}"
        return "the order of gradients" if key == self._order_key else "buffers or flags"

    # The buckets of a round, in order

    def begin(self, *, synchronises: bool) -> None:
        """Begin a round, or a backward that does not synchronise."""
        if self.arrangement.is_due:
            self.arrangement.build()
        self._round.clear(self.arrangement.buckets, synchronises=synchronises)

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

    def _write_flags(self, block: torch.Tensor) -> None:
        own_round, used = self._round, None
        complaint = own_round.complaint if self._failure is None else HOOK_FAILED  # As this rank raises it.
        if complaint is not None or not own_round.is_complete:
            stepped = own_round.stepped  # The gradients of these buckets were dropped.
            used = [
                item.param.grad is not None or bucket.index() < stepped
                for item, bucket in zip(self._params, self.arrangement.bucket_of, strict=True)
            ]
        # Each rank calls experts as often as it likes, and a module around synchronises all of them.
        runs = 0 if own_round.is_led else own_round.forwards or own_round.kept + 1
        self.flag_block.write(block, used, 0 if complaint is None else complaint.number, runs)

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
        self._failure = self._interruption = self._heard = None

    def wait(self) -> tuple[Report | None, list[float] | None]:
        """Wait for all buckets, and put every average where its gradient was.

        Returns the result of ``FlagBlock.read``; and for each parameter how many ranks had a gradient, ``None``: all
        had.
        """
        self.finish()
        if self.flag_block.riders.members:
            self._heard = self.flag_block.hear(self.flags)
        self.sparse.average(self.scale)
        # A parameter that an optimizer steps inside backward gets its gradient there.
        is_view = self._options.gradient_as_bucket_view
        buckets = [] if self.arrangement.is_stepped else self.arrangement.buckets
        for rider in self.flag_block.riders.adjusting:
            for bucket in buckets:
                rider.adjust(bucket.buffer(), self._divisor)
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

    def raise_failures(self, report: Report | None) -> None:
        """Raise the error of the round that has ended, if there is one: of the hook, of this rank, of another one.

        ``report`` has the flags of all ranks, where they are notable.
        """
        failure, heard, self._failure, self._heard = self._failure, self._heard, None, None
        if failure is not None:
            failure.within = f"bucket of a module with parameter {self._params[0].fqn!r}"
            raise failure
        if report is not None and not any(report.complaints):
            self._warn_of(report)
            report = None
        if self._round.complaint is not None or report is not None:
            raise self._error_of(report or Report())
        if heard is not None:
            raise heard

    def _warn_of(self, report: Report) -> None:
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

    def _error_of(self, report: Report) -> UsageError:
        told = dict(zip(self._numbers, report.complaints, strict=False))
        told.pop(self._numbers[self.transport.rank], None)
        # Flags are added up over the ranks; in bfloat16 the sum may not show a few ranks among many. Gradients of
        # earlier backwards that were not dropped hide these ranks too.
        full = len(self._numbers if self._running is None else self._running) - 0.5
        unused = [item.fqn for item, used in zip(self._params, report.used, strict=False) if used < full]
        names = {
            UNUSED: list_text(unused, MOST_NAMES) or "some parameters",
            HOOK_FAILED: "" if self.hook is None else f" {self.hook.name}",
            GRAPH_CHANGED: "" if self.static is None else self.static.names_of(report.used),
        }
        return error_of(self._round.complaint, told, names)

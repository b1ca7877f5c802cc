"""What a reducer has with the ranks of one transport: its buckets, what sends them, and the tail of the last one."""

from collections.abc import Sequence

import torch

from composable.collectives import Grid, Transport
from composable.replication.arrangement import Arrangement
from composable.replication.bucket import Bucket, BucketOptions, ReducedParam
from composable.replication.complaints import HOOK_FAILED, round_error, warn_out_of_step
from composable.replication.debugging import notes_for_level
from composable.replication.round import Round
from composable.replication.sender import Sender
from composable.replication.sparse import SparseGradients
from composable.replication.static_graph import StaticGraph
from composable.replication.tail import Report, Tail
from composable.replication.timing import Stopwatch
from composable.wording import list_text

__all__ = ["Exchange"]


class Exchange:
    """Averages gradients over some ranks.

    Args:
        params: In ``named_parameters()`` order, equal on all ranks.
        transport: Of these ranks; used for nothing else, since its calls must keep their order.
        grid: These ranks.
        options: What the user chose.
        own_round: The running backward, or the last one.
        stopwatch: Measures some backwards.

    Attributes:
        transport: As given.
        scale: Of a gradient before it is added to those of the other ranks.
        group_name: Of the process group that averages in a graph; "": one rank.
        order_key: Of what is shared beside gradients.
        arrangement: The buckets.
        sender: Starts their reduction.
        sparse: Averages what lies in no bucket.
        notes: Written about each backward; ``None``: none are.
        running: The ranks that have gradients, as the transport has them; ``None``: all.
    """

    __slots__ = (
        "_has_warned",
        "_options",
        "_params",
        "_ranks",
        "_round",
        "_stopwatch",
        "_tail",
        "arrangement",
        "group_name",
        "notes",
        "order_key",
        "running",
        "scale",
        "sender",
        "sparse",
        "transport",
    )

    def __init__(
        self,
        params: Sequence[ReducedParam],
        transport: Transport,
        grid: Grid,
        options: BucketOptions,
        own_round: Round,
        stopwatch: Stopwatch,
    ) -> None:
        ranks = grid.everyone
        self.transport = transport
        self.scale = 1.0 / grid.divisor
        self.running: Sequence[int] | None = None
        self.group_name = "" if ranks.is_alone else ranks.process_group.group_name
        self._params = params
        self._ranks = ranks
        self._options = options
        self._round = own_round
        self._stopwatch = stopwatch
        self._has_warned = False
        self._tail = Tail(len(params), transport.rank, transport.world_size)
        # Each takes a key of the transport, in this order on every rank.
        self.order_key = transport.allocate_key()
        self.sender = Sender(transport)
        self.sparse = SparseGradients([item.param for item in params if item.is_sparse], transport)
        self.arrangement = Arrangement(params, transport, options, tail_numel=self._tail.numel)
        self.notes = notes_for_level(params, ranks)

    def name_of(self, key: int) -> str:
        """Return what is exchanged under ``key``, for messages."""
        buckets = list(self.arrangement.buckets)
        for bucket in buckets:
            if bucket.key == key:
                names = [self._params[index].fqn for index in bucket.param_indices]
                number = f"bucket {bucket.index() + 1} of {len(buckets)}"
                return f"the all-reduce of {number}, gradients of {list_text(names, 3)}"
        return "the order of gradients" if key == self.order_key else "buffers or flags"

    def launch(self, bucket: Bucket) -> None:
        """Start the reduction of the next bucket.

        Streams: gradients are copied on the current one, which the collective waits for.
        """
        # A communication hook averages by itself.
        scale = self.scale if self.sender.hook is None else 1.0
        bucket.pack(scale, grads_as_views=self._grads_as_views)
        self._send(bucket)

    def send_zeros(self) -> None:
        """Start the reduction of every bucket that was not started, with zeros for gradients."""
        while self._round.sent < len(self.arrangement.buckets):
            self.send_zero()

    def send_zero(self) -> None:
        """Start the reduction of the next bucket, with zeros for gradients."""
        bucket = self.arrangement.buckets[self._round.sent]
        bucket.clear()
        self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        if self._stopwatch.is_on:
            self._stopwatch.mark("sent")
        if self.notes is not None:
            self.notes.before_send(bucket)
        self.sender.start(bucket, self._write_tail)
        self._round.sent += 1

    def _write_tail(self, tail: torch.Tensor) -> None:
        complaint = self._round.complaint
        if self.sender.failure is not None and complaint >= 0:
            complaint = HOOK_FAILED
        used = None
        if complaint or not self._round.is_complete:
            stepped = self._round.stepped  # and their gradients dropped
            used = [
                item.param.grad is not None or bucket.index() < stepped
                for item, bucket in zip(self._params, self.arrangement.bucket_of, strict=True)
            ]
        order = self._round.order
        # Experts are called as their ranks like, and a module around synchronises all.
        counts = (0, 0) if self._round.is_led else (self._round.kept + 1, self._round.forwards)
        self._tail.write(tail, used, complaint, order[-1] if order else None, *counts)

    def wait(self) -> tuple[Report | None, list[float] | None]:
        """Wait for all buckets, and put every average where its gradient was.

        Returns:
            What ``Tail.read`` does; and of each parameter, how many ranks had a gradient, ``None``: all had one.
        """
        self.sender.finish()
        self.sparse.average(self.scale)
        # What an optimizer steps inside backward gets its gradients there.
        is_stepped = self.arrangement.is_lazy
        for bucket in () if is_stepped else self.arrangement.buckets:
            if bucket.casts or not self._grads_as_views:
                bucket.unpack()
        report = self._tail.read(self.tail)
        used = None if self._round.is_complete else self.tail.tolist()
        if used is not None and not is_stepped:
            self.arrangement.adopt_averages(used, grads_as_views=self._grads_as_views)
        return report, used

    def wait_for_zeros(self) -> torch.Tensor:
        """Wait for all buckets of a backward that was stopped; returns what the ranks said."""
        self.sender.finish()
        self.sparse.average(self.scale, is_stopped=True)
        return self.tail.clone()

    def went_well(self, values: Sequence[float]) -> bool:
        """Say whether no rank complained; ``values`` is what the ranks said."""
        return not self._tail.is_complaint(values)

    @property
    def tail(self) -> torch.Tensor:
        """What the ranks said with the last bucket."""
        return self.arrangement.buckets[-1].tail

    @property
    def _grads_as_views(self) -> bool:
        # What is stepped inside backward is dropped there: a copy would be for nothing.
        return self._options.grads_as_views or self.arrangement.is_lazy

    def agree_on_order(self) -> list[int]:
        """Return the order in which gradients arrived on the first rank, the others at the end. Collective."""
        order = self._round.full_order()
        if self.transport.world_size == 1:
            return order
        sent = torch.tensor(order, device=self.arrangement.buckets[0].flat.device)
        self.transport.begin_broadcast(sent, 0, self.order_key).finish()
        agreed: list[int] = sent.tolist()
        return agreed

    def share(self, number: float) -> list[float]:
        """Return the number of each rank, in the order of the transport. Collective; no backward is running."""
        numbers = torch.zeros(self.transport.world_size, device=self._ranks.device)
        numbers[self.transport.rank] = number
        self.transport.begin_all_reduce(numbers, self.order_key).finish()
        shared: list[float] = numbers.tolist()
        return shared

    def warn_of(self, report: Report) -> None:
        """Log, once, that ranks had different numbers of forwards or backwards: one may have left out a backward."""
        if not self._has_warned:
            self._has_warned = True
            what, told = ("backward", report.backwards) if report.is_uneven else ("forward", report.forwards)
            counts = zip(sorted(self._ranks.numbers), told, strict=True)
            warn_out_of_step(what, {rank: round(count) for rank, count in counts if count}, self._params[0].fqn)

    def error_of(self, missing: Sequence[int], report: Report, static: StaticGraph | None) -> Exception:
        """Return the error for what went wrong here, or for what did elsewhere."""
        numbers = sorted(self._ranks.numbers)  # As the transport has them.
        last = self._round.order[-1] if self._round.order else None
        own = numbers[self.transport.rank]
        running = numbers if self.running is None else [numbers[place] for place in self.running]
        hook = "" if self.sender.hook is None else f" {self.sender.hook.name}"
        return round_error(self._params, missing, last, report, numbers, own, static, running, hook)

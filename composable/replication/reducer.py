"""Averages the gradients of replicated modules, bucket by bucket as they fill.

A *round* is one backward that synchronises. In it every rank starts the all-reduce of every
bucket exactly once and in the same order: a bucket is started when its own gradients are
there and the bucket before it was started, and whatever is left is started when backward
ends. So ranks whose gradients arrive in another order, or not at all, never wait for each
other in vain.

The last bucket ends with the *tail*: one flag per parameter, set by the ranks that have a
gradient for it, and one number per rank, not zero if that rank complains. It tells every
rank which parameters were unused everywhere, and of errors elsewhere, without a collective
of its own.

What is averaged is the whole ``param.grad``: gradients that backwards without
synchronisation left there, and ones averaged before (equal on all ranks, so averaging them
again changes nothing) need no bookkeeping.

Source: PyTorch Distributed, arXiv 2006.15704.
"""

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from composable.collectives import Grid, Pending, Transport
from composable.errors import UsageError, place_of_rank
from composable.replication.bucket import FIRST_CAP_BYTES, Bucket, BucketOptions, ReducedParam, plan_buckets
from composable.replication.comm_hooks import CommHook, copy_hook
from composable.torch_private import current_autograd_node, will_engine_execute_node
from composable.wording import count_text, list_text, ranks_text

__all__ = ["Reducer"]

_MAX_NAMES_SHOWN = 10
_FIX_UNUSED = (
    "let every parameter take part in the loss on every rank, freeze those that do not before replicate, "
    "or pass find_unused_parameters=True"
)


class _HookPending:
    """A bucket that a communication hook reduces."""

    def __init__(self, bucket: Bucket, future: "torch.futures.Future[Any]") -> None:
        self._bucket = bucket
        self._future = future

    def finish(self) -> None:
        result = self._future.wait()
        self._bucket.take_result(result[0] if isinstance(result, (list, tuple)) else result)


class _EndOfBackward:
    """What autograd runs when a backward ends well, and frees when it ends in any way."""

    __slots__ = ("__weakref__", "_reducer")

    def __init__(self, reducer: "Reducer") -> None:
        self._reducer = reducer

    def __call__(self) -> None:
        self._reducer.end_backward()


class Reducer:
    """Averages the gradients of a set of parameters over the ranks of one transport.

    Args:
        params: In ``named_parameters()`` order, equal on all ranks.
        transport: Of these ranks; used for nothing else, since its calls must keep their order.
        grid: These ranks.
        options: What the user chose.
        after_backward: Queues a function to run at the end of the running backward.

    Attributes:
        buckets: In order of reduction.
        is_open: Whether a backward is running in which a gradient arrived.
        requires_gradient_sync: Whether the next backward is a round; if not, gradients stay local.
        sync_after_context: What that is after the ``no_sync`` that runs; ``None``: none runs.
    """

    def __init__(
        self,
        params: Sequence[ReducedParam],
        transport: Transport,
        grid: Grid,
        options: BucketOptions,
        after_backward: Callable[[Callable[[], None]], None],
    ) -> None:
        self.params = tuple(params)
        self.options = options
        self.requires_gradient_sync = True
        self.sync_after_context: bool | None = None
        self.is_open = False
        self._transport = transport
        self._grid = grid
        self._scale = 1.0 / grid.divisor
        # As the transport has them.
        self._ranks = sorted(grid.everyone.numbers)
        self._after_backward = after_backward
        self._hook: tuple[Any, CommHook] | None = None
        self._lock = threading.RLock()
        self._guard: weakref.ref[_EndOfBackward] | None = None
        self._was_aborted = False
        self._is_closed = False
        self._is_round = True
        self._seen = bytearray(len(params))  # Arrived in this backward.
        self._seen_before = bytearray(len(params))  # Arrived since the last round, without synchronisation.
        self._order: list[int] = []
        self._armed_modules: set[int] = set()
        self._node: Any = None
        self._next = 0
        self._pendings: list[Pending] = []
        self._complaint = 0
        self._late: tuple[torch.Tensor, torch.Event] | None = None
        self._has_final_order = False
        self._next_order: list[int] | None = None
        self._order_key = transport.allocate_key()
        self._hook_tail_key = transport.allocate_key()
        self._bucket_of: list[Bucket] = []
        self.buckets: list[Bucket] = []

    @property
    def has_sound_gradients(self) -> bool:
        """The last backward was not stopped by an exception."""
        return not self._was_aborted

    def copied(self, params: Sequence[ReducedParam], transport: Transport, memo: dict[int, Any]) -> "Reducer":
        """Return a reducer of copied parameters: the same options, order and hook, and buckets of its own.

        Args:
            params: Copies of this one's, in the same order.
            transport: For the copy alone.
            memo: Of the running ``copy.deepcopy``.

        Raises:
            UsageError: A backward is running.
        """
        if self.is_open:
            raise UsageError(
                "a replicated module cannot be copied inside a backward",
                at=place_of_rank(),
                fix="copy it before or after",
            )
        twin = Reducer(params, transport, self._grid, self.options, self._after_backward)
        syncs, after = self.requires_gradient_sync, self.sync_after_context
        twin.requires_gradient_sync = syncs if after is None else after
        twin._seen_before[:] = self._seen_before
        twin._hook = copy_hook(self._hook, memo)
        twin._has_final_order = self._has_final_order
        if self._has_final_order:
            built = [index for bucket in self.buckets for index in bucket.param_indices]
            twin._next_order = self._next_order or built
        return twin

    def close(self) -> None:
        """Average what backwards without synchronisation left, give every gradient memory of its own, free the buckets.

        Collective. No backward is running; one that comes later, of a forward that ran before, is an error.
        """
        self._average_kept_gradients()
        while self.buckets:
            bucket = self.buckets.pop()
            for index, view in zip(bucket.param_indices, bucket.views, strict=True):
                param = self.params[index].param
                if param.grad is view:
                    param.grad = view.clone()
        self._bucket_of.clear()
        self._is_closed = True

    def _average_kept_gradients(self) -> None:
        """Do what the next round would have done, one gradient at a time."""
        device = self.params[0].param.device
        flags = torch.tensor([any(self._seen_before), *(item.param.grad is not None for item in self.params)])
        flags = flags.to(device, torch.float32)
        # The gradients of every parameter go the same way on all ranks, whoever has one.
        self._transport.begin_all_reduce(flags, self._order_key).finish()
        is_any, *has_grad = flags.tolist()
        for item, is_there in zip(self.params, has_grad, strict=True):
            if is_any and is_there:
                if item.param.grad is None:
                    item.param.grad = torch.zeros_like(item.param)
                grad = item.param.grad.detach()
                whole = grad.contiguous()
                self._transport.begin_all_reduce(whole.view(-1), self._order_key, scale=self._scale).finish()
                if whole is not grad:
                    grad.copy_(whole)
        self._seen_before[:] = bytes(len(self.params))

    def arrivals(self) -> Iterator[Callable[[torch.Tensor], None]]:
        """Yield what each parameter must call once its ``grad`` has this backward's gradient in it."""
        return (self._make_arrival(index) for index in range(len(self.params)))

    def arm(self, module_index: int) -> None:
        """Note that the gradient of an output of an annotated module arrives."""
        if not self.is_open:
            self._open()
        if module_index not in self._armed_modules:
            self._armed_modules.add(module_index)
            self._node = current_autograd_node()

    def prepare(self) -> None:
        """Put things right before a forward, if the last backward was stopped by an exception.

        Collective if that backward had started an all-reduce: the ranks that wait for the rest get it.
        """
        if self._was_aborted:
            self._recover()

    def set_hook(self, state: object, hook: CommHook) -> None:
        """Let ``hook(state, bucket)`` reduce every bucket; it gives a future of the averaged buffer.

        Raises:
            UsageError: There is a hook already, or a backward is running.
        """
        if self._hook is not None or self.is_open:
            raise UsageError(
                "a communication hook is registered already" if self._hook else "a backward is running",
                at=place_of_rank(),
                fix="register one hook, before the first backward",
            )
        self._hook = (state, hook)

    def end_backward(self) -> None:
        """End a backward: reduce what is left, and complain about what is missing.

        Raises:
            UsageError: On this or another rank, parameters got no gradient.
        """
        self.is_open = False
        node, self._node = self._node, None
        if not self._order and not _is_whole_backward(node):
            return  # torch.autograd.grad, say: no gradient is due.
        if not self._is_round:
            for index in self._order:
                self._seen_before[index] = 1
            return
        missing = self._find_missing()
        self._complaint = 0 if self.options.find_unused else len(missing)
        with torch.no_grad():
            flags = self._finish_round()
        complaints = flags[len(self.params) :] if flags is not None else []
        if any(complaints) or (missing and not self.options.find_unused):
            self._raise_complaints(missing, complaints, flags or [])

    def _make_arrival(self, index: int) -> Callable[[torch.Tensor], None]:
        # Runs once per parameter and backward: everything it reads is a local of this call, and
        # the lists are changed in place when buckets are rebuilt.
        seen, order, bucket_of = self._seen, self._order, self._bucket_of

        def arrive(_: torch.Tensor) -> None:
            if not self.is_open:
                self._open()
            if seen[index]:
                self._arrive_again(index)
                return
            seen[index] = 1
            order.append(index)
            bucket = bucket_of[index]
            bucket.pending -= 1
            if not bucket.pending:
                self._launch_full()

        return arrive

    def _arrive_again(self, index: int) -> None:
        """Accept a second gradient in one backward as long as the first has not been sent.

        Raises:
            UsageError: It has been.
        """
        if self._is_round and self._bucket_of[index].index() < self._next:
            raise UsageError(
                "a parameter got a second gradient in one backward, after the first was sent to the other ranks",
                at=f"{place_of_rank()}, parameter {self.params[index].fqn!r}",
                fix="use activation checkpointing with use_reentrant=False",
            )

    def _open(self) -> None:
        """Begin a backward."""
        with self._lock:
            if self.is_open:
                return  # Another device's thread was first.
            if self._is_closed:
                raise UsageError(
                    "backward of a forward that ran before the model's annotation was taken off",
                    at=place_of_rank(),
                    fix="run backward before unannotate, or forward again after it",
                )
            if self._was_aborted:
                self._recover()
            with torch.no_grad():
                if self._next_order is not None:
                    self._rebuild(self._next_order)
                    self._next_order = None
                elif not self.buckets:
                    # Which gradients arrive when is known after one round: until then one bucket per dtype and device.
                    in_order, no_bytes = range(len(self.params)), [0] * len(self.params)
                    self._build(plan_buckets(in_order, self._keys(), no_bytes, first_cap_bytes=1, cap_bytes=1))
            self._seen[:] = bytes(len(self.params))
            self._order.clear()
            self._armed_modules.clear()
            self._next = 0
            self._complaint = 0
            for bucket in self.buckets:
                bucket.pending = len(bucket.param_indices)
            self._is_round = self.requires_gradient_sync
            callback = _EndOfBackward(self)
            self._after_backward(callback)
            self._guard = weakref.ref(callback, self._note_end)
            self.is_open = True

    def _note_end(self, guard: "weakref.ref[_EndOfBackward]") -> None:
        """Notice a backward that ended without ``end_backward``: an exception stopped it."""
        if guard is self._guard and self.is_open:
            self.is_open = False
            self._node = None
            self._was_aborted = True

    def _recover(self) -> None:
        """Complete the round of a backward that was stopped, so that no rank waits for this one.

        The gradients in the buckets become zero: what a round that was stopped leaves there is
        of no use, and the user may have set it to zero while it was on its way.
        """
        self._was_aborted = False
        if not self._is_round or not self._next:
            return
        self._complaint = -1
        with torch.no_grad():
            for bucket in self.buckets[self._next :]:
                bucket.flat.zero_()
                self._send(bucket)
            self._finish_pendings()
            for bucket in self.buckets:
                bucket.flat.zero_()
            self._end_round()

    def _launch_full(self) -> None:
        if not self._is_round:
            return
        with self._lock, torch.no_grad():
            while self._next < len(self.buckets) and not self.buckets[self._next].pending:
                self._launch(self.buckets[self._next])

    def _launch(self, bucket: Bucket) -> None:
        """Start the all-reduce of the next bucket.

        Streams: gradients are copied on the current one, which the collective waits for.
        """
        scale = 1.0 if self._hook is not None else self._scale
        bucket.pack(scale, grads_as_views=self.options.grads_as_views)
        self._send(bucket)

    def _send(self, bucket: Bucket) -> None:
        if bucket.is_last():
            self._write_tail(bucket)
        self._next += 1
        if self._hook is not None:
            state, hook = self._hook
            if bucket.flat.device.type == "cpu":
                # Hooks such as PowerSGD start collectives when others complete. Two buckets in flight
                # would start theirs in any order; on an accelerator the order of its stream holds.
                self._finish_pendings()
            self._pendings.append(_HookPending(bucket, hook(state, bucket)))
            if bucket.is_last():
                self._pendings.append(self._transport.begin_all_reduce(bucket.tail, self._hook_tail_key))
        elif self._transport.world_size > 1:
            self._pendings.append(self._transport.begin_all_reduce(bucket.flat, bucket.key))

    def _write_tail(self, bucket: Bucket) -> None:
        used, complaints = bucket.tail[: len(self.params)], bucket.tail[len(self.params) :]
        used.fill_(1)
        complaints.zero_()
        if len(self._order) < len(self.params):
            flags = [item.param.grad is not None for item in self.params]
            used.copy_(torch.tensor(flags, dtype=used.dtype))
            complaints[self._transport.rank] = self._complaint

    def _find_missing(self) -> list[int]:
        """Return the parameters of the modules in this backward that got no gradient since the last round."""
        if len(self._order) == len(self.params):
            return []
        return [
            index
            for index, item in enumerate(self.params)
            if not self._seen[index] and not self._seen_before[index] and item.module_index in self._armed_modules
        ]

    def _finish_round(self) -> list[float] | None:
        """Start the buckets that are left, wait for all, and give every parameter its average.

        Returns:
            The tail, if a rank complains. On a device other than the CPU, where reading it would
            stop this thread until the device is idle, the tail of the round before, if any.
        """
        for bucket in self.buckets[self._next :]:
            self._launch(bucket)
        self._finish_pendings()
        if not self.options.grads_as_views:
            for bucket in self.buckets:
                bucket.unpack()
        tail = self.buckets[-1].tail
        flags = self._read_tail(tail)
        if len(self._order) < len(self.params):
            self._adopt_averages(tail.tolist())
        self._end_round()
        return flags

    def _finish_pendings(self) -> None:
        for pending in self._pendings:
            pending.finish()
        self._pendings.clear()

    def _end_round(self) -> None:
        self._seen_before[:] = bytes(len(self.params))
        if not self._has_final_order:
            self._has_final_order = True
            self._next_order = self._agree_on_order()

    def _read_tail(self, tail: torch.Tensor) -> list[float] | None:
        if tail.device.type == "cpu":
            complaints: list[float] = tail[len(self.params) :].tolist()
            return tail.tolist() if any(complaints) else None
        flags = None
        if self._late is not None:
            host, event = self._late
            event.synchronize()  # Of the round before; long done.
            flags = host.tolist()
            flags[len(self.params) + self._transport.rank] = 0  # This rank has raised it by itself.
        host = torch.empty(tail.shape, dtype=tail.dtype, pin_memory=tail.device.type == "cuda")
        host.copy_(tail, non_blocking=True)
        event = torch.Event(tail.device.type)
        event.record()
        self._late = (host, event)
        return flags

    def _adopt_averages(self, flags: Sequence[float]) -> None:
        """Give parameters without a gradient the average, if another rank had a gradient."""
        for bucket in self.buckets:
            for index, view in zip(bucket.param_indices, bucket.views, strict=True):
                param = self.params[index].param
                if param.grad is None and flags[index] > 0:
                    param.grad = view if self.options.grads_as_views else view.clone()

    def _agree_on_order(self) -> list[int]:
        """Return the order in which gradients arrived on the first rank, the others at the end. Collective."""
        order = [*self._order, *(index for index, seen in enumerate(self._seen) if not seen)]
        if self._transport.world_size == 1:
            return order
        sent = torch.tensor(order, device=self.buckets[0].flat.device)
        self._transport.begin_broadcast(sent, 0, self._order_key).finish()
        agreed: list[int] = sent.tolist()
        return agreed

    def _keys(self) -> list[object]:
        return [(item.param.dtype.to_real(), item.param.is_complex(), item.param.device) for item in self.params]

    def _rebuild(self, order: Sequence[int]) -> None:
        """Make buckets in order of arrival, and move the gradients that lie in the old ones."""
        kept = [
            (self.params[index].param, index, view)
            for bucket in self.buckets
            for index, view in zip(bucket.param_indices, bucket.views, strict=True)
            if self.params[index].param.grad is view
        ]
        # Most optimizers free gradients between two rounds: then the old buckets go before the new ones come.
        self.buckets.clear()
        self._bucket_of.clear()
        self._build(
            plan_buckets(
                order,
                self._keys(),
                [item.param.nbytes for item in self.params],
                first_cap_bytes=FIRST_CAP_BYTES,
                cap_bytes=self.options.cap_bytes,
            )
        )
        new_views = {i: v for bucket in self.buckets for i, v in zip(bucket.param_indices, bucket.views, strict=True)}
        for param, index, view in kept:
            param.grad = new_views[index].copy_(view)

    def _build(self, groups: Sequence[Sequence[int]]) -> None:
        self.buckets.clear()
        for number, group in enumerate(groups):
            is_last = number == len(groups) - 1
            self.buckets.append(
                Bucket(
                    number,
                    [(index, self.params[index].param) for index in group],
                    tail_numel=len(self.params) + self._transport.world_size if is_last else 0,
                    is_last=is_last,
                    key=self._transport.allocate_key(),
                )
            )
        holder = {index: bucket for bucket in self.buckets for index in bucket.param_indices}
        self._bucket_of[:] = [holder[index] for index in range(len(self.params))]

    def _raise_complaints(self, missing: Sequence[int], complaints: Sequence[float], flags: Sequence[float]) -> None:
        """Raise for the parameters that are missing here, or tell of those missing elsewhere.

        Raises:
            UsageError: Always.
        """
        lines = []
        others = [rank for rank, value in zip(self._ranks, complaints, strict=False) if value > 0]
        stopped = [rank for rank, value in zip(self._ranks, complaints, strict=False) if value < 0]
        if missing and not self.options.find_unused:
            names = [self.params[index].fqn for index in missing]
            shown = list_text(names, _MAX_NAMES_SHOWN)
            lines.append(f"backward ended without a gradient for {count_text(len(names), 'parameter')}: {shown}")
            if self._order:
                lines.append(f"    the last gradient to arrive was that of {self.params[self._order[-1]].fqn!r}")
            others = [rank for rank in others if rank != self._ranks[self._transport.rank]]
            if others:
                lines.append(f"    so did {ranks_text(others)}, perhaps for other parameters")
        elif others:
            # Flags are added up over the ranks; in bfloat16 the names of few among many ranks may be lost.
            full = self._transport.world_size - 0.5
            names = [item.fqn for item, flag in zip(self.params, flags, strict=False) if flag < full]
            shown = list_text(names, _MAX_NAMES_SHOWN)
            lines.append(f"{ranks_text(others)} ended backward without a gradient for {shown}")
        fix = _FIX_UNUSED if lines else "drop the gradients of this step, and see what was raised there"
        if stopped:
            lines.append(f"{ranks_text(stopped)} did not finish backward: an exception stopped it there")
        raise UsageError("\n".join(lines), at=place_of_rank(), fix=fix)


def _is_whole_backward(node: Any) -> bool:
    """Say whether the running backward goes all the way from ``node`` to the leaves, as ``loss.backward()`` does.

    ``torch.autograd.grad`` runs only what leads to its inputs. Ask this inside the backward.
    """
    if node is None:
        return False
    seen = {node}
    stack = [node]
    while stack:
        current = stack.pop()
        try:
            if not will_engine_execute_node(current):
                return False
        except RuntimeError:  # Raised for a leaf that is an input of torch.autograd.grad.
            return False
        for following, _ in current.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return True

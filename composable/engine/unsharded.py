"""The handles that are unsharded now, and the streams of their collectives.

``passes.py`` decides when handles are unsharded.

All-gathers run on the unshard stream and reduce-scatters on the reduce stream; each stream allocates
the memory it writes, so a block's owner stream is always the writer. Memory freed by the host while
kernels still read it is safe because its next writer first waits for an event recorded after
those kernels. ``record_stream`` is not used. The rules, and how they are checked: docs/inside/notes.md.

On the CPU there are no streams: what a device orders by events, the host orders by waiting.
"""

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from composable.comm import Ranks
from composable.engine.buffer import SecondaryShards
from composable.engine.edited import refuse_unknown
from composable.engine.events import Listeners, Work
from composable.engine.gradients import GradientBuffer
from composable.engine.handle import Handle, HandleStep, is_outdated, written_after_gather
from composable.engine.param import ParamView
from composable.engine.paths import GradientPath, Reduction
from composable.ground.modes import unseen
from composable.ground.torch_hooks import before_gradients
from composable.ground.torch_private import autograd_profiler

_do_nothing: Callable[[], Any] = partial(bool)


class HostStreams:
    """No streams, for the CPU: the thread itself waits. ``DeviceStreams`` describes each method."""

    names: Mapping[int, str] = {}
    queues = False

    # Not a Python function: an empty one would cost as much as the work beside it.
    shards_written = resharded = meet = end_backward = wait_for_copies = staticmethod(_do_nothing)

    def shards_written_at(self, event: Any) -> None:
        raise AssertionError("there is no event on the CPU: the setter refuses it")

    # Used directly: a function around each would double its cost.
    begin_unshard = staticmethod(Handle.begin_unshard)
    wait_for_unshard = staticmethod(Handle.finish_gathers)
    keep_secondary = staticmethod(SecondaryShards.keep)

    def begin_reduction(
        self, path: GradientPath, gradient: GradientBuffer | None, *, to_host: bool = False
    ) -> Reduction:
        return path.resume() if gradient is None else path.begin(gradient.source)  # as ``finish.py`` does by itself


class DeviceStreams:
    """Two streams beside the stream that computes.

    Args:
        device: The module of torch for the device type, such as ``torch.cuda``. This class uses its
            ``Stream``, ``current_stream`` and ``stream``, and the events of streams.

    Attributes:
        names: Name of each stream by its id, for debugging.
        queues: Work is queued, and the host goes on; otherwise the host waits for work that it starts.
        unshard: The stream of all-gathers.
        reduce: The stream of reduce-scatters.
    """

    queues = True

    def __init__(self, device: Any) -> None:
        self._device = device
        self.unshard = device.Stream(priority=-1)
        self.reduce = device.Stream(priority=-1)
        self._full: dict[Handle, Any] = {}
        # By stream: a later event of a stream stands for its earlier events, but not for events of other streams.
        self._before_unshard: dict[int, Any] = {}
        self._users: dict[int, Any] = {}
        # Event after the last gather from the host; all are on one stream, so it stands for all.
        self._copied: Any = None
        self.names: Mapping[int, str] = {
            device.current_stream().stream_id: "default",
            self.unshard.stream_id: "unshard",
            self.reduce.stream_id: "reduce",
        }

    def shards_written(self) -> None:
        """The current stream wrote the shards that gathers will read, say in an optimizer step."""
        current = self._device.current_stream()
        self._before_unshard[current.stream_id] = current.record_event()

    def shards_written_at(self, event: Any) -> None:
        """The shards are written once ``event`` is reached; later work of the current stream does not matter."""
        # Kept beside the current stream's event, if any, which stands for readers of freed memory.
        self._before_unshard[-1] = event

    def begin_unshard(self, handle: Handle) -> None:
        """Start to fill the buffers of ``handle``. Collective."""
        self._begin_on_unshard()
        try:
            with self._device.stream(self.unshard):
                handle.begin_unshard()
                handle.finish_gathers()
                self._full[handle] = self.unshard.record_event()
            if handle.rests_elsewhere:
                self._copied = self._full[handle]
        except BaseException:
            # Nobody will wait for the queued work, and the shard may be written next.
            self._device.current_stream().wait_stream(self.unshard)
            if handle.rests_elsewhere:
                self._copied = self.unshard.record_event()
            raise

    def wait_for_unshard(self, handle: Handle) -> None:
        """Let the current stream wait until the buffers of ``handle`` are full."""
        current = self._device.current_stream()
        self._users[current.stream_id] = current
        full = self._full.pop(handle, None)
        if full is not None:
            current.wait_event(full)
            return
        # An exception cut ``begin_unshard`` or this wait short.
        current.wait_stream(self.unshard)
        handle.finish_gathers()

    def _begin_on_unshard(self) -> None:
        """Let the unshard stream wait until shards are written, and readers of buffers freed so far have run."""
        if self._before_unshard:
            for event in self._before_unshard.values():
                self.unshard.wait_event(event)
            self._before_unshard.clear()

    def keep_secondary(self, secondary: SecondaryShards, version: int, forward_id: int) -> None:
        """Call ``secondary.keep``; its buffers are in use on the current stream."""
        # In the memory pool of buffers: the host may free memory that gathers read at any time.
        self._begin_on_unshard()
        # A forward may have written its parameters. The next gather waits for all that in any case.
        self.unshard.wait_stream(self._device.current_stream())
        with self._device.stream(self.unshard):
            secondary.keep(version, forward_id)

    def resharded(self) -> None:
        """The current stream has queued the last reader of a buffer that the host freed."""
        current = self._device.current_stream()
        self._before_unshard[current.stream_id] = current.record_event()

    def meet(self) -> None:
        """Let every stream that used unsharded parameters in this step wait for all the others.

        Runs before and after a handle is completed: its gradients may come from another stream than the current one.
        """
        if len(self._users) > 1:
            current = self._come_after_users()
            event = current.record_event()
            for user in self._users.values():
                if user != current:
                    user.wait_event(event)

    def end_backward(self) -> None:
        """End a backward, also one that was cut short: the current stream waits for all the others."""
        self._come_after_users()
        self._users.clear()
        self.wait_for_copies()

    def begin_reduction(
        self, path: GradientPath, gradient: GradientBuffer | None, *, to_host: bool = False
    ) -> Reduction:
        """Start to reduce the gradients that the current stream has put into ``gradient``. Collective.

        Args:
            path: Path of the flat buffer.
            gradient: Gradients of the flat buffer; ``None``: only shards that the path has kept.
            to_host: The result lies in host memory: the returned function waits until it is there.
        """
        self.reduce.wait_stream(self._device.current_stream())
        try:
            with self._device.stream(self.reduce):
                shard = (path.resume() if gradient is None else path.begin(gradient.source))()
                reduced = self.reduce.record_event()
        except BaseException:
            # Nobody will wait for the queued work, and the gradient buffer is freed.
            self._device.current_stream().wait_stream(self.reduce)
            raise

        def finish() -> torch.Tensor | None:
            self._device.current_stream().wait_event(reduced)
            if to_host:
                reduced.synchronize()
            return shard

        return finish

    def wait_for_copies(self) -> None:
        """Wait until gathers have read the shards that rest on the host: from now on the host may write them."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def _come_after_users(self) -> Any:
        current = self._device.current_stream()
        for user in self._users.values():
            if user != current:
                current.wait_stream(user)
        return current


Streams: TypeAlias = HostStreams | DeviceStreams


def streams_for(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return HostStreams() if device.type == "cpu" else DeviceStreams(torch.get_device_module(device))


class Unsharded:
    """The handles of one root whose unsharded parameters are there, or are being gathered.

    Args:
        streams: Streams of the handles' device.
        listeners: Hear of each gather.
        step: The root's step, which holds this object: a weak proxy.

    Attributes:
        read_to: Clock of the latest call that backwards which made no graph have gone through.
        members: The handles; loops go over a copy if they may reshard a handle.
        retained: Handles whose memory stays, each with the clock of ``retain_until_backward``.
        shown: Handles of ``show_retained``.
    """

    def __init__(self, streams: Streams, listeners: Listeners, step: Any) -> None:
        self._listeners = listeners
        self._step = step
        self.streams = streams
        self.members: dict[Handle, None] = {}
        self.retained: dict[Handle, int] = {}
        self.read_to = -1.0
        self.shown: list[Handle] = []
        self._leaf_hooks: dict[Handle, list[RemovableHandle]] = {}

    def unshard(self, handle: Handle) -> None:
        """Make the modules of ``handle`` hold unsharded parameters. Collective unless it is unsharded."""
        view = handle.view
        if view is ParamView.SHARDED:
            self.begin_unshard(handle)
        elif view is not ParamView.GATHERING:
            if view is ParamView.HIDDEN:
                handle.show(refuse_unknown)
            return
        if self._listeners.work or autograd_profiler._is_profiler_enabled:
            self._listeners.during(Work.WAIT_FOR_GATHER, handle, handle.fqn, self.streams.wait_for_unshard, handle)
        elif self.streams.queues:
            self.streams.wait_for_unshard(handle)
        else:
            for gather in handle.gathers or ():
                gather.finish()
        if handle.show(refuse_unknown):
            # All ranks run the same operations on shards, so all of them find this here.
            if self._step.is_backward:
                raise written_after_gather(handle)
            self.reshard(handle)
            self.streams.shards_written()
            self.unshard(handle)

    def begin_unshard(self, handle: Handle, *, takes_secondary: bool | None = None) -> None:
        """Start to gather ahead of use, ``unshard`` waits for it; ``takes_secondary``: from secondary shards or not.

        Raises:
            UsageError: The parameters are not on the device where they rest, or have another dtype.
        """
        if handle.view is not ParamView.SHARDED:
            return
        secondary = handle.secondary
        if secondary is not None:
            secondary.are_source = self._step.takes_secondary(handle) if takes_secondary is None else takes_secondary
        for hear in self._listeners.gather_begins:
            hear(handle, from_secondary=secondary is not None and secondary.are_source)
        is_in_use = handle in self.retained  # A graph may read the memory, which gets the same values again.
        is_written = is_in_use
        for flat in handle.buffers:
            for param in () if flat.is_empty else flat.params:  # Inline, as all that runs for each gather.
                if param.sharded._local_tensor is not param.shown or flat.is_away:  # type: ignore[attr-defined]
                    # On this stream, which wrote the pieces that torch has moved elsewhere, and frees their memory.
                    flat.attach()
                    flat.check_usable()
                    is_written = True
        if is_written:
            self.streams.shards_written()
        self.members[handle] = None
        if self._listeners.work or autograd_profiler._is_profiler_enabled:
            self._listeners.during(Work.GATHER, handle, handle.fqn, self.streams.begin_unshard, handle)
        else:
            self.streams.begin_unshard(handle)
        if is_in_use:
            self.streams.wait_for_unshard(handle)  # Now: the graph asks for nothing.

    def reshard(self, handle: Handle, *, keeps_secondary: bool = False) -> None:
        """Free the unsharded parameters of ``handle``; no error if there are none, or a context holds them.

        Waits for a gather in flight, since other ranks take part in it. ``keeps_secondary``: copies these shards first.
        """
        if handle not in self.members or handle.held_with is not None:
            return
        if handle.view is ParamView.GATHERING:
            self._listeners.during(Work.WAIT_FOR_GATHER, handle, handle.fqn, self.streams.wait_for_unshard, handle)
        if keeps_secondary and handle.secondary is not None:
            self.streams.keep_secondary(handle.secondary, handle.versions.gathered, self._step.forward_id)
        handle.reshard(frees=handle not in self.retained)
        self.streams.resharded()
        # Last: a call that was cut short is done again.
        self.members.pop(handle, None)

    def gather_for_others(self, handle: Handle, *, takes_secondary: bool) -> None:
        """Send this rank's shards, or its secondary ones, to the ranks that compute; keep no parameters. Collective."""
        self.begin_unshard(handle, takes_secondary=takes_secondary)
        # A backward of the other ranks may read secondary shards; this rank cannot know yet.
        self.reshard(handle, keeps_secondary=handle.settings.keeps_secondary and not takes_secondary)
        self.streams.wait_for_copies()

    def hide(self) -> list[Handle]:
        """Make modules hold the sharded parameters, for users to clip, zero and load; the unsharded ones stay.

        Returns the handles whose unsharded parameters were written to, also behind their last call.
        """
        written = []
        for handle in self.members:
            if handle.view is ParamView.UNSHARDED and handle.held_with is None:
                for flat in handle.buffers:
                    if flat.versioned and flat.versioned[0]._version != handle.versions.gathered:
                        written.append(handle)
            handle.hide()
        return written

    # From one step to the next

    def begin_forward(self, steps: Mapping[Handle, HandleStep], written: torch.Event | None) -> None:
        """Free parameters that earlier passes left and this forward must not use. Collective if any were kept.

        Args:
            steps: The state of each handle.
            written: Event after which the shards are written; ``None``: in the order of the current stream.
        """
        if self.retained:
            self.free_retained(self.read_to)
        if not self.members:
            return
        kept = []
        for handle in tuple(self.members):
            if handle.held_with is not None:
                continue  # Shown by a context, where forwards do not communicate.
            if not handle.settings.reshard_after_backward and handle.is_unsharded:
                kept.append(handle)
            elif steps[handle].is_armed:
                # Left by a forward whose backward did not come yet: the shards may have been written since.
                self.reshard(handle)
            elif handle.settings.reshard_option is False and handle.is_unsharded:
                kept.append(handle)  # Left by a forward without gradients.
            elif handle.view is ParamView.HIDDEN:
                self.reshard(handle)  # Left so too, and the setting has changed since.
        if kept:
            if written is not None:
                # The shards are read here and now, and not only by gathers.
                written.wait()
            self.free_stale(kept)

    def free_stale(self, kept: Sequence[Handle]) -> None:
        """Free parameters that an earlier step left, of handles of which a rank has written its shard. Collective."""
        asks = self._listeners.has_idle_ranks
        # A rank that ran no modules has no unsharded parameters, and its optimizer has written its shards.
        stale = set(kept if asks and any(ask() for ask in asks) else _find_stale(self._step.everyone, kept))
        for handle in kept:
            if handle not in stale:
                handle.discount_writes()
                continue
            self.reshard(handle)

    # Memory that stays

    def retain_until_backward(self, handle: Handle, *, read_from: int = -1) -> None:
        """Keep the parameters' memory on this rank until a backward ends.

        Gathers and reductions run as if it were freed, since the other ranks may have freed it.

        Args:
            handle: The handle.
            read_from: A graph of the forward that began at this clock may read the parameters at any time. So their
                memory stays until a backward that makes no graph has gone through that forward or a later one, and
                another forward begins.
        """
        self.retained[handle] = max(read_from, self.retained.get(handle, -1))

    def show_retained(self) -> bool:
        """Show modules the parameters whose memory stays: backward may run a checkpoint again before any hook.

        Not collective, and no change of state: other ranks may have freed theirs. Returns whether there are any.
        """
        for handle in self.retained:
            if handle.faces.are_sharded() and not is_outdated(handle):
                self.shown.append(handle)  # Set first: what is cut short is hidden again.
                handle.faces.show_unsharded(refuse_unknown, handle)
        return bool(self.shown)

    def hide_retained(self) -> None:
        """Undo ``show_retained``."""
        for handle in self.shown:
            if handle.view is not ParamView.UNSHARDED:
                handle.faces.show_sharded()
        self.shown.clear()

    def notice_backward(self, hear: Callable[[], None]) -> None:
        """Call ``hear``, a bound method, also when a backward reaches leaves of retained handles, but no output."""
        for handle in self.retained:
            if handle not in self._leaf_hooks:
                leaves = [param.leaf() for param in handle.params if param.leaf().requires_grad]
                # Before the gradients: a backward begins with a search for kept gradients that users have dropped.
                self._leaf_hooks[handle] = before_gradients(leaves, _calling(hear))

    def free(self, *, except_for: Callable[[Handle], bool] | None = None) -> None:
        """Free all memory, whatever graphs live, except for some handles."""
        self.free_retained()
        for handle in tuple(self.members):
            if except_for is None or not except_for(handle):
                self.reshard(handle)

    def free_retained(self, read_to: float = math.inf) -> None:
        """Free retained memory, except for graphs of forwards that began at the clock ``read_to`` or later."""
        for handle, read_from in tuple(self.retained.items()):
            if read_from < read_to:
                del self.retained[handle]
                for hook in self._leaf_hooks.pop(handle, ()):
                    hook.remove()
                if handle not in self.members:
                    handle.free_buffers()
                    self.streams.resharded()


def _find_stale(everyone: Ranks, kept: Sequence[Handle]) -> list[Handle]:
    """Return the handles of ``kept``, which are unsharded, whose shard some rank has written since the last gather.

    Collective over the ranks of each handle: one small message. If there are handles of all ranks, handles of a part of
    the ranks, such as experts, add no message: if one of these was written on any rank, all of them count as written.
    The handles on ``everyone``, all ranks of the root, are the same on all ranks.
    """
    groups: dict[Ranks, list[Handle]] = {}
    for handle in kept:
        groups.setdefault(handle.grid.everyone, []).append(handle)
    stale: list[Handle] = []
    outer = groups.pop(everyone, [])
    if outer:
        parts = [handle for handles in groups.values() for handle in handles]
        are_parts_fresh = all(handle.is_fresh() for handle in parts)
        *heard, is_part_stale = everyone.any_of([*(not handle.is_fresh() for handle in outer), not are_parts_fresh])
        stale = [handle for handle, is_stale in zip(outer, heard, strict=True) if is_stale]
        return stale + (parts if is_part_stale else [])
    for ranks, handles in sorted(groups.items(), key=lambda item: item[0].order):
        heard = ranks.any_of([not handle.is_fresh() for handle in handles])
        stale += [handle for handle, is_stale in zip(handles, heard, strict=True) if is_stale]
    return stale


def _calling(hear: Callable[[], None]) -> Callable[[torch.Tensor], None]:
    """Return a hook that calls a method as long as its object lives.

    Python's collector cannot see objects that a tensor's hook holds: a model held there would never be freed.
    """
    method = weakref.WeakMethod(hear)

    @unseen
    def arrived(_: torch.Tensor) -> None:
        if (call := method()) is not None:
            call()

    return arrived

"""Which handles of a root are unsharded now, and whose memory outlives that.

When they are is the business of ``forward_pass.py`` and ``backward_pass.py``.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from composable.engine.handle import Handle
from composable.engine.handle_step import HandleStep
from composable.engine.streams import Streams
from composable.ground.frames import in_region, watch_graph
from composable.ground.torch_hooks import before_gradients
from composable.ground.torch_private import autograd_profiler, opaque

__all__ = ["Unsharded"]


class _GatherTeller(Protocol):
    @property
    def has_listeners(self) -> bool: ...

    def gather(self, handle: Handle, *, takes_secondary: bool) -> None: ...


class Unsharded:
    """The handles of one root whose unsharded parameters are there, or are being gathered.

    Args:
        handles: All handles of the root.
        streams: Of the device where they live.
        takes_secondary: Says whether a gather of a handle that has secondary shards, or fills them, may now be from
            these; equal on all ranks.

    Attributes:
        teller: Tells ranks without inputs of gathers; ``None``: all have inputs.
        streams: As given; others may take their place where nothing is unsharded.
        members: The handles; they may be resharded by what is done for each.
        find_stale: Lets the ranks find out together which unsharded handles are older than their shards.
    """

    def __init__(self, handles: Sequence[Handle], streams: Streams, takes_secondary: Callable[[Handle], bool]) -> None:
        self.teller: _GatherTeller | None = None
        self.streams = streams
        self.find_stale: Callable[[Sequence[Handle]], Iterable[Handle]] = _find_stale_here
        self._handles = tuple(handles)
        self._filling = tuple(handle for handle in handles if handle.fills_secondary)
        self._takes_secondary = takes_secondary
        self.members: dict[Handle, None] = {}
        self._retained: dict[Handle, None] = {}
        self._graphs: dict[Handle, Callable[[], bool]] = {}
        self._leaf_hooks: dict[Handle, list[RemovableHandle]] = {}

    def unshard(self, handle: Handle) -> None:
        """Make the modules of ``handle`` hold unsharded parameters. Collective unless it is unsharded."""
        if handle.is_unsharded:
            if handle.is_hidden:
                handle.show()
            return
        if not handle.is_gathering:
            self.begin_unshard(handle)
        if autograd_profiler._is_profiler_enabled:
            in_region("wait for gather", handle.fqn, self.streams.wait_for_unshard, handle)
        else:
            self.streams.wait_for_unshard(handle)
        handle.show()

    def begin_unshard(self, handle: Handle, *, takes_secondary: bool | None = None) -> None:
        """Start gathering ahead of use; ``unshard`` waits for it.

        Args:
            handle: The handle.
            takes_secondary: From secondary shards or not; ``None``: as this rank's own step asks for.
        """
        if handle.is_unsharded or handle.is_gathering:
            return
        if takes_secondary is None:
            takes_secondary = (handle.has_secondary or handle.fills_secondary) and self._is_from_secondary(handle)
        if self.teller is not None:
            self.teller.gather(handle, takes_secondary=takes_secondary)
        if handle.bring_back():
            self.streams.shards_written()
        self.members[handle] = None
        handle.takes_secondary = takes_secondary
        if autograd_profiler._is_profiler_enabled:
            in_region("gather", handle.fqn, self.streams.begin_unshard, handle)
        else:
            self.streams.begin_unshard(handle)

    def _is_from_secondary(self, handle: Handle) -> bool:
        if handle.fills_secondary and self.teller is not None and self.teller.has_listeners:
            # Which of them this step has filled only who ran its forward knows.
            return False
        return self._takes_secondary(handle)

    def reshard(self, handle: Handle, *, keeps_secondary: bool = False) -> None:
        """Free the unsharded parameters of ``handle``; no error if there are none, or a context holds them.

        A gather in flight is waited for, since peers take part in it.

        Args:
            handle: The handle.
            keeps_secondary: Copy secondary shards out of them before.
        """
        if handle not in self.members or handle.held_with is not None:
            return
        if handle.is_gathering:
            self.streams.wait_for_unshard(handle)
        if keeps_secondary:
            self.streams.keep_secondary(handle)
        handle.reshard(frees=handle not in self._retained)
        self.streams.resharded()
        # Last: what was cut short is done again.
        self.members.pop(handle, None)

    def gather_for_others(self, handle: Handle, *, takes_secondary: bool) -> None:
        """Give this rank's shards, or its secondary ones, to those that compute, and keep nothing. Collective."""
        self.begin_unshard(handle, takes_secondary=takes_secondary)
        # Whether a backward of the others will read them is not known yet.
        self.reshard(handle, keeps_secondary=handle.keeps_secondary and not takes_secondary)
        self.streams.wait_for_copies()

    def hide(self) -> None:
        """Let modules hold what users clip, zero and load, while the unsharded parameters stay."""
        for handle in self.members:
            handle.hide()

    # From one step to the next

    def begin_forward(self, steps: Mapping[Handle, HandleStep], written: torch.Event | None) -> None:
        """Free what earlier passes left and this forward must not compute with. Collective if anything was kept.

        Args:
            steps: Of all handles.
            written: When the optimizer has written the shards, if not in the order of the current stream.
        """
        if not (self.members or self._filling):
            return
        kept = []
        for handle in tuple(self.members):
            if handle.held_with is not None:
                continue  # Shown by a context, where forwards do not communicate.
            if not handle.reshard_after_backward and handle.is_unsharded:
                kept.append(handle)
            elif steps[handle].is_armed:
                # Of a forward that no backward has followed yet: the shards may have been written since.
                self.reshard(handle)
            elif handle.reshard_option is False and handle.is_unsharded:
                kept.append(handle)  # By a forward without gradients.
        # Others have secondary shards that may be older than their shards; who has none asks as well.
        for handle in self._filling:
            if handle.held_with is None and handle not in kept:
                if handle in self.members:
                    # Unsharded by hand: it is used as it is, and has newer values.
                    handle.drop_secondary()
                else:
                    kept.append(handle)
        if kept:
            if written is not None:
                # The shards are read here and now, and not only by gathers.
                written.wait()
            self._free_stale(kept)

    def refresh(self, handles: Iterable[Handle]) -> None:
        """Free what an earlier step left of ``handles``, hidden, where a rank has written its shard since. Collective.

        No step is running.
        """
        hidden = [handle for handle in handles if handle.is_unsharded and handle.is_hidden]
        if hidden:
            self._free_stale(hidden)

    def _free_stale(self, kept: Sequence[Handle]) -> None:
        # A rank that ran no modules has none of them, and its optimizer has written its shards.
        has_all = self.teller is None or not self.teller.has_listeners
        stale = set(self.find_stale(kept) if has_all else kept)
        for handle in kept:
            if handle not in stale:
                handle.discount_writes()
                continue
            self.reshard(handle)
            if handle.fills_secondary:
                handle.drop_secondary()

    # Memory that stays

    def free_kept(self, handle: Handle) -> None:
        """Free the memory of the buffers of ``handle``, unless it is unsharded or retained."""
        if handle not in self.members and handle not in self._retained:
            handle.free_buffers()
            self.streams.resharded()

    def retain_until_backward(self, handle: Handle, *, with_graph: bool = False) -> None:
        """Keep the memory of the parameters, on this rank, until a backward ends, or until the graph is gone as well.

        Gathers and reductions are those of a handle that is freed: the other ranks may have freed it.
        """
        self._retained[handle] = None
        if with_graph and (handle not in self._graphs or not self._graphs[handle]()):
            has_frozen = not all(param.sharded.requires_grad for param in handle.params)
            # A graph through frozen parameters is one to others: as a rule, of other handles.
            params = [param for each in (self._handles if has_frozen else (handle,)) for param in each.params]
            self._graphs[handle] = watch_graph(leaf for param in params if (leaf := param.unsharded) is not None)

    def notice_backward(self, handles: Iterable[Handle], hear: Callable[[], None]) -> None:
        """Hear of the next backward also if it gets to no output of an annotated module.

        Args:
            handles: Whose leaves tell of it.
            hear: A bound method, called when a backward gets to one of them.
        """
        for handle in handles:
            if handle not in self._leaf_hooks:
                leaves = [param.leaf() for param in handle.params if param.leaf().requires_grad]
                # Before: what kept gradients the user has dropped meanwhile is found out when a backward begins.
                self._leaf_hooks[handle] = before_gradients(leaves, _calling(hear))

    @property
    def retained(self) -> Sequence[Handle]:
        """Those whose memory stays until a backward ends."""
        return tuple(self._retained)

    def free_retained(self, *, always: bool = False) -> None:
        """Free what was retained, but where its graph has to be gone and lives: another backward may go through it."""
        for handle in tuple(self._retained):
            if not always and handle in self._graphs and self._graphs[handle]():
                continue
            del self._retained[handle]
            self._graphs.pop(handle, None)
            for hook in self._leaf_hooks.pop(handle, ()):
                hook.remove()
            if handle not in self.members:
                handle.free_buffers()
                self.streams.resharded()


def _find_stale_here(kept: Sequence[Handle]) -> Iterable[Handle]:
    return [handle for handle in kept if not handle.is_fresh()]


def _calling(hear: Callable[[], None]) -> Callable[[torch.Tensor], None]:
    """Return a hook that calls a method as long as its object lives.

    What a tensor's hook holds is out of sight of Python's collector: a model could never be freed through it.
    """
    method = weakref.WeakMethod(hear)

    @opaque
    def arrived(_: torch.Tensor) -> None:
        call = method()
        if call is not None:
            call()

    return arrived

"""A device that is none: streams, events and memory are bookkeeping, and the work is done on the CPU.

``Recorder`` has what ``DeviceStreams`` uses of ``torch.cuda``. It sees every operation of the code that runs
inside it, asks which stream is current, and finds what a device could get wrong:

* a *race*: two accesses of one tensor's memory, one of them a write, on streams that no event orders;
* a *reuse*: memory that the host freed goes to the next allocation on its stream, as in the caching
  allocator of CUDA, while an earlier access on another stream may still run;
* a *use after free*: an access of a buffer that the host has freed.

Happens-before is kept in vector clocks: a stream knows how many operations of every stream come before
whatever it is given next. Nothing is timed, so what is found does not depend on luck. The host is never
taken to wait for a device, not even for ``item()``: the order has to come from events alone.

Some memory is the host's: what was asked for as pinned, what ``put_on_host`` names, and what operations make of it.
The host is a stream as the others, on which operations on such memory run. Three things order it: a stream
is given nothing before the host gets there; the host waits for an event by ``synchronize``; and a copy between
host and device that is not ``non_blocking`` has run when it returns. Races of its memory are found as all others.

Source: vector clocks for race detection, FastTrack, PLDI 2009.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Recorder", "Stream", "Violation"]

# What a stream knows: how many operations of each stream, by its id, come before the next one here.
Clock = dict[int, int]


class Access(NamedTuple):
    """One operation that reads or writes a block."""

    stream: "Stream"
    count: int
    op: str
    is_write: bool

    def __str__(self) -> str:
        return f"{self.op} {'writes' if self.is_write else 'reads'} on {self.stream.name}"


class Violation(NamedTuple):
    """Two accesses that nothing orders.

    Attributes:
        kind: ``race``, ``reuse`` or ``use after free``.
        block: What memory it is.
        first: The access that may still run; ``None`` for a use after free.
        second: The one that does not wait for it.
        freed: What the memory was before, for a reuse.
    """

    kind: str
    block: str
    first: Access | None
    second: Access
    freed: str = ""

    def __str__(self) -> str:
        was = f", freed by {self.freed}" if self.freed else ""
        earlier = f", not ordered after: {self.first}" if self.first else ""
        return f"{self.kind} of {self.block}{was}: {self.second}{earlier}"


class Event:
    """A point in a stream."""

    def __init__(self, clock: Clock, host: "Stream") -> None:
        self.clock = clock
        self._host = host

    def synchronize(self) -> None:
        """Let the host wait."""
        self._host.wait_event(self)


class Stream:
    """A queue of operations."""

    def __init__(self, stream_id: int, name: str, recorder: "Recorder") -> None:
        self.stream_id = stream_id
        self.name = name
        self.clock: Clock = {}
        self._recorder = recorder

    def record_event(self) -> Event:
        self._recorder.events += 1
        return Event(dict(self.clock), self._recorder.host)

    def wait_event(self, event: Event) -> None:
        for stream_id, count in event.clock.items():
            if count > self.clock.get(stream_id, 0):
                self.clock[stream_id] = count

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def is_after(self, access: Access) -> bool:
        return self.clock.get(access.stream.stream_id, 0) >= access.count


class Block:
    """Memory of one storage, from its allocation to its end.

    Attributes:
        owner: The stream that was current at the allocation; whose pool gets it back.
        before: Last accesses, by stream, of all that was freed into the pool before the allocation.
        is_host: The host's memory, which goes back to no pool: its allocator waits for the device by itself.
    """

    def __init__(self, owner: Stream, before: "Mapping[int, tuple[Access, str]]") -> None:
        self.owner = owner
        self.before = before
        self.write: Access | None = None
        self.reads: dict[int, Access] = {}
        self.is_freed = False
        self.is_host = False

    def accesses(self) -> Iterator[Access]:
        if self.write is not None:
            yield self.write
        yield from self.reads.values()


class Recorder(TorchDispatchMode):
    """Records what runs inside ``with recorder``.

    Args:
        keeps_memory: ``resize_(0)`` frees in the books only, so that a use after free is found instead of a crash.

    Attributes:
        operations: Operations that read or wrote anything.
        events: Events recorded.
        frees: Blocks that came back to a pool.
        violations: What was found, each pair of operations once.
        host: On which operations on the host's memory run.
    """

    sees_hooks = True

    def __init__(self, *, keeps_memory: bool = False) -> None:
        super().__init__()
        self.operations = self.events = self.frees = 0
        self.violations: list[Violation] = []
        self._keeps_memory = keeps_memory
        self._streams: list[Stream] = []
        self._current = self.Stream(name="default")
        self.host = self.Stream(name="host")
        self._owner: Stream | None = None
        self._blocks: dict[int, Block] = {}
        self._names: dict[int, str] = {}
        self._pools: dict[int, dict[int, tuple[Access, str]]] = {}
        self._known: set[str] = set()
        self._quiet = 0

    # What DeviceStreams uses of a device

    def Stream(self, priority: int = 0, name: str = "") -> Stream:  # noqa: N802  # as torch.cuda has it
        made = Stream(len(self._streams), name or f"stream {len(self._streams)}", self)
        self._streams.append(made)
        return made

    def current_stream(self) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        outer, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = outer

    def set_stream(self, stream: Stream) -> None:
        self._current = stream

    # What tests say

    @contextmanager
    def allocating_on(self, stream: Stream) -> Iterator[None]:
        """Take memory from the pool of ``stream``, whichever is current."""
        outer, self._owner = self._owner, stream
        try:
            yield
        finally:
            self._owner = outer

    def take_names(self, names: Mapping[int, str]) -> None:
        """Call streams what ``DeviceStreams`` calls them."""
        for stream_id, name in names.items():
            self._streams[stream_id].name = name

    def call(self, tensor: torch.Tensor, name: str) -> None:
        """Give the memory of ``tensor`` a name for messages."""
        self._names[tensor.untyped_storage()._cdata] = name

    def put_on_host(self, tensor: torch.Tensor) -> None:
        """Say that the memory of ``tensor`` is the host's."""
        block = self._block_of(tensor)
        block.is_host, block.before = True, {}

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Say whether the memory of ``tensor`` is the host's."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return block is not None and block.is_host

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Record nothing: whoever calls says itself what the operations are on a device."""
        self._quiet += 1
        try:
            yield
        finally:
            self._quiet -= 1

    def access(self, op: str, *, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()) -> None:
        """Record one operation on the current stream."""
        self._access(self._current, op, reads, writes)

    def _access(self, stream: Stream, op: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        written = {tensor.untyped_storage()._cdata: tensor for tensor in writes if tensor.numel()}
        read = {tensor.untyped_storage()._cdata: tensor for tensor in reads if tensor.numel()}
        if not written and not read:
            return
        self.operations += 1
        if stream is not self.host:
            # Given by the host, after all that it has done and seen.
            stream.wait_event(Event(self.host.clock, self.host))
        count = stream.clock[stream.stream_id] = stream.clock.get(stream.stream_id, 0) + 1
        for key, tensor in read.items():
            if key not in written:
                self._check(key, self._block_of(tensor), Access(stream, count, op, is_write=False))
        for key, tensor in written.items():
            self._check(key, self._block_of(tensor), Access(stream, count, op, is_write=True))

    # Memory

    def _block_of(self, tensor: torch.Tensor) -> Block:
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        # What an operation is given and nobody has seen was there before everything.
        return block or self._allocate(tensor.untyped_storage(), was_there=True)

    def _allocate(self, storage: torch.UntypedStorage, *, was_there: bool = False) -> Block:
        key = storage._cdata
        if key not in self._blocks:
            finalize(storage, self._end, key).atexit = False
        owner = self._streams[0] if was_there else self._owner or self._current
        before = {} if was_there else dict(self._pools.get(owner.stream_id, ()))
        block = self._blocks[key] = Block(owner, before)
        return block

    def _free(self, key: int, block: Block) -> None:
        self.frees += 1
        block.is_freed = True
        if block.is_host:
            return
        pool = self._pools.setdefault(block.owner.stream_id, {})
        name = self._name_of(key)
        for access in block.accesses():
            held = pool.get(access.stream.stream_id)
            if held is None or held[0].count < access.count:
                pool[access.stream.stream_id] = (access, name)

    def _end(self, key: int) -> None:
        block = self._blocks.pop(key)
        if not block.is_freed:
            self._free(key, block)
        self._names.pop(key, None)

    def _resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        block = self._blocks.get(storage._cdata)
        if block is not None and not block.is_freed:
            self._free(storage._cdata, block)
        if nbytes:
            self._allocate(storage)

    def _name_of(self, key: int) -> str:
        return self._names.get(key, "a tensor")

    # Order

    def _check(self, key: int, block: Block, access: Access) -> None:
        stream = access.stream
        if block.is_freed:
            self._report("use after free", key, None, access)
        for earlier, freed in block.before.values():
            if not stream.is_after(earlier):
                self._report("reuse", key, earlier, access, freed)
        block.before = {}
        if block.write is not None and not stream.is_after(block.write):
            self._report("race", key, block.write, access)
        if access.is_write:
            for earlier in block.reads.values():
                if not stream.is_after(earlier):
                    self._report("race", key, earlier, access)
            block.write, block.reads = access, {}
        else:
            block.reads[stream.stream_id] = access

    def _report(self, kind: str, key: int, first: Access | None, second: Access, freed: str = "") -> None:
        found = Violation(kind, self._name_of(key), first, second, freed)
        if str(found) not in self._known:
            self._known.add(str(found))
            self.violations.append(found)

    # Operations

    def __enter__(self) -> "Recorder":
        resize = torch._C.StorageBase.resize_

        def recorded(storage: torch.UntypedStorage, nbytes: int) -> Any:
            self._resize(storage, nbytes)
            return storage if self._keeps_memory and not nbytes else resize(storage, nbytes)

        torch.UntypedStorage.resize_ = recorded
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        del torch.UntypedStorage.resize_

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # It comes back with the tensors inside.
            return NotImplemented
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.is_pinned.default:
            return self.is_on_host(args[0])
        is_host = bool(kwargs.pop("pin_memory", False)) or func is torch.ops.aten._pin_memory.default
        # There is nothing to lock pages for.
        result = args[0].clone() if func is torch.ops.aten._pin_memory.default else func(*args, **kwargs)
        if self._quiet:
            return result
        effect = _EFFECTS.get(func) or _EFFECTS.setdefault(func, _effect_of(func))
        if effect.is_view:
            return result
        reads: list[torch.Tensor] = []
        writes: list[torch.Tensor] = []
        for index, arg in enumerate(args):
            _collect(arg, writes if index in effect.written else reads)
        for name, arg in kwargs.items():
            _collect(arg, writes if name in effect.written else reads)
        results: list[torch.Tensor] = []
        _collect(result, results)
        given = {tensor.untyped_storage()._cdata for tensor in (*reads, *writes)}
        made = [tensor for tensor in results if tensor.untyped_storage()._cdata not in given]
        for tensor in made:
            if tensor.untyped_storage()._cdata not in self._blocks:
                self._allocate(tensor.untyped_storage())
        found = [tensor for tensor in (*reads, *writes) if self.is_on_host(tensor)]
        if is_host or (found and len(found) == len(reads) + len(writes)):
            for tensor in made:
                self.put_on_host(tensor)
        name = func.name().removeprefix("aten::")
        looked, filled = reads if effect.looks else [], writes + made if effect.fills else writes
        if func is torch.ops.aten.copy_.default and len(found) == 1:
            # Between host and device: by the device.
            self.access(name, reads=looked, writes=filled)
            if not (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
                self.current_stream().record_event().synchronize()
            return result
        for stream, is_hosts in ((self.host, True), (self._current, False)):
            own = [[one for one in tensors if self.is_on_host(one) is is_hosts] for tensors in (looked, filled)]
            self._access(stream, name, *own)
        return result


class Effect(NamedTuple):
    """What an operator does with memory.

    Attributes:
        is_view: Nothing at all.
        looks: It reads what it is given, not just shapes.
        fills: It writes what it returns.
        written: Positions and names of the arguments that it writes.
    """

    is_view: bool
    looks: bool
    fills: bool
    written: frozenset[int | str]


_EFFECTS: dict[Any, Effect] = {}


def _effect_of(func: Any) -> Effect:
    name = func._schema.name.removeprefix("aten::")
    arguments = func._schema.arguments
    written = [index for index, arg in enumerate(arguments) if arg.alias_info is not None and arg.alias_info.is_write]
    is_view = not written and (func.is_view or name in {"_unsafe_view", "_reshape_alias"})
    return Effect(
        is_view,
        looks=not name.startswith("new_") and not name.endswith("_like") and not name.startswith("empty"),
        fills="empty" not in name,
        written=frozenset([*written, *(arguments[index].name for index in written)]),
    )


def _collect(value: Any, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_meta and value.numel():
            into.append(value)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _collect(one, into)

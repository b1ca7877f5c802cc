"""A device that is none, and executes late: what it was given runs on the CPU when the host has to know a value.

``LateDevice`` has what code uses of ``torch.cuda``. Each operation is queued on the current stream. When the host
waits, operations run in an order that is adverse, and respects only the order of each stream and events:

* at each moment the stream of the highest priority runs. A seed draws the priorities, and the moments at which the
  running stream falls below all others. Streams that a test names run only when nothing else can.
* memory is NaN until it is written. The host's free gives it to the pool of the stream that was current at its
  allocation. The first access of the next memory from this pool fills with NaN what was freed before that allocation:
  it may be the same memory. So does an access after the free.

So a wait that is missing gives wrong numbers, or NaN. ``recording.py`` finds more of them, and says where; it runs no
collective and compares no number.

A tensor has memory of its own, as all code sees it, and nothing looks into that. Operations run on other memory, which
stays until the last one is over. In this way the host may free a tensor while operations on it are queued.

Some memory is the host's: what was asked for as pinned, what ``put_on_host`` names, what ``cpu`` returns, and what
operations make of it. Such operations run at once, on the tensors themselves, and wait for nothing. The host waits for a
copy between host and device that is not ``non_blocking``, and where it needs a number or a shape.

What differs from CUDA: host and device are both ``cpu`` for torch, so ``to`` moves nothing. An operation on memory of
both, which CUDA refuses, waits as if ``to`` had copied. Memory that was made when no mode was on, or in C++, holds its
values from the start, and goes to no pool. Operators that are not of ``aten`` run at once: collectives call the process
group, others would read memory that nothing was written to.

Source: priorities and their changes, "A randomized scheduler with probabilistic guarantees of finding bugs",
ASPLOS 2010.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from composable.ground.torch_private import modes_off

__all__ = ["LateDevice", "LateEvent", "LateStream"]

# Every floating-point number of such bytes is NaN.
NAN = 0xFF
# Methods of a tensor for which the host waits.
_READERS = ("tolist", "numpy", "cpu")
aten = torch.ops.aten


class LateEvent:
    """A point in a stream."""

    def __init__(self, stream: "LateStream | None" = None) -> None:
        self._stream = stream
        self._count = 0 if stream is None else stream.given

    def record(self, stream: "LateStream") -> None:
        """Move the event to the end of what ``stream`` was given."""
        self._stream, self._count = stream, stream.given

    def is_reached(self) -> bool:
        """Say whether the stream is past this point; nothing runs."""
        return self._stream is None or self._stream.done >= self._count

    def query(self) -> bool:
        """Say what ``is_reached`` says, and let one operation run: who asks in a loop is answered in the end."""
        if self._stream is not None and not self.is_reached():
            self._stream.device.step()
        return self.is_reached()

    def synchronize(self) -> None:
        """Let the host wait."""
        if self._stream is not None:
            self._stream.device.run_until(self)

    def wait(self, stream: "LateStream | None" = None) -> None:
        """Let ``stream``, by default the current one, wait."""
        if self._stream is not None:
            (stream or self._stream.device.current_stream()).wait_event(self)


class LateStream:
    """A queue of operations.

    Attributes:
        given: How many operations it was given.
        done: How many of them are over.
        queue: The others; an event stands for a wait.
        order: Of the streams that can run, the one with the greatest number does.
    """

    def __init__(self, device: "LateDevice", stream_id: int, name: str, order: float) -> None:
        self.device = device
        self.stream_id = stream_id
        self.name = name
        self.order = order
        self.given = self.done = 0
        self.queue: deque[LateEvent | Callable[[], object]] = deque()

    def give(self, operation: LateEvent | Callable[[], object]) -> int:
        """Queue an operation; returns how many the stream was given so far."""
        if not self.queue:
            self.device.busy.append(self)
        self.queue.append(operation)
        self.given += 1
        return self.given

    def record_event(self, event: LateEvent | None = None) -> LateEvent:
        if event is None:
            return LateEvent(self)
        event.record(self)
        return event

    def wait_event(self, event: LateEvent) -> None:
        if not event.is_reached():
            # As it is now: an event may be recorded again.
            waited = LateEvent()
            waited._stream, waited._count = event._stream, event._count
            self.give(waited)

    def wait_stream(self, other: "LateStream") -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        """Let the host wait."""
        self.record_event().synchronize()

    def query(self) -> bool:
        return self.record_event().query()


class Block:
    """Memory of one tensor's storage, from its allocation to its end.

    Attributes:
        owner: The stream that was current at the allocation; whose pool gets the memory back.
        base: The memory in which operations run, as bytes; ``None``: the tensor's own.
        is_host: It is the host's.
        is_freed: The host has freed it.
        before: How many blocks had come back to the pool before the allocation; 0 after the first access.
        poison: The byte that stands in it where nothing was written.
        users: How many operations a stream was given when it was given the last one on this memory, by stream.
    """

    def __init__(self, owner: LateStream, base: torch.Tensor | None, before: int, poison: int) -> None:
        self.owner = owner
        self.base = base
        self.before = before
        self.poison = poison
        self.is_host = self.is_freed = False
        self.users: dict[LateStream, int] = {}

    def is_used_beside(self, stream: LateStream) -> bool:
        """Say whether another stream than ``stream`` has operations on it that are not over."""
        return any(user.done < count for user, count in self.users.items() if user is not stream)


class Operator(NamedTuple):
    """What an operator of torch does.

    Attributes:
        is_view: It only makes views, or is no operator of tensors on one device: it runs at once.
        makes: It reads no values.
        fills: It writes what it returns.
        asks: It returns something else than tensors of known shapes, so the host has to wait.
        is_random: It takes random numbers.
        written: Positions and names of the arguments that it writes.
        returned: Position and name of the argument that is each result, if all are arguments; else ``None``.
    """

    is_view: bool
    makes: bool
    fills: bool
    asks: bool
    is_random: bool
    written: frozenset[int | str]
    returned: tuple[tuple[int, str], ...] | None


class LateDevice:
    """A device for all threads of this process; ``with device`` makes operations of the thread run on it.

    In other threads, ``with device.stream(...)`` does, inside that. Each thread has a current stream of its own.

    Args:
        seed: Draws the order.
        last: Names of streams that run only when no other one can. Those without a name are called ``other``.
        falls_after: The running stream falls below all others after one of so many operations. A low number finds what
            goes wrong only if a stream stops between two operations; a high one, only if it is late by many.

    Attributes:
        operations: Operations that streams were given.
        frees: Blocks that came back to a pool.
        busy: The streams that have operations to run.
    """

    default_generators: tuple[torch.Generator, ...] = ()

    def __init__(self, seed: int = 0, *, last: Collection[str] = (), falls_after: int = 40) -> None:
        self.operations = self.frees = 0
        self._last, self._falls_after = frozenset(last), falls_after
        self._random = random.Random(seed)
        self.busy: list[LateStream] = []
        self._lowest = 0.0
        self._streams: list[LateStream] = []
        self._here = threading.local()
        self._default = self.Stream(name="default")
        self._blocks: dict[int, Block] = {}
        self._pools: dict[LateStream, list[Block]] = {}
        # By pool and stream: how much of the pool the stream has filled.
        self._filled: dict[tuple[LateStream, LateStream], int] = {}
        self._shapes: dict[Any, Any] = {}
        self._mode: Any = None

    # What code uses of torch.cuda

    def Stream(self, priority: int = 0, name: str = "other") -> LateStream:  # noqa: N802  # as torch.cuda has it
        made = LateStream(self, len(self._streams), name, self._random.random())
        self._streams.append(made)
        return made

    Event = LateEvent

    def current_stream(self, device: object = None) -> LateStream:
        found: LateStream = getattr(self._here, "stream", self._default)
        return found

    def set_stream(self, stream: LateStream) -> None:
        self._here.stream = stream

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        outer = self.current_stream()
        self.set_stream(stream)
        is_on = any(isinstance(mode, _Mode) and mode.device is self for mode in _get_current_dispatch_mode_stack())
        try:
            if is_on:
                yield
            else:
                with _Mode(self):
                    yield
        finally:
            self.set_stream(outer)

    def set_device(self, index: int) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: object = None) -> None:
        """Let the host wait for everything."""
        for stream in list(self._streams):
            stream.synchronize()

    # What tests say

    def take_names(self, names: Mapping[int, str]) -> None:
        """Call streams what ``DeviceStreams`` calls them."""
        for stream_id, name in names.items():
            self._streams[stream_id].name = name

    def is_on_host(self, tensor: torch.Tensor) -> bool:
        """Say whether the memory of ``tensor`` is the host's."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return block is not None and block.is_host

    def put_on_host(self, tensor: torch.Tensor) -> None:
        """Say that the memory of ``tensor`` is the host's; its values stay."""
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata) or self._adopt(storage)
        for stream, count in block.users.items():
            self._run_to(stream, count)
        if block.base is not None:
            with modes_off(), torch.no_grad():
                _bytes_of(storage).copy_(block.base)
        block.is_host, block.base, block.before, block.users = True, None, 0, {}

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of ``tensor`` that any code may read; the host waits for the current stream."""
        is_known = tensor.untyped_storage()._cdata in self._blocks
        if is_known and not self.is_on_host(tensor):
            self.current_stream().synchronize()
        with modes_off(), torch.no_grad():
            return (self._alias(tensor) if is_known else tensor).detach().clone()

    def __enter__(self) -> "LateDevice":
        tensor_class: Any = torch.Tensor
        storage_class: Any = torch.UntypedStorage
        resize = storage_class.resize_

        def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
            block = self._blocks.get(storage._cdata)
            if block is not None and block.is_host:
                return resize(storage, nbytes)
            if block is not None:
                self._free(block)
            result = resize(storage, nbytes)
            if nbytes:
                self._allocate(storage, NAN)
            return result

        # They read memory without an operator, or are none because a tensor of the CPU is there already.
        for name in _READERS:
            setattr(tensor_class, name, self._reading(name, getattr(tensor_class, name)))
        storage_class.resize_ = resized
        self._mode = _Mode(self)
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)
        tensor_class: Any = torch.Tensor
        storage_class: Any = torch.UntypedStorage
        for name in _READERS:
            delattr(tensor_class, name)
        del storage_class.resize_

    def _reading(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of tensors that reads their memory on the device."""

        def reads(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and _is_plain(tensor)
            # A copy by ``cpu`` would have to be in the graph.
            is_left = name == "cpu" and tensor.requires_grad
            if is_plain and not is_left and self._block_of(tensor) is not None and not self.is_on_host(tensor):
                tensor = self._made_on_host(self.values_of(tensor))
            return method(tensor, *args, **kwargs)

        return reads

    # Order

    def run_until(self, event: LateEvent) -> None:
        """Let the host wait for ``event``."""
        with modes_off(), torch.no_grad():
            while not event.is_reached():
                self._step()

    def step(self) -> None:
        """Run one operation, if there is one."""
        with modes_off(), torch.no_grad():
            if self.busy:
                self._step()

    def _run_to(self, stream: LateStream, count: int) -> None:
        event = LateEvent(stream)
        event._count = count
        self.run_until(event)

    def _step(self) -> None:
        chosen, best = None, (False, -float("inf"))
        for stream in self.busy:
            head = stream.queue[0]
            if isinstance(head, LateEvent) and not head.is_reached():
                continue
            order = (stream.name not in self._last, stream.order)
            if chosen is None or order > best:
                chosen, best = stream, order
        assert chosen is not None, "every stream waits for another one"
        operation = chosen.queue.popleft()
        chosen.done += 1
        if not chosen.queue:
            self.busy.remove(chosen)
        if not isinstance(operation, LateEvent):
            operation()
        if self._random.random() < 1 / self._falls_after:
            self._lowest -= 1
            chosen.order = self._lowest

    # Memory

    def _allocate(self, storage: torch.UntypedStorage, poison: int) -> Block:
        key = storage._cdata
        if key not in self._blocks:
            finalize(storage, self._end, key).atexit = False
        owner = self.current_stream()
        with modes_off(), torch.inference_mode(mode=False):
            base = torch.empty(storage.nbytes(), dtype=torch.uint8).fill_(poison)
        block = self._blocks[key] = Block(owner, base, len(self._pools.get(owner, ())), poison)
        return block

    def _adopt(self, storage: torch.UntypedStorage) -> Block:
        """Take memory with the values that are in it; operations run in the tensor's own, and keep it."""
        finalize(storage, self._end, storage._cdata).atexit = False
        block = self._blocks[storage._cdata] = Block(self._default, None, 0, 0)
        return block

    def _free(self, block: Block) -> None:
        if block.is_freed:
            return
        block.is_freed = True
        if block.base is not None:
            self.frees += 1
            self._pools.setdefault(block.owner, []).append(block)

    def _end(self, key: int) -> None:
        self._free(self._blocks.pop(key))

    def _new(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of memory in which nothing was written."""
        made = torch.empty_strided(shape, stride, dtype=dtype)
        poison = _poison_of(dtype)
        storage = made.untyped_storage()
        # Whoever looks into it without an operator shall notice.
        _bytes_of(storage).fill_(poison)
        self._allocate(storage, poison)
        return made

    def _alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor in whose memory operations on ``tensor`` run."""
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        if block is None:
            if tensor.dim() == 0:
                return tensor  # Perhaps a number, which counts less in the choice of the dtype.
            block = self._adopt(storage)
        memory = storage if block.base is None else block.base.untyped_storage()
        # It may be written when no inference mode is on.
        with torch.inference_mode(mode=False):
            made = torch.empty(0, dtype=tensor.dtype)
            return made.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())

    def _give(self, tensors: Collection[torch.Tensor], operation: Callable[[], object]) -> None:
        """Queue an operation on the memory of ``tensors`` on the current stream."""
        stream = self.current_stream()
        blocks = {id(block): block for block in map(self._block_of, tensors) if block is not None}
        for block in blocks.values():
            if block.is_freed and block.base is not None:
                self._fill(stream, block)
            if block.before:
                place = block.owner, stream
                for old in self._pools[block.owner][self._filled.get(place, 0) : block.before]:
                    if old.is_used_beside(stream):
                        self._fill(stream, old)
                self._filled[place] = max(self._filled.get(place, 0), block.before)
                block.before = 0
        count = stream.give(operation)
        self.operations += 1
        for block in blocks.values():
            block.users[stream] = count

    def _block_of(self, tensor: torch.Tensor) -> Block | None:
        return self._blocks.get(tensor.untyped_storage()._cdata)

    def _fill(self, stream: LateStream, block: Block) -> None:
        assert block.base is not None
        stream.give(partial(block.base.fill_, block.poison))

    # Operations

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run or queue one operation of torch."""
        if func is aten.is_pinned.default:
            return self.is_on_host(args[0])
        operator = _OPERATORS.get(func) or _OPERATORS.setdefault(func, _operator_of(func))
        is_pinned = bool(kwargs.pop("pin_memory", False))
        if func is aten._pin_memory.default:
            return self._made_on_host(self.values_of(args[0]))
        if func is aten.lift_fresh.default:
            return args[0] if self._block_of(args[0]) else self._taken(args[0])
        if operator.is_view:
            return func(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        _collect((args, kwargs), tensors)
        hosts = [tensor for tensor in tensors if self.is_on_host(tensor)]
        if is_pinned or (hosts and len(hosts) == len(tensors)):
            result = func(*args, **kwargs)
            if not operator.fills and operator.makes:
                _mapped(result, lambda tensor: _bytes_of(tensor.untyped_storage()).fill_(_poison_of(tensor.dtype)))
            return _mapped(result, self._made_on_host) if operator.returned is None else result
        if operator.makes or not tensors:
            result = func(*args, **kwargs)
            return _mapped(result, self._taken if operator.fills else self._untouched)
        if operator.asks:
            return self._ask(func, args, kwargs)
        if operator.returned is None:
            return self._compute(func, args, kwargs, tensors, operator)
        if func is not aten.copy_.default and any(map(self.is_on_host, _written(operator, args, kwargs))):
            return self._on_host(func, args, kwargs)
        self._queue(func, args, kwargs, tensors, [], operator)
        is_queued = args[2] if len(args) > 2 else kwargs.get("non_blocking")
        if func is aten.copy_.default and len(hosts) == 1 and not is_queued:
            self.current_stream().synchronize()
        return _results(operator, args, kwargs)

    def _ask(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation whose result the host has to know."""
        self.current_stream().synchronize()
        with torch.no_grad():
            result = func(*_mapped(args, self._alias), **_mapped(kwargs, self._alias))
        return _mapped(result, self._taken)

    def _on_host(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operation that writes memory of the host, on values of the device that it would be given by a copy."""
        self.current_stream().synchronize()
        func(*_mapped(args, self._alias), **_mapped(kwargs, self._alias))
        return _results(_OPERATORS[func], args, kwargs)

    def _compute(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[torch.Tensor], operator: Operator
    ) -> Any:
        """Queue an operation that returns new tensors."""
        try:
            form = self._form_of(func, args, kwargs, tensors)
        except NotImplementedError:
            return self._ask(func, args, kwargs)
        made: list[torch.Tensor] = []
        result = self._real(form, tensors, made)
        self._queue(func, args, kwargs, tensors, made, operator)
        return result

    def _real(self, form: Any, tensors: Sequence[torch.Tensor], made: list[torch.Tensor]) -> Any:
        """Return a result of this form; new tensors are added to ``made``."""
        # No function inside a function: one that calls itself would keep the tensors until a garbage collection.
        if isinstance(form, _Form):
            made.append(self._new(*form))
            return made[-1]
        if isinstance(form, list | tuple):
            return type(form)(self._real(one, tensors, made) for one in form)
        return tensors[form] if isinstance(form, int) else form

    def _queue(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        operator: Operator,
    ) -> None:
        given = self._alias if func is aten.copy_.default else self._given
        late_args, late_kwargs = _mapped(args, given), _mapped(kwargs, given)
        outputs = list(map(self._alias, made))
        run = partial(func, *late_args, **late_kwargs)
        if operator.is_random:
            run = _with_numbers_of_now(run)

        def operation() -> None:
            results: list[torch.Tensor] = []
            _collect(run(), results)
            if outputs:
                # Results that are arguments are not new.
                own = {id(one) for one in _collected((late_args, late_kwargs))}
                for output, one in zip(outputs, [one for one in results if id(one) not in own], strict=True):
                    output.copy_(one)

        self._give([*tensors, *made], operation)

    def _given(self, tensor: torch.Tensor) -> torch.Tensor:
        # Kernels read no memory of the host: they are given a number, or what was copied, as it is now.
        return tensor.clone() if self.is_on_host(tensor) else self._alias(tensor)

    def _taken(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the device to which the values of a tensor of the host are copied."""
        if not _is_plain(values):
            return values
        made = self._new(values.size(), values.stride(), values.dtype)
        self._give([made], partial(self._alias(made).copy_, values))
        return made

    def _untouched(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._new(tensor.size(), tensor.stride(), tensor.dtype) if _is_plain(tensor) else tensor

    def _made_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if _is_plain(tensor) and self._block_of(tensor) is None:
            self._adopt(tensor.untyped_storage()).is_host = True
        return tensor

    def _form_of(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """Return the result with a form in place of each new tensor, and a number in place of each argument."""
        are_known = tuple(self._block_of(tensor) is not None for tensor in tensors)
        key = func, _signature(args), _signature(kwargs), are_known
        if key in self._shapes:
            return self._shapes[key]
        metas: dict[int, torch.Tensor] = {}

        def meta(tensor: torch.Tensor) -> torch.Tensor:
            if self._block_of(tensor) is None and tensor.dim() == 0:
                return tensor
            if id(tensor) not in metas:
                metas[id(tensor)] = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta"
                )
            return metas[id(tensor)]

        meta_args, meta_kwargs = _mapped(args, meta), _mapped(kwargs, meta)
        if meta_kwargs.get("device") is not None:
            meta_kwargs["device"] = torch.device("meta")
        positions = {id(metas[id(one)]): index for index, one in enumerate(tensors) if id(one) in metas}

        def form(one: torch.Tensor) -> Any:
            return positions.get(id(one)) if id(one) in positions else _Form(one.size(), one.stride(), one.dtype)

        with torch.no_grad():
            found = self._shapes[key] = _mapped(func(*meta_args, **meta_kwargs), form)
        return found


class _Mode(TorchDispatchMode):
    """Makes operations of one thread run on the device."""

    sees_hooks = True

    def __init__(self, device: LateDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.device = device

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # It comes back with the tensors inside.
            return NotImplemented
        return self.device.dispatch(func, args, dict(kwargs or {}))


class _Form(NamedTuple):
    """What a new tensor is like."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


_OPERATORS: dict[Any, Operator] = {}


def _operator_of(func: Any) -> Operator:
    name = func._schema.name.removeprefix("aten::")
    arguments, returns = func._schema.arguments, func._schema.returns
    written = [index for index, arg in enumerate(arguments) if arg.alias_info is not None and arg.alias_info.is_write]
    by_alias = {frozenset(arguments[index].alias_info.before_set): index for index in written}
    returned = [by_alias.get(frozenset(one.alias_info.before_set)) if one.alias_info else None for one in returns]
    is_known = all(index is not None for index in returned) and bool(written)
    asks = any("Tensor" not in str(one.type) for one in returns) or bool(
        {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)
    )
    return Operator(
        is_view=func.namespace != "aten"
        or (not written and (func.is_view or name.startswith("_unsafe_view") or name == "_reshape_alias"))
        or name in {"set_", "is_same_size"},
        makes=not written and (name.startswith(("new_", "empty")) or name.endswith("_like")),
        fills="empty" not in name,
        asks=asks,
        is_random=torch.Tag.nondeterministic_seeded in func.tags,
        written=frozenset([*written, *(arguments[index].name for index in written)]),
        returned=tuple((index, arguments[index].name) for index in returned if index is not None) if is_known else None,
    )


def _written(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    named: dict[int | str, Any] = dict(enumerate(args))
    named.update(kwargs)
    return _collected([one for place, one in named.items() if place in operator.written])


def _results(operator: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    assert operator.returned is not None
    results = [args[index] if index < len(args) else kwargs[name] for index, name in operator.returned]
    return results[0] if len(results) == 1 else results or None


def _with_numbers_of_now(run: "partial[Any]") -> "partial[Any]":
    """Return an operation that takes the random numbers that it would take now, whenever it runs."""
    generator = run.keywords.get("generator") or torch.default_generator
    state = generator.get_state()
    run.func(*_mapped(run.args, torch.zeros_like), **_mapped(run.keywords, torch.zeros_like))

    def later() -> Any:
        now = generator.get_state()
        generator.set_state(state)
        try:
            return run()
        finally:
            generator.set_state(now)

    return partial(later)


def _poison_of(dtype: torch.dtype) -> int:
    # Other numbers may be indices.
    return NAN if dtype.is_floating_point or dtype.is_complex else 0


def _is_plain(one: object) -> bool:
    return isinstance(one, torch.Tensor) and one.layout == torch.strided and not one.is_meta


def _collect(value: Any, into: list[torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        if _is_plain(value):
            into.append(value)
    elif isinstance(value, (list, tuple)):
        for one in value:
            _collect(one, into)
    elif isinstance(value, dict):
        for one in value.values():
            _collect(one, into)


def _collected(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _collect(value, found)
    return found


def _mapped(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_mapped(one, function) for one in value)
    if isinstance(value, dict):
        return {name: _mapped(one, function) for name, one in value.items()}
    return value


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.size(), value.stride(), value.dtype, value.is_meta
    if isinstance(value, (list, tuple)):
        return tuple(map(_signature, value))
    if isinstance(value, dict):
        return tuple((name, _signature(one)) for name, one in value.items())
    return type(value), value


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)

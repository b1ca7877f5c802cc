"""Streams of ranks that share one device, with the rules of NCCL.

The thread of each rank has a current stream of its own. A collective runs on a stream of its group, after all that the
current streams of its ranks were given before the call. ``wait`` lets the current stream wait, and the host goes on.
The host waits only until the other ranks have made their calls.
"""

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from composable.errors import ConfigError

# About a millisecond, far longer than the kernels of a small model.
SLEEP_CYCLES = 2_000_000
# Every floating-point number of such bytes is NaN.
POISON = 0xFF


class SimulatedDevice:
    """The device that all ranks of a simulation share.

    Args:
        device: The device, with its index.
        module: The module of torch for its type, such as ``torch.cuda``; another one with the same functions in tests.
        owns: Says whether a tensor lies on the device; by default its ``device`` says so.
        backend: The backend of the default process group; by default one for the host and one for the device.

    Attributes:
        backend: The backend of the default process group.
        is_adverse: Collectives start late, and memory is NaN where nothing was written.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        module: Any = None,
        owns: Callable[[torch.Tensor], bool] | None = None,
        backend: str = "",
    ) -> None:
        self.device = device
        self.is_adverse = False
        self._module = module or torch.get_device_module(device)
        self._owns = owns or (lambda tensor: tensor.device == device)
        kind = "cuda" if device.type == "cpu" else device.type
        self.backend = backend or f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map.get(kind, 'nccl')}"
        self._streams: dict[Hashable, Any] = {}
        # What the caller has given the device; ranks start after it.
        self._before = self._module.current_stream().record_event()

    @staticmethod
    def of(device: "str | torch.device | SimulatedDevice") -> "SimulatedDevice | None":
        """Return the device that the caller of ``simulate`` has named; ``None`` for the CPU.

        Raises:
            ConfigError: torch does not know the device, or does not see it on this machine.
        """
        if isinstance(device, SimulatedDevice):
            return device
        try:
            found = torch.device(device)
            if found.type == "cpu":
                return None
            module = torch.get_device_module(found)
            index = module.current_device() if found.index is None else found.index
            torch.empty(0, device=torch.device(found.type, index))
        except (RuntimeError, AssertionError, AttributeError, TypeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(
                f"device is {device!r}, which torch cannot use here: {reason}", fix="pass 'cpu', or leave device out"
            ) from error
        return SimulatedDevice(torch.device(found.type, index))

    @property
    def generators(self) -> Sequence[torch.Generator]:
        """The random generators of the device, which ranks exchange with their turns."""
        every: Sequence[torch.Generator] = self._module.default_generators
        return every[self.device.index : self.device.index + 1] if every else ()

    def new_stream(self) -> Any:
        """Return a stream for a rank, on which the work that the caller has queued comes first."""
        stream = self._module.Stream()
        stream.wait_event(self._before)
        return stream

    @contextmanager
    def current(self, stream: Any) -> Iterator[None]:
        """Make ``stream`` current in the calling thread, where backwards run in that thread too.

        Without that autograd runs the backwards of all ranks in one thread, in which no rank could wait for another.
        """
        if self.device.index is not None:
            self._module.set_device(self.device.index)
        with torch.autograd.set_multithreading_enabled(False), self._module.stream(stream):
            yield

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        self._module.synchronize()

    def mark(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return an event after the work on ``tensors`` [any] so far; ``None``: they lie on the host."""
        return self._module.current_stream().record_event() if any(map(self._owns, tensors)) else None

    @contextmanager
    def communicating(self, group: Hashable, marks: Iterable[Any]) -> Iterator[Any]:
        """Run a collective of ``group`` on the stream of the group, after ``marks``; yields the stream."""
        if group not in self._streams:
            self._streams[group] = self._module.Stream()
        stream = self._streams[group]
        for mark in marks:
            if mark is not None:
                stream.wait_event(mark)
        with self._module.stream(stream):
            self.sleep()
            yield stream

    def wait_for(self, mark: Any) -> None:
        """Let the current stream wait for an event."""
        self._module.current_stream().wait_event(mark)

    def sleep(self) -> None:
        """Keep the current stream busy, if the device is adverse."""
        if self.is_adverse and hasattr(self._module, "_sleep"):
            self._module._sleep(SLEEP_CYCLES)

    @contextmanager
    def new_memory_is_poisoned(self) -> Iterator[None]:
        """Fill each buffer with NaN when it gets memory, which others may just have freed, if the device is adverse."""
        if not self.is_adverse or self.device.type == "cpu":
            yield
            return

        def fill(storage: torch.UntypedStorage) -> None:
            if storage.nbytes() and storage.device == self.device:
                with torch.no_grad():
                    whole = torch.empty(0, dtype=torch.uint8, device=self.device)
                    whole.set_(storage).fill_(POISON)

        with resizes_seen(fill):
            yield


_SEEING: list[Callable[[torch.UntypedStorage], object]] = []
_SEEING_LOCK = threading.Lock()


@contextmanager
def resizes_seen(seen: Callable[[torch.UntypedStorage], object]) -> Iterator[None]:
    """Call ``seen`` with each storage whose memory was freed, or came back: a resize is no operation on tensors."""
    storage_class: Any = torch.UntypedStorage
    with _SEEING_LOCK:
        if not _SEEING:
            resize = storage_class.resize_

            def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
                result = resize(storage, nbytes)
                for one in list(_SEEING):
                    one(storage)
                return result

            storage_class.resize_ = resized
        _SEEING.append(seen)
    try:
        yield
    finally:
        with _SEEING_LOCK:
            _SEEING.remove(seen)
            if not _SEEING:
                del storage_class.resize_


def on_device(device: SimulatedDevice | None, stream: Any) -> AbstractContextManager[None]:
    """Return the context in which the thread of a rank runs; without a device nothing is special."""
    return nullcontext() if device is None else device.current(stream)


def poison(tensors: Iterable[torch.Tensor]) -> None:
    """Fill floating-point tensors [any] with NaN; others, which may be indices, with zeros."""
    for tensor in tensors:
        if not (tensor.is_floating_point() or tensor.is_complex()):
            tensor.zero_()
        elif tensor.itemsize > 1 or not tensor.is_contiguous():
            tensor.fill_(float("nan"))
        else:
            tensor.view(torch.uint8).fill_(POISON)

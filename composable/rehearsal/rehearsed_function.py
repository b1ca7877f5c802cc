"""Rehearsals: a function runs as one rank of many, on fake tensors, and its memory is counted.

torch's ``FakeTensorMode`` makes tensors that have shapes and dtypes and no values, and its fake process group answers
at once. A mode above them follows each storage from the operation that makes it to its end, so a step of any size takes
no memory, no device and no other rank.

Source: fake tensors, torch's ``torch._subclasses.fake_tensor``.
"""

import os
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from composable.errors import ConfigError, UsageError
from composable.ground.frames import in_backward
from composable.ground.modes import sees_hooks
from composable.ground.names import bytes_text, check_int, class_name, module_text
from composable.ground.torch_private import (
    DEVICE_OF,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    HashStore,
    TorchDispatchMode,
    current_autograd_node,
    modes_off,
    next_node_number,
    register_fake_backend,
)
from composable.rehearsal.fake_files import unchanged_files
from composable.testing import resizes_seen

# What makes tensors, and how a place in it begins.
_PHASES = {"outside": "no forward or backward", "forward": "forward", "backward": "backward"}
# What does not lie on the device: it is on the host, as the script says; "unplaced", where torch says so, which takes
# the device for the host; or on the host for good.
ON_HOST = frozenset({"host", "unplaced", "offloaded"})

# A context in which tensors have values.
with_values = partial(modes_off, lambda mode: sees_hooks(mode) and not isinstance(mode, FakeTensorMode))


@dataclass(frozen=True)
class Rehearsal:
    """The memory of one rank, as ``rehearse`` counted it.

    Attributes:
        rank: The rank.
        world_size: How many ranks there are.
        peak_bytes: The most bytes that its tensors had at one time.
        peak_at: Where that was: the phase, and the module that ran.
        parts: The bytes at the peak by what made them: "gathered" parameters; what was made "outside" of forwards and
            backwards, which is parameters and the state of optimizers, inputs, and what a step makes for a while; and
            what is made in "forward", activations, and in "backward", gradients.
    """

    rank: int
    world_size: int
    peak_bytes: int
    peak_at: str
    parts: Mapping[str, int]

    def __str__(self) -> str:
        parts = ", ".join(f"{bytes_text(count)} {name}" for name, count in self.parts.items() if count)
        return f"rank {self.rank} of {self.world_size}: peak {bytes_text(self.peak_bytes)} in {self.peak_at} ({parts})"


def rehearse(
    world_size: int, fn: Callable[[], object], *, rank: int = 0, ranks_per_host: int | None = None
) -> Rehearsal:
    """Call ``fn()`` as one rank of ``world_size``, on fake tensors, and return the memory that it needs.

    Inside, torch.distributed is initialised, torchrun's environment variables are set, and every tensor that is made is
    fake. Collectives return at once; what another rank would send has the right shape. Nobody else is needed: call it
    in a plain process. Make the model, its annotations and its optimizer inside ``fn``, and run two steps: the first
    one makes the optimizer's state.

    Bytes are those of all tensors, on whatever device, before an allocator rounds them. What a library takes for
    itself, and what one operation needs while it runs, is not counted.

    Args:
        world_size: How many ranks.
        fn: Trains for a step or two, on batches of the real shapes.
        rank: Which of the ranks ``fn`` is.
        ranks_per_host: How many ranks share a host, as ``HYBRID_SHARD`` without a mesh sees it; ``None``: all do.

    Raises:
        ConfigError: A wrong argument, or ``fn`` wants a value of a fake tensor; the message has the line.
        UsageError: torch.distributed is initialised in this process; or ``fn`` changes a file that is not temporary,
            or starts a program: a ``FileChangeError``, before it happens.
        Exception: The error of ``fn``.
    """
    on_host = world_size if ranks_per_host is None else ranks_per_host
    for name, value, least in (("world_size", world_size, 1), ("rank", rank, 0), ("ranks_per_host", on_host, 1)):
        check_int(name, value, least, fix=f"pass a number from {least}")
    if rank >= world_size:
        raise ConfigError(f"rank is {rank}, of {world_size} ranks", fix=f"pass a number from 0 to {world_size - 1}")
    if dist.is_initialized():
        raise UsageError("torch.distributed is initialised in this process", fix="rehearse in a plain process")
    memory = StepMemory()
    with (
        _as_rank(rank, world_size, on_host),
        memory.watching(),
        FakeTensorMode(allow_non_fake_inputs=True),
        memory,
        unchanged_files(),
    ):
        try:
            fn()
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            what = f"a fake tensor has no values, and {error.func} wants one"
            fix = "leave that line out of a rehearsal: read no loss, and let nothing depend on values"
            raise ConfigError(what, at=line_of_error(error), fix=fix) from error
    return Rehearsal(rank, world_size, memory.peak, memory.peak_at, memory.parts_at_peak)


@contextmanager
def _as_rank(rank: int, world_size: int, on_host: int) -> Iterator[None]:
    told = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % on_host,
        "LOCAL_WORLD_SIZE": on_host,
        "GROUP_RANK": rank // on_host,
    }
    before = {name: os.environ.get(name) for name in told}
    os.environ.update({name: str(value) for name, value in told.items()})
    register_fake_backend()
    is_completed = dist.Work.is_completed
    setattr(dist.Work, "is_completed", lambda _: True)  # noqa: B010  # those of fake groups never say so
    try:
        dist.init_process_group("fake", store=HashStore(), rank=rank, world_size=world_size)
        yield
    finally:
        setattr(dist.Work, "is_completed", is_completed)  # noqa: B010
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of a trace that belongs neither to torch nor to this library."""
    libraries = tuple(str(Path(str(one.__file__)).parent) for one in (torch, sys.modules["composable"]))
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not one.filename.startswith(libraries)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def device_in_kernels(tensor: FakeTensor) -> torch.device:
    """Return the device that kernels see, as the fake mode answers: they ask some times in each operation."""
    return torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device


def operands(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the arguments or results of an operation."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from operands(value)


def with_memory(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the tensors among the arguments or results of an operation that have memory, as sparse ones have not."""
    # To ask a fake tensor ``is_meta`` is an operation.
    return [
        one
        for one in operands(values)
        if one.layout == torch.strided
        and not (one.fake_device.type == "meta" if isinstance(one, FakeTensor) else one.is_meta)
    ]


class StepMemory(TorchDispatchMode):
    """Follows every storage from the operation that makes it to its end.

    Attributes:
        now: The bytes of all storages that are alive.
        peak: The most bytes so far.
        peak_at: Where that was.
        parts_at_peak: The bytes then, by what made them.
    """

    sees_hooks = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak, self.peak_at = 0, "nothing"
        self.parts_at_peak: dict[str, int] = {}
        self.now = 0
        self._made: Counter[str] = Counter()
        # Every storage that is alive, what made it, and its bytes; those that are freed and filled again: "gathered".
        self._known: dict[int, tuple[Any, str, int]] = {}
        self._running: list[tuple[nn.Module, int]] = []
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        # For each forward that ended: its first and last node of autograd, and the module's name.
        self._forwards: list[tuple[int, int, str]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # Its operations on local tensors come here.
        if func is DEVICE_OF:
            return device_in_kernels(args[0])
        result = func(*args, **(kwargs or {}))
        phase = self._phase()
        for tensor in with_memory((*args, *(kwargs or {}).values(), result)):
            self._follow(tensor.untyped_storage(), phase)
        self._note_peak()
        return result

    def _note_peak(self) -> None:
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, self.place()
            self.parts_at_peak = {name: self._made[name] for name in ("gathered", *_PHASES) if self._made[name]}

    def place(self) -> str:
        """Return what runs now: the phase, and the module."""
        phase = self._phase()
        return f"{_PHASES[phase]}{self._module(phase)}"

    def _phase(self) -> str:
        return "backward" if in_backward() else "forward" if self._running else "outside"

    def _follow(self, storage: torch.UntypedStorage, phase: str) -> None:
        key, count = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is None:
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key)), phase, 0
            self._count(key, phase, count)
        elif known[2] != count and known[1] != "freed":  # A view of what is freed is as large as it was.
            self._count(key, "gathered", count)

    def _count(self, key: int, phase: str, count: int) -> None:
        """Let a known storage have been made in ``phase``, and have ``count`` bytes."""
        find, before, counted = self._known[key]
        self._known[key] = find, phase, count
        self._add(before, -counted)
        self._add(phase, count)

    def _add(self, phase: str, count: int) -> None:
        self._made[phase] += count
        self.now += count * (phase not in ON_HOST)

    def _forget(self, key: int) -> None:
        self._count(key, "outside", 0)
        del self._known[key]

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata in self._known:
            self._count(storage._cdata, "gathered" if storage.nbytes() else "freed", storage.nbytes())
            self._note_peak()

    # Names

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See what is no operation: in which module's forward they run, and which buffers are freed or come back."""
        hooks = [
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with resizes_seen(self._resized):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, module: nn.Module, _inputs: object) -> None:
        if not self._running and module not in self._names:
            self._names.update((one, name) for name, one in module.named_modules())
        self._running.append((module, next_node_number()))

    def _leave(self, module: nn.Module, _inputs: object, _output: object) -> None:
        while self._running:
            left, first = self._running.pop()
            self._forwards.append((first, next_node_number(), self._name_of(left)))
            if left is module:
                break

    def _name_of(self, module: nn.Module) -> str:
        name = self._names.get(module, "")
        return f" of {module_text(name, class_name(module))}"

    def _module(self, phase: str) -> str:
        if phase == "forward":
            return self._name_of(self._running[-1][0])
        node = current_autograd_node() if phase == "backward" else None
        number = -1 if node is None else node._sequence_nr()
        # Inner forwards end first.
        return next((name for first, end, name in self._forwards if first <= number < end), "")

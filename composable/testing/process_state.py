"""What a rank in a process would have for itself, and threads of one process share.

Kept per rank, and exchanged whenever the turn passes from one rank to another: random generators,
default dtype, deterministic algorithms, warning filters and where ``print`` goes. Grad mode, autocast
and the like are a thread's own in torch already.
"""

import ctypes
import random
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ProcessState"]

# What `warnings.catch_warnings` replaces, and puts back.
_WARNING_PARTS = ("filters", "showwarning", "_showwarnmsg_impl")


class ProcessState:
    """What the process had at one moment: taken when made.

    Args:
        since: What it had when the rank that now hands over began.
    """

    __slots__ = ("_deterministic", "_dtype", "_numpy", "_python", "_streams", "_torch", "_warnings")

    def __init__(self, since: "ProcessState | None" = None) -> None:
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        self._numpy: _NumpyState | None = _take_numpy(None if since is None else since._numpy)
        self._dtype = torch.get_default_dtype()
        self._deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._warnings = [getattr(warnings, part, None) for part in _WARNING_PARTS]
        self._streams = sys.stdout, sys.stderr

    def restore(self, current: "ProcessState | None" = None) -> None:
        """Give the process back what it had.

        Args:
            current: What it has now, if that is known.
        """
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None and (current is None or self._numpy is not current._numpy):
            sys.modules["numpy"].random.set_state(self._numpy.state)
        if torch.get_default_dtype() != self._dtype:
            torch.set_default_dtype(self._dtype)
        is_on, warns = self._deterministic
        if (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()) != (
            is_on,
            warns,
        ):
            torch.use_deterministic_algorithms(is_on, warn_only=warns)
        self._restore_warnings()
        sys.stdout, sys.stderr = self._streams

    def _restore_warnings(self) -> None:
        is_changed = False
        for part, value in zip(_WARNING_PARTS, self._warnings):
            if value is not None and getattr(warnings, part) is not value:
                setattr(warnings, part, value)
                is_changed = True
        if is_changed:
            # Modules remember by version of the filters what they have warned of.
            forget = getattr(warnings, "_filters_mutated", None) or getattr(
                warnings, "_filters_mutated_lock_held", None
            )
            if forget is not None:
                with getattr(warnings, "_lock", _NO_LOCK):
                    forget()


@dataclass(frozen=True, eq=False)
class _NumpyState:
    """The state of NumPy's global generator, and the memory that it counts in."""

    state: Any
    memory: bytes

    def is_current(self, memory: bytes) -> bool:
        # A normal number that was drawn as one of a pair waits outside that memory.
        return bool(memory) and memory == self.memory and not self.state["has_gauss"]


def _take_numpy(since: _NumpyState | None) -> _NumpyState | None:
    """Return NumPy's state; ``since`` itself where nothing was drawn, because reading it takes 30 us."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    memory = _memory_of(numpy)
    if since is not None and since.is_current(memory):
        return since
    return _NumpyState(numpy.random.get_state(legacy=False), memory)


def _memory_of(numpy: Any) -> bytes:
    get = getattr(numpy.random, "get_bit_generator", None)
    generator = None if get is None else get()
    if not isinstance(generator, numpy.random.MT19937):
        return b""
    # 624 words and a position.
    return ctypes.string_at(generator.ctypes.state_address, 625 * 4)


class _NoLock:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_NO_LOCK = _NoLock()

"""What a rank in a process would have for itself, and threads of one process share.

Kept per rank, and exchanged whenever the turn passes from one rank to another: random generators,
default dtype, deterministic algorithms, warning filters and where ``print`` goes. Grad mode, autocast
and the like are a thread's own in torch already.
"""

import random
import sys
import warnings
from typing import Any

import torch

__all__ = ["ProcessState"]

# What `warnings.catch_warnings` replaces, and puts back.
_WARNING_PARTS = ("filters", "showwarning", "_showwarnmsg_impl")


class ProcessState:
    """What the process had at one moment: taken when made."""

    __slots__ = ("_deterministic", "_dtype", "_numpy", "_python", "_streams", "_torch", "_warnings")

    def __init__(self) -> None:
        self._torch = torch.default_generator.get_state()
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy: Any = None if numpy is None else numpy.random.get_state()
        self._dtype = torch.get_default_dtype()
        self._deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._warnings = [getattr(warnings, part, None) for part in _WARNING_PARTS]
        self._streams = sys.stdout, sys.stderr

    def restore(self) -> None:
        """Give the process back what it had."""
        torch.default_generator.set_state(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
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


class _NoLock:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


_NO_LOCK = _NoLock()

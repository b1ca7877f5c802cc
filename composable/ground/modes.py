"""The door between the modes that users have on and the work of hooks.

A mode of torch sees every operation of its thread, and may answer it: a selective checkpoint gives the results that it
has kept, one after the other, and ``torch.device`` chooses where tensors are made. So hooks, collectives and casts of
annotations run outside of such modes, and so do functions of users that reduce or step gradients in their place. Where
there are no modes, it costs two calls that count them.

Three kinds stay on: those that torch needs itself, the tools of ``torch.distributed``, which follow collectives and
memory, and modes with the attribute ``sees_hooks = True``. Autocast, the default dtype, anomaly mode and hooks on saved
tensors need no door: hooks name each dtype, make no operation that autocast changes, and save no tensor. What autograd
runs is the graph's and seen: the backward of a cast of inputs, or of the copy of a parameter in low precision.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, TypeVar

from composable.ground.torch_private import dispatch_modes, function_modes, modes_off, modes_on, opaque

T = TypeVar("T")
_NOTHING = nullcontext()


def is_watched() -> bool:
    """Say whether a mode is on that is to see no hook, where ``dispatch_modes`` or ``function_modes`` count some."""
    return not all(map(sees_hooks, modes_on()))


def sees_hooks(mode: Any) -> bool:
    """Say whether a mode stays on in hooks."""
    is_needed = getattr(mode, "sees_hooks", False) or getattr(mode, "is_infra_mode", bool)()
    return is_needed or type(mode).__module__.startswith("torch.distributed.")


# A context without the modes that are to see no hook.
outside_modes = partial(modes_off, sees_hooks)


def unseen(fn: Callable[..., T], *, traced: Callable[..., Any] | None = None) -> Callable[..., T]:
    """Let ``fn`` run outside of modes, ``opaque``. Hooks of each module ask ``is_watched``: they save a call."""

    @wraps(fn)
    def run(*args: Any, **kwargs: Any) -> T:
        with outside_modes() if dispatch_modes() or function_modes() else _NOTHING:
            return fn(*args, **kwargs)

    return opaque(run, traced=traced)

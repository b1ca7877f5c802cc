"""The methods that a fully sharded module gains.

Names and meaning follow torch's ``fully_shard``, so that code written for it runs with the
import changed.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import nn

from composable.arguments import check_bool, check_device, check_module, described
from composable.errors import ConfigError, UsageError, located, place_of_rank
from composable.fqns import describe_module
from composable.reduction_control import ReductionControl
from composable.runtime import FullyShardState, call_as_forward, copy_module, handle_of_module, sharded_state_of
from composable.storage import FlatBuffer, Handle, MarkedMemory, ShardedParam

__all__ = ["FSDPModule", "UnshardHandle", "add_mixin", "register_fsdp_forward_method", "remove_mixin"]


class UnshardHandle:
    """The result of an asynchronous ``unshard``."""

    def __init__(self, state: FullyShardState, handles: Sequence[Handle]) -> None:
        self._state = state
        self._handles: list[Handle] = list(handles)

    def wait(self) -> None:
        """Wait until the parameters are unsharded: the thread on CPU, the current stream on CUDA."""
        pending, self._handles = [handle for handle in self._handles if handle.modules], []
        if not pending:
            return  # Waited for before, or no longer annotated.
        scheduler = self._state.lazy_init().scheduler
        for handle in pending:
            scheduler.unshard(handle)


class FSDPModule(ReductionControl):
    """Mixin of every fully sharded module, annotated by hand or picked by a policy."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `sequential[:2]` builds `type(sequential)(...)`: the slice is a plain container again.
        original = cls.__bases__[1]
        return original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        return copy_module(_managed(self)[0], type(self).__bases__[1], memo)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a sharded module cannot be pickled as a whole",
            at=f"{place_of_rank()}, {describe_module(_managed(self)[0])}",
            fix="save its state_dict() with torch.distributed.checkpoint; copy.deepcopy copies it",
        )

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Move parameters and buffers to ``device`` without their values, as ``nn.Module.to_empty`` does.

        Only shards are allocated, one tensor for each of a handle's dtypes; parameters stay the same
        objects. The new memory is marked (NaN in floats): what nobody fills is an error at the first use.
        """
        check_device("device", device, or_none=True)
        check_bool("recurse", recurse)
        with MarkedMemory():
            super().to_empty(device=device, recurse=recurse)  # type: ignore[misc]  # of nn.Module, further down the MRO
        own, state = _managed(self)
        for handle in _handles(self, recurse=recurse):
            for flat in handle.buffers:
                flat.is_marked = True
        for module in own.modules() if recurse else (own,):
            state.marked_buffers += [(module, name) for name, buffer in module._buffers.items() if buffer is not None]
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Convert the module, as ``to``, ``cuda`` and ``to_empty`` do: each handle's shard as one tensor.

        Torch's own way would put other tensors into the parameters, without the marks and hooks of users.

        Raises:
            UsageError: A parameter's dtype would change, or forward or backward is running.
        """
        handles = _handles(self, recurse=False)
        for handle in _handles(self, recurse=True):
            _check_convertible(handle, fn)
        for handle in handles:
            handle.attach()
        whole: list[FlatBuffer] = []
        single: list[ShardedParam] = []
        reached = set(_managed(self)[0].modules()) if recurse else {self}
        for handle in handles:
            for flat in handle.buffers:
                if recurse and len(handle.modules) == 1 and all(param.is_attached for param in flat.params):
                    whole.append(flat)
                else:
                    # Other modules share it, or this call sees a part of it.
                    single += [param for param in flat.params if any(module in reached for module, _ in param.owners)]
        with _hidden([*single, *(param for flat in whole for param in flat.params)]):
            super()._apply(_once_per_buffer(fn), recurse)  # type: ignore[misc]  # of nn.Module, further down the MRO
        for flat in whole:
            flat.apply(fn)
        for param in single:
            param.apply(fn)
        for handle in handles:
            handle.attach()
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero, as of any module: also while modules hold unsharded parameters."""
        super().zero_grad(set_to_none)  # type: ignore[misc]  # of the module's own class, which comes after this one
        handles = {
            handle: None for module in _managed(self)[0].modules() if (handle := handle_of_module(module)) is not None
        }
        for param in [param for handle in handles for param in handle.params]:
            grad = param.sharded.grad
            if grad is not None and set_to_none:
                param.sharded.grad = None
            elif grad is not None:
                grad.zero_()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gather this module's own parameters.

        Collective: all ranks of the shard group, same order. Not recursive.

        Args:
            async_op: Return at once; the parameters are usable after ``wait()`` on the result
                or in the module's forward.
        """
        _, state = _managed(self)
        check_bool("async_op", async_op)
        scheduler = state.lazy_init().scheduler
        handles = _handles(self, recurse=False)
        scheduler.shards_written()
        for handle in handles:
            scheduler.begin_unshard(handle)
        pending = UnshardHandle(state, handles)
        if async_op:
            return pending
        pending.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own unsharded parameters. Not collective, not recursive."""
        scheduler = _managed(self)[1].lazy_init().scheduler
        for handle in _handles(self, recurse=False):
            scheduler.reshard(handle)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether the next backwards reduce gradients, or keep them unsharded for a later one.

        Every rank must choose alike. Without it gradients stay in full size on every rank.

        Args:
            requires_gradient_sync: Reduce at the end of each handle's backward.
            recurse: Also in fully sharded modules below.

        Raises:
            ConfigError: ``requires_gradient_sync`` is no bool.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        check_bool("recurse", recurse)
        for handle in _handles(self, recurse=recurse):
            handle.requires_gradient_sync = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Choose whether parameters are freed between forward and backward.

        Every rank must choose alike.

        Args:
            reshard_after_forward: Free them, and all-gather again in backward.
            recurse: Also in fully sharded modules below.
        """
        check_bool("reshard_after_forward", reshard_after_forward)
        check_bool("recurse", recurse)
        for handle in _handles(self, recurse=recurse):
            handle.reshard_option = handle.reshard_after_forward = reshard_after_forward

    def set_modules_to_forward_prefetch(self, modules: Sequence["FSDPModule"]) -> None:
        """Choose what to all-gather while this module's forward runs, in order.

        Replaces the recorded order for this module; an empty list switches prefetch off.
        Every rank must choose alike.
        """
        ahead = _prefetched(self, modules, "set_modules_to_forward_prefetch")
        for handle in _handles(self, recurse=False):
            handle.forward_prefetch = ahead

    def set_modules_to_backward_prefetch(self, modules: Sequence["FSDPModule"]) -> None:
        """Choose what to all-gather while this module's backward runs, in order.

        Replaces the recorded order for this module; an empty list switches prefetch off.
        Every rank must choose alike.
        """
        ahead = _prefetched(self, modules, "set_modules_to_backward_prefetch")
        for handle in _handles(self, recurse=False):
            handle.backward_prefetch = ahead


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method of a fully sharded module, say ``encode``, find its parameters unsharded as its forward does.

    torch's function of this name does nothing on our modules, and ours nothing on a module that is not fully sharded.
    Inputs are not moved to the device, and users' forward hooks do not run. Every rank calls the method alike.

    Raises:
        ConfigError: The module has no method of that name, or is no module.
    """
    check_module("module", module)
    if not isinstance(module, FSDPModule):
        return
    found = getattr(module, method_name, None) if isinstance(method_name, str) else None
    function = getattr(found, "__func__", None)
    if function is None:
        raise ConfigError(
            f"register_fsdp_forward_method got {described(method_name)}, which is no method",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix="pass the name of a method that its class defines",
        )

    @functools.wraps(function)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call_as_forward(self, function, (self, *args), kwargs)

    # Bound, and with no module of its own: a deep copy of the module calls it on the copy.
    setattr(module, method_name, MethodType(call, module))


def add_mixin(module: nn.Module) -> None:
    """Give ``module`` the methods of ``FSDPModule``; its class is swapped for a subclass."""
    module.__class__ = _class_with_mixin(type(module))


def remove_mixin(module: nn.Module) -> None:
    """Undo ``add_mixin``."""
    if isinstance(module, FSDPModule):
        module.__class__ = type(module).__bases__[1]


# Weakly: torch.fx makes a class for each module.
_CLASSES: "weakref.WeakKeyDictionary[type[nn.Module], weakref.ref[type[nn.Module]]]" = weakref.WeakKeyDictionary()


def _class_with_mixin(cls: type[nn.Module]) -> type[nn.Module]:
    known = _CLASSES.get(cls)
    found = None if known is None else known()
    if found is None:
        found = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
        _CLASSES[cls] = weakref.ref(found)
    return found


def _check_convertible(handle: Handle, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    state = sharded_state_of(handle.modules[0])
    assert state is not None, "a handle's modules are managed"
    if state.root is not None:
        if state.root.scheduler.is_idle:
            state.root.scheduler.reshard(handle)
        if handle.is_unsharded or handle.held_with is not None:
            raise UsageError(
                "a module cannot be converted while its parameters are in use",
                at=f"{place_of_rank()}, module {handle.fqn!r}",
                fix="do it between steps, outside of unshard_params",
            )
    with located(f"{place_of_rank()}, module {handle.fqn!r}"):
        for flat in handle.buffers:
            flat.check_convertible(fn)


@contextmanager
def _hidden(params: Sequence[ShardedParam]) -> Iterator[None]:
    """Let modules hold ``None`` for ``params``, in the same place among their parameters."""
    try:
        for param in params:
            for module, name in param.owners:
                module._parameters[name] = None
        yield
    finally:
        for param in params:
            param.place(param.sharded)


def _once_per_buffer(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Let ``fn`` convert a buffer with several names once, so that it stays one tensor."""
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return fn(tensor)
        if id(tensor) not in done:
            # With the tensor itself: while it is held, nothing else gets its id.
            done[id(tensor)] = (tensor, fn(tensor))
        return done[id(tensor)][1]

    return convert


def _managed(module: object) -> tuple[nn.Module, FullyShardState]:
    assert isinstance(module, nn.Module)
    state = sharded_state_of(module)
    if state is None:
        raise UsageError(
            "the module is no longer annotated", at=describe_module(module), fix="call fully_shard on it again"
        )
    return module, state


def _handles(module: object, *, recurse: bool) -> list[Handle]:
    """Return the handles of ``module``, with ``recurse`` also those below it, in DFS order."""
    own, _ = _managed(module)
    found: dict[Handle, None] = {}
    for submodule in own.modules() if recurse else (own,):
        handle = handle_of_module(submodule)
        if handle is not None:
            found[handle] = None
    return list(found)


def _prefetched(module: object, modules: Sequence[object], setter: str) -> tuple[Handle, ...]:
    ahead: list[Handle] = []
    own, _ = _managed(module)
    if not isinstance(modules, Sequence):
        raise ConfigError(
            f"{setter} got {type(modules).__name__}", at=describe_module(own), fix="pass a list of modules"
        )
    for other in modules:
        if not isinstance(other, FSDPModule):
            raise ConfigError(
                f"{setter} got {type(other).__name__}, which is not fully sharded",
                at=describe_module(own),
                fix="pass modules that fully_shard annotated or its policy picked",
            )
        ahead += _handles(other, recurse=False)
    return tuple(ahead)

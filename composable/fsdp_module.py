"""The methods of a fully sharded module.

Names and meaning follow torch's ``fully_shard``, so that code written for it runs with the
import changed.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from composable.annotated_module import ClassSwap, original_class
from composable.annotation import FullyShardState, call_as_forward, copy_module, handle_of_module, sharded_face
from composable.engine import FlatBuffer, Handle, ShardedParam, attach, lost_write
from composable.errors import ConfigError, UsageError, located
from composable.fsdp_settings import GatherSettings, ReductionSettings, handles_of, roots_of, state_of
from composable.ground.names import check_bool, check_device, check_module, describe_module, described
from composable.ground.torch_private import ask_before_conversions
from composable.ground.unfilled import MarkedMemory


class UnshardHandle:
    """The result of ``FSDPModule.unshard(async_op=True)``: parameters that are being gathered."""

    def __init__(self, state: FullyShardState, handles: Sequence[Handle]) -> None:
        self._state = state
        self._handles: list[Handle] = list(handles)

    def wait(self) -> None:
        """Wait until the parameters are unsharded: on CPU the thread waits, on CUDA the current stream."""
        pending, self._handles = [handle for handle in self._handles if handle.modules], []
        if not pending:
            return  # Waited for before, or no longer annotated.
        scheduler = self._state.lazy_init().scheduler
        for handle in pending:
            scheduler.unshard(handle)


class _PhaseName(str):
    """The name of a phase of a step; equal to a member of the same name in any enum."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return str(self) == getattr(other, "name", other)

    __hash__ = str.__hash__


@dataclass(frozen=True)
class StepState:
    """The phase of a step that a fully sharded module is in.

    Attributes:
        phase: ``"FORWARD"``; ``"PRE_BACKWARD"`` until the backward ends, also where forward runs again; or ``"IDLE"``.
        reshard_after_forward: The module's parameters are freed between forward and backward, and gathered again.
    """

    phase: str
    reshard_after_forward: bool

    # The attributes that TransformerEngine's weights read on modules of torch's ``fully_shard``.

    @property
    def _fsdp_param_group(self) -> "StepState":
        return self

    @property
    def _training_state(self) -> str:
        return self.phase

    @property
    def _reshard_after_forward(self) -> bool:
        return self.reshard_after_forward


class FSDPModule(GatherSettings, ReductionSettings):
    """Methods of a fully sharded module; its class becomes a subclass of this one. All ranks must call them alike."""

    _composable_kind = "sharded"

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield names and parameters as any module does; in threads that do not run the steps, sharded ones always."""
        state, removes = state_of(self), (*args[2:], kwargs.get("remove_duplicate", True))[0]
        seen: set[nn.Parameter] = set()
        for name, param in super().named_parameters(*args, **kwargs):
            # Asked for each: the other thread may begin its first step meanwhile, or end one.
            is_elsewhere = state.root is not None and state.root.scheduler.backwards.is_elsewhere
            face = sharded_face(param) if is_elsewhere else param
            if not (removes and face in seen):  # Of a tied parameter, torch may have met both faces.
                seen.add(face)
                yield name, face

    def step_state(self) -> StepState:
        """Return the module's phase in a step, for weight classes that gather themselves. Not collective."""
        state = state_of(self)
        handle, phase = handle_of_module(self), "IDLE"
        if state.root is not None:
            step = state.root.scheduler.step
            phase = "PRE_BACKWARD" if step.is_backward else "FORWARD" if step.running else phase
        return StepState(_PhaseName(phase), handle is not None and handle.settings.reshard_after_forward)

    _get_fsdp_state = step_state  # as TransformerEngine asks

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        return copy_module(self, original_class(type(self)), memo)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Move parameters and buffers to ``device`` without their values, as ``nn.Module.to_empty`` does.

        Only shards are allocated, one tensor for each of a handle's dtypes; parameters stay the same
        objects. The new memory is marked (NaN in floats): a tensor that is not filled is an error at its first use.
        """
        check_device("device", device, or_none=True)
        check_bool("recurse", recurse)
        with MarkedMemory():
            super().to_empty(device=device, recurse=recurse)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Convert the module, as ``to``, ``cuda`` and ``to_empty`` do: each handle's shard as one tensor.

        Torch's own ``_apply`` would put other tensors into the parameters, without the marks and hooks of users.

        Raises:
            UsageError: A parameter's dtype would change, or forward or backward is running.
        """
        handles = handles_of(self, recurse=False)
        _check_all_convertible(self, fn)
        for handle in handles:
            attach(handle)
        whole: list[FlatBuffer] = []
        single: list[ShardedParam] = []
        reached = set(self.modules()) if recurse else {self}
        for handle in handles:
            for flat in handle.buffers:
                if recurse and len(handle.modules) == 1 and all(param.is_attached for param in flat.params):
                    whole.append(flat)
                else:
                    # Other modules share the handle, or this call reaches only a part of it.
                    single += [param for param in flat.params if any(module in reached for module, _ in param.owners)]
        with _hidden([*single, *(param for flat in whole for param in flat.params)]):
            super()._apply(_once_per_buffer(fn), recurse)  # type: ignore[no-untyped-call]  # torch's has no types
        for flat in whole:
            flat.apply(fn)
        for param in single:
            param.apply(fn)
        for handle in handles:
            attach(handle)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero, as ``nn.Module`` does; also while modules hold unsharded parameters.

        Raises:
            UsageError: Gradients wait for the last backward; see ``set_is_last_backward``.
        """
        if any(root.scheduler.step.finalizer.is_deferred for root in roots_of(self, recurse=True)):
            raise UsageError(
                "zero_grad while gradients wait for the last backward",
                at=describe_module(self),
                fix="call finalize_backward() before, or reset_iter_state() to drop them",
            )
        super().zero_grad(set_to_none)
        for param in [param for handle in handles_of(self, recurse=True) for param in handle.params]:
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
        state = state_of(self)
        check_bool("async_op", async_op)
        scheduler = state.lazy_init().scheduler
        handles = handles_of(self, recurse=False)
        scheduler.refresh(handles)
        scheduler.step.streams.shards_written()
        for handle in handles:
            attach(handle)
            scheduler.begin_unshard(handle)
        pending = UnshardHandle(state, handles)
        if async_op:
            return pending
        pending.wait()
        return None

    def reshard(self) -> None:
        """Free this module's own unsharded parameters. Not collective, not recursive.

        Raises:
            UsageError: They were written to since they were gathered: ``unshard_params`` keeps what is written.
        """
        scheduler = state_of(self).lazy_init().scheduler
        for handle in handles_of(self, recurse=False):
            written = {flat.versioned[0]._version for flat in handle.buffers if flat.versioned}
            is_lost = handle.held_with is None and handle.is_unsharded and not written <= {handle.versions.gathered}
            error = lost_write(handle) if is_lost else None
            scheduler.reshard(handle)
            if error is not None:
                raise error


_LOG = logging.getLogger("composable")

# Setters of torch's class that this library does not need, each with the reason. They take ``False`` only.
REFUSED_SETTERS = {
    "set_custom_all_gather": "what moves bytes in another way is a transport of its own",
    "set_custom_reduce_scatter": "what moves bytes in another way is a transport of its own",
    "set_allocate_memory_from_process_group_for_comm": "parameters are gathered in torch's memory, not staged",
    "set_symm_mem_for_comm": "parameters are gathered in torch's memory, not staged",
    "set_separate_reduce_scatter_group": "gathers and reduce-scatters go through one transport",
    "_set_unshard_async_op": "gathers run on a stream of their own, and allocate there",
}


# Of these, what wants only speed: ``True`` is a log line.
_WISHES = ("set_allocate_memory_from_process_group_for_comm", "_set_unshard_async_op")


def _refusal(name: str, why: str) -> Callable[[nn.Module, object], None]:
    def refuse(self: nn.Module, value: object = True) -> None:
        if value is True and name in _WISHES:
            _LOG.info("%s(True) changes nothing: %s", name, why)
        elif value is not False:
            raise ConfigError(f"{name}({described(value)}): {why}", at=describe_module(self), fix="leave the call out")

    refuse.__doc__ = f"{'Log' if name in _WISHES else 'Refuse'} all but False: {why}."
    return refuse


for _name, _why in REFUSED_SETTERS.items():
    setattr(FSDPModule, _name, _refusal(_name, _why))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Unshard a fully sharded module for one of its methods, such as ``encode``, as for forward.

    Torch's function of this name does nothing on modules of this library; this one does nothing on modules that are
    not fully sharded. Inputs are not moved to the device, and forward hooks of users do not run. Every rank calls the
    method the same way. The module need not have a forward.

    Args:
        module: A fully sharded module.
        method_name: The name of a method that its class defines.

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
            at=describe_module(module),
            fix="pass the name of a method that its class defines",
        )

    @functools.wraps(function)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call_as_forward(self, function, (self, *args), kwargs)

    # A bound method, whose function refers to no module: a deep copy of the module calls it on the copy.
    setattr(module, method_name, MethodType(call, module))


_SWAP = ClassSwap(FSDPModule, "FSDP")
add_mixin = _SWAP.add
remove_mixin = _SWAP.remove


def check_conversions() -> None:
    """Let a plain module ask the sharded modules below it before it converts anything; once in a process."""
    ask_before_conversions(_check_all_convertible)


def _check_all_convertible(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for handle in dict.fromkeys(map(handle_of_module, module.modules())):
        if handle is not None:
            _check_convertible(handle, fn)


def _check_convertible(handle: Handle, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    root = state_of(handle.modules[0]).root
    if root is not None:
        if root.scheduler.step.is_idle:
            root.scheduler.reshard(handle)
        if handle.is_unsharded or handle.held_with is not None:
            raise UsageError(
                "a module cannot be converted while its parameters are in use",
                at=handle.described,
                fix="do it between steps, outside of unshard_params",
            )
    with located(handle.described):
        for flat in handle.buffers:
            flat.check_convertible(fn)


@contextmanager
def _hidden(params: Sequence[ShardedParam]) -> Iterator[None]:
    """Put ``None`` in place of ``params`` in their modules for a while; the order of parameters stays."""
    try:
        for param in params:
            for module, name in param.owners:
                module._parameters[name] = None
        yield
    finally:
        for param in params:
            param.place(param.sharded)


def _once_per_buffer(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that calls ``fn`` once for a buffer with several names, so that it stays one tensor."""
    done: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return fn(tensor)
        if id(tensor) not in done:
            # Keep the tensor itself too: while it is alive, no other object gets its id.
            done[id(tensor)] = (tensor, fn(tensor))
        return done[id(tensor)][1]

    return convert

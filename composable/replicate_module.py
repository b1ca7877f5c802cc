"""The methods that a replicated module gains.

Names and meaning follow torch's newer ``replicate`` and ``DistributedDataParallel``, so that loops and trainers that
look for them on the model find them.
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from torch import nn

from composable.arguments import check_bool
from composable.class_swap import ClassSwap, original_class
from composable.contract import get_registry
from composable.engine import HookFunction
from composable.errors import UsageError, place_of_rank
from composable.fqns import describe_module
from composable.frames import is_asked_by_pipeline
from composable.gradient_sync import no_sync
from composable.hook_registration import CommHookHandle
from composable.hook_registration import register_comm_hook as reduce_by_hook
from composable.replication import Precision, Reducer, replicate_state_of

__all__ = ["ReplicateModule", "add_replicate_mixin", "remove_replicate_mixin"]


class ReplicateModule:
    """Mixin of every module that ``replicate`` was called on."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # `sequential[:2]` builds `type(sequential)(...)`: the slice is a plain container again.
        return original_class(cls)(*args, **kwargs)

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        module = _module(self)
        swapped = type(module)
        # Copied as its own class is copied, which may have a way of its own.
        remove_replicate_mixin(module)
        try:
            twin = copy.deepcopy(module, memo)
        finally:
            module.__class__ = swapped
        if "replicate" in get_registry(twin):
            add_replicate_mixin(twin)
        return twin

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a replicated module cannot be pickled as a whole",
            at=f"{place_of_rank()}, {describe_module(_module(self))}",
            fix="save its state_dict(); copy.deepcopy copies it; unannotate makes it a plain module",
        )

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return what ``nn.Module.parameters`` does.

        Raises:
            UsageError: A stage of torch's pipelines asks, that takes gradients of inputs and of parameters apart.
        """
        if is_asked_by_pipeline() and (state := replicate_state_of(_module(self))) is not None:
            state.refuse_split_backward()
        return super().parameters(recurse)  # type: ignore[misc,no-any-return]  # of nn.Module, further down the MRO

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether the next backwards average gradients, or add them up on their rank for a later one.

        Args:
            requires_gradient_sync: Average.
            recurse: Also in replicated modules below.

        Raises:
            ConfigError: An argument is no bool.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        check_bool("recurse", recurse)
        for reducer in _reducers(self, recurse=recurse):
            reducer.requires_gradient_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Do what ``set_requires_gradient_sync`` does: an all-reduce is all the synchronisation there is.

        Raises:
            ConfigError: An argument is no bool.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        self.set_requires_gradient_sync(requires_all_reduce, recurse=recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether the next backward is the last one of a step, at whose end gradients are averages.

        Those before it add up on their rank. Also in replicated modules below.

        Raises:
            ConfigError: ``is_last_backward`` is no bool.
        """
        check_bool("is_last_backward", is_last_backward)
        for reducer in _reducers(self, recurse=True):
            reducer.is_last_backward = is_last_backward

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backward averages gradients, as torch's wrapper calls it; can be set."""
        return next(_reducers(self, recurse=False)).requires_gradient_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.set_requires_gradient_sync(value)

    def no_sync(self) -> AbstractContextManager[None]:
        """Return the context ``composable.no_sync(module)``."""
        return no_sync(_module(self))

    def register_comm_hook(self, state: object, hook: HookFunction) -> CommHookHandle:
        """Do what ``composable.register_comm_hook(module, state, hook)`` does. Collective."""
        return reduce_by_hook(_module(self), state, hook)


class CastingReplicateModule(ReplicateModule):
    """Mixin of those that lend copies of parameters or buffers while they run, as their mixed precision policy asks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run forward. Whatever is raised, it leaves modules with their own: Ctrl-C skips the hooks after forward."""
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]  # the module's class comes next
        except BaseException:
            precision = _precision(_module(self))
            if precision is not None:
                precision.put_back()
            raise


_SWAP = ClassSwap(ReplicateModule, "Replicate")
_CASTING_SWAP = ClassSwap(CastingReplicateModule, "Replicate")
remove_replicate_mixin = _SWAP.remove


def add_replicate_mixin(module: nn.Module) -> None:
    """Give an annotated module the methods of its kind, unless it has them."""
    precision = _precision(module)
    (_SWAP if precision is None or not precision.parts else _CASTING_SWAP).add(module)


def _precision(module: nn.Module) -> Precision | None:
    state = replicate_state_of(module)
    return None if state is None else state.precision


def _module(one: object) -> nn.Module:
    assert isinstance(one, nn.Module), "the mixin is on modules only"
    return one


def _reducers(one: object, *, recurse: bool) -> Iterator[Reducer]:
    """Yield what averages the gradients of a replicated module, and of those below it.

    Raises:
        UsageError: It is no longer annotated.
    """
    module = _module(one)
    if replicate_state_of(module) is None:
        raise UsageError(
            "the module is no longer annotated", at=describe_module(module), fix="call replicate on it again"
        )
    for visited in module.modules() if recurse else (module,):
        state = replicate_state_of(visited)
        if state is not None:
            yield state.reducer

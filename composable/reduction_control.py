"""The methods of a fully sharded module that choose how its gradients are reduced, and its parameters gathered.

Names and meaning follow torch's ``fully_shard``. None is recursive: each holds for the module's own parameters,
and for those of modules that share a handle with it. Every rank must choose alike.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from composable.annotation import handle_of_module, sharded_state_of
from composable.arguments import check_bool, check_number, described
from composable.errors import ConfigError, UsageError, located, place_of_rank
from composable.fqns import describe_module

__all__ = ["ReductionControl"]


class ReductionControl:
    """Mixin of ``FSDPModule``: control of the collectives of one module."""

    def set_gradient_divide_factor(self, factor: float | None) -> None:
        """Choose what sums of gradients are divided by; the default, and ``None``, is the number of ranks.

        Raises:
            ConfigError: ``factor`` is no finite number above zero.
            UsageError: A communication hook divides by itself.
        """
        fix = "pass a finite number above zero, or None for the number of ranks"
        number = None if factor is None else check_number("factor", factor, above=0.0, fix=fix)
        if number == math.inf:
            raise ConfigError("factor is inf", at=place_of_rank(), fix=fix)
        _change(self, divide_factor=number)

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """Do what ``set_gradient_divide_factor`` does; torch's older name of it."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Choose whether collectives only add up, and the division is a step of its own.

        For backends whose collectives cannot average. float16 is divided before, as its sums may overflow.

        Raises:
            ConfigError: ``enable`` is no bool.
            UsageError: A communication hook reduces by itself.
        """
        check_bool("enable", enable)
        _change(self, sums_only=enable)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], object] | None, *, stream: torch.Stream | None = None
    ) -> None:
        """Let ``hook`` change each reduced shard, [S] and averaged, before it becomes the gradient.

        It is called once for each reduction of each of the handle's dtypes, in the same order on all ranks, so it may
        communicate, say to average over copies of the model.

        Args:
            hook: Called with the shard, which it changes in place; it returns ``None``, or the same shard. What it
                starts it also waits for. Another result is an error at the end of backward. ``None``: none.
            stream: Of the device, where it runs; default: where the reductions do.

        Raises:
            ConfigError: ``hook`` is no function, or ``stream`` none of the module's device.
        """
        if hook is not None and not callable(hook):
            raise ConfigError(f"hook is {described(hook)}", at=place_of_rank(), fix="pass a function of a tensor")
        if stream is not None:
            _check_stream(self, hook, stream)
        _change(self, all_reduce_hook=hook, all_reduce_stream=stream)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Let ``comm`` gather the parameters, in place of the transport; ``None``: as before.

        The unsharded buffer's memory is the library's, so what ``comm`` allocates is for staging: the shard is copied
        in, the parameters are copied out. It is not called on one rank, nor where there is nothing to gather.

        Args:
            comm: As torch's ``AllGather``: ``allocate(size, *, dtype, device)`` returns a tensor, and a call with
                ``output_tensor``, ``input_tensor``, ``group`` and ``async_op=False`` returns ``None`` or a ``Work``.

        Raises:
            ConfigError: ``comm`` has no ``allocate`` or cannot be called.
        """
        _check_comm(comm)
        _change(self, all_gather=comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Let ``comm`` add up gradients, in place of the transport; ``None``: as before.

        Gradients are copied into what ``comm`` allocates, and the sum is copied out and divided; float16 is divided
        before. It is not called on one rank, nor where there is nothing to reduce.

        Args:
            comm: As torch's ``ReduceScatter``: as for ``set_custom_all_gather``, and ``op`` is always ``SUM``.

        Raises:
            ConfigError: ``comm`` has no ``allocate`` or cannot be called.
            UsageError: A communication hook reduces by itself.
        """
        _check_comm(comm)
        _change(self, reduce_scatter=comm)


def _change(module: object, **changes: Any) -> None:
    """Change what the user chose for the handle of ``module``; nothing where it has no parameters of its own."""
    assert isinstance(module, nn.Module)
    if sharded_state_of(module) is None:
        raise UsageError(
            "the module is no longer annotated", at=describe_module(module), fix="call fully_shard on it again"
        )
    handle = handle_of_module(module)
    if handle is not None:
        with located(f"{place_of_rank()}, {handle.described}"):
            handle.communicate_by(replace(handle.comms, **changes))


def _check_comm(comm: Any) -> None:
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise ConfigError(
            f"comm is {described(comm)}",
            at=place_of_rank(),
            fix="pass an object with allocate(size, *, dtype, device) that can be called as torch's AllGather or "
            "ReduceScatter is",
        )


def _check_stream(module: object, hook: object, stream: object) -> None:
    assert isinstance(module, nn.Module)
    state = sharded_state_of(module)
    device_type = "cpu" if state is None else state.grid.shard.device.type
    fits = isinstance(stream, torch.Stream) and stream.device.type == device_type != "cpu"
    if hook is None or not fits:
        raise ConfigError(
            f"stream is {described(stream)}, the module is on {device_type}{'' if hook else ', and there is no hook'}",
            at=place_of_rank(),
            fix="pass a stream of the module's device together with a hook; the CPU has none",
        )

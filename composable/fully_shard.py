"""Shard a module's parameters, gradients and optimizer state over ranks, without wrapping it.

``fully_shard`` checks, plans, builds handles and installs hooks, in that order: an error
leaves the module as it was.

Source: ZeRO, arXiv 1910.02054; FSDP, arXiv 2304.11277.
"""

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from composable.collectives import choose_transport
from composable.contract import contract, set_member
from composable.flat_buffer import FlatBuffer
from composable.fsdp_module import add_mixin
from composable.handle import Handle
from composable.hooks import register_fully_shard_hooks
from composable.mesh import device_of, resolve_mesh
from composable.plan import HandleMembers, ShardingStrategy, plan_with_members
from composable.policies import PolicyLike
from composable.state import FullyShardState

__all__ = ["fully_shard"]

ModuleT = TypeVar("ModuleT", nn.Module, Sequence[nn.Module])


@contract(FullyShardState, incompatible=("replicate",))
def fully_shard(
    module: ModuleT,
    *,
    policy: PolicyLike | None = None,
    mesh: DeviceMesh | None = None,
    strategy: ShardingStrategy | str | None = None,
    reshard_after_forward: bool | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
    ignored_modules: Collection[nn.Module] | None = None,
    transport: str = "auto",
) -> ModuleT:
    """Shard the parameters of ``module`` over the ranks of ``mesh``.

    Every rank of the mesh calls it, with equal arguments on an equal module; it does not
    communicate. From then on ``module.parameters()`` are ``RaggedDTensor``s of the full
    shape that hold this rank's piece, and only forward and backward see whole parameters.
    Each rank keeps its piece of its own values: seed all ranks alike, or load afterwards.

    Without ``policy`` one handle is made of every parameter below ``module`` that no
    earlier annotation manages: call it on submodules first and on the root last. With
    ``policy`` each picked submodule gets a handle, ``module`` the rest, and submodules
    annotated by hand before stay as they are.

    Args:
        module: What to annotate, or several modules that share one handle.
        policy: Which submodules get handles: a set of classes, a function of a module that
            returns a bool, ``ModuleWrapPolicy``, ``CustomPolicy`` or ``SizePolicy``.
        mesh: 1-D mesh of the ranks that share the parameters; default: all ranks.
        strategy: ``FULL_SHARD`` or ``SHARD_GRAD_OP``; instead of ``reshard_after_forward``.
        reshard_after_forward: Free the unsharded parameters between forward and backward.
            ``None``: free them, except those of the root, which backward needs first.
        ignored_params: Parameters to leave alone.
        ignored_modules: Modules to leave alone with all below them.
        transport: ``auto``, ``process_group`` or ``point_to_point``.

    Returns:
        ``module``, the same object; it and every fully sharded module is now also an ``FSDPModule``.

    Raises:
        UsageError: No process group is initialised.
        ConfigError: An argument is wrong; the message names the module, the parameter and the fix.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    state = fully_shard.state(modules[0])
    assert state is not None
    state.modules = tuple(modules)
    state.mesh = resolve_mesh(mesh, (param for one in modules for param in one.parameters()), caller="fully_shard")
    group = state.mesh.get_group()
    device = device_of(state.mesh)
    state.transport_name = choose_transport(device.type, dist.get_backend(group), group.size(), transport)
    with _collector_paused():
        state.plan, members = plan_with_members(
            module,
            policy=policy,
            world_size=group.size(),
            strategy=strategy,
            reshard_after_forward=reshard_after_forward,
            ignored_params=ignored_params,
            ignored_modules=ignored_modules,
            transport=state.transport_name,
        )
        _execute(state, members)
    return module


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep Python's cycle collector from scanning what is being built, again and again, to find that all of it lives.

    At 1000 handles that was half the time of an annotation.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _execute(state: FullyShardState, members: Sequence[HandleMembers]) -> None:
    """Build every shard first, then change the modules: what can fail comes before any change."""
    device = device_of(state.mesh)
    built = [
        [
            FlatBuffer(buffer_plan, handle_plan.module_fqns[0], member, state.mesh, device)
            for buffer_plan in handle_plan.buffers
        ]
        for handle_plan, member in zip(state.plan.handles, members, strict=True)
    ]
    for handle_plan, member, buffers in zip(state.plan.handles, members, built, strict=True):
        handle = Handle(handle_plan, member.modules, buffers)
        state._handles.append(handle)
        for fqn, original in member.originals.items():
            original._composable_replaced_by = fqn  # type: ignore[attr-defined]  # read by the optimizer check
        for module in member.modules:
            state._module_to_handle[module] = handle
            if module not in state.modules:
                set_member(module, "fully_shard", state)
    for module in dict.fromkeys((*state.modules, *state._module_to_handle)):
        state.hook_handles += register_fully_shard_hooks(module, state, state._module_to_handle.get(module))
        add_mixin(module)

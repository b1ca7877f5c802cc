"""The memory of a step under a plan: a fake copy of the model is annotated as the plan says, and runs it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composable
from composable.errors import ConfigError
from composable.ground.names import described
from composable.rehearsal.rehearsed_function import Rehearsal, rehearse, with_values

# Options that fully_shard takes as the plan did.
_SAME = ("strategy", "reshard_after_forward", "shard_placement_fn", "mp_policy", "offload_policy")


def rehearse_planned(
    module: Any, plan: Any, options: Any, step: Callable[[nn.Module], object], ranks_per_host: int | None
) -> Rehearsal:
    """Call ``step`` with a copy of ``module`` as the first rank of those in ``plan``, and return what it needs.

    Args:
        module: The module that was planned; its values are not read.
        plan: Its ``ShardPlan``.
        options: The ``ShardOptions`` of the plan.
        step: Runs forward and backward on batches that it makes; an optimizer too, if its state shall count.
        ranks_per_host: Ranks on each host.

    Raises:
        ConfigError: The module cannot be copied as plain tensors, or ``step`` wants a value.
    """
    if not callable(step) or not isinstance(module, nn.Module) or plan.kept_fqns:
        what = f"step is {described(step)}" if not callable(step) else "step needs one module without annotations"
        raise ConfigError(
            what, fix="pass a function of the model; else annotate inside of composable.rehearsal.rehearse"
        )

    def run() -> None:
        # Nothing here may hold the whole parameters, which the annotation frees.
        copied, ignored = _fake_copy(module, options)
        named = dict(copied.named_modules(remove_duplicate=False))
        picked = {named[fqn] for handle in plan.handles for fqn in handle.module_fqns} - {copied}
        mesh = None
        if plan.replicas > 1:
            with with_values():
                shape = (plan.replicas, plan.world_size)
                mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        composable.fully_shard(
            copied,
            policy=(lambda one: one in picked) if picked else None,
            mesh=mesh,
            options=composable.HandleOptions(align=options.align, unused_gradients=options.unused_gradients),
            **ignored,
            **{name: getattr(options, name) for name in _SAME},
        )
        step(copied)

    return rehearse(plan.world_size * plan.replicas, run, ranks_per_host=ranks_per_host)


def _fake_copy(module: nn.Module, options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return a copy with fake tensors, and what of it is ignored."""
    new: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        if type(tensor) not in {torch.Tensor, nn.Parameter, nn.Buffer}:
            fix = "make and annotate the model inside of composable.rehearsal.rehearse"
            raise ConfigError(f"step copies plain tensors only, and one is a {type(tensor).__name__}", fix=fix)
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        new[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake
    copied = copy.deepcopy(module, new)
    names = ("ignored_params", "ignored_modules")
    return copied, {name: [new[id(one)] for one in getattr(options, name) or () if id(one) in new] for name in names}

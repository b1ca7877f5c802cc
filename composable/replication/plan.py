"""The plan of one call of ``replicate``: what it averages, on which device, in which dtypes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.engine import has_torch_optimizer
from composable.errors import ConfigError
from composable.planning import MixedPrecisionPolicy
from composable.replication.delay import choose_delay
from composable.replication.managed import Ignored, ManagedTensors, ReducedParam, find_tensors
from composable.replication.options import ReplicateArguments
from composable.replication.precision import PrecisionPlan, plan_precision
from composable.replication.sparse import check_steppable


@dataclass(frozen=True)
class ReplicaPlan:
    """The checked plan of one call; nothing is changed yet."""

    arguments: ReplicateArguments
    ignored: Ignored
    managed: ManagedTensors
    params: Sequence[ReducedParam]  # The parameters whose gradients are averaged, in the order of registration.
    precision: PrecisionPlan | None  # The dtypes of a mixed precision policy; ``None``: there is no policy.
    device: torch.device  # The device of the parameters.

    @property
    def text(self) -> str:
        """The text that must be equal on all ranks."""
        precision = [] if self.precision is None else self.precision.lines
        return "\n".join([*self.arguments.lines, *self.managed.lines, *precision])


def plan_replica(
    modules: Sequence[nn.Module],
    ignored: Ignored,
    ranks: Sequence[int],
    device: torch.device,
    policy: MixedPrecisionPolicy,
    arguments: ReplicateArguments,
    delayed: tuple[object, object],
) -> ReplicaPlan:
    """Return the plan of one call of ``replicate``.

    Args:
        modules: The annotated modules.
        ignored: What they ignore.
        ranks: The global numbers of the ranks that average.
        device: Averages gradients.
        policy: The user's policy of mixed precision.
        arguments: The arguments that say how to average, without those that depend on the parameters.
        delayed: The options ``delay_all_reduce_named_params`` and ``param_to_hook_all_reduce``.

    Raises:
        ConfigError: A parameter cannot be averaged; or the policy, the delay or an optimizer in backward cannot be with
            one of them.
    """
    managed = find_tensors(modules, ignored, device, ranks)
    precision = plan_precision(modules, ignored.modules, managed, policy)
    split = [one.fqn for one in managed.params if one.is_sparse or isinstance(one.param, DTensor)]
    if precision is not None and split:
        raise ConfigError(
            "mp_policy cannot be for parameters that are split over other ranks or have sparse gradients",
            at=f"parameter {split[0]!r}",
            fix="first call replicate on their modules, without mp_policy",
        )
    params = [one for one in managed.params if one.param.requires_grad]
    arguments = replace(arguments, delay=choose_delay(*delayed, params), policy=str(policy))
    if precision is not None:
        params = [replace(one, reduce_dtype=precision.reduce_dtype(one.param)) for one in params]
    if any(has_torch_optimizer(one.param) for one in params):
        check_steppable(params)
    return ReplicaPlan(arguments, ignored, managed, params, precision, device)

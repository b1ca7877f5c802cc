"""Every private name of torch that this package uses, each with what it is for.

Other files import these names from here, so that a new torch release is checked in one
place. ``tests/test_torch_private.py`` holds the list against the installed torch.
"""

# ruff: noqa: I001  # sorted by who uses them
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, ReduceScatterOptions, Work

from composable.errors import UsageError

try:
    # -- transport: composable/collectives/
    from torch._C._distributed_c10d import AllgatherOptions  # the only options torch.distributed does not export

    # -- ragged parameters: composable/ragged/
    from torch import _foreach_copy_ as foreach_copy_  # fills many views in one call; gradients into buffers
    from torch import _foreach_mul_ as foreach_mul_  # scales many views in one call
    from torch import _foreach_norm as foreach_norm  # local norms of a list of pieces
    from torch._C import _disabled_torch_function_impl as disabled_torch_function  # what every DTensor has
    from torch._C._distributed import Placement  # base of placements; subclasses call super().__init__()
    from torch._ops import OpOverload  # what `__torch_dispatch__` is called with
    from torch.distributed import _functional_collectives as traceable_collectives  # torch.compile traces them
    from torch.distributed._functional_collectives import _are_we_tracing as is_tracing  # where a graph is being made
    from torch.distributed import _state_dict_utils as state_dict_utils  # its `_distribute_tensors` shards full values
    from torch.distributed.checkpoint import state_dict as dcp_state_dict  # loads full state dicts, scalars plain
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # mesh, placements, shape of a DTensor
    from torch.optim.optimizer import _foreach_supported_types as optim_foreach_types  # types that get foreach
    from torch.utils._foreach_utils import _foreach_supported_types as utils_foreach_types  # the same, to clip
    from torch.utils._python_dispatch import TorchDispatchMode  # sees every tensor that is made, also by users' code
    from torch.utils._pytree import tree_leaves, tree_map_only  # reach the tensors in an operation's arguments

    # -- optimizers: composable/optim/
    from torch._C import DisableTorchFunction  # reading gradients of a subclass costs a third

    # -- runtime: composable/runtime/
    from torch._C import _current_autograd_node as current_autograd_node  # the node whose backward is running
    from torch._C import _current_graph_task_id as current_graph_task_id  # -1 outside a running backward
    from torch._C import _will_engine_execute_node as will_engine_execute_node  # whether the backward reaches a node
    from torch.autograd.variable import Variable  # its `_execution_engine` runs the end of a backward
    from torch.utils._pytree import tree_map  # moves nested inputs to the device

    dtensor_new: Callable[..., torch.Tensor] = torch.Tensor._dtensor__new__  # wraps a local
    module_load = torch.nn.Module._load_from_state_dict  # what a module that loads in its own way overrides
    module_call_code = torch.nn.Module._call_impl.__code__  # the frame of a module's call, to tell a recursive one
    # Used below, at run time; here so that one that is gone is missed at import too.
    _USED_BELOW = (
        ProcessGroup._allgather_base,
        ProcessGroup._get_backend,
        ProcessGroup._reduce_scatter_base,
        Variable._execution_engine.queue_callback,
    )
except (ImportError, AttributeError) as error:
    raise UsageError(
        f"torch {torch.__version__} lacks what this package needs: {error}", fix="install torch 2.11 to 2.15"
    ) from error

__all__ = [
    "AllgatherOptions",
    "DTensorSpec",
    "DeviceMesh",
    "DisableTorchFunction",
    "OpOverload",
    "Placement",
    "TensorMeta",
    "TorchDispatchMode",
    "all_gather_into",
    "current_autograd_node",
    "current_graph_task_id",
    "dcp_state_dict",
    "disabled_torch_function",
    "dispatch_rule_holder",
    "dtensor_new",
    "foreach_copy_",
    "foreach_mul_",
    "foreach_norm",
    "is_tracing",
    "module_call_code",
    "module_load",
    "optim_foreach_types",
    "queue_callback",
    "reduce_scatter_into",
    "state_dict_utils",
    "timeout_of",
    "traceable_collectives",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "utils_foreach_types",
    "will_engine_execute_node",
]


def queue_callback(callback: Callable[[], None]) -> None:
    """Ask autograd to run ``callback`` at the end of the backward that is running."""
    Variable._execution_engine.queue_callback(callback)  # the engine takes it for the backward that runs


# -- ragged parameters: composable/ragged/


def dispatch_rule_holder() -> Any:
    """Return the class whose ``find(cls)`` says what runs an operation on tensors of class ``cls``, or ``None``."""
    # Asked for only where torch skips `__torch_dispatch__` of subclasses of DTensor.
    from torch._library.simple_registry import GenericTorchDispatchRuleHolder  # one for each operation

    return GenericTorchDispatchRuleHolder


# -- transport: composable/collectives/


def all_gather_into(group: ProcessGroup) -> Callable[[torch.Tensor, torch.Tensor, AllgatherOptions], Work]:
    """Return the all-gather of ``group`` that fills one tensor: ``(buffer, shard, options)``."""
    return group._allgather_base


def reduce_scatter_into(group: ProcessGroup) -> Callable[[torch.Tensor, torch.Tensor, ReduceScatterOptions], Work]:
    """Return the reduce-scatter of ``group`` that reads one tensor: ``(shard, source, options)``."""
    return group._reduce_scatter_base


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return how long the CPU collectives of ``group`` wait for a peer."""
    return group._get_backend(torch.device("cpu")).options._timeout

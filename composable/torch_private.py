"""Every private name of torch that this package uses, each with what it is for.

Other files import these names from here, so that a new torch release is checked in one
place. ``tests/test_torch_private.py`` holds the list against the installed torch.
"""

# ruff: noqa: I001  # sorted by who uses them
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

    # -- ranks as threads: composable/testing/
    from torch._C import _distributed_c10d as c10d_bindings  # looks groups up by name, per thread where told so
    from torch._C._distributed_c10d import PrefixStore, Store  # where the ranks of a group find each other
    from torch.distributed import distributed_c10d as c10d  # its `_world` holds all groups, its helper makes them
    from torch.distributed.distributed_c10d import _World as TorchWorld  # what torch reads of a world
    from torch.utils._python_dispatch import _disable_current_modes  # collectives are no operations of the caller

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
    "PrefixStore",
    "Store",
    "TensorMeta",
    "TorchDispatchMode",
    "TorchWorld",
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
    "forget_meshes",
    "is_tracing",
    "module_call_code",
    "module_load",
    "optim_foreach_types",
    "queue_callback",
    "reduce_scatter_into",
    "register_group",
    "state_dict_utils",
    "timeout_of",
    "torch_keeps_groups_by_thread",
    "traceable_collectives",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "utils_foreach_types",
    "will_engine_execute_node",
    "without_modes",
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


# -- ranks as threads: composable/testing/


@contextmanager
def torch_keeps_groups_by_thread(
    world: Callable[[], Any], new_group: Callable[..., Any], number: Callable[[], int | None]
) -> Iterator[None]:
    """Give threads process groups of their own while the context lasts.

    Args:
        world: Returns what holds the process groups of the calling thread, ``None`` for those of the process.
        new_group: Makes a process group for a thread that has a world; gets what torch's own function gets.
        number: Returns what tells meshes of the calling thread from those of others, or ``None``.
    """
    distributed: Any = c10d
    mesh_class: Any = DeviceMesh
    registry: Any = c10d_bindings
    own_world, own_new_group = distributed._world, distributed._new_process_group_helper
    own_init = mesh_class.__init__
    if torch.__version__ < "2.13":
        # DTensor makes fake tensors, for which torch 2.11, built for CUDA but without a device, keeps a guard for the
        # process in the first thread that asks, and crashes once that one has ended (pytorch/pytorch#178950).
        torch._C._ensureCUDADeviceGuardSet()

    class WorldOfThread:
        def __getattr__(self, name: str) -> Any:
            return getattr(world() or own_world, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(world() or own_world, name, value)

    def make_group(*args: Any, **kwargs: Any) -> Any:
        return own_new_group(*args, **kwargs) if world() is None else new_group(*args, **kwargs)

    def init_mesh(mesh: Any, *args: Any, **kwargs: Any) -> None:
        own_init(mesh, *args, **kwargs)
        # DTensor caches by mesh: those of two ranks are equal but for this.
        if (own_number := number()) is not None:
            mesh._thread_id, mesh._hash = own_number, None

    distributed._world, distributed._new_process_group_helper = WorldOfThread(), make_group
    mesh_class.__init__ = init_mesh
    registry._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        registry._set_thread_isolation_mode(False)
        distributed._world, distributed._new_process_group_helper = own_world, own_new_group
        mesh_class.__init__ = own_init


def register_group(name: Any, group: ProcessGroup) -> None:
    """Let functional collectives of the calling thread find ``group`` by its name."""
    # By name, because the functions that torch.compile traces take no objects.
    c10d_bindings._register_process_group(name, group)


def forget_meshes() -> None:
    """Empty the caches of DTensor that hold meshes."""
    # By a torch that has not been asked for DTensor, there is none to be emptied.
    if "torch.distributed.tensor" in sys.modules:
        dispatcher = torch.distributed.tensor.DTensor._op_dispatcher  # its results are cached by mesh
        cache = dispatcher.sharding_propagator.propagate_op_sharding
        # In some releases each thread has a cache of its own, which ends with it.
        getattr(cache, "cache_clear", lambda: None)()


def without_modes() -> AbstractContextManager[Any]:
    """Return a context in which no mode of the caller sees what tensors do."""
    # Switching off what is not on costs as much as a small collective.
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()

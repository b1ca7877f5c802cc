"""All private names of torch that are used.

Other files import these names from here, so that a new torch release is checked in one
place. ``tests/test_torch_private.py`` holds the list against the installed torch.
"""

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial, wraps
from types import CodeType, FunctionType
from typing import Any, TypeVar
import torch
from torch.distributed import ProcessGroup, ReduceScatterOptions, Work
from composable.errors import UsageError, place_of_rank

# There is no `__all__`: the file is the list. Sorted by the folders that use the names.
# ruff: noqa: F401, I001


try:
    # -- mixed precision of replicated modules: composable/replication/
    _alias = torch.ops.aten._unsafe_view.default  # the only operation on the input's memory that makes no view

    # -- transport: composable/comm/
    from torch._C._distributed_c10d import AllgatherOptions  # the only options torch.distributed does not export

    from torch.autograd.graph import _engine_run_backward  # every backward goes through it

    # -- ragged parameters: composable/dtensor/
    from torch import _foreach_copy_ as foreach_copy_  # fills many views in one call; gradients into buffers
    from torch import _foreach_mul_ as foreach_mul_  # scales many views in one call
    from torch import _foreach_norm as foreach_norm  # local norms of a list of pieces
    from torch._C import _disabled_torch_function_impl as disabled_torch_function  # every DTensor has it
    from torch._C._distributed import Placement  # base of placements; subclasses call super().__init__()
    from torch._ops import OpOverload  # the operations that `__torch_dispatch__` gets
    from torch.distributed import _functional_collectives as traceable_collectives  # torch.compile traces them
    from torch.distributed._functional_collectives import _are_we_tracing as is_tracing  # whether a graph is being made
    from torch.distributed.distributed_c10d import _ensure_all_tensors_same_dtype as check_of_collectives  # of lists
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import _api as dtensor_api  # makes DTensors of local tensors, and of full values
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # mesh, placements, shape of a DTensor
    from torch.optim.optimizer import _foreach_supported_types as optim_foreach_types  # types that get foreach
    from torch.utils._foreach_utils import _foreach_supported_types as utils_foreach_types  # the same for clipping
    from torch.utils._python_dispatch import TorchDispatchMode  # sees every tensor that is made, also by users' code
    from torch.utils._pytree import tree_leaves, tree_map_only  # reach the tensors in an operation's arguments

    # -- optimizers: composable/optim/
    from torch._C import DisableTorchFunction  # reading gradients of a subclass costs a third
    from torch.optim._adafactor import adafactor  # its step on whole parameters, where one rank has all of one
    from torch.optim._muon import _adjust_lr as muon_learning_rate  # Muon's step between its element-wise parts
    from torch.optim._muon import _zeropower_via_newtonschulz as muon_orthogonalised  # the same; of a whole matrix

    # -- runtime: composable/engine/
    from torch._C import _current_autograd_node as current_autograd_node  # the node whose backward is running
    from torch._C import _current_graph_task_id as current_graph_task_id  # -1 outside a running backward
    from torch._C import _will_engine_execute_node as will_engine_execute_node  # whether the backward reaches a node
    from torch._C._autograd import _get_sequence_nr as next_node_number  # number of this thread's next autograd node
    from torch.autograd.variable import Variable  # its `_execution_engine` runs the end of a backward
    from torch.nn.utils import parametrize, stateless
    from torch.utils._pytree import tree_map  # moves nested inputs to the device

    # -- profilers: regions in a trace
    from torch.autograd import profiler as autograd_profiler  # its `_is_profiler_enabled` says whether one runs

    # -- torch.compile: every hook of ours
    from torch._C._dynamo import eval_frame as frame_evaluation  # how the compiler treats the frames of a function

    # -- modes that users have on: every hook of ours
    from torch._C import _len_torch_dispatch_stack as dispatch_modes  # how many see the operations of this thread
    from torch._C import _len_torch_function_stack as function_modes  # how many see the calls of torch's functions
    from torch import overrides as function_stack  # puts modes on and off
    from torch.utils import _python_dispatch as dispatch_stack

    # -- transforms of torch.func: hooks of sharded modules
    from torch._C._functorch import peek_interpreter_stack as running_transform  # the innermost transform, or None
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as outside_transforms  # as a context

    # -- rehearsals: tensors that have shapes and no values, and collectives that return at once
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )

    from torch._C._distributed_c10d import FileStore, HashStore  # of processes of one machine, and of one process
    from torch._C._nn import _parse_to as parse_to  # what ``Module.to`` makes of its arguments
    from torch.nn.modules import _functions as nn_functions  # has the function of SyncBatchNorm

    # -- ranks as threads: composable/testing/
    from torch._C import _distributed_c10d as c10d_bindings  # finds groups by name, per thread if asked
    from torch._C._distributed_c10d import PrefixStore, Store  # where the ranks of a group find each other
    from torch.distributed import distributed_c10d as c10d  # its `_world` holds all groups, its helper makes them
    from torch.distributed.distributed_c10d import _World as TorchWorld  # the attributes that torch reads

    dtensor_new: Callable[..., torch.Tensor] = torch.Tensor._dtensor__new__  # wraps a local tensor
    make_subclass: Callable[..., Any] = torch.Tensor._make_subclass  # an instance on other memory, without its __new__
    module_load = torch.nn.Module._load_from_state_dict  # a module that loads in its own way overrides it
    # These may swap a parameter for a new one of the same module.
    conversion_codes = tuple(one.__code__ for one in (torch.nn.Module._apply, module_load, parametrize._maybe_set))
    # Asks for a call at the end of the backward that is running, if it ends well.
    queue_callback: Callable[[Callable[[], Any]], None] = Variable._execution_engine.queue_callback
    run_backward: Callable[..., Any] = _engine_run_backward
    set_versions: Callable[..., None] = torch._C._autograd._unsafe_set_version_counter  # that autograd compares
    # Of parameters that lie in one memory as they are, also where memory is left out.
    plain_classes = (torch.nn.Parameter, FakeTensor)
    DEVICE_OF = torch.ops.prim.device.default  # the operation by which kernels ask a fake tensor for its device
    module_call_code = torch.nn.Module._call_impl.__code__  # the frame of a module's call, to tell a recursive one
    functional_call_code = stateless._functional_call.__code__  # the frame of torch.func.functional_call
    # Used below, at run time; listed here so that the import fails too if a name is gone.
    _USED_BELOW = (
        ProcessGroup._allgather_base,
        ProcessGroup._get_backend,
        ProcessGroup._get_sequence_number_for_group,  # type: ignore[attr-defined]  # torch's stub lacks it
        ProcessGroup._reduce_scatter_base,
        autograd_profiler._is_profiler_enabled,
        c10d._get_default_timeout,
        dtensor_api._dtensor_init_helper,
        dtensor_api.compute_global_tensor_info,  # type: ignore[attr-defined]  # torch imports it there
        c10d._new_process_group_helper,
        frame_evaluation.set_code_exec_strategy,
        frame_evaluation._FrameAction,
        frame_evaluation._FrameExecStrategy,
        torch._C._functions.AccumulateGrad._set_sequence_nr,  # type: ignore[attr-defined]  # torch's stub lacks it
    )
except (ImportError, AttributeError) as error:
    raise UsageError(
        f"torch {torch.__version__} lacks what this package needs: {error}", fix="install torch 2.11 to 2.15"
    ) from error


_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


def modes_on() -> list[Any]:
    """Return the modes of this thread: those that see operations, and those that see calls, outermost first."""
    return [*dispatch_stack._get_current_dispatch_mode_stack(), *function_stack._get_current_function_mode_stack()]


@contextmanager
def modes_off(stays: Callable[[Any], bool] = lambda _: False) -> Iterator[None]:
    """Take off the modes of this thread, but those that ``stays`` names, while the context lasts."""
    found = modes_on()
    try:
        _set_modes(filter(stays, found))
        yield
    finally:
        _set_modes(found)


def _set_modes(modes: Iterable[Any]) -> None:
    for count, stack in ((dispatch_modes(), dispatch_stack), (function_modes(), function_stack)):
        for _ in range(count):
            stack._pop_mode()
    for mode in modes:
        (dispatch_stack if isinstance(mode, TorchDispatchMode) else function_stack)._push_mode(mode)


def refusal_of_compiled(needed_by: object = None, *, is_under_way: bool = True) -> UsageError | None:
    """Return the error if compiled autograd runs the backward, or is to run it; ``None``: it does not.

    It takes callbacks and never calls them. ``needed_by.untraceable``, if any, says why a graph cannot do so.
    """
    flag = "in_compiled_autograd_region" if is_under_way else "compiled_autograd_enabled"
    # A file of torch that is not imported is not in use.
    if not getattr(sys.modules.get("torch._dynamo.compiled_autograd"), flag, False):
        return None
    why = getattr(needed_by, "untraceable", "")
    return UsageError(
        f"compiled autograd runs this backward, {f'where {why}' if why else 'and never says when it ends'}",
        fix="leave compiled autograd off: compiled models do not need it",
    )


# -- replication: composable/replication/


def optimizers_in_backward() -> MutableMapping[torch.Tensor, Any]:
    """Return the hooks of torch's ``_apply_optimizer_in_backward``, by parameter."""
    module = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    found: MutableMapping[torch.Tensor, Any] = getattr(module, "param_to_optim_hook_handle_map", {})
    return found


# -- torch.compile: every hook of ours

graph_collectives: Any = torch.ops._c10d_functional  # collectives that a graph can hold


def opaque(fn: _FunctionT, *, traced: Callable[..., Any] | None = None) -> _FunctionT:
    """Make ``torch.compile`` call ``fn`` as it is: the frames of ``fn``, and of its callees, are not compiled.

    If ``traced`` is given, a graph that is being made traces ``traced`` in place of ``fn``.

    ``torch.compiler.disable`` does the same, but it imports the compiler, which takes longer than the rest of torch,
    and wraps every call. This function costs nothing in a process that does not compile.
    """
    function: Any = fn
    skip = frame_evaluation._FrameAction.SKIP  # evaluate a frame as Python does
    strategy = frame_evaluation._FrameExecStrategy(skip, skip)  # for this frame, and for its callees
    frame_evaluation.set_code_exec_strategy(function.__code__, strategy)  # for a call outside of a graph
    function._torchdynamo_disable = True  # for a call while a graph is made: the graph ends before it
    function._torchdynamo_disable_msg = "a hook of an annotation communicates; to export, call unannotate(model) first"
    if traced is not None:
        function._torchdynamo_inline = traced  # the compiler looks at it first
    return fn


# -- hooks on gradients: composable/ground/torch_hooks.py


def hook_gradient(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Call ``hook`` when the gradient of ``tensor`` [any] arrives: ``register_hook`` without a handle."""
    node: Any = tensor.grad_fn
    if type(tensor) is not torch.Tensor or node is None or tensor._backward_hooks is not None:
        tensor.register_hook(hook)
        return
    hooks: Any = OrderedDict(((hook, hook),))  # no plain dict: handles of other hooks need weak references to it
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)  # autograd reads the dict from now on


# -- ragged parameters: composable/dtensor/


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the whole mesh of which ``mesh`` is a part; ``mesh`` itself if it is whole."""
    root: DeviceMesh = mesh._get_root_mesh()
    return root


def joined_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return a mesh with the dims of all ``meshes``, which are parts of one mesh."""
    joined: DeviceMesh = DeviceMesh._concatenate(meshes)  # also of flattened dims, which are not sliced
    return joined


def flattened_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of one dim along all dims ``names`` of ``mesh``. Collective over all ranks, once for some dims."""
    if len(names) == 1:
        return mesh[names[0]]
    flat: DeviceMesh = mesh[names]._flatten()  # public in no release so far
    return flat


def dispatch_rule_holder() -> Any:
    """Return the class whose ``find(cls)`` gives the rule that runs an operation on tensors of ``cls``, or ``None``."""
    # Needed only where torch skips `__torch_dispatch__` of subclasses of DTensor.
    from torch._library.simple_registry import GenericTorchDispatchRuleHolder  # one for each operation

    return GenericTorchDispatchRuleHolder


# -- state dicts: composable/saving/. These files take longer to import than all of this package, so it waits


def loading_of_torch() -> tuple[Any, Any]:
    """Return torch's files that load full state dicts (scalars stay plain), and that shard their values."""
    from torch.distributed import _state_dict_utils  # its `_distribute_tensors` shards full values
    from torch.distributed.checkpoint import state_dict

    return state_dict, _state_dict_utils


def place_in_file(name: str, start: int, length: int) -> Any:
    """Return the place of a value in a checkpoint, as torch's description of one has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(name, start, length)


def plan_for_rank(plan: Any, rank: int) -> Any:
    """Return a plan whose file has the name that torch gives to this rank."""
    from torch.distributed.checkpoint.filesystem import _StoragePrefix

    return replace(plan, storage_data=_StoragePrefix(f"__{rank}_"))


def flatten_state_dict(tree: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of a tree of dicts and lists, as they are saved, and the path of each."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return flatten_state_dict(tree)


def unflatten_state_dict(values: Any, paths: Any) -> dict[str, Any]:
    """Return the tree of dicts and lists that ``flatten_state_dict`` took apart."""
    from torch.distributed.checkpoint._nested_dict import unflatten_state_dict

    return unflatten_state_dict(values, paths)


# -- parameters with two faces: composable/engine/


def alias_of(leaf: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``values``, of any dtype, as a tensor whose gradient goes to ``leaf`` and is cast to its dtype.

    ``values`` have the shape of ``leaf``; nothing is computed, and nothing saved for backward. The gradient reaches
    ``leaf`` as soon as it is computed, no matter when the alias was made.
    """
    alias: torch.Tensor = _alias(leaf, leaf.shape)
    alias.data = values
    node: Any = alias.grad_fn
    if node is not None:  # else there is no gradient to come
        # Of all nodes that are ready, autograd runs the newest first: without this, the first aliases of a forward
        # would wait until the end of the backward, and hold their gradients until then.
        node._set_sequence_nr(2**63 - 1)  # runs before all nodes but leaves
    return alias


def replace_flat_weights(module: torch.nn.Module, others: Mapping[int, torch.Tensor]) -> None:
    """Replace weights, by id, in the list of weights that ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` compute with."""
    weights = module.__dict__.get("_flat_weights")
    if weights:
        module._flat_weights = [others.get(id(one), one) for one in weights]  # type: ignore[assignment]  # a list


def flat_weight_refs(module: torch.nn.Module) -> Any:
    """Return the weak references to its parameters that ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` keep."""
    return getattr(module, "_flat_weight_refs", ())  # a module without them has no such attribute


@contextmanager
def without_flat_weight_refs(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Remove ``flat_weight_refs`` for a while: a tensor with weak references cannot be swapped, as in a move."""
    held: list[Any] = [module for module in modules if flat_weight_refs(module)]
    for module in held:
        module._flat_weight_refs = []
    try:
        yield
    finally:
        for module in held:
            module._flat_weight_refs = [None if one is None else weakref.ref(one) for one in module._flat_weights]


# -- transport: composable/comm/


def all_gather_into(group: ProcessGroup) -> Callable[[torch.Tensor, torch.Tensor, AllgatherOptions], Work]:
    """Return the all-gather of ``group`` that fills one tensor: ``(buffer, shard, options)``."""
    return group._allgather_base


def reduce_scatter_into(group: ProcessGroup) -> Callable[[torch.Tensor, torch.Tensor, ReduceScatterOptions], Work]:
    """Return the reduce-scatter of ``group`` that reads one tensor: ``(shard, source, options)``."""
    return group._reduce_scatter_base


def timeout_of(group: ProcessGroup) -> timedelta:
    """Return how long the collectives of ``group`` wait for a peer: on the CPU, if it has a backend there."""
    devices = group._device_types
    cpu = torch.device("cpu")
    backend: Any = group._get_backend(cpu if cpu in devices or not devices else devices[0])
    timeout: timedelta = backend.options._timeout
    return timeout


def default_timeout_of(group: ProcessGroup) -> timedelta:
    """Return the timeout that torch gives a group of this backend by default."""
    kind = "nccl" if real_backend(group) == "nccl" else "gloo"  # other backends have gloo's default
    return c10d._get_default_timeout(c10d.Backend(kind))  # torch shows it in no other way


def set_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Set how long collectives that start in ``group`` from now on wait for a peer."""
    for device in group._device_types:
        change = getattr(group._get_backend(device), "_set_default_timeout", None)  # gloo and NCCL have it
        if change is not None:
            change(timeout)


def started_in(group: ProcessGroup) -> int:
    """Return how many collectives and messages this process has started in ``group``."""
    number: int = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # torch's stub lacks it
    return number


def groups_of_process() -> dict[str, ProcessGroup]:
    """Return the process groups that this process is in, by their names."""
    return {group.group_name: group for group in list(c10d._world.pg_map)}  # torch lists them nowhere else


def new_named_group(name: str, numbers: Sequence[int], backend: str | None, timeout: timedelta | None) -> ProcessGroup:
    """Return a new group ``name`` of these global ranks, in this order: like ``new_group``, which takes no name."""
    default: Any = c10d._get_default_group()  # all groups have its device, if it has one
    own_backend, store = c10d._world.pg_map[default]  # all groups keep their keys in this store
    kind = c10d.Backend(backend or own_backend)
    timeout = timeout or c10d._get_default_timeout(kind)  # as torch does without a timeout
    places = {number: place for place, number in enumerate(numbers)}
    made: Any
    made, _ = c10d._new_process_group_helper(  # ``new_group`` chooses a name and calls it
        len(places),
        places[default.rank()],
        list(numbers),
        kind,
        store,
        name,  # type: ignore[arg-type]  # in new releases a type of its own, which is a string
        timeout=timeout,
        device_id=default.bound_device_id,
    )
    c10d._world.pg_group_ranks[made] = places  # the helper leaves this to its caller
    group: ProcessGroup = made
    return group


def store_of_default_group() -> Store:
    """Return the key-value store through which ranks of the default process group find each other."""
    return c10d._get_default_store()  # the only way to ask a rank that is in no collective


def real_backend(group: ProcessGroup) -> str:
    """Return ``gloo`` if host tensors travel by gloo, else ``nccl``, if the group has it; empty: it is simulated."""
    devices = group._device_types  # a group may have a backend for each of several devices
    found = {type(group._get_backend(device)).__name__ for device in devices}
    return next(
        (name for name in ("gloo", "nccl") if f"ProcessGroup{name.upper() if name == 'nccl' else 'Gloo'}" in found), ""
    )


# -- ranks as threads: composable/testing/


@contextmanager
def torch_keeps_groups_by_thread(
    world: Callable[[], Any], new_group: Callable[..., Any], number: Callable[[], int | None]
) -> Iterator[None]:
    """Give threads process groups of their own while the context lasts.

    Args:
        world: Returns the holder of the calling thread's process groups; ``None``: it uses those of the process.
        new_group: Makes a process group for a thread; gets its world, and the arguments of torch's own function.
        number: Returns a number of the calling thread, which makes its meshes different from others', or ``None``.
    """
    distributed: Any = c10d
    mesh_class: Any = DeviceMesh
    registry: Any = c10d_bindings
    own_world, own_new_group = distributed._world, distributed._new_process_group_helper
    own_init = mesh_class.__init__
    if torch.__version__ < "2.13":
        # For DTensor's fake tensors, torch 2.11, built for CUDA but without a device, keeps one guard in the first
        # thread that needs it, and crashes once that thread has ended (pytorch/pytorch#178950).
        torch._C._ensureCUDADeviceGuardSet()

    class WorldOfThread:
        def __getattr__(self, name: str) -> Any:
            return getattr(world() or own_world, name)

        def __setattr__(self, name: str, value: Any) -> None:
            setattr(world() or own_world, name, value)

    def make_group(*args: Any, **kwargs: Any) -> Any:
        here = world()
        return own_new_group(*args, **kwargs) if here is None else new_group(here, *args, **kwargs)

    def init_mesh(mesh: Any, *args: Any, **kwargs: Any) -> None:
        own_init(mesh, *args, **kwargs)
        # DTensor caches by mesh: the meshes of two ranks differ only in this number.
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
    # If DTensor is not imported, there is no such cache.
    if "torch.distributed.tensor" in sys.modules:
        dispatcher = torch.distributed.tensor.DTensor._op_dispatcher  # its results are cached by mesh
        cache = dispatcher.sharding_propagator.propagate_op_sharding
        # In some releases each thread has a cache of its own, which ends with it.
        getattr(cache, "cache_clear", lambda: None)()


def ranks_of_mesh(mesh: DeviceMesh) -> list[int]:
    """Return the numbers in a mesh, in its order: torch computes them anew, so they would be fake in such a mode."""
    with modes_off():
        numbers: list[int] = mesh.mesh.flatten().tolist()
    return numbers


def tensors_have_values() -> bool:
    """Say whether tensors that are made now have values: no mode of torch leaves them out."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None


def register_fake_backend() -> None:
    """Let torch.distributed know its backend "fake", whose collectives of any size return at once."""
    from torch.testing._internal.distributed import fake_pg


def swap_contents(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Swap two tensors of one class, also such as weak references lead to, which torch's public function refuses."""
    tensor.__dict__, other.__dict__ = other.__dict__, tensor.__dict__
    torch._C._swap_tensor_impl(tensor, other)


def import_before_forks() -> None:
    """Import what fake tensors and scripts of training need, and takes long: once, for processes that are forked."""
    import torch._dynamo
    import torch.distributed.checkpoint


def let_optimizers_use_lists(when: Callable[[], bool]) -> None:
    """Let optimizers step on lists of CPU tensors where they are not told, and ``when`` says so, as on a device."""
    # The list of devices is read anew in every step, by the name that each of these files has imported.
    for module in (sys.modules["torch.optim.optimizer"], sys.modules["torch.utils._foreach_utils"]):
        known = getattr(module, "_get_foreach_kernels_supported_devices")  # noqa: B009
        setattr(module, "_get_foreach_kernels_supported_devices", lambda: [*known(), *["cpu"] * when()])  # noqa: B010, B023


def _code_in(file: str, function: str) -> CodeType | None:
    return getattr(getattr(sys.modules.get(file), function, None), "__code__", None)


# Code in which torch's pipelines compute only gradients of inputs, and in which torch averages models that ranks train
# separately; ``None``: it is not imported.
split_backward_code = partial(_code_in, "torch.distributed.pipelining._backward", "stage_backward_input")
model_averager_code = partial(_code_in, "torch.distributed.algorithms.model_averaging.utils", "average_parameters")


def replace_body(function: Any, body: Callable[..., Any], *, only_with: tuple[str, int] = ("", -1)) -> None:
    """Make ``function`` of torch, the same object, run ``body``, which gets torch's code as its first argument; once.

    ``only_with`` has name and position of an argument of ``function``: calls without it run torch's own code.
    """
    if hasattr(function, "__wrapped__"):
        return
    original = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    original.__kwdefaults__ = function.__kwdefaults__
    original.__annotations__ = function.__annotations__
    function.__wrapped__ = original  # keeps the signature that is shown
    function.__defaults__ = None
    function.__kwdefaults__ = {"_body": partial(body, original), "_original": original, "_only_with": only_with}
    function.__code__ = _call_body.__code__
    # The compiler skips torch's own files: so it has to skip these two frames, but not the functions that they call.
    action = frame_evaluation._FrameAction  # the compiler's choices for a frame
    strategy = frame_evaluation._FrameExecStrategy(action.SKIP, action.DEFAULT)  # for a frame, for its callees
    for code in (_call_body.__code__, getattr(body, "__code__", _call_body.__code__)):
        frame_evaluation.set_code_exec_strategy(code, strategy)  # both run in place of torch's code


def _call_body(*args: Any, _body: Any, _original: Any, _only_with: tuple[str, int], **kwargs: Any) -> Any:
    # Runs as the body of torch's function, with the globals of torch's file: it can use no name of this file.
    name, position = _only_with
    if len(args) <= position and kwargs.get(name) is None:
        return _original(*args, **kwargs)
    return _body(*args, **kwargs)


def ask_before_conversions(ask: Callable[[torch.nn.Module, Callable[[torch.Tensor], torch.Tensor]], None]) -> None:
    """Let ``Module._apply``, which ``to`` and ``half`` call, first call ``ask``; a second call changes nothing.

    torch asks nobody: it converts module by module, and parts that refuse come after parts that are converted.
    """
    convert: Any = torch.nn.Module._apply
    if hasattr(convert, "_asks"):
        return

    @wraps(convert)
    def _apply(self: torch.nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # Where torch's own code calls, the module around has asked.
        if recurse and sys._getframe(1).f_code is not convert.__code__:
            ask(self, fn)
        return convert(self, fn, recurse)

    _apply._asks = True  # type: ignore[attr-defined]
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]

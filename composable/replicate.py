"""Keep a whole copy of a module on every rank and average the gradients, without wrapping it.

``replicate`` checks, compares the ranks, broadcasts, builds buckets and installs hooks, in
that order: an error leaves the module as it was, on every rank.
"""

import copy
import functools
import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from composable.collectives.base import Transport
from composable.collectives.choose import make_transport
from composable.collectives.deferred import DeferredTransport
from composable.collectives.mesh import resolve_mesh
from composable.contract import contract, describe_module, get_registry
from composable.errors import ComposableError, ConfigError, DesyncError, UsageError, place_of_rank
from composable.replication.broadcasts import BufferSync, broadcast_tensors
from composable.replication.bucket import BucketOptions, ReducedParam
from composable.replication.comm_hooks import CommHook
from composable.replication.reducer import Reducer
from composable.runtime.hooks import register_arrival_hooks, register_load_check, register_replicate_hooks
from composable.storage.copy_reach import modules_of_copy
from composable.torch_private import queue_callback, timeout_of

__all__ = ["ReplicateState", "register_comm_hook", "replicate"]

ModuleT = TypeVar("ModuleT", nn.Module, Sequence[nn.Module])

# Groups that annotations made and no longer need, by the group they were made for. torch derives the
# names of groups from how many there are: to destroy one makes the next name collide.
_IDLE_GROUPS: "WeakKeyDictionary[dist.ProcessGroup, list[tuple[str, dist.ProcessGroup]]]" = WeakKeyDictionary()


class ReplicateState:
    """State of one ``replicate`` annotation.

    Attributes:
        modules: The annotated module, or the list of modules of one call.
        reducer: Averages the gradients.
        buffers: Makes the buffers equal before a forward; ``None`` if there are none or it was not asked for.
        frozen: Parameters that did not require a gradient, with their FQNs.
        group: The ranks; gradients travel in a group of their own, ``own_group``.
        device: Of what travels.
        transport: Made with the group, by a copy at its first forward that a backward may follow.
        hook_handles: Remove them, and the modules run as plain ones again.
    """

    modules: tuple[nn.Module, ...]
    reducer: Reducer
    group: dist.ProcessGroup
    device: torch.device
    transport: DeferredTransport
    buffers: "BufferSync | None"
    frozen: list[tuple[str, nn.Parameter]]

    def __init__(self) -> None:
        self.modules = ()
        self.buffers = None
        self.frozen = []
        self.own_group: dist.ProcessGroup | None = None
        self.hook_handles: list[RemovableHandle] = []

    def before_forward(self, module: nn.Module) -> None:
        """Prepare a forward of ``module`` that a backward may follow.

        Raises:
            UsageError: A parameter that was frozen at annotation requires a gradient now.
        """
        if not torch.is_grad_enabled():
            return
        for fqn, param in self.frozen:
            if param.requires_grad:
                raise UsageError(
                    "a parameter was frozen when replicate was called and requires a gradient now",
                    at=f"{place_of_rank()}, parameter {fqn!r}",
                    fix="call replicate after unfreezing",
                )
        self.transport.connect()
        self.reducer.prepare()
        if self.buffers is not None and module.training and self.reducer.requires_gradient_sync:
            self.buffers.broadcast()

    def before_backward(self, index: int) -> None:
        """Note that the gradient of an output of the annotated module ``index`` arrives."""
        self.reducer.arm(index)

    def use_group(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Choose the ranks and the device; the transport between them is made when it is needed."""
        self.group = group
        self.device = device
        ranks = sorted(dist.get_process_group_ranks(group))  # as in the group that will be made
        self.transport = DeferredTransport(ranks.index(dist.get_rank()), len(ranks), self._make_transport)

    def _make_transport(self) -> Transport:
        self.own_group = _take_group(self.group, self.device.type)
        return make_transport("process_group", self.own_group)

    def end_broken_step(self) -> None:
        """Put things right after a backward that an exception stopped; see ``Reducer.prepare``."""
        self.reducer.prepare()

    def retire(self) -> None:
        """Make the modules plain ones again. Collective; no forward or backward is running."""
        self.transport.connect()
        self.reducer.retire()
        for hook in self.hook_handles:
            hook.remove()
        self.hook_handles = []
        if self.own_group is not None:
            _IDLE_GROUPS.setdefault(self.group, []).append((self.device.type, self.own_group))
            self.own_group = None

    def __deepcopy__(self, memo: dict[Any, Any]) -> "ReplicateState":
        modules = modules_of_copy(memo)
        if not all(module in modules for module in self.modules):
            names = " and ".join(describe_module(module) for module in self.modules)
            raise UsageError(
                "only some of the modules that share buckets are to be copied",
                at=f"{place_of_rank()}, replicate of {names}",
                fix=f"deep-copy {names} or a module around, in one call",
            )
        twin = memo[id(self)] = ReplicateState()
        twin.use_group(self.group, self.device)
        for item in self.reducer.params:
            copied = copy.deepcopy(item.param, memo)
            if item.param.grad is not None and self.reducer.has_sound_gradients:
                copied.grad = item.param.grad.detach().clone()
        params = [replace(item, param=memo[id(item.param)]) for item in self.reducer.params]
        twin.reducer = self.reducer.copied(params, twin.transport, memo)
        twin.frozen = copy.deepcopy(self.frozen, memo)
        if self.buffers is not None:
            slots = [(copy.deepcopy(owner, memo), name) for owner, name in self.buffers.slots]
            twin.buffers = BufferSync(slots, twin.transport, self.device)
        twin.modules = tuple(copy.deepcopy(module, memo) for module in self.modules)
        of_modules = self.hook_handles[len(params) :]
        twin.hook_handles = [
            *register_arrival_hooks([item.param for item in params], twin.reducer.arrivals()),
            *(copy.deepcopy(hook, memo) for hook in of_modules),
        ]
        return twin

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a replicated module cannot be pickled as a whole",
            at=", ".join([place_of_rank(), *(describe_module(module) for module in self.modules)]),
            fix="save its state_dict(); copy.deepcopy copies it",
        )


@contract(ReplicateState, incompatible=("fully_shard",))
def replicate(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    ignored_modules: Collection[nn.Module] | None = None,
    bucket_cap_mb: float = 25,
    find_unused_parameters: bool = False,
    broadcast_buffers: bool = True,
    gradient_as_bucket_view: bool = True,
) -> ModuleT:
    """Train ``module`` on every rank with its own data, as one process would on all of it.

    Collective over the ranks, with equal arguments on an equal module. Parameters and
    buffers become those of the first rank; from then on every backward leaves in each
    ``param.grad`` the mean over the ranks, so that equal optimizers keep the ranks equal.
    Every rank must run the module in every step: one that skips it makes the others wait.

    Submodules that carry ``fully_shard`` or ``replicate`` already stay as they are.

    Args:
        module: What to annotate, or several modules that share buckets.
        mesh: 1-D mesh of the ranks; default: all ranks.
        process_group: The ranks, instead of ``mesh``. Its ranks only: gradients travel in a
            group of their own, where no other collective can come between them.
        ignored_modules: Modules to leave alone with all below them.
        bucket_cap_mb: Most MiB of gradients that are reduced in one piece. The first piece
            holds 1 MiB, so that communication starts early.
        find_unused_parameters: Accept parameters without a gradient. One that no rank has a
            gradient for keeps its ``grad``; else the ranks without one count as zero.
        broadcast_buffers: Before each training forward, give every rank the buffers of the
            first. If false, also at annotation each rank keeps its own.
        gradient_as_bucket_view: After backward ``param.grad`` is a view of a bucket, which
            the next backward overwrites. If false, it is a tensor of its own, at the price
            of that much memory and of a copy.

    Returns:
        ``module``, the same object.

    Raises:
        UsageError: No process group is initialised.
        ConfigError: An argument is wrong; the message names the module, the parameter and the fix.
        DesyncError: The ranks have different modules or options, or another rank raised.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    state = replicate.state(modules[0])
    assert state is not None
    state.modules = tuple(modules)
    group, device_type = _resolve_group(modules, mesh, process_group)
    options = BucketOptions()
    managed: _Managed = _Managed()
    failure: ComposableError | None = None
    try:
        options = _check_options(bucket_cap_mb, find_unused_parameters, broadcast_buffers, gradient_as_bucket_view)
        managed = _find_tensors(modules, ignored_modules, device_type)
    except ComposableError as error:
        # The other ranks are about to communicate: they must hear of it first.
        failure = error
    device = torch.device("cuda", torch.cuda.current_device()) if device_type == "cuda" else torch.device(device_type)
    settings = (
        f"options: bucket_cap_mb={bucket_cap_mb}, find_unused_parameters={find_unused_parameters}, "
        f"broadcast_buffers={broadcast_buffers}"
    )
    _compare_ranks(group, device, [settings, *managed.lines], failure)
    state.use_group(group, device)
    _execute(state, managed, options, broadcast_buffers=broadcast_buffers)
    return module


def _execute(state: ReplicateState, managed: "_Managed", options: BucketOptions, *, broadcast_buffers: bool) -> None:
    transport, device = state.transport, state.device
    transport.connect()
    broadcast_tensors([param for _, param, _ in managed.params], transport, device)
    if broadcast_buffers and managed.buffers:
        buffers = [tensor for owner, name in managed.buffers if (tensor := owner[name]) is not None]
        broadcast_tensors(buffers, transport, device)
        state.buffers = BufferSync(managed.buffers, transport, device)
    trainable = [ReducedParam(fqn, param, index) for fqn, param, index in managed.params if param.requires_grad]
    state.frozen = [(fqn, param) for fqn, param, _ in managed.params if not param.requires_grad]
    ranks = sorted(dist.get_process_group_ranks(state.group))
    state.reducer = Reducer(trainable, transport, ranks, options, queue_callback)
    state.hook_handles = register_arrival_hooks([item.param for item in trainable], state.reducer.arrivals())
    for index, module in enumerate(state.modules):
        state.hook_handles += _register_module_hooks(state, module, index)
        state.hook_handles.append(register_load_check(module))


def _take_group(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Return a group of the same ranks that nothing else uses. Collective over them."""
    idle = _IDLE_GROUPS.get(group, [])
    for position, (served, own) in enumerate(idle):
        if served == device_type:
            del idle[position]
            return own
    return _make_own_group(group, device_type)


def _make_own_group(group: dist.ProcessGroup, device_type: str) -> dist.ProcessGroup:
    """Make a group of the same ranks. Collective over them.

    One per annotation: two that share a group would have to agree on whose buckets come first.
    """
    backend = dist.get_backend(group)
    own = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout_of(group) if device_type == "cpu" and backend != "fake" else None,
        # A group that was made without naming a backend has one for each device type, as the default one has.
        backend=None if backend == "undefined" else backend,
        use_local_synchronization=True,
    )
    assert isinstance(own, dist.ProcessGroup), "every rank that calls this is in the group"
    return own


def _register_module_hooks(state: ReplicateState, module: nn.Module, index: int) -> list[RemovableHandle]:
    return register_replicate_hooks(module, state.before_forward, functools.partial(state.before_backward, index))


def register_comm_hook(module: nn.Module, state: object, hook: CommHook) -> None:
    """Let ``hook`` average the gradients of the replicated ``module``, instead of an all-reduce.

    Every rank registers the same hook, before the first backward.

    Args:
        module: Annotated by ``replicate``.
        state: Handed to ``hook``.
        hook: Called as ``hook(state, bucket)`` for each full bucket, in the same order on all
            ranks. ``bucket`` has the methods of ``torch.distributed.GradBucket`` and holds
            this rank's gradients; the future it returns gives their mean over the ranks, flat.
            The hooks of ``torch.distributed.algorithms.ddp_comm_hooks`` fit.

    Raises:
        UsageError: The module is not replicated, has a hook already, or a backward is running.
    """
    annotation = replicate.state(module)
    if annotation is None:
        raise UsageError(
            "register_comm_hook found no replicate on this module",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix="call it on the module that replicate was called on",
        )
    annotation.reducer.set_hook(state, hook)


def _resolve_group(
    modules: Sequence[nn.Module], mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup, str]:
    """Return the ranks and the device type of what they exchange.

    Raises:
        UsageError: No process group is initialised.
        ConfigError: They do not fit. Without a group there is nobody to tell, so this rank raises alone.
    """
    if mesh is not None and process_group is not None:
        raise ConfigError("both mesh and process_group are given", fix="pass one of them")
    params = [param for module in modules for param in module.parameters()]
    if mesh is not None or not dist.is_available() or not dist.is_initialized():
        mesh = resolve_mesh(mesh, params, caller="replicate")
        return mesh.get_group(), mesh.device_type
    group = dist.group.WORLD if process_group is None else process_group
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group is {process_group!r}, not a ProcessGroup that this rank is in",
            fix="pass what torch.distributed.new_group() returned, and call replicate only on the ranks of the group",
        )
    device_type = next((param.device.type for param in params if not param.is_meta), "cpu")
    if device_type == "cpu" and dist.get_backend(group) == "nccl":
        raise ConfigError(
            "the module is on cpu and the process group on nccl, which moves CUDA tensors only",
            fix="move the module to the GPU, or pass a process_group of backend 'gloo'",
        )
    return group, device_type


def _check_options(
    bucket_cap_mb: float, find_unused_parameters: bool, broadcast_buffers: bool, gradient_as_bucket_view: bool
) -> BucketOptions:
    switches = {
        "find_unused_parameters": find_unused_parameters,
        "broadcast_buffers": broadcast_buffers,
        "gradient_as_bucket_view": gradient_as_bucket_view,
    }
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {value!r}", fix="pass True or False")
    if isinstance(bucket_cap_mb, bool) or not isinstance(bucket_cap_mb, (int, float)) or not bucket_cap_mb > 0:
        raise ConfigError(f"bucket_cap_mb is {bucket_cap_mb!r}", fix="pass a number of MiB above zero")
    return BucketOptions(
        cap_bytes=int(min(bucket_cap_mb, 2**40) * 2**20),
        find_unused=find_unused_parameters,
        grads_as_views=gradient_as_bucket_view,
    )


@dataclass
class _Managed:
    """What an annotation is to manage.

    Attributes:
        params: (FQN, parameter, index of the annotated module), each parameter once.
        buffers: The slots of the buffers, each tensor once.
        lines: One text per parameter and buffer, to compare between ranks.
    """

    params: list[tuple[str, nn.Parameter, int]] = field(default_factory=list)
    buffers: list[tuple[dict[str, torch.Tensor | None], str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def _find_tensors(
    modules: Sequence[nn.Module], ignored_modules: Collection[nn.Module] | None, device_type: str
) -> _Managed:
    """Return the parameters and buffers that no other annotation manages.

    Raises:
        ConfigError: One of them, a module or an ignored module cannot be used.
    """
    ignored = _check_ignored(modules, ignored_modules)
    managed = _Managed()
    for module in modules:
        if type(module).forward is nn.Module.forward and "forward" not in module.__dict__:
            raise ConfigError(
                f"{type(module).__name__} has no forward, so nothing would tell when it runs",
                at=f"{place_of_rank()}, {describe_module(module)}",
                fix="pass the modules in it as a list: replicate([*module])",
            )
    seen = _params_of_nested(modules, ignored)
    for index, module in enumerate(modules):
        prefix = f"{index}" if len(modules) > 1 else ""
        for path, visited in _own_modules(module, ignored, modules):
            path = f"{prefix}.{path}".strip(".")
            _check_sparse(path, visited)
            for name, param in visited._parameters.items():
                if param is not None and id(param) not in seen:
                    seen.add(id(param))
                    fqn = f"{path}.{name}" if path else name
                    _check_tensor("parameter", fqn, param, device_type)
                    managed.params.append((fqn, param, index))
                    managed.lines.append(
                        f"parameter {fqn!r} {list(param.shape)} {param.dtype}, requires_grad={param.requires_grad}"
                    )
            for name, buffer in visited._buffers.items():
                if buffer is not None and id(buffer) not in seen:
                    seen.add(id(buffer))
                    fqn = f"{path}.{name}" if path else name
                    _check_tensor("buffer", fqn, buffer, None)
                    managed.buffers.append((visited._buffers, name))
                    managed.lines.append(f"buffer {fqn!r} {list(buffer.shape)} {buffer.dtype}")
    if not any(param.requires_grad for _, param, _ in managed.params):
        raise ConfigError(
            "no parameter requires a gradient, so there is nothing to average",
            at=f"{place_of_rank()}, {describe_module(modules[0])}",
            fix="do not replicate it, or unfreeze parameters first",
        )
    return managed


def _own_modules(
    root: nn.Module, ignored: Collection[nn.Module], roots: Collection[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) left to right, without ignored modules and those that carry an annotation of their own."""
    seen: set[nn.Module] = set()
    stack = [("", root)]
    while stack:
        path, module = stack.pop()
        if module in seen or module in ignored:
            continue
        registry = get_registry(module)
        if module is not root and ("fully_shard" in registry or ("replicate" in registry and module not in roots)):
            continue
        seen.add(module)
        yield path, module
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        stack.extend((f"{path}.{name}" if path else name, child) for name, child in reversed(children))


def _params_of_nested(modules: Sequence[nn.Module], ignored: Collection[nn.Module]) -> set[int]:
    """Return the ids of parameters that a nested ``replicate`` averages, or that hang in an ignored module."""
    others: set[int] = set()
    for module in modules:
        for visited in module.modules():
            annotation = get_registry(visited).get("replicate")
            if annotation is not None and visited not in modules and isinstance(annotation.state, ReplicateState):
                others.update(id(item.param) for item in annotation.state.reducer.params)
    for module in ignored:
        others.update(map(id, module.parameters()))
        others.update(map(id, module.buffers()))
    return others


def _check_ignored(modules: Sequence[nn.Module], ignored_modules: Collection[nn.Module] | None) -> frozenset[nn.Module]:
    if ignored_modules is None:
        return frozenset()
    if isinstance(ignored_modules, nn.Module) or not isinstance(ignored_modules, Collection):
        raise ConfigError(
            f"ignored_modules is a {type(ignored_modules).__name__}",
            fix="pass a list or set of modules",
        )
    inside = {visited for module in modules for visited in module.modules()}
    for ignored in ignored_modules:
        if not isinstance(ignored, nn.Module):
            raise ConfigError(f"ignored_modules holds a {type(ignored).__name__}", fix="pass modules only")
        if ignored not in inside:
            raise ConfigError(
                "an ignored module is not in the module that ignores it",
                at=f"{place_of_rank()}, {describe_module(ignored)}",
                fix="take it out of ignored_modules",
            )
    return frozenset(ignored_modules)


def _check_tensor(kind: str, fqn: str, tensor: torch.Tensor, device_type: str | None) -> None:
    place = f"{place_of_rank()}, {kind} {fqn!r}"
    if is_lazy(tensor):
        raise ConfigError(f"{kind} has no shape yet", at=place, fix="run one forward before replicate")
    place += f" {list(tensor.shape)} {tensor.dtype}".replace("torch.", "")
    if tensor.device.type == "meta":
        raise ConfigError(
            f"{kind} is on the meta device", at=place, fix="materialize and initialise the module before replicate"
        )
    if isinstance(tensor, DTensor):
        raise ConfigError(
            f"{kind} is a {type(tensor).__name__}, which is sharded already",
            at=place,
            fix="ignore its module, or call replicate on it before fully_shard on an ancestor",
        )
    if device_type is not None and tensor.device.type != device_type:
        raise ConfigError(
            f"{kind} is on {tensor.device}, and gradients are averaged on {device_type}",
            at=place,
            fix=f"move the module to {device_type}, or pass a mesh of device type {tensor.device.type!r}",
        )


def _check_sparse(path: str, module: nn.Module) -> None:
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
        raise ConfigError(
            f"{type(module).__name__} gives sparse gradients, which replicate cannot average",
            at=f"{place_of_rank()}, module {path!r}",
            fix="build it with sparse=False, or ignore it",
        )


def _compare_ranks(
    group: dist.ProcessGroup, device: torch.device, lines: Sequence[str], failure: ComposableError | None
) -> None:
    """Raise on every rank unless all of them are about to annotate the same thing. Collective.

    Raises:
        ComposableError: ``failure``, where there is one.
        DesyncError: The ranks differ, or another rank failed.
    """
    text = "\n".join(lines) if failure is None else f"raised {type(failure).__name__}: {failure.what}"
    if dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake":
        own = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8, device=device)
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, own, group=group)
        if not all(torch.equal(every[0], other) for other in every[1:]):
            texts: list[str] = [""] * len(every)
            dist.all_gather_object(texts, text, group=group)
            if failure is None:
                raise DesyncError(
                    "the ranks call replicate on different modules or with different options\n"
                    + _first_difference(texts, dist.get_process_group_ranks(group)),
                    at=place_of_rank(),
                    fix="build the same model and call replicate with the same arguments on every rank",
                )
    if failure is not None:
        raise failure


def _first_difference(texts: Sequence[str], ranks: Sequence[int]) -> str:
    columns = [text.splitlines() for text in texts]
    for index in range(max(map(len, columns))):
        at_index = [column[index] if index < len(column) else "(no more parameters)" for column in columns]
        if len(set(at_index)) > 1:
            return "\n".join(f"    rank {rank}: {line}" for rank, line in zip(ranks, at_index, strict=True))
    raise AssertionError("unequal texts differ in a line")

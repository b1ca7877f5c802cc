"""The only file that registers module, autograd and optimizer hooks.

Forward hooks of a fully sharded module run outside all others (``prepend``), so that
activation checkpointing and user hooks see unsharded parameters; the post-forward hook
also runs when forward raises (``always_call``), so that nothing stays unsharded.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

import _traversal_utils
from composable.collectives.mesh import device_of
from composable.contract import managing_state
from composable.errors import UsageError, located, place_of_rank
from composable.planning.replaced import first_replacement
from composable.ragged.tensor import RaggedDTensor
from composable.runtime.readiness import check_on_device, list_fqns
from composable.runtime.scheduler import Scheduler, in_backward
from composable.runtime.state import FullyShardState
from composable.saving.fit import check_before_load
from composable.storage.handle import Handle
from composable.storage.unfilled import META_FIX, mark_unfilled
from composable.torch_private import tree_map

__all__ = [
    "CHECKS_ITSELF",
    "check_parameters",
    "check_replaced",
    "differentiable_tensors",
    "make_room",
    "register_arrival_hooks",
    "register_fully_shard_hooks",
    "register_load_check",
    "register_optimizer_hooks",
    "register_replicate_hooks",
]


def register_fully_shard_hooks(
    module: nn.Module, state: FullyShardState, handle: Handle | None
) -> list[RemovableHandle]:
    """Let ``module`` unshard before and reshard after its forward and its backward.

    Args:
        module: A fully sharded module, or an annotated module without parameters of its own.
        state: State of the annotation that manages it.
        handle: Its handle, ``None`` if it has none.
    """
    hooks = _ModuleHooks(state, handle)
    return [
        module.register_forward_pre_hook(hooks.pre_forward, prepend=True, with_kwargs=True),
        module.register_forward_hook(hooks.post_forward, prepend=False, always_call=True),
        module.register_state_dict_pre_hook(hooks.reshard),
        module.register_load_state_dict_pre_hook(hooks.reshard),
        module.register_state_dict_pre_hook(_refuse_meta),
        module.register_load_state_dict_pre_hook(make_room),
        module.register_load_state_dict_post_hook(_bring_back),
    ]


class _ModuleHooks:
    """The hooks of one module. A deep copy belongs to the copied state and handle; closures would stay."""

    __slots__ = ("_handle", "_is_group", "_state")

    def __init__(self, state: FullyShardState, handle: Handle | None) -> None:
        self._state = state
        self._handle = handle
        self._is_group = handle is not None and len(handle.modules) > 1

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        state, handle = self._state, self._handle
        root = state.root
        if root is None:
            root = state.lazy_init(module)
        scheduler = root.scheduler
        is_outermost = scheduler.is_idle
        scheduler.enter_forward(module)
        if handle is not None:
            if self._is_group and not handle.modules_left:
                handle.modules_left.update(handle.modules)
            scheduler.pre_forward(handle)
        if is_outermost and state.mesh.device_type != "cpu":
            return _move_inputs(args, kwargs, state.mesh.device_type)
        return None

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        handle = self._handle
        root = self._state.root
        if root is None or not root.scheduler.is_running(module):
            # pre_forward raised, or a user's hook before it.
            return
        scheduler = root.scheduler
        if handle is not None:
            is_last = not scheduler.is_called_again(module)
            if self._is_group:
                handle.modules_left.discard(module)
                is_last = is_last and not handle.modules_left
            _hook_outputs(output, scheduler, handle, is_last=is_last)
        scheduler.exit_forward()

    def reshard(self, *_: Any) -> None:
        root = self._state.root
        if self._handle is not None and root is not None and root.scheduler.is_idle:
            root.scheduler.reshard(self._handle)


def _refuse_meta(module: nn.Module, *_: Any) -> None:
    """Refuse a state dict without values, which would be saved as one."""
    state = managing_state(module, "fully_shard")
    # Below a policy's root nothing has to be looked at twice.
    if isinstance(state, FullyShardState) and module in state.modules:
        with located(place_of_rank()):
            names = {submodule: fqn for fqn, submodule in module.named_modules()}
            check_on_device(_traversal_utils._get_fsdp_states(module), names)


def make_room(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
    """Give memory to what is on the meta device and about to be loaded; torch would skip it with a warning."""
    state = managing_state(module, "fully_shard")
    if not isinstance(state, FullyShardState) or local_metadata.get("assign_to_params_buffers", False):
        return
    device = device_of(state.mesh)
    handle = state._module_to_handle.get(module)
    params = {id(param.sharded): param for param in handle.params if param.ragged.is_meta} if handle else {}
    buffers: dict[int, torch.Tensor] = {}
    for fqn, submodule in module.named_modules(prefix=prefix.rstrip(".")):
        for name, tensor in [*submodule._parameters.items(), *submodule._buffers.items()]:
            if tensor is None or not tensor.is_meta or (f"{fqn}.{name}" if fqn else name) not in state_dict:
                continue
            if id(tensor) in params:
                params[id(tensor)].make_room(device)
                state.mark_handles()
            elif name in submodule._buffers:
                if id(tensor) not in buffers:
                    buffers[id(tensor)] = torch.empty_like(tensor, device=device)
                    mark_unfilled(buffers[id(tensor)])
                submodule._buffers[name] = buffers[id(tensor)]
                state.marked_buffers.append((submodule, name))


def _bring_back(module: nn.Module, _: Any) -> None:
    """Move what was loaded into the shards, and put parameters that the load replaced back."""
    state = managing_state(module, "fully_shard")
    handle = state._module_to_handle.get(module) if isinstance(state, FullyShardState) else None
    if handle is not None:
        with located(f"{place_of_rank()}, module {handle.fqn!r}"):
            handle.attach()


def register_load_check(module: nn.Module) -> RemovableHandle:
    """Refuse a state dict that does not fit before anything of it is copied into an annotated module."""
    registered: RemovableHandle = module.register_load_state_dict_pre_hook(_check_before_load)
    return registered


def _check_before_load(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, metadata: Mapping[str, Any], *_: Any
) -> None:
    check_before_load(module, state_dict, prefix, metadata)


class _OutputHook:
    """Runs when the gradient of an output of one forward call arrives.

    A call may have several outputs, and an output may also be one of another module's;
    only the first gradient in a backward counts.
    """

    __slots__ = ("_backward_id", "_clock", "_handle", "_scheduler")

    def __init__(self, scheduler: Scheduler, handle: Handle, clock: int) -> None:
        self._scheduler = scheduler
        self._handle = handle
        self._clock = clock
        self._backward_id = -1

    def __call__(self, grad: torch.Tensor) -> None:
        scheduler = self._scheduler
        if scheduler.is_backward and self._backward_id == scheduler.backward_id:
            return
        scheduler.pre_backward(self._handle, self._clock)
        self._backward_id = scheduler.backward_id


def _hook_outputs(output: Any, scheduler: Scheduler, handle: Handle, *, is_last: bool) -> None:
    if not torch.is_grad_enabled():
        scheduler.post_forward(handle, is_differentiable=False, is_last=is_last)
        return
    if isinstance(output, torch.Tensor):
        tensors = [output] if output.requires_grad else []
    else:
        tensors = list(differentiable_tensors(output))
    clock = scheduler.post_forward(handle, is_differentiable=bool(tensors), is_last=is_last)
    if not tensors or in_backward():
        return
    hook = _OutputHook(scheduler, handle, clock)
    for tensor in tensors:
        tensor.register_hook(hook)
        base = tensor._base
        if base is not None and base.grad_fn is not None:
            # An in-place change gives a view another grad_fn, and the hook on it would never run.
            base.register_hook(hook)


def differentiable_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that require grad in nested tuples, lists, dicts, dataclasses and plain objects."""
    stack = [value]
    seen: set[int] = set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            if item.requires_grad:
                yield item
        elif (
            item is None
            or isinstance(item, (bool, int, float, complex, str, bytes, torch.Size, type, nn.Module))
            or id(item) in seen
        ):
            continue
        else:
            seen.add(id(item))
            if isinstance(item, dict):
                stack.extend(reversed(list(item.values())))
            elif isinstance(item, (tuple, list, set, frozenset)):
                stack.extend(reversed(list(item)))
            elif dataclasses.is_dataclass(item):
                stack.extend(getattr(item, field.name, None) for field in reversed(dataclasses.fields(item)))
            elif hasattr(item, "__dict__"):
                stack.extend(reversed(list(vars(item).values())))


def _move_inputs(args: Any, kwargs: Any, device_type: str) -> tuple[Any, Any]:
    device = torch.device(device_type, torch.cuda.current_device())

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value

    moved: tuple[Any, Any] = tree_map(move, (args, kwargs))
    return moved


_is_meta = attrgetter("is_meta")

# An optimizer with an attribute of this name finds out itself when its parameters need the check.
CHECKS_ITSELF = "_composable_local_step"


def check_replaced(optimizer: torch.optim.Optimizer) -> None:
    """Refuse parameters that an annotation has replaced.

    Raises:
        UsageError: The optimizer was built before the annotation, or inside forward or backward.
    """
    for group in optimizer.param_groups:
        replacement = first_replacement(group["params"])
        if replacement is not None:
            raise UsageError(
                "the optimizer holds a parameter that no module has any more, so its step would be lost",
                at=f"{place_of_rank()}, parameter {replacement.fqn!r}",
                fix="rebind_optimizer(optimizer, model) after annotating the model, or build the optimizer then",
            )


def check_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to update parameters that an annotation has replaced, or that have no values.

    Raises:
        UsageError: As ``check_replaced``, or a sharded parameter is still on the meta device.
    """
    check_replaced(optimizer)
    for group in optimizer.param_groups:
        params = group["params"]
        if any(map(_is_meta, params)) and any(param.is_meta and isinstance(param, RaggedDTensor) for param in params):
            raise UsageError(
                "the optimizer steps on parameters that are still on the meta device",
                at=f"{place_of_rank()}, {_describe_params(optimizer)}",
                fix=META_FIX,
            )


def _check_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if CHECKS_ITSELF not in vars(optimizer):
        check_parameters(optimizer)


def _describe_params(optimizer: torch.optim.Optimizer) -> str:
    """Name the parameters on the meta device, of which the optimizer knows no names unless it was given some."""
    found: list[str] = []
    for group in optimizer.param_groups:
        names = group.get("param_names") or [f"of shape {list(param.shape)}" for param in group["params"]]
        found += [name for name, param in zip(names, group["params"], strict=True) if param.is_meta]
    return f"parameters {list_fqns(found)}"


register_optimizer_step_pre_hook(_check_optimizer)


def register_optimizer_hooks(
    optimizer: torch.optim.Optimizer,
    *,
    before_step: Callable[..., Any],
    after_step: Callable[..., None],
    before_state_dict: Callable[..., None],
    after_state_dict: Callable[..., dict[str, Any]],
    after_load: Callable[..., None],
) -> list[RemovableHandle]:
    """Call a function before and after each step and ``state_dict()``, and after ``load_state_dict()``.

    ``before_step`` may return other (args, kwargs), of which the first is what steps, and
    ``after_state_dict`` another dict.
    """
    return [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(after_step),
        optimizer.register_state_dict_pre_hook(before_state_dict),
        optimizer.register_state_dict_post_hook(after_state_dict),
        optimizer.register_load_state_dict_post_hook(after_load),
    ]


# -- replicate


def register_arrival_hooks(
    params: Iterable[nn.Parameter], arrivals: Iterable[Callable[[torch.Tensor], None]]
) -> list[RemovableHandle]:
    """Call each parameter's function whenever a backward has accumulated its gradient."""
    return [param.register_post_accumulate_grad_hook(arrive) for param, arrive in zip(params, arrivals, strict=True)]


def register_replicate_hooks(
    module: nn.Module, before_forward: Callable[[nn.Module], None], before_backward: Callable[[], None]
) -> list[RemovableHandle]:
    """Call ``before_forward`` before ``module`` runs, ``before_backward`` when the gradient of an output arrives.

    Activation checkpointing runs a module again inside backward: that is no forward here. A deep
    copy of the module gets deep copies of the two: pass bound methods, not closures.
    """
    hooks = _ReplicateHooks(before_forward, before_backward)
    return [module.register_forward_pre_hook(hooks.pre_forward), module.register_forward_hook(hooks.post_forward)]


class _ReplicateHooks:
    """The hooks of one replicated module."""

    __slots__ = ("_before_backward", "_before_forward")

    def __init__(self, before_forward: Callable[[nn.Module], None], before_backward: Callable[[], None]) -> None:
        self._before_forward = before_forward
        self._before_backward = before_backward

    def pre_forward(self, module: nn.Module, *_: Any) -> None:
        if not in_backward():
            self._before_forward(module)

    def pre_backward(self, _: torch.Tensor) -> None:
        self._before_backward()

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in differentiable_tensors(output):
                tensor.register_hook(self.pre_backward)

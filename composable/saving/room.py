"""Room in an annotated module for what a state dict brings."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from composable.annotation import handle_of_module, sharded_state_of
from composable.engine import mark_unfilled
from composable.errors import located, place_of_rank
from composable.saving.quantized import add_state, load_state, state_of
from composable.torch_hooks import around_state_dict
from composable.wording import join_fqn, plain_fqn

__all__ = ["make_room", "register_room"]


def register_room(module: nn.Module) -> list[RemovableHandle]:
    """Let ``state_dict()`` and ``load_state_dict()`` of a sharded module meet sharded parameters with memory."""
    has_state = any(True for _ in state_of(module))
    return around_state_dict(
        module,
        before_save=[_reshard],
        after_save=[add_state] if has_state else [],
        before_load=[_reshard, make_room, *([load_state] if has_state else [])],
        after_load=[_bring_back],
    )


def _reshard(module: nn.Module, *_: Any) -> None:
    state, handle = sharded_state_of(module), handle_of_module(module)
    if state is not None and handle is not None and state.root is not None and state.root.scheduler.is_idle:
        state.root.scheduler.reshard(handle)


def make_room(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
    """Give memory to what is on the meta device and about to be loaded; torch would skip it with a warning."""
    state = sharded_state_of(module)
    if state is None or local_metadata.get("assign_to_params_buffers", False):
        return
    device = state.grid.shard.device
    handle = state._module_to_handle.get(module)
    params = {id(param.sharded): param for param in handle.params if param.ragged.is_meta} if handle else {}
    buffers: dict[int, torch.Tensor] = {}
    for fqn, submodule in module.named_modules(prefix=prefix.rstrip(".")):
        for name, tensor in [*submodule._parameters.items(), *submodule._buffers.items()]:
            if tensor is None or not tensor.is_meta:
                continue
            # Wrappers below add their part to the keys only when their turn comes.
            key = join_fqn(fqn, name)
            if key not in state_dict and plain_fqn(key) not in state_dict:
                continue
            if id(tensor) in params:
                params[id(tensor)].make_room()
                state.mark_handles()
            elif name in submodule._buffers:
                if id(tensor) not in buffers:
                    buffers[id(tensor)] = torch.empty_like(tensor, device=device)
                    mark_unfilled(buffers[id(tensor)])
                submodule._buffers[name] = buffers[id(tensor)]
                state.marked_buffers.append((submodule, name))


def _bring_back(module: nn.Module, _: Any) -> None:
    """Move what was loaded into the shards, and put parameters that the load replaced back."""
    handle = handle_of_module(module)
    if handle is not None:
        with located(f"{place_of_rank()}, {handle.described}"):
            handle.attach()

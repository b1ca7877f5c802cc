"""The state of parameters that are sharded as bytes, in state dicts: scales and zero points beside the bytes.

Only what is inside of a wrapper: attributes of a parameter are saved and loaded by its module, as without shards.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from composable.annotation import handle_of_module

__all__ = ["add_state", "load_state", "state_of"]


def state_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what quantised parameters of a fully sharded module have beside their bytes, with its key below there."""
    handle = handle_of_module(module)
    if handle is None:
        return
    for param in handle.params:
        if param.form is None or param.form.kind != "bytes":
            continue
        position, _, fqn = param.fqn.partition(".") if len(handle.modules) > 1 else ("0", "", param.fqn)
        if handle.modules[int(position)] is module:
            for path, tensor in param.form.state_tensors():
                yield f"{fqn}.{path}", tensor


def add_state(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Put the state of quantised parameters beside their bytes, which are of no use without it."""
    for key, tensor in state_of(module):
        state_dict[prefix + key] = tensor


@torch.no_grad()
def load_state(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    """Load what ``add_state`` gave; torch knows no such keys. Called as hooks before a load are."""
    for key, tensor in state_of(module):
        if prefix + key not in state_dict:
            missing_keys.append(prefix + key)
            continue
        value = state_dict.pop(prefix + key)
        if value.shape != tensor.shape:
            error_msgs.append(f"size mismatch for {prefix + key}: {list(value.shape)} for {list(tensor.shape)}.")
        else:
            tensor.copy_(value)

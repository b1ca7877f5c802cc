"""What to write in place of an argument that an annotation lacks: one of torch's wrappers, or a misspelt one."""

import difflib
import inspect
import re
from collections.abc import Callable, Collection

from composable.errors import SignatureError

__all__ = ["check_call"]

# By the names that ``FullyShardedDataParallel``, ``DistributedDataParallel`` and torch's ``replicate`` have for them.
_PLACES = {
    "auto_wrap_policy": "pass it as policy=",
    "backward_prefetch": "leave it out, since gathers are prefetched always",
    "batched_grad_copy": "leave it out, since gradients are copied together always",
    "bucket_cap_mb_list": "pass one cap for all buckets as bucket_cap_mb=",
    "check_reduction": "leave it out, since every backward is checked",
    "cpu_offload": "pass it as offload_policy=",
    "device_id": "leave it out, since the device is that of the mesh",
    "device_mesh": "pass it as mesh=",
    "dim": "leave it out, since inputs are not split",
    "dp_mesh_dims": "pass the dim that averages as mesh=, such as mesh['dp']",
    "forward_prefetch": "leave it out, since gathers are prefetched always",
    "ignored_states": "pass its parameters as ignored_params=, its modules as ignored_modules=",
    "limit_all_gathers": "leave it out, since gathers are limited always",
    "mixed_precision": "pass it as mp_policy=",
    "offload_policy": "leave it out, or call fully_shard: copies rest on the device",
    "output_device": "leave it out, since outputs stay where the module makes them",
    "sharding_strategy": "pass it as strategy=",
    "skip_all_reduce_unused_params": "pass static_graph=True, which leaves out what no rank uses",
    "use_orig_params": "leave it out, since parameters keep their names and shapes always",
}
_PAGES = {"fully_shard": "docs/from_fsdp1.md", "replicate": "docs/replicate.md"}


def check_call(function: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Raise ``SignatureError``, which says what to write, unless ``function`` takes such arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in signature.parameters]
        what, fixes = f"{function.__name__}: {error}", ["pass the module, and all else by name"]
        if unknown:
            what = f"{function.__name__} has no argument {', '.join(unknown)}"
            fixes = [f"{name}: {_place(name, signature.parameters)}" for name in unknown]
        fixes += [f"see {page}" for name, page in _PAGES.items() if name == function.__name__]
        raise SignatureError(what, fix="; ".join(fixes)) from None


def _place(name: str, known: Collection[str]) -> str:
    fitting = {one: place for one, place in _PLACES.items() if {*re.findall(r"(\w+)=", place)} <= {*known}}
    for near in difflib.get_close_matches(name, [*fitting, *known], n=1):
        return fitting.get(near, f"did you mean {near}=?")
    return "leave it out, there is nothing like it"

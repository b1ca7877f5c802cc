"""The list of ``docs/site/fsdp_methods.md``: what torch's ``FSDPModule`` has, and what it does here.

    python -m tools.fsdp_methods    # writes it anew

What a method does is the first line of its docstring.
"""

import inspect
from pathlib import Path

import composable
from composable import FSDPModule

__all__ = ["FUNCTIONS", "METHODS", "PAGE", "with_list"]

PAGE = Path(__file__).parent.parent / "docs" / "site" / "fsdp_methods.md"
EARLY = "2.13 or before"
BEGIN, END = "<!-- begin: written by `python -m tools.fsdp_methods` -->", "<!-- end -->"

# What torch's class has, and since when: the oldest of the torches that were looked at.
METHODS = {
    name: "2.15"
    if name in ("set_keep_unsharded_storage", "set_manual_backward_finalization", "finalize_backward")
    else EARLY
    for name in (
        "unshard reshard set_requires_gradient_sync set_requires_all_reduce set_reshard_after_forward"
        " set_reshard_after_backward set_unshard_in_backward set_modules_to_forward_prefetch"
        " set_modules_to_backward_prefetch set_reduce_scatter_unused_params set_reduce_scatter_max_input_buffers"
        " set_separate_reduce_scatter_group set_keep_unsharded_storage set_is_last_backward"
        " set_manual_backward_finalization finalize_backward reset_iter_state set_post_optim_event"
        " set_gradient_divide_factor set_reduce_scatter_divide_factor set_force_sum_reduction_for_comms"
        " set_all_reduce_hook set_custom_all_gather set_custom_reduce_scatter"
        " set_allocate_memory_from_process_group_for_comm set_symm_mem_for_comm _set_unshard_async_op"
    ).split()
}
FUNCTIONS = {"register_fsdp_forward_method": EARLY, "share_comm_ctx": EARLY}


def with_list(page: str) -> str:
    """Return the page with the list as the code has it."""
    methods = [(name, getattr(FSDPModule, name), since) for name, since in METHODS.items()]
    functions = [(name, getattr(composable, name), since) for name, since in FUNCTIONS.items()]
    items: list[str] = []
    refused: list[str] = []
    for name, function, since in [*methods, *functions]:
        text = inspect.getdoc(function).partition("\n")[0].replace("``", "`")  # type: ignore[union-attr]  # each has one
        if text.startswith("Refuse all but False"):
            refused.append(f"`{name}`")
        else:
            items.append(f"- `{name}`{f' ({since})' if since != EARLY else ''}: {text}")
    listed = "\n".join([*items, f"- These take nothing but False: {', '.join(refused)}."])
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{listed}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_list(PAGE.read_text()))

"""The table of ``docs/from_fsdp2.md``: what torch's ``FSDPModule`` has, and what it does here.

    python -m tests.fsdp_methods    # writes it anew

What a method does is the first line of its docstring.
"""

import inspect
from pathlib import Path
from typing import Any

import composable
from composable import FSDPModule

__all__ = ["FUNCTIONS", "METHODS", "PAGE", "with_table"]

PAGE = Path(__file__).parent.parent / "docs" / "from_fsdp2.md"
EARLY = "2.13 or before"
BEGIN, END = "<!-- begin: written by `python -m tests.fsdp_methods` -->", "<!-- end -->"

# What torch's class has, and since when: the oldest of the torches that were looked at.
METHODS = {
    "unshard": EARLY,
    "reshard": EARLY,
    "set_requires_gradient_sync": EARLY,
    "set_requires_all_reduce": EARLY,
    "set_reshard_after_forward": EARLY,
    "set_reshard_after_backward": EARLY,
    "set_unshard_in_backward": EARLY,
    "set_modules_to_forward_prefetch": EARLY,
    "set_modules_to_backward_prefetch": EARLY,
    "set_reduce_scatter_unused_params": EARLY,
    "set_reduce_scatter_max_input_buffers": EARLY,
    "set_separate_reduce_scatter_group": EARLY,
    "set_keep_unsharded_storage": "2.15",
    "set_is_last_backward": EARLY,
    "set_manual_backward_finalization": "2.15",
    "finalize_backward": "2.15",
    "reset_iter_state": EARLY,
    "set_post_optim_event": EARLY,
    "set_gradient_divide_factor": EARLY,
    "set_reduce_scatter_divide_factor": EARLY,
    "set_force_sum_reduction_for_comms": EARLY,
    "set_all_reduce_hook": EARLY,
    "set_custom_all_gather": EARLY,
    "set_custom_reduce_scatter": EARLY,
    "set_allocate_memory_from_process_group_for_comm": EARLY,
    "set_symm_mem_for_comm": EARLY,
    "_set_unshard_async_op": EARLY,
}
FUNCTIONS = {"register_fsdp_forward_method": EARLY, "share_comm_ctx": EARLY}


def with_table(page: str) -> str:
    """Return the page with the table as the code has it."""
    methods = [(name, getattr(FSDPModule, name, None), since) for name, since in METHODS.items()]
    functions = [(name, getattr(composable, name), since) for name, since in FUNCTIONS.items()]
    rows = [_row(*one) for one in [*methods, *functions]]
    table = "\n".join(["| Name | What it does here | In torch |", "|---|---|---|", *rows])
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


def _row(name: str, function: Any, since: str) -> str:
    if function is None:
        return f"| `{name}` | Not here yet. | {since} |"
    signature = inspect.signature(function)
    plain = [one.replace(annotation=one.empty) for name, one in signature.parameters.items() if name != "self"]
    arguments = str(signature.replace(parameters=plain, return_annotation=signature.empty))
    text = inspect.getdoc(function).partition("\n")[0].replace("``", "`")  # type: ignore[union-attr]  # each has one
    return f"| `{name}{arguments}` | {text} | {since} |"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))

"""What users should know of their model and is no error: logged as a warning, each text once in a process."""

import logging
from collections.abc import Iterable, Mapping, Sequence

from composable.comm import Ranks
from composable.engine.handle import Handle
from composable.errors import place_of_rank
from composable.ground.names import list_text
from composable.planning import ShardPlan

__all__ = [
    "notice_experts",
    "notice_hook_states",
    "notice_leak",
    "notice_local_gradients",
    "notice_offload",
    "notice_plan",
    "notice_unset",
]


_LOG = logging.getLogger("composable")
_SAID: set[str] = set()


def notice_plan(plan: ShardPlan, ranks: Ranks) -> None:
    """Log what is likely not meant in the plan of a root, on the first of its ranks.

    Of a root only: of an annotation it is not known whether another one comes around it.
    """
    if ranks.rank == 0 and ranks.size > 1:
        for warning in plan.warnings:
            _warn_once(f"{warning}\n  at:  {place_of_rank()}, module {' + '.join(plan.class_names)}")


def notice_offload(plan: ShardPlan, ranks: Ranks) -> None:
    """Log that a policy has nothing to offload, where everything is on the host anyway; on the first rank."""
    if plan.offload_policy.is_offloading and ranks.device.type == "cpu" and ranks.rank == 0:
        _warn_once(
            "nothing is to be offloaded: the mesh is on cpu, where shards, gradients and optimizer state rest already"
            f"\n  at:  {place_of_rank()}, module {' + '.join(plan.class_names)}"
        )


def notice_unset(plan: ShardPlan, ranks: Ranks) -> None:
    """Log which attributes of weights that their class gathers stay unset, on the first rank."""
    found = dict.fromkeys(param.subclass for handle in plan.handles for param in handle.params if param.subclass)
    for subclass in found:
        if subclass.unset and ranks.rank == 0:
            _warn_once(
                f"{subclass.name} gathers its rows without {list_text(subclass.unset)}: "
                "what is set on a sharded weight does not reach its class"
                f"\n  at:  {place_of_rank()}, module {' + '.join(plan.class_names)}"
                "\n  fix: leave out what computes them between steps, as precompute_float8_dynamic_scale_for_fsdp"
            )


def notice_experts(handles: Sequence[Handle], leaders: Mapping[Handle, Sequence[Handle]], ranks: Ranks) -> None:
    """Log that all experts are gathered with the root, where nothing else is annotated around them; on the first rank.

    Args:
        handles: Of the root.
        leaders: Of those that follow.
        ranks: Of the root.
    """
    others = [handle for handle in handles if handle not in leaders]
    if len(leaders) > 1 and len(others) == 1 and ranks.rank == 0 and ranks.size > 1:
        _warn_once(
            f"the parameters of {len(leaders)} modules on a part of the ranks, such as experts, are gathered all at "
            f"once: only the root is annotated around them\n  at:  {place_of_rank()}, {others[0].described}"
            "\n  fix: annotate the blocks around them, before the root"
        )


def notice_hook_states(notices: Iterable[str], ranks: Ranks) -> None:
    """Log which states of communication hooks are not in a checkpoint, or not loaded; on the first rank."""
    if ranks.rank == 0:
        for notice in notices:
            _warn_once(notice)


def notice_local_gradients(fqn: str) -> None:
    """Log that ``torch.autograd.grad`` averages nothing."""
    _warn_once(
        "torch.autograd.grad of replicated parameters gives the gradients of this rank alone"
        f"\n  at:  {place_of_rank()}, parameter {fqn!r}"
        "\n  fix: call backward() and read param.grad; or average them, if those of all ranks are meant"
    )


def notice_leak(handle: Handle) -> None:
    """Log that the parameters stay in memory, if they would be freed had the forward not leaked."""
    if handle.settings.reshard_after_forward:
        _warn_once(
            "a forward leaves tensors by another way than its output: its parameters stay in memory until backward ends"
            f"\n  at:  {place_of_rank()}, {handle.described}"
            "\n  fix: return them, keep them as attributes of this module, or compute them under torch.no_grad()"
        )


def _warn_once(text: str) -> None:
    if text not in _SAID:
        _SAID.add(text)
        _LOG.warning("%s", text)

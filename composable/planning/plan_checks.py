"""Whether a plan that was read hangs together: what the types of its fields cannot say."""

import math
from collections.abc import Collection, Sequence

from composable.planning.handle_plan import BufferPlan, HandlePlan, ParamPlan
from composable.planning.options import TRANSPORT_NAMES, UNUSED_GRADIENTS
from composable.planning.plan_json import misfit
from composable.wording import count_text, list_text

__all__ = ["check_handles", "check_ranks"]


def check_ranks(
    world_size: int, replicas: int, transport: str, hosts: Sequence[int], host_ranks: int | None = None
) -> None:
    """Raise ``ConfigError`` unless there are ranks, a transport that is known, and as many hosts as ranks or none."""
    for name, number in (("world_size", world_size), ("replicas", replicas)):
        if not number:
            raise misfit("0 is no number of ranks", name)
    _check_known(transport, TRANSPORT_NAMES, "transport")
    if host_ranks is not None and (not 0 < host_ranks < world_size or world_size % host_ranks or replicas > 1):
        raise misfit(f"{host_ranks} is no part of {world_size} ranks without copies", "host_ranks")
    if hosts and len(hosts) != world_size * replicas:
        raise misfit(f"there are {len(hosts)} and {count_text(world_size * replicas, 'rank')}", "hosts")


def check_handles(handles: Sequence[HandlePlan], world_size: int) -> None:
    """Raise ``ConfigError`` unless every handle has modules of its own, and each of its parameters one place.

    Args:
        handles: Of one plan.
        world_size: Ranks that share each buffer.
    """
    fqns: set[str] = set()
    modules: set[str] = set()
    for index, handle in enumerate(handles):
        where = f"handles[{index}]"
        _check_known(handle.unused_gradients, UNUSED_GRADIENTS, f"{where}.unused_gradients")
        ranks = handle.secondary_ranks
        if ranks is not None and (not 1 < ranks < world_size or world_size % ranks):
            raise misfit(f"{ranks} is no part of {world_size} ranks", f"{where}.reshard_after_forward")
        _check_new(handle.module_fqns, modules, f"{where}.module_fqns")
        if not handle.module_fqns or len(handle.class_names) != len(handle.module_fqns):
            what = f"{count_text(len(handle.module_fqns), 'module')} of {len(handle.class_names)} classes"
            raise misfit(what, f"{where}.class_names")
        _check_new([param.fqn for param in handle.params], fqns, f"{where}.params")
        waiting = {param.fqn: param for param in handle.params}
        for number, buffer in enumerate(handle.buffers):
            _check_buffer(buffer, waiting, world_size, f"{where}.buffers[{number}]")
        if waiting:
            raise misfit(f"no buffer has {list_text(waiting)}", f"{where}.buffers")


def _check_known(value: str, known: Collection[str], where: str) -> None:
    if value not in known:
        raise misfit(f"{value!r:.80} is none of {list_text(known)}", where)


def _check_new(names: Sequence[str], seen: set[str], where: str) -> None:
    for name in names:
        if name in seen:
            raise misfit(f"{name!r} is there twice", where)
        seen.add(name)


def _check_buffer(buffer: BufferPlan, waiting: dict[str, ParamPlan], world_size: int, where: str) -> None:
    """Check one buffer; what it has waits no more."""
    layout, filled = buffer.layout, 0
    if layout.world_size != world_size:
        raise misfit(f"{layout.world_size}, and the plan is for {world_size}", f"{where}.layout.world_size")
    for index, span in enumerate(layout.spans):
        place = f"{where}.layout.spans[{index}]"
        param = waiting.pop(span.fqn, None)
        if param is None:
            raise misfit(f"{span.fqn!r} is no parameter of the handle that has no place yet", f"{place}.fqn")
        if span.shape != param.shape:
            raise misfit(f"{list(span.shape)}, and the parameter is {list(param.shape)}", f"{place}.shape")
        if (buffer.dtype, buffer.requires_grad) != (param.dtype, param.requires_grad):
            raise misfit(f"{span.fqn!r} has another dtype or requires_grad", where)
        if not filled <= span.start or span.stop != span.start + math.prod(span.shape):
            raise misfit(f"[{span.start}, {span.stop}) is no place for {list(span.shape)} after {filled}", place)
        if span.order and sorted(span.order) != list(range(len(span.shape))):
            raise misfit(f"{list(span.order)} are not the dims of {list(span.shape)}", f"{place}.order")
        filled = span.stop
    if filled > world_size * layout.shard_numel:
        raise misfit(f"{layout.shard_numel} a rank are too few for {filled}", f"{where}.layout.shard_numel")

"""Makes the sharded parameters of one class, each with its piece of the shard, as the plan says.

What a piece knows of the whole, ranks and cuts of tensor parallelism included, is its ``RaggedSpec``.
"""

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from composable.collectives import Ranks, joined_mesh
from composable.planning import BufferPlan, Form, HandleMembers, Span, SplitNode, local_shape
from composable.ragged import RaggedSpec, ragged_spec, splits_of
from composable.storage.sharded_param import ShardedParam

__all__ = ["make_sharded_params"]


def make_sharded_params(
    plan: BufferPlan,
    module_fqn: str,
    members: HandleMembers,
    mesh: DeviceMesh,
    shard: torch.Tensor,
    grad_dtype: torch.dtype,
    home: torch.device,
    device: torch.device,
) -> list[ShardedParam]:
    """Return the parameters of a class with pieces in ``shard``, whose values are not theirs yet.

    Args:
        plan: Of the class.
        module_fqn: The handle's module, as the plan names it.
        members: The parameters and every place that holds them, by the plan's FQNs.
        mesh: 1-D mesh of the shard group.
        shard: Of this rank, [S].
        grad_dtype: Of reduced gradients.
        home: Where the shard rests.
        device: Where unsharded parameters live.
    """
    params = []
    for span in plan.layout.spans:
        original, bounds = members.originals[span.fqn], plan.layout.bounds(span)
        start, stop = plan.layout.local_range(span, mesh.get_local_rank())
        form = members.forms.get(span.fqn)
        if form is not None and form.kind != "marked" and not shard.is_meta:
            # Forward reads it where the parameters are unsharded.
            form.move(device)
        params.append(
            ShardedParam(
                span.fqn.removeprefix(f"{module_fqn}."),
                members.owners[span.fqn],
                original,
                _spec_of(span, plan.dtype, bounds, mesh, form),
                shard,
                start,
                stop,
                local_shape(span.shape, bounds, mesh.get_local_rank(), span.order),
                grad_dtype,
                home,
                form,
            )
        )
    _choose_stored(params)
    return params


def _choose_stored(params: Sequence[ShardedParam]) -> None:
    """Let checkpoints take one copy of what ranks along a dim of tensor parallelism hold copies of, cut differently.

    Blocks of other shapes move the cuts of what is in the same buffer. Where blocks are equal checkpoints choose.
    """
    if all(param.layout.is_even for param in params):
        return
    dims: dict[tuple[int, ...], int] = {}
    for param in params:
        mesh = param.layout.mesh
        for dim in range(mesh.ndim):
            if dim != param.layout.mesh_dim:
                ranks = Ranks.of_mesh(mesh, dim)
                dims[ranks.numbers] = ranks.rank
    for param in params:
        own = {number for ranks in param.layout.split_ranks for number in ranks.numbers}
        # What is split over some of the same ranks is no copy along these.
        copies = [rank for numbers, rank in dims.items() if len(own.intersection(numbers)) < 2]
        param.layout.is_stored = not any(copies)


def _spec_of(span: Span, dtype: torch.dtype, bounds: Sequence[int], mesh: DeviceMesh, form: Form | None) -> RaggedSpec:
    if form is None or not isinstance(form.node, SplitNode):
        return ragged_spec(mesh, span.shape, dtype, bounds, order=span.order)
    whole = form.node.spec
    joined, mesh_dim = joined_mesh(mesh, whole.mesh)
    others = [dim for dim in range(joined.ndim) if dim != mesh_dim]
    splits = {others[dim]: split for dim, split in splits_of(whole.placements).items()}
    return ragged_spec(joined, whole.shape, dtype, bounds, mesh_dim=mesh_dim, order=span.order, splits=splits)

"""Sharded state as torch's own DTensors, for programs that know no ragged cut."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from composable.dtensor import RaggedDTensor
from composable.errors import ConfigError
from composable.ground.names import described
from composable.planning import RaggedShard, part_of_dim


@torch.no_grad()
def as_torch_shards(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return sharded state as DTensors of torch with ``Shard`` and ``Replicate`` that share its memory.

    This needs cuts where ``Shard(0)`` has them: ``torch.chunk`` of the rows, so that the last ranks may have fewer or
    none. To get them, annotate each module with one parameter alone, and let ``align`` be the rows of a rank::

        align = lambda fqn, param: -(-len(param) // world_size)
        fully_shard(model, policy={nn.Linear}, options=HandleOptions(align=align))

    Not collective. What is loaded into the result in place is loaded into the model. With copies of shards, the mesh of
    a result is that of one copy.

    Args:
        state: ``model.state_dict()``, or what ``get_state_dict`` returns: mappings in mappings. Values that are not
            sharded are taken as they are.

    Raises:
        ConfigError: ``state`` is no mapping, or parameters are cut elsewhere: on every rank, with their names and cuts.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"state is {described(state)}", fix="pass model.state_dict()")
    wrong: list[str] = []
    result = {key: _shown(value, str(key), wrong) for key, value in state.items()}
    if wrong:
        raise ConfigError(
            "\n  - ".join(["state is not cut as Shard(0) of torch cuts it:", *wrong]),
            fix="annotate each module with one parameter alone, with HandleOptions(align=lambda fqn, param: "
            "-(-len(param) // world_size)); or save it with torch.distributed.checkpoint, which takes any cut",
        )
    return result


def _shown(value: Any, name: str, wrong: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _shown(each, f"{name}.{key}", wrong) for key, each in value.items()}
    if not isinstance(value, RaggedDTensor):
        return value
    layout = value._spec.layout
    block, count = layout.block_shape, len(layout.bounds) - 1
    row = math.prod(block[1:])
    rows = [0, *(part_of_dim(block[0], count, rank)[1] for rank in range(count))] if block else []
    splits = {split.mesh_dim: Shard(split.dim) for split in layout.splits}
    if layout.order or [bound * row for bound in rows] != [*layout.bounds] or Shard(0) in splits.values():
        what = "of other dims, or twice" if layout.order or splits else f"at elements {layout.bounds[1:-1]}"
        wrong.append(f"{name} {[*value.shape]}, cut {what}, not at rows {tuple(rows[1:-1])}")
        return value
    placements = [
        Shard(0) if isinstance(one, RaggedShard) else splits.get(dim, Replicate())
        for dim, one in enumerate(layout.placements)
    ]
    local, shape, stride = value.to_local().detach(), value.shape, value.stride()
    return DTensor.from_local(local, layout.mesh, placements, run_check=False, shape=shape, stride=stride)

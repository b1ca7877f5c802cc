"""Whole parameters of a meta model are initialised inside ``unshard_params``, as in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import MixedPrecisionPolicy, UsageError, fully_shard, unshard_params
from tests.models import DIM, MLPBlock, random_input
from tests.parity import full
from tests.test_reshard_int import mesh_of
from tests.world import on_ranks


class Tied(nn.Module):
    """Blocks whose first and last weights are one, with a buffer that ``__init__`` computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.blocks = nn.Sequential(MLPBlock(), nn.BatchNorm1d(DIM), MLPBlock())
        self.last = nn.Linear(DIM, DIM, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.blocks(self.first(x)))
        return output


def init(module: nn.Module) -> None:
    """Initialise what needs the whole parameter: a piece of an orthogonal matrix is not orthogonal."""
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        if module.bias is not None:
            nn.init.uniform_(module.bias)
    elif isinstance(module, nn.BatchNorm1d):
        module.reset_parameters()


OPTIONS: dict[str, dict[str, Any]] = {
    "one handle": {},
    "policy": {"policy": {MLPBlock}},
    "mixed precision": {"policy": {MLPBlock}, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "copies": {"policy": {MLPBlock}, "mesh": (2, 2)},
}
WAYS: dict[str, dict[str, bool]] = {"all": {}, "first rank": {"rank0_only": True}, "host": {"offload_to_cpu": True}}


def on_meta(option: str) -> Any:
    with torch.device("meta"):
        model = Tied()
    options = dict(OPTIONS[option])
    if "mesh" in options:
        options["mesh"] = mesh_of(options["mesh"])
    return fully_shard(model, **options).to_empty(device="cpu")


@on_ranks(4, option=OPTIONS, way=WAYS)
def test_whole_parameters_get_the_values_of_one_process(*, option: str, way: str) -> None:
    model, plain = on_meta(option), Tied()
    if way == "first rank":
        # Buffers are each rank's own.
        model.blocks[1].reset_running_stats()
    torch.manual_seed(1)
    with unshard_params(model, **WAYS[way]):
        if way != "first rank" or dist.get_rank() == 0:
            model.apply(init)
    torch.manual_seed(1)
    plain.apply(init)
    expected = plain.state_dict()
    for fqn, param in model.state_dict().items():
        found = full(param) if hasattr(param, "full_tensor") else param
        torch.testing.assert_close(found, expected[fqn], rtol=0, atol=0)
    if option != "mixed precision":
        output = model(random_input(0, 4, DIM))
        torch.testing.assert_close(output, plain(random_input(0, 4, DIM)))


@on_ranks(2)
def test_what_is_left_out_is_named_on_every_rank_by_the_first_forward() -> None:
    model = on_meta("policy")
    with unshard_params(model):
        for module in model.modules():
            if module is not model.blocks[2].up and not (isinstance(module, nn.BatchNorm1d) and dist.get_rank() == 1):
                init(module)
    with pytest.raises(UsageError) as caught:
        model(random_input(0, 4, DIM))
    text = str(caught.value)
    name = "'blocks.2.up." if dist.get_rank() == 0 else "'blocks.1.weight'"
    assert "nothing has filled it" in text and f"at:  rank {dist.get_rank()}, {name}" in text
    with unshard_params(model):
        model.apply(init)
    model(random_input(0, 4, DIM))


@on_ranks(2)
def test_a_meta_model_without_memory_is_refused_at_the_block() -> None:
    with torch.device("meta"):
        model: Any = Tied()
    fully_shard(model)
    with pytest.raises(UsageError, match="still on the meta device"), unshard_params(model):
        raise AssertionError("entered")

"""Methods that run as a forward: ``register_fsdp_forward_method``."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import ConfigError, FSDPModule, fully_shard, register_fsdp_forward_method, replicate, unannotate
from tests.models import DIM, random_input, seeded
from tests.world import on_ranks, run_threads


class Coder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
        self.scale = nn.Parameter(torch.randn(DIM))

    def encode(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
        if fails:
            raise ValueError("as asked")
        return self.inner(x) * self.scale

    def encode_twice(self, x: torch.Tensor) -> torch.Tensor:
        return self(self.encode(x)) + self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.encode(x)


@on_ranks(2, is_root=[False, True])
def test_registered_methods_train_as_forward_does(is_root: bool) -> None:
    plain, model = (seeded(lambda: nn.Sequential(Coder(), nn.Linear(DIM, DIM)), 0) for _ in range(2))
    fully_shard(model[0].inner[0])  # type: ignore[index]
    fully_shard(model[0])
    if not is_root:
        fully_shard(model)
    for name in ("encode", "encode_twice"):
        register_fsdp_forward_method(model[0], name)

    def loss_of(net: Any, rank: int, number: int) -> torch.Tensor:
        method = ("encode", "encode_twice", "forward")[number % 3]
        run = net[0] if method == "forward" else getattr(net[0], method)
        return run(random_input(10 * number + rank, 4, DIM)).square().mean()

    def check(net: Any, number: int) -> None:
        net.zero_grad()
        plain.zero_grad()
        loss_of(net, dist.get_rank(), number).backward()
        for rank in range(2):
            (loss_of(plain, rank, number) / 2).backward()
        for (name, param), other in zip(net[0].named_parameters(), plain[0].parameters(), strict=True):
            grad = param.grad.full_tensor() if isinstance(net[0], FSDPModule) else param.grad
            torch.testing.assert_close(grad, other.grad if isinstance(net[0], FSDPModule) else grad, msg=name)

    for number in range(4):
        check(model, number)
    with pytest.raises(ValueError, match="as asked"):
        model[0].encode(random_input(0, 4, DIM), fails=True)  # type: ignore[union-attr,operator]
    check(model, 0)
    twin = copy.deepcopy(model)
    check(twin, 1)
    assert twin[0].encode.__self__ is twin[0]  # type: ignore[union-attr]
    unannotate(model)
    check(model, 1)


def register_wrongly() -> str:
    model = Coder()
    register_fsdp_forward_method(model, "nothing")  # Not sharded: as torch's, it does nothing.
    replicate(model.inner)
    fully_shard(model)
    with pytest.raises(ConfigError) as caught:
        register_fsdp_forward_method(model, "scale")
    return str(caught.value)


def test_what_is_no_method_is_refused() -> None:
    assert run_threads(register_wrongly, 1) == [
        "register_fsdp_forward_method got 'scale', which is no method\n"
        "  at:  rank 0, module Coder\n"
        "  fix: pass the name of a method that its class defines"
    ]

"""A sharded parameter that meets plain tensors, since the forward of its module is not running: an error that helps."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from composable import UsageError, fully_shard
from tests.world import on_ranks, run_threads

INPUT = torch.ones(2, 6)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(x)
        return output

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.linear.weight, self.linear.bias)


def make_model() -> nn.Sequential:
    """Return a model whose names are known from the root, as they are after the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(Encoder(), nn.TransformerEncoderLayer(6, 2, 6, batch_first=True), nn.Conv2d(2, 2, 3))
    fully_shard(model, policy={Encoder, nn.Linear, nn.LayerNorm, nn.Conv2d})
    with pytest.raises(UsageError):
        model(INPUT.unsqueeze(0))
    return model


USES: list[tuple[str, Callable[[nn.Sequential], object]]] = [
    ("0.linear.bias", lambda m: m[0].encode(INPUT)),
    ("0.linear.bias", lambda m: m[0].linear.forward(INPUT)),
    ("0.embedding.weight", lambda m: F.linear(INPUT, m[0].embedding.weight)),
    ("0.embedding.weight", lambda m: F.linear(INPUT.unsqueeze(0), m[0].embedding.weight)),
    ("0.linear.weight", lambda m: INPUT @ m[0].linear.weight),
    ("0.linear.bias", lambda m: INPUT * m[0].linear.bias),
    ("0.linear.weight", lambda m: torch.einsum("bi,oi->bo", INPUT, m[0].linear.weight)),
    ("0.embedding.weight", lambda m: F.embedding(torch.tensor([1, 2]), m[0].embedding.weight)),
    ("0.embedding.weight", lambda m: m[0].embedding.weight[torch.tensor([1, 2])]),
    ("2.weight", lambda m: m[2].forward(torch.ones(1, 2, 4, 4))),
    ("1.norm1.weight", lambda m: m[1].norm1.forward(INPUT)),
    ("1.self_attn.out_proj.bias", lambda m: m(INPUT.unsqueeze(0))),
]


@on_ranks(2)
def test_the_error_names_the_parameter_and_its_module() -> None:
    model = make_model()
    for fqn, use in USES:
        with pytest.raises(UsageError, match="the parameter is used outside the forward of its module") as caught:
            use(model)
        at, fix = caught.value.at or "", caught.value.fix or ""
        assert at.startswith(f"rank {dist.get_rank()}, module {fqn.rpartition('.')[0]!r} (")
        assert f"parameter {fqn!r} [" in at
        assert all(hint in fix for hint in ("call the module itself", "register_fsdp_forward_method", "unshard()"))


@on_ranks(2, kind=["forward hook", "first pre-hook", "backward pre-hook"])
def test_a_users_hook_that_runs_outside_of_ours_gets_the_same_error(kind: str) -> None:
    uses: list[Callable[[nn.Module, torch.Tensor], torch.Tensor]] = [
        lambda module, x: F.linear(x, module.weight),  # type: ignore[arg-type]
        lambda module, x: x @ module.weight,  # type: ignore[operator]
    ]
    for use in uses:
        model = fully_shard(nn.Sequential(nn.Linear(6, 6)), policy={nn.Linear})
        # From now on a forward hook runs after ours.
        model(INPUT)
        if kind == "forward hook":
            handle = model[0].register_forward_hook(lambda module, args, output, use=use: use(module, output))
        elif kind == "first pre-hook":
            handle = model[0].register_forward_pre_hook(
                lambda module, args, use=use: (use(module, args[0]),), prepend=True
            )
        else:
            handle = model[0].register_full_backward_pre_hook(lambda module, grads, use=use: (use(module, grads[0]),))
        with pytest.raises(UsageError, match="used outside the forward of its module") as caught:
            model(INPUT.clone().requires_grad_()).sum().backward()
        assert "parameter '0.weight' [6, 6]" in str(caught.value.at)
        # The next step works, once the hook is gone.
        handle.remove()
        model.zero_grad()
        model(INPUT).sum().backward()
        torch.testing.assert_close(model[0].bias.grad.full_tensor(), torch.full((6,), 2.0))


def train_with_hooks(policy: str, *, is_annotated: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Tanh()))
    if is_annotated:
        fully_shard(model, policy={"each": {nn.Linear}, "blocks": {nn.Sequential}, "whole": None}[policy])

    # Registered after the annotation: a norm, a second use, a change of what the model returns.
    def add_norm(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output + module.weight.square().sum()  # type: ignore[operator,union-attr]

    def use_again(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return F.linear(output, module.weight, module.bias)  # type: ignore[arg-type]

    model[0].register_forward_hook(add_norm)
    model[1][0].register_forward_hook(use_again)
    model.register_forward_hook(lambda module, args, output: {"output": output * 2})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(INPUT)["output"].square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor() if is_annotated else param.detach() for param in model.parameters()]


@pytest.mark.parametrize("policy", ["each", "blocks", "whole"])
def test_forward_hooks_registered_before_the_first_forward_read_whole_weights(policy: str) -> None:
    expected = train_with_hooks(policy, is_annotated=False)
    for found in run_threads(train_with_hooks, 2, policy, is_annotated=True):
        torch.testing.assert_close(found, expected)


@on_ranks(2)
def test_a_copy_of_another_shape_and_what_is_computed_from_a_parameter_are_named_after_it() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(6, 6)))
    with torch.no_grad(), pytest.raises(UsageError) as caught:
        model[0].weight.copy_(torch.ones(5, 6))
    assert str(caught.value).splitlines() == [
        "aten.copy_.default of a plain tensor of shape [5, 6], which is not that of the whole parameter",
        f"  at:  rank {dist.get_rank()}, ragged tensor of shape [6, 6], cut as parameter '0.weight'",
        "  fix: pass a tensor of the whole parameter's shape",
    ]
    with pytest.raises(UsageError, match=r"ragged tensor of shape \[6, 6\], cut as parameter '0\.weight'"):
        F.linear(INPUT, model[0].weight * 2)


class Around(nn.Module):
    """Uses its child's parameters without calling it."""

    def __init__(self, child: nn.Linear) -> None:
        super().__init__()
        self.child = child

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.child.weight * 2, self.child.bias)


@on_ranks(2)
def test_what_the_error_advises_works() -> None:
    torch.manual_seed(0)
    plain = Around(nn.Linear(6, 6))
    around = fully_shard(copy.deepcopy(plain))
    unsharded = copy.deepcopy(plain)
    fully_shard(unsharded.child)
    fully_shard(unsharded)
    plain(INPUT).sum().backward()
    around(INPUT).sum().backward()
    for sharded, whole in zip(around.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="outside the forward"):
        unsharded(INPUT)
    unsharded.child.unshard()
    torch.testing.assert_close(unsharded(INPUT), plain(INPUT))


def averaged_by_torch(of_groups: bool) -> tuple[str, bool]:
    model = fully_shard(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)))
    model(INPUT).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [param._local_tensor.clone() for param in model.parameters()]
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    with pytest.raises(UsageError) as caught:
        averager.average_parameters(optimizer.param_groups if of_groups else model.parameters())
    return str(caught.value), all(
        torch.equal(param._local_tensor, was) for param, was in zip(model.parameters(), before, strict=True)
    )


@pytest.mark.parametrize("of_groups", [False, True])
def test_torch_s_averagers_of_models_are_told_that_there_is_one_model(of_groups: bool) -> None:
    for rank, (text, is_unchanged) in enumerate(run_threads(averaged_by_torch, 2, of_groups)):
        assert is_unchanged
        assert text == (
            "torch's model averagers average whole models that each rank trains by itself, and a sharded model is "
            f"one model on all ranks\n  at:  rank {rank}, parameter '0.weight'\n"
            "  fix: leave the averager out: every backward averages gradients; or train the whole model on each rank"
        )

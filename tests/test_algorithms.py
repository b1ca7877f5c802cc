"""torch's algorithms for data parallelism, beside the annotations: hooks, averagers, optimizers, quantised gathers.

Those that torch wrote for its wrapper are held against that wrapper, the others against one process.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._quantization.quantization import DQuantType, auto_quantize
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import HierarchicalModelAverager
from torch.nn.parallel import DistributedDataParallel

from composable import fully_shard, register_comm_hook, replicate
from tests.models import MLPBlock, make_model, random_input, seeded
from tests.parity import assert_equal_params
from tests.programs import Twins, loss_at, train
from tests.world import on_ranks, run_ranks, run_threads

DIM = 32


def torch_optim(name: str) -> Any:
    """Return something that torch cannot import without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit
        from torch.distributed import optim
        from torch.distributed.algorithms._optimizer_overlap import optimizer_overlap
    return getattr(optim, name, None) or getattr(optimizer_overlap, name)


# Communication hooks

Hook = tuple[Any, Callable[..., Any]]


def hook_named(name: str) -> Hook:
    """Return the state and the function of one of torch's hooks."""
    power = {"process_group": None, "matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
    hooks: dict[str, Callable[[], Hook]] = {
        "fp16 around allreduce": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
        "fp16 around PowerSGD": lambda: (
            powerSGD_hook.PowerSGDState(**power),
            default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        ),
        "post-local SGD": lambda: (
            post_localSGD_hook.PostLocalSGDState(None, None, 2, post_local_gradient_allreduce=False),
            post_localSGD_hook.post_localSGD_hook,
        ),
    }
    return hooks[name]()


# Beside those of torch's own list, in test_ddp_view.py. How much of a number each may round.
HOOKS = {"fp16 around allreduce": 0.0, "fp16 around PowerSGD": 1e-3, "post-local SGD": 0.0}


def gradients_with_hook(name: str, *, as_ddp: bool) -> list[torch.Tensor]:
    # One matrix: what a hook makes of a bucket depends on all that is in it.
    model = seeded(lambda: nn.Linear(DIM, DIM, bias=False), 0)
    module: nn.Module = model
    if as_ddp:
        module = DistributedDataParallel(model)
        module.register_comm_hook(*hook_named(name))
    else:
        register_comm_hook(replicate(model), *hook_named(name))
    found = []
    for step in range(4):
        model.zero_grad()
        module(random_input(10 * step + dist.get_rank(), 4, DIM)).square().mean().backward()
        assert model.weight.grad is not None
        found.append(model.weight.grad.clone())
    return found


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_of_torchs_wrapper_give_replicated_modules_the_same_gradients(name: str) -> None:
    ours, theirs = (run_ranks(gradients_with_hook, 2, name, as_ddp=as_ddp) for as_ddp in (False, True))
    torch.testing.assert_close(ours, theirs, rtol=HOOKS[name], atol=HOOKS[name] / 100)
    assert all(grad.isfinite().all() for grad in ours[0])


# Optimizers


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, eps=1e-3)


@on_ranks(3, run=run_ranks)
def test_an_optimizer_with_sharded_state_steps_replicated_modules() -> None:
    twins = Twins("mlp", replicate, make=adam)
    sharded = torch_optim("ZeroRedundancyOptimizer")(twins.model.parameters(), torch.optim.AdamW, lr=0.05, eps=1e-3)
    twins.optimizers[0] = sharded
    train(twins)
    dist.all_reduce(numel := torch.tensor(sum(state["exp_avg"].numel() for state in sharded.optim.state.values())))
    assert numel == sum(param.numel() for param in twins.model.parameters())


def step_by_torch(model: Any) -> None:
    """Let torch's overlapped optimizers step replicas."""
    overlapped = torch_optim("_as_overlapped_optim")(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9)
    # What ``register_ddp`` does with a wrapper.
    overlapped.register_ddp(_Registers(replicate(model)))


def step_by_hooks(model: nn.Module) -> None:
    """Let hooks step sharded parameters."""
    fully_shard(model, policy={MLPBlock})
    for param in model.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1, momentum=0.9)

        def step(param: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)


class _Registers:
    """What torch's overlapped optimizers want of its wrapper."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        register_comm_hook(self._module, state, hook)


@on_ranks(2, run=run_ranks, annotate=[step_by_hooks, step_by_torch])
def test_an_optimizer_may_step_where_the_reduced_gradient_arrives(annotate: Callable[[nn.Module], None]) -> None:
    twins = Twins("mlp", annotate, make=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    for number in range(3):
        twins.backward(number)
        assert annotate is step_by_torch or all(param.grad is None for param in twins.model.parameters())
        twins.model.zero_grad()
        twins.step(of_ranks=False)
        twins.check()


# Averages of models


def average_models(kind: str) -> dict[str, torch.Tensor]:
    """Train together, then apart, with averages at times."""
    model = replicate(make_model("mlp"))
    world = dist.get_world_size()
    averager: Any
    if kind == "hierarchical":
        averager = HierarchicalModelAverager({2: 2, 4: world}, warmup_steps=2)
    else:
        averager = PeriodicModelAverager(period=4, warmup_steps=2)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "optimizer":
        optimizer = torch_optim("PostLocalSGDOptimizer")(optimizer, averager)
    group = dist.group.WORLD
    state = post_localSGD_hook.PostLocalSGDState(group, None, 2, post_local_gradient_allreduce=False)
    register_comm_hook(model, state, post_localSGD_hook.post_localSGD_hook)
    for step in range(8):
        loss_at(model, step, dist.get_rank()).backward()
        optimizer.step()
        if kind != "optimizer":
            averager.average_parameters(model.parameters())
        optimizer.zero_grad()
    return {fqn: param.detach().clone() for fqn, param in model.named_parameters()}


def average_alone(kind: str, world_size: int) -> list[dict[str, torch.Tensor]]:
    """Do the same with copies in one process."""
    models = [make_model("mlp") for _ in range(world_size)]
    for step in range(8):
        for rank, model in enumerate(models):
            loss_at(model, step, rank).backward()
        if step < 2:
            _average([[param.grad for param in model.parameters()] for model in models])
        for model in models:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
        values = [[param.data for param in model.parameters()] for model in models]
        # One counts periods from the end of the warm-up, the other from the start.
        if step >= 2 and (step if kind == "hierarchical" else step - 2) % 4 == 0:
            _average(values)
        elif kind == "hierarchical" and step >= 2 and step % 2 == 0:
            for start in range(0, world_size, 2):
                _average(values[start : start + 2])
    return [{fqn: param.detach() for fqn, param in model.named_parameters()} for model in models]


def _average(every: list[list[Any]]) -> None:
    for tensors in zip(*every, strict=True):
        mean = torch.stack(list(tensors)).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)


@pytest.mark.parametrize(("kind", "world_size"), [("periodic", 3), ("optimizer", 2), ("hierarchical", 4)])
def test_models_that_train_apart_are_averaged_as_copies_in_one_process(kind: str, world_size: int) -> None:
    expected = average_alone(kind, world_size)
    for found, alone in zip(run_threads(average_models, world_size, kind), expected, strict=True):
        assert_equal_params(found, alone, tolerance=1e-6)
    assert not torch.equal(expected[0]["inp.weight"], expected[1]["inp.weight"])


# Quantised messages


@on_ranks(2, kind=["FP16", "BFP16"])
def test_shards_travel_as_16_bits_through_torchs_quantised_collectives(kind: str) -> None:
    model = seeded(lambda: nn.Linear(8, 8, bias=False), 0)
    whole = model.weight.detach().clone()
    fully_shard(model)
    own, group, world_size = (
        model.weight.to_local().detach(),
        model.weight.device_mesh.get_group(),
        dist.get_world_size(),
    )
    rows = [torch.zeros_like(own) for _ in range(world_size)]
    auto_quantize(dist.all_gather, DQuantType[kind])(rows, own, group=group)
    rounded = whole.to(torch.float16 if kind == "FP16" else torch.bfloat16).float()
    assert torch.equal(torch.cat(rows), rounded) and not torch.equal(rounded, whole)

    part = len(own) // world_size
    rows = [torch.zeros_like(own[:part]) for _ in range(world_size)]
    auto_quantize(dist.all_to_all, DQuantType[kind])(rows, list(own.split(part)), group=group)
    mine = rounded.view(world_size, world_size, part, 8)[:, dist.get_rank()]
    assert torch.equal(torch.cat(rows), mine.reshape(-1, 8))

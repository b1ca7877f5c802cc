"""A plan knows the peak of a step with activations: that of the annotated model, rehearsed."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from composable import ConfigError, CPUOffloadPolicy, HandleOptions, MixedPrecisionPolicy, fully_shard, plan
from composable.rehearsal import Rehearsal, rehearse
from composable.rehearsal.rehearsed_function import with_values
from tests.models import BLOCK_CLASSES, loss_of, make_model

OPTIONS: dict[str, dict[str, Any]] = {
    "blocks": {"policy": set(BLOCK_CLASSES)},
    "one handle, kept": {"reshard_after_forward": False},
    "secondary shards": {"policy": set(BLOCK_CLASSES), "reshard_after_forward": 2},
    "low precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
    "a function of the module": {"policy": lambda module: type(module) in BLOCK_CLASSES},
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


def step(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    args, kwargs = make_model("gpt").example_inputs(0)
    for _ in range(2):
        loss_of(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()


def planned(model: nn.Module, ranks: int = 4, **options: Any) -> Rehearsal:
    found = plan(model, world_size=ranks, step=step, **options).step
    assert isinstance(found, Rehearsal)
    return found


@pytest.mark.parametrize("name", OPTIONS)
def test_the_peak_is_that_of_the_annotated_model(name: str) -> None:
    def annotated() -> None:
        model = make_model("gpt")
        fully_shard(model, **OPTIONS[name])
        step(model)

    found = planned(make_model("gpt"), **OPTIONS[name])
    assert (found.peak_bytes, found.peak_at, found.parts) == (lambda one: (one.peak_bytes, one.peak_at, one.parts))(
        rehearse(4, annotated)
    )


def test_a_model_on_meta_and_tied_parameters_are_copied_as_they_are() -> None:
    with torch.device("meta"):
        model = make_model("gpt_tied")
    before = {name: id(one) for name, one in model.named_parameters()}
    found = planned(model)
    assert found == planned(make_model("gpt_tied"))
    assert {name: id(one) for name, one in model.named_parameters()} == before
    assert all(one.is_meta and one.grad is None for one in model.parameters())


def test_copies_of_shards_and_ignored_modules_are_those_of_the_plan() -> None:
    model = make_model("gpt")
    ignored = [next(one for one in model.modules() if isinstance(one, nn.Embedding))]

    def annotated() -> None:
        with with_values():
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
        fresh = make_model("gpt")
        kept = [next(one for one in fresh.modules() if isinstance(one, nn.Embedding))]
        options = HandleOptions(align="row")
        fully_shard(fresh, mesh=mesh, strategy="HYBRID_SHARD", ignored_modules=kept, options=options)
        step(fresh)

    found = planned(model, replicas=2, strategy="HYBRID_SHARD", ignored_modules=ignored, align="row", ranks_per_host=4)
    assert (found.world_size, found.peak_bytes) == (8, rehearse(8, annotated).peak_bytes)


def test_print_and_picture_show_it() -> None:
    made = plan(make_model("gpt"), world_size=4, step=step)
    assert isinstance(made.step, Rehearsal)
    assert f"  a step with activations: {made.step}" in str(made).splitlines()
    assert "With activations: rank 0 of 4: peak" in made.draw(ranks_per_host=2)
    plain = plan(make_model("gpt"), world_size=4)
    assert made == plain and made.digest() == plain.digest() and plain.step is None
    assert "activations" not in str(plain) and "Not counted: activations" in plain.draw()


def test_what_cannot_be_copied_is_refused() -> None:
    model: Any = make_model("gpt")
    with pytest.raises(ConfigError, match="step is 3"):
        plan(model, world_size=2, step=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="step needs one module without annotations"):
        plan([nn.Linear(2, 2), nn.Linear(2, 2)], world_size=2, step=step)

    class Marked(torch.Tensor):
        pass

    model = nn.Linear(2, 2)
    model.register_buffer("mark", torch.zeros(2).as_subclass(Marked))
    with pytest.raises(ConfigError, match="plain tensors only, and one is a Marked"):
        plan(model, world_size=2, step=step)
    with pytest.raises(ConfigError, match="a fake tensor has no values"):
        plan(nn.Linear(2, 2), world_size=2, step=lambda one: one(torch.ones(1, 2)).sum().item())

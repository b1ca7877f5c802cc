"""The methods that a replicated module gains, and that its class comes back."""

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from composable import ConfigError, ReplicateModule, UsageError, fully_shard, replicate, unannotate
from tests.models import make_model
from tests.parity import gradients_of
from tests.programs import loss_at
from tests.world import on_ranks


def plain_gradients(steps: list[int], *, rank: int | None = None) -> dict[str, torch.Tensor]:
    """Return the mean gradients of a plain model over all ranks, or those of one."""
    ranks = range(dist.get_world_size()) if rank is None else [rank]
    model = make_model("mlp")
    for step, one in itertools.product(steps, ranks):
        (loss_at(model, step, one) / len(ranks)).backward()
    return gradients_of(model)


WAYS = ["set_requires_gradient_sync", "set_requires_all_reduce", "set_is_last_backward", "no_sync"]


@on_ranks(2, way=WAYS)
def test_gradients_add_up_on_their_rank_until_they_are_averaged(way: str) -> None:
    model: Any = make_model("mlp")
    replicate(model.blocks[1])
    replicate(model)
    rank = dist.get_rank()
    for _ in range(2):
        model.zero_grad()
        if way == "no_sync":
            with model.no_sync():
                loss_at(model, 0, rank).backward()
        else:
            getattr(model, way)(False)
            loss_at(model, 0, rank).backward()
            getattr(model, way)(True)
        torch.testing.assert_close(gradients_of(model), plain_gradients([0], rank=rank))
        loss_at(model, 1, rank).backward()
        torch.testing.assert_close(gradients_of(model), plain_gradients([0, 1]))


@on_ranks(2)
def test_without_recursion_a_replicated_module_below_goes_on_averaging() -> None:
    model: Any = make_model("mlp")
    replicate(model.blocks[1])
    replicate(model)
    rank = dist.get_rank()
    model.set_requires_gradient_sync(False, recurse=False)
    loss_at(model, 0, rank).backward()
    average, local = plain_gradients([0]), plain_gradients([0], rank=rank)
    wanted = {fqn: (average if "blocks.1." in fqn else local)[fqn] for fqn in local}
    torch.testing.assert_close(gradients_of(model), wanted)


@on_ranks(2)
def test_a_communication_hook_is_registered_on_the_module_itself() -> None:
    model: Any = replicate(make_model("mlp"))
    handle = model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    loss_at(model, 0, dist.get_rank()).backward()
    torch.testing.assert_close(gradients_of(model), plain_gradients([0]), rtol=2e-3, atol=2e-3)
    handle.remove()
    model.zero_grad()
    loss_at(model, 0, dist.get_rank()).backward()
    torch.testing.assert_close(gradients_of(model), plain_gradients([0]))


@on_ranks(2)
def test_the_class_is_swapped_and_comes_back() -> None:
    plain = make_model("mlp")
    cls, names = type(plain), list(plain.state_dict())
    model = replicate(plain)
    assert model is plain and isinstance(model, ReplicateModule) and isinstance(model, cls)
    assert list(model.state_dict()) == names and not isinstance(model.out, ReplicateModule)
    twin = copy.deepcopy(model)
    assert type(twin) is type(model) and replicate.state(twin) is not replicate.state(model)
    loss_at(twin, 0, dist.get_rank()).backward()
    torch.testing.assert_close(gradients_of(twin), plain_gradients([0]))
    assert gradients_of(model) == {}
    assert type(unannotate(model)) is cls and type(unannotate(twin)) is cls
    replicate(model)
    loss_at(model, 0, dist.get_rank()).backward()
    torch.testing.assert_close(gradients_of(model), plain_gradients([0]))
    for loaded in (unannotate(model), pickle.loads(pickle.dumps(model))):
        assert type(loaded) is cls


@on_ranks(1)
def test_containers_and_copies_keep_to_the_classes_of_their_parts() -> None:
    chain = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    replicate(chain)
    assert type(chain[:2]) is nn.Sequential
    parts = [nn.Linear(2, 2), nn.Linear(2, 2)]
    replicate(parts)
    assert all(isinstance(part, ReplicateModule) for part in parts)
    outer = nn.Sequential(replicate(nn.Linear(2, 2)), nn.Linear(2, 2))
    fully_shard(outer)
    twin = copy.deepcopy(outer)
    assert isinstance(twin[0], ReplicateModule) and not isinstance(twin, ReplicateModule)


class CopiesItself(nn.Linear):
    """Has a way of its own to be copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "CopiesItself":
        return CopiesItself(self.in_features, self.out_features)


@on_ranks(1)
def test_a_class_that_copies_itself_gives_what_it_gives_without_the_annotation() -> None:
    twin = copy.deepcopy(replicate(CopiesItself(2, 3)))
    assert type(twin) is CopiesItself and replicate.state(twin) is None


@on_ranks(1)
def test_wrong_arguments_of_methods_are_errors() -> None:
    model: Any = replicate(nn.Linear(2, 2))
    texts = []
    for call in (
        lambda: model.set_requires_gradient_sync(1),
        lambda: model.set_requires_gradient_sync(True, recurse=None),
        lambda: model.set_requires_all_reduce("no"),
        lambda: model.set_is_last_backward(None),
        lambda: setattr(model, "require_backward_grad_sync", 0),
        lambda: model.register_comm_hook(None, 3),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        texts.append(str(caught.value).splitlines()[0])
    method = model.set_is_last_backward
    unannotate(model)
    with pytest.raises(UsageError) as late:
        method(True)
    assert [*texts, str(late.value).splitlines()[0]] == [
        "requires_gradient_sync is 1, not a bool",
        "recurse is None, not a bool",
        "requires_all_reduce is 'no', not a bool",
        "is_last_backward is None, not a bool",
        "requires_gradient_sync is 0, not a bool",
        "hook is 3",
        "the module is no longer annotated",
    ]

"""Each file of ``composable/features`` can be taken away: what does not ask for it trains as before."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import composable.features
from composable import fully_shard, replicate, unannotate
from tests.models import BLOCK_CLASSES, loss_of, make_model
from tests.parity import LR, assert_equal_params, inputs_of, train_reference
from tests.world import run_threads

FOLDER = Path(composable.__file__).parent / "features"
FEATURES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


class Nothing:
    """Stands in for whatever a feature shows: it takes everything and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> "Nothing":
        return self

    def __getattr__(self, name: str) -> "Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __bool__(self) -> bool:
        return False


def take_away(feature: ModuleType, monkeypatch: pytest.MonkeyPatch) -> int:
    """Put ``Nothing`` in the place of what a file shows, wherever that was imported; return at how many places."""
    # A folder's face imports what others take.
    face = vars(composable.features).values()
    shown = [value for value in face if getattr(value, "__module__", "") == feature.__name__]
    places = 0
    for name, module in list(sys.modules.items()):
        if name.startswith("composable"):
            for key, value in list(vars(module).items()):
                if any(value is one for one in shown):
                    monkeypatch.setattr(module, key, Nothing)
                    places += 1
    return places


def train(steps: int, *, api: str) -> dict[str, torch.Tensor]:
    model: nn.Module = make_model("mlp")
    if api == "replicate":
        replicate(model)
    else:
        fully_shard(model, policy=BLOCK_CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        args, kwargs = inputs_of(model, step, dist.get_rank())
        loss_of(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()
    if api == "replicate":
        unannotate(model)
        return {name: param.detach().clone() for name, param in model.named_parameters()}
    return {name: param.full_tensor().detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_that_nobody_asks_for_can_be_taken_away(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train_reference("mlp", 2)
    assert take_away(sys.modules[f"composable.features.{feature}"], monkeypatch) > 0
    for api in ("fully_shard", "replicate"):
        for found in run_threads(train, 2, 3, api=api):
            assert_equal_params(found, expected.params, tolerance=1e-6, where=f"{api} without {feature}")

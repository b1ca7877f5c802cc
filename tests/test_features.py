"""Each file of ``composable/features`` can be taken away: what does not ask for it trains as before."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

import composable.features
from composable import fully_shard, replicate
from tests.models import BLOCK_CLASSES
from tests.programs import compare
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


def shard(model: nn.Module) -> None:
    fully_shard(model, policy=BLOCK_CLASSES)


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_that_nobody_asks_for_can_be_taken_away(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert take_away(sys.modules[f"composable.features.{feature}"], monkeypatch) > 0
    for annotate in (shard, replicate):
        run_threads(compare, 2, "mlp", annotate)

"""Events of a step: the same for both annotations, and only those that a listener overrides."""

from typing import Any

import pytest
import torch
from torch import nn

from composable import fully_shard, no_sync, replicate
from composable.annotation import states_of
from composable.engine import StepListener, Work
from composable.engine.events import METHODS, Listeners
from tests.world import run_threads

EVENTS = [name for name in METHODS if name not in {"work", "has_idle_ranks", "holds_annotations"}]


def recorder(names: list[str]) -> tuple[StepListener, list[str]]:
    """Return a listener that overrides these events, and the list to which it adds the name of each."""
    heard: list[str] = []

    def note(name: str) -> Any:
        return lambda self, *args, **kwargs: heard.append(name)

    return type("Recorder", (StepListener,), {name: note(name) for name in names})(), heard


def events_of_two_steps(annotate: Any, names: list[str]) -> list[str]:
    model = annotate(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    (state,) = states_of([model])
    listener, heard = recorder(names)
    state.listeners.add(listener)  # A sharded model has no root yet.
    with no_sync(model):
        model(torch.ones(2, 3)).sum().backward()
    heard.append("--")
    model(torch.ones(2, 3)).sum().backward()
    state.listeners.remove(listener)
    model(torch.ones(2, 3)).sum().backward()
    return heard


@pytest.mark.parametrize("annotate", [fully_shard, replicate])
def test_both_annotations_send_the_events_of_a_step(annotate: Any) -> None:
    for heard in run_threads(events_of_two_steps, 2, annotate, EVENTS):
        own = {"forward_ended", "gather_begins", "handle_completed"} if annotate is fully_shard else set()
        first, second = " ".join(one for one in heard if one not in own).split(" -- ")
        begin, rest = "forward_begins backward_begins backward_reached", "gradients_come"
        # A sharded step ends with a message to the other ranks, also where nothing is reduced.
        kept = f"{begin} backward_ends {rest}" if annotate is fully_shard else f"{begin} backward_ends"
        assert (first, second) == (kept, f"{begin} reduction_begins backward_ends {rest}")
        assert own <= {*heard}


@pytest.mark.parametrize("annotate", [fully_shard, replicate])
def test_only_methods_that_a_listener_overrides_are_called(annotate: Any) -> None:
    for heard in run_threads(events_of_two_steps, 2, annotate, ["backward_begins"]):
        assert heard == ["backward_begins", "--", "backward_begins"]
    listeners = Listeners()
    listeners.add(StepListener())
    assert not any(getattr(listeners, name) for name in METHODS)
    assert listeners.during(Work.GATHER, None, "", sum, [1, 2]) == 3

"""Ranks and messages that are late, messages that are lost and calls that raise, on request."""

import pytest

from composable import ConfigError, DesyncError, UsageError
from composable.testing import Delay, Drop, Fault, Raise, simulate
from tests.testing.programs import all_reduces


def test_a_dropped_message_is_a_desync_of_the_others() -> None:
    with pytest.raises(DesyncError, match=r"rank 1 waits for .*collective 2 of .*a fault dropped its message"):
        simulate(3, all_reduces, faults=[Fault(rank=1, op="all_reduce", nth=2, action=Drop())])


def test_a_fault_that_raises_does_so_in_its_call() -> None:
    error = OSError("unplugged")
    with pytest.raises(OSError, match="unplugged") as caught:
        simulate(3, all_reduces, faults=[Fault(rank=1, op="any", nth=3, action=Raise(error))])
    assert caught.value is error


@pytest.mark.parametrize("delay", [1, 50])
def test_a_delayed_message_arrives_all_the_same(delay: int) -> None:
    faults = [Fault(rank=rank, op="all_reduce", nth=2, action=Delay(delay)) for rank in range(2)]
    assert simulate(3, all_reduces, faults=faults) == [[3.0] * 3] * 3


@pytest.mark.parametrize(
    "fault",
    [
        Fault(rank=2, op="all_reduce", action=Drop()),
        Fault(rank=0, op="gossip", action=Drop()),
        Fault(rank=0, op="any", nth=0, action=Drop()),
        Fault(rank=0, op="any", action="drop"),  # type: ignore[arg-type]
    ],
)
def test_a_fault_that_can_meet_no_call_is_refused(fault: Fault) -> None:
    with pytest.raises(ConfigError):
        simulate(2, all_reduces, faults=[fault])


def test_a_fault_that_met_no_call_is_an_error() -> None:
    with pytest.raises(UsageError, match="faults met no call"):
        simulate(2, all_reduces, faults=[Fault(rank=0, op="all_reduce", nth=4, action=Drop())])

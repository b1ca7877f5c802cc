"""Tests of training code on many ranks in one process.

The package needs torch only, and changes torch only while ``simulate`` runs.
"""

from composable.testing.device_streams import resizes_seen as resizes_seen
from composable.testing.parity import Difference, check_parity
from composable.testing.process_group import Delay, Drop, Fault, Raise
from composable.testing.simulation import simulate

__all__ = ["Delay", "Difference", "Drop", "Fault", "Raise", "check_parity", "simulate"]


def __getattr__(name: str) -> object:
    """Say where a name of rehearsals is, as they have a room of their own."""
    moved = "; import it from composable.rehearsal" if name in ("Rehearsal", "rehearse") else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{moved}")

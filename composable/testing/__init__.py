"""Tests of training code on many ranks in one process.

The package needs torch only, and changes torch only while ``simulate`` or ``rehearse`` runs.
"""

from composable.testing.ledger import LedgerLine as LedgerLine
from composable.testing.ledger import hang_between as hang_between
from composable.testing.parity import Difference, check_parity
from composable.testing.process_group import Delay, Drop, Fault, Raise
from composable.testing.rehearsal import Rehearsal, rehearse
from composable.testing.rehearsed_script import DEVICES as DEVICES
from composable.testing.rehearsed_script import RankOutcome as RankOutcome
from composable.testing.rehearsed_script import ScriptRun as ScriptRun
from composable.testing.rehearsed_script import rehearse_script as rehearse_script
from composable.testing.simulation import simulate

__all__ = ["Delay", "Difference", "Drop", "Fault", "Raise", "Rehearsal", "check_parity", "rehearse", "simulate"]

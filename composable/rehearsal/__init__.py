"""Rehearsals: a function or a script runs as ranks that are not there, and tells memory, traffic and hangs.

The package needs torch only, and changes torch only while a rehearsal runs.
"""

from composable.rehearsal.frontier import Tried as Tried
from composable.rehearsal.frontier import find_frontier as find_frontier
from composable.rehearsal.frontier import frontier_lines as frontier_lines
from composable.rehearsal.ledger import LedgerLine as LedgerLine
from composable.rehearsal.ledger import hang_between as hang_between
from composable.rehearsal.planned_step import rehearse_planned as rehearse_planned
from composable.rehearsal.rehearsed_function import Rehearsal, rehearse
from composable.rehearsal.rehearsed_script import DEVICES as DEVICES
from composable.rehearsal.rehearsed_script import RankOutcome as RankOutcome
from composable.rehearsal.rehearsed_script import ScriptRun as ScriptRun
from composable.rehearsal.rehearsed_script import rehearse_script as rehearse_script

__all__ = ["Rehearsal", "rehearse"]

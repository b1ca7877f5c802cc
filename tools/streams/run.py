"""Runs programs on the device that executes late, each in many orders, and compares with the CPU.

python -m tools.streams.run --seeds 0-50
python -m tools.streams.run --seeds 7 --only "two branches"
"""

import argparse
import time
from collections.abc import Sequence

from tests.parity import assert_equal_params
from tools.fuzz.run import numbers
from tools.streams.late import LateDevice
from tools.streams.late_cases import PROGRAMS, run_late, run_on_cpu


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return 1 if a number was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=numbers, default=range(20), help="such as 0-50, or 7 (default: 0-20)")
    parser.add_argument("--only", action="append", choices=list(PROGRAMS), help="one program; may be repeated")
    options = parser.parse_args(arguments)
    has_failed = False
    for name in options.only or PROGRAMS:
        started, wrong = time.monotonic(), []
        expected = run_on_cpu(PROGRAMS[name])
        for seed in options.seeds:
            try:
                for rank, found in enumerate(run_late(PROGRAMS[name], LateDevice(seed, falls_after=5))):
                    assert_equal_params(found, expected[rank], tolerance=1e-6, where=f"seed {seed}, rank {rank}")
            except AssertionError as error:
                wrong.append(seed)
                print(f"{name}: {error}", flush=True)
        has_failed |= bool(wrong)
        print(f"{name}: {len(wrong)} wrong of {len(options.seeds)}, {time.monotonic() - started:.0f} s", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    raise SystemExit(main())

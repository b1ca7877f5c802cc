"""Interrupts every program at all its points: ``python -m tests.runtime.interrupts_report [most per program [part of their names]]``."""

import faulthandler
import sys
import time
import warnings

import torch

from tests.runtime.interrupt_programs import PROGRAMS
from tests.runtime.interrupts import points_of, sample, try_points


def main() -> None:
    """Print how many lines and points there are, and each after which the next step is wrong."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    total = wrong = 0
    name = sys.argv[2] if len(sys.argv) > 2 else ""
    for program in [one for one in PROGRAMS if name in one.name]:
        points = points_of(program)
        lines = {(point.file, point.line) for point in points}
        if len(sys.argv) > 1:
            points = sample(points, int(sys.argv[1]), 0)
        for error in (KeyboardInterrupt, RuntimeError):
            start = time.monotonic()
            tried = try_points(program, points, error=error)
            total, wrong = total + tried.tried, wrong + len(tried.wrong)
            print(
                f"{program.name}, {error.__name__}: {len(lines)} lines, {tried.tried} points, "
                f"{len(tried.missed)} not come to, {len(tried.wrong)} wrong; {time.monotonic() - start:.0f} s",
                flush=True,
            )
            for point, what in tried.wrong.items():
                print(f"    {point}: {what}")
    print(f"{total} points, {wrong} wrong")


if __name__ == "__main__":
    main()

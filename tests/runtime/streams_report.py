"""Prints what the recording device checks and finds: ``python -m tests.runtime.streams_report``."""

import torch.distributed as dist

from tests.runtime.bench import run_case
from tests.runtime.recording import Recorder
from tests.runtime.stream_cases import CASES
from tests.runtime.stream_mutations import HARMLESS, MUTATIONS, find

WORLD_SIZE = 2


def main() -> None:
    """Run every case, then every mutation."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    operations = events = frees = violations = 0
    for case in CASES:
        recorder = Recorder()
        run_case(case, recorder)
        operations += recorder.operations
        events += recorder.events
        frees += recorder.frees
        violations += len(recorder.violations)
    found = 0
    for mutation in MUTATIONS:
        texts = [str(violation) for violation in find(mutation).violations]
        first = next((text for text in texts if mutation.finds in text), None)
        found += first is not None
        print(f"{mutation.name}\n    {first or 'NOT FOUND'}")
    clean = sum(not find(mutation).violations for mutation in HARMLESS)
    print(f"\n{len(CASES)} cases, {operations} operations, {events} events, {frees} frees: {violations} violations")
    print(f"{len(MUTATIONS)} rules broken, {found} found; {len(HARMLESS)} harmless changes, {clean} clean")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

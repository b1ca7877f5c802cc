"""Processes that a rank forks: what they train is refused, and memory that they share is seen."""

from pathlib import Path

from tests.forked import Forked, run_module


def test_a_fork_that_trains_is_refused_and_its_parent_goes_on(tmp_path: Path) -> None:
    texts = [tmp_path / f"{rank}.txt" for rank in range(2)]
    ranks = []
    for rank, text in enumerate(texts):
        with text.open("w") as out:
            ranks.append(Forked(run_module("tests.runtime.forks"), rank, tmp_path / "store", stdout=out, stderr=out))
    try:
        codes = [one.wait(timeout=60) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert codes == [0, 0], [text.read_text()[-2000:] for text in texts]
    for text, process in zip(texts, ranks, strict=True):
        lines = text.read_text().splitlines()
        refusal = f"a fork of process {process.pid} would send messages on the connections of its parent"
        assert [line for line in lines if line.startswith("the parent")] == [
            f"the parent goes on {name} {steps}" for name in ("shard", "replicate", "mix") for steps in (0, 2)
        ]
        assert lines.count(refusal) == 6
        assert "trained" not in lines

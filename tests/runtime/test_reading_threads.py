"""Threads that read a sharded model while another one trains it, as monitors, quorums and averages of weights do.

In a process of its own: what such a thread reads may be freed memory. The right values are those before or after a
step, which a model whose gradients are known has: a reader may see no other one, and no unsharded parameter.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("world_size", [1, 2])
def test_threads_that_read_a_model_in_training_see_its_shards(world_size: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.runtime.reading_threads"]
    texts = [tmp_path / f"{rank}.txt" for rank in range(world_size)]
    ranks = []
    for rank, text in enumerate(texts):
        arguments = [str(rank), str(world_size), str(tmp_path / "store")]
        with text.open("w") as out:
            ranks.append(subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=out, stderr=out))
    try:
        codes = [one.wait(timeout=60) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert codes == [0] * world_size, [text.read_text()[-2000:] for text in texts]

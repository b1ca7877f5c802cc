"""Threads that read a sharded model while another one trains it, as monitors, quorums and averages of weights do.

In a process of its own: what such a thread reads may be freed memory. The right values are those before or after a
step, which a model whose gradients are known has: a reader may see no other one, and no unsharded parameter.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import MixedPrecisionPolicy, UsageError, fully_shard, replicate, unshard_params
from composable.dtensor import RaggedDTensor
from tests.forked import Forked, run_module
from tests.world import on_ranks, run_ranks


@pytest.mark.parametrize("world_size", [1, 2])
def test_threads_that_read_a_model_in_training_see_its_shards(world_size: int, tmp_path: Path) -> None:
    program = run_module("tests.runtime.reading_threads")
    texts = [tmp_path / f"{rank}.txt" for rank in range(world_size)]
    ranks = []
    for rank, text in enumerate(texts):
        with text.open("w") as out:
            ranks.append(Forked(program, rank, world_size, tmp_path / "store", stdout=out, stderr=out))
    try:
        codes = [one.wait(timeout=300) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
    assert codes == [0] * world_size, [text.read_text()[-2000:] for text in texts]


class Watched(nn.Linear):
    """Lets another thread read the model in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.seen: list[object] = []
        self.look: Callable[[], object] = int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=lambda: self.seen.append(self.look()))
        thread.start()
        thread.join()
        return super().forward(x)


@on_ranks(1, run=run_ranks)
def test_a_thread_that_reads_copies_in_low_precision_is_refused() -> None:
    """The step goes on in the dtype of the policy; the right loss is that of a step beside which nobody reads."""
    torch.manual_seed(0)
    watched = Watched()
    model = replicate(nn.Sequential(watched), mp_policy=MixedPrecisionPolicy(torch.bfloat16))

    def look() -> str:
        try:
            return str(model.state_dict())
        except UsageError as error:
            return str(error)

    alone = model(torch.ones(2, 4))
    watched.look = look
    assert torch.equal(model(torch.ones(2, 4)), alone)
    assert "while another thread runs the module" in str(watched.seen[-1])
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}


@pytest.mark.parametrize("options", [{}, {"rank0_only": True}, {"offload_to_cpu": True}], ids=str)
@on_ranks(2, run=run_ranks)
def test_the_thread_that_unshards_sees_whole_parameters_wherever_steps_run(options: dict[str, bool]) -> None:
    """What it writes stays. Other threads that read see shards, if these are the parameters' own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, policy={nn.Linear})

    def train() -> None:
        model(torch.ones(2, 4)).sum().backward()

    def kinds() -> list[bool]:
        tensors = [*model.parameters(), *model.state_dict(keep_vars=True).values()]
        return [isinstance(one, RaggedDTensor) for one in tensors]

    trainer, reader = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    trainer.submit(train).result()
    before = [param.full_tensor() for param in model.parameters()]  # type: ignore[attr-defined]
    is_shown = dist.get_rank() == 0 or "rank0_only" not in options
    with unshard_params(model, **options), torch.no_grad():
        assert kinds() == [not is_shown] * 8
        assert options or reader.submit(kinds).result() == [True] * 8
        for param in model.parameters() if is_shown else ():
            param.mul_(2)
    assert kinds() == [True] * 8
    for param, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.full_tensor(), 2 * old)  # type: ignore[attr-defined]
    trainer.submit(train).result()

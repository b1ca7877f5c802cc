"""What importing the package changes in torch: once, for whoever imported what before, and nothing besides."""

import subprocess
import sys
import textwrap
from pathlib import Path

import torch
from torch.distributed import tensor as dtensor
from torch.optim import optimizer as torch_optimizer

from composable import RaggedDTensor, install

ROOT = Path(__file__).parent.parent

# A process that imports torch, and names of it, before the package. Prints the checks that hold.
PROGRAM = """
    import inspect
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor import distribute_tensor as cut
    import torch.distributed.tensor as tensor_module

    def describe(function):
        return id(function), str(inspect.signature(function)), function.__doc__

    def train():
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in model.parameters()]

    held, known, trained = [tensor_module.distribute_tensor], describe(distribute_tensor), train()

    import composable

    if all(map(torch.equal, trained, train())):
        print("plain optimizers")
    if describe(tensor_module.distribute_tensor) == known:
        print("identity")

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weight = composable.fully_shard(nn.Linear(3, 2)).weight
    full = torch.arange(6.0).view(2, 3)
    for function in (distribute_tensor, cut, *held):
        found = function(full, weight.device_mesh, weight.placements)
        assert type(found) is composable.RaggedDTensor and torch.equal(found.full_tensor(), full)
        assert function(found, weight.device_mesh, weight.placements) is found
        stock = function(full, weight.device_mesh, [Shard(0)])
        assert type(stock) is DTensor and torch.equal(stock.full_tensor(), full)
        assert type(stock.redistribute(placements=weight.placements)) is composable.RaggedDTensor
        try:
            function(full, weight.device_mesh, weight.placements, no_such_option=1)
        except TypeError as error:
            assert "no_such_option" in str(error)
    print("names imported before")
    dist.destroy_process_group()
"""


def test_a_process_that_has_imported_torch_before_sees_what_is_needed_and_no_more() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(PROGRAM)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["plain optimizers", "identity", "names imported before"]


def test_the_import_waits_with_the_files_of_torch_that_take_as_long_as_itself() -> None:
    # What torch imports by itself for DTensors does not count, as the first optimizer imports it anyway.
    program = """
        import sys, torch, torch.distributed, torch.distributed.tensor
        before = {*sys.modules}
        import composable
        new = {*sys.modules} - before
        print(*sorted(name for name in new if name.startswith("torch.distributed.checkpoint")))
        print(len([name for name in new if not name.startswith("composable")]))
        assert composable.save_checkpoint.__module__ == "composable.runs.checkpoint"
        assert not hasattr(composable, "no_such_name") and "save_checkpoint" in dir(composable)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    checkpoints, number = done.stdout.splitlines()
    assert not checkpoints and int(number) <= 20, done.stdout


def test_nothing_needs_numpy() -> None:
    program = """
        import sys
        sys.modules["numpy"] = None  # as if it were not installed
        import tempfile
        import torch
        from torch import nn
        import composable
        from composable.testing import simulate

        try:
            torch.ones(1).numpy()
        except RuntimeError as error:
            print(error)

        def train(rank, run):
            torch.manual_seed(rank)
            model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 2))
            composable.replicate(model[0])
            composable.fully_shard(model, policy={nn.Linear})
            optimizer = torch.optim.AdamW(model.parameters())
            with composable.timeline(model):
                model(torch.randint(16, (2, 5))).sum().backward()
            composable.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            composable.save_checkpoint(run, 1, model, optimizer, extra={"rank": rank})
            composable.load_checkpoint(run, model, optimizer)
            composable.load_full_state_dict(model, composable.full_state_dict(model))
            composable.save_safetensors(model, f"{run}/weights")

        with tempfile.TemporaryDirectory() as run:
            simulate(2, train, run)
        print("done")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Numpy is not available", "done"]


def test_installing_again_changes_nothing() -> None:
    def state() -> list[object]:
        return [
            dtensor.distribute_tensor.__code__,
            dtensor.DTensor.redistribute,
            torch.nn.Module._apply,
            len(torch_optimizer._global_optimizer_pre_hooks),
            len(torch.serialization.get_safe_globals()),
            torch_optimizer._foreach_supported_types.count(RaggedDTensor),
        ]

    before = state()
    install()
    install()
    assert state() == before
    assert before[-1] == 1

"""Makes the mistakes that ``docs/troubleshooting.md`` and ``docs/replicate.md`` describe, and returns what is said.

Every function runs on two ranks, which both get an error, and leaves them able to go on.
"""

import inspect
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from composable import (
    MixedPrecisionPolicy,
    ReplicateOptions,
    fully_shard,
    load_checkpoint,
    register_comm_hook,
    replicate,
    save_checkpoint,
    set_divergence_timeout,
)

__all__ = ["FOLDER", "messages"]

# What the pages call them.
FOLDER = "runs/a"
SCRIPT = "train.py:20"


def make_model(outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, outputs))


def inputs() -> torch.Tensor:
    return torch.ones(2, 4)


class Two(nn.Module):
    """Two layers, of which ``run`` says who uses what."""

    def __init__(self, run: Callable[["Two", torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def skip_a_module_on_one_rank(_: str) -> None:
    def run(model: Two, x: torch.Tensor) -> torch.Tensor:
        x = model.a(x)
        return model.b(x) if dist.get_rank() == 0 else x

    model = Two(run)
    fully_shard(model, policy={nn.Linear})
    set_divergence_timeout(0.5)
    try:
        model(inputs()).sum().backward()
    finally:
        set_divergence_timeout(30)


def build_the_optimizer_too_early(_: str) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)(inputs()).sum().backward()
    optimizer.step()


def share_a_parameter_between_two_calls(_: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    fully_shard(model[0])
    fully_shard(model[1])


def share_a_parameter_between_two_replicates(_: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    replicate(model[0])
    replicate(model[1])


def forget_an_import_for_the_blocks(_: str) -> None:
    model = make_model()
    torch_fully_shard(model[0])
    fully_shard(model)


def forget_an_import_for_the_root(_: str) -> None:
    model = make_model()
    fully_shard(model[0])
    torch_fully_shard(model)


def tie_late(_: str) -> None:
    model = fully_shard(make_model(outputs=4), policy={nn.Linear})
    model[1].weight = model[0].weight
    model(inputs())


def replace_late(_: str) -> None:
    model = fully_shard(make_model())
    model[0].weight = nn.Parameter(torch.eye(4))
    model(inputs())


def write_rows_by_a_list(_: str) -> None:
    model = fully_shard(make_model())
    with torch.no_grad():
        model[0].weight[[2, 3]] = 0


def write_between_forward_and_backward(_: str) -> None:
    model = fully_shard(make_model(), policy={nn.Linear})
    loss = model(inputs()).sum()
    model.load_state_dict(make_model().state_dict())
    loss.backward()


def shard_with_gradients(_: str) -> None:
    model = make_model()
    model(inputs()).sum().backward()
    fully_shard(model)


def forget_to_materialize(_: str) -> None:
    with torch.device("meta"):
        model = make_model()
    fully_shard(model)(inputs())


def forget_to_initialise(_: str) -> None:
    with torch.device("meta"):
        model = make_model()
    fully_shard(model).to_empty(device="cpu")
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name != "0.weight":
                param.zero_()
    model(inputs())


def replicate_on_meta(_: str) -> None:
    with torch.device("meta"):
        model = make_model()
    replicate(model)


def checkpoint_with_reentrance(_: str) -> None:
    def run(model: Two, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(model.b, x, use_reentrant=True)
        return x

    model = Two(run)
    replicate(model, ignored_modules=[model.a])
    for _ in range(3):
        model(inputs().requires_grad_()).sum().backward()


def load_what_was_damaged(folder: str) -> None:
    model = fully_shard(make_model())
    path = Path(save_checkpoint(folder, 1, model).wait()) / "__0_0.distcp"
    if dist.get_rank() == 0:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    dist.barrier()
    load_checkpoint(folder, model)


def forget_to_resume(folder: str) -> None:
    model = fully_shard(make_model())
    save_checkpoint(folder, 20, model)
    save_checkpoint(folder, 1, model)


def unfreeze_late(_: str) -> None:
    model = make_model()
    model[0].weight.requires_grad_(False)
    replicate(model)
    model[0].weight.requires_grad_(True)
    model(inputs())


def replicate_sparse_gradients(_: str) -> None:
    def run(model: Two, x: torch.Tensor) -> torch.Tensor:
        return model.b(nn.functional.embedding(torch.tensor([1, 2]), model.a.weight, sparse=True)) + model.a.bias

    replicate(Two(run))(inputs()).sum().backward()


def change_a_static_graph(_: str) -> None:
    model = replicate(Two(lambda model, x: model.b(model.a(x))), static_graph=True)
    model(inputs()).sum().backward()
    model.run = lambda model, x: model.a(x)
    model(inputs()).sum().backward()


def delay_for_nothing(_: str) -> None:
    model = make_model()
    replicate(model, options=ReplicateOptions(param_to_hook_all_reduce=model[0].weight))


def write_to_a_copy_in_low_precision(_: str) -> None:
    model = replicate(nn.Embedding(8, 4, max_norm=0.1), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    model(torch.arange(8))


def register_two_hooks(_: str) -> None:
    model = replicate(make_model())
    for _ in range(2):
        register_comm_hook(model, None, default_hooks.allreduce_hook)


def _arguments(one: object) -> list[str]:
    return list(inspect.signature(one).parameters) if inspect.isfunction(one) and one.__module__ == __name__ else []


# The rest are one call each.
MISTAKES: dict[str, Callable[[str], object]] = {
    **{one.__name__: one for one in list(globals().values()) if {"_", "folder"} & {*_arguments(one)}},
    "annotate_different_plans": lambda _: fully_shard(
        make_model(), policy={nn.Linear} if dist.get_rank() == 0 else None
    )(inputs()),
    "replicate_different_models": lambda _: replicate(nn.Linear(4, 2 + dist.get_rank())),
    "pass_arguments_of_the_wrapper": lambda _: fully_shard(
        make_model(), auto_wrap_policy={nn.Linear}, limit_all_gathers=True
    ),
    "unwrap_what_is_not_wrapped": lambda _: replicate(make_model()).module.state_dict(),
    "call_forward_itself": lambda _: fully_shard(make_model()).forward(inputs()),
    "wrap_what_is_replicated": lambda _: DistributedDataParallel(replicate(make_model())),
    "replicate_what_is_wrapped": lambda _: replicate(DistributedDataParallel(make_model())),
    "add_a_module_late": lambda _: replicate(make_model(outputs=4)).append(nn.Linear(4, 4))(inputs()),
    "use_half_of_the_parameters": lambda _: replicate(Two(lambda model, x: model.a(x)))(inputs()).sum().backward(),
    "cast_shards": lambda _: fully_shard(make_model()).half(),
    "load_too_few_keys": lambda _: fully_shard(make_model()).load_state_dict({"0.weight": torch.ones(4, 4)}),
    "load_from_an_empty_folder": lambda folder: load_checkpoint(folder, fully_shard(make_model())),
    "pickle_a_sharded_module": lambda _: pickle.dumps(fully_shard(make_model())),
    "save_pieces_with_torch": lambda folder: torch.save(fully_shard(make_model()).state_dict(), f"{folder}/weights.pt"),
    "replicate_what_is_frozen": lambda _: replicate(make_model().requires_grad_(False)),
    "replicate_a_list_of_modules": lambda _: replicate(nn.ModuleList([nn.Linear(4, 4)])),
    "annotate_with_both": lambda _: replicate(fully_shard(make_model())),
}


def messages() -> dict[str, str]:
    """Make every mistake and return what each raises here, by its name."""
    found = {}
    for name, mistake in MISTAKES.items():
        box = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box)
        assert box[0] is not None
        try:
            mistake(box[0])
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace(box[0], FOLDER)
            found[name] = re.sub(r"provoked\.py:\d+", SCRIPT, text).replace(f"in {mistake.__name__}", "in train")
        else:
            found[name] = "nothing was raised"
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(box[0])
    return found

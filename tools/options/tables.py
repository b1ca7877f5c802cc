"""Every option of ``fully_shard`` and ``replicate`` that trains: its values, what each does to the one process, and more.

The tables are data for ``tools/options/runs.py``. Of a ``Value``, ``ranks`` is what ranks do, ``alone`` what the one
process does for it: nothing, for most, since where parameters rest and what travels when is no matter of numbers.
``only`` and ``without`` say what it cannot be combined with.

Fields of ``alone``: ``micros``, batches of a rank in a step; ``times`` that each one's gradient counts; ``policy``, the
casts; ``adds_averages``, of micro-batches each is averaged; ``divisor`` beside the number of ranks; ``fills_unused``
with zeros; ``clips``; ``is_written`` after the first step; ``uneven`` numbers of inputs.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint as run_with_checkpoint

from composable import (
    CPUOffloadPolicy,
    CustomPolicy,
    DefaultState,
    FSDPModule,
    LowPrecisionState,
    MixedPrecisionPolicy,
    RaggedDTensor,
    accelerate_optimizer,
    allreduce_hook,
    checkpoint,
    clip_grad_norm_,
    fp16_compress_hook,
    fully_shard,
    load_checkpoint,
    load_full_state_dict,
    no_sync,
    reduce_gradients,
    reduce_scatter_hook,
    register_comm_hook,
    replicate,
    save_checkpoint,
    step_in_backward,
    unannotate,
    unshard_params,
)
from composable.annotation import sharded_state_of
from composable.engine import RestingPlace
from tests import models
from tests.models import BLOCK_CLASSES
from tests.pairwise import Table, Value
from tests.place import here

__all__ = ["MODELS", "NO_CASTS", "REFUSED", "TABLES", "Moment", "blocks_of"]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NO_CASTS = MixedPrecisionPolicy()
TINY_CAP_MB = 300 / 2**20


# Models, beside those of tests/models.py


class TiedLayers(models.MLP):
    """An MLP of which two blocks share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight


MODELS: dict[str, Callable[[], Any]] = {**models.MODELS, "tied_layers": TiedLayers}
PLAIN_BLOCKS = "mlp tied_layers gpt gpt_tied tied_within called_twice nested_outputs unused conditional".split()
# Of blocks whose inputs have gradients, without which a reentrant checkpoint has none.
BEHIND_OTHERS = ("mlp", "gpt", "gpt_tied", "called_twice", "conditional")
SPLIT = ("mlp", "tied_layers", "unused")


def blocks_of(model: nn.Module) -> list[Any]:
    """Return the modules that a policy picks, each once, in the order of the model."""
    return [module for module in model.modules() if isinstance(module, tuple(BLOCK_CLASSES))]


# How modules are annotated


def by_policy(model: nn.Module, options: Mapping[str, Any]) -> None:
    fully_shard(model, policy=BLOCK_CLASSES if blocks_of(model) else None, **options)


def by_hand(model: nn.Module, options: Mapping[str, Any]) -> None:
    for block in blocks_of(model):
        fully_shard(block, **options)
    fully_shard(model, **options)


def every_leaf(model: nn.Module, options: Mapping[str, Any]) -> None:
    fully_shard(model, policy=CustomPolicy(_is_leaf), **options)


def _is_leaf(module: nn.Module) -> bool:
    return not list(module.children()) and bool(list(module.parameters()))


def blocks_in_one_call(model: nn.Module, options: Mapping[str, Any]) -> None:
    fully_shard(blocks_of(model), **options)
    fully_shard(model, **options)


def around_a_replica(model: nn.Module, options: Mapping[str, Any]) -> None:
    replicate(blocks_of(model)[-1], find_unused_parameters=True, mp_policy=options.get("mp_policy"))
    by_policy(model, options)


def its_parts(model: nn.Module, options: Mapping[str, Any]) -> None:
    parts = [[*child] if isinstance(child, nn.ModuleList) else [child] for child in model.children()]
    replicate([one for part in parts for one in part], **options)


def inside_out(model: nn.Module, options: Mapping[str, Any]) -> None:
    replicate(blocks_of(model)[0], **options)
    replicate(model, **options)


def around_a_shard(model: nn.Module, options: Mapping[str, Any]) -> None:
    fully_shard(blocks_of(model)[0], mp_policy=options.get("mp_policy", NO_CASTS))
    replicate(model, **options)


def inside_a_shard(model: nn.Module, options: Mapping[str, Any]) -> None:
    replicate(blocks_of(model)[0], **options)
    by_policy(model, {"mp_policy": options.get("mp_policy", NO_CASTS)})


# Meshes: of data ranks, and which of the inputs this rank has


def hybrid(copies: int, ranks: int) -> tuple[Any, int]:
    copies = copies or ranks
    mesh = init_device_mesh(here().type, (copies, ranks // copies), mesh_dim_names=("replicate", "shard"))
    return mesh, dist.get_rank()


def beside_tensor_parallelism(copies: int, ranks: int) -> tuple[Any, int]:
    sizes = (ranks // 2, 2) if not copies else (copies, ranks // 2 // copies, 2)
    names = ("dp", "tp") if not copies else ("replicate", "dp", "tp")
    mesh = init_device_mesh(here().type, sizes, mesh_dim_names=names)
    return {"data": mesh[names[:-1]] if copies else mesh["dp"], "tp": mesh["tp"]}, dist.get_rank() // 2


def along_a_dim(ranks: int) -> tuple[Any, int]:
    mesh = init_device_mesh(here().type, (ranks, 1), mesh_dim_names=("outer", "inner"))
    return mesh["outer"], dist.get_rank()


def split_blocks(model: nn.Module, meshes: Any) -> None:
    for block in blocks_of(model):
        parallelize_module(block, meshes["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if isinstance(model, TiedLayers):
        model.blocks[2].up.weight = model.blocks[0].up.weight


# Backwards of a step: of one model, with functions that run its forward and return the loss


Runs = Sequence[Callable[[], torch.Tensor]]


def one_by_one(model: Any, runs: Runs) -> list[torch.Tensor]:
    losses = []
    for run in runs:
        losses.append(run())
        losses[-1].backward()
    return losses


def without_sync(model: Any, runs: Runs) -> list[torch.Tensor]:
    with no_sync(model):
        losses = one_by_one(model, runs[:-1])
    return [*losses, *one_by_one(model, runs[-1:])]


def switched(setter: str, model: Any, runs: Runs) -> list[torch.Tensor]:
    """Let a setter, or the attribute of torch's wrapper, say which of the backwards is the last one."""
    losses = []
    for number, run in enumerate(runs):
        is_last = number == len(runs) - 1
        getattr(model, setter)(is_last) if setter.startswith("set_") else setattr(model, setter, is_last)
        losses += one_by_one(model, [run])
    return losses


def reduced_at_last(model: Any, runs: Runs) -> list[torch.Tensor]:
    with no_sync(model):
        losses = one_by_one(model, runs)
    reduce_gradients(model)
    return losses


def forwards_first(model: Any, runs: Runs) -> list[torch.Tensor]:
    losses = [run() for run in runs]
    for loss in losses:
        loss.backward()
    return losses


def one_backward(model: Any, runs: Runs) -> list[torch.Tensor]:
    losses = [run() for run in runs]
    torch.stack(losses).sum().backward()
    return losses


def each_twice(model: Any, runs: Runs) -> list[torch.Tensor]:
    losses = [run() for run in runs]
    for loss in losses:
        loss.backward(retain_graph=True)
        loss.backward()
    return losses


def finalized_by_hand(model: Any, runs: Runs) -> list[torch.Tensor]:
    model.set_manual_backward_finalization(True)
    losses = one_by_one(model, runs)
    model.finalize_backward()
    return losses


# Activation checkpoints of all blocks


def by_wrapper(kind: CheckpointImpl | None, model: nn.Module) -> None:
    wrap = offload_wrapper if kind is None else partial(checkpoint_wrapper, checkpoint_impl=kind)
    blocks = set(blocks_of(model))
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: module in blocks)


def by_ours(model: nn.Module) -> None:
    for block in blocks_of(model):
        checkpoint(block)


def in_own_forward(model: nn.Module, *, use_reentrant: bool) -> None:
    for block in blocks_of(model):
        block.forward = partial(run_with_checkpoint, block.forward, use_reentrant=use_reentrant)


# Optimizers, and who steps them


def sgd(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, **_form(params, options))


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    # A large eps: the last bits of a gradient that is zero but for rounding must not count.
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-2, weight_decay=0.1, **_form(params, options))


def _form(params: Any, options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Step one by one where plain parameters stand beside split ones: on a device torch would take all at once."""
    is_mixed = len({isinstance(param, DTensor) for param in params}) > 1
    return {"foreach": False, **options} if is_mixed and "fused" not in options else options


# Settings of a sharded model


def prefetch(model: Any) -> None:
    first, *_, last = blocks = blocks_of(model)
    first.set_modules_to_forward_prefetch([last, *blocks[1:]])  # not in the order of use
    last.set_modules_to_backward_prefetch(blocks[-2::-1])


def _home(model: Any) -> torch.device:
    """Return where the parameters of a sharded model rest."""
    return torch.device("cpu") if fully_shard.state(model).plan.offload_policy.is_offloading else here()


def halve(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0 * sharded_state_of(module).grid.divisor)


def put_elsewhere(model: nn.Module) -> None:
    """Let shards rest in host memory of their own, apart from that of the buffers, as they do beside a device."""
    home = RestingPlace(torch.device("cpu"), is_elsewhere=True)
    for module in model.modules():
        state = fully_shard.state(module)
        for flat in [flat for handle in state._handles for flat in handle.buffers] if state is not None else ():
            flat.home = flat.routes.home = home


def delayed(model: Any) -> dict[str, Any]:
    """Let two gradients wait for another one."""
    first, *_, last = blocks_of(model)
    names = {id(param): fqn for fqn, param in model.named_parameters()}
    weights = [next(last.parameters()), next(iter(model.children())).weight]
    return {
        "delay_all_reduce_named_params": [(names[id(param)], param) for param in weights],
        "param_to_hook_all_reduce": next(first.parameters()),
    }


def average_ignored(model: nn.Module) -> None:
    """Do for a parameter that is left alone what the annotation does for the others."""
    dist.all_reduce(grad := model.get_parameter("inp.weight").grad)
    grad /= dist.get_world_size()


# Hooks of communication


def reduce_by(hook: Callable[..., Any], state: Callable[[Any], Any] | None, model: nn.Module) -> None:
    register_comm_hook(model, state and state(_group_of(model)), hook)


def _group_of(model: nn.Module) -> Any:
    state: Any = fully_shard.state(model)
    if state is None:
        return dist.group.WORLD
    return state.mesh["shard"].get_group() if state.mesh.ndim == 2 else state.mesh.get_group()


# First values


def differ(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.mul_(1 + dist.get_rank())


# Between the first step and the second


class Moment(NamedTuple):
    """What there is between two steps.

    Attributes:
        model: Annotated.
        optimizer: Of its parameters.
        make: Annotates, another model unless it is given one.
        make_optimizer: Makes another optimizer, for a model.
        run: A forward, which returns the loss.
        folder: Empty, and the same on all ranks.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    make: Callable[..., Any]
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    run: Callable[[], torch.Tensor]
    folder: str


Next = tuple[Any, torch.optim.Optimizer]


def evaluated(at: Moment) -> Next:
    at.model.eval()
    with torch.inference_mode():
        at.run()
    at.model.train()
    return at.model, at.optimizer


def written(at: Moment, *, unshards: bool = False) -> Next:
    with unshard_params(at.model) if unshards else nullcontext(), torch.no_grad():
        for param in at.model.parameters():
            param.mul_(0.9)
    return at.model, at.optimizer


def copied(at: Moment) -> Next:
    twin = copy.deepcopy(at.model)
    return twin, at.make_optimizer(twin)


def saved(at: Moment, **changes: Any) -> Next:
    save_checkpoint(at.folder, 1, at.model, at.optimizer)
    # Other values than those of the file.
    model = at.make(seed=1, **changes)
    optimizer = at.make_optimizer(model)
    load_checkpoint(at.folder, model, optimizer)
    return model, optimizer


def in_one_handle(model: nn.Module, options: Mapping[str, Any]) -> None:
    fully_shard(model, mp_policy=options.get("mp_policy", NO_CASTS))


def annotated_anew(at: Moment) -> Next:
    at.optimizer.zero_grad()
    unannotate(at.model)
    assert not any(isinstance(param, RaggedDTensor) for param in at.model.parameters())
    at.make(model=at.model)
    return at.model, at.make_optimizer(at.model)


# Options of both


def given(**options: Any) -> Value:
    """Return a value that is arguments of the annotation."""
    return Value({"options": options})


def rarely(**options: Any) -> Value:
    """Return a value that is fields of ``HandleOptions``, or of ``ReplicateOptions``."""
    return Value({"rare": options})


def does(alone: Mapping[str, Any] | None = None, **ranks: Any) -> Value:
    """Return a value that is something that ranks do, and what it is for the one process."""
    return Value(ranks, alone or {})


def _micros(backward: Callable[[Any, Runs], list[torch.Tensor]], **alone: Any) -> Value:
    # What is averaged several times in a step is stepped as often inside backward, and by ranks without inputs.
    several = {"optimizer": ["in backward"], **EVEN} if "adds_averages" in alone else {}
    return does({"micros": 3, **alone}, backward=backward).but(without=several)


def _models(*, loaded: Mapping[str, Any]) -> dict[str, Value]:
    special = {
        # Sums of bfloat16 gradients of each rank are not those of all.
        "mixed_dtypes": Value(tolerance=2e-2, without={"precision": [*LOW, "fp32"], "hook": LOW_HOOKS}),
        # A buffer is added to the inputs, in its own dtype; one that is not saved is not loaded.
        "with_buffers": Value(without={"precision": LOW, **loaded}),
        "gpt": Value(without=loaded),
        # Its loss is too steep for low precision.
        "gpt_tied": Value(without={"precision": LOW, "hook": LOW_HOOKS, **loaded}),
        **dict.fromkeys(("tied_within", "tied_across", "tied_layers", "called_twice"), Value(rounds="compute reduce")),
    }
    return {name: special.get(name, Value()) for name in sorted((*models.MODELS, "tied_layers"), key="mlp".__ne__)}


EVEN = {"inputs": ["uneven"]}
LOW = ("bf16", "bf16 and fp32", "fp16", "fp32 and bf16")
LOW_HOOKS = ("in fp16",)
# Sums over ranks round in the dtype that travels.
AVERAGED = "reduce compute"
RANKS = {"2": Value(), "1": Value(), "3": Value(), "4": Value()}
POLICIES = {
    "bf16": MixedPrecisionPolicy(BF16),
    "bf16 and fp32": MixedPrecisionPolicy(BF16, FP32),
    "fp16": MixedPrecisionPolicy(FP16),
    "fp32 and bf16": MixedPrecisionPolicy(None, BF16),
    "fp32": MixedPrecisionPolicy(FP32, FP32),
}
PRECISION = {
    "none": Value(),
    **{name: does({"policy": policy}, options={"mp_policy": policy}) for name, policy in POLICIES.items()},
}
GRADIENTS = {
    "one batch": does(backward=one_by_one),
    "no_sync": _micros(without_sync),
    "set_requires_gradient_sync": _micros(partial(switched, "set_requires_gradient_sync")),
    "set_is_last_backward": _micros(partial(switched, "set_is_last_backward"), adds_averages=True),
    # Ranks that have no inputs do not know of it.
    "reduce_gradients": _micros(reduced_at_last).but(without=EVEN),
    "each averaged": _micros(one_by_one, adds_averages=True),
    "forwards first": _micros(forwards_first, adds_averages=True),
    "one backward": _micros(one_backward).but(rounds=AVERAGED),
    "each twice": _micros(each_twice, adds_averages=True, times=2).but(tolerance=4e-6),
}
CHECKPOINTS = {
    "none": Value(),
    **{
        name: Value(ranks, only={"model": BEHIND_OTHERS if name.startswith("reentrant") else PLAIN_BLOCKS})
        for name, ranks in {
            "ours": {"checkpoint": by_ours},
            "ours afterwards": {"checkpoint later": by_ours},
            "wrapper": {"checkpoint": partial(by_wrapper, CheckpointImpl.NO_REENTRANT)},
            "offload wrapper": {"checkpoint": partial(by_wrapper, None)},
            "in forward": {"checkpoint": partial(in_own_forward, use_reentrant=False)},
            "reentrant in forward": {"checkpoint": partial(in_own_forward, use_reentrant=True)},
        }.items()
    },
}
OPTIMIZERS = {
    "SGD": does(optimizer=sgd),
    "momentum": does(optimizer=partial(sgd, momentum=0.9, weight_decay=0.01)),
    "AdamW": does(optimizer=adamw),
    "AdamW fused": does(optimizer=partial(adamw, fused=True)),
    "in backward": does(
        optimizer=partial(sgd, momentum=0.9),
        steps=lambda optimizer, model: step_in_backward(optimizer),
        steps_inside=True,
    ).but(without={"clip": ["ours", "torch's"], "hook": ["ours", *LOW_HOOKS]}),
}
BETWEEN = {
    "nothing": Value(),
    "evaluated": does(between=evaluated),
    "written": does({"is_written": True}, between=written).but(without=EVEN),
    "copied": does(between=copied).but(only={"optimizer": ["SGD"], "hook": ["none"]}, without=EVEN),
    "saved": does(between=saved).but(without=EVEN),
    "annotated anew": does(between=annotated_anew).but(only={"optimizer": ["SGD"]}, without=EVEN),
}
BOTH: Table = {
    "checkpoint": CHECKPOINTS,
    "clip": {
        "none": Value(),
        "ours": does({"clips": True}, clip=clip_grad_norm_),
        "torch's": does({"clips": True}, clip=nn.utils.clip_grad_norm_),
    },
    "zero_grad": {"to None": Value(), "to zeros": does(keeps_zeros=True)},
    "inputs": {"even": Value(), "uneven": does({"uneven": True})},
    "compiled": {
        "not": Value(),
        **{
            when: does(compiles=when).but(only={"model": ["mlp"], "ranks": ["2"]}, tolerance=1e-6)
            for when in ("before", "after")
        },
    },
}

# fully_shard

TENSOR_PARALLEL = ["tensor parallel", "tensor parallel and copies"]
# A replica is of all ranks, and starts with values.
WHERE_REPLICATED = {
    "strategy": TENSOR_PARALLEL,
    "start": ["the first rank's", "loaded"],
    "hook": ["ours", *LOW_HOOKS],
    "set": ["half"],
    "optimizer": ["in backward"],
}
# A hook reduces and divides by itself.
HOOKED = {"set": ["sums", "half"]}
LOW_STATE = partial(LowPrecisionState, parameter_type=None)
HANDLES = {"model": ["mlp", "gpt", "gpt_tied"], "annotation": ["by policy", "by hand"]}
IN_PAIRS = {"ranks": ["2", "4"]}


def _hybrid(strategy: str, copies: int = 2) -> Value:
    ranks = {"options": {"strategy": strategy}, "mesh": partial(hybrid, copies)}
    return Value(ranks, only=IN_PAIRS if copies == 2 else {}, rounds="" if copies == 1 else "reduce")


def _split(copies: int) -> Value:
    ranks = {"mesh": partial(beside_tensor_parallelism, copies), "split": split_blocks, "tensor_parallel": 2}
    only = {"ranks": ["4"] if copies else ["2", "4"], "model": SPLIT}
    return Value(ranks, only=only, without={"checkpoint": ["offload wrapper"]}, rounds="compute reduce")


SHARDED: Table = {
    "ranks": RANKS,
    "model": _models(loaded={"start": ["loaded"]}),
    "strategy": {
        "default": Value(),
        "SHARD_GRAD_OP": given(strategy="SHARD_GRAD_OP"),
        "freed to 2": given(reshard_after_forward=2).but(only=IN_PAIRS),
        "HYBRID_SHARD": _hybrid("HYBRID_SHARD"),
        "HYBRID_SHARD_ZERO2": _hybrid("HYBRID_SHARD_ZERO2"),
        "one copy": _hybrid("HYBRID_SHARD", 1),
        "nothing but copies": _hybrid("HYBRID_SHARD", 0),
        "tensor parallel": _split(0),
        "tensor parallel and copies": _split(2),
    },
    "annotation": {
        "by policy": does(annotate=by_policy),
        "by hand": does(annotate=by_hand).but(without={"model": ["tied_across", "tied_layers"]}),
        "whole": does(annotate=lambda model, options: fully_shard(model, **options)),
        "every leaf": does(annotate=every_leaf).but(without={"model": ["conditional"]}),
        "blocks in one call": does(annotate=blocks_in_one_call).but(only={"model": PLAIN_BLOCKS}),
        "around a replica": does(annotate=around_a_replica).but(
            only={"model": ["mlp", "gpt", "gpt_tied", "unused"]}, without=WHERE_REPLICATED, rounds=AVERAGED
        ),
    },
    "precision": PRECISION,
    "offload": {
        "none": Value(),
        "policy": given(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "copied": does(place=put_elsewhere),
    },
    "gradients": {
        **GRADIENTS,
        "set_requires_all_reduce": _micros(partial(switched, "set_requires_all_reduce"), adds_averages=True).but(
            only={
                "strategy": ["HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "nothing but copies", "tensor parallel and copies"]
            }
        ),
        "finalize_backward": _micros(finalized_by_hand, adds_averages=True),
    },
    "optimizer": {
        **OPTIMIZERS,
        "accelerated": does(optimizer=partial(sgd, momentum=0.9), steps=accelerate_optimizer),
    },
    "hook": {
        "none": Value(),
        "ours": does(hook=partial(reduce_by, reduce_scatter_hook, DefaultState)).but(without=HOOKED, rounds="reduce"),
        "in fp16": does(hook=partial(reduce_by, fp16_compress_hook, LOW_STATE)).but(without=HOOKED, tolerance=2e-3),
    },
    "unused": {
        "none": Value(),
        "zero": Value({"rare": {"unused_gradients": "zero"}}, {"fills_unused": True}, without={"model": ["unused"]}),
    },
    "align": {
        "row": Value(),
        "element": rarely(align=lambda fqn, param: "element"),
        "tensor": rarely(align=lambda fqn, param: "tensor"),
        "blocks of 2": rarely(align=lambda fqn, param: 2),
        "last dim": given(shard_placement_fn=lambda param: Shard(param.dim() - 1) if param.dim() else None),
    },
    "transport": {
        # Between threads it is the process group too, which adds in the dtype that travels.
        "auto": Value(rounds="reduce"),
        "process_group": rarely(transport="process_group").but(rounds="reduce"),
    },
    "set": {
        "nothing": Value(),
        "kept after backward": does(set=lambda model: model.set_reshard_after_backward(False)),
        "prefetch": does(set=prefetch).but(only=HANDLES),
        "one gradient buffer": does(set=lambda model: model.set_reduce_scatter_max_input_buffers(1)),
        "sums": does(set=lambda model: model.set_force_sum_reduction_for_comms(True)).but(
            rounds="reduce", without={"optimizer": ["in backward"]}
        ),
        "kept storage": does(set=lambda model: model.set_keep_unsharded_storage(True)),
        "half": does({"divisor": 2}, set=halve).but(without={"optimizer": ["in backward"]}),
    },
    "start": {
        "values": Value(),
        "the first rank's": does(
            device=lambda: torch.device("meta" if dist.get_rank() else "cpu"), options={"sync_module_states": True}
        ).but(without={"strategy": TENSOR_PARALLEL}),
        "loaded": does(
            device=lambda: torch.device("meta"),
            load=lambda model, plain: (
                model.to_empty(device=_home(model)),
                load_full_state_dict(model, plain.state_dict() if dist.get_rank() == 0 else None),
            ),
        ),
    },
    "between": {
        **BETWEEN,
        "unsharded and written": does({"is_written": True}, between=partial(written, unshards=True)).but(without=EVEN),
        "saved in one handle": does(between=partial(saved, annotate=in_one_handle)).but(
            without={
                **EVEN,
                "gradients": ["set_requires_all_reduce"],
                "set": ["prefetch"],
                "start": ["the first rank's", "loaded"],
                "strategy": TENSOR_PARALLEL,
            },
        ),
    },
    **BOTH,
}

# replicate

BESIDE_SHARDS = {"model": ["mlp", "gpt"], "hook": ["none"]}
# Every backward of a rank is like its first one.
ONE_GRAPH = {"model": ["conditional"], **EVEN}
# A parameter would have several gradients in one backward.
REENTRANT = {"checkpoint": ["reentrant in forward"]}
STARTS_EQUAL = {"annotation": ["all of it"], "start": ["equal"], "precision": ["none"]}

REPLICATED: Table = {
    "ranks": RANKS,
    "model": {
        **_models(loaded={}),
        # A parameter without a gradient is found, or never has one.
        "unused": Value(only={"unused": ["found", "found by a static graph"]}),
        "conditional": Value(only={"unused": ["found"]}),
        "called_twice": Value(without=REENTRANT, rounds=AVERAGED),
    },
    "annotation": {
        "all of it": does(annotate=lambda model, options: replicate(model, **options)),
        "its parts": does(annotate=its_parts).but(
            without={
                "model": ["scalars", "empty_params", "tied_across", "tied_layers"],
                # Methods of the root, which is not annotated.
                "gradients": ["set_requires_gradient_sync", "set_is_last_backward"],
            }
        ),
        "inside out": does(annotate=inside_out).but(only={"model": ["mlp", "gpt", "called_twice"]}),
        "around a shard": does(annotate=around_a_shard).but(only=BESIDE_SHARDS),
        "inside a shard": does(annotate=inside_a_shard).but(only=BESIDE_SHARDS),
    },
    "mesh": {
        "the world": Value(),
        "a dim": does(mesh=along_a_dim),
        "beside tensor parallelism": Value(
            _split(0).ranks,
            only={**IN_PAIRS, "model": SPLIT, **STARTS_EQUAL, "hook": ["none"]},
            without={"checkpoint": ["offload wrapper"]},
        ),
    },
    "precision": {name: value.but(rounds=AVERAGED) for name, value in PRECISION.items()},
    "buckets": {"25 MiB": Value(), "tiny": given(bucket_cap_mb=TINY_CAP_MB)},
    "gradients are": {"views": Value(), "copies": given(gradient_as_bucket_view=False)},
    "unused": {
        "an error": Value(),
        "found": given(find_unused_parameters=True),
        "static graph": given(static_graph=True).but(without=ONE_GRAPH),
        "found by a static graph": given(static_graph=True, find_unused_parameters=True).but(without=ONE_GRAPH),
    },
    "delay": {
        "none": Value(),
        "two weights": does(chosen=delayed).but(only={"annotation": ["all of it"], "model": ["mlp", "gpt"]}),
    },
    "start": {
        "the first rank's": does(differ=differ).but(
            without={"annotation": ["around a shard", "inside a shard", "its parts"]}
        ),
        "equal": rarely(init_sync=False),
    },
    "buffers": {
        "broadcast": Value(),
        "own": given(broadcast_buffers=False).but(only={"start": ["equal"]}),
        "equal at first": rarely(forward_sync_buffers=False),
    },
    "ignored": {
        "nothing": Value(),
        "a weight": does(options={"ignored_params": ["inp.weight"]}, averages=[average_ignored]).but(
            only={"model": ["mlp"], **STARTS_EQUAL, "delay": ["none"], "mesh": ["the world", "a dim"]},
            without={"optimizer": ["in backward"], **EVEN},
        ),
    },
    "gradients": {
        **GRADIENTS,
        "require_backward_grad_sync": _micros(partial(switched, "require_backward_grad_sync")).but(
            # A sharded model has no such attribute.
            without={"annotation": ["its parts", "inside a shard"], "between": ["saved in one handle"]}
        ),
        "one backward": GRADIENTS["one backward"].but(without=REENTRANT),
    },
    "optimizer": OPTIMIZERS,
    "hook": {
        "none": Value(),
        "torch's": does(hook=partial(reduce_by, default_hooks.allreduce_hook, None)).but(
            without={"optimizer": ["in backward"]}, rounds="reduce"
        ),
        "ours": does(hook=partial(reduce_by, allreduce_hook, DefaultState)).but(rounds="reduce"),
        "in fp16": does(hook=partial(reduce_by, default_hooks.fp16_compress_hook, None)).but(tolerance=2e-3),
    },
    "between": {
        **BETWEEN,
        "saved in one handle": does(between=partial(saved, annotate=in_one_handle)).but(
            only={"hook": ["none"], "ignored": ["nothing"], "mesh": ["the world"], "start": ["equal"]},
            without=EVEN,
        ),
    },
    **BOTH,
}

TABLES = {"fully_shard": SHARDED, "replicate": REPLICATED}
# Values that do not go together where a third one is there, or that only a limit of torch keeps apart: cases with all
# of them are left out.
REFUSED: dict[str, list[Mapping[str, str]]] = {"fully_shard": [], "replicate": []}
# torch's clipping and its fused kernels take no plain parameters beside those that are split, in plain torch too.
REFUSED["replicate"].append({"mesh": "beside tensor parallelism", "clip": "torch's"})
REFUSED["replicate"].append({"mesh": "beside tensor parallelism", "optimizer": "AdamW fused"})
# A temperature of one number takes all of what bfloat16 rounds.
REFUSED["replicate"].append({"model": "scalars", "precision": "bf16", "optimizer": "in backward"})

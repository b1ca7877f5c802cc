"""What happens to a model in a story between training: reads and writes, saves, copies, hooks, other annotations."""

import contextlib
import copy
import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from composable import (
    ComposableError,
    MixedPrecisionPolicy,
    UsageError,
    checkpoint,
    full_state_dict,
    fully_shard,
    load_checkpoint,
    load_full_state_dict,
    load_safetensors,
    rebind_optimizer,
    replicate,
    save_checkpoint,
    save_safetensors,
    unannotate,
    unshard_params,
)
from composable.fsdp_module import FSDPModule
from tools.fuzz.annotations import MODES, Annotation, Refused, annotate_again, draw_annotation
from tools.fuzz.between import ACTIONS, Between
from tools.fuzz.nodes import Boom, candidates
from tools.fuzz.operations import (
    OPERATIONS,
    Changes,
    Operation,
    Skipped,
    has_no_hooks,
    is_closed,
    is_quiet,
    is_sharded,
    may_change_a_part,
    may_copy,
    operation,
)
from tools.fuzz.story_parts import Now, Side, StoryStep, annotated_names

__all__ = ["draw_way"]

SAVES = "checkpoint background safetensors dcp full".split()

# Values


@operation("write to parameters", 4, is_legal=is_closed)
def write(side: Side) -> None:
    params = side.params()
    ways: list[Callable[[nn.Parameter], object]] = [
        lambda param: param.mul_(0.9),
        lambda param: param.clamp_(-0.4, 0.4),
        lambda param: param.data.clamp_(-0.4, 0.4),
        lambda param: param.copy_(param * 0.5),
        lambda param: param.data.add_(param.data, alpha=0.1),
    ]
    with torch.no_grad():
        for name in side.rng.sample(sorted(params), len(params) // 2):
            side.rng.choice(ways)(params[name])


@operation("evaluate", 4)
def evaluate(side: Side) -> None:
    step = StoryStep(side.model, side.number, side.rank, side.world_size, side.seed, is_plain=side.is_plain)
    model = side.rng.choice([side.model, side.twin or side.model])
    model.eval()
    with side.rng.choice([torch.no_grad, torch.inference_mode])():
        side.losses = [model(step.x() * 1, step.call()) for _ in range(side.rng.randint(1, 2))]
    model.train()


@operation("full_state_dict", 2)
def read_all(side: Side) -> None:
    state = side.model.state_dict() if side.is_plain else full_state_dict(side.model)
    if side.rank == 0:
        side.losses = [value for value in state.values() if value.is_floating_point()]


@operation("an edit raises", 1, is_legal=lambda now: is_sharded(now) and is_closed(now))
def edit_raises(side: Side) -> None:
    """Values are as before it."""
    with contextlib.suppress(Boom) if side.is_plain else pytest.raises(Boom):
        _edit_and_raise(side)


def _edit_and_raise(side: Side) -> None:
    if not side.is_plain:
        with unshard_params(side.model), torch.no_grad():
            for _, param in zip(range(3), side.model.trunk.parameters(), strict=False):
                param.mul_(0.5)
            raise Boom


@operation("settings of sharded modules", 2)
def settings(side: Side) -> None:
    for module in [] if side.is_plain else [one for one in side.model.modules() if isinstance(one, FSDPModule)]:
        module.set_reshard_after_backward(side.rng.random() < 0.5, recurse=False)
        module.set_keep_unsharded_storage(side.rng.random() < 0.3, recurse=False)
        module.set_reduce_scatter_max_input_buffers(side.rng.randint(1, 2), recurse=False)
        module.set_force_sum_reduction_for_comms(side.rng.random() < 0.3)


def _act(name: str, weight: int = 1, is_legal: Callable[[Now], bool] = lambda now: True) -> None:
    OPERATIONS[name] = Operation(functools.partial(_act_on, name=name), weight, is_legal)


def _act_on(side: Side, name: str) -> None:
    now = side.now
    between = Between(side.model, side.optimizer, side.is_plain, side.rng, side.number, side.folder, now.annotation)
    ACTIONS[name].run(between)
    side.model, side.optimizer = between.model, between.optimizer  # type: ignore[assignment]


_act("unshard_params, edit", 3, is_closed)
_act("load_full_state_dict of other values", 2, is_closed)
_act("state_dict, load_state_dict", 1, is_closed)
_act("optimizer's state_dict")
_act("iter_full_params")
_act("prefetch lists, set_reshard_after_forward", 2)
_act("move to the same device")
_act("copies: update_process_group", is_legal=lambda now: now.annotation.mode in ("replicate", "nested", "together"))


# Saves and loads


@operation("save", 4)
def save(side: Side) -> Changes:
    way, folder = side.rng.choice(SAVES), side.folder / str(side.number)
    if side.is_plain:
        side.kept[side.number] = side.state()
    elif way in ("checkpoint", "background"):
        is_late = way == "background"
        saving = save_checkpoint(folder, side.number, side.model, side.optimizer, asynchronous=is_late)
        side.kept[side.number] = saving
    elif way == "safetensors":
        save_safetensors(side.model, folder)
    elif way == "full":
        side.kept[side.number] = full_state_dict(side.model)
    else:
        dcp.save({"model": get_model_state_dict(side.model)}, checkpoint_id=folder)
    return {"saves": {**side.now.saves, side.number: way}}


@operation("load", 6, is_legal=lambda now: bool(now.saves) and is_closed(now))
def load(side: Side) -> None:
    number = side.rng.choice(sorted(side.now.saves))
    way, folder, kept = side.now.saves[number], side.folder / str(number), side.kept.get(number)
    if side.is_plain:
        side.model.load_state_dict(kept[0])
        if way in ("checkpoint", "background"):
            side.optimizer.load_state_dict(copy.deepcopy(kept[1]))  # which takes tensors as they are
    elif way in ("checkpoint", "background"):
        kept.wait()
        load_checkpoint(folder, side.model, side.optimizer)
    elif way == "safetensors":
        load_safetensors(side.model, folder)
    elif way == "full":
        load_full_state_dict(side.model, kept)
    else:
        state = {"model": get_model_state_dict(side.model)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(side.model, state["model"])


@operation("save and load by torch", is_legal=lambda now: is_quiet(now) and is_closed(now))
def save_and_load(side: Side) -> None:
    """Save model and optimizer as torch has it, scale all parameters, load."""
    # Torch refuses to load where some state is missing, and makes it by a step of zeros where all is.
    if any(param.requires_grad and not side.optimizer.state.get(param) for param in side.params().values()):
        raise Skipped
    model, optimizer = get_state_dict(side.model, side.optimizer)
    if side.is_plain:
        set_state_dict(side.model, side.optimizer, model_state_dict=model, optim_state_dict=copy.deepcopy(optimizer))
        return
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=side.folder / str(side.number))
    with torch.no_grad():
        for param in side.params().values():
            param.mul_(0.5)
    model, optimizer = get_state_dict(side.model, side.optimizer)
    state = {"model": model, "optimizer": optimizer}
    dcp.load(state, checkpoint_id=side.folder / str(side.number))
    set_state_dict(side.model, side.optimizer, model_state_dict=model, optim_state_dict=optimizer)


# Copies and averages


def _check_copies(side: Side) -> None:
    """A replicated model with frozen parameters is not copied."""
    if not is_sharded(side.now) and not all(param.requires_grad for param in side.params().values()):
        raise Skipped


@operation("deepcopy with optimizer", 3, is_legal=may_copy)
def go_on_with_a_copy(side: Side) -> None:
    """Expect that gradients which wait are not copied, which a plain model may do; some ranks may have none."""
    _check_copies(side)
    before, is_refused = (side.model, side.optimizer), torch.zeros(())
    try:
        _act_on(side, "deepcopy with optimizer")
    except UsageError as error:
        if side.is_plain or not side.now.is_pending or "cannot be copied while its gradients wait" not in str(error):
            raise
        is_refused += 1
    if side.now.is_pending and not side.is_plain:
        dist.all_reduce(is_refused)
        side.model, side.optimizer = before if is_refused else (side.model, side.optimizer)


@operation("train a copy and drop it", 2, is_legal=lambda now: is_quiet(now) and not now.is_pending)
def train_a_copy(side: Side) -> None:
    _check_copies(side)
    before = side.model, side.optimizer
    side.model, side.optimizer = copy.deepcopy(before)
    side.model.zero_grad()
    try:
        for _ in range(2):
            side.train(lambda step: step.backward(step.forward()))
            side.optimizer.step()
    finally:
        side.model, side.optimizer = before


@operation("average: begin", 3, is_legal=lambda now: is_quiet(now) and not now.is_pending)
def begin_average(side: Side) -> Changes:
    _check_copies(side)
    side.twin = AveragedModel(side.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    return {"has_twin": True}


@operation("average: update", 4, is_legal=lambda now: now.has_twin)
def update_average(side: Side) -> None:
    assert side.twin is not None
    side.twin.update_parameters(side.model)


# Hooks of users


@operation("hooks on parameters", is_legal=lambda now: has_no_hooks(now) and is_sharded(now) and not now.is_pending)
def hook_params(side: Side) -> Changes:
    params = side.params()
    for name in side.rng.sample(sorted(params), len(params) // 2):
        if params[name].requires_grad:
            side.hooks.append(params[name].register_hook(lambda grad: grad / 2))
    return {"has_hooks": True}


@operation("hooks on modules", 2, is_legal=has_no_hooks)
def hook_modules(side: Side) -> Changes:
    _hook(side)
    return {"has_module_hooks": True}


def _hook(side: Side) -> None:
    for module in side.rng.sample([*side.model.trunk.kids, *side.model.heads], 2):
        hook = side.rng.choice(["before", "after", "backward"])
        if hook == "before":
            side.hooks.append(module.register_forward_pre_hook(lambda _, args: (args[0] / 2, *args[1:])))
        elif hook == "after":
            side.hooks.append(module.register_forward_hook(lambda _, args, output: output * 2))
        else:
            halve = lambda _, grads, outputs: tuple(None if grad is None else grad / 2 for grad in grads)  # noqa: E731
            side.hooks.append(module.register_full_backward_hook(halve))


@operation("hooks go away", 3, is_legal=lambda now: not has_no_hooks(now))
def unhook(side: Side) -> Changes:
    while side.hooks:
        side.hooks.pop().remove()
    return {"has_hooks": False, "has_module_hooks": False}


# Annotations


def draw_way(rng: random.Random, world_size: int) -> Annotation:
    """Return a way to annotate a model that has its values."""
    way = draw_annotation(rng, frozenset(), [*MODES, "nested", "together"])
    counts = [count for count in range(2, world_size + 1) if world_size % count == 0]
    is_hybrid = way.mode not in ("replicate", "nested", "together") and rng.random() < 0.3
    return dataclasses.replace(way, replicas=rng.choice(counts) if is_hybrid and counts else 0)


def draw_policy(rng: random.Random) -> dict[str, Any]:
    """Return options that annotate in another dtype, now and then."""
    policy = MixedPrecisionPolicy(torch.float32, rng.choice([None, torch.float64]), buffer_dtype=torch.float32)
    return {"mp_policy": policy} if rng.random() < 0.15 else {}


@operation("annotate a part anew", 3, is_legal=may_change_a_part)
def annotate_a_part_anew(side: Side) -> Changes:
    name, api = side.rng.choice(side.now.annotated), side.rng.choice([fully_shard, replicate])
    if not side.is_plain:
        part = dict(candidates(side.model))[name]
        api = api if any(param.requires_grad for param in part.parameters()) else fully_shard
        unannotate(part)
        side.compare(dict(side.model.named_parameters()))
        side.model.zero_grad()
        options = {"find_unused_parameters": True} if api is replicate else {}
        try:
            api(part, **options)
        except ComposableError as error:  # The part stays plain, which no story goes on from.
            raise Refused(f"{type(error).__name__}: {error}") from error
        rebind_optimizer(side.optimizer, side.model)
    else:
        side.model.zero_grad()
    side.twin = None
    now = side.now
    trained = [name for name, param in side.model.named_parameters() if param.requires_grad]
    return {
        "annotation": dataclasses.replace(now.annotation, mode="mixed"),
        "annotated": list(annotated_names(side.model)),
        "trained": frozenset(trained) if is_sharded(now) else now.trained.intersection(trained),
        "has_twin": False,
        "is_pending": False,
    }


@operation("annotate anew", 4, is_legal=is_closed)
def annotate_anew(side: Side) -> Changes:
    """Undo the annotation, compare, maybe set hooks on modules, annotate in another way."""
    unhooked = unhook(side)
    side.twin = None
    other, options = draw_way(side.rng, side.world_size), draw_policy(side.rng)
    has_hooks = side.rng.random() < 0.2
    if not side.is_plain:
        unannotate(side.model)
        side.compare(dict(side.model.named_parameters()))
    side.model.zero_grad()
    if has_hooks:
        _hook(side)
    if side.is_plain:
        return {}
    annotate_again(side.model, other, **options)
    if side.rng.random() < 0.3:
        checkpoint(side.model.trunk.kids[0])
    rebind_optimizer(side.optimizer, side.model)
    return {
        **unhooked,
        "annotation": other,
        "annotated": list(annotated_names(side.model)),
        "trained": frozenset(name for name, param in side.model.named_parameters() if param.requires_grad),
        "has_module_hooks": has_hooks,
        "has_twin": False,
        "is_low": side.now.is_low or bool(options),
        "is_pending": False,
    }

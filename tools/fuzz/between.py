"""What programs do with a model and its optimizer between steps, on ranks and, where it matters, in one process."""

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from composable import (
    ComposableError,
    UsageError,
    full_state_dict,
    iter_full_params,
    load_checkpoint,
    load_full_state_dict,
    rebind_optimizer,
    register_comm_hook,
    save_checkpoint,
    unannotate,
    unshard_params,
    update_process_group,
)
from composable.annotation import units_of
from composable.fsdp_module import FSDPModule
from tests.place import here, placed
from tools.fuzz.annotations import Annotation, Refused, annotate_again, replicated
from tools.fuzz.nodes import Call, Model, candidates
from tools.fuzz.programs import BATCH

__all__ = ["ACTIONS", "Action", "Between"]


@dataclass
class Between:
    """A model between two steps."""

    model: Model  # may be replaced
    optimizer: torch.optim.Optimizer  # may be replaced
    is_plain: bool  # in one process
    rng: random.Random  # gives the same numbers on every rank, and in one process
    number: int  # of the step before
    folder: Path  # where all ranks may write
    other: Annotation  # the next way to annotate

    def scale(self, factor: float) -> None:
        with torch.no_grad():
            for param in self.model.parameters():
                param.mul_(factor)


@dataclass(frozen=True)
class Action:
    """Something to do between steps."""

    run: Callable[[Between], None]  # what it does
    keeps_model: bool = True  # model and parameters stay the same objects, with their hooks
    keeps_annotation: bool = True  # the model stays annotated as it was
    needs_sharded: bool = False  # nothing may be replicated
    needs_copies: bool = False  # for trees with options of ``replicate``


ACTIONS: dict[str, Action] = {}


def action(name: str, **options: bool) -> Callable[[Callable[[Between], None]], Callable[[Between], None]]:
    def register(run: Callable[[Between], None]) -> Callable[[Between], None]:
        ACTIONS[name] = Action(run, **options)
        return run

    return register


@action("load_full_state_dict of other values")
def other_values(on: Between) -> None:
    if on.is_plain:
        on.scale(0.9)
        return
    state = full_state_dict(on.model)
    # Full state dicts have the names of the model without `torch.compile`.
    names = {name.replace("_orig_mod.", "") for name, _ in on.model.named_parameters(remove_duplicate=False)}
    load_full_state_dict(on.model, {name: value * 0.9 if name in names else value for name, value in state.items()})


@action("state_dict, load_state_dict")
def local_state(on: Between) -> None:
    if not on.is_plain:
        state = {name: value.detach().clone() for name, value in on.model.state_dict().items()}
        on.scale(0.5)
        on.model.load_state_dict(state)


@action("optimizer's state_dict")
def optimizer_state(on: Between) -> None:
    on.optimizer.load_state_dict(copy.deepcopy(on.optimizer.state_dict()))


@action("save_checkpoint, load_checkpoint")
def checkpoints(on: Between) -> None:
    if not on.is_plain:
        save_checkpoint(on.folder, on.number, on.model, on.optimizer)
        on.scale(0.5)
        load_checkpoint(on.folder, on.model, on.optimizer)


@action("iter_full_params")
def iterate(on: Between) -> None:
    if not on.is_plain:
        for _ in iter_full_params(on.model):
            pass


@action("unshard_params, edit")
def edit(on: Between) -> None:
    options = on.rng.choice([{}, {"rank0_only": True}, {"offload_to_cpu": True}])
    if on.is_plain:
        on.scale(0.9)
        return
    with unshard_params(on.model, **options), torch.no_grad():
        for param in on.model.parameters():
            if type(param) is nn.Parameter:
                param.mul_(0.9)


def forget_losses(model: nn.Module) -> None:
    """Drop what a backward that stopped early has left in modules, which a deep copy would refuse."""
    for module in model.modules():
        if isinstance(getattr(module, "loss", None), torch.Tensor):
            module.loss = None  # type: ignore[assignment]


@contextlib.contextmanager
def unless_hooked(on: Between) -> Iterator[None]:
    """Expect that no model is copied with a communication hook."""
    hooks = () if on.is_plain else [hook for unit in units_of(on.model.modules()) for hook in unit.comm_hooks]
    try:
        yield
    except UsageError as error:
        if not hooks or "cannot be copied with a communication hook" not in str(error):
            raise
    else:
        assert not hooks, "a model was copied with a communication hook"


@action("deepcopy with optimizer", keeps_model=False)
def deep_copy(on: Between) -> None:
    forget_losses(on.model)
    grads = [param.grad for param in on.model.parameters()]
    with unless_hooked(on):
        on.model, on.optimizer = copy.deepcopy((on.model, on.optimizer))
    if on.is_plain:  # Of a plain module deepcopy drops them.
        for param, grad in zip(on.model.parameters(), grads, strict=True):
            param.grad = None if grad is None else grad.clone()


@action("freeze or unfreeze", needs_sharded=True)
def freeze(on: Between) -> None:
    share = on.rng.choice([0.3, 1.0])  # some of a module, or all
    modules = [module for _, module in candidates(on.model) if module is not on.model.inp]
    for module in on.rng.sample(modules, min(2, len(modules))):
        for _, param in sorted(module.named_parameters()):
            if on.rng.random() < share:
                param.requires_grad_(on.rng.random() < 0.5)


@action("prefetch lists, set_reshard_after_forward")
def settings(on: Between) -> None:
    sharded = [module for module in on.model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        for setter in (module.set_modules_to_forward_prefetch, module.set_modules_to_backward_prefetch):
            if on.rng.random() < 0.5:
                setter(on.rng.sample(sharded, on.rng.randint(0, min(3, len(sharded)))))
        if on.rng.random() < 0.5:
            module.set_reshard_after_forward(on.rng.random() < 0.5, recurse=False)


@action("move to the same device")
def move(on: Between) -> None:
    on.model.to(here())


@action("unannotate, annotate, rebind_optimizer", keeps_model=False, keeps_annotation=False)
def annotate_anew(on: Between) -> None:
    on.optimizer.zero_grad()  # an annotation refuses gradients
    if not on.is_plain:
        unannotate(on.model)
        try:
            annotate_again(on.model, on.other)
        except ComposableError as error:
            raise Refused(f"{type(error).__name__}: {error}") from error
        rebind_optimizer(on.optimizer, on.model)


@action("annotate a copy", keeps_model=False)
def copy_and_drop(on: Between) -> None:
    if not on.is_plain:
        forget_losses(on.model)
        with unless_hooked(on):
            twin: Any = copy.deepcopy(on.model)
            call = Call(0, on.number)
            loss = twin(placed(torch.randn(BATCH, twin.inp.in_features)), call).sum()
            # Every parameter has to take part, where ranks expect a gradient for each.
            (loss + sum(aux.sum() for aux in call.outside)).backward()


@action("copies: update_process_group", needs_copies=True)
def other_group(on: Between) -> None:
    for module in replicated(on.model):
        update_process_group(module, dist.new_group(list(range(dist.get_world_size()))))


@action("copies: a hook and its removal", needs_copies=True)
def hook_and_remove(on: Between) -> None:
    def never(state: object, grad: torch.Tensor) -> None:
        raise AssertionError("the hook was removed")

    for module in replicated(on.model):
        with contextlib.suppress(ComposableError):  # There is one, or an optimizer steps inside backward.
            register_comm_hook(module, None, never).remove()

"""Random ways to annotate a model."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composable import (
    ComposableError,
    HandleOptions,
    SizePolicy,
    checkpoint,
    fully_shard,
    load_full_state_dict,
    replicate,
)
from tests.fuzz.copies import Copies, hooked, options_of, unless_refused
from tests.fuzz.nodes import Node
from tests.fuzz.trees import Model, candidates

__all__ = [
    "CHECKPOINTS",
    "MODES",
    "STARTS",
    "Annotation",
    "Refused",
    "annotate",
    "annotate_again",
    "direct_parts",
    "draw_annotation",
    "draw_freed",
    "ignored_by",
]

MODES = "function classes size hand mixed root lists replicate roots".split()
STARTS = "values sync load init".split()
# Modes in which all of the model is sharded by one call, so that it may start on the meta device.
WHOLE = {"function", "classes", "size", "root"}
# When modules are checkpointed too: before they are annotated, or after.
CHECKPOINTS = "none none before after".split()
HYBRID = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}
TRANSPORTS = "auto process_group point_to_point".split()


@dataclass(frozen=True)
class Annotation:
    """How a model is annotated; which modules exactly follows from ``seed`` and their own numbers."""

    mode: str  # one of ``MODES``
    seed: int  # of every choice
    share: float  # of the modules that may be annotated, how many are
    transport: str  # of what is sharded
    start: str  # where values come from
    is_reentrant: bool  # somewhere in the tree there is reentrant checkpointing
    checkpoints: str = "none"  # whether modules are checkpointed by our annotation, and when: one of ``CHECKPOINTS``
    copies: Copies | None = None  # what is asked of ``replicate``; ``None``: little
    replicas: int = 0  # how many copies there are of most of what is sharded; 0: nobody asks for any

    def __str__(self) -> str:
        start = "" if self.start == "values" else f", starts on the meta device ({self.start})"
        recompute = "" if self.checkpoints == "none" else f", checkpointed {self.checkpoints} that"
        copies = f", {self.replicas} copies of shards" * bool(self.replicas)
        return f"{self.mode}, {self.share:.0%} of the modules, transport {self.transport}{copies}{start}{recompute}" + (
            "" if self.copies is None else f"; {self.copies or 'no options'}"
        )

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")


class Refused(Exception):  # noqa: N818  # an outcome
    """One of the library's errors, before anything ran."""


@dataclass(frozen=True)
class _Request:
    api: Callable[..., Any]
    modules: tuple[nn.Module, ...]
    options: dict[str, Any]

    def run(self) -> None:
        options = dict(self.options)
        if replicas := options.pop("replicas", 0):
            options["mesh"] = _mesh(replicas)
        self.api(self.modules[0] if len(self.modules) == 1 else list(self.modules), **options)


# By the world: a mesh makes process groups.
_MESHES: "WeakKeyDictionary[dist.ProcessGroup, dict[int, DeviceMesh]]" = WeakKeyDictionary()


def _mesh(replicas: int) -> DeviceMesh:
    """Return the mesh with so many copies of shards, the same for all that ask."""
    assert dist.group.WORLD is not None
    made = _MESHES.setdefault(dist.group.WORLD, {})
    if replicas not in made:
        shape = (replicas, dist.get_world_size() // replicas)
        made[replicas] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return made[replicas]


def draw_annotation(rng: random.Random, tags: frozenset[str], modes: Sequence[str] = MODES) -> Annotation:
    """Return a way that fits a tree with ``tags``."""
    fits = [mode for mode in modes if _fits(mode, tags)]
    mode = rng.choice(fits or ["hand"])
    start = rng.choice(STARTS) if mode in WHOLE and rng.random() < 0.4 else "values"
    seed, share = rng.getrandbits(32), rng.choice([0.3, 0.6, 0.9])
    # Saved tensors are watched in one thread, a backward inside has no graph, what goes aside does so twice, and
    # where ranks take different ways the second run begins at different moments.
    takes_checkpoints = not tags & {"thread", "force", "side", "by_rank"}
    checkpoints = random.Random(f"{seed}/checkpoints").choice(CHECKPOINTS) if takes_checkpoints else "none"
    return Annotation(mode, seed, share, rng.choice(TRANSPORTS), start, "reentrant" in tags, checkpoints)


def _fits(mode: str, tags: frozenset[str]) -> bool:
    if mode in ("classes", "size"):
        # They pick modules inside those of torch, which use one another's weights.
        return "fragile" not in tags
    # A gradient comes twice in one backward: refused by design.
    return mode != "replicate" or "reentrant" not in tags


def annotate(make: Callable[[], Model], annotation: Annotation, before: Callable[[Model], None]) -> Model:
    """Return an annotated model with the values that ``make`` gives.

    Args:
        make: Makes the model.
        annotation: How to annotate it.
        before: Called with the model before it is annotated.

    Raises:
        Refused: The library does not take it.
    """
    is_meta = annotation.start in ("load", "init") or (annotation.start == "sync" and dist.get_rank() > 0)
    # Not by `to`, which cuts ties.
    with torch.device("meta" if is_meta else "cpu"):
        model = make()
    before(model)
    try:
        if annotation.start == "values":
            annotate_again(model, annotation)
        else:
            _annotate_meta(model, annotation, make())
    except ComposableError as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    return model


def annotate_again(model: Model, annotation: Annotation, **options: Any) -> None:
    """Annotate a model that has its values."""
    if annotation.checkpoints == "before":
        _checkpoint(model, annotation)
    for request in _requests(model, annotation):
        request.options.update(options)
        if annotation.copies is None or request.api is not replicate:
            request.run()
        else:
            _replicate_or_less(model, request)
    if annotation.copies is not None:
        _refused(model, unless_refused(model, lambda: hooked(model, annotation.copies or Copies())))
    if annotation.checkpoints == "after":
        _checkpoint(model, annotation)


def _replicate_or_less(model: Model, request: _Request) -> None:
    """Ask for less where that is refused, so that what a refusal leaves behind is trained with."""
    error = unless_refused(model, request.run)
    if error is None:
        return
    _refused(model, error)
    kept = ("bucket_cap_mb", "gradient_as_bucket_view", "init_sync", "ignored_params", "ignored_modules")
    less = {name: value for name, value in request.options.items() if name in kept}
    _Request(request.api, request.modules, {"find_unused_parameters": True, **less}).run()


def _refused(model: Model, error: ComposableError | None) -> None:
    if error is not None:
        model.refused.append(f"{type(error).__name__}: {error}")


def ignored_by(model: Model, annotation: Annotation) -> dict[str, nn.Parameter]:
    """Return the parameters that the caller is to average."""
    if annotation.copies is None or annotation.mode != "replicate":
        return {}
    options = _replicate(annotation, "root", model, model).options
    left = [
        *options.get("ignored_params", []),
        *(p for one in options.get("ignored_modules", []) for p in one.parameters()),
    ]
    return {name: param for name, param in model.named_parameters() if any(param is one or name == one for one in left)}


def _checkpoint(model: Model, annotation: Annotation) -> None:
    for name, module in [*candidates(model), ("root", model)]:
        rng = annotation.rng(f"{name}, checkpoint")
        if rng.random() < 0.4:
            checkpoint(module, early_stop=rng.random() < 0.5)


def _annotate_meta(model: Model, annotation: Annotation, plain: Model) -> None:
    if annotation.start == "sync":
        annotate_again(model, annotation, sync_module_states=True)
    elif annotation.start == "init":
        names = {module: name for name, module in model.named_modules()}
        annotate_again(
            model, annotation, param_init_fn=lambda module: _fill(module, plain.get_submodule(names[module]))
        )
    else:
        annotate_again(model, annotation)
        model.to_empty(device="cpu")
        load_full_state_dict(model, plain.state_dict())
        for name, buffer in plain.named_buffers():
            model.get_buffer(name).copy_(buffer)


def _fill(module: nn.Module, source: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for name, value in source.named_parameters(recurse=False):
            module.get_parameter(name).copy_(value)
        for name, value in source.named_buffers(recurse=False):
            module.get_buffer(name).copy_(value)


def direct_parts(model: Model, annotation: Annotation) -> frozenset[str]:
    """Return which of ``trunk`` and ``heads`` are annotated themselves, so that they may be called as they are.

    And "copies of shards", where there are any.
    """
    own: set[nn.Module] = set()
    for request in _requests(model, annotation):
        own.update(request.modules)
        policy = request.options.get("policy")
        if isinstance(policy, frozenset):
            own.update(module for module in model.modules() if isinstance(module, tuple(policy)))
        elif policy is not None and not isinstance(policy, SizePolicy):
            own.update(module for module in model.modules() if policy(module))
    found = {"trunk"} if {model.trunk, model.inp} <= own and model.front is None else set()
    if own.issuperset(model.heads):
        found.add("heads")
    if annotation.replicas:
        found.add("copies of shards")
    return frozenset(found)


def _requests(model: Model, annotation: Annotation) -> list[_Request]:
    mode = annotation.mode
    offered = list(candidates(model))
    chosen = [(name, one) for name, one in offered if annotation.rng(name).random() < annotation.share]
    if mode == "replicate":
        return [_replicate(annotation, "root", model, model)]
    if mode == "together":
        trained = [(name, one) for name, one in chosen if any(param.requires_grad for param in one.parameters())]
        groups = _lists(annotation, trained, lambda name, *modules: _replicate(annotation, name, model, *modules))
        return [*groups, _replicate(annotation, "root", model, model)]
    if mode == "root":
        return [_shard(annotation, "root", model)]
    if mode == "function":
        picked = {module for _, module in chosen} or {model.inp}
        return [_shard(annotation, "root", model, policy=lambda module: module in picked)]
    if mode == "classes":
        classes = {type(module) for _, module in chosen if isinstance(module, Node)} | {nn.Linear}
        return [_shard(annotation, "root", model, policy=frozenset(classes))]
    if mode == "size":
        return [_shard(annotation, "root", model, policy=SizePolicy(annotation.rng("size").choice([4, 16, 30])))]
    if mode == "lists":
        groups = _lists(annotation, chosen, lambda name, *modules: _shard(annotation, name, *modules))
        return [*groups, _shard(annotation, "root", model)]
    if mode == "roots":
        tops = [module for module in (model.front, model.trunk, model.inp, *model.heads) if module is not None]
        chosen = [(name, one) for name, one in offered if one in tops or (name, one) in chosen]
        return [_shard(annotation, name, one) for name, one in chosen]
    requests = []
    for name, module in [*chosen, ("root", model)]:
        is_safe = not annotation.is_reentrant or name in ("inp", "head 0", "head 1")
        has_some = any(param.requires_grad for param in module.parameters())
        if mode == "nested" and has_some:
            requests.append(_replicate(annotation, name, model, module))
        elif mode == "nested":
            continue
        elif mode == "mixed" and is_safe and has_some and annotation.rng(f"{name}, api").random() < 0.4:
            requests.append(_replicate(annotation, name, model, module))
        else:
            requests.append(_shard(annotation, name, module))
    return requests


def _lists(
    annotation: Annotation, chosen: Sequence[tuple[str, nn.Module]], request: Callable[..., _Request]
) -> list[_Request]:
    """Make requests of several modules of which none is inside another, and of its own for what is inside one.

    Args:
        annotation: Says which go together.
        chosen: Names and modules.
        request: Makes one out of a name and modules.
    """
    rng = annotation.rng("lists")
    apart: list[tuple[str, nn.Module]] = []
    for name, module in rng.sample(list(chosen), len(chosen)):
        if not any(_are_nested(module, other) for _, other in apart):
            apart.append((name, module))
    inside = [
        request(name, module)
        for name, module in chosen
        if any(module is not one and _holds(one, module) for _, one in apart)
    ]
    groups = []
    while apart:
        count = rng.randint(1, 3)
        groups.append(request(apart[0][0], *(module for _, module in apart[:count])))
        apart = apart[count:]
    return inside + groups


def _holds(module: nn.Module, other: nn.Module) -> bool:
    return any(other is one for one in module.modules())


def _are_nested(a: nn.Module, b: nn.Module) -> bool:
    return _holds(a, b) or _holds(b, a)


def _shard(annotation: Annotation, name: str, *modules: nn.Module, **options: Any) -> _Request:
    rng = annotation.rng(f"{name}, options")
    # Modules of the same ranks with copies and without go together.
    is_hybrid = annotation.replicas and annotation.rng(f"{name}, mesh").random() < 0.8
    if is_hybrid:
        options["replicas"] = annotation.replicas
    if rng.random() < 0.2:
        strategy = rng.choice(["FULL_SHARD", "SHARD_GRAD_OP"])
        options["strategy"] = HYBRID[strategy] if is_hybrid else strategy
    else:
        options["reshard_after_forward"] = draw_freed(rng, annotation.replicas if is_hybrid else 1)
    return _Request(fully_shard, modules, {"options": HandleOptions(transport=annotation.transport), **options})


def draw_freed(rng: random.Random, replicas: int = 1) -> bool | int | None:
    """Return what is freed between forward and backward; as often as not, where ranks can be parted, all but a part."""
    # Who only asks which modules are annotated has no ranks.
    size = dist.get_world_size() // replicas if dist.is_initialized() else 1
    parts = [number for number in range(2, size) if size % number == 0]
    return rng.choice([None, True, False, *parts * 3])


def _replicate(annotation: Annotation, name: str, model: Model, *modules: nn.Module) -> _Request:
    rng = annotation.rng(f"{name}, options")
    if annotation.copies is not None:
        return _Request(replicate, modules, options_of(annotation.copies, modules, model, rng))
    options = {
        "find_unused_parameters": True,
        "bucket_cap_mb": rng.choice([25, 1e-4]),
        "broadcast_buffers": rng.choice([True, False]),
        "gradient_as_bucket_view": rng.choice([True, False]),
    }
    return _Request(replicate, modules, options)

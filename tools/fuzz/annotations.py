"""Random ways to annotate a model, with options of ``replicate`` also such as exclude each other."""

import dataclasses
import functools
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
    MixedPrecisionPolicy,
    ReplicateOptions,
    allreduce_hook,
    fully_shard,
    load_full_state_dict,
    register_comm_hook,
    replicate,
)
from composable.comm_hooks import DefaultState
from composable.replicate_module import ReplicateModule
from tests.place import here
from tools.fuzz.nodes import Model, candidates

MODES = "function hand mixed root lists replicate roots".split()
STARTS = "values sync load init".split()
# Modes in which all of the model is sharded by one call, so that it may start on the meta device.
WHOLE = {"function", "root"}
HYBRID = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}
TRANSPORTS = "auto process_group".split()
# All by one call; parts by calls of their own; several parts by one call; parts, and the rest is sharded.
COPY_MODES = "replicate nested together mixed".split()
# Kinds of nodes of which not all parameters are used in every forward, or not always alike.
CHANGING = frozenset(
    {"unused", "some ranks", "heads", "chosen", "loop", "pass through", "drop", "drop on some ranks", "cut off"}
)
_LOW = MixedPrecisionPolicy(torch.float32, torch.float64, output_dtype=torch.float64, buffer_dtype=torch.float32)


@dataclass(frozen=True)
class Copies:
    """What is asked of ``replicate``, in all calls alike; the rest follows from the annotation's seed."""

    finds_unused: bool = True  # parameters without a gradient are accepted
    is_static: bool = False  # ``static_graph``
    delays: bool = False  # some gradients wait for that of another parameter
    syncs: bool = False  # ranks start with different values, and ``init_sync`` makes them equal
    buffers: str = ""  # how they are made equal: "", "broadcast", "own", "forward", or "both", which is refused
    is_low: bool = False  # computation is in a lower dtype; never drawn
    steps: str = ""  # what steps inside backward: "", "ours" or "torch"
    hook: str = ""  # of which kind the communication hook is: "", "gradients" or "buckets"

    def __str__(self) -> str:
        given = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return ", ".join(f"{name}={value}" for name, value in given.items() if value != getattr(Copies(), name))


@dataclass(frozen=True)
class Annotation:
    """How a model is annotated; which modules exactly follows from ``seed`` and their own numbers."""

    mode: str  # one of ``MODES``
    seed: int  # of every choice
    share: float  # of the modules that may be annotated, how many are
    transport: str  # of what is sharded
    start: str  # where values come from
    is_reentrant: bool  # somewhere in the tree there is reentrant checkpointing
    copies: Copies | None = None  # what is asked of ``replicate``; ``None``: little
    replicas: int = 0  # how many copies there are of most of what is sharded; 0: nobody asks for any

    def __str__(self) -> str:
        start = "" if self.start == "values" else f", starts on the meta device ({self.start})"
        copies = f", {self.replicas} copies of shards" * bool(self.replicas)
        return f"{self.mode}, {self.share:.0%} of the modules, transport {self.transport}{copies}{start}" + (
            "" if self.copies is None else f"; {self.copies or 'no options'}"
        )

    def rng(self, name: str) -> random.Random:
        return random.Random(f"{self.seed}/{name}")


class Wrong(AssertionError):  # noqa: N818  # an outcome
    """Something is not as in one process, or not as it was."""


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
        made[replicas] = init_device_mesh(here().type, shape, mesh_dim_names=("replicate", "shard"))
    return made[replicas]


def draw_annotation(rng: random.Random, tags: frozenset[str], modes: Sequence[str] = MODES) -> Annotation:
    """Return a way that fits a tree with ``tags``."""
    # A gradient comes twice in one backward: refused by design.
    mode = rng.choice([mode for mode in modes if mode != "replicate" or "reentrant" not in tags] or ["hand"])
    start = rng.choice(STARTS) if mode in WHOLE and rng.random() < 0.4 else "values"
    share, transport = rng.choice([0.3, 0.6, 0.9]), rng.choice(TRANSPORTS)
    return Annotation(mode, rng.getrandbits(32), share, transport, start, "reentrant" in tags)


def annotate(make: Callable[[], Model], annotation: Annotation, before: Callable[[Model], None]) -> Model:
    """Return an annotated model with the values that ``make`` gives, after a call of ``before`` with it.

    Raises:
        Refused: The library does not take it.
    """
    is_meta = annotation.start in ("load", "init") or (annotation.start == "sync" and dist.get_rank() > 0)
    # Not by `to`, which cuts ties.
    with torch.device("meta" if is_meta else "cpu"):
        model = make()
    before(model)
    names = {module: name for name, module in model.named_modules()}
    plain = make()
    fill = lambda module: _fill(module, plain.get_submodule(names[module]))  # noqa: E731
    options = {"sync": {"sync_module_states": True}, "init": {"param_init_fn": fill}}
    try:
        annotate_again(model, annotation, **options.get(annotation.start, {}))
        if annotation.start == "load":
            model.to_empty(device=here())
            load_full_state_dict(model, plain.state_dict())
            for name, buffer in plain.named_buffers():
                model.get_buffer(name).copy_(buffer)
    except ComposableError as error:
        raise Refused(f"{type(error).__name__}: {error}") from error
    return model


def annotate_again(model: Model, annotation: Annotation, **options: Any) -> None:
    """Annotate a model that has its values.

    Raises:
        ComposableError: The library does not take it; a replicated model is as it was.
    """
    for request in _requests(model, annotation):
        request.options.update(options)
        run = request.run
        if annotation.copies is None or request.api is not replicate:
            run()
        else:
            unless_refused(model, run)
    if annotation.copies is not None:
        unless_refused(model, lambda: hooked(model, annotation.copies or Copies()))


def _fill(module: nn.Module, source: nn.Module) -> None:
    module.to_empty(device=here(), recurse=False)
    with torch.no_grad():
        for name, value in source.named_parameters(recurse=False):
            module.get_parameter(name).copy_(value)
        for name, value in source.named_buffers(recurse=False):
            module.get_buffer(name).copy_(value)


def direct_parts(model: Model, annotation: Annotation) -> frozenset[str]:
    """Return which of ``trunk`` and ``heads`` are annotated themselves, and "copies of shards" if there are any."""
    own = {module for request in _requests(model, annotation) for module in request.modules}
    parts = {
        "trunk": {model.trunk, model.inp} <= own,
        "heads": own.issuperset(model.heads),
        "copies of shards": annotation.replicas > 0,
    }
    return frozenset(part for part, is_there in parts.items() if is_there)


def _requests(model: Model, annotation: Annotation) -> list[_Request]:
    mode = annotation.mode
    offered = list(candidates(model))
    chosen = [(name, one) for name, one in offered if annotation.rng(name).random() < annotation.share]
    if mode == "replicate":
        return [_replicate(annotation, "root", model)]
    if mode == "together":
        trained = [(name, one) for name, one in chosen if any(param.requires_grad for param in one.parameters())]
        groups = _lists(annotation, trained, functools.partial(_replicate, annotation))
        return [*groups, _replicate(annotation, "root", model)]
    if mode == "root":
        return [_shard(annotation, "root", model)]
    if mode == "function":
        picked = {module for _, module in chosen} or {model.inp}
        return [_shard(annotation, "root", model, policy=lambda module: module in picked)]
    if mode == "lists":
        groups = _lists(annotation, chosen, functools.partial(_shard, annotation))
        return [*groups, _shard(annotation, "root", model)]
    if mode == "roots":
        tops = [model.trunk, model.inp, *model.heads]
        chosen = [(name, one) for name, one in offered if one in tops or (name, one) in chosen]
        return [_shard(annotation, name, one) for name, one in chosen]
    requests = []
    for name, module in [*chosen, ("root", model)]:
        has_some = any(param.requires_grad for param in module.parameters())
        is_safe = not annotation.is_reentrant or name in ("inp", "head 0", "head 1")
        is_mixed = mode == "mixed" and is_safe and annotation.rng(f"{name}, api").random() < 0.4
        if has_some and (mode == "nested" or is_mixed):
            requests.append(_replicate(annotation, name, module))
        elif mode != "nested":
            requests.append(_shard(annotation, name, module))
    return requests


def _lists(
    annotation: Annotation, chosen: Sequence[tuple[str, nn.Module]], request: Callable[..., _Request]
) -> list[_Request]:
    """Make requests of several modules of which none is inside another, and of its own for what is inside one."""
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
        options["reshard_after_forward"] = _draw_freed(rng, annotation.replicas if is_hybrid else 1)
    return _Request(fully_shard, modules, {"options": HandleOptions(transport=annotation.transport), **options})


def _draw_freed(rng: random.Random, replicas: int = 1) -> bool | int | None:
    """Return what is freed between forward and backward; as often as not, where ranks can be parted, all but a part."""
    # Who only asks which modules are annotated has no ranks.
    size = dist.get_world_size() // replicas if dist.is_initialized() else 1
    parts = [number for number in range(2, size) if size % number == 0]
    return rng.choice([None, True, False, *parts * 3])


def _replicate(annotation: Annotation, name: str, *modules: nn.Module) -> _Request:
    rng = annotation.rng(f"{name}, options")
    if annotation.copies is not None:
        return _Request(replicate, modules, options_of(annotation.copies, modules, rng))
    options = {
        "find_unused_parameters": True,
        "bucket_cap_mb": rng.choice([25, 1e-4]),
        "broadcast_buffers": rng.choice([True, False]),
        "gradient_as_bucket_view": rng.choice([True, False]),
    }
    return _Request(replicate, modules, options)


# Options of ``replicate``


def draw_copies(rng: random.Random) -> Copies:
    """Return what may be asked of any tree; some of it is refused."""
    copies = Copies(
        finds_unused=rng.random() < 0.75,
        is_static=rng.random() < 0.3,
        delays=rng.random() < 0.2,
        syncs=rng.random() < 0.5,
        buffers=rng.choice(["", "", "broadcast", "own", "own", "forward", "both"]),
        steps=rng.choice(["", "", "", "ours", "torch"]),
        hook=rng.choice(["", "", "", "gradients", "buckets"]),
    )
    # What excludes each other is drawn now and then.
    return copies if rng.random() < 0.1 or not copies.steps else dataclasses.replace(copies, hook="")


def replicated(model: nn.Module) -> list[Any]:
    """Return the replicated modules."""
    return [module for module in model.modules() if isinstance(module, ReplicateModule)]


def options_of(copies: Copies, modules: Sequence[nn.Module], rng: random.Random) -> dict[str, Any]:
    """Return arguments of ``replicate`` for one call, of ``modules``."""
    options: dict[str, Any] = {
        "find_unused_parameters": copies.finds_unused,
        "bucket_cap_mb": rng.choice([25, 1e-4, 1e-3]),
        "gradient_as_bucket_view": rng.choice([True, False]),
        "static_graph": copies.is_static,
        "process_group": rng.choice([None, None, dist.group.WORLD]),
    }
    rare: dict[str, Any] = {"init_sync": copies.syncs}
    if copies.buffers in ("broadcast", "own", "both"):
        options["broadcast_buffers"] = copies.buffers != "own"
    if copies.buffers in ("forward", "both"):
        rare["forward_sync_buffers"] = rng.choice([True, False])
    if copies.is_low:
        options["mp_policy"] = _LOW
    if copies.delays:
        named = [pair for module in modules for pair in module.named_parameters() if pair[1].requires_grad]
        # Also such as others manage, or sparse ones: refused.
        rare["delay_all_reduce_named_params"] = rng.sample(named, min(len(named), rng.randint(1, 3)))
        rare["param_to_hook_all_reduce"] = rng.choice(named)[1] if named and rng.random() < 0.95 else None
    options["options"] = ReplicateOptions(**rare)
    return options


def unless_refused(model: nn.Module, run: Callable[[], Any]) -> None:
    """Run it.

    Raises:
        ComposableError: The library does not take it.
        Wrong: It raised, and ``model`` is not as it was.
    """
    before = _looks(model)
    try:
        run()
    except ComposableError as error:
        if _looks(model) != before:
            raise Wrong(f"refused, and the model is another: {error}") from error
        raise


def _looks(model: nn.Module) -> list[Any]:
    """Return what an error must leave alone."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    looks: list[Any] = []
    for name, module in model.named_modules():
        looks += [name, type(module), *(list(getattr(module, kind)) for kind in kinds)]
    for name, param in model.named_parameters():
        hooks = param._post_accumulate_grad_hooks
        looks += [name, id(param), param.requires_grad, id(param.grad), len(hooks or ())]
        looks.append(param.detach().sum().item() if type(param) is nn.Parameter else None)
    return looks


def hooked(model: nn.Module, copies: Copies) -> None:
    """Register the communication hook, if there is one, on every replicated module. Collective.

    Raises:
        ComposableError: The library does not take it.
    """
    for module in replicated(model) if copies.hook else ():
        if copies.hook == "gradients":
            register_comm_hook(module, DefaultState(dist.group.WORLD), allreduce_hook)
        else:
            module.register_comm_hook(dist.group.WORLD, _average)


def _average(group: dist.ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    flat = bucket.buffer()
    dist.all_reduce(flat, group=group)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(flat.div_(dist.get_world_size()))
    return future

"""What a user asks of ``fully_shard``, as data: checked once, and handed on as one value."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import Shard

from composable.arguments import described
from composable.errors import ConfigError
from composable.planning.layout import Align
from composable.planning.offload import NO_OFFLOAD, OffloadPolicy, as_offload
from composable.planning.precision import NO_CASTS, MixedPrecisionPolicy, as_mixed_precision
from composable.policies import PolicyLike

__all__ = [
    "TRANSPORT_NAMES",
    "UNUSED_GRADIENTS",
    "AlignLike",
    "MeshDimStrategy",
    "ShardOptions",
    "ShardPlacementFn",
    "ShardingStrategy",
    "is_hybrid",
    "is_spread",
]

# By FQN below the annotated module, or a function of (FQN, parameter) that has no wish where it returns ``None``.
AlignLike: TypeAlias = Mapping[str, Align] | Callable[[str, nn.Parameter], Align | None]
ShardPlacementFn: TypeAlias = Callable[[nn.Parameter], Shard | None]


@dataclass(frozen=True)
class MeshDimStrategy:
    """What the ranks along one mesh dim split between them; what is not split, each of them keeps whole.

    Attributes:
        parameters: Between forward and backward, and between steps.
        gradients: After backward.
        optimizer_state: And with it the parameters between steps.
    """

    parameters: bool
    gradients: bool
    optimizer_state: bool


@dataclass(frozen=True)
class ShardingStrategy:
    """What is sharded over each dim of the mesh.

    Attributes:
        name: What ``strategy=`` accepts too.
        dims: One for each mesh dim; of two, the first is that of the replicas.
        FULL_SHARD: Parameters are freed after forward and gathered again for backward (ZeRO stage 3).
        SHARD_GRAD_OP: Parameters stay unsharded from forward to backward (ZeRO stage 2).
        HYBRID_SHARD: ``FULL_SHARD`` over the ranks of one dim, copies of each shard over those of the other.
        HYBRID_SHARD_ZERO2: ``SHARD_GRAD_OP`` in its place.
        HYBRID_SHARD_OPTIM: As ``HYBRID_SHARD`` between forward and backward; gradients, optimizer state and the
            parameters between steps are sharded over the ranks of both dims.
        NO_SHARD: Every rank keeps everything, which is what ``replicate`` does.

    Source: ZeRO, arXiv 1910.02054; secondary shards, ZeRO++, arXiv 2306.10209.
    """

    name: str
    dims: tuple[MeshDimStrategy, ...]

    FULL_SHARD: ClassVar["ShardingStrategy"]
    SHARD_GRAD_OP: ClassVar["ShardingStrategy"]
    HYBRID_SHARD: ClassVar["ShardingStrategy"]
    HYBRID_SHARD_ZERO2: ClassVar["ShardingStrategy"]
    HYBRID_SHARD_OPTIM: ClassVar["ShardingStrategy"]
    NO_SHARD: ClassVar["ShardingStrategy"]

    def __repr__(self) -> str:
        return f"ShardingStrategy.{self.name}"


_WHOLE = MeshDimStrategy(False, False, False)
_OPTIM = MeshDimStrategy(False, True, True)
_PRESETS = {
    one.name: one
    for one in (
        ShardingStrategy("FULL_SHARD", (MeshDimStrategy(True, True, True),)),
        ShardingStrategy("SHARD_GRAD_OP", (MeshDimStrategy(False, True, True),)),
        ShardingStrategy("HYBRID_SHARD", (_WHOLE, MeshDimStrategy(True, True, True))),
        ShardingStrategy("HYBRID_SHARD_ZERO2", (_WHOLE, MeshDimStrategy(False, True, True))),
        ShardingStrategy("HYBRID_SHARD_OPTIM", (_OPTIM, MeshDimStrategy(True, True, True))),
        ShardingStrategy("NO_SHARD", (_WHOLE,)),
    )
}
for _one in _PRESETS.values():
    setattr(ShardingStrategy, _one.name, _one)
# The names that the collectives know, which planning must not import.
TRANSPORT_NAMES = ("auto", "point_to_point", "process_group")
UNUSED_GRADIENTS = ("none", "zero")
_SHARDING = "'FULL_SHARD', 'SHARD_GRAD_OP', 'HYBRID_SHARD', 'HYBRID_SHARD_ZERO2', 'HYBRID_SHARD_OPTIM'"


@dataclass(frozen=True)
class ShardOptions:
    """What decides a plan, beside the module.

    Attributes:
        world_size: Ranks that share the parameters.
        replicas: Ranks that hold each shard.
        policy: Which submodules get handles of their own.
        strategy: What is sharded, or its name, or torch's of that name; instead of ``reshard_after_forward``.
        reshard_after_forward: Free the parameters between forward and backward; an int: but for a secondary shard of
            each rank, from which as many gather them again.
        ignored_params: Parameters to leave alone, under all their names.
        ignored_modules: Modules to leave alone with all below them.
        unused_gradients: What a parameter that no rank has a gradient for gets, ``none`` or ``zero``.
        align: What a cut may do to a parameter, by FQN or by a function: see ``plan_layout``.
        shard_placement_fn: Which dim of a parameter is cut.
        transport: The name to print.
        mp_policy: Dtypes of computation and reduction, also as torch's own policies.
        offload_policy: Where shards, gradients and optimizer state rest, also as torch's own policies.
        shard_as_bytes: Classes of parameters with packed storage and state beside it.
        hosts: Of each rank the host that it is on, as ``ShardPlan`` has them.

    Raises:
        ConfigError: Options are wrong, or contradict each other.
    """

    world_size: int
    replicas: int = 1
    policy: PolicyLike | None = None
    strategy: ShardingStrategy | str | None = None
    reshard_after_forward: bool | int | None = None
    ignored_params: Iterable[nn.Parameter] | None = None
    ignored_modules: Iterable[nn.Module] | None = None
    unused_gradients: str = "none"
    align: AlignLike | None = None
    shard_placement_fn: ShardPlacementFn | None = None
    transport: str = "auto"
    mp_policy: object = NO_CASTS
    offload_policy: object = NO_OFFLOAD
    shard_as_bytes: Collection[type[torch.Tensor]] = ()
    hosts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, size, what in (
            ("world_size", self.world_size, "ranks that share the parameters"),
            ("replicas", self.replicas, "ranks that hold each shard"),
        ):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ConfigError(f"{name} is {size!r:.80}", fix=f"pass the number of {what}")
        if self.align is not None and not isinstance(self.align, Mapping) and not _is_function(self.align):
            raise ConfigError(
                f"align is {described(self.align)}", fix="pass a dict of FQNs, or a function of an FQN and a parameter"
            )
        if self.shard_placement_fn is not None and not _is_function(self.shard_placement_fn):
            raise ConfigError(
                f"shard_placement_fn is {described(self.shard_placement_fn)}",
                fix="pass a function of a parameter that returns a Shard or None",
            )
        if self.transport not in TRANSPORT_NAMES:
            raise ConfigError(
                f"transport is {self.transport!r:.80}", fix=f"pass one of {', '.join(map(repr, TRANSPORT_NAMES))}"
            )
        freed = self.reshard_after_forward
        _check_freed(freed, self.world_size)
        unused = self.unused_gradients
        if not isinstance(unused, str) or unused not in UNUSED_GRADIENTS:
            raise ConfigError(f"unused_gradients is {unused!r}", fix="pass 'none' or 'zero'")
        if self.strategy is not None:
            if freed is not None:
                raise ConfigError(
                    "strategy and reshard_after_forward both say what is freed when", fix="pass one of them"
                )
            _check_strategy(self.strategy, self.replicas)
        as_mixed_precision(self.mp_policy)
        as_offload(self.offload_policy)
        _check_classes(self.shard_as_bytes)

    @property
    def precision(self) -> MixedPrecisionPolicy:
        """Dtypes of computation and reduction."""
        return as_mixed_precision(self.mp_policy)

    @property
    def offload(self) -> OffloadPolicy:
        """Where shards, gradients and optimizer state rest."""
        return as_offload(self.offload_policy)

    @property
    def is_spread(self) -> bool:
        """What rests between steps is sharded over the copies as well."""
        return is_spread(self.strategy)

    @property
    def shard_ranks(self) -> int:
        """How many ranks each parameter is cut over."""
        return self.world_size * (self.replicas if self.is_spread else 1)

    @property
    def frees(self) -> bool | int | None:
        """Whether parameters are freed between forward and backward; ``None``: where the module is not the root.

        An int: but for secondary shards over as many ranks, more than one and less than all.
        """
        chosen = _named(self.strategy)
        if chosen is not None:
            return chosen.dims[-1].parameters
        freed = self.reshard_after_forward
        if freed is None or isinstance(freed, bool):
            return freed
        # A shard over one rank is the whole, and one over all ranks is the shard.
        return int(freed) if 1 < freed < self.world_size else freed > 1


def _check_freed(freed: object, world_size: int) -> None:
    """Raise ``ConfigError`` unless ``reshard_after_forward`` is a bool, ``None``, or a divisor of the ranks."""
    if freed is None or isinstance(freed, bool):
        return
    if not isinstance(freed, int):
        raise ConfigError(
            f"reshard_after_forward is {described(freed)}",
            fix="pass True, False, None, or the number of ranks to reshard to",
        )
    if freed < 1 or world_size % freed:
        sizes = [str(one) for one in range(1, world_size + 1) if world_size % one == 0]
        raise ConfigError(
            f"reshard_after_forward is {freed}, and {world_size} ranks share the parameters",
            fix=f"pass a divisor of that: {', '.join(sizes)}; or True, False or None",
        )


def _check_classes(classes: object) -> None:
    """Raise ``ConfigError`` unless ``shard_as_bytes`` is a collection of classes of tensors."""
    fix = "pass a list of classes of parameters, such as [Params4bit]"
    if not isinstance(classes, Collection) or isinstance(classes, str | torch.Tensor | nn.Module):
        raise ConfigError(f"shard_as_bytes is {described(classes)}", fix=fix)
    for one in classes:
        if not isinstance(one, type) or not issubclass(one, torch.Tensor) or one in (torch.Tensor, nn.Parameter):
            raise ConfigError(f"shard_as_bytes holds {described(one)}, no subclass of a tensor", fix=fix)


def _is_function(value: object) -> bool:
    """Say whether ``value`` can be called; modules and classes can too, and were meant for something else."""
    return callable(value) and not isinstance(value, type | nn.Module)


def _named(strategy: object) -> ShardingStrategy | None:
    """Return the strategy that a user means: one, its name, or torch's of that name; ``None``: it is none."""
    if isinstance(strategy, ShardingStrategy):
        return strategy
    kind = type(strategy)
    if kind.__name__ == "ShardingStrategy" and kind.__module__.startswith("torch."):
        strategy = getattr(strategy, "name", "").removeprefix("_")
    return _PRESETS.get(strategy) if isinstance(strategy, str) else None


def is_hybrid(strategy: object) -> bool | None:
    """Say whether a strategy keeps copies of shards; ``None``: it is none."""
    chosen = _named(strategy)
    return None if chosen is None else len(chosen.dims) == 2


def is_spread(strategy: object) -> bool:
    """Say whether a strategy shards gradients and optimizer state over the ranks that hold copies of parameters too."""
    chosen = _named(strategy)
    return chosen is not None and chosen.dims == ShardingStrategy.HYBRID_SHARD_OPTIM.dims


def _check_strategy(strategy: object, replicas: int) -> None:
    """Raise ``ConfigError`` unless ``fully_shard`` can do it with as many copies of each shard."""
    chosen = _named(strategy)
    if chosen is None:
        raise ConfigError(f"strategy is {strategy!r}", fix=f"pass one of {_SHARDING}")
    copies, sharded = chosen.dims[:-1], chosen.dims[-1]
    if copies not in ((), (_WHOLE,)) and chosen.dims != ShardingStrategy.HYBRID_SHARD_OPTIM.dims:
        raise ConfigError(
            f"strategy {chosen.name} shards over {len(chosen.dims)} mesh dims, and parameters are sharded over one",
            fix=f"pass one of {_SHARDING}",
        )
    if replicas > 1 and not copies:
        raise ConfigError(
            f"strategy {chosen.name} keeps one copy of each shard, and there are {replicas}",
            fix=f"pass HYBRID_{'SHARD' if sharded.parameters else 'SHARD_ZERO2'}, or a mesh of one dim",
        )
    if not sharded.gradients or not sharded.optimizer_state:
        raise ConfigError(
            f"strategy {chosen.name} keeps gradients or optimizer state whole on every rank",
            fix=f"call replicate(module) instead, or pass one of {_SHARDING}",
        )

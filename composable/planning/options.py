"""The options of ``fully_shard``, checked once.

Mixed precision and offload are policies of their own, since ``replicate`` takes the first one too. This file casts
and copies nothing: casts and copies happen on the way to the buffers and from them, see ``engine/``.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import Shard

from composable.comm import transport_class
from composable.errors import ConfigError
from composable.ground.names import answer_of, check_bool, check_int, described, dtype_text
from composable.planning.layout import Align
from composable.policies import PolicyLike

# A name for all parameters; values by FQN below the annotated module; or a function of (FQN, parameter) that may
# return ``None`` for the default.
AlignLike: TypeAlias = str | Mapping[str, Align] | Callable[[str, nn.Parameter], Align | None]
ShardPlacementFn: TypeAlias = Callable[[nn.Parameter], Shard | None]

# Dtypes that every backend can sum, and every device can compute with.
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class ParamDtypes(NamedTuple):
    """The dtypes of one parameter: in computation, and of its gradient in reduction."""

    compute: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of computation and of gradient reduction for the modules of one ``fully_shard`` or ``replicate`` call.

    Parameters between steps, optimizer state and reduced gradients keep the parameter's own dtype. Only
    floating-point parameters, tensors and buffers are ever cast, and only where their dtype differs: a policy
    that asks for the dtypes that are there changes nothing.

    Attributes:
        param_dtype: Dtype of unsharded parameters, or of the copies that replicated modules compute with, and so of
            all-gathers, forward and backward. ``None``: the parameter's own.
        reduce_dtype: Dtype of gradients in reduce-scatters and all-reduces, and of gradients that ``no_sync`` keeps in
            sharded modules. ``None``: the dtype of computation, ``param_dtype`` where it is given.
        output_dtype: Floating-point outputs of the annotated modules are cast to it; not those of modules inside, to
            which a policy has given handles.
        cast_forward_inputs: Cast floating-point inputs of the annotated modules to ``param_dtype``;
            autograd takes the gradient back through the cast. With ``fully_shard``, all modules with a handle cast.
        cast_root_forward_inputs: The same for the module where forward starts; ``None``: as for all other modules.
        buffer_dtype: Floating-point buffers are cast to it while the annotated module around them runs, and have
            their own dtype before and after: state dicts and checkpoints never see the cast.
        keep_low_precision_grads: Gradients stay in the dtype in which they were
            reduced. Few optimizers take such gradients; it saves memory where other code consumes them.
        skipped_module_classes: Modules of these classes, such as ``nn.LayerNorm``, with all below, keep the dtype of
            their parameters and buffers; their inputs are cast to it, and their outputs back.
        param_dtype_override_fn: Called once with each parameter; returns its dtype in computation, or ``None`` for
            ``param_dtype``. Must return the same on every rank.

    Raises:
        ConfigError: Ranks cannot reduce in one of the dtypes, or another option is of the wrong type.

    Source: mixed precision training, arXiv 1710.03740.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    _: KW_ONLY
    cast_root_forward_inputs: bool | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    skipped_module_classes: tuple[type[nn.Module], ...] = ()
    # Not compared: its results are in the dtypes of the plan.
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            if (dtype := getattr(self, name)) is not None and dtype not in _DTYPES:
                raise ConfigError(
                    f"{name} of the mixed precision policy is {dtype!r:.80}",
                    fix=f"pass one of {', '.join(map(str, _DTYPES))}",
                )
        for name in ("cast_forward_inputs", "keep_low_precision_grads", "cast_root_forward_inputs"):
            what = f"{name} of the mixed precision policy"
            check_bool(what, getattr(self, name), or_none=name == "cast_root_forward_inputs")
        classes = self.skipped_module_classes
        listed = tuple(classes) if isinstance(classes, Iterable) and not isinstance(classes, str) else (classes,)
        for one in listed:
            if not isinstance(one, type) or not issubclass(one, nn.Module):
                what = f"skipped_module_classes is or holds {one!r:.80}"
                raise ConfigError(what, fix="pass classes of modules, as a tuple")
        object.__setattr__(self, "skipped_module_classes", listed)
        if self.param_dtype_override_fn is not None and not callable(self.param_dtype_override_fn):
            raise ConfigError(
                f"param_dtype_override_fn is {self.param_dtype_override_fn!r:.80}",
                fix="pass a function of a parameter that returns a dtype or None",
            )

    def dtypes_of(self, param: nn.Parameter, fqn: str, *, is_skipped: bool) -> ParamDtypes:
        """Return the dtypes of a parameter in computation and reduction.

        Raises:
            ConfigError: ``param_dtype_override_fn`` raised, or returned something else than a dtype or ``None``.
        """
        own = param.dtype
        if not own.is_floating_point:
            return ParamDtypes(own, own)
        compute = own if is_skipped or self.param_dtype is None else self.param_dtype
        if self.param_dtype_override_fn is not None:
            at, fix = f"parameter {fqn!r}", "return a dtype, or None for param_dtype"
            asked = answer_of("param_dtype_override_fn", self.param_dtype_override_fn, param, at=at, fix=fix)
            if asked is not None and asked not in _DTYPES:
                raise ConfigError(f"param_dtype_override_fn returned {asked!r:.80}", at=at, fix=fix)
            compute = asked or compute
        return ParamDtypes(compute, self.reduce_dtype or compute)

    def casts_inputs(self, *, is_root: bool) -> torch.dtype | None:
        """Return the dtype to which a fully sharded module casts its inputs; ``None``: it casts no inputs."""
        casts = self.cast_forward_inputs
        if is_root and self.cast_root_forward_inputs is not None:
            casts = self.cast_root_forward_inputs
        return self.param_dtype if casts else None

    def __str__(self) -> str:
        """Return the options that are not the default, as the plan prints them; may be empty."""
        asked = ((one.name, getattr(self, one.name)) for one in fields(self) if getattr(self, one.name) != one.default)
        return ", ".join(f"{name}={_text(value)}" for name, value in asked)


def _text(value: object) -> str:
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, tuple):
        return "(" + ", ".join(one.__name__ for one in value) + ")"
    # Never the repr of an object, which has its address, and ranks compare the text.
    return getattr(value, "__name__", type(value).__name__) if callable(value) else str(value)


NO_CASTS = MixedPrecisionPolicy()


def as_mixed_precision(policy: object) -> MixedPrecisionPolicy:
    """Return this library's policy for ``policy``, which may also be torch's; for ``None``, a policy without casts.

    Raises ``ConfigError`` for other values, and for options that this library lacks.
    """
    if policy is None:
        return NO_CASTS
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    # By their names, as nothing of torch's sharded data parallels is imported here.
    fix = "pass a composable.MixedPrecisionPolicy"
    names = ("MixedPrecisionPolicy", "MixedPrecision", "_MixedPrecision")
    if not is_dataclass(policy) or type(policy).__name__ not in names:
        raise ConfigError(f"mp_policy is {policy!r:.80}", fix=fix)
    known = {one.name: one.name for one in fields(MixedPrecisionPolicy)}
    known["_module_classes_to_ignore"] = "skipped_module_classes"
    asked: dict[str, Any] = {}
    for one in fields(policy):
        value = getattr(policy, one.name)
        if one.name in known:
            asked[known[one.name]] = value
        elif value != one.default:
            raise ConfigError(f"mp_policy asks for {one.name}={value!r:.80}, which is not known here", fix=fix)
    return MixedPrecisionPolicy(**asked)


def skipped_modules(managed: Collection[nn.Module], policy: MixedPrecisionPolicy) -> dict[nn.Module, nn.Module]:
    """Return the managed modules that keep their dtype, each with the outermost skipped module around it."""
    found: dict[nn.Module, nn.Module] = {}
    if policy.skipped_module_classes:
        for module in managed:
            if module not in found and isinstance(module, policy.skipped_module_classes):
                found.update({inner: module for inner in module.modules() if inner in managed})
    return found


@dataclass(frozen=True)
class OffloadPolicy:
    """Offload nothing: shards, gradients and optimizer state rest on the device of the mesh. The default.

    Attributes:
        is_offloading: Shards, gradients and optimizer state rest on the host.
        pins: The host memory is page-locked.
    """

    is_offloading: ClassVar[bool] = False

    @property
    def pins(self) -> bool:
        return bool(getattr(self, "pin_memory", False))

    def __str__(self) -> str:
        """Return the text that the plan prints; empty where nothing is offloaded."""
        return ""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients and so the optimizer's state rest in host memory, and the optimizer steps there.

    Each gather first copies this rank's shard to the device, each reduction its result to the host. On a mesh of
    CPUs, shards are in host memory already, and nothing changes.

    Attributes:
        pin_memory: Page-lock the host memory, so that copies run beside the computation. Without it the host
            waits for each copy.

    Raises:
        ConfigError: ``pin_memory`` is no bool.

    Source: ZeRO-Offload, arXiv 2101.06840.
    """

    pin_memory: bool = True
    is_offloading: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_bool("pin_memory of the offload policy", self.pin_memory)

    def __str__(self) -> str:
        pinned = "pinned" if self.pin_memory else "pageable"
        return f"shards, gradients and optimizer state rest in {pinned} host memory"


NO_OFFLOAD = OffloadPolicy()


def _as_offload(policy: object) -> OffloadPolicy:
    """Return this library's policy for ``policy``, which may also be torch's; ``None``: one that offloads nothing."""
    if policy is None or isinstance(policy, OffloadPolicy):
        return policy or NO_OFFLOAD
    if isinstance(policy, type) and policy.__name__ == "OffloadPolicy":
        return NO_OFFLOAD  # The class itself, as torch takes it.
    # By their names, as nothing of torch's sharded data parallels is imported here.
    if is_dataclass(policy) and not isinstance(policy, type):
        asked = {one.name: getattr(policy, one.name) for one in fields(policy)}
        match type(policy).__name__, *asked:
            case ["OffloadPolicy"]:
                return NO_OFFLOAD
            case ["CPUOffloadPolicy", "pin_memory"]:
                return CPUOffloadPolicy(**asked)
            case ["CPUOffload", "offload_params"]:
                check_bool("offload_params of the offload policy", asked["offload_params"])
                return CPUOffloadPolicy() if asked["offload_params"] else NO_OFFLOAD
    raise ConfigError(
        f"offload_policy is {policy!r:.80}",
        fix="pass a composable.CPUOffloadPolicy, or an OffloadPolicy to offload nothing",
    )


@dataclass(frozen=True)
class ShardingStrategy:
    """A choice of what is sharded, and of when parameters are freed; a user can make one beside the choices below.

    Gradients, optimizer state and parameters between steps are sharded over the last dim of the mesh.

    Attributes:
        name: The name in plans and messages; ``strategy=`` accepts the names of the choices below too.
        reshard_after_forward: Parameters are freed between forward and backward; a number: except secondary shards
            over that many ranks, as ``fully_shard`` takes it.
        has_copies: The ranks along another dim of the mesh hold copies of each shard.
        FULL_SHARD: Parameters are freed after forward and gathered again for backward (ZeRO stage 3).
        SHARD_GRAD_OP: Parameters stay unsharded from forward to backward (ZeRO stage 2).
        HYBRID_SHARD: ``FULL_SHARD`` over the ranks of one dim, copies of each shard over the ranks of the other.
        HYBRID_SHARD_ZERO2: ``SHARD_GRAD_OP`` over the ranks of one dim, copies over the ranks of the other.
        NO_SHARD: Every rank keeps everything, as with ``replicate``.

    Source: ZeRO, arXiv 1910.02054.
    """

    name: str
    reshard_after_forward: bool | int = True
    has_copies: bool = False

    FULL_SHARD: ClassVar["ShardingStrategy"]
    SHARD_GRAD_OP: ClassVar["ShardingStrategy"]
    HYBRID_SHARD: ClassVar["ShardingStrategy"]
    HYBRID_SHARD_ZERO2: ClassVar["ShardingStrategy"]
    NO_SHARD: ClassVar["ShardingStrategy"]

    def __post_init__(self) -> None:
        kinds = {"name": str, "reshard_after_forward": int, "has_copies": bool}
        wrong = [name for name, kind in kinds.items() if not isinstance(getattr(self, name), kind) or not self.name]
        if wrong:
            raise ConfigError(
                f"{wrong[0]} of a ShardingStrategy is {described(getattr(self, wrong[0]))}",
                fix="pass a name, then reshard_after_forward as True, False or a number, and has_copies as a bool",
            )

    def __repr__(self) -> str:
        return f"ShardingStrategy.{self.name}"


ShardingStrategy.FULL_SHARD = ShardingStrategy("FULL_SHARD")
ShardingStrategy.SHARD_GRAD_OP = ShardingStrategy("SHARD_GRAD_OP", False)
ShardingStrategy.HYBRID_SHARD = ShardingStrategy("HYBRID_SHARD", has_copies=True)
ShardingStrategy.HYBRID_SHARD_ZERO2 = ShardingStrategy("HYBRID_SHARD_ZERO2", False, has_copies=True)
ShardingStrategy.NO_SHARD = ShardingStrategy("NO_SHARD", False)
_NAMED = {name: one for name, one in vars(ShardingStrategy).items() if isinstance(one, ShardingStrategy)}


def _named(strategy: object) -> ShardingStrategy | None:
    """Return the strategy that a user gave, also by name or as torch's own; ``None`` for other values."""
    if isinstance(strategy, ShardingStrategy):
        return strategy
    kind = type(strategy)
    if kind.__name__ == "ShardingStrategy" and kind.__module__.startswith("torch."):
        strategy = getattr(strategy, "name", "").removeprefix("_")
    return _NAMED.get(strategy) if isinstance(strategy, str) else None


def is_hybrid(strategy: object) -> bool | None:
    """Say whether a strategy keeps copies of shards; ``None``: it is no strategy."""
    chosen = _named(strategy)
    return None if chosen is None else chosen.has_copies


def _checked_strategy(strategy: object, replicas: int) -> ShardingStrategy:
    """Return the strategy that a user means; ``ConfigError`` unless it can run with ``replicas`` copies of a shard."""
    names = ", ".join(repr(name) for name in _NAMED if name != "NO_SHARD")
    chosen = _named(strategy)
    if chosen is None:
        raise ConfigError(f"strategy is {strategy!r}", fix=f"pass one of {names}")
    if chosen is ShardingStrategy.NO_SHARD:
        raise ConfigError(
            "strategy NO_SHARD keeps gradients and optimizer state whole on every rank",
            fix="call replicate(module) instead, with torch's ZeroRedundancyOptimizer where optimizer state alone is "
            f"sharded; or pass one of {names}",
        )
    if replicas > 1 and not chosen.has_copies:
        raise ConfigError(
            f"strategy {chosen.name} keeps one copy of each shard, and the mesh has {replicas}",
            fix="pass HYBRID_SHARD or HYBRID_SHARD_ZERO2, or a mesh of one dim",
        )
    return chosen


@dataclass(frozen=True)
class ShardOptions:
    """The options of a plan, beside the module: the arguments of ``plan``, checked alone and together.

    Strategy and policies may be given as text, or as torch's own; the attributes are those of this library. ``hosts``
    and ``is_queued`` are as in ``ShardPlan``. Raises ``ConfigError`` if options are wrong, or contradict each other.
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
    mp_policy: Any = NO_CASTS
    offload_policy: Any = NO_OFFLOAD
    hosts: tuple[int, ...] = ()
    is_queued: bool = False

    def __post_init__(self) -> None:
        for name, what in (("world_size", "share the parameters"), ("replicas", "hold each shard")):
            check_int(name, getattr(self, name), 1, fix=f"pass the number of ranks that {what}")
        for name, fix in (
            ("align", "pass 'matrix', a dict of FQNs, or a function of an FQN and a parameter"),
            ("shard_placement_fn", "pass a function of a parameter that returns a Shard or None"),
        ):
            value = getattr(self, name)
            is_value = value is None or (name == "align" and isinstance(value, Mapping | str))
            # Modules and classes can be called too, but here they are a mistake.
            if not is_value and (not callable(value) or isinstance(value, type | nn.Module)):
                raise ConfigError(f"{name} is {described(value)}", fix=fix)
        if self.transport != "auto":
            transport_class(self.transport, "auto")
        _check_freed(self.reshard_after_forward, self.world_size)
        if self.unused_gradients not in ("none", "zero"):
            raise ConfigError(f"unused_gradients is {self.unused_gradients!r:.80}", fix="pass 'none' or 'zero'")
        if self.strategy is not None:
            if self.reshard_after_forward is not None:
                raise ConfigError(
                    "strategy and reshard_after_forward both say what is freed when", fix="pass one of them"
                )
            chosen = _checked_strategy(self.strategy, self.replicas)
            _check_freed(chosen.reshard_after_forward, self.world_size)
            object.__setattr__(self, "strategy", chosen)
        object.__setattr__(self, "mp_policy", as_mixed_precision(self.mp_policy))
        object.__setattr__(self, "offload_policy", _as_offload(self.offload_policy))

    @property
    def frees(self) -> bool | int | None:
        """Whether parameters are freed between forward and backward; ``None``: only if the module is not the root.

        An int, more than 1 and less than all ranks: all is freed except secondary shards over that many ranks.
        """
        freed = self.reshard_after_forward
        if isinstance(self.strategy, ShardingStrategy):
            freed = self.strategy.reshard_after_forward
        if freed is None or isinstance(freed, bool):
            return freed
        # A secondary shard over one rank is the whole buffer, and over all ranks it is the shard itself.
        return int(freed) if 1 < freed < self.world_size else freed > 1


def _check_freed(freed: object, world_size: int) -> None:
    """Raise ``ConfigError`` unless ``reshard_after_forward`` is a bool, ``None``, or a divisor of the ranks."""
    if freed is None or isinstance(freed, bool):
        return
    if not isinstance(freed, int):
        fix = "pass True, False, None, or the number of ranks to reshard to"
        raise ConfigError(f"reshard_after_forward is {described(freed)}", fix=fix)
    if freed < 1 or world_size % freed:
        sizes = ", ".join(str(one) for one in range(1, world_size + 1) if world_size % one == 0)
        raise ConfigError(
            f"reshard_after_forward is {freed}, and {world_size} ranks share the parameters",
            fix=f"pass a divisor of {world_size}: {sizes}; or True, False or None",
        )

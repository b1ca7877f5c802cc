"""In which dtype parameters are computed with and gradients reduced, as data.

Parameters rest, and optimizers step, in the dtype they had before the annotation. Nothing here casts
anything: the casts happen in copies that are made anyway, see ``storage/``.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import KW_ONLY, dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from composable.arguments import answer_of, check_bool
from composable.errors import ConfigError
from composable.wording import dtype_text

__all__ = ["NO_CASTS", "MixedPrecisionPolicy", "ParamDtypes", "as_mixed_precision", "skipped_modules"]

# What every backend can sum, and every device compute with.
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_NAMES = ", ".join(map(str, _DTYPES))

_OTHER_CLASSES = ("MixedPrecisionPolicy", "MixedPrecision", "_MixedPrecision")
# Options of torch's own policies by their names here; what is not named has the same name.
_OTHER_NAMES = {"_module_classes_to_ignore": "skipped_module_classes"}


class ParamDtypes(NamedTuple):
    """What one parameter is computed with, and how its gradient travels."""

    compute: torch.dtype
    reduce: torch.dtype


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of computation and of gradient reduction for the modules of one ``fully_shard`` or ``replicate`` call.

    Parameters between steps, optimizer state and reduced gradients keep the parameter's own dtype. Only
    floating-point parameters, tensors and buffers are ever cast, and only where their dtype differs: a policy
    that asks for the dtypes that are there changes nothing.

    Attributes:
        param_dtype: Of unsharded parameters, or of the copies that replicated modules compute with, and so of
            all-gathers, forward and backward. ``None``: their own.
        reduce_dtype: Of gradients in reduce-scatters and all-reduces, and of those that ``no_sync`` keeps in
            sharded modules. ``None``: that in which the parameter is computed with, ``param_dtype`` where it is given.
        output_dtype: Floating-point outputs of the annotated modules are cast to it.
        cast_forward_inputs: Cast floating-point inputs of the annotated modules to ``param_dtype``;
            autograd takes the gradient back through the cast. Of ``fully_shard``, these are all that have a handle.
        cast_root_forward_inputs: The same for the module where forward starts; ``None``: as for all others.
        buffer_dtype: Floating-point buffers are cast to it while the annotated module around them runs, and
            are their own before and after: state dicts and checkpoints never see the cast.
        keep_low_precision_grads: Gradients stay in the dtype in which they were
            reduced. Few optimizers take them; it saves memory where something else consumes them.
        skipped_module_classes: Modules of these classes, with all below, keep the dtype of their parameters and
            buffers; their inputs are cast to it, and their outputs back. Such as ``nn.LayerNorm``.
        param_dtype_override_fn: Called once with each parameter: the dtype that it is computed with, or ``None``
            for that of ``param_dtype``. Must answer alike on every rank.

    Raises:
        ConfigError: A dtype is none that ranks can reduce, or another option is of the wrong type.

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
    # What it answers is in the dtypes of the plan.
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "buffer_dtype"):
            _check_dtype(name, getattr(self, name))
        for name in ("cast_forward_inputs", "keep_low_precision_grads", "cast_root_forward_inputs"):
            what = f"{name} of the mixed precision policy"
            check_bool(what, getattr(self, name), or_none=name == "cast_root_forward_inputs")
        classes = self.skipped_module_classes
        listed = tuple(classes) if isinstance(classes, Iterable) and not isinstance(classes, str) else (classes,)
        for one in listed:
            if not isinstance(one, type) or not issubclass(one, nn.Module):
                raise ConfigError(
                    f"skipped_module_classes is or holds {one!r:.80}", fix="pass classes of modules, as a tuple"
                )
        object.__setattr__(self, "skipped_module_classes", listed)
        if self.param_dtype_override_fn is not None and not callable(self.param_dtype_override_fn):
            raise ConfigError(
                f"param_dtype_override_fn is {self.param_dtype_override_fn!r:.80}",
                fix="pass a function of a parameter that returns a dtype or None",
            )

    def dtypes_of(self, param: nn.Parameter, fqn: str, *, is_skipped: bool) -> ParamDtypes:
        """Return what becomes of a parameter.

        Raises:
            ConfigError: ``param_dtype_override_fn`` raised, or returned something else than a dtype or ``None``.
        """
        own = param.dtype
        if not own.is_floating_point:
            return ParamDtypes(own, own)
        compute = own if is_skipped or self.param_dtype is None else self.param_dtype
        if self.param_dtype_override_fn is not None:
            asked = _call(self.param_dtype_override_fn, param, fqn)
            compute = compute if asked is None else asked
        return ParamDtypes(compute, self.reduce_dtype or compute)

    def casts_inputs(self, *, is_root: bool) -> torch.dtype | None:
        """Return the dtype to which a fully sharded module casts its inputs; ``None``: it leaves them."""
        casts = self.cast_forward_inputs
        if is_root and self.cast_root_forward_inputs is not None:
            casts = self.cast_root_forward_inputs
        return self.param_dtype if casts else None

    def __str__(self) -> str:
        """Return what is not the default, as the plan prints it; empty where nothing is."""
        parts = []
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                parts.append(f"{one.name}={_text(value)}")
        return ", ".join(parts)


def as_mixed_precision(policy: object) -> MixedPrecisionPolicy:
    """Return a policy as one of ours: also torch's, of either of its sharded data parallels; ``None`` asks for nothing.

    Raises:
        ConfigError: It is none, or asks for what there is not.
    """
    if policy is None:
        return NO_CASTS
    if isinstance(policy, MixedPrecisionPolicy):
        return policy
    # By their names, as nothing of torch's sharded data parallels is imported here.
    if not is_dataclass(policy) or type(policy).__name__ not in _OTHER_CLASSES:
        raise ConfigError(f"mp_policy is {policy!r:.80}", fix="pass a composable.MixedPrecisionPolicy")
    known = {one.name for one in fields(MixedPrecisionPolicy)}
    asked: dict[str, Any] = {}
    for one in fields(policy):
        name, value = _OTHER_NAMES.get(one.name, one.name), getattr(policy, one.name)
        if name in known:
            asked[name] = value
        elif value != one.default:
            raise ConfigError(
                f"mp_policy asks for {one.name}={value!r:.80}, which is not known here",
                fix="pass a composable.MixedPrecisionPolicy",
            )
    return MixedPrecisionPolicy(**asked)


def skipped_modules(managed: Collection[nn.Module], policy: MixedPrecisionPolicy) -> dict[nn.Module, nn.Module]:
    """Return those of an annotation's modules that keep their dtype, each with the outermost one that is skipped."""
    found: dict[nn.Module, nn.Module] = {}
    if policy.skipped_module_classes:
        for module in managed:
            if module not in found and isinstance(module, policy.skipped_module_classes):
                found.update({inner: module for inner in module.modules() if inner in managed})
    return found


def _call(function: Callable[[nn.Parameter], torch.dtype | None], param: nn.Parameter, fqn: str) -> torch.dtype | None:
    at, fix = f"parameter {fqn!r}", "return a dtype, or None for param_dtype"
    asked: torch.dtype | None = answer_of("param_dtype_override_fn", function, param, at=at, fix=fix)
    if asked is not None and asked not in _DTYPES:
        raise ConfigError(f"param_dtype_override_fn returned {asked!r:.80}", at=at, fix=fix)
    return asked


def _check_dtype(name: str, dtype: object) -> None:
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"{name} of the mixed precision policy is {dtype!r:.80}", fix=f"pass one of {_NAMES}")


def _text(value: object) -> str:
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, tuple):
        return "(" + ", ".join(one.__name__ for one in value) + ")"
    # Never the repr of an object, which has its address, and ranks compare the text.
    return getattr(value, "__name__", type(value).__name__) if callable(value) else str(value)


NO_CASTS = MixedPrecisionPolicy()

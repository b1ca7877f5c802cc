"""Which modules get handles, and with which parameters.

The first half of a plan: it looks at modules and at identities of tensors, never at values or ranks. A parameter with
several names belongs to the innermost handle that is around all of its places, so that every use finds it unsharded.

Annotating gives modules new parameters. An optimizer that was built before still holds the old ones, and would update
them in vain: a mark on each old parameter says so, and leads to the new one.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.errors import ConfigError, UsageError
from composable.ground.contract import excludes, get_registry
from composable.ground.frames import modules_in_call
from composable.ground.names import (
    class_name,
    describe_module,
    dtype_text,
    fqn_in_model,
    join_fqn,
    list_text,
    module_text,
    plain_fqn,
)
from composable.ground.ownership import CHANGES, claim_of, is_sharded, keep_one, rival_on
from composable.ground.torch_private import disabled_torch_function, tree_leaves
from composable.planning.layout import RaggedShard
from composable.planning.subclasses import Form, form_of
from composable.policies import PolicyLike, has_forward, resolve_policy

_T = TypeVar("_T")
_Named: TypeAlias = tuple[str, nn.Module]
# Containers that nothing calls as one unit. Other modules without forward may have a method that users register.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_MARK = "_composable_replaced_by"


class Replacement:
    """The mark on a replaced parameter, whose name for messages is ``fqn``."""

    __slots__ = ("_module", "_name", "fqn")

    def __init__(self, fqn: str, module: nn.Module | None = None, name: str = "") -> None:
        self.fqn = fqn
        # The place, not the parameter: torch refuses to cast a parameter that has a weak reference.
        self._module = None if module is None else weakref.ref(module)
        self._name = name

    def find(self) -> nn.Parameter | None:
        """Return the parameter, of full shape, that the module has now; ``None``: the module is gone, or unsharded."""
        module = None if self._module is None else self._module()
        param = None if module is None else module._parameters.get(self._name)
        return None if param is None or replacement_of(param) is not None else param

    def fqn_in_model(self) -> str:
        """Name the parameter for an error, as the user sees it now; slow."""
        module = None if self._module is None else self._module()
        return self.fqn if module is None else fqn_in_model(module, self._name, self.fqn)

    def __reduce__(self) -> tuple[object, ...]:
        return (Replacement, (self.fqn,))


def mark_replaced(param: nn.Parameter, fqn: str, module: nn.Module, name: str) -> None:
    """Mark ``param``, of any shape, as replaced: ``module`` has another parameter under ``name``."""
    setattr(param, _MARK, Replacement(fqn, module, name))
    CHANGES.note("marks")


# What a forward may ask a replaced parameter, beside its attributes.
_HARMLESS = frozenset(
    "size dim numel stride element_size is_floating_point is_complex __hash__ __len__ __repr__".split()
)
_VALUES = frozenset("data grad T mT H mH real imag".split())


class ReplacedParameter(nn.Parameter):
    """A parameter of any shape that another one has replaced: a module's call that computes with it raises.

    Modules keep parameters in lists, closures and the like, which no annotation can find.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        is_attribute = name == "__get__" and func.__self__.__name__ not in _VALUES
        if not is_attribute and name not in _HARMLESS and modules_in_call():
            given = next(one for one in tree_leaves((args, kwargs)) if type(one) is cls)
            mark = replacement_of(given)
            fqn = "" if mark is None else mark.fqn_in_model()
            raise UsageError(
                "a forward computes with a parameter that fully_shard has replaced: it would never train",
                at=f"parameter {fqn!r}",
                fix=f"read self.{fqn.rpartition('.')[2]} in forward, from the module that has it, and not a list, "
                "dict, closure or partial that holds what it was before",
            )
        return disabled_torch_function(func, types, tuple(args), dict(kwargs or {}))


def make_useless(param: nn.Parameter) -> None:
    """Let a replaced parameter, of any shape, raise where a forward computes with it; not one of a subclass."""
    if type(param) is nn.Parameter:
        param.__class__ = ReplacedParameter


def replacement_of(param: object) -> Replacement | None:
    """Return the mark of a replaced parameter, ``None`` for one in use."""
    found: Replacement | None = getattr(param, _MARK, None)
    return found


def first_replacement(params: Sequence[object]) -> Replacement | None:
    """Return the mark of the first replaced parameter; 40 ns a parameter, since every optimizer step calls this."""
    marks: list[Replacement | None] = list(map(getattr, params, repeat(_MARK), repeat(None)))
    return None if marks.count(None) == len(marks) else next(mark for mark in marks if mark is not None)


@dataclass(eq=False)
class HandleMembers:
    """The objects that a ``HandlePlan`` names: the modules of one handle, and the parameters that it owns."""

    modules: tuple[nn.Module, ...]  # The fully sharded modules.
    fqns: tuple[str, ...]  # The FQNs of the modules, or their positions in a list.
    reason: str  # Why the modules have a handle.
    is_picked: bool  # A policy has picked the modules.
    # By FQN, in ``named_parameters()`` order; complete once the whole tree was searched.
    params: dict[str, "FoundParam"] = field(default_factory=dict)


@dataclass(eq=False)
class FoundParam:
    """One unique parameter and every place that holds it."""

    param: nn.Parameter  # The parameter.
    form: Form | None  # How it is sharded if it is of a tensor subclass; else ``None``.
    fqns: list[str] = field(default_factory=list)  # All its names, in ``named_parameters()`` order.
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)  # Every (module, attribute name) that holds it.
    # For each name, the handles around that place, innermost first.
    paths: list[tuple[HandleMembers, ...]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The kind of the parameter: ``plain``, or a kind of ``Subclass``."""
        return "plain" if self.form is None else self.form.kind

    @property
    def storage(self) -> torch.Tensor:
        """The tensor that is sharded: the parameter, or a tensor inside of it with a shape and dtype of its own."""
        return self.param if self.form is None else self.form.storage_of(self.param)

    @property
    def whole(self) -> torch.Tensor:
        """A tensor with the shape and strides of the whole parameter, also where this rank has only a block of it."""
        if self.form is None or self.form.node is None:
            return self.storage
        return torch.empty_strided(self.form.node.spec.shape, self.form.node.spec.stride, device="meta")

    @property
    def place(self) -> str:
        """The text for the parameter in an error."""
        return f"parameter {list_text(self.fqns)} {_describe_tensor(self.storage)}"


def find_structure(
    module: nn.Module | Sequence[nn.Module],
    policy: PolicyLike | None,
    ignored_params: Iterable[nn.Parameter] | None,
    ignored_modules: Iterable[nn.Module] | None,
) -> tuple[tuple[HandleMembers, ...], tuple[str, ...], tuple[str, ...]]:
    """Find the handles of an annotation on ``module``; changes nothing.

    The annotated modules may carry the annotation's own registry entry already. Raises ``ConfigError`` if an argument
    is wrong, a parameter cannot be sharded, or something else averages its gradient.

    Returns:
        The handles that own parameters, left to right, depth first; the FQNs of the outermost modules below that an
        earlier annotation manages; and the FQNs of parameters that are left alone.
    """
    starts = named_roots(module)
    root = starts[0][1]
    exclusion = _exclude(
        starts,
        _as_list("ignored_params", ignored_params, nn.Parameter),
        set(_as_list("ignored_modules", ignored_modules, nn.Module)),
    )
    picks: dict[nn.Module, str] = {}
    if policy is not None:
        if not isinstance(module, nn.Module):
            raise ConfigError(
                "policy with a list of modules, which share one handle",
                fix="call it with the policy once for each module, or once for the module around them",
            )
        policy = resolve_policy(policy)
        picks = policy.pick(root, [*exclusion.kept, *exclusion.ignored])
    search = _Search(picks, exclusion)
    handles = search.run(starts, reason="annotated" if policy is None else "root")
    if policy is not None and not any(handle.is_picked for handle in handles):
        raise ConfigError(
            f"{policy} picks only modules that own no parameters",
            at=_place("", root),
            fix="pick modules whose parameters no other handle and no earlier annotation has",
        )
    if not handles and search.has_met_sharded and not exclusion.kept:
        raise ConfigError(
            "an earlier annotation shards every parameter of this module",
            at=_place("", root),
            fix="annotate submodules before the modules around them",
        )
    return handles, tuple(exclusion.kept.values()), tuple(exclusion.ignored_fqns)


def named_roots(module: object) -> tuple[_Named, ...]:
    """Check the modules to annotate and return (FQN, module) pairs; an FQN is ``''``, or the position in the list.

    Raises ``ConfigError`` unless it is a module or a list of different modules, and none is a container without
    forward.
    """
    if not isinstance(module, list | tuple):
        return (("", _checked_root(module, None)),)
    if not module:
        raise ConfigError("the list of modules is empty", fix="pass at least one module")
    roots = tuple((str(index), _checked_root(root, f"module {index} of the list")) for index, root in enumerate(module))
    if len({root for _, root in roots}) < len(roots):
        raise ConfigError("a module is in the list twice", fix="pass each module once")
    return roots


def _checked_root(root: object, at: str | None) -> nn.Module:
    if not isinstance(root, nn.Module):
        raise ConfigError(
            f"{type(root).__name__} is not an nn.Module", at=at, fix="pass an nn.Module or a list of them"
        )
    if isinstance(root, _CONTAINERS) and not has_forward(root):
        raise ConfigError(
            f"{class_name(root)} has no forward, so it is never called as one unit",
            at=at,
            fix="pass its children, one by one or as a list",
        )
    return root


def name_modules(roots: Sequence[nn.Module]) -> dict[nn.Module, str]:
    """Return the FQN of every module at or below ``roots``; with several roots, it begins with the root's position."""
    names: dict[nn.Module, str] = {}
    for position, root in enumerate(roots):
        prefix = str(position) if len(roots) > 1 else ""
        for fqn, module in root.named_modules(prefix=prefix):
            names.setdefault(module, plain_fqn(fqn))
    return names


def managed_modules(roots: Iterable[nn.Module], ignored: frozenset[nn.Module]) -> Iterator[nn.Module]:
    """Yield the modules of one annotation, in ``modules()`` order, except ignored and separately annotated ones."""
    starts = tuple(roots)

    def is_left(module: nn.Module) -> bool:
        return module in ignored or (_is_annotated(module) and module not in starts)

    return (module for _, module in _walk([("", root) for root in starts], set(), is_left) if not is_left(module))


def _is_annotated(module: nn.Module) -> bool:
    return "fully_shard" in get_registry(module) or excludes(module, "fully_shard")


def _walk(starts: Sequence[_Named], seen: set[nn.Module], is_leaf: Callable[[nn.Module], bool]) -> Iterator[_Named]:
    """Yield (FQN, module) depth first, left to right, each module once; a leaf is not entered."""
    stack = [*reversed(starts)]
    while stack:
        fqn, module = stack.pop()
        if module not in seen:
            seen.add(module)
            yield fqn, module
            if not is_leaf(module):
                stack.extend(reversed(_children(fqn, module)))


def _children(fqn: str, module: nn.Module) -> list[_Named]:
    return [(join_fqn(fqn, name), child) for name, child in module._modules.items() if child is not None]


@dataclass(eq=False)
class _Exclusion:
    """The modules and parameters that an annotation does not touch."""

    ignored_params: set[int]  # Ids of parameters to leave alone.
    # Every module that is not entered, by whatever path it is reached.
    modules: set[nn.Module] = field(default_factory=set)
    # Outermost modules with an earlier ``fully_shard``, with their FQNs.
    kept: dict[nn.Module, str] = field(default_factory=dict)
    ignored: list[nn.Module] = field(default_factory=list)  # Other outermost modules that are not entered.
    # Ids of unsharded parameters below ``kept``, with the module, the name there and the FQN.
    left_params: dict[int, tuple[nn.Module, str, str]] = field(default_factory=dict)
    ignored_fqns: list[str] = field(default_factory=list)  # The first name of each ignored parameter that was found.


def _exclude(starts: Sequence[_Named], params: list[nn.Parameter], to_ignore: set[nn.Module]) -> _Exclusion:
    """Find the subtrees that must not be entered: ignored, replicated, or annotated before.

    Raises ``ConfigError`` if an ignored parameter is sharded already, or roots are nested.
    """
    roots = {root for _, root in starts}
    if roots & to_ignore:
        raise ConfigError("ignored_modules has the annotated module itself", fix="pass modules below it")
    found = _Exclusion({id(param) for param in params})

    def is_leaf(module: nn.Module) -> bool:
        return module not in roots and (module in to_ignore or _is_annotated(module))

    for fqn, module in _walk(starts, set(), is_leaf):
        if not is_leaf(module):
            for inner_fqn, inner in _children(fqn, module):
                if inner in roots:
                    raise ConfigError(
                        "a module to annotate is inside another one of the same call",
                        at=_place(inner_fqn, inner),
                        fix="pass the outer module alone, or annotate the inner one first",
                    )
            continue
        is_kept = module not in to_ignore and not excludes(module, "fully_shard")
        if is_kept:
            found.kept[module] = fqn
        else:
            found.ignored.append(module)
        for inner_fqn, inner in _walk([(fqn, module)], found.modules, lambda _: False):
            for name, param in _own_params(inner):
                if _is_ragged(param):
                    continue
                if is_kept:
                    found.left_params.setdefault(id(param), (inner, name, join_fqn(inner_fqn, name)))
                elif id(param) not in found.ignored_params:
                    found.ignored_params.add(id(param))
                    found.ignored_fqns.append(join_fqn(inner_fqn, name))
    # Modules and parameters outside of this tree are no mistake: one set serves the calls on all parts of a model.
    for index, param in enumerate(params):
        if (replacement := replacement_of(param)) is not None:
            raise ConfigError(
                f"an earlier annotation has taken and sharded an ignored parameter, as '{replacement.fqn}'",
                at=f"ignored_params[{index}] {_describe_tensor(param)}",
                fix="pass it in ignored_params of that call too",
            )
    return found


class _Search:
    """One walk over the tree that collects parameters, with the handles around each of their places."""

    def __init__(self, picks: dict[nn.Module, str], exclusion: _Exclusion) -> None:
        self.has_met_sharded = False
        self._picks = picks
        self._exclusion = exclusion
        self._picked: dict[nn.Module, HandleMembers] = {}
        self._found: dict[int, FoundParam] = {}
        self._visited: set[nn.Module] = set()
        self._named_ignored: set[int] = set()

    def run(self, starts: Sequence[_Named], *, reason: str) -> tuple[HandleMembers, ...]:
        """Return the handles that own parameters, outermost first."""
        fqns, roots = zip(*starts, strict=True)
        root_handle = HandleMembers(roots, fqns, reason, is_picked=False)
        # A module that is found again is entered again: its parameters have other names there, and
        # other handles around them. The modules around the current one are remembered against cycles.
        around: set[nn.Module] = set()
        # An entry without handles says that the inside of its module is done.
        stack: list[tuple[str, nn.Module, tuple[HandleMembers, ...]]] = [
            (fqn, root, (root_handle,)) for fqn, root in reversed(starts)
        ]
        while stack:
            fqn, module, handles = stack.pop()
            if not handles:
                around.remove(module)
            elif module not in around and module not in self._exclusion.modules:
                around.add(module)
                stack.append((fqn, module, ()))
                if module in self._picks:
                    picked = HandleMembers((module,), (fqn,), self._picks[module], is_picked=True)
                    handles = (self._picked.setdefault(module, picked), *handles)
                self._collect(fqn, module, handles)
                stack.extend((name, child, handles) for name, child in reversed(_children(fqn, module)))
        for found in self._found.values():
            first, *others = found.paths
            next(handle for handle in first if all(handle in path for path in others)).params[found.fqns[0]] = found
            found.paths.clear()  # They make a cycle, and a replaced parameter should be freed at once.
        return tuple(handle for handle in (root_handle, *self._picked.values()) if handle.params)

    def _collect(self, fqn: str, module: nn.Module, handles: tuple[HandleMembers, ...]) -> None:
        is_first_visit = module not in self._visited
        rival = rival_on(module) if is_first_visit else None
        if rival is not None:
            raise ConfigError(
                f"two things would average these gradients: fully_shard and {rival}",
                at=_place(fqn, module),
                fix=keep_one(rival),
            )
        self._visited.add(module)
        for name, param in _own_params(module):
            if _is_ragged(param):
                self.has_met_sharded = True
                continue
            param_fqn = join_fqn(fqn, name)
            if id(param) in self._exclusion.ignored_params:
                if is_first_visit and id(param) not in self._named_ignored:
                    self._named_ignored.add(id(param))
                    self._exclusion.ignored_fqns.append(param_fqn)
                continue
            if id(param) not in self._found:
                try:
                    form = self._form_of(param, module, name, param_fqn)
                except ConfigError as error:
                    error.within = f"parameter '{fqn_in_model(module, name, param_fqn)}' {_describe_tensor(param)}"
                    raise
                self._found[id(param)] = FoundParam(param, form)
            found = self._found[id(param)]
            found.fqns.append(param_fqn)
            found.paths.append(handles)
            if is_first_visit:
                found.owners.append((module, name))

    def _form_of(self, param: nn.Parameter, module: nn.Module, name: str, fqn: str) -> Form | None:
        """Return the form of a parameter; refuse one that others have, or that a flat buffer would lose or corrupt."""
        if (replacement := replacement_of(param)) is not None:
            raise ConfigError(
                f"parameter '{fqn_in_model(module, name, fqn)}' is tied to '{replacement.fqn_in_model()}', "
                "which an earlier annotation has taken and sharded",
                fix="annotate the module around both of them, with a policy, or all modules that share it in one list",
            )
        if (other := self._exclusion.left_params.get(id(param))) is not None:
            raise ConfigError(
                f"parameter '{fqn_in_model(module, name, fqn)}' is tied to '{fqn_in_model(*other)}', "
                "which an earlier annotation ignores",
                fix="name it in ignored_params here too, or in neither call",
            )
        if (claim := claim_of(param)) is not None:
            others: tuple[nn.Module, ...] = getattr(claim.owner, "modules", ())
            raise ConfigError(
                f"replicate averages parameter '{fqn}' already, as '{claim.fqn}' of "
                f"{' and '.join(map(describe_module, others))}",
                fix="annotate an inner module before the outer one, and have one annotation for modules that share it",
            )
        if is_sharded(param):
            raise ConfigError(
                f"an earlier annotation shards parameter '{fqn}', which is unsharded at the moment",
                fix="annotate submodules before the modules around them",
            )
        if nn.parameter.is_lazy(param):
            fix = "run one forward of the module before annotating it"
            raise ConfigError("a lazy parameter has no shape yet", fix=fix)
        form = form_of(param)
        storage = param if form is None else form.storage_of(param)
        if storage.layout is not torch.strided or storage.is_quantized:
            raise ConfigError("the parameter is not dense", fix="name it in ignored_params, or make it dense")
        if storage.is_complex():
            raise ConfigError(
                "complex parameters cannot be communicated",
                fix="hold its torch.view_as_real as the parameter, or name it in ignored_params",
            )
        return form


def _as_list(name: str, values: Iterable[_T] | None, kind: type[_T]) -> list[_T]:
    # One tensor and one ModuleList are iterable too, but their items are not what the user means.
    if isinstance(values, torch.Tensor | nn.Module) or not isinstance(values, Iterable | None):
        raise ConfigError(f"{name} is one {type(values).__name__}", fix="pass a list")
    found = [] if values is None else list(values)
    for index, value in enumerate(found):
        if not isinstance(value, kind):
            raise ConfigError(f"{name}[{index}] is {type(value).__name__}", fix=f"pass {kind.__name__} objects only")
    return found


def _own_params(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in module._parameters.items() if param is not None]


def _is_ragged(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor) and any(isinstance(placement, RaggedShard) for placement in param.placements)


def _place(fqn: str, module: nn.Module) -> str:
    return module_text(fqn, class_name(module))


def _describe_tensor(tensor: torch.Tensor) -> str:
    shape = "[?]" if nn.parameter.is_lazy(tensor) else str(list(tensor.shape))
    return f"{shape} {dtype_text(tensor.dtype)}"

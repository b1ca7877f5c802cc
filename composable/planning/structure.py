"""Which modules get a handle, and which parameters each handle owns.

The first half of a plan: it looks at a module tree and at identities, never at values or
ranks. A parameter with several names belongs to the innermost handle that is around all of
its places, so that every use finds it unsharded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.claims import claim_of, is_sharded, keep_one, rival_on
from composable.contract import excludes, get_registry
from composable.errors import ConfigError
from composable.fqns import describe_module, fqn_in_model
from composable.planning.cut import RaggedShard
from composable.planning.replaced import replacement_of
from composable.planning.subclasses import Form, SplitNode, form_of
from composable.policies import PolicyLike, has_forward, resolve_policy
from composable.wording import class_name, dtype_text, join_fqn, module_text

__all__ = ["FoundHandle", "FoundParam", "Structure", "find_structure", "named_roots"]

_T = TypeVar("_T")
# Nothing in them can be called as one unit; of others without forward a method may be, once it is registered.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(eq=False)
class FoundParam:
    """One unique parameter and every place that holds it.

    Attributes:
        param: The parameter.
        fqns: All its names, in ``named_parameters()`` order.
        owners: Every (module, attribute name) that holds it.
        paths: For each name, the handles around that place.
        form: How it is sharded where it is of a tensor subclass.
        storage: What is sharded of it: itself, or a tensor inside.
    """

    param: nn.Parameter
    fqns: list[str] = field(default_factory=list)
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    paths: list["_Path"] = field(default_factory=list)
    form: Form | None = None

    @property
    def storage(self) -> torch.Tensor:
        return self.param if self.form is None else self.form.storage_of(self.param)

    @property
    def whole(self) -> torch.Tensor:
        """What is alike on ranks that have other blocks of a split parameter, as far as shape and strides go."""
        form = self.form
        if form is None or not isinstance(form.node, SplitNode):
            return self.storage
        return torch.empty_strided(form.node.spec.shape, form.node.spec.stride, device="meta")

    def lowest_common_handle(self) -> "FoundHandle":
        """Return the innermost handle that is around every place."""
        path, *others = self.paths
        around = [set(other.handles()) for other in others]
        return next(handle for handle in path.handles() if all(handle in handles for handles in around))


@dataclass(eq=False)
class FoundHandle:
    """Modules that get one handle, and the parameters it owns, in ``named_parameters()`` order."""

    modules: tuple[nn.Module, ...]
    fqns: tuple[str, ...]
    reason: str
    is_picked: bool
    params: list[FoundParam] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Structure:
    """What one annotation manages.

    Attributes:
        handles: Those that own parameters, left to right, depth first.
        kept_fqns: Outermost modules below that an earlier annotation manages.
        ignored_fqns: Parameters left alone.
    """

    handles: tuple[FoundHandle, ...]
    kept_fqns: tuple[str, ...]
    ignored_fqns: tuple[str, ...]


def find_structure(
    module: nn.Module | Sequence[nn.Module],
    policy: PolicyLike | None,
    ignored_params: Iterable[nn.Parameter] | None,
    ignored_modules: Iterable[nn.Module] | None,
    byte_classes: Sequence[type[torch.Tensor]] = (),
) -> Structure:
    """Find the handles of an annotation on ``module``; changes nothing.

    The annotated modules may carry the annotation's own registry entry already. Parameters of ``byte_classes`` are
    sharded as bytes.

    Raises:
        ConfigError: An argument is wrong, or a parameter cannot be sharded, or something else averages its gradient.
    """
    starts = named_roots(module)
    root = starts[0][1]
    exclusion = _exclude(starts, ignored_params, ignored_modules)
    picks: dict[nn.Module, str] = {}
    if policy is not None:
        if not isinstance(module, nn.Module):
            raise ConfigError(
                "policy with a list of modules, which share one handle",
                fix="call it with the policy for each module, or for the module above them",
            )
        policy = resolve_policy(policy)
        picks = policy.pick(root, [*exclusion.kept, *exclusion.ignored])
    search = _Search(picks, exclusion, byte_classes)
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
    return Structure(handles, tuple(exclusion.kept.values()), tuple(exclusion.ignored_fqns))


def named_roots(module: object) -> tuple[tuple[str, nn.Module], ...]:
    """Check what is to be annotated and return (FQN, module) pairs: ``''``, or positions in a list.

    Raises:
        ConfigError: It is neither a module nor a list of different modules, or one is a container without forward.
    """
    if not isinstance(module, list | tuple):
        return (("", _checked_root(module, None)),)
    if not module:
        raise ConfigError("the list of modules is empty", fix="pass at least one module")
    roots = tuple((str(index), _checked_root(root, index)) for index, root in enumerate(module))
    if len({root for _, root in roots}) < len(roots):
        raise ConfigError("a module is in the list twice", fix="pass each module once")
    return roots


def _checked_root(root: object, index: int | None) -> nn.Module:
    at = None if index is None else f"module {index} of the list"
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


@dataclass(eq=False)
class _Exclusion:
    """What an annotation does not touch.

    Attributes:
        modules: Every module that is not entered, by whatever path it is reached.
        kept: Outermost modules with an earlier ``fully_shard``, with their FQNs.
        ignored: Outermost modules that are ignored, replicated, or carry another API that excludes ``fully_shard``.
        left_params: Ids of unsharded parameters below ``kept``, with the module, the name there and the FQN.
        ignored_params: Ids of parameters to leave alone.
        ignored_fqns: The first name of each that was met.
    """

    modules: set[nn.Module] = field(default_factory=set)
    kept: dict[nn.Module, str] = field(default_factory=dict)
    ignored: list[nn.Module] = field(default_factory=list)
    left_params: dict[int, tuple[nn.Module, str, str]] = field(default_factory=dict)
    ignored_params: set[int] = field(default_factory=set)
    ignored_fqns: list[str] = field(default_factory=list)


def _exclude(
    starts: Sequence[tuple[str, nn.Module]],
    ignored_params: Iterable[nn.Parameter] | None,
    ignored_modules: Iterable[nn.Module] | None,
) -> _Exclusion:
    """Find what must not be entered: ignored and replicated subtrees, and those annotated before.

    Raises:
        ConfigError: An ignored parameter is sharded already, or roots are nested.
    """
    params = _as_list("ignored_params", ignored_params, nn.Parameter)
    modules = _as_list("ignored_modules", ignored_modules, nn.Module)
    roots = {root for _, root in starts}
    to_ignore = set(modules)
    if roots & to_ignore:
        raise ConfigError("ignored_modules has the annotated module itself", fix="pass modules below it")
    found = _Exclusion(ignored_params={id(param) for param in params})

    def is_leaf(module: nn.Module) -> bool:
        return module not in roots and (
            module in to_ignore or "fully_shard" in get_registry(module) or excludes(module, "fully_shard")
        )

    for fqn, module in _walk(starts, set(), is_leaf):
        if not is_leaf(module):
            inner = next((name for name, child in module._modules.items() if child in roots), None)
            if inner is not None:
                raise ConfigError(
                    "a module to annotate is inside another one of the same call",
                    at=_place(join_fqn(fqn, inner), module._modules[inner]),
                    fix="pass the outer module alone, or annotate the inner one first",
                )
            continue
        is_kept = module not in to_ignore and not excludes(module, "fully_shard")
        if is_kept:
            found.kept[module] = fqn
        else:
            found.ignored.append(module)
        for inner_fqn, inner_module in _walk([(fqn, module)], found.modules, lambda _: False):
            for name, param in _own_params(inner_module):
                if _is_sharded(param):
                    continue
                if is_kept:
                    found.left_params.setdefault(id(param), (inner_module, name, join_fqn(inner_fqn, name)))
                elif id(param) not in found.ignored_params:
                    found.ignored_params.add(id(param))
                    found.ignored_fqns.append(join_fqn(inner_fqn, name))
    # Modules and parameters from elsewhere are no mistake: one set serves the calls on all parts of a model.
    for index, param in enumerate(params):
        replacement = replacement_of(param)
        if replacement is not None:
            raise ConfigError(
                f"an earlier annotation has taken and sharded an ignored parameter, as '{replacement.fqn}'",
                at=f"ignored_params[{index}] {_describe_tensor(param)}",
                fix="pass it in ignored_params of that call too",
            )
    return found


class _Search:
    """One walk over the tree that collects parameters, with the handles around each of their places."""

    def __init__(
        self, picks: dict[nn.Module, str], exclusion: _Exclusion, byte_classes: Sequence[type[torch.Tensor]]
    ) -> None:
        self.has_met_sharded = False
        self._byte_classes = byte_classes
        self._picks = picks
        self._exclusion = exclusion
        self._picked: dict[nn.Module, FoundHandle] = {}
        self._found: dict[int, FoundParam] = {}
        self._visited: set[nn.Module] = set()
        self._named_ignored: set[int] = set()

    def run(self, starts: Sequence[tuple[str, nn.Module]], *, reason: str) -> tuple[FoundHandle, ...]:
        """Return the handles that own parameters, outermost first."""
        root_handle = FoundHandle(
            tuple(root for _, root in starts), tuple(fqn for fqn, _ in starts), reason, is_picked=False
        )
        outermost = _Path(root_handle, None)
        # A module met again is entered again: its parameters have other names there, and other
        # handles around them. The modules around the current one are remembered against cycles.
        around: set[nn.Module] = set()
        stack: list[tuple[str, nn.Module, _Path | None]] = [(fqn, root, outermost) for fqn, root in reversed(starts)]
        while stack:
            fqn, module, path = stack.pop()
            if path is None:
                around.remove(module)
                continue
            if module in around or module in self._exclusion.modules:
                continue
            around.add(module)
            stack.append((fqn, module, None))
            if module in self._picks:
                path = _Path(self._handle_of(module, fqn), path)
            self._collect(fqn, module, path)
            stack.extend(
                (join_fqn(fqn, name), child, path)
                for name, child in reversed(module._modules.items())
                if child is not None
            )
        for found in self._found.values():
            found.lowest_common_handle().params.append(found)
        return tuple(handle for handle in (root_handle, *self._picked.values()) if handle.params)

    def _handle_of(self, module: nn.Module, fqn: str) -> FoundHandle:
        if module not in self._picked:
            self._picked[module] = FoundHandle((module,), (fqn,), self._picks[module], is_picked=True)
        return self._picked[module]

    def _collect(self, fqn: str, module: nn.Module, path: "_Path") -> None:
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
            if _is_sharded(param):
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
                    form = self._check(param, module, name, param_fqn)
                except ConfigError as error:
                    error.at = f"parameter '{fqn_in_model(module, name, param_fqn)}' {_describe_tensor(param)}"
                    raise
                self._found[id(param)] = FoundParam(param, form=form)
            found = self._found[id(param)]
            found.fqns.append(param_fqn)
            found.paths.append(path)
            if is_first_visit:
                found.owners.append((module, name))

    def _check(self, param: nn.Parameter, module: nn.Module, name: str, fqn: str) -> Form | None:
        replacement = replacement_of(param)
        if replacement is not None:
            raise ConfigError(
                f"parameter '{fqn_in_model(module, name, fqn)}' is tied to '{replacement.fqn_in_model()}', "
                "which an earlier annotation has taken and sharded",
                fix="annotate the module around both of them, with a policy, or all modules that share it in one list",
            )
        other = self._exclusion.left_params.get(id(param))
        if other is not None:
            raise ConfigError(
                f"parameter '{fqn_in_model(module, name, fqn)}' is tied to '{fqn_in_model(*other)}', "
                "which an earlier annotation ignores",
                fix="name it in ignored_params here too, or in neither call",
            )
        claim = claim_of(param)
        if claim is not None:
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
        return _form_of(param, self._byte_classes)


@dataclass(frozen=True, eq=False)
class _Path:
    """The handles around a place in the tree, innermost first."""

    handle: FoundHandle
    outer: "_Path | None"

    def handles(self) -> Iterator[FoundHandle]:
        path: _Path | None = self
        while path is not None:
            yield path.handle
            path = path.outer


def _form_of(param: nn.Parameter, byte_classes: Sequence[type[torch.Tensor]]) -> Form | None:
    """Return how a parameter of a subclass is sharded; refuse what a flat buffer would lose or corrupt."""
    if nn.parameter.is_lazy(param):
        raise ConfigError("a lazy parameter has no shape yet", fix="run one forward of the module before annotating it")
    form = form_of(param, byte_classes)
    storage = param if form is None else form.storage_of(param)
    if storage.layout is not torch.strided or storage.is_quantized:
        raise ConfigError("the parameter is not dense", fix="name it in ignored_params, or make it dense")
    if storage.is_complex():
        raise ConfigError(
            "complex parameters cannot be communicated",
            fix="hold its torch.view_as_real as the parameter, or name it in ignored_params",
        )
    return form


def _walk(
    starts: Sequence[tuple[str, nn.Module]], seen: set[nn.Module], is_leaf: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (FQN, module) depth first, left to right, each module once; a leaf is not entered."""
    stack = [*reversed(starts)]
    while stack:
        fqn, module = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield fqn, module
        if not is_leaf(module):
            stack.extend(
                (join_fqn(fqn, name), child) for name, child in reversed(module._modules.items()) if child is not None
            )


def _as_list(name: str, values: Iterable[_T] | None, kind: type[_T]) -> list[_T]:
    # One tensor and one ModuleList are iterable themselves, and would mean something else.
    if isinstance(values, torch.Tensor | nn.Module) or not isinstance(values, Iterable | None):
        raise ConfigError(f"{name} is one {type(values).__name__}", fix="pass a list")
    found = [] if values is None else list(values)
    for index, value in enumerate(found):
        if not isinstance(value, kind):
            raise ConfigError(f"{name}[{index}] is {type(value).__name__}", fix=f"pass {kind.__name__} objects only")
    return found


def _own_params(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, param) for name, param in module._parameters.items() if param is not None]


def _is_sharded(param: torch.Tensor) -> bool:
    return isinstance(param, DTensor) and any(isinstance(placement, RaggedShard) for placement in param.placements)


def _place(fqn: str, module: nn.Module | None) -> str:
    return module_text(fqn, class_name(module))


def _describe_tensor(tensor: torch.Tensor) -> str:
    shape = "[?]" if nn.parameter.is_lazy(tensor) else str(list(tensor.shape))
    return f"{shape} {dtype_text(tensor.dtype)}"

"""Policies, which choose the submodules that get handles.

A policy looks at the tree below the annotated module and picks submodules, each with the
reason that the plan prints. It never picks the annotated module itself, nor anything below
an excluded module: one that is ignored, or was annotated by hand before.
"""

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from torch import nn

from composable.errors import ConfigError
from composable.ground.contract import modules_in
from composable.ground.names import answer_of, check_int, class_name, described, join_fqn, module_text

_CLASSES_IN_HINT = 5


class Policy(ABC):
    """A rule that chooses submodules; errors and plans call it ``str(policy)``."""

    def pick(self, root: nn.Module, excluded: Collection[nn.Module] = ()) -> dict[nn.Module, str]:
        """Return the picked submodules of ``root`` in ``named_modules()`` order, each with the reason.

        Args:
            root: The annotated module; never picked.
            excluded: Not picked, nor is any module below them, by whatever path it is reached.

        Raises:
            ConfigError: The policy picks nothing, or a module that is never called as one unit.
        """
        tree = _Tree(root, excluded)
        picked = self._choose(tree)
        for module in picked:
            if not has_forward(module):
                raise ConfigError(
                    f"{self} picks a module without forward, which is never called as one unit",
                    at=module_text(tree.fqns[module], class_name(module)),
                    fix="pick the modules inside it, or the one that calls them",
                )
        if not picked:
            common = Counter(class_name(module) for module in tree.fqns).most_common(_CLASSES_IN_HINT)
            seen = ", ".join(f"{count} {name}" for name, count in common) or "none"
            raise ConfigError(
                f"{self} picks nothing apart from ignored or annotated modules",
                at=f"module {class_name(root)}; most frequent submodules: {seen}",
                fix="change the policy so that it picks at least one submodule, or leave it out",
            )
        return picked

    @abstractmethod
    def _choose(self, tree: "_Tree") -> dict[nn.Module, str]: ...


@dataclass(frozen=True)
class ModuleWrapPolicy(Policy):
    """A policy that gives a handle to every submodule of some classes; ``{Block}`` means the same.

    Attributes:
        module_classes: The classes; modules of their subclasses are picked too.

    Raises:
        ConfigError: ``module_classes`` is empty, or holds something else than classes of modules.
    """

    module_classes: frozenset[type[nn.Module]]

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        classes = frozenset(module_classes) if isinstance(module_classes, Iterable) else frozenset({None})
        if not classes or not all(isinstance(cls, type) and issubclass(cls, nn.Module) for cls in classes):
            raise ConfigError(
                f"module_classes is {described(module_classes) if classes else 'empty'}, not a set of classes alone",
                fix="pass classes in a set, such as {Block}; for single modules: lambda module: module is model.head",
            )
        object.__setattr__(self, "module_classes", classes)

    def __str__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(sorted(cls.__name__ for cls in self.module_classes))}}})"

    def _choose(self, tree: "_Tree") -> dict[nn.Module, str]:
        # The class is named as the user gave it: an annotation may have swapped the module's own.
        by_name = sorted(self.module_classes, key=lambda cls: cls.__name__)
        found = ((module, next((cls for cls in by_name if isinstance(module, cls)), None)) for module in tree.fqns)
        return {module: f"policy: {cls.__name__}" for module, cls in found if cls is not None}


@dataclass(frozen=True)
class CustomPolicy(Policy):
    """A policy that gives a handle to every submodule that a function picks; the function alone means the same.

    Attributes:
        predicate: Called with each submodule; returns ``True`` to pick it, else ``False``.

    Raises:
        ConfigError: ``predicate`` is no function.
    """

    predicate: Callable[[nn.Module], bool]

    def __post_init__(self) -> None:
        if not callable(self.predicate) or isinstance(self.predicate, type | nn.Module):
            raise ConfigError(f"predicate is {_name_of(self.predicate)}", fix="pass a function of one module")

    def __str__(self) -> str:
        return f"CustomPolicy({_name_of(self.predicate)})"

    def _choose(self, tree: "_Tree") -> dict[nn.Module, str]:
        picked = [module for module in tree.fqns if tree.asked(module, self.predicate, module)]
        return dict.fromkeys(picked, f"policy: {_name_of(self.predicate)}")


@dataclass(frozen=True)
class SizePolicy(Policy):
    """A policy by size: from the leaves up, a module with enough elements that no deeper handle has gets a handle.

    The rest, fewer than ``min_numel`` elements in each branch, belongs to the handle above or to the annotated module.
    Modules without ``forward``, such as ``ModuleList``, get none.

    Attributes:
        min_numel: Elements of parameters that a module needs to get a handle.

    Raises:
        ConfigError: ``min_numel`` is no int of at least 1.
    """

    min_numel: int

    def __post_init__(self) -> None:
        check_int("min_numel", self.min_numel, 1, fix="pass a number of elements as an int, at least 1")

    def __str__(self) -> str:
        return f"SizePolicy({self.min_numel})"

    def _choose(self, tree: "_Tree") -> dict[nn.Module, str]:
        numels = tree.own_numels()
        picked: dict[nn.Module, str] = {}
        for module in reversed(tree.fqns):
            if numels[module] >= self.min_numel and has_forward(module):
                picked[module] = f"policy: {numels[module]} elements >= {self.min_numel}"
            elif (parent := tree.parents[module]) in numels:
                numels[parent] += numels[module]
        return dict(reversed(picked.items()))


@dataclass(frozen=True)
class _AutoWrapPolicy(Policy):
    """A policy that calls a function as torch's ``FullyShardedDataParallel`` calls its ``auto_wrap_policy``.

    ``function(module=, recurse=, nonwrapped_numel=)`` says from the top down which modules to look into, then from the
    bottom up which to pick, given how many elements no picked module has. Modules without ``forward`` are passed over.
    """

    function: Callable[..., bool]

    def __str__(self) -> str:
        return _name_of(self.function)

    def _choose(self, tree: "_Tree") -> dict[nn.Module, str]:
        numels = tree.own_numels()
        inside = {tree.root: sum(param.numel() for param in tree.root.parameters(recurse=False)), **numels}
        for module in reversed(tree.fqns):
            inside[tree.parents[module]] += inside[module]

        def ask(module: nn.Module, numel: int, *, recurse: bool) -> bool:
            return tree.asked(module, self.function, module=module, recurse=recurse, nonwrapped_numel=numel)

        entered: set[nn.Module] = set()
        for module in inside:
            is_in_sight = module is tree.root or tree.parents[module] in entered
            if is_in_sight and ask(module, inside[module], recurse=True):
                entered.add(module)
        picked: dict[nn.Module, str] = {}
        taken = dict.fromkeys(inside, 0)
        for module in reversed(tree.fqns):
            left = inside[module] - taken[module]
            if module in entered and has_forward(module) and ask(module, left, recurse=False):
                picked[module] = f"policy: {self}"
                taken[module] = inside[module]
            taken[tree.parents[module]] += taken[module]
        return dict(reversed(picked.items()))


PolicyLike: TypeAlias = Policy | AbstractSet[type[nn.Module]] | Callable[..., bool]


def resolve_policy(policy: PolicyLike) -> Policy:
    """Return the policy object for a value of the argument ``policy``; raises ``ConfigError`` for other kinds."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, AbstractSet):
        return ModuleWrapPolicy(policy)
    if callable(policy) and not isinstance(policy, type | nn.Module):
        return _AutoWrapPolicy(policy) if _asks_as_torch(policy) else CustomPolicy(policy)
    raise ConfigError(
        f"policy is {described(policy)}",
        fix="pass a set of classes, such as {Block}, a function of one module that returns a bool, ModuleWrapPolicy, "
        "CustomPolicy, SizePolicy, or an auto_wrap_policy of torch; for torch's CustomPolicy pass its function",
    )


def _asks_as_torch(policy: Callable[..., bool]) -> bool:
    """Say whether a function takes the arguments of torch's ``auto_wrap_policy``, rather than one module."""
    try:
        params = inspect.signature(policy).parameters.values()
    except (TypeError, ValueError):
        return False  # a builtin without a signature
    takes_anything = {param.kind.name for param in params} == {"VAR_POSITIONAL", "VAR_KEYWORD"}
    return takes_anything or any(param.name == "recurse" for param in params)


def has_forward(module: nn.Module) -> bool:
    """Say whether ``module`` can be called; containers such as ``ModuleList`` cannot."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


class _Tree:
    """The submodules of a root that may be picked, depth first, left to right."""

    def __init__(self, root: nn.Module, excluded: Collection[nn.Module]) -> None:
        self.fqns: dict[nn.Module, str] = {}  # Submodule -> FQN below the root.
        self.parents: dict[nn.Module, nn.Module] = {}  # Submodule -> the module it was reached from.
        self.root = root  # The module above them.
        seen = {root, *(below for module in excluded for below in modules_in(module))}
        stack: list[tuple[nn.Module, str, nn.Module]] = [(root, "", root)]
        while stack:
            parent, fqn, module = stack.pop()
            if module is not root:
                if module in seen:
                    continue
                seen.add(module)
                self.fqns[module], self.parents[module] = fqn, parent
            children = [(name, child) for name, child in module._modules.items() if child is not None]
            stack.extend((module, join_fqn(fqn, name), child) for name, child in reversed(children))

    def asked(self, module: nn.Module, function: Callable[..., object], /, *args: object, **kwargs: object) -> bool:
        """Return the answer of a user's function about a module; raise ``ConfigError`` unless it is a bool."""
        name, at = f"policy {_name_of(function)}", module_text(self.fqns.get(module, ""), class_name(module))
        fix = "take one module, or what torch's auto_wrap_policy takes; return True to pick the module, else False"
        answer = answer_of(name, partial(function, *args, **kwargs), at=at, fix=fix)
        if not isinstance(answer, bool):
            raise ConfigError(f"{name} returned {type(answer).__name__}, not bool", at=at, fix=fix)
        return answer

    def own_numels(self) -> dict[nn.Module, int]:
        """Return the number of elements that each module owns itself; a tied parameter counts at its first module."""
        numels: dict[nn.Module, int] = {}
        counted: set[int] = set()
        for module in self.fqns:
            own = [param for param in module._parameters.values() if param is not None and id(param) not in counted]
            counted.update(id(param) for param in own)
            numels[module] = sum(param.numel() for param in own)
        return numels


def _name_of(value: object) -> str:
    """Name a function, also inside of a partial one, or describe another value."""
    name = getattr(getattr(value, "func", value), "__name__", None)
    if isinstance(name, str) and not isinstance(value, type):
        return name
    return type(value).__name__ if callable(value) and not isinstance(value, type) else described(value)

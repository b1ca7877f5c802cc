"""Whether something trainable was added below a sharded module after the annotation, which nothing would average.

A frozen parameter that is added is none of our business: every rank holds it whole.
"""

from collections.abc import Collection, Iterator
from typing import Protocol

from torch import nn

import _traversal_utils
from composable.claims import is_managed
from composable.contract import excludes
from composable.engine import Handle, forget_torch_hooks, refuse_steppers, step_torch_optimizers
from composable.errors import UsageError, place_of_rank
from composable.frames import is_functional_call
from composable.planning import name_modules
from composable.registrations import (
    Contents,
    check_callers,
    count_registrations,
    is_left_alone,
    watch_registrations,
)
from composable.torch_private import optimizers_in_backward
from composable.wording import join_fqn, list_text

__all__ = ["Additions"]


class _Annotated(Protocol):
    """What is asked of the state of an annotation."""

    ignored_modules: frozenset[nn.Module]
    ignored_slots: list[tuple[nn.Module, str]]
    _handles: list[Handle]


class Additions:
    """Looks at a tree of annotated modules when something in it has changed."""

    __slots__ = ("_looks",)

    def __init__(self) -> None:
        # By the module that ran: the counts, the contents, and what is frozen.
        self._looks: dict[nn.Module, tuple[tuple[int, int], Contents, list[nn.Parameter]]] = {}

    def check(self, module: nn.Module, states: Collection[_Annotated]) -> None:
        """Raise if ``module``, whose forward begins, has parameters that no annotation knows.

        Args:
            module: The outermost fully sharded module that runs.
            states: Every state of the tree.

        Raises:
            UsageError: It names them, or what else averages gradients; or an optimizer in backward beside a hook.
        """
        counts = (count_registrations(), len(optimizers_in_backward()))
        seen, contents, frozen = self._looks.get(module, (None, None, ()))
        is_as_before = seen == counts and contents is not None and not contents.have_changed()
        if is_as_before and not any(param.requires_grad for param in frozen):
            return
        if is_functional_call():
            return  # What is lent for one call was not added.
        check_callers()
        for state in states:
            for handle in state._handles:
                handle.attach()  # What was assigned in the place of a sharded parameter is a value for it.
                _take_over_optimizers(handle)
        added = dict(_unmanaged(module, states))
        names = [fqn for fqn, param in added.items() if param.requires_grad]
        if names:
            raise UsageError(
                "parameters were added after fully_shard was called, and nothing averages their gradients",
                at=f"{place_of_rank()}, {list_text(names)}",
                fix="add modules first; or call fully_shard on the added module too; or unannotate, and annotate anew",
            )
        modules = list(_traversal_utils._get_modules(module))
        watch_registrations(modules)
        counts = (counts[0], len(optimizers_in_backward()))
        self._looks[module] = counts, Contents(modules, dict.keys), list(added.values())


def _take_over_optimizers(handle: Handle) -> None:
    """Step where the reduced gradients arrive, for optimizers that wait for autograd to reach a sharded parameter."""
    if forget_torch_hooks(param.sharded for param in handle.params):
        if handle.comm_hooks:
            refuse_steppers([step_torch_optimizers], handle.fqn_of(handle.params[0]))
        handle.step_by(list(dict.fromkeys([*handle.steppers, step_torch_optimizers])))


def _unmanaged(root: nn.Module, states: Collection[_Annotated]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters below ``root`` that no annotation manages or ignores, with their names."""
    ignored = {module for state in states for module in state.ignored_modules}
    slots = {slot for state in states for slot in state.ignored_slots}
    names = name_modules([root])
    left: set[int] = set()
    entered: list[nn.Module] = []
    seen = {root}
    stack = [root]
    while stack:
        module = stack.pop()
        if module in ignored or excludes(module, "fully_shard"):
            left.update(map(id, module.parameters()))
            continue
        entered.append(module)
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)
    for module in entered:
        if is_left_alone(module):
            continue
        for name, param in module._parameters.items():
            if param is not None and id(param) not in left and (module, name) not in slots and not is_managed(param):
                yield join_fqn(names[module], name), param

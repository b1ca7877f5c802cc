"""The only file that registers hooks.

Callers decide what their hooks do. This file decides when hooks run, and in which order with hooks
of users and of torch.
"""

import itertools
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import Any, Protocol
from weakref import WeakSet, WeakValueDictionary, proxy

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from composable.ground.modes import unseen
from composable.ground.torch_private import (
    current_autograd_node,
    current_graph_task_id,
    hook_gradient,
    opaque,
    outside_transforms,
    queue_callback,
    refusal_of_compiled,
    replace_body,
    run_backward,
)


class Ending(Protocol):
    """The work of one annotation at the end of a backward."""

    number: int  # From ``next_ending_number``; equal on all ranks, since all made their annotations in the same order.

    def start(self) -> None:
        """Start collectives."""
        ...

    def finish(self) -> None:
        """Wait for the collectives that ``start`` has started."""
        ...


class EndOfBackward:
    """The work of all annotations at the end of a backward that ends well.

    Annotations start their collectives in the order of their numbers, no matter which of them the backward reached
    first on this rank, and only then wait.
    """

    __slots__ = ("__weakref__", "endings")

    def __init__(self) -> None:
        self.endings: list[Ending] = []

    @unseen
    @outside_transforms()
    def end_backward(self) -> None:  # messages name it, for the ranks that wait in it
        """Start all endings, then finish those that started; raise the first failure.

        An ending that failed is left as after an exception in backward; after Ctrl-C all endings are.
        """
        failures: list[Exception] = []
        started: list[Ending] = []
        seen = 0
        while seen < len(self.endings):  # An ending that starts may add others.
            waiting = sorted(self.endings[seen:], key=attrgetter("number"))
            seen += len(waiting)
            # A failure is raised later: the other endings have to go on, or other ranks would wait for them.
            for ending in waiting:
                try:
                    ending.start()
                except Exception as error:
                    failures.append(error)
                else:
                    started.append(ending)
        for ending in sorted(started, key=attrgetter("number")):
            try:
                ending.finish()
            except Exception as error:
                failures.append(error)
        if failures:
            try:
                raise failures[0]
            finally:
                # Else the traceback would hold itself, and all objects in its frames.
                failures.clear()


class _OfThread(threading.local):
    """The watchers whose last forward a thread ran, and whether its backward runs inside of an autograd function's."""

    watchers: "WeakSet[BackwardWatcher] | None" = None
    is_in_function = False


class _Endings:
    """The ``EndOfBackward`` of each running backward, and the count that gives endings their numbers."""

    __slots__ = ("_lock", "_running", "next_number", "threads")

    def __init__(self) -> None:
        self.threads: set[int] = set()  # those in a backward
        self.next_number = itertools.count().__next__
        # By autograd's id of the backward, which is unique.
        self._running: WeakValueDictionary[int, EndOfBackward] = WeakValueDictionary()
        self._lock = threading.Lock()

    def add(self, ending: Ending) -> Callable[[], None]:
        """Add ``ending`` to the backward that is running on this thread.

        Returns a callback that autograd frees when the backward ends, also by an exception. Each ending has its own,
        which nothing else holds: the traceback of an exception that was raised in one keeps frames alive, and with them
        a callback that has to be freed for another ending.
        """
        task = current_graph_task_id()
        end = self._running.get(task)
        if end is None:
            with self._lock:
                # The thread of another device may have added it meanwhile.
                end = self._running.get(task)
                if end is None:
                    end = EndOfBackward()
                    if (refusal := refusal_of_compiled(ending)) is not None:
                        raise refusal
                    queue_callback(end.end_backward)
                    self._running[task] = end
        end.endings.append(ending)
        # A callback that does nothing, without a Python frame.
        held: Callable[[], Any] = partial(bool)
        queue_callback(held)
        return held


class BackwardWatcher(Protocol):
    """An annotation that looks at backwards before their nodes run, and after them."""

    number: int  # Equal on all ranks; of several watchers the lowest comes first.
    is_looking: bool  # It has to hear of the end of the running backward.

    def look_ahead(self, outputs: Sequence[Any]) -> bool:
        """Say whether a backward from ``outputs``, of any shapes, may read parameters before a hook runs for it."""
        ...

    def gather_ahead(self) -> None:
        """Prepare the running backward, if it is one of this annotation."""
        ...

    def end_backward(self, *, has_failed: bool) -> None:
        """End a backward, also one that has run without an event of this annotation, if it was one of it."""
        ...

    def explain(self, error: RuntimeError) -> Exception | None:
        """Return the error to raise in place of autograd's; ``None``: it has nothing to do with this annotation."""
        ...


def watch_backwards(watcher: BackwardWatcher, before: "WeakSet[BackwardWatcher] | None") -> "WeakSet[BackwardWatcher]":
    """Let ``watcher``, as long as it lives, look at backwards of this thread, and no more at those of another one.

    Returns ``backwards_here.watchers``, to be passed as ``before`` next time.
    """
    here = backwards_here.watchers
    if here is None:
        here = backwards_here.watchers = WeakSet()
    if before is not None:
        before.discard(watcher)
    here.add(watcher)
    return here


def let_watch_backwards() -> None:
    """Let the functions that ask about backwards know of them; a second call changes nothing."""
    replace_body(run_backward, _run_watched)


def any_backward_runs() -> bool:
    """Say whether any thread of this process runs a backward."""
    return bool(_ENDINGS.threads)


def in_backward_of_function() -> bool:
    """Say whether the backward of an ``autograd.Function``, such as a reentrant checkpoint, started the running one."""
    return backwards_here.is_in_function


@opaque
def _run_watched(original: Callable[..., Any], outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    here, threads, thread = backwards_here, _ENDINGS.threads, threading.get_ident()
    if current_graph_task_id() != -1:
        # Inside another backward, this one is a part of it.
        before = here.is_in_function
        here.is_in_function = before or isinstance(current_autograd_node(), BackwardCFunction)
        try:
            return original(outputs, *args, **kwargs)
        finally:
            here.is_in_function = before
    # Also in the order of all ranks at the end, where each may start collectives: a set has an order of its own.
    watchers = sorted(here.watchers or (), key=attrgetter("number"))
    hooks: list[RemovableHandle] = []
    has_failed = True
    threads.add(thread)
    try:
        early: list[BackwardWatcher] = []
        for one in watchers:
            if one.look_ahead(outputs):
                early.append(one)  # a comprehension would be a call
        if early:

            @unseen
            def begin(_: object) -> None:
                while early:
                    early.pop(0).gather_ahead()

            for output in outputs:
                if isinstance(output, torch.Tensor):
                    hooks.append(output.register_hook(begin))
                else:  # an edge of a graph
                    hooks.append(output.node.register_prehook(begin))
        result = original(outputs, *args, **kwargs)
        has_failed = False
    except RuntimeError as error:
        for one in watchers:
            if (explained := one.explain(error)) is not None:
                raise explained from None
        raise
    finally:
        threads.discard(thread)
        for hook in hooks:
            hook.remove()
        for one in watchers:
            if one.is_looking:
                one.end_backward(has_failed=has_failed)
    return result


_ENDINGS = _Endings()
backwards_here = _OfThread()
next_ending_number = _ENDINGS.next_number
at_end_of_backward = _ENDINGS.add


def around_forward(module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]) -> list[RemovableHandle]:
    """Call ``before(module, args, kwargs)`` and ``after(module, args, output)`` around the present forward hooks.

    So activation checkpointing and users' hooks run between them. A forward hook that is registered later runs
    after ``after``, until ``put_outermost`` is called. ``after`` also runs when forward raises. ``before`` may
    return other (args, kwargs), ``after`` another output.
    """
    outer = module.register_forward_hook(after, prepend=False, always_call=True)
    # The class goes along when the module, and the handle with it, is copied.
    outer.__class__ = _Outermost
    return [module.register_forward_pre_hook(before, prepend=True, with_kwargs=True), outer]


_ARRIVAL = "_composable_arrival"  # the mark on functions of `after_gradients`


class _Outermost(RemovableHandle):
    """The handle of a hook that runs after all other forward hooks of its module."""


def put_outermost(handles: Iterable[RemovableHandle]) -> None:
    """Move the ``after`` hooks of ``around_forward`` behind the forward hooks that were registered since."""
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if isinstance(handle, _Outermost) and hooks is not None and handle.id in hooks:
            hooks.move_to_end(handle.id)


def beside_forward(
    module: nn.Module, before: Callable[..., None], after: Callable[..., None], *, is_inside: bool = False
) -> list[RemovableHandle]:
    """Call ``before(module, args)`` and ``after(module, args, output)`` in the order of registration of all hooks.

    ``is_inside``: ``after`` before all present hooks. It also runs when forward raises.
    """
    later = module.register_forward_hook(after, prepend=is_inside, always_call=True)
    return [module.register_forward_pre_hook(before), later]


def before_forward(module: nn.Module, before: Callable[..., Any]) -> RemovableHandle:
    """Call ``before(module, args, kwargs)``, which returns the arguments of forward, before all present hooks."""
    handle: RemovableHandle = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    return handle


class GradientHook:  # no ABC: each look at a class would go through its table, in each forward call
    """A hook that runs when the gradient of a tensor arrives; several hooks can share a tensor."""

    __torch_unserializable__ = True  # Saving the tensor gives no warning that hooks are not saved.
    __slots__ = ()

    @abstractmethod
    def __call__(self, grad: torch.Tensor) -> None: ...


class _Joined(GradientHook):
    """Several gradient hooks on one tensor.

    A module that returns the output of an inner module has its hook on the same tensor. Autograd would run hooks in
    the order of registration, inner module first. On another rank the outer module may return a tensor of its own,
    so that its hook runs first: for equal order on all ranks, the outer module's hook runs first here too.
    """

    __slots__ = ("hooks",)

    def __init__(self, hooks: list[GradientHook]) -> None:
        self.hooks = hooks

    def _call_all(self, grad: torch.Tensor) -> None:
        for hook in self.hooks:
            hook(grad)

    @partial(opaque, traced=_call_all)
    def __call__(self, grad: torch.Tensor) -> None:
        self._call_all(grad)


def on_gradient(tensor: torch.Tensor, hook: GradientHook) -> None:
    """Call ``hook`` when the gradient of ``tensor`` [any] arrives; also if it is a view and is changed in place later.

    Of several hooks on one tensor the last registered runs first. Of equal hooks (``==``) only one stays.
    """
    base = tensor._base
    if base is None and not tensor._backward_hooks:
        hook_gradient(tensor, hook)  # the usual case
        return
    _join(tensor, hook)
    if base is not None and base.grad_fn is not None:
        # An in-place change gives a view another grad_fn, and the hook on it would never run.
        _join(base, hook)


def _join(tensor: torch.Tensor, hook: GradientHook) -> None:
    known = tensor._backward_hooks  # None again after an in-place change: the tensor has another gradient then.
    if known:
        for key, other in known.items():
            if isinstance(other, GradientHook):
                others = other.hooks if isinstance(other, _Joined) else [other]
                known[key] = _Joined([hook, *(one for one in others if one != hook)])
                return
    hook_gradient(tensor, hook)


@unseen
def in_backward_of_nothing(call: Callable[[], None]) -> None:
    """Run a backward that reaches no parameter, with ``call`` in it: callbacks queued there run when it ends."""
    with torch.enable_grad():
        root = torch.zeros((), requires_grad=True, device="cpu").clone()
    root.register_hook(lambda _: call())
    root.backward()


def before_gradients(leaves: Iterable[torch.Tensor], arrive: Callable[[torch.Tensor], Any]) -> list[RemovableHandle]:
    """Call ``arrive`` whenever a backward reaches a leaf [any], before it adds the gradient to the leaf's ``grad``."""
    return [leaf.register_hook(arrive) for leaf in leaves]


def after_gradients(
    params: Iterable[nn.Parameter], arrivals: Iterable[Callable[[torch.Tensor], None]]
) -> list[RemovableHandle]:
    """Call each parameter's function whenever a backward has accumulated its gradient, of any shape.

    Hooks of users that were registered later run after it: ``hooks_have_run`` says whether there are some.
    """
    handles = []
    for param, arrive in zip(params, arrivals, strict=True):
        setattr(arrive, _ARRIVAL, True)
        is_trained, param.requires_grad = param.requires_grad, True  # torch refuses hooks on what is frozen just now
        handles.append(param.register_post_accumulate_grad_hook(arrive))
        param.requires_grad = is_trained
    return handles


def hooks_have_run(param: torch.Tensor, later: Callable[..., None]) -> bool:
    """Say, in a hook of ``after_gradients``, whether all hooks of users on the gradient of ``param`` [any] have run.

    If hooks on the node that accumulates the gradient follow, ``later`` is called after them. If only hooks of
    ``register_post_accumulate_grad_hook`` follow, it is not; but from the next backward on, they run first.
    """
    hooks: Any = param._post_accumulate_grad_hooks
    if len(hooks) > 1 and not hasattr(next(reversed(hooks.values())), _ARRIVAL):
        for key in [key for key, hook in hooks.items() if hasattr(hook, _ARRIVAL)]:
            hooks[key] = hooks.pop(key)  # autograd reads the order of insertion, which `move_to_end` leaves as it is
        return False
    # Torch does not tell which hooks a node has, but to whom adds one.
    node: Any = current_autograd_node()
    handle = node.register_hook(later)
    hooks = handle.hooks_dict_ref()
    if len(hooks) == 1:
        del hooks[handle.id]
        return True

    def end_node(*_: object) -> None:
        handle.remove()
        later()

    hooks[handle.id] = end_node
    return False


def around_state_dict(
    module: nn.Module,
    *,
    before_save: Iterable[Callable[..., None]] = (),
    after_save: Iterable[Callable[..., None]] = (),
    before_load: Iterable[Callable[..., None]] = (),
    after_load: Iterable[Callable[..., None]] = (),
) -> list[RemovableHandle]:
    """Call functions around ``state_dict()`` and ``load_state_dict()`` of ``module``, each list in order."""
    hooks: list[RemovableHandle] = [module.register_state_dict_pre_hook(hook) for hook in before_save]
    hooks += [module.register_state_dict_post_hook(hook) for hook in after_save]
    hooks += [module.register_load_state_dict_pre_hook(hook) for hook in before_load]
    return hooks + [module.register_load_state_dict_post_hook(hook) for hook in after_load]


def before_every_step(check: Callable[..., None]) -> RemovableHandle:
    """Call ``check(optimizer, args, kwargs)`` before each step of every optimizer of the process."""
    registered: RemovableHandle = register_optimizer_step_pre_hook(check)
    return registered


def before_step(optimizer: torch.optim.Optimizer, check: Callable[..., None]) -> RemovableHandle:
    """Call ``check(optimizer, args, kwargs)`` before each step of ``optimizer``."""
    registered: RemovableHandle = optimizer.register_step_pre_hook(check)
    return registered


def after_step(optimizer: torch.optim.Optimizer, call: Callable[..., None]) -> RemovableHandle:
    """Call ``call(optimizer, args, kwargs)`` after each step of ``optimizer``, before all other such hooks."""
    registered: RemovableHandle = optimizer.register_step_post_hook(call)
    hooks = registered.hooks_dict_ref()
    if hooks is not None:
        hooks.move_to_end(registered.id, last=False)
    return registered


def before_every_registration(
    of_module: Callable[[nn.Module, str, nn.Module | None], None],
    of_parameter: Callable[[nn.Module, str, nn.Parameter], None],
) -> list[RemovableHandle]:
    """Call ``of_module(parent, name, child)`` or ``of_parameter(parent, name, param)`` before each registration.

    In all modules of the process, but not when ``ModuleList.insert`` and others write to the dicts of a module.
    """
    return [
        register_module_module_registration_hook(of_module),
        register_module_parameter_registration_hook(of_parameter),
    ]


class Contents:
    """The children and parameters of modules, compared in each forward: some 100 ns for each module.

    Args:
        of_params: ``dict.values``, or ``dict.keys`` where the library itself replaces the parameter under a name.
        owner: The one of these modules that owns this object, which holds it weakly.
    """

    __slots__ = ("_before", "_leaves", "_of_params", "_params", "_parents")

    def __init__(
        self, modules: Iterable[nn.Module], of_params: Callable[[Any], Iterable[object]], owner: nn.Module | None = None
    ) -> None:
        # Nothing can be added to scripted modules, and they make other objects in each look.
        found = [one for one in modules if not isinstance(one, torch.jit.ScriptModule)]
        # Some containers get a new dict when a module in them is deleted.
        parents = [one for one in found if one._modules or isinstance(one, _CONTAINERS)]
        self._parents: list[Any] = [proxy(one) if one is owner else one for one in parents]
        self._leaves = [one._modules for one in found if not one._modules]
        self._params = [one._parameters for one in found if one._parameters]
        self._of_params = of_params
        self._before: list[object] | None = None
        self.have_changed()

    def have_changed(self) -> bool:
        """Say whether a module or a parameter was added, replaced or removed."""
        children = map(dict.values, map(_CHILDREN, self._parents))
        now = list(chain(chain.from_iterable(children), chain.from_iterable(map(self._of_params, self._params))))
        before = self._before = now if self._before is None else self._before
        return any(self._leaves) or len(now) != len(before) or not all(map(is_, now, before))


_CHILDREN: Callable[[Any], dict[str, object]] = attrgetter("_modules")
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)


def after_loads(optimizer: torch.optim.Optimizer, call: Callable[..., None]) -> RemovableHandle:
    """Call ``call(optimizer)`` after each ``load_state_dict()`` of one optimizer."""
    return optimizer.register_load_state_dict_post_hook(call)


def around_optimizer(
    optimizer: torch.optim.Optimizer,
    *,
    before_step: Callable[..., Any],
    after_step: Callable[..., None],
    before_state_dict: Callable[..., None],
    after_load: Callable[..., None],
) -> list[RemovableHandle]:
    """Call a function before and after each step, before ``state_dict()`` and after ``load_state_dict()``.

    ``before_step`` may return other (args, kwargs); the first of args is the optimizer that steps.
    """
    return [
        optimizer.register_step_pre_hook(before_step),
        optimizer.register_step_post_hook(after_step),
        optimizer.register_state_dict_pre_hook(before_state_dict),
        after_loads(optimizer, after_load),
    ]


def differentiable_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value``, of any shapes, that require grad."""
    return (tensor for tensor in tensors_in(value) if tensor.requires_grad)


_WITHOUT_TENSORS = (bool, int, float, complex, str, bytes, torch.Size, type, nn.Module)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors [any] in nested tuples, lists, dicts, dataclasses and plain objects, also those with slots."""
    stack = [value]
    seen: set[int] = set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif item is not None and not isinstance(item, _WITHOUT_TENSORS) and id(item) not in seen:
            seen.add(id(item))
            stack.extend(reversed(item if isinstance(item, (tuple, list)) else values_held_by(item)))


def values_held_by(value: object) -> list[Any]:
    """Return the values in ``value``: the items of a container, or the attributes of an object, also those in slots."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (tuple, list, set, frozenset, deque)):
        return list(value)
    slots = (base.__dict__.get("__slots__", ()) for base in type(value).__mro__)
    names = [name for one in slots for name in ([one] if isinstance(one, str) else one) if isinstance(name, str)]
    return [
        *getattr(value, "__dict__", {}).values(),
        *(getattr(value, name, None) for name in names if not name.startswith("__")),
    ]

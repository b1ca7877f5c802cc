"""The events of a step, for listeners.

A root of ``fully_shard`` and a reducer of ``replicate`` send the same events. Each has its own ``Listeners``, which has
for each event the methods to call: a loop over them costs nothing where nobody listens.

Source: trio's instruments, https://trio.readthedocs.io/en/stable/reference-lowlevel.html#instrument-api.
"""

import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch import nn

from composable.engine.handle import Handle
from composable.ground.torch_private import autograd_profiler

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Work(enum.Enum):
    """Work of this rank that takes time: to start to communicate, or to wait until that has ended."""

    GATHER = "gather"
    WAIT_FOR_GATHER = "wait for gather"
    REDUCE = "reduce"
    WAIT_FOR_REDUCE = "wait for reduce"


class StepListener:
    """Base class of listeners: a method for each event, in the order of a step, and questions at the end.

    They do nothing, and only those that a class overrides are called. All ranks get the same events in the same order,
    except ``work`` and ``handle_completed``. An event comes before what it names, unless its name says otherwise.
    """

    def forward_begins(self, module: nn.Module, *, broadcasts: bool) -> None:
        """The outermost module that runs starts its forward; ``broadcasts``: first, its buffers are broadcast."""

    def forward_ended(self, module: nn.Module, *, is_awaited: bool) -> None:
        """That forward has ended; ``is_awaited``: a backward may follow. Not sent by reducers."""

    def gather_begins(self, handle: Handle, *, from_secondary: bool) -> None:
        """Parameters are gathered, from shards or from secondary ones."""

    def backward_begins(self, *, averages: bool) -> None:
        """A backward begins; ``averages``: it reduces gradients, as far as it is known now."""

    def backward_reached(self, owner: object) -> None:
        """The gradient of an output of a handle, or of a replicated module, has arrived: now it is computed there."""

    def gradients_dropped(self, handle: Handle, bits: Sequence[int]) -> None:
        """Users have dropped kept gradients; ``bits``: of the parameters of each buffer."""

    def handle_completed(self, handle: Handle) -> None:
        """The backward of a handle is over: its gradients are complete, or it has none."""

    def reduction_begins(self, unit: object, index: int) -> None:
        """Gradients are reduced: those of buffer ``index`` of a handle, or of bucket ``index`` of a reducer."""

    def backward_ends(self, *, averages: bool, ends: bool) -> None:
        """Nothing of a backward is left to compute.

        ``averages``: gradients are reduced in this backward. ``ends``: the reductions end with it, and not in a later
        one.
        """

    def gradients_come(self) -> None:
        """Parameters get their reduced gradients."""

    def gradients_came(self) -> None:
        """Parameters have got their gradients, outside of a backward. Not sent by reducers."""

    def step_forgotten(self, *, was_unfinished: bool) -> None:
        """A step is forgotten; ``was_unfinished``: with a backward, reductions or kept gradients."""

    def work(self, work: Work, handle: Handle | None, name: str) -> AbstractContextManager[object]:
        """Return a context around work of this rank: for a handle with its FQN, or for a bucket with its name."""
        return nullcontext()

    def has_idle_ranks(self) -> bool:
        """Say whether some rank runs no modules in this step, so that it cannot answer questions about them."""
        return False

    def holds_annotations(self) -> bool:
        """Say whether the annotations must stay as they are now."""
        return False

    def removed(self) -> None:
        """The root is undone, and sends no more events."""


# Each is an event or a question.
METHODS = tuple(name for name, one in vars(StepListener).items() if callable(one))


class Listeners:
    """The listeners of a root or a reducer: for each event, their methods to call. Usually there are none."""

    if TYPE_CHECKING:

        def __getattr__(self, event: str) -> tuple[Callable[..., Any], ...]:
            """Return the methods to call, by the name of a method of ``StepListener``."""

    def __init__(self) -> None:
        self.members: tuple[StepListener, ...] = ()  # The listeners.
        # What else gets the listeners that come, and loses those that go; ``None``: nothing.
        self.root: Listeners | None = None
        self._find_methods()

    def add(self, *listeners: StepListener) -> None:
        """Let ``listeners`` get each event, before the listeners so far; no error if they do already."""
        self.members = tuple(dict.fromkeys((*listeners, *self.members)))
        self._find_methods()
        if self.root is not None:
            self.root.add(*listeners)

    def remove(self, listener: StepListener) -> None:
        """Undo ``add``; no error if it was undone."""
        self.members = tuple(one for one in self.members if one is not listener)
        self._find_methods()
        if self.root is not None:
            self.root.remove(listener)

    @property
    def forbid_changes(self) -> bool:
        """Some listener needs the annotations as they are now."""
        return any(ask() for ask in self.holds_annotations)

    def _find_methods(self) -> None:
        for event in METHODS:
            own = [one for one in self.members if getattr(type(one), event) is not getattr(StepListener, event)]
            setattr(self, event, tuple(getattr(one, event) for one in own))

    def during(
        self, work: Work, handle: Handle | None, name: str, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        """Return ``call(*args, **kwargs)``, in the contexts of all listeners, and in a region of torch's profiler."""
        with ExitStack() as exits:
            if autograd_profiler._is_profiler_enabled:
                exits.enter_context(autograd_profiler.record_function(f"composable::{work.value} {name or '(root)'}"))
            for show in self.work:
                exits.enter_context(show(work, handle, name))
            return call(*args, **kwargs)

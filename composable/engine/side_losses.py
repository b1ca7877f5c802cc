"""Side losses: tensors that leave a forward by another way than its outputs, such as in a list or an attribute.

A backward gathers a handle when the gradient of an output arrives. The backward of a side loss may read parameters
before that, or meet no output at all. So ``SideLosses`` looks at each backward of the forwards' thread before its first
node runs. There are three cases:

- It begins in a forward at no output, or graphs of outputs are gone: what it reaches is gathered before it runs.
- It has met no output, and has left gradients: they are reduced when it has ended, in a backward of its own.
- It reads a parameter that is freed: an error says so.

``leaves_side_loss`` finds, as a module's forward ends, nodes that are younger than the outputs.
"""

import re
from collections.abc import Iterable, Sequence
from operator import attrgetter
from threading import get_ident
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from composable.engine.buffer import FREED
from composable.engine.step import Completion, Step
from composable.errors import UsageError
from composable.ground.names import list_text
from composable.ground.torch_hooks import differentiable_tensors, in_backward_of_nothing, watch_backwards
from composable.ground.torch_private import (
    is_tracing,
    next_node_number,
    opaque,
    refusal_of_compiled,
    running_transform,
)

# How many nodes of a loss are looked at before a backward: each costs half a microsecond.
_SEEN_NODES = 64


class SideLosses:
    """Looks at the backwards of one root, as a ``BackwardWatcher``.

    Args:
        step: The state of the root's step.
        completion: The handles to complete.
        backwards: The ``Backwards`` that hold this object: a weak proxy.

    Attributes:
        number: That of the root's end of backward.
        thread: Thread of the last forward, whose backwards it looks at.
        watchers: All watchers of that thread.
        is_looking: It has looked at a backward that the root has not begun, or shows retained parameters to it.
    """

    def __init__(self, step: Step, completion: Completion, backwards: Any) -> None:
        self.number: int = backwards.number
        self.watchers: WeakSet[Any] | None = None
        self.is_looking = False
        self._step = step
        self._completion = completion
        self._backwards = backwards
        # Of the backward that begins: the number before it, whether it starts at a side loss, and whether no hook of an
        # output may gather what it reads.
        self._seen, self._starts_aside, self._misses_outputs = 0, False, False
        self.watch(get_ident())

    # In forward

    def watch(self, thread: int) -> None:
        """Look at backwards of the thread of the last forward, which is this one."""
        self._step.forwards.clear()  # Each thread numbers its nodes by itself.
        self.watchers, self.thread = watch_backwards(self, self.watchers), thread

    def note_outputs(self, output: Any) -> None:
        """Note the outputs of the outermost module, whose forward ends: a backward begins there or later."""
        step = self._step
        if step.first_nodes[0] < 0:
            return  # Activation checkpointing runs a part again.
        numbers = set()
        for one in (output,) if isinstance(output, torch.Tensor) else differentiable_tensors(output):
            if one.grad_fn is not None:
                numbers.add(one.grad_fn._sequence_nr())
        step.forwards.append((step.first_nodes[0], next_node_number(), numbers))

    # Around a backward

    @opaque
    def look_ahead(self, outputs: Sequence[Any]) -> bool:
        """Say whether a backward from ``outputs``, of any shapes, may read parameters before a hook runs for it."""
        step, completion = self._step, self._completion
        shows = bool(step.unsharded.retained) and not is_tracing() and step.unsharded.show_retained()
        waiting = completion.armed or completion.last_armed
        self.is_looking, self._seen = shows or bool(waiting), step.backward_id
        if not waiting:
            return False
        # No comprehension and no other function: they would cost as much as the rest, in each backward.
        lost = 0
        for own in waiting:
            lost += own.output() is None
        nodes: list[Any] = []
        for output in outputs:
            nodes.append(output.grad_fn if isinstance(output, torch.Tensor) else output.node)
        starts_aside, left = False, _SEEN_NODES  # A loss of more nodes is taken for one of outputs.
        while nodes and left > 0:
            node = nodes.pop()
            left -= 1
            if node is None or not step.forwards or (number := node._sequence_nr()) < step.forwards[0][0]:
                continue
            for first, stop, numbers in step.forwards:
                if first <= number < stop:
                    starts_aside = True
                    if number in numbers:
                        left = -1  # It starts at an output as well.
                    break
            else:
                for following, _ in node.next_functions:
                    nodes.append(following)
        self._starts_aside = starts_aside and left >= 0 and not nodes
        # A forward that was dropped as a whole has nothing to read.
        self._misses_outputs = self._starts_aside or 0 < lost < len(waiting)
        return self._misses_outputs or (shows and running_transform() is None)

    def gather_ahead(self) -> None:
        """Gather what the running backward reaches, and no hook of an output will gather."""
        waiting = sorted(self._completion.armed or self._completion.last_armed, key=attrgetter("first_forward"))
        reached = {own for own in waiting if own.is_reached()}
        if not reached:
            return
        self._backwards.begin_backward()
        for own in waiting if self._misses_outputs else ():
            # It is not known what reads frozen parameters alone; this rank's loss may just leave an output out.
            count = [param.sharded.requires_grad for param in own.handle.params].count(False)
            is_frozen = count > 0 if self._starts_aside else count == len(own.handle.params)
            is_missed = (self._starts_aside or own.output() is None) and not own.leaders
            if is_missed and (is_frozen or own in reached):
                self._backwards.unshard_group(own)

    @opaque
    def end_backward(self, *, has_failed: bool) -> None:
        """Reduce gradients of a backward that has met no output of the root; if it has failed, let them be dropped."""
        step = self._step
        step.unsharded.hide_retained()
        self.is_looking = False
        if step.backward_id != self._seen or step.is_backward:
            return
        for own in self._completion.armed or self._completion.last_armed:
            if any(flat.gradients.bits() for flat in own.handle.buffers if not flat.gradients.is_kept):
                if has_failed:
                    step.is_backward = True  # As one that was cut short: the next forward tidies up.
                else:
                    in_backward_of_nothing(self._backwards.begin_backward)
                return

    def explain(self, error: RuntimeError) -> Exception | None:
        """Return the error for a backward that met freed parameters; ``None``: it did not, or not of this root."""
        found = re.search(r"\[[\w.]+ \[([\d, ]*)\]\].* is at version " + str(FREED), str(error))
        if found is None:
            return None
        if (refusal := refusal_of_compiled(is_under_way=False)) is not None:
            return refusal  # It reads all saved tensors before any hook runs.
        shapes = [[int(size) for size in found[1].split(", ") if size]]
        shapes.append(shapes[0][::-1])  # Linear saves its weight transposed.
        met = [
            (handle, param)
            for handle in self._step.handles
            for param in handle.params
            if list(param.shape) in shapes and not handle.is_unsharded
        ]
        unset = [one for one in met if not one[0].settings.unshard_in_backward]
        names = [handle.from_root(param.fqn) for handle, param in unset or met]
        if not names:
            return None
        what, fix = "that nobody gathers: set_unshard_in_backward(False)", "leave that call out for its module"
        if not unset:
            what = (
                "whose memory is freed: a tensor has left the forward of its module by another way than the outputs, "
                "and the outputs take no part in this backward"
            )
            fix = (
                "add up all losses of one forward and call backward once; or return the tensor from the forward of "
                "its module; or annotate that module with reshard_after_forward=False"
            )
        return UsageError(f"backward reads a parameter {what}", at=f"parameter {list_text(names)}", fix=fix)


def tensors_in_attributes(module: nn.Module, first_node: int) -> list[torch.Tensor]:
    """Return the tensors, of any shapes, in attributes of ``module`` whose node has that number, or a later one.

    Tensors that a forward puts there, such as a loss, count as its outputs.
    """
    values = [value for value in vars(module).values() if type(value) is torch.Tensor and value.grad_fn is not None]
    return [one for one in values if one.grad_fn._sequence_nr() >= first_node]  # type: ignore[union-attr]


def leaves_side_loss(outputs: Iterable[torch.Tensor], first_node: int) -> bool:
    """Say whether a call made nodes, from the number ``first_node`` on, that are younger than its outputs [any].

    They belong to tensors that left the call in another way, such as an attribute; they run before an output's hook.
    """
    youngest = next_node_number() - 1
    if youngest < first_node:
        return False
    for tensor in outputs:
        node = tensor.grad_fn
        if node is not None and node._sequence_nr() == youngest:
            return False
    return True

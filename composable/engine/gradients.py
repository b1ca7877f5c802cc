"""The gradients of one flat buffer: on the unsharded parameters, kept for later, and on the sharded ones.

Autograd leaves them on the *leaves*, the unsharded parameters. From there they go into a gradient buffer, which lives
for one backward and is shared by handles of equal layout, one after the other. It is reduced, and goes as a mean to the
sharded parameters, whose optimizer may step them at once.

Parameters are bits of a number: bit ``i`` is the i-th of the buffer.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.autograd.graph import increment_version

from composable.dtensor import HOOKS, RaggedDTensor, assign_grad, was_zeroed, watch_zeroing
from composable.engine.param import ShardedParam
from composable.engine.routes import Routes
from composable.engine.stepping import Stepper, steps_alone
from composable.errors import UsageError, place_of_rank
from composable.ground.frames import will_get_gradient
from composable.ground.torch_private import foreach_copy_
from composable.planning import BufferPlan, FlatLayout, ShardSplit

__all__ = ["GRADIENT_BUFFERS", "GradientBuffer", "GradientShape", "Gradients"]


# Alive at once, unless the user says otherwise: one being reduced, one being filled.
GRADIENT_BUFFERS = 2


class GradientShape:
    """Where each gradient lies in a gradient buffer; one object for all flat buffers that can use the same memory.

    Attributes:
        numel: Elements of the buffer, [W * S].
    """

    def __init__(self, layout: FlatLayout) -> None:
        self.numel = layout.numel
        buffer = torch.empty(layout.numel, device="meta")
        views = [span.view_in(buffer) for span in layout.spans]
        self._views = [(view.shape, view.stride(), view.storage_offset()) for view in views]
        stops = [0, *(span.stop for span in layout.spans)]
        starts = [*(span.start for span in layout.spans), layout.numel]
        self._gaps = [(start, stop) for start, stop in zip(stops, starts, strict=True) if start < stop]

    def lay_out(self, source: torch.Tensor) -> "GradientBuffer":
        """Return ``source`` [W * S], of undefined content, as gradients back to back; what belongs to none is zero."""
        for start, stop in self._gaps:
            source[start:stop].zero_()
        return GradientBuffer(source, [source.as_strided(*view) for view in self._views], self)


class GradientBuffer(NamedTuple):
    """The gradients of one flat buffer, back to back.

    Attributes:
        source: [W * S], padding zero.
        views: One per parameter, in its full shape.
        shape: By which they were laid out.
    """

    source: torch.Tensor
    views: list[torch.Tensor]
    shape: GradientShape


class Gradients:
    """The gradients of the parameters of one flat buffer.

    Args:
        plan: Of the buffer.
        params: Its parameters.
        split: How the shard [S] is cut into their pieces.
        routes: How bytes travel between the ranks.
        device: Where autograd makes gradients.

    Attributes:
        all_bits: A bit for each parameter, as other numbers whose bits are some of them.
        shape: The same object for all whose gradients fit into the same memory.
        steppers: Get sharded parameters whose gradients are whole, and step them.
        steps_together: Such a step may be collective: it comes when all ranks know of which parameters.
    """

    def __init__(
        self,
        plan: BufferPlan,
        params: Sequence[ShardedParam],
        split: ShardSplit,
        routes: Routes,
        device: torch.device,
    ) -> None:
        self.all_bits = (1 << len(params)) - 1
        self.shape = _shape_of(plan, device)
        self._compute_dtype = plan.compute_dtype
        # What they are collected in: its dtype and device.
        self._like = torch.empty(0, dtype=plan.reduce_dtype, device=device)
        self._sums = False
        self._piece_sizes = split.sizes
        self._begin(params, split.indices, routes)

    def _begin(self, params: Sequence[ShardedParam], indices: Sequence[int | None], routes: Routes) -> None:
        self._params = tuple(params)
        self._pieces = list(zip(self._params, indices, strict=True))
        self._routes = routes
        self._hooks_known, self._has_hooks = -1, False
        self.step_by(())

    def copied(self, params: Sequence[ShardedParam], routes: Routes) -> "Gradients":
        """Return those of the copies of the parameters, on which nothing was left and which nothing steps."""
        twin = copy.copy(self)
        twin._begin(params, [index for _, index in self._pieces], routes)
        return twin

    # On the leaves

    def bits(self) -> int:
        """Return the bits of the parameters whose leaves hold a gradient."""
        found = 0
        for number, param in enumerate(self._params):
            leaf = param.unsharded
            if leaf is not None and leaf.grad is not None:
                found |= 1 << number
        return found

    def take(self, gradient: GradientBuffer) -> int:
        """Move the leaves' gradients into ``gradient``; returns the bits of those that had one, the others are zero."""
        views: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        had = self.all_bits
        for param, view in zip(self._params, gradient.views, strict=True):
            leaf = param.unsharded
            grad = None if leaf is None else leaf.grad
            if leaf is None or grad is None:
                view.zero_()
                had ^= 1 << self._params.index(param)
            else:
                views.append(view)
                grads.append(param.block_of_grad(grad) if param.is_split else grad)
                leaf.grad = None
        if not grads:
            return had
        try:
            foreach_copy_(views, grads)
        except RuntimeError as error:
            sparse = {id(view) for view, grad in zip(views, grads, strict=True) if grad.layout != torch.strided}
            if not sparse:
                raise
            pairs = zip(self._params, gradient.views, strict=True)
            names = [str(param.layout.label or param.fqn) for param, view in pairs if id(view) in sparse]
            raise UsageError(
                "a gradient is sparse, and a flat buffer holds dense ones only",
                at=f"{place_of_rank()}, parameter {', '.join(map(repr, names))}",
                fix="build the embedding with sparse=False, or pass it in ignored_modules",
            ) from error
        return had

    def make_buffer(self) -> GradientBuffer:
        """Allocate what ``take`` fills, on the current stream."""
        return self.shape.lay_out(self._routes.scatter_transport.empty(self.shape.numel, self._like))

    def sum_in_reduce_dtype(self, *, sums: bool) -> None:
        """Choose whether autograd adds up gradients in the dtype of the reduction, as it does those that wait.

        It casts each gradient before it adds it; those that are reduced at once are cast on their way.
        """
        if not (sums or self._sums):
            return
        self._sums = sums
        for param in self._params:
            leaf = param.unsharded
            if leaf is None:
                continue
            grad, dtype = leaf.grad, self._like.dtype
            if grad is None:
                leaf.grad_dtype = dtype if sums else self._compute_dtype
            elif grad.dtype == dtype:
                self._sums = True  # Until it is reduced.
            elif sums:
                leaf.grad = None
                leaf.grad_dtype = dtype
                leaf.grad = grad.to(dtype)

    def expects_more(self, had: int) -> bool:
        """Say whether the running backward will reach a leaf that is not among ``had``, the bits of some parameters."""
        return had != self.all_bits and any(
            param.unsharded is not None and param.unsharded.requires_grad and will_get_gradient(param.unsharded)
            for index, param in enumerate(self._params)
            if not had >> index & 1
        )

    def drop(self) -> None:
        """Forget what the leaves hold."""
        for param in self._params:
            param.forget_gradient()

    # For later

    def keep(self) -> bool:
        """Note what waits on leaves, or as kept shards, so that ``zero_grad`` drops it; say whether there is any."""
        waiting = self.bits() | self._routes.kept.bits
        for number, param in enumerate(self._params):
            if waiting >> number & 1:
                param.keep_gradient()
        return waiting != 0

    def drop_zeroed(self) -> int:
        """Forget kept gradients of parameters whose ``grad`` the user has dropped or set to zero.

        Returns:
            Which, as bits.
        """
        dropped = 0
        for number, param in enumerate(self._params):
            if param.drop_zeroed_gradient():
                dropped |= 1 << number
        self.drop_kept(dropped)
        return dropped

    def drop_kept(self, bits: int) -> None:
        """Forget the gradients of some parameters that wait for an all-reduce over copies."""
        for number, param in enumerate(self._params if bits else ()):
            if bits >> number & 1:
                self._routes.kept.drop(number, param.start, param.stop)

    # On the sharded parameters

    def dropped(self) -> tuple[int, int]:
        """Return whose ``grad`` the user has dropped, and whose he has set to zero since ``watch``."""
        grads = [param.sharded.grad for param in self._params]
        dropped = sum(1 << number for number, grad in enumerate(grads) if grad is None)
        return dropped, sum(1 << number for number, grad in enumerate(grads) if grad is not None and was_zeroed(grad))

    def drop_like(self, dropped: int, zeroed: int) -> None:
        """Do what the user has done on a rank where ``dropped`` returned this."""
        for number, param in enumerate(self._params):
            grad = param.sharded.grad
            if dropped >> number & 1:
                param.sharded.grad = None
            elif zeroed >> number & 1 and isinstance(grad, RaggedDTensor):
                grad._local_tensor.zero_()

    def watch(self) -> None:
        """Begin to note who is set to zero."""
        for param in self._params:
            if param.sharded.grad is not None:
                watch_zeroing(param.sharded.grad)

    def step_by(self, steppers: Sequence[Stepper]) -> None:
        """Let these step the sharded parameters, from the next backward on."""
        self.steppers = tuple(steppers)
        self.steps_together = bool(steppers) and not all(steps_alone(param.sharded) for param in self._params)

    def has_hooks(self) -> bool:
        """Say whether users registered hooks on the gradient of a sharded parameter."""
        if self._hooks_known != HOOKS.made:
            self._hooks_known = HOOKS.made
            self._has_hooks = any(
                param.sharded._post_accumulate_grad_hooks or param.sharded._backward_hooks for param in self._params
            )
        return self._has_hooks

    def accumulate(self, reduced: torch.Tensor, bits: int, *, with_hooks: bool = False) -> None:
        """Make ``reduced`` [S] the gradient of some sharded parameters, or add it to what they have.

        Args:
            reduced: The mean over the ranks.
            bits: Of the parameters.
            with_hooks: Run hooks on the gradient as on any leaf: those of ``register_hook`` on what is added, then
                those of ``register_post_accumulate_grad_hook``.
        """
        pieces = reduced.split_with_sizes(self._piece_sizes)
        chosen = self._pieces
        if bits != self.all_bits:
            chosen = [piece for number, piece in enumerate(chosen) if bits >> number & 1]
        for param, index in chosen:
            sharded = param.sharded
            if not sharded.requires_grad:
                continue
            grad = param.empty_grad() if index is None else param.wrap_grad(pieces[index])
            if with_hooks:
                grad = param.run_hooks(grad)
            held = sharded.grad
            if held is None or held is param.placeholder:
                param.placeholder = None
                assign_grad(sharded, grad)
            elif isinstance(held, RaggedDTensor) and held._spec is param.grad_spec:
                if index is not None:
                    held._local_tensor.add_(grad._local_tensor)
            else:
                sharded.grad = held + grad
            if with_hooks:
                param.run_post_hooks()
        if self.steppers:
            complete = [param.sharded for param, _ in chosen if param.sharded.grad is not None]
            for step in self.steppers:
                step(complete)
            # Also where this rank has no element to step.
            increment_version([param.ragged._local_tensor for param, _ in chosen])


_SHAPES: "WeakValueDictionary[object, GradientShape]" = WeakValueDictionary()


def _shape_of(plan: BufferPlan, device: torch.device) -> GradientShape:
    """Return what is the same object for classes that can use each other's memory."""
    layout = plan.layout
    spans = tuple((span.start, span.shape, span.order) for span in layout.spans)
    # To hash all that in every backward would take microseconds.
    key = (spans, layout.numel, plan.reduce_dtype, device)
    return _SHAPES.get(key) or _SHAPES.setdefault(key, GradientShape(layout))

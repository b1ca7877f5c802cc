"""The gradients of one flat buffer.

Autograd leaves gradients on the *leaves*, the unsharded parameters. From there they move to a gradient buffer, which
lives for one backward and serves handles of equal layout, one after the other. The buffer is reduced, and the sharded
parameters get the mean; their optimizer may step them at once.

Parameters are bits of a number: bit ``i`` is the i-th of the buffer.
"""

import copy
import functools
from collections.abc import Sequence
from itertools import starmap
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from composable.dtensor import RaggedDTensor, assign_grad, memory_of, was_zeroed, watch_zeroing
from composable.engine.param import ShardedParam
from composable.engine.routes import Routes
from composable.engine.stepping import Stepper, steps_alone
from composable.errors import UsageError
from composable.ground.frames import will_get_gradient
from composable.ground.ownership import CHANGES
from composable.ground.torch_private import foreach_copy_
from composable.planning import BufferPlan, ShardSplit, Span

# Default number of buffers alive at once: one being reduced, one being filled.
GRADIENT_BUFFERS = 2


class GradientShape:
    """The place of each gradient in a gradient buffer; one object for all flat buffers that can use the same memory."""

    def __init__(self, spans: Sequence[Span], numel: int) -> None:
        self.numel = numel  # Elements of the buffer, [W * S].
        buffer = torch.empty(numel, device="meta")
        views = [span.view_in(buffer) for span in spans]
        self._views = [(view.shape, view.stride(), view.storage_offset()) for view in views]
        stops = [0, *(span.stop for span in spans)]
        starts = [*(span.start for span in spans), numel]
        self._gaps = [(start, stop) for start, stop in zip(stops, starts, strict=True) if start < stop]

    def lay_out(self, source: torch.Tensor) -> "GradientBuffer":
        """Split ``source`` [W * S], of undefined content, into gradients back to back; gaps between them get zero."""
        for start, stop in self._gaps:
            source[start:stop].zero_()
        return GradientBuffer(source, list(starmap(source.as_strided, self._views)), self)


class GradientBuffer(NamedTuple):
    """The gradients of one flat buffer, back to back."""

    source: torch.Tensor  # [W * S], padding zero.
    views: list[torch.Tensor]  # One per parameter, in its full shape.
    shape: GradientShape  # The layout of the views.


class Gradients:
    """The gradients of the parameters of one flat buffer."""

    def __init__(
        self, plan: BufferPlan, params: Sequence[ShardedParam], split: ShardSplit, routes: Routes, device: torch.device
    ) -> None:
        # A number with a bit for each parameter; numbers called ``bits`` have some of them.
        self.all_bits = (1 << len(params)) - 1
        # Made once: to hash the spans in every backward would take microseconds.
        spans = tuple([Span("", one.shape, one.start, one.stop, one.order) for one in plan.layout.spans])
        # Layout of the gradient buffer; the same object for all whose gradients fit into the same memory.
        self.shape = _shape_for(spans, plan.layout.numel, plan.reduce_dtype, device)
        self._compute_dtype = plan.compute_dtype
        # They are reduced in another dtype than autograd makes them in.
        self.is_cast = plan.reduce_dtype != plan.compute_dtype
        # is_unsynced: The last backward that reached the parameters did not reduce, on any rank.
        # is_kept: Backwards have left gradients on this rank that wait, on leaves or as shards.
        self.is_unsynced = self.is_kept = False
        # Has the dtype and device of gradient buffers.
        self._like = torch.empty(0, dtype=plan.reduce_dtype, device=device)
        self._sums = False
        self._piece_sizes = split.sizes
        self._begin(params, split.indices, routes)

    def _begin(self, params: Sequence[ShardedParam], indices: Sequence[int | None], routes: Routes) -> None:
        self._params = tuple(params)
        self._pieces = list(zip(self._params, indices, strict=True))
        self._routes = routes
        self.hooks_known, self.has_hooks = -1, False
        self.step_by(())

    def copied(self, params: Sequence[ShardedParam], routes: Routes) -> "Gradients":
        """Return an object for copies of the parameters, on which nothing waits, and which no stepper steps."""
        twin = copy.copy(self)
        twin.is_unsynced = False
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
        """Move the leaves' gradients into ``gradient``, or zeros; returns the bits of the leaves that had one."""
        views: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        had, lacking = self.all_bits, 0
        for param, view in zip(self._params, gradient.views, strict=True):
            leaf = param.unsharded
            grad = None if leaf is None else leaf.grad
            if leaf is None or grad is None:
                view.zero_()
                had ^= 1 << len(views) + lacking
                lacking += 1
            else:
                views.append(view)
                grads.append(grad if param.form is None else param.block_of_grad(grad))
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
                at=f"parameter {', '.join(map(repr, names))}",
                fix="build the embedding with sparse=False, or pass it in ignored_modules",
            ) from error
        return had

    def make_buffer(self) -> GradientBuffer:
        """Allocate a gradient buffer for ``take``, on the current stream."""
        return self.shape.lay_out(self._routes.gradient_path.transport.empty(self.shape.numel, self._like))

    def sum_in_reduce_dtype(self, *, sums: bool) -> None:
        """Choose whether autograd adds up gradients in the dtype of the reduction, as it should if they wait.

        Autograd casts each gradient before it adds it; gradients that are reduced at once are cast then.
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
                self._sums = True  # Until the gradient is reduced.
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
        """Forget the gradients of the leaves."""
        self.is_unsynced = self.is_kept = False
        for param in self._params:
            param.forget_gradient()

    # For later

    @property
    def awaits_copies(self) -> bool:
        """Gradients wait for an all-reduce over the ranks that hold copies."""
        return self._routes.kept.total is not None

    @property
    def is_waiting(self) -> bool:
        """Gradients wait to be reduced with later ones, or for an all-reduce over copies."""
        return self.awaits_copies or (self.is_kept and self.bits() != 0)

    def keep(self) -> None:
        """Note gradients that wait, on leaves or as kept shards, so that ``zero_grad`` drops them."""
        waiting = self.bits() | self._routes.kept.bits
        for number, param in enumerate(self._params):
            if waiting >> number & 1:
                param.keep_gradient()
                self.is_kept = True

    def drop_zeroed(self) -> int:
        """Forget kept gradients of parameters whose ``grad`` the user has dropped or set to zero; return their bits."""
        dropped, self.is_kept = 0, False
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
        """Return the bits of parameters whose ``grad`` users have dropped, and of those set to zero since ``watch``."""
        grads = [param.sharded.grad for param in self._params]
        dropped = sum(1 << number for number, grad in enumerate(grads) if grad is None)
        return dropped, sum(1 << number for number, grad in enumerate(grads) if grad is not None and was_zeroed(grad))

    def drop_like(self, dropped: int, zeroed: int) -> None:
        """Drop or zero gradients as the user did on a rank where ``dropped`` returned these bits."""
        for number, param in enumerate(self._params):
            grad = param.sharded.grad
            if dropped >> number & 1:
                param.sharded.grad = None
            elif zeroed >> number & 1 and isinstance(grad, RaggedDTensor):
                grad._local_tensor.zero_()

    def watch(self) -> None:
        """Begin to note which gradients are set to zero."""
        for param in self._params:
            if param.sharded.grad is not None:
                watch_zeroing(param.sharded.grad)

    def step_by(self, steppers: Sequence[Stepper]) -> None:
        """Let ``steppers`` step the sharded parameters, from the next backward on."""
        self.steppers = tuple(steppers)  # Functions that get sharded parameters with whole gradients, and step them.
        # A stepper may be collective: it runs when all ranks have agreed on the parameters to step.
        self.steps_together = bool(steppers) and not all(steps_alone(param.sharded) for param in self._params)

    def look_for_hooks(self) -> None:
        """Note whether users registered hooks on the gradient of a sharded parameter."""
        self.hooks_known = CHANGES.hooks
        self.has_hooks = any(
            param.sharded._post_accumulate_grad_hooks or param.sharded._backward_hooks for param in self._params
        )

    def accumulate(self, reduced: torch.Tensor, bits: int, *, with_hooks: bool = False) -> None:
        """Make ``reduced`` [S], a mean over the ranks, the gradient of some sharded parameters, or add it to theirs.

        ``bits`` are of these parameters. ``with_hooks``: run hooks on the gradient as on any leaf: those of
        ``register_hook`` on what is added, then those of ``register_post_accumulate_grad_hook``.
        """
        pieces = reduced.split_with_sizes(self._piece_sizes)
        chosen = self._pieces
        if bits != self.all_bits:
            chosen = [piece for number, piece in enumerate(chosen) if bits >> number & 1]
        for param, index in chosen:
            sharded = param.sharded
            grad = param.empty_grad if index is None else param.wrap_grad(pieces[index])
            if with_hooks:
                grad = _run_hooks(param, grad)
            held, placeholder, param.placeholder = sharded.grad, param.placeholder, None
            # A version: in a backward without a reduction, autograd has added a gradient from outside of the forward.
            if held is None or (held is placeholder and not placeholder._local_tensor._version):
                assign_grad(sharded, grad)
            elif isinstance(held, RaggedDTensor) and held._spec is param.grad_spec:
                if index is not None:
                    held._local_tensor.add_(grad._local_tensor)
            else:
                sharded.grad = held + grad
            if with_hooks:
                for hook in list((sharded._post_accumulate_grad_hooks or {}).values()):
                    hook(sharded)
        if self.steppers:
            complete = [param.sharded for param, _ in chosen if param.sharded.grad is not None]
            for step in self.steppers:
                step(complete)
            # Also of parameters without an element on this rank: versions grow alike on all ranks.
            increment_version([memory_of(param.ragged._local_tensor) for param, _ in chosen])


def _run_hooks(param: ShardedParam, grad: RaggedDTensor) -> RaggedDTensor:
    """Run the functions of ``register_hook`` on a gradient of full shape, and return the gradient they leave."""
    for hook in list((param.sharded._backward_hooks or {}).values()):
        changed = hook(grad)
        if changed is None:
            continue
        if not isinstance(changed, RaggedDTensor) or changed._spec.layout != param.layout:
            raise UsageError(
                f"a hook on the gradient of a sharded parameter returned {type(changed).__name__} "
                f"{list(getattr(changed, 'shape', []))}",
                at=f"parameter {param.fqn!r}",
                fix="return None, or the result of element-wise operations on the gradient that the hook got",
            )
        grad = changed
    return grad


@functools.lru_cache(maxsize=1024)
def _shape_for(spans: Sequence[Span], numel: int, *_: object) -> GradientShape:
    """Return the layout of a gradient buffer, one object for all buffers that can use each other's memory."""
    return GradientShape(spans, numel)

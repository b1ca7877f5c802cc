"""One class of a handle's parameters, alike in dtypes and requires_grad, laid out in one flat buffer.

Owns three tensors: the rank's *shard* [S], alive for good, maybe on the host; the unsharded *buffer* [W * S],
whose storage is allocated and freed in place so that views saved by autograd stay right;
and, during backward, the *gradient buffer* [W * S] that is reduced into a fresh shard [S]. Between forward
and backward there may be a fourth: this rank's *secondary shard* [W * S / n], from which n ranks gather. How
one becomes the other, in which dtypes too, is the business of its two paths.

Sizes are in elements. Nothing here decides when, or on which stream, anything runs.

Source: flat parameters, arXiv 2304.11277.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable.collectives import Pending
from composable.errors import UsageError, place_of_rank
from composable.frames import will_get_gradient
from composable.planning import NO_CASTS, BufferPlan, HandleMembers, MixedPrecisionPolicy
from composable.ragged import HOOKS, RaggedDTensor, hand_over_grad
from composable.storage.gradient_buffer import GradientBuffer
from composable.storage.pieces import make_sharded_params
from composable.storage.resting_place import RestingPlace
from composable.storage.routes import Routes
from composable.storage.stepping import Stepper, steps_alone
from composable.storage.unfilled import META_FIX
from composable.torch_private import foreach_copy_

__all__ = ["FlatBuffer"]

_PLAIN = (torch.Tensor, nn.Parameter)


class FlatBuffer:
    """Storage and collectives of one class of a handle's parameters.

    Args:
        plan: Layout, dtype and trainability of the class.
        module_fqn: The handle's module, as the plan names it.
        members: The parameters and every place that holds them, by the plan's FQNs.
        mesh: 1-D mesh of the shard group.
        device: Where buffers live.
        is_deferred: The values come later: the shard is where it rests and zero, also where
            the originals are real. Without it, it is on meta as long as one of them is.
        home: Where the shard and its gradient rest; default: on ``device``.
        mp_policy: That made the plan.

    Attributes:
        dtype: Of the shard.
        compute_dtype: Of the buffer, and of the gradients that autograd makes.
        gradient_dtype: Of reduced gradients.
        all_bits: A bit for each parameter, as other numbers whose bits are some of them.
        home: Where the shard and its gradient rest.
        is_away: The shard is elsewhere: on the meta device, or where torch has moved it.
        holds_instances: Some unsharded parameter is more than a view of the buffer: of a class that packs or gathers.
        is_marked: Part of the shard may hold the mark of memory that nobody has written to.
        routes: How bytes travel between the ranks.
        steppers: Get sharded parameters whose gradients are whole, and step them.
        steps_together: Such a step may be collective: it comes when all ranks know of which parameters.
    """

    __slots__ = (
        "_buffer",
        "_buffer_bytes",
        "_gradient_like",
        "_has_hooks",
        "_hooks_known",
        "_is_allocated",
        "_piece_sizes",
        "_pieces",
        "_secondary",
        "_storage",
        "_sums",
        "all_bits",
        "compute_dtype",
        "device",
        "dtype",
        "gradient_dtype",
        "holds_instances",
        "home",
        "is_away",
        "is_empty",
        "is_marked",
        "params",
        "plan",
        "pool_key",
        "routes",
        "shard",
        "steppers",
        "steps_together",
    )

    def __init__(
        self,
        plan: BufferPlan,
        module_fqn: str,
        members: HandleMembers,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        is_deferred: bool = False,
        home: RestingPlace | None = None,
        mp_policy: MixedPrecisionPolicy = NO_CASTS,
    ) -> None:
        self.plan = plan
        self.dtype = plan.dtype
        self.compute_dtype = plan.compute_dtype
        self.gradient_dtype = plan.reduce_dtype if mp_policy.keep_low_precision_grads else plan.dtype
        self.is_empty = plan.layout.numel == 0
        self.pool_key = _pool_key(plan, device)
        self.device = device
        self.home = home or RestingPlace(device)
        self.is_marked = False
        self.is_away = not is_deferred and any(members.originals[span.fqn].is_meta for span in plan.layout.spans)
        if self.is_away:
            self.shard = torch.empty(plan.layout.shard_numel, dtype=plan.dtype, device="meta")
        else:
            self.shard = self.home.zeros(plan.layout.shard_numel, plan.dtype)
        self.params = make_sharded_params(
            plan, module_fqn, members, mesh, self.shard, self.gradient_dtype, self.home.device, device
        )
        self.holds_instances = any(param.form is not None and param.form.kind != "marked" for param in self.params)
        if not is_deferred:
            self._take_values([members.originals[span.fqn] for span in plan.layout.spans])
        split = plan.layout.split_of(mesh.get_local_rank())
        self._piece_sizes = split.sizes
        self._pieces = list(zip(self.params, split.indices, strict=True))
        self.all_bits = (1 << len(self.params)) - 1
        self._hooks_known, self._has_hooks = -1, False
        self.routes = Routes(
            mesh.get_group(),
            self.home,
            self.gradient_dtype,
            plan.reduce_dtype,
            self.params[0].fqn,
            casts_params=self.compute_dtype != self.dtype,
        )
        self._buffer: torch.Tensor | None = None
        self._storage: torch.UntypedStorage | None = None
        self._secondary: torch.Tensor | None = None
        self._is_allocated = False
        self._buffer_bytes = plan.buffer_bytes
        # What gradients are collected in: its dtype and device.
        self._gradient_like = torch.empty(0, dtype=plan.reduce_dtype, device=device)
        self._sums = False
        self.step_by(())

    def _take_values(self, originals: Sequence[nn.Parameter]) -> None:
        """Keep this rank's pieces of the originals; without a shard, in memory of their own where there are values."""
        for param, original in zip(self.params, originals, strict=True):
            if not self.is_away:
                param.write_full(original)
            elif not original.is_meta:
                param.take(param.storage_of(original))

    @property
    def is_trainable(self) -> bool:
        """Some parameter requires a gradient now; users freeze and unfreeze between steps, alike on all ranks."""
        # In every backward: a generator costs as much again.
        for param in self.params:  # noqa: SIM110
            if param.sharded.requires_grad:
                return True
        return False

    @property
    def is_offloaded(self) -> bool:
        """The shard does not rest where the buffer is."""
        return self.home.is_elsewhere

    def begin_unshard(self) -> Pending:
        """Allocate the buffer and start the all-gather into it, on the current stream; the shard is usable."""
        path = self.routes.gather_path
        assert path is not None, "connected when the root was decided"
        return path.begin(self._allocated(), self.shard)

    def begin_unshard_again(self) -> Pending:
        """Do so from secondary shards. Collective: all ranks of the smaller group, same order."""
        path = self.routes.secondary_path
        assert path is not None and self._secondary is not None, "kept after forward"
        return path.begin(self._allocated(), self._secondary)

    def begin_fill(self) -> Pending:
        """Allocate the secondary shard and start to gather it from shards, on the current stream.

        Collective: all ranks with the same place on other hosts, same order.
        """
        path = self.routes.fill_path
        assert path is not None, "connected when the root was decided"
        if self._secondary is None:
            with torch.inference_mode(mode=False):
                numel = self.shard.numel() * path.transport.world_size
                self._secondary = torch.empty(numel, dtype=self.compute_dtype, device=self.device)
        return path.begin(self._secondary, self.shard)

    def _allocated(self) -> torch.Tensor:
        """Return the buffer, with memory."""
        if self._storage is None:
            self._make_buffer()
        elif not self._is_allocated:
            # What was kept stays where it is: to resize it would move it.
            self._storage.resize_(self._buffer_bytes)
        self._is_allocated = True
        assert self._buffer is not None, "made above"
        return self._buffer

    def keep_secondary(self) -> None:
        """Copy this rank's secondary shard out of the buffer, which is full, to new memory on the current stream."""
        path = self.routes.secondary_path
        assert path is not None and self._buffer is not None, "connected, and unsharded"
        numel = self.plan.layout.numel // path.transport.world_size
        start = path.transport.rank * numel
        self._secondary = None  # Freed first, if there is one.
        self._secondary = self._buffer[start : start + numel].clone()

    def drop_secondary(self) -> None:
        """Free the secondary shard, if there is one."""
        self._secondary = None

    @property
    def is_usable(self) -> bool:
        """Every sharded parameter shows the shard, and the shard is where it rests."""
        for param in self.params:
            if param.sharded._local_tensor is not param.local:  # type: ignore[attr-defined]  # cheaper than a check
                return False
        return not self.is_away

    def check_usable(self) -> None:
        """Raise ``UsageError`` if parameters are on another device than they rest on."""
        home = self.home.device
        away = [param for param in self.params if param.sharded.device.type != home.type]
        if away:
            device = away[0].sharded.device
            if self.is_offloaded:
                wanted = f"offload_policy keeps them on {home}"
                fix = "model.to('cpu'), then move its buffers to the device; or leave out what moved the model"
            else:
                wanted, fix = f"the ranks talk on {self.device}", f"model.to({home.type!r})"
            raise UsageError(
                f"parameters are on {device}, and {wanted}",
                at=f"{place_of_rank()}, parameter {', '.join(repr(param.fqn) for param in away[:3])}",
                fix=META_FIX if device.type == "meta" else fix,
            )

    def attach(self) -> None:
        """Bring pieces to which torch gave other memory back into the shard, with their values.

        ``to_empty`` of a single module and loads that assign do that. Nothing happens while one of
        the parameters is still on the meta device. Not collective.

        Raises:
            UsageError: A parameter was cast to another dtype.
        """
        pieces = [param.ragged._local_tensor for param in self.params]
        if all(param.is_attached for param in self.params) or any(piece.is_meta for piece in pieces):
            return
        for param, piece in zip(self.params, pieces, strict=True):
            if piece.dtype != self.dtype:
                raise _cannot_cast(param.fqn, self.dtype, piece.dtype)
        # Maybe inside a first forward in inference mode; see ``_make_buffer``.
        with torch.inference_mode(mode=False), torch.no_grad():
            if self.shard.is_meta or self.is_away:
                self._rest_on(self.home.zeros(self.shard.numel(), self.dtype))
            for param, piece in zip(self.params, pieces, strict=True):
                if piece is not param.local:
                    param.local.data.copy_(piece)
                    param.show(param.local)

    def check_convertible(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise ``UsageError`` if ``fn`` cannot be applied: it changes the dtype, or the device of what others hold."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.shard.device))
        if probe.dtype != self.dtype:
            raise _cannot_cast(self.params[0].fqn, self.dtype, probe.dtype)
        held = [param.fqn for param in self.params if param.is_weakly_held]
        if probe.device != self.shard.device and held:
            raise UsageError(
                "the device of a parameter to which something holds a weak reference cannot change",
                at=f"parameter {', '.join(map(repr, held))}",
                fix="drop views of it and other weak references first",
            )

    @torch.no_grad()
    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Do to the shard and the gradients what ``Module._apply`` does to tensors; every parameter is attached."""
        was_meta = self.shard.is_meta
        shard = fn(self.shard)
        if shard is self.shard:
            return
        grads = [param.sharded.grad for param in self.params]
        for param in self.params:
            param.sharded.grad = None
        self._rest_on(shard)
        for param, grad in zip(self.params, grads, strict=True):
            param.show(param.local)
            if grad is not None:
                param.sharded.grad = fn(grad)
        if was_meta:
            used = {index for _, index in self._pieces}
            for index, part in enumerate(self.shard.split_with_sizes(self._piece_sizes)):
                if index not in used:
                    part.zero_()

    def _rest_on(self, shard: torch.Tensor) -> None:
        """Make ``shard`` [S] the place of the pieces; the parameters still show the old one."""
        shard = self.shard = self.home.pinned(shard)
        # Remembered, since asking a tensor for its device costs microseconds.
        self.is_away = shard.device.type != self.home.device.type
        for param in self.params:
            param.local = param.piece_of(shard)

    def make_leaves(self) -> None:
        """Create the unsharded parameters of a class without elements: nothing is ever gathered."""
        if self._buffer is None:
            self._make_buffer()

    def free_buffer(self) -> None:
        """Release the buffer's memory; its views stay valid for the next unshard."""
        if self._storage is not None:
            # First: what is cut short here is allocated anew.
            self._is_allocated = False
            self._storage.resize_(0)

    def is_fresh(self) -> bool:
        """Say whether the full buffer has, for this rank, what a gather of its shard would put there.

        By comparing values: not every way of writing leaves a trace on a tensor. The host waits for a device.
        """
        if self.is_empty:
            return True
        if self._buffer is None or not self.is_usable:
            return False
        return self._equals_shard(self._buffer[self.plan.layout.shard_of(self.params[0].layout.rank)])

    def is_secondary_fresh(self) -> bool:
        """Say whether the secondary shard has, for this rank, what filling it from its shard would put there."""
        path = self.routes.fill_path
        if self.is_empty:
            return True
        if path is None or self._secondary is None or not self.is_usable:
            return False
        numel = self.shard.numel()
        return self._equals_shard(self._secondary[path.transport.rank * numel :][:numel])

    def _equals_shard(self, own: torch.Tensor) -> bool:
        # As bytes: zeros have signs, and NaN equals NaN.
        shard = self.shard.detach().to(own.device, self.compute_dtype)
        return torch.equal(own.view(torch.uint8), shard.view(torch.uint8))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether a plain tensor lies in the buffer, whose memory is there."""
        storage = self._storage
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        # Tensors of other classes, or under a transform, have no memory of their own.
        if storage is None or type(tensor) not in _PLAIN or tensor.device.type != self.device.type:
            return False
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            return False
        start = storage.data_ptr()
        return start <= address < start + self._buffer_bytes

    def write_back(self) -> None:
        """Make this rank's part of the unsharded values the values of the shard; the buffer is full."""
        if self._buffer is None or self.is_empty:
            return
        for leaf, view in self._moved_leaves():
            view.copy_(leaf.data)
        rank = self.params[0].layout.rank
        self.shard.data.copy_(self._buffer[self.plan.layout.shard_of(rank)])

    def mend_leaves(self) -> None:
        """Put leaves that were given other data (``leaf.data = values``) back on the buffer."""
        for leaf, view in self._moved_leaves():
            leaf.data = view

    def _moved_leaves(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        if self._buffer is None:
            return []
        views = [span.view_in(self._buffer) for span in self.plan.layout.spans]
        # Who shows instances of other classes shows copies, and leaves these as they are.
        leaves = [] if self.holds_instances else [param.leaf() for param in self.params]
        pairs = zip(leaves, views, strict=not self.holds_instances)
        return [(leaf, view) for leaf, view in pairs if leaf.data_ptr() != view.data_ptr() or leaf.shape != view.shape]

    def take_gradients(self, gradient: GradientBuffer) -> int:
        """Move the leaves' gradients into ``gradient``; returns the bits of those that had one, the others are zero."""
        views: list[torch.Tensor] = []
        grads: list[torch.Tensor] = []
        had = self.all_bits
        for param, view in zip(self.params, gradient.views, strict=True):
            leaf = param.unsharded
            grad = None if leaf is None else leaf.grad
            if leaf is None or grad is None:
                view.zero_()
                had ^= 1 << self.params.index(param)
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
            pairs = zip(self.params, gradient.views, strict=True)
            names = [str(param.layout.label or param.fqn) for param, view in pairs if id(view) in sparse]
            raise UsageError(
                "a gradient is sparse, and a flat buffer holds dense ones only",
                at=f"{place_of_rank()}, parameter {', '.join(map(repr, names))}",
                fix="build the embedding with sparse=False, or pass it in ignored_modules",
            ) from error
        return had

    def sum_in_reduce_dtype(self, *, sums: bool) -> None:
        """Choose whether autograd adds up gradients in the dtype of the reduction, as it does those that wait.

        It casts each gradient before it adds it; those that are reduced at once are cast on their way.
        """
        if not (sums or self._sums):
            return
        self._sums = sums
        for param in self.params:
            leaf = param.unsharded
            if leaf is None:
                continue
            grad, dtype = leaf.grad, self.plan.reduce_dtype
            if grad is None:
                leaf.grad_dtype = dtype if sums else self.compute_dtype
            elif grad.dtype == dtype:
                self._sums = True  # Until it is reduced.
            elif sums:
                leaf.grad = None
                leaf.grad_dtype = dtype
                leaf.grad = grad.to(dtype)

    def copied(self, memo: dict[int, Any], *, with_kept_gradients: bool) -> "FlatBuffer":
        """Return a deep copy with a shard of its own, not connected to a transport.

        Args:
            memo: Of the running ``copy.deepcopy``.
            with_kept_gradients: Also copy gradients that wait on the unsharded parameters to be reduced.
        """
        twin = copy.copy(self)
        twin.shard = self.home.pinned(self.shard.clone())
        twin.params = [param.copied(twin.shard, memo) for param in self.params]
        twin._pieces = [(param, index) for param, (_, index) in zip(twin.params, self._pieces, strict=True)]
        twin._hooks_known = -1
        twin.step_by(())
        twin.routes = self.routes.unconnected()
        twin._buffer = twin._storage = twin._secondary = None
        twin._is_allocated = False
        if with_kept_gradients and self.has_gradients():
            twin._make_buffer()
            twin.free_buffer()
            for param, own in zip(self.params, twin.params, strict=True):
                if param.unsharded is not None and param.unsharded.grad is not None:
                    grad = param.unsharded.grad.clone()
                    own.leaf().grad_dtype = grad.dtype
                    own.leaf().grad = grad
        return twin

    def step_by(self, steppers: Sequence[Stepper]) -> None:
        """Let these step the sharded parameters, from the next backward on."""
        self.steppers = tuple(steppers)
        self.steps_together = bool(steppers) and not all(steps_alone(param.sharded) for param in self.params)

    def has_gradients(self) -> bool:
        """Say whether any leaf holds a gradient."""
        return any(param.unsharded is not None and param.unsharded.grad is not None for param in self.params)

    def gradient_bits(self) -> int:
        """Return the bits of the parameters whose leaves hold a gradient."""
        found = 0
        for number, param in enumerate(self.params):
            leaf = param.unsharded
            if leaf is not None and leaf.grad is not None:
                found |= 1 << number
        return found

    def expects_more(self, had: int) -> bool:
        """Say whether the running backward will reach a leaf that is not among ``had``, the bits of some parameters."""
        return had != self.all_bits and any(
            param.unsharded is not None and param.unsharded.requires_grad and will_get_gradient(param.unsharded)
            for index, param in enumerate(self.params)
            if not had >> index & 1
        )

    def keep_gradients(self) -> bool:
        """Note what waits on leaves, or as kept shards, so that ``zero_grad`` drops it; say whether there is any."""
        waiting = self.gradient_bits() | self.routes.kept.bits
        for number, param in enumerate(self.params):
            if waiting >> number & 1:
                param.keep_gradient()
        return waiting != 0

    def drop_zeroed_gradients(self) -> int:
        """Forget kept gradients of parameters whose ``grad`` the user has dropped or set to zero.

        Returns:
            Which, as bits.
        """
        dropped = 0
        for number, param in enumerate(self.params):
            if param.drop_zeroed_gradient():
                dropped |= 1 << number
        self.drop_kept(dropped)
        return dropped

    def drop_kept(self, bits: int) -> None:
        """Forget the gradients of some parameters that wait for an all-reduce over copies."""
        for number, param in enumerate(self.params if bits else ()):
            if bits >> number & 1:
                self.routes.kept.drop(number, param.start, param.stop)

    def has_hooks(self) -> bool:
        """Say whether users registered hooks on the gradient of a sharded parameter."""
        if self._hooks_known != HOOKS.made:
            self._hooks_known = HOOKS.made
            self._has_hooks = any(
                param.sharded._post_accumulate_grad_hooks or param.sharded._backward_hooks for param in self.params
            )
        return self._has_hooks

    def drop_gradients(self) -> None:
        """Forget what the leaves hold."""
        for param in self.params:
            param.forget_gradient()

    def make_gradient_buffer(self) -> GradientBuffer:
        """Allocate what ``take_gradients`` fills, on the current stream."""
        layout = self.plan.layout
        return GradientBuffer(layout, self.routes.scatter_transport.empty(layout.numel, self._gradient_like))

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
                hand_over_grad(sharded, grad)
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

    def _make_buffer(self) -> None:
        layout = self.plan.layout
        # What is made in inference mode could never be saved for backward, and this is made once.
        with torch.inference_mode(mode=False):
            buffer = torch.empty(layout.numel, dtype=self.compute_dtype, device=self.device)
            for span, param in zip(layout.spans, self.params, strict=True):
                param.make_unsharded(span.view_in(buffer.data))
            self._buffer = buffer.data
        self._storage = buffer.untyped_storage()


class _PoolKey:
    __slots__ = ("__weakref__",)


_POOL_KEYS: "WeakValueDictionary[object, _PoolKey]" = WeakValueDictionary()


def _pool_key(plan: BufferPlan, device: torch.device) -> object:
    """Return what is the same object for classes that can use each other's memory."""
    layout = plan.layout
    spans = tuple((span.start, span.shape, span.order) for span in layout.spans)
    # To hash all that in every backward would take microseconds.
    return _POOL_KEYS.setdefault((spans, layout.numel, plan.reduce_dtype, device), _PoolKey())


def _cannot_cast(fqn: str, old: torch.dtype, new: torch.dtype) -> UsageError:
    return UsageError(
        f"a sharded parameter of {str(old)[6:]} cannot become {str(new)[6:]}",
        at=f"parameter {fqn!r}",
        fix="convert the model before fully_shard; for another dtype in computation pass mp_policy",
    )

"""One flat buffer, for parameters of one dtype.

Owns two tensors: the rank's *shard* [S], alive for good, maybe on the host; and the unsharded *buffer* [W * S],
whose storage is allocated and freed in place so that views saved by autograd stay right. ``routes.py`` says how one
becomes the other, and in which dtypes; ``gradients.py`` has the gradients.

Sizes are in elements. No code here decides when a collective runs, or on which stream.

Source: flat parameters, arXiv 2304.11277.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from composable.comm import Pending, Ranks, joined_mesh
from composable.dtensor import RaggedSpec, ragged_spec, splits_of
from composable.engine.gradients import Gradients
from composable.engine.param import ShardedParam, memory_in
from composable.engine.paths import RestingPlace
from composable.engine.routes import Routes
from composable.errors import UsageError
from composable.ground.torch_private import set_versions
from composable.ground.unfilled import META_FIX
from composable.planning import NO_CASTS, BufferPlan, Form, HandleMembers, MixedPrecisionPolicy, Span, SplitNode

_PLAIN = (torch.Tensor, nn.Parameter)
# Version of unsharded parameters whose memory is freed, or being filled: shards never get that far.
FREED = 2**31


def digest_of(values: torch.Tensor) -> int:
    """Return a number of the bits of ``values``, of any shape: sums by rows and by columns, each sum with a weight."""
    words = values.detach().reshape(-1).view(torch.int32 if values.element_size() % 4 == 0 else torch.uint8)
    sums = [words]
    if len(words) > 2**12:  # Else the operations would cost more than the sums.
        rows = words[: len(words) // 256 * 256].view(-1, 256)
        sums = [rows.sum(1), rows.sum(0), words[rows.numel() :]]
    return int(sum((one * torch.arange(1, len(one) + 1, device=one.device)).sum() for one in sums))


class FlatBuffer:
    """Storage and collectives of one class of a handle's parameters.

    Args:
        plan: Layout, dtype and trainability of the class.
        module_fqn: The handle's module, as the plan names it.
        members: The parameters and every place that holds them, by the plan's FQNs.
        mesh: 1-D mesh of the shard group.
        device: Device of the buffer, and of the leaves' gradients.
        is_deferred: The values come later: the shard is zeros in its resting place, also if the
            originals are real. Otherwise the shard is on meta as long as one original is.
        home: Resting place of the shard and its gradient; default: ``device``.
        mp_policy: The policy that made the plan.
    """

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
        self.dtype = plan.dtype  # Dtype of the shard.
        self.compute_dtype = plan.compute_dtype  # Dtype of the buffer, and of the gradients that autograd makes.
        # Dtype of reduced gradients.
        self.gradient_dtype = plan.reduce_dtype if mp_policy.keep_low_precision_grads else plan.dtype
        self.is_empty = plan.layout.numel == 0
        self.device = device
        self.home = home or RestingPlace(device)
        # The shard is not in its resting place: it is on the meta device, or torch has moved it.
        self.is_away = not is_deferred and any(members.params[span.fqn].param.is_meta for span in plan.layout.spans)
        self.is_new = self.is_away  # The shard got its memory after the annotation, so it may hold no values yet.
        if self.is_away:
            self.shard = torch.empty(plan.layout.shard_numel, dtype=plan.dtype, device="meta")
        else:
            self.shard = self.home.zeros(plan.layout.shard_numel, plan.dtype)
        rank = mesh.get_local_rank()  # Asked once: torch searches its groups.
        self.params = [self._make_param(span, module_fqn, members, mesh, rank) for span in plan.layout.spans]
        _choose_stored(self.params)
        # Some unsharded parameter is an instance of a tensor subclass, more than a view of the buffer.
        self.holds_instances = any(param.form is not None and param.form.kind != "marked" for param in self.params)
        if not is_deferred:
            self._take_values([members.params[span.fqn].param for span in plan.layout.spans])
        self._split = plan.layout.split_of(rank)
        self.routes = Routes(
            self.home, self.gradient_dtype, plan.reduce_dtype, casts_params=self.compute_dtype != self.dtype
        )
        self._forget_unsharded()
        self._buffer_bytes = plan.buffer_bytes
        self.gradients = Gradients(plan, self.params, self._split, self.routes, device)

    def _forget_unsharded(self) -> None:
        self._buffer: torch.Tensor | None = None
        # The buffer, with the version that all leaves share; empty: there are none. Autograd raises for a leaf that it
        # saved with another version: they have the shards' while the buffer is full, ``FREED`` else.
        self.versioned: tuple[torch.Tensor, ...] = ()
        self._storage: torch.UntypedStorage | None = None
        self.is_allocated = False  # The buffer has memory.

    def _make_param(
        self, span: Span, module_fqn: str, members: HandleMembers, mesh: DeviceMesh, rank: int
    ) -> ShardedParam:
        """Return a parameter whose piece lies in the shard, and has no values yet."""
        layout, found = self.plan.layout, members.params[span.fqn]
        form, bounds = found.form, layout.bounds(span)
        if form is not None and form.kind != "marked" and not self.shard.is_meta:
            # Forward reads the form's state on the device of the unsharded parameters.
            form.move(self.device)
        return ShardedParam(
            span.fqn.removeprefix(f"{module_fqn}."),
            found.owners,
            found.param,
            _spec_of(span, self.dtype, bounds, mesh, form),
            self.shard,
            *layout.local_range(span, rank),
            self.gradient_dtype,
            self.home.device,
            form,
        )

    def _take_values(self, originals: Sequence[nn.Parameter]) -> None:
        """Copy this rank's pieces of the originals into the shard; without a shard, into memory of their own."""
        for param, original in zip(self.params, originals, strict=True):
            if not self.is_away:
                param.write_full(original)
            elif not original.is_meta:
                param.take(param.storage_of(original))

    @property
    def is_trainable(self) -> bool:
        """Some parameter requires a gradient now; users freeze and unfreeze between steps, alike on all ranks."""
        # Runs in every backward: a generator would double the cost.
        for param in self.params:  # noqa: SIM110
            if param.sharded.requires_grad:
                return True
        return False

    def begin_unshard(self) -> Pending:
        """Allocate the buffer and start the all-gather into it, on the current stream; the shard must be usable."""
        if self._storage is not None and not self.is_allocated and self._buffer is not None:
            # The common case, once for each gather: the work of ``allocated`` without the call.
            self._storage.resize_(self._buffer_bytes)
            self.is_allocated = True
            return self.routes.gather_path.begin(self._buffer, self.shard)
        return self.routes.gather_path.begin(self.allocated(), self.shard)

    def allocated(self) -> torch.Tensor:
        """Return the buffer [W * S], with its memory allocated."""
        buffer = self._buffer
        if buffer is None or self._storage is None:
            buffer = self._make_buffer()
        elif not self.is_allocated:
            # Only a freed buffer is resized: one that was kept would move.
            self._storage.resize_(self._buffer_bytes)
        self.is_allocated = True
        return buffer

    @property
    def is_usable(self) -> bool:
        """Every sharded parameter shows the shard, and the shard is in its resting place."""
        for param in self.params:
            if param.sharded._local_tensor is not param.shown:  # type: ignore[attr-defined]  # cheaper than a check
                return False
        return not self.is_away

    def check_usable(self) -> None:
        """Raise ``UsageError`` if parameters are not on the device of their resting place."""
        home = self.home.device
        away = [param for param in self.params if param.sharded.device.type != home.type]
        if away:
            device = away[0].sharded.device
            if self.home.is_elsewhere:
                wanted = f"offload_policy keeps them on {home}"
                fix = "model.to('cpu'), then move its buffers to the device; or leave out what moved the model"
            else:
                wanted, fix = f"the ranks talk on {self.device}", f"model.to({home.type!r})"
            raise UsageError(
                f"parameters are on {device}, and {wanted}",
                at=f"parameter {', '.join(repr(param.fqn) for param in away[:3])}",
                fix=META_FIX if device.type == "meta" else fix,
            )

    def attach(self) -> None:
        """Copy pieces that torch has moved to other memory back into the shard.

        ``to_empty`` of a single module and loads that assign move them. Nothing happens while one of
        the parameters is still on the meta device. Not collective. Raises ``UsageError`` if a parameter was cast.
        """
        pieces = [param.ragged._local_tensor for param in self.params]
        if all(param.is_attached for param in self.params) or any(piece.is_meta for piece in pieces):
            return
        for param, piece in zip(self.params, pieces, strict=True):
            if piece.dtype != self.dtype:
                raise _cannot_cast(param.fqn, self.dtype, piece.dtype)
        # A first forward may run in inference mode; see ``_make_buffer``.
        with torch.inference_mode(mode=False), torch.no_grad():
            if self.shard.is_meta or self.is_away:
                self._rest_on(self.home.zeros(self.shard.numel(), self.dtype))
            for param, piece in zip(self.params, pieces, strict=True):
                if piece is not param.shown:
                    param.local.data.copy_(memory_in(param))
                    param.show(param.local)

    def check_convertible(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise ``UsageError`` if ``fn`` changes the dtype, so that it cannot be applied."""
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.shard.device))
        if probe.dtype != self.dtype:
            raise _cannot_cast(self.params[0].fqn, self.dtype, probe.dtype)

    @torch.no_grad()
    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Apply ``fn`` to the shard [S] and the gradients, as ``Module._apply`` does; every parameter is attached."""
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
            for index, part in enumerate(self.shard.split_with_sizes(self._split.sizes)):
                if index not in self._split.indices:
                    part.zero_()

    def _rest_on(self, shard: torch.Tensor) -> None:
        """Make ``shard`` [S] the memory of the pieces; the parameters still show the old memory."""
        shard = self.shard = self.home.pinned(shard)
        self.is_new = True
        # Remembered, since asking a tensor for its device costs microseconds.
        self.is_away = shard.device.type != self.home.device.type
        for param in self.params:
            param.lie_in(shard)

    def move_to(self, mesh: DeviceMesh) -> None:
        """Lie on the ranks of another mesh of this size, in which this rank has the same place; see ``connect``."""
        for param in self.params:
            param.layout.move_to(mesh)

    def free_buffer(self) -> None:
        """Release the buffer's memory; its views stay valid for the next unshard."""
        if self._storage is not None:
            # Set first: if an exception cuts this short, the memory is allocated again.
            self.is_allocated = False
            set_versions(self.versioned, (FREED,))
            try:
                self._storage.resize_(0)
            except RuntimeError:
                if self._storage.resizable():
                    raise
                # A view has become a NumPy array: the memory stays for as long as the handle.
                self.is_allocated = True

    def checksum(self) -> int:
        """Return a digest of the full buffer and where leaves lie; the host waits for the device."""
        if self._buffer is None or self.is_empty or not self.routes.carries_values:
            return 0
        return digest_of(self._buffer) + len(self._moved_leaves())

    def written(self) -> list[str]:
        """Return the FQNs of parameters whose part of this rank is not that of the shard; leaves are views again."""
        if self._buffer is None or not self.is_usable:
            return []
        moved = {id(leaf) for leaf, _ in self._moved_leaves()}
        self.mend_leaves()
        own = self._buffer[self.plan.layout.shard_of(self.params[0].layout.rank)]
        differs = (own != self.shard.detach().to(own)).cpu()
        return [one.fqn for one in self.params if id(one.unsharded) in moved or differs[one.start : one.stop].any()]

    def is_fresh(self) -> bool:
        """Say whether this rank's part of the full buffer still has the values of its shard.

        Values are compared, since some ways of writing leave no trace on a tensor. The host waits for the device.
        """
        if self.is_empty:
            return True
        if self._buffer is None or not self.is_usable:
            return False
        own = self._buffer[self.plan.layout.shard_of(self.params[0].layout.rank)]
        # Compared as bytes: zeros have signs, and NaN equals NaN.
        shard = self.shard.detach().to(own.device, self.compute_dtype)
        return torch.equal(own.view(torch.uint8), shard.view(torch.uint8))

    def is_unwritten(self) -> bool:
        """Say whether leaves are views of the full buffer, and this rank's part of it has the values of its shard."""
        return self.is_fresh() and not self._moved_leaves()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Say whether a plain tensor of any shape lies in the buffer, whose memory is allocated."""
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
        """Copy this rank's part of the unsharded values into the shard; the buffer is full."""
        if self._buffer is None or self.is_empty:
            return
        for leaf, view in self._moved_leaves():
            view.copy_(leaf.data)
        rank = self.params[0].layout.rank
        self.shard.data.copy_(self._buffer[self.plan.layout.shard_of(rank)])

    def mend_leaves(self) -> None:
        """Make leaves that got other data (``leaf.data = values``) views of the buffer again."""
        for leaf, view in self._moved_leaves():
            leaf.data = view

    def _moved_leaves(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        if self._buffer is None or not self.routes.carries_values:
            return []
        views = [span.view_in(self._buffer) for span in self.plan.layout.spans]
        # Contexts show copies of such instances, so that the leaves stay unchanged.
        leaves = [] if self.holds_instances else [param.leaf() for param in self.params]
        pairs = zip(leaves, views, strict=not self.holds_instances)
        return [(leaf, view) for leaf, view in pairs if leaf.data_ptr() != view.data_ptr() or leaf.shape != view.shape]

    def copied(self, memo: dict[int, Any]) -> "FlatBuffer":
        """Return a deep copy with a shard of its own, not connected to a transport; no gradient waits."""
        twin = copy.copy(self)
        twin.shard = self.home.pinned(self.shard.clone())
        twin.params = [param.copied(twin.shard, memo) for param in self.params]
        twin.routes = self.routes.unconnected()
        twin.gradients = self.gradients.copied(twin.params, twin.routes)
        twin._forget_unsharded()
        return twin

    def _make_buffer(self) -> torch.Tensor:
        layout = self.plan.layout
        # A tensor made in inference mode could never be saved for backward, and the buffer is made once.
        with torch.inference_mode(mode=False):
            buffer = torch.empty(layout.numel, dtype=self.compute_dtype, device=self.device)
            for span, param in zip(layout.spans, self.params, strict=True):
                param.unsharded = param.make_stand_in(span.view_in(buffer))
            self.versioned = (buffer,)
            # With a version of its own: filling it is no change.
            self._buffer = buffer.data
        self._storage = buffer.untyped_storage()
        return self._buffer


class SecondaryShards:
    """This rank's secondary shards [W * S / n] of a handle's flat buffers, from which n ranks gather for backward.

    A forward leaves them. Source: hpZ of ZeRO++, arXiv 2306.10209.

    Attributes:
        kept_in: Number of the forward that has left them, complete; -1: there are none.
        are_source: The next gather, or the one under way, reads secondary shards.
        version: Version of the shards at the gather that filled the buffers they were cut from.
    """

    __slots__ = ("_buffers", "_shards", "are_source", "kept_in", "version")

    def __init__(self, buffers: Sequence[FlatBuffer]) -> None:
        self._buffers = tuple(buffers)
        self._shards: dict[FlatBuffer, torch.Tensor] = {}
        self.are_source = False
        self.version, self.kept_in = 0, -1

    def begin(self, flat: FlatBuffer) -> Pending:
        """Start to gather a buffer from secondary shards. Collective: all ranks of the smaller group, same order."""
        return flat.routes.secondary_path.begin(flat.allocated(), self._shards[flat])

    def keep(self, version: int, forward_id: int) -> None:
        """Replace the secondary shards by copies from the full buffers, in new memory, on the current stream."""
        self.drop()
        for flat in self._buffers:
            if flat.is_empty:
                continue
            transport = flat.routes.secondary_path.transport
            numel = flat.plan.layout.numel // transport.world_size
            start = transport.rank * numel
            self._shards[flat] = flat.allocated()[start : start + numel].clone()
        self.version = version
        # Set last, so that a copy that was cut short is not used.
        self.kept_in = forward_id

    def drop(self) -> None:
        """Free the secondary shards, also incomplete ones; a gather that reads them keeps their memory."""
        self.kept_in = -1
        self._shards.clear()


def _cannot_cast(fqn: str, old: torch.dtype, new: torch.dtype) -> UsageError:
    return UsageError(
        f"a sharded parameter of {str(old)[6:]} cannot become {str(new)[6:]}",
        at=f"parameter {fqn!r}",
        fix="convert the model before fully_shard; for another dtype in computation pass mp_policy",
    )


def _choose_stored(params: Sequence[ShardedParam]) -> None:
    """Choose the ranks that checkpoints read, where ranks along a dim of tensor parallelism cut copies differently.

    Blocks of other shapes move the cuts of all parameters in the buffer. With equal blocks, all copies may be stored.
    """
    if all(param.layout.is_even for param in params):
        return
    dims: dict[tuple[int, ...], int] = {}
    for param in params:
        mesh = param.layout.mesh
        for dim in range(mesh.ndim):
            if dim != param.layout.mesh_dim:
                ranks = Ranks.of_mesh(mesh, dim)
                dims[ranks.numbers] = ranks.rank
    for param in params:
        own = {number for ranks in param.layout.split_ranks for number in ranks.numbers}
        # A parameter that is split over some of these ranks has no copies along the dim.
        copies = {numbers: rank for numbers, rank in dims.items() if len(own.intersection(numbers)) < 2}
        param.layout.is_stored, param.layout.stored_among = not any(copies.values()), tuple(copies)


def _spec_of(span: Span, dtype: torch.dtype, bounds: Sequence[int], mesh: DeviceMesh, form: Form | None) -> RaggedSpec:
    if form is None or not isinstance(form.node, SplitNode):
        return ragged_spec(mesh, span.shape, dtype, bounds, order=span.order)
    whole = form.node.spec
    joined, mesh_dim = joined_mesh(mesh, whole.mesh)
    others = [dim for dim in range(joined.ndim) if dim != mesh_dim]
    splits = {others[dim]: split for dim, split in splits_of(whole.placements).items()}
    return ragged_spec(joined, whole.shape, dtype, bounds, mesh_dim=mesh_dim, order=span.order, splits=splits)

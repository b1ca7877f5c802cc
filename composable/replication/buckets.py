"""The buckets of gradients, and the order in which gradients arrive.

In the first backward there is one bucket for each dtype and device; but if an optimizer steps inside backward, buckets
follow the order of registration, from the last parameter to the first. The first backward shows in which order
gradients arrive, and from then on buckets follow this order; with ``fixed_buckets``, that of registration.

Source: PyTorch Distributed, arXiv 2006.15704.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn

from composable.comm import Transport
from composable.errors import UsageError
from composable.ground.torch_private import foreach_copy_, foreach_mul_
from composable.replication.managed import ReducedParam, grad_dtype_of, local_gradient, local_of, wrapped_like
from composable.replication.options import ReplicateArguments
from composable.replication.static_graph import StaticGraph

_FIRST_CAP_BYTES = 2**20
# From this mean size on, scaling each gradient while it is copied beats copying all of them in
# one call and scaling the buffer after: 6.7 against 10.1 ms for 96 parameters with 25 M elements,
# but 1.7 against 1.3 ms for 288 with 4.8 M and 2.7 against 1.1 ms for 768 with 3.2 M.
_LARGE_NUMEL = 2**16


class Bucket:
    """A flat buffer for the gradients of some parameters. Its memory comes with the first gradients.

    To a communication hook it is what torch's ``GradBucket`` is: ``index``, ``buffer``,
    ``gradients``, ``parameters``, ``is_last``, ``set_buffer``.

    Args:
        index: Its place in the order of reduction.
        members: (index among all parameters, parameter) pairs; none if all gradients are sparse.
        tail_numel: Elements behind the gradients.
        is_last: No bucket follows.
        key: The transport's key for its all-reduce.
        like: An empty tensor of the dtype and device of the buffer.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[tuple[int, nn.Parameter]],
        *,
        tail_numel: int,
        is_last: bool,
        key: int,
        like: torch.Tensor,
    ) -> None:
        self.param_indices = [param_index for param_index, _ in members]  # Which parameters it holds, in order.
        self._params = [param for _, param in members]
        self._index = index
        self._is_last = is_last
        self.key = key
        # arrivals: How many gradients must arrive in a round until the bucket is full: usually one of each parameter.
        # pending: How many of these have not arrived yet.
        self.arrivals = self.pending = len(members)
        # Some gradients are kept in another dtype than they are sent in.
        self.casts = any(grad_dtype_of(param).to_real() is not like.dtype for param in self._params)
        local = [local_of(param) for param in self._params]
        # One behind the other: a communication hook may walk the buffer by the sizes of the gradients.
        *starts, stop = accumulate((param.numel() * (2 if param.is_complex() else 1) for param in local), initial=0)
        # Tensor parallelism has split some of the parameters: this rank holds a part of them.
        self.has_split = any(one is not param for one, param in zip(local, self._params, strict=True))
        self._starts, self._stop, self._tail_numel = starts, stop, tail_numel
        self.flat = like  # The whole buffer, with the tail; empty: there is no memory until the next gradients come.
        self.release()

    def _allocate(self) -> None:
        flat = self.flat.new_empty(self._stop + self._tail_numel)
        self._data = self._hook_buffer = flat[: self._stop]
        self.tail = flat[self._stop :]
        starts_of_params = zip(self._starts, self._params, strict=True)
        self._views = [_view_for(flat, start, local_of(param)) for start, param in starts_of_params]
        # The place of each gradient, with the parameter's shape, and its strides if it is dense. For a parameter that
        # tensor parallelism has split, a DTensor that is split alike, on this rank's part.
        self.views = [wrapped_like(view, param) for view, param in zip(self._views, self._params, strict=True)]
        # Set last, so that an allocation that was cut short is done again.
        self.flat = flat

    def release(self) -> None:
        """Free the memory until the next gradients come; tensors that others still hold keep theirs."""
        self.flat = self._data = self.tail = self._hook_buffer = self.flat.new_empty(0)
        self._views = self.views = [self.flat] * len(self._params)

    def clear(self) -> None:
        """Make all gradients in the buffer zero; what lies behind them stays."""
        if not self.flat.numel():
            self._allocate()
        self._data.zero_()

    @property
    def sent_bytes(self) -> int:
        """The bytes that are sent, known also while the bucket has no memory."""
        return (self._stop + self._tail_numel) * self.flat.element_size()

    def index(self) -> int:
        """Return the place of this bucket in the order of reduction."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return the flat gradients [numel], or what ``set_buffer`` put in their place for this round."""
        return self._hook_buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Let ``buffer`` return another tensor [numel], of any dtype, for the rest of this round."""
        self._hook_buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return one view of ``buffer()`` per parameter, in its shape."""
        if self._hook_buffer is self._data:
            return list(self._views)
        starts_of_params = zip(self._starts, self._params, strict=True)
        return [_view_for(self._hook_buffer, start, local_of(param)) for start, param in starts_of_params]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, of any shapes, in the order of ``gradients``."""
        return list(self._params)

    def is_last(self) -> bool:
        """Say whether no bucket follows in this round."""
        return self._is_last

    def pack(self, scale: float, *, grads_as_views: bool) -> int:
        """Write ``scale`` times every gradient into the buffer, or zeros without a gradient; return how many have none.

        ``grads_as_views``: ``param.grad`` is the view from now on. Raises ``UsageError`` if a gradient is sparse.
        """
        if not self.flat.numel():
            self._allocate()
        moved: list[tuple[nn.Parameter, torch.Tensor]] = []
        grads: list[torch.Tensor] = []
        places: list[torch.Tensor] = []
        in_place: list[torch.Tensor] = []
        for param, view, place in zip(self._params, self.views, self._views, strict=True):
            grad = param.grad
            if grad is view:
                in_place.append(place)
            elif grad is None:
                place.zero_()
            elif grad.layout is not torch.strided:
                raise UsageError("a gradient is sparse", fix="use sparse=False, or ignore the module")
            else:
                moved.append((param, view))
                grads.append(grad)
                places.append(place)
        if self.has_split:
            grads = [local_gradient(grad, param) for grad, (param, _) in zip(grads, moved, strict=True)]
            for grad, (param, _) in zip(grads, moved, strict=True):
                # Partial sums have been added up: `unpack` writes the average to this gradient.
                param.grad = wrapped_like(grad, param)
        if scale != 1 and self._stop >= _LARGE_NUMEL * len(self._params):
            for grad, place in zip(grads, places, strict=True):
                torch.mul(grad, scale, out=place)
            if in_place:
                foreach_mul_(in_place, scale)
        else:
            if grads:
                foreach_copy_(places, grads)
            if scale != 1:
                self._data.mul_(scale)
        if grads_as_views:
            for grad, (param, view) in zip(grads, moved, strict=True):
                # A gradient that is kept in another dtype gets the average when all is reduced.
                if grad.dtype is view.dtype:
                    param.grad = view
        return len(self._params) - len(moved) - len(in_place)

    def take_result(self, result: torch.Tensor) -> None:
        """Make the result [numel] of a communication hook the content of the buffer."""
        if result.data_ptr() != self._data.data_ptr() or result.dtype != self._data.dtype:
            self._data.copy_(result.view(-1))
        self._hook_buffer = self._data

    def unpack(self) -> None:
        """Copy the averages to the gradients that have memory of their own."""
        pairs = [
            (local_of(param.grad), plain)
            for param, view, plain in zip(self._params, self.views, self._views, strict=True)
            if param.grad is not None and param.grad is not view
        ]
        if pairs:
            foreach_copy_([grad for grad, _ in pairs], [view for _, view in pairs])

    def adopt(self, used: Sequence[float], *, is_view: bool) -> None:
        """Give parameters without a gradient the average, if another rank had a gradient.

        ``used`` has for each parameter of the reducer the number of ranks that had one. ``is_view``: the gradient
        becomes a view of the bucket, if its dtype allows that.
        """
        for index, param, view in zip(self.param_indices, self._params, self.views, strict=True):
            if param.grad is None and used[index] > 0:
                dtype = grad_dtype_of(param)
                param.grad = view if is_view and dtype is view.dtype else view.to(dtype, copy=True)


class Arrangement:
    """The buckets of a list of parameters, and the order that they follow.

    Args:
        params: The parameters. Sparse gradients lie in no bucket; the last bucket waits for them: it has the flags.
        transport: Gives each bucket its key.
        options: What the user chose.
        static: What the user has promised of every backward.
        tail_numel: Elements behind the gradients of the last bucket.
    """

    def __init__(
        self,
        params: Sequence[ReducedParam],
        transport: Transport,
        options: ReplicateArguments,
        static: StaticGraph | None,
        *,
        tail_numel: int,
    ) -> None:
        self.buckets: list[Bucket] = []  # In order of reduction; the list is changed in place.
        self.bucket_of: list[Bucket] = []  # The bucket of each parameter; the list is changed in place.
        # The order in which gradients are expected; ``None``: not known.
        self.order: list[int] | None = [*range(len(params))][::-1] if options.fixed_buckets else None
        self.is_due = False  # The buckets of the next backward follow another order, or other counts.
        self.is_stepped = False  # An optimizer steps the parameters of a bucket inside backward, and frees its memory.
        self._params = params
        self._transport = transport
        self._options = options
        self._static = static
        self._tail_numel = tail_numel
        self._sparse = [index for index, item in enumerate(params) if item.is_sparse]
        self.build()

    @property
    def is_rebuilt(self) -> bool:
        """The buckets of the last backward follow the order of arrival."""
        return self.order is not None and not self.is_due

    def step(self, is_stepped: bool) -> None:
        """Set whether an optimizer steps inside backward. Gradients get memory of their own, buckets none."""
        self.is_stepped = is_stepped
        self.build()

    @torch.no_grad()
    def dissolve(self) -> None:
        """Give every gradient memory of its own and free the buckets."""
        while self.buckets:
            bucket = self.buckets.pop()
            for index, view in zip(bucket.param_indices, bucket.views, strict=True):
                param = self._params[index].param
                if param.grad is view:
                    param.grad = view.clone()
        self.bucket_of.clear()

    def _groups(self) -> list[list[int]]:
        """Return the parameters of each bucket."""
        order, sizes = self.order, [item.bucket_bytes for item in self._params]
        if order is None and self.is_stepped:
            # Most gradients come in about this order; the others cost memory, in the first backward only.
            order = [*range(len(sizes))][::-1]
        elif order is None:
            order, sizes = [*range(len(sizes))], [0] * len(sizes)
        parts = self._options.delay.parts(order)
        keys = [
            (item.bucket_dtype, item.param.is_complex(), item.param.device, parts[index])
            for index, item in enumerate(self._params)
        ]
        inside = [index for index in sorted(order, key=parts.__getitem__) if index not in self._sparse]
        cap_bytes = self._options.cap_bytes
        groups = plan_buckets(inside, keys, sizes, first_cap_bytes=_FIRST_CAP_BYTES, cap_bytes=cap_bytes)
        return groups or [[]]  # The last bucket has the flags, even if it has nothing else.

    def build(self, *, tail_numel: int | None = None) -> None:
        """Make the buckets of the backwards from now on; ``tail_numel``: elements behind the last, if they change."""
        self.is_due = False
        self._tail_numel = self._tail_numel if tail_numel is None else tail_numel
        # Most optimizers free gradients between two rounds: then the old buckets go before the new ones come.
        self.dissolve()
        groups = self._groups() if self._params else []
        for number, group in enumerate(groups):
            first, is_last = self._params[group[0] if group else 0], number == len(groups) - 1
            bucket = Bucket(
                number,
                [(index, self._params[index].param) for index in group],
                tail_numel=self._tail_numel if is_last else 0,
                is_last=is_last,
                key=self._transport.allocate_key(),
                like=torch.empty(0, dtype=first.bucket_dtype, device=first.param.device),
            )
            awaited = group + self._sparse if is_last else group
            if self._static is None:
                bucket.arrivals = len(awaited)
            else:
                bucket.arrivals = self._static.arrivals_of(awaited, is_last=is_last)
            self.buckets.append(bucket)
        holder = {index: bucket for bucket in self.buckets for index in bucket.param_indices}
        self.bucket_of[:] = [holder.get(index, self.buckets[-1]) for index in range(len(self._params))]


def plan_buckets(
    order: Sequence[int], keys: Sequence[object], param_bytes: Sequence[int], *, first_cap_bytes: int, cap_bytes: int
) -> list[list[int]]:
    """Group parameters of equal key, in the order in which their gradients arrive.

    Args:
        order: Every parameter once, in order of arrival.
        keys: A key for each parameter.
        param_bytes: Bytes of each parameter.
        first_cap_bytes: Limit of the first bucket of each key: a small one starts early.
        cap_bytes: Limit of the others. A parameter above the limit is a bucket of its own.

    Returns:
        Parameters of each bucket; buckets in the order in which they become full.
    """
    closed: list[list[int]] = []
    filling: dict[object, tuple[list[int], int, int]] = {}
    for index in order:
        members, used_bytes, limit = filling.get(keys[index], ([], 0, min(first_cap_bytes, cap_bytes)))
        if members and used_bytes + param_bytes[index] > limit:
            closed.append(members)
            members, used_bytes, limit = [], 0, cap_bytes
        members.append(index)
        filling[keys[index]] = (members, used_bytes + param_bytes[index], limit)
    position = {index: place for place, index in enumerate(order)}
    closed += [members for members, _, _ in filling.values()]
    return sorted(closed, key=lambda members: position[members[-1]])


def _view_for(flat: torch.Tensor, start: int, param: torch.Tensor) -> torch.Tensor:
    """Return the part of ``flat``, of any dtype, at ``start`` that looks like ``param``."""
    start += int(flat.storage_offset())
    # The strides of the parameter, or similar ones without gaps or overlap.
    strides = torch.empty_like(torch.empty_strided(param.shape, param.stride(), device="meta")).stride()
    if param.is_complex():
        pairs = flat.as_strided((*param.shape, 2), (*(2 * stride for stride in strides), 1), start)
        return torch.view_as_complex(pairs)
    return flat.as_strided(param.shape, strides, start)

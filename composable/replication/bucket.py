"""The gradient buckets of replicate: which gradients lie in which flat buffer.

Source: PyTorch Distributed, arXiv 2006.15704.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import nn

from composable.errors import ConfigError, UsageError, place_of_rank
from composable.replication.locals import local_gradient, local_of, wrapped_like
from composable.torch_private import foreach_copy_, foreach_mul_
from composable.wording import list_text

__all__ = [
    "FIRST_CAP_BYTES",
    "Bucket",
    "BucketOptions",
    "Delay",
    "Outside",
    "ReducedParam",
    "grad_dtype_of",
    "plan_buckets",
]

FIRST_CAP_BYTES = 2**20
# From this mean size on, scaling each gradient while it is copied beats copying all of them in
# one call and scaling the buffer after: 6.7 against 10.1 ms for 96 parameters with 25 M elements,
# but 1.7 against 1.3 ms for 288 with 4.8 M and 2.7 against 1.1 ms for 768 with 3.2 M.
_LARGE_NUMEL = 2**16


@dataclass(frozen=True)
class ReducedParam:
    """A parameter whose gradient is averaged.

    Attributes:
        fqn: Its name below the annotated module.
        param: The parameter itself.
        module_index: Which of the annotated modules it belongs to.
        reduce_dtype: In which its gradient travels; ``None``: that of the parameter.
        is_sparse: Its gradient is sparse, and in no bucket.
    """

    fqn: str
    param: nn.Parameter
    module_index: int = 0
    reduce_dtype: torch.dtype | None = None
    is_sparse: bool = False

    @property
    def bucket_dtype(self) -> torch.dtype:
        """Of the bucket that holds its gradient."""
        return self.reduce_dtype or self.param.dtype.to_real()

    @property
    def bucket_bytes(self) -> int:
        """What its gradient takes in the bucket."""
        return local_of(self.param).nbytes // self.param.dtype.to_real().itemsize * self.bucket_dtype.itemsize


@dataclass(frozen=True)
class Delay:
    """Gradients that are not sent before that of another parameter has arrived.

    Attributes:
        params: Whose gradients, by their place among all.
        trigger: Which parameter they wait for.
    """

    params: frozenset[int]
    trigger: int

    def order(self, order: Sequence[int]) -> list[int]:
        """Return an order of arrival with the delayed ones behind the one they wait for."""
        at = list(order).index(self.trigger) + 1
        before = [index for index in order[:at] if index not in self.params]
        after = [index for index in order[at:] if index not in self.params]
        return [*before, *(index for index in order if index in self.params), *after]


@dataclass(frozen=True)
class BucketOptions:
    """What the user chose; equal on all ranks.

    Attributes:
        cap_bytes: Most bytes of a bucket that holds more than one parameter.
        find_unused: Parameters without a gradient are no error.
        grads_as_views: After backward ``param.grad`` is a view of its bucket, not a copy.
        static_graph: Every backward gives the same parameters as many gradients.
        delay: Gradients that wait for another; ``None``: none do.
        has_policy: There is a mixed precision policy.
    """

    cap_bytes: int = 25 * 2**20
    find_unused: bool = False
    grads_as_views: bool = True
    static_graph: bool = False
    delay: Delay | None = None
    has_policy: bool = False


def check_steppable(params: Sequence[ReducedParam]) -> None:
    """Raise unless an optimizer can step these parameters inside backward, bucket by bucket.

    Raises:
        ConfigError: Not every gradient comes in a bucket.
    """
    sparse = [item.fqn for item in params if item.is_sparse]
    if sparse:
        raise ConfigError(
            f"an optimizer cannot step inside backward beside sparse gradients, of {list_text(sparse, 3)}",
            at=f"{place_of_rank()}, parameter {params[0].fqn!r}",
            fix="step after backward, or build embeddings with sparse=False",
        )


def plan_buckets(
    order: Sequence[int],
    keys: Sequence[object],
    param_bytes: Sequence[int],
    *,
    first_cap_bytes: int,
    cap_bytes: int,
) -> list[list[int]]:
    """Group parameters of equal key, in the order in which their gradients arrive.

    Args:
        order: Every parameter once, in order of arrival.
        keys: What the parameters of a bucket must have in common, by parameter.
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


class Bucket:
    """A flat buffer for the gradients of some parameters.

    To a communication hook it is what torch's ``GradBucket`` is: ``index``, ``buffer``,
    ``gradients``, ``parameters``, ``is_last``, ``set_buffer``.

    Attributes:
        param_indices: Which parameters it holds, in order.
        views: Where each gradient lies: the parameter's shape, and its strides if it is dense. Of a parameter that
            tensor parallelism has split, a tensor that is split alike, on this rank's part.
        arrivals: What has to arrive in a round until it is full: as a rule, a gradient of each parameter.
        pending: What of it has not.
        flat: All of it, the tail included.
        tail: ``tail_numel`` elements behind the gradients.
        key: Of its all-reduce.
        is_released: There is no memory until the next gradients come.
        casts: Some gradients rest in another dtype than they travel in.
        has_split: Of some parameters tensor parallelism has split this rank holds a part.
    """

    def __init__(
        self,
        index: int,
        members: Sequence[tuple[int, nn.Parameter]],
        *,
        tail_numel: int,
        is_last: bool,
        key: int,
        is_lazy: bool = False,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.param_indices = [param_index for param_index, _ in members]
        self._params = [param for _, param in members]
        self._index = index
        self._is_last = is_last
        self.key = key
        self.arrivals = self.pending = len(members)
        # Without parameters, where all gradients are sparse, it is there for its tail.
        dtype = dtype or (self._params[0].dtype.to_real() if self._params else torch.float32)
        self.casts = any(grad_dtype_of(param).to_real() is not dtype for param in self._params)
        local = [local_of(param) for param in self._params]
        # One behind the other: a communication hook may walk the buffer by the sizes of the gradients.
        *starts, stop = accumulate((param.numel() * (2 if param.is_complex() else 1) for param in local), initial=0)
        self.has_split = any(one is not param for one, param in zip(local, self._params, strict=True))
        self._stop, self._tail_numel = stop, tail_numel
        self._starts = starts
        self._is_large = stop >= _LARGE_NUMEL * len(self._params)
        self.flat = torch.empty(0, dtype=dtype, device=self._params[0].device if self._params else device)
        self.release()
        if not is_lazy:
            self.clear()

    def _allocate(self) -> None:
        self.flat = self.flat.new_empty(self._stop + self._tail_numel)
        self._data = self.flat[: self._stop]
        self.tail = self.flat[self._stop :]
        self._hook_buffer = self._data
        starts_of_params = zip(self._starts, self._params, strict=True)
        self._views = [_view_for(self.flat, start, local_of(param)) for start, param in starts_of_params]
        self.views = [wrapped_like(view, param) for view, param in zip(self._views, self._params, strict=True)]
        # Last: what was cut short is done again.
        self.is_released = False

    def release(self) -> None:
        """Free the memory until the next gradients come, but for what somebody else still holds of it."""
        self.is_released = True
        self.flat = self._data = self.tail = self._hook_buffer = self.flat.new_empty(0)
        self._views = self.views = [self.flat] * len(self._params)

    def clear(self) -> None:
        """Make all gradients in the buffer zero."""
        if self.is_released:
            self._allocate()
        self.flat.zero_()

    @property
    def sent_bytes(self) -> int:
        """What travels, also while there is no memory for it."""
        return (self._stop + self._tail_numel) * self.flat.element_size()

    def index(self) -> int:
        """Return the place of this bucket in the order of reduction."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return the flat gradients, or what ``set_buffer`` put in their place for this round."""
        return self._hook_buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Let ``buffer`` return another tensor for the rest of this round."""
        self._hook_buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return one view of the buffer per parameter: of what ``set_buffer`` gave, if it did."""
        if self._hook_buffer is self._data:
            return list(self._views)
        return [
            _view_for(self._hook_buffer, start, local_of(param))
            for start, param in zip(self._starts, self._params, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of ``gradients``."""
        return list(self._params)

    def is_last(self) -> bool:
        """Say whether no bucket follows in this round."""
        return self._is_last

    def pack(self, scale: float, *, grads_as_views: bool) -> None:
        """Bring ``scale`` times every gradient into the buffer, zeros where there is none.

        Args:
            scale: Factor of the gradients.
            grads_as_views: Let ``param.grad`` be the view from now on.

        Raises:
            UsageError: A gradient is sparse.
        """
        if self.is_released:
            self._allocate()
        fresh: list[torch.Tensor] = []
        fresh_views: list[torch.Tensor] = []
        fresh_params: list[nn.Parameter] = []
        in_place: list[torch.Tensor] = []
        for param, view in zip(self._params, self.views, strict=True):
            grad = param.grad
            if grad is view:
                in_place.append(view)
            elif grad is None:
                view.zero_()
            else:
                fresh.append(grad)
                fresh_views.append(view)
                fresh_params.append(param)
        grads, views = fresh, fresh_views
        if self.has_split:
            grads = [local_gradient(grad, param) for grad, param in zip(fresh, fresh_params, strict=True)]
            for grad, param in zip(grads, fresh_params, strict=True):
                # What was a sum still to be taken is one that was: `unpack` writes the average there.
                param.grad = wrapped_like(grad, param)
            views, in_place = [local_of(view) for view in fresh_views], [local_of(view) for view in in_place]
        try:
            if self._is_large and scale != 1:
                for grad, view in zip(grads, views, strict=True):
                    torch.mul(grad, scale, out=view)
                if in_place:
                    foreach_mul_(in_place, scale)
            else:
                if grads:
                    foreach_copy_(views, grads)
                if scale != 1:
                    self._data.mul_(scale)
        except RuntimeError as error:
            if any(grad.layout != torch.strided for grad in grads):
                raise UsageError(
                    "a gradient is sparse", at=place_of_rank(), fix="use sparse=False, or ignore the module"
                ) from error
            raise
        if grads_as_views:
            for param, view in zip(fresh_params, fresh_views, strict=True):
                # One that rests in another dtype gets the average when all is reduced.
                if param.grad is not None and param.grad.dtype is view.dtype:
                    param.grad = view

    def take_result(self, result: torch.Tensor) -> None:
        """Make what a communication hook returned the content of the buffer."""
        if result.data_ptr() != self._data.data_ptr() or result.dtype != self._data.dtype:
            self._data.copy_(result.view(-1))
        self._hook_buffer = self._data

    def unpack(self) -> None:
        """Copy the averages out to gradients that are tensors of their own."""
        pairs = [
            (local_of(param.grad), plain)
            for param, view, plain in zip(self._params, self.views, self._views, strict=True)
            if param.grad is not None and param.grad is not view
        ]
        if pairs:
            foreach_copy_([grad for grad, _ in pairs], [view for _, view in pairs])


class Outside:
    """Stands in for the bucket of parameters that are in none: never full, never sent."""

    def __init__(self) -> None:
        self.pending = 0  # Becomes less with each arrival, and so never zero again.

    def index(self) -> int:
        """Return a place behind those of all buckets."""
        return sys.maxsize


def grad_dtype_of(param: nn.Parameter) -> torch.dtype:
    """Return the dtype in which the parameter's gradient rests."""
    return param.grad_dtype or param.dtype  # None: any


def _view_for(flat: torch.Tensor, start: int, param: torch.Tensor) -> torch.Tensor:
    """Return the part of ``flat``, of any dtype, at ``start`` that looks like ``param``."""
    start += int(flat.storage_offset())
    strides = param.stride() if _is_dense(param) else torch.empty(param.shape, device="meta").stride()
    if param.is_complex():
        pairs = flat.as_strided((*param.shape, 2), (*(2 * stride for stride in strides), 1), start)
        return torch.view_as_complex(pairs)
    return flat.as_strided(param.shape, strides, start)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Say whether ``tensor`` fills its memory without gaps or overlap, in whatever order of dims."""
    expected = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != expected:
                return False
            expected *= length
    return True

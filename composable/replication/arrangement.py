"""Which buckets a reducer has, and when it makes others.

Until a round has shown in which order gradients arrive there is one bucket for each dtype and
device, or, where an optimizer steps inside backward, the order is that of registration, from the
last to the first; from then on they follow the order of arrival.
"""

from collections.abc import Sequence

from composable.collectives import Transport
from composable.replication.bucket import (
    FIRST_CAP_BYTES,
    Bucket,
    BucketOptions,
    Outside,
    ReducedParam,
    grad_dtype_of,
    plan_buckets,
)

__all__ = ["Arrangement"]


class Arrangement:
    """The buckets of some parameters.

    Args:
        params: What they hold. Sparse gradients lie in none; the last bucket waits for them, since it has the flags.
        transport: Gives each bucket its key.
        options: What the user chose.
        tail_numel: Elements behind the gradients of the last bucket.

    Attributes:
        buckets: In order of reduction; the list is changed in place.
        bucket_of: That of each parameter; the list is changed in place.
        delayed: Those that wait for the gradient of a parameter in another one.
        order: The order in which gradients are expected; ``None``: not known.
        is_lazy: New buckets get memory with their first gradients, and lose it when those are stepped.
    """

    __slots__ = (
        "_counts",
        "_is_stale",
        "_options",
        "_params",
        "_sparse",
        "_tail_numel",
        "_transport",
        "_unused",
        "bucket_of",
        "buckets",
        "delayed",
        "is_lazy",
        "order",
    )

    def __init__(
        self, params: Sequence[ReducedParam], transport: Transport, options: BucketOptions, *, tail_numel: int
    ) -> None:
        self.buckets: list[Bucket] = []
        self.bucket_of: list[Bucket | Outside] = []
        self.delayed: list[Bucket] = []
        self.order: list[int] | None = None
        self.is_lazy = False
        self._params = params
        self._transport = transport
        self._options = options
        self._tail_numel = tail_numel
        self._sparse = [index for index, item in enumerate(params) if item.is_sparse]
        self._unused: frozenset[int] = frozenset()
        self._counts: Sequence[int] | None = None
        self._is_stale = False

    @property
    def is_settled(self) -> bool:
        """The order of arrival is known."""
        return self.order is not None

    @property
    def is_rebuilt(self) -> bool:
        """The buckets of the last backward follow the order of arrival."""
        return self.order is not None and not self._is_stale

    @property
    def expectation(self) -> str:
        """What buckets follow: ranks whose texts are equal make equal ones."""
        return f"{self.order} without {sorted(self._unused)}, {'known' if self._counts else 'not known'} to be all"

    def settle(self, order: Sequence[int]) -> None:
        """Expect gradients in this order from the next backward on."""
        self.order = list(order)
        self._is_stale = True

    def narrow(self, counts: Sequence[int], unused: Sequence[int]) -> None:
        """Expect as many gradients of each parameter, and none of ``unused``, from the next backward on."""
        self._counts = counts
        self._unused = frozenset(unused)
        self._is_stale = True

    def settle_like(self, other: "Arrangement") -> None:
        """Expect what ``other`` does, if that knows."""
        if other.order is not None:
            self.settle(other.order)
        self._counts, self._unused = other._counts, other._unused

    def prepare(self) -> None:
        """Have the buckets of the backward that begins."""
        if self._is_stale and self.order is not None:
            self._rebuild(self.order)
            self._is_stale = False
        elif not self.buckets:
            self._build(self._first_groups())

    def next_buckets(self) -> Sequence[Bucket]:
        """Return the buckets there are; before the first backward what they will be, without memory."""
        if self.buckets or not self._params:
            return self.buckets
        groups = (self._planned(self.order) if self.order is not None else self._first_groups()) or [[]]
        return [self._bucket(number, groups, key=-1, is_lazy=True) for number in range(len(groups))]

    def dissolve(self) -> None:
        """Give every gradient memory of its own and free the buckets."""
        while self.buckets:
            bucket = self.buckets.pop()
            for index, view in zip(bucket.param_indices, bucket.views, strict=True):
                param = self._params[index].param
                if param.grad is view:
                    param.grad = view.clone()
        self.bucket_of.clear()

    def adopt_averages(self, used: Sequence[float], *, grads_as_views: bool) -> None:
        """Give parameters without a gradient the average, if another rank had a gradient."""
        for bucket in self.buckets:
            for index, view in zip(bucket.param_indices, bucket.views, strict=True):
                param = self._params[index].param
                if param.grad is None and used[index] > 0:
                    dtype = grad_dtype_of(param)
                    param.grad = view if grads_as_views and dtype is view.dtype else view.to(dtype, copy=True)

    def _keys(self) -> list[object]:
        delay = self._options.delay
        return [
            (
                item.bucket_dtype,
                item.param.is_complex(),
                item.param.device,
                delay is not None and index in delay.params,
            )
            for index, item in enumerate(self._params)
        ]

    def _inside(self, order: Sequence[int]) -> list[int]:
        """Return ``order`` with delayed parameters in their place, and without those that are in no bucket."""
        delay = self._options.delay
        outside = self._unused.union(self._sparse)
        return [index for index in (order if delay is None else delay.order(order)) if index not in outside]

    def _arrivals_of(self, group: Sequence[int], *, is_delayed: bool) -> int:
        """Return what has to arrive until a bucket of ``group`` is full."""
        if self._counts is not None:
            return sum(self._counts[index] for index in group) + is_delayed
        return len(group) + is_delayed

    def _rebuild(self, order: Sequence[int]) -> None:
        """Make buckets in order of arrival, and move the gradients that lie in the old ones."""
        kept = [
            (self._params[index].param, index, view)
            for bucket in self.buckets
            for index, view in zip(bucket.param_indices, bucket.views, strict=True)
            if self._params[index].param.grad is view
        ]
        # Most optimizers free gradients between two rounds: then the old buckets go before the new ones come.
        self.buckets.clear()
        self.bucket_of.clear()
        self._build(self._planned(order))
        if self.is_lazy:
            return  # Gradients in old buckets are copied as those that autograd made.
        new_views = {i: v for bucket in self.buckets for i, v in zip(bucket.param_indices, bucket.views, strict=True)}
        for param, index, view in kept:
            param.grad = new_views[index].copy_(view) if index in new_views else view

    def _planned(self, order: Sequence[int]) -> list[list[int]]:
        """Return the parameters of each bucket, if gradients come in this order."""
        return plan_buckets(
            self._inside(order),
            self._keys(),
            [item.bucket_bytes for item in self._params],
            first_cap_bytes=FIRST_CAP_BYTES,
            cap_bytes=self._options.cap_bytes,
        )

    def _first_groups(self) -> list[list[int]]:
        """Return the parameters of each bucket while no order of arrival is known."""
        if self.is_lazy:
            # Most gradients come in about this order, and the others cost memory in one backward.
            return self._planned(range(len(self._params))[::-1])
        in_order, no_bytes = self._inside(range(len(self._params))), [0] * len(self._params)
        return plan_buckets(in_order, self._keys(), no_bytes, first_cap_bytes=1, cap_bytes=1)

    def _bucket(self, number: int, groups: Sequence[Sequence[int]], *, key: int, is_lazy: bool) -> Bucket:
        group, is_last = groups[number], number == len(groups) - 1
        return Bucket(
            number,
            [(index, self._params[index].param) for index in group],
            tail_numel=self._tail_numel if is_last else 0,
            is_last=is_last,
            key=key,
            is_lazy=is_lazy,
            device=self._params[0].param.device,
            dtype=self._params[group[0]].bucket_dtype if group else None,
        )

    def _build(self, groups: Sequence[Sequence[int]]) -> None:
        buckets: list[Bucket] = []
        delay = self._options.delay
        self.delayed = []
        groups = groups or [[]]  # The last one has the tail, whatever else it has.
        for number, group in enumerate(groups):
            is_last = number == len(groups) - 1
            is_delayed = delay is not None and not delay.params.isdisjoint(group)
            bucket = self._bucket(number, groups, key=self._transport.allocate_key(), is_lazy=self.is_lazy)
            bucket.arrivals = self._arrivals_of(group, is_delayed=is_delayed)
            if self._options.static_graph and (is_last or self._counts is None):
                # In a graph that nobody has seen a parameter may get another gradient, and in one that was to be
                # the same too, also parameters of which this rank had none: the end of backward tells.
                bucket.arrivals += 1 + len(self._params)
            buckets.append(bucket)
            if is_delayed:
                self.delayed.append(bucket)
        holder = {index: bucket for bucket in buckets for index in bucket.param_indices}
        attached = [index for index in self._sparse if index not in self._unused]
        holder |= dict.fromkeys(attached, buckets[-1])
        buckets[-1].arrivals += self._arrivals_of(attached, is_delayed=False)
        outside = Outside()
        self.bucket_of[:] = [holder.get(index, outside) for index in range(len(self._params))]
        self.buckets[:] = buckets

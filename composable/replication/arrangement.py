"""Which buckets a reducer has, and when it makes others.

Until a round has shown in which order gradients arrive there is one bucket for each dtype and
device; from then on they follow that order.
"""

from collections.abc import Sequence

from composable.collectives import Transport
from composable.replication.bucket import FIRST_CAP_BYTES, Bucket, ReducedParam, grad_dtype_of, plan_buckets

__all__ = ["Arrangement"]


class Arrangement:
    """The buckets of some parameters.

    Args:
        params: What they hold.
        transport: Gives each bucket its key.
        cap_bytes: Most bytes of a bucket that holds more than one parameter.
        tail_numel: Elements behind the gradients of the last bucket.

    Attributes:
        buckets: In order of reduction; the list is changed in place.
        bucket_of: That of each parameter; the list is changed in place.
        is_settled: The order of arrival is known.
        is_lazy: New buckets get memory with their first gradients.
    """

    __slots__ = (
        "_cap_bytes",
        "_next_order",
        "_params",
        "_tail_numel",
        "_transport",
        "bucket_of",
        "buckets",
        "is_lazy",
        "is_settled",
    )

    def __init__(
        self, params: Sequence[ReducedParam], transport: Transport, *, cap_bytes: int, tail_numel: int
    ) -> None:
        self.buckets: list[Bucket] = []
        self.bucket_of: list[Bucket] = []
        self.is_settled = False
        self.is_lazy = False
        self._params = params
        self._transport = transport
        self._cap_bytes = cap_bytes
        self._tail_numel = tail_numel
        self._next_order: Sequence[int] | None = None

    @property
    def order(self) -> list[int] | None:
        """The order in which gradients are expected, in which the next backward makes the same buckets."""
        if not self.is_settled:
            return None
        return list(self._next_order or [index for bucket in self.buckets for index in bucket.param_indices])

    @property
    def is_final(self) -> bool:
        """The buckets follow the order of arrival."""
        return self.is_settled and self._next_order is None

    def settle(self, order: Sequence[int]) -> None:
        """Expect gradients in this order from the next backward on."""
        self.is_settled = True
        self._next_order = order

    def settle_like(self, other: "Arrangement") -> None:
        """Expect gradients in the order in which ``other`` does, if that knows one."""
        order = other.order
        if order is not None:
            self.settle(order)

    def prepare(self) -> None:
        """Have the buckets of the backward that begins."""
        if self._next_order is not None:
            self._rebuild(self._next_order)
            self._next_order = None
        elif not self.buckets:
            in_order, no_bytes = range(len(self._params)), [0] * len(self._params)
            self._build(plan_buckets(in_order, self._keys(), no_bytes, first_cap_bytes=1, cap_bytes=1))

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
        return [(item.bucket_dtype, item.param.is_complex(), item.param.device) for item in self._params]

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
        self._build(
            plan_buckets(
                order,
                self._keys(),
                [item.bucket_bytes for item in self._params],
                first_cap_bytes=FIRST_CAP_BYTES,
                cap_bytes=self._cap_bytes,
            )
        )
        if self.is_lazy:
            return  # Gradients in old buckets are copied as those that autograd made.
        new_views = {i: v for bucket in self.buckets for i, v in zip(bucket.param_indices, bucket.views, strict=True)}
        for param, index, view in kept:
            param.grad = new_views[index].copy_(view)

    def _build(self, groups: Sequence[Sequence[int]]) -> None:
        buckets: list[Bucket] = []
        for number, group in enumerate(groups):
            is_last = number == len(groups) - 1
            buckets.append(
                Bucket(
                    number,
                    [(index, self._params[index].param) for index in group],
                    tail_numel=self._tail_numel if is_last else 0,
                    is_last=is_last,
                    key=self._transport.allocate_key(),
                    is_lazy=self.is_lazy,
                    dtype=self._params[group[0]].bucket_dtype,
                )
            )
        holder = {index: bucket for bucket in buckets for index in bucket.param_indices}
        self.bucket_of[:] = [holder[index] for index in range(len(self._params))]
        self.buckets[:] = buckets

"""How the bytes of one flat buffer travel: over which ranks, under which keys, on which paths.

Paths are chosen when the root is known, from what the plan casts, where the shard rests and what the user asked for;
again when the user asks for something else. Nothing is moved here.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from composable.comm import Ranks, Started, Transport
from composable.engine.paths import (
    AllReducePath,
    CopyGather,
    Gather,
    GatherPath,
    GradientPath,
    KeptShards,
    PathHome,
    Replicas,
    RestingPlace,
    ScatterPath,
    SecondScatterPath,
    SumPath,
)
from composable.engine.user_comms import DEFAULT_COMMS, CommGather, Comms, CommScatterPath, HookPath, ThenHookPath

__all__ = ["Routes"]


class _Leg(NamedTuple):
    """One part of the way: over which ranks, by which transport, under which key of it."""

    transport: Transport
    key: int
    group: dist.ProcessGroup


class _Legs(NamedTuple):
    """All parts of the way.

    Attributes:
        gather: Over the ranks that share the shard.
        scatter: The same for reduce-scatters.
        divisor: Over how many ranks gradients are averaged.
        copies: Who holds copies of the shard, with the key between them.
        inner: Over the ranks that gather from secondary shards.
        hosts: Over those that fill them, which take the second legs of reductions.
    """

    gather: _Leg
    scatter: _Leg
    divisor: int
    copies: tuple[Replicas, int] | None = None
    inner: _Leg | None = None
    hosts: tuple[Replicas, _Leg] | None = None


class _Unconnected:
    """In place of a path, before the root is known, and of one that there is none of: nothing asks it."""

    transport: Transport | None = None

    def begin(self, *_: object) -> object:
        raise AssertionError("connected when the root was decided")

    resume = begin


_UNCONNECTED: Any = _Unconnected()


class Routes:
    """The ways of one flat buffer between ranks.

    Args:
        group: The shard group.
        home: Where the shard and its gradient rest.
        gradient_dtype: Of reduced gradients.
        reduce_dtype: Of gradients on their way.
        fqn: Of a parameter of the buffer.
        casts_params: What is gathered has another dtype than the shard.

    Attributes:
        gather_path: How the shard becomes the whole buffer.
        fill_path: How shards become secondary shards, where these are not left by forward.
        secondary_path: How the secondary shards of a smaller group become the whole buffer.
        gradient_path: How the gradients become this rank's shard of their mean.
        scatter_transport: What reduce-scatters go through; known with the root.
        comms: What the user chose.
        kept: What waits for its all-reduce over copies.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        home: RestingPlace,
        gradient_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        fqn: str,
        *,
        casts_params: bool,
    ) -> None:
        self.home = home
        self.comms = DEFAULT_COMMS
        self.kept = KeptShards()
        self.gather_path: GatherPath = _UNCONNECTED
        self.gradient_path: GradientPath = _UNCONNECTED
        self.fill_path: GatherPath = _UNCONNECTED
        self.secondary_path: GatherPath = _UNCONNECTED
        self._group = group
        self._dtypes = gradient_dtype, reduce_dtype
        self._fqn = fqn
        self._casts_params = casts_params
        self.scatter_transport: Transport
        self._divisor_now = 0
        self._legs: _Legs | None = None

    def unconnected(self) -> "Routes":
        """Return others for a copy of the buffer, by the same choices of the user, not connected yet."""
        twin = Routes(self._group, self.home, *self._dtypes, self._fqn, casts_params=self._casts_params)
        twin.comms = self.comms
        twin.kept.defers = self.kept.defers
        return twin

    # Over which ranks

    def connect(self, transport: Transport, divisor: int, copies: Replicas | None = None) -> None:
        """Choose who moves the bytes, and over how many ranks gradients are averaged; ``copies``: also over these.

        All ranks of the shard group and of the copies, same order.
        """
        if self._legs is None or self._legs.gather.transport is not transport:
            leg = _Leg(transport, transport.allocate_key(), self._group)
            between = None if copies is None else (copies, copies.transport.allocate_key())
            self._go_by(_Legs(leg, leg, divisor, between))

    def scatter_by(self, transport: Transport | None) -> None:
        """Let reduce-scatters go through another transport than gathers, ``None``: the same. After ``connect``.

        All ranks of the shard group, same order.
        """
        legs = self._connected_legs()
        usual = legs.gather if legs.hosts is None or legs.inner is None else legs.inner
        if transport is None or transport is usual.transport:
            chosen = usual
        elif transport is legs.scatter.transport:
            return
        else:
            chosen = _Leg(transport, transport.allocate_key(), self._group)
        if chosen is not legs.scatter:
            self._go_by(legs._replace(scatter=chosen))

    def divide_by(self, divisor: int | None) -> None:
        """Divide sums of gradients by this in place of the number of ranks, unless the user chose; ``None``: by that.

        After ``connect``, from the next reduction on. Every rank alike.
        """
        if (divisor or 0) != self._divisor_now:
            self._divisor_now = divisor or 0
            self._go_by(self._connected_legs())

    def gather_secondary_by(self, transport: Transport, part: Ranks) -> None:
        """Choose who moves secondary shards; after ``connect``. All ranks of the part, same order.

        Args:
            transport: Of these ranks.
            part: Of the ranks that share the buffer.
        """
        leg = _Leg(transport, transport.allocate_key(), part.process_group)
        self._go_by(self._connected_legs()._replace(inner=leg))

    def fill_by(self, between: Replicas, hosts: Ranks) -> None:
        """Choose who fills secondary shards, and takes both legs of reductions. After ``gather_secondary_by``.

        All ranks of a host, and all with the same place on the hosts, same order.

        Args:
            between: The ranks that fill them.
            hosts: The same.
        """
        leg = _Leg(between.transport, between.transport.allocate_key(), hosts.process_group)
        legs = self._connected_legs()
        self._go_by(legs._replace(scatter=legs.inner or legs.scatter, hosts=(between, leg)))

    def communicate_by(self, comms: Comms) -> None:
        """Let bytes travel as the user chose, from the next collective on. Every rank alike."""
        self.comms = comms
        if self._legs is not None:
            self._go_by(self._legs)

    # For who waits, and who begins anew

    def name_of(self, started: Started) -> str | None:
        """Return what a collective does, if it is one of the buffer's."""
        key, is_reduction = divmod(started.tag, 2)
        what = "reduce-scatter" if is_reduction else "all-gather"
        for name, transport, own in self._named_legs(what):
            if key == own and started.transport is transport:
                return name
        return None

    def _named_legs(self, what: str) -> Iterator[tuple[str, Transport, int]]:
        legs = self._legs
        if legs is None:
            return
        leg = legs.scatter if what == "reduce-scatter" else legs.gather
        if legs.hosts is not None:
            yield f"{what} between hosts", *legs.hosts[1][:2]
        if legs.copies is not None:
            yield "all-reduce over copies", legs.copies[0].transport, legs.copies[1]
        if legs.inner is not None and legs.inner is not leg:
            yield f"{what} of secondary shards", *legs.inner[:2]
        yield what, *leg[:2]

    def transports(self) -> set[Transport]:
        """Return all that move bytes of the buffer."""
        return {leg[1] for what in ("all-gather", "reduce-scatter") for leg in self._named_legs(what)}

    def settle(self) -> None:
        """Wait for all that the transports have started, also where an exception cut that short."""
        for transport in self.transports():
            transport.settle()

    def check_hook(self) -> None:
        """Raise what is wrong with what the hooks gave last, if anything.

        Raises:
            ConfigError: Its dtype, shape or device; or the all-reduce hook returned something.
        """
        failure = getattr(self.gradient_path, "failure", None)
        if failure is not None:
            self.gradient_path.failure = None  # type: ignore[attr-defined]  # it has one
            raise failure

    # Paths

    def _connected_legs(self) -> _Legs:
        if self._legs is None:
            raise AssertionError("connected when the root was decided")
        return self._legs

    def _go_by(self, legs: _Legs) -> None:
        casts = self._casts_params or self.home.is_elsewhere
        self.gather_path = self._gather_over(legs.gather, casts=casts)
        if legs.inner is not None:
            # Secondary shards lie where the buffer does, in its dtype.
            self.secondary_path = self._gather_over(legs.inner, casts=False)
        if legs.hosts is not None:
            self.fill_path = self._gather_over(legs.hosts[1], casts=casts)
        self.gradient_path = self._reduce_over(legs)
        self.scatter_transport = legs.scatter.transport
        # Last: what was cut short is done again.
        self._legs = legs

    def _gather_over(self, leg: _Leg, *, casts: bool) -> GatherPath:
        if self.comms.all_gather is not None:
            return CommGather(leg.transport, leg.key, self.comms.all_gather, leg.group, self._fqn)
        if casts:
            return CopyGather(leg.transport, leg.key, self.home)
        return Gather(leg.transport, leg.key)

    def _reduce_over(self, legs: _Legs) -> GradientPath:
        comms, leg, hosts = self.comms, legs.scatter, legs.hosts
        gradient_dtype, reduce_dtype = self._dtypes
        if hosts is not None and (comms.hook is not None or comms.reduce_scatter is not None):
            # A hook, and a reduce-scatter of the user's, reduce over all ranks of the shard in one leg.
            leg, hosts = legs.gather, None
        # Both legs carry the same dtype.
        dtype = gradient_dtype if legs.copies is None and hosts is None else reduce_dtype
        divisor = comms.divide_factor or self._divisor_now or legs.divisor
        path: GradientPath
        if comms.hook is not None:
            path = HookPath(leg.transport, comms.hook, dtype)
        elif comms.reduce_scatter is not None:
            path = CommScatterPath(leg.transport, comms.reduce_scatter, self._group, divisor, dtype, self._fqn)
        else:
            path = (SumPath if comms.sums_only else ScatterPath)(leg.transport, leg.key, divisor, dtype)
        if hosts is not None:
            path = SecondScatterPath(path, hosts[0], self.kept, hosts[1].key, gradient_dtype)
        if legs.copies is not None:
            replicas, key = legs.copies
            # A communication hook has divided by the ranks that it knows.
            scale = 1.0 if comms.hook is None else 1.0 / replicas.transport.world_size
            path = AllReducePath(path, replicas, self.kept, key, gradient_dtype, scale=scale)
        if comms.all_reduce_hook is not None:
            path = ThenHookPath(path, comms.all_reduce_hook, comms.all_reduce_stream)
        return PathHome(path, self.home) if self.home.is_elsewhere else path

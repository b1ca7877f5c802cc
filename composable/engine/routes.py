"""How the bytes of one flat buffer travel: by which transports, under which keys, on which two paths.

Chosen when the root is known, from what the plan casts, where the shard rests and what the user asked for; again
when the user asks for something else. Nothing is moved here.
"""

import torch
import torch.distributed as dist

from composable.collectives import Ranks, Started, Transport
from composable.engine.gather_paths import CopyGather, Gather, GatherPath, RestingPlace
from composable.engine.reduce_paths import (
    AllReducePath,
    GradientPath,
    KeptShards,
    PathHome,
    Replicas,
    ScatterPath,
    SecondScatterPath,
    SumPath,
)
from composable.engine.user_comms import DEFAULT_COMMS, CommGather, Comms, CommScatterPath, HookPath, ThenHookPath

__all__ = ["Routes"]


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
        home: Where the shard and its gradient rest, until connected.
        gather_path: How the shard becomes the whole buffer; ``None`` until connected.
        fill_path: How shards become secondary shards; ``None``: these are left by forward, or there are none.
        secondary_path: How the secondary shards of a smaller group do; ``None``: there are none.
        gradient_path: How the gradients become this rank's shard of their mean; ``None`` until connected.
        comms: What the user chose.
        kept: What waits for its all-reduce over copies.
    """

    __slots__ = (
        "_casts_params",
        "_divisor",
        "_divisor_now",
        "_fqn",
        "_gradient_dtype",
        "_group",
        "_host",
        "_hosts",
        "_key",
        "_reduce_dtype",
        "_replicas",
        "_replicas_key",
        "_scatter_key",
        "_scatter_transport",
        "_secondary",
        "_transport",
        "comms",
        "fill_path",
        "gather_path",
        "gradient_path",
        "home",
        "kept",
        "secondary_path",
    )

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
        self._group = group
        self.home = home
        self._gradient_dtype = gradient_dtype
        self._reduce_dtype = reduce_dtype
        self._fqn = fqn
        self._casts_params = casts_params
        self.comms = DEFAULT_COMMS
        self.gather_path: GatherPath | None = None
        self.fill_path: GatherPath | None = None
        self.secondary_path: GatherPath | None = None
        self.gradient_path: GradientPath | None = None
        self._transport: Transport | None = None
        self._scatter_transport: Transport | None = None
        self._replicas: Replicas | None = None
        self._secondary: tuple[dist.ProcessGroup, Transport, int] | None = None
        self._host: Transport | None = None
        self._hosts: tuple[dist.ProcessGroup, Replicas, int] | None = None
        self.kept = KeptShards()
        self._key = self._scatter_key = self._replicas_key = -1
        self._divisor = 1
        self._divisor_now: int | None = None

    def unconnected(self) -> "Routes":
        """Return others for a copy of the buffer, by the same choices of the user, not connected yet."""
        dtypes = self._gradient_dtype, self._reduce_dtype
        twin = Routes(self._group, self.home, *dtypes, self._fqn, casts_params=self._casts_params)
        twin.comms = self.comms
        twin.kept.defers = self.kept.defers
        return twin

    @property
    def transport(self) -> Transport:
        """What all-gathers go through."""
        assert self._transport is not None, "connected when the root was decided"
        return self._transport

    @property
    def scatter_transport(self) -> Transport:
        """What reduce-scatters go through."""
        assert self._scatter_transport is not None, "connected when the root was decided"
        return self._scatter_transport

    def connect(self, transport: Transport, divisor: int, replicas: Replicas | None = None) -> None:
        """Choose who moves the bytes, and over how many ranks gradients are averaged; ``replicas``: also over copies.

        All ranks of the shard group and of the replicas, same order.
        """
        if self._transport is not transport:
            self._key, self._divisor = transport.allocate_key(), divisor
            self._replicas = replicas
            if replicas is not None:
                self._replicas_key = replicas.transport.allocate_key()
            self._scatter_transport, self._scatter_key = transport, self._key
            self._choose_gather_path(transport)
            self._choose_gradient_path(transport)
            # Last: what was cut short is done again.
            self._transport = transport

    def scatter_by(self, transport: Transport | None) -> None:
        """Let reduce-scatters go through another transport than gathers, ``None``: the same. After ``connect``.

        All ranks of the shard group, same order.
        """
        chosen = transport or self._host or self.transport
        if chosen is not self._scatter_transport:
            self._scatter_key = self._key if chosen is self._transport else chosen.allocate_key()
            self._choose_gradient_path(chosen)
            self._scatter_transport = chosen

    def divide_by(self, divisor: int | None) -> None:
        """Divide sums of gradients by this in place of the number of ranks, unless the user chose; ``None``: by that.

        After ``connect``, from the next reduction on. Every rank alike.
        """
        if divisor != self._divisor_now:
            self._divisor_now = divisor
            self._choose_gradient_path(self.scatter_transport)

    def gather_secondary_by(self, transport: Transport, part: Ranks) -> None:
        """Choose who moves secondary shards. All ranks of the part, same order.

        Args:
            transport: Of these ranks.
            part: Of the ranks that share the buffer.
        """
        self._secondary = (part.process_group, transport, transport.allocate_key())
        self._choose_secondary_path()

    def fill_by(self, host: Transport, between: Replicas, hosts: Ranks) -> None:
        """Choose who fills secondary shards, and takes both legs of reductions. After ``gather_secondary_by``.

        All ranks of the host, and all of the hosts, same order.

        Args:
            host: Of the ranks that gather from secondary shards.
            between: Of those that fill them.
            hosts: These.
        """
        self._host = host
        self._hosts = (hosts.process_group, between, between.transport.allocate_key())
        self._scatter_transport, self._scatter_key = host, host.allocate_key()
        self._choose_secondary_path()
        self._choose_gradient_path(host)

    def communicate_by(self, comms: Comms) -> None:
        """Let bytes travel as the user chose, from the next collective on. Every rank alike."""
        self.comms = comms
        self._choose_secondary_path()
        if self._transport is not None:
            self._choose_gather_path(self._transport)
            self._choose_gradient_path(self.scatter_transport)

    def has_started(self, started: Started) -> bool:
        """Say whether a collective is one of the buffer's."""
        key, is_reduction = divmod(started.tag, 2)
        if self.is_between_hosts(started):
            return self._hosts is not None and key == self._hosts[2]
        if self.is_between_copies(started):
            return key == self._replicas_key
        if self.is_of_secondary(started):
            return self._secondary is not None and key == self._secondary[2]
        transport = self._scatter_transport if is_reduction else self._transport
        own = self._scatter_key if is_reduction else self._key
        return key == own and transport is not None and transport.has_started(started)

    def is_between_copies(self, started: Started) -> bool:
        """Say whether a collective goes over the ranks that hold copies."""
        return self._replicas is not None and self._replicas.transport.has_started(started)

    def is_between_hosts(self, started: Started) -> bool:
        """Say whether a collective goes over the ranks that fill secondary shards."""
        return self._hosts is not None and self._hosts[1].transport.has_started(started)

    def is_of_secondary(self, started: Started) -> bool:
        """Say whether a collective goes over the smaller group that gathers secondary shards."""
        return self._secondary is not None and self._secondary[1].has_started(started)

    def check_hook(self) -> None:
        """Raise what is wrong with what the hooks gave last, if anything.

        Raises:
            ConfigError: Its dtype, shape or device; or the all-reduce hook returned something.
        """
        failure = getattr(self.gradient_path, "failure", None)
        if failure is not None:
            self.gradient_path.failure = None  # type: ignore[union-attr]  # it has one
            raise failure

    def transports(self) -> set[Transport]:
        """Return all that move bytes of the buffer."""
        between_replicas = None if self._replicas is None else self._replicas.transport
        of_secondary = None if self._secondary is None else self._secondary[1]
        hosts = None if self._hosts is None else self._hosts[1].transport
        found = {self._transport, self._scatter_transport, between_replicas, of_secondary, hosts}
        return {transport for transport in found if transport is not None}

    def settle(self) -> None:
        """Wait for all that the transports have started, also where an exception cut that short."""
        for transport in self.transports():
            transport.settle()

    def _choose_gather_path(self, transport: Transport) -> None:
        if self.comms.all_gather is not None:
            self.gather_path = CommGather(transport, self._key, self.comms.all_gather, self._group, self._fqn)
        elif self._casts_params or self.home.is_elsewhere:
            self.gather_path = CopyGather(transport, self._key, self.home)
        else:
            self.gather_path = Gather(transport, self._key)

    def _choose_secondary_path(self) -> None:
        if self._secondary is None:
            return
        group, transport, key = self._secondary
        # They lie where the buffer does, in its dtype.
        if self.comms.all_gather is not None:
            self.secondary_path = CommGather(transport, key, self.comms.all_gather, group, self._fqn)
        else:
            self.secondary_path = Gather(transport, key)
        if self._hosts is None:
            return
        of_hosts, between, key = self._hosts
        if self.comms.all_gather is not None:
            self.fill_path = CommGather(between.transport, key, self.comms.all_gather, of_hosts, self._fqn)
        elif self._casts_params or self.home.is_elsewhere:
            self.fill_path = CopyGather(between.transport, key, self.home)
        else:
            self.fill_path = Gather(between.transport, key)

    def _choose_gradient_path(self, transport: Transport) -> None:
        comms, replicas, key = self.comms, self._replicas, self._scatter_key
        # Both legs carry the same dtype.
        # A hook, and a reduce-scatter of the user's, reduce over all ranks of the shard in one leg.
        hosts = None if comms.hook is not None or comms.reduce_scatter is not None else self._hosts
        dtype = self._gradient_dtype if replicas is None and hosts is None else self._reduce_dtype
        divisor = comms.divide_factor or self._divisor_now or self._divisor
        path: GradientPath
        if self._host is not None and hosts is None:
            transport = self._transport or transport
        if comms.hook is not None:
            path = HookPath(transport, comms.hook, dtype)
        elif comms.reduce_scatter is not None:
            path = CommScatterPath(transport, comms.reduce_scatter, self._group, divisor, dtype, self._fqn)
        else:
            path = (SumPath if comms.sums_only else ScatterPath)(transport, key, divisor, dtype)
        if hosts is not None:
            path = SecondScatterPath(path, hosts[1], self.kept, hosts[2], self._gradient_dtype)
        if replicas is not None:
            # A communication hook has divided by the ranks that it knows.
            scale = 1.0 if comms.hook is None else 1.0 / replicas.transport.world_size
            path = AllReducePath(path, replicas, self.kept, self._replicas_key, self._gradient_dtype, scale=scale)
        if comms.all_reduce_hook is not None:
            path = ThenHookPath(path, comms.all_reduce_hook, comms.all_reduce_stream)
        self.gradient_path = PathHome(path, self.home) if self.home.is_elsewhere else path

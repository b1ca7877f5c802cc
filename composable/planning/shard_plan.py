"""Handles, the parameters each owns and the reason for each: data that is printable and comparable.

Byte counts are per rank unless they say otherwise.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from composable.arguments import described
from composable.errors import ConfigError, UsageError
from composable.planning.handle_plan import FQNS_SHOWN, BufferPlan, HandlePlan, describe_handle, dtypes_text
from composable.planning.links import HandleEstimate, Links, PlanEstimate
from composable.planning.memory import HandleBytes, Reduced, SecondLeg, peak_of_step
from composable.planning.offload import NO_OFFLOAD, OffloadPolicy
from composable.planning.precision import NO_CASTS, MixedPrecisionPolicy
from composable.planning.traffic import Exchange, Group, Groups, HandleTraffic, Traffic, groups_of
from composable.wording import bytes_text, count_text, list_text, module_text, sibling_lines

__all__ = ["HandleCollectives", "ShardPlan"]


@dataclass(frozen=True)
class HandleCollectives:
    """What one handle's collectives amount to in one training step.

    Bytes are of whole buffers; of all-reduces, which are between the ranks that hold copies, of shards. Gathers from
    secondary shards, which are between a part of the ranks, are counted apart. So are, where secondary shards rest
    between steps, the gathers that fill them and the second legs of reductions, between hosts: of secondary shards.
    """

    module_fqns: tuple[str, ...]
    all_gathers: int
    all_gather_bytes: int
    reduce_scatters: int
    reduce_scatter_bytes: int
    all_reduces: int = 0
    all_reduce_bytes: int = 0
    secondary_all_gathers: int = 0
    secondary_all_gather_bytes: int = 0
    fills: int = 0
    fill_bytes: int = 0
    second_reduce_scatters: int = 0
    second_reduce_scatter_bytes: int = 0

    @property
    def collectives(self) -> int:
        """Calls of all kinds."""
        between_hosts = self.fills + self.second_reduce_scatters
        return self.all_gathers + self.reduce_scatters + self.all_reduces + self.secondary_all_gathers + between_hosts


@dataclass(frozen=True)
class ShardPlan:
    """What one annotation does.

    Plans that do the same are equal, whatever the transport: one that is made before is ``auto``, and
    an annotation's names what the process group got.

    Attributes:
        world_size: Ranks that share each buffer.
        transport: How the bytes travel.
        class_names: The classes of the annotated modules.
        handles: Left to right, depth first.
        kept_fqns: Modules below that earlier annotations manage; left as they are.
        ignored_fqns: Parameters that stay whole on every rank.
        mp_policy: Dtypes of computation and reduction, as they were asked for.
        offload_policy: Where shards, gradients and optimizer state rest.
        replicas: Ranks that hold each shard.
        host_ranks: Of the ranks that share each buffer, how many gather it from secondary shards, which are filled from
            shards once after each step and rest with them; ``None``: there are none.
        hosts: Of each rank, one copy of all shards after the other, the host that it is on; empty: not known.
    """

    world_size: int
    transport: str = field(compare=False)
    class_names: tuple[str, ...]
    handles: tuple[HandlePlan, ...]
    kept_fqns: tuple[str, ...] = ()
    ignored_fqns: tuple[str, ...] = ()
    mp_policy: MixedPrecisionPolicy = NO_CASTS
    offload_policy: OffloadPolicy = NO_OFFLOAD
    replicas: int = 1
    host_ranks: int | None = None
    hosts: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def numel(self) -> int:
        """Elements of all parameters, each counted once."""
        return sum(handle.numel for handle in self.handles)

    @property
    def shard_bytes(self) -> int:
        """Bytes of parameters that a rank keeps between iterations."""
        return sum(handle.shard_bytes for handle in self.handles)

    @property
    def secondary_bytes(self) -> int:
        """Bytes of secondary shards that a rank keeps between iterations, once the first forward has filled them."""
        return sum(handle.buffer_bytes for handle in self.handles) // self.host_ranks if self.host_ranks else 0

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in all whole buffers."""
        return sum(handle.padding_bytes for handle in self.handles)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is likely not meant."""
        if len(self.handles) != 1 or self.kept_fqns:
            return ()
        params = self.handles[0].params
        if len(self.class_names) > 1 or len({param.fqn.rpartition(".")[0] for param in params}) < 2:
            return ()
        return ("the whole model is one handle: nothing can overlap; pass a policy",)

    def bytes_per_rank_at_rest(self, optimizer_states: int = 2, state_dtype: torch.dtype | None = None) -> int:
        """Return the bytes of shards and optimizer state on the device between iterations, gradients freed.

        Ignored parameters, module buffers and what else the model holds are not counted. None where
        ``offload_policy`` keeps them on the host: then ``host_bytes_per_rank_at_rest`` has them, but for secondary
        shards, which are on the device.

        Args:
            optimizer_states: Tensors of the parameter's size for each trainable parameter: 2 for Adam.
            state_dtype: Their dtype; default: that of the parameter.
        """
        shards = 0 if self.offload_policy.is_offloading else self._bytes_at_rest(optimizer_states, state_dtype)
        return shards + self.secondary_bytes

    def host_bytes_per_rank_at_rest(self, optimizer_states: int = 2, state_dtype: torch.dtype | None = None) -> int:
        """Return what ``bytes_per_rank_at_rest`` would, where ``offload_policy`` keeps it on the host; else none."""
        return self._bytes_at_rest(optimizer_states, state_dtype) if self.offload_policy.is_offloading else 0

    def _bytes_at_rest(self, optimizer_states: int, state_dtype: torch.dtype | None) -> int:
        states = 0
        for buffer in self._buffers():
            if buffer.requires_grad:
                itemsize = (state_dtype or buffer.dtype).itemsize
                states += optimizer_states * buffer.layout.shard_numel * itemsize
        return self.shard_bytes + states

    def peak_unsharded_bytes(self, prefetch: int = 1, *, is_root: bool = True) -> int:
        """Return the most bytes of unsharded parameters at a time.

        Handles that are not resharded after forward all live at its end; of the others, those
        of the modules that are running and of the ``prefetch`` that come next. Secondary shards are not counted.

        Args:
            prefetch: Handles gathered ahead of their use.
            is_root: Forward starts at the annotated module.
        """
        freed = [handle.is_resharded_after_forward(is_root=is_root) for handle in self.handles]
        kept_bytes = sum(
            handle.buffer_bytes for handle, is_freed in zip(self.handles, freed, strict=True) if not is_freed
        )
        passing = [handle.buffer_bytes if is_freed else 0 for handle, is_freed in zip(self.handles, freed, strict=True)]
        peak = 0
        open_bytes: list[int] = []  # of the handles around the current one, by depth
        for index, depth in enumerate(self._depths()):
            del open_bytes[depth:]
            open_bytes.append(passing[index])
            peak = max(peak, sum(open_bytes) + sum(passing[index + 1 : index + 1 + prefetch]))
        return kept_bytes + peak

    def peak_bytes_per_rank(
        self, optimizer_states: int = 2, state_dtype: torch.dtype | None = None, *, is_root: bool = True
    ) -> int:
        """Return the most bytes of parameters, gradients and optimizer state on the device in forward and backward.

        Activations and what the optimizer makes for a while are not counted. Every handle is taken to be used once,
        with one handle gathered ahead, and gradients of a module around others to be there as long as theirs.

        Args:
            optimizer_states: As ``bytes_per_rank_at_rest``.
            state_dtype: The same.
            is_root: Forward starts at the annotated module.
        """
        depths = self._depths()
        step = [
            HandleBytes(
                depth,
                handle.buffer_bytes,
                handle.gradient_bytes,
                tuple(self._reduced(buffer) for buffer in handle.buffers if buffer.requires_grad),
                handle.is_resharded_after_forward(is_root=is_root),
                handle.secondary_bytes,
            )
            for handle, depth in zip(self.handles, depths, strict=True)
        ]
        return self.bytes_per_rank_at_rest(optimizer_states, state_dtype) + peak_of_step(step)

    def _reduced(self, buffer: BufferPlan) -> Reduced:
        if self.host_ranks:
            return self._reduced_twice(buffer, self.host_ranks)
        numel, ranks = buffer.layout.shard_numel, self.world_size
        result = buffer.reduce_dtype if self.mp_policy.keep_low_precision_grads else buffer.dtype
        # Copies of a shard are added up in what travels.
        is_cast_late = self.replicas > 1 and result != buffer.reduce_dtype
        is_cast = ranks > 1 and result != buffer.reduce_dtype and not is_cast_late
        # What arrives from one rank lands in the result, if that has its dtype; what arrives from others beside it.
        slices, scratch = int(is_cast), 0
        if self.transport == "point_to_point" and ranks > 1:
            slices += ranks - 2
            if buffer.reduce_dtype.itemsize < torch.float32.itemsize:
                # Slices are added up in float32, one after the other: see `collectives/point_to_point.py`.
                casts = 1 if is_cast else 2 if ranks > 2 else 0
                scratch = casts * numel * torch.float32.itemsize
        landing = (slices + is_cast_late) * numel * buffer.reduce_dtype.itemsize
        result_bytes = numel * result.itemsize
        if self.offload_policy.is_offloading:
            # On the device until it was copied to the host.
            return Reduced(buffer.gradient_bytes, landing + result_bytes, scratch, shard=0)
        return Reduced(buffer.gradient_bytes, landing, scratch, result_bytes, is_cast_late)

    def _reduced_twice(self, buffer: BufferPlan, host_ranks: int) -> Reduced:
        """Return the bytes of two legs, the first of which gives a secondary shard, and the second a shard of that."""
        result = buffer.reduce_dtype if self.mp_policy.keep_low_precision_grads else buffer.dtype
        is_cast, itemsize = result != buffer.reduce_dtype, buffer.reduce_dtype.itemsize
        first, second = buffer.layout.numel // host_ranks, buffer.layout.shard_numel
        first_slices, second_slices, first_casts, second_casts = 0, int(is_cast), 0, 0
        if self.transport == "point_to_point":
            hosts = self.world_size // host_ranks
            first_slices, second_slices = max(host_ranks - 2, 0), hosts - 2 + is_cast
            if itemsize < torch.float32.itemsize:
                first_casts = 2 if host_ranks > 2 else 0
                second_casts = 1 if is_cast else 2 if hosts > 2 else 0
        home_bytes = second * result.itemsize if self.offload_policy.is_offloading else 0
        return Reduced(
            buffer.gradient_bytes,
            first_slices * first * itemsize,
            first_casts * first * torch.float32.itemsize,
            0 if self.offload_policy.is_offloading else second * result.itemsize,
            second=SecondLeg(
                first * itemsize,
                second_slices * second * itemsize + home_bytes,
                second_casts * second * torch.float32.itemsize,
            ),
        )

    def expected_collectives(self, *, is_root: bool = True) -> tuple[HandleCollectives, ...]:
        """Return each handle's collectives in one training step: forward, backward, gradients synchronised.

        One all-gather of each buffer for forward, one more for backward if it was freed between, from
        secondary shards where there are any, and one reduce-scatter of each buffer that requires gradients;
        where there are replicas, an all-reduce of its shard. Empty buffers need none. Of several micro-batches in one
        step only the first one fills secondary shards.

        Args:
            is_root: Forward starts at the annotated module.
        """
        found = []
        for handle in self.handles:
            again = handle.is_resharded_after_forward(is_root=is_root)
            gathers = 0 if self.host_ranks else 2 if again and handle.secondary_ranks is None else 1
            secondary = 1 + again if self.host_ranks else int(handle.secondary_ranks is not None)
            buffers = [buffer for buffer in handle.buffers if buffer.layout.numel]
            trainable = [buffer for buffer in buffers if buffer.requires_grad]
            found.append(
                HandleCollectives(
                    handle.module_fqns,
                    gathers * len(buffers),
                    gathers * sum(buffer.buffer_bytes for buffer in buffers),
                    len(trainable),
                    sum(buffer.gradient_bytes for buffer in trainable),
                    *((len(trainable), sum(map(_between_replicas, trainable))) if self.replicas > 1 else (0, 0)),
                    *(secondary * len(buffers), secondary * handle.buffer_bytes),
                    *self._between_hosts(buffers, trainable),
                )
            )
        return tuple(found)

    def _between_hosts(self, buffers: Sequence[BufferPlan], trainable: Sequence[BufferPlan]) -> tuple[int, ...]:
        if self.host_ranks is None:
            return ()
        filled = sum(buffer.buffer_bytes for buffer in buffers) // self.host_ranks
        reduced = sum(buffer.gradient_bytes for buffer in trainable) // self.host_ranks
        return (len(buffers), filled, len(trainable), reduced)

    @property
    def collectives_per_step(self) -> int:
        """Calls of collectives in one training step whose forward starts at the annotated module."""
        return sum(one.collectives for one in self.expected_collectives())

    def on_hosts(self, ranks_per_host: int) -> "ShardPlan":
        """Return this plan for hosts that have so many ranks each, in order: the first host the first ranks, and so on.

        Raises:
            ConfigError: It is no number that divides that of all ranks.
        """
        ranks = self.world_size * self.replicas
        is_number = isinstance(ranks_per_host, int) and not isinstance(ranks_per_host, bool)
        if not is_number or ranks_per_host < 1 or ranks % ranks_per_host:
            raise ConfigError(
                f"ranks_per_host is {described(ranks_per_host)}, and there are {count_text(ranks, 'rank')}",
                fix="pass how many ranks each host has, the same on all hosts",
            )
        return replace(self, hosts=tuple(rank // ranks_per_host for rank in range(ranks)))

    def expected_traffic(self, *, is_root: bool = True) -> Traffic:
        """Return what one rank sends in one training step, to ranks on its host and to those on others.

        Counted are the bytes of the collectives of ``expected_collectives`` on links, as means over all ranks. They
        are exact where transport is ``point_to_point``, but for all-reduces; elsewhere those of a ring, below which no
        algorithm stays in all. See ``docs/plan.md``.

        Args:
            is_root: Forward starts at the annotated module.

        Raises:
            UsageError: There are several ranks, and which of them share a host is not known.
        """
        self._check_hosts()
        return self._traffic(is_root=is_root)

    def estimate(self, links: Links, *, is_root: bool = True) -> PlanEstimate:
        """Return how long communication takes in one training step if nothing hides it, by handle and class of link.

        A message takes the latency of its link, and its bytes over the bandwidth; what follows for collectives, and
        what is left out, stands in ``docs/plan.md``.

        Args:
            links: What messages take inside hosts and between them.
            is_root: Forward starts at the annotated module.

        Raises:
            ConfigError: ``links`` are none, or there is none between hosts and several hosts.
            UsageError: There are several ranks, and which of them share a host is not known.
        """
        if not isinstance(links, Links):
            raise ConfigError(f"links is {described(links)}", fix="pass composable.Links(inside=composable.Link(...))")
        self._check_hosts()
        exchanges = self._exchanges(is_root=is_root)
        return PlanEstimate(tuple(HandleEstimate.of(fqns, found, links) for fqns, found in exchanges))

    def _traffic(self, *, is_root: bool) -> Traffic:
        return Traffic(tuple(HandleTraffic.of(fqns, found) for fqns, found in self._exchanges(is_root=is_root)))

    def _check_hosts(self) -> None:
        if not self.hosts and self.world_size * self.replicas > 1:
            raise UsageError(
                "which ranks share a host is not known",
                fix="plan(..., ranks_per_host=8), plan.on_hosts(8), or start the script with torchrun",
            )

    def _exchanges(self, *, is_root: bool) -> Iterator[tuple[tuple[str, ...], tuple[Exchange, ...]]]:
        """Yield for each handle the names of its modules, and what its collectives move between whom.

        Where hosts are not known, as if there were one.
        """
        sharing = self._groups(self.world_size)
        copies: Groups = ((Group((self.replicas,), 0), 1),)
        if self.hosts:
            _, copies = groups_of(self.hosts, self.world_size)
        reducing, between = sharing, copies
        if self.host_ranks:
            reducing, between = self._groups(self.host_ranks), ((Group((self.world_size // self.host_ranks,), 0), 1),)
            if self.hosts:
                _, between = groups_of(self.hosts, self.host_ranks)
        is_direct = self.transport == "point_to_point"
        for handle, one in zip(self.handles, self.expected_collectives(is_root=is_root), strict=True):
            secondary = self._groups(handle.secondary_ranks) if handle.secondary_ranks else reducing
            second_legs = one.second_reduce_scatters, one.second_reduce_scatter_bytes
            yield (
                one.module_fqns,
                (
                    Exchange(one.all_gathers, one.all_gather_bytes, sharing, is_direct=is_direct),
                    Exchange(one.reduce_scatters, one.reduce_scatter_bytes, reducing, is_direct=is_direct),
                    Exchange(one.all_reduces, one.all_reduce_bytes, copies, passes=2),
                    Exchange(one.secondary_all_gathers, one.secondary_all_gather_bytes, secondary, is_direct=is_direct),
                    Exchange(one.fills, one.fill_bytes, between, is_direct=is_direct),
                    Exchange(*second_legs, between, is_direct=is_direct),
                ),
            )

    def _groups(self, size: int) -> Groups:
        """Return the groups of so many neighbours each."""
        return groups_of(self.hosts, size)[0] if self.hosts else ((Group((size,), 0), 1),)

    def part(self, handles: Iterable[HandlePlan], roots: Mapping[str, str], class_names: Sequence[str]) -> "ShardPlan":
        """Return the plan of some of the handles, as if the modules around them had been annotated on their own.

        Args:
            handles: Of this plan.
            roots: For the FQN of each of those modules, its name in the new plan: ``''``, or a position in a list.
            class_names: Their classes.
        """
        return ShardPlan(
            self.world_size,
            self.transport,
            tuple(class_names),
            tuple(handle.renamed(roots) for handle in handles),
            mp_policy=self.mp_policy,
            offload_policy=self.offload_policy,
            replicas=self.replicas,
            host_ranks=self.host_ranks,
            hosts=self.hosts,
        )

    def without(self, handles: Sequence[HandlePlan]) -> "ShardPlan":
        """Return the plan without some of its handles, whose parameters are whole again."""
        fqns = (fqn for handle in handles for param in handle.params for fqn in (param.fqn, *param.shared_fqns))
        gone = set(map(id, handles))
        kept = tuple(handle for handle in self.handles if id(handle) not in gone)
        return replace(self, handles=kept, ignored_fqns=(*self.ignored_fqns, *fqns))

    def digest(self) -> str:
        """Return a hash of all that must be equal on every rank."""
        handles = [
            {
                "modules": handle.module_fqns,
                "reshard_after_forward": handle.reshard_after_forward,
                "unused_gradients": handle.unused_gradients,
                "params": [
                    (
                        *(param.fqn, tuple(param.shape), str(param.dtype), param.requires_grad, param.shared_fqns),
                        param.notes,
                    )
                    for param in handle.params
                ],
                "buffers": [
                    (
                        [str(dtype) for dtype in (buffer.dtype, buffer.compute_dtype, buffer.reduce_dtype)],
                        buffer.requires_grad,
                        buffer.layout.shard_numel,
                        [(span.fqn, span.start, span.order) for span in buffer.layout.spans],
                    )
                    for buffer in handle.buffers
                ],
            }
            for handle in self.handles
        ]
        contents = [
            self.world_size,
            self.replicas,
            self.host_ranks,
            self.transport,
            str(self.mp_policy),
            str(self.offload_policy),
            handles,
        ]
        return hashlib.sha256(json.dumps(contents).encode()).hexdigest()

    def compared_text(self) -> str:
        """Return the plan with a line for each parameter, so that the first line in which ranks differ names it."""
        headline, *rest = str(self).splitlines()
        params = []
        for handle in self.handles:
            dtypes = {span.fqn: dtypes_text(buffer) for buffer in handle.buffers for span in buffer.layout.spans}
            params += [
                f"parameter {param.fqn!r} {list(param.shape)} {dtypes[param.fqn]},"
                f" requires_grad={param.requires_grad}{''.join(f', {note}' for note in param.notes)},"
                f" {module_text(handle.module_fqns[0], handle.class_names[0])}"
                for param in handle.params
            ]
        return "\n".join([headline, *params, *rest])

    def __str__(self) -> str:
        largest = max((handle.buffer_bytes for handle in self.handles), default=0)
        handles, ranks = count_text(len(self.handles), "handle"), count_text(self.world_size, "rank")
        if self.replicas > 1:
            ranks += f" x {self.replicas} replicas"
        if self.host_ranks:
            ranks = f"{count_text(self.host_ranks, 'rank')} x {self.world_size // self.host_ranks} hosts"
        kept = f" and {bytes_text(self.secondary_bytes)} of secondary shards" if self.host_ranks else ""
        lines = [
            f"{' + '.join(self.class_names)}: {handles} over {ranks}, transport {self.transport}",
            f"  {self.numel:,} elements; per rank {bytes_text(self.shard_bytes)}{kept} at rest;"
            f" largest handle {bytes_text(largest)} unsharded; padding {bytes_text(self.padding_bytes)}",
        ]
        lines += self._handle_lines()
        if str(self.mp_policy):
            lines.append(f"  precision: {self.mp_policy}")
        if str(self.offload_policy):
            lines.append(f"  offloaded: {self.offload_policy}")
        if self.kept_fqns:
            lines.append(f"  annotated before, left as they are: {list_text(self.kept_fqns, FQNS_SHOWN, write=str)}")
        if self.ignored_fqns:
            lines.append(f"  ignored parameters: {list_text(self.ignored_fqns, FQNS_SHOWN, write=str)}")
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)

    def _buffers(self) -> Iterator[BufferPlan]:
        return (buffer for handle in self.handles for buffer in handle.buffers)

    def _depths(self) -> Iterator[int]:
        """Yield how many handles of this plan are around each one, by their modules' names."""
        around: list[str] = []
        for handle in self.handles:
            fqn = handle.module_fqns[0] if len(handle.module_fqns) == 1 else ""
            while around and around[-1] and not fqn.startswith(f"{around[-1]}."):
                around.pop()
            yield len(around)
            around.append(fqn)

    def _handle_lines(self) -> list[str]:
        """Return one line for each handle, or for a run of siblings that differ in one number only."""
        return sibling_lines(
            (
                "  " * (depth + 1) + handle.name,
                f" ({', '.join(dict.fromkeys(handle.class_names))})",
                describe_handle(handle),
            )
            for handle, depth in zip(self.handles, self._depths(), strict=True)
        )


def _between_replicas(buffer: BufferPlan) -> int:
    """Return the bytes of the shard of gradients as ranks that hold copies add it up."""
    return buffer.layout.shard_numel * buffer.reduce_dtype.itemsize

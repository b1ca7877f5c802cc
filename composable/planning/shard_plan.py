"""The plan as data.

Byte counts are per rank unless they say otherwise.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from composable.comm import transport_class
from composable.errors import ConfigError, UsageError
from composable.ground.names import (
    bytes_text,
    check_number,
    count_text,
    described,
    dtype_text,
    handle_name,
    list_text,
    module_text,
    sibling_lines,
)
from composable.ground.outer_rooms import outer
from composable.planning.estimate import HandleBytes, HandleCollectives, Reduced, Senders, Traffic, peak_of_step
from composable.planning.layout import FlatLayout, Promise, choose_owners
from composable.planning.options import NO_CASTS, NO_OFFLOAD, MixedPrecisionPolicy, OffloadPolicy
from composable.planning.subclasses import Subclass

# The most names of a list that a plan prints.
FQNS_SHOWN = 3


@dataclass(frozen=True)
class ParamPlan:
    """One unique parameter; ``shared_fqns`` are its other names, ``promise`` has the only places for cuts, if limited.

    ``subclass`` is set if the tensor that is sharded is no plain parameter; shape and dtype are of that tensor.
    """

    fqn: str
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    shared_fqns: tuple[str, ...] = ()
    promise: Promise | None = None
    subclass: Subclass | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes on this parameter that a plan prints."""
        return tuple(str(note) for note in (self.promise, self.subclass) if note is not None)


@dataclass(frozen=True)
class BufferPlan:
    """The flat buffer for those parameters of a handle that are alike in all but their shapes.

    Attributes:
        dtype: Dtype in which the shards rest, and optimizers step.
        requires_grad: Whether there are gradients.
        compute_dtype: Dtype of the unsharded buffer.
        reduce_dtype: Dtype of gradients while they are reduced.
        layout: Where each parameter lies.
        is_gathered_by_class: The class of its only parameter chooses the tensors that ranks exchange; dtype and bytes
            of the unsharded buffer are then given as for a plain parameter.
    """

    dtype: torch.dtype
    requires_grad: bool
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    layout: FlatLayout
    is_gathered_by_class: bool = False

    @property
    def shard_bytes(self) -> int:
        return self.layout.shard_numel * self.dtype.itemsize

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the whole buffer while it is unsharded."""
        return self.layout.numel * self.compute_dtype.itemsize

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the whole buffer of gradients while they are reduced."""
        return self.layout.numel * self.reduce_dtype.itemsize

    @property
    def dtypes(self) -> str:
        """The dtypes in words: of shards at rest and, if they differ, of computation and of reduction."""
        text = dtype_text(self.dtype)
        if self.compute_dtype != self.dtype:
            text += f" as {dtype_text(self.compute_dtype)}"
        # Also where it follows from the compute dtype, since readers may expect another rule.
        if self.requires_grad and not self.dtype == self.compute_dtype == self.reduce_dtype:
            text += f" reduced in {dtype_text(self.reduce_dtype)}"
        return text


@dataclass(frozen=True)
class MatrixOwners:
    """Who steps the matrices of a plan, for optimizers that need them whole.

    Matrices are parameters of two or more dims that require gradients.

    Attributes:
        ranks: For each FQN, the rank of the shard group that steps the matrix.
        numel: Elements of all matrices.
        cut_numel: Elements of those that do not lie whole on one rank.
        sent_numel: Elements of those that lie on other ranks than the owner: the gradient goes there, the step back.
        idle_ranks: Ranks that own none.
    """

    ranks: dict[str, int]
    numel: int
    cut_numel: int
    sent_numel: int
    idle_ranks: int

    @staticmethod
    def of(handles: Sequence["HandlePlan"], world_size: int) -> "MatrixOwners":
        """Choose the owners for the matrices of some handles, the same on all ranks."""
        found = [
            (span, buffer.layout.bounds(span))
            for handle in handles
            for buffer in handle.buffers
            for span in buffer.layout.spans
            if buffer.requires_grad and len(span.shape) > 1
        ]
        owners = choose_owners([bounds for _, bounds in found], [span.shape for span, _ in found])
        sent = [span.numel - b[rank + 1] + b[rank] for (span, b), rank in zip(found, owners, strict=True)]
        numels = [span.numel for span, _ in found]
        cut = sum(numel for numel, elsewhere in zip(numels, sent, strict=True) if elsewhere)
        ranks = {span.fqn: rank for (span, _), rank in zip(found, owners, strict=True)}
        return MatrixOwners(ranks, sum(numels), cut, sum(sent), world_size - len(set(owners)))

    def __str__(self) -> str:
        """Return the text that a plan prints."""
        cut, sent = (numel / max(self.numel, 1) for numel in (self.cut_numel, self.sent_numel))
        if not self.cut_numel:
            return "no matrix is cut"
        return f"{cut:.0%} of matrices cut, {sent:.1%} not on their owner"


@dataclass(frozen=True)
class HandlePlan:
    """Parameters that are unsharded and resharded together.

    Attributes:
        module_fqns: The fully sharded module, below the annotated one (``''`` is itself), or
            the positions of several annotated together.
        class_names: The classes of those modules.
        reason: Why the modules have a handle.
        params: In ``named_parameters()`` order.
        buffers: One for each set of parameters that are alike in all but their shapes.
        reshard_after_forward: ``None``: only if the module is not the root. An int: all is freed except secondary
            shards, from which that many ranks gather again.
        unused_gradients: The gradient of a parameter that no rank has a gradient for: ``none`` or ``zero``.
    """

    module_fqns: tuple[str, ...]
    class_names: tuple[str, ...]
    reason: str
    params: tuple[ParamPlan, ...]
    buffers: tuple[BufferPlan, ...]
    reshard_after_forward: bool | int | None
    unused_gradients: str = "none"

    @property
    def name(self) -> str:
        """The name of the handle in plans."""
        return handle_name(self.module_fqns)

    @property
    def numel(self) -> int:
        return sum(param.shape.numel() for param in self.params)

    @property
    def shard_bytes(self) -> int:
        return sum(buffer.shard_bytes for buffer in self.buffers)

    @property
    def buffer_bytes(self) -> int:
        """Bytes while it is unsharded."""
        return sum(buffer.buffer_bytes for buffer in self.buffers)

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in the whole buffers."""
        return sum(buffer.layout.padding_numel * buffer.dtype.itemsize for buffer in self.buffers)

    @property
    def secondary_ranks(self) -> int | None:
        """How many ranks gather from secondary shards for backward; ``None``: there are none."""
        return self.reshard_after_forward if type(self.reshard_after_forward) is int else None

    @property
    def secondary_bytes(self) -> int:
        """Bytes of the secondary shards between forward and backward."""
        return self.buffer_bytes // self.secondary_ranks if self.secondary_ranks else 0

    @property
    def is_ordered(self) -> bool:
        """A layout chose the order of its parameters, so that matrices lie whole."""
        return any(buffer.layout.is_ordered for buffer in self.buffers)

    def is_resharded_after_forward(self, *, is_root: bool) -> bool:
        """Return whether the handle is freed between forward and backward, if its module is (not) the root."""
        return not is_root if self.reshard_after_forward is None else bool(self.reshard_after_forward)

    def __str__(self) -> str:
        """Return the description of the handle that a plan prints after its name and class."""
        tied = sum(bool(param.shared_fqns) for param in self.params)
        kinds = ", ".join(buffer.dtypes + ("" if buffer.requires_grad else " frozen") for buffer in self.buffers)
        padding = f", padding {bytes_text(self.padding_bytes)}" if self.padding_bytes else ""
        clauses = [
            f"{count_text(len(self.params), 'param')}{f' ({tied} tied)' if tied else ''}, {self.numel:,} {kinds},"
            f" {bytes_text(self.shard_bytes)} per rank{padding}",
            self.reason,
        ]
        if self.secondary_ranks is not None:
            of = count_text(self.secondary_ranks, "rank")
            clauses.append(f"{bytes_text(self.secondary_bytes)} kept for backward, a secondary shard over {of}")
        elif self.reshard_after_forward is False:
            clauses.append("kept for backward")
        if self.unused_gradients == "zero":
            clauses.append("unused gradients are zero")
        if self.is_ordered:
            clauses.append(str(MatrixOwners.of([self], self.buffers[0].layout.world_size)))
        # A clause for each kind of note, with the parameters that have it, named below the handle's module.
        prefix = f"{self.module_fqns[0]}." if len(self.module_fqns) == 1 else ""
        noted: dict[str, list[str]] = {}
        for param in self.params:
            for note in param.notes:
                noted.setdefault(note, []).append(param.fqn.removeprefix(prefix))
        clauses += (f"{text}: {list_text(fqns, FQNS_SHOWN, write=str)}" for text, fqns in noted.items())
        return "; ".join(clauses)


@dataclass(frozen=True)
class ShardPlan:
    """The plan of one annotation: its handles, and the bytes that each rank holds and sends. ``print`` shows it.

    Plans are equal if they cut, gather and reduce alike, over any transport.

    Attributes:
        world_size: Ranks that share each buffer.
        transport: How the bytes travel; ``"auto"`` in plans that ``plan`` made.
        class_names: The classes of the annotated modules.
        handles: Left to right, depth first.
        kept_fqns: Modules below that earlier annotations manage; left as they are.
        ignored_fqns: Parameters that stay whole on every rank.
        mp_policy: Dtypes of computation and reduction, as they were asked for.
        offload_policy: Where shards, gradients and optimizer state rest.
        replicas: Ranks that hold each shard.
        hosts: The host of each rank, one copy of all shards after the other; empty: not known.
        is_queued: A device runs it later than the host: memory beside a result is freed once the work is queued.
        left_out: Dims of the mesh along which nothing is averaged, in words; empty: there are none.
        step: What a step needs with activations, a ``composable.testing.Rehearsal``, where ``plan`` was given one.
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
    hosts: tuple[int, ...] = field(default=(), compare=False, repr=False)
    is_queued: bool = field(default=False, compare=False, repr=False)
    left_out: str = field(default="", compare=False, repr=False)
    step: object = field(default=None, compare=False, repr=False)

    @property
    def numel(self) -> int:
        """Elements of all parameters, each counted once."""
        return sum(handle.numel for handle in self.handles)

    @property
    def shard_bytes(self) -> int:
        """Bytes of parameters that a rank keeps between iterations."""
        return sum(handle.shard_bytes for handle in self.handles)

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in all whole buffers."""
        return sum(handle.padding_bytes for handle in self.handles)

    @property
    def empty_share(self) -> float:
        """The share of parameters of which a rank has no elements, as the mean over the ranks."""
        layouts = [buffer.layout for handle in self.handles for buffer in handle.buffers]
        cuts = [(span, layout.shard_numel) for layout in layouts for span in layout.spans]
        held = sum(-(-span.stop // numel) - span.start // numel for span, numel in cuts if span.numel)
        return 1 - held / max(len(cuts) * self.world_size, 1)

    @property
    def matrices(self) -> MatrixOwners:
        """Where whole matrices are stepped, if an optimizer has all matrices that require gradients."""
        return MatrixOwners.of(self.handles, self.world_size)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Hints that the annotation is probably not as intended."""
        params = self.handles[0].params if len(self.handles) == len(self.class_names) == 1 else ()
        if self.kept_fqns or len({param.fqn.rpartition(".")[0] for param in params}) < 2:
            return ()
        return ("the whole model is one handle: nothing can overlap; pass a policy",)

    def bytes_per_rank_at_rest(self, optimizer_states: int = 2, state_dtype: torch.dtype | None = None) -> int:
        """Return the bytes of shards and optimizer state on the device between iterations, gradients freed.

        Ignored parameters, module buffers and other tensors of the model are not counted. The result is 0 if
        ``offload_policy`` keeps them on the host: ``host_bytes_per_rank_at_rest`` counts those.

        Args:
            optimizer_states: Tensors of the parameter's size for each trainable parameter: 2 for Adam.
            state_dtype: Their dtype; default: the parameter's dtype.
        """
        return 0 if self.offload_policy.is_offloading else self._bytes_at_rest(optimizer_states, state_dtype)

    def host_bytes_per_rank_at_rest(self, optimizer_states: int = 2, state_dtype: torch.dtype | None = None) -> int:
        """Return the bytes of shards and optimizer state that ``offload_policy`` keeps on the host, or 0."""
        return self._bytes_at_rest(optimizer_states, state_dtype) if self.offload_policy.is_offloading else 0

    def _bytes_at_rest(self, optimizer_states: int, state_dtype: torch.dtype | None) -> int:
        check_number("optimizer_states", optimizer_states, fix="pass 2 for Adam, 1 for momentum, 0 for SGD", least=0)
        trained = [buffer for handle in self.handles for buffer in handle.buffers if buffer.requires_grad]
        states = sum(buffer.layout.shard_numel * (state_dtype or buffer.dtype).itemsize for buffer in trained)
        return self.shard_bytes + optimizer_states * states

    def peak_bytes_per_rank(
        self, optimizer_states: int = 2, state_dtype: torch.dtype | None = None, *, is_root: bool = True
    ) -> int:
        """Return the most bytes of parameters, gradients and optimizer state on the device in forward and backward.

        Activations and temporary tensors of the optimizer are not counted. Every handle is assumed to be used once,
        with one handle gathered ahead, and gradients of a module to live as long as those of the modules inside it.

        Args:
            optimizer_states: Tensors of the parameter's size for each trainable parameter: 2 for Adam.
            state_dtype: Their dtype; default: the parameter's dtype.
            is_root: Forward starts at the annotated module.
        """
        step = []
        for handle, depth in zip(self.handles, self._depths(), strict=True):
            trained = [buffer for buffer in handle.buffers if buffer.requires_grad]
            gradients = sum(
                (buffer.layout.numel - buffer.layout.padding_numel) * buffer.compute_dtype.itemsize
                for buffer in trained
            )
            is_freed = handle.is_resharded_after_forward(is_root=is_root)
            reduced = tuple(map(self._reduced, trained))
            step.append(HandleBytes(depth, handle.buffer_bytes, gradients, reduced, is_freed, handle.secondary_bytes))
        return self.bytes_per_rank_at_rest(optimizer_states, state_dtype) + peak_of_step(step)

    def gradient_dtype(self, buffer: BufferPlan) -> torch.dtype:
        """Return the dtype of gradients between backward and the optimizer's step."""
        return buffer.reduce_dtype if self.mp_policy.keep_low_precision_grads else buffer.dtype

    def _reduced(self, buffer: BufferPlan) -> Reduced:
        low = buffer.reduce_dtype
        own = self.gradient_dtype(buffer)
        # An all-reduce adds up the copies of a shard in the dtype that travels.
        is_late = self.replicas > 1 and own != low
        ranks, numel = self.world_size, buffer.layout.shard_numel
        is_cast = ranks > 1 and own != low and not is_late
        # The result lands in the shard if the dtypes agree, else beside it.
        landing, output = (is_cast + is_late) * numel * low.itemsize, numel * own.itemsize
        if self.offload_policy.is_offloading:
            # The result is on the device until it is copied to the host.
            landing, output, is_late = landing + output, 0, False
        if self.is_queued:
            return Reduced(buffer.gradient_bytes, output, 0, landing, is_late)
        return Reduced(buffer.gradient_bytes, output, landing, 0, is_late)

    def expected_collectives(self, *, is_root: bool = True) -> tuple[HandleCollectives, ...]:
        """Return each handle's collectives in one training step: forward, backward, gradients synchronised.

        One all-gather of each buffer for forward, one more for backward if it was freed between, from
        secondary shards where there are any, and one reduce-scatter of each buffer that requires gradients;
        where there are replicas, an all-reduce of its shard. Empty buffers need none.

        Args:
            is_root: Forward starts at the annotated module.
        """
        found = []
        for handle in self.handles:
            buffers = [buffer for buffer in handle.buffers if buffer.layout.numel]
            trained = [buffer for buffer in buffers if buffer.requires_grad]
            gathered = sum(buffer.buffer_bytes for buffer in buffers)
            reduced = sum(buffer.gradient_bytes for buffer in trained)
            gathers = 1 + handle.is_resharded_after_forward(is_root=is_root)
            secondary = int(handle.secondary_ranks is not None)
            gathers -= secondary
            counts = [gathers * len(buffers), gathers * gathered, len(trained), reduced]
            counts += [len(trained), reduced // self.world_size] if self.replicas > 1 else [0, 0]
            counts += [secondary * len(buffers), secondary * gathered]
            found.append(HandleCollectives(handle.module_fqns, *counts))
        return tuple(found)

    @property
    def _is_direct(self) -> bool:
        """Whether slices go straight to the rank that needs them; ``False`` for ``auto``, which is not chosen yet."""
        return self.transport != "auto" and transport_class(self.transport).is_direct

    def on_hosts(self, ranks_per_host: int) -> "ShardPlan":
        """Return this plan for hosts with ``ranks_per_host`` ranks each, in order: the first host has the first ranks.

        Raises:
            ConfigError: ``ranks_per_host`` does not divide the number of all ranks.
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
        """Return the bytes that one rank sends in one training step, to ranks on its host and to ranks on other hosts.

        The bytes are those that the collectives of ``expected_collectives`` send on links, as means over all ranks.
        If the transport sends slices straight to the ranks that need them (``shared_memory``), they are exact except
        for all-reduces; else they are those of a ring, and no algorithm sends less in all. See ``docs/memory.md``.

        Args:
            is_root: Forward starts at the annotated module.

        Raises:
            UsageError: There are several ranks, and which of them share a host is not known.
        """
        hosts = self.hosts or (0,) * self.world_size * self.replicas
        if not self.hosts and len(hosts) > 1:
            raise UsageError(
                "which ranks share a host is not known",
                fix="plan(..., ranks_per_host=8), plan.on_hosts(8), or start the script with torchrun",
            )

        def neighbours(size: int) -> list[tuple[int, ...]]:
            return [hosts[start : start + size] for start in range(0, len(hosts), size)]

        copies = Senders.of(list(zip(*neighbours(self.world_size), strict=True)))
        sizes = {self.world_size, *(handle.secondary_ranks or self.world_size for handle in self.handles)}
        sharing = {size: Senders.of(neighbours(size), is_direct=self._is_direct) for size in sizes}
        found = []
        for handle, one in zip(self.handles, self.expected_collectives(is_root=is_root), strict=True):
            sent = [
                sharing[self.world_size].sent_bytes(one.all_gather_bytes),
                sharing[self.world_size].sent_bytes(one.reduce_scatter_bytes),
                sharing[handle.secondary_ranks or self.world_size].sent_bytes(one.secondary_all_gather_bytes),
                # Each slice goes around once to be added up, and once more to reach all ranks.
                copies.sent_bytes(2 * one.all_reduce_bytes),
            ]
            calls = one.all_gathers + one.reduce_scatters + one.all_reduces + one.secondary_all_gathers
            between = sum(elsewhere for _, elsewhere in sent)
            found.append(Traffic(one.module_fqns, calls, sum(everywhere for everywhere, _ in sent) - between, between))
        calls, inside = sum(one.collectives for one in found), sum(one.inside_bytes for one in found)
        return Traffic((), calls, inside, sum(one.between_bytes for one in found), tuple(found))

    def draw(
        self, ranks_per_host: int | None = None, *, optimizer_states: int = 2, state_dtype: torch.dtype | None = None
    ) -> str:
        """Return the plan as a picture: the text of an SVG document.

        It shows, per rank and handle, the bytes of parameters, gradients and optimizer state between steps; the peak
        of a step; and the bytes that a rank sends in a step, inside its host and to others. Handles and ranks that
        are alike share a row, so the picture of a large plan is as long as a page or two. Equal plans give equal
        texts. ::

            made = plan(model, policy={Block}, world_size=64)
            Path("plan.svg").write_text(made.draw(ranks_per_host=8), encoding="utf-8")

        Args:
            ranks_per_host: Ranks on each host, as ``on_hosts`` takes them. ``None``: as in the plan; if the plan has
                no hosts, the picture has no bytes sent.
            optimizer_states: Tensors of the parameter's size for each trainable parameter: 2 for Adam.
            state_dtype: Their dtype; default: the parameter's dtype.

        Raises:
            ConfigError: ``ranks_per_host`` does not divide the number of all ranks, or ``optimizer_states`` is not a
                number of at least 0.
        """
        placed = self if ranks_per_host is None else self.on_hosts(ranks_per_host)
        return str(outer("ShardPlan.draw")(placed, optimizer_states, state_dtype))

    def without(self, handles: Sequence[HandlePlan]) -> "ShardPlan":
        """Return the plan without some of its handles, whose parameters are whole again."""
        fqns = (fqn for handle in handles for param in handle.params for fqn in (param.fqn, *param.shared_fqns))
        gone = set(map(id, handles))
        kept = tuple(handle for handle in self.handles if id(handle) not in gone)
        return replace(self, handles=kept, ignored_fqns=(*self.ignored_fqns, *fqns))

    def digest(self) -> str:
        """Return a hash of all that must be equal on every rank: it leaves out class names and reasons for handles."""
        handles = [replace(handle, class_names=(), reason="") for handle in self.handles]
        policies = str(self.mp_policy), str(self.offload_policy)
        contents = self.world_size, self.replicas, self.transport, *policies, handles
        return hashlib.sha256(repr(contents).encode()).hexdigest()

    def compared_text(self) -> str:
        """Return the plan with a line for each parameter, so that the first line in which ranks differ names it."""
        headline, *rest = str(self).splitlines()
        params = []
        for handle in self.handles:
            dtypes = {span.fqn: buffer.dtypes for buffer in handle.buffers for span in buffer.layout.spans}
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
        lines = [
            f"{' + '.join(self.class_names)}: {handles} over {ranks}, transport {self.transport}"
            f"{f'; {self.left_out}' if self.left_out else ''}",
            f"  {self.numel:,} elements; per rank {bytes_text(self.shard_bytes)} at rest;"
            f" largest handle {bytes_text(largest)} unsharded; padding {bytes_text(self.padding_bytes)}",
        ]
        empty, owned = self.empty_share, self.matrices
        idle = f"; {count_text(owned.idle_ranks, 'rank')} own none" if owned.idle_ranks else ""
        is_ordered = any(handle.is_ordered for handle in self.handles)
        # One line for each handle, or for a run of siblings that differ in one number only.
        lines += sibling_lines(
            ("  " * (depth + 1) + handle.name, f" ({', '.join(dict.fromkeys(handle.class_names))})", str(handle))
            for handle, depth in zip(self.handles, self._depths(), strict=True)
        )
        for title, text in (
            ("precision", str(self.mp_policy)),
            ("offloaded", str(self.offload_policy)),
            ("annotated before, left as they are", list_text(self.kept_fqns, FQNS_SHOWN, write=str)),
            ("ignored parameters", list_text(self.ignored_fqns, FQNS_SHOWN, write=str)),
            ("whole matrices", f"{len(owned.ranks)}, {owned}{idle}" if is_ordered else ""),
            ("no elements on a rank", f"{empty:.0%} of parameters, on average" if empty > 0.5 else ""),
            ("a step with activations", str(self.step or "")),
            *(("warning", warning) for warning in self.warnings),
        ):
            lines += [f"  {title}: {text}"] if text else []
        return "\n".join(lines)

    def _depths(self) -> Iterator[int]:
        """Yield how many handles of this plan are around each one, by their modules' names."""
        around: list[str] = []
        for handle in self.handles:
            fqn = handle.module_fqns[0] if len(handle.module_fqns) == 1 else ""
            while around and around[-1] and not fqn.startswith(f"{around[-1]}."):
                around.pop()
            yield len(around)
            around.append(fqn)

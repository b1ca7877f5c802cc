"""Handles, the parameters each owns and the reason for each: data that is printable and comparable.

Byte counts are per rank unless they say otherwise.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from composable.planning.layout import FlatLayout, Promise
from composable.planning.memory import HandleBytes, Reduced, peak_of_step
from composable.planning.offload import NO_OFFLOAD, OffloadPolicy
from composable.planning.precision import NO_CASTS, MixedPrecisionPolicy
from composable.planning.subclasses import Subclass
from composable.wording import bytes_text, count_text, dtype_text, list_text, module_text

__all__ = ["BufferPlan", "HandleCollectives", "HandlePlan", "ParamPlan", "ShardPlan"]

_FQNS_SHOWN = 3
_LAST_NUMBER = re.compile(r"(.*?)(\d+)(\D*)")


@dataclass(frozen=True)
class ParamPlan:
    """One unique parameter; ``shared_fqns`` are its other names, ``promise`` says where alone it may be cut.

    ``subclass`` is there where what is sharded is not a plain parameter; shape and dtype are of what is sharded.
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
        """What a plan says of it in particular."""
        return tuple(str(note) for note in (self.promise, self.subclass) if note is not None)


@dataclass(frozen=True)
class BufferPlan:
    """The flat buffer for one class of a handle's parameters, which are alike in all but their shapes.

    Attributes:
        dtype: In which the shards rest, and optimizers step.
        requires_grad: Whether there are gradients.
        compute_dtype: Of the unsharded buffer.
        reduce_dtype: Of gradients while they are reduced.
        layout: Where each parameter lies.
        is_gathered_by_class: The only parameter's class says what ranks exchange; dtype and bytes of the unsharded
            buffer are then those of what a plain parameter would have.
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
    def padding_bytes(self) -> int:
        """Bytes of padding in all shards together."""
        return self.layout.padding_numel * self.dtype.itemsize


@dataclass(frozen=True)
class HandlePlan:
    """Parameters that are unsharded and resharded together.

    Attributes:
        module_fqns: The fully sharded module, below the annotated one (``''`` is itself), or
            the positions of several annotated together.
        class_names: The classes of those modules.
        reason: Why they have a handle.
        params: In ``named_parameters()`` order.
        buffers: One for each class of parameters.
        reshard_after_forward: ``None``: only where the module is not the root. An int: but for secondary shards, from
            which as many ranks gather again.
        unused_gradients: What a parameter that no rank has a gradient for gets, ``none`` or ``zero``.
    """

    module_fqns: tuple[str, ...]
    class_names: tuple[str, ...]
    reason: str
    params: tuple[ParamPlan, ...]
    buffers: tuple[BufferPlan, ...]
    reshard_after_forward: bool | int | None
    unused_gradients: str = "none"

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
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that autograd makes of it."""
        trainable = [buffer for buffer in self.buffers if buffer.requires_grad]
        return sum(
            (buffer.layout.numel - buffer.layout.padding_numel) * buffer.compute_dtype.itemsize for buffer in trainable
        )

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding in the whole buffers."""
        return sum(buffer.padding_bytes for buffer in self.buffers)

    def renamed(self, roots: Mapping[str, str]) -> "HandlePlan":
        """Return this plan with FQNs that begin below other modules; ``roots`` as in ``ShardPlan.part``."""

        def rename(fqn: str) -> str:
            for old, new in roots.items():
                if fqn == old or fqn.startswith(f"{old}.") or not old:
                    return ".".join(filter(None, [new, fqn[len(old) :].lstrip(".")]))
            raise AssertionError(f"{fqn!r} is below none of {list(roots)}")

        return replace(
            self,
            module_fqns=tuple(rename(fqn) for fqn in self.module_fqns),
            params=tuple(
                replace(param, fqn=rename(param.fqn), shared_fqns=tuple(map(rename, param.shared_fqns)))
                for param in self.params
            ),
            buffers=tuple(
                replace(
                    buffer,
                    layout=replace(
                        buffer.layout,
                        spans=tuple(replace(span, fqn=rename(span.fqn)) for span in buffer.layout.spans),
                    ),
                )
                for buffer in self.buffers
            ),
        )

    @property
    def secondary_ranks(self) -> int | None:
        """How many ranks gather from secondary shards for backward; ``None``: there are none."""
        return self.reshard_after_forward if type(self.reshard_after_forward) is int else None

    @property
    def secondary_bytes(self) -> int:
        """Bytes of the secondary shards between forward and backward."""
        return self.buffer_bytes // self.secondary_ranks if self.secondary_ranks else 0

    def is_resharded_after_forward(self, *, is_root: bool) -> bool:
        """Return whether the handle is freed between forward and backward, if its module is (not) the root."""
        return not is_root if self.reshard_after_forward is None else bool(self.reshard_after_forward)


@dataclass(frozen=True)
class HandleCollectives:
    """What one handle's collectives amount to in one training step.

    Bytes are of whole buffers; of all-reduces, which are between the ranks that hold copies, of shards. Gathers from
    secondary shards, which are between a part of the ranks, are counted apart.
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
        ``offload_policy`` keeps them on the host: then ``host_bytes_per_rank_at_rest`` has them.

        Args:
            optimizer_states: Tensors of the parameter's size for each trainable parameter: 2 for Adam.
            state_dtype: Their dtype; default: that of the parameter.
        """
        return 0 if self.offload_policy.is_offloading else self._bytes_at_rest(optimizer_states, state_dtype)

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
            again = handle.is_resharded_after_forward(is_root=is_root)
            gathers = 2 if again and handle.secondary_ranks is None else 1
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
                    *((len(buffers), handle.buffer_bytes) if handle.secondary_ranks else (0, 0)),
                )
            )
        return tuple(found)

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
            dtypes = {span.fqn: _dtypes_text(buffer) for buffer in handle.buffers for span in buffer.layout.spans}
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
            f"{' + '.join(self.class_names)}: {handles} over {ranks}, transport {self.transport}",
            f"  {self.numel:,} elements; per rank {bytes_text(self.shard_bytes)} at rest;"
            f" largest handle {bytes_text(largest)} unsharded; padding {bytes_text(self.padding_bytes)}",
        ]
        lines += self._handle_lines()
        if str(self.mp_policy):
            lines.append(f"  precision: {self.mp_policy}")
        if str(self.offload_policy):
            lines.append(f"  offloaded: {self.offload_policy}")
        if self.kept_fqns:
            lines.append(f"  annotated before, left as they are: {list_text(self.kept_fqns, _FQNS_SHOWN, write=str)}")
        if self.ignored_fqns:
            lines.append(f"  ignored parameters: {list_text(self.ignored_fqns, _FQNS_SHOWN, write=str)}")
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
        runs: list[tuple[tuple[object, ...], int, int]] = []  # what is equal in a run, first and last number
        for handle, depth in zip(self.handles, self._depths(), strict=True):
            fqn = ", ".join(name or "(root)" for name in handle.module_fqns)
            numbered = _LAST_NUMBER.fullmatch(fqn) if len(handle.module_fqns) == 1 else None
            before, number, after = (numbered[1], int(numbered[2]), numbered[3]) if numbered else (fqn, -1, "")
            classes = ", ".join(dict.fromkeys(handle.class_names))
            key = ("  " * (depth + 1) + before, f"{after} ({classes})", _describe_handle(handle))
            if runs and runs[-1][0] == key and runs[-1][2] + 1 == number:
                runs[-1] = (key, runs[-1][1], number)
            else:
                runs.append((key, number, number))
        lines = []
        for (before, after, text), first, last in runs:
            number_text = "" if first < 0 else str(first) if first == last else f"[{first}-{last}]"
            times = f" x {last - first + 1}, each" if last > first else ""
            lines.append(f"{before}{number_text}{after}{times}: {text}")
        return lines


def _describe_handle(handle: HandlePlan) -> str:
    """Return what is said of a handle after its name and class."""
    kinds = ", ".join(map(_describe_buffer, handle.buffers))
    padding = f", padding {bytes_text(handle.padding_bytes)}" if handle.padding_bytes else ""
    tied = sum(bool(param.shared_fqns) for param in handle.params)
    return (
        f"{count_text(len(handle.params), 'param')}"
        f"{f' ({tied} tied)' if tied else ''}, {handle.numel:,} {kinds},"
        f" {bytes_text(handle.shard_bytes)} per rank{padding}; {handle.reason}"
        f"{_describe_kept(handle)}"
        f"{'; unused gradients are zero' if handle.unused_gradients == 'zero' else ''}"
        f"{_describe_notes(handle)}"
    )


def _describe_kept(handle: HandlePlan) -> str:
    """Return what stays between forward and backward, as a clause."""
    if handle.secondary_ranks is not None:
        of = count_text(handle.secondary_ranks, "rank")
        return f"; {bytes_text(handle.secondary_bytes)} kept for backward, a secondary shard over {of}"
    return "; kept for backward" if handle.reshard_after_forward is False else ""


def _describe_buffer(buffer: BufferPlan) -> str:
    return _dtypes_text(buffer) + ("" if buffer.requires_grad else " frozen")


def _dtypes_text(buffer: BufferPlan) -> str:
    """Return the dtypes of a buffer: where it rests, and where they differ, is computed with and reduced."""
    text = dtype_text(buffer.dtype)
    if buffer.compute_dtype != buffer.dtype:
        text += f" as {dtype_text(buffer.compute_dtype)}"
    # Also where it follows from the other: elsewhere the rule is another one.
    if buffer.requires_grad and not buffer.dtype == buffer.compute_dtype == buffer.reduce_dtype:
        text += f" reduced in {dtype_text(buffer.reduce_dtype)}"
    return text


def _describe_notes(handle: HandlePlan) -> str:
    """Return a clause for each kind of note, with the parameters that have it, named below the handle's module."""
    prefix = f"{handle.module_fqns[0]}." if len(handle.module_fqns) == 1 else ""
    noted: dict[str, list[str]] = {}
    for param in handle.params:
        for note in param.notes:
            noted.setdefault(note, []).append(param.fqn.removeprefix(prefix))
    return "".join(f"; {text}: {list_text(fqns, _FQNS_SHOWN, write=str)}" for text, fqns in noted.items())


def _between_replicas(buffer: BufferPlan) -> int:
    """Return the bytes of the shard of gradients as ranks that hold copies add it up."""
    return buffer.layout.shard_numel * buffer.reduce_dtype.itemsize

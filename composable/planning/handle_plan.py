"""One handle's plan: its parameters, their buffers and the reason for it, as data.

Byte counts are per rank unless they say otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from composable.ground.names import bytes_text, count_text, dtype_text, handle_name, list_text
from composable.planning.layout import FlatLayout, Promise
from composable.planning.subclasses import Subclass

__all__ = ["FQNS_SHOWN", "BufferPlan", "HandlePlan", "ParamPlan"]

# Of a list of names, as a plan prints it.
FQNS_SHOWN = 3


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
    def dtypes(self) -> str:
        """The dtypes in words: where it rests, and where they differ, is computed with and reduced."""
        text = dtype_text(self.dtype)
        if self.compute_dtype != self.dtype:
            text += f" as {dtype_text(self.compute_dtype)}"
        # Also where it follows from the other: elsewhere the rule is another one.
        if self.requires_grad and not self.dtype == self.compute_dtype == self.reduce_dtype:
            text += f" reduced in {dtype_text(self.reduce_dtype)}"
        return text


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
    def name(self) -> str:
        """What plans call it."""
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

    def is_resharded_after_forward(self, *, is_root: bool) -> bool:
        """Return whether the handle is freed between forward and backward, if its module is (not) the root."""
        return not is_root if self.reshard_after_forward is None else bool(self.reshard_after_forward)

    def renamed(self, roots: Mapping[str, str]) -> "HandlePlan":
        """Return this plan with FQNs that begin below other modules; ``roots`` as in ``ShardPlan.part``."""

        def rename(fqn: str) -> str:
            old = next(old for old in roots if not old or fqn == old or fqn.startswith(f"{old}."))
            return ".".join(filter(None, [roots[old], fqn[len(old) :].lstrip(".")]))

        def laid_out(layout: FlatLayout) -> FlatLayout:
            return replace(layout, spans=tuple(replace(span, fqn=rename(span.fqn)) for span in layout.spans))

        return replace(
            self,
            module_fqns=tuple(map(rename, self.module_fqns)),
            params=tuple(
                replace(param, fqn=rename(param.fqn), shared_fqns=tuple(map(rename, param.shared_fqns)))
                for param in self.params
            ),
            buffers=tuple(replace(buffer, layout=laid_out(buffer.layout)) for buffer in self.buffers),
        )

    def __str__(self) -> str:
        """Return what is said of a handle after its name and class."""
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
        # A clause for each kind of note, with the parameters that have it, named below the handle's module.
        prefix = f"{self.module_fqns[0]}." if len(self.module_fqns) == 1 else ""
        noted: dict[str, list[str]] = {}
        for param in self.params:
            for note in param.notes:
                noted.setdefault(note, []).append(param.fqn.removeprefix(prefix))
        clauses += (f"{text}: {list_text(fqns, FQNS_SHOWN, write=str)}" for text, fqns in noted.items())
        return "; ".join(clauses)

"""Gathers of ragged tensors, requested or hidden.

An operation without a rule of its own gathers: every ragged operand becomes a full plain tensor, the operation runs on
full tensors, the tensors that it changed are sliced back into the local pieces, and its results are replicated
DTensors. This is right, slow, and counted; it needs none of the sharding rules of torch's DTensor.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import pairwise
from typing import Any, NoReturn, TypeAlias

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate

from composable.comm import Ranks
from composable.dtensor.packed import values_of
from composable.dtensor.spec import RaggedLayout, replicated_spec, slice_full
from composable.errors import UsageError
from composable.ground.frames import is_running
from composable.ground.names import check_bool
from composable.ground.ownership import mark_of
from composable.ground.torch_hooks import before_gradients
from composable.ground.torch_private import (
    DeviceMesh,
    DTensorSpec,
    OpOverload,
    TensorMeta,
    disabled_torch_function,
    dtensor_new,
    is_tracing,
    model_averager_code,
    traceable_collectives,
    tree_leaves,
    tree_map_only,
)
from composable.planning import RaggedShard, strides_of

# (tensor subclass, operation, args, kwargs) -> result
Rule: TypeAlias = Callable[[Any, OpOverload, Sequence[Any], Mapping[str, Any]], Any]

aten = torch.ops.aten

# -- the exchange


def gather_full(local: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """Return the full tensor on every rank: new, dense, with its memory in the layout's order.

    Shapes: local [layout.local_shape] -> [layout.shape], any dtype, on the device of ``local``.
    Collective: all ranks of the layout's groups, same order.
    """
    block = gather_block(local, layout)
    if not layout.splits:
        return block
    if block.is_meta:
        return layout.empty_full(block.dtype, block.device)
    # The block is Replicate along the dim that was cut; torch joins the blocks.
    placements = [Replicate() if isinstance(one, RaggedShard) else one for one in layout.placements]
    meta = TensorMeta(layout.shape, strides_of(layout.shape), block.dtype)
    spec = DTensorSpec(layout.mesh, tuple(placements), tensor_meta=meta)
    is_here = block.device.type == layout.mesh.device_type  # A shard offloaded to the host: its block is there too.
    moved = block if is_here else block.to(layout.mesh.device_type)
    blocks: DTensor = wrap(DTensor, moved.contiguous(), spec)
    full = blocks.redistribute(placements=[Replicate()] * layout.mesh.ndim)._local_tensor.to(block.device)
    return layout.empty_full(full.dtype, full.device).copy_(full) if layout.order else full.contiguous()


def gather_block(local: torch.Tensor, layout: RaggedLayout) -> torch.Tensor:
    """Return the block on every rank that shares it: new, dense, with its memory in the layout's order.

    Shapes: local [layout.local_shape] -> [layout.block_shape], any dtype, on the device of ``local``.
    Collective: all ranks of the layout's group, same order.
    """
    device, home = torch.device(layout.mesh.device_type), local.device
    if local.is_meta:
        return layout.empty_block(local.dtype, home)
    # Offloaded to the host: the group sends device tensors only.
    source = values_of(local).detach().reshape(-1)
    source = source if home.type == device.type else source.to(device)
    block = layout.unflat(_gather_flat(source, layout.bounds, layout.ranks))
    return block if home.type == device.type else block.to(home)


def _gather_flat(own: torch.Tensor, bounds: Sequence[int], ranks: Ranks) -> torch.Tensor:
    """Return the flat tensors of all ranks, one after the other; ``own`` is the tensor of this rank."""
    if is_tracing() and ranks.size > 1 and bounds[-1]:
        # In a form that a graph can hold: torch.compile does not see results that a collective writes into lists.
        sizes = [hi - lo for lo, hi in pairwise(bounds)]
        piece = max(sizes)
        padded = torch.cat([own, own.new_zeros(piece - own.numel())])
        gathered = traceable_collectives.all_gather_tensor(padded, 0, ranks.process_group)
        return torch.cat([gathered[rank * piece : rank * piece + size] for rank, size in enumerate(sizes)])
    every, item = own.new_empty(bounds[-1]), own.element_size()
    every[bounds[ranks.rank] : bounds[ranks.rank + 1]].copy_(own)
    # Bytes, because not every backend knows every dtype.
    ranks.gather_ragged(every.view(torch.uint8), [bound * item for bound in bounds])
    return every


def is_parameter(tensor: Any) -> bool:
    """Say whether a ragged tensor [any] is the sharded parameter of some module, not only a tensor with its cut."""
    return mark_of(tensor) is not None


# -- the count of operations that gathered without being asked to


class _RaggedRecord:
    """The records of this process about ragged tensors. Ranks that are threads share them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # How often each operation gathered without being asked to.
        self.strict_depth = 0  # How many ``strict_mode`` contexts are active: in them, such operations are refused.
        # The sources that some view still looks into, by id. Mostly empty, so the hot path checks it for free.
        self.sources: weakref.WeakValueDictionary[int, _Source] = weakref.WeakValueDictionary()
        # The owners of gradients that are not complete, by id, and whether ``zero_grad`` drops the rest; mostly empty
        # too. Gradients are compared by identity, so ranks that are threads do not mix.
        self.unfinished: dict[int, tuple[weakref.ref[Any], bool]] = {}


RECORD = _RaggedRecord()


def count_fallback(op: str, layout: RaggedLayout) -> None:
    """Count the gather of a tensor of ``layout`` that ``op`` is about to begin; ``UsageError`` in ``strict_mode``."""
    if RECORD.strict_depth:
        raise UsageError(
            f"{op} has no rule for ragged tensors and would gather all of {list(layout.shape)}",
            at=f"rank {layout.global_rank}",
            fix="call full_tensor() where a gather is meant, or leave strict_mode()",
        )
    RECORD.counts[op] += 1


def fallback_counts(*, reset: bool = False) -> dict[str, int]:
    """Return how often each operation gathered whole sharded tensors without being asked to, since the last reset.

    ``full_tensor`` and ``redistribute`` gather on request, and are not counted. Not collective.

    Args:
        reset: Start again from zero after this call.
    """
    check_bool("reset", reset)
    counts = dict(RECORD.counts)
    if reset:
        RECORD.counts.clear()
    return counts


@contextmanager
def strict_mode() -> Iterator[None]:
    """Raise ``UsageError`` in this context instead of gathering a whole sharded tensor without being asked to."""
    RECORD.strict_depth += 1
    try:
        yield
    finally:
        RECORD.strict_depth -= 1


# -- operations on full tensors


def wrap(cls: Any, local: torch.Tensor, spec: DTensorSpec) -> Any:
    """Return ``local``, of the local shape and dtype that ``spec`` says, as a DTensor of class ``cls``."""
    return dtensor_new(cls, local, spec, requires_grad=False)


def replicate(full: torch.Tensor, layout: RaggedLayout) -> DTensor:
    """Wrap ``full``, a tensor of any shape and dtype that is whole on every rank, as torch's own DTensor."""
    replicated: DTensor = wrap(DTensor, full, replicated_spec(layout.mesh, full))
    return replicated


def is_replicated(tensor: DTensor, layout: RaggedLayout) -> bool:
    """Say whether every rank of the layout's mesh holds all of ``tensor`` [any]."""
    spec = tensor._spec
    if not (spec.mesh is layout.mesh or shares_cut(spec.mesh, layout)):
        return False
    return all(isinstance(placement, Replicate) for placement in spec.placements)


def shares_cut(mesh: DeviceMesh, layout: RaggedLayout) -> bool:
    """Say whether one operation may take tensors of ``mesh`` and of the layout: both have the dim that is cut.

    One of the two meshes may have further dims, for tensor parallelism. Tensors of the other mesh are equal along
    these dims.
    """
    own, names = layout.mesh, mesh.mesh_dim_names or ()
    if mesh == own:
        return True
    if own.mesh_dim_names is None or own.mesh_dim_names[layout.mesh_dim] not in names:
        return False
    return Ranks.of_mesh(mesh, names.index(own.mesh_dim_names[layout.mesh_dim])).numbers == layout.ranks.numbers


def widest(layouts: Iterable[RaggedLayout]) -> RaggedLayout:
    """Return the first of the layouts with the most mesh dims."""
    return max(layouts, key=lambda layout: layout.mesh.ndim)


def written(op: OpOverload) -> list[str]:
    """Return the names of the arguments that ``op`` changes."""
    return [arg.name for arg in op._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]


def gather_and_run(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``op`` on full tensors. Collective, and counted as a fallback, unless all operands are whole already.

    Raises ``UsageError`` if a model averager of torch runs ``op``; it is a collective; ``strict_mode`` is on; an
    operand is a plain tensor that may differ between ranks; or the operation draws random numbers, which would differ.
    """
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    ragged: list[Any] = [tensor for tensor in tensors if type(tensor) is cls]
    views = [tensor for tensor in tensors if isinstance(tensor, GatheredView)]
    bases = [*ragged, *(view.source.base for view in views), *(one.base for one in tensors if type(one) is WholeTerm)]
    layout = widest(base._spec.layout for base in bases)
    if is_running(model_averager_code()):
        raise UsageError(
            "torch's model averagers average whole models that each rank trains by itself, and a sharded model is "
            "one model on all ranks",
            at=None if layout.label is None else f"parameter {str(layout.label)!r}",
            fix="leave the averager out: every backward averages gradients; or train the whole model on each rank",
        )
    if "c10d" in op.namespace:
        # All of them, whatever they write or return: a rank that only receives has to raise where the senders do.
        raise UsageError(
            "a collective of torch.distributed is called on a ragged tensor, one tensor of which each rank holds "
            "another piece",
            at=f"{'ragged tensor' if layout.label is None else f'parameter {str(layout.label)!r}'} "
            f"{list(layout.shape)}",
            fix="leave it out, backward has averaged the gradients, and optimizers step shards without "
            "ZeroRedundancyOptimizer; for whole values, on every rank, full = tensor.full_tensor(); for a number, send "
            "what tensor.to_local() of each rank gives",
        )
    if torch.Tag.nondeterministic_seeded in op.tags and ragged:
        raise _refusal(op, layout, "draws random numbers from a ragged tensor", "call full_tensor() first")
    bound = {arg.name: value for arg, value in zip(op._schema.arguments, args)} | dict(kwargs)
    changed = [leaf for name in written(op) for leaf in tree_leaves(bound.get(name)) if isinstance(leaf, torch.Tensor)]
    changed_ids = {id(tensor) for tensor in changed}
    # Plain operands are allowed for a write to a view, which is equal on every rank, and for `equal`.
    takes_plain = op is aten.equal.default or any(isinstance(tensor, GatheredView) for tensor in changed)
    for tensor in tensors:
        is_written = id(tensor) in changed_ids
        if isinstance(tensor, DTensor):
            _check_operand(cls, op, tensor, layout, is_written=is_written)
        elif has_own_gradient(tensor, tensors) or (tensor.dim() > 0 and not is_written and not takes_plain):
            raise _refuse_plain(op, tensor, bases, is_write=any(id(one) in changed_ids for one in ragged))
    if ragged:
        count_fallback(str(op), layout)

    fulls: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in fulls:
            fulls[id(tensor)] = _full(cls, tensor, layout)
    full_args, full_kwargs = tree_map_only(torch.Tensor, lambda t: fulls[id(t)], (list(args), dict(kwargs)))
    results = op(*full_args, **full_kwargs)

    for source in {id(view.source): view.source for view in changed if isinstance(view, GatheredView)}.values():
        source.write_back()
    for one in ragged:
        if id(one) in changed_ids:
            one._local_tensor.copy_(slice_full(fulls[id(one)], one._spec.layout))
            note_written([one._local_tensor])
    # An operation in place returns its own argument.
    originals = {id(fulls[id(tensor)]): tensor for tensor in tensors}
    makes_views = any(ret.alias_info is not None and not ret.alias_info.is_write for ret in op._schema.returns)
    first: Any = tensors[0]
    viewed = None
    if makes_views and type(first) is not WholeTerm:
        viewed = first.source if isinstance(first, GatheredView) else _Source(bases[0], fulls[id(bases[0])])

    def out(result: torch.Tensor) -> Any:
        if id(result) in originals:
            return originals[id(result)]
        spec = replicated_spec(layout.mesh, result)
        return wrap(DTensor, result, spec) if viewed is None else _make_view(result, spec, viewed)

    return as_terms(tree_map_only(torch.Tensor, out, results), bases[0])


def _full(cls: Any, tensor: Any, layout: RaggedLayout) -> torch.Tensor:
    if type(tensor) is cls:
        return gather_full(tensor._local_tensor, tensor._spec.layout)
    if isinstance(tensor, DTensor):
        if not is_replicated(tensor, layout):
            tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        local: torch.Tensor = tensor._local_tensor
        return local
    plain: torch.Tensor = tensor
    return plain


def _check_operand(cls: Any, op: OpOverload, tensor: Any, layout: RaggedLayout, *, is_written: bool) -> None:
    base = tensor.source.base if isinstance(tensor, GatheredView) else tensor
    if isinstance(tensor, GatheredView):
        tensor.check_fresh()
        if is_written and torch.is_grad_enabled() and base.requires_grad:
            raise UsageError(f"{op} on a view of a ragged tensor has no gradient", fix="use torch.no_grad()")
    is_ragged = type(base) is cls
    if not (shares_cut(layout.mesh, base._spec.layout) if is_ragged else shares_cut(tensor.device_mesh, layout)):
        raise _refusal(op, layout, "mixes tensors of two meshes", "call full_tensor() on one of them")
    if is_written and not is_ragged and not is_replicated(tensor, layout):
        what = f"would write a ragged tensor into one placed {tensor.placements}"
        raise _refusal(op, layout, what, "use full_tensor()")


def has_own_gradient(tensor: Any, operands: Iterable[Any]) -> bool:
    """Say whether ``tensor`` is a plain operand that would get, or change, a gradient of this rank alone."""
    if not torch.is_grad_enabled() or isinstance(tensor, DTensor):
        return False
    return tensor.requires_grad or (tensor.dim() > 0 and any(getattr(one, "requires_grad", False) for one in operands))


def _refuse_plain(op: OpOverload, plain: torch.Tensor, bases: Sequence[Any], *, is_write: bool) -> UsageError:
    """Return the error of an operation on a ragged tensor and a plain one, which may differ between ranks."""
    ragged = next(filter(is_parameter, bases), bases[0])
    layout: RaggedLayout = ragged._spec.layout
    if is_write and op.overloadpacket is not aten.copy_:
        what = f"would write to a ragged tensor by a plain one of shape {list(plain.shape)}, which ranks may differ in"
        fix = (
            "with torch.no_grad(): full = tensor.full_tensor(); change full, alike on every rank; tensor.copy_(full); "
            "or, for a parameter, with unshard_params(module), torch.no_grad(): change it, alike on every rank"
        )
        return _refusal(op, layout, what, fix)
    if not is_parameter(ragged) or layout.label is None:
        return _refusal(
            op,
            layout,
            f"mixes a ragged tensor with a plain one of shape {list(plain.shape)}, which may differ between ranks",
            "call full_tensor() on the ragged one, or distribute_tensor(plain, mesh, [Replicate()])",
        )
    if op.overloadpacket is aten.copy_:
        what = f"of a plain tensor of shape {list(plain.shape)}, which is not that of the whole parameter"
        return _refusal(op, layout, what, "pass a tensor of the whole parameter's shape")
    return UsageError(
        f"{op} meets a sharded parameter and a plain tensor of shape {list(plain.shape)}: "
        "the parameter is used outside the forward of its module",
        at=f"{layout.label.module}, parameter {str(layout.label)!r} {list(layout.shape)}",
        fix="call the module itself, not its forward; register_fsdp_forward_method(module, name) for another method; "
        "annotate a module around all uses; or module.unshard() before. "
        "In a loss: parameter.full_tensor(), whose gradient is averaged",
    )


def _refusal(op: OpOverload, layout: RaggedLayout, what: str, fix: str) -> UsageError:
    cut_as = "" if layout.label is None else f", cut as parameter {str(layout.label)!r}"
    return UsageError(f"{op} {what}", at=f"ragged tensor of shape {list(layout.shape)}{cut_as}", fix=fix)


def refuse_conversion(tensor: Any, *, force: bool = False) -> Any:
    """Raise ``UsageError`` for ``tolist()`` and ``numpy()``, which torch refuses with the name of an inner class."""
    raise UsageError(
        f"tolist() or numpy() of a sharded tensor, or of what was computed from it, of shape {list(tensor.shape)}",
        fix="call full_tensor() first, on every rank: value.full_tensor().tolist()",
    )


# -- terms of a loss


class WholeTerm(DTensor):
    """A tensor that is whole on every rank, computed from a ragged one; where it meets a plain one, it becomes plain.

    So a penalty can be added to a loss that each rank computes from its own data.
    """

    base: Any  # the ragged tensor
    tolist = numpy = refuse_conversion

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        mesh = next(tensor._spec.mesh for tensor in tensors if type(tensor) is cls)
        if all(isinstance(tensor, DTensor) and tensor._spec.mesh == mesh for tensor in tensors):
            return disabled_torch_function(func, types, args, kwargs or {})
        args, kwargs = tree_map_only(cls, cls.to_local, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves the arguments untyped
        cls, op: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not {cls, DTensor}.issuperset(types):
            return NotImplemented  # Ragged tensors have rules.
        term = next(leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is cls)
        return gather_and_run(type(term.base), op, args, kwargs or {})

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Return the plain tensor. Its gradient is averaged over ranks, unless ``grad_placements`` are given."""
        local = super().to_local(grad_placements=grad_placements)
        if local.requires_grad and grad_placements is None:
            before_gradients([local], self.base._spec.layout.average)
        return local

    full_tensor = to_local

    def _typed_storage(self) -> NoReturn:
        raise UsageError(
            "FullyShardedDataParallel, or other code, resizes the storage of what was gathered of a parameter",
            fix="leave that wrapper out: fully_shard has sharded the parameters",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(wrap(DTensor, self._local_tensor, self._spec), memo)  # without the parameter

    def __reduce_ex__(self, protocol: Any) -> Any:
        return wrap(DTensor, self._local_tensor, self._spec).__reduce_ex__(protocol)


def as_terms(results: Any, base: Any) -> Any:
    """Return ``results`` of an operation on the ragged tensor ``base``, in which whole tensors are terms now."""
    # Not for optimizers, nor in backwards: what they compute meets no loss.
    if torch.is_grad_enabled() and not is_tracing():
        for leaf in tree_leaves(results):
            if type(leaf) is DTensor:
                leaf.__class__ = WholeTerm
                leaf.base = base  # type: ignore[attr-defined]  # it is a term now
    return results


# -- views, which look into a gathered copy


class _Source:
    """A ragged tensor and the gathered copy that views of it look into."""

    __slots__ = ("__weakref__", "base", "full", "is_stale")

    def __init__(self, base: Any, full: torch.Tensor) -> None:
        self.base = base  # The ragged tensor.
        self.full = full  # Its values when the first of the views was taken.
        self.is_stale = False  # ``base`` was written to since then, other than through these views.
        RECORD.sources[id(self)] = self

    def write_back(self) -> None:
        """Copy changes that the views made in the gathered copy to the ragged tensor."""
        self.base._local_tensor.copy_(slice_full(self.full, self.base._spec.layout))
        note_written([self.base._local_tensor], but=self)


def note_written(locals_: Sequence[torch.Tensor], *, but: _Source | None = None) -> None:
    """Note that operations on ragged tensors have written to their local tensors, of any shapes and dtypes.

    This increments the versions that autograd compares, and makes views stale, except views of the source ``but``.
    """
    increment_version(locals_)
    if RECORD.sources:
        changed = set(map(id, locals_))
        for reference in RECORD.sources.valuerefs():
            source = reference()
            # Aliases (`detach()`, `.data`) share the local tensor object.
            if source is not None and source is not but:
                source.is_stale = source.is_stale or id(source.base._local_tensor) in changed


class GatheredView(DTensor):
    """A view of a ragged tensor, such as ``weight[0]``: it looks into a gathered copy.

    A write to the view also changes the ragged tensor, as with any view. A write to the ragged tensor
    does not change the view: after it, the view is of no use and raises ``UsageError``.
    """

    source: _Source
    tolist = numpy = refuse_conversion

    def check_fresh(self) -> None:
        """Raise ``UsageError`` unless the view still shows the values of its ragged tensor."""
        if self.source.is_stale:
            raise UsageError(
                f"a view of shape {list(self.shape)} shows values that a ragged tensor no longer has",
                at=f"view of a ragged tensor of shape {list(self.source.base.shape)}",
                fix="take the view again after the tensor was changed",
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves the arguments untyped
        cls, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        views = [leaf for leaf in tree_leaves((list(args), dict(kwargs or {}))) if type(leaf) is cls]
        views[0].check_fresh()
        if torch.Tag.inplace_view in op.tags:
            raise UsageError(f"{op} would change the shape of a view of a ragged tensor", fix="use what returns a view")
        if op is aten.new_empty.default:
            # Plain, as initialisers of slices want it: torch's DTensor has no rule for what `orthogonal_` does to it.
            return op(views[0]._local_tensor, *args[1:], **(kwargs or {}))
        if op is aten.as_strided.default and len(args) > 3 and args[3] is not None:
            # torch counts this offset in the storage that the view shows; the local tensor begins elsewhere in its own.
            args = (*args[:3], args[3] - views[0].storage_offset() + views[0]._local_tensor.storage_offset())
        return gather_and_run(type(views[0].source.base), op, args, kwargs or {})


def _make_view(local: torch.Tensor, spec: DTensorSpec, source: _Source) -> GatheredView:
    view: GatheredView = wrap(GatheredView, local, spec)
    view.source = source
    return view

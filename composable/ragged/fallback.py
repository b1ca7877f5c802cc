"""The slow and always right way to run an operation on ragged tensors: gather, run, slice back.

Every ragged operand becomes a full plain tensor, the operation runs on full tensors, what
it changed is sliced back into the local pieces, and its results are replicated DTensors.
Nothing depends on which operations torch's DTensor has a sharding rule for.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate

from composable.collectives import Ranks
from composable.errors import UsageError, place_of_rank
from composable.frames import is_in_model_averager
from composable.ragged.fallback_log import count_fallback
from composable.ragged.lockstep import confirm, is_parameter
from composable.ragged.spec import RaggedLayout, gather_full, replicated_spec, slice_full
from composable.torch_private import (
    DeviceMesh,
    DTensorSpec,
    OpOverload,
    dtensor_new,
    tree_leaves,
    tree_map_only,
)

__all__ = [
    "LIVE_SOURCES",
    "GatheredView",
    "Rule",
    "gather_and_run",
    "is_replicated",
    "make_stale_view",
    "mark_stale",
    "replicate",
    "shares_cut",
    "widest",
    "wrap",
    "written",
    "written_ragged",
]

# (tensor subclass, operation, args, kwargs) -> result
Rule: TypeAlias = Callable[[Any, OpOverload, Sequence[Any], Mapping[str, Any]], Any]

# Plain operands that cannot differ between ranks unnoticed: they are compared, or overwritten.
_TAKES_PLAIN = frozenset({torch.ops.aten.equal.default})


def wrap(cls: Any, local: torch.Tensor, spec: DTensorSpec) -> Any:
    """Return ``local`` as a DTensor of class ``cls``."""
    return dtensor_new(cls, local, spec, requires_grad=False)


def replicate(full: torch.Tensor, layout: RaggedLayout) -> DTensor:
    """Wrap a tensor that every rank holds whole as torch's own DTensor."""
    replicated: DTensor = wrap(DTensor, full, replicated_spec(layout.mesh, full))
    return replicated


def is_replicated(tensor: DTensor, layout: RaggedLayout) -> bool:
    """Say whether every rank of the layout's mesh holds all of ``tensor``."""
    spec = tensor._spec
    if not (spec.mesh is layout.mesh or shares_cut(spec.mesh, layout)):
        return False
    return all(isinstance(placement, Replicate) for placement in spec.placements)


def shares_cut(mesh: DeviceMesh, layout: RaggedLayout) -> bool:
    """Say whether what is on ``mesh`` may meet what has the layout: it has the same dim for pieces.

    Of two meshes one may have other dims beside it, for tensor parallelism. What is on none of these is the same
    along them.
    """
    own, names = layout.mesh, mesh.mesh_dim_names or ()
    if mesh == own:
        return True
    if own.mesh_dim_names is None or own.mesh_dim_names[layout.mesh_dim] not in names:
        return False
    return Ranks.of_mesh(mesh, names.index(own.mesh_dim_names[layout.mesh_dim])).numbers == layout.ranks.numbers


def widest(layouts: Iterable[RaggedLayout]) -> RaggedLayout:
    """Return the first of the layouts with most mesh dims."""
    return max(layouts, key=lambda layout: layout.mesh.ndim)


def written(op: OpOverload) -> list[str]:
    """Return the names of the arguments that ``op`` changes."""
    return [arg.name for arg in op._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]


def _makes_views(op: OpOverload) -> bool:
    return any(ret.alias_info is not None and not ret.alias_info.is_write for ret in op._schema.returns)


def gather_and_run(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``op`` on full tensors. Collective, and counted as a fallback.

    Raises:
        UsageError: An averager of torch asks; ``strict_mode`` is on; an operand is a plain tensor that may differ
            between ranks; or the operation draws random numbers, which ranks would draw differently.
        DesyncError: On every rank, where they run different operations.
    """
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    ragged: list[Any] = [tensor for tensor in tensors if type(tensor) is cls]
    layout = widest(tensor._spec.layout for tensor in ragged)
    if is_in_model_averager():
        raise UsageError(
            "torch's model averagers average whole models that each rank trains apart, and of a sharded one there are "
            "no others to average with",
            at=place_of_rank() if layout.label is None else f"{place_of_rank()}, parameter {str(layout.label)!r}",
            fix="leave the averager out: every backward averages gradients; or train the whole model on each rank",
        )
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise _refusal(op, layout, "draws random numbers from a ragged tensor", "call full_tensor() first")
    bound = {arg.name: value for arg, value in zip(op._schema.arguments, args)} | dict(kwargs)
    changed = [leaf for name in written(op) for leaf in tree_leaves(bound.get(name))]
    changed = [leaf for leaf in changed if isinstance(leaf, torch.Tensor)]
    changed_ids = {id(tensor) for tensor in changed}
    for tensor in tensors:
        _check_operand(cls, op, tensor, ragged, is_written=id(tensor) in changed_ids)
    count_fallback(str(op), layout)
    confirm(str(op), ragged)

    fulls: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in fulls:
            fulls[id(tensor)] = _full(cls, tensor, layout)
    full_args, full_kwargs = tree_map_only(torch.Tensor, lambda t: fulls[id(t)], (list(args), dict(kwargs)))
    results = op(*full_args, **full_kwargs)

    for tensor in changed:
        if isinstance(tensor, GatheredView):
            tensor._source.write_back()
        elif type(tensor) is cls:
            tensor._local_tensor.copy_(slice_full(fulls[id(tensor)], tensor._spec.layout))
    # An operation in place returns what it was given.
    originals = {id(fulls[id(tensor)]): tensor for tensor in tensors}
    source = _Source(ragged[0], fulls[id(ragged[0])]) if _makes_views(op) else None

    def out(result: torch.Tensor) -> Any:
        if id(result) in originals:
            return originals[id(result)]
        spec = replicated_spec(layout.mesh, result)
        return wrap(DTensor, result, spec) if source is None else make_view(result, spec, source)

    return tree_map_only(torch.Tensor, out, results)


def _full(cls: Any, tensor: Any, layout: RaggedLayout) -> torch.Tensor:
    if type(tensor) is cls:
        return gather_full(tensor._local_tensor, tensor._spec.layout)
    if isinstance(tensor, DTensor):
        if isinstance(tensor, GatheredView):
            tensor.check_fresh()
        if not is_replicated(tensor, layout):
            tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        local: torch.Tensor = tensor._local_tensor
        return local
    plain: torch.Tensor = tensor
    return plain


def _check_operand(cls: Any, op: OpOverload, tensor: Any, ragged: Sequence[Any], *, is_written: bool) -> None:
    layout: RaggedLayout = ragged[0]._spec.layout
    if type(tensor) is cls:
        if not shares_cut(layout.mesh, tensor._spec.layout):
            raise _refusal(op, layout, "mixes ragged tensors of two meshes", "call full_tensor() on one of them")
    elif isinstance(tensor, DTensor):
        if not shares_cut(tensor.device_mesh, layout):
            raise _refusal(op, layout, "mixes DTensors of two meshes", "call full_tensor() on one of them")
        if is_written and not is_replicated(tensor, layout):
            raise _refusal(
                op, layout, f"would write a ragged tensor into one placed {tensor.placements}", "use full_tensor()"
            )
    elif tensor.dim() > 0 and not is_written and op not in _TAKES_PLAIN:
        raise _refuse_plain(op, tensor, next(filter(is_parameter, ragged), ragged[0]))


def _refuse_plain(op: OpOverload, plain: torch.Tensor, ragged: Any) -> UsageError:
    """Return the error of an operation on a ragged tensor and a plain one, which each rank may have its own of."""
    layout: RaggedLayout = ragged._spec.layout
    if not is_parameter(ragged) or layout.label is None:
        return _refusal(
            op,
            layout,
            f"mixes a ragged tensor with a plain one of shape {list(plain.shape)}, which may differ between ranks",
            "call full_tensor() on the ragged one, or distribute_tensor(plain, mesh, [Replicate()])",
        )
    if op.overloadpacket is torch.ops.aten.copy_:
        what = f"of a plain tensor of shape {list(plain.shape)}, which is not that of the whole parameter"
        return _refusal(op, layout, what, "pass a tensor of the whole parameter's shape")
    return UsageError(
        f"{op} meets a sharded parameter and a plain tensor of shape {list(plain.shape)}: "
        "the parameter is used outside the forward of its module",
        at=f"{place_of_rank()}, {layout.label.module}, parameter {str(layout.label)!r} {list(layout.shape)}",
        fix="call the module itself, not its forward; register_fsdp_forward_method(module, name) for another method; "
        "annotate a module around all uses; or module.unshard() before. "
        "For the value without a gradient: full_tensor() under torch.no_grad()",
    )


def _refusal(op: OpOverload, layout: RaggedLayout, what: str, fix: str) -> UsageError:
    cut_as = "" if layout.label is None else f", cut as parameter {str(layout.label)!r}"
    return UsageError(f"{op} {what}", at=f"ragged tensor of shape {list(layout.shape)}{cut_as}", fix=fix)


class _Source:
    """A ragged tensor and the gathered copy that views of it look into.

    Attributes:
        base: The ragged tensor.
        full: Its values when the first of the views was taken.
        is_stale: ``base`` was written to since, other than through these views.
    """

    __slots__ = ("__weakref__", "base", "full", "is_stale")

    def __init__(self, base: Any, full: torch.Tensor) -> None:
        self.base = base
        self.full = full
        self.is_stale = False
        LIVE_SOURCES[id(self)] = weakref.ref(self, partial(_forget, id(self)))

    def write_back(self) -> None:
        """Take over what the views changed in the gathered copy."""
        mark_stale([self.base], but=self)
        self.base._local_tensor.copy_(slice_full(self.full, self.base._spec.layout))


# Sources that some view still looks into. Empty but for moments, so asking costs the hot path nothing.
LIVE_SOURCES: dict[int, "weakref.ref[_Source]"] = {}


def _forget(key: int, _: object) -> None:
    del LIVE_SOURCES[key]


def mark_stale(written_tensors: Sequence[Any], *, but: "_Source | None" = None) -> None:
    """Note that ragged tensors were written to: views of them no longer show their values."""
    for reference in list(LIVE_SOURCES.values()):
        source = reference()
        # Aliases (`detach()`, `.data`) share the local tensor object.
        if source is not None and source is not but:
            local = source.base._local_tensor
            source.is_stale = source.is_stale or any(tensor._local_tensor is local for tensor in written_tensors)


def written_ragged(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the tensors of class ``cls`` that a call of ``op`` changes."""
    names = written(op)
    if not names:
        return []
    bound = {arg.name: value for arg, value in zip(op._schema.arguments, args)} | dict(kwargs)
    return [leaf for leaf in tree_leaves([bound.get(name) for name in names]) if type(leaf) is cls]


class GatheredView(DTensor):
    """A view of a ragged tensor, such as ``weight[0]``: it looks into a gathered copy.

    Writing to it writes to the ragged tensor, as with any view. Writing to the ragged tensor does
    not show here: a view is of use only until then, and raises ``UsageError`` afterwards.
    """

    _source: _Source

    def check_fresh(self) -> None:
        """Raise unless the view still shows the values of what it views.

        Raises:
            UsageError: It does not.
        """
        if self._source.is_stale:
            raise UsageError(
                f"a view of shape {list(self.shape)} shows values that a ragged tensor no longer has",
                at=f"view of a ragged tensor of shape {list(self._source.base.shape)}",
                fix="take the view again after the tensor was changed",
            )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves the arguments untyped
        cls, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        views = [leaf for leaf in tree_leaves((list(args), dict(kwargs))) if type(leaf) is cls]
        for view in views:
            view.check_fresh()
        changed = written_ragged(cls, op, args, kwargs)
        if torch.Tag.inplace_view in op.tags:
            raise UsageError(f"{op} would change the shape of a view of a ragged tensor", fix="use what returns a view")
        if torch.is_grad_enabled() and any(view._source.base.requires_grad for view in changed):
            raise UsageError(f"{op} on a view of a ragged tensor has no gradient", fix="use torch.no_grad()")
        if changed:
            return _write_through(op, args, kwargs, changed)
        for leaf in tree_leaves((list(args), dict(kwargs))):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor) and leaf.dim() > 0:
                raise _refuse_plain(op, leaf, views[0]._source.base)
        if op is torch.ops.aten.as_strided.default:
            return _as_strided(views[0], *args[1:], **kwargs)
        replicas = _replicas_of(views)
        results = op(
            *tree_map_only(cls, lambda view: replicas[id(view)], list(args)),
            **tree_map_only(cls, lambda view: replicas[id(view)], dict(kwargs)),
        )
        if not _makes_views(op):
            return results
        source = views[0]._source
        return tree_map_only(DTensor, lambda view: make_view(view._local_tensor, view._spec, source), results)


def _replicas_of(views: Sequence[GatheredView]) -> dict[int, DTensor]:
    """Return for each view a DTensor of torch's own, all on one mesh where their meshes can meet."""
    mesh = widest(view._source.base._spec.layout for view in views).mesh
    specs = {
        id(view): replicated_spec(mesh, view._local_tensor)
        if view._spec.mesh is not mesh and shares_cut(mesh, view._source.base._spec.layout)
        else view._spec
        for view in views
    }
    return {id(view): wrap(DTensor, view._local_tensor, specs[id(view)]) for view in views}


def _write_through(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], changed: Sequence[GatheredView]
) -> Any:
    """Run an operation that writes to views, and let the ragged tensors behind them follow."""
    base = changed[0]._source.base
    layout: RaggedLayout = base._spec.layout
    tensors = [leaf for leaf in tree_leaves((list(args), dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    if ragged := [tensor for tensor in tensors if type(tensor) is type(base)]:
        count_fallback(str(op), layout)
        confirm(str(op), ragged)
    fulls = {id(tensor): _full(type(base), tensor, layout) for tensor in tensors}
    results = op(
        *tree_map_only(torch.Tensor, lambda tensor: fulls[id(tensor)], list(args)),
        **tree_map_only(torch.Tensor, lambda tensor: fulls[id(tensor)], dict(kwargs)),
    )
    for source in {id(view._source): view._source for view in changed}.values():
        source.write_back()
    originals = {id(fulls[id(view)]): view for view in changed}
    return tree_map_only(torch.Tensor, lambda result: originals.get(id(result), result), results)


def _as_strided(
    view: GatheredView, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> GatheredView:
    """Run what torch's DTensor has no rule for: ``fill_diagonal_`` is made of it."""
    local = view._local_tensor
    # Told from the start of what the view says is its storage, where its local tensor is not.
    offset = None if storage_offset is None else storage_offset - view.storage_offset() + local.storage_offset()
    result = local.as_strided(size, stride, offset)
    return make_view(result, replicated_spec(view._spec.mesh, result), view._source)


def make_view(local: torch.Tensor, spec: DTensorSpec, source: _Source) -> GatheredView:
    """Show ``local``, a view of the source's gathered copy, as replicated."""
    view: GatheredView = wrap(GatheredView, local, spec)
    view._source = source
    return view


def make_stale_view(base: Any) -> GatheredView:
    """Return a view of one element that every operation refuses, to find out whether operations reach this file."""
    source = _Source(base, torch.zeros(1))
    source.is_stale = True
    return make_view(torch.zeros(1), base._spec, source)

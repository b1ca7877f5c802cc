"""The slow and always right way to run an operation on ragged tensors: gather, run, slice back.

Every ragged operand becomes a full plain tensor, the operation runs on full tensors, what
it changed is sliced back into the local pieces, and its results are replicated DTensors.
Nothing depends on which operations torch's DTensor has a sharding rule for.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor, Replicate

from composable.errors import UsageError
from composable.ragged_spec import RaggedLayout, count_fallback, gather_full, replicated_spec, slice_full
from composable.torch_private import DTensorSpec, OpOverload, dtensor_new, tree_leaves, tree_map_only

__all__ = ["GatheredView", "Rule", "gather_and_run", "is_replicated", "replicate", "wrap", "written"]

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
    if not (spec.mesh is layout.mesh or spec.mesh == layout.mesh):
        return False
    return all(isinstance(placement, Replicate) for placement in spec.placements)


def written(op: OpOverload) -> list[str]:
    """Return the names of the arguments that ``op`` changes."""
    return [arg.name for arg in op._schema.arguments if arg.alias_info is not None and arg.alias_info.is_write]


def _makes_views(op: OpOverload) -> bool:
    return any(ret.alias_info is not None and not ret.alias_info.is_write for ret in op._schema.returns)


def gather_and_run(cls: Any, op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run ``op`` on full tensors. Collective, and counted as a fallback.

    Raises:
        UsageError: ``strict_mode`` is on; an operand is a plain tensor that may differ between ranks;
            or the operation draws random numbers, which ranks would draw differently.
    """
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    layout: RaggedLayout = next(tensor._spec.layout for tensor in tensors if type(tensor) is cls)  # type: ignore[attr-defined]
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise _refusal(op, layout, "draws random numbers from a ragged tensor", "call full_tensor() first")
    bound = {arg.name: value for arg, value in zip(op._schema.arguments, args)} | dict(kwargs)
    changed = [leaf for name in written(op) for leaf in tree_leaves(bound.get(name))]
    changed = [leaf for leaf in changed if isinstance(leaf, torch.Tensor)]
    changed_ids = {id(tensor) for tensor in changed}
    for tensor in tensors:
        _check_operand(cls, op, tensor, layout, is_written=id(tensor) in changed_ids)
    count_fallback(str(op), layout)

    fulls: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if id(tensor) not in fulls:
            fulls[id(tensor)] = _full(cls, tensor, layout)
    full_args, full_kwargs = tree_map_only(torch.Tensor, lambda t: fulls[id(t)], (list(args), dict(kwargs)))
    results = op(*full_args, **full_kwargs)

    for tensor in changed:
        if type(tensor) is cls:
            tensor._local_tensor.copy_(slice_full(fulls[id(tensor)], tensor._spec.layout))
    originals = {id(full): tensor for tensor in tensors for full in (fulls[id(tensor)],)}
    is_view = _makes_views(op)

    def out(result: torch.Tensor) -> torch.Tensor:
        if id(result) in originals:
            return originals[id(result)]
        return wrap(GatheredView if is_view else DTensor, result, replicated_spec(layout.mesh, result))

    return tree_map_only(torch.Tensor, out, results)


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
    if type(tensor) is cls:
        if tensor._spec.mesh != layout.mesh:
            raise _refusal(op, layout, "mixes ragged tensors of two meshes", "call full_tensor() on one of them")
    elif isinstance(tensor, DTensor):
        if tensor.device_mesh != layout.mesh:
            raise _refusal(op, layout, "mixes DTensors of two meshes", "call full_tensor() on one of them")
        if is_written and not is_replicated(tensor, layout):
            raise _refusal(
                op, layout, f"would write a ragged tensor into one placed {tensor.placements}", "use full_tensor()"
            )
    elif tensor.dim() > 0 and not is_written and op not in _TAKES_PLAIN:
        raise _refusal(
            op,
            layout,
            f"mixes a ragged tensor with a plain one of shape {list(tensor.shape)}, which may differ between ranks",
            "call full_tensor() on the ragged one, or distribute_tensor(plain, mesh, [Replicate()])",
        )


def _refusal(op: OpOverload, layout: RaggedLayout, what: str, fix: str) -> UsageError:
    return UsageError(f"{op} {what}", at=f"ragged tensor of shape {list(layout.shape)}", fix=fix)


class GatheredView(DTensor):
    """A view of a ragged tensor, such as ``weight[0]``: it views a gathered copy, so it is read-only.

    Writing to it would be lost without a word; that raises ``UsageError``.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves the arguments untyped
        cls, op: OpOverload, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        names = written(op)
        if names:
            bound = {arg.name: value for arg, value in zip(op._schema.arguments, args)} | dict(kwargs)
            for leaf in tree_leaves([bound.get(name) for name in names]):
                if type(leaf) is cls:
                    raise UsageError(
                        f"{op} would change a gathered copy, and the change would be lost",
                        at=f"view of shape {list(leaf.shape)} of a ragged tensor",
                        fix="change the whole parameter at once, or change a view of the unsharded parameter",
                    )
        plain_args, plain_kwargs = tree_map_only(
            cls, lambda view: wrap(DTensor, view._local_tensor, view._spec), (list(args), dict(kwargs))
        )
        results = op(*plain_args, **plain_kwargs)
        if not _makes_views(op):
            return results
        return tree_map_only(DTensor, lambda view: wrap(cls, view._local_tensor, view._spec), results)

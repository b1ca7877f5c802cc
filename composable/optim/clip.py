"""One norm of all parameters, and clipping.

torch's own ``clip_grad_norm_`` accepts DTensors of one mesh only. Here each rank computes the norm of its
pieces on their devices; then the ranks add up one number for each group of ranks.

Every element counts once: pieces are added over the mesh dims that a tensor is cut over, replicas
are not. A plain tensor is taken to be the same on every rank, as ``replicate`` keeps it. Modules that are annotated on
fewer ranks than the rest, such as experts, have other tensors on other ranks: each such group adds to the norm.

Source: gradient clipping, arXiv 1211.5063.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from composable.comm import Grid, Ranks
from composable.dtensor import RaggedDTensor, check_finished, cut_dims, norms_over, note_written, summed_in, values_of
from composable.engine import has_torch_optimizer, stepper_of
from composable.errors import ConfigError, DesyncError, UsageError
from composable.ground.modes import unseen
from composable.ground.names import check_bool, check_number, list_of_tensors, list_text
from composable.ground.ownership import FORGOTTEN_FIX, claim_of, is_forgotten
from composable.ground.torch_private import foreach_mul_, foreach_norm, ranks_of_mesh
from composable.optim.rebind import check_gradients

# Keeps the divisor above zero, as in torch.
_EPSILON = 1e-6
# The most by which norms of equal gradients differ that ranks have averaged in ways of their own.
_ALIKE = 1.001
_LOSS = "the loss"

# The numbers of the groups of ranks over which norms of pieces are added up.
_Path: TypeAlias = tuple[tuple[int, ...], ...]


@torch.no_grad()
@unseen
def get_total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Return the norm of all tensors, seen as one vector: torch's ``get_total_norm`` for any mix of tensors.

    Collective: all ranks of every mesh that a tensor is on, with the same list. One all-reduce of a few
    numbers for each group of ranks that tensors are cut over.

    Args:
        tensors: Of any shapes and floating-point or complex dtypes, on any meshes and devices: plain tensors (the same
            on every rank), ragged ones and torch's own DTensors. Norms of pieces on the host are added on the mesh's
            device. ``Partial`` tensors are reduced first, one by one. Ragged tensors annotated on fewer ranks than
            others count once for each such group, whose ranks list their own; see docs/experts.md.
        norm_type: Above 0; ``math.inf`` for the largest magnitude.
        error_if_nonfinite: Raise, on every rank, if the norm is NaN or infinite.
        foreach: No effect: norms are computed in lists.

    Returns:
        A plain tensor ``[]``, equal on every rank, on the first tensor's device and in the dtype that the tensors
        promote to.

    Raises:
        ConfigError: An argument is of another kind, ``norm_type`` not above 0, or this rank is not in the mesh
            of a tensor.
        UsageError: The norm is not finite, and ``error_if_nonfinite``.
    """
    listed = list_of_tensors("tensors", tensors)
    check_finished("get_total_norm", listed)
    tree = _NormTree([(tensor, tensor) for tensor in map(_complete, listed)])
    return tree.total_norm(norm_type, error_if_nonfinite, foreach).to(tree.dtype)


@torch.no_grad()
@unseen
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor] | torch.optim.Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``: torch's function for any mix of parameters.

    Collective: all ranks of every mesh that a parameter is on, with the same list, as ``get_total_norm``; also ranks
    where no parameter of a mesh has a gradient. A parameter listed twice counts once.

    Args:
        parameters: Plain (the same gradient on every rank), ragged and torch's own DTensor parameters, on any meshes.
            Parameters annotated on fewer ranks than others, ragged or replicated, count once for each such group, whose
            ranks list their own; see docs/experts.md. Or an optimizer: all of its parameters.
        max_norm: 0 or above.
        norm_type: Above 0; ``math.inf`` for the largest magnitude.
        error_if_nonfinite: Raise, on every rank and before any gradient is changed, if the norm is NaN or infinite.
        foreach: No effect: gradients are processed in lists.

    Returns:
        The norm before clipping, in the form of ``get_total_norm``.

    Raises:
        ConfigError: The errors of ``get_total_norm``; or ``max_norm`` is negative or NaN.
        UsageError: The norm is not finite, and ``error_if_nonfinite``; or a parameter is stepped inside backward,
            before there is a norm.
        DesyncError: Parameters that no annotation manages or ignores lie beside annotated ones, and their gradients
            differ between ranks. No gradient has been changed.
    """
    max_norm = check_number(
        "max_norm", max_norm, least=0, fix="give the largest norm that gradients may have, 0 or above"
    )
    params = _params_of("clip_grad_norm_", parameters)
    tree = _NormTree([(param, param.grad) for param in params])
    total = tree.total_norm(norm_type, error_if_nonfinite, foreach)
    tree.check_forgotten([param for param in params if is_forgotten(param)])
    norm = total.to(tree.dtype)
    # In 16 bits the factor would be too inexact.
    exact = total.to(torch.promote_types(norm.dtype, torch.float32))
    factor = (max_norm / (exact + _EPSILON)).clamp_(max=1.0)
    grads = [param.grad for param in params if param.grad is not None]
    # Those of torch's DTensors were completed for the norm.
    scaled = [one if type(grad) is RaggedDTensor else _local(grad) for grad, (_, one) in zip(grads, tree.named)]
    for (device, _), locals_ in _by_kind(scaled).items():
        foreach_mul_(locals_, factor.to(device))
    note_written([local for grad, local in zip(grads, scaled) if type(grad) is RaggedDTensor])
    return norm


@torch.no_grad()
@unseen
def has_finite_gradients(
    parameters: torch.Tensor | Iterable[torch.Tensor] | torch.optim.Optimizer,
    loss: torch.Tensor | None = None,
    *,
    error_if_nonfinite: bool = False,
) -> bool:
    """Say, the same on every rank, whether all gradients are finite, so that all ranks can leave out a step.

    Collective, as ``clip_grad_norm_``.

    Args:
        parameters: As for ``clip_grad_norm_``.
        loss: This rank's loss [any], for the error: gradients are averaged, so it says whether NaN began here.
        error_if_nonfinite: Raise in place of returning false.

    Raises:
        ConfigError: An argument is of another kind.
        UsageError: A gradient is not finite, and ``error_if_nonfinite``; or a parameter is stepped inside backward.
    """
    tree = _NormTree([(param, param.grad) for param in _params_of("has_finite_gradients", parameters)])
    tree.named[:0] = [(_LOSS, _local(one)) for one in list_of_tensors("loss", () if loss is None else loss)]
    return bool(tree.total_norm(math.inf, error_if_nonfinite, None).isfinite())


def _params_of(call: str, parameters: Any) -> list[torch.Tensor]:
    """Return the parameters, each once; raise if they are stepped before there is a norm of all gradients."""
    if isinstance(parameters, torch.optim.Optimizer):
        every = [param for group in parameters.param_groups for param in group["params"]]
    else:
        every = list({id(one): one for one in list_of_tensors("parameters", parameters)}.values())
    check_gradients(call, every)
    for param in every:
        # Its gradient is gone: the optimizer stepped before other gradients were there.
        if stepper_of(param) is not None or has_torch_optimizer(param):
            raise UsageError(
                f"{call} of all gradients, while an optimizer steps inside backward",
                at=f"parameter of shape {list(param.shape)}",
                fix=f"call remove() on the result of step_in_backward, then {call}, and step after backward",
            )
    return every


def ranks_of_param(tensor: torch.Tensor, label: Any = None) -> Ranks | None:
    """Return all ranks that average the gradients of a parameter of any shape; ``None``: no annotation is known.

    ``tensor`` may be a ragged gradient too, and ``label`` what its annotation has set, if that is known. Ranks with
    copies of a parameter's shards are included.
    """
    label = _label_of(tensor) if label is None else label
    if type(tensor) is RaggedDTensor:
        return None if label is None else label.everyone
    grid = getattr(getattr(label, "owner", None), "grid", None)
    return grid.everyone if isinstance(grid, Grid) else None


class _Site(NamedTuple):
    """The place of tensors: those of one site are cut over the same ranks."""

    home: Ranks | None  # The ranks that average their gradients; ``None``: no annotation is known.
    has_parts: bool  # On some of these ranks, modules of the same tree are on a part of the ranks.
    mesh: Any  # The mesh of DTensors, else ``None``.
    cut: tuple[int, ...]  # The dims of the mesh over which ranks hold different elements.

    @staticmethod
    def of(owner: torch.Tensor, tensor: torch.Tensor) -> "_Site":
        """Return the site of a parameter, or of its gradient ``tensor``."""
        label = _label_of(owner)
        home, has_parts = ranks_of_param(owner, label), getattr(getattr(label, "owner", label), "has_parts", False)
        if type(tensor) is RaggedDTensor:
            return _Site(home, has_parts, tensor._spec.mesh, tensor._spec.layout.cut_dims)
        mesh = getattr(tensor, "device_mesh", None)
        if mesh is not None and mesh.get_coordinate() is None:
            raise ConfigError(
                f"this rank is not in the mesh {mesh} of a tensor of shape {list(tensor.shape)}",
                fix="list the tensors of this rank only",
            )
        return _Site(home, has_parts, mesh, cut_dims(tensor))

    def is_apart(self, outer: Ranks) -> bool:
        """Say whether only some of the ranks ``outer`` have these tensors, as experts."""
        return self.home is not None and {*self.home.numbers} < {*outer.numbers}


class _NormTree:
    """A norm as a sum: of the pieces on each rank, then over groups of ranks, at last over the largest such group.

    Args:
        tensors: Parameters, each with its gradient, if it has one on this rank; or tensors, each with itself.
    """

    def __init__(self, tensors: Sequence[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        self._sites: dict[_Site, list[torch.Tensor]] = {}
        self.named: list[tuple[torch.Tensor | str, torch.Tensor]] = []  # A name, or the tensor with it, and its piece.
        for owner, tensor in tensors:
            # Also of a parameter without a gradient: other ranks may have one.
            pieces = self._sites.setdefault(_Site.of(owner, owner), [])
            if tensor is not None:
                if isinstance(tensor, DTensor) and type(tensor) is not RaggedDTensor:
                    tensor = _complete(tensor)
                    pieces = self._sites.setdefault(_Site.of(owner, tensor), [])
                pieces.append(_local(tensor))
                self.named.append((owner, pieces[-1]))
        # No set, in whose order ranks would choose different ones of two groups of equal ranks.
        homes = dict.fromkeys(site.home for site in self._sites if site.home is not None)
        alone = Ranks(None, torch.device("cpu"), 0, 1, (Ranks.of_world().rank,))
        self._outer = max(homes, key=lambda ranks: ranks.order, default=alone)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that all tensors promote to."""
        kinds = {local.dtype.to_real() for _, local in self.named}
        return reduce(torch.promote_types, kinds) if kinds else torch.float32

    def total_norm(self, norm_type: float, error_if_nonfinite: bool, foreach: bool | None) -> torch.Tensor:
        """Return the norm of all pieces of all ranks, in fp64. Collective over the groups."""
        order = check_number("norm_type", norm_type, above=0, fix="give a number above 0, or math.inf")
        check_bool("error_if_nonfinite", error_if_nonfinite)
        check_bool("foreach", foreach, or_none=True)
        outer, groups = self._outer, {self._outer.numbers: self._outer}
        zero = torch.zeros((), dtype=torch.float64, device=self.named[0][1].device if self.named else None)
        parts: dict[_Path, list[torch.Tensor]] = defaultdict(lambda: [zero])
        with_parts = {site.home.numbers for site in self._sites if site.home and site.has_parts}
        if outer.numbers in with_parts or any(site.is_apart(outer) for site in self._sites):
            # Every rank of ``outer`` makes this all-reduce, also one that lists no tensor of a part.
            parts[outer.numbers,].append(zero)
        # In an order that the ranks of each group share, also where each lists other experts.
        for site in sorted(self._sites, key=lambda site: site.home.order if site.home else (0, ())):
            cut = [Ranks.of_mesh(site.mesh, dim) for dim in site.cut]
            groups = {ranks.numbers: ranks for ranks in cut} | groups  # Equal ranks of two meshes are one group.
            path, copies = tuple(ranks.numbers for ranks in cut), 1.0
            if site.home and site.is_apart(outer):
                # Only some of the ranks have the tensors, as experts: all ranks add up their pieces.
                inside = [numbers for numbers in path if {*numbers} <= {*outer.numbers}]
                copies = _holders(site.home, site.mesh, outer) / math.prod(map(len, inside))
                path = (*(numbers for numbers in path if numbers not in inside), outer.numbers)
            norms = parts[path]
            for (_, dtype), of_kind in _by_kind(self._sites[site]).items():
                norm = _joined(foreach_norm(of_kind, order, dtype=summed_in(dtype)), order).to(zero.device)
                norms.append(norm / copies ** (1 / order))
        # The deepest path first; but a part goes on to all ranks, which may have none, before these add up anything.
        while path := max(parts, key=lambda path: (outer.numbers in path[1:], len(path)), default=()):
            # In the order of the tensors: ranks of two meshes may have the numbers of their groups in two orders.
            paths = [other for other in parts if other[:1] == path[:1]]
            stacked = torch.stack([_joined(parts.pop(other), order) for other in paths])
            for other, norm in zip(paths, norms_over([groups[path[0]]], stacked, order)):
                parts[other[1:]].append(norm)
        total = _joined(parts[()], order)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise UsageError(
                f"the norm of order {order:g} is {total.item()}{self._not_finite()}",
                fix="find where NaN begins with torch.autograd.set_detect_anomaly(True); to go on, pass False",
            )
        return total

    def check_forgotten(self, params: Sequence[torch.Tensor]) -> None:
        """Raise ``DesyncError`` if gradients that no annotation averages differ: so would the factors of ranks.

        Collective after ``total_norm``, where ``params`` of any shapes lie beside annotated ones.
        """
        if params and self._outer.size > 1:
            norms = [float(param.grad.norm()) for param in params if param.grad is not None]
            told = [float(one) for one in self._outer.objects(str(math.hypot(*norms)))]  # Text: it may be NaN.
            if max(told) > _ALIKE * min(told):
                lines = [f"    rank {rank}: norm {one:.4g}" for rank, one in zip(self._outer.numbers, told)]
                raise DesyncError(
                    "\n".join(["gradients that no annotation averages differ, and ranks would clip by them", *lines]),
                    at=list_text([f"of shape {list(param.shape)}" for param in params], write=str),
                    fix=FORGOTTEN_FIX,
                )

    def _not_finite(self) -> str:
        """Return a line for each rank with tensors that are not finite, at first those with such a loss. Collective."""
        own, outer = [_name_of(owner) for owner, local in self.named if not local.isfinite().all()], self._outer
        told = dict(zip(outer.numbers, outer.objects(own)))
        ranks = sorted(filter(told.get, told), key=lambda rank: told[rank][0] != _LOSS)
        return "".join(
            f"\n    not finite on rank {rank}: {list_text(told[rank], 10, write=str)}" for rank in ranks[:10]
        )


def _holders(home: Ranks, mesh: DeviceMesh | None, outer: Ranks) -> float:
    """Return how many ranks of ``outer`` hold a part or a copy of a tensor that the ranks ``home`` average."""
    on_mesh = {*(home.numbers if mesh is None else ranks_of_mesh(mesh))}
    # Ranks along dims of the mesh that are not in ``home``, as of tensor parallelism, may be in ``outer`` or not.
    return home.size * len(on_mesh & {*outer.numbers}) / len(on_mesh & {*home.numbers})


def _joined(norms: Iterable[torch.Tensor], order: float) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.stack([*norms]).double(), order)  # type: ignore[no-any-return]  # a tensor


def _by_kind(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Group tensors that have elements by device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds


def _complete(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor [any] without ``Partial`` dims of its mesh: over these, sums are taken."""
    if not isinstance(tensor, DTensor) or not any(one.is_partial() for one in tensor.placements):
        return tensor
    return tensor.redistribute(placements=[Replicate() if one.is_partial() else one for one in tensor.placements])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return values_of(tensor._local_tensor) if isinstance(tensor, DTensor) else tensor


def _label_of(tensor: torch.Tensor) -> Any:
    return tensor._spec.layout.label if type(tensor) is RaggedDTensor else claim_of(tensor)


def _name_of(tensor: torch.Tensor | str) -> str:
    if isinstance(tensor, str):
        return tensor
    label = _label_of(tensor)
    return f"a tensor {list(tensor.shape)}" if label is None else repr(str(getattr(label, "fqn", label)))

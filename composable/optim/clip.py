"""One norm of all parameters, and clipping.

torch's own ``clip_grad_norm_`` accepts DTensors of one mesh only. Here each rank computes the norm of its
pieces on their devices; then the ranks add up one number for each group of ranks.

Every element counts once: pieces are added over the mesh dims that a tensor is cut over, replicas
are not. A plain tensor is taken to be the same on every rank, as ``replicate`` keeps it. Modules that are annotated on
fewer ranks than the rest, such as experts, have other tensors on other ranks: each such group adds to the norm.

Source: gradient clipping, arXiv 1211.5063.
"""

import math
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from composable.comm import Grid, Ranks
from composable.dtensor import NormParts, RaggedDTensor, check_finished, cut_dims, note_written, summed_in, values_of
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

# The groups over which the pieces of a tensor have to be added up, one after the other.
_Cut: TypeAlias = tuple[Ranks, ...]


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
    pieces = _Pieces()
    listed = list_of_tensors("tensors", tensors)
    check_finished("get_total_norm", listed)
    for tensor in listed:
        pieces.add(tensor, pieces.group_of(tensor), tensor)
    return pieces.total_norm(norm_type, error_if_nonfinite, foreach).to(pieces.dtype)


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
    pieces, grads = _gradients_of("clip_grad_norm_", parameters)
    scaled = [_local(grad) for grad in grads]
    total = pieces.total_norm(norm_type, error_if_nonfinite, foreach)
    pieces.check_forgotten()
    norm = total.to(pieces.dtype)
    # In 16 bits the factor would be too inexact.
    exact = total.to(torch.promote_types(norm.dtype, torch.float32))
    factor = (max_norm / (exact + _EPSILON)).clamp_(max=1.0)
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
    pieces, _ = _gradients_of("has_finite_gradients", parameters)
    pieces.named[:0] = [(_LOSS, _local(one)) for one in list_of_tensors("loss", () if loss is None else loss)]
    return bool(pieces.total_norm(math.inf, error_if_nonfinite, None).isfinite())


def _gradients_of(call: str, parameters: Any) -> tuple["_Pieces", list[torch.Tensor]]:
    """Return the pieces of parameters' gradients, and these gradients; raise if the parameters are stepped before."""
    pieces, grads = _Pieces(), []
    if isinstance(parameters, torch.optim.Optimizer):
        every = [param for group in parameters.param_groups for param in group["params"]]
    else:
        every = list({id(one): one for one in list_of_tensors("parameters", parameters)}.values())
    check_gradients(call, every)
    pieces.forgotten = [param for param in every if is_forgotten(param)]
    for param in every:
        # Its gradient is gone: the optimizer stepped before other gradients were there.
        if stepper_of(param) is not None or has_torch_optimizer(param):
            raise UsageError(
                f"{call} of all gradients, while an optimizer steps inside backward",
                at=f"parameter of shape {list(param.shape)}",
                fix=f"call remove() on the result of step_in_backward, then {call}, and step after backward",
            )
        # Also without a gradient: other ranks may have one.
        group = pieces.group_of(param)
        if param.grad is not None:
            pieces.add(param.grad, group, param)
            grads.append(param.grad)
    return pieces, grads


def ranks_of_param(tensor: torch.Tensor) -> Ranks | None:
    """Return all ranks that average the gradients of a parameter of any shape; ``None``: no annotation is known.

    ``tensor`` may be a ragged gradient too. Ranks with copies of a parameter's shards are included.
    """
    if type(tensor) is RaggedDTensor:
        label = tensor._spec.layout.label
        return None if label is None else label.everyone
    claim = claim_of(tensor)
    grid = getattr(claim.owner, "grid", None) if claim is not None else None
    return grid.everyone if isinstance(grid, Grid) else None


class _Home(NamedTuple):
    """The ranks that average gradients of a tensor, and the mesh of its tensor parallelism; ``None``: there is none."""

    ranks: Ranks
    mesh: DeviceMesh | None

    def is_first_of(self, outer: Ranks) -> bool:
        """Say whether this rank adds the tensor's part in ``outer``: one of its ranks with a part or a copy does."""
        if self.ranks.rank or self.mesh is None:
            return self.ranks.rank == 0
        # It may be this rank alone: if other parameters are split as well, each split has an ``outer`` of its own.
        having = [number for number in ranks_of_mesh(self.mesh) if number in outer.numbers]
        return bool(having[0] == outer.numbers[outer.rank])

    def order(self) -> tuple[object, ...]:
        """Return a key that sorts homes alike on all their ranks; homes of equal keys stay in the order of tensors."""
        mesh = self.mesh
        return self.ranks.order, () if mesh is None else tuple(mesh.shape), [] if mesh is None else ranks_of_mesh(mesh)


# This rank's tensors of one annotation that are cut over the same groups of ranks; ``None``: no annotation is known.
_Group: TypeAlias = tuple[_Home | None, _Cut]


class _Pieces:
    """This rank's pieces of tensors, by the tensors' home and the groups of ranks that they are cut over."""

    def __init__(self) -> None:
        self._pieces: dict[_Group, list[torch.Tensor]] = {}
        # Groups of ragged tensors, by a key that is quick to compute, since there are many tensors.
        self._known: dict[tuple[object, ...], _Group] = {}
        # Groups of ranks of which some modules in the same tree are annotated on a part only.
        self._with_parts: set[tuple[int, ...]] = set()
        # Equal ranks of two meshes are one group.
        self._ranks: dict[tuple[tuple[int, ...], str], Ranks] = {}
        self.named: list[tuple[torch.Tensor | str, torch.Tensor]] = []  # A name, or the tensor with it, and its piece.
        self._outer: Ranks | None = None  # The most ranks that have one of the tensors.
        self.forgotten: list[torch.Tensor] = []  # Parameters that no annotation averages.

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that all tensors promote to."""
        dtypes = {local.dtype for locals_ in self._pieces.values() for local in locals_}
        kinds = {dtype.to_real() if dtype.is_complex else dtype for dtype in dtypes}
        return reduce(torch.promote_types, kinds) if kinds else torch.float32

    def group_of(self, tensor: torch.Tensor) -> _Group:
        """Return the group of a parameter or ragged gradient; the group takes part also if it has no gradient here."""
        if type(tensor) is not RaggedDTensor:
            claim = claim_of(tensor)
            return self._group(tensor, None if claim is None else claim.owner)
        layout = tensor._spec.layout
        key = id(layout.mesh), layout.cut_dims, None if layout.label is None else id(layout.label.everyone)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._group(tensor, layout.label)
        return found

    def _group(self, tensor: torch.Tensor, owner: object) -> _Group:
        ranks = ranks_of_param(tensor)
        home = None
        if ranks is not None:
            mesh: DeviceMesh | None = tensor._spec.mesh if isinstance(tensor, DTensor) else None
            is_split = mesh is not None and (mesh.ndim > 1 or type(tensor) is not RaggedDTensor)
            home = _Home(ranks, mesh if is_split else None)
            if getattr(owner, "has_parts", False):
                # All ranks of the parameter have this flag, also those without such a module.
                self._with_parts.add(ranks.numbers)
        group = home, self._cut_of(tensor)
        self._pieces.setdefault(group, [])
        return group

    def _cut_of(self, tensor: torch.Tensor) -> _Cut:
        """Return the groups over which the pieces of a tensor have to be added up."""
        if not isinstance(tensor, DTensor):
            return ()
        spec: Any = tensor._spec
        if spec.mesh.get_coordinate() is None:
            raise ConfigError(
                f"this rank is not in the mesh {spec.mesh} of a tensor of shape {list(tensor.shape)}",
                fix="list the tensors of this rank only",
            )
        dims = [dim for dim in cut_dims(tensor) if not spec.placements[dim].is_partial()]
        return tuple(self._one(Ranks.of_mesh(spec.mesh, dim)) for dim in dims)

    def _one(self, ranks: Ranks) -> Ranks:
        return self._ranks.setdefault((ranks.numbers, ranks.device.type), ranks)

    def add(self, tensor: torch.Tensor, group: _Group, owner: torch.Tensor) -> None:
        """Add this rank's piece of a tensor of ``owner``, a parameter or itself; ``group`` is the owner's."""
        if type(tensor) is not RaggedDTensor and isinstance(tensor, DTensor):
            if any(placement.is_partial() for placement in tensor.placements):
                placements = [Replicate() if one.is_partial() else one for one in tensor.placements]
                tensor = tensor.redistribute(placements=placements)
            group = group[0], self._cut_of(tensor)
        local = _local(tensor)
        self._pieces.setdefault(group, []).append(local)
        self.named.append((owner, local))

    def total_norm(self, norm_type: float, error_if_nonfinite: bool, foreach: bool | None) -> torch.Tensor:
        """Return the norm of all pieces of all ranks, in fp64. Collective over the groups."""
        order = check_number("norm_type", norm_type, above=0, fix="give a number above 0, or math.inf")
        check_bool("error_if_nonfinite", error_if_nonfinite)
        check_bool("foreach", foreach, or_none=True)
        whole = NormParts(order)
        devices = (local.device for locals_ in self._pieces.values() for local in locals_)
        total = whole.norms(self._part_of_all(whole, next(devices, torch.device("cpu"))))[0]
        if error_if_nonfinite and not bool(total.isfinite()):
            raise UsageError(
                f"the norm of order {order:g} is {total.item()}{self._not_finite()}",
                fix="find where NaN begins with torch.autograd.set_detect_anomaly(True); to go on, pass False",
            )
        return total

    def check_forgotten(self) -> None:
        """Raise ``DesyncError`` if gradients that no annotation averages differ: so would the factors of ranks.

        Collective after ``total_norm``, where there are such parameters beside annotated ones.
        """
        if self.forgotten and self._outer is not None:
            norms = [float(param.grad.norm()) for param in self.forgotten if param.grad is not None]
            told = [float(one) for one in self._outer.objects(str(math.hypot(*norms)))]  # Text: it may be NaN.
            if max(told) > _ALIKE * min(told):
                lines = [f"    rank {rank}: norm {one:.4g}" for rank, one in zip(self._outer.numbers, told)]
                raise DesyncError(
                    "\n".join(["gradients that no annotation averages differ, and ranks would clip by them", *lines]),
                    at=list_text([f"of shape {list(param.shape)}" for param in self.forgotten], write=str),
                    fix=FORGOTTEN_FIX,
                )

    def _not_finite(self) -> str:
        """Return a line for each rank with tensors that are not finite, at first those with such a loss. Collective."""
        own, outer = [_name_of(owner) for owner, local in self.named if not local.isfinite().all()], self._outer
        told = {Ranks.of_world().rank: own} if outer is None else dict(zip(outer.numbers, outer.objects(own)))
        ranks = sorted(filter(told.get, told), key=lambda rank: told[rank][0] != _LOSS)
        return "".join(
            f"\n    not finite on rank {rank}: {list_text(told[rank], 10, write=str)}" for rank in ranks[:10]
        )

    def _part_of_all(self, whole: NormParts, device: torch.device) -> torch.Tensor:
        """Return the part of the norm from all pieces of all ranks. Collective over the groups."""
        homes = dict.fromkeys(home for home, _ in self._pieces if home is not None)
        self._outer = outer = max((home.ranks for home in homes), key=lambda ranks: ranks.order, default=None)
        everywhere: dict[_Cut, torch.Tensor] = {}
        apart: dict[_Home, dict[_Cut, torch.Tensor]] = {}
        for (home, cut), locals_ in self._pieces.items():
            is_apart = home is not None and outer is not None and set(home.ranks.numbers) < set(outer.numbers)
            into = apart.setdefault(home, {}) if is_apart and home is not None else everywhere
            _join_into(into, cut, _part_of(locals_, whole, device), whole)
        if outer is not None:
            if outer.numbers in self._with_parts:
                # Every rank of ``outer`` makes this all-reduce, also one that lists no tensor of a part.
                everywhere.setdefault((self._one(outer),), whole.nothing((1,), device))
            for home in sorted(apart, key=_Home.order):
                of_part = self._add_over_ranks(apart[home], whole, device)
                if not home.is_first_of(outer):
                    of_part = whole.nothing((1,), device)  # Another rank that has it adds it.
                _join_into(everywhere, (self._one(outer),), of_part, whole)
        return self._add_over_ranks(everywhere, whole, device)

    def _add_over_ranks(self, parts: dict[_Cut, torch.Tensor], whole: NormParts, device: torch.device) -> torch.Tensor:
        """Add up parts over all ranks: one all-reduce for each group, for all tensors that are cut over it."""
        groups = dict.fromkeys(group for cut in parts for group in cut)
        for group in groups:
            cuts = [cut for cut in parts if group in cut]
            reduced = group.reduce(torch.stack([parts.pop(cut) for cut in cuts]), whole.op).to(device)
            for cut, part in zip(cuts, reduced):
                rest = tuple(other for other in cut if other != group)
                _join_into(parts, rest, part, whole)
        return parts.get((), whole.nothing((1,), device))


def _join_into(parts: dict[_Cut, torch.Tensor], cut: _Cut, part: torch.Tensor, whole: NormParts) -> None:
    parts[cut] = whole.join(torch.cat([parts[cut], part], 1)) if cut in parts else part


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return values_of(tensor._local_tensor) if isinstance(tensor, DTensor) else tensor


def _name_of(tensor: torch.Tensor | str) -> str:
    if isinstance(tensor, str):
        return tensor
    label = tensor._spec.layout.label if type(tensor) is RaggedDTensor else claim_of(tensor)
    return f"a tensor {list(tensor.shape)}" if label is None else repr(str(getattr(label, "fqn", label)))


def _by_kind(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Group tensors that have elements by device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds


def _part_of(locals_: Sequence[torch.Tensor], whole: NormParts, device: torch.device) -> torch.Tensor:
    """Return the part [1 or 2, 1], fp64, that pieces add to a norm."""
    found = [whole.nothing((1,), device)]
    for (_, dtype), tensors in _by_kind(locals_).items():
        norms = torch.stack(list(foreach_norm(tensors, whole.order, dtype=summed_in(dtype))))
        found.append(whole.join(whole.of(norms)).to(device))
    return whole.join(torch.cat(found, 1))

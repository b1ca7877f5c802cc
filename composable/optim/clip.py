"""One norm over any mix of parameters, and gradients clipped by it.

torch's own ``clip_grad_norm_`` knows DTensors of one mesh only. Here each tensor is reduced on its
rank, in its own device's memory; what the ranks then add up is a number for each group of ranks.

Every element counts once: pieces are added over the mesh dims that a tensor is cut over, replicas
are not. A plain tensor is taken to be the same on every rank, as ``replicate`` keeps it. What is annotated on fewer
ranks than the rest, such as experts, is another tensor on others: so much comes to the norm from each such group.

Source: gradient clipping, arXiv 1211.5063.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from composable.arguments import check_bool, check_number, list_of_tensors
from composable.collectives import Ranks
from composable.engine import has_torch_optimizer, stepper_of
from composable.errors import ConfigError, DesyncError, UsageError, place_of_rank
from composable.optim.annotated import has_parts, ranks_of_layout, ranks_of_param
from composable.optim.local_step import LocalGradients, local_gradients
from composable.ragged import (
    LIVE_SOURCES,
    NormParts,
    RaggedDTensor,
    RaggedLayout,
    check_finished,
    confirm_alike,
    cut_dims,
    mark_stale,
    refuse_in_each,
    summed_in,
)
from composable.torch_private import Placement, foreach_mul_, foreach_norm
from composable.wording import count_text

__all__ = ["clip_grad_norm_", "get_total_norm"]

# Guards the division, as in torch.
_EPSILON = 1e-6


@torch.no_grad()
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
        tensors: Plain tensors (the same on every rank), ragged ones and torch's own DTensors, on any
            meshes and devices. Pieces on the host meet on the device of their mesh. ``Partial`` ones are
            reduced first, one by one. Ragged ones annotated on a part of the ranks of others count for each such
            part, whose ranks list their own; see docs/experts.md.
        norm_type: Above 0; ``math.inf`` for the largest magnitude.
        error_if_nonfinite: Raise, on every rank, if the norm is NaN or infinite.
        foreach: ``False`` takes the norms one by one.

    Returns:
        A plain tensor of one number, equal on every rank, on the first tensor's device and in the dtype that
        the tensors promote to.

    Raises:
        ConfigError: An argument is of another kind, ``norm_type`` not above 0, or this rank is not in the mesh
            of a tensor.
        UsageError: The norm is not finite, and ``error_if_nonfinite``.
        DesyncError: On every rank, where ranks that share tensors do something else with ragged ones.
    """
    pieces = _Pieces("get_total_norm")
    listed = list_of_tensors("tensors", tensors)
    check_finished("get_total_norm", listed)
    for tensor in listed:
        pieces.add(tensor, _home_of(tensor))
    return pieces.total_norm(norm_type, error_if_nonfinite, foreach).to(pieces.dtype)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor] | torch.optim.Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale all gradients so that their norm is at most ``max_norm``: torch's function for any mix of parameters.

    Collective: all ranks of every mesh that a parameter is on, with the same list, as ``get_total_norm``.
    Also where no parameter of a mesh has a gradient on some rank. A parameter listed twice counts once.

    Args:
        parameters: Plain (the same gradient on every rank), ragged and torch's own DTensor parameters, on any meshes.
            Those annotated on a part of the ranks of others, ragged or replicated, count for each such part, whose
            ranks list their own; see docs/experts.md.
            Or an optimizer: all of its parameters; after ``accelerate_optimizer`` in as few tensors as it steps.
        max_norm: 0 or above.
        norm_type: Above 0; ``math.inf`` for the largest magnitude.
        error_if_nonfinite: Raise, on every rank and before any gradient is changed, if the norm is NaN or infinite.
        foreach: ``False`` works on the gradients one by one.

    Returns:
        The norm before clipping, as ``get_total_norm`` does.

    Raises:
        ConfigError: As ``get_total_norm``; or ``max_norm`` is negative or NaN.
        UsageError: The norm is not finite, and ``error_if_nonfinite``; or a parameter is stepped inside backward,
            before there is a norm.
        DesyncError: On every rank, where ranks that share parameters do something else with ragged tensors, or list
            another number of them.
    """
    max_norm = check_number(
        "max_norm", max_norm, least=0, fix="give the largest norm that gradients may have, 0 or above"
    )
    pieces = _Pieces("clip_grad_norm_")
    every = _params_of(parameters)
    check_finished("clip_grad_norm_", every)
    _refuse_stepped(every)
    params, accelerated = _listed(parameters, every)
    for parameter in params:
        pieces.expect(parameter)
    grads = []
    for parameter in params:
        if parameter.grad is not None:
            grads.append(parameter.grad)
            pieces.add(parameter.grad, _home_of(parameter))
    scaled = [_local(grad) for grad in grads]
    for gradients in accelerated:
        pieces.add_accelerated(gradients)
        scaled += gradients.tensors
    total = pieces.total_norm(norm_type, error_if_nonfinite, foreach)
    norm = total.to(pieces.dtype)
    # Half a mantissa is not enough for a factor.
    exact = total.to(torch.promote_types(norm.dtype, torch.float32))
    factor = (max_norm / (exact + _EPSILON)).clamp_(max=1.0)
    for (device, _), locals_ in _by_kind(scaled).items():
        if foreach is False:
            for local in locals_:
                local.mul_(factor.to(device))
        else:
            foreach_mul_(locals_, factor.to(device))
    if LIVE_SOURCES:
        mark_stale([parameter.grad for parameter in every if isinstance(parameter.grad, RaggedDTensor)])
    return norm


def _refuse_stepped(params: Iterable[torch.Tensor]) -> None:
    """Refuse parameters whose gradients are gone: each was stepped on before that of the others was there."""
    for parameter in params:
        if stepper_of(parameter) is not None or has_torch_optimizer(parameter):
            raise UsageError(
                "clipping by the norm of all gradients, while an optimizer steps inside backward",
                at=f"{place_of_rank()}, parameter of shape {list(parameter.shape)}",
                fix="remove() what step_in_backward returned, clip, and step after backward",
            )


def _params_of(parameters: torch.Tensor | Iterable[torch.Tensor] | torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters, each once."""
    if isinstance(parameters, torch.optim.Optimizer):
        return [parameter for group in parameters.param_groups for parameter in group["params"]]
    return list({id(one): one for one in list_of_tensors("parameters", parameters)}.values())


def _listed(parameters: object, every: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[LocalGradients]]:
    """Return the parameters, but those of an accelerated optimizer as the gradients that it steps with."""
    accelerated = local_gradients(parameters) if isinstance(parameters, torch.optim.Optimizer) else None
    if accelerated is None:
        return every, []
    return [parameter for parameter in every if type(parameter) is not RaggedDTensor], accelerated


class _Groups:
    """The ranks that tensors are cut over; equal ranks of two meshes are one group."""

    def __init__(self) -> None:
        self._by_mesh: dict[tuple[int, tuple[int, ...]], tuple[Ranks, ...]] = {}
        self._by_placements: dict[tuple[int, tuple[Placement, ...]], tuple[Ranks, ...]] = {}
        self._known: dict[tuple[tuple[int, ...], str], Ranks] = {}

    def of(self, tensor: torch.Tensor) -> tuple[Ranks, ...]:
        """Return the groups over which the pieces of a tensor have to be added."""
        if type(tensor) is RaggedDTensor:
            return self.of_layout(tensor._spec.layout)
        if not isinstance(tensor, DTensor):
            return ()
        mesh, placements = tensor._spec.mesh, tensor._spec.placements
        groups = self._by_placements.get((id(mesh), placements))
        if groups is None:
            if mesh.get_coordinate() is None:
                raise ConfigError(
                    f"this rank is not in the mesh {mesh} of a tensor of shape {list(tensor.shape)}",
                    fix="list the tensors of this rank only",
                )
            groups = tuple(
                self.known_as(Ranks.of_mesh(mesh, dim)) for dim in cut_dims(tensor) if not placements[dim].is_partial()
            )
            self._by_placements[id(mesh), placements] = groups
        return groups

    def of_layout(self, layout: RaggedLayout) -> tuple[Ranks, ...]:
        """Return the groups over which ragged pieces have to be added: one, and those that tensors are split over."""
        key = id(layout.mesh), layout.cut_dims
        found = self._by_mesh.get(key)
        if found is None:
            found = self._by_mesh[key] = tuple(map(self.known_as, layout.every_ranks))
        return found

    def known_as(self, ranks: Ranks) -> Ranks:
        """Return the first group of these ranks that was met."""
        return self._known.setdefault((ranks.numbers, ranks.device.type), ranks)


class _Home(NamedTuple):
    """Where an annotation has a tensor.

    Attributes:
        ranks: All whose gradients it averages.
        mesh: Over which tensor parallelism has split it, or has copies; ``None``: nothing has.
    """

    ranks: Ranks
    mesh: DeviceMesh | None

    def is_first_of(self, outer: Ranks) -> bool:
        """Say whether this rank tells those of ``outer`` of the tensor: one of them that have a part or a copy does."""
        if self.ranks.rank or self.mesh is None:
            return self.ranks.rank == 0
        # There may be none but this one: of parameters that are split as well, each split has its own.
        having = [number for number in self.mesh.mesh.flatten().tolist() if number in outer.numbers]
        return bool(having[0] == outer.numbers[outer.rank])


def _home_of(tensor: torch.Tensor) -> _Home | None:
    """Return where a parameter or a ragged gradient is; ``None``: no annotation is known."""
    if type(tensor) is RaggedDTensor:
        return _home_of_layout(tensor._spec.layout)
    ranks = ranks_of_param(tensor)
    if ranks is None:
        return None
    return _Home(ranks, tensor._spec.mesh if isinstance(tensor, DTensor) else None)


def _home_of_layout(layout: RaggedLayout) -> _Home | None:
    ranks = ranks_of_layout(layout)
    if ranks is None:
        return None
    return _Home(ranks, layout.mesh if layout.mesh.ndim > 1 else None)


def _order_of(home: _Home) -> tuple[object, ...]:
    """Sort homes alike on all ranks that have them; where this says nothing, tensors are in one order on all."""
    mesh = home.mesh
    return home.ranks.order, () if mesh is None else tuple(mesh.shape), [] if mesh is None else mesh.mesh.tolist()


class _Pieces:
    """This rank's pieces of tensors, by the groups of ranks that the tensors are cut over.

    Args:
        op: What the norm is for, as the ranks tell each other.
    """

    def __init__(self, op: str) -> None:
        self._op = op
        self._expected: Counter[tuple[_Home | None, tuple[Ranks, ...]]] = Counter()
        self._groups = _Groups()
        self._by_cut: dict[tuple[_Home | None, tuple[Ranks, ...]], list[torch.Tensor]] = {}
        self._home: torch.device | None = None
        self._with_parts: set[tuple[int, ...]] = set()
        self._dtypes: set[torch.dtype] = set()

    @property
    def dtype(self) -> torch.dtype:
        """What the tensors promote to."""
        kinds = {dtype.to_real() if dtype.is_complex else dtype for dtype in self._dtypes}
        return reduce(torch.promote_types, kinds) if kinds else torch.float32

    def expect(self, tensor: torch.Tensor) -> None:
        """Take part in what the groups of a tensor exchange, also without its gradient."""
        home = _home_of(tensor)
        self._note_parts(home, tensor)
        self._expect(home, self._groups.of(tensor))

    def _note_parts(self, home: _Home | None, tensor: torch.Tensor | RaggedLayout) -> None:
        if home is not None and has_parts(tensor):
            self._with_parts.add(home.ranks.numbers)

    def _expect(self, home: _Home | None, cut: tuple[Ranks, ...]) -> None:
        self._expected[home, cut] += 1
        self._by_cut.setdefault((home, cut), [])

    def add(self, tensor: torch.Tensor, home: _Home | None) -> None:
        """Add a whole tensor's piece; ``home``: of the parameter whose gradient it is."""
        tensor = _without_partial(tensor)
        self._note_parts(home, tensor)
        self._add(home, self._groups.of(tensor), _local(tensor))

    def add_accelerated(self, gradients: LocalGradients) -> None:
        """Add what an accelerated optimizer steps with."""
        home, cut = _home_of_layout(gradients.layout), self._groups.of_layout(gradients.layout)
        self._note_parts(home, gradients.layout)
        self._expect(home, cut)
        self._dtypes |= gradients.dtypes
        for local in gradients.tensors:
            self._add(home, cut, local)

    def _add(self, home: _Home | None, cut: tuple[Ranks, ...], local: torch.Tensor) -> None:
        self._home = self._home or local.device
        self._dtypes.add(local.dtype)
        self._by_cut.setdefault((home, cut), []).append(local)

    def total_norm(self, norm_type: float, error_if_nonfinite: bool, foreach: bool | None) -> torch.Tensor:
        """Return the norm of all in fp64. Collective over the groups."""
        order = check_number("norm_type", norm_type, above=0, fix="give a number above 0, or math.inf")
        check_bool("error_if_nonfinite", error_if_nonfinite)
        check_bool("foreach", foreach, or_none=True)
        home = self._home or torch.device("cpu")
        whole = NormParts(order)
        total = whole.norms(self._part_of_all(whole, home, foreach))[0]
        if error_if_nonfinite and not bool(total.isfinite()):
            raise UsageError(
                f"the norm of order {order:g} is {total.item()}",
                fix="find the gradient that is not finite, or pass error_if_nonfinite=False",
            )
        return total

    def _part_of_all(self, whole: NormParts, home: torch.device, foreach: bool | None) -> torch.Tensor:
        """Return the part of all pieces of all ranks. Collective over the groups."""
        homes = dict.fromkeys(found for found, _ in self._by_cut if found is not None)
        outer = max((found.ranks for found in homes), key=lambda ranks: ranks.order, default=None)
        apart = [found for found in homes if outer is not None and set(found.ranks.numbers) < set(outer.numbers)]
        merged: dict[_Home | None, dict[tuple[Ranks, ...], list[torch.Tensor]]] = {None: {}}
        listed: Counter[tuple[_Home | None, tuple[Ranks, ...]]] = Counter()
        for (found, cut), locals_ in self._by_cut.items():
            own = found if found in apart else None
            merged.setdefault(own, {}).setdefault(cut, []).extend(locals_)
            listed[own, cut] += self._expected[found, cut]
        parts = {
            found: {cut: _part_of(locals_, whole, home, foreach) for cut, locals_ in by_cut.items()}
            for found, by_cut in merged.items()
        }
        everywhere = parts.pop(None)
        if outer is not None and outer.numbers in self._with_parts:
            # Where nothing is cut over all of them, this is an all-reduce more: also on a rank that lists no part.
            everywhere.setdefault((self._groups.known_as(outer),), whole.nothing((1,), home))
        for found in sorted(apart, key=_order_of):
            assert outer is not None, "some ranks are a part of it"
            counts = {cut: listed[found, cut] for cut in merged[found]}
            of_part = self._add_over_ranks(parts[found], counts, whole, home)
            if not found.is_first_of(outer):
                of_part = whole.nothing((1,), home)  # One of those that have it tells of it.
            cut = (self._groups.known_as(outer),)
            everywhere[cut] = whole.combine(everywhere[cut], of_part) if cut in everywhere else of_part
        return self._add_over_ranks(everywhere, {cut: listed[None, cut] for cut in everywhere}, whole, home)

    def _add_over_ranks(
        self,
        parts: dict[tuple[Ranks, ...], torch.Tensor],
        listed: Mapping[tuple[Ranks, ...], int],
        whole: NormParts,
        home: torch.device,
    ) -> torch.Tensor:
        """Return the part of all pieces of all ranks: one all-reduce a group, for all tensors that are cut over it."""
        while left := [group for cut in parts for group in cut]:
            group = left[0]
            cuts = [cut for cut in parts if group in cut]
            count = sum(listed.get(cut, 0) for cut in cuts)
            listed_text = f" of {count_text(count, 'parameter')}" if count else ""
            op = f"{self._op} of order {whole.order:g}{listed_text} in {count_text(len(cuts), 'cut')}"
            try:
                confirm_alike(op, group)
            except DesyncError:
                # Ranks with other blocks are about to wait for this one there.
                refuse_in_each([other for other in dict.fromkeys(left) if other != group], op)
                raise
            reduced = group.reduce(torch.stack([parts.pop(cut) for cut in cuts]), whole.op).to(home)
            for cut, part in zip(cuts, reduced):
                rest = tuple(other for other in cut if other != group)
                parts[rest] = whole.combine(parts[rest], part) if rest in parts else part
        return parts.get((), whole.nothing((1,), home))


def _without_partial(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is RaggedDTensor or not isinstance(tensor, DTensor):
        return tensor
    if any(placement.is_partial() for placement in tensor._spec.placements):
        placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        return tensor.redistribute(placements=placements)
    return tensor


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _by_kind(tensors: Iterable[torch.Tensor]) -> dict[tuple[torch.device, torch.dtype], list[torch.Tensor]]:
    """Group tensors that have elements by device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            kinds.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return kinds


def _part_of(
    locals_: Sequence[torch.Tensor], whole: NormParts, home: torch.device, foreach: bool | None
) -> torch.Tensor:
    """Return what pieces add to a norm."""
    found = []
    for (_, dtype), tensors in _by_kind(locals_).items():
        if foreach is False:
            norms = [torch.linalg.vector_norm(tensor, whole.order, dtype=summed_in(dtype)) for tensor in tensors]
        else:
            norms = list(foreach_norm(tensors, whole.order, dtype=summed_in(dtype)))
        found.append(whole.join(whole.of(torch.stack(norms))).to(home))
    return reduce(whole.combine, found) if found else whole.nothing((1,), home)

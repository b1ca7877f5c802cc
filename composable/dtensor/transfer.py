"""Copies between whole values and ragged pieces.

A whole value is here mostly the part that one shard group holds: a *block*, where tensor parallelism has split tensors
over other groups. An *owner* is a rank in the tensors' shard group. Every large piece goes straight from its owner to
the ranks that want it; small pieces of one owner travel together; empty pieces are not sent. Beside the whole tensors,
memory is allocated only for small pieces that travel together and for changes of dtype or device, and then for no more
than the pieces of one list.

torch's own ``distribute_tensor``, ``redistribute`` and functions that make a ``DTensor``, such as ``from_local``, learn
to accept a ``RaggedShard``: optimizers of other libraries make their state so. Other calls go to torch unchanged.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch.distributed import tensor as dtensor

from composable.comm import Ranks
from composable.dtensor.gather import GatheredView, is_parameter
from composable.dtensor.packed import memory_of, values_of
from composable.dtensor.spec import layout_of, slice_full, spec_of_placements
from composable.dtensor.tensor import RaggedDTensor
from composable.errors import ConfigError, UsageError
from composable.ground.torch_private import (
    DeviceMesh,
    DTensorSpec,
    Placement,
    check_of_collectives,
    dtensor_api,
    graph_collectives,
    replace_body,
    tree_leaves,
)
from composable.planning import RaggedShard, strides_of

# Pieces in one message start at multiples of this, so that they can be viewed in any dtype.
_PACKED_ALIGN = 16
# Pieces below this many bytes travel together: a message costs as much as copying this much.
_PACKED_BYTES = 128 * 2**10


class PieceExchange:
    """The messages of one call: the pieces that this rank sends, and the tensors that it receives into."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._device_type = ranks.device.type
        self._sends: list[tuple[torch.Tensor, int]] = []
        self._receives: list[tuple[torch.Tensor, int]] = []
        self._arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []

    def send(self, pieces: Sequence[torch.Tensor], peers: Sequence[int]) -> None:
        """Send flat tensors [numel] of any dtypes to each peer: large ones by themselves, small ones in one message."""
        for which, spans in _messages(pieces, [piece.dtype for piece in pieces]) if peers else ():
            if len(which) == 1:
                message = pieces[which[0]].to(self._device_type).contiguous().view(torch.uint8)
            else:
                message = torch.empty(spans[-1].stop, dtype=torch.uint8, device=self._device_type)
                for index, span in zip(which, spans, strict=True):
                    message[span].view(pieces[index].dtype).copy_(pieces[index])
            self._sends += [(message, peer) for peer in peers]

    def receive(self, targets: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], peer: int) -> None:
        """Receive flat tensors [numel] into ``targets``; ``dtypes`` are the dtypes in which the peer sends them."""
        for which, spans in _messages(targets, dtypes):
            only = targets[which[0]]
            if len(which) == 1 and only.dtype == dtypes[which[0]] and only.device.type == self._device_type:
                # As bytes: not every backend knows every dtype.
                message = only.view(torch.uint8)
            else:
                message = torch.empty(spans[-1].stop, dtype=torch.uint8, device=self._device_type)
                self._arrivals += [
                    (targets[index], message[span].view(dtypes[index]))
                    for index, span in zip(which, spans, strict=True)
                ]
            self._receives.append((message, peer))

    def run(self) -> None:
        """Exchange the messages, and copy the received pieces to their targets."""
        self.begin()()

    def begin(self) -> Callable[[], None]:
        """Begin ``run``, and return what waits for its end; nothing touches the pieces before that."""
        wait = self._ranks.begin_exchange(self._sends, self._receives)

        def finish() -> None:
            wait()
            for target, piece in self._arrivals:
                target.copy_(piece)

        return finish


def _messages(pieces: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> Iterator[tuple[list[int], list[slice]]]:
    """Yield, for each message, the indices of its pieces and their bytes in it; empty pieces are not sent."""
    sizes = [piece.numel() * dtype.itemsize for piece, dtype in zip(pieces, dtypes, strict=True)]
    for index, size in enumerate(sizes):
        if size >= _PACKED_BYTES:
            yield [index], [slice(0, size)]
    small = [index for index, size in enumerate(sizes) if 0 < size < _PACKED_BYTES]
    spans: list[slice] = []
    for index in small:
        start = -(-spans[-1].stop // _PACKED_ALIGN) * _PACKED_ALIGN if spans else 0
        spans.append(slice(start, start + sizes[index]))
    if small:
        yield small, spans


def collect_blocks(
    tensors: Sequence[RaggedDTensor],
    *,
    taker: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> list[torch.Tensor] | None:
    """Return the blocks of ``tensors`` on one rank, or on every rank; other ranks get ``None``.

    Collective: all ranks of the shard group, with the same tensors, none on the meta device, in the same order.
    ``taker`` is a global rank; nothing happens if it is in another copy of the shards. ``dtype`` is for floats.
    """
    ranks = tensors[0]._spec.layout.ranks if tensors else None
    if ranks is None or taker not in (None, *ranks.numbers):
        return None
    takers = range(ranks.size) if taker is None else (ranks.numbers.index(taker),)
    fulls: list[torch.Tensor] | None = None
    if ranks.rank in takers:
        fulls = [
            tensor._spec.layout.empty_block(cast_dtype(tensor, dtype), device or tensor._local_tensor.device)
            for tensor in tensors
        ]
        for tensor, full in zip(tensors, fulls, strict=True):
            own = tensor._spec.layout
            own.flat(full)[own.lo : own.hi].copy_(values_of(tensor._local_tensor).detach().reshape(-1))
    exchange = PieceExchange(ranks)
    exchange.send(
        [values_of(tensor._local_tensor).detach().reshape(-1) for tensor in tensors],
        [taker for taker in takers if taker != ranks.rank],
    )
    if fulls is not None:
        flat = [tensor._spec.layout.flat(full) for tensor, full in zip(tensors, fulls, strict=True)]
        for owner in range(ranks.size):
            if owner != ranks.rank:
                pieces = _pieces_of(owner, tensors, flat)
                exchange.receive(pieces, [tensor.dtype for tensor in tensors], owner)
    exchange.run()
    return fulls


def spread_blocks(tensors: Sequence[RaggedDTensor], values: Callable[[int], torch.Tensor] | None, *, src: int) -> None:
    """Overwrite every rank's pieces with blocks that only rank ``src`` has.

    Collective: all ranks of the shard group, with the same tensors, none on the meta device, in the same order. On
    ``src``, a rank in that group, ``values(index)`` gives the block of a tensor in any dtype and on any device; it is
    called once for each tensor, in order.
    """
    if not tensors:
        return
    layout = tensors[0]._spec.layout
    exchange = PieceExchange(layout.ranks)
    # `.data` leaves the version counter alone: nothing that autograd saved is changed.
    own = [memory_of(tensor._local_tensor).data.view(-1) for tensor in tensors]
    if layout.rank == src and values is not None:
        flat = [tensor._spec.layout.flat(values(index).detach()) for index, tensor in enumerate(tensors)]
        for owner in range(layout.ranks.size):
            pieces = _pieces_of(owner, tensors, flat)
            if owner == src:
                for target, piece in zip(own, pieces, strict=True):
                    target.copy_(piece)
            else:
                exchange.send([piece.to(target.dtype) for target, piece in zip(own, pieces, strict=True)], [owner])
    else:
        exchange.receive(own, [target.dtype for target in own], src)
    exchange.run()


def _pieces_of(owner: int, tensors: Sequence[RaggedDTensor], flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the pieces of the blocks [numel] that the rank ``owner`` of the shard group holds; views."""
    bounds = [tensor._spec.layout.bounds[owner : owner + 2] for tensor in tensors]
    return [block[lo:hi] for block, (lo, hi) in zip(flat, bounds, strict=True)]


def cast_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of ``tensor`` [any] after a cast of floats to ``dtype``; a tensor of bytes keeps its own."""
    if dtype is None or not tensor.is_floating_point() or getattr(tensor, "_composable_holds_bytes", False):
        return tensor.dtype
    return dtype


# -- torch's functions that take placements


def _distribute(
    full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *, src_data_rank: int | None = 0
) -> RaggedDTensor:
    """Cut a full tensor as ``placements`` say: torch's ``distribute_tensor`` for one ``RaggedShard``.

    Collective: the values of ``src_data_rank`` (a rank within each mesh dim) count. ``None``: every rank's own. Raises
    ``ConfigError`` for other placements than one ``RaggedShard``, ``Replicate`` and ``Shard``.
    """
    spec = spec_of_placements(mesh, full.shape, full.dtype, placements)
    full = full.detach()
    if full.device.type != mesh.device_type and not full.is_meta:
        full = full.to(mesh.device_type)
    if src_data_rank is not None and not full.is_meta:
        full = full.clone(memory_format=torch.contiguous_format)
        for dim in range(mesh.ndim):
            Ranks.of_mesh(mesh, dim).broadcast(full, src_data_rank)
    local = slice_full(full, spec.layout).clone()
    return RaggedDTensor.wrap(local, spec)


def teach_torch() -> None:
    """Let torch's functions that take placements accept ``RaggedShard``; a second call changes nothing.

    Code that imported ``distribute_tensor`` before holds torch's function itself, so the body of
    that function changes, not a name in a module.
    """
    if not hasattr(dtensor.distribute_tensor, "__wrapped__"):
        replace_body(dtensor.distribute_tensor, _distribute_tensor)
        replace_body(check_of_collectives, _check_lists)
        dtensor.DTensor.redistribute = _with_ragged_target(  # type: ignore[method-assign]  # meant
            dtensor.DTensor.redistribute
        )
        dtensor.DTensor.__new__ = staticmethod(_with_ragged_instances(dtensor.DTensor.__new__))  # type: ignore[method-assign]
        for name, around in (
            ("compute_global_tensor_info", _with_ragged_shape),
            ("_dtensor_init_helper", _with_ragged_values),
        ):
            setattr(dtensor_api, name, around(getattr(dtensor_api, name)))


def _check_lists(original: Any, *tensors: Any) -> None:
    """Refuse ragged tensors in what torch checks before a collective: dispatch does not look into lists of lists."""
    for tensor in tree_leaves(tensors):
        if isinstance(tensor, (RaggedDTensor, GatheredView)):
            graph_collectives.wait_tensor(tensor)  # Refused, as every collective of one tensor is.
    original(*tensors)


def _is_ragged(placements: Sequence[Placement] | None) -> bool:
    return any(isinstance(placement, RaggedShard) for placement in placements or ())


def _distribute_tensor(
    original: Any,
    tensor: Any,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> Any:
    if device_mesh is None or not _is_ragged(placements):
        if is_parameter(tensor):
            raise UsageError(
                f"distribute_tensor of a parameter {list(tensor.shape)} that fully_shard has sharded",
                at=f"parameter {str(tensor._spec.layout.label)!r}",
                fix="call parallelize_module before fully_shard",
            )
        return original(tensor, device_mesh, placements, src_data_rank=src_data_rank)
    if isinstance(tensor, dtensor.DTensor):
        if tensor.device_mesh == device_mesh and tensor.placements == tuple(placements or ()):
            return tensor
        raise UsageError(f"tensor is already distributed as {tensor.placements}", fix="pass full_tensor()")
    return _distribute(tensor, device_mesh, placements or (), src_data_rank=src_data_rank)


def _with_ragged_target(original: Any) -> Any:
    @wraps(original)
    def redistribute(
        tensor: Any,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **options: Any,
    ) -> Any:
        # torch itself would leave the pieces as they are, and call them ragged.
        if not _is_ragged(placements):
            return original(tensor, device_mesh, placements, **options)
        other_mesh = device_mesh is not None and device_mesh != tensor.device_mesh
        casts = options.get("forward_dtype") or options.get("backward_dtype")
        if other_mesh or casts or (torch.is_grad_enabled() and tensor.requires_grad):
            raise UsageError(
                "redistribute to ragged bounds changes placements only: no mesh, no dtype, and without a gradient",
                fix="pass placements only, of a tensor after detach() or in no_grad()",
            )
        return _distribute(tensor.full_tensor(), tensor.device_mesh, placements or (), src_data_rank=None)

    return redistribute


def _with_ragged_instances(original: Any) -> Any:
    """Wrap ``DTensor.__new__``: with a ``RaggedShard`` it makes a ``RaggedDTensor`` around the same memory."""

    def new(cls: Any, local_tensor: torch.Tensor, spec: DTensorSpec, *, requires_grad: bool) -> Any:
        if cls is not dtensor.DTensor or not _is_ragged(spec.placements):
            return original(cls, local_tensor, spec, requires_grad=requires_grad)
        ragged = spec_of_placements(spec.mesh, spec.shape, local_tensor.dtype, spec.placements)
        layout = ragged.layout
        if local_tensor.shape != layout.local_shape and local_tensor.shape == layout.shape:
            local_tensor = slice_full(local_tensor, layout).clone()  # The whole, as loads of adapters give it.
        if local_tensor.shape != layout.local_shape:
            who = "" if layout.label is None else f", cut as parameter {str(layout.label)!r}"
            raise ConfigError(
                f"a local tensor of shape {list(local_tensor.shape)} for a piece of shape {list(layout.local_shape)}",
                at=f"rank {layout.global_rank}, tensor of shape {list(layout.shape)}{who}",
                fix="give the whole, or a tensor of the shape of the parameter's to_local(); for a tensor of another "
                "shape, such as one number a row, call distribute_tensor(whole, mesh, [Replicate()])",
            )
        return RaggedDTensor.wrap(local_tensor, ragged, requires_grad)

    return new


def _with_ragged_shape(original: Any) -> Any:
    """Wrap torch's function for the shape and strides of the whole: torch computes them from equal pieces."""

    @wraps(original)
    def compute_global_tensor_info(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Any:
        if not _is_ragged(placements):
            return original(local, mesh, placements)
        layout = layout_of(mesh, placements)
        if layout is None:
            raise ConfigError(
                "the shape of the whole is not known: no parameter here has these placements",
                fix="DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())",
            )
        return list(layout.shape), list(strides_of(layout.shape, layout.order))

    return compute_global_tensor_info


def _with_ragged_values(original: Any) -> Any:
    """Wrap the code of ``torch.distributed.tensor.zeros`` and its kin: random numbers are drawn for the whole."""

    @wraps(original)
    def init(fill: Any, size: Any, device_mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        if not _is_ragged(placements) or device_mesh is None:
            return original(fill, size, device_mesh=device_mesh, placements=placements, **options)
        dtype = options.get("dtype") or torch.get_default_dtype()
        spec = spec_of_placements(device_mesh, size, dtype, placements)
        is_random = fill in (torch.rand, torch.randn)
        requires_grad = options.pop("requires_grad", False)
        value = [options.pop("fill_value")] if fill is torch.full else []
        made = fill(size if is_random else spec.layout.local_shape, *value, device=device_mesh.device_type, **options)
        local = slice_full(made, spec.layout).clone() if is_random else made
        return RaggedDTensor.wrap(local, spec.cast(local.dtype), requires_grad)

    return init

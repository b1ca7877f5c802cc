"""A context in which modules hold full, plain parameters, to read or to change.

Values are gathered handle by handle. Where every rank shows them they stay in the handles'
own buffers, and forward and backward may run; where only one rank does, or the host, or where they
are computed with in another dtype, they are copies, of which one handle passes through a device at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.distributed import ReduceOp

import _traversal_utils
from composable.comm import Ranks
from composable.dtensor import RaggedDTensor, assign_grad, slice_block
from composable.engine import Handle, Lent, Scheduler, ShardedParam, attach, waits_for_copies
from composable.errors import DesyncError, UsageError, place_of_rank
from composable.features import collect_at, spread_from
from composable.ground.names import check_bool, check_module, describe_module
from composable.saving.entries import agreed_by, ranks_along

__all__ = ["unshard_params"]


@dataclass(frozen=True)
class _Options:
    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool

    def __post_init__(self) -> None:
        for field in fields(self):
            check_bool(field.name, getattr(self, field.name))

    @property
    def copies(self) -> bool:
        """Parameters are tensors of their own, not the handles' unsharded ones."""
        return self.rank0_only or self.offload_to_cpu


@contextmanager
def unshard_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Let ``module`` and what is below it hold plain parameters of their full shapes and own dtypes inside the block.

    Collective on entry and, for ``writeback``, on exit: all ranks of the shard group, with equal
    arguments. Outside of forward and backward. In the block ``parameters()``,
    ``state_dict()`` and ``load_state_dict()`` are those of the plain module. Change values in place.

    Without ``rank0_only``, ``offload_to_cpu`` and ``with_grads`` the module may run in the block,
    without communication; where a mixed precision policy casts parameters, under ``torch.no_grad()`` only.
    Nothing is cast in the block. Calls may nest with equal options; the
    outermost one gathers and writes back.

    An exception in the block restores the values from before it; with ``writeback`` on every rank, which raises too.

    Args:
        module: A module that is annotated, or contains annotated ones. One without is left alone.
        recurse: Also modules below ``module`` that have handles of their own.
        writeback: Keep changes: each rank its own elements of what it holds, with ``rank0_only`` those
            of the first rank, handle by handle.
        rank0_only: Only the first rank of the mesh holds full parameters, as copies; the others keep what they have.
        offload_to_cpu: Full parameters are copies on the host.
        with_grads: Also show gradients in full, and write them back with ``writeback``.

    Raises:
        UsageError: In a forward or backward; parameters belong to a handle further up; nested with other
            options; at the exit, if sharded parameters were changed at the same time, or parameters replaced.
        DesyncError: With ``with_grads``, a parameter has a gradient on some ranks only.
        ConfigError: An option is not a bool.
    """
    check_module("module", module)
    check_bool("recurse", recurse)
    options = _Options(writeback, rank0_only, offload_to_cpu, with_grads)
    found = _find(module, recurse=recurse, options=options)
    if with_grads:
        _check_gradients(found)
    shown = [_Shown(handle, scheduler, options) for handle, scheduler in found]
    try:
        # What one rank must not write back, none does: a rank may own nothing of what was changed.
        with agreed_by(_all_ranks([handle for handle, _ in found] if writeback else [])):
            for one in shown:
                one.show()
            yield
            for one in shown if writeback else ():
                one.check()
        for one in shown if writeback else ():
            one.write_back()
            one.restore()
    finally:
        for one in shown:
            one.restore()


def _all_ranks(handles: Sequence[Handle]) -> list[Ranks]:
    """Return the ranks of the handles, and those beside them, which have other blocks."""
    layouts = [param.layout for one in handles for param in one.params]
    beside = [(layout.mesh, dim) for layout in layouts for dim in range(layout.mesh.ndim) if dim != layout.mesh_dim]
    found = [one.grid.everyone for one in handles[:1]] + ranks_along(beside)
    return list({ranks.numbers: ranks for ranks in found}.values())


def _find(module: nn.Module, *, recurse: bool, options: _Options) -> list[tuple[Handle, Scheduler]]:
    """Return the handles to show, and who runs each; those that an outer context shows already are left out."""
    states = _traversal_utils._get_fully_sharded_module_to_states(module, is_everywhere=True)
    roots = [state.lazy_init() for state in states.values()]
    for root in roots:
        if not root.scheduler.is_idle:
            raise UsageError(
                "unshard_params was entered in the middle of a forward or backward",
                at=f"{place_of_rank()}, {describe_module(module)}",
                fix="enter it between steps",
            )
    found: dict[Handle, Scheduler] = {}
    for (owner, state), root in zip(states.items(), roots, strict=True):
        handle = state._module_to_handle.get(owner)
        if handle is not None and (recurse or owner is module):
            found[handle] = root.scheduler
    _check_owners(module, found, recurse=recurse)
    for handle in found:
        if handle.held_with not in (None, options):
            what = "unshard_params is entered again with other options"
            raise _refusal(handle, what, "use the options of the outer block, or leave it first")
    return [(handle, scheduler) for handle, scheduler in found.items() if handle.held_with is None]


def _refusal(handle: Handle, what: str, fix: str) -> UsageError:
    return UsageError(what, at=f"{place_of_rank()}, {handle.described}", fix=fix)


def _check_owners(module: nn.Module, handles: Iterable[Handle], *, recurse: bool) -> None:
    """Refuse to show a module of which an ancestor's handle owns parameters."""
    known = {id(param.sharded) for handle in handles for param in handle.params}
    named = module.named_parameters(recurse=recurse)
    outside = [fqn for fqn, param in named if isinstance(param, RaggedDTensor) and id(param) not in known]
    if outside:
        raise UsageError(
            f"{len(outside)} parameters belong to a handle of another module: {', '.join(outside[:5])}",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix="call unshard_params on that module, further up, or on the root",
        )


def _check_gradients(found: Sequence[tuple[Handle, Scheduler]]) -> None:
    """Make sure that gradients are complete, and that gathering them is the same collectives on every rank."""
    members: dict[Ranks, list[tuple[str, ShardedParam]]] = {}
    for handle, scheduler in found:
        if scheduler.is_deferred:
            what = "gradients that wait for the last backward cannot be shown"
            raise _refusal(handle, what, "call finalize_backward() before")
        if handle.accumulated.is_unsynced:
            what = "gradients that no_sync left on their ranks cannot be shown"
            raise _refusal(handle, what, "run a backward outside of no_sync first")
        if handle.accumulated.awaits_copies:
            raise waits_for_copies("unshard_params(with_grads=True)", handle.described)
        for param in handle.params:
            members.setdefault(handle.grid.everyone, []).append((handle.from_root(param.fqn), param))
    torn: list[str] = []
    for ranks, named in members.items():
        mine = torch.tensor([param.sharded.grad is not None for _, param in named], dtype=torch.uint8)
        both = ranks.reduce(torch.stack([mine, 1 - mine]).to(ranks.device), ReduceOp.MAX)
        torn += [fqn for (fqn, _), is_torn in zip(named, (both.sum(0) == 2).tolist(), strict=True) if is_torn]
    with agreed_by(_all_ranks([handle for handle, _ in found])):
        if torn:
            raise DesyncError(
                f"{len(torn)} parameters have a gradient on some ranks only: {', '.join(torn[:5])}",
                at=place_of_rank(),
                fix="set and clear gradients alike on every rank",
            )


class _Shown:
    """One handle in the block; ``ranks`` are all that hold its shards, or copies of them."""

    def __init__(self, handle: Handle, scheduler: Scheduler, options: _Options) -> None:
        self.handle = handle
        self.scheduler = scheduler
        self.options = options
        self.params = handle.params
        self.ranks = handle.grid.everyone
        # The handle's unsharded parameters would have lost what the cast drops.
        self.is_copied = options.copies or self._casts
        self._device = torch.device("cpu") if options.offload_to_cpu else self.ranks.device
        self._placed: list[nn.Parameter] = []  # Where this rank shows them.
        self._grad_dtypes: list[tuple[nn.Parameter, torch.dtype | None]] = []  # Before the block.
        self._before = self._versions()

    def show(self) -> None:
        """Gather, and let the modules hold the full parameters. Collective."""
        options, handle = self.options, self.handle
        grads = self._gather_grads() if options.with_grads else None
        # What an earlier forward left unsharded may be older than the shard.
        self.scheduler.reshard(handle)
        attach(handle)
        if self.is_copied:
            copies = self._collect([param.ragged for param in self.params])
            self._placed = [param.make_stand_in(copy) for param, copy in zip(self.params, copies or ())]
            for param, stand_in in zip(self.params, self._placed):
                param.place(stand_in)
        else:
            self.scheduler.shards_written()
            self.scheduler.unshard(handle)
            self._placed = [param.leaf() for param in self.params]
        handle.held_with = options
        if options.copies or options.with_grads:
            handle.lent = Lent.OTHER
        elif self.is_copied:
            handle.lent = Lent.WHOLE
        for param, placed, grad in zip(self.params, self._placed, grads or ()):
            self._grad_dtypes.append((placed, placed.grad_dtype))
            if placed.grad_dtype != param.grad_spec.dtype:
                # Gradients may stay in another dtype than parameters; leaves sum up in that of the reduction.
                placed.grad_dtype = param.grad_spec.dtype
            placed.grad = None if grad is None else param.around_grad(grad)

    def check(self) -> None:
        """Raise if sharded parameters were changed too, or full ones were replaced: that cannot be written back."""
        if self._versions() != self._before:
            what = "sharded parameters were changed while unshard_params showed full ones, which would overwrite them"
            raise _refusal(self.handle, what, "step the optimizer outside of the block, or pass writeback=False")
        for param, placed in zip(self.params, self._placed):
            value = param.storage_of(placed)
            if not param.is_placed(placed) or value.shape != param.shape or value.dtype != param.sharded.dtype:
                raise UsageError(
                    "a parameter was replaced while unshard_params showed it",
                    at=f"{place_of_rank()}, parameter {self.handle.from_root(param.fqn)!r}",
                    fix="change it in place, with copy_()",
                )

    def write_back(self) -> None:
        """Take over what the block changed. Collective with ``rank0_only``."""
        if not self.options.copies:
            for param, placed in zip(self.params, self._placed):
                param.sharded.requires_grad_(placed.requires_grad)
        if not self.is_copied:
            for flat in self.handle.buffers:
                flat.write_back()
        elif self.options.rank0_only:
            ragged = [param.ragged for param in self.params]
            self._spread(ragged, lambda index: self.params[index].storage_of(self._placed[index]))
        else:
            for param, placed in zip(self.params, self._placed):
                param.ragged._local_tensor.data.copy_(slice_block(param.storage_of(placed), param.layout))
        if self.options.with_grads:
            self._write_grads_back()

    def restore(self) -> None:
        """Let the modules hold sharded parameters again; nothing if they do."""
        self.handle.held_with = self.handle.lent = None
        for param, placed in zip(self.params, self._placed):
            if self.options.with_grads:
                placed.grad = None
            param.place(param.sharded)
        for placed, dtype in self._grad_dtypes:
            if placed.grad_dtype != dtype:
                placed.grad_dtype = dtype
        self._grad_dtypes, self._placed = [], []
        if self.handle.is_unsharded:
            for flat in self.handle.buffers:
                flat.mend_leaves()
        self.scheduler.reshard(self.handle)

    @property
    def _casts(self) -> bool:
        """Unsharded parameters have another dtype than sharded ones, or are no plain tensors."""
        return any(flat.compute_dtype != flat.dtype or flat.holds_instances for flat in self.handle.buffers)

    def _versions(self) -> list[int]:
        # An operation on a ragged tensor counts there, one on its local tensor at the shard.
        shards = [flat.shard._version for flat in self.handle.buffers]
        return shards + [param.sharded._version for param in self.params]

    def _gather_grads(self) -> list[torch.Tensor | None]:
        """Return the full gradient of each parameter that has one, where this rank is to show them."""
        held = [param.sharded.grad for param in self.params]
        fulls = iter(self._collect([grad for grad in held if grad is not None]) or ())  # type: ignore[misc]
        return [None if grad is None else next(fulls, None) for grad in held]

    def _write_grads_back(self) -> None:
        """Take over the gradients that the block left: each rank its piece, with ``rank0_only`` of the first rank's."""
        grads = [placed.grad for placed in self._placed] or [None] * len(self.params)
        has_grad = [grad is not None for grad in grads]
        if self.options.rank0_only:
            told = torch.tensor(has_grad, dtype=torch.uint8, device=self.ranks.device)
            self.ranks.broadcast(told, 0)
            has_grad = told.tolist()
        filled: list[Any] = []
        for param, grad, is_there in zip(self.params, grads, has_grad, strict=True):
            param.sharded.grad = None
            if not is_there:
                continue
            local = param.ragged._local_tensor
            if self.options.rank0_only or grad is None:
                piece = torch.empty_like(local, dtype=param.grad_spec.dtype)
            else:
                block = param.block_of_grad(grad)
                piece = slice_block(block, param.layout).to(local.device, param.grad_spec.dtype, copy=True)
            assign_grad(param.sharded, RaggedDTensor.wrap(piece, param.grad_spec))
            filled.append(param.sharded.grad)
        if self.options.rank0_only:
            pairs = zip(self.params, grads, strict=True)
            full = [param.block_of_grad(grad) for param, grad in pairs if grad is not None]
            self._spread(filled, full.__getitem__)

    def _collect(self, tensors: Sequence[RaggedDTensor]) -> list[torch.Tensor] | None:
        taker = self.ranks.numbers[0] if self.options.rank0_only else None
        return collect_at(tensors, self.handle.grid, taker, device=self._device)

    def _spread(self, tensors: Sequence[RaggedDTensor], values: Callable[[int], torch.Tensor]) -> None:
        spread_from(tensors, self.handle.grid, self.ranks.numbers[0], values)

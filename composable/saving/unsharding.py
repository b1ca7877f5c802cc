"""The context ``unshard_params``.

Values are gathered handle by handle. If every rank shows them on its device, they stay in the handles'
own buffers, and forward and backward may run. If only one rank or the host shows them, or if computation
has another dtype, they are copies, and one handle at a time passes through a device.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import nn

import _traversal_utils
from composable.annotation import model_ranks_of, nothing_annotated
from composable.dtensor import RaggedDTensor, collect_blocks, memory_of, slice_block
from composable.engine import Handle, Lent, Scheduler, attach
from composable.errors import UsageError
from composable.features import spread_from
from composable.ground.names import check_bool, check_module, describe_module, list_text
from composable.ground.ownership import is_forgotten


class _Options(NamedTuple):
    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool

    @property
    def copies(self) -> bool:
        """Whether full parameters are new tensors, not the handles' unsharded ones."""
        return self.rank0_only or self.offload_to_cpu


@contextmanager
def unshard_params(
    module: nn.Module,
    *,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> Iterator[None]:
    """Give ``module`` and the modules below it plain parameters of full shape and own dtype inside the block.

    Collective on entry and, for ``writeback``, on exit: all ranks of the shard group, with equal arguments. Outside of
    forward and backward. In the block ``parameters()``, ``state_dict()`` and ``load_state_dict()`` work as in
    the plain module. Change values in place.

    Without ``rank0_only`` and ``offload_to_cpu`` the module may run in the block, without communication; where a mixed
    precision policy casts parameters, under ``torch.no_grad()`` only. Nothing is cast in the block. Calls may nest with
    equal options; the outermost one gathers and writes back. Gradients stay as they are: outside of the block
    ``param.grad.full_tensor()`` gives one in full.

    An exception in the block restores the values from before it; with ``writeback`` every rank restores and raises.

    Args:
        module: A module that is annotated, contains annotated ones, or is inside of one. A module without sharded
            parameters is left alone.
        recurse: Also modules below ``module`` that have handles of their own.
        writeback: Keep changes: each rank takes its own elements from its full parameters, with ``rank0_only`` from
            those of the first rank, handle by handle.
        rank0_only: Only the first rank of the mesh holds full parameters, as copies; others keep sharded parameters.
        offload_to_cpu: Full parameters are copies on the host.

    Raises:
        UsageError: Nothing is annotated; in a forward or backward; parameters belong to a handle further up; nested
            with other options; at the exit, if sharded parameters were changed at the same time, or parameters
            replaced.
        ConfigError: An option is not a bool.
    """
    check_module("module", module)
    check_bool("recurse", recurse)
    options = _Options(writeback, rank0_only, offload_to_cpu)
    for name, value in options._asdict().items():
        check_bool(name, value)
    found = _find(module, recurse=recurse, options=options)
    shown = [_Shown(handle, scheduler, options) for handle, scheduler in found]
    try:
        # If one rank must not write back, no rank does: it may be that only others own changed elements.
        with ExitStack() as agreeing:
            for model in model_ranks_of(handle for handle, _ in found if writeback).values():
                agreeing.enter_context(model.everyone.agreed())
            for one in shown:
                one.show()
            for scheduler in {one.scheduler for one in shown}:
                agreeing.enter_context(scheduler.backwards.shown_here())
            yield
            for one in shown if writeback else ():
                one.check()
        for one in shown if writeback else ():
            one.write_back()
            one.restore()
    finally:
        for one in shown:
            one.restore()


def _find(module: nn.Module, *, recurse: bool, options: _Options) -> list[tuple[Handle, Scheduler]]:
    """Return the handles to show, with their schedulers, without handles that an outer context shows already."""
    states = _traversal_utils._get_fully_sharded_module_to_states(module, is_everywhere=True)
    params = list(module.parameters())
    if params and all(map(is_forgotten, params)):
        raise nothing_annotated("unshard_params", module)
    roots = [state.lazy_init() for state in states.values()]
    for root in roots:
        if not root.scheduler.step.is_idle:
            raise UsageError(
                "unshard_params was entered in the middle of a forward or backward",
                at=describe_module(module),
                fix="enter it between steps",
            )
    found: dict[Handle, Scheduler] = {}
    for (owner, state), root in zip(states.items(), roots, strict=True):
        handle = state.unit_of_module(owner)
        if handle is not None and (recurse or owner is module):
            found[handle] = root.scheduler
    known = {id(param.sharded) for handle in found for param in handle.params}
    named = module.named_parameters(recurse=recurse)
    outside = [fqn for fqn, param in named if isinstance(param, RaggedDTensor) and id(param) not in known]
    if outside:
        raise UsageError(
            f"parameters belong to a handle of another module: {list_text(outside)}",
            at=describe_module(module),
            fix="call unshard_params on that module, further up, or on the root",
        )
    for handle in found:
        if handle.held_with not in (None, options):
            raise UsageError(
                "unshard_params is entered again with other options",
                at=handle.described,
                fix="use the options of the outer block, or leave it first",
            )
    return [(handle, scheduler) for handle, scheduler in found.items() if handle.held_with is None]


class _Shown:
    """One handle in the block; ``ranks`` are all ranks that hold its shards, or copies of them."""

    def __init__(self, handle: Handle, scheduler: Scheduler, options: _Options) -> None:
        self.handle = handle
        self.scheduler = scheduler
        self.options = options
        self.params = handle.params
        self.ranks = handle.grid.everyone
        # Unsharded parameters that were cast have lost precision; instances of a class are no plain tensors.
        casts = any(flat.compute_dtype != flat.dtype or flat.holds_instances for flat in handle.buffers)
        self.is_copied = options.copies or casts
        self._placed: list[nn.Parameter] = []  # The full parameters, if this rank shows them.
        self._before = self._versions()

    def show(self) -> None:
        """Gather, and put the full parameters into the modules. Collective."""
        options, handle = self.options, self.handle
        # Unsharded values that an earlier forward left may be older than the shard.
        self.scheduler.reshard(handle)
        attach(handle)
        if self.is_copied:
            taker = self.ranks.numbers[0] if options.rank0_only else None
            device = torch.device("cpu") if options.offload_to_cpu else self.ranks.device
            copies = collect_blocks([param.ragged for param in self.params], taker=taker, device=device)
            self._placed = [param.make_stand_in(copy) for param, copy in zip(self.params, copies or ())]
            for param, stand_in in zip(self.params, self._placed):
                param.place(stand_in)
        else:
            self.scheduler.step.streams.shards_written()
            self.scheduler.unshard(handle)
            self._placed = [param.leaf() for param in self.params]
        handle.held_with = options
        if options.copies:
            handle.lent = Lent.OTHER
        elif self.is_copied:
            handle.lent = Lent.WHOLE

    def check(self) -> None:
        """Raise if sharded parameters were changed too, or full ones were replaced: that cannot be written back."""
        if self._versions() != self._before:
            raise UsageError(
                "sharded parameters were changed while unshard_params showed full ones, which would overwrite them",
                at=self.handle.described,
                fix="step the optimizer outside of the block, or pass writeback=False",
            )
        for param, placed in zip(self.params, self._placed):
            value = param.storage_of(placed)
            if not param.is_placed(placed) or value.shape != param.shape or value.dtype != param.sharded.dtype:
                raise UsageError(
                    "a parameter was replaced while unshard_params showed it",
                    at=f"parameter {self.handle.from_root(param.fqn)!r}",
                    fix="change it in place, with copy_()",
                )

    def write_back(self) -> None:
        """Write the changes of the block into the shards. Collective with ``rank0_only``."""
        if not self.options.copies:
            for param, placed in zip(self.params, self._placed):
                param.sharded.requires_grad_(placed.requires_grad)
        if not self.is_copied:
            for flat in self.handle.buffers:
                flat.write_back()
        elif self.options.rank0_only:
            first, ragged = self.ranks.numbers[0], [param.ragged for param in self.params]
            values = [param.storage_of(placed) for param, placed in zip(self.params, self._placed)]
            spread_from(ragged, self.handle.grid, first, values.__getitem__)
        else:
            for param, placed in zip(self.params, self._placed):
                memory_of(param.ragged._local_tensor).data.copy_(slice_block(param.storage_of(placed), param.layout))

    def restore(self) -> None:
        """Put the sharded parameters back into the modules; a second call does nothing."""
        self.handle.held_with = self.handle.lent = None
        for param, _ in zip(self.params, self._placed):
            param.place(param.sharded)
        self._placed = []
        if self.handle.is_unsharded:
            for flat in self.handle.buffers:
                flat.mend_leaves()
        self.scheduler.reshard(self.handle)

    def _versions(self) -> list[int]:
        # Operations on a ragged tensor raise its own version; operations on its local tensor raise the shard's.
        shards = [flat.shard._version for flat in self.handle.buffers]
        return shards + [param.sharded._version for param in self.params]

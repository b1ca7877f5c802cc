"""Tensors that users put in place of managed parameters.

A load assigns tensors, whose values are copied into the shards; other tensors are refused.
"""

import weakref
from collections.abc import Sequence

import torch

from composable.comm import Ranks
from composable.engine.handle import Handle, handle_of
from composable.engine.param import Lent, Misplaced, ShardedParam
from composable.errors import UsageError
from composable.ground.frames import is_functional_call
from composable.ground.names import class_name, list_text, module_text
from composable.planning import mark_replaced

LOADED = "_composable_loaded"  # Mark of a parameter that a load has assigned; set in ownership.py.


def misplaced(handle: Handle) -> list[Misplaced]:
    """Return the places where modules do not hold the face that ``handle`` gave them; inside a context, none."""
    return [] if handle.held_with is not None else handle.faces.misplaced(handle.view)


def refuse_unknown(handle: Handle) -> None:
    """Raise where a module holds neither face of a parameter of ``handle``, unless a context shows the parameters.

    Since the forward, a parameter was then replaced or removed, or a load has assigned it: ``UsageError``.
    """
    # A forward has checked this already, so a backward is next.
    if handle.held_with is None:
        check_held(handle)
        raise written_too_early(handle)


def attach(handle: Handle) -> None:
    """Copy into the shards the parameters that a load assigned, and the pieces that torch has moved to other memory.

    Modules then hold the same parameter objects as before. Not collective. Raises ``UsageError`` if a parameter has
    another dtype or shape now, and as ``check_held``.
    """
    if handle.is_unsharded or handle.held_with is not None:
        return
    check_held(handle)
    for param in handle.params:
        for module, name in param.owners:
            held = module._parameters.get(name)
            if held is not None and held is not param.sharded and held is not param.unsharded:
                param.take(held)
                vars(held).pop(LOADED, None)
                mark_replaced(held, param.fqn, module, name)  # An optimizer that was built meanwhile holds it.
                param.sharded.grad = None  # A new parameter has none.
        param.bring_back_marks()
        param.place(param.sharded)
    for flat in handle.buffers:
        flat.attach()


def check_held(handle: Handle) -> None:
    """Refuse parameters that the user tied, replaced or removed: an optimizer may hold the old ones, or the new.

    Parameters that a load assigned are allowed, and so is any parameter in the place of one on the meta device.
    Raises ``UsageError``, also where ``functional_call`` has put in another one.
    """
    for _, _, param, held in (found for found in misplaced(handle) if found.is_unknown):
        at = f"{handle.described}, parameter {param.fqn!r}"
        if is_functional_call():
            raise UsageError(
                "functional_call gave a sharded module other parameters, and its forward gathers its own",
                at=at,
                fix="call it inside unshard_params(model); elsewhere give it buffers only, or the model's own "
                "parameters",
            )
        other = None if held is None else handle_of(held)
        if other is None and held is not None and (param.ragged.is_meta or hasattr(held, LOADED)):
            continue
        what, fix = "removed", "remove it before fully_shard"
        names = [] if other is None else [other.from_root(one.fqn) for one in other.params if one.has_face(held)]
        if names:
            what, fix = f"tied to {names[0]!r}", "tie them before fully_shard, by one call for both or a policy"
        elif held is not None:
            what, fix = "replaced", "change its values: with torch.no_grad(): parameter.copy_(full), or load them"
            fix = "change its shape before fully_shard" if held.shape != param.shape else fix
        raise UsageError(
            f"a parameter was {what} after fully_shard was called, and optimizers and gradients would not follow",
            at=at,
            fix=f"{fix}; or unannotate first",
        )


def check_lent(handle: Handle) -> None:
    """Raise ``UsageError`` for a forward that needs gradients, or whole parameters, that a context does not show."""
    if handle.lent is not Lent.WHOLE or torch.is_grad_enabled():
        raise UsageError(
            "a forward cannot run while unshard_params shows copies or gradients of the parameters",
            at=handle.described,
            fix="leave the context first, or enter it without rank0_only and offload_to_cpu; what it "
            "shows in full precision runs under torch.no_grad()",
        )


def checksum_of(handle: Handle) -> int:
    """Return a sum over the bits of the unsharded parameters; the host waits for the device."""
    return sum(flat.checksum() for flat in handle.buffers)


def lost_write(handle: Handle) -> UsageError:
    """Return the error for values that were written to unsharded parameters, and lost when these are freed."""
    names = [handle.from_root(fqn) for flat in handle.buffers for fqn in flat.written()]
    elsewhere = "parameters of which other ranks hold the part, if a value has changed"
    where = f", parameter {list_text(names)}" if names else f", {elsewhere}"
    return UsageError(
        "an unsharded parameter was written to: it is a copy, and what was written would be lost",
        at=f"{handle.described}{where}",
        fix="write between two steps: with unshard_params(module), torch.no_grad(): ...; or keep the values in a "
        "buffer. An embedding with max_norm: leave max_norm out, and renormalise there",
    )


def lies_in_buffer(handle: Handle, tensor: torch.Tensor) -> bool:
    """Say whether a plain tensor, of any shape, is a view of the unsharded parameters of ``handle``."""
    return any(flat.holds(tensor) for flat in handle.buffers)


def written_too_early(handle: Handle) -> UsageError:
    """Return the error for shards that were written between a forward and its backward."""
    return UsageError(
        "parameters were written to between a forward and its backward, which needs them as they were",
        at=handle.described,
        fix="step, load or change parameters after backward; or run forward again",
    )


def refuse_split_backward(handles: Sequence[Handle]) -> None:
    """Raise ``UsageError`` for a stage of torch's pipelines that searches the graph for parameters that modules hold.

    The graph has the unsharded ones, and modules hold others unless ``unshard_params`` shows these.
    """
    if any(handle.held_with is None for handle in handles):
        raise UsageError(
            "a pipeline's stage computes gradients of parameters in a step of its own (zero bubble), and a sharded "
            "module holds no whole parameters between forward and backward",
            at=handles[0].described,
            fix="enter unshard_params(module, writeback=False) for the step, as ShardedStage in "
            "examples/clients/pipelining.py does, or use a schedule without zero bubble",
        )


class ParamLabel:
    """The name, module and ranks of a sharded parameter."""

    __slots__ = ("_fqn", "_handle", "_kind")

    def __init__(self, param: ShardedParam, handle: Handle) -> None:
        self._fqn = param.fqn
        self._kind = next((class_name(module) for module, _ in param.owners), "module")
        # The handle's name changes when the root is known.
        self._handle = weakref.ref(handle)

    def __str__(self) -> str:
        handle = self._handle()
        return self._fqn if handle is None else handle.from_root(self._fqn)

    @property
    def everyone(self) -> Ranks | None:
        """All ranks that hold pieces of the parameter, or copies of pieces; ``None``: its handle is gone."""
        handle = self._handle()
        return None if handle is None else handle.grid.everyone

    @property
    def has_parts(self) -> bool:
        """On some of these ranks, modules inside the same root lie on a part of the ranks."""
        handle = self._handle()
        return handle is not None and handle.has_parts

    @property
    def module(self) -> str:
        """Name of the parameter's module in messages."""
        return module_text(str(self).rpartition(".")[0], self._kind)

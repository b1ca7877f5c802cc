"""First values of parameters and buffers, from a function or from the first rank.

A module's parameters are whole only while the function initialises it: their pieces go to the
shards before the next module has its turn. The first rank sends each piece directly to the rank
that keeps it, handle by handle. Plain buffers are listed, moved, and made equal on all ranks here too.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.comm import Grid, Ranks
from composable.engine import FlatBuffer, ShardedParam, has_own_setattr
from composable.errors import ConfigError
from composable.features.whole_values import spread_from
from composable.ground.names import SUCCESSOR, dtype_text, join_fqn, list_text
from composable.ground.unfilled import MarkedMemory, is_unfilled
from composable.planning import HandleMembers

_Slot = tuple[nn.Module, str]


def _buffer_slots(names: Mapping[nn.Module, str]) -> list[list[_Slot]]:
    """Return (module, name) for every plain buffer, grouped by tensor."""
    found: dict[int, list[_Slot]] = {}
    for module in names:
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                found.setdefault(id(buffer), []).append((module, name))
    return list(found.values())


def _buffer_in(slots: Sequence[_Slot]) -> torch.Tensor:
    module, name = slots[0]
    return module.get_buffer(name)


def describe_buffers(names: Mapping[nn.Module, str]) -> list[str]:
    """Return a line for every buffer, to compare between ranks."""
    lines = []
    for slots in _buffer_slots(names):
        buffer = _buffer_in(slots)
        fqns = " = ".join(repr(join_fqn(names[module], name)) for module, name in slots)
        lines.append(f"buffer {fqns} {list(buffer.shape)} {dtype_text(buffer.dtype)}")
    return lines


def move_buffers(names: Mapping[nn.Module, str], device: torch.device) -> None:
    """Move buffers to the device where the parameters will be unsharded; buffers on the meta device stay."""
    for slots in _buffer_slots(names):
        buffer = _buffer_in(slots)
        if not buffer.is_meta and buffer.device.type != device.type:
            moved = buffer.to(device)
            for module, name in slots:
                module._buffers[name] = moved


def _broadcast_buffer(slots: Sequence[_Slot], ranks: Ranks) -> None:
    """Give every rank the first rank's values of a buffer: in place if it has memory, else as one new tensor."""
    buffer = _buffer_in(slots)
    is_source = ranks.rank == 0
    if is_source:
        values = buffer.detach().to(ranks.device).contiguous()
    else:
        values = torch.empty(buffer.shape, dtype=buffer.dtype, device=ranks.device)
    ranks.broadcast(values, 0)
    if is_source:
        return
    if buffer.is_meta or any(step == 0 for step in buffer.stride()):
        for module, name in slots:
            module._buffers[name] = values
    else:
        buffer.data.copy_(values)


ParamInitFn = Callable[[nn.Module], object]


class FirstValues:
    """The first values of one annotation's shards, while its modules still hold their original parameters.

    ``names`` has its modules in order, ``members`` each handle's original parameters, ``built`` each handle's buffers.
    """

    def __init__(
        self, names: Mapping[nn.Module, str], members: Sequence[HandleMembers], built: Sequence[Sequence[FlatBuffer]]
    ) -> None:
        self._names = names
        self._handles: list[list[tuple[nn.Parameter, ShardedParam]]] = [
            [
                (member.params[span.fqn].param, param)
                for flat in buffers
                for span, param in zip(flat.plan.layout.spans, flat.params, strict=True)
            ]
            for member, buffers in zip(members, built, strict=True)
        ]
        self._params = {id(original): param for pairs in self._handles for original, param in pairs}
        self._values: dict[int, torch.Tensor] = {}
        self._buffers_before = {module: dict(module._buffers) for module in names}
        for module, buffers in self._buffers_before.items():
            for name, buffer in buffers.items():
                # An annotation of another module may have replaced the buffer before.
                module._buffers[name] = getattr(buffer, SUCCESSOR, buffer)

    def make(self, fn: ParamInitFn | None) -> None:
        """Fill the shards with this rank's own values.

        Raises ``ConfigError`` if ``fn`` left a tensor without values, or changed another module than its own.
        """
        kept: set[int] = set()

        def keep(original: nn.Parameter, value: torch.Tensor) -> None:
            self._params[id(original)].write_full(value)
            kept.add(id(original))

        if fn is not None:
            self._run(fn, keep, is_final=True)
        for pairs in self._handles:
            for original, param in pairs:
                if id(original) not in kept:
                    param.write_full(original)

    def prepare(self, fn: ParamInitFn | None, *, is_source: bool) -> None:
        """Collect all values on the first rank, the source, before they are sent; errors as ``make``."""
        if fn is not None:

            def keep(original: nn.Parameter, value: torch.Tensor) -> None:
                if is_source:
                    self._values[id(original)] = value

            self._run(fn, keep, is_final=is_source)
        if is_source:
            without = [
                join_fqn(self._names[module], name)
                for module in self._names
                for name, tensor in [*module._parameters.items(), *module._buffers.items()]
                if tensor is not None
                and tensor.is_meta
                and id(tensor) not in self._values
                and (name in module._buffers or id(tensor) in self._params)
            ]
            if without:
                raise ConfigError(
                    "sync_module_states sends values of the first rank, and there they are on the meta device",
                    at=list_text(without),
                    fix="load or initialise the model on the first rank, or pass param_init_fn",
                )

    def send(self, grid: Grid) -> None:
        """Give every rank its pieces of the first rank's parameters, and its buffers. Collective: all ranks."""
        first = grid.everyone.numbers[0]
        for pairs in self._handles:
            values = [param.storage_of(self._values.get(id(original), original)) for original, param in pairs]
            spread_from([param.ragged for _, param in pairs], grid, first, values.__getitem__)
        for slots in _buffer_slots(self._names):
            _broadcast_buffer(slots, grid.everyone)

    def finish(self) -> None:
        """Mark every replaced buffer with its successor, for annotations that find it under another name."""
        for module, buffers in self._buffers_before.items():
            for name, buffer in buffers.items():
                if buffer is not None and buffer is not module._buffers[name]:
                    setattr(buffer, SUCCESSOR, module._buffers[name])

    def undo(self) -> None:
        """Put back the buffers that the modules had before."""
        for module, buffers in self._buffers_before.items():
            module._buffers.update(buffers)

    def _run(self, fn: ParamInitFn, keep: Callable[[nn.Parameter, torch.Tensor], None], *, is_final: bool) -> None:
        """Call ``fn`` on each module that owns a parameter or buffer on the meta device, in order.

        A tensor with several owners stays one: each owner gets the tensor that the owner before it left. Values of one
        owner stay if a later owner only allocates the tensor anew. ``keep`` gets an original and its full value, once
        nothing changes it any more. ``is_final``: no values come later, so a tensor without values is an error.
        """
        own = {module: self._own(module) for module in self._names}
        todo = {module: tensors for module, tensors in own.items() if any(one.is_meta for one in tensors.values())}
        uses = Counter(id(tensor) for tensors in todo.values() for tensor in tensors.values())
        # Id of an original tensor -> the tensor that the function has put in its place.
        latest: dict[int, torch.Tensor] = {}
        without: list[str] = []
        try:
            for module, tensors in todo.items():
                self._check_untouched(module, tensors)
                for name, before in tensors.items():
                    if id(before) in latest:
                        _put(module, name, before, latest[id(before)])
                # Marks in new memory show which tensors the function allocated but did not fill.
                with MarkedMemory() if is_final else nullcontext():
                    fn(module)
                for name, before in tensors.items():
                    fqn = join_fqn(self._names[module], name)
                    value = _made(module, name, before, fqn)
                    if value is not None and not (id(before) in latest and is_unfilled(value)):
                        latest[id(before)] = value
                    uses[id(before)] -= 1
                    if uses[id(before)] == 0:
                        last = latest.get(id(before))
                        if last is None or is_unfilled(last):
                            without.append(fqn)
                        elif isinstance(before, nn.Parameter):
                            keep(before, latest.pop(id(before)))
                    if isinstance(before, nn.Parameter):
                        _put(module, name, before, before)
        finally:
            for module, tensors in todo.items():
                for name, before in tensors.items():
                    _put(module, name, before, before if isinstance(before, nn.Parameter) else latest.get(id(before)))
        if is_final and without:
            raise ConfigError(
                "param_init_fn left parameters or buffers without values",
                at=list_text(dict.fromkeys(without)),
                fix="let it fill all parameters and buffers of the module itself, also buffers that __init__ computes",
            )

    def _own(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return by name the module's own buffers, and those of its own parameters that get values here."""
        params = {name: one for name, one in module._parameters.items() if id(one) in self._params and one is not None}
        return params | {name: one for name, one in module._buffers.items() if one is not None}

    def _check_untouched(self, module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        changed = [
            join_fqn(self._names[module], name)
            for name, original in tensors.items()
            if isinstance(original, nn.Parameter) and module._parameters.get(name) is not original
        ]
        if changed:
            raise ConfigError(
                "param_init_fn changed a module before its turn",
                at=list_text(changed),
                fix="let it change what its module owns itself only: module.to_empty(device=..., recurse=False)",
            )


def _made(module: nn.Module, name: str, before: torch.Tensor, fqn: str) -> torch.Tensor | None:
    """Return the tensor that a function put in place of a parameter or buffer; ``None``: it has no values."""
    is_param = isinstance(before, nn.Parameter)
    value = (module._parameters if is_param else module._buffers).get(name)
    if value is not None and (value.shape != before.shape or value.dtype != before.dtype):
        raise ConfigError(
            f"param_init_fn changed {list(before.shape)} {dtype_text(before.dtype)} to "
            f"{list(value.shape)} {dtype_text(value.dtype)}",
            at=repr(fqn),
            fix="let it give values, and keep shape and dtype",
        )
    if is_param or before.is_meta:
        return None if value is None or value.is_meta else value.detach()
    # The buffer had values before, perhaps from an earlier annotation: its other names must see the new values.
    if value is not None and value is not before and not value.is_meta and not is_unfilled(value):
        before.data.copy_(value)
    return before


def _put(module: nn.Module, name: str, before: torch.Tensor, value: torch.Tensor | None) -> None:
    """Put ``value``, if any, in place of ``before`` in ``module``, also if the class has its own ``__setattr__``."""
    if value is None:
        return
    if not isinstance(before, nn.Parameter):
        module._buffers[name] = value
        return
    param = value if value is before else nn.Parameter(value, requires_grad=before.requires_grad)
    if has_own_setattr(module):
        setattr(module, name, param)
    else:
        module._parameters[name] = param

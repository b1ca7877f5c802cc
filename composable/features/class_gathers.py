"""Parameters whose class defines the all-gather.

The shard holds rows of ordinary values, so optimizers, norms and checkpoints need no change. To unshard, an instance
of the class around this rank's rows gives the tensors to gather, such as float8 data and a scale, and makes the
unsharded parameter from the gathered tensors. The memory of these and of the parameter is freed and allocated in
place, since autograd saves views of it.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from composable.comm import Pending
from composable.engine import FlatBuffer
from composable.errors import UsageError

_EXPECTED = "fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy), or with the mesh alone"


class ClassGatheredBuffer(FlatBuffer):
    """Storage and collectives of one parameter whose class defines the all-gather; see ``FlatBuffer``."""

    def __init__(self, plan: Any, module_fqn: str, members: Any, mesh: Any, device: torch.device, **options: Any):
        super().__init__(plan, module_fqn, members, mesh, device, **options)
        self._mesh = mesh
        self._mp_policy = options["mp_policy"]
        self._argument_count: int | None = None  # of fsdp_pre_all_gather; inspecting it is as slow as a call

    def move_to(self, mesh: Any) -> None:
        super().move_to(mesh)
        self._mesh = mesh

    def _forget_unsharded(self) -> None:
        super()._forget_unsharded()
        self._sizes: list[tuple[torch.Size, torch.dtype]] = []  # of the tensors that each rank sends
        self._outputs: list[torch.Tensor] = []
        # The storages of the outputs and of other tensors that the class made, each with its bytes while unsharded.
        self._storages: list[tuple[torch.UntypedStorage, int]] = []

    def begin_unshard(self) -> Pending:
        # A parameter made in inference mode could never be saved for backward, and it is made only once.
        with torch.inference_mode(mode=False), torch.no_grad():
            instance: Any = self._instance()
            inputs, metadata = self._ask(instance)
            sent = [self._padded(one) for one in inputs]
            self._make_outputs(sent)
            # One message: all messages of a buffer's gather have one tag.
            parts = [one.reshape(-1).view(torch.uint8) for one in sent]
            shard = parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)
            if len(parts) == 1:
                landing = self._outputs[0].view(torch.uint8)
            else:
                landing = torch.empty(shard.numel() * self._world_size, dtype=torch.uint8, device=self.device)
            # As bytes: a gather path does not cast these.
            pending = self.routes.gather_path.begin(landing, shard)
        # Holds ``shard`` too: its memory must not change until the gather has ended.
        return _Gathering(pending, partial(self._complete, instance, metadata, landing, shard))

    def _instance(self) -> torch.Tensor:
        """Return the instance to gather from: the one that users see, or one of zeros if this rank has no rows."""
        param = self.params[0]
        local = param.local
        if not local.shape[0]:
            return param.value_around(local.new_zeros([self._rows_per_rank, *local.shape[1:]], device=self.device))
        if local.device.type == self.device.type:
            return param.shown
        moved = param.value_around(local.to(self.device))
        # Copy attributes that users set between steps, such as a scale, but not those that the class itself has set.
        for name, value in vars(param.shown).items():
            if vars(moved).get(name) is None and value is not local:
                setattr(moved, name, value.to(self.device) if isinstance(value, torch.Tensor) else value)
        return moved

    def _ask(self, instance: Any) -> tuple[Sequence[torch.Tensor], Any]:
        """Return the tensors that the class wants to gather, and the metadata that it gets back afterwards."""
        param = self.params[0]
        if self._argument_count is None:
            self._argument_count = len(inspect.signature(instance.fsdp_pre_all_gather).parameters)
        count = self._argument_count
        if count == 1:
            inputs, metadata = instance.fsdp_pre_all_gather(self._mesh)
        elif count == 5:
            strides = param.spec.tensor_meta.stride  # type: ignore[union-attr]  # every ragged spec has one
            inputs, metadata = instance.fsdp_pre_all_gather(
                self._mesh, param.shape, strides, param.owners[0][0], self._mp_policy
            )
        else:
            raise self._error(f"fsdp_pre_all_gather takes {count} arguments", f"define {_EXPECTED}")
        if not inputs or not all(isinstance(one, torch.Tensor) for one in inputs):
            raise self._error("fsdp_pre_all_gather returned no tensors to gather", "return (tensors, metadata)")
        return inputs, metadata

    def _padded(self, given: torch.Tensor) -> torch.Tensor:
        """Return ``given``, padded with zero rows to the size of other ranks' tensors if this rank has fewer rows."""
        param = self.params[0]
        rows, rows_per_rank = param.local_shape[0], self._rows_per_rank
        if rows == rows_per_rank or given.dim() == 0 or given.shape[0] != rows:
            return given
        padded = given.new_zeros([rows_per_rank, *given.shape[1:]])
        padded[:rows].copy_(given)
        return padded

    @property
    def _world_size(self) -> int:
        return self.plan.layout.world_size

    @property
    def _rows_per_rank(self) -> int:
        return -(-self.params[0].shape[0] // self._world_size)

    def _make_outputs(self, sent: Sequence[torch.Tensor]) -> None:
        """Allocate the tensors that values are gathered into; later calls allocate only their memory again."""
        sizes = [(one.size(), one.dtype) for one in sent]
        # A class may send other shapes for backward than for forward, in the same memory.
        room = [(size.numel(), dtype) for size, dtype in sizes]
        before, self._sizes = self._sizes, sizes
        if not before:
            self._outputs = [
                torch.empty(one.numel() * self._world_size, dtype=one.dtype, device=self.device) for one in sent
            ]
            self._storages = [(one.untyped_storage(), one.nbytes) for one in self._outputs]
        elif room != [(size.numel(), dtype) for size, dtype in before]:
            self._sizes = before
            raise self._error(
                f"fsdp_pre_all_gather returned {_text(sizes)}, and {_text(before)} before",
                "return as many tensors, of the same numbers of elements and dtypes, each time",
            )
        else:
            self._allocate()

    def _allocate(self) -> None:
        for storage, nbytes in self._storages:
            if storage.size() != nbytes:
                storage.resize_(nbytes)

    def _complete(self, instance: Any, metadata: Any, landing: torch.Tensor, _: torch.Tensor) -> None:
        """Let the class make or fill the unsharded parameter [full shape] from the bytes in ``landing``."""
        param, outputs = self.params[0], self._outputs
        with torch.inference_mode(mode=False), torch.no_grad():
            if len(outputs) > 1:
                self._copy_out(landing)
            given = tuple(one.view(-1, *size[1:]) for one, (size, _) in zip(outputs, self._sizes, strict=True))
            if param.unsharded is not None:
                instance.fsdp_post_all_gather(given, metadata, self.compute_dtype, out=param.unsharded)
                return
            made, inner = instance.fsdp_post_all_gather(given, metadata, self.compute_dtype)
            known = {storage.data_ptr() for storage, _ in self._storages}
            for tensor in inner:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in known:
                    known.add(storage.data_ptr())
                    self._storages.append((storage, storage.size()))
            if made.shape != param.shape:
                # Without the rows that pad the parts of the last ranks.
                made = made.as_strided(param.shape, param.spec.tensor_meta.stride, 0)  # type: ignore[union-attr]
            param.unsharded = param.dress(nn.Parameter(made, requires_grad=param.sharded.requires_grad))

    def _copy_out(self, landing: torch.Tensor) -> None:
        """Copy each tensor out of the one message that held them all."""
        by_rank = landing.view(self._world_size, -1)
        start = 0
        for output in self._outputs:
            # Through `data`, so that autograd does not count its views as modified.
            target = output.data.view(torch.uint8).view(self._world_size, -1)
            target.copy_(by_rank[:, start : start + target.shape[1]])
            start += target.shape[1]

    def free_buffer(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)

    def holds(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.device.type != self.device.type:
            return False
        try:
            address = tensor.data_ptr()
        except RuntimeError:
            return False
        return any(
            storage.size() and storage.data_ptr() <= address < storage.data_ptr() + nbytes
            for storage, nbytes in self._storages
        )

    def _error(self, what: str, fix: str) -> UsageError:
        param = self.params[0]
        name = "" if param.form is None else f"{param.form.subclass.name}: "
        who = param.layout.label or param.fqn
        return UsageError(f"{name}{what}", at=f"parameter '{who}'", fix=fix)


@dataclass(slots=True, eq=False, repr=False)
class _Gathering:
    """A gather under way, until the class has made the parameter from it."""

    _pending: Pending
    _complete: Callable[[], None] | None

    def finish(self) -> None:
        self._pending.finish()
        if self._complete is not None:
            self._complete()
            self._complete = None

    def is_over(self) -> bool:
        return self._pending.is_over()


def _text(sizes: Sequence[tuple[torch.Size, torch.dtype]]) -> str:
    return ", ".join(f"{list(size)} {str(dtype).removeprefix('torch.')}" for size, dtype in sizes)

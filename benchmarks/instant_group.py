"""A process group of any size whose collectives return at once, in the time of one copy whatever the size.

torch's fake group copies once for each rank: at 1024 ranks that takes twenty times as long as the engines do.
"""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

_DONE = torch.futures.Future()  # type: ignore[no-untyped-call]
_DONE.set_result(None)


class _Done(dist._Work):
    """The work of a collective that is over."""

    def wait(self, *_: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return _DONE


_WORK = _Done()


class InstantGroup(dist.ProcessGroup):
    """Every rank of the group has the tensors of this one."""

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> Any:
        for output in outputs[0]:
            output.copy_(inputs[0])
        return _WORK

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, options: Any = None) -> Any:
        slices = output.view(-1, source.numel())
        if slices.data_ptr() != source.data_ptr():
            slices[0] = source
        slices[1:] = source
        return _WORK

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, options: Any = None) -> Any:
        output.view(-1).copy_(source.view(-1)[: output.numel()])
        return _WORK

    def allreduce(self, tensors: Any, options: Any = None) -> Any:
        return _WORK

    def recv(self, tensors: Any, source: int, tag: int) -> Any:
        self._received = tensors[0]
        return _WORK

    def send(self, tensors: Any, rank: int, tag: int) -> Any:
        self._received.copy_(tensors[0])  # The engines receive before they send.
        return _WORK

    broadcast = barrier = allreduce
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> Any:
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(hours=1)))

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return "instant"


def _create(_: object, rank: int, world_size: int, timeout: timedelta) -> InstantGroup:
    return InstantGroup(rank, world_size)


def join_instant_group(world_size: int) -> None:
    """Make it the default group of this process, which is rank 0."""
    if "instant" not in dist.Backend.backend_list:
        dist.Backend.register_backend("instant", _create, devices=["cpu"])
    dist.init_process_group("instant", store=FakeStore(), rank=0, world_size=world_size)

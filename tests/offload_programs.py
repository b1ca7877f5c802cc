"""Programs with offloaded models on a device that has places and no values: ``python -m tests.offload_programs``.

Tensors are torch's fake ones: every operation checks where its operands are, and says where its results are, and
computes nothing. So it is found, without a device, where a tensor of the host meets one of the device. The
device is torch's spare one, registered for the whole process, so these run in a process of their own, as one
rank. Prints as JSON what each program raised.
"""

import copy
import gc
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend "fake"
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from composable import (
    CPUOffloadPolicy,
    HandleOptions,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UsageError,
    accelerate_optimizer,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
    get_total_norm,
    iter_full_params,
    load_full_state_dict,
    no_sync,
    unannotate,
    unshard_params,
)

__all__ = ["PROGRAMS"]

DEVICE = "place"


class Net(nn.Module):
    """Two layers and a norm with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.device.type == DEVICE
        y: torch.Tensor = self.last(self.norm(self.first(x)))
        assert y.device.type == DEVICE
        return y


class Places(FakeTensorMode):
    """Fake tensors that can also be pinned, and whose numbers, where someone asks for one, are 1; nothing is true.

    Attributes:
        pinned: Storages that are page-locked, by their id; kept, so that no other one has it.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.pinned: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.is_pinned.default:
            return args[0].untyped_storage()._cdata in self.pinned
        if func is torch.ops.aten._pin_memory.default:
            return self._noted(args[0].clone())
        if func is torch.ops.aten._local_scalar_dense.default:
            return _one(args[0].dtype)
        if func is torch.ops.aten.equal.default:
            assert args[0].device == args[1].device, f"{args[0].device} meets {args[1].device}"
            return False
        result = super().__torch_dispatch__(func, types, args, kwargs)
        return self._noted(result) if (kwargs or {}).get("pin_memory") else result

    def _noted(self, pinned: torch.Tensor) -> torch.Tensor:
        storage = pinned.untyped_storage()
        self.pinned[storage._cdata] = storage
        return pinned


def _one(dtype: torch.dtype) -> bool | int | float:
    return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


class Event:
    """Nothing runs, so nothing is waited for."""

    def synchronize(self) -> None:
        pass


class Stream:
    """A stream of nothing."""

    stream_id = 0

    def __init__(self, priority: int = 0) -> None:
        pass

    def record_event(self) -> Event:
        return Event()

    def wait_event(self, event: Event) -> None:
        pass

    def wait_stream(self, stream: "Stream") -> None:
        pass

    def synchronize(self) -> None:
        pass


class DeviceModule(_DummyBackendModule):
    """What the package and torch ask of ``torch.<device>``."""

    Stream = Stream

    def current_stream(self, device: object = None) -> Stream:
        return Stream()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        yield

    def set_device(self, device: object) -> None:
        pass


def home_of(policy: OffloadPolicy) -> str:
    return "cpu" if policy.is_offloading else DEVICE


def places(model: nn.Module) -> set[str]:
    return {param.to_local().device.type for param in model.parameters()} | {p.device.type for p in model.parameters()}


class Bench:
    """Makes models, outside of the fake mode, which takes plain parameters as they are."""

    def __init__(self, mesh: DeviceMesh, mode: Places, policy: OffloadPolicy) -> None:
        self.mesh = mesh
        self.mode = mode
        self.policy = policy
        self.home = home_of(policy)
        self.models = [self._plain() for _ in range(2)]
        with torch.device("meta"):
            self.on_meta: list[nn.Module] = [Net(), Net()]

    def _plain(self) -> nn.Module:
        model = Net()
        for module in model.modules():
            for name, buffer in module._buffers.items():
                assert buffer is not None
                module._buffers[name] = self.mode.from_tensor(buffer)
        return model

    def shard(self, model: nn.Module | None = None, **options: Any) -> nn.Module:
        found = model or self.models.pop()
        # Ranks do not tell each other of gradients: no message of real bytes.
        options = {"policy": {nn.Linear}, "options": HandleOptions(unused_gradients="zero"), **options}
        fully_shard(found, mesh=self.mesh, offload_policy=self.policy, **options)
        if not found.first.weight.is_meta:
            self.check(found)
        return found

    def check(self, model: nn.Module) -> None:
        """Hold where everything rests."""
        assert places(model) == {self.home}
        assert {buffer.device.type for buffer in model.buffers()} <= {DEVICE, "meta"}
        for handle in fully_shard.state(model)._handles:
            for flat in handle.buffers:
                assert flat.shard.device.type == self.home and not flat.is_away
                assert flat.shard.is_pinned() is self.policy.pins
        for param in model.parameters():
            if param.grad is not None:
                assert param.grad.device.type == param.grad.to_local().device.type == self.home

    def backward(self, model: nn.Module) -> None:
        model(torch.zeros(4, 8)).float().sum().backward()
        self.check(model)
        assert all(param.grad is not None for param in model.parameters())

    def train(self, model: nn.Module, make: type = torch.optim.AdamW, *, flat: bool = False) -> torch.optim.Optimizer:
        optimizer = make(model.parameters(), lr=0.1)
        if flat:
            accelerate_optimizer(optimizer, model)
        for _ in range(2):
            self.backward(model)
            optimizer.step()
            optimizer.zero_grad()
            self.check(model)
        for state in optimizer.state.values():
            moments = [value for value in state.values() if value.dim()]
            assert {value.device.type for value in moments} <= {self.home}
        return optimizer


def train(bench: Bench) -> None:
    bench.train(bench.shard())
    bench.train(bench.shard(policy=None, reshard_after_forward=False), torch.optim.SGD)


def train_in_low_precision(bench: Bench) -> None:
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    bench.train(bench.shard(mp_policy=precision))
    model = bench.shard(mp_policy=MixedPrecisionPolicy(torch.bfloat16, keep_low_precision_grads=True))
    bench.backward(model)
    assert {param.grad.dtype for param in model.parameters()} == {torch.bfloat16}


def accumulate(bench: Bench) -> None:
    model = bench.shard()
    with no_sync(model):
        model(torch.zeros(4, 8)).sum().backward()
    # Unsharded gradients wait on the device, zeros stand for them at rest.
    bench.check(model)
    bench.backward(model)
    bench.backward(model)


def clip(bench: Bench) -> None:
    model = bench.shard()
    bench.backward(model)
    norms = [
        clip_grad_norm_(model.parameters(), 1.0),
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        get_total_norm(list(model.parameters()), torch.inf),
        model.first.weight.norm(),
    ]
    assert {norm.device.type for norm in norms} == {bench.home}
    optimizer = bench.train(model, flat=True)
    bench.backward(model)
    clip_grad_norm_(optimizer, 1.0)


def read_whole(bench: Bench) -> None:
    model = bench.shard()
    assert {param.full_tensor().device.type for param in model.parameters()} == {bench.home}
    assert {value.device.type for value in full_state_dict(model, dst=0).values()} == {"cpu"}
    found = dict(iter_full_params(model))
    assert {found[fqn].device.type for fqn, _ in model.named_parameters()} == {bench.home}
    assert {value.device.type for value in dict(iter_full_params(model, device=DEVICE)).values()} == {DEVICE}
    assert model.first.weight[0].device.type == bench.home


def load_whole(bench: Bench) -> None:
    model = bench.shard()
    full = full_state_dict(model, dst=0)
    load_full_state_dict(model, full)
    model.load_state_dict(model.state_dict())
    bench.check(model)
    model.load_state_dict(full)
    bench.check(model)
    model.load_state_dict({key: value.to(DEVICE) for key, value in full.items()}, assign=True)
    bench.train(model)


def show_unsharded(bench: Bench) -> None:
    model = bench.shard()
    bench.backward(model)
    for options in (
        {},
        {"rank0_only": True},
        {"rank0_only": True, "offload_to_cpu": True, "writeback": False},
    ):
        wanted = "cpu" if "offload_to_cpu" in options else DEVICE
        with unshard_params(model, **options):
            assert {param.device.type for param in model.parameters()} == {wanted}
        bench.check(model)
    low = bench.shard(mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    with unshard_params(low):
        assert {param.device.type for param in low.parameters()} == {DEVICE}
        with torch.no_grad():
            low.last(torch.zeros(4, 8, device=DEVICE))
    bench.train(low)


def copy_and_undo(bench: Bench) -> None:
    model = bench.shard()
    bench.backward(model)
    twin = copy.deepcopy(model)
    bench.check(twin)
    bench.train(twin)
    with no_sync(model):
        model(torch.zeros(4, 8)).sum().backward()
    unannotate(model)
    assert {param.device.type for param in model.parameters()} == {bench.home}
    assert {param.grad.device.type for param in model.parameters()} == {bench.home}


def begin_on_meta(bench: Bench) -> None:
    model = bench.shard(bench.on_meta.pop())
    model.to_empty(device=bench.home)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    bench.train(model)


def load_on_meta(bench: Bench) -> None:
    full = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in bench.models[0].state_dict().items()}
    given = {key: value.to(DEVICE) for key, value in full.items()}
    model = bench.shard(bench.on_meta.pop())
    model.load_state_dict(given, assign=True)
    bench.train(model)
    model = bench.shard(bench.on_meta.pop())
    model.load_state_dict(given)
    bench.train(model)


def make_values_by_a_function(bench: Bench) -> None:
    def fill(module: nn.Module) -> None:
        module.to_empty(device=DEVICE, recurse=False)
        module.reset_parameters()

    bench.train(bench.shard(bench.on_meta.pop(), param_init_fn=fill))


def move_to_the_device(bench: Bench) -> None:
    model = bench.shard()
    bench.backward(model)
    model.to(DEVICE)
    if bench.policy.is_offloading:
        with pytest.raises(UsageError) as error:
            model(torch.zeros(4, 8))
        assert f"parameters are on {DEVICE}:0, and offload_policy keeps them on cpu" in str(error.value)
        assert "fix: model.to('cpu'), then move its buffers to the device" in str(error.value)
        model.to("cpu")
        for module in model.modules():
            for name, buffer in module._buffers.items():
                assert buffer is not None
                module._buffers[name] = buffer.to(DEVICE)
    bench.train(model)


PROGRAMS: dict[str, Callable[[Bench], None]] = {
    program.__name__: program
    for program in (
        train,
        train_in_low_precision,
        accumulate,
        clip,
        read_whole,
        load_whole,
        show_unsharded,
        copy_and_undo,
        begin_on_meta,
        load_on_meta,
        make_values_by_a_function,
        move_to_the_device,
    )
}
POLICIES = {
    "on the device": OffloadPolicy(),
    "pinned": CPUOffloadPolicy(),
    "pageable": CPUOffloadPolicy(pin_memory=False),
}


def main() -> None:
    warnings.simplefilter("ignore")
    # What torch's fake tensors on this device leave behind may crash where it is collected.
    gc.disable()
    _setup_privateuseone_for_python_backend(DEVICE, DeviceModule())
    dist.init_process_group(f"cpu:fake,{DEVICE}:fake", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(DEVICE, (1,))
    found = {}
    with redirect_stdout(sys.stderr):
        for name, program in PROGRAMS.items():
            for label, policy in POLICIES.items():
                mode = Places()
                bench = Bench(mesh, mode, policy)
                try:
                    with mode:
                        program(bench)
                    found[f"{name}, {label}"] = ""
                except Exception:
                    found[f"{name}, {label}"] = traceback.format_exc()
    print(json.dumps(found), flush=True)
    os._exit(0)  # as above: the end of the interpreter collects


if __name__ == "__main__":
    main()

"""Buffers lent in low precision keep all that a forward writes to them, however it writes, and nothing else.

The oracle is one process whose buffers are in low precision for good.
"""

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint as run_with_checkpoint

from composable import MixedPrecisionPolicy, fully_shard, replicate
from tests.low_precision import BF16, FP16, FP32
from tests.models import seeded
from tests.world import run_threads

DIM, BATCH = 3, 4
Module = Callable[[], nn.Module]


class Writer(nn.Module):
    """Writes to its buffers in one of many ways.

    Args:
        write: How: a function of the module and a vector of its input's dtype.
    """

    def __init__(self, write: Callable[[Any, torch.Tensor], object]) -> None:
        super().__init__()
        self.write = write
        self.weight = nn.Parameter(torch.ones(DIM))
        for name in ("mean", "other"):
            self.register_buffer(name, torch.linspace(0.1, 1.3, DIM))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x * self.weight + self.other
        if self.training:
            with torch.no_grad():
                self.write(self, x.mean(0))
        return out


def assign(module: Any, x: torch.Tensor) -> None:
    module.mean = module.mean * 0.5 + x.to(module.mean.dtype)


def assign_both(module: Any, x: torch.Tensor) -> None:
    module.mean = module.cache = x.to(module.mean.dtype)


def swap(module: Any, x: torch.Tensor) -> None:
    module.mean.add_(x)
    module.mean, module.cache = module.cache, module.mean


def set_data(module: Any, x: torch.Tensor) -> None:
    module.mean.data = module.mean.data * 0.5 + x.to(module.mean.dtype)


def resize(module: Any, x: torch.Tensor) -> None:
    module.cache.resize_(len(x) + 1)
    module.cache[:-1].copy_(x)
    module.cache[-1] = 7


def become_nan(module: Any, x: torch.Tensor) -> None:
    module.mean.data[1] = torch.nan


WRITES: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "add_": lambda module, x: module.mean.add_(x),
    "mul_ of .data": lambda module, x: module.mean.data.mul_(0.7).add_(x),
    "copy_": lambda module, x: module.mean.copy_(x),
    "copy_ to .data": lambda module, x: module.mean.data.copy_(x),
    "one element": lambda module, x: module.mean[1:2].copy_(x[1:2]),
    "one element of .data": lambda module, x: module.mean.data[2].fill_(x[2]),
    "foreach": lambda module, x: torch._foreach_mul_([module.mean, module.cache], 0.7),
    "out=": lambda module, x: torch.add(module.mean, 1, out=module.mean),
    "lerp_": lambda module, x: module.mean.lerp_(x.to(module.mean.dtype), 0.1),
    "integers": lambda module, x: module.calls.add_(1),
    "nothing": lambda module, x: None,
    "the same values": lambda module, x: module.mean.mul_(1),
    "batch_norm": lambda module, x: nn.functional.batch_norm(
        torch.stack([x, x + 1]).to(module.mean.dtype), module.mean, module.other, training=True
    ),
    "nan": become_nan,
    "assigned": assign,
    "assigned twice": assign_both,
    "swapped": swap,
    ".data assigned": set_data,
    "resized": resize,
}


def input_shape(name: str) -> tuple[int, ...]:
    """Return the shape that a class of ``torch.nn`` takes, by the number of dims in its name."""
    dims = int(name[-2]) if name[-1] == "d" else 2
    return (BATCH, DIM, *(4,) * (dims if dims > 1 or "Instance" in name else 0))


NORMS = [f"{kind}Norm{dims}d" for kind in ("Batch", "Instance") for dims in (1, 2, 3)]
LAZY = [f"Lazy{name}" for name in NORMS]
# Their buffers are given by users, and read.
READERS = {
    *("BCELoss", "BCEWithLogitsLoss", "CrossEntropyLoss", "LinearCrossEntropyLoss", "NLLLoss", "NLLLoss2d"),
    *("MultiLabelSoftMarginLoss", "MultiMarginLoss", "FractionalMaxPool2d", "FractionalMaxPool3d"),
}


def has_buffers(kind: Any) -> bool:
    if not (inspect.isclass(kind) and issubclass(kind, nn.Module)) or kind is nn.Module:
        return False
    bases = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    names = (name for base in bases if "__init__" in vars(base) for name in base.__init__.__code__.co_names)
    return any(name in ("register_buffer", "UninitializedBuffer") for name in names)


def test_these_are_all_classes_of_torch_with_buffers() -> None:
    found = {name for name, kind in vars(nn).items() if has_buffers(kind)}
    # torch 2.11 has not all of them.
    assert found == {name for name in (*NORMS, *LAZY, "SyncBatchNorm", *READERS) if hasattr(nn, name)}


def make_norm(name: str, **options: Any) -> nn.Module:
    kind: Any = getattr(nn, name)
    dims = () if name in LAZY else (DIM,)
    norm: nn.Module = kind(*dims, track_running_stats=True, **options)
    return norm


def make_spectral() -> nn.Module:
    return parametrizations.spectral_norm(nn.Linear(DIM, DIM))


def make_old_spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(DIM, DIM))


class Observing(nn.Module):
    """Passes on what a part sees."""

    def __init__(self, observer: nn.Module) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.observer = observer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.observer(x) * self.weight


OBSERVERS: dict[str, Module] = {
    "MinMax": quantization.MinMaxObserver,
    "MovingAverageMinMax": quantization.MovingAverageMinMaxObserver,
    "PerChannelMinMax": quantization.PerChannelMinMaxObserver,
    "MovingAveragePerChannelMinMax": quantization.MovingAveragePerChannelMinMaxObserver,
    "Histogram": quantization.HistogramObserver,
    "FakeQuantize": quantization.FakeQuantize,
    "FusedMovingAvgObsFakeQuantize": quantization.FusedMovingAvgObsFakeQuantize,
}

MAKERS: dict[str, tuple[Module, tuple[int, ...]]] = {
    **{f"a writer: {how}": (lambda write=write: Writer(write), (BATCH, DIM)) for how, write in WRITES.items()},
    **{name: (lambda name=name: make_norm(name), input_shape(name)) for name in NORMS},
    **{
        f"{name} over all": (lambda name=name: make_norm(name, momentum=None), input_shape(name))
        for name in NORMS
        if "Batch" in name
    },
    **{
        f"{name} without weights": (lambda name=name: make_norm(name, affine=False), input_shape(name)) for name in LAZY
    },
    "spectral_norm": (make_spectral, (BATCH, DIM)),
    "the older spectral_norm": (make_old_spectral, (BATCH, DIM)),
    **{name: (lambda make=make: Observing(make()), (BATCH, DIM)) for name, make in OBSERVERS.items()},
}


class Scaled(nn.Module):
    """Has a weight, and runs a part that may have none, again in backward if asked to."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.part = part
        self.reentrant: bool | None = None
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        if self.reentrant is None:
            x = self.part(x)
        else:
            x = run_with_checkpoint(self.part, x, use_reentrant=self.reentrant, preserve_rng_state=False)
        if self.fails:
            raise ValueError("after the buffers were written")
        return x


def low_precision(low: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Keep what has floating-point values in ``dtype`` for good, whatever has a shape already."""
    for module in low.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or nn.parameter.is_lazy(tensor):
                    continue
                if tensor.is_floating_point() and tensor.dtype is not dtype:
                    tensors[name] = (
                        nn.Parameter(tensor.data.to(dtype)) if isinstance(tensor, nn.Parameter) else tensor.to(dtype)
                    )
    return low


def act(model: Any, kind: str, x: torch.Tensor) -> str:
    """Do one thing that scripts do with a model; returns the kind of error, or nothing."""
    model.train(kind != "eval")
    model.reentrant = {"reentrant": True, "checkpoint": False}.get(kind)
    model.fails = kind == "error"
    try:
        if kind == "inference":
            with torch.inference_mode():
                model(x)
        elif kind in ("eval", "forward", "error"):
            model(x)
        elif kind == "two forwards":
            (model(x) + model(2 * x)).sum().backward()
        else:
            model(x).sum().backward()
    except Exception as error:  # the same as of the oracle
        return type(error).__name__
    return ""


ACTIONS = ("forward", "eval", "error", "two forwards", "backward", "checkpoint", "reentrant", "inference")


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = model.named_buffers(remove_duplicate=False)
    return {fqn: buffer.clone() for fqn, buffer in found if not nn.parameter.is_lazy(buffer)}


def annotate(model: nn.Module, how: str, dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(dtype, buffer_dtype=dtype)
    if "inner" in how and any(param.requires_grad for param in model.part.parameters()):  # type: ignore[union-attr]
        (replicate if "replicate" in how else fully_shard)(model.part, mp_policy=policy)  # type: ignore[arg-type]
    if "replicate" in how:
        replicate(model, mp_policy=policy, find_unused_parameters=True)
    else:
        fully_shard(model, mp_policy=policy)


HOWS = ("fully_shard", "replicate", "fully_shard inner", "replicate inner")


def follow(name: str, how: str, dtype: torch.dtype, actions: Sequence[str]) -> None:
    make, shape = MAKERS[name]
    model = Scaled(seeded(make, 0))
    low = low_precision(Scaled(seeded(make, 0)), dtype)
    expected = buffers_of(model)
    annotate(model, how, dtype)
    generator = torch.Generator().manual_seed(0)
    for action in actions:
        x = torch.randn(*shape, generator=generator)
        before = buffers_of(low)
        assert act(model, action, x) == act(low, action, x.to(dtype)), action
        found = buffers_of(model)
        low_precision(low, dtype)  # What has a shape now.
        for fqn, now in buffers_of(low).items():
            if fqn not in expected:  # It has a shape now.
                expected[fqn] = found[fqn]
                assert found[fqn].dtype is FP32
            elif before[fqn].shape != now.shape:
                expected[fqn] = now.to(expected[fqn].dtype)
            else:
                # What nobody wrote to keeps its precision.
                expected[fqn] = torch.where(now == before[fqn], expected[fqn], now.to(expected[fqn].dtype))
            torch.testing.assert_close(found[fqn], expected[fqn], rtol=0, atol=0, equal_nan=True, msg=f"{action} {fqn}")
        assert found.keys() == expected.keys()


def follow_all(cases: Sequence[tuple[str, str, torch.dtype, Sequence[str]]]) -> list[str]:
    wrong = []
    for case in cases:
        try:
            follow(*case)
        except Exception as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}")
    return wrong


@pytest.mark.parametrize("how", HOWS)
def test_what_a_forward_writes_is_kept_and_nothing_else_is_changed(how: str) -> None:
    actions = ["forward", "forward", "eval", "backward"]
    # `replicate` refuses buffers that have no shape yet.
    cases = [(name, how, BF16, actions) for name in MAKERS if "Lazy" not in name or "replicate" not in how]
    assert run_threads(follow_all, 2, cases) == [[], []]


def random_case(seed: int) -> tuple[str, str, torch.dtype, list[str]]:
    choose = random.Random(seed)
    name = choose.choice([name for name in MAKERS if "Lazy" not in name])
    return name, choose.choice(HOWS), choose.choice([BF16, FP16]), choose.choices(ACTIONS, k=6)


def test_random_steps_leave_the_buffers_of_one_process() -> None:
    assert run_threads(follow_all, 2, [random_case(seed) for seed in range(50)]) == [[], []]

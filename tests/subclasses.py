"""Parameters of tensor subclasses, as libraries for low precision have them, and models that use them.

``Int8Weight`` is like torchao's float8 weights: rows in full precision that its class gathers in 8 bits, scaled by
the largest value of all ranks. ``Params4bit`` is like that of bitsandbytes: packed bytes with attributes beside them.
``AffineWeight`` is like torchao's quantised weights: tensors inside of a tensor inside of a tensor. ``Marked`` has
attributes and nothing else.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from tests.models import random_input, seeded

aten = torch.ops.aten
BLOCK = 4


class Int8Weight(torch.Tensor):
    """Values in full precision, of which ranks gather one byte each."""

    # What torch's fully_shard does to make a shard of it.
    KEPT = (
        aten.empty_like.default,
        aten.new_zeros.default,
        aten.slice.Tensor,
        aten.copy_.default,
        aten.view.default,
        aten.as_strided.default,
        aten._to_copy.default,
        aten.split.Tensor,
        aten.clone.default,
        aten.detach.default,
    )
    calls: list[str] = []  # noqa: RUF012  # what the class was asked for, in this process

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "Int8Weight":
        return torch.Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), dtype=values.dtype, device=values.device
        )

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self._values})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_values"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, context: None, size: Any, stride: Any) -> "Int8Weight":
        return cls(tensors["_values"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Int8Weight, lambda one: one._values, (args, kwargs or {}))
        result = op(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, cls, result) if op in cls.KEPT else result

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert isinstance(module, nn.Linear)
        largest = self._values.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group())
        scale = largest.clamp(min=1e-12) / 127
        return ((self._values / scale).round().to(torch.int8),), (scale,)

    def fsdp_post_all_gather(
        self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        (data,), (scale,) = gathered, metadata
        if out is not None:
            assert out._data.untyped_storage().data_ptr() == data.untyped_storage().data_ptr()
            out._scale = scale
            return None
        return Int8Whole(data, scale, param_dtype), (data,)


class TwoPartWeight(Int8Weight):
    """The older form of the protocol, and two tensors of different sizes and dtypes for each rank."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        """Give the values in two halves: what a 16-bit float has of them, and the rest."""
        coarse = self._values.to(torch.bfloat16)
        return (coarse, (self._values - coarse)), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        coarse, rest = gathered
        whole = coarse.to(param_dtype) + rest.to(param_dtype)
        if out is not None:
            out.data.copy_(whole[: out.shape[0]])
            return None
        return whole, (whole,)


class TurnedWeight(Int8Weight):
    """Rows for forward, columns for backward, in as many elements: as weights of TransformerEngine in MXFP8."""

    phases: list[str] = []  # noqa: RUF012  # in which it was asked, in this process

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        state = module._get_fsdp_state()._fsdp_param_group
        is_backward = state._reshard_after_forward and state._training_state == TrainingState.PRE_BACKWARD
        self.phases.append(state._training_state.name if hasattr(state._training_state, "name") else state.phase)
        rows, columns = self._values.shape
        return (self._values.t().contiguous() if is_backward else self._values,), (is_backward, rows, columns)

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        (sent,), (is_backward, rows, columns) = gathered, metadata
        assert sent.shape[1] == (rows if is_backward else columns)
        whole = sent.view(-1, columns, rows).transpose(1, 2).reshape(-1, columns) if is_backward else sent
        if out is None:
            whole = whole.clone()
            return whole, (whole,)
        out.data.copy_(whole)
        return None


class ScaledWeight(Int8Weight):
    """Scaled by what is written to the shard between steps, as torchao's float8 weights by a scale for all of them."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values)
        self.scale: torch.Tensor | None = None

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        return (self._values,), self.scale

    def fsdp_post_all_gather(self, gathered: Any, scale: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        whole = gathered[0] if scale is None else gathered[0] * scale
        if out is not None:
            out.data.copy_(whole)
            return None
        whole = whole.clone()
        return whole, (whole,)


class Int8Whole(torch.Tensor):
    """Gathered bytes with their scale; everything that computes sees ``data * scale``."""

    KEPT = (aten.detach.default, aten.view.default, aten.as_strided.default, aten.t.default, aten.alias.default)

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> "Int8Whole":
        return torch.Tensor._make_wrapper_subclass(
            cls, data.size(), strides=data.stride(), dtype=dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> None:
        self._data = data
        self._scale = scale

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Int8Whole({self._data} * {self._scale})"

    def values(self) -> torch.Tensor:  # type: ignore[override]
        return self._data.to(self.dtype) * self._scale.to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in cls.KEPT:
            whole = args[0]
            return Int8Whole(op(whole._data, *args[1:]), whole._scale, whole.dtype)
        args, kwargs = pytree.tree_map_only(Int8Whole, lambda one: one.values(), (args, kwargs or {}))
        return op(*args, **kwargs)


class HalfState(torch.Tensor):
    """Optimizer state that looks like float32 and is kept in 16 bits, as torchao keeps it in 8."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> "HalfState":
        return torch.Tensor._make_wrapper_subclass(cls, codes.size(), dtype=torch.float32, device=codes.device)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"HalfState({self.codes})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes"], None

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op in (aten.detach.default, aten.view.default):
            return HalfState(op(args[0].codes, *args[1:]))
        target = args[0].codes if op is aten.copy_.default and isinstance(args[0], HalfState) else None
        args, kwargs = pytree.tree_map_only(HalfState, lambda one: one.codes.float(), (args, kwargs or {}))
        return op(*args, **kwargs) if target is None else (target.copy_(args[1]), args[0])[1]


class MeanSquares(torch.optim.Optimizer):
    """An optimizer that makes such state with the placements of its parameters, and counts under numbers."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            if param.grad is None:
                continue
            if "squares" not in self.state[param]:
                codes = torch.zeros(param.to_local().shape, dtype=torch.bfloat16)
                made = DTensor.from_local(HalfState(codes), param.device_mesh, param.placements)
                self.state[param]["squares"] = made
            self.state[param].setdefault(0, {0.5: 0})[0.5] += 1
            squares = self.state[param]["squares"]
            squares.copy_(squares.lerp(param.grad.square(), 0.5))
            with torch.no_grad():
                param.addcdiv_(param.grad, squares.sqrt() + 1e-3, value=-self.param_groups[0]["lr"])


class QuantState:
    """What the packed bytes of a ``Params4bit`` mean."""

    def __init__(self, absmax: torch.Tensor, shape: torch.Size) -> None:
        self.absmax = absmax
        self.shape = shape

    def as_dict(self) -> dict[str, torch.Tensor]:
        return {"absmax": self.absmax}


class Params4bit(nn.Parameter):
    """Packed bytes, two values in each, and the largest value of each block beside them."""

    def __new__(cls, data: torch.Tensor, quant_state: Any = None, module: Any = None) -> "Params4bit":
        self = torch.Tensor._make_subclass(cls, data, False)
        self.quant_state = quant_state
        self.module = module
        return self

    def to(self, *args: Any, **kwargs: Any) -> "Params4bit":  # as that of bitsandbytes, which quantises on the way
        return Params4bit(super().to(*args, **kwargs), self.quant_state, self.module)

    @staticmethod
    def quantised(values: torch.Tensor, storage: torch.dtype, module: Any) -> "Params4bit":
        blocks = F.pad(values.reshape(-1), (0, -values.numel() % (2 * BLOCK))).view(-1, BLOCK)
        absmax = blocks.abs().amax(1).clamp(min=1e-12)
        codes = ((blocks / absmax[:, None] + 1) * 7.5).round().to(torch.uint8).view(-1, 2)
        packed = (codes[:, 0] * 16 + codes[:, 1]).view(storage).view(-1, 1)
        return Params4bit(packed, QuantState(absmax, values.shape), module)


class Linear4bit(nn.Module):
    """A linear layer over such a weight."""

    def __init__(self, linear: nn.Linear, storage: torch.dtype = torch.uint8) -> None:
        super().__init__()
        self.weight = Params4bit.quantised(linear.weight.detach(), storage, self)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, value in self.weight.quant_state.as_dict().items():
            destination[f"{prefix}weight.{name}"] = value if keep_vars else value.detach()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.weight.quant_state.absmax.copy_(state_dict.pop(f"{prefix}weight.absmax"))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        assert isinstance(weight, Params4bit)
        assert weight.module is self
        state = weight.quant_state
        packed = weight.data.view(-1).view(torch.uint8)
        codes = torch.stack([packed >> 4, packed & 15], 1).view(-1, BLOCK).to(x.dtype)
        values = (codes / 7.5 - 1) * state.absmax[:, None].to(x.dtype)
        return F.linear(x, values.reshape(-1)[: state.shape.numel()].view(state.shape))


class PlainImpl(torch.Tensor):
    """Integers with a scale and a zero point for each row; knows nothing of what it stands for."""

    @staticmethod
    def __new__(cls, int_data: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> "PlainImpl":
        return torch.Tensor._make_wrapper_subclass(cls, int_data.size(), dtype=int_data.dtype, device=int_data.device)

    def __init__(self, int_data: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor) -> None:
        self.int_data = int_data
        self.scale = scale
        self.zero_point = zero_point

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PlainImpl({self.int_data})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["int_data", "scale", "zero_point"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, context: None, size: Any, stride: Any) -> "PlainImpl":
        return PlainImpl(tensors["int_data"], tensors["scale"], tensors["zero_point"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(op)


class AffineWeight(torch.Tensor):
    """What the integers of ``impl`` stand for, two of four bits in each byte."""

    @staticmethod
    def __new__(cls, impl: PlainImpl, size: Any, dtype: torch.dtype) -> "AffineWeight":
        return torch.Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=impl.device)

    def __init__(self, impl: PlainImpl, size: Any, dtype: torch.dtype) -> None:
        self.impl = impl

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"AffineWeight({self.impl})"

    @staticmethod
    def quantised(values: torch.Tensor) -> "AffineWeight":
        low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        scale = (high - low).clamp(min=1e-12) / 15
        codes = ((F.pad(values, (0, values.shape[1] % 2)) - low) / scale).round().clamp(0, 15).to(torch.uint8)
        return AffineWeight(PlainImpl(codes[:, ::2] * 16 + codes[:, 1::2], scale, low), values.shape, values.dtype)

    def values(self) -> torch.Tensor:  # type: ignore[override]
        impl = self.impl
        codes = torch.stack([impl.int_data >> 4, impl.int_data & 15], 2).flatten(1)[:, : self.shape[1]]
        return codes.to(self.dtype) * impl.scale + impl.zero_point

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["impl"], self.dtype

    @staticmethod
    def __tensor_unflatten__(tensors: Any, dtype: torch.dtype, size: Any, stride: Any) -> "AffineWeight":
        return AffineWeight(tensors["impl"], size, dtype)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is aten.detach.default:
            return AffineWeight(args[0].impl, args[0].size(), args[0].dtype)
        args, kwargs = pytree.tree_map_only(AffineWeight, lambda one: one.values(), (args, kwargs or {}))
        return op(*args, **kwargs)


class Marked(nn.Parameter):
    """A parameter with names for its dims."""

    axes: tuple[str, ...]

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, *, axes: tuple[str, ...] = ()) -> "Marked":
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.axes = axes
        return self

    @property
    def is_matrix(self) -> bool:
        return len(self.axes) == 2


class Adapted(nn.Module):
    """A quantised, frozen layer with a trained adapter beside it."""

    def __init__(self, base: nn.Module, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


class AffineLinear(nn.Module):
    """A linear layer over an ``AffineWeight``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(AffineWeight.quantised(linear.weight.detach()), requires_grad=False)
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, AffineWeight)
        return F.linear(x, self.weight.values().to(x.dtype), self.bias)


class Quantised(nn.Module):
    """Three quantised layers with adapters: bytes, bytes in a floating-point dtype, and a tensor inside a tensor."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        linears = [nn.Linear(width, width) for _ in range(3)]
        bases = [Linear4bit(linears[0]), Linear4bit(linears[1], torch.bfloat16), AffineLinear(linears[2])]
        self.layers = nn.ModuleList(Adapted(base, width) for base in bases)
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        result: torch.Tensor = self.head(x)
        return result


def int8_model(shapes: list[tuple[int, int]], kind: type = Int8Weight, seed: int = 0) -> nn.Sequential:
    """Return linear layers of (outputs, inputs) whose weights their class gathers."""
    model = seeded(lambda: nn.Sequential(*(nn.Linear(inputs, outputs) for outputs, inputs in shapes)), seed)
    for linear in model:
        linear.weight = nn.Parameter(kind(linear.weight.detach()))
    return model


def batch(step: int, rank: int, width: int) -> torch.Tensor:
    return random_input(1000 * step + rank, 4, width)

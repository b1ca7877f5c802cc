"""Optimizer steps on plain local tensors.

During ``step`` torch's own code runs on a *stand-in*, an optimizer of the same class that shares options, and whose
parameters and state are this rank's local tensors, in the same memory. The optimizer itself is never changed for the
time of a step, so there is nothing to restore after an exception.
"""

from collections import defaultdict
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from composable.dtensor import RaggedDTensor, memory_of, note_written, slice_full
from composable.engine import ELEMENT_WISE
from composable.ground.torch_private import DisableTorchFunction
from composable.optim.rebind import after_closure, cut_state, is_per_element

State: TypeAlias = defaultdict[Any, dict[Any, Any]]

_grad_of: Any = RaggedDTensor.grad.fget


def local_grad(param: RaggedDTensor) -> torch.Tensor | None:
    """Return this rank's piece of the gradient of ``param``, in the shape of its local tensor."""
    with DisableTorchFunction():
        grad = _grad_of(param)
    if isinstance(grad, DTensor) and type(grad) is not RaggedDTensor:
        # After operations that gathered, autograd leaves the whole gradient on every rank.
        return slice_full(grad._local_tensor, param._spec.layout)
    return getattr(grad, "_local_tensor", None)


def lend_grad(tensor: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Make ``grad``, of the shape of ``tensor``, its gradient."""
    if grad is not None and tensor.grad_dtype != grad.dtype:
        tensor.grad_dtype = grad.dtype  # a policy may keep it in the dtype of the reduction
    tensor.grad = grad


def state_like(param: RaggedDTensor, values: torch.Tensor) -> RaggedDTensor:
    """Return state of a parameter, ``values`` of the shape of its local tensor, as a tensor that is cut like it."""
    return RaggedDTensor.wrap(values, param._spec.cast(values.dtype))


class LentPieces:
    """The local tensors of an optimizer's sharded parameters, with gradients and ``state``, lent to one step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.state: State = defaultdict(dict)
        self._lists = [list(group["params"]) for group in optimizer.param_groups]
        self._local_of = {param: memory_of(param._local_tensor) for params in self._lists for param in params}
        for param, local in self._local_of.items():
            lend_grad(local, local_grad(param))
            if param in optimizer.state:
                entry = optimizer.state[param]
                cut_state(entry, param)
                self.state[local] = {key: getattr(one, "_local_tensor", one) for key, one in entry.items()}

    def params_of(self, group: int) -> list[list[torch.Tensor]]:
        """Return what the step sees of a param group, tensors of any shapes, in lists that it treats one by one."""
        return [[self._local_of[param] for param in self._lists[group]]]

    def take_back(self) -> None:
        """Take the gradients away."""
        for local in self._local_of.values():
            local.grad = None

    def end(self, state: State) -> None:
        """Take the gradients away, and put into ``state``, the optimizer's own, what the step made or replaced."""
        note_written(list(self._local_of.values()))
        self.take_back()
        for param, local in self._local_of.items():
            for key, value in self.state.get(local, {}).items():
                own = state[param].get(key)
                if getattr(own, "_local_tensor", own) is not value:
                    is_cut = is_per_element(key, value, local.shape)
                    state[param][key] = state_like(param, value) if is_cut else value


class LocalStep:
    """The steps of an optimizer on local tensors, each from ``begin`` to ``end``; its class is element-wise."""

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        groups = property(lambda _: self._local_groups())
        self._shell: Any = object.__new__(type(f"Local{kind.__name__}", (kind,), {"param_groups": groups}))
        self._optimizer: Any = None
        self._groups: list[dict[str, Any]] | None = None
        self._lent: LentPieces | None = None

    @staticmethod
    def takes(optimizer: torch.optim.Optimizer) -> bool:
        """Say whether an optimizer is element-wise, and all of its current parameters are sharded."""
        params = (param for group in optimizer.param_groups for param in group["params"])
        return type(optimizer) in ELEMENT_WISE and all(type(param) is RaggedDTensor for param in params)

    def begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Begin a step; return the arguments of torch's ``step``, with the stand-in in place of ``optimizer``."""
        self.end()
        self._optimizer = optimizer
        # Copied anew in each step: users set attributes on optimizers, and scalers set DTensors on fused ones.
        vars(self._shell).update(
            {
                name: value._local_tensor if isinstance(value, DTensor) else value
                for name, value in vars(optimizer).items()
            }
        )
        return after_closure((self._shell, *args[1:]), kwargs, self._forget_groups)

    def _forget_groups(self) -> None:
        self._groups = None

    def _local_groups(self) -> list[dict[str, Any]]:
        """Return the groups, made at the first read: hooks before a step, and closures, set gradients and options."""
        if self._groups is None:
            lent = self._lent = self._lend(self._optimizer)
            self._shell.state = lent.state
            self._groups = [
                {**group, "params": params}
                for index, group in enumerate(self._optimizer.param_groups)
                for params in lent.params_of(index)
            ]
        return self._groups

    def _lend(self, optimizer: torch.optim.Optimizer) -> LentPieces:
        return LentPieces(optimizer)

    def end(self) -> None:
        """Take the gradients away and give the optimizer the state of the step; do nothing if no step has begun."""
        lent, optimizer = self._lent, self._optimizer
        self._lent = self._optimizer = self._groups = None
        vars(self._shell).clear()
        if lent is not None:
            lent.end(optimizer.state)

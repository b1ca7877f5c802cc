"""What stands in for a cluster while a script is rehearsed: devices, groups, and values that nobody computes.

Tensors of the device that the script names are fake tensors of the CPU, with a mark: no build of torch for CPUs makes
fake tensors of CUDA that work. All is done to the process of one rehearsed rank, which ends with it.
"""

import functools
import math
import operator
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from composable.engine import RestingPlace, make_resting_places_by
from composable.errors import ConfigError, UsageError
from composable.ground.contract import get_registry
from composable.ground.frames import in_backward, outwards
from composable.ground.names import dtype_text
from composable.ground.torch_private import (
    DEVICE_OF,
    FakeTensor,
    let_optimizers_use_lists,
    nn_functions,
    parse_to,
    tree_map,
)
from composable.ground.unfilled import WithoutValues, tell_without_values
from composable.rehearsal.ledger import CALLERS, LIBRARIES, LedgerLine, line_of, users_line
from composable.rehearsal.rehearsed_function import (
    ON_HOST,
    StepMemory,
    device_in_kernels,
    operands,
    with_memory,
    with_values,
)

# Above this, the data of a script is fake too, in what it computes of it outside of its model.
_MOST_REAL_NUMEL = 2**25
# What a comparison of fake tensors gives: each counts as 1, if it is not itself the result of one.
_COMPARED: dict[str, Callable[..., Any]] = {
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **dict.fromkeys(("isnan", "isinf"), lambda _: False),
    **dict.fromkeys(("logical_not", "bitwise_not"), lambda a: not a),
    **dict.fromkeys(("logical_and", "bitwise_and", "mul"), lambda a, b: a and b),
    **dict.fromkeys(("logical_or", "bitwise_or"), lambda a, b: a or b),
}
# These give what they are given.
_CARRIED = frozenset(
    "any all max min amax amin sum clone to _to_copy detach view alias select squeeze unsqueeze expand unbind".split()
)

# These may read tensors of one place and write those of another; indices and lengths may lie on the host.
_COPIES = frozenset({"copy_", "_foreach_copy_"})
_ANYWHERE = _COPIES | set("index index_put index_put_ _index_put_impl_ _pack_padded_sequence _ctc_loss".split())
# These take floating-point tensors of one dtype; norms also parameters that are wider than their input.
_OF_ONE_DTYPE = frozenset("mm addmm bmm baddbmm addbmm mv addmv dot linear native_layer_norm native_group_norm".split())

# Functions of torch.cuda and torch.accelerator that nobody misses.
_DO_NOTHING = """
    _dump_snapshot _record_memory_history empty_cache empty_host_cache init ipc_collect manual_seed manual_seed_all mark
    range_end range_pop range_push reset_accumulated_host_memory_stats reset_accumulated_memory_stats
    reset_max_memory_allocated reset_max_memory_cached reset_peak_host_memory_stats reset_peak_memory_stats seed
    seed_all set_per_process_memory_fraction set_rng_state set_rng_state_all set_stream set_sync_debug_mode start stop
    synchronize
""".split()

# ``SyncBatchNorm`` refuses the CPU, and asks whether work is captured before it drops ranks that have no samples.
_BATCH_NORM, _ITS_FUNCTION = (one.__file__ for one in (nn.modules.batchnorm, nn_functions))

_HERE = str(Path(__file__).parent)
_STATS = (("current", "now"), ("peak", "peak"))


@functools.cache
def _work() -> dict[str, Callable[..., int]]:
    """Return what counts the floating-point operations of operations, by name; imported for rehearsals alone."""
    from torch.utils.flop_counter import flop_registry

    return {one.__name__: count for one, count in flop_registry.items()}


class ScriptEnds(BaseException):
    """Ends a script after the steps that were asked for."""


class RehearsedRank(StepMemory):
    """One rank: the memory of its device, its ledger, and what it answers for the values of fake tensors.

    Attributes:
        device: The type of the device whose memory counts; empty: that of the host.
        budget: The bytes of that memory; 0: no limit.
        steps: After how many optimizer steps the script ends; 0: at its own end.
        lines: The ledger.
        notes: What was left out, or answered, and how often.
        at_rest: The bytes between two steps.
        host_at_rest, host_peak: Those of the host then, and the most of them at one time.
        overrun: When the budget was first exceeded: bytes, place, the user's line and its text.
        steps_here: The parameters of the optimizer that steps, or was the last to step, lie on the device.
        work: The floating-point operations of matrix products and convolutions: "forward", and "again" in a backward
            that runs a forward again.
    """

    def __init__(self, device: str, budget: int, steps: int, *, is_strict: bool) -> None:
        super().__init__()
        self.device, self.budget, self.steps, self._is_strict = device, budget, steps, is_strict
        self.lines: list[LedgerLine] = []
        self.notes: Counter[str] = Counter()
        self.at_rest = self.host_at_rest = self.host_peak = 0
        self.overrun: tuple[int, str, str, str] | None = None
        self.work: Counter[str] = Counter()
        self.steps_here = True
        self.backend = ""  # That of the group of all.
        self.local, self.chosen = 0, 0  # Its number on its host; the device that the script has chosen there.
        self.numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # In the order of their first parameters.
        self._making, self._names_places = "", False
        self._stepped: Counter[int] = Counter()
        self.unfilled = Unfilled()
        tell_without_values(self.unfilled)

    @property
    def steps_done(self) -> int:
        """Optimizer steps so far; with several optimizers, of the one with most."""
        return max(self._stepped.values(), default=0)

    @property
    def tells_places(self) -> bool:
        """The script has devices, and its ranks talk on them."""
        return bool(self.device) and self._names_places and self.backend != "gloo"

    def step_begins(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        params = (param for group in optimizer.param_groups for param in group["params"])
        self.steps_here = any(map(self.is_here, params))
        if self.steps and self._stepped[id(optimizer)] >= self.steps:
            raise ScriptEnds

    def step_ends(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._stepped[id(optimizer)] += 1

    def note_call(self, op: str, ranks: Sequence[int], text: str = "") -> None:
        """Note a call that all ``ranks`` have to make, of which nothing is sent here."""
        if len(ranks) > 1:
            place, source = users_line(sys._getframe(1), CALLERS)
            self.lines.append(LedgerLine(op, tuple(ranks), text, 0, True, place, source, self.place(), self.steps_done))

    # Operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is DEVICE_OF:
            return device_in_kernels(args[0])
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        name = func._overloadpacket.__name__
        is_collective = func.namespace in {"c10d", "_c10d_functional"}
        if is_collective:
            owner = self.numbers.get(self._running[-1][0], -1) if self._running and _is_ours() else -1
            line = line_of(func, args, self.place(), self._phase(), self.steps_done, owner)
            if line is not None and len(line.ranks) > 1:
                is_of_all = line.group == getattr(dist.group.WORLD, "group_name", "")
                self._check(name, args, kwargs, self.backend if is_of_all else "")
                self.lines.append(line)
        elif name == "_local_scalar_dense":
            if isinstance(args[0], FakeTensor):
                return self._answer(args[0])
            with with_values():  # Whoever asks: it has them.
                return func(*args)
        elif name in {"equal", "allclose"} and any(isinstance(one, FakeTensor) for one in args):
            return bool(self._answer(torch.ones((), dtype=torch.bool)))
        else:
            self._check(name, args, kwargs)
        with with_values() if self._has_values(name, args, kwargs, is_collective) else nullcontext():
            result = func(*args, **kwargs)
        self._count_on_device(name, args, kwargs, result, is_collective=is_collective)
        if self.unfilled.new:
            self.unfilled.written(func, args, kwargs)
        self._compare(name, args, result)
        if (count := _work().get(name.removesuffix("_for_cpu"))) is not None and torch.is_grad_enabled():
            # Backward itself has no gradients: what has them there is a forward that runs again.
            self.work["again" if in_backward() else "forward"] += count(*args, **kwargs, out_val=result)
        return result

    def _check(self, name: str, args: Any, kwargs: Any, backend: str = "") -> None:
        """Refuse what devices refuse: tensors of two places, or of the host in a group of ``backend``; two dtypes."""
        used = with_memory((*args, *kwargs.values()))
        host = [one for one in used if self._kind_of(one) == "host" and (backend or one.ndim)]
        is_mixed = "nccl" in backend and "cpu:" not in backend if backend else any(map(self.is_here, used))
        is_refused = host and is_mixed and name not in _ANYWHERE and "_foreach" not in name
        if is_refused and self.tells_places and not _is_ours():
            shapes = " and ".join(f"{list(one.shape)} {dtype_text(one.dtype)}" for one in host[:2])
            beside = "whose group is of nccl" if backend else f"beside tensors on {self.device}"
            raise _refused(f"{name} takes {shapes} on the host, {beside}", "x = x.to(device), with what is on the host")
        floats = [one.dtype for one in used if one.is_floating_point()] if name in _OF_ONE_DTYPE else []
        if len({*floats}) > 1 and not ("norm" in name and floats[0] != torch.float32):
            what = f"{name} takes {' and '.join(map(dtype_text, dict.fromkeys(floats)))} (mixed dtypes)"
            raise _refused(what, "MixedPrecisionPolicy(...), autocast, or x.to(dtype)")

    def check_choice(self, named: Any) -> None:
        """Refuse the first device of a host for another rank there than the first one."""
        number = named if isinstance(named, int) else torch.device(named).index
        is_first = not (self.chosen if number is None else number)
        if self.local and is_first and "," in os.environ.get("CUDA_VISIBLE_DEVICES", ","):
            what = f"local rank {self.local} uses {self.device}:0, as local rank 0 does"
            raise _refused(what, "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])), before anything is there")

    def _has_values(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], is_collective: bool) -> bool:
        """Say whether an operation belongs to the script's data, and is small: then it runs, and gives real tensors."""
        if self._phase() != "outside" or str(kwargs.get("device")) == "meta":
            return False
        tensors = list(operands((*args, *kwargs.values())))
        if any(isinstance(one, FakeTensor) or one.is_meta or one.requires_grad for one in tensors):
            return False
        numel: float = sum(one.numel() for one in tensors)
        if not tensors:
            sizes = [float(math.prod(one)) for one in args if isinstance(one, list)]
            is_index = name in {"randint", "randperm", "arange"}
            sizes = sizes or [abs(one) for one in args if isinstance(one, int | float)]
            numel = max(sizes, default=_MOST_REAL_NUMEL)
            if numel > 1 and not is_index:
                return False
        if numel > _MOST_REAL_NUMEL // (1 if tensors else 64):
            return False
        # What has values is changed in place: it keeps them, whoever asks.
        return bool(tensors) or is_collective or not _is_ours()

    def _answer(self, tensor: torch.Tensor) -> Any:
        """Return a number for a fake tensor [1] of any dtype, whose values nobody has computed."""
        place, source = users_line(sys._getframe(1))
        if self._is_strict:
            fix = "leave that line out, or rehearse without --strict"
            raise ConfigError("a value of a fake tensor is read", at=f"{place}: {source}", fix=fix)
        number = getattr(tensor, "stand_in", 1)
        self.notes[f"a value of a tensor is read at {place}, where 1 stands for it: {source}"] += 1
        if tensor.dtype == torch.bool:
            return bool(number)
        return complex(number) if tensor.is_complex() else float(number) if tensor.is_floating_point() else int(number)

    def _compare(self, name: str, args: Sequence[Any], result: Any) -> None:
        """Let comparisons have results that fit together: no NaN, nothing infinite."""
        if name in _CARRIED:
            if isinstance(args[0], FakeTensor) and hasattr(args[0], "stand_in"):
                for one in operands((result,)):
                    if isinstance(one, FakeTensor):
                        one.stand_in = args[0].stand_in  # type: ignore[attr-defined]  # ours
        elif name in _COMPARED and isinstance(result, FakeTensor) and result.dtype == torch.bool:
            try:
                result.stand_in = _COMPARED[name](*map(_known, args[:2]))  # type: ignore[attr-defined]  # ours
            except TypeError:  # of one tensor, with an option
                return

    # Memory of the device

    def is_here(self, tensor: torch.Tensor) -> bool:
        """Say whether a tensor [any] lies on the device."""
        return not self.device or self._kind_of(tensor) not in {"", *ON_HOST}

    def _kind_of(self, tensor: torch.Tensor) -> str:
        known = self._known.get(getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata)
        return "" if known is None else known[1]

    def put(self, tensor: torch.Tensor, where: str) -> None:
        """Let a new tensor [any] lie on the "device" or the "host", or there for good: "offloaded"."""
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        kind = self._phase() if where == "device" else where
        self._follow(storage, kind)
        self._move(storage, kind)

    @contextmanager
    def making(self, where: str) -> Iterator[None]:
        """Let what operations make lie on the "device" or the "host", or there for good: "offloaded"."""
        before, self._making = self._making, where
        self._names_places |= bool(where)
        try:
            yield
        finally:
            self._making = before

    def _count_on_device(self, name: str, args: Any, kwargs: Any, result: Any, *, is_collective: bool) -> None:
        phase = self._phase()
        used, made = with_memory((*args, *kwargs.values())), with_memory((result,))
        here, offloaded = ([] if self._making else [one for one in used if self.is_here(one)]), 0
        if self.device:
            offloaded = sum(one.nbytes for one in used if self._kind_of(one) == "offloaded")
        # Operations have all tensors on one device: what was not moved there by a call is there by the annotation. But
        # a number of the device was moved to what is offloaded, and copies go from one place to another.
        is_host = self._making or (offloaded and all(one.numel() == 1 for one in here))
        is_new = self._names_places and not any(one.numel() for one in used)
        is_ours = is_new and _is_ours()
        is_here = (is_collective or bool(here) or is_ours) and not is_host
        moved = {id(one) for one in used if is_here and (one.ndim or is_collective or self._kind_of(one) != "host")}
        if name in _COPIES and self._names_places:
            # This package copies to what it has made on the device.
            moved &= set(map(id, operands(args[:1]))) if _is_ours() else set()
        kinds = {self._kind_of(one) for one in used}
        there = self._making or ("offloaded" if offloaded else "host" if kinds == {"host"} else "unplaced")
        there = phase if is_here or there == "device" or not self.device else there
        for one in used:
            self._follow(one.untyped_storage(), phase if id(one) in moved or not self.device else "unplaced")
            if id(one) in moved:
                self._move(one.untyped_storage(), phase)
        for one in made:
            self._follow(one.untyped_storage(), there)
        # A group sends tensors of its device: copies of those that are offloaded.
        sent = offloaded if is_collective else 0
        self._add(phase, sent)
        self._note_peak()
        self.host_peak = max(self.host_peak, self._host_bytes())
        if self.budget and self.overrun is None and self.now > self.budget:
            self.overrun = self.now, self.place(), *users_line(sys._getframe(2))
        self._add(phase, -sent)

    def _host_bytes(self) -> int:
        return sum(self._made[one] for one in ON_HOST)

    def _move(self, storage: torch.UntypedStorage, to: str) -> None:
        if to == "host" or self._known[storage._cdata][1] in {"host", "unplaced"}:
            self._count(storage._cdata, to, storage.nbytes())

    def _enter(self, module: nn.Module, inputs: object) -> None:
        is_outermost = not self._running and self._phase() == "outside"
        super()._enter(module, inputs)
        if is_outermost and torch.is_grad_enabled():
            self.at_rest, self.host_at_rest = self.now, self._host_bytes()
            # The next step would do what the last one has done. With several optimizers, each has its last one.
            is_over = self.steps and min(self._stepped.values(), default=0) >= self.steps
            if is_over and module.training and any(one.requires_grad for one in module.parameters()):
                raise ScriptEnds


def _known(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        return getattr(value, "stand_in", 1)
    return (value.item() if value.numel() == 1 else 1) if isinstance(value, torch.Tensor) else value


class Unfilled(WithoutValues):
    """Notes which fake tensors nobody has written to, whatever other tensor of that memory is written."""

    def __init__(self) -> None:
        self.new: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()  # By their storages.

    def mark(self, tensor: torch.Tensor) -> None:
        if isinstance(tensor, FakeTensor):
            self.new[tensor.untyped_storage()._cdata] = tensor

    def is_marked(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, FakeTensor) and self.new.get(tensor.untyped_storage()._cdata) is tensor

    def written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Note what an operation writes to."""
        given = {**dict(zip((one.name for one in func._schema.arguments), args)), **kwargs}
        for one in func._schema.arguments:
            if one.alias_info is not None and one.alias_info.is_write:
                for tensor in operands((given.get(one.name),)):
                    self.new.pop(tensor.untyped_storage()._cdata, None)


class _Names(TorchFunctionMode):
    """Turns the names of devices in a script's calls into the CPU, and reads fake tensors for NumPy."""

    sees_hooks = True

    def __init__(self, rank: RehearsedRank) -> None:
        super().__init__()
        self._rank = rank
        self.default: Any = None
        self.kept = _sync_batch_norm()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if tensor is not None and func in _READERS and isinstance(getattr(tensor, "_local_tensor", tensor), FakeTensor):
            return _READERS[func](self._rank, tensor, *args[1:])
        if not self._rank.device:
            return func(*args, **kwargs)
        if func == parse_to:  # It knows no device by its number, where torch has none.
            return func(*map(self._numbered, args), **{name: self._numbered(one) for name, one in kwargs.items()})
        if tensor is not None:
            if func in _MOVES and _is_ours(but=_HERE):
                return func(*args, **kwargs)  # This package is told that the CPU is its device.
            if func in _MOVES:
                return self._move(tensor, func, list(args[1:]), kwargs, is_asked=_asks_for_script())
            if func in _LEFT_OUT:
                return _LEFT_OUT[func](tensor)
            if func in (_IS_CUDA, _DEVICE) and _asks_for_script():
                is_here = self._rank.is_here(tensor)
                if func == _IS_CUDA:
                    return is_here
                # One with values; a fake one says it by itself.
                return torch.device(self._rank.device, torch.cuda.current_device()) if is_here else func(*args)
        is_new = not [*operands((*args, *kwargs.values()))]
        named = self.default if is_new and kwargs.get("device") is None else kwargs.get("device")
        if not is_device(named):
            made = func(*args, **kwargs)
            # The device that torch itself names may be the one that it was told to be the host.
            for one in with_memory((made,)) if is_new and (named is None or _asks_for_script()) else ():
                self._rank.put(one, "host")
            return made
        self._rank.check_choice(named)
        kwargs["device"] = torch.device("cpu")
        with self._rank.making("device"):
            made = func(*args, **kwargs)
        if is_new and isinstance(made, torch.Tensor):
            self._rank.put(made, "device")  # The values that ``torch.tensor`` is given were on the host.
        return made

    def _numbered(self, value: Any) -> Any:
        return torch.device(self._rank.device, value) if type(value) is int else value

    def _move(self, tensor: torch.Tensor, func: Any, rest: list[Any], kwargs: dict[str, Any], *, is_asked: bool) -> Any:
        target: Any = {torch.Tensor.cuda: "cuda", torch.Tensor.cpu: "cpu"}.get(func)
        if target is not None:
            rest, kwargs = [], {}
        elif rest and isinstance(rest[0], torch.Tensor):
            target, rest[0] = (f"cuda:{self._rank.local}" if self._rank.is_here(rest[0]) else "cpu"), rest[0].dtype
        elif rest and (is_device(rest[0]) or isinstance(rest[0], str | torch.device)):
            target = rest.pop(0)
        else:
            target = kwargs.pop("device", None)
        if target is None or str(target) == "meta":
            return torch.Tensor.to(tensor, *([target] if target is not None else []), *rest, **kwargs)
        wants = is_device(target)
        if wants:
            self._rank.check_choice(target)
        if tensor.is_meta or wants == self._rank.is_here(tensor):
            return torch.Tensor.to(tensor, "cpu", *rest, **kwargs)
        with self._rank.making("device" if wants else "host" if is_asked else "unplaced"):
            moved = torch.Tensor.to(tensor, "cpu", *rest, **kwargs)
            # A conversion of the dtype is a copy.
            return moved.clone() if moved.untyped_storage()._cdata == tensor.untyped_storage()._cdata else moved


def is_device(value: object) -> bool:
    """Say whether a value names a device that is not the host's."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    return isinstance(value, str | torch.device) and str(value).partition(":")[0] not in {"cpu", "meta"}


def _asks_for_script() -> bool:
    """Say whether the caller's caller is neither torch nor this package, which are told of the CPU."""
    return (file := sys._getframe(2).f_code.co_filename) == _BATCH_NORM or not file.startswith(LIBRARIES)


def _is_ours(but: str = LIBRARIES[1]) -> bool:
    """Say whether the innermost file that runs, but for rehearsals and what is below ``but``, is of this package."""
    files = (one.f_code.co_filename for one in outwards(sys._getframe(1)))
    return next((one for one in files if not one.startswith((_HERE, but))), "").startswith(LIBRARIES[0])


def _refused(what: str, fix: str) -> UsageError:
    place, source = users_line(sys._getframe(1))
    return UsageError(what, at=f"{place}: {source}", fix=fix)


def _as_numpy(rank: RehearsedRank, tensor: torch.Tensor, *_: Any) -> Any:
    if rank.tells_places and rank.is_here(tensor):
        raise _refused(f"NumPy cannot read a tensor on {rank.device}", "x.detach().cpu().numpy()")
    rank._answer(torch.ones(()))
    with with_values():
        return torch.ones(tensor.shape, dtype=tensor.dtype).numpy()


_READERS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.numpy: _as_numpy,
    torch.Tensor.__array__: _as_numpy,
    torch.Tensor.__format__: lambda _, one, text="": format(one.item() if one.ndim == 0 and text else repr(one), text),
}
_IS_CUDA: Any = getattr(torch.Tensor.is_cuda, "__get__")  # noqa: B009  # a property, to types
_DEVICE: Any = getattr(torch.Tensor.device, "__get__")  # noqa: B009
_MOVES = {torch.Tensor.to, torch.Tensor.type_as, torch.Tensor.cuda, torch.Tensor.cpu}
_LEFT_OUT: dict[Any, Callable[[torch.Tensor], Any]] = {
    torch.Tensor.pin_memory: lambda tensor: tensor,
    torch.Tensor.is_pinned: lambda _: False,
    torch.Tensor.record_stream: lambda _: None,
}


class _Moment(nullcontext[Any]):
    """Stands for a stream or an event: all work is done at once."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__(self)
        self.device_index = 0

    def __getattr__(self, name: str) -> Any:
        answers = {"query": True, "elapsed_time": 1.0, "record_event": _Moment()} if name[0] != "_" else {}
        return lambda *_, **__: answers.get(name)


def stand_in_for_devices(rank: RehearsedRank, number: int, on_host: int, kind: str) -> _Names:
    """Let this process see ``on_host`` devices; return the mode in which tensors can be put on them."""
    names = _Names(rank)
    if rank.device:
        _replace_devices(rank, number % on_host, on_host, kind, names)
    torch.compile = _uncompiled(rank)
    nn.Module.compile = lambda *_, **__: None  # type: ignore[method-assign]
    return names


def _uncompiled(rank: RehearsedRank) -> Callable[..., Any]:
    def compiled(model: Any = None, **_: Any) -> Any:
        rank.notes["torch.compile is left out"] += 1
        return (lambda one: one) if model is None else model

    return compiled


def _stand_in_for_offload(rank: RehearsedRank, names: _Names) -> None:
    """Tell the host from the device where shards rest, and in functions that autograd calls."""
    hooks: Any = torch.autograd.graph.saved_tensors_hooks
    begin, own = hooks.__init__, torch.device(rank.device, rank.local)

    def within(hook: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            with names:  # torch leaves the mode for a call that is handed to it, such as that of a backward.
                return hook(*args, **kwargs)

        return called

    def save_on_cpu(self: Any, *_: object, **__: object) -> None:
        pack, unpack = lambda one: (rank.is_here(one), one.cpu()), lambda it: it[1].to(own) if it[0] else it[1]
        begin(self, within(pack), within(unpack))

    class RehearsedPlace(RestingPlace):
        def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
            with rank.making("offloaded" if self.is_elsewhere else "device"):
                return super().empty(numel, dtype)

        def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
            with rank.making("offloaded" if self.is_elsewhere else "device"):
                return super().zeros(numel, dtype)

        def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
            if self.is_elsewhere and rank.is_here(tensor):
                what = f"parameters are on {rank.device}, and offload_policy keeps them on cpu"
                raise UsageError(what, fix="model.to('cpu'), or leave out what moved the model")
            if self.is_elsewhere:
                rank.put(tensor, "offloaded")
            return tensor

    call = nn.Module.__call__

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if rank.tells_places and get_registry(self) and not any(get_registry(one) for one, _ in rank._running):
            # Annotations move buffers, and inputs of the outermost module.
            for buffer in with_memory(self.buffers()):
                rank.put(buffer, "device")
            args, kwargs = tree_map(lambda one: one.to(own) if isinstance(one, torch.Tensor) else one, (args, kwargs))
        return call(self, *args, **kwargs)

    nn.Module.__call__ = called  # type: ignore[method-assign]
    autograd: Any = torch.autograd
    autograd._engine_run_backward = within(autograd._engine_run_backward)
    hooks.__init__ = lambda self, pack, unpack: begin(self, within(pack), within(unpack))
    torch.autograd.graph.save_on_cpu.__init__ = save_on_cpu  # type: ignore[method-assign]
    make_resting_places_by(lambda device, on_host: RehearsedPlace(device, is_elsewhere=on_host))


def _replace_devices(rank: RehearsedRank, index: int, count: int, kind: str, names: _Names) -> None:
    let_optimizers_use_lists(lambda: rank.steps_here)
    rank.local = index
    _stand_in_for_offload(rank, names)
    current, total = [index], rank.budget or 80 * 2**30
    about = SimpleNamespace(
        name=kind, total_memory=total, major=9, minor=0, multi_processor_count=132, gcnArchName="", is_integrated=False,
        uuid="", warp_size=32, max_threads_per_multi_processor=2048, L2_cache_size=50 * 2**20,
    )  # fmt: skip
    device = torch.device(rank.device)

    def set_device(to: Any) -> None:
        number = to if isinstance(to, int | None) else torch.device(to).index
        if number is None or number < 0:
            return  # As torch's own does.
        if number >= count:
            raise RuntimeError(f"invalid device ordinal: {to} of {count} devices on this host")
        rank.chosen = current[0] = number

    @contextmanager
    def chosen_device(to: Any) -> Iterator[None]:
        before = rank.chosen, current[0]
        set_device(to)
        try:
            yield
        finally:
            rank.chosen, current[0] = before

    answers: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": count, "get_device_name": kind,
        "get_device_properties": about, "get_device_capability": (9, 0), "is_bf16_supported": True,
        "mem_get_info": (total, total), "get_memory_info": (total, total), "memory_summary": "", "get_arch_list": [],
        "stream": nullcontext(), "current_accelerator": device, "memory_snapshot": [],
        "_snapshot": {"segments": [], "device_traces": []},
        "can_device_access_peer": True, "get_allocator_backend": "native", "get_per_process_memory_fraction": 1.0,
        **dict.fromkeys(("clock_rate", "memory_usage", "power_draw", "temperature", "utilization"), 0),
        "host_memory_stats": Counter(), "host_memory_stats_as_nested_dict": {}, "memory_stats_as_nested_dict": {},
        "device_memory_used": 0, "get_sync_debug_mode": 0, "cudart": _Moment(),
    }  # fmt: skip
    answers |= dict.fromkeys(_DO_NOTHING)
    functions: dict[str, Any] = {name: (lambda *_, _value=value, **__: _value) for name, value in answers.items()}
    functions["is_current_stream_capturing"] = lambda: sys._getframe(1).f_code.co_filename == _ITS_FUNCTION
    functions |= dict.fromkeys(("set_device", "set_device_index", "set_device_idx"), set_device)
    functions["device"] = chosen_device
    numbers = ("current_device", "current_device_index", "current_device_idx")
    functions |= dict.fromkeys(numbers, lambda: current[0])
    functions |= dict.fromkeys(("memory_allocated", "memory_reserved"), lambda *_, **__: rank.now)
    functions |= dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda *_, **__: rank.peak)
    functions |= dict.fromkeys(("Stream", "Event"), _Moment)
    functions |= dict.fromkeys(("current_stream", "default_stream"), lambda *_: _Moment())
    functions |= {
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "initial_seed": torch.initial_seed,
        "memory_stats": lambda *_: Counter(
            {f"{of}_bytes.all.{what}": getattr(rank, now) for of in ("allocated", "reserved") for what, now in _STATS}
        ),
    }
    tools = (torch.cuda.memory, torch.cuda.nvtx, torch.cuda.profiler)
    for module in (torch.cuda, torch.accelerator, *tools):
        for name in functions.keys() & vars(module).keys():
            setattr(module, name, functions[name])
    dist.is_nccl_available = lambda: True
    torch.cuda.nccl.version = lambda: (2, 27, 3)
    torch.cuda.default_generators = (torch.default_generator,) * count  # type: ignore[assignment]  # of one, to mypy

    fake_device: Any = FakeTensor.device

    def device_of(tensor: FakeTensor) -> torch.device:
        shown: torch.device = fake_device.fget(tensor)
        is_shown = shown.type == "cpu" and _asks_for_script() and rank.is_here(tensor)
        return torch.device(rank.device, current[0]) if is_shown else shown

    class HostGenerator(torch.Generator):
        def __new__(cls, device: Any = "cpu") -> Any:
            return super().__new__(cls, "cpu")  # type: ignore[call-arg]  # torch's stub lacks it

    FakeTensor.device = property(device_of)  # type: ignore[assignment]
    torch.Generator = HostGenerator  # type: ignore[misc]
    torch.set_default_device = lambda device: setattr(names, "default", device)
    for owner in (torch.autocast, torch.amp.GradScaler):
        _name_host(owner)


def _sync_batch_norm() -> torch.library.Library:
    """Return what gives shapes to the operations of ``SyncBatchNorm``, which CPUs lack, as long as it lives."""

    def of_channels(x: torch.Tensor, *_: Any, count: int) -> tuple[torch.Tensor, ...]:
        return tuple(x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32)) for _ in range(count))

    library = torch.library.Library("aten", "IMPL", "Meta")
    for name, count in (("stats", 2), ("gather_stats_with_counts", 2), ("backward_reduce", 4)):
        library.impl(f"batch_norm_{name}", functools.partial(of_channels, count=count))
    for name in ("elemt", "backward_elemt"):
        library.impl(f"batch_norm_{name}", lambda x, *_: torch.empty_like(x))
    return library


def _name_host(owner: Any) -> None:
    """Let a class whose first argument is the type of a device take that of the host."""
    made = owner.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        named = [args[0]] if args else [kwargs.pop(name) for name in ("device_type", "device") if name in kwargs]
        if owner is torch.autocast and named and is_device(named[0]) and len(args) < 2:
            kwargs.setdefault("dtype", torch.float16)
            kwargs["dtype"] = kwargs["dtype"] or torch.float16
        made(self, "cpu", *args[1:], **kwargs)

    owner.__init__ = init

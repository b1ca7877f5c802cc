"""What a rehearsed script calls beside its model: process groups, data loaders and saves.

All is done to the process of one rehearsed rank, which ends with it.
"""

import functools
import inspect
import io
import itertools
import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import has_torch_function
from torch.utils.data import DataLoader

import composable
from composable.comm import (
    COMPARISON,
    Ranks,
    answer_for_absent_ranks,
    register_transport,
    transport_class,
    transport_names,
)
from composable.ground.torch_private import (
    DeviceMesh,
    FakeTensor,
    FakeTensorMode,
    HashStore,
    c10d,
    swap_contents,
    tree_leaves,
)
from composable.rehearsal.ledger import users_line
from composable.rehearsal.rehearsed_function import with_memory, with_values
from composable.rehearsal.stand_ins import RehearsedRank, is_device

_T = TypeVar("_T")

# Of groups of real ranks; that ranks have diverged is noticed before.
_REAL_TIMEOUT = timedelta(seconds=60)
# One rank may call these.
_ALONE = {"torch.save", "safetensors.torch.save_file"}
# Messages of annotations that ledgers have.
_NOTED = {COMPARISON, "objects", "object_of", "flags"}
# What the values of all ranks become, by the names of torch's reductions.
_REDUCED = {"SUM": "sum", "AVG": "mean", "MIN": "amin", "MAX": "amax", "PRODUCT": "prod"}


class Letters:
    """The small values that ranks tell each other, by their group, the call, and its number.

    A rank hears the ranks that were rehearsed before it, and takes the others to say what it says itself. Where they
    did not, it is rehearsed again.

    Args:
        folder: Has a file for each rank that was rehearsed.
        rank: This rank.
        rehearsed: The ranks that are rehearsed.
    """

    def __init__(self, folder: Path, rank: int, rehearsed: Sequence[int]) -> None:
        self._folder, self._rank, self.rehearsed = folder, rank, frozenset(rehearsed)
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._sent: dict[tuple[Any, ...], bytes] = {}
        self._heard: dict[tuple[int, tuple[Any, ...]], bytes | None] = {}
        self._others = {path.name: pickle.loads(path.read_bytes())[0] for path in folder.glob("letters-*")}

    def all(self, op: str, ranks: Sequence[int], value: _T) -> list[_T]:
        """Return what each of ``ranks`` says in this call."""
        key = self._next(op, ranks)
        self._send(key, value)
        return [value if one == self._rank else self._hear(key, one, value) for one in ranks]

    def of(self, op: str, ranks: Sequence[int], source: int, value: _T) -> _T:
        """Return what ``source`` says in this call; only what it says is sent."""
        key = self._next(op, ranks)
        if source == self._rank:
            self._send(key, value)
            return value
        return self._hear(key, source, value)

    def save(self) -> None:
        """Write what this rank has said and heard, at once: others may read it now."""
        written = self._folder / f"writes-{self._rank}"
        written.write_bytes(pickle.dumps((self._sent, self._heard)))
        written.replace(self._folder / f"letters-{self._rank}")

    def _next(self, op: str, ranks: Sequence[int]) -> tuple[Any, ...]:
        key = op, tuple(ranks)
        self._counts[key] += 1
        return (*key, self._counts[key])

    def _send(self, key: tuple[Any, ...], value: object) -> None:
        with suppress(Exception):  # What cannot be written is told to nobody.
            self._sent[key] = pickle.dumps(value)

    def _hear(self, key: tuple[Any, ...], source: int, own: _T) -> _T:
        said = self._others.get(f"letters-{source}", {}).get(key)
        self._heard[source, key] = said or self._sent.get(key)
        return own if said is None else pickle.loads(said)


def ranks_that_misheard(folder: Path) -> list[int]:
    """Return the ranks to which others have said, by now, something else than they heard."""
    letters = {int(path.name.split("-")[1]): pickle.loads(path.read_bytes()) for path in folder.glob("letters-*")}
    said = {(rank, key): value for rank, (sent, _) in letters.items() for key, value in sent.items()}
    return sorted(
        rank for rank, (_, heard) in letters.items() if any(said.get(key, one) != one for key, one in heard.items())
    )


def stand_in_for_groups(
    rank: RehearsedRank, number: int, world_size: int, letters: Letters, make_store: Callable[[], Any] | None
) -> None:
    """Let ``init_process_group`` make fake groups, and note what is no operation on tensors.

    Args:
        rank: The rank.
        number: Its number.
        world_size: How many there are.
        letters: What ranks tell each other in fake groups.
        make_store: Where processes of this machine meet; then groups are those of gloo.
    """
    stand_in = "gloo" if make_store else "fake"
    make: Any = c10d._new_process_group_helper
    begin, mesh_init = dist.init_process_group, DeviceMesh.__init__
    places = (dist, c10d, torch.distributed.device_mesh)
    new_group, init_mesh = dist.new_group, torch.distributed.device_mesh.init_device_mesh

    @_valued
    def init_process_group(backend: Any = "", *_: Any, **__: Any) -> None:
        rank.backend = str(backend)
        limit, store = (_REAL_TIMEOUT, make_store()) if make_store else (None, HashStore())
        begin(stand_in, store=store, timeout=limit, rank=number, world_size=world_size)

    def make_group(*args: Any, **kwargs: Any) -> Any:
        given = {"backend_options": None, "pg_options": None, "device_id": None}
        kwargs |= {name: value for name, value in given.items() if name in kwargs}
        return make(*args[:3], c10d.Backend(stand_in), *args[4:], **kwargs)

    def new_noted_group(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(new_group).bind(*args, **kwargs).arguments
        ranks, everyone = given.get("ranks"), range(world_size)
        chosen = sorted(everyone if ranks is None else ranks)
        is_local = given.get("use_local_synchronization", False)
        rank.note_call("new_group", chosen if is_local else everyone, str(chosen))
        with with_values():
            return new_group(**{**given, "backend": None})

    def of_host(device_type: str) -> str:
        if not is_device(device_type):
            return device_type
        rank.chosen = rank.chosen or rank.local  # torch chooses it.
        return "cpu"

    @_valued
    @functools.wraps(mesh_init)
    def init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        mesh_init(self, of_host(device_type), *args, **kwargs)

    @_valued
    def mesh_of(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return init_mesh(of_host(device_type), *args, **kwargs)

    replaced: dict[str, Callable[..., Any]] = {
        "init_process_group": init_process_group,
        "_new_process_group_helper": make_group,
        "new_group": new_noted_group,
        "init_device_mesh": mesh_of,
        **({} if make_store else _object_calls(rank, letters) | {"all_reduce": _heard(letters)}),
    }
    for place in places:
        for name, function in replaced.items():
            if hasattr(place, name):
                setattr(place, name, function)
    DeviceMesh.__init__ = init  # type: ignore[method-assign]
    if make_store is not None or not rank.device:
        use_collectives_only()
    launcher: Any = torch.multiprocessing
    launcher.spawn = lambda fn, args=(), nprocs=1, **_: fn(number % max(1, nprocs), *args)
    if make_store is not None:
        return
    setattr(dist.Work, "is_completed", lambda _: True)  # noqa: B010  # those of fake groups never say so
    for name in ("__getitem__", "_flatten", "get_local_rank", "get_coordinate", "get_rank", "size", "__repr__"):
        setattr(DeviceMesh, name, _valued(getattr(DeviceMesh, name)))
    answer_for_absent_ranks(functools.partial(_answer, rank, letters))
    for module in [one for name, one in sys.modules.items() if name.startswith("composable.")]:
        if hasattr(module, "is_tracing"):
            # torch takes fake tensors for those of a compiler.
            setattr(module, "is_tracing", lambda: False)  # noqa: B010


def use_collectives_only() -> None:
    """Let transports between host tensors use the collectives of the process group, as a cluster does."""
    group = transport_class("process_group")
    for name in transport_names():
        if not transport_class(name).serves("cpu", "fake"):
            register_transport(type(name, (group,), {"name": name, "cost": group.cost + 1}))


def _valued(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def valued(*args: Any, **kwargs: Any) -> Any:
        with with_values():
            return call(*args, **kwargs)

    return valued


def _answer(
    rank: RehearsedRank, letters: Letters, ranks: Ranks, kind: str, content: bytes, source: int | None
) -> list[bytes]:
    """Note a message between the ranks, which the fake backend does not send, and answer for the others."""
    if kind in _NOTED:
        rank.note_call(kind, ranks.numbers, content.hex()[:8] if kind == COMPARISON else "")
    if kind == COMPARISON:
        return [content] * ranks.size  # The ledgers are compared.
    if source is not None:
        return [letters.of(kind, ranks.numbers, ranks.numbers[source], content)] * ranks.size
    every = letters.all(kind, ranks.numbers, content)
    # Ranks in other calls say other things: what they say here is heard when they are rehearsed again.
    return [one if kind == "objects" or len(one) == len(content) else content for one in every]


def _heard(letters: Letters) -> Callable[..., Any]:
    """Return ``all_reduce``; where a tensor has values, such as a flag, a rank hears those of the others."""
    reduce = dist.all_reduce

    @functools.wraps(reduce)
    def all_reduce(tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: Any = False) -> Any:
        combine = _REDUCED.get(str(op).rpartition(".")[2])
        # torch calls this again once modes have seen it.
        is_heard = (
            not isinstance(tensor, FakeTensor) and not has_torch_function((tensor,)) and dist.get_rank(group) >= 0
        )
        own = tensor.tolist() if is_heard and combine else None
        work = reduce(tensor, op, group, async_op)
        if own is not None and combine:
            every = letters.all("all_reduce", dist.get_process_group_ranks(group or dist.group.WORLD), own)
            with with_values(), torch.no_grad():
                values = torch.tensor(every, dtype=tensor.dtype)
                # torch takes no mean of whole numbers, which NCCL averages.
                tensor.copy_(values.sum(0) / len(every) if combine == "mean" else getattr(values, combine)(0))
        return work

    return all_reduce


def _object_calls(rank: RehearsedRank, letters: Letters) -> dict[str, Callable[..., Any]]:
    """Return torch's calls that send objects."""

    def note(op: str, group: Any, text: str = "") -> tuple[int, ...]:
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        rank.note_call(op, ranks, text)
        if "gather" in op and not letters.rehearsed.issuperset(ranks):
            here = users_line(sys._getframe(2))[0]
            rank.notes[
                f"{op} at {here}: ranks that are not rehearsed give what others give; --all-ranks has theirs"
            ] += 1
        return ranks

    def to_all(found: list[Any], value: Any, group: Any = None) -> None:
        found[:] = letters.all("objects", note("all_gather_object", group), value)

    def to_one(value: Any, found: list[Any] | None = None, dst: Any = None, group: Any = None, **_: Any) -> None:
        every = letters.all("objects", note("gather_object", group, f"root {dst or 0}"), value)
        if found is not None:
            found[:] = every

    def of_source(op: str, values: Any, src: Any, group: Any, group_src: Any) -> Any:
        ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
        source = ranks[group_src] if group_src is not None else src or 0
        return letters.of(op, note(op, group, f"root {source}"), source, values)

    def broadcast(values: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None) -> None:
        values[:] = of_source("broadcast_object_list", values, src, group, group_src)

    def scatter(found: Any, values: Any = None, src: Any = None, group: Any = None, group_src: Any = None) -> None:
        every = of_source("scatter_object_list", values, src, group, group_src)
        found[0] = None if every is None else every[dist.get_rank(group)]

    return {
        "monitored_barrier": lambda group=None, *_, **__: dist.barrier(group),
        "all_gather_object": to_all,
        "gather_object": to_one,
        "broadcast_object_list": broadcast,
        "scatter_object_list": scatter,
    }


def stand_in_for_data(rank: RehearsedRank, mode: FakeTensorMode) -> None:
    """Let data loaders give real tensors, in this process, and models have none."""
    init, begin, load = DataLoader.__init__, DataLoader.__iter__, torch.load

    @functools.wraps(init)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in "prefetch_factor multiprocessing_context persistent_workers timeout pin_memory_device".split():
            kwargs.pop(name, None)
        kwargs |= {"pin_memory": False} | ({"num_workers": 0} if len(args) < 6 else {})
        init(self, *args[:5], *([0] if len(args) > 5 else []), *args[6:], **kwargs)

    def batches(self: Any) -> Iterator[Any]:
        source, following = _valued(begin)(self), _valued(next)
        while (batch := following(source, self)) is not self:
            for one in with_memory(tree_leaves(batch)):
                rank.put(one, "host")
            yield batch
            if rank.steps and rank.steps_done >= rank.steps:
                return

    @_valued
    def loaded(*args: Any, **kwargs: Any) -> Any:
        return load(*args[:1], **{**kwargs, "map_location": "cpu"})

    def as_fake(module: Any, _name: str, tensor: Any) -> Any:
        rank.numbers.setdefault(module, next(numbers))
        is_right = tensor is None or isinstance(tensor, FakeTensor | DTensor) or tensor.is_meta
        return None if is_right else mode.from_tensor(tensor)

    numbers = itertools.count()
    swap: Any = torch.utils.swap_tensors
    copied: Any = torch.Tensor.__deepcopy__

    def converted(tensor: torch.Tensor, other: torch.Tensor) -> None:
        # Conversions of modules swap fake tensors, which torch refuses where anything has a weak reference to one.
        if not isinstance(tensor, FakeTensor):
            swap(tensor, other)
        elif tensor.is_meta:
            swap_contents(tensor, other)
        else:
            tensor.data = other.data

    def copy_of(tensor: Any, memo: dict[int, Any]) -> Any:
        if id(tensor) in memo or type(tensor) is not FakeTensor or not isinstance(tensor, nn.Parameter):
            return copied(tensor, memo)
        # A copy of a parameter has no gradient; torch takes fake ones for other tensors.
        memo[id(tensor)] = twin = nn.Parameter(tensor.data.clone(), tensor.requires_grad)
        return twin

    FakeTensor.__deepcopy__ = copy_of  # type: ignore[method-assign]
    torch.utils.swap_tensors = converted
    DataLoader.__init__ = made  # type: ignore[method-assign]
    DataLoader.__iter__ = batches  # type: ignore[method-assign,assignment]
    torch.load = loaded
    nn.modules.module.register_module_parameter_registration_hook(as_fake)
    nn.modules.module.register_module_buffer_registration_hook(as_fake)


def stand_in_for_saves(rank: RehearsedRank, world_size: int) -> None:
    """Leave out what writes checkpoints; all ranks have to call it."""
    find, load, write = composable.find_checkpoint, composable.load_checkpoint, torch.save
    saved: dict[str, composable.SavedCheckpoint] = {}
    import_weights, exported = composable.load_safetensors, set[str]()

    def left_out(name: str) -> Callable[..., Any]:
        def save(*args: Any, **kwargs: Any) -> Any:
            if name == "torch.save" and isinstance((*args[1:2], kwargs.get("f"))[0], io.BytesIO):
                with with_values():
                    return write(*args, **kwargs)
            rank.notes[f"{name} writes nothing"] += 1
            if name not in _ALONE:
                rank.note_call(name, range(world_size))
            if name == "save_checkpoint":
                note_saved(*args, **kwargs)
            elif name == "save_safetensors":
                exported.add(os.path.abspath(str(kwargs["path"] if "path" in kwargs else args[1])))
            path, true = (args[0] if args else kwargs.get("folder")), lambda: True
            return SimpleNamespace(is_done=true, done=true, wait=lambda *_: path, result=lambda *_: path)

        return save

    def note_saved(folder: Any, step: int, *_: Any, extra: Any = None, **__: Any) -> None:
        one = composable.SavedCheckpoint(Path(str(folder), f"step-{step:06}"), step, extra)
        saved[os.path.abspath(one.path)] = saved[os.path.abspath(str(folder))] = one

    def find_checkpoint(path: Any) -> Any:
        return saved.get(os.path.abspath(str(path))) or find(path)

    def load_checkpoint(path: Any, *args: Any, **kwargs: Any) -> Any:
        rank.note_call("load_checkpoint", range(world_size))
        rank.notes["load_checkpoint reads no tensors"] += 1
        return find_checkpoint(path) or load(path, *args, **kwargs)

    def load_safetensors(model: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        if os.path.abspath(str(path)) not in exported:
            return import_weights(model, path, *args, **kwargs)
        rank.note_call("load_safetensors", range(world_size))
        rank.notes["load_safetensors reads no tensors"] += 1
        return nn.Module().load_state_dict({})  # no key is missing

    def on_host(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        for pair in pairs:
            for one in with_memory(pair):
                rank.put(one, "host")
            yield pair

    def full_state_dict(*args: Any, **kwargs: Any) -> Any:
        state = gather(*args, **kwargs)
        list(on_host(state.items()))
        return state

    def iter_full_params(*args: Any, device: Any = None, **kwargs: Any) -> Any:
        pairs = iterate(*args, **kwargs)
        return pairs if device is None or is_device(device) else on_host(pairs)

    gather, composable.full_state_dict = composable.full_state_dict, full_state_dict
    iterate, composable.iter_full_params = composable.iter_full_params, iter_full_params
    composable.load_safetensors = load_safetensors
    torch.save = left_out("torch.save")
    composable.load_checkpoint, composable.find_checkpoint = load_checkpoint, find_checkpoint
    for name in ("save_checkpoint", "save_safetensors"):
        setattr(composable, name, left_out(name))
    import torch.distributed.checkpoint as dcp  # takes as long to import as the rest

    with suppress(ImportError):
        import safetensors.torch

        safetensors.torch.save_file = left_out("safetensors.torch.save_file")
    for name in ("save", "async_save", "load"):
        setattr(dcp, name, left_out(f"torch.distributed.checkpoint.{name}"))

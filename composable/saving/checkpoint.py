"""Saves a run so that a kill at any moment loses nothing, and loads it at any number of ranks.

What is written is a checkpoint of ``torch.distributed.checkpoint`` in the layout of its
``get_state_dict``; torch alone reads it too. Around it: the folder that is whole or invisible
(``checkpoint_files.py``), and checks of bytes and names before anything is changed
(``checkpoint_state.py``). Loading verifies first and then reads in place: beside the model's own
tensors it needs memory for the optimizer state only.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from composable.collectives import Ranks, make_host_ranks
from composable.errors import ConfigError, UsageError, place_of_rank
from composable.optim import OptimizerNames
from composable.saving.contents import (
    DataPlanner,
    apply,
    as_data,
    describe_optimizers,
    find_differences,
    staged,
    state_to_save,
    targets,
)
from composable.saving.run_folder import (
    EXTRA,
    Manifest,
    SummedFiles,
    find_damage,
    find_folder,
    new_partial,
    older_whole,
    publish,
    read_manifest,
    write_summed,
)

__all__ = ["SaveHandle", "SavedCheckpoint", "find_checkpoint", "load_checkpoint", "save_checkpoint"]

T = TypeVar("T")
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk.

    Attributes:
        path: Its folder.
        step: What ``save_checkpoint`` was given.
        extra: What ``save_checkpoint`` was given; tensors on the CPU.
    """

    path: Path
    step: int
    extra: Any


class SaveHandle:
    """A save that has been started; of a synchronous one, a save that is done."""

    def __init__(self, writers: Ranks, beside: Ranks, result: "Future[Path]") -> None:
        self._writers = writers
        # What the group of a background save was made beside: it ends with that one.
        self._beside = beside
        self._result = result
        self._is_collected = False

    def is_done(self) -> bool:
        """Say whether ``wait`` would return, or raise, at once."""
        return self._result.done()

    def wait(self) -> Path:
        """Return the checkpoint's folder once it is whole on disk.

        Every rank waits for itself; call it before the process group is destroyed.

        Raises:
            UsageError: Writing failed; earlier checkpoints are as they were. On every rank.
        """
        self._is_collected = True
        return self._result.result()


# The last save of each model that was started in the background.
_PENDING: "WeakKeyDictionary[nn.Module, SaveHandle]" = WeakKeyDictionary()


def save_checkpoint(
    folder: str | PathLike[str],
    step: int,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Any = None,
    keep: int = 2,
    asynchronous: bool = False,
) -> SaveHandle:
    """Save model, optimizer state and ``extra`` as ``folder/step-NNNNNN``, and remove older checkpoints.

    Collective: all ranks, with equal arguments. The folder must be one that all ranks see. A kill at any moment
    leaves whole checkpoints only; the one before stays until this one is on disk.

    Args:
        folder: Of the run; made if need be. Nothing else should write checkpoints to it.
        step: Optimizer steps done. A checkpoint of the same step is replaced; those of later steps, from a
            continuation that was abandoned for this one, are removed.
        model: Annotated or plain.
        optimizer: One, several, or none. State is saved by FQN, as it is: nothing is initialised for it.
        extra: Settings, scheduler state, position in the data ... as data: tensors, numbers, strings, and lists,
            tuples and dicts of them. Rank 0's is saved.
        keep: Checkpoints to leave in the folder, this one included.
        asynchronous: Copy to the host, return, and write in the background, over a gloo group of its own. The next
            save of the model waits for it, and raises what it raised.

    Returns:
        A handle to wait with; done already unless ``asynchronous``.

    Raises:
        ConfigError: A wrong argument, a parameter in the optimizer that is not the model's, values that are no data.
        UsageError: A parameter on the meta device, or writing failed. The checkpoints before are as they were.
        DesyncError: Ranks gave different arguments.
    """
    ranks, previous = _settle(model)
    optimizers = _as_tuple(optimizer)
    with ranks.agreed():
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise ConfigError(f"step is {step!r}", fix="pass the number of optimizer steps done")
        if keep < 1:
            raise ConfigError(f"keep is {keep!r}", fix="keep at least one checkpoint")
        described = describe_optimizers(model, optimizers)
        state = state_to_save(model, optimizers)
        packed = None if extra is None else as_data(extra, "extra")
        if asynchronous:
            state = staged(state)
    _check_equal(ranks, described, folder=str(folder), step=step, keep=keep, asynchronous=asynchronous)
    partial = _on_first(ranks, lambda: new_partial(Path(folder), step), f"cannot write to {folder}")
    writers = ranks if not asynchronous else _writers(ranks, previous)
    work = _Save(writers, partial, step, state, described, packed, keep)
    if not asynchronous:
        done: Future[Path] = Future()
        done.set_result(work.run())
        return SaveHandle(writers, ranks, done)
    thread = ThreadPoolExecutor(1, thread_name_prefix="save_checkpoint")
    handle = _PENDING[model] = SaveHandle(writers, ranks, thread.submit(work.run))
    thread.shutdown(wait=False)
    return handle


def find_checkpoint(path: str | PathLike[str]) -> SavedCheckpoint:
    """Return the checkpoint that ``path`` is, or the latest one in the run's folder that it is.

    Looks at the disk only: not collective, and only ``extra`` is verified.

    Raises:
        ConfigError: There is no checkpoint, or it does not describe itself readably.
    """
    folder = find_folder(Path(path))
    return _read(folder, read_manifest(folder))


def load_checkpoint(path: str | PathLike[str], model: nn.Module, optimizer: Optimizers = None) -> SavedCheckpoint:
    """Load what ``save_checkpoint`` saved, whatever number of ranks and way of sharding wrote it.

    Collective: all ranks. The bytes of all files and the names of all values are checked first, the ranks sharing
    the reading; then tensors are read in place. Hyperparameters, such as ``lr``, are loaded as saved.

    Args:
        path: A run's folder, whose latest checkpoint is loaded, or a checkpoint's. Rank 0's counts.
        model: Annotated or plain; not on the meta device.
        optimizer: Those that were saved, in that order; or none: the model is loaded alone.

    Returns:
        The checkpoint, on every rank with the ``extra`` that rank 0 saved.

    Raises:
        ConfigError: There is no checkpoint; a file is missing, truncated or changed; names or shapes in the model,
            or classes, groups or settings of optimizers, are not those that were saved. The message lists all
            differences. On every rank, and nothing has been changed.
        UsageError: A parameter on the meta device, or the files changed while they were read.
    """
    ranks, _ = _settle(model)
    optimizers = _as_tuple(optimizer)
    folder, manifest = _on_first(ranks, lambda: _found(Path(path)), f"cannot read {path}")
    _verify(ranks, folder, manifest)
    reader, failure = FileSystemReader(folder), f"{folder} was not loaded to its end"
    with ranks.agreed(), _as_usage_error(failure):
        metadata = reader.read_metadata()
        differences = find_differences(metadata, manifest.optimizers, model, optimizers)
        if differences:
            raise ConfigError(
                "\n  - ".join([f"{folder} does not fit:", *differences]),
                fix="make model and optimizer as they were; without the optimizer, the model is loaded alone",
            )
        flat = targets(metadata, model, optimizers)
        checkpoint = _read(folder, manifest)
    with _as_usage_error(failure), _alone_is_fine():
        load(flat, storage_reader=reader, planner=DataPlanner())
    apply(flat, metadata, model, optimizers)
    return checkpoint


@dataclass(frozen=True)
class _Save:
    """The part of a save that may run in the background."""

    ranks: Ranks
    partial: Path
    step: int
    state: dict[str, Any]
    optimizers: tuple[OptimizerNames, ...]
    extra: bytes | None
    keep: int

    def run(self) -> Path:
        """Write this rank's part; return when the checkpoint of all ranks has its final name."""
        what = f"{self.partial} was not written to its end; earlier checkpoints are as they were"
        with _as_usage_error(what):
            files = SummedFiles()
            writer = FileSystemWriter(self.partial)
            writer.fs = files
            if self.ranks.group is None:
                _write_alone(self.state, writer)
            else:
                save(self.state, storage_writer=writer, process_group=self.ranks.group)
            sums = {name: saved for part in self.ranks.objects(files.sums) for name, saved in part.items()}
            return _on_first(self.ranks, lambda: self._publish(sums), what)

    def _publish(self, sums: dict[str, Any]) -> Path:
        if self.extra is not None:
            sums[EXTRA] = write_summed(self.partial / EXTRA, self.extra)
        return publish(self.partial, Manifest(self.step, sums, self.optimizers), keep=self.keep)


def _check_equal(ranks: Ranks, optimizers: Sequence[OptimizerNames], **arguments: object) -> None:
    """Raise where ranks were called with different arguments."""
    lines = [f"{name}={value!r}" for name, value in arguments.items()]
    for index, names in enumerate(optimizers):
        lines.append(f"optimizer {index} is {names.kind}, of {len(names.groups)} groups")
        lines += [f"a group of optimizer {index}: {group}" for group in names.groups]
    text = "\n".join(lines)
    ranks.compare(
        text,
        shown=text,
        what="the ranks call save_checkpoint with different arguments",
        fix="call save_checkpoint with equal arguments on all ranks",
    )


def _on_first(ranks: Ranks, call: Callable[[], T], failure: str) -> T:
    """Return what ``call`` gives on the first rank; ``failure`` says what an error of the system means."""
    result: Any = None
    with ranks.agreed(), _as_usage_error(failure):
        if ranks.rank == 0:
            result = call()
    first: T = ranks.object_of(0, result)
    return first


def _writers(ranks: Ranks, previous: SaveHandle | None) -> Ranks:
    """Return the same ranks on a group of their own, the one of ``previous`` where it still serves."""
    if ranks.group is None:
        return ranks
    if previous is not None and previous._beside == ranks and previous._writers != ranks:
        return previous._writers
    return make_host_ranks()


def _settle(model: nn.Module) -> tuple[Ranks, SaveHandle | None]:
    """Wait for a save of ``model`` in the background; return it, and the ranks for what comes next."""
    ranks = Ranks.of_world()
    previous = _PENDING.get(model)
    if previous is not None and not previous._is_collected:
        previous.wait()
    return ranks, previous


def _as_tuple(optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    if optimizer is None:
        return ()
    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)


def _found(path: Path) -> tuple[Path, Manifest]:
    folder = find_folder(path)
    return folder, read_manifest(folder)


def _read(folder: Path, manifest: Manifest) -> SavedCheckpoint:
    extra = None
    if EXTRA in manifest.files:
        damage = find_damage(folder, {EXTRA: manifest.files[EXTRA]})
        if damage:
            raise _damaged(folder, damage, older_whole(folder))
        extra = torch.load(folder / EXTRA, map_location="cpu", weights_only=True)
    return SavedCheckpoint(folder, manifest.step, extra)


def _verify(ranks: Ranks, folder: Path, manifest: Manifest) -> None:
    """Read all files, each on one rank, and raise on every rank where one is not what was written."""
    mine = {name: manifest.files[name] for name in sorted(manifest.files)[ranks.rank :: ranks.size]}
    damage = [line for lines in ranks.objects(find_damage(folder, mine)) for line in lines]
    if damage:
        raise _damaged(folder, damage, _on_first(ranks, lambda: older_whole(folder), f"cannot read {folder.parent}"))


def _damaged(folder: Path, damage: list[str], older: Path | None) -> ConfigError:
    fix = f"load {older} instead: it is whole" if older else "restore it from a copy: no older checkpoint is whole"
    return ConfigError("\n  - ".join([f"{folder} is damaged:", *damage]), fix=fix)


def _write_alone(state: dict[str, Any], writer: FileSystemWriter) -> None:
    """Do what torch's ``save`` does in one process, without its warning: filters are the main thread's to change."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])


@contextmanager
def _as_usage_error(what: str) -> Iterator[None]:
    """Turn what torch's writers and readers raise, the same on every rank, into an error of this library."""
    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise UsageError(what, at=f"rank {rank}: {type(cause).__name__}: {cause}") from cause
    except OSError as error:
        raise UsageError(what, at=f"{place_of_rank()}: {type(error).__name__}: {error}") from error


@contextmanager
def _alone_is_fine() -> Iterator[None]:
    """Hide the warning that there is no process group: a single process is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield

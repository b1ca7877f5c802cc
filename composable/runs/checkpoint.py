"""Saves a run, and loads it.

A saved run is a checkpoint of ``torch.distributed.checkpoint`` in the layout of its ``get_state_dict``;
torch alone reads it too. This library adds the folder that is whole or invisible (``run.py``), a description
that is no pickle (``pieces.py``), and checks of bytes and names before anything is changed. Loading
verifies first and then reads in place: beside the model's own tensors it needs memory for the state of optimizers only.
"""

import atexit
import io
import json
import logging
import os
import pickle
import shlex
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field
from os import PathLike
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from composable.comm import Ranks, call_before_destroy, make_host_ranks
from composable.errors import ComposableError, ConfigError, DesyncError, UsageError, place_of_rank, warn_once
from composable.ground.names import check_bool, check_int, check_module, described, list_text
from composable.ground.ownership import FORGOTTEN_FIX
from composable.ground.torch_private import tree_map
from composable.runs import contents
from composable.runs.pieces import DataReader, merge
from composable.runs.run import (
    EXTRA,
    METADATA,
    PIECES,
    Manifest,
    RankRun,
    Run,
    find_damage,
    find_folder,
    read_manifest,
    warned,
)
from composable.runs.shares import SharePlanner
from composable.runs.storage import FileSum, Storage, StoredFolder, folder_at, write_summed
from composable.saving import Names, NamesOnAll, as_data, names_on_all, read_data

T = TypeVar("T")
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None

_LOG = logging.getLogger("composable")
# The most by which norms of parameters differ that hosts of other kinds have stepped alike.
_ALIKE = 1 + 1e-6
_WRITE_FIX = "make room and let this process write there, or save to another folder"
_READ_FIX = "pass a folder that the first rank can read"
_WITH_STORAGE = "pass one path, one URL, or a storage, on every rank"
_HALF_LOADED_FIX = "load another checkpoint before you use the model: some of its values may be those of this one"


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk or in a storage.

    Attributes:
        path: Its folder: a ``Path``, or a ``str`` with its URL, or its name in a ``Storage`` that was given.
        step: The ``step`` that ``save_checkpoint`` was given.
        extra: The ``extra`` that ``save_checkpoint`` was given; tensors in their shapes and dtypes, on the CPU.
    """

    path: Path | str
    step: int
    extra: Any


class SaveHandle:
    """The result of ``save_checkpoint``: a save to wait for. A synchronous save is done already."""

    def __init__(self, writers: Ranks, beside: Ranks, name: str) -> None:
        self._writers = writers
        # The ranks whose group the group of a background save was made beside: both end together.
        self._beside = beside
        self._result: Future[Path | str] = Future()
        self._lost = f"{name} has failed, and nobody waited for it"
        self._place = place_of_rank()

    def _run(self, write: Callable[[], Path | str]) -> None:
        try:
            self._result.set_result(write())
        except BaseException as error:
            self._result.set_exception(error)
            if isinstance(error, Exception):
                return
        _SAVES.open.discard(self)

    def __repr__(self) -> str:
        return f"<SaveHandle: {'done' if self.is_done() else 'under way'}; wait() gives its folder>"

    def is_done(self) -> bool:
        """Say whether ``wait`` would return, or raise, at once."""
        return self._result.done()

    def wait(self) -> Path | str:
        """Return the checkpoint's folder, as ``SavedCheckpoint.path`` has it, once it is whole.

        Each rank may call it alone. ``destroy_process_group()`` and the end of the process wait too, and raise nothing:
        a failure that no ``wait`` has raised ends the process with code 1 and a message.

        Raises:
            UsageError: Writing failed, on every rank; earlier checkpoints are as they were.
        """
        self._result.exception()
        _SAVES.open.discard(self)
        return self._result.result()


class _Saves:
    """The background saves of this process."""

    def __init__(self) -> None:
        self.last: WeakKeyDictionary[nn.Module, SaveHandle] = WeakKeyDictionary()  # The last save of each model.
        # What it was copied to, whose memory the next one takes.
        self.copies: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        # Saves that are under way, or that have failed without a ``wait`` that raised it.
        self.open: set[SaveHandle] = set()


_SAVES = _Saves()


def _wait_for_all() -> None:
    world = Ranks.of_world()
    for handle in list(_SAVES.open):
        if handle._beside == world:
            handle._result.exception()


@atexit.register
def _fail_if_lost() -> None:
    """End the process with an error if a save failed and no ``wait`` raised it. All threads have ended before."""
    for handle in _SAVES.open:
        error = UsageError(handle._lost, at=handle._place, fix="call wait() on what save_checkpoint returns")
        error.__cause__ = handle._result.exception() if handle._result.done() else None
        sys.excepthook(UsageError, error, None)
    if _SAVES.open:
        # An exception here would only be printed, and the process would end without an error code.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(1)


def _settle(model: nn.Module) -> SaveHandle | None:
    """Wait for the last background save of ``model``; return it. Raises its error unless a ``wait`` did before."""
    previous = _SAVES.last.get(model)
    if previous in _SAVES.open:
        previous.wait()
    return previous


def save_checkpoint(
    folder: str | PathLike[str] | Storage,
    step: int,
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Any = None,
    keep: int = 2,
    asynchronous: bool = False,
    names: Names | None = None,
    per_rank: bool = False,
) -> SaveHandle:
    """Save model, optimizer state and ``extra`` as ``folder/step-NNNNNN``, and remove older checkpoints.

    Collective: all ranks, with equal arguments. The folder must be one that all ranks see. A kill at any moment
    leaves whole checkpoints only; the one before stays until this one is on disk. Only files of ``save_checkpoint``
    are ever removed or replaced. One run writes to a folder at a time: from its first save until the process of the
    first rank ends.

    Args:
        folder: The folder of the run; made if needed. A path, a URL such as ``s3://bucket/run``, or a ``Storage``.
        step: Optimizer steps done. A checkpoint of the same step is replaced.
        model: Annotated or plain. Each rank writes its pieces of sharded tensors, in their own dtypes; the
            checkpoint has the full shapes, each element once. A warning names plain parameters, beside annotated ones
            or of ``replicate``, that have other values on other ranks.
        optimizer: One, several, or none. State is saved by FQN, as it is; missing state is not initialised.
        extra: Settings, scheduler state, position in the data ... as data: tensors, numbers, strings, and lists,
            tuples and dicts of them. The value of rank 0 is saved; a warning names entries that differ on other
            ranks, unless they have ``None``.
        keep: Number of checkpoints to leave in the folder, with this one.
        asynchronous: Copy to the host, return, and write in the background, over a gloo group of its own. The next
            save of the model waits for this one, raises its error, and takes the memory of its copy, which is kept
            until a save that is not asynchronous, or the end of the model.
        names: Save a part of the model, such as adapters, with the state of optimizers for this part: names of the
            state dict, or a function that says of each whether it is wanted; the same on all ranks.
        per_rank: ``folder`` is a local one of each rank's own, or of each host's, where ``step-NNNNNN`` must be new;
            ``wait()`` gives this rank's. Copied onto each other these are the checkpoint. ``keep`` is not used.

    Returns:
        A handle to wait with; done already unless ``asynchronous``.

    Raises:
        ConfigError: A wrong argument, a parameter in the optimizer that is not the model's, values that are no data,
            checkpoints of later steps, a folder of this name that was not written here.
        UsageError: A parameter on the meta device, another run writes to the folder, or writing failed. The
            checkpoints before are as they were, and the one that was begun is removed.
        DesyncError: Ranks gave different arguments.
    """
    ranks = Ranks.of_world()
    with ranks.agreed():
        if any(isinstance(one, nn.Module) for one in (folder, step, optimizer)):
            found = ", ".join(map(described, (folder, step, model, optimizer)))
            raise ConfigError(f"the arguments are {found}", fix="save_checkpoint(folder, step, model, optimizer)")
        place, optimizers = checked_run("folder", folder, model, optimizer, keep)
        check_int("step", step, 0, fix="pass a number from 0")
        check_bool("asynchronous", asynchronous)
        check_bool("per_rank", per_rank)
        run = RankRun(place, step) if per_rank else Run(place)
        previous = _settle(model)
    shown = str(run if isinstance(folder, Storage) else folder)
    common = "one for each rank" if per_rank else shown
    arguments = {"folder": common, "step": step, "keep": keep, "asynchronous": asynchronous}
    this = f"the save of step {step} to {run}"
    with _named(this):
        given = [f"{name}={value!r}" for name, value in arguments.items()]
        every = names_on_all(ranks, model, optimizers, names, given)
        with ranks.agreed():
            state = contents.state_to_save(model, optimizers, every)
            packed = None if extra is None else as_data(extra, "extra")
            if asynchronous:
                state = contents.staged(state, _SAVES.copies.pop(model, None))
                _SAVES.copies[model] = state
            norms = {} if ranks.is_alone else contents.norms_of_plain(model, every.picked)
            save = Save(step, state, every, packed, _digests(extra), norms, keep)
        partial = _on_first(ranks, lambda: run.begin(step), f"cannot write to {shown}", _WRITE_FIX)
    writers = _writers(ranks, previous) if asynchronous else ranks

    def write() -> Path | str:
        with _named(this):
            return write_shares(writers, run, partial, save)

    handle = SaveHandle(writers, ranks, this)
    if asynchronous:
        _SAVES.last[model] = handle
        call_before_destroy(_wait_for_all)
        _SAVES.open.add(handle)
        # Python waits for such a thread before it ends, and lets it start others. A pool would raise at that time.
        Thread(target=handle._run, args=(write,), name="save_checkpoint", daemon=False).start()
    else:
        _SAVES.copies.pop(model, None)
        handle._result.set_result(write())
    return handle


def find_checkpoint(path: str | PathLike[str] | Storage) -> SavedCheckpoint:
    """Return the latest checkpoint in the folder of a run, or the checkpoint at ``path``.

    Looks at the disk only: not collective, and only ``extra`` is verified.

    Args:
        path: The folder of a run, or of one checkpoint: a path, a URL or a ``Storage``.

    Raises:
        ConfigError: There is no checkpoint, its description cannot be read, or ``extra`` is damaged or no data.
        OSError: The disk or the storage cannot be read.
    """
    folder = find_folder(folder_at("path", path))
    manifest = read_manifest(folder)
    check_undamaged(
        folder, find_damage(folder, {name: manifest.files[name] for name in manifest.files if name == EXTRA})
    )
    return read_saved(folder, manifest)


def load_checkpoint(
    path: str | PathLike[str] | Storage, model: nn.Module, optimizer: Optimizers = None, *, names: Names | None = None
) -> SavedCheckpoint:
    """Load a checkpoint of ``save_checkpoint``, written by any number of ranks with any sharding.

    Collective: all ranks. The bytes of all files, each on one rank, and the names of all values are checked first;
    then tensors are read in place. Hyperparameters, such as ``lr``, are loaded as saved. No code in the files is
    run.

    Args:
        path: The folder of a run, whose latest checkpoint is loaded, or of one checkpoint: a path or a URL, of which
            the value of rank 0 counts, or a ``Storage`` on every rank.
        model: Annotated or plain; not on the meta device. Its tensors have the full shapes that were saved, of which
            each rank reads its pieces; values of other dtypes are cast.
        optimizer: The optimizers that were saved, in that order. ``None``: only the model is loaded.
        names: Load a part of the model, with the state of optimizers for it, as for ``save_checkpoint``. The rest of
            the checkpoint, if there is one, is not read into the model, whose other values stay.

    Returns:
        The checkpoint, on every rank with the ``extra`` that rank 0 saved.

    Raises:
        ConfigError: There is no checkpoint; a file is missing, truncated, changed or no data; names or shapes in the
            model, or classes or groups of optimizers, differ from the saved ones. The message lists all
            differences. On every rank, and nothing has been changed.
        UsageError: A parameter on the meta device, or the files changed while they were read.
    """
    ranks = Ranks.of_world()
    with ranks.agreed():
        optimizers = _checked(model, optimizer)
        _settle(model)

    def find() -> tuple[str, bool, bytes]:
        found = find_folder(folder_at("path", path))
        return str(found.path), isinstance(path, Storage), read_manifest(found).as_bytes()

    shown = "the storage" if isinstance(path, Storage) else path
    text, is_name, content = _on_first(ranks, find, f"cannot read {shown}", _READ_FIX)
    with ranks.agreed():
        if is_name and not isinstance(path, Storage):
            raise ConfigError(f"path is {described(path)}, and a storage on the first rank", fix=_WITH_STORAGE)
        folder = StoredFolder(path, text) if is_name and isinstance(path, Storage) else folder_at("path", text)
        manifest = read_manifest(folder, content)
        check_version(folder, manifest)
    # All files are read, each on one rank.
    mine = {name: manifest.files[name] for name in sorted(manifest.files)[ranks.rank :: ranks.size]}
    with _agreed(ranks, f"{folder} cannot be read", _READ_FIX):
        damage = find_damage(folder, mine)
    check_undamaged(folder, _on_any(ranks, damage))
    failure = f"{folder} was not loaded to its end"
    every = names_on_all(ranks, model, optimizers, names)
    description = _on_first(ranks, lambda: pieces_text(folder, manifest), failure, _HALF_LOADED_FIX)
    with _agreed(ranks, failure, _HALF_LOADED_FIX):
        reader = DataReader(folder, manifest.files, description)
        contents.check_fit(reader, manifest.optimizers, every, names)
        flat = contents.targets(reader, model, optimizers, every)
        checkpoint = read_saved(folder, manifest)
    check_undamaged(folder, _on_any(ranks, reader.find_faults(flat)))
    with _named(f"the load of {folder}"):
        with _agreed(ranks, failure, _HALF_LOADED_FIX):
            reader.read_into(flat)
        with ranks.agreed():
            try:
                contents.apply(reader.tree(flat), model, optimizers, every.picked)
            # Whoever made a checkpoint up may have given the optimizer, or a module's extra state, values of any type.
            except Exception as error:
                at = f"{place_of_rank()}: {type(error).__name__}: {error}"
                raise UsageError(failure, at=at, fix=_HALF_LOADED_FIX) from error
    return checkpoint


def checked_run(
    name: str, folder: object, model: nn.Module, optimizer: Optimizers, keep: int
) -> tuple[StoredFolder, tuple[torch.optim.Optimizer, ...]]:
    """Check what saves of a run have in common; return the folder, which is the argument ``name``, and optimizers."""
    optimizers = _checked(model, optimizer)
    place = folder_at(name, folder)
    check_int("keep", keep, 1, fix="pass a number from 1")
    return place, optimizers


def _checked(model: nn.Module, optimizer: Optimizers) -> tuple[torch.optim.Optimizer, ...]:
    check_module("model", model)
    optimizers: Any = tuple(optimizer) if isinstance(optimizer, Iterable) else (optimizer,)
    for one in (optimizer,) if isinstance(optimizer, Mapping) else optimizers if optimizer is not None else ():
        if not all(hasattr(one, name) for name in ("param_groups", "state_dict", "load_state_dict")):
            what = f"optimizer is or holds {described(one)}, not an optimizer"
            raise ConfigError(what, fix="pass an optimizer, a list of them, or None")
    return optimizers if optimizer is not None else ()


def _on_first(ranks: Ranks, call: Callable[[], T], failure: str, fix: str) -> T:
    """Return on every rank what ``call`` returns on the first; ``failure`` is the text for other errors than ours."""
    result: Any = None
    with _agreed(ranks, failure, fix):
        if ranks.rank == 0:
            result = call()
    first: T = ranks.object_of(0, result)
    return first


# -- writing


def _writers(ranks: Ranks, previous: SaveHandle | None) -> Ranks:
    """Return the same ranks in a group for background saves: the group of ``previous`` if it still fits."""
    if ranks.group is None:
        return ranks
    if previous is not None and previous._beside == ranks and previous._writers != ranks:
        return previous._writers
    return make_host_ranks()


class _SummedFile:
    """A file with its length and checksum, which are taken while it is written."""

    def __init__(self, file: Any) -> None:
        self._file, self.sum = file, FileSum(0, 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: Any) -> None:
        self._file.write(content)
        self.sum = FileSum(self.sum.bytes + len(content), zlib.crc32(content, self.sum.crc32))


class _SummedFiles(FileSystem):
    """The files that a rank writes, with the sum of each by name."""

    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as file:
            yield (summed := _SummedFile(file))
        self.sums[Path(path).name] = summed.sum


@dataclass(frozen=True)
class Save:
    """What is saved: values as ``state_to_save`` gives them, and ``extra`` as bytes, with a digest of each entry.

    Beside it are the norms that ranks compare, of ``norms_of_plain``.
    """

    step: int
    state: dict[str, Any]
    every: NamesOnAll
    extra: bytes | None = None
    digests: Mapping[str, int] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)
    keep: int = 1


def write_shares(ranks: Ranks, run: Run, partial: str, save: Save) -> Path | str:
    """Write this rank's share; return the path once the checkpoint of all ranks is whole. Collective.

    Digests of ``extra`` are compared with those of the first rank, whose ``extra`` is saved. Whatever fails after the
    first rank has made the checkpoint is a warning, also the end of a rank that has not heard of it.
    """
    what = f"{run.folder(partial)} was not written to its end; earlier checkpoints are as they were"
    # On the first rank: the path, once there is a checkpoint, and then an interrupt.
    done: list[Any] = []
    try:
        with ExitStack() as stack:
            with _agreed(ranks, what, _WRITE_FIX):
                room = stack.enter_context(run.room(partial))
                planner = SharePlanner(save.state, save.every, ranks)
            plan = planner.share()
            writer = FileSystemWriter(room, sync_files=run.local is not None)
            writer.fs = files = _SummedFiles()
            with _agreed(ranks, what, _WRITE_FIX):
                written = planner.report(writer.write_data(plan, planner).value()) if plan.items else {}
                for name in files.sums:
                    run.put(partial, room / name)
            own = [(name, astuple(one), written) for name, one in files.sums.items()]
            reports = [json.loads(text) for text in ranks.texts_on_first(json.dumps((own, save.digests, save.norms)))]
            try:
                with _agreed(ranks, what, _WRITE_FIX):
                    if ranks.rank == 0:
                        _warn_of_others(save.digests, [digests for _, digests, _ in reports])
                        _warn_of_drift([norms for *_, norms in reports])
                        _publish(run, partial, room, save, [file for every, *_ in reports for file in every], done)
            except Exception as error:
                if not done:
                    raise
                _LOG.warning("%s is whole, and not all ranks have answered that they know it: %s", done[0], error)
    except BaseException as error:
        if ranks.rank == 0:
            # After an error no rank writes any more: all ranks have said so. What is committed stays.
            run.abandon(partial, remove=isinstance(error, Exception))
        raise
    if done[1:]:
        raise done[1]
    return run.path(partial)


def _publish(run: Run, partial: str, room: Path, save: Save, reported: Iterable[Any], done: list[Any]) -> None:
    """Describe what the ranks have written, and make a checkpoint of it."""
    files = {name: (FileSum(*one), values) for name, one, values in reported}
    sums = {name: one for name, (one, _) in files.items()}

    def put(name: str, content: bytes) -> None:
        sums[name] = write_summed(room / name, content)
        run.put(partial, room / name)

    text = merge({name: values for name, (_, values) in files.items()})
    put(METADATA, pickle.dumps(DataReader(run.folder(partial), sums, text).metadata()))
    put(PIECES, text.encode())
    if save.extra is not None:
        put(EXTRA, save.extra)
    run.commit(partial, Manifest(save.step, sums, save.every.optimizers))
    done.append(run.path(partial))
    try:
        with warned(f"{done[0]} is saved, but not all earlier checkpoints and leftovers could be removed"):
            run.settle(partial, keep=save.keep)
    # The other ranks wait for word from this one, also after Ctrl-C.
    except BaseException as error:
        done.append(error)


def _digests(extra: Any) -> dict[str, int]:
    """Return a number for each entry of ``extra``, equal where values are."""

    def plain(leaf: Any) -> Any:
        return zlib.crc32(as_data(leaf.detach().cpu().clone(), "extra")) if isinstance(leaf, torch.Tensor) else leaf

    entries = extra if isinstance(extra, Mapping) else {"": extra}
    found = {str(key): repr(tree_map(plain, value)).encode() for key, value in entries.items() if value is not None}
    return {key: zlib.crc32(text) for key, text in found.items()}


def _warn_of_others(first: Mapping[str, int], every: Iterable[Mapping[str, int]]) -> None:
    """Warn of entries of ``extra`` that other ranks have given with other values than the first rank."""
    if keys := sorted({key for own in every for key, digest in own.items() if first.get(key, digest) != digest}):
        advice = "gather them (dist.all_gather_object), save the list, and take [dist.get_rank()] of it after the load"
        of = f" of {list_text(keys)}" if any(keys) else ""
        warn_once(f"extra: ranks have other values{of}, and those of rank 0 are saved. To keep each rank's: {advice}")


def _warn_of_drift(every: Iterable[Mapping[str, float]]) -> None:
    """Warn of plain parameters whose norms differ between the ranks that have them."""
    told: dict[str, list[float]] = {}
    for name, norm in (one for own in every for one in own.items()):
        told.setdefault(name, []).append(norm)
    if names := [name for name, norms in told.items() if max(norms) > _ALIKE * min(norms)]:
        warn_once(
            f"ranks have other values of plain parameters, and one rank's are saved: {list_text(names)}"
            f"\n  at:  {place_of_rank()}\n  fix: write to them alike on every rank; or {FORGOTTEN_FIX}"
        )


# -- reading


def _on_any(ranks: Ranks, lines: list[str]) -> list[str]:
    """Return the lines of all ranks, each once. Collective."""
    if ranks.are_alike(repr(lines)):
        return lines
    return [*dict.fromkeys(line for own in ranks.objects(lines) for line in own)]


def check_undamaged(folder: object, damage: list[str]) -> None:
    """Raise if there are lines in ``damage``, such as those of ``find_damage``."""
    if damage:
        fix = "load an older checkpoint of the run, or restore this one from a copy"
        raise ConfigError("\n  - ".join([f"{folder} is damaged:", *damage]), fix=fix)


def check_version(folder: StoredFolder, manifest: Manifest) -> None:
    """Raise if an earlier version has saved a checkpoint, whose description is a pickle."""
    if PIECES not in manifest.files:
        command = f"python -m composable convert {shlex.quote(str(folder))} NEW"
        fix = f"run `{command}`, which writes a copy for this version to the folder NEW, and load that"
        raise ConfigError(f"{folder} was saved by an earlier version, and has to be converted", fix=fix)


def pieces_text(folder: StoredFolder, manifest: Manifest) -> str:
    """Return the text of ``pieces.json``."""
    return folder.read(PIECES, 0, manifest.files[PIECES].bytes).decode(errors="replace")


def read_saved(folder: StoredFolder, manifest: Manifest) -> SavedCheckpoint:
    """Return the checkpoint in ``folder`` with its ``extra``; raises if that is no data."""
    if EXTRA not in manifest.files:
        return SavedCheckpoint(folder.path, manifest.step, None)
    # At once: torch would tell an error of the disk as one of the archive.
    content = io.BytesIO(folder.read(EXTRA, 0, manifest.files[EXTRA].bytes))
    return SavedCheckpoint(folder.path, manifest.step, read_data(content, f"{folder}/{EXTRA}"))


@contextmanager
def _named(call: str) -> Iterator[None]:
    """Name ``call`` in the error of a wait for ranks that are gone."""
    try:
        yield
    except DesyncError as error:
        if not isinstance(error.__cause__, RuntimeError):
            raise
        raise DesyncError(f"{call} has not ended: {error.what}", at=error.at, fix=error.fix) from error.__cause__


def _ours(error: BaseException, what: str, fix: str) -> ComposableError:
    """Return an error of the system, or of torch's writers and readers, as one of this library."""
    if isinstance(error, ComposableError):
        return error
    # torch's text about a pickle is replaced: it advises to trust the file.
    text = "it holds what is no data" if isinstance(error, pickle.UnpicklingError) else str(error)
    return UsageError(what, at=f"{place_of_rank()}: {type(error).__name__}: {text}", fix=fix)


@contextmanager
def _agreed(ranks: Ranks, what: str, fix: str) -> Iterator[None]:
    """Run a block as ``ranks.agreed`` does; any error becomes one of this library. Ctrl-C is told too, and stays."""
    failure: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failure = error
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError | KeyboardInterrupt):
            # An error of torch is about its archive; its context has the cause.
            failure = error if isinstance(error, ComposableError) else error.__context__
    try:
        ranks.raise_together(None if failure is None else _ours(failure, what, fix))
    except Exception as error:
        if failure is None or failure is error:
            raise
        raise (error if isinstance(failure, Exception) else failure) from (
            failure if isinstance(failure, Exception) else None
        )

"""``convert``: a checkpoint becomes safetensors, these a checkpoint, and the folders of ranks one checkpoint.

Memory: of a checkpoint one batch of values is read at a time; safetensors are mapped, and copied value by value.
"""

import argparse
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from composable.comm import Ranks
from composable.commands.check import damage_of, opened, reader_of
from composable.commands.output import progress, show
from composable.errors import ConfigError, UsageError
from composable.ground.names import check_int, list_text
from composable.runs.checkpoint import check_undamaged, run_at, write_shares
from composable.runs.run_folder import (
    LOCK,
    MANIFEST,
    FileSum,
    FolderRun,
    Manifest,
    RankRun,
    find_damage,
    find_folder,
    open_regular,
    read_manifest,
    sync_folder,
)
from composable.runs.safetensors import check_types, holds_weights, open_files, open_writer
from composable.runs.storage import StoredFolder, folder_at
from composable.runs.stored_run import StoredRun
from composable.saving import NamesOnAll, batches

_BATCH_BYTES = 2**28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the sources, the target, and the step of a checkpoint that safetensors do not know."""
    parser.add_argument(
        "source",
        nargs="+",
        help="a checkpoint or a run, whose model becomes safetensors; a safetensors file or folder, which becomes a "
        "checkpoint; or the folders of all ranks of a save with per_rank=True, which become one checkpoint",
    )
    parser.add_argument("target", help="a new folder or URL, or a new FILE.safetensors; nothing is overwritten")
    parser.add_argument("--step", type=int, default=0, help="the step of a checkpoint made of safetensors (0)")


def run(args: argparse.Namespace) -> int:
    """Convert, and print what was made."""
    place, sources = folder_at("target", args.target), [folder_at("source", one) for one in args.source]
    _check_new(place)
    try:
        with _room(place) as room:
            if len(sources) > 1:
                name = _merge(sources, room)
            elif holds_weights(sources[0]):
                name = _to_checkpoint(sources[0], room, args.step)
            else:
                name = _to_safetensors(args.source[0], room)
    except OSError as error:
        what, fix = f"{place} was not written: {error}", "make room, and let this process read and write there"
        raise UsageError(what, fix=fix) from error
    show({"path": str(place / name if name else place)}, as_json=args.json)
    return 0


def _check_new(place: Path | StoredFolder) -> None:
    if isinstance(place, Path):
        is_held = os.path.lexists(place) and not (place.is_dir() and not any(place.iterdir()))
    else:
        is_held = bool(place.list()) or place.name.rpartition("/")[2] in place.parent.list()
    if is_held:
        raise ConfigError(f"{place} exists already", fix="pass the name of a new folder or file")


@contextmanager
def _room(place: Path | StoredFolder) -> Iterator[Path | StoredFolder]:
    """Yield where to write: beside a local place, which gets all of it at the end; in a storage the place itself."""
    if isinstance(place, StoredFolder):
        try:
            yield place
        except BaseException:
            with suppress(OSError):
                place.remove(LOCK)
            raise
        return
    place = place.absolute()
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=place.parent) as room:
        yield Path(room, place.name)
        # The system refuses to replace a folder that holds something by now.
        Path(room, place.name).rename(place)
        sync_folder(place.parent)


@contextmanager
def _begun(run: FolderRun | StoredRun | RankRun, step: int) -> Iterator[str]:
    """Begin a checkpoint, and remove it if what follows fails."""
    partial = run.begin(step)
    try:
        yield partial
    except BaseException:
        run.abandon(partial, remove=True)
        raise


def _to_safetensors(source: str, place: Path | StoredFolder) -> str:
    folder, manifest = opened(source)
    check_undamaged(folder, damage_of(folder, manifest))
    reader = reader_of(folder, manifest)
    metadata = reader.metadata
    values: dict[str, Any] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if metadata.planner_data[key][0] == "model":
            values[key.removeprefix("model.")] = None
            if isinstance(entry, TensorStorageMetadata):
                value = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
                values[key.removeprefix("model.")] = value
    if not values:
        raise ConfigError(f"{folder} holds nothing of a model", fix="pass a checkpoint of a model")
    check_types(values)
    with ExitStack() as stack:
        writer = open_writer(place, values, stack)
        for batch in progress([*batches(values.items(), _BATCH_BYTES)], "batches are written"):
            read = {f"model.{name}": torch.empty_like(value, device="cpu") for name, value in batch}
            check_undamaged(folder, reader.find_faults(read))
            reader.read_into(read)
            writer.write({name: read[f"model.{name}"] for name, _ in batch})
        writer.publish()
    return ""


def _to_checkpoint(source: Path | StoredFolder, place: Path | StoredFolder, step: int) -> str:
    check_int("step", step, 0, fix="pass a number from 0")
    with ExitStack() as stack:
        files = open_files(source, stack)
        values = {name: files[name] for name in files}
        values |= {alias: values[name] for alias, name in files.aliases().items()}
        every = NamesOnAll((), frozenset(), frozenset(values), {}, values)
        run = run_at(place, step)
        with _begun(run, step) as partial:

            def publish(_: Path, sums: dict[str, FileSum]) -> Path | str:
                return run.publish(partial, Manifest(step, sums, ()))

            made = write_shares(Ranks.of_world(), run, partial, {"model": values}, every, publish, {}, 1)
    return str(made).rpartition("/")[2]


def _merge(sources: Sequence[Path | StoredFolder], place: Path | StoredFolder) -> str:
    """Copy the parts of a checkpoint into one folder, once all of its files are found and are as they were written."""
    parts = [find_folder(source.absolute()) for source in sources if isinstance(source, Path)]
    firsts = [part for part in parts if (part / MANIFEST).is_file()]
    if len(firsts) != 1 or len(parts) != len(sources):
        what = f"of these folders {len(firsts)} have {MANIFEST}, not one: {list_text([str(one) for one in sources])}"
        raise ConfigError(what, fix="pass the local folders of all ranks of one save with per_rank=True")
    manifest = read_manifest(firsts[0])
    # A part may hold a later step, whose save did not end.
    parts = [part if part.name == firsts[0].name else part.parent / firsts[0].name for part in parts]
    holders = {path.name: part for part in parts if part.is_dir() for path in part.iterdir()}
    damage = []
    for name in progress(manifest.files, "files are read"):
        damage += find_damage(holders.get(name, firsts[0]), {name: manifest.files[name]})
    check_undamaged(f"step {manifest.step} of {list_text([str(one) for one in sources])}", damage)
    run = run_at(place, manifest.step)
    with _begun(run, manifest.step) as partial, run.room(partial) as room:
        for name in progress(manifest.files, "files are copied"):
            with open_regular(holders[name] / name) as file, (room / name).open("xb") as copy:
                shutil.copyfileobj(file, copy)
                copy.flush()
                os.fsync(copy.fileno())
            run.put(partial, room / name)
        made = run.publish(partial, manifest)
        run.tidy(partial, keep=1)
    return str(made).rpartition("/")[2]

"""``convert``: a checkpoint becomes safetensors, these a checkpoint, and parts, or an earlier version's, a checkpoint.

Memory: of a checkpoint one batch of values is read at a time; safetensors are mapped, and copied value by value.

Earlier versions described values in ``.metadata`` alone, a pickle of ``torch.distributed.checkpoint``. It is read into
objects that do nothing, whatever it names: whoever wrote it may have made it up.
"""

import argparse
import io
import os
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from composable.comm import Ranks
from composable.commands.check import damage_of, opened, reader_of
from composable.commands.output import progress, show
from composable.errors import ConfigError, UsageError
from composable.ground.names import check_int, list_text
from composable.runs.checkpoint import Save, check_undamaged, write_shares
from composable.runs.pieces import DataReader, merge
from composable.runs.run import (
    LOCK,
    MANIFEST,
    METADATA,
    PIECES,
    Manifest,
    Run,
    find_damage,
    find_folder,
    read_manifest,
)
from composable.runs.safetensors import check_types, open_files, open_writer, weights_in
from composable.runs.storage import StoredFolder, folder_at, on_disk, sync_folder, write_summed
from composable.saving import DISTRUST, NamesOnAll, batches

_BATCH_BYTES = 2**28


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the sources, the target, and the step of a checkpoint that safetensors do not know."""
    parser.add_argument(
        "source",
        nargs="+",
        help="a checkpoint or a run, whose model becomes safetensors, or of an earlier version a checkpoint of this "
        "one; a safetensors file or folder, which becomes a checkpoint; or the folders of all ranks of a save with "
        "per_rank=True, which become one checkpoint",
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
            elif str(sources[0]).endswith(".safetensors") or weights_in(sources[0]):
                name = _to_checkpoint(sources[0], room, args.step)
            else:
                name = _from_checkpoint(args.source[0], room)
    except OSError as error:
        what, fix = f"{place} was not written: {error}", "make room, and let this process read and write there"
        raise UsageError(what, fix=fix) from error
    show({"path": str(place / name if name else place)}, as_json=args.json)
    return 0


def _check_new(place: StoredFolder) -> None:
    if place.local:
        is_held = os.path.lexists(place.local) and not (place.local.is_dir() and not place.list())
    else:
        is_held = bool(place.list()) or place.last in place.parent.list()
    if is_held:
        raise ConfigError(f"{place} exists already", fix="pass the name of a new folder or file")


@contextmanager
def _room(place: StoredFolder) -> Iterator[StoredFolder]:
    """Yield where to write: beside a local place, which gets all of it at the end; in a storage the place itself."""
    if place.local is None:
        try:
            yield place
        except BaseException:
            with suppress(OSError):
                place.remove(LOCK)
            raise
        return
    target = place.local.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".partial-", dir=target.parent) as room:
        yield on_disk(Path(room, target.name))
        # The system refuses to replace a folder that holds something by now.
        Path(room, target.name).rename(target)
        sync_folder(target.parent)


def _from_checkpoint(source: str, place: StoredFolder) -> str:
    folder, manifest = opened(source)
    check_undamaged(folder, damage_of(folder, manifest))
    if PIECES not in manifest.files:
        return _copy(dict.fromkeys(manifest.files, folder), manifest, place)
    reader = reader_of(folder, manifest)
    values: dict[str, Any] = {}
    for key, (path, dtype, size) in reader.values.items():
        if path[0] == "model":
            values[key.removeprefix("model.")] = dtype and torch.empty(size, dtype=dtype, device="meta")
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


def _to_checkpoint(source: StoredFolder, place: StoredFolder, step: int) -> str:
    check_int("step", step, 0, fix="pass a number from 0")
    with ExitStack() as stack:
        files = open_files(source, stack)
        values = {name: files[name] for name in files}
        values |= {alias: values[name] for alias, name in files.aliases().items()}
        every = NamesOnAll((), frozenset(), frozenset(values), {}, values)
        run = Run(place)
        made = write_shares(Ranks.of_world(), run, run.begin(step), Save(step, {"model": values}, every))
    return str(made).rpartition("/")[2]


def _merge(sources: Sequence[StoredFolder], place: StoredFolder) -> str:
    """Copy the parts of a checkpoint into one folder, once all of its files are found and are as they were written."""
    parts = [find_folder(source) for source in sources if source.local]
    firsts = [part for part in parts if part.has(MANIFEST)]
    if len(firsts) != 1 or len(parts) != len(sources):
        what = f"of these folders {len(firsts)} have {MANIFEST}, not one: {list_text([str(one) for one in sources])}"
        raise ConfigError(what, fix="pass the local folders of all ranks of one save with per_rank=True")
    manifest = read_manifest(firsts[0])
    # A part may hold a later step, whose save did not end.
    parts = [part.parent / firsts[0].last for part in parts]
    holders = dict.fromkeys(manifest.files, firsts[0]) | {name: part for part in parts for name in part.list()}
    damage = []
    for name in progress(manifest.files, "files are read"):
        damage += find_damage(holders[name], {name: manifest.files[name]})
    check_undamaged(f"step {manifest.step} of {list_text([str(one) for one in sources])}", damage)
    return _copy(holders, manifest, place)


def _copy(holders: dict[str, StoredFolder], manifest: Manifest, place: StoredFolder) -> str:
    """Make one checkpoint of the files of ``manifest``, each in its folder; describe values if it does not."""
    run, files = Run(place), dict(manifest.files)
    partial = run.begin(manifest.step)
    try:
        with run.room(partial) as room:
            for name in progress(manifest.files, "files are copied"):
                with (room / name).open("xb") as copy:
                    copy.writelines(holders[name].parts(name, files[name].bytes))
                    copy.flush()
                    os.fsync(copy.fileno())
                run.put(partial, room / name)
            if PIECES not in files:
                text = _described(holders[METADATA], manifest)
                files[PIECES] = write_summed(room / PIECES, text.encode())
                run.put(partial, room / PIECES)
            run.commit(partial, Manifest(manifest.step, files, manifest.optimizers))
            run.settle(partial, keep=1)
    except BaseException:
        run.abandon(partial, remove=True)
        raise
    return str(run.path(partial)).rpartition("/")[2]


# -- checkpoints of earlier versions


class _Held:
    """An object in place of any that ``.metadata`` names: its state, which its class does not take."""

    state: Any = None

    def __init__(self, *_: object) -> None:
        """Take what another class would be called with."""

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """An unpickler that makes plain values, and objects that do nothing, whatever a pickle names."""

    def find_class(self, module: str, name: str) -> Any:
        known = {"Size": tuple}.get(name, getattr(torch, name, None) if module == "torch" else None)
        return known if known is tuple or isinstance(known, torch.dtype) else type(name, (_Held,), {})


def _described(folder: StoredFolder, manifest: Manifest) -> str:
    """Return what ``.metadata`` says of all values as the text of ``pieces.json``; raises unless all of it is right."""
    try:
        found = _Unpickler(io.BytesIO(folder.read(METADATA, 0, manifest.files[METADATA].bytes))).load()
        text = merge(_reports(found))
        DataReader(folder, manifest.files, text).metadata()
    except OSError:
        raise
    # Whoever made a file up may make Python raise errors of any type.
    except Exception as error:
        what = f"{folder}/{METADATA} does not describe a checkpoint: {error!s:.200}"
        raise ConfigError(what, fix=DISTRUST) from None
    return text


def _reports(found: Any) -> dict[str, Any]:
    """Return for each file what a rank of this version would have reported."""
    body, places = _state_of(found, "Metadata"), dict[Any, Any]()
    for index, place in body["storage_data"].items():
        key, info = _state_of(index, "MetadataIndex"), _state_of(place, "_StorageInfo")
        if info.get("transform_descriptors"):
            raise ValueError(f"a piece of {key['fqn']} was transformed")
        places[key["fqn"], key.get("offset")] = info["relative_path"], [info["offset"], info["length"]]
    reports: dict[str, Any] = {}
    for fqn, entry in body["state_dict_metadata"].items():
        value: list[Any] = [list(body["planner_data"][fqn]), None, ()]
        boxes: list[Any] = [(None, ())]
        if type(entry).__name__ != "BytesStorageMetadata":
            state = _state_of(entry, "TensorStorageMetadata")
            value = [value[0], str(_state_of(state["properties"], "TensorProperties")[0])[6:], state["size"]]
            chunks = [_state_of(chunk, "ChunkStorageMetadata") for chunk in state["chunks"]]
            boxes = [(chunk["offsets"], chunk["sizes"]) for chunk in chunks]
        for offsets, sizes in boxes:
            file, place = places.pop((fqn, offsets))
            numbers = [*place, *(offsets or ()), *sizes]
            reports.setdefault(file, {}).setdefault(fqn, [*value, []])[-1].append(numbers)
    if places or len(body["planner_data"]) > len(body["state_dict_metadata"]):
        raise ValueError("values have no place or path, or two")
    return reports


def _state_of(held: Any, kind: str) -> Any:
    if type(held).__name__ != kind or not isinstance(held, _Held):
        raise ValueError(f"it has {type(held).__name__} for {kind}")
    return held.state

"""``check``: whether a checkpoint is whole, and what is in it."""

import argparse
import math
from typing import Any

from composable.commands.output import progress, show
from composable.errors import ConfigError, UsageError
from composable.ground.names import count_text
from composable.runs.checkpoint import check_version, pieces_text, read_saved
from composable.runs.pieces import DataReader
from composable.runs.run import EXTRA, MANIFEST, PIECES, RANK, Manifest, find_damage, find_folder, read_manifest
from composable.runs.storage import StoredFolder, folder_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the checkpoint."""
    parser.add_argument("path", help="the folder or URL of a checkpoint, or of a run, whose latest one is checked")


def run(args: argparse.Namespace) -> int:
    """Print what is in the checkpoint and what is wrong; 1 if anything is."""
    folder, manifest = opened(args.path)
    problems = damage_of(folder, manifest)
    found: dict[str, Any] = {
        "path": str(folder),
        "step": manifest.step,
        "ranks that wrote": len({match[1] for name in manifest.files if (match := RANK.match(name))}),
        "optimizers": [f"{one.kind} with {count_text(len(one.groups), 'param group')}" for one in manifest.optimizers],
        "extra": EXTRA in manifest.files,
        "files": len(manifest.files),
        "file bytes": sum(one.bytes for one in manifest.files.values()),
        "not listed": sorted({*folder.list()} - {*manifest.files, MANIFEST}),
    }
    # What pieces.json describes is read only where it is as it was written.
    if not any(f"/{PIECES} " in line for line in problems):
        try:
            found |= _values(reader_of(folder, manifest))
            if not problems:
                read_saved(folder, manifest)
        except ConfigError as error:
            problems.append(error.what)
    show(found | {"problems": problems, "is whole": not problems}, as_json=args.json)
    return int(bool(problems))


def opened(path: str) -> tuple[StoredFolder, Manifest]:
    """Return the folder of the checkpoint that ``find_checkpoint`` finds, and its manifest."""
    try:
        folder = find_folder(folder_at("path", path))
        manifest = read_manifest(folder)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="let this process read there") from error
    return folder, manifest


def reader_of(folder: StoredFolder, manifest: Manifest) -> DataReader:
    """Return a reader of the values that ``pieces.json`` describes; raises if there is none."""
    check_version(folder, manifest)
    return DataReader(folder, manifest.files, pieces_text(folder, manifest))


def damage_of(folder: StoredFolder, manifest: Manifest) -> list[str]:
    """Read all files of a checkpoint; return a line for each that is not as it was written."""
    names = progress(sorted(manifest.files), "files are read")
    return [line for name in names for line in find_damage(folder, {name: manifest.files[name]})]


def _values(reader: DataReader) -> dict[str, Any]:
    """Return how many tensors, elements and bytes the model, and the state of optimizers, have."""
    found = {}
    for part in ("model", "optimizer"):
        every = [one for one in reader.values.values() if one.path[0] == part]
        sizes = [(math.prod(one.size), one.dtype) for one in every if one.dtype]
        nbytes = sum(numel * dtype.itemsize for numel, dtype in sizes)
        found[part] = {"tensors": len(sizes), "elements": sum(numel for numel, _ in sizes), "bytes": nbytes}
    return found

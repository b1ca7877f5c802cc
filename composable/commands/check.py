"""``check``: whether a checkpoint is whole, and what is in it."""

import argparse
import math
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from composable.commands.output import progress, show
from composable.errors import ConfigError, UsageError
from composable.ground.names import count_text
from composable.runs.checkpoint import locate, read_saved
from composable.runs.contents import DataReader, read_description
from composable.runs.run_folder import EXTRA, MANIFEST, METADATA, RANK, Manifest, find_damage, read_manifest
from composable.runs.storage import StoredFolder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take the checkpoint."""
    parser.add_argument("path", help="the folder or URL of a checkpoint, or of a run, whose latest one is checked")


def run(args: argparse.Namespace) -> int:
    """Print what is in the checkpoint and what is wrong; 1 if anything is."""
    folder, manifest = opened(args.path)
    problems = damage_of(folder, manifest)
    names = [path.name for path in folder.iterdir()] if isinstance(folder, Path) else folder.list()
    found: dict[str, Any] = {
        "path": str(folder),
        "step": manifest.step,
        "ranks that wrote": len({match[1] for name in manifest.files if (match := RANK.match(name))}),
        "optimizers": [f"{one.kind} with {count_text(len(one.groups), 'param group')}" for one in manifest.optimizers],
        "extra": EXTRA in manifest.files,
        "files": len(manifest.files),
        "file bytes": sum(one.bytes for one in manifest.files.values()),
        "not listed": sorted({*names} - {*manifest.files, MANIFEST}),
    }
    # What .metadata describes is read only where it is as it was written.
    if not any(f"/{METADATA} " in line for line in problems):
        try:
            found |= _values(reader_of(folder, manifest).metadata)
            if not problems:
                read_saved(folder, manifest)
        except ConfigError as error:
            problems.append(error.what)
    show(found | {"problems": problems, "is whole": not problems}, as_json=args.json)
    return int(bool(problems))


def opened(path: str) -> tuple[Path | StoredFolder, Manifest]:
    """Return the folder of the checkpoint that ``find_checkpoint`` finds, and its manifest."""
    try:
        folder = locate(path)
        manifest = read_manifest(folder)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}", fix="let this process read there") from error
    return folder, manifest


def reader_of(folder: Path | StoredFolder, manifest: Manifest) -> DataReader:
    """Return a reader of the values that ``.metadata`` describes."""
    return DataReader(folder, manifest.files, read_description(folder, manifest.files))


def damage_of(folder: Path | StoredFolder, manifest: Manifest) -> list[str]:
    """Read all files of a checkpoint; return a line for each that is not as it was written."""
    names = progress(sorted(manifest.files), "files are read")
    return [line for name in names for line in find_damage(folder, {name: manifest.files[name]})]


def _values(metadata: Metadata) -> dict[str, Any]:
    """Return how many tensors, elements and bytes the model, and the state of optimizers, have."""
    found = {}
    for part in ("model", "optimizer"):
        every = [metadata.state_dict_metadata[key] for key, path in metadata.planner_data.items() if path[0] == part]
        sizes = [(math.prod(one.size), one.properties.dtype) for one in every if isinstance(one, TensorStorageMetadata)]
        nbytes = sum(numel * dtype.itemsize for numel, dtype in sizes)
        found[part] = {"tensors": len(sizes), "elements": sum(numel for numel, _ in sizes), "bytes": nbytes}
    return found

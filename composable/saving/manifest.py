"""What a checkpoint says about itself in ``checkpoint.json``, and whether its files are what was written.

Names there are names of files in that folder: what leads out of it is an error. Lengths and CRC-32 find
accidents; against intent nothing here protects but that what is read is taken for data.

Nothing here communicates.
"""

import json
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composable.errors import ConfigError, place_of_rank
from composable.optim import GroupNames, OptimizerNames

__all__ = [
    "MANIFEST",
    "METADATA",
    "UNREADABLE",
    "FileSum",
    "HookName",
    "HookStates",
    "Manifest",
    "check_inside",
    "file_name",
    "find_damage",
    "hook_file",
    "manifest_bytes",
    "parse_manifest",
]

MANIFEST = "checkpoint.json"
METADATA = ".metadata"
_FORMAT = 1
# What a file that is no manifest makes Python raise.
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class FileSum:
    """Length and CRC-32 of a file."""

    bytes: int
    crc32: int


@dataclass(frozen=True)
class HookName:
    """A communication hook: the FQN of the module that it is registered on, and its own name."""

    module: str
    hook: str

    def __str__(self) -> str:
        return f"communication hook {self.hook} on {f'module {self.module!r}' if self.module else 'the model'}"


@dataclass(frozen=True)
class HookStates:
    """The states of hooks in a checkpoint: a file for each of ``ranks``."""

    ranks: int
    hooks: tuple[HookName, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        step: Optimizer steps done.
        files: Every other file, by name.
        optimizers: What was saved of them, in order.
        hook_states: Of communication hooks, if any.
    """

    step: int
    files: dict[str, FileSum]
    optimizers: tuple[OptimizerNames, ...]
    hook_states: HookStates | None = None


def parse_manifest(path: Path) -> Manifest:
    """Return what the file ``path`` says; raises one of ``UNREADABLE`` where it cannot be believed."""
    document = json.loads(path.read_bytes())
    body = document["checkpoint"]
    if document["crc32"] != zlib.crc32(_canonical(body)):
        raise ValueError("its contents changed after it was written")
    if body["format"] != _FORMAT:
        raise ValueError(f"it has format {body['format']}, this version reads {_FORMAT}")
    files = {file_name(name): FileSum(**saved) for name, saved in body["files"].items()}
    for number in (body["step"], *(number for saved in files.values() for number in (saved.bytes, saved.crc32))):
        if type(number) is not int or number < 0:
            raise ValueError(f"{number!r} is no number of steps or bytes")
    if METADATA not in files:
        raise ValueError(f"it lists no {METADATA}")
    optimizers = tuple(
        OptimizerNames(
            _text(saved["kind"]),
            tuple(GroupNames(_texts(group["params"]), _texts(group["settings"])) for group in saved["groups"]),
        )
        for saved in body["optimizers"]
    )
    return Manifest(body["step"], files, optimizers, _hook_states(body.get("hook_states"), files))


def hook_file(rank: int) -> str:
    """Return the name of the file with the states of the hooks of a rank."""
    return f"hooks-{rank:05d}.pt"


def file_name(name: Any) -> str:
    """Return ``name``, which a file gave, if it is the name of a file beside it.

    Raises:
        ValueError: It is not.
    """
    if (
        type(name) is not str
        or name != Path(name).name
        or name in {"", ".", "..", MANIFEST}
        or {"\\", "\0"} & set(name)
    ):
        raise ValueError(f"{name!r:.80} is no name of a file in this folder")
    return name


def check_inside(folder: Path, path: Path) -> None:
    """Raise if ``path`` is a link that leads out of ``folder``.

    Raises:
        ConfigError: It is.
    """
    # A hub's cache keeps what its snapshots, and the folders in them, link to beside them.
    snapshots = next((parent for parent in folder.absolute().parents if parent.name == "snapshots"), None)
    roots = [folder] if snapshots is None else [folder, snapshots.parent / "blobs"]
    if path.is_symlink() and not any(path.resolve().is_relative_to(root.resolve()) for root in roots):
        raise ConfigError(
            f"{path} is a link out of its folder, to {path.resolve()}",
            at=place_of_rank(),
            fix="copy the file itself, if you trust where it is from",
        )


def manifest_bytes(manifest: Manifest) -> bytes:
    """Return what ``parse_manifest`` reads."""
    body = {"format": _FORMAT, **asdict(manifest)}
    return json.dumps({"crc32": zlib.crc32(_canonical(body)), "checkpoint": body}, indent=1).encode()


def find_damage(folder: Path, files: dict[str, FileSum]) -> list[str]:
    """Read ``files`` and return a line for each that is not what was written."""
    lines = []
    for name, saved in files.items():
        path = folder / name
        try:
            check_inside(folder, path)
            found = path.stat().st_size
            if not path.is_file():
                lines.append(f"{path} is no file")
            elif found != saved.bytes:
                lines.append(f"{path} has {found:,} bytes; {saved.bytes:,} were written")
            elif _crc32(path) != saved.crc32:
                lines.append(f"{path} has changed: its {found:,} bytes are not those that were written")
        except ConfigError as error:
            lines.append(error.what)
        except FileNotFoundError:
            lines.append(f"{path} is missing")
        except OSError as error:
            lines.append(f"{path} cannot be read: {error}")
    return lines


def _hook_states(saved: Any, files: dict[str, FileSum]) -> HookStates | None:
    if saved is None:
        return None
    if type(saved["ranks"]) is not int or not all(hook_file(rank) in files for rank in range(saved["ranks"])):
        raise ValueError("it lists no states of hooks for each rank")
    return HookStates(
        saved["ranks"], tuple(HookName(_text(one["module"]), _text(one["hook"])) for one in saved["hooks"])
    )


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.40} is no name")
    return value


def _texts(values: Any) -> tuple[str, ...]:
    if type(values) is not list:
        raise ValueError(f"{values!r:.40} is no list of names")
    return tuple(map(_text, values))


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _crc32(path: Path) -> int:
    crc32 = 0
    chunk = memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            crc32 = zlib.crc32(chunk[:count], crc32)
    return crc32

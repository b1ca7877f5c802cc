"""Where the values of a checkpoint lie: ``pieces.json``, and the same for torch alone, ``.metadata``.

The JSON has the names of the files, and by flat name of each value its path in the tree, dtype (none of what is no
tensor), size, and a text of its own with numbers: of each piece the place of its file in the list, start, length,
offsets, sizes. So a rank need not look at pieces of values that it has no part of. Python objects for all pieces would
cost most of the time of a load, also in garbage collection.

Nothing in a file is trusted, as whoever wrote it may have made it up (docs/security.md). Values other than tensors are
read as data, and no pickle is read. A value is read once all of its pieces are found to lie in files of the checkpoint,
once.
"""

import io
import json
import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import product
from operator import add, le, lt
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.tensor import DTensor

from composable.errors import ConfigError
from composable.ground.torch_private import place_in_file, unflatten_state_dict
from composable.runs.run import PIECES, unique
from composable.runs.storage import FileSum, StoredFolder
from composable.saving import DISTRUST, read_data

# What a rank reports of the values in its file: by flat name the path, dtype and size, and of each piece the start, the
# length, and the numbers of its box, offsets and then sizes.
Report = Mapping[str, tuple[Any, str | None, Any, list[list[int]]]]
# Torch cuts a tensor along fewer dims; the corners of a piece are two to this power at most.
_MAX_CUT_DIMS = 12
_PART_BYTES = 2**20


class Value(NamedTuple):
    """A value of a checkpoint: its path in the tree; ``dtype`` is ``None`` of what is no tensor."""

    path: tuple[str | int, ...]
    dtype: torch.dtype | None
    size: torch.Size


def merge(reports: Mapping[str, Report]) -> str:
    """Return the text of ``pieces.json``, given what is in each file."""
    values: dict[str, Any] = {}
    for number, report in enumerate(reports.values()):
        for fqn, (*value, pieces) in report.items():
            every = values.setdefault(fqn, [*value, []])[-1]
            every += [one for piece in pieces for one in (number, *piece)]
    texts = {fqn: [*value, json.dumps(pieces)] for fqn, (*value, pieces) in values.items()}
    return json.dumps({"files": [*reports], "values": texts})


class DataReader:
    """A reader of the ``files`` of a checkpoint, and of no others.

    Attributes:
        values: What ``text``, of ``pieces.json``, says of all values, by flat name.

    Raises ``ConfigError`` unless the text describes values, each with a path, that are no larger than the files.
    """

    def __init__(self, folder: StoredFolder, files: Mapping[str, FileSum], text: str) -> None:
        self._folder = folder
        self._part = -1, 0, b""  # What was read last: the place of a file, the start, and bytes.
        self.values: dict[str, Value] = {}
        self._texts: dict[str, str] = {}
        # The pieces of values that were found: file, start and length, and offsets and sizes.
        self._found: dict[str, tuple[list[torch.Size], list[Any]]] = {}
        try:
            body = json.loads(text, object_pairs_hook=unique)
            self._files = [(name, files[name].bytes) for name in body["files"]]
            for fqn, (path, kind, size, self._texts[fqn]) in body["values"].items():
                dtype = None if kind is None else getattr(torch, kind)
                if not isinstance(dtype, torch.dtype | None):
                    raise TypeError(f"{kind} is no dtype")
                self.values[fqn] = Value(tuple(path), dtype, _sizes(tuple(size)))
            self._check()
        # Whoever made a file up may make Python raise errors of any type.
        except Exception as error:
            what = f"{folder}/{PIECES} does not describe a checkpoint: {_told(error)}"
            raise ConfigError(what, fix=DISTRUST) from None

    def _check(self) -> None:
        for key, value in self.values.items():
            # A number is an index of a list, which is filled up to it.
            is_path = all(type(one) is str or (type(one) is int and 0 <= one < len(self.values)) for one in value.path)
            if not is_path or key != ".".join(map(str, value.path)):
                raise ValueError(f"the path of {key!r:.100} is {value.path!r:.100}")
        self.tree(dict.fromkeys(self.values))
        # Before memory of these sizes is asked for.
        nbytes = sum(math.prod(one.size) * one.dtype.itemsize for one in self.values.values() if one.dtype)
        if nbytes > sum(length for _, length in self._files):
            raise ValueError(f"values have {nbytes:,} bytes, more than its files")

    def tree(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return values by flat name as the tree of dicts and lists that was saved."""
        return unflatten_state_dict(flat, {key: self.values[key].path for key in flat})

    def metadata(self) -> Metadata:
        """Return torch's description of all values. Raises ``ValueError`` if pieces of one are missing or doubled."""
        places = {}
        for fqn, value in self.values.items():
            self._find(fqn)
            for (file, *place), (offsets, _) in zip(*self._found[fqn], strict=True):
                index = MetadataIndex(fqn, offsets if value.dtype else None)
                places[index] = place_in_file(self._files[file][0], *place)
        return Metadata(self._entries(self.values), {key: one.path for key, one in self.values.items()}, places)

    def _entries(self, names: Iterable[str]) -> dict[str, Any]:
        """Return what torch knows of values, with the pieces of those that were found."""
        found: dict[str, Any] = {}
        for fqn in names:
            _, dtype, size = self.values[fqn]
            boxes = self._found[fqn][1] if fqn in self._found else ()
            chunks = [ChunkStorageMetadata(*box) for box in boxes]
            kind = dtype and TensorProperties(dtype)
            found[fqn] = TensorStorageMetadata(kind, size, chunks) if kind else BytesStorageMetadata()
        return found

    def find_faults(self, flat: Mapping[str, Any]) -> list[str]:
        """Find the pieces of values, by flat name, of which this rank has a part; return a line if a piece is wrong.

        All pieces of each value have to be in the files, and to have each of its elements once. Not collective.
        """
        for fqn, value in flat.items():
            local = value._local_tensor if isinstance(value, DTensor) else value
            if local is None or local.numel() or not value.numel():
                try:
                    self._find(fqn)
                # As above.
                except Exception as error:
                    return [f"{PIECES} does not describe {fqn}: {_told(error)}"]
        return []

    def _find(self, fqn: str) -> None:
        _, dtype, size = self.values[fqn]
        stop, places, boxes = 3 + len(size), [], []
        for piece in zip(*[iter(json.loads(self._texts[fqn]))] * (stop + len(size)), strict=True):
            places.append(_sizes(piece[:3]))
            boxes.append((_sizes(piece[3:stop]), _sizes(piece[stop:])))
            (file, start, length), nbytes = places[-1], math.prod(boxes[-1][1]) * dtype.itemsize if dtype else 0
            name, most = self._files[file]
            if start + length > most or length < nbytes:
                raise ValueError(f"a piece has no place in {name}, or too small a one")
        if not (is_covered(size, tuple(boxes)) if dtype else len(boxes) == 1):
            raise ValueError("pieces are missing, doubled or outside of it")
        self._found[fqn] = places, boxes

    def read_into(self, flat: dict[str, Any]) -> None:
        """Read values, by flat name, in place: the pieces that this rank has, which were found. Not collective."""
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(flat, Metadata(self._entries(flat)))

        def place_of(item: ReadItem) -> torch.Size:
            return self._found[item.storage_index.fqn][0][item.storage_index.index or 0]

        items = sorted(planner.create_local_plan().items, key=place_of)
        # Values other than tensors come first: all ranks read the same, and raise the same error.
        for item in sorted(items, key=lambda one: one.type is LoadItemType.TENSOR):
            fqn, content = item.storage_index.fqn, io.BytesIO(self._bytes_at(*place_of(item)))
            if item.type is LoadItemType.BYTE_IO:
                flat[fqn] = read_data(content, f"{self._folder}, {fqn}")
                continue
            box = tuple(slice(at, at + size) for at, size in zip(item.storage_offsets, item.lengths, strict=True))
            piece, target = torch.load(content, "cpu", weights_only=True)[box], planner.resolve_tensor(item).detach()
            if piece.shape != target.shape:
                raise ValueError(f"a piece of {fqn} has shape {list(piece.shape)}, not {list(target.shape)}")
            target.copy_(piece)

    def _bytes_at(self, file: int, start: int, length: int) -> bytes:
        """Return bytes of a file; the small pieces behind them come with the same request."""
        name, most = self._files[file]
        held, at, part = self._part
        if held != file or not at <= start <= start + length <= at + len(part):
            at, part = start, self._folder.read(name, start, min(most, start + max(length, _PART_BYTES)))
            self._part = file, at, part
        return part[start - at :][:length]


def _told(error: Exception) -> str:
    return f"{error!s:.200}{' is not there' * isinstance(error, KeyError)}" or type(error).__name__


@lru_cache(2**14)
def _sizes(values: Any) -> torch.Size:
    if not all(type(one) is int and 0 <= one < 2**63 for one in values):
        raise ValueError(f"it has {values!r:.100} for sizes")
    return torch.Size(values)


@lru_cache(2**10)
def is_covered(size: torch.Size, boxes: tuple[tuple[torch.Size, torch.Size], ...]) -> bool:
    """Say whether boxes (offsets, sizes) cover a tensor, each element once.

    They do if they hold as many elements, and each corner that is none of the tensor's is one of an even number of
    boxes: then they cover each element an odd number of times.
    """
    ends = [tuple(map(add, at, sizes)) for at, sizes in boxes]
    cut = [dim for dim, whole in enumerate(size) if any(sizes[dim] != whole for _, sizes in boxes)]
    is_inside = len(cut) <= _MAX_CUT_DIMS and all(all(map(le, end, size)) for end in ends)
    odd: set[tuple[int, ...]] = set()
    for start, end in [((0,) * len(size), size), *((at, end) for (at, _), end in zip(boxes, ends, strict=True))]:
        if is_inside and all(map(lt, start, end)):
            odd ^= set(product(*((start[dim], end[dim]) for dim in cut)))
    return is_inside and not odd and sum(math.prod(sizes) for _, sizes in boxes) == math.prod(size)

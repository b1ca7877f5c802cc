"""Checkpoints that somebody made up: no code is run, nothing outside is read, and all ranks raise one clear error."""

import io
import json
import math
import os
import pickle
import random
import shutil
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import ConfigError, find_checkpoint, fully_shard, load_checkpoint, save_checkpoint
from composable.runs.pieces import DataReader
from composable.runs.storage import FileSum, on_disk
from tests.world import on_ranks, run_threads, told

EXTRA = {"position": torch.arange(3), "at": (1, "x", 2.5), "names": ["a", {"b": None}]}


class Bomb:
    """Unpickled, it writes a file that says so."""

    def __init__(self, fuse: Path) -> None:
        self.fuse = fuse

    def __reduce__(self) -> Any:
        return Path.write_text, (self.fuse, "code was run")


class Quiet(Bomb):
    """The same through a class that has nothing to do with files."""

    def __reduce__(self) -> Any:
        return eval, (f"__import__('pathlib').Path({str(self.fuse)!r}).write_text('code was run')",)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def make_both(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = fully_shard(make_model(seed))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def write_checkpoint(run: Path) -> Path:
    model, optimizer = make_both(1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return save_checkpoint(run, 1, model, optimizer, extra=EXTRA).wait()


def reseal(folder: Path) -> None:
    """Make ``checkpoint.json`` say of every file what it is now, as whoever wrote the files can."""
    path = folder / "checkpoint.json"
    body = json.loads(path.read_text())
    for name in body["files"]:
        if (folder / name).is_file() and not (folder / name).is_symlink():
            content = (folder / name).read_bytes()
            body["files"][name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    path.write_text(json.dumps(body))


def on_first(call: Callable[[], object]) -> None:
    if dist.get_rank() == 0:
        call()
    dist.barrier()


# -- code


@on_ranks(2)
def test_no_file_of_a_checkpoint_runs_code(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "run")
    good = {path.name: path.read_bytes() for path in folder.iterdir()}
    model, optimizer = make_both(2)
    fuse = tmp_path / "fuse"
    harms: list[tuple[str, bytes]] = [("extra.pt", good["extra.pt"][:-7]), ("extra.pt", b"x")]
    for kind in (Bomb, Quiet):
        packed = io.BytesIO()
        torch.save({"a": kind(fuse)}, packed)
        harms += [("pieces.json", pickle.dumps(kind(fuse))), ("extra.pt", packed.getvalue())]
        # Nobody here reads it.
        harms += [(".metadata", pickle.dumps(kind(fuse)))]
    for name, content in harms:
        path = folder / name
        on_first(lambda path=path, content=content: (path.write_bytes(content), reseal(folder)))
        for said in told(lambda: load_checkpoint(tmp_path / "run", model, optimizer)):
            assert said == "no error" if name == ".metadata" else said.startswith(f"ConfigError: {path} "), said
            assert "weights_only" not in said and "add_safe_globals" not in said, said
        assert not fuse.exists()
        if name == "extra.pt":
            for said in told(lambda: find_checkpoint(tmp_path / "run")):
                assert said.startswith(f"ConfigError: {path} cannot be read as data"), said
        on_first(lambda path=path: (path.write_bytes(good[path.name]), reseal(folder)))
    load_checkpoint(tmp_path / "run", model, optimizer)
    assert not fuse.exists()


def test_what_says_in_a_setting_that_it_is_code_is_not_run(tmp_path: Path) -> None:
    """Settings of optimizers lie in the files of tensors."""
    model = make_model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    folder = save_checkpoint(tmp_path, 1, model, optimizer).wait()
    put_in_place(folder, Quiet(tmp_path / "fuse"), random.Random(0), "optimizer.param_groups.0.lr")
    reseal(folder)
    with pytest.raises(
        ConfigError, match=r"step-000001, optimizer.param_groups.0.lr cannot be read as data: it names"
    ) as caught:
        load_checkpoint(tmp_path, model, optimizer)
    assert "weights_only" not in str(caught.value) and not (tmp_path / "fuse").exists()


# -- made up


def change_bytes(folder: Path, chance: random.Random) -> None:
    path = chance.choice(sorted(folder.iterdir()))
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 20])):
        content[chance.randrange(len(content))] = chance.randrange(256)
    path.write_bytes(content)


def change_length(folder: Path, chance: random.Random) -> None:
    path = chance.choice(sorted(folder.iterdir()))
    content = path.read_bytes()
    start = chance.randrange(len(content))
    path.write_bytes(chance.choice([content[:start], content + content[start:], content[start:], b""]))


def change_kind(folder: Path, chance: random.Random) -> None:
    path = chance.choice(sorted(folder.iterdir()))
    aside = folder.parent.parent / "secret" / path.name
    shutil.copy(path, aside)
    path.unlink()
    kinds: list[Callable[[], object]] = [
        lambda: path.symlink_to(aside),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to("nothing"),
        lambda: path.symlink_to(path),
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: None,
    ]
    chance.choice(kinds)()


ODD: list[Any] = [-1, 0, 2**40, 2**63, 2**70, 1.5, math.inf, "x", "", "\0", None, True, [], {}, [[]], {"bytes": 1}]


def change_manifest(folder: Path, chance: random.Random) -> None:
    path = folder / "checkpoint.json"
    body = json.loads(path.read_text())
    name = chance.choice(sorted(body["files"]))
    odd = chance.choice(ODD)
    new_names = [
        "../../secret/a",
        str(folder.parent.parent / "secret" / "a"),
        "x/y",
        "a\0b",
        "n" * 300,
        ".",
        "",
        "checkpoint.json",
    ]
    changes: list[Callable[[], object]] = [
        lambda: body.update(files={}),
        lambda: body["files"].pop(name),
        lambda: body["files"].update({chance.choice(new_names): body["files"].pop(name)}),
        lambda: body["files"].update({chance.choice(new_names): {"bytes": 1, "crc32": 0}}),
        lambda: body["files"].update({name: odd}),
        lambda: body["files"][name].update({chance.choice(["bytes", "crc32", "more"]): odd}),
        lambda: body.update({chance.choice(sorted(body)): odd}),
        lambda: body["optimizers"].append(odd),
        lambda: body["optimizers"][0].update({chance.choice(["kind", "groups"]): odd}),
        lambda: body["optimizers"][0]["groups"].append(["0.weight"]),
        lambda: body["optimizers"].clear(),
    ]
    chance.choice(changes)()
    texts = [json.dumps(body)] * 12 + [
        "[" * 10**5,
        '{"a":' * 10**5,
        "9" * 5000,
        json.dumps([body]),
        "null",
        "NaN",
        "\xff",
    ]
    path.write_text(chance.choice(texts))


def pieces_of(entry: list[Any]) -> list[list[int]]:
    """The pieces of a value: file, start, length, offsets, sizes of each."""
    count, numbers = 3 + 2 * len(entry[2]), json.loads(entry[3])
    return [numbers[at : at + count] for at in range(0, len(numbers), count)]


def change_description(folder: Path, chance: random.Random) -> None:
    """Change what ``pieces.json`` says, often so that it agrees with itself."""
    path = folder / "pieces.json"
    found = json.loads(path.read_text())
    files, values = found["files"], found["values"]
    key = chance.choice(sorted(values))
    cut = chance.choice([fqn for fqn, (_, dtype, size, _) in values.items() if dtype and size])
    entry = values[cut]
    pieces = pieces_of(entry)
    piece, dims = chance.choice(pieces), len(entry[2])
    odd = chance.choice(ODD)

    def other_piece() -> list[int]:
        return [*piece[:3], *(max(0, at + chance.choice([-1, 0, 1, 2**40])) for at in piece[3:])]

    def renamed() -> None:
        values["more"] = values.pop(key)

    names = [
        "../../secret/a",
        str(folder.parent.parent / "secret" / "a"),
        "../step-000001/__0_0.distcp",
        ".metadata",
        "extra.pt",
        "checkpoint.json",
        odd,
    ]
    paths = [
        [],
        ["model"],
        ["optimizer", "param_groups", 2**40],
        ["optimizer", 2**70],
        [odd],
        odd,
        ["model", "0.bias", -1],
    ]
    changes: list[Callable[[], object]] = [
        lambda: files.__setitem__(0, chance.choice(names)),
        lambda: files.clear(),
        lambda: piece.__setitem__(chance.choice([0, 1, 2]), odd),
        lambda: piece.__setitem__(chance.choice([0, 1, 2]), chance.randrange(5000)),
        lambda: piece.__setitem__(0, -1),
        lambda: piece.__setitem__(3 + chance.randrange(2 * dims), odd),
        lambda: pieces.remove(piece),
        lambda: pieces.append(piece),
        lambda: pieces.append(other_piece()),
        lambda: pieces.__setitem__(0, other_piece()),
        lambda: pieces.append([odd]),
        lambda: pieces.append(piece[:-1]),
        pieces.clear,
        lambda: entry.__setitem__(2, [chance.choice([0, 1, 2**40]) for _ in entry[2]]),
        lambda: entry.__setitem__(chance.randrange(4), odd),
        lambda: entry.__setitem__(1, chance.choice(["int8", "complex128", "load", "nn", odd])),
        lambda: entry.append(odd),
        lambda: values.update({key: [values[key][0], None, [], values[key][3]]}),
        lambda: values.update({key: odd}),
        lambda: values[key].__setitem__(0, chance.choice(paths)),
        lambda: values.update({".".join(map(str, bad)): [bad, *entry[1:]] for bad in [["model", "0.weight", 0]]}),
        renamed,
        lambda: values.pop(chance.choice([fqn for fqn in values if not fqn.startswith("optimizer.state")])),
        lambda: found.update({chance.choice(["files", "values"]): odd}),
        lambda: found.pop(chance.choice(["files", "values"])),
    ]
    index = chance.randrange(len(changes))
    changes[index]()
    if 2 <= index <= 12:
        entry[3] = json.dumps([number for one in pieces for number in one])
    texts = [json.dumps(found)] * 12 + ["[" * 10**5, '{"a":' * 10**5, json.dumps([found]), "null", "\xff"]
    path.write_text(chance.choice(texts))


def change_values(folder: Path, chance: random.Random) -> None:
    """Put other values in the place of one: code, tensors of another shape, values of another type."""
    values = [Quiet(folder.parent.parent / "fuse"), torch.ones(1), torch.ones(1).expand(2**40), "x", {"a": 1}, 3, None]
    put_in_place(folder, chance.choice(values), chance)


def put_in_place(folder: Path, value: object, chance: random.Random, fqn: str | None = None) -> None:
    """Let a piece of a value, ``fqn`` or any, lie where this value does."""
    path = folder / "pieces.json"
    found = json.loads(path.read_text())
    entry = found["values"][fqn or chance.choice(sorted(found["values"]))]
    pieces = pieces_of(entry)
    piece = chance.choice(pieces)
    packed = io.BytesIO()
    torch.save(value, packed)
    target = folder / found["files"][piece[0]]
    piece[1:3] = target.stat().st_size, len(packed.getvalue())
    target.write_bytes(target.read_bytes() + packed.getvalue())
    entry[3] = json.dumps([number for one in pieces for number in one])
    path.write_text(json.dumps(found))


HARMS = [
    change_bytes,
    change_length,
    change_kind,
    change_manifest,
    change_description,
    change_description,
    change_values,
]
OPENED: list[str] = []


def note_opened(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and "secret" in str(args[0]):
        OPENED.append(str(args[0]))


def make_up(folder: Path, seed: int) -> str:
    chance = random.Random(seed)
    harm = chance.choice(HARMS)
    harm(folder, chance)
    if chance.random() < 0.85 and harm is not change_manifest and (folder / "checkpoint.json").is_file():
        with suppress(ValueError, OSError):
            reseal(folder)
    return harm.__name__


def load_made_up(root: Path, seeds: range) -> dict[str, int]:
    """Load checkpoints that were made up, and return how many ended in what."""
    ended: dict[str, int] = {}
    model, optimizer = make_both(2)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    for seed in seeds:
        run = root / f"run{seed}"
        on_first(lambda run=run: (run.parent.mkdir(exist_ok=True), shutil.copytree(root / "good", run)))
        harms: list[str] = [""]
        if dist.get_rank() == 0:
            (root / "secret").mkdir(exist_ok=True)
            (root / "secret" / "a").write_bytes(b"secret" * 1000)
            harms = [make_up(run / "step-000001", seed)]
            OPENED.clear()
        dist.broadcast_object_list(harms)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(math.nan)
            for state in optimizer.state.values():
                state["exp_avg"].fill_(math.nan)
        for call in (partial(load_checkpoint, run, model, optimizer), partial(find_checkpoint, run)):
            every = told(call)
            first_lines = {said.partition("\n")[0] for said in every}
            assert len(first_lines) == 1, (seed, harms, every)
            assert "no error" in first_lines or str(run) in every[0] or "the model" in every[0], (seed, harms, every)
            assert all(len(said) < 3000 for said in every), (seed, harms, every)
            if call.func is load_checkpoint:
                kind = next(iter(first_lines)).partition(":")[0]
                ended[kind] = ended.get(kind, 0) + 1
                if kind == "no error" and harms != ["change_bytes"]:
                    tensors = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
                    assert not any(one.to_local().isnan().any() for one in tensors), (seed, harms)  # type: ignore[attr-defined]
        assert not (root / "fuse").exists(), (seed, harms)
        if dist.get_rank() == 0:
            assert OPENED == [], (seed, harms)
            shutil.rmtree(run)
            shutil.rmtree(root / "secret")
        dist.barrier()
    return ended


@pytest.fixture(scope="module")
def hook() -> None:
    sys.addaudithook(note_opened)


@pytest.mark.parametrize("start", range(0, 200, 25))
def test_a_checkpoint_that_was_made_up_is_one_clear_error(start: int, tmp_path: Path, hook: None) -> None:
    run_threads(write_good, 2, tmp_path)
    ended = run_threads(load_made_up, 2, tmp_path, range(start, start + 25))[0]
    # Nearly all: other bytes of values, or of what nobody reads, are no error.
    assert ended.get("no error", 0) <= 8 and sum(ended.values()) == 25, ended


def write_good(root: Path) -> None:
    write_checkpoint(root / "good")


# -- pieces


def cut(chance: random.Random, offsets: tuple[int, ...], sizes: tuple[int, ...], depth: int) -> list[Any]:
    """Cut a box into boxes."""
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if not dims or not depth or chance.random() < 0.2:
        return [(offsets, sizes)]
    dim = chance.choice(dims)
    at = chance.randrange(1, sizes[dim])
    first, rest, later = list(sizes), list(sizes), list(offsets)
    first[dim], rest[dim], later[dim] = at, sizes[dim] - at, offsets[dim] + at
    return cut(chance, offsets, tuple(first), depth - 1) + cut(chance, tuple(later), tuple(rest), depth - 1)


def covers_each_once(size: tuple[int, ...], boxes: list[Any]) -> bool:
    count = torch.zeros(size, dtype=torch.int64)
    for offsets, sizes in boxes:
        if any(at + length > end for at, length, end in zip(offsets, sizes, size, strict=True)):
            return False
        count[tuple(slice(at, at + length) for at, length in zip(offsets, sizes, strict=True))] += 1
    return bool((count == 1).all())


def description(size: tuple[int, ...], boxes: list[Any]) -> str:
    numbers = [number for offsets, sizes in boxes for number in (0, 0, 10**6, *offsets, *sizes)]
    return json.dumps({"files": ["file"], "values": {"a": [["a"], "int8", size, json.dumps(numbers)]}})


def test_pieces_that_do_not_make_up_their_tensor_are_refused(tmp_path: Path) -> None:
    """Compare with a count of how often pieces cover each element."""
    found = {True: 0, False: 0}
    for seed in range(2000):
        chance = random.Random(seed)
        size = tuple(chance.randrange(5) for _ in range(chance.randrange(4)))
        boxes = cut(chance, (0,) * len(size), size, 4)
        for _ in range(chance.randrange(3)):
            other = tuple(chance.randrange(5) for _ in size), tuple(chance.randrange(4) for _ in size)
            change = chance.randrange(3)
            boxes = boxes[1:] if change == 0 else [*boxes, *(boxes[:1] if change == 1 else [other])]
        chance.shuffle(boxes)
        reader = DataReader(on_disk(tmp_path), {"file": FileSum(10**6, 0)}, description(size, boxes))
        faults = reader.find_faults({"a": torch.empty(size)})
        is_right = covers_each_once(size, boxes)
        assert is_right is not any("does not describe a: pieces are" in one for one in faults), faults
        found[is_right] += 1
    assert min(found.values()) > 300, found


def test_the_description_is_read_on_the_first_rank_alone(tmp_path: Path, hook: None) -> None:
    root = tmp_path / "secret"  # Opens below are noted.
    run_threads(write_good, 2, root)
    OPENED.clear()
    run_threads(load_good, 2, root)
    # Once more on one rank, for the checksum.
    assert sum(path.endswith("/pieces.json") for path in OPENED) == 2


def load_good(root: Path) -> None:
    load_checkpoint(root / "good", *make_both(2))

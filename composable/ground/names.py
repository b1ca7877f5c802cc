"""Names in messages, and checks of arguments and of values that were read."""

import difflib
import gc
import inspect
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import islice
from numbers import Real
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

import torch
from torch import nn

from composable.errors import ConfigError, SignatureError, UsageError

# The parts that wrappers of torch add to the names of tensors and modules below them; annotations add none.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
# Not one with zeros before it, which would be lost.
_NUMBER = re.compile(r"(?<!\d)(0|[1-9]\d*)(?!\d)")
# The name of an entry of ``sibling_lines``, cut into texts and runs of numbers; the text after it; the description.
_Row: TypeAlias = tuple[list[str | range], str, str]
_MOST_IN_GROUP = 24
_hints_of = cache(get_type_hints)


def join_fqn(fqn: str, name: str) -> str:
    """Return the FQN of the member ``name`` of the module ``fqn``; wrappers of torch add no part to an FQN."""
    if name in _WRAPPERS:
        return fqn
    return f"{fqn}.{name}" if fqn else name


def plain_fqn(fqn: str) -> str:
    """Return ``fqn`` as a state dict has it: without the parts that wrappers of torch add."""
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


def class_name(value: object) -> str:
    """Return the name of an object's class as the user wrote it: ``fully_shard`` gives a module another class."""
    kind = type(value)
    name: str = vars(kind).get("_composable_class_name", kind.__name__)
    return name


def module_text(fqn: str, kind: str) -> str:
    """Return the text for a module in messages: its FQN and its class; the root of a tree has an empty FQN."""
    return f"module {fqn!r} ({kind})" if fqn else f"module {kind}"


def handle_name(module_fqns: Sequence[str]) -> str:
    """Return the name of a handle in plans: the FQN of its module, or the positions of several modules."""
    return ", ".join(fqn or "(root)" for fqn in module_fqns)


def list_text(names: Collection[str], most: int = 5, *, write: Callable[[str], str] = repr) -> str:
    """Return a text of names for a message: the first ``most`` names, and how many more there are."""
    shown = ", ".join(map(write, islice(names, most)))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def count_text(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def bytes_text(number: int) -> str:
    return f"{number} B" if number < 1024 else _scaled(number / 1024, 1024, "KiB", "MiB", "GiB", "TiB")


def _scaled(value: float, step: int, unit: str, *larger: str) -> str:
    for one in larger:
        if value < step:
            break
        value, unit = value / step, one
    return f"{value:.1f} {unit}"


def sibling_lines(entries: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return a line for each entry, or for entries in a row that differ only in one number, which rises in equal steps.

    Entries are alike one by one, as layers are, or in groups of up to ``_MOST_IN_GROUP``: a layer and its experts.
    An entry is a name with its indent, the text right after the name, and a description.
    """
    # The name of a handle with several modules has no siblings.
    rows: list[_Row] = [
        ([name] if ", " in name else [*map(_number_in, _NUMBER.split(name))], after, text)
        for name, after, text in entries
    ]
    for size in range(1, _MOST_IN_GROUP + 1):
        rows, unfolded = [], rows
        for row in unfolded:
            rows.append(row)
            while len(rows) >= 2 * size and rows[-2 * size][1:] == rows[-size][1:]:
                joined = _joined(rows[-2 * size : -size], rows[-size:])
                if joined is None:
                    break
                rows[-2 * size :] = joined
    lines = []
    for parts, after, text in rows:
        times = math.prod(len(part) for part in parts if isinstance(part, range))
        lines.append(f"{''.join(map(_run_text, parts))}{after}{f' x {times}, each' if times > 1 else ''}: {text}")
    return lines


def _number_in(text: str) -> str | range:
    return range(int(text), int(text) + 1) if _NUMBER.fullmatch(text) else text


def _run_text(part: str | range) -> str:
    if isinstance(part, str) or len(part) == 1:
        return part if isinstance(part, str) else str(part[0])
    return f"[{part[0]}-{part[-1]}{f' by {part.step}' if part.step > 1 else ''}]"


def _joined(first: list[_Row], second: list[_Row]) -> list[_Row] | None:
    """Return two groups of rows as one, if the second goes on where the first ends, by one number of each row."""
    found, changes = [], set()
    for row, other in zip(first, second, strict=True):
        parts, others = row[0], other[0]
        index = next((index for index, pair in enumerate(zip(parts, others, strict=False)) if pair[0] != pair[1]), 0)
        run, more = parts[index], others[index]
        if isinstance(run, str) or isinstance(more, str):
            return None
        before, after, step = parts[:index], parts[index + 1 :], more[0] - run[-1]
        if [*before, range(more[0], more[0] + 1), *after] != others or row[1:] != other[1:]:
            return None
        if step < 1 or (len(run) > 1 and step != run.step):
            return None
        changes.add((index, step, len(run)))
        found.append(([*before, range(run[0], more[0] + 1, step), *after], row[1], row[2]))
    return found if len(changes) == 1 else None


# An attribute of a meta buffer that an annotation replaced under its other names: the tensor with memory in its place.
SUCCESSOR = "_composable_successor"


def describe_module(module: nn.Module) -> str:
    """Name ``module`` for an error: its FQN below the outermost module that is alive, and its class.

    A module has no reference to its parents, so this searches all live objects: slow, for errors only.
    """
    return module_text(_find_fqn(module), class_name(module))


def fqn_in_model(module: nn.Module, name: str, fqn: str = "") -> str:
    """Return the FQN of a parameter or buffer below the outermost module that is alive; slow, for errors only.

    ``module`` holds it under ``name``. ``fqn`` is from another place, and returned if it ends with the one found.
    """
    found = join_fqn(_find_fqn(module), name)
    return fqn if fqn.endswith(f".{found}") else found


def _find_fqn(module: nn.Module) -> str:
    # By id: this must not fail on a module that cannot be hashed, and all compared modules stay alive.
    parents: dict[int, tuple[nn.Module, str]] = {}
    for candidate in gc.get_objects():
        # Not isinstance, which would run code of a proxy object.
        if issubclass(type(candidate), nn.Module):
            for name, child in candidate.__dict__.get("_modules", {}).items():
                parents.setdefault(id(child), (candidate, name))
    names: list[str] = []
    seen = {id(module)}
    while id(module) in parents:
        module, name = parents[id(module)]
        if id(module) in seen:
            break
        seen.add(id(module))
        names.append(name)
    return plain_fqn(".".join(reversed(names)))


# Arguments


def answer_of(name: str, function: Callable[..., Any], *args: object, at: str, fix: str) -> Any:
    """Return the result of a user's function, the argument ``name``; turn its exceptions into ``ConfigError``."""
    try:
        return function(*args)
    except Exception as error:
        raise ConfigError(f"{name} raised {type(error).__name__}: {error}", at=at, fix=fix) from error


def check_module(name: str, value: object) -> None:
    """Raise unless ``value`` is one module."""
    if not isinstance(value, nn.Module):
        raise ConfigError(f"{name} is {described(value)}, not a module", fix="pass an nn.Module")


def check_optimizer(name: str, value: object) -> None:
    """Raise unless ``value`` is a ``torch.optim.Optimizer``."""
    if not isinstance(value, torch.optim.Optimizer):
        what = f"{name} is {described(value)}, not an optimizer"
        raise ConfigError(what, fix="pass a torch.optim.Optimizer")


def check_bool(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise unless ``value`` is ``True`` or ``False`` itself: another value is mostly an argument in a wrong place."""
    if not isinstance(value, bool) and not (or_none and value is None):
        choices = "True, False or None" if or_none else "True or False"
        raise ConfigError(f"{name} is {described(value)}, not a bool", fix=f"pass {choices}")


def check_number(
    name: str, value: object, *, fix: str, least: float | None = None, above: float | None = None
) -> float:
    """Return ``value`` as a float; ``ConfigError``: no number, NaN, below ``least``, or not above ``above``."""
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(number, Real) and not isinstance(number, bool):
        found = float(number)
        if (least is None or found >= least) and (above is None or found > above) and found == found:
            return found
    raise ConfigError(f"{name} is {described(value)}", fix=fix)


def check_int(name: str, value: object, least: int, most: float = math.inf, *, fix: str, at: str = "") -> None:
    """Raise ``ConfigError`` unless ``value`` is an int, and no bool, from ``least`` to ``most``."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} is {described(value)}", at=at, fix=fix)


def as_path(name: str, value: object) -> Path:
    """Return the argument ``name``, which is ``value``, as the path of a file or folder, or raise ``ConfigError``."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name} is {described(value)}", fix="pass a path")
    return Path(text)


def as_kind(kind: Any, value: Any, name: str) -> Any:
    """Return a value that was read from JSON as ``kind``, a dataclass or a type such as ``tuple[int, ...]``.

    Raises ``ValueError`` if it is of another kind; ``name`` says in the message where it was.
    """
    origin, of = get_origin(kind), get_args(kind)
    if type(None) in of:
        return None if value is None else as_kind(of[0], value, name)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints_of(kind)
        if not isinstance(value, dict) or value.keys() != hints.keys():
            raise ValueError(f"{name} is no {{{', '.join(hints)}}}")
        return kind(**{key: as_kind(hint, value[key], f"{name}.{key}") for key, hint in hints.items()})
    plain: Any = {tuple: list, Sequence: list, Mapping: dict}.get(origin, origin or kind)
    if kind is not Any and type(value) is not plain:
        raise ValueError(f"{name} is {described(value)}")
    if plain is list:
        return tuple(as_kind(of[0], one, f"{name}[{index}]") for index, one in enumerate(value))
    if plain is dict:
        return {as_kind(of[0], key, name): as_kind(of[1], one, f"{name}[{key!r}]") for key, one in value.items()}
    return value


def check_device(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise unless ``value`` is a device, the name of a device, or the number of an accelerator on this host."""
    if isinstance(value, torch.device) or (or_none and value is None):
        return
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < torch.accelerator.device_count():
        return
    if isinstance(value, str):
        with suppress(RuntimeError):
            torch.device(value)
            return
    fix = f"pass a torch.device or its name; of numbered devices this process sees {torch.accelerator.device_count()}"
    raise ConfigError(f"{name} is {described(value)}", fix=fix)


def readable_twice(value: Any) -> Any:
    """Return ``value``, or a list of its items if they can be read only once, as in ``module.parameters()``."""
    return list(value) if isinstance(value, Iterator) else value


def list_of_tensors(name: str, value: object) -> list[torch.Tensor]:
    """Return a tensor, or an iterable of tensors, of any shapes and dtypes, as a list."""
    if isinstance(value, torch.Tensor):
        return [value]
    # A module may be iterable too, and a module or a class in place of tensors is a mistake.
    is_list = isinstance(value, Iterable) and not isinstance(value, str | type | nn.Module)
    found: list[Any] = list(value) if is_list else [value]  # type: ignore[call-overload]  # it is iterable
    # Each type is checked once: there are few types, and clipping calls this in every step.
    if not all(issubclass(kind, torch.Tensor) for kind in set(map(type, found))):
        wrong = next(one for one in found if not isinstance(one, torch.Tensor))
        what = f"{name} is or holds {described(wrong)}"
        raise ConfigError(what, fix="pass tensors, such as model.parameters()")
    return found


def described(value: object) -> str:
    """Return the text for a value in messages: short values as they are written, others by their type."""
    if value is None or isinstance(value, bool | int | float | str):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    return f"a {kind.__name__}" if kind.__module__ in {"builtins", "torch"} else f"a {kind.__module__}.{kind.__name__}"


def check_outside_inference(caller: str) -> None:
    """Raise ``UsageError`` in inference mode: no optimizer could ever write to parameters that are made there."""
    if torch.is_inference_mode_enabled():
        raise UsageError(
            f"{caller} is called in inference mode, and tensors made there can never be trained",
            fix="annotate outside of torch.inference_mode(); forwards may run in it",
        )


# The fix for an argument that an annotation lacks, by its name in ``FullyShardedDataParallel``,
# ``DistributedDataParallel`` or torch's ``replicate``; of several fixes, the first one that the annotation allows.
_PLACES = {
    "auto_wrap_policy": ("pass it as policy=", "leave it out, since gradients travel in buckets, not by module"),
    "backward_prefetch": ("leave it out, since gathers are prefetched always",),
    "batched_grad_copy": ("leave it out, since gradients are copied together always",),
    "bucket_cap_mb_list": ("pass one cap for all buckets as bucket_cap_mb=",),
    "check_reduction": ("leave it out, since every backward is checked",),
    "cpu_offload": ("pass it as offload_policy=",),
    "device_id": ("pass it in a list as device_ids=", "leave it out, since the device is that of the mesh"),
    "device_mesh": ("pass it as mesh=",),
    "dim": ("leave it out, since inputs are not split",),
    "dp_mesh_dims": ("pass the dim that averages as mesh=, such as mesh['dp']",),
    "forward_prefetch": ("leave it out, since gathers are prefetched always",),
    "ignored_states": ("pass its parameters as ignored_params=, its modules as ignored_modules=",),
    "limit_all_gathers": ("leave it out, since gathers are limited always",),
    "mixed_precision": ("pass it as mp_policy=",),
    "offload_policy": ("leave it out, or call fully_shard: copies rest on the device",),
    "output_device": ("leave it out, since outputs stay where the module makes them",),
    "policy": ("leave it out, since gradients travel in buckets, not by module",),
    "shard_as_bytes": ("leave it out, since frozen parameters of other classes are sharded as bytes",),
    "sharding_strategy": ("pass it as strategy=",),
    "skip_all_reduce_unused_params": ("leave it out, since gradients that no rank has travel as zeros",),
    "use_orig_params": ("leave it out, since parameters keep their names and shapes always",),
}
_PAGES = {"fully_shard": "docs/from_fsdp1.md", "replicate": "docs/from_ddp.md"}


def check_call(function: Callable[..., object], *args: object, **kwargs: object) -> None:
    """Raise ``SignatureError``, which says what to write, unless ``function`` accepts these arguments."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in signature.parameters]
        what, fixes = f"{function.__name__}: {error}", ["pass the module, and all else by name"]
        if unknown:
            what = f"{function.__name__} has no argument {', '.join(unknown)}"
            fixes = [f"{name}: {_place_in(name, signature.parameters)}" for name in unknown]
        fixes += [f"see {page}" for name, page in _PAGES.items() if name == function.__name__]
        raise SignatureError(what, fix="; ".join(fixes)) from None


def _place_in(name: str, known: Mapping[str, inspect.Parameter]) -> str:
    options = known["options"].default if "options" in known else None
    rare = fields(options) if is_dataclass(options) else ()
    fitting = {one.name: f"pass it inside of options={type(options).__name__}(...)" for one in rare}
    for one, places in _PLACES.items():
        can_take = [place for place in places if {*re.findall(r"(\w+)=", place)} <= {*known}]
        if can_take:
            fitting[one] = can_take[0]
    for near in difflib.get_close_matches(name, [*fitting, *known], n=1):
        return f"did you mean {near}=?" if near in known else fitting[near]
    return "leave it out, there is nothing like it"

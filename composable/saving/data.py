"""Values other than tensors as data: bytes that can be read without running code in them."""

import io
import pickle
import re
from typing import Any, BinaryIO

import torch

from composable.errors import ConfigError

DISTRUST = "load another checkpoint, and do not trust where this one is from"


def as_data(value: object, name: str) -> bytes:
    """Return ``value`` packed for ``torch.load(weights_only=True)``; raises if that cannot read it."""
    packed = io.BytesIO()
    try:
        torch.save(value, packed)
        packed.seek(0)
        torch.load(packed, weights_only=True)
    except (pickle.PickleError, RuntimeError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{name} is more than data: {_without_advice(error)}",
            fix="use tensors, numbers, strings, and lists, tuples and dicts of them",
        ) from None
    return packed.getvalue()


def read_data(source: BinaryIO, name: str) -> Any:
    """Return a value that ``as_data`` packed, on the CPU; ``name`` says in errors where it is from."""
    try:
        return torch.load(source, "cpu", weights_only=True)
    except OSError:
        raise
    # A broken archive or pickle makes torch raise errors of any type.
    except Exception as error:
        raise ConfigError(f"{name} cannot be read as data: {_without_advice(error)}", fix=DISTRUST) from None


def _without_advice(error: Exception) -> str:
    """Return the fault of a pickle, without torch's advice on how to run the code in it."""
    named = re.search(r"GLOBAL (\S+)", str(error))
    if named is not None:
        return f"it names {named[1]}"
    if isinstance(error, pickle.UnpicklingError):
        return "it holds objects that are not data"
    return str(error).strip().partition("\n")[0] or type(error).__name__

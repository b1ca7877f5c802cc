"""What commands print: results as text or JSON, and progress of long work for whoever looks at standard error."""

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def show(found: Mapping[str, Any], *, as_json: bool) -> None:
    """Print values by name: texts, numbers, and lists and dicts of these, in text one a line."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        texts = [f"{key} {_text(one)}" for key, one in value.items()] if isinstance(value, dict) else value
        texts = texts if isinstance(texts, list) else [texts]
        for i, text in enumerate(texts or ["none"]):
            print(f"{'' if i else name:18}{_text(text)}")


def _text(value: object) -> str:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    text: str = f"{value:,}" if is_number else {True: "yes", False: "no"}.get(value, str(value))  # type: ignore[call-overload]
    # Names that others have written may hold codes for the terminal.
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def progress(items: Collection[T], noun: str) -> Iterator[T]:
    """Yield ``items``, and say how many are done where a person sees standard error."""
    is_seen, text = sys.stderr.isatty(), ""
    for number, item in enumerate(items):
        if is_seen:
            text = f"{number} of {len(items)} {noun}"
            print(f"\r{text}", end="", file=sys.stderr, flush=True)
        yield item
    print(f"\r{' ' * len(text)}\r" if text else "", end="", file=sys.stderr)

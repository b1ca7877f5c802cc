"""Keeps what this process logs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["kept_logs"]


@contextmanager
def kept_logs(level: int = logging.WARNING) -> Iterator[list[str]]:
    """Keep the texts that the package logs at this level or above; ranks that are threads keep each other's too."""
    texts: list[str] = []
    handler, log = logging.Handler(), logging.getLogger("composable")
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    old = log.level
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield texts
    finally:
        log.removeHandler(handler)
        log.setLevel(old)

"""Real text to train on: the sources of Python's standard library, or files of the user.

The held-back part is made of whole files that training never reads. Every batch is a
function of (seed, step) alone: any number of ranks sees the same global batches, and a
resumed run goes on where it stopped.
"""

import hashlib
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Text", "read_text"]

# Tests, tables of numbers and installed packages: much text that teaches little.
_SKIPPED_FOLDERS = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}
_MAX_BYTES = 16_000_000
# One file in so many is held back.
_HELD_BACK = 16


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes held back, as uint8 tensors, and the number of files of each."""

    train: torch.Tensor
    held_back: torch.Tensor
    train_files: int
    held_back_files: int

    def __str__(self) -> str:
        return (
            f"{len(self.train):,} bytes of {self.train_files} files to train on,"
            f" {len(self.held_back):,} bytes of {self.held_back_files} held back"
        )

    def fingerprint(self) -> str:
        """Return a hash that differs when the text does."""
        digest = hashlib.sha256(self.train.numpy().tobytes())
        digest.update(self.held_back.numpy().tobytes())
        return digest.hexdigest()[:16]

    def batch(self, seed: int, step: int, batch: int, context: int) -> torch.Tensor:
        """Return the global batch of ``step``: [batch, context + 1] bytes as int64."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(len(self.train) - context, (batch,), generator=generator)
        return _windows(self.train, starts, context)

    def held_back_batch(self, count: int, context: int) -> torch.Tensor:
        """Return ``count`` windows spread evenly over the held-back text; the same at every call."""
        return _windows(self.held_back, torch.linspace(0, len(self.held_back) - context - 1, count).long(), context)


def read_text(files: Sequence[Path] = (), *, context: int) -> Text:
    """Read ``files``, or the standard library's sources where none are named.

    Of several files every sixteenth is held back; of a single one its last sixteenth.

    Raises:
        ValueError: There is too little text, or none.
    """
    paths = sorted(files) or _standard_library()
    texts = [path.read_bytes() for path in paths]
    if len(texts) == 1:
        cut = len(texts[0]) - len(texts[0]) // _HELD_BACK
        texts = [texts[0][cut:], texts[0][:cut]]
    held_back = texts[::_HELD_BACK]
    train = [text for index, text in enumerate(texts) if index % _HELD_BACK]
    text = Text(_tensor(train), _tensor(held_back), len(train), len(held_back))
    if min(len(text.train), len(text.held_back)) <= context:
        raise ValueError(f"too little text for a context of {context}: {text}; name more files with --text")
    return text


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    room = _MAX_BYTES
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts) and path.stat().st_size <= room:
            found.append(path)
            room -= path.stat().st_size
    if not found:
        raise ValueError(f"no Python sources under {root}: name text files with --text")
    return found


def _tensor(texts: Sequence[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"\n".join(texts) or b"\n"), dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> torch.Tensor:
    return text[starts[:, None] + torch.arange(context + 1)].long()

"""The checkpoints of a run in a storage, safe after a kill without a rename and without a lock.

Each save writes below a name of its own, ``step-NNNNNN-A-TOKEN``: A counts the saves of this step. The manifest comes
last, in one go, and only a folder with a manifest is a checkpoint; whatever a kill leaves without one is never
read. Older checkpoints lose their manifest first. Nothing is ever overwritten, so a save that another job has begun, or
one that was thought dead, spoils no file of this one.

A storage locks nothing. ``writer.lock`` has the name of the process that began last. Who finds another name there,
when a save begins or right before it is committed, gives way. Leftovers are removed after a save, not before: by then
whoever wrote them has been told. Nothing here communicates.
"""

import re
import secrets
import tempfile
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from composable.runs.run_folder import (
    LOCK,
    MANIFEST,
    WRITTEN,
    Manifest,
    another_run,
    check_later,
    check_written,
    checked_holder,
    lists_all,
    no_checkpoint,
    this_process,
    warned,
)
from composable.runs.storage import StoredFolder

# A folder that was copied from a disk has no number and no token.
_NAME = re.compile(r"step-(\d{6,})(?:-(\d+)-[0-9a-f]{8})?")


def find_stored(folder: StoredFolder) -> StoredFolder:
    """Return ``folder`` if it is a checkpoint, else the latest checkpoint in it; raises if there is none.

    Of ``URL/step-NNNNNN`` the last save of this step counts.
    """
    if MANIFEST in folder.list():
        return folder
    last = folder.name.rpartition("/")[2]
    run, start = (folder.parent, f"{last}-") if _NAME.fullmatch(last) else (folder, "")
    for name in reversed(_names_in(run)):
        if name.startswith(start) and MANIFEST in run.list(name):
            return run / name
    raise no_checkpoint(folder, is_file=last.endswith((".safetensors", ".pt")))


def _order(name: str) -> tuple[int, int]:
    """Return the step of a checkpoint and the number of its save."""
    match = _NAME.fullmatch(name)
    return (-1, 0) if match is None else (int(match[1]), int(match[2] or 0))


def _names_in(run: StoredFolder) -> list[str]:
    """Return the names of checkpoints in ``run``, whole or not, the latest last."""
    return sorted((name for name, size in run.list().items() if size is None and _NAME.fullmatch(name)), key=_order)


class StoredRun:
    """The folder of a run in a storage."""

    def __init__(self, folder: StoredFolder) -> None:
        self._run = folder
        self._key: Hashable = folder.url or id(folder.storage)

    def __str__(self) -> str:
        return str(self._run)

    def begin(self, step: int) -> str:
        """Return a new name for a checkpoint. Raises if another run writes here, or if there are later checkpoints."""
        with WRITTEN.guard:
            self._hold()
            names = _names_in(self._run)
            later = [name for name in names if _order(name)[0] > step]
            check_later(self, step, [name for name in later if MANIFEST in self._run.list(name)])
            number = 1 + max((_order(name)[1] for name in names if _order(name)[0] == step), default=0)
            partial = f"step-{step:06d}-{number}-{secrets.token_hex(4)}"
            WRITTEN.stored[self._key][1].add(partial)
        return partial

    def folder(self, partial: str) -> StoredFolder:
        """Return the folder of the name that ``begin`` returned."""
        return self._run / partial

    @contextmanager
    def room(self, partial: str) -> Iterator[Path]:
        """Yield a local folder where a rank writes its files first; removed at the end."""
        with tempfile.TemporaryDirectory(prefix=f"{partial}-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)

    def put(self, partial: str, file: Path) -> None:
        """Take a file that is whole in ``room``."""
        self.folder(partial).write(file.name, file)

    def publish(self, partial: str, manifest: Manifest) -> str:
        """Make a checkpoint of what ``put`` took; return its URL."""
        folder = self.folder(partial)
        with WRITTEN.guard:
            check_written(folder, manifest, folder.list())
            self._hold(is_begun=True)
            try:
                folder.commit(MANIFEST, manifest.as_bytes())
            except OSError:
                # The storage may have done it, and have lost its answer.
                if not lists_all(folder, manifest.files):
                    raise
            WRITTEN.stored[self._key][1].discard(partial)
        return folder.path

    def abandon(self, partial: str, *, remove: bool) -> None:
        """End a save that failed; with ``remove`` also delete its files, unless they are a checkpoint already."""
        with WRITTEN.guard:
            in_use = WRITTEN.stored[self._key][1]
            if remove and partial in in_use:
                with suppress(OSError):
                    self._remove(partial)
            in_use.discard(partial)

    def _hold(self, *, is_begun: bool = False) -> None:
        """Take the run over at the first save of this process; raise if another process has done so since."""
        text = f"{this_process()} {WRITTEN.token}"
        is_new = not is_begun and self._key not in WRITTEN.stored
        holder = ""
        if LOCK in self._run.list():
            holder = checked_holder(self._run.read(LOCK, 0, 4096), f"{self}/{LOCK}")
        if holder and holder != text and not is_new:
            raise another_run(self, holder)
        if holder != text:
            self._run.commit(LOCK, text.encode())
        WRITTEN.stored.setdefault(self._key, (self._run.storage, set()))

    def tidy(self, last: str, *, keep: int) -> None:
        """Remove what other saves have left, those of the same step as ``last``, and checkpoints beyond ``keep``."""
        with WRITTEN.guard:
            files = {name: self._run.list(name) for name in _names_in(self._run)}
            whole = [name for name in files if MANIFEST in files[name]]
            latest = {_order(name)[0]: name for name in whole}
            mine = [name for name in whole if name != last and lists_all(self._run / name, files[name].keys())]
            earlier = [name for name in mine if name in latest.values() and _order(name) < _order(last)]
            gone = earlier[: max(0, len(earlier) - (keep - 1))]
            gone += [name for name in mine if name not in latest.values()]
            in_use = WRITTEN.stored[self._key][1]
            gone += [name for name in files if name not in {*whole, *in_use} and "-" in name.removeprefix("step-")]
            for name in gone:
                with warned(f"{self._run / name} could not be removed"):
                    self._remove(name)

    def _remove(self, name: str) -> None:
        # Without its manifest it is no checkpoint, whatever comes then.
        self._run.remove(name, MANIFEST)
        self._run.remove(name)

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist
from torch import nn

from composable import Storage, find_checkpoint, fully_shard, load_checkpoint, save_checkpoint


class Mounted:
    """A bucket that is mounted as a folder."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)

    def list(self, folder: str) -> Mapping[str, int | None]:
        path = self.root / folder
        found = path.iterdir() if path.is_dir() else ()
        return {one.name: None if one.is_dir() else one.stat().st_size for one in found}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with (self.root / name).open("rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)

    def write(self, name: str, file: Path) -> None:
        (self.root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, self.root / name)

    def commit(self, name: str, content: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".new").write_bytes(content)
        path.with_suffix(".new").rename(path)

    def remove(self, name: str) -> None:
        path = self.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
storage: Storage = Mounted(folder[0])
model = fully_shard(nn.Linear(8, 2))
save_checkpoint(storage, 7, model)
assert load_checkpoint(storage, model).step == find_checkpoint(storage).step == 7

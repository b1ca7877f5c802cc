"""What torch.distributed keeps for each process, kept for each rank's thread while a simulation runs."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from composable.ground.torch_private import (
    PrefixStore,
    Store,
    TorchWorld,
    forget_meshes,
    register_group,
    torch_keeps_groups_by_thread,
)
from composable.testing.process_group import SimulatedGroup, SimulatedRank
from composable.testing.turn_scheduler import TurnScheduler, taking_turns

__all__ = ["RankStore", "TorchOfRanks"]


class RankWorld(TorchWorld):
    """The process groups of one rank.

    Attributes:
        owner: The rank.
    """

    # torch's own are properties that read globals.
    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    tags_to_pg: Any = None
    pg_to_tag: Any = None
    group_count = 0

    def __init__(self, owner: SimulatedRank) -> None:
        super().__init__()
        self.owner = owner
        self.pg_map, self.pg_names, self.pg_group_ranks = {}, {}, {}
        self.pg_backend_config, self.tags_to_pg, self.pg_to_tag = {}, {}, {}


class RankStore(Store):
    """A store that all ranks share. Who waits in it lets the others run."""

    def __init__(self, turns: TurnScheduler) -> None:
        super().__init__()
        self._turns = turns
        self._held: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._held[key] = value

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._held[key]

    def add(self, key: str, number: int) -> int:
        total = int(self._held.get(key, b"0")) + number
        self._held[key] = str(total).encode()
        return total

    def check(self, keys: list[str]) -> bool:
        return all(key in self._held for key in keys)

    def compare_set(self, key: str, expected: Any, wanted: Any) -> bytes:
        if self._held.get(key, b"") == expected:
            self._held[key] = wanted
        held: bytes = self._held.get(key, expected)
        return held

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._turns.wait(lambda: self.check(keys), lambda: f"the keys {', '.join(keys)} of the store")


@dataclass(eq=False)
class TorchOfRanks:
    """torch.distributed as the threads of one simulation see it."""

    turns: TurnScheduler
    _here: threading.local = field(default_factory=threading.local)

    def world_here(self) -> RankWorld | None:
        """Return the process groups of the calling thread, if it is a rank's."""
        return getattr(self._here, "world", None)

    def rank_here(self) -> SimulatedRank | None:
        """Return the rank whose thread is calling, if it is one."""
        world = self.world_here()
        return None if world is None else world.owner

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let rank threads have process groups of their own."""
        number = lambda: None if (rank := self.rank_here()) is None else rank.number  # noqa: E731
        with (
            torch_keeps_groups_by_thread(self.world_here, self._new_group, number),
            taking_turns(self.turns, self.world_here, self._adopt),
        ):
            try:
                yield
            finally:
                forget_meshes()

    def _adopt(self, world: RankWorld) -> None:
        """Let the calling thread, which a rank has started, use the groups of that rank."""
        self._here.world = world
        for group, name in world.pg_names.items():
            register_group(name, group)

    @contextmanager
    def default_group(self, rank: SimulatedRank, world_size: int, store: Store, timeout: timedelta) -> Iterator[None]:
        """Make the calling thread that of ``rank``, with a default process group."""
        self._here.world = RankWorld(rank)
        hook = sys.excepthook
        try:
            dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=world_size, timeout=timeout)
            # torch puts the rank before what the process prints in the end.
            sys.excepthook = hook
            yield
        finally:
            sys.excepthook = hook
            if dist.is_initialized():
                dist.destroy_process_group()
            self._here.world = None

    def _new_group(
        self,
        group_size: int,
        group_rank: int,
        ranks: list[int],
        backend: str,
        store: Store,
        group_name: str,
        backend_options: Any = None,
        timeout: timedelta | None = None,
        pg_tag: str | None = None,
        device_id: Any = None,
        group_desc: str | None = None,
        **_: Any,
    ) -> tuple[Any, Any]:
        """Do what torch's ``_new_process_group_helper`` does."""
        world = self.world_here()
        assert world is not None, "called in threads of ranks only"
        if group_name in world.pg_names.values():
            raise ValueError(f"there is a process group called {group_name!r} already")
        members = list(ranks) or list(range(group_size))
        if world.owner.rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        tag = f"user:{pg_tag}" if pg_tag else f"ptd:{group_name}"
        if pg_tag:
            # One tag and one set of ranks: one group.
            for group in world.tags_to_pg.get(tag, []):
                if list(world.pg_group_ranks[group]) == members:
                    return group, world.pg_map[group][1]
        key = world.owner.board.key_of_new_group(world.owner.rank, group_name, members)
        group = SimulatedGroup(
            world.owner, key, str(backend), timeout or timedelta(minutes=30), group_desc or "undefined"
        )
        group_store = PrefixStore(f"{group_name}/", store)
        world.pg_map[group] = (backend, group_store)
        world.pg_names[group] = group_name
        world.pg_backend_config[group] = str(dist.distributed_c10d.BackendConfig(dist.Backend(backend)))
        for name in (tag, *([] if pg_tag else [""])):
            world.tags_to_pg.setdefault(name, []).append(group)
        world.pg_to_tag[group] = tag
        register_group(group_name, group)
        return group, group_store

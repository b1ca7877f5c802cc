"""Whose turn it is: of all threads of all ranks, the one that holds the baton runs, the others wait.

A rank hands the baton on when it waits for something that has not come, and when it ends. Next is the
following rank that can go on, or one drawn from ``seed``: never chance, so that a run can be repeated.
When no rank can go on, all of them learn at once what each is waiting for.
"""

import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch

from composable.errors import DesyncError
from composable.testing.process_state import ProcessState

__all__ = ["Baton", "Player", "Unwound", "Wait"]

_NOT_THE_USERS = tuple(str(Path(file).parent) for file in (torch.__file__, __file__, threading.__file__))


class Unwound(BaseException):
    """Ends a rank that waits for what another rank, which has raised, will never send."""


class Wait(Protocol):
    """What a thread waits for."""

    def is_over(self) -> bool: ...

    def describe(self) -> str: ...

    def give_up(self) -> bool:
        """End now what has a timeout, when no thread can go on; returns whether that is so."""
        ...


@dataclass(eq=False)
class Home:
    """What the threads of one rank share."""

    rank: int
    state: ProcessState


@dataclass(eq=False)
class Player:
    """A thread, as the baton sees it.

    Attributes:
        name: Of a thread that a rank has started; empty for the rank's own.
    """

    home: Home
    index: int
    name: str = ""
    thread: threading.Thread | None = None
    # Locked except while it is about to take the baton.
    turn: threading.Lock = field(default_factory=threading.Lock)
    waits_for: Wait | None = None
    # How it ended, as messages say it; whether others may wait for it in vain.
    ended: str = ""
    has_raised: bool = False
    error: BaseException | None = None
    is_unwinding: bool = False

    def __post_init__(self) -> None:
        self.turn.acquire()

    @property
    def rank(self) -> int:
        return self.home.rank

    def can_go_on(self) -> bool:
        if self.ended:
            return False
        return self.waits_for is None or self.error is not None or self.is_unwinding or self.waits_for.is_over()


class Baton:
    """Passes from rank to rank.

    Args:
        world_size: Ranks there are.
        seed: Draws who is next, and hands over at every call. Without: in order, and only where a rank has to wait.
    """

    def __init__(self, world_size: int, seed: int | None) -> None:
        state = self._installed = ProcessState()
        self.players = [Player(Home(rank, state), rank) for rank in range(world_size)]
        self._here = threading.local()
        self.holder = self.players[0]
        self.all_ended = threading.Lock()
        self.all_ended.acquire()
        self._random = None if seed is None else random.Random(seed)
        # What is under way: turns left, and what happens then.
        self._late: list[tuple[int, Callable[[], None]]] = []
        self._turns = 0

    def start(self) -> None:
        """Let the first rank run."""
        self.holder = self._next_after(self.players[-1]) or self.players[0]
        self.holder.turn.release()

    def enter(self, player: Player) -> None:
        """Make the calling thread that of ``player``, and wait for its first turn."""
        player.turn.acquire()
        self._here.player = player
        self._install(player)

    def player_here(self) -> Player | None:
        """Return whose thread is calling."""
        return getattr(self._here, "player", None)

    def add_thread(self, thread: threading.Thread) -> Player:
        """Let a thread that the calling rank is about to start take part."""
        player = Player(self._caller().home, len(self.players), thread.name, thread)
        self.players.append(player)
        return player

    def wait(self, wait: Wait) -> None:
        """Return when ``wait`` is over; others run meanwhile.

        Raises:
            DesyncError: No rank can go on.
            Unwound: Another rank has raised, and none can go on.
        """
        player = self._caller()
        while not wait.is_over():
            self._raise_if_unwinding(player)
            player.waits_for = wait
            self._hand_over(player)
            player.waits_for = None
            if player.error is not None:
                error, player.error = player.error, None
                raise error
        self._raise_if_unwinding(player)

    def let_others_run(self) -> None:
        """Hand over to another rank that can go on, if there is one."""
        player = self._caller()
        self._raise_if_unwinding(player)
        self._hand_over(player)
        self._raise_if_unwinding(player)

    def maybe_let_others_run(self) -> None:
        """Hand over if the seed says so."""
        self._raise_if_unwinding(self._caller())
        if self._random is not None and self._random.random() < 0.5:
            self.let_others_run()

    def later(self, turns: int, happen: Callable[[], None]) -> None:
        """Call ``happen`` after so many turns, or when no rank can go on before."""
        self._late.append((self._turns + turns, happen))

    def end(self, player: Player, how: str) -> None:
        """Give the baton away for good."""
        self._take(player)
        player.ended = how
        self._here.player = None
        self._pass_on(player)

    def unwind_all(self) -> None:
        """End every rank at its next call or wait."""
        for player in self.players:
            player.is_unwinding = True

    def _caller(self) -> Player:
        player = self.player_here()
        assert player is not None, "called in threads that take turns"
        return player

    def _raise_if_unwinding(self, player: Player) -> None:
        if player.is_unwinding:
            raise Unwound

    def _hand_over(self, player: Player) -> None:
        self._take(player)
        if self._pass_on(player) is player:
            return
        player.turn.acquire()
        self._install(player)

    def _take(self, player: Player) -> None:
        player.home.state = self._installed = ProcessState(since=player.home.state)

    def _install(self, player: Player) -> None:
        player.home.state.restore(current=self._installed)
        self._installed = player.home.state

    def _pass_on(self, player: Player) -> Player | None:
        """Let the next rank run; returns it, or nothing if all have ended."""
        self._turns += 1
        due = [happen for turn, happen in self._late if turn <= self._turns]
        self._late = [(turn, happen) for turn, happen in self._late if turn > self._turns]
        for happen in due:
            happen()
        following = self._next_after(player)
        while following is None and self._late:
            self._late.sort(key=lambda late: late[0])
            self._late.pop(0)[1]()
            following = self._next_after(player)
        if following is None:
            self._nobody_can_go_on()
            following = self._next_after(player)
        if following is None:
            self.all_ended.release()
        elif following is not player:
            self.holder = following
            following.turn.release()
        return following

    def _next_after(self, player: Player) -> Player | None:
        """Return who runs next; the player itself last of all."""
        order = [*self.players[player.index + 1 :], *self.players[: player.index + 1]]
        able = [other for other in order if other.can_go_on()]
        if not able:
            return None
        if self._random is None or len(able) == 1:
            return able[0]
        return self._random.choice([other for other in able if other is not player])

    def _nobody_can_go_on(self) -> None:
        waiting = [player for player in self.players if not player.ended]
        if any(player.waits_for is not None and player.waits_for.give_up() for player in waiting):
            return
        if any(player.has_raised for player in self.players) or all(player.name for player in waiting):
            for player in waiting:
                player.is_unwinding = True
            return
        shown = [player for player in self.players if not (player.name and player.ended)]
        lines = [f"    {_called(player)} {self._doing(player)}" for player in shown]
        for player in waiting:
            player.error = DesyncError(
                "\n".join(["every rank that is left waits for another one", *lines]),
                at=f"rank {player.rank}",
                fix="make groups, and call the collectives of each, in the same order on all its ranks",
            )

    def _doing(self, player: Player) -> str:
        if player.ended:
            return f"has {player.ended}"
        assert player.waits_for is not None, "a rank that waits for nothing can go on"
        frame = sys._current_frames().get(player.thread.ident or 0) if player.thread else None
        return f"waits for {player.waits_for.describe()}{_place(frame)}"


def _called(player: Player) -> str:
    return f"rank {player.rank}, thread {player.name!r}," if player.name else f"rank {player.rank}"


def _place(frame: FrameType | None) -> str:
    """Return where in the user's code a thread is."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
    if frame is None:
        return ""
    return f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}, in {frame.f_code.co_name}"

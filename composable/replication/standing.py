"""Where replicated modules are, as other ranks that wait are told; read from another thread."""

from composable.collectives import Started, Told, Transport, Tree, notice_tree
from composable.replication.reducer import Reducer

__all__ = ["Standing"]


class Standing:
    """Tells where the modules of one annotation are."""

    def __init__(self) -> None:
        self._name = ""
        self._reducer: Reducer | None = None
        self._transport: Transport | None = None
        self._forwards = 0
        self._rounds_before = 0
        self._is_forward = False
        self._failure = ""

    def follow(self, name: str, reducer: Reducer, transport: Transport) -> None:
        """Tell of ``reducer``, whose modules are called ``name`` and talk by ``transport``."""
        self._name, self._reducer, self._transport = name, reducer, transport
        notice_tree(self)

    def enter_forward(self) -> None:
        """A forward begins."""
        self._forwards += 1
        self._rounds_before = self._reducer.rounds if self._reducer is not None else 0
        self._is_forward, self._failure = True, ""

    def exit_forward(self, failure: str) -> None:
        """A forward ends; ``failure``: what it raised."""
        self._is_forward, self._failure = False, failure

    def tell(self, *, in_backward: bool) -> Told | None:
        """Return where they are; ``None`` before they talk."""
        reducer, transport = self._reducer, self._transport
        if reducer is None or transport is None or not transport.groups:
            return None
        own_round = reducer.round
        is_backward = own_round.is_open
        is_last = is_backward or reducer.rounds > self._rounds_before
        tree = Tree(
            self._name,
            self._forwards,
            reducer.rounds,
            is_inside=self._is_forward or is_backward or (is_last and in_backward),
            is_backward=is_last,
            was_stopped=is_last and own_round.was_stopped,
            failure=self._failure,
        )
        return Told(transport.groups[0].group_name, tree, transport)

    def name_of(self, started: Started) -> str | None:
        """Return what is exchanged."""
        reducer, transport = self._reducer, self._transport
        if reducer is None or transport is None or not transport.groups or started.transport.groups != transport.groups:
            return None
        return reducer.name_of(started.tag // 2)

"""The parts of a model that communicate on their own, on ranks of which some may have no inputs left.

On a rank with inputs a part tells what it is about to start, without it does what it hears. A root of ``fully_shard``
is one part, an annotation of ``replicate`` another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import nn

from composable.annotated_module import place_of
from composable.annotation import FullyShardState, Root, sharded_state_of
from composable.comm import Ranks
from composable.engine import FlatBuffer, StepEvent
from composable.errors import UsageError, place_of_rank
from composable.features import IdleRank
from composable.ground.names import describe_module
from composable.planning import managed_modules
from composable.replication import ReplicateState, replicate_state_of

__all__ = ["JoinedPart", "ReplicatedPart", "ShardedPart", "check_shares", "find_states", "ranks_of"]

# What parts tell, and how that reads in a message.
_SAID = {
    # A root of ``fully_shard``
    "GATHER": "gathers",
    "BACKWARD": "begins a backward of",
    "DROP": "drops gradients of",
    "REDUCE": "reduces the gradients of",
    "TELL": "ends a backward of",
    "ASSIGN": "gets the averages of",
    "FORGET": "forgets a step of",
    # An annotation of ``replicate``
    "broadcast": "sends the buffers of",
    "begin_round": "averages the gradients of",
    "send": "sends the next bucket of",
    "finish": "gets the averages of",
    "recover": "ends a backward that was stopped, of",
}


_OF_HANDLES = {StepEvent.GATHER, StepEvent.DROP, StepEvent.REDUCE}


class _JoinSteps(Protocol):
    """The steps in which parts tell; see ``uneven_inputs.py``."""

    def begin_forward(self, opener: nn.Module) -> None: ...
    def end_forward(self, opener: nn.Module, *, is_awaited: bool) -> None: ...
    def begin_backward(self) -> None: ...
    def end_by_hand(self) -> None: ...
    def note_averages(self) -> None: ...
    def is_live(self) -> bool: ...
    def is_telling(self, *, is_needed: bool = True) -> bool: ...
    def tell(self, part: int, what: str, *args: Any) -> None: ...


class JoinedPart(ABC):
    """A part of the model; making one lets it tell, under a number of its own, until ``close``."""

    def __init__(self, number: int, steps: _JoinSteps) -> None:
        self._number = number
        self._steps = steps

    def _tell(self, what: str, *args: Any) -> None:
        self._steps.tell(self._number, what, *args)

    @abstractmethod
    def describe(self, what: str, args: tuple[Any, ...]) -> str:
        """Return what was told, for messages."""

    @abstractmethod
    def buffers(self) -> list[FlatBuffer]:
        """Return those whose gradients ranks without inputs are to drop where users drop them elsewhere."""

    @abstractmethod
    def begin_step(self, running: set[int], *, divides_by_all: bool) -> None:
        """A step of the ranks with these global numbers begins."""

    @abstractmethod
    def stand_by(self, *, is_first: bool, keeps_own: bool) -> None:
        """This rank has no inputs for the step that begins; ``is_first``: it had some for the one before.

        ``keeps_own``: nothing steps here, so replicated parameters have the gradients of now again at the end.
        """

    @abstractmethod
    def follow(self, what: str, args: tuple[Any, ...]) -> None:
        """Do what a rank with inputs has told. Collective."""

    @abstractmethod
    def finish_join(self, begun: dict[int, int]) -> None:
        """No rank has inputs left; ``begun``: how many steps each has begun, by global number. Collective."""

    @abstractmethod
    def close(self) -> None:
        """Tell nothing from now on."""


class ShardedPart(JoinedPart):
    """A root of ``fully_shard``, told by its scheduler of what that starts."""

    def __init__(self, number: int, steps: Any, root: Root) -> None:
        super().__init__(number, steps)
        self._root = root
        self._indices = {handle: index for index, handle in enumerate(root.handles)}
        self._follower = IdleRank(root.scheduler)
        root.scheduler.listen(self)
        root.join = steps

    def describe(self, what: str, args: tuple[Any, ...]) -> str:
        place = " and ".join(map(describe_module, self._root.state.modules))
        if StepEvent[what] in _OF_HANDLES:
            place = self._root.handles[args[0]].described
        return f"{_SAID[what]} {place}"

    def buffers(self) -> list[FlatBuffer]:
        return [flat for handle in self._root.handles for flat in handle.buffers]

    def begin_step(self, running: set[int], *, divides_by_all: bool) -> None:
        for state in self._root.states:
            count = len(running.intersection(state.grid.everyone.numbers))
            _divide_by(state, None if divides_by_all or not count else count)

    def stand_by(self, *, is_first: bool, keeps_own: bool) -> None:
        if is_first:
            self._follower.leave_step()
        self._follower.begin_step()

    def follow(self, what: str, args: tuple[Any, ...]) -> None:
        self._follower.follow(StepEvent[what], *args)

    def finish_join(self, begun: dict[int, int]) -> None:
        self._follower.leave()
        for state in self._root.states:
            ranks = state.grid.everyone
            source = ranks.numbers.index(_last_of(ranks.numbers, begun))
            for module in managed_modules(state.modules, state.ignored_modules):
                for buffer in module._buffers.values():
                    if buffer is not None:
                        sent = buffer.detach().to(ranks.device).contiguous()
                        ranks.broadcast(sent, source)
                        buffer.data.copy_(sent)

    def close(self) -> None:
        self._root.scheduler.unlisten(self)
        self._root.join = None
        self._follower.end()
        for state in self._root.states:
            _divide_by(state, None)

    # What the root calls

    @property
    def has_idle_ranks(self) -> bool:
        """Some rank has no inputs in this step."""
        return self._steps.is_telling(is_needed=False)

    def on(self, event: StepEvent, subject: Any = None, detail: Any = None) -> None:
        """Tell ranks without inputs what the root is about to do: who runs no module cannot know it."""
        steps = self._steps
        if event is StepEvent.FORWARD:
            steps.begin_forward(subject)
        elif event is StepEvent.FORWARD_ENDED:
            steps.end_forward(subject, is_awaited=detail)
        elif event is StepEvent.ASSIGNED:
            steps.end_by_hand()
        elif event is StepEvent.FORGET:
            if steps.is_telling(is_needed=detail):
                self._tell(event.name)
        else:
            args: tuple[Any, ...] = ()
            if event is StepEvent.BACKWARD:
                steps.begin_backward()
            elif event is StepEvent.ASSIGN and any(handle.synchronises for handle in self._indices):
                steps.note_averages()
            elif event is StepEvent.TELL:
                args = [handle.requires_gradient_sync for handle in self._indices], detail
            elif event in _OF_HANDLES:
                args = self._indices[subject], detail
            if event is StepEvent.REDUCE:
                args = *args, subject.buffers[detail].routes.kept.defers
            self._tell(event.name, *args)


class ReplicatedPart(JoinedPart):
    """An annotation of ``replicate``, told by its hooks of forwards and by its reducer of what that starts."""

    def __init__(self, number: int, steps: Any, state: ReplicateState) -> None:
        super().__init__(number, steps)
        self._state = state
        self._source = 0
        self._put_back: Callable[[], None] | None = None
        state.uneven = state.reducer.teller = self
        state.reducer.count_anew()
        state.reducer.before_round = self.begin_round

    def describe(self, what: str, args: tuple[Any, ...]) -> str:
        return f"{_SAID[what]} {' and '.join(map(describe_module, self._state.modules))}"

    def buffers(self) -> list[FlatBuffer]:
        return []  # Gradients of a rank without inputs are the last averages alone.

    def begin_step(self, running: set[int], *, divides_by_all: bool) -> None:
        # As the transport has them.
        numbers = sorted(self._state.grid.everyone.numbers)
        here = [index for index, number in enumerate(numbers) if number in running]
        self._state.reducer.divide_by(None if divides_by_all or not here else len(here))
        self._state.reducer.expect(here)
        self._source = here[-1] if here else 0

    def stand_by(self, *, is_first: bool, keeps_own: bool) -> None:
        if is_first:
            self._state.reducer.prepare()
            self._put_back = self._state.reducer.put_aside() if keeps_own else None

    def follow(self, what: str, args: tuple[Any, ...]) -> None:
        reducer = self._state.reducer
        {
            "broadcast": self._broadcast,
            "begin_round": reducer.begin_shadow,
            "send": reducer.send_shadow,
            "finish": reducer.end_shadow,
            "recover": reducer.recover_shadow,
        }[what]()

    def finish_join(self, begun: dict[int, int]) -> None:
        numbers = sorted(self._state.grid.everyone.numbers)
        self._state.reducer.prepare()
        self._state.broadcast_all(numbers.index(_last_of(numbers, begun)))
        if self._put_back is not None:
            self._put_back()

    def close(self) -> None:
        reducer = self._state.reducer
        self._state.uneven = reducer.teller = reducer.before_round = None
        reducer.count_anew()
        reducer.divide_by(None)
        reducer.expect(None)

    def _broadcast(self) -> None:
        if self._state.buffers is not None:
            self._state.buffers.broadcast(self._source)

    # What hooks and the reducer call

    def is_live(self) -> bool:
        return self._steps.is_live()

    def begin_forward(self, module: nn.Module, *, broadcasts: bool) -> None:
        self._steps.begin_forward(module)
        if broadcasts:
            self._tell("broadcast")
            self._broadcast()

    def begin_round(self, synchronises: bool) -> None:
        self._steps.begin_backward()
        if synchronises:
            self._steps.note_averages()
            self._tell("begin_round")

    def send(self) -> None:
        self._tell("send")

    def finish(self) -> None:
        self._tell("finish")

    def recover(self) -> None:
        self._tell("recover")


def find_states(module: nn.Module) -> list[FullyShardState | ReplicateState]:
    """Return the states of what communicates on its own at or below ``module``, in an order equal on all ranks.

    Raises:
        UsageError: Some belong to what is around it, or have ``static_graph=True``.
    """
    modules = dict.fromkeys(module.modules())
    found: dict[FullyShardState | ReplicateState, None] = {}
    for state in _states_below(module):
        around = state.outermost() if isinstance(state, FullyShardState) else state
        beyond = [each for each in (*around.modules, *state.modules) if each not in modules]
        if beyond:
            raise UsageError(
                "uneven inputs of a part of what is annotated together",
                at=", ".join([place_of_rank(), *map(describe_module, beyond)]),
                fix="call joinable on a module around all of it, such as the whole model",
            )
        if isinstance(state, ReplicateState) and state.reducer.options.static_graph:
            raise UsageError(
                "uneven inputs of a module with static_graph=True: a rank without inputs has no graph",
                at=", ".join([place_of_rank(), *map(describe_module, state.modules)]),
                fix="replicate without static_graph, or give every rank as many inputs",
            )
        found[around] = None
    return list(found)


def connect(state: FullyShardState | ReplicateState) -> Root | ReplicateState:
    """Do what a first forward does; returns what communicates. Collective."""
    if isinstance(state, FullyShardState):
        return state.lazy_init()
    state.transport.connect()
    state.reducer.prepare()
    return state


def check_shares(owners: Sequence[Root | ReplicateState], ranks: Ranks) -> None:
    """Refuse parts that have other places on some of the ranks that share them: told by place, others would follow.

    Collective over ``ranks``; not all of them have the same parts.

    Raises:
        UsageError: On every rank.
    """
    every = dict(zip(ranks.numbers, ranks.objects(list(map(_shares_of, owners))), strict=True))
    counts = {number: list(map(len, own)) for number, own in every.items()}
    if len({str(own) for own in counts.values()}) > 1:
        lines = [f"    rank {number}: {sum(own)}" for number, own in counts.items()]
        raise UsageError(
            "\n".join(["uneven inputs of ranks that have different numbers of annotated modules", *lines]),
            at=place_of_rank(),
            fix="give every rank as many experts, annotated in the same way",
        )
    for own in every.values():
        for number, shares in enumerate(own):
            for place, share in enumerate(shares):
                if any(every[other][number][place] != share for other in share[0]):
                    raise UsageError(
                        f"uneven inputs of what ranks {list(share[0])} share, in other places of their models",
                        at=place_of_rank(),
                        fix="give every rank the modules that it shares with others in the same order",
                    )


def ranks_of(module: nn.Module) -> Ranks:
    """Return all ranks that share anything at or below ``module``.

    Raises:
        UsageError: Nothing is annotated there, or no annotation is on all of them.
    """
    everyone = [state.grid.everyone for state in _states_below(module)]
    if not everyone:
        raise UsageError(
            "joinable found no annotated module", at=place_of(module), fix="call fully_shard or replicate first"
        )
    ranks = max(everyone, key=lambda one: one.size)
    for one in everyone:
        if not set(one.numbers) <= set(ranks.numbers):
            raise UsageError(
                f"uneven inputs of modules that ranks {list(ranks.numbers)} and ranks {list(one.numbers)} share",
                at=place_of(module),
                fix="one annotation has to be on all ranks that the others are on",
            )
    world = Ranks.of_world()
    # ``Join`` wants joinables of one group, and there may be several groups of all ranks.
    return Ranks.of(world.process_group, ranks.device) if set(world.numbers) == set(ranks.numbers) else ranks


def _states_below(module: nn.Module) -> list[FullyShardState | ReplicateState]:
    """Return the states of all annotations at or below ``module``, each once."""
    found = [state for below in module.modules() for state in (sharded_state_of(below), replicate_state_of(below))]
    return list(dict.fromkeys(state for state in found if state is not None))


def _shares_of(owner: Root | ReplicateState) -> list[tuple[tuple[int, ...], int]]:
    """Return the ranks that share each handle, by global numbers, and its buffers, in the order of what is told."""
    if isinstance(owner, ReplicateState):
        return [(owner.grid.everyone.numbers, 1)]
    return [(handle.grid.everyone.numbers, len(handle.buffers)) for handle in owner.handles]


def _divide_by(state: FullyShardState, divisor: int | None) -> None:
    for handle in state._handles:
        for flat in handle.buffers:
            flat.routes.divide_by(divisor)


def _last_of(numbers: Sequence[int], begun: dict[int, int]) -> int:
    """Return which of ``numbers`` has begun most steps, the last one of several."""
    return max(numbers, key=lambda number: (begun[number], number))

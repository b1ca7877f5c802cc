"""The parts of a model that communicate on their own, on ranks of which some may have no inputs left.

On a rank with inputs a part tells what it is about to start, without it does what it hears. A root of ``fully_shard``
is one part, an annotation of ``replicate`` another.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import nn

from composable.annotation import FullyShardState, Root, sharded_state_of
from composable.collectives import Ranks
from composable.engine import FlatBuffer, Handle
from composable.errors import UsageError, place_of_rank
from composable.features import Follower
from composable.fqns import describe_module
from composable.planning import managed_modules
from composable.replication import ReplicateState, replicate_state_of
from composable.uneven_steps import Steps

__all__ = ["Part", "check_shares", "find_parts", "ranks_of"]

# What parts tell, and how that reads in a message.
_SAID = {
    # A root of ``fully_shard``
    "gather": "gathers",
    "begin_backward": "begins a backward of",
    "drop": "drops gradients of",
    "reduce": "reduces the gradients of",
    "end_reductions": "ends a backward of",
    "hand_over": "gets the averages of",
    "abandon": "forgets a step of",
    # An annotation of ``replicate``
    "broadcast": "sends the buffers of",
    "begin_round": "averages the gradients of",
    "send": "sends the next bucket of",
    "finish": "gets the averages of",
    "recover": "ends a backward that was stopped, of",
}


# By global numbers, the ranks that have it, and in how many buffers.
Share: TypeAlias = tuple[tuple[int, ...], int]


class Part(Protocol):
    """A part of the model."""

    def describe(self, what: str, args: tuple[Any, ...]) -> str:
        """Return what was told, for messages."""
        ...

    def connect(self) -> object:
        """Do what a first forward does; returns whose part this is: of those that share it one counts. Collective."""
        ...

    def shares(self) -> list[Share]:
        """Return what ranks share in this part, in the order in which it is told of."""
        ...

    def unstepped(self) -> Handle | None:
        """Return a handle with sharded parameters that only a step after backward would train."""
        ...

    def tell_by(self, number: int, steps: Steps) -> None:
        """Tell of what the part does, under a number of its own."""
        ...

    def begin_step(self, running: set[int], *, divides_by_all: bool) -> None:
        """A step of the ranks with these global numbers begins."""
        ...

    def stand_by(self, *, is_first: bool, keeps_own: bool) -> None:
        """This rank has no inputs for the step that begins; ``is_first``: it had some for the one before.

        ``keeps_own``: nothing steps here, so replicated parameters have the gradients of now again at the end.
        """
        ...

    def buffers(self) -> list[FlatBuffer]:
        """Return those whose gradients ranks without inputs are to drop where users drop them elsewhere."""
        ...

    def follow(self, what: str, args: tuple[Any, ...]) -> None:
        """Do what a rank with inputs has told. Collective."""
        ...

    def finish(self, begun: dict[int, int]) -> None:
        """No rank has inputs left; ``begun``: how many steps each has begun, by global number. Collective."""
        ...

    def close(self) -> None:
        """Tell nothing from now on."""
        ...


def find_parts(module: nn.Module) -> list[Part]:
    """Return the parts at or below ``module``, in an order equal on all ranks.

    Raises:
        UsageError: Some belong to what is around it, or have ``static_graph=True``.
    """
    modules = dict.fromkeys(module.modules())
    found: dict[FullyShardState | ReplicateState, None] = {}
    for state in _states_of(module):
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
    return [_ReplicatedPart(state) if isinstance(state, ReplicateState) else _ShardedPart(state) for state in found]


def check_shares(parts: Sequence[Part], ranks: Ranks) -> None:
    """Refuse parts that have other places on some of the ranks that share them: told by place, others would follow.

    Collective over ``ranks``; not all of them have the same parts.

    Raises:
        UsageError: On every rank.
    """
    every = dict(zip(ranks.numbers, ranks.objects([part.shares() for part in parts]), strict=True))
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
    everyone = [state.grid.everyone for state in _states_of(module)]
    if not everyone:
        raise UsageError(
            "joinable found no annotated module",
            at=f"{place_of_rank()}, {describe_module(module)}",
            fix="call fully_shard or replicate first",
        )
    ranks = max(everyone, key=lambda one: one.size)
    for one in everyone:
        if not set(one.numbers) <= set(ranks.numbers):
            raise UsageError(
                f"uneven inputs of modules that ranks {list(ranks.numbers)} and ranks {list(one.numbers)} share",
                at=f"{place_of_rank()}, {describe_module(module)}",
                fix="one annotation has to be on all ranks that the others are on",
            )
    world = Ranks.of_world()
    # ``Join`` wants joinables of one group, and there may be several groups of all ranks.
    return Ranks.of(world.process_group, ranks.device) if set(world.numbers) == set(ranks.numbers) else ranks


class _ShardedPart:
    """A root of ``fully_shard``; it tells what its scheduler does."""

    def __init__(self, state: FullyShardState) -> None:
        self._state = state
        self._root: Root
        self._follower: Follower

    def describe(self, what: str, args: tuple[Any, ...]) -> str:
        place = " and ".join(map(describe_module, self._state.modules))
        if what in {"gather", "drop", "reduce"}:
            place = self._root.handles[args[0]].described
        return f"{_SAID[what]} {place}"

    def connect(self) -> Root:
        self._root = self._state.lazy_init()
        self._follower = Follower(self._root.scheduler)
        return self._root

    def shares(self) -> list[Share]:
        return [(handle.grid.everyone.numbers, len(handle.buffers)) for handle in self._root.handles]

    def unstepped(self) -> Handle | None:
        for handle in self._root.handles:
            if not handle.steppers and any(param.sharded.requires_grad for param in handle.params):
                return handle
        return None

    def tell_by(self, number: int, steps: Steps) -> None:
        self._root.scheduler.tell_by(_SchedulerTeller(number, steps, self._root.handles))
        self._root.join = steps

    def begin_step(self, running: set[int], *, divides_by_all: bool) -> None:
        for state in self._root.states:
            count = len(running.intersection(state.grid.everyone.numbers))
            self._divide_by(state, None if divides_by_all or not count else count)

    def stand_by(self, *, is_first: bool, keeps_own: bool) -> None:
        if is_first:
            self._follower.leave_step()
        self._follower.begin_step()

    def buffers(self) -> list[FlatBuffer]:
        return [flat for handle in self._root.handles for flat in handle.buffers]

    def follow(self, what: str, args: tuple[Any, ...]) -> None:
        follower = self._follower
        match what:
            case "gather":
                follower.gather(args[0], takes_secondary=args[1])
            case "begin_backward":
                follower.begin_backward()
            case "drop":
                follower.drop(args[0], args[1])
            case "reduce":
                follower.reduce(args[0], args[1], defers=args[2])
            case "end_reductions":
                follower.end_reductions(args[0], ends=args[1])
            case "hand_over":
                follower.hand_over()
            case _:
                assert what == "abandon", f"nobody tells {what!r}"
                follower.abandon()

    def finish(self, begun: dict[int, int]) -> None:
        self._follower.leave()
        for state in self._root.states:
            ranks = state.grid.everyone
            source = ranks.numbers.index(_last_of(ranks.numbers, begun))
            for module in managed_modules(state.modules, state.ignored_modules):
                for buffer in module._buffers.values():
                    if buffer is not None:
                        _overwrite(buffer, ranks, source)

    def close(self) -> None:
        self._root.scheduler.tell_by(None)
        self._root.join = None
        self._follower.end()
        for state in self._root.states:
            self._divide_by(state, None)

    @staticmethod
    def _divide_by(state: FullyShardState, divisor: int | None) -> None:
        for handle in state._handles:
            for flat in handle.buffers:
                flat.routes.divide_by(divisor)


class _SchedulerTeller:
    """Tells what one scheduler does."""

    def __init__(self, number: int, steps: Steps, handles: Sequence[Handle]) -> None:
        self._number = number
        self._steps = steps
        self._handles = tuple(handles)
        self._indices = {handle: index for index, handle in enumerate(handles)}

    @property
    def has_listeners(self) -> bool:
        return self._steps.is_telling(is_needed=False)

    def begin_forward(self, module: nn.Module) -> None:
        self._steps.begin_forward(module)

    def end_forward(self, module: nn.Module, *, is_awaited: bool) -> None:
        self._steps.end_forward(module, is_awaited=is_awaited)

    def begin_backward(self) -> None:
        self._steps.begin_backward()
        self._steps.tell(self._number, "begin_backward")

    def drop(self, handle: Handle, bits: Sequence[int]) -> None:
        self._steps.tell(self._number, "drop", self._indices[handle], list(bits))

    def gather(self, handle: Handle, *, takes_secondary: bool) -> None:
        self._steps.tell(self._number, "gather", self._indices[handle], takes_secondary)

    def reduce(self, handle: Handle, position: int) -> None:
        defers = handle.buffers[position].routes.kept.defers
        self._steps.tell(self._number, "reduce", self._indices[handle], position, defers)

    def end_reductions(self, *, ends: bool) -> None:
        synced = [handle.requires_gradient_sync for handle in self._handles]
        self._steps.tell(self._number, "end_reductions", synced, ends)

    def hand_over(self) -> None:
        if any(handle.synchronises for handle in self._handles):
            self._steps.note_averages()
        self._steps.tell(self._number, "hand_over")

    def end_by_hand(self) -> None:
        self._steps.end_by_hand()

    def abandon(self, *, is_needed: bool) -> None:
        if self._steps.is_telling(is_needed=is_needed):
            self._steps.tell(self._number, "abandon")


class _ReplicatedPart:
    """An annotation of ``replicate``; it tells of its forwards and of what its reducer does."""

    def __init__(self, state: ReplicateState) -> None:
        self._state = state
        self._source = 0
        self._put_back: Callable[[], None] | None = None

    def describe(self, what: str, args: tuple[Any, ...]) -> str:
        return f"{_SAID[what]} {' and '.join(map(describe_module, self._state.modules))}"

    def connect(self) -> ReplicateState:
        self._state.transport.connect()
        self._state.reducer.prepare()
        return self._state

    def shares(self) -> list[Share]:
        return [(self._state.grid.everyone.numbers, 1)]

    def unstepped(self) -> Handle | None:
        return None

    def tell_by(self, number: int, steps: Steps) -> None:
        teller = _ReducerTeller(number, steps, self._broadcast)
        self._state.uneven = self._state.reducer.teller = teller
        self._state.reducer.count_anew()
        self._state.reducer.before_round = teller.begin_round

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

    def buffers(self) -> list[FlatBuffer]:
        return []  # Gradients of a rank without inputs are the last averages alone.

    def follow(self, what: str, args: tuple[Any, ...]) -> None:
        reducer = self._state.reducer
        match what:
            case "broadcast":
                self._broadcast()
            case "begin_round":
                reducer.begin_shadow()
            case "send":
                reducer.send_shadow()
            case "finish":
                reducer.end_shadow()
            case _:
                assert what == "recover", f"nobody tells {what!r} {args}"
                reducer.recover_shadow()

    def finish(self, begun: dict[int, int]) -> None:
        numbers = sorted(self._state.grid.everyone.numbers)
        self._state.reducer.prepare()
        self._state.broadcast_all(numbers.index(_last_of(numbers, begun)))
        if self._put_back is not None:
            self._put_back()

    def close(self) -> None:
        self._state.uneven = self._state.reducer.teller = self._state.reducer.before_round = None
        self._state.reducer.count_anew()
        self._state.reducer.divide_by(None)
        self._state.reducer.expect(None)

    def _broadcast(self) -> None:
        if self._state.buffers is not None:
            self._state.buffers.broadcast(self._source)


class _ReducerTeller:
    """Tells what one annotation of ``replicate`` does."""

    def __init__(self, number: int, steps: Steps, broadcast: Callable[[], None]) -> None:
        self._number = number
        self._steps = steps
        self._broadcast = broadcast

    def is_live(self) -> bool:
        return self._steps.is_live()

    def begin_forward(self, module: nn.Module, *, broadcasts: bool) -> None:
        self._steps.begin_forward(module)
        if broadcasts:
            self._steps.tell(self._number, "broadcast")
            self._broadcast()

    def begin_round(self, synchronises: bool) -> None:
        self._steps.begin_backward()
        if synchronises:
            self._steps.note_averages()
            self._steps.tell(self._number, "begin_round")

    def send(self) -> None:
        self._steps.tell(self._number, "send")

    def finish(self) -> None:
        self._steps.tell(self._number, "finish")

    def recover(self) -> None:
        self._steps.tell(self._number, "recover")


def _states_of(module: nn.Module) -> list[FullyShardState | ReplicateState]:
    """Return the states of all annotations at or below ``module``, each once."""
    found: dict[FullyShardState | ReplicateState, None] = {}
    for below in module.modules():
        sharded = sharded_state_of(below)
        if sharded is not None:
            found[sharded] = None
        replicated = replicate_state_of(below)
        if replicated is not None:
            found[replicated] = None
    return list(found)


def _last_of(numbers: Sequence[int], begun: dict[int, int]) -> int:
    """Return which of ``numbers`` has begun most steps, the last one of several."""
    return max(numbers, key=lambda number: (begun[number], number))


def _overwrite(tensor: torch.Tensor, ranks: Ranks, source: int) -> None:
    """Overwrite ``tensor`` with that of a rank within the group. Collective."""
    sent = tensor.detach().to(ranks.device).contiguous()
    ranks.broadcast(sent, source)
    tensor.data.copy_(sent)

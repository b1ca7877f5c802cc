"""The mean over the tokens of all ranks and micro-batches.

The library averages gradients over ranks, and a loop adds them up over micro-batches. Where these have other numbers
of tokens, that is a mean of means. Here each loss is a sum, and the numbers of tokens travel with the message that ends
the backward (see ``engine/riders.py``), by which the reduced gradients are multiplied before parameters get them.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from composable.annotated_module import check_idle
from composable.annotation import AnnotationState, FullyShardState, ReplicateState, nothing_annotated, states_below
from composable.comm_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook, reduce_scatter_hook
from composable.engine import HostCopy, Rider, StepListener
from composable.errors import ConfigError, UsageError, warn_once
from composable.ground.modes import unseen
from composable.ground.names import check_int, check_module, describe_module, described
from composable.ground.torch_hooks import GradientHook, on_gradient
from composable.ground.torch_private import current_graph_task_id, tensors_have_values

# Whether other hooks add up or average, nobody knows.
_AVERAGE = (allreduce_hook, bf16_compress_hook, fp16_compress_hook, reduce_scatter_hook)
_OTHER_LOSS = "a backward without TokenMean.add, or one that did not reach all annotated modules of the model"
_PART = "some of the gradients that wait were dropped or changed, or some modules reduce and others wait"
_OLD = "gradients of an earlier step that replicate has averaged already"
_TROUBLES = (_OTHER_LOSS, _PART, _OLD)


class _TokenSums(Rider, StepListener):
    """The sums of this rank since the gradients of one root of ``fully_shard``, or one ``replicate``, were reduced.

    They belong to the gradients that wait there: where these are dropped, the sums are forgotten.
    """

    name = "token_mean"
    count = 4  # Tokens, the sum of losses, whether any was added, and the number of a trouble.
    adjusts = True

    def __init__(self, state: AnnotationState) -> None:
        self._find_state = weakref.ref(state)
        self._grid = state.grid
        self._ranks = state.grid.everyone.numbers
        self.is_replaced = False
        self.value: torch.Tensor | None = None
        self._factor: torch.Tensor | None = None
        self._late: HostCopy | None = None  # Told by all ranks on a device in the last reduction.
        self._forget()

    def _forget(self) -> None:
        self._terms: list[tuple[torch.Tensor, HostCopy]] = []
        # How many backwards had a loss of `add`, and how many of these reached these modules. Of the last one the task,
        # the first term, and whether it runs.
        self._added = self._reached = self._start = 0
        self._task, self._is_open, self._is_told = -2, False, False
        self._trouble: torch.Tensor | int = 0
        self._waiting: list[object] = []

    @property
    def state(self) -> AnnotationState | None:
        """The annotation; ``None`` where it is not the one that this was made for, or has another."""
        state = self._find_state()
        return None if state is None or state.grid is not self._grid or self.is_replaced else state

    # In a backward, in this order

    def note(self, term: tuple[torch.Tensor, HostCopy]) -> None:
        """Note a loss, tokens and loss as float64 [2], as the backward from it begins."""
        if self._is_told and self._task == current_graph_task_id():
            raise UsageError(
                "a loss of TokenMean.add comes after the gradients of this backward were sent",
                fix="make one loss of those of one backward: mean.add(loss + other, count + other_count)",
            )
        if self._task != current_graph_task_id():
            before, now = self._look()
            if self._added == self._reached and not any(now):
                self._forget()
            elif self._reached and now != before:
                self._trouble = 2
            elif not self._added and not self._trouble and isinstance(state := self._find_state(), ReplicateState):
                found = [one.param.grad for one in state.reducer.params if one.param.grad is not None]
                grads = [one.to_local() if isinstance(one, DTensor) else one for one in found]
                self._trouble = 3 * (torch.nn.utils.get_total_norm(grads) != 0)
            self._task, self._start, self._is_told = current_graph_task_id(), len(self._terms), False
            self._added += 1
        self._terms.append(term)

    def backward_begins(self, *, averages: bool) -> None:
        self._is_open = self._task == current_graph_task_id()
        self._reached += self._is_open

    def backward_reached(self, owner: object) -> None:
        self._trouble = self._trouble if self._is_open else 1

    def backward_ends(self, *, averages: bool, ends: bool) -> None:
        self._is_open = False
        if isinstance(self._find_state(), ReplicateState):
            self._waiting = self._look()[1]

    def step_forgotten(self, *, was_unfinished: bool) -> None:
        task, terms = self._task, self._terms[self._start :]
        self._forget()
        if task == current_graph_task_id():  # The step before this backward.
            self._task, self._terms, self._added = task, terms, 1

    def _look(self) -> tuple[list[object], list[object]]:
        """Return what waited at the end of the last backward, and what waits now, without a wait for a device."""
        state = self._find_state()
        if isinstance(state, ReplicateState):
            grads = [one.param.grad for one in state.reducer.params]
            return self._waiting, [None if grad is None else (id(grad), grad._version) for grad in grads]
        if not isinstance(state, FullyShardState) or state.root is None:
            return [], []
        step = state.root.scheduler.step
        flats = [flat for handle in step.handles for flat in handle.buffers]
        found = [[flat.gradients.bits() | flat.routes.kept.bits for flat in flats]]
        state.root.scheduler.completion.notice_dropped()
        found += [[flat.gradients.bits() | flat.routes.kept.bits for flat in flats]]
        return [step.finalizer.is_deferred, *found[0]], [step.finalizer.is_deferred, *found[1]]

    def tell(self, device: torch.device) -> torch.Tensor:
        self._is_told = True
        told = torch.zeros(self.count, dtype=torch.float64, device=device)  # Then fills: the host does not wait.
        for term, on_host in self._terms:
            told[:2].add_(on_host.read() if device.type == "cpu" else term.to(device, non_blocking=True))
        told[2:3].fill_(bool(self._terms))
        told[3:].fill_(1 if self._added != self._reached else self._trouble)  # A number, or a tensor on the device.
        return told

    def hear(self, told: torch.Tensor, numbers: Sequence[int]) -> UsageError | None:
        state, own, self._factor = self._find_state(), bool(self._terms), None
        handles = state.root.handles if isinstance(state, FullyShardState) and state.root is not None else []
        settings = {handle.synchronises for handle in handles}
        if settings == {False}:
            return None  # Shards wait for their all-reduce over copies.
        self._forget()
        rows = told
        if len(numbers) > len(self._ranks):
            rows = told[[numbers.index(one) for one in self._ranks]]  # Other blocks of tensor parallelism: same tokens.
        tokens, loss, added, trouble = rows.sum(0).unbind()
        inverse = torch.where(tokens > 0, 1 / tokens, 0.0)
        if own:
            is_right = (added == len(rows)) & (trouble == 0)
            self.value, self._factor = loss * inverse, torch.where(is_right, inverse, torch.nan)
        if len(settings) > 1 and own:
            return _refuse(f"of {', '.join(map(str, numbers))}: {_PART}")
        if told.device.type == "cpu":
            return _judge(told.tolist(), numbers)
        before, self._late = self._late, HostCopy(told)
        return None if before is None else _judge(before.read().tolist(), numbers)

    def adjust(self, reduced: torch.Tensor, divisor: float) -> None:
        if self._factor is not None and reduced.dtype.itemsize >= 4:
            reduced.mul_(self._factor * divisor)
        elif self._factor is not None:
            # A factor on the device would be rounded to the dtype.
            reduced.copy_(reduced.float() * (self._factor * divisor))


def _refuse(what: str) -> UsageError:
    return UsageError(
        f"the gradients are not those of a mean over tokens, on rank {what}",
        fix="drop the gradients of this step; give every loss of a step to add(loss_sum, count) on every rank, let it "
        "reach all modules of token_mean(model), call backward in no_sync but for the last one, and zero_grad() then",
    )


def _judge(rows: Sequence[Sequence[float]], numbers: Sequence[int]) -> UsageError | None:
    """Return the error that follows from what all ranks have told, if there is one, or warn if there are no tokens."""
    if not any(row[2] for row in rows):
        return None  # Plain averages.
    for number, row in zip(numbers, rows, strict=True):
        if not row[2] or row[3]:
            return _refuse(f"{number}: {_TROUBLES[int(row[3]) - 1 if row[2] else 0]}")
    if not sum(row[0] for row in rows):
        warn_once("TokenMean.add has counted no tokens in a step, on any rank: its gradients are zeros")
    return None


def _check(state: AnnotationState) -> None:
    """Raise ``UsageError`` if gradients of ``state`` are divided by others, or used before tokens are counted."""
    handles = state.root.handles if isinstance(state, FullyShardState) and state.root is not None else []
    reducers = [state.reducer] if isinstance(state, ReplicateState) else []
    hooks = [(hook, unit.grid.shard) for unit in handles for hook in unit.comm_hooks]
    hooks += [(hook, state.grid.everyone) for unit in reducers for hook in unit.comm_hooks]
    sizes = [(getattr(getattr(hook.state, "process_group", None), "size", int)(), ranks.size) for hook, ranks in hooks]
    found = {
        "Join": state.is_joined,
        "step_in_backward": any(one.steppers for one in handles) or any(one.steppers for one in reducers),
        "set_gradient_divide_factor": any(one.comms.divide_factor is not None for one in handles),
        "set_all_reduce_hook": any(one.comms.all_reduce_hook is not None for one in handles),
        "a sparse gradient": any(item.is_sparse for unit in reducers for item in unit.params),
        "a communication hook that may not average over all ranks": (
            any(hook.function not in _AVERAGE for hook, _ in hooks) or any(one != other for one, other in sizes)
        ),
    }
    for what, is_there in found.items():
        if is_there:
            at = describe_module(state.modules[0])
            raise UsageError(f"{what} cannot be used with token_mean", at=at, fix="leave out one of the two")


@dataclass(slots=True, eq=False, repr=False)
class _AddHook(GradientHook):
    """Counts a loss when a backward begins at it: one that never runs, or fails before, is not counted."""

    sums: Sequence[_TokenSums]
    term: tuple[torch.Tensor, HostCopy]

    @unseen
    def __call__(self, grad: torch.Tensor) -> None:
        for one in self.sums:
            one.note(self.term)


class TokenMean:
    """The mean over all tokens of a step; ``token_mean`` makes it."""

    def __init__(self, states: Sequence[AnnotationState]) -> None:
        self._sums = [_TokenSums(state) for state in states]
        for state, sums in zip(states, self._sums, strict=True):
            others = [one for one in state.riders if not isinstance(one, _TokenSums)]  # Decides the root.
            _check(state)
            for one in state.listeners.members:
                if isinstance(one, _TokenSums):
                    state.listeners.remove(one)
                    one.is_replaced = True
            state.carry(*others, sums)
            state.listeners.add(sums)

    @unseen
    def add(self, loss_sum: torch.Tensor, count: int | torch.Tensor) -> torch.Tensor:
        """Return a loss [] to call backward on, equal to ``loss_sum``. Not collective; each rank calls it.

        Args:
            loss_sum: The sum of the losses of some tokens, one element; not their mean. What else is added to the
                result counts as a part of the sum. A ``GradScaler`` may scale the result.
            count: The number of these tokens, 0 or more: an int, or a tensor with one element, on any device.

        Raises:
            ConfigError: An argument is of another kind.
            UsageError: ``loss_sum`` needs no gradient; the annotations have changed since ``token_mean``, or have got
                what excludes it.
        """
        if not isinstance(loss_sum, torch.Tensor) or loss_sum.numel() != 1:
            raise ConfigError(f"loss_sum is {described(loss_sum)}", fix="pass a tensor with one element, a sum")
        if not isinstance(count, torch.Tensor) or count.numel() != 1:
            check_int("count", count, 0, fix="pass the number of tokens, 0 or more, or a tensor with one element")
        if not loss_sum.requires_grad:
            fix = "compute it from the model's output with gradients enabled, also where there are no tokens"
            raise UsageError("loss_sum needs no gradient, so no backward would count its tokens", fix=fix)
        for one in self._sums:
            if (state := one.state) is None:
                what = "the annotations are others than those of token_mean(model)"
                raise UsageError(what, fix="call token_mean again, on every rank")
            _check(state)
            one.value = None if tensors_have_values() else loss_sum.detach()
        told = torch.zeros(2, dtype=torch.float64, device=loss_sum.device)
        told[:1].fill_(count.detach().view(()) if isinstance(count, torch.Tensor) else count)
        told[1:].fill_(loss_sum.detach().view(()))
        loss = loss_sum.reshape(()).clone()
        on_gradient(loss, _AddHook(self._sums, (told, HostCopy(told))))
        return loss

    @property
    def value(self) -> torch.Tensor:
        """The mean [] over all tokens of all ranks in float64, after the backward that reduces; 0 without tokens.

        It lies on the CPU, or with ``replicate`` on the device of the gradients. The next ``add`` begins anew.

        Raises:
            UsageError: No backward has reduced since ``add``.
        """
        value = self._sums[0].value
        if value is None:
            fix = "read it after the backward that reduces gradients, and before the next add"
            raise UsageError("the mean over tokens is not known: no backward has reduced since TokenMean.add", fix=fix)
        return value


def token_mean(model: nn.Module) -> TokenMean:
    """Let gradients of ``model`` be those of the mean over the tokens of all ranks and micro-batches.

    The gradients that a backward reduces are then the sum of the gradients of all ``loss_sum``, over ranks and
    backwards since the last reduction, divided by the sum of all ``count``. No message is added. Parameters get
    gradients when the backward ends, all together. A reduction without any ``add`` gives averages, as before.

    Collective over the ranks of the model, between two steps. A second call replaces the first one.

    Args:
        model: A module with annotated modules at or below it, all on the same ranks but for sharded ones inside of
            others, such as experts.

    Raises:
        UsageError: Nothing is annotated there; gradients are divided by others, summed up by a hook that is not of this
            library, or stepped inside backward; or a step is running.
        ConfigError: The annotations lie on different ranks.

    Example::

        mean = token_mean(model)
        mean.add(loss_sum, count).backward()
        print(mean.value)
    """
    check_module("model", model)
    states = list(dict.fromkeys(state.outermost() for _, state in states_below([model])))
    if not states:
        raise nothing_annotated("token_mean", model)
    check_idle("token_mean", states)
    if len({tuple(sorted(state.grid.everyone.numbers)) for state in states}) > 1:
        names = " and ".join(describe_module(state.modules[0]) for state in states)
        fix = "call token_mean once for the modules on each of them"
        raise ConfigError("the annotations of the model lie on different ranks", at=names, fix=fix)
    return TokenMean(states)

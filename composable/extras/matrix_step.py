"""Optimizer steps on whole matrices, of which ranks hold pieces.

A matrix that lies whole on a rank is stepped there, without communication. Of one that is cut, the *owner* (see
``choose_owners``) gets the pieces of others, computes with the whole, and sends each its piece of the result. Nothing
is gathered that no function reads, and no matrix reaches a rank that does not own it.

Source: Muon with an owner for each matrix, arXiv 2502.16982; distributed Shampoo, arXiv 2309.06497.
"""

from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from composable.comm import Ranks
from composable.dtensor import PieceExchange, RaggedDTensor, RaggedLayout, memory_of, note_written, ragged_spec
from composable.errors import ConfigError
from composable.ground.names import described
from composable.ground.torch_private import adafactor, muon_learning_rate, muon_orthogonalised
from composable.optim import LocalStep, check_parameters, cut_state, local_grad, state_like
from composable.planning import choose_owners


class Owners:
    """The owner of each of some sharded parameters, in its shard group, and the way of pieces to them and back.

    Collective methods: all ranks of the shard groups, with the same parameters.
    """

    def __init__(self, layouts: Sequence[RaggedLayout]) -> None:
        self._layouts = layouts
        self.ranks = [0] * len(layouts)
        members: dict[Ranks, list[int]] = {}
        for index, layout in enumerate(layouts):
            members.setdefault(layout.ranks, []).append(index)
        # The cut ones alone travel.
        self._cut: list[tuple[Ranks, list[int]]] = []
        for ranks, indices in sorted(members.items(), key=lambda item: item[0].order):
            cuts, shapes = [layouts[one].bounds for one in indices], [layouts[one].shape for one in indices]
            for index, owner in zip(indices, choose_owners(cuts, shapes), strict=True):
                self.ranks[index] = owner
            self._cut.append((ranks, [one for one in indices if not _is_whole(layouts[one], self.ranks[one])]))

    @staticmethod
    def of(optimizer: torch.optim.Optimizer, known: "Owners | None") -> "Owners":
        """Return the owners of an optimizer's sharded parameters, also of those without a gradient: owners stay.

        ``known``, the owners in an earlier step, are returned if they are the same.
        """
        params = _sharded(optimizer)
        layouts = [param._spec.layout for param, _ in params]
        if known is not None and list(map(id, layouts)) == list(map(id, known._layouts)):
            return known
        check_parameters(optimizer)
        check_matrices([param for param, _ in params])
        return Owners(layouts)

    def compute(
        self,
        parts: Mapping[int, Sequence[torch.Tensor]],
        function: Callable[[int, Sequence[torch.Tensor]], torch.Tensor],
        targets: Mapping[int, torch.Tensor],
    ) -> None:
        """Compute with whole parameters at their owners, and write each rank's piece of each result to its target.

        What lies whole on a rank is computed while pieces travel: one half as they come, the other as results go.
        Collective if any is cut.

        Args:
            parts: For each parameter, by its index, this rank's pieces of some tensors that are cut as it is.
            function: Gets the index of a parameter and the whole tensors [shape], views of the parts where this rank
                has all. Returns a tensor [shape] in the dtype of the target.
            targets: For each parameter [piece]; nothing is written where the result is a view of it.
        """
        found: dict[int, list[torch.Tensor]] = {}
        here: list[int] = []
        cut: list[int] = []
        results: dict[int, torch.Tensor] = {}
        for index, pieces in parts.items():
            layout = self._layouts[index]
            if self.ranks[index] != layout.rank:
                continue
            if _is_whole(layout, layout.rank):
                here.append(index)
                found[index] = [layout.unflat(part.reshape(-1)) for part in pieces]
            else:
                cut.append(index)
                found[index] = [layout.empty_block(part.dtype, part.device) for part in pieces]
                for whole, part in zip(found[index], pieces, strict=True):
                    layout.flat(whole)[layout.lo : layout.hi].copy_(part.reshape(-1))

        def run(indices: Sequence[int]) -> None:
            for index in indices:
                results[index] = result = function(index, found.pop(index))
                (piece,) = self._pieces([result], index, self._layouts[index].rank)
                if piece.data_ptr() != targets[index].data_ptr():
                    targets[index].view(-1).copy_(piece)

        with self._exchanging(
            lambda index, _: [part.reshape(-1) for part in parts[index]],
            lambda index, rank: self._pieces(found[index], index, rank),
            parts,
            to_owners=True,
        ):
            run(here[: len(here) // 2])
        run(cut)
        with self._exchanging(
            lambda index, rank: self._pieces([results[index]], index, rank),
            lambda index, _: [targets[index].view(-1)],
            parts,
            to_owners=False,
        ):
            run(here[len(here) // 2 :])

    def _pieces(self, wholes: Sequence[torch.Tensor], index: int, rank: int) -> list[torch.Tensor]:
        layout = self._layouts[index]
        lo, hi = layout.bounds[rank : rank + 2]
        return [layout.flat(whole)[lo:hi] for whole in wholes]

    @contextmanager
    def _exchanging(
        self,
        sent: Callable[[int, int], list[torch.Tensor]],
        received: Callable[[int, int], list[torch.Tensor]],
        which: Container[int],
        *,
        to_owners: bool,
    ) -> Iterator[None]:
        """Send what ``sent(index, peer)`` gives, and fill what ``received(index, peer)`` gives, while a context lasts.

        These are tensors of cut parameters.
        """
        begun = []
        for ranks, indices in self._cut:
            cut = [index for index in indices if index in which]
            if not cut:
                continue
            exchange = PieceExchange(ranks)
            own = [index for index in cut if self.ranks[index] == ranks.rank]
            for peer in [*range(ranks.rank), *range(ranks.rank + 1, ranks.size)]:
                theirs = [index for index in cut if self.ranks[index] == peer]
                leaving, coming = (theirs, own) if to_owners else (own, theirs)
                exchange.send([piece for index in leaving for piece in sent(index, peer)], [peer])
                targets = [piece for index in coming for piece in received(index, peer)]
                exchange.receive(targets, [target.dtype for target in targets], peer)
            begun.append(exchange.begin())
        try:
            yield
        finally:
            for finish in begun:
                finish()


def _is_whole(layout: RaggedLayout, rank: int) -> bool:
    return layout.bounds[rank + 1] - layout.bounds[rank] == layout.bounds[-1]


def check_matrices(params: Sequence[torch.Tensor]) -> None:
    """Raise ``ConfigError`` for a parameter of which no rank of its shard group can hold all."""
    for param in params:
        if type(param) is RaggedDTensor and param._spec.layout.splits:
            raise ConfigError(
                "tensor parallelism has split a parameter: no rank that shares its shards can hold all of it",
                at=f"parameter {str(param._spec.layout.label)!r}",
                fix="give it to another optimizer; torch's Muon and Adafactor that are not accelerated gather it",
            )


class _Step(NamedTuple):
    """A sharded parameter in a step, with this rank's piece of it and of its gradient, both [local_shape]."""

    param: RaggedDTensor
    local: torch.Tensor
    grad: torch.Tensor
    group: dict[str, Any]


def _sharded(optimizer: torch.optim.Optimizer) -> list[tuple[RaggedDTensor, dict[str, Any]]]:
    params = ((param, group) for group in optimizer.param_groups for param in group["params"])
    return [(param, group) for param, group in params if type(param) is RaggedDTensor]


def _steps_of(optimizer: torch.optim.Optimizer) -> dict[int, _Step]:
    """Return the sharded parameters with a gradient, by their index among the sharded ones."""
    return {
        index: _Step(param, memory_of(param._local_tensor), grad, group)
        for index, (param, group) in enumerate(_sharded(optimizer))
        if (grad := local_grad(param)) is not None
    }


class WholeStep(LocalStep):
    """The base of steps of whole parameters: torch's own code steps those that are not sharded."""

    _owners: Owners | None = None

    def forget(self) -> None:
        """Forget a step that an exception has cut short; the state is looked up in each step."""
        self.end()

    def _lend(self, optimizer: torch.optim.Optimizer) -> Any:
        owners = self._owners = Owners.of(optimizer, self._owners)
        self._step_sharded(optimizer, owners, _steps_of(optimizer))
        rest = [
            [[param for param in group["params"] if type(param) is not RaggedDTensor]]
            for group in optimizer.param_groups
        ]
        return SimpleNamespace(state=optimizer.state, params_of=rest.__getitem__, end=lambda state: None)

    @abstractmethod
    def _step_sharded(self, optimizer: torch.optim.Optimizer, owners: Owners, steps: dict[int, _Step]) -> None:
        """Step the sharded parameters that have a gradient. Collective if any of them is cut."""


class MuonStep(WholeStep):
    """The steps of ``torch.optim.Muon``: momentum on the pieces, what it orthogonalises and the result in bfloat16.

    Momentum is cut as the parameter is, so state dicts are those of any optimizer.
    """

    def _step_sharded(self, optimizer: torch.optim.Optimizer, owners: Owners, steps: dict[int, _Step]) -> None:
        averages = {one: [_averaged(step, optimizer.state[step.param])] for one, step in steps.items()}
        targets = {one: torch.empty_like(step.local, dtype=torch.bfloat16) for one, step in steps.items()}

        def orthogonalised(index: int, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
            group = steps[index].group
            options = group["ns_coefficients"], group["ns_steps"], group["eps"]
            return muon_orthogonalised(wholes[0], *options) if wholes[0].numel() else wholes[0]

        owners.compute(averages, orthogonalised, targets)
        for index, step in steps.items():
            lr: Any = step.group["lr"]
            lr = lr.squeeze() if isinstance(lr, torch.Tensor) else lr
            step.local.mul_(1 - lr * step.group["weight_decay"])
            rate = muon_learning_rate(lr, step.group["adjust_lr_fn"], step.param.shape)
            step.local.add_(targets[index], alpha=-rate)
        note_written([step.local for step in steps.values()])


def _averaged(step: _Step, entry: dict[Any, Any]) -> torch.Tensor:
    """Bring the momentum of a piece up to date, and return what Muon orthogonalises, in bfloat16 as it does."""
    if "momentum_buffer" not in entry:
        entry["momentum_buffer"] = state_like(step.param, torch.zeros_like(step.grad))
    cut_state(entry, step.param)
    average, momentum = memory_of(entry["momentum_buffer"]._local_tensor), step.group["momentum"]
    average.lerp_(step.grad, 1 - momentum)
    update = step.grad.lerp(average, momentum) if step.group["nesterov"] else average
    # A copy also where momentum is in bfloat16: torch's orthogonalisation writes to what it gets.
    return update.to(torch.bfloat16, copy=True)


class AdafactorStep(WholeStep):
    """The steps of ``torch.optim.Adafactor``: rows, columns and variances rest whole at the owner, numbers everywhere.

    Vectors have owners too, since the size of an update depends on the norm of the whole.
    """

    def _step_sharded(self, optimizer: torch.optim.Optimizer, owners: Owners, steps: dict[int, _Step]) -> None:
        entries = {}
        for index, step in steps.items():
            entry = optimizer.state[step.param]
            number = entry.setdefault("step", torch.zeros(()))
            number += 1
            entries[index] = {key: value for key, value in entry.items() if key != "step"}
            steps[index] = step._replace(group={**step.group, "step": number})
        _step_at_owners(owners, steps, entries, _adafactor_state, _adafactor_update)
        for index, step in steps.items():
            optimizer.state[step.param].update(entries[index])


def _adafactor_state(like: torch.Tensor, step: _Step) -> dict[str, torch.Tensor]:
    shape, dtype = like.shape, step.grad.dtype
    if like.dim() < 2:
        return {"variance": like.new_zeros(shape, dtype=dtype)}
    rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
    return {"row_var": like.new_zeros(rows, dtype=dtype), "col_var": like.new_zeros(columns, dtype=dtype)}


def _adafactor_update(
    matrix: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
) -> None:
    if not matrix.numel():
        return  # torch divides by the number of elements.
    lists: Any = [[state.get(key)] for key in ("row_var", "col_var", "variance")]
    options: Any = {key: group[key] for key in ("foreach", "d", "lr", "beta2_decay", "weight_decay", "maximize")}
    # The number of the step before: torch counts, in place.
    before, (eps1, eps2) = group["step"] - 1, group["eps"]
    rows, columns, variances = lists
    adafactor([matrix], [grad], rows, columns, variances, [before], eps1=eps1, eps2=eps2, **options)


def _step_at_owners(
    owners: Owners,
    steps: Mapping[int, _Step],
    entries: Mapping[int, dict[str, Any]],
    new_state: Callable[[torch.Tensor, _Step], dict[str, torch.Tensor]],
    update: Callable[[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]], None],
) -> None:
    """Update whole parameters in place, each with its state and gradient, at its owner. Collective if any is cut.

    ``entries`` has the state of each, which moves to its owner if it was loaded elsewhere; empty before the first step.
    ``new_state`` makes the state of a parameter from a tensor of its shape, on the meta device if others own it;
    ``update`` updates a parameter, as ``MatrixOptimizer.update``; its error is raised when ranks have their pieces.
    """
    for index, step in steps.items():
        entry, owner, layout = entries[index], owners.ranks[index], step.param._spec.layout
        if _is_whole(layout, layout.rank):
            shown = layout.unflat(step.local.reshape(-1))
        else:
            shown = torch.empty(layout.shape, dtype=step.local.dtype, device="meta")
        # On all ranks, before messages: it may raise. An owner that lacks values makes it again.
        state = entry or new_state(shown, step)
        if entry or owner != layout.rank or not shown.is_meta:
            _settle(entry, step, state, owner)

    failures: list[Exception] = []

    def updated(index: int, wholes: Sequence[torch.Tensor]) -> torch.Tensor:
        step, entry, (matrix, grad) = steps[index], entries[index], wholes
        try:
            if not entry:
                _settle(entry, step, new_state(matrix, step), owners.ranks[index])
            views = {key: value._local_tensor.view(value.shape) for key, value in entry.items()}
            state = dict(views)
            update(matrix, grad, state, step.group)
            for key, view in views.items():
                if state[key] is not view:
                    view.copy_(state[key])
        except Exception as error:
            failures.append(error)
        return matrix

    parts = {index: [step.local, step.grad] for index, step in steps.items()}
    owners.compute(parts, updated, {index: step.local for index, step in steps.items()})
    note_written([step.local for step in steps.values()])
    if failures:
        raise failures[0]


def _settle(entry: dict[str, Any], step: _Step, state: Mapping[str, Any], owner: int) -> None:
    """Put ``state`` into ``entry``, all of it at ``owner``; collective if it was loaded elsewhere."""
    param, layout = step.param, step.param._spec.layout
    for key, value in state.items():
        before, after = (0,) * (owner + 1), (value.numel(),) * (layout.ranks.size - owner)
        if type(value) is RaggedDTensor and value._spec.layout.bounds == before + after:
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        spec = ragged_spec(layout.mesh, value.shape, value.dtype, before + after, mesh_dim=layout.mesh_dim)
        local = torch.empty(spec.layout.local_shape, dtype=value.dtype, device=param.device)
        entry[key] = RaggedDTensor.wrap(local.copy_(whole.view(local.shape)) if layout.rank == owner else local, spec)


class MatrixOptimizer(torch.optim.Optimizer):
    """The base of optimizers of whole matrices, such as Shampoo or SOAP, on plain and sharded parameters.

    A subclass has two methods, which see plain tensors of the full shape. With sharded parameters, a matrix that lies
    whole on one rank is updated there; of others, one of the ranks that hold most gets the rest of the matrix and of
    its gradient, and sends back what became of the matrix. State rests at that rank too, and is saved and loaded at
    any number of ranks. Results are those of one process to the bit, if the gradients are.

    ``step`` is collective: all ranks of the shard groups, with gradients of the same parameters.

    Args:
        params: Parameters or param groups, as for every torch optimizer. Build it after the annotation.
        defaults: The options of groups that have no others, as torch's base class takes them.

    Raises:
        ConfigError: Tensor parallelism has split a parameter, or it is a DTensor of torch; or the subclass has no
            ``update``.
    """

    _owners: Owners | None = None

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        if type(self).update is MatrixOptimizer.update:
            # Not in a step, where only owners would raise.
            raise ConfigError(f"{type(self).__name__} has no update", fix="define update(matrix, grad, state, group)")
        super().__init__(params, defaults)
        for group in self.param_groups:
            check_matrices(group["params"])
            for param in group["params"]:
                if isinstance(param, DTensor) and type(param) is not RaggedDTensor:
                    raise ConfigError(
                        f"a parameter {list(param.shape)} is a DTensor placed {param.placements}, and fully_shard has "
                        "not sharded it",
                        fix="call fully_shard on its module, if it is not split; or give it to another optimizer",
                    )

    def init_state(self, matrix: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Return new state of a parameter: tensors, of any shapes that follow from the shape of ``matrix``.

        ``matrix`` is on the meta device where values are missing, then has them at the owner. ``group``: the options.
        """
        return {}

    def update(
        self, matrix: torch.Tensor, grad: torch.Tensor, state: dict[str, torch.Tensor], group: dict[str, Any]
    ) -> None:
        """Update a matrix [shape] and its state in place, by its gradient [shape], on the rank that owns it.

        ``state`` has the tensors that ``init_state`` has made, and ``group`` the options. It may not communicate.
        """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters that have a gradient; return what ``closure``, if given, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if type(param) is not RaggedDTensor and param.grad is not None:
                    if not self.state[param]:
                        self.state[param] = self._new_state(param.detach(), group)
                    self._update(param.detach(), param.grad, self.state[param], group)
        if steps := _steps_of(self):
            owners = self._owners = Owners.of(self, self._owners)
            entries = {index: self.state[step.param] for index, step in steps.items()}
            _step_at_owners(owners, steps, entries, lambda like, step: self._new_state(like, step.group), self._update)
        return loss

    def _update(self, matrix: torch.Tensor, *args: Any) -> None:
        shape = matrix.shape
        returned: Any = self.update(matrix, *args)  # type: ignore[func-returns-value]
        if matrix.shape != shape:
            what = f"update of {type(self).__name__} left {list(matrix.shape)} of a matrix {list(shape)}"
            raise ConfigError(what, fix="keep its shape: compute in other tensors")
        if returned is not None and returned is not matrix:
            raise ConfigError(
                f"update of {type(self).__name__} returned {described(returned)}, which changes nothing",
                fix="write to the matrix in place: matrix.copy_(new)",
            )

    def _new_state(self, matrix: torch.Tensor, group: dict[str, Any]) -> dict[str, torch.Tensor]:
        made = self.init_state(matrix, group)
        values: list[object] = [*made.values()] if isinstance(made, dict) else [made]
        wrong = [value for value in values if type(value) is not torch.Tensor]
        if wrong:
            raise ConfigError(
                f"init_state of {type(self).__name__} returned {described(wrong[0])}",
                fix="return a dict of plain tensors; for a number torch.zeros(())",
            )
        return made

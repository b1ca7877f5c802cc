"""Parameters that a forward writes to, in any way: an error that names them, never a loss in silence."""

import copy
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from composable import UsageError, fully_shard, replicate, unshard_params
from tests.pairwise import pairs_of
from tests.parity import full
from tests.world import on_ranks, run_ranks, run_threads

DIM = 6

Write = Callable[[torch.Tensor], object]

WRITES: dict[str, Write] = {
    "fill_": lambda w: w.fill_(0.5),
    "copy_": lambda w: w.copy_(F.normalize(w)),
    "mul_": lambda w: w.mul_(0.5),
    "clamp_": lambda w: w.clamp_(-0.1, 0.1),
    "item": lambda w: w.__setitem__(0, 3.0),
    "row": lambda w: w[1].zero_(),
    "mask": lambda w: w.masked_fill_(w > 0, 0.25),
    "index_put": lambda w: w.index_put_((torch.tensor([0, 1]),), torch.tensor(2.0)),
    "lerp_": lambda w: w.lerp_(torch.ones_like(w), 0.1),
    "foreach": lambda w: torch._foreach_mul_([w], 0.9),
    "out": lambda w: torch.mul(w.detach(), 2.0, out=w),
    "detached": lambda w: w.detach().add_(1.0),
    "view": lambda w: w.view(-1)[2:4].add_(1.0),
    "data": lambda w: w.data.mul_(0.5),
    "data copy": lambda w: w.data.copy_(F.normalize(w.data)),
    "data turned": lambda w: w.data.copy_(w.data.flip(0)),  # the same values elsewhere
    "data item": lambda w: w.data.__setitem__(0, 3.0),
    "data of a row": lambda w: w[1].data.fill_(3.0),
    "init": lambda w: nn.init.constant_(w, 0.3),
    "assigned data": lambda w: setattr(w, "data", torch.ones_like(w)),
}


class Writer(nn.Module):
    def __init__(self, way: str, *, is_frozen: bool, is_late: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, DIM * DIM).view(DIM, DIM), requires_grad=not is_frozen)
        self.bias = nn.Parameter(torch.zeros(DIM))
        self.write, self.is_late = WRITES[way], is_late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_late:
            with torch.no_grad():
                self.write(self.weight)
        output = x @ self.weight + self.bias
        if self.is_late:
            with torch.no_grad():
                self.write(self.weight)
        return output


def told(way: str, is_frozen: bool, is_late: bool, reshards: bool, is_own: bool) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), Writer(way, is_frozen=is_frozen, is_late=is_late))
    if is_own:
        fully_shard(model[1], reshard_after_forward=reshards)
    fully_shard(model, reshard_after_forward=reshards)
    try:
        model(torch.ones(2, DIM))
    except UsageError as error:
        at = error.at or ""
        is_named = "parameter '1.weight'" in at or "parameter 'weight'" in at
        return f"{error.what} {'by name' if is_named else at.partition(', parameters ')[2]}"
    return "silent"


@pytest.mark.parametrize("way", WRITES)
def test_every_way_to_write_a_parameter_in_forward_is_an_error(way: str) -> None:
    switch = (False, True)
    for choices in pairs_of(is_frozen=switch, is_late=switch, reshards=switch, is_own=switch)[1]:
        results = run_threads(told, 2, way, *choices)
        assert all(one.startswith("an unsharded parameter was written to") for one in results), (choices, results)
        assert all(
            one.endswith(("by name", "of which other ranks hold the part, if a value has changed")) for one in results
        ), results
        assert any(one.endswith("by name") for one in results), (choices, results)


class WritesBetween(nn.Module):
    """Writes to a parameter of its second part, before or after the part runs; the third one never does."""

    def __init__(self, *, is_late: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.is_late = is_late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x)
        x = self.parts[1](x) if self.is_late else x
        with torch.no_grad():
            self.parts[1].weight.fill_(0.5)
        return x if self.is_late else self.parts[1](x)


@pytest.mark.parametrize(("is_late", "reshards", "has_grad"), [*itertools.product((False, True), repeat=3)])
@on_ranks(2)
def test_so_it_is_where_not_all_modules_that_share_a_handle_run(is_late: bool, reshards: bool, has_grad: bool) -> None:
    model = WritesBetween(is_late=is_late)
    fully_shard(list(model.parts), reshard_after_forward=reshards)
    fully_shard(model)
    told = pytest.raises(UsageError, match="an unsharded parameter was written to")
    with told as caught, torch.set_grad_enabled(has_grad):
        model(torch.ones(2, DIM))
    assert "parts.1.weight" in str(caught.value.at) or "other ranks hold the part, if" in str(caught.value.at)


class WritesShards(nn.Module):
    """Writes to the shards of its second part in forward, as momentum encoders and codebooks do: one process sees it."""

    def __init__(self, moment: str, *, is_frozen: bool, is_held: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.parts[1].requires_grad_(not is_frozen)
        self.moment, self.is_held = moment, is_held
        self.held: list[torch.Tensor] = []

    def hold(self) -> None:
        self.held = [*self.parts[1].parameters()] if self.is_held else []

    @torch.no_grad()
    def write(self) -> None:
        for param in self.held or self.parts[1].parameters():
            # Through `.data` torch does not see it, and computes gradients with the new values.
            (param.data if self.moment == "before" else param).mul_(0.9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.parts[0](x).tanh()
        if self.moment in ("between calls", "after"):
            x = self.parts[1](x).tanh()
        if self.moment in ("before", "between calls", "after"):
            self.write()
        x = self.parts[2](x if self.moment == "after" else self.parts[1](x).tanh()).tanh()
        if self.moment == "after a later part":
            self.write()
        return self.parts[3](x)  # type: ignore[no-any-return]


def written_shards(
    how: str,
    moment: str,
    reshards: "bool | int",
    prefetches: bool,
    is_frozen: bool,
    has_grad: bool,
    is_held: bool,
) -> "list[torch.Tensor] | str":
    torch.manual_seed(0)
    model = WritesShards("later" if "later" in how else moment, is_frozen=is_frozen, is_held=is_held)
    if how == "sharded":
        for part in model.parts:
            fully_shard(part, reshard_after_forward=reshards)
        fully_shard(model)
    if how == "sharded" and prefetches:
        model.parts[0].set_modules_to_forward_prefetch([model.parts[1]])  # type: ignore[operator]
    model.hold()
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    outputs = []
    try:
        for _ in range(3):
            with torch.set_grad_enabled(has_grad):
                outputs.append(model(torch.ones(2, DIM)))
            if has_grad:
                outputs[-1].square().sum().backward()
                if how == "plain, written later":
                    model.write()
                optimizer.step()
                optimizer.zero_grad()
    except UsageError:
        return "refused"
    except RuntimeError as error:
        return "autograd" if "modified by an inplace operation" in str(error) else repr(error)
    return [one.detach() for one in (*outputs, *map(full, model.parameters()))]


MOMENTS = ["before", "between calls", "after", "after a later part"]
SWITCHES = {
    "prefetches": (False, True),
    "is_frozen": (False, True),
    "has_grad": (False, True),
    "is_held": (False, True),
}


@pytest.mark.parametrize("reshards", [True, False, 2])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_write_to_shards_in_a_forward_is_what_one_process_does_or_an_error_on_every_rank(
    moment: str, reshards: "bool | int"
) -> None:
    for choices in pairs_of(**SWITCHES)[1]:
        expected = written_shards("plain", moment, reshards, *choices)
        is_refused = expected == "autograd"
        if is_refused:  # The backward needs the values of the forward. Copies of them may be there.
            expected = written_shards("plain, written later", moment, reshards, *choices)
        for found in run_threads(written_shards, 4 if reshards == 2 else 2, "sharded", moment, reshards, *choices):
            # Values that were only gathered ahead are gathered again.
            may_refuse = moment != "before" and (is_refused or reshards is False)
            if not (isinstance(found, str) and may_refuse):
                torch.testing.assert_close(found, expected, msg=str((*choices, found)))


class Delta(nn.Module):
    """Adds a low-rank matrix, as adapters of PEFT do to parameters that are no module's weight."""

    def __init__(self, delta: torch.Tensor, factor: float) -> None:
        super().__init__()
        self.delta, self.factor = delta, factor

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight if self.factor == 1 else weight * self.factor


class Adapted(nn.Module):
    """Registers a parametrization in its forward, uses it, and removes it, between other uses of its parameters."""

    def __init__(self, factor: float = 1) -> None:
        super().__init__()
        self.first, self.linear, self.last = (nn.Linear(DIM, DIM) for _ in range(3))
        self.down, self.up = nn.Parameter(torch.ones(DIM, 2) / 9), nn.Parameter(torch.ones(2, DIM) / 7)
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        parametrize.register_parametrization(self.linear, "weight", Delta(self.down @ self.up, self.factor))
        x = self.linear(x).tanh()
        parametrize.remove_parametrizations(self.linear, "weight", leave_parametrized=False)
        return self.last(x)  # type: ignore[no-any-return]


def adapted(how: str, factor: float = 1) -> "dict[str, torch.Tensor] | str":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM), Adapted(factor), nn.Linear(DIM, DIM))
    model[1].linear.requires_grad_("frozen" not in how)
    if "handles" in how:
        fully_shard(model[1], reshard_after_forward="kept" not in how)
    if not how.startswith("plain"):
        fully_shard(model)
    forward = functools.partial(checkpoint, model, use_reentrant=False) if "checkpoint" in how else model
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    try:
        for _ in range(3):
            forward(torch.ones(2, DIM)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    except UsageError as error:
        return error.what
    return {name: full(param).detach() for name, param in model.named_parameters()}


@pytest.mark.parametrize("how", ["one", "one, frozen", "handles", "handles, kept", "one, checkpoint"])
def test_a_parametrization_that_a_forward_registers_is_no_write_unless_it_changes_a_value(how: str) -> None:
    expected = adapted("plain, frozen" if "frozen" in how else "plain")
    for found in run_threads(adapted, 2, how):
        torch.testing.assert_close(found, expected)
    if "checkpoint" not in how:
        assert all(str(one).startswith("an unsharded parameter was") for one in run_threads(adapted, 2, how, 0.5))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(DIM, DIM, max_norm=0.1),
    "bag": lambda: nn.EmbeddingBag(DIM, DIM, max_norm=0.1),
}


@on_ranks(2, name=MODULES)
def test_embeddings_that_renormalise_are_refused_and_the_fix_is_right(name: str) -> None:
    torch.manual_seed(0)
    model = fully_shard(nn.Sequential(MODULES[name]()))
    tokens = torch.arange(DIM).view(2, -1)
    with pytest.raises(UsageError) as caught:
        model(tokens)
    assert (
        caught.value.what == "an unsharded parameter was written to: it is a copy, and what was written would be lost"
    )
    assert f"rank {dist.get_rank()}, module" in (caught.value.at or "")
    embedding = model[0]
    embedding.max_norm = None
    with unshard_params(model), torch.no_grad():
        embedding.weight.renorm_(2, 0, 0.1)
    model(tokens).sum().backward()
    assert embedding.weight.full_tensor().norm(dim=1).max() < 0.1001


@on_ranks(2, run=run_ranks)  # torch's wrapper wants real ones
def test_copies_of_an_embedding_that_renormalises_drift_as_under_torchs_wrapper_and_the_pages_line_is_right() -> None:
    """Right is ``DistributedDataParallel``, in the same run; then equal copies."""
    torch.manual_seed(0)
    model = nn.Embedding(DIM, DIM, max_norm=0.1)
    wrapped = DistributedDataParallel(copy.deepcopy(model))
    replicate(model)
    tokens = torch.tensor([dist.get_rank()])
    for one in (model, wrapped):
        one(tokens).sum().backward()
    own = [torch.empty(DIM, DIM) for _ in range(2)]
    torch.testing.assert_close(model.weight, wrapped.module.weight)
    dist.all_gather(own, model.weight.detach())
    assert not torch.equal(*own)
    torch.manual_seed(0)
    model = replicate(nn.Embedding(DIM, DIM))
    model(tokens).sum().backward()
    with torch.no_grad():
        model.weight.renorm_(2, 0, 0.1)
    dist.all_gather(own, model.weight.detach())
    assert torch.equal(*own) and own[0].norm(dim=1).max() < 0.1001


@on_ranks(world_size=[2, 3])
def test_other_seeds_make_a_mixture_unless_the_first_ranks_values_are_sent() -> None:
    """What the docstring says: each rank keeps its piece of its own values. Right are plain models of each seed."""

    def drawn(seed: int) -> nn.Linear:
        torch.manual_seed(seed)
        return nn.Linear(DIM, 3 * DIM)

    plain = [drawn(rank) for rank in range(dist.get_world_size())]
    for is_sent in (False, True):
        model = fully_shard(drawn(dist.get_rank()), sync_module_states=is_sent)
        weight, cut = model.weight.full_tensor().detach().flatten(), model.weight.placements[0].bounds
        for rank, (start, stop) in enumerate(itertools.pairwise(cut)):
            expected = plain[0 if is_sent else rank].weight.detach().flatten()
            assert torch.equal(weight[start:stop], expected[start:stop])


@on_ranks(2)
def test_what_is_written_by_hand_between_unshard_and_reshard_is_an_error() -> None:
    model = fully_shard(nn.Linear(DIM, DIM))
    for _ in range(2):
        model.unshard()
        with torch.no_grad():
            model.weight.fill_(7.0)
        with pytest.raises(UsageError, match="what was written would be lost"):
            model.reshard()
    with unshard_params(model), torch.no_grad():
        model.weight.fill_(7.0)
    assert (model.weight.full_tensor() == 7).all()
    model(torch.ones(1, DIM)).sum().backward()
    model.unshard()
    model.reshard()


@on_ranks(2)
def test_a_write_through_data_that_begins_later_is_found_when_values_are_compared_again() -> None:
    model = fully_shard(nn.Sequential(Writer("data", is_frozen=False, is_late=False)))
    writer = model[0]
    write, writer.write = writer.write, lambda w: None
    for _ in range(5):
        model(torch.ones(2, DIM)).sum().backward()
    writer.write = write
    model(torch.ones(2, DIM)).sum().backward()
    with pytest.raises(UsageError, match="what was written would be lost"):
        model(torch.ones(2, DIM))

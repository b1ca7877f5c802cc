"""Full and sharded state dicts of annotated models, against the plain model's."""

import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import (
    ConfigError,
    DesyncError,
    StateDictError,
    UsageError,
    fallback_counts,
    full_state_dict,
    fully_shard,
    iter_full_params,
    load_full_params,
    load_full_state_dict,
    no_sync,
    replicate,
    save_checkpoint,
    strict_mode,
    unshard_params,
)
from composable.saving.entries import largest_handle_bytes
from tests.live_bytes import LiveBytes
from tests.models import (
    BLOCK_CLASSES,
    DIM,
    MLP,
    MODELS,
    Block,
    MLPBlock,
    TinyGPT,
    loss_of,
    make_model,
    random_input,
    seeded,
)
from tests.parity import full
from tests.world import on_ranks, run_threads, told


def is_unit(module: nn.Module) -> bool:
    return type(module) in BLOCK_CLASSES or type(module) is nn.Linear


def sharded(name: str, seed: int) -> nn.Module:
    return fully_shard(make_model(name, seed), policy=is_unit)


def assert_like_plain(found: Mapping[str, Any], plain: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Compare with the plain model's state dict: keys, order, versions, dtypes, values, what is shared."""
    expected = plain.state_dict()
    assert list(found) == list(expected)
    assert found._metadata == expected._metadata  # type: ignore[attr-defined]
    for key, want in expected.items():
        if not isinstance(want, torch.Tensor):
            assert found[key] == want, key
            continue
        cast = want.to(dtype) if dtype is not None and want.is_floating_point() else want
        assert type(found[key]) is torch.Tensor and not found[key].requires_grad
        assert found[key].dtype == cast.dtype and torch.equal(found[key], cast), key
        assert found[key].untyped_storage().nbytes() == found[key].nbytes, key

    def ties(state: Mapping[str, Any]) -> list[list[bool]]:
        pointers = [value.data_ptr() if isinstance(value, torch.Tensor) else 0 for value in state.values()]
        return [[bool(a) and a == b for b in pointers] for a in pointers]

    assert ties(found) == ties(expected)


@pytest.mark.parametrize(("world_size", "names"), [(3, list(MODELS)), (1, ["gpt_tied"]), (2, ["gpt_tied", "uneven"])])
@on_ranks()
def test_a_full_state_dict_is_the_plain_models_and_goes_back(names: list[str]) -> None:
    fallback_counts(reset=True)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    last = world_size - 1
    for name in names:
        model, plain = sharded(name, seed=1), make_model(name, seed=1)
        params = list(model.parameters())
        for dst, dtype in ((0, None), (last, torch.bfloat16)):
            found = full_state_dict(model, dst=dst, dtype=dtype)
            if rank == dst:
                assert_like_plain(found, plain, dtype)
                make_model(name).load_state_dict(found, strict=True)
            else:
                assert found == {}
        # From the last rank, in another dtype; what the others pass does not count.
        other = make_model(name, seed=2)
        given = {
            key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in other.state_dict().items()
        }
        result = load_full_state_dict(model, given if rank == last else {"x": torch.ones(1)}, src=last)
        assert result == ([], []) and result.missing_keys == []
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        found = full_state_dict(model)
        if rank == 0:
            assert_like_plain(found, other)
        # And it still runs.
        args, kwargs = model.example_inputs(seed=3)  # type: ignore[operator]
        with torch.no_grad():
            assert torch.equal(loss_of(model(*args, **kwargs)), loss_of(other(*args, **kwargs))), name
    assert not fallback_counts()


class Odd(nn.Module):
    """Extra state, a shared buffer, a view as buffer, replicated and ignored parameters, a scalar, a renamed entry."""

    class Counter(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.count = count
            self.weight = nn.Parameter(torch.full((3,), float(count)))

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.copy = seeded(lambda: nn.Linear(DIM, DIM), seed)
        self.block = seeded(MLPBlock, seed + 10)
        self.counter = self.Counter(seed)
        self.ignored = nn.Parameter(torch.full((2,), float(seed)))
        self.scale = nn.Parameter(torch.tensor(float(seed)), requires_grad=False)
        self.register_buffer("table", torch.full((4,), float(seed)))
        self.block.register_buffer("same_table", self.table)
        self.register_buffer("column", torch.arange(12.0).view(3, 4)[:, 1] + seed)
        self.register_buffer("unsaved", torch.full((2,), float(seed)), persistent=False)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.copy(x)) * self.scale


def odd(seed: int) -> nn.Module:
    model = Odd(seed)
    replicate(model.copy)
    return fully_shard(model, policy={MLPBlock}, ignored_params=[model.ignored])


@on_ranks(2)
def test_buffers_extra_state_and_unsharded_parameters_are_those_of_one_rank() -> None:
    rank = dist.get_rank()
    model = odd(1)
    unsaved = model.unsaved
    found = full_state_dict(model)
    if rank == 0:
        assert_like_plain(found, Odd(1))
        assert "unsaved" not in found
    # Only rank 0 has the values: buffers, replicated parameters and extra state reach the others too.
    table = model.table
    load_full_state_dict(model, Odd(5).state_dict() if rank == 0 else None)
    assert model.table is table is model.block.same_table and model.unsaved is unsaved
    assert model.counter.count == 5 and torch.equal(model.unsaved, torch.ones(2))
    expected = Odd(5).state_dict()
    for key, value in model.state_dict().items():
        want = expected[key]
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(full, want) if isinstance(want, torch.Tensor) else full == want, key


class ReadsItself(nn.Module):
    """Extra state that is a tensor, of a length of its own; two parameters in one entry; one that is kept turned."""

    class Measured(nn.Linear):
        def get_extra_state(self) -> torch.Tensor:
            return torch.tensor(self.measures)

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.measures = state.tolist()

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key = nn.Parameter(torch.randn(5, DIM)), nn.Parameter(torch.randn(3, DIM))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x @ self.query.t(), x @ self.key.t()], -1)

        def _save_to_state_dict(self, into: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            into[prefix + "both"] = torch.cat([self.query.detach(), self.key.detach()])

        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
            with torch.no_grad():
                for own, value in zip((self.query, self.key), state[prefix + "both"].split([5, 3]), strict=True):
                    own.copy_(value)

    class Turned(nn.Linear):
        def _save_to_state_dict(self, into: dict[str, Any], prefix: str, keep_vars: bool) -> None:
            into[prefix + "weight"] = self.weight.detach().t().contiguous()
            into[prefix + "bias"] = self.bias

        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            mine = {prefix + "weight": state[prefix + "weight"].t(), prefix + "bias": state[prefix + "bias"]}
            super()._load_from_state_dict(mine, prefix, *rest)

    def __init__(self, measures: list[float]) -> None:
        super().__init__()
        self.layers = nn.Sequential(self.Measured(DIM, DIM), self.Fused(), self.Turned(8, 3), nn.Linear(3, 2))
        self.layers[0].measures = measures

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("call", ["load_full_state_dict", "load_state_dict", "load_full_params"])
@on_ranks(2, annotate=["fully_shard", "replicate"])
def test_what_modules_read_in_their_own_way_is_loaded(annotate: str, call: str) -> None:
    rank = dist.get_rank()
    source = seeded(lambda: ReadsItself([5.0] * 5), 7)
    model = seeded(lambda: ReadsItself([1.0] * 3), rank)
    (fully_shard if annotate == "fully_shard" else replicate)(model)
    values = source.state_dict()
    if call == "load_full_state_dict":
        load_full_state_dict(model, values if rank == 0 else None)
    elif call == "load_state_dict":
        model.load_state_dict(values)
    else:
        pairs = [(key, value) for key, value in values.items() if "extra" not in key]
        load_full_params(model, pairs if rank == 0 else None)
        model.layers[0].measures = [5.0] * 5
    x = random_input(0, 2, DIM)
    torch.testing.assert_close(model(x), source(x))
    assert model.layers[0].measures == [5.0] * 5
    found = full_state_dict(model)
    if rank == 0:
        assert_like_plain(found, source)


@on_ranks(2)
def test_it_works_before_between_and_after_steps() -> None:
    rank = dist.get_rank()
    expected = make_model("mlp", 1)
    # Parameters that a forward has left unsharded.
    model = fully_shard(make_model("mlp", 1), policy={MLPBlock}, reshard_after_forward=False)
    x = random_input(rank, 4, DIM)
    model(x)
    found = full_state_dict(model)
    if rank == 0:
        assert_like_plain(found, expected)
    load_full_state_dict(model, make_model("mlp", 2).state_dict() if rank == 0 else None)
    with torch.no_grad():
        assert torch.equal(model(x), make_model("mlp", 2)(x))
    # Between accumulated backwards: the gradients stay.
    load_full_state_dict(model, expected.state_dict() if rank == 0 else None)
    with no_sync(model):
        loss_of(model(x)).backward()
        found = full_state_dict(model)
    if rank == 0:
        assert_like_plain(found, expected)
    loss_of(model(x)).backward()
    for own in range(2):
        loss_of(expected(random_input(own, 4, DIM))).backward()
    for (name, param), plain in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), plain.grad, msg=name)  # type: ignore[arg-type]
    # In the middle of a forward, and where full parameters are shown already: an error on every rank.
    seen: list[str] = []

    def ask(*_: Any) -> None:
        with pytest.raises(UsageError, match="in the middle of a forward"):
            full_state_dict(model)
        seen.append("forward")

    hook = model.blocks[0].register_forward_hook(ask)
    model(x)
    hook.remove()
    assert seen
    with unshard_params(model), pytest.raises(UsageError, match="while unshard_params shows"):
        load_full_state_dict(model, {})
    # Part of a model has a state dict of its own.
    block = full_state_dict(model.blocks[1])
    assert list(block) == (list(expected.blocks[1].state_dict()) if rank == 0 else [])


@on_ranks(2)
def test_a_model_on_meta_gets_its_values_from_one_rank() -> None:
    rank = dist.get_rank()
    for name in ("gpt_tied", "with_buffers", "mixed_dtypes"):
        with torch.device("meta"):
            model = sharded(name, 1)
        params = list(model.parameters())
        other = make_model(name, 2)
        with pytest.raises(UsageError, match="meta device"):
            full_state_dict(model)
        state = unfit_state(make_model("mlp", 2))
        with pytest.raises(ConfigError, match="missing"):
            load_full_state_dict(model, state if rank == 0 else None)
        assert all(param.is_meta for param in model.parameters())
        with LiveBytes() as live:
            load_full_state_dict(model, other.state_dict() if rank == 0 else None)
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert live.peak < 2.5 * sum(value.nbytes for value in other.state_dict().values())
        # What no state dict has is left to the user.
        for fqn, buffer in other.named_buffers():
            if fqn not in other.state_dict():
                setattr(model, fqn, buffer.clone())
        found = full_state_dict(model)
        if rank == 0:
            assert_like_plain(found, other)


class Lazy(Mapping[str, torch.Tensor]):
    """Reads values on demand and notes it."""

    def __init__(self, values: Mapping[str, torch.Tensor], broken: str = "", *, wide: bool = False) -> None:
        self.values_by_key = values
        self.wide = wide
        self.read: list[str] = []
        self.broken = broken

    def shape_of(self, key: str) -> torch.Size:
        return self.values_by_key[key].shape

    def __getitem__(self, key: str) -> torch.Tensor:
        self.read.append(key)
        if key == self.broken:
            raise OSError("disk is gone")
        return self.values_by_key[key].double() if self.wide else self.values_by_key[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_key)

    def __len__(self) -> int:
        return len(self.values_by_key)


@on_ranks(2)
def test_no_more_than_two_handles_are_held_beside_the_result() -> None:
    rank = dist.get_rank()
    config = {"vocab": 64, "dim": 160, "layers": 8, "heads": 2}
    plain = seeded(lambda: TinyGPT(**config), 1)
    model = fully_shard(seeded(lambda: TinyGPT(**config), 2), policy={Block})
    limit = 2 * largest_handle_bytes(model.parameters())
    assert limit > 2 * 2**20
    total = sum(value.nbytes for value in plain.state_dict().values())
    # Values that are made when they are read, wider than the model's.
    state = Lazy(plain.state_dict(), wide=True) if rank == 0 else None
    with LiveBytes() as live:
        load_full_state_dict(model, state)
    # Far below a full copy, also on the rank that has the values, which are twice as wide here.
    assert live.peak <= 2 * limit < total, (live.peak, limit, total)
    if rank == 1:
        assert live.peak <= limit / 4
    for dtype, share in ((None, 1), (torch.bfloat16, 2)):
        with LiveBytes() as live:
            found = full_state_dict(model, dtype=dtype)
        result = sum(value.nbytes for value in found.values())
        assert live.peak - result <= limit, (live.peak, result, limit)
        assert result == (total // share if rank == 0 else 0)
        if rank == 0:
            assert_like_plain(found, plain, dtype)


@on_ranks(2)
def test_of_several_names_of_a_tensor_the_last_one_counts() -> None:
    model, plain = sharded("gpt_tied", 1), make_model("gpt_tied", 1)
    state = make_model("gpt_tied", 2).state_dict()
    # Names of one tensor with different values: what torch does.
    state["tokens.weight"] = torch.full_like(state["tokens.weight"], 5.0)
    for missing in ("", "tokens.weight", "head.weight"):
        given = {key: value + len(missing) for key, value in state.items() if key != missing}
        plain.load_state_dict(given, strict=False)
        result = load_full_state_dict(model, given if dist.get_rank() == 0 else None, strict=False)
        assert result.missing_keys == ([missing] if missing else [])
        found = full_state_dict(model)
        if dist.get_rank() == 0:
            assert_like_plain(found, plain)


def load_lazily(path: str) -> None:
    rank = dist.get_rank()
    plain = make_model("mlp", 1)
    model = sharded("mlp", 2)
    if rank == 0:
        torch.save(plain.state_dict(), path)
    mapped = torch.load(path, mmap=True, weights_only=True) if rank == 0 else None
    load_full_state_dict(model, mapped)
    lazy = Lazy(make_model("mlp", 3).state_dict())
    load_full_state_dict(model, lazy if rank == 0 else None)
    assert sorted(lazy.read) == (sorted(plain.state_dict()) if rank == 0 else [])
    broken = Lazy(plain.state_dict(), broken="out.weight")
    error: type[Exception] = OSError if rank == 0 else DesyncError
    with pytest.raises(error, match="disk is gone"):
        load_full_state_dict(model, broken if rank == 0 else None)
    load_full_state_dict(model, plain.state_dict() if rank == 0 else None)
    found = full_state_dict(model)
    if rank == 0:
        assert_like_plain(found, plain)


def test_values_may_be_mapped_or_read_on_demand(tmp_path: Path) -> None:
    run_threads(load_lazily, 2, str(tmp_path / "plain.pt"))


def local_values(model: nn.Module) -> list[torch.Tensor]:
    values = [value for value in model.state_dict().values() if isinstance(value, torch.Tensor)]
    return [(value.to_local() if hasattr(value, "to_local") else value).clone() for value in values]


def unfit_state(plain: nn.Module) -> dict[str, Any]:
    state = dict(plain.state_dict())
    del state["inp.bias"], state["blocks.1.up.weight"]
    state["stranger"] = torch.ones(2)
    state["blocks.0.up.weight"] = torch.ones(3, 5)
    state["out.bias"] = "text"
    return state


UNFIT = (
    'Missing key(s) in state_dict: "inp.bias", "blocks.1.up.weight"',
    'Unexpected key(s) in state_dict: "stranger"',
    "Not alike: blocks.0.up.weight has shape [3, 5], not [16, 8], out.bias is a str, not a tensor",
)


@on_ranks(2)
def test_what_does_not_fit_is_one_error_on_every_rank_and_changes_nothing() -> None:
    rank = dist.get_rank()
    model = sharded("mlp", 1)
    before = local_values(model)
    state = unfit_state(make_model("mlp", 2))
    # On one rank only, and as a plain load on every rank.
    for load in (
        lambda: load_full_state_dict(model, state if rank == 0 else None),
        lambda: model.load_state_dict(state),
    ):
        with pytest.raises(ConfigError) as caught:
            load()  # type: ignore[no-untyped-call]
        assert [line for line in UNFIT if line not in str(caught.value)] == []
    # What has no place at all is an error without `strict` too.
    for load in (
        lambda: load_full_state_dict(model, state if rank == 0 else None, strict=False),
        lambda: model.load_state_dict(state, strict=False),
    ):
        with pytest.raises(ConfigError) as caught:
            load()  # type: ignore[no-untyped-call]
        assert UNFIT[2] in str(caught.value) and "missing" not in str(caught.value).splitlines()[1]
    with pytest.raises(ConfigError, match="not a mapping"):
        load_full_state_dict(model, [1] if rank == 0 else None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="0 to 1"):
        load_full_state_dict(model, {}, src=2)
    with pytest.raises(ConfigError, match="floating-point"):
        full_state_dict(model, dtype=torch.int32)
    with pytest.raises(UsageError, match="assign=True"):
        replicate(MLP()).load_state_dict(make_model("mlp", 2).state_dict(), assign=True)
    with pytest.raises(UsageError, match="not annotated"):
        full_state_dict(make_model("mlp"))
    assert all(torch.equal(a, b) for a, b in zip(before, local_values(model), strict=True))
    # Ranks that do not ask for the same.
    with pytest.raises(DesyncError, match=r"different arguments\n.*rank 0: options"):
        full_state_dict(model, dst=rank)
    with pytest.raises(DesyncError, match="different models"):
        full_state_dict(model if rank == 0 else model.blocks)
    # With `strict=False` the rest is loaded, and every rank hears what was not.
    for key in ("blocks.0.up.weight", "out.bias"):
        del state[key]
    result = load_full_state_dict(model, state if rank == 0 else None, strict=False)
    missing = ["inp.bias", "blocks.0.up.weight", "blocks.1.up.weight", "out.bias"]
    assert (sorted(result.missing_keys), result.unexpected_keys) == (sorted(missing), ["stranger"])
    assert sorted(model.load_state_dict(state, strict=False).missing_keys) == sorted(missing)
    found = full_state_dict(model)
    if rank == 0:
        old, new = make_model("mlp", 1).state_dict(), make_model("mlp", 2).state_dict()
        assert all(torch.equal(value, (old if key in missing else new)[key]) for key, value in found.items())


@on_ranks(2)
def test_integers_for_floating_point_values_are_an_error_and_casts_are_none() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    state = full_state_dict(model)
    before = local_values(model)
    rank = dist.get_rank()
    if rank == 0:
        state["0.weight"] = torch.ones(4, 3, dtype=torch.int64)
        state["1.num_batches_tracked"] = torch.tensor(1.0)
    lines = "0.weight is int64, not float32, 1.num_batches_tracked is float32, not int64"
    with pytest.raises(StateDictError, match=f"Not alike: {lines}"):
        load_full_state_dict(model, state if rank == 0 else None)
    assert all(torch.equal(a, b) for a, b in zip(before, local_values(model), strict=True))
    # Another floating-point dtype is cast, and another one of integers.
    if rank == 0:
        state["0.weight"] = torch.full((4, 3), 0.5, dtype=torch.bfloat16)
        state["1.num_batches_tracked"] = torch.tensor(3, dtype=torch.int32)
    load_full_state_dict(model, state if rank == 0 else None)
    assert torch.equal(model[0].weight.full_tensor(), torch.full((4, 3), 0.5))
    assert model[1].num_batches_tracked.item() == 3


class Renaming(nn.Module):
    """Loads a key that it had under another name, as modules do that have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if prefix + "old" in state:
            state[prefix + "weight"] = state.pop(prefix + "old")


@on_ranks(2)
def test_torchs_own_load_takes_full_and_sharded_tensors() -> None:
    model, plain = sharded("gpt_tied", 1), make_model("gpt_tied", 2)
    own = {key: value.detach().clone() for key, value in sharded("gpt_tied", 3).state_dict().items()}
    with strict_mode():
        # Full tensors on every rank, and the shards of a model cut alike: no gather.
        model.load_state_dict(plain.state_dict())
        assert all(torch.equal(v.full_tensor(), plain.state_dict()[k]) for k, v in model.state_dict().items())
        model.load_state_dict(own)
        want = make_model("gpt_tied", 3).state_dict()
        assert all(torch.equal(v.full_tensor(), want[k]) for k, v in model.state_dict().items())
    assert model.head.weight is model.tokens.weight

    # Modules that load in a way of their own decide about their own keys.
    inner = nn.Sequential(Renaming(), nn.BatchNorm1d(4), nn.Linear(4, 4))
    fully_shard(inner)
    outer = nn.Sequential(inner, nn.Linear(4, 4))
    state = outer.state_dict()
    state["0.0.old"] = torch.full((4,), 7.0)
    del state["0.0.weight"]
    outer.load_state_dict(state)
    assert torch.equal(inner[0].weight.full_tensor(), torch.full((4,), 7.0))
    before = local_values(inner)
    state["0.2.bias"] = torch.ones(5)
    state["0.2.extra"] = torch.ones(5)
    state["0.2.weight"] = torch.ones(4, 4)
    with pytest.raises(
        ConfigError, match=r"(?s)Unexpected key\(s\) in state_dict: .0.2.extra.*0.2.bias has shape \[5\]"
    ):
        outer.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(before, local_values(inner), strict=True))

    # A replicated module is checked alike.
    copies = replicate(MLP())
    with pytest.raises(ConfigError, match=r"Missing key\(s\) in state_dict: .out\.bias."):
        copies.load_state_dict({k: v for k, v in make_model("mlp").state_dict().items() if k != "out.bias"})
    found = full_state_dict(copies)
    assert list(found) == (list(MLP().state_dict()) if dist.get_rank() == 0 else [])
    load_full_state_dict(copies, make_model("mlp", 4).state_dict() if dist.get_rank() == 0 else None)
    assert all(torch.equal(v, make_model("mlp", 4).state_dict()[k]) for k, v in copies.state_dict().items())


def step_with(model: nn.Module) -> None:
    model.zero_grad()
    loss_of(model(random_input(3, 4, DIM))).backward()


# What meets the other ranks next after a load, and whether a step came before the load.
MEETINGS: dict[str, tuple[bool, Any]] = {
    "first forward": (False, step_with),
    "end of a backward": (True, step_with),
    "full_state_dict": (False, full_state_dict),
    "save_checkpoint": (True, lambda model: save_checkpoint("never written", 1, model)),
}


def loads_alone(meeting: str, part: str, alone: list[int]) -> list[str]:
    """Load on some ranks, or a part there, and meet the others; then do what the error says. Returns its lines."""
    has_stepped, meet = MEETINGS[meeting]
    model, plain = sharded("uneven", 1), make_model("uneven", 2)
    if has_stepped:
        step_with(model)
    if dist.get_rank() in alone:
        model.get_submodule(part).load_state_dict(plain.get_submodule(part).state_dict())
    with pytest.raises(DesyncError) as caught:
        meet(model)
    model.load_state_dict(plain.state_dict())
    step_with(model)
    step_with(plain)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), expected.grad)
    load_full_state_dict(model, plain.state_dict() if dist.get_rank() == 0 else None)
    found = full_state_dict(model)
    if dist.get_rank() == 0:
        assert_like_plain(found, plain)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("alone", [[0], [1, 2]])
@pytest.mark.parametrize("meeting", MEETINGS)
def test_a_load_on_some_ranks_is_an_error_on_all_of_them(meeting: str, alone: list[int]) -> None:
    name = next(name for name, one in make_model("uneven", 1).named_modules() if name and is_unit(one))
    for part in ("", name):
        for rank, lines in enumerate(run_threads(loads_alone, 3, meeting, part, alone)):
            assert lines[0].startswith("some ranks have loaded a state dict, and others have not")
            for other, line in enumerate(lines[1:4]):
                assert line.startswith(f"    rank {other}: module ") and (repr(name) in line) is bool(part)
                assert line.endswith(f": loads by load_state_dict: {int(other in alone)}")
            assert lines[4] == f"  at:  rank {rank}"
            assert "load_state_dict on every rank" in lines[5] and "load_full_state_dict(" in lines[5]


@on_ranks(2)
def test_ranks_may_load_in_different_ways_as_often() -> None:
    """Load on every rank as often, each in its own way; and on the first alone where that reaches all ranks."""
    rank, model, plain = dist.get_rank(), sharded("uneven", 1), make_model("uneven", 2)
    state = plain.state_dict()
    with pytest.raises(StateDictError):
        model.load_state_dict({})
    if rank == 0:
        model.load_state_dict(model.state_dict())
        model.load_state_dict(state)
    else:
        model.load_state_dict(dict(list(state.items())[:1]), strict=False)
        model.load_state_dict(state, assign=True)
    with unshard_params(model, rank0_only=True):
        if rank == 0:
            model.load_state_dict(state)
    step_with(model)
    found = full_state_dict(model)
    if rank == 0:
        assert_like_plain(found, plain)


@on_ranks(2)
def test_what_is_sharded_below_a_replica_is_saved_and_loaded() -> None:
    model, plain = MLP(), make_model("mlp", 4)
    fully_shard(model.blocks[0])
    replicate(model)
    state = plain.state_dict()
    given = state if dist.get_rank() == 0 else None
    load_full_state_dict(model, given)
    found = full_state_dict(model)
    assert list(found) == (list(state) if dist.get_rank() == 0 else [])
    assert all(torch.equal(value, state[key]) for key, value in found.items())
    assert {fqn for fqn, _ in iter_full_params(model)} == {fqn for fqn, _ in plain.named_parameters()}
    assert all(torch.equal(full, plain.get_parameter(fqn)) for fqn, full in iter_full_params(model))  # type: ignore[arg-type]
    other = make_model("mlp", 5).state_dict()
    model.load_state_dict(other)
    assert all(torch.equal(full, other[fqn]) for fqn, full in iter_full_params(model))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "blocks.0') as caught:
        model.load_state_dict({key: value for key, value in other.items() if not key.startswith("blocks.0")})
    assert isinstance(caught.value, ConfigError) and type(caught.value) is StateDictError


def compiled_module(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, when the compiler is imported
        return torch.compile(module)


class Inner(nn.Module):
    """A layer, which may be compiled, a normalisation with a version, and a state that is no tensor."""

    def __init__(self, *, compiles_layer: bool) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        self.layer = compiled_module(layer) if compiles_layer else layer
        self.norm = nn.BatchNorm1d(4)
        self.note = "old"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.layer(x))
        return result

    def get_extra_state(self) -> str:
        return self.note

    def set_extra_state(self, state: str) -> None:
        self.note = state


def plain_values(compiled: Any, plain: nn.Module) -> dict[str, Any]:
    return dict(zip(compiled.state_dict(), plain.state_dict().values(), strict=True))


@on_ranks(2, annotate=["fully_shard", "replicate"], where=["whole", "inside", "both"])
def test_a_full_state_dict_has_no_names_of_compiled_modules(annotate: str, where: str) -> None:
    plain, model = seeded(lambda: Inner(compiles_layer=False), 0), Inner(compiles_layer=where != "whole")
    plain.note = "new"
    (fully_shard if annotate == "fully_shard" else replicate)(model)
    compiled = compiled_module(model) if where != "inside" else model
    first = dist.get_rank() == 0
    load_full_state_dict(compiled, plain.state_dict() if first else None)
    assert model.note == "new"
    found = full_state_dict(compiled)
    if first:
        assert_like_plain(found, plain)
    # Names that torch itself gives to compiled modules are taken too.
    load_full_state_dict(compiled, plain_values(compiled, plain) if first else None)


# -- what the other ranks get

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "saved": lambda state, file: torch.save(state, file),
    "saved in another": lambda state, file: torch.save({"model": state}, file),
    "pickled": lambda state, _: pickle.dumps([state]),
    "loaded": lambda state, _: nn.Linear(3, 2).load_state_dict(state),
    "loaded in part": lambda state, _: nn.Linear(3, 2).load_state_dict(state, strict=False),
}


def write_on_every_rank(how: str, dst: int) -> None:
    model = fully_shard(nn.Linear(3, 2))
    state, file = full_state_dict(model, dst=dst), io.BytesIO()
    said = told(lambda: WRITES[how](state, file))
    assert said[dst] == "no error" and "this rank has no values to write, send or load" in said[1 - dst], said
    # As the error says, and what is right anyway.
    if state:
        torch.save(state, file)
    assert (not state) == (dist.get_rank() != dst) and isinstance({**state}, dict) and list(state) == [*state.keys()]
    load_full_state_dict(model, state, src=dst)


@pytest.mark.parametrize("how", WRITES)
def test_what_ranks_without_values_write_is_an_error_there(how: str) -> None:
    run_threads(write_on_every_rank, 2, how, 0)
    run_threads(write_on_every_rank, 2, how, 1)

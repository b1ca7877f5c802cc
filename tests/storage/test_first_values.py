"""Models that begin on the meta device: only shards are made, values and buffers are right, or it is an error."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from composable import ConfigError, DesyncError, UsageError, full_state_dict, fully_shard, unshard_params
from composable.engine.handle import Handle
from composable.ground.contract import managing_state
from composable.ground.unfilled import mark_unfilled
from tests.parity import full_params
from tests.world import on_ranks, run_ranks

DIM = 8


class Rope(nn.Module):
    """Holds a table that is not saved, and that ``reset_parameters`` computes."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("table", self.compute(), persistent=False)

    def compute(self) -> torch.Tensor:
        return 1.0 / 100.0 ** (torch.arange(self.dim) / self.dim)

    def reset_parameters(self) -> None:
        with torch.device("cpu"):
            self.table = self.compute()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table


class Layer(nn.Module):
    """Scalar, low-precision and frozen parameters, running statistics, and a mask that other layers share."""

    def __init__(self, mask: torch.Tensor) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.up = nn.Linear(DIM, 3 * DIM)
        self.down = nn.Linear(3 * DIM, DIM, dtype=torch.bfloat16)
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(requires_grad=False)
        self.gain = nn.Parameter(torch.rand(()))
        self.register_buffer("mask", mask, persistent=False)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.gain)
        with torch.no_grad():
            self.mask.copy_(torch.arange(DIM) % 2 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.frozen(torch.tanh(self.up(self.norm(x))[:, :DIM] * self.mask))
        return x + self.gain * y + self.down(torch.cat([y, y, y], dim=1).bfloat16()).float()


class Zoo(nn.Module):
    """A bit of everything; the head is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, DIM, padding_idx=0)
        self.rope = Rope()
        mask = torch.arange(DIM) % 2 == 0
        self.layers = nn.ModuleList(Layer(mask) for _ in range(2))
        self.head = nn.Linear(DIM, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.rope(self.tokens(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.arange(10) % 11


def on_meta(build: Callable[[], nn.Module] = Zoo) -> nn.Module:
    with torch.device("meta"):
        return build()


def initialise(model: nn.Module, seed: int = 3) -> None:
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def reference(seed: int = 3) -> nn.Module:
    """The same model in one process, never on meta."""
    model = Zoo()
    initialise(model, seed)
    return model


def shard(model: nn.Module, way: str, **options: Any) -> nn.Module:
    if way == "policy":
        return fully_shard(model, policy={Layer}, **options)
    for layer in model.layers[: 1 if way == "mixed" else 2]:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def handles_of(model: nn.Module) -> list[Handle]:
    states = [state for module in model.modules() if (state := managing_state(module, "fully_shard")) is not None]
    return list(dict.fromkeys(handle for state in states for handle in state._handles))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(TOKENS).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def assert_same_model(model: nn.Module, expected: nn.Module) -> None:
    """Values of all parameters and buffers, ties, and views of the shards."""
    assert {fqn: t for fqn, t in full_params(model).items() if not torch.equal(t, expected.get_parameter(fqn))} == {}
    buffers = dict(expected.named_buffers())
    assert {fqn: t for fqn, t in model.named_buffers() if not torch.equal(t, buffers[fqn])} == {}
    assert model.head.weight is model.tokens.weight
    assert model.layers[0].mask is model.layers[1].mask
    assert_views(model)


def assert_views(model: nn.Module) -> None:
    for handle in handles_of(model):
        for flat in handle.buffers:
            for param in flat.params:
                assert param.is_placed(param.sharded)
                if param.local.numel():
                    assert param.ragged.to_local().untyped_storage().data_ptr() == flat.shard.data_ptr()


def assert_trains_alike(model: nn.Module, optimizer: torch.optim.Optimizer, expected: nn.Module) -> None:
    other = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(2):
        torch.testing.assert_close(train_step(model, optimizer), train_step(expected, other))
    for fqn, param in full_params(model).items():
        torch.testing.assert_close(param, expected.get_parameter(fqn).detach(), rtol=1e-2, atol=1e-5)


@contextmanager
def allocations() -> Iterator[SimpleNamespace]:
    """Give the bytes of the largest piece of memory that is allocated meanwhile, and of the most held at once."""
    found = SimpleNamespace(largest_bytes=0, peak_bytes=0)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        yield found
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    held = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        found.largest_bytes = max(found.largest_bytes, event.nbytes())
        found.peak_bytes = max(found.peak_bytes, held)


# to_empty, then initialisation


@pytest.mark.parametrize(("way", "world_size"), [("policy", 1), ("hand", 2), ("policy", 3), ("one by one", 2)])
@on_ranks(run=run_ranks)
def test_to_empty_and_reset_give_the_values_of_one_process(way: str) -> None:
    model = shard(on_meta(), way)
    params = dict(model.named_parameters())
    params["layers.0.up.weight"].no_decay = True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if way == "one by one":
        torch.manual_seed(3)
        for module in model.modules():
            module.to_empty(device="cpu", recurse=False)
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        # torch gives a shared buffer new memory under each name.
        model.layers[0].mask = model.layers[1].mask
        fully_shard.state(model).lazy_init()
    else:
        model.to_empty(device="cpu")
        initialise(model)
    assert all(param is params[fqn] and param.device.type == "cpu" for fqn, param in model.named_parameters())
    assert params["layers.0.up.weight"].no_decay
    expected = reference()
    assert_same_model(model, expected)
    assert_trains_alike(model, optimizer, expected)


def build_wide() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(4)))


@on_ranks(2, run=run_ranks)
def test_to_empty_allocates_the_shards_and_initialisers_one_parameter() -> None:
    model = fully_shard(on_meta(build_wide), policy={nn.Linear})
    shards = [flat.plan.shard_bytes for handle in handles_of(model) for flat in handle.buffers]
    with allocations() as made:
        model.to_empty(device="cpu")
    assert max(shards) <= made.largest_bytes < max(shards) + 1024
    assert made.peak_bytes < sum(shards) + 4096
    with allocations() as made:
        initialise(model)
    # One parameter in full, while its random numbers are drawn.
    assert made.peak_bytes < 2 * 64 * 64 * 4 + 1024


# What nobody filled


def error_of(call: Callable[[], object], kind: type[Exception] = UsageError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


@on_ranks(2, run=run_ranks)
def test_the_first_use_names_all_that_has_no_values_and_leaves_nothing_half_done() -> None:
    rank, model = dist.get_rank(), shard(on_meta(), "policy")
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    first = f"rank {rank}, 'tokens.weight', 'layers.0.gain', 'layers.0.norm.weight'"
    for call in (lambda: model(TOKENS), model.unshard):
        text = error_of(call)
        assert text.startswith(f"parameters and buffers are still on the meta device\n  at:  {first}")
        assert "and 23 more\n  fix: model.to_empty(device=...)" in text
        assert "param_init_fn" in text and "sync_module_states" in text
    text = error_of(lambda: full_state_dict(model))
    assert text.startswith("full values are asked for, and there are none on the meta device") and first in text
    assert f"rank {rank}, parameters 'tokens.weight', 'layers.0.gain'" in error_of(optimizer.step)
    model.to_empty(device="cpu")
    text = error_of(lambda: model(TOKENS))
    assert text.startswith("to_empty() made room for parameters or buffers, and nothing has filled it")
    assert "'tokens.weight', 'layers.0." in text and "more" in text
    initialise(model)
    # On one rank only, and a buffer that `__init__` computed.
    if rank == 1:
        mark_unfilled(model.rope.table)
    assert "nothing has filled it\n  at:  rank 1, 'rope.table'\n" in error_of(lambda: model(TOKENS))
    model.rope.reset_parameters()
    expected = reference()
    assert_same_model(model, expected)
    assert_trains_alike(model, optimizer, expected)


@on_ranks(3, run=run_ranks)
def test_real_values_beside_meta_ones_are_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), on_meta(lambda: nn.Linear(4, 4)))
    weight = model[0].weight.detach().clone()
    fully_shard(model)
    assert f"rank {dist.get_rank()}, '1.weight', '1.bias'\n" in error_of(lambda: model(torch.ones(1, 4)))
    model[1].to_empty(device="cpu")
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.fill_(2.0)
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 4), 2.0))
    model.reshard()
    assert torch.equal(model[0].weight.full_tensor(), weight)
    assert_views(model)


# Conversions


@on_ranks(2, together=[True, False])
def test_a_conversion_keeps_objects_marks_hooks_and_what_a_load_assigned(together: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))
    fully_shard([model[0], model[2]]) if together else fully_shard(model[0])
    fully_shard(model)
    params = dict(model.named_parameters())
    ran: list[str] = []
    for fqn, param in params.items():
        param.no_weight_decay = fqn  # type: ignore[attr-defined]
        param.register_post_accumulate_grad_hook(lambda _, fqn=fqn: ran.append(fqn))
    model(torch.ones(2, 3)).sum().backward()
    model[0].load_state_dict({"weight": torch.full((5, 3), 7.0)}, strict=False, assign=True)
    for convert in (model.cpu, model[0].cpu, model[2].cpu):
        convert()
        with unshard_params(model, writeback=False, offload_to_cpu=True):
            assert (model[0].weight == 7.0).all()
    model.to("meta")
    model.to_empty(device="cpu")
    for fqn, param in model.named_parameters():
        assert param is params[fqn]
        assert param.no_weight_decay == fqn
        # A parameter that was assigned has no gradient.
        assert (param.grad is None) is (fqn == "0.weight")
    with unshard_params(model):
        for param in model.parameters():
            nn.init.ones_(param)
    ran.clear()
    model.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    assert sorted(ran) == sorted(params)


@on_ranks(2, run=run_ranks)
def test_conversions_keep_the_shards_or_say_what_to_do() -> None:
    model = shard(reference(), "policy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = reference()
    assert_trains_alike(model, optimizer, expected)
    values = full_params(model)
    assert error_of(model.double) == (
        "a sharded parameter of float32 cannot become float64\n"
        f"  at:  rank {dist.get_rank()}, module Zoo, parameter 'tokens.weight'\n"
        "  fix: convert the model before fully_shard; for another dtype in computation pass mp_policy"
    )
    assert "cannot become bfloat16" in error_of(lambda: model.to(torch.bfloat16))
    for param in model.parameters():
        assert param.dtype in (torch.float32, torch.bfloat16)
    model.to("cpu").cpu().share_memory()
    with torch.no_grad():
        model.layers[0].frozen.double()
    inner = error_of(lambda: model(TOKENS))
    assert "cannot become float64" in inner and "frozen.weight" in inner
    model.layers[0].frozen.float()
    model.tokens.to("cpu")
    assert all(torch.equal(param, values[fqn]) for fqn, param in full_params(model).items())
    assert_trains_alike(model, optimizer, expected)
    assert_views(model)
    with unshard_params(model):
        in_use = error_of(lambda: model.to("meta"))
    assert in_use.startswith("a module cannot be converted while its parameters are in use")
    model.to("meta")
    away = error_of(lambda: model(TOKENS))
    assert away.startswith("parameters are on meta, and the ranks talk on cpu")
    assert "fix: model.to_empty(device=...)" in away
    model.to_empty(device="cpu")
    initialise(model)
    assert_same_model(model, reference())
    assert_trains_alike(model, optimizer, reference())


# Loading


def plain_state() -> dict[str, torch.Tensor]:
    return reference().state_dict()


def recompute(model: nn.Module) -> None:
    """Make again what no state dict has."""
    model.rope.reset_parameters()
    mask = torch.arange(DIM) % 2 == 0
    for layer in model.layers:
        layer.mask = mask


@on_ranks(3, run=run_ranks, how=["plain", "assign full", "assign ragged", "swap", "rank 0"])
def test_a_load_onto_meta_fills_the_shards(how: str) -> None:
    model = shard(on_meta(), "policy")
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = plain_state()
    if how == "plain":
        model.load_state_dict(state)
    elif how == "assign full":
        model.load_state_dict(state, assign=True)
    elif how == "assign ragged":
        for fqn, param in model.named_parameters(remove_duplicate=False):
            state[fqn] = nn.Parameter(dtensor.distribute_tensor(state[fqn], param.device_mesh, param.placements))
        model.load_state_dict(state, assign=True)
    elif how == "swap":
        torch.__future__.set_swap_module_params_on_conversion(True)
        model.load_state_dict(state)
        torch.__future__.set_swap_module_params_on_conversion(False)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about a call of its own
            set_model_state_dict(model, state if dist.get_rank() == 0 else {}, options=options)
    assert "'rope.table', 'layers.0.mask', 'layers.1.mask'\n" in error_of(lambda: model(TOKENS))
    recompute(model)
    assert all(param is params[fqn] for fqn, param in model.named_parameters())
    expected = reference()
    assert_same_model(model, expected)
    assert_trains_alike(model, optimizer, expected)
    # The same onto a model that has values.
    model.load_state_dict(plain_state(), assign=how.startswith("assign"))
    assert all(param is params[fqn] for fqn, param in model.named_parameters())
    assert all(torch.equal(param, plain_state()[fqn]) for fqn, param in full_params(model).items())


# param_init_fn


def give_values(module: nn.Module) -> None:
    """What users pass: memory for what the module owns, then its own initialisation."""
    module.to_empty(device="cpu", recurse=False)
    module.reset_parameters()  # type: ignore[operator]  # every module of the zoo that owns something has it


class Counting:
    """Calls another function and notes the modules it was called with."""

    def __init__(self, fn: Callable[[nn.Module], object]) -> None:
        self.fn = fn
        self.modules: list[nn.Module] = []

    def __call__(self, module: nn.Module) -> None:
        self.modules.append(module)
        self.fn(module)


@pytest.mark.parametrize(("world_size", "way"), [(1, "policy"), (2, "hand"), (3, "mixed")])
@on_ranks(run=run_ranks)
def test_param_init_fn_gives_the_values_of_one_process(way: str) -> None:
    model, fn = on_meta(), Counting(give_values)
    torch.manual_seed(3)
    shard(model, way, param_init_fn=fn)
    assert_views(model)
    assert len(fn.modules) == len(set(fn.modules)) == 13
    expected = Zoo()
    torch.manual_seed(3)
    order = list(expected.modules())
    if way != "policy":
        # Annotation by annotation.
        annotated = expected.layers if way == "hand" else expected.layers[:1]
        order = list(dict.fromkeys([module for layer in annotated for module in layer.modules()] + order))
    for module in order:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert_same_model(model, expected)
    assert_trains_alike(model, torch.optim.SGD(model.parameters(), lr=0.1), expected)


@on_ranks(4, run=run_ranks)
def test_param_init_fn_holds_one_module_in_full() -> None:
    model = on_meta(build_wide)
    with allocations() as made:
        fully_shard(model, policy={nn.Sequential}, param_init_fn=give_values)
    plan = fully_shard.state(model).plan
    handle_bytes = max(handle.buffer_bytes for handle in plan.handles)
    assert made.largest_bytes <= handle_bytes
    assert made.peak_bytes <= plan.shard_bytes + handle_bytes


class TiedBuffers(nn.Module):
    """A weight and a table under two names each, of which the second owner knows nothing."""

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))
            self.register_buffer("table", torch.arange(4.0))

    def __init__(self) -> None:
        super().__init__()
        self.first = self.Owner()
        self.second = self.Owner()
        self.second.weight = self.first.weight
        self.second.table = self.first.table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.second.table @ self.first.weight.t()


@on_ranks(2, run=run_ranks)
def test_ties_survive_a_function_that_fills_one_owner() -> None:
    model = on_meta(TiedBuffers)

    def fn(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        if module is model.first:
            with torch.no_grad():
                module.weight.fill_(2.0)
                module.table.fill_(3.0)

    fully_shard(model, param_init_fn=fn)
    assert model.first.weight is model.second.weight and model.first.table is model.second.table
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 3), 24.0))

    model = on_meta(TiedBuffers)

    def scale_second(module: nn.Module) -> None:
        if module is model.first:
            fn(module)
        else:
            with torch.no_grad():
                module.weight.mul_(2)

    fully_shard(model, param_init_fn=scale_second)
    assert torch.equal(model(torch.ones(1, 4)), torch.full((1, 3), 48.0))


def skip_rope(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    if not isinstance(module, Rope):
        module.reset_parameters()  # type: ignore[operator]  # see give_values


def leave_on_meta(module: nn.Module) -> None:
    if not isinstance(module, nn.BatchNorm1d):
        give_values(module)


def go_deep(module: nn.Module) -> None:
    module.to_empty(device="cpu")


def change_dtype(module: nn.Module) -> None:
    give_values(module)
    module.double()


def fail_on_rank_1(module: nn.Module) -> None:
    if dist.get_rank() == 1 and isinstance(module, Layer):
        raise ValueError("no such file")
    give_values(module)


def bad_init(fn: Callable[[nn.Module], object]) -> str:
    model = on_meta()
    tensors = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    kinds = {module: type(module) for module in model.modules()}
    with pytest.raises((ConfigError, DesyncError, ValueError)) as caught:
        shard(model, "policy", param_init_fn=fn)
    after = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    assert list(after) == list(tensors) and all(after[fqn] is tensor for fqn, tensor in tensors.items())
    assert all(type(module) is kind for module, kind in kinds.items()) and fully_shard.state(model) is None
    torch.manual_seed(3)
    shard(model, "policy", param_init_fn=give_values)
    assert_same_model(model, reference())
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (
            skip_rope,
            "ConfigError: param_init_fn left parameters or buffers without values\n  at:  rank 0, 'rope.table'\n",
        ),
        (leave_on_meta, "'layers.0.norm.weight', 'layers.0.norm.bias', 'layers.0.norm.running_mean'"),
        (go_deep, "changed a module before its turn"),
        (change_dtype, "changed [11, 8] float32 to [11, 8] float64"),
        (fail_on_rank_1, "DesyncError: another rank raised ValueError: no such file\n  at:  rank 1"),
    ],
)
def test_a_wrong_param_init_fn_is_an_error_on_every_rank_and_changes_nothing(
    fn: Callable[[nn.Module], object], text: str
) -> None:
    first, second = run_ranks(bad_init, 2, fn)
    assert text in first
    assert second == ("ValueError: no such file" if fn is fail_on_rank_1 else first.replace("rank 0", "rank 1"))


# sync_module_states


@on_ranks(3, run=run_ranks, others=["real", "meta", "param_init_fn", "made by all"])
def test_every_rank_gets_what_the_first_has(others: str) -> None:
    is_first = dist.get_rank() == 0
    fn = give_values if others == "made by all" or (others == "param_init_fn" and not is_first) else None
    torch.manual_seed(3 + dist.get_rank())
    if is_first and others != "made by all":
        model = reference()
    elif others == "real":
        model = reference(seed=10 + dist.get_rank())
        model.rope.table.mul_(2)
    else:
        model = on_meta()
    # By hand the first layer is filled before the rest.
    shard(model, "policy" if others == "made by all" else "mixed", sync_module_states=True, param_init_fn=fn)
    expected = reference()
    assert_same_model(model, expected)
    assert_trains_alike(model, torch.optim.SGD(model.parameters(), lr=0.1), expected)


@on_ranks(4, run=run_ranks)
def test_other_ranks_allocate_their_shards_only() -> None:
    model = build_wide() if dist.get_rank() == 0 else on_meta(build_wide)
    with allocations() as made:
        fully_shard(model, policy={nn.Sequential}, sync_module_states=True)
    plan = fully_shard.state(model).plan
    if dist.get_rank():
        # Pieces land in the shards: nothing is ever whole, and nothing is allocated besides.
        assert made.largest_bytes < max(handle.buffer_bytes for handle in plan.handles)
        # And one handle's small pieces on their way.
        assert made.peak_bytes < plan.shard_bytes + max(handle.shard_bytes for handle in plan.handles) + 4096


def bad_sync(case: str) -> str:
    rank = dist.get_rank()
    model = reference() if (rank == 0) != (case == "first on meta") else on_meta()
    tensors = [*model.parameters(), *model.buffers()]
    options: dict[str, Any] = {"sync_module_states": True}
    if case == "buffers" and rank == 1:
        model.rope.register_buffer("table", torch.zeros(DIM + 1), persistent=False)
        tensors = [*model.parameters(), *model.buffers()]
    if case == "option" and rank == 1:
        options, model = {}, reference()
    if case == "function" and rank == 1:
        options = {"param_init_fn": give_values}
    if case == "value":
        options = {"sync_module_states": 1} if rank == 1 else options
    if case == "policy" and rank == 1:
        options["policy"] = {nn.Conv2d}

    def annotate_and_run() -> None:
        fully_shard(model, **options)
        model(TOKENS)

    with pytest.raises((ConfigError, DesyncError)) as caught:
        annotate_and_run()
    if options:
        after = [*model.parameters(), *model.buffers()]
        assert all(new is old for new, old in zip(after, tensors, strict=True)) and fully_shard.state(model) is None
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("first on meta", ["ConfigError: sync_module_states sends values of the first", "rank 0, 'tokens.weight'"]),
        ("buffers", ["DesyncError", "rank 1: buffer 'rope.table' [9] float32"]),
        ("option", ["DesyncError", "rank 0: fully_shard", "rank 1: the comparison of plans before the first forward"]),
        ("function", ["DesyncError", "rank 1: param_init_fn=True"]),
        ("value", ["ConfigError: sync_module_states is 1, not a bool\n"]),
        ("policy", ["ConfigError", "Conv2d"]),
    ],
)
def test_ranks_that_do_not_fit_are_an_error_on_every_rank(case: str, parts: list[str]) -> None:
    for text in run_ranks(bad_sync, 2, case):
        assert all(part in text for part in parts), text


@on_ranks(2, run=run_ranks)
def test_ignored_modules_are_not_synchronised() -> None:
    is_first = dist.get_rank() == 0
    model = nn.Sequential(reference() if is_first else on_meta(), nn.BatchNorm1d(11))
    with torch.no_grad():
        model[1].running_mean.fill_(dist.get_rank())
    fully_shard(model, sync_module_states=True, ignored_modules=[model[1]])
    assert_same_model(model[0], reference())
    assert torch.equal(model[1].running_mean, torch.full((11,), float(dist.get_rank())))
    assert type(model[1].weight) is nn.Parameter

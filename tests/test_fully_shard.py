"""What ``fully_shard`` does around training: handles, order, collectives, modes, recovery, errors."""

import itertools
import random
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchWrapPolicy
from torch.utils._python_dispatch import TorchDispatchMode

import _traversal_utils
from composable import (
    ConfigError,
    DesyncError,
    FSDPModule,
    ModuleWrapPolicy,
    UsageError,
    fully_shard,
    plan,
    register_fsdp_forward_method,
)
from composable.annotation.root import Root, handle_of_module
from composable.dtensor.tensor import RaggedDTensor
from composable.engine import Handle
from tests.counting import CountingTransport, root_of
from tests.models import BLOCK_CLASSES, MLPBlock, loss_of, make_model, random_input
from tests.parity import full, full_params, gradients_of, inputs_of
from tests.programs import Twins, loss_at, train
from tests.world import on_ranks, run_ranks, run_threads


def annotate(model: nn.Module, way: str) -> nn.Module:
    if way == "policy":
        return fully_shard(model, policy=ModuleWrapPolicy(BLOCK_CLASSES))
    if way == "mixed":
        fully_shard(model.blocks[1])
        return fully_shard(model, policy=ModuleWrapPolicy(BLOCK_CLASSES))
    for module in list(model.modules()):
        if type(module) in BLOCK_CLASSES:
            fully_shard(module)
    return fully_shard(model)


def step(model: nn.Module, seed: int = 0) -> torch.Tensor:
    loss = loss_at(model, seed, dist.get_rank())
    loss.backward()
    return loss


def record_events(root: Root) -> list[str]:
    """Return a list that unshard and reshard are written down in as they happen."""
    events: list[str] = []

    class Recorded(Handle):
        __slots__ = ()

        def show(self, refuse: Callable[[Handle], None]) -> None:
            if not self.is_unsharded:
                events.append(f"unshard {self.fqn}")
            super().show(refuse)

        def reshard(self, *, frees: bool = True) -> None:
            events.append(f"reshard {self.fqn}")
            super().reshard(frees=frees)

    for handle in root.handles:
        handle.__class__ = Recorded
    return events


# Handles, their order, and the state


def handles_and_events(way: str) -> tuple[list[str], list[str], list[list[str]], list[str]]:
    """Return the handles of the whole module, all handles, the names in each, and what a step does with them."""
    model = make_model("mlp")
    annotate(model, way)
    root = root_of(model)
    events = record_events(root)
    step(model)
    own = [handle.fqn for handle in fully_shard.state(model)._handles]
    return own, [handle.fqn for handle in root.handles], [handle._fqns for handle in root.handles], events


WAYS = ("hand", "policy", "mixed")


@on_ranks(2)
def test_policy() -> None:
    """Every way of annotating gives the same handles with the same names in the same order."""
    names = ["", "blocks.0", "blocks.1", "blocks.2"]
    for way, own in (("policy", names), ("mixed", ["", "blocks.0", "blocks.2"]), ("hand", [""])):
        found = handles_and_events(way)
        assert found[:2] == (own, names)
        assert found[2] == [
            ["inp.weight", "inp.bias", "out.weight", "out.bias"],
            *[["up.weight", "up.bias", "down.weight", "down.bias"]] * 3,
        ]


class Parts(nn.Module):
    """Two parts with layers in them, as far down as a wrapper or a policy might go."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sub1 = nn.Linear(8, 8)
            self.sub2 = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.sub2(torch.relu(self.sub1(x)))

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.sub1 = self.Part()
        self.sub2 = self.Part()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sub2(self.sub1(self.lin(x)))


def annotated_parts(way: str) -> tuple[list[str], list[str]]:
    """Return the modules that are fully sharded, and those that have hooks."""
    model = Parts()
    if way == "wrapper":
        wrapped = FullyShardedDataParallel(
            model, auto_wrap_policy=TorchWrapPolicy({Parts.Part}), use_orig_params=True, device_id=torch.device("cpu")
        )
        return [clean_tensor_name(fqn) for fqn, one in wrapped.named_modules() if isinstance(one, type(wrapped))], []
    if way == "list":
        # One handle: of the modules that need it, those that lie in no other run it.
        fully_shard([model.sub1, model.sub2, model.lin])
    elif way == "policy":
        fully_shard(model, policy={Parts.Part})
    else:
        for part in (model.sub1, model.sub2, model):
            fully_shard(part)
    found = _traversal_utils._get_fully_sharded_module_to_states(model)
    return (
        [fqn for fqn, module in model.named_modules() if module in found],
        [fqn for fqn, module in model.named_modules() if module._forward_pre_hooks or module._forward_hooks],
    )


def test_by_hand_by_policy_and_by_torchs_wrapper_the_same_modules_are_fully_sharded() -> None:
    for way in ("hand", "policy"):
        assert run_threads(annotated_parts, 2, way)[0][0] == ["", "sub1", "sub2"]
    assert run_ranks(annotated_parts, 2, "wrapper")[0][0] == ["", "sub1", "sub2"]


@on_ranks(1)
def test_only_fully_sharded_modules_have_hooks() -> None:
    assert annotated_parts("policy")[1] == annotated_parts("hand")[1] == ["", "sub1", "sub2"]
    assert annotated_parts("list")[1] == ["lin", "sub1", "sub2"]


@on_ranks(2)
def test_asking_for_the_roots_decides_them_first() -> None:
    model = Parts()
    for part in (model.sub1, model.sub2):
        fully_shard(part, policy={nn.Linear})
    states = _traversal_utils._get_fsdp_states(model)
    assert [state._is_root for state in states] == [None, None]
    assert _traversal_utils._get_fsdp_root_states(model) == states
    assert [state._is_root for state in states] == [True, True]
    whole = nn.Sequential(Parts())
    fully_shard(whole[0].sub1)
    fully_shard(whole)
    found, modules = _traversal_utils._get_root_fsdp_states_with_modules(whole)
    assert found == [fully_shard.state(whole)] and modules == [whole]
    assert fully_shard.state(whole[0].sub1)._is_root is False


@on_ranks(1, seed=range(4))
def test_names_of_a_list_are_prefixed_by_position_and_known_from_the_root(seed: int) -> None:
    rng = random.Random(seed)
    model = make_model("mlp")
    named = [*model.named_modules()]
    chosen = [pair for pair in named if pair[0] in {"inp", "out"} or re.fullmatch(r"blocks\.\d", pair[0])]
    chosen = rng.sample(chosen, rng.randint(1, len(chosen)))
    fully_shard([module for _, module in chosen])
    fully_shard(model)
    (handle,) = fully_shard.state(chosen[0][1])._handles
    inside = [
        (position, fqn, name) for position, (fqn, module) in enumerate(chosen) for name, _ in module.named_parameters()
    ]
    if len(chosen) == 1:
        assert handle._fqns == [name for _, _, name in inside]
    else:
        assert handle._fqns == [f"{position}.{name}" for position, _, name in inside]
    assert len({*handle._fqns}) == len(handle._fqns)
    root_of(model)
    assert [handle.from_root(param.fqn) for param in handle.params] == [f"{fqn}.{name}" for _, fqn, name in inside]
    params = dict(model.named_parameters())
    assert all(params[handle.from_root(param.fqn)] is param.sharded for param in handle.params)


@pytest.mark.parametrize(("first", "second"), [(0, 2), (2, 0)])
@on_ranks(1)
def test_a_tie_names_both_parameters_from_the_outermost_module(first: int, second: int) -> None:
    body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    body[2].weight = body[0].weight
    model = nn.ModuleDict({"body": body})
    fully_shard(body[first])
    for what in (body[second], [body[second], body[1]], model["body"]):
        with pytest.raises(ConfigError) as caught:
            fully_shard(what)
        message = str(caught.value)
        assert f"parameter 'body.{second}.weight' is tied to 'body.{first}.weight', which an earlier" in message
        assert f"at:  rank 0, parameter 'body.{second}.weight' [4, 4] float32" in message


@on_ranks(2)
def test_unshard_reshard_order() -> None:
    """Every way of annotating unshards and reshards in one order: that of the model, and back."""
    events, *others = [handles_and_events(way)[3] for way in WAYS]
    assert others == [events] * 2
    forward = [f"{what} blocks.{i}" for i in range(3) for what in ("unshard", "reshard")]
    assert events[: 1 + len(forward)] == ["unshard ", *forward]
    tail = events[1 + len(forward) :]
    assert [event for event in tail if event.startswith("unshard")] == [f"unshard blocks.{i}" for i in (2, 1, 0)]
    backward = ["reshard blocks.2", "reshard blocks.1", "reshard blocks.0", "reshard "]
    assert [event for event in tail if event.startswith("reshard")] == backward


@on_ranks(2)
def test_the_root_caches_all_states_and_handles() -> None:
    model = make_model("mlp")
    annotate(model, "hand")
    root = root_of(model)
    states = _traversal_utils._get_fsdp_states(model)
    with pytest.raises(AttributeError, match="only the outermost module's state"):
        _ = states[1]._all_handles
    assert [states.index(state) for state in states[0]._all_states] == [0, 1, 2, 3]
    names = ["", "blocks.0", "blocks.1", "blocks.2"]
    assert [handle.fqn for handle in states[0]._all_handles] == names
    assert [handle.fqn for handle in _traversal_utils._get_fsdp_handles(model)] == names
    assert [state._is_root for state in states] == [True, False, False, False]
    assert all(state.root is root for state in states)
    for module, is_annotated in ((model, True), (model.blocks[0], True), (model.inp, False)):
        assert (fully_shard.state(module) is not None) is isinstance(module, FSDPModule) is is_annotated
    assert type(model).__name__ == "FSDPMLP"


@on_ranks(2)
def test_no_step_but_the_first_walks_the_tree() -> None:
    model = make_model("mlp")
    annotate(model, "policy")
    found = []
    for seed in range(2):
        walked: list[str] = []

        def note(frame: Any, event: str, arg: Any, walked: list[str] = walked) -> None:
            if event == "call" and frame.f_code.co_filename == _traversal_utils.__file__:
                walked.append(frame.f_code.co_name)

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            step(model, seed)
        finally:
            sys.setprofile(before)
        found.append(walked)
    first, second = found
    assert first and not second


@on_ranks(2, way=WAYS)
def test_parameters_keep_names_shapes_and_identity(way: str) -> None:
    model, plain = make_model("mlp"), make_model("mlp")
    annotate(model, way)
    before = list(model.parameters())
    step(model)
    shapes = {fqn: param.shape for fqn, param in plain.named_parameters()}
    for found in (dict(model.named_parameters()), model.state_dict()):
        assert {fqn: one.shape for fqn, one in found.items()} == shapes and [*found] == [*shapes]
        assert {type(one).__name__ for one in found.values()} == {"RaggedDTensor"}
    assert all(old is new for old, new in zip(before, model.parameters(), strict=True))
    dist.all_reduce(numel := torch.tensor(sum(param.to_local().numel() for param in before)))
    assert numel == sum(shape.numel() for shape in shapes.values())


# Collectives


@on_ranks(reshard=[None, True, False], world_size=[1, 2, 3])
def test_collectives_and_bytes_of_a_step_equal_theory(reshard: bool | None) -> None:
    steps, model = 3, make_model("gpt")
    fully_shard(model, policy=ModuleWrapPolicy(BLOCK_CLASSES), reshard_after_forward=reshard)
    counting = CountingTransport.install(root_of(model))
    for seed in range(steps):
        step(model, seed)
    # Three handles (root and two blocks), of which the root is kept by default.
    gathers = {None: 5, True: 6, False: 3}[reshard]
    assert counting.check(model, steps) == {"all_gather": steps * gathers, "reduce_scatter": steps * 3}


class Padding(TorchDispatchMode):
    """Counts the elements that are set to zero, and the calls that pad."""

    sees_hooks = True

    def __init__(self) -> None:
        super().__init__()
        self.zeroed_numel = 0
        self.pads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in {"zero_", "fill_", "zeros", "new_zeros", "zeros_like"}:
            self.zeroed_numel += result.numel()
        if name in {"constant_pad_nd", "pad", "cat"}:
            self.pads.append(name)
        return result


@pytest.mark.parametrize(("features", "world_size", "is_padded"), [(4, 2, False), (5, 4, True)])
@on_ranks()
def test_nothing_is_set_to_zero_in_a_step_but_padding(features: int, is_padded: bool) -> None:
    model = fully_shard(nn.Linear(features, features))
    batch = torch.ones(2, features)
    model(batch).sum().backward()
    model.zero_grad()
    with Padding() as seen:
        model(batch).sum().backward()
    (flat,) = fully_shard.state(model)._handles[0].buffers
    padding_numel = flat.plan.layout.numel - sum(param.numel() for param in model.parameters())
    assert (padding_numel > 0) is is_padded
    assert (seen.zeroed_numel, seen.pads) == (padding_numel, [])


@on_ranks(2)
def test_frozen_parameters_are_gathered_and_never_reduced() -> None:
    model = fully_shard(make_model("frozen_mixed"), policy=ModuleWrapPolicy(BLOCK_CLASSES))
    counting = CountingTransport.install(root_of(model))
    step(model)
    # Five blocks, two of them with a frozen and a trainable buffer; the first block, all frozen, gets no gradient.
    assert counting.counts() == {"all_gather": 7 + 6, "reduce_scatter": 3}


@on_ranks(2, kind=["no_grad", "frozen"])
def test_inference_gathers_once_and_leaves_nothing_unsharded(kind: str) -> None:
    model = make_model("mlp").requires_grad_(kind == "no_grad")
    annotate(model, "hand")
    root = root_of(model)
    counting = CountingTransport.install(root)
    with torch.set_grad_enabled(kind != "no_grad"):
        model(*inputs_of(model, 0, dist.get_rank())[0])
    assert counting.counts() == {"all_gather": 4}
    assert not any(handle.is_unsharded for handle in root.handles)
    model.requires_grad_()
    step(model)


# State dicts


@on_ranks(2, way=["hand", "policy"])
def test_state_dicts_are_torchs_own_with_hooks_around(way: str) -> None:
    model = make_model("mlp")
    annotate(model, way)
    for module in model.modules():
        for name in ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict"):
            assert getattr(type(module), name) is getattr(nn.Module, name), (type(module), name)
            assert name not in module.__dict__
    seen: list[str] = []
    for fqn in ("", "blocks", "blocks.0"):
        module = model.get_submodule(fqn)
        module.register_state_dict_post_hook(lambda one, state, prefix, local: seen.append(prefix))
    # Needs no root to be known, whichever module is asked.
    assert list(model.blocks[0].state_dict()) == ["up.weight", "up.bias", "down.weight", "down.bias"]
    whole = model.state_dict()
    assert seen == ["", "blocks.0.", "blocks.", ""]
    assert fully_shard.state(model).root is None
    model.load_state_dict({fqn: torch.ones_like(value) for fqn, value in whole.items()})
    assert all(torch.equal(full(param), torch.ones(param.shape)) for param in model.parameters())


# Explicit control


@on_ranks(2)
def test_unshard_and_reshard_by_hand() -> None:
    model = make_model("mlp")
    annotate(model, "policy")
    block = model.blocks[0]

    def kind() -> str:
        return type(block.up.weight).__name__

    assert block.unshard() is None
    assert [type(param) for param in block.parameters()] == [nn.Parameter] * 4
    assert torch.equal(block.up.weight, make_model("mlp").blocks[0].up.weight)
    block.reshard()
    assert kind() == "RaggedDTensor"
    block.unshard(async_op=True).wait()
    assert kind() == "Parameter"
    step(model)
    assert kind() == "RaggedDTensor"
    model.set_reshard_after_forward(False)
    loss = loss_of(model(*inputs_of(model, 1, dist.get_rank())[0]))
    handle = handle_of_module(block)
    assert handle is not None and handle.is_unsharded and kind() == "RaggedDTensor"
    loss.backward()
    assert kind() == "RaggedDTensor"
    assert type(model.blocks[:2]) is nn.ModuleList


@on_ranks(2)
def test_prefetch_follows_the_users_lists() -> None:
    model = make_model("mlp")
    annotate(model, "policy")
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([third, second])
    third.set_modules_to_backward_prefetch([first, second])
    root = root_of(model)
    counting = CountingTransport.install(root)
    step(model)
    keys = {handle.buffers[0].routes.gather_path.key: position for position, handle in enumerate(root.handles)}
    # Handles: 0 is the root, 1 to 3 are the blocks; without lists the first step knows no order in forward.
    assert [keys[key] for op, key, _ in counting.records if op == "all_gather"] == [0, 1, 3, 2, 3, 1, 2]


# Hooks, views, groups, ignored


@on_ranks(2)
def test_user_hooks_run_and_see_unsharded_parameters() -> None:
    model = make_model("mlp")
    events: list[str] = []
    block = model.blocks[0]
    block.register_forward_pre_hook(lambda module, args: events.append(f"pre {type(module.up.weight).__name__}"))
    annotate(model, "policy")
    block.register_forward_hook(lambda module, args, out: events.append("post"))
    block.register_full_backward_hook(lambda module, gi, go: events.append(f"full {gi[0].shape == go[0].shape}"))
    block.up.register_forward_hook(lambda module, args, out: out * 1)
    step(model)
    assert events == ["pre Parameter", "post", "full True"]


class InPlaceOnView(nn.Module):
    """Changes a view that a sharded module returned; autograd then drops the hooks of that view."""

    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).view(-1)

    def __init__(self) -> None:
        super().__init__()
        self.first = self.Chunked()
        self.second = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y.add_(1)
        return self.second(y.view(-1, 16))


@on_ranks(2)
def test_an_in_place_change_of_a_returned_view_is_harmless() -> None:
    xs: dict[tuple[bool, int], torch.Tensor] = {}

    def loss(model: Any, number: int, rank: int) -> torch.Tensor:
        # The gradient of the input needs the weight in backward.
        x = xs[isinstance(model.first, FSDPModule), rank] = (torch.ones(2, 8) * (1 + rank)).requires_grad_()
        return loss_of(model(x))

    twins = Twins(InPlaceOnView, lambda model: fully_shard(model, policy={InPlaceOnView.Chunked}), loss=loss)
    twins.backward()
    # Of one process it is that of the mean over ranks.
    torch.testing.assert_close(xs[True, twins.rank].grad, 2 * xs[False, twins.rank].grad)
    twins.check_gradients()


@on_ranks(2)
def test_a_list_of_modules_shares_one_handle() -> None:
    model = make_model("mlp")
    fully_shard([model.inp, model.out])
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard(model)
    assert fully_shard.state(model.inp) is fully_shard.state(model.out)
    counting = CountingTransport.install(root_of(model))
    step(model)
    assert counting.counts() == {"all_gather": 6, "reduce_scatter": 3}


@on_ranks(2, kind=[list, iter])
def test_ignored_parameters_and_modules_stay_as_they_are(kind: Callable[[Any], Any]) -> None:
    model = make_model("mlp")
    kept = model.out.weight
    fully_shard(model, policy={MLPBlock}, ignored_params=kind([kept]), ignored_modules=kind([model.blocks[1]]))
    step(model)
    plain = [name for name, param in model.named_parameters() if not isinstance(param, RaggedDTensor)]
    assert plain == [f"blocks.1.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")] + [
        "out.weight"
    ]
    assert len(gradients_of(model)) == 16 and model.out.weight is kept


@on_ranks(2, ignored_numbers=[[], [1, 2]])
def test_one_list_of_ignored_modules_serves_the_calls_on_all_parts(ignored_numbers: list[int]) -> None:
    def annotate_all(model: Any) -> None:
        ignored = [model.blocks[number].up for number in ignored_numbers] + [nn.Linear(2, 2)]
        for block in model.blocks:
            fully_shard(block, ignored_modules=ignored)
        fully_shard(model, ignored_modules=ignored)

    twins = Twins("mlp", annotate_all)
    twins.backward()
    plain = [name for name, param in twins.model.named_parameters() if not isinstance(param, RaggedDTensor)]
    assert plain == [f"blocks.{number}.up.{name}" for number in ignored_numbers for name in ("weight", "bias")]
    for one, name in itertools.product(twins, plain):
        one.get_parameter(name).grad = None
    twins.check_gradients()


class Codec(nn.Module):
    """Two methods and no forward; parts of the same kind inside."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.parts = nn.ModuleList(Codec(depth - 1) for _ in range(2 if depth else 0))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x))
        for part in self.parts:
            x = x + part.encode(x)
        return x

    def decode(self, x: torch.Tensor, *, shift: float) -> torch.Tensor:
        for part in self.parts:
            x = x - part.decode(x, shift=shift)
        return torch.sin(self.linear(x)) + shift


@on_ranks(2, reshard=[None, True, False])
def test_modules_with_registered_methods_and_no_forward_train_as_in_one_process(reshard: bool | None) -> None:
    def annotate_all(model: Any) -> None:
        for part in (model.parts[0].parts[1], model.parts[1], model):
            fully_shard(part, reshard_after_forward=reshard)
            register_fsdp_forward_method(part, "encode")
            register_fsdp_forward_method(part, "decode")

    def loss(model: Any, number: int, rank: int) -> torch.Tensor:
        return model.decode(model.encode(random_input(10 * number + rank, 3, 4)), shift=0.5).square().mean()

    train(Twins(lambda: Codec(2), annotate_all, loss=loss))


@on_ranks(2)
def test_a_method_that_is_not_registered_is_an_error_that_says_how() -> None:
    model = fully_shard(Codec(1))
    for use in (model.encode, model.linear, model.parts[0].encode):
        with pytest.raises(UsageError, match="used outside the forward of its module") as caught:
            use(torch.ones(2, 4))
        assert "linear.bias'" in caught.value.at
        assert "register_fsdp_forward_method(module, name)" in caught.value.fix


class FrozenLoop(nn.Module):
    """Frozen blocks that alternate, so that each is recorded before the other, and a head that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.a = MLPBlock().requires_grad_(requires_grad=False)
        self.b = MLPBlock().requires_grad_(requires_grad=False)
        self.head = MLPBlock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.b(self.a(self.b(x))))


@on_ranks(2)
def test_frozen_blocks_that_alternate_before_a_trained_head() -> None:
    model = FrozenLoop()
    fully_shard(model, policy={MLPBlock})
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
    assert all(param.grad is not None for param in model.head.parameters())


# Recovery


def refuse_once(model: nn.Module) -> None:
    def refuse(*_: object) -> None:
        handle.remove()
        raise ValueError("in a hook")

    handle = model.register_forward_pre_hook(refuse, prepend=True)


@on_ranks(2, where=["first", "root", "block"])
def test_the_step_after_an_exception_in_a_users_hook_is_right(where: str) -> None:
    """A user's hook that runs before ours raises: ours has not started that module's forward."""
    twins = Twins("mlp", lambda model: annotate(model, "policy"))
    if where != "first":
        step(twins.model)
        twins.model.zero_grad()
    refuse_once(twins.model.blocks[1] if where == "block" else twins.model)
    with pytest.raises(ValueError, match="in a hook"):
        twins.backward()
    twins.drop()
    twins.backward()
    twins.check_gradients()


class UsedElsewhere(nn.Module):
    """Reads a weight of ``second`` before ``first`` runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MLPBlock()
        self.second = MLPBlock()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.second.unshard()
        return self.second(self.first(x)) + self.second.up.bias.sum()


@on_ranks(2)
def test_a_gradient_from_outside_the_forward_is_counted() -> None:
    def loss(model: Any, number: int, rank: int) -> torch.Tensor:
        if not isinstance(model.second, FSDPModule):
            model.second.unshard = lambda: None  # What a plain module lacks.
        return loss_of(model(random_input(rank, 2, 8)))

    train(
        Twins(
            UsedElsewhere, lambda model: fully_shard(model, policy={MLPBlock}, reshard_after_forward=False), loss=loss
        ),
        1,
    )


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = MLPBlock()
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = self.block(x)
        return self.out(x if depth == 0 else self(x, depth - 1))


@on_ranks(2, reshard=[None, True])
def test_a_module_that_calls_itself_equals_one_process(reshard: bool | None) -> None:
    train(Twins(Recursive, lambda model: fully_shard(model, policy={MLPBlock}, reshard_after_forward=reshard)), 2)


# Bad input


@on_ranks(2)
def test_a_parameter_on_meta_at_first_forward() -> None:
    with torch.device("meta"):
        model = nn.Sequential(MLPBlock(), MLPBlock())
    fully_shard(model, policy={MLPBlock})
    with pytest.raises(UsageError, match="still on the meta device") as caught:
        model(torch.ones(1, 8))
    text = str(caught.value)
    assert f"rank {dist.get_rank()}, '0.up.weight', '0.up.bias'" in text and "and 3 more\n  fix:" in text


@on_ranks(2)
def test_ranks_that_annotate_differently_all_get_the_difference() -> None:
    rank = dist.get_rank()
    model = nn.Sequential(MLPBlock(), MLPBlock())
    if rank == 0:
        fully_shard(model[1])
    fully_shard(model)
    with pytest.raises(DesyncError, match="the ranks annotated different plans") as caught:
        model(torch.ones(1, 8))
    text = str(caught.value)
    assert "rank 0: " in text and "rank 1: " in text and f"at:  rank {rank}" in text and "fix:" in text


@pytest.mark.parametrize(("kind", "fqn"), [("before", "inp.weight"), ("between", "blocks.0.up.weight")])
@on_ranks(2)
def test_an_optimizer_that_holds_replaced_parameters(kind: str, fqn: str) -> None:
    model = make_model("mlp")
    if kind == "before":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        annotate(model, "policy")
    else:
        annotate(model, "policy")
        loss = loss_of(model(*inputs_of(model, 0, dist.get_rank())[0]))
        # Inside a block a parameter is unsharded.
        model.blocks[0].unshard()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss.backward()
    step(model)
    with pytest.raises(UsageError, match="optimizer holds a parameter") as caught:
        optimizer.step()
    assert f"rank {dist.get_rank()}" in caught.value.at and repr(fqn) in caught.value.at


@on_ranks(2)
def test_backward_without_forward_is_an_error_and_the_next_step_works() -> None:
    twins = Twins("mlp", lambda model: annotate(model, "policy"))
    loss = step(twins.model)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    twins.drop()
    twins.backward()
    twins.check_gradients()


@on_ranks(2)
def test_the_plan_is_what_is_executed() -> None:
    model = make_model("gpt")
    expected = plan(model, policy=ModuleWrapPolicy(BLOCK_CLASSES), world_size=2)
    fully_shard(model, policy=ModuleWrapPolicy(BLOCK_CLASSES))
    state = fully_shard.state(model)
    shards = sum(flat.shard.numel() * flat.shard.element_size() for h in state._handles for flat in h.buffers)
    full_params(model)
    assert (expected.transport, state.plan.transport) == ("auto", "process_group")
    assert hash(state.plan) == hash(expected)
    assert state.plan == expected and shards == expected.shard_bytes

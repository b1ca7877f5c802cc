"""What users set on fully sharded modules: what each setting changes, and that numbers stay those of one process."""

import copy
import dataclasses
import inspect
import itertools
import logging
import random
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.utils.checkpoint import checkpoint

import composable
from composable import (
    ConfigError,
    FSDPModule,
    GradientReductionHandle,
    UsageError,
    fully_shard,
    no_sync,
    share_comm_ctx,
    unannotate,
)
from composable.engine import Handle
from composable.engine.finish import Agreement
from composable.engine.unsharded import DeviceStreams
from composable.fsdp_module import REFUSED_SETTERS
from tests.counting import CountingTransport, root_of
from tests.logs import kept_logs
from tests.models import DIM, MLPBlock, make_model, random_input, random_tokens
from tests.parity import assert_equal_params, full, full_params, gradients_of, inputs_of
from tests.programs import Twins, loss_at
from tests.world import on_ranks, run_ranks
from tools.fsdp_methods import FUNCTIONS, METHODS, PAGE, with_list
from tools.streams.recorded import put_on_device
from tools.streams.recording import Recorder

HANDLES = 4  # of the MLP: the root and three blocks


def sharded(**options: Any) -> Any:
    return fully_shard(make_model("mlp"), policy={MLPBlock}, **options)


def loss(model: nn.Module, number: int) -> torch.Tensor:
    return loss_at(model, number, dist.get_rank())


def check_gradients(model: nn.Module, numbers: Sequence[int] = (0,)) -> None:
    """Compare with one process on these batches of all ranks."""
    plain, world_size = make_model("mlp"), dist.get_world_size()
    for number, rank in itertools.product(numbers, range(world_size)):
        (loss_at(plain, number, rank) / world_size).backward()
    assert_equal_params(gradients_of(model), gradients_of(plain), tolerance=2e-6)


def unsharded_bytes(model: nn.Module) -> int:
    """Return what the buffers of unsharded parameters have allocated."""
    buffers = [flat._storage for handle in root_of(model).handles for flat in handle.buffers]
    return sum(storage.nbytes() for storage in buffers if storage is not None)


# -- reshard_after_backward


@on_ranks(3)
def test_parameters_kept_after_backward_save_gathers_until_a_step_writes_the_shards() -> None:
    usual = {"all_gather": 2 * HANDLES - 1, "reduce_scatter": HANDLES}
    # The root is gathered once; a block is freed after forward, and gathered again in backward.
    saving = {"all_gather": HANDLES - 1, "reduce_scatter": HANDLES}
    values = []
    for kept in (False, True):
        model = sharded()
        counting = CountingTransport.install(root_of(model))
        model.set_reshard_after_backward(not kept)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            for micro in range(2):
                counting.reset()
                loss(model, 2 * step + micro).backward()
                assert counting.counts() == (saving if kept and micro else usual)
            assert (unsharded_bytes(model) > 0) is kept
            assert all(type(param).__name__ == "RaggedDTensor" for param in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        values.append(full_params(model))
    assert all(torch.equal(value, values[0][fqn]) for fqn, value in values[1].items())


@on_ranks(3, way=["nothing", "data", "inference", "sign of zero", "nan"])
def test_what_only_one_rank_wrote_in_whatever_way_all_ranks_gather_again(way: str) -> None:
    model = sharded()
    model.set_reshard_after_backward(False)
    counting = CountingTransport.install(root_of(model))
    loss(model, 0).backward()
    param = model.blocks[1].up.weight
    if dist.get_rank() == 0:
        if way == "data":
            param.data.add_(1.0)
        elif way == "inference":
            with torch.inference_mode():
                param._local_tensor.add_(1.0)
        elif way == "sign of zero":
            param._local_tensor.data.mul_(-0.0)
        elif way == "nan":
            param._local_tensor.data.fill_(float("nan"))
    counting.reset()
    loss(model, 1)
    assert [counting.counts().get("all_gather", 0)] == [0 if way == "nothing" else 1]


class Taught(nn.Module):
    """Blocks, one of which runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock(DIM) for _ in range(3))
        self.teacher = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.blocks[self.teacher](x)
        for number, block in enumerate(self.blocks):
            x = x if number == self.teacher else block(x)
        return x - target


@on_ranks(2, seed=range(8))
def test_what_stays_after_forward_may_change_between_steps(seed: int) -> None:
    """A forward without gradients leaves a block gathered, if its setting says so; after a step these values are old."""
    rng = random.Random(seed)

    def annotate(model: Taught) -> None:
        for block in model.blocks:
            fully_shard(block)  # each a root, which has no backward if it runs without gradients

    twins = Twins(Taught, annotate)
    blocks: list[Any] = [*twins.model.blocks]
    for step in range(6):
        for block in blocks:
            if rng.random() < 0.7:
                block.set_reshard_after_forward(rng.random() < 0.5, recurse=False)
            if rng.random() < 0.3:
                block.set_modules_to_forward_prefetch(rng.sample(blocks, 2))
        twins.model.teacher = twins.plain.teacher = rng.randrange(3)
        twins.backward(step)
        twins.step()
        with torch.no_grad():
            for param in itertools.chain(*(one.parameters() for one in twins)):
                param.mul_(0.9)  # also where there was no gradient
    twins.check(1e-5)


@on_ranks(2, async_op=[False, True])
def test_unshard_shows_what_a_step_wrote_since_the_backward_that_kept_parameters(async_op: bool) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_reshard_after_backward(False)
    loss(model, 0).backward()
    optimizer.step()
    block = model.blocks[1]
    expected = full(block.up.weight)
    pending = block.unshard(async_op)
    if pending is not None:
        pending.wait()
    assert torch.equal(block.up.weight, expected)


@on_ranks(2)
def test_an_event_on_the_cpu_changes_nothing() -> None:
    model = sharded()
    for event in (torch.Event(), torch.cpu.Event(), None):
        model.set_post_optim_event(event)
        loss(model, 0).backward()
    check_gradients(model, [0, 0, 0])


@on_ranks(2)
def test_wishes_for_speed_alone_change_nothing_and_are_logged() -> None:
    with kept_logs(logging.INFO) as lines:
        model = sharded()
        model._set_unshard_async_op(True)
        model.set_allocate_memory_from_process_group_for_comm(True)
    assert sum("(True) changes nothing: " in line for line in lines) >= 2
    loss(model, 0).backward()
    check_gradients(model)


# -- unshard_in_backward


class Embedder(nn.Module):
    """An embedding before and a linear layer after."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, DIM)
        self.head = nn.Linear(DIM, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def tokens_of(number: int, rank: int = 0) -> torch.Tensor:
    return random_tokens(100 * number + rank, 3, 5, vocab=16)


@pytest.mark.parametrize(("unshards", "gathers"), [(True, 6), (False, 4)])
@on_ranks(3)
def test_an_embedding_is_not_gathered_in_backward_and_its_gradients_are_reduced(unshards: bool, gathers: int) -> None:
    def annotate(model: Any) -> None:
        fully_shard(model.embed).set_unshard_in_backward(unshards)
        fully_shard(model)

    twins = Twins(Embedder, annotate, loss=lambda model, *at: model(tokens_of(*at)).square().mean())
    counting = CountingTransport.install(root_of(twins.model))
    for number in range(2):
        twins.backward(number)
    assert counting.counts() == {"all_gather": gathers, "reduce_scatter": 4}
    twins.check_gradients(2e-6)


@on_ranks(2, within=["nothing", "checkpointing"])
def test_a_backward_that_reads_a_parameter_which_nobody_gathers_never_has_wrong_numbers(within: str) -> None:
    model = sharded()
    model.blocks[1].set_unshard_in_backward(False)
    (x,), _ = inputs_of(model, 0, dist.get_rank())
    if within == "checkpointing":
        # What runs again is gathered again.
        checkpoint(model, x, use_reentrant=False).square().mean().backward()
    else:
        with pytest.raises(UsageError, match="backward reads a parameter that nobody gathers") as caught:
            model(x).square().mean().backward()
        assert "'blocks.1.up.weight'" in str(caught.value.at) and "blocks.0" not in str(caught.value.at)
        model.blocks[1].set_unshard_in_backward(True)
        model.zero_grad()
        loss(model, 0).backward()
    check_gradients(model)


class CheckpointsInside(nn.Module):
    """Runs its own parameters again in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM, DIM))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: torch.tanh(x @ self.weight), x, use_reentrant=self.use_reentrant)


@on_ranks(2, use_reentrant=[True, False])
def test_parameters_that_are_read_again_in_backward_and_not_gathered_are_an_error(use_reentrant: bool) -> None:
    model: Any = fully_shard(CheckpointsInside(use_reentrant))
    model.set_unshard_in_backward(False)
    out = model(random_input(0, 4, DIM).requires_grad_())
    with pytest.raises(UsageError, match="the parameter is used outside the forward of its module"):
        out.sum().backward()
    model.set_unshard_in_backward(True)
    model(random_input(0, 4, DIM).requires_grad_()).sum().backward()


@on_ranks(1)
def test_hooks_on_saved_tensors_around_the_module_get_what_it_saves() -> None:
    packed: list[torch.Tensor] = []
    model: Any = fully_shard(Embedder().embed)
    model.set_unshard_in_backward(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        out = model(tokens_of(0))
    out.sum().backward()
    assert len(packed) == 1


# -- storage, groups


@on_ranks(2, keeps=[True, False])
def test_kept_storage_stays_at_its_address_until_it_is_no_longer_kept(keeps: bool) -> None:
    model = sharded()
    model.set_keep_unsharded_storage(keeps)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, others = set(), []
    model.blocks[1].register_forward_pre_hook(lambda module, _: seen.add(module.up.weight.data_ptr()))
    flats = [flat for handle in root_of(model).handles for flat in handle.buffers]
    plan_bytes = sum(
        buffer.buffer_bytes for handle in fully_shard.state(model).plan.handles for buffer in handle.buffers
    )
    for seed in range(3):
        loss(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert unsharded_bytes(model) == (plan_bytes if keeps else 0)
        # In the place of what was freed.
        others += [torch.empty(flat.plan.layout.numel) for flat in flats]
    model.set_keep_unsharded_storage(False)
    loss(model, 3).backward()
    assert unsharded_bytes(model) == 0 and (not keeps or len(seen) == 1)


# -- the last backward


@pytest.mark.parametrize(("lasts", "count"), [([True, True, True], 3), ([False, False, True], 1)])
@on_ranks(1)  # Threads would share the class that is counted. One rank sends nothing, but it would.
def test_the_ranks_talk_once_for_all_backwards_up_to_the_last(lasts: list[bool], count: int) -> None:
    model = sharded()
    loss(model, 0).backward()
    with mock.patch.object(Agreement, "begin", autospec=True, side_effect=Agreement.begin) as begin:
        for seed, is_last in enumerate(lasts):
            model.set_is_last_backward(is_last)
            loss(model, seed).backward()
    assert begin.call_count == count


class Sometimes(nn.Module):
    """Uses one of its layers when told."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.first = (nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: torch.Tensor, is_first: bool) -> torch.Tensor:
        x = self.always(x)
        return self.first(x) if is_first else x


@on_ranks(3)
def test_what_only_one_rank_used_before_a_last_backward_without_reduction_is_not_lost() -> None:
    def loss_once(model: nn.Module, number: int, rank: int) -> torch.Tensor:
        return model(random_input(10 * number + rank, 2, DIM), number == rank == 0).square().mean()

    twins = Twins(Sometimes, fully_shard, loss=loss_once)
    for number, (is_last, syncs) in enumerate([(False, True), (True, False), (True, True)]):
        twins.model.set_is_last_backward(is_last)
        twins.model.set_requires_gradient_sync(syncs)
        twins.backward(number)
    twins.check_gradients(2e-6)


@on_ranks(2)
def test_a_hook_on_a_gradient_runs_once_on_the_sum_of_backwards_up_to_the_last() -> None:
    model = sharded()
    runs: list[int] = []
    model.inp.weight.register_hook(lambda grad: runs.append(1) or grad)
    for seed, is_last in enumerate([False, False, True]):
        model.set_is_last_backward(is_last)
        loss(model, seed).backward()
        assert len(runs) == is_last
    check_gradients(model, [0, 1, 2])


@on_ranks(2, call=[copy.deepcopy, unannotate, FSDPModule.zero_grad])
def test_models_whose_gradients_are_under_way_are_neither_copied_nor_unannotated_nor_zeroed(
    call: Callable[[Any], object],
) -> None:
    model = sharded()
    loss(model, 0)
    model.blocks[0].set_is_last_backward(False)  # of the whole tree
    loss(model, 0).backward()
    with pytest.raises(UsageError) as caught:
        call(model)
    assert "finalize_backward()" in str(caught.value)
    model.finalize_backward()
    check_gradients(model)
    call(model)


# -- finalize_backward


@on_ranks(way=["at once", "asynchronous", "one reduction", "one waits"], world_size=[2, 1, 3])
def test_gradients_are_those_of_one_process_after_finalize_backward(way: str) -> None:
    model = sharded()
    model.finalize_backward()  # nothing has run
    model.set_manual_backward_finalization(True)
    model.set_is_last_backward(True)  # does not matter
    counting = CountingTransport.install(root_of(model))
    seeds = [0, 1]
    if way == "one reduction":
        model.set_requires_gradient_sync(False)
    for seed in seeds:
        loss(model, seed).backward()
        assert way == "one reduction" or model.inp.weight.grad is None or seed
        if way == "one waits":
            model.set_requires_gradient_sync(False)
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=way == "asynchronous")
    if way == "asynchronous":
        assert isinstance(handle, GradientReductionHandle)
        for again in (lambda: loss(model, 0), lambda: model.finalize_backward()):
            with pytest.raises(UsageError, match="gradients are still being reduced"):
                again()
        handle.wait()
        handle.wait()
    assert counting.counts()["reduce_scatter"] == HANDLES * (1 if way == "one reduction" else 2)
    check_gradients(model, seeds)
    model.finalize_backward()  # nothing waits
    check_gradients(model, seeds)
    assert unsharded_bytes(model) == 0


@on_ranks(1, where=["begin", "finish"])
def test_the_step_after_an_end_that_was_cut_short_is_right(where: str) -> None:
    model = sharded()
    model.set_manual_backward_finalization(True)
    with no_sync(model):
        loss(model, 8).backward()
    loss(model, 9).backward()
    model.set_requires_gradient_sync(True)
    with mock.patch.object(Agreement, where, side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        model.finalize_backward()
    model.zero_grad()
    loss(model, 0).backward()
    model.finalize_backward()
    check_gradients(model)


@on_ranks(2)
def test_finalize_backward_reduces_what_no_sync_kept_and_users_did_not_drop() -> None:
    model = sharded()
    model.set_manual_backward_finalization(True)
    with no_sync(model):
        loss(model, 0).backward()
        model.zero_grad()
        loss(model, 1).backward()
    model.finalize_backward()
    check_gradients(model, [1])


@on_ranks(2)
def test_the_mode_changes_only_between_complete_steps() -> None:
    model = sharded()

    def assert_refused(call: Callable[[], object], text: str) -> None:
        with pytest.raises(UsageError, match=text):
            call()

    def change() -> None:
        assert_refused(
            lambda: model.set_manual_backward_finalization(False),
            "set_manual_backward_finalization between a backward and its end",
        )

    model.set_manual_backward_finalization(True)
    out = loss(model, 0)
    inside: list[int] = []
    out.register_hook(lambda grad: inside.append(1) or change())
    out.register_hook(lambda grad: assert_refused(model.finalize_backward, "finalize_backward inside a backward"))
    out.backward()
    assert inside
    change()
    model.set_manual_backward_finalization(True)  # no change
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    loss(model, 1).backward()
    check_gradients(model, [0, 1])


# -- reset_iter_state


class BrokenError(Exception):
    pass


def raising(*_: Any) -> None:
    raise BrokenError


def backward_that_raises(model: nn.Module) -> None:
    hook = model.blocks[0].register_forward_hook(lambda module, args, out: out.register_hook(raising) and None)
    out = loss(model, 9)
    hook.remove()
    out.backward()


@on_ranks(2, what=["nothing", "forward", "backward", "no_sync", "not the last", "finalizing"])
def test_a_step_that_was_cut_short_leaves_nothing_after_a_reset(what: str) -> None:
    model = sharded()
    if what == "forward":
        hook = model.blocks[1].register_forward_hook(raising)
        with pytest.raises(BrokenError):
            loss(model, 9)
        hook.remove()
    elif what == "backward":
        with pytest.raises(BrokenError):
            backward_that_raises(model)
    elif what == "no_sync":
        with no_sync(model):
            loss(model, 9).backward()
    elif what == "not the last":
        model.set_is_last_backward(False)
        loss(model, 9).backward()
        model.set_is_last_backward(True)
    elif what == "finalizing":
        model.set_manual_backward_finalization(True)
        loss(model, 9).backward()
        handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    if what == "finalizing":
        with pytest.raises(UsageError, match="dropped by reset_iter_state"):
            handle.wait()
        model.set_manual_backward_finalization(False)
    assert unsharded_bytes(model) == 0
    model.zero_grad()
    loss(model, 0).backward()
    check_gradients(model)


@on_ranks(2, mode=["by hand", "is_last"], before=["nothing", "a backward", "no_sync"])
def test_a_backward_that_was_stopped_is_not_finalized(mode: str, before: str) -> None:
    model = sharded()
    model.set_manual_backward_finalization(mode == "by hand")
    model.set_is_last_backward(False)
    if before != "nothing":
        with no_sync(model) if before == "no_sync" else nullcontext():
            loss(model, 8).backward()
    with pytest.raises(BrokenError):
        backward_that_raises(model)
    for is_async in (False, True):
        with pytest.raises(UsageError, match="after a backward that an exception stopped") as caught:
            model.finalize_backward(async_op=is_async)
    assert "reset_iter_state()" in str(caught.value)
    model.reset_iter_state()
    model.zero_grad()
    loss(model, 0).backward()
    model.finalize_backward()
    check_gradients(model)


# -- streams


def test_gathers_wait_for_the_event_of_the_optimizer_and_for_readers_of_freed_memory() -> None:
    device, event, handle = mock.MagicMock(), object(), mock.Mock(rests_elsewhere=False)
    streams = DeviceStreams(device)
    waits = device.Stream.return_value.wait_event
    streams.shards_written_at(event)
    streams.begin_unshard(handle)
    waits.assert_called_once_with(event)
    streams.resharded()
    streams.shards_written_at(event)
    for _ in range(2):  # the second one waits for nothing
        streams.begin_unshard(handle)
    assert len(waits.mock_calls) == 3 and waits.mock_calls[-1] == mock.call(event)


@on_ranks(2)
def test_on_the_cpu_sharing_streams_changes_nothing() -> None:
    models = [sharded(), sharded()]
    loss(models[0], 0).backward()
    models[0].zero_grad()
    share_comm_ctx(models)
    share_comm_ctx([])
    for model in models:
        assert root_of(model).scheduler._stream_to_name == {}
        loss(model, 0).backward()
        check_gradients(model)
    models[0].set_is_last_backward(False)
    loss(models[0], 0).backward()
    with pytest.raises(UsageError, match="streams cannot change within a step"):
        share_comm_ctx(models)


@on_ranks(2, run=run_ranks)
def test_a_root_that_goes_over_to_other_streams_between_steps_stays_in_order() -> None:
    recorder = Recorder()
    model = sharded()
    root = root_of(model)
    put_on_device(root, recorder)
    with recorder:
        loss(model, 0).backward()
        root.scheduler.use_streams(DeviceStreams(recorder))
        loss(model, 1).backward()
    check_gradients(model, [0, 1])
    assert list(map(str, recorder.violations)) == []


# -- what is refused


# Arguments that are of the wrong kind: test_arguments.py.
REFUSED: dict[str, tuple[Callable[[Any], object], type[Exception], str]] = {
    "all-reduce": (lambda m: m.set_requires_all_reduce(False), ConfigError, "of a 1-D mesh need none"),
    "memory": (lambda m: m.set_symm_mem_for_comm(), ConfigError, "torch's memory"),
    "async op": (lambda m: m._set_unshard_async_op(3), ConfigError, "stream of their own"),
    "no buffers": (lambda m: m.set_reduce_scatter_max_input_buffers(0), ConfigError, "is 0"),
    "part: mode": (lambda m: m.blocks[0].set_manual_backward_finalization(True), UsageError, "for the root"),
    "part: end": (lambda m: m.blocks[0].finalize_backward(), UsageError, "for the root"),
    "part: reset": (lambda m: m.blocks[0].reset_iter_state(), UsageError, "for the root"),
    "part: event": (lambda m: m.blocks[0].set_post_optim_event(None), UsageError, "for the root"),
    "part: streams": (lambda m: share_comm_ctx([m.blocks[0]]), UsageError, "for the root"),
    "prefetch": (lambda m: m.set_modules_to_forward_prefetch([m.inp]), ConfigError, "got Linear, which is not fully"),
}


def options_of(handle: Handle) -> dict[str, Any]:
    held = dict(vars(handle))
    return held | {"settings": dataclasses.replace(handle.settings)}


@on_ranks(1, name=REFUSED)
def test_what_cannot_be_is_an_error_that_says_so_and_changes_nothing(name: str) -> None:
    model = sharded()
    call, kind, text = REFUSED[name]
    before = [options_of(handle) for handle in root_of(model).handles]
    with pytest.raises(kind, match=re.escape(text)) as caught:
        call(model)
    assert caught.value.fix and re.search(r"rank 0(, module MLP|, module .*\(MLPBlock\))?$", caught.value.at)
    assert [options_of(handle) for handle in root_of(model).handles] == before
    loss(model, 0).backward()
    check_gradients(model)


@on_ranks(2)
def test_settings_of_what_was_the_root_are_not_dropped_in_silence() -> None:
    model: Any = make_model("mlp")
    fully_shard(model.blocks[1]).set_is_last_backward(False)
    fully_shard(model)
    with pytest.raises(UsageError, match="the root's settings were made on a module that is now") as caught:
        loss(model, 0)
    assert "module 'blocks.1'" in str(caught.value)


# -- copies and unannotate


def set_all(model: Any) -> None:
    model.set_reshard_after_backward(False)
    model.blocks[1].set_unshard_in_backward(False)
    model.set_reduce_scatter_unused_params(True)
    model.set_reduce_scatter_max_input_buffers(5)
    model.set_keep_unsharded_storage(True)
    model.set_is_last_backward(False)
    model.set_manual_backward_finalization(True)


HELD = (
    *("reshard_after_backward", "unshard_in_backward", "fills_unused", "gradient_buffers"),
    "keeps_storage",
)


def settings_of(model: nn.Module) -> list[Any]:
    root = root_of(model)
    held = [tuple(getattr(handle.settings, name) for name in HELD) for handle in root.handles]
    settings = root.scheduler.step.settings
    return [*held, settings.is_last_backward, settings.finalizes_by_hand]


@on_ranks(2)
def test_a_copy_has_the_settings_on_its_own_and_unannotate_drops_them() -> None:
    model = sharded()
    usual = settings_of(model)
    set_all(model)
    ours = settings_of(model)
    assert all(one != other for one, other in zip(ours, usual, strict=True))
    twin = copy.deepcopy(model)
    assert settings_of(twin) == ours
    twin.set_is_last_backward(True)
    twin.set_keep_unsharded_storage(False)
    assert settings_of(model) == ours
    unannotate(model)
    with pytest.raises(AttributeError):
        model.set_is_last_backward(True)
    fully_shard(model, policy={MLPBlock})
    assert settings_of(model) == usual


@on_ranks(1)
def test_a_setter_of_what_is_no_longer_annotated_says_so() -> None:
    model = sharded()
    setter = model.set_is_last_backward
    unannotate(model)
    with pytest.raises(UsageError, match="no longer annotated"):
        setter(True)


# -- the page


def kinds_of(function: Any) -> list[tuple[str, Any, Any]]:
    return [(one.name, one.kind, one.default) for one in inspect.signature(function).parameters.values()]


def test_methods_take_what_those_of_torch_take() -> None:
    theirs = {name for name, value in vars(torch_fsdp.FSDPModule).items() if callable(value) and name[0] != "_"}
    assert theirs <= set(METHODS)
    kept = [name for name in METHODS if name not in REFUSED_SETTERS]
    shared = [name for name in kept if hasattr(torch_fsdp.FSDPModule, name) and hasattr(FSDPModule, name)]
    assert len(shared) >= 15  # torch 2.11 has so many
    differing = [
        name for name in shared if kinds_of(getattr(FSDPModule, name)) != kinds_of(getattr(torch_fsdp.FSDPModule, name))
    ]
    assert differing == []
    for name in FUNCTIONS:
        assert kinds_of(getattr(composable, name)) == kinds_of(getattr(torch_fsdp, name))


def test_the_page_has_every_method_as_it_is() -> None:
    page = PAGE.read_text()
    # To write it anew: python -m tools.fsdp_methods
    assert with_list(page) == page

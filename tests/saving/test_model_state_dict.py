"""torch.distributed.checkpoint's own functions on annotated models, from one world size to another."""

import copy
import pickle
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from composable import (
    ConfigError,
    RaggedDTensor,
    UsageError,
    fallback_counts,
    full_state_dict,
    fully_shard,
    save_checkpoint,
    strict_mode,
)
from tests.models import BLOCK_CLASSES, make_model
from tests.parity import full
from tests.ragged_pairs import from_full
from tests.saving.test_full_state import Odd, local_values, odd, unfit_state
from tests.world import on_ranks, run_threads

# Tied, with frozen parts, with replicated and ignored parts, of several dtypes.
NAMES = ["gpt_tied", "frozen_mixed", "odd", "mixed_dtypes"]


def plain_model(name: str, seed: int) -> nn.Module:
    return Odd(seed) if name == "odd" else make_model(name, seed)


def annotated_model(name: str, seed: int) -> nn.Module:
    return odd(seed) if name == "odd" else fully_shard(make_model(name, seed), policy=set(BLOCK_CLASSES))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return an AdamW with two groups."""
    params = [param for param in model.parameters() if param.requires_grad]
    wide = [param for param in params if param.dim() > 1]
    others = [param for param in params if param.dim() <= 1]
    return torch.optim.AdamW([{"params": wide}, {"params": others, "weight_decay": 0.0}], lr=0.1, foreach=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Step on gradients that depend on the step alone, so that every way of training gives the same bits."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for param in model.parameters():
            if param.requires_grad:
                grad = torch.randn(param.shape, generator=generator).to(param.dtype)
                param.grad = from_full(grad, param._spec) if isinstance(param, RaggedDTensor) else grad
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        optimizer.step()


def trained(name: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a plain model after ``steps`` steps in one process."""
    model = plain_model(name, 1)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(steps))
    return model, optimizer


def assert_trained(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, steps: int) -> None:
    """Compare with one process, to the bit: parameters, optimizer state, groups."""
    expected, expected_optimizer = trained(name, steps)
    for (fqn, param), (_, want) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert torch.equal(full(param), want), (name, fqn)
        for key, value in expected_optimizer.state[want].items() if want.requires_grad else ():
            assert torch.equal(full(optimizer.state[param][key]), value), (name, fqn, key)
    for group, want in zip(optimizer.param_groups, expected_optimizer.param_groups, strict=True):
        # torch turns a tuple into a list on the way through a full state dict.
        found = {key: tuple(value) if isinstance(value, list) else value for key, value in group.items()}
        wrong = {
            key: (found.get(key), value) for key, value in want.items() if key != "params" and found.get(key) != value
        }
        assert found.keys() == want.keys() and not wrong, (name, wrong)


def save(folder: str, is_plain: bool) -> None:
    for name in NAMES:
        model = plain_model(name, 1) if is_plain else annotated_model(name, 1)
        optimizer = make_optimizer(model)
        train(model, optimizer, range(2))
        states, optimizer_states = get_state_dict(model, optimizer)
        with strict_mode():
            dcp.save({"model": states, "optimizer": optimizer_states}, checkpoint_id=f"{folder}/{name}")
        on_host = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(model, options=on_host)
        whole_optimizer = get_optimizer_state_dict(model, optimizer, options=on_host)
        if dist.get_rank() == 0:
            expected, expected_optimizer = trained(name, 2)
            wanted = get_optimizer_state_dict(expected, expected_optimizer)
            assert_equal(whole, expected.state_dict())
            assert_equal(whole_optimizer, wanted)
            torch.save({"model": whole, "optimizer": whole_optimizer}, f"{folder}/{name}.pt")
        else:
            assert not whole
        # Without the offload every rank has the whole.
        assert_equal(
            get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)),
            trained(name, 2)[0].state_dict(),
        )


def assert_equal(found: Any, expected: Any, path: str = "") -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected) or found.keys() == expected.keys(), path
        for key, value in expected.items():
            assert_equal(found[key], value, f"{path}.{key}")
    elif isinstance(expected, torch.Tensor):
        assert type(found) is torch.Tensor and torch.equal(found, expected), path
    elif isinstance(expected, list) and expected and isinstance(expected[0], dict):
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            assert_equal(ours, theirs, f"{path}[{index}]")
    else:
        assert found == expected, path


def load_dcp(folder: str, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    states, optimizer_states = get_state_dict(model, optimizer)
    state = {"model": states, "optimizer": optimizer_states}
    dcp.load(state, checkpoint_id=f"{folder}/{name}")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def load_dcp_flat(folder: str, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    # What was saved nested is read flat, by the same names.
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    source = annotated_model(name, 1)
    source_optimizer = make_optimizer(source)
    load_dcp(folder, name, source, source_optimizer)
    flat = get_optimizer_state_dict(source, source_optimizer, options=options)
    assert all(not isinstance(value, (dict, list)) for value in flat.values())
    set_optimizer_state_dict(model, optimizer, flat, options=options)
    set_model_state_dict(model, get_model_state_dict(source))


def load_full(broadcast: bool) -> Callable[[str, str, nn.Module, torch.optim.Optimizer], None]:
    def load(folder: str, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        has_values = not broadcast or dist.get_rank() == 0
        state = torch.load(f"{folder}/{name}.pt", weights_only=True) if has_values else {"model": {}, "optimizer": {}}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, state["model"], options=options)
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)

    return load


WAYS = {"dcp": load_dcp, "dcp_flat": load_dcp_flat, "full": load_full(False), "broadcast": load_full(True)}


def load(folder: str) -> None:
    fallback_counts(reset=True)
    for name, way in product(NAMES, WAYS):
        model = annotated_model(name, 2)
        optimizer = make_optimizer(model)
        params = list(model.parameters())
        WAYS[way](folder, name, model, optimizer)
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert_trained(model, optimizer, name, 2)
        train(model, optimizer, range(2, 3))
        assert_trained(model, optimizer, name, 3)
    assert not fallback_counts()


def load_into_plain(folder: str) -> None:
    for name in NAMES:
        model = plain_model(name, 2)
        optimizer = make_optimizer(model)
        load_dcp(folder, name, model, optimizer)
        assert_trained(model, optimizer, name, 2)
        state = torch.load(f"{folder}/{name}.pt", weights_only=True)
        plain = plain_model(name, 3)
        plain.load_state_dict(state["model"])
        optimizer = make_optimizer(plain)
        set_optimizer_state_dict(plain, optimizer, state["optimizer"])
        assert_trained(plain, optimizer, name, 2)


@pytest.mark.parametrize(("saved_at", "loaded_at", "is_plain"), [(1, 3, True), (2, 1, False), (3, 2, False)])
def test_a_run_goes_on_to_the_bit_at_another_world_size(
    tmp_path: Path, saved_at: int, loaded_at: int, is_plain: bool
) -> None:
    run_threads(save, saved_at, str(tmp_path), is_plain)
    run_threads(load, loaded_at, str(tmp_path))
    run_threads(load_into_plain, 1, str(tmp_path))


@on_ranks(2)
def test_options_mean_what_they_mean_for_a_plain_model() -> None:
    model = annotated_model("frozen_mixed", 1)
    plain = plain_model("frozen_mixed", 1)
    # Some modules only, with and without their prefix.
    for prefixes in (True, False):
        ours = StateDictOptions(full_state_dict=True, keep_submodule_prefixes=prefixes)
        theirs = StateDictOptions(keep_submodule_prefixes=prefixes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, on submodules
            found = get_model_state_dict(model, submodules={model.trainable}, options=ours)
            wanted = get_model_state_dict(plain, submodules={plain.trainable}, options=theirs)
        assert wanted
        assert_equal(found, wanted)
    # Without the frozen parameters.
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True))
    assert 0 < len(found) < len(plain.state_dict())
    assert_equal(found, get_model_state_dict(plain, options=StateDictOptions(ignore_frozen_params=True)))
    # What was left out may be left out again.
    part = get_model_state_dict(plain_model("frozen_mixed", 2), options=StateDictOptions(ignore_frozen_params=True))
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, dict(part), options=options)
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    frozen = plain.state_dict()
    assert_equal(found, {key: part.get(key, value) for key, value in frozen.items()})
    assert all(value.device.type == "cpu" for value in found.values())


@on_ranks(2)
def test_a_model_state_that_does_not_fit_is_one_error_on_every_rank() -> None:
    model = annotated_model("mlp", 1)
    before = local_values(model)
    state = unfit_state(plain_model("mlp", 2))
    state["out.bias"] = torch.ones(9)
    parts = (
        'Missing key(s) in state_dict: "inp.bias", "blocks.1.up.weight"',
        'Unexpected key(s) in state_dict: "stranger"',
        "has shape [3, 5]",
        "out.bias has shape [9]",
    )
    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        given = dict(state) if dist.get_rank() == 0 or not broadcast else {}
        with pytest.raises(ConfigError) as caught:
            set_model_state_dict(model, given, options=options)
        assert [part for part in parts if part not in str(caught.value)] == []
    # Sharded tensors, and full ones given as such.
    with pytest.raises(ConfigError) as caught:
        set_model_state_dict(model, dict(state))
    assert [part for part in parts if part not in str(caught.value)] == []
    assert all(torch.equal(a, b) for a, b in zip(before, local_values(model), strict=True))
    # An optimizer state of another shape would be cut somewhere else.
    optimizer = make_optimizer(model)
    train(model, optimizer, range(1))
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    whole["state"]["inp.weight"]["exp_avg"] = torch.ones(99, 8)  # type: ignore[index]
    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        with pytest.raises(ConfigError, match="99"):
            set_optimizer_state_dict(model, optimizer, copy.deepcopy(whole), options=options)


def save_what_one_process_cannot_load(folder: str) -> None:
    model = annotated_model("gpt_tied", 1)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    # In whatever it is wrapped, and in every format of torch.
    for value in (model.state_dict(), {"a": [model.state_dict()]}, optimizer.state_dict(), list(model.parameters())):
        for zipped in (True, False):
            with pytest.raises(UsageError, match=r"(?s)cannot be loaded in one process.*full_state_dict\(model\)"):
                torch.save(value, f"{folder}/{dist.get_rank()}.pt", _use_new_zipfile_serialization=zipped)
    # What does not end in such a file goes on as before.
    state, pieces = model.state_dict(), [local.clone() for local in local_values(model)]
    for found in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        assert all(torch.equal(found[fqn].to_local(), value.to_local()) for fqn, value in state.items())
    dcp.save({"model": state}, checkpoint_id=f"{folder}/dcp")
    save_checkpoint(f"{folder}/own", 2, model, optimizer)
    save_checkpoint(f"{folder}/own", 3, model, optimizer, asynchronous=True).wait()
    assert all(torch.equal(a, b) for a, b in zip(pieces, local_values(model), strict=True))
    whole = full_state_dict(model)
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}/whole.pt")
        assert_equal(torch.load(f"{folder}/whole.pt", weights_only=True), trained("gpt_tied", 2)[0].state_dict())
    # Rank 0's piece would be given to everybody.
    with pytest.raises(ConfigError, match=r"extra is more than data: torch.save would write this rank's piece"):
        save_checkpoint(f"{folder}/own", 4, model, extra={"ema": next(iter(state.values()))})


def test_torch_save_of_pieces_is_an_error_that_says_how_to_save(tmp_path: Path) -> None:
    run_threads(save_what_one_process_cannot_load, 2, str(tmp_path))

"""Parts of a model picked by name, out of shards and into them, against the plain model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from composable import (
    DesyncError,
    full_state_dict,
    iter_full_params,
    load_full_params,
    load_full_state_dict,
    load_safetensors,
    save_safetensors,
)
from tests.counting import counting_ranks
from tests.models import make_model
from tests.saving.test_full_state import sharded
from tests.world import run_ranks, run_threads, told


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """Return what has to be equal, NaNs too."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.tolist())


def is_adapter(fqn: str) -> bool:
    return fqn.endswith((".a", ".b"))


def keep_adapters(folder: str) -> None:
    rank = dist.get_rank()
    plain = make_model("frozen_mixed", 1)
    wanted = {fqn: value for fqn, value in plain.state_dict().items() if is_adapter(fqn)}
    model = sharded("frozen_mixed", 1)
    for names in (is_adapter, set(wanted), list(wanted), dict(wanted)):
        assert {fqn: bits(value) for fqn, value in iter_full_params(model, names=names)} == {  # type: ignore[arg-type]
            fqn: bits(value) for fqn, value in wanted.items()
        }
        found = full_state_dict(model, names=names)
        assert list(found) == (list(wanted) if rank == 0 else [])
        assert all(bits(found[fqn]) == bits(wanted[fqn]) for fqn in found)
    path = f"{folder}/adapter_model.safetensors"
    save_safetensors(model, path, names=is_adapter)
    if rank == 0:
        read = load_file(path)
        assert {fqn: bits(value) for fqn, value in read.items()} == {fqn: bits(wanted[fqn]) for fqn in wanted}
    # Into another base, by each way: adapters come, the base stays.
    other = make_model("frozen_mixed", 2).state_dict()
    pairs = list(wanted.items())
    ways: list[Callable[[nn.Module], Any]] = [
        lambda into: load_safetensors(into, path, names=is_adapter),
        lambda into: load_full_state_dict(into, wanted, names=is_adapter),
        lambda into: load_full_params(into, pairs, names=is_adapter),
    ]
    for load in ways:
        into = sharded("frozen_mixed", 2)
        assert load(into) == ([], [])
        found = full_state_dict(into)
        assert all(bits(value) == bits((wanted if fqn in wanted else other)[fqn]) for fqn, value in found.items())


def test_adapters_alone_are_saved_and_loaded(tmp_path: Path) -> None:
    run_threads(keep_adapters, 3, str(tmp_path))


def refuse_unfit_adapters(folder: str) -> None:
    model = sharded("frozen_mixed", 1)
    before = {fqn: bits(value) for fqn, value in iter_full_params(model)}  # type: ignore[arg-type]
    path, whole = f"{folder}/first.safetensors", f"{folder}/whole.safetensors"
    save_safetensors(model, path, names=["lora.0.a", "lora.1.a"])
    save_safetensors(model, whole)
    for said in told(lambda: load_safetensors(model, path, names=is_adapter)):
        assert 'Missing key(s) in state_dict: "lora.0.b", "lora.1.b"' in said, said
    for said in told(lambda: load_safetensors(model, path, names=["lora.1.a"])):
        assert 'Unexpected key(s) in state_dict: "lora.0.a"' in said and "Missing" not in said, said
    for said in told(lambda: load_full_params(model, [("stranger", torch.ones(1))], names=is_adapter)):
        assert 'Unexpected key(s) in state_dict: "stranger"' in said, said
    assert {fqn: bits(value) for fqn, value in iter_full_params(model)} == before  # type: ignore[arg-type]
    # Adapters out of a file that has everything.
    into = sharded("frozen_mixed", 2)
    found = load_safetensors(into, whole, names=["lora.0.a"], strict=False)
    assert found.missing_keys == [] and "lora.0.b" in found.unexpected_keys
    after = {fqn: bits(value) for fqn, value in iter_full_params(into)}  # type: ignore[arg-type]
    plain = dict(make_model("frozen_mixed", 2).named_parameters())
    assert [fqn for fqn in after if after[fqn] != bits(plain[fqn])] == ["lora.0.a"]
    assert after["lora.0.a"] == before["lora.0.a"]


def test_adapters_that_do_not_fit_are_errors_with_their_names(tmp_path: Path) -> None:
    run_threads(refuse_unfit_adapters, 2, str(tmp_path))


def differ(folder: str) -> None:
    rank = dist.get_rank()
    model = sharded("mlp", 1)

    def by_rank(fqn: str) -> bool:
        return fqn == ("inp.weight" if rank == 0 else "inp.bias")

    calls: list[Callable[..., Any]] = [
        lambda names: iter_full_params(model, names=names),
        lambda names: full_state_dict(model, names=names),
        lambda names: save_safetensors(model, f"{folder}/weights", names=names),
        lambda names: load_full_state_dict(model, {}, names=names),
        lambda names: load_full_params(model, [], names=names),
    ]
    for call in calls:
        with counting_ranks() as counts:
            for said in told(partial(call, by_rank)):
                assert said.startswith("DesyncError") and "inp.weight: RaggedDTensor [8, 8] torch.float32" in said
                assert "not picked" in said
            assert counts["messages"] == 0

        def broken(fqn: str) -> bool:
            if rank == 0:
                raise LookupError(f"no idea of {fqn}")
            return True

        with pytest.raises(LookupError if rank == 0 else DesyncError, match=r"no idea of inp\.weight"):
            call(broken)
        for said in told(partial(call, ["inp.weight", "stranger"] if rank == 0 else ["inp.weight"])):
            assert said.startswith("ConfigError: names is or holds something") and "'stranger'" in said, said
        for said in told(partial(call, lambda fqn: False)):
            assert said.startswith("ConfigError: names picks nothing of the model"), said
        for wrong in ("stranger", 3, [3]):
            for said in told(partial(call, wrong)):
                assert said.startswith("ConfigError: names is or holds "), said
    assert not Path(folder, "weights").exists()


def test_names_that_differ_between_ranks_are_an_error_before_anything_moves(tmp_path: Path) -> None:
    run_ranks(differ, 2, str(tmp_path))

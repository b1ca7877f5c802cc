"""Scripts written for torch's wrapper train alike with `replicate` in its place; examples/from_ddp/README.md says what changed."""

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.world import on_ranks, run_ranks
from tools.from_ddp import PAGE, SCRIPTS, page, read

PREFIXES = ("module.", "_orig_mod.")


def run_script(source: str, name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses of a script and its parameters, by names without wrappers."""
    random.seed(0)
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), names)
    params = {}
    for fqn, param in names["model"].named_parameters():
        for prefix in PREFIXES:
            fqn = fqn.replace(prefix, "")
        params[fqn] = param.detach().clone()
    return names["losses"], params


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
@on_ranks(2, run=run_ranks)
def test_a_script_of_the_wrapper_trains_alike_with_replicate(path: Path) -> None:
    script = read(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its wrapper and of checkpoints
        losses, params = run_script(script.there, path.name)
    our_losses, ours = run_script(script.here, path.name)
    assert len(losses) >= 3
    assert our_losses == losses
    assert list(ours) == list(params)
    torch.testing.assert_close(ours, params, rtol=0, atol=0)


def test_there_are_twenty_scripts_and_each_needs_the_wrapper() -> None:
    assert len(SCRIPTS) >= 20
    assert [path.name for path in SCRIPTS if "DDP(" not in read(path).there or "DDP(" in read(path).here] == []


def test_the_page_is_what_the_scripts_say() -> None:
    # To write it anew: python -m tools.from_ddp
    assert PAGE.read_text() == page()

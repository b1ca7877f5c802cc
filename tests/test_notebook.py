"""The notebook's cells run in a plain process, and print what the notebook shows."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from composable import UsageError, fully_shard, plan, replicate

NOTEBOOK = Path(__file__).parent.parent / "examples" / "notebook.ipynb"


def test_the_cells_run_and_print_what_is_shown() -> None:
    cells = [one for one in json.loads(NOTEBOOK.read_text())["cells"] if one["cell_type"] == "code"]
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = []
    for cell in cells:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile("".join(cell["source"]), "notebook.ipynb", "exec"), names)
        printed.append(out.getvalue())
    shown = ["".join("".join(one["text"]) for one in cell["outputs"] if one.get("name") == "stdout") for cell in cells]
    assert printed == shown and [cell["execution_count"] for cell in cells] == [1, 2, 3, 4, 5, 6]
    # The plan's picture is always the same, a timeline has other times.
    pictures = ["".join(one["data"]["image/svg+xml"]) for cell in cells for one in cell["outputs"] if "data" in one]
    assert pictures[0] == plan(names["make_model"](), world_size=8, policy={nn.Linear}).draw()
    assert len(pictures) == 2 and "<svg" in pictures[1]


@pytest.mark.parametrize("annotate", [fully_shard, replicate])
def test_the_call_that_the_error_names_makes_a_plain_process_one_rank(annotate: Callable[[nn.Module], object]) -> None:
    with pytest.raises(UsageError) as caught:
        annotate(nn.Linear(2, 2))
    call = str(caught.value.fix).rpartition("for this process alone ")[2]
    assert call.startswith("torch.distributed.init_process_group(store=")
    eval(call, {"torch": torch})
    try:
        model = nn.Linear(2, 2)
        annotate(model)
        model(torch.ones(1, 2)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())
    finally:
        dist.destroy_process_group()

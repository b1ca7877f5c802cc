"""Every row of the table in ``docs/site/operations.md`` is proved, and the table says what came out."""

import functools
import shutil
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import optim

from tests.ragged_pairs import CUTS
from tests.world import run_ranks
from tools.ragged_matrix import CHEAP, PAGE, ROWS, Outcome, compile_step, prove, with_table

# Operations that must never gather, by the start of their names.
WITHOUT_GATHERS = [
    *("`SGD`", "`Adam`", "`AdamW`", "`Adagrad`", "`RMSprop`", "`NAdam`"),
    *("`SGD` (", "`Adam` (", "`AdamW` (", "`RMSprop` ("),
    *("torch's `clip_grad_norm_`, 2-norm", "`composable.clip_grad_norm_`"),
]
# The others, and 4 ranks, are for whoever writes the table.
WORLDS = [(2, "row"), (3, "element")]


@functools.cache
def proved(world_size: int, cut: str) -> dict[str, Outcome]:
    outcomes = run_ranks(prove, world_size, cut)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


@pytest.mark.parametrize(("world_size", "cut"), WORLDS)
def test_the_ranks_do_what_one_process_does(world_size: int, cut: str) -> None:
    outcomes = proved(world_size, cut)
    assert list(outcomes) == [row.name for row in ROWS if world_size in row.world_sizes]
    gathering = [name for name in outcomes if name.startswith(tuple(WITHOUT_GATHERS)) and outcomes[name].gathers]
    assert gathering == []


def test_the_table_in_the_docs_is_what_came_out() -> None:
    page = PAGE.read_text()
    found = {(size, cut): proved(size, cut) for size, cut in WORLDS}
    # To write it anew, from all world sizes: python -m tools.ragged_matrix
    assert with_table(page, found) == page


def test_the_rows_for_users_are_those_of_the_table() -> None:
    user_page = (PAGE.parents[1] / "ragged.md").read_text()
    section = user_page.partition("\n## What works\n")[2].partition("\n## ")[0]
    shown = [line.replace("](", "](../") for line in section.splitlines() if line.startswith("| ")]
    assert shown
    assert [line for line in shown if line not in PAGE.read_text().splitlines()] == []


def step_in_one_kernel(cut: str) -> None:
    # Without vectors and precompiled headers the compiler's first kernel costs a third.
    options = {"compile_threads": 1, "cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False}
    with torch._inductor.config.patch(options):
        compile_step(cut, optim.AdamW, {"lr": 0.1, "foreach": True}, "inductor")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_a_step_compiled_by_inductor_is_that_of_one_process() -> None:
    run_ranks(step_in_one_kernel, 2, "row")


def test_rules_stand_in_where_torch_skips_subclasses() -> None:
    script = f"""
        import torch, torch.distributed as dist
        import composable.dtensor.tensor as registration
        from composable.dtensor.gather import GatheredView
        from composable.dtensor.tensor import RaggedDTensor
        from tools.ragged_matrix import prove

        # What torch 2.11 does: its own C++ path takes the subclasses along.
        kept = [(cls, cls.__dict__["__torch_dispatch__"]) for cls in (RaggedDTensor, GatheredView)]
        for cls, _ in kept:
            del cls.__torch_dispatch__
        registration._dispatch_every_op({{cls: dispatch.__func__ for cls, dispatch in kept}})
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for cut in {CUTS}:
            found = prove(cut, {CHEAP})
            assert len(found) == {len(CHEAP)}
            assert found["`AdamW` (amsgrad, maximize): loop, foreach, fused"].gathers == 0
        dist.destroy_process_group()
        print("passed")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=PAGE.parents[2],
    )
    assert done.stdout.strip() == "passed", done.stderr

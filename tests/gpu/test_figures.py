"""The figures of a GPU, at toy sizes on the CPU: that every row comes, and what is computed from a trace."""

import math
import time
from collections import Counter

import pytest
import torch

from tools.gpu.figures import COLUMNS, ENGINES, Row, Work, exposed_columns, figures, table


def measured(until: float) -> list[Row]:
    rows: list[Row] = []
    figures(torch.device("cpu"), rows.append, until=until, is_toy=True)
    return rows


def test_every_figure_comes_and_stands_in_the_table() -> None:
    rows = measured(time.monotonic() + 600)
    assert [row for row in rows if row["kind"] in ("skipped", "error")] == []
    assert Counter(row["kind"] for row in rows) == {"device": 1, "matmul": 1, "llama": 12, "small": 10, "exposed": 2}
    assert {row.get("variant") for row in rows} == {None, "eager", "compiled", "checkpointed", "compiled, checkpointed"}
    for row in rows:
        for key, value in row.items():
            # One rank on the CPU sends nothing, and one thread does all.
            lowest = 0.0 if row["kind"] == "exposed" else 1e-12
            assert isinstance(value, str) or (isinstance(value, int | float) and lowest <= value < math.inf), (key, row)
    # The same training, by each engine.
    for kind, tolerance in (("llama", 0.01), ("small", 1e-5)):
        losses = [(row.get("layers"), row["loss"]) for row in rows if row["kind"] == kind]
        for layers in {layers for layers, _ in losses}:
            own = [loss for other, loss in losses if other == layers]
            torch.testing.assert_close(own, own[:1] * len(own), rtol=tolerance, atol=0.0)
    text = table(rows)
    assert text.startswith(f"CPU, torch {torch.__version__}, Python ")
    lines = [line for line in text.splitlines() if line.startswith("|")]
    kinds = ("llama", "small", "exposed")
    assert len(lines) == sum(2 + sum(row["kind"] == kind for row in rows) for kind in kinds)
    on_gpu = {"peak_gib", "rest_gib"}
    assert all(heading in text for kind in kinds for key, heading in COLUMNS[kind].items() if key not in on_gpu)
    assert all(engine in text for engine in ENGINES)


def test_nothing_begins_when_time_is_up() -> None:
    assert {str(row["kind"]) for row in measured(time.monotonic())} == {"device", "skipped"}


@pytest.mark.parametrize(("stop", "share"), [(30, 0.05), (45, 0.10), (60, 0.15)])
def test_communication_is_exposed_where_no_computation_runs(stop: float, share: float) -> None:
    # Beside the copy: computation with a gap from 40 to 50, and at the end a kernel of NCCL.
    compute = [Work(0, 40, 7, "gemm"), Work(50, 95, 7, "gemm"), Work(95, 100, 7, "ncclDevKernel")]
    columns = exposed_columns([*compute, Work(20, stop, 9, "Memcpy DtoD")])
    assert columns["step_ms"] == pytest.approx(0.1)
    assert columns["exposed_share"] == pytest.approx(share)
    assert columns["communication_ms"] == pytest.approx((stop - 20 + 5) / 1e3)

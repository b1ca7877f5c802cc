"""The GPU's command runs on the CPU at toy sizes, every part of it, and says what fails."""

import json
from pathlib import Path

import pytest
import torch

from tools.gpu.__main__ import PARTS, REPO, in_order, main, report_of
from tools.gpu.published import PAGES, results, with_section


def test_the_command_runs_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Minutes: more than it takes on a machine that is busy.
    assert main(["--device", "cpu", "--minutes", "60", "--out", str(tmp_path)]) == 0
    assert "Nothing failed." in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    last = [row for rows in results().values() for row in rows if row.get("result") == "wrong"]
    assert {row["part"] for row in rows} == set(in_order(last))
    assert {row["rule"] for row in rows if "rule" in row} == {
        "no wait of the host",
        "memory as planned",
        "a CUDA graph",
        "fragmentation",
    }
    kinds = {row["case"].partition(":")[0] for row in rows if row["part"] == "ranks" and "case" in row}
    assert {"options", "program"} <= kinds
    assert {row["kind"] for row in rows if "kind" in row} >= {"device", "matmul", "llama", "small", "exposed", "host"}
    (own,) = (row for row in rows if row.get("kind") == "host" and (row["engine"], row["layers"]) == ("fully_shard", 3))
    assert any(place.endswith(" post_forward") and calls >= 1 and us > 0 for place, calls, us in own["functions"])
    assert own["calls"]["aten::addmm"] == 1


def test_what_was_wrong_last_time_is_run_first() -> None:
    last = [{"part": "rules"}, {"part": "tests", "case": "tests/test_cuda.py::test_one"}, {"part": "rules"}]
    assert in_order(last)[:4] == ["host", "again", "rules", "tests"] and set(in_order(last)) == set(PARTS)
    assert "again" not in in_order([{"part": "figures"}])


def test_the_report_names_what_failed() -> None:
    rows = [
        {
            "part": "rules",
            "rule": "a CUDA graph",
            "case": "replicate",
            "result": "wrong",
            "text": "parameters have moved",
        },
        {"part": "ranks", "case": "options: defaults", "result": "right", "text": ""},
    ]
    report = report_of(rows)
    assert "1 failed" in report and "rules: a CUDA graph replicate" in report and "parameters have moved" in report
    assert "options: defaults" not in report


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(SystemExit, match="no CUDA device"):
        main(["--out", str(tmp_path)])


@pytest.mark.parametrize("page", PAGES)
def test_pages_say_what_the_results_say(page: str) -> None:
    text = (REPO / page).read_text()
    assert text == with_section(text, PAGES[page](results())), "run: python -m tools.gpu.published"


def test_without_results_pages_say_that_nothing_has_run() -> None:
    assert all(("ever run" in text({})) for text in PAGES.values())

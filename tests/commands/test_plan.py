"""``plan`` prints what ``fully_shard`` would do with a model that a function makes."""

import json
from pathlib import Path

import pytest
from torch import nn

from composable import plan
from composable.__main__ import main

HERE = "tests.commands.test_plan"


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 256) for _ in range(3)), nn.Linear(64, 8))


class Models:
    @staticmethod
    def large() -> nn.Module:
        return nn.Linear(10**6, 10**6)  # 4 TB, and nothing on the meta device


def not_a_model() -> int:
    return 3


def broken() -> nn.Module:
    raise ZeroDivisionError("in the function")


def test_the_plan_is_that_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", f"{HERE}:make_model", "--ranks", "8", "--policy-class", "TransformerEncoderLayer"]
    made = plan(make_model(), world_size=8, policy={nn.TransformerEncoderLayer})
    assert main(words) == 0
    text = capsys.readouterr().out
    heading = "Of a rank, with two states of an optimizer and without activations:"
    assert text.startswith(f"{made}\n{heading}\nelements          {made.numel:,}\nbytes at rest     ")
    assert text.endswith("\nbytes sent        not known without --per-host\n")
    assert main([*words, "--per-host", "4", "--strategy", "HYBRID_SHARD", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    hybrid = plan(
        make_model(),
        world_size=4,
        replicas=2,
        ranks_per_host=4,
        policy={nn.TransformerEncoderLayer},
        strategy="HYBRID_SHARD",
    )
    assert found["bytes at rest"] == hybrid.bytes_per_rank_at_rest()
    assert found["bytes sent"]["to other hosts"] == hybrid.expected_traffic().between_bytes > 0
    assert [one["modules"] for one in found["handles"]] == [list(one.module_fqns) for one in hybrid.handles]
    assert main([*words, "--per-host", "4"]) == 0
    assert "\nbytes sent        inside the host " in capsys.readouterr().out


def test_a_model_of_any_size_takes_no_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"{HERE}:Models.large", "--ranks", "4"]) == 0
    assert "elements          1,000,001,000,000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([f"{HERE}:nothing", "--ranks", "2"], f"{HERE}:nothing cannot be imported: AttributeError"),
        (["no_such_module:x", "--ranks", "2"], "no_such_module:x cannot be imported: ModuleNotFoundError"),
        ([HERE, "--ranks", "2"], f"{HERE} cannot be imported: AttributeError"),
        ([":make", "--ranks", "2"], ":make cannot be imported: ValueError"),
        ([f"{HERE}:not_a_model", "--ranks", "2"], "returned 3; fix: name a function that returns the model"),
        ([f"{HERE}:make_model", "--ranks", "0"], "world_size is 0"),
        ([f"{HERE}:make_model", "--ranks", "2", "--policy-class", "Block"], "no Block; fix: pass one of Dropout, "),
        ([f"{HERE}:make_model", "--ranks", "2", "--strategy", "ZERO"], "strategy is 'ZERO'"),
        ([f"{HERE}:make_model", "--ranks", "6", "--strategy", "HYBRID_SHARD"], "--per-host N, which divides --ranks"),
        ([f"{HERE}:make_model", "--ranks", "6", "--per-host", "4"], "ranks_per_host is 4, and there are 6 ranks"),
    ],
)
def test_what_cannot_be_planned_is_one_line(words: list[str], what: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 1
    out, err = capsys.readouterr()
    assert out == "" and what in err and err.count("\n") == 1


def test_a_script_that_trains_when_it_is_imported_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "script_of_a_rank.py").write_text("import os\nos.environ['NO_SUCH_RANK']\n")
    assert main(["plan", "script_of_a_rank:make", "--ranks", "2"]) == 1
    assert "KeyError: 'NO_SUCH_RANK'; fix: an import runs script_of_a_rank: put what trains" in capsys.readouterr().err
    (tmp_path / "script_of_a_model.py").write_text("from tests.commands.test_plan import make_model\n")
    assert main(["plan", "script_of_a_model.py:make_model", "--ranks", "2"]) == 0


def test_an_error_of_the_function_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError, match="in the function"):
        main(["plan", f"{HERE}:broken", "--ranks", "2"])

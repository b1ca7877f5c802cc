"""The command line says what there is, as text or JSON, and its exit code is the answer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import composable
from composable.__main__ import COMMANDS, main
from composable.commands import info
from composable.errors import ConfigError

ROOT = Path(__file__).parent.parent


def test_help_shows_every_command_and_an_example_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
        with pytest.raises(SystemExit) as ended:
            main(words)
        text = capsys.readouterr().out
        assert ended.value.code == 0
        named = COMMANDS if words == ["--help"] else words[:1]
        assert all(name in text and COMMANDS[name].does.split()[-1] in text for name in named)
        assert [
            one for name in words[:-1] for one in COMMANDS[name].examples if f"composable {one}\n" not in text
        ] == []


@pytest.mark.parametrize("words", [[], ["no-such-command"], ["info", "--no-such-option"]])
def test_a_wrong_command_line_is_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: python -m composable")


def test_an_error_is_one_line_and_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: object) -> int:
        raise ConfigError("it\n  is wrong", at="module 'a'", fix="write b")

    monkeypatch.setattr(info, "run", fail)
    assert main(["info"]) == 1
    assert capsys.readouterr() == ("", "error: it is wrong; at: module 'a'; fix: write b\n")


def test_a_process_without_ranks_runs_it_and_loads_no_command_that_it_does_not_need() -> None:
    program = "import sys; from composable.__main__ import main; main(['{}']); print(*sys.modules, sep='\\n')"
    command = [sys.executable, "-m", "composable", "--version"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == f"torch-composable {composable.__version__}\n"
    loaded = subprocess.run(
        [sys.executable, "-c", program.format("info")], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = {name for name in loaded.stdout.split() if name.startswith("composable.commands.")}
    assert found == {"composable.commands.info", "composable.commands.output"}


def test_info_has_versions_transports_and_no_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMPOSABLE_HOST", "one")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden")
    assert main(["info", "--json"]) == 0
    written = capsys.readouterr().out
    found = json.loads(written)
    assert found["torch-composable"] == composable.__version__
    assert found["environment"]["COMPOSABLE_HOST"] == "one" and "hidden" not in written
    assert found["transports"]["process_group"] == "for cpu over gloo" and "gloo" in found["backends"]
    assert found["self test"] == "ok"
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert [name for name in found if not any(line.startswith(name) for line in text.splitlines())] == []


def test_info_says_why_a_transport_or_a_training_does_not_run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(info, "check_parity", lambda *_, **__: 1 / 0)
    assert main(["info"]) == 1
    text = capsys.readouterr().out
    assert "shared_memory not here: it moves CPU tensors over gloo, between ranks on one host with an x86-64" in text
    assert text.endswith("self test         ZeroDivisionError: division by zero\n")

"""The wheel holds all that the README's example needs, and nothing of the checkout; an index can show it."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import composable

pytest.importorskip("build", reason="the wheel is built with the extra `dev`")
from packaging.metadata import Metadata  # `build` needs it too

ROOT = Path(__file__).parent.parent


def run(command: list[str], **options: object) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert result.returncode == 0, result.stdout + result.stderr
    return str(result.stdout)


def test_the_wheel_installs_and_runs_the_readme_example(tmp_path: Path) -> None:
    # A copy, since a build leaves folders behind in its source.
    source = tmp_path / "source"
    files = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE", "_traversal_utils.py"]
    for file in [*files, *(str(path.relative_to(ROOT)) for path in (ROOT / "composable").rglob("*.py"))]:
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).write_bytes((ROOT / file).read_bytes())
    (source / "composable" / "py.typed").touch()
    # The wheel is made of the source distribution.
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path / "dist"), str(source)])
    (wheel,) = (tmp_path / "dist").glob("torch_composable-*.whl")
    assert wheel.name.startswith(f"torch_composable-{composable.__version__}-")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"_traversal_utils.py", "composable/__init__.py", "composable/py.typed"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))]

    (described,) = (name for name in names if name.endswith("/METADATA"))
    metadata = Metadata.from_email(zipfile.ZipFile(wheel).read(described))  # raises what an index would refuse
    assert metadata.description_content_type == "text/markdown"
    text = str(metadata.description)
    assert re.findall(r"\]\((?!https://)[^)]*\)|<!--", text) == []
    assert "| `fully_shard` | Splits" in text and "[train]" not in text and "the first hour: one script" in text

    site = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(site)]
    run([sys.executable, "-m", "pip", "install", *options, str(wheel)])
    found = re.search(r"```python\n(# train\.py.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert found
    # The checkout may be installed in this environment too: say which one was imported.
    (tmp_path / "train.py").write_text(found[1] + "\nimport composable\nassert 'site' in composable.__file__\n")
    # One rank, with what torchrun would tell it: that launches two in test_readme.py.
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environ = {**os.environ, **rank, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    assert "7 handles over 1 rank" in run([sys.executable, "train.py"], cwd=tmp_path, env=environ)


def test_the_version_is_the_same_wherever_it_is_written_and_its_news_fit_two_screens() -> None:
    news = (ROOT / "CHANGELOG.md").read_text().split("\n## ")
    assert all(len(one.splitlines()) <= 50 for one in news)
    for text in (news[1], (ROOT / "HISTORY.md").read_text().split("\n## ")[1]):
        assert text.startswith(composable.__version__)
    assert f"\nversion: {composable.__version__}\n" in (ROOT / "CITATION.cff").read_text()

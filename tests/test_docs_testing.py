"""Everything that the page on testing shows runs, and prints what it says."""

import contextlib
import io
import re
from pathlib import Path

PAGE = (Path(__file__).parent.parent / "docs" / "testing.md").read_text()


def test_the_examples_run_one_after_the_other_and_print_what_follows_them() -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    examples = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE, flags=re.DOTALL)
    assert len(examples) == 6
    for source, expected in examples:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(source, "testing.md", "exec"), names)
        assert printed.getvalue() == expected


def test_the_table_names_every_kind_of_call() -> None:
    from composable.testing.process_group import OPS

    sentence = re.search(r"`op` is one of (.*?), or `any`", PAGE, flags=re.DOTALL)
    assert sentence and re.findall(r"`(\w+)`", sentence[1]) == list(OPS)

"""The tool that breaks the package changes what it says, and leaves what still is Python."""

import ast

from tools.mutations import mutations_of

SOURCE = '''
def half(self, numbers, limit=2):
    """Return 1."""
    if not numbers and self.is_on is None:
        return None
    self.total = len(numbers) + 1
    self.note(numbers)
    return self.total // limit == 1
'''


def test_every_kind_of_change_is_made_and_is_python() -> None:
    found = mutations_of("file.py", SOURCE)
    changed = [mutation.applied(SOURCE) for mutation in found]
    assert all(ast.dump(ast.parse(one)) != ast.dump(ast.parse(SOURCE)) for one in changed)
    lines = {one.splitlines()[mutation.line - 1].strip() for one, mutation in zip(changed, found, strict=True)}
    assert lines == {
        "if (numbers) and self.is_on is None:",
        "if (not numbers or self.is_on is None):",
        "if not numbers and (self.is_on is not None):",
        "pass",
        "self.total = (len(numbers) - 1)",
        "self.total = len(numbers) + (2)",
        "return None",
        "return (self.total // limit != 1)",
        "return (self.total * limit) == 1",
        "return self.total // limit == (2)",
    }

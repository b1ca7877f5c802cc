"""Which tests are in the first tier, ``make test``: some of each behaviour, in minutes.

``--tier first`` runs it, ``--tier rest`` all others, so that both are all tests (``make test-all``), whatever is added.
The first tier has the tests that the rows of ``tests/behaviours.md`` name, and the files of ``FILES``; of a test with
many cases two, the first and one of the middle, and one of the tests in ``LONG``. Where a command line names files or words, those run.
"""

import functools
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.behaviours import ROWS, proved

__all__ = ["CASES", "FILES", "LONG", "SLOW", "first_tier"]

FIRST, REST = "first", "rest"
HEADER = """\
make test: some tests of each behaviour; 2 minutes on two cores, longer on busy ones
           all tests, 30 minutes: make test-all; more random models: python -m tools.fuzz.run --seeds 0-1000"""

# How many cases of one test.
CASES = 2
# No row names their tests: pages, the house, and the tiers themselves.
FILES = (
    "test_architecture.py",
    "test_behaviours.py",
    "test_docs.py",
    "test_readme.py",
    "test_makefile.py",
    "test_tiers.py",
)
# Of these one case will do: each takes many seconds.
LONG = frozenset(
    (
        *proved("test_compiled_autograd.py", "test_a_graph_of_backward_holds_an_all_reduce_for_each_gradient"),
        *proved("fuzz/test_soak.py", "test_nothing_grows"),
        *proved("runtime/test_hidden_losses.py", "test_a_hidden_loss_has_the_gradients_of_one_process_or_an_error"),
        *proved("runtime/test_reading_threads.py", "test_threads_that_read_a_model_in_training_see_its_shards"),
        *proved("collectives/test_uncaught.py", "test_an_exception_that_ends_a_rank_is_told_at_once"),
        *proved(
            "replication/test_gradient_hooks.py", "test_what_hooks_write_to_a_gradient_is_done_before_it_is_averaged"
        ),
        *proved("test_signals.py", "test_all_ranks_end_with_the_code_and_say_why"),
        *proved("test_traversal.py", "test_either_module_may_be_imported_first"),
        *proved(
            "fuzz/test_random_trees.py",
            "test_random_trees_train_as_one_process_does",
            "test_with_any_options_of_replicate_they_do_or_are_refused_on_every_rank",
            "test_with_copies_of_shards_they_do",
        ),
    )
)
# Left to the others though a row names it: what compiles, waits, or starts many processes. The rows name others too.
SLOW = frozenset(
    (
        *proved("test_compiled_autograd.py", "test_inductor_joins_all_reduces_where_it_is_asked_to"),
        *proved("collectives/test_uncaught.py", "test_the_ranks_that_wait_for_one_that_leaves_are_told_at_once"),
        *proved("test_architecture.py", "test_the_core_trains_where_the_other_rooms_are_gone"),
        *proved("test_docs.py", "test_the_page_on_importing_names_everything_that_it_changes_in_torch"),
        *proved(
            "test_two_hosts.py",
            "test_two_hosts_train_as_one_until_the_wire_is_cut_and_one_host_goes_on",
            "test_when_a_host_is_killed_every_rank_of_the_other_says_so",
        ),
    )
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=(FIRST, REST), help="run this part of the tests, if no others are named")


def pytest_report_header(config: pytest.Config) -> str | None:
    return HEADER if _tier_of(config) == FIRST else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out the files that have no test in the first tier: importing all takes as long as many tests."""
    if _tier_of(config) != FIRST or not collection_path.match("test_*.py"):
        return None
    return _below_tests(collection_path, config) not in _files() or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tier = _tier_of(config)
    if tier is None:
        return
    names = [f"{_below_tests(item.path, config)}::{item.nodeid.partition('::')[2]}" for item in items]
    first = first_tier(names)
    is_left = [(name in first) == (tier == FIRST) for name in names]
    config.hook.pytest_deselected(items=[item for item, kept in zip(items, is_left, strict=True) if not kept])
    items[:] = [item for item, kept in zip(items, is_left, strict=True) if kept]


def first_tier(names: Iterable[str]) -> frozenset[str]:
    """Return those of all tests that are in the first tier.

    Args:
        names: The path below ``tests/``, ``::``, the name of the test function, and which case it is in brackets.
    """
    cases: dict[str, list[str]] = {}
    for name in names:
        cases.setdefault(name.partition("[")[0], []).append(name)
    chosen: set[str] = set()
    for function, those in cases.items():
        if function in _functions() or (function.partition("::")[0] in FILES and function not in SLOW):
            count = 1 if function in LONG else CASES
            chosen.update(those[number * len(those) // count] for number in range(count))
    return frozenset(chosen)


@functools.cache
def _functions() -> frozenset[str]:
    return frozenset(test for row in ROWS for test in row.tests) - SLOW


@functools.cache
def _files() -> frozenset[str]:
    return frozenset([*FILES, *(function.partition("::")[0] for function in _functions())])


def _below_tests(path: Path, config: pytest.Config) -> str:
    folder = config.rootpath / "tests"
    return path.relative_to(folder).as_posix() if path.is_relative_to(folder) else str(path)


def _tier_of(config: pytest.Config) -> str | None:
    """Return the tier to run; ``None`` where the command line says which tests by name."""
    is_named = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
    options = config.option
    return None if is_named or options.keyword or options.markexpr or config.getoption("lf", False) else options.tier

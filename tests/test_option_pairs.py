"""Options together: cases in which every two values of the tables meet, against one process; and the tables."""

import inspect
import itertools
from dataclasses import fields

import pytest

import composable
from tests.pairwise import Value, case_of, pairs_of, pairwise, text_of
from tools.options.runs import FIRST, RARE, cases_of, check
from tools.options.tables import TABLES


@pytest.mark.parametrize("case", cases_of("fully_shard")[:FIRST])
def test_fully_shard_trains_with_options_together_as_one_process(case: str) -> None:
    check("fully_shard", case)


@pytest.mark.parametrize("case", cases_of("replicate")[:FIRST])
def test_replicate_trains_with_options_together_as_one_process(case: str) -> None:
    check("replicate", case)


@pytest.mark.parametrize(("api", "case"), [(api, case) for api in TABLES for case in cases_of(api)[FIRST:]])
def test_the_other_cases_train_as_one_process_too(api: str, case: str) -> None:
    check(api, case)


@pytest.mark.parametrize("api", TABLES)
def test_each_value_of_each_option_is_in_one_of_the_first_cases_unless_it_compiles(api: str) -> None:
    cases = cases_of(api)
    for option, values in TABLES[api].items():
        for name in list(values)[1:]:
            among = cases if option == "compiled" else cases[:FIRST]
            assert any(f"{option}={name}" in case.split(", ") for case in among), f"{option}={name}"


@pytest.mark.parametrize("api", TABLES)
def test_the_tables_name_every_argument(api: str) -> None:
    """An argument that is not in the table has no numbers, or is in a test of its own, which is named here."""
    given = {"policy", "mesh", *ELSEWHERE}
    for values in TABLES[api].values():
        for value in values.values():
            given |= value.ranks.get("options", {}).keys() | value.ranks.get("rare", {}).keys()
    given |= {"delay_all_reduce_named_params", "param_to_hook_all_reduce"}
    arguments = set(inspect.signature(getattr(composable, api)).parameters) - {"module", "options"}
    arguments |= {field.name for field in fields(RARE[api])}
    assert arguments <= given, arguments - given


# Where and what else: the names of arguments that tests of their own hold.
ELSEWHERE = {
    *("dp_mesh_dims", "process_group"),  # test_hybrid.py, test_replicate.py
    *("device_ids", "device_id", "device_mesh"),  # test_replicate_options.py
    *("fixed_buckets",),  # test_group_life.py
    *("ignored_modules", "ignored_params"),  # test_fully_shard.py, test_replicate.py
    *("follows_parent",),  # test_experts.py
    *("param_init_fn",),  # storage/test_first_values.py
}


def test_a_failure_says_how_to_run_the_case_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # The one process forgets what the ranks do between two steps.
    monkeypatch.setattr("tools.options.runs._write", lambda model: None)
    with pytest.raises(AssertionError, match=r'again: python -m tools.options.runs fully_shard "between=written"'):
        check("fully_shard", "between=written")


# Cases in which every two values meet

TABLE = {
    "size": {"small": Value(), "middle": Value(), "large": Value(without={"colour": ["red"]})},
    "colour": {"white": Value(), "red": Value(only={"taste": ["sweet", "sour"]}), "blue": Value()},
    "taste": {"none": Value(), "sweet": Value(), "sour": Value(only={"size": ["large"]})},
}


def test_every_pair_meets_that_can_be_combined_and_no_other() -> None:
    cases = pairwise(TABLE)
    met = {pair for case in cases for pair in itertools.combinations(case.items(), 2)}
    everything = set(itertools.product(TABLE["size"], TABLE["colour"], TABLE["taste"]))
    allowed = {
        (size, colour, taste)
        for size, colour, taste in everything
        if not (size == "large" and colour == "red")
        and not (colour == "red" and taste == "none")
        and not (taste == "sour" and size != "large")
    }
    possible = {pair for one in allowed for pair in itertools.combinations(zip(TABLE, one, strict=True), 2)}
    assert met == possible
    assert {tuple(case.values()) for case in cases} <= allowed and len(cases) < len(allowed)


def test_a_line_gives_the_case_back_and_one_of_what_there_is_not_is_an_error() -> None:
    for case in pairwise(TABLE):
        assert case_of(TABLE, text_of(TABLE, case)) == case
    for text in ("size=huge", "weight=1", "size=large, colour=red, taste=sweet"):
        with pytest.raises(ValueError, match=r"no |does not go with"):
            case_of(TABLE, text)


def test_arguments_of_a_test_meet_in_pairs_too() -> None:
    names, cases = pairs_of(size=[1, 2, 3], kind="ab", way=[None, True])
    assert names == ("size", "kind", "way")
    assert {case[:2] for case in cases} == set(itertools.product([1, 2, 3], "ab"))
    assert {case[1:] for case in cases} == set(itertools.product("ab", [None, True])) and len(cases) < 12

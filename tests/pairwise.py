"""Few cases in which every two values of different options meet, unless they cannot be combined.

Knows nothing of what options mean: a table of options, each with named values, of which a value says what it goes with.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["Case", "Table", "Value", "case_of", "pairs_of", "pairwise", "text_of"]

# The name of a value by option; the first value of an option is its default.
Case = dict[str, str]


@dataclass(frozen=True)
class Value:
    """One value of one option.

    Attributes:
        ranks: What ranks do, by field.
        alone: What the one process does, by field.
        only: By option, the values that it goes with.
        without: By option, the values that it does not go with.
        tolerance: How far numbers may be from those of one process, where more than by default.
        rounds: Where numbers are rounded in another order than in one process, if they are low there: "compute", where
            a parameter's gradients add up, or "reduce", between ranks.
    """

    ranks: Mapping[str, Any] = field(default_factory=dict)
    alone: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Iterable[str]] = field(default_factory=dict)
    without: Mapping[str, Iterable[str]] = field(default_factory=dict)
    tolerance: float = 0.0
    rounds: str = ""

    def but(self, **changes: Any) -> "Value":
        """Return it with other fields; what it does not go with is added to."""
        changes["without"] = {**self.without, **changes.get("without", {})}
        return replace(self, **changes)


Table = Mapping[str, Mapping[str, Value]]
_Pick = tuple[str, str]


def pairwise(table: Table) -> list[Case]:
    """Return cases of all options in which every pair of values that can be combined is, soon rather than late."""
    goes = _goes_together(table)
    picks = [(option, name) for option, values in table.items() for name in values]
    missing = {frozenset(pair) for pair in itertools.combinations(picks, 2) if pair[0][0] != pair[1][0]}
    missing &= {frozenset((one, other)) for one, others in goes.items() for other in others}
    cases: list[Case] = []
    # Not those that other options, whatever their values, keep apart.
    for pair in itertools.combinations(picks, 2):
        while frozenset(pair) in missing:
            chosen = _complete(table, goes, missing, list(pair))
            if chosen is None:
                missing.discard(frozenset(pair))
                break
            missing -= {frozenset(two) for two in itertools.combinations(chosen, 2)}
            cases.append({option: name for option in table for other, name in chosen if other == option})
    return cases


def pairs_of(**options: Iterable[Any]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
    """Return what ``pytest.mark.parametrize`` takes: cases in which every two values of different arguments meet."""
    values = {name: list(those) for name, those in options.items()}
    cases = pairwise({name: {str(number): Value() for number in range(len(those))} for name, those in values.items()})
    return tuple(values), [tuple(values[name][int(number)] for name, number in case.items()) for case in cases]


def case_of(table: Table, text: str) -> Case:
    """Return the case that ``text_of`` has written.

    Raises:
        ValueError: There is no such option or value, or two that cannot be combined.
    """
    case = {option: next(iter(values)) for option, values in table.items()}
    given = dict(part.split("=", 1) for part in text.split(", ") if part)
    for option, name in given.items():
        if name not in table.get(option, {}):
            raise ValueError(f"no {option}={name}, but {[*table.get(option, table)]}")
    case |= given
    goes = _goes_together(table)
    for one, other in itertools.combinations(case.items(), 2):
        if other not in goes[one]:
            raise ValueError(f"{'='.join(one)} does not go with {'='.join(other)}")
    return case


def text_of(table: Table, case: Case) -> str:
    """Return what a case has other than the defaults, on one line."""
    return ", ".join(f"{option}={name}" for option, name in case.items() if name != next(iter(table[option])))


def _goes_together(table: Table) -> dict[_Pick, set[_Pick]]:
    picks = {(option, name): value for option, values in table.items() for name, value in values.items()}
    for value in picks.values():
        for option, names in (*value.only.items(), *value.without.items()):
            unknown = set(names) - set(table[option])
            assert not unknown, f"no {option} {unknown}"

    def accepts(value: Value, option: str, name: str) -> bool:
        return name in value.only.get(option, (name,)) and name not in value.without.get(option, ())

    return {
        one: {
            other
            for other, other_value in picks.items()
            if other[0] != one[0] and accepts(value, *other) and accepts(other_value, *one)
        }
        for one, value in picks.items()
    }


def _complete(
    table: Table, goes: Mapping[_Pick, set[_Pick]], missing: set[frozenset[_Pick]], chosen: list[_Pick]
) -> list[_Pick] | None:
    """Choose a value of every other option, with many of the missing pairs; ``None`` if there are no such values."""
    allowed = set.intersection(*(goes[one] for one in chosen))
    rest = {option: [(option, name) for name in table[option] if (option, name) in allowed] for option in table}
    for option, _ in chosen:
        del rest[option]
    if not rest:
        return chosen
    # The option with fewest values left comes first: it has least to choose from later.
    option = min(rest, key=lambda one: len(rest[one]))
    by_gain = sorted(rest[option], key=lambda one: -sum(frozenset((one, other)) in missing for other in chosen))
    for pick in by_gain:
        completed = _complete(table, goes, missing, [*chosen, pick])
        if completed is not None:
            return completed
    return None

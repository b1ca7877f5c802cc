"""What stands for a module's dict of parameters: it is asked for names, and is ready before its values are seen."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from composable.replication.low_precision import Unread


def make() -> tuple[Unread, dict[str, Any], list[str]]:
    held: dict[str, Any] = {"a": 0, "b": None}
    reads: list[str] = []

    def read() -> None:
        reads.append("read")
        held["a"] = 1

    return Unread(held, read), held, reads


NAMES: dict[str, Callable[[Any], Any]] = {
    "in": lambda one: "a" in one and "c" not in one,
    "len": len,
    "list": list,
    "reversed": lambda one: list(reversed(one)),
    "keys": lambda one: list(one.keys()),
    "bool": bool,
}
VALUES: dict[str, Callable[[Any], Any]] = {
    "[]": lambda one: one["a"],
    "get": lambda one: (one.get("a"), one.get("c", 5)),
    "values": lambda one: list(one.values()),
    "items": lambda one: list(one.items()),
    "dict": dict,
    "**": lambda one: {**one},
    "copy": lambda one: one.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "==": lambda one: (one == {"a": 1, "b": None}, one != {"a": 1}),
    "|": lambda one: (one | {"c": 2}, {"c": 2} | one),
    "repr": repr,
    "pop": lambda one: one.pop("a"),
    "popitem": lambda one: one.popitem(),
    "setdefault": lambda one: one.setdefault("a", 7),
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "[] =": lambda one: one.__setitem__("a", 2),
    "del": lambda one: one.__delitem__("a"),
    "update": lambda one: one.update(a=2, c=3),
    "|=": lambda one: one.__ior__({"a": 2}),
    "clear": lambda one: one.clear(),
}


@pytest.mark.parametrize("use", NAMES.values(), ids=NAMES)
def test_names_are_there_without_values(use: Callable[[Any], Any]) -> None:
    unread, held, reads = make()
    assert use(unread) == use(dict(held))
    assert not reads


@pytest.mark.parametrize("use", VALUES.values(), ids=VALUES)
def test_values_are_made_ready_before_they_are_seen(use: Callable[[Any], Any]) -> None:
    unread, _, reads = make()
    assert use(unread) == use({"a": 1, "b": None})
    assert reads


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_written_is_written_last(change: Callable[[Any], Any]) -> None:
    unread, held, reads = make()
    expected: dict[str, Any] = {"a": 1, "b": None}
    change(expected)
    change(unread)
    assert held == expected and reads


def test_it_is_asked_by_everything_that_a_dict_has() -> None:
    own = {name for name, value in vars(dict).items() if callable(value)}
    # Of these no module makes use: an order that dicts do not have, a hash that they lack, how they are made.
    rest = {"__ge__", "__gt__", "__le__", "__lt__", "__new__", "__init__", "__getattribute__", "__sizeof__"}
    rest |= {"__class_getitem__", "fromkeys"}
    assert own - set(vars(Unread)) - rest == set()


def test_a_module_reads_its_parameters_through_it() -> None:
    module = nn.Linear(2, 3)
    held, reads = module._parameters, []
    module.__dict__["_parameters"] = Unread(held, lambda: reads.append("read"))
    module.extra = nn.ReLU()
    assert not reads
    assert module.weight is held["weight"] and len(reads) == 1
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"] and len(reads) == 2
    module.bias = None
    assert held["bias"] is None
    twin = copy.deepcopy(module)
    assert type(twin._parameters) is dict and torch.equal(twin.weight, module.weight)

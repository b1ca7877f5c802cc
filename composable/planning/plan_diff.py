"""In what two plans differ, as data that prints: settings, figures, handles and parameters."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, NamedTuple

from composable.planning.handle_plan import FQNS_SHOWN, HandlePlan, describe_buffer, describe_handle
from composable.wording import bytes_text, count_text, list_text, sibling_lines

__all__ = ["Change", "HandleChange", "PlanDiff", "PlanFacts", "diff_of"]

# Printed without the values, which are long.
_CUTS = "where parameters are cut"


@dataclass(frozen=True)
class Change:
    """What is ``before`` in one plan and ``after`` in the other; ``None``: there is none, or it is not known."""

    name: str
    before: Any
    after: Any

    def __str__(self) -> str:
        if self.name == _CUTS:
            return f"{_CUTS} changes"
        counts_bytes = "bytes" in self.name and {type(self.before), type(self.after)} <= {int, NoneType}
        write = _bytes_text if counts_bytes else _hosts_text if self.name == "hosts" else _text
        text = f"{self.name} {write(self.before)} -> {write(self.after)}"
        if counts_bytes and self.before and self.after is not None:
            text += f" ({self.after / self.before - 1:+.1%})"
        return text


def _text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, tuple) and value:
        return f"({list_text(value, FQNS_SHOWN, write=str)})"
    return "none" if value is None or value == () else str(value) or "none"


def _bytes_text(value: int | None) -> str:
    return "not known" if value is None else bytes_text(value)


def _hosts_text(hosts: Sequence[int]) -> str:
    if not hosts:
        return "not known"
    ranks = set(Counter(hosts).values())
    return f"{len(set(hosts)):,} of {count_text(ranks.pop(), 'rank') if len(ranks) == 1 else 'different sizes'}"


@dataclass(frozen=True)
class HandleChange:
    """In what a handle differs that both plans have, but for which parameters it owns.

    Attributes:
        name: The FQN of its module; ``(root)`` is the annotated one.
        changes: What differs; of a parameter, with its FQN.
    """

    name: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class PlanDiff:
    """In what one plan differs from another one. False where in nothing, their transports and hosts included.

    Attributes:
        settings: Options and ranks.
        figures: Numbers for the whole plan: bytes, collectives.
        added: Handles that the other plan has alone.
        removed: Handles that the one plan has alone.
        changed: Handles of both.
        moved: Parameters of both, with the names of their handles.
        params_added: Parameters that the other plan has alone.
        params_removed: Parameters that the one plan has alone.
    """

    settings: tuple[Change, ...]
    figures: tuple[Change, ...]
    added: tuple[HandlePlan, ...]
    removed: tuple[HandlePlan, ...]
    changed: tuple[HandleChange, ...]
    moved: tuple[Change, ...]
    params_added: tuple[str, ...]
    params_removed: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """The plans are alike in everything."""
        return not any(getattr(self, one.name) for one in fields(self))

    def __bool__(self) -> bool:
        return not self.is_empty

    def __str__(self) -> str:
        if self.is_empty:
            return "the plans are alike"
        lines = [str(one) for one in (*self.settings, *self.figures)]
        for what, handles in (("added", self.added), ("removed", self.removed)):
            lines += sibling_lines((f"handle {one.name}", f" {what}", describe_handle(one)) for one in handles)
        lines += sibling_lines(
            (f"handle {one.name}", " changed", "; ".join(map(str, one.changes))) for one in self.changed
        )
        moved = Counter((one.before, one.after) for one in self.moved)
        to = sibling_lines((f"parameters moved to {new}", "", f"{many} of {old}") for (old, new), many in moved.items())
        of = sibling_lines((f"parameters of {old}", " moved", f"{many} to {new}") for (old, new), many in moved.items())
        lines += to if len(to) <= len(of) else of
        for what, fqns in (("added", self.params_added), ("removed", self.params_removed)):
            if fqns:
                lines.append(f"parameters {what}: {list_text(fqns, FQNS_SHOWN, write=str)}")
        return "\n".join(lines)


class PlanFacts(NamedTuple):
    """A plan, as it is compared.

    Attributes:
        settings: By name.
        figures: By name.
        handles: In order.
    """

    settings: Mapping[str, Any]
    figures: Mapping[str, int | None]
    handles: tuple[HandlePlan, ...]


def diff_of(before: PlanFacts, after: PlanFacts) -> PlanDiff:
    """Return in what ``after`` differs from ``before``."""
    old, new = ({one.name: one for one in plan.handles} for plan in (before, after))
    both = [name for name in old if name in new]
    owners = [{param.fqn: one.name for one in plan.handles for param in one.params} for plan in (before, after)]
    # Cuts follow from the ranks, so they are no difference of their own where those differ.
    has_same_ranks = before.settings["world_size"] == after.settings["world_size"]
    changes = [HandleChange(name, tuple(_changes_of(old[name], new[name], with_cuts=has_same_ranks))) for name in both]
    return PlanDiff(
        settings=(
            *_changes(before.settings, after.settings),
            *_changes_of_order("order of handles", list(old), list(new)),
        ),
        figures=_changes(before.figures, after.figures),
        added=tuple(one for name, one in new.items() if name not in old),
        removed=tuple(one for name, one in old.items() if name not in new),
        changed=tuple(one for one in changes if one.changes),
        moved=tuple(
            Change(fqn, owner, owners[1][fqn])
            for fqn, owner in owners[0].items()
            if fqn in owners[1] and owners[1][fqn] != owner
        ),
        params_added=tuple(fqn for fqn in owners[1] if fqn not in owners[0]),
        params_removed=tuple(fqn for fqn in owners[0] if fqn not in owners[1]),
    )


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Change, ...]:
    return tuple(Change(name, value, after[name]) for name, value in before.items() if value != after[name])


def _changes_of_order(name: str, before: Sequence[str], after: Sequence[str]) -> Iterator[Change]:
    shared = set(before) & set(after)
    first, second = (tuple(one for one in names if one in shared) for names in (before, after))
    if first != second:
        yield Change(name, first, second)


def _changes_of(before: HandlePlan, after: HandlePlan, *, with_cuts: bool) -> Iterator[Change]:
    yield from _changes(*(_facts_of(one) for one in (before, after)))
    old, new = ({param.fqn: param for param in one.params} for one in (before, after))
    for fqn, param in old.items():
        if fqn in new and new[fqn] != param:
            facts = [
                {f"{fqn} {one.name}": getattr(param, one.name) for one in fields(param)} for param in (param, new[fqn])
            ]
            yield from _changes(*facts)
    yield from _changes_of_order("order of parameters", list(old), list(new))
    if with_cuts and old.keys() == new.keys():
        yield from _changes(*({_CUTS: _cuts_of(one)} for one in (before, after)))


def _facts_of(handle: HandlePlan) -> dict[str, Any]:
    """Return what a handle has beside its parameters and their places."""
    named = {one.name: getattr(handle, one.name) for one in fields(handle) if one.name not in ("params", "buffers")}
    return {
        **named,
        "bytes per rank": handle.shard_bytes,
        "bytes unsharded": handle.buffer_bytes,
        "padding bytes": handle.padding_bytes,
        "buffers": tuple(map(describe_buffer, handle.buffers)),
    }


def _cuts_of(handle: HandlePlan) -> tuple[Any, ...]:
    return tuple(
        (buffer.layout.shard_numel, tuple((span.fqn, span.start, span.order) for span in buffer.layout.spans))
        for buffer in handle.buffers
    )

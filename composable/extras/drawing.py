"""A plan as an SVG picture.

The picture has a limited height. Handles that differ only in the numbers in their names share a row, and so do ranks
that hold the same bytes. If there are still too many rows, neighbours of similar size share one, which shows their
maximum. Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, TypeAlias
from xml.sax.saxutils import escape, quoteattr

import torch

from composable.ground.names import bytes_text, count_text, list_text
from composable.planning import ShardPlan

# In pixels: the picture, its margin, a row, the names; then the place, width and heading of columns of bars.
_WIDTH, _MARGIN, _ROW, _NAMES = 1000, 24, 38, 240
_WIDE = (272, 704, "")
_NARROW = [(272, 262, "Rests on each rank"), (560, 110, "Unsharded"), (704, 272, "Sent in a step")]
_MOST_HANDLE_ROWS, _MOST_RANK_ROWS = 24, 8
# Width of a letter, as a part of its font size: wide enough for the sans-serif fonts of all systems.
_LETTER = 0.6
_INK, _FAINT, _PAPER = "#1b1f24", "#57606a", "#ffffff"
_COLOURS = {
    "parameters": "#0072b2",
    "optimizer state": "#009e73",
    "gradients": "#e69f00",
    "gathered, and gradients, in a step": "#56b4e9",
    "sent inside a host": "#cc79a7",
    "sent to other hosts": "#d55e00",
    "padding": "#b4bac1",
}
*_AMOUNTS, _PADDING = _COLOURS.values()
_LEFT_OUT = "Not counted: activations, module buffers, ignored parameters, and what an optimizer allocates for a while."
# A name, a note, and for each column a text and the parts of its bar: amounts and colours.
_Row: TypeAlias = tuple[str, str, list[tuple[str, list[tuple[int, str]]]]]


class _Figures(NamedTuple):
    """A handle, and its bytes on one rank, one amount for each colour except that of padding."""

    name: str
    class_names: tuple[str, ...]
    amounts: tuple[int, ...]


def shortened(text: str, width: float, size: float = 12) -> str:
    """Return ``text``, cut in the middle if it needs more than ``width`` pixels in a font of ``size`` pixels."""
    most = max(int(width / (size * _LETTER)), 3)
    return text if len(text) <= most else text[: most // 2] + "…" + text[len(text) - (most - 1) // 2 :]


class Canvas:
    """Collects the elements of an SVG document with its own background, which dark pages need.

    Readers who cannot see it hear its title and its description. Lengths are in pixels.
    """

    def __init__(self, title: str, description: str) -> None:
        self._elements = [f"<title>{escape(title)}</title>", f"<desc>{escape(description)}</desc>"]

    def add(self, tag: str, text: str = "", tip: str = "", **attributes: str | float) -> None:
        """Add any element; ``stroke_width=2`` is its attribute ``stroke-width``, and ``tip`` shows below the mouse."""
        texts = {key: one if isinstance(one, str) else f"{one:.6g}" for key, one in attributes.items()}
        start = " ".join([f"<{tag}", *(f"{key.replace('_', '-')}={quoteattr(one)}" for key, one in texts.items())])
        inside = escape(text) + (f"<title>{escape(tip)}</title>" if tip else "")
        self._elements.append(f"{start}>{inside}</{tag}>" if inside else f"{start}/>")

    def text(self, x: float, y: float, text: str, size: float = 12, fill: str = _INK, weight: str = "normal") -> None:
        """Add a line of text from ``x`` on, with its baseline at ``y``; a text that would leave the picture is cut."""
        self.add("text", shortened(text, _WIDTH - x, size), x=x, y=y, font_size=size, fill=fill, font_weight=weight)

    def bar(self, x: float, y: float, pixels: float, parts: Iterable[tuple[int, str]]) -> None:
        """Add a bar of parts in a row, each with an amount and a colour; an amount of 1 is ``pixels`` wide."""
        for width, fill in ((max(amount * pixels, 1.5), fill) for amount, fill in parts if amount):
            self.add("rect", x=x, y=y, width=width, height=11, fill=fill)
            x += width

    def document(self, height: float) -> str:
        """Return the whole document."""
        size = f'width="{_WIDTH}" height="{height:g}"'
        first = f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {_WIDTH} {height:g}" role="img"'
        lines = [f'{first} font-family="Helvetica, Arial, sans-serif">', *self._elements, "</svg>\n"]
        return "\n".join([*lines[:3], f'<rect {size} rx="8" fill="{_PAPER}"/>', *lines[3:]])


def _parts(values: Sequence[int], most: int) -> list[range]:
    """Cut a row of numbers into at most ``most`` parts of neighbours that are equal, or else similar."""
    found = [range(len(values))]
    for _ in range(most - 1):
        widest = max(found, key=lambda part: max(values[at] for at in part) - min(values[at] for at in part))
        place, middle = found.index(widest), (widest.start + widest.stop) / 2
        if len({values[at] for at in widest}) > 1:
            cut = max(widest[1:], key=lambda at: (abs(values[at] - values[at - 1]), -abs(at - middle)))
            found[place : place + 1] = [range(widest.start, cut), range(cut, widest.stop)]
    return found


def _numbered(names: Sequence[str]) -> str:
    """Return one name for names that differ in their numbers only: ``blocks.[0-11].mlp``."""
    texts = []
    for numbers in zip(*(map(int, re.findall(r"\d+", name)) for name in names), strict=True):
        found = sorted(set(numbers))
        is_range = len(found) == found[-1] - found[0] + 1 > 1
        text = f"{found[0]}-{found[-1]}" if is_range else list_text([*map(str, found)], 3, write=str)
        texts.append(text if len(found) == 1 else f"[{text}]")
    return "".join(chain.from_iterable(zip(re.split(r"\d+", names[0]), [*texts, ""], strict=True)))


def _handle_rows(handles: Sequence[_Figures]) -> list[_Row]:
    alike: dict[tuple[object, ...], list[_Figures]] = {}
    for one in handles:
        # The name of a handle with several modules has no siblings.
        pattern = one.name if ", " in one.name else re.sub(r"\d+", "#", one.name)
        alike.setdefault((pattern, *one[1:]), []).append(one)
    named = [(_numbered([one.name for one in group]), group) for group in alike.values()]
    if len(named) > _MOST_HANDLE_ROWS:
        parts = _parts([sum(one.amounts) for one in handles], _MOST_HANDLE_ROWS)
        ends = (dict.fromkeys((handles[part[0]].name, handles[part[-1]].name)) for part in parts)
        named = [(" to ".join(names), [handles[at] for at in part]) for names, part in zip(ends, parts, strict=True)]
    rows = []
    for name, group in named:
        most = [max(amounts) for amounts in zip(*(one.amounts for one in group), strict=True)]
        note = list_text(dict.fromkeys(chain.from_iterable(one.class_names for one in group)), 2, write=str)
        note += f" x {len(group):,}, each" if len(group) > 1 else ""
        note += "" if all([*one.amounts] == most for one in group) else " at most"
        parts_of_bars = [list(zip(most, _AMOUNTS, strict=True))[start:stop] for start, stop in ((0, 3), (3, 4), (4, 6))]
        bars = [(" + ".join(bytes_text(amount) for amount, _ in parts), parts) for parts in parts_of_bars]
        rows.append((name, note, bars))
    return rows


def _table(canvas: Canvas, y: int, title: str, columns: Sequence[tuple[int, int, str]], rows: Sequence[_Row]) -> int:
    """Draw a bar for each row and column, and return where the next table begins; columns have a place and a width."""
    canvas.text(_MARGIN, y + 12, title, 14, weight="bold")
    for at, (x, width, heading) in enumerate(columns):
        canvas.text(x, y + 12, heading, 11, _FAINT)
        most = max([1, *(sum(amount for amount, _ in bars[at][1]) for _, _, bars in rows)])
        for top, (_, _, bars) in enumerate(rows):
            canvas.bar(x, y + 24 + top * _ROW, width / most, bars[at][1])
            canvas.text(x, y + 48 + top * _ROW, bars[at][0], 11)
    for top, (name, note, _) in enumerate(rows):
        canvas.text(_MARGIN, y + 34 + top * _ROW, shortened(name, _NAMES), weight="bold")
        canvas.text(_MARGIN, y + 48 + top * _ROW, shortened(note, _NAMES, 11), 11, _FAINT)
    return y + 34 + len(rows) * _ROW


def _figures_of(plan: ShardPlan, optimizer_states: int, state_dtype: torch.dtype | None) -> Iterator[_Figures]:
    """Yield the figures of each handle, left to right, depth first."""
    sent = [(0, 0)] * len(plan.handles)
    if _is_traffic_known(plan):
        sent = [(one.inside_bytes, one.between_bytes) for one in plan.expected_traffic().handles]
    for handle, sent_bytes in zip(plan.handles, sent, strict=True):
        alone = replace(plan, handles=(handle,))
        at_rest = (alone.bytes_per_rank_at_rest, alone.host_bytes_per_rank_at_rest)  # one of them is 0
        states = sum(count(optimizer_states, state_dtype) for count in at_rest) - handle.shard_bytes
        trained = [buffer for buffer in handle.buffers if buffer.requires_grad]
        gradients = sum(one.layout.shard_numel * plan.gradient_dtype(one).itemsize for one in trained)
        held = handle.shard_bytes, states, gradients, handle.buffer_bytes
        yield _Figures(handle.name, handle.class_names, (*held, *sent_bytes))


def _is_traffic_known(plan: ShardPlan) -> bool:
    return bool(plan.hosts) or plan.world_size * plan.replicas == 1


def draw_plan(plan: ShardPlan, optimizer_states: int, state_dtype: torch.dtype | None) -> str:
    """Return the picture as the text of an SVG document; arguments as for ``ShardPlan.draw``."""
    handles = list(_figures_of(plan, optimizer_states, state_dtype))
    padding = [0] * plan.world_size  # for each rank that shares parameters, in bytes
    for buffer in (buffer for handle in plan.handles for buffer in handle.buffers):
        for rank, numel in enumerate(buffer.layout.padding_by_rank()):
            padding[rank] += numel * buffer.dtype.itemsize
    peak, replicas = plan.peak_bytes_per_rank(optimizer_states, state_dtype), plan.replicas
    rests_on_host, is_traffic_known = plan.offload_policy.is_offloading, _is_traffic_known(plan)
    *at_rest, _, inside, between = (sum(one.amounts[at] for one in handles) for at in range(6))
    parameters, on_device = at_rest[0], 0 if rests_on_host else sum(at_rest[:2])
    place = f"Rests on the {'host' if rests_on_host else 'device'}"
    rest = "{}: {} parameters, {} optimizer state; and {} gradients until zero_grad()"
    rest = rest.format(*map(bytes_text, (sum(at_rest[:2]), *at_rest)))
    most = f"{bytes_text(peak)}: {bytes_text(on_device)} that rest there, {bytes_text(peak - on_device)} of a step"
    sent = f"{bytes_text(inside)} inside its host, {bytes_text(between)} to other hosts; mean of all ranks"
    sent = sent if is_traffic_known else "not known: draw(ranks_per_host=8) says which ranks share a host"
    title, details, *_ = str(plan).splitlines()
    canvas = Canvas(title, f"{place}: {rest}. Peak of a step: {most}. A rank sends in a step: {sent}.")
    canvas.text(_MARGIN, 38, title, 20, weight="bold")
    canvas.text(_MARGIN, 59, details.strip(), fill=_FAINT)
    x = _MARGIN
    for meaning, fill in _COLOURS.items():
        canvas.add("rect", x=x, y=76, width=11, height=11, fill=fill)
        canvas.text(x + 16, 86, meaning, 11)
        x += 36 + round(5.6 * len(meaning))
    resting = list(zip(at_rest, _AMOUNTS[:3], strict=True))
    stepping = [*(resting[:2] if on_device else []), (peak - on_device, _AMOUNTS[3])]
    links = list(zip((inside, between), _AMOUNTS[4:], strict=True))
    held = [(place, "between steps", [(rest, resting)])]
    held += [("Peak on the device", "in forward and backward", [(most, stepping)])]
    y = _table(canvas, 106, "One rank", [_WIDE], held)
    y = _table(canvas, y - 34, "", [_WIDE], [("Sent in a step", "by one rank", [(sent, links)])])
    y = _table(canvas, y, "Handles", _NARROW[: 2 + is_traffic_known], _handle_rows(handles))
    held = []
    for part in _parts(padding, _MOST_RANK_ROWS):
        least, largest = min(padding[at] for at in part), max(padding[at] for at in part)
        bounds = " to ".join(dict.fromkeys(bytes_text(parameters - one) for one in (largest, least)))
        at_most = "up to " if least < largest else ""
        bar = [(parameters - largest, _AMOUNTS[0]), (largest, _PADDING)]
        name = f"rank {part[0]}" if len(part) == 1 else f"ranks {part[0]}-{part[-1]}"
        figures = f"{bounds} of parameters, {at_most}{bytes_text(largest)} of padding"
        held.append((name, count_text(len(part), "rank"), [(figures, bar)]))
    copies = f"; ranks {len(padding):,}-{len(padding) * replicas - 1:,} hold copies" if replicas > 1 else ""
    y = _table(canvas, y, "Ranks", [(*_WIDE[:2], f"Parameters at rest{copies}")], held)
    canvas.text(_MARGIN, y + 6, f"With activations: {plan.step}." if plan.step else _LEFT_OUT, 11, _FAINT)
    return canvas.document(y + 24)

"""Shapes that the pictures of the docs are made of: boxes, rows of cells, arrows, numbered marks."""

import math

from composable.extras.drawing import Canvas

__all__ = ["BLUE", "FAINT", "GREEN", "GREY", "INK", "ORANGE", "PURPLE", "RED", "SKY", "Picture"]

# Of Okabe and Ito, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, SKY = "#0072b2", "#e69f00", "#009e73", "#56b4e9"
PURPLE, RED, GREY = "#cc79a7", "#d55e00", "#b4bac1"
INK, FAINT = "#1b1f24", "#57606a"


def _tint(colour: str, share: float = 0.3) -> str:
    """Return a light shade of a colour, on which dark text can be read."""
    parts = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(255 + (part - 255) * share):02x}" for part in parts)


class Picture(Canvas):
    """A canvas with a heading and shapes.

    Args:
        title: In one line.
        description: A sentence or two: shown below the title, and read to who cannot see the picture.
    """

    def __init__(self, title: str, *description: str) -> None:
        super().__init__(title, " ".join(description))
        self.text(24, 36, title, 20, weight="bold")
        for line, text in enumerate(description):
            self.text(24, 59 + 18 * line, text, 13, FAINT)

    def label(self, x: float, y: float, text: str, size: float = 12, fill: str = INK, weight: str = "normal") -> None:
        """Write a line around ``x``."""
        self.add("text", text, x=x, y=y, font_size=size, fill=fill, font_weight=weight, text_anchor="middle")

    def box(
        self, x: float, y: float, width: float, height: float, colour: str, text: str = "", size: float = 12
    ) -> None:
        """Draw a box in a light shade of a colour, with lines of text in its middle."""
        self.add(
            "rect", x=x, y=y, width=width, height=height, rx=3, fill=_tint(colour), stroke=colour, stroke_width=1.5
        )
        lines = text.split("\n") if text else []
        for line, one in enumerate(lines):
            top = y + height / 2 + size * 0.36 + (line - (len(lines) - 1) / 2) * (size + 4)
            self.label(x + width / 2, top, one, size)

    def frame(self, x: float, y: float, width: float, height: float, text: str) -> None:
        """Draw a dashed frame with a name above its upper left corner."""
        self.add("rect", x=x, y=y, width=width, height=height, rx=6, fill="none", stroke=FAINT, stroke_dasharray="5 4")
        self.text(x, y - 7, text, 13, weight="bold")

    def line(self, x: float, y: float, to_x: float, to_y: float, colour: str = FAINT, dashes: str = "none") -> None:
        """Draw a line."""
        self.add("line", x1=x, y1=y, x2=to_x, y2=to_y, stroke=colour, stroke_width=1.5, stroke_dasharray=dashes)

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = FAINT, *, both: bool = False) -> None:
        """Draw an arrow, with a head at its end or at both."""
        self.line(x, y, to_x, to_y, colour)
        angle = math.atan2(to_y - y, to_x - x)
        ends = [(to_x, to_y, angle), *([(x, y, angle + math.pi)] if both else [])]
        for end_x, end_y, towards in ends:
            back = (
                (end_x - 9 * math.cos(towards + turn), end_y - 9 * math.sin(towards + turn)) for turn in (-0.4, 0.4)
            )
            points = " ".join(f"{one:.1f},{other:.1f}" for one, other in [(end_x, end_y), *back])
            self.add("polygon", points=points, fill=colour)

    def mark(self, x: float, y: float, text: str) -> None:
        """Draw a numbered mark."""
        self.add("circle", cx=x, cy=y, r=9, fill=INK)
        self.label(x, y + 4, text, 12, "#ffffff", "bold")

"""What a training run shows and writes: progress, ``metrics.jsonl`` and the picture of the loss."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

__all__ = ["MetricsLog", "Progress", "draw_loss_curve", "read_metrics"]

_PLAIN_LINES = 20


class MetricsLog:
    """Appends one line of JSON for each step to ``metrics.jsonl``.

    A resumed run keeps the lines up to ``first_step`` (of ``source``, the run it continues) and
    drops what was written after that checkpoint, so that each step has one line.
    """

    def __init__(self, run: Path, first_step: int, source: Path | None = None) -> None:
        self.path = run / "metrics.jsonl"
        kept = [line for line in read_metrics(source or run) if line["step"] <= first_step]
        rewritten = run / ".metrics.jsonl"
        rewritten.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(rewritten, self.path)
        self._file: TextIO = self.path.open("a")

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's ``metrics.jsonl``; a last line cut short by a kill is left out."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Progress:
    """A bar on a terminal where ``rich`` is installed, else a line now and then."""

    def __init__(self, first_step: int, steps: int) -> None:
        self._steps = steps
        self._every = max(1, (steps - first_step) // _PLAIN_LINES)
        self._bar: Any = None
        if sys.stdout.isatty():
            try:
                from rich import progress
            except ImportError:
                print("(for a progress bar, install rich)")
            else:
                self._bar = progress.Progress(
                    progress.TextColumn("{task.completed}/{task.total}"),
                    progress.BarColumn(),
                    progress.TextColumn("{task.description}"),
                    progress.TimeRemainingColumn(),
                )
                self._task = self._bar.add_task("", total=steps, completed=first_step)
                self._bar.start()

    def update(self, line: dict[str, Any]) -> None:
        """Show one step's metrics."""
        text = f"loss {line['loss']:.3f}  {line['tokens_per_s']:,.0f} tokens/s  {line['memory_mb']:,.0f} MB"
        if self._bar is not None:
            self._bar.update(self._task, completed=line["step"], description=text)
        elif line["step"] % self._every == 0 or line["step"] == self._steps:
            print(f"step {line['step']:>5}/{self._steps}  {text}", flush=True)

    def note(self, text: str) -> None:
        """Print a line of its own."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def draw_loss_curve(metrics: Sequence[dict[str, Any]], path: Path) -> str:
    """Draw the losses to ``path`` and return a line that says so, or why not."""
    try:
        import matplotlib
    except ImportError:
        return "loss curve not drawn: install matplotlib"
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([line["step"] for line in metrics], [line["loss"] for line in metrics], linewidth=0.8, label="training")
    held_back = [line for line in metrics if "held_back_loss" in line]
    axes.plot(
        [line["step"] for line in held_back], [line["held_back_loss"] for line in held_back], "o-", label="held back"
    )
    axes.set(xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"loss curve: {path}"

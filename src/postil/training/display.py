r"""What a person sees while a model trains.

On a terminal one line stays in place and moves; above it scroll evaluations and samples, which are worth
keeping. In a log file, where nothing can move, the same facts come as whole lines, every few seconds.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

__all__ = ["Display", "duration", "visible"]

SECONDS_BETWEEN_LINES = 5.0


def visible(text: str) -> str:
    r"""Make control characters visible, all but newline and tab: what a model writes may hold any.

    An escape sequence in a sample could otherwise move the cursor, or retitle the window, of whoever watches.
    """
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def duration(seconds: float) -> str:
    r"""Write seconds as a person would: `8 s`, `3:20`, `1:02:05`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Display:
    r"""Progress of one run on a console; `quiet` (all processes but the first) shows nothing."""

    def __init__(self, total: int | None, unit: str, console: Console | None = None, quiet: bool = False):
        self.console = console or Console(quiet=quiet, highlight=False)
        self.total = total
        self.unit = unit
        self._began = time.monotonic()
        self._last_line = -SECONDS_BETWEEN_LINES
        self._progress = Progress(
            TextColumn("update"),
            _Count(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[facts]}"),
            console=self.console,
            transient=True,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("", total=total, facts="")

    def __enter__(self) -> Display:
        self._began = time.monotonic()
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(
        self,
        n: int,
        loss: float,
        bits: float,
        tokens_per_second: float,
        utilisation: float,
        remaining: float | None,
    ) -> None:
        r"""Show an update: loss in nats, bits a unit, training speed, and the time it will still take.

        `utilisation` is the share of the speed that the devices are capable of.
        """
        facts = f"loss {loss:.3f}  {bits:.3f} {self.unit}  {tokens_per_second:,.0f} tokens/s"
        facts += f"  {100 * utilisation:.0f} % MFU"
        if remaining is not None:
            facts += f"  {duration(remaining)} left"
        if self.console.is_terminal:
            self._progress.update(self._task, completed=n, facts=facts)
        elif time.monotonic() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.monotonic()
            of = f"/{self.total}" if self.total else ""
            self.console.print(f"update {n}{of}  {facts}", markup=False)

    def evaluation(self, n: int, loss: float, bits: float, accuracy: float, best: bool) -> None:
        r"""Show what the validation text says."""
        mark = "  [bold green]best[/]" if best else ""
        self.console.print(
            f"[bold]update {n}[/]  validation loss {loss:.3f}  [bold]{bits:.3f} {self.unit}[/]"
            f"  accuracy {100 * accuracy:.1f} %{mark}"
        )

    def sample(self, prompt: str, text: str) -> None:
        r"""Show a prompt and how the model continues it."""
        self.console.print(
            f"  [dim]{escape(visible(prompt))}[/]{escape(visible(text))}".replace("\n", "\n  ")
        )

    def message(self, text: str, style: str | None = None) -> None:
        r"""Show a line."""
        self.console.print(text, markup=False, style=style)


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        r"""Write `done/total`, or `done` where only time ends the run."""
        return Text(f"{int(task.completed)}" + (f"/{int(task.total)}" if task.total else ""))

"""Progress of something long: a bar on a terminal, timestamped lines elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

LINE_EVERY_S = 2.0
"""Elsewhere than on a terminal, a line is written no more often than this."""


class Progress:
    """Shows what is being done and how much of it is done: `with Progress(console) as progress`, then
    `progress.show("training", 0.4)`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._started_s = time.monotonic()
        self._written_s = -LINE_EVERY_S
        self._written = ""

    def __enter__(self) -> "Progress":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, what: str, done: float) -> None:
        """`done` is the fraction that is done."""
        if self._console.is_terminal:
            if self._task is None:
                self._task = self._bars.add_task(what, total=1.0)
            self._bars.update(self._task, description=what, completed=done)
            return
        now_s = time.monotonic() - self._started_s
        # What has just begun is said at once; the counting of steps only now and then.
        begins = done == 0 and what != self._written
        if now_s - self._written_s >= LINE_EVERY_S or done >= 1 or begins:
            self._written_s, self._written = now_s, what
            self._console.print(f"[{now_s:6.1f} s] {what} {done:4.0%}", markup=False)

"""Progress of work that is counted in bytes: a live bar with rate and time left on a terminal, else plain lines."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from equipoise.checkpoint.sizes import in_words

PLAIN_EVERY_S = 10.0


class ByteProgress:
    """A context manager around the work; call it with the bytes done and those of the whole.

    shown: whether anything is written at all, to standard error.
    """

    def __init__(self, what: str, shown: bool = True) -> None:
        self._what, self._shown = what, shown
        self._console = Console(stderr=True, highlight=False)
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._started = self._said = time.monotonic()

    def __enter__(self) -> Self:
        self._started = self._said = time.monotonic()
        if self._shown and sys.stderr is not None and sys.stderr.isatty():
            columns = (BarColumn(20), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._live = Progress(TextColumn(self._what), *columns, console=self._console, transient=True)
            self._task = self._live.add_task(self._what, total=None)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, done: int, total: int) -> None:
        """Shows where the work stands."""
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=done, total=total)
            return
        now = time.monotonic()
        if not self._shown or done == 0 or now - self._said < PLAIN_EVERY_S:
            return
        self._said = now
        rate = done / (now - self._started)
        left = (total - done) / rate
        print(
            f"{self._what}: {in_words(done)} of {in_words(total)}, {in_words(rate)}/s, {left:.0f} s left",
            file=sys.stderr,
            flush=True,
        )

"""What a run shows: a live line on a terminal, else a plain line per log interval; a summary at the end."""

import contextlib
import io
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """rich would end the process here; `TrainConsole` goes on without."""
        raise BrokenPipeError


class TrainConsole:
    """Shows progress on rank 0; on other ranks every call does nothing. A context manager around training.

    When the stream is lost (a closed pipe or terminal), training goes on and nothing more is shown.

    total_steps: the last optimizer step of the run; first_step: steps finished before it (a resumed run's).
    stream: where to write, stdout by default; a live line is drawn only if it is a terminal.
    """

    def __init__(self, total_steps: int, rank: int = 0, *, first_step: int = 0, stream: TextIO | None = None) -> None:
        self._total, self._first = total_steps, first_step
        self._stream = stream or sys.stdout or io.StringIO()  # Python has no stdout where it is closed from the start
        self._shown = rank == 0
        self._live = self._shown and self._stream.isatty()
        self._console = _Console(file=self._stream, highlight=False, soft_wrap=not self._live)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._started = time.monotonic()
        self._eval_loss: float | None = None

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self._live:
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(self._total)) + 1)),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[line]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
                TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=len("0:00:00"))),
                console=self._console,
                auto_refresh=True,
                refresh_per_second=4,
            )
            self._task = self._progress.add_task("train", total=self._total, completed=self._first, line="")
            with self._until_lost():
                self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def update(self, record: Mapping[str, Any]) -> None:
        """Shows a record as it is written to metrics.jsonl; it needs a `step`, other fields may be absent."""
        if not self._shown:
            return
        step = int(record["step"])
        if record.get("eval_loss") is not None:
            self._eval_loss = float(record["eval_loss"])
        # The live line keeps the latest evaluation; of plain lines only that of its step shows it.
        eval_loss = self._eval_loss if self._live else record.get("eval_loss")
        line = describe(record, eval_loss, self._remaining_s(step))
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, line=line)
        else:
            self._print(f"step {step}/{self._total}  {line}")

    def message(self, text: str) -> None:
        """A line of text, above the live line where there is one."""
        if self._shown:
            self._print(text)

    def finish(
        self,
        step: int,
        loss: float | None = None,
        eval_loss: float | None = None,
        files: Mapping[str, Path] | None = None,
        ended: str = "finished",
    ) -> None:
        """Ends the live line and prints the summary: steps, time, losses and the files written.

        `files` is keyed by what they are ("metrics"); `ended` says how the run ended ("stopped by SIGTERM").
        """
        if not self._shown:
            return
        self._stop()
        seconds = time.monotonic() - self._started
        rows = [("steps", f"{step} of {self._total}"), ("time", duration(seconds))]
        if loss is not None:
            rows.append(("loss", f"{loss:.4f}"))
        eval_loss = self._eval_loss if eval_loss is None else eval_loss
        if eval_loss is not None:
            rows.append(("eval loss", f"{eval_loss:.4f}"))
        rows += [(what, str(path)) for what, path in (files or {}).items()]
        if not self._live:
            self._print(f"training {ended}")
            for name, value in rows:
                self._print(f"  {name}: {value}")
            return
        table = Table(show_header=False, box=None, title=f"training {ended}", title_justify="left")
        for name, value in rows:
            table.add_row(name, Text(value, overflow="fold"))
        self._print(table)

    def _remaining_s(self, step: int) -> float | None:
        done = step - self._first
        if done <= 0 or step >= self._total:
            return None
        return (time.monotonic() - self._started) / done * (self._total - step)

    def _print(self, what: str | Table) -> None:
        if not self._shown:
            return
        with self._until_lost():
            self._console.print(what, markup=False)
            self._stream.flush()

    def _stop(self) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            with self._until_lost():
                progress.stop()

    @contextlib.contextmanager
    def _until_lost(self) -> Iterator[None]:
        """Show nothing more once the stream refuses to be written."""
        try:
            yield
        except OSError:
            self._shown = False
            # What is still buffered goes nowhere; else Python would try again at exit, and fail.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), self._stream.fileno())


def describe(record: Mapping[str, Any], eval_loss: float | None, remaining_s: float | None) -> str:
    """One line for a record: loss, or in post-training the reward, tokens/s, rank imbalance (routed, and as balancing
    delivers it), the evaluation given, time left."""
    parts = []
    if record.get("reward_mean") is not None:
        parts.append(f"reward {record['reward_mean']:.3f}")
    if "loss" in record:
        loss = record["loss"]
        parts.append("loss not finite" if loss is None else f"loss {loss:.4f}")
    if record.get("tokens_per_second") is not None:
        parts.append(f"{count(record['tokens_per_second'])} tokens/s")
    if record.get("rank_imbalance") is not None:
        balanced = record.get("rank_imbalance_after")
        evened_out = "" if balanced is None else f" -> {balanced:.2f}"
        parts.append(f"imbalance {record['rank_imbalance']:.2f}{evened_out}")
    if eval_loss is not None:
        parts.append(f"eval {eval_loss:.4f}")
    if record.get("eval_reward") is not None:
        parts.append(f"eval reward {record['eval_reward']:.3f}")
    if remaining_s is not None:
        parts.append(f"ETA {duration(remaining_s)}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as s, min:s or h:min:s."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def count(value: float) -> str:
    """A number in at most four characters of digits, with k, M or G."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"

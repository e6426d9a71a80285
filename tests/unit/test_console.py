"""What a run prints: plain lines where there is no terminal, a live line on one, nothing on other ranks."""

import io
import os
from pathlib import Path
from typing import Any

import pytest

from equipoise.train.console import TrainConsole, count, duration

RECORD = {"step": 10, "loss": 2.51234, "tokens_per_second": 12345.6, "rank_imbalance": 1.254, "lr": 1e-3}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(stream: io.StringIO, rank: int = 0) -> str:
    with TrainConsole(100, rank, stream=stream) as console:
        console.message("corpus: 3 files [12 MB]")
        console.update(RECORD)
        console.update({**RECORD, "step": 20, "loss": None, "eval_loss": 2.75})
        console.update({**RECORD, "step": 30})
        console.finish(30, loss=2.4, files={"metrics": Path("runs/a/metrics.jsonl")}, ended="stopped by SIGTERM")
    return stream.getvalue()


def test_without_a_terminal_each_update_is_one_plain_line() -> None:
    text = run(io.StringIO())
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0] == "corpus: 3 files [12 MB]"
    assert lines[1].startswith("step 10/100  loss 2.5123  12.3k tokens/s  imbalance 1.25  ETA ")
    assert lines[2].startswith("step 20/100  loss not finite  12.3k tokens/s  imbalance 1.25  eval 2.7500  ETA ")
    assert "eval" not in lines[3]  # a later step, which was not evaluated
    assert lines[4] == "training stopped by SIGTERM"
    names = [line.strip().split(":")[0] for line in lines[5:]]
    assert names == ["steps", "time", "loss", "eval loss", "metrics"]
    assert lines[5].endswith("30 of 100")
    assert lines[9].endswith("runs/a/metrics.jsonl")


def test_balancing_shows_the_load_before_and_after() -> None:
    stream = io.StringIO()
    with TrainConsole(100, stream=stream) as console:
        console.update({**RECORD, "rank_imbalance_after": 1.004})
    assert "  imbalance 1.25 -> 1.00  " in stream.getvalue()


@pytest.mark.parametrize("columns", [60, 80])
def test_a_narrow_terminal_keeps_the_step(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    text = run(Terminal())
    assert "30/100" in text
    assert "…/" not in text


def test_long_lines_are_not_broken() -> None:
    stream = io.StringIO()
    TrainConsole(1, stream=stream).message("x" * 500)
    assert stream.getvalue() == "x" * 500 + "\n"


def test_on_a_terminal_the_line_is_live_and_the_summary_is_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    text = run(Terminal())
    assert "\x1b[" in text
    assert "imbalance 1.25" in text
    assert "eval 2.7500" in text[text.rindex("30/100") :], "the live line keeps the latest evaluation"
    assert text.index("corpus: 3 files [12 MB]") < text.index("training stopped by SIGTERM")
    assert "runs/a/metrics.jsonl" in text


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_other_ranks_print_nothing(stream: Any) -> None:
    assert run(stream, rank=1) == ""


def test_a_resumed_run_estimates_from_its_own_steps() -> None:
    stream = io.StringIO()
    with TrainConsole(100, first_step=90, stream=stream) as console:
        console._started -= 50  # 5 steps took 50 s
        console.update({"step": 95, "loss": 1.0})
        console.update({"step": 100, "loss": 1.0})
    assert "ETA 50 s" in stream.getvalue()
    assert "ETA" not in stream.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (9.96, "10 s"), (59.6, "1:00"), (3599.6, "1:00:00"), (90061, "25:01:01")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (999, "999"), (1234, "1.23k"), (2.5e7, "25M"), (1e10, "10G")])
def test_count(value: float, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize("terminal", [False, True])
def test_a_lost_stream_ends_the_display_and_not_the_training(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`equipoise train ... | head -1`: the reader is gone after the first line."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
        with TrainConsole(3, stream=stream) as console:
            os.close(reader)
            for step in (1, 2, 3):
                console.update({"step": step, "loss": 2.0})
            console.message("still here")
            console.finish(3, 2.0)
        assert not console._shown, "the loss of the stream went unnoticed"
        stream.write("what Python still has to flush at its exit")


def test_no_stdout_at_all_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)  # as with `>&-`
    with TrainConsole(1) as console:
        console.update({"step": 1, "loss": 2.0})
        console.finish(1, 2.0)
        assert console._shown, "a missing stream was taken for a lost one"

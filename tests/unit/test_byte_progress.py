"""Progress counted in bytes: plain lines with rate and time left where there is no terminal."""

import pytest

from equipoise.train import progress
from equipoise.train.progress import ByteProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_every_ten_seconds_with_rate_and_time_left(clock: list[float], capsys: pytest.CaptureFixture) -> None:
    with ByteProgress("convert x") as bar:
        for second in range(0, 25):
            clock[0] = 100.0 + second
            bar(second * 100_000_000, 4_000_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "convert x: 1.00 GB of 4.00 GB, 100 MB/s, 30 s left",
        "convert x: 2.00 GB of 4.00 GB, 100 MB/s, 20 s left",
    ]


def test_nothing_on_other_ranks(clock: list[float], capsys: pytest.CaptureFixture) -> None:
    with ByteProgress("load x", shown=False) as bar:
        clock[0] += 100
        bar(1, 2)
    assert capsys.readouterr().err == ""

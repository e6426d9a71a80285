"""Files written whole or not at all; names that are free."""

import os
from pathlib import Path

import pytest

from equipoise.files import free_name, written_whole


def test_a_file_takes_its_place_when_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    path.write_text("earlier")
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(partial.read_text()), fsync(file))[1])
    with written_whole(path) as partial:
        partial.write_text("whole")
        assert path.read_text() == "earlier"
    assert path.read_text() == "whole"
    assert synced == ["whole"], "it was not on the disk before it took the place"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("began", [True, False])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: BaseException, began: bool) -> None:
    path = tmp_path / "a.json"
    path.write_text("earlier")

    def write() -> None:
        with written_whole(path) as partial:
            if began:
                partial.write_text("ha")
            raise error

    with pytest.raises(type(error)):
        write()
    assert path.read_text() == "earlier"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_of_two_processes_the_last_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.json"
    own = tmp_path / "a.json.tmp"
    own.write_text("somebody's")
    with written_whole(path) as first:
        first.write_text("first")
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with written_whole(path) as second:
            second.write_text("second")
            assert first.read_text() == "first"
    assert path.read_text() == "first"
    assert own.read_text() == "somebody's"


def test_a_file_that_nobody_wrote_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), written_whole(tmp_path / "a.json"):
        pass
    assert not list(tmp_path.iterdir())


def test_free_names_count_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.previous.jsonl"
    names = []
    for _ in range(3):
        free = free_name(path)
        free.touch()
        names.append(free.name)
    assert names == ["metrics.previous.jsonl", "metrics.previous-2.jsonl", "metrics.previous-3.jsonl"]

"""The run folder holds the resolved configuration, which reads back equal, and how the run was started."""

import contextlib
import fcntl
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from toy_config import ToyConfig

from equipoise.checkpoint import layout
from equipoise.checkpoint.manifest import Manifest, describe_file, write_manifest
from equipoise.errors import CheckpointError, ConfigError, DataError, EquipoiseError
from equipoise.train import resolved
from equipoise.train.load import load_config, parse_config
from equipoise.train.resolved import check_run_folder, hold_run_folder, removed_if_empty, save_resolved, to_toml

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
numbers = st.floats(allow_nan=False, allow_infinity=False)  # settings refuse what JSON cannot hold


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    label=st.none() | words.filter(lambda w: w.lower() != "none"),
    tokenizer=words.filter(lambda w: " " not in w),
    names=st.lists(words, max_size=3),
    weights=st.dictionaries(words, numbers, max_size=3),
    layers=st.lists(st.integers(-(2**62), 2**62), max_size=3).map(tuple),
    clip=st.none() | numbers,
    path=st.none() | st.just(Path("a b/\u00e9.txt")),
    balance=st.none() | st.just({}) | st.just({"slots": 3}),
)
def test_every_configuration_reads_back_equal(
    label: Any, tokenizer: Any, names: Any, weights: Any, layers: Any, clip: Any, path: Any, balance: Any
) -> None:
    config = ToyConfig.model_validate(
        {
            "label": label,
            "data": {"tokenizer": tokenizer, "names": names, "weights": weights, "path": path},
            "model": {"mlp_only_layers": layers},
            "optimizer": {"clip": clip},
            "balance": balance,
        }
    )
    assert parse_config(ToyConfig, to_toml(config)) == config


def test_none_is_written_out_and_survives_a_default_that_is_not_none() -> None:
    config = load_config(ToyConfig, None, ["--optimizer.clip", "none"])
    assert 'clip = "none"' in to_toml(config)
    assert 'balance = "none"' in to_toml(config)
    assert parse_config(ToyConfig, to_toml(config)) == config


def test_a_text_that_a_recipe_would_read_as_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"label = \"None\""):
        to_toml(ToyConfig(label="None"))


def test_the_choice_none_is_not_the_value_none() -> None:
    config = ToyConfig()
    assert config.train.limit == "none"
    assert parse_config(ToyConfig, to_toml(config)).train.limit == "none"


def test_the_run_folder_repeats_the_run_and_says_how_it_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(ToyConfig, None, ["--train.steps", "3", "--data.path", "x y"])
    argv = ["equipoise", "train", "demo", "--data.path", "x y"]
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cpu")
    save_resolved(config, tmp_path / "run", argv, "equipoise train demo")
    assert load_config(ToyConfig, tmp_path / "run" / "config.toml") == config
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["command"] == "equipoise train demo --data.path 'x y'"
    assert run["argv"] == argv
    assert run["typed"] == "equipoise train demo"
    assert run["environment"]["EQUIPOISE_ACCELERATOR"] == "cpu"
    assert all(name.startswith("EQUIPOISE_") for name in run["environment"])
    assert set(run) >= {"started", "hostname", "git_commit", "versions", "working_directory"}
    assert set(run["versions"]) == {"equipoise", "python", "torch", "triton"}
    assert run["started"].endswith("+00:00")
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["config.toml", "run.json"]


def test_files_are_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_resolved(ToyConfig(), tmp_path, ["first"])
    before = (tmp_path / "config.toml").read_text()

    def fail(source: Any, target: Any) -> None:
        assert Path(source).parent == tmp_path
        raise OSError("disk full")

    monkeypatch.setattr(resolved.os, "replace", fail)
    with pytest.raises(EquipoiseError, match=r"disk full.*--out"):
        save_resolved(ToyConfig(label="second"), tmp_path, ["second"])
    assert (tmp_path / "config.toml").read_text() == before


def test_the_commit_is_that_of_the_sources_and_not_of_a_repository_around_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / ".venv" / "equipoise"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "m"], check=True)
    monkeypatch.setattr(resolved.equipoise, "__file__", str(package / "__init__.py"))
    assert resolved.source_commit() is None
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "n"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert resolved.source_commit() == commit
    monkeypatch.setenv("PATH", "")
    assert resolved.source_commit() is None


def test_a_run_folder_is_held_by_one_run_at_a_time(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with hold_run_folder(folder):
        with pytest.raises(ConfigError, match=r"mine is in use by another run.*--out"), hold_run_folder(folder):
            pass
        with hold_run_folder(tmp_path / "runs" / "other"):
            pass
    with hold_run_folder(folder):  # free again, and nothing is in it
        assert not list(folder.iterdir())


def test_a_run_that_fails_before_it_kept_anything_leaves_no_folder(tmp_path: Path) -> None:
    new, kept, old = tmp_path / "runs" / "new", tmp_path / "kept", tmp_path / "old"
    old.mkdir()
    for folder in (new, kept, old):
        with contextlib.suppress(DataError), hold_run_folder(folder):
            assert folder.is_dir()
            if folder == kept:
                (folder / "config.toml").touch()
            raise DataError("no text")
    assert not new.exists()
    assert list(kept.iterdir()) == [kept / "config.toml"]
    assert old.is_dir()  # not this run's
    with removed_if_empty(old, made=True), hold_run_folder(old):
        pass
    assert not old.exists()
    with hold_run_folder(new):
        with removed_if_empty(new, made=True):
            pass
        assert new.is_dir()  # another run has it by now


class Swapped:
    """`fcntl` whose first lock comes too late: the folder at the path was removed before it, and perhaps made again."""

    def __init__(self, folder: Path, made_again: bool) -> None:
        self.folder, self.made_again, self.calls = folder, made_again, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(fcntl, name)

    def flock(self, handle: int, kind: int) -> None:
        self.calls += 1
        if self.calls == 1:
            self.folder.rename(self.folder.with_name("gone"))  # whose number is not given to the next one
            if self.made_again:
                self.folder.mkdir()
        fcntl.flock(handle, kind)


@pytest.mark.parametrize("made_again", [False, True])
def test_a_folder_that_is_removed_while_it_is_taken_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_again: bool
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(resolved, "fcntl", Swapped(folder, made_again))
    with hold_run_folder(folder):
        with pytest.raises(ConfigError, match="in use by another run"), hold_run_folder(folder):
            pass
        assert folder.is_dir()
    assert folder.exists() == made_again  # which another run made, and may still want
    monkeypatch.setattr(resolved, "fcntl", Swapped(folder, made_again))
    (tmp_path / "gone").rmdir()
    folder.mkdir(exist_ok=True)
    check_run_folder(folder, resume=True, resume_step=None)


def test_a_folder_that_another_run_has_made_anew_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with removed_if_empty(folder, made=True):
        monkeypatch.setattr(resolved, "fcntl", Swapped(folder, made_again=True))
    assert folder.is_dir()


def test_who_removes_a_folder_does_not_count_as_a_run_that_holds_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)

    def remove() -> None:
        folder.rmdir()
        os.close(handle)

    timer = threading.Timer(0.05, remove)
    timer.start()
    with hold_run_folder(folder):
        assert folder.is_dir()
    timer.join()
    assert not folder.exists()


def test_many_short_runs_in_one_folder_never_share_it_nor_lose_it(tmp_path: Path) -> None:
    folder, inside, ended = tmp_path / "run", [0], [0]
    wrong: list[object] = []

    def once() -> None:
        with removed_if_empty(folder, made=True):
            check_run_folder(folder, resume=True, resume_step=None)
            with hold_run_folder(folder):
                inside[0] += 1
                if inside[0] != 1 or not folder.is_dir():
                    wrong.append(inside[0])
                inside[0] -= 1
                ended[0] += 1

    def run() -> None:
        for _ in range(150):
            try:
                once()
            except ConfigError as error:
                if "in use" not in str(error):
                    wrong.append(error)
            except OSError as error:
                wrong.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert ended[0] > 100
    assert not folder.exists()


def test_a_file_in_place_of_the_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    for name, what in (("file", "file cannot be made"), ("link", "link cannot be read: No such file")):
        with pytest.raises(ConfigError, match=rf"{what}.*--out"), hold_run_folder(tmp_path / name):
            pass


@pytest.mark.parametrize(
    "name",
    ["config.toml", "run.json", "metrics.jsonl", "checkpoints/checkpoint-500/x", "trace/load.parquet", "tensorboard/x"],
)
def test_files_that_no_run_wrote_are_not_replaced(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("mine")
    first = name.split("/")[0]
    for use in (hold_run_folder(tmp_path), contextlib.nullcontext()):
        with pytest.raises(ConfigError, match=rf"holds {first} that no run has written.*add to it; .*--out"), use:
            check_run_folder(tmp_path, resume=True, resume_step=None)
    assert (tmp_path / name).read_text() == "mine"
    save_step(tmp_path, 2)  # a run's folder, whose settings were edited or damaged: it resumes
    with hold_run_folder(tmp_path):
        pass


def test_other_files_in_a_new_run_folder_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in "abcdefg":
        (tmp_path / f"{name}.txt").touch()
    (tmp_path / "checkpoints").mkdir()  # empty: nothing to lose
    with caplog.at_level("INFO"), hold_run_folder(tmp_path):
        assert "holds other files, which stay as they are: a.txt, b.txt, c.txt, d.txt, e.txt and 2 more" in caplog.text
    save_resolved(ToyConfig(), tmp_path, ["first"])
    caplog.clear()
    with caplog.at_level("INFO"), hold_run_folder(tmp_path):
        assert caplog.text == ""


def test_the_folder_of_a_run_without_checkpoints_is_used_again(tmp_path: Path) -> None:
    save_resolved(ToyConfig(), tmp_path, ["first"])
    with hold_run_folder(tmp_path):
        pass


def save_step(folder: Path, step: int, went_back: int | None = None) -> None:
    path = layout.step_path(folder / "checkpoints", step)
    path.mkdir(parents=True)
    (path / layout.TRAIN_STATE).write_text(json.dumps({"extra": {"resume_step": went_back}}))
    files = {file.name: describe_file(file) for file in path.iterdir()}
    write_manifest(path, Manifest(step, 1, files))


def test_a_run_folder_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    """What a run would find out after its data, or after its start: that it cannot go on there."""
    new, file = tmp_path / "a" / "new", tmp_path / "file"
    file.touch()
    check_run_folder(new, resume=True, resume_step=None)
    check_run_folder(new, resume=False, resume_step=None)
    for path in (file, file / "below"):
        with pytest.raises(ConfigError, match=rf"{path.name} cannot be made: {file} is a file"):
            check_run_folder(path, resume=True, resume_step=None)
    with pytest.raises(CheckpointError, match=r"cannot resume from step 4: .*run: none"):
        check_run_folder(new, resume=True, resume_step=4)
    assert sorted(tmp_path.iterdir()) == [file]


def test_what_is_in_a_run_folder_decides_whether_a_run_can_go_on(tmp_path: Path) -> None:
    for step in (2, 4):
        save_step(tmp_path, step)
    check_run_folder(tmp_path, resume=True, resume_step=None)
    check_run_folder(tmp_path, resume=True, resume_step=2)
    with pytest.raises(CheckpointError, match=r"cannot resume from step 3: .*run: 2, 4"):
        check_run_folder(tmp_path, resume=True, resume_step=3)
    with pytest.raises(CheckpointError, match="holds step-00000004 of an earlier run"):
        check_run_folder(tmp_path, resume=False, resume_step=None)
    save_step(tmp_path, 6, went_back=1)  # the step it went back to may be deleted by then
    check_run_folder(tmp_path, resume=True, resume_step=1)
    with hold_run_folder(tmp_path), pytest.raises(ConfigError, match="in use by another run"):
        check_run_folder(tmp_path, resume=True, resume_step=None)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc")
def test_a_file_system_that_cannot_be_written_is_named() -> None:
    """Where permissions do not tell, as of root."""
    with pytest.raises(ConfigError, match=r"/proc/x/y cannot be made: /proc cannot be written \(.*--out"):
        check_run_folder(Path("/proc/x/y"), resume=True, resume_step=None)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=f"new cannot be made: {tmp_path} cannot be written"):
        check_run_folder(tmp_path / "new", resume=True, resume_step=None)

"""Training checkpoints in one process: what is complete, what is refused before a change, what is kept."""

import errno
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from equipoise import files
from equipoise.accelerator import CPUAccelerator
from equipoise.checkpoint import layout, saver
from equipoise.checkpoint.layout import WENT_BACK
from equipoise.checkpoint.manifest import MANIFEST, Manifest, describe_file, write_manifest
from equipoise.checkpoint.saver import Progress
from equipoise.checkpoint.shards import LaterWriter
from equipoise.checkpoint.training import (
    CheckpointSaver,
    TrainingState,
    choose_checkpoint,
    find_latest,
    load_checkpoint,
    refuse_existing,
    save_checkpoint,
)
from equipoise.errors import CheckpointError


class OneRank:
    """A world of this process alone."""

    rank, size, accelerator = 0, 1, CPUAccelerator()

    @contextmanager
    def operation(self, name: str) -> Iterator[None]:
        yield


WORLD = OneRank()


class Model(nn.Module):
    """A tied weight, a bias without gradient in training, a persistent and a temporary buffer."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, width)
        self.head = nn.Linear(width, 4, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.zeros(2))
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(5), persistent=False)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids_T)) + self.bias


def trained(steps: int = 2, width: int = 3, model: nn.Module | None = None) -> TrainingState:
    torch.manual_seed(0)
    model = model if model is not None else Model(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.tensor([0, 1, 3])).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return TrainingState(model, optimizer, step=steps, loader={"position": 3}, config={"model": {"width": width}})


def fresh(width: int = 3) -> TrainingState:
    model = Model(width)
    return TrainingState(model, torch.optim.AdamW(model.parameters(), lr=0.1))


def test_everything_comes_back(tmp_path: Path) -> None:
    saved = trained()
    saved.model.bias.add_(0.25)  # changed in place
    saved.metrics_position, saved.seed, saved.extra = 123, 7, {"tokens": 2**40}
    path = save_checkpoint(tmp_path / "checkpoints", saved, WORLD)
    assert path == tmp_path / "checkpoints" / "step-00000002"
    loaded = fresh()
    meta = load_checkpoint(path, loaded, WORLD)
    assert (meta.step, meta.seed, meta.metrics_position, meta.world_size) == (2, 7, 123, 1)
    assert (meta.loader, meta.config, meta.extra) == (saved.loader, saved.config, saved.extra)
    for name, value in saved.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name
    assert loaded.model.head.weight is loaded.model.embed.weight
    want = saved.optimizer.state[saved.model.embed.weight]
    got = loaded.optimizer.state[loaded.model.embed.weight]
    assert got.keys() == want.keys()
    assert all(torch.equal(got[slot], want[slot]) for slot in want)
    assert got["step"] == 2


def test_a_buffer_that_was_replaced_is_saved_as_it_is_now(tmp_path: Path) -> None:
    saved = trained()
    saved.model.bias = torch.tensor([-0.003, 0.003, 0.003, 0.003])
    path = save_checkpoint(tmp_path, saved, WORLD)
    loaded = fresh()
    load_checkpoint(path, loaded, WORLD)
    assert torch.equal(loaded.model.bias, torch.tensor([-0.003, 0.003, 0.003, 0.003]))


def test_a_parameter_that_never_had_a_gradient_has_no_moments_after_a_resume_either(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(), WORLD)
    loaded = fresh()
    load_checkpoint(path, loaded, WORLD)
    assert loaded.model.unused not in loaded.optimizer.state


def test_a_state_before_the_first_step_can_be_saved(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(0), WORLD)
    assert load_checkpoint(path, trained(2), WORLD).step == 0


def test_the_optimizers_own_hyperparameters_stay(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(), WORLD)
    loaded = fresh()
    loaded.optimizer.param_groups[0]["lr"] = 0.5
    load_checkpoint(path, loaded, WORLD)
    assert loaded.optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("wrap", [torch.compile, nn.Sequential], ids=["compiled", "unchanged"])
def test_compiling_does_not_change_names(tmp_path: Path, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Linear(2, 2)
    wrapped = wrap(model)
    path = save_checkpoint(tmp_path, TrainingState(wrapped, torch.optim.AdamW(wrapped.parameters())), WORLD)
    names = json.loads((path / layout.TRAIN_STATE).read_text())["optimizer_stateless"]
    assert names == (["0.weight", "0.bias"] if wrap is nn.Sequential else ["weight", "bias"])


def renamed() -> TrainingState:
    state = fresh()
    state.model.other = state.model.unused
    del state.model.unused
    return state


def bias_in_half() -> TrainingState:
    state = fresh()
    state.model.bias = state.model.bias.half()
    return state


def frozen() -> TrainingState:
    model = Model()
    return TrainingState(model, torch.optim.AdamW([model.unused]))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: fresh(width=5), ["'embed.weight'", "[4, 3]", "[4, 5]"]),
        (renamed, ["'other' of the model is missing", "'unused' of the checkpoint is not in the model"]),
        (bias_in_half, ["'bias'", "torch.float32", "torch.float16"]),
        (frozen, ["'embed.weight'", "no parameter that is trained"]),
    ],
    ids=["shape", "name", "dtype", "optimizer"],
)
def test_another_model_is_refused_by_name_before_anything_changes(
    tmp_path: Path, make: Callable[[], TrainingState], said: list[str]
) -> None:
    path = save_checkpoint(tmp_path, trained(), WORLD)
    state = make()
    before = {name: value.clone() for name, value in state.model.state_dict().items()}
    random_state = torch.get_rng_state()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, state, WORLD)
    assert all(part in str(caught.value) for part in said), caught.value
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())
    assert not state.optimizer.state
    assert torch.equal(torch.get_rng_state(), random_state)


def test_settings_that_change_the_weights_are_named_instead_of_tensors(tmp_path: Path) -> None:
    saved = trained()
    saved.config = {"model": {"num_experts": 8, "hidden_size": 64, "rope_theta": 1.0, "router_z_loss_coef": 0.0}}
    path = save_checkpoint(tmp_path, saved, WORLD)
    state = fresh(width=5)
    state.config = {"model": {"num_experts": 16, "hidden_size": 64, "rope_theta": 2.0, "router_z_loss_coef": 0.1}}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path, state, WORLD)
    assert str(caught.value) == (
        f"{path}: the checkpoint is of a model with other weights: model.num_experts: the checkpoint has 8, this run "
        "has 16; model.rope_theta: the checkpoint has 1.0, this run has 2.0. No parameter was changed. Use the "
        "settings of config.toml in the run folder, or choose another run folder with --out"
    )
    state.config["model"]["num_experts"] = 8  # then the settings do not explain it
    with pytest.raises(CheckpointError, match=r"'embed\.weight' has shape \[4, 3\]"):
        load_checkpoint(path, state, WORLD)


def test_moments_that_are_missing_in_a_checkpoint_are_an_error(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(0), WORLD)
    content = json.loads((path / layout.TRAIN_STATE).read_text())
    content["optimizer_stateless"].remove("embed.weight")
    text = json.dumps(content)
    (path / layout.TRAIN_STATE).write_text(text)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][layout.TRAIN_STATE]["bytes"] = len(text)
    (path / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"optimizer state of 'embed.weight' is missing"):
        load_checkpoint(path, fresh(), WORLD)


def damage_manifest(path: Path) -> None:
    (path / MANIFEST).write_text("{")


def truncate_shard(path: Path) -> None:
    shard = next(path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / MANIFEST).unlink(), "did not finish"),
        (damage_manifest, "unreadable"),
        (truncate_shard, "bytes instead of"),
        (lambda path: next(path.glob("*.distcp")).unlink(), "is missing"),
        (lambda path: path.rename(layout.partial_path(path)), "was not finished"),
    ],
    ids=["no manifest", "torn manifest", "short shard", "no shard", "not renamed"],
)
def test_an_incomplete_checkpoint_is_passed_over_with_a_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object], said: str
) -> None:
    state = trained(1)
    older = save_checkpoint(tmp_path, state, WORLD)
    state.step = 2
    newer = save_checkpoint(tmp_path, state, WORLD)
    damage(newer)
    with caplog.at_level(logging.WARNING):
        assert find_latest(tmp_path, WORLD) == older
    assert "step 2 is incomplete and ignored" in caplog.text
    assert said in caplog.text
    with pytest.raises(CheckpointError):
        load_checkpoint(newer, fresh(), WORLD)
    save_checkpoint(tmp_path, state, WORLD)  # can be written again
    assert find_latest(tmp_path, WORLD) == newer


def test_a_complete_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    state = trained()
    path = save_checkpoint(tmp_path, state, WORLD)
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    with pytest.raises(CheckpointError, match="is not overwritten"):
        save_checkpoint(tmp_path, state, WORLD)
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    with pytest.raises(CheckpointError, match="step-00000002 of an earlier run"):
        refuse_existing(tmp_path, WORLD)


def test_no_checkpoints_is_no_error(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "missing", WORLD) is None
    refuse_existing(tmp_path / "missing", WORLD)


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [
        (0, 0, [1, 2, 3, 4, 5]),
        (1, 0, [5]),
        (2, 0, [4, 5]),
        (9, 0, [1, 2, 3, 4, 5]),
        (1, 2, [2, 4, 5]),
        (2, 5, [4, 5]),
        (0, 3, [1, 2, 3, 4, 5]),
        (1, 1, [1, 2, 3, 4, 5]),
    ],
)
def test_the_newest_and_every_nth_are_kept(tmp_path: Path, keep_last: int, keep_every: int, left: list[int]) -> None:
    for step in (1, 2, 3, 4, 5):
        folder = layout.step_path(tmp_path, step)
        folder.mkdir()
        write_manifest(folder, Manifest(step, 1, {}))
        layout.delete_old(tmp_path, step, keep_last, keep_every)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{n:08d}" for n in left]


def test_remains_of_a_dead_run_are_deleted_once_a_later_save_is_complete(tmp_path: Path) -> None:
    state = trained(0)
    save_checkpoint(tmp_path, state, WORLD)
    for name in ("step-00000000.tmp", "step-00000001.tmp", "step-00000009.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__0_0.distcp").write_text("half")
    state.step = 2
    save_checkpoint(tmp_path, state, WORLD, keep_last=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000009.tmp"]


def test_nothing_is_deleted_before_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = trained(0)
    old = save_checkpoint(tmp_path, state, WORLD, keep_last=1)
    state.step = 1

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(layout, "publish", full)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        save_checkpoint(tmp_path, state, WORLD, keep_last=1)
    assert str(tmp_path / "step-00000001") in str(caught.value)
    assert list(tmp_path.iterdir()) == [old]
    assert find_latest(tmp_path) == old


@pytest.mark.parametrize(
    ("part", "wait", "code"),
    [
        ("write", True, errno.ENOSPC),
        ("write", False, errno.EIO),
        ("write_index", False, errno.ENOSPC),
    ],
    ids=["waited for", "in the background", "in the background, after the shards"],
)
def test_a_write_that_fails_is_an_error_and_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, wait: bool, code: int
) -> None:
    state = trained(1)
    writer = CheckpointSaver(tmp_path, WORLD, keep_last=1)
    old = writer.save(state)
    whole = {file.name: file.read_bytes() for file in old.iterdir()}
    state.step = 2
    with monkeypatch.context() as patched:
        patched.setattr(LaterWriter, part, failing(OSError(code, "the system's reason")))
        with pytest.raises(CheckpointError, match="the system's reason") as caught:
            save_to_the_end(writer, state, wait)
    assert str(tmp_path / "step-00000002") in str(caught.value)
    assert "Earlier checkpoints are untouched" in str(caught.value)
    assert list(tmp_path.iterdir()) == [old]
    assert {file.name: file.read_bytes() for file in old.iterdir()} == whole
    assert writer.save(state) == choose_checkpoint(tmp_path, WORLD)  # once there is room


def save_to_the_end(writer: CheckpointSaver, state: TrainingState, wait: bool) -> None:
    writer.save(state, wait)
    writer.finish()


def failing(error: Exception) -> Callable[..., Any]:
    def fails(*args: object, **options: object) -> None:
        raise error

    return fails


def changed_since(state: TrainingState) -> None:
    with torch.no_grad():
        for value in [*state.model.parameters(), *state.model.buffers()]:
            value.add_(1)
        for slots in state.optimizer.state.values():
            for value in slots.values():
                value.mul_(3)
    state.loader["position"] = 99


def test_training_goes_on_while_a_state_is_written_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread waits until the state has changed; what it writes is the state at the call. A second time, as the
    copies lie in the same memory as the first ones."""
    release = threading.Event()
    write = LaterWriter.write

    def slow(*args: Any) -> None:
        assert release.wait(20)
        write(*args)

    monkeypatch.setattr(LaterWriter, "write", slow)
    writer = CheckpointSaver(tmp_path, WORLD)
    state = trained()
    for step in (2, 3):
        state.step, state.loader = step, {"position": step}
        random_state = torch.get_rng_state()
        want = {name: value.clone() for name, value in state.model.state_dict().items()}
        moments = {slot: v.clone() for slot, v in state.optimizer.state[state.model.embed.weight].items()}
        path = writer.save(state, wait=False)
        torch.rand(1)
        changed_since(state)
        assert writer.progress == Progress.BUSY
        writer.advance(Progress.BUSY)
        assert not path.exists()
        release.set()
        deadline = time.monotonic() + 20
        while not path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.001)
            writer.advance(writer.progress)  # as at the end of each step
        writer.finish()
        release.clear()
        loaded = fresh()
        meta = load_checkpoint(path, loaded, WORLD)
        assert meta.loader == {"position": step}
        assert torch.equal(torch.get_rng_state(), random_state)
        assert all(torch.equal(value, want[name]) for name, value in loaded.model.state_dict().items())
        got = loaded.optimizer.state[loaded.model.embed.weight]
        assert all(torch.equal(got[slot], moments[slot]) for slot in moments)


def test_a_save_that_is_due_waits_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = LaterWriter.write

    def slow(*args: Any) -> None:
        time.sleep(0.05)
        write(*args)

    monkeypatch.setattr(LaterWriter, "write", slow)
    monkeypatch.setattr(saver, "NOTED_S", 0.05)
    writer = CheckpointSaver(tmp_path, WORLD)
    state = trained(0)
    for step in (1, 2):
        state.step = step
        writer.save(state, wait=False)
    assert find_latest(tmp_path) == tmp_path / "step-00000001"
    assert "the save of step 1 was still being written when that of step 2 was due" in caplog.text
    writer.save(state)  # the same step: waits for it
    assert find_latest(tmp_path) == tmp_path / "step-00000002"
    assert writer.last_step == 2


def test_a_run_that_fails_lets_go_of_a_save_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = threading.Event()
    monkeypatch.setattr(LaterWriter, "write", lambda *args: never.wait(20))
    monkeypatch.setattr(saver, "ABANDON_S", 0.05)
    writer = CheckpointSaver(tmp_path, WORLD)
    writer.save(trained(0), wait=False)
    started = time.monotonic()
    writer.close()
    assert time.monotonic() - started < 5
    assert find_latest(tmp_path) is None
    never.set()


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def three(tmp_path: Path) -> TrainingState:
    """Checkpoints of steps 1, 2, 3."""
    state = trained(0)
    for step in (1, 2, 3):
        state.step = step
        save_checkpoint(tmp_path, state, WORLD)
    return state


def test_the_manifest_holds_what_sha256sum_prints(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(), WORLD)
    manifest = json.loads((path / MANIFEST).read_text())
    assert sorted(manifest["files"]) == sorted(p.name for p in path.iterdir() if p.name != MANIFEST)
    assert sorted(manifest["files"]) == [".metadata", "__0_0.distcp", "train_state.json"]
    for name, entry in manifest["files"].items():
        assert entry == describe_file(path / name)._asdict()
    (tmp_path / "abc").write_bytes(b"abc")
    assert describe_file(tmp_path / "abc") == (3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad")


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", layout.TRAIN_STATE])
def test_a_damaged_checkpoint_is_passed_over_with_the_file_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, file: str
) -> None:
    three(tmp_path)
    flip_a_bit(tmp_path / "step-00000003" / file)
    assert choose_checkpoint(tmp_path, WORLD) == tmp_path / "step-00000002"
    assert "checkpoint of step 3 is damaged and ignored" in caplog.text
    assert f"file {file} has SHA-256" in caplog.text
    assert choose_checkpoint(tmp_path, WORLD, verify=False) == tmp_path / "step-00000003"
    with pytest.raises(CheckpointError, match=f"cannot resume from step 3: .* is damaged: file {file}"):
        choose_checkpoint(tmp_path, WORLD, resume_step=3)
    assert (tmp_path / "step-00000003" / file).exists()


def test_damage_to_all_checkpoints_is_an_error_and_no_new_start(tmp_path: Path) -> None:
    three(tmp_path)
    for path in tmp_path.iterdir():
        flip_a_bit(path / layout.TRAIN_STATE)
    with pytest.raises(CheckpointError, match=r"every complete .* \(step-00000003, step-00000002, step-00000001\)"):
        choose_checkpoint(tmp_path, WORLD)


def test_a_step_to_resume_from_is_taken_or_refused_with_those_that_are_there(tmp_path: Path) -> None:
    three(tmp_path)
    assert choose_checkpoint(tmp_path, WORLD, resume_step=2) == tmp_path / "step-00000002"
    (tmp_path / "step-00000003" / MANIFEST).unlink()
    for step, reason in ((3, "did not finish"), (7, "no such folder")):
        with pytest.raises(CheckpointError, match=rf"step {step}.*{reason}.* Complete checkpoints of the run: 1, 2\."):
            choose_checkpoint(tmp_path, WORLD, resume_step=step)
    with pytest.raises(CheckpointError, match="Complete checkpoints of the run: none"):
        choose_checkpoint(tmp_path / "empty", WORLD, resume_step=1)


def test_a_command_that_goes_back_and_is_started_again_keeps_what_it_trained_since(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = three(tmp_path)
    state.step, state.extra = 4, {WENT_BACK: 2}
    save_checkpoint(tmp_path, state, WORLD)
    assert choose_checkpoint(tmp_path, WORLD, resume_step=2) == tmp_path / "step-00000004"
    assert "trained after the run went back to step 2" in caplog.text
    assert choose_checkpoint(tmp_path, WORLD, resume_step=1) == tmp_path / "step-00000001"


def test_newer_checkpoints_are_set_aside_and_never_deleted(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("lines")
    folder = tmp_path / "checkpoints"
    for aside in ("superseded-1", "superseded-2"):
        three(folder)
        assert layout.set_newer_aside(folder, 1, metrics) == folder / aside
        names = ["metrics.jsonl", "step-00000002", "step-00000003"]
        assert sorted(p.name for p in (folder / aside).iterdir()) == names
        assert find_latest(folder / aside) == folder / aside / "step-00000003"
        assert find_latest(folder) == folder / "step-00000001"
        assert layout.set_newer_aside(folder, 1, metrics) is None
        (folder / "step-00000001").rename(tmp_path / aside)  # so that they can be saved once more
    assert metrics.read_text() == "lines"


def test_a_place_that_cannot_be_written_is_found_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout.refuse_unwritable(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    monkeypatch.setattr(files.tempfile, "TemporaryFile", failing(OSError(errno.EROFS, "Read-only file system")))
    with pytest.raises(OSError, match="Read-only"):
        layout.refuse_unwritable(tmp_path)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/checkpoints/step-00000000"):
        save_checkpoint(tmp_path / "file" / "checkpoints", trained(0), WORLD)


def test_a_loader_state_that_is_not_json_is_refused(tmp_path: Path) -> None:
    state = trained(0)
    state.loader = {"position": torch.ones(1)}
    with pytest.raises(CheckpointError, match="JSON"):
        save_checkpoint(tmp_path, state, WORLD)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    path = save_checkpoint(tmp_path, trained(), WORLD)
    load_checkpoint(path, fresh(), WORLD)
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list

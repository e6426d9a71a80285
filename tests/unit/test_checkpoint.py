"""Training checkpoints in one process: what is complete, what is refused before a change, what is kept."""

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from equipoise.accelerator import CPUAccelerator
from equipoise.checkpoint import layout
from equipoise.checkpoint.training import (
    TrainingState,
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


def test_moments_that_are_missing_in_a_checkpoint_are_an_error(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, trained(0), WORLD)
    content = json.loads((path / layout.TRAIN_STATE).read_text())
    content["optimizer_stateless"].remove("embed.weight")
    text = json.dumps(content)
    (path / layout.TRAIN_STATE).write_text(text)
    manifest = json.loads((path / layout.MANIFEST).read_text())
    manifest["files"][layout.TRAIN_STATE] = len(text)
    (path / layout.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"optimizer state of 'embed.weight' is missing"):
        load_checkpoint(path, fresh(), WORLD)


def damage_manifest(path: Path) -> None:
    (path / layout.MANIFEST).write_text("{")


def truncate_shard(path: Path) -> None:
    shard = next(path.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: (path / layout.MANIFEST).unlink(), "did not finish"),
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


@pytest.mark.parametrize(("keep_last", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4]), (9, [1, 2, 3, 4])])
def test_only_the_newest_are_kept(tmp_path: Path, keep_last: int, left: list[int]) -> None:
    state = trained(0)
    for step in (1, 2, 3, 4):
        state.step = step
        save_checkpoint(tmp_path, state, WORLD, keep_last=keep_last)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{n:08d}" for n in left]


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

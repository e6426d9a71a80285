"""The model that a run leaves for Hugging Face: of its last end, with what an earlier end left beside it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from equipoise.checkpoint.layout import step_path
from equipoise.errors import CheckpointError
from equipoise.train import run


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where models go, which are the names of their checkpoints here."""

    def export(source: Any, target: Path, *rest: Any, **options: Any) -> None:
        if source.path.name.endswith("7"):
            raise CheckpointError("no space")
        target.mkdir()
        (target / "model").write_text(source.path.name)

    monkeypatch.setattr(run, "open_source", lambda path: SimpleNamespace(path=path, hf_config={}, close=lambda: None))
    monkeypatch.setattr(run, "dtype_of", lambda config: None)
    monkeypatch.setattr(run, "export", export)
    return tmp_path / "hf"


def save(target: Path, step: int) -> None:
    run.save_hf(step_path(target.parent, step), target)


def models(target: Path) -> dict[str, str]:
    return {path.name: (path / "model").read_text() for path in sorted(target.parent.iterdir())}


def test_the_model_is_that_of_the_last_end_and_earlier_ones_are_kept(target: Path) -> None:
    save(target, 3)
    assert run.saved_step(target) == 3
    (target / "model").write_text("changed by hand")
    save(target, 3)  # started again with nothing to train: it stays
    assert models(target) == {"hf": "changed by hand"}
    save(target, 5)
    (target / run.HF_STEP).unlink()  # as if this end had not come so far
    save(target, 5)
    assert models(target) == {
        "hf": "step-00000005",
        "hf-previous": "changed by hand",
        "hf-previous-2": "step-00000005",
    }
    assert run.saved_step(target) == 5


def test_a_model_that_cannot_be_written_takes_no_earlier_one_away(target: Path) -> None:
    save(target, 3)
    with pytest.raises(CheckpointError, match=r"no space. The training is saved: write the model with `equipoise conv"):
        save(target, 7)
    assert models(target) == {"hf-previous": "step-00000003"}
    assert run.saved_step(target) is None


@pytest.mark.parametrize(
    ("replaced", "then"), [(True, "it is hf-previous once this run has ended"), (False, "it stays as it is")]
)
def test_a_resume_says_that_the_model_is_older(
    target: Path, caplog: pytest.LogCaptureFixture, replaced: bool, then: str
) -> None:
    run.tell_of_older(target, 3, replaced)
    assert caplog.messages == []
    save(target, 3)
    with caplog.at_level("WARNING"):
        run.tell_of_older(target, 4, replaced)
    assert caplog.messages == [
        f"{target} holds the model of an earlier end of this run, after step 3, and training goes on after step 4; "
        + then
    ]

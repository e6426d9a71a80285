"""Mistakes that are told before any worker is started, in the words of those who would find them later."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from equipoise.accelerator import host_memory
from equipoise.checkpoint import layout
from equipoise.checkpoint.manifest import Manifest, describe_file, write_manifest
from equipoise.data import DataConfig, build_dataset, corpus, hub, sources
from equipoise.data.corpus import check_data
from equipoise.data.loader import Loader
from equipoise.errors import CheckpointError, ConfigError, DataError
from equipoise.models.config import ModelConfig
from equipoise.train import preflight
from equipoise.train.config import TrainConfig

NO_CHECKPOINTS = Path("nowhere")
CHAT = {"format": "chat", "packing": "documents", "tokenizer": "bytes"}
TURNS = '[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]'


def written(name: str, text: str | bytes = "") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return folder / name

    return write


def parquet(folder: Path) -> Path:
    pq.write_table(pa.table({"id": [1]}), folder / "a.parquet")
    return folder / "a.parquet"


MISTAKES: dict[str, tuple[Callable[[Path], Path], dict[str, Any], int]] = {
    "missing": (lambda folder: folder / "missing", {}, 257),
    "empty": (written("a.txt"), {}, 257),
    "empty folder": (lambda folder: folder, {}, 257),
    "binary": (written("a.gz", b"\x1f\x8b\0"), {}, 257),
    "column": (written("a.jsonl", '{"body": "x"}\n'), {}, 257),
    "type": (written("a.jsonl", '{"text": 1}\n'), {}, 257),
    "no JSON": (written("a.jsonl", "{"), {}, 257),
    "parquet column": (parquet, {}, 257),
    "no parquet": (written("a.parquet", "x"), {}, 257),
    "include": (written("a.txt", "x"), {"include": "*.md"}, 257),
    "tokenizer": (written("a.txt", "x"), {"tokenizer": "./missing/tokenizer.json"}, 257),
    "end token": (written("a.txt", "x"), {"eos_token": "</s>"}, 257),
    "vocabulary": (written("a.txt", "x"), {}, 256),
    "messages": (written("a.jsonl", '{"text": "x"}\n'), {**CHAT, "chat_template": "template"}, 257),
    "turn": (written("a.jsonl", '{"messages": [{"role": 1}]}\n'), {**CHAT, "chat_template": "template"}, 257),
    "template": (written("a.jsonl", f'{{"messages": {TURNS}}}\n'), CHAT, 257),
}


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every source counts as too large to be read before workers are started."""
    monkeypatch.setattr(corpus, "_SMALL_BYTES", -1)


@pytest.mark.parametrize("small_bytes", [-1, 1 << 20])
@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_the_data_is_told_as_by_those_who_read_it_all(
    case: str, small_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_SMALL_BYTES", small_bytes)
    make, settings, vocab_size = MISTAKES[case]
    data = tmp_path / "data"
    data.mkdir()
    source = make(data)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "template").write_text("{{ messages }}")
    config = DataConfig(source=str(source), **settings)
    with pytest.raises(DataError) as wanted:
        build_dataset(config, 4, vocab_size=vocab_size)
    with pytest.raises(DataError) as found:
        check_data(config, 4, vocab_size)
    assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize(("source", "vocab_size"), [("stdlib", 257), ("random", 5)])
def test_sources_without_a_mistake_pass(source: str, vocab_size: int) -> None:
    check_data(DataConfig(source=source), 4, vocab_size)


def test_a_small_source_is_read_whole_and_a_larger_one_is_not(tmp_path: Path) -> None:
    """Only all of it tells that it is too short, or that a late line is malformed."""
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(DataError, match="is too short: 1 documents with 3 bytes of text"):
        check_data(DataConfig(source=str(tmp_path)), 8, 257)
    read = check_data(DataConfig(source=str(tmp_path)), 2, 257)
    assert read is not None
    assert read.train.fingerprint == build_dataset(DataConfig(source=str(tmp_path)), 2).train.fingerprint
    (tmp_path / "b.txt").write_text("x" * (1 << 20))
    assert check_data(DataConfig(source=str(tmp_path)), 8, 257) is None
    assert check_data(DataConfig(source="stdlib"), 8, 257) is None


def test_only_the_first_file_of_a_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def call(function: str, what: str, repo: str, name: str = "", **options: Any) -> Any:
        if function == "list_repo_files":
            return ["a.txt", "b.txt"]
        asked.append(name)
        (tmp_path / name).write_text("x")
        return tmp_path / name

    monkeypatch.setattr(hub, "_call", call)
    check_data(DataConfig(source="hf://owner/name"), 4, 257)
    assert asked == ["a.txt"]


@pytest.mark.usefixtures("large")
def test_nothing_is_read_beyond_the_first_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "x"}\nno JSON\n')
    check_data(DataConfig(source=str(tmp_path / "a.jsonl")), 4, 257)
    (tmp_path / "b.jsonl").write_text(f'{{"messages": {TURNS}}}\nno JSON\n')
    (tmp_path / "template").write_text("{{ messages }}")
    chat = DataConfig(source=str(tmp_path / "b.jsonl"), **CHAT, chat_template=str(tmp_path / "template"))
    check_data(chat, 4, 257)
    monkeypatch.setattr(sources, "_CHECKED_BYTES", 2)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("read"))
    (tmp_path / "long.txt").write_text("abc")
    check_data(DataConfig(source=str(tmp_path / "long.txt")), 4, 257)


def save(
    checkpoints: Path,
    step: int,
    model: ModelConfig,
    went_back: int | None = None,
    loader: dict[str, Any] | None = None,
) -> None:
    path = layout.step_path(checkpoints, step)
    path.mkdir(parents=True)
    state: dict[str, Any] = {"config": {"model": model.model_dump(mode="json")}, "extra": {"resume_step": went_back}}
    state["loader"] = loader
    (path / layout.TRAIN_STATE).write_text(json.dumps(state))
    write_manifest(path, Manifest(step, 1, {file.name: describe_file(file) for file in path.iterdir()}))


def start(
    checkpoints: Path = NO_CHECKPOINTS, resume_step: int | None = None, workers: int = 1, **sections: Any
) -> None:
    TrainConfig.model_validate(sections).check_start(workers, checkpoints, resume_step)


def test_a_checkpoint_of_another_model_is_told_by_its_settings(tmp_path: Path) -> None:
    save(tmp_path, 2, ModelConfig())
    start(tmp_path)
    start(tmp_path, model={"router_aux_loss_coef": 0.5})
    with pytest.raises(CheckpointError) as caught:
        start(tmp_path, model={"num_experts": 16, "hidden_size": 128})
    assert str(caught.value).startswith(
        f"{tmp_path}/step-00000002: the checkpoint is of a model with other weights: model.hidden_size: the checkpoint "
        "has 256, this run has 128; model.num_experts: the checkpoint has 8, this run has 16. "
    )
    with pytest.raises(CheckpointError, match=r"computes something else: model\.rope_theta: .*allow_other_model"):
        start(tmp_path, model={"rope_theta": 2.0})
    start(tmp_path, model={"rope_theta": 2.0}, checkpoint={"allow_other_model": True})


def test_a_run_is_refused_only_if_no_checkpoint_that_it_may_take_is_of_its_model(tmp_path: Path) -> None:
    """Whether the newest is damaged is found out by all ranks; then an older one is taken."""
    save(tmp_path, 2, ModelConfig())
    save(tmp_path, 4, ModelConfig(rope_theta=2.0))
    start(tmp_path)
    start(tmp_path, 2)
    start(tmp_path, 4, model={"rope_theta": 2.0})
    for step, theta in ((4, 10000.0), (2, 2.0), (None, 3.0)):
        with pytest.raises(CheckpointError, match="rope_theta"):
            start(tmp_path, step, model={"rope_theta": theta})
    save(tmp_path, 6, ModelConfig(rope_theta=5.0), went_back=1)  # the step it went back to may be deleted by then
    start(tmp_path, 1, model={"rope_theta": 5.0})
    state = layout.step_path(tmp_path, 6) / layout.TRAIN_STATE
    state.write_text(state.read_text().replace("}", "]"))  # of the same size, so it counts as complete
    start(tmp_path, model={"rope_theta": 7.0})


def test_a_model_too_large_for_the_host_is_refused_on_a_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask a GPU would take memory of it; its workers look."""
    for kind in ("cpu", "cuda"):
        device = SimpleNamespace(device_type=kind, name=kind, memory=lambda: SimpleNamespace(total=1 << 20))
        monkeypatch.setattr(preflight, "get_accelerator", lambda: device)  # noqa: B023
        if kind == "cuda":
            start(model={"hidden_size": 10**9})
        else:
            with pytest.raises(ConfigError, match="too large for the memory"):
                start(model={"hidden_size": 10**9})


def test_other_data_than_those_of_the_checkpoints_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = tmp_path / "a.txt"
    text.write_text("one text of some length" * 30)
    data, loop = (
        {"source": str(text), "eval_fraction": 0.1},
        {"sequence_length": 16, "global_batch_size": 4, "steps": 9},
    )
    train = build_dataset(DataConfig(**data), 16).train
    saved = Loader(train, 4, 1).state_dict()
    checkpoints = tmp_path / "checkpoints"
    save(checkpoints, 2, ModelConfig(), loader=saved)
    save(checkpoints, 4, ModelConfig(), loader=saved | {"seed": 7})
    start(checkpoints, workers=2, data=data, train=loop)
    start(checkpoints, 4, workers=2, data=data, train=loop | {"seed": 7})
    with pytest.raises(DataError) as caught:
        start(checkpoints, 2, workers=2, data=data | {"shuffle": False}, train=loop | {"global_batch_size": 8})
    assert str(caught.value).startswith(
        "the saved data position belongs to other data or another order: shuffle True (now False), "
        "global_batch_size 4 (now 8). Resume with the same data"
    )
    text.write_text("another text of some length" * 30)
    with pytest.raises(DataError, match=f"other data or another order: .*fingerprint '{train.fingerprint}'"):
        start(checkpoints, 2, workers=2, data=data, train=loop)
    start(checkpoints, 2, workers=1, data=data, train=loop)  # which reads them at once
    monkeypatch.setattr(corpus, "_SMALL_BYTES", -1)
    start(checkpoints, 2, workers=2, data=data, train=loop)  # left to those who read them all
    with pytest.raises(DataError, match=r"seed 0 \(now 1\)"):
        start(checkpoints, 2, workers=2, data=data, train=loop | {"seed": 1})


def test_what_workers_will_log_about_the_data_is_not_logged_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.txt").write_text("x" * 500)
    (tmp_path / "empty.txt").touch()
    start(workers=2, data={"source": str(tmp_path)}, train={"sequence_length": 16})
    assert caplog.messages == []
    build_dataset(DataConfig(source=str(tmp_path)), 16)
    assert "empty files were skipped" in caplog.text


def test_a_finished_run_is_not_refused_for_what_it_does_not_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = SimpleNamespace(device_type="cpu", name="cpu", memory=lambda: SimpleNamespace(total=1 << 10))
    monkeypatch.setattr(preflight, "get_accelerator", lambda: cpu)
    monkeypatch.setattr(host_memory, "swap", lambda: 0)
    save(tmp_path, 4, ModelConfig())
    start(tmp_path, workers=2, train={"steps": 4}, data={"source": "missing"})
    with pytest.raises(ConfigError, match="too large for the memory"):
        start(tmp_path, workers=2, train={"steps": 5}, data={"source": "missing"})
    with pytest.raises(CheckpointError, match="rope_theta"):
        start(tmp_path, workers=2, train={"steps": 4}, model={"rope_theta": 3.0})


def test_a_single_process_reads_its_data_once() -> None:
    start(data={"source": "missing"})
    with pytest.raises(DataError, match="'missing' does not exist"):
        start(data={"source": "missing"}, workers=2)

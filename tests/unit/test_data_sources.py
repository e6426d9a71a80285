"""Where text comes from: kinds of source, their order, what is skipped and counted, what is refused."""

import importlib
import json
import logging
import re
import sys
import threading
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from equipoise.data.config import DataConfig
from equipoise.data.hub import dataset_files, is_hub_id, unreachable_reason
from equipoise.data.sources import SourceReport, read_documents
from equipoise.errors import DataError
from equipoise.run_files import HEADER_START


def read(source: Path | str, **settings: object) -> list[str]:
    return read_with_report(source, **settings)[0]


def read_with_report(source: Path | str, **settings: object) -> tuple[list[str], SourceReport]:
    report = SourceReport(str(source))
    documents = list(read_documents(DataConfig(source=str(source), **settings), report))
    return documents, report


def write_parquet(path: Path, **columns: list) -> None:
    pq.write_table(pa.table(columns), path, row_group_size=2)


def test_the_default_source_is_the_standard_library_in_a_fixed_order() -> None:
    first, report = read_with_report("stdlib", max_documents=20)
    assert first == read("stdlib", max_documents=20)
    assert len(first) == report.num_documents == 20
    names = list(report.sizes)
    assert names == sorted(names)
    assert all(name.endswith(".py") and "site-packages" not in name for name in names)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert read(tmp_path / "a.txt") == ["one\n\ntwo\n"]


def test_a_folder_is_read_in_the_order_of_its_paths_each_file_by_its_kind(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden")
    (tmp_path / "c.txt").write_text("c")
    (tmp_path / "b" / "x.md").write_text("b/x")
    (tmp_path / "a.jsonl").write_text('{"text": "a0"}\n\n{"text": "a1"}\n')
    write_parquet(tmp_path / "B.parquet", text=["B0", "B1", "B2"])
    assert read(tmp_path) == ["B0", "B1", "B2", "a0", "a1", "b/x", "c"]


def write_run(folder: Path) -> None:
    """A run folder with what runs write: settings and checkpoints change, logs grow while training goes on."""
    files = (
        "run.json",
        "metrics.jsonl",
        "checkpoints/step-00000002/train_state.json",
        "trace/a.parquet",
        "hf/merges.txt",
    )
    for name in (*files, "metrics.jsonl.7.tmp", "tensorboard/x", "metrics.previous.jsonl", "hf-previous-2/x.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("of the run")
    (folder / "config.toml").write_text(f"{HEADER_START} To repeat it: ...\n")


@pytest.mark.parametrize("run", [".", "runs/mine"])
def test_what_runs_write_into_a_source_is_no_text(tmp_path: Path, run: str) -> None:
    """So a run reads the same at its start, when it is resumed, and beside later runs."""
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace.txt").write_text("b")
    if run != ".":
        (tmp_path / "trace" / "x.md").write_text("of the user")
        (tmp_path / run).mkdir(parents=True)
        (tmp_path / run / "mine.txt").write_text("mine")
    before = read(tmp_path)
    write_run(tmp_path / run)
    documents, report = read_with_report(tmp_path)
    assert documents == before
    assert dict(report.skipped) == {"files that training runs have written were skipped": 10}
    (tmp_path / run / "config.toml").write_text("steps = 1  # edited")  # its checkpoints still tell
    assert read(tmp_path) == before
    with pytest.raises(DataError, match=r"among the .* files of .* but 1 that training runs have written; change"):
        read(tmp_path, include="**/metrics.jsonl")


def test_a_source_that_a_run_has_written_is_refused_and_one_in_its_folder_is_not(tmp_path: Path) -> None:
    write_run(tmp_path)
    for name in ("metrics.jsonl", "trace", "checkpoints/step-00000002", "hf/merges.txt"):
        with pytest.raises(DataError, match=rf"{name}' is what a training run has written into its folder {tmp_path},"):
            read(tmp_path / name)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "metrics.jsonl").write_text('{"text": "of the user"}\n')
    assert read(tmp_path / "data") == read(tmp_path / "data" / "metrics.jsonl") == ["of the user"]


def test_include_chooses_files(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("a.txt", "a.md", "d/b.md"):
        (tmp_path / name).write_text(name)
    assert read(tmp_path, include="**/*.md") == ["a.md", "d/b.md"]
    assert read(tmp_path, include="*.md") == ["a.md"]


def test_include_that_matches_nothing_says_how_many_files_there_were(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"no file matches data.include '\*\.rst' among the 1 files"):
        read(tmp_path, include="*.rst")


def test_include_for_a_single_file_is_refused_not_ignored(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"data\.include '\*\.md' needs a folder"):
        read(tmp_path / "a.txt", include="*.md")


@pytest.mark.parametrize("pattern", ["/etc/*", "../*.txt", ""])
def test_include_stays_in_the_folder(pattern: str) -> None:
    with pytest.raises(ValidationError, match="include"):
        DataConfig(include=pattern)


def test_unicode_survives_every_kind_of_source(tmp_path: Path) -> None:
    text = "naïve 日本語 \U0001f600 e\u0301 \u2028 end"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"text": text}) + "\n" + json.dumps({"text": text}, ensure_ascii=False) + "\n",
        encoding="utf-8",
    )
    write_parquet(tmp_path / "c.parquet", text=[text])
    assert read(tmp_path) == [text] * 4


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    assert read(tmp_path / "a.txt") == ["hello"]


def test_bytes_that_are_not_utf8_are_replaced_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 \xff")
    (tmp_path / "b.txt").write_bytes(b"\xe9")
    (tmp_path / "c.txt").write_bytes(b"fine")
    documents, report = read_with_report(tmp_path)
    assert documents == ["caf\ufffd \ufffd", "\ufffd", "fine"]
    report.log()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "2 documents with bytes that are not UTF-8" in record.message
    assert f"{tmp_path / 'a.txt'}, byte 3" in record.message


def test_a_lone_surrogate_in_json_becomes_a_replacement_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x\\ud800y"}\n')
    documents, report = read_with_report(tmp_path / "a.jsonl")
    assert documents == ["x\ufffdy"]
    assert sum(report.skipped.values()) == 1


def test_empty_files_beside_a_good_one_are_skipped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """C46 (a)."""
    for name in ("a.txt", "b.jsonl", "c.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "z.txt").write_text("good")
    documents, report = read_with_report(tmp_path)
    assert documents == ["good"]
    report.log()
    assert "3 empty files were skipped" in caplog.text
    assert str(tmp_path / "a.txt") in caplog.text


def test_only_empty_files_are_an_error_with_paths_and_sizes(tmp_path: Path) -> None:
    """C46 (b)."""
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").touch()
    with pytest.raises(DataError) as failure:
        read(tmp_path)
    for path in (tmp_path / "a.txt", tmp_path / "b.txt"):
        assert f"{path} (0 bytes)" in str(failure.value)


def test_a_missing_path_is_an_error_that_says_what_is_possible(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere' does not exist.*'stdlib'.*\.jsonl.*hf://"):
        read(tmp_path / "nowhere")


def test_an_unreadable_file_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"cannot read .*a\.txt: Permission denied"):
        read(tmp_path)


def test_a_binary_file_is_skipped_in_a_folder_and_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b\x00\x00binary")
    (tmp_path / "b.txt").write_text("text")
    documents, report = read_with_report(tmp_path)
    assert documents == ["text"]
    assert report.skipped == {"binary files (with NUL bytes) were skipped": 1}
    with pytest.raises(DataError, match=r"a\.gz \(10 bytes\) is not UTF-8 text"):
        read(tmp_path / "a.gz")


def test_another_column_can_hold_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "x", "n": 1}\n')
    write_parquet(tmp_path / "b.parquet", n=[1, 2], body=["y", "z"])
    assert read(tmp_path, column="body") == ["x", "y", "z"]


def test_a_wrong_column_lists_those_that_exist(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"body": "y", "id": 3}\n')
    write_parquet(tmp_path / "b.parquet", body=["x"], id=[1])
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: no column 'text'.*one of body, id"):
        read(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"b\.parquet: no column 'text'.*one of body, id"):
        read(tmp_path / "b.parquet")


def test_a_column_that_holds_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ["x"]}\n')
    write_parquet(tmp_path / "b.parquet", text=[1, 2])
    (tmp_path / "c.jsonl").write_text('{"text": 1, "id": 2, "body": "x"}\n')
    with pytest.raises(DataError, match=r"line 1: 'text' holds list, not text; no other column holds text$"):
        read(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"'text' holds int, not text; set data\.column to one of body$"):
        read(tmp_path / "c.jsonl")
    with pytest.raises(DataError, match=r"'text' has type int64, not text"):
        read(tmp_path / "b.parquet")


def test_null_and_empty_rows_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n{"text": ""}\n{"text": "x"}\n')
    write_parquet(tmp_path / "b.parquet", text=["y", None, "", "z"])
    documents, report = read_with_report(tmp_path)
    assert documents == ["x", "y", "z"]
    assert report.skipped == {"empty documents were skipped": 4}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "cut', "is not JSON"),
        ('["text"]', "expected a JSON object, got list"),
        ("NULL", "is not JSON"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, line: str, complaint: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n\n' + line + "\n")
    with pytest.raises(DataError, match=rf"a\.jsonl, line 3:? {complaint}"):
        read(tmp_path / "a.jsonl")


def test_a_parquet_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=r"a\.parquet is not readable as Parquet"):
        read(tmp_path / "a.parquet")


def test_max_documents_stops_reading(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "y"}\nbroken\n')
    assert read(tmp_path / "a.jsonl", max_documents=2) == ["x", "y"]


@pytest.fixture(autouse=True)
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here asks the network."""
    monkeypatch.setattr("equipoise.data.hub.unreachable_reason", lambda: None)


class FakeHub(types.ModuleType):
    """Stands in for `huggingface_hub`: a repository's files by revision, in a local folder."""

    def __init__(self, folder: Path, files: dict[str | None, list[str]]) -> None:
        super().__init__("huggingface_hub")
        self.folder, self.files, self.downloaded = folder, files, []

    def list_repo_files(self, repo_id: str, repo_type: str, revision: str | None = None) -> list[str]:
        return self.files[revision]

    def hf_hub_download(self, repo_id: str, name: str, repo_type: str, revision: str | None) -> str:
        if name not in self.files[revision]:
            raise FileNotFoundError(name)
        self.downloaded.append(name)
        return str(self.folder / name)


@pytest.mark.parametrize(
    ("files", "include", "expected"),
    [
        (["README.md", "data/test.parquet", "data/train-1.parquet", "data/train-0.parquet"], None,
         ["data/train-0.parquet", "data/train-1.parquet"]),
        (["b.jsonl", "a.jsonl", "notes.txt"], None, ["a.jsonl", "b.jsonl"]),
        (["x/train.txt", "x/valid.txt"], "**/valid.txt", ["x/valid.txt"]),
        (["valid.txt", "train.txt"], "**/valid.txt", ["valid.txt"]),
    ],
)  # fmt: skip
def test_a_hub_dataset_gives_its_training_split_or_what_include_says(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    files: list[str],
    include: str | None,
    expected: list[str],
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(tmp_path, {None: files}))
    assert list(dataset_files("owner/name", include)) == [tmp_path / name for name in expected]


def test_hub_files_are_downloaded_only_when_they_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, {None: ["train-0.jsonl", "train-1.jsonl"]})
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    (tmp_path / "train-0.jsonl").write_text('{"text": "x"}\n')
    assert read("hf://owner/name", max_documents=1) == ["x"]
    assert hub.downloaded == ["train-0.jsonl"]


def test_a_hub_dataset_in_no_known_form_falls_back_to_the_hubs_parquet(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    branch = "refs/convert/parquet"
    hub = FakeHub(tmp_path, {None: ["load.py"], branch: ["en/train/0.parquet", "en/test/0.parquet"]})
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert list(dataset_files("owner/name", None)) == [tmp_path / "en/train/0.parquet"]
    hub.files[branch] = ["de/train/0.parquet", "en/train/0.parquet"]
    with pytest.raises(DataError, match=r"subsets de, en; choose with data\.include"):
        list(dataset_files("owner/name", None))
    assert list(dataset_files("owner/name", "de/train/*")) == [tmp_path / "de/train/0.parquet"]


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, {})
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)

    def refuse(*args: object, **kwargs: object) -> None:
        raise ConnectionError("Network is unreachable")

    hub.list_repo_files = refuse
    with pytest.raises(
        DataError, match=r"hf://owner/name.*Network is unreachable.*download the files and give their path"
    ):
        read("hf://owner/name")


def test_without_a_network_a_dataset_is_refused_before_the_client_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(Path(), {}))  # a call would be a KeyError
    monkeypatch.setattr("equipoise.data.hub.unreachable_reason", lambda: "HF_HUB_OFFLINE is set")
    with pytest.raises(DataError, match=r"'hf://owner/name': HF_HUB_OFFLINE is set\. .*download the files"):
        read("hf://owner/name")


def test_a_hub_that_does_not_answer_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, ended = [], threading.Event()

    def head(url: str, timeout: float) -> None:
        asked.append(timeout)
        ended.wait(10)  # as a name server does that is not there

    pytest.importorskip("huggingface_hub")
    constants = importlib.import_module("huggingface_hub.constants")  # which the package does not import by itself
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: types.SimpleNamespace(head=head))
    monkeypatch.setattr("equipoise.data.hub.DEADLINE_S", 0.05)
    find = unreachable_reason.__wrapped__  # not what was found before
    assert re.fullmatch(r"https?://\S+ did not answer within 0.05 s", find())
    ended.set()
    assert asked == [0.05]

    def refuse(url: str, timeout: float) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("equipoise.data.hub.DEADLINE_S", 10.0)
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: types.SimpleNamespace(head=refuse))
    assert find().endswith("cannot be reached (Name or service not known)")
    monkeypatch.setattr("huggingface_hub.utils.get_session", lambda: types.SimpleNamespace(head=lambda *a, **k: 503))
    assert find() is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find() == "HF_HUB_OFFLINE is set"


def test_a_hub_dataset_without_the_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"pip install 'equipoise\[hub\]'"):
        read("hf://owner/name")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("owner/name", True),
        ("gpt2", False),
        ("nothere", False),
        ("Qwen/Qwen3-0.6B", True),
        ("/abs/path", False),
        ("./rel", False),
        ("../owner/name", False),
        ("~/x", False),
        ("a/b/c", False),
        ("tokenizer.json", False),
        ("", False),
    ],
)
def test_what_looks_like_a_hub_id(text: str, expected: bool) -> None:
    assert is_hub_id(text) is expected

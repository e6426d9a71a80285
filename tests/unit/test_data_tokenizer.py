"""Tokenizers: exact round trips, byte counts, the end token, and messages."""

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from equipoise.data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer
from equipoise.errors import DataError

TEXTS = ["", "a", "hello world", "naïve 日本語 \U0001f600 e\u0301", "\r\n\t\0", "<|endoftext|> is text"]


@pytest.fixture(scope="module")
def byte_level_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE as GPT-2 and Qwen have, saved with a truncation limit that must not apply to data."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, hello there"] * 20, trainer)
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    backend.save(str(path))
    return path


@settings(deadline=None)
@given(st.text())
def test_bytes_round_trip_and_count_themselves(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.num_bytes(ids) == len(ids) == len(text.encode())
    assert tokenizer.eos_id not in ids
    np.testing.assert_array_equal(tokenizer.encode_batch([text, "b"])[0], ids)


def test_the_end_token_stands_for_no_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.vocab_size == tokenizer.eos_id + 1 == 257
    assert tokenizer.num_bytes([104, 105, 256]) == 2
    assert tokenizer.decode([104, 105, 256]) == "hi"


def test_ids_that_are_not_utf8_decode_to_replacement_characters() -> None:
    assert ByteTokenizer().decode([0xE9, 104]) == "\ufffdh"


@pytest.mark.parametrize("text", TEXTS)
def test_a_tokenizer_json_round_trips_counts_bytes_and_reads_special_tokens_as_text(
    byte_level_file: Path, text: str
) -> None:
    tokenizer = JsonTokenizer(byte_level_file)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.num_bytes(ids) == len(text.encode())
    assert tokenizer.eos_id not in ids
    assert ids.max(initial=0) < tokenizer.vocab_size
    assert tokenizer.num_bytes([tokenizer.eos_id]) == 0


def test_byte_fallback_and_metaspace_tokens_count_their_bytes(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "</s>": 1, "\u2581the": 2, "é": 3, "<0xE2>": 4}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.eos_id == 1
    assert [tokenizer.num_bytes([i]) for i in (1, 2, 3, 4)] == [0, 4, 2, 1]


def test_the_end_token_is_given_or_in_the_folder_or_a_usual_one(byte_level_file: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_level_file.read_text())
    assert load_tokenizer(str(tmp_path)).eos_id == 0
    for entry in ("<|im_end|>", {"content": "<|im_end|>"}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": entry}))
        assert load_tokenizer(str(tmp_path)).eos_id == 1
    assert load_tokenizer(str(tmp_path), eos_token="<|endoftext|>").eos_id == 0
    with pytest.raises(DataError, match="'<nope>' is not in the vocabulary"):
        load_tokenizer(str(tmp_path), eos_token="<nope>")


def test_no_known_end_token_asks_for_one(tmp_path: Path) -> None:
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match=r"set data\.eos_token"):
        load_tokenizer(str(tmp_path))
    assert load_tokenizer(str(tmp_path), eos_token="b").eos_id == 1


def test_the_byte_tokenizer_has_its_own_end_token() -> None:
    assert isinstance(load_tokenizer("bytes"), ByteTokenizer)
    with pytest.raises(DataError, match="leave it unset"):
        load_tokenizer("bytes", eos_token="</s>")


def test_what_cannot_be_a_hub_id_is_not_looked_for_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.data.tokenizer.tokenizer_folder", lambda spec: pytest.fail(f"asked for {spec}"))
    for spec in ("nothere", "gpt2", "./no/where", "/no/where", "../no/where", "~/no/where"):
        with pytest.raises(DataError, match=f"'{spec}' does not exist; .*hub id with its owner"):
            load_tokenizer(spec)
    for spec in ("bits", "byte", "byts"):
        with pytest.raises(DataError, match=f"data.tokenizer '{spec}' does not exist; did you mean 'bytes'"):
            load_tokenizer(spec)
    monkeypatch.setattr("equipoise.data.tokenizer.tokenizer_folder", lambda spec: Path("/nowhere"))
    with pytest.raises(DataError, match=r"cannot read|nowhere"):  # this is asked for
        load_tokenizer("google/byt5-small")


def test_what_is_no_tokenizer_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"folder has no tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"not a readable tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match="does not exist"):
        load_tokenizer(str(tmp_path / "missing.json"))


def test_a_hub_id_downloads_the_tokenizer_and_what_names_its_end_token(
    monkeypatch: pytest.MonkeyPatch, byte_level_file: Path, tmp_path: Path
) -> None:
    def download(repo_id: str, name: str, repo_type: str, revision: str | None) -> str:
        assert (repo_id, repo_type) == ("owner/name", "model")
        if not (tmp_path / name).exists():
            raise FileNotFoundError(name)
        return str(tmp_path / name)

    hub = types.ModuleType("huggingface_hub")
    hub.hf_hub_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setattr("equipoise.data.hub.unreachable_reason", lambda: None)
    with pytest.raises(DataError, match=r"'owner/name'.*FileNotFoundError.*download the files and give"):
        load_tokenizer("owner/name")
    (tmp_path / "tokenizer.json").write_text(byte_level_file.read_text())
    assert load_tokenizer("owner/name").eos_id == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert load_tokenizer("owner/name").eos_id == 1


def test_without_a_network_a_copy_serves_or_its_absence_is_told(
    monkeypatch: pytest.MonkeyPatch, byte_level_file: Path
) -> None:
    def download(repo_id: str, name: str, repo_type: str, revision: str | None, local_files_only: bool) -> str:
        assert local_files_only
        if repo_id != "owner/kept" or name != "tokenizer.json":
            raise FileNotFoundError(name)
        return str(byte_level_file)

    hub = types.ModuleType("huggingface_hub")
    hub.hf_hub_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setattr("equipoise.data.hub.unreachable_reason", lambda: "the hub is away")
    assert load_tokenizer("owner/kept").eos_id == 0
    with pytest.raises(DataError, match=r"'owner/name': the hub is away, and no copy is kept on this machine\. Check"):
        load_tokenizer("owner/name")


def test_a_hub_id_without_the_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r"'owner/name'.*pip install 'equipoise\[hub\]'"):
        load_tokenizer("owner/name")

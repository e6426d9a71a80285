"""From text to sequences: labels, packing boundaries, the held-out part, and data too small to use."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from equipoise.data.config import DataConfig
from equipoise.data.corpus import build_dataset, split, tokenize
from equipoise.data.dataset import IGNORED_LABEL, PackedDataset, RandomDataset, StreamDataset
from equipoise.data.loader import Loader, eval_batches
from equipoise.data.packing import pack_documents
from equipoise.data.tokenizer import ByteTokenizer
from equipoise.errors import DataError

EOS = ByteTokenizer.eos_id
DOCUMENTS = st.lists(st.text(alphabet="abc", min_size=1, max_size=40), min_size=1, max_size=12)


def stream(text: list[str], length: int, pad_last: bool = False) -> StreamDataset:
    return StreamDataset(tokenize(text, ByteTokenizer()).tokens, ByteTokenizer(), length, pad_last)


def packed(text: list[str], length: int) -> PackedDataset:
    documents = tokenize(text, ByteTokenizer())
    return PackedDataset(documents.tokens, documents.starts, ByteTokenizer(), length)


def offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@settings(deadline=None)
@given(DOCUMENTS, st.integers(1, 17))
def test_a_stream_is_cut_without_a_gap_and_each_label_is_the_next_token(text: list[str], length: int) -> None:
    tokens = [token for document in text for token in [*document.encode(), EOS]]
    dataset = stream(text, length)
    assert dataset.num_sequences == (len(tokens) - 1) // length
    sequences = [dataset.sequence(i) for i in range(dataset.num_sequences)]
    read = [token for s in sequences for token in s.input_ids]
    following = [token for s in sequences for token in s.labels]
    assert read == tokens[: len(read)]
    assert following == tokens[1 : len(read) + 1]


@settings(deadline=None)
@given(DOCUMENTS, st.integers(1, 17))
def test_a_padded_stream_predicts_every_token_but_the_first_once(text: list[str], length: int) -> None:
    tokens = [token for document in text for token in [*document.encode(), EOS]]
    dataset = stream(text, length, pad_last=True)
    labels = np.concatenate([dataset.sequence(i).labels for i in range(dataset.num_sequences)])
    assert len(labels) == dataset.num_sequences * length
    assert labels[labels != IGNORED_LABEL].tolist() == tokens[1:]
    assert dataset.num_bytes(labels) == sum(len(document) for document in text) - 1


@settings(deadline=None)
@given(DOCUMENTS, st.integers(1, 17))
def test_packed_segments_hold_each_document_once_and_predict_nothing_across_an_end(
    text: list[str], length: int
) -> None:
    dataset = packed(text, length)
    pairs = []  # (input, label) rows of each segment, in the order of packing
    for i in range(dataset.num_sequences):
        inputs, labels, cu_seqlens = dataset.sequence(i)
        assert inputs.shape == labels.shape == (length,)
        assert cu_seqlens[0] == 0
        assert np.all(np.diff(cu_seqlens) > 0)
        assert np.all(labels[cu_seqlens[-1] :] == IGNORED_LABEL)
        assert EOS not in inputs[: cu_seqlens[-1]]
        pairs += [(bytes(inputs[a:b].tolist()), labels[a:b].tolist()) for a, b in pairwise(cu_seqlens)]
    expected = []
    for document in text:
        tokens = [*document.encode(), EOS]
        for begin in range(0, len(tokens) - 1, length):
            part = tokens[begin : begin + length + 1]
            expected.append((bytes(part[:-1]), part[1:]))
    assert sorted(pairs) == sorted(expected)


@settings(deadline=None)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=30), st.integers(1, 40))
def test_packing_never_opens_a_sequence_that_two_half_empty_ones_could_spare(lengths: list[int], length: int) -> None:
    packing = pack_documents(offsets(lengths), length)
    filled = np.add.reduceat(packing.length, packing.bounds[:-1])
    assert filled.max() <= length
    assert filled.sum() == sum(lengths) - len(lengths)
    assert np.sum(2 * filled <= length) <= 1


def test_equal_packing_needs_no_padding() -> None:
    packing = pack_documents(offsets([7, 3, 5, 5, 9]), 8)
    assert np.add.reduceat(packing.length, packing.bounds[:-1]).tolist() == [8, 8, 8]


def test_positions_restart_and_documents_are_numbered_in_a_packed_batch() -> None:
    [batch] = eval_batches(packed(["aaaa", "bb"], 8), None, 2)
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 0, 1], list(range(8))]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 1, 1, -1, -1], [-1] * 8]
    assert batch.labels[0].tolist() == [97, 97, 97, EOS, 98, EOS, IGNORED_LABEL, IGNORED_LABEL]
    assert (batch.num_valid_tokens, batch.num_bytes) == (6, 4)


def test_a_stream_batch_has_no_documents() -> None:
    [batch] = Loader(stream(["abcdef"], 4), 1, 1).next_step()
    assert batch.position_ids is None
    assert batch.document_ids is None
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64


@pytest.mark.parametrize("packing", ["concat", "documents"])
@pytest.mark.parametrize("eval_fraction", [0.0, 0.1])
def test_five_tokens_for_a_sequence_of_sixteen_are_refused_with_path_and_sizes(
    tmp_path: Path, packing: str, eval_fraction: float
) -> None:
    """C46 (c)."""
    (tmp_path / "tiny.txt").write_text("five!")
    config = DataConfig(source=str(tmp_path), packing=packing, eval_fraction=eval_fraction)
    with pytest.raises(DataError) as failure:
        build_dataset(config, 16)
    assert f"{tmp_path / 'tiny.txt'} (5 bytes)" in str(failure.value)
    assert "one sequence of 16" in str(failure.value)


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_the_least_text_that_fills_a_sequence_is_enough(tmp_path: Path, packing: str) -> None:
    (tmp_path / "a.txt").write_text("x" * 16)
    config = DataConfig(source=str(tmp_path), packing=packing, eval_fraction=0)
    assert build_dataset(config, 16).train.num_sequences == 1
    (tmp_path / "a.txt").write_text("x" * 15)
    with pytest.raises(DataError, match="needs 1 more"):
        build_dataset(config, 16)


def test_an_empty_file_beside_a_good_one_does_no_harm(tmp_path: Path) -> None:
    """C46 (a)."""
    (tmp_path / "a.txt").touch()
    (tmp_path / "b.txt").write_text("x" * 100)
    assert build_dataset(DataConfig(source=str(tmp_path), eval_fraction=0), 16).train.num_sequences == 6


def test_only_empty_files_are_refused_without_a_process_group(tmp_path: Path) -> None:
    """C46 (b)."""
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match=r"a\.txt \(0 bytes\)"):
        build_dataset(DataConfig(source=str(tmp_path)), 16)
    assert not torch.distributed.is_initialized()


def test_whole_documents_are_held_out_by_their_text() -> None:
    text = [f"document {i} " * 3 for i in range(400)]
    documents = tokenize(text, ByteTokenizer())
    training, held = split(documents, 0.1)
    kept, out = texts_of(training), texts_of(held)
    assert sorted(kept + out) == sorted(text)
    assert 20 <= len(out) <= 60
    more = tokenize([*(f"new {i}" for i in range(101)), *text, "last", *text], ByteTokenizer())
    still_training, still_held = split(more, 0.1)
    assert set(kept) <= set(texts_of(still_training))
    assert set(out) <= set(texts_of(still_held))
    assert set(texts_of(still_training)).isdisjoint(texts_of(still_held))


def texts_of(documents) -> list[str]:
    return [bytes(documents.tokens[a : b - 1].tolist()).decode() for a, b in pairwise(documents.starts)]


@settings(deadline=None)
@given(DOCUMENTS, st.sampled_from([0.001, 0.1, 0.5]))
def test_no_token_is_lost_or_on_both_sides_however_few_the_documents(text: list[str], fraction: float) -> None:
    documents = tokenize(text, ByteTokenizer())
    training, held = split(documents, fraction)
    sides = texts_of(training) + (texts_of(held) if held is not None else [])
    assert sum(len(side) for side in sides) == sum(len(document) for document in text)
    assert len(training.tokens) > 0
    if len(text) * fraction < 1 and max(map(len, text)) > 1:
        assert held is not None
        assert any(document.endswith(texts_of(held)[0]) for document in text)


def test_a_single_file_holds_out_its_end(tmp_path: Path) -> None:
    text = "".join(chr(97 + i % 26) for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    datasets = build_dataset(DataConfig(source=str(tmp_path / "a.txt"), eval_fraction=0.1), 50)
    assert datasets.held_out is not None
    held = [
        token
        for i in range(datasets.held_out.num_sequences)
        for token in datasets.held_out.sequence(i).labels
        if token != IGNORED_LABEL
    ]
    assert bytes(held[:-1]).decode() == text[-98:]
    assert datasets.train.num_sequences == 18


def test_no_held_out_part_where_none_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    assert build_dataset(DataConfig(source=str(tmp_path), eval_fraction=0), 16).held_out is None


def test_ids_above_sixteen_bits_are_kept_whole() -> None:
    class Wide(ByteTokenizer):
        vocab_size = 100_001
        eos_id = 100_000

    documents = tokenize(["ab", "c"], Wide())
    assert documents.tokens.tolist() == [97, 98, 100_000, 99, 100_000]
    assert tokenize(["ab"], ByteTokenizer()).tokens.dtype == np.uint16


def test_text_that_gives_no_tokens_is_no_document() -> None:
    class Deaf(ByteTokenizer):
        def encode_batch(self, texts):
            return [np.frombuffer(text.strip().encode(), np.uint8) for text in texts]

    documents = tokenize(["  ", "a", " "], Deaf())
    assert documents.tokens.tolist() == [97, EOS]
    assert tokenize(["  "], Deaf()).starts.tolist() == [0]


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    config = DataConfig(source=str(tmp_path))
    with pytest.raises(DataError, match=r"model.vocab_size 256 is too small .* 257 ids"):
        build_dataset(config, 16, vocab_size=256)
    build_dataset(config, 16, vocab_size=257)


def test_random_tokens_depend_on_seed_and_number_alone_and_fill_the_vocabulary() -> None:
    dataset = RandomDataset(11, 64, 8, seed=3)
    inputs, labels, cu_seqlens = dataset.sequence(5)
    assert cu_seqlens is None
    assert inputs[1:].tolist() == labels[:-1].tolist()
    assert set(np.concatenate([inputs, dataset.sequence(6).input_ids]).tolist()) == set(range(11))
    assert inputs.tolist() == RandomDataset(11, 64, 8, seed=3).sequence(5).input_ids.tolist()
    assert inputs.tolist() != RandomDataset(11, 64, 8, seed=4).sequence(5).input_ids.tolist()
    assert inputs.tolist() != dataset.sequence(6).input_ids.tolist()


def test_the_random_source_takes_the_models_vocabulary() -> None:
    datasets = build_dataset(DataConfig(source="random"), 512, vocab_size=10, seed=1)
    assert datasets.train.sequence(0).input_ids.max() == 9
    assert datasets.held_out is not None
    assert datasets.held_out.sequence(0).input_ids.tolist() != datasets.train.sequence(0).input_ids.tolist()


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"source": "random", "packing": "documents"}, "packing"),
        ({"source": "random", "max_documents": 3}, "max_documents"),
        ({"source": "random", "include": "*.txt"}, "include"),
        ({"source": "stdlib", "include": "*.txt"}, "include"),
    ],
)
def test_a_setting_that_a_source_would_ignore_is_refused(settings: dict, name: str) -> None:
    with pytest.raises(ValidationError, match=rf"source '{settings['source']}' .* {name}"):
        DataConfig(**settings)


def test_the_fingerprint_tells_data_length_and_packing_apart() -> None:
    same = stream(["abcdefgh"] * 4, 4).fingerprint
    assert same == stream(["abcdefgh"] * 4, 4).fingerprint
    others = [
        stream(["abcdefgh"] * 3 + ["abcdefgi"], 4),
        stream(["abcdefgh"] * 4, 5),
        packed(["abcdefgh"] * 4, 4),
    ]
    assert len({same, *(other.fingerprint for other in others)}) == 4


def test_the_standard_library_becomes_sequences_with_a_held_out_part() -> None:
    datasets = build_dataset(DataConfig(max_documents=300), 128)
    assert datasets.held_out is not None
    total = datasets.train.num_sequences + datasets.held_out.num_sequences
    assert 0 < datasets.held_out.num_sequences < 0.2 * total
    text = datasets.tokenizer.decode(datasets.train.sequence(0).input_ids)
    assert len(text) > 100

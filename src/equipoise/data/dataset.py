"""Token sequences with next-token labels: from one stream, from packed documents, or random."""

from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np

from equipoise.data.packing import pack_documents
from equipoise.data.tokenizer import Tokenizer

IGNORED_LABEL = -100  # the label of positions without a loss; torch's cross_entropy ignores it by default


class TokenSequence(NamedTuple):
    """One sequence of S positions.

    `input_ids` and `labels`: int64 [S]; `labels[i]` is the token that follows `input_ids[i]`, or
    `IGNORED_LABEL`. `cu_seqlens`: int32 [segments + 1], from 0 up to the number of positions that hold text;
    segment k, a document or a part of one, is `[cu_seqlens[k], cu_seqlens[k + 1])`; what follows the last is
    padding. None: one stream.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    cu_seqlens: np.ndarray | None


class TokenDataset(Protocol):
    """Sequences by number. Reading one changes nothing, so any thread may."""

    @property
    def sequence_length(self) -> int:
        """Positions per sequence."""

    @property
    def num_sequences(self) -> int:
        """How many there are; at least 1."""

    @property
    def has_documents(self) -> bool:
        """Whether sequences carry `cu_seqlens`."""

    @property
    def pad_id(self) -> int:
        """Token at positions that hold no text."""

    @property
    def fingerprint(self) -> str:
        """Hex digest of everything that decides the sequences; equal only for equal data."""

    def sequence(self, index: int) -> TokenSequence:
        """Sequence `index`, in [0, num_sequences)."""

    def num_bytes(self, labels: np.ndarray) -> int:
        """UTF-8 bytes of text that the labels stand for; ignored ones count 0."""


class _TextDataset:
    """What the two text datasets share: tokens, a tokenizer to count bytes, a fingerprint."""

    has_documents = False
    _trained: np.ndarray | None = None

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer, sequence_length: int) -> None:
        self._tokens = tokens
        self._tokenizer = tokenizer
        self.sequence_length = sequence_length
        self.pad_id = tokenizer.eos_id

    def num_bytes(self, labels: np.ndarray) -> int:
        return self._tokenizer.num_bytes(labels[labels != IGNORED_LABEL])

    @cached_property
    def fingerprint(self) -> str:
        kind = f"{type(self).__name__} {self.sequence_length} {self.pad_id} {self._tokens.itemsize}"
        digest = blake2b(kind.encode(), digest_size=16)
        digest.update(self._tokens.astype(self._tokens.dtype.newbyteorder("<"), copy=False).data)
        if self._trained is not None:
            digest.update(self._trained.data)
        return digest.hexdigest()


class StreamDataset(_TextDataset):
    """Consecutive sequences of one stream of tokens; documents follow each other across the end-of-document
    token."""

    def __init__(self, tokens: np.ndarray, tokenizer: Tokenizer, sequence_length: int, pad_last: bool = False) -> None:
        """`tokens`: unsigned [T], kept, not copied. T // S sequences at most; the rest of the stream is left
        out, or with `pad_last` becomes a last sequence that is filled up with ignored positions."""
        super().__init__(tokens, tokenizer, sequence_length)
        num_labels = max(len(tokens) - 1, 0)
        self.num_sequences = (num_labels + (sequence_length - 1 if pad_last else 0)) // sequence_length

    def sequence(self, index: int) -> TokenSequence:
        begin = index * self.sequence_length
        window = self._tokens[begin : begin + self.sequence_length + 1].astype(np.int64)
        missing = self.sequence_length + 1 - len(window)
        inputs, labels = window[:-1], window[1:]
        if missing:
            inputs = np.concatenate([inputs, np.full(missing, self.pad_id)])
            labels = np.concatenate([labels, np.full(missing, IGNORED_LABEL)])
        return TokenSequence(inputs, labels, None)


class PackedDataset(_TextDataset):
    """Whole documents side by side; see `pack_documents`. The end-of-document token is a label, never an
    input."""

    has_documents = True

    def __init__(
        self,
        tokens: np.ndarray,
        document_starts: np.ndarray,
        tokenizer: Tokenizer,
        sequence_length: int,
        trained: np.ndarray | None = None,
    ) -> None:
        """`tokens`: unsigned [T], kept; `document_starts`: int64 [documents + 1], first 0, last T; `trained`: bool [T],
        tokens that are labels (None: all), the others are only read."""
        super().__init__(tokens, tokenizer, sequence_length)
        self._trained = trained
        self._packing = pack_documents(document_starts, sequence_length)
        self.num_sequences = len(self._packing.bounds) - 1

    def sequence(self, index: int) -> TokenSequence:
        pieces = slice(self._packing.bounds[index], self._packing.bounds[index + 1])
        start, length = self._packing.start[pieces], self._packing.length[pieces]
        cu_seqlens = np.concatenate([[0], np.cumsum(length)])
        at = np.arange(cu_seqlens[-1]) + np.repeat(start - cu_seqlens[:-1], length)
        inputs = np.full(self.sequence_length, self.pad_id, np.int64)
        labels = np.full(self.sequence_length, IGNORED_LABEL, np.int64)
        inputs[: len(at)] = self._tokens[at]
        labels[: len(at)] = self._tokens[at + 1]
        if self._trained is not None:
            labels[: len(at)][~self._trained[at + 1]] = IGNORED_LABEL
        return TokenSequence(inputs, labels, cu_seqlens.astype(np.int32))


class RandomDataset:
    """Uniform random tokens, made when asked for: data for benchmarks that costs nothing to hold."""

    has_documents = False
    pad_id = 0

    def __init__(self, vocab_size: int, sequence_length: int, num_sequences: int, seed: int) -> None:
        """Ids in [0, vocab_size). Sequence i depends on `seed` and i alone."""
        self._vocab_size = vocab_size
        self._seed = seed
        self.sequence_length = sequence_length
        self.num_sequences = num_sequences
        self.fingerprint = f"random-{vocab_size}-{sequence_length}-{num_sequences}-{seed}"

    def sequence(self, index: int) -> TokenSequence:
        bits = np.random.Philox(np.random.SeedSequence([self._seed, index])).random_raw(self.sequence_length + 1)
        window = (bits % np.uint64(self._vocab_size)).astype(np.int64)
        return TokenSequence(window[:-1], window[1:], None)

    def num_bytes(self, labels: np.ndarray) -> int:
        """One byte per token, by convention: there is no text."""
        return int(np.count_nonzero(labels != IGNORED_LABEL))

"""From a data configuration to sequences: read, tokenize, hold out, cut or pack. Needs no process group."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from equipoise.data.chat import load_template, tokenize_conversations
from equipoise.data.config import DataConfig
from equipoise.data.conversations import check_conversations, read_conversations
from equipoise.data.dataset import PackedDataset, RandomDataset, StreamDataset, TokenDataset
from equipoise.data.sources import SourceReport, check_documents, num_local_bytes, read_documents
from equipoise.data.tokenizer import Tokenizer, load_tokenizer
from equipoise.errors import DataError

logger = logging.getLogger(__name__)
_BATCH_CHARACTERS = 4 << 20  # text handed to the tokenizer at once
_SMALL_BYTES = 1 << 20  # read in less time than a worker takes to start
_RANDOM_TRAIN, _RANDOM_HELD_OUT = 1 << 20, 1 << 8  # sequences


@dataclass(frozen=True)
class TokenizedDocuments:
    """`tokens`: uint16 or uint32 [T], each document followed by its end token. `starts`: int64 [documents +
    1]. `draw`: float64 [documents] in [0, 1), from a hash of each document's text. `trained`: bool [T], tokens with a
    loss; None: all. Documents with it are conversations, which end as their template says."""

    tokens: np.ndarray
    starts: np.ndarray
    draw: np.ndarray
    trained: np.ndarray | None = None

    def select(self, chosen: np.ndarray) -> "TokenizedDocuments":
        """The documents where `chosen`, bool [documents], holds."""
        lengths = np.diff(self.starts)
        here = np.repeat(chosen, lengths)
        trained = None if self.trained is None else self.trained[here]
        return TokenizedDocuments(self.tokens[here], _offsets(lengths[chosen]), self.draw[chosen], trained)


@dataclass(frozen=True)
class Datasets:
    """`train`, `held_out` (None where `eval_fraction` is 0 or no document can be cut), which share no
    document, and the tokenizer of both."""

    train: TokenDataset
    held_out: TokenDataset | None
    tokenizer: Tokenizer


def build_dataset(
    config: DataConfig, sequence_length: int, *, vocab_size: int | None = None, seed: int = 0
) -> Datasets:
    """Read the source of `config` into sequences of `sequence_length` positions, the same on every rank.

    `vocab_size` is the model's: it must hold every id of the tokenizer, and is the range of the `random`
    source (by default the tokenizer's). `seed` serves the `random` source only. The tokens stay in host
    memory, 2 bytes each up to a vocabulary of 65,536 and 4 above. Needs no process group;
    raises `DataError` when the source is missing, unreadable, empty or shorter than one sequence, or the
    vocabulary is too small.
    """
    if sequence_length < 1:
        raise DataError(f"sequence length {sequence_length}: expected at least 1")
    tokenizer = fitting_tokenizer(config, vocab_size)
    if config.source == "random":
        size = vocab_size or tokenizer.vocab_size
        train = RandomDataset(size, sequence_length, _RANDOM_TRAIN, seed)
        held_out = RandomDataset(size, sequence_length, _RANDOM_HELD_OUT, seed + 1) if config.eval_fraction else None
        return Datasets(train, held_out, tokenizer)

    report = SourceReport(config.source)
    if config.format == "chat":
        documents = tokenize_chat(config, tokenizer, sequence_length, report)
    else:
        documents = tokenize(read_documents(config, report), tokenizer)
    report.log()
    training, held = split(documents, config.eval_fraction)
    # Every token but the first has a label; in packed documents every token but each document's first.
    num_labels = len(training.tokens) - (len(training.starts) - 1 if config.packing == "documents" else 1)
    if num_labels < sequence_length and config.format == "text":
        raise DataError(
            f"data.source {config.source!r} is too short: {report.describe()}; {len(training.tokens)} of its "
            f"{len(documents.tokens)} tokens (end-of-document tokens included) are for training, and one "
            f"sequence of {sequence_length} needs {sequence_length - num_labels} more. Give more text or a "
            "shorter train.sequence_length"
        )
    datasets = Datasets(
        _dataset(training, config, tokenizer, sequence_length, pad_last=False),
        _dataset(held, config, tokenizer, sequence_length, pad_last=True) if held is not None else None,
        tokenizer,
    )
    logger.info(
        "data.source %s: %d documents, %d tokens, %d training and %d held-out sequences of %d",
        config.source,
        report.num_documents,
        len(documents.tokens),
        datasets.train.num_sequences,
        datasets.held_out.num_sequences if datasets.held_out else 0,
        sequence_length,
    )
    return datasets


def check_data(config: DataConfig, sequence_length: int, vocab_size: int, seed: int = 0) -> Datasets | None:
    """For a process that starts others, which read everything: what `build_dataset` returns or raises where the source
    is small; else raises what it would, as far as the tokenizer and the first document tell. What the hub has of both
    is downloaded here, once."""
    if config.source == "random" or num_local_bytes(config, _SMALL_BYTES) <= _SMALL_BYTES:
        return build_dataset(config, sequence_length, vocab_size=vocab_size, seed=seed)
    tokenizer = fitting_tokenizer(config, vocab_size)
    if config.format == "chat":
        load_template(config, tokenizer)
        check_conversations(config)
    else:
        check_documents(config)
    return None


def fitting_tokenizer(config: DataConfig, vocab_size: int | None) -> Tokenizer:
    """The tokenizer of the settings. Raises `DataError` where a model of `vocab_size` does not hold its ids."""
    tokenizer = load_tokenizer(config.tokenizer, config.eos_token)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size and config.source != "random":
        raise DataError(
            f"model.vocab_size {vocab_size} is too small for the tokenizer {tokenizer.name}, which has "
            f"{tokenizer.vocab_size} ids; set it to at least that"
        )
    return tokenizer


def tokenize(documents: Iterable[str], tokenizer: Tokenizer) -> TokenizedDocuments:
    """Tokens of all documents that give any, each followed by the end token."""
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    end = np.array([tokenizer.eos_id], dtype)
    chunks: list[np.ndarray] = []
    lengths: list[int] = []
    draw: list[float] = []
    for texts in _batches(documents):
        parts: list[np.ndarray] = []
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            if len(ids):
                parts += [ids.astype(dtype), end]
                lengths.append(len(ids) + 1)
                draw.append(text_draw(text))
        if parts:
            chunks.append(np.concatenate(parts))
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, dtype)
    return TokenizedDocuments(tokens, _offsets(np.array(lengths, np.int64)), np.array(draw, np.float64))


def tokenize_chat(
    config: DataConfig, tokenizer: Tokenizer, sequence_length: int, report: SourceReport
) -> TokenizedDocuments:
    """Samples of all conversations: the tokens that the chat template makes of them, and which of them to train.

    Raises `DataError` as `load_template`, `read_conversations` and `tokenize_conversations` do, and where nothing is
    left.
    """
    template = load_template(config, tokenizer)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    samples, draw = [], []
    conversations = read_conversations(config, report)
    for conversation, found in tokenize_conversations(
        conversations, template, tokenizer, sequence_length, config.overlong, report
    ):
        samples += found
        draw += [text_draw(conversation.text)] * len(found)
    if not samples:
        raise DataError(
            f"data.source {config.source!r}: every one of {report.num_documents} conversations is longer than "
            f"train.sequence_length {sequence_length} and was left out; raise it"
        )
    tokens = np.concatenate([sample.ids for sample in samples]).astype(dtype)
    trained = np.concatenate([sample.trained for sample in samples])
    lengths = np.array([len(sample.ids) for sample in samples], np.int64)
    return TokenizedDocuments(tokens, _offsets(lengths), np.array(draw, np.float64), trained)


def split(documents: TokenizedDocuments, eval_fraction: float) -> tuple[TokenizedDocuments, TokenizedDocuments | None]:
    """(training, held out) parts. A document's side depends on its own text alone, so adding documents moves
    none and equal ones stay together. Where that leaves a side empty, or fewer than one document is due, the
    end of the longest document is held out instead; of conversations, which are not cut, one whole."""
    num_documents = len(documents.draw)
    if eval_fraction == 0 or len(documents.tokens) < 2:
        return documents, None
    held = documents.draw < eval_fraction
    if num_documents * eval_fraction >= 1 and held.any() and not held.all():
        return documents.select(~held), documents.select(held)
    if documents.trained is not None:
        held = documents.draw == documents.draw.min()
        if held.all():
            logger.warning("there is one conversation only, so none is held out; there will be no evaluation")
            return documents, None
        return documents.select(~held), documents.select(held)
    return _split_longest(documents, eval_fraction)


def _split_longest(
    documents: TokenizedDocuments, eval_fraction: float
) -> tuple[TokenizedDocuments, TokenizedDocuments | None]:
    """Cut the end off the longest document; the part before it ends with the end token too."""
    lengths = np.diff(documents.starts)
    longest = int(np.argmax(lengths))
    begin, end = int(documents.starts[longest]), int(documents.starts[longest + 1])
    wanted = max(round(len(documents.tokens) * eval_fraction), 2)
    cut = max(end - wanted, begin + int(lengths[longest]) // 2)
    if end - cut < 2:
        logger.warning("no document is long enough to hold a part of it out; there will be no evaluation")
        return documents, None
    logger.info("too few documents to hold whole ones out: the last %d tokens of the longest are held out", end - cut)
    tokens = np.concatenate([documents.tokens[:cut], documents.tokens[end - 1 : end], documents.tokens[end:]])
    shorter = lengths.copy()
    shorter[longest] = cut - begin + 1
    tail = TokenizedDocuments(
        documents.tokens[cut:end], np.array([0, end - cut], np.int64), documents.draw[longest : longest + 1]
    )
    return TokenizedDocuments(tokens, _offsets(shorter), documents.draw), tail


def _dataset(
    documents: TokenizedDocuments,
    config: DataConfig,
    tokenizer: Tokenizer,
    sequence_length: int,
    pad_last: bool,
) -> TokenDataset:
    if config.packing == "documents":
        return PackedDataset(documents.tokens, documents.starts, tokenizer, sequence_length, documents.trained)
    return StreamDataset(documents.tokens, tokenizer, sequence_length, pad_last=pad_last)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def text_draw(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)

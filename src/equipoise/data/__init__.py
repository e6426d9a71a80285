"""Text sources, tokenizers, packing and the resumable loader."""

from equipoise.data.config import DataConfig
from equipoise.data.corpus import Datasets, build_dataset
from equipoise.data.dataset import IGNORED_LABEL, TokenDataset, TokenSequence
from equipoise.data.loader import Batch, Loader, eval_batches
from equipoise.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "IGNORED_LABEL",
    "Batch",
    "ByteTokenizer",
    "DataConfig",
    "Datasets",
    "JsonTokenizer",
    "Loader",
    "TokenDataset",
    "TokenSequence",
    "Tokenizer",
    "build_dataset",
    "eval_batches",
    "load_tokenizer",
]

"""Text to token ids and back: plain bytes, or a `tokenizer.json` of the Hugging Face `tokenizers` library."""

import difflib
import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from equipoise.data.hub import is_hub_id, tokenizer_folder
from equipoise.errors import DataError

_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer(Protocol):
    """What the data path and evaluation need of a tokenizer."""

    @property
    def name(self) -> str:
        """Where it came from, for messages."""

    @property
    def vocab_size(self) -> int:
        """Ids are in [0, vocab_size). A model may have more rows, not fewer."""

    @property
    def eos_id(self) -> int:
        """Id that ends a document; `encode` never gives it for text."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of the text, int64 [N], without any special token."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text; faster than one by one where the library has threads."""

    def encode_template(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a rendered chat template, int64 [N], special tokens recognised and none added, and where in the text
        each token comes from, int64 [N, 2], start and end in characters."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the ids; special tokens give nothing, bytes that are not UTF-8 give U+FFFD."""

    def num_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        """UTF-8 bytes of text that the ids stand for (special tokens: 0), to turn nats into nats per byte."""


class ByteTokenizer:
    """One token per UTF-8 byte, 0 to 255, and 256 for end of document. Needs no file and knows every text."""

    name = "bytes"
    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_template(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        sizes = [len(character.encode()) for character in text]
        place = np.repeat(np.arange(len(text)), sizes)
        return self.encode(text), np.stack([place, place + 1], 1)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        array = np.asarray(ids, np.int64)
        return array[array < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def num_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        return int(np.count_nonzero(np.asarray(ids) < 256))


class JsonTokenizer:
    """A `tokenizer.json`. Special tokens written out in a text are read as text, not as special tokens."""

    def __init__(self, path: Path, eos_token: str | None = None) -> None:
        """Load the file; `eos_token` names the end-of-document token, by default as the file's folder says.

        Raises `DataError` when the file cannot be read or no end-of-document token is known.
        """
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise DataError(
                f"data.tokenizer {path}: this needs the package tokenizers (pip install 'equipoise[train]')"
            ) from error
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"data.tokenizer {path}: not a readable tokenizer.json ({error})") from error
        self._backend.no_truncation()  # a file may carry the limits of the model that it was saved with
        self._backend.no_padding()
        self._backend.encode_special_tokens = True
        self.name = str(path)
        self._vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocab.values()) + 1
        self.eos_id = self._find_eos(path, eos_token)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def encode_template(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        self._backend.encode_special_tokens = False
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        finally:
            self._backend.encode_special_tokens = True
        return np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=True)

    def num_bytes(self, ids: Sequence[int] | np.ndarray) -> int:
        """Exact for byte-level tokenizers; of the normalized text, with its added spaces, for others."""
        return int(self._bytes_V[np.asarray(ids, np.int64)].sum())

    @cached_property
    def _bytes_V(self) -> np.ndarray:
        spec = json.loads(self._backend.to_str())
        byte_level = _has_type(spec.get("decoder"), "ByteLevel") or _has_type(spec.get("pre_tokenizer"), "ByteLevel")
        added = {entry["id"]: entry for entry in spec.get("added_tokens", [])}
        table = np.zeros(self.vocab_size, np.int64)
        for token, index in self._vocab.items():
            if index in added:
                size = 0 if added[index]["special"] else len(token.encode())
            elif byte_level:
                size = len(token)  # its alphabet has one character per byte
            elif _BYTE_TOKEN.fullmatch(token):
                size = 1
            else:
                size = len(token.removeprefix("##").replace("\u2581", " ").encode())
            table[index] = size
        return table

    def _find_eos(self, path: Path, eos_token: str | None) -> int:
        if eos_token is None:
            eos_token = _eos_of_folder(path.parent)
            if eos_token is None:
                eos_token = next((token for token in _USUAL_EOS if token in self._vocab), None)
            if eos_token is None:
                raise DataError(
                    f"data.tokenizer {path}: nothing says which token ends a document (no eos_token in a "
                    f"tokenizer_config.json beside it, none of {', '.join(_USUAL_EOS)}); set data.eos_token"
                )
        if eos_token not in self._vocab:
            raise DataError(f"data.eos_token {eos_token!r} is not in the vocabulary of {path}; give one that is")
        return self._vocab[eos_token]


def load_tokenizer(spec: str, eos_token: str | None = None) -> Tokenizer:
    """The tokenizer of `data.tokenizer`: `bytes`, a `tokenizer.json`, a folder that holds one, or a hub id.

    Raises `DataError` when there is none, when it cannot be read, or when the hub is needed and out of reach.
    """
    if spec == "bytes":
        if eos_token is not None:
            raise DataError(f"data.eos_token {eos_token!r}: the byte tokenizer has its own end token; leave it unset")
        return ByteTokenizer()
    path = Path(spec).expanduser()
    if not path.exists():
        if "/" not in spec and difflib.get_close_matches(spec, ["bytes"]):
            raise DataError(f"data.tokenizer {spec!r} does not exist; did you mean 'bytes'?")
        if not is_hub_id(spec):
            raise DataError(
                f"data.tokenizer {spec!r} does not exist; give 'bytes', a tokenizer.json, a folder that "
                "holds one, or a hub id with its owner (owner/name)"
            )
        path = tokenizer_folder(spec)
    if path.is_dir():
        if not (path / "tokenizer.json").is_file():
            raise DataError(
                f"data.tokenizer {spec!r}: the folder has no tokenizer.json; transformers writes one with "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        path = path / "tokenizer.json"
    return JsonTokenizer(path, eos_token)


def _eos_of_folder(folder: Path) -> str | None:
    try:
        token = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError):
        return None
    return token.get("content") if isinstance(token, dict) else token


def _has_type(part: Any, name: str) -> bool:
    """Whether a part of a tokenizer's description is of this type, or a sequence with a step that is."""
    if isinstance(part, dict):
        return part.get("type") == name or any(_has_type(value, name) for value in part.values())
    return isinstance(part, list) and any(_has_type(value, name) for value in part)

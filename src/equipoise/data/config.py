"""Settings of the training text: where it comes from, how it becomes tokens, how tokens become sequences."""

from pathlib import PurePosixPath
from typing import Literal

from pydantic import Field, field_validator, model_validator

from equipoise.config import Config


class DataConfig(Config):
    """What the model reads. `build_dataset` in `equipoise.data.corpus` turns it into sequences."""

    source: str = Field("stdlib", min_length=1)
    """`stdlib` (the .py files of the running Python's standard library: nothing to download), `random`
    (uniform tokens, for benchmarks), a text file, a `.jsonl` or `.parquet` file, a folder of such files, or
    `hf://owner/name[@revision]`, a dataset of the Hugging Face hub. Write `./stdlib` for a folder of that
    name."""

    include: str | None = Field(None, min_length=1)
    """Which files of a folder or hub dataset to read, as a glob relative to it, such as `**/*.md`. Unset:
    every file of a folder that is not hidden; of a hub dataset, the files of its training split."""

    format: Literal["text", "chat"] = "text"
    """What a JSONL line or Parquet row holds. `text`: a document. `chat`: a conversation, a list of messages with
    `role` and `content`, rendered by the tokenizer's chat template; only what the assistant wrote is trained."""

    column: str | None = Field(None, min_length=1)
    """Field of each JSONL line, or column of each Parquet file, that holds the text or the messages. Plain text has
    none. Unset: `text`, or `messages` where format is `chat`."""

    chat_template: str | None = Field(None, min_length=1)
    """File with a Jinja chat template, in place of the tokenizer's own. Unset: the tokenizer's."""

    overlong: Literal["error", "drop", "truncate"] = "error"
    """What to do with a conversation that is longer than a sequence; `truncate` keeps its beginning."""

    tokenizer: str = Field("bytes", min_length=1)
    """`bytes` (one token per UTF-8 byte, and 256 for end of document), a `tokenizer.json` of the Hugging Face
    `tokenizers` library, a folder that holds one, or the id of a model on the hub."""

    eos_token: str | None = Field(None, min_length=1)
    """Token that ends a document, such as `<|endoftext|>`. Unset: what the tokenizer's folder says."""

    packing: Literal["concat", "documents"] = "concat"
    """`concat` cuts one stream of all documents, separated by the end-of-document token, into sequences.
    `documents` puts whole documents side by side; attention and positions stop at each document's end."""

    shuffle: bool = True
    """Visit the sequences in a new random order each epoch (from the run's seed); otherwise in order."""

    eval_fraction: float = Field(0.02, ge=0.0, le=0.5)
    """Share of the documents held out for evaluation, chosen by a hash of their text, so that copies of a
    document stay on one side. Where there are too few documents, the end of the longest one is held out. 0
    holds out none."""

    max_documents: int | None = Field(None, ge=1)
    """Read only this many documents, in the order of the source. Unset: all. The tokens are held in
    memory."""

    @field_validator("include")
    @classmethod
    def _include_is_relative(cls, value: str | None) -> str | None:
        if value is not None and (PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts):
            raise ValueError(f"include is a glob below the source folder, such as '**/*.txt', not {value!r}")
        return value

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> "DataConfig":
        if self.source == "random" and (self.packing == "documents" or self.max_documents is not None):
            raise ValueError("source 'random' has no documents; leave packing at 'concat' and max_documents unset")
        if self.format == "chat":
            if self.source in ("stdlib", "random"):
                raise ValueError(f"source {self.source!r} has no conversations; give a .jsonl or .parquet file of them")
            if self.packing != "documents":
                raise ValueError(
                    "format 'chat' needs packing 'documents', in which no conversation sees another one; 'concat' "
                    "would cut them anywhere"
                )
        elif self.chat_template is not None or self.overlong != "error":
            raise ValueError("chat_template and overlong are for format 'chat'; leave them unset")
        if self.source in ("stdlib", "random") and self.include is not None:
            raise ValueError(f"source {self.source!r} is no folder; leave include unset")
        return self

    @property
    def column_name(self) -> str:
        """`column`, or what it is where it is unset."""
        return self.column or ("messages" if self.format == "chat" else "text")

"""Conversations to tokens: a tokenizer's chat template, and which tokens the assistant wrote.

Templates are Jinja programs, rendered by transformers, as for inference. Where a template marks what the assistant
writes (`{% generation %}`), those marks are used. Otherwise turns are found by rendering: the text of an assistant's
turn is what it adds to the conversation before it, with the prompt for an answer. Some templates render an earlier turn
otherwise than the last one (they drop its reasoning). Of them each assistant's turn becomes a sample of its own, after
the conversation before it as the model sees it when it has to answer.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from equipoise.data.config import DataConfig
from equipoise.data.sources import SourceReport
from equipoise.data.tokenizer import Tokenizer
from equipoise.errors import DataError

Span = tuple[int, int]
"""Start and end of a part of a text, in characters."""


class Conversation(NamedTuple):
    """`messages`: dictionaries with `role` and `content`. `tools`: JSON schemas of functions, or None. `where`: file
    and line."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    where: str

    @property
    def text(self) -> str:
        """All of it, the same for equal conversations."""
        return json.dumps([self.messages, self.tools], sort_keys=True)


class Sample(NamedTuple):
    """`ids` int64 [N]; `trained` bool [N]: tokens that the assistant wrote."""

    ids: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template, where it was found, and the special tokens that it may name."""

    source: str
    where: str
    special_tokens: dict[str, str]

    def render(self, conversation: Conversation, count: int | None = None, ask: bool = False) -> str:
        """Text of the first `count` messages; with `ask` followed by the prompt for the assistant's answer."""
        return self._render(conversation, count, ask, marked=False)[0]

    def assistant_spans(self, conversation: Conversation) -> list[tuple[str, list[Span]]]:
        """The texts to train on, usually one, each with the parts of it that the assistant wrote.

        Raises:
            DataError: no turn of the assistant, or a template whose text of a turn cannot be told from the prompt.
        """
        turns = [i for i, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        if not turns:
            raise DataError(
                f"{conversation.where}: the conversation has no turn of the role 'assistant', so nothing in it would "
                f"be trained (its roles: {', '.join(m['role'] for m in conversation.messages)}). Remove it, or "
                "rename the roles"
            )
        if self.has_marks:
            text, spans = self._render(conversation, None, ask=False, marked=True)
            if not any(end > start for start, end in spans):
                raise DataError(
                    f"{conversation.where}: the chat template ({self.where}) marks nothing of this conversation as "
                    "written by the assistant; its {% generation %} block is not reached"
                )
            return [(text, spans)]
        starts = [self.render(conversation, turn, ask=True) for turn in turns]
        ends = [self.render(conversation, turn + 1) for turn in turns]
        for turn, start, end in zip(turns, starts, ends):
            if not end.startswith(start) or len(end) == len(start):
                raise DataError(
                    f"{conversation.where}: with the chat template ({self.where}) message {turn} does not continue the "
                    f"prompt for it. The prompt ends with {start[-60:]!r}, the conversation with {end[-60:]!r}. Mark "
                    "what the assistant writes in the template by {% generation %}...{% endgeneration %}, and give it "
                    "as data.chat_template"
                )
        whole = self.render(conversation)
        if all(whole.startswith(end) for end in ends):
            return [(whole, [(len(start), len(end)) for start, end in zip(starts, ends)])]
        return [(end, [(len(start), len(end))]) for start, end in zip(starts, ends)]

    @property
    def has_marks(self) -> bool:
        """Whether the template marks what the assistant writes."""
        return "generation" in self.source.replace("add_generation_prompt", "") and "endgeneration" in self.source

    def _render(self, conversation: Conversation, count: int | None, ask: bool, marked: bool) -> tuple[str, list[Span]]:
        try:
            texts, spans = _renderer()(
                [conversation.messages[:count]],
                tools=conversation.tools,
                chat_template=self.source,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=ask,
                **self.special_tokens,
            )
        except Exception as error:  # templates raise Jinja's errors and those of what they call
            raise DataError(
                f"{conversation.where}: the chat template ({self.where}) refuses the conversation: {error}"
            ) from error
        return texts[0], spans[0] if marked else []


@lru_cache
def _renderer() -> Any:
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise DataError(
            "data.format 'chat' needs the package transformers (pip install 'equipoise[hf]'), which renders chat "
            f"templates: {error}"
        ) from error
    return render_jinja_template


def load_template(config: DataConfig, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of `data.chat_template`, otherwise the tokenizer's own.

    A tokenizer's folder has it in `chat_template.jinja` or in `tokenizer_config.json`; of several the one named
    `default` is meant. Raises `DataError` where there is none.
    """
    folder = Path(tokenizer.name).parent if tokenizer.name != "bytes" else None
    settings = _tokenizer_settings(folder)
    special = {key: _content(value) for key, value in settings.items() if key.endswith("_token") and value}
    if config.chat_template is not None:
        path = Path(config.chat_template).expanduser()
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), str(path), special)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"data.chat_template {config.chat_template!r} cannot be read: {error}") from error
    if folder is not None and (path := folder / "chat_template.jinja").is_file():
        return ChatTemplate(path.read_text(encoding="utf-8"), str(path), special)
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not isinstance(template, str):
        raise DataError(
            f"data.format is 'chat' but the tokenizer {tokenizer.name} has no chat template (chat_template.jinja, or "
            "chat_template in tokenizer_config.json); name a file with one as data.chat_template, or take the "
            "tokenizer of the model's chat version (--model.load_from FOLDER brings its own)"
        )
    return ChatTemplate(template, f"{folder}/tokenizer_config.json", special)


def _tokenizer_settings(folder: Path | None) -> dict[str, Any]:
    try:
        return json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        return {}


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def tokenize_conversations(
    conversations: Iterable[Conversation],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    sequence_length: int,
    overlong: str,
    report: SourceReport,
) -> Iterator[tuple[Conversation, list[Sample]]]:
    """Each conversation with its samples of at most `sequence_length + 1` tokens.

    `overlong` says what happens to a longer one: `error`, `drop`, or `truncate` to its beginning (dropped if that has
    no token of the assistant). What was dropped or cut is counted in `report`.

    Raises:
        DataError: a longer one where that is an error; names its place, its length and what to do.
    """
    for conversation in conversations:
        samples = []
        texts = template.assistant_spans(conversation)
        if len(texts) > 1:
            report.note(
                "conversations were split into one sample for each turn of the assistant, since the chat template "
                "renders earlier turns otherwise than the last",
                conversation.where,
            )
        for text, spans in texts:
            sample = _tokenize(text, spans, tokenizer)
            if len(sample.ids) - 1 > sequence_length:
                if overlong == "error":
                    raise DataError(
                        f"{conversation.where}: the conversation has {len(sample.ids)} tokens and "
                        f"train.sequence_length {sequence_length} holds {sequence_length + 1}. Raise it, or set "
                        "data.overlong to 'drop' or 'truncate'"
                    )
                if overlong == "truncate":
                    sample = Sample(sample.ids[: sequence_length + 1], sample.trained[: sequence_length + 1])
                if overlong == "drop" or not sample.trained[1:].any():
                    report.note("conversations longer than a sequence were dropped", conversation.where)
                    continue
                report.note("conversations longer than a sequence were cut at its end", conversation.where)
            samples.append(sample)
        if samples:
            yield conversation, samples


def _tokenize(text: str, spans: list[Span], tokenizer: Tokenizer) -> Sample:
    """A token counts as the assistant's if any character of it does."""
    ids, offsets = tokenizer.encode_template(text)
    trained = np.zeros(len(ids), bool)
    for start, end in spans:
        trained |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
    return Sample(ids, trained)

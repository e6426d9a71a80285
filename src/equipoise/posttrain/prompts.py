"""Prompts with their answers: from a file or a built-in task, tokenized, some held out, in the order of the steps."""

import itertools
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from equipoise.data import Loader, Tokenizer, TokenSequence
from equipoise.data.chat import Conversation, load_template
from equipoise.data.conversations import check_messages
from equipoise.data.corpus import fitting_tokenizer, text_draw
from equipoise.data.sources import JSONL, SourceReport, jsonl_rows, no_column
from equipoise.errors import DataError
from equipoise.posttrain_config import PosttrainConfig
from equipoise.train.config import TrainConfig

SETTING = "posttrain.prompts"


class Problem(NamedTuple):
    """prompt: as text, a chat's as its template renders it. ids: its tokens. where: its place, for messages."""

    prompt: str
    answer: str
    ids: list[int]
    where: str


class Problems:
    """Some of the problems, by number, with what `Loader` asks of a dataset."""

    has_documents, pad_id = False, 0

    def __init__(self, problems: Sequence[Problem], sequence_length: int) -> None:
        self.problems, self.sequence_length = problems, sequence_length
        self.num_sequences = len(problems)

    @cached_property
    def fingerprint(self) -> str:
        """Of everything that decides what is asked and rewarded."""
        digest = blake2b(b"problems", digest_size=16)
        for problem in self.problems:
            digest.update(json.dumps([problem.ids, problem.answer]).encode())
        return digest.hexdigest()

    def sequence(self, index: int) -> TokenSequence:
        raise NotImplementedError("prompts are no training sequences")

    def num_bytes(self, labels: np.ndarray) -> int:
        raise NotImplementedError("prompts are no training sequences")


class ProblemSet(NamedTuple):
    """Problems to train on, those held out (maybe none), and the tokenizer of both."""

    train: Problems
    held_out: Problems
    tokenizer: Tokenizer


class ProblemLoader(Loader):
    """The problems of each step, the same on every rank: `Loader`'s order and position, counted in prompts."""

    def __init__(self, problems: Problems, prompts_per_step: int, seed: int, shuffle: bool) -> None:
        super().__init__(problems, prompts_per_step, prompts_per_step, seed=seed, shuffle=shuffle)
        self._problems = problems.problems

    def next_problems(self) -> list[Problem]:
        """Those of the next step."""
        return self.next_step()  # type: ignore[return-value]

    def _build(self, position: int) -> list[Any]:
        return [self._problems[self._index(at)] for at in range(position, position + self._global_batch_size)]


def load_problems(config: TrainConfig) -> ProblemSet:
    """All problems of the settings, checked. Needs no process group.

    Raises:
        DataError: a missing or malformed file, a wrong column, a prompt without tokens or too long for
            train.sequence_length with its answer, a tokenizer that the model does not fit; names the place.
    """
    settings = config.posttrain
    assert settings is not None
    tokenizer = fitting_tokenizer(config.data, config.model.vocab_size)
    limit = config.train.sequence_length - settings.max_new_tokens
    sides: tuple[list[Problem], list[Problem]] = [], []
    for prompt, answer, where in itertools.islice(_raw(settings), config.data.max_documents):
        if isinstance(prompt, str):
            text, ids = prompt, tokenizer.encode(prompt)
        else:
            text = load_template(config.data, tokenizer).render(Conversation(prompt, None, where), ask=True)
            ids = tokenizer.encode_template(text)[0]
        if not 0 < len(ids) <= limit:
            raise DataError(
                f"{SETTING} {where}: the prompt has {len(ids)} tokens; expected 1 to {limit}, train.sequence_length "
                f"{config.train.sequence_length} less posttrain.max_new_tokens {settings.max_new_tokens}. Raise or "
                "lower one of them, or shorten the prompt"
            )
        problem = Problem(text, answer, [int(id_) for id_ in ids], where)
        sides[text_draw(text) < config.data.eval_fraction].append(problem)
    if not sides[0]:
        held = f"; {len(sides[1])} are held out (data.eval_fraction {config.data.eval_fraction:g})" if sides[1] else ""
        raise DataError(f"{SETTING} {settings.prompts!r} has no prompt to train on{held}; give more")
    length = config.train.sequence_length
    return ProblemSet(Problems(sides[0], length), Problems(sides[1], length), tokenizer)


Raw = tuple[str | list[dict[str, Any]], str, str]
"""Prompt or messages, answer, place."""


def _copy() -> Iterator[Raw]:
    letters = "abcdef"
    for a, b in itertools.product(letters, letters):
        yield f"{a}{b}=", f"{a}{b}", f"copy {a}{b}"


def _addition() -> Iterator[Raw]:
    for a, b in itertools.product(range(100), range(100)):
        yield f"{a}+{b}=", str(a + b), f"addition {a}+{b}"


TASKS = {"copy": _copy, "addition": _addition}


def _raw(settings: PosttrainConfig) -> Iterator[Raw]:
    if settings.prompts in TASKS:
        yield from TASKS[settings.prompts]()
        return
    path = Path(settings.prompts).expanduser()
    if not path.is_file() or path.suffix.lower() not in JSONL:
        what = "does not exist" if not path.exists() else "is no file of JSON lines"
        raise DataError(
            f"{SETTING} {settings.prompts!r} {what} (looked for {path.absolute()}); give a .jsonl file, or one of the "
            f"tasks {', '.join(TASKS)}"
        )
    report = SourceReport(settings.prompts)
    try:
        for row, where in jsonl_rows(path, settings.prompt_column, report, SETTING, "posttrain.prompt_column"):
            yield _row(row, where, settings)
    except OSError as error:
        raise DataError(f"{SETTING}: cannot read {path}: {error.strerror or error}") from error
    report.log()


def _row(row: dict[str, Any], where: str, settings: PosttrainConfig) -> Raw:
    if settings.answer_column not in row:
        raise no_column(settings.answer_column, where, list(row), SETTING, "posttrain.answer_column")
    prompt, answer = row[settings.prompt_column], row[settings.answer_column]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DataError(
            f"{SETTING} {where}: {settings.answer_column!r} holds {type(answer).__name__}; expected a text or a number"
        )
    if not isinstance(prompt, str):
        prompt = check_messages(prompt, settings.prompt_column, where, SETTING)
    return prompt, str(answer), where

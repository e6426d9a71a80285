"""Conversations: chat templates, a loss on the assistant's tokens only, packing, and what is refused."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from equipoise.data import DataConfig, build_dataset, load_tokenizer
from equipoise.data.chat import Conversation, load_template
from equipoise.data.corpus import Datasets
from equipoise.data.dataset import IGNORED_LABEL
from equipoise.errors import DataError

pytest.importorskip("transformers", reason="chat templates are rendered by transformers")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
FORGETFUL = (  # the last turn has a place for reasoning, earlier ones have none
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think></think>"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = "{% if messages[0].role != 'user' %}{{ raise_exception('a user comes first') }}{% endif %}" + CHATML
TALK = [
    ("system", "Be kind."),
    ("user", "naïve 日本 \U0001f600?"),
    ("assistant", "Yes."),
    ("user", "Why"),
    ("assistant", "So!"),
]


def messages(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def save_tokenizer(folder: Path, template: Any = CHATML) -> Path:
    """A byte-level tokenizer with a few merges and ChatML's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["user assistant system Yes. Why So!"] * 3, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")]
    )
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": "<|endoftext|>",
        "bos_token": {"__type": "AddedToken", "content": "<s>"},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    return folder


def save_talks(path: Path, *talks: Any, column: str = "messages", **more: Any) -> Path:
    lines = [json.dumps({column: messages(*talk) if isinstance(talk, list) else talk, **more}) for talk in talks]
    path.write_text("\n".join(lines))
    return path


def build(tmp_path: Path, *talks: Any, template: Any = CHATML, length: int = 120, **settings: Any) -> Datasets:
    tokenizer = save_tokenizer(tmp_path / "tokenizer", template)
    source = save_talks(tmp_path / "chat.jsonl", *talks)
    values = {"source": str(source), "tokenizer": str(tokenizer), "eval_fraction": 0.0} | settings
    return build_dataset(DataConfig(format="chat", packing="documents", **values), length)


def trained(datasets: Datasets) -> list[str]:
    """What each stretch of labels says, special tokens written out."""
    backend = datasets.tokenizer._backend  # type: ignore[attr-defined]
    found = []
    for index in range(datasets.train.num_sequences):
        labels = datasets.train.sequence(index).labels
        for part in np.split(labels, np.flatnonzero(labels == IGNORED_LABEL)):
            part = part[part != IGNORED_LABEL]
            if len(part):
                found.append(backend.decode(part.tolist(), skip_special_tokens=False))
        assert (labels != IGNORED_LABEL).any()
    return found


def test_only_what_the_assistant_wrote_is_trained(tmp_path: Path) -> None:
    datasets = build(tmp_path, TALK)
    assert trained(datasets) == ["Yes.<|im_end|>\n", "So!<|im_end|>\n"]
    sequence = datasets.train.sequence(0)
    first_turn = np.flatnonzero(sequence.labels != IGNORED_LABEL)[:2]
    assert (sequence.input_ids[first_turn + 1] == sequence.labels[first_turn]).all(), "a label is the next token"


@pytest.mark.parametrize("template", [CHATML, MARKED, FORGETFUL])
def test_tokens_are_those_of_transformers(tmp_path: Path, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    folder = save_tokenizer(tmp_path / "tokenizer", template)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    want = theirs.apply_chat_template(
        messages(*TALK), tokenize=True, return_dict=True, return_assistant_tokens_mask=template is MARKED
    )
    tokenizer = load_tokenizer(str(folder))
    chat = load_template(DataConfig(format="chat", packing="documents", source="x.jsonl"), tokenizer)
    text = chat.render(Conversation(messages(*TALK), None, "here"))
    ids, offsets = tokenizer.encode_template(text)
    assert ids.tolist() == want["input_ids"]
    assert len(offsets) == len(ids)
    if template is MARKED:
        [(marked_text, spans)] = chat.assistant_spans(Conversation(messages(*TALK), None, "here"))
        assert marked_text == text
        assert [text[start:end] for start, end in spans] == ["Yes.<|im_end|>", "So!<|im_end|>"]
        mask = [any(a < end and b > start for start, end in spans) for a, b in offsets.tolist()]
        assert mask == [bool(m) for m in want["assistant_masks"]]


def test_a_template_that_marks_the_assistant_is_believed(tmp_path: Path) -> None:
    assert trained(build(tmp_path, TALK, template=MARKED)) == ["Yes.<|im_end|>", "So!<|im_end|>"]


def test_turns_that_are_rendered_otherwise_later_become_samples_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    datasets = build(tmp_path, TALK, template=FORGETFUL, length=200)
    turns = ["<think></think>So!<|im_end|>\n", "<think></think>Yes.<|im_end|>\n"]
    assert sorted(trained(datasets)) == turns, "each as the model has to answer it"
    assert "one sample for each turn" in caplog.text
    assert np.diff(datasets.train.sequence(0).cu_seqlens).shape == (2,)


def test_special_tokens_are_one_token_each_and_the_templates_alone_end_a_conversation(tmp_path: Path) -> None:
    datasets = build(tmp_path, TALK)
    sequence = datasets.train.sequence(0)
    starts = sequence.input_ids == datasets.tokenizer._vocab["<|im_start|>"]  # type: ignore[attr-defined]
    assert starts.sum() == len(TALK)
    assert datasets.tokenizer.eos_id not in sequence.labels


def test_conversations_are_packed_whole_and_do_not_see_each_other(tmp_path: Path) -> None:
    talks = [[("user", "q" * n), ("assistant", f"a{n}")] for n in (1, 4, 9, 13, 20)]
    datasets = build(tmp_path, *talks, length=90)
    assert datasets.train.num_sequences < len(talks)
    assert sorted(trained(datasets)) == sorted(f"a{n}<|im_end|>\n" for n in (1, 4, 9, 13, 20))
    pieces = [len(datasets.train.sequence(i).cu_seqlens) - 1 for i in range(datasets.train.num_sequences)]  # type: ignore[arg-type]
    assert sum(pieces) == len(talks)


def test_a_file_of_bytes_needs_no_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "plain.jinja").write_text(CHATML)
    datasets = build(tmp_path, TALK, tokenizer="bytes", chat_template=str(tmp_path / "plain.jinja"), length=300)
    labels = datasets.train.sequence(0).labels
    assert datasets.tokenizer.decode(labels[labels != IGNORED_LABEL]) == "Yes.<|im_end|>\nSo!<|im_end|>\n"


@pytest.mark.parametrize("place", ["jinja file", "named list"])
def test_where_a_template_is_found(tmp_path: Path, place: str) -> None:
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
    folder = save_tokenizer(tmp_path / "tokenizer", named if place == "named list" else "not this one")
    if place == "jinja file":
        (folder / "chat_template.jinja").write_text(CHATML)
    config = DataConfig(format="chat", packing="documents", source="x.jsonl")
    assert load_template(config, load_tokenizer(str(folder))).source == CHATML


def test_parquet_and_tools(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    template = "{{ tools[0].name if tools else '' }}" + CHATML
    tools = json.dumps([{"name": "look"}])
    pq.write_table(pa.table({"talk": [messages(*TALK)], "tools": [tools], "n": [1]}), tmp_path / "a.parquet")
    source = {"source": str(tmp_path / "a.parquet"), "column": "talk"}
    datasets = build(tmp_path, TALK, template=template, **source)
    assert datasets.tokenizer.decode(datasets.train.sequence(0).input_ids).startswith("look")
    assert trained(datasets) == ["Yes.<|im_end|>\n", "So!<|im_end|>\n"]


def test_whole_conversations_are_held_out(tmp_path: Path) -> None:
    talks = [[("user", f"question {n}"), ("assistant", f"answer {n}")] for n in range(5)]
    datasets = build(tmp_path, *talks, eval_fraction=0.1)
    assert datasets.held_out is not None
    held = datasets.held_out.sequence(0).labels
    said = datasets.tokenizer.decode(held[held != IGNORED_LABEL])
    assert said.count("answer") == 1
    assert len(trained(datasets)) == 4
    assert said.strip() not in [turn.removesuffix("<|im_end|>\n") for turn in trained(datasets)]


def test_one_conversation_is_not_cut_to_hold_a_part_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert build(tmp_path, TALK, eval_fraction=0.1).held_out is None
    assert "one conversation only" in caplog.text


def test_longer_conversations_are_refused_dropped_or_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    short, long = [("user", "a"), ("assistant", "b")], [("user", "a"), ("assistant", "z" * 90)]
    late = [("user", "q" * 90), ("assistant", "never seen")]
    with pytest.raises(DataError, match=r"chat.jsonl, line 2: the conversation has \d+ tokens and .*data.overlong"):
        build(tmp_path, short, long, length=40)
    assert trained(build(tmp_path, short, long, length=40, overlong="drop")) == ["b<|im_end|>\n"]
    assert "1 conversations longer than a sequence were dropped" in caplog.text
    caplog.clear()
    caplog.set_level(logging.WARNING)
    kept = trained(build(tmp_path, short, long, late, length=40, overlong="truncate"))
    assert sorted(len(turn.strip("z")) for turn in kept) == [0, len("b<|im_end|>\n")]
    assert "were cut at its end" in caplog.text
    assert "were dropped (first" in caplog.text, "nothing of the assistant is left of one"
    with pytest.raises(DataError, match="every one of 1 conversations is longer"):
        build(tmp_path, long, length=40, overlong="drop")


REFUSED: dict[str, tuple[Any, str]] = {
    "no assistant": ([("user", "hello"), ("user", "?")], r"line 1: the conversation has no turn .*user, user"),
    "no list": ("hello", r"'messages' holds str, not a list of messages; expected \[\{\"role\""),
    "foreign format": ([{"from": "human", "value": "hi"}], r"message 0 has the fields from, value; expected"),
    "picture": (
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
        r"message 0 \(user\) is parts of the kinds image, text; expected text",
    ),
    "no content": ([{"role": "user", "content": None}], r"message 0 \(user\) is NoneType; expected text"),
    "nothing": ([], r"has no conversations"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_malformed_conversation_is_refused_with_its_place(tmp_path: Path, name: str) -> None:
    talk, message = REFUSED[name]
    (tmp_path / "chat.jsonl").write_text("")
    if isinstance(talk, list) and talk and isinstance(talk[0], tuple):
        talk = messages(*talk)
    tokenizer = save_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": talk}))
    config = DataConfig(
        format="chat", packing="documents", source=str(tmp_path / "chat.jsonl"), tokenizer=str(tokenizer)
    )
    with pytest.raises(DataError, match=message):
        build_dataset(config, 50)


def test_other_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no chat template .*data\.chat_template"):
        build(tmp_path, TALK, template=None)
    with pytest.raises(DataError, match=r"line 1: the chat template .* refuses the conversation: a user comes first"):
        build(tmp_path, TALK, template=STRICT)
    with pytest.raises(DataError, match=r"message 2 does not continue the prompt for it.*\{% generation %\}"):
        build(tmp_path, TALK, template="{% for m in messages|reverse %}{{ m.content }}{% endfor %}")
    with pytest.raises(DataError, match=r"chat_template '.*missing.jinja' cannot be read"):
        build(tmp_path, TALK, chat_template=str(tmp_path / "missing.jinja"))
    (tmp_path / "a.txt").write_text("hello")
    with pytest.raises(DataError, match=r"conversations are read from \.jsonl and \.parquet files"):
        build(tmp_path, TALK, source=str(tmp_path / "a.txt"))
    with pytest.raises(DataError, match=r"line 1: no column 'talk'; set data.column to one of messages"):
        build(tmp_path, TALK, column="talk")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"format": "chat"}, "has no conversations"),
        ({"format": "chat", "source": "a.jsonl"}, "needs packing 'documents'"),
        ({"chat_template": "a.jinja"}, "are for format 'chat'"),
        ({"overlong": "drop"}, "are for format 'chat'"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        DataConfig(**settings)

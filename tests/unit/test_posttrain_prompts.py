"""Prompts, answers and rewards: what is read, and what is refused before any work begins."""

import json
import math
from pathlib import Path

import jinja2
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from equipoise.data import chat
from equipoise.data.corpus import text_draw
from equipoise.errors import ConfigError, DataError
from equipoise.posttrain.prompts import TASKS, Problem, ProblemLoader, load_problems
from equipoise.posttrain.rewards import REWARDS, character_match, exact_match, load_reward, number_match, score
from equipoise.posttrain.run import check_settings
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config


def settings(*overrides: str) -> TrainConfig:
    return load_config(TrainConfig, "posttrain-demo", overrides)


def write(path: Path, *rows: object) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("task", TASKS)
def test_built_in_tasks_are_answered_by_their_answers(task: str) -> None:
    found = load_problems(settings("--posttrain.prompts", task, "--train.sequence-length", "16"))
    everything = [*found.train.problems, *found.held_out.problems]
    assert len({problem.prompt for problem in everything}) == len(everything) >= 36
    assert 0.1 < len(found.held_out.problems) / len(everything) < 0.3
    for problem in everything[::97]:
        assert found.tokenizer.decode(problem.ids) == problem.prompt
        expected = str(eval(problem.prompt[:-1])) if task == "addition" else problem.prompt[:-1]
        assert problem.answer == expected


def test_a_file_is_read_by_its_columns_and_split_by_its_prompts(tmp_path: Path) -> None:
    rows = [{"q": f"{n}?", "a": n if n % 2 else f"{n}", "other": None} for n in range(200)]
    path = write(tmp_path / "p.jsonl", *rows[:100], "", *rows[100:])
    columns = ("--posttrain.prompt_column", "q", "--posttrain.answer_column", "a")
    found = load_problems(settings("--posttrain.prompts", path, *columns))
    assert len(found.train.problems) + len(found.held_out.problems) == 200
    assert {p.answer for p in found.train.problems} < {str(n) for n in range(200)}
    more = load_problems(settings("--posttrain.prompts", path, *columns, "--data.max_documents", "150"))
    assert {p.prompt for p in more.held_out.problems} <= {p.prompt for p in found.held_out.problems}
    assert more.train.fingerprint != found.train.fingerprint


def test_messages_are_rendered_with_the_prompt_for_an_answer(tmp_path: Path, monkeypatch) -> None:
    def render(conversations, chat_template, add_generation_prompt, **_):  # transformers' takes seconds to import
        template = jinja2.Template(chat_template)
        return [template.render(messages=c, add_generation_prompt=add_generation_prompt) for c in conversations], None

    monkeypatch.setattr(chat, "_renderer", lambda: render)
    words = ["<eos>", "user", "assistant", "why", ":", "you"]
    backend = Backend(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<eos>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }} : {{ m.content }} {% endfor %}{% if add_generation_prompt %}"
    template += "assistant :{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "chat_template": template}))
    path = write(tmp_path / "p.jsonl", {"prompt": [{"role": "user", "content": "why you"}], "answer": "why"})
    length = ("--train.sequence-length", "16")
    found = load_problems(settings("--posttrain.prompts", path, "--data.tokenizer", str(tmp_path), *length))
    assert found.train.problems[0].prompt == "user : why you assistant :"
    assert found.train.problems[0].ids == [1, 4, 3, 5, 2, 4]


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        ([{"question": "1", "answer": "1"}], [], r"line 1: no column 'prompt'; set posttrain.prompt_column to one of"),
        ([{"prompt": "1", "solution": "1"}], [], r"set posttrain.answer_column to one of prompt, solution"),
        ([{"prompt": "1", "answer": None}], [], r"'answer' holds NoneType; expected a text or a number"),
        ([{"prompt": "1", "answer": True}], [], r"'answer' holds bool"),
        ([{"prompt": 1, "answer": "1"}], [], r"posttrain.prompts .*'prompt' holds int, not a list of messages"),
        ([{"prompt": "1", "answer": 1}, "{"], [], r"line 2 is not JSON"),
        (["[]"], [], r"expected a JSON object, got list"),
        ([{"prompt": "", "answer": "1"}], [], r"line 1: the prompt has 0 tokens; expected 1 to"),
        (
            [{"prompt": "1234567", "answer": "1"}],
            [],
            r"the prompt has 7 tokens; expected 1 to 5, train.sequence_length 8",
        ),
        ([], [], r"has no prompt to train on"),
        ([{"prompt": "1", "answer": "1"}], ["--model.vocab_size", "256"], r"model.vocab_size 256 is too small"),
        ([{"prompt": "1", "answer": "1"}], ["--data.tokenizer", "./none.json"], r"data.tokenizer './none.json'"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(tmp_path: Path, rows, overrides, message: str) -> None:
    path = write(tmp_path / "p.jsonl", *rows)
    with pytest.raises(DataError, match=message):
        load_problems(settings("--posttrain.prompts", path, *overrides))


@pytest.mark.parametrize("name", ["copi", "nowhere.jsonl", "folder"])
def test_a_missing_file_is_refused_with_the_tasks_that_there_are(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=f"posttrain.prompts '{name}' .*tasks copy, addition"):
        load_problems(settings("--posttrain.prompts", name))


def test_all_prompts_held_out_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "1", "answer": "1"})
    config = settings("--posttrain.prompts", path)
    held = next(str(n) for n in range(100) if text_draw(str(n)) < config.data.eval_fraction)
    write(tmp_path / "p.jsonl", {"prompt": held, "answer": "1"})
    with pytest.raises(DataError, match=r"no prompt to train on; 1 are held out \(data.eval_fraction 0.2\)"):
        load_problems(config)


def test_the_order_of_prompts_visits_each_and_resumes() -> None:
    config = settings("--data.eval_fraction", "0")
    problems = load_problems(config).train
    with ProblemLoader(problems, 5, seed=3, shuffle=True) as loader:
        steps = [loader.next_problems() for _ in range(9)]
        seen = [problem.prompt for step in steps for problem in step]
        assert sorted(seen[:36]) == sorted(problem.prompt for problem in problems.problems)
        assert seen[:36] != [problem.prompt for problem in problems.problems]
    with ProblemLoader(problems, 5, seed=3, shuffle=True) as loader:
        for _ in range(4):
            loader.next_problems()
        state = loader.state_dict()
    with ProblemLoader(problems, 5, seed=3, shuffle=True) as again:
        again.load_state_dict(json.loads(json.dumps(state)))
        assert [again.next_problems() for _ in range(5)] == steps[4:]
        with pytest.raises(DataError, match="belongs to other data"):
            again.load_state_dict(state | {"fingerprint": "another"})


@pytest.mark.parametrize(
    ("reward", "answer", "text", "wanted"),
    [
        (exact_match, "ab", " ab\n", 1),
        (exact_match, "ab", "abc", 0),
        (exact_match, "", "", 1),
        (number_match, "1,234", "so it is 1234.0", 1),
        (number_match, "reasons #### -7", "3 - 10 = -7", 1),
        (number_match, "7", "7 or 8", 0),
        (number_match, "7", "seven", 0),
        (number_match, "none", "7", 0),
        (character_match, "abc", "abd", 2 / 3),
        (character_match, "ab", "abab", 0.5),
        (character_match, "ab", "", 0),
        (character_match, "", "", 1),
    ],
)
def test_built_in_rewards(reward, answer: str, text: str, wanted: float) -> None:
    assert reward("p", answer, text) == pytest.approx(wanted)


def test_a_reward_of_ones_own_comes_from_a_file_or_a_module(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "grading_of_mine.py").write_text("def length(prompt, answer, text):\n    return len(text)\n")
    monkeypatch.chdir(tmp_path)
    problem = Problem("p", "a", [1], "line 1")
    for name in ("grading_of_mine.py:length", "grading_of_mine:length"):
        assert score(load_reward(name), name, problem, "four") == 4.0
    assert load_reward("exact_match") is REWARDS["exact_match"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("exact", "there is no reward 'exact': choose exact_match, number_match, character_match"),
        (":f", "there is no reward ':f'"),
        ("nowhere.py:f", "importing nowhere.py failed with FileNotFoundError: there is no file"),
        ("no.such.module:f", "importing no.such.module failed with ModuleNotFoundError"),
        ("broken.py:f", "importing broken.py failed with ZeroDivisionError"),
        ("fine.py:g", "fine.py has no function 'g'; it has f"),
    ],
)
def test_a_reward_that_cannot_be_had_is_refused(tmp_path: Path, monkeypatch, name: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "fine.py").write_text("def f(prompt, answer, text):\n    return 1\n")
    with pytest.raises(ConfigError, match=message):
        load_reward(name)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda *_: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda *_: math.nan, "gave nan; expected a finite number"),
        (lambda *_: None, "gave None; expected a finite number"),
        (lambda *_: "much", "gave 'much'"),
    ],
)
def test_what_a_reward_does_wrong_names_it_and_the_sample(reward, message: str) -> None:
    problem = Problem("what is it", "this", [1], "my.jsonl, line 7")
    with pytest.raises(DataError, match=f"the reward mine.py:f {message}") as raised:
        score(reward, "mine.py:f", problem, "that")
    for part in ("'what is it'", "my.jsonl, line 7", "'this'", "'that'"):
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--posttrain", "none"], "there is no section posttrain"),
        (["--posttrain.num-generations", "3"], "is 512 answers, which is no multiple of posttrain.num_generations 3 x"),
        (["--posttrain.updates-per-step", "3"], "posttrain.updates_per_step 3"),
        (["--posttrain.max-new-tokens", "8"], "also holds the prompt, is 8"),
        (
            ["--model.num-experts", "9", "--parallel.ep-size", "1"],
            "9, which the 2 processes of the engine cannot share",
        ),
        (["--model.num-nextn-predict-layers", "1"], "model.num_nextn_predict_layers cannot be combined with posttrain"),
        (["--parallel.dispatcher", "symmetric"], "parallel.dispatcher 'symmetric' cannot be combined"),
        (["--balance", "--balance.transport", "symmetric"], "balance.transport 'symmetric' cannot be combined"),
        (["--synthetic_routing.workload", "balanced"], "synthetic_routing cannot be combined"),
        (["--trace", "--posttrain.updates-per-step", "2"], "trace together with posttrain.updates_per_step"),
    ],
)
def test_impossible_settings_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(settings(*overrides), 2)


def test_groups_of_one_are_no_setting() -> None:
    with pytest.raises(ConfigError, match="num_generations"):
        settings("--posttrain.num-generations", "1")

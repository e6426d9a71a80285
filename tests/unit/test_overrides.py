"""Settings on the command line: every right spelling, and nothing that only looks right (C50)."""

from pathlib import Path

import pytest
from toy_config import Precision, ToyConfig

from equipoise.errors import ConfigError
from equipoise.train.load import load_config, split_recipe


def value(key: str, *arguments: str) -> object:
    node: object = load_config(ToyConfig, None, arguments)
    for name in key.split("."):
        node = getattr(node, name)
    return node


def errors(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(ToyConfig, None, arguments)
    return str(caught.value)


BOOLEANS = ["model.tie_word_embeddings", "model.norm_topk_prob", "train.compile"]


@pytest.mark.parametrize("key", BOOLEANS)
@pytest.mark.parametrize("word", ["False", "false", "FALSE", "0", "no", "off", "No"])
def test_false_words_mean_false(key: str, word: str) -> None:
    assert value(key, f"--{key}", word) is False
    assert value(key, f"--{key}={word}") is False


@pytest.mark.parametrize("key", BOOLEANS)
@pytest.mark.parametrize("word", ["True", "true", "1", "yes", "on", "ON"])
def test_true_words_mean_true(key: str, word: str) -> None:
    assert value(key, f"--{key}", word) is True
    assert value(key, f"--{key}={word}") is True


@pytest.mark.parametrize("key", BOOLEANS)
def test_bare_is_true_and_both_no_forms_are_false(key: str) -> None:
    section, leaf = key.split(".")
    assert value(key, f"--{key}") is True
    assert value(key, f"--{section}.no-{leaf}") is False
    assert value(key, f"--{section}.no_{leaf}") is False
    assert value(key, f"--no-{section}.{leaf}") is False


def test_booleans_left_out_keep_their_defaults() -> None:
    assert [value(key) for key in BOOLEANS] == [True, False, False]


@pytest.mark.parametrize("key", BOOLEANS)
@pytest.mark.parametrize("word", ["maybe", "", "2", "t", "none", "truee", " "])
def test_other_words_are_refused_by_name(key: str, word: str) -> None:
    for arguments in ([f"--{key}", word], [f"--{key}={word}"]):
        text = errors(*arguments)
        assert key in text
        assert "expected true or false" in text


def test_no_form_takes_no_value_and_exists_only_for_booleans() -> None:
    assert "takes no value" in errors("--train.no-compile=true")
    assert "unexpected argument true" in errors("--train.no-compile", "true")
    assert "unknown key" in errors("--train.no-steps")


def test_a_field_whose_own_name_starts_with_no_is_not_negated() -> None:
    assert value("train.no_decay", "--train.no-decay") is True
    assert value("train.no_decay", "--train.no-no-decay") is False


def test_a_misspelt_boolean_is_an_error_with_the_right_name() -> None:
    assert "did you mean train.compile?" in errors("--train.complie")
    assert "did you mean train.compile?" in errors("--train.no-complie=1")


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("train.steps", "7", 7),
        ("train.steps", "1_000", 1000),
        ("train.steps", "+7", 7),
        ("train.acting_rank", "-3", -3),
        ("optimizer.lr", "1e-4", 1e-4),
        ("optimizer.lr", ".5", 0.5),
        ("optimizer.clip", "2", 2.0),
        ("optimizer.clip", "-1.5e3", -1500.0),
        ("optimizer.clip", "none", None),
        ("optimizer.clip", "None", None),
        ("optimizer.schedule", "constant", "constant"),
        ("optimizer.betas", "0.8,0.9", (0.8, 0.9)),
        ("optimizer.betas", "[1, 0.9]", (1.0, 0.9)),
        ("model.mlp_only_layers", "[]", ()),
        ("model.mlp_only_layers", "[0, 3]", (0, 3)),
        ("model.mlp_only_layers", "0,3", (0, 3)),
        ("model.mlp_only_layers", "0, 3,", (0, 3)),
        ("model.mlp_only_layers", "5", (5,)),
        ("model.mlp_only_layers", "-1", (-1,)),
        ("model.window", "128", 128),
        ("data.path", "~/a b.txt", Path("~/a b.txt")),
        ("data.path", "none", None),
        ("data.tokenizer", "true", "true"),
        ("data.tokenizer", "none", "none"),
        ("data.tokenizer", "", ""),
        ("data.names", "a,b c", ["a", "b c"]),
        ("data.names", '["a,b", "c"]', ["a,b", "c"]),
        ("data.names", "[a, b]", ["a", "b"]),
        ("data.weights", "{a = 1, b = 0.5}", {"a": 1.0, "b": 0.5}),
        ("data.shape", "3,1", (3, 1.0)),
        ("data.tags", "x,y,x", frozenset({"x", "y"})),
        ("data.precision", "bf16", Precision.BF16),
        ("train.recompute", "auto", "auto"),
        ("train.recompute", "no", False),
        ("train.limit", "none", "none"),
        ("train.limit", "3", 3.0),
        ("label", "my run", "my run"),
    ],
)
def test_values_are_read_by_the_type_of_the_field(key: str, text: str, expected: object) -> None:
    for arguments in ([f"--{key}", text], [f"--{key}={text}"], [f"--{key.replace('_', '-')}", text]):
        found = value(key, *arguments)
        assert found == expected
        assert type(found) is type(expected)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("train.steps", "4.5", "int >= 0"),
        ("train.steps", "4.0", "int >= 0"),
        ("train.steps", "1e3", "int >= 0"),
        ("train.steps", "true", "int >= 0"),
        ("train.steps", "", "int >= 0"),
        ("train.steps", "none", "int >= 0"),
        ("train.steps", "-1", "int >= 0"),
        ("train.steps", "\u0663", "int >= 0"),
        ("model.num_experts", "0", "int >= 1 and <= 1024"),
        ("model.num_experts", "2000", "int >= 1 and <= 1024"),
        ("optimizer.lr", "abc", "float > 0 and < 1"),
        ("optimizer.lr", "true", "float > 0 and < 1"),
        ("optimizer.lr", "1", "float > 0 and < 1"),
        ("optimizer.lr", "nan", "float > 0 and < 1"),
        ("optimizer.clip", "no", "float, or none"),
        ("optimizer.schedule", "Cosine", 'one of "cosine", "constant"'),
        ("optimizer.betas", "0.9", "list of 2 values (float, float)"),
        ("optimizer.betas", "1,2,3", "list of 2 values (float, float)"),
        ("model.mlp_only_layers", "1,x", "list of int"),
        ("model.mlp_only_layers", "[1.5]", "list of int"),
        ("model.mlp_only_layers", "[true]", "list of int"),
        ("model.mlp_only_layers", "", "list of int"),
        ("model.window", "x", "int, or none"),
        ("data.path", "", "path, or none"),
        ("data.precision", "fp8", 'one of "fp32", "bf16"'),
        ("data.weights", "a", "table of float by name"),
        ("train.recompute", "maybe", 'true or false, or "auto"'),
        ("data.tokenizer", "a b", "a tokenizer's name has no blanks (expected text)"),
    ],
)
def test_wrong_types_and_ranges_name_key_value_range_and_origin(key: str, text: str, expected: str) -> None:
    message = errors(f"--{key}={text}")
    assert message.startswith("The configuration has a problem:\n")
    shown = text if text.isascii() and text.replace(".", "").replace("-", "").isalnum() else f'"{text}"'
    assert f"  {key} = {shown} (command line): " in message
    assert expected in message


def test_a_value_is_taken_unless_it_looks_like_an_option() -> None:
    assert value("train.steps", "--train.compile", "--train.steps", "3") == 3
    assert "train.steps (command line): needs a value: int >= 0" in errors("--train.steps", "--train.compile")
    assert "needs a value" in errors("--train.steps")
    assert value("data.tokenizer", "--data.tokenizer=--odd") == "--odd"


def test_the_last_one_wins() -> None:
    assert value("train.steps", "--train.steps", "3", "--train.steps=4") == 4
    assert value("train.compile", "--train.compile", "--train.no-compile") is False


def test_an_optional_section_is_switched_by_its_own_name() -> None:
    assert value("balance") is None
    assert value("balance.slots", "--balance") == 1
    assert value("balance.slots", "--balance.slots", "3") == 3
    assert value("balance", "--balance.slots", "3", "--no-balance") is None
    assert value("balance", "--balance.slots", "3", "--balance", "none") is None
    assert value("balance.slots", "--no-balance", "--balance.mode", "fast") == 1
    assert value("balance.slots", "--balance.slots", "3", "--balance") == 3
    assert "is a section" in errors("--balance", "yes")


@pytest.mark.parametrize(
    ("arguments", "recipe", "rest"),
    [
        ([], None, []),
        (["demo"], "demo", []),
        (["demo", "--train.steps", "3"], "demo", ["--train.steps", "3"]),
        (["--train.steps", "3", "demo"], "demo", ["--train.steps", "3"]),
        (["--train.steps=3", "demo"], "demo", ["--train.steps=3"]),
        (["--train.no-compile", "demo"], "demo", ["--train.no-compile"]),
        (["--train.acting-rank", "-1", "demo"], "demo", ["--train.acting-rank", "-1"]),
        (["--train.compile", "--train.steps", "3"], None, ["--train.compile", "--train.steps", "3"]),
        (["demo", "extra"], "demo", ["extra"]),
    ],
)
def test_the_recipe_is_found_among_the_settings(arguments: list[str], recipe: str | None, rest: list[str]) -> None:
    assert split_recipe(ToyConfig, arguments) == (recipe, rest)


def test_a_recipe_after_a_bare_boolean_is_refused_not_swallowed() -> None:
    recipe, rest = split_recipe(ToyConfig, ["--train.compile", "demo"])
    assert recipe is None
    assert "train.compile = demo (command line): expected true or false" in errors(*rest)

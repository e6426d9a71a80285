"""Recipes, their layers, and the one error that names everything wrong with them."""

from pathlib import Path

import pytest
from pydantic import Field
from toy_config import ToyConfig

from equipoise.config import Config
from equipoise.errors import ConfigError
from equipoise.train.load import load_config, parse_config
from equipoise.train.recipes import list_recipes


@pytest.fixture
def presets(tmp_path: Path) -> Path:
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "base.toml").write_text("# A base to extend.\n[train]\nsteps = 5\nacting_rank = 1\n")
    (folder / "demo.toml").write_text(
        '# A minute on two CPU processes.\n# More words.\nextends = "base"\n[train]\nsteps = 6\n'
    )
    (folder / "silent.toml").write_text("[train]\nsteps = 7\n")
    return folder


def write(tmp_path: Path, text: str, name: str = "my.toml") -> str:
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def error(recipe: str | None, *overrides: str, presets: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(ToyConfig, recipe, overrides, presets=presets)
    return str(caught.value)


def test_without_recipe_the_defaults_of_the_classes_hold() -> None:
    assert load_config(ToyConfig) == ToyConfig()


def test_layers_go_from_base_to_recipe_to_command_line(presets: Path) -> None:
    config = load_config(ToyConfig, "demo", ["--train.ep_size", "2"], presets=presets)
    assert (config.train.steps, config.train.acting_rank, config.train.ep_size) == (6, 1, 2)
    assert load_config(ToyConfig, "demo", ["--train.steps", "9"], presets=presets).train.steps == 9


def test_a_file_extends_a_preset_or_a_file_beside_it(tmp_path: Path, presets: Path) -> None:
    write(tmp_path, 'extends = "demo"\n[train]\nep_size = 4\n', "mine.toml")
    recipe = write(tmp_path, 'extends = "mine.toml"\n[optimizer]\nlr = 0.5\n')
    config = load_config(ToyConfig, recipe, presets=presets)
    assert (config.train.steps, config.train.ep_size, config.optimizer.lr) == (6, 4, 0.5)


def test_lists_are_replaced_and_not_joined(tmp_path: Path) -> None:
    write(tmp_path, "[model]\nmlp_only_layers = [1, 2]\n", "a.toml")
    recipe = write(tmp_path, 'extends = "a.toml"\n[model]\nmlp_only_layers = [3]\n')
    assert load_config(ToyConfig, recipe).model.mlp_only_layers == (3,)


def test_none_in_a_recipe_clears_optional_settings_and_sections(tmp_path: Path) -> None:
    write(tmp_path, 'label = "x"\n[optimizer]\nclip = 2\n[balance]\nslots = 2\n', "a.toml")
    recipe = write(tmp_path, 'extends = "a.toml"\nlabel = "none"\nbalance = "none"\n[optimizer]\nclip = "none"\n')
    config = load_config(ToyConfig, recipe)
    assert (config.label, config.balance, config.optimizer.clip) == (None, None, None)
    assert load_config(ToyConfig, recipe, ["--balance.mode=fast"]).balance.slots == 1


def test_an_empty_table_switches_an_optional_section_on(tmp_path: Path) -> None:
    assert load_config(ToyConfig, write(tmp_path, "[balance]\n")).balance.slots == 1


def test_everything_wrong_is_reported_at_once_with_its_origin(tmp_path: Path) -> None:
    recipe = write(
        tmp_path,
        '[model]\nnum_expert = 8\nnum_experts = 0\n[train]\nsteps = "5"\n[trian]\nsteps = 3\n[optimizer]\nlr = 0.1\n',
    )
    message = error(recipe, "--optimizer.lr", "2", "--train.stpes", "4", "--data.names", "stray", "--lr=1", "x")
    assert message.splitlines() == [
        "The configuration has 8 problems:",
        "  train.stpes = 4 (command line): unknown key; did you mean train.steps?",
        "  lr = 1 (command line): unknown key; did you mean optimizer.lr?",
        "  unexpected argument x; settings are given as --section.key value",
        f"  model.num_expert = 8 ({recipe}): unknown key; did you mean model.num_experts?",
        f"  trian = {{steps = 3}} ({recipe}): unknown key; did you mean train?",
        f"  model.num_experts = 0 ({recipe}): expected int >= 1 and <= 1024",
        f'  train.steps = "5" ({recipe}): expected int >= 0',
        "  optimizer.lr = 2 (command line): expected float > 0 and < 1",
    ]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("train.step", "did you mean train.steps?"),
        ("trian.steps", "did you mean train.steps?"),
        ("steps", "did you mean train.steps?"),
        ("train.lr", "did you mean optimizer.lr?"),
        ("model.steps", "did you mean train.steps?"),
        ("num-expert", "did you mean model.num_experts?"),
        ("optimiser", "did you mean optimizer?"),
        ("model", "a section, not a setting; set its keys (model.num_experts, "),
        ("train.steps.more", "train.steps is a single value (int >= 0)"),
        ("qqq", "the sections are model, data, train, optimizer, balance"),
    ],
)
def test_unknown_keys_get_the_nearest_right_name(key: str, hint: str) -> None:
    message = error(None, f"--{key}", "1")
    assert f"{key} = 1 (command line): " in message
    assert hint in message


def test_impossible_combinations_give_the_validators_own_words() -> None:
    assert error(None, "--model.num-experts-per-tok", "5") == (
        "The configuration has a problem:\n  model: model.num_experts_per_tok is 5: at most model.num_experts (4)"
    )
    assert error(None, "--train.ep_size", "3") == (
        "The configuration has a problem:\n  train.ep_size is 3: it must divide model.num_experts (4)"
    )


def test_a_table_for_a_value_and_a_value_for_a_table_are_named(tmp_path: Path) -> None:
    message = error(write(tmp_path, "model = 3\n[train.steps]\na = 1\n"))
    assert "model = 3" in message
    assert "this is a section" in message
    assert "train.steps = {a = 1}" in message
    assert "expected int >= 0" in message


def test_types_in_recipes_are_strict(tmp_path: Path) -> None:
    recipe = write(
        tmp_path,
        '[train]\nsteps = 4.0\ncompile = "true"\nacting_rank = true\n'
        '[optimizer]\nlr = "1e-3"\nbetas = ["0.9", 1]\n[data]\ntokenizer = 5\nnames = "a"\n',
    )
    message = error(recipe)
    assert message.startswith("The configuration has 7 problems:")
    for key in ("steps = 4.0", 'compile = "true"', "acting_rank = true"):
        assert f"train.{key}" in message
    assert 'optimizer.betas = ["0.9", 1]' in message


def test_an_integer_may_stand_for_a_float(tmp_path: Path) -> None:
    clip = load_config(ToyConfig, write(tmp_path, "[optimizer]\nclip = 2\n")).optimizer.clip
    assert clip == 2.0
    assert isinstance(clip, float)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[train]\nsteps = = 3\n", "line 2, column 9"),
        ("[train]\nsteps = 3\nsteps = 4\n", "line 3, column 10"),
        ("[train\n", "line 1, column 7"),
        ("[train]\nname = 'x", "line 2, column 10"),
        ("[train]\nsteps =", "line 2, column 8"),
        ("a = 1\r\n\r\n[b", "line 3"),
    ],
)
def test_toml_syntax_errors_name_file_and_line(tmp_path: Path, text: str, place: str) -> None:
    recipe = tmp_path / "my.toml"
    recipe.write_bytes(text.encode())
    assert f"{recipe}, {place}" in error(str(recipe))


def test_files_that_cannot_be_read_say_why(tmp_path: Path) -> None:
    assert "there is no such file" in error(str(tmp_path / "none.toml"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    assert f"give {tmp_path / 'run' / 'config.toml'}" in error(str(tmp_path / "run"))
    (tmp_path / "latin.toml").write_bytes(b"a = '\xe9'")
    assert "not UTF-8 text" in error(str(tmp_path / "latin.toml"))


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "bom.toml").write_bytes(b"\xef\xbb\xbf[train]\nsteps = 3\n")
    assert load_config(ToyConfig, str(tmp_path / "bom.toml")).train.steps == 3


def test_an_unknown_preset_lists_the_known_ones_and_the_nearest(presets: Path) -> None:
    message = error("dmeo", "--train.stpes=1", presets=presets)
    assert "There is no recipe 'dmeo'; did you mean demo? presets are: base, demo, silent." in message
    assert "train.steps" in message


def test_a_preset_name_that_is_a_file_here_says_how_to_give_it(
    presets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "", "mine.toml")
    assert "did you mean the file mine.toml?" in error("mine", presets=presets)


def test_extending_in_a_circle_or_into_nothing_is_an_error(tmp_path: Path, presets: Path) -> None:
    a = write(tmp_path, 'extends = "b.toml"\n', "a.toml")
    write(tmp_path, 'extends = "./a.toml"\n', "b.toml")
    assert "extends itself" in error(a)
    assert f"(extended by {tmp_path / 'c.toml'})" in error(
        write(tmp_path, 'extends = "gone"\n', "c.toml"), presets=presets
    )
    assert "expected the name of one recipe" in error(write(tmp_path, 'extends = ["a"]\n', "d.toml"))


def test_presets_are_listed_with_their_first_comment(presets: Path) -> None:
    assert [(r.name, r.summary) for r in list_recipes(presets)] == [
        ("base", "A base to extend."),
        ("demo", "A minute on two CPU processes."),
        ("silent", ""),
    ]


def test_every_installed_preset_has_a_description() -> None:
    assert all(recipe.summary for recipe in list_recipes())


def test_required_settings_and_sections_are_named() -> None:
    class Inner(Config):
        path: str

    class Outer(Config):
        inner: Inner
        size: int = Field(ge=1)

    with pytest.raises(ConfigError) as caught:
        load_config(Outer, None, ["--inner.path", "x"])
    assert "size: missing; expected int >= 1; set it in the recipe or with --size" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        parse_config(Outer, "size = 1\n[inner]\n")
    assert "inner.path: missing; expected text" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        parse_config(Outer, "size = 1\n")
    assert "inner: missing; expected a section" in str(caught.value)

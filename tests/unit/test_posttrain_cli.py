"""`equipoise posttrain` as its users meet it: what is refused before a worker starts or a folder is made."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from equipoise import cli

DEMO = ("posttrain-demo", "--nproc-per-node", "2", "--out", "run")


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(*_):
        raise AssertionError("workers were started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cpu")
    monkeypatch.setattr(cli.launch, "start", start)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, prog_name="equipoise")


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (["posttrain"], 2, "such as `equipoise posttrain posttrain-demo --nproc-per-node 2`"),
        (["posttrain", "demo", "--nproc-per-node", "2"], 2, "there is no section posttrain: give --posttrain"),
        (["train", *DEMO], 2, "the settings have a section posttrain: run them with `equipoise posttrain`"),
        (["posttrain", *DEMO, "--posttrain.num-generation", "4"], 2, "did you mean posttrain.num_generations?"),
        (["posttrain", *DEMO, "--posttrain.num-generations", "7"], 2, "no multiple of posttrain.num_generations 7"),
        (["posttrain", *DEMO, "--posttrain.reward", "exactly"], 2, "there is no reward 'exactly'"),
        (["posttrain", *DEMO, "--posttrain.prompts", "none.jsonl"], 1, "posttrain.prompts 'none.jsonl' does not exist"),
        (["posttrain", *DEMO, "--train.sequence-length", "5"], 1, "the prompt has 3 tokens; expected 1 to 2"),
        (["posttrain", *DEMO, "--model.vocab-size", "256"], 1, "model.vocab_size 256 is too small"),
    ],
)
def test_mistakes_are_told_before_anything_starts(arguments: list[str], exit_code: int, message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == exit_code, result.output
    assert message in result.output
    assert not Path("run").exists()


def test_its_help_has_examples_and_the_same_options() -> None:
    text = invoke("posttrain", "--help").output
    for part in ("equipoise posttrain posttrain-demo --nproc-per-node 2", "--resume-step", "--help-config", "GRPO"):
        assert part in text
    settings = invoke("posttrain", "--help-config", "posttrain").output
    assert "--posttrain.num_generations  (int >= 2; default 8)" in settings

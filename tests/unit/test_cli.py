"""The command line as its users meet it: help that teaches, one message per mistake, exit codes."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import toy_program
from typer.testing import CliRunner, Result

import equipoise
from equipoise import cli, doctor, exit_codes
from equipoise.errors import ConfigError, DataError, EquipoiseError
from equipoise.train.recipes import list_recipes
from equipoise.train.stop import StoppedBySignal

DEFAULTS = ["--train.steps", "10"]  # the shortest command that starts something


class Calls(list[dict[str, Any]]):
    """Arguments of each call of the training loop; `error` is raised by it."""

    error: BaseException | None = None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """The command over the toy tree, in a folder of its own, with a loop that only notes its arguments."""
    calls = Calls()

    def run_training(
        config: Any, out: Path, argv: list[str], resume: bool, typed: str, resume_step: int | None
    ) -> None:
        call = {"config": config, "out": out, "argv": argv, "typed": typed, "env": dict(os.environ)}
        calls.append({**call, "resume": resume, "resume_step": resume_step})
        if calls.error:
            raise calls.error
        out.mkdir(parents=True, exist_ok=True)
        (out / "kept").touch()

    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name in ("equipoise.train.config", "equipoise.train.run", "equipoise.accelerator"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))
    monkeypatch.setattr(cli.launch, "WORKER_PROGRAM", cli.launch.WORKER_PROGRAM)
    monkeypatch.setattr(cli.launch, "GRACE_S", cli.launch.GRACE_S)
    toy_program.install()
    monkeypatch.setattr(sys.modules["equipoise.train.run"], "run_training", run_training)
    return calls


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, prog_name="equipoise")


def test_help_teaches_examples_recipes_settings_and_exit_codes() -> None:
    text = invoke("train", "--help").output
    for part in (
        "Usage: equipoise train [RECIPE] [--SECTION.KEY VALUE]... [OPTIONS]",
        "equipoise train demo --nproc-per-node 2",
        "torchrun --standalone --nproc-per-node 2 -m equipoise train demo",
        "equipoise train --help-config model",
        "Recipes:",
        "Exit codes: 0 success",
        "--resume / --no-resume",
    ):
        assert part in text
    for recipe in list_recipes():
        assert f"  {recipe.name}" in text
        assert recipe.summary in text
    assert "equipoise doctor" in invoke("--help").output


def test_help_and_version_do_not_import_torch() -> None:
    program = (
        "import sys; from equipoise.cli import main; main({!r}, standalone_mode=False); "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy', 'transformers')))"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(equipoise.__file__).parents[1])}
    for arguments, first in ((["train", "--help"], "Usage:"), (["--version"], f"equipoise {equipoise.__version__}")):
        done = subprocess.run(
            [sys.executable, "-c", program.format(arguments)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=60,
            check=True,
        )
        assert done.stdout.startswith(first)
        assert done.stdout.endswith("[]\n")


def test_help_config_prints_keys_types_defaults_and_meaning(calls: Calls) -> None:
    everything = invoke("train", "--help-config").output
    assert "--train.steps  (int >= 0; default 10)\n      Optimizer steps." in everything
    assert "[model]  Shape of the model." in everything
    one = invoke("train", "--help-config", "optimizer").output
    assert "--optimizer.lr  (float > 0 and < 1; default 0.001)" in one
    assert "--train.steps" not in one
    key = invoke("train", "--help-config", "optimizer.lr").output
    assert "--optimizer.lr  (float > 0 and < 1; default 0.001)" in key
    assert key.count("  --") == 1
    assert invoke("train", "demo", "--help-config", "optimizer.lr").output == key, "a recipe is no section"
    for typed, meant in (("optimiser", "optimizer"), ("optimizer.lrr", "optimizer.lr"), ("train.step", "train.steps")):
        wrong = invoke("train", "--help-config", typed)
        assert wrong.exit_code == 2
        assert f"did you mean {meant}?" in wrong.stderr
    assert not calls


def test_train_alone_shows_usage_and_recipes_and_starts_nothing(calls: Calls) -> None:
    for arguments in ([], ["--resume"]):
        result = invoke("train", *arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("Usage: equipoise train [RECIPE]")
        for recipe in list_recipes():
            assert f"  {recipe.name}" in result.stderr
        assert "Error: no recipe and no settings" in result.stderr
    assert not calls
    assert not Path("runs").exists()


def test_what_was_typed_goes_with_the_run(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/equipoise", "train", "--out", "a b"])
    assert invoke("train", "--out", "a b").exit_code == 0
    assert calls[0]["typed"] == "equipoise train --out 'a b'"
    assert "--nproc-per-node" in calls[0]["argv"]
    started: list[list[str]] = []
    monkeypatch.setattr(cli.launch, "launch", lambda count, command: started.append(command))
    assert invoke("train", "--out", "a b", "--nproc-per-node", "2").exit_code == 0
    assert invoke(*started[0][started[0].index("train") :], "--nproc-per-node", "1").exit_code == 0
    assert calls[1]["typed"] == calls[0]["typed"], "workers are told"


def test_one_process_runs_in_place_as_a_world_of_one(calls: Calls) -> None:
    result = invoke("train", "--train.steps", "3", "--train.acting-rank", "-1", "--out", "here", "--no-resume")
    assert (result.exit_code, result.output) == (0, "")
    (call,) = calls
    assert (call["config"].train.steps, call["config"].train.acting_rank) == (3, -1)
    assert (call["out"], call["resume"]) == (Path("here"), False)
    assert {k: call["env"][k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    assert call["argv"] == [
        *("equipoise", "train", "--train.steps", "3", "--train.acting-rank", "-1"),
        *("--nproc-per-node", "1", "--out", "here", "--no-resume"),
    ]
    assert "RANK" not in os.environ


def test_the_noted_command_repeats_the_run(calls: Calls) -> None:
    invoke("train", "--data.tokenizer", "", "--train.compile", "--optimizer.clip", "-1.5", "--out", "here")
    assert invoke(*calls[0]["argv"][1:]).exit_code == 0
    assert calls[1]["config"] == calls[0]["config"]
    assert calls[1]["out"] == calls[0]["out"]


def test_a_step_to_resume_from_reaches_the_run_and_its_workers(
    calls: Calls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = invoke("train", "--train.steps", "3", "--out", "here", "--resume-step", "20")
    assert missing.exit_code == 1
    assert "Complete checkpoints of the run: none" in missing.output
    assert calls == []
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(cli, "check_run_folder", lambda *arguments: None)
    assert invoke("train", "--train.steps", "3", "--out", "here", "--resume-step", "20").exit_code == 0
    (call,) = calls
    assert (call["resume"], call["resume_step"]) == (True, 20)
    assert call["argv"][-3:] == ["--resume", "--resume-step", "20"]


@pytest.mark.parametrize("more", [[], ["--out", "here", "--no-resume"]], ids=["no folder", "anew"])
def test_a_step_to_resume_from_needs_a_run(calls: Calls, more: list[str]) -> None:
    result = invoke("train", "--train.steps", "3", "--resume-step", "20", *more)
    assert result.exit_code == 2
    assert "--resume-step names a checkpoint of an earlier run" in result.output
    assert calls == []


def test_the_recipe_may_stand_anywhere(calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("[train]\nsteps = 7\n")
    for arguments in (["my.toml", "--train.ep_size=1"], ["--train.ep-size", "1", "my.toml"]):
        assert invoke("train", *arguments, "--resume").exit_code == 0
    assert [call["config"].train.steps for call in calls] == [7, 7]
    assert calls[0]["resume"] is True


def test_each_run_without_out_gets_a_new_folder(calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.toml").write_text("")
    for arguments in (DEFAULTS, DEFAULTS, ["my.toml"], ["old/config.toml"]):
        assert invoke("train", *arguments).exit_code == 0
    expected = [Path("runs/train"), Path("runs/train-2"), Path("runs/my"), Path("runs/old")]
    assert [call["out"] for call in calls] == expected
    assert all(call["out"].is_dir() for call in calls)


def test_a_run_that_fails_before_it_kept_anything_leaves_no_folder(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls.error = EquipoiseError("no text")
    Path("there").mkdir()
    for more in ([], ["--out", "new"], ["--out", "there"]):
        assert invoke("train", *DEFAULTS, *more).exit_code == 1
    assert sorted(Path().rglob("*")) == [Path("runs"), Path("there")]
    Path("runs/train").mkdir()  # of a run that has only just begun
    assert invoke("train", *DEFAULTS).exit_code == 1
    assert sorted(Path("runs").iterdir()) == [Path("runs/train")]

    def launch(count: int, command: list[str]) -> None:
        Path("new/checkpoints").mkdir(parents=True)
        raise EquipoiseError("a worker failed")

    monkeypatch.setattr(cli.launch, "launch", launch)
    assert invoke("train", *DEFAULTS, "--out", "new", "--nproc-per-node", "2").exit_code == 1
    assert Path("new/checkpoints").is_dir()


def test_what_needs_no_workers_is_checked_before_any_is_started(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[tuple[Any, ...]] = []

    def check_start(config: Any, *arguments: Any) -> None:
        checked.append(arguments)
        raise DataError("there is no text")

    monkeypatch.setattr(sys.modules["equipoise.train.config"].TrainConfig, "check_start", check_start, raising=False)
    monkeypatch.setattr(cli.launch, "launch", lambda count, command: pytest.fail("started"))
    result = invoke("train", *DEFAULTS, "--out", "a", "--nproc-per-node", "2")
    assert (result.exit_code, result.stderr) == (1, "Error: there is no text\n")
    assert checked == [(2, Path("a/checkpoints"), None)]
    assert not Path("a").exists()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert invoke("train", *DEFAULTS).exit_code == 0, "ranks of a launcher look together, once they have joined"


def test_under_a_launcher_all_ranks_come_to_the_same_folder(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert invoke("train", *DEFAULTS).exit_code == 0
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert invoke("train", *DEFAULTS).exit_code == 0
    assert [call["out"] for call in calls] == [Path("runs/train"), Path("runs/train"), Path("runs/train-17")]
    assert calls[1]["env"]["RANK"] == "1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--train.stpes", "3"], "train.stpes = 3 (command line): unknown key; did you mean train.steps?"),
        (["--outt", "x"], "outt = x (command line): unknown key; did you mean --out?"),
        (["--nproc-per-nod", "2"], "nproc-per-nod = 2 (command line): unknown key; did you mean --nproc-per-node?"),
        (["--nproc", "2"], "nproc = 2 (command line): unknown key; did you mean --nproc-per-node?"),
        (["--resume-stp=5"], "resume-stp = 5 (command line): unknown key; did you mean --resume-step?"),
        (["--no-resum"], "no-resum (command line): unknown key; did you mean --no-resume?"),
        (["--typd", "x"], "typd = x (command line): unknown key; the sections are"),
        (["--train.out", "x"], "train.out = x (command line): unknown key; did you mean train.recompute?"),
        (["--train.steps", "x"], "train.steps = x (command line): expected int >= 0"),
        (["--train.compile", "maybe"], "train.compile = maybe (command line): expected true or false"),
        (["--train.compile="], 'train.compile = "" (command line): expected true or false'),
        (["dmeo"], "There is no recipe 'dmeo'"),
        (["--train.ep_size", "2"], "train.ep_size is 2, which does not divide 1 ranks"),
        (["--nproc-per-node", "0"], "--nproc-per-node"),
        (["--train.ep_size", "2", "--nproc-per-node", "3"], "train.ep_size is 2, which does not divide 3 ranks"),
    ],
)
def test_mistakes_exit_with_2_and_a_message_and_start_nothing(calls: Calls, arguments: list[str], message: str) -> None:
    result = invoke("train", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert not calls
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (EquipoiseError("the disk is full"), 1, "Error: the disk is full\n"),
        (ConfigError("vocabulary too small"), 2, "Error: vocabulary too small\n"),
        (StoppedBySignal(15), 143, ""),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes_of_a_run(calls: Calls, error: BaseException, code: int, text: str) -> None:
    calls.error = error
    result = invoke("train", *DEFAULTS)
    assert result.exit_code == code
    assert result.stderr.removeprefix("Error (rank 0): ").removeprefix("Error: ") == text.removeprefix("Error: ")
    assert "Traceback" not in result.output


def test_other_errors_keep_their_traceback(calls: Calls) -> None:
    calls.error = KeyError("a mistake")
    assert invoke("train", *DEFAULTS).exception is calls.error


def test_only_the_first_rank_of_a_host_speaks_of_a_configuration_error(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(exit_codes, "OTHER_SPEAKS_S", 0.0)
    spoken = []
    for rank, local in (("0", "0"), ("1", "1"), ("1", "0"), ("1", None)):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.delenv("LOCAL_RANK", raising=False)
        if local is not None:
            monkeypatch.setenv("LOCAL_RANK", local)
        result = invoke("train", "--train.stpes=1")
        assert result.exit_code == 2
        spoken.append(result.stderr.count("unknown key"))
    assert spoken == [1, 0, 1, 0]
    calls.error = EquipoiseError("odd")
    assert "Error (rank 1): odd" in invoke("train", *DEFAULTS).stderr


@pytest.mark.parametrize("error", [DataError("no text"), ConfigError("no text")])
def test_an_error_of_several_ranks_is_told_by_one_of_them(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, error: EquipoiseError
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(exit_codes, "OTHER_SPEAKS_S", 0.0)
    error.told_by = 1
    error.add_note("(the same on ranks 1-2 of 3)")
    calls.error = error
    spoken = []
    for rank in ("0", "1", "2"):
        monkeypatch.setenv("RANK", rank)
        spoken.append(invoke("train", *DEFAULTS).stderr)
    where = "Error" if isinstance(error, ConfigError) else "Error (rank 1)"
    assert spoken == ["", f"{where}: no text\n(the same on ranks 1-2 of 3)\n", ""]


def test_more_workers_than_devices_is_refused(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(name="cuda", device_type="cuda", device_count=lambda: 2)
    monkeypatch.setattr(sys.modules["equipoise.accelerator"], "get_accelerator", lambda: cuda)
    result = invoke("train", "--nproc-per-node", "3")
    assert result.exit_code == 2
    assert "shows 2 cuda device(s)" in result.stderr
    assert cli.launch.default_worker_count() == 2


def test_a_run_folder_that_cannot_be_made_is_a_clear_error(calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    result = invoke("train", *DEFAULTS)
    assert result.exit_code == 1
    assert "cannot create the run folder runs/train" in result.stderr


def test_doctor_prints_words_or_json_and_fails_on_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    report: dict[str, Any] = {"problems": []}
    monkeypatch.setattr(doctor, "collect", lambda: report)
    monkeypatch.setattr(doctor, "to_words", lambda r: "in words")
    assert invoke("doctor").output == "in words\n"
    assert invoke("doctor", "--json").output == '{\n  "problems": []\n}\n'
    report["problems"].append("no driver")
    assert invoke("doctor").exit_code == 1


def test_python_m_equipoise_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "equipoise", "trian"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(equipoise.__file__).parents[1])},
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "Usage: equipoise" in done.stderr


def test_ctrl_c_ends_doctor_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "collect", interrupt)
    result = invoke("doctor")
    assert (result.exit_code, result.output) == (130, "")


def test_ctrl_c_while_the_program_is_imported_ends_it_with_130(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt")
    source = Path(equipoise.__file__).parents[1]
    script = tomllib.loads((source.parent / "pyproject.toml").read_text())["project"]["scripts"]["equipoise"]
    module, _, function = script.partition(":")
    for program in (
        ["-m", "equipoise"],
        ["-c", f"import sys; from {module} import {function}; sys.exit({function}())"],
    ):
        done = subprocess.run(
            [sys.executable, *program, "doctor"],
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(source)])},
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("size", ["abc", "0", "-1", "1.5"])
def test_a_malformed_world_size_is_named(size: str, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", size)
    result = invoke("train", *DEFAULTS)
    assert result.exit_code == 2
    assert f"WORLD_SIZE={size!r}" in result.output
    assert not calls

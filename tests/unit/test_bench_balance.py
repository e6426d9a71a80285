"""`equipoise bench balance`: what it refuses before anything starts, and what it makes of its measurements."""

import errno
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from equipoise import cli, files
from equipoise.balance_config import BalanceConfig
from equipoise.bench import balance_run
from equipoise.bench.advice import slots_for
from equipoise.moe.synthetic import Workload

BAD = {
    "a mode": (
        "--modes off,onn",
        "--modes: there is no mode or planner 'onn': choose off, on, forced, a planner (exact_load, none, ",
    ),
    "a planner's file": ("--modes off,mine.py:plan", "planner 'mine.py:plan': there is no file"),
    "no modes": ("--modes ,", "--modes is empty"),
    "a workload": (
        "--workloads natural,hotrank",
        "--workloads: there is no workload 'hotrank': choose some of natural, balanced, hot_experts, ",
    ),
    "all and more": ("--workloads all,natural", "burst, or `all` alone"),
    "an imbalance": ("--workloads hot_rank --imbalance 2.5", "can have 1 to 2"),
    "an imbalance of no workload": (
        "--imbalance 99",
        "--imbalance is 99.0; the largest over the mean of 2 ranks' loads",
    ),
    "a planner": ("--balance.planner nope", "no planner 'nope'"),
    "slots": ("--slots 0", "--slots is '0'"),
    "slots in words": ("--slots many", "expected a whole number from 1, or `advise`"),
    "one rank": ("--parallel.ep_size 1", "parallel.ep_size is 1"),
    "an option": ("--round 3", "round = 3 (command line): unknown key; did you mean --rounds?"),
    "an option like a key": ("--step 3", "did you mean --steps or train.steps?"),
    "a key": ("--model.num_expert 8", "num_experts"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was started")

    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cpu")
    monkeypatch.setattr(cli.launch, "launch", refuse)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_before_anything_starts(folder: Path, case: str) -> None:
    options, text = BAD[case]
    arguments = ["bench", "balance", "demo", "--nproc-per-node", "2", *options.split()]
    result = CliRunner().invoke(cli.main, arguments)
    assert result.exit_code == 2, result.output
    assert text in result.stderr


@pytest.mark.parametrize(
    "command", ["balance demo --nproc-per-node 2", "calibrate demo --nproc-per-node 2", "kernels", "plan"]
)
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(
    folder: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").touch()
    for name in ("locked", "open"):
        (folder / name).mkdir()
    (folder / "old.json").write_text("mine")

    def make_file(dir: Path) -> Any:  # permissions would not stop root
        if dir.name == "locked":
            raise PermissionError(errno.EACCES, "Permission denied")
        return io.BytesIO()

    monkeypatch.setattr(files.tempfile, "TemporaryFile", make_file)
    for out, text in (
        ("file/x.json", "--out file/x.json: file cannot be made: "),
        (
            "locked/x.json",
            "--out locked/x.json: no file can be written into locked: Permission denied; choose another place",
        ),
        ("open", "--out open: this is a folder; give the name of a file, such as open/"),
        ("old.json", "--out old.json: this is there already; choose another name, or give --replace as well"),
    ):
        result = CliRunner().invoke(cli.main, ["bench", *command.split(), "--out", out])
        assert result.exit_code == 2, result.output
        assert text in result.stderr
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == ["file", "locked", "old.json", "open"]
    assert (folder / "old.json").read_text() == "mine"


def test_results_without_a_name_take_a_free_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr(cli.launch, "start", lambda count, arguments, run: started.append(list(arguments)))
    for name in ("balance.json", "balance-2.json", "balance-2.json"):
        result = CliRunner().invoke(cli.main, ["bench", "balance", "demo", "--nproc-per-node", "2"])
        assert result.exit_code == 0, result.output
        assert started[-1][started[-1].index("--out") + 1] == name
        (folder / "balance.json").touch()
    options = ["--out", "balance.json", "--replace"]
    result = CliRunner().invoke(cli.main, ["bench", "balance", "demo", "--nproc-per-node", "2", *options])
    assert result.exit_code == 0, result.output
    assert "--replace" in started[-1], "workers are told"


def test_a_folder_that_is_no_run_is_refused(folder: Path) -> None:
    (folder / "empty").mkdir()
    result = CliRunner().invoke(cli.main, ["bench", "balance", "empty", "--nproc-per-node", "2"])
    assert result.exit_code == 2
    assert "empty/config.toml" in result.stderr


def rows(**seconds: float) -> list[dict[str, Any]]:
    """Rows of the two workloads by `workload__mode`, of 100 tokens a step."""
    names = [key.split("__") for key in seconds]
    return [
        {"workload": workload, "mode": mode, "step_s": s, "tokens_per_second": 100 / s}
        for (workload, mode), s in zip(names, seconds.values())
    ]


def test_summary_and_verdicts() -> None:
    measured = rows(
        balanced__off=1.0, balanced__on=1.01, hot_rank__off=2.0, hot_rank__on=1.25, hot_rank__forced=1.0,
        burst__off=1.0, burst__on=1.5,
    )  # fmt: skip
    assert balance_run.summarize(measured) == pytest.approx(
        {"on_over_off": 1.6, "on_over_forced": 0.8, "balanced_cost": 0.01}
    )
    lines = balance_run.verdicts(measured)
    assert lines[0] == "balanced: on and off take the same time"
    assert lines[1] == "hot_rank: balancing pays: 1.60 x the tokens/s of off"
    assert lines[2].startswith("burst: balancing does not pay here: 50% more time than off")


def timed(mode: str, median: float, low: float, high: float) -> dict[str, Any]:
    return {
        "workload": "natural", "mode": mode, "step_s": median, "step_s_min": low, "step_s_max": high,
        "of_ceiling": 1.0 / median, "remote_share": 0.5,
    }  # fmt: skip


def test_a_share_over_the_ceiling_comes_with_the_spread_of_the_steps() -> None:
    forced = timed("forced", 1.0, 0.9, 1.26)
    assert balance_run.over_ceiling([timed("on", 1.1, 1.0, 1.2), timed("off", 0.9999, 0.5, 2), forced]) is None
    assert balance_run.over_ceiling([timed("on", 1.1, 1.0, 1.2) | {"of_ceiling": None}]) is None
    note = balance_run.over_ceiling([timed("off", 2.0, 0.1, 9.0), timed("on", 0.97, 0.95, 0.99), forced])
    assert note is not None
    assert "steps of one mode differ here by up to 40%; more --rounds and --steps" in note
    assert "beyond" not in note
    for share, why in ((0.5, "the machine's speed changed"), (0.4, "fewer of its rows leave their rank")):
        note = balance_run.over_ceiling([timed("on", 0.8, 0.79, 0.81) | {"remote_share": share}, forced])
        assert note is not None
        assert f"natural on is beyond that: {why}" in note


def test_forced_is_even_but_keeps_the_workloads_tokens() -> None:
    ragged = Workload("ragged_sources", 1.5, 8, 2, 4)
    even = Workload("balanced", 1.0, 8, 2, 4)
    forced = balance_run._routing(ragged, "forced", 0, 3, even)
    assert forced is not None
    assert forced.expert_counts(400) == [25] * 8  # a quarter of the tokens, two choices each
    assert balance_run._routing(ragged, "on", 0, 3, even) == ragged.routing(0, 3)
    assert balance_run._routing(None, "on", 0, 3, even) is None
    assert balance_run._routing(None, "forced", 0, 3, even) == even.routing(0, 3)


def test_advice_moves_as_much_as_pays() -> None:
    workload = Workload("hot_rank", 1.8, 16, 4, 2)
    assert slots_for(workload, 1024, BalanceConfig(), copy_tokens=0) == 4  # 0.4 of all load in experts of 0.1125
    assert slots_for(workload, 1024, BalanceConfig(), copy_tokens=100_000) == 0
    assert slots_for(Workload("balanced", 1.0, 16, 4, 2), 1024, BalanceConfig(), copy_tokens=0) == 0


def test_turns_are_merged() -> None:
    part = {"seconds": [1.0, 3.0], "delivered": [1.0, 1.2], "memory": 5, "buffers": 7, "balanced": []}
    part["sent"] = [[6, 2], [4, 8]]
    on = part | {"balanced": [{"imbalance_planned": 1.0, "imbalance_routed": 2.0, "copies_per_step": 4.0}]}
    row = balance_run._merge([part, part | {"memory": 9}], tokens=10)
    assert (row["step_s"], row["steps"], row["memory_peak_bytes"], row["tokens_per_second"]) == (2.0, 4, 9, 5.0)
    assert row["imbalance_routed"] == pytest.approx(1.1)
    assert (row["sent_rows"], row["remote_share"]) == ([[6, 2], [4, 8]], pytest.approx(0.3))
    assert balance_run._merge([on], tokens=10)["imbalance_routed"] == 2.0


def test_rows_are_counted_as_they_arrive() -> None:
    from equipoise.dispatch import build_dispatcher

    counted = balance_run.CountingDispatcher(build_dispatcher("local", 4, None))
    ids_TK = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
    counted.sent_P = torch.zeros(1, dtype=torch.int64)
    arrived = counted.dispatch(torch.randn(2, 3), ids_TK, torch.ones(2, 2))
    assert counted.sent_P.tolist() == [3]
    assert counted.combine(arrived.rows_RD, arrived.handle).shape == (2, 3)
    assert torch.stack(counted.arrived).tolist() == [3]

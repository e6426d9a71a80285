"""Calibration: the loads tell the parts of the cost model apart, and a fit finds the rates that made the times."""

import argparse
import errno
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from equipoise.balance.rules import MAX_COPY_TOKENS
from equipoise.bench import results
from equipoise.bench.balance import ON
from equipoise.bench.calibrate_run import (
    calibration_loads,
    check_fit,
    check_study,
    fit_hardware,
    middle_mean,
    predict,
    unfitted,
)
from equipoise.bench.results import parse_options, results_file, update_results, write_results
from equipoise.errors import ConfigError, EquipoiseError
from equipoise.simulate.hardware import ExpertSize, Hardware, load_hardware
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config

RECIPE = Path(__file__).parents[2] / "benchmarks" / "balance-cpu.toml"
SETTINGS = ["--train.precision", "float32", "--balance.num-redundant-experts-per-rank", "4"]


def study(*settings: str, world_size: int = 2) -> TrainConfig:
    return check_study(load_config(TrainConfig, RECIPE, [*SETTINGS, *settings]), world_size)


@pytest.mark.parametrize("top_k", [2, 4, 8])
def test_a_fit_finds_the_rates_that_made_the_times(top_k: int) -> None:
    config = study("--model.num-experts-per-tok", str(top_k))
    truth = Hardware(
        name="truth",
        source="made up",
        flops_per_s=50e9,
        shared_flops_per_s=150e9,
        expert_s=2e-4,
        source_bytes_per_s=2e9,
        link_bytes_per_s=1e9,
        far_bytes_per_s=1e9,
        full_duplex=False,
        balance_s=3e-3,
        copy_bytes_per_s=1.5e9,
        rest_s=0.4,
    )
    loads = calibration_loads(2, 16, top_k)
    tokens = 64 * 64 // 2
    seconds = {load.name: predict(load, config, tokens, truth) for load in loads}
    assert len(set(seconds.values())) == len(loads), "every load takes another time"
    fitted = fit_hardware(loads, seconds, config, 2, unfitted("truth", "made up", on_cpu=True))
    for name in ("flops_per_s", "shared_flops_per_s", "expert_s", "source_bytes_per_s", "link_bytes_per_s", "balance_s",
                 "copy_bytes_per_s"):  # fmt: skip
        assert getattr(fitted, name) == pytest.approx(getattr(truth, name), rel=1e-3), name
    assert fitted.rest_s == pytest.approx(truth.rest_s, rel=1e-6)
    assert replace(fitted, rest_s=0.0).to_json()


def test_what_a_fit_finds_is_read_again_also_where_a_core_is_shared(tmp_path: Path) -> None:
    """Two ranks on one core: their work takes its time together, and no rank is slower for having more of it."""
    config = study()
    truth = Hardware("truth", "made up", shared_flops_per_s=100e9, full_duplex=False, rest_s=0.4)
    loads = calibration_loads(2, 16, 4)
    seconds = {load.name: predict(load, config, 64 * 64 // 2, truth) for load in loads}
    fitted = fit_hardware(loads, seconds, config, 2, unfitted("truth", "made up", on_cpu=True))
    check_fit(fitted)
    file = tmp_path / "machine.json"
    file.write_text(fitted.to_json())
    read = load_hardware(str(file))
    assert read == fitted
    assert read.flops_per_s == math.inf
    assert read.shared_flops_per_s == pytest.approx(100e9)
    assert replace(read, copy_bytes_per_s=1e9).copy_tokens(ExpertSize(64, 64)) == MAX_COPY_TOKENS
    assert replace(read, copy_bytes_per_s=math.inf).copy_tokens(ExpertSize(64, 64)) == 0


def test_a_fit_that_does_not_see_the_experts_is_refused() -> None:
    """As of a model so small that its steps take the same time whatever is routed."""
    config, loads = study(), calibration_loads(2, 16, 2)
    fitted = fit_hardware(loads, {load.name: 0.1 for load in loads}, config, 2, unfitted("toy", "made up", on_cpu=True))
    assert fitted.rest_s == pytest.approx(0.1)
    with pytest.raises(EquipoiseError, match="do not show what the experts' products cost, so nothing was written"):
        check_fit(fitted)


@pytest.mark.parametrize(("ranks", "experts", "top_k"), [(2, 4, 4), (4, 8, 2), (8, 8, 1)])
def test_loads_are_possible_at_awkward_sizes(ranks: int, experts: int, top_k: int) -> None:
    loads = calibration_loads(ranks, experts, top_k)
    assert {load.mode for load in loads} >= {ON}
    for load in loads:
        matrix = load.matrices(96)[0]
        routed = {"no rows": [0] * ranks, "half the rows": [48] * ranks}.get(load.name, [96] * ranks)
        if load.name == "few tokens of the last rank":
            routed[-1] = round(0.4 * 96)
        assert matrix.sum(1).tolist() == [tokens * top_k for tokens in routed]
        assert matrix.max() <= 96, "an expert gets each token once"


def test_a_middle_mean_leaves_out_a_quarter_at_either_end() -> None:
    assert middle_mean([3.0]) == 3.0
    assert middle_mean([100.0, 1.0, 2.0, 6.0]) == 4.0
    assert middle_mean([9.0, 2.0, 1.0]) == 4.0
    assert middle_mean([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 700.0]) == 3.5


def test_impossible_studies_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least 2 ranks|ep_size is 1"):
        study("--parallel.ep-size", "1", world_size=1)
    with pytest.raises(ConfigError, match="a calibration takes one"):
        study("--train.micro-batch-size", "8")


def test_a_benchmark_writes_over_a_file_only_when_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "results_folder", lambda: tmp_path)

    def written_by(*arguments: str) -> str:
        options = parse_options(argparse.ArgumentParser(), arguments)
        return write_results(results_file(options, "x.json"), [{"by": arguments}], {}, []).name

    assert [written_by() for _ in range(3)] == ["x.json", "x-2.json", "x-3.json"]
    assert written_by("--replace") == "x.json"
    own = str(tmp_path / "made" / "own.json")
    assert written_by("--out", own) == "own.json"
    with pytest.raises(SystemExit, match="2"):  # at once: nothing is measured for it
        parse_options(argparse.ArgumentParser(), ["--out", own])
    assert "own.json: this is there already; choose another name, or give --replace as well" in capsys.readouterr().err
    assert json.loads(Path(own).read_text())["rows"] == [{"by": ["--out", own]}]
    assert written_by("--out", own, "--replace") == "own.json"


def test_no_benchmark_chooses_its_file_by_itself() -> None:
    scripts = [path for path in (results.SOURCE / "benchmarks").glob("*.py") if "_results(" in path.read_text()]
    assert len(scripts) > 15
    for path in scripts:
        text = path.read_text()
        assert "parse_options(parser" in text, path.name
        assert "results_folder" not in text, path.name


def test_results_that_cannot_be_written_are_said_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = write_results(tmp_path / "a.json", [{"us": 1}], {}, [])
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(EquipoiseError, match=r"cannot write the results to .*a\.json: No space left on device"):
        write_results(path, [{"us": 2}], {}, [])
    assert json.loads(path.read_text())["rows"] == [{"us": 1}]


def test_parts_of_a_results_file_are_replaced_alone(tmp_path: Path) -> None:
    path = tmp_path / "observe.json"
    update_results(path, ["a"], [{"part": "a", "x": 1}], {"one": 1, "both": 1}, [])
    update_results(path, ["b"], [{"part": "b", "x": 2}], {"two": 2, "both": 2}, [])
    update_results(path, ["a"], [{"part": "a", "x": 3}], {"one": 3}, [])
    content = json.loads(path.read_text())
    assert content["rows"] == [{"part": "b", "x": 2}, {"part": "a", "x": 3}]
    assert content["summary"] == {"one": 3, "two": 2, "both": 2}

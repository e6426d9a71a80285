"""Baselines behind the planner protocol, the exact solver, planners from files, and the study that compares them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from equipoise.balance import ExactLoadPlanner, Placement, PlannerSettings, check_placement, planner_maker
from equipoise.balance.baselines import HistoryPlanner, LeastLoadedPlanner, UltraEPPlanner
from equipoise.balance.bounds import lower_bound
from equipoise.balance.exact import ExactPlanner, optimal_load
from equipoise.balance.quality import KINDS, Size, measure, milp_gap, study, synthetic_loads
from equipoise.balance.registry import PLANNERS
from equipoise.cli import bench
from equipoise.errors import ConfigError, PlanError

COMMITTED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "planner.json"


def matrix(load: list[int], num_ranks: int) -> torch.Tensor:
    """A load matrix with all tokens on rank 0."""
    return torch.tensor([load] + [[0] * len(load)] * (num_ranks - 1))


def some_loads(size: Size, count: int = 12) -> list:
    return list(synthetic_loads(size, count, np.random.default_rng(3)))


@pytest.mark.parametrize("name", ["none", "ultraep", "llep", "exact_load", "milp"])
@pytest.mark.parametrize(("num_ranks", "num_experts", "slots"), [(1, 3, 1), (3, 6, 1), (4, 8, 2)])
def test_every_planner_keeps_the_invariants(name: str, num_ranks: int, num_experts: int, slots: int) -> None:
    for _, load_PE in some_loads(Size(num_ranks, num_experts, 2, tokens=256), 6):
        check_placement(PLANNERS[name]()(load_PE, PlannerSettings(slots)), load_PE.sum(0))


@pytest.mark.parametrize("name", ["ultraep", "llep", "exact_load", "milp", "equal_split"])
def test_every_planner_keeps_to_domains(name: str) -> None:
    for _, load_PE in some_loads(Size(4, 8, 2, tokens=256), 6):
        placement = PLANNERS[name]()(load_PE, PlannerSettings(1, domain_size=2))
        home = placement.slot_expert.view(4, 1) // 2
        assert bool(((home // 2 == torch.arange(4)[:, None] // 2) | (placement.slot_expert.view(4, 1) < 0)).all())


def test_equal_split_gives_each_instance_the_same() -> None:
    placement = PLANNERS["equal_split"]()(matrix([90, 0, 0], 3), PlannerSettings(1))
    assert placement.quota.tolist() == [30, 0, 0, 30, 0, 30]


def test_history_knows_nothing_at_first_and_then_the_past() -> None:
    planner = HistoryPlanner(decay=0.5)
    assert int(planner(matrix([90, 0, 0], 3), PlannerSettings(1)).num_copies) == 0
    late = planner(matrix([0, 90, 0], 3), PlannerSettings(1))
    assert late.slot_expert.tolist() == [-1, 0, 0], "replicas of the expert that was hot before"
    assert late.rank_load.tolist() == [0, 90, 0]


def test_ultraep_style_never_lets_an_overloaded_rank_receive() -> None:
    """Loads 7, 7, 1 with one slot: the ideal gives rank 0's tokens to rank 2, then needs a second slot there."""
    load_PE = matrix([700, 700, 100], 3)
    theirs = UltraEPPlanner(min_tokens=1)(load_PE, PlannerSettings(1, tolerance=0.0))
    ours = ExactLoadPlanner()(load_PE, PlannerSettings(1, tolerance=0.0))
    assert theirs.rank_load.max() > ours.rank_load.max() == 500


def test_llep_style_spills_the_largest_experts_first_and_sits_out_small_imbalance() -> None:
    planner = LeastLoadedPlanner(min_chunk=1)
    spilled = planner(matrix([90, 0, 0], 3), PlannerSettings(2))
    assert spilled.rank_load.tolist() == [30, 30, 30]
    assert int(planner(matrix([12, 10, 10], 3), PlannerSettings(2)).num_copies) == 0


def test_the_exact_planner_is_optimal_and_whole() -> None:
    """Three hot experts of one rank on five ranks with a slot each: no placement reaches the mean of 1027."""
    load_PE = matrix([1722, 1682, 1708, 0, 2, 1, 1, 0, 1, 0, 0, 1, 0, 0, 0], 5)
    settings = PlannerSettings(1, tolerance=0.0)
    placement = ExactPlanner()(load_PE, settings)
    check_placement(placement, load_PE.sum(0))
    optimum = optimal_load(load_PE.sum(0), 5, settings)
    assert 1100 < optimum <= int(placement.rank_load.max()) < optimum + 2
    assert int(ExactLoadPlanner()(load_PE, settings).rank_load.max()) <= 1.005 * optimum
    assert int(lower_bound(load_PE.sum(0)[None], 5, 1)) <= optimum


def test_the_planner_is_within_half_a_percent_of_the_optimum() -> None:
    assert milp_gap(ExactLoadPlanner(), 15, np.random.default_rng(1))["milp_gap_max"] <= 1.005


@pytest.mark.parametrize("size", [Size(8, 32, 4), Size(64, 256, 8)], ids=lambda size: size.name)
def test_one_slot_reaches_the_mean_and_beats_two_of_the_ultraep_style(size: Size) -> None:
    loads = some_loads(size, 9)
    assert measure(ExactLoadPlanner(), loads, PlannerSettings(1, 0.0), deliveries=1).quantile(1.0) < 1.002
    ours = measure(ExactLoadPlanner(), loads, PlannerSettings(1, 0.01))
    theirs = measure(UltraEPPlanner(), loads, PlannerSettings(2, 0.01))
    assert ours.ratio.mean() < theirs.ratio.mean()
    assert ours.copies.mean() <= 1.1 * theirs.copies.mean()


def test_loads_come_from_the_seed_alone_in_equal_parts() -> None:
    size = Size(4, 8, 2, tokens=64)
    loads, again = some_loads(size), some_loads(size)
    assert [kind for kind, _ in loads] == list(KINDS) * 4
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(loads, again))
    assert all(load.sum(1).tolist() == [128] * 4 for _, load in loads)


MINE = """
from equipoise.balance.plan import placement_from_copies

def home(load_PE, settings):
    return placement_from_copies(load_PE.sum(0).tolist(), load_PE.shape[0], settings.num_slots, [])

class Counting:
    def __init__(self):
        self.calls = 0
    def __call__(self, load_PE, settings):
        self.calls += 1
        return home(load_PE, settings)

def greedy_thief(load_PE, settings):
    plan = home(load_PE, settings)
    plan.quota[0] += 1
    return plan
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_a_planner_from_a_file(mine: Path) -> None:
    placement = planner_maker(f"{mine}:home")()(matrix([6, 0], 2), PlannerSettings(1))
    assert isinstance(placement, Placement)
    make = planner_maker(f"{mine}:Counting")
    assert make() is not make(), "a class makes one planner for each layer"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fastest", "no planner 'fastest': choose exact_load, none, .* or give your own as my_file.py:function"),
        ("{mine}:missing", "has no function 'missing'; it has .*home"),
        ("nowhere.py:home", "there is no file .*nowhere.py"),
        ("{broken}:home", "importing .* failed with ZeroDivisionError"),
    ],
)
def test_a_wrong_planner_is_told_apart(name: str, message: str, mine: Path) -> None:
    broken = mine.with_name("broken.py")
    broken.write_text("1 / 0")
    with pytest.raises(ConfigError, match=message):
        planner_maker(name.format(mine=mine, broken=broken))


def test_a_planner_that_loses_tokens_fails_the_study(mine: Path) -> None:
    with pytest.raises(PlanError, match="expert 0 has"):
        study(planner_maker(f"{mine}:greedy_thief"), "thief", seed=0, count=15)


def test_bench_plan_measures_a_planner_from_a_file(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.balance.quality.SIZES", (Size(8, 32, 4),))
    out = mine.with_name("found.json")
    command = ["plan", "--quality", "--seed", "4", "--loads", "15", "--small-loads", "6", "--planner", f"{mine}:home"]
    result = CliRunner().invoke(bench, [*command, "--out", str(out)])
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert content["summary"]["r1_8x32_p90"] > 1.2
    assert content["summary"]["milp_gap_max"] > 1.2
    assert content["summary"]["copies_ratio"] == 0
    assert content["summary"]["seed"] == 4


def test_bench_plan_writes_what_it_measured_where_it_is_told_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.balance.quality.SIZES", ())
    monkeypatch.setattr("equipoise.bench.results.results_folder", lambda: tmp_path / "results")
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "made" / "times.json"
    for options, code in (
        ([], 0),
        (["--out", str(out)], 0),
        (["--out", str(out)], 2),  # not twice
        (["--out", str(out), "--replace", "--planner", "none"], 0),
    ):
        result = CliRunner().invoke(bench, ["plan", *options])
        assert result.exit_code == code, result.output
        assert ("is there already; choose another name, or give --replace" in result.output) == (code == 2)
        assert ("median" in result.output) == (code == 0)
        if code == 0 and options:
            assert f"written to {out}" in result.output
        else:
            assert "written" not in result.output
    rows = json.loads(out.read_text())["rows"]
    assert [(row["planner"], row["size"], row["slots"]) for row in rows] == [
        ("none", size, slots) for size in ("2x16", "4x32") for slots in (1, 2)
    ]
    assert all(0 < row["median_ms"] <= row["p90_ms"] <= row["max_ms"] for row in rows)
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "times.json"]


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("r2_8x32_p99", 1.002),
        ("r2_8x128_p95", 1.002),
        ("r2_64x256_p99", 1.002),
        ("r1_8x32_p90", 1.005),
        ("r1_64x256_p99", 1.002),
        ("milp_gap_max", 1.005),
        ("full_slots_max", 1.0),
        ("copies_ratio", 1.1),
        ("imbalance_ratio_8x32", 1.0),
        ("imbalance_ratio_64x256", 1.0),
    ],
)
def test_committed_results_keep_what_is_claimed(key: str, most: float) -> None:
    assert json.loads(COMMITTED.read_text())["summary"][key] <= most

"""`equipoise bench balance` on two processes: a preset-like recipe, a finished run, one layer."""

import json
from pathlib import Path
from typing import Any

import pytest

from equipoise.moe.synthetic import WORKLOADS
from integration.command import PROGRAM, Command
from integration.conftest import Base


def bench(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    options = ["--nproc-per-node", "2", "--steps", "1", "--rounds", "1", "--out", "found.json", "--replace"]
    command = Command(folder, [*PROGRAM, "bench", "balance", *arguments, *options])
    code = command.wait()
    assert code == 0, command.output()
    return json.loads((folder / "found.json").read_text()), command.output()


def test_every_workload_of_a_finished_run(base: Base) -> None:
    before = sorted(path for path in base.run.rglob("*"))
    found, output = bench(base.folder, "base", "--imbalance", "1.2", "--balance.num_redundant_experts_per_rank", "3")
    assert {row["workload"] for row in found["rows"]} == {"natural", *WORKLOADS}
    assert {row["mode"] for row in found["rows"]} == {"off", "on", "forced"}
    for row in found["rows"]:
        assert row["tokens_per_second"] > 0
        where = (row["workload"], row["mode"])
        if row["mode"] == "on":
            assert row["imbalance_delivered"] == pytest.approx(row["imbalance_planned"], abs=1e-9), where
            assert row["imbalance_planned"] <= 1.02, where  # as many slots as masters: exact but for the tolerance
        if row["mode"] == "forced":
            assert row["imbalance_delivered"] <= 1.1, where
        if row["mode"] == "off" and row["workload"] == "hot_rank":
            assert row["imbalance_delivered"] == pytest.approx(1.2, abs=0.05)
    assert {"on_over_off", "on_over_forced", "balanced_cost"} <= set(found["summary"])
    assert sorted(path for path in base.run.rglob("*")) == before, "a benchmark leaves the run as it is"
    assert "of ceiling" in output


@pytest.mark.slow
def test_one_layer_with_a_planner_of_another_name(base: Base) -> None:
    found, output = bench(
        base.folder, "recipe.toml", "--parallel.ep_size", "2", "--layer", "--modes", "off,on,llep,forced",
        "--workloads", "hot_rank", "--slots", "advise", "--imbalance", "1.5",
    )  # fmt: skip
    assert [row["mode"] for row in found["rows"]] == ["off", "on", "llep", "forced"]
    assert found["summary"]["layer"] is True
    assert found["summary"]["balance"]["copy_tokens"] > 0
    assert "pays from an imbalance of" in output
    assert all(sum(map(sum, row["sent_rows"])) > 0 and 0 <= row["remote_share"] <= 1 for row in found["rows"])

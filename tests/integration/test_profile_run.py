"""`equipoise train --profiler` on two ranks with balancing: every range is in the trace, and the summary adds up."""

import gzip
import json

import pytest

from equipoise.observe.profile_summary import PHASES, PhaseTime, summarize_trace
from integration.command import train
from integration.conftest import Base


def test_a_run_writes_a_trace_with_every_range(base: Base) -> None:
    settings = [
        *("--parallel.ep-size", "2", "--balance.tolerance", "0"),
        *("--synthetic-routing.workload", "hot_rank", "--synthetic-routing.imbalance", "1.5"),
        *(
            "--train.steps",
            "5",
            "--train.recompute",
            "selective",
            "--profiler.first-step",
            "3",
            "--profiler.steps",
            "2",
        ),
    ]
    output = train(base.folder, "profiled", *settings, nproc=2)
    folder = base.folder / "profiled" / "profile"
    stem = "steps-3-4.rank-0"
    trace = json.loads(gzip.decompress((folder / f"{stem}.trace.json.gz").read_bytes()))
    names = {event.get("name") for event in trace["traceEvents"]}
    assert {f"moe.{phase}" for phase in PHASES} <= names
    summary = summarize_trace(trace)
    assert summary.steps == 2
    assert summary.to_json() == json.loads((folder / f"{stem}.summary.json").read_text())
    total = sum(time.forward_ms + time.backward_ms for time in summary.phases.values()) + summary.other_host_ms
    assert total == pytest.approx(summary.step_ms)
    for phase in ("router", "dispatch", "experts", "combine"):
        assert summary.phases[phase].backward_ms > 0, phase
    assert summary.phases["restore"] != PhaseTime()
    assert (folder / f"{stem}.summary.txt").read_text() in output

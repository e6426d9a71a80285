"""Whole runs of `equipoise train`: what they leave, and that they repeat however they are spread."""

import json
import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from distributed.harness import free_port
from equipoise.train.resolved import hold_run_folder
from integration.command import (
    DEADLINE_S,
    PROGRAM,
    Command,
    checkpoints,
    clean_environment,
    losses,
    read_metrics,
    train,
    train_arguments,
)
from integration.conftest import Base

EP2 = ("--parallel.ep-size", "2")


def relative_differences(got: dict[int, float], want: dict[int, float]) -> float:
    assert got.keys() == want.keys()
    return max(abs(got[step] - want[step]) / want[step] for step in want)


def test_a_run_folder_holds_settings_versions_command_metrics_and_checkpoints(base: Base) -> None:
    assert checkpoints(base.run) == [10, 20, 30]
    settings = tomllib.loads((base.run / "config.toml").read_text())
    assert settings["parallel"]["ep_size"] == 2
    assert settings["model"]["num_experts"] == 6
    assert settings["optimizer"]["betas"] == [0.9, 0.95]  # defaults too
    run = json.loads((base.run / "run.json").read_text())
    assert run["command"].startswith("equipoise train recipe.toml")
    assert run["typed"].startswith("equipoise train recipe.toml --nproc-per-node 2 --out base --parallel.ep-size 2")
    assert run["environment"]["EQUIPOISE_ACCELERATOR"] == "cpu"
    assert run["versions"]["torch"]
    events = list((base.run / "tensorboard").glob("events.out.tfevents.*"))
    assert len(events) == 1
    assert events[0].stat().st_size > 1000
    assert not list(base.run.rglob("*.tmp"))
    for shown in ("step 30/30", "training finished", "run folder: base", "checkpoint: base/checkpoints/step-00000030"):
        assert shown in base.output
    for told in ("ep 2 x efsdp 1", "6 experts, top 2", "expert kernel: loop", "balancing: off (--balance turns it on)"):
        assert told in base.output


def test_metrics_have_every_field_in_every_line(base: Base) -> None:
    records = read_metrics(base.run)
    assert [record["step"] for record in records] == list(range(1, 31))
    for record in records:
        numbers = {name: value for name, value in record.items() if name not in ("layers", "assumed_peak_source")}
        assert all(isinstance(value, (int, float)) for value in numbers.values())
        for field in (
            *("loss", "grad_norm", "lr", "tokens", "tokens_per_second", "tokens_per_second_per_rank", "mfu"),
            *("assumed_peak_flops", "memory_peak_bytes", "aux_loss"),
            *("time_step_s", "time_data_s", "time_forward_s", "time_backward_s", "time_optimizer_s"),
            *("rank_imbalance", "rank_imbalance_p50", "rank_imbalance_p95", "rank_imbalance_max"),
            *("expert_maxvio", "dead_experts"),
        ):
            assert field in numbers, field
        assert "mtp_loss" not in record
        assert record["tokens"] == 4 * 24
        assert record["lr"] == 3e-2
        assert 1 <= record["rank_imbalance_p50"] <= record["rank_imbalance_max"] <= 2
        assert {len(values) for values in record["layers"].values()} == {2}
        assert ("eval_loss" in record) == (record["step"] % 5 == 0)
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["eval_loss"] < records[4]["eval_loss"]


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses_and_neither_evaluation_nor_sinks_touch_them(base: Base) -> None:
    """C44; symptom 9. The other run has no evaluation before the end, no checkpoints and no TensorBoard."""
    train(base.folder, "again", *EP2, nproc=2)
    fields = ("loss", "grad_norm", "aux_loss", "layers", "expert_maxvio")
    again, first = read_metrics(base.folder / "again"), read_metrics(base.run)
    assert [[record[f] for f in fields] for record in again] == [[record[f] for f in fields] for record in first]
    assert again[-1]["eval_loss"] == first[-1]["eval_loss"]


def test_one_process_gives_the_same_losses(base: Base) -> None:
    train(base.folder, "one", nproc=1)
    assert relative_differences(losses(base.folder / "one"), losses(base.run)) < 1e-5


@pytest.mark.slow
def test_documents_from_jsonl_recompute_accumulation_and_kernels_change_no_loss(base: Base) -> None:
    """C46 (d): the set is smaller than ten steps, so every rank wraps at the same step. With multi-token prediction."""
    common = ["--data.source", "few.jsonl", "--data.packing", "documents", "--train.steps", "10"]
    common += ["--model.router-aux-loss-coef", "0", "--model.num-nextn-predict-layers", "1"]
    train(base.folder, "documents", *common, nproc=1)
    spread = ["--train.recompute", "full", "--train.micro-batch-size", "1", "--train.expert-kernel", "grouped_mm"]
    spread += ["--parallel.dispatcher", "all_gather", "--parallel.no-reshard-after-forward"]
    output = train(base.folder, "documents-spread", *common, *spread, *EP2, nproc=2)
    assert "2 microbatches of 1" in output
    assert "expert kernel: grouped_mm (asked for)" in output
    first, second = (read_metrics(base.folder / name) for name in ("documents", "documents-spread"))
    assert len(first) == len(second) == 10
    assert sum(record["tokens"] for record in first) > 20 * 41  # more than one pass over 20 texts of at most 40 bytes
    for a, b in zip(first, second):
        assert a["tokens"] == b["tokens"]
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["mtp_loss"] == pytest.approx(a["mtp_loss"], rel=1e-5)
    assert first[-1]["mtp_loss"] < first[0]["mtp_loss"]
    assert second[-1]["eval_loss"] == pytest.approx(first[-1]["eval_loss"], rel=1e-5)


@pytest.mark.slow
def test_two_nodes_train_to_the_end_with_the_same_losses(base: Base) -> None:
    """Two torchrun agents on this machine, one process each."""
    port = free_port()
    agents = [
        Command(
            base.folder,
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"),
                *(f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"),
                *("-m", *PROGRAM[2:], "train", "recipe.toml", "--out", "nodes", "--train.steps", "12", *EP2),
            ],
        )
        for node in range(2)
    ]
    try:
        codes = [agent.wait() for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert codes == [0, 0], [agent.output() for agent in agents]
    want = losses(base.run)
    assert losses(base.folder / "nodes") == {step: want[step] for step in range(1, 13)}
    assert checkpoints(base.folder / "nodes") == [12]


@pytest.mark.slow
def test_the_compile_option_changes_no_loss(base: Base) -> None:
    train(base.folder, "compiled", "--train.compile", "--train.steps", "3", nproc=1)
    want = losses(base.run)
    got = losses(base.folder / "compiled")
    assert relative_differences(got, {step: want[step] for step in got}) < 1e-5


def test_a_misspelt_key_suggests_the_right_one_and_creates_nothing(tmp_path: Path) -> None:
    started = time.monotonic()
    done = subprocess.run(
        [*PROGRAM, "train", "demo", "--nproc-per-node", "2", "--model.num-expert", "8"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "did you mean model.num_experts?" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - started < 30
    assert list(tmp_path.iterdir()) == []


def test_a_closed_pipe_ends_the_display_and_not_the_training(base: Base) -> None:
    """`equipoise train ... | head -1`."""
    command = train_arguments("piped", *EP2, nproc=2)
    with subprocess.Popen(
        command, cwd=base.folder, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step 1/30")
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 0
    assert losses(base.folder / "piped") == losses(base.run)
    assert checkpoints(base.folder / "piped") == [30]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("--data.source", "missing"), "data.source 'missing' does not exist"),
        (
            ("--out", "base", "--train.steps", "31", "--train.global-batch-size", "8"),
            "the saved data position belongs to",
        ),
        (("--out", "base", "--no-resume"), "base/checkpoints holds step-00000030 of an earlier run"),
        (("--out", "base", "--resume-step", "7"), "cannot resume from step 7"),
        (
            ("--out", "base", "--model.rope-theta", "3.0"),
            "base/checkpoints/step-00000030: the checkpoint is of a model that",
        ),
    ],
    ids=str,
)
def test_under_torchrun_a_mistake_is_told_once(base: Base, settings: tuple[str, ...], message: str) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    command = Command(base.folder, [*torchrun, "-m", *PROGRAM[2:], "train", "recipe.toml", *EP2, *settings])
    assert command.wait() != 0
    output = command.output()
    told = [line for line in output.splitlines() if line.startswith("Error")]
    assert len(told) == 1, output
    assert told[0].startswith(f"Error (rank 0): {message}")
    assert "(the same on ranks 0-1 of 2)" in output or "--out" in told[0]
    assert not list(base.folder.glob("runs/*"))


def test_a_second_run_in_a_folder_is_refused_on_every_rank(base: Base) -> None:
    with hold_run_folder(base.folder / "held"):
        output = train(base.folder, "held", *EP2, nproc=2, exit_code=2)
    assert output.count("held is in use by another run") == 1
    assert not (base.folder / "held").exists()

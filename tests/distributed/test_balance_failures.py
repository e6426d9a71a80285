"""Ranks that stop or die inside a transfer of replicas: the others say which, where; a run that died goes on."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from distributed.balance_rig import INNER, D, E, few_candidates, make_balancer
from distributed.harness import RankOutcome, observe_ranks, run_ranks
from distributed.parity import toy_model
from equipoise.balance.transport import symmetric
from equipoise.balance.transport.collective import CollectiveTransport
from equipoise.balance_config import BalanceConfig
from equipoise.checkpoint.config import CheckpointConfig
from equipoise.data.config import DataConfig
from equipoise.distributed.mesh import ParallelConfig
from equipoise.distributed.watch import WATCHDOG_EXIT_CODE
from equipoise.errors import RankFailure
from equipoise.kernels.triton_support import triton_problem
from equipoise.train.config import LoopConfig, TrainConfig
from equipoise.train.optimizer import OptimizerConfig
from equipoise.train.run import run_training
from equipoise.train.step import moe_layers
from equipoise.train.trainer import Trainer

TIMEOUT_S = 3.0


class Schedule(NamedTuple):
    """Steps of a run, steps between checkpoints, and the step in which a rank is killed."""

    steps: int
    every: int
    dies_at: int


SCHEDULES = {"collective": Schedule(7, 2, 6), "symmetric": Schedule(3, 1, 3)}
"""By transport: Triton's interpreter is slow."""
ON_CPU = {"EQUIPOISE_ACCELERATOR": "cpu"}
needs_interpreter = pytest.mark.skipif(
    triton_problem("cpu") is not None, reason="Triton's interpreter is off or missing"
)
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def stop_before_receiving() -> None:
    """Rank 1 knows the plan, then stops instead of taking part in the push of rank 0's expert."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    balancer = make_balancer(dist.group.WORLD)
    step = balancer.route(torch.zeros(6, 1, dtype=torch.int64), (7, 2))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    started = time.monotonic()
    step.attach("up", torch.zeros(E // 2, 2 * INNER, D))
    try:
        step.slots("up")
    finally:
        print(f"waited {time.monotonic() - started:.1f} s")


def seconds_waited(outcome: RankOutcome) -> float:
    return float(outcome.output.rpartition("waited ")[2].split()[0])


def test_the_waiting_rank_names_layer_operation_and_rank() -> None:
    waiting, stopped = observe_ranks(stop_before_receiving, 2, deadline_s=50, wait_for=[0])
    assert stopped.exit_code is None
    assert RankFailure.__name__ in waiting.traceback
    assert (
        "weights 'up' of layer 7, microbatch 2: rank 0 waited for rank 1, which did not take part" in waiting.traceback
    )
    assert seconds_waited(waiting) < TIMEOUT_S + 2


def run_config(num_ranks: int, timeout_s: float = 60, transport: str = "collective") -> TrainConfig:
    """A small model on random tokens, all that a run needs. The transport, and the dispatcher that goes with it."""
    return TrainConfig(
        model=toy_model(num_experts=6, selection_bias=True, bias_update_speed=0.01, num_experts_per_tok=2),
        data=DataConfig(source="random", eval_fraction=0.0),
        parallel=ParallelConfig(
            ep_size=num_ranks, timeout_s=timeout_s, dispatcher="symmetric" if transport == "symmetric" else "auto"
        ),
        train=LoopConfig(
            steps=SCHEDULES[transport].steps,
            global_batch_size=(2 if transport == "collective" else 1) * num_ranks,
            micro_batch_size=1,
            sequence_length=8,
        ),
        optimizer=OptimizerConfig(warmup_steps=0),
        checkpoint=CheckpointConfig(every=SCHEDULES[transport].every, keep_last=0, async_save=False),
        balance=BalanceConfig(tolerance=0.0, num_redundant_experts_per_rank=2, transport=transport),  # type: ignore[arg-type]
    )


def heat_rank_0() -> None:
    """Lets runs start with a selection bias that sends most tokens to the first rank's experts."""
    restore = Trainer.restore

    def heated(trainer: Trainer, *resume: Any) -> None:
        for layer in moe_layers(trainer.model):
            bias_E = layer.gate.e_score_correction_bias
            assert bias_E is not None
            bias_E[: len(bias_E) // trainer.world.size] = 2.0
        restore(trainer, *resume)

    Trainer.restore = heated  # type: ignore[method-assign]


def on_transfer(method: str, step: int, act: Callable[[Any], None]) -> None:
    """Calls `act` with what a transfer of step `step` that has just begun returned, in its backward only."""
    present, transfer = note_steps(), getattr(CollectiveTransport, method)

    def begin(*args: Any) -> Any:
        pending = transfer(*args)
        if present[0] == step and torch._C._current_graph_task_id() != -1:
            act(pending)
        return pending

    setattr(CollectiveTransport, method, begin)


def note_steps() -> list[int]:
    """A list that will hold the present step's number."""
    present, train_step = [0], Trainer._train_step

    def noted(trainer: Trainer, *args: Any) -> Any:
        present[0] = trainer.step + 1
        return train_step(trainer, *args)

    Trainer._train_step = noted  # type: ignore[method-assign]
    return present


class StopsHere:
    """A transfer in whose wait the process stops, after the others had time to hear what it is doing."""

    def wait(self) -> None:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSTOP)


def stop_in_a_transfer(folder: Path, method: str) -> None:
    """The last of three ranks stops while it waits for weights or gradients in the backward of step 2."""

    def stop(pending: Any) -> None:
        messages = pending if method == "push_weights" else pending.pending
        messages.works.insert(0, StopsHere())

    if os.environ["RANK"] == "2":
        on_transfer(method, 2, stop)
    heat_rank_0()
    started = time.monotonic()
    try:
        run_training(run_config(3, TIMEOUT_S), folder, [], resume=True)
    finally:
        print(f"waited {time.monotonic() - started:.1f} s")


@pytest.mark.parametrize(
    ("method", "what", "layer"),
    [
        ("push_weights", "weights", 0),
        pytest.param("pull_gradients", "gradients", 2, marks=pytest.mark.slow),
    ],
)
def test_all_others_name_the_rank_that_stopped_and_its_transfer(
    tmp_path: Path, method: str, what: str, layer: int
) -> None:
    """Layers 0 and 2 have experts; the slots still hold the weights of the last when its backward begins."""
    *others, stopped = observe_ranks(
        stop_in_a_transfer, 3, tmp_path, method, deadline_s=60, wait_for=[0, 1], env=ON_CPU
    )
    assert stopped.exit_code is None
    for other in others:
        report = other.traceback + other.output
        assert "RankFailure" in report
        assert "rank 2 (host " in report
        assert "its process is stopped" in report
        assert f'last seen in "step 2 / backward of microbatch 0 / {what} ' in report
        assert f"of layer {layer}, microbatch 0" in report
        assert seconds_waited(other) < 30


def train_or_die(folder: Path, dies: bool, transport: str = "collective") -> None:
    """Rank 1 is killed in the weight sync of a backward; a step ends neither on it nor on rank 0."""
    heat_rank_0()
    if transport == "symmetric":
        few_candidates()
    if dies and os.environ["RANK"] == "1":
        if transport == "symmetric":
            die_in_the_kernel()
        else:
            on_transfer(
                "push_weights", SCHEDULES[transport].dies_at, lambda pending: os.kill(os.getpid(), signal.SIGKILL)
            )
    run_training(run_config(2, 20, transport), folder, [], resume=True)


def die_in_the_kernel() -> None:
    """While the kernel of a push runs, on the device or in the interpreter."""
    push = symmetric.push_weights

    def push_and_die(*args: Any) -> None:
        is_time = present[0] == SCHEDULES["symmetric"].dies_at and torch._C._current_graph_task_id() != -1
        if is_time:
            threading.Timer(0.003, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        push(*args)
        if is_time:
            time.sleep(1)

    present = note_steps()
    symmetric.push_weights = push_and_die


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("transport", "env"),
    [
        pytest.param("collective", ON_CPU, marks=pytest.mark.slow),
        pytest.param("symmetric", ON_CPU, marks=[pytest.mark.slow, needs_interpreter]),
        pytest.param("symmetric", {"EQUIPOISE_ACCELERATOR": "cuda"}, marks=[pytest.mark.gpu, needs_two_gpus]),
    ],
    ids=["collective", "symmetric, interpreted", "symmetric, on GPUs"],
)
def test_a_run_killed_in_the_middle_of_a_step_goes_on_with_the_losses_of_one_that_was_not(
    tmp_path: Path, transport: str, env: dict[str, str]
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run = {"deadline_s": 150, "env": env}
    survivor, victim = observe_ranks(train_or_die, 2, killed, True, transport, after_failure_s=60, **run)  # type: ignore[arg-type]
    assert victim.exit_code == -signal.SIGKILL
    # A GPU's host waits for NCCL, which the kernel's report does not end: the watchdog does.
    assert survivor.exit_code == (WATCHDOG_EXIT_CODE if env != ON_CPU else 1), survivor.output
    report = survivor.traceback + survivor.output
    assert "RankFailure" in report
    assert ("rank 1 (host " if transport == "collective" else "waited for rank 1") in report
    _, every, dies_at = SCHEDULES[transport]
    assert [record["step"] for record in records(killed)] == list(range(1, dies_at))
    saved = [f"step-{step:08}" for step in range(every, dies_at, every)]
    assert sorted(path.name for path in (killed / "checkpoints").glob("step-*")) == saved
    for folder in (killed, whole):
        run_ranks(train_or_die, 2, folder, False, transport, **run)  # type: ignore[arg-type]
    want = records(whole)
    assert min(record["rank_imbalance"] for record in want) > 1.5
    assert max(record["rank_imbalance_after"] for record in want) < 1.2
    for field in ("step", "loss", "grad_norm", "rank_imbalance", "rank_imbalance_after", "balance_copies", "layers"):
        assert [record[field] for record in records(killed)] == [record[field] for record in want], field

"""Runs that go on at other sizes than they were saved at: the same data, losses and model, balanced or not."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from distributed.harness import run_ranks
from distributed.parity import toy_model
from equipoise.balance_config import BalanceConfig
from equipoise.checkpoint.config import CheckpointConfig
from equipoise.data.config import DataConfig
from equipoise.distributed.mesh import ParallelConfig
from equipoise.train.config import LoopConfig, TrainConfig
from equipoise.train.optimizer import OptimizerConfig
from equipoise.train.run import run_training

ON_CPU = {"EQUIPOISE_ACCELERATOR": "cpu"}
SAVED, STEPS = 3, 6
BALANCED = BalanceConfig(tolerance=0.0, num_redundant_experts_per_rank=2)


def train(folder: Path, steps: int, ep_size: int, replicate_size: int = 1, balanced: bool = False) -> None:
    config = TrainConfig(
        model=toy_model(num_hidden_layers=2, mlp_only_layers=(), selection_bias=True, bias_update_speed=0.01),
        data=DataConfig(source="random", eval_fraction=0.0),
        parallel=ParallelConfig(ep_size=ep_size, replicate_size=replicate_size, timeout_s=60),
        train=LoopConfig(steps=steps, global_batch_size=4, sequence_length=8),
        # A large eps, so that Adam does not make a step of full size of a gradient that is a rounding error.
        optimizer=OptimizerConfig(warmup_steps=0, min_lr_ratio=1.0, eps=1e-2),
        checkpoint=CheckpointConfig(every=SAVED, keep_last=0),
        balance=BALANCED if balanced else None,
    )
    run_training(config, folder, [], resume=True)
    if balanced and os.environ["RANK"] == "0":
        moved = [line["balance_copies"] for line in records(folder)[-(STEPS - SAVED) :]]
        assert min(moved) > 0, "nothing was balanced"


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    lines = records(folder)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    target = folder / "whole.pt"
    dcp_to_torch_save(folder / "checkpoints" / f"step-{step:08}", target)
    found = torch.load(target, weights_only=True)
    return {name: value for name, value in found.items() if not name.startswith("rng.")}


def saved_at(folder: Path, world_size: int, *layout: Any) -> Path:
    """A run of `STEPS` steps without a stop."""
    run_ranks(train, world_size, folder, STEPS, *layout, deadline_s=120, env=ON_CPU)
    return folder


def assert_goes_on(saved: Path, folder: Path, world_size: int, *layout: Any) -> None:
    """Resumed after the third step at another layout, the run makes the losses and the model of that without a stop."""
    shutil.copytree(saved, folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS:08}")
    run_ranks(train, world_size, folder, STEPS, *layout, deadline_s=120, env=ON_CPU)
    want = losses(saved)
    assert want[SAVED] != want[SAVED + 1]
    assert losses(folder)[:SAVED] == want[:SAVED]
    assert losses(folder) == pytest.approx(want, rel=2e-6)
    got, expected = tensors(folder, STEPS), tensors(saved, STEPS)
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        difference = (got[name].double() - value.double()).norm() / value.double().norm().clamp(min=1e-12)
        assert difference < 1e-5, name


# World size, ep_size, replicate_size, balanced
EP_1 = (1, 1)
EP_2 = (2, 2)
EP_2_BALANCED = (2, 2, 1, True)


@pytest.mark.parametrize(("saved", "resumed"), [(EP_2_BALANCED, EP_1), (EP_1, EP_2)], ids=["2 to 1", "1 to 2"])
def test_ep_1_and_2(tmp_path: Path, saved: tuple[Any, ...], resumed: tuple[Any, ...]) -> None:
    assert_goes_on(saved_at(tmp_path / "saved", *saved), tmp_path / "resumed", *resumed)


LAYOUTS = {
    "1 rank, EP 1": (1, 1),
    "2 ranks, EP 2": (2, 2),
    "2 ranks, EP 2, on": (2, 2, 1, True),
    "4 ranks, EP 4": (4, 4),
    "4 ranks, EP 4, on": (4, 4, 1, True),
    "4 ranks, EP 2": (4, 2),
    "4 ranks, EP 2, on": (4, 2, 1, True),
    "4 ranks, EP 2, replicated": (4, 2, 2),
    "4 ranks, EP 1": (4, 1),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("balanced", [False, True], ids=["off", "on"])
def test_a_run_of_ep_4_goes_on_at_every_size(tmp_path: Path, balanced: bool) -> None:
    saved = saved_at(tmp_path / "saved", 4, 4, 1, balanced)
    for name, layout in LAYOUTS.items():
        assert_goes_on(saved, tmp_path / name, *layout)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_replicas_of_the_whole_model_are_saved_once_and_go_on_without_replication(tmp_path: Path) -> None:
    saved = saved_at(tmp_path / "saved", 4, 2, 2)
    for name, layout in LAYOUTS.items():
        assert_goes_on(saved, tmp_path / name, *layout)

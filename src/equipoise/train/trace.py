"""Joins a training run to its load trace. Imported only when a run has one."""

import math
from pathlib import Path

import torch

from equipoise.distributed.agree import raise_together
from equipoise.distributed.world import World
from equipoise.observe.recorder import LoadRecorder
from equipoise.observe.schema import TRACE_FOLDER, TraceInfo
from equipoise.observe.writer import prepare_folder
from equipoise.train.config import RunPlan, TrainConfig
from equipoise.train.step import TrainStep


def trace_info(config: TrainConfig, plan: RunPlan, world: World, num_layers: int, dtype: torch.dtype) -> TraceInfo:
    """The sizes of a run's trace."""
    model, balance, synthetic = config.model, config.balance, config.synthetic_routing
    return TraceInfo(
        num_layers=num_layers,
        num_experts=model.num_experts,
        num_experts_per_tok=model.num_experts_per_tok,
        ep_size=plan.axes.ep,
        num_groups=world.size // plan.axes.ep,
        num_slots=0 if balance is None else balance.num_redundant_experts_per_rank,
        num_microbatches=plan.accumulation_steps,
        hidden_size=model.hidden_size,
        moe_intermediate_size=model.moe_intermediate_size,
        sequence_length=config.train.sequence_length,
        dtype=str(dtype).removeprefix("torch."),
        planner="" if balance is None else balance.planner,
        workload="" if synthetic is None else synthetic.workload,
        device=world.accelerator.device_name(),
    )


def make_recorder(
    config: TrainConfig,
    plan: RunPlan,
    world: World,
    step_runner: TrainStep,
    dtype: torch.dtype,
    run_dir: Path,
    step: int,
) -> LoadRecorder:
    """The recorder of a run that goes on after `step`. Collective.

    Raises:
        TraceError: on every rank, when the trace's folder cannot be written.
    """
    assert config.trace is not None
    info = trace_info(config, plan, world, len(step_runner.layers), dtype)
    directory = run_dir / TRACE_FOLDER
    recorder: LoadRecorder | None = None
    error: Exception | None = None
    try:
        if world.rank == 0:
            prepare_folder(directory, info, step)
    except Exception as e:
        error = e
    raise_together(error, world)
    try:
        recorder = LoadRecorder(
            config.trace,
            info,
            step_runner.layers,
            directory,
            world.accelerator,
            world.device,
            step_runner.meshes.ep,
            world.rank,
            _expert_bytes(config, dtype),
        )
    except Exception as e:
        error = e
    raise_together(error, world)
    assert recorder is not None
    return recorder


def _expert_bytes(config: TrainConfig, dtype: torch.dtype) -> int:
    model = config.model
    return 3 * math.prod((model.hidden_size, model.moe_intermediate_size)) * dtype.itemsize

"""The record of a step, as `metrics.jsonl` holds it (docs/metrics.md lists the fields)."""

from typing import Any

import torch

from equipoise.accelerator import selection_report
from equipoise.balance_config import BalanceConfig
from equipoise.distributed.world import World
from equipoise.kernels import describe_choice
from equipoise.models.model import MoEForCausalLM
from equipoise.train.balance_statistics import balance_metrics
from equipoise.train.config import RunPlan, TrainConfig
from equipoise.train.load_statistics import load_metrics
from equipoise.train.step import StepResult
from equipoise.train.throughput import active_parameters, assumed_peak, flops_per_token, throughput_metrics


def in_millions(count: float) -> str:
    """A number of parameters in words, such as `1.8 M`; below 0.1 M in thousands."""
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count / 1e3:.1f} k"


def describe_balancing(balance: BalanceConfig | None, ep_size: int) -> str:
    """What is balanced, in words, for the log at the start."""
    if balance is None:
        return "off" if ep_size == 1 else "off (--balance turns it on)"
    slots, tolerance = balance.num_redundant_experts_per_rank, balance.tolerance
    told = f"{balance.planner}, {slots} replica slot{'s' * (slots > 1)} on each rank"
    if tolerance >= 1:  # perhaps meant in per cent
        told += (
            f"; balance.tolerance {tolerance:g} moves nothing below {1 + tolerance:g} times the mean load (0.01 is 1 %)"
        )
    return told


class StepRecorder:
    """Turns step results into records; knows the model's arithmetic and the peak that MFU refers to."""

    def __init__(self, config: TrainConfig, plan: RunPlan, world: World, dtype: torch.dtype) -> None:
        self.config, self.plan, self.world, self.dtype = config, plan, world, dtype
        self.peak = assumed_peak(world.accelerator, dtype, config.metrics.peak_flops)
        self.steps_recorded = 0
        self.flops_per_token = flops_per_token(config.model, config.train.sequence_length)

    def describe(self, model: MoEForCausalLM) -> list[str]:
        """Lines for the log at the start: the model, its spread over ranks, and what was chosen and why."""
        axes, loop = self.plan.axes, self.config.train
        total = sum(p.numel() for p in model.parameters())
        active = active_parameters(self.config.model)
        kernel = describe_choice(self.world.device, self.dtype, loop.expert_kernel)
        layout = f"ep {axes.ep} x efsdp {axes.efsdp}"
        if axes.replicate > 1:
            layout += f" x replicate {axes.replicate}"
        ahead = self.config.model.num_nextn_predict_layers
        mtp = f", {ahead} multi-token-prediction layer{'s' * (ahead > 1)}" if ahead else ""
        chosen = selection_report()
        synthetic = self.config.synthetic_routing
        measured_only = (
            []
            if synthetic is None
            else [
                f"routing is laid down ({synthetic.workload}), for measurements only: the model learns nothing useful"
            ]
        )
        return [
            *measured_only,
            f"accelerator: {chosen['winner']} ({chosen['reason']})",
            f"model: {in_millions(total)} parameters, {in_millions(active)} active per token, "
            f"{self.config.model.num_experts} experts, top {self.config.model.num_experts_per_tok}{mtp}",
            f"ranks: {axes.world} on {self.world.accelerator.device_name()}, {layout}; compute in "
            f"{str(self.dtype).removeprefix('torch.')}",
            f"batch: {loop.global_batch_size} sequences of {loop.sequence_length} tokens = "
            f"{self.plan.accumulation_steps} microbatches of {self.plan.micro_batch_size} on each rank",
            f"expert kernel: {kernel['grouped_linear']} ({kernel['reason']})",
            f"balancing: {describe_balancing(self.config.balance, axes.ep)}",
            f"MFU refers to {self.peak.flops / 1e12:.3g} TFLOP/s per rank ({self.peak.source})",
        ]

    def record(self, result: StepResult, lr: float, times: dict[str, float]) -> dict[str, Any]:
        """Fields of one step; `times` of `StepTimes.seconds`."""
        seconds = times["time_step_s"]
        self.steps_recorded += 1
        memory = self.world.accelerator.memory()
        loads = load_metrics(result.counts_LE, result.rank_imbalance_L, result.rank_imbalance_max)
        if result.balance is not None:
            loads |= balance_metrics(result.balance)
        fields: dict[str, Any] = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": lr,
            "tokens": result.num_tokens,
            **throughput_metrics(result.num_tokens, seconds, self.world.size, self.flops_per_token, self.peak),
            "memory_peak_bytes": memory.peak_allocated,
            **times,
            **loads,
        }
        if result.rollout is not None:
            fields |= result.rollout.metrics()
        if self.config.model.router_aux_loss_coef > 0:
            fields["aux_loss"] = result.aux_loss
        if self.config.model.router_z_loss_coef > 0:
            fields["z_loss"] = result.z_loss
        if self.config.model.num_nextn_predict_layers:
            fields["mtp_loss"] = result.mtp_loss
        return fields | result.further

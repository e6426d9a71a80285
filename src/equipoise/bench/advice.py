"""How many replica slots a workload wants on this machine, by the cost model and two measured rates."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from equipoise.balance.config import planner_settings
from equipoise.balance.cost import advise_slots
from equipoise.balance.rules import MAX_COPY_TOKENS
from equipoise.balance_config import BalanceConfig
from equipoise.distributed.world import World
from equipoise.kernels.grouped_mlp import grouped_mlp
from equipoise.moe.synthetic import Workload
from equipoise.train.config import RunPlan, TrainConfig
from equipoise.train.trainer import compute_dtype

REPEATS = 5
SYNCS = 2
"""Weights are sent once for the forward and once for the backward."""


def measure_copy_tokens(config: TrainConfig, plan: RunPlan, world: World) -> int:
    """`copy_tokens` of this machine: the time in which one rank sends an expert's weights to a neighbour, forward and
    backward, over the time that one token of one expert takes. Collective, equal on every rank."""
    model, dtype, device = config.model, compute_dtype(config, world), world.device
    tokens = plan.micro_batch_size * config.train.sequence_length
    rows = max(1, tokens * model.num_experts_per_tok // model.num_experts * plan.axes.ep)
    make = lambda *shape: torch.randn(*shape, device=device, dtype=dtype)  # noqa: E731
    gate_up = make(1, 2 * model.moe_intermediate_size, model.hidden_size).requires_grad_()
    down = make(1, model.hidden_size, model.moe_intermediate_size).requires_grad_()
    rows_RD, counts = make(rows, model.hidden_size).requires_grad_(), torch.tensor([rows], device=device)
    weights, received = make(gate_up.numel() + down.numel()), make(gate_up.numel() + down.numel())

    def compute() -> None:
        grouped_mlp(rows_RD, gate_up, down, counts, config.train.expert_kernel).sum().backward()

    def copy() -> None:
        ep, place = plan.axes.ep, world.rank % plan.axes.ep  # neighbours in the EP group: its ranks are consecutive
        peers = [world.rank - place + (place + step) % ep for step in (1, -1)]
        ops = [dist.P2POp(dist.isend, weights, peers[0]), dist.P2POp(dist.irecv, received, peers[1])]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    seconds = torch.tensor([_median(compute, world), _median(copy, world)], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=world.group)
    per_token, per_copy = float(seconds[0]) / rows, float(seconds[1])
    return min(round(SYNCS * per_copy / per_token), MAX_COPY_TOKENS)


def _median(work: Callable[[], None], world: World) -> float:
    times = []
    for _ in range(REPEATS + 1):
        world.accelerator.synchronize()
        start = time.perf_counter()
        work()
        world.accelerator.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[REPEATS // 2]


def slots_for(workload: Workload, tokens: int, balance: BalanceConfig, copy_tokens: int) -> int:
    """The fewest slots per rank with which a workload's planned time is near its best; 0 if no replica pays.

    tokens: of each rank in a microbatch.
    """
    settings = planner_settings(balance.model_copy(update={"copy_tokens": copy_tokens}))
    load_E = torch.zeros(workload.num_experts, dtype=torch.int64)
    for rank in range(workload.num_ranks):
        load_E += torch.tensor(workload.routing(0, rank).expert_counts(tokens))
    return advise_slots(load_E[None], workload.num_ranks, settings)[0]

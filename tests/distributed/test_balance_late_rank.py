"""A rank that stops inside a transfer: the others name layer, operation and rank within the deadline."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from distributed.balance_rig import INNER, D, E, make_balancer
from distributed.harness import run_ranks
from equipoise.errors import RankFailure


def stop_before_receiving() -> tuple[str, float]:
    """Rank 1 knows the plan and then does not take part in the push of rank 0's expert."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=3))
    balancer = make_balancer(dist.group.WORLD)
    step = balancer.route(torch.zeros(6, 1, dtype=torch.int64), (7, 2))
    started = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(6)
        return "", 0.0
    step.attach("up", torch.zeros(E // 2, 2 * INNER, D))
    try:
        step.slots("up")
    except RankFailure as error:
        return str(error), time.monotonic() - started
    return "nothing", time.monotonic() - started


def test_the_waiting_rank_names_layer_operation_and_rank() -> None:
    (message, seconds), _ = run_ranks(stop_before_receiving, 2, deadline_s=50)
    assert "weights 'up' of layer 7, microbatch 2" in message
    assert "rank 0 waited for rank 1" in message
    assert seconds < 5

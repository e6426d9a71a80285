"""What balancing did in a step, from the balancer's records. Needs nothing of the package `balance`, which may be off.

Shapes: L MoE layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from equipoise.train.load_statistics import spread_over_layers

if TYPE_CHECKING:
    from equipoise.balance import LoadRecord
    from equipoise.balance.runtime import DeviceRecords


@dataclass(frozen=True)
class BalanceResult:
    """What balancing did in a step, equal on every rank.

    after_L: max over mean of the rank loads in an EP group as delivered, mean over microbatches and EP groups.
    after_max: the largest of any layer, microbatch and EP group.
    copies, num_bytes: replicas of all layers and microbatches, and their weights' bytes one way; mean over EP groups.
    plan_s: seconds for exchanging counts and planning. sync_s: the host's wait for weights and gradients of
        replicas. Means over ranks.
    """

    after_L: torch.Tensor
    after_max: float
    copies: float
    num_bytes: float
    plan_s: float
    sync_s: float


def sum_records(
    records: Sequence["LoadRecord"], waited_s: float, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, float]:
    """This rank's share of a step's result: sums over ranks give `after_L` and [copies, num_bytes, plan_s, sync_s]; the
    maximum over ranks of the third gives `after_max`. float64 on the CPU."""
    by_layer: dict[Any, list[float]] = {}
    for record in records:
        by_layer.setdefault(record.key[0], []).append(record.after)  # type: ignore[index]
    after_L = torch.tensor([sum(values) / len(values) for values in by_layer.values()], dtype=torch.float64)
    totals = [sum(r.copies for r in records), sum(r.num_bytes for r in records), sum(r.seconds for r in records)]
    totals.append(waited_s)
    worst = max((record.after for record in records), default=1.0)
    return after_L / world_size, torch.tensor(totals, dtype=torch.float64) / world_size, worst


def sum_device_records(
    records: "DeviceRecords", waited_s: float, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`sum_records` on the device, without a host sync."""
    by_layer: dict[Any, list[int]] = {}
    for number, key in enumerate(records.keys):
        by_layer.setdefault(key[0], []).append(number)  # type: ignore[index]
    after_N, layers = records.after_N, list(by_layer.values())
    number, times = len(layers), len(layers[0])
    if layers == [list(range(first, number * times, number)) for first in range(number)]:  # microbatch by microbatch
        after_L = after_N.view(times, number).mean(0)
    else:
        after_L = torch.stack([torch.stack([after_N[i] for i in chosen]).mean() for chosen in layers])
    copies = records.copies_N.sum().double()
    waited = copies.new_full((), waited_s)
    totals = torch.stack([copies, copies * records.copy_bytes, torch.zeros_like(copies), waited])
    return after_L / world_size, totals / world_size, after_N.max()


def balance_metrics(result: BalanceResult) -> dict[str, Any]:
    """Metrics fields of one step; copies to the host."""
    after_L = result.after_L.cpu()
    spread = spread_over_layers(after_L)
    return {
        "rank_imbalance_after": float(after_L.mean()),
        "rank_imbalance_after_p50": spread["p50"],
        "rank_imbalance_after_p95": spread["p95"],
        "rank_imbalance_after_max": result.after_max,
        "balance_copies": result.copies,
        "balance_bytes": result.num_bytes,
        "balance_plan_s": result.plan_s,
        "balance_sync_s": result.sync_s,
    }

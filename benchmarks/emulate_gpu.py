"""Balanced and unbalanced MoE layers of large EP groups, emulated on one GPU: each rank's share runs alone.

Measured: the plan and the reroute of one rank, and its experts' forward and backward (SwiGLU, with the counts that the
plan gives it). Computed: weights and gradients of replicas over the link, at a bandwidth that `transport_gpu.py` has
measured. Not there: dispatch, which all modes pay alike, and contention. A layer's time is that of its slowest rank,
with plan and reroute in front; copies are given beside it, since they run beside other work as far as there is any.

Run: python benchmarks/emulate_gpu.py [--out FILE]   (writes benchmarks/results/emulate-h200.json)
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from equipoise.balance import Placement, PlannerSettings, planner_maker
from equipoise.balance.device_planner import DevicePlanner
from equipoise.bench.results import device_word, parse_options, results_file, write_results
from equipoise.kernels.grouped_mlp import grouped_mlp
from equipoise.kernels.reroute import reroute_permutation
from equipoise.moe.synthetic import Workload


class Group(NamedTuple):
    """An EP group: ranks, experts, experts per token, tokens of a rank, features, inner features of an expert."""

    num_ranks: int
    num_experts: int
    top_k: int
    tokens: int
    hidden: int
    inner: int


GROUPS = (Group(8, 32, 4, 16384, 4096, 2048), Group(64, 256, 8, 8192, 4096, 2048))
TINY = (Group(4, 8, 2, 64, 32, 16),)
WORKLOADS = (("hot_rank", 1.6), ("hot_rank", 2.5), ("spread", 2.0), ("rotating", 2.0))
SLOTS, LINK_GBPS, SLOWEST = 2, 330.0, 3


def load_of(group: Group, workload: Workload, step: int) -> torch.Tensor:
    """int64 [P, E]: tokens of each rank for each expert."""
    return torch.tensor([workload.routing(step, r).expert_counts(group.tokens) for r in range(group.num_ranks)])


class Emulator:
    """Measures one rank's share of a group."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_gpu = device.type == "cuda"
        self.dtype = torch.bfloat16 if self.is_gpu else torch.float32

    def us(self, work: Callable[[], Any], repeats: int = 10) -> float:
        """Median microseconds of a call."""
        times = []
        for _ in range(repeats + 2):
            if self.is_gpu:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                work()
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) * 1e3)
            else:
                began = time.perf_counter()
                work()
                times.append((time.perf_counter() - began) * 1e6)
        return statistics.median(times[2:])

    def experts_us(self, group: Group, counts: torch.Tensor) -> float:
        """Forward and backward of one rank's experts with so many rows each."""
        number = counts.numel()
        make = lambda *shape: torch.randn(*shape, device=self.device, dtype=self.dtype).mul_(0.02)  # noqa: E731
        up, down = make(number, 2 * group.inner, group.hidden), make(number, group.hidden, group.inner)
        rows = make(int(counts.sum()), group.hidden)
        for tensor in (up, down, rows):
            tensor.requires_grad_()
        on_device, gradient = counts.to(self.device), torch.ones_like(rows)

        def step() -> None:
            grouped_mlp(rows, up, down, on_device).backward(gradient)
            rows.grad = up.grad = down.grad = None

        return self.us(step)

    def planning_us(self, group: Group, load_PE: torch.Tensor) -> dict[str, float]:
        """The plan and the reroute of one rank."""
        planner, settings = DevicePlanner(), PlannerSettings(SLOTS, 0.002)
        load = load_PE.int().to(self.device)
        plan = planner(load, 0, settings)
        ids = torch.repeat_interleave(torch.arange(group.num_experts), load_PE[0]).int()
        ids = ids[torch.randperm(ids.numel(), generator=torch.Generator().manual_seed(0))]
        ids_TK = ids[: ids.numel() // group.top_k * group.top_k].view(-1, group.top_k).to(self.device)
        arguments = plan.slot_expert, plan.send, group.num_experts, group.num_ranks, 0
        return {
            "plan_us": self.us(lambda: planner(load, 0, settings)),
            "reroute_us": self.us(lambda: reroute_permutation(ids_TK, *arguments)),
        }

    def slowest_us(self, group: Group, quota_PL: torch.Tensor) -> float:
        """Of the ranks with the most rows."""
        ranks = quota_PL.sum(1).topk(min(SLOWEST, group.num_ranks)).indices.tolist()
        return max(self.experts_us(group, quota_PL[rank]) for rank in ranks)


def placements(group: Group, workload: Workload, planners: dict[str, Any]) -> dict[str, Placement]:
    """Of the third step, by mode; planners that learn have seen the steps before it."""
    settings = PlannerSettings(SLOTS, 0.002)
    found: dict[str, Placement] = {}
    for step in range(3):
        load_PE = load_of(group, workload, step)
        for mode, planner in planners.items():
            found[mode] = planner(load_PE, settings)
    return found


def copies_us(group: Group, placement: Placement, bytes_per_element: int) -> float:
    """Time of the busiest rank's link, each way on its own."""
    M, R = placement.num_masters, placement.num_slots
    used = placement.slot_expert >= 0
    host = torch.arange(used.numel()) // max(R, 1)
    home = placement.slot_expert.clamp(min=0) // M
    count = lambda rank: torch.bincount(rank[used], minlength=group.num_ranks).max()  # noqa: E731
    busiest = int(torch.maximum(count(host), count(home)))
    return busiest * 3 * group.hidden * group.inner * bytes_per_element / LINK_GBPS / 1e3


def emulate(emulator: Emulator, group: Group) -> list[dict[str, Any]]:
    rows = []
    make = lambda name, imbalance: Workload(name, imbalance, group.num_experts, group.top_k, group.num_ranks)  # noqa: E731
    planners = {"off": planner_maker("none"), "on": planner_maker("exact_load"), "eplb": planner_maker("eplb")}
    even = load_of(group, make("balanced", 1.0), 0).sum(0).view(group.num_ranks, -1)
    forced_us = emulator.slowest_us(group, even)
    for name, imbalance in WORKLOADS:
        workload = make(name, min(imbalance, make(name, 1.0).largest_imbalance))
        load_PE = load_of(group, workload, 2)
        planning = emulator.planning_us(group, load_PE)
        mean = float(load_PE.sum()) / group.num_ranks
        for mode, placement in placements(group, workload, {m: maker() for m, maker in planners.items()}).items():
            quota_PL = placement.quota.view(group.num_ranks, -1)
            experts_us = emulator.slowest_us(group, quota_PL)
            in_front = sum(planning.values()) if mode == "on" else planning["reroute_us"]
            rows.append(
                group._asdict()
                | {"workload": name, "imbalance": workload.imbalance, "mode": mode}
                | {"after": float(quota_PL.sum(1).max()) / mean, "copies": int(placement.num_copies)}
                | {"experts_us": experts_us, "layer_us": experts_us + in_front, "forced_us": forced_us}
                | {"push_us": copies_us(group, placement, 2), "pull_us": copies_us(group, placement, 4)}
                | planning
            )
            print({key: value for key, value in rows[-1].items() if key not in Group._fields}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = parse_options(parser)
    has_gpu = torch.cuda.is_available()
    emulator = Emulator(torch.device("cuda" if has_gpu else "cpu"))
    name = torch.cuda.get_device_name() if has_gpu else "cpu"
    out = results_file(options, f"emulate-{device_word(name)}.json")
    rows: list[dict[str, Any]] = []
    for group in GROUPS if has_gpu else TINY:  # a run that is cut short has a file of the groups so far
        rows += emulate(emulator, group)
        write(rows, out, name)


def write(rows: list[dict[str, Any]], out: Path, name: str) -> None:
    of = {(row["num_ranks"], row["workload"], row["imbalance"], row["mode"]): row for row in rows}
    cases = list(dict.fromkeys(key[:3] for key in of))
    summary = {
        " ".join(map(str, case)): {
            "on_over_forced": of[*case, "on"]["forced_us"] / of[*case, "on"]["layer_us"],
            "on_over_off": of[*case, "off"]["layer_us"] / of[*case, "on"]["layer_us"],
            "on_over_eplb": of[*case, "eplb"]["layer_us"] / of[*case, "on"]["layer_us"],
        }
        for case in cases
    }
    print(summary, write_results(out, rows, summary, ("torch", "triton"), {"device": name}), flush=True)


if __name__ == "__main__":
    main()

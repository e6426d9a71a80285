"""Every workload with balancing on and off: the same losses, gradients, norms and parameters over five steps."""

from dataclasses import replace
from itertools import cycle

import pytest

from distributed.harness import run_ranks
from distributed.parity import Case, build_case_meshes, differences, toy_model, train_in_parallel
from equipoise.accelerator import get_accelerator
from equipoise.balance_config import BalanceConfig
from equipoise.distributed.world import join_world
from equipoise.moe.synthetic import WORKLOADS, Workload

STEPS = 5


def on_and_off(cases: list[Case]) -> list[tuple[str, dict[str, float], float]]:
    """What differs between each case and the same without balancing, and how many replicas there were."""
    results = []
    with join_world(get_accelerator(), timeout_s=60) as world:
        meshes = build_case_meshes(cases[0], world)
        for case in cases:
            on = train_in_parallel(case, world, STEPS, meshes)
            off = train_in_parallel(replace(case, balance=None), world, STEPS, meshes)
            differing = {name: value for name, value in differences(on, off).items() if value > case.limit}
            assert case.workload is not None
            results.append((case.workload.name, differing, on.copies))
    return results


@pytest.mark.parametrize("ep", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_on_equals_off(ep: int) -> None:
    """Dispatchers, recompute, accumulation and slots take turns over the workloads."""
    options = zip(cycle(["all_to_all", "all_gather"]), cycle(["full", "none", "selective"]), cycle([1, 2]))
    cases = [
        Case(
            toy_model(num_experts_per_tok=2, num_hidden_layers=2, mlp_only_layers=(), n_shared_experts=0),
            ep=ep,
            dispatcher=dispatcher,
            recompute=recompute,
            accumulate=accumulate,
            balance=BalanceConfig(num_redundant_experts_per_rank=accumulate, tolerance=0.0),
            workload=Workload(name, 1.4, 8, 2, ep),
        )
        for name, (dispatcher, recompute, accumulate) in zip(WORKLOADS, options)
    ]
    for results in run_ranks(on_and_off, ep, cases, deadline_s=240, env={"EQUIPOISE_ACCELERATOR": "cpu"}):
        for name, differing, copies in results:
            assert not differing, f"{name} differs: {differing}"
            assert copies or name == "balanced", f"{name}: nothing was replicated"

"""The plan kernel: the plan of the reference, bit for bit, for every load and setting."""

import numpy as np
import pytest
import torch

from equipoise.balance import PlannerSettings, check_plan, complete_plan, device_planner, planner_host
from equipoise.balance.device_planner import DevicePlanner
from equipoise.balance.planner_host import plan_load
from equipoise.balance.quality import Size, synthetic_loads
from equipoise.kernels.plan import COUNTERS, PlanTables, PlanTerms, make_plan_workspace, plan, plan_problem
from equipoise.kernels.triton_support import triton_problem

CPU = torch.device("cpu")
needs_interpreter = pytest.mark.skipif(
    triton_problem("cpu") is not None, reason="Triton's interpreter is off or missing"
)
PARTS = ("slot_expert", "quota", "send", "recv")


@pytest.fixture
def few_targets(monkeypatch):
    """Both sides search three targets: the interpreter runs one candidate after another."""
    for module in (planner_host, device_planner):
        monkeypatch.setattr(module, "TARGET_STEPS", (0, 2**14))


def reference(load_PE: torch.Tensor, rank: int, chosen: PlannerSettings):
    load_PE = load_PE.cpu()
    return complete_plan(plan_load(load_PE.sum(0), load_PE.shape[0], chosen), load_PE, rank)


def differing(found, expected) -> list[str]:
    """Names of the parts that are not equal."""
    return [name for name in PARTS if not torch.equal(getattr(found, name).cpu(), getattr(expected, name))]


def skewed(num_ranks: int, num_experts: int, seed: int, most: int = 400) -> torch.Tensor:
    """int32 [P, E], Zipf-like over experts, every source with other numbers."""
    rng = np.random.default_rng(seed)
    scale_E = most / (1 + rng.permutation(num_experts)) ** 1.2
    return torch.from_numpy((rng.random((num_ranks, num_experts)) * scale_E).astype(np.int32))


def only(num_ranks: int, num_experts: int, rank: int, expert: int, tokens: int) -> torch.Tensor:
    load_PE = torch.zeros(num_ranks, num_experts, dtype=torch.int32)
    load_PE[rank, expert] = tokens
    return load_PE


def ragged(num_ranks: int, num_experts: int) -> torch.Tensor:
    """Half of the sources have no tokens."""
    load_PE = skewed(num_ranks, num_experts, 5)
    load_PE[::2] = 0
    return load_PE


CASES = {
    "zeros": (torch.zeros(4, 8, dtype=torch.int32), PlannerSettings(2, 0.0)),
    "one token": (only(4, 8, 3, 7, 1), PlannerSettings(1, 0.0)),
    "all on one expert": (skewed(5, 10, 0)[:, :1] * (torch.arange(10) == 4).int(), PlannerSettings(1, 0.0)),
    "huge, all on one expert": (only(4, 8, 2, 0, 2**31 - 1), PlannerSettings(2, 0.0)),
    "huge, all over": (skewed(4, 8, 3, 2**26) + 2**24, PlannerSettings(1, 0.0, copy_tokens=2**18)),
    "one rank": (skewed(1, 5, 1), PlannerSettings(2, 0.0)),
    "ragged sources": (ragged(5, 15), PlannerSettings(2, 0.0)),
    "no slots": (skewed(3, 6, 2), PlannerSettings(0, 0.0)),
    "slots for every master": (skewed(4, 12, 4), PlannerSettings(3, 0.0)),
    "more slots than masters": (skewed(3, 3, 6), PlannerSettings(2, 0.0)),
    "domains": (skewed(4, 8, 7), PlannerSettings(2, 0.0, domain_size=2)),
    "domains of one rank": (skewed(4, 8, 8), PlannerSettings(1, 0.0, domain_size=1)),
    "copies cost, least quota": (skewed(5, 10, 9), PlannerSettings(2, 0.0, min_tokens=20, copy_tokens=30)),
    "copies cost too much": (skewed(4, 8, 10), PlannerSettings(1, 0.0, copy_tokens=2**18)),
    "much is tolerated": (skewed(4, 8, 11), PlannerSettings(1, 1000.0)),
    "experts off the powers of two": (skewed(5, 35, 12), PlannerSettings(1, 0.01)),
}


@needs_interpreter
@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel_gives_the_reference_plan(case: str, few_targets) -> None:
    load_PE, chosen = CASES[case]
    rank = load_PE.shape[0] // 2
    assert differing(DevicePlanner()(load_PE, rank, chosen), reference(load_PE, rank, chosen)) == []


@needs_interpreter
@pytest.mark.parametrize("case", ["one token", "slots for every master", "huge, all over", "copies cost, least quota"])
def test_ranks_shared_out_among_lanes_give_the_reference_plan(case: str, few_targets, monkeypatch) -> None:
    """The form for many ranks, here of few."""
    monkeypatch.setattr("equipoise.kernels.plan.MAX_LANE_EXPERTS", 0)
    monkeypatch.setattr("equipoise.kernels.plan.MAX_OWN_SUMS", 0)
    load_PE, chosen = CASES[case]
    assert differing(DevicePlanner()(load_PE, 0, chosen), reference(load_PE, 0, chosen)) == []


@needs_interpreter
def test_workspace_is_left_as_it_was_found(few_targets) -> None:
    load_PE, chosen = skewed(3, 6, 13), PlannerSettings(1, 0.0)
    rules_V4, steps_K = device_planner.rule_tables(CPU)
    workspace = make_plan_workspace(3, 6, 1, (len(steps_K) + 1) * len(rules_V4), CPU)
    tables, terms = PlanTables(rules_V4, steps_K, workspace), PlanTerms(1, 1, chosen.tolerance_ppm, 1, 0, 0)
    for _ in range(2):
        parts = plan(load_PE, tables, terms)
        for name, part in zip(PARTS, parts):
            assert torch.equal(part, getattr(reference(load_PE, 1, chosen), name))
        assert not workspace[:COUNTERS].any()


def test_operator_is_traced_without_running() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        load_PE = torch.empty(4, 8, dtype=torch.int32)
        rules, steps = torch.empty(6, 4, dtype=torch.int32), torch.empty(128, dtype=torch.int32)
        tables = PlanTables(rules, steps, torch.empty(10**5, dtype=torch.int64))
        parts = plan(load_PE, tables, PlanTerms(0, 2, 0, 1, 0, 0))
    assert [tuple(part.shape) for part in parts] == [(8,), (16,), (16,), (4, 4)]
    assert {part.dtype for part in parts} == {torch.int32}


@needs_interpreter
def test_operator_compiles_without_a_graph_break(few_targets) -> None:
    load_PE, chosen, planner = skewed(2, 4, 14), PlannerSettings(1, 0.0), DevicePlanner()
    planner(load_PE, 0, chosen)
    compiled = torch.compile(lambda load: planner(load, 0, chosen).quota * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(load_PE), reference(load_PE, 0, chosen).quota * 2)


def test_sizes_beyond_the_kernel_are_planned_by_tensors(monkeypatch) -> None:
    monkeypatch.setattr("equipoise.kernels.plan.triton_problem", lambda device_type: None)
    assert plan_problem("cuda", 64, 512, 2) is None
    assert "256 ranks" in str(plan_problem("cuda", 512, 512, 1))
    assert "4096 slots" in str(plan_problem("cuda", 256, 256, 64))
    monkeypatch.setattr(device_planner, "plan_problem", lambda *sizes: "a reason")
    load_PE, chosen = skewed(3, 6, 15), PlannerSettings(1, 0.0)
    assert differing(DevicePlanner()(load_PE, 1, chosen), reference(load_PE, 1, chosen)) == []


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("size", [Size(8, 32, 4), Size(8, 128, 8), Size(64, 256, 8), Size(6, 42, 4)], ids=str)
def test_kernel_gives_the_reference_plan_on_a_gpu(size: Size, slots: int, device) -> None:
    planner, rng = DevicePlanner(), np.random.default_rng(slots)
    settings = [
        PlannerSettings(slots),
        PlannerSettings(slots, 0.0),
        PlannerSettings(slots, 0.0, min_tokens=16, copy_tokens=500),
        PlannerSettings(slots, 0.0, domain_size=size.num_ranks // 2),
    ]
    for number, (_, load_PE) in enumerate(synthetic_loads(size, 60, rng)):
        chosen, rank = settings[number % 4], number % size.num_ranks
        on_device = load_PE.int().to(device)
        found, expected = planner(on_device, rank, chosen), reference(load_PE, rank, chosen)
        assert differing(found, expected) == [], f"load {number}"
        assert differing(planner(on_device, rank, chosen), expected) == [], f"load {number}, again"
        if number < 4:
            check_plan(expected, load_PE, chosen.domain_size)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_awkward_loads_on_a_gpu(case: str, device) -> None:
    load_PE, chosen = CASES[case]
    rank = load_PE.shape[0] - 1
    assert differing(DevicePlanner()(load_PE.to(device), rank, chosen), reference(load_PE, rank, chosen)) == []


@pytest.mark.gpu
def test_captured_plan_follows_the_load_without_a_host_sync(device) -> None:
    chosen, planner = PlannerSettings(2), DevicePlanner()
    load_PE = skewed(8, 128, 0).to(device)
    planner(load_PE, 3, chosen)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        planner(load_PE, 3, chosen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = planner(load_PE, 3, chosen)
    for seed in range(1, 6):
        load_PE.copy_(skewed(8, 128, seed))
        graph.replay()
        torch.cuda.synchronize()
        assert differing(found, reference(load_PE, 3, chosen)) == [], f"replay {seed}"

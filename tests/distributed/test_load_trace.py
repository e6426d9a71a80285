"""The load trace of a training run on two ranks: what is recorded is what was routed and delivered."""

import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from distributed.harness import run_ranks
from distributed.parity import toy_model
from distributed.rig import Rig, random_batch
from equipoise.accelerator import CPUAccelerator
from equipoise.balance_config import BalanceConfig
from equipoise.distributed.mesh import ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.world import join_world
from equipoise.moe.synthetic import Workload
from equipoise.observe.config import TraceConfig
from equipoise.observe.reader import Trace, open_trace
from equipoise.observe.recorder import LoadRecorder
from equipoise.observe.schema import TraceInfo
from equipoise.train.step import run_model

K, S, E = 3, 6, 8
SLOTS = 2


def steps_on_rank(folder: str, slots: int, recompute: str) -> list[list[list[int]]]:
    """Three steps of two microbatches; rank 0's last sequence is padded. Returns this rank's counts of step 2."""
    config = TraceConfig(every=1, matrices_every=2, sequences_every=2)
    balance = BalanceConfig(num_redundant_experts_per_rank=slots, tolerance=0.0) if slots else None
    model = toy_model(num_experts=E, num_experts_per_tok=K)
    with join_world(CPUAccelerator(), timeout_s=40) as world:
        meshes = build_meshes(derive_axes(ParallelConfig(ep_size=2), world.size, E), world)
        rig = Rig(model, world, meshes, balance=balance, recompute=recompute)
        rig.runner.lay_down_routing(Workload("hot_rank", 1.5, E, K, 2))
        info = TraceInfo(len(rig.runner.layers), E, K, ep_size=2, num_slots=slots, num_microbatches=2)
        recorder = LoadRecorder(
            config, info, rig.runner.layers, Path(folder), world.accelerator, world.device, meshes.ep, world.rank, 100
        )
        counts = []
        for step in (1, 2, 3):
            recorder.begin(step)
            batches = [random_batch(100 * step + 10 * world.rank + i, 2, S, num_padding=2 * i) for i in range(2)]
            sums, counts_NLE = rig.runner.forward_backward(batches, world.size * 2 * S)
            result, norm = rig.runner.reduce(sums, counts_NLE, world.size * 2 * S, stop=False)
            rig.runner.update(result, norm, 0.0)
            recorder.end()
            with torch.no_grad():
                run_model(rig.model, batches[0], world.device)  # an evaluation
            if step == 2:
                counts = counts_NLE.tolist()
        recorder.close()
        recorder.close()
    return counts


@cache
def record(slots: int, recompute: str) -> tuple[Trace, np.ndarray]:
    """The trace and the routers' own counts of step 2, [P, N, L, E]."""
    folder = Path(tempfile.mkdtemp(prefix="trace-"))
    counts = run_ranks(steps_on_rank, 2, str(folder), slots, recompute, deadline_s=100)
    return open_trace(folder), np.array(counts)


@pytest.mark.parametrize(
    ("slots", "recompute"),
    [(0, "none"), (SLOTS, "selective"), pytest.param(SLOTS, "full", marks=pytest.mark.slow)],
)
def test_the_trace_holds_what_was_routed_planned_and_delivered(slots: int, recompute: str) -> None:
    """Recompute, evaluation and padding add nothing (C26)."""
    trace, counts_PNLE = record(slots, recompute)
    assert trace.steps() == [1, 2, 3]
    layers = trace.info.num_layers
    table = trace.layers()
    assert table.num_rows == 3 * 2 * layers, "one row per step, microbatch and layer: no evaluation, no recompute"
    moved = 0
    for microbatch in range(2):
        for layer in range(layers):
            found = trace.load(2, layer, microbatch)
            assert np.array_equal(found.load_PE, counts_PNLE[:, microbatch, layer])
            real_tokens = 2 * (S - 2 * microbatch)
            assert found.load_PE.sum(1).tolist() == [K * real_tokens] * 2, "padding counts nowhere"
            assert np.array_equal(found.delivered_Pm, found.quota_Pm)
            assert np.array_equal(found.delivered_Pm.sum(1), found.rank_load_after_P)
            assert found.rank_load_P.sum() == found.rank_load_after_P.sum() == found.load_PE.sum()
            assert found.copies == (found.slot_expert_PR >= 0).sum()
            assert found.copied_bytes == 100 * found.copies
            assert (found.seconds_PF[:, [0, 2, 3, 4]] > 0).all()
            assert (found.seconds_PF[:, 1] > 0).all() == (slots > 0)
            moved += found.copies
    assert (moved > 0) == (slots > 0)
    after = table["rank_imbalance_after"].to_numpy()
    assert (after.max() < table["rank_imbalance"].to_numpy().max()) == (slots > 0)


def test_sequences_add_up_to_the_loads() -> None:
    trace, counts_PNLE = record(0, "none")
    assert trace.steps(with_matrices=True) == [2]
    table = trace.sequences()
    assert set(table["step"].to_pylist()) == {2}
    assert table.num_rows == 2 * 2 * 2 * trace.info.num_layers  # ranks, microbatches, sequences
    for rank in range(2):
        for layer in range(trace.info.num_layers):
            rows = [r for r in table.to_pylist() if (r["rank"], r["layer"], r["microbatch"]) == (rank, layer, 1)]
            assert np.array_equal(np.sum([r["counts"] for r in rows], 0), counts_PNLE[rank, 1, layer])

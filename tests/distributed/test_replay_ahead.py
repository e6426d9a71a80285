"""Replay under expert parallelism with balancing: plans are made ahead, gradients stay what they were."""

from typing import Any

import torch

from distributed.harness import run_ranks
from distributed.parity import relative, toy_model, whole
from equipoise.accelerator import CPUAccelerator
from equipoise.balance_config import BalanceConfig
from equipoise.distributed.mesh import ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.world import join_world
from equipoise.models.parallelize import build_parallel_model
from equipoise.moe.replay import RoutingReplay
from equipoise.train.step import moe_layers

MODEL = toy_model(num_experts=8, num_experts_per_tok=3)


def routes(rank: int, num_tokens: int) -> RoutingReplay:
    """Skewed to the first rank's experts; the last two tokens are padding."""
    generator = torch.Generator().manual_seed(rank)
    scores = torch.rand(2, num_tokens, 8, generator=generator) + torch.linspace(1, 0, 8)
    ids = scores.topk(3).indices.to(torch.int8)
    ids[:, -2:] = -1
    return RoutingReplay(ids, True)


def on_rank(recompute: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    with join_world(CPUAccelerator(), timeout_s=40) as world:
        meshes = build_meshes(derive_axes(ParallelConfig(ep_size=2), 2, 8), world)
        for name in ("off", "balanced", "ahead"):
            balance = None if name == "off" else BalanceConfig(num_redundant_experts_per_rank=2, tolerance=0.0)
            options = {"balance": balance, "recompute": recompute}
            model = build_parallel_model(MODEL, meshes, world.device, seed=3, **options)
            ids = torch.randint(0, MODEL.vocab_size, (1, 12), generator=torch.Generator().manual_seed(world.rank))
            valid = torch.ones(1, 12, dtype=torch.bool)
            valid[0, -2:] = False
            replay = routes(world.rank, 12)
            if name == "balanced":
                replay = RoutingReplay(replay.ids_LTK, False)
            for microbatch in range(2):
                loss = model(ids, ids, valid_BS=valid, microbatch=microbatch, replay=replay).loss_sum
                loss.backward()
            gradients[name] = whole({n: p.grad for n, p in model.named_parameters()})
            if balance is not None:
                balancer = moe_layers(model)[0].balancing.balancer
                records = balancer.take_records()
                found[name] = [(r.key, r.copies, r.before, r.after) for r in records]
                found["left"] = len(balancer._ahead)
        found["differing"] = {
            f"{a} {n}": d
            for a in ("balanced", "ahead")
            for n, g in gradients[a].items()
            if (d := relative(g, gradients["off"][n])) > 1e-5
        }
        found["router"] = min(
            float(gradients["ahead"][n].abs().sum()) for n in gradients["ahead"] if "gate.weight" in n
        )
    return found


def test_plans_made_ahead_are_those_made_in_time_and_gradients_do_not_change() -> None:
    for found in run_ranks(on_rank, 2, "full", deadline_s=150, env={"EQUIPOISE_ACCELERATOR": "cpu"}):
        assert found["differing"] == {}
        assert found["ahead"] == found["balanced"]
        assert any(copies for _, copies, _, _ in found["ahead"])
        assert all(after <= before for _, _, before, after in found["ahead"])
        assert found["left"] == 0
        assert found["router"] > 0

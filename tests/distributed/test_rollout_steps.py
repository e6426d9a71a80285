"""Steps of a balanced trainer on rollouts of an engine: plans are made ahead, by all ranks or by none."""

from typing import Any

import torch

from distributed.harness import run_ranks
from distributed.parity import relative, toy_model, whole
from equipoise.accelerator import CPUAccelerator
from equipoise.balance import Balancer
from equipoise.balance_config import BalanceConfig
from equipoise.distributed.mesh import ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.world import join_world
from equipoise.moe.bias import update_selection_bias
from equipoise.train.rollout import Sample, collate_samples
from equipoise.train.step import moe_layers
from unit.engine_rig import engine_of, generate, prompt, routes_of, some_ids, trainer_model

from distributed.rig import Rig  # isort: skip

MODEL = toy_model(n_shared_experts=0, selection_bias=True, bias_update_speed=0.01)
S = 14
BALANCE = BalanceConfig(num_redundant_experts_per_rank=2, tolerance=0.0)


def samples_of(rank: int) -> list[Sample]:
    """Of the same weights that the trainer starts from."""
    engine = engine_of(trainer_model(MODEL, seed=3))
    prompts = [prompt(some_ids(n, seed=rank), f"{n}", max_new_tokens=4) for n in (3 + rank, 8)]
    results = generate(engine, *prompts)
    found = [(p.ids, results[p.rid]) for p in prompts]
    return [Sample(ids + r.output_ids, len(ids), r.output_logprobs, routes_of(r)) for ids, r in found]


def on_rank() -> dict[str, Any]:
    found: dict[str, Any] = {"calls": {}}
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    calls, plan_ahead = [], Balancer.plan_ahead

    def counted(self, keys, ids):
        calls.append(len(keys))
        plan_ahead(self, keys, ids)

    Balancer.plan_ahead = counted
    with join_world(CPUAccelerator(), timeout_s=40) as world:
        meshes = build_meshes(derive_axes(ParallelConfig(ep_size=2), 2, MODEL.num_experts), world)
        samples = samples_of(world.rank)
        for name in ("off", "ahead", "one rank does not know"):
            balance = None if name == "off" else BALANCE
            rig = Rig(MODEL, world, meshes, seed=3, balance=balance, recompute="full")
            mine = samples
            if name == "one rank does not know" and world.rank == 1:
                mine = [samples[0]._replace(routes=samples[0].routes[:-1]), samples[1]]
            batch, rollout = collate_samples(mine, S, MODEL, 0.7)
            tokens = 2 * 2 * batch.num_valid_tokens
            calls.clear()
            sums, counts_NLE = rig.runner.forward_backward([batch, batch], tokens, [rollout, rollout])
            found["calls"][name] = list(calls)
            gradients[name] = whole({n: p.grad for n, p in rig.model.named_parameters()})
            result, _ = rig.runner.reduce(sums, counts_NLE, tokens, stop=False)
            found[name] = (result.rollout, result.balance and result.balance.copies, result.loss)
        found["differing"] = {
            f"{a} {n}": d
            for a in ("ahead", "one rank does not know")
            for n, g in gradients[a].items()
            if (d := relative(g, gradients["off"][n])) > 1e-5
        }
        gates = [gradient for name, gradient in gradients["ahead"].items() if "gate.weight" in name]
        found["router"] = min(float(gate.abs().sum()) for gate in gates)
        found["bias"] = biases(rig, world.rank)
    return found


def biases(rig: Rig, rank: int) -> dict[str, Any]:
    """A step with experts that no router chose: what moves the selection biases."""
    ids = some_ids(9, seed=rank)
    routes = torch.tensor([0, 1, 2]).repeat(8, 2, 1).numpy()
    batch, rollout = collate_samples([Sample(ids, 4, None, routes)], S, MODEL)
    before = [layer.gate.e_score_correction_bias.clone() for layer in moe_layers(rig.model)]
    sums, counts_NLE = rig.runner.forward_backward([batch], 10, [rollout])
    result, norm = rig.runner.reduce(sums, counts_NLE, 10, stop=False)
    for bias, counts_E in zip(before, result.router_counts_LE):
        update_selection_bias(bias, counts_E, MODEL.bias_update_speed)
    rig.runner.update(result, norm, 1e-3)
    after = [layer.gate.e_score_correction_bias for layer in moe_layers(rig.model)]
    return {
        "followed": result.counts_LE.tolist(),
        "router": result.router_counts_LE.sum(1).tolist(),
        "same": all(torch.equal(a, b) for a, b in zip(after, before)),
        "agreement": result.rollout.agreement,
        "gap": result.rollout.gap_mean,
    }


def test_rollouts_are_followed_planned_ahead_and_change_no_gradient() -> None:
    for found in run_ranks(on_rank, 2, deadline_s=150, env={"EQUIPOISE_ACCELERATOR": "cpu"}):
        for name in ("off", "ahead", "one rank does not know"):
            rollout, copies, loss = found[name]
            assert rollout.agreement == 1.0
            assert rollout.gap_max <= 1e-5
            assert 0 <= rollout.kl <= 1e-9
            assert loss > 0
            assert name == "off" or copies > 0
        assert found["calls"] == {"off": [], "ahead": [2, 2], "one rank does not know": []}
        assert found["differing"] == {}
        assert found["router"] > 0
        bias = found["bias"]
        assert bias["followed"] == [[16, 16, 16, 0, 0, 0, 0, 0]] * 2
        assert bias["router"] == [48, 48]
        assert bias["same"]
        assert 0 < bias["agreement"] < 1
        assert bias["gap"] is None

"""Cases of cases.md that need a whole training step on several ranks: scales, idle experts, shards, statistics."""

import gc
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distributed.parity import relative, toy_model
from distributed.rig import Outcomes, Rig, Scenario, differing, initial_weights, random_batch, run_scenarios
from equipoise.balance_config import BalanceConfig
from equipoise.checkpoint.training import TrainingState, load_checkpoint, save_checkpoint
from equipoise.distributed.gradients import clip_gradients, global_grad_norm
from equipoise.distributed.mesh import Meshes, ParallelConfig
from equipoise.distributed.world import World
from equipoise.models.config import ModelConfig
from equipoise.train.load_statistics import load_metrics
from equipoise.train.optimizer import OptimizerConfig
from equipoise.train.step import moe_layers, run_model

DISPATCHERS = ["all_to_all", "all_gather"]


# --- Four ranks


def auxiliary_gradient(world: World, meshes: Meshes) -> dict[str, Any]:
    """C07, symptom 5: the router's gradient of the balance and z-loss, by how the same tokens are spread.

    The output projection is 0, so the main loss passes nothing on. Returns, by scope of the balance loss, the norm
    of the gradient and what differs from one process that makes one microbatch.
    """
    found: dict[str, Any] = {}
    same = random_batch(1, num_sequences=2, length=6)
    for scope in ("micro_batch", "global_batch"):
        config = toy_model(
            num_experts_per_tok=2, router_aux_loss_coef=0.01, router_z_loss_coef=0.01, router_aux_loss_scope=scope
        )

        def gates(meshes: Meshes | None, batches: list, num_tokens: int, config=config) -> dict[str, torch.Tensor]:
            rig = Rig(config, world, meshes)
            with torch.no_grad():
                rig.model.lm_head.weight.zero_()
            gradients = rig.gradients(batches, num_tokens)
            return {name: g for name, g in gradients.items() if name.endswith("gate.weight")}

        tokens = same.num_valid_tokens
        reference = gates(None, [same], tokens)
        found[f"{scope}: norms"] = [float(g.norm()) for g in reference.values()]
        found[f"{scope}: accumulate 4"] = differing(gates(None, [same] * 4, 4 * tokens), reference)
        found[f"{scope}: four ranks"] = differing(gates(meshes, [same], 4 * tokens), reference)
        found[f"{scope}: four ranks, accumulate 4"] = differing(gates(meshes, [same] * 4, 16 * tokens), reference)
        if scope == "global_batch":  # then it does not matter either that the ranks' tokens differ
            everything = random_batch(2, num_sequences=8, length=6)
            parts = [random_batch(2, 8, 6) for _ in range(4)]
            mine = parts[world.rank]
            rows = slice(2 * world.rank, 2 * world.rank + 2)
            mine = type(mine)(mine.input_ids[rows], mine.labels[rows], None, None, 12, 12)
            found["global_batch: other tokens on each rank"] = differing(
                gates(meshes, [mine], 48), gates(None, [everything], 48)
            )
    return found


def clipping(world: World, meshes: Meshes) -> dict[str, float]:
    """C23, symptom 7: 16 dense and 16 expert elements, and a whole model; every gradient is 1."""
    replicas = [Replicate()] if meshes.sizes.replicate > 1 else []
    dense = distribute_tensor(torch.zeros(16), meshes.dense, [*replicas, Shard(0)])
    experts = distribute_tensor(torch.zeros(4, 2, 2), meshes.experts, [*replicas, Shard(0), Shard(0)])
    parameters = [nn.Parameter(dense), nn.Parameter(experts)]
    for p in parameters:
        p.grad = torch.ones_like(p)
    norm = global_grad_norm(parameters, meshes.shard_group)
    clip_gradients(parameters, norm, 1.0)
    clipped = torch.cat([p.grad.full_tensor().flatten() for p in parameters if p.grad is not None])

    rig = Rig(toy_model(num_experts=6), world, meshes, optimizer=OptimizerConfig(max_grad_norm=1.0))
    batch = random_batch(3, 1, 5)
    sums, counts = rig.runner.forward_backward([batch], world.size * batch.num_valid_tokens)
    for p in rig.runner.parameters:
        p.grad.to_local().fill_(1.0)
    result, norm_of_model = rig.runner.reduce(sums, counts, world.size * batch.num_valid_tokens, stop=False)
    return {
        "norm": float(norm),
        "clipped": clipped.tolist(),
        "logged": result.grad_norm,
        "of the model": float(norm_of_model),
        "elements": sum(p.numel() for p in rig.runner.parameters),
    }


def save_and_load(world: World, meshes: Meshes, num_experts: int, **sizes: int) -> dict[str, Any]:
    """C24: three steps; what differs from one process, and from itself with a save and a load after the second.

    Also the shapes of the expert shards that this rank holds.
    """
    config = toy_model(num_experts=num_experts, num_experts_per_tok=2, **sizes)
    adamw = OptimizerConfig(lr=1e-3)  # Adam makes of a rounding error near 0 a step of this size
    plain, rig = Rig(config, world, None, optimizer=adamw), Rig(config, world, meshes, optimizer=adamw)
    resumed = Rig(config, world, meshes, seed=99, optimizer=adamw)
    with tempfile.TemporaryDirectory() as name:
        folder = [name]
        dist.broadcast_object_list(folder)
        for step in range(3):
            batches = [random_batch(100 * step + rank, 1, 7) for rank in range(world.size)]
            tokens = sum(b.num_valid_tokens for b in batches)
            if step == 2:
                path = save_checkpoint(Path(folder[0]), TrainingState(rig.model, rig.optimizer, step=2), world)
                load_checkpoint(path, TrainingState(resumed.model, resumed.optimizer), world)
                dist.barrier()
                resumed.step([batches[world.rank]], tokens)
            plain.step(batches, tokens)
            rig.step([batches[world.rank]], tokens)
    layer = moe_layers(rig.model)[0]
    return {
        "against one process": differing(rig.parameters(), plain.parameters()),
        "after a load": differing(resumed.parameters(), rig.parameters(), 0.0),
        "shapes": {name: list(p.to_local().shape) for name, p in layer.experts.named_parameters()},
    }


def uneven_shards(world: World, meshes: Meshes) -> dict[str, Any]:
    """C24: 6 experts, EP 2, inner shard 2: [2, 1]. With a multi-token-prediction layer."""
    return save_and_load(world, meshes, 6, num_nextn_predict_layers=1)


def empty_shards(world: World, meshes: Meshes) -> dict[str, Any]:
    """C24: 4 experts, EP 2, inner shard 4: [1, 1, 0, 0], as neither width divides by 4."""
    return save_and_load(world, meshes, 4, hidden_size=30, moe_intermediate_size=25)


def shards_by_feature(world: World, meshes: Meshes) -> dict[str, Any]:
    """C24: the same where the widths divide, so that every rank holds a part of each expert."""
    return save_and_load(world, meshes, 4)


def padding_is_no_load(world: World, meshes: Meshes) -> dict[str, Any]:
    """C26, symptom 9: 7 real tokens padded to 8; a warm-up forward and an evaluation before, and in between."""
    config = toy_model(num_experts=4, num_experts_per_tok=2, selection_bias=True, mlp_only_layers=())
    rig = Rig(config, world, meshes)
    batch = random_batch(10 + world.rank, 1, 8, num_padding=1)
    found: dict[str, Any] = {"own": [], "all": []}
    with torch.no_grad():
        run_model(rig.model, batch, world.device)
    for _ in range(2):
        sums, counts_NLE = rig.runner.forward_backward([batch], 28)
        result, norm = rig.runner.reduce(sums, counts_NLE, 28, stop=False)
        rig.runner.update(result, norm, 0.0)
        found["own"].append(counts_NLE[0].sum(-1).tolist())
        found["all"].append(result.counts_LE.sum(-1).tolist())
        before = [layer.gate.e_score_correction_bias.clone() for layer in moe_layers(rig.model)]
        with torch.no_grad():
            run_model(rig.model, batch, world.device)
        after = [layer.gate.e_score_correction_bias for layer in moe_layers(rig.model)]
        found["bias moved by evaluation"] = not all(map(torch.equal, before, after))
    return found


def padding_is_not_planned(world: World, meshes: Meshes) -> dict[str, Any]:
    """C26 for the balancer: loads that plans were made for, and records that steps counted, of the same passes."""
    config = toy_model(num_experts=4, num_experts_per_tok=2, mlp_only_layers=())
    rig = Rig(config, world, meshes, balance=BalanceConfig(tolerance=0.0))
    balancer = rig.runner.balancer
    assert balancer is not None
    batch = random_batch(10 + world.rank, 1, 8, num_padding=1)
    found: dict[str, Any] = {"own": set(), "group": set(), "records": []}
    route, take_records = balancer.route, balancer.take_records

    def note_plan(*args: Any) -> Any:
        step = route(*args)
        found["own"].add(int(step.plan.send.sum()))
        found["group"].add(int(step.plan.quota.sum()))
        return step

    def note_records() -> list[Any]:
        records = take_records()
        found["records"].append(len(records))
        return records

    balancer.route, balancer.take_records = note_plan, note_records  # type: ignore[method-assign]
    for _ in range(2):
        with torch.no_grad():  # a warm-up, then an evaluation
            run_model(rig.model, batch, world.device)
        rig.step([batch], 28)
    return found


FOUR: list[Scenario] = [auxiliary_gradient, clipping, uneven_shards, padding_is_no_load, padding_is_not_planned]


@pytest.fixture(scope="module")
def four() -> Outcomes:
    return Outcomes(run_scenarios, 4, FOUR, ParallelConfig(ep_size=2), 6)


def test_the_auxiliary_gradient_depends_neither_on_ranks_nor_on_accumulation(four: Outcomes) -> None:
    for found in four.of(auxiliary_gradient):
        for what, value in found.items():
            if what.endswith("norms"):
                assert min(value) > 1e-6, what
            else:
                assert value == {}, what


def check_clipping(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["norm"] == pytest.approx(math.sqrt(32), rel=1e-6)
        assert rank["clipped"] == pytest.approx([1 / math.sqrt(32)] * 32, rel=1e-6)
        assert rank["logged"] == pytest.approx(math.sqrt(rank["elements"]), rel=1e-6)
        assert rank["of the model"] == pytest.approx(rank["logged"], rel=1e-6)


def test_the_gradient_norm_counts_every_element_once(four: Outcomes) -> None:
    check_clipping(four.of(clipping))


def test_the_gradient_norm_counts_replicas_once() -> None:
    hybrid = ParallelConfig(ep_size=2, replicate_size=2)
    check_clipping(Outcomes(run_scenarios, 4, [clipping], hybrid, 4).of(clipping))


def check_saved(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["against one process"] == {}
        assert rank["after a load"] == {}


def test_experts_that_do_not_divide_over_the_inner_axis_train_save_and_load(four: Outcomes) -> None:
    found = four.of(uneven_shards)
    assert [rank["shapes"]["gate_up_proj"][0] for rank in found] == [2, 2, 1, 1]
    check_saved(found)


@pytest.mark.slow
def test_ranks_without_any_expert_rows_train_save_and_load() -> None:
    eight = Outcomes(run_scenarios, 8, [empty_shards, shards_by_feature], ParallelConfig(ep_size=2), 4)
    found = eight.of(empty_shards)
    assert [rank["shapes"]["gate_up_proj"][0] for rank in found] == [1, 1, 1, 1, 0, 0, 0, 0]
    check_saved(found)
    found = eight.of(shards_by_feature)
    assert [rank["shapes"]["gate_up_proj"][:2] for rank in found] == [[2, 12]] * 8
    check_saved(found)


def test_padding_warm_up_and_evaluation_add_no_load(four: Outcomes) -> None:
    for found in four.of(padding_is_no_load):
        assert found["own"] == [[14, 14, 14]] * 2
        assert found["all"] == [[56, 56, 56]] * 2
        assert not found["bias moved by evaluation"]


def test_the_balancer_plans_for_real_tokens_of_its_own_group_once(four: Outcomes) -> None:
    """Two EP groups of two ranks: 14 of each rank, 28 of a group, however many groups compute the same."""
    for found in four.of(padding_is_not_planned):
        assert found["own"] == {14}
        assert found["group"] == {28}
        assert found["records"] == [3, 3, 3, 3], "before a step those of the evaluation are dropped"


# --- Two ranks


def idle_experts(world: World, meshes: Meshes) -> dict[str, Any]:
    """C13, symptoms 1 and 3: every token to expert 0, two steps of AdamW with weight decay."""
    config = toy_model(
        num_experts=4, num_experts_per_tok=1, selection_bias=True, bias_update_speed=0.0, mlp_only_layers=()
    )
    adamw = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=0.0)
    started = time.monotonic()
    found: dict[str, Any] = {}
    plain = Rig(config, world, None, optimizer=adamw)
    plain.send_everything_to_expert_0()
    batches = [random_batch(rank, 1, 5) for rank in range(world.size)]
    for _ in range(2):
        plain.step(batches, 10)
    for dispatcher in DISPATCHERS:
        rig = Rig(config, world, meshes, optimizer=adamw, dispatcher=dispatcher)
        rig.send_everything_to_expert_0()
        start = rig.parameters()
        gradients = rig.gradients([batches[world.rank]], 10)
        for _ in range(2):
            rig.step([batches[world.rank]], 10)
        end = rig.parameters()
        experts = [name for name in end if "mlp.experts" in name]
        found[dispatcher] = {
            "expert gradients": [[float(g.norm()) for g in gradients[name]] for name in experts],
            "steps": {float(rig.optimizer.state[p]["step"]) for p in rig.runner.parameters},
            "decay": [relative(end[n][1:], start[n][1:] * (1 - 1e-2 * 0.1) ** 2) for n in experts],
            "differing": differing(end, plain.parameters()),
        }
    found["seconds"] = time.monotonic() - started
    return found


def accumulation(world: World, meshes: Meshes) -> dict[str, dict]:
    """C22: four microbatches with the same gradient, where the inner group is one rank. What is not four times it."""
    found = {}
    for dispatcher in DISPATCHERS:
        rig = Rig(toy_model(), world, meshes, dispatcher=dispatcher)
        batch = random_batch(world.rank, 1, 6)
        once = rig.gradients([batch], 12)
        found[dispatcher] = differing(rig.gradients([batch] * 4, 12), {n: 4 * g for n, g in once.items()}, 1e-6)
    return found


def every_gradient(world: World, meshes: Meshes) -> dict[str, Any]:
    """C19, symptoms 3, 4, 6 and 12: a model like OLMoE; what differs from one process."""
    config = ModelConfig(
        vocab_size=61,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.0,
        initializer_range=0.2,
    )
    batches = [random_batch(rank, 2, 6) for rank in range(world.size)]
    want = Rig(config, world, None).gradients(batches, 24)
    found: dict[str, Any] = {"router": [float(g.norm()) for name, g in want.items() if "gate.weight" in name]}
    for dispatcher in DISPATCHERS:
        rig = Rig(config, world, meshes, dispatcher=dispatcher)
        found[dispatcher] = differing(rig.gradients([batches[world.rank]], 24), want)
    return found


def counts_under_recompute(world: World, meshes: Meshes) -> dict[str, list[int]]:
    """Symptom 9: the tokens that one step counts, by kind of recompute."""
    found = {}
    for recompute in ("none", "full", "selective"):
        rig = Rig(toy_model(), world, meshes, recompute=recompute)
        result = rig.step([random_batch(world.rank, 1, 6)] * 2, 24)
        assert result is not None
        found[recompute] = result.counts_LE.sum(-1).tolist()
    return found


def bias_on_some_layers(world: World, meshes: Meshes) -> list[list[float] | None]:
    """Symptom 8: the first MoE layer has no selection bias; the others' after one step."""
    config = toy_model(mlp_only_layers=(), num_experts_per_tok=1, selection_bias=True)
    rig = Rig(config, world, meshes)
    rig.runner.layers[0].gate.e_score_correction_bias = None
    for layer in rig.runner.layers[1:]:
        layer.gate.e_score_correction_bias[3] = 100.0  # everything to expert 3
    rig.step([random_batch(world.rank, 1, 6)], 12)
    biases = [layer.gate.e_score_correction_bias for layer in rig.runner.layers]
    return [None if b is None else b.tolist() for b in biases]


def no_moe_layer(world: World, meshes: Meshes) -> dict[str, Any]:
    """Symptom 8: a model whose layers are all dense trains as in one process, and has no load to report."""
    config = toy_model(mlp_only_layers=(0, 1, 2), selection_bias=True, router_aux_loss_coef=0.01)
    batches = [random_batch(rank, 1, 6) for rank in range(world.size)]
    plain, rig = Rig(config, world, None), Rig(config, world, meshes)
    plain.step(batches, 12)
    result = rig.step([batches[world.rank]], 12)
    assert result is not None
    return {
        "differing": differing(rig.parameters(), plain.parameters()),
        "metrics": load_metrics(result.counts_LE, result.rank_imbalance_L, result.rank_imbalance_max),
    }


def live_tensors(world: World, meshes: Meshes) -> dict[str, list[int]]:
    """Symptom 17: the tensors that are alive after each of eight steps, an evaluation in each."""
    found: dict[str, list[int]] = {}
    for recompute in ("none", "full"):
        rig = Rig(toy_model(selection_bias=True), world, meshes, recompute=recompute)
        found[recompute] = []
        for step in range(8):
            rig.step([random_batch(step, 1, 6)] * 2, 24)
            with torch.no_grad():
                run_model(rig.model, random_batch(step, 1, 6), world.device)
            gc.collect()
            found[recompute].append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    return found


TWO: list[Scenario] = [
    initial_weights,
    idle_experts,
    accumulation,
    every_gradient,
    counts_under_recompute,
    bias_on_some_layers,
    no_moe_layer,
    live_tensors,
]


@pytest.fixture(scope="module")
def two() -> Outcomes:
    return Outcomes(run_scenarios, 2, TWO, ParallelConfig(ep_size=2), 8)


def test_idle_experts_get_zero_gradients_and_decay_as_in_one_process(two: Outcomes) -> None:
    for found in two.of(idle_experts):
        assert found.pop("seconds") < 30
        for dispatcher, result in found.items():
            for hot, *idle in result["expert gradients"]:
                assert hot > 0, dispatcher
                assert idle == [0.0] * 3, dispatcher
            assert result["steps"] == {2.0}
            assert max(result["decay"]) < 1e-6
            assert result["differing"] == {}


def test_four_microbatches_give_four_times_the_gradient(two: Outcomes) -> None:
    assert two.of(accumulation) == [{"all_to_all": {}, "all_gather": {}}] * 2


def test_every_gradient_of_a_small_olmoe_equals_one_process(two: Outcomes) -> None:
    for found in two.of(every_gradient):
        assert min(found.pop("router")) > 0
        assert found == {"all_to_all": {}, "all_gather": {}}


def test_recompute_counts_no_token_twice(two: Outcomes) -> None:
    tokens = 2 * 2 * 6 * 3  # ranks x microbatches x tokens x experts per token
    for found in two.of(counts_under_recompute):
        assert found == {recompute: [tokens, tokens] for recompute in ("none", "full", "selective")}


def test_a_layer_without_bias_does_not_stop_the_others(two: Outcomes) -> None:
    for found in two.of(bias_on_some_layers):
        assert found[0] is None
        for bias in found[1:]:
            expected = [1e-3] * 8
            expected[3] = 100.0 - 1e-3
            assert bias == pytest.approx(expected)


def test_a_model_without_moe_layers_trains(two: Outcomes) -> None:
    assert two.of(no_moe_layer) == [{"differing": {}, "metrics": {}}] * 2


def test_no_step_leaves_tensors_behind(two: Outcomes) -> None:
    for found in two.of(live_tensors):
        for recompute, counts in found.items():
            # A leak of one tensor per step would raise even the least of the later counts above the earlier ones.
            assert min(counts[5:]) <= max(counts[1:4]), (recompute, counts)


def test_experts_start_different_and_the_same_at_every_ep_size(two: Outcomes) -> None:
    """EP 4: test_dispatch.py."""
    assert two.of(initial_weights) == [{"differing": {}, "equal": [], "experts": 8}] * 2

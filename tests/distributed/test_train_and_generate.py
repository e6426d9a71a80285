"""Training and generating by turns in the same processes: training goes on as if nothing had been between."""

from typing import Any

import pytest
import torch

from distributed.harness import run_ranks
from equipoise.accelerator import CPUAccelerator
from equipoise.distributed.mesh import ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.world import join_world
from equipoise.models.parallelize import build_parallel_model
from equipoise.serve.cycle import TrainAndGenerate
from equipoise.serve.engine import EngineConfig
from equipoise.train.optimizer import OptimizerConfig, build_optimizer
from unit.engine_rig import TOY, prompt, some_ids

CYCLES = 2
PHASES = ["offload optimizer", "park groups", "engine memory", "update weights", "generate"]
PHASES += ["release engine", "unpark groups", "reload optimizer"]


def on_rank(ep_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": [], "logprobs": [], "threads": []}
    with join_world(CPUAccelerator(), timeout_s=40) as world:
        meshes = build_meshes(derive_axes(ParallelConfig(ep_size=ep_size), world.size, TOY.num_experts), world)
        for with_engine in (False, True):
            model = build_parallel_model(TOY, meshes, world.device, seed=3)
            optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
            cycle = None
            if with_engine:
                config = EngineConfig(max_running_requests=2, context_length=32, chunked_prefill_size=8)
                options = {"holders": [meshes], "bucket_bytes": 4000}
                cycle = TrainAndGenerate(world, model, optimizer, TOY, config, torch.float32, **options)
            losses = []
            for number in range(CYCLES):
                ids = torch.tensor([some_ids(9, seed=2 * number + world.rank)])
                loss = model(ids[:, :-1], ids[:, 1:]).loss_sum
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if cycle is not None:
                    wanted = [prompt(some_ids(5 + world.rank + n), f"{n}", seed=number) for n in range(world.rank * 2)]
                    with cycle.generating(str(number)):
                        results = cycle.generate(wanted)
                        assert cycle.worker.engine.cache.num_bytes > 0
                    assert [r.version for r in results] == [str(number)] * len(wanted)
                    found["logprobs"] += compare(model, world, wanted, results)
            found["losses"].append(losses)
        found["phases"] = [record.name for record in cycle.records]
        found["copied"] = cycle._plan.tensors
    return found


@torch.no_grad()
def compare(model, world, prompts, results) -> list[float]:
    """Rank 1's answers against the trainer's; both ranks run the forward."""
    from equipoise.distributed.agree import gather_json

    mine = [[p.ids, r.output_ids, r.output_logprobs] for p, r in zip(prompts, results)]
    gaps = []
    for ids, output, logprobs in gather_json(mine, world)[1]:
        whole = torch.tensor([ids + output])
        log_probs = (model(whole).logits[0] / 0.7).log_softmax(-1)[:-1].gather(1, whole[0, 1:, None])[:, 0]
        gaps.append(float((log_probs[len(ids) - 1 :] - torch.tensor(logprobs)).abs().max()))
    return gaps


@pytest.mark.parametrize("ep_size", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_training_is_that_without_an_engine_and_the_engine_has_its_weights(ep_size: int) -> None:
    for found in run_ranks(on_rank, 2, ep_size, deadline_s=150):
        plain, with_engine = found["losses"]
        assert with_engine == plain
        assert len(found["logprobs"]) == 2 * CYCLES
        assert max(found["logprobs"]) <= 1e-5
        assert found["phases"] == PHASES * CYCLES
        assert found["copied"]  # a rank's own experts go straight
        assert all(".experts." in name for name in found["copied"])


def alone() -> dict[str, Any]:
    with join_world(CPUAccelerator(), timeout_s=40) as world:
        meshes = build_meshes(derive_axes(ParallelConfig(), 1, TOY.num_experts), world)
        model = build_parallel_model(TOY, meshes, world.device, seed=3)
        optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2))
        config = EngineConfig(max_running_requests=2, context_length=32, chunked_prefill_size=8)
        cycle = TrainAndGenerate(world, model, optimizer, TOY, config, torch.bfloat16, holders=[meshes])
        differing = []
        for number in range(2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.1)
            with cycle.generating(str(number)):
                engine = dict(cycle.worker.model.named_parameters())
                pairs = [(name, engine[name], p.bfloat16()) for name, p in model.named_parameters()]
                differing += [name for name, a, b in pairs if not torch.equal(a, b)]
                assert cycle.worker.engine.version == str(number)
        return {"differing": differing, "packed": cycle._plan.packed, "copied": len(cycle._plan.tensors)}


def test_one_process_copies_every_tensor_straight_and_casts_it() -> None:
    (found,) = run_ranks(alone, 1, deadline_s=100)
    assert found["differing"] == []
    assert found["packed"] == []
    assert found["copied"] > 20

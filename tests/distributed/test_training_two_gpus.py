"""Training steps on two GPUs: balanced as not, over NCCL as over symmetric memory, and no wait for the device."""

import traceback
from dataclasses import replace
from typing import Any

import pytest
import torch

from distributed.harness import run_ranks
from distributed.parity import (
    Case,
    build_case_meshes,
    differences,
    make_batch,
    toy_model,
    train_in_parallel,
    train_plainly,
)
from equipoise.accelerator import get_accelerator
from equipoise.balance_config import BalanceConfig
from equipoise.distributed.world import join_world
from equipoise.models.parallelize import build_parallel_model
from equipoise.train.optimizer import OptimizerConfig, build_optimizer
from equipoise.train.step import TrainStep
from equipoise.train.timing import PhaseTimer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
FORMS = {"symmetric": "symmetric", "all_to_all": "collective"}
"""Dispatcher and transport."""
VARIANTS: dict[str, dict[str, Any]] = {
    "one microbatch": {"accumulate": 1},
    "two microbatches": {"accumulate": 2},
    "recompute": {"recompute": "full"},
    "recompute of experts": {"recompute": "selective"},
}
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def make_case(dispatcher: str, dtype: torch.dtype, slots: int, **changes: Any) -> Case:
    """A hot rank, whose experts are copied to the other one."""
    model = toy_model(selection_bias=True, bias_update_speed=0.0, num_experts_per_tok=3, num_experts=8)
    config = BalanceConfig(
        num_redundant_experts_per_rank=slots,
        tolerance=0.0,
        transport=FORMS[dispatcher],  # type: ignore[arg-type]
    )
    values = {"model": model, "ep": 2, "dispatcher": dispatcher, "selection_bias": 2.0, "hot_experts": 4}
    values |= {"lengths": (12,)}  # the symmetric dispatcher's buffers are made for the first
    return Case(**values, compute_dtype=dtype, balance=config if slots else None, **changes)  # type: ignore[arg-type]


def compare_on_and_off() -> dict[str, Any]:
    """For each form, dtype and variant: the largest difference of on from off, and of on from one CPU in FP32."""
    found: dict[str, Any] = {}
    with join_world(get_accelerator(), timeout_s=60) as world:
        meshes = build_case_meshes(make_case("symmetric", torch.float32, 2), world)
        for dtype in LIMITS:
            for dispatcher in FORMS:
                for name, changes in VARIANTS.items():
                    key = f"{dispatcher}, {dtype}, {name}"
                    try:
                        on = make_case(dispatcher, dtype, 2, **changes)
                        trained = train_in_parallel(on, world, meshes=meshes)
                        plain = train_in_parallel(replace(on, balance=None), world, meshes=meshes)
                        from_off = max(differences(trained, plain).values())
                        found[key] = {"from_off": from_off, "copies": trained.copies}
                        if dtype == torch.float32:
                            reference = train_plainly(on, 2)
                            found[key]["from_cpu"] = max(differences(trained, reference).values())
                    except Exception:
                        return found | {key: traceback.format_exc()}
                    print(key, found[key], flush=True)
    return found


def test_on_is_off_on_gpus_and_is_plain_training_on_a_cpu() -> None:
    for found in run_ranks(compare_on_and_off, 2, deadline_s=240):
        assert len(found) == len(LIMITS) * len(FORMS) * len(VARIANTS), found
        for name, values in found.items():
            assert values["copies"] > 0, name
            limit = LIMITS[torch.float32 if "float32" in name else torch.bfloat16]
            assert values["from_off"] < limit, found
            assert values.get("from_cpu", 0.0) < 1e-4, found


def run_steps_without_waiting() -> bool:
    """A whole forward and backward, two microbatches, with synchronization forbidden; it is seen to be noticed."""
    case = make_case("symmetric", torch.bfloat16, 2, recompute="selective")
    model = case.model.model_copy(update={"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64})
    with join_world(get_accelerator(), timeout_s=60) as world:
        case = replace(case, model=model)
        meshes = build_case_meshes(case, world)
        parallel = build_parallel_model(
            model,
            meshes,
            world.device,
            1,
            compute_dtype=case.compute_dtype,
            dispatcher=case.dispatcher,
            recompute=case.recompute,
            balance=case.balance,
            timeout_s=30,
        )
        timer = PhaseTimer(world.accelerator)
        runner = TrainStep(parallel, build_optimizer(parallel, OptimizerConfig()), meshes, world.device, timer, 1.0)
        batches = [make_batch(2 * world.rank + i, 96) for i in range(2)]
        tokens = 2 * sum(batch.num_valid_tokens for batch in batches)
        for step in range(4):
            timer.start_step()
            if step >= 2:  # kernels are compiled, buffers are allocated
                torch.cuda.set_sync_debug_mode("error")
            try:
                sums, counts = runner.forward_backward(batches, tokens)
                if step == 3:
                    with pytest.raises(RuntimeError, match="synchronizing"):
                        sums["loss"].item()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            result, norm = runner.reduce(sums, counts, tokens, stop=False)
            runner.update(result, norm, 1e-4)
        return True


def test_forward_and_backward_of_a_step_never_wait_for_the_device() -> None:
    assert run_ranks(run_steps_without_waiting, 2, deadline_s=150) == [True, True]

"""The end of a training step: an update that is enqueued before the host knows whether it may be made."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch

from distributed.parity import toy_model
from distributed.rig import random_batch
from equipoise.accelerator import CPUAccelerator
from equipoise.distributed.mesh import Meshes, ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.world import World, join_world
from equipoise.kernels.triton_support import triton_problem
from equipoise.models.parallelize import build_parallel_model
from equipoise.train import step as step_module
from equipoise.train.optimizer import OptimizerConfig, build_optimizer
from equipoise.train.step import StepResult, TrainStep, moe_layers
from equipoise.train.timing import PhaseTimer, StepTimes
from unit.test_host_syncs import HostReads

ON_DEVICE, ON_HOST = "device", "host"
LR, LOW_NORM, HIGH_NORM = 1e-2, 0.5, 1e6
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CONFIG = toy_model(selection_bias=True, num_hidden_layers=2)


class Place(NamedTuple):
    world: World
    meshes: Meshes


def plain_adamw(weight, grad, first, second, copy, corrections_2, scale, *, lr, betas, eps, weight_decay) -> None:
    """What the kernel does; tests/unit/test_master_adamw.py has the kernel itself."""
    if scale is not None and bool(scale.isnan()):
        return
    grad = grad.float() * (1.0 if scale is None else scale)
    first.lerp_(grad, 1 - betas[0])
    second.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    weight.mul_(1 - lr * weight_decay).sub_(lr / corrections_2[0] * first / (second.sqrt() / corrections_2[1] + eps))
    if copy is not None:
        copy.copy_(weight)


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    if find_spec("triton"):
        monkeypatch.setattr("equipoise.kernels.adamw_triton.adamw", plain_adamw)  # Triton's interpreter is slow
    with join_world(CPUAccelerator(), timeout_s=30) as world:
        yield Place(world, build_meshes(derive_axes(ParallelConfig(), 1, CONFIG.num_experts), world))


def make(place: Place, decided: str, max_grad_norm: float = LOW_NORM) -> TrainStep:
    """A step whose optimizer leaves updates out by itself (`ON_DEVICE`), or torch's."""
    world, meshes = place
    dtype = torch.float16 if decided == ON_DEVICE else torch.float32  # Triton's interpreter has no BF16
    model = build_parallel_model(CONFIG, meshes, world.device, 3, compute_dtype=dtype, reshard_after_forward=False)
    optimizer = build_optimizer(model, OptimizerConfig(lr=LR))
    if decided == ON_DEVICE:
        pytest.importorskip("triton")
        from equipoise.train.master_adamw import MasterAdamW

        assert model.copies is not None
        optimizer = MasterAdamW(optimizer.param_groups, model.copies, lr=LR)
    timer = PhaseTimer(world.accelerator)
    timer.start_step()
    return TrainStep(model, optimizer, meshes, world.device, timer, max_grad_norm)


def backward(runner: TrainStep, number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, int]:
    batch = random_batch(number, 2, 6)
    return *runner.forward_backward([batch], batch.num_valid_tokens), batch.num_valid_tokens


def state(runner: TrainStep) -> dict[str, torch.Tensor]:
    """Weights, selection biases, and what the optimizer keeps."""
    found = {name: value.detach().clone() for name, value in runner.model.state_dict().items()}
    for name, parameter in runner.model.named_parameters():
        found |= {f"{slot} of {name}": value.clone() for slot, value in runner.optimizer.state[parameter].items()}
    return found


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


def plain(result: StepResult) -> dict[str, Any]:
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


@pytest.mark.parametrize("max_grad_norm", [LOW_NORM, HIGH_NORM, 0.0])
@pytest.mark.parametrize("decided", [ON_DEVICE, ON_HOST])
def test_finish_is_reduce_and_update(place: Place, decided: str, max_grad_norm: float) -> None:
    """The same bits, with and without clipping."""
    one, two = (make(place, decided, max_grad_norm) for _ in range(2))
    before = state(one)
    for number in range(3):
        finished = one.finish(*backward(one, number), LR, stop=number == 1, saving=number)
        result, norm = two.reduce(*backward(two, number), stop=number == 1, saving=number)
        two.update(result, norm, LR)
        assert plain(finished) == plain(result)
        assert finished.is_finite
        assert (finished.stop_requested, finished.saving) == (number == 1, number)
        if max_grad_norm:
            assert (finished.grad_norm > max_grad_norm) == (max_grad_norm == LOW_NORM)
        assert finished.counts_LE.sum().item() == 12 * CONFIG.num_experts_per_tok * len(moe_layers(one.model))
    assert_equal(state(one), state(two))
    bias = "model.layers.0.mlp.gate.e_score_correction_bias"
    assert not torch.equal(state(one)[bias], before[bias])


@pytest.mark.parametrize("bad", ["loss", "gradient"])
@pytest.mark.parametrize("decided", [ON_DEVICE, ON_HOST])
def test_what_is_not_finite_changes_nothing(place: Place, decided: str, bad: str) -> None:
    runner = make(place, decided)
    runner.finish(*backward(runner, 0), LR)
    before = state(runner)
    sums, counts_NLE, num_tokens = backward(runner, 1)
    if bad == "loss":
        sums["loss"] = sums["loss"] * torch.nan
    else:
        gradient = runner.parameters[2].grad
        assert gradient is not None
        gradient.view(-1)[1] = torch.inf
    result = runner.finish(sums, counts_NLE, num_tokens, LR)
    assert not result.is_finite
    assert_equal(state(runner), before)
    assert all(parameter.grad is None for parameter in runner.parameters)
    again = runner.finish(*backward(runner, 2), LR)
    assert again.is_finite
    assert not torch.equal(state(runner)["lm_head.weight"], before["lm_head.weight"])


def test_the_update_is_enqueued_before_the_host_reads(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the device has work while the host looks at the results and begins the next step."""
    runner = make(place, ON_DEVICE)
    parts = backward(runner, 0)
    before, read = state(runner), step_module._Reduced.result
    seen: list[Any] = []

    def result(reduced: Any, values: torch.Tensor) -> StepResult:
        seen.extend(reads.names)
        seen.append(not torch.equal(state(runner)["lm_head.weight"], before["lm_head.weight"]))
        return read(reduced, values)

    monkeypatch.setattr(step_module._Reduced, "result", result)
    monkeypatch.setattr("equipoise.kernels.adamw_triton.adamw", lambda weight, *rest, **options: weight.add_(1.0))
    with HostReads() as reads:
        runner.finish(*parts, LR)
    assert seen == [True]


@contextmanager
def on_gpu() -> Iterator[TrainStep]:
    """A step on the GPU, in BF16, as the trainer builds it."""
    from equipoise.accelerator import get_accelerator

    config = CONFIG.model_copy(update={"hidden_size": 64, "moe_intermediate_size": 64})
    with join_world(get_accelerator(), timeout_s=60) as world:
        assert triton_problem(world.device.type) is None
        meshes = build_meshes(derive_axes(ParallelConfig(), 1, config.num_experts), world)
        model = build_parallel_model(
            config, meshes, world.device, 3, compute_dtype=torch.bfloat16, reshard_after_forward=False
        )
        timer = PhaseTimer(world.accelerator)
        optimizer = build_optimizer(model, OptimizerConfig(lr=LR))
        yield TrainStep(model, optimizer, meshes, world.device, timer, LOW_NORM)


@pytest.mark.gpu
@needs_gpu
def test_a_whole_step_waits_for_its_results_alone() -> None:
    """CUDA itself refuses every other wait. Steps follow each other as in training, the batch comes from the host."""
    losses: list[float] = []
    times: list[StepTimes] = []
    with on_gpu() as runner:
        for number in range(6):
            if number == 3:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                runner.timer.start_step()
                losses.append(runner.finish(*backward(runner, 0), LR).loss)
                times.append(runner.timer.end_step())
            finally:
                if number == 5:
                    torch.cuda.set_sync_debug_mode("default")
    assert losses[-1] < losses[0], "the same batch again and again is learnt"
    assert all(t.seconds()["time_step_s"] > 0 for t in times)


@pytest.mark.gpu
@needs_gpu
def test_each_step_sees_its_own_batch() -> None:
    """Though the device is busy while the next steps' batches go through pinned memory. A rate of 0 keeps the weights
    as they are, so that each batch's loss can be computed again."""
    with on_gpu() as runner:
        batches = [random_batch(number, 2, 6) for number in range(8)]
        runner.timer.start_step()
        runner.finish(*backward(runner, 0), 0.0)
        waiting = []
        for batch in batches:
            torch.cuda._sleep(50_000_000)
            sums, counts_NLE = runner.forward_backward([batch], batch.num_valid_tokens)
            waiting.append((sums, counts_NLE))
            runner.optimizer.zero_grad()
        got = [(float(sums["loss"]), counts_NLE[0].tolist()) for sums, counts_NLE in waiting]
        want = []
        for batch in batches:
            sums, counts_NLE = runner.forward_backward([batch], batch.num_valid_tokens)
            torch.cuda.synchronize()
            want.append((float(sums["loss"]), counts_NLE[0].tolist()))
    assert got == want
    assert len({loss for loss, _ in want}) == len(want)

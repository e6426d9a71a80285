"""Microbatches as graphs. On the CPU a stand-in replays a graph by doing its work again, on the same tensors; a GPU
captures."""

import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from distributed.parity import toy_model
from distributed.rig import random_batch
from equipoise.accelerator import Accelerator, CPUAccelerator, get_accelerator
from equipoise.accelerator.base import Capability
from equipoise.data import Batch
from equipoise.distributed.mesh import Meshes, ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.world import World, join_world
from equipoise.errors import ConfigError
from equipoise.models.model import ModelOutput
from equipoise.models.parallelize import build_parallel_model
from equipoise.train import step as step_module
from equipoise.train.config import TrainConfig
from equipoise.train.graph import WARM_UP, graph_problem, setting_problem
from equipoise.train.optimizer import OptimizerConfig, build_optimizer
from equipoise.train.step import StepResult, TrainStep
from equipoise.train.timing import PhaseTimer

LR = 1e-2
CONFIG = toy_model(selection_bias=True, num_hidden_layers=2, hidden_size=64, moe_intermediate_size=64)


class Replaying(CPUAccelerator):
    """Graphs on a CPU. `refuses`: as for work that needs the host."""

    def __init__(self, refuses: bool = False) -> None:
        super().__init__()
        self.captured, self.replayed, self.refuses = 0, 0, refuses
        self.losses: list[weakref.ref] = []

    def _supports(self, capability: str) -> Capability:
        return Capability(True, "a stand-in") if capability == "graphs" else super()._supports(capability)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        assert [loss for loss in self.losses if loss() is not None] == [], "gradients would go to these losses' stream"
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


@pytest.fixture
def place() -> Iterator[tuple[World, Meshes]]:
    with join_world(CPUAccelerator(), timeout_s=30) as world:
        yield world, build_meshes(derive_axes(ParallelConfig(), 1, CONFIG.num_experts), world)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """Of all microbatches that were launched."""
    found: list[weakref.ref] = []
    itself = step_module.run_model

    def run_model(*arguments: Any) -> ModelOutput:
        output = itself(*arguments)
        found.append(weakref.ref(output.loss_sum))
        return output

    monkeypatch.setattr(step_module, "run_model", run_model)
    return found


def make(place: tuple[World, Meshes], accelerator: Accelerator | None, dtype: torch.dtype = torch.float32) -> TrainStep:
    world, meshes = place
    model = build_parallel_model(CONFIG, meshes, world.device, 3, compute_dtype=dtype, reshard_after_forward=False)
    timer = PhaseTimer(accelerator or world.accelerator)
    optimizer = build_optimizer(model, OptimizerConfig(lr=LR))
    return TrainStep(model, optimizer, meshes, world.device, timer, 0.5, captures=accelerator is not None)


def packed(batch: Batch) -> Batch:
    """The same tokens as two documents a sequence, with padding behind."""
    documents = torch.tensor([0, 0, 1, 1, 1, -1]).expand(2, 6).to(torch.int32)
    positions = torch.tensor([0, 1, 0, 1, 2, 0]).expand(2, 6)
    labels = batch.labels.masked_fill(documents < 0, -100)
    return dataclasses.replace(
        batch, labels=labels, document_ids=documents, position_ids=positions, num_valid_tokens=int((labels >= 0).sum())
    )


def train(runner: TrainStep, steps: list[list[Batch]]) -> list[StepResult]:
    results = []
    for batches in steps:
        runner.timer.start_step()
        num_tokens = sum(batch.num_valid_tokens for batch in batches)
        results.append(runner.finish(*runner.forward_backward(batches, num_tokens), num_tokens, LR))
        runner.timer.end_step()
    return results


def batches(steps: int, each: int) -> list[list[Batch]]:
    return [[random_batch(each * step + i, 2, 6) for i in range(each)] for step in range(steps)]


def assert_same(one: TrainStep, two: TrainStep) -> None:
    for (name, value), other in zip(one.model.state_dict().items(), two.model.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("each", [1, 2, 3])
def test_replays_train_as_launches_do(
    place: tuple[World, Meshes], dtype: torch.dtype, each: int, losses: list[weakref.ref]
) -> None:
    """With and without copies of weights, one microbatch and several; some of them cannot be captured."""
    accelerator = Replaying()
    accelerator.losses = losses
    plain, captured = make(place, None, dtype), make(place, accelerator, dtype)
    steps = batches(7, each)
    steps[4][0] = packed(steps[4][0])
    steps[5][-1] = random_batch(99, 2, 5)  # shorter
    for want, got in zip(train(plain, steps), train(captured, steps), strict=True):
        assert got.loss == want.loss
        assert got.aux_loss == want.aux_loss
        assert got.grad_norm == want.grad_norm
        assert torch.equal(got.counts_LE, want.counts_LE)
    assert_same(plain, captured)
    assert (accelerator.captured, accelerator.replayed) == (1, 7 * each - 2 - WARM_UP)


def test_a_step_that_is_refused_leaves_nothing_behind(place: tuple[World, Meshes]) -> None:
    plain, captured = make(place, None), make(place, Replaying())
    for runner in (plain, captured):
        train(runner, batches(5, 1))
        before = {name: value.clone() for name, value in runner.model.state_dict().items()}
        batch = random_batch(50, 2, 6)
        runner.timer.start_step()
        sums, counts, *_ = runner.forward_backward([batch], 12)
        sums["loss"] = sums["loss"] * torch.nan
        assert not runner.finish(sums, counts, 12, LR).is_finite
        assert all(torch.equal(value, before[name]) for name, value in runner.model.state_dict().items())
        train(runner, [[random_batch(51, 2, 6)]])
    assert_same(plain, captured)


def test_gradients_that_moved_are_captured_anew(place: tuple[World, Meshes]) -> None:
    accelerator = Replaying()
    plain, captured = make(place, None), make(place, accelerator)
    for runner in (plain, captured):
        train(runner, batches(5, 1))
        runner.optimizer.zero_grad()
        train(runner, [[random_batch(60, 2, 6)], [random_batch(61, 2, 6)]])
    assert_same(plain, captured)
    assert accelerator.captured == 2


def test_where_the_device_refuses_training_goes_on(
    place: tuple[World, Meshes], caplog: pytest.LogCaptureFixture
) -> None:
    plain, captured = make(place, None), make(place, Replaying(refuses=True))
    steps = batches(6, 1)
    train(plain, steps)
    train(captured, steps)
    assert_same(plain, captured)
    said = [record.getMessage() for record in caplog.records if "train.cuda_graph has no effect" in record.getMessage()]
    assert said == [
        "train.cuda_graph has no effect: the device refused to capture a microbatch: operation not permitted when "
        "stream is capturing"
    ]


def test_an_observed_layer_is_not_captured(place: tuple[World, Meshes]) -> None:
    accelerator = Replaying()
    runner = make(place, accelerator)
    runner.layers[0].gate.synthetic = object()  # type: ignore[assignment]
    assert runner.graph is not None
    assert not any(runner.graph.takes(random_batch(0, 2, 6), None) for _ in range(WARM_UP + 2))
    runner.layers[0].gate.synthetic = None
    assert [runner.graph.takes(random_batch(0, 2, 6), None) for _ in range(WARM_UP + 1)] == [False] * WARM_UP + [True]


def test_it_says_why_not(place: tuple[World, Meshes]) -> None:
    runner = make(place, None)
    assert graph_problem(runner.model, runner.optimizer, Replaying(), "triton") is None
    problem = graph_problem(runner.model, runner.optimizer, Replaying(), "loop")
    assert problem == "the expert kernel is loop, and only triton needs nothing from the host"
    problem = graph_problem(runner.model, runner.optimizer, CPUAccelerator(), "triton")
    assert problem == "cpu: there is no launch cost to capture"
    runner.layers[0].dispatcher = object()  # type: ignore[assignment]
    assert graph_problem(runner.model, runner.optimizer, Replaying(), "triton") == "tokens go to other ranks in between"
    world, meshes = place
    model = build_parallel_model(CONFIG, meshes, world.device, 3, compute_dtype=torch.bfloat16)
    problem = graph_problem(model, runner.optimizer, Replaying(), "triton")
    assert problem is not None
    assert problem.startswith("FSDP gathers weights in between")


def test_it_says_which_setting() -> None:
    assert setting_problem(TrainConfig()) is None
    for changed, start in (
        ({"trace": {}}, "the trace is on"),
        ({"profiler": {}}, "the profiler is on"),
        ({"synthetic_routing": {"workload": "balanced"}}, "synthetic_routing is on"),
        ({"data": {"packing": "documents"}}, "data.packing is 'documents'"),
    ):
        problem = setting_problem(TrainConfig.model_validate(changed))
        assert problem is not None
        assert problem.startswith(start)


def test_a_cpu_captures_nothing() -> None:
    with pytest.raises(ConfigError, match="there is no launch cost to capture"):
        CPUAccelerator().capture(lambda: None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpu_replays_what_it_captured(compiled: bool) -> None:
    """Losses, norms and weights of launches and of replays; the same kernels, but for a division."""
    found = []
    for captures in (False, True):
        with join_world(get_accelerator(), timeout_s=60) as world:
            meshes = build_meshes(derive_axes(ParallelConfig(), 1, CONFIG.num_experts), world)
            model = build_parallel_model(
                CONFIG, meshes, world.device, 3, compute_dtype=torch.bfloat16, reshard_after_forward=False,
                compile=compiled,
            )  # fmt: skip
            optimizer = build_optimizer(model, OptimizerConfig(lr=LR))
            assert graph_problem(model, optimizer, world.accelerator, "triton") is None
            timer = PhaseTimer(world.accelerator)
            runner = TrainStep(model, optimizer, meshes, world.device, timer, 0.5, captures=captures)
            steps = [[random_batch(8 * i % 24 + j, 4, 64) for j in range(2)] for i in range(9)]
            results = train(runner, steps)
            assert runner.graph is None or (runner.graph._replay is not None and not runner.graph.is_refused)
            weights = {name: value.detach().cpu() for name, value in model.state_dict().items()}
            found.append(([(r.loss, r.grad_norm) for r in results], weights))
    (plain, plain_weights), (captured, captured_weights) = found
    for want, got in zip(plain, captured, strict=True):
        assert got == pytest.approx(want, rel=2e-3)
    assert plain[-1][0] < plain[0][0]
    for name, value in plain_weights.items():
        assert torch.allclose(captured_weights[name], value, atol=2e-3 * LR * len(plain) * 100), name

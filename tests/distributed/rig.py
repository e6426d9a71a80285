"""A toy model on the ranks of a world with everything that a training step needs, and the same in one process.

Scenarios are functions of (world, meshes); `run_scenarios` calls several in one start of the ranks.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from distributed.harness import run_ranks
from distributed.parity import OPTIMIZER, SEED, VOCAB, relative, toy_model, whole
from equipoise.accelerator import CPUAccelerator
from equipoise.data import IGNORED_LABEL, Batch
from equipoise.distributed.mesh import Meshes, ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.world import World, join_world
from equipoise.models.config import ModelConfig
from equipoise.models.initialize import initialize_model
from equipoise.models.model import MoEForCausalLM
from equipoise.models.parallelize import build_parallel_model
from equipoise.train.optimizer import OptimizerConfig, build_optimizer
from equipoise.train.step import StepResult, TrainStep, moe_layers
from equipoise.train.timing import PhaseTimer

Scenario = Callable[[World, Meshes], Any]


def random_batch(seed: int, num_sequences: int, length: int, num_padding: int = 0) -> Batch:
    """Random tokens; the last `num_padding` of each sequence are padding behind its one packed document."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.randint(0, VOCAB, (num_sequences, length + 1), generator=generator)
    labels_BS = ids_BS[:, 1:].clone()
    documents_BS = None
    if num_padding:
        documents_BS = torch.zeros(num_sequences, length, dtype=torch.int32)
        documents_BS[:, length - num_padding :] = -1
        labels_BS[:, length - num_padding :] = IGNORED_LABEL
    valid = int((labels_BS != IGNORED_LABEL).sum())
    return Batch(ids_BS[:, :-1], labels_BS, None, documents_BS, valid, valid)


class Rig:
    """A model with its optimizer and step. With `meshes` it is the parallel one, without it is whole and plain."""

    def __init__(
        self,
        config: ModelConfig,
        world: World,
        meshes: Meshes | None,
        *,
        seed: int = SEED,
        optimizer: OptimizerConfig = OPTIMIZER,
        **options: Any,
    ) -> None:
        if meshes is None:
            self.model = MoEForCausalLM(config)
            initialize_model(self.model, seed)
        else:
            self.model = build_parallel_model(config, meshes, world.device, seed, **options)
        self.meshes, self.lr = meshes, optimizer.lr
        self.optimizer = build_optimizer(self.model, optimizer)
        timer = PhaseTimer(world.accelerator)
        timer.start_step()
        # Only the reductions of a step use the meshes; a plain rig makes its update without them.
        self.runner = TrainStep(self.model, self.optimizer, meshes, world.device, timer, optimizer.max_grad_norm)  # type: ignore[arg-type]

    def gradients(self, batches: Sequence[Batch], num_tokens: int) -> dict[str, torch.Tensor]:
        """Whole gradients that this rank's microbatches leave after accumulation; they are then cleared."""
        self.runner.forward_backward(list(batches), num_tokens)
        found = whole({name: p.grad for name, p in self.model.named_parameters()})
        self.optimizer.zero_grad()
        return found

    def step(self, batches: Sequence[Batch], num_tokens: int) -> StepResult | None:
        """One optimizer step; the result of a parallel one."""
        sums, counts_NLE = self.runner.forward_backward(list(batches), num_tokens)
        if self.meshes is not None:
            result, norm = self.runner.reduce(sums, counts_NLE, num_tokens, stop=False)
            self.runner.update(result, norm, self.lr)
            return result
        if self.runner.max_grad_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.runner.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return None

    def parameters(self) -> dict[str, torch.Tensor]:
        """Whole parameters by name."""
        return whole(dict(self.model.named_parameters()))

    def send_everything_to_expert_0(self) -> None:
        """A selection bias that no score outweighs."""
        for layer in moe_layers(self.model):
            assert layer.gate.e_score_correction_bias is not None
            layer.gate.e_score_correction_bias[0] = 100.0


def differing(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float = 1e-5) -> dict:
    """Norm-relative differences above the tolerance, by name."""
    assert got.keys() == want.keys()
    return {name: d for name in want if not (d := relative(got[name], want[name])) <= tolerance}


def initial_weights(world: World, meshes: Meshes) -> dict[str, Any]:
    """C44: what differs from one process at the start, and the experts of the first MoE layer that start equal."""
    want = Rig(toy_model(), world, None, seed=1234).parameters()
    got = Rig(toy_model(), world, meshes, seed=1234).parameters()
    experts = got["model.layers.0.mlp.experts.down_proj"]
    equal = [(a, b) for a in range(len(experts)) for b in range(a) if torch.equal(experts[a], experts[b])]
    return {"differing": differing(got, want, 0.0), "equal": equal, "experts": len(experts)}


def run_scenarios(scenarios: Sequence[Scenario], parallel: ParallelConfig, num_experts: int) -> dict[str, Any]:
    """On a rank: what each scenario returned, or its traceback; it ends at the first that fails."""
    found: dict[str, Any] = {}
    with join_world(CPUAccelerator(), timeout_s=40) as world:
        meshes = build_meshes(derive_axes(parallel, world.size, num_experts), world)
        for scenario in scenarios:
            try:
                found[scenario.__name__] = scenario(world, meshes)
            except Exception:
                found[scenario.__name__] = traceback.format_exc()
                break
    return found


class Outcomes:
    """What scenarios returned, by rank."""

    def __init__(self, on_rank: Callable[..., dict[str, Any]], world_size: int, *args: Any) -> None:
        self.ranks = run_ranks(on_rank, world_size, *args, deadline_s=150)

    def of(self, scenario: Callable[..., Any]) -> list[Any]:
        """By rank; fails with the traceback of a rank on which the scenario failed or was not reached."""
        found = [rank.get(scenario.__name__, "Traceback: an earlier scenario failed") for rank in self.ranks]
        for value in found:
            assert not (isinstance(value, str) and "Traceback" in value), value
        return found

"""A toy model trained twice: by plain PyTorch in one process, and by the parallel trainer. Used by parity tests."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from equipoise.accelerator import get_accelerator
from equipoise.balance_config import BalanceConfig
from equipoise.data import Batch
from equipoise.dispatch.config import DispatchConfig
from equipoise.distributed.mesh import Meshes, ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.world import World, join_world
from equipoise.models.config import ModelConfig
from equipoise.models.initialize import initialize_model
from equipoise.models.model import IGNORED_LABEL, MoEForCausalLM
from equipoise.models.parallelize import build_parallel_model
from equipoise.moe.bias import update_selection_bias
from equipoise.moe.synthetic import Workload
from equipoise.train.optimizer import OptimizerConfig, build_optimizer
from equipoise.train.step import TrainStep, moe_layers
from equipoise.train.timing import PhaseTimer

VOCAB = 61
OPTIMIZER = OptimizerConfig(lr=1e-3, max_grad_norm=0.5)
SEED = 7
STEPS = 2  # of comparisons: the second has gradients of updated weights, and updates with moments


def toy_model(**changes) -> ModelConfig:
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "mlp_only_layers": (1,),
        "router_aux_loss_coef": 0.0,
        "initializer_range": 0.2,
    }
    return ModelConfig(**(values | changes))


@dataclass(frozen=True)
class Case:
    """One way to spread one training. `lengths` cycles over the microbatches of all ranks."""

    model: ModelConfig
    ep: int = 1
    replicate: int = 1
    dispatcher: str = "auto"
    recompute: str = "none"
    accumulate: int = 2
    lengths: tuple[int, ...] = (9, 12, 7, 11)
    selection_bias: float = 0.0
    """Bias of the hot experts: a large one sends every token there."""
    hot_experts: int = 1
    balance: BalanceConfig | None = None
    frozen: str = ""
    """Parameters with this in their name are not trained."""
    limit: float = 1e-5
    """Norm-relative difference that rounding may make."""
    compute_dtype: torch.dtype = torch.float32
    dispatch: DispatchConfig | None = None
    workload: Workload | None = None
    """Lays the routing down; not for comparisons with plain training, whose ranks are one."""


def make_batch(index: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 + index)
    ids = torch.randint(0, VOCAB, (1, length + 1), generator=generator)
    labels = ids[:, 1:].clone()
    if length > 4:
        labels[:, 2] = IGNORED_LABEL  # so that ranks have unequal numbers of valid tokens
    valid = int((labels != IGNORED_LABEL).sum())
    return Batch(ids[:, :-1], labels, None, None, valid, valid)


@dataclass(frozen=True)
class Trained:
    """What three steps gave: losses (with that of multi-token prediction), norms, gradients of each step (unclipped),
    final parameters."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    parameters: dict[str, torch.Tensor]
    copies: float = 0.0
    """Replicas of all steps, where balancing is on."""


def prepare(model: MoEForCausalLM, case: Case) -> None:
    """Biases the hot experts and freezes what the case wants frozen."""
    for module in model.modules():
        bias = getattr(module, "e_score_correction_bias", None)
        if bias is not None:
            bias[: case.hot_experts] = case.selection_bias
    for name, parameter in model.named_parameters():
        if case.frozen and case.frozen in name:
            parameter.requires_grad_(False)


def train_plainly(case: Case, world_size: int, steps: int = 3) -> Trained:
    """The reference: one process, whole model, no FSDP, no dispatcher, torch's own clipping."""
    model = MoEForCausalLM(case.model)
    initialize_model(model, SEED)
    prepare(model, case)
    optimizer = build_optimizer(model, OPTIMIZER)
    losses, norms, gradients = [], [], []
    per_step = world_size * case.accumulate
    for step in range(steps):
        batches = [make_batch(step * per_step + i, case.lengths[i % len(case.lengths)]) for i in range(per_step)]
        total = sum(b.num_valid_tokens for b in batches)
        outputs = [model(b.input_ids, b.labels) for b in batches]
        loss = sum(output.loss_sum for output in outputs) / total
        if case.model.num_nextn_predict_layers:
            loss = loss + case.model.mtp_loss_coef * sum(output.mtp_loss_sum for output in outputs) / total
        loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm)))
        optimizer.step()
        optimizer.zero_grad()
        for layer, routings in zip(moe_layers(model), zip(*(output.routings for output in outputs))):
            if layer.gate.e_score_correction_bias is not None:
                counts_E = sum(routing.counts_E for routing in routings)
                update_selection_bias(layer.gate.e_score_correction_bias, counts_E, case.model.bias_update_speed)
        losses.append(float(loss.detach()))
    return Trained(losses, norms, gradients, {n: p.detach().clone() for n, p in model.named_parameters()})


def whole(tensors: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Copies on the CPU, where the reference is; of DTensors in full; without what is None. All ranks call it together.

    Shards on the CPU are exchanged by plain collectives and all at once: `full_tensor` uses functional ones, one or two
    for each tensor, and over Gloo torch 2.13's damage the heap or hang, seldom, on a busy machine.
    """
    given = {name: tensor.detach() for name, tensor in tensors.items() if tensor is not None}
    shards = {name: _shard(t) for name, t in given.items() if isinstance(t, DTensor) and t.device.type == "cpu"}
    everyones: list[Any] = []
    if shards:
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, shards)
    found = {}
    for name, tensor in given.items():
        if name in shards:
            found[name] = torch.full(tensor.shape, math.nan, dtype=tensor.dtype)
            for part in everyones:
                index, values = part[name]
                found[name].view(-1)[index] = values
        else:
            found[name] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu().clone()
    return found


def _shard(tensor: DTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where this rank's elements are in the whole, and what they are."""
    index = _index(tensor.shape, tensor.device_mesh, tensor.placements)
    return index, tensor.to_local().flatten().clone()


@lru_cache
def _index(shape: torch.Size, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> torch.Tensor:
    everything = torch.arange(shape.numel()).view(shape)
    return distribute_tensor(everything, mesh, placements, src_data_rank=None).to_local().flatten()


def build_case_meshes(case: Case, world: World) -> Meshes:
    parallel = ParallelConfig(ep_size=case.ep, replicate_size=case.replicate)
    return build_meshes(derive_axes(parallel, world.size, case.model.num_experts), world)


def train_in_parallel(case: Case, world: World, steps: int = 3, meshes: Meshes | None = None) -> Trained:
    """The same by the trainer's own parts, each rank on its share of the microbatches."""
    meshes = meshes or build_case_meshes(case, world)
    model = build_parallel_model(
        case.model,
        meshes,
        world.device,
        SEED,
        compute_dtype=case.compute_dtype,
        dispatcher=case.dispatcher,
        recompute=case.recompute,
        balance=case.balance,
        dispatch=case.dispatch,
    )
    prepare(model, case)
    optimizer = build_optimizer(model, OPTIMIZER)
    timer = PhaseTimer(world.accelerator)
    runner = TrainStep(model, optimizer, meshes, world.device, timer, OPTIMIZER.max_grad_norm)
    losses, norms, gradients, copies = [], [], [], 0.0
    per_step = world.size * case.accumulate
    for step in range(steps):
        timer.start_step()
        runner.lay_down_routing(case.workload, step)
        lengths = [case.lengths[i % len(case.lengths)] for i in range(per_step)]
        batches = [make_batch(step * per_step + i, lengths[i]) for i in range(per_step)]
        total = sum(b.num_valid_tokens for b in batches)
        mine = batches[world.rank * case.accumulate : (world.rank + 1) * case.accumulate]
        sums, counts = runner.forward_backward(mine, total)
        gradients.append(whole({n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
        result, norm = runner.reduce(sums, counts, total, stop=False)
        runner.update(result, norm, OPTIMIZER.lr)
        losses.append(result.loss + case.model.mtp_loss_coef * result.mtp_loss)
        norms.append(result.grad_norm)
        copies += result.balance.copies if result.balance is not None else 0
    parameters = whole(dict(model.named_parameters()))
    return Trained(losses, norms, gradients, parameters, copies)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """||a - b|| / ||b||; the norm of a where b is 0. Infinite for a NaN, which `max` and `>` would pass over."""
    norm = float(b.norm())
    return _seen(float((a - b).norm()) / norm if norm else float(a.norm()))


def _seen(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def noise_only(reference: Trained) -> set[str]:
    """Parameters whose gradient is zero in exact arithmetic, so that only its rounding is left.

    With sequences of one token the softmax of attention has one term and passes nothing to queries and keys.
    """
    noise = set()
    for name in reference.gradients[0]:
        shares = [float(g[name].norm()) / norm for g, norm in zip(reference.gradients, reference.norms)]
        if max(shares) < 1e-6:
            noise.add(name)
    return noise


def differences(a: Trained, b: Trained) -> dict[str, float]:
    """Norm-relative difference of everything, by name; `b` is the reference."""
    found = {f"loss of step {i}": _seen(abs(x - y) / abs(y)) for i, (x, y) in enumerate(zip(a.losses, b.losses))}
    found |= {f"norm of step {i}": _seen(abs(x - y) / abs(y)) for i, (x, y) in enumerate(zip(a.norms, b.norms))}
    noise = noise_only(b)
    for i, (x, y) in enumerate(zip(a.gradients, b.gradients)):
        found |= {f"gradient of {n} in step {i}": relative(x[n], y[n]) for n in y if n not in noise}
        found |= {f"gradient of {n} in step {i}": _seen(float(x[n].norm()) / b.norms[i]) for n in noise}
    found |= {f"{n} after training": relative(a.parameters[n], b.parameters[n]) for n in b.parameters if n not in noise}
    return found


@lru_cache
def _reference(case: Case, world_size: int) -> Trained:
    return train_plainly(case, world_size, STEPS)


def reference_of(case: Case, world_size: int) -> Trained:
    """Of several cases that are the same training in one process, the first trains it."""
    alone = replace(case, ep=1, replicate=1, dispatcher="auto", recompute="none", balance=None, limit=0.0)
    return _reference(alone, world_size)


def compare_on_this_rank(cases: list[Case]) -> list[tuple[Case, dict[str, float]]]:
    """Runs every case on the ranks of the world; for `run_ranks`. Returns what differs by more than the limit."""
    results = []
    store = shared_store()
    for case in cases:
        with join_world(get_accelerator(), timeout_s=60, store=store) as world:
            trained = train_in_parallel(case, world, STEPS)
            reference = reference_of(case, world.size)
        found = {k: v for k, v in differences(trained, reference).items() if not v <= case.limit}
        if case.balance is not None and not trained.copies:
            found["replicas"] = 0.0  # nothing was balanced: the case shows nothing
        results.append((case, found))
    return results


def shared_store() -> dist.Store:
    """One store for several worlds in a row, served by rank 0."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(address, port, size, rank == 0, timedelta(seconds=60))

"""One optimizer step: forward and backward of every microbatch, reductions over ranks, update.

Shapes: B sequences, S tokens, L MoE layers, E experts, N microbatches of the step.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from equipoise.accelerator.pinned import to_device, to_host
from equipoise.data import IGNORED_LABEL, Batch
from equipoise.distributed.collectives import all_reduce_sum
from equipoise.distributed.gradients import clip_factor, clip_gradients, global_grad_norm
from equipoise.distributed.mesh import Meshes
from equipoise.errors import DataError
from equipoise.models.model import ModelOutput, MoEForCausalLM
from equipoise.moe.bias import update_selection_bias
from equipoise.moe.layer import MoELayer
from equipoise.moe.synthetic import Workload
from equipoise.train.balance_statistics import BalanceResult, sum_device_records, sum_records
from equipoise.train.graph import Captured, MicrobatchGraph
from equipoise.train.load_statistics import rank_imbalance
from equipoise.train.master_adamw import MasterAdamW
from equipoise.train.rollout import (
    ROLLOUT_MAX,
    ROLLOUT_SUMS,
    ROUTER_COUNTS,
    Rollout,
    RolloutResult,
    add,
    agree_on_known,
    compare,
    result_of,
)
from equipoise.train.timing import PhaseTimer


def padding_mask(batch: Batch) -> torch.Tensor | None:
    """Bool [B, S], False on padding, on the CPU like the batch; None when every token is real.

    Padding is the rest of a sequence behind its last packed document, and whole sequences without a single label.
    """
    # By NumPy: for each such operation torch wakes a thread per core, and where other processes have the cores the
    # device waits for milliseconds.
    if batch.document_ids is not None:
        valid = batch.document_ids.numpy() >= 0
    elif batch.num_valid_tokens == batch.labels.numel():
        return None
    else:
        labels = batch.labels.numpy()
        valid = np.broadcast_to((labels != IGNORED_LABEL).any(1, keepdims=True), labels.shape)
    return None if valid.all() else torch.from_numpy(np.ascontiguousarray(valid))


def run_model(
    model: MoEForCausalLM,
    batch: Batch,
    device: torch.device,
    microbatch: int = 0,
    rollout: Rollout | None = None,
    valid: torch.Tensor | None = None,
    train_logprobs: bool = False,
) -> ModelOutput:
    """Moves a batch to the device and computes its summed loss, or with `train_logprobs` the log-probabilities that
    another loss is made of, at the rollout's temperature. `rollout`: on the device; `valid`: in place of
    `padding_mask`."""
    valid = padding_mask(batch) if valid is None else valid
    if valid is not None:
        valid = to_device(valid, device)
    batch = batch.to(device)
    recorded: dict[str, Any] = {}
    if rollout is not None:
        recorded["replay"] = rollout.replay
        recorded["temperature"] = rollout.temperature if train_logprobs or rollout.logprobs_BS is not None else None
        recorded["train_logprobs"] = train_logprobs
    return model(batch.input_ids, batch.labels, batch.position_ids, batch.document_ids, valid, microbatch, **recorded)


Objective = Callable[[int, ModelOutput], torch.Tensor]
"""A loss in place of cross-entropy: from a microbatch's number and its log-probabilities to a sum over tokens."""


def moe_layers(model: nn.Module) -> list[MoELayer]:
    """The MoE layers of a model in order."""
    return [m for m in model.modules() if isinstance(m, MoELayer)]


@dataclass(frozen=True)
class StepResult:
    """What a step gave, equal on every rank.

    loss: mean cross-entropy per valid token, nats. aux_loss, z_loss: mean over MoE layers, before their weights.
    mtp_loss: mean over the multi-token-prediction layers of their cross-entropy sum / `num_tokens`, before its weight.
    counts_LE: int64 tokens of each expert over all ranks and microbatches. Like all tensors here on the CPU.
    rank_imbalance_L: max over mean of the rank loads in an EP group, mean over microbatches and EP groups.
    rank_imbalance_max: the largest of any layer, microbatch and EP group.
    saving: the largest of the ranks' numbers for the checkpoint that is being written.
    balance: what balancing made of these loads; None when it is off.
    rollout: how training compares with the rollouts that it was given; None without any.
    router_counts_LE: what the routers would have chosen, where recorded experts were followed instead.
    further: more fields of the step's record.
    """

    loss: float
    aux_loss: float
    z_loss: float
    mtp_loss: float
    grad_norm: float
    num_tokens: int
    counts_LE: torch.Tensor
    rank_imbalance_L: torch.Tensor
    rank_imbalance_max: float
    stop_requested: bool
    saving: int = 0
    balance: BalanceResult | None = None
    rollout: RolloutResult | None = None
    router_counts_LE: torch.Tensor | None = None
    further: dict[str, float] = field(default_factory=dict)

    @property
    def is_finite(self) -> bool:
        """Whether the update may be made."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class _Reduced:
    """A step's results on the device, summed over the ranks: `parts` by name, and all of them in one float64 vector, so
    that one copy brings them to the host."""

    def __init__(self, num_tokens: int, parts: dict[str, torch.Tensor]) -> None:
        self.num_tokens, self.parts = num_tokens, parts
        self.values = torch.cat([part.double().reshape(-1) for part in parts.values()])
        self.norm = parts["losses"][4]
        self.is_finite = parts["losses"][::4].isfinite().all()  # loss and norm
        self.bias_counts_LE = parts.get("router_counts_LE", parts["counts_LE"])

    def result(self, values: torch.Tensor) -> StepResult:
        """From `values` on the host."""
        pieces = values.split([part.numel() for part in self.parts.values()])
        found = {name: piece.view(part.shape).to(part.dtype) for (name, part), piece in zip(self.parts.items(), pieces)}
        loss, aux_loss, z_loss, mtp_loss, grad_norm = found["losses"].tolist()
        worst, stop, saving, *largest = found["largest"].tolist()
        balance, rollout = None, None
        if "balance" in found:
            balance = BalanceResult(found["after_L"], largest.pop(0), *found["balance"].tolist())
        if "rollout" in found:
            rollout = result_of(dict(zip(ROLLOUT_SUMS, found["rollout"].tolist())) | {ROLLOUT_MAX: largest.pop(0)})
        return StepResult(
            loss=loss,
            aux_loss=aux_loss,
            z_loss=z_loss,
            mtp_loss=mtp_loss,
            grad_norm=grad_norm,
            num_tokens=self.num_tokens,
            counts_LE=found["counts_LE"],
            rank_imbalance_L=found["imbalance_L"],
            rank_imbalance_max=worst,
            stop_requested=stop > 0,
            saving=int(saving),
            balance=balance,
            rollout=rollout,
            router_counts_LE=found.get("router_counts_LE"),
        )


class TrainStep:
    """Runs steps on one rank. All state is in the model and the optimizer."""

    def __init__(
        self,
        model: MoEForCausalLM,
        optimizer: torch.optim.Optimizer,
        meshes: Meshes,
        device: torch.device,
        timer: PhaseTimer,
        max_grad_norm: float,
        operation: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
        captures: bool = False,
    ) -> None:
        """`operation` surrounds each part of a step with its name, for messages about missing ranks. `captures`:
        microbatches become graphs of the device where they can (`graph_problem`)."""
        self.model, self.optimizer, self.meshes, self.device = model, optimizer, meshes, device
        self.timer, self.max_grad_norm, self.operation = timer, max_grad_norm, operation
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.layers = moe_layers(model)
        config = model.config
        self.loss_weights = {
            "aux_loss": config.router_aux_loss_coef,
            "z_loss": config.router_z_loss_coef,
            "mtp_loss": config.mtp_loss_coef,
        }
        balancing = self.layers[0].balancing if self.layers else None
        self.balancer = None if balancing is None else balancing.balancer
        if self.balancer is not None:
            self.balancer.transport.operation = operation
        self.graph = MicrobatchGraph(model, timer.accelerator, device, self._run_captured) if captures else None

    def lay_down_routing(self, workload: Workload | None, step: int = 0) -> None:
        """Replaces what the routers choose by a step of a workload, until the next call; None lets them choose."""
        rank = self.meshes.ep.get_local_rank()
        for layer in self.layers:
            layer.gate.synthetic = None if workload is None else workload.routing(step, rank)

    def forward_backward(
        self,
        batches: list[Batch],
        num_tokens: int,
        rollouts: Sequence[Rollout] | None = None,
        objective: Objective | None = None,
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Accumulates gradients of the step's loss over this rank's microbatches.

        The loss is the sum over tokens divided by `num_tokens`, the valid tokens of the whole step on all ranks;
        multi-token prediction, which has fewer targets, is divided by the same number (as in DeepSeek-V3's report).
        Auxiliary losses weigh each microbatch by its share of those tokens. So gradients add up over ranks and
        microbatches to those of one large batch.

        `rollouts`: what was recorded of each microbatch, on every rank or on none. Recorded experts are followed, with
        the weights and gradients of the live router; auxiliary losses and selection biases see what it would choose.
        `objective`: the loss, of log-probabilities at the rollouts' temperature, which it needs.

        Returns:
            This rank's sums of the losses (already divided, before their weights) and, with rollouts, of what `compare`
            finds; and counts_NLE int64.
        """
        config = self.model.config
        if self.balancer is not None:
            self.balancer.take_records()  # of evaluations
            self.balancer.take_waited_s()
        sums = {name: torch.zeros((), device=self.device) for name in ("loss", *self.loss_weights)}
        counts: list[torch.Tensor] = []
        valid: Sequence[torch.Tensor | None] = [None] * len(batches)
        recorded: Sequence[Rollout | None] = [None] * len(batches)
        if rollouts is not None:
            valid, recorded = self.prepare_rollouts(batches, rollouts)
        space = self.model.symmetric_space
        with nullcontext() if space is None else space.abandoned_on_error():
            self._run_microbatches(batches, valid, recorded, num_tokens, sums, counts, objective)
        shape = (len(batches), len(self.layers), config.num_experts)
        counts_NLE = torch.stack(counts).long() if counts else torch.zeros(shape, dtype=torch.int64, device=self.device)
        return sums, counts_NLE

    def _run_microbatches(
        self,
        batches: list[Batch],
        valid: Sequence[torch.Tensor | None],
        recorded: Sequence[Rollout | None],
        num_tokens: int,
        sums: dict[str, torch.Tensor],
        counts: list[torch.Tensor],
        objective: Objective | None,
    ) -> None:
        """Adds to `sums` and `counts`."""
        for number, (batch, rollout) in enumerate(zip(batches, recorded)):
            if rollout is not None or not self._replayed(batch, number, num_tokens, sums, counts):
                self._launched(batch, number, rollout, valid[number], num_tokens, sums, counts, objective)

    def _launched(
        self,
        batch: Batch,
        number: int,
        rollout: Rollout | None,
        valid: torch.Tensor | None,
        num_tokens: int,
        sums: dict[str, torch.Tensor],
        counts: list[torch.Tensor],
        objective: Objective | None,
    ) -> None:
        """Adds a microbatch to `sums` and `counts`. Nothing of its graph is left when this returns: a capture must not
        find what others have put on another stream."""
        with self.timer.phase("forward"), self.operation(f"forward of microbatch {number}"):
            output = run_model(self.model, batch, self.device, number, rollout, valid, objective is not None)
            if objective is not None:
                output = output._replace(loss_sum=objective(number, output))
            loss, terms = self._losses(output, num_tokens, batch.num_valid_tokens / num_tokens)
            if output.routings:
                counts.append(torch.stack([r.counts_E for r in output.routings]))
            for name, term in terms.items():
                sums[name] += term.detach()
            if rollout is not None:
                add(sums, compare(output, rollout, batch.labels.to(self.device)))
        with self.timer.phase("backward"), self.operation(f"backward of microbatch {number}"):
            loss.backward()

    def _losses(
        self, output: ModelOutput, divisor: int | torch.Tensor, share: float | torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """A microbatch's loss, and its terms before their weights. `divisor`: the step's valid tokens; `share`: of the
        microbatch, as a part of them."""
        assert output.loss_sum is not None
        terms = {"loss": output.loss_sum / divisor}
        if output.routings:
            terms["aux_loss"] = torch.stack([r.aux_loss for r in output.routings]).mean() * share
            terms["z_loss"] = torch.stack([r.z_loss for r in output.routings]).mean() * share
        if output.mtp_loss_sum is not None:
            terms["mtp_loss"] = output.mtp_loss_sum / divisor
        loss = terms["loss"]
        for name, weight in self.loss_weights.items():
            if weight and name in terms:
                loss = loss + weight * terms[name]
        return loss, terms

    def _replayed(
        self, batch: Batch, number: int, num_tokens: int, sums: dict[str, torch.Tensor], counts: list[torch.Tensor]
    ) -> bool:
        """Whether the microbatch was run by a graph, and added to `sums` and `counts`."""
        if self.graph is None or not self.graph.takes(batch, padding_mask(batch)):
            return False
        with self.timer.phase("captured"), self.operation(f"microbatch {number}"):
            found = self.graph.run(batch, num_tokens)
            if found is None:
                return False
            for name, term in found.terms.items():
                sums[name] += term
            if found.counts_LE is not None:
                counts.append(found.counts_LE.clone())
        return True

    def _run_captured(self, batch: Batch, divisor: torch.Tensor, share: torch.Tensor) -> Captured:
        """Forward and backward with nothing from the host."""
        output = self.model(batch.input_ids, batch.labels)
        loss, terms = self._losses(output, divisor, share)
        counts_LE = torch.stack([r.counts_E for r in output.routings]) if output.routings else None
        loss.backward()
        return Captured({name: term.detach() for name, term in terms.items()}, counts_LE)

    def prepare_rollouts(
        self, batches: list[Batch], rollouts: Sequence[Rollout]
    ) -> tuple[list[torch.Tensor], list[Rollout]]:
        """Which tokens take part, and the rollouts on the device; where all of their experts are known, replicas are
        placed ahead."""
        if len(rollouts) != len(batches):
            raise DataError(f"{len(rollouts)} rollouts for {len(batches)} microbatches: expected one for each")
        valid = []
        for batch, rollout in zip(batches, rollouts):
            if rollout.valid_BS.shape != batch.labels.shape:
                raise DataError(
                    f"a rollout of {list(rollout.valid_BS.shape)} tokens for a microbatch of "
                    f"{list(batch.labels.shape)}: collate both together"
                )
            mask = padding_mask(batch)
            valid.append(rollout.valid_BS if mask is None else rollout.valid_BS & mask)
        if self.balancer is not None:
            group = self.meshes.ep_group if self.meshes.sizes.ep > 1 else None
            rollouts = agree_on_known(rollouts, valid, group, self.device)
        return valid, [rollout.to(self.device) for rollout in rollouts]

    def finish(
        self,
        sums: dict[str, torch.Tensor],
        counts_NLE: torch.Tensor,
        num_tokens: int,
        lr: float,
        stop: bool = False,
        saving: int = 0,
    ) -> StepResult:
        """`reduce`, and `update` unless the loss or the norm is not finite (`StepResult.is_finite`). Gradients are
        cleared either way.

        Where the optimizer can leave a step out by itself, the update is enqueued before the host knows the results:
        the device goes on with it while the host reads them and begins the next step.
        """
        if not isinstance(self.optimizer, MasterAdamW) or self.model.symmetric_space is not None:
            result, norm = self.reduce(sums, counts_NLE, num_tokens, stop, saving)
            if result.is_finite:
                self.update(result, norm, lr)
            else:
                self._clear_gradients()
            return result
        reduced = self._reduce(sums, counts_NLE, num_tokens, stop, saving)
        values = to_host(reduced.values)
        arrived = self.timer.accelerator.event()
        arrived.record()
        factor = clip_factor(reduced.norm, self.max_grad_norm) if self.max_grad_norm else torch.ones_like(reduced.norm)
        self._set_lr(lr)
        self.optimizer.step(gradient_scale=torch.where(reduced.is_finite, factor, torch.nan))
        self._clear_gradients()
        self._move_selection_biases(reduced.bias_counts_LE * reduced.is_finite)  # equal counts move nothing
        arrived.synchronize()
        return reduced.result(values)

    def reduce(
        self, sums: dict[str, torch.Tensor], counts_NLE: torch.Tensor, num_tokens: int, stop: bool, saving: int = 0
    ) -> tuple[StepResult, torch.Tensor]:
        """Sums a step's results over the ranks; returns them and the gradient norm as a device scalar.

        Of `stop` and `saving` (a small number, see `StepResult`) every rank gets the largest. Waits for the device,
        once.
        """
        reduced = self._reduce(sums, counts_NLE, num_tokens, stop, saving)
        result = reduced.result(reduced.values.cpu())
        if self.model.symmetric_space is not None:
            self.model.symmetric_space.check()  # whatever a kernel has found out is known now, before the update
        return result, reduced.norm

    def _reduce(
        self, sums: dict[str, torch.Tensor], counts_NLE: torch.Tensor, num_tokens: int, stop: bool, saving: int
    ) -> "_Reduced":
        """Enqueues the reductions of a step and waits for none of them."""
        sizes, everyone = self.meshes.sizes, self.meshes.world_group
        group_counts_NLE = counts_NLE
        if sizes.ep > 1:
            group_counts_NLE = counts_NLE.clone()
            dist.all_reduce(group_counts_NLE, group=self.meshes.ep_group)
        imbalance_NL = rank_imbalance(group_counts_NLE, sizes.ep)
        worst = torch.ones((), dtype=torch.float64, device=self.device)
        if imbalance_NL.numel():
            worst = torch.maximum(worst, imbalance_NL.max())
        maxima = [worst, worst.new_full((), float(stop)), worst.new_full((), float(saving))]
        balance_sums: list[torch.Tensor] = []
        if self.balancer is not None:
            waited_s, on_device = self.balancer.take_waited_s(), self.balancer.take_device_records()
            if on_device is not None:  # what else is to be enqueued does not wait for them
                *balance_sums, worst_after = sum_device_records(on_device, waited_s, sizes.world)
                maxima.append(worst_after)
            else:
                after_L, totals, worst_on_host = sum_records(self.balancer.take_records(), waited_s, sizes.world)
                balance_sums = [to_device(after_L, self.device), to_device(totals, self.device)]
                maxima.append(worst.new_full((), worst_on_host))
        rollout_sums: list[torch.Tensor] = []
        if ROLLOUT_MAX in sums:
            maxima.append(sums[ROLLOUT_MAX])
            router_counts_LE = sums.get(ROUTER_COUNTS, torch.zeros_like(counts_NLE[0]))
            rollout_sums = [router_counts_LE, *(sums[name] for name in ROLLOUT_SUMS)]
        largest = torch.cat([x.reshape(-1) for x in maxima])
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=everyone)
        norm = global_grad_norm(self.parameters, self.meshes.shard_group)
        losses = [sums[name] for name in ("loss", "aux_loss", "z_loss", "mtp_loss")]
        loss, aux, z, mtp, counts_LE, imbalance_L, *others = all_reduce_sum(
            [*losses, counts_NLE.sum(0), imbalance_NL.mean(0) / sizes.world, *balance_sums, *rollout_sums], everyone
        )
        parts = {"losses": torch.stack([loss, aux, z, mtp, norm]), "largest": largest}
        parts |= {"counts_LE": counts_LE, "imbalance_L": imbalance_L}
        if self.balancer is not None:
            parts |= {"after_L": others.pop(0), "balance": others.pop(0)}
        if rollout_sums:
            parts |= {"router_counts_LE": others.pop(0), "rollout": torch.stack(others)}
        return _Reduced(num_tokens, parts)

    def update(self, result: StepResult, norm: torch.Tensor, lr: float) -> None:
        """Clips, updates the parameters and then the selection biases, and clears the gradients."""
        self._set_lr(lr)
        is_clipped = bool(self.max_grad_norm) and result.grad_norm > self.max_grad_norm
        if isinstance(self.optimizer, MasterAdamW):
            self.optimizer.step(gradient_scale=clip_factor(norm, self.max_grad_norm) if is_clipped else None)
        else:
            if is_clipped:
                clip_gradients(self.parameters, norm, self.max_grad_norm)
            self.optimizer.step()
        self._clear_gradients()
        counts_LE = result.counts_LE if result.router_counts_LE is None else result.router_counts_LE
        self._move_selection_biases(to_device(counts_LE, self.device))

    def _clear_gradients(self) -> None:
        if self.graph is None or not self.graph.clear_gradients():
            self.optimizer.zero_grad()

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def _move_selection_biases(self, counts_LE: torch.Tensor) -> None:
        for layer, counts_E in zip(self.layers, counts_LE):
            if layer.gate.e_score_correction_bias is not None:
                speed = self.model.config.bias_update_speed
                update_selection_bias(layer.gate.e_score_correction_bias, counts_E, speed)

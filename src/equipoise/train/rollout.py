"""What a serving engine recorded of a microbatch, for the training step: each token's experts and log-probability.

`collate_samples` makes batch and rollout of an engine's answers; `TrainStep.forward_backward` follows the experts and
measures how far training is from generation. What is learned from the samples is up to whoever computes rewards.

Shapes: B sequences, S tokens each, T = B * S, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from equipoise.data import IGNORED_LABEL, Batch
from equipoise.errors import DataError
from equipoise.models.config import ModelConfig
from equipoise.models.model import ModelOutput
from equipoise.moe.replay import RoutingReplay, collate_routes, gap_sums

ROLLOUT_SUMS = ("replay_choices", "replay_agreeing", "gap_tokens", "gap_abs", "gap_kl")
ROLLOUT_MAX = "gap_max"
ROUTER_COUNTS = "router_counts_LE"


class Sample(NamedTuple):
    """One answer. ids: tokens of prompt and output. num_prompt: how many are the prompt. logprobs: of the output's
    tokens, at the temperature that drew them. routes: experts [len(ids) - 1, L, K] of all tokens but the last. None:
    not recorded."""

    ids: Sequence[int]
    num_prompt: int
    logprobs: Sequence[float] | None = None
    routes: np.ndarray | None = None


@dataclass(frozen=True)
class Rollout:
    """Of one microbatch, on the CPU.

    valid_BS: bool, False on padding. replay: recorded experts; None lets the router choose. logprobs_BS: float32, of
    the labels when they were drawn at `temperature`; NaN where that is not known.
    """

    valid_BS: torch.Tensor
    replay: RoutingReplay | None = None
    logprobs_BS: torch.Tensor | None = None
    temperature: float = 1.0

    def to(self, device: torch.device) -> "Rollout":
        """The same with its tensors on `device`."""
        return replace(
            self,
            valid_BS=self.valid_BS.to(device, non_blocking=True),
            replay=None if self.replay is None else self.replay.to(device),
            logprobs_BS=None if self.logprobs_BS is None else self.logprobs_BS.to(device, non_blocking=True),
        )

    def is_known(self, valid_BS: torch.Tensor) -> bool:
        """Whether the experts of every valid token are recorded in every layer."""
        return self.replay is not None and bool((self.replay.ids_LTK[:, valid_BS.flatten()] >= 0).all())


@dataclass(frozen=True)
class RolloutResult:
    """How a step's training compares with the rollouts that it was made from, over all ranks and microbatches.

    agreement: share of the replayed choices that the router makes too; None where nothing was replayed.
    gap_mean, gap_max: of |training - rollout| log-probabilities; kl: estimate of KL(rollout || training), nats per
    token. None without recorded log-probabilities.
    """

    agreement: float | None
    gap_mean: float | None
    gap_max: float | None
    kl: float | None

    def metrics(self) -> dict[str, float]:
        """Fields of a step's record."""
        names = {"replay_agreement": self.agreement, "logprob_gap_mean": self.gap_mean}
        names |= {"logprob_gap_max": self.gap_max, "rollout_kl": self.kl}
        return {name: value for name, value in names.items() if value is not None}


def collate_samples(
    samples: Sequence[Sample | None], length: int, config: ModelConfig, temperature: float = 1.0
) -> tuple[Batch, Rollout]:
    """A microbatch of answers, one in each sequence, padded behind; labels are the tokens of the outputs. None: a
    sequence of padding, of which all is known.

    Raises:
        DataError: a sample is longer than `length` + 1 or has no output, or its logprobs or routes do not fit it; names
            the sample.
    """
    shape = (len(samples), length)
    inputs, labels = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED_LABEL)
    logprobs = torch.full(shape, float("nan"))
    for number, sample in enumerate(samples):
        if sample is None:
            continue
        rows, first = len(sample.ids) - 1, sample.num_prompt - 1
        if not 0 <= first < rows or rows > length:
            raise DataError(
                f"sample {number} has {len(sample.ids)} tokens, {sample.num_prompt} of them its prompt: expected a "
                f"prompt, an output, and at most {length + 1} in all"
            )
        if sample.logprobs is not None and len(sample.logprobs) != rows - first:
            raise DataError(
                f"sample {number} has {len(sample.logprobs)} log-probabilities for {rows - first} tokens of output"
            )
        ids = torch.tensor(sample.ids)
        inputs[number, :rows], labels[number, first:rows] = ids[:-1], ids[sample.num_prompt :]
        if sample.logprobs is not None:
            logprobs[number, first:rows] = torch.tensor(sample.logprobs)
    num_tokens = [0 if sample is None else len(sample.ids) - 1 for sample in samples]
    valid = torch.arange(length) < torch.tensor(num_tokens)[:, None]
    num_layers = sum(index < config.num_hidden_layers for index in config.moe_layers)
    sizes = (num_layers, config.num_experts, config.num_experts_per_tok)
    replay = None
    if any(sample is None or sample.routes is not None for sample in samples):
        nothing = np.zeros((0, num_layers, config.num_experts_per_tok), np.uint8)
        routes = [nothing if sample is None else sample.routes for sample in samples]
        replay = collate_routes(routes, num_tokens, length, *sizes)
    has_logprobs = any(sample is None or sample.logprobs is not None for sample in samples)
    batch = Batch(inputs, labels, None, None, int((labels != IGNORED_LABEL).sum()), 0)
    return batch, Rollout(valid, replay, logprobs if has_logprobs else None, temperature)


def agree_on_known(
    rollouts: Sequence[Rollout], valid: Sequence[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device
) -> list[Rollout]:
    """The same with `is_complete` where, on every rank of an EP group, the experts of every valid token are known: only
    then can plans be made before the forward, by all together. Collective; waits for the device once."""
    known = torch.tensor([rollout.is_known(v) for rollout, v in zip(rollouts, valid, strict=True)], device=device)
    if group is not None:
        known = known.to(torch.int32)
        dist.all_reduce(known, op=dist.ReduceOp.MIN, group=group)
    return [
        rollout if rollout.replay is None else replace(rollout, replay=replace(rollout.replay, is_complete=bool(flag)))
        for rollout, flag in zip(rollouts, known.tolist())
    ]


def compare(output: ModelOutput, rollout: Rollout, labels_BS: torch.Tensor) -> dict[str, torch.Tensor]:
    """A microbatch's share of `ROLLOUT_SUMS` and `ROLLOUT_MAX` (float64 scalars), and the router's own choices [L, E]
    under `ROUTER_COUNTS`; all on the device."""
    zero = torch.zeros((), dtype=torch.float64, device=labels_BS.device)
    found = dict.fromkeys((*ROLLOUT_SUMS, ROLLOUT_MAX), zero)
    replayed = [routing.replayed for routing in output.routings if routing.replayed is not None]
    if replayed:
        found["replay_choices"] = torch.stack([r.num_choices for r in replayed]).sum().double()
        found["replay_agreeing"] = torch.stack([r.num_agreeing for r in replayed]).sum().double()
    if rollout.logprobs_BS is not None:
        assert output.logprobs_BS is not None
        counted = ~rollout.logprobs_BS.isnan() & (labels_BS != IGNORED_LABEL)
        gaps = gap_sums(output.logprobs_BS.detach(), rollout.logprobs_BS, counted)
        found |= dict(zip(("gap_tokens", "gap_abs", ROLLOUT_MAX, "gap_kl"), gaps))
    if output.routings:
        found[ROUTER_COUNTS] = torch.stack([r.router_counts_E for r in output.routings]).long()
    return found


def add(sums: dict[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> None:
    """Another microbatch's share."""
    for name, value in found.items():
        old = sums.get(name)
        sums[name] = value if old is None else torch.maximum(old, value) if name == ROLLOUT_MAX else old + value


def result_of(values: Mapping[str, float]) -> RolloutResult:
    """From the sums over all ranks, and the maximum."""
    choices, tokens = values["replay_choices"], values["gap_tokens"]

    def mean(name: str, number: float) -> float | None:
        return values[name] / number if number else None

    return RolloutResult(
        mean("replay_agreeing", choices),
        mean("gap_abs", tokens),
        values[ROLLOUT_MAX] if tokens else None,
        mean("gap_kl", tokens),
    )

"""Routing replay: training sends each token to the experts that generated it, and learns the router all the same.

Only ids are replayed. Combine weights are gathered from the live dense scores at those ids, so the router's gradient
flows as always; auxiliary losses and selection biases see the router's own choice. Source: rollout routing replay (R3,
arXiv 2510.11370).

Shapes: B sequences, S tokens each, T = B * S, L MoE layers, E experts, K experts per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from equipoise.errors import DataError

UNKNOWN = -1
"""Stands for a row that was not recorded: the router decides it."""


class LayerReplay(NamedTuple):
    """One layer's recorded experts. ids_TK: `UNKNOWN` in every slot of a row that is not known. is_complete: every
    token that takes part is known, so the layer's load is known before its forward."""

    ids_TK: torch.Tensor
    is_complete: bool


class Replayed(NamedTuple):
    """What replay did to a layer's routing. live_counts_E: int32, tokens of each expert by the router's own choice.
    num_choices, num_agreeing: int64 scalars, choices of replayed rows and those that the router would have made too."""

    live_counts_E: torch.Tensor
    num_choices: torch.Tensor
    num_agreeing: torch.Tensor


@dataclass(frozen=True)
class RoutingReplay:
    """Recorded experts of one microbatch, in the smallest signed dtype: ids_LTK, layers in the order of the model's MoE
    layers, rows in the order of its tokens."""

    ids_LTK: torch.Tensor
    is_complete: bool

    def layer(self, index: int) -> LayerReplay:
        """Of the MoE layer with that number, int32."""
        return LayerReplay(self.ids_LTK[index].to(torch.int32), self.is_complete)

    def to(self, device: torch.device) -> "RoutingReplay":
        """On another device."""
        return RoutingReplay(self.ids_LTK.to(device, non_blocking=True), self.is_complete)


def collate_routes(
    samples: Sequence[np.ndarray | None],
    num_tokens: Sequence[int],
    length: int,
    num_layers: int,
    num_experts: int,
    num_experts_per_tok: int,
) -> RoutingReplay:
    """A microbatch from the routes that an engine recorded, on the CPU.

    A sample of n tokens is trained on its first n - 1, which are the tokens that the engine computed: rows [n - 1, L,
    K]. Rows that are missing, and those of samples without routes (None), are unknown; padding goes to no expert.

    Args:
        samples: integer routes of each sequence.
        num_tokens: tokens of each sequence that are real; the others are padding behind them.
        length: S.
        num_layers, num_experts, num_experts_per_tok: of the model.

    Raises:
        DataError: another shape, ids out of range, or an expert twice in a row; names the sample.
    """
    dtype = torch.int8 if num_experts <= 128 else torch.int16 if num_experts <= 2**15 else torch.int32
    ids_BSLK = torch.full((len(samples), length, num_layers, num_experts_per_tok), UNKNOWN, dtype=dtype)
    for number, routes in enumerate(samples):
        if routes is None:
            continue
        where = f"routes of sample {number}"
        rows = num_tokens[number]
        if routes.ndim != 3 or routes.shape[1:] != (num_layers, num_experts_per_tok) or len(routes) > rows:
            raise DataError(
                f"{where} have shape {list(routes.shape)}: expected at most {rows} rows (the tokens that are trained) "
                f"of {num_layers} MoE layers x {num_experts_per_tok} experts per token"
            )
        ordered = np.sort(routes.astype(np.int64), axis=-1)
        if routes.size and (ordered[..., 0].min() < 0 or ordered[..., -1].max() >= num_experts):
            raise DataError(f"{where} have ids {ordered.min()} to {ordered.max()}: expected 0 to {num_experts - 1}")
        if (ordered[..., 1:] == ordered[..., :-1]).any():
            raise DataError(f"{where} name an expert twice for one token")
        ids_BSLK[number, : len(routes)] = torch.from_numpy(routes.astype(np.int32)).to(dtype)
    complete = all(routes is not None and len(routes) == n for routes, n in zip(samples, num_tokens, strict=True))
    return RoutingReplay(ids_BSLK.flatten(0, 1).transpose(0, 1).contiguous(), complete)


def replay_choice(
    replay: LayerReplay, live_ids_TK: torch.Tensor, live_counts_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Replayed]:
    """ids_TK and counts_E to be used in place of the live ones. Tokens that the router left out stay out."""
    recorded_TK = replay.ids_TK
    taken_T1 = (recorded_TK[:, :1] >= 0) & (live_ids_TK[:, :1] >= 0)
    ids_TK = torch.where(taken_T1, recorded_TK, live_ids_TK)
    num_experts = live_counts_E.numel()
    flat = torch.where(ids_TK < 0, num_experts, ids_TK).flatten().long()
    counts_E = live_counts_E.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    same_TK = (recorded_TK[:, :, None] == live_ids_TK[:, None, :]).any(-1) & taken_T1
    num_choices = taken_T1.sum() * recorded_TK.shape[1]
    return ids_TK, counts_E[:num_experts], Replayed(live_counts_E, num_choices, same_TK.sum())


def agreement(replayed: Sequence[Replayed]) -> torch.Tensor:
    """float64 scalar: share of the replayed choices that the live router makes too; 1 without any."""
    choices = torch.stack([r.num_choices for r in replayed]).sum().double()
    return torch.stack([r.num_agreeing for r in replayed]).sum() / choices.clamp(min=1) + (choices == 0)


class LogprobGap(NamedTuple):
    """How far training is from generation, over the tokens that count. mean_abs, max_abs: of the differences of
    log-probabilities. kl: estimate of KL(rollout || training), exp(d) - 1 - d with d = training - rollout."""

    mean_abs: torch.Tensor
    max_abs: torch.Tensor
    kl: torch.Tensor


def logprob_gap(training: torch.Tensor, rollout: torch.Tensor, counted: torch.Tensor) -> LogprobGap:
    """From log-probabilities of the same tokens, of any one shape; `counted` is bool. Zeros without tokens."""
    number, total, largest, kl = gap_sums(training, rollout, counted)
    number = number.clamp(min=1)
    return LogprobGap(total / number, largest, kl / number)


def gap_sums(
    training: torch.Tensor, rollout: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """For `LogprobGap` over several microbatches, float64 scalars: tokens, sum of |d|, the largest |d|, sum of the KL's
    terms."""
    gap = torch.where(counted, (training - rollout).double(), 0.0)
    largest = gap.abs().max() if gap.numel() else gap.new_zeros(())
    return counted.sum().double(), gap.abs().sum(), largest, (gap.exp() - 1 - gap).sum()

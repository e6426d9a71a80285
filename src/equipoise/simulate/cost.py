"""The cost model: seconds of a MoE layer's forward and backward under a plan, from rows and the machine's rates.

    layer = exchange_s + max over ranks (own rows packed) + max (rows computed) + max (rows moved)
            + balancing on: balance_s + exposed share of max (copies)

Every rank of an EP group waits for the slowest in each part, hence the sum of maxima. Hidden work, as that of shared
experts, is not modelled.

Shapes: B loads, P ranks, E experts, M masters and R slots per rank.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.simulate.hardware import ExpertSize, Hardware


@dataclass(frozen=True)
class LayerCost:
    """Seconds [B] of each part, for the rank that takes longest."""

    experts: np.ndarray
    exchange: np.ndarray
    source: np.ndarray
    balance: np.ndarray
    copies: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.experts + self.exchange + self.source + self.balance + self.copies


def layer_cost(
    hardware: Hardware,
    expert: ExpertSize,
    rows_BPm: np.ndarray,
    sent_BP: np.ndarray,
    out_BPX: np.ndarray,
    in_BPX: np.ndarray,
    copies_BP: np.ndarray,
    is_on: bool,
) -> LayerCost:
    """Parts of a layer's time.

    rows_BPm [B, P, M+R]: rows of each physical expert. sent_BP: rows of each source rank. out_BPX, in_BPX [B, P, 2]:
    rows that leave and reach a rank, within its domain and beyond. copies_BP [B, P, 2]: replicas that a rank sends and
    receives. is_on: whether the step was planned at all.
    """
    tile = hardware.tile_rows
    padded_BP = (-(-rows_BPm // tile) * tile).sum(2)
    active_BP = (rows_BPm > 0).sum(2)
    experts_BP = padded_BP * (expert.flop_per_row / hardware.flops_per_s) + active_BP * hardware.expert_s
    source_BP = sent_BP * (expert.row_bytes / hardware.source_bytes_per_s)
    rates_X = np.array([hardware.link_bytes_per_s, hardware.far_bytes_per_s])
    # Four exchanges: rows out and back, and the same in the backward.
    both_BPX = 4 * _both(out_BPX, in_BPX, hardware.full_duplex) * (expert.row_bytes / rates_X)
    copy_s = hardware.copy_s + expert.copy_bytes / hardware.copy_bytes_per_s
    moved_BP = _both(copies_BP[..., 0], copies_BP[..., 1], hardware.full_duplex)
    zero_B = np.zeros(len(rows_BPm))
    return LayerCost(
        experts_BP.max(1),
        hardware.exchange_s + both_BPX.sum(2).max(1),
        source_BP.max(1),
        zero_B + hardware.balance_s if is_on else zero_B,
        hardware.copy_exposed * copy_s * moved_BP.max(1),
    )


def _both(sent: np.ndarray, received: np.ndarray, full_duplex: bool) -> np.ndarray:
    return np.maximum(sent, received) if full_duplex else (sent + received) / 2

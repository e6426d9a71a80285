"""The cost model: seconds of a MoE layer's forward and backward under a plan, from rows and the machine's rates.

    layer = exchange_s + max over ranks (own rows packed) + max (rows computed) + max (rows moved)
            + mean (rows computed), where ranks share a processor
            + balancing on: balance_s + exposed share of max (copies)

Every rank of an EP group waits for the slowest in each part, hence the sum of maxima. Hidden work, as that of shared
experts, is not modelled.

Shapes: B loads, P ranks, E experts, M masters and R slots per rank.
"""

from dataclasses import dataclass

import numpy as np

from equipoise.simulate.hardware import ExpertSize, Hardware


@dataclass(frozen=True)
class LayerRows:
    """What a plan makes each rank do in some loads.

    rows_BPm [B, P, M+R]: rows of each physical expert. sent_BP: rows of each source rank. out_BPX, in_BPX [B, P, 2]:
    rows that leave and reach a rank, within its domain and beyond. copies_BPX [B, P, 2]: replicas that a rank sends
    and receives. is_on: whether they were planned at all.
    """

    rows_BPm: np.ndarray
    sent_BP: np.ndarray
    out_BPX: np.ndarray
    in_BPX: np.ndarray
    copies_BPX: np.ndarray
    is_on: bool


@dataclass(frozen=True)
class LayerWork:
    """The work of the slowest rank in each part, [B]: what rates and fixed times are multiplied with.

    flop: of rows in whole tiles; active: experts with rows, on that rank. mean_flop: of all ranks. source_bytes: of its
    own rows, each once.
    near_bytes, far_bytes: rows moved in four exchanges. planned: 1 with balancing on. copies: of the busiest rank.
    """

    flop: np.ndarray
    mean_flop: np.ndarray
    active: np.ndarray
    source_bytes: np.ndarray
    near_bytes: np.ndarray
    far_bytes: np.ndarray
    planned: np.ndarray
    copies: np.ndarray


@dataclass(frozen=True)
class LayerCost:
    """Seconds [B] of each part."""

    experts: np.ndarray
    exchange: np.ndarray
    source: np.ndarray
    balance: np.ndarray
    copies: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.experts + self.exchange + self.source + self.balance + self.copies


def layer_work(hardware: Hardware, expert: ExpertSize, rows: LayerRows) -> LayerWork:
    """The work of some loads. Of the hardware it takes tiles and duplex, and the rates to find the slowest rank."""
    tile = hardware.tile_rows
    flop_BP = (-(-rows.rows_BPm // tile) * tile).sum(2) * float(expert.flop_per_row)
    active_BP = (rows.rows_BPm > 0).sum(2)
    slowest_B = (flop_BP / hardware.flops_per_s + active_BP * hardware.expert_s).argmax(1)
    moved_BPX = 4.0 * expert.row_bytes * _both(rows.out_BPX, rows.in_BPX, hardware.full_duplex)
    seconds_BP = moved_BPX[..., 0] / hardware.link_bytes_per_s + moved_BPX[..., 1] / hardware.far_bytes_per_s
    furthest_B = seconds_BP.argmax(1) if seconds_BP.any() else moved_BPX.sum(2).argmax(1)
    copies_BP = _both(rows.copies_BPX[..., 0], rows.copies_BPX[..., 1], hardware.full_duplex)
    at = np.arange(len(flop_BP))
    return LayerWork(
        flop_BP[at, slowest_B],
        flop_BP.mean(1),
        active_BP[at, slowest_B],
        rows.sent_BP.max(1) * float(expert.row_bytes),
        moved_BPX[at, furthest_B, 0],
        moved_BPX[at, furthest_B, 1],
        np.full(len(flop_BP), float(rows.is_on)),
        copies_BP.max(1),
    )


def layer_cost(hardware: Hardware, expert: ExpertSize, rows: LayerRows) -> LayerCost:
    """Seconds of some loads, for the rank that takes longest in each part."""
    work = layer_work(hardware, expert, rows)
    copy_s = hardware.copy_exposed * (hardware.copy_s + expert.copy_bytes / hardware.copy_bytes_per_s)
    return LayerCost(
        experts=work.flop / hardware.flops_per_s
        + work.mean_flop / hardware.shared_flops_per_s
        + work.active * hardware.expert_s,
        exchange=hardware.exchange_s
        + work.near_bytes / hardware.link_bytes_per_s
        + work.far_bytes / hardware.far_bytes_per_s,
        source=work.source_bytes / hardware.source_bytes_per_s,
        balance=work.planned * hardware.balance_s,
        copies=work.copies * copy_s,
    )


def _both(sent: np.ndarray, received: np.ndarray, full_duplex: bool) -> np.ndarray:
    return np.maximum(sent, received) if full_duplex else (sent + received) / 2

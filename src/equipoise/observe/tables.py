"""From arrays to rows of a trace's tables.

Shapes: L layers, P ranks, E experts, M masters and R slots per rank, F phases, B sequences.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from equipoise.observe.schema import LAYERS, LAYERS_SCHEMA, SEQUENCES_SCHEMA, TraceInfo


def imbalance(load_LP: np.ndarray) -> np.ndarray:
    """float32 [L]: largest over mean rank load; 1 without tokens."""
    mean_L = load_LP.mean(1)
    return np.where(mean_L > 0, load_LP.max(1) / np.maximum(mean_L, 1e-30), 1.0).astype(np.float32)


@dataclass(frozen=True)
class LayerRows:
    """All MoE layers of one step, microbatch and EP group. Integer arrays may have any integer dtype.

    load_LPE: rows of each source rank for each expert. delivered_LPm [L, P, M+R]: rows that arrived for each physical
    expert. slot_expert_LS [L, P*R] and quota_LI [L, P*(M+R)]: the plans; None with balancing off. seconds_LPF: float32.
    copied_bytes_L: weights of the replicas, one way. has_matrices: whether the matrices are written, too.
    """

    step: int
    microbatch: int
    group: int
    load_LPE: np.ndarray
    delivered_LPm: np.ndarray
    slot_expert_LS: np.ndarray | None = None
    quota_LI: np.ndarray | None = None
    seconds_LPF: np.ndarray | None = None
    expert_bytes: int = 0
    has_matrices: bool = True

    def batch(self, info: TraceInfo) -> pa.RecordBatch:
        """The rows, in order of layers."""
        L, P, E = self.load_LPE.shape
        load_LE = self.load_LPE.sum(1)
        before_LP = load_LE.reshape(L, P, E // P).sum(2)
        after_LP = self.delivered_LPm.sum(2)
        slots_LS = self.slot_expert_LS
        if slots_LS is None:
            slots_LS = np.full((L, P * info.num_slots), -1)
        quota_LI = self.quota_LI
        if quota_LI is None:  # every expert at home
            home_LPm = np.zeros((L, P, info.num_physical_local), np.int64)
            home_LPm[:, :, : info.num_masters] = load_LE.reshape(L, P, -1)
            quota_LI = home_LPm.reshape(L, -1)
        copies_L = (slots_LS >= 0).sum(1)
        matrices = [self.load_LPE, slots_LS, quota_LI, self.delivered_LPm]
        columns = [
            np.full(L, self.step, np.int32),
            np.full(L, self.microbatch, np.int32),
            np.arange(L, dtype=np.int32),
            np.full(L, self.group, np.int32),
            imbalance(before_LP),
            imbalance(after_LP),
            copies_L.astype(np.int32),
            copies_L.astype(np.int64) * self.expert_bytes,
            lists(before_LP),
            lists(after_LP),
            pa.nulls(L, pa.list_(pa.float32())) if self.seconds_LPF is None else lists(self.seconds_LPF, np.float32),
            *(lists(x) if self.has_matrices else pa.nulls(L, pa.list_(pa.int32())) for x in matrices),
        ]
        return pa.record_batch([pa.array(c) if isinstance(c, np.ndarray) else c for c in columns], LAYERS_SCHEMA)


def sequences_batch(step: int, microbatch: int, group: int, rank: int, counts_LBE: np.ndarray) -> pa.RecordBatch:
    """Rows of the table `sequences` for one rank's microbatch: integer counts of each layer, sequence and expert."""
    L, B, E = counts_LBE.shape
    number = L * B
    columns = [
        np.full(number, step, np.int32),
        np.full(number, microbatch, np.int32),
        np.repeat(np.arange(L, dtype=np.int32), B),
        np.full(number, group, np.int32),
        np.full(number, rank, np.int32),
        np.tile(np.arange(B, dtype=np.int32), L),
        lists(counts_LBE.reshape(number, E)),
    ]
    return pa.record_batch([pa.array(c) if isinstance(c, np.ndarray) else c for c in columns], SEQUENCES_SCHEMA)


def lists(x: np.ndarray, dtype: type = np.int32) -> pa.ListArray:
    """An array [N, ...] as N flat lists."""
    number = x.shape[0]
    length = int(np.prod(x.shape[1:], dtype=np.int64))
    offsets = np.arange(number + 1, dtype=np.int32) * length
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(x, dtype).reshape(-1)))


def schema_with(info: TraceInfo, table: str) -> pa.Schema:
    """The table's schema with the trace's sizes in its metadata."""
    schema = LAYERS_SCHEMA if table == LAYERS else SEQUENCES_SCHEMA
    return schema.with_metadata(info.metadata(table))

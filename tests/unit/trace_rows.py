"""Rows of a small load trace, for tests."""

import numpy as np

from equipoise.observe.schema import TraceInfo
from equipoise.observe.tables import LayerRows

INFO = TraceInfo(num_layers=3, num_experts=6, num_experts_per_tok=2, ep_size=2, num_slots=1)


def rows(
    step: int, info: TraceInfo = INFO, microbatch: int = 0, has_matrices: bool = True, group: int = 0
) -> LayerRows:
    """Random loads; delivered as planned: the first expert's rows half at home, half in the last rank's slot."""
    rng = np.random.default_rng([step, microbatch])
    L, P, E, M = info.num_layers, info.ep_size, info.num_experts, info.num_masters
    load = rng.integers(0, 50, (L, P, E))
    slots = np.full((L, P * info.num_slots), -1)
    quota = np.zeros((L, P, info.num_physical_local), np.int64)
    quota[:, :, :M] = load.sum(1).reshape(L, P, M)
    if info.num_slots:
        slots[:, -1] = 0
        quota[:, -1, -1] = quota[:, 0, 0] // 2
        quota[:, 0, 0] -= quota[:, 0, 0] // 2
    seconds = rng.random((L, P, 5), np.float32)
    return LayerRows(step, microbatch, group, load, quota, slots, quota.reshape(L, -1), seconds, 1000, has_matrices)

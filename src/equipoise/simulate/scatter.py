"""Counts around their means, as draws scatter them; compiled by numba, since a study takes a billion of them."""

import numpy as np

from equipoise.balance.planner_numba import jit


@jit
def scatter(shares_NE, rows_P, noise_NPE):
    """int32 [N, P, E]: whole numbers near `shares * rows + noise * sqrt(shares * (1 - shares) * rows)`, none negative,
    that add up to each rank's `rows_P`. shares_NE, rows_P: float64; noise_NPE: float32, standard normal."""
    N, P, E = noise_NPE.shape
    load_NPE = np.empty((N, P, E), np.int32)
    wish_E = np.empty(E, np.float64)
    for n in range(N):
        for p in range(P):
            rows, total = rows_P[p], 0.0
            for e in range(E):
                share = shares_NE[n, e]
                wish = max(share * rows + noise_NPE[n, p, e] * np.sqrt(share * (1 - share) * rows), 0.0)
                wish_E[e] = wish
                total += wish
            scale, end, before = rows / max(total, 1e-30), 0.0, 0
            for e in range(E):
                end += wish_E[e] * scale
                now = int(end + 0.5)
                load_NPE[n, p, e] = now - before
                before = now
    return load_NPE

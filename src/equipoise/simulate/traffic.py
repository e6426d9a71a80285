"""How many rows every rank sends and receives under a plan, for many loads at once; compiled by numba.

The split is that of `balance/splits.py`: a physical expert first takes its own rank's tokens; what is left of an expert
lies on one line, sources in rank order against instances in order, the master first.

Shapes: B loads, P ranks, E experts, M masters and R slots per rank.
"""

import numpy as np

from equipoise.balance.planner_numba import in_parts, jit


def traffic(
    load_BPE: np.ndarray, slots_BS: np.ndarray, quota_BI: np.ndarray, domain_size: int, num_threads: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Rows that each rank sends to and receives from others: both int64 [B, P, 2], within its domain and beyond.

    load_BPE: integer rows of each source rank for each expert. slots_BS [B, P*R], quota_BI [B, P*(M+R)]: int32, as in
    `Placement`. domain_size: 0 for one domain.
    """
    B, P, _ = load_BPE.shape
    out_BPX, in_BPX = np.zeros((B, P, 2), np.int64), np.zeros((B, P, 2), np.int64)

    def run(part: slice) -> None:
        _traffic(load_BPE[part], slots_BS[part], quota_BI[part], domain_size or P, out_BPX[part], in_BPX[part])

    in_parts(run, B, num_threads)
    return out_BPX, in_BPX


@jit
def _traffic(load_BPE, slots_BS, quota_BI, domain, out_BPX, in_BPX):
    B, P, E = load_BPE.shape
    M = E // P
    S = slots_BS.shape[1]
    R = S // P
    rest_P = np.empty(P, np.int64)
    first_E = np.empty(E, np.int64)  # an expert's first slot, and each slot's next: lists in order of physical id
    next_S = np.empty(max(1, S), np.int64)
    for b in range(B):
        first_E[:] = -1
        for slot in range(S - 1, -1, -1):
            expert = slots_BS[b, slot]
            if expert >= 0:
                next_S[slot] = first_E[expert]
                first_E[expert] = slot
        for p in range(P):  # as if all rows went home
            for home in range(P):
                if p == home:
                    continue
                rows = np.int64(0)
                for expert in range(home * M, (home + 1) * M):
                    rows += load_BPE[b, p, expert]
                far = 1 if p // domain != home // domain else 0
                out_BPX[b, p, far] += rows
                in_BPX[b, home, far] += rows
        for expert in range(E):
            if first_E[expert] < 0:
                continue
            home = expert // M
            for p in range(P):
                if p != home:
                    rows = np.int64(load_BPE[b, p, expert])
                    far = 1 if p // domain != home // domain else 0
                    out_BPX[b, p, far] -= rows
                    in_BPX[b, home, far] -= rows
            for p in range(P):
                rest_P[p] = load_BPE[b, p, expert]
            slot = -1  # the master
            while True:  # every instance's own tokens first
                rank = home if slot < 0 else slot // R
                physical = expert % M if slot < 0 else M + slot % R
                rest_P[rank] -= min(rest_P[rank], quota_BI[b, rank * (M + R) + physical])
                slot = first_E[expert] if slot < 0 else next_S[slot]
                if slot < 0:
                    break
            source = 0
            slot = -1
            while True:
                rank = home if slot < 0 else slot // R
                physical = expert % M if slot < 0 else M + slot % R
                quota = quota_BI[b, rank * (M + R) + physical]
                room = quota - min(np.int64(load_BPE[b, rank, expert]), quota)
                while room > 0 and source < P:
                    rows = min(room, rest_P[source])
                    if rows > 0:
                        room -= rows
                        rest_P[source] -= rows
                        if source != rank:
                            far = 1 if source // domain != rank // domain else 0
                            out_BPX[b, source, far] += rows
                            in_BPX[b, rank, far] += rows
                    if rest_P[source] == 0:
                        source += 1
                slot = first_E[expert] if slot < 0 else next_S[slot]
                if slot < 0:
                    break

"""Which rank sends how many rows to which, by a plan: the rule of `balance/splits.py` for all ranks at once, in numpy.

It is written again here because that one comes with torch, which takes seconds to import, and hundreds of megabytes. A
test holds the two to each other.

Shapes: P ranks, E logical experts, M = E / P masters and R slots per rank, X = M + R physical experts of a rank.
"""

import numpy as np


def traffic(load_PE: np.ndarray, slot_expert_PR: np.ndarray, quota_PX: np.ndarray) -> np.ndarray:
    """int64 [P, P]: rows from each source rank to each computing rank.

    Each physical expert first takes its own rank's rows, as far as its quota goes. What is left of an expert lies on
    one line, in order of source ranks on the one side and of physical experts (the master first) on the other.
    """
    P, E = load_PE.shape
    M = E // P
    masters_PM = np.arange(E).reshape(P, M)
    hosted_PX = np.concatenate([masters_PM, slot_expert_PR], 1).astype(np.int64)
    order = [(p, x) for x_of in (range(M), range(M, hosted_PX.shape[1])) for p in range(P) for x in x_of]
    rest_PE = load_PE.astype(np.int64)
    rows_PP = np.zeros((P, P), np.int64)
    rest_PX = quota_PX.astype(np.int64)
    for p, x in order:
        expert = hosted_PX[p, x]
        if expert >= 0:
            own = min(rest_PE[p, expert], rest_PX[p, x])
            rows_PP[p, p] += own
            rest_PE[p, expert] -= own
            rest_PX[p, x] -= own
    ends_PE = rest_PE.cumsum(0)
    reached_E = np.zeros(E, np.int64)
    for p, x in order:
        expert = hosted_PX[p, x]
        if expert >= 0 and rest_PX[p, x]:
            first = reached_E[expert]
            reached_E[expert] = last = first + rest_PX[p, x]
            end_P = ends_PE[:, expert]
            begin_P = end_P - rest_PE[:, expert]
            rows_PP[:, p] += (np.minimum(end_P, last) - np.maximum(begin_P, first)).clip(min=0)
    return rows_PP

"""One layer of one step, as the page draws it.

Shapes: P ranks of the EP group, E logical experts, M masters and R replica slots per rank.
"""

from typing import Any

import numpy as np

from equipoise.observe.reader import LayerLoad
from equipoise.observe.schema import PHASES, TraceInfo
from equipoise.observe.view.buckets import plain
from equipoise.observe.view.traffic import traffic

MAX_RANKS = 128
"""Of a traffic matrix: with more, its squares are smaller than a pixel."""


def layer_detail(load: LayerLoad, info: TraceInfo) -> dict[str, Any]:
    """Rank loads always; stacks, replicas and traffic where the step was recorded with matrices."""
    detail: dict[str, Any] = {
        "rank_load": load.rank_load_P.tolist(),
        "rank_load_after": load.rank_load_after_P.tolist(),
        "copies": load.copies,
        "copied_bytes": load.copied_bytes,
        "phases": None,
        "stacks": None,
    }
    if load.seconds_PF is not None:
        detail["phases"] = {"names": list(PHASES), "seconds": plain(load.seconds_PF)}
    if load.load_PE is None or load.slot_expert_PR is None or load.delivered_Pm is None:
        return detail
    before, after = _home_stack(load.load_PE, info), _delivered_stack(load, info)
    replicas = [dict(zip(("expert", "home", "host", "rows"), row)) for row in _replicas(load, info)]
    detail["stacks"] = {"before": before, "after": after}
    detail["replicas"] = sorted(replicas, key=lambda r: (-r["rows"], r["expert"], r["host"]))
    detail["hosted"] = _hosted(replicas, info.ep_size)
    detail["traffic"] = None
    if info.ep_size <= MAX_RANKS:
        traffic_PP = load.load_PE.reshape(info.ep_size, info.ep_size, info.num_masters).sum(2)
        detail["traffic"] = {"before": traffic_PP.tolist(), "after": _traffic_after(load, info)}
    return detail


def _home_stack(load_PE: np.ndarray, info: TraceInfo) -> dict[str, list[int]]:
    """Rows of each expert on its home rank."""
    experts = np.arange(info.num_experts)
    return _stack(experts // info.num_masters, experts, load_PE.sum(0))


def _delivered_stack(load: LayerLoad, info: TraceInfo) -> dict[str, list[int]]:
    """Rows of each physical expert on its rank."""
    assert load.delivered_Pm is not None
    assert load.slot_expert_PR is not None
    physical_Pm = np.concatenate(
        [np.arange(info.num_experts).reshape(info.ep_size, -1), load.slot_expert_PR], axis=1, dtype=np.int64
    )
    ranks_Pm = np.broadcast_to(np.arange(info.ep_size)[:, None], physical_Pm.shape)
    used = physical_Pm >= 0
    return _stack(ranks_Pm[used], physical_Pm[used], load.delivered_Pm[used])


def _stack(ranks: np.ndarray, experts: np.ndarray, rows: np.ndarray) -> dict[str, list[int]]:
    """Pieces from the largest to the smallest of each rank; those without rows are left out."""
    ranks, experts, rows = (x[rows > 0] for x in (ranks, experts, rows))
    order = np.lexsort((experts, -rows, ranks))
    return {"rank": ranks[order].tolist(), "expert": experts[order].tolist(), "rows": rows[order].tolist()}


def _replicas(load: LayerLoad, info: TraceInfo) -> list[tuple[int, int, int, int]]:
    """(logical expert, home rank, hosting rank, rows delivered)."""
    assert load.slot_expert_PR is not None
    assert load.delivered_Pm is not None
    found = []
    for host, slot in np.argwhere(load.slot_expert_PR >= 0).tolist():
        expert = int(load.slot_expert_PR[host, slot])
        found.append((expert, expert // info.num_masters, host, int(load.delivered_Pm[host, info.num_masters + slot])))
    return found


def _hosted(replicas: list[dict[str, int]], num_ranks: int) -> list[list[int]] | None:
    """Rows [home rank, hosting rank] that replicas compute."""
    if num_ranks > MAX_RANKS:
        return None
    rows_PP = np.zeros((num_ranks, num_ranks), np.int64)
    for replica in replicas:
        rows_PP[replica["home"], replica["host"]] += replica["rows"]
    return rows_PP.tolist()


def _traffic_after(load: LayerLoad, info: TraceInfo) -> list[list[int]] | None:
    """Rows [source rank, computing rank], by the rule that splits a plan's quotas over source ranks."""
    if load.quota_Pm is None or info.source != "equipoise":
        return None
    assert load.load_PE is not None
    assert load.slot_expert_PR is not None
    return traffic(load.load_PE, load.slot_expert_PR, load.quota_Pm).tolist()

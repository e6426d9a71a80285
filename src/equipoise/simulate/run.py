"""`simulate`: loads through a planner and the cost model, one row for each load; `summarize`: one row for all of them.

Shapes: N loads, P ranks, E experts, M masters and R slots per rank.
"""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from equipoise.balance.own_planner import check_own
from equipoise.balance.plan import Placement, empty_placement
from equipoise.balance.protocol import Planner, PlannerSettings, check_sizes
from equipoise.balance.registry import planner_maker
from equipoise.errors import ConfigError, EquipoiseError
from equipoise.simulate.cost import LayerCost, LayerRows, layer_cost
from equipoise.simulate.hardware import ExpertSize, Hardware
from equipoise.simulate.loads import LoadBlock

if TYPE_CHECKING:
    import pandas as pd

OFF, FORCED = "off", "forced"
EXACT_LOAD = "exact_load"
"""The project's planner, which plans many loads at once."""

Loads = Iterable[LoadBlock] | np.ndarray | torch.Tensor
PlannerChoice = str | Planner | Callable[[], Planner]


def simulate(
    loads: Loads,
    planner: PlannerChoice = EXACT_LOAD,
    settings: PlannerSettings | None = None,
    *,
    hardware: Hardware,
    expert: ExpertSize,
) -> "pd.DataFrame":
    """Predicts each load's imbalance, traffic, time and memory under a planner.

    Args:
        loads: blocks (`simulate.loads`), or load matrices [N, P, E]: rows of each source rank for each expert.
        planner: a name (`exact_load`, `ultraep`, ..., or my_file.py:function); a planner of the public protocol, that
            is a function of (load_PE, settings); `off` for none; or `forced` for perfectly even routing, the ceiling.
            A class is instantiated once for each layer, whose loads it then sees in order.
        settings: what the planner may use.
        hardware, expert: the machine, and the size of an expert.

    Returns:
        One row for each load: step, microbatch, layer; rank_imbalance and rank_imbalance_after (largest over mean rank
        load); copies, busiest_copies (of one rank); remote_share of the rows that leave their rank, far_share of those
        that leave the domain; rows of all ranks; largest_rows of a rank; layer_s, seconds of the layer's forward and
        backward, and its parts experts_s, exchange_s, source_s, balance_s, copies_s.

    Raises:
        ConfigError: sizes that do not divide, unknown planners, loads of another shape.
        PlanError: a planner of your own broke an invariant.
    """
    (frame,) = simulate_all(loads, [(planner, settings or PlannerSettings())], hardware=hardware, expert=expert)
    return frame


def simulate_all(
    loads: Loads, tries: Sequence[tuple[PlannerChoice, PlannerSettings]], *, hardware: Hardware, expert: ExpertSize
) -> "list[pd.DataFrame]":
    """`simulate` for several planners and settings, in one pass over the loads."""
    pandas = _pandas()
    plannings = [_Planning(planner, settings) for planner, settings in tries]

    def work(block: LoadBlock) -> list[dict[str, np.ndarray]]:
        return [_simulate_block(block, planning, hardware, expert) for planning in plannings]

    # A planner that learns must see the loads in order; and plain Python gains nothing by threads.
    is_parallel = all(planning.is_off or planning.is_batched for planning in plannings)
    parts = list(_in_order(work, _blocks(loads), len(os.sched_getaffinity(0)) if is_parallel else 1))
    if not parts:
        raise ConfigError("no loads to simulate: the iterable is empty")
    return [
        pandas.DataFrame({name: np.concatenate([part[i][name] for part in parts]) for name in parts[0][i]})
        for i in range(len(plannings))
    ]


def _in_order(work: Callable[[LoadBlock], Any], blocks: Iterable[LoadBlock], threads: int) -> Iterator[Any]:
    """Results of the blocks in their order; a few of them are in memory at a time."""
    if threads == 1:
        yield from map(work, blocks)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future] = deque()
        for block in blocks:
            waiting.append(pool.submit(work, block))
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def summarize(frame: "pd.DataFrame", hardware: Hardware, expert: ExpertSize, num_slots: int) -> dict[str, Any]:
    """Totals of `simulate`'s rows: `step_s` is a microbatch through all layers, with the rest of the step that the
    hardware's calibration knows."""
    num_microbatches = len(frame[["step", "microbatch"]].drop_duplicates())
    layers_s = float(frame["layer_s"].sum()) / num_microbatches
    rows = frame.groupby(["step", "microbatch"])["largest_rows"].sum().max()
    return {
        "loads": len(frame),
        "rows": float(frame["rows"].mean()),
        "layer_ms": 1e3 * float(frame["layer_s"].mean()),
        "step_s": layers_s + hardware.rest_s,
        "rank_imbalance": float(frame["rank_imbalance"].mean()),
        "rank_imbalance_after": float(frame["rank_imbalance_after"].mean()),
        "rank_imbalance_after_p95": float(frame["rank_imbalance_after"].quantile(0.95)),
        "copies": float(frame["copies"].mean()),
        "remote_share": float(frame["remote_share"].mean()),
        **{part: float(frame[part].sum()) / num_microbatches for part in PARTS},
        "activation_bytes": int(rows) * expert.saved_row_bytes,
        "slot_bytes": num_slots * expert.slot_bytes,
    }


PARTS = ("experts_s", "exchange_s", "source_s", "balance_s", "copies_s")


class _Planning:
    """A planner's answers for blocks of loads."""

    def __init__(self, choice: PlannerChoice, settings: PlannerSettings) -> None:
        self.settings = settings
        self.is_forced = isinstance(choice, str) and choice == FORCED
        self.is_off = self.is_forced or (isinstance(choice, str) and choice in (OFF, "none"))
        self.is_batched = isinstance(choice, str) and choice == EXACT_LOAD
        self._is_own = not isinstance(choice, str) or ":" in choice
        self._planners: dict[int, Planner] = {}
        if isinstance(choice, str) and not self.is_off:
            self._make: Callable[[], Planner] = planner_maker(choice)
        elif isinstance(choice, type):
            self._make = choice
        else:
            self._make = lambda: choice  # type: ignore[assignment,return-value]

    @property
    def num_slots(self) -> int:
        return 0 if self.is_off else self.settings.num_slots

    def __call__(self, block: LoadBlock) -> Placement:
        _, P, E = block.load_NPE.shape
        load_NE = torch.from_numpy(block.load_NE)
        if self.is_off:
            return empty_placement(load_NE, P, 0)
        if self.is_batched:
            from equipoise.balance.planner_numba import plan_batch

            return plan_batch(load_NE, P, self.settings, num_threads=1)
        placements = []
        for layer, load_PE in zip(block.layers_N.tolist(), block.load_NPE):
            if layer not in self._planners:
                self._planners[layer] = self._make()
            matrix = torch.from_numpy(load_PE.astype(np.int64))
            placement = self._planners[layer](matrix, self.settings)
            if self._is_own:
                check_own(placement, matrix, self.settings)
            placements.append(placement)
        slots = torch.stack([p.slot_expert for p in placements])
        return Placement(slots, torch.stack([p.quota for p in placements]), P, E)


def _blocks(loads: Loads) -> Iterable[LoadBlock]:
    if isinstance(loads, (np.ndarray, torch.Tensor)):
        matrices = np.asarray(loads)
        if matrices.ndim != 3 or not np.issubdtype(matrices.dtype, np.integer):
            raise ConfigError(
                f"loads are {matrices.dtype} of shape {matrices.shape}; expected integers [N, P, E]: rows of each "
                "source rank for each expert"
            )
        return [LoadBlock(0, 0, np.arange(len(matrices)), matrices)]
    return loads


def plan_block(block: LoadBlock, planner: PlannerChoice, settings: PlannerSettings) -> LayerRows:
    """What each rank has to do in the block's loads, under a planner as `simulate` takes it."""
    return _plan_block(block, _Planning(planner, settings))


def _plan_block(block: LoadBlock, planning: _Planning) -> LayerRows:
    load_NPE = np.ascontiguousarray(block.load_NPE)
    N, P, E = load_NPE.shape
    domain_size = planning.settings.domain_size
    check_sizes(E, P, planning.settings)
    sent_NP = block.sent_NP
    placement = planning(block)
    slots_NS = placement.slot_expert.numpy()
    if planning.is_forced:
        rows_NPm = np.broadcast_to((sent_NP.sum(1) / E)[:, None, None], (N, P, E // P))
        out_NPX, in_NPX = _even_traffic(sent_NP, domain_size or P)
    else:
        rows_NPm = placement.quota.numpy().reshape(N, P, -1)
        out_NPX, in_NPX = _traffic(load_NPE, slots_NS, placement.quota.numpy(), domain_size)
    copies_NPX = _copies(slots_NS, P, placement.num_slots, E // P)
    return LayerRows(rows_NPm, sent_NP, out_NPX, in_NPX, copies_NPX, not planning.is_off)


def _simulate_block(
    block: LoadBlock, planning: _Planning, hardware: Hardware, expert: ExpertSize
) -> dict[str, np.ndarray]:
    N, P, E = block.load_NPE.shape
    before_NP = block.load_NE.reshape(N, P, E // P).sum(2)
    rows = _plan_block(block, planning)
    cost = layer_cost(hardware, expert, rows)
    return _columns(block, before_NP, rows.rows_BPm.sum(2), rows.out_BPX, rows.copies_BPX, cost)


def _columns(
    block: LoadBlock,
    before_NP: np.ndarray,
    after_NP: np.ndarray,
    out_NPX: np.ndarray,
    copies_NPX: np.ndarray,
    cost: LayerCost,
) -> dict[str, np.ndarray]:
    N = len(before_NP)
    total_N = np.maximum(before_NP.sum(1), 1)
    return {
        "step": np.full(N, block.step),
        "microbatch": np.full(N, block.microbatch),
        "layer": np.asarray(block.layers_N),
        "rank_imbalance": _imbalance(before_NP),
        "rank_imbalance_after": _imbalance(after_NP),
        "copies": copies_NPX[..., 1].sum(1),
        "busiest_copies": copies_NPX.max((1, 2)),
        "remote_share": out_NPX.sum((1, 2)) / total_N,
        "far_share": out_NPX[..., 1].sum(1) / total_N,
        "rows": before_NP.sum(1),
        "largest_rows": after_NP.max(1),
        "layer_s": cost.total,
        "experts_s": cost.experts,
        "exchange_s": cost.exchange,
        "source_s": cost.source,
        "balance_s": cost.balance,
        "copies_s": cost.copies,
    }


def _imbalance(load_NP: np.ndarray) -> np.ndarray:
    mean_N = load_NP.mean(1)
    return np.where(mean_N > 0, load_NP.max(1) / np.maximum(mean_N, 1e-30), 1.0)


def _copies(slots_NS: np.ndarray, num_ranks: int, num_slots: int, num_masters: int) -> np.ndarray:
    """[N, P, 2]: replicas that each rank sends and receives."""
    N = len(slots_NS)
    if not num_slots:
        return np.zeros((N, num_ranks, 2), np.int64)
    load, slot = np.nonzero(slots_NS >= 0)
    counted = [
        np.bincount(load * num_ranks + rank, minlength=N * num_ranks).reshape(N, num_ranks)
        for rank in (slots_NS[load, slot] // num_masters, slot // num_slots)
    ]
    return np.stack(counted, 2)


def _traffic(
    load_NPE: np.ndarray, slots_NS: np.ndarray, quota_NI: np.ndarray, domain_size: int
) -> tuple[np.ndarray, np.ndarray]:
    from equipoise.simulate.traffic import traffic

    return traffic(load_NPE, slots_NS, quota_NI, domain_size, num_threads=1)


def _even_traffic(sent_NP: np.ndarray, domain_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Where every rank sends the same part of its rows to every rank."""
    N, P = sent_NP.shape
    out_NPX = np.stack([sent_NP * ((domain_size - 1) / P), sent_NP * ((P - domain_size) / P)], 2)
    domain_NP = sent_NP.reshape(N, -1, domain_size).sum(2).repeat(domain_size, 1)
    total_N1 = sent_NP.sum(1, keepdims=True)
    in_NPX = np.stack([(domain_NP - sent_NP) / P, (total_N1 - domain_NP) / P], 2)
    return out_NPX, in_NPX


def _pandas() -> Any:
    """The package, after a look whether all that the simulator needs is there."""
    missing = [name for name in ("numba", "pandas") if name not in sys.modules and find_spec(name) is None]
    if missing:
        raise EquipoiseError(f"the simulator needs {' and '.join(missing)}: pip install 'equipoise[simulate]'")
    import pandas

    return pandas

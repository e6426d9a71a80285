"""The optimum for small cases, as a mixed-integer program solved by HiGHS (scipy, imported when used)."""

from typing import Any

import torch

from equipoise.balance.bounds import floor_load, rank_load
from equipoise.balance.plan import Copy, Placement, placement_from_copies
from equipoise.balance.protocol import PlannerSettings, check_sizes
from equipoise.errors import ConfigError


class ExactPlanner:
    """Minimises the largest rank load. Tolerance, minimum quota and copy time are not considered.

    limit_s: HiGHS gives its best so far after this many seconds, for each of two solves: the first chooses the hosts,
    the second whole numbers of tokens for them. Meant for some 100 pairs of expert and rank; see `optimal_load`.
    """

    def __init__(self, limit_s: float = 20.0) -> None:
        self.limit_s = limit_s

    def __call__(self, load_PE: torch.Tensor, settings: PlannerSettings) -> Placement:
        num_ranks = load_PE.shape[0]
        check_sizes(load_PE.shape[1], num_ranks, settings)
        load = load_PE.sum(0).tolist()
        copies: list[Copy] = []
        pairs = _pairs(load, num_ranks, settings)
        if settings.num_slots and pairs:
            used = _solve(load, num_ranks, settings, pairs, self.limit_s).x[len(pairs) : 2 * len(pairs)]
            chosen = [pair for pair, y in zip(pairs, used) if y > 0.5]
            result = _solve(load, num_ranks, settings, chosen, self.limit_s, whole=True)
            copies = [(e, rank, round(x)) for (e, rank), x in zip(chosen, result.x) if round(x) > 0]
        return placement_from_copies(load, num_ranks, settings.num_slots, copies, load_PE.device)


def optimal_load(load_E: torch.Tensor, num_ranks: int, settings: PlannerSettings, limit_s: float = 20.0) -> float:
    """A lower bound on the largest rank load that is the optimum when HiGHS proved it within `limit_s`."""
    check_sizes(load_E.shape[0], num_ranks, settings)
    load = load_E.tolist()
    pairs = _pairs(load, num_ranks, settings)
    if not settings.num_slots or not pairs:
        return float(rank_load(load_E[None], num_ranks).max())
    return float(_solve(load, num_ranks, settings, pairs, limit_s).mip_dual_bound)


def _pairs(load: list[int], num_ranks: int, settings: PlannerSettings) -> list[tuple[int, int]]:
    """(expert, foreign rank) that may be joined by a replica."""
    num_masters, size = len(load) // num_ranks, settings.domain_size or num_ranks
    return [
        (expert, rank)
        for expert, tokens in enumerate(load)
        for rank in range(num_ranks)
        if tokens and rank != expert // num_masters and rank // size == expert // num_masters // size
    ]


def _solve(
    load: list[int],
    num_ranks: int,
    settings: PlannerSettings,
    pairs: list[tuple[int, int]],
    limit_s: float,
    whole: bool = False,
) -> Any:
    """Columns: tokens x of each pair, whether y it is used (not when `whole`: then all are), the largest load t.

    Minimise t; per rank: home load - x out + x in <= t; per expert: sum of x <= its tokens; per pair: x <= tokens * y;
    per rank: sum of y <= R. With `whole`, x and t are integers.
    """
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_matrix
    except ImportError as error:
        raise ConfigError("the exact planner needs scipy: pip install 'equipoise[bench]'") from error
    num_masters, count = len(load) // num_ranks, len(pairs)
    last = count if whole else 2 * count
    entries: list[tuple[int, int, float]] = []
    upper: list[float] = []
    for rank in range(num_ranks):
        row = len(upper)
        for column, (expert, host) in enumerate(pairs):
            if host == rank or expert // num_masters == rank:
                entries.append((row, column, 1.0 if host == rank else -1.0))
        entries.append((row, last, -1.0))
        upper.append(-float(sum(load[rank * num_masters : (rank + 1) * num_masters])))
    for expert in sorted({expert for expert, _ in pairs}):
        entries += [(len(upper), column, 1.0) for column, pair in enumerate(pairs) if pair[0] == expert]
        upper.append(float(load[expert]))
    if not whole:
        for column, (expert, _) in enumerate(pairs):
            entries += [(len(upper), column, 1.0), (len(upper), count + column, -float(load[expert]))]
            upper.append(0.0)
        for rank in range(num_ranks):
            entries += [(len(upper), count + column, 1.0) for column, pair in enumerate(pairs) if pair[1] == rank]
            upper.append(float(settings.num_slots))
    rows, columns, values = zip(*entries)
    matrix = coo_matrix((values, (rows, columns)), shape=(len(upper), last + 1)).tocsr()
    cost = np.zeros(last + 1)
    cost[last] = 1.0
    is_integer = np.ones(last + 1) if whole else np.r_[np.zeros(count), np.ones(count), 0]
    low = np.r_[np.zeros(last), float(floor_load(torch.tensor([load]), num_ranks, settings.domain_size))]
    high = np.r_[np.full(count, np.inf), np.ones(last - count), np.inf]
    result = milp(
        cost,
        constraints=LinearConstraint(matrix, -np.inf, upper),
        integrality=is_integer,
        bounds=Bounds(low, high),
        options={"time_limit": limit_s, "mip_rel_gap": 1e-5},
    )
    if result.x is None:
        raise ConfigError(f"HiGHS found no placement within {limit_s} s ({result.message}); raise limit_s")
    return result

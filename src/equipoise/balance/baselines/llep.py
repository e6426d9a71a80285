"""Least-loaded expert parallelism (arXiv 2601.17111; SalesforceAIResearch/LeastLoadedEP), in plain Python.

Experts, largest first, stay at home while it has room below the cap; the rest spills to the least loaded ranks. The
original knows no slot limit: given enough slots this is it, given fewer, ranks without a free one are passed over.
"""

import torch

from equipoise.balance.plan import Copy, Placement, placement_from_copies
from equipoise.balance.protocol import PlannerSettings, check_sizes


class LeastLoadedPlanner:
    """alpha: the cap over the mean rank load. min_chunk: smaller spills are avoided unless they finish the expert.

    threshold: below this ratio of largest to mean rank load nothing is moved.
    """

    def __init__(self, alpha: float = 1.0, min_chunk: int = 1024, threshold: float = 1.3) -> None:
        self.alpha, self.min_chunk, self.threshold = alpha, min_chunk, threshold

    def __call__(self, load_PE: torch.Tensor, settings: PlannerSettings) -> Placement:
        num_ranks = load_PE.shape[0]
        check_sizes(load_PE.shape[1], num_ranks, settings)
        load = load_PE.sum(0).tolist()
        num_masters = len(load) // num_ranks
        pending = [sum(load[rank * num_masters : (rank + 1) * num_masters]) for rank in range(num_ranks)]
        before = max(pending)
        copies: list[Copy] = []
        if before * num_ranks > self.threshold * sum(load):
            copies = self._spill(load, pending, num_masters, settings)
        placement = placement_from_copies(load, num_ranks, settings.num_slots, copies, load_PE.device)
        if int(placement.rank_load.max()) > before:  # forced spills can overfill a rank; then it is better undone
            return placement_from_copies(load, num_ranks, settings.num_slots, [], load_PE.device)
        return placement

    def _spill(self, load: list[int], pending: list[int], num_masters: int, settings: PlannerSettings) -> list[Copy]:
        num_ranks, size = len(pending), settings.domain_size or len(pending)
        cap = int(self.alpha * (sum(load) // num_ranks))
        assigned = [0] * num_ranks
        free = [settings.num_slots] * num_ranks
        copies: list[Copy] = []
        for expert in sorted(range(len(load)), key=lambda e: (-load[e], e)):
            home = expert // num_masters
            pending[home] -= load[expert]
            kept = min(load[expert], max(cap - assigned[home] - pending[home], 0))
            assigned[home] += kept
            rest = load[expert] - kept
            first = home // size * size
            able = [rank for rank in range(first, first + size) if rank != home and free[rank]]
            able.sort(key=lambda r: (assigned[r] + pending[r], r))
            for position, rank in enumerate(able):
                if rest == 0:
                    break
                room = cap - assigned[rank] - pending[rank]
                chunk = min(rest, room)
                nobody = position == len(able) - 1 and rest == load[expert] - kept
                if nobody and chunk < rest:
                    rank, chunk = able[0], rest  # nobody accepts: all of it goes to the least loaded
                elif chunk <= 0 or (chunk < self.min_chunk and chunk < rest):
                    continue
                copies.append((expert, rank, chunk))
                free[rank] -= 1
                assigned[rank] += chunk
                rest -= chunk
            assigned[home] += rest
        return copies

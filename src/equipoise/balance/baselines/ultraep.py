"""UltraEP's planner (github.com/Dots-Infra/UltraEP, v1.0.0) as its public description goes, in plain Python.

A greedy build for a cap on the rank load: overloaded ranks, heaviest first, export their experts, largest first, each
part to the rank with the most room. An overloaded rank never receives. Three caps near the mean are tried and the first
that works is taken; otherwise the cap is searched between them and the largest rank load.
"""

import torch

from equipoise.balance.plan import Copy, Placement, placement_from_copies
from equipoise.balance.protocol import PlannerSettings, check_sizes


class UltraEPPlanner:
    """`settings.tolerance` is its epsilon. Each rank keeps at least one token of an expert at home.

    min_tokens: least tokens of a replica in the fallback search; the usual path has a floor of its own, as in the
    original (the need of the source over the number of ranks that could take some).
    """

    def __init__(self, min_tokens: int = 1024) -> None:
        self.min_tokens = min_tokens

    def __call__(self, load_PE: torch.Tensor, settings: PlannerSettings) -> Placement:
        num_ranks = load_PE.shape[0]
        check_sizes(load_PE.shape[1], num_ranks, settings)
        load = load_PE.sum(0).tolist()
        num_masters, size = len(load) // num_ranks, settings.domain_size or num_ranks
        copies: list[Copy] = []
        for first in range(0, num_ranks, size):
            ranks = range(first, first + size)
            home = [load[rank * num_masters : (rank + 1) * num_masters] for rank in ranks]
            for giver, local, receiver, tokens in self._domain(home, settings):
                copies.append(((first + giver) * num_masters + local, first + receiver, tokens))
        return placement_from_copies(load, num_ranks, settings.num_slots, copies, load_PE.device)

    def _domain(self, home: list[list[int]], settings: PlannerSettings) -> list[tuple[int, int, int, int]]:
        loads = [sum(tokens) for tokens in home]
        low, high = -(-sum(loads) // len(loads)), max(loads)
        if low >= high:
            return []
        cap = -(-low * round((1 + settings.tolerance) * 1000) // 1000)
        step = -(-high // 100)
        for attempt in range(3):
            found = _build(home, loads, cap + attempt * step, settings.num_slots, None)
            if found is not None:
                return found
        best: list[tuple[int, int, int, int]] = []
        low = max(low, cap)
        while low < high:  # four caps at a time, as its four warps do
            width = high - low
            probes = sorted({low + width * k // 4 for k in range(4)}) if width > 4 else list(range(low, high))
            previous = low - 1
            for probe in probes:
                found = _build(home, loads, probe, settings.num_slots, self.min_tokens)
                if found is not None:
                    high, best = probe, found
                    low = previous + 1
                    break
                previous = probe
            else:
                low = probes[-1] + 1
        return best


def _build(
    home: list[list[int]], loads: list[int], cap: int, num_slots: int, min_tokens: int | None
) -> list[tuple[int, int, int, int]] | None:
    """(giver, local expert, receiver, tokens) so that no rank exceeds `cap`, or None. None as the floor: dynamic."""
    room = [max(cap - load, 0) for load in loads]
    if sum(max(load - cap, 0) for load in loads) > sum(room):
        return None
    free = [num_slots] * len(loads)
    moves: list[tuple[int, int, int, int]] = []
    for giver in sorted((r for r in range(len(loads)) if loads[r] > cap), key=lambda r: (-loads[r], r)):
        need = loads[giver] - cap
        for local in sorted(range(len(home[giver])), key=lambda m: (-home[giver][m], m)):
            left = home[giver][local] - 1
            taken: set[int] = set()
            while need > 0 and left > 0:
                able = [r for r in range(len(loads)) if room[r] and free[r] and r not in taken]
                if not able:
                    break
                floor = max(1, -(-need // len(able))) if min_tokens is None else min_tokens
                receiver = max(able, key=lambda r: (room[r], -r))
                tokens = min(need, room[receiver], left)
                if tokens < floor:
                    break
                moves.append((giver, local, receiver, tokens))
                room[receiver] -= tokens
                free[receiver] -= 1
                taken.add(receiver)
                need -= tokens
                left -= tokens
            if need == 0:
                break
        if need > 0:
            return None
    return moves

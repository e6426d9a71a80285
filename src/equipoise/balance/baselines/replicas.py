"""Baselines whose replicas share their expert's tokens equally, and no balancing at all.

Which experts get replicas, and where, follows EPLB (github.com/deepseek-ai/EPLB): the next replica goes to the expert
with the most tokens per instance, then the heaviest go to the lightest rank with room. EPLB also moves the first
instance of every expert; here the masters stay at home, as they must in training.
"""

import torch

from equipoise.balance.plan import Copy, Placement, placement_from_copies
from equipoise.balance.protocol import PlannerSettings, check_sizes


class NoPlanner:
    """Every expert computes its own tokens at home."""

    def __call__(self, load_PE: torch.Tensor, settings: PlannerSettings) -> Placement:
        check_sizes(load_PE.shape[1], load_PE.shape[0], settings)
        return placement_from_copies(load_PE.sum(0).tolist(), load_PE.shape[0], settings.num_slots, [], load_PE.device)


class EqualSplitPlanner:
    """Replicas for the load at hand, tokens split equally between an expert's instances."""

    def __call__(self, load_PE: torch.Tensor, settings: PlannerSettings) -> Placement:
        check_sizes(load_PE.shape[1], load_PE.shape[0], settings)
        load = load_PE.sum(0).tolist()
        hosts = place_replicas(load, load_PE.shape[0], settings)
        return _split_equally(load, hosts, load_PE, settings)


class HistoryPlanner:
    """EPLB as it is used: replicas from the mean of earlier loads, equal split of the load at hand.

    decay: weight of the history at each call. The first call, without history, places nothing. One object per layer.
    """

    def __init__(self, decay: float = 0.9) -> None:
        self.decay = decay
        self.history_E: list[float] | None = None

    def __call__(self, load_PE: torch.Tensor, settings: PlannerSettings) -> Placement:
        check_sizes(load_PE.shape[1], load_PE.shape[0], settings)
        load = load_PE.sum(0).tolist()
        hosts = place_replicas(self.history_E, load_PE.shape[0], settings) if self.history_E else []
        if self.history_E is None:
            self.history_E = [float(tokens) for tokens in load]
        else:
            self.history_E = [self.decay * old + (1 - self.decay) * new for old, new in zip(self.history_E, load)]
        return _split_equally(load, hosts, load_PE, settings)


def place_replicas(load: list, num_ranks: int, settings: PlannerSettings) -> list[tuple[int, int]]:
    """(expert, rank) of each replica for a load: first how many of each expert, then where."""
    num_masters, size = len(load) // num_ranks, settings.domain_size or num_ranks
    instances = [1] * len(load)
    spare = [settings.num_slots * size] * (num_ranks // size)
    domain = [expert // num_masters // size for expert in range(len(load))]
    while True:
        able = [e for e, n in enumerate(instances) if n < size and spare[domain[e]] and load[e] > 0]
        if not able:
            break
        expert = max(able, key=lambda e: (load[e] / instances[e], -e))
        instances[expert] += 1
        spare[domain[expert]] -= 1
    share = [tokens / n for tokens, n in zip(load, instances)]
    rank_share = [sum(share[rank * num_masters : (rank + 1) * num_masters]) for rank in range(num_ranks)]
    free = [settings.num_slots] * num_ranks
    hosts: list[tuple[int, int]] = []
    for expert in sorted(range(len(load)), key=lambda e: (-share[e], e)):
        home = expert // num_masters
        taken = {home}
        for _ in range(instances[expert] - 1):
            first = domain[expert] * size
            able = [rank for rank in range(first, first + size) if free[rank] and rank not in taken]
            if not able:
                break
            rank = min(able, key=lambda r: (rank_share[r], r))
            taken.add(rank)
            free[rank] -= 1
            rank_share[rank] += share[expert]
            hosts.append((expert, rank))
    return hosts


def _split_equally(
    load: list[int], hosts: list[tuple[int, int]], load_PE: torch.Tensor, settings: PlannerSettings
) -> Placement:
    num_ranks = load_PE.shape[0]
    instances: dict[int, int] = {}
    for expert, _ in hosts:
        instances[expert] = instances.get(expert, 1) + 1
    copies: list[Copy] = [(expert, rank, load[expert] // instances[expert]) for expert, rank in hosts]
    return placement_from_copies(load, num_ranks, settings.num_slots, copies, load_PE.device)

"""The planner as one would tell it: every candidate runs to its end, nothing is pruned, dictionaries throughout.

Reference for `equipoise.balance`: the fast forms must give the same placements, bit for bit.
"""

from math import ceil, floor

from equipoise.balance.protocol import PlannerSettings
from equipoise.balance.rules import TARGET_STEPS, VARIANTS, Variant


def slow_bound(load: list[int], num_ranks: int, num_slots: int) -> int:
    """The first load, counted upwards, at which ranks below can take what the ranks above have too much."""
    M = len(load) // num_ranks
    ranks = [sum(load[r * M : (r + 1) * M]) for r in range(num_ranks)]
    hosted = sum(sorted(load)[-num_slots:]) if num_slots else 0
    level = min(ranks)
    while sum(min(level - x, hosted) for x in ranks if x < level) < sum(x - level for x in ranks if x > level):
        level += 1
    return level


def slow_plan(load: list[int], num_ranks: int, settings: PlannerSettings) -> dict[tuple[int, int], int]:
    """Tokens of each replica, {(rank, slot): ...} as {(expert, rank): tokens} in the order in which they were made."""
    M = len(load) // num_ranks
    home = {e: load[e] for e in range(len(load))}
    ranks = [sum(load[r * M : (r + 1) * M]) for r in range(num_ranks)]
    size = settings.domain_size or num_ranks
    largest_domain = max(sum(ranks[d : d + size]) for d in range(0, num_ranks, size))
    mean = ceil(largest_domain / size)
    tolerated = max(mean, floor(largest_domain * (10**6 + settings.tolerance_ppm) / (size * 10**6)))
    start = max(tolerated, mean, slow_bound(load, num_ranks, settings.num_slots))
    targets = [tolerated] + [start + start * step // 2**20 for step in TARGET_STEPS]

    results = [((max(max(ranks), tolerated), 0, 0, 0), {})]
    for number, target in enumerate(targets, start=1):
        for index, variant in enumerate(VARIANTS):
            after, copies = slow_run(dict(home), list(ranks), target, variant, settings, M)
            sent = [sum(e // M == r for e, _ in copies) for r in range(num_ranks)]
            received = [sum(host == r for _, host in copies) for r in range(num_ranks)]
            score = max(max(after), target) + settings.copy_tokens * max(sent + received)
            results.append(((score, number, len(copies), index), copies))
    return min(results, key=lambda result: result[0])[1]


def slow_run(
    home: dict[int, int], ranks: list[int], target: int, variant: Variant, settings: PlannerSettings, M: int
) -> tuple[list[int], dict[tuple[int, int], int]]:
    """One candidate: rank loads at its end, and its copies."""
    everyone = range(len(ranks))
    free = [settings.num_slots for _ in everyone]
    copies: dict[tuple[int, int], int] = {}
    together = None  # giver and receiver that stay a pair
    while max(ranks) > target:
        overloaded = [r for r in everyone if ranks[r] > target]
        giver = min(overloaded, key=lambda r: (-variant.giver * ranks[r], r))
        if together:
            giver = together[0]
        experts = [e for e in home if e // M == giver]
        want = max(ranks[giver] - target, settings.min_tokens)
        room = {r: target - ranks[r] for r in everyone if free[r] and ranks[r] < target}
        if settings.domain_size:
            room = {r: x for r, x in room.items() if r // settings.domain_size == giver // settings.domain_size}
        if not room:
            break
        by_most_room = min(room, key=lambda r: (-room[r], r))
        if variant.receiver == "large":
            candidates = []
        elif variant.receiver == "small":
            candidates = [r for r in room if room[r] >= settings.min_tokens]
        else:
            candidates = [r for r in room if room[r] >= min(want, max(home[e] for e in experts))]
        receiver = min(candidates, key=lambda r: (room[r], r)) if candidates else by_most_room
        if together:
            receiver = together[1]
        to_the_brim = variant.fill < 0 or free[receiver] <= variant.fill
        tokens = room[receiver] if to_the_brim else min(want, room[receiver])
        enough = [e for e in experts if home[e] >= tokens]
        expert = min(enough, key=lambda e: (home[e], e)) if enough else min(experts, key=lambda e: (-home[e], e))
        tokens = min(tokens, home[expert])
        if tokens < settings.min_tokens:
            break
        assert (expert, receiver) not in copies, "an expert moved to a rank twice"
        copies[expert, receiver] = tokens
        home[expert] -= tokens
        ranks[giver] -= tokens
        ranks[receiver] += tokens
        free[receiver] -= 1
        is_unfinished = variant.fill < 0 and target - ranks[receiver] >= settings.min_tokens and free[receiver] > 0
        together = (giver, receiver) if is_unfinished else None
    return ranks, copies

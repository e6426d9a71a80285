"""The planner for one load on the host: plain lists, since tensor operations on so few numbers are all overhead.

It gives the placement of `balance/planner.py`, bit for bit, and is what a layer on the CPU calls.
"""

from bisect import insort

import torch

from equipoise.balance.plan import Copy, Placement, placement_from_copies
from equipoise.balance.protocol import PPM, PlannerSettings, check_counts, check_sizes
from equipoise.balance.rules import HUGE, TARGET_STEPS, VARIANTS, Variant


def plan_load(load_E: torch.Tensor, num_ranks: int, settings: PlannerSettings) -> Placement:
    """The placement for one load (integer tensor [E] on the CPU); see `balance/rules.py` for which one."""
    check_sizes(load_E.shape[0], num_ranks, settings)
    load = load_E.tolist()
    check_counts(min(load), sum(load))
    num_masters = len(load) // num_ranks
    home = [load[first : first + num_masters] for first in range(0, len(load), num_masters)]
    copies = search(home, settings) if num_ranks > 1 and settings.num_slots else []
    return placement_from_copies(load, num_ranks, settings.num_slots, copies, load_E.device)


def search(home: list[list[int]], settings: PlannerSettings) -> list[Copy]:
    """The winner's copies for the tokens of each rank's experts; empty when nothing is to move."""
    ranks = [sum(tokens) for tokens in home]
    size = settings.domain_size or len(ranks)
    total = max(sum(ranks[first : first + size]) for first in range(0, len(ranks), size))
    floor = -(-total // size)
    tolerated = max(total * (PPM + settings.tolerance_ppm) // (size * PPM), floor)
    best: tuple[int, int, int, int] = (max(*ranks, tolerated), 0, 0, 0)
    winner: list[Copy] = []
    start = None
    for number in range(1, len(TARGET_STEPS) + 2):
        if number == 1:
            target = tolerated
        else:
            if start is None:
                start = max(tolerated, floor, _slot_bound(home, ranks, settings.num_slots))
            target = start + (start * TARGET_STEPS[number - 2] >> 20)
        if target + settings.copy_tokens >= best[0]:
            if number > 1:
                break
            continue
        if settings.copy_tokens and _least_score(home, ranks, target, settings.copy_tokens) >= best[0]:
            continue
        for index, variant in enumerate(VARIANTS):
            found = _run(home, ranks, target, variant, settings, (number, index), best)
            if found is not None:
                best, winner = found
    return winner


def _slot_bound(home: list[list[int]], ranks: list[int], num_slots: int) -> int:
    """The bound of `balance/bounds.py`, by bisection: the smallest load at which slots can take every excess."""
    hosted = sum(sorted((tokens for rank in home for tokens in rank), reverse=True)[:num_slots])
    low, high = min(ranks), max(ranks)
    while low < high:
        middle = (low + high) // 2
        if sum(min(middle - load, hosted) for load in ranks) >= 0:
            high = middle
        else:
            low = middle + 1
    return low


def _least_score(home: list[list[int]], ranks: list[int], target: int, copy_tokens: int) -> int:
    """No candidate with this target has a lower score, whether it reaches the target or not.

    Each overloaded rank sends some copies and keeps the rest of its load. A copy takes at most one expert's tokens, and
    at most the room of the emptiest rank: no rank's load ever falls below the smallest of the input, since a giver
    keeps at least what the receiver had.
    """
    room, least = target - min(ranks), target
    for load, sizes in zip(ranks, home):
        if load > target:
            tokens = min(room, max(sizes))
            sent, rest = divmod(load - target, tokens)
            enough = target + copy_tokens * (sent + (rest > 0))
            short = load - sent * tokens + copy_tokens * sent
            least = max(least, min(load, enough, short))
    return least


def _run(
    home: list[list[int]],
    ranks: list[int],
    target: int,
    variant: Variant,
    settings: PlannerSettings,
    place: tuple[int, int],
    best: tuple[int, int, int, int],
) -> tuple[tuple[int, int, int, int], list[Copy]] | None:
    """One candidate, at `place` (target, variant): its key and copies, or None as soon as it cannot beat `best`."""
    num_slots, min_tokens, domain_size = settings.num_slots, settings.min_tokens, settings.domain_size
    copy_tokens = settings.copy_tokens
    number, index = place
    num_masters = len(home[0])
    load, left = list(ranks), list(home)  # a giver's list is copied when it first gives
    free = [num_slots] * len(ranks)
    sent = [0] * len(ranks)
    open_ranks = [rank for rank, tokens in enumerate(load) if tokens < target]
    fill = num_slots if variant.fill < 0 else variant.fill
    copies: list[Copy] = []
    pair: tuple[int, int] | None = None
    busiest = 0
    while True:
        top = max(load)
        # With as many copies as the best so far, or an equal score, one more copy decides against this candidate.
        bound = (target + copy_tokens * busiest, number, len(copies), index)
        if bound >= best:
            return None
        if top <= target:
            break
        if pair is not None:
            giver = pair[0]
        elif variant.giver > 0:
            giver = load.index(top)
        else:
            giver = load.index(min(tokens for tokens in load if tokens > target))
        sizes = left[giver]
        want = max(load[giver] - target, min_tokens)

        if pair is not None:
            receiver = pair[1]
        else:
            receivers = open_ranks
            if domain_size:
                domain = giver // domain_size
                receivers = [rank for rank in open_ranks if rank // domain_size == domain]
            if not receivers:
                break
            if variant.receiver == "fit":
                enough = min(want, max(sizes))
            else:
                enough = HUGE if variant.receiver == "large" else min_tokens
            full = target - enough  # loads up to this leave enough room
            fullest, emptiest, receiver, fallback = -1, target, -1, -1
            for rank in receivers:
                tokens = load[rank]
                if tokens <= full and tokens > fullest:
                    fullest, receiver = tokens, rank
                if tokens < emptiest:
                    emptiest, fallback = tokens, rank
            if receiver < 0:
                receiver = fallback
        space = target - load[receiver]

        move = space if free[receiver] <= fill else min(want, space)
        sufficient = [tokens for tokens in sizes if tokens >= move]
        tokens = min(sufficient) if sufficient else max(sizes)
        move = min(move, tokens)
        if move < min_tokens:
            break
        local = sizes.index(tokens)

        if left[giver] is home[giver]:
            left[giver] = list(sizes)
        left[giver][local] -= move
        if load[giver] >= target > load[giver] - move and free[giver]:
            insort(open_ranks, giver)
        load[giver] -= move
        load[receiver] += move
        free[receiver] -= 1
        if not free[receiver] or load[receiver] == target:
            open_ranks.remove(receiver)
        copies.append((giver * num_masters + local, receiver, move))
        sent[giver] += 1
        busiest = max(busiest, sent[giver], num_slots - free[receiver])
        is_pair = variant.fill < 0 and space - move >= min_tokens and free[receiver]
        pair = (giver, receiver) if is_pair else None
    key = (max(max(load), target) + copy_tokens * busiest, number, len(copies), index)
    return (key, copies) if key < best else None

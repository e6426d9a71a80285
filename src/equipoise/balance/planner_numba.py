"""The planner for many loads on the host, compiled by numba: the list form of `balance/planner_host.py` over arrays.

It gives the same placements, bit for bit, for studies of tens of thousands of loads. Training never imports it.

Shapes: B loads, P ranks, E experts, M masters and R slots per rank, S = P * R slots, V rules, K steps of the target.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import torch

from equipoise.balance.plan import INT32_MAX, Placement
from equipoise.balance.protocol import PPM, PlannerSettings, check_counts, check_sizes
from equipoise.balance.rules import COPIES_BITS, HUGE, TARGET_BITS, TARGET_STEPS, VARIANT_BITS, VARIANTS

_FIT, _LARGE, _SMALL = 0, 1, 2
_KINDS = {"fit": _FIT, "large": _LARGE, "small": _SMALL}
_RULES_V3 = np.array([(v.giver, _KINDS[v.receiver], v.fill) for v in VARIANTS], np.int64)
_STEPS_K = np.array(TARGET_STEPS, np.int64)
_AFTER_NUMBER = COPIES_BITS + VARIANT_BITS
_AFTER_SCORE = TARGET_BITS + _AFTER_NUMBER


def jit(function: Callable) -> Callable:
    """Compiled at its first call, and kept on disk where there is a place for it."""
    try:
        return numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return numba.njit(nogil=True, error_model="numpy")(function)


def plan_batch(
    load_BE: torch.Tensor, num_ranks: int, settings: PlannerSettings, num_threads: int | None = None
) -> Placement:
    """Placements of B loads (integer tensor [B, E] on the CPU), on `num_threads` cores (default: all).

    Raises `ConfigError` for what cannot be served (see `check_sizes`, `check_counts`).
    """
    B, E = load_BE.shape
    check_sizes(E, num_ranks, settings)
    if load_BE.numel():
        check_counts(int(load_BE.min()), int(load_BE.sum(1).max()))
    P, R, M = num_ranks, settings.num_slots, E // num_ranks
    loads = np.ascontiguousarray(load_BE.numpy(), np.int64)
    slots_BS = np.full((B, P * R), -1, np.int32)
    quota_BI = np.zeros((B, P * (M + R)), np.int32)
    numbers = (settings.tolerance_ppm, settings.min_tokens, settings.domain_size or P, settings.copy_tokens)

    def run(part: slice) -> None:
        _plan_part(loads[part], slots_BS[part], quota_BI[part], P, R, *numbers, _RULES_V3, _STEPS_K)

    in_parts(run, B, num_threads)
    return Placement(torch.from_numpy(slots_BS), torch.from_numpy(quota_BI), P, E)


def in_parts(run: Callable[[slice], None], count: int, num_threads: int | None = None) -> None:
    """Calls `run` with consecutive parts of `count` items, on several threads."""
    threads = num_threads or len(os.sched_getaffinity(0))
    size = max(1, -(-count // (4 * threads)))
    parts = [slice(first, first + size) for first in range(0, count, size)]
    if threads == 1 or len(parts) == 1:
        for part in parts:
            run(part)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, parts))


@jit
def _plan_part(
    load_BE, slots_BS, quota_BI, num_ranks, num_slots, tolerance_ppm, min_tokens, domain, copy_tokens, rules_V3, steps_K
):
    B, E = load_BE.shape
    P, R = num_ranks, num_slots
    M = E // P
    home_PM = np.empty((P, M), np.int64)
    ranks_P = np.empty(P, np.int64)
    left_PM = np.empty((P, M), np.int64)
    load_P = np.empty(P, np.int32)  # counts fit (check_counts), and a search of narrow numbers is vectorised
    free_P = np.empty(P, np.int64)
    sent_P = np.empty(P, np.int64)
    open_P = np.empty(P, np.int64)
    moves_S3 = np.empty((max(1, P * R), 3), np.int64)
    best_S3 = np.empty((max(1, P * R), 3), np.int64)
    filled_P = np.empty(P, np.int64)
    for b in range(B):
        for p in range(P):
            total = 0
            for m in range(M):
                tokens = load_BE[b, p * M + m]
                home_PM[p, m] = tokens
                quota_BI[b, p * (M + R) + m] = tokens
                total += tokens
            ranks_P[p] = total
            filled_P[p] = 0
        if P == 1 or R == 0:
            continue
        count = _search(
            home_PM, ranks_P, R, tolerance_ppm, min_tokens, domain, copy_tokens, rules_V3, steps_K,
            left_PM, load_P, free_P, sent_P, open_P, moves_S3, best_S3,
        )  # fmt: skip
        for i in range(count):
            expert, rank, tokens = best_S3[i, 0], best_S3[i, 1], best_S3[i, 2]
            slot = filled_P[rank]
            filled_P[rank] += 1
            slots_BS[b, rank * R + slot] = expert
            quota_BI[b, rank * (M + R) + M + slot] = tokens
            quota_BI[b, expert // M * (M + R) + expert % M] -= tokens


@jit
def _search(
    home_PM, ranks_P, R, tolerance_ppm, min_tokens, domain, copy_tokens, rules_V3, steps_K,
    left_PM, load_P, free_P, sent_P, open_P, moves_S3, best_S3,
):  # fmt: skip
    """The winner's copies in `best_S3`; returns their number."""
    P = ranks_P.shape[0]
    total = 0
    for first in range(0, P, domain):
        total = max(total, ranks_P[first : first + domain].sum())
    floor = (total + domain - 1) // domain
    tolerated = max(total * (PPM + tolerance_ppm) // (domain * PPM), floor)
    best = max(ranks_P.max(), tolerated) << _AFTER_SCORE
    count = 0
    start = -1
    for number in range(1, steps_K.shape[0] + 2):
        if number == 1:
            target = tolerated
        else:
            if start < 0:
                start = max(max(tolerated, floor), _slot_bound(home_PM, ranks_P, R))
            target = start + (start * steps_K[number - 2] >> 20)
        if target + copy_tokens >= best >> _AFTER_SCORE:
            if number > 1:
                break
            continue
        if copy_tokens > 0 and _least_score(home_PM, ranks_P, target, copy_tokens) >= best >> _AFTER_SCORE:
            continue
        for index in range(rules_V3.shape[0]):
            key, moved = _run(
                home_PM, ranks_P, target, rules_V3[index], R, min_tokens, domain, copy_tokens, number, index, best,
                left_PM, load_P, free_P, sent_P, open_P, moves_S3,
            )  # fmt: skip
            if key >= 0:
                best, count = key, moved
                best_S3[:moved] = moves_S3[:moved]
    return count


@jit
def _slot_bound(home_PM, ranks_P, R):
    sizes = np.sort(home_PM.ravel())
    hosted = sizes[max(0, sizes.shape[0] - R) :].sum()
    low, high = ranks_P.min(), ranks_P.max()
    while low < high:
        middle = (low + high) // 2
        surplus = 0
        for load in ranks_P:
            surplus += min(middle - load, hosted)
        if surplus >= 0:
            high = middle
        else:
            low = middle + 1
    return low


@jit
def _least_score(home_PM, ranks_P, target, copy_tokens):
    room, least = target - ranks_P.min(), target
    for p in range(ranks_P.shape[0]):
        load = ranks_P[p]
        if load > target:
            tokens = min(room, home_PM[p].max())
            sent, rest = (load - target) // tokens, (load - target) % tokens
            enough = target + copy_tokens * (sent + (rest > 0))
            short = load - sent * tokens + copy_tokens * sent
            least = max(least, min(load, min(enough, short)))
    return least


@jit
def _run(
    home_PM, ranks_P, target, rule, R, min_tokens, domain, copy_tokens, number, index, best,
    left_PM, load_P, free_P, sent_P, open_P, moves_S3,
):  # fmt: skip
    """One candidate: its key and how many moves are in `moves_S3`; a key of -1 when it cannot beat `best`."""
    P, M = home_PM.shape
    giver_first, kind, fill = rule[0], rule[1], rule[2]
    keeps_pair = fill < 0
    if keeps_pair:
        fill = R
    left_PM[:] = home_PM
    num_open = 0  # ranks below the target with a free slot, ascending
    for p in range(P):
        load_P[p] = ranks_P[p]
        free_P[p] = R
        sent_P[p] = 0
        if ranks_P[p] < target:
            open_P[num_open] = p
            num_open += 1
    tail = (number << _AFTER_NUMBER) + index
    count, busiest = 0, 0
    is_pair, giver, receiver = False, 0, 0
    limit = np.int32(target)  # below the input's largest load, or this candidate could not win
    while True:
        top = _largest(load_P)
        if ((target + copy_tokens * busiest) << _AFTER_SCORE) + (count << VARIANT_BITS) + tail >= best:
            return -1, 0
        if top <= limit:
            break
        if not is_pair:
            giver = 0
            if giver_first > 0:
                while load_P[giver] != top:
                    giver += 1
            else:
                least = _least_above(load_P, limit)
                while load_P[giver] != least:
                    giver += 1
        given = np.int64(load_P[giver])
        want = max(given - target, min_tokens)
        largest = 0
        for m in range(M):
            largest = max(largest, left_PM[giver, m])
        if not is_pair:
            if kind == _FIT:
                full = target - min(want, largest)  # loads up to this leave enough room
            elif kind == _LARGE:
                full = -1
            else:
                full = target - min_tokens
            fullest, emptiest, receiver, fallback = -1, target, -1, -1
            home = giver // domain
            for i in range(num_open):
                p = open_P[i]
                if domain < P and p // domain != home:
                    continue
                held = np.int64(load_P[p])
                if fullest < held <= full:
                    fullest, receiver = held, p  # type: ignore[assignment]
                if held < emptiest:
                    emptiest, fallback = held, p
            if receiver < 0:
                receiver = fallback
            if receiver < 0:
                break
        space = target - np.int64(load_P[receiver])
        move = space if free_P[receiver] <= fill else min(want, space)
        local, tokens = -1, HUGE
        for m in range(M):
            if move <= left_PM[giver, m] < tokens:
                tokens, local = left_PM[giver, m], m
        if local < 0:
            tokens = largest
            local = 0
            while left_PM[giver, local] != largest:
                local += 1
        move = min(move, tokens)
        if move < min_tokens:
            break
        left_PM[giver, local] -= move
        load_P[giver] = given - move
        load_P[receiver] += move
        free_P[receiver] -= 1
        if given >= target > given - move and free_P[giver] > 0:
            num_open = _insert(open_P, num_open, giver)
        if free_P[receiver] == 0 or load_P[receiver] == limit:
            num_open = _remove(open_P, num_open, receiver)
        moves_S3[count, 0] = giver * M + local
        moves_S3[count, 1] = receiver
        moves_S3[count, 2] = move
        count += 1
        sent_P[giver] += 1
        busiest = max(busiest, max(sent_P[giver], R - free_P[receiver]))
        is_pair = keeps_pair and space - move >= min_tokens and free_P[receiver] > 0
    score = max(np.int64(_largest(load_P)), target) + copy_tokens * busiest
    key = (score << _AFTER_SCORE) + (count << VARIANT_BITS) + tail
    return (key, count) if key < best else (-1, 0)


@jit
def _largest(load_P):
    top = np.int32(0)
    for load in load_P:
        top = max(top, load)
    return top


@jit
def _least_above(load_P, limit):
    least = np.int32(INT32_MAX)
    for load in load_P:
        least = min(least, load if load > limit else np.int32(INT32_MAX))
    return least


@jit
def _insert(open_P, num_open, rank):
    place = num_open
    while place > 0 and open_P[place - 1] > rank:
        open_P[place] = open_P[place - 1]
        place -= 1
    open_P[place] = rank
    return num_open + 1


@jit
def _remove(open_P, num_open, rank):
    place = 0
    while open_P[place] != rank:
        place += 1
    for i in range(place, num_open - 1):
        open_P[i] = open_P[i + 1]
    return num_open - 1

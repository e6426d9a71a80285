"""The planner: exact loads to quotas, in integers, identical on every rank and device.

Load moves as quotas. An overloaded rank (the giver) hands tokens of one of its experts to a slot of a rank below the
target. It may give more than its excess, fall below the target and receive later: this is how Vose builds alias
tables, and why as many slots as masters (R = M) always reach the mean exactly. How well a fixed rule does depends on
the target and on its choices, so several rules (variants) run for many targets. These candidates are independent and
form one batch dimension of fixed-size vector operations; the best result wins, so nothing is bisected.

Every choice takes the lowest index among equals. The result does not depend on the batch or on the device.

Shapes: B loads, N candidates, P ranks, E experts, M = E / P masters and R slots per rank, S = P * R moves at most.
"""

from functools import lru_cache
from importlib.util import find_spec
from typing import NamedTuple

import torch

from equipoise.balance.bounds import lower_bound, rank_load
from equipoise.balance.plan import Placement, empty_placement
from equipoise.balance.planner_host import plan_load
from equipoise.balance.protocol import PPM, PlannerSettings, check_counts, check_sizes
from equipoise.balance.rules import COPIES_BITS, HUGE, TARGET_BITS, TARGET_STEPS, VARIANT_BITS, VARIANTS

WAVES = (slice(0, 8), slice(8, 32), slice(32, len(TARGET_STEPS)))
"""Targets that are tried together, after the tolerated load alone. A wave runs if its lowest target can still win."""

RANK_BITS = TARGET_BITS + COPIES_BITS + VARIANT_BITS


class _Moves(NamedTuple):
    """The log of a plan, one column per candidate or load: unused entries have 0 tokens.

    expert_SN: logical expert; slot_SN: rank * R + slot that hosts it; tokens_SN: its quota there. int64.
    """

    expert_SN: torch.Tensor
    slot_SN: torch.Tensor
    tokens_SN: torch.Tensor

    def select(self, index_B: torch.Tensor) -> "_Moves":
        return _Moves(*(x.index_select(1, index_B) for x in self))


def plan_loads(
    load_BE: torch.Tensor, num_ranks: int, settings: PlannerSettings, reads_values: bool | None = None
) -> Placement:
    """Placements for B loads at once (integer tensor [B, E]); each equals that of its load alone.

    What is searched and which candidate wins is told in `balance/rules.py`. `reads_values` (default: on the CPU) lets
    the host look at values, to refuse bad ones and to stop the search as soon as it can; otherwise it runs for a fixed
    number of steps without host synchronization. Raises `ConfigError` for what cannot be served (see `check_sizes`,
    `check_counts`).
    """
    check_sizes(load_BE.shape[1], num_ranks, settings)
    load_BE = load_BE.long()
    on_host = load_BE.device.type == "cpu" if reads_values is None else reads_values
    if on_host and load_BE.numel():
        check_counts(int(load_BE.min()), int(load_BE.sum(1).max()))
    plan = empty_placement(load_BE, num_ranks, settings.num_slots)
    if num_ranks == 1 or settings.num_slots == 0 or load_BE.shape[0] == 0:
        return plan
    load_BP = rank_load(load_BE, num_ranks)
    start_B = tolerated_B = tolerated_load(load_BP, settings)
    best_B = load_BP.amax(1).maximum(tolerated_B) << RANK_BITS
    moves = _no_moves(load_BE, num_ranks * settings.num_slots)
    for wave in (None, *WAVES):
        lowest_B = start_B if wave is None else _raise_target(start_B, TARGET_STEPS[wave.start])
        is_open_B = lowest_B + settings.copy_tokens < best_B >> RANK_BITS
        rows = is_open_B.nonzero()[:, 0] if on_host else torch.arange(load_BE.shape[0], device=load_BE.device)
        if rows.numel() == 0:
            break
        if wave is None:
            first, target_BK = 1, tolerated_B[rows, None]
        else:
            if wave.start == 0:
                bound_B = lower_bound(load_BE[rows], num_ranks, settings.num_slots, settings.domain_size)
                start_B = start_B.index_copy(0, rows, bound_B.maximum(tolerated_B[rows]))
            first, target_BK = 2 + wave.start, _raise_target(start_B[rows, None], _target_steps(load_BE.device)[wave])
        key_B, found = _best_of(load_BE[rows], target_BK, first, num_ranks, settings, on_host)
        is_better_B = key_B < best_B[rows]
        best_B = best_B.index_copy(0, rows, key_B.minimum(best_B[rows]))
        for kept_SB, new_SB in zip(moves, found):
            kept_SB.index_copy_(1, rows, torch.where(is_better_B, new_SB, kept_SB[:, rows]))
    return _apply(plan, moves)


class ExactLoadPlanner:
    """The planner behind the public protocol. Keeps nothing between calls.

    One load on the CPU is planned by the list form of `balance/planner_host.py`, which gives the same placement sooner:
    whoever needs the plan on the host anyway does best to move the load there first, since on an accelerator this form
    launches some thousand small kernels.
    """

    def __call__(self, load_PE: torch.Tensor, settings: PlannerSettings) -> Placement:
        load_E = load_PE.sum(0)
        if load_E.device.type == "cpu":
            return plan_load(load_E, load_PE.shape[0], settings)
        return plan_loads(load_E[None], load_PE.shape[0], settings)[0]

    def plan_batch(self, load_BE: torch.Tensor, num_ranks: int, settings: PlannerSettings) -> Placement:
        """Many loads (integer tensor [B, E]) at once; each placement is that of its load alone. On the CPU the compiled
        form plans them, where numba is installed."""
        if load_BE.device.type == "cpu" and find_spec("numba"):
            from equipoise.balance.planner_numba import plan_batch

            return plan_batch(load_BE, num_ranks, settings)
        return plan_loads(load_BE, num_ranks, settings)


def tolerated_load(load_BP: torch.Tensor, settings: PlannerSettings) -> torch.Tensor:
    """int64 [B]: the largest rank load that needs no action, never below the mean of any domain."""
    size = settings.domain_size or load_BP.shape[1]
    total_B = load_BP.view(load_BP.shape[0], -1, size).sum(2).amax(1)
    return (total_B * (PPM + settings.tolerance_ppm) // (size * PPM)).maximum((total_B + size - 1) // size)


@lru_cache
def _target_steps(device: torch.device) -> torch.Tensor:
    return torch.tensor(TARGET_STEPS, device=device)


def _raise_target(start: torch.Tensor, step: torch.Tensor | int) -> torch.Tensor:
    return start + (start * step >> 20)


def _no_moves(load_BE: torch.Tensor, num_moves: int) -> _Moves:
    return _Moves(*(load_BE.new_zeros(num_moves, load_BE.shape[0]) for _ in range(3)))


def _best_of(
    load_BE: torch.Tensor,
    target_BK: torch.Tensor,
    first: int,
    num_ranks: int,
    settings: PlannerSettings,
    on_host: bool,
) -> tuple[torch.Tensor, _Moves]:
    """Runs all variants for K targets of each load; the winner's key [B] and its moves.

    A key is (score, target, copies, variant) in one integer; the first of these targets has the number `first`.
    """
    num_loads, num_targets = target_BK.shape
    num_candidates = num_targets * len(VARIANTS)
    target_N = target_BK.repeat_interleave(len(VARIANTS), 1).flatten()
    load_NE = load_BE.repeat_interleave(num_candidates, 0)
    top_N, moves = run_candidates(load_NE, target_N, num_ranks, settings, on_host)
    is_move_SN = moves.tokens_SN > 0
    score_N = top_N.maximum(target_N)
    if settings.copy_tokens:
        busiest_N = _busiest_rank(moves, is_move_SN, num_ranks, load_BE.shape[1], settings.num_slots)
        score_N = score_N + settings.copy_tokens * busiest_N
    candidate_C = torch.arange(num_candidates, device=load_BE.device)
    rank_C = (candidate_C // len(VARIANTS) + first << COPIES_BITS + VARIANT_BITS) + candidate_C % len(VARIANTS)
    key_BC = ((score_N << RANK_BITS) + (is_move_SN.sum(0) << VARIANT_BITS)).view(num_loads, num_candidates) + rank_C
    key_B, winner_B = key_BC.min(1)
    return key_B, moves.select(winner_B + torch.arange(num_loads, device=load_BE.device) * num_candidates)


def run_candidates(
    load_NE: torch.Tensor, target_N: torch.Tensor, num_ranks: int, settings: PlannerSettings, on_host: bool
) -> tuple[torch.Tensor, _Moves]:
    """Moves quotas of each candidate towards its target; its largest rank load [N] and its moves.

    Candidate n follows variant n modulo their number. Each step makes one move; a candidate ends when no rank is above
    the target or when the giver's turn finds no receiver. A receiver is never above the target and a rank without free
    slots never is, so one expert never moves to one rank twice.
    """
    N, E = load_NE.shape
    P, R, M = num_ranks, settings.num_slots, E // num_ranks
    min_tokens, domain_size = settings.min_tokens, settings.domain_size
    device = load_NE.device
    giver_N1, fit_N, threshold_N, fill_N, is_pair_N = _variant_columns(N, R, min_tokens, device)
    first_P_N = torch.arange(N, device=device) * P
    home_NPM = load_NE.clone().view(N * P, M)
    room_NP = target_N[:, None] - load_NE.view(N, P, M).sum(2)
    free_NP = torch.full((N, P), R, dtype=torch.int64, device=device)
    domain_P = torch.arange(P, device=device) // domain_size if domain_size else None
    live_N = torch.ones(N, dtype=torch.bool, device=device)
    pair_N = ~live_N
    from_N = to_N = None
    log = []
    for _ in range(P * R):
        worst_N, giver_N = torch.where(room_NP < 0, room_NP * giver_N1, HUGE).min(1)
        if R > 1 and from_N is not None:
            giver_N = torch.where(pair_N, from_N, giver_N)
        excess_N = -room_NP.gather(1, giver_N[:, None])[:, 0]
        size_NM = home_NPM.index_select(0, first_P_N + giver_N)

        open_NP = torch.where(free_NP > 0, room_NP, -1)
        if domain_P is not None:
            open_NP = torch.where(domain_P == (giver_N // domain_size)[:, None], open_NP, -1)
        want_N = excess_N.clamp(min=min_tokens)
        enough_N = torch.where(fit_N, want_N.minimum(size_NM.amax(1)), threshold_N)
        receiver_N = torch.where(open_NP >= enough_N[:, None], HUGE - open_NP, open_NP).argmax(1)
        if R > 1 and to_N is not None:
            receiver_N = torch.where(pair_N, to_N, receiver_N)
        receiver_N1 = receiver_N[:, None]
        space_N = open_NP.gather(1, receiver_N1)[:, 0]
        slots_N = free_NP.gather(1, receiver_N1)[:, 0]

        move_N = torch.where(slots_N <= fill_N, space_N, want_N.minimum(space_N))
        local_N1 = torch.where(size_NM >= move_N[:, None], HUGE - size_NM, size_NM).argmax(1, keepdim=True)
        move_N = move_N.minimum(size_NM.gather(1, local_N1)[:, 0])
        live_N = live_N & (worst_N < HUGE) & (move_N >= min_tokens)
        if on_host and not live_N.any():
            break
        move_N = move_N * live_N

        moved_N1, expert_N = move_N[:, None], giver_N * M + local_N1[:, 0]
        log.append((expert_N, receiver_N * R + R - slots_N, move_N))
        room_NP.scatter_add_(1, receiver_N1, -moved_N1).scatter_add_(1, giver_N[:, None], moved_N1)
        home_NPM.view(N, E).scatter_add_(1, expert_N[:, None], -moved_N1)
        free_NP.scatter_add_(1, receiver_N1, -live_N.long()[:, None])
        if R > 1:
            pair_N = is_pair_N & live_N & (space_N - move_N >= min_tokens) & (slots_N > 1)
            from_N, to_N = giver_N, receiver_N
    moves = _no_moves(load_NE, P * R)
    for column, entries in zip(moves, zip(*log)):
        torch.stack(entries, out=column[: len(entries)])
    return target_N - room_NP.amin(1), moves


@lru_cache
def _variant_columns(num_candidates: int, num_slots: int, min_tokens: int, device: torch.device) -> tuple:
    """The variants' choices as columns over the candidates."""
    threshold = {"fit": 0, "large": HUGE, "small": min_tokens}
    rows = [
        (v.giver, v.receiver == "fit", threshold[v.receiver], num_slots if v.fill < 0 else v.fill, v.fill < 0)
        for v in VARIANTS
    ]
    table = torch.tensor(rows, device=device).T.repeat(1, num_candidates // len(VARIANTS))
    return table[0][:, None], table[1].bool(), table[2], table[3], table[4].bool()


def _busiest_rank(
    moves: _Moves, is_move_SN: torch.Tensor, num_ranks: int, num_experts: int, num_slots: int
) -> torch.Tensor:
    """int64 [N]: the most copies that one rank sends or receives."""
    sent_NP = is_move_SN.new_zeros(is_move_SN.shape[1], num_ranks, dtype=torch.int64)
    received_NP = sent_NP.clone()
    sent_NP.scatter_add_(1, (moves.expert_SN // (num_experts // num_ranks)).T, is_move_SN.long().T)
    received_NP.scatter_add_(1, (moves.slot_SN // num_slots).T, is_move_SN.long().T)
    return sent_NP.maximum(received_NP).amax(1)


def _apply(plan: Placement, moves: _Moves) -> Placement:
    """The empty placement with the moves of each load made."""
    P, R, M = plan.num_ranks, plan.num_slots, plan.num_masters
    expert_BS, slot_BS, tokens_BS = (x.T for x in moves)
    is_move_BS = tokens_BS > 0
    spare_BS = torch.where(is_move_BS, slot_BS, P * R)  # unused entries write to a column of their own
    slot_expert = torch.cat([plan.slot_expert, plan.slot_expert[:, :1]], 1)
    slot_expert = slot_expert.scatter(1, spare_BS, expert_BS.int())[:, : P * R]
    physical_BS = slot_BS // R * (M + R) + M + slot_BS % R
    home_BS = expert_BS // M * (M + R) + expert_BS % M
    quota = plan.quota.scatter_add(1, home_BS, -tokens_BS.int()).scatter_add(1, physical_BS, tokens_BS.int())
    return Placement(slot_expert.contiguous(), quota, P, plan.num_experts)

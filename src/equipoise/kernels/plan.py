"""The whole plan of one rank in one kernel: placement, quotas, sends and receives from the load matrix.

The result is that of `balance/planner.py: plan_loads` and then `balance/splits.py: complete_plan`, bit for bit; these
are its references. Rules and targets come from the caller (`balance/rules.py`): nothing is decided here.
"""

from typing import Any, NamedTuple

import torch

from equipoise.kernels.launching import Launcher, launch
from equipoise.kernels.operators import operator
from equipoise.kernels.peers import Signals
from equipoise.kernels.triton_support import triton_problem

MAX_RANKS, MAX_EXPERTS, MAX_SLOTS = 256, 1024, 2**12
"""What one warp holds in registers: ranks, experts, and slots of all ranks."""

FINISHER_LOCALS = 2
"""Physical experts of one program that writes the plan, a power of 2."""
MAX_LANE_EXPERTS = 32
"""Experts in one lane up to which whole ranks are laid over a warp's lanes; else the lanes share them out."""
COUNTERS = 544
"""int64 at the beginning of the workspace that hold counters; see `kernels/plan_triton.py`."""
MAX_OWN_SUMS = 1024
"""Largest load matrix that every candidate adds up by itself."""


def _padded(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()


def plan_problem(device_type: str, num_ranks: int, num_experts: int, num_slots: int) -> str | None:
    """None if the kernel serves these sizes on such a device, otherwise the reason."""
    problem = triton_problem(device_type)
    if problem is not None:
        return problem
    if num_ranks > MAX_RANKS or num_experts > MAX_EXPERTS:
        return f"the plan kernel takes up to {MAX_RANKS} ranks and {MAX_EXPERTS} experts"
    if num_ranks * num_slots > MAX_SLOTS:
        return f"the plan kernel takes up to {MAX_SLOTS} slots of all ranks, not {num_ranks * num_slots}"
    return None


def make_plan_workspace(
    num_ranks: int, num_experts: int, num_slots: int, num_candidates: int, device: torch.device
) -> torch.Tensor:
    """Scratch memory of `plan` (int64, zeros): counters, which every launch leaves at 0 again, and logs of moves.

    Launches that can overlap, as on different streams, need one each.
    """
    size = COUNTERS + num_experts + num_candidates * num_ranks * num_slots
    return torch.zeros(size, dtype=torch.int64, device=device)


class PlanTables(NamedTuple):
    """What the kernel needs beside the load.

    rules_V4: int32 [V, 4], V <= 8: the giver's sign; whether the receiver is the closest fit for what is to move; else
        the room that is enough (-1: `min_tokens`); fill. See `Variant` of balance/rules.py.
    steps_K: int32 [K], K <= 254: rises of the targets after the tolerated load, in 2**-20.
    workspace: from `make_plan_workspace` for (K + 1) * V candidates.
    """

    rules_V4: torch.Tensor
    steps_K: torch.Tensor
    workspace: torch.Tensor


class PlanTerms(NamedTuple):
    """Whose sends and receives, and the fields of `PlannerSettings` of balance/protocol.py."""

    rank: int
    num_slots: int
    tolerance_ppm: int
    min_tokens: int
    domain_size: int
    copy_tokens: int


_Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def plan(load_PE: torch.Tensor, tables: PlanTables, terms: PlanTerms) -> _Parts:
    """One launch, no host sync, the same bits every time.

    Args:
        load_PE: int32, contiguous; tokens of each source rank for each expert, none negative, at most 2**31 - 1 in all
            (not checked: that would be a host sync).

    Returns:
        slot_expert int32 [P*R], quota int32 [P*(M+R)], send int32 [P*(M+R)], recv int32 [P, M+R].
    """
    return _plan(load_PE, *tables, *terms)


@operator("plan", mutates_args=("workspace",))
def _plan(
    load_PE: torch.Tensor,
    rules_V4: torch.Tensor,
    steps_K: torch.Tensor,
    workspace: torch.Tensor,
    rank: int,
    num_slots: int,
    tolerance_ppm: int,
    min_tokens: int,
    domain_size: int,
    copy_tokens: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """An operator's arguments are single tensors and numbers: the fields of `PlanTables` and `PlanTerms`."""
    assert load_PE.dtype == torch.int32, load_PE.dtype
    assert load_PE.is_contiguous()
    P, E = load_PE.shape
    out = _outputs(load_PE, P, E, num_slots)
    tables = PlanTables(rules_V4, steps_K, workspace)
    terms = PlanTerms(rank, num_slots, tolerance_ppm, min_tokens, domain_size, copy_tokens)
    kernel, programs, bound, constants = _problem(P, E, tables, terms, None)
    launch(kernel, programs, (*bound, load_PE, *out, out[1], load_PE), 1, **constants)
    return out


class CountExchange(NamedTuple):
    """The memory through which the ranks of a group exchange counts, on a channel of the signals.

    tables_P: addresses of every rank's int32 [2, P, E].
    """

    signals: Signals
    channel: int
    tables_P: torch.Tensor


class ExchangedPlan(NamedTuple):
    """What `plan` returns, and two more: before_J int32 [P*(M+R)], sends of the ranks before this one to each physical
    expert; load_E int32, tokens of each expert."""

    slot_expert: torch.Tensor
    quota: torch.Tensor
    send: torch.Tensor
    recv: torch.Tensor
    before_J: torch.Tensor
    load_E: torch.Tensor


class ExchangedPlanner:
    """`plan` from each rank's own counts: the same launch gets the other ranks'. Made and called by all ranks of the
    group together; the wait for a rank is bounded and reported as in `kernels/signals_triton.py`."""

    def __init__(
        self, num_ranks: int, num_experts: int, exchange: CountExchange, tables: PlanTables, terms: PlanTerms
    ) -> None:
        kernel, self._programs, bound, constants = _problem(num_ranks, num_experts, tables, terms, exchange)
        self._launch = Launcher(kernel, 1, bound, **constants)
        self._num_ranks, self._num_experts, self._num_slots = num_ranks, num_experts, terms.num_slots

    def __call__(self, counts_E: torch.Tensor) -> ExchangedPlan:
        """`counts_E`: int32, contiguous, this rank's tokens for each expert."""
        assert counts_E.dtype == torch.int32, counts_E.dtype
        assert counts_E.is_contiguous()
        out = _outputs(counts_E, self._num_ranks, self._num_experts, self._num_slots)
        made = ExchangedPlan(*out, torch.empty_like(out[1]), torch.empty_like(counts_E))
        self._launch(self._programs, counts_E, *made)
        return made


def _problem(
    P: int, E: int, tables: PlanTables, terms: PlanTerms, exchange: CountExchange | None
) -> tuple[Any, int, tuple[Any, ...], dict[str, Any]]:
    """Kernel, grid, first arguments and constants for all loads of one size."""
    from equipoise.kernels.plan_triton import COLUMNS, plan_kernel

    rules_V4, steps_K, workspace = tables
    R, M = terms.num_slots, E // P
    num_targets, num_variants = steps_K.numel() + 1, rules_V4.shape[0]
    assert workspace.numel() >= COUNTERS + E + num_targets * num_variants * P * R, "the workspace is another problem's"
    exchanging: tuple[Any, ...] = workspace, workspace, workspace, 0  # not used
    if exchange is not None:
        signals = exchange.signals
        exchanging = signals.control, signals.pads_P, exchange.tables_P, exchange.channel
    rank_pad = max(_padded(P), 32)  # below a warp's 32 lanes, reductions are slower
    masters_pad = max(_padded(M), 2)  # with an axis of one element, Triton 3.6 compiles wrong code
    parts = -(-(M + R) // FINISHER_LOCALS)
    own_sums = P * E <= MAX_OWN_SUMS
    exchangers, summers = 0 if exchange is None else P, 0 if own_sums else -(-E // COLUMNS.value)
    programs = exchangers + summers + num_targets * num_variants + 2 * parts * P + 1
    numbers = terms.rank, terms.tolerance_ppm, terms.min_tokens, terms.copy_tokens, num_targets
    constants = {
        "P": P,
        "E": E,
        "R": R,
        "DOMAIN": terms.domain_size or P,
        "NUM_VARIANTS": num_variants,
        "OWN_SUMS": own_sums,
        "HAS_COPY_TIME": terms.copy_tokens > 0,
        "LANES": rank_pad * masters_pad <= 32 * MAX_LANE_EXPERTS,
        "P_PAD": rank_pad,
        "M_PAD": masters_pad,
        "LOCALS": FINISHER_LOCALS,
        "PARTS": parts,
        "S_PAD": max(_padded(P * R), 2),
        "RANK_BITS": rank_pad.bit_length() - 1,
        "SLOT_BITS": R.bit_length() if R > 1 else 0,
        "MASTER_BITS": masters_pad.bit_length() - 1,
        "HAS_EXCHANGE": exchange is not None,
        "E_PAD": max(_padded(E), 2),
    }
    return plan_kernel, programs, (*tables, *numbers, *exchanging), constants


def _outputs(like: torch.Tensor, P: int, E: int, num_slots: int) -> _Parts:
    num_locals = E // P + num_slots
    return (
        like.new_empty(P * num_slots, dtype=torch.int32),
        like.new_empty(P * num_locals, dtype=torch.int32),
        like.new_empty(P * num_locals, dtype=torch.int32),
        like.new_empty((P, num_locals), dtype=torch.int32),
    )


@torch.library.register_fake("equipoise::plan")
def _(load_PE, rules_V4, steps_K, workspace, rank, num_slots, *settings):
    return _outputs(load_PE, load_PE.shape[0], load_PE.shape[1], num_slots)
